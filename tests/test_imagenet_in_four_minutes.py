"""The system against its parts written out: the step, the shares, the exchange, the prediction, the exercises."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Cells

from dlscale import imagenet_in_four_minutes as room
from dlscale.imagenet_in_four_minutes import DECAY, MOMENTUM, TRUST, exercises, experiment
from dlscale.lab import program
from dlscale.parallel_training import planning

QUICK = {"xla_backend_optimization_level": 0}  # for a few steps: to compile well would take longer than they do
RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 40)).astype(np.float32)
PARAMS = jax.tree.map(np.asarray, room.init(jax.random.key(3)))
ALL_ON = room.Switches(1.0, 1.0, 1.0, 0.0)
P40 = room.MACHINES["P40, 2016"]


@pytest.mark.parametrize("no_decay", [0.0, 1.0])
def test_without_lars_the_optimizer_is_momentum_with_warm_up_and_decay(no_decay):
    gradient = jax.tree.map(lambda a: RNG.normal(size=a.shape).astype(np.float32), PARAMS)
    decayed = jax.tree.map(lambda w: w.ndim > 1 or not no_decay, PARAMS)
    rate = lambda step: 0.25 * jnp.minimum((step + 1) / 2, 1) * (1 + jnp.cos(jnp.pi * step / 20))  # noqa: E731
    library = optax.chain(
        optax.add_decayed_weights(DECAY, decayed), optax.scale_by_schedule(rate), optax.trace(MOMENTUM), optax.scale(-1)
    )
    found = []
    for method in (room.optimizer(room.Switches(no_decay=no_decay), 0.5, 20), library):
        _, state = method.update(gradient, method.init(PARAMS), PARAMS)
        found.append(method.update(gradient, state, PARAMS)[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), *found)


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


def test_shapley_values_are_means_over_all_orders():
    worth = {frozenset(s): RNG.normal() for n in range(4) for s in itertools.combinations("abc", n)}
    for part, found in room.shapley(worth, "abc").items():
        before = [frozenset(order[: order.index(part)]) for order in itertools.permutations("abc")]
        assert found == pytest.approx(np.mean([worth[b | {part}] - worth[b] for b in before]))
    with pytest.raises(ValueError, match="missing"):
        room.shapley({s: w for s, w in worth.items() if s != frozenset("a")}, "abc")


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_every_way_of_sending_gives_the_sum_within_the_bound_of_any_order(kind):
    parts = jax.tree.map(lambda a: RNG.normal(size=(8, *a.shape)).astype(kind), PARAMS)
    u, counted = 2.0**-11 if kind == np.float16 else 2.0**-24, set()
    assert room.joined([10, 20, 5, 40, 1], 30) == [[0, 1], [2, 3], [4]]
    for system in (room.System(), room.System(fuse=1024, below=math.inf), room.System(fuse=1024, below=1024)):
        exchange = functools.partial(room.exchange, system=system, axis_name="workers")
        total = jax.jit(jax.vmap(exchange, axis_name="workers"), compiler_options=QUICK)(parts)
        for terms, found in zip(jax.tree.leaves(parts), jax.tree.leaves(total), strict=True):
            exact, bound = terms.astype(float).sum(0), ((1 + u) ** 7 - 1) * np.abs(terms.astype(float)).sum(0)
            assert (np.abs(np.asarray(found, float) - exact) <= bound).all()
        schedule = program.schedule(exchange, 8, jax.tree.map(lambda a: a.astype(kind), PARAMS))
        counted.add((sum(len(m.pairs) for one in schedule.rounds for m in one.messages), int(schedule.sent().sum())))
    assert len(counted) == 3, "the counts differ"


def test_the_lesson_s_workers_do_what_one_device_does_on_all_their_examples():
    cells = Cells("16_imagenet_in_four_minutes")
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
    starved = slow._replace(memory=1e3)
    assert room.layer_seconds(layer, 10, starved, True, (3, 0))[0] == pytest.approx(2 * (10 * 900 + 1000) / 1e3)


@pytest.mark.parametrize(("ring", "latency"), [*zip(room.RINGS, (5e-6, (7 * 2e-6 + 5e-6) / 8), strict=True)])
@pytest.mark.parametrize("size", [1e3, 1e8])
def test_all_reduces_are_the_formulas_and_hybrid_is_the_faster(ring, latency, size):
    ways = ("ring", "hierarchical", "hybrid")
    flat, levels, hybrid = (room.all_reduce_seconds(size, 64, P40, way, ring) for way in ways)
    assert flat == pytest.approx(2 * 63 * (latency + size / 64 / P40.outside.bandwidth))
    tree = 2 * 3 * (P40.inside.latency + size / P40.inside.bandwidth)
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


def never_over(sizes, threshold):
    messages = [[]]
    for size in sizes:
        if messages[-1] and sum(messages[-1]) + size > threshold:
            messages.append([])
        messages[-1].append(size)
    return messages


def by_library(sizes, threshold):
    return [tuple(np.array(sizes)[m]) for m in room.joined(sizes, threshold)]


def over_sets(worth, parts):
    return room.shapley({frozenset(s): jnp.asarray(w) for s, w in worth.items()}, parts)


def mean_over_sets(worth, parts, which=slice(None)):
    found = {}
    for part in parts:
        sets = [s for s in worth if part not in s]
        found[part] = np.mean([worth[tuple(sorted((*s, part)))] - worth[s] for s in sets][which], axis=0)
    return found


GOOD = {"machine": "A100, 2020", "gpus": 256, "share": 20, "fuse": 24e6}
RIGHT = [{}, {"fuse": 16e6}, {"fuse": 48e6}, {"gpus": np.int64(256), "share": jnp.int32(20)}]
WRONG = [{"fuse": 0}, {"fuse": 4e6}, {"fuse": math.inf}, {"gpus": 1024, "share": 5}, {"share": 64}, {"gpus": 250}]
WRONG += [{"gpus": gpus} for gpus in (256.5, "256", 0, -8, None)] + [{"machine": "V100, 2017"}]
ANSWERS = [
    ("mixed_step", stepped, "right"),
    ("mixed_step", lambda w, v, g, scale, rate: stepped(w, v, g / np.float16(scale), 1.0, rate), "unscaled"),
    ("mixed_step", functools.partial(stepped, guarded=False), "all zero"),
    ("mixed_step", functools.partial(stepped, checked=False), "infinity"),
    ("mixed_step", hasty, "overflow"),
    ("fusion", by_library, "right"),
    ("fusion", lambda sizes, t: by_library(sizes, t)[:-1], "all gradients"),
    ("fusion", lambda sizes, t: by_library(sorted(sizes), t), "order"),
    ("fusion", lambda sizes, _: [sizes], "longer"),
    ("fusion", never_over, "longer"),
    ("shapley", over_sets, "right"),
    ("shapley", mean_over_sets, "add up"),
    ("shapley", functools.partial(mean_over_sets, which=slice(1)), "add up"),  # alone
    ("shapley", functools.partial(mean_over_sets, which=slice(-1, None)), "add up"),  # last
    *(("plan", GOOD | change, "right") for change in RIGHT),
    *(("plan", GOOD | change, "not yet") for change in WRONG),
]


@pytest.mark.parametrize(("name", "answer", "said"), ANSWERS)
def test_right_answers_are_accepted_and_wrong_ones_refused(name, answer, said):
    right, line = getattr(exercises, name).judge(answer)
    assert right == (said == "right") and said in line


def test_the_suggestions_work():
    network, slow = room.NETWORKS["ResNet-50"], P40._replace(outside=P40.outside._replace(latency=5e-5))
    early, late = (room.timeline(network, slow, 2048, 32, fuse=fuse).minutes for fuse in (4e6, 16e6))
    assert late < early
    latencies = [room.ring_latency(P40._replace(node=node), room.RINGS[1]) for node in (8, 16, 1000)]
    assert latencies[0] > latencies[1] > latencies[2] > P40.inside.latency
