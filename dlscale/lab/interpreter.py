"""Run a traced program in NumPy, instruction by instruction and for all workers at once, and look at every message.

Nothing is compiled. It knows the instructions of this course's collectives, on whole numbers of up to 63 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dlscale.lab import checks, program

Messages = dict[int, list[tuple[int, int, np.ndarray]]]


def run(f: Callable[..., Any], x: np.ndarray, axis_name: str = "workers") -> tuple[np.ndarray, Messages]:
    """The workers' results (workers, …) of f for their x (workers, …), and (sender, receiver, content) by round.

    Raises ValueError for an instruction that is not known here.
    """
    with jax.disable_jit():  # which writes loops and inner functions out
        traced = program.trace(f, len(x), jax.ShapeDtypeStruct(x.shape[1:], "int32"), axis_name=axis_name)
    workers = _Workers(len(x))
    ((result, _),) = program.follow(traced, [_There(x, 0)], workers)
    return result, workers.messages


class _There(NamedTuple):
    """An array of all workers (workers, …) and the round in which it is there."""

    array: np.ndarray
    round: int


class _Workers(program.Reader):
    def __init__(self, count: int) -> None:
        self.count, self.messages = count, Messages()

    def constant(self, value: Any) -> _There:
        return _There(_for_all(value, self.count), 0)

    def equation(self, equation: Any, given: list[_There]) -> list[_There]:
        name, arrays = equation.primitive.name, [there.array for there in given]
        latest = max((there.round for there in given), default=0)
        if name == "ppermute":
            (sent,), latest = arrays, latest + 1
            received = np.zeros_like(sent)
            for a, b in equation.params["perm"]:
                received[b] = sent[a]
            moved = [(a, b, sent[a]) for a, b in equation.params["perm"] if a != b]
            self.messages.setdefault(latest, []).extend(moved)
            return [_There(received, latest)]
        found = INSTRUCTIONS[checks.known("instruction", name, INSTRUCTIONS)](equation, self.count, *arrays)
        return [_There(array, latest) for array in (found if isinstance(found, list) else [found])]


# One instruction for all workers: its arrays are (workers, …)


def _for_all(constant: Any, workers: int) -> np.ndarray:
    constant = np.asarray(constant)
    wide = constant.astype(np.int64) if constant.dtype.kind == "i" else constant  # labels need more than 32 bits
    return np.broadcast_to(wide, (workers, *wide.shape))


def _by_element(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    def apply(equation: Any, workers: int, *given: np.ndarray) -> np.ndarray:
        rank = max(x.ndim for x in given)
        return function(*(x.reshape(x.shape + (1,) * (rank - x.ndim)) for x in given))  # a scalar beside arrays

    return apply


def _reshape(equation: Any, workers: int, x: np.ndarray) -> np.ndarray:
    return x.reshape(workers, *equation.outvars[0].aval.shape)


def _broadcast_in_dim(equation: Any, workers: int, x: np.ndarray) -> np.ndarray:
    shape, dimensions = equation.params["shape"], equation.params["broadcast_dimensions"]
    spread = [x.shape[1 + dimensions.index(d)] if d in dimensions else 1 for d in range(len(shape))]
    return np.broadcast_to(x.reshape(workers, *spread), (workers, *shape))


def _iota(equation: Any, workers: int) -> np.ndarray:
    shape, dimension = equation.params["shape"], equation.params["dimension"]
    return _for_all(np.indices(shape)[dimension], workers)


def _slice(equation: Any, workers: int, x: np.ndarray) -> np.ndarray:
    start, stop = equation.params["start_indices"], equation.params["limit_indices"]
    strides = equation.params["strides"] or (1,) * len(start)
    return x[(slice(None), *map(slice, start, stop, strides))]


def _split(equation: Any, workers: int, x: np.ndarray) -> list[np.ndarray]:
    return np.split(x, np.cumsum(equation.params["sizes"])[:-1], 1 + equation.params["axis"])


def _pad(equation: Any, workers: int, x: np.ndarray, filling: np.ndarray) -> np.ndarray:
    widths = [(low, high) for low, high, _ in equation.params["padding_config"]]
    return np.pad(x, [(0, 0), *widths], constant_values=filling.ravel()[0])


def _dynamic_slice(equation: Any, workers: int, x: np.ndarray, *starts: np.ndarray) -> np.ndarray:
    sizes, starts = equation.params["slice_sizes"], np.stack(starts, axis=1)
    starts = np.clip(starts, 0, np.subtract(x.shape[1:], sizes))
    return np.stack([own[tuple(map(slice, start, start + sizes))] for own, start in zip(x, starts, strict=True)])


def _gather(equation: Any, workers: int, x: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Rows of each worker's array; no collective asks for more."""
    return x[np.arange(workers)[:, None], at.reshape(workers, -1)].reshape(workers, *equation.outvars[0].aval.shape)


def _scatter(equation: Any, workers: int, x: np.ndarray, at: np.ndarray, new: np.ndarray) -> np.ndarray:
    """New rows in each worker's array."""
    result, at = x.copy(), at.reshape(workers, -1)
    result[np.arange(workers)[:, None], at] = new.reshape(*at.shape, *x.shape[2:])
    return result


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "add": _by_element(np.add), "sub": _by_element(np.subtract), "mul": _by_element(np.multiply),
    "rem": _by_element(np.fmod), "and": _by_element(np.bitwise_and), "or": _by_element(np.bitwise_or),
    "eq": _by_element(np.equal), "ne": _by_element(np.not_equal), "lt": _by_element(np.less),
    "le": _by_element(np.less_equal), "gt": _by_element(np.greater), "ge": _by_element(np.greater_equal),
    "select_n": _by_element(lambda which, no, yes: np.where(which, yes, no)),
    "axis_index": lambda equation, workers: np.arange(workers),
    "concatenate": lambda equation, workers, *parts: np.concatenate(parts, 1 + equation.params["dimension"]),
    "stack": lambda equation, workers, *parts: np.stack(parts, 1 + equation.params["axis"]),
    "convert_element_type": lambda equation, workers, x: x,
    "reshape": _reshape, "squeeze": _reshape, "broadcast_in_dim": _broadcast_in_dim, "iota": _iota, "slice": _slice,
    "split": _split, "pad": _pad, "dynamic_slice": _dynamic_slice, "gather": _gather, "scatter": _scatter,
}  # fmt: skip
