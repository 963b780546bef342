"""Every scheme against a single worker's gradient, bytes against formulas, schedules by their laws, checkpoints."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import psutil
import pytest
from cells import Cells
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec
from scipy import stats

from dlscale import collectives
from dlscale import parallel_training as room
from dlscale.course import records
from dlscale.lab import devices, models, processes, program
from dlscale.lab.processes import PeerLost
from dlscale.page import figures
from dlscale.parallel_training import command, exercises, experiment, pipeline, planning

LAYERS = [models.dense("relu"), models.dense("relu"), models.dense()]
WIDTHS = (6, 8, 4, 5)


def square(result, y):
    """Without a rounding: the numbers below are small whole ones, and so are sums of them in any order."""
    return ((result - y) ** 2).sum() / len(y)


def whole(rng, *shape):
    return jnp.asarray(rng.integers(-1, 2, shape), jnp.float32)


def network(seed=0, examples=8):
    rng = np.random.default_rng(seed)
    params = [{"w": whole(rng, a, b), "b": whole(rng, b)} for a, b in itertools.pairwise(WIDTHS)]
    return params, whole(rng, examples, WIDTHS[0]), whole(rng, examples, WIDTHS[-1])


def loss(params, x, y, layers=LAYERS):
    for layer, own in zip(layers, params, strict=True):
        x = layer(own, x)
    return square(x, y)


jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # quick to compile


def on_all(f, *args, axes=0):
    return jit(jax.vmap(f, in_axes=axes, axis_name="w"))(*args)


def on_devices(f, *args):
    return jax.pmap(f, axis_name="w")(*args)


def on_mesh(f, *args):
    spec = PartitionSpec("workers")
    body = lambda *args: jax.tree.map(lambda a: a[None], f(*jax.tree.map(lambda a: a[0], args)))  # noqa: E731
    workers = len(jax.tree.leaves(args)[0])
    return jit(
        jax.shard_map(body, mesh=devices.mesh(workers), in_specs=spec, out_specs=spec, check_vma=False)
    )(*args)  # fmt: skip


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


def copies(tree, workers):
    return jax.tree.map(lambda a: jnp.stack([a] * workers), tree)


# Data parallel


def test_data_parallel_gives_the_gradient_of_the_whole_batch_to_the_bit_where_sums_are_exact():
    """By any all-reduce."""
    params, x, y = network()
    step = functools.partial(room.data_parallel, loss, axis_name="w")
    every = lambda *args: {name: step(*args, algorithm=name) for name in collectives.ALGORITHMS}  # noqa: E731
    found = on_all(every, copies(params, 4), room.shares(x, 4), room.shares(y, 4))
    wanted = copies(jit(jax.value_and_grad(loss))(params, x, y), 4)
    assert len(found) > 4
    for name in found:
        same(found[name], wanted)


def test_real_numbers_are_within_the_bound_of_their_roundings():
    """A ReLU net's gradient is sums of products: at most (roundings) · 2⁻²⁴ of the same sums of magnitudes is lost."""
    rng = np.random.default_rng(1)
    params, x, y = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), network())
    found = on_all(functools.partial(room.data_parallel, loss, axis_name="w"),
                   copies(params, 4), room.shares(x, 4), room.shares(y, 4))[1]  # fmt: skip
    single = jit(jax.grad(loss))(params, x, y)
    size = jax.tree.map(jnp.abs, (params, x, y))
    linear = [models.dense(), models.dense(), models.dense()]  # all units on: the sums can only be larger
    plus = lambda p, x, y: loss(p, x, -y, linear)  # noqa: E731
    magnitudes = jit(jax.grad(plus))(*size)
    roundings = 2 * (2 * sum(WIDTHS) + len(x) + 10)  # there and back, over the examples and workers; of both
    for a, b, m in zip(*map(jax.tree.leaves, (found, single, magnitudes)), strict=True):
        bound = roundings * 2.0**-24 * np.asarray(m)
        assert (np.abs(np.asarray(a)[0] - np.asarray(b)) <= bound).all()
        assert bound.max() < 1e-3 * np.abs(m).max()


def test_examples_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="10 examples do not divide among 4 workers"):
        room.shares(np.zeros((10, 2)), 4)


# ZeRO


def zero(stage, workers, params, x, y, run=on_all, axis="w"):
    shapes = jax.eval_shape(lambda: params)
    f = room.sharded(LAYERS, square, shapes, stage, axis)
    parts = [room.chunks(own, workers) for own in params]
    value, found = run(f, parts, room.shares(x, workers), room.shares(y, workers))
    return value, [room.unchunked(g.ravel(), own) for g, own in zip(found, params, strict=True)]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_of_zero_gives_the_single_gradient(stage):
    workers, (params, x, y) = 4, network()
    value, wanted = jit(jax.value_and_grad(loss))(params, x, y)
    values, found = zero(stage, workers, params, x, y)
    same(found, wanted)
    assert (values == value).all()


EVERYWHERE = """
import test_parallel_training as here
here.devices.emulate(4)
params, x, y = here.network()
found = here.zero(3, 4, params, x, y, here.on_mesh, "workers")[1]
here.same(found, here.jit(here.jax.grad(here.loss))(params, x, y))
params, x, y = here.deep()
table = here.pipeline.pipeline_schedule("interleaved", 4, 8, 2)
run = here.pipeline.pipeline(here.LAYERS[0], here.square, table, "w")
found = here.on_devices(run, here.pipeline.stage_params(params, table), here.copies(x, 4), here.copies(y, 4))[1]
here.same(here.pipeline.whole_params(found), here.single_gradient(params, x, y)[1])
"""


