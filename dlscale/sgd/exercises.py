"""The exercises of 01_sgd."""

import itertools
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
def {name}(W1, W2, W3, X, Y):
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
    code=_THREE_LAYERS.format(name="three_layers"),
    wrong=_three_layers,
    right="all three equal finite differences, on networks that the check made up.",
)

bug = Exercise(
    id="sgd-bug",
    answer="mended",
    question="Find the bug by measurement: compare the three gradients with those of `jax.grad` (or with finite "
    "differences), and see which one is off. Then give `mended`, the function without it.",
    hints=(
        "Draw small random matrices and a few examples; write the loss and let jax.grad give all three gradients.",
        "Two of the gradients are right. The wrong one is the last to be computed on the way back.",
        "Which Z belongs to the mask of the first hidden layer? Equal widths let the wrong one fit.",
    ),
    code=_THREE_LAYERS.format(name="mended"),
    wrong=_three_layers,
    right="an independent gradient found in a minute what a training curve would never have told.",
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
        if isinstance(degree, bool) or not isinstance(degree, int | np.integer) or not 1 <= degree <= 15:
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
