"""Grades a folder of submitted notebooks: `python -m dlscale grade FOLDER`.

Of a submission only the answer cells (tag `answer-<id>`) are taken. They are put into the course's own notebook, up to
its last answer. A child process is told to run the cells one by one and returns the answers as plain values; functions
stay there and are called from here. The checks stay here, in the parent. A forged message is therefore only another
answer, and it must be right to score. Nothing from the child is unpickled or executed; messages are bounded in size.

What this does not protect against: answers run with the rights of the person who grades. They can read and change that
person's files (this package too), use the network, fill the disk, and read the reference solutions, which come with the
course. `dlscale.lab.processes` says where they can also signal other processes. Grade in a container or in an account
that can be thrown away.
"""

import base64
import contextlib
import csv
import importlib
import json
import math
import os
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy then knows the short floats by name
import numpy as np

from dlscale.course import exercises, sources
from dlscale.course.contents import paths
from dlscale.course.exercises import AnswerError, Exercise, describe, shorten
from dlscale.lab import checks
from dlscale.lab.processes import ENDED, MAX_BYTES, PYTHON, Child, ChildEnded, channel

MAX_FILE_BYTES = 50_000_000
MAX_ITEMS = 10_000  # of a dict: keys can be chosen to collide
KEPT = {"PATH", "HOME", "USERPROFILE", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "LANG", "LC_ALL", "DLSCALE_DATA"}
TAG = "answer-"
TABLE = {"encoding": "utf-8-sig", "newline": ""}  # with a mark, so that spreadsheets see UTF-8
UNTRUSTED = "it disturbed the grader's channel"

Cells = list[tuple[str | None, str]]  # exercise id, or None, and source of each code cell

# Messages: values as lines of JSON. A request is (number of a function, args, kwargs), its reply (error or "", value).


def pack(message: Any, number: Callable[[Callable], int]) -> bytes:
    """Write plain values as a line; `number(function)` names a function. Of other types only the name arrives."""
    return json.dumps(_encode(message, number)).encode() + b"\n"


def unpack(line: bytes, function: Callable[[int], Callable]) -> Any:
    """Read what `pack` wrote; `function(number)` finds a function. Raises for anything malformed."""
    return json.loads(line, object_hook=lambda part: _decode(part, function))


def _encode(value: Any, number: Callable[[Callable], int]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_encode(item, number) for item in value]
    if isinstance(value, tuple):
        return {"tuple": _encode(list(value), number), "fields": getattr(value, "_fields", None)}
    if isinstance(value, dict):
        return {"dict": _encode(list(value.items()), number)}
    is_jax = "jax" in sys.modules and isinstance(value, sys.modules["jax"].Array)
    if is_jax or isinstance(value, np.ndarray | np.generic | complex):
        array = np.asarray(value)
        if not array.dtype.hasobject:
            kind = "jax" if is_jax else "array" if isinstance(value, np.ndarray) else "scalar"
            data = base64.b64encode(array.tobytes()).decode()
            return {"data": data, "dtype": str(array.dtype), "shape": array.shape, "kind": kind}
    return {"function": number(value)} if callable(value) else {"other": type(value).__name__}


def _decode(part: dict[str, Any], function: Callable[[int], Callable]) -> Any:
    match part:
        case {"tuple": items, "fields": fields}:
            return namedtuple("Fields", fields[:100])(*items) if fields else tuple(items)
        case {"dict": items} if len(items) <= MAX_ITEMS:
            return dict(items)
        case {"data": data, "dtype": dtype, "shape": shape, "kind": kind} if max(shape, default=0) <= MAX_BYTES:
            array = np.frombuffer(base64.b64decode(data), np.dtype(dtype)).reshape(shape).copy()
            if kind == "jax":  # imported only where it is used: it takes a second
                return importlib.import_module("jax.numpy").asarray(array)
            return array if kind == "array" else array[()]
        case {"function": number}:
            return function(number)
        case {"other": str(name)}:
            return ... if name == "ellipsis" else type(name, (), {})()
    raise ValueError("not a value")


# One process, one cell, one submission, a folder


