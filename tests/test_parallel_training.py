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

LESSON, FURTHER = "09_parallel_training", "further/09_parallel_training_further"
LAYERS = [models.dense("relu"), models.dense("relu"), models.dense()]
WIDTHS = (6, 8, 4, 5)
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # quick to compile


def square(result, y):
    """Without a rounding: the numbers below are small whole ones, and so are sums of them in any order."""
    return ((result - y) ** 2).sum() / len(y)


def whole(rng, *shape):
    return jnp.asarray(rng.integers(-1, 2, shape), jnp.float32)


def network():
    rng = np.random.default_rng(0)
    params = [{"w": whole(rng, a, b), "b": whole(rng, b)} for a, b in itertools.pairwise(WIDTHS)]
    return params, whole(rng, 8, WIDTHS[0]), whole(rng, 8, WIDTHS[-1])


def loss(params, x, y):
    for layer, own in zip(LAYERS, params, strict=True):
        x = layer(own, x)
    return square(x, y)


def on_all(f, *args, axes=0):
    return jit(jax.vmap(f, in_axes=axes, axis_name="w"))(*args)


def on_devices(f, *args):
    return jax.pmap(f, axis_name="w")(*args)


def on_mesh(f, *args):
    spec = PartitionSpec("workers")
    body = lambda *args: jax.tree.map(lambda a: a[None], f(*jax.tree.map(lambda a: a[0], args)))  # noqa: E731
    mesh = devices.mesh(len(jax.tree.leaves(args)[0]))
    return jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(*args)


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


def copies(tree, workers):
    return jax.tree.map(lambda a: jnp.stack([a] * workers), tree)


# Data parallel, ZeRO


def test_data_parallel_gives_the_gradient_of_the_whole_batch_to_the_bit_where_sums_are_exact():
    params, x, y = network()
    step = functools.partial(room.data_parallel, loss, axis_name="w")
    found = on_all(step, copies(params, 4), room.shares(x, 4), room.shares(y, 4))
    same(found, copies(jit(jax.value_and_grad(loss))(params, x, y), 4))


def zero(stage, workers, params, x, y, run=on_all, axis="w"):
    f = room.sharded(LAYERS, square, params, stage, axis)
    parts = [room.chunks(own, workers) for own in params]
    value, found = run(f, parts, room.shares(x, workers), room.shares(y, workers))
    return value, [room.unchunked(g.ravel(), own) for g, own in zip(found, params, strict=True)]


@pytest.mark.parametrize("stage, passes", [(1, 2), (2, 2), (3, 3)])
def test_every_stage_of_zero_gives_the_single_gradient_and_sends_what_it_must(stage, passes):
    workers, (params, x, y) = 4, network()
    value, wanted = jit(jax.value_and_grad(loss))(params, x, y)
    same(zero(stage, workers, params, x, y), (jnp.stack([value] * workers), wanted))
    parts = [room.chunks(own, workers)[0] for own in params]
    f = room.sharded(LAYERS, square, params, stage, "workers")
    found = program.schedule(f, workers, parts, x[:2], y[:2])
    numbers = sum(part.size for part in parts) * workers
    mean = 4 * 2 * (workers - 1)  # the loss itself goes round a ring, a number in each round
    assert found.sent().sum(0).max() == passes * (workers - 1) * numbers // workers * 4 + mean


EVERYWHERE = """
import test_parallel_training as here
here.devices.emulate(4)
params, x, y = here.network()
wanted = here.jit(here.jax.grad(here.loss))(params, x, y)
here.same(here.zero(3, 4, params, x, y, here.on_mesh, "workers")[1], wanted)
here.same(here.zero(3, 4, params, x, y, here.on_devices, "w")[1], wanted)
"""


def test_the_same_under_shard_map_and_pmap():
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", EVERYWHERE]
    found = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]


# Tensor parallel


