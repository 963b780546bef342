"""Run a traced program in NumPy, instruction by instruction and worker by worker, and look at every message.

Nothing is compiled. It knows the instructions of this course's collectives, on whole numbers of up to 63 bits.
"""

from collections.abc import Callable, Sequence
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
    return np.array(result), workers.messages


class _There(NamedTuple):
    """Each worker's array, and the round in which it is there."""

    arrays: Sequence[np.ndarray]
    round: int


class _Workers(program.Reader):
    def __init__(self, count: int) -> None:
        self.count, self.messages = count, Messages()

    def constant(self, value: Any) -> _There:
        return _There([np.asarray(value, np.int64)] * self.count, 0)  # labels need more than 32 bits

    def equation(self, equation: Any, given: list[_There]) -> list[_There]:
        name = equation.primitive.name
        latest = max((there.round for there in given), default=0)
        if name == "axis_index":
            return [_There(np.arange(self.count), 0)]
        if name == "ppermute":
            sent, received = given[0].arrays, [np.zeros_like(array) for array in given[0].arrays]
            for a, b in equation.params["perm"]:
                received[b] = sent[a]
            moved = [(a, b, sent[a]) for a, b in equation.params["perm"] if a != b]
            self.messages.setdefault(latest + 1, []).extend(moved)
            return [_There(received, latest + 1)]
        instruction = INSTRUCTIONS[checks.known("instruction", name, INSTRUCTIONS)]
        params = {} if isinstance(instruction, np.ufunc) else equation.params
        own = zip(*(there.arrays for there in given), strict=True) if given else [()] * self.count
        made = [instruction(*arrays, **params) for arrays in own]
        return [
            _There(arrays, latest)
            for arrays in (zip(*made, strict=True) if equation.primitive.multiple_results else [made])
        ]


# One instruction of one worker, called as its primitive is


def _broadcast_in_dim(x: np.ndarray, shape: tuple, broadcast_dimensions: tuple, **_: Any) -> np.ndarray:
    new = [axis for axis in range(len(shape)) if axis not in broadcast_dimensions]
    return np.broadcast_to(np.expand_dims(x, new), shape)


def _slice(x: np.ndarray, start_indices: tuple, limit_indices: tuple, strides: tuple | None, **_: Any) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or [1] * x.ndim))]


def _pad(x: np.ndarray, filling: np.ndarray, padding_config: tuple, **_: Any) -> np.ndarray:
    return np.pad(x, [(low, high) for low, high, _ in padding_config], constant_values=filling)


def _dynamic_slice(x: np.ndarray, *starts: np.ndarray, slice_sizes: tuple, **_: Any) -> np.ndarray:
    starts = np.clip(starts, 0, np.subtract(x.shape, slice_sizes))
    return x[tuple(map(slice, starts, starts + slice_sizes))]


def _scatter(x: np.ndarray, at: np.ndarray, new: np.ndarray, **_: Any) -> np.ndarray:
    result = x.copy()
    result[at[..., 0]] = new
    return result


INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "rem": np.fmod, "and": np.bitwise_and, "or": np.bitwise_or,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "select_n": lambda which, no, yes: np.where(which, yes, no), "convert_element_type": lambda x, **_: x,
    "reshape": lambda x, new_sizes, **_: x.reshape(new_sizes), "squeeze": lambda x, dimensions: x.squeeze(dimensions),
    "iota": lambda shape, dimension, **_: np.indices(shape)[dimension],
    "concatenate": lambda *parts, dimension, **_: np.concatenate(parts, dimension),
    "stack": lambda *parts, axis, **_: np.stack(parts, axis),
    "split": lambda x, sizes, axis, **_: np.split(x, np.cumsum(sizes)[:-1], axis),
    "unstack": lambda x, axis: list(np.moveaxis(x, axis, 0)),  # from JAX 0.11 on
    "gather": lambda x, at, **_: x[at[..., 0]],  # rows, as in `scatter`: no collective asks for more
    "scatter": _scatter, "broadcast_in_dim": _broadcast_in_dim, "slice": _slice, "pad": _pad,
    "dynamic_slice": _dynamic_slice,
}  # fmt: skip
