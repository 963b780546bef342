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
from dlscale.parallel_training import planning

QUICK = {"xla_backend_optimization_level": 0}  # for a few steps: to compile well would take longer than they do
RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 40)).astype(np.float32)
PARAMS = jax.tree.map(np.asarray, room.init(jax.random.key(3)))
ALL_ON = room.Switches(1.0, 1.0, 1.0, 0.0)
P40, WAYS = room.MACHINES["P40, 2016"], ("ring", "hierarchical", "hybrid")


@pytest.mark.parametrize("no_decay", [0.0, 1.0])
def test_without_lars_the_optimizer_is_momentum_with_warm_up_and_decay(no_decay):
    params = {"w": X[:4], "b": X[5]}
    rate = lambda step: 0.25 * jnp.minimum((step + 1) / 2, 1) * (1 + jnp.cos(jnp.pi * step / 20))  # noqa: E731
    decay = optax.add_decayed_weights(DECAY, {"w": True, "b": not no_decay})
    library = optax.chain(decay, optax.scale_by_schedule(rate), optax.trace(MOMENTUM), optax.scale(-1))
    found = []
    for method in (room.optimizer(room.Switches(no_decay=no_decay), 0.5, 20), library):
        _, state = method.update({"w": X[6:10], "b": X[11]}, method.init(params), params)
        found.append(method.update(params, state, params)[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7), *found)


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


@pytest.mark.parametrize("kind, system", [("float32", room.System(1024, 1024)), ("float16", room.System(math.inf))])
def test_every_way_of_sending_gives_the_sum_within_the_bound_of_any_order(kind, system):
    u = float(np.finfo(kind).eps) / 2
    parts = jax.tree.map(lambda a: RNG.normal(size=(8, *a.shape)).astype(kind), PARAMS)
    exchange = jax.vmap(functools.partial(room.exchange, system=system, axis_name="workers"), axis_name="workers")
    total = jax.jit(exchange, compiler_options=QUICK)(parts)
    for terms, found in zip(jax.tree.leaves(parts), jax.tree.leaves(total), strict=True):
        exact, bound = terms.astype(float).sum(0), ((1 + u) ** 7 - 1) * np.abs(terms.astype(float)).sum(0)
        assert (np.abs(np.asarray(found, float) - exact) <= bound).all()


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
    np.testing.assert_allclose(cells["train"](ALL_ON, room.System(math.inf, math.inf)), wanted, rtol=1e-3)


def test_a_layer_under_its_roof():
    layer = planning.LayerSize("a", "conv", 1000, 100, 200, 4e6)
    slow = P40._replace(flops=1e9, half=2e9, memory=1e12, reached=1.0)
    assert room.layer_seconds(layer, 10, slow, False, (0, 0)) == pytest.approx((0.04, 0.08))
    starved = room.layer_seconds(layer, 10, slow._replace(memory=1e3), True, (3, 0))
    assert starved[0] == pytest.approx(2 * (10 * 900 + 1000) / 1e3)


@pytest.mark.parametrize(("ring", "latency"), [*zip(room.RINGS, (5e-6, (7 * 2e-6 + 5e-6) / 8), strict=True)])
@pytest.mark.parametrize("size", [1e3, 1e8])
def test_all_reduces_are_the_formulas_and_hybrid_is_the_faster(ring, latency, size):
    flat, levels, hybrid = (room.all_reduce_seconds(size, 64, P40, way, ring) for way in WAYS)
    tree = 2 * 3 * (2e-6 + size / P40.inside.bandwidth)
    assert levels == pytest.approx(tree + 2 * 7 * (5e-6 + size / 8 / P40.outside.bandwidth))
    assert flat == pytest.approx(2 * 63 * (latency + size / 64 / P40.outside.bandwidth)) and hybrid == min(flat, levels)
    machine = P40 if ring == room.RINGS[1] else P40._replace(node=1)  # where no message is faster
    assert room.simulated_ring(size, 64, machine) == pytest.approx(flat, rel=0.03)


def test_a_step_waits_for_its_last_message_and_a_run_has_whole_steps():
    found = room.timeline(room.NETWORKS["AlexNet"], P40, 64, 32, fuse=4e6)
    assert found.messages[0][1] >= found.forward[-1]
    weights = sum(m[0] for m in found.messages) / 2  # float16
    update = room.UPDATE * 4 * weights / P40.memory
    assert found.step == pytest.approx(max(found.backward[-1], found.messages[-1][2]) + update)
    assert found.minutes == pytest.approx(math.ceil(95 * room.IMAGES / 2048) * found.step / 60)
    late = room.timeline(room.NETWORKS["AlexNet"], P40, 64, 32, fuse=4e6, overlap=False)
    assert late.step >= found.step and late.messages[0][1] == late.backward[-1]


def stepped(w, v, g, scale, rate, finite=np.isfinite, guarded=True, norm=lambda g: np.linalg.norm(g.astype(float))):
    if not finite(g).all():
        return w, v
    ours, its = np.linalg.norm(w), norm(g) / np.float32(scale)
    ratio = TRUST * ours / (its + DECAY * ours) if ours > 0 and (its > 0 or not guarded) else 1.0
    v = MOMENTUM * v + rate * ratio * (g.astype(np.float64) / scale + DECAY * w)
    return w - v, v


GOOD = {"machine": "A100, 2020", "gpus": 256, "share": 20, "fuse": 24e6}
RIGHT = [{"fuse": 16e6}, {"fuse": 48e6}, {"gpus": np.int64(256), "share": jnp.int32(20)}]
WRONG = [{"fuse": 4e6}, {"fuse": math.inf}, {"gpus": 1024, "share": 5}, {"share": 64}, {"gpus": 250}]
WRONG += [{"gpus": gpus} for gpus in (256.5, "256", 0, None)] + [{"machine": "V100, 2017"}]
ANSWERS = [
    ("mixed_step", stepped, "right"),
    ("mixed_step", lambda w, v, g, scale, rate: stepped(w, v, g / np.float16(scale), 1.0, rate), "unscaled"),
    ("mixed_step", functools.partial(stepped, guarded=False), "all zero"),
    ("mixed_step", functools.partial(stepped, finite=lambda g: ~np.isnan(g)), "infinity"),
    ("mixed_step", functools.partial(stepped, finite=lambda g: ~np.isinf(g)), "NaN"),
    ("mixed_step", functools.partial(stepped, norm=lambda g: np.sqrt(np.sum(g * g))), "overflow"),
    ("fusion", lambda sizes, _: [[size] for size in sizes[:-1]], "all gradients"),
    ("fusion", lambda sizes, _: [sorted(sizes)], "order"),
    ("fusion", lambda sizes, _: [sizes], "longer"),
    *(("plan", GOOD | change, "right") for change in RIGHT),
    *(("plan", GOOD | change, "not yet") for change in WRONG),
]


@pytest.mark.parametrize(("name", "answer", "said"), ANSWERS)
def test_right_answers_are_accepted_and_wrong_ones_refused(name, answer, said):
    right, line = getattr(exercises, name).judge(answer)
    assert right == (said == "right") and said in line
