"""The race of 01_sgd, answers that its exercises must take and refuse, and what its notebooks suggest to try."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Cells
from conftest import suggested_by

from dlscale import sgd
from dlscale.sgd import exercises

# The race


def test_each_method_walks_as_it_does_alone():
    rates = np.array([0.01, 0.1])
    found = sgd.race("Beale's valley", rates, (1.0, 1.5))
    assert list(found) == list(sgd.METHODS)
    for name, method in sgd.METHODS.items():
        optimizer, w = method(0.01), jnp.array([1.0, 1.5])
        state, loss = optimizer.init(w), sgd.LANDSCAPES["Beale's valley"].loss
        for t in range(5):
            weights, losses = found[name]
            assert weights.shape == (2, 201, 2) and losses.shape == (2, 201)
            np.testing.assert_allclose(weights[0, t], w, rtol=1e-4, err_msg=name)
            np.testing.assert_allclose(losses[0, t], loss(w), rtol=1e-4)
            updates, state = optimizer.update(jax.grad(loss)(w), state, w)
            w = optax.apply_updates(w, updates)


@pytest.mark.parametrize("name", ["ravine", "saddle"])
def test_rotation_turns_the_paths_of_plain_methods_only(name):
    start = np.array(sgd.LANDSCAPES[name].start)
    rotation = np.array([[1, 1], [-1, 1]]) / 2**0.5
    plain = sgd.race(name, np.array([0.05, 0.1]), tuple(start))
    rotated = sgd.race(f"rotated {name}", np.array([0.05, 0.1]), tuple(start @ rotation))
    for method in ("SGD", "momentum", "Nesterov"):
        np.testing.assert_allclose(rotated[method][0][:, :20], plain[method][0][:, :20] @ rotation, atol=1e-2)
    assert np.abs(rotated["Adagrad"][0][:, :20] - plain["Adagrad"][0][:, :20] @ rotation).max() > 0.1


def test_steps_are_counted_until_the_losses_stay_low():
    losses = np.array([[5, 0, 5, 0, 0], [0, 0, 0, 0, 0], [5, 5, 5, 5, 5], [5, 0, 0, np.nan, 0], [5, 4, 3, 2, 0]])
    assert sgd.steps_to_arrive(losses, 1.0).tolist() == [3, 0, 4, 4, 4]
    assert sgd.best_rate(losses, 1.0) == 1
    assert sgd.best_rate(np.array([[9, 9, np.nan], [9, 9, 3.0], [9, 9, 2.0]]), 1.0) == 2


# Exercises


def dealer(order_of=lambda order, rng: rng.permutation(len(order)), *, twice=1, stale=False):
    """The loop of the exercise, with an order of its own or a fault in stepping."""

    def answer(w, x, y, learning_rate, batch_size, epochs, rng):
        first, order, dealt = w, rng.permutation(len(x)), []
        for epoch in range(epochs):
            order = order_of(order, rng) if epoch else order
            for rows in np.reshape(order, (-1, batch_size)):
                at = first if stale else w
                w = w - learning_rate * twice * 2 * x[rows].T @ (x[rows] @ at - y[rows]) / len(rows)
                dealt.append(rows)
        return w, dealt

    return answer


def in_place(order, rng):
    order = order.copy()
    rng.shuffle(order)
    return order


def test_an_epoch_uses_every_example_once_in_a_new_order():
    for right in (dealer(), dealer(in_place), dealer(lambda order, rng: np.argsort(rng.random(len(order))))):
        assert exercises.epochs.judge(right)[0]
    same, twice = "the same order", "twice"
    for order_of, told in (
        (lambda order, rng: order, same),
        (lambda order, rng: np.roll(order, 1), same),
        (lambda order, rng: np.roll(order, rng.integers(len(order))), same),
        (lambda order, rng: order[::-1], same),
        (lambda order, rng: rng.choice(len(order), len(order)), twice),
    ):
        assert told in exercises.epochs.judge(dealer(order_of))[1]
    for wrong in (dealer(twice=2), dealer(stale=True)):
        assert "The last w" in exercises.epochs.judge(wrong)[1]
    assert "shape" in exercises.epochs.judge(lambda w, x, *_: (w, [range(len(x))]))[1]


def test_minibatches_that_stay_together_are_no_new_order():
    def answer(w, x, y, learning_rate, batch_size, epochs, rng):
        batches = rng.permutation(len(x)).reshape(-1, batch_size)
        return dealer(lambda order, rng: rng.permutation(batches).ravel())(
            w, x, y, learning_rate, batch_size, epochs, rng
        )

    def as_stored(w, x, y, learning_rate, batch_size, epochs, rng):
        class Stored:
            permutation = staticmethod(np.arange)

        return dealer(lambda order, _: rng.permutation(len(order)))(
            w, x, y, learning_rate, batch_size, epochs, Stored()
        )

    assert "twice" in exercises.epochs.judge(answer)[1] or "same order" in exercises.epochs.judge(answer)[1]
    assert "stored" in exercises.epochs.judge(as_stored)[1]


def test_the_error_of_a_minibatch_is_predicted_from_single_gradients():
    def expected(gradients, batch_size, power=0.5, ddof=0, draws=False):
        left = (len(gradients) - batch_size) / (len(gradients) - 1) if draws else 1
        spread = np.sqrt(gradients.var(0, ddof=ddof).sum() * left)
        return spread / batch_size**power / np.linalg.norm(gradients.mean(0))

    right = (expected, lambda g, b: expected(g, b, ddof=1), lambda g, b: jnp.float32(expected(g, b, draws=True)))
    wrong = (
        lambda g, b: expected(g, b, power=1),
        lambda g, b: expected(g, b) * np.linalg.norm(g.mean(0)),
        lambda g, b: np.linalg.norm(g - g.mean(0), axis=1).mean() / b**0.5 / np.linalg.norm(g.mean(0)),
        lambda g, b: expected(g, b) / g.shape[1] ** 0.5,
    )
    assert all(exercises.noise.judge(answer)[0] for answer in right)
    assert not any(exercises.noise.judge(answer)[0] for answer in wrong)


def adam(*, correct=True, square=0.999, one_line=False):
    def answer(w, m, v, gradient, step, learning_rate):
        m, v = 0.9 * m + 0.1 * gradient, square * v + (1 - square) * gradient**2
        first, second = (1 - 0.9**step, 1 - square**step) if correct else (1, 1)
        if one_line:
            return w - learning_rate * second**0.5 / first * m / (np.sqrt(v) + 1e-8), m, v
        return w - learning_rate * m / first / (np.sqrt(v / second) + 1e-8), m, v

    return answer


def test_adam_needs_its_corrections_and_its_memories():
    for right in (adam(), adam(one_line=True), lambda *given: map(jnp.float32, adam()(*given))):
        assert exercises.adam.judge(right)[0]
    for wrong in (adam(correct=False), adam(square=0.99), lambda w, m, v, g, *_: (w - 0.1 * g, m, v)):
        assert "The direction of step" in exercises.adam.judge(wrong)[1]

    def hands_on_corrected(w, m, v, gradient, step, learning_rate):
        w, m, v = adam()(w, m, v, gradient, step, learning_rate)
        return w, m / (1 - 0.9**step), v / (1 - 0.999**step)

    assert not exercises.adam.judge(hands_on_corrected)[0]


def three_layers(*, masked=(True, True), share=1.0, rounded=np.float64):
    def answer(W2, W3, X, Y, Z1, Z2, P):
        delta3 = share * (P - Y) / len(X)
        delta2 = (delta3 @ W3.T) * (Z2 > 0 if masked[1] else 1)
        delta1 = (delta2 @ W2.T) * (Z1 > 0 if masked[0] else 1)
        return [
            rounded(part) for part in (X.T @ delta1, np.maximum(Z1, 0).T @ delta2, np.where(Z2 > 0, Z2, 0).T @ delta3)
        ]

    return answer


def by_jax(W2, W3, X, Y, Z1, Z2, P):
    """Repeats the forward pass without its biases, and lets JAX differentiate it."""

    def loss(Z1, W2, W3):
        scores = jnp.maximum(jnp.maximum(Z1, 0) @ W2, 0) @ W3
        return optax.softmax_cross_entropy(scores, Y).mean()

    delta1, *rest = jax.grad(loss, argnums=(0, 1, 2))(Z1, W2, W3)
    return [X.T @ delta1, *rest]


def test_a_backward_pass_is_right_only_with_its_own_masks_and_what_was_saved():
    assert exercises.backward.judge(three_layers())[0]
    assert exercises.backward.judge(three_layers(rounded=np.float32))[0]
    for wrong in (
        three_layers(masked=(False, True)),
        three_layers(masked=(True, False)),
        three_layers(share=2.0),
        by_jax,
    ):
        assert "The gradient of W" in exercises.backward.judge(wrong)[1]
    assert not exercises.backward.judge(lambda *given: three_layers()(*given)[:2])[0]


def test_the_reference_backward_pass_is_that_of_jax():
    rng = np.random.default_rng(0)
    W1, W2, W3, X = (jnp.asarray(rng.normal(size=shape)) for shape in ((4, 5), (5, 6), (6, 3), (7, 4)))
    Y = jax.nn.one_hot(np.arange(7) % 3, 3)

    def loss(W1, W2, W3):
        return optax.softmax_cross_entropy(jax.nn.relu(jax.nn.relu(X @ W1) @ W2) @ W3, Y).mean()

    Z1 = X @ W1
    Z2 = jax.nn.relu(Z1) @ W2
    ours = three_layers()(W2, W3, X, Y, Z1, Z2, jax.nn.softmax(jax.nn.relu(Z2) @ W3))
    for mine, theirs in zip(ours, jax.grad(loss, argnums=(0, 1, 2))(W1, W2, W3), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_the_gain_of_momentum():
    assert exercises.momentum.judge(10)[0] and exercises.momentum.judge(np.float32(10))[0]
    assert not exercises.momentum.judge(1.9)[0] and not exercises.momentum.judge(9)[0]


def information(x, y):
    """Bayesian information criterion: a rule without held-out data that is right, too."""
    fits = [np.polynomial.Polynomial.fit(x, y, d, domain=[0, 1]) for d in range(1, 16)]
    scores = [len(x) * np.log(np.mean((fit(x) - y) ** 2)) + np.log(len(x)) * (d + 2) for d, fit in enumerate(fits)]
    return 1 + int(np.argmin(scores))


def test_a_degree_is_chosen_for_the_samples():
    assert exercises.degree.judge(information)[0]
    assert exercises.degree.judge(lambda x, y: jnp.asarray(information(x, y)))[0]
    for fixed in range(1, 16):
        assert "times that of the best degree" in exercises.degree.judge(lambda x, y, d=fixed: d)[1]

    def lowest_training_error(x, y):
        fits = [np.polynomial.Polynomial.fit(x, y, d, domain=[0, 1]) for d in range(1, 16)]
        return 1 + int(np.argmin([np.mean((fit(x) - y) ** 2) for fit in fits]))

    assert not exercises.degree.judge(lowest_training_error)[0]
    assert "whole number" in exercises.degree.judge(lambda x, y: 4.0)[1]


# What to try next


def lesson(changes: dict[str, str], *identities: str) -> Cells:
    cells = Cells("01_sgd", changes)
    cells.run(*(f"sgd-{name}" for name in ("setup", "loss", *identities)))
    return cells


@suggested_by("01_sgd")
def test_polyaks_momentum_is_the_best_of_four():
    path = lesson({}, "path")["path"]
    far = {b: np.linalg.norm(path(sgd.ravine, jnp.array([-6.0, 2.5]), 0.8, b)[40]) for b in (0.5, 0.64, 0.8, 0.9)}
    assert min(far, key=far.get) == 0.64 and far[0.5] > 10


@suggested_by("01_sgd")
@pytest.mark.parametrize("changed", ["TARGET = 0.25", "hidden=(32,)"])
def test_a_lower_target_and_a_smaller_network_need_more_updates(changed):
    changes = {"TARGET = 0.3": changed} if "TARGET" in changed else {"hidden=(128,)": changed}
    before, after = (lesson(some, "sgd", "compiled", "count") for some in ({}, changes))
    for batch, rate in ((16, 0.5), (256, 1.0), (1437, 1.0)):
        first, second = (
            np.mean([c["train_to_target"](batch, rate, seed)[0] for seed in range(3)]) for c in (before, after)
        )
        assert first < second < 5000


def further(changes: dict[str, str], *identities: str) -> Cells:
    cells = Cells("further/01_sgd_further", changes)
    cells.run(*(f"sgd-further-{name}" for name in ("setup", *identities)))
    return cells


@suggested_by("01_sgd_further")
@pytest.mark.parametrize("bug", ["no mask", "doubled"])
def test_tuning_hides_a_doubled_gradient_but_no_missing_mask(bug):
    spoiled = {
        "no mask": {"(delta2 @ W2.T) * (Z2 > 0)": "delta2 @ W2.T"},
        "doubled": {
            "(delta2 @ W2.T) * (Z2 > 0)": "(delta2 @ W2.T) * (Z1 > 0)",
            "(jax.nn.softmax(H2 @ W3) - Y) / len(X)": "2 * (jax.nn.softmax(H2 @ W3) - Y) / len(X)",
        },
    }[bug]
    names = "suspect signals batch tuned bug-code frozen bug-learn bug-trial bug-run bug-accuracy"
    cells = further(spoiled, *names.split())
    lost = (cells["good"] - cells["bad"]).mean()
    assert lost > 1.5 if bug == "no mask" else abs(lost) < 1.5


@suggested_by("01_sgd_further")
def test_a_larger_batch_can_be_dealt():
    changes = {"BATCH, EPOCHS = 30, 15": "BATCH, EPOCHS = 300, 15", "range(10120, 10136)": "range(10120, 10123)"}
    names = "signals batch tuned learn orders one-order orders-all orders-run orders-tune"
    cells = further(changes, *names.split())
    assert {*cells["test_accuracy"]} == {"reshuffled", "fixed batches", "one order", "sorted"}
    assert cells["test_accuracy"]["reshuffled"].mean() > cells["test_accuracy"]["sorted"].mean() + 5


@suggested_by("01_sgd_further")
def test_nesterovs_steps_can_join():
    changes = {
        '[("SGD", size) for size in BATCHES] + [': '[("SGD", len(x_fit)), ("Nesterov", len(x_fit))] + [',
        'GRID = {"SGD": ': 'GRID = {"Nesterov": [2.0**k for k in range(-6, 3)], "SGD": ',
    }
    names = "digits live-code target-code target-loss target-several target target-pairs target-run"
    search = further(changes, *names.split())["search"]
    everything = {name: search[name, size].test.mean() for name, size in search if size > 1000}
    assert everything["Nesterov"] < everything["SGD"]
