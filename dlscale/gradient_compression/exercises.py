"""The exercises of 11_gradient_compression."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _bits_each(answer: Any) -> str | None:
    for rows, columns in ((64, 64), (64, 10), (2048, 1000), (9, 3)):
        wanted = 8 * (-(-rows * columns // 8) + 8 * columns) / (rows * columns)
        if wrong := compare(f"For a {rows} × {columns} matrix, the number", answer(rows, columns), wanted, 1e-6):
            return wrong
    return None


bits_each = Exercise(
    id="gradient_compression-bits_each",
    answer="bits_each",
    hints=(
        "What travels beside the signs? Look at the arrays of the message in section 1.",
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


def _feedback(answer: Any) -> str | None:
    for size, k, seed in ((12, 1, 0), (40, 5, 1), (40, 39, 2)):
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
            if wrong := compare(f"in step {number + 1}, what is kept", new, wanted, 1e-5):
                return wrong
            memory = np.array(new, np.float32)
    return None


feedback = Exercise(
    id="gradient_compression-feedback",
    answer="feedback_step",
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


# entries and those of a list: the fewest workers
CROSSINGS = {(10_000, 100): 128, (10_000, 10): 2048, (4096, 400): 16, (1_000_000, 50): 32_768, (1000, 150): 8}


def _crossing(answer: Any) -> str | None:
    for (size, k), workers in CROSSINGS.items():
        if wrong := compare(f"For {k} of {size:,} entries, the number of workers", answer(size, k), workers, 1e-9):
            return wrong
    return None


crossing = Exercise(
    id="gradient_compression-crossing",
    answer="dense_from",
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
    right="the last rounds cost most. Real lists agree more than random ones, least so with a memory.",
)
