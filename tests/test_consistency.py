"""Timelines by their laws, replay against `train.fit` and against plain loops, Hogwild's counts, exercises."""

from __future__ import annotations

import functools
import itertools
import math
import os
import signal

import jax
import numpy as np
import optax
import pytest
from cells import Cells
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from dlscale import consistency as room
from dlscale import costs
from dlscale.consistency import command, exercises, experiment, measuring
from dlscale.course import records
from dlscale.lab import models, train
from dlscale.lab.data import Dataset
from dlscale.lab.program import Message, Round, Schedule

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(96, 6)).astype(np.float32), RNG.integers(0, 3, 96).astype(np.int32)
DATA = Dataset("made", X, Y, X[:20], Y[:20], ("a", "b", "c"))
MODEL = models.mlp((6, 5, 3))
SETTING = {"batch_size": 8, "learning_rate": 0.3}
EXTRA = {"Downpour": {"every": 2}, "elastic": {"every": 2}, "averaging": {"every": 3}}


# Timelines


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(room.POLICIES)), st.integers(1, 6), st.integers(1, 60), st.integers(0, 3), st.integers(0, 99)
)
def test_a_timeline_obeys_its_laws(policy, workers, gradients, number, seed):
    times = room.durations(workers, 7, 0.5, slowest=3.0, seed=seed)
    options = {} if policy in room.SHARED or policy == "gossip" else {"every": number + 1}
    wire = room.Wire(0.1, 0.3, 0.5, 0.2)
    found = room.timeline(policy, times, gradients, bound=number, wire=wire, seed=seed, **options)
    assert (found.finish >= found.start).all() and (found.applied >= found.finish).all()
    assert (found.read <= found.version).all() and (found.staleness >= 0).all()
    done = np.zeros(workers, int)
    for i, start, finish in zip(found.worker, found.start, found.finish, strict=True):
        assert finish - start == pytest.approx(times[i, done[i] % 7])
        if policy == "stale-synchronous":
            assert done[i] - done.min() <= number
        done[i] += 1
    for i in range(workers):  # nobody computes two at a time, or before the last one is applied
        own = found.worker == i
        before = found.finish if room.POLICIES[policy] in ("all", "nobody") else found.applied
        assert (found.start[own][1:] >= before[own][:-1] - 1e-9).all()
    if workers == 1:
        assert not found.mixing.any() and not found.unseen.any()
    elif room.POLICIES[policy] == "server" and not options:
        assert (np.diff(found.applied) >= wire.server - 1e-9).all()  # the server has one worker at a time
    assert np.allclose(found.matrices.sum(2), 1)  # equal weights stay as they are


def test_equal_workers_are_as_stale_as_there_are_others():
    found = room.timeline("asynchronous", np.ones(5), 50)
    assert found.staleness.tolist() == [0, 1, 2, 3, *[4] * 46]


def test_a_synchronous_update_is_made_of_all_gradients_and_lasts_as_long_as_the_slowest():
    found = room.timeline("synchronous", np.array([1.0, 3.0]), 6, wire=room.Wire(all=0.5))
    assert found.update.tolist() == [False, True] * 3
    assert found.version.tolist() == [0, 0, 1, 1, 2, 2] and not found.staleness.any()
    assert found.applied[1::2].tolist() == [3.5, 7.0, 10.5]


@pytest.mark.parametrize("bound, expected", [(0, [0, 1, 0, 1]), (1, [0, 0, 1, 0])])
def test_a_bound_holds_the_fast_ones_back(bound, expected):
    found = room.timeline("stale-synchronous", np.array([1.0, 2.5]), 4, bound=bound)
    assert found.worker.tolist() == expected


def test_a_dead_worker_holds_up_who_waits_for_it_and_no_other():
    times = np.array([1.0, np.inf, 2.0])
    for policy in ("asynchronous", "elastic", "gossip", "ensemble", "Downpour"):
        assert 1 not in room.timeline(policy, times, 30).worker
    for policy in ("synchronous", "stale-synchronous", "averaging", "elastic, synchronous"):
        with pytest.raises(ValueError, match="waits for ever: worker 1 never"):
            room.timeline(policy, times, 30)
    with pytest.raises(ValueError, match="waits for ever"):
        room.timeline("ensemble", np.full(2, np.inf), 3)


