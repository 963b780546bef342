"""One way to report a measurement on every level: median, spread, interval; times of runs that may never get there.

Samples are repeated measurements of one quantity, one for each seed or round. A time of a run that never got there is
infinite: it counts, and medians can bear it. Means and their t-intervals are `dlscale.lab.intervals`.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betaln, nctdtr, stdtrit
from scipy.stats import linregress

from dlscale.lab import checks
from dlscale.lab.intervals import Interval

# One quantity


def median(samples: ArrayLike) -> np.ndarray:
    """The middle sample along the last axis; of an even number the mean of the two in the middle.

    It is infinite if one of these is. So it is among as many infinite samples as finite ones: half of the runs never
    got there.
    """
    return np.median(np.asarray(samples, dtype=float), axis=-1)


def bootstrap(samples: ArrayLike) -> Interval:
    """The median of independent `samples` (n,), and its 95 % percentile interval (Efron 1979).

    As many samples are drawn again, with replacement, 2,000 times; the interval holds the middle of their medians. Too
    narrow for few samples: at ten the truth is inside in some nine of ten cases, not nineteen of twenty. Raises
    ValueError for fewer than two samples and for NaN; infinite ones may stand.
    """
    samples = _samples(samples, 2)
    medians = np.sort(median(np.random.default_rng(0).choice(samples, (2000, len(samples)))))
    return Interval(float(median(samples)), float(medians[50]), float(medians[1949]))


def _samples(samples: ArrayLike, least: int = 1) -> np.ndarray:
    samples = np.array(samples, dtype=float, ndmin=1)
    if len(samples) < least:
        raise ValueError(f"This needs at least {least} samples, not {len(samples)}: measure again, or run more seeds.")
    if np.isnan(samples).any():
        raise ValueError("A sample is NaN. A run that failed counts: give it the value of a failed run (a time: inf).")
    return samples


class Measured(NamedTuple):
    """Samples of one quantity, and the one way to report them. Raises ValueError for none and for NaN."""

    name: str
    level: str  # of Deep500: operator, network, training, distributed (Ben-Nun et al. 2019, arXiv:1901.10183)
    unit: str
    samples: ArrayLike

    @property
    def median(self) -> float:
        return float(median(_samples(self.samples)))

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles: half of the samples lie between."""
        low, high = np.quantile(self.samples, (0.25, 0.75), method="nearest")
        return float(low), float(high)

    @property
    def interval(self) -> Interval:
        """Where the median lies, with 95 % confidence, by `bootstrap`."""
        return bootstrap(self.samples)

    def __str__(self) -> str:
        (low, high), failed = self.spread, np.isinf(self.samples).sum()
        middle = f"median {self.interval} {self.unit}, half between {low:.3g} and {high:.3g}"
        never = f", {failed} of them never" * bool(failed)
        return f"{self.name} ({self.level}): {middle}; {len(self.samples)} runs{never}"


def ratio(ours: ArrayLike, theirs: ArrayLike) -> Interval:
    """The median of how many times `ours` is `theirs`, pair by pair, with its interval by `bootstrap`.

    What hits both sides of a pair alike drops out; a pair in which neither side gets there says nothing of the ratio
    and is left out. NaN where fewer than two are left. Raises ValueError for samples that are not positive.
    """
    ours, theirs = _samples(ours, 2), _samples(theirs, 2)
    if min(ours.min(), theirs.min()) <= 0:
        raise ValueError("A ratio needs positive samples.")
    some = np.isfinite(ours) | np.isfinite(theirs)
    return bootstrap(ours[some] / theirs[some]) if some.sum() > 1 else Interval(np.nan, np.nan, np.nan)


# Luck


def expected_best(samples: ArrayLike, tries: int, of: ArrayLike | None = None) -> float:
    """The mean of the largest of `tries` different samples, over all ways to choose them (Dodge et al. 2019).

    The k-th smallest of n is the largest of them in (k-1 choose tries-1) of (n choose tries) ways. With `of`, the mean
    of what it holds for the sample that was the largest: what the chosen one does elsewhere. Raises ValueError for more
    tries than samples.
    """
    samples = _samples(samples)
    n = len(samples)
    tries = checks.whole("tries", tries, high=n, why=f"There are {n} samples.")
    k = np.arange(tries, n + 1)
    ways = np.exp(betaln(n - tries + 1, tries) - betaln(k - tries + 1, tries)) * tries / k
    return float(ways @ np.asarray(samples if of is None else of, float)[np.argsort(samples)][tries - 1 :])


