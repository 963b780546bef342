"""What is read from traced programs: messages, what is combined, operations, and what is kept, counted by hand."""

from __future__ import annotations

import functools
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dlscale import collectives
from dlscale.lab import interpreter, jax_internals, program

WORKERS = 4
X = jax.ShapeDtypeStruct((6,), "float32")
AROUND = [(w, (w + 1) % WORKERS) for w in range(WORKERS)]


def receive(x, pairs=AROUND):
    return lax.ppermute(x, "workers", pairs)


def combined(f, *args):
    """Bytes combined in each round."""
    return [round_.combined for round_ in program.schedule(f, WORKERS, *(args or (X,))).rounds]


# Messages and what is combined


def test_a_schedule_by_hand():
    def f(x):
        first = receive(x[:2], [(0, 1), (2, 2), (3, 3)])
        second = receive(x)  # waits for nothing
        return receive(first + second[:2]) + x[0]

    found = program.schedule(f, WORKERS, X)
    assert [[(m.pairs.tolist(), m.bytes) for m in r.messages] for r in found.rounds] == [
        [([[0, 1]], 8), ([list(pair) for pair in AROUND], 24)],
        [([list(pair) for pair in AROUND], 8)],
    ]
    assert [r.combined for r in found.rounds] == [8, 8]
    np.testing.assert_array_equal(found.sent(), [[32, 24, 24, 24], [8] * 4])
    np.testing.assert_array_equal(found.received(), [[24, 32, 24, 24], [8] * 4])


OPS = {
    "add": jnp.add, "maximum": jnp.maximum, "minimum": jnp.minimum, "multiply": jnp.multiply,
    "subtract": jnp.subtract, "logaddexp": jnp.logaddexp, "hypot": jnp.hypot, "power": jnp.power,
    "weighted": lambda a, b: a - 0.5 * b, "mean": lambda a, b: (a + b) / 2,
    "larger": lambda a, b: jnp.where(a > b, a, b), "by size": lambda a, b: jnp.where(jnp.abs(a) > jnp.abs(b), a, b),
    "jitted": jax.jit(lambda a, b: a + b), "checkpointed": jax.checkpoint(lambda a, b: jnp.sin(a) + b),
    "decided": lambda a, b: lax.cond(a.size > 3, jnp.add, jnp.subtract, a, b),
    "twice": lambda a, b: jnp.sin(a + b) * (a - b) + b,
    "through more bits": lambda a, b: (a.astype("float64") + b).astype(a.dtype),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("algorithm", collectives.ALGORITHMS)
def test_every_operation_counts_once_for_each_element(algorithm):
    wanted = [r.combined for r in collectives.schedule(algorithm, 4, (12,)).rounds]
    assert sum(wanted) > 0
    for name, op in OPS.items():
        found = collectives.schedule(algorithm, 4, (12,), op=op).rounds
        assert [r.combined for r in found] == wanted, name


def test_moving_selecting_and_places_are_not_combining():
    def f(x):
        me = lax.axis_index("workers")
        y = receive(x)
        y = jnp.where((me + 3) % WORKERS > 1, y, x)
        y = jnp.concatenate([y[::-1], x]).at[(me + 1) % 5].set(0)
        y = lax.dynamic_slice(y, ((me - 1) % 5,), (6,))
        return jnp.roll(2 * jnp.exp(y) + 1, 1).reshape(2, 3).T

    assert combined(f) == [0]
    for collective in ("broadcast", "scatter", "gather", "all_gather", "all_to_all"):
        rounds = collectives.schedule(None, 8, (8, 3), collective=collective).rounds
        assert [r.combined for r in rounds] == [0] * len(rounds), collective


def test_parts_of_a_message_are_combined_each():
    assert combined(lambda x: [part + x[:3] for part in jnp.split(receive(x), 2)]) == [24], "in two halves"
    assert combined(lambda x: lax.map(lambda both: both[0] * both[1], (receive(x), x))) == [24], "number by number"
    assert combined(lambda x: receive(x) + receive(x) + x) == [48], "two messages"
    assert combined(lambda x: x.at[jnp.array([1, 4])].add(receive(x)[:2])) == [8], "in two places"
    assert combined(lambda x: x + receive(x).sum()) == [24]
    assert combined(lambda x: jnp.where(x > 0, receive(x), x) + x) == [24], "after a choice"
    half = jax.ShapeDtypeStruct((6,), "float16")
    assert combined(lambda x: x + receive(x.astype("float16")), half) == [12]
    w = jax.ShapeDtypeStruct((5, 5), "float32")
    assert combined(lambda a: a @ receive(a), w) == [100], "an associative operation, too"


@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.cond(x[0] > 0, receive, lambda x: x, x),
        lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: receive(x) + 1, x),
    ],
)
def test_a_message_that_numbers_decide_about_has_no_schedule(f):
    with pytest.raises(ValueError, match="Numbers decide whether a message is sent"):
        program.schedule(f, WORKERS, X)


