"""Schedules against optax, noise floors against the formula, answers to exercises, and what notebooks suggest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Cells, changed
from conftest import suggested_by

from dlscale.learning_rate import drawing, exercises, schedules


def test_schedules_are_those_of_optax():
    ours, up, down = schedules(800), optax.linear_schedule(0.1, 1, 100), optax.linear_schedule(1, 0.1, 100)
    theirs = {
        "constant": optax.constant_schedule(1.0),
        "warm-up": optax.linear_schedule(10 / 800, 1.0, 79),
        "step": optax.piecewise_constant_schedule(1.0, {400: 0.1, 600: 0.1}),
        "step, later": optax.piecewise_constant_schedule(1.0, {600: 0.1, 700: 0.1}),
        "exponential": optax.exponential_decay(1.0, 800, 0.01),
        "cyclical": optax.join_schedules([up, down] * 4, range(100, 800, 100)),
        "one-cycle": optax.linear_onecycle_schedule(800, 1.0),
        "cosine": optax.cosine_decay_schedule(1.0, 800),
        "linear": optax.linear_schedule(1.0, 0.0, 800),
        "late": optax.linear_schedule(1.0, 0.0, 200, 600),
    }
    assert ours.keys() == theirs.keys()
    expected = jax.jit(lambda: {name: jax.vmap(schedule)(jnp.arange(800)) for name, schedule in theirs.items()})()
    for name, multipliers in expected.items():
        np.testing.assert_allclose(ours[name], multipliers, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("rate", [0.1, 0.4])
def test_the_loss_on_a_noisy_bowl_stops_at_the_floor(rate):
    curvature = np.array([0.5, 1.0])
    path = drawing.noisy_walks(np.full(400, rate), curvature, noise=3.0, runs=2000)
    loss = (curvature * path[-200:] ** 2).mean((0, 1)) / 2
    np.testing.assert_allclose(loss, rate * 3**2 / (2 * (2 - rate * curvature)), rtol=0.05)


# The exercises: what is right is accepted however it is written, what is naive is refused


def by_trying(A):
    """Does gradient descent from (1, 1, …) grow? Steps of 0.4 % in the rate, many runs at once."""
    rates = 1.004 ** np.arange(-1500, 300)
    power = np.linalg.matrix_power(np.eye(len(A)) - rates[:, None, None] * A, 3000)
    return rates[np.linalg.norm(power.sum(2), axis=1) < 1].max()


UNIT, STEP = "v = Hv / np.linalg.norm(Hv)", "w = w - rate * (a * b - 1) * np.array([b, a])"
IN_TURN = "a = a - rate * (a * b - 1) * b; b = b - rate * (a * b - 1) * a; w = np.array([a, b])"
ANSWERS = [  # an exercise, an answer, and whether it is right
    ("stable", lambda A: jnp.array(2 / jnp.linalg.eigvalsh(A).max()), True),
    ("stable", by_trying, True),
    ("stable", lambda A: 1.02 * 2 / np.linalg.eigvalsh(A)[-1], False),
    ("stable", lambda A: 2 / np.diag(A).max(), False),
    ("follow", changed(exercises.follow, "np.array([[b", "jnp.array([[b"), True),  # in float32
    ("follow", changed(exercises.follow, UNIT, "pass"), False),
    ("follow", changed(exercises.follow, "2 * a * b - 1], [2 * a * b - 1", "a * b], [a * b"), False),
    ("follow", changed(exercises.follow, STEP, IN_TURN), False),
    ("follow", changed(exercises.follow, "v @ Hv", "np.linalg.norm(Hv)"), False),
    ("read", lambda rates, losses: rates[16::32][losses.reshape(-1, 32).mean(1).argmin()], True),
    ("read", lambda rates, losses: rates[np.argmin(losses)], False),
    ("read", lambda rates, losses: rates[np.convolve(losses, np.ones(61) / 61, "valid").argmin()], False),
    ("read", lambda rates, losses: rates[np.convolve(losses, np.ones(61) / 61, "same").argmin()], False),
]  # fmt: skip


@pytest.mark.parametrize(("name", "answer", "right"), ANSWERS)
def test_answers(name, answer, right):
    judged, line = vars(exercises)[name].judge(answer)
    assert judged is right, line


# What the notebooks suggest to try


def lesson(changes, names):
    sweep = "runs = train.sweep(\n    network, held_out, optax.sgd, seed=SEEDS, learning_rate=RATES, **budget\n)\n"
    cells = Cells("03_learning_rate", {sweep: "", "constant = final_accuracy(runs).T": ""} | changes)
    cells.run(*(f"learning_rate-{name}" for name in ("setup", "opening-runs", "loss", *names.split())))
    return cells


def further(changes, names):
    cells = Cells("further/03_learning_rate_further", changes)
    cells.run(*(f"learning_rate-further-{name}" for name in ("setup", "shared", "iteration", *names.split())))
    return cells


@suggested_by("03_learning_rate")
def test_with_relu_the_sharpness_rises_too():
    changes = {'activation="tanh"': 'activation="relu"', "length=60": "length=30"}
    cells = lesson(changes, "power descent")
    _, sharpness = cells["descend"](cells["initial_weights"](0), 0.4, 25)
    assert 4 < np.median(sharpness[-8:]) < 7


@suggested_by("03_learning_rate")
def test_other_schedules_and_a_larger_batch():
    late, ends = '"late": np.minimum(1, 4 - 4 * time),\n', {}  # accuracies of the last weights and of their mean
    changes = {late: f'{late}    "exponential": 0.01**time,\n    "linear": 1 - time,\n'}
    peaks = {"exponential": 1 / 16, "linear": 1 / 16, "constant": 1 / 32}
    for size, names in ((32, [*peaks]), (256, ["constant"])):
        changes["BATCH_SIZE = 32"] = f"BATCH_SIZE = {size}"
        cells = lesson(changes, "shapes train train-with mean")
        for name in names:
            runs = [cells["train_with"](peaks[name] * cells["SCHEDULES"][name], seed) for seed in range(3)]
            vectors = np.array([(w[-1], cells["mean_weights"](totals, 4)) for w, _, totals in runs])
            params = [[cells["as_params"](w) for w in pair] for pair in vectors]
            logits = [[cells["network"].apply(w, cells["x_valid"]) for w in pair] for pair in params]
            ends[name, size] = 100 * (np.argmax(logits, -1) == cells["y_valid"]).mean((0, 2))
    assert ends["exponential", 32][0] < ends["constant", 32][0] < ends["linear", 32][0]
    assert np.diff(ends["constant", 256]) < np.diff(ends["constant", 32])


@suggested_by("03_learning_rate_further")
def test_without_the_first_direction_the_second_does_not_matter():
    changes = {"range(8, 16), 25": "range(8, 9), 25", "[0.1, 0.2, 0.4]": "[0.2, 0.2]"}
    changes |= {"(0.0, 1.0)\n": '(0.0, 1.0)\nMETHODS["without both"] = (1.0, 1.0)\n'}
    cells = further(changes, "edge-network edge-descent edge-runs oscillation-code oscillation-run")
    whole, first, second, both = cells["S"][:, :, -100:].mean((1, 2))
    assert max(abs(whole - 10), abs(second - 10)) < 0.5 and min(first, both) > 11


@suggested_by("03_learning_rate_further")
def test_with_nesterov_the_rate_falls_too_and_small_weights_start_flatter():
    nesterov = "lambda learning_rate, momentum: optax.sgd(learning_rate, momentum, nesterov=True)"
    changes = {"optax.sgd,\n": f"{nesterov},\n", "range(104, 112)": "range(104, 106)"}
    cells = further(changes | {"[0.0, 0.5, 0.75, 0.9375]": "[0.0, 0.9375]"}, "map-runs starts")
    best = cells["accuracy"].mean(2).argmax(0)
    assert best[0] - best[1] >= 3
    assert np.all(np.array(cells["at_start"](0, 0.3)) < cells["at_start"](0, 1.0))


def test_the_catapult_is_as_exercise_2_tells_it():
    w, v = np.array([3, 0.2]), np.array([1.0, 0.0])
    path = np.array([w, *(w := exercises._followed(w, v, 0.28, 1)[0] for _ in range(200))])
    losses = (path.prod(1) - 1) ** 2 / 2
    sharpness = np.linalg.eigvalsh([[[b**2, 2 * a * b - 1], [2 * a * b - 1, a**2]] for a, b in path])[:, -1]
    told = exercises.follow.right
    assert f"from {losses[0]:.2f} to {max(losses):.2f} and then goes to {losses[-1]:.0f}" in told
    assert f"from {sharpness[0]:.1f} to {sharpness[-1]:.1f}" in told
