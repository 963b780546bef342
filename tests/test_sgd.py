"""The answers that the exercises of 01_sgd must take and refuse, and what the notebook suggests to try next."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from cells import Cells
from conftest import suggested_by

from dlscale.sgd import exercises


def three_layers(first_mask="Z1", second_mask="Z2", share=1.0, rounded=np.float64):
    """Gradients of a three-layer network, with the masks and the share that are asked for."""

    def answer(W1, W2, W3, X, Y):
        Z = {"Z1": X @ W1, "none": None}
        Z["Z2"] = np.maximum(Z["Z1"], 0) @ W2
        mask = {name: 1.0 if value is None else value > 0 for name, value in Z.items()}
        H1, H2 = np.maximum(Z["Z1"], 0), np.maximum(Z["Z2"], 0)
        P = np.exp(H2 @ W3 - (H2 @ W3).max(1, keepdims=True))
        delta3 = share * (P / P.sum(1, keepdims=True) - Y) / len(X)
        delta2 = (delta3 @ W3.T) * mask[second_mask]
        delta1 = (delta2 @ W2.T) * mask[first_mask]
        return [rounded(X.T @ delta1), rounded(H1.T @ delta2), rounded(H2.T @ delta3)]

    return answer


def test_a_backward_pass_is_right_only_with_its_own_masks():
    assert exercises.backward.judge(three_layers())[0]
    assert exercises.backward.judge(three_layers(rounded=np.float32))[0]
    for spoiled in ({"first_mask": "none"}, {"second_mask": "none"}, {"share": 2.0}):
        assert "The gradient of W" in exercises.backward.judge(three_layers(**spoiled))[1]
    assert not exercises.backward.judge(lambda *given: three_layers()(*given)[:2])[0]


def wrong_layers(gradients, *given, tolerance=1e-3):
    pairs = zip(gradients, three_layers()(*given), strict=True)
    return {layer for layer, (a, b) in enumerate(pairs, 1) if np.abs(np.subtract(a, b)).max() > tolerance}


def test_the_wrong_layers_are_found_for_every_planted_fault():
    assert exercises.bug.judge(wrong_layers)[0]
    assert exercises.bug.judge(lambda *given: tuple(sorted(wrong_layers(*given))))[0]
    for naive in (lambda *given: [1], lambda *given: [], lambda *given: [1, 2, 3]):
        assert "just the layers" in exercises.bug.judge(naive)[1]
    assert not exercises.bug.judge(lambda *given: wrong_layers(*given, tolerance=1e3))[0]


def test_the_bug_of_the_notebook_is_in_its_first_layer():
    cells = Cells("01_sgd")
    cells.run("sgd-01", "sgd-suspect")
    rng = np.random.default_rng(4)
    given = *(rng.normal(size=shape) for shape in ((3, 6), (6, 6), (6, 4), (9, 3))), np.eye(4)[np.arange(9) % 4]
    assert wrong_layers(cells["suspect"](*given), *given) == {1}


def dealer(*, again=False, replace=False, twice=1, stale=False):
    """The loop of the exercise, or one with a fault of dealing or of stepping."""

    def answer(w, X, Y, rate, batch_size, epochs, rng):
        first, order, dealt = w, rng.permutation(len(X)), []
        for _ in range(epochs):
            order = order if again else rng.choice(len(X), len(X), replace=replace)
            for i in range(0, len(X), batch_size):
                rows = order[i : i + batch_size]
                w = w - rate * twice * 2 * X[rows].T @ (X[rows] @ (first if stale else w) - Y[rows]) / len(rows)
                dealt.append(rows)
        return w, dealt

    return answer


def test_an_epoch_deals_every_example_once_and_anew():
    assert exercises.epochs.judge(dealer())[0]
    for wrong, told in (
        (dealer(again=True), "the same order"),
        (dealer(replace=True), "twice"),
        (dealer(twice=2), "The last w"),
        (dealer(stale=True), "The last w"),
        (lambda w, X, Y, rate, batch_size, epochs, rng: (w, [range(len(X))]), "shape"),
    ):
        assert told in exercises.epochs.judge(wrong)[1]


def adam(correct=True, square=0.999, inside=False):
    def answer(g, m, s, t, beta):
        m, s = beta * m + (1 - beta) * g, square * s + (1 - square) * g**2
        first, second = (1 - beta**t, 1 - square**t) if correct else (1, 1)
        return m / first / (np.sqrt(s / second + 1e-16) if inside else np.sqrt(s / second) + 1e-8), m, s

    return answer


def test_adam_needs_its_corrections_and_its_memories():
    assert exercises.adam.judge(adam())[0] and exercises.adam.judge(adam(inside=True))[0]
    for wrong in (adam(correct=False), adam(square=0.99), lambda g, m, s, t, beta: (g, m, s)):
        assert "the direction of step" in exercises.adam.judge(wrong)[1]

    def forgets(g, m, s, t, beta):
        return adam()(g, m, s, t, beta)[0], m, s

    assert not exercises.adam.judge(forgets)[0]


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


@suggested_by("01_sgd")
def test_an_eighth_method_can_join_the_race():
    cells = Cells("01_sgd", {"count=256": "count=16", "AT_ONCE = 1856": "AT_ONCE = 464"})
    cells.run("sgd-01", "sgd-15", "sgd-16", "sgd-17", "sgd-19", "sgd-20", "sgd-23", "sgd-24", "sgd-starts")

    def nadam(g, m, s, t, beta):
        m, s = beta * m + (1 - beta) * g, 0.999 * s + 0.001 * g**2
        ahead = beta * m / (1 - beta ** (t + 1)) + (1 - beta) * g / (1 - beta**t)
        return ahead / (cells["jnp"].sqrt(s / (1 - 0.999**t)) + 1e-8), m, s

    cells["METHODS"]["Nadam"], cells["COLORS"]["Nadam"], cells.changes = nadam, "purple", {}
    cells.run("sgd-paths", "sgd-paths-figure", "sgd-25", "sgd-best", "sgd-leave-tuned", "sgd-26", "sgd-27", "sgd-33")
    assert set(cells["race"]("ravine", 0.3, 0.3, 1.0)) == set(cells["METHODS"])
    assert cells["steps"]["ravine", "Nadam"].mean() < cells["steps"]["ravine", "RMSprop"].mean()


@suggested_by("01_sgd")
def test_a_larger_batch_can_be_dealt():
    cells = Cells(
        "01_sgd",
        {
            "EPOCHS, BATCH, LOOKS = 15, 30, 3": "EPOCHS, BATCH, LOOKS = 15, 300, 3",
            "range(400, 420)": "range(400, 403)",
            "(-10, -8, -6, -4, -3, -2, -1, 0)": "(-8, -2, 0)",
        },
    )
    cells.run("sgd-01", "sgd-51", "sgd-deals", "sgd-learn", "sgd-52", "sgd-53")
    assert set(cells["deals"]) == {"reshuffled", "fixed batches", "one order", "one order, turned", "sorted"}


@suggested_by("01_sgd")
@pytest.mark.parametrize("bug", ["no mask", "doubled"])
def test_tuning_hides_a_doubled_gradient_but_no_missing_mask(bug):
    spoiled = {
        "no mask": {"(delta2 @ W2.T) * (Z2 > 0)": "delta2 @ W2.T"},
        "doubled": {
            "(delta2 @ W2.T) * (Z2 > 0)": "(delta2 @ W2.T) * (Z1 > 0)",
            "(jax.nn.softmax(H2 @ W3) - Y) / len(X)": "2 * (jax.nn.softmax(H2 @ W3) - Y) / len(X)",
        },
    }[bug]
    cells = Cells("01_sgd", spoiled)
    cells.run(
        "sgd-01", "sgd-51", "sgd-deals", "sgd-suspect", "sgd-guess-bug", "sgd-bug-run", "sgd-bug-tune", "sgd-bug-result"
    )
    lost = (cells["good"] - cells["bad"]).mean()
    assert lost > 1.5 if bug == "no mask" else abs(lost) < 1.5


@suggested_by("01_sgd")
def test_a_lower_target_has_its_minimum_between_one_and_all():
    cells = Cells(
        "01_sgd",
        {
            "TARGET = len(x_fit), 0.3": "TARGET = len(x_fit), 0.25",
            "[1, 16, 64, 256, ALL]": "[1, 16, ALL]",
            "for size in (16, 256, ALL)}": "for size in (16, ALL)}",
            "seeds=range(30, 38), tuning": "seeds=range(30, 33), tuning",
        },
    )
    cells.run(
        "sgd-01",
        "sgd-03",
        "sgd-15",
        "sgd-16",
        "sgd-17",
        "sgd-19",
        "sgd-41",
        "sgd-42",
        "sgd-product-method",
        "sgd-product-count",
        "sgd-product-run",
        "sgd-product-arms",
    )
    assert "`TARGET` to 0.25" in cells.sources["sgd-81"]
    assert np.isfinite([arm.test for arm in cells["arms"].values()]).all(), "Adam with all the data gets there, too"
    assert (np.diff(cells["updates"].mean(0)) < 0).all()
