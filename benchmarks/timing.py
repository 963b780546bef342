"""Interleaved timing, so that a noisy moment of the machine hits all candidates alike."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import numpy as np


def interleave(candidates: dict[str, Callable[[], object]], rounds: int = 7) -> dict[str, np.ndarray]:
    """Seconds of each candidate, (rounds,), after one untimed call of each that compiles and fills caches."""
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            start = perf_counter()
            run()
            seconds[name].append(perf_counter() - start)
    return {name: np.array(values) for name, values in seconds.items()}


def table(title: str, seconds: dict[str, np.ndarray], ours: str, unit: str = "s", scale: float = 1.0) -> None:
    """Print medians with their range, and how many times as long as `ours` each takes, round by round."""
    print(f"\n{title}")
    for name, values in seconds.items():
        ratio = values / seconds[ours]
        low, middle, high = np.quantile(values, (0, 0.5, 1)) * scale
        least, usual, most = np.quantile(ratio, (0, 0.5, 1))
        print(f"  {name:34} {middle:9.2f} {unit} [{low:.2f}, {high:.2f}]  ratio {usual:6.2f} [{least:.2f}, {most:.2f}]")
