"""Timelines by their laws, replay against `train.fit` and against plain loops, lost updates, exercises."""

from __future__ import annotations

import functools
import math

import jax
import numpy as np
import optax
import pytest
from cells import Cells
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from dlscale import consistency as room
from dlscale import costs
from dlscale.consistency import drawing, exercises, experiment
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
    found = room.timeline(policy, times, gradients, bound=number, wire=wire, **options)
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


@pytest.mark.parametrize(
    "policy, times, options, expected",
    [
        ("asynchronous", np.ones(3), {}, {"staleness": [0, 1, 2, 2, 2, 2]}),  # as stale as there are others
        (  # an update is made of all gradients, and lasts as long as the slowest
            "synchronous", [1.0, 3.0], {"wire": room.Wire(all=0.5)},
            {"update": [False, True] * 3, "version": [0, 0, 1, 1, 2, 2], "applied": [1.0, 3.5, 4.5, 7.0, 8.0, 10.5]},
        ),
        ("stale-synchronous", [1.0, 2.5], {"bound": 0}, {"worker": [0, 1] * 3}),
        ("stale-synchronous", [1.0, 2.5], {"bound": 1}, {"worker": [0, 0, 1, 0, 1, 0]}),
    ],
)  # fmt: skip
def test_small_timelines_by_hand(policy, times, options, expected):
    found = room.timeline(policy, np.array(times), 6, **options)
    for name, values in expected.items():
        assert getattr(found, name).tolist() == values, name


def test_the_lessons_largest_bound_is_never_reached():
    times = room.durations(8, 500, 0.2, 4, seed=0)
    free, bounded = (room.timeline(name, times, 3200, bound=1000) for name in ("asynchronous", "stale-synchronous"))
    np.testing.assert_array_equal(free.read, bounded.read)


@pytest.mark.parametrize("policy", room.POLICIES)
def test_a_dead_worker_holds_up_who_waits_for_it_and_no_other(policy):
    times = np.array([1.0, np.inf, 2.0])
    if policy in ("synchronous", "stale-synchronous", "averaging"):
        with pytest.raises(ValueError, match="waits for ever: worker 1 never"):
            room.timeline(policy, times, 30)
    else:
        assert 1 not in room.timeline(policy, times, 30).worker
    with pytest.raises(ValueError, match="waits for ever"):
        room.timeline(policy, np.full(2, np.inf), 3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": "stale-synchronous", "bound": -1}, "bound must be a whole number of at least 0"),
        ({"policy": "stale-synchronous", "bound": 1.5}, "bound must be a whole number"),
        ({"policy": "averaging", "every": 0}, "every must be a whole number of at least 1"),
        ({"policy": "synchronous", "every": 2}, "exchanges after every gradient"),
        ({"policy": "gossip", "graph": "rign"}, "Did you mean 'ring'"),
        ({"policy": "elastic", "elasticity": 0.5}, "at most 1 / workers"),
        ({"policy": "sinchronous"}, "Did you mean"),
        ({"policy": "asynchronous", "wire": room.Wire(latency=-1.0)}, "latency must be a finite number"),
        ({"policy": "asynchronous", "gradients": 0}, "gradients must be"),
        *(
            ({"policy": "asynchronous", "times": np.array(times)}, "times must be")
            for times in ([1.0, -1.0], [1.0, math.nan], [], [[[1.0]]])
        ),
    ],
)
def test_what_cannot_be_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        room.timeline(**{"times": np.ones(3), "gradients": 5} | options)


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
    for shards in (4, 8):  # with one worker nothing is gained by shards: all goes over its own link, twice
        alone = experiment.slow(shards)
        assert 2 * alone.latency + alone.server == pytest.approx(2 * (0.01 + 1.0))


@pytest.mark.parametrize("graph, first", [("ring", [1, 7]), ("exponential", [1, 2, 4])])
def test_gossip_on_each_graph_brings_all_to_one_mean(graph, first):
    assert room.neighbours(graph, 8)[0] == first and room.neighbours(graph, 1) == [[]]
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
        elif found.mixing[k]:
            x = [np.mean(x, 0)] * P
    return versions[-1] if policy in room.SHARED else centre if policy[:2] in ("el", "Do") else np.mean(x, 0)


