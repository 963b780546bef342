"""What training remembers for the way back, and plans to forget some of it and compute it again.

A chain is a list of layers, one after the other; layer i takes the output of layer i - 1. A plan says for each layer
whether what its gradient needs is kept, or forgotten and computed again from the last thing that was kept. Sizes are in
bytes, costs in any unit (the library counts floating-point operations), both per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlscale.lab import checks, program

Items = tuple[Any, ...]  # layer numbers and, for what is forgotten, Items
LayerFunction = Callable[[Any, Array], Array]

# The CPU compiler merges what is computed again with what was computed first, which keeps it in memory after all,
# unless this pass is off. Elsewhere it is off already where it matters.
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "cse_barrier_expander"}


class Layer(NamedTuple):
    """What a layer takes, in bytes and costs."""

    output: float
    saved: float  # all that is held while it is kept for its gradient; its output included, its input not
    forward: float = 1.0  # cost
    backward: float = 2.0  # cost
    forward_work: float = 0.0  # bytes that come and go while it runs, beside input and output
    backward_work: float = 0.0  # beside what is saved and the gradients of input and output


@dataclass(frozen=True)
class Chain:
    """Layers and the bytes of the first one's input, which always stays and is never counted.

    Raises ValueError for an empty chain, sizes or costs that are negative or not finite, and a layer that keeps less
    than its output.
    """

    input: float
    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("The chain is empty: give at least one layer.")
        checks.finite("input", self.input)
        for number, layer in enumerate(self.layers):
            for name, value in layer._asdict().items():
                checks.finite(f"{name} of layer {number}", value)
            if layer.saved < layer.output:
                raise ValueError(
                    f"Layer {number} keeps {layer.saved:g} bytes, less than its output of {layer.output:g}."
                )

    @classmethod
    def uniform(cls, length: int, saved: float = 1.0) -> Chain:
        """`length` layers with output 1, forward cost 1 and backward cost 2."""
        return cls(1.0, (Layer(1.0, saved),) * checks.whole("length", length))

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
        numbers = list(_flat(self.items))
        if not numbers or numbers != list(range(len(numbers))):
            raise ValueError(f"A plan names each layer once, in order from 0, not {numbers}.")

    def __len__(self) -> int:
        return sum(1 for _ in _flat(self.items))

    def __str__(self) -> str:
        return _text(self.items)

    def forwards(self) -> np.ndarray:
        """(layers,) how often each layer runs forward in one gradient."""
        counts = np.zeros(len(self), int)

        def count(items: Items, depth: int) -> None:
            for item in items:
                if isinstance(item, tuple):
                    count(item, depth + 1)
                else:
                    counts[item] = depth

        count(self.items, 1)
        return counts

    def cost(self, chain: Chain) -> float:
        """Cost of one gradient: all runs forward, and one backward for each layer."""
        _fits(self, chain)
        return float(
            sum(n * layer.forward + layer.backward for n, layer in zip(self.forwards(), chain.layers, strict=True))
        )

    def peak(self, chain: Chain) -> float:
        """The most bytes in memory at any time, beside parameters, their gradients and the input."""
        return max(step.bytes for step in self.steps(chain))

    def steps(self, chain: Chain) -> list[Step]:
        """Every operation of one gradient, in order. The gradient of the chain's output is in memory from the start."""
        _fits(self, chain)
        return list(_run(self.items, chain, ()))


def _text(items: Items) -> str:
    return " ".join(f"[{_text(item)}]" if isinstance(item, tuple) else str(item) for item in items)


def _flat(items: Items) -> Iterator[int]:
    for item in items:
        if isinstance(item, tuple):
            yield from _flat(item)
        else:
            yield item


def _fits(plan: Plan, chain: Chain) -> None:
    if len(plan) != len(chain.layers):
        raise ValueError(f"The plan is for {len(plan)} layers, the chain has {len(chain.layers)}.")


