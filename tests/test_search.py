"""Searches against their rules written out, on tables whose best point is known; populations, laws, the exercises."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import numpy as np
import pytest
from cells import Cells
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import search as room
from dlscale.course import records
from dlscale.search import exercises, experiment

AXES = {"a": (1, 2, 3, 4), "b": ("x", "y", "z"), "c": tuple(range(12)), "d": (False, True), "e": (7,)}
SPACE = room.Space(AXES)
EPOCHS = 16


def rng(seed=0):
    return np.random.default_rng(seed)


def table(seed=0, luck=0.01, space=SPACE):
    """What each value adds, and some luck; curves that rise from a tenth of it."""
    draw, shape = rng(seed), space.sizes
    parts = np.meshgrid(*(0.08 * draw.normal(size=n) for n in shape), indexing="ij")
    test = (0.5 + sum(parts))[..., None] + luck * draw.normal(size=(*shape, 3))
    growth = 1 - 0.9 * np.exp(-np.arange(1, EPOCHS + 1) / 4)
    return room.Table(space, test[..., None] * growth + luck * draw.normal(size=(*shape, 3, EPOCHS)), test)


SEARCHES = {
    "random": room.Search,
    "evolution": functools.partial(room.Evolution, population=8, sample=3),
    "swarm": functools.partial(room.Swarm, particles=5),
    "controller": functools.partial(room.Controller, rate=3.0),
    "halving": room.Halving,
    "hyperband": functools.partial(room.Halving, plan=room.brackets(EPOCHS, 4)),
}
EACH = pytest.mark.parametrize("name", SEARCHES)


def log_of(name, budget=30 * EPOCHS, seed=0, data=None):
    lookup = room.Lookup(data or table(seed), rng(seed + 1))
    return room.run(SEARCHES[name](SPACE, rng(seed), EPOCHS), lookup, budget)


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_points_lie_in_the_space(seed):
    draw = rng(seed)
    point = SPACE.draw(draw)
    other = SPACE.mutate(point, draw)
    assert all(0 <= place < size for place, size in zip((*point, *other), SPACE.sizes * 2, strict=True))
    assert sum(a != b for a, b in zip(point, other, strict=True)) == 1
    assert SPACE.setting((1, 2, 0, 1, 0)) == {"a": 2, "b": "z", "c": 0, "d": True, "e": 7}


def test_a_lookup_keeps_its_seed():
    data, point = table(luck=0.1), (1, 1, 1, 1, 0)
    lookup = room.Lookup(data, rng(3))
    seen = [lookup(point, epochs) for epochs in range(1, EPOCHS + 1)]
    seed = lookup.seed(point)
    assert np.array_equal(seen, data.curves[point][seed]) and lookup.test(point) == data.test[point][seed]


def test_a_shuffled_table_has_the_same_runs_elsewhere():
    data = table()
    other = data.shuffled(rng())
    assert np.array_equal(np.sort(other.test, axis=None), np.sort(data.test, axis=None))
    assert (other.test != data.test).mean() > 0.9
    where = tuple(np.argwhere((data.test == other.test[0, 0, 0, 0, 0]).all(-1))[0])
    assert np.array_equal(data.curves[where], other.curves[0, 0, 0, 0, 0]), "curves go with their tests"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: room.Space({"a": (1,), "b": (2,)}), "one point leaves nothing to search"),
        (lambda: room.Space({"a": ()}), "'a' has no values"),
        (lambda: room.Table(SPACE, np.zeros((4, 3, 12, 2, 1, 0, 16)), np.zeros((4, 3, 12, 2, 1, 0))), "empty"),
        (lambda: room.Table(SPACE, np.zeros((4, 3, 3, 16)), np.zeros((4, 3, 3))), ", does not fit its space"),
        (lambda: log_of("random", budget=15), "budget of 15 epochs is below one trial: the first needs 16"),
        (lambda: log_of("halving", budget=0), "below one trial: the first needs 1"),
        (lambda: log_of("random", budget=289 * EPOCHS), "All 288 points were tried"),
        (lambda: room.Halving(SPACE, rng(), EPOCHS, keep=1), "keep must be a whole number of at least 2"),
        (lambda: room.fit([1, 2, 3], [3, 2, 1]), "four sizes"),
    ],
)
def test_bad_input(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Searches


@EACH
def test_no_point_twice_and_never_over_the_budget(name):
    log = log_of(name, budget=500)
    assert 500 - EPOCHS < sum(trial.paid for trial in log) <= 500
    jobs = [(trial.point, trial.epochs) for trial in log]
    assert len(set(jobs)) == len(jobs)
    for point in {point for point, _ in jobs}:
        own = [trial for trial in log if trial.point == point]
        assert sum(trial.paid for trial in own) == own[-1].epochs == max(trial.epochs for trial in own)
    assert log_of(name, seed=3) == log_of(name, seed=3) != log_of(name, seed=4)


@pytest.mark.parametrize("name", ["evolution", "controller", "swarm", "halving"])
def test_on_an_easy_table_it_beats_random_search(name):
    leads = []
    for seed in range(60 if name in ("swarm", "evolution") else 30):
        data = table(seed)
        ends = [room.winner(log_of(n, 25 * EPOCHS, seed, data), EPOCHS) for n in (name, "random")]
        leads.append(data.quality[ends[0]] - data.quality[ends[1]])
    assert np.mean(leads) > 2 * np.std(leads) / math.sqrt(len(leads))


def test_evolution_mutates_the_best_of_its_sample_and_lets_the_oldest_die():
    own = room.Evolution(SPACE, rng(), EPOCHS, population=3, sample=60)
    for i in range(5):
        own.tell((i % 4, 0, 0, 0, 0), EPOCHS, [9.0, 8.0, 1.0, 2.0, 3.0][i])
    assert [score for score, _ in own.alive] == [1.0, 2.0, 3.0], "the best of all is too old"
    own.born = 3
    point, epochs = own.ask()
    assert epochs == EPOCHS and sum(a != b for a, b in zip(point, (0, 0, 0, 0, 0), strict=True)) == 1


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


def test_a_particle_is_drawn_to_its_best_and_to_the_best_of_all():
    own = room.Swarm(SPACE, rng(), EPOCHS, particles=2, inertia=0.5, pull=0.0)
    own.at[:] = [[0.5, 1.5, 2.5, 0.5, 0.5], [3.5, 0.5, 4.5, 1.5, 0.5]]
    own.velocity[0] = [2.0, 1.0, -1.0, 0.5, 0.0]
    first = own.ask()[0]
    own.tell(first, EPOCHS, 0.1)
    assert first == (0, 1, 2, 0, 0) and np.allclose(own.at[0], [1.5, 2.0, 2.0, 0.75, 0.5])
    second = own.ask()[0]
    assert second == (3, 0, 4, 1, 0)
    own.pull = 1.0
    own.tell(second, EPOCHS, 0.9)
    before = own.at[0].copy()
    own.tell(own.ask()[0], EPOCHS, 0.0)
    assert ((own.at[0] - before) * (own.best[1] - before) >= -1e-9)[[0, 2]].all()


def test_hyperbands_brackets_are_the_papers():
    assert room.brackets(81, 3) == [(81, 1), (34, 3), (15, 9), (8, 27), (5, 81)]
    assert room.brackets(16, 4) == [(16, 1), (6, 4), (3, 16)]


def test_halving_keeps_the_best_of_each_rung():
    data = table(luck=0.2)
    log = log_of("halving", 40, data=data)
    rungs = {epochs: [trial for trial in log if trial.epochs == epochs] for epochs in (1, 4, 16)}
    assert [len(rung) for rung in rungs.values()] == [16, 4, 1] and sum(trial.paid for trial in log) == 40
    for low, high in ((1, 4), (4, 16)):
        ranked = sorted(rungs[low], key=lambda trial: -trial.score)
        assert {trial.point for trial in rungs[high]} == {trial.point for trial in ranked[: len(ranked) // 4]}
    assert len(log_of("halving", 640, data=table(space=SPACE))) == 16 * 21, "sixteen brackets for 40 full trainings"


def test_what_is_handed_over_was_trained_to_the_end_and_paid_for():
    points = [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (2, 0, 0, 0, 0)]
    log = [room.Trial(p, *rest) for p, rest in zip(points, ((16, 16, 0.5), (4, 4, 0.9), (16, 16, 0.6)), strict=True)]
    assert room.winner(log, 16) == points[2]
    assert room.winner(log, 16, 35) == points[0] and room.winner(log, 16, 15) is None


# Populations and training


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), members=st.integers(4, 40))
def test_the_worst_quarter_takes_over_the_best(seed, members):
    scores, few = rng(seed).random(members), members // 4
    source, order = room.takeover(scores, rng(seed)), np.argsort(scores)
    assert {*source[order[:few]]} == {*order[-few:]} and (source[order[few:]] == order[few:]).all()


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


def test_a_population_begins_as_random_search_and_its_worst_take_over(monkeypatch):
    monkeypatch.setattr(experiment, "MEMBERS", 8)
    monkeypatch.setattr(experiment, "EPOCHS", 4)
    monkeypatch.setattr(experiment, "_start", lambda model, seed: None)
    monkeypatch.setattr(experiment.Network, "train", lambda self, epochs: self.__dict__.setdefault("validation", 0.5))
    members, found = experiment.evolve(5)
    search = room.Search(room.Space(experiment.AXES), rng(5), 4)
    rates = [experiment.AXES["rate"][search.ask()[0][3]] for _ in range(8)]
    assert np.allclose(found["rates"][0], rates) and (found["parents"][0] == np.arange(8)).all()
    parents = found["parents"][1].astype(int)
    factors, moved = found["rates"][1] / found["rates"][0][parents], parents != np.arange(8)
    assert moved.sum() == 2 and np.allclose(factors[~moved], 1) and np.isin(factors[moved].round(5), [0.8, 1.2]).all()
    assert len(members) == 8


@settings(max_examples=10)
@given(floor=st.floats(0, 1), factor=st.floats(0.5, 20), exponent=st.floats(0.1, 1.2))
def test_a_law_is_found_again(floor, factor, exponent):
    size = 2.0 ** np.arange(4, 16)
    law = room.Law(floor, factor, exponent)
    found = room.fit(size, law(size))
    assert np.allclose(found(size), law(size), rtol=1e-3)
    assert found(2.0**17) == pytest.approx(law(2.0**17), rel=0.01)


def test_parameters_of_a_network():
    assert experiment.parameters(experiment.network(0, 2, 16)) == 41 * 16 + 17 * 16 + 170
    both = experiment.network(2, 1, 64)
    assert experiment.parameters(both) == 6 * 8 + (3 * 8 + 1) * 16 + 129 * 64 + 650
    x = np.zeros((3, 40), np.float32)
    assert jax.eval_shape(both.apply, jax.eval_shape(both.init, jax.random.key(0)), x).shape == (3, 10)


def test_the_table_is_the_record():
    record = records.read("search-table")
    data = experiment.table(record)
    for trial in (record.trials[0], record.trials[-1], record.trials[len(record.trials) // 3]):
        point = tuple(values.index(trial.setting[name]) for name, values in data.space.axes.items())
        assert data.space.setting(point) == trial.setting
        curves, tested = experiment.unpack(trial.measures)
        assert np.array_equal(data.curves[point], curves) and np.array_equal(data.test[point], tested)
    assert len(record.trials) == data.space.size


# What the notebooks suggest


def test_what_the_lesson_suggests():
    found = Cells("15_search")
    found.run("search-setup")
    found["table"] = experiment.table(records.read("search-table"))
    found["space"] = found["table"].space
    found.run("search-evolution-code", "search-follow-run", "search-shuffled-run", "search-best")
    sure = lambda *given: found["Evolution"](*given, sample=40)  # noqa: E731
    assert 0 < found["lead"](sure, found["as_it_is"]).mean() < 6, "the tournament vanishes, and evolution still gains"
    two = lambda *given: room.Halving(*given, keep=2)  # noqa: E731
    assert 0 < found["lead"](two, found["as_it_is"]).mean() < 6
    seen, same, again = found["best_of"](40, 20, rng())
    assert seen - again > 5 and abs(same - again) < 3


def test_three_particles_and_a_law_of_four_widths():
    found = Cells("further/15_search_further")
    found.run("search-further-setup", "search-further-records", "search-further-table", "search-further-sizes")
    swarm = functools.partial(room.Swarm, particles=3)
    assert 20 < found["handed"](swarm, 0) < 100
    law = room.fit(found["parameters"][:4], found["by_width"][:4].mean(1))
    assert np.isfinite(law(found["parameters"][-1]))
    space, hill = room.Space({"x": range(20), "y": range(20)}), lambda at, epochs: -sum((x - 9) ** 2 for x in at)
    assert max(trial.score for trial in room.run(room.Evolution(space, rng(), 1), hill, 60)) > -10


# Exercises: what is right in another way, and what is nearly right


def judged(exercise, text):
    names = dict(vars(exercises)) | {"np": np}
    exec(text, names)
    return exercise.judge(names[exercise.answer])


def test_your_own_search_must_beat_random_search():
    head = "def next_point(points, scores, sizes, seed):\n"
    for line, why in (
        ("    return np.random.default_rng(seed).integers(sizes)", "comes 74.1%"),
        ("    return points[scores.argmax()]", "of the way"),
        ("    return sizes", "whole numbers"),
    ):
        right, told = judged(exercises.next_point, head + line)
        assert not right and why in told, told
    evolution = """
    rng = np.random.default_rng(seed)
    if len(points) < 10:
        return rng.integers(sizes)
    new = points[scores.argmax()].copy()
    while (points == new).all(1).any():
        axis = rng.integers(len(sizes))
        new[axis] = rng.integers(sizes[axis])
    return new
