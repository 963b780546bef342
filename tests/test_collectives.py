"""Collectives against NumPy in every way of running them, and the counts of their programs against formulas."""

from __future__ import annotations

import functools
import json
import math
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import collectives

WORKERS = st.integers(1, 13)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "int32", "float16", "uint8", "bool"])


def on_all(f, x):
    """f by every worker on its row of x, emulated."""
    return np.asarray(jax.vmap(f, axis_name="workers")(x))


def numbers(workers, shape, dtype, seed=0):
    """Small whole numbers: sums are exact in any order and every dtype."""
    values = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 4, (workers, *shape))
    return values.astype(dtype)


def total(x):
    return x.any(0) if x.dtype == bool else x.sum(0, dtype=x.dtype)


@settings(max_examples=8, deadline=None)
@given(WORKERS, SHAPES, DTYPES, st.data())
def test_one_root(workers, shape, dtype, data):
    root = data.draw(st.integers(0, workers - 1))
    x, parts = numbers(workers, shape, dtype), numbers(workers, (workers, *shape), dtype)
    at_root = {name: np.zeros_like(value) for name, value in (("reduce", x), ("gather", parts))}
    at_root["reduce"][root], at_root["gather"][root] = total(x), x
    run = {name: functools.partial(getattr(collectives, name), axis_name="workers", root=root) for name in
           ("broadcast", "reduce", "scatter", "gather")}  # fmt: skip
    np.testing.assert_array_equal(on_all(run["broadcast"], x), np.broadcast_to(x[root], x.shape))
    np.testing.assert_array_equal(on_all(run["reduce"], x), at_root["reduce"])
    np.testing.assert_array_equal(on_all(run["scatter"], parts), parts[root])
    np.testing.assert_array_equal(on_all(run["gather"], x), at_root["gather"])
    assert on_all(run["reduce"], x).dtype == dtype


@settings(max_examples=8, deadline=None)
@given(WORKERS, SHAPES, DTYPES)
def test_no_root(workers, shape, dtype):
    x, parts = numbers(workers, shape, dtype), numbers(workers, (workers, *shape), dtype)
    for algorithm in ("ring", "bruck"):
        gathered = on_all(lambda x, a=algorithm: collectives.all_gather(x, "workers", a), x)
        np.testing.assert_array_equal(gathered, np.broadcast_to(x, parts.shape))
    for algorithm in ("pairwise", "bruck"):
        swapped = on_all(lambda x, a=algorithm: collectives.all_to_all(x, "workers", a), parts)
        np.testing.assert_array_equal(swapped, parts.swapaxes(0, 1))
    for algorithm in ("ring", "halving") if workers & (workers - 1) == 0 else ("ring",):
        reduced = on_all(lambda x, a=algorithm: collectives.reduce_scatter(x, "workers", a), parts)
        np.testing.assert_array_equal(reduced, total(parts))


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
@settings(max_examples=4, deadline=None)
@given(WORKERS, SHAPES, DTYPES)
def test_all_reduce(algorithm, workers, shape, dtype):
    x = numbers(workers, shape, dtype)
    result = on_all(lambda x: collectives.all_reduce(x, "workers", algorithm), x)
    np.testing.assert_array_equal(result, np.broadcast_to(total(x), x.shape))
    assert result.dtype == dtype


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
def test_all_reduce_of_floats_gives_every_worker_the_same_bits_but_for_none_the_exact_sum(algorithm):
    x = np.random.default_rng(0).normal(size=(12, 1000)).astype(np.float32)
    result = on_all(lambda x: collectives.all_reduce(x, "workers", algorithm), x)
    assert (result == result[0]).all()
    # each of the at most P additions rounds by half a unit in the last place of what it has
    np.testing.assert_allclose(result[0], x.sum(0, dtype=float), rtol=0, atol=12 * 2**-24 * np.abs(x).sum(0).max())


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
def test_other_operations_and_many_workers(algorithm):
    x = np.random.default_rng(0).normal(size=(512, 3)).astype(np.float32)
    run = jax.jit(jax.vmap(lambda x: collectives.all_reduce(x, "workers", algorithm, jnp.maximum), axis_name="workers"))
    np.testing.assert_array_equal(run(x), np.broadcast_to(x.max(0), x.shape))