def _run(items: Items, chain: Chain, outside: tuple[tuple[str, int], ...]) -> Iterator[Step]:
    """Forward and back over `items`, while `outside` is in memory."""

    def total(held: Sequence[tuple[str, int]]) -> float:
        return sum(chain.layers[i].saved if what == "saved" else chain.size(i) for what, i in held)

    gradient, held = chain.size(list(_flat(items))[-1] + 1), outside
    for item in items:
        if isinstance(item, tuple):
            inner = list(_flat(item))
            for i in inner:
                works = (chain.size(i) if i > inner[0] else 0) + chain.size(i + 1) + chain.layers[i].forward_work
                yield Step("forward", i, held, total(held) + works + gradient)
            held += (("output", inner[-1] + 1),)
        else:
            yield Step("tape", item, held, total(held) + _tape(chain.layers[item]) + gradient)
            held += (("saved", item),)
    for item in reversed(items):
        held, kept = held[:-1], held[-1:]
        if isinstance(item, tuple):
            yield from _run(item, chain, held)
        else:
            works = chain.size(item + 1) + chain.size(item) + chain.layers[item].backward_work
            yield Step("backward", item, held + kept, total(held + kept) + works)


def _tape(layer: Layer) -> float:
    return max(layer.saved, layer.output + layer.forward_work)


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
    starts = range(0, length, k)
    parts = [tuple(range(start, min(start + k, length))) for start in starts]
    return Plan((*parts[:-1], *parts[-1]))


def recursive(length: int) -> Plan:
    """Forget the first half, treat both halves in the same way: memory log₂ length, ½ length log₂ length runs more."""

    def halve(start: int, stop: int) -> Items:
        if stop - start == 1:
            return (start,)
        middle = (start + stop) // 2
        return (halve(start, middle), *halve(middle, stop))

    return Plan(halve(0, checks.whole("length", length)))


def revolve(length: int, slots: int) -> Plan:
    """The fewest runs for equal layers with `slots` stored activations, the input among them (Griewank & Walther 2000).

    Beside the one that keeps what its gradient needs, they are r · length - β(slots + 1, r - 1) runs forward, with
    β(s, r) = (s + r)! / (s! r!) and the r for which β(slots, r - 1) < length ≤ β(slots, r).
    """
    length, slots = checks.whole("length", length), checks.whole("slots", slots)

    @functools.cache
    def best(n: int, s: int) -> tuple[int, int]:
        """(runs, where the next activation is stored) for n layers with s slots."""
        if n == 1:
            return 0, 0
        if s == 1:
            return n * (n - 1) // 2, n - 1
        return min((k + best(k, s)[0] + best(n - k, s - 1)[0], k) for k in range(1, n))

    def split(start: int, n: int, s: int) -> Items:
        if n == 1:
            return (start,)
        k = best(n, s)[1]
        return (split(start, k, s), *split(start + k, n - k, s - 1))

    for n in range(1, length):  # from below: no deep recursion
        best(n, slots)
    return Plan(split(0, length, slots))


class Tradeoff(NamedTuple):
    """The cheapest plan of its peak: no plan is better in one of the two and as good in the other."""

    peak: float
    cost: float
    plan: Plan


def frontier(chain: Chain) -> list[Tradeoff]:
    """Every best trade-off between memory and cost, from the smallest peak to the one where nothing runs twice.

    Dynamic programming over the parts of the chain, exact for unequal sizes and costs. Its plans are the optimal
    persistent schedules of Beaumont et al. 2019 (arXiv:1911.13214): what is kept stays until its turn comes.
    """
    best = _best(chain)
    peaks, costs, _ = best[0, len(chain.layers)]
    plans = [Plan(_rebuild(best, chain, 0, len(chain.layers), peak)) for peak in peaks]
    return [Tradeoff(float(peak), float(cost), plan) for peak, cost, plan in zip(peaks, costs, plans, strict=True)]


