"""What limits an operator: a machine's roof, convolution by four methods, micro-batches, tiles, arrays of cells.

Sizes are bytes, times seconds, energies picojoules, numbers float32. Images are (batch, height, width, channels),
kernels (k, k, in, out), and a convolution is what the field calls so: a cross-correlation, without padding.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from scipy.optimize import LinearConstraint, milp

from dlscale.lab import checks

# The roof


class Machine(NamedTuple):
    """What a machine can do at most: operations a second, and bytes a second from its memory (Williams et al. 2009)."""

    peak: float
    bandwidth: float

    @property
    def ridge(self) -> float:
        """Operations a byte from which on arithmetic is the limit."""
        return self.peak / self.bandwidth

    def attainable(self, intensity: Any) -> Any:
        """Operations a second at so many operations a byte, at most."""
        return np.minimum(self.peak, self.bandwidth * np.asarray(intensity, float))

    def seconds(self, flops: float, nbytes: float) -> float:
        """The least time for so many operations and bytes, if they go on at the same time."""
        return max(flops / self.peak, nbytes / self.bandwidth)


Clock = Callable[[], float]


def seconds(
    f: Callable[..., Any], *args: Any, again: bool = False, at_least: float = 0.05, clock: Clock = time.perf_counter
) -> float:
    """Seconds of one call of f, compiled: the shortest of at least three, and of as many as `at_least` seconds take.

    With `again` the result is the first argument of the next call, in the same memory, whether f reads it or not: else
    the system must find fresh pages for a large result each time, which takes longer than many an operator. The `clock`
    `time.process_time` counts what this process computes, on all its cores together, not what others do meanwhile.
    """
    run, (x, *rest) = jax.jit(f, donate_argnums=(0,) if again else (), keep_unused=again), args
    x, times = jax.block_until_ready(jax.tree.map(jnp.array, x) if again else x), []
    while len(times) < 4 or sum(times[1:]) < at_least:
        start = clock()
        result = jax.block_until_ready(run(x, *rest))
        times.append(clock() - start)
        x = result if again else x
    return min(times[1:])  # the first one compiled


def measured_peak(size: int = 1024, clock: Clock = time.perf_counter) -> float:
    """Operations a second in a matrix product of this size, 2 · size³ of them: the most that a program can hope for."""
    a = jnp.ones((checks.whole("size", size), size), jnp.float32)
    return 2 * size**3 / seconds(jnp.matmul, a, a, at_least=0.1, clock=clock)


def sweep(turns: int) -> Callable[[Array], Array]:
    """A function that reads and writes every number of an array so many times, in place: v ← v / 2 + 1."""
    return lambda v: lax.fori_loop(0, turns, lambda _, v: v * 0.5 + 1.0, v)


def together(run: Callable[[Array], Array], arrays: Sequence[Array], rounds: int = 8) -> tuple[float, float]:
    """How busy the cores were, and a core's processor seconds, while each does `run` on an array of its own.

    `run` is compiled; its results are the next round's arrays. The fastest round counts, among those in which the cores
    were nearly as busy as ever: if other programs had them, they took turns, and shared nothing. Until all cores were
    busy nine tenths of a round there are more rounds, at most twice as many.
    """
    found, arrays = [], [jax.block_until_ready(run(a)) for a in arrays]  # compiles
    with ThreadPoolExecutor(len(arrays)) as pool:  # JAX waits for the end of a program that it has loaded from disk
        while len(found) < rounds or (max(found)[0] < 0.9 and len(found) < 2 * rounds):
            wall, work = time.perf_counter(), time.process_time()
            arrays = list(pool.map(lambda a: jax.block_until_ready(run(a)), arrays))
            wall, work = time.perf_counter() - wall, (time.process_time() - work) / len(arrays)
            found.append((min(1.0, work / wall), work))  # clocks may tell of a little more
    return min((each for each in found if each[0] >= 0.9 * max(found)[0]), key=itemgetter(1))


def measured_bandwidth(nbytes: int = 2**28) -> float:
    """Bytes a second, read and written, of an array of this size in place, by processor time, with one such array.

    A small one stays in a cache; a server's last cache may hold hundreds of MiB.
    """
    size, turns = checks.whole("nbytes", nbytes, low=4) // 4, max(1, 2**28 // nbytes)
    return 8 * size * turns / together(jax.jit(sweep(turns), donate_argnums=0), [jnp.zeros(size, jnp.float32)])[1]


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


def on_all_cores() -> None:
    """All threads of this process may use all cores: also those that were started, and stayed, `on_one_core`."""
    for path in Path("/proc/self/task").glob("*") if hasattr(os, "sched_setaffinity") else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(int(path.name), os.sched_getaffinity(0))


# Convolution, four ways


def direct(x: Array, w: Array) -> Array:
    """The library's own: seven loops."""
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def im2col(x: Array, w: Array) -> Array:
    """One matrix product of all windows, each written out as a row (Chellapilla et al. 2006)."""
    k, _, channels, out = w.shape
    rows, columns = x.shape[1] - k + 1, x.shape[2] - k + 1
    x = jnp.concatenate([x[:, :, j : j + columns] for j in range(k)], axis=3)
    x = jnp.concatenate([x[:, i : i + rows] for i in range(k)], axis=3)
    return (x.reshape(-1, k * k * channels) @ w.reshape(-1, out)).reshape(len(x), rows, columns, out)


