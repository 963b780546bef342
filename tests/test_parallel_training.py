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
from cells import Cells, changed
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dlscale import collectives
from dlscale import parallel_training as room
from dlscale.lab import data, models, program
from dlscale.lab.processes import PeerLost
from dlscale.parallel_training import command, exercises, experiment, pipeline, planning

LESSON, FURTHER = "09_parallel_training", "further/09_parallel_training_further"
LAYERS = [models.dense("relu"), models.dense("relu"), models.dense()]
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # quick to compile


def square(result, y):
    """Without a rounding: the numbers below are small whole ones, and so are sums of them in any order."""
    return ((result - y) ** 2).sum() / len(y)


def whole(rng, *shape):
    return jnp.asarray(rng.integers(-1, 2, shape), jnp.float32)


def network():
    rng = np.random.default_rng(0)
    params = [{"w": whole(rng, a, b), "b": whole(rng, b)} for a, b in itertools.pairwise((6, 8, 4, 5))]
    return params, whole(rng, 8, 6), whole(rng, 8, 5)


def loss(params, x, y):
    for layer, own in zip(LAYERS, params, strict=True):
        x = layer(own, x)
    return square(x, y)


@functools.cache
def single():
    return jit(jax.value_and_grad(loss))(*network())


def on_all(f, *args, axes=0):
    return jit(jax.vmap(f, in_axes=axes, axis_name="w"))(*args)


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


def zero(stage, params, x, y, run=on_all):
    f = room.sharded(LAYERS, square, params, stage, "w")
    value, found = run(f, [room.chunks(own, 4) for own in params], room.shares(x, 4), room.shares(y, 4))
    return value, [room.unchunked(g.ravel(), own) for g, own in zip(found, params, strict=True)]


@pytest.mark.parametrize("stage, passes", [(1, 2), (2, 2), (3, 3)])
def test_every_stage_of_zero_gives_the_single_gradient_and_sends_what_it_must(stage, passes):
    params, x, y = network()
    value, wanted = single()
    same(zero(stage, params, x, y), (jnp.stack([value] * 4), wanted))
    parts = [room.chunks(own, 4)[0] for own in params]
    found = program.schedule(room.sharded(LAYERS, square, params, stage, "workers"), 4, parts, x[:2], y[:2])
    mean = 4 * 2 * 3  # the loss itself goes round a ring, a number in each round
    assert found.sent().sum(0).max() == passes * 3 * sum(part.size for part in parts) * 4 + mean


EVERYWHERE = """
import test_parallel_training as here
from dlscale.lab import devices; devices.emulate(4)
params, x, y = here.network()
found = here.zero(3, params, x, y, lambda f, *args: here.jax.pmap(f, axis_name="w")(*args))[1]
here.same(found, here.single()[1])
"""


@pytest.mark.long
def test_the_same_on_four_devices():
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", "-c", EVERYWHERE]
    found = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]


def test_two_layers_split_by_columns_and_rows_to_the_bit():
    rng = np.random.default_rng(0)
    params = {"w1": whole(rng, 6, 8), "b1": whole(rng, 8), "w2": whole(rng, 8, 5), "b2": whole(rng, 5)}
    x, y = whole(rng, 8, 6), whole(rng, 8, 5)
    f = jax.value_and_grad(lambda p, x, axis=None: square(room.two_layers(p, x, axis), y), (0, 1))
    value, (own, of_x) = on_all(lambda p, x: f(p, x, "w"), room.split_within(params, 4), x, axes=(0, None))
    wanted, (wanted_own, wanted_of_x) = jax.device_get(jit(f)(params, x))
    same((value, own, of_x), ([wanted] * 4, room.split_within(wanted_own, 4), np.stack([wanted_of_x] * 4)))


schedule = functools.partial(functools.partial, pipeline.pipeline_schedule)


