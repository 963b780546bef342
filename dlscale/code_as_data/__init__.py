"""Programs as data: the contextual flow graph of a traced program, and vectors for its statements (inst2vec).

After Ben-Nun, Jakobovits & Hoefler 2018 (arXiv:1806.07336), with JAX's traces in place of LLVM's. A statement is one
instruction, abstracted: no names, sizes or constants, only the instruction and the kinds of its result and operands.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from dlscale.lab import checks, train

Rng = np.random.Generator
Value = int | None  # the statement that makes a value; None: an argument or a constant
UNKNOWN = "unknown"

# From a program to its graph


@dataclass(frozen=True)
class Graph:
    """A contextual flow graph: statements in the order of the trace, and who hands over to whom.

    `data` (n, 2): the first statement makes what the second one uses. `control` (m, 2): the first one decides whether
    the second one runs, and no data from there tells so.
    """

    statements: tuple[str, ...]
    data: np.ndarray
    control: np.ndarray

    @cached_property
    def flow(self) -> np.ndarray:
        """(edges, 2) of both kinds."""
        return np.concatenate([self.data, self.control])

    @cached_property
    def sequence(self) -> np.ndarray:
        """(edges, 2): each statement to the next in the trace, as who reads the program from top to bottom."""
        return np.stack([np.arange(len(self.statements) - 1), np.arange(1, len(self.statements))], axis=1)


def graph(f: Callable[..., Any], *args: Any) -> Graph:
    """The contextual flow graph of f, traced with arguments of these shapes; nothing is run.

    Loops are in it once, with an edge back; calls are opened. Raises ValueError for what cannot be traced, and for a
    program without statements.
    """
    try:
        program = jax.make_jaxpr(f)(*args)
    except Exception as error:  # the function is a reader's own: it may raise anything
        first = str(error).strip().splitlines()[:1]
        advice = "It must be made of JAX's functions, and no `if` or `while` of Python may hang on a traced number."
        raise ValueError(f"This cannot be traced ({type(error).__name__}: {' '.join(first)}). {advice}") from error
    builder = _Builder()
    builder.walk(program.jaxpr, [None] * len(program.jaxpr.invars), None)
    if not builder.statements:
        raise ValueError("This program has no statements: it returns its arguments or constants as they are.")
    pairs = {kind: sorted(edges) for kind, edges in (("data", builder.data), ("control", builder.control))}
    return Graph(tuple(builder.statements), *(np.array(pairs[kind], int).reshape(-1, 2) for kind in pairs))


def kind(aval: Any) -> str:
    """The class of a value: "float", "int[n]", "bool[n,n]", "float[n,n,…]", "key"."""
    names = {"f": "float", "V": "float", "i": "int", "u": "int", "b": "bool", "c": "complex"}
    extended = not hasattr(aval, "dtype") or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)
    name = "key" if extended else names.get(np.dtype(aval.dtype).kind, "float")
    rank = len(getattr(aval, "shape", ()))
    return name + ("", "[n]", "[n,n]", "[n,n,…]")[min(rank, 3)]


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
        """A new statement. What decides whether it runs is told unless its data come from in there."""
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
            ways = [self.walk(branch.jaxpr, given[1:], switch) for branch in params["branches"]]
            ends = list(zip(*ways, strict=True))
            return [
                self.add(statement("join", [v], [v] * len(ways)), e, switch) for v, e in zip(made, ends, strict=True)
            ]
        if name == "scan":
            head, fixed, count = self.add(text, given, decides), params["num_consts"], params["num_carry"]
            results = self.walk(params["jaxpr"].jaxpr, given[:fixed] + [head] * (len(given) - fixed), head)
            self.data |= {(result, head) for result in results[:count] if result is not None}
            return [self.add(statement("end", made, made[:1]), results, head)] * len(made)
        if name == "while":
            first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
            head = self.add(text, given[last:], decides)
            carry = [head] * (len(given) - last)
            test = self.add(
                "test bool (bool)", self.walk(params["cond_jaxpr"].jaxpr, given[:first] + carry, head), head
            )
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


# What stands near what


def reach(edges: np.ndarray, count: int, radius: int) -> np.ndarray:
    """(count, count) truth values: which statements are at most so many edges apart, whatever their direction."""
    near = np.eye(count, dtype=np.float32)
    near[edges[:, 0], edges[:, 1]] = near[edges[:, 1], edges[:, 0]] = 1
    return np.linalg.matrix_power(near, checks.whole("radius", radius)) > 0


def pairs(programs: Iterable[Graph], vocabulary: "Vocabulary", context: str, radius: int = 2) -> np.ndarray:
    """(n, 2) numbers of statements that are in each other's context, once each way.

    `context`: "flow" counts edges of data and control, "sequence" lines of the trace.
    """
    checks.known("context", context, ("flow", "sequence"))
    found = []
    for one in programs:
        near = reach(getattr(one, context), len(one.statements), radius)
        np.fill_diagonal(near, False)
        found.append(vocabulary.encode(one)[np.argwhere(near)])
    return np.concatenate(found)


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


# Skip-gram


def skip_gram(
    found: np.ndarray, size: int, *, seed: int = 0, width: int = 32, steps: int = 1000, batch: int = 2048,
    negatives: int = 64, weight: float = 5.0, rate: float = 0.02, progress: bool = False,
) -> np.ndarray:  # fmt: skip
    """(size, width) vectors by skip-gram with negative sampling (Mikolov et al. 2013) on pairs (n, 2).

    Each step draws a batch of the pairs, and `negatives` statements, by their frequency to the power 3/4, which all of
    the batch share; together these weigh as `weight` of them each. Raises ValueError if there is no pair.
    """
    if not len(found):
        raise ValueError("There are no pairs: programs of one statement have no context.")
    rng = np.random.default_rng(seed)
    noise = np.bincount(found[:, 1], minlength=size) ** 0.75
    drawn = rng.choice(size, (steps, negatives), p=noise / noise.sum()).astype(np.int32)
    rows = found[rng.integers(len(found), size=(steps, batch))].astype(np.int32)
    start = jnp.asarray(0.1 * rng.normal(size=(2, size, width)), jnp.float32)
    inputs = {"rows": rows, "drawn": drawn}
    weights = {"weight": np.float32(weight), "rate": np.float32(rate)}
    done = train.run(_step, (start, optax.adam(1.0).init(start)), inputs, weights, every=250, progress=progress)
    return np.asarray(done.state[0][0])


def skip_gram_loss(both: Array, rows: Array, drawn: Array, weight: float) -> Array:
    """Mean loss of pairs `rows` (batch, 2): `both` (2, size, width) are vectors of statements, and of contexts."""
    own, near, far = both[0][rows[:, 0]], both[1][rows[:, 1]], both[1][drawn]
    right, wrong = (own * near).sum(1), own @ far.T
    return -jax.nn.log_sigmoid(right).mean() - weight * jax.nn.log_sigmoid(-wrong).mean()


def _step(state: Any, one: dict[str, Array], given: dict[str, Array]) -> tuple[Any, Array]:
    both, memory = state
    loss, gradient = jax.value_and_grad(skip_gram_loss)(both, one["rows"], one["drawn"], given["weight"])
    updates, memory = optax.adam(1.0).update(gradient, memory)
    return (both + given["rate"] * updates, memory), loss


# Asking the vectors


def unit(vectors: np.ndarray) -> np.ndarray:
    """Each of length one, so that a product is a cosine."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


