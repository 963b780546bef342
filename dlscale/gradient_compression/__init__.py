"""Gradients in fewer bytes: compressors in one small shape, and what can be wrapped around them.

A message is a tree of the arrays that travel: packed bits, indices, values. So its bytes are counted, not claimed.
What one compressor does with an array is a pair of functions; `by_array` makes them serve a whole gradient, array by
array, and `joined` makes the gradient one array first. Error feedback, momentum correction, masking and clipping are
wrappers: each takes a compressor and gives one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from dlscale.lab import checks, program

Tree = Any  # a pytree of arrays

ENTRY = 8  # bytes of an entry of a list: an index, int32, and a value, float32
NOWHERE = np.int32(2**31 - 1)  # the index of an entry that fills a list up to its length: it does not travel


class Compressor(NamedTuple):
    """`init(gradient, seed=0)` gives a state, `encode(state, gradient)` a message and the next state.

    `decode(message, like)` gives a gradient with the structure and the shapes of `like`, at least nearly the one that
    went in. Workers that are to draw the same random numbers start with the same seed.
    """

    init: Callable[..., Tree]
    encode: Callable[[Tree, Tree], tuple[Tree, Tree]]
    decode: Callable[[Tree, Tree], Tree]


class Sparse(NamedTuple):
    """Some entries of a flat array, in order of their indices; behind them those that fill up, with index NOWHERE."""

    indices: Array  # int32
    values: Array


def nbytes(message: Tree) -> int:
    """Bytes of a message that travel. Of shapes (`jax.eval_shape`) or in a trace, those of a list without gaps."""

    def one(part: Any) -> int:
        counted = isinstance(part, Sparse) and not isinstance(part.indices, jax.core.Tracer | jax.ShapeDtypeStruct)
        return int((part.indices != NOWHERE).sum() * ENTRY) if counted else program.nbytes(*jax.tree.leaves(part))

    return sum(map(one, jax.tree.leaves(message, is_leaf=lambda part: isinstance(part, Sparse))))


# From an array to a gradient


def by_array(
    encode: Callable[[Array, Array], Tree], decode: Callable[[Tree, Any], Array], random: bool = False
) -> Compressor:
    """A compressor from `message = encode(key, x)` and `x = decode(message, like)` of single arrays.

    Its state is where its random numbers have got to, or empty, with None as `key`. Empty arrays are sent as they are.
    """

    def encode_all(key: Any, gradient: Tree) -> tuple[list[Tree], Any]:
        leaves = jax.tree.leaves(gradient)
        key, *keys = jax.random.split(key, len(leaves) + 1) if random else [key] + [None] * len(leaves)
        return [encode(own, x) if x.size else x for own, x in zip(keys, leaves, strict=True)], key

    def decode_all(message: list[Tree], like: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(like)
        parts = zip(message, leaves, strict=True)
        return structure.unflatten([decode(part, leaf) if leaf.size else part for part, leaf in parts])

    return Compressor(lambda gradient, seed=0: jax.random.key(seed) if random else (), encode_all, decode_all)


def joined(compressor: Compressor) -> Compressor:
    """The same for all numbers of a gradient as one flat array: they then compete with each other."""

    def decode(message: Tree, like: Tree) -> Tree:
        zeros, unravel = ravel_pytree(jax.tree.map(jnp.zeros_like, like))
        return unravel(compressor.decode(message, zeros))

    init = lambda gradient, seed=0: compressor.init(ravel_pytree(jax.tree.map(jnp.zeros_like, gradient))[0], seed)  # noqa: E731
    return Compressor(init, lambda state, gradient: compressor.encode(state, ravel_pytree(gradient)[0]), decode)


@functools.cache
def dense() -> Compressor:
    """Everything, as it is: what the others are compared with."""
    return by_array(lambda key, x: x, lambda message, like: message)


# Packed bits


def pack(codes: Array, bits: int) -> Array:
    """Whole numbers below 2^bits, flat, as (bits, ⌈n / 8⌉) bytes: first the lowest bit of all, then the next."""
    planes = codes.ravel()[None] >> jnp.arange(bits, dtype=codes.dtype)[:, None]
    return jnp.packbits((planes & 1).astype(jnp.uint8), axis=1)


def unpack(packed: Array, count: int) -> Array:
    """The `count` numbers that were packed, as uint8, or as uint16 where that does not hold them."""
    planes = jnp.unpackbits(packed, axis=1, count=count).astype(f"uint{8 if len(packed) <= 8 else 16}")
    return (planes << jnp.arange(len(packed), dtype=planes.dtype)[:, None]).sum(0, dtype=planes.dtype)


@functools.cache
def one_bit() -> Compressor:
    """A sign for each number, and for each column the means of what is negative in it, and of what is not.

    Seide et al. 2014. An array with one axis is a single column.
    """

    def encode(key: None, x: Array) -> Tree:
        x = x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(-1, 1)
        positive = x >= 0
        means = [jnp.where(side, x, 0).sum(0) / jnp.maximum(side.sum(0), 1) for side in (~positive, positive)]
        # a sum over nothing would hide a NaN, which is neither
        return {"bits": pack(positive.astype(jnp.uint8), 1), "means": jnp.stack(means) + 0 * x.sum(0)}

    def decode(message: Tree, like: Any) -> Array:
        negative, positive = message["means"]
        bits = unpack(message["bits"], like.size).reshape(-1, negative.size)
        return jnp.where(bits == 1, positive, negative).reshape(like.shape)

    return by_array(encode, decode)


@functools.cache
def quantised(levels: int, clip: float | None = None, rounding: str = "stochastic", shrink: bool = False) -> Compressor:
    """Each number as one of `levels` multiples of scale / levels, or their negatives, or 0; and a scale for each array.

    The scale is the largest magnitude. `clip`: first cut off at so many standard deviations. `rounding`: "stochastic",
    to the next level above with the probability that makes it right on average (QSGD: Alistarh et al. 2017), or
    "nearest". `shrink`: divided by 1 + ω, where ω is the variance of this over the squared length: then what a message
    leaves is on average shorter than what came, ω / (1 + ω) of its square. TernGrad (Wen et al. 2017) has one level,
    and clips at 2.5.
    """
    bits = (2 * checks.whole("levels", levels, high=2**15 - 1)).bit_length()  # for 2 · levels + 1 codes
    checks.known("rounding", rounding, ("stochastic", "nearest"))
    checks.finite("clip", 0 if clip is None else clip)

    def encode(key: Array, x: Array) -> Tree:
        x = x if clip is None else jnp.clip(x, -clip * x.std(), clip * x.std())
        scale = jnp.abs(x).max()
        unit = jnp.where(scale > 2.0**64, 2.0**-64, 1)  # 1 / scale, which XLA multiplies by, may be too small a number
        steps = jnp.clip(x * unit / jnp.where(scale > 0, scale * unit, 1) * levels, -levels, levels)
        below = jnp.floor(steps)
        coin = 0.5 if rounding == "nearest" else jax.random.uniform(key, x.shape)
        codes = below + (coin < steps - below) + levels
        variance, square = ((steps - below) * (1 - steps + below)).sum(), (steps * steps).sum()
        scale = scale * square / jnp.maximum(square + variance, 1e-30) if shrink else scale
        return {"codes": pack(codes.astype(f"uint{8 if bits <= 8 else 16}"), bits), "scale": scale}

    def decode(message: Tree, like: Any) -> Array:
        codes = unpack(message["codes"], like.size).astype(jnp.float32) - levels
        return (codes * (message["scale"] / levels)).reshape(like.shape)

    return by_array(encode, decode, random=True)


# Few entries


def where_largest(x: Array, k: Array | int) -> Array:
    """Whether each entry of a flat x is one of the k of the largest magnitude; NaN is the largest. k may be traced.

    Bisection asks 31 times how many are at least so large. `lax.top_k` is faster, but must know k beforehand.
    """
    order = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)  # their order is that of the numbers

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + (high - low) // 2
        enough = (order >= middle).sum() >= k
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    last, _ = lax.fori_loop(0, 31, halve, (jnp.int32(0), NOWHERE))
    above, equal = order > last, order == last
    return above | (equal & (jnp.cumsum(equal) <= k - above.sum()))  # of equal ones the first


def largest(x: Array, k: int) -> Sparse:
    """The k entries of a flat x of the largest magnitude. Raises ValueError for a k below 1 or above the size."""
    _, places = lax.top_k(jnp.abs(x), checks.whole("k", k, high=x.size))
    places = jnp.sort(places)
    return Sparse(places, x[places])


def scattered(entries: Sparse, size: int) -> Array:
    """The flat array of this size that has these entries, and zeros elsewhere."""
    return jnp.zeros(size, entries.values.dtype).at[entries.indices].add(entries.values, mode="drop")


def count(share: float, size: int) -> int:
    """How many entries a share is: at least one. Raises ValueError unless the share is above 0 and at most 1."""
    if not 0 < checks.finite("share", share) <= 1:
        raise ValueError(f"share must be above 0 and at most 1, not {share!r}.")
    return max(1, round(share * size))


@functools.cache
def top_k(share: float) -> Compressor:
    """Of each array this share of its entries, those of the largest magnitude: indices and values."""
    count(share, 1)
    decode = lambda message, like: scattered(message, like.size).reshape(like.shape)  # noqa: E731
    return by_array(lambda key, x: largest(x.ravel(), count(share, x.size)), decode)


@functools.cache
def warm_up(share: float, first: float, steps: int) -> Compressor:
    """`top_k` whose share falls from `first` by equal factors until, after so many steps, it is `share`.

    Its list has the length of the first one; what fills it up later does not travel (`nbytes`). Lin et al. 2018.
    """
    checks.whole("steps", steps), count(first, 1)

    def encode(step: Array, gradient: Tree) -> tuple[list[Sparse], Array]:
        now = first * (share / first) ** jnp.minimum(step / steps, 1.0)

        def one(x: Array) -> Sparse:
            k = jnp.clip(jnp.round(now * x.size), 1, x.size).astype(jnp.int32)
            order = jnp.arange(1, count(first, x.size) + 1)
            places = jnp.searchsorted(jnp.cumsum(where_largest(x, k)), order).astype(jnp.int32)
            there = places < x.size
            return Sparse(jnp.where(there, places, NOWHERE), jnp.where(there, x[places], 0))

        return [one(x.ravel()) if x.size else x for x in jax.tree.leaves(gradient)], step + 1

    return top_k(share)._replace(init=lambda gradient, seed=0: jnp.int32(0), encode=encode)


# Factors


@functools.cache
def low_rank(rank: int, axis_name: str | None = None) -> Compressor:
    """A matrix as a product of two, of `rank` columns, by one step of power iteration from the step before.

    PowerSGD (Vogels et al. 2019). With an axis of workers both factors are means over them, two all-reduces, so that
    all have the same message. Arrays of one axis are sent whole. What comes back is a projection: never further from
    the matrix than zero is. A matrix of at most this rank comes back as it was, at the latest in the second step.
    """
    checks.whole("rank", rank)
    mean = (lambda a: a) if axis_name is None else (lambda a: lax.pmean(a, axis_name))

    def init(gradient: Tree, seed: Array | int = 0) -> list[Array]:
        leaves = jax.tree.leaves(gradient)
        keys = jax.random.split(jax.random.key(0), len(leaves))  # the same for all workers, whatever their seed
        sides = [(math.prod(x.shape[1:]), math.prod(x.shape[:1])) for x in leaves]
        return [jax.random.normal(key, (n, min(rank, n, m))) for key, (n, m) in zip(keys, sides, strict=True)]

    def encode(state: list[Array], gradient: Tree) -> tuple[list[Tree], list[Array]]:
        def one(q: Array, begin: Array, x: Array) -> Tree:
            matrix, size = x.reshape(len(x), len(q)), jnp.abs(q).max(0)
            q = jnp.where(size > 0, q / jnp.where(size > 0, size, 1), begin)  # a new direction for one that vanished
            p, _ = jnp.linalg.qr(mean(matrix @ q))
            return p, mean(matrix.T @ p)

        trees = zip(state, init(gradient), jax.tree.leaves(gradient), strict=True)
        message = [one(q, begin, x) if x.ndim > 1 and x.size else mean(x) for q, begin, x in trees]
        return message, [part[1] if isinstance(part, tuple) else q for part, q in zip(message, state, strict=True)]

    def decode(message: list[Tree], like: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(like)
        whole = [part[0] @ part[1].T if isinstance(part, tuple) else part for part in message]
        return structure.unflatten([a.reshape(b.shape).astype(b.dtype) for a, b in zip(whole, leaves, strict=True)])

    return Compressor(init, encode, decode)


# Wrappers


class Memory(NamedTuple):
    """What a worker remembers, as a gradient, and the state of the compressor inside."""

    own: Tree
    inner: Tree


def _remembering(compressor: Compressor, encode: Callable[[Memory, Tree], tuple[Tree, Memory]]) -> Compressor:
    """A wrapper with a memory that starts at zero, for `encode` of finite numbers.

    Of a gradient with a number that is not finite nothing is remembered: the message becomes NaN, for all to see.
    """

    def init(gradient: Tree, seed: Array | int = 0) -> Memory:
        return Memory(jax.tree.map(jnp.zeros_like, gradient), compressor.init(gradient, seed))

    def guarded(state: Memory, gradient: Tree) -> tuple[Tree, Memory]:
        finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(gradient)]).all()
        message, new = encode(state, jax.tree.map(lambda x: jnp.where(finite, x, jnp.nan), gradient))
        return message, jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)

    return Compressor(init, guarded, compressor.decode)


@functools.cache
def error_feedback(compressor: Compressor) -> Compressor:
    """What was not sent is remembered and added to the next gradient (Seide et al. 2014): nothing is lost."""

    def encode(state: Memory, gradient: Tree) -> tuple[Tree, Memory]:
        due = jax.tree.map(jnp.add, gradient, state.own)
        message, inner = compressor.encode(state.inner, due)
        return message, Memory(jax.tree.map(jnp.subtract, due, compressor.decode(message, due)), inner)

    return _remembering(compressor, encode)


@functools.cache
def momentum_correction(compressor: Compressor, momentum: float) -> Compressor:
    """Each worker remembers its own velocity and compresses that, not the gradient (Lin et al. 2018).

    Who updates the parameters then adds no momentum of its own.
    """
    checks.finite("momentum", momentum)

    def encode(state: Memory, gradient: Tree) -> tuple[Tree, Memory]:
        velocity = jax.tree.map(lambda v, g: momentum * v + g, state.own, gradient)
        message, inner = compressor.encode(state.inner, velocity)
        return message, Memory(velocity, inner)

    return _remembering(compressor, encode)


@functools.cache
def factor_masking(compressor: Compressor) -> Compressor:
    """Around `momentum_correction`: where an entry was sent, the velocity starts at zero again (Lin et al. 2018)."""

    def encode(state: Memory, gradient: Tree) -> tuple[Tree, Memory]:
        message, state = compressor.encode(state, gradient)
        sent = compressor.decode(message, gradient)
        return message, state._replace(own=jax.tree.map(lambda v, s: jnp.where(s == 0, v, 0), state.own, sent))

    return compressor._replace(encode=encode)


@functools.cache
def clipped(compressor: Compressor, limit: float) -> Compressor:
    """A worker's gradient is first made no longer than `limit` (Lin et al. 2018); NaN where its length is infinite."""
    checks.finite("limit", limit)

    def encode(state: Any, gradient: Tree) -> tuple[Tree, Any]:
        length = jnp.sqrt(sum((x * x).sum() for x in jax.tree.leaves(gradient)))
        factor = jnp.where(jnp.isinf(length), jnp.nan, jnp.where(length > limit, limit / length, 1.0))
        return compressor.encode(state, jax.tree.map(lambda x: x * factor, gradient))

    return compressor._replace(encode=encode)


def expected_union(size: int, k: int, workers: int) -> float:
    """How many different entries lists of k of `size` have together, if each worker draws its own at random."""
    return size * (1 - (1 - k / size) ** workers)