# Work and depth


def vector(n):
    return jax.ShapeDtypeStruct((n,), "float32")


def matrix(rows, columns):
    return jax.ShapeDtypeStruct((rows, columns), "float32")


def tree_sum(x):
    while len(x) > 1:
        low, high = jnp.split(x, 2)
        x = low + high
    return x.reshape(())


def scan_sum(x):
    return lax.scan(lambda total, one: (total + one, None), 0.0, x)[0]


def chain(a, b, c):
    return a @ b @ c


CONVOLUTION = functools.partial(lax.conv, window_strides=(1, 1), padding="VALID")


@pytest.mark.parametrize(
    "f, args, work, depth",
    [
        (tree_sum, [vector(64)], 63, 6),
        (scan_sum, [vector(64)], 64, 64),
        (jnp.sum, [vector(64)], 63, 6),
        (jnp.max, [vector(5)], 4, 3),
        (lambda x: x.sum(0), [matrix(7, 3)], 18, 3),
        (jnp.cumsum, [vector(8)], 14, 6),
        (lambda x: jnp.sin(x) + 1, [vector(10)], 20, 2),
        (lambda x: jnp.sin(x) + jnp.cos(x), [vector(10)], 30, 2),
        (lambda x: jnp.flip(x.reshape(2, 5).T), [vector(10)], 0, 0),
        (chain, [matrix(2, 8), matrix(8, 4), matrix(4, 3)], 2 * 4 * 15 + 2 * 3 * 7, (1 + 3) + (1 + 2)),
        (lambda a, b: a @ b, [matrix(3, 1), matrix(1, 5)], 15, 1),
        (CONVOLUTION, [jnp.ones((2, 3, 6, 6)), jnp.ones((5, 3, 3, 3))], 2 * 5 * 16 * (2 * 27 - 1), 1 + 5),
        (lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + a, (0,)), [matrix(8, 2)], 14, 3),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (4,), (4,), "VALID"), [vector(16)], 4 * 3, 2),
        (jax.jit(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))), [vector(3)], 6, 2),
        (lambda x: lax.cond(True, jnp.sin, lambda x: jnp.sin(jnp.sin(x)), x), [vector(3)], 3, 1),
        (lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), [vector(3)], 4, 2),
        (lambda x: lax.scan(lambda c, _: (c, jnp.sin(x)), 0.0, None, length=9)[1], [vector(3)], 27, 1),
        (lambda x: x.at[jnp.array([0, 2])].add(1.0), [vector(9)], 2 + 4, 2),  # places may be negative: x < 0, x + 9
        (lambda x: lax.scan(lambda c, _: (c + 1, c), x, None, length=0), [vector(3)], 0, 0),
        (lambda ws, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0],
         [jax.ShapeDtypeStruct((9, 8, 8), "float32"), matrix(5, 8)], 9 * 5 * 8 * (15 + 1), 9 * (1 + 3 + 1)),
        (jnp.fft.fft, [jax.ShapeDtypeStruct((3, 64), "complex64")], 3 * 5 * 64 * 6, 18),  # five a number and level
        (lambda x: x + jax.random.normal(jax.random.key(0), (3,)) * 0, [vector(3)], ANY, ANY),  # keys are no numbers
    ],
)  # fmt: skip
def test_work_and_depth_by_hand(f, args, work, depth):
    assert program.work_depth(f, *args) == (work, depth)


SCALAR = jax.ShapeDtypeStruct((), "float32")


