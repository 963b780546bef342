"""The exercises of 01_sgd."""

import itertools
import operator
from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _numeric(W: list[np.ndarray], X: np.ndarray, Y: np.ndarray) -> list[np.ndarray]:
    """Central differences of the mean cross-entropy of a network with two hidden ReLU layers."""

    def loss() -> float:
        scores = np.maximum(np.maximum(X @ W[0], 0) @ W[1], 0) @ W[2]
        scores -= scores.max(1, keepdims=True)
        return -np.sum(Y * (scores - np.log(np.exp(scores).sum(1, keepdims=True)))) / len(X)

    found = [np.zeros_like(w) for w in W]
    for w, gradient in zip(W, found, strict=True):
        for place in np.ndindex(w.shape):
            before, ends = w[place], []
            for w[place] in (before + 1e-5, before - 1e-5):
                ends.append(loss())
            w[place] = before
            gradient[place] = (ends[0] - ends[1]) / 2e-5
    return found


def _three_layers(answer: Any) -> str | None:
    for seed, (examples, first, second) in enumerate([(6, 5, 4), (5, 6, 6), (3, 4, 7)]):  # equal widths hide bugs
        rng = np.random.default_rng(seed)
        sizes = (4, first, second, 3)
        W = [rng.normal(size=shape) for shape in itertools.pairwise(sizes)]
        X, Y = rng.normal(size=(examples, 4)), np.eye(3)[rng.integers(0, 3, examples)]
        given = tuple(answer(*(w.copy() for w in W), X, Y))
        if len(given) != 3:
            return f"There are {len(given)} gradients, but should be 3."
        for layer, (ours, theirs) in enumerate(zip(given, _numeric(W, X, Y), strict=True), 1):
            if wrong := compare(f"The gradient of W{layer}", ours, theirs, tolerance=1e-3):
                return wrong
    return None


_THREE_LAYERS = """
def three_layers(W1, W2, W3, X, Y):
    Z1 = X @ W1
    H1 = Z1 * (Z1 > 0)
    Z2 = H1 @ W2
    H2 = Z2 * (Z2 > 0)
    E = 2.718281828459045 ** (H2 @ W3)
    delta3 = (E / E.sum(1, keepdims=True) - Y) / len(X)
    delta2 = (delta3 @ W3.T) * (Z2 > 0)
    delta1 = (delta2 @ W2.T) * (Z1 > 0)
    return X.T @ delta1, H1.T @ delta2, H2.T @ delta3
"""

backward = Exercise(
    id="sgd-backward",
    answer="three_layers",
    question="Write `three_layers`, the gradients of the mean cross-entropy with respect to all three matrices of a "
    r"network with two hidden ReLU layers, $X \to H_1 \to H_2 \to P$, without biases. Go forward, keep what you need, "
    "then come back layer by layer.",
    hints=(
        "Forward: Z₁ = XW₁, H₁ = max(Z₁, 0), Z₂ = H₁W₂, H₂ = max(Z₂, 0), P = softmax(H₂W₃).",
        "Back: δ₃ = (P − Y) / n, then twice the same line: (δ of the layer above) Wᵀ, masked by its own [Z > 0].",
        "The gradient of a matrix is (what came into it)ᵀ δ.",
    ),
    code=_THREE_LAYERS,
    wrong=_three_layers,
    right="all three equal finite differences, on networks that the check made up.",
)


