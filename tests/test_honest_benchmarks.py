"""Intervals against their coverage and SciPy, expectations against all choices, censored times against a hand count."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from cells import Cells
from conftest import suggested_by
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dlscale import honest_benchmarks as honest
from dlscale.course import records
from dlscale.honest_benchmarks import exercises, experiment, measuring
from dlscale.lab import data, intervals


def test_half_of_the_runs_never_there_is_never():
    assert honest.median([1, 2, math.inf, math.inf]) == math.inf
    assert honest.median([1, 2, 3, math.inf]) == 2.5 and honest.median([1, 2, math.inf]) == 2
    assert honest.bootstrap([math.inf] * 5) == (math.inf, math.inf, math.inf)
    told = str(honest.Measured("to 50 %", "training", "s", [3, 1, 2, math.inf, 4]))
    assert told == "to 50 % (training): median 3 [1, inf] s, half between 2 and 4; 5 runs, 1 of them never"


def test_the_bootstrap_is_scipys_percentile_interval():
    samples = np.random.default_rng(0).gamma(2.0, size=30)
    theirs = stats.bootstrap((samples,), np.median, method="percentile", n_resamples=2000, rng=1).confidence_interval
    assert honest.bootstrap(samples) == pytest.approx((np.median(samples), *theirs), abs=0.03)


def test_what_drops_out_within_a_round():
    mood = np.random.default_rng(0).lognormal(0, 1, 15)
    assert honest.ratio(2 * mood, mood) == pytest.approx((2, 2, 2))
    some = honest.ratio([2, 4, math.inf, math.inf], [1, 2, 3, math.inf])  # the last pair says nothing
    assert some == (2, 2, math.inf)
    assert np.isnan(honest.ratio([math.inf, math.inf, 2], [math.inf, math.inf, 1])).all()


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=7, unique=True), st.data())
def test_the_best_of_all_choices(samples, draw):
    n = draw.draw(st.integers(1, len(samples)))
    winners = [max(chosen, key=lambda i: samples[i]) for chosen in itertools.combinations(range(len(samples)), n)]
    other = np.arange(len(samples)) + np.array(samples) * 10.0  # what the chosen one does elsewhere
    assert honest.expected_best(samples, n) == pytest.approx(np.mean([samples[i] for i in winners]))
    assert honest.expected_best(samples, n, of=other) == pytest.approx(np.mean(other[winners]))


def test_power_is_how_often_an_interval_excludes_zero():
    found = intervals.interval(np.random.default_rng(0).normal(1.0, 1.5, size=(12, 8000)))
    assert np.mean((found.low > 0) | (found.high < 0)) == pytest.approx(honest.power(1.0, 1.5, 12), abs=0.02)
    assert honest.power(0, 1, 9) == pytest.approx(0.05, abs=1e-6)


@given(st.floats(0.2, 3), st.floats(0.2, 3))
def test_the_fewest_seeds_are_the_fewest(difference, deviation):
    n = honest.seeds_needed(difference, deviation)
    assert honest.power(difference, deviation, n) >= 0.8
    assert n == 2 or honest.power(difference, deviation, n - 1) < 0.8


@pytest.mark.parametrize("target, in_a_row, wanted", [(9, 1, [2, math.inf]), (9, 2, [5, math.inf]), (-1, 1, [1, 1])])
def test_crossings(target, in_a_row, wanted):
    found = honest.first_crossing([1, 2, 3, 4, 5], [[0, 9, 0, 9, 9], [0, 0, 0, 0, 0]], target, in_a_row)
    assert found.tolist() == wanted


def test_survival_of_freireich_1963():
    """Remission times of leukaemia patients, weeks, as in any textbook: 6-MP."""
    times = [6, 6, 6, 7, 10, 13, 16, 22, 23, 6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    found = honest.survival(times, [True] * 9 + [False] * 12)
    assert found.times.tolist() == [6, 7, 10, 13, 16, 22, 23]
    assert found.waiting == pytest.approx([0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], abs=5e-4)
    assert found.median == 23
    for few in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 3, 3, 9], [2]):  # without censoring: as all medians of the room
        assert honest.survival(few, np.ones(len(few), bool)).median == honest.median(few)


def test_the_slope_is_that_of_a_power_law():
    found = honest.slope([1, math.e, math.e**2], [1, math.e**2, math.e**2])
    half = 12.7062 / math.sqrt(3)  # residuals −1/3, 2/3, −1/3: an error of 1/√3, and one degree of freedom
    assert found == pytest.approx((1, 1 - half, 1 + half), abs=1e-3)


BAD = [
    lambda: honest.bootstrap([]),
    lambda: honest.bootstrap([1.0, math.nan]),
    lambda: honest.Measured("a", "training", "s", []).median,
    lambda: honest.ratio([1, 0], [1, 1]),
    lambda: honest.expected_best([1, 2], 3),
    lambda: honest.seeds_needed(0, 1),
    lambda: honest.first_crossing([], np.zeros((2, 0)), 1),
    lambda: experiment.tuned("2 workers"),
]


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_told(bad):
    with pytest.raises(ValueError, match=r"must be|must not|need|NaN|Unknown"):
        bad()


def test_processes_take_turns():
    found = measuring.measure(data.data_folder(), ["batch 4", "step"], ["this processor", "2008"], rounds=1)
    assert {who: [*own] for who, own in found.items()} == {who: ["batch 4", "step"] for who in found}
    assert all(seconds.shape == (1,) and (seconds > 0).all() for own in found.values() for seconds in own.values())


def test_the_benchmarks_report_in_the_same_way(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    from benchmarks import timing

    first, second = timing.rows("t", {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([2.0, 4.0, 6.0])}, "ms", 1e3)
    assert (first.median, first.ratio) == (2000, 1) and first.low <= 2000 <= first.high
    assert (second.ratio, second.ratio_low, second.ratio_high) == (2, 2, 2)


def test_a_step_follows_the_gradient():
    rng, net = np.random.default_rng(0), measuring.Network(20, 16)
    x, y = rng.random((32, 20), np.float32), rng.integers(10, size=32)
    old = [w.copy() for w in net.weights]
    loss = lambda w: optax.softmax_cross_entropy_with_integer_labels(jax.nn.relu(x @ w[0]) @ w[1], y).mean()  # noqa: E731
    net.step(x, y, 0.5)
    for before, after, gradient in zip(old, net.weights, jax.jit(jax.grad(loss))(old), strict=True):
        assert np.allclose((before - after) / 0.5, gradient, atol=1e-5)


def test_a_look_sees_what_the_steps_did_and_a_trial_what_the_looks_saw(monkeypatch):
    for name, value in {"LOOKS": 8, "FIRST": 20.0, "STAYS": 15.0}.items():
        monkeypatch.setattr(experiment, name, value)
    (x, y), judges = experiment.signals()
    setting = {"system": "16 workers, momentum", "learning_rate": 0.3, "seed": 3}
    accuracy = experiment.curves(**setting)[0]
    key = jax.random.key(3)
    rows = jax.random.randint(jax.random.fold_in(key, 1), (experiment.LOOKS, 1, 512), 0, len(x))
    step, optimizer = jax.jit(jax.value_and_grad(experiment.mean_loss)), optax.sgd(0.3, momentum=0.9)
    params = experiment.NETWORK.init(key)
    memory = optimizer.init(params)
    for number in range(4):
        loss, gradient = step(params, x[rows[number, 0]], y[rows[number, 0]])
        updates, memory = optimizer.update(gradient, memory)
        params = optax.apply_updates(params, updates)
        seen = float(experiment.percent_right(params, judges["test"]))
        assert accuracy["test"][number] == pytest.approx(seen, abs=0.31)
    test, apart = accuracy["test"], accuracy["test"] - accuracy["fresh"]
    stays = [(test[i : i + 3] >= experiment.STAYS).all() for i in range(experiment.LOOKS - 2)]
    wanted = {"usual": apart[4:].mean(), "reached": 3 + stays.index(True), "test": test[-1], "early_loss": loss}
    wanted["apart"] = apart[(test >= experiment.FIRST).argmax()]
    found = experiment.trial(**setting)
    experiment.race.clear_cache()  # of so few looks
    assert {name: found[name] for name in wanted} == pytest.approx({k: float(v) for k, v in wanted.items()}, abs=2e-3)


@pytest.mark.parametrize("system", experiment.SYSTEMS)
def test_every_arm_was_tuned_on_the_same_rates_inside_the_grid(system):
    kept = records.read("honest_benchmarks-race")
    tried = kept.options("learning_rate", system=system, length=1, judged_on="validation")
    assert tried == list(experiment.RATES) and experiment.tuned(system)["learning_rate"] in experiment.RATES[1:-1]


# Exercises


def resampled(times, low=0.025, high=0.975, seed=1, size=None, draws=2000):
    resamples = np.random.default_rng(seed).choice(times, (draws, size or len(times)))
    return np.sort(np.median(resamples, axis=1))[[int(low * draws), int(high * draws)]]


def order_statistics(times):
    place = int(stats.binom.ppf(0.025, len(times), 0.5))
    return np.sort(times)[[place - 1, -place]]


def of_finishers(times, ours, theirs, targets):
    """Without the runs that never arrive."""

    def middle(runs, target):
        found = honest.first_crossing(times, runs, target)
        return honest.median(found[np.isfinite(found)]) if np.isfinite(found).any() else math.inf

    some = [target for target in targets if np.isfinite(middle(ours, target))]
    return max(some, key=lambda target: middle(theirs, target) / middle(ours, target))


JUDGED = [
    (exercises.threshold, of_finishers, False),
    (exercises.seeds, lambda d, s: math.ceil((1.96 * s / d) ** 2) + 2, False),
    (exercises.seeds, lambda d, s: 2 * (2.8 * s / d) ** 2, False),
    (exercises.seeds, lambda d, s: (2.8 * s / d) ** 2, True),  # without Student's two more
    (exercises.interval, order_statistics, True),
    (exercises.interval, lambda times: resampled(times, seed=6).tolist(), True),
    (exercises.interval, lambda times: resampled(times, 0.05, 0.95), False),
    (exercises.interval, lambda times: resampled(times, size=len(times) // 2), False),
    (exercises.interval, lambda times: resampled(times[np.isfinite(times)]), False),
    (exercises.interval, lambda times: resampled(np.minimum(times, times[np.isfinite(times)].max())), False),
    (exercises.interval, lambda times: honest.bootstrap(times)[1:], False),
]


@pytest.mark.parametrize("exercise, answer, right", JUDGED)
def test_exercises_take_every_right_answer_and_no_other(exercise, answer, right):
    assert exercise.judge(answer)[0] == right


# What the notebooks say and suggest


def cells(*names: str, further: str = "", **changes: str) -> Cells:
    """Some cells of the lesson, or of the further notebook, with fewer runs."""
    found = Cells(f"{further and 'further/'}14_honest_benchmarks{further and '_further'}", changes)
    found.changes["seeds=range(40)"] = "seeds=range(12)"
    found.run(*(f"honest-{further}{name}" for name in ("setup", *names)))
    return found


def test_all_ways_are_in_the_table():
    sources = Cells("further/14_honest_benchmarks_further").sources
    asked = re.findall(r"^- (\d+), .*\?$", sources["honest-further-all"], re.MULTILINE)
    gained = re.findall(r'^    "(\d+), .*": f"', sources["honest-further-table"], re.MULTILINE)
    assert asked == gained == [*map(str, range(1, 13))]


@suggested_by("14_honest_benchmarks")
def test_another_learning_rate_differs():
    rate = experiment.tuned("1 worker")["learning_rate"]
    runs = {1: rate, 0: 0.0625}  # the lesson's odd runs are ours, its even ones theirs
    ours, theirs = (experiment.watch("1 worker", r, range(i, 40, 2))["test"][:, -1] for i, r in runs.items())
    assert intervals.interval(ours - theirs).low > 0


@suggested_by("14_honest_benchmarks")
def test_other_targets():
    names = "picture", "cheat-crossing", "crossing-times", "guess-crossing", "answer-crossing"
    found = cells(*names, **{"target = experiment.FIRST": "target = 50.0"})
    assert np.isfinite(found["often"]).all() and np.isfinite(found["flattered"].mean)
    names = "picture", "cheat-crossing", "crossing-times", "cheat-work", "systems", "guess-work", "speedup"
    found = cells(*names, **{'"test"], 50.0': '"test"], 46.0'})
    assert 1 < found["speedup"].mean < found["claimed_speedup"]


@suggested_by("14_honest_benchmarks_further")
def test_a_slow_network_and_stopping_later_and_the_best_of_a_thousand():
    changes = {"gradient, 5e-6, 1e-9 / 12.5": "gradient, 50e-6, 1e-9", "rounds=40": "rounds=3"}
    changes["uniform(15, 30)"] = "uniform(40, 60)"
    found = cells("groups", "live", "clock", "measure", "scaling", "queues", further="further-", **changes)
    assert found["efficiency"](256, True) < found["efficiency"](256, False)
    assert len(found["medians_of"](found["impatience"](0))) == 3
    samples = np.random.default_rng(0).normal(size=100_000)
    assert honest.expected_best(samples, 1000) == pytest.approx(3.24, abs=0.05)
