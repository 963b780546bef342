"""The exercises of 14_honest_benchmarks."""

from typing import Any

import numpy as np
from scipy.special import bdtr

from dlscale import honest_benchmarks as honest
from dlscale.course.exercises import Exercise


def _seeds(answer: Any) -> str | None:
    for difference, deviation in ((1.0, 1.5), (0.5, 2.0), (2.0, 2.1), (3.0, 1.2)):
        wanted = honest.seeds_needed(difference, deviation)
        found = answer(difference, deviation)
        if not np.isfinite(found) or abs(found - wanted) > max(3, 0.1 * wanted):
            told = f"for {difference:g} points and a deviation of {deviation:g}"
            return f"{told}, {found:.4g} is too {'many' if found > wanted else 'few'} (some 10 % off would do)."
    return None


seeds = Exercise(
    id="honest_benchmarks-seeds",
    answer="seeds_for",
    hints=(
        "The mean of $n$ differences has a deviation of $\\sigma/\\sqrt n$. How many of these must the true difference "
        "lie above zero, so that four of five intervals stay clear of it?",
        "An interval reaches about 1.96 deviations to each side, and four of five draws lie above −0.84 deviations. "
        "Add two seeds for Student's $t$.",
    ),
    code="""
def seeds_for(difference, deviation):
    return math.ceil(((1.96 + 0.84) * deviation / difference) ** 2) + 2
""",
    wrong=_seeds,
    right="half the difference costs four times the seeds.",
)


TARGETS = tuple(np.arange(40.0, 61.0, 2.0).tolist())


def two_systems(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times, and accuracies (runs, looks) of ours and of theirs: one may be quicker, the other come further."""
    rng, times = np.random.default_rng(seed), np.arange(1.0, 61.0)
    rise = lambda best, tau: best - (best - 10) * np.exp(-times / tau)  # noqa: E731
    curves = [rise(rng.uniform(50, 60), rng.uniform(6, 16)) + rng.normal(0, 0.7, (9, 60)) for _ in range(2)]
    if not seed:  # above 45 %, five of their runs never arrive, and four are fast
        curves[1] = np.where(np.arange(9)[:, None] < 5, np.minimum(times, 45.0), 60.0)
    return times, curves[0], curves[1]


def _threshold(answer: Any) -> str | None:
    for seed in (0, *range(3000, 3011)):
        times, ours, theirs = two_systems(seed)
        median = lambda runs, target, t=times: float(honest.median(honest.first_crossing(t, runs, target)))  # noqa: E731
        looks = {goal: median(theirs, goal) / mine for goal in TARGETS if np.isfinite(mine := median(ours, goal))}
        found = answer(times, ours.copy(), theirs.copy(), TARGETS)
        if found not in looks:
            return f"for case {seed} the target {found!r} is none that most of our runs reach."
        if looks[found] < max(looks.values()):
            told = f"at {found:g} % ours looks {looks[found]:.2f} times as fast"
            return f"for case {seed} there is a better target: {told}, elsewhere {max(looks.values()):.2f} times."
    return None


threshold = Exercise(
    id="honest_benchmarks-threshold",
    answer="best_threshold",
    hints=(
        "`honest.median(honest.first_crossing(times, ours, target))` is the median time, infinite where it must be.",
        "Infinite by finite is infinite: no special case is needed, if targets that ours never reach are left out.",
    ),
    code="""
def best_threshold(times, ours, theirs, targets):
    best, most = None, 0.0
    for target in targets:
        mine, other = (honest.median(honest.first_crossing(times, runs, target)) for runs in (ours, theirs))
        if math.isfinite(mine) and other / mine > most:
            best, most = target, other / mine
    return best
""",
    wrong=_threshold,
    right="from the same runs, whoever may choose the threshold afterwards wins more often than at one named before.",
)


SAMPLES, LEAST, MOST = 16, 0.011, 0.042  # mean chance that the true median lies beyond an end; 0.025 is asked for


def _beyond(samples: np.ndarray, end: float) -> float:
    """The chance that the true median lies above `end`; where samples are tied, what is nearest to 0.025."""
    above, at = np.sum(samples > end), max(np.sum(samples >= end), np.sum(samples > end) + 1)
    return float(np.clip(0.025, *bdtr((above, at - 1), len(samples), 0.5)))


def _interval(answer: Any) -> str | None:
    found = np.zeros((SAMPLES, 2))
    for seed in range(SAMPLES):
        rng = np.random.default_rng(4000 + seed)
        count = int(rng.integers(40, 100))
        never = seed * count // 32  # up to almost half
        times = rng.permutation(np.append(rng.lognormal(3, 0.7, count - never), np.full(never, np.inf)))
        ends = answer(times.copy())
        if np.shape(ends) != (2,):
            return "`median_interval` must return two numbers, the lower and the upper end."
        if np.isnan(low := float(ends[0])) or np.isnan(high := float(ends[1])):
            return f"Of {never} infinite times: an end is NaN. np.quantile computes with infinity; index the medians."
        found[seed] = _beyond(-times, -low), _beyond(times, high)
    for what, chance in zip(("lower", "upper"), found.mean(0), strict=True):
        if not LEAST < chance < MOST:
            told = f"beyond your {what} end in {100 * chance:.1f} % of all cases"
            return f"over {SAMPLES} samples, some with infinite ends, the true median lies {told}; it should be 2.5 %."
    return None


interval = Exercise(
    id="honest_benchmarks-interval",
    answer="median_interval",
    hints=(
        "`rng.choice(times, (2000, len(times)))` holds 2,000 resamples, one in each row.",
        "Take the median of each row and sort these medians. The interval leaves 2.5 % of them out at each end. "
        "Index the sorted medians: np.quantile would compute with infinity.",
    ),
    code="""
def median_interval(times):
    rng = np.random.default_rng(0)
    resamples = rng.choice(times, (2000, len(times)))
    medians = np.sort(np.median(resamples, axis=1))
    return medians[50], medians[1949]
""",
    wrong=_interval,
    right="an interval that needs no formula, and that bears runs that never arrive.",
    library="dlscale.honest_benchmarks.bootstrap",
)
