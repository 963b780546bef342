"""Serving, simulated: requests that come when they like, put together in batches.

A free machine takes the request that has waited longest. It waits for more until the batch is full, or until that one
has waited `max_wait` seconds; then it computes. Who finds `room` requests waiting is refused.
"""

import collections
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dlscale.lab import checks


class Rule(NamedTuple):
    """When a batch is computed: `max_batch` requests at most, `max_wait` seconds, at most `room` requests waiting."""

    max_batch: int = 1
    max_wait: float = 0.0
    room: int = 1_000_000


class Served(NamedTuple):
    """What became of the requests, in order of arrival; NaN of those that were refused."""

    arrivals: np.ndarray  # seconds
    starts: np.ndarray  # when their batch began
    ends: np.ndarray
    batches: np.ndarray  # (batches,) sizes, in order

    @property
    def latency(self) -> np.ndarray:
        """Seconds from arrival to answer."""
        return self.ends - self.arrivals

    @property
    def refused(self) -> int:
        return int(np.isnan(self.ends).sum())


def poisson(rate: float, count: int, seed: int) -> np.ndarray:
    """Arrival times of `count` requests that know nothing of each other, `rate` a second on average."""
    return np.cumsum(np.random.default_rng([seed, 3]).exponential(1 / rate, count))


def simulate(arrivals: np.ndarray, seconds: Callable[[int], float], rule: Rule) -> Served:
    """One machine whose batch of n takes seconds(n), event by event. Raises ValueError for a rule that cannot be."""
    checks.whole("max_batch", rule.max_batch)
    checks.finite("max_wait", rule.max_wait)
    checks.whole("room", rule.room)
    arrivals = np.asarray(arrivals, float)
    if (np.diff(arrivals) < 0).any() or not np.isfinite(arrivals).all():
        raise ValueError("arrivals must be times in order.")
    starts, ends = np.full((2, len(arrivals)), np.nan).tolist()
    times, waiting, batches, coming, free = arrivals.tolist(), collections.deque(), [], 0, 0.0

    def comes(until: float) -> bool:
        """Does the next request come until then? If so, it waits, or is refused."""
        nonlocal coming
        if coming == len(times) or times[coming] > until:
            return False
        if len(waiting) < rule.room:
            waiting.append(coming)
        coming += 1
        return True

    while waiting or coming < len(times):
        now = max(free, times[waiting[0] if waiting else coming])
        while comes(now):
            pass
        limit = max(now, times[waiting[0]] + rule.max_wait)
        while len(waiting) < rule.max_batch and comes(limit):
            now = times[coming - 1]
        now = now if len(waiting) >= rule.max_batch else limit
        batch = [waiting.popleft() for _ in range(min(rule.max_batch, len(waiting)))]
        free = now + seconds(len(batch))
        batches.append(len(batch))
        for number in batch:
            starts[number], ends[number] = now, free
    return Served(arrivals, np.array(starts), np.array(ends), np.array(batches))