def of_instructions(vectors: np.ndarray, vocabulary: Vocabulary) -> np.ndarray:
    """A vector for each instruction, in the order of `vocabulary.instructions`: the mean of its statements'."""
    return unit(np.array([unit(vectors)[numbers].mean(0) for numbers in vocabulary.instructions.values()]))


def hits(vectors: np.ndarray, names: Sequence[str], groups: Sequence[Sequence[str]], among: int = 5) -> np.ndarray:
    """For each instruction of the groups, whether another one of its group is among its nearest ones.

    `vectors` (names, width). An instruction that has no vector is not asked for, nor is one alone in its group.
    """
    place, near, found = {name: i for i, name in enumerate(names)}, unit(vectors) @ unit(vectors).T, []
    np.fill_diagonal(near, -np.inf)
    for group in groups:
        own = [place[name] for name in group if name in place]
        for query in own if len(own) > 1 else []:
            found.append(bool(set(np.argsort(-near[query])[:among]) & set(own)))
    return np.array(found)


class Analogy(NamedTuple):
    """a is to b as c is to d."""

    a: int
    b: int
    c: int
    d: int


def analogies(vocabulary: Vocabulary, couples: Sequence[tuple[str, str]]) -> list[Analogy]:
    """All analogies of two instructions in two kinds of statement, as add float : add int :: mul float : mul int."""
    rests: dict[str, dict[str, int]] = {}
    for number, word in enumerate(vocabulary.words[1:], 1):
        name, _, rest = word.partition(" ")
        rests.setdefault(name, {})[rest] = number
    found = []
    for one, other in couples:
        both = sorted(rests.get(one, {}).keys() & rests.get(other, {}).keys())
        for s, t in itertools.permutations(both, 2):
            found.append(Analogy(rests[one][s], rests[one][t], rests[other][s], rests[other][t]))
    return found


def answered(vectors: np.ndarray, asked: Sequence[Analogy], way: str = "both", among: int = 1) -> np.ndarray:
    """Whether d is among the nearest to b − a + c, of all but a, b, c. `way` "c": nearest to c alone; "b": to b."""
    a, b, c, d = np.array(asked).T
    v = unit(vectors)
    aim = {"both": v[b] - v[a] + v[c], "c": v[c], "b": v[b]}[checks.known("way", way, ("both", "b", "c"))]
    near = aim @ v.T
    near[:, 0] = -np.inf  # what is unknown is no answer
    for known in (a, b, c):
        near[np.arange(len(near)), known] = -np.inf
    return (np.argsort(-near, axis=1, kind="stable")[:, :among] == d[:, None]).any(1)


# Controls


def rewired(one: Graph, rng: Rng) -> Graph:
    """As many edges between statements drawn at random, from earlier to later ones."""
    count = len(one.statements)
    ends = [np.sort(rng.choice(count, 2, replace=False)) for _ in range(len(one.flow) if count > 1 else 0)]
    return Graph(one.statements, np.array(ends, int).reshape(-1, 2), np.zeros((0, 2), int))


def reordered(one: Graph, rng: Rng) -> Graph:
    """The same program, written in another order: any in which each statement comes after what it needs."""
    needs = [set() for _ in one.statements]
    for before, after in one.flow:
        if before < after:  # not the edge back of a loop
            needs[after].add(before)
    order: list[int] = []
    waiting = set(range(len(needs)))
    while waiting:
        ready = sorted(i for i in waiting if not needs[i] & waiting)
        order.append(ready[rng.integers(len(ready))])
        waiting.remove(order[-1])
    place = np.argsort(order)
    return Graph(tuple(one.statements[i] for i in order), place[one.data], place[one.control])