@pytest.mark.parametrize(
    "policy, options, scaled",
    [
        ("asynchronous", {}, False), ("asynchronous", {}, True), ("synchronous", {}, False),
        ("stale-synchronous", {"bound": 0}, False), ("stale-synchronous", {"bound": 2}, False),
        ("elastic", {"every": 2}, False), ("Downpour", {"every": 2, "push": 3}, False),
        ("averaging", {"every": 3}, False), ("gossip", {"graph": "exponential"}, False),
    ],
)  # fmt: skip
def test_the_compiled_replay_does_what_plain_objects_do(policy, options, scaled):
    found = room.timeline(policy, room.durations(4, 9, 0.5, slowest=2.0, seed=1), 36, **options)
    scales = 1 / np.maximum(1, found.staleness) if scaled else None
    run = room.train(found, MODEL, DATA, seed=3, scales=scales, **SETTING)
    np.testing.assert_allclose(ravel_pytree(run.params)[0], replayed(found, scales), rtol=2e-4, atol=2e-5)


def test_an_ensemble_is_the_mean_prediction_of_members_that_differ():
    run = room.train(room.timeline("ensemble", room.durations(3, 5), 24), MODEL, DATA, seed=3, **SETTING)
    members = [jax.tree.map(lambda a, i=i: a[i], run.params) for i in range(3)]
    assert not np.allclose(members[0]["dense1"]["w"], members[1]["dense1"]["w"])
    chances = np.mean([jax.nn.softmax(MODEL.apply(own, X[:20])) for own in members], 0)
    assert run.history.test_accuracy[-1] == pytest.approx((chances.argmax(-1) == Y[:20]).mean())


@pytest.mark.parametrize("policy", ["asynchronous", "synchronous", "elastic", "gossip", "ensemble"])
def test_weights_are_averaged_over_the_last_gradients(policy):
    """Of each look, and at the end: the mean of what shorter runs end with."""
    times = room.durations(3, 9, seed=1)
    found = room.timeline(policy, times, 12, **EXTRA.get(policy, {}))
    run = room.train(found, MODEL, DATA, seed=3, every=6, averaged=2, **SETTING)
    ends = [room.train(cut(found, k), MODEL, DATA, seed=3, **SETTING).params for k in (5, 6, 11, 12)]
    means = [jax.tree.map(lambda a, b: (a + b) / 2, *ends[k : k + 2]) for k in (0, 2)]
    near(run.params, means[1])
    if policy != "ensemble":
        accuracies = [train.evaluate(MODEL, mean, DATA.x_test, DATA.y_test)[1] for mean in means]
        np.testing.assert_allclose(run.history.test_accuracy, accuracies, atol=1e-6)


def cut(found, count):
    """The first gradients of a timeline."""
    whole = ("policy", "workers", "matrices", "judged")
    return found._replace(**{name: part[:count] for name, part in found._asdict().items() if name not in whole})


def test_timelines_of_equal_shape_share_a_program():
    a, b = (room.timeline("asynchronous", room.durations(k, 30), 24) for k in (2, 8))
    room.train(a, MODEL, DATA, **SETTING)
    before = train._scan._cache_size()
    room.train(b, MODEL, DATA, **SETTING)
    room.train(room.timeline("synchronous", np.ones(4), 24), MODEL, DATA, batch_size=8, learning_rate=0.1, momentum=0.5)
    assert train._scan._cache_size() == before


@pytest.mark.parametrize(
    "options, message",
    [
        ({"momentum": 0.5}, "no momentum"), ({"batch_size": 0}, "batch_size must be"),
        ({"learning_rate": math.nan}, "rate must be a finite number"),
        ({"every": 5, "averaged": 2}, "every must divide"), ({"every": 6, "averaged": 7}, "averaged must be"),
    ],
)  # fmt: skip
def test_what_training_cannot_do_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        room.train(room.timeline("averaging", np.ones(3), 6, every=2), MODEL, DATA, **SETTING | options)


# Exercises: what is right in another way, and what is nearly right


