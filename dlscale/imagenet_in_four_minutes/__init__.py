"""A record system for training, put together from the parts of this course, each of them on a switch.

The parts that change what is computed (`Switches`), what each is worth (`shapley`), the parts that only change how
gradients travel (`System`), and the time that a whole run takes on a machine of which a few constants are known
(`timeline`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from dlscale import collectives, costs, precision
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

    lars: float = 0.0  # a rate for each layer
    no_decay: float = 0.0  # no weight decay on biases and batch norm
    extra_norm: float = 0.0  # one more batch norm, after the last pooling
    half: float = 0.0  # products in float16, float32 master weights, loss scale


PARTS = Switches._fields


def init(key: Array) -> Params:
    """Weights of a small residual net over signals (examples, 40), as He et al. 2015 draw them."""
    shapes = {"stem": (5, WIDTH)}
    shapes |= {f"conv{block}{letter}": (3 * WIDTH, WIDTH) for block in range(1, BLOCKS + 1) for letter in "ab"}
    drawn = models.weights(key, shapes | {"output": (LENGTH // 2 // 2**BLOCKS * WIDTH, CLASSES)})
    norms = {"stem": "norm", "extra": "extra"} | {name: name.replace("conv", "norm") for name in list(shapes)[1:]}
    ones = {name: {"scale": jnp.ones(WIDTH), "shift": jnp.zeros(WIDTH)} for name in norms.values()}
    return {name: {"w": drawn[name]["w"]} for name in shapes} | ones | {"output": drawn["output"]}


def forward(
    params: Params, x: Array, extra: Array | float, half: bool = False, share: int = SHARE, known: Any = None
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Logits of signals x (examples, 40), and mean and variance at each batch norm.

    Each `share` examples, those of one worker, are normalised by themselves, or all with the `known` statistics.
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
        x = block(number, x)
    x = jnp.where(extra > 0, norm("extra", x), x)
    logits = x.reshape(len(x), -1) @ params["output"]["w"] + params["output"]["b"]
    return logits.astype(jnp.float32), found


def loss(params: Params, x: Array, y: Array, extra: Array | float, half: bool = False) -> Array:
    """The sum of the losses, divided by the examples of one worker: where all are one worker's, their mean."""
    logits, _ = forward(params, x, extra, half)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).sum() / SHARE


def length(a: Array, norm_scale: Array | float | None = None) -> Array:
    """The Euclidean norm; with a `norm_scale` that of norm_scale · a, computed in float16."""
    if norm_scale is None:
        return jnp.sqrt(jnp.sum(a**2))
    rounded = lambda a: precision.quantize(a, "float16")  # noqa: E731
    return rounded(jnp.sqrt(rounded(jnp.sum(rounded(rounded(a * norm_scale) ** 2))))) / norm_scale


def optimizer(
    switches: Switches, rate: Array | float, steps: Array | int, norm_scale: Array | float | None = None
) -> optax.GradientTransformation:
    """Momentum with warm-up, decay of the rate and weight decay; LARS (You et al. 2017) as the switches say.

    In LARS a layer's step is multiplied by TRUST · |w| / (|g| + DECAY · |w|). With a `norm_scale` these norms are
    computed in float16, that of the gradient times `norm_scale`. All may be traced.
    """

    def start(params: Params) -> tuple[Params, Array]:
        return jax.tree.map(jnp.zeros_like, params), jnp.int32(0)

    def ratio(weights: Array, gradient: Array) -> Array:
        ours, its = length(weights, None if norm_scale is None else 1.0), length(gradient, norm_scale)
        return jnp.where((ours > 0) & (its > 0), TRUST * ours / (its + DECAY * ours), 1.0)

    def update(gradients: Params, state: tuple[Params, Array], params: Params) -> tuple[Params, tuple[Params, Array]]:
        velocity, step = state
        now = rate * jnp.minimum((step + 1) / jnp.ceil(steps / 10), 1) * (1 + jnp.cos(jnp.pi * step / steps)) / 2

        def one(v: Array, g: Array, w: Array) -> Array:
            is_matrix = w.ndim > 1
            own_rate = jnp.where(switches.lars > 0, ratio(w, g), 1.0) if is_matrix else 1.0
            own_decay = DECAY if is_matrix else DECAY * (1 - switches.no_decay)
            return MOMENTUM * v + now * own_rate * (g + own_decay * w)

        velocity = jax.tree.map(one, velocity, gradients, params)
        return jax.tree.map(jnp.negative, velocity), (velocity, step + 1)

    return optax.GradientTransformation(start, update)


