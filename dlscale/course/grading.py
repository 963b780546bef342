"""Grades a folder of submitted notebooks: `python -m dlscale grade FOLDER`.

What is right in a student's notebook is to be right in the table. So the cells that the student wrote, or changed, are
run among the course's own cells, as far as the last answer, whatever an editor made of the file. They run in a process
of their own (`dlscale.course.sandbox`), which returns the answers; the checks stay here. A forged message is therefore
only another answer, and it must be right to score.

What this does not protect against: a submission runs with the rights of the person who grades. It can read and change
that person's files (this package too), use the network, fill the disk, and read the reference solutions, which come
with the course. `dlscale.lab.processes` says where it can also signal other processes. Grade in a container or in an
account that can be thrown away.
"""

import contextlib
import json
import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm.auto import tqdm

from dlscale.course import sources
from dlscale.course.contents import paths
from dlscale.course.exercises import Exercise, shorten
from dlscale.course.gradebook import Gradebook
from dlscale.course.sandbox import Sandbox
from dlscale.lab import checks
from dlscale.lab.processes import ChildEnded

MAX_FILE_BYTES = 50_000_000
MAX_LEFT_OUT = 3  # cells that are no answers and ended at a limit; then all such cells are left out
TAG = "answer-"
CHECK = re.compile(r"^.*\bexercises\.(\w+)\.check\(.*", re.MULTILINE)
ORDINARY = ("not yet:", "no answer yet")  # what is said of a wrong answer; anything else needs a look


class Cell(NamedTuple):
    """A code cell: the exercise that its tag names, its id in the notebook, its source."""

    tag: str | None
    id: str | None
    source: str


class Step(NamedTuple):
    """A cell to run: of the answer to the exercise `part`, another of the submission (its number), or the course's."""

    part: str | int | None
    source: str


def read_cells(path: Path) -> list[Cell]:
    """Return a notebook's code cells, without damaged ones. Raises ValueError for what is not a notebook."""
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"it is not a file of at most {MAX_FILE_BYTES / 1e6:g} MB")
    try:
        notebook = json.loads(path.read_bytes())  # UTF-8, UTF-16 or UTF-32, with or without a mark
    except (ValueError, RecursionError):
        notebook = None
    match notebook:
        case {"nbformat": int(version)} if version < 4:
            raise ValueError("the notebook is in an old format: open it in JupyterLab and save it again")
        case {"cells": [*cells]}:
            return [read for cell in cells if (read := _read_cell(cell))]
    raise ValueError("the file is damaged: it is no notebook")


def _read_cell(cell: Any) -> Cell | None:
    tags, identity = [], None
    match cell:
        case {"metadata": {"tags": [*tags]}}:
            tags = [tag.removeprefix(TAG) for tag in tags if isinstance(tag, str) and tag.startswith(TAG)]
    match cell:
        case {"id": str(identity)} | {"metadata": {"id": str(identity)}}:  # the second is Colab's
            pass
    match cell:
        case {"cell_type": "code", "source": str() | [*_] as source}:
            return Cell(next(iter(tags), None), identity, "".join(line for line in source if isinstance(line, str)))
    return None


def arrange(submitted: Sequence[Cell], pristine: Sequence[Cell], left_out: Collection[str | int]) -> list[Step]:
    """Put the cells that a student wrote or changed among the course's own, each where it stands; return what is run.

    An answer is known by its tag, its cell's id, or the call of its check, and may have several cells. One that has
    none is asked for all the same: other cells may give it. Of the answers that are left out the course's blank is run.
    """
    asked = {cell.tag: place for place, cell in enumerate(pristine) if cell.tag}
    called = {name: tag for tag, place in asked.items() for name in CHECK.findall(pristine[place].source)}
    by_id = {cell.id: place for place, cell in enumerate(pristine) if cell.id}
    by_words = {tuple(cell.source.split()): place for place, cell in enumerate(pristine)}
    theirs, present, last = defaultdict(list), set(), 0
    many = sum(isinstance(part, int) for part in left_out) > MAX_LEFT_OUT
    for number, cell in enumerate(submitted):
        same = by_words.get(tuple(cell.source.split()))
        place = by_id.get(cell.id, same)
        tags = [cell.tag, None if place is None else pristine[place].tag, *map(called.get, CHECK.findall(cell.source))]
        answer = next((tag for tag in tags if tag in asked), None)
        last = max(last, asked.get(answer, place or 0))
        present.add(answer)
        if answer or (same is None and not many):
            theirs[last].append(Step(answer or number, cell.source))
    steps = []
    for place, cell in enumerate(pristine):
        if not cell.tag or cell.tag in left_out:
            steps.append(Step(None, cell.source))
        elif cell.tag not in present:
            steps.append(Step(cell.tag, ""))
        steps += [step for step in theirs[place] if step.part not in left_out]
    while steps and not isinstance(steps[-1].part, str):
        steps.pop()
    return steps


