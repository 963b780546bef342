"""Programs as data: the flow graph of a traced program, vectors for its statements, a network along its wires.

After inst2vec (Ben-Nun, Jakobovits & Hoefler 2018, arXiv:1806.07336), with JAX's traces in place of LLVM's. A statement
is one instruction, abstracted: no names, sizes or constants, only the instruction and the kinds of result and operands.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from dlscale.lab import checks, jax_internals

Value = int | None  # the statement that makes a value; None: an argument or a constant
UNKNOWN = "unknown"

# From a program to its graph


@dataclass(frozen=True)
class Graph:
    """Statements in the order of the trace, and the wires between them, after Ben-Nun et al. (2018).

    `data` (n, 2): the first statement makes what the second one uses. `control` (m, 2): the first one decides whether
    the second one runs, and no data edge leads there from the decision.
    """

    statements: tuple[str, ...]
    data: np.ndarray
    control: np.ndarray

    @cached_property
    def flow(self) -> np.ndarray:
        """(edges, 2) of both kinds."""
        return np.concatenate([self.data, self.control])

    @cached_property
    def text(self) -> np.ndarray:
        """(edges, 2): each statement to the next in the trace, as somebody reads it from top to bottom."""
        return np.stack([np.arange(len(self.statements) - 1), np.arange(1, len(self.statements))], axis=1)


def graph(f: Callable[..., Any], *args: Any) -> Graph:
    """The graph of f, traced with arguments of these shapes; nothing is run.

    Loops are in it once, with an edge back; calls are opened. Raises ValueError for what cannot be traced, and for a
    program without statements.
    """
    try:
        program = jax.make_jaxpr(f)(*args)
    except Exception as error:  # the function is a reader's own: it may raise anything
        advice = "It must be made of JAX's functions, and no `if` or `while` of Python may depend on a traced number."
        raise ValueError(f"This cannot be traced, because of the {type(error).__name__} above. {advice}") from error
    builder = _Builder()
    builder.walk(program.jaxpr, [None] * len(program.jaxpr.invars), None)
    if not builder.statements:
        raise ValueError("This program has no statements: it returns its arguments or constants as they are.")
    edges = (np.array(sorted(found), int).reshape(-1, 2) for found in (builder.data, builder.control))
    return Graph(tuple(builder.statements), *edges)


def kind(aval: Any) -> str:
    """The class of a value: "float", "int[n]", "bool[n,n]", "float[n,n,…]", "key"."""
    names = {"f": "float", "V": "float", "i": "int", "u": "int", "b": "bool", "c": "complex"}
    extended = not hasattr(aval, "dtype") or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    name = "key" if extended else names.get(np.dtype(aval.dtype).kind, "float")
    return name + ("", "[n]", "[n,n]", "[n,n,…]")[min(len(getattr(aval, "shape", ())), 3)]


def statement(name: str, made: Sequence[Any], used: Sequence[Any]) -> str:
    """An abstracted statement, as "mul float[n] (float[n], number)": a constant is a number, whichever it is."""
    operands = ["number" if isinstance(v, Literal) else kind(v.aval) for v in used]
    short = operands[:3] + ["…"] * (len(operands) > 3)
    return f"{name} {kind(made[0].aval) if made else ''} ({', '.join(short)})"


class _Builder:
    """Statements and edges as they come up on a walk through a program and what is inside it."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self.data: set[tuple[int, int]] = set()
        self.control: set[tuple[int, int]] = set()

    def add(self, text: str, sources: Iterable[Value], decides: Value) -> int:
        """A new statement, with a control edge unless its data come from behind the decision."""
        here, known = len(self.statements), {source for source in sources if source is not None}
        self.statements.append(text)
        self.data |= {(source, here) for source in known}
        if decides is not None and all(source < decides for source in known):
            self.control.add((decides, here))
        return here

    def walk(self, jaxpr: Jaxpr, given: Sequence[Value], decides: Value) -> list[Value]:
        """Which statements make the results, from those that make the arguments."""
        makers: dict[Var, Value] = dict(zip(jaxpr.invars, given, strict=True)) | dict.fromkeys(jaxpr.constvars)

        def look(v: Var | Literal) -> Value:
            return None if isinstance(v, Literal) else makers[v]

        for equation in jaxpr.eqns:
            results = self.follow(equation, [look(v) for v in equation.invars], decides)
            makers.update(zip(equation.outvars, results, strict=True))
        return [look(v) for v in jaxpr.outvars]

    def follow(self, equation: JaxprEqn, given: list[Value], decides: Value) -> list[Value]:
        name, params, made = equation.primitive.name, equation.params, equation.outvars
        text = statement(name, made, equation.invars)
        if name == "convert_element_type" and made[0].aval.dtype == equation.invars[0].aval.dtype:
            return given  # bookkeeping of JAX: nothing is converted
        if name == "cond":
            switch = self.add(text.replace("cond", "switch", 1), given[:1], decides)
            branches = [self.walk(branch.jaxpr, given[1:], switch) for branch in params["branches"]]
            joins = [statement("join", [v], [v] * len(branches)) for v in made]
            return [self.add(join, ends, switch) for join, ends in zip(joins, zip(*branches, strict=True), strict=True)]
        if name == "scan":
            head, (fixed, count) = self.add(text, given, decides), jax_internals.scan_counts(params)
            results = self.walk(params["jaxpr"].jaxpr, given[:fixed] + [head] * (len(given) - fixed), head)
            self.data |= {(result, head) for result in results[:count] if result is not None}
            return [self.add(statement("end", made, made[:1]), results, head)] * len(made)
        if name == "while":
            first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            head = self.add(text, given[last:], decides)
            carry = [head] * (len(given) - last)
            tested = self.walk(params["cond_jaxpr"].jaxpr, given[:first] + carry, head)
            test = self.add("test bool (bool)", tested, head)
            results = self.walk(params["body_jaxpr"].jaxpr, given[first:last] + carry, test)
            self.data |= {(result, head) for result in results if result is not None}
            return [self.add(statement("end", made, made[:1]), [head], test)] * len(made)
        if name == "custom_linear_solve":  # it holds the program that solves, and others that check and differentiate
            sizes = np.cumsum([0, *params["const_lengths"]])
            return self.walk(params["jaxprs"].solve.jaxpr, given[sizes[2] : sizes[3]] + given[sizes[4] :], decides)
        inner = next((params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in params), None)
        if inner and not name.startswith("reduce"):  # a call; a reduction holds the function that it reduces with
            return self.walk(getattr(inner, "jaxpr", inner), given, decides)
        return [self.add(text, given, decides)] * len(made)