def test_the_same_under_shard_map_and_pmap():
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", EVERYWHERE]
    found = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]


@pytest.mark.parametrize("stage, passes", [(1, 2), (2, 2), (3, 3)])
def test_what_zero_sends_is_read_from_the_program(stage, passes):
    params, x, y = network()
    workers, shapes = 4, jax.eval_shape(lambda: params)
    f = room.sharded(LAYERS, square, shapes, stage, "workers")
    parts = [room.chunks(own, workers)[0] for own in params]
    found = program.schedule(f, workers, parts, x[:2], y[:2])
    numbers = sum(part.size for part in parts) * workers
    mean = 4 * 2 * (workers - 1)  # the loss itself goes round a ring, a number in each round
    # the last layer is the first on the way back: JAX gathers it again all the same
    assert found.sent().sum(0).max() == passes * (workers - 1) * numbers // workers * 4 + mean


def test_what_each_stage_keeps_is_read_from_the_program():
    params, x, y = network()
    shapes, kept = jax.eval_shape(lambda: params), {}
    for stage in (1, 2, 3):
        parts = [room.chunks(own, 4) for own in params]
        parts = [copies(part.ravel(), 4) for part in parts] if stage == 1 else parts
        value = jax.vmap(room.sharded_loss(LAYERS, square, shapes, stage, "w"), axis_name="w")
        kept[stage] = program.kept_bytes(value, parts, room.shares(x, 4), room.shares(y, 4)) / 4
    weights, hidden = (4 * sum(own[name].size for own in params) for name in "wb")
    assert kept[1] == kept[2]
    inputs = 4 * 2 * sum(WIDTHS[1:-1])  # stage 3 keeps what came into each layer but the first; y - x, and no more
    assert kept[3] == inputs + 4 * 2 * WIDTHS[-1], (kept, weights, hidden)


def test_chunks_and_back_for_layers_without_parameters_too():
    params, _, _ = network()
    for own in (*params, {}):
        assert jax.tree.structure(room.unchunked(room.chunks(own, 4).ravel(), own)) == jax.tree.structure(own)
        same(room.unchunked(room.chunks(own, 4).ravel(), own), own)


def test_a_stage_that_is_none():
    with pytest.raises(ValueError, match="stage must be a whole number from 1 to 3"):
        room.sharded(LAYERS, square, [], 4, "w")


def test_an_optimiser_of_chunks_is_that_of_the_whole():
    (params, _, _), adam = network(), optax.adam(0.1)

    @jit
    def updates(params):
        update = lambda tree: adam.update(tree, adam.init(tree))[0]  # noqa: E731
        return update(params), jax.vmap(update)([room.chunks(own, 4) for own in params])

    whole, chunks = updates(params)
    same([room.unchunked(c.ravel(), own) for c, own in zip(chunks, params, strict=True)], whole)


# Tensor parallel


def block_params(heads=4, width=8, hidden=16, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (width, heads, 2),
        "key": (width, heads, 2),
        "value": (width, heads, 2),
        "out": (heads, 2, width),
    }
    shapes |= {"w1": (width, hidden), "b1": (hidden,), "w2": (hidden, width), "b2": (width,), "scale": (width,)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def joined(split, like):
    """What `split_within` has cut, from all workers; copies must be equal."""
    for name in set(split) - set(room.SPLIT):
        same(split[name], copies(split[name][0], len(split[name])))
    return {name: jnp.concatenate([*split[name]], room.SPLIT[name]) if name in room.SPLIT else split[name][0]
            for name in like}  # fmt: skip


def test_two_layers_split_by_columns_and_rows_to_the_bit():
    rng = np.random.default_rng(0)
    params = {"w1": whole(rng, 6, 8), "b1": whole(rng, 8), "w2": whole(rng, 8, 5), "b2": whole(rng, 5)}
    x, y = whole(rng, 8, 6), whole(rng, 8, 5)
    f = lambda p, x, axis=None: square(room.two_layers(p, x, axis), y)  # noqa: E731
    wanted = jit(jax.value_and_grad(f, (0, 1)))(params, x)
    for workers in (4,):
        split = room.split_within(params, workers)
        value, (own, of_x) = on_all(lambda p, x: jax.value_and_grad(f, (0, 1))(p, x, "w"), split, x, axes=(0, None))
        same(
            (value, (joined(own, params), of_x)),
            (copies(wanted[0], workers), (wanted[1][0], copies(wanted[1][1], workers))),
        )


def test_a_transformer_block_split_by_heads_is_off_by_no_more_than_rounding():
    """What is lost to rounding is measured on the single worker, against 64 bits: the split one may lose 4 times it."""
    workers, params, rng = 2, block_params(), np.random.default_rng(1)
    x, aim = (rng.normal(size=(3, 5, 8)) for _ in range(2))
    f = lambda p, x, axis=None: ((room.block(p, x, axis) - aim.astype(x.dtype)) ** 2).mean()  # noqa: E731
    with jax.enable_x64():
        exact = jit(jax.grad(f, (0, 1)))(jax.tree.map(lambda a: np.asarray(a, np.float64), params), x)
        exact = jax.device_get(exact)
    assert all(leaf.dtype == np.float64 for leaf in jax.tree.leaves(exact))
    x = x.astype(np.float32)
    single = jax.device_get(jit(jax.grad(f, (0, 1)))(params, x))
    found, of_all = on_all(
        lambda p, x: jax.grad(f, (0, 1))(p, x, "w"), room.split_within(params, workers), x, axes=(0, None)
    )
    same(of_all[0], of_all[1])
    split = jax.device_get((joined(found, params), of_all[0]))
    for one, two, true in zip(*map(jax.tree.leaves, (single, split, exact)), strict=True):
        lost = np.abs(one - true).max()
        assert 0 < lost < 1e-5 * np.abs(true).max()
        assert np.abs(two - true).max() <= 4 * lost


def test_without_f_and_g_the_gradient_is_wrong():
    """JAX's own rule for a sum gives each worker the gradient of all workers' losses together."""
    x = jnp.ones(3)
    naive = on_all(jax.grad(lambda x: collectives.all_reduce(x, "w").sum()), copies(x, 4))
    right = on_all(jax.grad(lambda x: room.added(x, "w").sum()), copies(x, 4))
    assert (naive == 4).all() and (right == 1).all()


def test_a_block_sends_two_sums_there_and_two_back():
    params, x = room.split_within(block_params(), 2), jax.ShapeDtypeStruct((3, 5, 8), "float32")
    own = jax.tree.map(lambda a: a[0], params)
    there = program.schedule(lambda p, x: room.block(p, x, "workers"), 2, own, x).sent().sum(0).max()
    both = (
        program.schedule(jax.grad(lambda p, x: room.block(p, x, "workers").sum(), (0, 1)), 2, own, x)
        .sent()
        .sum(0)
        .max()
    )
    size = 3 * 5 * 8 * 4
    assert there == 2 * size  # an all-reduce between two workers: half of the array, twice
    assert both == 4 * size


def test_heads_and_units_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="4 heads do not divide among 3 workers"):
        room.split_within(block_params(), 3)
    with pytest.raises(ValueError, match="5 hidden units do not divide among 2"):
        room.split_within({"w1": np.zeros((2, 5))}, 2)


