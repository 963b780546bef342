"""Noise scales against sampled batches and closed forms, and the critical batch against the law it fits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Cells, changed
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from dlscale import batch_size_and_lars as room
from dlscale.batch_size_and_lars import exercises
from dlscale.batch_size_and_lars import experiment as recorded
from dlscale.lab import models

NET = models.mlp((4, 6, 3))
PARAMS = jax.jit(NET.init)(jax.random.key(0))


def loss(params, x, y, net=NET):
    return optax.softmax_cross_entropy_with_integer_labels(net.apply(params, x), y).mean()


def test_the_exact_one_is_the_covariance_of_single_gradients():
    rng = np.random.default_rng(1)  # 260 examples: more than are held at a time
    x, y = jnp.asarray(rng.normal(size=(260, 4)), jnp.float32), jnp.asarray(rng.integers(0, 3, 260))
    each = np.asarray(jax.jit(jax.vmap(lambda x, y: ravel_pytree(jax.grad(loss)(PARAMS, x[None], y[None]))[0]))(x, y))
    signal, noise = jax.jit(room.exact_noise_scale, static_argnums=0)(loss, PARAMS, (x, y))
    assert signal == pytest.approx((each.mean(0) ** 2).sum(), rel=1e-4)
    assert noise == pytest.approx(each.var(0).sum(), rel=1e-4)


SIZES = np.array([8, 32, 128, 512, 2048])


@given(critical=st.floats(2, 5000), fewest=st.floats(1, 1e5))
def test_steps_that_obey_the_law_give_its_constants(critical, fewest):
    law = room.critical_batch(SIZES, np.tile(fewest * (1 + critical / SIZES), (3, 1)))
    assert law.batch == pytest.approx((critical, critical, critical), rel=1e-3)
    assert law.fewest_steps.mean == pytest.approx(fewest, rel=1e-3)
    np.testing.assert_allclose(law.steps(SIZES), fewest * (1 + critical / SIZES), rtol=1e-3)


@pytest.mark.parametrize("sizes, steps", [(SIZES[:2], [[9, 8]] * 2), (SIZES, np.full((2, len(SIZES)), np.inf))])
def test_no_law_is_fitted_to_two_points_or_to_runs_that_never_arrive(sizes, steps):
    with pytest.raises(ValueError, match=r"two points|nearer target"):
        room.critical_batch(sizes, steps)


def test_each_seed_has_its_critical_batch_and_a_law_without_a_bend_ends_at_the_bound():
    law = room.critical_batch(SIZES, 100 * (1 + np.array([[100], [200], [400]]) / SIZES))
    assert law.batches == pytest.approx([100, 200, 400], rel=1e-3)
    assert law.batch.mean == pytest.approx(200, rel=1e-3) and law.batch.low < 100 < 400 < law.batch.high
    straight, flat = (room.critical_batch(SIZES, np.tile(steps, (2, 1))) for steps in (1e6 / SIZES, 70 + 0 * SIZES))
    assert straight.batch.mean > 100 * SIZES.max() and flat.batch.mean < SIZES.min() / 100


@given(peak=st.floats(-1.4, 1.4), bend=st.floats(0.01, 100))
def test_the_best_rate_is_the_lowest_point_of_a_parabola(peak, bend):
    rates = 0.1 * 2.0 ** np.array([[0, 1, 2, 3], [2, 3, 4, 5]])
    logs = np.log2(rates) - np.log2(rates).mean(1, keepdims=True)
    steps = 100 * 2 ** (bend * (logs - peak) ** 2 / 10)
    found = room.best_rates(rates, np.repeat(steps[:, :, None], 3, axis=2))
    np.testing.assert_allclose(np.log2(found) - np.log2(rates).mean(1), np.full((3, 2), peak), atol=1e-6)


def test_a_best_rate_at_the_edge_of_the_grid_goes_no_further_than_a_step_beyond_its_neighbour():
    rates, steps = np.array([[1.0, 2.0, 4.0, 8.0]]), np.array([[[40.0], [30.0], [20.0], [10.0]]])
    assert 4 <= room.best_rates(rates, steps) <= 8
    assert np.isfinite(room.best_rates(rates, np.ones((1, 4, 2)))).all()


def norm_of(tensors):
    return jnp.linalg.norm(jnp.concatenate([jnp.ravel(part) for part in tensors]))


SHAPES = {"w": (4, 3), "b": (3,)}
size = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))  # zero: the layer's norm is zero


def tree(scales, seed):
    rng = np.random.default_rng(seed)
    return {name: np.float32(scale * rng.normal(size=SHAPES[name])) for name, scale in zip("wb", scales, strict=True)}


@pytest.mark.parametrize("arm", [name for name in recorded.ARMS if name.startswith("LARS")])
@settings(max_examples=10, deadline=None)
@given(weights=st.tuples(size, size), gradients=st.tuples(size, size), rate=st.floats(0.01, 10))
def test_lars_follows_its_formula_also_where_a_norm_is_zero(arm, weights, gradients, rate):
    params, gradient = tree(weights, 0), tree(gradients, 1)
    optimizer = recorded.ARMS[arm](rate, 100.0)
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


@pytest.mark.parametrize(
    ("arm", "adapted"), [("one ratio", "wb"), ("one ratio, matrices only", "w"), ("length 1", "wb")]
)
def test_a_control_has_one_factor_for_the_whole_network(arm, adapted):
    params, gradient = tree((2.0, 3.0), 0), tree((0.1, 20.0), 1)
    optimizer = recorded.ARMS[arm](0.5, 100.0)  # the first step has a tenth of the rate
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    steps = {name: gradient[name] + recorded.WEIGHT_DECAY * (name in adapted) * params[name] for name in SHAPES}
    above, below = (norm_of([part[name] for name in adapted]) for part in (params, steps))
    factor = 1 / below if arm == "length 1" else recorded.TRUST_COEFFICIENT * above / below
    for name in SHAPES:
        np.testing.assert_allclose(updates[name], -0.05 * (factor if name in adapted else 1) * steps[name], rtol=1e-4)


def test_the_rate_rises_in_a_line_and_ends_at_zero():
    rates = np.array([recorded.warm_up_and_decay(2.0, 40.0)(step) for step in range(45)])
    cosine = 2 * (1 + np.cos(np.pi * np.minimum(np.arange(45) / 40, 1))) / 2
    np.testing.assert_allclose(rates, cosine * np.minimum(np.arange(1, 46) / 4, 1), atol=1e-6)


def test_descending_is_sgd_with_momentum():
    signals, rates = recorded.fresh_signals("validation"), np.array([0.1, 0.2, 0.3], np.float32)
    rows, x, y = recorded.deck(0, 1, 3000)[:90].reshape(3, 30), signals.x_train, signals.y_train
    (ours, _), _ = recorded.descend(recorded.at_rest(0), rows, rates, np.float32(0.9), x, y)
    optimizer = optax.sgd(lambda step: jnp.asarray(rates)[step], 0.9)
    params, _ = recorded.at_rest(0)
    state, gradient = optimizer.init(params), jax.jit(jax.grad(functools.partial(loss, net=recorded.NETWORK)))
    for batch in rows:
        updates, state = optimizer.update(gradient(params, x[batch], y[batch]), state)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(ravel_pytree(ours)[0], ravel_pytree(params)[0], atol=1e-5)


@pytest.mark.parametrize(("rate", "learned"), [(1.0, True), (2.0**20, False)])
def test_a_trial_learns_or_guesses(rate, learned):
    measures = recorded.sgd_trial(512, 16, 2, rate, seed=0, judged_on="test")
    assert (measures["accuracy"] > 30) == learned and measures["early_loss"] <= 99


def test_steps_to_the_target_are_counted_by_looks():
    measures, never = (recorded.steps_trial(64, rate, seed=0) for rate in (0.5, 2.0**-12))
    assert measures["arrived"] == 1 and 60 < measures["steps"] < 240 and measures["steps"] % 5 == 0
    assert measures["first_noise_scale"] < measures["mean_noise_scale"]
    assert (never["arrived"], never["steps"]) == (0, 2 * 80 * 5)


# Exercises: right answers of other shapes pass, the naive ones do not


def by_variance(gradients, b):
    """The noise is b times the unbiased variance between the workers."""
    noise = b * gradients.var(1, ddof=1).sum(-1).mean()
    return noise / ((gradients.mean(1) ** 2).sum(-1).mean() - noise / (gradients.shape[1] * b))


ENDING = "m = beta * m + rate * ratio * d\n    return w - m, m"
rate_for, one_ratio = exercises.rate_for, exercises.one_ratio
ANSWERS = [
    (exercises.noise, lambda gradients, b: by_variance(jnp.asarray(gradients), b), True),
    (exercises.noise, ("(gradients**2)", "(gradients[:, 0] ** 2)"), False),
    (exercises.noise, lambda gradients, b: np.mean([by_variance(one[None], b) for one in gradients]), False),
    (exercises.noise, lambda g, b: b * g.var(1, ddof=1).sum(-1).mean() / (g.mean(1) ** 2).sum(-1).mean(), False),
    (rate_for, lambda other, critical, b, rate: rate * other * (b + critical) / b / (other + critical), True),
    (rate_for, lambda other, critical, batch, rate: rate * other / batch, False),
    (rate_for, lambda other, critical, batch, rate: rate * np.sqrt(other / batch), False),
    (rate_for, lambda other, critical, batch, rate: rate * min(other, critical) / min(batch, critical), False),
    (one_ratio, lambda w, d, c: c * norm_of(w) / norm_of(d), True),
    (one_ratio, lambda w, d, c: c * np.mean([norm_of([a]) / norm_of([b]) for a, b in zip(w, d, strict=True)]), False),
    (one_ratio, lambda w, d, c: c * sum(norm_of([a]) for a in w) / sum(norm_of([b]) for b in d), False),
    (one_ratio, lambda w, d, c: c * norm_of(w[:1]) / norm_of(d[:1]), False),
    (exercises.step, ("return w - m, m", "return [w - m, m]"), True),
    (exercises.step, (ENDING, "m *= beta; m += rate * ratio * d; w -= m; g *= 0; return w, m"), True),  # in place
    (exercises.step, ("np.linalg.norm(d)", "np.linalg.norm(g)"), False),
    (exercises.step, ("np.linalg.norm(d)", "np.linalg.norm(g) + decay * np.linalg.norm(w)"), False),
    (exercises.step, (" if w_norm > 0 and d_norm > 0 else 1.0", ""), False),
    (exercises.step, (ENDING, "m = beta * m + ratio * d\n    return w - rate * m, m"), False),
    (exercises.step, (ENDING, "m = beta * m + rate * d\n    return w - ratio * m, m"), False),
    (exercises.step, (ENDING, "m = beta * m + (1 - beta) * rate * ratio * d; return w - m / (1 - beta), m"), False),
    (exercises.step, ("return w - m, m", "return w - m"), False),
]


@pytest.mark.parametrize(("exercise", "answer", "right"), ANSWERS)
def test_right_answers_of_other_shapes_pass_and_naive_ones_do_not(exercise, answer, right):
    verdict, line = exercise.judge(changed(exercise, *answer) if isinstance(answer, tuple) else answer)
    assert verdict == right and "raised" not in line


# What the notebooks suggest


def run(names, changes=None, notebook="04_batch_size_and_lars", prefix="batch"):
    cells = Cells(notebook, changes)
    cells.run(*(f"{prefix}-{name}" for name in names.split()))
    return cells


further = functools.partial(run, notebook="further/04_batch_size_and_lars_further", prefix="batch-further")


@suggested_by("04_batch_size_and_lars")
def test_an_easier_target_has_a_smaller_critical_batch_and_wrong_labels_a_larger_one():
    found, changes = [], {"TARGET, SEEDS = 1.6, jnp.arange(5)": "TARGET, SEEDS = 1.7, jnp.arange(3)"}
    changes |= {"[8, 16, 32, 64, 128, 256, 512]": "[8, 32, 128, 512]"}
    changes |= {"[1 / 16, 1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1 / 2]": "[1 / 16, 1 / 8, 1 / 4, 1 / 2]"}
    for labels in ("", "y_train = y_train.at[::10].set(0)\n"):
        changes["\nnetwork = "] = f"\n{labels}network = "
        cells = run("setup data gradient train runs count steps fit", changes)
        assert cells["arrived"].any((1, 2)).all()
        found.append(cells["critical_batch"])
    assert 50 < found[0] < 88 and found[1] > 1.1 * found[0]


@suggested_by("04_batch_size_and_lars")
def test_lars_moves_by_the_rate_and_runs_away_at_a_large_one():
    names = run("setup data lars-code deep-train")
    train = jax.jit(names["train_deep"], static_argnums=0)
    for rate in (0.1, 10.0):
        seen = np.asarray(train(names["lars"], rate, *names["start"](0)))
        np.testing.assert_allclose(seen[0, 2] / seen[0, 0], 0.01 * rate, rtol=1e-3)


@suggested_by("04_batch_size_and_lars_further")
def test_another_plan_runs_and_bfloat16_loses_norms_by_precision_alone():
    names = further("setup plans ratios deep-loss watch watched squares")
    names["PLANS"]["both"] = ((32, 64, 128), (1, 1 / 2, 1 / 4), 0.0)
    looks = names["train_plan"]("both", 0.5, 20)
    assert looks.shape == (16, 2) and looks[-1, 1] > 45 and looks[-1, 0] < 1488
    whole, half, brain = (names["lost"](1024.0, dtype).mean() for dtype in (jnp.float32, jnp.float16, jnp.bfloat16))
    assert whole < 0.02 < half and brain < 0.1


@suggested_by("04_batch_size_and_lars_further")
def test_faster_examples_ask_for_a_larger_batch_and_one_worker_for_that_of_the_formula():
    batches, fit = np.geomspace(1, 1e5, 5001), room.critical_batch(SIZES, np.tile(50 * (1 + 90 / SIZES), (2, 1)))
    best = {}
    for time in (1e-3, 1e-5):
        names = further("setup seconds", {"1e-3  # an": f"{time}  # an"})
        names["fit"] = fit
        for workers in (1, 64):
            best[time, workers] = batches[names["seconds"](batches, workers, 1, 10, 1, "tree").argmin()]
        assert best[time, 1] == pytest.approx(np.sqrt(90 * 1e-3 / time), rel=0.01)
    assert best[1e-5, 64] > best[1e-3, 64]
