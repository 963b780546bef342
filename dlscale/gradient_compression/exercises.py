"""The exercises of 11_gradient_compression."""

import math
from typing import Any

import jax
import numpy as np

from dlscale import gradient_compression as compression
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import intervals


def _bits_each(answer: Any) -> str | None:
    for shape in ((64, 64), (64, 10), (2048, 1000), (7, 3)):
        like = jax.ShapeDtypeStruct(shape, "float32")
        message = jax.eval_shape(lambda x: compression.one_bit().encode((), x)[0], like)
        wanted = 8 * compression.nbytes(message) / math.prod(shape)
        if wrong := compare(
            f"The bits for each number of a {shape[0]} × {shape[1]} matrix", answer(*shape), wanted, 1e-6
        ):
            return wrong
    return None


bits_each = Exercise(
    id="gradient_compression-bits_each",
    answer="bits_each",
    question="Write `bits_each(rows, columns)`: all bits of a 1-bit message of such a matrix, divided by its numbers. "
    "Bits travel in whole bytes; means are float32.",
    hints=(
        "What travels beside the signs? Look at the arrays of the message above.",
        "The signs fill ⌈rows · columns / 8⌉ bytes. Each column has two means.",
    ),
    code="""
def bits_each(rows, columns):
    signs = math.ceil(rows * columns / 8)
    means = 2 * 4 * columns
    return 8 * (signs + means) / (rows * columns)
""",
    wrong=_bits_each,
    right="with few rows the means cost more than the signs: “1-bit” is 1 bit only for tall columns.",
)


SHAPES = {
    "normal": lambda rng: rng.normal(size=4000),
    "with heavy tails": lambda rng: rng.standard_t(3, size=4000),
    "mostly near zero": lambda rng: rng.normal(size=4000) * np.where(rng.random(4000) < 0.2, 1, 0.05),
    "with a mean": lambda rng: 3 + 0.1 * rng.normal(size=4000),
}


def sample(kind: str, seed: int) -> np.ndarray:
    """Numbers to try a code book on: "normal", "with heavy tails", "mostly near zero" or "with a mean"."""
    return SHAPES[kind](np.random.default_rng(seed)).astype(np.float32)


def _error(x: np.ndarray, codes: Any, table: Any) -> float:
    """Root of the mean squared error."""
    return float(np.sqrt(((x - np.asarray(table, float)[np.asarray(codes, int)]) ** 2).mean()))


def _settled(x: np.ndarray) -> float:
    """The error at which Lloyd's method comes to rest."""
    table = np.quantile(x, [0.05, 0.3, 0.7, 0.95])
    for _ in range(60):
        codes = np.abs(x[:, None] - table).argmin(1)
        table = np.array([x[codes == c].mean() if (codes == c).any() else table[c] for c in range(4)])
    return _error(x, codes, table)


def _codebook(answer: Any) -> str | None:
    for kind in SHAPES:
        for seed in (1001, 1002):
            x = sample(kind, seed)
            codes, table = answer(x.copy())
            codes, table = np.asarray(codes), np.asarray(table)
            if codes.shape != x.shape or codes.dtype.kind not in "iu" or codes.min() < 0 or codes.max() > 3:
                return "codes must be whole numbers from 0 to 3, one for each number of x: two bits."
            if table.shape != (4,):
                return f"table must hold four numbers, not have shape {table.shape}."
            if not (ratio := _error(x, codes, table) / _settled(x)) <= 1.1:
                told = f"the error is {ratio:.2f} times that of a good code book; at most 1.10 is asked for."
                return f"For numbers {kind} {told}"
    return None


codebook = Exercise(
    id="gradient_compression-codebook",
    answer="codebook",
    question="**Open.** Two bits for each number: write `codebook(x)` that returns `codes`, whole numbers from 0 to 3, "
    "and `table`, four numbers, so that `table[codes]` is as near to x as you can. It is tried on numbers of four "
    "kinds (`exercises.sample(kind, seed)`), and may be at most 1.1 times as far off as a good code book.",
    hints=(
        "For given table entries, which code is best for a number? For given codes, which table entry is best?",
        "Do both in turn. Where you start matters little, if each entry begins with some numbers of its own.",
    ),
    code="""
def codebook(x):
    table = np.quantile(x, [0.05, 0.3, 0.7, 0.95])
    for _ in range(40):
        codes = np.abs(x[:, None] - table).argmin(1)
        table = np.array([x[codes == c].mean() if (codes == c).any() else table[c] for c in range(4)])
    return codes, table
""",
    wrong=_codebook,
    right="a table costs 16 bytes an array and fits the numbers; evenly spaced levels are fitted to the largest only.",
)


