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
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

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
        fixed, count = params["num_consts"], params["num_carry"]
        rows, shapes = given[fixed + count :], [v.aval for v in equation.invars[fixed + count :]]
        carry, made = given[fixed : fixed + count], []
        for _ in range(params["length"]):
            results = follow(params["jaxpr"], [*given[:fixed], *carry, *map(reader.part, rows, shapes)], reader)
            carry, made = results[:count], [*made, results[count:]]
        return [*carry, *(reader.joined([row[i] for row in made]) for i in range(len(equation.outvars) - count))]
    if name == "while":
        first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

        def loop() -> list[Any]:
            carry = given[last:]
            for turn in range(2):  # one, and the test that ends it; the program does not tell how many
                test = follow(params["cond_jaxpr"], [*given[:first], *carry], reader)
                if turn == 0:
                    carry = follow(params["body_jaxpr"], [*given[first:last], *carry], reader)
                carry = [reader.joined([value, *test]) for value in carry]
            return carry

        return reader.decided([loop])
    if name == "cond":
        waiting = [reader.joined([given[0], value]) for value in given[1:]]
        return reader.decided([partial(follow, branch, waiting, reader) for branch in params["branches"]])
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


class Effort(NamedTuple):
    """Operations of a program, and those of its longest chain in which each one needs the one before (Brent 1974).

    With so many processors p, a program takes at least max(depth, work / p) steps and at most depth + work / p.
    """

    work: int
    depth: int


def effort(f: Callable[..., Any], *args: Any) -> Effort:
    """Work and depth of f: an operation for each number that is computed, none for moving and selecting.

    A sum of n numbers is n - 1 operations in ⌈log₂ n⌉ levels, so is each number of a matrix product or convolution
    after its n multiplications; running sums go up and down a tree. Sorting and what else has no rule counts as one
    operation for each result. A `scan` takes its turns one after the other, a `while_loop` is taken to have one, of
    the branches of a `cond` the worst counts.
    """
    program, reader = jax.make_jaxpr(f)(*args), _Effort()
    depths = follow(program, [0] * len(program.in_avals), reader)
    return Effort(reader.work, max(depths, default=0))


class _Effort(Reader):
    work = 0

    def decided(self, ways: Sequence[Callable[[], list[int]]]) -> list[int]:
        before, results, works = self.work, [], []
        for way in ways:
            self.work = before
            results.append(way())
            works.append(self.work)
        self.work = max(works)
        return [max(depths) for depths in zip(*results, strict=True)]

    def equation(self, equation: JaxprEqn, given: list[int]) -> list[int]:
        work, depth = _effort(equation)
        self.work += work
        return [max(given, default=0) + depth] * len(equation.outvars)


def _effort(equation: JaxprEqn) -> tuple[int, int]:
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
    else:
        return made, 1
    return made * (max(summed - 1, 0) + products * summed), products + max(summed - 1, 0).bit_length()


def flops(f: Callable[..., Any], *args: Any) -> float:
    """Floating-point operations of f, as the compiler counts them in the program that it is given."""
    return float(jax.jit(f).lower(*args).cost_analysis()["flops"])


# Memory

CHECKPOINTS = ("remat2", "checkpoint")  # the names of `jax.checkpoint` in a program


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


def forgetting_nothing(f: Callable[..., Any], *args: Any) -> Callable[..., list[Any]]:
    """The same function, of flat arguments and results, whose checkpoints (`jax.checkpoint`) keep everything."""

    def saving(part: Any) -> Any:
        if isinstance(part, ClosedJaxpr):
            return part.replace(jaxpr=saving(part.jaxpr))
        return part.replace(eqns=list(map(kept, part.eqns))) if isinstance(part, Jaxpr) else part

    def kept(equation: JaxprEqn) -> JaxprEqn:
        everything = {"policy": jax.checkpoint_policies.everything_saveable}
        params = jax.tree.map(saving, equation.params)  # the branches of a `cond` are a tuple
        return equation.replace(params=params | (everything if equation.primitive.name in CHECKPOINTS else {}))

    return jaxpr_as_fun(saving(jax.make_jaxpr(f)(*args)))
