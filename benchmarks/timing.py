"""What all benchmarks share: rows of one table, and timing that is fair on a machine with other work."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import numpy as np

from dlscale import honest_benchmarks as honest


class Row(NamedTuple):
    """One line of the table: a task, who did it, the median of its rounds with their quartiles, and a ratio.

    All as notebook 14 reports what it measures (`dlscale.honest_benchmarks`).
    """

    task: str
    candidate: str
    median: float
    low: float
    high: float
    unit: str
    ratio: float | None = None  # to what the task names, or else to the first candidate of the task
    note: str = ""
    ratio_low: float | None = None  # of 95 %, over the rounds
    ratio_high: float | None = None


def interleave(candidates: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, np.ndarray]:
    """Seconds of each candidate, (rounds,), after one untimed call of each that compiles and fills caches.

    The candidates take turns, so that a noisy moment of the machine hits all of them alike.
    """
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = perf_counter()
            run()
            seconds[name].append(perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def row(task: str, candidate: str, values: np.ndarray, unit: str, ratio: float | None = None, note: str = "") -> Row:
    """A row from the values of all rounds, in the unit that is to be shown."""
    measured = honest.Measured(candidate, "operator", unit, values)
    return Row(task, candidate, measured.median, *measured.spread, unit, ratio, note)


def rows(task: str, seconds: dict[str, np.ndarray], unit: str = "s", scale: float = 1.0) -> list[Row]:
    """Rows with the median of how many times as long as the first candidate each takes, round by round."""
    first, found = next(iter(seconds.values())), []
    for name, values in seconds.items():
        ratio, low, high = honest.ratio(values, first)
        found.append(row(task, name, scale * values, unit, ratio)._replace(ratio_low=low, ratio_high=high))
    return found
