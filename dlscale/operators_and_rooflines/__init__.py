"""What limits an operator: times on one core, convolution by four methods, micro-batches.

Sizes are bytes, times seconds, numbers float32. Images are (batch, height, width, channels),
kernels (k, k, in, out), and a convolution is what the field calls so: a cross-correlation, without padding.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dlscale.lab import checks

# Time


Clock = Callable[[], float]


def seconds(f: Callable[..., Any], *args: Any, at_least: float = 0.05, clock: Clock = time.perf_counter) -> float:
    """Seconds of one call of f, compiled: the shortest of at least three, and of as many as `at_least` seconds take.

    The `clock` `time.process_time` counts what this process computes, on all its cores together, not what others do
    meanwhile.
    """
    run, times = jax.jit(f), []
    while len(times) < 4 or sum(times[1:]) < at_least:
        start = clock()
        jax.block_until_ready(run(*args))
        times.append(clock() - start)
    return min(times[1:])  # the first one compiled


@contextlib.contextmanager
def on_one_core() -> Iterator[bool]:
    """Meanwhile all threads of this process share a single core. Gives False where the system cannot do that."""
    threads = [int(path.name) for path in Path("/proc/self/task").glob("*")] if hasattr(os, "sched_setaffinity") else []
    before = {}
    for thread in threads:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, {min(before[thread])})
    try:
        yield bool(before)
    finally:
        for thread, cores in before.items():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cores)


# Convolution, four ways; each raises ValueError for shapes that do not fit each other


def _check(x: Array, w: Array) -> None:
    if not (len(x.shape) == len(w.shape) == 4 and x.shape[3] == w.shape[2] and w.shape[0] == w.shape[1]):
        asked = "x must be (batch, height, width, in) and w (k, k, in, out)"
        raise ValueError(f"{asked}, not {x.shape} and {w.shape}.")
    if w.shape[0] > min(x.shape[1:3]) or 0 in x.shape + w.shape:
        raise ValueError(f"A kernel {w.shape} does not fit images {x.shape}: no larger side, and none of length 0.")


def direct(x: Array, w: Array) -> Array:
    """The library's own: seven loops."""
    _check(x, w)
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def im2col(x: Array, w: Array) -> Array:
    """One matrix product of all windows, each written out as a row (Chellapilla et al. 2006)."""
    _check(x, w)
    k, _, channels, out = w.shape
    rows, columns = x.shape[1] - k + 1, x.shape[2] - k + 1
    x = jnp.concatenate([x[:, :, j : j + columns] for j in range(k)], axis=3)
    x = jnp.concatenate([x[:, i : i + rows] for i in range(k)], axis=3)
    return (x.reshape(-1, k * k * channels) @ w.reshape(-1, out)).reshape(len(x), rows, columns, out)


def fft(x: Array, w: Array) -> Array:
    """Products of spectra (Mathieu et al. 2014). What wraps around is not among the windows that are kept."""
    _check(x, w)
    k, size = w.shape[0], [_quick(side) for side in x.shape[1:3]]
    spectrum, kernel = jnp.fft.rfft2(x, size, (1, 2)), jnp.fft.rfft2(w, size, (0, 1))
    y = jnp.fft.irfft2(_products(spectrum, kernel.conj()), size, (1, 2))
    return y[:, : x.shape[1] - k + 1, : x.shape[2] - k + 1]


def _quick(side: int) -> int:
    """The next number that has no prime factor above 5: quick to transform."""
    return next(n for n in range(side, 2 * side + 1) if 30**20 % n == 0)


def _products(x: Array, w: Array) -> Array:
    """(batch, rows, columns, in) times (rows, columns, in, out) at each frequency: three real products for one."""
    multiply = lambda a, b: jnp.einsum("nrci,rcio->nrco", a, b)  # noqa: E731
    both, difference = multiply(x.real, w.real), multiply(x.imag, w.imag)
    cross = multiply(x.real + x.imag, w.real + w.imag)
    return lax.complex(both - difference, cross - both - difference)


POINTS = [Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2", "4", "-4", "1/4", "-1/4")]


@functools.cache
def winograd_transforms(m: int, r: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """At, G and Bt of F(m, r): y = At · ((G · w) ∘ (Bt · x)) are m results of r weights from m + r - 1 numbers.

    Toom and Cook's multiplication of polynomials, transposed (Winograd 1980), in exact fractions.
    A product of degree n - 1 = m + r - 2 is known from its values at n - 1 points and its highest coefficient ("at
    infinity"). Raises ValueError for sizes below one, or so large that the points do not suffice.
    """
    checks.whole("m", m), checks.whole("r", r)
    n = m + r - 1
    checks.whole("m + r - 1", n, high=len(POINTS) + 1, why="With more points float32 would be useless.")
    points = POINTS[: n - 1]
    powers = lambda count: np.array([*([p**i for i in range(count)] for p in points), [0] * (count - 1) + [1]], object)  # noqa: E731
    without = lambda i: functools.reduce(np.convolve, [[-p, 1] for p in points if p is not i], np.array([Fraction(1)]))  # noqa: E731
    # row i: the polynomial that is zero at all other points; its value at its own one goes into G
    rows = [np.append(without(p), [0] * (n - len(points))) for p in points] + [without(None)]
    values = [math.prod((p - q for q in points if q is not p), start=Fraction(1)) for p in points] + [Fraction(1)]
    return powers(m).T, powers(r) / np.array(values, object)[:, None], np.array(rows, object)


def winograd(x: Array, w: Array, m: int = 4) -> Array:
    """F(m × m, k × k) on tiles that overlap by k - 1 (Lavin & Gray 2016), both directions in one product."""
    _check(x, w)
    k, (batch, height, width, channels) = w.shape[0], x.shape
    n, rows, columns = m + k - 1, height - k + 1, width - k + 1
    down, across = -(-rows // m), -(-columns // m)
    found = winograd_transforms(m, k)
    At, G, Bt = (np.kron(t, t).astype(np.float32) for t in (a.astype(float) for a in found))
    x = jnp.pad(x, ((0, 0), (0, down * m - rows), (0, across * m - columns), (0, 0)))
    places = itertools.product(range(n), repeat=2)
    x = jnp.stack([x[:, i : i + (down - 1) * m + 1 : m, j : j + (across - 1) * m + 1 : m] for i, j in places])
    x = (Bt @ x.reshape(n * n, -1)).reshape(n * n, -1, channels)
    w = (G @ w.reshape(k * k, -1)).reshape(n * n, channels, -1)
    y = (At @ (x @ w).reshape(n * n, -1)).reshape(m, m, batch, down, across, -1)
    return y.transpose(2, 3, 0, 4, 1, 5).reshape(batch, down * m, across * m, -1)[:, :rows, :columns]


ALGORITHMS: dict[str, Callable[[Array, Array], Array]] = {
    "direct": direct,
    "im2col": im2col,
    "FFT": fft,
    "Winograd 2": functools.partial(winograd, m=2),
    "Winograd 4": functools.partial(winograd, m=4),
}


# Micro-batches


class Piece(NamedTuple):
    """So many examples at once by an algorithm: what it takes on this machine."""

    algorithm: str
    batch: int
    seconds: float
    workspace: int  # bytes


def total(way: Sequence[Piece]) -> float:
    """Seconds of pieces one after another."""
    return sum(piece.seconds for piece in way)


def workspace(way: Sequence[Piece]) -> int:
    """Bytes that they need, if each uses those of the one before."""
    return max(piece.workspace for piece in way)