@pytest.mark.parametrize(
    "call, why",
    [
        (lambda: command.order(batch=65, data=2), "batch 65 does not divide by data 2"),
        (schedule("gpipe", 4, 0), "microbatches must be"), (schedule("gpipe", 4, 8, 2), "Several chunks"),
        (schedule("interleaved", 4, 6, 2), "needs a multiple of 4"), (schedule("gpip", 4, 8), "Did you mean 'gpipe'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_an_error(call, why):
    with pytest.raises(ValueError, match=why):
        call()


@settings(max_examples=25)
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
    start, rows, ages = experiment.start(0), experiment.order(0)[:10], experiment.delays(stages)
    (x, y), _ = experiment.examples()
    found, _ = experiment.descend(start, rows, np.float32(0.05), ages, stash, x, y)
    gradient = jit(jax.value_and_grad(lambda now, old, x, y: experiment.loss(experiment.through(old, now, x), y)))
    history = [start]
    for m, batch in enumerate(rows):
        old = {k: np.stack([history[max(0, m - age)][k][i] for i, age in enumerate(ages)]) for k in start}
        _, step = gradient(old if stash else history[-1], old, x[batch], y[batch])
        history.append(jax.tree.map(lambda p, g: np.asarray(p - 0.05 * g), history[-1], step))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, history[-1])


@pytest.mark.parametrize("ways", [*itertools.product(("data", "model", "rows"), repeat=2)])
def test_the_bytes_of_a_split_are_those_of_collectives(ways):
    """Between two workers, each collective by name: sums, gathers and all-to-alls of a layer by that way."""
    layers = [planning.LayerSize("", "dense", 24, 8, 12, 1.0), planning.LayerSize("", "dense", 36, 12, 6, 1.0)]
    count, ring = [], functools.partial(collectives.schedule, "ring", 2)
    for i, (layer, before, way) in enumerate(zip(layers, ("data", *ways), ways, strict=False)):
        came, left = 2 * layer.inputs, 2 * layer.outputs
        if (before, way) in (("model", "data"), ("data", "rows")):  # nobody asks for the gradient of the first inputs
            count += [collectives.schedule("pairwise", 2, (2, came // 2), collective="all_to_all")] * (1 + (i > 0))
        if way == "data":
            count += [ring((layer.parameters,), collective="all_reduce")]
        else:
            gathers, scatters = (came, (i > 0) * came) if way == "model" else (left, left)
            count += [ring((gathers,), collective="all_gather")]
            count += [ring((2, scatters), collective="reduce_scatter")] if scatters else []
    assert sum(s.sent().sum(0).max() for s in count) == planning.split_bytes(layers, ways, 2, 4)


def test_messages_wait_for_gradients_and_for_each_other():
    plan = functools.partial(planning.messages, [1, 2, 3], [1, 2, 10], seconds=lambda size: 1 + size)
    found = [plan(threshold) for threshold in (0, 3, math.inf)]
    assert found == [[(1, 1, 3), (2, 3, 6), (3, 10, 14)], [(3, 2, 6), (3, 10, 14)], [(6, 10, 17)]]


def test_a_checkpoint_comes_back_to_the_bit_or_not_at_all(tmp_path, monkeypatch):
    saved, about = tmp_path / "sub" / "last", {"seed": 0, "hidden": 8}
    params = {"w": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.float32)}
    command.save(saved, 7, params, about)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):  # a death while the next one is written
        patched.setattr(command.os, "fsync", lambda number: 1 / 0)
        command.save(saved, 8, params, about)
    same(command.load(saved, about), (7, params))
    with pytest.raises(ValueError, match=r"another training.*16"):
        command.load(saved, about | {"hidden": 16})
    for content in (saved.read_bytes()[:200], saved.read_bytes().replace(b"\x80?", b"\x80@"), b""):
        saved.write_bytes(content)
        with pytest.raises(ValueError, match="not whole"):
            command.load(saved, about)


@pytest.mark.parametrize("before, after", [((2, 1), (1, 2)), pytest.param((2, 2), (4, 1), marks=pytest.mark.long)])
def test_a_killed_group_goes_on_in_another_shape_to_the_loss_of_one_process(before, after, tmp_path):
    pids = {}

    def training(data, model, steps):
        return command.training(command.order(data=data, model=model, steps=steps, every=10, checkpoint=tmp_path))

    with pytest.raises(PeerLost, match=r"Process 1 .* was ended by SIGKILL"):
        for message in training(*before, 10**7):
            if "joined" in message:
                pids[message["joined"][0]] = message["pid"]
            if message.get("step") == 20:
                os.kill(pids[1], signal.SIGKILL)
    done, _ = command.begin(command.order(checkpoint=tmp_path))
    *_, first, last = training(*after, done + 20)
    assert done >= 20 and (first["step"], last["step"]) == (done + 10, done + 20)
    alone, digits = functools.partial(command._steps, 1), data.load("digits")
    for axis in ("model", "data"):  # of one worker
        alone = jax.vmap(alone, in_axes=None, axis_size=1, axis_name=axis)
    what, x = command.order(every=done + 20, steps=done + 20), digits.x_train.reshape(-1, 64)
    _, losses = jit(alone)(command.begin(what)[1], command._rows(what, 0, len(x)), x, digits.y_train)
    assert last["loss"] == pytest.approx(float(losses[0, 0, -1]), abs=1e-5)


answered = functools.partial(changed, **vars(exercises) | {"collectives": collectives, "parallel": room})


def cells(notebook, *identities, changes=None, **more):
    found = Cells(notebook, changes)
    found.update(lax=jax.lax, partial=functools.partial, parallel=room, np=np, jax=jax, **more)
    found.run(*identities)
    return found


@suggested_by(LESSON)
def test_the_written_schedule_drives_the_runtime():
    ones = cells(LESSON, "parallel-pipe-gpipe", "parallel-pipe-runtime")
    weights, x, y = (np.random.default_rng(0).normal(size=shape) for shape in ((4, 6, 6), (8, 2, 6), (8, 2, 6)))
    found, wanted = (ones["run_schedule"](table(4, 8), weights, x, y) for table in (ONE_F_ONE_B, ones["gpipe"]))
    assert (found[1], wanted[1]) == ([4, 3, 2, 1], [8] * 4) and np.allclose(found[0], wanted[0])


@suggested_by(LESSON)
def test_without_the_checkpoint_a_third_of_the_bytes_is_not_sent():
    (params, x, y), sent = network(), []
    own = [room.chunks(layer, 4)[0] for layer in params]
    for changes in ({}, {"@jax.checkpoint": ""}):
        found = cells(LESSON, "parallel-zero-loss", changes=changes, layers=LAYERS, params=params, square=square)
        f = jax.grad(functools.partial(found["sharded_loss"], axis_name="workers"))
        sent.append(program.schedule(f, 4, own, x[:2], y[:2]).sent().sum(0).max())
    assert sent[1] == sent[0] * 2 / 3


PAST = "rng = np.random.default_rng(0)\nwhile step < 80"


@suggested_by(LESSON)
@pytest.mark.parametrize("changes", [{}, {"while step < 80": PAST, "np.random.default_rng(step).p": "rng.p"}])
def test_a_killed_worker_loses_bits_only_if_batches_depend_on_the_past(changes):
    used = {"subprocess": subprocess, "sys": sys, "tempfile": tempfile, "Path": Path, "data": data}
    kill = ("parallel-fail-worker", "parallel-fail-run", "parallel-fail-kill")
    results = cells(LESSON, *kill, changes=changes, **used)["results"]
    assert np.array_equal(results["killed"], results["undisturbed"]) == (not changes)


@suggested_by("09_parallel_training_further")
def test_the_suggestions_of_the_further_notebook():
    hybrid = cells(FURTHER, "parallel-further-alexnet-best", planning=planning)
    assert hybrid["best_split"](planning.vgg16(), 8, 1024)[1] == ("data",) * 13 + ("rows", "model", "rows")
    assert schedule("1f1b", 64, 567)().bubble <= 0.1 < schedule("1f1b", 64, 566)().bubble
    slow = cells(FURTHER, "parallel-further-slowest", stats=stats, cache=functools.cache)
    none, few, some, many = (slow["efficiency"]("exponential", 1024, 0.2, spare) for spare in (0, 32, 128, 512))
    assert none < few < some > many
    draws = np.sort(np.random.default_rng(0).normal(size=(4000, 68)), 1)[:, 63].mean()
    assert slow["nth_done"]("normal", 64, 4) == pytest.approx(draws, rel=0.02)


SCATTERED = "collectives.reduce_scatter(gradient.reshape(P, -1), axis_name) / P"
OWN = ".reshape(P, -1)[jax.lax.axis_index(axis_name)]"
NAMED = "collectives.all_gather", "jax.lax.all_gather", "collectives.reduce_scatter(", "jax.lax.psum_scatter("


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (answered(exercises.sharded, *NAMED), "own all_gather"),
        (lambda loss, chunk, x, y, rate, axis: chunk - rate / jax.lax.axis_size(axis) * jax.grad(
            lambda own: loss(room.gathered(own, axis), x, y))(chunk), "right"),
        (answered(exercises.sharded, " / P", ""), "differs"),
        (answered(exercises.sharded, SCATTERED, f"(collectives.all_reduce(gradient, axis_name) / P){OWN}"), "enough"),
        (lambda *args: ..., "no answer yet"),
    ],
)  # fmt: skip
def test_a_sharded_step_must_take_the_mean_and_send_no_more_than_it_must(answer, says):
    right, line = exercises.sharded.judge(exercises.tried(answer))
    assert says in line and right is (says == "right"), line


def slow(stages, micro_batches):
    """A micro-batch after the other: stores least and waits most."""
    one = {(s, s): "F" for s in range(stages)} | {(2 * stages - 1 - s, s): "B" for s in range(stages)}
    return {(slot + 2 * stages * m, s): (w, m) for m in range(micro_batches) for (slot, s), w in one.items()}


ONE_F_ONE_B = answered(exercises.one_f_one_b)


def moved(table, place):
    return lambda S, M: {place(slot, s, S): task for (slot, s), task in table(S, M).items()}


@pytest.mark.parametrize(
    ("name", "answer", "right"),
    [
        ("interval", lambda save, hours, lost: int(1800 * hours * lost**2 / save), True),
        ("interval", lambda save, hours, lost: hours * 3600 * lost / (2 * save), False),  # not the square
        ("interval", lambda save, hours, lost: 3600 * hours * lost**2 / save, False),  # half of the sum
        ("one_f_one_b", moved(ONE_F_ONE_B, lambda slot, s, S: (slot + 3, np.int64(s))), True),
        ("one_f_one_b", lambda S, M: {k: t for k, t in ONE_F_ONE_B(S, M).items() if t[1]}, False),  # one is left out
        ("one_f_one_b", moved(ONE_F_ONE_B, lambda slot, s, S: (slot, S - 1 - s)), False),  # before its input
        ("one_f_one_b", cells(LESSON, "parallel-pipe-gpipe")["gpipe"], False), ("one_f_one_b", slow, False),
    ],
)  # fmt: skip
def test_answers(name, answer, right):
    judged, line = vars(exercises)[name].judge(answer)
    assert judged is right, line
