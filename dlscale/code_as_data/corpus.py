"""The programs of notebook 17: a corpus to learn statements from; families, wirings and programs to time, as tasks.

`main()` traces all of them and writes `data/results/code_as_data-programs.npz`; its
SHA-256 goes into `DIGEST` here and into `data/README.md`. The corpus has no labels; the tasks have.
"""

import functools
import hashlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.scipy import linalg, special, stats
from tqdm.auto import tqdm

from dlscale import operators_and_rooflines, precision
from dlscale.code_as_data import Graph, graph
from dlscale.lab import data, models
from dlscale.sequence_models_and_serving import sequence

DIGEST = "a3dc160fbadf7c95aa69abed81c6792658b7b34f3f348bb0839bf64fc8c07f1b"
LONGEST = 400  # statements of a program of the corpus


class Source(NamedTuple):
    """A function and the shapes of its arguments; `name` says what it is, `recipe` which way, for families."""

    name: str
    recipe: str
    f: Callable[..., Any]
    args: tuple[Any, ...]


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


# Families: what is computed, each written in several ways


def _online_softmax(x):
    def step(carry, value):
        top, total = carry
        new = jnp.maximum(top, value)
        return (new, total * jnp.exp(top - new) + jnp.exp(value - new)), None

    top, total = lax.scan(step, (x[0], jnp.zeros_like(x[0])), x)[0]
    return jnp.exp(x - top) / total


def _welford(x):
    def step(carry, value):
        count, mean, square = carry
        new = mean + (value - mean) / (count + 1)
        return (count + 1, new, square + (value - mean) * (value - new)), None

    _, mean, square = lax.scan(step, (0.0, 0.0, 0.0), x)[0]
    return (x - mean) / jnp.sqrt(square / len(x))


def _bubble(x):
    def one(i, x):
        swap = x[i] > x[i + 1]
        low, high = jnp.where(swap, x[i + 1], x[i]), jnp.where(swap, x[i], x[i + 1])
        return x.at[i].set(low).at[i + 1].set(high)

    return lax.fori_loop(0, len(x), lambda _, x: lax.fori_loop(0, len(x) - 1, one, x), x)


def _odd_even(x):
    def turn(i, x):
        x = jnp.roll(x, -(i % 2))
        pair = x.reshape(-1, 2)
        sort = jnp.stack([pair.min(1), pair.max(1)], 1).reshape(-1)
        last = jnp.arange(len(x)) >= len(x) - 2
        return jnp.roll(jnp.where((i % 2 == 1) & last, x, sort), i % 2)

    return lax.fori_loop(0, len(x), turn, x)


def _insert(x):
    def step(kept, value):
        place = jnp.sum(kept < value)
        where = jnp.arange(len(kept))
        return jnp.where(where < place, kept, jnp.where(where == place, value, jnp.roll(kept, 1))), None

    return lax.scan(step, jnp.full(len(x), jnp.inf), x)[0]


def _select(x):
    def step(left, _):
        place = jnp.argmin(left)
        return left.at[place].set(jnp.inf), left[place]

    return lax.scan(step, x, None, length=len(x))[1]


def _doubling(x):
    shift = 1
    while shift < len(x):
        x = x + jnp.pad(x, (shift, 0))[: len(x)]
        shift *= 2
    return x


def _sliding(x, k):
    def step(window, value):
        window = jnp.concatenate([window[1:], value[None]])
        return window, jnp.dot(window, k[::-1])

    return lax.scan(step, jnp.zeros(len(k)), x)[1][len(k) - 1 :]


def _power(a, turns=20):
    return lax.scan(lambda v, _: (a @ v / jnp.linalg.norm(a @ v), None), jnp.ones(len(a)), None, length=turns)[0]


def _rayleigh(a):
    def goes_on(carry):
        return (jnp.abs(carry[1] - carry[2]) > 1e-4) & (carry[3] < 50)

    def turn(carry):
        v = a @ carry[0]
        return v / jnp.sqrt(jnp.sum(v * v)), carry[0] @ v, carry[1], carry[3] + 1

    return lax.while_loop(goes_on, turn, (jnp.ones(len(a)) / jnp.sqrt(len(a)), 0.0, 1.0, 0))[1]


def _squaring(a):
    power = a
    for _ in range(4):
        power = power @ power
        power = power / jnp.trace(power)
    return jnp.trace(a @ power) / jnp.trace(power)


