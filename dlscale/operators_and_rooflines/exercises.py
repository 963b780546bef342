"""The exercises of 12_operators_and_rooflines."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlscale import operators_and_rooflines as operators
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import program


def _batch_needed(answer: Any) -> str | None:
    for inputs, outputs, peak, bandwidth in (
        (4096, 4096, 150e9, 20e9), (1024, 1000, 19.5e12, 1.5e12), (512, 2048, 100e9, 50e9), (4096, 4096, 9e9, 20e9)
    ):  # fmt: skip
        wanted = next(
            b
            for b in range(1, 10**6)
            if 2 * b * inputs * outputs / peak >= 4 * (inputs * outputs + b * (inputs + outputs)) / bandwidth
        )
        what = f"For a layer {inputs} × {outputs} on {peak / 1e9:,.0f} Gop/s and {bandwidth / 1e9:,.0f} GB/s, the batch"
        if wrong := compare(what, answer(inputs, outputs, peak, bandwidth), wanted, 1e-9):
            return wrong
    return None


batch_needed = Exercise(
    id="operators_and_rooflines-batch_needed",
    answer="batch_needed",
    question="Write `batch_needed(inputs, outputs, peak, bandwidth)`: the smallest batch at which the arithmetic of a "
    "dense layer takes at least as long as its memory traffic. Weights, inputs and outputs, float32, move once each.",
    hints=(
        "Write both times as functions of the batch b. Which of them has a part that does not grow with b?",
        "2·b·in·out / peak ≥ 4·(in·out + b·(in + out)) / bandwidth. Solve for b and round up, or try b = 1, 2, 3, …",
    ),
    code="""
def batch_needed(inputs, outputs, peak, bandwidth):
    b = 1
    while 2 * b * inputs * outputs / peak < 4 * (inputs * outputs + b * (inputs + outputs)) / bandwidth:
        b = b + 1
    return b
""",
    wrong=_batch_needed,
    right="about twice the ridge: below it, at the roof, more examples would cost hardly any time at all.",
)


def _layer(batch: int, inputs: int, outputs: int) -> tuple[int, int]:
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((batch, inputs), (inputs, outputs), (outputs,))]
    return program.work_depth(lambda x, w, b: jnp.maximum(x @ w + b, 0.0), *shapes)


def _work_and_depth(answer: Any) -> str | None:
    for shape in ((1, 4, 4), (32, 784, 128), (7, 1000, 3), (64, 1, 10)):
        found, wanted = answer(*shape), _layer(*shape)
        if not isinstance(found, tuple | list | np.ndarray) or len(found) != 2:
            return "Give two numbers: work and depth."
        for what, mine, right in zip(("work", "depth"), found, wanted, strict=True):
            if wrong := compare(
                f"For {shape[0]} examples, {shape[1]} inputs, {shape[2]} outputs, the {what}", mine, right, 1e-9
            ):
                return wrong
    return None


work_and_depth = Exercise(
    id="operators_and_rooflines-work_and_depth",
    answer="work_and_depth",
    question="Write `work_and_depth(batch, inputs, outputs)` of a dense layer with bias and ReLU: two numbers. Sums "
    "are made as a tree.",
    hints=(
        "One result first: how many multiplications, how many additions, and in how many levels?",
        "A sum of n numbers takes n − 1 additions in ⌈log₂ n⌉ levels. Bias and ReLU are one operation and level each.",
    ),
    code="""
def work_and_depth(batch, inputs, outputs):
    one = inputs + (inputs - 1) + 2
    return batch * outputs * one, 1 + math.ceil(math.log2(inputs)) + 2
""",
    wrong=_work_and_depth,
    right="neither the batch nor the outputs are in the depth: that is what makes layers parallel.",
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
    question="Write **im2col**: `windows(x, k)`. `x` is (batch, height, width, channels). Return a matrix with a row "
    "for each window of k × k, in the order of the results, such that `windows(x, k) @ w.reshape(k * k * channels, "
    "out)` is the convolution with `w` (k, k, channels, out). It is tried on images of four shapes.",
    hints=(
        "How many windows fit into an image? In which order do i, j and c run in w.reshape(k·k·c, out)?",
        "For fixed i and j, x[:, i : i + rows, j : j + columns] has that place of all windows. Put these side by side "
        "along the last axis, i outermost, and make rows of them.",
    ),
    code="""
def windows(x, k):
    _, height, width, channels = x.shape
    rows, columns = height - k + 1, width - k + 1
    places = [x[:, i : i + rows, j : j + columns] for i in range(k) for j in range(k)]
    return np.concatenate(places, axis=3).reshape(-1, k * k * channels)
