"""The system against its parts written out: the step, the shares, the exchange, the prediction, the exercises."""

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

from dlscale import costs
from dlscale import imagenet_in_four_minutes as room
from dlscale.course import records
from dlscale.imagenet_in_four_minutes import DECAY, MOMENTUM, TRUST, exercises, experiment
from dlscale.lab import program
from dlscale.parallel_training import planning

QUICK = {"xla_backend_optimization_level": 0}  # for a few steps: to compile well would take longer than they do
RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 40)).astype(np.float32)
PARAMS = jax.tree.map(np.asarray, room.init(jax.random.key(3)))
ALL_ON = room.Switches(1.0, 1.0, 1.0, 0.0)
P40 = room.MACHINES["P40, 2016"]
LESSON, FURTHER = "16_imagenet_in_four_minutes", "further/16_imagenet_in_four_minutes_further"


@pytest.mark.parametrize("switches", [room.Switches(), ALL_ON, room.Switches(lars=1.0)])
def test_the_optimizer_is_momentum_with_what_is_switched_on(switches):
    gradient = jax.tree.map(lambda a: RNG.normal(size=a.shape).astype(np.float32), PARAMS)
    method = room.optimizer(switches, 0.5, 10)
    update = jax.jit(method.update, compiler_options=QUICK)
    weights, state, velocity = PARAMS, method.init(PARAMS), jax.tree.map(np.zeros_like, PARAMS)
    for step in range(2):
        updates, state = update(gradient, state, weights)
        rate = 0.5 * min((step + 1) / 1, 1) * (1 + math.cos(math.pi * step / 10)) / 2
        for layer, own in weights.items():
            for name, w in own.items():
                g, matrix = gradient[layer][name], w.ndim > 1
                its = np.linalg.norm(g) + DECAY * np.linalg.norm(w)
                ratio = TRUST * np.linalg.norm(w) / its if matrix and switches.lars and w.any() else 1
                decay = DECAY if matrix or not switches.no_decay else 0
                velocity[layer][name] = MOMENTUM * velocity[layer][name] + rate * ratio * (g + decay * w)
                np.testing.assert_allclose(updates[layer][name], -velocity[layer][name], rtol=2e-5, atol=1e-7)
        weights = jax.tree.map(np.add, weights, updates)


def test_norms_in_float16_leave_its_range():
    g = np.full((100, 10), 1e-3, np.float32)
    assert float(room.length(g, 1.0)) == pytest.approx(float(room.length(g)), rel=0.05)
    assert np.isinf(room.length(g, 2.0**20)) and float(room.length(g * 1e-2, 1.0)) == 0


def test_each_share_is_normalised_by_itself_and_the_extra_norm_can_be_off():
    run = jax.jit(lambda p, x, extra: room.forward(p, x, extra)[0], compiler_options=QUICK)
    np.testing.assert_allclose(run(PARAMS, X[:100], 0.0)[:50], run(PARAMS, X[:50], 0.0), atol=1e-4)
    moved = PARAMS | {"extra": jax.tree.map(lambda a: a + 1, PARAMS["extra"])}
    off, on = (run(moved, X[:50], extra) - run(PARAMS, X[:50], extra) for extra in (0.0, 1.0))
    assert (off == 0).all() and np.abs(on).max() > 0.1


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
    with pytest.raises(ValueError, match="missing"):
        room.shapley({s: w for s, w in worth.items() if s != frozenset("a")}, parts)


SYSTEMS = [room.System(), room.System(fuse=1024, below=math.inf), room.System(fuse=1024, below=1024)]


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_every_way_of_sending_gives_the_sum_within_the_bound_of_any_order(kind):
    parts = jax.tree.map(lambda a: RNG.normal(size=(8, *a.shape)).astype(kind), PARAMS)
    u, counted = 2.0**-11 if kind == np.float16 else 2.0**-24, set()
    assert room.joined([10, 20, 5, 40, 1], 30) == [[0, 1], [2, 3], [4]]
    for system in SYSTEMS:
        exchange = functools.partial(room.exchange, system=system, axis_name="workers")
        total = jax.jit(jax.vmap(exchange, axis_name="workers"), compiler_options=QUICK)(parts)
        for terms, found in zip(jax.tree.leaves(parts), jax.tree.leaves(total), strict=True):
            exact, bound = terms.astype(float).sum(0), ((1 + u) ** 7 - 1) * np.abs(terms.astype(float)).sum(0)
            assert (np.abs(np.asarray(found, float) - exact) <= bound).all()
        schedule = program.schedule(exchange, 8, jax.tree.map(lambda a: a.astype(kind), PARAMS))
        counted.add((sum(len(m.pairs) for one in schedule.rounds for m in one.messages), int(schedule.sent().sum())))
    assert len(counted) == len(SYSTEMS)


