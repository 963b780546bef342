"""Noise scales against sampled batches and closed forms, and the critical batch against the law it fits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from dlscale import batch_size_and_lars as room
from dlscale.batch_size_and_lars import experiment as recorded
from dlscale.lab import data, models, train

NET = models.mlp((4, 6, 3))
PARAMS = jax.jit(NET.init)(jax.random.key(0))
seeds = st.integers(0, 2**31 - 1)
positive = st.floats(0.01, 100)
size_lists = st.lists(st.integers(1, 4096), min_size=2, max_size=8, unique=True)


def loss(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(NET.apply(params, x), y).mean()


def examples(seed: int = 0, count: int = 30):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(count, 4)), jnp.float32), jnp.asarray(rng.integers(0, 3, count))


def bowl(params, points, curvatures):
    """The mean over the points a of (w - a)ᵀ H (w - a) / 2, with a diagonal H that every example carries along."""
    return ((params - points) ** 2 * curvatures).sum(-1).mean() / 2


# The noise scale from norms


@given(sizes=size_lists, signal=positive, noise=positive)
def test_norms_that_obey_the_law_give_its_parts(sizes, signal, noise):
    measured = room.gradient_noise_scale(sizes, signal + noise / np.array(sizes))
    assert measured.signal == pytest.approx(signal, rel=1e-3, abs=1e-3 * noise)
    assert measured.noise == pytest.approx(noise, rel=1e-3, abs=1e-3 * signal * max(sizes) ** 2)


@given(seed=seeds, factor=positive)
def test_the_noise_scale_does_not_depend_on_the_unit_of_the_loss(seed, factor):
    norms = np.random.default_rng(seed).uniform(1, 2, (5, 3))
    before, after = (room.gradient_noise_scale([1, 8, 64], c * norms) for c in (1, factor))
    np.testing.assert_allclose(after, np.multiply(before, factor), rtol=1e-9, atol=1e-9 * factor)


def test_two_batch_sizes_estimate_without_bias_what_all_examples_give():
    x, y = examples()
    exact = room.exact_noise_scale(loss, PARAMS, (x, y))

    @jax.jit
    def squared_norm(rows):
        return sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss)(PARAMS, x[rows], y[rows])))

    draw = np.random.default_rng(0).integers
    norms = np.stack([jax.vmap(squared_norm)(draw(0, len(x), (20_000, size))) for size in (2, 10)], axis=1)
    estimates = np.transpose(room.gradient_noise_scale([2, 10], norms))  # (draws, 2)
    error = estimates.std(0, ddof=1) / np.sqrt(len(estimates))
    assert (np.abs(estimates.mean(0) - exact) < 4 * error).all()
    assert (error < 0.05 * np.array(exact)).all()


@pytest.mark.parametrize(
    ("sizes", "norms", "what"),
    [
        ([32], [1.0], "One size cannot tell"),
        ([32, 32], [1.0, 2.0], "2 different batch sizes are needed, not 1"),
        ([0, 32], [1.0, 2.0], "at least 1"),
        ([8, np.inf], [1.0, 2.0], "finite numbers"),
        ([8, 32], [1.0, np.nan], "squared_norms must be finite"),
        ([8, 32], [1.0, 2.0, 3.0], r"not \(3,\)"),
    ],
)
def test_norms_that_cannot_be_read_are_refused(sizes, norms, what):
    with pytest.raises(ValueError, match=what):
        room.gradient_noise_scale(sizes, norms)


# The noise scale from all examples


@pytest.mark.parametrize("count", [30, 260], ids=["at once", "in two parts"])
def test_the_exact_one_is_the_covariance_of_single_gradients(count):
    x, y = examples(1, count)
    single = jax.jit(jax.vmap(lambda x, y: ravel_pytree(jax.grad(loss)(PARAMS, x[None], y[None]))[0]))
    each = np.asarray(single(x, y))
    measured = room.exact_noise_scale(loss, PARAMS, (x, y))
    assert measured.signal == pytest.approx((each.mean(0) ** 2).sum(), rel=1e-4)
    assert measured.noise == pytest.approx(each.var(0).sum(), rel=1e-4)
    assert measured.scale == measured.noise / measured.signal


@given(seed=seeds)
def test_in_a_bowl_the_hessian_one_is_known(seed):
    rng = np.random.default_rng(seed)
    points, curvatures = rng.normal(size=(50, 4)).astype(np.float32), rng.uniform(0.5, 2, 4).astype(np.float32)
    params, data_ = jnp.full(4, 2.0), (points, np.tile(curvatures, (50, 1)))
    simple = room.exact_noise_scale(bowl, params, data_)
    bent = room.hessian_noise_scale(bowl, params, data_, jax.random.key(seed), probes=4000)
    gradient, covariance = curvatures * (2 - points.mean(0)), curvatures**2 * points.var(0)
    assert simple == pytest.approx(((gradient**2).sum(), covariance.sum()), rel=1e-3)
    assert bent.signal == pytest.approx((curvatures * gradient**2).sum(), rel=1e-3)
    assert bent.noise == pytest.approx((curvatures * covariance).sum(), rel=0.15)


def test_where_all_examples_are_alike_there_is_no_noise():
    x, y = (np.repeat(part[:1], 10, axis=0) for part in examples())
    assert room.exact_noise_scale(loss, PARAMS, (x, y)).scale == pytest.approx(0, abs=1e-5)
    assert room.hessian_noise_scale(loss, PARAMS, (x, y), jax.random.key(0)).noise == pytest.approx(0, abs=1e-9)


def test_gradients_that_are_not_finite_and_impossible_sizes_are_refused():
    x, y = examples()
    broken = jax.tree.map(lambda w: np.full_like(w, np.nan), PARAMS)
    with pytest.raises(ValueError, match="not finite"):
        room.exact_noise_scale(loss, broken, (x, y))
    with pytest.raises(ValueError, match="not finite"):
        room.hessian_noise_scale(loss, broken, (x, y), jax.random.key(0))
    with pytest.raises(ValueError, match="probes"):
        room.hessian_noise_scale(loss, PARAMS, (x, y), jax.random.key(0), probes=0)


# The critical batch

SIZES = np.array([8, 32, 128, 512, 2048])


@given(critical=st.floats(2, 5000), fewest=st.floats(1, 1e5))
def test_steps_that_obey_the_law_give_its_constants(critical, fewest):
    law = room.critical_batch(SIZES, np.tile(fewest * (1 + critical / SIZES), (3, 1)))
    assert law.batch == pytest.approx((critical, critical, critical), rel=1e-3)
    assert law.fewest_steps.mean == pytest.approx(fewest, rel=1e-3)
    np.testing.assert_allclose(law.steps(SIZES), fewest * (1 + critical / SIZES), rtol=1e-3)
    assert law.steps(law.batch.mean) == pytest.approx(2 * law.fewest_steps.mean)


@given(seed=seeds, steps_unit=positive, batch_unit=st.floats(1, 100))
def test_the_law_follows_the_units_of_steps_and_batch(seed, steps_unit, batch_unit):
    steps = 100 * (1 + 150 / SIZES) * np.random.default_rng(seed).uniform(0.9, 1.1, (4, len(SIZES)))
    law, other = (room.critical_batch(SIZES * b, steps * s) for b, s in ((1, 1), (batch_unit, steps_unit)))
    np.testing.assert_allclose(other.batch, np.multiply(law.batch, batch_unit), rtol=1e-3)
    np.testing.assert_allclose(other.fewest_steps, np.multiply(law.fewest_steps, steps_unit), rtol=1e-3)


def test_the_interval_is_that_of_the_seeds():
    steps = 100 * (1 + np.array([[100], [200], [400]]) / SIZES)
    law = room.critical_batch(SIZES, steps)
    assert law.batches == pytest.approx([100, 200, 400], rel=1e-3)
    assert law.batch.mean == pytest.approx(200, rel=1e-3)
    assert law.batch.low < 100 < 400 < law.batch.high  # three seeds say little


def test_scaling_without_an_end_stops_at_the_bound():
    law = room.critical_batch(SIZES, np.tile(1e6 / SIZES, (2, 1)))
    assert law.batch.mean > 100 * SIZES.max()
    law = room.critical_batch(SIZES, np.full((2, len(SIZES)), 70.0))
    assert law.batch.mean < SIZES.min() / 100


@pytest.mark.parametrize(
    ("sizes", "steps", "what"),
    [
        ([8, 32], np.ones((3, 2)), "3 different batch sizes are needed, not 2"),
        ([8, 32, 0], np.ones((3, 3)), "at least 1"),
        ([8, 32, 128], np.ones(3), r"\(seeds, 3\), not \(3,\)"),
        ([8, 32, 128], np.array([[3, 2, 0], [3, 2, 1]]), "positive and finite"),
        ([8, 32, 128], np.array([[3, np.inf, 1], [3, 2, 1]]), "never reached the target"),
        ([8, 32, 128], np.ones((1, 3)), "run more seeds"),
    ],
)
def test_steps_that_cannot_be_fitted_are_refused(sizes, steps, what):
    with pytest.raises(ValueError, match=what):
        room.critical_batch(sizes, steps)


def test_a_batch_above_the_data_set_is_refused():
    digits = data.load("digits")
    few = dataclasses.replace(digits, x_train=digits.x_train[:50], y_train=digits.y_train[:50])
    with pytest.raises(ValueError, match=r"from 1 to 50, not 64.*has 50 training examples"):
        train.fit(models.build("mlp", few), few, optax.sgd, batch_size=64, epochs=1, learning_rate=0.1)


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
        decayed = arm == "LARS" or name == "w"
        adapted = arm != "LARS, matrices only" or name == "w"
        step = gradient[name] + recorded.WEIGHT_DECAY * decayed * params[name]
        norms = np.linalg.norm(params[name]), np.linalg.norm(step)
        ratio = recorded.TRUST_COEFFICIENT * norms[0] / norms[1] if adapted and min(norms) > 0 else 1.0
        expected = -rate / 10 * ratio * step  # the first of ten steps of warm-up
        np.testing.assert_allclose(updates[name], expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max(initial=0))


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
    rates = np.array([recorded.warm_up_and_decay(2.0, 40.0)(step) for step in range(41)])
    cosine = 2 * (1 + np.cos(np.pi * np.arange(41) / 40)) / 2
    np.testing.assert_allclose(rates[:4], cosine[:4] * [0.25, 0.5, 0.75, 1], rtol=1e-5)
    np.testing.assert_allclose(rates[4:], cosine[4:], atol=1e-6)


def test_only_matrices_count_as_matrices():
    params = {"dense": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "norm": {"scale": jnp.ones(2), "shift": jnp.ones(2)}}
    wanted = {"dense": {"w": True, "b": False}, "norm": {"scale": False, "shift": False}}
    assert recorded.matrices(params) == wanted


def test_a_network_that_diverged_guesses():
    measures = recorded.trial("momentum", "none", 3000, 2.0**20, seed=0, judged_on="test")
    assert measures["accuracy"] == pytest.approx(10, abs=2.5)
    assert measures["second_loss"] == 99