""",
    wrong=_windows,
    right="k² copies of nearly every number, for the sake of one matrix product.",
)


def _micro_batches(answer: Any) -> str | None:
    rng = np.random.default_rng(12)
    tables = [np.concatenate([[0.0], np.sort(rng.uniform(1, 9, batch))]) for batch in (1, 5, 12, 20)]
    tables += [
        np.array([0.0, 5, 6, 7.5, 8.1, math.inf, math.inf, math.inf, math.inf]),
        np.array([0.0, 3, 5.9, 6, 7.6, math.inf, math.inf]),
    ]
    for seconds in tables:
        batch = len(seconds) - 1
        pieces = [operators.Piece("", b, float(seconds[b]), 0) for b in range(1, batch + 1) if seconds[b] < math.inf]
        least = operators.total(operators.split(pieces, batch, math.inf))
        found = answer(seconds.copy(), batch)
        if not isinstance(found, list | tuple | np.ndarray) or not all(
            float(b).is_integer() and 1 <= b <= batch for b in found
        ):
            return f"Give a list of piece sizes, whole numbers from 1 to {batch}."
        if sum(found) != batch:
            return f"The pieces {list(map(int, found))} are {int(sum(found))} examples together, not {batch}."
        mine = sum(float(seconds[int(b)]) for b in found)
        if not mine <= least * (1 + 1e-9):
            return f"Pieces for a batch of {batch} take {mine:.4g} s: there are others that take less."
    return None


micro_batches = Exercise(
    id="operators_and_rooflines-micro_batches",
    answer="micro_batches",
    question="Write the **dynamic programming**: `micro_batches(seconds, batch)`. `seconds[b]` is what a piece of b "
    "examples takes, infinite where nothing fits (`seconds[0]` is 0). Return a list of piece sizes that sum to "
    "`batch` and take the least time together.",
    hints=(
        "Let best[n] be the least time for n examples. If the last piece has b of them, what is left to do?",
        "best[n] = min over b of best[n − b] + seconds[b]. Keep the b that won for each n, then walk back.",
    ),
    code="""
def micro_batches(seconds, batch):
    best, last = [0.0], [0]
    for n in range(1, batch + 1):
        ways = [best[n - b] + seconds[b] for b in range(1, n + 1)]
        b = int(np.argmin(ways)) + 1
        best.append(ways[b - 1])
        last.append(b)
    pieces = []
    while batch:
        pieces.append(last[batch])
        batch = batch - last[batch]
    return pieces
""",
    wrong=_micro_batches,
    right="batch² steps instead of all partitions: that is how µ-cuDNN plans a layer.",
)

PLANNED = [
    ({"m": 169, "n": 384, "k": 1728}, 2**15),
    ({"m": 1024, "n": 64, "k": 64}, 2**12),
    ({"m": 64, "n": 64, "k": 4096}, 2**13),
]
PLANNED += [({"m": 16, "n": 4096, "k": 1024}, 2**14)]


TRIES = 200  # of `traffic` for each layer


def _tile(answer: Any) -> str | None:
    for sizes, room in PLANNED:
        with _counting() as tried:
            found = answer(dict(sizes), room)
        if not isinstance(found, tuple | list) or len(found) != 2:
            return "Give two things: a tile, and an order of the loops."
        tile, order = found
        if len(tried) > TRIES:
            return f"For {sizes} `operators.traffic` was asked {len(tried):,} times, and may be {TRIES} times."
        if operators.words(tile) > room:
            return f"For {sizes} the tiles take {operators.words(tile):,} words; the memory has {room:,}."
        moved = sum(operators.traffic(sizes, tile, order).values())
        best = sum(operators.traffic(sizes, *_best(sizes, room)).values())
        if moved > 1.1 * best:
            return f"For {sizes} and {room:,} words, {moved / best:.2f} times as many words move as need to."
    return None


@contextlib.contextmanager
def _counting() -> Iterator[list[Any]]:
    """Meanwhile each call of `operators.traffic` is noted."""
    calls: list[Any] = []
    traffic = operators.traffic
    operators.traffic = lambda *args: calls.append(args) or traffic(*args)
    try:
        yield calls
    finally:
        operators.traffic = traffic


def _best(sizes: dict[str, int], room: int) -> tuple[dict[str, int], str]:
    found = operators.best_tiling(sizes, room, 3, dict.fromkeys(("DRAM", "SRAM", "registers", "arithmetic"), 0.0))
    return found.sram, found.orders[0]


tile = Exercise(
    id="operators_and_rooflines-tile",
    answer="choose_tile",
    question="**Open.** Write `choose_tile(sizes, room)`: a tile, as `{'m': …, 'n': …, 'k': …}` whose sides divide "
    "those of `sizes`, with `operators.words(tile) <= room`, and an order of the loops such as `'mnk'`. It is tried on "
    "four layers, may move at most 1.1 times as many words from DRAM as the best of all, and may ask "
    "`operators.traffic` 200 times for each layer: trying all tiles is too slow.",
    hints=(
        "If k is the innermost loop, which operand stays? How often is each number of the other two fetched then?",
        "An operand that stays wants its tile large in both directions, and then the third side buys nothing. It need "
        "not be the outputs that stay.",
    ),
    code="""
def choose_tile(sizes, room):
    divisors = lambda n: [d for d in range(1, n + 1) if n % d == 0]
    best = None
    for a, b, inner in (('m', 'n', 'k'), ('m', 'k', 'n'), ('n', 'k', 'm')):  # the tile along a and b stays
        for side in divisors(sizes[a]):
            for other in reversed(divisors(sizes[b])):
                tile = {a: side, b: other, inner: 1}
                if operators.words(tile) <= room:
                    moved = sum(operators.traffic(sizes, tile, a + b + inner).values())
                    if best is None or moved < best[0]:
                        best = moved, tile, a + b + inner
                    break
    return best[1:]
""",
    wrong=_tile,
    right="in most layers outputs stay while k runs; where the weights fit, they may.",
)