def scaled(inner: optax.GradientTransformation, half: bool) -> optax.GradientTransformation:
    """With a loss scale that adapts, or in float32 with none; both skip a step whose gradient is not finite."""
    return precision.dynamic_loss_scale(inner, *((2.0**15, 2.0) if half else (1.0, 1.0)))


# What each part is worth


def shapley(worth: Mapping[frozenset[str], Any], parts: Sequence[str]) -> dict[str, Any]:
    """What each part adds to `worth`, on average over all orders in which the parts could be added (Shapley 1953).

    `worth` has a number, or an array of them, for every set of parts; the sum over the parts is that of all of them
    minus that of none.
    """
    found = dict.fromkeys(parts, 0.0)
    for part, size in itertools.product(parts, range(len(parts))):
        for before in map(frozenset, itertools.combinations([other for other in parts if other != part], size)):
            brought = worth[before | {part}] - worth[before]
            found[part] += brought / (len(parts) * math.comb(len(parts) - 1, size))
    return found


# How gradients travel


class System(NamedTuple):
    """The parts that change how gradients travel, and should not change their sum."""

    fuse: float = 0.0  # gradients are joined until they have so many bytes
    below: float = 0.0  # messages of fewer bytes take the hierarchical all-reduce in nodes of four, others the ring


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
    leaves, structure = jax.tree.flatten([gradients[name] for name in BACKWARD])
    result: list[Array] = []
    for members in joined([leaf.size * leaf.dtype.itemsize for leaf in leaves], system.fuse):
        message = jnp.concatenate([leaves[i].ravel() for i in members])
        small = message.size * message.dtype.itemsize < system.below
        way = {"algorithm": "hierarchical", "group_size": 4} if small else {"algorithm": "ring"}
        total = collectives.all_reduce(message, axis_name, **way)
        ends = np.cumsum([leaves[i].size for i in members])[:-1]
        result += [part.reshape(leaves[i].shape) for part, i in zip(jnp.split(total, ends), members, strict=True)]
    return dict(zip(BACKWARD, jax.tree.unflatten(structure, result), strict=True))


# What it costs


class Machine(NamedTuple):
    """GPUs in nodes. Peaks are the makers' figures; `reached` is the share of the peak that products come to."""

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
    "P40, 2016": Machine(11.76e12, 11.76e12, 346e9, 8, costs.PCIE, Link(5e-6, 12.5e9), 0.5),
    "V100, 2017": Machine(15.7e12, 125e12, 900e9, 8, Link(2e-6, 150e9), Link(5e-6, 50e9), 0.5),
    "A100, 2020": Machine(19.5e12, 312e12, 1555e9, 8, Link(2e-6, 300e9), Link(5e-6, 200e9), 0.5),
}


class Network(NamedTuple):
    """Layers, what a run of the paper is, and how often each layer's outputs pass through memory beside the products.

    A pass is a reading or a writing of all outputs of a layer: (in the forward pass, in the backward pass).
    """

    layers: list[LayerSize]
    epochs: int
    passes: tuple[float, float]


IMAGES = 1_281_167  # of the training set (Russakovsky et al. 2015, arXiv:1409.0575)
# With batch norm: read for its statistics, read, written; ReLU: read, written. Back: ReLU reads two and writes one,
# batch norm reads two for its sums, then two, and writes one. Epochs: Jia et al. 2018 (arXiv:1807.11205), abstract.
NETWORKS = {"ResNet-50": Network(planning.resnet50(), 90, (5, 8)), "AlexNet": Network(planning.alexnet(), 95, (2, 3))}
# Minutes: the abstract of Jia et al. 2018, 8.7 data/tables/imagenet_records.csv; AlexNet's GPUs: a talk by the authors
# (NVIDIA GTC 2019, S9146).
PUBLISHED = {("ResNet-50", 1024): 8.7, ("ResNet-50", 2048): 6.6, ("AlexNet", 1024): 4.0}
UPDATE = 7  # passes over the float32 weights: LARS reads weights and gradient; the update three, of which it writes two


