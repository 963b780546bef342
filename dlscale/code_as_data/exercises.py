"""The exercises of 17_code_as_data."""

from collections import Counter, namedtuple
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dlscale.code_as_data import reordered
from dlscale.code_as_data.corpus import split
from dlscale.course.exercises import Exercise, compare

PROGRAMS = {
    "x / sqrt(sum(x · x))": (lambda x, y: x / jnp.sqrt((x * x).sum()), {(0, 1), (1, 2), (2, 3)}),
    "exp(x) + sin(y)": (lambda x, y: jnp.exp(x) + jnp.sin(y), {(0, 2), (1, 2)}),
    "a · a + a with a = exp(x)": (lambda x, y: jnp.exp(x) * jnp.exp(x) + jnp.exp(x), {(0, 2), (1, 2), (2, 4), (3, 4)}),
    "the two largest times their places": (lambda x, y: jnp.multiply(*lax.top_k(x, 2)), {(0, 1), (0, 2), (1, 2)}),
    "x + 1": (lambda x, y: x + 1, set()),
}


Jaxpr = namedtuple("Jaxpr", "eqns")
Equation = namedtuple("Equation", "invars outvars")


def _wires(answer: Any) -> str | None:
    for name, (f, wanted) in PROGRAMS.items():
        eqns = []  # as in a jaxpr, with a string for each variable: plain values reach an answer in another process
        for one in jax.make_jaxpr(f)(*np.ones((2, 3), np.float32)).eqns:
            eqns.append(Equation([*map(str, one.invars)], [*map(str, one.outvars)]))
        given = {tuple(np.asarray(pair).ravel().tolist()) for pair in answer(Jaxpr(eqns))}
        if wrong := sorted(given ^ wanted):
            return f"in {name}, the wire {wrong[0]} {'is missing' if wrong[0] in wanted else 'does not exist'}."
    return None


wires = Exercise(
    id="code_as_data-wires",
    answer="wires",
    hints=(
        "Which variables does an equation make, and which does it use? `outvars` and `invars` say so.",
        "Compare every equation with every other one: is one of its `outvars` among the other one's `invars`?",
    ),
    code="""
def wires(jaxpr):
    pairs = set()
    for i, first in enumerate(jaxpr.eqns):
        for j, second in enumerate(jaxpr.eqns):
            if any(variable in second.invars for variable in first.outvars):
                pairs.add((i, j))
    return pairs
""",
    wrong=_wires,
    right="arguments and constants have no wire, because no statement makes them.",
)


def _ceiling(answer: Any) -> str | None:
    cases = [("aabbb", "10011", 0.6), ("xxxxxx", "012012", 1 / 3), ("abcd", "0101", 1), ("abcabca", "0110212", 5 / 7)]
    for seen, labels, wanted in cases:
        given = answer([("seen", what) for what in seen], [int(label) for label in labels])
        if wrong := compare(f"For {len(labels)} programs, the ceiling", given, wanted):
            return wrong
    return None


ceiling = Exercise(
    id="code_as_data-ceiling",
    answer="ceiling",
    hints=(
        "Programs that look the same get the same answer. Which answer is best for them?",
        "Count the labels of everything that looks the same. The best answer is the most frequent label.",
    ),
    code="""
def ceiling(seen, labels):
    counts = {}
    for what, label in zip(seen, labels):
        counts.setdefault(what, Counter())[label] += 1
    return sum(max(own.values()) for own in counts.values()) / len(labels)
""",
    wrong=_ceiling,
    right="what is not in the input, no network can find there.",
)


def _words(answer: Any) -> str | None:
    """Least squares on counts of the answer's words, for pairs held out, the statements in any order of the flow."""
    rng, parts = np.random.default_rng(6), split(7)
    graphs = [reordered(one, rng) for part in ("train", "known") for one in parts[part][0]]
    bags = [Counter(map(str, answer(list(one.statements), one.data.copy()))) for one in graphs]
    count, classes = len(parts["train"][0]), np.eye(3)[parts["train"][1]]
    places = {word: i for i, word in enumerate(set().union(*bags[:count]))}
    x = np.zeros((len(bags), len(places) + 1))
    x[:, -1] = 1
    for row, bag in zip(x, bags, strict=True):
        for word in bag.keys() & places:
            row[places[word]] = np.log1p(bag[word])
    inner = x[:count] @ x[:count].T + 0.1 * np.eye(count)
    scores = x[count:] @ x[:count].T @ np.linalg.solve(inner, classes)
    found = (scores.argmax(1) == parts["known"][1]).mean()
    return None if found >= 0.9 else f"your words get {found:.0%} right; 90% are asked for."


words = Exercise(
    id="code_as_data-words",
    answer="words",
    hints=(
        "A count of statements does not change when the wires do. What does?",
        "A word may say which two statements a wire joins, or how many statements come before one.",
    ),
    code="""
def words(statements, edges):
    before = {i: set() for i in range(len(statements))}
    for a, b in edges.tolist():
        before[b] |= {a} | before[a]  # all that it needs, however far back
    return [f"{statements[i]} after {len(before[i])}" for i in before] + [
        f"{statements[a]} > {statements[b]}" for a, b in edges.tolist()
    ]
""",
    wrong=_words,
    right="you have written by hand what the network along the wires learns.",
)
