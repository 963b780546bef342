"""The exercises of 01_sgd."""

import inspect
import itertools
from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _neighbours(order: np.ndarray) -> set[frozenset[int]]:
    """Pairs of examples that follow each other in an order, the last and the first one, too."""
    return {frozenset(pair) for pair in zip(order.tolist(), np.roll(order, 1).tolist(), strict=True)}


def _epochs(answer: Any) -> str | None:
    for examples, batch_size, count in ((24, 6, 3), (40, 40, 2), (30, 1, 2)):
        rng, steps = np.random.default_rng(examples), count * examples // batch_size
        x, w = rng.normal(size=(examples, 3)), rng.normal(size=3)
        y = x @ [0.5, 1.0, -2.0] + rng.normal(size=examples)
        ended, dealt = answer(w.copy(), x.copy(), y.copy(), 0.02, batch_size, count, np.random.default_rng(1))
        dealt = np.asarray(dealt)
        if dealt.shape != (steps, batch_size):
            return f"The rows used do not have shape {steps, batch_size} in {count} epochs of {examples} examples."
        orders = dealt.reshape(count, examples)
        if (np.sort(orders) != np.arange(examples)).any():
            return "In some epoch an example comes twice, and another one not at all."
        for before, after in itertools.pairwise([np.arange(examples), *orders]):
            if len(_neighbours(before) & _neighbours(after)) > examples / 2:
                return (
                    "An epoch has nearly the order of the one before, or the first one nearly the stored order. "
                    "If you shuffle in place, store copies of the rows."
                )
            met, meet = (set(map(frozenset, order.reshape(-1, batch_size).tolist())) for order in (before, after))
            if 1 < batch_size < examples and len(met & meet) > len(met) / 2:
                return "Two epochs have the same minibatches: the same examples meet again."
        for rows in dealt:
            w = w - 0.02 * 2 * x[rows].T @ (x[rows] @ w - y[rows]) / batch_size
        if wrong := compare("The last w", ended, w):
            return wrong
    return None


epochs = Exercise(
    id="sgd-epochs",
    answer="sgd_epochs",
    hints=(
        "rng.permutation(len(x)) is a random order of all examples. Draw a new one in each epoch.",
        "order.reshape(-1, batch_size) has a minibatch in each row: a loop over rows within the loop over epochs.",
    ),
    code="""
def sgd_epochs(w, x, y, learning_rate, batch_size, epochs, rng):
    minibatches = []
    for _ in range(epochs):
        order = rng.permutation(len(x))
        for rows in order.reshape(-1, batch_size):
            gradient = 2 * x[rows].T @ (x[rows] @ w - y[rows]) / batch_size
            w = w - learning_rate * gradient
            minibatches.append(rows)
    return w, minibatches
""",
    wrong=_epochs,
    right="each example once in each epoch, in a new order, and one update for each minibatch.",
)


momentum = Exercise(
    id="sgd-momentum",
    answer="momentum_gain",
    hints=(
        "In the end m no longer changes: the m on both sides of m = βm + g is the same.",
        "Solve m = βm + g for m.",
    ),
    code="momentum_gain = 1 / (1 - 0.9)",
    wrong=lambda answer: compare("The factor", answer, 10.0, tolerance=1e-3),
    right="on a steady slope momentum multiplies the learning rate by 1 / (1 − β).",
)


def adam_step(w, m, v, gradient, step, learning_rate):
    m = 0.9 * m + 0.1 * gradient
    v = 0.999 * v + 0.001 * gradient**2
    m_corrected = m / (1 - 0.9**step)
    v_corrected = v / (1 - 0.999**step)
    return w - learning_rate * m_corrected / (v_corrected**0.5 + 1e-8), m, v


def _adam(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    for learning_rate, scale in ((0.1, 1.0), (0.003, 1e-3)):  # with small gradients it matters where ε stands
        expected = rng.normal(size=4), np.zeros(4), np.zeros(4)
        w, m, v = (part.copy() for part in expected)
        for step in range(1, 7):
            gradient = scale * np.append(0, rng.uniform(1, 2, 3) * rng.choice([-1, 1], 3))
            before, start = np.array(w), expected[0]
            expected = adam_step(*expected, gradient, step, learning_rate)
            w, m, v = answer(w, m, v, gradient, step, learning_rate)
            moved = before - np.asarray(w)
            if wrong := compare(f"The direction of step {step}", moved, start - expected[0], tolerance=1e-3):
                return wrong
    return None


adam = Exercise(
    id="sgd-adam",
    answer="adam_step",
    hints=(
        "First the two running means, then their corrections, then the quotient.",
        "Return m and v as they are, not their corrected versions: the next step continues from them.",
    ),
    code=inspect.getsource(adam_step),
    wrong=_adam,
    right="six steps in a row are Adam's. Without the corrections, the first ones would differ.",
)


def three_layers(W2, W3, X, Y, Z1, Z2, P):
    delta3 = (P - Y) / len(X)
    delta2 = (delta3 @ W3.T) * (Z2 > 0)
    delta1 = (delta2 @ W2.T) * (Z1 > 0)
    return X.T @ delta1, (Z1 * (Z1 > 0)).T @ delta2, (Z2 * (Z2 > 0)).T @ delta3


def _backward(answer: Any) -> str | None:
    for seed, (examples, first, second) in enumerate([(6, 5, 4), (5, 6, 6), (3, 4, 7)]):  # equal widths hide bugs
        rng = np.random.default_rng(seed)
        W1, W2, W3 = (rng.normal(size=shape) for shape in ((4, first), (first, second), (second, 3)))
        X, Y = rng.normal(size=(examples, 4)), np.eye(3)[rng.integers(0, 3, examples)]
        Z1 = X @ W1 + rng.normal(size=first)
        Z2 = np.maximum(Z1, 0) @ W2 + rng.normal(size=second)
        P = np.exp(np.maximum(Z2, 0) @ W3 + rng.normal(size=3))
        saved = W2, W3, X, Y, Z1, Z2, P / P.sum(1, keepdims=True)
        given = tuple(answer(*(part.copy() for part in saved)))
        if len(given) != 3:
            return f"There are {len(given)} gradients, but should be 3."
        for layer, (ours, theirs) in enumerate(zip(given, three_layers(*saved), strict=True), 1):
            if wrong := compare(f"The gradient of W{layer}", ours, theirs, tolerance=1e-3):
                return wrong
    return None


backward = Exercise(
    id="sgd-backward",
    answer="three_layers",
    hints=(
        "Begin with δ₃ = (P − Y) / n. Then twice the same line: (δ of the layer above) Wᵀ, masked by its own [Z > 0].",
        "The gradient of a matrix is (what came into it)ᵀ δ. Into W₂ came max(Z₁, 0), into W₃ came max(Z₂, 0).",
    ),
    code=inspect.getsource(three_layers),
    wrong=_backward,
    right="all three gradients are those of networks that the check made up.",
)
