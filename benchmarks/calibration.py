"""A fixed workload like a notebook's, by which machines and moments are compared: compiling, products, drawing."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from time import perf_counter

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.timing import Row, row

# Wall seconds of `once` on the quiet machine of two cores on which a notebook may take cold_start.BUDGET_SECONDS. That
# machine is known by the notebooks' seconds on it: those of five notebooks at their first edition (39 to 44 s for 02 to
# 05, 19 s for 08), over their ratios to `once` where both were run in turn (8.3 to 17.6), are 2.3 to 3.3 s; this is the
# median.
QUIET_SECONDS = 2.4
ROUNDS = 5


def compiling() -> None:
    """Compile the gradient of a deep network, and a loop around its step."""

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight) + jax.nn.softmax(x)
        return jnp.square(x).mean()

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, gradient = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), value

    weights, x = [jnp.ones((16, 16))] * 12, jnp.ones((32, 16))
    jax.jit(step).lower(weights, x).compile()
    jax.jit(lambda weights, xs: jax.lax.scan(step, weights, xs)).lower(weights, x[None]).compile()


def multiplying() -> None:
    """Multiply matrices of 1,500 × 1,500 float32 numbers, ten times."""
    matrix = product = np.full((1500, 1500), 1 / 1500, np.float32)
    for _ in range(10):
        product = product @ matrix  # stays what it is


def drawing() -> None:
    """Draw a figure of three axes with twenty lines each, four times."""
    x = np.linspace(0, 1, 200)
    for number in range(4):
        figure = Figure((7.2, 3.4), dpi=100, layout="constrained")
        FigureCanvasAgg(figure)
        for ax in figure.subplots(1, 3):
            ax.plot(x, np.sin(x[:, None] * (number + np.arange(20))))
            ax.set(xlabel="x", ylabel="y", title="sines")
        figure.savefig(io.BytesIO(), format="png")


PARTS = {"compiling": compiling, "multiplying": multiplying, "drawing": drawing}


def once() -> dict[str, float]:
    """Do all of it once; return the wall seconds of each part, of the "whole", and its "processor" seconds."""
    jax.config.update("jax_enable_compilation_cache", False)  # else the next round would find what this one compiled
    before, seconds = os.times(), {}
    for name, part in PARTS.items():
        start = perf_counter()
        part()
        seconds[name] = perf_counter() - start
    after = os.times()
    whole = sum(seconds.values())
    return seconds | {"whole": whole, "processor": after.user - before.user + after.system - before.system}


def run() -> Iterator[Row]:
    once()  # imports and first touches
    rounds = [once() for _ in range(ROUNDS)]
    for name in rounds[0]:
        values = np.array([seconds[name] for seconds in rounds])
        ratio = float(np.median(values)) / QUIET_SECONDS if name == "whole" else None
        yield row(f"Calibration: ratio to {QUIET_SECONDS} s", name, values, "s", ratio)