class Sandbox(Child):
    """A process that runs cells beside a copy of the files of `notebooks`. Closed, nothing of it is left."""

    def __init__(self, notebooks: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name.upper() in KEPT}
        environment |= {"PYTHONUTF8": "1", "MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu", "IPYTHONDIR": ".ipython"}
        super().__init__([*PYTHON, "-m", __name__, str(notebooks.absolute())], contained=True, environment=environment)

    def call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Return what its function of this number returns (0 runs a cell). Raises AnswerError if it raised.

        Raises ChildEnded at a limit, at the end of the process, and for a malformed reply.
        """
        self.send(pack((number, args, kwargs), self._number))
        reply = self.receive()
        try:
            error, value = unpack(reply, lambda number: partial(self.call, number))
            error = str(error)
        except Exception:  # whatever a forged message provokes
            self.stop(UNTRUSTED)
            raise ChildEnded(UNTRUSTED) from None
        if error:
            raise AnswerError(error)
        return value

    def _number(self, function: Callable) -> int:
        if isinstance(function, partial) and function.func == self.call:
            return function.args[0]
        raise TypeError("A check cannot hand a function of its own to an answer: the answer runs in another process.")

    def grade(self, exercise: Exercise | None, source: str) -> str:
        """Run a cell and return what is wrong with its answer, "" if it is right. Raises ChildEnded."""
        try:
            answers = self.call(0, exercise and exercise.id, source)
        except AnswerError as error:
            return shorten(f"crashed: {error}")
        if exercise is None or not isinstance(answers, list) or not answers:
            return "its check was not called"
        right, line = exercise.judge(answers[0])
        if self.why or self.process.poll() is not None:  # it ended while it was checked; nothing more runs unwatched
            raise ChildEnded(self.why or ENDED)
        return "" if right else line


def read_cells(path: Path) -> Cells:
    """Return a notebook's code cells up to the last answer. Raises ValueError for what is not a notebook."""
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"it is not a file of at most {MAX_FILE_BYTES / 1e6:g} MB")
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        if notebook["nbformat"] < 4:
            raise ValueError("the notebook is in an old format: open it in JupyterLab and save it again")
        cells = []
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                tags = cell.get("metadata", {}).get("tags", [])
                identity = next((tag.removeprefix(TAG) for tag in tags if tag.startswith(TAG)), None)
                cells.append((identity, "".join(cell["source"])))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError("the file is damaged: it is no notebook") from None
    while cells and cells[-1][0] is None:
        cells.pop()
    return cells


def grade_cells(
    submitted: Cells, pristine: Cells, notebooks: Path, exercises: Mapping[str, Exercise], **limits: float
) -> dict[str, str]:
    """Return what is wrong with each answer of a submission, "" if it is right.

    `pristine` are the cells of the course's own notebook. They run again without the answer that stopped them, so that
    the others still count.
    """
    found = {tag: [source for name, source in submitted if name == tag] for tag, _ in pristine if tag}
    answers = {tag: sources[0] for tag, sources in found.items() if len(sources) == 1}
    results = {tag: "several cells are tagged as its answer" for tag, sources in found.items() if len(sources) > 1}
    results |= {tag: "its cell is missing" for tag, sources in found.items() if not sources}
    while answers:
        guilty = None
        try:
            with contextlib.closing(Sandbox(notebooks)) as sandbox:
                for identity, source in pristine:
                    guilty = identity if identity in answers else guilty
                    sandbox.limit(**limits if identity in answers else {**limits, "seconds": math.inf})
                    wrong = sandbox.grade(exercises.get(identity), answers.get(identity, source))
                    results.setdefault(identity, wrong)
            break
        except ChildEnded as ended:
            if guilty is None:
                results = dict.fromkeys(found, f"not reached: {ended}") | results
                break
            results[guilty] = str(ended)
            del answers[guilty]
    return {identity: results[identity] for identity in found}


