"""The exercises of 17_code_as_data."""

import functools
from collections import Counter
from typing import Any

import numpy as np

from dlscale.code_as_data import Graph, reach, reordered
from dlscale.code_as_data.corpus import load
from dlscale.course.exercises import Exercise, compare


def _contexts(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    for count, edges, radius in ((5, 4, 1), (6, 6, 2), (9, 9, 3), (12, 10, 2), (4, 0, 2), (3, 3, 5)):
        ends = rng.integers(count, size=(edges, 2))
        ends = ends[ends[:, 0] != ends[:, 1]]
        near = reach(ends, count, radius)
        wanted = {(i, j) for i, j in np.argwhere(near).tolist() if i != j}
        given = [tuple(np.asarray(pair).ravel().tolist()) for pair in answer(ends.copy(), count, radius)]
        case = f"With edges {ends.tolist()} and radius {radius}"
        if wrong := compare(f"{case}, the number of pairs", len(given), len(wanted), 1e-9):
            return wrong
        if strange := sorted(set(given) - wanted):
            return f"{case}, {strange[0]} is no pair."
        if missing := sorted(wanted - set(given)):
            return f"{case}, {missing[0]} is missing."
    return None


contexts = Exercise(
    id="code_as_data-contexts",
    answer="contexts",
    question="Write what the skip-gram learns from: `contexts(edges, count, radius)`. `edges` (n, 2) are of a graph of "
    "`count` statements. Return all pairs (i, j) of different statements that are at most `radius` edges apart, "
    "whatever the direction of the edges; each pair both ways, none twice.",
    hints=(
        "From one statement: begin with itself, and `radius` times add all neighbours of what you have.",
        "Keep, for each statement, the set of those it touches, in both directions. Over `list(near)`, a copy, go with "
        "`near |= touching[k]`: a set must not grow while one goes through it.",
    ),
    code="""
def contexts(edges, count, radius):
    touching = [set() for _ in range(count)]
    for a, b in edges.tolist():
        touching[a].add(b)
        touching[b].add(a)
    pairs = set()
    for i in range(count):
        near = {i}
        for _ in range(radius):
            near = near.union(*(touching[k] for k in near))
        pairs |= {(i, j) for j in near if j != i}
    return pairs
""",
    wrong=_contexts,
    right="the end of a loop's body is near its head, however many lines stand between them.",
)


def _ceiling(answer: Any) -> str | None:
    rng = np.random.default_rng(4)
    cases = [
        (["a", "a", "b", "b", "b"], [0, 1, 1, 1, 0]),
        (["x"] * 6, [0, 1, 2, 0, 1, 2]),
        (list("abcd"), [0, 1, 0, 1]),
    ]
    cases += [([("u", int(i)) for i in rng.integers(4, size=30)], rng.integers(3, size=30).tolist()) for _ in range(3)]
    for seen, labels in cases:
        table = Counter(zip(seen, labels, strict=True))
        best = {what: max(count for (other, _), count in table.items() if other == what) for what in seen}
        wanted = sum(best.values()) / len(labels)
        if wrong := compare(f"For {len(labels)} programs, the ceiling", answer(list(seen), list(labels)), wanted):
            return wrong
    return None


ceiling = Exercise(
    id="code_as_data-ceiling",
    answer="ceiling",
    question="Write `ceiling(seen, labels)`: `seen` is a list with what a reader sees of each program (anything that "
    "can be a key of a dictionary), `labels` says what each one is. Return the largest share that *any* rule can tell "
    "rightly that sees nothing else.",
    hints=(
        "Programs that look the same get the same answer. Which one is best for them?",
        "For each thing seen, count the labels; the best answer is the most frequent one.",
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

NEEDED = 0.9


@functools.cache
def puzzles() -> tuple[list[Graph], np.ndarray, np.ndarray]:
    """Wirings, their statements in any order that the flow allows; which wiring each has; which ones are judged."""
    names, recipes, graphs = load("wirings")
    rng = np.random.default_rng(6)
    couples = sorted(set(recipes))
    judged = set(rng.choice(couples, len(couples) // 3, replace=False).tolist())
    kinds = sorted(set(names))
    wiring = np.array([kinds.index(name) for name in names])
    return [reordered(one, rng) for one in graphs], wiring, np.array([recipe in judged for recipe in recipes])


def told(answer: Any) -> float:
    """The share of judged programs told rightly from bags of the answer's words, by least squares on the others."""
    graphs, wiring, judged = puzzles()
    bags, places = [], {}
    for one in graphs:
        words = Counter(map(str, answer(list(one.statements), one.data.copy())))
        bags.append({places.setdefault(word, len(places)): count for word, count in words.items()})
    table = np.zeros((len(bags), len(places) + 1))
    table[:, -1] = 1
    for row, bag in zip(table, bags, strict=True):
        row[list(bag)] = np.log1p(list(bag.values()))
    known, x = ~judged, table[:, np.append(table[~judged, :-1].any(0), True)]
    inner = x[known] @ x[known].T + 0.1 * np.eye(known.sum())
    scores = x[judged] @ x[known].T @ np.linalg.solve(inner, np.eye(3)[wiring[known]])
    return float((scores.argmax(1) == wiring[judged]).mean())


def _words(answer: Any) -> str | None:
    found = told(answer)
    if found < NEEDED:
        return f"with your words {found:.0%} of the couples held out are told rightly; {NEEDED:.0%} are asked for."
    return None


words = Exercise(
    id="code_as_data-words",
    answer="words",
    question="**Open.** Write `words(statements, edges)`: from the statements of a program (a list of texts) and its "
    "data edges (n, 2), return a list of words, any texts you like. A plain linear model on counts of your words then "
    "tells the three wirings apart; it is judged on couples of operations that it was not given, the statements of all "
    "programs in random order. At least 90 % must be right. The statements themselves as words come to a third.",
    hints=(
        "A count of statements does not change when wires do. What does?",
        "A word may say which statements are connected, how deep one lies, or which of them share an argument.",
    ),
    code="""
def words(statements, edges):
    before = {i: set() for i in range(len(statements))}
    for a, b in edges.tolist():
        before[b] |= {a} | before[a]                 # all that it needs, however far back
    return [f"{statements[a]} before {len(before[a])}" for a in before] + [
        f"{statements[a]} meets {len(edges[edges[:, 0] == a])}" for a in before]
""",
    wrong=_words,
    right="you have written by hand what the network along the flow learns: words for wires.",
)

__all__ = ["Exercise", "ceiling", "contexts", "puzzles", "told", "words"]
