"""Searches against their rules written out, on tables whose best point is known; populations and the exercises."""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np
import pytest
from cells import Cells

from dlscale import search as room
from dlscale.course import records
from dlscale.search import exercises, experiment

SPACE = room.Space({"a": (1, 2, 3, 4), "b": "xyz", "c": tuple(range(12)), "d": (False, True), "e": (7,)})
EPOCHS = 16
rng = np.random.default_rng


def table(seed=0, luck=0.01):
    """What each value adds, and some luck; curves that rise from a tenth of it."""
    draw = rng(seed)
    parts = np.meshgrid(*(0.08 * draw.normal(size=n) for n in SPACE.sizes), indexing="ij")
    test = (0.5 + sum(parts))[..., None] + luck * draw.normal(size=(*SPACE.sizes, 3))
    growth = 1 - 0.9 * np.exp(-np.arange(1, EPOCHS + 1) / 4)
    return room.Table(SPACE, test[..., None] * growth + luck * draw.normal(size=(*test.shape, EPOCHS)), test)


FURTHER = Cells("further/15_search_further")
FURTHER.run("search-further-setup", "search-further-swarm", "search-further-controller", "search-further-fit")
SEARCHES = {"random": room.Search, "halving": room.Halving, "evolution": functools.partial(room.Evolution, sample=3)}
SEARCHES |= {"swarm": functools.partial(FURTHER["Swarm"], particles=5), "controller": FURTHER["Controller"]}
SEARCHES["hyperband"] = functools.partial(room.Halving, plan=room.brackets(EPOCHS, 4))


def log_of(name, budget=30 * EPOCHS, seed=0, data=None):
    return room.run(SEARCHES[name](SPACE, rng(seed), EPOCHS), room.Lookup(data or table(seed), rng(seed + 1)), budget)


def test_a_lookup_keeps_its_seed_and_a_shuffled_table_its_runs():
    data, point = table(luck=0.1), (1, 1, 1, 1, 0)
    lookup = room.Lookup(data, rng(3))
    seen, seed = [lookup(point, epochs) for epochs in range(1, EPOCHS + 1)], lookup.seed(point)
    assert np.array_equal(seen, data.curves[point][seed]) and lookup.test(point) == data.test[point][seed]
    other = data.shuffled(rng())
    where = tuple(np.argwhere((data.test == other.test[point]).all(-1))[0])
    assert where != point and np.array_equal(data.curves[where], other.curves[point])


BAD = [
    (lambda: room.Space({"a": (1,), "b": (2,)}), "one point leaves nothing to search"),
    (lambda: room.Space({"a": ()}), "'a' has no values"),
    (lambda: log_of("random", 15), "below one trial: the first needs 16"),
    (lambda: log_of("random", 289 * EPOCHS), "All 288 points were tried"),
    (lambda: room.Halving(SPACE, rng(), EPOCHS, keep=1), "keep must be a whole number of at least 2"),
]


@pytest.mark.parametrize(("make", "words"), BAD)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("name", SEARCHES)
def test_no_point_twice_and_never_over_the_budget(name):
    log = log_of(name, budget=500)
    assert 500 - EPOCHS < sum(trial.paid for trial in log) <= 500
    assert len({trial[:2] for trial in log}) == len(log)
    for _, own in itertools.groupby(sorted(log), key=lambda trial: trial.point):
        *_, last = own = list(own)
        assert sum(trial.paid for trial in own) == last.epochs
    assert log == log_of(name, budget=500)


@pytest.mark.parametrize("name", ["evolution", "controller", "swarm", "halving"])
def test_on_an_easy_table_it_beats_random_search(name):
    leads = []
    for data in map(table, range(40)):
        ends = [room.winner(log_of(n, 25 * EPOCHS, data=data), EPOCHS) for n in (name, "random")]
        leads.append(data.quality[ends[0]] - data.quality[ends[1]])
    assert np.mean(leads) > 2 * np.std(leads) / math.sqrt(len(leads))


def test_evolution_mutates_the_best_of_its_sample_and_lets_the_oldest_die():
    own = room.Evolution(SPACE, rng(), EPOCHS, population=3, sample=60)
    for place, score in enumerate((9.0, 8.0, 1.0, 2.0, 3.0)):
        own.tell((place % 4, 0, 0, 0, 0), EPOCHS, score)
    own.born = 3
    assert np.count_nonzero(own.ask()[0]) == 1, "the child of (0, 0, 0, 0, 0), 3.0: the best of all is too old"


def test_the_controllers_step_is_the_gradient_of_the_expected_score():
    own, point = SEARCHES["controller"](SPACE, rng(), EPOCHS, rate=0.5), (1, 2, 0, 1, 0)
    before = own.theta = [rng(1).normal(size=logits.shape) for logits in own.theta]
    own.theta, own.baseline = [logits.copy() for logits in before], 0.4
    own.tell(point, EPOCHS, 0.7)
    for old, new, place in zip(before, own.theta, point, strict=True):
        log_p = lambda a, place=place: a[place] - np.log(np.exp(a).sum())  # noqa: E731
        gradient = [(log_p(old + step) - log_p(old - step)) / 2e-5 for step in 1e-5 * np.eye(len(old))]
        assert np.allclose(new - old, 0.5 * 0.3 * np.array(gradient), atol=1e-6)


