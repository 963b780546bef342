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


SEARCHES = {
    "random": room.Search,
    "evolution": functools.partial(room.Evolution, population=8, sample=3),
    "swarm": functools.partial(room.Swarm, particles=5),
    "controller": functools.partial(room.Controller, rate=3.0),
    "halving": room.Halving,
    "hyperband": functools.partial(room.Halving, plan=room.brackets(EPOCHS, 4)),
}


def log_of(name, budget=30 * EPOCHS, seed=0, data=None):
    return room.run(SEARCHES[name](SPACE, rng(seed), EPOCHS), room.Lookup(data or table(seed), rng(seed + 1)), budget)


def test_a_lookup_keeps_its_seed_and_a_shuffled_table_its_runs():
    data, point = table(luck=0.1), (1, 1, 1, 1, 0)
    lookup = room.Lookup(data, rng(3))
    seen = [lookup(point, epochs) for epochs in range(1, EPOCHS + 1)]
    seed = lookup.seed(point)
    assert np.array_equal(seen, data.curves[point][seed]) and lookup.test(point) == data.test[point][seed]
    other = data.shuffled(rng())
    assert np.array_equal(np.sort(other.test, axis=None), np.sort(data.test, axis=None))
    where = tuple(np.argwhere((data.test == other.test[point]).all(-1))[0])
    assert where != point and np.array_equal(data.curves[where], other.curves[point])


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: room.Space({"a": (1,), "b": (2,)}), "one point leaves nothing to search"),
        (lambda: room.Space({"a": ()}), "'a' has no values"),
        (lambda: room.Table(SPACE, np.zeros((*SPACE.sizes, 0, 16)), np.zeros((*SPACE.sizes, 0))), "empty"),
        (lambda: room.Table(SPACE, np.zeros((4, 3, 3, 16)), np.zeros((4, 3, 3))), ", does not fit its space"),
        (lambda: log_of("random", budget=15), "budget of 15 epochs is below one trial: the first needs 16"),
        (lambda: log_of("random", budget=289 * EPOCHS), "All 288 points were tried"),
        (lambda: room.Halving(SPACE, rng(), EPOCHS, keep=1), "keep must be a whole number of at least 2"),
    ],
)
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
    assert log == log_of(name, budget=500) != log_of(name, budget=500, seed=4)


@pytest.mark.parametrize("name, repeats", [("evolution", 60), ("controller", 30), ("swarm", 60), ("halving", 30)])
def test_on_an_easy_table_it_beats_random_search(name, repeats):
    leads = []
    for seed in range(repeats):
        data = table(seed)
        ends = [room.winner(log_of(n, 25 * EPOCHS, seed, data), EPOCHS) for n in (name, "random")]
        leads.append(data.quality[ends[0]] - data.quality[ends[1]])
    assert np.mean(leads) > 2 * np.std(leads) / math.sqrt(len(leads))


def test_evolution_mutates_the_best_of_its_sample_and_lets_the_oldest_die():
    own = room.Evolution(SPACE, rng(), EPOCHS, population=3, sample=60)
    for place, score in enumerate((9.0, 8.0, 1.0, 2.0, 3.0)):
        own.tell((place % 4, 0, 0, 0, 0), EPOCHS, score)
    own.born = 3
    assert np.count_nonzero(own.ask()[0]) == 1, "the child of (0, 0, 0, 0, 0), 3.0: the best of all is too old"


def test_the_controllers_step_is_the_gradient_of_the_expected_score():
    own, point = room.Controller(SPACE, rng(), EPOCHS, rate=0.5, forget=0.9), (1, 2, 0, 1, 0)
    for logits in own.logits:
        logits += rng(1).normal(size=logits.shape)
    before, own.baseline = [a.copy() for a in own.logits], 0.4
    own.tell(point, EPOCHS, 0.7)
    for old, new, place in zip(before, own.logits, point, strict=True):
        log_p = lambda a, place=place: a[place] - np.log(np.exp(a).sum())  # noqa: E731
        gradient = [(log_p(old + step) - log_p(old - step)) / 2e-5 for step in 1e-5 * np.eye(len(old))]
        assert np.allclose(new - old, 0.5 * 0.3 * np.array(gradient), atol=1e-6)
    assert own.baseline == pytest.approx(0.9 * 0.4 + 0.1 * 0.7)