@pytest.mark.parametrize("times", [[1.0, -1.0], [1.0, math.nan], [], [[[1.0]]]])
def test_times_that_cannot_be(times):
    with pytest.raises(ValueError, match="times must be"):
        room.timeline("asynchronous", np.array(times), 3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": "stale-synchronous", "bound": -1}, "bound must be a whole number of at least 0"),
        ({"policy": "stale-synchronous", "bound": 1.5}, "bound must be a whole number"),
        ({"policy": "averaging", "every": 0}, "every must be a whole number of at least 1"),
        ({"policy": "synchronous", "every": 2}, "exchanges after every gradient"),
        ({"policy": "gossip", "graph": "rign"}, "Did you mean 'ring'"),
        ({"policy": "gossip", "graph": np.eye(3)}, "not connected"),
        ({"policy": "gossip", "graph": np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]])}, "not connected"),
        ({"policy": "gossip", "graph": np.ones((2, 2))}, r"is a \(3, 3\) matrix"),
        ({"policy": "elastic", "elasticity": 0.5}, "at most 1 / workers"),
        ({"policy": "sinchronous"}, "Did you mean"),
        ({"policy": "asynchronous", "wire": room.Wire(latency=-1.0)}, "latency must be a finite number"),
        ({"policy": "asynchronous", "gradients": 0}, "gradients must be"),
    ],
)
def test_what_cannot_be_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        room.timeline(**{"times": np.ones(3), "gradients": 5} | options)


def test_graphs_reach_all():
    assert room.neighbours("ring", 4) == [[1, 3], [2, 0], [3, 1], [0, 2]]
    assert room.neighbours("exponential", 8)[0] == [1, 2, 4]
    assert room.neighbours("ring", 1) == [[]] and room.neighbours("ring", 2) == [[1], [0]]
    assert sorted(room.neighbours("random", 4)[2]) == [0, 1, 3]
    line = np.diag(np.ones(4), 1)  # one way is enough: the mean goes both ways
    line[4, 3] = 1
    assert room.neighbours(line, 5)[0] == [1]


def test_a_server_takes_as_long_as_the_lecture_says():
    """T = 2 L + 2 P γ m G / s: all come at once, the last one is served last."""
    workers, size, latency, per_byte, shards = 8, 1e6, 1e-3, 1e-8, 2
    wire = room.network(workers, size, latency, per_byte, shards)
    found = room.timeline("asynchronous", np.zeros(workers), 2 * workers, wire=wire)
    assert found.start[2 * workers - 1] == pytest.approx(2 * latency + 2 * workers * size * per_byte / shards)
    everyone = np.array([[i, 0] for i in range(1, workers)])
    there_and_back = [Round([Message(pairs, int(size))], 0) for pairs in (everyone, everyone[:, ::-1])]
    counted = costs.Hockney(0.0, per_byte).time(Schedule(workers, there_and_back))  # a worker is the server
    assert counted == pytest.approx(2 * (workers - 1) * size * per_byte)
    assert wire.all == costs.formula("rabenseifner", workers, size, latency, per_byte)
    alone = experiment.SLOW_NETWORK  # with one worker nothing is gained by shards: all goes over its own link, twice
    assert 2 * alone.latency + alone.server == pytest.approx(2 * (0.01 + 1.0))


@pytest.mark.parametrize("policy", ["asynchronous", "Downpour", "elastic"])
def test_shards_shorten_the_queue(policy):
    times = room.durations(8, 50)
    ends = [
        room.timeline(policy, times, 200, wire=room.network(8, 1.0, 0.0, 0.2, shards=shards)).applied[-1]
        for shards in (1, 2, 8)
    ]
    assert ends[0] > 1.5 * ends[1] and ends[1] > ends[2]


@pytest.mark.parametrize("graph", ["ring", "random", "exponential"])
def test_gossip_on_each_graph_brings_all_to_one_mean(graph):
    found = room.timeline("gossip", np.ones(8), 8 * 60, graph=graph)
    x = np.append(np.arange(8.0), 0)
    for number in found.mixing:
        x = found.matrices[number] @ x
    np.testing.assert_allclose(x[:-1], 3.5, atol=1e-3)


# Replay


