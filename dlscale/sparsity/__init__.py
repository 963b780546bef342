"""Weights that are left out: which ones, how training keeps them out, and what storing the rest really costs.

A weight w is (in, out) in a dense layer and (height, width, in, out) in a convolution, as in `lab.models`. Arrays
with fewer than two axes (biases, scales and shifts of a normalisation) are never pruned: their mask is 1 throughout.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from numpy.typing import ArrayLike

from dlscale.lab import checks

Tree = Any  # a pytree of arrays: parameters, or a mask of their structure
MaskUpdate = Callable[[Array, Tree, Tree, Tree], Tree]

GRANULARITIES = ("weight", "vector", "kernel", "filter", "block")  # and N:M, such as "2:4"
ENCODINGS = ("dense", "bitmap", "relative", "csr")
POINTER_BITS = 32  # of a row's start in CSR


# Which weights stay


def mask(params: Tree, density: float | Array, granularity: str = "weight", scope: str = "layer") -> Tree:
    """Keep the groups of weights with the largest mean magnitude: 1 where a weight stays, 0 where not, as float32.

    `density` is the fraction of weights that stay, up to the rounding to whole groups, and never less than one group;
    with `scope` "layer" in every array, with "global" over all together, so that layers may be thinned unequally.
    `params` is one array or a tree of them; `density` may be traced.

    A group is (Mao et al. 2017, arXiv:1705.08922) one "weight", a "vector" (one row of a convolution's kernel), a
    "kernel" (what leads from one input channel to one output channel), a "filter" (all that makes one output), or a
    "block" of 4 × 4 inputs and outputs. "N:M" keeps the N largest of every M neighbouring inputs of an
    output (Mishra et al. 2021, arXiv:2104.08378); its density is N / M.

    Raises ValueError for a density outside (0, 1], a granularity that the shape of an array cannot serve, a layer that
    is zero throughout, since its weights have no order, and NaN. In a trace a NaN stays, for all to see.
    """
    checks.known("scope", scope, ("layer", "global"))
    pattern = _pattern(granularity)
    if not isinstance(density, jax.core.Tracer):
        density = float(density)
        if not 0 < density <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {density!r}.")
        if pattern and not math.isclose(density, pattern[0] / pattern[1]):
            raise ValueError(f"{granularity} has density {pattern[0] / pattern[1]:g}, not {density:g}.")
    weights = [leaf for leaf in jax.tree.leaves(params) if np.ndim(leaf) >= 2]
    if not weights:
        raise ValueError("There is nothing to prune: no array has two axes or more.")
    for w in weights:
        if not isinstance(w, jax.core.Tracer) and not np.any(np.asarray(w)):
            raise ValueError(f"A layer of shape {w.shape} is zero throughout: its weights have no order.")
        if not isinstance(w, jax.core.Tracer) and np.isnan(w).any():
            raise ValueError(f"A layer of shape {w.shape} has a weight that is NaN: training diverged before.")
    sides = [group_shape(w.shape, granularity) for w in weights]
    groups = [jnp.abs(_grouped(jnp.asarray(w), side)) for w, side in zip(weights, sides, strict=True)]
    if pattern:  # groups are (…, inputs / M, outputs, M)
        kept = [_largest(group, pattern[0]).swapaxes(-1, -2) for group in groups]
        masks = [keep.reshape(w.shape) for keep, w in zip(kept, weights, strict=True)]
    else:
        scores = [group.mean(-1) for group in groups]
        kept = [_best(score, density) for score in scores] if scope == "layer" else _best_of_all(scores, sides, density)
        masks = [jnp.kron(keep, jnp.ones(side)) for keep, side in zip(kept, sides, strict=True)]
    rest = iter(masks)
    return jax.tree.map(lambda w: (next(rest) if np.ndim(w) >= 2 else jnp.ones_like(w)).astype(jnp.float32), params)


def _best(scores: Array, density: float | Array) -> Array:
    """The best groups of a layer."""
    exact = density * scores.size
    count = jnp.maximum(jnp.round(exact), 1) if isinstance(density, jax.core.Tracer) else max(round(exact), 1)
    return _largest(scores.ravel(), count).reshape(scores.shape)


def _best_of_all(scores: list[Array], sides: list[tuple[int, ...]], density: float | Array) -> list[Array]:
    """The best groups of all layers together, until they hold the fraction of all weights."""
    flat, as_layers = ravel_pytree(scores)
    sizes = np.repeat([math.prod(side) for side in sides], [score.size for score in scores])
    ordered = jnp.asarray(sizes)[jnp.argsort(-flat, stable=True)]
    before = jnp.cumsum(ordered) - ordered  # weights in better groups
    nearer = before + ordered / 2 < density * int(sizes.sum())  # with this group than without it
    return as_layers(_largest(flat, jnp.maximum(nearer.sum(), 1)).astype(flat.dtype))


def _largest(scores: Array, count: int | Array) -> Array:
    """True for the `count` largest along the last axis, NaN the largest; of equal ones the first."""
    order = jnp.where(jnp.isnan(scores), -jnp.inf, -scores)
    return jnp.argsort(jnp.argsort(order, axis=-1, stable=True), axis=-1) < count


def _pattern(granularity: str) -> tuple[int, int] | None:
    """(N, M) of "N:M", None for a name."""
    if match := re.fullmatch(r"(\d+):(\d+)", str(granularity)):
        few, many = map(int, match.groups())
        if not 0 < few <= many:
            raise ValueError(f"N:M keeps N of M weights, at least one and at most all: {granularity!r} cannot be.")
        return few, many
    checks.known("granularity", granularity, GRANULARITIES)
    return None


def group_shape(shape: tuple[int, ...], granularity: str) -> tuple[int, ...]:
    """The sides of a group (see `mask`) in an array of this shape."""
    pattern = _pattern(granularity)
    if len(shape) < 2:
        raise ValueError(f"Weights need two axes or more, inputs and outputs last, not shape {shape}.")
    if granularity in ("vector", "kernel") and len(shape) != 4:
        raise ValueError(f"A {granularity} is part of a convolution (height, width, in, out), not of shape {shape}.")
    named = {"weight": (1, 1), "vector": (*shape[1:2], 1, 1), "kernel": (*shape[:2], 1, 1), "filter": (*shape[:-1], 1)}
    named["block"] = (4, 4)
    sides = named.get(granularity) or (pattern[1], 1)
    sides = (1,) * (len(shape) - len(sides)) + sides
    if any(length % side for length, side in zip(shape, sides, strict=True)):
        wanted = " × ".join(map(str, sides[-2:]))
        raise ValueError(f"{granularity} needs inputs × outputs in multiples of {wanted}, not shape {shape}.")
    return sides


def _grouped(w: Any, sides: tuple[int, ...]) -> Any:
    """(…) to (*grid, weights of a group)."""
    split = w.reshape([part for n, side in zip(w.shape, sides, strict=True) for part in (n // side, side)])
    outer, inner = range(0, split.ndim, 2), range(1, split.ndim, 2)
    return split.transpose(*outer, *inner).reshape(*split.shape[::2], math.prod(sides))


# Training with them


class MaskedState(NamedTuple):
    """`mask` is the present one; `step` counts the updates made."""

    step: Array
    mask: Tree
    inner: optax.OptState


def masked(optimizer: optax.GradientTransformation, mask: Tree | MaskUpdate) -> optax.GradientTransformation:
    """Train with `optimizer` and hold what the mask leaves out at exactly zero, whatever the optimizer adds.

    `mask` is fixed, or a function (step, params, mask, gradient) → mask that is asked before every update, as `gradual`
    makes; it begins with a mask of ones. Gradients of weights that are out do not reach the optimizer's memory.
    """
    update_mask = mask if callable(mask) else lambda step, params, present, gradient: mask

    def init(params: Tree) -> MaskedState:
        begin = jax.tree.map(jnp.ones_like, params) if callable(mask) else mask
        return MaskedState(jnp.zeros((), jnp.int32), begin, optimizer.init(params))

    def update(gradient: Tree, state: MaskedState, params: Tree | None = None) -> tuple[Tree, MaskedState]:
        if params is None:
            raise ValueError("A masked optimizer needs the parameters: update(gradient, state, params).")
        keep = update_mask(state.step, params, state.mask, gradient)
        inner_updates, inner = optimizer.update(jax.tree.map(jnp.multiply, gradient, keep), state.inner, params)
        # w + (-w) is exactly 0, also for a weight that leaves at this step
        updates = jax.tree.map(lambda u, w, k: jnp.where(k > 0, u, -w), inner_updates, params, keep)
        return updates, MaskedState(state.step + 1, keep, inner)

    return optax.GradientTransformation(init, update)


def gradual(density: optax.Schedule, every: int, **options: Any) -> MaskUpdate:
    """Prune to density(step) at every `every`-th step (Zhu & Gupta 2017, arXiv:1710.01878), for `masked`.

    Their cubic schedule is `optax.polynomial_schedule(1, final_density, power=3, …)`. `options` are those of `mask`.
    A step whose density is 1 leaves all weights in.
    """
    checks.whole("every", every)

    def update(step: Array, params: Tree, present: Tree, gradient: Tree) -> Tree:
        return jax.lax.cond(step % every == 0, lambda: mask(params, density(step), **options), lambda: present)

    return update


# Storing them


def encode(
    weights: ArrayLike,
    encoding: str = "relative",
    granularity: str = "weight",
    index_bits: int = 4,
    dtype: str = "float32",
) -> np.ndarray:
    """Write weights as bits (bits,) of 0 and 1; groups (see `mask`) that are zero throughout are left out.

    One index stands for a group. "dense" writes all. "bitmap" has a bit for each group. "relative" has for each group
    that is not zero the number of zero groups before it, in `index_bits`; where more are zero, filler groups of zeros
    are written (after Han et al. 2016, arXiv:1510.00149). "csr" has for each row of groups its start in 32 bits, for
    each group its column, in the fewest bits; with blocks this is BCSR. Values are "float32" or "float16".
    Raises ValueError for unknown names, a shape that the granularity cannot serve, indices of more than 32 bits.
    """
    checks.known("encoding", encoding, ENCODINGS)
    checks.known("dtype", dtype, ("float32", "float16"))
    weights = np.asarray(weights, dtype)
    groups = _grouped(weights, group_shape(weights.shape, granularity))
    rows, columns, flat = math.prod(groups.shape[:-2]), groups.shape[-2], groups.reshape(-1, groups.shape[-1])
    checks.whole("index_bits", index_bits, high=POINTER_BITS)
    kept = np.flatnonzero(flat.any(1))
    if encoding == "dense":
        return _values(flat)
    if encoding == "bitmap":
        indices = np.isin(np.arange(len(flat)), kept).astype(np.uint8)
    elif encoding == "csr":
        starts = np.searchsorted(kept, columns * np.arange(rows + 1))
        least = max(1, (columns - 1).bit_length())
        indices = np.concatenate([_integers(starts, POINTER_BITS), _integers(kept % columns, least)])
    else:
        gaps, most = np.diff(kept, prepend=-1) - 1, 2**index_bits  # zeros before each, and those of a filler and itself
        written = np.full((gaps // most + 1).sum(), most - 1)
        written[(gaps // most + 1).cumsum() - 1] = gaps % most
        indices, kept = _integers(written, index_bits), np.cumsum(written + 1) - 1
    return np.concatenate([indices, _values(flat[kept])])


def _values(groups: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(groups).view(np.uint8).ravel())


def _integers(numbers: ArrayLike, bits: int) -> np.ndarray:
    """Each number in `bits` bits, the highest first."""
    return (np.asarray(numbers, np.int64)[:, None] >> np.arange(bits)[::-1] & 1).astype(np.uint8).ravel()