def test_halving_keeps_the_best_of_each_rung_and_hyperbands_brackets_are_the_papers():
    assert room.brackets(81, 3) == [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]
    log = log_of("halving", 40, data=table(luck=0.2))
    rungs = {epochs: sorted((t for t in log if t.epochs == epochs), key=lambda t: -t.score) for epochs in (1, 4, 16)}
    assert [len(rung) for rung in rungs.values()] == [16, 4, 1] and sum(trial.paid for trial in log) == 40
    for low, high in itertools.pairwise(rungs.values()):
        assert {trial.point for trial in high} == {trial.point for trial in low[: len(low) // 4]}


def test_what_is_handed_over_was_trained_to_the_end_and_paid_for():
    log = [room.Trial((0,), 16, 16, 0.5), room.Trial((1,), 4, 4, 0.9), room.Trial((2,), 16, 16, 0.6)]
    assert [room.winner(log, 16, budget) for budget in (math.inf, 35, 15)] == [(2,), (0,), None]


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
    assert np.allclose(last[2:], first[2:])
    assert any(np.isin((last[:2] / leaders).round(5), [0.8, 1.2]).all() for leaders in (first[6:], first[:5:-1]))


def test_what_the_lesson_suggests():
    found = Cells("15_search")
    found.run("search-setup")
    found["table"] = experiment.table(records.read("search-table"))
    found["space"] = found["table"].space
    found.run("search-evolution-code", "search-follow-run", "search-shuffled-run", "search-best")
    for make in (lambda *given: found["Evolution"](*given, sample=40), lambda *given: room.Halving(*given, keep=2)):
        assert 0 < found["lead"](make, found["as_it_is"]).mean() < 6
    seen, same, again = found["best_of"](40, 20, rng())
    assert seen - again > 5 and abs(same - again) < 3


def test_what_the_further_notebook_suggests_and_its_fit_finds_a_law_again():
    found = Cells("further/15_search_further")
    names = ("setup", "records", "table", "fit", "sizes")
    found.run(*(f"search-further-{name}" for name in names))
    assert 20 < found["handed"](functools.partial(room.Swarm, particles=3), 0) < 100
    fit, size = found["fit"], 2.0 ** np.arange(4, 16)
    assert experiment.parameters(experiment.network(2, 1, 64)) == 6 * 8 + (3 * 8 + 1) * 16 + 129 * 64 + 650
    assert np.isfinite(fit(found["parameters"][:4], found["by_width"][:4].mean(1))(found["parameters"][-1]))
    for law in ((0.0, 20.0, 1.2), (0.5, 3.0, 0.4), (1.0, 0.5, 0.1)):
        loss = found["power_law"](size, *law)
        assert np.allclose(fit(size[:-2], loss[:-2])(size), loss, rtol=0.01)
    space, hill = room.Space({"x": range(20), "y": range(20)}), lambda at, epochs: -sum((x - 9) ** 2 for x in at)
    assert max(trial.score for trial in room.run(room.Evolution(space, rng(), 1), hill, 60)) > -10


# Exercises: what is right in another way, and what is nearly right

HEAD = "def next_point(points, scores, sizes, seed):\n    rng = np.random.default_rng(seed)\n"
SWEEP = """
    seen, best = set(map(tuple, points.tolist())), points[scores.argmax()].tolist()
    near = (best[:a] + [v] + best[a + 1 :] for a, size in enumerate(sizes) for v in range(size))
    return next((new for new in near if tuple(new) not in seen), None) or rng.integers(sizes).tolist()
"""
NEW = "new = rng.integers(sizes)\n        if not (points == new).all(1).any(): return new"
LAST, RANK = "alive[np.argmax(curves[alive, epochs - 1])]", "-curves[alive, epochs - 1]"
HALVE = exercises.halve.code


@pytest.mark.parametrize(
    "exercise, code, why",
    [
        (exercises.next_point, HEAD + SWEEP, ""),
        (exercises.next_point, HEAD + f"    while True:\n        {NEW}", "comes 74.1%"),
        (exercises.next_point, HEAD + "    return sizes", "whole numbers"),
        (exercises.halve, HALVE.replace(LAST, "max(alive, key=lambda i: curves[i, epochs - 1])"), ""),
        (exercises.halve, HALVE.replace(LAST, "alive[0]"), "does not win"),
        (exercises.halve, HALVE.replace(LAST, "alive[np.argmax(curves[alive, -1])]"), "does not win"),
        (exercises.halve, HALVE.replace(LAST, "alive[np.argmax(curves[alive, :epochs].max(1))]"), "does not win"),
        (exercises.halve, HALVE.replace(LAST, "np.argmax(curves[:, epochs - 1])"), "does not win"),
        (exercises.halve, HALVE.replace(RANK, "-curves[alive, -1]"), "does not win"),
        (exercises.halve, HALVE.replace(RANK, "-curves[alive, :epochs].max(1)"), "does not win"),
        (exercises.halve, HALVE.replace("(further - epochs)", "further"), "epochs paid"),
        (exercises.halve, HALVE.replace("len(ranked) // keep", "-(-len(ranked) // keep)"), "for 10 runs"),
        (exercises.draws, "draws_needed = lambda s, p: int(np.log(1 - p) / np.log1p(-s)) + 1", ""),
        (exercises.draws, "draws_needed = lambda s, p: np.ceil(-np.log(1 - p) / s)", "too large"),
        (exercises.draws, "draws_needed = lambda s, p: round(np.log(1 - p) / np.log(1 - s))", "too small"),
    ],
)
def test_exercises_take_every_right_answer_and_no_other(exercise, code, why):
    names = {"np": np}
    exec(code, names)
    right, told = exercise.judge(names[exercise.answer])
    assert right == (not why) and why in told.lower(), told
