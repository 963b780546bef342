"""The exercises of 07_recomputation."""

import itertools
import math
from typing import Any

import numpy as np

from dlscale import recomputation
from dlscale.course.exercises import Exercise, compare


def _batch_from(answer: Any) -> str | None:
    for sizes in ((784, *[128] * 8, 10), (784, 256, 256, 10), (40, 10), (3, 1000, 5, 70, 2), (2, 4, 2)):
        weights = sum(a * b for a, b in itertools.pairwise(sizes))
        first = weights // sum(sizes) + 1
        if wrong := compare(f"The batch for widths {sizes}", answer(sizes), first, 1e-9):
            return wrong
    return None


batch_from = Exercise(
    id="recomputation-batch_from",
    answer="batch_from",
    question="Write `batch_from`, the smallest batch at which the activations $D$ of an MLP take more memory than its "
    "weights $W$. `sizes` are the widths, from the input's to the output's; there are no biases. What is it for the "
    "MLP of depth 8 above?",
    hints=(
        "Per example, the activations are sum(sizes) numbers; between widths a and b there are a · b weights.",
        "The batch is a whole number, and at weights = batch · sum(sizes) it is not yet more.",
    ),
    code="""
def batch_from(sizes):
    weights = sum(a * b for a, b in zip(sizes, sizes[1:]))
    return weights // sum(sizes) + 1
""",
    wrong=_batch_from,
    right="D grows with the batch, W does not: from this batch on, activations are the larger part.",
)


def _held(answer: Any) -> str | None:
    steps = recomputation.every(9, 3).steps(recomputation.Chain.uniform(9))
    held = max(len(step.held) for step in steps)
    wrong = compare("The number of arrays", answer, held, 1e-9)
    if wrong and answer in (held + 1, held + 2):
        return f"{wrong} Did you count the gradients, or a snapshot at the end of the last group?"
    return wrong


held = Exercise(
    id="recomputation-held",
    answer="most_held",
    question="By hand: the plan `[0 1 2] [3 4 5] 6 7 8` keeps, of each bracket, only what comes out at its end, until "
    "its turn comes back. How many activations does it hold at most at the same time? The input and the gradients do "
    "not count.",
    hints=(
        "At the turning point: what comes out of the two brackets, and what layers 6, 7 and 8 keep.",
        "Then look at the moment when layers 3 to 5 were computed again. Is that more?",
    ),
    code="most_held = 2 + 3",
    wrong=_held,
    right="two snapshots and three layers in full, where keeping everything holds nine.",
)


def _best_k(answer: Any) -> str | None:
    for n in (4, 30, 100, 144, 1000):
        k = answer(n)
        if wrong := compare(f"k for {n} layers", k, float(np.clip(round(float(k)), 1, n)), 1e-9):
            return f"{wrong} It must be a whole number from 1 to {n}."
        least = min(n / j + j for j in range(1, n + 1))
        if not math.isclose(n / k + k, least):
            return f"For {n} layers, your k = {k} costs {n / k + k:.4g} arrays, and another k costs {least:.4g}."
    return None


best_k = Exercise(
    id="recomputation-best_k",
    answer="best_k",
    question="Write `best_k`, the whole number $k$ for which $n / k + k$ is smallest.",
    hints=(
        "Treat k as a real number, set the derivative 1 − n / k² to zero, then round.",
        "Or try all k from 1 to n: min(range(1, n + 1), key=…).",
    ),
    code="""
def best_k(n):
    return min(range(1, n + 1), key=lambda k: n / k + k)
""",
    wrong=_best_k,
    right="the square root of n: then snapshots and the group at work take the same room, √n each.",
)


def _repeats(answer: Any) -> str | None:
    for n, slots in ((30, 3), (10, 3), (11, 3), (10, 1), (21, 5), (8, 8), (1000, 4)):
        expected = next(r for r in itertools.count() if math.comb(slots + r, r) >= n)
        if wrong := compare(f"The repeats for {n} layers and {slots} slots", answer(n, slots), expected, 1e-9):
            return wrong
    return None


repeats = Exercise(
    id="recomputation-repeats",
    answer="repeats",
    question=r"How many layers do 3 slots serve with at most 2 repeats, and how many repeats do 30 layers need? Find "
    r"it by hand, then write `repeats`, the smallest $r$ for which $\beta(s, r) \ge n$. `math.comb(a, b)` is "
    r"$\binom{a}{b}$.",
    hints=(
        "β(3, 2) = 5 · 4 / 2; the next ones are β(3, 3) = 6 · 5 · 4 / 6 and β(3, 4).",
        "Count r up from 0 while math.comb(slots + r, r) < n.",
    ),
    code="""
def repeats(n, slots):
    r = 0
    while math.comb(slots + r, r) < n:
        r += 1
    return r
""",
    wrong=_repeats,
    right="with one slot more or one repeat more, the number of layers that can be served grows like a binomial.",
)
