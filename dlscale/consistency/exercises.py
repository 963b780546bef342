"""The exercises of 10_consistency."""

import functools
import math
from typing import Any

import numpy as np

from dlscale import consistency
from dlscale.course.exercises import Exercise, compare


def _bounded(answer: Any) -> str | None:
    cases = (([1.0, 2.5], 1, 20), ([1.0, 1.25, 4.125], 3, 40), ([2.0, 1.0, 1.0, 7.5], 0, 24), ([3.0, 0.5], 7, 40))
    for times, bound, gradients in cases:
        found = consistency.timeline("stale-synchronous", np.array(times), gradients, bound=bound)
        wanted = np.column_stack([found.worker, found.read])
        if wrong := compare(
            f"With times {times} and bound {bound}, (worker, read)", answer(times, bound, gradients), wanted, 0
        ):
            return wrong
    return None


bounded = Exercise(
    id="consistency-bounded",
    answer="bounded",
    question="Write the **stale-synchronous** simulation, `bounded(times, bound, gradients)`: as "
    "`asynchronous_by_hand`, but a worker that has finished a gradient begins the next one only when it is at most "
    "`bound` gradients ahead of the slowest. Else it waits, and reads the weights at the moment at which it may go on.",
    hints=(
        "Count how many gradients each worker has finished. Whose count decides who may go on?",
        "After each gradient, look at all who wait, not only at the one that has just finished: "
        "a slow worker's gradient may let several go.",
    ),
    code="""
def bounded(times, bound, gradients):
    running = [(seconds, i, 0) for i, seconds in enumerate(times)]
    waiting, done, log = [], [0] * len(times), []
    while len(log) < gradients:
        finish, i, read = min(running)
        running.remove((finish, i, read))
        log.append((i, read))
        done[i] += 1
        waiting.append(i)
        for j in [j for j in waiting if done[j] - min(done) <= bound]:
            waiting.remove(j)
            running.append((finish + times[j], j, len(log)))
    return log
""",
    wrong=_bounded,
    right="bound 0 lets nobody ahead, a large one is never felt: one number between synchronous and asynchronous.",
)


def _usable(answer: Any) -> str | None:
    for staleness in (0, 1, 3, 10, 40):
        wanted = 2 * math.sin(math.pi / (4 * staleness + 2))
        if wrong := compare(f"The largest rate with staleness {staleness}", answer(staleness), wanted, 0.02):
            return wrong
    return None


usable = Exercise(
    id="consistency-usable",
    answer="usable_rate",
    question="Write `usable_rate(staleness)`: the largest rate, to 2 %, with which $w_{t+1} = w_t - \\eta\\, w_{t-s}$ "
    "does not grow without end. By simulation or by thought; it is asked for staleness 0 to 40.",
    hints=(
        "You can try: is |w| larger after many steps than after half as many? Halve the interval until it is small.",
        "By thought: put $w_t = z^t$. At the limit, z has length 1: z is cos a + i sin a for some angle a.",
    ),
    code="""
def usable_rate(staleness):
    low, high = 0.0, 2.5
    while high - low > 1e-3 * high:
        rate = (low + high) / 2
        w = [1.0] * (staleness + 1)
        steps = 200 * (staleness + 1)
        for _ in range(2 * steps):
            w.append(w[-1] - rate * w[-1 - staleness])
        size = np.abs(w)
        grows = not size[-steps // 4 :].max() < size[steps // 2 : steps].max()
        low, high = (low, rate) if grows else (rate, high)
    return low
""",
    wrong=_usable,
    right="it is 2 sin(π / (4 s + 2)): staleness times rate may be about π / 2, and no more.",
)


CURVATURES = np.geomspace(0.02, 1.0, 40)
STEPS = 1500


