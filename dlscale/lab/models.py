"""Small networks as lists of layers: pure functions, with plain pytrees of arrays as parameters.

Each constructor is cached: the same arguments give the same `Model`, so that what JAX compiled for it is found again.
Weights start from He et al. 2015 (arXiv:1502.01852): variance 2 / fan-in before a ReLU, else 1 / fan-in; biases at 0.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlscale.lab import checks
from dlscale.lab.data import Dataset

Params = dict[str, Any]

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid, "linear": lambda x: x}


@dataclass(frozen=True)
class Layer:
    """`layer(own, x)` is the activation of compute(own, x), with the layer's own parameters: a dict of arrays.

    x and the result have the examples as their first axis (but between the layers of a `gru`). Layers that compute
    the same are equal. `measure(x)`, where the layer is a batch norm, gives the `Statistics` that `freeze` keeps.
    """

    compute: Callable[[Params, Array], Array]
    activation: Callable[[Array], Array] = ACTIVATIONS["linear"]
    measure: Callable[[Array], Statistics] | None = None

    def __call__(self, own: Params, x: Array) -> Array:
        return self.activation(self.compute(own, x))


@dataclass(frozen=True, eq=False)
class Model:
    """`params = init(key)` and `logits = apply(params, x)`; x is (examples, …), logits (examples, classes).

    `layers` are in the order in which they follow each other; the parameters of the one called "conv1" are
    params["conv1"]. `model.layers.values()` and `model.split(params)` are what takes the layers one by one.
    """

    init: Callable[[Array], Params]
    layers: Mapping[str, Layer]

    def split(self, params: Params) -> list[Params]:
        """The parameters of each layer; an empty dict for a layer that has none."""
        return [params.get(name, {}) for name in self.layers]

    @functools.cached_property  # one function, not a new method at each look: JAX finds again what it compiled for it
    def apply(self) -> Callable[[Params, Array], Array]:
        """The layers one after the other."""

        def apply(params: Params, x: Array) -> Array:
            for layer, own in zip(self.layers.values(), self.split(params), strict=True):
                x = layer(own, x)
            return x

        return apply


def _same_model(make: Callable[..., Model]) -> Callable[..., Model]:
    """Return the same `Model` for the same arguments, however they are passed."""
    cached, signature = functools.cache(make), inspect.signature(make)

    @functools.wraps(make)
    def wrapper(*args: Any, **options: Any) -> Model:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        return cached(*(tuple(value) if isinstance(value, list) else value for value in bound.args))

    return wrapper


def build(name: str, dataset: Dataset, **options: Any) -> Model:
    """The model called `name` ("mlp", "lenet", "resnet", "gru") with the inputs and classes of `dataset`.

    `options` are those of the model; by default an mlp has `hidden` layers (128, 128).
    Raises ValueError for an unknown name and for examples that the model cannot take.
    """
    shape, classes = dataset.x_train.shape[1:], len(dataset.classes)
    makers = {
        "mlp": lambda hidden=(128, 128), **options: mlp((math.prod(shape), *hidden, classes), **options),
        "lenet": functools.partial(lenet, shape, classes),
        "gru": functools.partial(gru, features=math.prod(shape[1:]), classes=classes),
        "resnet": functools.partial(resnet, shape=shape, classes=classes),
    }
    return makers[checks.known("model", name, makers)](**options)


@_same_model
def mlp(sizes: tuple[int, ...], activation: str = "relu", norm: str | None = None) -> Model:
    """A multilayer perceptron: sizes[0] inputs (any shape, flattened), hidden layers, sizes[-1] classes.

    `norm`: None, "batch" (Ioffe & Szegedy 2015, arXiv:1502.03167) or "layer" (Ba et al. 2016, arXiv:1607.06450),
    applied before each hidden activation. Raises ValueError for unknown names and fewer than two sizes.
    """
    if len(sizes) < 2:
        raise ValueError(f"sizes must name at least inputs and classes, not {sizes!r}.")
    hidden = range(1, len(sizes) - 1)
    block = {"dense": dense(), "norm": _norm(norm, activation)} if norm else {"dense": dense(activation)}
    layers = {f"{part}{i}": layer for i in hidden for part, layer in block.items()}
    shapes = dict(zip([*(f"dense{i}" for i in hidden), "output"], itertools.pairwise(sizes), strict=True))

    def init(key: Array) -> Params:
        scales = {f"norm{i}": {"scale": jnp.ones(sizes[i]), "shift": jnp.zeros(sizes[i])} for i in hidden if norm}
        return weights(key, shapes, activation) | scales

    return Model(init, layers | {"output": dense()})


@_same_model
def lenet(shape: tuple[int, int, int] = (28, 28, 1), classes: int = 10) -> Model:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling: two 5×5 convolutions and three dense layers.

    `shape` is (height, width, channels). Raises ValueError for images of less than 16×16 pixels.
    """
    sides = [((side - 4) // 2 - 4) // 2 for side in shape[:2]]
    if len(shape) != 3 or min(sides) < 1:
        raise ValueError(f"lenet needs images (height, width, channels) of at least 16×16 pixels, not {shape}.")
    sizes = {"conv1": (5, 5, shape[2], 6), "conv2": (5, 5, 6, 16)}
    sizes |= {"dense1": (sides[0] * sides[1] * 16, 120), "dense2": (120, 84), "output": (84, classes)}
    layers = dict.fromkeys(("conv1", "conv2"), conv(pool=True, padding="VALID"))
    layers |= dict.fromkeys(("dense1", "dense2"), dense("relu")) | {"output": dense()}
    return Model(lambda key: weights(key, sizes), layers)


@_same_model
def resnet(
    depth: int = 20,
    skip: bool = True,
    width: int = 8,
    shape: tuple[int, int, int] = (28, 28, 1),
    classes: int = 10,
) -> Model:
    """A 3×3 convolution, max-pooled, `depth` more with ReLU before each, all of `width` channels, and a dense layer.

    With `skip`, each of them adds its result to its input (He et al. 2016, arXiv:1603.05027), divided by √depth so that
    the sum stays as large as the input; else it passes on its result alone. The parameters are the same, and there is
    no batch norm, which would hide the scale of the weights.
    """
    names = [f"block{i}" for i in range(1, depth + 1)]

    def block(own: Params, x: Array) -> Array:
        new = conv2d(jax.nn.relu(x), own["w"]) + own["b"]
        return x + new / math.sqrt(depth) if skip else new

    sizes = {"stem": (3, 3, shape[2], width)} | dict.fromkeys(names, (3, 3, width, width))
    sizes["output"] = (shape[0] // 2 * (shape[1] // 2) * width, classes)
    layers = {"stem": conv(pool=True)} | dict.fromkeys(names, Layer(block)) | {"output": dense()}
    return Model(lambda key: weights(key, sizes), layers)


@_same_model
def gru(hidden: int = 64, features: int = 1, classes: int = 10) -> Model:
    """Gated recurrent units (Cho et al. 2014, arXiv:1406.1078) over x (examples, time[, features]).

    The classes come from the last hidden state. Between the layers "input", "recurrent" and "output" runs first
    (time, examples, 3 × hidden), then the state.
    """

    def init(key: Array) -> Params:
        inputs, recurrent, output = jax.random.split(key, 3)
        w = jax.random.normal(recurrent, (3, hidden, hidden))
        # orthogonal (Saxe et al. 2014): products over many steps neither vanish nor explode at the start
        # one gate after the other: on a CPU, two threads that decompose several at once wait for each other for ever
        w = jnp.concatenate(list(jax.lax.map(lambda gate: jnp.linalg.qr(gate)[0], w)), axis=1)
        ends = {"input": _layer(inputs, features, 3 * hidden), "output": _layer(output, hidden, classes)}
        return _draw(ends | {"recurrent": {"w": w}})

    return Model(init, {"input": Layer(_time_steps), "recurrent": Layer(_last_state), "output": dense()})


def _time_steps(own: Params, x: Array) -> Array:
    """What the inputs add to the gates at each time step, all in one product."""
    x, features = x.reshape(*x.shape[:2], -1), len(own["w"])
    if x.shape[2] != features:
        raise ValueError(f"This gru takes {features} numbers a time step, not {x.shape[2]}.")
    return _linear(own, x).swapaxes(0, 1)


def _last_state(own: Params, inputs: Array) -> Array:
    def step(h: Array, x: Array) -> tuple[Array, None]:
        (xz, xr, xn), (hz, hr, hn) = jnp.split(x, 3, axis=1), jnp.split(h @ own["w"], 3, axis=1)
        z, r = jax.nn.sigmoid(xz + hz), jax.nn.sigmoid(xr + hr)
        return (1 - z) * jnp.tanh(xn + r * hn) + z * h, None

    return jax.lax.scan(step, jnp.zeros((inputs.shape[1], len(own["w"])), inputs.dtype), inputs)[0]


# What models are made of


def weights(key: Array, shapes: Mapping[str, tuple[int, ...]], activation: str = "relu") -> Params:
    """Weights "w" of these shapes and biases "b" for layers of these names; `activation` follows all but the last."""
    *names, last = shapes
    keys = jax.random.split(key, len(shapes))
    params = {name: _layer(k, *shapes[name], activation=activation) for name, k in zip(names, keys[:-1], strict=True)}
    return _draw(params | {last: _layer(keys[-1], *shapes[last])})


@functools.cache
def dense(activation: str = "linear") -> Layer:
    """A dense layer of whatever comes in, flattened; w is (in, out)."""

    def compute(own: Params, x: Array) -> Array:
        x = x.reshape(len(x), -1)
        if x.shape[1] != len(own["w"]):
            raise ValueError(f"This layer takes {len(own['w'])} numbers an example, not {x.shape[1]}.")
        return _linear(own, x)

    return Layer(compute, _activation(activation))


@functools.cache
def conv(pool: bool = False, padding: str = "SAME") -> Layer:
    """A convolution of images (examples, height, width, in) and ReLU, max-pooled if `pool`; w is (k, k, in, out)."""

    def compute(own: Params, x: Array) -> Array:  # pooling first: max and ReLU commute, and ReLU then has less to do
        x = conv2d(x, own["w"], padding=padding)
        return (max_pool(x) if pool else x) + own["b"]

    return Layer(compute, jax.nn.relu)


def conv2d(x: Array, w: Array, padding: str = "SAME") -> Array:
    """Cross-correlation of images x (batch, height, width, in) with w (k, k, in, out), as one matrix product.

    Equal to `lax.conv_general_dilated`, which on a CPU runs some tenfold slower inside a scan. Plain im2col
    (Chellapilla et al. 2006) copies each pixel k² times and gives a product with only `out` columns. Here a row of the
    product makes `tile` neighbouring outputs at once from the pixels that they share, with a banded copy of w: fewer
    copies, a wider product, some multiplications by zero. `tile` = 1 is im2col.
    """
    k, _, channels, out = w.shape
    beyond = k - 1 if padding == "SAME" else 0  # the image that the kernels reach
    rows, columns = (side + beyond - k + 1 for side in x.shape[1:3])
    if not (x.size and w.size and rows > 0 and columns > 0):
        raise ValueError(f"conv2d needs an image as large as the kernel; x has the shape {x.shape}, w {w.shape}.")
    tiles = -(-columns // (max(1, 64 // out) if k > 1 else 1))  # 64 columns: wide enough for a fast product
    tile = -(-columns // tiles)
    span, width = tile + k - 1, tile * tiles + k - 1

    before = beyond // 2
    # one column at least: without a padded copy XLA would compute whatever x comes from anew for every window
    right = max(1, width - before - x.shape[2])
    x = jnp.pad(x, ((0, 0), (before, beyond - before), (before, right), (0, 0)))

    offset = np.arange(span) - np.arange(tile)[:, None]  # position of a pixel under output `tile`'s kernel
    place = (offset == np.arange(k)[:, None, None]).astype(w.dtype)
    band = jnp.einsum("pts,rpio->rsito", place, w).reshape(k * span * channels, tile * out)

    x = x.reshape(*x.shape[:2], -1)  # the pixels of a window lie side by side
    windows = jnp.stack([x[..., t * tile * channels :][..., : span * channels] for t in range(tiles)], axis=2)
    y = jnp.concatenate([windows[:, r : r + rows] for r in range(k)], axis=3).reshape(-1, k * span * channels) @ band
    return y.reshape(-1, rows, tiles * tile, out)[:, :, :columns]


def max_pool(x: Array) -> Array:
    """The maximum over 2×2 pixels of x (batch, height, width, channels); an odd last row or column is dropped."""
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2].reshape(batch, height // 2, 2, width // 2, 2, channels)
    x = jnp.maximum(x[:, :, 0], x[:, :, 1])  # two maxima: their gradient is far cheaper on a CPU than a window's
    return jnp.maximum(x[:, :, :, 0], x[:, :, :, 1])


def _layer(key: Array, *shape: int, activation: str = "linear") -> Params:
    """Biases (shape[-1],) and weights of this shape: whatever is not an output of the layer is an input of it."""
    variance = (2.0 if activation == "relu" else 1.0) / math.prod(shape[:-1])
    return {"w": (key, shape, math.sqrt(variance)), "b": jnp.zeros(shape[-1])}


def _draw(params: Params) -> Params:
    """Draw all (key, shape, deviation) in one go: a generator for each layer would triple the compile time."""
    leaves, tree = jax.tree.flatten(params, is_leaf=lambda leaf: isinstance(leaf, tuple))
    keys, shapes, _ = zip(*(leaf for leaf in leaves if isinstance(leaf, tuple)), strict=True)
    longest = max(map(math.prod, shapes))
    normals = iter(jax.vmap(lambda key: jax.random.normal(key, (longest,)))(jnp.stack(keys)))

    def weights(_: Array, shape: tuple[int, ...], deviation: float) -> Array:
        return next(normals)[: math.prod(shape)].reshape(shape) * deviation

    return jax.tree.unflatten(tree, [weights(*leaf) if isinstance(leaf, tuple) else leaf for leaf in leaves])


def _activation(name: str) -> Callable[[Array], Array]:
    return ACTIVATIONS[checks.known("activation", name, ACTIVATIONS)]


def _linear(own: Params, x: Array) -> Array:
    return x @ own["w"] + own["b"]


class Statistics(NamedTuple):
    """What batch norm subtracts and divides by the root of."""

    mean: Array
    variance: Array


@functools.cache
def _norm(norm: str, activation: str) -> Layer:
    """Normalise to mean 0 and variance 1: over all but the last axis ("batch") or over an example ("layer").

    "batch" uses the statistics of the batch it is given, as in training, unless `freeze` put others into `own`.
    """
    checks.known("norm", norm, ("batch", "layer"))

    def measure(x: Array) -> Statistics:
        axes = tuple(range(x.ndim - 1)) if norm == "batch" else tuple(range(1, x.ndim))
        return Statistics(x.mean(axes, keepdims=True), x.var(axes, keepdims=True))

    def normalize(own: Params, x: Array) -> Array:
        mean, variance = own["statistics"] if "statistics" in own else measure(x)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * own["scale"] + own["shift"]

    return Layer(normalize, _activation(activation), measure if norm == "batch" else None)


def freeze(model: Model, params: Params, x: Array, piece: int = 500) -> Params:
    """Parameters with which batch norm uses the statistics of the training examples x, whatever it is then given.

    To be used before a trained model is judged: a logit then depends on its own example alone. Without batch norm these
    are `params` themselves. The examples pass once, in pieces of at most `piece`, each normalised on its way as in
    training; a statistic is that of all pieces together (Wu & Johnson 2021, arXiv:2105.07576, §3). Where the pieces
    cannot be equally large, fewer examples than there are pieces are left out at the end.
    """
    if not any(layer.measure for layer in model.layers.values()):
        return params

    def pass_through(x: Array) -> dict[str, Statistics]:
        found = {}
        for (name, layer), own in zip(model.layers.items(), model.split(params), strict=True):
            if layer.measure:
                found[name] = layer.measure(x)
            x = layer(own, x)
        return found

    def together(pieces: Statistics) -> Statistics:
        return Statistics(pieces.mean.mean(0), pieces.variance.mean(0) + pieces.mean.var(0))

    count = -(-len(x) // piece)
    pieces = x[: len(x) // count * count].reshape(count, len(x) // count, *x.shape[1:])
    return params | {
        name: params[name] | {"statistics": together(of_pieces)}
        for name, of_pieces in jax.lax.map(pass_through, pieces).items()
    }
