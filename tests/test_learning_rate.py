"""Schedules against optax, noise floors against the formula, answers to the exercises, and what notebooks suggest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Cells
from conftest import suggested_by

from dlscale.learning_rate import drawing, exercises, experiment, schedules

STEPS = 800


def test_schedules_are_those_of_optax():
    half, steps, ours = STEPS // 8, jnp.arange(STEPS), schedules(STEPS)
    up, down = optax.linear_schedule(0.1, 1, half), optax.linear_schedule(1, 0.1, half)
    theirs = {
        "constant": optax.constant_schedule(1.0),
        "warm-up": optax.linear_schedule(10 / STEPS, 1.0, STEPS // 10 - 1),
        "step": optax.piecewise_constant_schedule(1.0, {STEPS // 2: 0.1, 3 * STEPS // 4: 0.1}),
        "step, later": optax.piecewise_constant_schedule(1.0, {3 * STEPS // 4: 0.1, 7 * STEPS // 8: 0.1}),
        "exponential": optax.exponential_decay(1.0, STEPS, 0.01),
        "cyclical": optax.join_schedules([up, down] * 4, [half * k for k in range(1, 8)]),
        "one-cycle": optax.linear_onecycle_schedule(STEPS, 1.0),
        "cosine": optax.cosine_decay_schedule(1.0, STEPS),
        "linear": optax.linear_schedule(1.0, 0.0, STEPS),
        "late": optax.linear_schedule(1.0, 0.0, STEPS // 4, 3 * STEPS // 4),
    }
    assert ours.keys() == theirs.keys()
    expected = jax.jit(lambda: {name: jax.vmap(schedule)(steps) for name, schedule in theirs.items()})()
    for name, multipliers in expected.items():
        np.testing.assert_allclose(ours[name], multipliers, rtol=1e-3, atol=1e-5, err_msg=name)


def test_a_mean_of_one_step_is_the_last_weights(monkeypatch):
    monkeypatch.setattr(experiment, "SCHEDULES", {"stops": np.zeros(experiment.STEPS)})
    stopped = experiment.trial("stops", 1.0, 0.1, 0, "validation")
    assert stopped["last"] == pytest.approx(stopped["mean"], abs=0.2)  # it never moved


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_the_loss_on_a_noisy_bowl_stops_at_the_floor(rate):
    curvature, noise = np.array([0.5, 1.0]), 3.0
    path = drawing.noisy_walks(np.full(400, rate), curvature, noise, 2000)
    loss = (curvature * path[-200:] ** 2).mean((0, 1)) / 2
    np.testing.assert_allclose(loss, rate * noise**2 / (2 * (2 - rate * curvature)), rtol=0.05)


# The exercises: what is right is accepted however it is written, what is naive is refused


def follow(old, new):
    """The reference answer with a part replaced."""
    assert exercises.follow.code.count(old) == 1
    names = {"np": np, "jnp": jnp}
    exec(exercises.follow.code.replace(old, new), names)
    return names["follow"]


def by_trying(A):
    """Bisection: does gradient descent from a random start grow?"""
    low, high = 0.0, 4 / np.diag(A).max()
    while high - low > 1e-3 * high:
        rate, w = (low + high) / 2, np.random.default_rng(0).normal(size=len(A))
        for _ in range(3000):
            w = w - rate * A @ w
            w = w / max(1.0, np.linalg.norm(w) / 1e100)
        low, high = (rate, high) if np.linalg.norm(w) < 1 else (low, rate)
    return low


def at_step(offset, mode="valid"):
    """A mean over 61 steps, read at this one of them."""
    return lambda rates, losses: rates[offset + np.convolve(losses, np.ones(61) / 61, mode).argmin()]


def in_blocks(rates, losses):
    return rates[15::31][: len(losses) // 31][losses[: len(losses) // 31 * 31].reshape(-1, 31).mean(1).argmin()]


UNIT, STEP = "v = Hv / np.linalg.norm(Hv)", "w = w - rate * (a * b - 1) * np.array([b, a])"
IN_TURN = "a = a - rate * (a * b - 1) * b; b = b - rate * (a * b - 1) * a; w = np.array([a, b])"
ANSWERS = [  # an exercise, an answer, and whether it is right
    ("stable", lambda A: jnp.array(2 / jnp.linalg.eigvalsh(A).max()), True),
    ("stable", by_trying, True),
    ("stable", lambda A: 0.998 * 2 / np.linalg.eigvalsh(A)[-1], True),
    ("stable", lambda A: 1.02 * 2 / np.linalg.eigvalsh(A)[-1], False),
    ("stable", lambda A: 2 / np.diag(A).max(), False),
    ("stable", lambda A: 2 / np.abs(A).sum(1).max(), False),
    ("follow", follow("np.array([[b", "jnp.array([[b"), True),  # in float32
    ("follow", follow("np.array([[b**2, 2 * a * b - 1], [2 * a * b - 1, a**2]])",
                      "np.outer([b, a], [b, a]) + (a * b - 1) * np.array([[0, 1], [1, 0]])"), True),
    ("follow", follow(UNIT, "v = Hv"), False),
    ("follow", follow(UNIT, "pass"), False),
    ("follow", follow("2 * a * b - 1], [2 * a * b - 1", "a * b], [a * b"), False),
    ("follow", follow(STEP, IN_TURN), False),
    ("follow", follow("v @ Hv", "np.linalg.norm(Hv)"), False),
    ("follow", follow("return w, sharpness", "return w"), False),
    ("read", in_blocks, True),
    ("read", lambda rates, losses: rates[np.argmin(losses)], False),
    ("read", at_step(0), False),
    ("read", at_step(0, "same"), False),  # with zeros beyond the ends
    ("schedule", lambda *given: float(optax.warmup_cosine_decay_schedule(0.0, given[3], given[2], given[1])(given[0])),
     True),
    ("schedule", lambda step, total, warmup, peak: peak * (1 + np.cos(np.pi * step / total)) / 2, False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "right"), ANSWERS)
def test_answers(name, answer, right):
    judged, line = vars(exercises)[name].judge(answer)
    assert judged is right, line


# What the notebooks suggest to try


def lesson(changes: dict[str, str], names: str) -> Cells:
    light = {"np.arange(-8, 2.5, 0.5)": "np.arange(-2, 0)", "SEEDS = range(6)": "SEEDS = range(1)"}
    cells = Cells("03_learning_rate", light | changes)
    cells.run(*(f"learning_rate-{name}" for name in ("setup", "opening-runs", *names.split())))
    return cells


def end_of(cells: Cells, name: str, peak: float, seeds: int) -> tuple[float, float]:
    """Mean accuracy of the last weights and of the mean of the last quarter."""
    cells.changes = {}
    cells.run("learning_rate-mean")
    found = []
    for seed in range(seeds):
        w, _, totals = cells["train_with"](peak * cells["SCHEDULES"][name], seed)
        for vector in (w[-1], cells["mean_weights"](totals, 4)):
            logits = cells["network"].apply(cells["as_params"](vector), cells["x_valid"])
            found.append(100 * (logits.argmax(1) == cells["y_valid"]).mean())
    return np.mean(found[::2]), np.mean(found[1::2])


@suggested_by("03_learning_rate")
def test_with_relu_the_sharpness_rises_too():
    cells = lesson({'activation="tanh"': 'activation="relu"'}, "loss power descent")
    _, sharpness = cells["descend"](cells["initial_weights"](0), 0.2, 25)
    assert 8 < np.median(sharpness[-15:]) < 14


@suggested_by("03_learning_rate")
def test_an_exponential_schedule_ends_below_a_constant_rate_and_a_linear_one_above():
    late = '"late": np.minimum(1, 4 - 4 * time),\n'
    changes = {late: f'{late}    "exponential": 0.01**time,\n    "linear": 1 - time,\n'}
    cells = lesson(changes, "loss shapes train train-with")
    exponential, constant, linear = (
        end_of(cells, name, peak, 4)[0]
        for name, peak in (("exponential", 1 / 16), ("constant", 1 / 32), ("linear", 1 / 16))
    )
    assert exponential < constant < linear


@suggested_by("03_learning_rate")
def test_with_larger_batches_averaging_gains_less():
    gains = []
    for size in (32, 256):
        cells = lesson({"BATCH_SIZE = 32": f"BATCH_SIZE = {size}"}, "loss shapes train train-with")
        last, mean = end_of(cells, "constant", 1 / 32, 6)
        gains.append(mean - last)
    assert gains[1] < gains[0]


def further(changes: dict[str, str], names: str) -> Cells:
    cells = Cells("further/03_learning_rate_further", changes)
    cells.run(*(f"learning_rate-further-{name}" for name in ("setup", "shared", "iteration", *names.split())))
    return cells


@suggested_by("03_learning_rate_further")
def test_without_the_first_direction_the_second_does_not_matter():
    changes = {"range(8, 16), 25": "range(8, 10), 25"}
    changes |= {"(0.0, 1.0)\n": '(0.0, 1.0)\nMETHODS["without both"] = (1.0, 1.0)\n'}
    cells = further(changes, "edge-network edge-descent edge-runs oscillation-code oscillation-run")
    whole, first, second, both = cells["S"][:, :, -100:].mean((1, 2))
    assert max(abs(whole - 10), abs(second - 10)) < 0.5 and min(first, both) > 11


@suggested_by("03_learning_rate_further")
def test_nesterov_has_a_smaller_best_rate_with_more_momentum_too():
    nesterov = "lambda learning_rate, momentum: optax.sgd(learning_rate, momentum, nesterov=True)"
    changes = {"optax.sgd,\n": f"{nesterov},\n", "range(104, 112)": "range(104, 106)"}
    best = further(changes | {"[0.0, 0.5, 0.75, 0.9375]": "[0.0, 0.9375]"}, "map-runs")["accuracy"].mean(2).argmax(0)
    assert best[0] - best[1] >= 3


@suggested_by("03_learning_rate_further")
def test_a_start_with_small_weights_is_flatter():
    at_start = further({}, "starts")["at_start"]
    (small_loss, small), (loss, ordinary) = at_start(0, 0.3), at_start(0, 1.0)
    assert small < ordinary and small_loss < loss