def fft(x: Array, w: Array) -> Array:
    """Products of spectra (Mathieu et al. 2014). What wraps around is not among the windows that are kept."""
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


def fft_in_tiles(x: Array, w: Array, tile: int = 64) -> Array:
    """The same, tile by tile: each one's result reaches over its edges, where neighbours are added ("overlap-add").

    Raises ValueError for tiles smaller than the kernel without its middle, which would reach over their neighbours.
    """
    k, (batch, height, width, channels) = w.shape[0], x.shape
    checks.whole("tile", tile, low=max(1, k - 1), why="A tile's result must not reach beyond the next tile.")
    down, across = -(-height // tile), -(-width // tile)
    x = jnp.pad(x, ((0, 0), (0, down * tile - height), (0, across * tile - width), (0, 0)))
    tiles = x.reshape(batch, down, tile, across, tile, channels).swapaxes(2, 3).reshape(-1, tile, tile, channels)
    size = [_quick(tile + k - 1)] * 2
    y = jnp.fft.irfft2(
        _products(jnp.fft.rfft2(tiles, size, (1, 2)), jnp.fft.rfft2(w[::-1, ::-1], size, (0, 1))), size, (1, 2)
    )
    y = y[:, : tile + k - 1, : tile + k - 1].reshape(batch, down, across, tile + k - 1, tile + k - 1, -1)
    y = _overlap(y.transpose(0, 1, 3, 2, 4, 5), 1, tile)
    y = _overlap(y, 2, tile)
    return y[:, k - 1 : height, k - 1 : width]


def _overlap(y: Array, axis: int, tile: int) -> Array:
    """Add tiles along `axis`, each as long as the next axis says, `tile` places after one another."""
    y = jnp.moveaxis(y, (axis, axis + 1), (0, 1))
    count, length = y.shape[:2]
    heads = jnp.pad(y[:, :tile], ((0, 1), (0, 0), *[(0, 0)] * (y.ndim - 2)))
    tails = jnp.pad(y[:, tile:], ((1, 0), (0, 2 * tile - length), *[(0, 0)] * (y.ndim - 2)))
    joined = (heads + tails).reshape((count + 1) * tile, *y.shape[2:])
    return jnp.moveaxis(joined, 0, axis)


POINTS = [Fraction(p) for p in ("0", "1", "-1", "2", "-2", "1/2", "-1/2", "4", "-4", "1/4", "-1/4")]


class Transforms(NamedTuple):
    """What F(m, r) computes with: y = At · ((G · w) ∘ (Bt · x)) are m results of r weights from m + r - 1 numbers."""

    At: np.ndarray
    G: np.ndarray
    Bt: np.ndarray


@functools.cache
def winograd_transforms(m: int, r: int) -> Transforms:
    """Toom and Cook's multiplication of polynomials, transposed (Winograd 1980), in exact fractions.

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
    return Transforms(powers(m).T, powers(r) / np.array(values, object)[:, None], np.array(rows, object))


def winograd(x: Array, w: Array, m: int = 4, transforms: Transforms | None = None) -> Array:
    """F(m × m, k × k) on tiles that overlap by k - 1 (Lavin & Gray 2016), both directions in one product."""
    k, (batch, height, width, channels) = w.shape[0], x.shape
    n, rows, columns = m + k - 1, height - k + 1, width - k + 1
    down, across = -(-rows // m), -(-columns // m)
    found = transforms or winograd_transforms(m, k)
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


def convolve(algorithm: str, x: Array, w: Array) -> Array:
    """x (batch, height, width, in) with kernels w (k, k, in, out), by one of `ALGORITHMS`.

    Raises ValueError for an unknown algorithm and for shapes that do not fit each other.
    """
    run = ALGORITHMS[checks.known("algorithm", algorithm, ALGORITHMS)]
    if len(x.shape) != 4 or len(w.shape) != 4 or w.shape[0] != w.shape[1]:
        asked = "x must be (batch, height, width, in) and w (k, k, in, out)"
        raise ValueError(f"{asked}, not {x.shape} and {w.shape}.")
    if x.shape[3] != w.shape[2] or w.shape[0] > min(x.shape[1:3]):
        raise ValueError(f"A kernel {w.shape} does not fit images {x.shape}: as many channels, and no larger side.")
    return run(x, w)


# Micro-batches


class Piece(NamedTuple):
    """So many examples at once by an algorithm: what it takes on this machine."""

    algorithm: str
    batch: int
    seconds: float
    workspace: int  # bytes


def split(pieces: Sequence[Piece], batch: int, limit: float) -> list[Piece]:
    """The fastest way to take a batch in pieces, one after another in the same workspace of at most `limit` bytes.

    By dynamic programming (µ-cuDNN's workspace reuse: Oyama et al. 2018). Raises ValueError where no pieces make up
    the batch, and for a limit below what it needs, which the message names.
    """
    least, best = [0.0], [(0.0, [])]  # of 0, 1, … examples: the smallest workspace; the shortest time and its pieces
    for size in range(1, checks.whole("batch", batch) + 1):
        last = [piece for piece in pieces if piece.batch <= size]
        least.append(min((max(least[size - p.batch], p.workspace) for p in last), default=math.inf))
        ways = [(best[size - p.batch], p) for p in last if p.workspace <= limit]
        done = [(before[0] + p.seconds, [*before[1], p]) for before, p in ways]
        best.append(min(done, key=itemgetter(0), default=(math.inf, [])))
    if least[batch] == math.inf:
        raise ValueError(
            f"No pieces make up {batch} examples: there are only some of {sorted({p.batch for p in pieces})}."
        )
    if least[batch] > limit:
        raise ValueError(f"{batch} examples need a workspace of at least {least[batch]:,.0f} bytes, not {limit:,.0f}.")
    return best[batch][1]


def share(layers: Sequence[Sequence[Piece]], batch: int, limit: float) -> list[list[Piece]]:
    """The pieces of each layer for the fastest network, if all layers' workspaces together have `limit` bytes.

    Of each layer all that is fastest within some workspace; which of these, by integer programming (µ-cuDNN's workspace
    division). Raises ValueError for a limit below what the layers need, which the message names, and as `split` does.
    """
    ways = [_worth_having(pieces, batch) for pieces in layers]
    flat = [(row, way) for row, own in enumerate(ways) for way in own]
    of_layer = np.array([[float(row == layer) for row, _ in flat] for layer in range(len(ways))])
    times = np.array([total(way) for _, way in flat])
    sizes = np.array([workspace(way) for _, way in flat], float)
    if (least := sum(min(map(workspace, own)) for own in ways)) > limit:
        raise ValueError(f"These layers need workspaces of at least {least:,} bytes together, not {limit:,.0f}.")
    within = [
        LinearConstraint(of_layer, 1, 1),
        LinearConstraint(sizes[None] / max(limit, 1), -np.inf, limit / max(limit, 1)),
    ]
    chosen = milp(times / times.max(), constraints=within, integrality=np.ones(len(flat)), bounds=(0, 1)).x
    return [way for (_, way), taken in zip(flat, chosen, strict=True) if taken > 0.5]


def _worth_having(pieces: Sequence[Piece], batch: int) -> list[list[Piece]]:
    """The fastest way within each workspace."""
    found: dict[int, list[Piece]] = {}
    for limit in sorted({piece.workspace for piece in pieces}):
        with contextlib.suppress(ValueError):  # too little
            way = split(pieces, batch, limit)
            if not found or total(way) < min(map(total, found.values())):
                found[workspace(way)] = way
    return list(found.values()) or [split(pieces, batch, math.inf)]


def total(way: Sequence[Piece]) -> float:
    """Seconds of pieces one after another."""
    return sum(piece.seconds for piece in way)


def workspace(way: Sequence[Piece]) -> int:
    """Bytes that they need, if each uses those of the one before."""
    return max(piece.workspace for piece in way)


# Tiles


OPERANDS = {"inputs": "mk", "weights": "kn", "outputs": "mn"}  # outputs[m, n] += inputs[m, k] · weights[k, n]
Sizes = Mapping[str, int]  # of the loops m, n and k


def words(tile: Sizes) -> int:
    """Numbers of a tile of each operand together."""
    return sum(tile[a] * tile[b] for a, b in OPERANDS.values())


def traffic(sizes: Sizes, tile: Sizes, order: str) -> dict[str, int]:
    """Words of each operand that move between a memory and a smaller one, which holds one tile of each.

    `order` names the loops over tiles from the outermost to the innermost, as "mnk". A tile is fetched when the one
    that is held is another; outputs are written back, and fetched again where they are not new. Raises ValueError for
    tiles that do not divide the sizes.
    """
    if sorted(order) != ["k", "m", "n"]:
        raise ValueError(f"order must name the loops m, n and k once each, not {order!r}.")
    if bad := [i for i in order if tile[i] < 1 or sizes[i] % tile[i]]:
        raise ValueError(
            f"The tile {dict(tile)} must divide the sizes {dict(sizes)}: it does not along {', '.join(bad)}."
        )
    turns = [(i, sizes[i] // tile[i]) for i in order if sizes[i] > tile[i]]
    moved = {}
    for name, axes in OPERANDS.items():
        last = max((place for place, (i, _) in enumerate(turns) if i in axes), default=-1)
        held = math.prod(count for _, count in turns[: last + 1])  # how often another tile is needed
        size, whole = tile[axes[0]] * tile[axes[1]], sizes[axes[0]] * sizes[axes[1]]
        moved[name] = held * size + (held * size - whole if name == "outputs" else 0)
    return moved


class Tiling(NamedTuple):
    """A tile for the SRAM and one for the registers, each with the order of the loops over it."""

    sram: Sizes
    registers: Sizes
    orders: tuple[str, str] = ("mnk", "mnk")


def accesses(sizes: Sizes, tiling: Tiling) -> dict[str, int]:
    """Words that move from and to each memory, and products: each takes two operands and a sum, and leaves a sum."""
    products = math.prod(sizes.values())
    outer = traffic(sizes, tiling.sram, tiling.orders[0])
    inner = traffic(tiling.sram, tiling.registers, tiling.orders[1])
    tiles = products // math.prod(tiling.sram.values())
    moved = {"DRAM": sum(outer.values()), "SRAM": tiles * sum(inner.values()), "registers": 4 * products}
    return moved | {"arithmetic": products}


def best_tiling(sizes: Sizes, sram: int, registers: int, prices: Mapping[str, float]) -> Tiling:
    """The tiling of least energy among those that keep DRAM busy least, for memories of so many words.

    `prices`: energy of an access of each memory and of a product. Raises ValueError where not even one word of each
    operand fits.
    """
    if min(sram, registers) < 3:
        raise ValueError(f"Memories must hold a word of each operand, three, not {min(sram, registers)}.")
    orders = ["".join(order) for order in itertools.permutations("mnk")]

    def cheapest(sizes: Sizes, room: int) -> list[tuple[dict[str, int], str]]:
        """All tiles that move fewest words, each with one order of the loops that does."""
        sides = [[d for d in range(1, sizes[i] + 1) if sizes[i] % d == 0] for i in "mnk"]
        tiles = [dict(zip("mnk", own, strict=True)) for own in itertools.product(*sides)]
        ways = [
            min(((sum(traffic(sizes, tile, order).values()), tile, order) for order in orders), key=itemgetter(0))
            for tile in tiles
            if words(tile) <= room
        ]
        least = min(moved for moved, _, _ in ways)
        return [(tile, order) for moved, tile, order in ways if moved == least]

    tilings = []
    for tile, order in cheapest(sizes, sram):
        (inner, inner_order), *_ = cheapest(tile, registers)
        tilings.append(Tiling(tile, inner, (order, inner_order)))
    return min(tilings, key=lambda t: sum(prices[level] * n for level, n in accesses(sizes, t).items()))


# Systolic arrays


class Cells(NamedTuple):
    """What the registers of an array of cells hold after a cycle, NaN where nothing has come (rows, columns)."""

    across: np.ndarray  # moves to the right
    down: np.ndarray  # moves down: the other operand, or a sum
    kept: np.ndarray  # stays: a sum, or a weight


def systolic(a: np.ndarray, b: np.ndarray, keeps: str = "outputs") -> tuple[np.ndarray, list[Cells]]:
    """a @ b on an array of cells that each know their neighbours only, and what all hold after each cycle.

    `keeps`: "outputs": cell (i, j) sums result (i, j), operands come from the left and from above, row i and column j
    so many cycles late; "weights": cell (k, j) holds b[k, j], sums come down, and leave at the bottom (Kung 1982).
    Raises ValueError for shapes that do not fit.
    """
    (m, depth), n = a.shape, b.shape[1]
    if b.shape[0] != depth:
        raise ValueError(f"A product of shapes {a.shape} and {b.shape} there is none.")
    outputs = checks.known("keeps", keeps, ("outputs", "weights")) == "outputs"
    rows, entering = (m, a.T) if outputs else (depth, a)  # entering[t - i, i] comes into row i at cycle t
    across, down = np.full((rows, n), np.nan), np.full((rows, n), np.nan)
    kept, result, steps = (np.zeros((m, n)) if outputs else b.astype(float)), np.zeros((m, n)), []
    late = lambda stream, t, i: stream[t - i, i] if 0 <= t - i < len(stream) else np.nan  # noqa: E731
    for t in range(m + n + depth - 2):
        across = np.column_stack([[late(entering, t, i) for i in range(rows)], across[:, :-1]])
        above = [late(b, t, j) if outputs else 0.0 for j in range(n)]
        down = np.vstack([above, down[:-1]])
        if outputs:
            kept = kept + np.nan_to_num(across * down)
        else:
            down = down + across * kept
            for j in range(n):
                if 0 <= t - (depth - 1) - j < m:
                    result[t - (depth - 1) - j, j] = down[-1, j]
        steps.append(Cells(across, down, kept))
    return (kept if outputs else result), steps


def systolic_cycles(m: int, n: int, depth: int, rows: int, columns: int, keeps: str = "outputs") -> int:
    """Cycles of an (m, depth) by (depth, n) product in tiles on an array of rows × columns cells."""
    tall, long = (m, depth) if checks.known("keeps", keeps, ("outputs", "weights")) == "outputs" else (depth, m)
    return -(-tall // rows) * -(-n // columns) * (long + rows + columns - 2)
