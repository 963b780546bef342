"""The recorded experiments of notebook 17: vectors of statements, what programs compute, their wiring, their time.

The programs themselves are recorded by `corpus`. Every network here reads them as numbers of statements and edges.
"""

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from dlscale.code_as_data import (
    UNKNOWN,
    Graph,
    Rng,
    Vocabulary,
    analogies,
    answered,
    corpus,
    hits,
    kind,
    of_instructions,
    pairs,
    reach,
    reordered,
    rewired,
    skip_gram,
    unit,
)
from dlscale.course import records
from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import program
from dlscale.lab.program import Reader

EARLY = 20  # the step whose loss hardly hangs on the machine

# Vectors of statements

GROUPS = (
    ("sin", "cos", "tan"), ("asin", "acos", "atan"), ("sinh", "cosh", "tanh"), ("asinh", "acosh", "atanh"),
    ("exp", "exp2", "expm1"), ("log", "log1p"), ("sqrt", "rsqrt", "cbrt"), ("floor", "ceil", "round"),
    ("lt", "le", "gt", "ge"), ("eq", "ne"), ("and", "or", "xor", "not"), ("max", "min"), ("add", "sub"), ("mul", "div"),
    ("reduce_max", "reduce_min"), ("reduce_and", "reduce_or"), ("argmax", "argmin"), ("reduce_sum", "reduce_prod"),
    ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), ("erf", "erfc", "erf_inv"),
    ("lgamma", "digamma", "polygamma", "zeta"), ("bessel_i0e", "bessel_i1e"), ("slice", "dynamic_slice", "gather"),
    ("dynamic_update_slice", "scatter", "scatter-add"), ("shift_left", "shift_right_logical", "shift_right_arithmetic"),
    ("lu", "cholesky", "geqrf", "eigh", "svd"), ("real", "imag", "conj"), ("while", "scan"), ("pow", "integer_pow"),
    ("igamma", "igammac"), ("squeeze", "reshape", "transpose"), ("dot_general", "conv_general_dilated"),
    ("switch", "join"), ("is_finite", "sign"),
)  # instructions that do related things, written down before any vector was trained  # fmt: skip
COUPLES = (
    ("add", "sub"), ("mul", "div"), ("max", "min"), ("lt", "gt"), ("eq", "ne"), ("and", "or"), ("add", "mul"),
    ("reduce_max", "reduce_min"), ("reduce_sum", "reduce_prod"), ("sin", "cos"), ("exp", "log"), ("argmax", "argmin"),
    ("floor", "ceil"), ("cumsum", "cumprod"), ("sqrt", "rsqrt"), ("reduce_and", "reduce_or"), ("sub", "div"),
)  # for analogies, likewise  # fmt: skip
CONTEXTS = ("flow", "sequence")
VECTORS_SEEDS = range(30, 38)
FIRST_SEEDS = range(20, 28)  # of programs with control
CONTROL_SEEDS = range(100, 124)  # for a question that came up with the others
RADII = (1, 2, 3, 4, 5, 6)
CONTROL_RADII = (1, 2, 3)
RADIUS = 2  # of the vectors that the networks below read
PIECES = {"instruction": slice(1), "types": slice(1, None), "instruction and types": slice(None)}


@functools.cache
def vocabulary() -> Vocabulary:
    return Vocabulary.of(corpus.load("corpus").graphs)


@functools.cache
def neighbours(context: str) -> np.ndarray:
    """(n, 2) statements in each other's context, all over the corpus."""
    return pairs(corpus.load("corpus").graphs, vocabulary(), context, RADIUS)


@functools.cache
def vectors(context: str, seed: int) -> np.ndarray:
    """(words, width). "untrained" are drawn at random for each statement, those of `PIECES` for each of its pieces.

    Then a statement's vector is the sum of those of its pieces, of length one.
    """
    size = len(vocabulary().words)
    if context == "untrained":
        return unit(np.random.default_rng([seed, 1]).normal(size=(size, 32))).astype(np.float32)
    if context in PIECES:
        rng = np.random.default_rng([seed, 2])
        drawn: dict[Any, np.ndarray] = defaultdict(lambda: rng.normal(size=32))
        own = [[drawn[piece] for piece in pieces(word)[PIECES[context]]] for word in vocabulary().words]
        return unit(np.array([np.sum(vectors, axis=0) for vectors in own])).astype(np.float32)
    return unit(skip_gram(neighbours(context), size, seed=seed))


