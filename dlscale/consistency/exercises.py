"""The exercises of 10_consistency."""

import math
from typing import Any

import numpy as np

from dlscale import consistency
from dlscale.course.exercises import Exercise, compare


def _bounded(answer: Any) -> str | None:
    cases = (([1.0, 2.5], 1, 20), ([1.0, 1.25, 4.125], 3, 40), ([2.0, 1.0, 1.0, 7.5], 0, 24), ([3.0, 0.4375], 7, 40))
    for times, bound, gradients in cases:
        found = consistency.timeline("stale-synchronous", np.array(times), gradients, bound=bound)
        wanted = np.column_stack([found.worker, found.read])
        log = answer(times, bound, gradients)
        if wrong := compare(f"With times {times} and bound {bound}, (worker, read)", log, wanted, 0):
            return wrong
    return None


bounded = Exercise(
    id="consistency-bounded",
    answer="bounded",
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
    right="bound 0 lets nobody get ahead, and a large bound is never felt. One number leads from one end to the other.",
    library="dlscale.consistency.timeline",
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
    hints=(
        "You can try a rate: is the largest |w| of the second half above that of the first? Halve the interval "
        "of rates until it is small.",
        "On paper: put $w_t = z^t$. At the limit, z has length 1: z is cos a + i sin a for some angle a.",
    ),
    code="""
def usable_rate(staleness):
    low, high, steps = 0.0, 2.5, 200 * (staleness + 1)
    while high - low > 1e-3 * high:
        rate = (low + high) / 2
        w = [1.0] * (staleness + 1)
        for _ in range(2 * steps):
            w.append(w[-1] - rate * w[-1 - staleness])
        size = np.abs(w)
        grows = not size[-steps // 4 :].max() < size[steps // 2 : steps].max()
        low, high = (low, rate) if grows else (rate, high)
    return low
""",
    wrong=_usable,
    right="it is 2 sin(π / (4 s + 2)): for large s, staleness times rate may be about π / 2.",
)


def _partner(answer: Any) -> str | None:
    for workers in (2, 4, 8, 32):
        values = np.eye(workers)
        for number in range(workers.bit_length() - 1):
            found = np.array([answer(i, number) for i in range(workers)])
            given = f"In round {number} of {workers} workers, partners"
            if wrong := compare(given, np.sort(found), np.arange(workers), 0):
                return f"{wrong} Each must have a partner of its own."
            found = found.astype(int)
            if any(found[j] != i for i, j in enumerate(found)):
                return f"In round {number} of {workers} workers, somebody's partner has another partner."
            values = (values + values[found]) / 2
        if not np.allclose(values, 1 / workers):
            return f"After {workers.bit_length() - 1} rounds, {workers} workers do not have the mean of all."
    return None


partner = Exercise(
    id="consistency-partner",
    answer="partner",
    hints=(
        "After round 0, pairs agree. Whom must a pair meet, so that four agree?",
        "Write the workers' numbers in binary: what has not been mixed yet?",
    ),
    code="""
def partner(worker, round):
    return worker ^ (1 << round)
""",
    wrong=_partner,
    right="that is the butterfly of an all-reduce. Gossip without waiting only comes near the mean; this is exact.",
)
