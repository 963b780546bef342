"""What to split, and when to send: layer tables of real networks, what a split of them sends, messages that overlap.

Sizes are bytes, times seconds. A number takes four bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class LayerSize(NamedTuple):
    """A layer: parameters, numbers in and out for each example, and multiplications and additions of the way there."""

    name: str
    kind: str  # "conv" or "dense"
    parameters: int
    inputs: int
    outputs: int
    flops: float


def _dense(name: str, inputs: int, outputs: int) -> LayerSize:
    return LayerSize(name, "dense", inputs * outputs + outputs, inputs, outputs, 2.0 * inputs * outputs)


def _conv(name: str, side: int, k: int, stride: int, channels: int, out: int, norm: bool = False) -> LayerSize:
    """Of images side × side, padded so that only the stride makes them smaller; with `norm`, no bias but batch norm."""
    after, weights, extra = -(-side // stride), k * k * channels * out, (2 if norm else 1) * out
    return LayerSize(name, "conv", weights + extra, side**2 * channels, after**2 * out, 2.0 * weights * after**2)


def alexnet() -> list[LayerSize]:
    """The variant of Krizhevsky 2014 (arXiv:1404.5997), of 224 × 224 × 3 pixels and 1,000 classes."""
    first = LayerSize("conv1", "conv", 11 * 11 * 3 * 64 + 64, 224**2 * 3, 55**2 * 64, 2.0 * 11 * 11 * 3 * 64 * 55**2)
    shapes = [(27, 5, 64, 192), (13, 3, 192, 384), (13, 3, 384, 256), (13, 3, 256, 256)]
    convs = [_conv(f"conv{i}", side, k, 1, a, b) for i, (side, k, a, b) in enumerate(shapes, 2)]
    return [first, *convs, _dense("fc6", 6 * 6 * 256, 4096), _dense("fc7", 4096, 4096), _dense("fc8", 4096, 1000)]


def vgg16() -> list[LayerSize]:
    """Configuration D of Simonyan & Zisserman 2014 (arXiv:1409.1556)."""
    sizes = [(224, 64)] * 2 + [(112, 128)] * 2 + [(56, 256)] * 3 + [(28, 512)] * 3 + [(14, 512)] * 3
    shapes = [(side, 3, 1, before, out) for (side, out), (_, before) in zip(sizes, [(0, 3), *sizes], strict=False)]
    convs = [_conv(f"conv{i}", *shape) for i, shape in enumerate(shapes, 1)]
    return [*convs, _dense("fc14", 7 * 7 * 512, 4096), _dense("fc15", 4096, 4096), _dense("fc16", 4096, 1000)]


def resnet50() -> list[LayerSize]:
    """He et al. 2015 (arXiv:1512.03385), strides in the 3 × 3 convolutions; batch norm counts with its convolution."""
    layers, channels, side = [_conv("conv1", 224, 7, 2, 3, 64, norm=True)], 64, 56
    for group, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], 2):
        for block in range(blocks):
            name, stride = f"conv{group}_{block + 1}", 2 if group > 2 and block == 0 else 1
            sizes = [(side, 1, 1, channels, width), (side, 3, stride, width, width)]
            sizes += [(side // stride, 1, 1, width, 4 * width)]
            sizes += [(side, 1, stride, channels, 4 * width)] if block == 0 else []
            layers += [_conv(name + letter, *size, norm=True) for letter, size in zip("abcs", sizes, strict=False)]
            channels, side = 4 * width, side // stride
    return [*layers, _dense("fc", 2048, 1000)]


NETWORKS = {"AlexNet": alexnet, "VGG-16": vgg16, "ResNet-50": resnet50}


# Which layer is split how


def layer_bytes(layer: LayerSize, before: str, way: str, workers: int, batch: int, first: bool = False) -> float:
    """Bytes that each worker sends in a step for a layer, and for what comes in; `batch` examples in all.

    By "data": the gradient's all-reduce. By "model" each worker has some outputs (columns of the weights), for all
    examples: it gathers the inputs of all, and their gradients are added and scattered; the first layer's are not
    asked for. By "rows" each has some inputs: what they give is added and scattered, by examples or by numbers as the
    next layer wants it, and its gradient gathered. Where the layouts do not meet, there is an all-to-all both ways.
    """
    ways, numbers = 1 if first else 2, batch * layer.inputs  # nobody asks for the gradient of the images
    sent = {"data": 2 * layer.parameters, "model": ways * numbers, "rows": 2 * batch * layer.outputs}[way]
    moved = ways * numbers / workers if (before, way) in (("model", "data"), ("data", "rows")) else 0.0
    return (workers - 1) / workers * (sent + moved) * 4


def split_bytes(layers: Sequence[LayerSize], ways: Sequence[str], workers: int, batch: int) -> float:
    """Bytes that each worker sends in a step, by how each layer is split: what comes in is split by data."""
    steps = enumerate(zip(layers, ["data", *ways], ways, strict=False))
    return sum(layer_bytes(layer, before, way, workers, batch, i == 0) for i, (layer, before, way) in steps)


# When gradients are sent


def messages(
    sizes: Sequence[int], ready: Sequence[float], threshold: float, seconds: Callable[[float], float]
) -> list[tuple[int, float, float]]:
    """(bytes, when sent, when all have the sum) of gradients, in the order in which backpropagation makes them, joined
    until they have `threshold` bytes.

    An all-reduce of n bytes takes `seconds(n)`; they follow one another. With a threshold of 0 each goes alone, with
    `math.inf` all go together, at the end.
    """
    sent, waiting, free = [], 0, 0.0
    for number, (size, there) in enumerate(zip(sizes, ready, strict=True), 1):
        waiting += size
        if waiting >= threshold or number == len(sizes):
            start = max(there, free)
            free = start + seconds(waiting)
            sent.append((waiting, start, free))
            waiting = 0
    return sent
