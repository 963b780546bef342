"""The exercises of 03_learning_rate."""

import inspect
from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _stable(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    for size in (2, 3, 6, 4, 5):
        B = rng.normal(size=(size, size))
        A = B @ B.T + 0.1 * np.eye(size)
        if wrong := compare(f"The rate for a {size}×{size} matrix", answer(A), 2 / np.linalg.eigvalsh(A)[-1], 0.01):
            return wrong
    return None


stable = Exercise(
    id="learning_rate-stable",
    answer="largest_rate",
    hints=(
        "Each eigenvector of A has a threshold of its own, 2 / eigenvalue. The smallest threshold decides.",
        "`np.linalg.eigvalsh(A)` gives the eigenvalues of a symmetric matrix in ascending order. If you try rates, "
        "take 1,000 steps: at 1 % above the threshold, a step makes the weights grow by a factor of only 1.02.",
    ),
    code="""
def largest_rate(A):
    return 2 / np.linalg.eigvalsh(A)[-1]
""",
    wrong=_stable,
    right="the sharpest direction alone decides.",
)


def _followed(w, v, rate, steps):
    sharpness = []
    for _ in range(steps):
        a, b = w
        H = np.array([[b**2, 2 * a * b - 1], [2 * a * b - 1, a**2]])
        Hv = H @ v
        sharpness.append(v @ Hv)
        v = Hv / np.linalg.norm(Hv)
        w = w - rate * (a * b - 1) * np.array([b, a])
    return w, sharpness


def _follow(answer: Any) -> str | None:
    rng = np.random.default_rng(8)
    cases = [(rng.uniform(0.4, 1.5, 2), rng.uniform(0.05, 0.3), rng.integers(5, 60)) for _ in range(5)]
    for w, rate, steps in [*cases, (np.array([3.0, 0.2]), 0.28, 80)]:  # the last is a catapult
        v = rng.normal(size=2)
        v = v / np.linalg.norm(v)
        given = f"from ({w[0]:.2f}, {w[1]:.2f}) at rate {rate:.2f}, {steps} steps,"
        pair = answer(w.copy(), v.copy(), float(rate), int(steps))
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            return "`follow` must return two things: the last weights and all estimates."
        for what, found, expected in zip(("weights", "estimates"), pair, _followed(w, v, rate, steps), strict=True):
            if wrong := compare(f"The {what} {given}", np.asarray(found), expected, 1e-3):
                return wrong
    return None


follow = Exercise(
    id="learning_rate-follow",
    answer="follow",
    hints=(
        "A loop: a, b = w; then H as np.array([[…, …], […, …]]); Hv = H @ v; the estimate is v @ Hv.",
        "One product a step is enough: v of the step before already points nearly along the sharpest direction.",
        "Use the old a and b for both, Hessian and gradient, and only then change w.",
    ),
    code=inspect.getsource(_followed).replace("_followed", "follow"),
    wrong=_follow,
    right="the last case is the catapult from (3, 0.2): the loss rises from 0.08 to 1.65 and then goes to 0, while the "
    "sharpness falls from 9.0 to 4.2.",
)


def _range_test(seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Rates, noisy losses, and the rate at which the loss without its noise is lowest."""
    rng = np.random.default_rng(seed)
    log_rates = np.linspace(np.log(1e-4), np.log(10), 800)
    lowest = np.log(rng.uniform(0.05, 0.8))
    clean = 2.3 - 1.2 / (1 + np.exp(-(log_rates - lowest + 3))) + np.exp(2 * (log_rates - lowest) - 2.5)
    losses = clean + rng.normal(0, 0.15, 800)
    losses[rng.integers(250, 700, 3)] -= 1.2  # lucky minibatches
    return np.exp(log_rates), losses, float(np.exp(log_rates[clean.argmin()]))


def _read(answer: Any) -> str | None:
    off = []  # log of what was read over what is right
    for seed in range(20):
        rates, losses, lowest = _range_test(seed)
        read = float(answer(rates, losses))
        if not lowest / 3 <= read <= 3 * lowest:
            advice = "Average over more steps. Near the ends, does your mean include zeros?"
            made_up = f"On made-up test {seed + 1} of 20 you read {read:.3g}"
            return f"{made_up}; without its noise the loss is lowest at {lowest:.3g}. {advice}"
        off.append(np.log(read / lowest))
    if abs(mean := np.mean(off)) > np.log(1.3):
        return f"On average you read {np.exp(mean):.2f} times the right rate. Read the middle of the steps averaged."
    return None


read = Exercise(
    id="learning_rate-read",
    answer="read_range_test",
    hints=(
        "The lowest single loss is a lucky minibatch. Average over neighbouring steps first.",
        "A mean over 60 steps: `np.convolve(losses, np.ones(60) / 60, mode='valid')`. Where is the middle of each?",
    ),
    code="""
def read_range_test(rates, losses):
    smooth = np.convolve(losses, np.ones(61) / 61, mode="valid")
    return rates[30 + np.argmin(smooth)]          # the middle of its 61 steps
""",
    wrong=_read,
    right="smoothed and read in its middle, a single noisy run is enough.",
)
