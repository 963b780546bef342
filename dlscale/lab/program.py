"""What a program does, read from its trace: who sends what, how much is computed, what is kept. Nothing is run.

The only reader of traced programs. `follow` walks through one and opens what is inside it (calls, loops, branches);
what is counted on the way is a `Reader`. Sizes are in bytes. Arguments may be arrays or `jax.ShapeDtypeStruct`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dlscale.lab import jax_internals

MOVES = frozenset({
    "axis_index", "bitcast_convert_type", "broadcast_in_dim", "concatenate", "convert_element_type", "copy",
    "dynamic_slice", "dynamic_update_slice", "gather", "iota", "optimization_barrier", "pad", "ppermute", "rev",
    "reshape", "scatter", "select_n", "slice", "split", "squeeze", "stack", "transpose",
})  # instructions that compute nothing: they copy, select and rearrange  # fmt: skip


class Reader:
    """What is known of an array, and how an equation passes it on. This one knows a number: the larger one counts."""

    def constant(self, value: Any) -> Any:
        """What is known of a constant."""
        return 0

    def equation(self, equation: JaxprEqn, given: list[Any]) -> list[Any]:
        """What is known of the results of one equation with nothing inside."""
        raise NotImplementedError

    def joined(self, several: Sequence[Any]) -> Any:
        """What is known of an array that is made of, or depends on, all of these."""
        return max(several, default=0)

    def after(self, value: Any, waited: Sequence[Any]) -> Any:
        """What is known of an array that is there only after others."""
        return self.joined([value, *waited])

    def number(self, value: Any) -> Any:
        """The number that an array of one element holds, or None: only the run will tell."""
        return None

    def turns(self) -> int:
        """How many turns of a loop to follow that ends when the numbers say so. It may raise ValueError."""
        return 1

    def part(self, whole: Any, array: Any) -> Any:
        """What is known of the part of an array that one turn of a loop gets, from the array's."""
        return whole

    def decided(self, ways: Sequence[Callable[[], list[Any]]]) -> list[Any]:
        """What is known where the numbers decide which of these ways a program takes."""
        return [self.joined(results) for results in zip(*(way() for way in ways), strict=True)]


def follow(program: ClosedJaxpr | Jaxpr, given: Sequence[Any], reader: Reader) -> list[Any]:
    """What is known of the results of a program, from what is known of its arguments; loops are gone through."""
    jaxpr = getattr(program, "jaxpr", program)
    known = dict(zip(jaxpr.invars, given, strict=True))
    known |= {v: reader.constant(c) for v, c in zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True)}

    def look(v: Var | Literal) -> Any:
        return reader.constant(v.val) if isinstance(v, Literal) else known[v]

    for equation in jaxpr.eqns:
        results = _results(equation, [look(v) for v in equation.invars], reader)
        known.update(zip(equation.outvars, results, strict=True))
    return [look(v) for v in jaxpr.outvars]


def _results(equation: JaxprEqn, given: list[Any], reader: Reader) -> list[Any]:
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        fixed, count = jax_internals.scan_counts(params)
        rows, shapes = given[fixed + count :], [v.aval for v in equation.invars[fixed + count :]]
        carry, made = given[fixed : fixed + count], []
        for _ in range(params["length"]):
            results = follow(params["jaxpr"], [*given[:fixed], *carry, *map(reader.part, rows, shapes)], reader)
            carry, made = results[:count], [*made, results[count:]]
        return [*carry, *(reader.joined([row[i] for row in made]) for i in range(len(equation.outvars) - count))]
    if name == "while":
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def loop() -> list[Any]:
            carry, turn, goes_on = given[last:], 0, True
            while goes_on:
                test = follow(params["cond_jaxpr"], [*given[:first], *carry], reader)
                known = reader.number(test[0])
                goes_on = turn < reader.turns() if known is None else bool(known)
                if goes_on:
                    carry = follow(params["body_jaxpr"], [*given[first:last], *carry], reader)
                carry, turn = [reader.after(value, test) for value in carry], turn + 1
            return carry

        return reader.decided([loop])
    if name == "cond":
        waiting = [reader.after(value, given[:1]) for value in given[1:]]
        known, branches = reader.number(given[0]), params["branches"]
        chosen = branches if known is None else [branches[min(max(int(known), 0), len(branches) - 1)]]
        return reader.decided([partial(follow, branch, waiting, reader) for branch in chosen])
    inner = next((params[key] for key in ("jaxpr", "call_jaxpr") if key in params), None)
    if inner and not name.startswith("reduce"):  # a call; a reduction holds the function that it reduces with
        return follow(inner, given, reader)
    return reader.equation(equation, given)


