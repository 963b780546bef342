"""Exercises of 00_start_here, right answers and naive ones; its record; what it suggests to try next."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from cells import Cells, changed
from conftest import suggested_by

from dlscale import start_here
from dlscale.course import records
from dlscale.start_here import exercises, experiment

RECORD = records.read("start_here-machines")


def later(value):
    """The run that has the larger value."""
    return lambda first, second: int(value(second) > value(first))


ANSWERS = [  # an exercise, an answer or a change of the solution, and whether it is right
    ("steps", np.array([200.0, 10.0, 1.0]), True),
    ("steps", [3000, 150, 15], False),
    *(("speed_up", ("return None", f"return {never}"), True) for never in ("np.float32('nan')", "np.array(np.nan)")),
    *(("speed_up", ("return None", f"return {never}"), False) for never in ("0", "np.inf", "60", "'never'")),
    ("speed_up", lambda *given: None, False),
    ("speed_up", ("argmax() + 1", "argmax()"), False),
    ("speed_up", (">=", ">"), False),
    ("speed_up", ("arrived.argmax()", "np.searchsorted(many, target)"), False),
    ("stopped", later(lambda run: np.polyfit(range(len(run) // 3), run[-(len(run) // 3) :], 1)[0]), True),
    ("stopped", later(lambda run: run[-5:].mean() - run[-10:-5].mean()), True),
    ("stopped", ("fifth = len(first) // 5", "fifth = len(first) // 10"), True),
    ("stopped", later(lambda run: np.diff(run)[-5:].mean()), False),
    ("stopped", later(lambda run: -run.mean()), False),
    ("stopped", later(lambda run: run[:5].mean()), False),
    ("stopped", lambda first, second: "second", False),
]


@pytest.mark.parametrize(("name", "answer", "right"), ANSWERS)
def test_answers(name, answer, right):
    exercise = getattr(exercises, name)
    judged, line = exercise.judge(changed(exercise, *answer) if isinstance(answer, tuple) else answer)
    assert judged is right and "raised" not in line, line


def test_the_recorded_rates_are_those_that_tuning_chose():
    """What `tuned` reads as best is what was tested, and no best rate lies at the edge of its grid."""
    for machines, smallest in experiment.SMALLEST.items():
        for measure in experiment.MEASURES:
            rate, values = start_here.tuned(RECORD, machines, measure)
            assert len(values) == 28 and np.isfinite(values).all()
            assert 2.0**smallest < rate < 2.0 ** (smallest + 5), (machines, measure)


def test_a_run_that_never_arrives_counts_all_its_passes():
    trials = []
    for n, seed, on in itertools.product((1, 200), (199, 200), ("validation", "test")):
        setting = {"machines": n, "learning_rate": 0.5, "seed": seed, "judged_on": on}
        trials.append(records.Trial(setting, {"passes to 50 %": np.nan if seed == n == 200 else 10.0}, 1.0))
    found = start_here.speed_up(records.Record("toy", "", {}, trials), 200, 50)
    np.testing.assert_allclose(found, [200, 200 / 15])


def lesson(changes: dict[str, str], *identities: str) -> Cells:
    cells = Cells("00_start_here", changes)
    cells.run(*(f"start-{name}" for name in ("setup", "data", "loss", "step", *identities)))
    return cells


def test_the_lesson_takes_the_rates_that_were_best_after_ten_passes():
    rates = lesson({})["learning_rates"]
    assert rates == {machines: start_here.tuned(RECORD, machines, "after 10 passes")[0] for machines in rates}


def accuracy(machines: int, changes: dict[str, str]) -> np.ndarray:
    """Of one number of machines with two seeds, (seeds, tests)."""
    changes |= {"range(5)": "range(2)", "machines = [1, 5, 20, 50, 200]": f"machines = [{machines}]"}
    return lesson(changes, "runs", "accuracy")["accuracy"][machines]


@suggested_by("00_start_here")
def test_without_momentum_a_tenfold_rate_helps_few_machines_but_not_200():
    def best(machines, rate):
        return accuracy(machines, {"optax.sgd(learning_rate, momentum=0.9)": f"optax.sgd({rate})"}).max()

    assert best(5, "learning_rate") < 50 < best(5, "10 * learning_rate")
    assert max(best(200, rate) for rate in ("learning_rate", "10 * learning_rate")) < 50


@suggested_by("00_start_here")
def test_twice_the_passes_of_200_machines_do_not_close_the_gap_of_a_falling_rate():
    changes = {"range(5)": "range(2)", "(2, 5)": "(2, 2)", "1: 150, 200: 150": "1: 30, 200: 300"}
    one, many = lesson(changes, "runs", "falling-runs")["ends"].mean(axis=1)
    assert one - many > 0.04


@suggested_by("00_start_here")
def test_one_machine_that_trains_longer_wants_a_smaller_rate():
    large, small = (
        accuracy(1, {"passes = {1: 10,": "passes = {1: 150,", "{1: 1 / 64,": f"{{1: {rate},"})[:, -1].mean()
        for rate in ("1 / 64", "1 / 128")
    )
    assert small > large
