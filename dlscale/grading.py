"""Grades a folder of submitted notebooks: `python -m dlscale.course grade FOLDER`.

Of a submission only the answer cells (tag `answer-<id>`) are taken. They are put into the course's own notebook, which
runs in a child process up to its last answer. The checks stay here, in the parent: the child sends its answers as plain
values; functions stay in the child and are called from here. A forged message is therefore only another answer, and it
must be right to score. Nothing from the child is unpickled or executed, and messages are bounded in size.

What this does not protect against: answers run with the rights of the person who grades. They can read and change that
person's files (this package too), use the network, fill the disk, start processes that outlive the limits, and read the
reference solutions, which come with the course. Grade in a container or in an account that can be thrown away.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import io
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
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  NumPy then knows the short floats by name
import numpy as np
import psutil

from dlscale import course
from dlscale.exercises import AnswerError, describe, shorten

MAX_BYTES = 16_000_000  # of one message
MAX_FILE_BYTES = 50_000_000
MAX_ITEMS = 10_000  # of a dict: keys can be chosen to collide
TICK = 0.1  # seconds between two looks at memory and time
KEPT = {"PATH", "HOME", "USERPROFILE", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "LANG", "LC_ALL", "DLSCALE_DATA"}
TAG = "answer-"
UNTRUSTED = "it disturbed the grader's channel"


Cells = list[tuple[str | None, str]]  # exercise id, or None, and source of each code cell

# Values as JSON


class Other(NamedTuple):
    """Stands for a value of a type that is not sent."""

    type: str


def encode(value: Any, number: Callable[[Callable], int]) -> Any:
    """Return a plain value as JSON; `number(function)` names a function. Other types arrive as `Other`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [encode(item, number) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, number) for item in value], "fields": getattr(value, "_fields", None)}
    if isinstance(value, dict):
        return {"dict": [[encode(key, number), encode(item, number)] for key, item in value.items()]}
    if value is ...:
        return {"ellipsis": True}
    jax = sys.modules.get("jax")
    is_jax = jax is not None and isinstance(value, jax.Array)
    if is_jax or isinstance(value, np.ndarray | np.generic | complex):
        array = np.asarray(value)
        if not array.dtype.hasobject:
            kind = "jax" if is_jax else "array" if isinstance(value, np.ndarray) else "scalar"
            data = base64.b64encode(array.tobytes()).decode()
            return {"array": kind, "dtype": str(array.dtype), "shape": array.shape, "data": data}
    if callable(value):
        return {"function": number(value)}
    return {"other": type(value).__name__}


def decode(message: Any, function: Callable[[int], Callable]) -> Any:
    """Return the value that `encode` wrote; `function(number)` finds a function. Raises for anything malformed."""
    match message:
        case list():
            return [decode(item, function) for item in message]
        case {"tuple": items, "fields": fields}:
            values = [decode(item, function) for item in items]
            return namedtuple("Fields", fields[:100])(*values) if fields else tuple(values)
        case {"dict": items} if len(items) <= MAX_ITEMS:
            return {decode(key, function): decode(item, function) for key, item in items}
        case {"ellipsis": _}:
            return ...
        case {"array": kind, "dtype": name, "shape": shape, "data": data} if max(shape, default=0) <= MAX_BYTES:
            array = np.frombuffer(base64.b64decode(data), np.dtype(name)).reshape(shape).copy()
            if kind == "jax":
                import jax.numpy as jnp  # only where it is used: it takes a second

                return jnp.asarray(array)
            return array if kind == "array" else array[()]
        case {"function": number}:
            return function(number)
        case {"other": name}:
            return Other(name)
        case dict():
            raise ValueError("not a value")
    return message


# The parent: one child, one attempt, one submission, a folder


class Stopped(Exception):
    """The child was stopped; the message says why."""


