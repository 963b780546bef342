"""Grades a folder of submitted notebooks: `python -m dlscale grade FOLDER`.

Of a submission only the answer cells (tag `answer-<id>`) are taken. They are put into the course's own notebook, up to
its last answer. A child process is told to run the cells one by one and returns the answers as plain values; functions
stay there and are called from here. The checks stay here, in the parent. A forged message is therefore only another
answer, and it must be right to score. Nothing from the child is unpickled or executed; messages are bounded in size.

What this does not protect against: answers run with the rights of the person who grades. They can read and change that
person's files (this package too), use the network, fill the disk, start processes that outlive the limits, and read the
reference solutions, which come with the course. Grade in a container or in an account that can be thrown away.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes  # noqa: F401  NumPy then knows the short floats by name
import numpy as np
import psutil

from dlscale.course import exercises
from dlscale.course.exercises import AnswerError, Exercise, describe, shorten
from dlscale.lab import checks

MAX_BYTES = 16_000_000  # of one message
MAX_FILE_BYTES = 50_000_000
MAX_ITEMS = 10_000  # of a dict: keys can be chosen to collide
TICK = 0.1  # seconds between two looks at memory and time
KEPT = {"PATH", "HOME", "USERPROFILE", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "LANG", "LC_ALL", "DLSCALE_DATA"}
TAG = "answer-"
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


# The parent: one child, one cell, one submission, a folder


class Stopped(Exception):
    """The child was stopped; its `stopped` says why."""


class Child:
    """A process that runs cells beside a copy of the files of `notebooks`, until it is closed.

    No message, no size and no silence of it can hold up the parent.
    """

    def __init__(self, notebooks: Path, seconds: float, memory: float) -> None:
        self.place = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        folder = Path(self.place.name, "notebooks")
        shutil.copytree(notebooks, folder, ignore=shutil.ignore_patterns("*.ipynb", ".*"))
        environment = {name: value for name, value in os.environ.items() if name.upper() in KEPT}
        environment |= {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUTF8": "1", "MPLBACKEND": "agg"}
        environment |= {"IPYTHONDIR": str(folder / ".ipython"), "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dlscale.course.grading"], cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.seconds, self.memory, self.stopped = seconds, memory, ""
        self.requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.renew()
        self.guard = threading.Thread(target=self._guard)
        self.guard.start()
        threading.Thread(target=self._talk, daemon=True).start()

    def renew(self) -> None:
        """Start the time limit anew."""
        self.deadline = time.monotonic() + self.seconds

    def _guard(self) -> None:
        """At a limit, or when it is over, end the process and all that it started and did not hide."""
        while not self.stopped:
            if time.monotonic() > self.deadline:
                self.stopped = f"time limit of {self.seconds:g} s"
            elif megabytes(self.process.pid) > self.memory:
                self.stopped = f"memory limit of {self.memory:g} MB"
            else:
                time.sleep(TICK)
        for member in family(self.process.pid):
            with contextlib.suppress(psutil.Error):
                member.kill()
        with contextlib.suppress(OSError, AttributeError):  # Windows has no groups
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.replies.put(b"")

    def _talk(self) -> None:
        """Write requests and read replies, in a thread that may wait: a child need do neither."""
        with contextlib.suppress(OSError), self.process as process:
            for request in iter(self.requests.get, b""):
                process.stdin.write(request)
                process.stdin.flush()
                self.replies.put(process.stdout.readline(MAX_BYTES + 1))
        self.replies.put(b"")

    def call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Return what its function of this number returns (0 runs a cell). Raises AnswerError if it raised.

        Raises Stopped at a limit, at the end of the process, and for a malformed reply.
        """
        self.requests.put(pack((number, args, kwargs), self._number))
        reply = b"" if self.stopped else self.replies.get()
        if not reply:
            self.stop("its process ended")
        try:
            error, value = unpack(reply, lambda number: partial(self.call, number))
            error = str(error)
        except Exception:  # whatever a forged message provokes
            self.stop(UNTRUSTED)
        if error:
            raise AnswerError(error)
        return value

    def _number(self, function: Callable) -> int:
        if isinstance(function, partial) and function.func == self.call:
            return function.args[0]
        raise TypeError("A check cannot hand a function of its own to an answer: the answer runs in another process.")

    def stop(self, why: str) -> NoReturn:
        self.stopped = self.stopped or why
        raise Stopped

    def close(self) -> None:
        self.stopped = self.stopped or "it is over"
        self.guard.join()
        self.requests.put(b"")
        self.place.cleanup()


