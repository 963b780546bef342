"""Searching for good settings: a table of training runs, searches that ask and are told, and when to give up.

A space is axes of values; a point is a tuple of places on them. Every search answers two calls: `ask()` says which
point to train next and up to how many epochs, `tell` hears how it went. `run` drives any of them until its epochs are
spent, and keeps a log of all trials that were paid for.
"""

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dlscale.lab import checks

Rng = np.random.Generator
Point = tuple[int, ...]
Score = Callable[[Point, int], float]  # validation accuracy of a point, trained for so many epochs
Job = tuple[Point, int]  # a point, and the epochs that it is to be trained up to


@dataclass(frozen=True)
class Space:
    """Axes by name, each with its values. Raises ValueError for an axis without values and for a single point."""

    axes: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        if empty := [name for name, values in self.axes.items() if not len(values)]:
            raise ValueError(f"The axis {empty[0]!r} has no values.")
        if self.size < 2:
            raise ValueError("A space with one point leaves nothing to search: give an axis a second value.")

    @functools.cached_property
    def sizes(self) -> Point:
        return tuple(map(len, self.axes.values()))

    @property
    def size(self) -> int:
        """The number of points."""
        return math.prod(self.sizes)

    def setting(self, point: Point) -> dict[str, Any]:
        """The values at a point, by name."""
        return {name: values[place] for (name, values), place in zip(self.axes.items(), point, strict=True)}

    def draw(self, rng: Rng) -> Point:
        return tuple(rng.integers(self.sizes).tolist())

    def mutate(self, point: Point, rng: Rng) -> Point:
        """Another value on one axis."""
        while self.sizes[axis := int(rng.integers(len(self.sizes)))] < 2:
            continue
        other = (point[axis] + rng.integers(1, self.sizes[axis])) % self.sizes[axis]
        return (*point[:axis], int(other), *point[axis + 1 :])


class Table(NamedTuple):
    """What training at every point of a space came to: accuracies, fractions.

    `curves` (*sizes, seeds, epochs) of validation after each epoch, `test` (*sizes, seeds) after the last one.
    """

    space: Space
    curves: np.ndarray
    test: np.ndarray

    @property
    def quality(self) -> np.ndarray:
        """(*sizes) test accuracy to be expected of a setting: the mean over the seeds."""
        return self.test.mean(-1)

    def shuffled(self, rng: Rng) -> "Table":
        """The same runs, dealt out to the points anew: neighbours have nothing in common any more."""
        order = rng.permutation(self.space.size)
        deal = lambda a, tail: a.reshape(-1, *tail)[order].reshape(a.shape)  # noqa: E731
        return Table(self.space, deal(self.curves, self.curves.shape[-2:]), deal(self.test, self.test.shape[-1:]))


class Lookup:
    """Training as a search sees it, looked up: each point has one of the table's seeds, drawn when it is first asked.

    Called with a point and its epochs, it returns the validation accuracy then.
    """

    def __init__(self, table: Table, rng: Rng) -> None:
        self.table, self.rng, self.seeds = table, rng, {}

    def seed(self, point: Point) -> int:
        return self.seeds.setdefault(point, int(self.rng.integers(self.table.test.shape[-1])))

    def __call__(self, point: Point, epochs: int) -> float:
        return float(self.table.curves[point][self.seed(point), epochs - 1])

    def test(self, point: Point) -> float:
        """Test accuracy of the same network after its last epoch."""
        return float(self.table.test[point][self.seed(point)])


# Searches


class Search:
    """Random search, and what all others share: no point is trained twice.

    `ask()` returns a job. Raises ValueError when no point is left.
    """

    def __init__(self, space: Space, rng: Rng, epochs: int) -> None:
        self.space, self.rng, self.epochs = space, rng, epochs
        self.asked: set[Point] = set()

    def new(self, point: Point) -> Point:
        """The point, or the first on a random walk from it that was not asked for."""
        if len(self.asked) == self.space.size:
            raise ValueError(f"All {self.space.size} points were tried: give a smaller budget or a larger space.")
        while point in self.asked:
            point = self.space.mutate(point, self.rng)
        self.asked.add(point)
        return point

    def ask(self) -> Job:
        return self.new(self.space.draw(self.rng)), self.epochs

    def tell(self, point: Point, epochs: int, score: float) -> None: ...