def test_two_splits_at_once():
    """Examples among rows, hidden units among columns of a mesh."""
    rng = np.random.default_rng(0)
    params = {"w1": whole(rng, 6, 8), "b1": whole(rng, 8), "w2": whole(rng, 8, 5), "b2": whole(rng, 5)}
    x, y = whole(rng, 8, 6), whole(rng, 8, 5)
    f = lambda p, x, y, axis=None: square(room.two_layers(p, x, axis), y)  # noqa: E731
    wanted = jit(jax.value_and_grad(f))(params, x, y)
    step = lambda p, x, y: room.data_parallel(functools.partial(f, axis="model"), p, x, y, axis_name="data")  # noqa: E731
    over_model = jax.vmap(step, in_axes=(0, None, None), axis_name="model")
    over_both = jax.vmap(over_model, in_axes=(None, 0, 0), axis_name="data")
    value, found = jit(over_both)(room.split_within(params, 2), room.shares(x, 4), room.shares(y, 4))
    assert (value == wanted[0]).all()
    for row in range(4):
        same(joined(jax.tree.map(lambda a, row=row: a[row], found), params), wanted[1])


# Pipelines


PIPES = [("gpipe", 4, 8, 1), ("1f1b", 4, 8, 1), ("1f1b", 4, 2, 1), ("interleaved", 4, 8, 2), ("interleaved", 2, 4, 4),
         ("gpipe", 1, 3, 1), ("pipelined", 4, 9, 1), ("1f1b", 8, 8, 1)]  # fmt: skip


@settings(max_examples=40)
@given(st.sampled_from(pipeline.KINDS), st.integers(1, 6), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_a_table_obeys_its_laws(kind, stages, microbatches, chunks, backward):
    chunks = chunks if kind == "interleaved" else 1
    microbatches = microbatches * stages if kind == "interleaved" else microbatches
    found = pipeline.pipeline_schedule(kind, stages, microbatches, chunks, 1, backward)
    assert len(found.tasks) == 2 * stages * microbatches * chunks
    ends, starts = (
        {(t.what, t.microbatch, t.chunk * stages + t.worker): t[side] for t in found.tasks} for side in (5, 4)
    )
    last = stages * chunks - 1
    for what, m, place in ends:
        if what == pipeline.FORWARD and place:
            assert starts[what, m, place] >= ends[what, m, place - 1]
        if what == pipeline.BACKWARD:
            before = ends[what, m, place + 1] if place < last else ends[pipeline.FORWARD, m, place]
            assert starts[what, m, place] >= before
    for worker in range(stages):
        own = sorted((t.start, t.end) for t in found.tasks if t.worker == worker)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))


@pytest.mark.parametrize("kind, stages, microbatches, chunks", PIPES)
def test_bubbles_are_those_of_the_formula(kind, stages, microbatches, chunks):
    found = pipeline.pipeline_schedule(kind, stages, microbatches, chunks)
    wait = (stages - 1) / chunks
    assert found.bubble == pytest.approx(wait / (microbatches + wait))


def test_activations_that_are_kept():
    assert pipeline.pipeline_schedule("gpipe", 4, 8).alive().tolist() == [8] * 4
    assert pipeline.pipeline_schedule("1f1b", 4, 8).alive().tolist() == [4, 3, 2, 1]


def deep(layers=8, width=6, microbatches=8, examples=4):
    rng = np.random.default_rng(0)
    eye = np.eye(width, dtype=np.float32)[rng.permuted(np.tile(np.arange(width), (layers, 1)), axis=1)]
    params = {"w": jnp.asarray(eye * rng.choice([-1, 1, 2], (layers, 1, width))), "b": whole(rng, layers, width)}
    return params, whole(rng, microbatches, examples, width), whole(rng, microbatches, examples, width)