def _repeat(step: Callable[[Any], Any], x: Any, turns: int = 10) -> Any:
    return lax.fori_loop(0, turns, lambda _, x: step(x), x)


def _conjugate(a, b):
    def turn(carry, _):
        x, r, p = carry
        ap = a @ p
        step = r @ r / (p @ ap)
        new = r - step * ap
        return (x + step * p, new, new + (new @ new) / (r @ r) * p), None

    return lax.scan(turn, (jnp.zeros_like(b), b, b), None, length=8)[0][0]


def _toeplitz(x, k):
    rows = len(x) - len(k) + 1
    return sum(k[::-1][i] * jnp.eye(rows, len(x), i) for i in range(len(k))) @ x


def _windows(x, k):
    at = jnp.arange(len(x) - len(k) + 1)[:, None] + jnp.arange(len(k))
    return x[at] @ k[::-1]


def _spectrum(x, k):
    n = len(x) + len(k) - 1
    return jnp.fft.irfft(jnp.fft.rfft(x, n) * jnp.fft.rfft(k, n), n)[len(k) - 1 : len(x)]


def _lax_convolution(x, k):
    return lax.conv_general_dilated(x[None, None], k[None, None, ::-1], (1,), "VALID")[0, 0]


def _row(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: lax.map(lambda one: f(one, x), x)


def _distance(one, x):
    return jnp.sqrt(((one - x) ** 2).sum(-1))


def _horner(c, x):
    total = jnp.zeros_like(x)
    for i in range(c.shape[0]):
        total = total * x + c[i]
    return total


def _rising(c, x):
    return lax.scan(lambda s, one: ((s[0] * x, s[1] + one * s[0]), None), (jnp.ones_like(x), 0 * x), c[::-1])[0][1]


def _loss_of_row(row, label):
    return special.logsumexp(row) - row[label]


BINS = 8
FAMILIES: dict[str, tuple[Callable[[int], tuple], dict[str, Callable[..., Any]]]] = {
    "softmax": (lambda n: (floats(n),), {
        "plain": lambda x: jnp.exp(x) / jnp.exp(x).sum(),
        "library": jax.nn.softmax,
        "logarithm": lambda x: jnp.exp(x - special.logsumexp(x)),
        "pairs": lambda x: 1 / jnp.exp(x[None] - x[:, None]).sum(1),
        "online": _online_softmax,
        "powers": lambda x: 2 ** (x / jnp.log(2) - jnp.log2(jnp.dot(jnp.exp(x), jnp.ones_like(x)))),
    }),
    "standardise": (lambda n: (floats(n),), {
        "plain": lambda x: (x - x.mean()) / x.std(),
        "moments": lambda x: (x - x.mean()) * lax.rsqrt((x**2).mean() - x.mean() ** 2),
        "library": jax.nn.standardize,
        "dot": lambda x: (x - x.mean()) / jnp.sqrt(jnp.dot(x - x.mean(), x - x.mean()) / len(x)),
        "one pass": _welford,
        "projection": lambda x: (
            (lambda c: c * jnp.sqrt(len(x)) / jnp.linalg.norm(c))((jnp.eye(len(x)) - 1 / len(x)) @ x)
        ),
    }),
    "product": (lambda n: (floats(n, n), floats(n, n)), {
        "operator": lambda a, b: a @ b,
        "sum": lambda a, b: (a[:, :, None] * b[None]).sum(1),
        "outer": lambda a, b: lax.scan(lambda s, one: (s + one[0][:, None] * one[1], None), 0 * a, (a.T, b))[0],
        "rows": lambda a, b: lax.map(lambda row: jnp.dot(row, b), a),
        "fori": lambda a, b: lax.fori_loop(0, len(a), lambda i, c: c.at[i].set(a[i] @ b), 0 * a),
        "entries": lambda a, b: jax.vmap(lambda row: jax.vmap(lambda column: (row * column).sum())(b.T))(a),
    }),
    "convolution": (lambda n: (floats(n), floats(5)), {
        "library": _lax_convolution, "spectrum": _spectrum, "windows": _windows, "sliding": _sliding,
        "matrix": _toeplitz,
        "shifts": lambda x, k: sum(k[::-1][i] * lax.dynamic_slice(x, (i,), (len(x) - 4,)) for i in range(5)),
    }),
    "sort": (lambda n: (floats(n),), {
        "library": jnp.sort, "bubble": _bubble, "odd-even": _odd_even, "insert": _insert, "select": _select,
        "ranks": lambda x: jnp.zeros_like(x).at[(x[:, None] > x[None]).sum(1)].set(x),
    }),
    "running sum": (lambda n: (floats(n),), {
        "library": jnp.cumsum, "doubling": _doubling,
        "associative": lambda x: lax.associative_scan(jnp.add, x),
        "scan": lambda x: lax.scan(lambda s, v: (s + v, s + v), jnp.zeros_like(x[0]), x)[1],
        "matrix": lambda x: jnp.tril(jnp.ones((len(x), len(x)))) @ x,
        "fori": lambda x: lax.fori_loop(1, len(x), lambda i, y: y.at[i].add(y[i - 1]), x),
    }),
    "distances": (lambda n: (floats(n, 3),), {
        "plain": lambda x: jnp.sqrt(((x[:, None] - x[None]) ** 2).sum(-1)),
        "squares": lambda x: jnp.sqrt(jnp.maximum((x**2).sum(1)[:, None] + (x**2).sum(1) - 2 * x @ x.T, 0)),
        "norms": lambda x: jax.vmap(lambda a: jax.vmap(lambda b: jnp.linalg.norm(a - b))(x))(x),
        "rows": _row(_distance),
        "fori": lambda x: (
            lax.fori_loop(0, len(x), lambda i, d: d.at[i].set(_distance(x[i], x)), jnp.zeros((len(x),) * 2))
        ),
        "features": lambda x: jnp.sqrt(
            lax.scan(lambda s, c: (s + (c[:, None] - c) ** 2, None), jnp.zeros((len(x),) * 2), x.T)[0]
        ),
    }),
    "polynomial": (lambda n: (floats(6), floats(n)), {
        "library": jnp.polyval, "Horner": _horner, "rising": _rising,
        "powers": lambda c, x: x[:, None] ** jnp.arange(5, -1, -1) @ c,
        "products": lambda c, x: (
            jnp.cumprod(jnp.concatenate([0 * x[:, None] + 1, jnp.tile(x[:, None], 5)], 1), 1) @ c[::-1]
        ),
        "fori": lambda c, x: lax.fori_loop(0, 6, lambda i, s: s * x + c[i], jnp.zeros_like(x)),
    }),
    "eigenvalue": (lambda n: (floats(n, n),), {
        "library": lambda a: jnp.linalg.eigvalsh(a)[-1],
        "scan": lambda a: (lambda v: v @ a @ v)(_power(a)),
        "while": _rayleigh, "squaring": _squaring,
        "fori": lambda a: (
            (lambda v: jnp.max(a @ v) / jnp.max(v))(_repeat(lambda v: a @ v / jnp.abs(a @ v).max(), a[0]))
        ),
        "singular": lambda a: jnp.linalg.svd(a, compute_uv=False)[0],
    }),
    "solve": (lambda n: (floats(n, n), floats(n)), {
        "library": jnp.linalg.solve,
        "inverse": lambda a, b: jnp.linalg.inv(a) @ b,
        "Cholesky": lambda a, b: linalg.cho_solve(linalg.cho_factor(a), b),
        "conjugate": _conjugate,
        "Jacobi": lambda a, b: _repeat(lambda x: x + (b - a @ x) / jnp.diagonal(a), 0 * b),
        "Newton": lambda a, b: _repeat(lambda x: x @ (2 * jnp.eye(len(a)) - a @ x), a.T / jnp.sum(a * a), 8) @ b,
    }),
    "counting": (lambda n: (ints(n),), {
        "library": lambda x: jnp.bincount(x, length=BINS),
        "one hot": lambda x: jax.nn.one_hot(x, BINS).sum(0),
        "compare": lambda x: jax.vmap(lambda k: jnp.count_nonzero(x == k))(jnp.arange(BINS)),
        "sorted": lambda x: jnp.diff(jnp.searchsorted(jnp.sort(x), jnp.arange(BINS + 1))),
        "scan": lambda x: lax.scan(lambda c, v: (c.at[v].add(1), None), jnp.zeros(BINS, int), x)[0],
        "product": lambda x: jnp.ones(len(x)) @ (x[:, None] == jnp.arange(BINS)).astype(jnp.float32),
    }),
    "cross-entropy": (lambda n: (floats(n, 10), ints(n)), {
        "optax": lambda z, y: optax.softmax_cross_entropy_with_integer_labels(z, y).mean(),
        "one hot": lambda z, y: -(jax.nn.one_hot(y, 10) * jax.nn.log_softmax(z)).sum(-1).mean(),
        "gather": lambda z, y: -jnp.take_along_axis(jnp.log(jax.nn.softmax(z)), y[:, None], 1).mean(),
        "rows": lambda z, y: lax.map(lambda one: _loss_of_row(*one), (z, y)).mean(),
        "plain": lambda z, y: (jnp.log(jnp.exp(z).sum(1)) - z[jnp.arange(len(z)), y]).mean(),
        "margins": lambda z, y: (
            jnp.log(jnp.exp(z - (z * (y[:, None] == jnp.arange(10))).sum(1, keepdims=True)).sum(1)).mean()
        ),
    }),
}  # fmt: skip

BEFORE: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda x: x, "scaled": lambda x: x * 3, "squashed": lambda x: jnp.clip(x, -4, 4),
    "negated": lambda x: -x, "reversed": lambda x: x[::-1], "rounded": lambda x: jnp.round(x),
    "square": lambda x: x * x, "absolute": jnp.abs,
}  # fmt: skip
AFTER: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda y: y, "sum": jnp.sum, "largest": jnp.max, "halved": lambda y: y / 2, "tanh": jnp.tanh,
    "shifted": lambda y: y + 1, "finite": lambda y: jnp.where(jnp.isfinite(y), y, 0),
    "range": lambda y: y.max() - y.min(),
}  # fmt: skip
VARIANTS = 8