def test_halving_keeps_the_best_of_each_rung_and_hyperbands_brackets_are_the_papers():
    assert room.brackets(81, 3) == [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]
    log = log_of("halving", 40, data=table(luck=0.2))
    rungs = {epochs: sorted((t for t in log if t.epochs == epochs), key=lambda t: -t.score) for epochs in (1, 4, 16)}
    assert [len(rung) for rung in rungs.values()] == [16, 4, 1] and sum(trial.paid for trial in log) == 40
    assert room.winner(log, 16) == rungs[16][0].point and room.winner(log, 16, 39) is None, "paid for, to the end"
    for low, high in itertools.pairwise(rungs.values()):
        assert {trial.point for trial in high} == {trial.point for trial in low[: len(low) // 4]}


def test_a_network_that_is_trained_in_pieces_is_the_one_of_the_table_and_a_copy_goes_on_by_itself():
    point = (0, 0, 0, 4, 0, 0, 0)
    one, other = experiment.Network(point, 0), experiment.Network((0, 0, 0, 3, 0, 0, 1), 1)
    curves = experiment.table(records.read("search-table")).curves[point][0]
    assert np.allclose([one.train(1), one.train(3)], curves[[0, 2]], atol=0.02)
    other.train(3)
    other.copy(one)
    assert other.test() == one.test() and other.setting == one.setting
    other.setting["rate"] *= 0.8
    assert one.setting["rate"] == 0.125 and other.train(4) != one.train(4)


def test_a_population_begins_as_random_search_and_its_worst_quarter_takes_over_the_best(monkeypatch):
    count = itertools.count()
    for name, value in (("MEMBERS", 8), ("EPOCHS", 4), ("_start", lambda model, seed: None)):
        monkeypatch.setattr(experiment, name, value)
    score = lambda self, epochs: self.__dict__.setdefault("validation", next(count))  # noqa: E731
    monkeypatch.setattr(experiment.Network, "train", score)
    search = room.Search(room.Space(experiment.AXES), rng(5), 4)
    first = np.array([experiment.AXES["rate"][search.ask()[0][3]] for _ in range(8)])
    last = np.array([member.setting["rate"] for member in experiment.evolve(5)])
    ratios = [last[:2] / leaders for leaders in (first[6:], first[:5:-1])]
    assert np.allclose(last[2:], first[2:]) and any(np.isin(own.round(5), [0.8, 1.2]).all() for own in ratios)


def test_what_the_notebooks_suggest_and_the_further_one_s_fit_finds_a_law_again():
    found, data = Cells("15_search", {"2000, 2200": "2000, 2040"}), experiment.table(records.read("search-table"))
    found.update(table=data, space=data.space)
    found.run(*(f"search-{name}" for name in ("setup", "evolution-code", "follow-run", "shuffled-run", "best")))
    for make in (lambda *given: found["Evolution"](*given, sample=40), lambda *given: room.Halving(*given, keep=2)):
        assert 0 < found["lead"](make, found["as_it_is"]).mean() < 6
    seen, same, again = found["best_of"](40, 20, rng())
    assert seen - again > 5 and abs(same - again) < 3
    size = 2.0 ** np.arange(4, 16)
    for law in ((0.0, 20.0, 1.2), (0.5, 3.0, 0.4), (1.0, 0.5, 0.1)):
        loss = FURTHER["power_law"](size, *law)
        assert np.allclose(FURTHER["fit"](size[:-2], loss[:-2])(size), loss, rtol=0.01)


# Exercises: what is right in another way, and what is nearly right

HEAD = "def next_point(points, scores, sizes, seed):\n    rng = np.random.default_rng(seed)\n"
FIRST = HEAD + "    if len(points) < 8: return rng.integers(sizes)\n"
SWEEP = """
    seen, best = set(map(tuple, points.tolist())), points[scores.argmax()].tolist()
    near = (best[:a] + [v] + best[a + 1 :] for a, size in enumerate(sizes) for v in range(size))
    return next((new for new in near if tuple(new) not in seen), None) or rng.integers(sizes).tolist()
"""
EVOLVE = """
    new, axis = points[max(rng.integers(-8, 0, 5), key=lambda i: scores[i])].copy(), rng.integers(len(sizes))
    new[axis] = rng.integers(sizes[axis])
    return new
"""
LAST, RANK = "alive[np.argmax(curves[alive, epochs - 1])]", "-curves[alive, epochs - 1]"
HALVE = [  # what of the solution is replaced, by what, and what the check says
    (LAST, "alive[0]", "does not win"),
    (RANK, "-curves[alive, -1]", "does not win"),
    ("(further - epochs)", "further", "epochs paid"),
    ("len(ranked) // keep", "-(-len(ranked) // keep)", "for 10 runs"),
]
ANSWERS = [(exercises.halve, exercises.halve.code.replace(old, new), why) for old, new, why in HALVE]
ANSWERS += [
    (exercises.next_point, FIRST + SWEEP, ""),
    (exercises.next_point, HEAD + "    return rng.integers(sizes)", "reaches 74.1%"),
    (exercises.next_point, FIRST + EVOLVE, "reaches 8"),
    (exercises.draws, "draws_needed = lambda s, p: int(np.log(1 - p) / np.log1p(-s)) + 1", ""),
    (exercises.draws, "draws_needed = lambda s, p: np.ceil(-np.log(1 - p) / s)", "too large"),
    (exercises.draws, "draws_needed = lambda s, p: round(np.log(1 - p) / np.log(1 - s))", "too small"),
]


@pytest.mark.parametrize(("exercise", "code", "why"), ANSWERS)
def test_exercises_take_every_right_answer_and_no_other(exercise, code, why):
    names = {"np": np}
    exec(code, names)
    right, told = exercise.judge(names[exercise.answer])
    assert right == (not why) and why in told.lower(), told
