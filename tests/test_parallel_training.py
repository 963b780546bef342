"""Every scheme against a single worker's gradient, bytes against formulas, schedules by their laws, checkpoints."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import Cells
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from scipy import stats

from dlscale import collectives
from dlscale import parallel_training as room
from dlscale.course import records
from dlscale.lab import data, devices, models, program
from dlscale.lab.processes import PeerLost
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
found = here.zero(3, 4, params, x, y, here.on_devices, "w")[1]
here.same(found, here.jit(here.jax.grad(here.loss))(params, x, y))
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


def test_chunks_and_back_for_layers_without_parameters_too():
    params, _, _ = network()
    for own in (*params, {}):
        assert jax.tree.structure(room.unchunked(room.chunks(own, 4).ravel(), own)) == jax.tree.structure(own)
        same(room.unchunked(room.chunks(own, 4).ravel(), own), own)


def test_a_stage_that_is_none():
    with pytest.raises(ValueError, match="stage must be a whole number from 1 to 3"):
        room.sharded(LAYERS, square, [], 4, "w")


# Tensor parallel


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


def test_heads_and_units_that_do_not_divide_are_an_error():
    with pytest.raises(ValueError, match="4 heads do not divide among 3 workers"):
        room.split_within({"query": np.zeros((8, 4, 2))}, 3)
    with pytest.raises(ValueError, match="5 hidden units do not divide among 2"):
        room.split_within({"w1": np.zeros((2, 5))}, 2)


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


def test_pipelines_that_cannot_work():
    with pytest.raises(ValueError, match="microbatches must be a whole number of at least 1, not 0"):
        pipeline.pipeline_schedule("gpipe", 4, 0)
    with pytest.raises(ValueError, match="needs a multiple of 4 micro-batches, not 6"):
        pipeline.pipeline_schedule("interleaved", 4, 6, 2)
    with pytest.raises(ValueError, match="Several chunks"):
        pipeline.pipeline_schedule("gpipe", 4, 8, 2)
    with pytest.raises(ValueError, match="Did you mean 'gpipe'"):
        pipeline.pipeline_schedule("gpip", 4, 8)


@pytest.mark.parametrize("stages, stash", [(8, False), (4, True)])
def test_one_worker_emulates_stages_by_old_weights(stages, stash):
    """The recorded training, against plain loops over all weights that there were."""
    start, rows = experiment.start(0), experiment.order(0)[:12]
    (x, y), _ = experiment.examples()
    found, losses = experiment.descend(start, rows, np.float32(0.05), experiment.delays(stages), stash, x, y)
    gradient = jit(jax.value_and_grad(lambda back, old, *batch: experiment.loss(
        experiment.through(old, back, batch[0]), batch[1])))  # fmt: skip
    history = [start]
    for m, batch in enumerate(rows):
        ages = experiment.delays(stages)
        old = {k: np.stack([history[max(0, m - age)][k][i] for i, age in enumerate(ages)]) for k in start}
        value, step = gradient(old if stash else history[-1], old, x[batch], y[batch])
        assert losses[m] == pytest.approx(float(value), rel=1e-4)
        history.append(jax.tree.map(lambda p, g: np.asarray(p - 0.05 * g), history[-1], step))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, history[-1])


def test_the_confirmed_rates_are_the_best_of_the_record():
    longer = records.read(experiment.LONGER.id)
    for (stages, stash), rate in experiment.CHOSEN.items():
        arm = {"stages": stages, "stash": stash, "judged_on": "validation"}
        means = {r: longer.values("accuracy", **arm, learning_rate=r).mean() for r in experiment.LONG_RATES}
        assert max(means, key=means.get) == rate


# Plans

FURTHER = "further/09_parallel_training_further"
HYBRID = Cells(FURTHER)
HYBRID.update(planning=planning)
HYBRID.run("parallel-further-alexnet-best")


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
        sent, ways = HYBRID["best_split"](layers, workers, workers * examples, tried)
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
    *_, again = command.training(1, command.order(**options))  # nothing is left to do
    assert again["result"]["bits"] == result["bits"]
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


# What the notebooks suggest


LESSON = "09_parallel_training"


def cells(notebook, *identities, changes=None):
    found = Cells(notebook, changes)
    found.update({name: value for name, value in globals().items() if name[0] != "_"})
    found.update(lax=jax.lax, partial=functools.partial, parallel=room, np=np, jax=jax, rng=np.random.default_rng(0))
    found.run(*identities)
    return found


@suggested_by(LESSON)
def test_the_written_schedule_drives_the_runtime():
    ones = cells(LESSON, "parallel-pipe-gpipe", "parallel-pipe-runtime")
    names = dict(vars(exercises))
    exec(exercises.one_f_one_b.code, names)
    rng = np.random.default_rng(0)
    weights, x, y = [rng.normal(size=(6, 6)) for _ in range(4)], rng.normal(size=(8, 2, 6)), rng.normal(size=(8, 2, 6))
    (found, stored), (wanted, all_stored) = (
        ones["run_schedule"](table(4, 8), weights, x, y) for table in (names["one_f_one_b"], ones["gpipe"])
    )
    assert (stored, all_stored) == ([4, 3, 2, 1], [8, 8, 8, 8])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b), found, wanted)


@suggested_by(LESSON)
def test_without_the_checkpoint_a_third_of_the_bytes_is_not_sent():
    params, x, y = network()
    sent = []
    for changes in ({}, {"@jax.checkpoint": ""}):
        found = Cells(LESSON, changes)
        found.update(jax=jax, parallel=room, layers=LAYERS, params=params, square=square)
        found.run("parallel-zero-loss")
        f = jax.grad(functools.partial(found["sharded_loss"], axis_name="workers"))
        own = [room.chunks(layer, 4)[0] for layer in params]
        sent.append(program.schedule(f, 4, own, x[:2], y[:2]).sent().sum(0).max())
    assert sent[1] == sent[0] * 2 / 3


@suggested_by(LESSON)
@pytest.mark.parametrize("changes", [{}, {"default_rng(step)": "default_rng()"}])
def test_a_killed_worker_loses_bits_only_if_batches_depend_on_the_process(changes):
    found = Cells(LESSON, changes)
    found.update(subprocess=subprocess, sys=sys, tempfile=tempfile, Path=Path, np=np, data=data)
    found.run("parallel-fail-worker", "parallel-fail-run", "parallel-fail-kill")
    results = found["results"]
    assert np.array_equal(results["killed"], results["undisturbed"]) == (not changes)


@suggested_by("09_parallel_training_further")
def test_the_suggestions_of_the_further_notebook():
    _, ways = HYBRID["best_split"](planning.vgg16(), 8, 1024)
    assert ways == ("data",) * 13 + ("rows", "model", "rows")
    bubbles = [pipeline.pipeline_schedule("1f1b", 64, count).bubble for count in (64, 567, 566)]
    assert bubbles[0] == pytest.approx(63 / 127) and bubbles[1] <= 0.1 < bubbles[2]
    slow = Cells(FURTHER)
    slow.update(np=np, stats=stats, lru_cache=functools.lru_cache, cache=functools.cache)
    slow.run("parallel-further-slowest-a", "parallel-further-slowest")
    spares = {spare: slow["efficiency"]("exponential", 1024, 0.2, spare) for spare in (0, 32, 64, 128, 512)}
    assert spares[0] < spares[32] < max(spares.values()) and spares[512] < max(spares.values())
    draws = np.sort(np.random.default_rng(0).normal(size=(4000, 68)), 1)[:, 63].mean()
    assert slow["nth_done"]("normal", 64, 4) == pytest.approx(draws, rel=0.02)


# Exercises: what is right in another way, and what is nearly right


def judged(exercise, text, wrap=lambda f: f):
    names = vars(exercises) | {"collectives": collectives}
    exec(text, names)
    return exercise.judge(wrap(names[exercise.answer]))


def test_a_sharded_step_must_take_the_mean_and_send_no_more_than_it_must():
    right, line = judged(exercises.sharded, exercises.sharded.code, exercises.tried)
    assert right, line
    assert judged(exercises.sharded, exercises.sharded.code) == (right, line)  # the function itself
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
    failed = exercises.sharded.judge(exercises.tried(lambda *args: len(3)))[1]
    assert "object of type 'int' has no len()" in failed


def bracketing(*first):
    """Three tries far apart, and then the middle of the wider gap beside the best, or further out."""

    def number(tried):
        if len(tried) < 3:
            return first[len(tried)]
        best, sizes = min(tried, key=lambda pair: pair[1])[0], sorted(size for size, _ in tried)
        at = sizes.index(best)
        if at in (0, len(sizes) - 1):
            return best * 8 if at else best / 8
        return max((high / low, math.sqrt(high * low)) for low, high in itertools.pairwise(sizes[at - 1 : at + 2]))[1]

    return number


@pytest.mark.parametrize("number, right", [
    (bracketing(2.0**13, 2.0**20, 2.0**27), True), (bracketing(2.0**12, 2.0**19, 2.0**26), True),
    (lambda tried: 2.0**22, False), (lambda tried: 2.0 ** (12 + len(tried)), False),  # one for all; too small
    (lambda tried: 1e6 * (1 + 4 * len(tried)), False), (lambda tried: math.inf, False),  # evenly spaced; all at once
    (lambda tried: 4.0 ** (7 + len(tried)), False),  # by factors, without looking
    (lambda tried: 2.0 ** np.linspace(14, 28, 8)[len(tried)], False),
    (lambda tried: 2.0 ** (14 + 4 * len(tried)) if len(tried) < 4 else  # first far apart, then beside the best
     min(tried, key=lambda pair: pair[1])[0] * [4, 1 / 4, 2, 1 / 2][len(tried) - 4], True),
])  # fmt: skip
def test_a_search_for_the_threshold_must_cover_factors(number, right):
    assert exercises.threshold.judge(number)[0] is right


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


def test_a_mesh_has_the_parts_that_send_least():
    def by_numbers(P, d, t, a, g):  # the same, by hand: without the factors that all have
        return min((M for M in range(1, P + 1) if P % M == 0), key=lambda M: 3 * d * g * (P / M - 1) + t * a * (M - 1))

    naive = [lambda P, *of: 1, lambda P, *of: P, lambda P, d, t, a, g: P if t < 3 * d else 1, lambda *of: 2.5,
             lambda P, d, t, a, g: P if t * a < 3 * d * g else 1, lambda *of: 5,
             lambda P, d, t, a, g: by_numbers(P, d, t, 4, 4)]  # fmt: skip

    def nearest(distance):
        def found(P, d, t, a, g):
            root = math.sqrt(3 * P * d * g / (t * a))
            return min((M for M in range(1, P + 1) if P % M == 0), key=lambda M: distance(M, root))

        return found

    naive.append(nearest(lambda M, root: abs(M - root)))
    assert exercises.parts.judge(nearest(lambda M, root: abs(math.log(M / root))))[0]
    assert exercises.parts.judge(by_numbers)[0]
    assert not any(exercises.parts.judge(answer)[0] for answer in naive)


def by_simulation(stages, micro_batches):
    """1F1B, slot by slot: a backward pass wherever one can be done, else a forward pass if there is room."""
    done, table, slot = {}, {}, 0
    while len(table) < 2 * stages * micro_batches:
        for s in range(stages):
            own = [table[at][0] for at in table if at[1] == s]
            F, B = own.count("F"), own.count("B")
            ready = lambda *task: done.get(task, slot) < slot  # noqa: B023, E731
            if B < F and ready(*(("B", s + 1, B) if s + 1 < stages else ("F", s, B))):
                table[slot, s] = "B", B
            elif micro_batches > F and stages - s > F - B and (s == 0 or ready("F", s - 1, F)):
                table[slot, s] = "F", F
        done |= {(what, at[1], m): slot for at, (what, m) in table.items() if at[0] == slot}
        slot += 1
    return table


def slow(stages, micro_batches):
    """A micro-batch after the other: stores least and waits most."""
    one = {(s, s): "F" for s in range(stages)} | {(2 * stages - 1 - s, s): "B" for s in range(stages)}
    return {(slot + 2 * stages * m, s): (w, m) for m in range(micro_batches) for (slot, s), w in one.items()}


def from_the_library(stages, micro_batches):
    found = pipeline.pipeline_schedule("1f1b", stages, micro_batches)
    return {(round(t.start), t.worker): ("·FB"[t.what], t.microbatch) for t in found.tasks}


def test_1f1b_has_the_slots_of_gpipe_and_stores_less():
    assert judged(exercises.one_f_one_b, exercises.one_f_one_b.code)[0]
    later = lambda S, M: {(t + 3, s): task for (t, s), task in by_simulation(S, M).items()}  # noqa: E731
    gpipe = cells(LESSON, "parallel-pipe-gpipe")["gpipe"]
    early = lambda S, M: {(t, s): task for (t, s), task in by_simulation(S, M).items() if task[1]}  # noqa: E731
    mirrored = lambda S, M: {(t, S - 1 - s): task for (t, s), task in by_simulation(S, M).items()}  # noqa: E731
    for right in (by_simulation, later):
        assert exercises.one_f_one_b.judge(right) == (True, f"✓ right: {exercises.one_f_one_b.right}")
    for wrong, why in (
        (gpipe, "stores 3 inputs; 1 are enough"), (slow, "slots"), (early, "once"), (mirrored, "before its input"),
        (from_the_library, "the library's own"), (lambda S, M: [], "dictionary"),
    ):  # fmt: skip
        right, line = exercises.one_f_one_b.judge(wrong)
        assert not right and why in line, line
    assert from_the_library(4, 8) == by_simulation(4, 8)
