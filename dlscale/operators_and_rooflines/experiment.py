"""Times and workspaces of the convolution algorithms on the machine that made the records."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax import Array, lax

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


# In memory that is kept: what is done with glibc's allocator here, frameworks do with one of their own
KEEPING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "20000000000",
    "MALLOC_TOP_PAD_": "600000000",
    "MALLOC_ARENA_MAX": "1",
}
WAYS = ("direct", "shifts", "FFT")
# The spectrum of kernels that do not change from call to call, in two layouts: in which one products are fast depends
SPECTRUM_KEPT = {"FFT, spectrum kept": (0, 1, 2, 3), "FFT, spectrum kept, channels first": (2, 3, 0, 1)}


def shifts(x: Array, w: Array) -> Array:
    """The sum as it stands: k² products of a shifted image, added one after another; of one channel in one pass."""
    k, (batch, height, width, channels) = w.shape[0], x.shape
    rows, columns = height - k + 1, width - k + 1
    if channels == w.shape[3] == 1:
        places = [(i, j) for i in range(k) for j in range(k)]
        return sum(x[:, i : i + rows, j : j + columns] * w[i, j, 0, 0] for i, j in places)

    def add(place: Array, y: Array) -> Array:
        seen = lax.dynamic_slice(x, (0, place // k, place % k, 0), (batch, rows, columns, channels))
        return y + seen @ lax.dynamic_index_in_dim(w.reshape(k * k, channels, -1), place, keepdims=False)

    return lax.fori_loop(0, k * k, add, jax.numpy.zeros((batch, rows, columns, w.shape[3])))


def spectrum(x: Array, w: Array) -> Array:
    """The kernels' spectrum as FFT's way computes it for these images."""
    return jax.numpy.fft.rfft2(w, [room._quick(side) for side in x.shape[1:3]], (0, 1)).conj()


def with_spectrum(x: Array, kernel: Array, k: int, layout: tuple[int, ...] = (0, 1, 2, 3)) -> Array:
    """FFT's way with a kernel's spectrum that was computed beforehand, its axes in the order of `layout`."""
    kernel = kernel.transpose(layout)  # both layouts are their own inverse
    size = [room._quick(side) for side in x.shape[1:3]]
    y = jax.numpy.fft.irfft2(room._products(jax.numpy.fft.rfft2(x, size, (1, 2)), kernel), size, (1, 2))
    return y[:, : x.shape[1] - k + 1, : x.shape[2] - k + 1]


def timed(way: str, shapes: list[list[int]]) -> list[list[float]]:
    """For each shape log₂ of the microseconds that a core takes, and of 1 + the workspace, in bytes, as compiled."""
    found, ways = [], room.ALGORITHMS | {"shifts": shifts}
    with room.on_one_core():
        for shape in (Shape(*sides) for sides in shapes):
            x, w = map(jax.numpy.asarray, arrays(shape))
            if way in SPECTRUM_KEPT:
                ways[way] = functools.partial(with_spectrum, k=shape.k, layout=SPECTRUM_KEPT[way])
                w = spectrum(x, w).transpose(SPECTRUM_KEPT[way])
            run = ways[way]
            needed = jax.jit(run).lower(x, w).compile().memory_analysis().temp_size_in_bytes
            took = room.seconds(run, x, w, at_least=0.1, clock=time.process_time)
            found.append([math.log2(1e6 * took), math.log2(1 + needed)])
    return found


def timed_in_kept_memory(way: str, shapes: list[Shape]) -> list[list[float]]:
    """`timed` in a process of its own, whose memory is kept between calls: no call gets fresh pages."""
    code = f"import json, sys; from {__name__} import {timed.__name__} as timed; "
    code += "print(json.dumps(timed(*json.loads(sys.argv[1]))))"
    command = [sys.executable, "-c", code, json.dumps([way, shapes])]
    with ONE_AT_A_TIME:
        done = subprocess.run(command, env=os.environ | KEEPING, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def kernels_trial(way: str, shape: str) -> dict[str, float]:
    """A way to convolve with kernels of all sizes."""
    found = timed_in_kept_memory(way, [Shape(*SHAPES[shape], k) for k in KERNELS])
    return {f"log2_us at {k}": us for k, (us, _) in zip(KERNELS, found, strict=True)}


def kernels_plan(run: RunTrials) -> None:
    """Each way to convolve, the sum as it stands among them, for each shape."""
    run([{"way": way, "shape": shape} for shape in SHAPES for way in (*WAYS, *SPECTRUM_KEPT)])


KERNEL_SIZES = Experiment(
    "operators_and_rooflines-kernels", "times of ways to convolve by kernel, in memory that is kept",
    kernels_trial, kernels_plan, {f"log2_us at {k}": 3.0 for k in KERNELS},
    drawn={"way": "direct", "shape": "4 images, 8 channels"},
)  # fmt: skip


def pieces_trial(algorithm: str, layer: str) -> dict[str, float]:
    """A layer of the network in pieces of all sizes."""
    found = timed_in_kept_memory(algorithm, [Shape(size, *LAYERS[layer]) for size in SIZES])
    names = ("log2_us", "log2_workspace")
    return {f"{name} of {size}": own[i] for i, name in enumerate(names) for size, own in zip(SIZES, found, strict=True)}


def pieces_plan(run: RunTrials) -> None:
    """Each layer by shifts and by each algorithm but FFT, which is far slower with kernels of 3 × 3."""
    ways = [name for name in ("shifts", *room.ALGORITHMS) if name != "FFT"]
    run([{"algorithm": name, "layer": layer} for layer in LAYERS for name in ways])


PIECES = Experiment(
    "operators_and_rooflines-pieces", "times and workspaces of four layers in pieces of all sizes, in kept memory",
    pieces_trial, pieces_plan,
    {f"log2_us of {size}": 3.0 for size in SIZES} | {f"log2_workspace of {size}": 2.0 for size in SIZES},
    drawn={"algorithm": "direct", "layer": "7 × 7"},
)  # fmt: skip


def batch_trial(seed: int) -> dict[str, float]:
    """log₂ of a core's microseconds for a dense layer, weights from memory and from a cache, by side and batch."""
    rng, found = np.random.default_rng(seed), {}
    with ONE_AT_A_TIME, room.on_one_core():
        for side, batch in itertools.product((4096, 256), DENSE_BATCHES):
            w, x = (jax.numpy.asarray(rng.normal(size=(side, n)) / side**0.5, "float32") for n in (side, batch))
            turns = 1 if side > 256 else 100  # a small product is too short to be timed alone
            took = room.seconds(repeated(turns), x, w, at_least=0.2, clock=time.process_time) / turns
            found[f"log2_us {side} {batch}"] = math.log2(1e6 * took)
    return found


