"""The commands of the course, `python -m dlscale --help`: the only place that knows all of it."""

from __future__ import annotations

import argparse
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from tqdm.auto import tqdm

from dlscale.collectives import command
from dlscale.course import grading, records
from dlscale.course.contents import contents
from dlscale.course.exercises import Exercise
from dlscale.course.records import Experiment
from dlscale.lab import checks

ROOT = Path(__file__).resolve().parent.parent


def rooms(part: str) -> list[ModuleType]:
    """The module called `part` of each room that has one, in the order of the course."""
    names = [f"dlscale.{book.room}" for book in contents() if book.available]
    return [importlib.import_module(f"{name}.{part}") for name in names if find_spec(f"{name}.{part}")]


def exercises() -> dict[str, Exercise]:
    """All exercises of the course by id."""
    found = (entry for module in rooms("exercises") for entry in vars(module).values())
    return {entry.id: entry for entry in found if isinstance(entry, Exercise)}


def experiments() -> dict[str, Experiment]:
    """All recorded experiments of the course by id."""
    found = (entry for module in rooms("experiment") for entry in vars(module).values())
    return {entry.id: entry for entry in found if isinstance(entry, Experiment)}


def run(identity: str | None, folder: Path) -> int:
    """Run a recorded experiment with progress; without an id, list them."""
    if identity is None:
        print("\n".join(f"{entry.id}: {entry.about}" for entry in experiments().values()))
        return 0
    chosen = experiments()[checks.known("experiment", identity, experiments())]
    with tqdm(desc=identity, unit=" trials") as bar:

        def tell(done: int, planned: int) -> None:
            bar.total = planned
            bar.update(done - bar.n)

        print(records.execute(chosen, folder, tell))
    return 0


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["measure"]:  # it has many options of its own
        return command.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m dlscale", description="The commands of the course.")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="run a recorded experiment and renew its record")
    one.add_argument("identity", metavar="id", nargs="?", help="which; without it, all are listed")
    one.add_argument("--folder", type=Path, default=records.results_folder(), help="of the records")
    grade = commands.add_parser("grade", help="grade a folder of submitted notebooks; see dlscale.course.grading")
    grade.add_argument("folder", type=Path, help="submissions, at any depth: alice/01_sgd.ipynb or alice_01_sgd.ipynb")
    grade.add_argument("--out", type=Path, default=Path("grades.csv"))
    grade.add_argument("--seconds", type=float, default=60, help="of the processor, for each answer (%(default)g)")
    grade.add_argument("--wall", type=float, default=600, help="seconds of the clock, for each cell (%(default)g)")
    grade.add_argument("--memory", type=float, default=1500, help="megabytes, for each notebook (%(default)g)")
    grade.add_argument("--again", action="store_true", help="also what is graded already")
    commands.add_parser("measure", help="time collective operations; see `python -m dlscale measure --help`")
    grade.add_argument("--notebooks", type=Path, default=ROOT / "notebooks", help="the course's own notebooks")
    options = vars(parser.parse_args(arguments))
    try:
        match options.pop("command"):
            case "run":
                return run(**options)
            case _:
                limits = grading.Limits(*map(options.pop, grading.Limits._fields))
                grading.grade(**options, limits=limits, exercises=exercises())
                return 0
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped: the same command goes on from here.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