def grade(folder: Path, notebooks: Path, out: Path, exercises: Mapping[str, Exercise], **limits: float) -> None:
    """Grade all notebooks under `folder` and write a table to `out` (CSV): 1 or 0 for each exercise, total, remarks.

    A submission belongs to the notebook whose name its own contains. The table is complete after each of them; rows
    that it has already stay, but for those whose `key` says that submission, course or limits were others.
    `limits`: processor `seconds` of one answer; `wall` seconds by the clock of any cell, the course's own too; MB of
    `memory` of all. Raises ValueError for folders without submissions or without exercises.
    """
    # all that decides is read before the first answer runs
    originals = {path.stem: read_cells(path) for path in paths(notebooks)}
    asked = [tag for cells in originals.values() for tag, _ in cells if tag]
    exercises = {tag: exercises[checks.known("exercise", tag, exercises)] for tag in asked}
    if not exercises:
        raise ValueError(f"No notebook with exercises in {notebooks}: name the course's notebooks with --notebooks.")
    found = [path for path in folder.rglob("*.ipynb") if not path.is_dir() and ".ipynb_checkpoints" not in path.parts]
    full = {parent for path in found for parent in path.parents}
    empty = [path for path in folder.iterdir() if path.is_dir() and path not in full and path.name[0] != "."]
    if not found + empty:
        raise ValueError(f"No submissions in {folder}.")
    course = (*sorted(Path(__file__).parents[1].rglob("*.py")), *paths(notebooks))
    shared = sources.digest([limits, *(path.read_bytes() for path in course)])
    submissions = {}
    for path in (*sorted(found), *sorted(empty)):
        name, cells = path.relative_to(folder).as_posix(), []
        stem = max((stem for stem in originals if stem in path.stem and path in found), key=len, default="")
        failure = "" if stem else "nothing was handed in whose name contains that of a notebook of the course"
        try:
            cells = read_cells(path) if stem else []
        except (OSError, ValueError) as error:
            failure = shorten(error)
        submissions[sources.digest([shared, name, stem, cells, failure])] = name, stem, cells, failure
    rows = {}
    with contextlib.suppress(FileNotFoundError, csv.Error), out.open(**TABLE, errors="replace") as file:
        rows = {row["key"]: row for row in csv.DictReader(file) if row.get("key") in submissions}

    def save() -> None:
        part = out.with_name(f"{out.name}.part")
        with part.open("w", **TABLE) as file:
            table = csv.DictWriter(file, ["file", "notebook", *exercises, "total", "remarks", "key"])
            table.writeheader()
            table.writerows(rows[key] for key in submissions if key in rows)
        part.replace(out)  # at once: who ends the batch keeps all complete rows

    print(f"{len(rows)} of {len(submissions)} were graded before")
    save()
    for count, (key, (name, stem, cells, failure)) in enumerate(submissions.items(), 1):
        if key not in rows:
            results = grade_cells(cells, originals.get(stem, []), notebooks, exercises, **limits)
            remarks = failure or "; ".join(f"{identity}: {wrong}" for identity, wrong in results.items() if wrong)
            points = {identity: int(not wrong) for identity, wrong in results.items()}
            total, shown = sum(points.values()), shorten(name)
            safe = f"./{shown}" if shown[0] in "=+-@" else shown  # no formula in a spreadsheet
            rows[key] = {"file": safe, "notebook": stem, **points, "total": total, "remarks": remarks, "key": key}
            save()
            print(f"{count} of {len(submissions)}: {shown}: {total} right")


# The process of a sandbox


def work(notebooks: str) -> None:
    """Call the functions, at first only `run`, that its input asks for, and reply."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    inbox, outbox = channel()
    os.dup2(0, 1), os.dup2(0, 2)  # nothing that an answer prints is kept
    shutil.copytree(notebooks, ".", ignore=shutil.ignore_patterns("*.ipynb", ".*"), dirs_exist_ok=True)
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    answers: dict[str, Any] = {}
    exercises.hand_in = answers.__setitem__

    def run(identity: str | None, source: str) -> list[Any]:
        answers.clear()  # no cell answers for another
        result = shell.run_cell(source)
        if identity not in answers:
            result.raise_error()
        return [answer for name, answer in answers.items() if name == identity]

    functions: list[Callable] = [run]

    def number(function: Callable) -> int:
        functions.append(function)
        return len(functions) - 1

    for line in inbox:
        called, args, kwargs = unpack(line, functions.__getitem__)
        try:
            reply = pack(("", functions[called](*args, **kwargs)), number)
            if len(reply) > MAX_BYTES:
                raise ValueError(f"the answer is larger than {MAX_BYTES / 1e6:g} MB")
        except BaseException as error:  # SystemExit too is an answer's mistake
            reply = pack((shorten(describe(error)), None), number)
        outbox.write(reply)
        outbox.flush()


if __name__ == "__main__":
    work(*sys.argv[1:])
