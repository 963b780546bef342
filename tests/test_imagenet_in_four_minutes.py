"""The system against its parts written out: the step, the shares, the exchange, the prediction, the exercises."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import Cells
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.compilation_cache import compilation_cache

from dlscale import costs, gradient_compression
from dlscale import imagenet_in_four_minutes as room
from dlscale.course import records
from dlscale.imagenet_in_four_minutes import exercises, experiment
from dlscale.imagenet_in_four_minutes.command import QUICK
from dlscale.lab import intervals, program
from dlscale.parallel_training import planning

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(200, 40)).astype(np.float32), RNG.integers(0, 10, 200).astype(np.int32)
PARAMS = jax.tree.map(np.asarray, room.start(jax.random.key(3)))
ALL_ON = room.Switches(1.0, 1.0, 1.0, 1.0, 0.0)
GIVEN = {"switches": ALL_ON, "rate": np.float32(0.5), "steps": np.float32(10)}


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


# The optimizer


@pytest.mark.parametrize("switches", [room.Switches(), ALL_ON, room.Switches(lars=1.0), room.Switches(schedule=1.0)])
def test_the_optimizer_is_momentum_with_what_is_switched_on(switches):
    gradient = jax.tree.map(lambda a: RNG.normal(size=a.shape).astype(np.float32), PARAMS)
    method = room.optimizer(switches, 0.5, 10)
    update = jax.jit(method.update, compiler_options=QUICK)
    weights, state, velocity = PARAMS, method.init(PARAMS), jax.tree.map(np.zeros_like, PARAMS)
    for step in range(2):
        updates, state = update(gradient, state, weights)
        rate = 0.5 * (min((step + 1) / 1, 1) * (1 + math.cos(math.pi * step / 10)) / 2 if switches.schedule else 1)
        for layer, own in weights.items():
            for name, w in own.items():
                g, matrix = gradient[layer][name], w.ndim > 1
                its = np.linalg.norm(g) + room.DECAY * np.linalg.norm(w)
                ratio = room.TRUST * np.linalg.norm(w) / its if matrix and switches.lars and w.any() else 1
                decay = room.DECAY if matrix or not switches.spared else 0
                velocity[layer][name] = room.MOMENTUM * velocity[layer][name] + rate * ratio * (g + decay * w)
                np.testing.assert_allclose(updates[layer][name], -velocity[layer][name], rtol=2e-5, atol=1e-7)
        weights = jax.tree.map(np.add, weights, updates)


def test_norms_in_float16_stall_or_run_away_where_those_in_float32_do_not():
    w, g = np.full((100, 10), 0.1, np.float32), np.full((100, 10), 1e-3, np.float32)
    right = float(room.length(g))
    assert float(room.length(g, 1.0)) == pytest.approx(right, rel=0.05)
    assert np.isinf(room.length(g, 2.0**20)) and float(room.length(g * 1e-2, 1.0)) == 0
    for norms, moves in ((0.0, True), (2.0**20, False)):
        method = room.optimizer(room.Switches(lars=1.0), 1.0, 1, norms=norms)
        updates, _ = method.update({"a": g}, method.init({"a": w}), {"a": w})
        assert bool(np.abs(updates["a"]).max() > 0) is moves


def test_one_ratio_is_the_same_for_all_layers():
    gradient = jax.tree.map(lambda a: RNG.normal(size=a.shape).astype(np.float32), PARAMS)
    method = room.optimizer(room.Switches(lars=2.0), 1.0, 1)
    updates, _ = jax.jit(method.update, compiler_options=QUICK)(gradient, method.init(PARAMS), PARAMS)
    ratios = [
        np.median(-updates[name]["w"] / (gradient[name]["w"] + room.DECAY * PARAMS[name]["w"]))
        for name in ("stem", "conv1a", "output")
    ]
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-4)


# The net


@functools.cache
def gradient_of(half, recompute=False):
    system = room.System(recompute=recompute)
    f = lambda p, s, x, y: room.local_gradient(p, s, (x, y), 1.0, half, system)  # noqa: E731
    return jax.jit(f, compiler_options=QUICK)


def test_recomputing_changes_no_gradient_and_half_only_a_little():
    (value, gradient), (again, same) = (gradient_of(False, r)(PARAMS, 1.0, X[:50], Y[:50]) for r in (False, True))
    assert float(value) == pytest.approx(float(again), rel=1e-5)
    np.testing.assert_allclose(flat(gradient), flat(same), atol=1e-5)
    _, halved = gradient_of(True)(PARAMS, np.float32(128), X[:50], Y[:50])
    assert all(leaf.dtype == np.float16 for leaf in jax.tree.leaves(halved))
    assert np.abs(flat(halved) / 128 - flat(gradient)).max() < 0.05 * np.abs(flat(gradient)).max()


def test_the_pooling_s_gradient_is_right_however_it_is_compiled():
    f = lambda p: room.loss(p, X[:50], Y[:50], 1.0)  # noqa: E731
    direction = jax.tree.map(lambda a: RNG.normal(size=a.shape).astype(np.float32), PARAMS)
    _, found = gradient_of(False)(PARAMS, 1.0, X[:50], Y[:50])
    slope = sum(np.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (found, direction)), strict=True))
    along = jax.jit(lambda t: f(jax.tree.map(lambda a, d: a + t * d, PARAMS, direction)), compiler_options=QUICK)
    assert float(along(1e-3) - along(-1e-3)) / 2e-3 == pytest.approx(float(slope), rel=0.03)


def test_each_share_is_normalised_by_itself_and_the_extra_norm_can_be_off():
    run = jax.jit(lambda p, x, extra: room.forward(p, x, extra)[0], compiler_options=QUICK)
    together, alone = run(PARAMS, X[:100], 0.0), run(PARAMS, X[:50], 0.0)
    np.testing.assert_allclose(together[:50], alone, atol=1e-4)
    moved = PARAMS | {"extra": jax.tree.map(lambda a: a + 1, PARAMS["extra"])}
    np.testing.assert_array_equal(run(moved, X[:50], 0.0), alone)
    assert np.abs(run(moved, X[:50], 1.0) - run(PARAMS, X[:50], 1.0)).max() > 0.1


# Shares


@given(st.lists(st.floats(-9, 9), min_size=8, max_size=8))
@settings(max_examples=30, deadline=None)
def test_shapley_values_are_means_over_all_orders(numbers):
    parts = ("a", "b", "c")
    sets = [frozenset(s) for n in range(4) for s in itertools.combinations(parts, n)]
    worth = dict(zip(sets, numbers, strict=True))
    found = room.shapley(worth, parts)
    for part in parts:
        orders = [order[: order.index(part)] for order in itertools.permutations(parts)]
        wanted = np.mean([worth[frozenset(b) | {part}] - worth[frozenset(b)] for b in orders])
        assert found[part] == pytest.approx(wanted, abs=1e-9)
    assert sum(found.values()) == pytest.approx(worth[frozenset(parts)] - worth[frozenset()], abs=1e-9)


def test_shapley_wants_all_sets():
    with pytest.raises(ValueError, match="missing"):
        room.shapley({frozenset(): 0.0, frozenset("a"): 1.0}, ("a", "b"))


# The exchange


def test_joined_gradients_are_those_of_the_plan():
    for threshold in (0, 10, 60, math.inf):
        sizes = [10, 20, 5, 40, 1]
        members = room.joined(sizes, threshold)
        sent = planning.messages(sizes, [0.0] * 5, threshold, lambda n: 1.0)
        assert [sum(sizes[i] for i in m) for m in members] == [size for size, _, _ in sent]
        assert sorted(itertools.chain(*members)) == list(range(5))


@pytest.mark.parametrize("system", [room.System(fuse=1024, below=512), room.System(fuse=math.inf, below=0)])
@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_the_exchange_adds_up_within_the_bound_of_any_order(system, kind):
    parts = jax.tree.map(lambda a: RNG.normal(size=(4, *a.shape)).astype(kind), PARAMS)
    total = jax.jit(
        jax.vmap(lambda g: room.exchange(g, system, "workers"), axis_name="workers"), compiler_options=QUICK
    )(parts)
    u = 2.0**-11 if kind == np.float16 else 2.0**-24
    for terms, found in zip(jax.tree.leaves(parts), jax.tree.leaves(total), strict=True):
        assert found.dtype == kind
        exact, bound = terms.astype(float).sum(0), ((1 + u) ** 3 - 1) * np.abs(terms.astype(float)).sum(0)
        assert (np.abs(np.asarray(found, float) - exact) <= bound).all()


def test_the_notebook_s_system_sends_both_ways():
    cells = Cells("16_imagenet_in_four_minutes")
    cells.update(record=room, experiment=experiment, jax=jax, np=np, WORKERS=4, compilation_cache=compilation_cache)
    cells.run("imagenet-real-make")
    ring, hierarchical = room.System(below=0), room.System(below=math.inf)
    for kind, itemsize in ((np.float16, 2), (np.float32, 4)):
        assert {way for _, way in cells["ways"](itemsize)} == {"ring", "hierarchical"}
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, kind), cells["SHAPES"])  # noqa: B023
        sent = [
            program.schedule(lambda g: room.exchange(g, system, "workers"), 4, like).sent().tolist()  # noqa: B023
            for system in (s._replace(fuse=1024) for s in (cells["WHOLE_SYSTEM"], ring, hierarchical))
        ]
        assert all(a != b for a, b in itertools.combinations(sent, 2))


def test_workers_do_what_one_device_does_on_all_their_examples():
    system = room.System(fuse=math.inf, below=0)
    state = room.at_rest(np.uint32(1), False, system, GIVEN)
    step = jax.vmap(room.worker(False, system, "workers"), in_axes=(None, 0, None), axis_name="workers")
    shares = (X.reshape(4, 50, 40), Y.reshape(4, 50))
    (params, _, _), value = jax.jit(step, compiler_options=QUICK)(state, shares, GIVEN)
    alone = jax.jit(experiment.step_of(False), compiler_options=QUICK)
    (wanted, _), loss = alone(state[:2], np.arange(200), GIVEN, jnp.asarray(X), jnp.asarray(Y))
    np.testing.assert_allclose(value, float(loss), rtol=1e-5)
    for worker in range(4):
        np.testing.assert_allclose(flat([leaf[worker] for leaf in jax.tree.leaves(params)]), flat(wanted), atol=2e-5)


def test_a_worker_that_sends_little_has_what_it_needs():
    system = room.System(keep=0.05, recompute=True)
    state = room.at_rest(np.uint32(1), False, system, GIVEN)
    step = jax.vmap(room.worker(False, system, "workers"), in_axes=(None, 0, None), axis_name="workers")
    after, _ = jax.eval_shape(step, state, (X[:100].reshape(2, 50, 40), Y[:100].reshape(2, 50)), GIVEN)
    assert jax.tree.map(lambda a: (2, *np.shape(a)), state) == jax.tree.map(lambda a: a.shape, after)


# The prediction

BARE = room.MACHINES["P40, 2016"]


def test_a_layer_under_its_roof():
    layer = planning.LayerSize("a", "conv", 1000, 100, 200, 4e6)
    slow = BARE._replace(flops=1e9, half=2e9, memory=1e12, reached=1.0)
    there, back = room.layer_seconds(layer, 10, slow, False, (0, 0))
    assert there == pytest.approx(4e7 / 1e9) and back == pytest.approx(2 * there)
    assert room.layer_seconds(layer, 10, slow, True, (0, 0))[0] == pytest.approx(there / 2)
    starved = slow._replace(memory=1e3)
    assert room.layer_seconds(layer, 10, starved, True, (0, 0))[0] == pytest.approx(2 * (10 * 300 + 1000) / 1e3)
    assert room.layer_seconds(layer, 10, starved, True, (3, 0))[0] == pytest.approx(2 * (10 * 900 + 1000) / 1e3)


def test_all_reduces_are_the_formulas_and_hybrid_is_the_faster():
    for size in (1e3, 1e8):
        ring, levels, hybrid = (room.all_reduce_seconds(size, 64, BARE, a) for a in ("ring", "hierarchical", "hybrid"))
        link, near = BARE.outside, BARE.inside
        assert ring == pytest.approx(2 * 63 * link.latency + 2 * size * 63 / 64 / link.bandwidth)
        tree = costs.formula("tree", 8, size, near.latency, 1 / near.bandwidth)
        assert levels == pytest.approx(tree + 2 * 7 * link.latency + 2 * size * 7 / 8 / link.bandwidth)
        assert hybrid == min(ring, levels)


def test_a_step_waits_for_its_last_message_and_a_run_has_whole_steps():
    network = room.NETWORKS["AlexNet"]
    found = room.predict(network, BARE, 64, 32, fuse=4e6)
    assert found.messages[0][1] >= found.forward[-1] and found.messages[-1][1] >= found.backward[-1]
    assert sum(m[0] for m in found.messages) == 2 * sum(layer.parameters for layer in network.layers)
    update = room.UPDATE * 4 * sum(layer.parameters for layer in network.layers) / BARE.memory
    assert found.step == pytest.approx(max(found.backward[-1], found.messages[-1][2]) + update)
    assert found.minutes == pytest.approx(math.ceil(95 * room.IMAGES / 2048) * found.step / 60)
    late = room.predict(network, BARE, 64, 32, fuse=4e6, overlap=False)
    assert late.step >= found.step and late.messages[0][1] == late.backward[-1]
    assert room.predict(network, BARE, 1, 32).messages == []


# The record


def test_the_record_is_whole_and_tuned_inside_its_grid():
    record = records.read("imagenet_in_four_minutes-switches")
    for switched in itertools.product((0.0, 1.0), repeat=len(room.PARTS)):
        chosen = dict(zip(room.PARTS, switched, strict=True)) | {"batch_size": experiment.LARGE, "norms": 0.0}
        chosen["decay"] = room.DECAY
        assert len(record.values("accuracy", judged_on="test", **chosen)) == len(experiment.SEEDS)
        tried = record.options("learning_rate", judged_on="validation", **chosen)
        assert tried == list(experiment.RATES)


def test_longer_runs_compressed_ones_and_casts_are_tuned_alike():
    record = records.read("imagenet_in_four_minutes-further")
    fresh, cast = list(experiment.FRESH_SEEDS), list(experiment.CAST_SEEDS)
    for arm, seeds in (
        ({"batch_size": experiment.LARGE, "epochs": 20, "half": 0.0}, fresh + cast),
        ({"batch_size": experiment.LARGE, "epochs": 20, "half": 1.0}, cast),
        *(({"batch_size": size, "epochs": 80}, fresh) for size in (experiment.LARGE, experiment.SHARE)),
        *(({"keep": keep}, fresh) for keep in (0.1, 0.01)),
    ):
        assert record.options("learning_rate", judged_on="validation", **arm) == list(experiment.RATES)
        assert record.options("seed", judged_on="test", **arm) == seeds
        (best,) = record.options("learning_rate", judged_on="test", **arm)
        assert experiment.RATES[0] < best < experiment.RATES[-1]


def test_what_parts_are_worth_is_tuned_and_tested_alike_at_both_lengths():
    record = records.read("imagenet_in_four_minutes-longer")
    four = {"lars": 1.0, "schedule": 1.0, "spared": 1.0, "extra_norm": 1.0}
    for epochs in (20, 80):
        alone = {"lars": 0.0, "spared": 0.0, "extra_norm": 0.0}
        for less in ({}, {"lars": 0.0}, {"extra_norm": 0.0}, alone):
            arm = {"epochs": epochs, "half": 0.0} | four | less
            assert record.options("learning_rate", judged_on="validation", **arm) == list(experiment.RATES)
            assert record.options("seed", judged_on="validation", **arm) == list(experiment.TUNING_SEEDS)
            assert record.options("seed", judged_on="test", **arm) == list(experiment.LONGER_SEEDS)
            assert len(record.options("learning_rate", judged_on="test", **arm)) == 1


def test_skipped_updates_are_counted_for_the_system_of_the_card():
    skips, further = (records.read(f"imagenet_in_four_minutes-{name}") for name in ("skips", "further"))
    assert skips.options("learning_rate") == further.options("learning_rate", judged_on="test", half=1.0)
    assert skips.options("seed") == list(experiment.CAST_SEEDS)
    counts = skips.values("skipped")
    assert (counts == counts.round()).all() and (counts >= 0).all()


@pytest.mark.long  # compiles a step of both senders
def test_who_sends_few_entries_remembers_the_others():
    step, (order, x, y) = experiment.step_of_senders(0.1), (np.arange(100, dtype=np.int32), X, Y)
    params, memory = jax.tree.map(np.asarray, experiment.begin(False, np.uint32(3), GIVEN))
    unsent = room.compressor(room.System(keep=0.1)).init(params)
    unsent = jax.tree.map(lambda a: np.zeros((2, *a.shape), a.dtype), unsent)
    (_, _, left), _ = jax.jit(step, compiler_options=QUICK)((params, memory, unsent), order, GIVEN, x, y)
    for worker in range(2):
        own = slice(50 * worker, 50 * worker + 50)
        _, gradient = gradient_of(False)(PARAMS, 1.0, X[own], Y[own])
        for layer, name in (("conv1a", "w"), ("output", "w")):
            whole, rest = gradient[layer][name], left.own[layer][name][worker]
            kept = rest == 0
            assert kept.sum() == gradient_compression.count(0.1, whole.size)
            np.testing.assert_allclose(rest[~kept], whole[~kept], atol=1e-5)
            assert np.abs(whole[kept]).min() >= np.abs(whole[~kept]).max() - 1e-5


def test_rows_are_whole_batches_in_a_new_order_each_epoch():
    rows = experiment.rows(0, 2, 1000)
    assert rows.shape == (6, 1000)
    assert sorted(rows[:3].ravel()) == sorted(rows[3:].ravel()) == list(range(3000))
    assert (rows[:3] != rows[3:]).any()


# Exercises


def test_a_step_in_float16_or_without_a_check_is_refused():
    def hasty(w, v, g, scale, rate):
        norm = np.sqrt(np.sum(g * g)) / np.float16(scale)
        ratio = room.TRUST * np.linalg.norm(w) / (norm + room.DECAY * np.linalg.norm(w)) if norm > 0 else 1.0
        v = np.float32(room.MOMENTUM * v + rate * ratio * (g.astype(np.float32) / scale + room.DECAY * w))
        return w - v, v

    def unchecked(w, v, g, scale, rate):
        g = g.astype(np.float64) / scale
        ours, its = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
        ratio = room.TRUST * ours / (its + room.DECAY * ours) if ours > 0 and its > 0 else 1.0
        v = room.MOMENTUM * v + rate * ratio * (g + room.DECAY * w)
        return w - v, v

    def other_route(w, v, g, scale, rate):
        found = unchecked(w, v, g, scale, rate)
        return found if np.isfinite(g).all() else (w, v)

    def unguarded(w, v, g, scale, rate):
        if not np.isfinite(g).all():
            return w, v
        g = g.astype(np.float64) / scale
        ours, its = np.linalg.norm(w), np.linalg.norm(g)
        ratio = room.TRUST * ours / (its + room.DECAY * ours) if ours > 0 else 1.0  # |g| = 0 is not asked for
        v = room.MOMENTUM * v + rate * ratio * (g + room.DECAY * w)
        return w - v, v

    def unscaled_early(w, v, g, scale, rate):
        return other_route(w, v, g / np.float16(scale), 1.0, rate)

    assert "unscaled" in exercises.mixed_step.judge(unscaled_early)[1]
    assert "all zero" in exercises.mixed_step.judge(unguarded)[1]
    assert "overflow" in exercises.mixed_step.judge(hasty)[1]
    assert "infinity" in exercises.mixed_step.judge(unchecked)[1]
    assert exercises.mixed_step.judge(other_route)[0]


def test_shares_by_any_route_are_right_and_other_means_are_not():
    def over_sets(worth, parts):
        return room.shapley({frozenset(s): w for s, w in worth.items()}, parts)

    def marginals(worth, part, parts):
        rest = [p for p in parts if p != part]
        sets = [s for size in range(len(parts)) for s in itertools.combinations(rest, size)]
        return [worth[tuple(sorted((*s, part)))] - worth[tuple(sorted(s))] for s in sets]

    def one_order(worth, parts):
        keys = [tuple(sorted(parts[:n])) for n in range(len(parts) + 1)]
        return {part: worth[keys[n + 1]] - worth[keys[n]] for n, part in enumerate(parts)}

    def pick(number):
        return lambda worth, parts: {part: marginals(worth, part, parts)[number] for part in parts}

    assert exercises.shapley.judge(over_sets)[0]
    assert exercises.shapley.judge(lambda *given: {part: jnp.asarray(v) for part, v in over_sets(*given).items()})[0]
    over_all_sets = lambda w, parts: {part: np.mean(marginals(w, part, parts), axis=0) for part in parts}  # noqa: E731
    for wrong in (pick(0), pick(-1), one_order, over_all_sets):
        assert "add up" in exercises.shapley.judge(wrong)[1]
    for wrong in (lambda *_: [1, 2, 3], lambda *_: {"a": 1.0}, lambda w, parts: dict.fromkeys(parts, "much")):
        assert not exercises.shapley.judge(wrong)[0]


def test_no_single_threshold_serves_all_networks():
    assert not any(exercises.threshold.judge(lambda *_, f=f: f)[0] for f in exercises.THRESHOLDS)
    by_formula = lambda latency, bandwidth: min(  # noqa: E731
        1.1 ** np.arange(120, 200), key=lambda fuse: exercises.step_seconds(latency, bandwidth, fuse)
    )
    assert exercises.threshold.judge(by_formula)[0]
    by_octaves = lambda latency, bandwidth: min(  # noqa: E731  the notebook's own grid
        2.0 ** np.arange(16, 27.5, 0.5), key=lambda fuse: exercises.step_seconds(latency, bandwidth, fuse)
    )
    assert exercises.threshold.judge(by_octaves)[0]


def test_plans_that_meet_the_target_and_plans_that_do_not():
    good = {"machine": "A100, 2020", "gpus": 256, "share": 20, "fuse": 24e6}
    assert exercises.plan.judge(good)[0]
    for whole in (np.int64, np.int32, np.array, jnp.int32):  # an entry of the notebook's own GPUS is NumPy's
        assert exercises.plan.judge(good | {"gpus": whole(256), "share": whole(20)})[0]
    for broken in (256.5, "256", 0, -8, None, np.array([256])):
        assert not exercises.plan.judge(good | {"gpus": broken})[0]
    refused = ({"fuse": 0}, {"fuse": 4e6}, {"fuse": math.inf}, {"gpus": 1024, "share": 5}, {"share": 64}, {"gpus": 250})
    for change in (*refused, {"machine": "P40, 2016"}, {"machine": "V100, 2017"}):
        bad = good | change
        assert not exercises.plan.judge(bad)[0], change


# What the last section suggests


def test_the_suggestions_work():
    cells = Cells("16_imagenet_in_four_minutes")
    cells.update(record=room, records=records, experiment=experiment, PARTS=room.PARTS, DECAY=room.DECAY, np=np)
    cells.update(itertools=itertools, intervals=intervals)
    cells.run("imagenet-read", "imagenet-sets")
    fewer = {parts: cells["WORTH"][parts] for parts in cells["SETS"] if "schedule" not in parts}
    assert (
        len(room.shapley(fewer, [part for part in cells["FACTORS"] if part != "schedule"])) == len(cells["FACTORS"]) - 1
    )
    network, slow = room.NETWORKS["ResNet-50"], BARE._replace(outside=BARE.outside._replace(bandwidth=1.25e9))
    minutes = [room.predict(network, slow, 2048, 32, fuse=fuse).minutes for fuse in (0, 4e6)]
    assert min(minutes) > room.predict(network, BARE, 2048, 32, fuse=4e6).minutes


def test_a_twentieth_sends_less_only_among_few_workers():
    cells = Cells("16_imagenet_in_four_minutes")
    cells.update(record=room, experiment=experiment, records=records, intervals=intervals, jax=jax, np=np, WORKERS=4)
    cells.update(program=program, gradient_compression=gradient_compression, compilation_cache=compilation_cache)
    cells.run("imagenet-real-make")
    exec(cells.sources["imagenet-compression"].partition("\nSENT")[0], cells.data)
    system = cells["WHOLE_SYSTEM"]
    for keep, workers, pays in ((0.05, 8, True), (0.2, 8, False), (0.01, 20, True), (0.1, 20, False)):
        sent = [cells["sent_by_one"](system._replace(keep=share), workers) for share in (keep, 1.0)]
        assert bool(sent[0] < sent[1]) == pays
