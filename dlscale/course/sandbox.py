"""A process that runs the cells of a stranger's notebook, and hands back their answers as plain values.

Functions stay where they are and are called from the other end. Nothing from the process is unpickled or executed;
messages are bounded in size. `dlscale.lab.processes` watches it.
"""

import base64
import contextlib
import importlib
import json
import os
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  NumPy then knows the short floats by name
import numpy as np

from dlscale.course import exercises
from dlscale.course.exercises import AnswerError, Exercise, describe, shorten
from dlscale.lab.processes import ENDED, MAX_BYTES, PYTHON, Child, ChildEnded, channel

MAX_ITEMS = 10_000  # of a dict: keys can be chosen to collide
KEPT = {"PATH", "HOME", "USERPROFILE", "SYSTEMROOT", "TEMP", "TMP", "TMPDIR", "LANG", "LC_ALL", "DLSCALE_DATA"}
UNCHECKED = "its check was not called"
MISSING = "its cell is missing"
UNTRUSTED = "it disturbed the grader's channel"

# Messages: values as lines of JSON. A request is (number of a function, args, kwargs), its reply (error or "", value).
# A function of the sender has its number in the sender's list, one of the receiver -1 minus that in the receiver's.


def pack(message: Any, number: Callable[[Callable], int]) -> bytes:
    """Write plain values as a line; `number(function)` names a function. Of other types only the name arrives."""
    return json.dumps(_encode(message, number)).encode() + b"\n"


def unpack(line: bytes, function: Callable[[int], Callable]) -> Any:
    """Read what `pack` wrote; `function(number)` finds a function. Raises for anything malformed."""
    return json.loads(line, object_hook=lambda part: _decode(part, function))


def _encode(value: Any, number: Callable[[Callable], int]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple):
        return {"tuple": _encode(list(value), number), "fields": getattr(value, "_fields", None)}
    if isinstance(value, Sequence | Iterator | MappingView) and not isinstance(value, str | bytes | bytearray):
        return [_encode(item, number) for item in value]
    if isinstance(value, dict):
        return {"dict": _encode(list(value.items()), number)}
    if isinstance(value, set | frozenset):
        return {"set": _encode(list(value), number)}
    if isinstance(value, np.random.Generator):
        return {"random": _encode(value.bit_generator.state, number)}
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
        case {"set": items} if len(items) <= MAX_ITEMS:
            return set(items)
        case {"random": state}:
            generator = np.random.default_rng()
            generator.bit_generator.state = state  # of another kind of generator: ValueError
            return generator
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


class Peer:
    """One of two processes that call each other's `functions`, by number; with `send` and `receive` of lines."""

    functions: list[Callable]
    forgiven: type[BaseException] = Exception

    def call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Return what the other's function of this number returns. Raises AnswerError if it raised."""
        self.send(pack((number, args, kwargs), self._number))
        while len(message := unpack(self.receive(), self._function)) == 3:
            self.serve(*message)  # the other end asks back before it replies
        error, value = message
        if error:
            raise AnswerError(str(error))
        return value

    def serve(self, number: int, args: Any, kwargs: Any) -> None:
        """Call the function of this number, and send what it returns or that it raised."""
        try:
            reply = pack(("", self.functions[number](*args, **kwargs)), self._number)
            if len(reply) > MAX_BYTES:
                raise ValueError(f"the answer is larger than {MAX_BYTES / 1e6:g} MB")
        except ChildEnded:
            raise
        except self.forgiven as error:
            reply = pack((shorten(describe(error)), None), self._number)
        self.send(reply)

    def _number(self, function: Callable) -> int:
        if isinstance(function, partial) and function.func == self.call:
            return -1 - function.args[0]
        self.functions.append(function)
        return len(self.functions) - 1

    def _function(self, number: int) -> Callable:
        return partial(self.call, number) if number >= 0 else self.functions[-1 - number]


# The process, seen from outside


class Sandbox(Peer, Child):
    """A process that runs cells beside a copy of the files of `notebooks`. Closed, nothing of it is left."""

    def __init__(self, notebooks: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if name.upper() in KEPT}
        environment |= {"PYTHONUTF8": "1", "MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu", "IPYTHONDIR": ".ipython"}
        super().__init__([*PYTHON, "-m", __name__, str(notebooks.absolute())], contained=True, environment=environment)

        self.functions = []

    def call(self, number: int, *args: Any, **kwargs: Any) -> Any:
        """Return what its function of this number returns (0 runs a cell). Raises AnswerError if it raised.

        Raises ChildEnded at a limit, at the end of the process, and for a malformed message.
        """
        try:
            return super().call(number, *args, **kwargs)
        except (AnswerError, ChildEnded):
            raise
        except Exception:  # whatever a forged message provokes
            self.stop(UNTRUSTED)
            raise ChildEnded(UNTRUSTED) from None

    def grade(
        self, identity: str | None, source: str, check: str, exercises: Mapping[str, Exercise], results: dict[str, str]
    ) -> None:
        """Run a cell; enter into `results` what is wrong with each answer to `exercises` that it gives, "" if right.

        If it gives none to the exercise `identity`, then the line `check` is run, too. Raises ChildEnded.
        """
        answers, wrong = {}, UNCHECKED
        try:
            answers = dict(self.call(0, identity, source, check))
        except AnswerError as error:
            wrong = shorten(f"crashed: {error}") if source.strip() else MISSING
        except (TypeError, ValueError):  # a forged message
            pass
        if identity in exercises and identity not in answers:
            results[identity] = wrong
        for asked in exercises.keys() & answers.keys():
            right, line = exercises[asked].judge(answers[asked])
            if self.why or self.process.poll() is not None:  # it ended while it was checked: nothing runs unwatched
                raise ChildEnded(self.why or ENDED)
            results[asked] = "" if right else line


# The process, seen from inside


def work(notebooks: str) -> None:
    """Call the functions, at first only `run`, that its input asks for, and reply."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    inbox, outbox = channel()
    os.dup2(0, 1), os.dup2(0, 2)  # nothing that an answer prints is kept
    shutil.copytree(notebooks, ".", ignore=shutil.ignore_patterns("*.ipynb", ".*"), dirs_exist_ok=True)
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    magic = shell.run_line_magic

    def harmless(name: str, line: str, _stack_depth: int = 1) -> Any:
        with contextlib.suppress(Exception):
            return magic(name, line, _stack_depth + 1)

    # as a notebook's, but without a screen; no magic fails, and none installs anything
    shell.run_line_magic = harmless
    shell.enable_matplotlib = lambda gui=None: (None, "agg")
    shell.system = lambda command: None
    answers: dict[str, Any] = {}
    exercises.hand_in = answers.__setitem__

    def run(identity: str | None, source: str, check: str) -> dict[str, Any]:
        answers.clear()
        result = shell.run_cell(source)
        if identity and identity not in answers:
            result.raise_error()
            shell.run_cell(check).raise_error()
        return dict(answers)

    class Inside(Peer):
        functions, forgiven = [run], BaseException  # SystemExit too is an answer's mistake

        def send(self, line: bytes) -> None:
            outbox.write(line)
            outbox.flush()

        def receive(self) -> bytes:
            return inbox.readline() or sys.exit()

    peer = Inside()
    for line in inbox:
        peer.serve(*unpack(line, peer._function))


if __name__ == "__main__":
    work(*sys.argv[1:])