class Evolution(Search):
    """Regularised: the best of a sample is mutated, and the oldest of the population dies (Real et al. 2018)."""

    def __init__(self, *given: Any, population: int = 8, sample: int = 5) -> None:
        super().__init__(*given)
        self.sample, self.alive, self.born = sample, deque(maxlen=population), 0

    def ask(self) -> Job:
        self.born += 1
        if self.born <= self.alive.maxlen:
            return super().ask()
        contest = [self.alive[i] for i in self.rng.integers(len(self.alive), size=self.sample)]
        return self.new(self.space.mutate(max(contest)[1], self.rng)), self.epochs

    def tell(self, point: Point, epochs: int, score: float) -> None:
        self.alive.append((score, point))  # the oldest falls out


def brackets(epochs: int, keep: int) -> list[tuple[int, int]]:
    """Hyperband's (Li et al. 2017): (points, first epochs), from many and early to few and late."""
    last = max(s for s in range(epochs) if keep**s <= epochs)
    return [(math.ceil((last + 1) / (s + 1) * keep**s), epochs // keep**s) for s in range(last, -1, -1)]


class Halving(Search):
    """Successive halving: of each rung the best go on, one of `keep`, for `keep` times as many epochs.

    `plan`: (points, first epochs) of the brackets, in turn; by default the most thrifty alone. All `brackets` together
    are Hyperband.
    """

    def __init__(self, *given: Any, keep: int = 4, plan: Sequence[tuple[int, int]] | None = None) -> None:
        super().__init__(*given)
        checks.whole("keep", keep, low=2)
        self.keep, self.plan = keep, itertools.cycle(plan or brackets(self.epochs, keep)[:1])
        self.waiting, self.results, self.at = deque(), [], self.epochs

    def ask(self) -> Job:
        if not self.waiting:
            self._next_rung()
        return self.waiting.popleft(), self.at

    def _next_rung(self) -> None:
        best = sorted(self.results, reverse=True)[: len(self.results) // self.keep]
        if best and self.at < self.epochs:
            self.at, self.waiting = min(self.epochs, self.at * self.keep), deque(point for _, point in best)
        else:
            count, self.at = next(self.plan)
            self.waiting = deque(self.new(self.space.draw(self.rng)) for _ in range(count))
        self.results = []

    def tell(self, point: Point, epochs: int, score: float) -> None:
        self.results.append((score, point))


# Driving them


class Trial(NamedTuple):
    """A job that ended: the epochs that the point has now, how many of them were paid for, and its score."""

    point: Point
    epochs: int
    paid: int
    score: float


def run(search: Search, score: Score, budget: int) -> list[Trial]:
    """Drive a search until the next job would cost more epochs than are left; return the log of its trials.

    A point that goes on pays for the further epochs only. Raises ValueError for a budget below the first trial.
    """
    log: list[Trial] = []
    trained: dict[Point, int] = {}
    while True:
        point, epochs = search.ask()
        paid = epochs - trained.get(point, 0)
        budget -= paid
        if budget < 0:
            break
        trained[point] = epochs
        log.append(Trial(point, epochs, paid, score(point, epochs)))
        search.tell(*log[-1][:2], log[-1].score)
    if not log:
        raise ValueError(f"A budget of {budget + paid} epochs is below one trial: the first needs {paid}.")
    return log


def winner(log: Sequence[Trial], epochs: int, budget: float = math.inf) -> Point | None:
    """The point that a search hands over: of those trained for all `epochs` within a budget the best on validation."""
    paid = np.cumsum([trial.paid for trial in log])
    done = [(t.score, t.point) for t, spent in zip(log, paid, strict=True) if t.epochs == epochs and spent <= budget]
    return max(done)[1] if done else None
