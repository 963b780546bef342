"""The room of 00_start_here: how its record is read; beside it exercises, figures, and claims."""

from typing import Any

import numpy as np

PASSES, TARGETS = (10, 20, 30, 60, 90, 120, 150), tuple(range(30, 51, 5))  # of the record
NEVER = 2.0 * PASSES[-1]  # a run that does not reach the target counts so many passes when a rate is chosen


def tuned(record: Any, machines: int, measure: str) -> tuple[float, np.ndarray]:
    """The learning rate with the best mean on validation examples, and the measure of its test runs (seeds,).

    A test run that does not reach the target counts all its passes.
    """
    arm = {"machines": machines, "judged_on": "validation"}

    def score(rate: float) -> float:
        values = record.values(measure, **arm, learning_rate=rate)
        return values.mean() if measure.startswith("after") else -np.nan_to_num(values, nan=NEVER).mean()

    rate = max(record.options("learning_rate", **arm), key=score)
    tested = record.values(measure, machines=machines, judged_on="test", learning_rate=rate)
    return rate, np.nan_to_num(tested, nan=PASSES[-1])


def speed_up(record: Any, machines: int, target: int) -> np.ndarray:
    """How many times faster than one machine a number of machines reaches a test accuracy in per cent (seeds,)."""
    one, many = (tuned(record, n, f"passes to {target} %")[1] for n in (1, machines))
    return machines * one / many