@functools.cache
def fitted(epochs=2, momentum=0.0):
    optimizer = functools.partial(optax.sgd, momentum=momentum) if momentum else optax.sgd
    return train.fit(MODEL, DATA, optimizer, epochs=epochs, seed=3, progress=False, **SETTING)


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.bits
@pytest.mark.parametrize("policy", room.POLICIES)
def test_a_single_worker_of_any_policy_is_fit_to_the_bit(policy):
    found = room.timeline(policy, room.durations(1, 5), 24, **EXTRA.get(policy, {}))
    run = room.train(found, MODEL, DATA, seed=3, every=12, **SETTING)
    same(run.params, fitted().params)
    same(run.history.loss, fitted().history.loss)
    np.testing.assert_allclose(run.history.test_accuracy, fitted().history.test_accuracy, atol=1e-6)


@pytest.mark.bits
def test_no_staleness_is_fit_to_the_bit_with_many_workers_and_with_momentum():
    found = room.timeline("asynchronous", np.array([np.inf, 1.0, np.inf]), 24)
    assert not found.staleness.any()
    same(room.train(found, MODEL, DATA, seed=3, **SETTING).params, fitted().params)
    fast = room.train(found, MODEL, DATA, seed=3, momentum=0.9, **SETTING)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), fast.params, fitted(2, 0.9).params
    )


def test_synchronous_workers_are_one_with_a_larger_batch():
    found = room.timeline("synchronous", room.durations(4, 5), 12)
    run = room.train(found, MODEL, DATA, seed=3, **SETTING)
    wanted = train.fit(MODEL, DATA, optax.sgd, epochs=1, seed=3, progress=False, batch_size=32, learning_rate=0.3)
    near(run.params, wanted.params)


def test_bound_zero_is_synchronous_with_a_smaller_rate():
    times, options = room.durations(4, 5), {"batch_size": 8, "seed": 3}
    bound = room.train(room.timeline("stale-synchronous", times, 24), MODEL, DATA, learning_rate=0.1, **options)
    whole = room.train(room.timeline("synchronous", times, 24), MODEL, DATA, learning_rate=0.4, **options)
    near(bound.params, whole.params)


def near(found, wanted):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found, wanted)


@functools.cache
def flat():
    """Initial weights, the batches of `fit`, and the gradient of flat weights."""
    params = jax.jit(MODEL.init)(jax.random.fold_in(jax.random.key(3), 0))
    first, unravel = ravel_pytree(params)
    rows = np.asarray(room._orders(np.uint32(3), 96, 4)).reshape(-1, 8)
    loss = lambda w, x, y: train.LOSSES["cross_entropy"](MODEL.apply(unravel(w), x), y).mean()  # noqa: E731
    gradient = jax.jit(jax.grad(loss))
    return np.asarray(first), rows, lambda w, k: np.asarray(gradient(w, X[rows[k]], Y[rows[k]]))


def replayed(found, scales=None):
    """Plainly: every worker an object with what it has read; the order is the timeline's."""
    first, _, gradient = flat()
    P, rate, policy = found.workers, np.float32(0.3), found.policy
    versions, x, read = [first], [first.copy() for _ in range(P)], [first.copy() for _ in range(P)]
    centre, pushed, steps, collected = first.copy(), [first.copy() for _ in range(P)], [0] * P, []
    a = 0.9 / P
    for k, i in enumerate(found.worker):
        steps[i] += 1
        if policy in room.SHARED:
            collected.append(gradient(versions[found.read[k]], k) * (1 if scales is None else np.float32(scales[k])))
            if found.update[k]:
                versions.append(versions[-1] - rate * np.mean(collected, 0))
                collected = []
            continue
        x[i] = x[i] - rate * gradient(read[i] if policy == "gossip" else x[i], k)
        if policy == "gossip":
            near = room.neighbours("exponential", P)[i]
            j = near[(steps[i] - 1) % len(near)]
            x[i] = x[j] = (x[i] + x[j]) / 2
            read[i] = x[i]
        elif policy == "elastic" and steps[i] % 2 == 0:
            x[i], centre = x[i] - a * (x[i] - centre), centre + a * (x[i] - centre)
        elif policy == "Downpour":
            if steps[i] % 3 == 0:
                centre, pushed[i] = centre + x[i] - pushed[i], x[i]
            if steps[i] % 2 == 0:
                x[i], pushed[i] = centre, centre - (x[i] - pushed[i])
        elif found.mixing[k] and policy == "averaging":
            x = [np.mean(x, 0)] * P
        elif found.mixing[k]:
            x, centre = [w - a * (w - centre) for w in x], (1 - P * a) * centre + P * a * np.mean(x, 0)
    return versions[-1] if policy in room.SHARED else centre if policy[:2] in ("el", "Do") else np.mean(x, 0)