"""
    assert judged(exercises.next_point, head + evolution)[0]


def test_halving_must_not_look_ahead_nor_pay_twice_nor_return_an_early_leader():
    code, last = exercises.halve.code, "alive[np.argmax(curves[alive, epochs - 1])]"
    for naive, why in (
        (code.replace("-curves[alive, epochs - 1]", "-curves[alive, -1]"), "the winner"),
        (code.replace(last, "alive[np.argmax(curves[alive, -1])]"), "the winner"),
        (code.replace("(further - epochs)", "further"), "epochs paid"),
        (code.replace("len(ranked) // keep", "max(1, len(ranked) // 2)"), "for 16 runs"),
        (code.replace(last, "alive[0]"), "the winner"),
    ):
        right, line = judged(exercises.halve, naive)
        assert naive != code and not right and why.lower() in line.lower(), line
    curves, first, keep = exercises.OVERTAKEN, 2, 2  # the leader when the last rung begins is overtaken in it
    assert curves[:, 1].argmax() == 0 and exercises._halved(curves, first, keep) == (1, 4 * 2 + 2 * 2)
    other = """
def halve(curves, first, keep):
    runs, epochs, paid = list(range(len(curves))), first, first * len(curves)
    while len(runs) >= keep and epochs < len(curves[0]):
        runs = sorted(runs, key=lambda run: curves[run][epochs - 1])[-(len(runs) // keep) :]
        more = min(keep * epochs, len(curves[0])) - epochs
        epochs, paid = epochs + more, paid + more * len(runs)
    return [max(runs, key=lambda run: curves[run][epochs - 1]), paid]
"""
    assert judged(exercises.halve, other)[0]


def test_draws_are_counted_by_their_misses():
    assert not exercises.draws.judge(lambda share, sure: math.ceil(sure / share))[0]
    assert not exercises.draws.judge(lambda share, sure: math.ceil(math.log(1 / (1 - sure)) / share))[0]
    count = lambda share, sure: next(n for n in itertools.count(1) if 1 - (1 - share) ** n >= sure)  # noqa: E731
    assert exercises.draws.judge(count)[0]


# Against another library


def test_optunas_random_search_hands_over_about_as_much(monkeypatch):
    """Twenty searches each on the recorded table."""
    optuna = pytest.importorskip("optuna")
    from benchmarks import search_quality as both

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    monkeypatch.setattr(both, "REPEATS", 20)
    found = [both.ours(room.Search), both.theirs(lambda seed: optuna.samplers.RandomSampler(seed=seed))]
    error = math.hypot(*(np.std(one, ddof=1) / math.sqrt(20) for one in found))
    assert abs(np.mean(found[0]) - np.mean(found[1])) < 2 * error < 5