def reordered(one: Graph, rng: np.random.Generator) -> Graph:
    """The same program, written in another order: any in which each statement comes after what it needs."""
    needs = [{before for before, after in one.flow.tolist() if after == i > before} for i in range(len(one.statements))]
    order: list[int] = []
    while len(order) < len(needs):
        ready = [i for i, own in enumerate(needs) if i not in order and own <= set(order)]
        order.append(ready[rng.integers(len(ready))])
    place = np.argsort(order)
    return Graph(tuple(one.statements[i] for i in order), place[one.data], place[one.control])


# Words, and what stands near what


def reach(edges: np.ndarray, count: int, radius: int) -> np.ndarray:
    """(count, count) truth values: which statements are at most so many edges apart, whatever their direction."""
    near = np.eye(count, dtype=np.float32)
    near[edges[:, 0], edges[:, 1]] = near[edges[:, 1], edges[:, 0]] = 1
    return np.linalg.matrix_power(near, checks.whole("radius", radius)) > 0


@dataclass(frozen=True)
class Vocabulary:
    """The statements that have a number of their own; 0 is for all others."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, programs: Iterable[Graph], at_least: int = 3) -> "Vocabulary":
        """All statements that occur so often, from the most frequent down. Raises ValueError if there is none."""
        counts = Counter(itertools.chain.from_iterable(one.statements for one in programs))
        words = sorted((word for word, count in counts.items() if count >= at_least), key=lambda w: (-counts[w], w))
        if not words:
            raise ValueError(f"No statement occurs {at_least} times: give more programs.")
        return cls((UNKNOWN, *words))

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @cached_property
    def instructions(self) -> dict[str, list[int]]:
        """The numbers of all statements of each instruction."""
        found: dict[str, list[int]] = {}
        for number, word in enumerate(self.words[1:], 1):
            found.setdefault(word.partition(" ")[0], []).append(number)
        return found

    def encode(self, one: Graph) -> np.ndarray:
        return np.array([self.numbers.get(word, 0) for word in one.statements])

    def contexts(self, programs: Iterable[Graph], wires: str = "flow", radius: int = 1) -> np.ndarray:
        """(n, 2) numbers of statements at most `radius` wires apart, each pair both ways."""
        checks.known("wires", wires, ("flow", "text"))
        found = []
        for one in programs:
            near = reach(getattr(one, wires), len(one.statements), radius)
            np.fill_diagonal(near, False)
            found.append(self.encode(one)[np.argwhere(near)])
        return np.concatenate(found)


# Vectors of statements


def skip_gram(pairs: np.ndarray, size: int, *, seed: int = 0, width: int = 32, steps: int = 1000) -> np.ndarray:
    """(size, width) vectors of length one by skip-gram with negative sampling (Mikolov et al. 2013) on pairs (n, 2).

    Each step samples 2,048 pairs, and 64 statements by their frequency to the power 3/4, which all these pairs share;
    together the 64 weigh as five of them each. Raises ValueError if there is no pair.
    """
    if not len(pairs):
        raise ValueError("There are no pairs: programs of one statement have no context.")
    rng = np.random.default_rng(seed)
    noise = np.bincount(pairs[:, 1], minlength=size) ** 0.75
    random = rng.choice(size, (steps, 64), p=noise / noise.sum())
    rows = pairs[rng.integers(len(pairs), size=(steps, 2048))]
    start = jnp.asarray(0.1 * rng.normal(size=(2, size, width)), jnp.float32)
    return unit(np.asarray(_skip_gram(start, rows, random)[0]))


@jax.jit
def _skip_gram(start: Array, rows: Array, random: Array) -> Array:
    return _adam(lambda both, *batch: skip_gram_loss(both, *batch, 5.0), start, (rows, random), 0.02)


def _adam(loss: Callable[..., Array], params: Any, batches: tuple[Array, ...], rate: float) -> Any:
    """Parameters after one step of Adam for each batch."""
    optimizer = optax.adam(rate)

    def step(state: Any, batch: tuple[Array, ...]) -> tuple[Any, None]:
        updates, memory = optimizer.update(jax.grad(loss)(state[0], *batch), state[1])
        return (optax.apply_updates(state[0], updates), memory), None

    return lax.scan(step, (params, optimizer.init(params)), batches)[0][0]


def skip_gram_loss(both: Array, pairs: Array, random: Array, weight: float) -> Array:
    """Mean loss of pairs (batch, 2): `both` (2, size, width) are vectors of statements, and of contexts."""
    if not both.size:
        raise ValueError(f"There are no vectors: `both` has the shape {both.shape}.")
    u, v = both
    own = u[pairs[:, 0]]
    right, wrong = (own * v[pairs[:, 1]]).sum(1), own @ v[random].T
    return -jax.nn.log_sigmoid(right).mean() - weight * jax.nn.log_sigmoid(-wrong).mean()


def counted(pairs: np.ndarray, size: int, shift: float = 0.0) -> np.ndarray:
    """(size, size) positive pointwise mutual information of pairs (n, 2): log of how much more often than by chance.

    Skip-gram with k negatives approximates such a table, less the `shift` log k, by products of short vectors (Levy &
    Goldberg 2014).
    """
    table = np.zeros((size, size))
    np.add.at(table, tuple(pairs.T), 1)
    chance = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return (np.log(np.maximum(table, 1e-12) / np.maximum(chance, 1e-12)) - shift).clip(0)


def shortened(table: np.ndarray, width: int, power: float = 1.0) -> np.ndarray:
    """(size, width) the best approximation of a symmetric table in so many columns, times singular values^power."""
    u, s, _ = np.linalg.svd(table, hermitian=True)
    return u[:, :width] * s[:width] ** power


def unit(vectors: np.ndarray) -> np.ndarray:
    """Each of length one, so that a product is a cosine."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def _known(vectors: np.ndarray, count: int) -> np.ndarray:
    """The vectors, each of length one. Raises ValueError if one of the first `count` is missing or not finite."""
    if len(vectors) < count or not np.isfinite(vectors).all():
        raise ValueError(f"There must be {count} finite vectors: the shape is {np.shape(vectors)}.")
    return unit(vectors)


