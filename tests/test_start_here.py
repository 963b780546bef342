"""Exercises of 00_start_here, right answers and naive ones; its record; what it suggests to try next."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from cells import Cells
from conftest import suggested_by

from dlscale import start_here
from dlscale.course import records
from dlscale.start_here import exercises, experiment

RECORD = records.read("start_here-machines")


def first(curve, target):
    return next((place for place, value in enumerate(curve, 1) if value >= target), np.nan)


def speed_up(arrival=first, never=np.nan):
    def answer(one, many, machines, target):
        arrived = arrival is not first or (many >= target).any()
        return machines * arrival(one, target) / arrival(many, target) if arrived else never

    return answer


def later(value):
    """The run that has the larger value."""
    return lambda first, second: int(value(second) > value(first))


ANSWERS = [  # an exercise, an answer, and whether it is right
    ("steps", (200, 10, 1), True),
    ("steps", np.array([200.0, 10.0, 1.0]), True),
    ("steps", iter((200, 10, 1)), True),
    ("steps", [3000, 150, 15], False),
    ("steps", [200, 10], False),
    *(("speed_up", speed_up(never=never), True) for never in (None, np.float32("nan"), np.array(np.nan))),
    *(("speed_up", speed_up(never=never), False) for never in (0, np.inf, 60, "never")),
    ("speed_up", lambda *given: None, False),
    ("speed_up", speed_up(lambda curve, target: (curve >= target).argmax() + 1), False),
    ("speed_up", speed_up(lambda curve, target: first(curve, target) - 1), False),
    ("speed_up", speed_up(lambda curve, target: first(curve, np.nextafter(target, 1))), False),
    ("speed_up", speed_up(lambda curve, target: len(curve) - (curve < target)[::-1].argmax() + 1), False),
    ("speed_up", speed_up(lambda curve, target: np.nan_to_num(first(curve, target), nan=2 * len(curve))), False),
    ("speed_up", speed_up(lambda curve, target: np.searchsorted(curve, target) + 1), False),
    ("stopped", later(lambda run: np.polyfit(range(len(run) // 3), run[-(len(run) // 3) :], 1)[0]), True),
    ("stopped", later(lambda run: run[-8:].mean() - run[-16:-8].mean()), True),
    ("stopped", later(lambda run: run[-1]), False),
    ("stopped", later(lambda run: run[-1] - run[-2]), False),
    ("stopped", later(lambda run: run[-1] - run[0]), False),
    ("stopped", later(lambda run: -run.mean()), False),
    ("stopped", lambda first, second: mock.ANY, False),  # equal to everything
]


@pytest.mark.parametrize(("name", "answer", "right"), ANSWERS)
def test_answers(name, answer, right):
    judged, line = getattr(exercises, name).judge(answer)
    assert judged is right, line


def test_a_test_falls_on_each_number_of_passes_that_is_recorded():
    for machines, (often, every) in experiment.OFTEN.items():
        steps = 200 // machines
        assert often * steps % every == 0 and often % 10 == 0
        assert all(passes * steps % (every if passes <= often else 10 * steps) == 0 for passes in start_here.PASSES)


def test_the_recorded_rates_are_those_that_tuning_chose():
    """What `tuned` reads as best is what was tested, and no best rate lies at the edge of its grid."""
    for machines, smallest in experiment.SMALLEST.items():
        for measure in experiment.MEASURES:
            rate, values = start_here.tuned(RECORD, machines, measure)
            assert len(values) == 28 and np.isfinite(values).all()
            assert 2.0**smallest < rate < 2.0 ** (smallest + 5), (machines, measure)


def test_a_run_that_never_arrives_counts_all_its_passes():
    trials = []
    for n, seed, on in ((n, seed, on) for n in (1, 200) for seed in (199, 200) for on in ("validation", "test")):
        setting = {"machines": n, "learning_rate": 0.5, "seed": seed, "judged_on": on}
        trials.append(records.Trial(setting, {"passes to 50 %": np.nan if seed == n == 200 else 10.0}, 1.0))
    found = start_here.speed_up(records.Record("toy", "", {}, trials), 200, 50)
    np.testing.assert_allclose(found, [200, 200 / 15])


# What is suggested


def lesson(changes: dict[str, str], *identities: str) -> Cells:
    cells = Cells("00_start_here", changes)
    cells.run(*(f"start-{name}" for name in ("setup", "data", "loss", "step", *identities)))
    return cells


def test_the_lesson_takes_the_rates_that_were_best_after_ten_passes():
    rates = lesson({})["learning_rates"]
    assert rates == {machines: start_here.tuned(RECORD, machines, "after 10 passes")[0] for machines in rates}


def accuracy(machines: int, seeds: int, changes: dict[str, str]) -> np.ndarray:
    """Of one number of machines with few seeds."""
    changes |= {"range(5)": f"range({seeds})", "machines = [1, 5, 20, 50, 200]": f"machines = [{machines}]"}
    return lesson(changes, "runs", "accuracy")["accuracy"][machines]


@suggested_by("00_start_here")
def test_without_momentum_200_machines_do_not_reach_the_target():
    plain = {"optax.sgd(learning_rate, momentum=0.9)": "optax.sgd(learning_rate)"}
    assert accuracy(200, 2, plain).max() < 50


@suggested_by("00_start_here")
def test_twice_the_passes_of_200_machines_do_not_close_the_gap_of_a_falling_rate():
    changes = {"range(5)": "range(2)", "(2, 5)": "(2, 2)", "1: 150, 200: 150": "1: 30, 200: 300"}
    one, many = lesson(changes, "runs", "falling-runs")["ends"].mean(axis=1)
    assert one - many > 0.04


@suggested_by("00_start_here")
def test_one_machine_that_trains_longer_wants_a_smaller_rate():
    large, small = (
        accuracy(1, 3, {"passes = {1: 10,": "passes = {1: 60,", "{1: 1 / 64,": f"{{1: {rate},"})[:, -1].mean()
        for rate in ("1 / 64", "1 / 128")
    )
    assert small > large
