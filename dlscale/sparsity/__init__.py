"""Weights that are left out: which ones, how training keeps them out, and what storing the rest really costs.

A weight w is (in, out) in a dense layer and (height, width, in, out) in a convolution, as in `lab.models`. Arrays
with fewer than two axes (biases, scales and shifts of a normalisation) are never pruned: their mask is 1 throughout.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from numpy.typing import ArrayLike

from dlscale.lab import checks

Tree = Any  # a pytree of arrays: parameters, or a mask of their structure
MaskUpdate = Callable[[Array, Tree, Tree, Tree], Tree]

GRANULARITIES = ("weight", "vector", "kernel", "filter", "block")  # and N:M, such as "2:4"
ENCODINGS = ("dense", "bitmap", "relative", "csr")
POINTER_BITS = 32  # of a row's start in CSR


# Which weights stay


def mask(
    params: Tree, density: float | Array, granularity: str = "weight", scope: str = "layer", block: int = 4
) -> Tree:
    """Keep the groups of weights with the largest mean magnitude: 1 where a weight stays, 0 where not, as float32.

    `density` is the fraction of weights that stay, up to the rounding to whole groups, and never less than one group;
    with `scope` "layer" in every array, with "global" over all together, so that layers may be thinned unequally.
    `params` is one array or a tree of them; `density` may be traced.

    A group is (Mao et al. 2017, arXiv:1705.08922) one "weight", a "vector" (one row of a convolution's kernel), a
    "kernel" (what leads from one input channel to one output channel), a "filter" (all that makes one output), or a
    "block" of `block` × `block` inputs and outputs. "N:M" keeps the N largest of every M neighbouring inputs of an
    output (Mishra et al. 2021, arXiv:2104.08378); its density is N / M.

    Raises ValueError for a density outside (0, 1], a granularity that the shape of an array cannot serve, and a layer
    that is zero throughout: its weights have no order.
    """
    checks.known("scope", scope, ("layer", "global"))
    pattern = _pattern(granularity)
    if not isinstance(density, jax.core.Tracer):
        density = float(density)
        if not 0 < checks.finite("density", density) <= 1:
            raise ValueError(f"density must be above 0 and at most 1, not {density!r}.")
        if pattern and not math.isclose(density, pattern[0] / pattern[1]):
            raise ValueError(f"{granularity} has density {pattern[0] / pattern[1]:g}, not {density:g}.")
    leaves, tree = jax.tree.flatten(params)
    chosen = [i for i, leaf in enumerate(leaves) if np.ndim(leaf) >= 2]
    if not chosen:
        raise ValueError("There is nothing to prune: no array has two axes or more.")
    for i in chosen:
        if not isinstance(leaves[i], jax.core.Tracer) and not np.any(np.asarray(leaves[i])):
            raise ValueError(f"A layer of shape {leaves[i].shape} is zero throughout: its weights have no order.")
    shapes = [_group_shape(leaves[i].shape, granularity, block) for i in chosen]
    groups = [jnp.abs(_grouped(jnp.asarray(leaves[i]), shape)) for i, shape in zip(chosen, shapes, strict=True)]
    if pattern:
        kept = [_largest(group, pattern[0]) for group in groups]
    else:
        scores = [group.mean(-1) for group in groups]
        kept = [keep[..., None] for keep in (_keep_each if scope == "layer" else _keep_all)(scores, groups, density)]
    masks = [jnp.ones(np.shape(leaf), jnp.float32) for leaf in leaves]
    for i, shape, keep in zip(chosen, shapes, kept, strict=True):
        wide = jnp.broadcast_to(keep, (*keep.shape[:-1], math.prod(shape))).astype(jnp.float32)
        masks[i] = _ungrouped(wide, shape)
    return tree.unflatten(masks)


def _keep_each(scores: list[Array], groups: list[Array], density: float | Array) -> list[Array]:
    return [_largest(score.ravel(), _count(density, score.size)).reshape(score.shape) for score in scores]


def _keep_all(scores: list[Array], groups: list[Array], density: float | Array) -> list[Array]:
    """The best groups of all layers together, until they hold the fraction of all weights."""
    flat = jnp.concatenate([score.ravel() for score in scores])
    sizes = np.concatenate([np.full(score.size, group.shape[-1]) for score, group in zip(scores, groups, strict=True)])
    order = jnp.argsort(-flat, stable=True)
    before = jnp.cumsum(jnp.asarray(sizes)[order]) - jnp.asarray(sizes)[order]  # weights in better groups
    nearer = before + jnp.asarray(sizes)[order] / 2 < density * int(sizes.sum())  # with this group than without it
    keep = jnp.zeros(flat.shape, bool).at[order].set(nearer.at[0].set(True))
    ends = np.cumsum([score.size for score in scores])[:-1]
    return [part.reshape(score.shape) for part, score in zip(jnp.split(keep, ends), scores, strict=True)]


def _count(density: float | Array, of: int) -> int | Array:
    exact = density * int(of)
    return jnp.maximum(jnp.round(exact), 1) if isinstance(density, jax.core.Tracer) else max(round(exact), 1)


def _largest(scores: Array, count: int | Array) -> Array:
    """True for the `count` largest along the last axis; of equal ones the first."""
    return jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1) < count


def _pattern(granularity: str) -> tuple[int, int] | None:
    """(N, M) of "N:M", None for a name."""
    if match := re.fullmatch(r"(\d+):(\d+)", str(granularity)):
        few, many = map(int, match.groups())
        if not 0 < few <= many:
            raise ValueError(f"N:M keeps N of M weights, at least one and at most all: {granularity!r} cannot be.")
        return few, many
    checks.known("granularity", granularity, GRANULARITIES)
    return None


def _group_shape(shape: tuple[int, ...], granularity: str, block: int) -> tuple[int, ...]:
    """The sides of a group in an array of this shape."""
    if pattern := _pattern(granularity):
        sides = (pattern[1], 1)
    elif granularity == "block":
        sides = (checks.whole("block", block),) * 2
    elif granularity == "weight":
        sides = (1, 1)
    elif granularity == "filter":
        sides = (*shape[:-1], 1)
    elif len(shape) != 4:
        raise ValueError(f"A {granularity} is part of a convolution (height, width, in, out), not of shape {shape}.")
    else:
        sides = (1, shape[1], 1, 1) if granularity == "vector" else (*shape[:2], 1, 1)
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


def _ungrouped(groups: Any, sides: tuple[int, ...]) -> Any:
    """The inverse of `_grouped`."""
    axes, grid = len(sides), groups.shape[:-1]
    split = groups.reshape(*grid, *sides).transpose([axis for a in range(axes) for axis in (a, axes + a)])
    return split.reshape([n * side for n, side in zip(grid, sides, strict=True)])


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


class Encoded(NamedTuple):
    """Weights as a string of bits. What decoding needs beside it (this tuple's other fields) is not counted."""

    payload: np.ndarray  # (bits,) of 0 and 1
    shape: tuple[int, ...]
    encoding: str
    sides: tuple[int, ...]  # of a group
    index_bits: int
    dtype: str

    @property
    def bits(self) -> int:
        return len(self.payload)


def encode(
    weights: ArrayLike, encoding: str = "relative", granularity: str = "weight", index_bits: int | None = None,
    dtype: str = "float32", block: int = 4,
) -> Encoded:  # fmt: skip
    """Write weights as bits; groups (see `mask`) that are zero throughout are left out, one index stands for a group.

    "dense" writes all. "bitmap" has a bit for each group. "relative" has for each group that is not zero the number of
    zero groups before it, in `index_bits` (default 4); where more are zero, filler groups of zeros are written (Han et
    al. 2016, arXiv:1510.00149). "csr" has for each row of groups its start in 32 bits, for each group its column, in
    the fewest bits or `index_bits`; with blocks this is BCSR. Values are "float32" or "float16".
    Raises ValueError for unknown names, a shape that the granularity cannot serve and indices that are too narrow.
    """
    checks.known("encoding", encoding, ENCODINGS)
    checks.known("dtype", dtype, ("float32", "float16"))
    weights = np.asarray(weights, dtype)
    sides = _group_shape(weights.shape, granularity, block)
    groups = _grouped(weights, sides)
    rows = groups.reshape(-1, *groups.shape[-2:])  # (rows, columns, weights of a group)
    flat = rows.reshape(-1, rows.shape[-1])
    least = max(1, (rows.shape[1] - 1).bit_length())
    index_bits = checks.whole("index_bits", (least if encoding == "csr" else 4) if index_bits is None else index_bits)
    if encoding == "csr" and index_bits < least:
        raise ValueError(f"{rows.shape[1]} columns need indices of at least {least} bits, not {index_bits}.")
    present = np.flatnonzero((flat != 0).any(1))
    if encoding == "dense":
        parts = [_values(flat)]
    elif encoding == "bitmap":
        parts = [np.isin(np.arange(len(flat)), present).astype(np.uint8), _values(flat[present])]
    elif encoding == "csr":
        starts = np.searchsorted(present, np.arange(len(rows) + 1) * rows.shape[1])
        parts = [
            _integers(starts, POINTER_BITS),
            _integers(present % rows.shape[1], index_bits),
            _values(flat[present]),
        ]
    else:
        gaps, kept, last = [], [], -1
        for position in present:
            while position - last - 1 >= 2**index_bits:  # a filler stands for this many zeros and itself
                last += 2**index_bits
                gaps.append(2**index_bits - 1)
                kept.append(last)
            gaps.append(position - last - 1)
            kept.append(position)
            last = position
        parts = [_integers(gaps, index_bits), _values(flat[np.array(kept, int)])]
    return Encoded(np.concatenate(parts), weights.shape, encoding, sides, index_bits, dtype)


def stored_bits(mask: Tree, encoding: str = "relative", **options: Any) -> int:
    """Bits that the weights under a mask take, counted on the encoding that is really made; `options`: see `encode`.

    Arrays with fewer than two axes are stored dense.
    """
    total = 0
    for leaf in jax.tree.leaves(mask):
        if np.ndim(leaf) >= 2:
            total += encode(leaf, encoding, **options).bits
        else:
            total += np.size(leaf) * np.dtype(options.get("dtype", "float32")).itemsize * 8
    return total


def _values(groups: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(groups).view(np.uint8).ravel())


def _integers(numbers: ArrayLike, bits: int) -> np.ndarray:
    """Each number in `bits` bits, the highest first."""
    return (np.asarray(numbers, np.int64)[:, None] >> np.arange(bits)[::-1] & 1).astype(np.uint8).ravel()