@pytest.mark.parametrize(
    "f, work, depth",
    [  # the test once more than the body; a turn may compute while it is tested, but its results wait for that
        (lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, 2 * c[1]), (0, x))[1], 6 + 5 * 2, 6),
        (lambda x: lax.while_loop(lambda c: ~(c[0] <= 1), lambda c: (c[0] - 3, 2 * c[1]), (8, x))[1], 8 + 3 * 2, 8),
        (lambda x: lax.while_loop(lambda c: c[0] > 9, lambda c: (c[0] + 1, 2 * c[1]), (0, x))[1], 1, 1),
    ],
)
def test_a_while_loop_with_a_counter_is_counted(f, work, depth):
    assert program.work_depth(f, SCALAR) == (work, depth)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.while_loop(lambda x: x < 9, lambda x: 2 * x + 1, x),
        lambda x: lax.fori_loop(0, x.astype("int32"), lambda _, x: 2 * x, x),
        lambda x: lax.scan(lambda c, _: (lax.while_loop(lambda x: x < 9, lambda x: 2 * x, c), None), x, None, 2)[0],
    ],
)
def test_a_loop_that_nobody_can_count(f):
    with pytest.raises(ValueError, match=r"ends when its numbers say so.*Let it have a fixed number of turns"):
        program.work_depth(f, SCALAR)


# Memory


def test_what_a_gradient_keeps_by_hand():
    x, w = matrix(4, 8), matrix(8, 3)
    assert program.kept_bytes(lambda w, x: x @ w, w, x) == 0, "arguments are there anyway"
    assert program.kept_bytes(lambda x: jnp.sin(x).sum(), x) == 4 * 32, "cos x"
    assert program.kept_bytes(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)).sum()), x) == 0
    assert program.nbytes(x, w, jnp.ones(3, "int16")) == 4 * 32 + 4 * 24 + 6


# A run in NumPy

CASES = [(name, None) for name in ("broadcast", "reduce", "scatter", "gather")]
CASES += [("all_gather", name) for name in ("ring", "bruck")] + [("all_to_all", name) for name in ("pairwise", "bruck")]
CASES += [("reduce_scatter", name) for name in ("ring", "halving")]
CASES += [("all_reduce", name) for name in collectives.ALGORITHMS]


@pytest.mark.parametrize("collective, algorithm", CASES)
@pytest.mark.parametrize("workers", [5, 8])
def test_the_run_gives_what_numpy_says(collective, algorithm, workers):
    if algorithm == "halving" and workers == 5:
        return
    x = np.random.default_rng(0).integers(0, 2**20, (workers, workers, 3), np.int32)
    found, _ = interpreter.run(collectives.operation(collective, algorithm), x)
    np.testing.assert_array_equal(found, jax.vmap(collectives.operation(collective, algorithm), axis_name="workers")(x))


def test_an_unknown_instruction_is_named():
    with pytest.raises(ValueError, match="population_count"):
        interpreter.run(lax.population_count, np.ones((2, 3), np.int32))


# What JAX has no public name for


def test_the_axis_of_a_vmap_is_known_from_that_of_devices():
    seen = []

    def look(x):
        seen.append(jax_internals.under_vmap("workers"))
        return jnp.sin(x)

    x, one = jnp.ones((3, 2)), jax.make_mesh((1,), ("workers",), axis_types=(jax.sharding.AxisType.Auto,))
    emulate = functools.partial(jax.vmap, axis_name="workers")
    within = lambda x: lax.scan(lambda x, _: (look(x), None), x, None, length=2)  # noqa: E731
    inner = (look, jax.jit(look), jax.grad(lambda x: look(x).sum()), jax.vmap(look), jax.checkpoint(look), within)
    for f in (*map(emulate, inner), jax.jit(emulate(look)), jax.grad(lambda x: emulate(look)(x).sum())):
        f(x)
    assert all(seen) and len(seen) >= 8
    seen.clear()
    spec = jax.sharding.PartitionSpec()
    sharded = jax.shard_map(look, mesh=one, in_specs=spec, out_specs=spec)
    for f in (look, jax.vmap(look), jax.vmap(look, axis_name="others"), sharded, jax.jit(sharded)):
        f(x)
    program.trace(look, 3, x)
    jax.pmap(look, axis_name="workers")(x[:1])
    assert not any(seen)
    assert len(seen) >= 6