def _elements(*several: Any) -> int:
    return sum(math.prod(array.shape) for array in several)


def nbytes(*several: Any) -> int:
    """Bytes of arrays, or of their shapes."""
    return sum(_elements(array) * array.dtype.itemsize for array in several)


def _made(equation: JaxprEqn) -> list[Any]:
    """What an equation computes: its results, but of an array changed in some places only those."""
    return [(equation.invars[2] if equation.params.get("update_jaxpr") else v).aval for v in equation.outvars]


# Messages


class Message(NamedTuple):
    """Some workers send equally much at the same time: sender and receiver in each row of `pairs` (n, 2)."""

    pairs: np.ndarray
    bytes: int


class Round(NamedTuple):
    """Messages of which none waits for another one, and the bytes that each worker combines when they are there."""

    messages: list[Message]
    combined: int


@dataclass(frozen=True)
class Schedule:
    """Who sends how much to whom, in which round."""

    workers: int
    rounds: list[Round]

    def sent(self) -> np.ndarray:
        """(rounds, workers) bytes that each worker sends."""
        return self._of(0)

    def received(self) -> np.ndarray:
        """(rounds, workers) bytes that each worker receives."""
        return self._of(1)

    def _of(self, side: int) -> np.ndarray:
        table = np.zeros((len(self.rounds), self.workers), np.int64)
        for row, (messages, _) in zip(table, self.rounds, strict=True):
            for pairs, size in messages:
                np.add.at(row, pairs[:, side], size)
        return table


def trace(f: Callable[..., Any], workers: int, *args: Any, axis_name: str = "workers") -> ClosedJaxpr:
    """The program of one of so many workers along an axis of this name, each with arguments of these shapes."""
    return jax.make_jaxpr(f, axis_env=[(axis_name, workers)])(*args)


def schedule(f: Callable[..., Any], workers: int, *args: Any, axis_name: str = "workers") -> Schedule:
    """The rounds of f, as one of the workers runs it: a message is a `jax.lax.ppermute`.

    It belongs to the first round in which all that it was made from is there. Combined is an element of what came in a
    message when it is computed with an element of something else, whatever the operation and however many
    instructions it takes; moving and selecting is free, and so are constants.
    Raises ValueError where the numbers decide whether a message is sent (in `cond` and `while_loop`).
    """
    program, reader = trace(f, workers, *args, axis_name=axis_name), _Messages()
    follow(program, [_Known(0, reader.new(array)) for array in program.in_avals], reader)
    return Schedule(workers, reader.rounds)


class _Known(NamedTuple):
    """The round in which an array is there, and the arrays that its elements were computed from, one by one."""

    round: int
    origins: frozenset[int]


