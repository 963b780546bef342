"""Timelines by their laws, replay against `train.fit` and against plain loops, lost updates, exercises."""

from __future__ import annotations

import functools
import math
from contextlib import nullcontext

import jax
import numpy as np
import optax
import pytest
from cells import Cells, changed
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from dlscale import consistency as room
from dlscale.consistency import exercises, experiment
from dlscale.course import records
from dlscale.lab import models, train
from dlscale.lab.data import Dataset

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(96, 6)).astype(np.float32), RNG.integers(0, 3, 96).astype(np.int32)
DATA = Dataset("made", X, Y, X[:20], Y[:20], ("a", "b", "c"))
MODEL = models.mlp((6, 5, 3))
SETTING = {"batch_size": 8, "learning_rate": 0.3}
EXTRA = {"Downpour": {"every": 2}, "elastic": {"every": 2}, "averaging": {"every": 3}}


@settings(max_examples=30)
@given(st.sampled_from(sorted(room.POLICIES)), st.integers(1, 6), st.integers(1, 60), st.integers(0, 3))
def test_a_timeline_obeys_its_laws(policy, workers, gradients, number):
    times, wire = room.durations(workers, 7, 0.5, slowest=3.0, seed=number), room.Wire(0.1, 0.3, 0.5, 0.2)
    options = {} if policy in room.SHARED or policy == "gossip" else {"every": number + 1}
    found = room.timeline(policy, times, gradients, bound=number, wire=wire, **options)
    assert (found.finish >= found.start).all() and (found.applied >= found.finish).all()
    assert (found.staleness >= 0).all() and np.allclose(found.matrices.sum(2), 1)  # equal weights stay as they are
    done = np.zeros(workers, int)
    for i, start, finish in zip(found.worker, found.start, found.finish, strict=True):
        assert finish - start == pytest.approx(times[i, done[i] % 7])
        assert policy != "stale-synchronous" or done[i] - done.min() <= number
        done[i] += 1
    for i in range(workers):  # nobody computes two at a time, or before the last one is applied
        own = found.worker == i
        before = found.finish if room.POLICIES[policy] in ("all", "nobody") else found.applied
        assert (found.start[own][1:] >= before[own][:-1] - 1e-9).all()
    if workers == 1:
        assert not found.mixing.any() and not found.unseen.any()
    elif room.POLICIES[policy] == "server" and not options:
        assert (np.diff(found.applied) >= wire.server - 1e-9).all()  # the server has one worker at a time


@pytest.mark.parametrize(
    "policy, times, options, expected",
    [
        ("asynchronous", np.ones(3), {}, {"staleness": [0, 1, 2, 2, 2, 2]}),  # as stale as there are others
        (  # an update is made of all gradients, and lasts as long as the slowest
            "synchronous", [1.0, 3.0], {"wire": room.Wire(all=0.5)},
            {"update": [False, True] * 3, "version": [0, 0, 1, 1, 2, 2], "applied": [1.0, 3.5, 4.5, 7.0, 8.0, 10.5]},
        ),
    ],
)  # fmt: skip
def test_small_timelines_by_hand(policy, times, options, expected):
    found = room.timeline(policy, np.array(times), 6, **options)
    for name, values in expected.items():
        assert getattr(found, name).tolist() == values, name


@pytest.mark.parametrize("policy", room.POLICIES)
def test_a_dead_worker_holds_up_who_waits_for_it_and_no_other(policy):
    waits = policy in ("synchronous", "stale-synchronous", "averaging")
    with pytest.raises(ValueError, match="waits for ever: worker 1 never") if waits else nullcontext():
        assert 1 not in room.timeline(policy, np.array([1.0, np.inf, 2.0]), 30).worker


