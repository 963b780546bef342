"""Noise scales against sampled batches and closed forms, and the critical batch against the law it fits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Cells
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from dlscale import batch_size_and_lars as room
from dlscale.batch_size_and_lars import exercises
from dlscale.batch_size_and_lars import experiment as recorded
from dlscale.course import records
from dlscale.lab import models

NET = models.mlp((4, 6, 3))
PARAMS = jax.jit(NET.init)(jax.random.key(0))
exact = jax.jit(room.exact_noise_scale, static_argnums=0)
seeds = st.integers(0, 2**31 - 1)
positive = st.floats(0.01, 100)


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(NET.apply(params, x), y).mean()


def examples(seed: int = 0, count: int = 30):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(count, 4)), jnp.float32), jnp.asarray(rng.integers(0, 3, count))


# The noise scale from all examples


@pytest.mark.parametrize("count", [30, 260], ids=["at once", "in two parts"])
def test_the_exact_one_is_the_covariance_of_single_gradients(count):
    x, y = examples(1, count)
    single = jax.jit(jax.vmap(lambda x, y: ravel_pytree(jax.grad(loss)(PARAMS, x[None], y[None]))[0]))
    each = np.asarray(single(x, y))
    measured = exact(loss, PARAMS, (x, y))
    assert measured.signal == pytest.approx((each.mean(0) ** 2).sum(), rel=1e-4)
    assert measured.noise == pytest.approx(each.var(0).sum(), rel=1e-4)
    assert measured.scale == measured.noise / measured.signal


# The critical batch

SIZES = np.array([8, 32, 128, 512, 2048])


@given(critical=st.floats(2, 5000), fewest=st.floats(1, 1e5))
def test_steps_that_obey_the_law_give_its_constants(critical, fewest):
    law = room.critical_batch(SIZES, np.tile(fewest * (1 + critical / SIZES), (3, 1)))
    assert law.batch == pytest.approx((critical, critical, critical), rel=1e-3)
    assert law.fewest_steps.mean == pytest.approx(fewest, rel=1e-3)
    np.testing.assert_allclose(law.steps(SIZES), fewest * (1 + critical / SIZES), rtol=1e-3)
    assert law.steps(law.batch.mean) == pytest.approx(2 * law.fewest_steps.mean)


def test_each_seed_has_its_critical_batch_and_a_law_without_a_bend_ends_at_the_bound():
    law = room.critical_batch(SIZES, 100 * (1 + np.array([[100], [200], [400]]) / SIZES))
    assert law.batches == pytest.approx([100, 200, 400], rel=1e-3)
    assert law.batch.mean == pytest.approx(200, rel=1e-3) and law.batch.low < 100 < 400 < law.batch.high
    straight, flat = (room.critical_batch(SIZES, np.tile(steps, (2, 1))) for steps in (1e6 / SIZES, 70 + 0 * SIZES))
    assert straight.batch.mean > 100 * SIZES.max() and flat.batch.mean < SIZES.min() / 100


@pytest.mark.parametrize(
    ("sizes", "steps", "what"),
    [
        ([8, 32], np.ones((3, 2)), "3 different batch sizes are needed"),
        ([8, 32, 128], np.ones(3), r"\(seeds, 3\), not \(3,\)"),
        ([8, 32, 128], np.array([[3, 2, 0], [3, 2, 1]]), "positive and finite"),
        ([8, 32, 128], np.array([[3, np.inf, 1], [3, 2, 1]]), "never reached the target"),
        ([8, 32, 128], np.ones((1, 3)), "run more seeds"),
    ],
)
def test_steps_that_cannot_be_fitted_are_refused(sizes, steps, what):
    with pytest.raises(ValueError, match=what):
        room.critical_batch(sizes, steps)


# The best rate


@given(peak=st.floats(-1.4, 1.4), bend=positive, seed=seeds)
def test_the_best_rate_is_the_lowest_point_of_a_parabola(peak, bend, seed):
    rates = 0.1 * 2.0 ** np.array([[0, 1, 2, 3], [2, 3, 4, 5]])
    logs = np.log2(rates) - np.log2(rates).mean(1, keepdims=True)
    steps = 100 * 2 ** (bend * (logs - peak) ** 2 / 10)
    found = room.best_rates(rates, np.repeat(steps[:, :, None], 3, axis=2))
    assert found.shape == (3, 2)
    np.testing.assert_allclose(np.log2(found) - np.log2(rates).mean(1), peak, atol=1e-6)


def test_a_best_rate_at_the_edge_of_the_grid_goes_no_further_than_a_step_beyond_its_neighbour():
    rates, steps = np.array([[1.0, 2.0, 4.0, 8.0]]), np.array([[[40.0], [30.0], [20.0], [10.0]]])
    assert 4 <= room.best_rates(rates, steps) <= 8
    assert np.isfinite(room.best_rates(rates, np.ones((1, 4, 2)))).all()


# The arms of the recorded LARS experiment, step by step

SHAPES = {"w": (4, 3), "b": (3,)}
size = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))  # zero: the layer's norm is zero


def tree(scales: tuple[float, float], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: np.float32(scale * rng.normal(size=shape))
        for (name, shape), scale in zip(SHAPES.items(), scales, strict=True)
    }


@pytest.mark.parametrize("arm", [name for name in recorded.ARMS if name.startswith("LARS")])
@settings(max_examples=30, deadline=None)
@given(weights=st.tuples(size, size), gradients=st.tuples(size, size), rate=st.floats(0.01, 10))
def test_lars_follows_its_formula_also_where_a_norm_is_zero(arm, weights, gradients, rate):
    params, gradient = tree(weights, 0), tree(gradients, 1)
    optimizer = recorded.ARMS[arm][0](rate, 100.0)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    for name in SHAPES:
        decayed = "only" not in arm or name == "w"
        adapted = arm != "LARS, matrices only" or name == "w"
        factor = int(arm.partition("×")[2] or 1)
        step = gradient[name] + factor * recorded.WEIGHT_DECAY * decayed * params[name]
        norms = np.linalg.norm(params[name]), np.linalg.norm(step)
        ratio = recorded.TRUST_COEFFICIENT * norms[0] / norms[1] if adapted and min(norms) > 0 else 1.0
        expected = -rate / 10 * ratio * step  # the first of ten steps of warm-up
        np.testing.assert_allclose(updates[name], expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max(initial=0))


def first_update(arm):
    """Parameters, gradients, and what an optimizer first adds at a tenth of the rate 0.5."""
    params, gradient = tree((2.0, 3.0), 0), tree((0.1, 20.0), 1)
    optimizer = recorded.ARMS[arm][0](0.5, 100.0)
    return params, gradient, optimizer.update(gradient, optimizer.init(params), params)[0]


@pytest.mark.parametrize(
    ("arm", "adapted"), [("one ratio", "wb"), ("one ratio, matrices only", "w"), ("length 1", "wb")]
)
def test_a_control_has_one_factor_for_the_whole_network(arm, adapted):
    params, gradient, updates = first_update(arm)
    steps = {name: gradient[name] + recorded.WEIGHT_DECAY * (name in adapted) * params[name] for name in SHAPES}
    above, below = (
        np.linalg.norm(np.concatenate([part[name].ravel() for name in adapted])) for part in (params, steps)
    )
    factor = 1 / below if arm == "length 1" else recorded.TRUST_COEFFICIENT * above / below
    for name in SHAPES:
        np.testing.assert_allclose(updates[name], -0.05 * (factor if name in adapted else 1) * steps[name], rtol=1e-4)


def test_lamb_on_matrices_takes_adams_steps_for_biases_and_lambs_for_matrices():
    _, _, updates = first_update("LAMB, matrices only")
    np.testing.assert_allclose(updates["w"], first_update("LAMB")[2]["w"], rtol=1e-4)
    np.testing.assert_allclose(np.abs(updates["b"]), 0.05, rtol=1e-3)


@pytest.mark.parametrize("arm", recorded.ARMS)
def test_a_net_of_zeros_moves_and_stays_finite(arm):
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    optimizer = recorded.ARMS[arm][0](0.1, 100.0)
    state = optimizer.init(params)
    for gradient in (params, tree((1.0, 1.0), 2), params):
        updates, state = optimizer.update(gradient, state, params)
        params = jax.tree.map(lambda w, u: w + u, params, updates)
    assert all(np.isfinite(w).all() and np.any(w) for w in jax.tree.leaves(params))


def test_the_rate_rises_in_a_line_and_ends_at_zero():
    rates = np.array([recorded.warm_up_and_decay(2.0, 40.0)(step) for step in range(45)])
    assert rates[41:].tolist() == [0] * 4, "and stays there"
    assert recorded.warm_up_and_decay(2.0, 0)(0) == 2, "a run of no steps has a rate, too"
    rates = rates[:41]
    cosine = 2 * (1 + np.cos(np.pi * np.arange(41) / 40)) / 2
    np.testing.assert_allclose(rates[:4], cosine[:4] * [0.25, 0.5, 0.75, 1], rtol=1e-5)
    np.testing.assert_allclose(rates[4:], cosine[4:], atol=1e-6)


# The recorded SGD


def test_descending_is_sgd_with_momentum():
    signals, rates = recorded.fresh_signals("validation"), np.array([0.1, 0.2, 0.1, 0.3], np.float32)
    rows = recorded.deck(0, 1, len(signals.x_train))[:120].reshape(4, 30)
    examples = signals.x_train, signals.y_train
    (ours, _), losses = recorded.descend(recorded.at_rest(0), rows, rates, np.float32(0.9), *examples)

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(recorded.NETWORK.apply(params, x), y).mean()

    params, velocity = recorded.at_rest(0)
    for batch, rate, seen in zip(rows, rates, losses, strict=True):
        value, gradient = jax.value_and_grad(loss)(params, *(part[batch] for part in examples))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
        params = jax.tree.map(lambda w, v, rate=rate: w - rate * v, params, velocity)
        assert seen == pytest.approx(float(value), rel=1e-4)
    np.testing.assert_allclose(ravel_pytree(ours)[0], ravel_pytree(params)[0], atol=1e-5)


def test_a_deck_deals_every_card_once_in_each_round():
    cards = recorded.deck(3, 4, 50).reshape(4, 50)
    assert (np.sort(cards) == np.arange(50)).all() and len({tuple(round_) for round_ in cards}) == 4


@pytest.mark.parametrize(("rate", "learned"), [(1.0, True), (2.0**20, False)])
def test_a_trial_learns_or_guesses(rate, learned):
    shallow = recorded.sgd_trial(512, 16, 2, rate, seed=0, judged_on="test")
    arm = ("LARS", "batch") if learned else ("momentum", "none")
    deep = recorded.trial(*arm, 750, rate, seed=0, judged_on="test")
    for measures in (shallow, deep):
        assert (measures["accuracy"] > 30) == learned and measures["early_loss"] <= 99


def test_steps_to_the_target_are_counted_by_looks():
    measures = recorded.steps_trial(512, 1.0, seed=0)
    assert measures["arrived"] == 1
    assert 30 < measures["steps"] < 240
    assert measures["steps"] % 3 == 0
    assert measures["first_noise_scale"] < measures["mean_noise_scale"]
    never = recorded.steps_trial(512, 2.0**-12, seed=0)
    assert (never["arrived"], never["steps"]) == (0, 2 * 80 * 3)


def test_the_tuned_rate_is_the_one_that_was_tested():
    record = records.read("batch_size_and_lars-sgd")
    setting = {"batch_size": 512, "epochs": 16, "warm_up": 0}
    rate = recorded.tuned_rate(record, **setting)
    assert record.options("learning_rate", **setting, judged_on="test") == [rate]


@pytest.mark.parametrize(("norm", "batch_size"), recorded.LARS_ARMS)
def test_lars_is_confirmed_where_the_validation_set_favours_it_most(norm, batch_size):
    record = records.read("batch_size_and_lars-lars")

    def held_out(arm, size):
        setting = {"arm": arm, "norm": norm, "batch_size": size, "judged_on": "validation"}
        rates = record.options("learning_rate", **setting)
        return max(record.values("accuracy", **setting, learning_rate=rate).mean() for rate in rates)

    leads = {size: held_out("LARS", size) - held_out("momentum", size) for size in recorded.BATCH_SIZES}
    assert max(leads, key=leads.get) == batch_size


# Exercises: right answers of other shapes pass, the naive ones do not


def by_variance(gradients, b):
    """The noise is b times the unbiased variance between the workers."""
    noise = b * gradients.var(1, ddof=1).sum(-1).mean()
    return noise / ((gradients.mean(1) ** 2).sum(-1).mean() - noise / (gradients.shape[1] * b))


def norm_of(tensors, np_=np):
    return np_.linalg.norm(np_.concatenate([np_.ravel(part) for part in tensors]))


def spoilt(part, instead):
    """The reference step of LARS with a part replaced."""
    assert part in exercises.step.code
    names = {"np": np, "jnp": jnp}
    exec(exercises.step.code.replace(part, instead), names)
    return names["lars_step"]


ENDING = "m = beta * m + rate * ratio * d\n    return w - m, m"
RIGHT = [
    (exercises.noise, by_variance),
    (exercises.noise, lambda gradients, b: by_variance(jnp.asarray(gradients), b)),
    (
        exercises.rate_for,
        lambda other, critical, batch, rate: rate * other * (batch + critical) / batch / (other + critical),
    ),
    (exercises.step, spoilt("jnp.", "np.")),
    (exercises.step, spoilt("return w - m, m", "return [w - m, m]")),
    (exercises.one_ratio, lambda w, d, c: c * norm_of(w) / norm_of(d)),
    (exercises.one_ratio, lambda w, d, c: c * norm_of(w, jnp) / norm_of(d, jnp)),
    (exercises.best, lambda critical, overhead, each: (critical * overhead / each) ** 0.5),
]
NAIVE = [
    (exercises.noise, lambda gradients, b: np.mean([by_variance(one[None], b) for one in gradients])),
    (exercises.noise, lambda g, b: b * g.var(1, ddof=1).sum(-1).mean() / (g.mean(1) ** 2).sum(-1).mean()),
    (exercises.rate_for, lambda other, critical, batch, rate: rate * other / batch),
    (exercises.rate_for, lambda other, critical, batch, rate: rate * np.sqrt(other / batch)),
    (exercises.rate_for, lambda other, critical, batch, rate: rate * min(other, critical) / min(batch, critical)),
    (
        exercises.one_ratio,
        lambda w, d, c: c * np.mean([norm_of([a]) / norm_of([b]) for a, b in zip(w, d, strict=True)]),
    ),
    (exercises.one_ratio, lambda w, d, c: c * sum(norm_of([a]) for a in w) / sum(norm_of([b]) for b in d)),
    (exercises.one_ratio, lambda w, d, c: c * norm_of(w[:1]) / norm_of(d[:1])),
    (exercises.one_ratio, lambda w, d, c: c * norm_of(w) ** 2 / norm_of(d) ** 2),
    (exercises.best, lambda critical, overhead, each: critical),
    (exercises.best, lambda critical, overhead, each: overhead / each),
    (exercises.best, lambda critical, overhead, each: np.ceil(np.sqrt(critical * overhead / each))),
    (exercises.step, spoilt("jnp.sum(d**2)", "jnp.sum(g**2)")),
    (exercises.step, spoilt("jnp.sqrt(jnp.sum(d**2))", "jnp.sqrt(jnp.sum(g**2)) + decay * jnp.sqrt(jnp.sum(w**2))")),
    (exercises.step, spoilt(" if w_norm > 0 and d_norm > 0 else 1.0", "")),
    (exercises.step, spoilt(ENDING, "m = beta * m + ratio * d\n    return w - rate * m, m")),
    (exercises.step, spoilt(ENDING, "m = beta * m + rate * d\n    return w - ratio * m, m")),
    (exercises.step, spoilt(ENDING, "m = beta * m + (1 - beta) * rate * ratio * d\n    return w - m / (1 - beta), m")),
    (exercises.step, spoilt("return w - m, m", "return w - m")),
]


@pytest.mark.parametrize(("exercise", "answer", "right"), [(*a, True) for a in RIGHT] + [(*a, False) for a in NAIVE])
def test_right_answers_of_other_shapes_pass_and_naive_ones_do_not(exercise, answer, right):
    verdict, line = exercise.judge(answer)
    assert verdict == right and "raised" not in line


# What the notebooks suggest


def lesson(changes: dict[str, str], *identities: str) -> Cells:
    cells = Cells("04_batch_size_and_lars", changes)
    cells.run(*(f"batch-{name}" for name in ("setup", "data", *identities)))
    return cells


def swept(**more: str) -> Cells:
    cells = "gradient", "train", "runs", "count", "steps", "fit"
    return lesson({"TARGET, SEEDS = 1.6": "TARGET, SEEDS = 1.7"} | more, *cells)


@pytest.fixture(scope="module")
def easier():
    return swept()


@suggested_by("04_batch_size_and_lars")
def test_an_easier_target_has_a_smaller_critical_batch(easier):
    assert easier["arrived"].any(1).all()
    assert 50 < easier["critical_batch"] < 88


@suggested_by("04_batch_size_and_lars")
def test_wrong_labels_make_the_critical_batch_larger(easier):
    names = swept(**{"\nnetwork = ": "\ny_train = y_train.at[::10].set(0)\nnetwork = "})
    assert names["arrived"].any((1, 2)).all()
    assert names["critical_batch"] > 1.1 * easier["critical_batch"]


@suggested_by("04_batch_size_and_lars")
def test_lars_moves_by_the_rate_and_runs_away_at_a_large_one():
    names = lesson({}, "lars-code", "deep-train")
    train = jax.jit(names["train_deep"], static_argnums=0)
    for rate in (0.1, 10.0):
        seen = np.asarray(train(names["lars"], rate, 0))
        np.testing.assert_allclose(seen[0, 2] / seen[0, 0], 0.01 * rate, rtol=1e-3)


def further(changes: dict[str, str], *identities: str) -> Cells:
    cells = Cells("further/04_batch_size_and_lars_further", changes)
    cells.run(*(f"batch-further-{name}" for name in ("setup", *identities)))
    return cells


@suggested_by("04_batch_size_and_lars_further")
def test_another_plan_runs():
    names = further({}, "plans")
    names["PLANS"]["both"] = ((32, 64, 128), (1, 1 / 2, 1 / 4), 0.0)
    looks = names["train_plan"]("both", 0.5, 20)
    assert looks.shape == (16, 2) and looks[-1, 1] > 45 and looks[-1, 0] < 1488


@suggested_by("04_batch_size_and_lars_further")
def test_faster_examples_ask_for_a_larger_batch():
    batches, best = 2.0 ** np.arange(0, 14, 0.25), []
    for time in ("1e-3", "1e-5"):
        names = further({"1e-3  # an": f"{time}  # an"}, "seconds")
        names["fit"] = room.critical_batch(SIZES, np.tile(50 * (1 + 90 / SIZES), (2, 1)))
        best.append(batches[names["seconds"](batches, 64, 1, 10, 1, "reduce-scatter + gather").argmin()])
    assert best[1] > best[0]


@suggested_by("04_batch_size_and_lars_further")
def test_bfloat16_loses_norms_by_precision_alone():
    lost = further({}, "ratios", "deep-loss", "watch", "watched", "squares")["lost"]
    assert lost(1024.0, jnp.float32).mean() < 0.02 < lost(1024.0, jnp.float16).mean()
    assert lost(1024.0, jnp.bfloat16).mean() < 0.1
