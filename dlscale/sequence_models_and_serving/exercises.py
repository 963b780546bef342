"""The exercises of 13_sequence_models_and_serving."""

import functools
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


@functools.cache
def _distance(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    changed = _distance(a[:-1], b[:-1]) + (a[-1] != b[-1])
    return min(changed, 1 + _distance(a[:-1], b), 1 + _distance(a, b[:-1]))


def _edits(answer: Any) -> str | None:
    rng = np.random.default_rng(17)
    drawn = [tuple("".join(rng.choice(list("aeious"), n)) for n in rng.integers(0, 8, 2)) for _ in range(30)]
    for heard, said in [("iausie", "iausie"), ("", "esu"), ("esu", ""), ("aae", "ae"), ("easu", "aesu"), *drawn]:
        if wrong := compare(f"For “{heard}” heard and “{said}” said", answer(heard, said), _distance(heard, said), 0):
            return wrong
    return None


edits = Exercise(
    id="sequence_models_and_serving-edits",
    answer="edits",
    question="Write `edits(heard, said)`: the fewest symbols that must be put in, taken out or changed to make the one "
    "string of the other. What does it cost to leave the last symbol of the one, of the other, or of both?",
    hints=(
        "table[i][j] is the distance between the first i symbols of the one and the first j of the other.",
        "The least of three: table[i-1][j] + 1, table[i][j-1] + 1, table[i-1][j-1] + (the last symbols differ).",
    ),
    code="""
def edits(heard, said):
    table = np.zeros((len(heard) + 1, len(said) + 1), int)
    table[:, 0], table[0] = range(len(heard) + 1), range(len(said) + 1)
    for i, a in enumerate(heard, 1):
        for j, b in enumerate(said, 1):
            table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (a != b))
    return int(table[-1, -1])
""",
    wrong=_edits,
    right="counting differences place by place would call all wrong that comes after one symbol too many.",
)


MACHINES = {  # seconds of a batch, and requests a second
    "small caches": ({1: 2e-3, 4: 3e-3, 8: 9e-3, 16: 20e-3, 32: 50e-3}, 1100.0),
    "middling": ({1: 2e-3, 4: 3e-3, 8: 4e-3, 12: 5e-3, 16: 13e-3, 32: 21e-3}, 2100.0),
    "wide": ({1: 5e-3, 4: 5.5e-3, 8: 6e-3, 16: 7e-3, 32: 9e-3}, 2800.0),
    "wide, few users": ({1: 5e-3, 4: 5.5e-3, 8: 6e-3, 16: 7e-3, 32: 9e-3}, 50.0),
}


def late(seconds: dict[int, float], rate: float, max_batch: int, max_wait_ms: float, seed: int = 0) -> float:
    """The milliseconds that 95 % of 3,000 requests do not exceed; infinite if one is refused, with room for 400."""
    found = simulate(poisson(rate, 3000, seed), padded(seconds), Rule(max_batch, max_wait_ms / 1e3, 400))
    return math.inf if found.refused else float(1e3 * np.quantile(found.latency, 0.95))


def _plan(answer: Any) -> str | None:
    for name, (seconds, rate) in MACHINES.items():
        for speed in (1.0, 1.7):
            known = {n: s / speed for n, s in seconds.items()}
            batch, wait = answer(dict(known), rate * speed)
            if int(batch) != batch or not 1 <= batch <= 32 or not 0 <= wait <= 100:
                return "max_batch must be a whole number from 1 to 32, and max_wait_ms from 0 to 100."
            best = min(late(known, rate * speed, size, 0.0, 501) for size in known)
            if not (mine := late(known, rate * speed, int(batch), float(wait), 501)) <= 1.1 * best:
                told = "requests are refused" if math.isinf(mine) else f"95 % are served within {mine:.1f} ms"
                return (
                    f"On the machine “{name}”, {rate * speed:,.0f} requests a second, {told}; {best:.1f} ms can be had."
                )
    return None


plan = Exercise(
    id="sequence_models_and_serving-plan",
    answer="plan",
    question="**Open.** Write `plan(seconds, rate)` for any machine: `seconds` are those of a batch of each size "
    "(others take the next larger one), `rate` is requests a second. Return `(max_batch, max_wait_ms)`, so "
    "that the 95 % latency is within a tenth of the best and nobody is refused (400 may wait). It is tried on the "
    "machines of `exercises.MACHINES`, and on faster ones. `exercises.late(seconds, rate, max_batch, "
    "max_wait_ms)` tries one rule.",
    hints=(
        "How many requests a second can each machine serve with full batches of each size?",
        "Does waiting ever shorten the 95 % latency when the machine is free?",
    ),
    code="""
def plan(seconds, rate):
    most = max(seconds, key=lambda size: size / seconds[size])
    return most, 0.0
""",
    wrong=_plan,
    right="larger batches are not always better: past what fits, a batch costs more than two smaller ones.",
)


def _neurons(answer: Any) -> str | None:
    for registers, gates in ((5_000_000, 1), (5_000_000, 3), (5_000_000, 4), (20_000_000, 1), (1152 * 1152 * 4, 1)):
        wanted = math.isqrt(registers // (4 * gates))
        if wrong := compare(f"For {registers:,} bytes and {gates} gates", answer(registers, gates), wanted, 1e-9):
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
    return math.isqrt(registers // (4 * gates))
""",
    wrong=_neurons,
    right="the lecture names this limit: it depends on the architecture, and a GRU of the same size does not fit.",
)


def _strong(answer: Any) -> str | None:
    rng = np.random.default_rng(23)
    for workers in ((1, 4, 16), (1, 2, 8, 64)):
        seconds = {p: 1e-2 * p ** -rng.uniform(0.4, 0.9) for p in workers}
        sending = {p: 0.0 if p == 1 else rng.uniform(1e-4, 5e-3) for p in workers}
        found = answer(dict(seconds), dict(sending))
        if not isinstance(found, dict) or found.keys() != seconds.keys():
            return "strong must return a dictionary with the numbers of workers that it was given."
        for p in workers:
            wanted = seconds[1] / (p * (seconds[p] + sending[p]))
            if wrong := compare(f"The share with {p} workers", found[p], wanted, 1e-6):
                return wrong
    return None


strong = Exercise(
    id="sequence_models_and_serving-strong",
    answer="strong",
    question="Write `strong(seconds, sending)`: what share of the speed of $P$ workers remains when a fixed batch is "
    "divided among them? `seconds` and `sending` are dictionaries by the number of workers: a step of one worker with "
    "its share of the batch, and the sum over all of them. Return a dictionary, too: 1 if $P$ workers are $P$ times as "
    "fast as one that has the whole batch and sends nothing.",
    hints=(
        "How many times as fast as seconds[1] is a step of P workers, sending included?",
        "The share is that speed-up over P.",
    ),
    code="""
def strong(seconds, sending):
    return {P: seconds[1] / (seconds[P] + sending[P]) / P for P in seconds}
""",
    wrong=_strong,
    right="what is lost to small batches is lost before a byte is sent.",
)

__all__ = ["Callable", "Exercise", "edits", "forward", "forward_table", "late", "neurons", "plan", "strong", "together"]