def families() -> Iterator[Source]:
    """Each recipe in eight variants: something done before, something after, half of them on a batch."""
    rng = np.random.default_rng(17)
    for family, (shapes, recipes) in FAMILIES.items():
        for recipe, f in recipes.items():
            for variant in range(VARIANTS):
                before, after = (list(table.values())[rng.integers(len(table))] for table in (BEFORE, AFTER))
                before, after = (BEFORE["nothing"], AFTER["nothing"]) if variant < 2 else (before, after)

                def whole(*args, f=f, before=before, after=after):
                    return after(f(before(args[0]), *args[1:]))

                batched = jax.vmap(whole) if variant % 2 else whole
                args = shapes(8)
                many = tuple(jax.ShapeDtypeStruct((2, *a.shape), a.dtype) for a in args) if variant % 2 else args
                yield Source(family, recipe, batched, many)


# Wirings: the same statements, connected in three ways

ONE_BY_ONE: dict[str, Callable[[Any], Any]] = {
    "exp": jnp.exp, "log": jnp.log, "sin": jnp.sin, "cos": jnp.cos, "tanh": jnp.tanh, "sqrt": jnp.sqrt,
    "logistic": lax.logistic, "erf": lax.erf, "abs": jnp.abs, "neg": jnp.negative, "floor": jnp.floor,
    "round": jnp.round, "log1p": jnp.log1p, "expm1": lax.expm1, "rsqrt": lax.rsqrt, "ceil": lax.ceil,
}  # each number by itself  # fmt: skip
ACROSS: dict[str, Callable[[Any], Any]] = {
    "cumsum": jnp.cumsum, "cumprod": jnp.cumprod, "cummax": lax.cummax, "cummin": lax.cummin,
    "cumlogsumexp": lax.cumlogsumexp, "sort": lax.sort, "reverse": lambda v: lax.rev(v, (0,)),
    "centre": lambda v: v - v.mean(), "shares": lambda v: v / v.sum(), "largest": lambda v: v / v.max(),
    "roll": lambda v: jnp.roll(v, 1), "differences": lambda v: v - jnp.pad(v, (1, 0))[:-1],
}  # a number depends on others  # fmt: skip
OPERATIONS = ONE_BY_ONE | ACROSS
WIRINGS = ("one by one, then across", "side by side", "across, then one by one")
COMBINE = (jnp.add, jnp.multiply, jnp.subtract, jnp.maximum)
PLANS = 3


