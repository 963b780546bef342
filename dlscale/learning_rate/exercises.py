"""The exercises of 03_learning_rate."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dlscale.course.exercises import Exercise, compare
from dlscale.lab import data, models, train
from dlscale.lab.intervals import interval


def _stable(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    for size, beta in ((2, 0.0), (3, 0.5), (6, 0.0), (4, 0.9), (5, 0.99)):
        B = rng.normal(size=(size, size))
        A = B @ B.T + 0.1 * np.eye(size)
        expected = 2 * (1 + beta) / np.linalg.eigvalsh(A)[-1]
        if wrong := compare(f"The rate for a {size}×{size} matrix and β = {beta:g}", answer(A, beta), expected):
            return wrong
    return None


stable = Exercise(
    id="learning_rate-stable",
    answer="largest_rate",
    question=r"Gradient descent on $f(w) = \tfrac12 w^\top A w$ with a symmetric matrix $A$ whose eigenvalues are all "
    "positive, not only a diagonal one, and with momentum `beta`. At the threshold one root of "
    r"$z^2 - (1 + \beta - \eta\lambda) z + \beta = 0$ is $z = -1$: each step undoes the one before. "
    "Write `largest_rate`, the rate above which the descent diverges.",
    hints=(
        "In the eigenvectors of A as axes, the directions do not mix. Each has its own threshold; the smallest counts.",
        "Put z = −1 into the equation: 1 + (1 + β − ηλ) + β = 0. Solve for η.",
        "`np.linalg.eigvalsh(A)` gives the eigenvalues of a symmetric matrix in ascending order.",
    ),
    code="""
def largest_rate(A, beta):
    return 2 * (1 + beta) / np.linalg.eigvalsh(A)[-1]
""",
    wrong=_stable,
    right="the sharpest direction alone decides, and momentum near 1 almost doubles the rate that it bears.",
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


def _followed(w: np.ndarray, v: np.ndarray, rate: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    sharpness = []
    for _ in range(steps):
        a, b = w
        Hv = np.array([[b**2, 2 * a * b - 1], [2 * a * b - 1, a**2]]) @ v
        sharpness.append(v @ Hv)
        v = Hv / np.linalg.norm(Hv)
        w = w - rate * (a * b - 1) * np.array([b, a])
    return w, np.array(sharpness)


def _follow(answer: Any) -> str | None:
    rng = np.random.default_rng(8)
    for case in range(6):
        w, rate, steps = rng.uniform(0.4, 1.5, 2), float(rng.uniform(0.05, 0.3)), int(rng.integers(5, 60))
        if case == 5:
            w, rate, steps = np.array([3.0, 0.2]), 0.28, 80  # 2 / rate is below the sharpness there: a catapult
        v = rng.normal(size=2)
        v = v / np.linalg.norm(v)
        given = f"from ({w[0]:.2f}, {w[1]:.2f}) at rate {rate:.2f}, {steps} steps,"
        pair = answer(w.copy(), v.copy(), rate, steps)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            return "`follow` must return two things: the last weights and the sharpness at each step."
        for what, found, expected in zip(("weights", "sharpness"), pair, _followed(w, v, rate, steps), strict=True):
            if wrong := compare(f"The {what} {given}", np.asarray(found), expected, 1e-6):
                return wrong
    return None


follow = Exercise(
    id="learning_rate-follow",
    answer="follow",
    question=r"Now write it yourself, on the smallest network there is, two weights in a row: "
    r"$f(a, b) = \tfrac12 (ab - 1)^2$, with the gradient $(ab - 1)\,(b, a)$ and the Hessian "
    r"$\begin{pmatrix} b^2 & 2ab - 1 \\ 2ab - 1 & a^2 \end{pmatrix}$. `follow` gets the weights `w`, that is $(a, b)$, "
    r"and a direction `v` of length 1. In each of `steps` steps: multiply `v` by the Hessian where you stand, note the "
    "estimate $v^\\top H v$, make the product the next `v`, of length 1 again, and take a step of gradient descent. "
    "Return the last weights and all estimates.",
    hints=(
        "A loop: a, b = w; then H as np.array([[…, …], […, …]]); Hv = H @ v; the estimate is v @ Hv.",
        "One product a step is enough: v of the step before already points nearly along the sharpest direction.",
        "Use the old a and b for both, Hessian and gradient, and only then change w.",
    ),
    code="""