@functools.cache
def staleness_of(workers: int, seed: int) -> np.ndarray:
    """Staleness of each gradient of asynchronous workers."""
    times = consistency.durations(workers, STEPS // workers + 50, jitter=0.4, seed=seed)
    return consistency.timeline("asynchronous", times, STEPS).staleness


def descend(scale: Any, workers: int, seed: int = 0) -> float:
    """Loss of a quadratic of 40 curvatures from 0.02 to 1, over that at the start, after 1,500 asynchronous gradients.

    A gradient of staleness s is applied with the rate scale(s).
    """
    w = [np.ones(len(CURVATURES))]
    for t, s in enumerate(staleness_of(workers, seed)):
        w.append(w[-1] - float(scale(int(s))) * CURVATURES * w[t - s])
        if not np.abs(w[-1]).max() < 1e6:
            return math.inf
    return float((CURVATURES * w[-1] ** 2).sum() / CURVATURES.sum())


def _scale(answer: Any) -> str | None:
    told = {workers: descend(answer, workers, seed=7) for workers in (1, 4, 16, 48)}
    bad = [f"{workers} workers: {loss:.2g}" for workers, loss in told.items() if not loss <= limits()[workers]]
    if bad:
        return f"Loss over that at the start, {'; '.join(bad)}: too much. exercises.limits() tells what is asked."
    return None


@functools.cache
def limits() -> dict[int, float]:
    """The most that may be left: twice what half of the best constant rate leaves, for each crowd its own."""
    rates = np.geomspace(0.005, 1.9, 30)
    best = {k: min(rates, key=lambda r: descend(lambda _: r, k, seed=7)) for k in (1, 4, 16, 48)}
    return {k: max(1e-12, 2 * descend(lambda _, k=k: best[k] / 2, k, seed=7)) for k in best}


scale = Exercise(
    id="consistency-scale",
    answer="scale",
    question="**Open.** Write `scale(staleness)`, one rule for every crowd: the learning rate of a gradient that is so "
    "many updates old. `exercises.descend(scale, workers)` tells what is left of a quadratic's loss with 1, 4, 16 or "
    "48 asynchronous workers. At most `exercises.limits()` may be left: twice what half of the best constant "
    "rate of each crowd leaves.",
    hints=(
        "A constant that suits 48 workers is far too small for one. Look at what exercise 2 found.",
        "Both small and large staleness occur in one run: what must hold is a product.",
    ),
    code="""
def scale(staleness):
    return 1.2 / (1 + staleness)
""",
    wrong=_scale,
    right="one rule serves one worker and a crowd, on a quadratic. On MNIST-1D such rates, tuned, were worse.",
)


def _partner(answer: Any) -> str | None:
    for workers in (2, 4, 8, 32):
        values = np.eye(workers)
        for number in range(workers.bit_length() - 1):
            found = [answer(i, number) for i in range(workers)]
            if wrong := compare(
                f"In round {number} of {workers} workers, partners", np.sort(np.array(found)), np.arange(workers), 0
            ):
                return f"{wrong} Each must have a partner of its own."
            if any(found[j] != i for i, j in enumerate(found)):
                return f"In round {number} of {workers} workers, somebody's partner has another partner."
            values = (values + values[np.array(found, int)]) / 2
        if not np.allclose(values, 1 / workers):
            return f"After {workers.bit_length() - 1} rounds, {workers} workers do not have the mean of all."
    return None


partner = Exercise(
    id="consistency-partner",
    answer="partner",
    question="Gossip without luck: write `partner(worker, round)`. In each round two partners take the mean of their "
    "two numbers; after $\\log_2 P$ rounds, all $P$ workers must have the mean of all. It is tried with 2, 4, 8 and "
    "32.",
    hints=(
        "After round 0, pairs agree. Whom must a pair meet, so that four agree?",
        "Write the workers' numbers in binary: what has not been mixed yet?",
    ),
    code="""
def partner(worker, round):
    return worker ^ (1 << round)
""",
    wrong=_partner,
    right="that is the butterfly of an all-reduce. Gossip with partners that are drawn comes near; here it is exact.",
)


def _shards(answer: Any) -> str | None:
    for case in (
        (16, 1.0, 1e8, 1e-3, 1e-9),
        (64, 0.5, 4e8, 0.0, 1e-9),
        (2, 1.0, 1e6, 0.0, 1e-9),
        (256, 0.1, 1e8, 0.05, 1e-10),
    ):
        workers, compute, size, latency, per_byte = case
        room, demand = compute + 2 * latency, 2 * (workers - 1) * size * per_byte
        wanted = next(s for s in range(1, 10_000) if demand / s <= room * (1 + 1e-9))
        given = f"{workers} workers, {compute:g} s, {size:g} bytes, {latency:g} s and {per_byte:g} s a byte"
        if wrong := compare(f"For {given}, the number of shards", answer(*case), wanted, 1e-9):
            return wrong
    return None


shards = Exercise(
    id="consistency-shards",
    answer="shards_needed",
    question="Equal asynchronous workers take `compute` seconds for a gradient. Then it takes `latency` to the server, "
    "which is busy with one worker for `2 * size * per_byte / shards` seconds, and `latency` back. Write "
    "`shards_needed(workers, compute, size, latency, per_byte)`: the fewest shards with which, once all have found "
    "their rhythm, nobody waits in the queue. The links of the workers "
    "are free in this model.",
    hints=(
        "How long is a worker's round if it never waits? How often does each of the others come to the server in it?",
        "The server must serve all the workers within one such round. Your own service is a part of the round.",
    ),
    code="""
import math

def shards_needed(workers, compute, size, latency, per_byte):
    whole = 2 * size * per_byte
    return max(1, math.ceil((workers - 1) * whole / (compute + 2 * latency) - 1e-9))
""",
    wrong=_shards,
    right="beyond that, more shards only shorten the service. With fewer, the queue sets the pace for all.",
)


def _meets(answer: Any) -> str | None:
    rng = np.random.default_rng(5)
    for omega, coordinates in ((1, 7), (10, 10_000), (6, 10), (30, 400), (1, 1)):
        drawn = np.array([rng.permutation(coordinates)[:omega] for _ in range(2 if omega > coordinates / 2 else 400)])
        counted = np.mean([np.isin(a, b).any() for a, b in zip(drawn[::2], drawn[1::2], strict=True)])
        wanted = 1 - math.comb(coordinates - omega, omega) / math.comb(coordinates, omega)
        found = f"For {omega} of {coordinates} coordinates ({counted:.1%} of {len(drawn) // 2} pairs met), the share"
        if wrong := compare(found, answer(omega, coordinates), wanted, 1e-3):
            return wrong
    return None


meets = Exercise(
    id="consistency-meets",
    answer="share_that_meets",
    question="How often can two updates meet at all? Write `share_that_meets(omega, coordinates)`: the chance that two "
    "examples, each with `omega` different coordinates drawn evenly of so many, have at least one in common.",
    hints=(
        "Ask for the opposite: that the second one has none of the first one's coordinates.",
        "Draw the second one's coordinates one by one. How many are still allowed each time, of how many?",
    ),
    code="""
def share_that_meets(omega, coordinates):
    apart = 1.0
    for drawn in range(omega):
        apart *= max(0, coordinates - omega - drawn) / (coordinates - drawn)
    return 1 - apart
""",
    wrong=_meets,
    right="of 10 in 10,000 one pair in a hundred shares anything: locks would guard against what hardly happens.",
)

__all__ = [
    "Exercise",
    "bounded",
    "descend",
    "limits",
    "math",
    "meets",
    "np",
    "partner",
    "scale",
    "shards",
    "staleness_of",
    "usable",
]