CASES = {"asynchronous": {}, "synchronous": {}, "stale-synchronous": {"bound": 2}, "elastic": {"every": 2},
         "Downpour": {"every": 2, "push": 3}, "averaging": {"every": 3}, "gossip": {"graph": "exponential"},
         "elastic, synchronous": {"every": 2}}  # fmt: skip


@pytest.mark.parametrize("policy", CASES)
def test_the_compiled_replay_does_what_plain_objects_do(policy):
    times = room.durations(4, 9, 0.5, slowest=2.0, seed=1)
    found = room.timeline(policy, times, 36, **CASES[policy])
    run = room.train(found, MODEL, DATA, seed=3, **SETTING)
    np.testing.assert_allclose(ravel_pytree(run.params)[0], replayed(found), rtol=2e-4, atol=2e-5)


def test_scales_are_part_of_each_gradient():
    found = room.timeline("asynchronous", room.durations(4, 9, seed=1), 36)
    scales = 1 / np.maximum(1, found.staleness)
    run = room.train(found, MODEL, DATA, seed=3, scales=scales, **SETTING)
    np.testing.assert_allclose(ravel_pytree(run.params)[0], replayed(found, scales), rtol=2e-4, atol=2e-5)


def test_an_ensemble_is_the_mean_prediction_of_members_that_differ():
    run = room.train(room.timeline("ensemble", room.durations(3, 5), 24), MODEL, DATA, seed=3, **SETTING)
    members = [jax.tree.map(lambda a, i=i: a[i], run.params) for i in range(3)]
    assert not np.allclose(members[0]["dense1"]["w"], members[1]["dense1"]["w"])
    chances = np.mean([jax.nn.softmax(MODEL.apply(own, X[:20])) for own in members], 0)
    assert run.history.test_accuracy[-1] == pytest.approx((chances.argmax(-1) == Y[:20]).mean())


def test_timelines_of_equal_shape_share_a_program():
    a, b = (room.timeline("asynchronous", room.durations(k, 30), 24) for k in (2, 8))
    room.train(a, MODEL, DATA, **SETTING)
    before = train._scan._cache_size()
    room.train(b, MODEL, DATA, **SETTING)
    room.train(room.timeline("synchronous", np.ones(4), 24), MODEL, DATA, batch_size=8, learning_rate=0.1, momentum=0.5)
    assert train._scan._cache_size() == before


def test_what_training_cannot_do_is_said():
    found = room.timeline("averaging", np.ones(3), 6, every=2)
    with pytest.raises(ValueError, match="no momentum"):
        room.train(found, MODEL, DATA, momentum=0.5, **SETTING)
    with pytest.raises(ValueError, match="batch_size must be"):
        room.train(found, MODEL, DATA, batch_size=0, learning_rate=0.1)
    with pytest.raises(ValueError, match="rate must be a finite number"):
        room.train(found, MODEL, DATA, batch_size=8, learning_rate=math.nan)


# Hogwild


def test_a_hypergraph_by_hand():
    assert measuring.sparsity(np.array([[0, 1], [1, 2], [3, 4], [1, 4]])) == (2, 0.75, 1.0)
    found = measuring.edges(200, 30, 4, skew=1.0, seed=1)
    assert all(len(set(e)) == 4 for e in found.tolist()) and found.max() < 30
    assert np.bincount(found.ravel(), minlength=30)[0] > np.bincount(found.ravel(), minlength=30)[20:].max()


def test_locks_and_loneliness_lose_nothing():
    edges = measuring.edges(50, 20, 5)
    jobs = [measuring.Job(edges, "one lock"), measuring.Job(edges, "a lock for each block"),
            measuring.Job(edges, "no lock", workers=1, rate=0.5)]  # fmt: skip
    locked, blocks, alone = measuring.run(jobs, updates=1500)
    for found, workers in ((locked, 2), (blocks, 2), (alone, 1)):
        assert found.lost == 0 and found.added.sum() == workers * 1500 * 5
    assert np.abs(alone.x.mean() - 1) < 0.05 and not locked.x.any()


def test_one_core_is_enough():
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else pytest.skip("no such setting here")
    os.sched_setaffinity(0, {min(allowed)})  # the processes that are started inherit it
    try:
        job = measuring.Job(measuring.edges(50, 20, 5), "one lock")
        assert measuring.run([job], updates=200)[0].added.sum() == 2 * 200 * 5
    finally:
        os.sched_setaffinity(0, allowed)


