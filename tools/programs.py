"""The programs of notebook 17, traced again: `python tools/programs.py` writes their record into `data/results`.

Its SHA-256, which another JAX may change, goes into `DIGEST` of `dlscale/code_as_data/corpus.py` and into
`data/README.md`.
"""

import gzip
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.scipy import special, stats

from dlscale.code_as_data import Graph, graph
from dlscale.code_as_data.corpus import ACROSS, ELEMENTWISE, WIRINGS, path
from dlscale.lab import models

LONGEST = 200  # statements of a program of the corpus


class Source(NamedTuple):
    """A function and the shapes of its arguments; `name` says what it is, `recipe` of what it is made."""

    name: str
    recipe: str
    f: Callable[..., Any]
    args: tuple[Any, ...]


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


# The task: the same statements, connected in three ways

VECTOR_FUNCTIONS: dict[str, Callable[[Any], Any]] = {  # of the operations across
    "cumsum": jnp.cumsum, "cumprod": jnp.cumprod, "sort": lax.sort, "reverse": lambda v: lax.rev(v, (0,)),
    "centre": lambda v: v - v.mean(), "shares": lambda v: v / v.sum(), "largest": lambda v: v / v.max(),
    "roll": lambda v: jnp.roll(v, 1), "softmax": jax.nn.softmax, "length": lambda v: v / jnp.sqrt((v * v).sum()),
}  # fmt: skip
BEFORE = (lambda v: v + 1, lambda v: v * 2, lambda v: jnp.maximum(v, 0), lambda v: v**3, lambda v: 1 / v)
AFTER = (jnp.sum, jnp.max, lambda v: v / 2, lambda v: jnp.clip(v, -1, 1), jnp.argmax)
COMBINE = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum)
PLANS = 3


def wired(first: str, second: str, wiring: str, plan: tuple[Any, ...]) -> Callable[[Any, Any], Any]:
    """A function of x and y with two operations on x, one after the other, or the elementwise one on x, the other on y.

    `plan`: a step before on x, one on y, what combines them, a step after, and which of the two operations side by side
    is written first, if True the elementwise one.
    """
    p, q = getattr(lax, first), VECTOR_FUNCTIONS[second]
    before_x, before_y, combine, after, elementwise_is_written_first = plan

    def f(x, y):
        x, y = before_x(x), before_y(y)
        if wiring != "side by side":
            x = q(p(x)) if wiring == "elementwise first" else p(q(x))
        elif elementwise_is_written_first:
            x, y = p(x), q(y)
        else:
            y, x = q(y), p(x)
        return after(combine(x, y))

    return f


def wirings() -> Iterator[Source]:
    """All couples of operations with three plans each, in the three wirings."""
    rng = np.random.default_rng(18)
    for first, second, _ in itertools.product(ELEMENTWISE, ACROSS, range(PLANS)):
        steps = (table[rng.integers(len(table))] for table in (BEFORE, BEFORE, COMBINE, AFTER))
        plan = (*steps, rng.random() < 0.5)
        for wiring in WIRINGS:
            yield Source(wiring, f"{first} {second}", wired(first, second, wiring, plan), (floats(8), floats(8)))


# The corpus that statements are learnt from

LIBRARIES = (jnp, jnp.linalg, jnp.fft, jax.nn, special, optax.losses)
LEFT_OUT = ("print", "save", "load", "from", "numpy_dtype")  # what reads or writes files or settings
DISTRIBUTIONS = "norm expon laplace logistic cauchy uniform t gamma beta chi2 pareto gennorm"
OPTIMISERS = "sgd adam adamw adagrad adadelta rmsprop adamax lion lars lamb novograd yogi radam nadam sm3"


def _library() -> Iterator[Source]:
    """Functions of the libraries, of one or two vectors, matrices, or vectors of whole numbers."""
    choices = [(floats(8),), (floats(6, 6),), (jax.ShapeDtypeStruct((8,), jnp.int32),)]
    functions = {
        f"{module.__name__}.{name}": f
        for module in LIBRARIES
        for name, f in sorted(vars(module).items())
        if callable(f) and name.islower() and name[0] != "_" and not any(word in name for word in LEFT_OUT)
    }
    for kind, name in itertools.product(DISTRIBUTIONS.split(), ("logpdf", "pdf", "cdf")):
        if hasattr(getattr(stats, kind), name):
            functions[f"stats.{kind}.{name}"] = getattr(getattr(stats, kind), name)
    for (name, f), args, count in itertools.product(functions.items(), choices, (1, 2)):
        yield Source(name, "", f, args * count)


