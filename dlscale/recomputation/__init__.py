"""What training remembers for the backward pass, and plans to forget some of it and compute it again.

A chain is a list of layers, one after the other; layer i takes the output of layer i - 1. A plan says for each layer
whether what its gradient needs is kept, or forgotten and computed again from the last thing that was kept. Sizes are in
bytes, costs in any unit (the library counts floating-point operations), both per call.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlscale.lab import checks, jax_internals, program

Items = tuple[Any, ...]  # layer numbers and, for what is forgotten, Items
LayerFunction = Callable[[Any, Array], Array]
Curve = tuple[np.ndarray, np.ndarray, list[Any]]  # of best plans: rising peaks, falling costs, the plans' items


class Layer(NamedTuple):
    """What a layer takes, in bytes and costs."""

    output: float
    saved: float  # all that is held while it is kept for its gradient; its output included, its input not
    forward: float = 1.0  # cost
    backward: float = 2.0  # cost


class Chain(NamedTuple):
    """Layers and the bytes of the first one's input, which always stays and is never counted."""

    input: float
    layers: tuple[Layer, ...]

    @classmethod
    def uniform(cls, length: int) -> Chain:
        """`length` layers with forward cost 1 and backward cost 2 that keep their output of size 1."""
        return cls(1.0, (Layer(1.0, 1.0),) * checks.whole("length", length))

    def size(self, position: int) -> float:
        """Bytes between layers position - 1 and position; the gradient there has as many."""
        return self.layers[position - 1].output if position else self.input


class Step(NamedTuple):
    """One operation of a plan, and what is in memory while it runs."""

    operation: str  # "forward": keeps nothing; "tape": forward, keeping what the gradient needs; "backward"
    layer: int
    held: tuple[tuple[str, int], ...]  # ("output", position) and ("saved", layer), in the order of keeping
    bytes: float  # of all that, of the gradients, and of what the operation itself reads and writes


@dataclass(frozen=True)
class Plan:
    """Layer numbers in order; what stands in an inner tuple is forgotten, and computed again when its turn comes back.

    (0, 1, 2) keeps all; ((0, 1), 2) keeps, of the first two layers, nothing but their input, and while it computes them
    again, both. Tuples nest: what is computed again follows a plan too.
    Raises ValueError unless every layer from 0 on stands there once, in order.
    """

    items: Items

    def __post_init__(self) -> None:
        numbers = [layer for layer, _ in _runs(self.items)]
        if not numbers or numbers != list(range(len(numbers))):
            raise ValueError(f"A plan names each layer once, in order from 0, not {numbers}.")

    def __len__(self) -> int:
        return len(self.forwards())

    def __str__(self) -> str:
        return str(self.items).translate(str.maketrans("()", "[]", ","))[1:-1]

    def forwards(self) -> np.ndarray:
        """(layers,) how often each layer runs forward in one gradient."""
        return np.array([runs for _, runs in _runs(self.items)])

    def cost(self, chain: Chain) -> float:
        """Cost of one gradient: all runs forward, and one backward for each layer."""
        layers = zip(self.forwards(), self._each("layers", chain.layers), strict=True)
        return float(sum(n * layer.forward + layer.backward for n, layer in layers))

    def peak(self, chain: Chain) -> float:
        """The most bytes in memory at any time, beside parameters, their gradients and the input."""
        return max(step.bytes for step in self.steps(chain))

    def steps(self, chain: Chain) -> list[Step]:
        """Every operation of one gradient, in order. The gradient of the chain's output is in memory from the start."""
        self._each("layers", chain.layers)
        return list(_steps(self.items, chain, ()))

    def _each(self, what: str, values: Sequence[Any]) -> Sequence[Any]:
        """The values themselves, if there is one for each layer."""
        if len(values) != len(self):
            raise ValueError(f"The plan is for {len(self)} layers, but {len(values)} {what} are given.")
        return values


def _runs(items: Items, times: int = 1) -> Iterator[tuple[int, int]]:
    """Each layer, and how often it runs forward: once more for each tuple around it."""
    for item in items:
        if isinstance(item, tuple):
            yield from _runs(item, times + 1)
        else:
            yield item, times


def _steps(items: Items, chain: Chain, held: tuple[tuple[str, int], ...]) -> Iterator[Step]:
    """Forward and back over `items`, while `held` is in memory."""

    def step(operation: str, layer: int, more: float) -> Step:
        sizes = (chain.layers[i].saved if what == "saved" else chain.size(i) for what, i in held)
        return Step(operation, layer, held, sum(sizes) + more)

    gradient = chain.size(max(layer for layer, _ in _runs(items)) + 1)
    for item in items:
        if isinstance(item, tuple):
            inner = [layer for layer, _ in _runs(item)]
            for i in inner:
                reads = chain.size(i) if i > inner[0] else 0  # the first one's input is held
                yield step("forward", i, reads + chain.size(i + 1) + gradient)
            held += (("output", inner[-1] + 1),)
        else:
            yield step("tape", item, chain.layers[item].saved + gradient)
            held += (("saved", item),)
    for item in reversed(items):
        if isinstance(item, tuple):
            held = held[:-1]
            yield from _steps(item, chain, held)
        else:
            yield step("backward", item, chain.size(item + 1) + chain.size(item))
            held = held[:-1]


