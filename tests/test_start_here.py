"""Exercises of 00_start_here, right answers and naive ones; its record; what it suggests to try next."""

from __future__ import annotations

import numpy as np
import pytest
from cells import Cells
from conftest import suggested_by

from dlscale import start_here
from dlscale.course import records
from dlscale.start_here import exercises, experiment


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


@pytest.mark.parametrize("never", [None, np.nan, np.float32("nan"), np.array(np.nan)])
def test_a_run_that_never_arrives_gives_no_number(never):
    def answer(one, many, machines, target):
        return speed_up(one, many, machines, target, first) if (many >= target).any() else never

    assert judged(exercises.speed_up, answer)


@pytest.mark.parametrize("never", [0, np.inf, 60, "never"])
def test_a_number_for_a_run_that_never_arrives_is_refused(never):
    def answer(one, many, machines, target):
        return speed_up(one, many, machines, target, first) if (many >= target).any() else never

    assert not judged(exercises.speed_up, answer)


def test_none_for_a_run_that_arrives_is_refused():
    assert not judged(exercises.speed_up, lambda *given: None)


@pytest.mark.parametrize("right", [[200, 10, 1], np.array([200.0, 10.0, 1.0]), iter((200, 10, 1))])
def test_steps_in_every_shape(right):
    assert judged(exercises.steps, right)


@pytest.mark.parametrize("wrong", [[3000, 150, 15], [200, 200, 200], [200, 10], 1])
def test_other_steps_are_refused(wrong):
    assert not judged(exercises.steps, wrong)


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


class Agreeable:
    def __eq__(self, other):
        return True


def test_what_equals_everything_is_no_answer():
    assert not judged(exercises.stopped, lambda first, second: Agreeable())


@pytest.mark.parametrize("name", NAIVE)
def test_a_naive_look_does_not(name):
    assert not judged(exercises.stopped, later(NAIVE[name]))


# The record


RECORD = records.read("start_here-machines")


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
    trials = [
        records.Trial(
            {"machines": n, "learning_rate": 0.5, "seed": seed, "judged_on": on},
            {"passes to 50 %": np.nan if seed == n == 200 else 10.0},
            1.0,
        )
        for n in (1, 200)
        for seed in (199, 200)
        for on in ("validation", "test")
    ]
    record = records.Record("toy", "", {}, trials)
    np.testing.assert_allclose(start_here.speed_up(record, 200, 50), [200, 200 / 15])


# What is suggested


def lesson(changes: dict[str, str], *identities: str) -> Cells:
    cells = Cells("00_start_here", changes)
    cells.run(*(f"start-{name}" for name in ("setup", "data", "loss", "step", *identities)))
    return cells


def test_the_lesson_takes_the_rates_that_were_best_after_ten_passes():
    rates = lesson({})["learning_rates"]
    assert rates == {machines: start_here.tuned(RECORD, machines, "after 10 passes")[0] for machines in rates}


def few(machines: int, seeds: int = 2) -> dict[str, str]:
    """Changes that run one number of machines with few seeds."""
    return {"range(5)": f"range({seeds})", "machines = [1, 5, 20, 50, 200]": f"machines = [{machines}]"}


@suggested_by("00_start_here")
def test_without_momentum_200_machines_do_not_reach_the_target():
    cells = lesson(
        few(200) | {"optax.sgd(learning_rate, momentum=0.9)": "optax.sgd(learning_rate)"}, "runs", "accuracy"
    )
    assert cells["accuracy"][200].max() < 50


@suggested_by("00_start_here")
def test_twice_the_passes_of_200_machines_do_not_close_the_gap_of_a_falling_rate():
    changes = {"range(5)": "range(2)", "(2, 5)": "(2, 2)", "1: 150, 200: 150": "1: 30, 200: 300"}
    one, many = lesson(changes, "runs", "falling-runs")["ends"].mean(axis=1)
    assert one - many > 0.04


@suggested_by("00_start_here")
def test_one_machine_that_trains_longer_wants_a_smaller_rate():
    ends = []
    for rate in ("1 / 64", "1 / 128"):
        changes = few(1, 3) | {"passes = {1: 10,": "passes = {1: 60,", "{1: 1 / 64,": f"{{1: {rate},"}
        ends.append(lesson(changes, "runs", "accuracy")["accuracy"][1][:, -1].mean())
    assert ends[1] > ends[0]