def optimal_plan(chain: Chain, memory: float) -> Plan:
    """The cheapest plan whose peak is at most `memory` bytes; see `frontier`.

    Raises ValueError if no plan fits, and names the least memory that does.
    """
    checks.finite("memory", memory)
    best = _best(chain)
    least = best[0, len(chain.layers)][0][0]
    if memory < least:
        raise ValueError(f"No plan fits {memory:g} bytes: this chain needs at least {least:g}.")
    return Plan(_rebuild(best, chain, 0, len(chain.layers), memory))


@functools.lru_cache(maxsize=16)
def _best(chain: Chain) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """For each part [s, t): rising peaks, the least cost at each, and what comes first there.

    That is -1 for "keep layer s", or k for "forget layers s to k - 1". A peak leaves out the part's input.
    """
    layers, n = chain.layers, len(chain.layers)
    size = [chain.size(position) for position in range(n + 1)]
    best: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for length in range(1, n + 1):
        for s in range(n - length + 1):
            t, first = s + length, layers[s]
            keeping = max(first.saved + size[s + 1] + size[s] + first.backward_work, _tape(first) + size[t])
            own = first.forward + first.backward
            if length == 1:
                best[s, t] = np.array([keeping]), np.array([own]), np.array([-1])
                continue
            peaks, costs, _ = best[s + 1, t]
            found = [(np.maximum(peaks + first.saved, keeping), costs + own, np.full(len(peaks), -1))]
            running, passing = 0.0, 0.0  # cost of the first run, and what its widest layer needs
            for k in range(s + 1, t):
                running += layers[k - 1].forward
                passing = max(passing, (size[k - 1] if k - 1 > s else 0) + size[k] + layers[k - 1].forward_work)
                (left, left_costs, _), (right, right_costs, _) = best[s, k], best[k, t]
                peaks = np.union1d(left, right + size[k])
                peaks = peaks[peaks >= max(left[0], right[0] + size[k])]
                costs = left_costs[np.searchsorted(left, peaks, "right") - 1]
                costs = costs + right_costs[np.searchsorted(right + size[k], peaks, "right") - 1] + running
                found.append((np.maximum(peaks, passing + size[t]), costs, np.full(len(peaks), k)))
            peaks, costs, firsts = map(np.concatenate, zip(*found, strict=True))
            order = np.lexsort((costs, peaks))
            better = np.minimum.accumulate(costs[order])
            keep = order[np.r_[True, better[1:] < better[:-1]]]
            best[s, t] = peaks[keep], costs[keep], firsts[keep]
    return best


def _rebuild(best: dict, chain: Chain, s: int, t: int, memory: float) -> Items:
    peaks, _, firsts = best[s, t]
    k = firsts[np.searchsorted(peaks, memory * (1 + 1e-12), "right") - 1]
    if t - s == 1:
        return (s,)
    if k < 0:
        return (s, *_rebuild(best, chain, s + 1, t, memory - chain.layers[s].saved))
    return (_rebuild(best, chain, s, k, memory), *_rebuild(best, chain, k, t, memory - chain.size(k)))


# Plans that run


def apply(plan: Plan, layers: Sequence[LayerFunction]) -> Callable[[Sequence[Any], Array], Array]:
    """The function f(list_of_params, x) of a chain of layers, each layer(params, x); its gradient follows the plan.

    Compile it with `recomputation.jit`. It has no forward-mode derivative (`jax.jvp`). Raises ValueError if plan and
    layers differ in number, and, when it is called, for a layer that does not return one array (a side
    output would have to be kept as well).
    """
    layers = [_in_turn(layer) for layer in layers]
    if len(plan) != len(layers):
        raise ValueError(f"The plan is for {len(plan)} layers, not for {len(layers)}.")

    def run(items: Items, params: Sequence[Any], x: Array) -> Array:
        for item in items:
            if isinstance(item, tuple):
                x = jax.checkpoint(functools.partial(run, item))(params, x)
            else:
                x = layers[item](params[item], x)
                _one_array(item, x)
        return x

    def f(params: Sequence[Any], x: Array) -> Array:
        if len(params) != len(layers):
            raise ValueError(f"There are {len(layers)} layers, but parameters for {len(params)}.")
        return run(plan.items, params, x)

    return f