class Child:
    """The process that runs a notebook's cells; no message, no size and no silence of it can hold up the parent."""

    def __init__(self, cells: Cells, folder: Path, seconds: float, memory: float) -> None:
        environment = {name: value for name, value in os.environ.items() if name.upper() in KEPT}
        environment |= {"PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONUTF8": "1", "MPLBACKEND": "agg"}
        environment |= {"IPYTHONDIR": str(folder / ".ipython"), "JAX_PLATFORMS": "cpu"}
        self.seconds, self.memory, self.stopped = seconds, memory, ""
        self.inbox: queue.Queue[bytes] = queue.Queue(maxsize=2)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dlscale.grading"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=folder, env=environment, bufsize=0, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        self.renew()
        self.send({"cells": cells})

    def renew(self) -> None:
        """Start the time limit anew."""
        self.deadline = time.monotonic() + self.seconds

    def _read(self) -> None:
        with io.BufferedReader(self.process.stdout) as stream, contextlib.suppress(OSError):
            line = b"first"
            while line and not self.stopped:
                line = stream.readline(MAX_BYTES + 1)
                while not self.stopped:
                    with contextlib.suppress(queue.Full):
                        self.inbox.put(line, timeout=TICK)
                        break

    def _write(self, data: memoryview) -> None:
        with contextlib.suppress(OSError, ValueError):  # the child has ended: `receive` tells
            while data:
                data = data[self.process.stdin.write(data) :]

    def send(self, message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        threading.Thread(target=self._write, args=[data], daemon=True).start()  # a child need not read

    def receive(self) -> dict[str, Any]:
        """Return the next message. Raises Stopped at a limit, at the end of the process and for a malformed message."""
        sampled = 0.0
        while not self.stopped:
            now = time.monotonic()
            if now > self.deadline:
                self.stop(f"time limit of {self.seconds:g} s")
            if now > sampled + TICK and (sampled := now) and megabytes(self.process.pid) > self.memory:
                self.stop(f"memory limit of {self.memory:g} MB")
            with contextlib.suppress(queue.Empty):
                line = self.inbox.get(timeout=TICK)
                if not line:
                    self.stop("its process ended")
                with contextlib.suppress(ValueError, RecursionError):
                    if isinstance(message := json.loads(line), dict):
                        return message
                self.stop(UNTRUSTED)
        raise Stopped(self.stopped)

    def stop(self, why: str) -> None:
        self.close(why)
        raise Stopped(why)

    def close(self, why: str = "it is over") -> None:
        """End the process and all that it started and did not hide."""
        self.stopped = self.stopped or why
        with contextlib.suppress(psutil.Error):
            for member in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    member.kill()
        if hasattr(os, "killpg") and self.process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()

    def decode(self, message: Any) -> Any:
        try:
            return decode(message, lambda number: Remote(self, number))
        except Exception:  # whatever a forged message provokes
            self.stop(UNTRUSTED)


class Remote:
    """A function of the child."""

    def __init__(self, child: Child, number: int) -> None:
        self.child, self.number = child, number

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = encode([list(args), kwargs], _known_number)
        self.child.send({"call": self.number, "values": values})
        match self.child.receive():
            case {"value": value}:
                return self.child.decode(value)
            case {"error": str(error)}:
                raise AnswerError(f"checking it raised {error}")
        return self.child.stop(UNTRUSTED)


def _known_number(function: Callable) -> int:
    if isinstance(function, Remote):
        return function.number
    raise TypeError("A check cannot hand a function of its own to an answer: the answer runs in another process.")


def megabytes(pid: int) -> float:
    """The memory of a process and its children; shared pages are counted once, exactly on Linux, nearly elsewhere."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                info = member.memory_full_info()
                total += getattr(info, "pss", info.uss)
    return total / 1e6


Results = dict[str, tuple[bool, str]]  # exercise id: right?, remark


def attempt(cells: Cells, child: Child) -> tuple[Results, list[str], str]:
    """Return the results of one run, the ids whose cells were started, and why it was stopped ("" if it was not)."""
    results, started = {}, []
    identities = {identity for identity, _ in cells if identity}
    try:
        while True:
            match child.receive():
                case {"start": str(identity)} if identity in identities and identity not in started:
                    started.append(identity)
                    child.renew()
                case {"answer": str(identity), "value": value}:
                    if started and identity == started[-1]:  # no cell answers for another
                        results[identity] = course.exercise(identity).judge(child.decode(value))
                        if child.stopped:
                            results.pop(identity)
                            raise Stopped(child.stopped)
                    child.send({"done": True})
                case {"crash": str(error)} if started:
                    results.setdefault(started[-1], (False, shorten(f"crashed: {error}")))
                case {"finished": True}:
                    return results, started, ""
                case _:
                    child.stop(UNTRUSTED)
    except Stopped as stop:
        return results, started, str(stop)


def grade_answers(pristine: Cells, answers: dict[str, str], run: Callable) -> Results:
    """Run the notebook with the answers; again without the answer that stopped it, so that the others still count."""
    answers, final = dict(answers), {}
    while True:
        results, started, why = run([(identity, answers.get(identity, source)) for identity, source in pristine])
        final = results | final
        guilty = next((identity for identity in reversed(started) if identity in answers), None)
        if not why or guilty is None:
            break
        final[guilty] = (False, why)
        del answers[guilty]
    reason = f"not reached: {why}" if why else "its check was not called"
    return {identity: final.get(identity, (False, reason)) for identity, _ in pristine if identity}


def answer_cells(cells: list[dict[str, Any]]) -> Cells:
    """The code cells up to the last answer: the exercise's id, or None, and the source."""
    found = []
    for cell in cells:
        if cell["cell_type"] == "code":
            tags = cell.get("metadata", {}).get("tags", [])
            identity = next((tag.removeprefix(TAG) for tag in tags if tag.startswith(TAG)), None)
            found.append((identity, "".join(cell["source"])))
    while found and found[-1][0] is None:
        found.pop()
    return found


def read_answers(path: Path) -> dict[str, list[str]]:
    """Return for each exercise the sources tagged as its answer. Raises ValueError for what is not such a notebook."""
    if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"it is not a file of at most {MAX_FILE_BYTES / 1e6:g} MB")
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        if notebook["nbformat"] < 4:
            raise ValueError("the notebook is in an old format: open it in JupyterLab and save it again")
        answers: dict[str, list[str]] = {}
        for identity, source in answer_cells(notebook["cells"]):
            answers.setdefault(identity, []).append(source)
        return answers
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError("the file is damaged: it is no notebook") from None


