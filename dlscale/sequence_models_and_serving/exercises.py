"""The exercises of 13_sequence_models_and_serving."""

import functools
import inspect
from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare
from dlscale.lab import checks
from dlscale.sequence_models_and_serving.serving import Rule, poisson, simulate


def _together(answer: Any) -> str | None:
    rng = np.random.default_rng(7)
    for _ in range(4):
        first, second = [(rng.normal(size=4), rng.normal(size=4)) for _ in range(2)]
        h = rng.normal(size=4)
        wanted = np.maximum(second[0] + np.maximum(first[0] + h, first[1]), second[1])
        pair = answer(first, second)
        if np.ndim(pair) == 0 or len(pair) != 2:
            return "together must return a pair: the c and the d of both steps as one."
        found = np.maximum(pair[0] + h, pair[1])
        if wrong := compare("The state after both steps, from your pair,", found, wanted, 1e-6):
            return wrong
    return None


together = Exercise(
    id="sequence_models_and_serving-together",
    answer="together",
    hints=(
        "Put the first step into the second: max(c₂ + max(c₁ + h, d₁), d₂). Which part is added to h?",
        "c₂ + max(x, y) = max(c₂ + x, c₂ + y). np.maximum takes the larger of each entry.",
    ),
    code="""
def together(early, late):
    return late[0] + early[0], np.maximum(late[0] + early[1], late[1])
""",
    wrong=_together,
    right="max and + obey the same laws as + and ×, so the depth of this recurrence is logarithmic, too.",
)


def forward_table(p: np.ndarray, states: list[int]) -> np.ndarray:
    """alpha[t, s]: the sum over beginnings of paths that are in state s at frame t, one number after the other."""
    table = np.zeros((len(p), len(states)))
    table[0, :2] = p[0, states[:2]]
    for t in range(1, len(p)):
        for s, label in enumerate(states):
            skip = s > 1 and label != 0 and label != states[s - 2]
            table[t, s] = p[t, label] * table[t - 1, max(0, s - 1 - skip) : s + 1].sum()
    return table


def _forward(answer: Any) -> str | None:
    rng = np.random.default_rng(11)
    for labels, frames in (([1], 3), ([1, 2], 4), ([1, 1], 5), ([2, 1, 2], 6), ([1, 2, 2, 1], 9), ([1], 1)):
        p = rng.dirichlet(np.ones(4), frames)
        states = [0, *(s for label in labels for s in (label, 0))]
        what = f"For the labels {labels} and {frames} frames, the table"
        if wrong := compare(what, answer(p.copy(), list(states)), forward_table(p, states), 1e-6):
            return wrong
    return None


forward = Exercise(
    id="sequence_models_and_serving-forward",
    answer="forward",
    hints=(
        "In the first frame only states 0 and 1 are possible: a path begins with the blank or with the first symbol.",
        "A path may come from two states back if the state is a symbol, and another one than two states back.",
    ),
    code=inspect.getsource(forward_table).replace("forward_table", "forward"),
    wrong=_forward,
    right="frames × states sums take the place of classes ^ frames paths.",
)


def _seconds(slope: float, n: Any) -> float:
    return 0.01 * checks.whole("A batch", int(n)) ** slope  # an empty one would keep the time from passing


def _eager(answer: Any) -> str | None:
    tasks = (([0, 0, 0, 1], 4, 1.0), (poisson(50, 30, 1), 1, 1.0), (poisson(900, 200, 16), 16, 0.5))
    for arrivals, most, slope in tasks:
        arrivals = np.array(arrivals, float)
        seconds = functools.partial(_seconds, slope)
        wanted = simulate(arrivals, seconds, Rule(most)).ends
        found = answer(arrivals.copy(), seconds, most)
        if wrong := compare(f"For {len(arrivals)} requests, at most {most} in a batch, eager", found, wanted, 1e-5):
            return wrong
    return None


eager = Exercise(
    id="sequence_models_and_serving-eager",
    answer="eager",
    hints=(
        "Keep two numbers: when the machine is free, and how many requests it has served. The next batch starts at "
        "the later of two times: the machine is free, and the first request in the queue has arrived.",
        "np.searchsorted(arrivals, start, side='right') counts the requests that have arrived by then.",
    ),
    code="""
def eager(arrivals, seconds, most):
    ends, free, served = np.zeros(len(arrivals)), 0.0, 0
    while served < len(arrivals):
        start = max(free, arrivals[served])
        arrived = np.searchsorted(arrivals, start, side="right")
        batch = min(arrived - served, most)
        free = start + seconds(batch)
        ends[served : served + batch] = free
        served += batch
    return ends
""",
    wrong=_eager,
    right="nobody waits for a batch to fill, and batches still fill by themselves when many users come.",
)