def pieces(word: str) -> list[Any]:
    """Of a statement's text: the instruction, the kind of its result, the kind of each operand with its place."""
    name, result, operands = (*word.split(" ", 2), "", "")[:3]
    return [name, ("result", result), *enumerate(operands.strip("()").split(", "))]


@functools.lru_cache(maxsize=16)
def neighbours_within(context: str, radius: int, programs: str = "all", draw: int = 0) -> np.ndarray:
    """`programs`: "all", those "with control", a loop or a choice, or "as many without", drawn at random."""
    graphs = corpus.load("corpus").graphs
    control = [one for one in graphs if len(one.control) or loops(one)]
    if programs == "with control":
        graphs = control
    elif programs == "as many without":
        others = [one for one in graphs if not (len(one.control) or loops(one))]
        drawn = np.random.default_rng(draw).choice(len(others), len(control), replace=False)
        graphs = [others[i] for i in drawn]
    return pairs(graphs, vocabulary(), context, radius)


def loops(one: Graph) -> bool:
    """Whether an edge leads back."""
    return bool((one.data[:, 0] >= one.data[:, 1]).any())


def vectors_trial(context: str, radius: int, programs: str, seed: int) -> dict[str, float]:
    """In percent: related instructions among the five nearest, in all groups and in both halves of them; analogies.

    Every other group is to choose the radius by ("chosen_by"), the others are the test. Vectors without a context are
    drawn at random.
    """
    words = vocabulary()
    if context == "untrained":
        own = vectors(context, seed)
    else:
        draw = seed if programs == "as many without" else 0
        own = skip_gram(neighbours_within(context, radius, programs, draw), len(words.words), seed=seed)
    table, names = of_instructions(own, words), list(words.instructions)
    halves = {"hits": GROUPS, "chosen_by": GROUPS[::2], "test": GROUPS[1::2]}
    found = {name: hits(table, names, groups).mean() for name, groups in halves.items()}
    asked = analogies(words, COUPLES)
    found |= {f"analogies_{way}": answered(own, asked, way).mean() for way in ("both", "b", "c")}
    return {name: round(100 * float(value), 3) for name, value in found.items()}


def vectors_plan(run: RunTrials) -> None:
    parts = (
        ("all", RADII, VECTORS_SEEDS),
        ("with control", CONTROL_RADII, [*FIRST_SEEDS, *CONTROL_SEEDS]),
        ("as many without", CONTROL_RADII, CONTROL_SEEDS),
    )
    run([{"context": "untrained", "radius": 0, "programs": "all", "seed": seed} for seed in VECTORS_SEEDS])
    for programs, radii, seeds in parts:
        for context, radius in itertools.product(CONTEXTS, radii):
            run([{"context": context, "radius": radius, "programs": programs, "seed": seed} for seed in seeds])


VECTORS_MEASURES = ("hits", "chosen_by", "test", "analogies_both", "analogies_b", "analogies_c")
VECTORS = Experiment(
    "code_as_data-vectors", "related instructions and analogies, by vectors from two kinds of context",
    vectors_trial, vectors_plan, dict.fromkeys(VECTORS_MEASURES, 1.0),
    chaotic=VECTORS_MEASURES, drawn={"context": "flow", "radius": 4, "programs": "all"},
)  # fmt: skip

REDRAWN_SEEDS = range(60, 68)
WIRES = ("own", "same program", "redrawn", "text")


def counted(found: np.ndarray, size: int) -> np.ndarray:
    """(size, size) positive pointwise mutual information of pairs (n, 2): vectors without training.

    Skip-gram approximates such a table by products of short vectors (Levy & Goldberg 2014).
    """
    table = np.zeros((size, size))
    np.add.at(table, tuple(found.T), 1)
    chance = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return np.log(np.maximum(table, 1e-12) / np.maximum(chance, 1e-12)).clip(0)


def of_the_same_program(graphs: Sequence[Graph], radius: int, rng: Rng) -> np.ndarray:
    """(n, 2) as many pairs as each program has along the flow, of any two of its statements."""
    found = []
    for one in graphs:
        numbers = vocabulary().encode(one)
        count = int(reach(one.flow, len(numbers), radius).sum()) - len(numbers)
        first = rng.integers(len(numbers), size=count)
        second = (first + rng.integers(1, max(len(numbers), 2), size=count)) % len(numbers)
        found.append(numbers[np.stack([first, second], axis=1)])
    return np.concatenate(found)


