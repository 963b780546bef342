"""Answers to the exercises of 00_start_here, right and naive; what it suggests to try next."""

from __future__ import annotations

import numpy as np
import pytest
from cells import Cells
from conftest import suggested_by

from dlscale.start_here import exercises


def judged(exercise, answer) -> bool:
    return exercise.judge(answer)[0]


def speed_up(one, many, machines, target, arrival):
    return machines * arrival(one, target) / arrival(many, target)


def first(curve, target):
    return next((place for place, value in enumerate(curve, 1) if value >= target), np.nan)


ARRIVALS = {
    "of a run that never arrives": lambda curve, target: (curve >= target).argmax() + 1,
    "counted from 0": lambda curve, target: first(curve, target) - 1,
    "above the target only": lambda curve, target: first(curve, np.nextafter(target, 1)),
    "for good": lambda curve, target: len(curve) - (curve < target)[::-1].argmax() + 1,
    "with a penalty": lambda curve, target: np.nan_to_num(first(curve, target), nan=2 * len(curve)),
    "sorted": lambda curve, target: np.searchsorted(curve, target) + 1,
}


def test_a_loop_that_counts_passes_is_right():
    assert judged(exercises.speed_up, lambda *given: speed_up(*given, first))


@pytest.mark.parametrize("name", ARRIVALS)
def test_a_wrong_arrival_is_refused(name):
    assert not judged(exercises.speed_up, lambda *given: speed_up(*given, ARRIVALS[name]))


def later(value):
    """An answer: the run that has the larger value."""
    return lambda first, second: int(value(second) > value(first))


def test_whoever_looks_at_the_end_of_the_runs_tells_them_apart():
    assert judged(exercises.stopped, later(lambda run: np.polyfit(range(len(run) // 3), run[-(len(run) // 3) :], 1)[0]))
    assert judged(exercises.stopped, later(lambda run: run[-8:].mean() - run[-16:-8].mean()))


NAIVE = {
    "the height": lambda run: run[-1],
    "the last step": lambda run: run[-1] - run[-2],
    "the whole rise": lambda run: run[-1] - run[0],
    "the mean": lambda run: -run.mean(),
    "always the same": lambda run: 0,
}


@pytest.mark.parametrize("name", NAIVE)
def test_a_naive_look_does_not(name):
    assert not judged(exercises.stopped, later(NAIVE[name]))


# What is suggested, with fewer machines, rates and seeds

METHOD, RATES = "optax.sgd(learning_rate, momentum=0.9)", "rates = [2.0**k for k in range(-7, 2)]"
FEWER = {
    "machines = [1, 5, 20, 50, 200]": "machines = [1, 200]",
    "range(200, 208)": "range(200, 203)",
    "learning_rate=rates,": "learning_rate=rates, tuning_seeds=1,",
    "targets = [0.40, 0.45, 0.50, 0.55]": "targets = [0.50]",
}
UNTIL_50 = ["start-01", "start-10", "start-run", "start-trial", "start-11", "start-reach", "start-needed", "start-told"]


def suggested(method: str, rates: str, thinned: str) -> Cells:
    cells = Cells("00_start_here", FEWER | {METHOD: method, RATES: thinned})
    assert f"`{method}`" in cells.sources["start-28"] and rates in cells.sources["start-28"] + cells.sources["start-10"]
    cells.run(*UNTIL_50)
    return cells


@suggested_by("00_start_here")
def test_without_momentum_a_run_that_never_arrives_gives_a_bound_and_no_verdict(capsys):
    cells = suggested("optax.sgd(learning_rate)", RATES, "rates = [2.0**k for k in range(-4, 2, 2)]")
    assert np.isnan(cells["needed"][0.50][200]).all() and np.isnan(cells["speed_up"][0.50][200]).all()
    assert "3 of 8 runs never arrived in 60 passes, so at most " in cells["told"](200, 0.50)
    np.testing.assert_allclose(cells["at_most"](200, 0.50), 200 * cells["needed"][0.50][1] / 60)
    cells.changes = {}
    cells.update(lost=np.ones(8))
    capsys.readouterr()
    cells.run("start-17")
    said = capsys.readouterr().out
    assert said.count("Ours: ") == 1, "the speed-up has no card"
    assert "No verdict on the speed-up: 3 of 8 runs never arrived" in said


@suggested_by("00_start_here")
def test_with_adam_200_machines_are_sooner_but_not_200_times():
    rates = "rates = [2.0**k for k in range(-13, -2)]"
    cells = suggested("optax.adam(learning_rate)", rates, rates.replace("-2)", "-2, 3)"))
    assert 2 < np.nanmean(cells["speed_up"][0.50][200]) < 100