FIRST: tuple[Callable[[Any], Any], ...] = (
    lambda v: v + 1, lambda v: v * 2, lambda v: jnp.maximum(v, 0), lambda v: v**3, lambda v: 1 / v,
)  # fmt: skip
LAST: tuple[Callable[[Any], Any], ...] = (jnp.sum, jnp.max, lambda v: v / 2, lambda v: jnp.clip(v, -1, 1), jnp.argmax)


class Plan(NamedTuple):
    """What a wiring has beside its two operations: steps before, what combines, steps after, which is written first."""

    x: Callable[[Any], Any]
    y: Callable[[Any], Any]
    combine: Callable[[Any, Any], Any]
    last: Callable[[Any], Any]
    first_on_top: bool


def wired(first: str, second: str, wiring: str, plan: Plan) -> Callable[[Any, Any], Any]:
    """A function of x and y with two operations on x, one after the other, or one on each."""
    p, q = OPERATIONS[first], OPERATIONS[second]

    def f(x, y):
        x, y = plan.x(x), plan.y(y)
        if wiring == WIRINGS[0]:
            x = q(p(x))
        elif wiring == WIRINGS[2]:
            x = p(q(x))
        elif plan.first_on_top:
            x, y = p(x), q(y)
        else:
            y, x = q(y), p(x)
        return plan.last(plan.combine(x, y))

    return f


