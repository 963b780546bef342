"""The exercises of 06_sparsity."""

from typing import Any

import numpy as np

from dlscale import sparsity
from dlscale.course.exercises import Exercise, compare


def _products(answer: Any) -> str | None:
    for a, e, w in ((1.0, 1.0, 1.0), (0.5, 1.0, 1.0), (1.0, 0.25, 1.0), (1.0, 1.0, 0.1), (0.5, 0.3, 0.2)):
        given = f"The share for a = {a:g}, e = {e:g}, w = {w:g}"
        if wrong := compare(given, answer(a, e, w), (a * w + a * e * w + e * w) / 3, 1e-6):
            return wrong
    return None


products = Exercise(
    id="sparsity-products",
    answer="needed_share",
    question="Now leave out weights as well. A layer's inputs are not zero with probability $a$, its errors with "
    "probability $e$, and a fraction $w$ of the weights is kept; all independent. Write `needed_share`: which share of "
    "the multiplications of the three products (take the three as equally large) is still needed? A weight that is "
    "left out needs no gradient, either.",
    hints=(
        "Forward: the input and the weight must both be there: a * w. Which must be there in the other two?",
        "The weights' gradient multiplies inputs with errors, for the kept weights only: a * e * w. Take the mean.",
    ),
    code="""
def needed_share(a, e, w):
    return (a * w + a * e * w + e * w) / 3
""",
    wrong=_products,
    right="half of the inputs, a third of the errors, a tenth of the weights: three multiplications in a hundred.",
)


def _cubic(answer: Any) -> str | None:
    return compare("The density at step 300", answer, 0.1 + 0.9 * 0.5**3, 1e-3)


cubic = Exercise(
    id="sparsity-cubic",
    answer="density_at_300",
    question="By hand: Zhu & Gupta's cubic runs from step 100 to step 500, from density 1 down to a final density of "
    "0.1. What is the density at step 300?",
    hints=(
        "Step 300 is half of the way. What is (1 - 1/2) cubed?",
        "The final density, and of the 0.9 above it an eighth.",
    ),
    code="density_at_300 = 0.1 + (1 - 0.1) * (1 - (300 - 100) / (500 - 100)) ** 3",
    wrong=_cubic,
    right="half of the steps, and seven eighths of the cuts are done: early, while there is plenty to cut.",
)


def _break_even(answer: Any) -> str | None:
    for value, index in ((16, 4), (32, 4), (8, 4), (4, 4), (32, 64)):
        given = f"The break-even density for {value}-bit values and {index}-bit indices"
        if wrong := compare(given, answer(value, index), value / (value + index), 1e-6):
            return wrong
    return None


break_even = Exercise(
    id="sparsity-break_even",
    answer="break_even_density",
    question="Without fillers, an index of $b$ bits goes with each weight of $v$ bits. Write `break_even_density`: "
    "below which density is that shorter than the dense layer? Then think of 4-bit indices for 16-bit, 8-bit and "
    "4-bit values.",
    hints=(
        "For n weights: the dense layer takes n * v bits. How many does the sparse one take at density d?",
        "d * n * (v + b) = n * v. Solve for d.",
    ),
    code="""
def break_even_density(v, b):
    return v / (v + b)
""",
    wrong=_break_even,
    right="80 % for 16-bit values, but 50 % for 4-bit ones: the shorter the values, the dearer the index.",
)


def _gaps(seed: int, length: int, density: float) -> tuple[np.ndarray, list[int]]:
    """A matrix of one column whose weights are kept at random, and the zeros before each that is."""
    keep = np.random.default_rng(seed).random(length) < density
    return keep[:, None].astype(np.float32), (np.diff(np.flatnonzero(keep), prepend=-1) - 1).tolist()


def _relative(answer: Any) -> str | None:
    for gaps, b, v in (([0, 3, 1], 4, 16), ([15], 4, 16), ([16], 4, 16), ([2, 40, 0], 4, 8), ([9, 0, 5], 2, 32)):
        expected = sum(1 + gap // 2**b for gap in gaps) * (b + v)
        given = f"The number of bits for gaps {gaps} with {b}-bit indices and {v}-bit values"
        if wrong := compare(given, answer(list(gaps), b, v), expected):
            return wrong
    mask, gaps = _gaps(5, 400, 0.08)
    encoded = len(sparsity.encode(mask, "relative", index_bits=3, dtype="float16"))
    return compare("The number of bits of 400 weights, as they are really encoded,", answer(gaps, 3, 16), encoded)


relative = Exercise(
    id="sparsity-relative",
    answer="relative_bits",
    question="Now with fillers. `gaps` lists, for each weight that is kept, how many zeros are before it since the "
    "last one that was kept. With an index of $b$ bits, a filler stands for $2^b - 1$ zeros and itself, $2^b$ in all. "
    "Write `relative_bits`: the bits for indices and values of $v$ bits, fillers included.",
    hints=(
        "An index of b bits counts up to 2 ** b - 1 zeros. A gap of 2 ** b needs one filler, how many does 2 · 2 ** b?",
        "A gap needs gap // 2 ** b fillers. Each filler, and each weight, takes an index and a value.",
    ),
    code="""
def relative_bits(gaps, b, v):
    return sum(1 + gap // 2**b for gap in gaps) * (b + v)
""",
    wrong=_relative,
    right="that is what the library's encoder writes, bit for bit: at low densities fillers are a large part of it.",
)


def _two_of_four(answer: Any) -> str | None:
    rng = np.random.default_rng(4)
    for w in (np.array([0.1, -3.0, 2.0, 0.5]), rng.normal(size=8), rng.normal(size=40)):
        mask = np.asarray(answer(w.copy()), float)
        if wrong := compare("The mask's shape", mask.shape, w.shape):
            return wrong
        if not np.isin(mask, (0, 1)).all():
            return "A mask is made of 1 (the weight stays) and 0 (it goes); this one has other numbers."
        if (kept := mask.reshape(-1, 4).sum(1).tolist()) != [2.0] * (len(w) // 4):
            return f"Of every four neighbours two must stay. Of w = {w.round(2).tolist()} stay {kept}."
        expected = np.asarray(sparsity.mask(w[:, None], 0.5, "2:4"))[:, 0]
        if wrong := compare("The sum of the sizes that stay", np.abs(w * mask).sum(), np.abs(w * expected).sum(), 1e-5):
            return wrong
    return None


two_of_four = Exercise(
    id="sparsity-two_of_four",
    answer="two_of_four",
    question="Write `two_of_four`: the mask (1 and 0) that keeps the two largest in size of every four neighbours of "
    "a vector `w`. Its length is a multiple of four. If several are equally large, take any two.",
    hints=(
        "w.reshape(-1, 4) has a row for each four. np.argsort(np.abs(...), axis=1) orders a row, smallest first.",
        "np.argsort of that argsort is each one's rank in its row, 0 for the smallest: keep ranks 2 and 3.",
    ),
    code="""
def two_of_four(w):
    order = np.argsort(np.abs(w).reshape(-1, 4), axis=1)
    return (np.argsort(order, axis=1) >= 2).astype(float).reshape(w.shape)
""",
    wrong=_two_of_four,
    right="regular enough for a matrix unit: each four weights become two values and two 2-bit positions.",
)
