"""The exercises of 03_learning_rate."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _stable(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    for size in (2, 3, 6):
        B = rng.normal(size=(size, size))
        A = B @ B.T + 0.1 * np.eye(size)
        if wrong := compare(f"The rate for a {size}×{size} matrix", answer(A), 2 / np.linalg.eigvalsh(A)[-1]):
            return wrong
    return None


stable = Exercise(
    id="learning_rate-stable",
    answer="largest_rate",
    question=r"Gradient descent on $f(w) = \tfrac12 w^\top A w$ with a symmetric matrix $A$ whose eigenvalues are all "
    "positive, not only a diagonal one: write `largest_rate`, the rate above which it diverges.",
    hints=(
        "In the eigenvectors of A as axes, the directions do not mix. Each has its own threshold; the smallest counts.",
        "`np.linalg.eigvalsh(A)` gives the eigenvalues of a symmetric matrix in ascending order.",
    ),
    code="""
def largest_rate(A):
    return 2 / np.linalg.eigvalsh(A)[-1]
""",
    wrong=_stable,
    right="the steepest direction alone decides, however flat the others are.",
)


def _momentum(answer: Any) -> str | None:
    for eigenvalue, beta in ((1.0, 0.0), (4.0, 0.5), (0.5, 0.9), (10.0, 0.99)):
        given = f"λ = {eigenvalue:g} and β = {beta:g}"
        if wrong := compare(f"The rate for {given}", answer(eigenvalue, beta), 2 * (1 + beta) / eigenvalue):
            return wrong
    return None


momentum = Exercise(
    id="learning_rate-momentum",
    answer="largest_rate_with_momentum",
    question=r"The same with momentum. At the threshold one root of $z^2 - (1 + \beta - \eta\lambda) z + \beta = 0$ "
    r"is $z = -1$: each step undoes the one before. Write the rate at which that happens, for an `eigenvalue` "
    r"$\lambda$ and momentum `beta`.",
    hints=("Put z = −1 into the equation.", "1 + (1 + β − ηλ) + β = 0. Solve for η."),
    code="""
def largest_rate_with_momentum(eigenvalue, beta):
    return 2 * (1 + beta) / eigenvalue
""",
    wrong=_momentum,
    right="with β = 0 it is the threshold of plain descent, and with β near 1 it is almost twice as large.",
)


def _steps(answer: Any) -> str | None:
    for smallest, largest, rate in ((1.0, 10.0, 0.1), (1.0, 10.0, 0.19), (0.01, 1.0, 1.0), (0.5, 2.0, 0.8)):
        factor = max(abs(1 - rate * smallest), abs(1 - rate * largest))
        given = f"eigenvalues {smallest:g} and {largest:g} at rate {rate:g}"
        expected = int(np.ceil(np.log(1000) / -np.log(factor)))
        try:
            steps = answer(smallest, largest, rate)
        except (ValueError, ZeroDivisionError) as error:
            return f"For {given} your function raised {error}. Is a factor 0 there?"
        if wrong := compare(f"The number of steps for {given}", steps, expected, 1e-9):
            return wrong
    return None


steps = Exercise(
    id="learning_rate-steps",
    answer="steps_needed",
    question="A quadratic has a `smallest` and a `largest` eigenvalue, and `rate` is stable. How many steps of plain "
    "gradient descent until *each* of the two coordinates is at most a thousandth of what it was? "
    "(A whole number. The factor of one coordinate may be 0.)",
    hints=(
        "A coordinate shrinks by |1 − ηλ| in each step. The slower of the two decides, and it may be either.",
        "factor ** steps ≤ 1/1000: take logarithms, divide, and round up with `np.ceil`.",
    ),
    code="""
def steps_needed(smallest, largest, rate):
    factor = max(abs(1 - rate * smallest), abs(1 - rate * largest))
    return int(np.ceil(np.log(1000) / -np.log(factor)))
""",
    wrong=_steps,
    right="the steep direction limits the rate and the flat one the speed: their ratio, the condition number, is "
    "what makes a problem hard.",
)


def _schedule(answer: Any) -> str | None:
    for total, warmup, peak in ((1000, 100, 0.4), (60, 12, 2.0)):
        at = np.linspace(0, total, 21).astype(int)[1:-1]  # not where the rate is 0: an answer may round
        falling = (1 + np.cos(np.pi * (at - warmup) / (total - warmup))) / 2
        expected = peak * np.where(at < warmup, at / warmup, falling)
        for step, rate in zip(at.tolist(), expected, strict=True):
            given = f"The rate at step {step} of {total}, {warmup} of them warm-up, peak {peak:g},"
            if wrong := compare(given, answer(step, total, warmup, peak), rate, tolerance=1e-3):
                return wrong
    return None


schedule = Exercise(
    id="learning_rate-schedule",
    answer="warmup_cosine",
    question="Write the schedule that most large models are trained with: in the first `warmup` steps the rate rises "
    "on a straight line from 0 at step 0 to `peak` at step `warmup`; from there it falls along half a cosine to 0 at "
    "step `total`. (`step` is one whole number.)",
    hints=(
        "Two cases: step < warmup, and the rest. In the first the rate is peak · step / warmup.",
        "In the second, (step − warmup) / (total − warmup) runs from 0 to 1; (1 + cos(π · that)) / 2 from 1 to 0.",
    ),
    code="""
def warmup_cosine(step, total, warmup, peak):
    if step < warmup:
        return peak * step / warmup
    return peak * (1 + np.cos(np.pi * (step - warmup) / (total - warmup))) / 2
""",
    wrong=_schedule,
    right="it equals optax.warmup_cosine_decay_schedule(0, peak, warmup, total).",
)


def _range_test(seed: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Rates, noisy losses, and the rate at which the loss without its noise is lowest."""
    rng = np.random.default_rng(seed)
    log_rates = np.linspace(np.log(1e-4), np.log(10), 800)
    lowest = np.log(rng.uniform(0.05, 0.8))
    clean = 2.3 - 1.2 / (1 + np.exp(-(log_rates - lowest + 3))) + np.exp(2 * (log_rates - lowest) - 2.5)
    losses = clean + rng.normal(0, 0.15, 800)
    losses[rng.integers(250, 400, 3)] -= 1.2  # lucky minibatches
    return np.exp(log_rates), losses, float(np.exp(log_rates[clean.argmin()]))


def _read(answer: Any) -> str | None:
    for seed in range(20):
        rates, losses, lowest = _range_test(seed)
        read = float(answer(rates, losses))
        if not lowest / 2 <= read <= 2 * lowest:
            made_up = f"On made-up test {seed + 1} of 20 you read {read:.3g}"
            advice = "Do lucky minibatches decide? Average over more steps, and read the rate in their middle."
            return f"{made_up}; without its noise the loss is lowest at {lowest:.3g}. {advice}"
    return None


read = Exercise(
    id="learning_rate-read",
    answer="read_range_test",
    question="Write `read_range_test`: from the `rates` of a range test and the loss at each step, return the rate at "
    "which the loss is lowest. The losses are noisy, and some minibatches are lucky. The check makes up 20 tests with "
    "800 steps each, and asks that you come within a factor of 2 in all. (A running mean, please: 800 is not a "
    "multiple of 31.)",
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
