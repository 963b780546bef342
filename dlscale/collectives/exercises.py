"""The exercises of 08_collectives."""

import functools
import itertools
import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401 (for the solutions)
import numpy as np
from jax import Array

from dlscale import collectives, costs
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import program


def _sent(answer: Any) -> str | None:
    for workers, parts in ((4, 1), (2, 5), (7, 3), (64, 100)):
        size = 4 * workers * parts
        given = f"{workers} workers and {size} bytes"
        expected = collectives.schedule("ring", workers, (size // 4,)).sent().sum(0).max()
        if wrong := compare(f"The number of bytes for {given}", answer(workers, size), expected, 1e-9):
            return wrong
    return None


sent = Exercise(
    id="collectives-sent",
    answer="ring_sends",
    question="Write `ring_sends`, the bytes that each worker sends in this ring all-reduce of `size` bytes among "
    "`workers` workers. (The check counts them in the program.)",
    hints=(
        "A message is one chunk: size / workers bytes.",
        "There are workers − 1 rounds of adding, and as many of passing on.",
    ),
    code="""
def ring_sends(workers, size):
    return 2 * (workers - 1) * size / workers
""",
    wrong=_sent,
    right="less than twice the array, however many workers there are. That is why the ring is loved for large arrays.",
)


class _Unanswered(Exception):
    """`...` is what a function returned in the middle of a trace."""


def tried(f: Callable[[Array, str], Array]) -> Callable[[np.ndarray], Any]:
    """What f(x, axis_name) does, as a function of all workers' x, (workers, …).

    It returns their results, and for each round of the traced program its messages: (pairs, bytes). Where f is not
    written yet, `...`. A check cannot trace what runs in another process; this runs where f is.
    """

    def one(x: Array) -> Array:
        if (result := f(x, "workers")) is ...:
            raise _Unanswered
        return result

    def run(x: np.ndarray) -> Any:
        try:
            found = program.schedule(one, len(x), jax.ShapeDtypeStruct(x.shape[1:], x.dtype))
        except _Unanswered:
            return ...
        rounds = [[(message.pairs.tolist(), message.bytes) for message in messages] for messages, _ in found.rounds]
        return np.asarray(jax.jit(jax.vmap(one, axis_name="workers"))(x)), rounds

    return run


def _all_reduce(
    answer: Any, rounds_each_way: int, sent: Callable[[int, int], float], swaps: bool = False
) -> str | None:
    """What is wrong with an all-reduce that may take so many times log₂ P rounds and send(P, size) bytes.

    With `swaps`, whoever sends to a worker must get from it in the same round.
    """
    for workers in (2, 4, 16):
        x = np.random.default_rng(workers).integers(0, 100, (workers, 3 * workers)).astype(np.int32)
        try:
            told = answer(x)
        except TypeError as error:
            if "missing" not in str(error):
                raise
            told = tried(answer)(x)  # the function itself was handed in
            if told is ...:
                raise TypeError("it returns nothing yet") from None
        results, rounds = told
        if wrong := compare(f"The array of {workers} workers' sums", results, np.broadcast_to(x.sum(0), x.shape), 1e-9):
            return wrong
        allowed, bytes_sent = rounds_each_way * int(math.log2(workers)), np.zeros(workers)
        for pairs, size in itertools.chain.from_iterable(rounds):
            np.add.at(bytes_sent, np.array(pairs)[:, 0], size)
        if not bytes_sent.any():
            return f"The sums are right, but {workers} workers send nothing with ppermute."
        pairs = [{(a, b) for pairs, _ in messages for a, b in pairs} for messages in rounds]
        if lonely := [pair for one in pairs for pair in one if swaps and pair[::-1] not in one]:
            a, b = min(lonely)
            return f"The sums are right, but of {workers} workers {a} sends to {b} and {b} not to {a}: partners swap."
        if len(rounds) > allowed:
            return f"The sums are right, but {workers} workers need {len(rounds)} rounds; {allowed} are enough."
        if bytes_sent.max() > sent(workers, x[0].nbytes):
            share = bytes_sent.max() / x[0].nbytes
            return (
                f"The sums are right, but of {workers} workers one sends {share:.3g} times its array: less is enough."
            )
    return None


butterfly = Exercise(
    id="collectives-butterfly",
    answer="butterfly",
    question="In a **butterfly**, in round $k = 0, 1, 2, \\ldots$ you swap your whole sum with the worker whose number "
    "differs from yours in bit $k$, $2^k$ away, and add: if a sends to b, then b sends to a. Write it, for a power of "
    "two of workers.",
    hints=(
        "`worker ^ 2**k` turns bit k over, and `P.bit_length() - 1` is log₂ P.",
        "In each round: x = x + jax.lax.ppermute(x, axis_name, [(w, w ^ 2**k) for w in range(P)]).",
    ),
    code="""
def butterfly(x, axis_name):
    P = jax.lax.axis_size(axis_name)
    for k in range(P.bit_length() - 1):
        partners = [(worker, worker ^ 2**k) for worker in range(P)]
        x = x + jax.lax.ppermute(x, axis_name, partners)
    return x
""",
    wrong=lambda answer: _all_reduce(answer, 1, lambda workers, size: size * math.log2(workers), swaps=True),
    right="the sums are NumPy's, in log₂ P rounds of one whole array each. Nobody needs fewer rounds. And since "
    "partners swap, all add the same pairs of numbers: section 7 needs that.",
)


rabenseifner = Exercise(
    id="collectives-rabenseifner",
    answer="rabenseifner",
    question="Write **reduce-scatter + gather**, for a power of two of workers and a flat `x` that divides by their "
    "number. Halving, with the farthest partner first: keep the half of `x` that your bit says, send the other one, "
    "add what comes. Then doubling, with the nearest first: swap what you have, and put both together in order.",
    hints=(
        "low, high = jnp.split(x, 2); with d = 2**k, those with `me & d` keep high and send low, others the reverse.",
        "JAX does not know `me` while it traces: jnp.where(me & d > 0, high, low) chooses, an `if` cannot.",
        "On the way back, those with `me & d` join what came in front of their own: jnp.concatenate([other, x]).",
    ),
    code="""
def rabenseifner(x, axis_name):
    P, me = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    swap = lambda x, d: jax.lax.ppermute(x, axis_name, [(w, w ^ d) for w in range(P)])
    distances = [2**k for k in range(P.bit_length() - 1)]
    for d in reversed(distances):
        low, high = jnp.split(x, 2)
        x = jnp.where(me & d > 0, high, low) + swap(jnp.where(me & d > 0, low, high), d)
    for d in distances:
        other = swap(x, d)
        x = jnp.where(me & d > 0, jnp.concatenate([other, x]), jnp.concatenate([x, other]))
    return x
""",
    wrong=lambda answer: _all_reduce(answer, 2, lambda workers, size: 2 * size * (workers - 1) / workers),
    right="the fewest bytes that an all-reduce can do with, in 2 log₂ P rounds.",
)


def _crossover(answer: Any) -> str | None:
    for workers, latency, per_byte in ((8, 1e-6, 1e-10), (64, 5e-6, 1e-9), (16, 1e-3, 1e-7), (4, 2.0, 1.0)):
        size = answer(workers, latency, per_byte)
        if not isinstance(size, numbers.Real):
            return f"A number of bytes is asked for, not {type(size).__name__}."
        expected = latency * (2 * (workers - 1) - math.log2(workers))
        expected /= per_byte * (math.log2(workers) - 2 * (workers - 1) / workers)
        given = f"{workers} workers, {latency:g} s a message and {per_byte:g} s a byte"
        if wrong := compare(f"The size for {given}", size, expected, 1e-6):
            at = {name: costs.formula(name, workers, max(0.0, size), latency, per_byte)
                  for name in ("butterfly", "ring")} if math.isfinite(size) else {}  # fmt: skip
            told = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in at.items())
            return f"{wrong} There: {told or 'no times'}."
    return None


crossover = Exercise(
    id="collectives-crossover",
    answer="crossover",
    question="Write `crossover`, the size in bytes at which butterfly and ring take equally long, from their two "
    "formulas. `workers` is over 2; `latency` is $L$, `per_byte` is $G$.",
    hints=(
        "Set L log₂ P + G s log₂ P = 2 L (P − 1) + 2 G s (P − 1) / P and solve for s.",
        "s = L (2 (P − 1) − log₂ P) / (G (log₂ P − 2 (P − 1) / P)).",
    ),
    code="""
def crossover(workers, latency, per_byte):
    rounds, share = math.log2(workers), (workers - 1) / workers
    return latency * (2 * (workers - 1) - rounds) / (per_byte * (rounds - 2 * share))
""",
    wrong=_crossover,
    right="it depends on L / G only: the bytes that the network could carry while a message waits.",
)


def _bisection(answer: Any) -> str | None:
    for workers, per_switch, oversubscription in ((32, 8, 1.0), (32, 8, 4.0), (64, 4, 2.0), (16, 8, 8.0)):
        links = costs.fat_tree(workers, per_switch, oversubscription).links
        half = workers // per_switch // 2
        expected = sum(links[f"switch {switch} up"].bandwidth for switch in range(half))
        given = f"{workers} workers and an oversubscription of {oversubscription:g}"
        found = answer(workers, oversubscription, costs.INFINIBAND.bandwidth)
        if wrong := compare(f"The bisection bandwidth for {given}", found, expected, 1e-9):
            return wrong
    return None


bisection = Exercise(
    id="collectives-bisection",
    answer="bisection",
    question="Cut a fat tree in two halves of equally many switches. Write `bisection`, the bytes a second that the "
    "workers of one half can send to the other, all together; each worker's own cable carries `bandwidth`.",
    hints=(
        "With an oversubscription of 1, every worker of one half can send at full speed.",
        "A switch's cable upwards carries what its workers could send, divided by the oversubscription.",
    ),
    code="""
def bisection(workers, oversubscription, bandwidth):
    return workers / 2 * bandwidth / oversubscription
""",
    wrong=_bisection,
    right="whatever has to cross the middle shares this. A good order of ranks lets little cross it.",
)


NODES, WIRES = 4, [0, 4, 5, 6, 7, 3, 2, 1]  # a ring of NVLinks that comes and goes at the card's side


@functools.cache
def _machine() -> costs.Topology:
    return costs.multi_node(NODES, costs.dgx1(one_card=True))


def seconds(size: int, **plan: Any) -> float:
    """Modelled seconds of `collectives.all_reduce` with these options on four DGX-1 with one card, adding included.

    Raises ValueError for groups that are not all 32 GPUs in one group.
    """
    workers = _machine().workers
    groups = [[int(rank) for rank in group] for group in plan.pop("groups", [range(workers)])]
    if len(groups) != 1 or sorted(groups[0]) != [*range(workers)]:
        raise ValueError("groups must be one list of all 32 GPUs, in an order of yours.")
    found = collectives.schedule(plan.pop("algorithm", "ring"), workers, (size // 4,), groups=groups, **plan)
    return float(_machine().parts(found).sum()) + costs.COMBINE * sum(one.combined for one in found.rounds)


@functools.cache
def hybrid(size: int) -> float:
    """Seconds of the better of a ring along the wires and hierarchical all-reduce, on four DGX-1."""
    ring = [[8 * node + gpu for node in range(NODES) for gpu in WIRES]]
    return min(seconds(size, algorithm="ring", groups=ring), seconds(size, algorithm="hierarchical", group_size=8))


ASKED = {2**14: 0.9, 2**18: 1.0, 2**20: 0.8, 2**21: 0.8, 2**26: 1.0}  # bytes, and at most so much of the hybrid's time


def _fastest(answer: Any) -> str | None:
    told = []
    for size, share in ASKED.items():
        plan = answer(size)
        if not isinstance(plan, dict):
            return f"For {size:,} bytes, a dictionary of options of `all_reduce` is asked for."
        found = seconds(size, **plan) / hybrid(size)
        told.append(f"{size:,} bytes: {found:.2f}{'' if found <= share * (1 + 1e-9) else ' (too slow)'}")
    return f"Time over that of the hybrid, {'; '.join(told)}." if any("slow" in one for one in told) else None


fastest = Exercise(
    id="collectives-fastest",
    answer="fastest",
    question="**Open.** Find a fast all-reduce for four DGX-1 with one card each in this model. `fastest(size)` "
    "returns the options of `collectives.all_reduce` for so many bytes, as a dictionary: `algorithm`, `groups` (one "
    "list of the 32 GPUs in an order of yours), and for `hierarchical` alone `group_size`, for `double_tree` alone "
    '`chunks`. One order is allowed, not four side by side; `"hierarchical"` has trees within the nodes. It must never '
    "be slower than the hybrid of that one and a ring along the wires, need at most four fifths of its time at 1 and 2 "
    "MiB, and at most nine tenths at 16 KiB: there none of the algorithms that this section compared will do. "
    "`exercises.seconds(size, **options)` tells you the time.",
    hints=(
        "An algorithm and its order belong together. Which ranks swap the largest messages in Rabenseifner, and in "
        "which order are they GPUs of one node?",
        "Far ranks swap halves: [8 * node + gpu for gpu in order for node in range(4)] puts them into one node. "
        "For the largest arrays take a ring along the wires; for the smallest ask which other algorithm meets far "
        "ranks first, and sends few messages at once.",
    ),
    code="""
def fastest(size):
    if size < 2**24:
        order = [8 * node + gpu for gpu in [0, 4, 1, 5, 2, 6, 3, 7] for node in range(4)]
        return {"algorithm": "tree" if size < 2**17 else "rabenseifner", "groups": [order]}
    order = [8 * node + gpu for node in range(4) for gpu in [0, 4, 5, 6, 7, 3, 2, 1]]
    return {"algorithm": "ring", "groups": [order]}
""",
    wrong=_fastest,
    right="who knows the wires and the size beats a fixed choice. Rabenseifner with near partners first needs six "
    "tenths of the hybrid's time at 1 and 2 MiB, a tree in that order eight tenths at 16 KiB. Libraries search such "
    "tables for you.",
)


def _constants(answer: Any) -> str | None:
    for workers, latency, per_byte in ((4, 5e-4, 4e-9), (2, 1e-6, 1e-10), (9, 2.0, 0.25)):
        sizes = np.array([4.0 * workers, 4e6 * workers])
        seconds = 2 * (workers - 1) * (latency + sizes / workers * per_byte)
        found = answer(workers, sizes, seconds)
        took = " and ".join(f"{t:.3g} s for {size:g} bytes" for t, size in zip(seconds, sizes, strict=True))
        try:
            both = dict(zip(("L", "G"), found, strict=True))
        except (TypeError, ValueError):
            return "Two numbers are asked for: L and G."
        for (name, one), expected in zip(both.items(), (latency, per_byte), strict=True):
            if wrong := compare(f"{name}, among {workers} workers that take {took},", one, expected, 1e-6):
                return wrong
    return None


constants = Exercise(
    id="collectives-constants",
    answer="constants",
    question="Calibrate by hand. Write `constants`: from the `seconds` that a ring all-reduce among `workers` workers "
    "took for each of two `sizes` in bytes, return $L$ and $G$.",
    hints=(
        "A ring sends 2 (P − 1) messages of size / P bytes, one after another: what does one message take?",
        "Two messages of different lengths differ by G times the difference of their lengths.",
    ),
    code="""
def constants(workers, sizes, seconds):
    (short, long), (t_short, t_long) = (np.asarray(sizes) / workers, np.asarray(seconds) / (2 * (workers - 1)))
    per_byte = (t_long - t_short) / (long - short)
    return t_short - per_byte * short, per_byte
""",
    wrong=_constants,
    right="two measurements, two constants. With a third one you learn whether the model holds.",
)
