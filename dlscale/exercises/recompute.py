"""The exercises of 07_recomputation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dlscale import recompute
from dlscale.exercises import Exercise, compare


def _activations(answer: Any) -> str | None:
    for sizes, batch in (((784, 256, 256, 10), 32), ((40, 10), 1), ((3, 1000, 5, 70, 2), 7)):
        given = f"widths {sizes} and batch {batch}"
        if wrong := compare(f"The bytes for {given}", answer(sizes, batch), 4.0 * batch * sum(sizes), 1e-9):
            return wrong
    return None


activations = Exercise(
    id="recompute-activations",
    answer="activation_bytes",
    question="Write `activation_bytes`, the bytes of $D$ for an MLP: its input and the output of each layer, "
    "`sizes[0]` to `sizes[-1]` numbers an example, 4 bytes a number, `batch` examples.",
    hints=(
        "Every example has its own activations; the weights are shared and do not count here.",
        "The numbers of one example are sum(sizes).",
    ),
    code="""
def activation_bytes(sizes, batch):
    return 4 * batch * sum(sizes)
""",
    wrong=_activations,
    right="D grows with the batch, W does not: from some batch on, activations are most of the memory.",
)


def _held(answer: Any) -> str | None:
    steps = recompute.every(9, 3).steps(recompute.Chain.uniform(9))
    return compare("The number of arrays", answer, max(len(step.held) for step in steps), 1e-9)


held = Exercise(
    id="recompute-held",
    answer="most_held",
    question="By hand: the plan `[0 1 2] [3 4 5] 6 7 8` keeps, of each bracket, only what comes out at its end, until "
    "its turn comes back. How many activations does it hold at most at the same time? The input does not count.",
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
    id="recompute-best_k",
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


def _extra(answer: Any) -> str | None:
    for n, slots in ((10, 1), (10, 2), (10, 3), (30, 3), (21, 5), (8, 8)):
        expected = recompute.revolve(n, slots).forwards().sum() - n
        if wrong := compare(f"The runs for {n} layers and {slots} slots", answer(n, slots), float(expected), 1e-9):
            return wrong
    return None


extra = Exercise(
    id="recompute-extra",
    answer="extra_runs",
    question=r"Write `extra_runs`, the closed form of Griewank and Walther: with $\beta(s, r) = \binom{s + r}{r}$ and "
    r"the smallest $r$ for which $\beta(s, r) \ge n$, it is $r\,n - \beta(s + 1, r - 1)$. `math.comb` is at hand.",
    hints=(
        "Count r up from 1 while comb(s + r, r) < n.",
        "β(s + 1, r − 1) is comb(s + r, r − 1).",
    ),
    code="""
def extra_runs(n, slots):
    r = 1
    while math.comb(slots + r, r) < n:
        r += 1
    return r * n - math.comb(slots + r, r - 1)
""",
    wrong=_extra,
    right="r runs a layer at most, and the number of layers that s slots can serve so grows like a binomial.",
)