@pytest.mark.parametrize(
    "algorithm, options",
    [("torus", {"sides": (2, 6)}), ("torus", {"sides": (12, 1)}), ("hierarchical", {"group_size": 4}),
     ("hierarchical", {"group_size": 12}), ("double_tree", {"chunks": 1}), ("double_tree", {"chunks": 9})],
)  # fmt: skip
def test_options(algorithm, options):
    x = numbers(12, (5,), "int32")
    result = on_all(lambda x: collectives.all_reduce(x, "workers", algorithm, **options), x)
    np.testing.assert_array_equal(result, np.broadcast_to(x.sum(0), x.shape))


def test_groups_work_side_by_side():
    x, groups = numbers(10, (3,), "int32"), [[1, 4, 7], [9, 2, 0]]
    for algorithm in collectives.ALGORITHMS:
        result = on_all(lambda x, a=algorithm: collectives.all_reduce(x, "workers", a, groups=groups), x)
        for group in groups:
            np.testing.assert_array_equal(result[group], np.broadcast_to(x[group].sum(0), (3, 3)), algorithm)
    result = on_all(lambda x: collectives.broadcast(x, "workers", 2, groups), x)
    np.testing.assert_array_equal(result[[1, 4, 7]], x[[7, 7, 7]])


def test_gradients_flow_back_through_a_sum():
    x = np.arange(4.0, dtype=np.float32)
    f = lambda x: jax.vmap(lambda x: collectives.all_reduce(x, "w", "ring") ** 2, axis_name="w")(x).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(f)(x), np.full(4, 4 * 2 * x.sum()))


ELSEWHERE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from dlscale import collectives, devices
workers = 5
mesh = (devices.emulate(workers), devices.mesh(workers))[1]
x = np.arange(workers * 7, dtype=np.float32).reshape(workers, 7) % 11
spec = jax.sharding.PartitionSpec("workers")
wrong = []
for algorithm in collectives.ALGORITHMS:
    f = lambda x: collectives.all_reduce(x, "workers", algorithm)
    inner = lambda x: f(x[0])[None]
    sharded = jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    for name, result in (("pmap", jax.pmap(f, axis_name="workers")(x)), ("shard_map", sharded(x))):
        if not (np.asarray(result) == x.sum(0)).all():
            wrong.append((name, algorithm))
for root in (0, 3):
    f = lambda x: collectives.gather(collectives.broadcast(x, "workers", root), "workers", root)
    result = np.asarray(jax.pmap(f, axis_name="workers")(x))
    if not (result[root] == x[root]).all():
        wrong.append(("pmap", "broadcast and gather", root))
print(json.dumps(wrong))
"""


def test_pmap_and_shard_map():
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ELSEWHERE], capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert json.loads(child.stdout) == []


PROCESS = """
import os, sys
os.environ["JAX_PLATFORMS"] = "cpu"
from dlscale import collectives, devices
rank, size = devices.connect(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
import jax, numpy as np
mesh, spec = devices.mesh(), jax.sharding.PartitionSpec("workers")
mine = np.arange(7, dtype=np.float32)[None] * (rank + 1)
x = jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, spec), mine)
for algorithm in ("ring", "tree", "butterfly", "rabenseifner", "double_tree"):
    f = lambda x: collectives.all_reduce(x[0], "workers", algorithm)[None]
    result = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(x)
    local = np.asarray(result.addressable_data(0))[0]
    assert (local == np.arange(7) * size * (size + 1) / 2).all(), (algorithm, local)
