"""The exercises of 01_sgd."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _tanh(answer: Any) -> str | None:
    rng = np.random.default_rng(7)
    X, W1, W2 = rng.normal(size=(6, 4)), rng.normal(size=(4, 5)), rng.normal(size=(5, 3))
    H, delta2 = np.tanh(X @ W1), rng.normal(size=(6, 3))
    numeric = np.zeros_like(W1)  # of sum(delta2 * Z2), whose gradient with respect to Z2 is delta2
    for i, j in np.ndindex(W1.shape):
        step = np.zeros_like(W1)
        step[i, j] = 1e-5
        higher, lower = (np.sum(delta2 * (np.tanh(X @ (W1 + sign * step)) @ W2)) for sign in (1, -1))
        numeric[i, j] = (higher - lower) / 2e-5
    return compare("The gradient with respect to W1", answer(X, H, W2, delta2), numeric, tolerance=1e-3)


tanh = Exercise(
    id="sgd-tanh",
    answer="hidden_gradient",
    question="Without looking up: write `hidden_gradient`, the gradient of the loss with respect to $W_1$, when "
    r"the hidden layer is $\tanh$ instead of ReLU. Its derivative is $1 - H^2$.",
    hints=(
        "Only one factor of the line for δ₁ belongs to ReLU: its derivative [Z₁ > 0].",
        "Replace that factor by the derivative of tanh, which H alone gives you.",
    ),
    code="""
def hidden_gradient(X, H, W2, delta2):
    delta1 = (delta2 @ W2.T) * (1 - H**2)
    return X.T @ delta1
""",
    wrong=_tanh,
    right="it equals the finite differences of a tanh network that the check made up.",
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


def _updates(answer: Any) -> str | None:
    for examples, batch_size, epochs in ((4000, 32, 10), (4000, 30, 15), (1437, 1437, 3), (100, 101, 5)):
        given = f"{examples} examples, batch {batch_size} and {epochs} epochs"
        if wrong := compare(
            f"The number for {given}", answer(examples, batch_size, epochs), examples // batch_size * epochs
        ):
            return wrong
    return None


updates = Exercise(
    id="sgd-updates",
    answer="updates",
    question="The price of a batch: how many updates of the weights does a run of `epochs` epochs make on "
    "`examples` examples with batch size `batch_size`, if only whole batches count?",
    hints=("First count the whole batches in one epoch.", "`//` divides and drops the rest."),
    code="""
def updates(examples, batch_size, epochs):
    return examples // batch_size * epochs
""",
    wrong=_updates,
    right="at equal epochs, a batch ten times as large leaves a tenth of the updates.",
)


def _mean_errors() -> np.ndarray:
    """Mean squared errors (degrees 1 to 15) on fresh samples, over 100 draws of 100 samples."""
    grid, errors = np.linspace(0, 1, 1000), np.zeros((100, 15))
    for draw in range(100):
        rng = np.random.default_rng(5000 + draw)
        x = rng.uniform(0, 1, 100)
        y = np.cos(1.5 * np.pi * x) + rng.normal(0, 0.1, 100)
        for degree in range(1, 16):
            fit = np.polynomial.Polynomial.fit(x, y, degree, domain=[0, 1])
            errors[draw, degree - 1] = np.mean((fit(grid) - np.cos(1.5 * np.pi * grid)) ** 2)
    return errors.mean(0) + 0.1**2  # the noise of fresh samples


def _degree(answer: Any) -> str | None:
    if isinstance(answer, bool) or not isinstance(answer, int | np.integer) or not 1 <= answer <= 15:
        return "The degree must be a whole number from 1 to 15."
    errors = _mean_errors()
    if errors[answer - 1] <= 1.25 * errors.min():
        return None
    side = "too simple: it underfits" if answer - 1 < errors.argmin() else "too flexible: it overfits"
    return f"Degree {answer} has {errors[answer - 1] / errors.min():.1f} times the lowest mean error; it is {side}."


degree = Exercise(
    id="sgd-degree",
    answer="degree",
    question="You may take 100 samples. Which degree do *you* choose, and how do you find it without the fresh "
    "samples? Try it on `sample(100, seed=…)` and give a degree. The check draws 100 data sets of its own "
    "and asks that your degree comes within a quarter of the lowest mean error.",
    hints=(
        "Hold out a part of the 100 samples, fit on the rest, and compare degrees on what was held out.",
        "One split is noisy: repeat with several splits and seeds, and take the degree with the lowest mean.",
    ),
    code="""
rng = np.random.default_rng(0)
x = rng.uniform(0, 1, 100)                                      # the notebook's sample(100, seed=0)
y = np.cos(1.5 * np.pi * x) + rng.normal(0, 0.1, 100)

def held_out_error(degree, seed):
    order = np.random.default_rng(seed).permutation(100)        # 75 to fit, 25 held out
    fit = np.polynomial.Polynomial.fit(x[order[:75]], y[order[:75]], degree, domain=[0, 1])
    return np.mean((fit(x[order[75:]]) - y[order[75:]]) ** 2)

errors = [np.mean([held_out_error(degree, seed) for seed in range(20)]) for degree in range(1, 16)]
degree = 1 + int(np.argmin(errors))
""",
    wrong=_degree,
    right="validation data, not training data, tell which model to trust.",
)