class _Messages(Reader):
    """Each array has its origins: an argument, what came in a message, or what moving made of several arrays. Where
    arrays of different origins meet in a computation, their elements are combined, and only the first time: the
    instructions of one operation (`logaddexp` has ten) meet the same origins again.
    """

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self.combined: set[frozenset[int]] = set()
        self.itemsizes: list[int] = []  # of each origin

    def new(self, array: Any) -> frozenset[int]:
        self.itemsizes.append(array.dtype.itemsize)
        return frozenset([len(self.itemsizes) - 1])

    def constant(self, value: Any) -> _Known:
        return _Known(0, frozenset())

    def joined(self, several: Sequence[_Known]) -> _Known:
        rounds, origins = zip(*several, strict=True) if several else ((0,), ())
        return _Known(max(rounds), frozenset().union(*origins))

    def part(self, whole: _Known, array: Any) -> _Known:
        return whole._replace(origins=self.new(array)) if whole.origins else whole

    def decided(self, ways: Sequence[Callable[[], list[_Known]]]) -> list[_Known]:
        before = sum(len(messages) for messages, _ in self.rounds)
        results = super().decided(ways)
        if sum(len(messages) for messages, _ in self.rounds) > before:
            raise ValueError("Numbers decide whether a message is sent: take it out of `cond` and `while_loop`.")
        return results

    def equation(self, equation: JaxprEqn, given: list[_Known]) -> list[_Known]:
        name, (latest, origins) = equation.primitive.name, self.joined(given)
        if name == "ppermute":
            array, pairs = equation.outvars[0].aval, [pair for pair in equation.params["perm"] if pair[0] != pair[1]]
            if latest == len(self.rounds):
                self.rounds.append(Round([], 0))
            if pairs and nbytes(array):
                self.rounds[latest].messages.append(Message(np.array(pairs), nbytes(array)))
            return [_Known(latest + 1, self.new(array))]
        known = [(_elements(v.aval), k.origins) for v, k in zip(equation.invars, given, strict=True) if k.origins]
        if name in MOVES and name != "select_n" and origins:  # the same elements as an array had, or others?
            results = [v.aval for v in equation.outvars]
            return [_Known(latest, origins if (_elements(a), origins) in known else self.new(a)) for a in results]
        meet = name not in MOVES and len({k for _, k in known}) > 1
        if latest and meet and origins not in self.combined:  # else these elements have met before
            self.combined.add(origins)
            size = _elements(*_made(equation)) * max(self.itemsizes[origin] for origin in origins)
            messages, combined = self.rounds[latest - 1]
            self.rounds[latest - 1] = Round(messages, combined + size)
        return [_Known(latest, origins) for _ in equation.outvars]


# Operations


class WorkDepth(NamedTuple):
    """Operations of a program, and those of its longest chain in which each one needs the one before (Brent 1974).

    With so many processors p, a program takes at least max(depth, work / p) steps and at most depth + work / p.
    """

    work: int
    depth: int


def work_depth(f: Callable[..., Any], *args: Any) -> WorkDepth:
    """Work and depth of f: an operation for each number that is computed, none for moving and selecting.

    A sum of n numbers is n - 1 operations in ⌈log₂ n⌉ levels, so is each number of a matrix product or convolution
    after its n multiplications; running sums go up and down a tree; a Fourier transform of n numbers is 5 n log₂ n.
    Sorting and what else has no rule counts as one operation for each result. The turns of a `scan` follow one another,
    and those of a `while_loop` whose counter starts at a constant; of the branches of a `cond` the worst counts, if it
    is not known which is taken. Raises ValueError for a loop that ends when its numbers say so.
    """
    program, reader = jax.make_jaxpr(f)(*args), _WorkDepth()
    found = follow(program, [_Done(0) for _ in program.in_avals], reader)
    return WorkDepth(reader.work, max((result.depth for result in found), default=0))


class _Done(NamedTuple):
    """At which level an array is there, and the number that it holds if that is known and it has one element."""

    depth: int
    number: Any = None


COUNTING: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum, "rem": np.fmod,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
    "and": np.bitwise_and, "or": np.bitwise_or, "not": np.invert, "sign": np.sign,
    "clamp": lambda low, x, high: np.clip(x, low, high), "select_n": lambda which, *cases: cases[int(which)],
}  # what loops count and branch with, on single numbers  # fmt: skip
COUNTING |= dict.fromkeys(("convert_element_type", "squeeze", "reshape", "broadcast_in_dim"), lambda x: x)


