"""Serving: requests that come when they like, put together in batches; as a simulation, and for a server.

Both follow one rule. A free machine takes the request that has waited longest. It waits for more until the batch is
full, or until that one has waited `max_wait` seconds; then it computes. Who finds `room` requests waiting is refused.
"""

import asyncio
import collections
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from dlscale.lab import checks


class Rule(NamedTuple):
    """When a batch is computed: `max_batch` requests at most, `max_wait` seconds, at most `room` requests waiting."""

    max_batch: int = 1
    max_wait: float = 0.0
    room: int = 1_000_000

    def checked(self) -> "Rule":
        """Itself. Raises ValueError for numbers that cannot be."""
        checks.whole("max_batch", self.max_batch)
        checks.finite("max_wait", self.max_wait)
        checks.whole("room", self.room)
        return self


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
    if not checks.finite("rate", rate):
        raise ValueError("rate must be above 0.")
    return np.cumsum(np.random.default_rng([seed, 3]).exponential(1 / rate, checks.whole("count", count)))


def simulate(arrivals: np.ndarray, seconds: Callable[[int], float], rule: Rule) -> Served:
    """One machine whose batch of n takes seconds(n), event by event. Raises ValueError as `Rule.checked` does."""
    rule.checked()
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


class Busy(Exception):
    """A request was refused; the message says why."""


class Batcher:
    """`await ask(item)` gives `work(items)`'s result for the item; the items of a batch are put together by the rule.

    `work` runs in a thread of its own, so that requests come in while it computes. `run()` must be running; when it is
    cancelled, or `close` is called, nobody is left without an answer.
    """

    def __init__(self, work: Callable[[list[Any]], Sequence[Any]], rule: Rule, thread: ThreadPoolExecutor) -> None:
        self.work, self.rule, self.thread = work, rule.checked(), thread
        self.waiting: collections.deque[tuple[float, Any, asyncio.Future]] = collections.deque()
        self.changed, self.closing = asyncio.Event(), False

    async def ask(self, item: Any) -> Any:
        """Raises Busy if there is no room, and what `work` raises."""
        if self.closing:
            raise Busy("the server is stopping")
        if len(self.waiting) >= self.rule.room:
            raise Busy(f"{len(self.waiting)} requests wait already; try again later")
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self.waiting.append((loop.time(), item, answer))
        self.changed.set()
        return await answer

    def close(self) -> None:
        """Let nobody else in; `run` ends when all who wait have their answer."""
        self.closing = True
        self.changed.set()

    async def _more(self, seconds: float | None) -> None:
        self.changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.changed.wait()

    async def run(self) -> None:
        """Take batch after batch until closed."""
        loop = asyncio.get_running_loop()
        while True:
            while not self.waiting:
                if self.closing:
                    return
                await self._more(None)
            end = self.waiting[0][0] + self.rule.max_wait
            while len(self.waiting) < self.rule.max_batch and not self.closing and (left := end - loop.time()) > 0:
                await self._more(left)
            batch = [self.waiting.popleft() for _ in range(min(self.rule.max_batch, len(self.waiting)))]
            items, answers = [item for _, item, _ in batch], [answer for *_, answer in batch]
            try:
                results = await loop.run_in_executor(self.thread, self.work, items)
                for answer, result in zip(answers, results, strict=True):
                    if not answer.done():  # who asked may have left
                        answer.set_result(result)
            except BaseException as error:
                for answer in answers:
                    if not answer.done():
                        answer.set_exception(error if isinstance(error, Exception) else Busy("the server was stopped"))
                if not isinstance(error, Exception):
                    raise