def test_the_lesson_s_workers_do_what_one_device_does_on_all_their_examples():
    cells = Cells(LESSON)
    cells.run(*(f"imagenet-{name}" for name in ("setup", "worker", "programs", "batches", "train")))
    cells.data |= {"STEPS": 3} | {name: cells[name][:3] for name in ("x_of", "y_of")}
    given, wanted = {"switches": ALL_ON, "rate": 0.5, "steps": 3}, []
    state, step = experiment.begin(False, np.uint32(0), given), jax.jit(experiment.step_of(False))
    x, y = jnp.asarray(cells["signals"].x_train), jnp.asarray(cells["signals"].y_train.astype(np.int32))
    for rows in cells["rows"][:3]:
        state, loss = step(state, rows.ravel(), given, x, y)
        wanted.append(float(loss))
    for system in (room.System(fuse=math.inf), room.System(fuse=math.inf, below=math.inf)):
        np.testing.assert_allclose(cells["train"](ALL_ON, system), wanted, rtol=1e-3)


def test_a_layer_under_its_roof():
    layer = planning.LayerSize("a", "conv", 1000, 100, 200, 4e6)
    slow = P40._replace(flops=1e9, half=2e9, memory=1e12, reached=1.0)
    assert room.layer_seconds(layer, 10, slow, False, (0, 0)) == pytest.approx((0.04, 0.08))
    assert room.layer_seconds(layer, 10, slow, True, (0, 0)) == pytest.approx((0.02, 0.04))
    starved = slow._replace(memory=1e3)
    assert room.layer_seconds(layer, 10, starved, True, (3, 0))[0] == pytest.approx(2 * (10 * 900 + 1000) / 1e3)


@pytest.mark.parametrize("ring", room.RINGS)
def test_all_reduces_are_the_formulas_and_hybrid_is_the_faster(ring):
    for size in (1e3, 1e8):
        ways = ("ring", "hierarchical", "hybrid")
        flat, levels, hybrid = (room.all_reduce_seconds(size, 64, P40, way, ring) for way in ways)
        latency = 5e-6 if ring == room.RINGS[0] else (7 * 2e-6 + 5e-6) / 8
        assert flat == pytest.approx(2 * 63 * (latency + size / 64 / P40.outside.bandwidth))
        tree = costs.formula("tree", 8, size, P40.inside.latency, 1 / P40.inside.bandwidth)
        assert levels == pytest.approx(tree + 2 * 7 * (5e-6 + size / 8 / P40.outside.bandwidth))
        assert hybrid == min(flat, levels)


@pytest.mark.parametrize(("workers", "size"), [(64, 1e3), (2048, 1024), (1024, 4e6), (64, 1e8)])
def test_the_ring_along_the_nodes_is_as_fast_as_its_messages(workers, size):
    waits, along = (room.all_reduce_seconds(size, workers, P40, "ring", ring) for ring in room.RINGS)
    assert 0.97 < room.simulated_ring(size, workers, P40) / along < 1.01
    assert room.simulated_ring(size, workers, P40._replace(node=1)) == pytest.approx(waits)  # no message is faster


def test_a_step_waits_for_its_last_message_and_a_run_has_whole_steps():
    network = room.NETWORKS["AlexNet"]
    found = room.timeline(network, P40, 64, 32, fuse=4e6)
    assert found.messages[0][1] >= found.forward[-1] and found.messages[-1][1] >= found.backward[-1]
    assert sum(m[0] for m in found.messages) == 2 * sum(layer.parameters for layer in network.layers)
    update = room.UPDATE * 4 * sum(layer.parameters for layer in network.layers) / P40.memory
    assert found.step == pytest.approx(max(found.backward[-1], found.messages[-1][2]) + update)
    assert found.minutes == pytest.approx(math.ceil(95 * room.IMAGES / 2048) * found.step / 60)
    late = room.timeline(network, P40, 64, 32, fuse=4e6, overlap=False)
    assert late.step >= found.step and late.messages[0][1] == late.backward[-1]


def test_every_variant_is_tuned_inside_the_grid_and_tested_on_the_reserved_seeds():
    record = records.read("imagenet_in_four_minutes-confirmed")
    for arm in experiment.ARMS:
        rates = [*experiment.RATES, 4.0] if arm["norm_scale"] else [*experiment.RATES]
        assert record.options("learning_rate", judged_on="validation", **arm) == rates
        assert record.options("seed", judged_on="validation", **arm) == [*experiment.TUNING_SEEDS]
        assert record.options("seed", judged_on="test", **arm) == [*experiment.SEEDS]
        (best,) = record.options("learning_rate", judged_on="test", **arm)
        assert rates[0] < best < rates[-1]