# Plans


def keep_all(length: int) -> Plan:
    """Nothing is computed again: memory grows with the length."""
    return Plan(tuple(range(checks.whole("length", length))))


def keep_none(length: int) -> Plan:
    """Only the input is kept: each step back begins at the start, length · (length - 1) / 2 runs more."""
    return revolve(length, 1)


def every(length: int, k: int) -> Plan:
    """Keep each k-th activation and compute the layers between again, once (Chen et al. 2016, arXiv:1604.06174).

    With k = √length memory grows with 2 √length. The last k layers, whose turn comes at once, are kept.
    """
    length, k = checks.whole("length", length), checks.whole("k", k)
    parts = [tuple(range(start, min(start + k, length))) for start in range(0, length, k)]
    return Plan((*parts[:-1], *parts[-1]))


def recursive(length: int) -> Plan:
    """Forget the first half, treat both halves in the same way: memory log₂ length, ½ length log₂ length runs more."""
    return Plan(_split(0, checks.whole("length", length), 0, lambda n, _: n // 2))


def revolve(length: int, slots: int) -> Plan:
    """The fewest runs for equal layers with `slots` stored activations, the input among them (Griewank & Walther 2000).

    Beside the one that keeps what its gradient needs, they are r · length - β(slots + 1, r - 1) runs forward, with
    β(s, r) = (s + r)! / (s! r!) and the r for which β(slots, r - 1) < length ≤ β(slots, r). The plan nests r deep.
    """
    length, slots = checks.whole("length", length), checks.whole("slots", slots)

    def first(n: int, s: int) -> int:
        """The fewest that may be forgotten: the rest must be done with s - 1 slots and at most r repeats of a layer."""
        r = next(r for r in itertools.count(1) if math.comb(s + r, r) >= n)
        return max(1, n - math.comb(s - 1 + r, r), math.comb(s + r - 2, s))

    return Plan(_split(0, length, slots, first))


def _split(start: int, n: int, slots: int, first: Callable[[int, int], int]) -> Items:
    """Forget the first(n, slots) of n layers, and treat them, and the rest with a slot less, in the same way."""
    items: list[Any] = []
    while n > 1:
        k = first(n, slots)
        items.append(_split(start, k, slots, first))
        start, n, slots = start + k, n - k, slots - 1
    return (*items, start)


class Tradeoff(NamedTuple):
    """The cheapest plan of its peak: no plan is better in one of the two and as good in the other."""

    peak: float
    cost: float
    plan: Plan


@functools.lru_cache(maxsize=16)
def frontier(chain: Chain) -> tuple[Tradeoff, ...]:
    """Every best trade-off between memory and cost, from the smallest peak to the one where nothing runs twice.

    Dynamic programming over the parts of the chain, exact for unequal sizes and costs. Its plans are the optimal
    persistent schedules of Beaumont et al. 2019 (arXiv:1911.13214): what is kept stays until its turn comes.
    """
    layers, size, n = chain.layers, chain.size, len(chain.layers)
    best: dict[tuple[int, int], Curve] = {(t, t): (np.zeros(1), np.zeros(1), [()]) for t in range(n + 1)}
    for s, t in sorted(itertools.combinations(range(n + 1), 2), key=lambda part: part[1] - part[0]):
        kept = layers[s]
        needed = kept.saved + max(size(s + 1) + size(s), size(t))
        alone = np.array([needed]), np.array([kept.forward + kept.backward]), [s]
        ways = [(alone, best[s + 1, t], kept.saved, 0.0, 0.0)]
        running, passing = 0.0, 0.0  # cost of the first run, and what its widest layer needs
        for k in range(s + 1, t):
            running += layers[k - 1].forward
            passing = max(passing, (size(k - 1) if k - 1 > s else 0) + size(k))
            ways.append((best[s, k], best[k, t], size(k), passing + size(t), running))
        best[s, t] = _best_of(ways)
    peaks, costs, plans = best[0, n]
    return tuple(map(Tradeoff, peaks.tolist(), costs.tolist(), map(Plan, plans)))


def _best_of(ways: Sequence[tuple[Curve, Curve, float, float, float]]) -> Curve:
    """The best plans of a part of a chain: one for a first item, and one for the rest with that item's bytes held.

    Each way to choose the first item: curves of it and of the rest, the bytes held, the least peak, and a cost beside.
    """
    found = []
    for number, ((left, left_costs, _), (right, right_costs, _), held, least, more) in enumerate(ways):
        peaks = np.union1d(left, right + held)
        peaks = peaks[peaks >= max(left[0], right[0] + held)]
        i, j = (np.searchsorted(some, peaks, "right") - 1 for some in (left, right + held))
        costs = left_costs[i] + right_costs[j] + more
        found.append((np.maximum(peaks, least), costs, np.full(len(peaks), number), i, j))
    peaks, costs, *choices = map(np.concatenate, zip(*found, strict=True))
    order = np.lexsort((costs, peaks))
    cheapest = np.minimum.accumulate(costs[order])
    keep = order[np.r_[True, cheapest[1:] < cheapest[:-1]]]
    plans = [(ways[number][0][2][i], *ways[number][1][2][j]) for number, i, j in np.transpose(choices)[keep]]
    return peaks[keep], costs[keep], plans


def optimal_plan(chain: Chain, memory: float) -> Plan:
    """The cheapest plan whose peak is at most `memory` bytes; see `frontier`.

    Raises ValueError if no plan fits, and names the least memory that does.
    """
    points = frontier(chain)
    if not memory >= points[0].peak:
        raise ValueError(f"No plan fits a memory of {memory} bytes: this chain needs at least {points[0].peak}.")
    return [point.plan for point in points if point.peak <= memory * (1 + 1e-12)][-1]  # sums of bytes are rounded


# Plans that run


def apply(plan: Plan, layers: Sequence[LayerFunction]) -> Callable[[Sequence[Any], Array], Array]:
    """The function f(list_of_params, x) of a chain of layers, each layer(params, x); its gradient follows the plan.

    Compile it with `recomputation.jit`. It has no forward-mode derivative (`jax.jvp`). Raises ValueError if plan and
    layers differ in number.
    """
    layers = list(map(functools.cache(_in_turn), plan._each("functions", layers)))  # equal layers are traced once

    def run(items: Items, params: Sequence[Any], x: Array) -> Array:
        for item in items:
            if isinstance(item, tuple):
                x = jax.checkpoint(functools.partial(run, item))(params, x)
            else:
                x = layers[item](params[item], x)
        return x

    def applied(params: Sequence[Any], x: Array) -> Array:
        return run(plan.items, plan._each("parameters", params), x)

    return applied


def _in_turn(layer: LayerFunction) -> LayerFunction:
    """The same layer, whose backward pass touches what was kept only when the gradient of its output is there.

    Left free, the compiler puts what a convolution keeps into the order that the backward pass reads as soon as it
    can, and holds it in both orders.
    """

    def back(pull: Callable[[Array], Any], gradient: Array) -> Any:
        pull, gradient = jax.lax.optimization_barrier((pull, gradient))
        return pull(gradient)

    in_turn = jax.custom_vjp(lambda p, x: layer(p, x))
    in_turn.defvjp(lambda p, x: jax.vjp(layer, p, x), back)
    return jax.jit(in_turn, inline=True)  # not inlined, each would stay a program of its own, which keeps other arrays


@jax.custom_vjp
def relu(x: Array) -> Array:
    """max(x, 0) whose gradient needs its output and not x: one array a layer instead of two."""
    return jnp.maximum(x, 0)


# without the barrier the compiler keeps x, to compute y from it again
relu.defvjp(
    lambda x: ((y := jax.lax.optimization_barrier(jnp.maximum(x, 0))), y), lambda y, g: (jnp.where(y > 0, g, 0),)
)


def jit(f: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` that lets nothing be kept which a plan forgets, on a CPU too.

    The CPU compiler merges what is computed again with what was computed first, which keeps it in memory after all,
    unless one of its passes is off. Elsewhere it is off already where it matters.
    """
    return jax.jit(f, compiler_options={"xla_disable_hlo_passes": "cse_barrier_expander"})


def compiled_bytes(f: Callable[..., Any], *args: Any, jit: Callable[..., Any] = jit) -> int:
    """Bytes that the compiled f holds at most beside arguments and results; nothing is run, and shapes are enough.

    Compiled to be looked at: the same arrays as always, without the polish that makes a program fast.
    """
    quick = {"xla_backend_optimization_level": 0} | jax_internals.OLD_FUSION
    return jit(f).lower(*args).compile(quick).memory_analysis().temp_size_in_bytes


def profile(layers: Sequence[LayerFunction], params: Sequence[Any], x: Array) -> Chain:
    """The chain as its program has it: bytes that each layer's gradient needs, operations as costs.

    Nothing is run, and shapes are enough. Layers that are alike are looked at once. What a layer takes only while it
    runs is not counted.
    """
    made, size = [], program.nbytes(x)
    for layer, p in zip(layers, params, strict=True):
        leaves, tree = jax.tree.flatten((p, x))
        entry, x = _profile(layer, tree, *(jax.ShapeDtypeStruct(np.shape(a), jnp.result_type(a)) for a in leaves))
        made.append(entry)
    return Chain(size, tuple(made))


@functools.lru_cache(maxsize=256)
def _profile(layer: LayerFunction, tree: Any, *shapes: jax.ShapeDtypeStruct) -> tuple[Layer, Any]:
    """What a layer takes, and the shape of its result."""

    def both(p: Any, x: Array, g: Array) -> Any:  # without its result, a part of the forward pass would not be counted
        out, pull = jax.vjp(layer, p, x)
        return out, pull(g)

    p, x = tree.unflatten(shapes)
    out = jax.eval_shape(layer, p, x)
    output, forward = program.nbytes(out), program.flops(layer, p, x)
    saved, backward = output + program.kept_bytes(layer, p, x), program.flops(both, p, x, out) - forward
    return Layer(output, saved, forward, backward), out