def test_jobs_that_cannot_be():
    edges = measuring.edges(5, 5, 2)
    with pytest.raises(ValueError, match="Unknown lock"):
        measuring.run([measuring.Job(edges, "a key")], 1)
    with pytest.raises(ValueError, match="at least 1"):
        measuring.run([measuring.Job(edges, workers=0)], 1)


# Real processes


def story(kill=None, **options):
    """What the processes say, by name; `kill` is ended by a signal as soon as it is known and the server reports."""
    told, pids = {}, {}
    for name, message in command.training(**options):
        told.setdefault(name, {}).update(message)
        pids |= {name: message["pid"]} if "pid" in message else {}
        if "gradients" in message and kill in pids:
            os.kill(pids.pop(kill), signal.SIGKILL)
    return told


def test_a_softmax_gradient_is_jax_own():
    w = RNG.normal(size=21).astype(np.float32)
    f = lambda w: train.LOSSES["cross_entropy"](X @ w.reshape(7, 3)[:-1] + w.reshape(7, 3)[-1], Y).mean()  # noqa: E731
    value, gradient = jax.jit(jax.value_and_grad(f))(w)
    found = command.loss(w, X, Y)
    assert found[0] == pytest.approx(float(value), rel=1e-5)
    np.testing.assert_allclose(found[1], gradient, rtol=1e-4, atol=1e-6)


def test_a_bound_holds_among_real_processes():
    told = story(workers=2, gradients=60, bound=0, slowest=3.0)
    assert [told[f"worker {rank}"]["pushed"] for rank in (0, 1)] == [30, 30]
    assert max(told["server"]["result"]["staleness"]) <= 1


def test_without_a_worker_training_goes_on_even_with_a_bound():
    told = story(kill="worker 1", workers=3, gradients=300, bound=2)
    assert told["worker 1"]["ended"] == "was ended by SIGKILL"
    assert len(told["server"]["result"]["staleness"]) == 300 and told["server"]["result"]["loss"] < 2.25


def test_without_the_server_all_end_with_a_message_at_once():
    told = story(kill="server", workers=2, gradients=100_000)
    assert told["server"]["ended"] == "was ended by SIGKILL"
    errors = [told[f"worker {rank}"]["error"] for rank in (0, 1)]
    assert all("the server is gone after" in error and "timed out" not in error for error in errors), "none waited"


def test_a_group_that_cannot_be():
    with pytest.raises(ValueError, match="bound must be"):
        next(command.training(bound=-1))
    with pytest.raises(ValueError, match="workers must be"):
        next(command.training(workers=0))


# Exercises: what is right in another way, and what is nearly right


def judged(exercise, text):
    names = dict(vars(exercises))
    exec(text, names)
    return exercise.judge(names[exercise.answer])


def test_a_bound_must_hold_for_all_who_wait():
    code = exercises.bounded.code
    assert not judged(exercises.bounded, code.replace(" if done[j] - min(done) <= bound", ""))[0]  # asynchronous
    only_the_last = code.replace("for j in [j for j in waiting if", "for j in [j for j in waiting[-1:] if")
    assert not judged(exercises.bounded, only_the_last)[0]
    assert not judged(exercises.bounded, code.replace("<= bound", "< bound"))[0]


def test_other_exercises_accept_what_is_right_and_refuse_the_naive():
    assert exercises.usable.judge(lambda s: 2 * math.sin(math.pi / (4 * s + 2)))[0]
    assert not exercises.usable.judge(lambda s: 2.0)[0] and not exercises.usable.judge(lambda s: 2 / (1 + s))[0]
    assert not exercises.partner.judge(lambda i, number: i ^ 1)[0]
    assert not exercises.partner.judge(lambda i, number: i + 1)[0]
    assert exercises.scale.judge(lambda s: 2 * math.sin(math.pi / (4 * s + 6)) * 0.9)[0]
    assert exercises.scale.judge(lambda s: math.sin(math.pi / (4 * s + 2)))[0]  # half of the limit of exercise 2
    for constant in (1.5, 0.5, 0.1, 0.02):
        assert not exercises.scale.judge(lambda s, c=constant: c)[0]
    high_first = lambda i, number: i ^ (1 << number) if i < 32 else i  # noqa: E731
    assert exercises.partner.judge(high_first)[0]


