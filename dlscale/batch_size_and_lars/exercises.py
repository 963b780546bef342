"""The exercises of 04_batch_size_and_lars and its further notebook."""

import inspect
from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def noise_scale(gradients, b):
    B = gradients.shape[1] * b  # examples of all workers
    small = (gradients**2).sum(-1).mean()
    large = (gradients.mean(1) ** 2).sum(-1).mean()
    noise = (small - large) / (1 / b - 1 / B)
    signal = large - noise / B
    return noise / signal


def _noise(answer: Any) -> str | None:
    for seed, (steps, workers, n, b) in enumerate(((40, 4, 30, 8), (7, 2, 100, 1), (200, 16, 5, 64))):
        rng = np.random.default_rng(seed)
        signals = rng.normal(size=(steps, 1, n))
        gradients = signals * rng.uniform(0.1, 2, (steps, 1, 1)) + rng.normal(size=(steps, workers, n))
        what = f"The noise scale from {steps} steps of {workers} workers with {b} examples each"
        if wrong := compare(what, answer(gradients, b), noise_scale(gradients, b)):
            return wrong
    return None


noise = Exercise(
    id="batch_size_and_lars-noise",
    answer="noise_scale",
    hints=(
        "One worker has b examples, all workers have workers · b. Take the mean squared length at both batch sizes.",
        "Two equations, small = signal + noise / b and large = signal + noise / (workers · b), and two unknowns.",
        "Subtract them: small - large = noise (1 / b - 1 / B). The signal is then large - noise / B.",
    ),
    code=inspect.getsource(noise_scale),
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
    hints=(
        "η(B) = η_max / (1 + B_c / B). The known pair gives η_max.",
        "η_max = rate · (1 + critical / batch). Divide it by what belongs to the other batch.",
    ),
    code="""
def rate_for(other, critical, batch, rate):
    return rate * (1 + critical / batch) / (1 + critical / other)
""",
    wrong=_rate_for,
    right="far below the critical batch it is the linear rule, far above it hardly moves.",
)


def lars_step(w, m, g, rate=1.0, coefficient=0.01, decay=5e-4, beta=0.9):
    d = g + decay * w
    w_norm, d_norm = np.linalg.norm(w), np.linalg.norm(d)
    ratio = coefficient * w_norm / d_norm if w_norm > 0 and d_norm > 0 else 1.0
    m = beta * m + rate * ratio * d
    return w - m, m


def _step(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    for start in (rng.normal(size=(5, 4)), np.zeros(4), 3 * rng.normal(size=(3, 2, 2))):
        for coefficient, decay, beta in ((0.01, 5e-4, 0.9), (0.05, 0.5, 0.5), (0.02, 0.0, 0.8)):
            pair = np.float32(start), np.zeros(start.shape, np.float32)
            for rate, length in ((1.0, 1.0), (0.3, 0.01), (2.0, 30.0), (0.5, 0.0), (1.0, 1.0)):
                g = np.float32(length * rng.normal(size=start.shape))
                expected = lars_step(*pair, g, rate, coefficient, decay, beta)
                ours = answer(*(part.copy() for part in (*pair, g)), rate, coefficient, decay, beta)
                if not isinstance(ours, tuple | list) or len(ours) != 2:
                    return "`lars_step` must return two arrays: the new w and the new m."
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
    hints=(
        "First d = g + decay * w, then the ratio from the norms of w and d, then the momentum, then w minus it.",
        "The norm of a tensor of any shape: jnp.linalg.norm(w.ravel()). If one of the two norms is 0, the ratio is 1.",
    ),
    code=inspect.getsource(lars_step),
    wrong=_step,
    right="without momentum, each tensor moves by the same fraction of its length, however long its gradient is.",
)


def whole_ratio(weights, directions, coefficient=0.01):
    w_norm = np.sqrt(sum((w**2).sum() for w in weights))
    d_norm = np.sqrt(sum((d**2).sum() for d in directions))
    return coefficient * w_norm / d_norm


def _one_ratio(answer: Any) -> str | None:
    rng = np.random.default_rng(5)
    for coefficient, shapes in ((0.01, ((5, 4), (4,), (3, 2, 2))), (0.5, ((2, 30), (30, 1)))):
        weights = [np.float32(rng.normal(0, 4.0**k, shape)) for k, shape in enumerate(shapes)]
        directions = [np.float32(rng.normal(0, 0.25**k, shape)) for k, shape in enumerate(shapes)]
        given = f"The ratio of tensors of shapes {', '.join(map(str, shapes))}, coefficient {coefficient:g}"
        expected = whole_ratio(weights, directions, coefficient)
        if wrong := compare(given, answer(weights, directions, coefficient), expected):
            return wrong
    return None


one_ratio = Exercise(
    id="batch_size_and_lars-one_ratio",
    answer="one_ratio",
    hints=(
        "The squared norm of one long vector is the sum of the squared norms of its pieces.",
        "Sum the squares of all entries of all tensors, then take one root: once for weights, once for directions.",
    ),
    code=inspect.getsource(whole_ratio).replace("whole_ratio", "one_ratio"),
    wrong=_one_ratio,
    right="all layers share this ratio, yet the gradient's length still does not set the length of the step.",
)
