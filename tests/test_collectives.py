"""Collectives against NumPy in every way of running them, and the counts of their programs against formulas."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_cases import OPERATIONS, case, check, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import collectives, costs
from dlscale.collectives import exercises
from dlscale.lab import jax_internals


def on_all(f, x):
    """f by every worker on its row of x, emulated."""
    options = dict.fromkeys(jax_internals.OLD_FUSION, True)  # the older one writes the code of a tree many times
    return np.asarray(jax.jit(jax.vmap(f, axis_name="workers"), compiler_options=options)(x))


@pytest.mark.parametrize("name, algorithm", OPERATIONS)
@settings(max_examples=2)
@given(st.integers(1, 9), st.integers(0, 59))
def test_under_vmap(name, algorithm, workers, number):
    f, x, wanted = case(name, algorithm, workers, number)
    check(on_all(f, x), wanted)


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
def test_all_reduce_of_floats_gives_every_worker_the_same_bits_but_for_none_the_exact_sum(algorithm):
    x = np.random.default_rng(0).normal(size=(5, 1000)).astype(np.float32)
    result = on_all(lambda x: collectives.all_reduce(x, "workers", algorithm), x)
    assert (result == result[0]).all()
    # each of the at most P additions rounds by half a unit in the last place of what it has
    np.testing.assert_allclose(result[0], x.sum(0, dtype=float), rtol=0, atol=5 * 2**-24 * np.abs(x).sum(0).max())


@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
def test_groups_work_side_by_side_with_an_operation_of_their_own(algorithm):
    x, groups = numbers(7, (3,), "int32"), [[1, 4, 6], [5, 2, 0]]
    result = on_all(lambda x: collectives.all_reduce(x, "workers", algorithm, jnp.maximum, groups), x)
    for group in groups:
        np.testing.assert_array_equal(result[group], np.broadcast_to(x[group].max(0), (3, 3)))


def test_roots_of_groups_and_the_size_of_a_hierarchy():
    x = numbers(12, (3,), "int32")
    result = on_all(lambda x: collectives.broadcast(x, "workers", 2, [[1, 4, 7], [9, 2, 0]]), x)
    np.testing.assert_array_equal(result[[1, 4, 7]], x[[7, 7, 7]])
    result = on_all(lambda x: collectives.all_reduce(x, "workers", "hierarchical", group_size=4), x)
    np.testing.assert_array_equal(result, np.broadcast_to(x.sum(0), x.shape))


# Elsewhere

EMULATED = """
import jax, numpy as np
from collective_cases import OPERATIONS, case, check
from dlscale.lab import devices

