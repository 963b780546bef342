"""The exercises of 04_batch_size_and_lars and its further notebook."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _noise(answer: Any) -> str | None:
    for seed, (steps, workers, n, b) in enumerate(((40, 4, 30, 8), (7, 2, 100, 1), (200, 16, 5, 64))):
        rng = np.random.default_rng(seed)
        signals = rng.normal(size=(steps, 1, n))
        gradients = signals * rng.uniform(0.1, 2, (steps, 1, 1)) + rng.normal(size=(steps, workers, n))
        small, large = (gradients**2).sum(-1).mean(), (gradients.mean(1) ** 2).sum(-1).mean()
        noise = (small - large) / (1 / b - 1 / (workers * b))
        what = f"The noise scale from {steps} steps of {workers} workers with {b} examples each"
        if wrong := compare(what, answer(gradients, b), noise / (large - noise / (workers * b))):
            return wrong
    return None


noise = Exercise(
    id="batch_size_and_lars-noise",
    answer="noise_scale",
    question="A cluster has stored the gradient of each worker over some steps, an array `gradients` of shape "
    "(steps, workers, weights). Each worker took `b` examples per step. Write `noise_scale(gradients, b)`. Average "
    "both squared lengths over all steps, then solve for signal and noise, and divide only at the end.",
    hints=(
        "One worker has b examples, all workers have workers · b. Take the mean squared length at both batch sizes.",
        "Two equations, small = signal + noise / b and large = signal + noise / (workers · b), and two unknowns.",
        "Subtract them: small - large = noise (1 / b - 1 / B). The signal is then large - noise / B.",
    ),
    code="""
def noise_scale(gradients, b):
    steps, workers, weights = gradients.shape
    B = workers * b
    small = (gradients**2).sum(-1).mean()
    large = (gradients.mean(1) ** 2).sum(-1).mean()
    noise = (small - large) / (1 / b - 1 / B)
    signal = large - noise / B
    return noise / signal
""",
    wrong=_noise,
    right="any data-parallel run can measure its own noise scale, at the cost of two norms.",
)


def _rate_for(answer: Any) -> str | None:
    for critical, batch, rate, other in ((160, 8, 0.1, 64), (2000, 256, 0.5, 8192), (50, 1024, 2.0, 16)):
        what = f"The best rate at batch {other} for a critical batch of {critical} and rate {rate:g} at batch {batch}"
        expected = rate * (1 + critical / batch) / (1 + critical / other)
        if wrong := compare(what, answer(other, critical, batch, rate), expected):
            return wrong
    return None


rate_for = Exercise(
    id="batch_size_and_lars-rate_for",
    answer="rate_for",
    question="You know the critical batch `critical`, and the best rate `rate` at one batch size `batch`. Write "
    "`rate_for`, which returns the rate to try at the batch size `other`.",
    hints=(
        "ε(B) = ε_max / (1 + B_c / B). The known pair gives ε_max.",
        "ε_max = rate · (1 + critical / batch). Divide it by what belongs to the other batch.",
    ),
    code="""
def rate_for(other, critical, batch, rate):
    return rate * (1 + critical / batch) / (1 + critical / other)
""",
    wrong=_rate_for,
    right="far below the critical batch it is the linear rule, far above it hardly moves.",
)


def _best(answer: Any) -> str | None:
    for critical, overhead, per_example in ((160, 1e-3, 1e-4), (1000, 0.02, 1e-3), (50, 0.5, 0.5)):
        batches = np.geomspace(0.1, 1e6, 200_001)
        soonest = batches[np.argmin((1 + critical / batches) * (overhead + batches * per_example))]
        given = f"critical batch {critical}, overhead {overhead:g} s and {per_example:g} s for each example"
        if wrong := compare(f"The batch for {given}", answer(critical, overhead, per_example), soonest, tolerance=1e-3):
            return wrong
    return None


best = Exercise(
    id="batch_size_and_lars-best",
    answer="best_batch",
    question="On one worker a step takes `overhead` seconds, and `per_example` seconds for each example. Write "
    r"`best_batch`, which returns the batch that reaches the target in the least time, for $S = S_\text{min}(1 + "
    r"B_c/B)$ steps. Multiply out: two of the four terms depend on $B$. Do not round.",
    hints=(
        "The time is S_min (overhead + B_c · per_example + B · per_example + B_c · overhead / B).",
        "The last two terms pull in opposite ways; their sum is least where they are equal.",
    ),
    code="""
def best_batch(critical, overhead, per_example):
    return np.sqrt(critical * overhead / per_example)