def wirings() -> Iterator[Source]:
    """All couples of operations with three plans each, in the three wirings."""
    rng = np.random.default_rng(18)
    for first, second, _ in itertools.product(ONE_BY_ONE, ACROSS, range(PLANS)):
        x, y, combine, last = (table[rng.integers(len(table))] for table in (FIRST, FIRST, COMBINE, LAST))
        plan = Plan(x, y, combine, last, bool(rng.random() < 0.5))
        for wiring in WIRINGS:
            yield Source(wiring, f"{first} {second}", wired(first, second, wiring, plan), (floats(8), floats(8)))


# Programs to time

SIZES = (16, 64, 256)


def timed() -> Iterator[Source]:
    """Each recipe of each family in several sizes."""
    for family, (shapes, recipes) in FAMILIES.items():
        for (recipe, f), size in itertools.product(recipes.items(), SIZES):
            yield Source(family, f"{recipe} {size}", f, shapes(size))


# The corpus that statements are learnt from

UNARY = """
    abs acos arcsinh arctan ceil cos cosh exp exp2 expm1 floor isfinite isnan log log10 log1p log2 negative rad2deg
    reciprocal rint sign sin sinc sinh sqrt square tan tanh cbrt cumsum cumprod sort argsort argmax argmin max min
    mean sum prod std var median ptp any all nanmax nansum nanmean diff flip ravel unique_counts count_nonzero cov
    corrcoef gradient trapezoid tril triu diag trace transpose i0 fix trunc nan_to_num logical_not invert unwrap
    average nonzero histogram vander outer cumulative_sum softplus
"""
BINARY = """
    add subtract multiply divide maximum minimum power arctan2 hypot logaddexp logaddexp2 fmod mod floor_divide
    copysign nextafter heaviside equal not_equal less less_equal greater greater_equal logical_and logical_or
    logical_xor bitwise_and bitwise_or bitwise_xor left_shift right_shift dot inner outer kron convolve correlate
    cross vdot matmul searchsorted interp isclose allclose where polyadd polymul tensordot concatenate stack fmax
    fmin float_power digitize gcd lcm
"""
NEURAL = """
    celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh leaky_relu log_sigmoid log_softmax relu relu6 selu
    sigmoid silu soft_sign softplus sparse_plus squareplus mish logsumexp identity
"""
SPECIAL = """
    bessel_jn digamma entr erf erfc erfinv expit gammaln i0 i0e i1 i1e log_ndtr logit ndtr ndtri xlogy xlog1py
    betaln gammainc gammaincc rel_entr kl_div zeta poch betainc polygamma
"""
MATRIX = """
    cholesky det eigh eigvalsh matrix_norm norm pinv qr slogdet svd matrix_rank matrix_transpose cond
"""
LOSSES = """
    l2_loss huber_loss log_cosh cosine_distance cosine_similarity sigmoid_binary_cross_entropy hinge_loss
    convex_kl_divergence kl_divergence squared_error softmax_cross_entropy
"""
DISTRIBUTIONS = "norm expon laplace logistic cauchy uniform t gamma beta chi2 pareto gennorm"
OPTIMISERS = """
    sgd adam adamw adagrad adadelta rmsprop adamax lion lars lamb novograd yogi radam nadam noisy_sgd sm3
"""


