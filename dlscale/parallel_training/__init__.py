"""Training split among workers: by examples, by optimizer state, gradients and parameters, or within the layers.

Each function says what one worker does and names the axis of workers, as in `dlscale.collectives`: it runs unchanged
under `jax.vmap`, `jax.pmap`, `jax.shard_map` with `check_vma=False`, and in processes. An axis name of None means a
single worker, which sends nothing. Layers one after the other on different workers are
`dlscale.parallel_training.pipeline`; what to split, and when to send, is planned in
`dlscale.parallel_training.planning`.

What a gradient must send is written down at each collective (`jax.custom_vjp`): all workers compute the same loss, so
that JAX's own rule, the gradient of the sum of all workers' losses, would count it once for each of them. With
`check_vma=True`, its default, `shard_map` has another rule and asks for none of this: there these gradients are wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from dlscale import collectives
from dlscale.lab import checks
from dlscale.lab.models import Layer, Params

Axis = str | None
Tree = Any  # a pytree of arrays

# Collectives with the gradients that they need


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copied(x: Array, axis_name: Axis) -> Array:
    """x as it is, which all workers have; its gradient is the sum of theirs (f of Shoeybi et al. 2019)."""
    return x


def summed(x: Array, axis_name: Axis) -> Array:
    """The sum over the workers, without a gradient of its own."""
    return x if axis_name is None else collectives.all_reduce(x, axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def added(x: Array, axis_name: Axis) -> Array:
    """The sum over the workers; each gets the gradient of the sum as it is (g of Shoeybi et al. 2019)."""
    return summed(x, axis_name)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(part: Array, axis_name: str) -> Array:
    """All workers' parts as one flat array; the gradient of a part is the sum of all workers': a reduce-scatter."""
    return collectives.all_gather(part, axis_name).ravel()


def _scattered(x: Array, axis_name: str) -> Array:
    return collectives.reduce_scatter(x.reshape(lax.axis_size(axis_name), -1), axis_name)


copied.defvjp(lambda x, axis_name: (x, None), lambda axis_name, _, g: (summed(g, axis_name),))
added.defvjp(lambda x, axis_name: (summed(x, axis_name), None), lambda axis_name, _, g: (g,))
gathered.defvjp(
    lambda part, axis_name: (gathered(part, axis_name), None), lambda axis_name, _, g: (_scattered(g, axis_name),)
)


# Examples split: data parallel


def data_parallel(loss: Callable[..., Array], params: Tree, *batch: Array, axis_name: str) -> tuple[Array, Tree]:
    """`loss(params, *batch)` and its gradient, the mean over the workers' batches: one all-reduce of all numbers."""
    own, unravel = ravel_pytree(jax.value_and_grad(loss)(params, *batch))
    return unravel(summed(own, axis_name) / lax.axis_size(axis_name))


def shares(x: Array, workers: int) -> Array:
    """The examples of a batch as (workers, examples of one, …). Raises ValueError if they do not divide."""
    return x.reshape(workers, -1, *x.shape[1:])


# State, gradients and parameters split: ZeRO, fully sharded data parallel


def chunks(params: Tree, workers: int) -> Array:
    """The numbers of a layer as (workers, numbers of one), with zeros behind them."""
    flat, _ = ravel_pytree(params)
    return jnp.pad(flat, (0, -flat.size % workers)).reshape(workers, -1)


def unchunked(flat: Array, like: Tree) -> Tree:
    """The layer whose numbers these are, in the order of `chunks`; `like` has its shapes."""
    zeros, unravel = ravel_pytree(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like))
    return unravel(flat[: zeros.size])


def sharded(
    layers: Sequence[Layer], loss: Callable, shapes: Sequence[Params], stage: int, axis_name: str
) -> Callable[[list[Array], Array, Array], tuple[Array, list[Array]]]:
    """A function of a worker's chunk of each layer, its examples and labels: mean loss, and gradient of the chunks.

    `loss(result, y)` is the mean over the examples, `shapes` are the layers' parameters, or their shapes. The
    optimizer's state belongs to the chunks (stage 1 of Rajbhandari et al. 2020). Gradients are summed and scattered
    all at once, after the backward pass, in stage 1; layer by layer, as soon as they are there, in stages 2 and 3.
    Parameters are gathered for the whole step in stages 1 and 2; in stage 3 those of one layer at a time, once in the
    forward pass and once more in the backward pass.
    Raises ValueError for another stage.
    """
    checks.whole("stage", stage, low=1, high=3)

    def through(layer: Layer, like: Params, part: Array, x: Array) -> Array:
        return layer(unchunked(gathered(part, axis_name) if stage > 1 else part, like), x)

    def value(parts: list[Array], x: Array, y: Array) -> Array:
        for layer, like, part in zip(layers, shapes, parts, strict=True):
            f = functools.partial(through, layer, like)
            x = (jax.checkpoint(f) if stage == 3 else f)(part, x)
        return loss(x, y)

    def gradient(parts: list[Array], x: Array, y: Array) -> tuple[Array, list[Array]]:
        whole = [gathered(part, axis_name) for part in parts] if stage == 1 else parts
        mean, found = jax.value_and_grad(value)(whole, x, y)
        found = [_scattered(g, axis_name) for g in found] if stage == 1 else found
        return jax.tree.map(lambda a: a / lax.axis_size(axis_name), (summed(mean, axis_name), found))

    return gradient


# Layers split: tensor parallel

SPLIT = {"w1": 1, "b1": 0, "w2": 0, "query": 1, "key": 1, "value": 1, "out": 0}  # the axis; others are copied


def split_within(params: Params, workers: int) -> Params:
    """The parameters of `block` or `two_layers` as (workers, …), split or copied, for each worker its own.

    Raises ValueError if a layer's numbers or heads do not divide.
    """

    def one(name: str, array: np.ndarray) -> np.ndarray:
        return np.stack(np.split(array, workers, SPLIT[name]) if name in SPLIT else [array] * workers)

    return {name: one(name, array) for name, array in params.items()}


def two_layers(own: Params, x: Array, axis_name: Axis = None) -> Array:
    """Two dense layers, the first split by columns, the second by rows: what is between them is never sent."""
    hidden = jax.nn.relu(copied(x, axis_name) @ own["w1"] + own["b1"])
    return added(hidden @ own["w2"], axis_name) + own["b2"]


def attention(own: Params, x: Array, axis_name: Axis = None) -> Array:
    """Attention of x (examples, tokens, width) to itself; each worker has some of the heads.

    query, key, value (width, heads, size), out (heads, size, width).
    """
    x = copied(x, axis_name)
    query, key, value = (jnp.einsum("btw,whs->bhts", x, own[name]) for name in ("query", "key", "value"))
    weights = jax.nn.softmax(query @ key.swapaxes(2, 3) / math.sqrt(query.shape[-1]), axis=-1)
    return added(jnp.einsum("bhts,hsw->btw", weights @ value, own["out"]), axis_name)


def block(own: Params, x: Array, axis_name: Axis = None) -> Array:
    """A transformer block: attention and two dense layers, each normalised before and added to what came in."""
    x = x + attention(own, _normal(x), axis_name)
    return x + two_layers(own, _normal(x) * own["scale"], axis_name)


def _normal(x: Array) -> Array:
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
