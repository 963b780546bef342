"""The exercises of 13_sequence_models_and_serving."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare
from dlscale.sequence_models_and_serving.serving import Rule, padded, poisson, simulate


def _together(answer: Any) -> str | None:
    rng = np.random.default_rng(7)
    steps = [(rng.normal(size=4), rng.normal(size=4)) for _ in range(6)]
    for first, middle, last in zip(steps, steps[1:], steps[2:], strict=False):
        h = rng.normal(size=4)
        one = np.maximum(first[0] + h, first[1])
        wanted = np.maximum(middle[0] + one, middle[1])
        pair = answer(first, middle)
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            return "together must return a pair: the c and the d of both steps as one."
        a, b = np.asarray(pair[0], float), np.asarray(pair[1], float)
        if wrong := compare("The state after both steps, from your pair,", np.maximum(a + h, b), wanted, 1e-6):
            return wrong
        ways = answer(answer(first, middle), last), answer(first, answer(middle, last))
        for mine, other in zip(*ways, strict=True):
            if wrong := compare("What you get from three steps when the last two come first", mine, other, 1e-6):
                return wrong
    return None


together = Exercise(
    id="sequence_models_and_serving-together",
    answer="together",
    question="The best path through a lattice has another recurrence: $h_t = \\max(c_t + h_{t-1},\\; d_t)$. Write "
    "`together(early, late)` for it: two steps, each a pair (c, d), made into the one pair that does both at once.",
    hints=(
        "Put the first step into the second: max(c₂ + max(c₁ + h, d₁), d₂). Which part is added to h?",
        "c₂ + max(x, y) = max(c₂ + x, c₂ + y). jnp.maximum takes the larger of each entry.",
    ),
    code="""
def together(early, late):
    return late[0] + early[0], np.maximum(late[0] + early[1], late[1])
""",
    wrong=_together,
    right="adding and taking the larger obey the same laws as multiplying and adding, so this too runs in log time.",
)


def forward_table(p: Sequence[Sequence[float]], states: Sequence[int]) -> list[list[float]]:
    """alpha[t][s]: the sum over beginnings of paths that are in state s at frame t, in plain Python."""
    table = [[0.0] * len(states) for _ in p]
    for t, now in enumerate(p):
        for s, label in enumerate(states):
            if t == 0:
                before = float(s < 2)
            else:
                before = table[t - 1][s]
                before += table[t - 1][s - 1] if s > 0 else 0.0
                before += table[t - 1][s - 2] if s > 1 and label and label != states[s - 2] else 0.0
            table[t][s] = before * now[label]
    return table


def _forward(answer: Any) -> str | None:
    rng = np.random.default_rng(11)
    for labels, frames in (([1], 3), ([1, 2], 4), ([1, 1], 5), ([2, 1, 2], 6), ([1, 2, 2, 1], 9), ([1], 1)):
        p = rng.dirichlet(np.ones(4), frames)
        states = [0, *(s for label in labels for s in (label, 0))]
        found, wanted = answer(p.copy(), list(states)), np.array(forward_table(p, states))
        what = f"For the labels {labels} and {frames} frames, the table"
        if wrong := compare(what, found, wanted, 1e-6):
            return wrong
    return None


forward = Exercise(
    id="sequence_models_and_serving-forward",
    answer="forward",
    question="Write `forward(p, states)`: the table $\\alpha$, of shape (frames, states), from the recurrence above. "
    "`p` holds the probabilities, (frames, classes), `states` the labels with blanks between. In plain numbers, for "
    "one utterance.",
    hints=(
        "At the first frame only states 0 and 1 are possible: a path begins with the blank or with the first label.",
        "Two states back is allowed if the state is no blank, and not the same label as two states back.",
        "table = np.zeros((len(p), len(states))), then two loops: over t from 1, over s.",
    ),
    code="""
def forward(p, states):
    table = np.zeros((len(p), len(states)))
    table[0, :2] = p[0, states[:2]]
    for t in range(1, len(p)):
        for s, label in enumerate(states):
            before = table[t - 1, s]
            if s > 0:
                before += table[t - 1, s - 1]
            if s > 1 and label != 0 and label != states[s - 2]:
                before += table[t - 1, s - 2]
            table[t, s] = before * p[t, label]
    return table