def power(difference: float, deviation: float, seeds: int) -> float:
    """How often a t-interval over `seeds` differences, with this standard deviation, excludes 0 if the truth is
    `difference`: the power of the paired t-test. Raises ValueError for fewer than two seeds."""
    seeds = checks.whole("seeds", seeds, low=2, why="One sample has no spread.")
    shift = abs(difference) / deviation * np.sqrt(seeds)
    limit = stdtrit(seeds - 1, 0.975)
    below = np.nan_to_num(nctdtr(seeds - 1, shift, -limit))  # NaN where it is too small for SciPy
    return float(1 - nctdtr(seeds - 1, shift, limit) + below)


def seeds_needed(difference: float, deviation: float) -> int:
    """The fewest seeds whose `power` is at least 80 %: a few more than a known deviation would need.

    Raises ValueError for a difference of 0.
    """
    if difference == 0:
        raise ValueError("difference must not be 0: no number of seeds would show it.")
    least = max(2, int(7.84 * (deviation / difference) ** 2))
    return next(n for n in itertools.count(least) if power(difference, deviation, n) >= 0.8)


# Time to accuracy


def first_crossing(times: ArrayLike, values: ArrayLike, target: float, in_a_row: int = 1) -> np.ndarray:
    """When each row of values (…, looks) first stays at `target` or above for so many looks; infinite if never.

    `times` (looks,) are when somebody looked; the time is that of the last look of the row of good ones, when one could
    know. Raises ValueError for no looks.
    """
    times, values = np.asarray(times, float), np.asarray(values, float)
    if times.shape != values.shape[-1:] or not len(times):
        raise ValueError(f"There must be a time for each look, not {times.shape} for {values.shape[-1:]}.")
    row = checks.whole("in_a_row", in_a_row, high=len(times), why=f"There are {len(times)} looks.")
    good = np.lib.stride_tricks.sliding_window_view(values >= target, row, axis=-1).all(-1)
    return np.where(good.any(-1), times[good.argmax(-1) + row - 1], np.inf)


class Survival(NamedTuple):
    """The share of runs that are not there yet, from each of `times` (n,) on, until the next."""

    times: np.ndarray
    waiting: np.ndarray

    @property
    def median(self) -> float:
        """When half of the runs are there, in the middle between two as `median`; infinite where that was not seen."""
        half, more = (np.append(self.times, np.inf)[np.sum(self.waiting > 0.5 + e)] for e in (1e-12, -1e-12))
        return float((half + more) / 2)


def survival(times: ArrayLike, reached: ArrayLike) -> Survival:
    """Kaplan and Meier's estimate (1958) from runs that were stopped at `times`: there (`reached`), or given up.

    At each time at which some arrive, the share that waits falls by the part of those still watched. A run that was
    given up counts until then and not after: it is neither dropped nor called a success. Right on average only where
    it was stopped for no reason that tells when it would have arrived. A run that diverged was not given up: its time
    is infinite. Raises ValueError for no runs.
    """
    times, reached = _samples(times), np.asarray(reached, dtype=bool)
    at = np.unique(times[reached])
    watched = (times >= at[:, None]).sum(1)
    arrived = (times[reached] == at[:, None]).sum(1)
    return Survival(at, np.cumprod(1 - arrived / watched))


def slope(x: ArrayLike, y: ArrayLike) -> Interval:
    """The slope of the least-squares line of log y over log x: the exponent of a power law, with its t-interval.

    Raises ValueError for fewer than three points.
    """
    found = linregress(np.log(_samples(x, 3)), np.log(_samples(y, 3)))
    half = stdtrit(len(x) - 2, 0.975) * found.stderr
    return Interval(float(found.slope), float(found.slope - half), float(found.slope + half))
