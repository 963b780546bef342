"""The commands of the course, `python -m dlscale --help`: the only place that knows all of it."""

import argparse
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dlscale.collectives import command as measuring
from dlscale.course import grading, records
from dlscale.course.contents import contents
from dlscale.course.exercises import Exercise
from dlscale.lab import checks
from dlscale.parallel_training import command as training
from dlscale.sequence_models_and_serving import command as serving

ROOT = Path(__file__).resolve().parent.parent
TOOLS = {"measure": measuring, "train": training, "serve": serving}  # commands with many options of their own


def instances(kind: type, part: str) -> dict[str, Any]:
    """All of this kind that the modules called `part` of the rooms name, in the order of the course."""
    names = (f"dlscale.{book.room}.{part}" for book in contents())
    found = (entry for name in names if find_spec(name) for entry in vars(importlib.import_module(name)).values())
    return {entry.id: entry for entry in found if isinstance(entry, kind)}


def exercises() -> dict[str, Exercise]:
    """All exercises of the course by id."""
    return instances(Exercise, "exercises")


def experiments() -> dict[str, records.Experiment]:
    """All recorded experiments of the course by id."""
    return instances(records.Experiment, "experiment")


def duration(identity: str) -> str:
    """How long a recorded experiment took, from its record; "not recorded yet" if there is none."""
    try:
        seconds = sum(trial.seconds for trial in records.read(identity).trials)
    except FileNotFoundError:
        return "not recorded yet"
    return f"about {max(1, round(seconds / 60)):,} minutes of one core"


def run(identity: str | None, folder: Path) -> None:
    """Run a recorded experiment with progress; without an id, list them."""
    known = experiments()
    if identity is None:
        for entry in known.values():
            print(f"{entry.id}: {entry.about}; {duration(entry.id)}")
        return
    chosen = known[checks.known("experiment", identity, known)]
    with tqdm(desc=identity, unit=" trials") as bar:

        def tell(done: int, planned: int) -> None:
            bar.total = planned
            bar.update(done - bar.n)

        print(records.execute(chosen, folder, tell))


def main(arguments: list[str]) -> int:
    """Do what the arguments of the command line say and return an exit status."""
    if arguments and arguments[0] in TOOLS:
        return TOOLS[arguments[0]].main(arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m dlscale", description="The commands of the course.")
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser(
        "run",
        help="run a recorded experiment and renew its record",
        epilog="Example: python -m dlscale run precision-formats. It uses all cores and takes a minute to some hours; "
        "without an id, each experiment is listed with its time. Ctrl-C stops it, the same command goes on from there.",
    )
    one.add_argument("identity", metavar="id", nargs="?", help="which; without it, all are listed")
    one.add_argument("--folder", type=Path, default=records.results_folder(), help="of the records")
    one.set_defaults(work=run)
    many = commands.add_parser(
        "grade",
        help="grade a folder of submitted notebooks",
        description="Grade a folder of submitted notebooks, at any depth: alice/01_sgd.ipynb or alice_01_sgd.ipynb.",
        epilog="Example: python -m dlscale grade week3 --out week3.csv. A notebook takes some 10 to 60 seconds. Cells "
        "that students added or changed run, too, with your rights: grade in a container or a throw-away account.",
    )
    many.add_argument("folder", type=Path, help="of the submissions")
    many.add_argument(
        "--out",
        type=Path,
        default=Path("grades.csv"),
        help="the table (%(default)s); rows of other folders and columns of your own stay, and before a row is "
        "replaced the table is copied to %(default)s.old1",
    )
    many.add_argument("--seconds", type=float, default=60, help="of the processor, for each cell (%(default)g)")
    many.add_argument("--wall", type=float, default=600, help="seconds of the clock, for each answer (%(default)g)")
    many.add_argument("--memory", type=float, default=1500, help="megabytes, for each notebook (%(default)g)")
    many.add_argument("--notebooks", type=Path, default=ROOT / "notebooks", help="the course's own notebooks")
    many.set_defaults(work=lambda **options: grading.grade(exercises=exercises(), **options))
    for name, tool in TOOLS.items():
        commands.add_parser(name, help=tool.ABOUT)
    if not arguments:
        parser.print_help()
        return 0
    options = vars(parser.parse_args(arguments))
    try:
        return options.pop("work")(**options) or 0
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped: the same command goes on from here.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # in a file of another encoding than UTF-8
    sys.exit(main(sys.argv[1:]))