""",
    wrong=_forward,
    right="frames × states additions in place of classes ^ frames paths.",
)


ODD = {1: 2e-3, 4: 3e-3, 8: 4e-3, 12: 5e-3, 16: 13e-3, 32: 21e-3}  # seconds of a batch: over 12 it leaves a cache
RATES = (100.0, 900.0, 1800.0)
ROOM = 400


def late(rate: float, max_batch: int, max_wait_ms: float, seed: int = 0, count: int = 4000) -> float:
    """The milliseconds that 95 % of the requests do not exceed on the machine `ODD`; infinite if one is refused."""
    found = simulate(poisson(rate, count, seed), padded(ODD), Rule(max_batch, max_wait_ms / 1e3, ROOM))
    return math.inf if found.refused else float(1e3 * np.quantile(found.latency, 0.95))


def _plan(answer: Any) -> str | None:
    for rate in RATES:
        batch, wait = answer(rate)
        if int(batch) != batch or not 1 <= batch <= 32 or not 0 <= wait <= 100:
            return "max_batch must be a whole number from 1 to 32, and max_wait_ms from 0 to 100."
        for seed in (501, 502, 503):
            mine, best = late(rate, int(batch), float(wait), seed), late(rate, _good(rate), 0.0, seed)
            if not mine <= 1.1 * best:
                told = "requests are refused" if math.isinf(mine) else f"95 % are served within {mine:.1f} ms"
                return f"At {rate:g} requests a second {told}; {best:.1f} ms can be had."
    return None


def _good(rate: float) -> int:
    """The best number on arrivals that nobody is judged on."""
    return min((1, 4, 8, 12, 16, 32), key=lambda batch: late(rate, batch, 0.0, 400))


plan = Exercise(
    id="sequence_models_and_serving-plan",
    answer="plan",
    question="**Open.** Another machine needs, for a batch of n, the seconds in `exercises.ODD` (of the next larger n "
    "listed). Write `plan(rate)` that returns `(max_batch, max_wait_ms)` for 100, 900 and 1,800 requests a second, so "
    "that the 95 % latency is within a tenth of the best, on new arrivals. "
    "`exercises.late(rate, max_batch, max_wait_ms)` tries one.",
    hints=(
        "How many requests a second can the machine serve with batches of 8, of 12, of 16?",
        "Does waiting ever shorten the 95 % latency, when the machine is free?",
        "Try all of (1, 4, 8, 12, 16, 32) with 0 ms in a loop over the three rates.",
    ),
    code="""
def plan(rate):
    tried = {batch: late(rate, batch, 0.0) for batch in (1, 4, 8, 12, 16, 32)}
    return min(tried, key=tried.get), 0.0
""",
    wrong=_plan,
    right="larger batches are not always better: past what fits, a batch costs more than two smaller ones.",
)


def _neurons(answer: Any) -> str | None:
    for registers, gates in ((5e6, 1), (5e6, 3), (5e6, 4), (20e6, 1), (1152 * 1152 * 4, 1)):
        wanted = math.isqrt(int(registers) // (4 * gates))
        if wrong := compare(f"For {registers:g} bytes and {gates} gates", answer(registers, gates), wanted, 1e-9):
            return wrong
    return None


neurons = Exercise(
    id="sequence_models_and_serving-neurons",
    answer="neurons",
    question="Write `neurons(registers, gates)`: how many neurons at most may a recurrent layer have, if its recurrent "
    "weights, float32, must fit into so many bytes? A plain layer has 1 matrix of neurons × neurons, a GRU 3, an LSTM "
    "4.",
    hints=("gates × n × n × 4 bytes must not exceed the registers.", "math.isqrt gives the whole part of a root."),
    code="""
def neurons(registers, gates):
    return math.isqrt(int(registers) // (4 * gates))
""",
    wrong=_neurons,
    right="the lecture names this limit: it depends on the architecture, and a GRU of the same size does not fit.",
)

__all__ = ["Callable", "Exercise", "forward", "forward_table", "late", "neurons", "plan", "together"]
