"""Exercises with an instant check.

Those with ids "<room>-<slug>" are the instances of `Exercise` that the module `dlscale.<room>.exercises` names.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator, MappingView, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import ArrayLike

# Where an answer goes, with its exercise's id, in a process that works for a grader; None: it is judged here.
hand_in: Callable[[str, object], object] | None = None


class AnswerError(Exception):
    """An answer failed in another process, while it was checked there; the message describes the error."""


class _Blank(Exception):
    """`...` stands where the answer should be."""


@dataclass
class Exercise:
    """One source for all that belongs to an exercise.

    `answer` is the name that the answer cell gives to the answer, and `code` the reference solution as it would stand
    there, with what its notebook has imported and defined above. `wrong(answer)` returns what is wrong, in a sentence
    about the quantity taught, or None. It may call an answer that is a function, with concrete arrays only: the grader
    runs the function in another process, so it cannot be traced. `right` says why a right answer matters. `library`
    is the full name of the function that is to be written: an answer that calls it fails.
    """

    id: str
    answer: str
    hints: Sequence[str]
    code: str
    wrong: Callable[[Any], str | None]
    right: str
    library: str = ""
    hints_shown: int = field(default=0, init=False)

    def check(self, answer: object) -> None:
        """Print one line: right, what is not, or that there is no answer yet. Never raises, whatever the answer is."""
        if hand_in:
            hand_in(self.id, self._alone(answer))
        else:
            print(self.judge(answer)[1])

    def _alone(self, answer: Any) -> Any:
        """The answer; one that is a function does not find `library`."""

        def alone(*args: Any, **kwargs: Any) -> Any:
            with mock.patch(self.library, side_effect=ValueError(f"it calls the library's own {name}: write that")):
                return answer(*args, **kwargs)

        name = self.library.rpartition(".")[2]
        return alone if self.library and callable(answer) else answer

    def judge(self, answer: object) -> tuple[bool, str]:
        """Return whether the answer is right, and the line that `check` prints."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a reader's NaN is told in the line, not on stderr
                what = self.wrong(_filled(self._alone(answer)))
        except _Blank:
            return False, "no answer yet"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # an answer may raise anything, even SystemExit
            what = f"checking it raised {error if isinstance(error, AnswerError) else describe(error)}"
        return (True, f"✓ right: {self.right}") if what is None else (False, f"not yet: {shorten(what)}")

    def hint(self) -> None:
        """Print a hint; each call prints the next one, and the first again after the last."""
        number = self.hints_shown % len(self.hints)
        self.hints_shown += 1
        print(f"Hint {number + 1} of {len(self.hints)}: {self.hints[number]}")

    def solution(self) -> None:
        """Print the code of the reference solution."""
        print(self.code.strip())


def compare(what: str, answer: object, expected: ArrayLike, tolerance: float = 1e-4) -> str | None:
    """Say how an answer differs from the expected number or array, without giving it away; None if it does not.

    `what` names the quantity and begins the sentence. `tolerance` is relative to the largest expected magnitude.
    """
    expected = np.asarray(expected, dtype=float)
    try:
        numbers = np.asarray(answer)
        if numbers.dtype.kind not in "iufV":  # V: the short floats of ml_dtypes
            raise TypeError
        numbers = numbers.astype(float)
    except (TypeError, ValueError):
        return f"{what} must be {'made of numbers' if expected.ndim else 'a number'}, not {type(answer).__name__}."
    if numbers.shape != expected.shape:
        if numbers.ndim == expected.ndim == 1:
            return f"{what} has {len(numbers)} numbers, but should have {len(expected)}."
        return f"{what} has shape {numbers.shape}, but should have {expected.shape}."
    if not np.isfinite(numbers).all():
        return f"{what} is not finite."
    difference = numbers - expected
    far = np.abs(difference) > tolerance * np.abs(expected).max(initial=0)
    if not far.any():
        return None
    if expected.ndim:
        first = ", ".join(map(str, np.argwhere(far)[0]))
        return f"{what} differs in {np.count_nonzero(far)} of {far.size} entries, first at [{first}]."
    return f"{what} is not {numbers:.4g}: that is too {'large' if difference > 0 else 'small'}."


def _filled(answer: Any) -> Any:
    """Return the answer. Raises _Blank if `...` stands in it, at any depth; a function raises it if it returns such.

    What is made one by one becomes a list, as it does for the grader.
    """
    if answer is ...:
        raise _Blank
    if isinstance(answer, Iterator | MappingView):
        answer = list(itertools.islice(answer, 10**6))
    if isinstance(answer, list | tuple | dict):
        for part in answer.values() if isinstance(answer, dict) else answer:
            _filled(part)
    return (lambda *args, **kwargs: _filled(answer(*args, **kwargs))) if callable(answer) else answer


def describe(error: BaseException) -> str:
    """The error's type and message. Never raises, even if its own `__str__` does."""
    try:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    except Exception:
        return type(error).__name__


def shorten(text: object, limit: int = 300) -> str:
    """One line of at most `limit` characters, which every encoding of Unicode can write."""
    line = " ".join(str(text)[: 4 * limit].split()).encode("utf-8", "replace").decode()
    return line if len(line) <= limit else f"{line[: limit - 2]} …"
