"""A record system for training, put together from the parts of this course, each of them on a switch.

The parts that change what is computed (`Switches`), what they are worth (`shapley`), the parts that only move it
(`System`), and the time that a whole run takes on a machine of which a few constants are known (`predict`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from dlscale import collectives, costs, gradient_compression, precision
from dlscale.costs import Link
from dlscale.lab import checks, models
from dlscale.lab.models import Params
from dlscale.parallel_training import planning
from dlscale.parallel_training.planning import LayerSize

Tree = Any  # a pytree of arrays
WIDTH, BLOCKS, CLASSES, LENGTH = 8, 2, 10, 40
TRUST, MOMENTUM, DECAY = 0.05, 0.9, 5e-4
SHARE = 50  # examples of a worker, over which its batch norm takes means


# What is computed


class Switches(NamedTuple):
    """The parts that change what is computed, each on (1) or off (0). All but `half` may be traced."""

    lars: float = 0.0  # a rate for each layer; 2: one ratio for all layers together, its control
    schedule: float = 0.0  # warm-up and decay of the rate
    spared: float = 0.0  # no weight decay on biases and batch norm
    extra_norm: float = 0.0  # one more batch norm, after the last pooling
    half: float = 0.0  # products in float16, float32 master weights, loss scale


PARTS = Switches._fields


def start(key: Array) -> Params:
    """Weights of a small residual net over signals (examples, 40), as He et al. 2015 draw them."""
    shapes = {"stem": (5, WIDTH)}
    shapes |= {f"conv{block}{letter}": (3 * WIDTH, WIDTH) for block in range(1, BLOCKS + 1) for letter in "ab"}
    drawn = models.weights(key, shapes | {"output": (LENGTH // 2 // 2**BLOCKS * WIDTH, CLASSES)})
    norms = {"stem": "norm", "extra": "extra"} | {name: name.replace("conv", "norm") for name in list(shapes)[1:]}
    ones = {name: {"scale": jnp.ones(WIDTH), "shift": jnp.zeros(WIDTH)} for name in norms.values()}
    return {name: {"w": drawn[name]["w"]} for name in shapes} | ones | {"output": drawn["output"]}


def forward(
    params: Params,
    x: Array,
    extra: Array | float,
    half: bool = False,
    share: int = SHARE,
    known: list[tuple[Array, Array]] | None = None,
    recompute: bool = False,
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Logits of signals x (examples, 40), and mean and variance at each batch norm.

    Each `share` examples, those of one worker, are normalised by themselves, or all with the `known` statistics.
    `recompute` forgets what is inside a block and computes it again on the way back; then no statistics are to be had.
    """
    kind = jnp.float16 if half else jnp.float32
    params, x = jax.tree.map(lambda a: a.astype(kind), (params, x))
    found = []

    def conv(name: str, x: Array, k: int, stride: int = 1) -> Array:
        padded = jnp.pad(x, ((0, 0), (k // 2, k // 2), (0, 0)))
        columns = [padded[:, i : i + x.shape[1] : stride] for i in range(k)]
        return jnp.concatenate(columns, axis=-1) @ params[name]["w"]

    def norm(name: str, x: Array) -> Array:  # its means in float32, also with half
        groups = x.reshape(-1 if known is None else 1, share if known is None else len(x), *x.shape[1:])
        groups = groups.astype(jnp.float32)
        here = groups.mean((1, 2), keepdims=True), groups.var((1, 2), keepdims=True)
        mean, variance = here if known is None else known[len(found)]
        found.append((mean, variance))
        normal = ((groups - mean) * lax.rsqrt(variance + 1e-5)).astype(kind)
        return (normal * params[name]["scale"] + params[name]["shift"]).reshape(x.shape)

    def block(number: int, x: Array) -> Array:
        inside = jax.nn.relu(norm(f"norm{number}a", conv(f"conv{number}a", x, 3)))
        x = jax.nn.relu(x + norm(f"norm{number}b", conv(f"conv{number}b", inside, 3)))
        pairs = x.reshape(len(x), -1, 2, WIDTH)  # the gradient of .max() asks which number equals the result: if a
        return jnp.maximum(pairs[:, :, 0], pairs[:, :, 1])  # compiler computes x twice, rounded otherwise, none does

    x = jax.nn.relu(norm("norm", conv("stem", x[..., None], 5, 2)))
    for number in range(1, BLOCKS + 1):
        x = (jax.checkpoint(block, static_argnums=0) if recompute else block)(number, x)
    x = jnp.where(extra > 0, norm("extra", x), x)
    logits = x.reshape(len(x), -1) @ params["output"]["w"] + params["output"]["b"]
    return logits.astype(jnp.float32), found


def loss(params: Params, x: Array, y: Array, extra: Array | float, half: bool = False, **options: Any) -> Array:
    """The sum of the losses, divided by the examples of one worker: where all are one worker's, their mean."""
    logits, _ = forward(params, x, extra, half, **options)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum() / options.get("share", SHARE)


def length(a: Array, norms: Array | float = 0.0) -> Array:
    """The Euclidean norm; with another `norms` than 0 that of norms · a, in float16 as a hasty program has it."""
    if isinstance(norms, float) and norms == 0:
        return jnp.sqrt(jnp.sum(a**2))
    rounded = lambda a: precision.quantize(a, "float16")  # noqa: E731
    hasty = rounded(jnp.sqrt(rounded(jnp.sum(rounded(rounded(a * norms) ** 2)))))
    return hasty / norms


def optimizer(
    switches: Switches,
    rate: Array | float,
    steps: Array | int,
    decay: Array | float = DECAY,
    norms: Array | float = 0.0,
) -> optax.GradientTransformation:
    """Momentum with weight decay, and LARS (You et al. 2017), a schedule and spared parameters as the switches say.

    In LARS a layer's step is multiplied by TRUST · |w| / (|g| + decay · |w|). With other `norms` than 0 the norms are
    those of float16, of the gradient times `norms`. All may be traced: one compiled program serves all settings.
    """

    def init(params: Params) -> tuple[Params, Array]:
        return jax.tree.map(jnp.zeros_like, params), jnp.int32(0)

    def ratio(weights: Array, gradient: Array) -> Array:
        hasty = not (isinstance(norms, float) and norms == 0)
        ours, its = length(weights, 1.0 * hasty), length(gradient, norms)
        return jnp.where((ours > 0) & (its > 0), TRUST * ours / (its + decay * ours), 1.0)

    def update(gradients: Params, state: tuple[Params, Array], params: Params) -> tuple[Params, tuple[Params, Array]]:
        velocity, step = state
        risen = jnp.minimum((step + 1) / jnp.ceil(steps / 10), 1) * (1 + jnp.cos(jnp.pi * step / steps)) / 2
        now = rate * jnp.where(switches.schedule > 0, risen, 1.0)
        flat = [
            jnp.concatenate([a.ravel() for a in jax.tree.leaves(tree) if a.ndim > 1]) for tree in (params, gradients)
        ]
        whole = ratio(*flat)

        def one(v: Array, g: Array, w: Array) -> Array:
            matrix = w.ndim > 1
            chosen = jnp.where(switches.lars > 1, whole, ratio(w, g)) if matrix else 1.0
            own = decay if matrix else decay * (1 - switches.spared)
            return MOMENTUM * v + now * jnp.where(switches.lars > 0, chosen, 1.0) * (g + own * w)

        velocity = jax.tree.map(one, velocity, gradients, params)
        return jax.tree.map(jnp.negative, velocity), (velocity, step + 1)

    return optax.GradientTransformation(init, update)


def scaled(inner: optax.GradientTransformation, half: bool) -> optax.GradientTransformation:
    """With a loss scale that adapts, or in float32 with none; both skip a step whose gradient is not finite."""
    return precision.dynamic_loss_scale(inner, *((2.0**15, 2.0) if half else (1.0, 1.0)))


# What each part is worth


def shapley(worth: Mapping[frozenset[str], Any], parts: Sequence[str]) -> dict[str, np.ndarray]:
    """What each part adds to `worth`, on average over all orders in which the parts could be added (Shapley 1953).

    `worth` has a number, or an array of them, for every set of parts; the sum over the parts is that of all of them
    minus that of none. Raises ValueError if a set is missing.
    """
    if missing := 2 ** len(parts) - len([s for s in worth if s <= set(parts)]):
        raise ValueError(f"{missing} of the {2 ** len(parts)} sets of parts are missing.")
    weights = [1 / (len(parts) * math.comb(len(parts) - 1, size)) for size in range(len(parts))]

    def value(part: str) -> np.ndarray:
        without = [s for s in worth if part not in s and s <= set(parts)]
        return sum(weights[len(s)] * (np.asarray(worth[s | {part}]) - np.asarray(worth[s])) for s in without)

    return {part: value(part) for part in parts}


# What only moves it


class System(NamedTuple):
    """The parts that move what is computed, and should not change it; but for `keep`, which sends less."""

    fuse: float = 0.0  # gradients are joined until they have so many bytes
    below: float = math.inf  # messages of fewer bytes go by the hierarchical all-reduce, others around the ring
    group: int = 2  # workers of a node
    keep: float = 1.0  # the share of the entries that is sent; what is not is remembered
    recompute: bool = False  # of a block only the input is kept for the way back


def joined(sizes: Sequence[int], threshold: float) -> list[list[int]]:
    """Which gradients travel in one message: those that wait go as soon as they have `threshold` bytes."""
    messages: list[list[int]] = [[]]
    for number, _ in enumerate(sizes):
        messages[-1].append(number)
        if sum(sizes[i] for i in messages[-1]) >= threshold and number + 1 < len(sizes):
            messages.append([])
    return messages


BACKWARD = ("output", "extra", "norm2b", "conv2b", "norm2a", "conv2a", "norm1b", "conv1b", "norm1a", "conv1a")
BACKWARD += ("norm", "stem")  # the order in which gradients are there


def exchange(gradients: Params, system: System, axis_name: str) -> Params:
    """The sum of all workers' gradients, each array of its own type, in messages as the system joins and sends them."""
    tree = {name: gradients[name] for name in BACKWARD}
    leaves, structure = jax.tree.flatten([tree[name] for name in BACKWARD])
    result: list[Array] = []
    for members in joined([leaf.size * leaf.dtype.itemsize for leaf in leaves], system.fuse):
        message = jnp.concatenate([leaves[i].ravel() for i in members])
        if message.size * message.dtype.itemsize < system.below:
            total = collectives.all_reduce(message, axis_name, "hierarchical", group_size=system.group)
        else:
            total = collectives.all_reduce(message, axis_name, "ring")
        ends = np.cumsum([leaves[i].size for i in members])[:-1]
        result += [part.reshape(leaves[i].shape) for part, i in zip(jnp.split(total, ends), members, strict=True)]
    return dict(zip(BACKWARD, jax.tree.unflatten(structure, result), strict=True))


def compressor(system: System) -> gradient_compression.Compressor:
    return gradient_compression.error_feedback(gradient_compression.top_k(system.keep))


def local_gradient(
    params: Params, scale: Array, batch: tuple[Array, Array], extra: Array | float, half: bool, system: System
) -> tuple[Array, Params]:
    """A worker's mean loss, and its gradient times `scale`, in the type in which it is sent."""
    (x, y), options = batch, {"share": len(batch[0]), "recompute": system.recompute}
    value, gradient = jax.value_and_grad(lambda params: scale * loss(params, x, y, extra, half, **options))(params)
    return value / scale, jax.tree.map(lambda g: g.astype(jnp.float16 if half else jnp.float32), gradient)


def update(state: tuple, gradient: Params, given: Mapping[str, Any], half: bool) -> tuple:
    """Weights and memory after a step with the mean of all workers' scaled gradients."""
    params, memory, unsent = state
    updates, memory = scaled(optimizer(**given), half).update(gradient, memory, params)
    return optax.apply_updates(params, updates), memory, unsent


@functools.cache
def worker(half: bool, system: System, axis_name: str) -> Callable[..., tuple]:
    """step(state, (x, y), given): what one worker does with its examples; all workers then have the same weights.

    state: weights, the optimizer's memory, and what was not sent yet; `given` are the arguments of `optimizer`.
    """

    def step(state: tuple, batch: tuple[Array, Array], given: Mapping[str, Any]) -> tuple[tuple, Array]:
        params, memory, unsent = state
        scale, workers = precision.scale_of(memory), lax.axis_size(axis_name)
        value, gradient = local_gradient(params, scale, batch, given["switches"].extra_norm, half, system)
        if system.keep < 1:
            gradient = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, gradient)
            gradient, unsent = gradient_compression.gathered_mean(compressor(system), unsent, gradient, axis_name)
            gradient = jax.tree.map(lambda g: g * scale, gradient)
        else:
            gradient = exchange(gradient, system, axis_name)
            gradient = jax.tree.map(lambda g: g.astype(jnp.float32) / workers, gradient)
        return update((params, memory, unsent), gradient, given, half), lax.pmean(value, axis_name)

    return step


def at_rest(seed: Array, half: bool, system: System, given: Mapping[str, Any]) -> tuple:
    """The state of every worker before the first step."""
    params = start(jax.random.key(seed))
    unsent = compressor(system).init(params) if system.keep < 1 else ()
    return params, scaled(optimizer(**given), half).init(params), unsent


# What it costs


class Machine(NamedTuple):
    """GPUs in nodes. Peaks are the makers' figures; `reached` is the share of the peak that products come to."""

    name: str
    flops: float  # a second, in float32
    half: float  # in float16
    memory: float  # bytes a second
    node: int  # GPUs of a node
    inside: Link  # from GPU to GPU of a node
    outside: Link  # from node to node
    reached: float = 1.0


# Peaks and memory: NVIDIA's data sheets of the P40 (3,840 cores, two operations each in 1.531 GHz), V100 SXM2 and A100
# SXM 40 GB (matrix units in float16). Links of a node: PCI Express; 6 NVLinks of 25 GB/s; 12 of them. Cards of a node:
# one of 100 Gb/s assumed (the notes do not say); 4 of 100 and 8 of 200 Gb/s (DGX-1 and DGX A100, NVIDIA), used
# together. Latencies are assumed, and so is the share of the peak that products reach.
MACHINES = {
    "P40, 2016": Machine("P40", 11.76e12, 11.76e12, 346e9, 8, costs.PCIE, Link(5e-6, 12.5e9), 0.5),
    "V100, 2017": Machine("V100", 15.7e12, 125e12, 900e9, 8, Link(2e-6, 150e9), Link(5e-6, 50e9), 0.5),
    "A100, 2020": Machine("A100", 19.5e12, 312e12, 1555e9, 8, Link(2e-6, 300e9), Link(5e-6, 200e9), 0.5),
}


class Network(NamedTuple):
    """Layers, what a run of the paper is, and how often each layer's results pass through memory beside the products.

    A pass is a reading or a writing of all results of a layer: (on the way there, on the way back).
    """

    layers: list[LayerSize]
    epochs: int
    passes: tuple[float, float]


IMAGES = 1_281_167  # of the training set (Russakovsky et al. 2015, arXiv:1409.0575)
# With batch norm: read for its statistics, read, written; ReLU: read, written. Back: ReLU reads two and writes one,
# batch norm reads two for its sums, then two, and writes one. Epochs: Jia et al. 2018 (arXiv:1807.11205), abstract.
NETWORKS = {"ResNet-50": Network(planning.resnet50(), 90, (5, 8)), "AlexNet": Network(planning.alexnet(), 95, (2, 3))}
UPDATE = 7  # passes over the float32 weights: LARS reads weights and gradient; the update three, of which it writes two


def layer_seconds(
    layer: LayerSize, share: int, machine: Machine, half: bool, passes: Sequence[float]
) -> tuple[float, float]:
    """Seconds of a layer for `share` examples, on the way there and on the way back, each part under its roof.

    A product takes what its arithmetic or its memory takes, whichever is longer; there is one on the way there, and
    two on the way back. What batch norm and ReLU move comes on top.
    """
    size = 2 if half else 4
    arithmetic = share * layer.flops / ((machine.half if half else machine.flops) * machine.reached)
    moved = size * (share * (layer.inputs + layer.outputs) + layer.parameters) / machine.memory
    product = max(arithmetic, moved)
    one_pass = size * share * layer.outputs / machine.memory
    return product + passes[0] * one_pass, 2 * product + passes[1] * one_pass


def all_reduce_seconds(size: float, workers: int, machine: Machine, algorithm: str = "hybrid") -> float:
    """Seconds to sum `size` bytes: around a "ring" of all GPUs, "hierarchical", or "hybrid", the faster of the two."""
    nodes, (latency, bandwidth) = max(1, workers // machine.node), machine.outside
    ring = costs.formula("ring", workers, size, latency, 1 / bandwidth)
    near = machine.inside
    inside = costs.formula("tree", min(workers, machine.node), size, near.latency, 1 / near.bandwidth)
    times = {"ring": ring, "hierarchical": inside + costs.formula("ring", nodes, size, latency, 1 / bandwidth)}
    return (times | {"hybrid": min(times.values())})[checks.known("algorithm", algorithm, [*times, "hybrid"])]


class Prediction(NamedTuple):
    """The timeline of a step, in seconds, and what a run of that many steps takes."""

    forward: np.ndarray  # (layers,) ends, in the order of the layers
    backward: np.ndarray  # (layers,) ends, the last layer first
    messages: list[tuple[int, float, float]]  # bytes, begin, end
    step: float
    images: float  # a second, of all GPUs
    minutes: float


def predict(
    network: Network, machine: Machine, workers: int, share: int, *,
    half: bool = True, fuse: float = 0.0, algorithm: str = "hybrid", overlap: bool = True,
) -> Prediction:  # fmt: skip
    """A step of data-parallel training and a whole run, `share` examples on each GPU.

    Without `overlap` nothing is sent before all gradients are there. The update waits for the last message.
    """
    seconds = np.array([layer_seconds(layer, share, machine, half, network.passes) for layer in network.layers])
    forward = seconds[:, 0].cumsum()
    backward = forward[-1] + seconds[::-1, 1].cumsum()
    sizes = [layer.parameters * (2 if half else 4) for layer in reversed(network.layers)]
    ready, sent = backward if overlap else np.full(len(sizes), backward[-1]), []
    if workers > 1:
        sent = planning.messages(sizes, ready, fuse, lambda n: all_reduce_seconds(n, workers, machine, algorithm))
    update = UPDATE * 4 * sum(layer.parameters for layer in network.layers) / machine.memory
    step = max(backward[-1], sent[-1][2] if sent else 0.0) + update
    steps = math.ceil(network.epochs * IMAGES / (workers * share))
    return Prediction(forward, backward, sent, step, workers * share / step, steps * step / 60)