def test_two_layers_split_by_columns_and_rows_to_the_bit():
    rng = np.random.default_rng(0)
    params = {"w1": whole(rng, 6, 8), "b1": whole(rng, 8), "w2": whole(rng, 8, 5), "b2": whole(rng, 5)}
    x, y = whole(rng, 8, 6), whole(rng, 8, 5)
    f = jax.value_and_grad(lambda p, x, axis=None: square(room.two_layers(p, x, axis), y), (0, 1))
    value, (own, of_x) = on_all(lambda p, x: f(p, x, "w"), room.split_within(params, 4), x, axes=(0, None))
    wanted, (wanted_own, wanted_of_x) = jax.device_get(jit(f)(params, x))
    same((value, own, of_x), (copies(wanted, 4), room.split_within(wanted_own, 4), copies(wanted_of_x, 4)))


@pytest.mark.parametrize(
    "call, why",
    [
        (lambda: room.shares(np.zeros((10, 2)), 4), "10 examples do not divide among 4 workers"),
        (lambda: room.sharded(LAYERS, square, [], 4, "w"), "stage must be a whole number from 1 to 3"),
        (lambda: room.split_within({"query": np.zeros((8, 4, 2))}, 3), "4 heads do not divide among 3 workers"),
        (lambda: room.split_within({"w1": np.zeros((2, 5))}, 2), "5 hidden units do not divide among 2"),
        (lambda: pipeline.pipeline_schedule("gpipe", 4, 0), "microbatches must be a whole number of at least 1"),
        (lambda: pipeline.pipeline_schedule("interleaved", 4, 6, 2), "needs a multiple of 4 micro-batches, not 6"),
        (lambda: pipeline.pipeline_schedule("gpipe", 4, 8, 2), "Several chunks"),
        (lambda: pipeline.pipeline_schedule("gpip", 4, 8), "Did you mean 'gpipe'"),
        (lambda: planning.messages([1], [], 0, float), "a size and a time"),
        (lambda: command.order(batch=65, data=2), "batch 65 does not divide by data 2"),
        (lambda: command.order(hidden=65, model=2), "hidden 65 does not divide by model 2"),
        (lambda: command.order(steps=30), "steps 30 does not divide by every 20"),
        (lambda: command.order(rate=math.nan), "rate must be a finite number"),
        (lambda: next(command.training(3, command.order())), "1 × 1 processes are needed, not 3"),
    ],
)
def test_what_cannot_work_is_an_error(call, why):
    with pytest.raises(ValueError, match=why):
        call()


# Pipelines


@settings(max_examples=40)
@given(st.sampled_from(pipeline.KINDS), st.integers(1, 6), st.integers(1, 12), st.integers(1, 4), st.integers(1, 3))
def test_a_table_obeys_its_laws(kind, stages, microbatches, chunks, backward):
    chunks = chunks if kind == "interleaved" else 1
    microbatches = microbatches * stages if kind == "interleaved" else microbatches
    found = pipeline.pipeline_schedule(kind, stages, microbatches, chunks, 1, backward)
    assert len(found.tasks) == 2 * stages * microbatches * chunks
    times = {(t.what, t.microbatch, t.chunk * stages + t.worker): (t.start, t.end) for t in found.tasks}
    for (what, m, place), (start, _) in times.items():
        before = (what, m, place + (1 if what == pipeline.BACKWARD else -1))
        before = before if before in times else (pipeline.FORWARD, m, place)
        assert before == (what, m, place) or start >= times[before][1]
    for worker in range(stages):
        own = sorted((t.start, t.end) for t in found.tasks if t.worker == worker)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(own))
    wait = (stages - 1) / chunks
    if kind != "1f1b" or microbatches >= stages or backward == 1:
        assert kind == "pipelined" or found.bubble == pytest.approx(wait / (microbatches + wait))
    if kind == "1f1b":
        assert list(found.alive()) == [min(microbatches, stages - stage) for stage in range(stages)]