@pytest.mark.parametrize(
    "policy, options, message",
    [
        ("stale-synchronous", {"bound": -1}, "bound must be"), ("averaging", {"every": 0}, "every must be"),
        ("synchronous", {"every": 2}, "exchanges after every gradient"), ("sinchronous", {}, "Did you mean"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(policy, options, message):
    with pytest.raises(ValueError, match=message):
        room.timeline(policy, np.ones(3), 5, **options)


def test_a_server_takes_as_long_as_the_lecture_says():
    """T = 2 L + 2 P γ m G / s: all come at once, the last one is served last."""
    found = room.timeline("asynchronous", np.zeros(8), 16, wire=room.Wire(latency=1e-3, server=2 * 1e6 * 1e-8 / 2))
    assert found.start[15] == pytest.approx(2e-3 + 2 * 8 * 1e6 * 1e-8 / 2)


@functools.cache
def fitted():
    return train.fit(MODEL, DATA, optax.sgd, epochs=2, seed=3, progress=False, **SETTING)


@pytest.mark.bits
@pytest.mark.parametrize("policy", room.POLICIES)
def test_a_single_worker_of_any_policy_is_fit_to_the_bit(policy):
    found = room.timeline(policy, room.durations(1, 5), 24, **EXTRA.get(policy, {}))
    run = room.train(found, MODEL, DATA, seed=3, every=12, **SETTING)
    jax.tree.map(np.testing.assert_array_equal, run.params, fitted().params)
    np.testing.assert_allclose(run.history.test_accuracy, fitted().history.test_accuracy, atol=1e-6)


def replayed(found):
    """Plainly: every worker with what it has read; the order is the timeline's, the batches are those of `fit`."""
    first, unravel = ravel_pytree(jax.jit(MODEL.init)(jax.random.fold_in(jax.random.key(3), 0)))
    rows = np.asarray(room._orders(np.uint32(3), 96, 2)).reshape(-1, 8)
    gradient = jax.jit(jax.grad(lambda w, x, y: room.LOSS(MODEL.apply(unravel(w), x), y).mean()))
    P, policy = found.workers, found.policy
    versions, x, read, pushed = [first], [first] * P, [first] * P, [first] * P
    centre, steps, collected, a = first, [0] * P, [], 1.5 / P
    for k, i in enumerate(found.worker):
        steps[i] += 1
        own = versions[found.read[k]] if policy in room.SHARED else read[i] if policy == "gossip" else x[i]
        step = -0.3 * gradient(own, X[rows[k]], Y[rows[k]])
        x[i] = x[i] + step
        if policy in room.SHARED:
            collected.append(step)
            if found.update[k]:
                versions.append(versions[-1] + sum(collected) / len(collected))
                collected = []
        elif policy == "gossip":
            j = (i + (1, 2)[(steps[i] - 1) % 2]) % P
            x[i] = x[j] = read[i] = (x[i] + x[j]) / 2
        elif policy == "elastic" and steps[i] % 2 == 0:
            x[i], centre = x[i] - a * (x[i] - centre), centre + a * (x[i] - centre)
        elif policy == "Downpour":
            if steps[i] % 3 == 0:
                centre, pushed[i] = centre + x[i] - pushed[i], x[i]
            if steps[i] % 2 == 0:
                x[i], pushed[i] = centre, centre - (x[i] - pushed[i])
        elif found.mixing[k]:
            x = [sum(x) / P] * P
    return versions[-1] if policy in room.SHARED else centre if policy[:2] in ("el", "Do") else sum(x) / P


@pytest.mark.parametrize(
    "policy, options",
    [
        ("asynchronous", {}), ("synchronous", {}), ("stale-synchronous", {"bound": 2}), ("averaging", {"every": 3}),
        ("Downpour", {"every": 2, "push": 3}), ("elastic", {"every": 2, "pull": 1.5}), ("gossip", {}),
    ],
)  # fmt: skip
def test_the_compiled_replay_does_what_plain_objects_do(policy, options):
    found = room.timeline(policy, room.durations(4, 9, 0.5, slowest=2.0, seed=1), 24, **options)
    run = room.train(found, MODEL, DATA, seed=3, **SETTING)
    np.testing.assert_allclose(ravel_pytree(run.params)[0], replayed(found), rtol=2e-4, atol=2e-5)


def test_an_ensemble_is_the_mean_prediction_of_members_that_differ():
    run = room.train(room.timeline("ensemble", room.durations(3, 5), 24), MODEL, DATA, seed=3, **SETTING)
    members = [jax.tree.map(lambda a, i=i: a[i], run.params) for i in range(3)]
    assert not np.allclose(members[0]["dense1"]["w"], members[1]["dense1"]["w"])
    chances = np.mean([jax.nn.softmax(MODEL.apply(own, X[:20])) for own in members], 0)
    assert run.history.test_accuracy[-1] == pytest.approx((chances.argmax(-1) == Y[:20]).mean())


@pytest.mark.parametrize("policy", ["asynchronous", "ensemble"])
def test_weights_are_averaged_over_the_last_gradients(policy):
    """The mean of what shorter runs end with."""
    found = room.timeline(policy, room.durations(3, 9, seed=1), 12)
    run = room.train(found, MODEL, DATA, seed=3, every=6, averaged=2, **SETTING)
    whole = ("policy", "workers", "matrices", "judged")
    shorter = found._replace(**{name: part[:11] for name, part in found._asdict().items() if name not in whole})
    ends = [room.train(one, MODEL, DATA, seed=3, **SETTING).params for one in (shorter, found)]
    flat = [ravel_pytree(params)[0] for params in (run.params, *ends)]
    np.testing.assert_allclose(flat[0], (flat[1] + flat[2]) / 2, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options, message", [({"batch_size": 0}, "batch_size"), ({"every": 5}, "every"), ({"averaged": 7}, "averaged")]
)
def test_what_training_cannot_do_is_said(options, message):
    options = SETTING | {"every": 6, "averaged": 2} | options
    with pytest.raises(ValueError, match=f"{message} must"):
        room.train(room.timeline("averaging", np.ones(3), 6, every=2), MODEL, DATA, **options)


WAIT = "        waiting.append(i)\n"
AT_ONCE = f"{WAIT}        if running and min(running)[0] == finish:\n            continue\n"


@pytest.mark.parametrize(
    "exercise, answer, accepted",
    [
        (exercises.bounded, (" if done[j] - min(done) <= bound", ""), False),  # asynchronous
        (exercises.bounded, ("[j for j in waiting if", "[j for j in waiting[-1:] if"), False),
        (exercises.bounded, ("<= bound", "< bound"), False),
        # all that finish at one moment, before anybody reads
        (exercises.bounded, changed(exercises.bounded, WAIT, AT_ONCE), True),
        (exercises.usable, lambda s: math.pi / (2 * s) if s else 2, False),  # only for large staleness
        (exercises.usable, lambda s: math.pi / (2 * s + 1), False),
        (exercises.usable, lambda s: 2 * math.sin(math.pi / (4 * s + 2)), True),
        (exercises.partner, lambda i, number: i + 1, False),
        (exercises.partner, lambda i, number: float(i ^ (2 ** (number + 1) - 1)), True),
    ],
)
def test_naive_answers_are_refused_and_other_right_ones_taken(exercise, answer, accepted):
    right, line = exercise.judge(changed(exercise, *answer) if isinstance(answer, tuple) else answer)
    assert right == accepted, line


def test_the_record_has_all_that_its_plan_asks_for():
    """So no best rate is the first or the last of its grid."""
    trials = records.read("consistency-crowd").trials
    recorded, asked = {str(sorted(trial.setting.items())): trial.measures for trial in trials}, []

    def run(settings):
        asked.extend(str(sorted(setting.items())) for setting in settings)
        return [recorded[key] for key in asked[-len(settings) :]]

    experiment.crowd_plan(run)
    assert set(asked) == recorded.keys()


@suggested_by("10_consistency")
def test_with_more_gradients_averaging_catches_up(monkeypatch):
    monkeypatch.setattr(experiment, "STEPS", 6400)
    experiment.order.cache_clear()
    trial, arms = experiment.spectrum_trial, ("synchronous", "averaging, every 10")
    both = [trial(arm, experiment.EQUAL, experiment.BEST[arm], 1)["accuracy"] for arm in arms]
    experiment.order.cache_clear()
    assert abs(both[0] - both[1]) < 2.5, both


@suggested_by("10_consistency")
def test_only_the_smallest_rate_survives_64_workers():
    cells = Cells("10_consistency", {"(1, 8, 32)": "(64,)", "3200": "1600", "0.1, 0.2, 0.4, 0.8": "0.2"})
    cells.update(consistency=room, model=models.mlp((40, 32, 10)), dataset=experiment.examples()["test"], np=np)
    cells.run("consistency-train", "consistency-live-run")
    assert cells["runs"][64, 0.05][1] > 20 > cells["runs"][64, 0.2][1]


@suggested_by("10_consistency")
def test_more_threads_lose_more_updates_and_a_lock_loses_none():
    found, less = [], {"range(5)": "range(2)", "updates=10_000": "updates=4_000"}
    for threads in (2, 8):
        cells = Cells("10_consistency", less | {"threads=2": f"threads={threads}"})
        cells.run(*(f"consistency-{name}" for name in ("setup", "edges", "threads", "lost", "threads-run")))
        assert cells["with_lock"] == 0 and cells["lost"]["sparse, even"].mean() < 5 < cells["lost"]["dense"].mean()
        found.append(sum(values.mean() for values in cells["lost"].values()))
    assert found[0] < found[1]


def further(changes, *identities):
    cells = Cells("further/10_consistency_further", changes)
    cells.run(*(f"consistency-further-{name}" for name in ("setup", *identities)))
    return cells


@suggested_by("10_consistency_further")
def test_64_shards_come_near_the_all_reduce_for_large_messages():
    cells = further({}, "server-formulas", "hierarchical", "all-reduce", "server-figure")
    found = cells["times_of"](100, 64, 10)
    ratio = found["sharded server"] / found["all-reduce"]
    assert 1.0 < ratio[cells["WORKERS"] == 64][0] < 1.02 and (ratio > 1).sum() >= 5


@suggested_by("10_consistency_further")
def test_fewer_copies_shorten_a_batch_less():
    waits = [further({"[23]": f"[{k}]"}, "backup-run")["with_backup"].max(1).mean() for k in (23, 27)]
    assert waits[0] < waits[1]


@suggested_by("10_consistency_further")
def test_six_workers_whose_times_vary_more_make_fewer_gradients():
    orders = [
        further(changes, "queue-figure")["queue"](6, 0.2) for changes in ({}, {"60, seed": "60, jitter=1.0, seed"})
    ]
    assert orders[0].applied[-1] < 0.95 * orders[1].applied[-1]
