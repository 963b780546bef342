"""The exercises of 12_operators_and_rooflines and its further notebook."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from dlscale import operators_and_rooflines as operators
from dlscale.course.exercises import Exercise, compare


def _batch_needed(answer: Any) -> str | None:
    for inputs, outputs, peak, bandwidth in (
        (4096, 4096, 150e9, 20e9), (1024, 1000, 19.5e12, 1.5e12), (512, 2048, 100e9, 50e9), (4096, 4096, 9e9, 20e9),
        (64, 4096, 100e9, 20e9),
    ):  # fmt: skip
        weights, moved = inputs * outputs, inputs + outputs
        wanted = math.ceil(4 * weights / (2 * weights * bandwidth / peak - 4 * moved))
        what = f"For a layer {inputs} × {outputs}, {peak / 1e9:,.0f} GFLOP/s and {bandwidth / 1e9:,.0f} GB/s, the batch"
        if wrong := compare(what, answer(inputs, outputs, peak, bandwidth), wanted, 1e-9):
            return wrong
    return None


batch_needed = Exercise(
    id="operators_and_rooflines-batch_needed",
    answer="batch_needed",
    hints=(
        "Write both times as functions of the batch b. Which of them has a part that does not grow with b?",
        "2·b·in·out / peak ≥ 4·(in·out + b·(in + out)) / bandwidth. Solve for b and round up, or try b = 1, 2, 3, …",
    ),
    code="""
def batch_needed(inputs, outputs, peak, bandwidth):
    weights, moved, b = inputs * outputs, inputs + outputs, 1
    while 2 * b * weights / peak < 4 * (weights + b * moved) / bandwidth:
        b = b + 1
    return b
""",
    wrong=_batch_needed,
    right="below that batch, an ideal program would compute further examples at almost no cost.",
)


def _fusion_gain(answer: Any) -> str | None:
    machines = ((100e9, 20e9), (50e9, 40e9), (19.5e12, 1.5e12))
    chains = ([2], [2] * 5, [1, 5, 2, 2], [2, 300, 2], [4000, 1, 1])
    for (peak, bandwidth), chain in itertools.product(machines, chains):
        wanted = sum(max(flop / peak, 8 / bandwidth) for flop in chain) / max(sum(chain) / peak, 8 / bandwidth)
        what = f"With {chain} FLOP per number, {peak / 1e9:,.0f} GFLOP/s and {bandwidth / 1e9:,.0f} GB/s, the gain"
        if wrong := compare(what, answer([*chain], peak, bandwidth), wanted, 1e-6):
            return wrong
    return None


fusion_gain = Exercise(
    id="operators_and_rooflines-fusion_gain",
    answer="fusion_gain",
    hints=(
        "What is the least time for one number, for a single operator? How many bytes does the fused chain move?",
        "A number takes max(flops / peak, 8 / bandwidth) seconds. Add these times for the separate operators. The "
        "fused chain is one operator with sum(flops).",
    ),
    code="""
def fusion_gain(flops, peak, bandwidth):
    def least_time(flop):
        return max(flop / peak, 8 / bandwidth)

    return sum(map(least_time, flops)) / least_time(sum(flops))
""",
    wrong=_fusion_gain,
    right="the gain is the length of the chain while the fused chain is memory-bound, and less once it is not.",
)


def _windows(answer: Any) -> str | None:
    rng = np.random.default_rng(21)
    for batch, height, width, channels, k in ((1, 4, 5, 1, 2), (2, 6, 9, 3, 3), (3, 5, 5, 4, 5), (1, 7, 3, 2, 1)):
        x = rng.normal(size=(batch, height, width, channels)).astype(np.float32)
        w = rng.normal(size=(k, k, channels, 4)).astype(np.float32)
        rows, columns = height - k + 1, width - k + 1
        images = f"For {batch} images of {height} × {width} × {channels} and k = {k}"
        found = np.asarray(answer(x, k))
        if found.shape != (batch * rows * columns, k * k * channels):
            wanted = f"a row for each of {batch}·{rows}·{columns} windows, a column for each of its {k}·{k}·{channels}"
            return f"{images} the shape is {found.shape}; there should be {wanted} numbers."
        truth = np.asarray(operators.direct(jnp.asarray(x), jnp.asarray(w)))
        y = np.reshape(found @ w.reshape(-1, 4), truth.shape)
        if wrong := compare(f"{images}, the product with the kernels", y, truth):
            return f"{wrong} Do rows and columns stand in the order of the results and of w.reshape(-1, out)?"
    return None


windows = Exercise(
    id="operators_and_rooflines-windows",
    answer="windows",
    hints=(
        "How many windows fit into an image? In which order do i, j and c run in w.reshape(k·k·c, out)?",
        "For fixed i and j, x[:, i : i + rows, j : j + columns] holds pixel (i, j) of every window. Concatenate these "
        "arrays along the last axis, i in the outer loop, and reshape the result to one row for each window.",
    ),
    code="""
def windows(x, k):
    _, height, width, channels = x.shape
    rows, columns = height - k + 1, width - k + 1
    places = [x[:, i : i + rows, j : j + columns] for i in range(k) for j in range(k)]
    return np.concatenate(places, axis=3).reshape(-1, k * k * channels)
""",
    wrong=_windows,
    right="nearly every pixel is copied k² times, so that a single matrix product does the rest.",
)