def repeated(turns: int) -> Callable[[Array, Array], Array]:
    """So many products of w and x, each with the result of the one before."""
    return lambda x, w: lax.fori_loop(0, turns, lambda _, x: w @ x, x)


def batch_plan(run: RunTrials) -> None:
    """Rounds of timing, each with weights of its own."""
    run([{"seed": seed} for seed in range(11_300, 11_312)])


DENSE_BATCHES = (1, 64, 256)
BATCHES = Experiment(
    "operators_and_rooflines-batch", "times of a dense layer by batch, weights from memory and from a cache",
    batch_trial, batch_plan, {f"log2_us {side} {batch}": 3.0 for side in (4096, 256) for batch in DENSE_BATCHES},
    confirms=("operators_and_rooflines-batch",),
)  # fmt: skip


def errors_trial(seed: int) -> dict[str, float]:
    """log₂ of the largest error of a 3 × 3 convolution of 64 channels in float32, over the largest result."""
    x, w = arrays(Shape(1, 24, 64, 8, 3), seed)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(float), (3, 3), (1, 2))
    truth = np.einsum("nrcdij,ijdo->nrco", windows, w.astype(float))
    ways = {name: room.ALGORITHMS[name] for name in ("direct", "Winograd 2", "Winograd 4")}
    errors = {name: np.abs(np.asarray(jax.jit(f)(x, w)) - truth).max() for name, f in ways.items()}
    return {name: math.log2(error / np.abs(truth).max()) for name, error in errors.items()}


def errors_plan(run: RunTrials) -> None:
    """Images and weights of each seed."""
    run([{"seed": seed} for seed in range(11_320, 11_336)])


ERRORS = Experiment(
    "operators_and_rooflines-errors", "errors of Winograd's algorithm in float32", errors_trial, errors_plan,
    {"direct": 2.0, "Winograd 2": 2.0, "Winograd 4": 2.0}, confirms=("operators_and_rooflines-winograd",),
)  # fmt: skip