def _named(module: Any, names: str) -> Iterator[tuple[str, Callable]]:
    for name in names.split():
        if hasattr(module, name):
            yield f"{module.__name__.removeprefix('jax.')}.{name}", getattr(module, name)


def _library() -> Iterator[Source]:
    """Functions of the libraries on vectors and matrices, of floats and whole numbers."""
    shapes = [(floats(8),), (floats(4, 8),), (ints(8),)]
    matrix = [(floats(6, 6),), (floats(2, 6, 6),)]
    one = [
        *_named(jnp, UNARY),
        *_named(jnp.fft, "fft ifft rfft fftshift"),
        *_named(jax.nn, NEURAL),
        *_named(special, SPECIAL),
    ]
    two = [*_named(jnp, BINARY), *_named(special, SPECIAL), *_named(optax, LOSSES)]
    two += [pair for name in DISTRIBUTIONS.split() for pair in _named(getattr(stats, name), "logpdf pdf cdf")]
    inverse = [*_named(jnp.linalg, MATRIX), *_named(linalg, "expm sqrtm cholesky lu det")]
    for count, functions, choices in ((1, one, shapes), (2, two, shapes), (1, inverse, matrix)):
        for (name, f), args in itertools.product(functions, choices):
            yield Source(name, "", f, args * count)


def _models() -> Iterator[Source]:
    """The laboratory's networks, their losses, and steps of optimisers."""
    key = jax.random.key(0)
    image, signal = floats(4, 16, 16, 1), floats(4, 8)
    nets = [
        (models.mlp((8, 16, 10), activation=a, norm=n), signal)
        for a in models.ACTIVATIONS
        for n in (None, "batch", "layer")
    ]
    nets += [(models.lenet((16, 16, 1)), image), (models.resnet(2, shape=(16, 16, 1)), image), (models.gru(8), signal)]
    for net, x in nets:
        params = jax.eval_shape(net.init, key)
        for name, loss in (("cross-entropy", optax.softmax_cross_entropy), ("squared", optax.l2_loss)):
            yield Source(
                f"network, {name}",
                "",
                lambda p, x, y, net=net, loss=loss: loss(net.apply(p, x), y).mean(),
                (params, x, floats(4, 10)),
            )
    for name in ("direct", "im2col", "FFT", "Winograd 2", "Winograd 4"):
        f = functools.partial(operators_and_rooflines.convolve, name)
        yield Source(f"convolution, {name}", "", f, (image, floats(3, 3, 1, 2)))
    yield Source("CTC", "", sequence.ctc_loss, (floats(2, 8, 5), ints(2), ints(2, 3), ints(2)))
    for name in ("float16", "bfloat16", "float8_e4m3fn"):
        yield Source(f"rounding, {name}", "", functools.partial(precision.quantize, format=name), (floats(8),))
    params = {"w": floats(8, 4), "b": floats(4)}
    for name, make in _named(optax, OPTIMISERS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what will change
            optimiser = make(0.1)
        memory = jax.eval_shape(optimiser.init, params)
        yield Source(
            name,
            "",
            lambda g, m, p, o=optimiser: optax.apply_updates(p, o.update(g, m, p)[0]),
            (params, memory, params),
        )


def _drawn(rng: np.random.Generator) -> Callable[..., Any]:
    """A program drawn at random: a few steps on vectors, some in a loop or behind a condition."""
    unary = [
        jnp.sin,
        jnp.exp,
        jnp.tanh,
        jnp.sqrt,
        jnp.abs,
        jnp.cumsum,
        jnp.sort,
        jnp.log1p,
        lax.logistic,
        jnp.floor,
        jnp.square,
    ]
    binary = [jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.minimum, jnp.power]
    plan = [(rng.integers(7), rng.integers(100, size=4), 0.5 + rng.random()) for _ in range(rng.integers(2, 8))]

    def f(x, y):
        known = [x, y]
        for what, (i, j, k, m), number in plan:
            a, b, one, two = (
                known[i % len(known)],
                known[j % len(known)],
                unary[k % len(unary)],
                binary[m % len(binary)],
            )
            if what == 0:
                new = lax.cond(a.sum() < number, one, lambda v, two=two, number=number: two(v, number), b)
            elif what == 1:
                new = lax.scan(lambda s, v, two=two, one=one: (two(s, one(v)),) * 2, jnp.zeros(()), a)[1]
            elif what == 2:
                new = jnp.where(a < b, one(a), two(a, b))
            elif what == 3:
                new = lax.fori_loop(0, 5, lambda _, v, one=one, two=two, b=b: two(one(v), b), a)
            else:
                new = one(a) if what == 4 else two(a, b)
            known.append(new)
        return known[-1]

    return f


def corpus() -> Iterator[Source]:
    """Library functions and networks; their gradients, batched versions and couples; programs drawn at random."""
    rng, plain = np.random.default_rng(16), [*_library(), *_models()]
    for source in plain:
        yield source
        yield source._replace(name=f"gradient of {source.name}", f=jax.grad(lambda *a, f=source.f: jnp.sum(f(*a))))
        axes = [jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), arg) for arg in source.args]
        yield source._replace(name=f"batch of {source.name}", f=jax.vmap(source.f), args=tuple(axes))
    single = [source for source in plain if len(source.args) == 1]
    for _ in range(1000):
        one, other = (single[i] for i in rng.integers(len(single), size=2))
        yield one._replace(name=f"{other.name} of {one.name}", f=lambda x, f=one.f, g=other.f: g(f(x)))
    for number in range(500):
        yield Source(f"drawn {number}", "", _drawn(rng), (floats(8), floats(8)))


