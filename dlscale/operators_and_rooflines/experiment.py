"""Times and workspaces of the convolution algorithms on the machine that made the record."""

from __future__ import annotations

import math
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np

from dlscale import operators_and_rooflines as room
from dlscale.course.records import Experiment, RunTrials

ONE_AT_A_TIME = threading.Lock()  # what is timed has the process to itself


class Shape(NamedTuple):
    """A convolution's batch, side of its results, channels in and out, and side of its kernel."""

    batch: int
    side: int
    channels: int
    out: int
    k: int


KERNELS = (3, 5, 7, 11, 15)
SHAPES = {  # batch, side, channels in and out
    "one image, one channel": (1, 256, 1, 1),
    "4 images, 8 channels": (4, 128, 8, 8),
    "one image, 32 channels": (1, 64, 32, 32),
    "4 images, 32 channels": (4, 64, 32, 32),
    "4 images, 64 channels": (4, 32, 64, 64),
}
LARGEST = 2**27  # bytes of windows or spectra that are still tried
BATCH = 16
SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
LAYERS = {  # the 3 × 3 convolutions of ResNet-18 (He et al. 2015), one of each size: side, channels in and out, kernel
    "56 × 56": (56, 64, 64, 3),
    "28 × 28": (28, 128, 128, 3),
    "14 × 14": (14, 256, 256, 3),
    "7 × 7": (7, 512, 512, 3),
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
    """log₂ of the microseconds that it takes a core, and of its workspace in bytes, plus one."""
    with ONE_AT_A_TIME, room.on_one_core():  # the clock counts all threads of the process
        x, w = map(jax.numpy.asarray, arrays(Shape(batch, side, channels, out, k)))
        seconds = room.seconds(room.ALGORITHMS[algorithm], x, w, clock=time.process_time)
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
            if needs(name, shape) < LARGEST and (not name.startswith("Winograd") or shape.k == 3)
        ]
    )


def needs(algorithm: str, shape: Shape) -> int:
    """About how many bytes the windows take, or the spectra of the kernels."""
    batch, side, channels, out, k = shape
    windows, spectra = 4 * batch * side**2 * k**2 * channels, 8 * channels * out * (side + k - 1) ** 2
    return {"im2col": windows, "FFT": spectra}.get(algorithm, 0)


# Another machine may be so many times as fast, or as slow.
CONVOLUTIONS = Experiment(
    "operators_and_rooflines-convolutions", "times and workspaces of five ways to convolve, by shape and batch",
    convolution_trial, convolution_plan, {"log2_us": 3.0, "log2_workspace": 2.0},
    drawn={"side": 14, "batch": 2},
)  # fmt: skip