def family(pid: int) -> list[psutil.Process]:
    """A process and those that it started, as far as they can be seen."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def megabytes(pid: int) -> float:
    """The memory of a process and its children; shared pages are counted once, exactly on Linux, nearly elsewhere."""
    total = 0
    for member in family(pid):
        with contextlib.suppress(psutil.Error):
            info = member.memory_full_info()
            total += getattr(info, "pss", info.uss)
    return total / 1e6


def grade_cell(child: Child, exercise: Exercise | None, source: str) -> str:
    """Run a cell and return what is wrong with its answer, "" if it is right. Raises Stopped."""
    try:
        answers = child.call(0, exercise and exercise.id, source)
    except AnswerError as error:
        return shorten(f"crashed: {error}")
    if exercise is None or not isinstance(answers, list) or not answers:
        return "its check was not called"
    right, line = exercise.judge(answers[0])
    if child.stopped:  # while it was checked
        raise Stopped
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


def grade_file(
    path: Path, pristine: Cells, exercises: Mapping[str, Exercise], start: Callable[[], Child]
) -> dict[str, str]:
    """Return what is wrong with each answer of a submission, "" if it is right.

    `pristine` are the cells of the course's own notebook. They run again without the answer that stopped them, so that
    the others still count.
    """
    identities = [identity for identity, _ in pristine if identity]
    try:
        submitted = read_cells(path)
    except (OSError, ValueError) as error:
        return dict.fromkeys(identities, shorten(error))
    answers, results = {}, {}
    for identity in identities:
        match [source for tag, source in submitted if tag == identity]:
            case [source]:
                answers[identity] = source
            case sources:
                results[identity] = "several cells are tagged as its answer" if sources else "its cell is missing"
    while answers:
        guilty = None
        with contextlib.closing(start()) as child, contextlib.suppress(Stopped):
            for identity, source in pristine:
                if identity:
                    child.renew()
                    guilty = identity if identity in answers else guilty
                wrong = grade_cell(child, exercises.get(identity), answers.get(identity, source))
                results.setdefault(identity, wrong)
            break
        if guilty is None:
            results = dict.fromkeys(identities, f"not reached: {child.stopped}") | results
            break
        results[guilty] = child.stopped
        del answers[guilty]
    return {identity: results[identity] for identity in identities}


def grade(
    folder: Path, notebooks: Path, out: Path, seconds: float, memory: float, exercises: Mapping[str, Exercise]
) -> None:
    """Grade all notebooks under `folder` and write a table to `out` (CSV): 1 or 0 for each exercise, total, remarks.

    A submission belongs to the notebook whose name its own contains. `seconds` limits each answer with the cells up to
    the next one, `memory` (MB) the whole run. Raises ValueError for folders without submissions or without exercises.
    """
    # all that decides is read before the first answer runs
    originals = {path.stem: read_cells(path) for path in sorted(notebooks.glob("*.ipynb"))}
    asked = [tag for cells in originals.values() for tag, _ in cells if tag]
    exercises = {tag: exercises[checks.known("exercise", tag, exercises)] for tag in asked}
    if not exercises:
        raise ValueError(f"No notebook with exercises in {notebooks}: name the course's notebooks with --notebooks.")
    found = sorted(path for path in folder.rglob("*.ipynb") if not path.is_dir())
    found = [path for path in found if ".ipynb_checkpoints" not in path.parts]
    full = {parent for path in found for parent in path.parents}
    found += sorted(path for path in folder.iterdir() if path.is_dir() and path not in full and path.name[0] != ".")
    if not found:
        raise ValueError(f"No submissions in {folder}.")
    with out.open("w", encoding="utf-8-sig", newline="") as file:  # with a mark, so that spreadsheets see UTF-8
        table = csv.DictWriter(file, ["file", "notebook", *exercises, "total", "remarks"])
        table.writeheader()
        for count, path in enumerate(found, 1):
            stem = max((stem for stem in originals if stem in path.stem and not path.is_dir()), key=len, default="")
            results, remarks = {}, "no notebook was handed in"
            if stem:
                results = grade_file(path, originals[stem], exercises, partial(Child, notebooks, seconds, memory))
                remarks = "; ".join(f"{identity}: {wrong}" for identity, wrong in results.items() if wrong)
            elif not path.is_dir():
                remarks = "its name contains no name of a notebook of the course"
            points = {identity: int(not wrong) for identity, wrong in results.items()}
            name, total = shorten(path.relative_to(folder).as_posix()), sum(points.values())
            safe = f"./{name}" if name[0] in "=+-@" else name  # no formula in a spreadsheet
            table.writerow({"file": safe, "notebook": stem, **points, "total": total, "remarks": remarks})
            file.flush()
            print(f"{count} of {len(found)}: {name}: {total} right")


# The child


def work() -> None:
    """Call the functions, at first only `run`, that standard input asks for, and reply on standard output."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)  # prints do not mix with messages
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

    def reply(error: str, value: Any) -> None:
        line = pack((error, value), number)
        if len(line) > MAX_BYTES:
            raise ValueError(f"the answer is larger than {MAX_BYTES / 1e6:g} MB")
        outbox.write(line)
        outbox.flush()

    for line in inbox:
        called, args, kwargs = unpack(line, functions.__getitem__)
        try:
            reply("", functions[called](*args, **kwargs))
        except BaseException as error:  # SystemExit too is an answer's mistake
            reply(shorten(describe(error)), None)


if __name__ == "__main__":
    work()