def redrawn_trial(wires: str, way: str, radius: int, seed: int) -> dict[str, float]:
    """As `vectors_trial`, by skip-gram or by counts.

    `wires`: the flow, the text, any two statements of the same program, or the flow with as many edges drawn at random.
    """
    words, rng, graphs = vocabulary(), np.random.default_rng([seed, 6]), corpus.load("corpus").graphs
    size = len(words.words)
    if wires == "same program":
        found = of_the_same_program(graphs, radius, rng)
    else:
        graphs = [rewired(one, rng) for one in graphs] if wires == "redrawn" else graphs
        found = pairs(graphs, words, "sequence" if wires == "text" else "flow", radius)
    own = skip_gram(found, size, seed=seed) if way == "skip-gram" else counted(found, size)
    table, names = of_instructions(own, words), list(words.instructions)
    asked = {"hits": GROUPS, "chosen_by": GROUPS[::2], "test": GROUPS[1::2]}
    return {name: round(100 * float(hits(table, names, groups).mean()), 3) for name, groups in asked.items()}


def redrawn_plan(run: RunTrials) -> None:
    """Counts hang on no seed, but for what is drawn."""
    for wires, radius in itertools.product(WIRES, RADII):
        seeds = REDRAWN_SEEDS[: 1 if wires in ("own", "text") else 3]
        run([{"wires": wires, "way": "counts", "radius": radius, "seed": seed} for seed in seeds])
    for radius, wires in itertools.product(RADII, WIRES[:3]):
        run([{"wires": wires, "way": "skip-gram", "radius": radius, "seed": seed} for seed in REDRAWN_SEEDS])


REDRAWN_MEASURES = ("hits", "chosen_by", "test")
REDRAWN = Experiment(
    "code_as_data-redrawn", "related instructions, by vectors from the flow, the text, the same program, redrawn wires",
    redrawn_trial, redrawn_plan, dict.fromkeys(REDRAWN_MEASURES, 1.0),
    chaotic=REDRAWN_MEASURES, drawn={"wires": "same program", "way": "counts", "radius": 1},
)  # fmt: skip

# Networks that read programs


class Batch(NamedTuple):
    """Programs, padded: statements (n, length), which of them there are, edges (n, length, length), row to column."""

    statements: np.ndarray
    there: np.ndarray
    edges: np.ndarray


def padded(programs: Sequence[Graph], length: int, wires: str = "flow") -> Batch:
    """`wires`: "flow", "sequence", or "none"."""
    words, count = vocabulary(), len(programs)
    statements, there = np.zeros((count, length), np.int32), np.zeros((count, length), np.float32)
    edges = np.zeros((count, length, length), np.float32)
    for i, one in enumerate(programs):
        numbers = words.encode(one)[:length]
        statements[i, : len(numbers)], there[i, : len(numbers)] = numbers, 1
        if wires != "none":
            ends = getattr(one, wires)
            ends = ends[(ends < length).all(1)]
            edges[i, ends[:, 0], ends[:, 1]] = 1
    return Batch(statements, there, edges)


class Arm(NamedTuple):
    """What reads a program: a network, on vectors from a context, along wires, of programs left as they are or not."""

    network: str
    context: str = "flow"
    wires: str = "none"
    programs: str = "as they are"


ARMS = {
    "bag": Arm("bag"),
    "bag, hidden layer": Arm("bag deep"),
    "mean of vectors": Arm("mean"),
    "mean, untrained": Arm("mean", "untrained"),
    "recurrent": Arm("recurrent"),
    "recurrent, untrained": Arm("recurrent", "untrained"),
    "recurrent, instruction": Arm("recurrent", "instruction"),
    "recurrent, types": Arm("recurrent", "types"),
    "recurrent, instruction and types": Arm("recurrent", "instruction and types"),
    "recurrent, shuffled": Arm("recurrent", programs="shuffled"),
    "along the flow": Arm("graph", wires="flow"),
    "along the flow, untrained": Arm("graph", "untrained", "flow"),
    "along the sequence": Arm("graph", wires="sequence"),
    "along redrawn wires": Arm("graph", wires="flow", programs="rewired"),
}
HIDDEN, ROUNDS, STEPS, BATCH, LOOK = 32, 3, 160, 48, 40
RATES = (2.0**-10, 2.0**-8, 2.0**-6, 2.0**-4)
LONGEST = {"families": 48, "wirings": 20}  # statements of a program that a network reads; what follows is cut off


