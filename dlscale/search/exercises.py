"""The exercises of 15_search."""

import math
from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _draws(answer: Any) -> str | None:
    for share, sure in ((0.05, 0.95), (0.01, 0.99), (0.5, 0.9), (0.2, 0.5), (0.1, 0.999)):
        wanted = next(n for n in range(1, 10_000) if 1 - (1 - share) ** n >= sure)
        if wrong := compare(
            f"For the best {share:.0%} with probability {sure}, the number", answer(share, sure), wanted
        ):
            return wrong
    return None


draws = Exercise(
    id="search-draws",
    answer="draws_needed",
    question="Write `draws_needed(share, sure)`: the fewest random draws so that, with probability `sure`, at least "
    "one of them is among the best `share` of all points.",
    hints=("With what probability do n draws all miss?", "They all miss with probability (1 − share)ⁿ; round up."),
    code="""
def draws_needed(share, sure):
    return math.ceil(math.log(1 - sure) / math.log(1 - share))
""",
    wrong=_draws,
    right="however many axes the space has: that is why random search is hard to shame.",
)


def landscape(seed: int) -> np.ndarray:
    """Scores of every point of a small space (4, 5, 3, 4, 2, 3): what the values add, what pairs of them add, luck."""
    rng, sizes = np.random.default_rng(seed), (4, 5, 3, 4, 2, 3)
    score = 0.02 * rng.normal(size=sizes)
    for axis, size in enumerate(sizes):
        shape = [1] * len(sizes)
        shape[axis] = size
        score = score + 0.12 * rng.normal(size=size).reshape(shape)
        shape[(axis + 1) % len(sizes)] = sizes[(axis + 1) % len(sizes)]
        score = score + 0.04 * rng.normal(size=shape)
    return score


def searched(answer: Any, seed: int, trials: int = 40) -> float:
    """The score of the best point that `answer` asks for, as a share of the way from the mean of all to the best."""
    score, rng = landscape(seed), np.random.default_rng(seed)
    points = [tuple(rng.integers(score.shape).tolist())]
    for _ in range(trials - 1):
        told = np.array([score[point] for point in points])
        new = np.asarray(answer(np.array(points), told, np.array(score.shape), int(rng.integers(2**31))))
        good = new.shape == (score.ndim,) and new.dtype.kind in "iu" and (new >= 0).all() and (new < score.shape).all()
        if not good:
            raise ValueError(f"a point is {score.ndim} whole numbers from 0 to below {score.shape}, not {new!r}")
        points.append(tuple(new.tolist()))
    return float((max(score[point] for point in points) - score.mean()) / (score.max() - score.mean()))


NEEDED, FRESH = 0.80, range(900, 972)


def _next_point(answer: Any) -> str | None:
    found = [searched(answer, seed) for seed in FRESH]
    if np.mean(found) < NEEDED:
        told = f"comes {np.mean(found):.1%} of the way from the mean to the best; {NEEDED:.0%} is asked for."
        return f"on {len(FRESH)} fresh spaces, with 40 trials each, your search {told}"
    return None


next_point = Exercise(
    id="search-next_point",
    answer="next_point",
    question="**Open.** Write your own search: `next_point(points, scores, sizes, seed)` is given the points tried so "
    "far (n, axes), their scores (n,), how many values each axis has, and a seed for your random numbers; it returns "
    "the next point, whole numbers. It is judged on 72 spaces it has never seen, with 40 trials each: the best "
    "point must come, on average, 80 % of the way from the mean to the best. Random search does not come so far. "
    "To ask for a point twice is a trial lost.",
    hints=(
        "What is near the best point is often good, too. How do you leave it without losing it?",
        "Change one value of one of the best points; do not ask for a point twice; begin with some at random.",
    ),
    code="""
def next_point(points, scores, sizes, seed):
    rng = np.random.default_rng(seed)
    if len(points) < 8:
        return rng.integers(sizes)
    new = points[np.argsort(-scores)[rng.integers(2)]].copy()
    while (points == new).all(1).any():
        axis = rng.integers(len(sizes))
        new[axis] = rng.integers(sizes[axis])
    return new
""",
    wrong=_next_point,
    right="random search needs half as many trials again to come so far, or more. Would yours come so far on a "
    "shuffled space?",
)


