"""Means with their uncertainty over seeds."""

from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval, in the unit of the samples."""

    mean: np.ndarray | float
    low: np.ndarray | float
    high: np.ndarray | float

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def interval(samples: np.ndarray, axis: int = 0, confidence: float = 0.95) -> Interval:
    """Student's t-interval for the mean of independent `samples` along `axis`.

    Raises ValueError for fewer than two samples. A sample that is not finite gives NaN: it is not left out.
    """
    samples = np.asarray(samples, dtype=float)
    count = samples.shape[axis] if samples.ndim else 0
    if count < 2:
        raise ValueError(f"An interval needs at least 2 samples, not {count}: run more seeds.")
    mean = samples.mean(axis)
    half = stdtrit(count - 1, (1 + confidence) / 2) * samples.std(axis, ddof=1) / np.sqrt(count)
    return Interval(mean, mean - half, mean + half)


def widened(samples: np.ndarray, overlap: float) -> np.ndarray:
    """Samples with the same mean, spread so that `interval` holds for random splits of the same data.

    Such splits overlap, so they are not independent. `overlap` is how many test examples a split has for each training
    example (Nadeau & Bengio 2003).
    """
    samples = np.asarray(samples, dtype=float)
    return samples.mean() + (samples - samples.mean()) * np.sqrt(1 + len(samples) * overlap)