def _in_turn(layer: LayerFunction) -> LayerFunction:
    """The same layer, whose way back touches what was kept only when the gradient of its output is there.

    Left free, the compiler puts what a convolution keeps into the order that the way back reads as soon as it can, and
    holds it in both orders.
    """

    def back(pull: Callable[[Array], Any], gradient: Array) -> Any:
        pull, gradient = jax.lax.optimization_barrier((pull, gradient))
        return pull(gradient)

    in_turn = jax.custom_vjp(lambda p, x: layer(p, x))
    in_turn.defvjp(lambda p, x: jax.vjp(layer, p, x), back)
    return in_turn


@jax.custom_vjp
def relu(x: Array) -> Array:
    """max(x, 0) whose gradient needs its output and not x: one array a layer instead of two."""
    return jnp.maximum(x, 0)


def _relu_forward(x: Array) -> tuple[Array, Array]:
    y = jax.lax.optimization_barrier(jnp.maximum(x, 0))  # or the compiler keeps x, to compute y from it again
    return y, y


relu.defvjp(_relu_forward, lambda y, g: (jnp.where(y > 0, g, 0),))


def jit(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.jit` that lets nothing be kept which a plan forgets, on a CPU too."""
    return jax.jit(f, compiler_options=COMPILER_OPTIONS, **options)


def peak(f: Callable[..., Array], *args: Any) -> int:
    """Bytes that the gradient of a scalar `f` takes beside arguments and results. Compiles, runs nothing."""
    return program.temporary_bytes(jax.grad(f), *args, compiler_options=COMPILER_OPTIONS)


def profile(layers: Sequence[LayerFunction], params: Sequence[Any], x: Array) -> Chain:
    """The chain as its program has it: bytes that each layer's gradient needs, operations as costs.

    Each layer is compiled alone, to see what it takes while it runs. Nothing is run, and shapes are enough.
    """
    chain: list[Layer] = []
    known: dict[Any, tuple[Layer, Any]] = {}
    first = x
    for number, (layer, p) in enumerate(zip(layers, params, strict=True)):
        key = (layer, str(jax.tree.map(jax.typeof, (p, x))))
        if key not in known:
            out = jax.eval_shape(layer, p, x)
            _one_array(number, out)
            known[key] = _profile(layer, p, x, out), out
        made, x = known[key]
        chain.append(made)
    return Chain(program.nbytes(first), tuple(chain))


def _profile(layer: LayerFunction, p: Any, x: Any, out: Any) -> Layer:
    def back(p: Any, x: Array, g: Array) -> Any:
        return jax.vjp(layer, p, x)[1](g)

    output, forward = program.nbytes(out), program.flops(layer, p, x)
    saved = output + program.kept_bytes(layer, p, x)
    work = functools.partial(program.temporary_bytes, compiler_options=COMPILER_OPTIONS)
    backward, backward_work = program.flops(back, p, x, out) - forward, max(work(back, p, x, out) - saved, 0)
    return Layer(output, saved, forward, backward, work(layer, p, x), backward_work)


class Account(NamedTuple):
    """What the program of a gradient keeps and computes, counted in the program itself."""

    kept: int  # bytes that the way forward leaves for the way back, beside the arguments
    forward: float  # floating-point operations of the function
    gradient: float  # of value and gradient together
    again: float  # part of `gradient` that computes again what was known before


def account(f: Callable[..., Array], *args: Any) -> Account:
    """Count what value and gradient of a scalar `f` keep and compute again; nothing is computed."""
    saving = program.forgetting_nothing(f, *args)
    least = program.flops(jax.value_and_grad(lambda *args: saving(*jax.tree.leaves(args))[0]), *args)
    gradient = program.flops(jax.value_and_grad(f), *args)
    return Account(program.kept_bytes(f, *args), program.flops(f, *args), gradient, gradient - least)


def _one_array(number: int, out: Any) -> None:
    if not hasattr(out, "dtype"):
        raise ValueError(f"Layer {number} returns a {type(out).__name__}: a layer of a chain returns one array.")