def test_every_pair_of_policies_differs():
    """No policy is another one under its name."""
    times = room.durations(4, 9, 0.5, slowest=2.0, seed=1)
    train_by = lambda p: room.train(room.timeline(p, times, 36, **CASES[p]), MODEL, DATA, seed=3, **SETTING)  # noqa: E731
    policies = ("asynchronous", "synchronous", "elastic", "Downpour", "averaging", "gossip")
    found = [ravel_pytree(train_by(policy).params)[0] for policy in policies]
    for a, b in itertools.combinations(found, 2):
        assert np.abs(a - b).max() > 1e-4


def test_shards_that_are_needed_keep_the_queue_empty():
    """As the clock says: with so many nobody waits in the end, with one fewer somebody does."""
    names = dict(vars(exercises))
    exec(exercises.shards.code, names)
    case = {"workers": 12, "size": 1e8, "latency": 0.01, "per_byte": 1e-9}
    needed = names["shards_needed"](compute=0.5, **case)
    for shards, waits in ((needed, False), (needed - 1, True)):
        found = room.timeline("asynchronous", np.full(12, 0.5), 1200, wire=room.network(**case, shards=shards))
        busy = 2 * 1e8 * 1e-9 / shards
        assert ((found.applied - busy - found.finish - 0.01)[-12:].max() > 1e-6) == waits
    assert not exercises.shards.judge(lambda workers, compute, size, latency, per_byte: workers)[0]


# What is recorded


def test_a_grid_grows_until_its_best_rate_is_inside():
    asked = []

    def run(settings):
        asked.extend(settings)
        return [{"score": -abs(setting["learning_rate"] - 10.0)} for setting in settings]

    options = {"seeds": [0], "tuning_seeds": [1, 2], "score": lambda found: found["score"]}
    assert experiment.tuned(run, (0.5, 1.0, 2.0), **options) == 8.0
    assert {s["learning_rate"] for s in asked if s["judged_on"] == "validation"} == {0.5, 1.0, 2.0, 4.0, 8.0, 16.0}


@pytest.mark.parametrize("chosen", [experiment.SPECTRUM, experiment.CROWD, experiment.CONTROLLED], ids=lambda c: c.id)
def test_a_record_has_all_that_its_plan_asks_for(chosen):
    """So no best rate is the first or the last of its grid."""
    recorded = {str(sorted(trial.setting.items())): trial.measures for trial in records.read(chosen.id).trials}
    asked = set()

    def run(settings):
        keys = [str(sorted(setting.items())) for setting in settings]
        asked.update(keys)
        return [recorded[key] for key in keys]

    chosen.plan(run)
    assert asked == recorded.keys()


# What the last section suggests


def test_the_suggestions():
    assert not room.timeline("asynchronous", np.array([1.0, np.inf]), 10).worker.any()
    with pytest.raises(ValueError, match="waits for ever"):
        room.timeline("synchronous", np.array([1.0, np.inf]), 10)
    graph = np.roll(np.eye(8), 1, axis=1)
    assert room.timeline("gossip", np.ones(8), 16, graph=graph).mixing.all()
    graph[0] = 0
    with pytest.raises(ValueError, match="not connected"):
        room.timeline("gossip", np.ones(8), 16, graph=graph)
    assert measuring.sparsity(measuring.edges(20, 100, 100)) == (100, 1.0, 1.0)
    slow = room.timeline("elastic, synchronous", room.durations(4, 9, slowest=4.0), 40, every=5)
    assert slow.unseen.max() <= 15 and np.bincount(slow.worker).max() <= 15
    unseen = {
        (every, push): room.timeline("Downpour", np.ones(4), 80, every=every, push=push).unseen.mean()
        for every in (2, 8) for push in (2, 8)
    }  # fmt: skip
    assert unseen[8, 2] == unseen[8, 8] > 2 * unseen[2, 2] == 2 * unseen[2, 8]


def test_another_crowd_in_section_3():
    changes = {"[1, 4, 16, 32]": "[1, 64]", "[0.025, 0.05, 0.1, 0.2]": "[0.025]", "3200": "128"}
    cells = Cells("10_consistency", changes)
    cells.update(consistency=room, MODEL=MODEL, DATA=DATA, SETTING={"batch_size": 8, "seed": 0})
    cells.sources["consistency-live-run"] = cells.sources["consistency-live-run"].replace("every=400", "every=64")
    cells.run("consistency-live-run")
    assert cells["RUNS"].keys() == {(1, 0.025), (64, 0.025)}
