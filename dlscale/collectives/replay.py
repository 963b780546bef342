"""Watch a collective operation round by round: what has reached whom.

The traced program is run here in NumPy, instruction by instruction and for all workers at once, so nothing is compiled.
The numbers carry labels, one bit for the worker that they come from and one for their place in the array. Instead of
adding, the workers take the bitwise or: a "sum" then shows whose numbers are in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlscale.collectives import COLLECTIVES, Pairs
from dlscale.lab import checks

MOST_WORKERS = 20  # three bits for each fit into a label


class Frame(NamedTuple):
    """One round: sender and receiver of each message, and what workers have seen by its end.

    `seen` (workers, 2 · workers) counts, for each worker and place of the array, the workers whose numbers are in the
    sums that it has had there; where nothing is added, the workers whose numbers have come.
    """

    pairs: Pairs
    seen: np.ndarray


def replay(collective: str, workers: int, algorithm: str | None = None, **options: Any) -> list[Frame]:
    """The frames of a collective operation: the start, and one for each round of `dlscale.collectives.schedule`.

    The array has two places for each worker; where each worker has a part of it, a part is two places. For 2 to 20
    workers. Raises ValueError for an unknown collective, other numbers of workers, and what the operation refuses.
    """
    checks.known("collective", collective, COLLECTIVES)
    checks.whole("workers", workers, low=2, high=MOST_WORKERS)
    options |= {} if algorithm is None else {"algorithm": algorithm}
    if collective in ("all_reduce", "reduce", "reduce_scatter"):
        options["op"] = jnp.bitwise_or
    x = _start(collective, workers, options.get("root", 0))
    own = jax.ShapeDtypeStruct(x.shape[1:], "int32")
    with jax.disable_jit():  # which writes loops and inner functions out
        program = jax.make_jaxpr(
            lambda x: COLLECTIVES[collective](x, "workers", **options), axis_env=[("workers", workers)]
        )(own)
    _, messages = run(program, x)
    seen = np.zeros((workers, 2 * workers), np.int64)
    frames = [_frame(seen, [(w, w, x[w]) for w in range(workers)])]
    return frames + [_frame(seen, messages[number]) for number in sorted(messages)]


def _start(collective: str, workers: int, root: int) -> np.ndarray:
    """What each worker begins with: its array, the same in parts, or its own part of it; zeros where it is not used."""
    own, place = np.arange(workers)[:, None], np.arange(2 * workers)
    x = (1 << own) | (1 << workers + place)
    if collective in ("broadcast", "scatter"):
        x = np.where(own == root, x, 0)
    if collective in ("gather", "all_gather"):
        return x[place // 2 == own].reshape(workers, 2)
    return x if collective in ("all_reduce", "reduce", "broadcast") else x.reshape(workers, workers, 2)


def _frame(seen: np.ndarray, messages: list[tuple[int, int, np.ndarray]]) -> Frame:
    """Note in `seen`, worker bits, what the messages' labels say."""
    workers = len(seen)
    for _, receiver, content in messages:
        for label in content[content > 0].tolist():
            seen[receiver, (label >> workers).bit_length() - 1] |= label % (1 << workers)
    return Frame([(a, b) for a, b, _ in messages if a != b], np.bitwise_count(seen))


def run(program: Any, x: np.ndarray) -> tuple[list[np.ndarray], dict[int, list[tuple[int, int, np.ndarray]]]]:
    """Results (workers, …) of a program without loops for x (workers, …), and (sender, receiver, content) by round.

    Raises ValueError for an instruction that no collective of this package has.
    """
    workers = len(x)
    values = {program.jaxpr.invars[0]: x}
    values |= {v: _for_all(value, workers) for v, value in zip(program.jaxpr.constvars, program.consts, strict=True)}
    ready: dict[Any, int] = {}
    messages: dict[int, list[tuple[int, int, np.ndarray]]] = {}

    def value(v: Any) -> np.ndarray:
        return _for_all(v.val, workers) if hasattr(v, "val") else values[v]

    for equation in program.jaxpr.eqns:
        name, given = equation.primitive.name, [value(v) for v in equation.invars]
        latest = max((ready.get(v, 0) for v in equation.invars if not hasattr(v, "val")), default=0)
        if name == "ppermute":
            latest += 1
            results = [np.zeros_like(given[0])]
            for a, b in equation.params["perm"]:
                results[0][b] = given[0][a]
            moved = [(a, b, given[0][a]) for a, b in equation.params["perm"] if a != b]
            messages.setdefault(latest, []).extend(moved)
        else:
            found = INSTRUCTIONS[checks.known("instruction", name, INSTRUCTIONS)](equation, workers, *given)
            results = found if isinstance(found, list) else [found]
        for v, result in zip(equation.outvars, results, strict=True):
            values[v], ready[v] = result, latest
    return [value(v) for v in program.jaxpr.outvars], messages


# One instruction of a traced program, for all workers: its arrays are (workers, …)


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