# The record

PARTS = {"corpus": corpus, "families": families, "wirings": wirings}


def traced(sources: Iterator[Source], distinct: bool = False) -> Iterator[tuple[Source, Graph]]:
    """With each source its graph; what cannot be traced is left out, and so is what has been before, if `distinct`."""
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


def pack(found: Sequence[tuple[Source, Graph]], words: dict[str, int]) -> dict[str, np.ndarray]:
    """Plain arrays: what the programs are called, their lengths, statements and edges one after the other."""
    arrays = {
        f"{kind}s": np.concatenate([getattr(one, kind) for _, one in found]).astype(np.int16)
        for kind in ("data", "control")
    }
    arrays |= {
        f"{kind}_counts": np.array([len(getattr(one, kind)) for _, one in found], np.int16)
        for kind in ("data", "control")
    }
    numbers = [words.setdefault(word, len(words)) for _, one in found for word in one.statements]
    names = {name: np.array([getattr(source, name) for source, _ in found]) for name in ("name", "recipe")}
    return (
        arrays
        | names
        | {
            "statements": np.array(numbers, np.int16),
            "lengths": np.array([len(one.statements) for _, one in found], np.int16),
        }
    )


class Programs(NamedTuple):
    """Part of the record: what each program computes, by which recipe, and its graph."""

    names: list[str]
    recipes: list[str]
    graphs: list[Graph]


def path() -> Path:
    return data.data_folder() / "results" / "code_as_data-programs.npz"


@functools.cache
def load(part: str) -> Programs:
    """The "corpus", the "families" or the "wirings". Raises ValueError if the record is damaged."""
    content = path().read_bytes()
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise ValueError(f"{path()} is damaged. `git checkout data/results/{path().name}` restores it.")
    with np.load(path(), allow_pickle=False) as file:
        words = file["words"]
        own = {name.partition(".")[2]: file[name] for name in file.files if name.startswith(f"{part}.")}

    def split(name: str, counts: str) -> list[np.ndarray]:
        return np.split(own[name], np.cumsum(own[counts].astype(int))[:-1])

    columns = split("statements", "lengths"), split("datas", "data_counts"), split("controls", "control_counts")
    graphs = [Graph(tuple(words[s].tolist()), d.astype(int), c.astype(int)) for s, d, c in zip(*columns, strict=True)]
    return Programs(own["name"].tolist(), own["recipe"].tolist(), graphs)


def main() -> None:
    words: dict[str, int] = {}
    arrays = {}
    for kind, sources in PARTS.items():
        found = list(tqdm(traced(sources(), distinct=kind == "corpus"), desc=kind))
        print(kind, len(found), "programs,", sum(len(one.statements) for _, one in found), "statements")
        arrays |= {f"{kind}.{name}": array for name, array in pack(found, words).items()}
    part = path().with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(file, words=np.array(list(words)), **arrays)
    digest = hashlib.sha256(part.read_bytes()).hexdigest()
    print(len(words), "words,", part.stat().st_size, "bytes, SHA-256", digest)
    part.replace(path())