def layer_seconds(
    layer: LayerSize, share: int, machine: Machine, half: bool, passes: Sequence[float]
) -> tuple[float, float]:
    """Seconds of a layer for `share` examples, in the forward and in the backward pass, each part under its roof.

    A product takes what its arithmetic or its memory takes, whichever is longer; there is one in the forward pass, and
    two in the backward pass. What batch norm and ReLU move comes on top.
    """
    size = 2 if half else 4
    arithmetic = share * layer.flops / ((machine.half if half else machine.flops) * machine.reached)
    moved = size * (share * (layer.inputs + layer.outputs) + layer.parameters) / machine.memory
    product = max(arithmetic, moved)
    one_pass = size * share * layer.outputs / machine.memory
    return product + passes[0] * one_pass, 2 * product + passes[1] * one_pass


RINGS = ("every round waits", "no round waits")


def all_reduce_seconds(
    size: float, workers: int, machine: Machine, algorithm: str = "hybrid", ring: str = RINGS[0]
) -> float:
    """Seconds to sum `size` bytes: around a "ring" of all GPUs, "hierarchical", or "hybrid", the faster of the two.

    The ring is laid along the nodes: one of a node's messages leaves it. If "every round waits" for its slowest
    message, its latency is the network's. If "no round waits", because each worker sends on at once what it has, the
    latency is the mean over all messages.
    """
    nodes, (latency, bandwidth), near = max(1, workers // machine.node), machine.outside, machine.inside
    fast = machine.node - 1 if checks.known("ring", ring, RINGS) == RINGS[1] else 0
    around = (fast * near.latency + latency) / (fast + 1)
    inside = costs.formula("tree", min(workers, machine.node), size, near.latency, 1 / near.bandwidth)
    flat = costs.formula("ring", workers, size, around, 1 / bandwidth)
    levels = inside + costs.formula("ring", nodes, size, latency, 1 / bandwidth)
    found = {"ring": flat, "hierarchical": levels, "hybrid": min(flat, levels)}
    return found[checks.known("algorithm", algorithm, found)]


def simulated_ring(size: float, workers: int, machine: Machine) -> float:
    """Seconds of a ring in which no round waits, message by message: each waits only for its chunk and its own link.

    In round r each worker sends the chunk that it received in round r - 1 as soon as it has it and its link is free.
    """
    crosses = np.arange(workers) % machine.node == machine.node - 1  # the last GPU of a node sends to the next node
    latency = np.where(crosses, machine.outside.latency, machine.inside.latency)
    busy = size / workers / np.where(crosses, machine.outside.bandwidth, machine.inside.bandwidth)
    there, free = np.zeros(workers), np.zeros(workers)  # when a worker has its chunk, and when its link is free
    for _ in range(2 * (workers - 1)):
        free = np.maximum(there, free) + busy
        there = np.roll(free + latency, 1)
    return float(there.max())


class Prediction(NamedTuple):
    """The timeline of a step, in seconds, and what a run of that many steps takes."""

    forward: np.ndarray  # (layers,) ends, in the order of the layers
    backward: np.ndarray  # (layers,) ends, the last layer first
    messages: list[tuple[int, float, float]]  # bytes, begin, end
    step: float
    images: float  # a second, of all GPUs
    minutes: float


def timeline(
    network: Network, machine: Machine, workers: int, share: int, *,
    half: bool = True, fuse: float = 0.0, algorithm: str = "hybrid", ring: str = RINGS[0], overlap: bool = True,
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
        sent = planning.messages(sizes, ready, fuse, lambda n: all_reduce_seconds(n, workers, machine, algorithm, ring))
    update = UPDATE * 4 * sum(layer.parameters for layer in network.layers) / machine.memory
    step = max(backward[-1], sent[-1][2] if sent else 0.0) + update
    steps = math.ceil(network.epochs * IMAGES / (workers * share))
    return Prediction(forward, backward, sent, step, workers * share / step, steps * step / 60)