def of_instructions(vectors: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """A vector for each instruction, in the order of `vocabulary.instructions`: the mean of its statements'."""
    v = _known(vectors, len(vocabulary.words))
    return unit(np.array([v[numbers].mean(0) for numbers in vocabulary.instructions.values()]))


def hits(vectors: np.ndarray, names: Sequence[str], groups: Sequence[Sequence[str]], among: int = 5) -> np.ndarray:
    """For each instruction of the groups, whether another one of its group is among its nearest ones.

    `vectors` (names, width). An instruction that has no vector is not asked for, nor is one alone in its group.
    """
    v, place, found = _known(vectors, len(names)), {name: i for i, name in enumerate(names)}, []
    np.fill_diagonal(near := v @ v.T, -np.inf)
    for group in groups:
        own = [place[name] for name in group if name in place]
        for query in own if len(own) > 1 else []:
            found.append(bool(set(np.argsort(-near[query])[:among]) & set(own)))
    return np.array(found)


def analogies(vocabulary: Vocabulary, couples: Sequence[tuple[str, str]]) -> np.ndarray:
    """(n, 4) a is to b as c is to d, two instructions with two kinds, as add float : add int :: mul float : mul int."""
    types = [word.partition(" ")[2] for word in vocabulary.words]
    kinds = {name: {types[n]: n for n in numbers} for name, numbers in vocabulary.instructions.items()}
    found = []
    for one, other in ((kinds.get(a, {}), kinds.get(b, {})) for a, b in couples):
        shared = itertools.permutations(sorted(one.keys() & other.keys()), 2)
        found += [(one[s], one[t], other[s], other[t]) for s, t in shared]
    return np.array(found, int).reshape(-1, 4)


def answered(vectors: np.ndarray, asked: np.ndarray, by: str = "b − a + c") -> np.ndarray:
    """Whether d is nearest, of all but a, b, c, to b − a + c, or to b alone. `asked` (n, 4)."""
    a, b, c, d = asked.T
    v = _known(vectors, 1 + asked.max(initial=0))
    near = (v[b] - v[a] + v[c] if checks.known("way", by, ("b − a + c", "b alone")) != "b alone" else v[b]) @ v.T
    np.put_along_axis(near, np.stack([0 * a, a, b, c], axis=1), -np.inf, axis=1)  # 0 is unknown: no answer either
    return near.argmax(1) == d


# A network that reads programs along wires


Batch = tuple[np.ndarray, np.ndarray, np.ndarray]


def padded(programs: Sequence[Graph], vocabulary: Vocabulary, wires: str = "flow", length: int = 20) -> Batch:
    """Statements (n, length), 1 where there is one, and edges (n, length, length) from row to column.

    `wires`: "flow", "text" or "none". Raises ValueError for programs of more than `length` statements.
    """
    checks.known("wires", wires, ("flow", "text", "none"))
    count = len(programs)
    statements, there = np.zeros((count, length), np.int32), np.zeros((count, length), np.float32)
    edges = np.zeros((count, length, length), np.float32)
    for i, one in enumerate(programs):
        size, ends = len(one.statements), getattr(one, wires, one.flow[:0])
        checks.whole("The number of statements", size, high=length)
        statements[i, :size], there[i, :size] = vocabulary.encode(one), 1
        edges[i, ends[:, 0], ends[:, 1]] = 1
    return statements, there, edges


def listen(h: Array, edges: Array, w: Array, b: Array) -> Array:
    """One round of messages: each statement's state (length, width) hears the mean before it, and that after it."""
    before = edges.T / jnp.maximum(edges.sum(0)[:, None], 1)
    after = edges / jnp.maximum(edges.sum(1)[:, None], 1)
    return h + jax.nn.relu(jnp.concatenate([h, before @ h, after @ h], axis=1) @ w + b)


def initial(key: Array, classes: int, width: int = 32, rounds: int = 3) -> dict[str, Array]:
    """Parameters of a network of so many rounds of messages."""
    shapes = {"in": (width, width), "rounds": (rounds, 3 * width, width), "out": (2 * width, classes)}
    keys = dict(zip(shapes, jax.random.split(key, 3), strict=True))
    params = {name: jax.random.normal(keys[name], shape) / shape[-2] ** 0.5 for name, shape in shapes.items()}
    return params | {"b": jnp.zeros((rounds, width))}


@jax.jit
def logits(params: dict[str, Array], table: Array, batch: Batch) -> Array:
    """(programs, classes). `table` (words, width) has the vectors of the statements; they stay as they are."""

    def one(statements: Array, there: Array, edges: Array) -> Array:
        h = jax.nn.relu(table[statements] * jnp.sqrt(table.shape[1]) @ params["in"])
        for w, b in zip(params["rounds"], params["b"], strict=True):
            h = listen(h, edges, w, b)
        h = h * there[:, None]
        return jnp.concatenate([h.sum(0) / there.sum(), h.max(0)]) @ params["out"]

    return jax.vmap(one)(*batch)


@jax.jit
def fit(batch: Batch, labels: Array, table: Array, rate: float, seed: int) -> dict[str, Array]:
    """Parameters of three classes after 200 steps of Adam, each on 48 programs."""
    start, rows = jax.random.split(jax.random.key(seed))

    def loss(params: dict[str, Array], own: Array) -> Array:
        found = logits(params, table, jax.tree.map(lambda a: a[own], batch))
        return optax.softmax_cross_entropy_with_integer_labels(found, labels[own]).mean()

    chosen = jax.random.randint(rows, (200, 48), 0, len(labels))
    return _adam(loss, initial(start, 3, table.shape[1]), (chosen,), rate)
