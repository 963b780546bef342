"""The exercises of 15_search."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _draws(answer: Any) -> str | None:
    for share, sure in ((0.05, 0.95), (0.01, 0.99), (0.5, 0.9), (0.2, 0.5), (0.1, 0.999)):
        wanted = next(n for n in range(1, 10_000) if 1 - (1 - share) ** n >= sure)
        what = f"For the best {share:.0%} with probability {sure}, the number"
        if wrong := compare(what, answer(share, sure), wanted):
            return wrong
    return None


draws = Exercise(
    id="search-draws",
    answer="draws_needed",
    hints=("With what probability do n draws all miss?", "They all miss with probability (1 − share)ⁿ; round up."),
    code="""
def draws_needed(share, sure):
    return int(np.ceil(np.log(1 - sure) / np.log(1 - share)))
""",
    wrong=_draws,
    right="however many axes the space has: that is why random search is hard to beat.",
)


def landscape(seed: int) -> np.ndarray:
    """Scores of every point of a small space (4, 5, 3, 4, 2, 3): what the values add, what pairs of them add, luck."""
    rng, sizes = np.random.default_rng(seed), (4, 5, 3, 4, 2, 3)
    score = 0.02 * rng.normal(size=sizes)
    for axis in range(len(sizes)):
        for spread, kept in ((0.12, [axis]), (0.04, [axis, (axis + 1) % len(sizes)])):
            score = score + spread * rng.normal(size=[n if i in kept else 1 for i, n in enumerate(sizes)])
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


NEEDED, FRESH = 0.92, range(900, 972)


def _next_point(answer: Any) -> str | None:
    found = np.mean([searched(answer, seed) for seed in FRESH])
    told = f"reaches {found:.1%} of the way from the mean to the highest; {NEEDED:.0%} is asked for."
    return None if found >= NEEDED else f"in {len(FRESH)} new spaces, with 40 trials each, your search {told}"


next_point = Exercise(
    id="search-next_point",
    answer="next_point",
    hints=(
        "Neighbours of the best point are often good, too. How can you try them and keep the best point?",
        "Change one value of one of the best points. As long as the new point was tried before, change another value. "
        "Begin with some points at random.",
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


OVERTAKEN = np.array([[3.0, 8.0, 5.1, 5.2], [1.0, 4.0, 6.0, 7.0], [9.0, 3.0, 3.5, 3.6], [0.5, 0.6, 0.7, 9.0]])
CASES = (  # runs, epochs, first, keep; the winner and the epochs paid
    (16, 16, 1, 4, 14, 40), (27, 9, 1, 3, 4, 63), (10, 16, 2, 2, 4, 46), (5, 8, 4, 3, 4, 24), (40, 4, 1, 4, 9, 70),
    (12, 64, 1, 4, 2, 21), (*OVERTAKEN.shape, 2, 2, 1, 12),
)  # fmt: skip


def _halve(answer: Any) -> str | None:
    """Drawn curves, and four that are made: of the two that go on, the leader falls back in the last rung."""
    for seed, (count, epochs, first, keep, best, cost) in enumerate(CASES, 70):
        drawn = np.random.default_rng(seed).random((count, epochs)).cumsum(1)
        winner, paid = answer(drawn if count > 4 else OVERTAKEN.copy(), first, keep)
        case = f"For {count} runs of at most {epochs} epochs, the first rung at {first}, one of {keep} kept,"
        if compare("", winner, best, 1e-9):
            return f"{case} run {winner} does not win: compare those that are left, by the last scores paid for."
        if wrong := compare(f"{case} the number of epochs paid", paid, cost, 1e-9):
            return wrong
    return None


halve = Exercise(
    id="search-halve",
    answer="halve",
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