@pytest.mark.parametrize("stages, stash", [(8, False), (4, True)])
def test_one_worker_emulates_stages_by_old_weights(stages, stash):
    """The recorded training, against plain loops over all weights that there were."""
    start, rows, ages = experiment.start(0), experiment.order(0)[:12], experiment.delays(stages)
    (x, y), _ = experiment.examples()
    found, losses = experiment.descend(start, rows, np.float32(0.05), ages, stash, x, y)
    gradient = jit(jax.value_and_grad(lambda now, old, x, y: experiment.loss(experiment.through(old, now, x), y)))
    history = [start]
    for m, batch in enumerate(rows):
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


HYBRID = Cells(FURTHER)
HYBRID.update(planning=planning)
HYBRID.run("parallel-further-alexnet-best")


def test_networks_have_as_many_parameters_as_their_papers_say():
    counts = {name: sum(layer.parameters for layer in make()) for name, make in planning.NETWORKS.items()}
    assert counts == {"AlexNet": 61_100_840, "VGG-16": 138_357_544, "ResNet-50": 25_557_032}


@settings(max_examples=20)
@given(st.lists(st.tuples(*[st.integers(1, 1000)] * 3), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 50))
def test_the_notebooks_best_split_is_the_best_of_all(sizes, workers, examples):
    layers = [planning.LayerSize("", "dense", *size, 1.0) for size in sizes]
    cost = functools.partial(planning.split_bytes, layers, workers=workers, batch=workers * examples)
    for tried in (("data", "model"), ("data", "model", "rows")):
        sent, ways = HYBRID["best_split"](layers, workers, workers * examples, tried)
        every = itertools.product(tried, repeat=len(layers))
        assert sent == pytest.approx(cost(ways)) == pytest.approx(min(map(cost, every)))


