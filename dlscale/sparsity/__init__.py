"""Weights that are left out: which ones, how training keeps them out, and what storing the rest really costs.

A weight w is (in, out) in a dense layer and (height, width, in, out) in a convolution, as in `lab.models`. Arrays
with fewer than two axes (biases, scales and shifts of a normalisation) are never pruned: their mask is 1 throughout.
"""

import math
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

GRANULARITIES = ("weight", "vector", "kernel", "filter", "block")


# Which weights stay


def mask(params: Tree, density: float | Array, granularity: str = "weight", scope: str = "layer") -> Tree:
    """Keep the groups of weights with the largest mean magnitude: 1 where a weight stays, 0 where not, as float32.

    `density` is the fraction of weights that stay, up to the rounding to whole groups, and never less than one group;
    with `scope` "layer" in every array, with "global" over all together, so that layers may be thinned unequally.
    `params` is one array or a tree of them; `density` may be traced.

    A group is (Mao et al. 2017, arXiv:1705.08922) one "weight", a "vector" (one row of a convolution's kernel), a
    "kernel" (what leads from one input channel to one output channel), a "filter" (all that makes one output), or a
    "block" of 4 × 4 inputs and outputs. Of equal groups the first stays.

    Raises ValueError for a density outside (0, 1], a granularity that the shape of an array cannot serve, and NaN. In a
    trace a NaN stays, for all to see.
    """
    checks.known("scope", scope, ("layer", "global"))
    if not isinstance(density, jax.core.Tracer) and not 0 < density <= 1:
        raise ValueError(f"density must be above 0 and at most 1, not {density!r}.")
    weights = [leaf for leaf in jax.tree.leaves(params) if np.ndim(leaf) >= 2]
    if not weights:
        raise ValueError("There is nothing to prune: no array has two axes or more.")
    for w in weights:
        if not w.size:
            raise ValueError(f"A layer of shape {w.shape} has no weights.")
        if not isinstance(w, jax.core.Tracer) and np.isnan(w).any():
            raise ValueError(f"A layer of shape {w.shape} has a weight that is NaN: training diverged before.")
    sides = [group_shape(w.shape, granularity) for w in weights]
    scores = [jnp.abs(_grouped(jnp.asarray(w), side)).mean(-1) for w, side in zip(weights, sides, strict=True)]
    if scope == "global":
        kept = _largest(scores, sides, density)
    else:
        kept = [_largest([score], [side], density)[0] for score, side in zip(scores, sides, strict=True)]
    masks = (jnp.kron(keep, jnp.ones(side)) for keep, side in zip(kept, sides, strict=True))
    return jax.tree.map(lambda w: (next(masks) if np.ndim(w) >= 2 else jnp.ones_like(w)).astype(jnp.float32), params)


def _largest(scores: list[Array], sides: list[tuple[int, ...]], density: float | Array) -> list[Array]:
    """1 for the groups of the largest scores, NaN the largest, until they hold the fraction of all weights."""
    flat, as_scores = ravel_pytree(scores)
    order = jnp.argsort(jnp.where(jnp.isnan(flat), -jnp.inf, -flat), stable=True)
    sizes = np.repeat([math.prod(side) for side in sides], [score.size for score in scores])
    ordered = jnp.asarray(sizes)[order] if np.ptp(sizes) else sizes
    upto = ordered.cumsum()
    nearer = upto - ordered / 2 < density * upto[-1]  # with this group than without it
    stays = np.arange(len(order)) < jnp.maximum(nearer.sum(), 1)
    return as_scores(jnp.zeros_like(flat).at[order].set(stays))  # a second sort would take as long as the first


def group_shape(shape: tuple[int, ...], granularity: str) -> tuple[int, ...]:
    """The sides of a group (see `mask`) in an array of this shape."""
    checks.known("granularity", granularity, GRANULARITIES)
    if granularity in ("vector", "kernel") and len(shape) != 4:
        raise ValueError(f"A {granularity} is part of a convolution (height, width, in, out), not of shape {shape}.")
    sides = {"weight": (1,), "vector": (*shape[1:2], 1, 1), "kernel": (*shape[:2], 1, 1), "filter": (*shape[:-1], 1)}
    side = sides.get(granularity, (4, 4))
    side = (1,) * (len(shape) - len(side)) + side
    if any(length % part for length, part in zip(shape, side, strict=True)):
        raise ValueError(f"A block needs inputs × outputs in multiples of 4 × 4, not shape {shape}.")
    return side


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


def stored_bits(weights: ArrayLike, encoding: str, granularity: str = "weight", value_bits: int = 16) -> int:
    """The bits that weights take on a disk; groups (see `mask`) that are zero throughout are left out.

    One index stands for a group, before its values of `value_bits` each. A "bitmap" has a bit for each group. The
    "relative" index has, for each group that is not zero, the number of zero groups before it, in 4 bits; where more
    are zero, filler groups of zeros are written (after Han et al. 2016, arXiv:1510.00149).
    Raises ValueError for unknown names and a shape that the granularity cannot serve.
    """
    checks.known("encoding", encoding, ("bitmap", "relative"))
    weights = np.asarray(weights)
    groups = _grouped(weights, group_shape(weights.shape, granularity))
    kept, values = np.flatnonzero(groups.any(-1)), value_bits * groups.shape[-1]
    if encoding == "bitmap":
        return groups[..., 0].size + len(kept) * values
    fillers = (np.diff(kept, prepend=-1) - 1) // 2**4  # each stands for so many: the zeros before it, itself
    return (len(kept) + int(fillers.sum())) * (4 + values)