devices.emulate(4)
spec = jax.sharding.PartitionSpec("workers")
for number, (name, algorithm) in enumerate(OPERATIONS):
    f, x, wanted = case(name, algorithm, 4 if algorithm == "halving" else 3, number + number // 3)  # not empty
    mesh, mine = devices.mesh(len(x)), lambda x: f(x[0])[None]
    sharded = jax.shard_map(mine, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    run = jax.pmap(f, axis_name="workers") if number % 2 else jax.jit(sharded)
    check(np.asarray(run(x)), wanted)
"""


def test_under_pmap_and_shard_map():
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "-W", "ignore", "-c", EMULATED], os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]


# Counts


@pytest.mark.parametrize("workers", [2, 16])
def test_what_a_worker_adds_up_is_the_textbooks(workers):
    """Rounds and bytes: test_costs."""
    size = 4 * 1024 * workers
    chunks, whole = size * (workers - 1) / workers, size * math.log2(workers)
    for algorithm, wanted in {"ring": chunks, "rabenseifner": chunks, "tree": whole, "butterfly": whole}.items():
        rounds = collectives.schedule(algorithm, workers, (size // 4,)).rounds
        assert sum(r.combined for r in rounds) == wanted, algorithm


@settings(max_examples=15)
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
        (lambda x: collectives.all_reduce(x, "elsewhere"), NameError, "elsewhere.*jax.shard_map"),
        (lambda x: collectives.all_reduce([x, x[:2]], "workers"), TypeError, "one array, not a list.*ravel_pytree"),
        (lambda x: collectives.reduce(x, "workers", op=jnp.outer), ValueError, r"op must .* into float32\[3, 3\]"),
        (lambda x: collectives.all_reduce(x, "workers", "rings"), ValueError, "Did you mean 'ring'"),
        (lambda x: collectives.broadcast(x, "workers", 6), ValueError, "root"),
        (lambda x: collectives.scatter(x, "workers"), ValueError, "one part for each of 6"),
        (lambda x: collectives.reduce_scatter(jnp.ones(6), "workers", "halving"), ValueError, "power of two"),
        (lambda x: collectives.all_reduce(x, "workers", "hierarchical", group_size=4), ValueError, "do not divide 6"),
        (lambda x: collectives.all_reduce(x, "workers", groups=[[0, 1], [2]]), ValueError, "equally long"),
        (lambda x: collectives.all_reduce(x, "workers", groups=[[0, 1], [1, 2]]), ValueError, "share no worker"),
        (lambda x: collectives.schedule("ring", 4, (3,), collective="allreduce"), ValueError, "collective"),
    ],
)
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        on_all(call, numbers(6, (3,), "float32"))


# The notebook: what a reader writes, and what is suggested


def swapped(x, axis_name, join=jnp.add):
    for d in [2**k for k in range(jax.lax.axis_size(axis_name).bit_length() - 1)]:
        x = join(x, jax.lax.ppermute(x, axis_name, [(w, w ^ d) for w in range(jax.lax.axis_size(axis_name))]))
    return x


def passed_on(x, axis_name):
    """Right sums in log₂ P rounds, but nobody swaps: workers add in orders of their own."""
    P = jax.lax.axis_size(axis_name)
    for k in range(P.bit_length() - 1):
        x = x + jax.lax.ppermute(x, axis_name, [(w, (w + 2**k) % P) for w in range(P)])
    return x


@pytest.mark.parametrize(
    "exercise, written, words",
    [
        (exercises.butterfly, swapped, "right"),
        (exercises.butterfly, passed_on, "4 workers 0 sends to 1 and 1 does not send to 0"),
        (exercises.butterfly, lambda x, axis_name: jax.lax.psum(x, axis_name) + 0 * swapped(x, axis_name), "own psum"),
        (exercises.butterfly, lambda x, axis_name: swapped(x, axis_name, jnp.maximum), "differs in"),
        (exercises.butterfly, lambda x, axis_name: ..., "no answer yet"),
        (exercises.butterfly, collectives.all_reduce, "write it with jax.lax.ppermute"),
        (exercises.butterfly, lambda x, axis_name: swapped(jnp.stack([x, x]), axis_name)[0], "4 arrays in 2 rounds"),
    ],
)
def test_what_a_reader_writes(exercise, written, words):
    right, line = exercise.judge(exercises.tried(written))
    assert right == (words == "right") and words in line, line
    assert collectives.schedule("ring", 4, (8,)).rounds, "the library is whole again"


def crossing(workers, latency, per_byte, share=1):
    rounds, arrays = 2 * (workers - 1), 2 - share * 2 / workers
    return latency * (rounds - math.log2(workers)) / per_byte / (math.log2(workers) - arrays)


@pytest.mark.parametrize(
    "exercise, written, right",
    [
        (exercises.crossover, crossing, True),
        (exercises.crossover, lambda *args: int(crossing(*args)), True),
        (exercises.crossover, lambda *args: crossing(*args, share=0), False),
        (exercises.wire, lambda workers, distance: np.minimum(distance % workers, -distance % workers), True),
        (exercises.wire, lambda workers, distance: distance, False),
        (exercises.wire, lambda workers, distance: 1, False),
    ],
)
def test_crossings_and_messages_on_the_busiest_wire(exercise, written, right):
    assert exercise.judge(written)[0] == right


@pytest.mark.parametrize("P", [2, 5, 8, 12])
def test_the_circulant_has_the_bytes_of_the_ring_in_few_rounds(P):
    circulant, ring = (collectives.schedule(a, P, (P,)) for a in ("circulant", "ring"))
    assert len(circulant.rounds) == 2 * math.ceil(math.log2(P)) <= len(ring.rounds)
    assert circulant.sent().sum(0).max() == ring.sent().sum(0).max()


def test_what_is_suggested_to_try():
    x = numbers(512, (4,), "int32")
    np.testing.assert_array_equal(on_all(lambda x: swapped(x, "workers"), x), np.broadcast_to(x.sum(0), x.shape))
    assert len(exercises.tried(swapped)(x)[1]) == 9
    wires, sizes = costs.ring(64), 2.0 ** np.arange(10, 31)
    times = {a: wires.parts(collectives.schedule(a, 64, (64,)), sizes / 256).sum(-1) for a in ("tree", "butterfly")}
    assert (times["tree"] > times["butterfly"]).all(), "a tree never wins there"
    quick = costs.LogGP(latency=5e-6, overhead=5e-8, gap=5e-7, gap_per_byte=1e-10)
    exchange = {a: collectives.schedule(a, 64, (64, 2), collective="all_to_all") for a in ("pairwise", "bruck")}
    assert quick.time(exchange["bruck"]) < quick.time(exchange["pairwise"])