class _WorkDepth(Reader):
    work = 0

    def constant(self, value: Any) -> _Done:
        plain = not jax.dtypes.issubdtype(jax.dtypes.result_type(value), jax.dtypes.extended)  # no key
        return _Done(0, np.asarray(value).reshape(()) if plain and np.size(value) == 1 else None)

    def joined(self, several: Sequence[_Done]) -> _Done:
        return _Done(max((one.depth for one in several), default=0))

    def after(self, value: _Done, waited: Sequence[_Done]) -> _Done:
        return value._replace(depth=self.joined([value, *waited]).depth)

    def number(self, value: _Done) -> Any:
        return value.number

    def turns(self) -> int:
        advice = "Let it have a fixed number of turns (`scan`, `fori_loop`), or ask about what one turn does."
        raise ValueError(f"This program has a loop that ends when its numbers say so: nobody can count it. {advice}")

    def part(self, whole: _Done, array: Any) -> _Done:
        return _Done(whole.depth)

    def decided(self, ways: Sequence[Callable[[], list[_Done]]]) -> list[_Done]:
        before, results, works = self.work, [], []
        for way in ways:
            self.work = before
            results.append(way())
            works.append(self.work)
        self.work = max(works)
        return results[0] if len(results) == 1 else list(map(self.joined, zip(*results, strict=True)))

    def equation(self, equation: JaxprEqn, given: list[_Done]) -> list[_Done]:
        work, depth = _operations(equation)
        self.work += work
        level, numbers = self.joined(given).depth + depth, [one.number for one in given]
        compute = COUNTING.get(equation.primitive.name)
        if compute and all(n is not None for n in numbers) and _elements(equation.outvars[0].aval) == 1:
            return [_Done(level, compute(*numbers))]
        return [_Done(level)] * len(equation.outvars)


def _operations(equation: JaxprEqn) -> tuple[int, int]:
    """Work and depth of one instruction."""
    name, params, made = equation.primitive.name, equation.params, _elements(*_made(equation))
    shapes = [v.aval.shape for v in equation.invars]
    if name in MOVES or not made:
        return 0, 0
    if name == "dot_general":
        summed, products = math.prod(shapes[0][axis] for axis in params["dimension_numbers"][0][0]), 1
    elif name == "conv_general_dilated":
        summed, products = math.prod(shapes[1]) // shapes[1][params["dimension_numbers"].rhs_spec[0]], 1
    elif name.startswith("reduce_window"):
        summed, products = math.prod(params["window_dimensions"]), 0
    elif name.startswith(("reduce", "arg")):
        summed, products = math.prod(shapes[0]) * len(equation.outvars) // made, 0
    elif name.startswith("cum"):
        length = shapes[0][params["axis"]]
        return 2 * (made - made // length), 2 * (length - 1).bit_length()
    elif name == "fft":  # each level multiplies by a root of one and adds: complex numbers, so five for each at a level
        levels = (math.prod(params["fft_lengths"]) - 1).bit_length()
        return 5 * levels * min(made, math.prod(shapes[0])), 3 * levels
    else:
        return made, 1
    return made * (max(summed - 1, 0) + products * summed), products + max(summed - 1, 0).bit_length()


def flops(f: Callable[..., Any], *args: Any) -> float:
    """Floating-point operations of f, as the compiler counts them in the program that it is given."""
    return float(jax.jit(f).lower(*args).cost_analysis()["flops"])


# Memory


def kept_bytes(f: Callable[..., Any], *args: Any) -> int:
    """Bytes that the gradient of f needs beside f's arguments, its result and constants."""
    program = jax.make_jaxpr(lambda *args: jax.vjp(f, *args))(*args).jaxpr
    free = {*program.invars, *program.constvars}
    same: dict[Any, Any] = {}  # a reshaped array is the old one, seen in another way
    for e in program.eqns:
        if all(isinstance(v, Literal) for v in e.invars):  # a constant
            free.add(e.outvars[0])
        elif e.primitive.name == "reshape":
            same[e.outvars[0]] = same.get(e.invars[0], e.invars[0])
    result, *residuals = (same.get(v, v) for v in program.outvars if isinstance(v, Var))
    return nbytes(*(v.aval for v in set(residuals) - free - {result}))