def _models() -> Iterator[Source]:
    """The laboratory's networks with their losses, and steps of optimisers."""
    image, signal, key = floats(4, 16, 16, 1), floats(4, 8), jax.random.key(0)
    norms = (None, "batch", "layer")
    nets = [(models.mlp((8, 16, 10), activation=a, norm=n), signal) for a in models.ACTIVATIONS for n in norms]
    nets += [(models.lenet((16, 16, 1)), image), (models.resnet(2, shape=(16, 16, 1)), image), (models.gru(8), signal)]
    for (net, x), loss in itertools.product(nets, (optax.softmax_cross_entropy, optax.l2_loss)):
        args = (jax.eval_shape(net.init, key), x, floats(4, 10))
        yield Source("network", "", lambda p, x, y, net=net, loss=loss: loss(net.apply(p, x), y).mean(), args)
    params = {"w": floats(8, 4), "b": floats(4)}
    for name in OPTIMISERS.split():
        update = (optimiser := getattr(optax, name)(0.1)).update
        args = (params, jax.eval_shape(optimiser.init, params), params)
        yield Source(name, "", lambda g, m, p, update=update: optax.apply_updates(p, update(g, m, p)[0]), args)


UNARY = [jnp.sin, jnp.exp, jnp.tanh, jnp.sqrt, jnp.abs, jnp.cumsum, jnp.sort, jnp.log1p, jnp.floor, jnp.square]
BINARY = [jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.minimum, jnp.power]
STEPS: list[Callable[..., Any]] = [
    lambda a, b, one, two: lax.cond(a.sum() < 1, one, lambda v: two(v, 0.5), b),
    lambda a, b, one, two: lax.scan(lambda s, v: (two(s, one(v)),) * 2, 0.0, a)[1],
    lambda a, b, one, two: lax.while_loop(lambda v: v.sum() < 9, lambda v: two(one(v), b), a),
    lambda a, b, one, two: lax.fori_loop(0, 5, lambda _, v: two(one(v), b), a),
    lambda a, b, one, two: jnp.where(a < b, one(a), two(a, b)),
    lambda a, b, one, two: one(a),
    lambda a, b, one, two: two(a, b),
]


def _sampled(rng: np.random.Generator) -> Callable[..., Any]:
    """A program sampled at random: a few steps on vectors, some in a loop or behind a condition."""
    plan = rng.integers(1000, size=(rng.integers(2, 8), 5))

    def f(x, y):
        known = [x, y]
        for what, i, j, k, m in plan:
            a, b = known[i % len(known)], known[j % len(known)]
            known.append(STEPS[what % len(STEPS)](a, b, UNARY[k % len(UNARY)], BINARY[m % len(BINARY)]))
        return known[-1]

    return f


def corpus() -> Iterator[Source]:
    """Library functions and networks; their gradients, batches and compositions; programs sampled at random."""
    rng, plain = np.random.default_rng(16), [*_library(), *_models()]
    for source in plain:
        yield source
        yield source._replace(f=jax.grad(lambda *args, f=source.f: jnp.sum(f(*args))))
        axes = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), source.args)
        yield source._replace(f=jax.vmap(source.f), args=axes)
    single = [source for source in plain if len(source.args) == 1]
    for _ in range(1000):
        one, other = (single[i] for i in rng.integers(len(single), size=2))
        yield one._replace(name=f"{other.name} of {one.name}", f=lambda x, f=one.f, g=other.f: g(f(x)))
    for number in range(500):
        yield Source(f"sampled {number}", "", _sampled(rng), (floats(8), floats(8)))


# The record


def traced(sources: Iterator[Source], distinct: bool = False) -> Iterator[tuple[Source, Graph]]:
    """With each source its graph. What cannot be traced is left out; if `distinct`, long ones and repetitions are."""
    seen = set()
    for source in sources:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries announce what will change
            try:
                one = graph(source.f, *source.args)
            except ValueError:
                continue
        same = (one.statements, one.flow.tobytes())
        if not (distinct and (same in seen or len(one.statements) > LONGEST)):
            seen.add(same)
            yield source, one


def main() -> None:
    record = {}
    for part, sources in {"corpus": corpus, "wirings": wirings}.items():
        found, graphs = zip(*traced(sources(), distinct=part == "corpus"), strict=True)
        programs = [(one.statements, one.data.tolist(), one.control.tolist()) for one in graphs]
        record[part] = [source.name for source in found], [source.recipe for source in found], programs
    path().write_bytes(gzip.compress(json.dumps(record).encode(), mtime=0))
    print("SHA-256", hashlib.sha256(path().read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