def _feedback(answer: Any) -> str | None:
    for size, k, seed in ((12, 1, 0), (40, 5, 1), (40, 40, 2)):
        rng, memory, wanted = np.random.default_rng(seed), np.zeros(size, np.float32), np.zeros(size, np.float32)
        for number in range(6):
            gradient = rng.normal(size=size).astype(np.float32)
            before = memory.copy(), gradient.copy()
            indices, values, new = answer(memory, gradient, k)
            if (memory != before[0]).any() or (gradient != before[1]).any():
                return "your function changes the arrays that it is given: make new ones."
            indices, wanted = np.asarray(indices), wanted + gradient
            best = np.argsort(-np.abs(wanted))[:k]
            if indices.shape != (k,) or indices.dtype.kind not in "iu" or {*indices.tolist()} != {*best.tolist()}:
                return f"in step {number + 1} the indices are not those of the {k} largest of what is due."
            if wrong := compare(f"in step {number + 1}, what is sent at these indices", values, wanted[indices], 1e-5):
                return wrong
            wanted[best] = 0
            if (wrong := compare(f"in step {number + 1}, what is kept", new, wanted, 1e-5)) is not None:
                return wrong
            memory = np.array(new, np.float32)
    return None


feedback = Exercise(
    id="gradient_compression-feedback",
    answer="feedback_step",
    question="Write one step of top-k **with error feedback**, in NumPy: `feedback_step(memory, gradient, k)` returns "
    "`indices` (k,), `values` (k,) and the new `memory`. The arrays that you are given must stay as they are.",
    hints=(
        "What is due is more than the gradient.",
        "np.argsort sorts upwards. What is sent must not be kept as well, and nothing may vanish: check that what was "
        "sent and what is kept are together what was due.",
    ),
    code="""
def feedback_step(memory, gradient, k):
    due = memory + gradient
    indices = np.argsort(-np.abs(due))[:k]
    values = due[indices]
    kept = due.copy()
    kept[indices] = 0
    return indices, values, kept
""",
    wrong=_feedback,
    right="each round the k largest of all that is due were sent, and the rest was kept to the last digit.",
)


def _crossing(answer: Any) -> str | None:
    for size, k in ((10_000, 100), (10_000, 10), (4096, 400), (1_000_000, 50), (7498, 75)):
        if wrong := compare(
            f"For {k} of {size:,} entries, the number of workers", answer(size, k), _crosses(size, k), 1e-9
        ):
            return wrong
    return None


def _crosses(size: int, k: int) -> int:
    sent, workers = 0.0, 1
    while True:
        sent += 8 * compression.expected_union(size, k, workers)
        workers *= 2
        if sent >= 2 * 4 * size * (workers - 1) / workers:
            return workers


crossing = Exercise(
    id="gradient_compression-crossing",
    answer="dense_from",
    question="Write `dense_from(size, k)`: the fewest workers, a power of two, at which doubling with lists sends at "
    "least as many bytes from each worker as a dense all-reduce, $2 \\cdot 4n(P-1)/P$. Lists are of random entries, "
    "without a switch. `compression.expected_union(size, k, workers)` is the formula above; an entry is 8 bytes.",
    hints=(
        "In which round does a worker send the sum of how many lists?",
        "Rounds go on until all have all: one more each time the workers double. Add up what they send.",
    ),
    code="""
def dense_from(size, k):
    sent, workers = 0, 1
    while True:
        sent += 8 * compression.expected_union(size, k, workers)
        workers *= 2
        if sent >= 8 * size * (workers - 1) / workers:
            return workers
""",
    wrong=_crossing,
    right="the last rounds cost most. Bare gradients agree about what is large; with a memory lists come near to this.",
)


def _choose(answer: Any) -> str | None:
    names, rng = ["everything", "1-bit", "7 levels", "top 1 %", "rank 2"], np.random.default_rng(1003)
    for _ in range(40):
        steps = {name: tuple(rng.exponential([0.2, 0.1 * i, 0.5 / (i + 1)]).tolist()) for i, name in enumerate(names)}
        lost = {name: rng.normal(rng.normal(), 1.5, 10) * (name != "everything") for name in names}
        most = float(rng.uniform(0.2, 2))
        best = min((name for name in names if intervals.interval(lost[name]).high <= most), key=lambda n: sum(steps[n]))
        if (found := answer(dict(steps), dict(lost), most)) not in steps:
            return f"the answer must be one of the names, not {found!r}."
        if (high := intervals.interval(lost[found]).high) > most:
            return f"{found} was chosen, but its interval ends at {high:.2f} points; {most:.2f} may be lost."
        if sum(steps[found]) > sum(steps[best]):
            return f"{found} takes {sum(steps[found]):.2f} s a step, but {sum(steps[best]):.2f} s can be had."
    return None


choose = Exercise(
    id="gradient_compression-choose",
    answer="choose",
    question="Write `choose(steps, lost, most)`: the name of the compressor with the shortest step, among those for "
    "which the 95 % interval of the points lost ends at `most` or below. `steps` has the seconds of computing, coding "
    "and sending by name, as `step_parts` gives them; `lost` an array by name, a number for each seed; "
    "`intervals.interval(samples).high` is the end of an interval.",
    hints=(
        "First leave out what may lose too much. Sending everything loses nothing, so one always remains.",
        "min(names, key=…) finds the name with the smallest value; a step is the sum of its three parts.",
    ),
    code="""
def choose(steps, lost, most):
    allowed = [name for name in steps if intervals.interval(lost[name]).high <= most]
    return min(allowed, key=lambda name: sum(steps[name]))
""",
    wrong=_choose,
    right="neither the fewest bytes nor the smallest loss decides, but the shortest step among those that lose little.",
)

__all__ = ["Exercise", "bits_each", "choose", "codebook", "compression", "crossing", "feedback", "math", "sample"]
