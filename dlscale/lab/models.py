"""Small networks as pairs of pure functions, with plain pytrees of arrays as parameters.

Each constructor is cached: the same arguments give the same `Model`, so that what JAX compiled for it is found again.
Weights start from He et al. 2015 (arXiv:1502.01852): variance 2 / fan-in before a ReLU, else 1 / fan-in; biases at 0.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlscale.lab import checks
from dlscale.lab.data import Dataset

Params = dict[str, Any]

ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "sigmoid": jax.nn.sigmoid, "linear": lambda x: x}


class Model(NamedTuple):
    """`params = init(key)` and `logits = apply(params, x)`; x is (examples, …), logits (examples, classes)."""

    init: Callable[[Array], Params]
    apply: Callable[[Params, Array], Array]


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
    """The model called `name` ("mlp", "lenet", "resnet", "rnn") with the inputs and classes of `dataset`.

    `options` are those of the model; by default an mlp has `hidden` layers (128, 128).
    Raises ValueError for an unknown name and for examples that the model cannot take.
    """
    shape, options = dataset.x_train.shape[1:], {"classes": len(dataset.classes), **options}
    checks.known("model", name, ("mlp", "lenet", "resnet", "rnn"))
    if name == "mlp":
        return mlp((math.prod(shape), *options.pop("hidden", (128, 128)), options.pop("classes")), **options)
    if name == "rnn":
        return rnn(features=shape[-1] if len(shape) > 1 else 1, **options)
    if len(shape) != 3:
        raise ValueError(f"{name} needs images (height, width, channels), not examples of shape {shape}.")
    return (lenet if name == "lenet" else resnet)(shape=shape, **options)


@_same_model
def mlp(sizes: tuple[int, ...], activation: str = "relu", norm: str | None = None) -> Model:
    """A multilayer perceptron: sizes[0] inputs (any shape, flattened), hidden layers, sizes[-1] classes.

    `norm`: None, "batch" (Ioffe & Szegedy 2015, arXiv:1502.03167) or "layer" (Ba et al. 2016, arXiv:1607.06450),
    applied before each hidden activation. Raises ValueError for unknown names and fewer than two sizes.
    """
    act = ACTIVATIONS[checks.known("activation", activation, ACTIVATIONS)]
    normalize = _norm(norm)
    if len(sizes) < 2:
        raise ValueError(f"sizes must name at least inputs and classes, not {sizes!r}.")
    hidden = range(1, len(sizes) - 1)

    def init(key: Array) -> Params:
        keys = jax.random.split(key, len(sizes) - 1)
        params = {f"dense{i}": _layer(keys[i - 1], sizes[i - 1], sizes[i], activation=activation) for i in hidden}
        params |= {f"norm{i}": _norm_init(sizes[i]) for i in hidden if norm}
        return _draw(params | {"output": _layer(keys[-1], *sizes[-2:])})

    def apply(params: Params, x: Array) -> Array:
        x = x.reshape(len(x), -1)
        if x.shape[1] != sizes[0]:
            raise ValueError(f"This mlp takes {sizes[0]} numbers an example, not {x.shape[1]}.")
        for i in hidden:
            x = act(normalize(params.get(f"norm{i}"), _linear(params[f"dense{i}"], x)))
        return _linear(params["output"], x)

    return Model(init, apply)


@_same_model
def lenet(shape: tuple[int, int, int] = (28, 28, 1), classes: int = 10) -> Model:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling: two 5×5 convolutions and three dense layers.

    `shape` is (height, width, channels). Raises ValueError for images of less than 16×16 pixels.
    """
    sides = [((side - 4) // 2 - 4) // 2 for side in shape[:2]]
    if min(sides) < 1:
        raise ValueError(f"lenet needs images of at least 16×16 pixels, not {shape[0]}×{shape[1]}.")
    sizes = {"conv1": (5, 5, shape[2], 6), "conv2": (5, 5, 6, 16)}
    sizes |= {"dense1": (sides[0] * sides[1] * 16, 120), "dense2": (120, 84)}

    def init(key: Array) -> Params:
        *keys, last = jax.random.split(key, 5)
        params = {name: _layer(k, *sizes[name], activation="relu") for name, k in zip(sizes, keys, strict=True)}
        return _draw(params | {"output": _layer(last, 84, classes)})

    def apply(params: Params, x: Array) -> Array:
        for name in ("conv1", "conv2"):  # pooling first: max and ReLU commute, and ReLU then has less to do
            x = max_pool(conv2d(x, params[name]["w"], padding="VALID"))
            x = jax.nn.relu(x + params[name]["b"])
        x = x.reshape(len(x), -1)
        for name in ("dense1", "dense2"):
            x = jax.nn.relu(_linear(params[name], x))
        return _linear(params["output"], x)

    return Model(init, apply)


@_same_model
def resnet(
    depth: int = 8, skip: bool = True, width: int = 16, norm: str | None = "batch",
    shape: tuple[int, int, int] = (28, 28, 1), classes: int = 10,
) -> Model:  # fmt: skip
    """The residual net for small images of He et al. 2016 (arXiv:1512.03385, §4.2); `skip=False`: its plain twin.

    `depth` = 6 n + 2: three stages of n blocks with width, 2 width and 4 width channels; the first block of a
    later stage halves the image and has a 1×1 projection for its shortcut. `norm`, as in `mlp`, follows each
    convolution; `shape` is (height, width, channels). Raises ValueError for another depth.
    """
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"depth must be 6 n + 2 (8, 14, 20, …), not {depth}.")
    normalize = _norm(norm)
    stages = [
        (f"stage{stage + 1}_block{block + 1}", width * 2**stage, 2 if stage and not block else 1)
        for stage, block in np.ndindex(3, (depth - 2) // 6)
    ]

    def init(key: Array) -> Params:
        keys = iter(jax.random.split(key, 2 + 3 * len(stages)))

        def conv(k: int, channels: int, out: int) -> Params:
            return _layer(next(keys), k, k, channels, out, activation="relu") | _norm_init(out, norm)

        params, channels = {"conv": conv(3, shape[2], width)}, width
        for name, out, stride in stages:
            params[name] = {"conv1": conv(3, channels, out), "conv2": conv(3, out, out)}
            key_shortcut = next(keys)
            if skip and stride == 2:
                params[name]["shortcut"] = _layer(key_shortcut, 1, 1, channels, out)
            channels = out
        return _draw(params | {"output": _layer(next(keys), channels, classes)})

    def layer(p: Params, x: Array, stride: int = 1) -> Array:
        return normalize(p, conv2d(x, p["w"], stride) + p["b"])

    def apply(params: Params, x: Array) -> Array:
        x = jax.nn.relu(layer(params["conv"], x))
        for name, _, stride in stages:
            block = params[name]
            y = layer(block["conv2"], jax.nn.relu(layer(block["conv1"], x, stride)))
            if skip:
                y = y + (conv2d(x, block["shortcut"]["w"], stride) if stride == 2 else x)
            x = jax.nn.relu(y)
        return _linear(params["output"], x.mean((1, 2)))

    return Model(init, apply)


@_same_model
def rnn(hidden: int = 64, cell: str = "tanh", features: int = 1, classes: int = 10) -> Model:
    """A recurrent net over x (examples, time[, features]) that classifies from its last hidden state.

    `cell`: "tanh" (Elman 1990), "gru" (Cho et al. 2014, arXiv:1406.1078) or "lstm" (Hochreiter & Schmidhuber 1997,
    with the forget gate's bias at 1 as in Jozefowicz et al. 2015). Raises ValueError for another one.
    """
    gates = {"tanh": 1, "gru": 3, "lstm": 4}[checks.known("cell", cell, ("tanh", "gru", "lstm"))]

    def init(key: Array) -> Params:
        inputs, recurrent, output = jax.random.split(key, 3)
        w = jax.random.normal(recurrent, (gates, hidden, hidden))
        bias = jnp.zeros((gates, hidden)).at[1].set(1.0) if cell == "lstm" else jnp.zeros((gates, hidden))
        # orthogonal (Saxe et al. 2014): products over many steps neither vanish nor explode at the start
        # one gate after the other: on a CPU, two threads that decompose several at once wait for each other for ever
        w = jnp.concatenate(list(jax.lax.map(lambda gate: jnp.linalg.qr(gate)[0], w)), axis=1)
        params = {"input": _layer(inputs, features, gates * hidden) | {"b": bias.reshape(-1)}, "recurrent": {"w": w}}
        return _draw(params | {"output": _layer(output, hidden, classes)})

    def step(u: Array, state: tuple[Array, Array], x: Array) -> tuple[tuple[Array, Array], None]:
        h, c = state
        if cell == "gru":
            (xz, xr, xn), (hz, hr, hn) = jnp.split(x, 3, axis=1), jnp.split(h @ u, 3, axis=1)
            z, r = jax.nn.sigmoid(xz + hz), jax.nn.sigmoid(xr + hr)
            return ((1 - z) * jnp.tanh(xn + r * hn) + z * h, c), None
        pre = x + h @ u
        if cell == "tanh":
            return (jnp.tanh(pre), c), None
        i, f, g, o = jnp.split(pre, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    def apply(params: Params, x: Array) -> Array:
        x = x.reshape(*x.shape[:2], -1)
        if x.shape[2] != features:
            raise ValueError(f"This rnn takes {features} numbers a time step, not {x.shape[2]}.")
        inputs = _linear(params["input"], x).swapaxes(0, 1)  # all time steps in one product
        zero = jnp.zeros((x.shape[0], hidden), inputs.dtype)
        (h, _), _ = jax.lax.scan(functools.partial(step, params["recurrent"]["w"]), (zero, zero), inputs)
        return _linear(params["output"], h)

    return Model(init, apply)


def conv2d(x: Array, w: Array, stride: int = 1, padding: str = "SAME") -> Array:
    """Cross-correlation of images x (batch, height, width, in) with w (k, k, in, out), as one matrix product.

    Equal to `lax.conv_general_dilated`, which on a CPU runs some tenfold slower inside a scan. Plain im2col
    (Chellapilla et al. 2006) copies each pixel k² times and gives a product with only `out` columns. Here a row of the
    product makes `tile` neighbouring outputs at once from the pixels that they share, with a banded copy of w: fewer
    copies, a wider product, some multiplications by zero. `tile` = 1 is im2col.
    """
    k, _, channels, out = w.shape
    trim = 0 if padding == "SAME" else k - 1
    rows, columns = (-(-(side - trim) // stride) for side in x.shape[1:3])
    tiles = -(-columns // (max(1, 64 // out) if k > 1 else 1))  # 64 columns: wide enough for a fast product
    tile = -(-columns // tiles)
    span, step = stride * (tile - 1) + k, stride * tile

    height, width = stride * (rows - 1) + k, step * (tiles - 1) + span
    # half of what the kernels reach beyond the image: nothing where padding is "VALID"
    top, left = max(0, height - x.shape[1]) // 2, max(0, stride * (columns - 1) + k - x.shape[2]) // 2
    # one column at least: without a padded copy XLA would compute whatever x comes from anew for every window
    below, right = max(0, height - top - x.shape[1]), max(1, width - left - x.shape[2])
    x = jnp.pad(x, ((0, 0), (top, below), (left, right), (0, 0)))

    offset = np.arange(span) - stride * np.arange(tile)[:, None]  # position of a pixel under output `tile`'s kernel
    place = (offset == np.arange(k)[:, None, None]).astype(w.dtype)
    band = jnp.einsum("pts,rpio->rsito", place, w).reshape(k * span * channels, tile * out)

    x = x.reshape(*x.shape[:2], -1)  # the pixels of a window lie side by side
    windows = jnp.stack([x[..., t * step * channels :][..., : span * channels] for t in range(tiles)], axis=2)
    strips = [windows[:, r : r + height - k + 1 : stride] for r in range(k)]
    y = jnp.concatenate(strips, axis=3).reshape(-1, k * span * channels) @ band
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


def _linear(params: Params, x: Array) -> Array:
    return x @ params["w"] + params["b"]


def _norm_init(size: int, norm: str | None = "layer") -> Params:
    return {"scale": jnp.ones(size), "shift": jnp.zeros(size)} if norm else {}


def _norm(norm: str | None) -> Callable[[Params | None, Array], Array]:
    """Normalise to mean 0 and variance 1: over all but the last axis ("batch") or over an example ("layer").

    A `Model` has no state, hence no running averages: "batch" always uses the statistics of the batch it is given, at
    evaluation too. Evaluate on many examples at once.
    """
    if norm is None:
        return lambda params, x: x
    checks.known("norm", norm, ("batch", "layer"))

    def normalize(params: Params | None, x: Array) -> Array:
        axes = tuple(range(x.ndim - 1)) if norm == "batch" else tuple(range(1, x.ndim))
        mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["shift"]

    return normalize