def follow(w, v, rate, steps):
    sharpness = []
    for _ in range(steps):
        a, b = w
        H = np.array([[b**2, 2 * a * b - 1], [2 * a * b - 1, a**2]])
        Hv = H @ v
        sharpness.append(v @ Hv)
        v = Hv / np.linalg.norm(Hv)
        w = w - rate * (a * b - 1) * np.array([b, a])
    return w, sharpness
""",
    wrong=_follow,
    right="the last case starts where the sharpness is above 2 / rate: it is thrown to flatter ground and settles.",
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
    off = []  # log of what was read over what is right
    for seed in range(20):
        rates, losses, lowest = _range_test(seed)
        read = float(answer(rates, losses))
        if not lowest / 3 <= read <= 3 * lowest:
            made_up = f"On made-up test {seed + 1} of 20 you read {read:.3g}"
            advice = "Do lucky minibatches decide? Average over more steps."
            return f"{made_up}; without its noise the loss is lowest at {lowest:.3g}. {advice}"
        off.append(np.log(read / lowest))
    if abs(mean := np.mean(off)) > np.log(1.3):
        return f"You read {np.exp(mean):.2f} times the right rate, a geometric mean. Which step of a mean do you read?"
    return None


read = Exercise(
    id="learning_rate-read",
    answer="read_range_test",
    question="Write `read_range_test`: from the `rates` of a range test and the loss at each step, return the rate at "
    "which the loss is lowest. The losses are noisy, and some minibatches are lucky. The check makes up 20 tests with "
    "800 steps each, and asks that you come within a factor of 3 in each, and within 1.3 on their geometric mean.",
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


BEST_CONSTANT = 1 / 32  # of the grid of section 5, with momentum 0.9


def _accuracies(rates: np.ndarray, seeds: range) -> np.ndarray:
    """(2, seeds) accuracies in percent on the held-out quarter: of the best constant rate, and of these rates."""
    table = jnp.array([np.full(744, BEST_CONSTANT), rates], jnp.float32)
    held_out = data.validation_split(data.load("mnist1d"), fraction=0.25)

    def scheduled(row: jax.Array) -> optax.GradientTransformation:
        return optax.sgd(lambda step: table[jnp.int32(row), step], momentum=0.9)

    budget = {"batch_size": 32, "epochs": 8, "eval_every": 8, "progress": False}
    runs = train.sweep(models.mlp((40, 32, 32, 10)), held_out, scheduled, seed=seeds, row=[0.0, 1.0], **budget)
    return 100 * np.where(runs.diverged_at < 0, runs.history.test_accuracy[..., -1], 0.1)


def _beat(answer: Any) -> str | None:
    if wrong := compare("The array of rates", np.asarray(answer) * 0.0, np.zeros(744)):
        return wrong
    if (rates := np.asarray(answer, float)).min() < 0:
        return "A rate is negative: that step would go uphill."
    constant, mine = _accuracies(rates, range(1000, 1032))
    gain = interval(mine - constant)
    if gain.low > 0:
        return None
    return (
        f"On 32 fresh seeds your rates reach {mine.mean():.1f} %, the constant one {constant.mean():.1f} %: "
        f"a difference of {gain} points. Its interval must lie above 0."
    )


beat = Exercise(
    id="learning_rate-beat",
    answer="my_rates",
    question="*Further*, an open one. Give `my_rates`, an array of 744 rates, one for each step, with which this "
    "network (momentum 0.9) does better than with the best constant rate of the grid. Any shape of your own will do, "
    "so leave the rows of the table aside. The check trains both "
    "on 32 seeds that no cell here uses, judges on the held-out quarter, and asks that the whole 95 % interval of the "
    "difference, paired by seed, lies above 0. It takes some seconds.",
    hints=(
        "Which arms stand on the right in the figure above, and what do they have in common?",
        "A peak rate two to four times the best constant one, and a long fall to almost 0.",
    ),
    code="""
climb, fall = np.linspace(0.01, 0.1, 100), np.linspace(0.1, 0, 644)
my_rates = np.concatenate([climb, fall])
""",
    wrong=_beat,
    right="a gain that holds on fresh seeds. How much of it is the large rate, how much the low end? Change one.",
)