def grade_file(path: Path, pristine: Cells, notebooks: Path, seconds: float, memory: float) -> Results:
    """Grade one submission; `pristine` are the cells of the course's own notebook in the folder `notebooks`."""
    identities = [identity for identity, _ in pristine if identity]
    try:
        submitted = read_answers(path)
    except (OSError, ValueError) as error:
        return dict.fromkeys(identities, (False, shorten(error)))

    def run(cells: Cells) -> tuple[Results, list[str], str]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
            folder = Path(name) / "notebooks"
            shutil.copytree(notebooks, folder, ignore=shutil.ignore_patterns("*.ipynb", ".*"))
            with contextlib.closing(Child(cells, folder, seconds, memory)) as child:
                return attempt(cells, child)

    answers = {identity: submitted[identity][0] for identity in identities if len(submitted.get(identity, [])) == 1}
    results = grade_answers(pristine, answers, run) if answers else {}
    for identity in set(identities) - set(answers):
        found = submitted.get(identity)
        results[identity] = (False, "several cells are tagged as its answer" if found else "its cell is missing")
    return {identity: results[identity] for identity in identities}


def grade(folder: Path, notebooks: Path, out: Path, seconds: float, memory: float) -> None:
    """Grade all notebooks under `folder` and write a table to `out` (CSV): 1 or 0 for each exercise, total, remarks.

    A submission belongs to the notebook whose name its own contains. `seconds` limits each answer with the cells before
    it, `memory` (MB) the whole run. Raises ValueError for folders without submissions or without exercises.
    """
    # all that decides is read before the first answer runs
    originals = {
        path: answer_cells(json.loads(path.read_text(encoding="utf-8"))["cells"])
        for path in sorted(notebooks.glob("*.ipynb"))
    }
    identities = [identity for cells in originals.values() for identity, _ in cells if identity]
    if not identities:
        raise ValueError(f"No notebook with exercises in {notebooks}: name the course's notebooks with --notebooks.")
    for identity in identities:
        course.exercise(identity)
    found = sorted(path for path in folder.rglob("*.ipynb") if not path.is_dir())
    submissions = [path for path in found if ".ipynb_checkpoints" not in path.parts]
    used = {parent for path in submissions for parent in path.parents}
    empty = sorted(path for path in folder.iterdir() if path.is_dir() and path not in used and path.name[0] != ".")
    if not submissions and not empty:
        raise ValueError(f"No submissions in {folder}.")
    with out.open("w", encoding="utf-8-sig", newline="") as file:  # with a mark, so that spreadsheets see UTF-8
        table = csv.DictWriter(file, ["file", "notebook", *identities, "total", "remarks"])
        table.writeheader()
        for number, path in enumerate(submissions + empty, 1):
            original = max((o for o in originals if o.stem in path.stem), key=lambda o: len(o.stem), default=None)
            if path in empty:
                row = {"total": 0, "remarks": "no notebook was handed in"}
            elif original is None:
                row = {"total": 0, "remarks": "its name contains no name of a notebook of the course"}
            else:
                results = grade_file(path, originals[original], notebooks, seconds, memory)
                row = {identity: int(right) for identity, (right, _) in results.items()}
                remarks = [f"{identity}: {remark}" for identity, (right, remark) in results.items() if not right]
                total = sum(row.values())
                row |= {"notebook": original.stem, "total": total, "remarks": "; ".join(remarks)}
            name = shorten(path.relative_to(folder).as_posix())
            table.writerow({"file": f"./{name}" if name[0] in "=+-@" else name, **row})  # no formula in a spreadsheet
            file.flush()
            print(f"{number} of {len(submissions) + len(empty)}: {name}: {row['total']} right")