""",
    wrong=_best,
    right="it is the geometric mean of B_c and of the examples that one overhead is worth.",
)


def _lars_step(w: np.ndarray, m: np.ndarray, g: np.ndarray, *options: float) -> tuple[np.ndarray, np.ndarray]:
    rate, coefficient, decay, beta = options
    d = g + decay * w
    w_norm, d_norm = np.linalg.norm(w.ravel()), np.linalg.norm(d.ravel())
    m = beta * m + rate * (coefficient * w_norm / d_norm if w_norm and d_norm else 1.0) * d
    return w - m, m


def _step(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    for start in (rng.normal(size=(5, 4)), np.zeros(4), 3 * rng.normal(size=(3, 2, 2))):
        for coefficient, decay, beta in ((0.01, 5e-4, 0.9), (0.05, 0.5, 0.5), (0.02, 0.0, 0.8)):
            pair = np.float32(start), np.zeros(start.shape, np.float32)
            for rate, length in ((1.0, 1.0), (0.3, 0.01), (2.0, 30.0), (0.5, 0.0), (1.0, 1.0)):
                g = np.float32(length * rng.normal(size=start.shape))
                ours = answer(*pair, g, rate, coefficient, decay, beta)
                if not isinstance(ours, tuple | list) or len(ours) != 2:
                    return "`lars_step` must return two arrays: the new w and the new m."
                expected = _lars_step(*pair, g, rate, coefficient, decay, beta)
                given = f"rate {rate:g}, coefficient {coefficient:g}, decay {decay:g}, β {beta:g}"
                for what, mine, right in zip("wm", ours, expected, strict=True):
                    about = f"For a tensor of shape {g.shape}, {given}: the new {what}"
                    if wrong := compare(about, mine, right, 1e-3):
                        return wrong
                pair = tuple(np.float32(part) for part in expected)
    return None


step = Exercise(
    id="batch_size_and_lars-step",
    answer="lars_step",
    question="Write LARS for one tensor. `lars_step` gets weights `w`, momentum `m` and gradient `g`, and returns the "
    "new `w` and the new `m`.",
    hints=(
        "First d = g + decay * w, then the ratio from the norms of w and d, then the momentum, then w minus it.",
        "The norm of a tensor of any shape: jnp.sqrt(jnp.sum(w**2)). If one of the two norms is 0, the ratio is 1.",
    ),
    code="""
def lars_step(w, m, g, rate=1.0, coefficient=0.01, decay=5e-4, beta=0.9):
    d = g + decay * w
    w_norm, d_norm = jnp.sqrt(jnp.sum(w**2)), jnp.sqrt(jnp.sum(d**2))
    ratio = coefficient * w_norm / d_norm if w_norm > 0 and d_norm > 0 else 1.0
    m = beta * m + rate * ratio * d
    return w - m, m
""",
    wrong=_step,
    right="each tensor moves by the same fraction of its length, however long its gradient is.",
)


def _one_ratio(answer: Any) -> str | None:
    rng = np.random.default_rng(5)
    for coefficient, shapes in ((0.01, ((5, 4), (4,), (3, 2, 2))), (0.5, ((2, 30), (30, 1)))):
        weights, directions = ([np.float32(rng.normal(0, 4**k, s)) for k, s in enumerate(shapes)] for _ in range(2))
        directions = directions[::-1] if len(shapes) == 2 else directions
        lengths = [np.linalg.norm(np.concatenate([part.ravel() for part in some])) for some in (weights, directions)]
        given = f"The ratio of tensors of shapes {', '.join(map(str, shapes))}, coefficient {coefficient:g}"
        if wrong := compare(given, answer(weights, directions, coefficient), coefficient * lengths[0] / lengths[1]):
            return wrong
    return None


one_ratio = Exercise(
    id="batch_size_and_lars-one_ratio",
    answer="one_ratio",
    question="Write this control. `one_ratio` gets two lists with one array per tensor: the weights, and the "
    r"directions $d = g + \lambda w$. It returns the ratio of the whole network. No norm is zero here.",
    hints=(
        "The squared norm of one long vector is the sum of the squared norms of its pieces.",
        "Sum the squares of all entries of all tensors, then take one root: once for weights, once for directions.",
    ),
    code="""
def one_ratio(weights, directions, coefficient=0.01):
    w_norm = jnp.sqrt(sum(jnp.sum(w**2) for w in weights))
    d_norm = jnp.sqrt(sum(jnp.sum(d**2) for d in directions))
    return coefficient * w_norm / d_norm
""",
    wrong=_one_ratio,
    right="all layers share this ratio, yet the gradient's length still does not set the length of the step.",
)
