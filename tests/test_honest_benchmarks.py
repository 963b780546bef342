"""Intervals against their coverage and SciPy, expectations against all choices, censored times against a hand count."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import jax
import numpy as np
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

# One quantity


def test_half_of_the_runs_never_there_is_never():
    assert honest.median([1, 2, math.inf, math.inf]) == math.inf
    assert honest.median([1, 2, 3, math.inf]) == 2.5 and honest.median([1, 2, math.inf]) == 2
    assert honest.bootstrap([math.inf] * 5) == (math.inf, math.inf, math.inf)


def test_the_bootstrap_is_scipys_percentile_interval():
    samples = np.random.default_rng(0).gamma(2.0, size=30)
    ours = honest.bootstrap(samples, np.mean, draws=20_000)
    theirs = stats.bootstrap((samples,), np.mean, method="percentile", n_resamples=20_000, rng=1).confidence_interval
    assert ours.mean == pytest.approx(samples.mean())
    assert ours[1:] == pytest.approx(theirs, abs=0.03)


def test_a_measurement_says_everything():
    measured = honest.Measured("to 50 %", "training", "s", [3, 1, 2, math.inf, 4])
    assert (measured.count, measured.failed, measured.median, measured.spread) == (5, 1, 3, (2, 4))
    text = str(measured)
    for part in ("to 50 % (training): median 3 [", "s, half between 2 and 4; 5 runs, 1 of them never"):
        assert part in text, text
    assert "no interval" in str(honest.Measured("a", "operator", "ms", [2.0]))


def test_what_drops_out_within_a_round():
    rng = np.random.default_rng(0)
    mood = rng.lognormal(0, 1, 15)
    assert honest.ratio(2 * mood, mood) == pytest.approx((2, 2, 2))
    assert honest.ratio([math.inf] * 3, [1, 2, 3]).mean == math.inf
    some = honest.ratio([2, 4, math.inf, math.inf], [1, 2, 3, math.inf])  # the last pair says nothing
    assert some.mean == 2 and some.low == 2 and some.high == math.inf
    assert np.isnan(honest.ratio([math.inf, math.inf, 2], [math.inf, math.inf, 1])).all()


# Luck


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=7), st.data())
def test_the_best_of_all_choices(samples, draw):
    n = draw.draw(st.integers(1, len(samples)))
    every = list(itertools.combinations(range(len(samples)), n))
    assert honest.expected_best(samples, n) == pytest.approx(np.mean([max(samples[i] for i in c) for c in every]))
    other = np.arange(len(samples)) + np.array(samples) * 10.0  # what the chosen one does elsewhere
    if len(set(samples)) == len(samples):
        wanted = np.mean([other[max(c, key=lambda i: samples[i])] for c in every])
        assert honest.expected_best(samples, n, of=other) == pytest.approx(wanted)


def test_power_is_how_often_an_interval_excludes_zero():
    draws = np.random.default_rng(0).normal(1.0, 1.5, size=(12, 8000))
    found = intervals.interval(draws)
    assert np.mean((found.low > 0) | (found.high < 0)) == pytest.approx(honest.power(1.0, 1.5, 12), abs=0.02)
    assert honest.power(0, 1, 9) == pytest.approx(0.05, abs=1e-6)


@given(st.floats(0.2, 3), st.floats(0.2, 3))
def test_the_fewest_seeds_are_the_fewest(difference, deviation):
    n = honest.seeds_needed(difference, deviation)
    assert honest.power(difference, deviation, n) >= 0.8
    assert n == 2 or honest.power(difference, deviation, n - 1) < 0.8


# Time to accuracy


def test_crossings():
    times, values = [1, 2, 3, 4, 5], [[0, 9, 0, 9, 9], [0, 0, 0, 0, 0]]
    assert honest.first_crossing(times, values, 9).tolist() == [2, math.inf]
    assert honest.first_crossing(times, values, 9, in_a_row=2).tolist() == [5, math.inf]
    assert honest.first_crossing(times, values, -1).tolist() == [1, 1]


def test_survival_of_freireich_1963():
    """Remission times of leukaemia patients, weeks, as in any textbook: 6-MP."""
    times = [6, 6, 6, 7, 10, 13, 16, 22, 23, 6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    reached = [True] * 9 + [False] * 12
    found = honest.survival(times, reached)
    assert found.times.tolist() == [6, 7, 10, 13, 16, 22, 23]
    assert found.waiting == pytest.approx([0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], abs=5e-4)
    assert found.median == 23


def test_survival_without_censoring_is_a_count():
    times = np.random.default_rng(0).integers(1, 9, 30)
    found = honest.survival(times, np.ones(30, bool))
    assert found.waiting == pytest.approx([(times > t).mean() for t in found.times])
    assert honest.survival([1, 2], [False, False]).median == math.inf
    diverged = honest.survival([1, 2, math.inf, math.inf], [True, True, False, False])
    assert diverged.waiting.tolist() == [0.75, 0.5] and diverged.median == math.inf
    for few in ([1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 3, 3, 9], [2]):  # as all medians of the room
        assert honest.survival(few, np.ones(len(few), bool)).median == honest.median(few)


# Scaling, axes


def test_the_slope_is_scipys():
    x, y = np.array([1, 2, 4, 9, 16.0]), np.array([10, 5.5, 2.4, 1.2, 0.7])
    found, wanted = honest.slope(x, y), stats.linregress(np.log(x), np.log(y))
    assert found.mean == pytest.approx(wanted.slope)
    assert found.high - found.mean == pytest.approx(stats.t.ppf(0.975, 3) * wanted.stderr)


def test_bars_from_zero_do_not_lie():
    assert honest.lie_factor(50, 55, 0) == 1
    assert honest.lie_factor(50, 55, 49) == pytest.approx(50)
    for axis_from in (50, 60):
        with pytest.raises(ValueError, match="cannot compare"):
            honest.lie_factor(50, 55, axis_from)


BAD = {
    "at least 2 samples, not 0": lambda: honest.bootstrap([]),
    "at least 2 samples, not 1": lambda: honest.bootstrap([1.0]),
    "is NaN": lambda: honest.bootstrap([1.0, math.nan]),
    "at least 1 samples, not 0": lambda: honest.Measured("a", "training", "s", []),
    "Did you mean 'training'": lambda: honest.Measured("a", "trainin", "s", [1]),
    "positive": lambda: honest.ratio([1, 0], [1, 1]),
    "as many samples on each side": lambda: honest.ratio([1, 2], [1, 2, 3]),
    "tries must be a whole number from 1 to 2": lambda: honest.expected_best([1, 2], 3),
    "seeds must be a whole number of at least 2": lambda: honest.power(1, 1, 1),
    "deviation must be above 0": lambda: honest.power(1, 0, 5),
    "difference must be above 0": lambda: honest.seeds_needed(0, 1),
    "a time for each look": lambda: honest.first_crossing([], np.zeros((2, 0)), 1),
    "target must be a finite number": lambda: honest.first_crossing([1], [1], math.nan),
    "in_a_row must be": lambda: honest.first_crossing([1], [1], 1, in_a_row=2),
    "a truth value for each time": lambda: honest.survival([1, 2], [True]),
    "three or more points": lambda: honest.slope([1, 2], [1, 2]),
    "Unknown part": lambda: measuring.measure(data.data_folder(), ["training"]),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_told(message):
    with pytest.raises(ValueError, match=message):
        BAD[message]()


# Timing


def test_processes_take_turns():
    found = measuring.measure(data.data_folder(), ["batch 4", "step"], ["this processor", "2008"], rounds=2)
    assert [*found] == ["this processor", "2008"]
    assert [{name: s.shape for name, s in own.items()} for own in found.values()] == [
        {"batch 4": (2,), "step": (2,)}
    ] * 2
    assert all((seconds > 0).all() for own in found.values() for seconds in own.values())


def test_the_benchmarks_report_in_the_same_way(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent.parent)
    from benchmarks import timing

    first, second = timing.rows("t", {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([2.0, 4.0, 6.0])}, "ms", 1e3)
    assert (first.median, first.ratio) == (2000, 1) and first.low <= 2000 <= first.high
    assert (second.ratio, second.ratio_low, second.ratio_high) == (2, 2, 2)
    assert timing.row("t", "a", np.array([5.0]), "s").median == 5


def test_the_network_learns_and_a_step_is_the_gradients():
    x, y = measuring.read(data.data_folder(), 256)
    net = measuring.Network(784, 16)
    loss = lambda: -np.log(net.forward(x)[1][np.arange(len(y)), y]).mean()  # noqa: E731
    net.weights = [w.astype(float) for w in net.weights]
    before, old = loss(), [w.copy() for w in net.weights]
    net.step(x, y, 0.5)
    gradient = [(a - b) / 0.5 for a, b in zip(old, net.weights, strict=True)]
    net.weights = old
    for which, place in ((0, (300, 3)), (1, (5, 7))):
        net.weights[which][place] += 1e-4
        assert (loss() - before) / 1e-4 == pytest.approx(gradient[which][place], abs=1e-3)
        net.weights[which][place] -= 1e-4
    for epoch in range(5):
        net.epoch(x, y, 0.2, batch=32, seed=epoch)
    assert loss() < 0.5 * before


# The race


def test_a_look_sees_what_the_steps_did():
    (x, y), judges = experiment.signals()
    accuracy, training, early = experiment.curves("16 workers, momentum", 0.1, 3, ("test",))
    key = jax.random.key(3)
    rows = jax.random.randint(jax.random.fold_in(key, 1), (experiment.LOOKS, 1, 512), 0, len(x))
    slope = jax.jit(jax.value_and_grad(experiment.mean_loss))
    params = jax.device_get(jax.jit(experiment.NETWORK.init)(key))
    velocity = jax.tree.map(np.zeros_like, params)
    for number in range(4):
        loss, gradient = jax.device_get(slope(params, x[rows[number, 0]], y[rows[number, 0]]))
        assert number < 3 or early == pytest.approx(float(loss), abs=1e-4)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
        params = jax.tree.map(lambda w, v: w - 0.1 * v, params, velocity)
        seen = float(experiment.percent_right(params, judges["test"]))
        assert accuracy["test"][number] == pytest.approx(seen, abs=0.31)
    assert accuracy["test"].shape == (experiment.LOOKS,) and training > accuracy["test"][0]


def test_what_a_trial_says_is_in_its_curves():
    setting = {"system": "1 worker", "learning_rate": 0.25, "seed": 4}
    found = experiment.trial(**setting)
    accuracy = experiment.curves(**setting)[0]
    apart = accuracy["test"] - accuracy["fresh"]
    first = int((accuracy["test"] >= experiment.FIRST).argmax())
    assert found["apart"] == pytest.approx(float(apart[first]), abs=1e-3)
    assert found["usual"] == pytest.approx(float(apart[80:].mean()), abs=1e-3)
    stays = [(accuracy["test"][i : i + 3] >= experiment.STAYS).all() for i in range(experiment.LOOKS - 2)]
    assert found["reached"] == 1 + stays.index(True) + 2 and found["test"] == pytest.approx(accuracy["test"][-1])
    watched = experiment.watch("1 worker", 0.25, [4])
    assert watched["fresh"][0] == pytest.approx(accuracy["fresh"])


def test_every_arm_was_tuned_on_the_same_rates_inside_the_grid():
    kept = records.read("honest_benchmarks-race")
    for system in experiment.SYSTEMS:
        tried = kept.options("learning_rate", system=system, length=1, judged_on="validation")
        assert tried == list(experiment.RATES)
        assert experiment.tuned(system)["learning_rate"] in experiment.RATES[1:-1]
        assert len(kept.select(system=system, length=1, judged_on="test")) == len(experiment.TEST_SEEDS)
    with pytest.raises(ValueError, match="Unknown system"):
        experiment.tuned("2 workers")


# Exercises


def test_wrong_ways_with_censored_runs_are_refused():
    def left_out(times, reached):
        at = np.unique(times[reached])
        return at, np.array([(times[reached] > t).mean() for t in at])

    def as_arrived(times, reached):
        at = np.unique(times[reached])
        return at, np.array([(times > t).mean() for t in at])

    for answer in (left_out, as_arrived):
        assert not exercises.survival.judge(answer)[0]

    def gone_at_once(times, reached):  # who is given up does not count at that very time
        at = np.unique(times[reached])
        watched = [(times > t).sum() + (reached & (times == t)).sum() for t in at]
        return at, np.cumprod([1 - (reached & (times == t)).sum() / n for t, n in zip(at, watched, strict=True)])

    assert not exercises.survival.judge(gone_at_once)[0]
    assert exercises.survival.judge(lambda times, reached: tuple(honest.survival(times, reached)))[0]


def test_medians_taken_apart_sums_and_means_are_refused():
    for answer in (
        lambda theirs, ours: np.median(theirs) / np.median(ours),
        lambda theirs, ours: theirs.sum() / ours.sum(),
        lambda theirs, ours: theirs.min() / ours.min(),
        lambda theirs, ours: np.mean(theirs / ours),
        lambda theirs, ours: np.exp(np.mean(np.log(theirs / ours))),
    ):
        assert not exercises.paired.judge(answer)[0]
    assert exercises.paired.judge(lambda theirs, ours: 1 / np.median(ours / theirs))[0]


def test_thresholds_that_are_not_the_best_are_refused():
    for answer in (
        lambda times, ours, theirs, targets: targets[0],
        lambda times, ours, theirs, targets: targets[-1],
        lambda times, ours, theirs, targets: max(t for t in targets if t <= np.median(ours[:, -1])),
    ):
        assert not exercises.threshold.judge(answer)[0]


def test_seeds_without_power_are_refused():
    assert not exercises.seeds.judge(lambda d, s: math.ceil((1.96 * s / d) ** 2) + 2)[0]
    assert "too few" in exercises.seeds.judge(lambda d, s: (1.96 * s / d) ** 2)[1]
    assert exercises.seeds.judge(lambda d, s: ((1.96 + 0.84) * s / d) ** 2)[0]  # without Student's two more
    assert exercises.seeds.judge(lambda d, s: ((1.96 + 0.84) * s / d) ** 2 + 2)[0]
    assert exercises.seeds.judge(honest.seeds_needed)[0]


def order_statistics(times):
    place = int(stats.binom.ppf(0.025, len(times), 0.5))
    return np.sort(times)[[place - 1, -place]]


def of_arrivals(times):
    times = times[np.isfinite(times)]
    half = 1.96 * times.std(ddof=1) / math.sqrt(len(times))
    return times.mean() - half, times.mean() + half


def test_intervals_of_the_median():
    few = lambda times: np.sort([np.median(np.random.default_rng(i).choice(times, len(times))) for i in range(400)])  # noqa: E731
    for right in (order_statistics, lambda times: few(times)[[10, 389]]):
        assert exercises.interval.judge(right)[0]
    for wrong in (
        of_arrivals,
        lambda times: few(times[np.isfinite(times)])[[10, 389]],
        lambda times: np.quantile(times, [0.25, 0.75], method="nearest"),
        lambda times: (times.min(), times.max()),
        lambda times: few(times),
    ):
        assert not exercises.interval.judge(wrong)[0]
    assert "own bootstrap" in exercises.interval.judge(lambda times: honest.bootstrap(times)[1:])[1]


# The texts


def cells(*identities: str, further: bool = False, **changes: str) -> Cells:
    """Some cells of the lesson, or of the further notebook."""
    found = Cells("further/14_honest_benchmarks_further" if further else "14_honest_benchmarks", changes)
    found.run(*(f"honest-{'further-' * further}{name}" for name in ("setup", *identities)))
    return found


def few_runs(**changes: str) -> dict[str, str]:
    return {"seeds=range(40)": "seeds=range(12)"} | changes


def test_all_ways_are_in_the_table():
    sources = Cells("further/14_honest_benchmarks_further").sources
    asked = re.findall(r"^- (\w+), .*\?$", sources["honest-further-all"], re.MULTILINE)
    assert asked == [*map(str, range(1, 13)), *["Pedram"] * 3]
    gained = re.findall(r'^    "(.*?)": f"', sources["honest-further-table"], re.MULTILINE)
    assert gained == [*map(str, range(1, 13)), "best of 20", "advantage", "search"]


# What the notebooks suggest


@suggested_by("14_honest_benchmarks")
def test_another_learning_rate_differs():
    runs = cells("picture")
    theirs = experiment.watch("1 worker", 0.0625, range(40))["test"][::2, -1]
    apart = runs["ours"] - theirs
    clear = [n for n in range(2, 21) if intervals.interval(apart[:n]).low > 0]
    assert len(apart) == 20 and clear and clear[-1] == 20


@suggested_by("14_honest_benchmarks")
def test_another_target():
    names = "picture", "cheat-crossing", "crossing-times", "guess-crossing", "answer-crossing"
    found = cells(*names, **few_runs(**{"target = experiment.FIRST": "target = 50.0"}))
    assert np.isfinite(found["often"]).all() and np.isfinite(found["flattered"].mean)


@suggested_by("14_honest_benchmarks")
def test_a_lower_target_in_the_race():
    names = "picture", "crossing-times", "cheat-work", "systems", "guess-work", "speedup"
    gain = {}
    for target in ("50.0", "46.0"):
        found = Cells("14_honest_benchmarks", few_runs(**{'"test"], 50.0': f'"test"], {target}'}))
        found.run("honest-setup", "honest-cheat-crossing", *(f"honest-{name}" for name in names))
        gain[target] = found["speedup"].mean
    assert all(1 < value < found["claimed_speedup"] for value in gain.values())


@suggested_by("14_honest_benchmarks_further")
def test_a_slow_network_and_stopping_later():
    names = ("groups", "live", "clock", "measure")
    slow = {"gradient, 5e-6, 1e-9 / 12.5": "gradient, 50e-6, 1e-9", "rounds=40": "rounds=3"}
    found = cells(*names, "scaling", further=True, **few_runs(**slow))
    assert found["efficiency"](256, True) < found["efficiency"](256, False)
    later = few_runs(**{"uniform(15, 30)": "uniform(40, 60)"})
    stopped = cells("groups", "live", "queues", further=True, **later)
    assert all(len(stopped["medians_of"](stopped["impatience"](seed))) == 3 for seed in range(3))


def test_the_best_of_a_thousand():
    samples = np.random.default_rng(0).normal(size=100_000)
    assert honest.expected_best(samples, 1000) == pytest.approx(3.24, abs=0.05)