def _halve(answer: Any) -> str | None:
    for seed, (count, epochs, first, keep) in enumerate(((16, 16, 1, 4), (27, 9, 1, 3), (10, 16, 2, 2), (5, 8, 4, 3))):
        curves = np.random.default_rng(70 + seed).random((count, epochs)).cumsum(1)
        wanted = _halved(curves, first, keep)
        try:
            winner, paid = answer(curves.copy(), first, keep)
        except (TypeError, ValueError) as error:
            return f"your function must return two numbers, the winner and the epochs paid ({error})."
        case = f"For {count} runs of at most {epochs} epochs, the first rung at {first}, one of {keep} kept,"
        if wrong := compare(f"{case} the winner", winner, wanted[0], 1e-9):
            return wrong
        if wrong := compare(f"{case} the number of epochs paid", paid, wanted[1], 1e-9):
            return wrong
    return None


def _halved(curves: np.ndarray, first: int, keep: int) -> tuple[int, int]:
    alive, epochs, last, paid = list(range(len(curves))), first, curves.shape[1], first * len(curves)
    while len(alive) >= keep and epochs < last:
        alive = sorted(alive, key=lambda run: -curves[run, epochs - 1])[: len(alive) // keep]
        further = min(last, keep * epochs)
        paid, epochs = paid + len(alive) * (further - epochs), further
    return max(alive, key=lambda run: curves[run, epochs - 1]), paid


halve = Exercise(
    id="search-halve",
    answer="halve",
    question="Write **successive halving**: `halve(curves, first, keep)`. `curves` (runs, epochs) has the score of "
    "each run after each epoch, `curves[run, epochs - 1]`; look only at what you have paid for. All runs train for "
    "`first` epochs; of each rung the best ⌊runs / keep⌋ go on, up to `keep` times as many epochs, at most all. Stop "
    "after the last epoch, or when fewer than `keep` are left. Return the winner, the best then, and the epochs paid "
    "for: a run that goes on pays only for the further ones.",
    hints=(
        "Keep three things: which runs are alive, how many epochs they have, and what was paid.",
        "`alive[np.argsort(-curves[alive, epochs - 1])]` has the best first. The last rung may be shorter than `keep` "
        "times the one before.",
    ),
    code="""
def halve(curves, first, keep):
    alive, epochs, last = np.arange(len(curves)), first, curves.shape[1]
    paid = first * len(alive)
    while len(alive) >= keep and epochs < last:
        ranked = alive[np.argsort(-curves[alive, epochs - 1])]
        alive, further = ranked[: len(ranked) // keep], min(last, keep * epochs)
        paid += len(alive) * (further - epochs)
        epochs = further
    return alive[np.argmax(curves[alive, epochs - 1])], paid
""",
    wrong=_halve,
    right="most runs are paid for a rung or two only, and all are compared after equally many epochs.",
)


def _expected_best(answer: Any) -> str | None:
    for seed, (count, n) in enumerate(((10, 1), (10, 3), (50, 20), (200, 7))):
        scores = np.random.default_rng(80 + seed).normal(size=count)
        ranks = np.arange(count + 1) / count
        wanted = (np.sort(scores) * np.diff(ranks**n)).sum()
        if wrong := compare(f"For {n} draws from {count} scores, the expected best", answer(scores.copy(), n), wanted):
            return wrong
    return None


expected_best = Exercise(
    id="search-expected_best",
    answer="expected_best",
    question="Write `expected_best(scores, n)`: the mean, over all ways to draw `n` of the `scores` (any may be drawn "
    "again), of the best one drawn. No random numbers: there is a formula.",
    hints=(
        "With N scores in rising order, with what probability are n draws all among the first i?",
        "All are among the first i with probability (i/N)ⁿ. So the i-th is the best with (i/N)ⁿ − ((i−1)/N)ⁿ.",
    ),
    code="""
def expected_best(scores, n):
    shares = np.arange(len(scores) + 1) / len(scores)
    return (np.sort(scores) * np.diff(shares**n)).sum()
""",
    wrong=_expected_best,
    right="so all trials that were run give the whole curve, from one trial to all (Dodge et al. 2019).",
)


def _promote(answer: Any) -> str | None:
    rng = np.random.default_rng(90)
    for count, keep in ((3, 4), (4, 4), (9, 4), (9, 2), (20, 3), (12, 4)):
        scores = rng.permutation(count) / count
        best = np.argsort(-scores)[: count // keep]
        some, the_best = rng.random(count) < 0.2, scores == scores.max()
        for gone in (np.zeros(count, bool), some, the_best, np.isin(np.arange(count), best), some | True):
            left = [run for run in best if not gone[run]]
            case = f"With scores {scores.round(2).tolist()}, gone {np.flatnonzero(gone).tolist()}, keep {keep}:"
            if wrong := compare(
                f"{case} what goes on", answer(scores.copy(), gone.copy(), keep), left[0] if left else -1, 1e-9
            ):
                return wrong
    return None


promote = Exercise(
    id="search-promote",
    answer="promote",
    question="Write `promote(scores, gone, keep)`, the rule of asynchronous halving for one rung: `scores` (n,) of the "
    "runs that ended in it so far, `gone` (n,) truth values, those that went on already. Return the index of the run "
    "that goes on now: the best of those among the ⌊n / keep⌋ best that is not gone. If there is none, return −1.",
    hints=(
        "A run that is gone still takes up one of the best places.",
        "Take the ⌊n / keep⌋ best of all, then the first of them that is not gone.",
    ),
    code="""
def promote(scores, gone, keep):
    for run in np.argsort(-scores)[: len(scores) // keep]:
        if not gone[run]:
            return run
    return -1
""",
    wrong=_promote,
    right="nobody waits: a worker takes what is good enough by what is known now, or begins something new.",
)


OPERATIONS = 6 * 64  # of a step on 64 examples, for each parameter


def optimum(law: Any, budget: float, networks: dict[int, int]) -> tuple[int, int]:
    """The width with the least loss that a budget of operations can buy, and its steps.

    `law(parameters, steps)`; `networks` has the parameters of each width, few enough for a step at least.
    """
    steps = {width: int(budget // (OPERATIONS * int(count))) for width, count in networks.items()}
    width = min(networks, key=lambda width: law(networks[width], steps[width]))
    return width, steps[width]


def _best_use(answer: Any) -> str | None:
    networks = {4: 234, 8: 490, 16: 1098, 32: 2698, 64: 7434, 128: 23050}
    for floor, of_size, of_steps in ((0.5, 0.3, 0.4), (0.0, 0.15, 0.6), (0.2, 0.5, 0.2)):
        law = lambda n, s, p=(floor, of_size, of_steps): p[0] + (n / 500) ** -p[1] + (s / 100) ** -p[2]  # noqa: E731
        for budget in (7e7, 1e9, 2e10):
            wanted = optimum(law, budget, networks)
            try:
                width, steps = answer(law, budget, dict(networks))
            except (TypeError, ValueError) as error:
                return f"your function must return two numbers, the width and the steps ({error})."
            case = f"For {budget:.0e} operations, a floor of {floor} and exponents {of_size} and {of_steps},"
            if wrong := compare(f"{case} the width", width, wanted[0]):
                return wrong
            if wrong := compare(f"{case} the number of steps", steps, wanted[1], 1e-9):
                return wrong
    return None


best_use = Exercise(
    id="search-best_use",
    answer="best_use",
    question="Write `best_use(law, budget, networks)`: `law(parameters, steps)` predicts a loss that falls with both, "
    "`budget` is in operations, and `networks` has for each width its number of parameters. A step on 64 examples "
    "costs 6 · 64 operations for each parameter. Return the width with the least predicted loss that the budget can "
    "buy, and its whole number of steps.",
    hints=(
        "How many steps can each width afford? More steps than that are not to be had, fewer are worse.",
        "For each width: budget // (6 · 64 · parameters) steps; then ask the law for each pair, and take the least.",
    ),
    code="""
def best_use(law, budget, networks):
    steps = {width: budget // (6 * 64 * parameters) for width, parameters in networks.items()}
    width = min(networks, key=lambda width: law(networks[width], steps[width]))
    return width, steps[width]
""",
    wrong=_best_use,
    right="neither the largest net nor the longest training: a budget has a width of its own.",
)

__all__ = [
    "Exercise",
    "best_use",
    "draws",
    "expected_best",
    "halve",
    "landscape",
    "math",
    "next_point",
    "optimum",
    "promote",
    "searched",
]
