"""Times and workspaces of the convolution algorithms on the machine that made the record."""

from __future__ import annotations

import math
import threading
from typing import Any, NamedTuple

import jax
import numpy as np

from dlscale import operators_and_rooflines as room
from dlscale.course.records import Experiment, RunTrials

ONE_AT_A_TIME = threading.Lock()  # what is timed gets the whole machine


class Shape(NamedTuple):
    """A convolution's batch, side of its results, channels in and out, and side of its kernel."""

    batch: int
    side: int
    channels: int
    out: int
    k: int


KERNELS = (3, 5, 7, 11, 15, 23)
SHAPES = {  # batch, side, channels in and out
    "one image, one channel": (1, 512, 1, 1),
    "4 images, 8 channels": (4, 128, 8, 8),
    "one image, 32 channels": (1, 64, 32, 32),
    "8 images, 32 channels": (8, 64, 32, 32),
    "8 images, 64 channels": (8, 32, 64, 64),
}
LARGEST = 2**28  # bytes of a workspace that is still tried
BATCH = 16
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
LAYERS = {  # AlexNet's (Krizhevsky 2014), but the first, whose stride is four
    "conv2": (27, 64, 192, 5),
    "conv3": (13, 192, 384, 3),
    "conv4": (13, 384, 256, 3),
    "conv5": (13, 256, 256, 3),
}


def arrays(shape: Shape, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Images, with room for the kernel at the edges, and weights: normal numbers."""
    rng, side = np.random.default_rng(seed), shape.side + shape.k - 1
    x = rng.normal(size=(shape.batch, side, side, shape.channels))
    return x.astype(np.float32), rng.normal(size=(shape.k, shape.k, shape.channels, shape.out)).astype(np.float32)


def workspace(algorithm: str, x: Any, w: Any) -> int:
    """Bytes that the compiled program needs beside its arguments and results, as the compiler says."""
    compiled = jax.jit(room.ALGORITHMS[algorithm]).lower(x, w).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def convolution_trial(algorithm: str, batch: int, side: int, channels: int, out: int, k: int) -> dict[str, float]:
    """log₂ of the microseconds that it takes, and of its workspace in bytes, plus one."""
    x, w = map(jax.numpy.asarray, arrays(Shape(batch, side, channels, out, k)))
    with ONE_AT_A_TIME:
        seconds = room.seconds(room.ALGORITHMS[algorithm], x, w, at_least=0.3)
        return {"log2_us": math.log2(seconds * 1e6), "log2_workspace": math.log2(1 + workspace(algorithm, x, w))}


def convolution_plan(run: RunTrials) -> None:
    """Each shape with kernels of all sizes; each layer of a network in pieces of all sizes."""
    shapes = [Shape(*shape, k) for shape in SHAPES.values() for k in KERNELS]
    shapes += [Shape(size, *layer) for layer in LAYERS.values() for size in SIZES]
    run(
        [
            {"algorithm": name, **shape._asdict()}
            for shape in shapes
            for name in room.ALGORITHMS
            if (not name.startswith("Winograd") or shape.k == 3 or (name == "Winograd 2" and shape.k == 5))
            and (name != "im2col" or 4 * shape.batch * shape.side**2 * shape.k**2 * shape.channels <= LARGEST)
        ]
    )


# Another machine may be so many times as fast, or as slow.
CONVOLUTIONS = Experiment(
    "operators_and_rooflines-convolutions", "times and workspaces of five ways to convolve, by shape and batch",
    convolution_trial, convolution_plan, {"log2_us": 3.0, "log2_workspace": 2.0},
    drawn={"side": 13, "batch": 4},
)  # fmt: skip