@pytest.mark.parametrize("ways", [*itertools.product(("data", "model", "rows"), repeat=2)])
def test_the_bytes_of_a_split_are_those_of_collectives(ways):
    """Between two workers, each collective by name: sums, gathers and all-to-alls of a layer by that way."""
    layers = [planning.LayerSize("", "dense", 24, 8, 12, 1.0), planning.LayerSize("", "dense", 36, 12, 6, 1.0)]
    batch, count, before = 4, [], "data"
    for i, (layer, way) in enumerate(zip(layers, ways, strict=True)):
        came, left = batch * layer.inputs // 2, batch * layer.outputs // 2
        moved = [("all_to_all", (2, came // 2))] * (1 + (i > 0))  # nobody asks for the gradient of the first inputs
        count += moved if (before, way) in (("model", "data"), ("data", "rows")) else []
        count += {
            "data": [("all_reduce", (layer.parameters,))],
            "model": [("all_gather", (came,))] + [("reduce_scatter", (2, came))] * (i > 0),
            "rows": [("all_gather", (left,)), ("reduce_scatter", (2, left))],
        }[way]
        before = way
    named = {"all_to_all": "pairwise"}
    sizes = [collectives.schedule(named.get(name, "ring"), 2, shape, collective=name) for name, shape in count]
    assert sum(s.sent().sum(0).max() for s in sizes) == planning.split_bytes(layers, ways, 2, batch)


def test_messages_wait_for_gradients_and_for_each_other():
    seconds = lambda size: 1 + size  # noqa: E731
    for threshold, sent in (
        (0, [(1, 1, 3), (2, 3, 6), (3, 10, 14)]), (math.inf, [(6, 10, 17)]), (3, [(3, 2, 6), (3, 10, 14)]),
    ):  # fmt: skip
        assert planning.messages([1, 2, 3], [1, 2, 10], threshold, seconds) == sent


# Checkpoints, and the command

ABOUT = {"seed": 0, "hidden": 8}
PARAMS = {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}


@pytest.fixture
def saved(tmp_path):
    command.save(tmp_path / "sub" / "last", 7, PARAMS, ABOUT)
    return tmp_path / "sub" / "last"


def test_a_checkpoint_comes_back_to_the_bit_or_not_at_all(saved):
    step, found = command.load(saved, PARAMS, ABOUT)
    assert step == 7 and list(saved.parent.iterdir()) == [saved]
    same(found, PARAMS)
    with pytest.raises(command.Unusable, match="hidden 8, not 16"):
        command.load(saved, PARAMS, ABOUT | {"hidden": 16})
    for cut in (200, 40, 10, 0):
        saved.write_bytes(saved.read_bytes()[:cut])
        with pytest.raises(command.Unusable, match="not whole"):
            command.load(saved, PARAMS, ABOUT)


def test_a_death_while_writing_leaves_the_old_checkpoint(saved, monkeypatch):
    def die(number):
        raise KeyboardInterrupt

    monkeypatch.setattr(command.os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        command.save(saved, 8, PARAMS, ABOUT)
    assert command.load(saved, PARAMS, ABOUT)[0] == 7


@pytest.mark.parametrize("before, after", [((2, 1), (1, 2)), pytest.param((2, 2), (4, 1), marks=pytest.mark.long)])
def test_a_killed_group_goes_on_in_another_shape_to_the_loss_of_one_process(before, after, tmp_path):
    (groups, parts), (new_groups, new_parts) = before, after
    told, pids, options = {}, {}, {"every": 10, "checkpoint": tmp_path}
    with pytest.raises(PeerLost, match=r"Process 1 .* was ended by SIGKILL"):
        for message in command.training(
            groups * parts, command.order(data=groups, model=parts, steps=10**7, **options)
        ):
            if "joined" in message:
                pids[message["joined"][0]] = message["pid"]
            if message.get("step") == 20:
                os.kill(pids[1], signal.SIGKILL)
            told |= {message["step"]: message["loss"]} if "step" in message else {}
    assert told.keys() >= {10, 20}
    what = command.order(**options)
    done = command.load(tmp_path / command.FILE, command._start(what), command._about(what))[0]
    options["steps"] = done + 20
    resumed = [*command.training(new_groups * new_parts, command.order(data=new_groups, model=new_parts, **options))]
    assert [message["step"] for message in resumed if "step" in message] == [done + 10, done + 20]
    result = resumed[-1]["result"]
    assert result["loss"] == pytest.approx(result["alone"], abs=1e-5)
    *_, again = command.training(1, command.order(**options))  # nothing is left to do
    assert again["result"]["bits"] == result["bits"]


def test_the_command_names_what_is_wrong(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--every", "7"])
    assert "steps 100" in capsys.readouterr().err


# What the notebooks suggest


def answered(exercise, *changes):
    """The answer in the text of the solution, with changes."""
    names = vars(exercises) | {"collectives": collectives, "parallel": room}
    code = exercise.code
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    exec(code, names)
    return names[exercise.answer]


def cells(notebook, *identities, changes=None, **more):
    found = Cells(notebook, changes)
    found.update(lax=jax.lax, partial=functools.partial, parallel=room, np=np, jax=jax, **more)
    found.run(*identities)
    return found


@suggested_by(LESSON)
def test_the_written_schedule_drives_the_runtime():
    ones, rng = cells(LESSON, "parallel-pipe-gpipe", "parallel-pipe-runtime"), np.random.default_rng(0)
    weights, x, y = [rng.normal(size=(6, 6)) for _ in range(4)], rng.normal(size=(8, 2, 6)), rng.normal(size=(8, 2, 6))
    (found, stored), (wanted, all_stored) = (
        ones["run_schedule"](table(4, 8), weights, x, y) for table in (ONE_F_ONE_B, ones["gpipe"])
    )
    assert (stored, all_stored) == ([4, 3, 2, 1], [8, 8, 8, 8])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b), found, wanted)


@suggested_by(LESSON)
def test_without_the_checkpoint_a_third_of_the_bytes_is_not_sent():
    (params, x, y), sent = network(), []
    for changes in ({}, {"@jax.checkpoint": ""}):
        found = cells(LESSON, "parallel-zero-loss", changes=changes, layers=LAYERS, params=params, square=square)
        f = jax.grad(functools.partial(found["sharded_loss"], axis_name="workers"))
        own = [room.chunks(layer, 4)[0] for layer in params]
        sent.append(program.schedule(f, 4, own, x[:2], y[:2]).sent().sum(0).max())
    assert sent[1] == sent[0] * 2 / 3


@suggested_by(LESSON)
@pytest.mark.parametrize("changes", [{}, {"default_rng(step)": "default_rng()"}])
def test_a_killed_worker_loses_bits_only_if_batches_depend_on_the_process(changes):
    used = {"subprocess": subprocess, "sys": sys, "tempfile": tempfile, "Path": Path, "data": data}
    kill = ("parallel-fail-worker", "parallel-fail-run", "parallel-fail-kill")
    results = cells(LESSON, *kill, changes=changes, **used)["results"]
    assert np.array_equal(results["killed"], results["undisturbed"]) == (not changes)


@suggested_by("09_parallel_training_further")
def test_the_suggestions_of_the_further_notebook():
    _, ways = HYBRID["best_split"](planning.vgg16(), 8, 1024)
    assert ways == ("data",) * 13 + ("rows", "model", "rows")
    bubbles = [pipeline.pipeline_schedule("1f1b", 64, count).bubble for count in (64, 567, 566)]
    assert bubbles[0] == pytest.approx(63 / 127) and bubbles[1] <= 0.1 < bubbles[2]
    slow = cells(FURTHER, "parallel-further-slowest-a", "parallel-further-slowest", stats=stats, cache=functools.cache)
    spares = {spare: slow["efficiency"]("exponential", 1024, 0.2, spare) for spare in (0, 32, 64, 128, 512)}
    assert spares[0] < spares[32] < max(spares.values()) and spares[512] < max(spares.values())
    draws = np.sort(np.random.default_rng(0).normal(size=(4000, 68)), 1)[:, 63].mean()
    assert slow["nth_done"]("normal", 64, 4) == pytest.approx(draws, rel=0.02)


# Exercises: what is right in another way is accepted, and what is nearly right is not

SCATTERED = "collectives.reduce_scatter(gradient.reshape(P, -1), axis_name) / P"
OWN = ".reshape(P, -1)[jax.lax.axis_index(axis_name)]"
NAMED = ("collectives.all_gather", "jax.lax.all_gather"), ("collectives.reduce_scatter(", "jax.lax.psum_scatter(")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (answered(exercises.sharded), "right"),
        (answered(exercises.sharded, *NAMED), "right"),
        (lambda loss, chunk, x, y, rate, axis: chunk - rate / jax.lax.axis_size(axis) * jax.grad(
            lambda own: loss(room.gathered(own, axis), x, y))(chunk), "right"),
        (answered(exercises.sharded, (" / P", "")), "differs"),
        (answered(exercises.sharded, (SCATTERED, f"(collectives.all_reduce(gradient, axis_name) / P){OWN}")), "enough"),
        (answered(exercises.sharded, (SCATTERED, f"jax.lax.pmean(gradient, axis_name){OWN}")), "are enough"),
        (lambda *args: ..., "no answer yet"),
        (lambda *args: len(3), "object of type 'int' has no len()"),
    ],
)  # fmt: skip
def test_a_sharded_step_must_take_the_mean_and_send_no_more_than_it_must(answer, says):
    right, line = exercises.sharded.judge(exercises.tried(answer))
    assert says in line and right is (says == "right"), line


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


def daly(save, hours, workers):
    M = hours * 3600 / workers
    return math.sqrt(2 * save * M) * (1 + math.sqrt(save / (2 * M)) / 3 + save / (18 * M)) - save


def divisors(distance):
    """The divisor of P that is nearest to the real number of parts that sends least."""

    def found(P, d, t, a, g):
        root = math.sqrt(3 * P * d * g / (t * a))
        return min((M for M in range(1, P + 1) if P % M == 0), key=lambda M: distance(M, root))

    return found


def slow(stages, micro_batches):
    """A micro-batch after the other: stores least and waits most."""
    one = {(s, s): "F" for s in range(stages)} | {(2 * stages - 1 - s, s): "B" for s in range(stages)}
    return {(slot + 2 * stages * m, s): (w, m) for m in range(micro_batches) for (slot, s), w in one.items()}


def from_the_library(stages, micro_batches):
    found = pipeline.pipeline_schedule("1f1b", stages, micro_batches)
    return {(round(t.start), t.worker): ("FB"[t.what], t.microbatch) for t in found.tasks}


ONE_F_ONE_B = answered(exercises.one_f_one_b)


def moved(table, place):
    return lambda S, M: {place(slot, s, S): task for (slot, s), task in table(S, M).items()}


@pytest.mark.parametrize(
    ("name", "answer", "right"),
    [
        *(("threshold", bracketing(*(2.0**power for power in first)), True)
          for first in ((13, 20, 27), (10, 20, 30), (14, 21, 28))),
        ("threshold", lambda tried: 2.0 ** (14 + 4 * len(tried)) if len(tried) < 4 else  # then beside the best
         min(tried, key=lambda pair: pair[1])[0] * [4, 1 / 4, 2, 1 / 2][len(tried) - 4], True),
        ("threshold", lambda tried: 2.0**22, False),  # one for all
        ("threshold", lambda tried: 1e6 * (1 + 4 * len(tried)), False),  # evenly spaced
        ("threshold", lambda tried: math.inf, False),  # all at once
        ("threshold", lambda tried: 4.0 ** (7 + len(tried)), True),  # by factors
        ("threshold", lambda tried: 2.0 ** (12 + len(tried)), False),  # too small
        ("interval", daly, True),
        ("interval", lambda save, hours, workers: math.sqrt(2 * save * hours * 3600), False),  # of one worker
        ("interval", lambda save, hours, workers: math.sqrt(2 * save * hours / workers), False),  # in hours
        ("interval", lambda save, hours, workers: 3600, False), ("interval", lambda *of: math.inf, False),
        ("parts", divisors(lambda M, root: abs(math.log(M / root))), True),
        ("parts", divisors(lambda M, root: abs(M - root)), False),
        ("parts", lambda P, *of: 1, False), ("parts", lambda P, *of: P, False), ("parts", lambda *of: 2.5, False),
        ("parts", lambda P, d, t, a, g: P if t * a < 3 * d * g else 1, False),
        ("parts", lambda P, d, t, a, g: answered(exercises.parts)(P, d, t, 4, 4), False),  # all take four bytes
        ("one_f_one_b", moved(ONE_F_ONE_B, lambda slot, s, S: (slot + 3, np.int64(s))), True),
        ("one_f_one_b", lambda S, M: {k: t for k, t in ONE_F_ONE_B(S, M).items() if t[1]}, False),  # one is left out
        ("one_f_one_b", moved(ONE_F_ONE_B, lambda slot, s, S: (slot, S - 1 - s)), False),  # before its input
        ("one_f_one_b", cells(LESSON, "parallel-pipe-gpipe")["gpipe"], False), ("one_f_one_b", slow, False),
        ("one_f_one_b", moved(slow, lambda slot, s, S: (slot / 100, s)), False),  # parts of slots
        ("one_f_one_b", from_the_library, False), ("one_f_one_b", lambda S, M: [], False),
    ],
)  # fmt: skip
def test_answers(name, answer, right):
    judged, line = vars(exercises)[name].judge(answer)
    assert judged is right, line