def grade_cells(
    submitted: Sequence[Cell], pristine: Sequence[Cell], notebooks: Path, exercises: Mapping[str, Exercise],
    tell: Callable[[str], object] = str, **limits: float,
) -> dict[str, str]:  # fmt: skip
    """Return what is wrong with each answer of a submission, "" if it is right.

    `pristine` are the cells of the course's own notebook. All run again without the cell that stopped them, so that the
    others still count. An answer that is given several times need be right once. `tell` gets the progress.
    """
    calls = {cell.tag: match[0] if (match := CHECK.search(cell.source)) else "" for cell in pristine if cell.tag}
    results: dict[str, str] = {}
    left_out: dict[str | int, str] = {}
    while steps := arrange(submitted, pristine, left_out):
        guilty, used = None, Counter()
        try:
            with contextlib.closing(Sandbox(notebooks)) as sandbox:
                for count, (part, source) in enumerate(steps, 1):
                    tell(f"cell {count} of {len(steps)}")
                    wanted = {tag: exercises[tag] for tag in calls if results.get(tag) != ""}
                    if not wanted:
                        break
                    if part is None:
                        sandbox.limit(**{**limits, "seconds": math.inf})
                        sandbox.grade(None, source, "", {}, results)
                        continue
                    guilty, answer, began = part, part if part in calls else None, time.monotonic()
                    sandbox.limit(**limits)
                    sandbox.grade(answer, source, calls.get(answer, ""), wanted, results)
                    used[answer] += time.monotonic() - began
                    if used[answer] > limits.get("wall", math.inf):
                        raise ChildEnded(f"limit of {limits['wall']:g} s by the clock")
            break
        except ChildEnded as ended:
            if guilty is None:
                results = dict.fromkeys(calls, f"not reached: {ended}") | results
                break
            left_out[guilty] = str(ended)
            if results.get(guilty) != "":
                results[guilty] = str(ended)
    lost = [f"without a cell that is no answer ({why}): " for part, why in left_out.items() if part not in calls][:1]
    return {tag: results[tag] and "".join(lost) + results[tag] for tag in calls}


def collect(folder: Path, originals: Mapping[str, list[Cell]]) -> dict[str, tuple[str, list[Cell], str]]:
    """Return the submissions under a folder, by file: name of the course's notebook, cells, and what is wrong with it.

    A submission belongs to the notebook whose name its own contains. A folder without any counts as an empty one.
    """
    files = [path for path in folder.rglob("*") if not path.is_dir() and ".ipynb_checkpoints" not in path.parts]
    # browsers save 01_sgd.ipynb.txt, Windows also 01_SGD.IPYNB, and macOS puts ._01_sgd.ipynb beside it
    found = [path for path in files if ".ipynb" in path.name.lower() and not path.name.startswith("._")]
    full = {parent for path in found for parent in path.parents}
    empty = [path for path in folder.iterdir() if path.is_dir() and path not in full and path.name[0] != "."]
    submissions = {}
    for path in (*sorted(found), *sorted(empty)):
        cells = []
        named = (stem for stem in originals if stem.lower() in path.name.lower() and path in found)
        stem = max(named, key=len, default="")
        failure = "" if stem else "nothing was handed in whose name contains that of a notebook of the course"
        try:
            cells = read_cells(path) if stem else []
        except (OSError, ValueError) as error:
            failure = shorten(error)
        name = path.relative_to(folder).as_posix().encode("utf-8", "backslashreplace").decode()
        submissions[f"./{name}" if name[0] in "=+-@" else name] = stem, cells, failure  # no formula in a spreadsheet
    return submissions


def grade(folder: Path, notebooks: Path, out: Path, exercises: Mapping[str, Exercise], **limits: float) -> None:
    """Grade all notebooks under `folder` and enter them into the table `out` (CSV), each as soon as it is graded.

    What has a row with the same `key` is not graded again: its submission, the course and the limits were the same.
    `limits`: processor `seconds` of one cell that is not the course's; `wall` seconds by the clock of any cell, and of
    all that belong to an answer; MB of `memory` of all. Raises ValueError for folders without submissions or without
    exercises, and for an `out` that is another table.
    """
    for name, value in limits.items():
        checks.finite(f"--{name}", value, low=0.1)
    # all that decides is read before the first answer runs
    books = paths(notebooks)
    originals = {path.stem: read_cells(path) for path in books}
    asked = [cell.tag for cells in originals.values() for cell in cells if cell.tag]
    exercises = {tag: exercises[checks.known("exercise", tag, exercises)] for tag in asked}
    if not exercises:
        raise ValueError(f"No notebook with exercises in {notebooks}: name the course's notebooks with --notebooks.")
    submissions = collect(folder, originals)
    if not submissions:
        raise ValueError(f"No submissions in {folder}.")
    course = [*sorted(Path(__file__).parents[1].rglob("*.py")), *books]
    shared = sources.digest([limits, *(path.read_bytes() for path in course)])
    keys = {name: sources.digest([shared, name, *submission]) for name, submission in submissions.items()}
    book = Gradebook(out, folder, exercises)
    due = book.due(keys)
    tqdm.write(f"{len(submissions) - len(due)} of {len(submissions)} were graded before")
    with tqdm(due, unit=" files") as bar:
        for count, name in enumerate(bar, 1):
            bar.set_description(shorten(name, 40))
            stem, cells, failure = submissions[name]
            pristine = originals.get(stem, [])
            if failure:
                results, remarks = {cell.tag: failure for cell in pristine if cell.tag}, failure
            else:
                results = grade_cells(cells, pristine, notebooks, exercises, bar.set_postfix_str, **limits)
                remarks = "; ".join(f"{identity}: {wrong}" for identity, wrong in results.items() if wrong)
            points = {identity: int(not wrong) for identity, wrong in results.items()}
            look = bool(failure) or any(wrong and not wrong.startswith(ORDINARY) for wrong in results.values())
            row = {"file": name, "total": sum(points.values()), "of": len(points), "remarks": remarks}
            book.enter({**row, "look": int(look), "notebook": stem, **points, "key": keys[name]})
            said = f"{count} of {len(due)}: {shorten(name)}: {row['total']} of {len(points)} right"
            tqdm.write(f"{said}: {shorten(remarks)}" if remarks else said)
    look = sum(str(row.get("look")) == "1" for name, row in book.rows().items() if name in submissions)
    tqdm.write(f"{look} of {len(submissions)} need a look, for more than a wrong answer: column 'look' of {out}")