def changed(exercise, *changes):
    """The exercise's solution, with changes."""
    code = exercise.code
    for old, new in changes:
        assert old in code
        code = code.replace(old, new)
    exec(code, names := {"np": np, "math": math})
    return exercise, names[exercise.answer]


def sampled(omega, coordinates):
    rng = np.random.default_rng(0)
    a, b = (np.array([rng.permutation(coordinates)[:omega] for _ in range(4000)]) for _ in range(2))
    return np.mean([np.isin(x, y).any() for x, y in zip(a, b, strict=True)])


def the_librarys(times, bound, gradients):
    return room.timeline("stale-synchronous", np.array(times), gradients, bound=bound).worker


ONE_BY_ONE = "log.append((i, read))", "log.append((i, read))\n        yield i, read"


@pytest.mark.parametrize(
    "exercise, answer, why",
    [
        (*changed(exercises.bounded, (" if done[j] - min(done) <= bound", "")), ""),  # asynchronous
        (*changed(exercises.bounded, ("[j for j in waiting if", "[j for j in waiting[-1:] if")), ""),
        (*changed(exercises.bounded, ("<= bound", "< bound")), ""),
        (*changed(exercises.bounded, ONE_BY_ONE, ("<= bound", "< bound")), ""),
        (exercises.usable, lambda s: math.pi / (2 * s) if s else 2, ""),  # only for large staleness
        (exercises.usable, lambda s: 2.0, ""),
        (exercises.usable, lambda s: 2 / (1 + s), ""),
        (exercises.partner, lambda i, number: i ^ 1, ""),
        (exercises.partner, lambda i, number: i + 1, ""),
        (exercises.shards, lambda workers, compute, size, latency, per_byte: workers, ""),
        (exercises.meets, sampled, "near, but the exact one"),
        (exercises.bounded, the_librarys, "the library's own timeline"),
    ],
)
def test_naive_answers_are_refused(exercise, answer, why):
    right, line = exercise.judge(answer)
    assert not right and why in line, line


@pytest.mark.parametrize(
    "exercise, answer",
    [
        changed(exercises.bounded, ONE_BY_ONE),
        (exercises.usable, lambda s: 2 * math.sin(math.pi / (4 * s + 2))),
        (exercises.partner, lambda i, number: i ^ (1 << number) if i < 32 else i),
        (exercises.partner, lambda i, number: float(i ^ (1 << number) if i < 32 else i)),
    ],
)
def test_other_right_answers_are_taken(exercise, answer):
    right, line = exercise.judge(answer)
    assert right, line


def test_shards_that_are_needed_keep_the_queue_empty():
    """As the clock says: with so many nobody waits in the end, with one fewer somebody does."""
    case = {"workers": 12, "size": 1e8, "latency": 0.01, "per_byte": 1e-9}
    needed = changed(exercises.shards)[1](compute=0.5, **case)
    for shards, waits in ((needed, False), (needed - 1, True)):
        found = room.timeline("asynchronous", np.full(12, 0.5), 1200, wire=room.network(**case, shards=shards))
        busy = 2 * 1e8 * 1e-9 / shards
        assert ((found.applied - busy - found.finish - 0.01)[-12:].max() > 1e-6) == waits


# What is recorded


def test_a_grid_grows_until_its_best_rate_is_inside():
    asked = []

    def run(settings):
        asked.extend(settings)
        return [{"score": -abs(setting["learning_rate"] - 10.0)} for setting in settings]

    assert experiment.tuned(run, (0.5, 1.0, 2.0), "score", seeds=[0]) == 8.0
    assert {s["learning_rate"] for s in asked if s["judged_on"] == "validation"} == {0.5, 1.0, 2.0, 4.0, 8.0, 16.0}


def test_the_record_has_all_that_its_plan_asks_for():
    """So no best rate is the first or the last of its grid."""
    recorded = {
        str(sorted(trial.setting.items())): trial.measures for trial in records.read("consistency-crowd").trials
    }
    asked = set()

    def run(settings):
        keys = [str(sorted(setting.items())) for setting in settings]
        asked.update(keys)
        return [recorded[key] for key in keys]

    experiment.crowd_plan(run)
    assert asked == recorded.keys()