def stepped(w, v, g, scale, rate, checked=True, guarded=True):
    if checked and not np.isfinite(g).all():
        return w, v
    g = g.astype(np.float64) / scale
    ours, its = np.sqrt((w**2).sum()), np.sqrt((g**2).sum())
    ratio = TRUST * ours / (its + DECAY * ours) if ours > 0 and (its > 0 or not guarded) else 1.0
    v = MOMENTUM * v + rate * ratio * (g + DECAY * w)
    return w - v, v


def hasty(w, v, g, scale, rate):
    norm = np.sqrt(np.sum(g * g)) / np.float16(scale)
    ratio = TRUST * np.linalg.norm(w) / (norm + DECAY * np.linalg.norm(w)) if norm > 0 else 1.0
    v = np.float32(MOMENTUM * v + rate * ratio * (g.astype(np.float32) / scale + DECAY * w))
    return w - v, v


def test_a_step_in_float16_or_without_a_check_is_refused():
    assert exercises.mixed_step.judge(stepped)[0]
    for wrong, why in (
        (lambda w, v, g, scale, rate: stepped(w, v, g / np.float16(scale), 1.0, rate), "unscaled"),
        (functools.partial(stepped, guarded=False), "all zero"),
        (functools.partial(stepped, checked=False), "infinity"),
        (hasty, "overflow"),
    ):
        assert why in exercises.mixed_step.judge(wrong)[1]


def never_over(sizes, threshold):
    messages = [[]]
    for size in sizes:
        if messages[-1] and sum(messages[-1]) + size > threshold:
            messages.append([])
        messages[-1].append(size)
    return messages


def test_fusion_by_any_route_is_right_and_packs_are_not():
    def by_library(sizes, threshold):
        return [tuple(np.array(sizes)[m]) for m in room.joined(sizes, threshold)]

    assert exercises.fusion.judge(by_library)[0]
    for wrong, why in (
        (lambda sizes, t: by_library(sizes, t)[:-1], "are sent"),
        (lambda sizes, t: by_library(sorted(sizes), t), "order"),
        (lambda sizes, _: [sizes], "longer"),
        (never_over, "longer"),
    ):
        assert why in exercises.fusion.judge(wrong)[1]


def test_shares_by_any_route_are_right_and_other_means_are_not():
    def over_sets(worth, parts):
        return room.shapley({frozenset(s): jnp.asarray(w) for s, w in worth.items()}, parts)

    def mean_over_sets(worth, parts, which=slice(None)):
        found = {}
        for part in parts:
            rest = [p for p in parts if p != part]
            sets = [s for size in range(len(parts)) for s in itertools.combinations(rest, size)]
            gains = [worth[tuple(sorted((*s, part)))] - worth[tuple(sorted(s))] for s in sets]
            found[part] = np.mean(gains[which], axis=0)
        return found

    assert exercises.shapley.judge(over_sets)[0]
    for which in (slice(None), slice(1), slice(-1, None)):  # all sets alike, alone, last
        assert "add up" in exercises.shapley.judge(functools.partial(mean_over_sets, which=which))[1]


def test_plans_that_meet_the_target_and_plans_that_do_not():
    good = {"machine": "A100, 2020", "gpus": 256, "share": 20, "fuse": 24e6}
    for change in ({}, {"fuse": 16e6}, {"fuse": 48e6}, {"gpus": np.int64(256), "share": jnp.int32(20)}):
        assert exercises.plan.judge(good | change)[0]
    refused = ({"fuse": 0}, {"fuse": 4e6}, {"fuse": math.inf}, {"gpus": 1024, "share": 5}, {"share": 64}, {"gpus": 250})
    broken = [{"gpus": gpus} for gpus in (256.5, "256", 0, -8, None, np.array([256]))]
    for change in (*refused, *broken, {"machine": "P40, 2016"}, {"machine": "V100, 2017"}):
        assert not exercises.plan.judge(good | change)[0], change


@pytest.mark.parametrize("name", ["mixed_step", "fusion", "shapley", "plan"])
def test_solutions_pass_as_they_are_pasted_into_the_notebook(name):
    exercise, further = getattr(exercises, name), name == "shapley"
    cells = Cells(FURTHER if further else LESSON)
    cells.run("imagenet-further-setup" if further else "imagenet-setup")
    exec(exercise.code, cells.data)
    assert exercise.judge(cells[exercise.answer])[0]


def test_the_suggestions_work():
    network, slow = room.NETWORKS["ResNet-50"], P40._replace(outside=P40.outside._replace(latency=5e-5))
    early, late = (room.timeline(network, slow, 2048, 32, fuse=fuse).minutes for fuse in (4e6, 16e6))
    assert late < early
    assert room.timeline(network, room.MACHINES["A100, 2020"], 2048, 32, fuse=4e6).minutes < 6
    latencies = [room.ring_latency(P40._replace(node=node), room.RINGS[1]) for node in (8, 16, 1000)]
    assert latencies[0] > latencies[1] > latencies[2] > P40.inside.latency