print("right", rank)
"""


def test_processes():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = [sys.executable, "-c", PROCESS, f"127.0.0.1:{port}", "3"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    group = [subprocess.Popen([*start, str(rank)], **pipes) for rank in range(3)]
    try:
        for rank, process in enumerate(group):
            out, error = process.communicate(timeout=200)
            assert f"right {rank}" in out, error[-2000:]
    finally:
        for process in group:
            process.kill()


# Counts


@pytest.mark.parametrize("workers", [2, 4, 8, 32])
def test_rounds_and_bytes_are_those_of_the_textbook(workers):
    size = 4 * 1024 * workers
    levels, share = int(math.log2(workers)), (workers - 1) / workers
    wanted = {  # rounds, bytes that the busiest worker sends, bytes that a worker adds up one after another
        "ring": (2 * (workers - 1), 2 * size * share, size * share),
        "tree": (2 * levels, levels * size, levels * size),
        "butterfly": (levels, levels * size, levels * size),
        "rabenseifner": (2 * levels, 2 * size * share, size * share),
    }
    for algorithm, (rounds, sent, combined) in wanted.items():
        found = collectives.schedule(algorithm, workers, (size // 4,))
        assert len(found.rounds) == rounds, algorithm
        assert found.sent().sum(0).max() == sent, algorithm
        assert sum(r.combined for r in found.rounds) == combined, algorithm


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 17), st.integers(0, 40), st.sampled_from(collectives.ALGORITHMS))
def test_laws_of_every_schedule(workers, length, algorithm):
    found = collectives.schedule(algorithm, workers, (length,), "float16")
    sent, received = found.sent(), found.received()
    assert (sent.sum(1) == received.sum(1)).all()
    if length:
        assert (received.sum(0) >= 2 * length).all(), "nobody gets it for less"
        assert len(found.rounds) >= math.ceil(math.log2(workers)), "the lower bound of Chan et al. 2007"
    for messages, _ in found.rounds:
        for pairs, size in messages:
            assert size > 0
            assert len(set(pairs[:, 0])) == len(set(pairs[:, 1])) == len(pairs), "a permutation"
            assert (pairs[:, 0] != pairs[:, 1]).all()


@pytest.mark.parametrize(
    "collective, algorithm, shape, rounds, sent",
    [
        ("broadcast", None, (6,), 3, 3 * 24),
        ("reduce", None, (6,), 3, 24),
        ("scatter", None, (8, 6), 3, 7 * 24),
        ("gather", None, (6,), 3, 4 * 24),
        ("all_gather", "ring", (6,), 7, 7 * 24),
        ("all_gather", "bruck", (6,), 3, 7 * 24),
        ("reduce_scatter", "ring", (8, 6), 7, 7 * 24),
        ("reduce_scatter", "halving", (8, 6), 3, 7 * 24),
        ("all_to_all", "pairwise", (8, 6), 1, 7 * 24),
        ("all_to_all", "bruck", (8, 6), 3, 12 * 24),
    ],
)
def test_counts_of_the_others(collective, algorithm, shape, rounds, sent):
    found = collectives.schedule(algorithm, 8, shape, collective=collective)
    assert len(found.rounds) == rounds
    assert found.sent().sum(0).max() == sent


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x: collectives.all_reduce(x, "elsewhere"), NameError, "jax.vmap"),
        (lambda x: collectives.all_reduce(x, "workers", "rings"), ValueError, "Did you mean 'ring'"),
        (lambda x: collectives.broadcast(x, "workers", 6), ValueError, "root"),
        (lambda x: collectives.gather(x, "workers", -1), ValueError, "root"),
        (lambda x: collectives.scatter(x, "workers"), ValueError, "one part for each of the 6"),
        (lambda x: collectives.all_to_all(x[0], "workers"), ValueError, "one part for each of the 6"),
        (lambda x: collectives.reduce_scatter(jnp.ones(6), "workers", "halving"), ValueError, "power of two"),
        (lambda x: collectives.all_reduce(x, "workers", "torus", sides=(2, 2)), ValueError, "no place for exactly 6"),
        (lambda x: collectives.all_reduce(x, "workers", "hierarchical", group_size=4), ValueError, "do not divide 6"),
        (lambda x: collectives.all_reduce(x, "workers", "double_tree", chunks=0), ValueError, "chunks"),
        (lambda x: collectives.all_reduce(x, "workers", groups=[[0, 1], [2]]), ValueError, "equally long"),
        (lambda x: collectives.all_reduce(x, "workers", groups=[[0, 1], [1, 2]]), ValueError, "share no worker"),
        (lambda x: collectives.all_reduce(x, "workers", groups=[[0, 6]]), ValueError, "0 to 5"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        on_all(call, numbers(6, (3,), "float32"))


def test_unbound_axis():
    with pytest.raises(NameError, match="shard_map"):
        collectives.all_reduce(jnp.ones(3), "workers")
    with pytest.raises(ValueError, match="collective"):
        collectives.schedule("ring", 4, (3,), collective="allreduce")