def _dense(key: Array, inside: int, out: int) -> Array:
    return jax.random.normal(key, (inside, out)) / jnp.sqrt(inside)


def init(network: str, key: Array, width: int, words: int, classes: int) -> dict[str, Array]:
    keys = jax.random.split(key, 6)
    inside = {"bag": words, "bag deep": words, "mean": 2 * width, "recurrent": 2 * HIDDEN, "graph": 2 * HIDDEN}[network]
    params = {"b": jnp.zeros(classes)}
    if network in ("bag deep", "mean"):
        params |= {"w1": _dense(keys[0], inside, HIDDEN), "b1": jnp.zeros(HIDDEN)}
        inside = HIDDEN
    elif network == "recurrent":
        params |= {
            "in": _dense(keys[0], width, 3 * HIDDEN),
            "on": _dense(keys[1], HIDDEN, 3 * HIDDEN),
            "b1": jnp.zeros(3 * HIDDEN),
        }
    elif network == "graph":
        params |= {"in": _dense(keys[0], width, HIDDEN), "b1": jnp.zeros(HIDDEN)}
        params |= {
            "on": jax.vmap(lambda k: _dense(k, 3 * HIDDEN, HIDDEN))(jax.random.split(keys[1], ROUNDS)),
            "b2": jnp.zeros((ROUNDS, HIDDEN)),
        }
    return params | {"w": _dense(keys[5], inside, classes) * (0.1 if network == "bag" else 1)}


def _pooled(h: Array, there: Array) -> Array:
    """Mean and maximum over the statements that there are."""
    mean = (h * there[..., None]).sum(1) / there.sum(1)[:, None]
    return jnp.concatenate([mean, jnp.where(there[..., None] > 0, h, -jnp.inf).max(1)], axis=1)


def logits(network: str, params: dict[str, Array], table: Array, batch: Batch) -> Array:
    """(programs, classes). `table` (words, width) has the vectors of the statements; they stay as they are."""
    statements, there, edges = batch
    if network.startswith("bag"):
        h = jnp.log1p((jax.nn.one_hot(statements, len(table)) * there[..., None]).sum(1))
    else:
        x = table[statements] * jnp.sqrt(table.shape[1])
        if network == "mean":
            h = _pooled(x, there)
        elif network == "recurrent":
            h = _pooled(_states(params, x, there), there)
        else:
            h = _pooled(_passed(params, x, there, edges), there)
    if network in ("bag deep", "mean"):
        h = jax.nn.relu(h @ params["w1"] + params["b1"])
    return h @ params["w"] + params["b"]


def _states(params: dict[str, Array], x: Array, there: Array) -> Array:
    """States of gated recurrent units (Cho et al. 2014) after each statement."""

    def step(h: Array, one: tuple[Array, Array]) -> tuple[Array, Array]:
        x, there = one
        (xz, xr, xn), (hz, hr, hn) = jnp.split(x, 3, axis=1), jnp.split(h @ params["on"], 3, axis=1)
        z, r = jax.nn.sigmoid(xz + hz), jax.nn.sigmoid(xr + hr)
        new = (1 - z) * jnp.tanh(xn + r * hn) + z * h
        h = jnp.where(there[:, None] > 0, new, h)
        return h, h

    inputs = (x @ params["in"] + params["b1"]).swapaxes(0, 1)
    return jax.lax.scan(step, jnp.zeros((len(x), HIDDEN)), (inputs, there.T))[1].swapaxes(0, 1)


def _passed(params: dict[str, Array], x: Array, there: Array, edges: Array) -> Array:
    """Messages along the edges: each statement hears the mean of those before it, and of those after it."""
    before = edges.swapaxes(1, 2) / jnp.maximum(edges.sum(1)[..., None], 1)
    after = edges / jnp.maximum(edges.sum(2)[..., None], 1)
    h = jax.nn.relu(x @ params["in"] + params["b1"])
    for w, b in zip(params["on"], params["b2"], strict=True):
        h = h + jax.nn.relu(jnp.concatenate([h, before @ h, after @ h], axis=-1) @ w + b)
    return h * there[..., None]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _train(
    network: str, classes: int, rate: Array, key: Array, table: Array, rows: Array, parts: Any
) -> tuple[Any, ...]:
    """Adam on rows (looks, steps, batch) of parts["train"]; after each look the share right of every part; losses."""
    params = init(network, key, table.shape[1], len(table), classes)
    optimizer = optax.adam(rate)

    def loss(params: Any, batch: Batch, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits(network, params, table, batch), y).mean()

    def step(state: Any, own: Array) -> tuple[Any, Array]:
        params, memory = state
        batch, y = jax.tree.map(lambda a: a[own], parts["train"])
        value, gradient = jax.value_and_grad(loss)(params, batch, y)
        updates, memory = optimizer.update(gradient, memory)
        return (optax.apply_updates(params, updates), memory), value

    def look(state: Any, rows: Array) -> tuple[Any, Any]:
        state, losses = jax.lax.scan(step, state, rows)
        right = {
            name: (logits(network, state[0], table, batch).argmax(1) == y).mean()
            for name, (batch, y) in parts.items()
            if name != "train"
        }
        return state, (right, losses, state[0])

    return jax.lax.scan(look, (params, optimizer.init(params)), rows)[1]