def test_every_arm_is_judged_alike(monkeypatch):
    """By the mean over the last 200 gradients, but for those whose name says otherwise."""
    seen = {}

    def record(timeline, network, dataset, averaged, **options):
        seen[arm] = averaged
        return train.Run(None, train.History(*np.ones((4, 8))))

    monkeypatch.setattr(room, "train", record)
    for arm in [*experiment.ARMS, *experiment.DOWNPOUR, *experiment.CONTROLS]:
        assert experiment.spectrum_trial(arm, experiment.EQUAL, 0.1, 0)["accuracy"] == 100
    assert seen == {arm: 1 if "last weights" in arm else 200 for arm in seen}


# The figures


def test_a_loss_that_is_never_low_is_reached_never():
    order = room.timeline("asynchronous", np.ones(2), 300)
    assert drawing.until(order, np.full(300, 2.0)) == math.inf
    assert drawing.until(order, np.full(300, 0.5)) == order.applied[99]
    assert drawing.until(order, np.full(300, np.nan)) == math.inf
    assert drawing.in_span(order, 10.0) == (20, 0.0)


# What the notebooks suggest


@suggested_by("10_consistency")
def test_with_more_gradients_averaging_catches_up(monkeypatch):
    monkeypatch.setattr(experiment, "STEPS", 6400)
    experiment.order.cache_clear()
    trial, seeds = experiment.spectrum_trial, experiment.SPECTRUM_SEEDS[:3]
    both = [
        np.mean(
            [trial(arm, experiment.EQUAL, experiment.TUNED[experiment.EQUAL][arm], seed)["accuracy"] for seed in seeds]
        )
        for arm in ("synchronous", "averaging, every 10")
    ]
    experiment.order.cache_clear()
    assert abs(both[0] - both[1]) < 2.5, both


@suggested_by("10_consistency")
def test_only_the_smallest_rate_survives_64_workers():
    cells = Cells("10_consistency", {"(1, 8, 32)": "(1, 64)", "3200": "1600"})
    cells.update(consistency=room, model=models.mlp((40, 32, 10)), dataset=experiment.examples()["test"], np=np)
    cells.run("consistency-train", "consistency-live-run")
    accuracy = [cells["runs"][64, rate][1] for rate in (0.05, 0.2, 0.4)]
    assert accuracy[0] > 20 > max(accuracy[1:])


@suggested_by("10_consistency")
def test_more_threads_lose_more_updates_and_a_lock_loses_none():
    found = []
    for changes in ({}, {"threads=2": "threads=8"}):
        cells = Cells("10_consistency", changes)
        cells.run(*(f"consistency-{name}" for name in ("setup", "edges", "threads", "lost", "threads-run")))
        assert cells["with_lock"] == 0 and cells["lost"]["sparse, even"].mean() < 5 < cells["lost"]["dense"].mean()
        found.append(sum(values.mean() for values in cells["lost"].values()))
    assert found[0] < found[1]


def further(changes, *identities):
    cells = Cells("further/10_consistency_further", changes)
    cells.run(*(f"consistency-further-{name}" for name in ("setup", *identities)))
    return cells


@suggested_by("10_consistency_further")
def test_other_crowds_act_like_momentum_on_average_too():
    cells = further({}, "momentum-run", "momentum-plain")
    for workers in (4, 64):
        mean = cells["asynchronous_mean"](workers)
        assert np.abs(mean - cells["with_momentum"](1 - 1 / workers)).max() < 0.03


@suggested_by("10_consistency_further")
def test_64_shards_come_near_the_all_reduce_for_large_messages():
    cells = further({}, "server-formulas", "hierarchical", "all-reduce", "server-figure")
    found = cells["times_of"](100, 64, 10)
    at = cells["WORKERS"] == 64
    assert 1.0 < (found["sharded server"] / found["all-reduce"])[at][0] < 1.02
    assert (found["sharded server"] > found["all-reduce"]).sum() >= 5


@suggested_by("10_consistency_further")
def test_fewer_copies_shorten_a_batch_less():
    three_quarters, seven_eighths = (
        further({"[24]": f"[{k}]"}, "backup-run")["with_backup"].max(1).mean() for k in (24, 28)
    )
    assert three_quarters < seven_eighths
