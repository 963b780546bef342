"""Collective operations on inputs of every kind, and what NumPy says of them: for every way of running them."""

from __future__ import annotations

import functools

import numpy as np

from dlscale import collectives

ROOTED = ("broadcast", "reduce", "scatter", "gather")
OPERATIONS = [
    *((name, None) for name in ROOTED),
    ("all_gather", "ring"), ("all_gather", "bruck"), ("reduce_scatter", "ring"), ("reduce_scatter", "halving"),
    ("all_to_all", "pairwise"), ("all_to_all", "bruck"), *(("all_reduce", name) for name in collectives.ALGORITHMS),
]  # fmt: skip
SHAPES = [(), (5,), (2, 3), (0, 4)]
DTYPES = ["float32", "int32", "float16", "uint8", "bool"]


def numbers(workers, shape, dtype, seed=0):
    """Small whole numbers: sums are exact in any order and every dtype."""
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 4, (workers, *shape))
    return values.astype(dtype)


def case(name, algorithm, count, number):
    """A function of a worker's x, the input of all workers, and the wanted results of all, (workers, …) each.

    Shape, dtype and root vary with the number; "halving" takes a power of two of workers.
    """
    count = 2 ** (count.bit_length() - 1) if algorithm == "halving" else count
    shape, dtype, root = SHAPES[number % 4], DTYPES[number % 5], number % count
    in_parts = name in ("scatter", "reduce_scatter", "all_to_all")
    x = numbers(count, (count, *shape) if in_parts else shape, dtype)
    options = {"root": root} if name in ROOTED else {"algorithm": algorithm}
    total = x.any(0) if dtype == "bool" else x.sum(0, dtype=dtype)

    def at_root(result):
        results = np.zeros((count, *result.shape), dtype)
        results[root] = result
        return results

    wanted = {
        "broadcast": lambda: np.broadcast_to(x[root], x.shape),
        "reduce": lambda: at_root(total),
        "scatter": lambda: x[root],
        "gather": lambda: at_root(x),
        "all_gather": lambda: np.broadcast_to(x, (count, *x.shape)),
        "reduce_scatter": lambda: total,
        "all_to_all": lambda: x.swapaxes(0, 1),
        "all_reduce": lambda: np.broadcast_to(total, x.shape),
    }
    return functools.partial(getattr(collectives, name), axis_name="workers", **options), x, wanted[name]()


def check(result, wanted):
    np.testing.assert_array_equal(result, wanted, strict=True)  # shape and dtype too