def total(params, x, y):
    for i in range(len(params["w"])):
        x = LAYERS[0](jax.tree.map(lambda a, i=i: a[i], params), x)
    return square(x, y)


def single_gradient(params, x, y):
    """Of the mean over the micro-batches."""
    return jit(jax.value_and_grad(lambda p: jax.vmap(functools.partial(total, p))(x, y).mean()))(params)


@pytest.mark.parametrize("kind, stages, microbatches, chunks", [PIPES[0], *PIPES[2:4]])
def test_the_table_drives_a_program_that_gives_the_single_gradient(kind, stages, microbatches, chunks):
    params, x, y = deep(microbatches=max(microbatches, 4))
    table = pipeline.pipeline_schedule(kind, stages, len(x), chunks)
    run = pipeline.pipeline(LAYERS[0], square, table, "w")
    value, found = on_all(run, pipeline.stage_params(params, table), x, y, axes=(0, None, None))
    wanted = single_gradient(params, x, y)
    np.testing.assert_allclose(value.sum(), wanted[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), pipeline.whole_params(found), wanted[1])
    if len(x) & (len(x) - 1) == 0:
        same(pipeline.whole_params(found), wanted[1])


def late(params, x, y, stages, rate, stash):
    """Pipelined backpropagation, one micro-batch after the other, in plain loops over old weights."""
    depth, history, losses = len(params["w"]) // stages, [params], []
    for m, (a, b) in enumerate(zip(x, y, strict=True)):
        old = [history[max(0, m - (stages - 1 - layer // depth))] for layer in range(len(params["w"]))]
        there = {k: jnp.stack([p[k][i] for i, p in enumerate(old)]) for k in params}

        def value(back, a=a, b=b, there=there):
            for i in range(len(params["w"])):
                a = pipeline.mixed(LAYERS[0], *(jax.tree.map(lambda leaf, i=i: leaf[i], p) for p in (there, back)), a)
            return square(a, b)

        found, gradient = jax.value_and_grad(value)(there if stash else history[-1])
        losses.append(found)
        history.append(jax.tree.map(lambda p, g: p - rate * g, history[-1], gradient))
    return np.stack(losses), history[-1]


@pytest.mark.parametrize("stash", [False, True])
def test_pipelined_backpropagation_uses_weights_as_old_as_their_stage_says(stash):
    rng = np.random.default_rng(2)
    random = lambda a: jnp.asarray(rng.normal(size=a.shape) / 2, jnp.float32)  # noqa: E731
    params, x, y = jax.tree.map(random, deep(4, microbatches=7))
    table = pipeline.pipeline_schedule("pipelined", 4, 7)
    run = pipeline.pipeline(LAYERS[0], square, table, "w", rate=0.05, stash=stash)
    losses, found = on_all(run, pipeline.stage_params(params, table), x, y, axes=(0, None, None))
    wanted = late(params, x, y, 4, 0.05, stash)
    np.testing.assert_allclose(losses.sum(0), wanted[0], rtol=1e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), pipeline.whole_params(found), wanted[1])


def test_pipelines_that_cannot_work():
    table = pipeline.pipeline_schedule("gpipe", 4, 8)
    params, x, y = deep(2)
    with pytest.raises(ValueError, match="2 layers are fewer than 4 stages"):
        pipeline.stage_params(params, table)
    with pytest.raises(ValueError, match="6 layers do not divide among 4"):
        pipeline.stage_params(deep(6)[0], table)
    with pytest.raises(ValueError, match="microbatches must be a whole number of at least 1, not 0"):
        pipeline.pipeline_schedule("gpipe", 4, 0)
    with pytest.raises(ValueError, match="needs a multiple of 4 micro-batches, not 6"):
        pipeline.pipeline_schedule("interleaved", 4, 6, 2)
    with pytest.raises(ValueError, match="Several chunks"):
        pipeline.pipeline_schedule("gpipe", 4, 8, 2)
    with pytest.raises(ValueError, match="Did you mean 'gpipe'"):
        pipeline.pipeline_schedule("gpip", 4, 8)
    run = pipeline.pipeline(LAYERS[0], square, table, "w")
    own = pipeline.stage_params(deep(8)[0], table)
    with pytest.raises(ValueError, match="for 4 stages and 8 micro-batches"):
        on_all(run, own, x[:3], y[:3], axes=(0, None, None))


# All schemes beside each other, as the notebook counts them


def test_the_bytes_of_all_schemes_are_those_of_the_formulas_and_grow_with_the_examples():
    cells = Cells("09_parallel_training")
    params, (net, x, y) = network()[0], deep(width=16)
    given = {"jax": jax, "np": np, "optax": optax, "functools": functools, "lru_cache": functools.lru_cache}
    cells.update(given, parallel=room, pipeline=pipeline, program=program, params=params, LAYER=LAYERS[0], DEEP=8)
    cells.update(square=square, deep=jax.device_get(net))
    cells.run("parallel-zero-formula", "parallel-zero-counts")
    cells.run(*(f"parallel-all-{name}" for name in ("formula", "programs", "pipeline", "counts")))
    for plan in ("data parallel", "ZeRO stage 2", "data × tensor", "pipeline (1F1B)"):
        wanted = cells["predicted_bytes"](plan, 4, 64, 1)
        assert cells["counts_of"](plan, 4, 64, "momentum") == pytest.approx(wanted, rel=0.01), plan
        *_, kept, wire = cells["counted_bytes"](plan, 4, 64)  # counted with twice the examples
        assert (kept, sum(wire.values())) == pytest.approx(wanted[1:], rel=0.01)
    split = [room.split_within(two, 4) for two in cells["PAIRS"]]
    of_pairs = jax.vmap(jax.grad(functools.partial(cells["net_loss"], axis_name="w")), (0, None, None), axis_name="w")
    found, wanted = jit(of_pairs)(split, x[0], y[0]), jit(jax.grad(total))(net, x[0], y[0])
    for i, (own, two) in enumerate(zip(found, cells["PAIRS"], strict=True)):
        one, other = (jax.tree.map(lambda a, k=k: a[k], wanted) for k in (2 * i, 2 * i + 1))
        same(joined(own, two), {"w1": one["w"], "b1": one["b"], "w2": other["w"], "b2": other["b"]})


# Plans

HYBRID = Cells("09_parallel_training")
HYBRID.update(planning=planning)
HYBRID.run("parallel-hybrid-hand")


@pytest.mark.parametrize(
    "name, parameters", [("AlexNet", 61_100_840), ("VGG-16", 138_357_544), ("ResNet-50", 25_557_032)]
)
def test_networks_have_as_many_parameters_as_their_papers_say(name, parameters):
    layers = planning.NETWORKS[name]()
    assert sum(layer.parameters for layer in layers) == parameters


@settings(max_examples=20)
@given(st.lists(st.tuples(*[st.integers(1, 1000)] * 3), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 50))
def test_the_notebooks_best_split_is_the_best_of_all(sizes, workers, examples):
    layers = [planning.LayerSize("", "dense", *size, 1.0) for size in sizes]
    cost = functools.partial(planning.split_bytes, layers, workers=workers, batch=workers * examples)
    for tried in (("data", "model"), ("data", "model", "rows")):
        sent, ways = HYBRID["best_split_by_hand"](layers, workers, workers * examples, tried)
        every = itertools.product(tried, repeat=len(layers))
        assert sent == pytest.approx(cost(ways)) == pytest.approx(min(map(cost, every)))


@pytest.mark.parametrize(
    "ways, sent", [(("data",) * 2, 2), (("model",) * 2, 3), (("model", "data"), 4), (("data", "model"), 3),
                   (("rows",) * 2, 5), (("data", "rows"), 5), (("model", "rows"), 3), (("rows", "data"), 4)]
)  # fmt: skip
def test_the_bytes_of_a_split_are_those_of_collectives(ways, sent):
    """Between two workers, each collective by name: sums, gathers and all-to-alls of a layer by that way."""
    layers = [planning.LayerSize("", "dense", 24, 8, 12, 1.0), planning.LayerSize("", "dense", 36, 12, 6, 1.0)]
    batch, count, before = 4, [], "data"
    for i, (layer, way) in enumerate(zip(layers, ways, strict=True)):
        numbers = batch * layer.inputs
        if way == "data":
            count.append(("all_reduce", (layer.parameters,)))
            count += [("all_to_all", (2, numbers // 4))] * (2 if before == "model" else 0)
        elif way == "rows":
            count += [("all_to_all", (2, numbers // 4))] * ((1 + (i > 0)) if before == "data" else 0)
            count += [
                ("all_gather", (batch * layer.outputs // 2,)),
                ("reduce_scatter", (2, batch * layer.outputs // 2)),
            ]
        else:
            count += [("all_gather", (numbers // 2,))] + [("reduce_scatter", (2, numbers // 2))] * (i > 0)
        before = way
    assert len(count) == sent
    ways_of = {"all_to_all": "pairwise"}
    sizes = [collectives.schedule(ways_of.get(name, "ring"), 2, shape, collective=name) for name, shape in count]
    assert sum(s.sent().sum(0).max() for s in sizes) == planning.split_bytes(layers, ways, 2, batch)


def test_rows_columns_and_rows_in_turn_give_the_single_gradient_and_send_what_the_formula_says():
    """Three linear layers between examples: what comes in and goes out is split by data."""
    rng, P, n, sizes = np.random.default_rng(0), 4, 8, (16, 8, 12, 4)
    weights, x, y = [whole(rng, a, b) for a, b in itertools.pairwise(sizes)], whole(rng, n, 16), whole(rng, n, 4)
    layers = [planning.LayerSize("", "dense", a * b, a, b, 1.0) for a, b in itertools.pairwise(sizes)]

    def value(own, x, y):
        """The own examples' part of the loss: JAX's own rule for sums is then the right one."""
        first, second, third = own
        x = collectives.all_to_all(x.reshape(-1, P, 16 // P).swapaxes(0, 1), "workers").reshape(n, -1)  # own inputs
        parts = (x @ first).reshape(n, P, -1).swapaxes(0, 1)
        own_hidden = collectives.reduce_scatter(parts, "workers")
        h = collectives.all_gather(own_hidden, "workers").swapaxes(0, 1).reshape(n, -1)
        out = collectives.reduce_scatter((h @ second @ third).reshape(P, n // P, -1), "workers")
        return ((out - y) ** 2).sum()

    split = [np.stack(np.split(w, P, axis)) for w, axis in zip(weights, (0, 1, 0), strict=True)]
    shares = room.shares(x, P), room.shares(y, P)
    found = jit(jax.vmap(jax.grad(value, (0, 1)), axis_name="workers"))(split, *shares)
    single = lambda ws, x: ((functools.reduce(jnp.matmul, ws, x) - y) ** 2).sum()  # noqa: E731
    wanted, of_x = jit(jax.grad(single, (0, 1)))(weights, x)
    same(found[0], [np.stack(np.split(w, P, axis)) for w, axis in zip(wanted, (0, 1, 0), strict=True)])
    same(found[1], room.shares(of_x, P))
    own = [w[0] for w in split], *(share[0] for share in shares)
    sent = program.schedule(jax.grad(value, (0, 1)), P, *own).sent().sum(0).max()
    before = ("data", "rows", "model")  # the gradient of x is asked for here, as in the middle of a network
    ways = zip(layers, before, ("rows", "model", "rows"), strict=True)
    formula = (planning.layer_bytes(layer, *way, P, n) for layer, *way in ways)
    assert sent == sum(formula)


def test_messages_wait_for_gradients_and_for_each_other():
    seconds = lambda size: 1 + size  # noqa: E731
    alone = planning.messages([1, 2, 3], [1, 2, 10], 0, seconds)
    assert alone == [(1, 1, 3), (2, 3, 6), (3, 10, 14)]
    assert planning.messages([1, 2, 3], [1, 2, 10], math.inf, seconds) == [(6, 10, 17)]
    assert planning.messages([1, 2, 3], [1, 2, 10], 3, seconds) == [(3, 2, 6), (3, 10, 14)]
    with pytest.raises(ValueError, match="a size and a time"):
        planning.messages([1], [], 0, seconds)


# Checkpoints

ABOUT = {"seed": 0, "hidden": 8}
PARAMS = {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}


def test_a_checkpoint_comes_back_to_the_bit(tmp_path):
    command.save(tmp_path / "sub" / "last", 7, PARAMS, ABOUT)
    step, found = command.load(tmp_path / "sub" / "last", PARAMS, ABOUT)
    assert step == 7
    same(found, PARAMS)
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["last"]


@pytest.mark.parametrize("cut", [0, 10, 40, 200])
def test_half_a_checkpoint_is_never_read(tmp_path, cut):
    path = tmp_path / "last"
    command.save(path, 7, PARAMS, ABOUT)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(command.Unusable, match="not whole"):
        command.load(path, PARAMS, ABOUT)


def test_a_death_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last"
    command.save(path, 7, PARAMS, ABOUT)

    def die(number):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        command.save(path, 8, PARAMS, ABOUT)
    assert command.load(path, PARAMS, ABOUT)[0] == 7


def test_a_checkpoint_of_something_else_is_an_error(tmp_path):
    command.save(tmp_path / "last", 7, PARAMS, ABOUT)
    with pytest.raises(command.Unusable, match="hidden 8, not 16"):
        command.load(tmp_path / "last", PARAMS, ABOUT | {"hidden": 16})
    with pytest.raises(command.Unusable, match="another model"):
        command.load(tmp_path / "last", {"w": PARAMS["w"]}, ABOUT)
    with pytest.raises(FileNotFoundError):
        command.load(tmp_path / "none", PARAMS, ABOUT)


# The command


@pytest.mark.parametrize("before, after", [((2, 1), (1, 2)), pytest.param((2, 2), (4, 1), marks=pytest.mark.long)])
def test_a_killed_group_goes_on_in_another_shape_to_the_loss_of_one_process(before, after, tmp_path):
    """What the notebook suggests, but for the way to stop it; that is tested below."""
    (data, model), (new_data, new_model) = before, after
    told, pids, options = [], {}, {"every": 10, "checkpoint": tmp_path}
    with pytest.raises(PeerLost, match=r"Process 1 .* was ended by SIGKILL"):
        for message in command.training(data * model, command.order(data=data, model=model, steps=10**7, **options)):
            if "joined" in message:
                pids[message["joined"][0]] = message["pid"]
            if message.get("step") == 20:
                os.kill(pids[1], signal.SIGKILL)
            told.append(message)
    assert {message["step"]: message["loss"] for message in told if "step" in message}.keys() >= {10, 20}
    what = command.order(**options)
    done = command.load(tmp_path / command.FILE, command._start(what), command._about(what))[0]
    options["steps"] = done + 20
    shape = {"data": new_data, "model": new_model}
    resumed = [*command.training(new_data * new_model, command.order(**shape, **options))]
    assert [message["step"] for message in resumed if "step" in message] == [done + 10, done + 20]
    result = resumed[-1]["result"]
    assert result["loss"] == pytest.approx(result["alone"], abs=1e-5)
    *_, again = command.training(1, command.order(compare=(32,), **options))  # nothing is left to do but to take times
    assert again["result"]["times"].keys() == {"alone 16", "alone 32", "group 32", "sum"}
    assert all(min(seconds) > 0 for seconds in again["result"]["times"].values())  # of a step, in each round
    alike = [f"{again['result'][name]:.6f}" for name in ("loss", "alone")]
    assert command._told(again["result"]).splitlines() == [
        f"loss on all examples {alike[0]}, of one process alone {alike[1]}",
        "nothing was left to train",
        f"the parameters' bits: {result['bits']}",
    ]
    with pytest.raises(command.Unusable, match=r"rate 0\.1, not 0\.2"):
        next(command.training(1, command.order(rate=0.2, **options)))


@pytest.mark.parametrize(
    "options, why",
    [
        ({"batch": 65, "data": 2}, "batch 65 does not divide by data 2"),
        ({"hidden": 65, "model": 2}, "hidden 65 does not divide by model 2"),
        ({"steps": 30}, "steps 30 does not divide by every 20"),
        ({"data": 0}, "data must be a whole number of at least 1"),
        ({"rate": math.nan}, "rate must be a finite number"),
    ],
)
def test_impossible_orders(options, why):
    with pytest.raises(ValueError, match=why):
        command.order(**options)


def test_the_command_names_what_is_wrong(capsys):
    for arguments, why in (
        (["--processes", "3"], "1 × 1 processes are needed, not 3"),
        (["--every", "7"], "steps 100"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(arguments)
        assert why in capsys.readouterr().err


LONG = 600  # seconds after which something hangs, on any machine


def descendants(process=None):
    """What a process, or this one, has started, itself or through others."""
    return psutil.Process(process and process.pid).children(recursive=True)


def all_end(members):
    """Whether they end, which they are given time for."""
    end = time.monotonic() + LONG
    while any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in members):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_the_command_with_a_word_and_leaves_nobody_behind(tmp_path):
    arguments = ["--steps", "10000000", "--every", "10", "--checkpoint", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "dlscale", "train", *arguments], **pipes) as parent:
        try:
            assert parent.stdout.readline().startswith("step     10  loss ")
            group = descendants(parent)
            assert group
            parent.send_signal(signal.SIGINT)
            _, error = parent.communicate(timeout=LONG)
        finally:
            parent.kill()
    assert parent.returncode == 128 + signal.SIGINT
    assert error == "Stopped: with --checkpoint, the same command goes on from the last one.\n"
    assert all_end(group)
    what = command.order()
    assert command.load(tmp_path / command.FILE, command._start(what), command._about(what))[0] % 10 == 0


def test_a_peer_that_never_comes_is_given_up_and_told_of(monkeypatch, capsys):
    """A launcher's variables tell the first of two where it is; nobody starts the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    for name, value in {"COORDINATOR": address, "PROCESSES": "2", "PROCESS": "0"}.items():
        monkeypatch.setenv(f"DLSCALE_{name}", value)
    monkeypatch.setattr(processes, "START", 3)  # seconds to find each other
    monkeypatch.setattr(command.signal, "signal", lambda *given: None)
    before = descendants()
    assert command.main(["--data", "2", "--timeout", "1"]) == 1
    assert capsys.readouterr().err == (
        "Nothing came from the processes within a limit of 3 s by the clock, before all 2 had found each other: "
        "start each of them, with a DLSCALE_COORDINATOR that it can reach.\n"
    )
    assert descendants() == before


# What the notebook suggests


def test_another_algorithm_by_hand():
    cells = Cells("09_parallel_training", {'"ring")': '"butterfly")'})
    cells.update(jax=jax, collectives=collectives, ravel_pytree=ravel_pytree)
    cells.run("parallel-data-hand")
    (params, x, y), f = network(), cells["data_parallel_by_hand"]
    found = on_all(lambda *own: f(loss, *own, "w"), copies(params, 4), room.shares(x, 4), room.shares(y, 4))
    same(found, copies(jit(jax.value_and_grad(loss))(params, x, y), 4))


def test_without_the_checkpoint_a_third_of_the_bytes_is_not_sent():
    params, x, y = network()
    sent = []
    for changes in ({}, {"@jax.checkpoint ": ""}):
        cells = Cells("09_parallel_training", changes)
        cells.update(jax=jax, parallel=room, LAYERS=LAYERS, params=params, square=square)
        cells.run("parallel-zero-hand")
        f = jax.grad(lambda *own, f=cells["sharded_by_hand"]: f(*own, "workers"))
        sent.append(
            program.schedule(f, 4, [room.chunks(own, 4)[0] for own in params], x[:2], y[:2]).sent().sum(0).max()
        )
    assert sent[1] == sent[0] * 2 / 3


def test_the_other_suggestions():
    _, ways = HYBRID["best_split_by_hand"](planning.vgg16(), 8, 1024)
    assert ways == ("data",) * 13 + ("rows", "model", "rows")
    assert pipeline.pipeline_schedule("1f1b", 64, 64).bubble == pytest.approx(63 / 127)


# Exercises: what is right in another way, and what is nearly right


def judged(exercise, text, wrap=lambda f: f):
    names = dict(vars(exercises))
    exec(text, names)
    return exercise.judge(wrap(names[exercise.answer]))


def test_a_sharded_step_must_take_the_mean_and_send_no_more_than_it_must():
    right, line = judged(exercises.sharded, exercises.sharded.code, exercises.tried)
    assert right, line
    own = "collectives.reduce_scatter(gradient.reshape(P, -1), axis_name) / P"
    assert own in exercises.sharded.code
    with_a_sum = judged(exercises.sharded, exercises.sharded.code.replace(" / P", ""), exercises.tried)
    whole = "(collectives.all_reduce(gradient, axis_name) / P).reshape(P, -1)[jax.lax.axis_index(axis_name)]"
    with_all = judged(exercises.sharded, exercises.sharded.code.replace(own, whole), exercises.tried)
    mean = "jax.lax.pmean(gradient, axis_name).reshape(P, -1)[jax.lax.axis_index(axis_name)]"
    with_mean = judged(exercises.sharded, exercises.sharded.code.replace(own, mean), exercises.tried)
    named = exercises.sharded.code.replace("collectives.all_gather", "jax.lax.all_gather")
    named = named.replace("collectives.reduce_scatter(", "jax.lax.psum_scatter(")
    assert judged(exercises.sharded, named, exercises.tried)[0]
    assert not with_a_sum[0] and "differs" in with_a_sum[1]
    assert not with_all[0] and "are enough" in with_all[1]
    assert not with_mean[0] and "are enough" in with_mean[1]
    assert exercises.sharded.judge(exercises.tried(lambda *args: ...)) == (False, "no answer yet")


@pytest.mark.parametrize("number, right", [
    (lambda tried: 2.0**22, False), (lambda tried: 2.0 ** (12 + len(tried)), False),  # one for all; too small
    (lambda tried: 1e6 * (1 + 4 * len(tried)), False), (lambda tried: math.inf, False),  # evenly spaced; all at once
    (lambda tried: 4.0 ** (7 + len(tried)), False),  # by factors, without looking
    (lambda tried: 2.0 ** np.linspace(14, 28, 8)[len(tried)], False),
    (lambda tried: 2.0 ** np.linspace(15, 28, 8)[len(tried)], False),  # the best of such grids
    (lambda tried: 2.0 ** (14 + 4 * len(tried)) if len(tried) < 4 else  # first far apart, then beside the best
     min(tried, key=lambda pair: pair[1])[0] * [4, 1 / 4, 2, 1 / 2][len(tried) - 4], True),
])  # fmt: skip
def test_a_search_for_the_threshold_must_cover_factors(number, right):
    assert exercises.threshold.judge(number)[0] is right


def test_a_dense_layer_by_model_or_by_data():
    right = [lambda n, m, P: m // P, lambda n, m, P: np.floor(m / P), lambda n, m, P: int((n * m + m) / (n * P))]
    naive = [lambda n, m, P: m, lambda n, m, P: m / P, lambda n, m, P: n // P, lambda n, m, P: n * m // (n + m)]
    assert all(exercises.images.judge(answer)[0] for answer in right)
    assert not any(exercises.images.judge(answer)[0] for answer in naive)


def test_an_interval_that_knows_all_workers():
    def daly(save, hours, workers):
        M = hours * 3600 / workers
        x = save / (2 * M)
        return math.sqrt(2 * save * M) * (1 + math.sqrt(x) / 3 + x / 9) - save

    def searched(save, hours, workers):
        M = hours * 3600 / workers
        return min(np.geomspace(1, 1e7, 500), key=lambda tau: save / tau + tau / (2 * M))

    naive = [lambda save, hours, workers: math.sqrt(2 * save * hours * 3600),
             lambda save, hours, workers: math.sqrt(2 * save * hours / workers),
             lambda save, hours, workers: math.sqrt(save * hours * 3600 / workers) / 2,
             lambda save, hours, workers: 3600, lambda save, hours, workers: math.inf]  # fmt: skip
    assert exercises.interval.judge(daly)[0] and exercises.interval.judge(searched)[0]
    assert not any(exercises.interval.judge(answer)[0] for answer in naive)


def test_no_step_takes_less_than_no_time():
    """At any setting of the sliders for the slowest of N."""
    cells = Cells("09_parallel_training")
    cells.update(np=np, math=math, stats=stats, lru_cache=functools.lru_cache, figures=figures, slowest=None)
    cells.run("parallel-slow-math", "parallel-slow-make")
    for N, spare in itertools.product(cells["CROWD"], cells["SPARES"]):
        assert stats.norm(1, max(cells["JITTERS"])).ppf(cells["of_the_last"](N, spare)).min() > 0


def test_which_weights_a_micro_batch_meets():
    cells = Cells("09_parallel_training")
    cells.update(pipeline=pipeline)
    cells.run("parallel-pipe-make")
    by_table = lambda S, s, m: cells["versions"](pipeline.pipeline_schedule("pipelined", S, m + S))[s, m]  # noqa: E731
    right = [by_table, lambda S, s, m: np.array([max(m - S + s + 1, 0), m])]
    naive = [lambda S, s, m: (m - (S - 1 - s), m), lambda S, s, m: (m, m), lambda S, s, m: S - 1 - s,
             lambda S, s, m: (max(0, m - 2 * (S - 1 - s)), m), lambda S, s, m: (max(0, m - s), m)]  # fmt: skip
    assert all(exercises.versions.judge(answer)[0] for answer in right)
    assert not any(exercises.versions.judge(answer)[0] for answer in naive)


def test_a_mesh_has_the_parts_that_send_least():
    def by_numbers(P, d, t, a, g):  # the same, by hand: without the factors that all have
        return min((M for M in range(1, P + 1) if P % M == 0), key=lambda M: 3 * d * g * (P / M - 1) + t * a * (M - 1))

    naive = [lambda P, *of: 1, lambda P, *of: P, lambda P, d, t, a, g: P if t < 3 * d else 1, lambda *of: 2.5,
             lambda P, d, t, a, g: P if t * a < 3 * d * g else 1, lambda *of: 5,
             lambda P, d, t, a, g: by_numbers(P, d, t, 4, 4)]  # fmt: skip
    assert exercises.parts.judge(by_numbers)[0]
    assert not any(exercises.parts.judge(answer)[0] for answer in naive)


def test_other_exercises_refuse_the_naive_answer():
    assert not exercises.enough.judge(lambda stages, chunks, bubble: math.ceil((stages - 1) * (1 - bubble) / bubble))[0]
    textbook = lambda S, v, b: math.ceil((S - 1) / v * (1 / b - 1) / S) * S  # noqa: E731
    assert exercises.enough.judge(textbook)[0]
    by_table = lambda S, v, b: next(  # noqa: E731
        m for m in range(S, 999, S)
        if pipeline.pipeline_schedule("interleaved" if v > 1 else "1f1b", S, m, v).bubble <= b + 1e-9
    )  # fmt: skip
    assert exercises.enough.judge(by_table)[0]


def test_the_rate_of_the_stashed_stages_is_the_best_of_their_record():
    longer = records.read(experiment.LONGER.id)
    arm = {"stages": 8, "stash": True, "judged_on": "validation"}
    means = {r: longer.values("accuracy", **arm, learning_rate=r).mean() for r in experiment.LONG_RATES}
    assert max(means, key=means.get) == experiment.STASHED_RATE