def _planted(
    fault: str, W1: np.ndarray, W2: np.ndarray, W3: np.ndarray, X: np.ndarray, Y: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The gradients of the right backward pass, or of one with a fault."""
    Z1 = X @ W1
    H1 = np.maximum(Z1, 0)
    Z2 = H1 @ W2
    H2 = np.maximum(Z2, 0)
    P = np.exp(H2 @ W3 - (H2 @ W3).max(1, keepdims=True))
    delta3 = (P / P.sum(1, keepdims=True) - Y) / (1 if fault == "sum" else len(X))
    delta2 = delta3 @ W3.T * (1 if fault == "no mask" else Z2 > 0)
    delta1 = delta2 @ (W2 if fault == "transposed" else W2.T) * ((Z2 if fault == "other mask" else Z1) > 0)
    inputs = (X, Z1 if fault == "not rectified" else H1, H1 if fault == "other input" else H2)
    return tuple(came.T @ delta for came, delta in zip(inputs, (delta1, delta2, delta3), strict=True))


_FAULTS = {
    "other mask": [1], "other input": [3], "none": [], "not rectified": [2], "no mask": [1, 2], "transposed": [1],
    "sum": [1, 2, 3],
}  # fmt: skip


def _bug(answer: Any) -> str | None:
    for number, (fault, layers) in enumerate(_FAULTS.items(), 1):
        rng = np.random.default_rng(number)
        given = [rng.normal(size=shape) for shape in ((4, 5), (5, 5), (5, 3), (6, 4))]
        given.append(np.eye(3)[rng.integers(0, 3, 6)])
        gradients = _planted(fault, *given)
        if np.unique(np.asarray(list(answer(gradients, *given)), dtype=int)).tolist() != layers:
            return f"Of backward pass {number} you do not find just the layers that are wrong."
    return None


bug = Exercise(
    id="sgd-bug",
    answer="wrong_layers",
    question="Write `wrong_layers(gradients, W1, W2, W3, X, Y)`: `gradients` are the three that some backward pass"
    " returned. Which of them are off? Return the list of layers, from 1 to 3, by comparing with an "
    "independent computation (`jax.grad`, or finite differences). The check hands you those of several "
    "passes, right ones too. Rounding is no bug: differences below a thousandth count as none. Then try yours on what "
    "`suspect` returns.",
    hints=(
        "Write the loss of the three matrices, and let jax.grad with argnums=(0, 1, 2) give all three gradients.",
        "float32 rounds: take two gradients as equal if they differ by less than a thousandth.",
    ),
    code="""
def wrong_layers(gradients, W1, W2, W3, X, Y):
    W = [W1.copy(), W2.copy(), W3.copy()]
    def loss():
        scores = np.maximum(np.maximum(X @ W[0], 0) @ W[1], 0) @ W[2]
        return np.mean(np.log(np.exp(scores).sum(1)) - (Y * scores).sum(1))
    def slope(w, place):
        before, ends = w[place], []
        for w[place] in (before + 1e-5, before - 1e-5):
            ends.append(loss())
        w[place] = before
        return (ends[0] - ends[1]) / 2e-5
    true = [np.reshape([slope(w, place) for place in np.ndindex(w.shape)], w.shape) for w in W]
    return [layer for layer in (1, 2, 3) if np.abs(gradients[layer - 1] - true[layer - 1]).max() > 1e-3]
""",
    wrong=_bug,
    right="an independent gradient found in a moment what a training curve would never have told.",
)


def _epochs(answer: Any) -> str | None:
    for examples, batch_size, count in ((12, 3, 3), (20, 20, 2), (8, 1, 2)):
        rng, steps = np.random.default_rng(examples), count * examples // batch_size
        X, w = rng.normal(size=(examples, 3)), rng.normal(size=3)
        Y = X @ [0.5, 1.0, -2.0] + rng.normal(size=examples)
        ended, dealt = answer(w.copy(), X.copy(), Y.copy(), 0.02, batch_size, count, np.random.default_rng(1))
        dealt = np.asarray(dealt)
        if dealt.shape != (steps, batch_size):
            return f"The rows dealt do not have shape {steps, batch_size} in {count} epochs of {examples} examples."
        orders = dealt.reshape(count, examples)
        if (np.sort(orders) != np.arange(examples)).any():
            return "In some epoch an example comes twice, and another one not at all."
        if any((order == orders[0]).all() for order in orders[1:]):
            return "Two epochs have the same order."
        if (orders[0] == np.arange(examples)).all():
            return "The first epoch takes the examples as they come."
        for rows in dealt:
            w = w - 0.02 * 2 * X[rows].T @ (X[rows] @ w - Y[rows]) / batch_size
        if wrong := compare("The last w", ended, w):
            return wrong
    return None


epochs = Exercise(
    id="sgd-epochs",
    answer="sgd_epochs",
    question="Write the loop as training programs have it: in each epoch deal *all* examples, in a new random "
    "order, in minibatches of `batch_size` (it divides their number), and take a step for each. So that "
    "you see all of it, the model is a line: the loss is the mean of $(x \\cdot w - y)^2$, its gradient "
    "`2 * x.T @ (x @ w - y) / len(x)`. Return the last `w`, and the row numbers dealt, one minibatch "
    "after the other: (steps, batch size).",
    hints=(
        "rng.permutation(len(X)) is a random order of all examples. Draw one in each epoch.",
        "order.reshape(-1, batch_size) has a minibatch in each row: a loop over rows within the loop over epochs.",
    ),
    code="""
def sgd_epochs(w, X, Y, rate, batch_size, epochs, rng):
    dealt = []
    for _ in range(epochs):
        order = rng.permutation(len(X))
        for rows in order.reshape(-1, batch_size):
            x, y = X[rows], Y[rows]
            w = w - rate * 2 * x.T @ (x @ w - y) / len(x)
            dealt.append(rows)
    return w, np.array(dealt)
""",
    wrong=_epochs,
    right="each example once in each epoch, in an order of its own, and a step for each minibatch.",
)


def _adam(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    for beta in (0.9, 0.5):
        mean, square = m, s = np.zeros(4), np.zeros(4)
        for t in range(1, 7):
            g = rng.normal(size=4)
            mean, square = beta * mean + (1 - beta) * g, 0.999 * square + 0.001 * g**2
            expected = mean / (1 - beta**t) / (np.sqrt(square / (1 - 0.999**t)) + 1e-8)
            d, m, s = answer(g, m, s, float(t), beta)
            if wrong := compare(f"With β = {beta}, the direction of step {t}", d, expected, tolerance=1e-3):
                return wrong
    return None


adam = Exercise(
    id="sgd-adam",
    answer="my_adam",
    question="Write Adam from its formulas, in the form of the functions above: `my_adam(g, m, s, t, beta)` returns "
    "the direction and the two memories.",
    hints=(
        "First the two running means, then the two corrections, then the quotient.",
        "Return the memories m and s as they are, not their corrected versions: the next step goes on from them.",
    ),
    code="""
def my_adam(g, m, s, t, beta):
    m = beta * m + (1 - beta) * g
    s = 0.999 * s + 0.001 * g**2
    m_hat = m / (1 - beta**t)
    s_hat = s / (1 - 0.999**t)
    return m_hat / (s_hat**0.5 + 1e-8), m, s
""",
    wrong=_adam,
    right="six steps with two values of β give Adam's directions; without the corrections the first steps differ.",
)


def _momentum(answer: Any) -> str | None:
    return compare("The factor", answer, 10.0, tolerance=1e-3)


momentum = Exercise(
    id="sgd-momentum",
    answer="momentum_gain",
    question=r"Momentum with $\beta = 0.9$ under a gradient that never changes: by which factor are its steps, in "
    r"the end, longer than those of SGD at the same rate? (Think of $m = \beta m + g$ at rest.)",
    hints=(
        "At rest m no longer changes: the m on both sides of m = βm + g is the same.",
        "Solve m = βm + g for m.",
    ),
    code="momentum_gain = 1 / (1 - 0.9)",
    wrong=_momentum,
    right="momentum multiplies the rate by 1 / (1 − β) along a steady slope, so it wants a smaller rate.",
)


def _intensity(answer: Any) -> str | None:
    for B, d in ((1, 1000), (64, 1000), (300, 50)):
        operations, moved = 2 * B * d * d, 4 * (d * d + 2 * B * d)
        if wrong := compare(f"The intensity for B={B} and d={d}", answer(B, d), operations / moved):
            return wrong
    return None


intensity = Exercise(
    id="sgd-intensity",
    answer="arithmetic_intensity",
    question="Write the **arithmetic intensity** of this layer: operations for each byte moved, when $B$ examples "
    r"of $d$ numbers meet a $d \times d$ matrix in 4-byte numbers. Count a multiplication and an addition "
    "as two operations, and each of the three matrices as moved once.",
    hints=(
        "Each of the B·d results is a sum of d products.",
        "The matrices moved are the weights (d×d), the inputs and the results (B×d each), 4 bytes a number.",
    ),
    code="""
def arithmetic_intensity(B, d):
    operations = 2 * B * d * d
    bytes_moved = 4 * (d * d + 2 * B * d)
    return operations / bytes_moved
""",
    wrong=_intensity,
    right="for B far below d it is about B / 2: the batch decides how well the weights are used.",
)


def _degree(answer: Any) -> str | None:
    grid, ratios = np.linspace(0, 1, 1000), []
    for draw in range(30):
        rng = np.random.default_rng(9000 + draw)
        waves, count = (0.5, 1.0, 2.0, 3.5, 5.0)[draw % 5], (60, 100, 150)[draw % 3]
        x = rng.uniform(0, 1, count)
        y = np.cos(waves * np.pi * x) + rng.normal(0, 0.1, count)
        degree = answer(x.copy(), y.copy())
        try:  # an int of Python, NumPy or JAX
            degree = operator.index(degree)
        except TypeError:
            degree = 0
        if not 1 <= degree <= 15:
            return "The degree must be a whole number from 1 to 15."
        fits = [np.polynomial.Polynomial.fit(x, y, d, domain=[0, 1])(grid) for d in range(1, 16)]
        errors = np.mean((np.array(fits) - np.cos(waves * np.pi * grid)) ** 2, axis=1)
        ratios.append(min(10.0, errors[degree - 1] / errors.min()))  # one unlucky draw shall not decide
    if (ratio := np.exp(np.mean(np.log(ratios)))) <= 2:
        return None
    return f"On average your error is {ratio:.1f} times that of the best degree."


degree = Exercise(
    id="sgd-degree",
    answer="choose",
    question="Write `choose(x, y)`, which looks at samples of an *unknown* curve and returns the degree, from 1 to 15, "
    "that you would fit. It has no fresh samples: how does it find out what the training error hides? The check draws "
    "30 data sets from curves of its own, and asks that your error against the truth is on average at most twice that "
    "of the best degree. No fixed degree manages that.",
    hints=(
        "Hold out a part of the samples, fit on the rest, and compare degrees on what was held out.",
        "One split is noisy: repeat with several splits, and take the degree with the lowest mean.",
    ),
    code="""
def choose(x, y):
    def held_out_error(degree, seed):
        order = np.random.default_rng(seed).permutation(len(x))
        kept, held = np.split(order, [3 * len(x) // 4])
        fit = np.polynomial.Polynomial.fit(x[kept], y[kept], degree, domain=[0, 1])
        return np.mean((fit(x[held]) - y[held]) ** 2)
    errors = [np.mean([held_out_error(degree, seed) for seed in range(20)]) for degree in range(1, 16)]
    return 1 + int(np.argmin(errors))
""",
    wrong=_degree,
    right="validation data, not training data, tell which model to trust.",
)