# The child


def work() -> None:
    """Run the cells that come from standard input, and hand their answers over on standard output."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)  # prints do not mix with messages
    functions: list[Callable] = []

    def number(function: Callable) -> int:
        functions.append(function)
        return len(functions) - 1

    def send(message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        if len(line) > MAX_BYTES:
            raise ValueError(f"the answer is larger than {MAX_BYTES / 1e6:g} MB")
        outbox.write(line)
        outbox.flush()

    def hand_over(identity: str, value: Any) -> None:
        send({"answer": identity, "value": encode(value, number)})
        while "call" in (request := json.loads(inbox.readline())):
            try:
                args, kwargs = decode(request["values"], functions.__getitem__)
                send({"value": encode(functions[request["call"]](*args, **kwargs), number)})
            except BaseException as error:  # SystemExit too is an answer's mistake
                send({"error": shorten(describe(error))})

    def exercise(identity: str) -> SimpleNamespace:
        return SimpleNamespace(check=lambda value: hand_over(identity, value), hint=lambda: None, solution=lambda: None)

    course.exercise = exercise
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    for identity, source in json.loads(inbox.readline())["cells"]:
        if identity:
            send({"start": identity})
        result = shell.run_cell(source)
        if identity and (error := result.error_before_exec or result.error_in_exec):
            send({"crash": shorten(describe(error))})
    send({"finished": True})


if __name__ == "__main__":
    work()