def fitted(task: str, arm: str, rate: float, seed: int) -> tuple[dict[str, float], Any]:
    """Train one arm on parts["train"]; stopped where most of parts["validation"] is right.

    Returns shares right in percent, the loss of an early step, and the parameters.
    """
    chosen, rng = ARMS[arm], np.random.default_rng([seed, 5])
    parts, classes = (
        (family_parts(seed), len(FAMILIES_TOLD)) if task == "families" else (wiring_parts(seed), len(corpus.WIRINGS))
    )
    changed: dict[str, Callable[[Graph], Graph]] = {
        "as they are": lambda one: one,
        "rewired": lambda one: rewired(one, rng),
        "shuffled": lambda one: Graph(tuple(rng.permutation(one.statements).tolist()), one.data, one.control),
    }
    ready = {
        name: (
            padded([changed[chosen.programs](one) for one in programs], LONGEST[task], chosen.wires),
            y.astype(np.int32),
        )
        for name, (programs, y) in parts.items()
    }
    rows = rng.integers(len(ready["train"][1]), size=(STEPS // LOOK, LOOK, BATCH))
    table = jnp.asarray(vectors(chosen.context, seed))
    right, losses, params = _train(chosen.network, classes, np.float32(rate), jax.random.key(seed), table, rows, ready)
    best = int(np.argmax(right["validation"]))
    found = {name: round(100 * float(share[best]), 3) for name, share in right.items()}
    return found | {"early_loss": float(losses.ravel()[EARLY])}, jax.tree.map(lambda leaf: leaf[best], params)


def read(task: str, params: dict[str, Array], table: np.ndarray, one: Graph) -> np.ndarray:
    """Probabilities of the classes for one program, by a network along the flow that `fitted` trained."""
    batch = padded([one], LONGEST[task], "flow")
    return np.asarray(_probabilities(params, jnp.asarray(table), batch)[0])


@jax.jit
def _probabilities(params: dict[str, Array], table: Array, batch: Batch) -> Array:
    return jax.nn.softmax(logits("graph", params, table, batch))


def summary_of(table: np.ndarray, one: Graph) -> np.ndarray:
    """The mean vector of a program's statements, of length one."""
    return unit(table[vocabulary().encode(one)].mean(0))


# What does it compute? Whole recipes are held out.

FAMILY_SEEDS = range(8)
LEARNT_SEEDS = range(20, 28)  # for a question that came up with the first ones
FAMILIES_TOLD = tuple(corpus.FAMILIES)


def family_parts(seed: int) -> dict[str, tuple[list[Graph], np.ndarray]]:
    """Of the six recipes of each family three to train on, one for validation, two for the test."""
    names, recipes, graphs = corpus.load("families")
    rng, part_of = np.random.default_rng([seed, 3]), {}
    for family, (_, own) in corpus.FAMILIES.items():
        order = ["train"] * 3 + ["validation"] + ["test"] * 2
        part_of |= {(family, recipe): part for recipe, part in zip(own, rng.permutation(order), strict=True)}
    found = {}
    for part in ("train", "validation", "test"):
        own = [i for i, key in enumerate(zip(names, recipes, strict=True)) if part_of[key] == part]
        found[part] = [graphs[i] for i in own], np.array([FAMILIES_TOLD.index(names[i]) for i in own])
    return found


def until_inside(run: RunTrials, arm: str, seeds: Sequence[int]) -> float:
    """All rates with all seeds; a best rate at the edge widens the grid, until it is inside, five times at most.

    Returns the best rate.
    """
    means: dict[float, float] = {}
    new = list(RATES)
    while new and len(means) < len(RATES) + 5:
        for rate in new:
            found = run([{"arm": arm, "rate": rate, "seed": seed} for seed in seeds])
            means[rate] = float(np.mean([trial["validation"] for trial in found]))
        rates = sorted(means)
        best = max(rates, key=lambda rate: means[rate])
        low = best == rates[0] and means[best] > means[rates[1]]
        high = best == rates[-1] and means[best] > means[rates[-2]]
        new = [best / 4] if low else [best * 4] if high else []
    return best


def family_trial(arm: str, rate: float, seed: int) -> dict[str, float]:
    return fitted("families", arm, rate, seed)[0]


def family_plan(run: RunTrials) -> None:
    arms = [arm for arm in ARMS if "untrained" not in arm or arm == "recurrent, untrained"]
    for arm in arms:
        best = until_inside(run, arm, FAMILY_SEEDS)
        if arm in ("recurrent", "recurrent, instruction and types"):
            run([{"arm": arm, "rate": best, "seed": seed} for seed in LEARNT_SEEDS])


FAMILY = Experiment(
    "code_as_data-families", "what a program computes, of recipes held out, by twelve arms at four or more rates",
    family_trial, family_plan, {"validation": 2.0, "test": 2.0, "early_loss": 0.05},
    chaotic=("validation", "test"), drawn={"arm": "recurrent"},
)  # fmt: skip

VECTOR_FAMILIES = (
    "softmax",
    "standardise",
    "sort",
    "running sum",
)  # of one vector each: arguments do not tell them apart
ALIKE_ARMS = ("bag", "bag, hidden layer", "recurrent", "along the flow", "along the sequence")


def kinds() -> list[tuple[str, ...]]:
    """Of each program of the families, in the order of the record: the kinds of its arguments."""
    return [tuple(kind(arg) for arg in source.args) for source in corpus.families()]


def best_rate(record: records.Record, arm: str) -> float:
    """By validation, with the seeds that all rates have."""
    rates = record.options("rate", arm=arm)
    return max(rates, key=lambda rate: record.values("validation", arm=arm, rate=rate)[: len(FAMILY_SEEDS)].mean())


def alike_trial(arm: str, rate: float, seed: int) -> dict[str, float]:
    """Percent right of the test's programs of `VECTOR_FAMILIES`, by an arm that was trained on all families."""
    programs, y = family_parts(seed)["test"]
    own = np.isin(y, [FAMILIES_TOLD.index(name) for name in VECTOR_FAMILIES])
    found, params = fitted("families", arm, rate, seed)
    chosen, table = ARMS[arm], jnp.asarray(vectors(ARMS[arm].context, seed))
    batch = padded(
        [one for one, wanted in zip(programs, own, strict=True) if wanted], LONGEST["families"], chosen.wires
    )
    told = logits(chosen.network, params, table, batch).argmax(1)
    return {"alike": round(100 * float((told == y[own]).mean()), 3), "early_loss": found["early_loss"]}


def alike_plan(run: RunTrials) -> None:
    told = records.read(FAMILY.id)
    for arm in ALIKE_ARMS:
        rate = best_rate(told, arm)
        run([{"arm": arm, "rate": rate, "seed": seed} for seed in FAMILY_SEEDS])


ALIKE = Experiment(
    "code_as_data-alike", "what a program computes, where its arguments do not tell, by five arms",
    alike_trial, alike_plan, {"alike": 3.0, "early_loss": 0.05}, chaotic=("alike",), drawn={"arm": "recurrent"},
)  # fmt: skip

# How is it wired? Instructions are held out.

WIRING_SEEDS = range(8)


def wiring_parts(seed: int) -> dict[str, tuple[list[Graph], np.ndarray]]:
    """Half of the operations to train with, a quarter for validation, a quarter for the test.

    "seen": couples of the first half that were held out. "test": neither operation is in any program to train on, and
    one at least in none for validation. "reordered": those of "seen", their statements in another order.
    """
    names, recipes, graphs = corpus.load("wirings")
    rng = np.random.default_rng([seed, 4])
    known, other = set(), set()
    for table in (corpus.ONE_BY_ONE, corpus.ACROSS):
        order = rng.permutation(list(table)).tolist()
        known |= set(order[: len(order) // 2])
        other |= set(order[len(order) // 2 : len(order) * 3 // 4])
    couples = sorted({recipe for recipe in recipes if set(recipe.split()) <= known})
    held_out = set(rng.choice(couples, len(couples) // 5, replace=False).tolist())
    rows: dict[str, list[int]] = {"train": [], "validation": [], "seen": [], "test": []}
    for i, recipe in enumerate(recipes):
        own = set(recipe.split())
        if own <= known:
            rows["seen" if recipe in held_out else "train"].append(i)
        elif not own & known:
            rows["validation" if own <= other else "test"].append(i)
    found = {
        part: ([graphs[i] for i in own], np.array([corpus.WIRINGS.index(names[i]) for i in own]))
        for part, own in rows.items()
    }
    return found | {"reordered": ([reordered(one, rng) for one in found["seen"][0]], found["seen"][1])}


def wiring_trial(arm: str, rate: float, seed: int) -> dict[str, float]:
    return fitted("wirings", arm, rate, seed)[0]


def wiring_plan(run: RunTrials) -> None:
    for arm in ARMS:
        if arm not in ("recurrent, instruction", "recurrent, types"):
            until_inside(run, arm, WIRING_SEEDS)


WIRING_MEASURES = ("validation", "seen", "test", "reordered")
WIRING = Experiment(
    "code_as_data-wirings", "how two operations are wired, by twelve arms at four or more rates",
    wiring_trial, wiring_plan, dict.fromkeys(WIRING_MEASURES, 3.0) | {"early_loss": 0.05},
    chaotic=WIRING_MEASURES, drawn={"arm": "along the flow", "rate": 2.0**-8, "seed": 0},
)  # fmt: skip


ONE_WORD = "along the flow, one word"


def bare(one: Graph) -> Graph:
    """The same wires, with one word for all statements."""
    return Graph((UNKNOWN,) * len(one.statements), one.data, one.control)


def graph_fitted(
    context: str, change: Callable[[Graph], Graph], rate: float, seed: int
) -> tuple[dict[str, float], Any]:
    """As `fitted`, of the network along the flow, on other vectors or changed programs, without the early loss."""
    ready = {
        name: (padded([change(one) for one in programs], LONGEST["wirings"]), y.astype(np.int32))
        for name, (programs, y) in wiring_parts(seed).items()
    }
    rng, table = np.random.default_rng([seed, 5]), jnp.asarray(vectors(context, seed))
    rows = rng.integers(len(ready["train"][1]), size=(STEPS // LOOK, LOOK, BATCH))
    key, classes = jax.random.key(seed), len(corpus.WIRINGS)
    right, _, params = _train("graph", classes, np.float32(rate), key, table, rows, ready)
    best = int(np.argmax(right["validation"]))
    found = {name: round(100 * float(share[best]), 3) for name, share in right.items()}
    return found, jax.tree.map(lambda leaf: leaf[best], params)


def bare_trial(arm: str, rate: float, seed: int) -> dict[str, float]:
    return graph_fitted("untrained", bare, rate, seed)[0]


def bare_plan(run: RunTrials) -> None:
    until_inside(run, ONE_WORD, WIRING_SEEDS)


BARE = Experiment(
    "code_as_data-bare", "how two operations are wired, by a network along the flow that sees the wires alone",
    bare_trial, bare_plan, dict.fromkeys(WIRING_MEASURES, 3.0),
    chaotic=WIRING_MEASURES, drawn={"rate": 2.0**-4},
)  # fmt: skip

TYPES_ONLY = "along the flow, types"
KNOWN_ARMS = (
    "along the flow", "along the flow, untrained", TYPES_ONLY, ONE_WORD, "recurrent", "recurrent, untrained",
)  # fmt: skip
KNOWN_SEEDS = range(40, 56)


def known_trial(arm: str, rate: float, seed: int) -> dict[str, float]:
    """Percent right of the test's programs: of all, of those without a statement that the vocabulary lacks.

    "unknown": percent of the programs that have one. All such statements read as one word, and a network may learn
    what the unknown one does from the operations that it was trained on.
    """
    programs, y = wiring_parts(seed)["test"]
    known = np.array([vocabulary().encode(one).min() > 0 for one in programs])
    if arm in (ONE_WORD, TYPES_ONLY):
        chosen = Arm("graph", "untrained" if arm == ONE_WORD else "types", "flow")
        change = bare if arm == ONE_WORD else lambda one: one
        found, params = graph_fitted(chosen.context, change, rate, seed)
        programs = [change(one) for one in programs]
    else:
        chosen, (found, params) = ARMS[arm], fitted("wirings", arm, rate, seed)
    batch, table = padded(programs, LONGEST["wirings"], chosen.wires), jnp.asarray(vectors(chosen.context, seed))
    right = np.asarray(logits(chosen.network, params, table, batch).argmax(1)) == y
    shares = {"known": round(100 * float(right[known].mean()), 3), "unknown": round(100 * float(1 - known.mean()), 3)}
    return shares | {"test": found["test"], "validation": found["validation"]}


def known_plan(run: RunTrials) -> None:
    """Each arm at the rate that was best on the first splits, on those and on others."""
    told, alone = records.read(WIRING.id), records.read(BARE.id)
    for arm in KNOWN_ARMS:
        rate = (
            until_inside(run, arm, WIRING_SEEDS)
            if arm == TYPES_ONLY
            else best_rate(alone if arm == ONE_WORD else told, arm)
        )
        run([{"arm": arm, "rate": rate, "seed": seed} for seed in (*WIRING_SEEDS, *KNOWN_SEEDS)])


KNOWN = Experiment(
    "code_as_data-known", "how two new operations are wired, all their statements known, by six arms",
    known_trial, known_plan, {"known": 3.0, "test": 3.0, "validation": 3.0, "unknown": 0.01},
    chaotic=("known", "test", "validation"), drawn={"arm": "along the flow"},
)  # fmt: skip

# How long does it take?


class Traffic(Reader):
    """Bytes that the instructions read and write, and how many are run, turns of loops counted."""

    def __init__(self) -> None:
        self.bytes = self.run = 0

    def equation(self, equation: Any, given: list[Any]) -> list[Any]:
        arrays = [v.aval for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "dtype")]
        self.bytes += program.nbytes(*arrays)
        self.run += 1
        return [0] * len(equation.outvars)


@functools.cache
def to_time() -> list[corpus.Source]:
    return list(corpus.timed())


def examples(source: corpus.Source) -> list[np.ndarray]:
    """Arguments: numbers drawn at random, matrices that are symmetric and positive definite."""
    rng, found = np.random.default_rng(0), []
    for shape, dtype in ((arg.shape, arg.dtype) for arg in source.args):
        if np.issubdtype(dtype, np.integer):
            found.append(rng.integers(0, corpus.BINS, shape).astype(np.int32))
        else:
            a = rng.normal(size=shape).astype(np.float32)
            square = len(shape) == 2 and shape[0] == shape[1]
            found.append(a @ a.T / len(a) + np.eye(len(a), dtype=np.float32) if square else a)
    return found


def seconds(run: Callable[..., Any], args: Sequence[Any]) -> float:
    """Microseconds of the fastest of many calls of a compiled function: what else the machine does only adds."""
    jax.block_until_ready(run(*args))
    taken, begin = [], time.perf_counter()
    while len(taken) < 10 or time.perf_counter() - begin < 0.1:
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        taken.append(time.perf_counter() - start)
    return 1e6 * min(taken)


def time_trial(number: int, round: int) -> dict[str, float]:  # noqa: A002
    """Logarithms to base 2: microseconds of a call; operations, bytes, instructions run."""
    source = to_time()[number]
    args = jax.device_put(examples(source))
    found = {"time": seconds(jax.jit(source.f), args), "flops": 1.0, "bytes": 1.0, "run": 1.0}
    if round == 0:
        closed, reader = jax.make_jaxpr(source.f)(*args), Traffic()
        program.follow(closed, [0] * len(args), reader)
        try:
            work = float(program.work_depth(source.f, *args).work)
        except ValueError:  # a loop that ends when its numbers say so: what one turn does, as the compiler counts
            work = program.flops(source.f, *args)
        found |= {"flops": max(work, 1.0), "bytes": max(reader.bytes, 1), "run": max(reader.run, 1)}
    return {name: float(np.log2(value)) for name, value in found.items()}


def time_plan(run: RunTrials) -> None:
    """Two rounds, one after the other: how well does a program's time tell its time?"""
    for turn in range(2):
        run([{"number": number, "round": turn} for number in range(len(to_time()))])


TIME = Experiment(
    "code_as_data-times", "the time of 216 compiled programs, in two rounds, and what can be counted of them before",
    time_trial, time_plan, {"time": 6.0, "flops": 0.01, "bytes": 0.01, "run": 0.01}, drawn={"round": 0},
)  # fmt: skip
