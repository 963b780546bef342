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

# Schedules


STEPS = 800


def test_schedules_are_those_of_optax():
    half = STEPS // 8
    up, down = optax.linear_schedule(0.1, 1, half), optax.linear_schedule(1, 0.1, half)
    theirs = {
        "constant": optax.constant_schedule(1.0),
        "step": optax.piecewise_constant_schedule(1.0, {STEPS // 2: 0.1, 3 * STEPS // 4: 0.1}),
        "step, later": optax.piecewise_constant_schedule(1.0, {3 * STEPS // 4: 0.1, 7 * STEPS // 8: 0.1}),
        "exponential": optax.exponential_decay(1.0, STEPS, 0.01),
        "cyclical": optax.join_schedules([up, down] * 4, [half * k for k in range(1, 8)]),
        "one-cycle": optax.linear_onecycle_schedule(STEPS, 1.0),
        "cosine": optax.cosine_decay_schedule(1.0, STEPS),
        "linear": optax.linear_schedule(1.0, 0.0, STEPS),
    }
    ours = schedules(STEPS)
    steps = jnp.arange(STEPS)
    expected = jax.jit(lambda: {name: jax.vmap(schedule)(steps) for name, schedule in theirs.items()})()
    for name, multipliers in expected.items():
        np.testing.assert_allclose(ours[name], multipliers, rtol=1e-3, atol=1e-5, err_msg=name)
    warm = ours["warm-up"]
    assert warm[0] == pytest.approx(10 / STEPS) and (warm[STEPS // 10 :] == 1).all() and (np.diff(warm) >= 0).all()
    assert ours.keys() == theirs.keys() | {"warm-up"}


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


def follow_in_other_words(w, v, rate, steps):
    a, b = map(float, w)
    noted = np.zeros(steps)
    for step in range(steps):
        error = a * b - 1
        H = np.outer([b, a], [b, a]) + error * np.array([[0, 1], [1, 0]])
        product = H @ v
        noted[step], v = np.dot(product, v), product / np.sqrt((product**2).sum())
        a, b = a - rate * error * b, b - rate * error * a
    return [np.array([a, b]), noted]


def broken(line: str, instead: str):
    """The reference answer with one line spoilt."""
    assert line in exercises.follow.code
    namespace = {"np": np}
    exec(exercises.follow.code.replace(line, instead), namespace)
    return namespace["follow"]


NAIVE_FOLLOWERS = {
    "the length of v": broken("v = Hv / np.linalg.norm(Hv)", "v = Hv"),
    "v stays": broken("v = Hv / np.linalg.norm(Hv)", "pass"),
    "no curvature of the network itself": broken("2 * a * b - 1], [2 * a * b - 1", "a * b], [a * b"),
    "one weight after the other": broken(
        "w = w - rate * (a * b - 1) * np.array([b, a])",
        "a = a - rate * (a * b - 1) * b; b = b - rate * (a * b - 1) * a; w = np.array([a, b])",
    ),
    "uphill": broken("w - rate", "w + rate"),
    "a step less": broken("range(steps)", "range(steps - 1)"),
    "the weights alone": lambda *args: follow_in_other_words(*args)[0],
}


def test_following_the_sharpness_in_other_words_is_right():
    right, line = exercises.follow.judge(follow_in_other_words)
    assert right, line


@pytest.mark.parametrize("name", NAIVE_FOLLOWERS)
def test_a_naive_follower_is_refused(name):
    assert not exercises.follow.judge(NAIVE_FOLLOWERS[name])[0]


def smoothed(rates, losses):
    means = [losses[max(0, i - 40) : i + 41].mean() for i in range(len(losses))]
    return rates[int(np.argmin(means))]


def in_blocks(rates, losses):
    """As the notebook reads it."""
    count = len(losses) // 31
    return rates[15 + 31 * losses[: 31 * count].reshape(count, 31).mean(1).argmin()]


def at_step(offset):
    """A mean over 61 steps, read at this one of them."""
    return lambda rates, losses: rates[offset + np.convolve(losses, np.ones(61) / 61, mode="valid").argmin()]


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


def by_power(A):
    v = np.ones(len(A))
    for _ in range(200):
        v = A @ v / np.linalg.norm(A @ v)
    return np.float32(2 / (v @ A @ v))


def in_two_pieces(step, total, warmup, peak):
    return float(optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total)(step))


@pytest.mark.parametrize(
    ("name", "answer", "right"),
    [
        ("stable", lambda A: 2 / np.linalg.norm(A, 2), True),
        ("stable", lambda A: jnp.array(2 / jnp.linalg.eigvalsh(A).max()), True),
        ("stable", by_trying, True),
        ("stable", by_power, True),
        ("stable", lambda A: 0.998 * 2 / np.linalg.eigvalsh(A)[-1], True),
        ("stable", lambda A: 1.02 * 2 / np.linalg.eigvalsh(A)[-1], False),
        ("stable", lambda A: 2 / np.diag(A).max(), False),
        ("stable", lambda A: 2 / np.linalg.norm(A), False),
        ("stable", lambda A: 2 / np.trace(A), False),
        ("stable", lambda A: 2 / np.linalg.eigvalsh(A)[0], False),
        ("stable", lambda A: 1 / np.linalg.eigvalsh(A)[-1], False),
        ("read", smoothed, True),
        ("read", in_blocks, True),
        ("read", lambda rates, losses: in_blocks(rates, losses) / 10, False),
        ("read", lambda rates, losses: rates[np.argmin(losses)], False),
        ("read", at_step(0), False),
        ("read", at_step(60), False),
        ("schedule", in_two_pieces, True),
        ("schedule", lambda step, total, warmup, peak: peak * (1 + np.cos(np.pi * step / total)) / 2, False),
    ],
)
def test_answers(name, answer, right):
    judged, line = vars(exercises)[name].judge(answer)
    assert judged is right, line


# What the notebooks suggest to try


def lesson(changes: dict[str, str], *identities: str) -> Cells:
    light = {"np.arange(-8, 2.5, 0.5)": "np.arange(-2, 0)", "SEEDS = range(6)": "SEEDS = range(1)"}
    cells = Cells("03_learning_rate", light | changes)
    cells.run(*(f"learning_rate-{name}" for name in ("setup", "opening-runs", *identities)))
    return cells


def end_of(cells: Cells, name: str, peak: float, seeds: int) -> tuple[float, float]:
    """Mean accuracy of the last weights and of the mean of the last quarter."""
    cells.changes = {}
    cells.run("learning_rate-mean")
    cells.data |= {"PEAKS": [], "jobs": [], "TWELVE": [], "looks": []}
    last, mean = [], []
    for seed in range(seeds):
        w, _, totals = cells["train_with"](peak * cells["SCHEDULES"][name], seed)
        for found, vector in ((last, w[-1]), (mean, cells["mean_weights"](totals, 4))):
            logits = cells["network"].apply(cells["as_params"](vector), cells["x_valid"])
            found.append(100 * (logits.argmax(1) == cells["y_valid"]).mean())
    return np.mean(last), np.mean(mean)


@suggested_by("03_learning_rate")
def test_with_relu_the_sharpness_rises_too():
    cells = lesson({'activation="tanh"': 'activation="relu"'}, "loss", "power", "descent")
    _, sharpness = cells["descend"](cells["initial_weights"](0), 0.2, 25)
    assert 8 < np.median(sharpness[-15:]) < 14


@suggested_by("03_learning_rate")
def test_an_exponential_schedule_ends_below_a_constant_rate_and_a_late_fall_above():
    late = '"late": np.minimum(1, 4 - 4 * time),'
    changes = {'"linear": 1 - time,': f'"linear": 1 - time,\n    "exponential": 0.01**time,\n    {late}'}
    cells = lesson(changes, "loss", "shapes", "train", "train-with")
    constant = end_of(cells, "constant", 1 / 32, 4)[0]
    assert end_of(cells, "exponential", 1 / 16, 4)[0] < constant < end_of(cells, "late", 1 / 32, 4)[0]


@suggested_by("03_learning_rate")
def test_with_larger_batches_averaging_gains_less():
    gains = []
    for size in (32, 256):
        cells = lesson({"BATCH_SIZE = 32": f"BATCH_SIZE = {size}"}, "loss", "shapes", "train", "train-with")
        last, mean = end_of(cells, "constant", 1 / 32, 6)
        gains.append(mean - last)
    assert gains[1] < gains[0]


def further(changes: dict[str, str], *identities: str) -> Cells:
    cells = Cells("further/03_learning_rate_further", changes)
    cells.run(*(f"learning_rate-further-{name}" for name in ("setup", "shared", "iteration", *identities)))
    return cells


@suggested_by("03_learning_rate_further")
def test_without_the_first_direction_the_second_does_not_matter():
    changes = {"range(8, 16), 25": "range(8, 10), 25"}
    changes |= {"(0.0, 1.0)\n": '(0.0, 1.0)\nMETHODS["without both"] = (1.0, 1.0)\n'}
    cells = further(changes, "edge-network", "edge-descent", "edge-runs", "oscillation-code", "oscillation-run")
    whole, first, second, both = cells["S"][:, :, -100:].mean((1, 2))
    assert abs(whole - 10) < 0.5 and abs(second - 10) < 0.5
    assert first > 11 and both > 11


@suggested_by("03_learning_rate_further")
def test_nesterov_has_a_smaller_best_rate_with_more_momentum_too():
    nesterov = "lambda learning_rate, momentum: optax.sgd(learning_rate, momentum, nesterov=True)"
    changes = {"optax.sgd,\n": f"{nesterov},\n", "range(104, 112)": "range(104, 106)"}
    changes |= {"[0.0, 0.5, 0.75, 0.9375]": "[0.0, 0.9375]"}
    best = further(changes, "map-runs")["accuracy"].mean(2).argmax(0)
    assert best[0] - best[1] >= 3


@suggested_by("03_learning_rate_further")
def test_a_start_with_small_weights_is_flatter():
    at_start = further({}, "starts")["at_start"]
    (small_loss, small), (loss, ordinary) = at_start(0, 0.3), at_start(0, 1.0)
    assert small < ordinary and small_loss < loss
