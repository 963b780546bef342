"""Searching for good settings: where to look next, when to give up, and many workers at once.

A space is axes of values; a point is a tuple of places on them. Every search answers two calls: `ask()` says which
point to train next and up to how many epochs, `tell` hears how it went. `run` drives any of them, with one worker or
many, and keeps a log of all that was paid for.
"""

import bisect
import functools
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.optimize import least_squares

from dlscale.lab import checks

Rng = np.random.Generator
Point = tuple[int, ...]
Settings = dict[str, np.ndarray]  # numbers by name, one for each member of a population
Score = Callable[[Point, int], float]  # of a point, trained for so many epochs; or the time that it takes
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

    def grid(self, count: int, rng: Rng) -> list[Point]:
        """At most `count` points, evenly spaced: one value more where most are left, while it fits."""
        levels = [1] * len(self.sizes)
        while True:
            fits = [a for a, n in enumerate(levels) if n < self.sizes[a] and math.prod(levels) // n * (n + 1) <= count]
            if not fits:
                break
            levels[max(fits, key=lambda a: (self.sizes[a] / levels[a], rng.random()))] += 1
        shifted = zip(rng.random(len(levels)), levels, self.sizes, strict=True)
        return list(itertools.product(*([int((i + u) * size / n) for i in range(n)] for u, n, size in shifted)))


@dataclass(frozen=True)
class Table:
    """What training at every point of a space came to: accuracies, fractions.

    `curves` (*sizes, seeds, epochs) of validation after each epoch, `test` (*sizes, seeds) after the last one.
    """

    space: Space
    curves: np.ndarray
    test: np.ndarray

    def __post_init__(self) -> None:
        if not self.curves.size:
            raise ValueError("The table is empty: it needs a point, a seed and an epoch at least.")
        if self.curves.shape[:-2] != self.space.sizes or self.test.shape != self.curves.shape[:-1]:
            raise ValueError(f"The table, {self.curves.shape}, does not fit its space of {self.space.sizes} points.")

    @property
    def epochs(self) -> int:
        return self.curves.shape[-1]

    @functools.cached_property
    def quality(self) -> np.ndarray:
        """(*sizes) test accuracy to be expected of a point: the mean over the seeds."""
        return self.test.mean(-1)

    def scorer(self, rng: Rng, noise: float | None = 0.0) -> Score:
        """Training as a search sees it: each point has a seed, drawn when it is first asked for.

        `noise`: deviation of what is added to each score, as by a smaller validation set. None: no luck at all, not
        even the seed's; the score is the mean over the seeds.
        """
        seeds: dict[Point, int] = {}

        def score(point: Point, epochs: int) -> float:
            if noise is None:
                return float(self.curves[point][:, epochs - 1].mean())
            seed = seeds.setdefault(point, int(rng.integers(self.curves.shape[-2])))
            return float(self.curves[point][seed, epochs - 1] + noise * rng.normal())

        return score

    def shuffled(self, rng: Rng) -> "Table":
        """The same runs, dealt out to the points anew: what a search can learn is then nothing."""
        order = rng.permutation(self.space.size)
        deal = lambda a, tail: a.reshape(-1, *tail)[order].reshape(a.shape)  # noqa: E731
        return Table(self.space, deal(self.curves, self.curves.shape[-2:]), deal(self.test, self.test.shape[-1:]))


# Searches


class Search:
    """Random search, and what all others share: no point is trained twice.

    `ask()` returns a job, or None while it must wait for others to end. Raises ValueError when no point is left.
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

    def ask(self) -> Job | None:
        return self.new(self.space.draw(self.rng)), self.epochs

    def tell(self, point: Point, epochs: int, score: float) -> None: ...


class Grid(Search):
    """The points of an even grid of so many trials, in random order."""

    def __init__(self, space: Space, rng: Rng, epochs: int, trials: int) -> None:
        super().__init__(space, rng, epochs)
        self.waiting = rng.permutation(space.grid(trials, rng)).tolist()

    def ask(self) -> Job | None:
        return (self.new(tuple(self.waiting.pop())), self.epochs) if self.waiting else super().ask()


class Evolution(Search):
    """Regularised: the best of a sample is mutated, and the oldest of the population dies (Real et al. 2018)."""

    def __init__(self, *given: Any, population: int = 20, sample: int = 5) -> None:
        super().__init__(*given)
        self.sample, self.alive, self.born = sample, deque(maxlen=population), 0

    def ask(self) -> Job | None:
        self.born += 1
        if self.born <= self.alive.maxlen or not self.alive:
            return super().ask()
        contest = [self.alive[i] for i in self.rng.integers(len(self.alive), size=self.sample)]
        return self.new(self.space.mutate(max(contest)[1], self.rng)), self.epochs

    def tell(self, point: Point, epochs: int, score: float) -> None:
        self.alive.append((score, point))  # the oldest falls out


class Swarm(Search):
    """Particles fly on, drawn to their own best place and to that of all (Lorenzo et al. 2017)."""

    def __init__(self, *given: Any, particles: int = 10, inertia: float = 0.7, pull: float = 1.5) -> None:
        super().__init__(*given)
        self.inertia, self.pull, self.sizes = inertia, pull, np.array(self.space.sizes)
        self.at = self.rng.random((particles, len(self.sizes))) * self.sizes
        self.velocity, self.best, self.score = np.zeros_like(self.at), self.at.copy(), np.full(particles, -np.inf)
        self.idle, self.flying = deque(range(particles)), {}

    def ask(self) -> Job | None:
        if not self.idle:
            return None
        i = self.idle.popleft()
        point = self.new(tuple(self.at[i].astype(int).tolist()))
        self.flying[point] = i
        return point, self.epochs

    def tell(self, point: Point, epochs: int, score: float) -> None:
        i = self.flying.pop(point)
        if score > self.score[i]:
            self.score[i], self.best[i] = score, self.at[i]
        own, all_ = self.rng.random((2, len(self.sizes)))
        pulls = own * (self.best[i] - self.at[i]) + all_ * (self.best[self.score.argmax()] - self.at[i])
        self.velocity[i] = self.inertia * self.velocity[i] + self.pull * pulls
        self.at[i] = np.clip(self.at[i] + self.velocity[i], 0, self.sizes - 1e-9)
        self.idle.append(i)


def _softmax(logits: np.ndarray) -> np.ndarray:
    return (shares := np.exp(logits - logits.max())) / shares.sum()


class Controller(Search):
    """A policy that draws a value on each axis, and learns by REINFORCE (Zoph & Le 2016, theirs a recurrent net)."""

    def __init__(self, *given: Any, rate: float = 3.0, forget: float = 0.9) -> None:
        super().__init__(*given)
        self.rate, self.forget, self.baseline = rate, forget, None
        self.logits = [np.zeros(size) for size in self.space.sizes]

    def ask(self) -> Job | None:
        drawn = [np.searchsorted(_softmax(logits).cumsum()[:-1], self.rng.random()) for logits in self.logits]
        return self.new(tuple(map(int, drawn))), self.epochs

    def tell(self, point: Point, epochs: int, score: float) -> None:
        self.baseline = score if self.baseline is None else self.baseline
        for logits, place in zip(self.logits, point, strict=True):
            towards = -_softmax(logits)
            towards[place] += 1  # the gradient of the logarithm of the probability that this value was drawn
            logits += self.rate * (score - self.baseline) * towards
        self.baseline = self.forget * self.baseline + (1 - self.forget) * score


class Parzen(Search):
    """Values frequent among good trials and rare among the others, axis by axis (TPE, Bergstra et al. 2011)."""

    def __init__(self, *given: Any, first: int = 10, good: float = 0.15, candidates: int = 24) -> None:
        super().__init__(*given)
        self.first, self.good, self.candidates, self.told = first, good, candidates, []

    def ask(self) -> Job | None:
        if len(self.told) < self.first:
            return super().ask()
        order = np.argsort([-score for score, _ in self.told])
        points, cut = np.array([point for _, point in self.told])[order], math.ceil(self.good * len(order))
        axes = zip(points.T, self.space.sizes, strict=True)
        return self.new(tuple(self._value(places, size, cut) for places, size in axes)), self.epochs

    def _value(self, places: np.ndarray, size: int, cut: int) -> int:
        good, rest = (np.bincount(part, minlength=size) + 1.0 for part in (places[:cut], places[cut:]))
        drawn = np.searchsorted(good.cumsum()[:-1] / good.sum(), self.rng.random(self.candidates))
        return int(drawn[(good / rest)[drawn].argmax()])

    def tell(self, point: Point, epochs: int, score: float) -> None:
        self.told.append((score, point))


def brackets(epochs: int, keep: int) -> list[tuple[int, int]]:
    """Hyperband's (Li et al. 2017): (points, first epochs), from many and early to few and late."""
    last = max(s for s in range(epochs) if keep**s <= epochs)
    return [(math.ceil((last + 1) / (s + 1) * keep**s), epochs // keep**s) for s in range(last, -1, -1)]


class Halving(Search):
    """Successive halving: of each rung the best go on, one of `keep`, for `keep` times as many epochs.

    `plan`: (points, first epochs) of the brackets, in turn; by default the most thrifty alone. All `brackets` together
    are Hyperband. A rung waits for its last trial.
    """

    def __init__(self, *given: Any, keep: int = 4, plan: Sequence[tuple[int, int]] | None = None) -> None:
        super().__init__(*given)
        checks.whole("keep", keep, low=2)
        self.keep, self.plan = keep, itertools.cycle(plan or brackets(self.epochs, keep)[:1])
        self.waiting, self.results, self.out, self.at = deque(), [], 0, self.epochs

    def ask(self) -> Job | None:
        if not self.waiting and not self.out:
            self._next_rung()
        if not self.waiting:
            return None
        self.out += 1
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
        self.out -= 1
        self.results.append((score, point))


class Asynchronous(Search):
    """Halving without waiting: whoever is in the best of what its rung has now goes on (ASHA, Li et al. 2018)."""

    def __init__(self, *given: Any, keep: int = 4, first: int = 1) -> None:
        super().__init__(*given)
        rungs = itertools.takewhile(lambda e: e < self.epochs, (first * keep**i for i in itertools.count()))
        self.keep, self.first, self.results, self.gone = keep, first, {epochs: [] for epochs in rungs}, set()

    def ask(self) -> Job | None:
        for epochs, results in reversed(self.results.items()):
            for _, point in results[: -(len(results) // self.keep) - 1 : -1]:  # from the best down
                if (point, epochs) not in self.gone:
                    self.gone.add((point, epochs))
                    return point, min(self.epochs, epochs * self.keep)
        return self.new(self.space.draw(self.rng)), self.first

    def tell(self, point: Point, epochs: int, score: float) -> None:
        if epochs in self.results:
            bisect.insort(self.results[epochs], (score, point))


# Driving them


class Trial(NamedTuple):
    """A job that ended: its epochs, how many of them were paid for now, its score, and when and where it ran."""

    point: Point
    epochs: int
    paid: int
    score: float
    begin: float
    end: float
    worker: int


def run(
    search: Search, score: Score, budget: float, workers: int = 1, seconds: Score = lambda point, epochs: epochs
) -> list[Trial]:
    """Drive a search until the next job would cost more epochs than are left; the log in order of the trials' ends.

    A point that goes on pays for the further epochs only. `seconds(point, epochs)` is the simulated time of a job.
    Raises ValueError for a budget below the first trial.
    """
    checks.whole("workers", workers)
    log, running, idle, trained, clock, spent = [], [], list(range(workers))[::-1], {}, 0.0, 0
    while True:
        while idle and spent <= budget and (job := search.ask()) is not None:
            point, epochs = job
            paid = epochs - trained.get(point, 0)
            spent += paid
            if spent > budget:
                break
            trained[point], worker = epochs, idle.pop()
            trial = Trial(point, epochs, paid, score(point, epochs), clock, clock + seconds(point, paid), worker)
            heapq.heappush(running, (trial.end, worker, trial))
        if not running:
            break
        clock, worker, trial = heapq.heappop(running)
        idle.append(worker)
        log.append(trial)
        search.tell(trial.point, trial.epochs, trial.score)
    if not log:
        raise ValueError(f"A budget of {budget} epochs is below one trial: the first needs {paid}.")
    return log


def _spent(log: Sequence[Trial], by: str) -> np.ndarray:
    checks.known("measure", by, ("paid", "end"))
    return np.array([trial.end for trial in log]) if by == "end" else np.cumsum([trial.paid for trial in log])


def chosen(log: Sequence[Trial], table: Table, at: Sequence[float], by: str = "paid") -> np.ndarray:
    """The quality of the point with the best score so far, for each budget `at`; NaN before the first trial.

    `by`: "paid" counts epochs, "end" the time on the clock.
    """
    score = np.array([trial.score for trial in log])
    holders = np.maximum.accumulate(np.where(score == np.maximum.accumulate(score), np.arange(len(log)), 0))
    quality = np.array([table.quality[trial.point] for trial in log])[holders]
    last = np.searchsorted(_spent(log, by), at, side="right") - 1
    return np.where(last < 0, np.nan, quality[last])


def reached(log: Sequence[Trial], table: Table, target: float, by: str = "paid") -> float:
    """What was paid, or the time, until the chosen point is first as good as `target`; infinite if it never was.

    Raises ValueError for a target that no point of the table reaches.
    """
    if target > table.quality.max():
        raise ValueError(f"No point of the table reaches {target:.3f}: the best has {table.quality.max():.3f}.")
    at = _spent(log, by)
    good = chosen(log, table, at, by) >= target
    return float(at[good.argmax()]) if good.any() else math.inf


# Population-based training


Piece = Callable[[Any, Settings, int], tuple[Any, np.ndarray]]


class Population(NamedTuple):
    """What became of a population: the members' last state, and what happened in each piece of training."""

    state: Any  # each leaf (members, …)
    scores: np.ndarray  # (pieces, members)
    settings: Settings  # each (pieces, members)
    parents: np.ndarray  # (pieces, members) whose state and setting each member went on with


def evolve(
    piece: Piece, state: Any, settings: Settings, pieces: int, rng: Rng, exploit: bool = True, explore: bool = True
) -> Population:
    """Train a population; the worst quarter takes over state and setting of the best (Jaderberg et al. 2017).

    `piece(state, settings, number)` trains all members and returns their state and scores; then some are taken over.
    Their settings are multiplied by 0.8 or 1.2 if they `explore`.
    """
    settings, scores, used, parents = dict(settings), [], [], []
    members = len(next(iter(settings.values())))
    few, source = max(1, members // 4), np.arange(members)
    for number in range(checks.whole("pieces", pieces)):
        used.append(settings), parents.append(source)
        state, score = piece(state, settings, number)
        scores.append(np.asarray(score))
        source = np.arange(members)
        if exploit and number < pieces - 1:
            order = np.argsort(scores[-1])
            source[order[:few]] = rng.permutation(order[-few:])
            state = jax.tree.map(lambda leaf, source=source: leaf[source], state)
            moved = source != np.arange(members) if explore else np.zeros(members, bool)
            factors = {name: np.where(moved, rng.choice([0.8, 1.2], members), 1) for name in settings}
            settings = {name: (factors[name] * value[source]).astype(value.dtype) for name, value in settings.items()}
    history = {name: np.array([setting[name] for setting in used]) for name in settings}
    return Population(state, np.array(scores), history, np.array(parents))


# Scaling laws


class Law(NamedTuple):
    """loss = floor + factor · size ** -exponent"""

    floor: float
    factor: float
    exponent: float

    def __call__(self, size: Any) -> Any:
        return self.floor + self.factor * np.asarray(size, float) ** -self.exponent


def fit(size: Sequence[float], loss: Sequence[float]) -> Law:
    """The law with the least squares of relative errors. Raises ValueError for fewer than four sizes."""
    size, loss = np.asarray(size, float), np.asarray(loss, float)
    bounds = [0.0, -20.0, 0.0], [loss.min(), 20.0, 5.0]
    if len(np.unique(size)) < 4:
        raise ValueError(f"A law with three numbers needs four sizes at least, not {len(np.unique(size))}.")

    def law(p: np.ndarray) -> Law:  # the factor is that of the smallest size, by its logarithm
        return Law(p[0], math.exp(p[1]) * size.min() ** p[2], p[2])

    tries = [
        least_squares(lambda p: law(p)(size) / loss - 1, [0.5 * loss.min(), math.log(loss.max()), start], bounds=bounds)
        for start in (0.2, 0.7)
    ]
    return law(min(tries, key=lambda found: found.cost).x)
