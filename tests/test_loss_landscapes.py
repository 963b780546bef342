"""Slices against the loss itself, spectra against an explicit Hessian and SciPy, and the laws of rescaling."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest
from conftest import suggested_by
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from scipy.sparse.linalg import LinearOperator, eigsh

from dlscale import loss_landscapes as room
from dlscale.course import records
from dlscale.course.sources import python
from dlscale.lab import models
from dlscale.loss_landscapes import exercises, experiment

KEY = jax.random.key(0)
NET = models.mlp((4, 6, 5, 3))
SMOOTH = models.mlp((4, 6, 5, 3), activation="tanh")
seeds = st.integers(0, 2**31 - 1)


def cross_entropy(model: models.Model):
    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    return loss


def weights(model: models.Model, seed: int = 0):
    """Of the shapes of the model's own, drawn by NumPy, which compiles nothing."""
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(model.init, KEY)
    return jax.tree.map(lambda w: np.float32(rng.normal(size=w.shape) / np.sqrt(w.size / w.shape[-1])), shapes)


def examples(width: int = 4, seed: int = 0, count: int = 20):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, width)).astype(np.float32), rng.integers(0, 3, count)


LOSS, SMOOTH_LOSS = cross_entropy(NET), cross_entropy(SMOOTH)
PARAMS, DATA = weights(NET), examples()


@functools.cache
def explicit_hessian(loss) -> np.ndarray:
    flat, unravel = ravel_pytree(PARAMS)
    return np.asarray(jax.jit(jax.hessian(lambda w: loss(unravel(w), *DATA)))(flat), np.float64)


def quadratic(w, curvatures):
    return (curvatures * w["w"] ** 2).sum() / 2


# Directions


def filter_norms(tree):
    return [np.linalg.norm(np.reshape(w, (-1, w.shape[-1])), axis=0) for w in jax.tree.leaves(tree) if w.ndim > 1]


@pytest.mark.parametrize("model", [NET, models.lenet((16, 16, 1))], ids=["dense", "conv"])
def test_filters_of_the_direction_have_the_norms_of_the_parameters(model):
    params = weights(model)
    direction = room.random_direction(KEY, params)
    for ours, theirs in zip(filter_norms(direction), filter_norms(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    flat = [d for d in jax.tree.leaves(direction) if d.ndim < 2]
    assert flat and not any(np.any(d) for d in flat)


def test_a_direction_as_drawn_is_standard_normal_in_every_parameter():
    params = {"w": np.zeros((300, 300), np.float32), "b": np.zeros(10_000, np.float32)}
    for d in jax.tree.leaves(jax.device_get(room.random_direction(KEY, params, None))):
        assert abs(float(d.mean())) < 0.03
        assert abs(float(d.std()) - 1) < 0.03


def test_directions_differ_by_key_and_array_and_repeat_for_the_same_key():
    params = {"a": np.ones((5, 5), np.float32), "b": np.ones((5, 5), np.float32)}
    one, again, other = (jax.device_get(room.random_direction(jax.random.key(i), params)) for i in (1, 1, 2))
    assert (one["a"] == again["a"]).all()
    assert not np.allclose(one["a"], one["b"])
    assert not np.allclose(one["a"], other["a"])


def test_a_zero_filter_gets_a_zero_direction():
    params = {"w": np.float32([[1, 0]] * 3)}
    direction = np.asarray(room.random_direction(KEY, params)["w"])
    assert direction[:, 0].any()
    assert not direction[:, 1].any()


def rescale(params, factor):
    """The same function: ReLU passes a positive factor on."""
    w, b = params["dense1"]["w"] * factor, params["dense1"]["b"] * factor
    return params | {"dense1": {"w": w, "b": b}, "dense2": params["dense2"] | {"w": params["dense2"]["w"] / factor}}


@given(seeds, st.floats(-3, 3))
@settings(deadline=None, max_examples=15)
def test_a_filter_normalised_slice_does_not_change_when_a_relu_layer_is_rescaled(seed, log2_factor):
    key, data = jax.random.key(seed), examples(seed=seed)
    distances = np.linspace(-1, 1, 9)
    params = weights(NET, seed)  # biases too
    curves = [
        room.line(LOSS, p, room.random_direction(key, p), distances, data)
        for p in (params, rescale(params, 2**log2_factor))
    ]
    np.testing.assert_allclose(*curves, rtol=2e-4, atol=1e-5)


def test_an_unnormalised_slice_does_change_when_a_relu_layer_is_rescaled():
    direction, distances = room.random_direction(KEY, PARAMS, None), np.linspace(-1, 1, 9)
    curves = [room.line(LOSS, p, direction, distances, DATA) for p in (PARAMS, rescale(PARAMS, 8.0))]
    assert np.abs(curves[0] - curves[1]).max() > 0.1


# Slices


def test_line_and_plane_are_the_loss_at_the_points():
    u, v = (jax.device_get(room.random_direction(key, PARAMS)) for key in jax.random.split(KEY))
    x, y = np.linspace(-1, 1, 5), np.linspace(-0.5, 2, 4)
    surface, at = room.plane(LOSS, PARAMS, u, v, x, y, DATA), jax.jit(LOSS)
    assert surface.shape == (4, 5)
    for i, b in enumerate(y):
        for j, a in enumerate(x):
            moved = jax.tree.map(lambda w, d, e, a=a, b=b: np.float32(w + a * d + b * e), PARAMS, u, v)
            np.testing.assert_allclose(surface[i, j], at(moved, *DATA), rtol=1e-5)
    np.testing.assert_allclose(
        room.line(LOSS, PARAMS, u, x, DATA),
        room.plane(LOSS, PARAMS, u, v, x, [0.0], DATA)[0],
        rtol=1e-5,
    )


def test_a_loss_of_each_example_is_no_loss():
    def each(params, x, y):
        return (NET.apply(params, x) ** 2).mean(0)

    with pytest.raises(ValueError, match="must be one number"):
        room.line(each, PARAMS, PARAMS, [0.0], DATA)


@pytest.mark.parametrize("count", [1, 7])
def test_any_number_of_points_is_shared_out_among_the_cores(count, monkeypatch):
    monkeypatch.setattr(room.devices, "cores", lambda: 3)
    params = {"w": jnp.array([1.0, 2.0])}
    distances = np.linspace(0, 1, count)
    ours = room.line(quadratic, params, {"w": jnp.array([1.0, 0.0])}, distances, (jnp.array([2.0, 4.0]),))
    np.testing.assert_allclose(ours, (1 + distances) ** 2 + 8, rtol=1e-6)


def test_far_points_may_be_infinite():
    values = room.line(lambda p: jnp.exp(p["w"]).sum(), {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}, [0, 1000])
    assert values.tolist() == [2.0, np.inf]


# The plane of a path


def test_pca_plane_finds_the_plane_of_a_path_that_lies_in_one():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(12, 2)))[0]
    coordinates = np.cumsum(rng.normal(size=(30, 2)) * (3, 1), axis=0)
    points = rng.normal(size=12) + coordinates @ basis.T
    found = room.pca_plane({"a": jnp.asarray(points[:, :8].reshape(30, 2, 4)), "b": jnp.asarray(points[:, 8:])})
    assert found.explained.sum() == pytest.approx(1, abs=1e-6)
    assert found.explained[0] >= found.explained[1]
    np.testing.assert_allclose(found.path[-1], 0, atol=1e-5)
    assert (found.path[0] >= 0).all()
    for point, (a, b) in zip(points, found.path, strict=True):
        moved = room.move(found.origin, (a, found.x), (b, found.y))
        np.testing.assert_allclose(ravel_pytree(moved)[0], point, atol=1e-4)
    u, v = ravel_pytree(found.x)[0], ravel_pytree(found.y)[0]
    np.testing.assert_allclose([u @ u, v @ v, u @ v], [1, 1, 0], atol=1e-5)


def test_explained_variance_is_that_of_a_singular_value_decomposition():
    points = np.random.default_rng(1).normal(size=(10, 6)) * np.array([5, 3, 2, 1, 1, 1])
    squares = np.linalg.svd(points - points.mean(0), compute_uv=False) ** 2
    found = room.pca_plane({"w": points.astype(np.float32)})
    np.testing.assert_allclose(found.explained, squares[:2] / squares.sum(), rtol=1e-5)


# The Hessian


@pytest.mark.parametrize("loss", [LOSS, SMOOTH_LOSS], ids=["relu", "tanh"])
def test_eigenvalues_are_those_of_the_explicit_hessian(loss):
    expected = np.linalg.eigvalsh(explicit_hessian(loss))[::-1]
    for k in (1, 8, len(expected)):
        ours = room.hessian_eigenvalues(loss, PARAMS, k, KEY, DATA)
        np.testing.assert_allclose(ours, expected[:k], rtol=1e-3, atol=1e-3 * expected[0])


def test_eigenvalues_of_a_larger_net_are_those_of_scipy():
    model = models.mlp((40, 32, 16, 3))
    loss, params, data = cross_entropy(model), weights(model), examples(40, count=100)
    flat, unravel = ravel_pytree(params)
    product = jax.jit(lambda v: ravel_pytree(room.hessian_product(loss, params, unravel(v), data))[0])
    operator = LinearOperator(
        (flat.size, flat.size), dtype=np.float32, matvec=lambda v: np.asarray(product(v.ravel().astype(np.float32)))
    )
    expected = eigsh(operator, k=4, which="LA", tol=1e-4, return_eigenvectors=False, v0=np.ones(flat.size))[::-1]
    ours = room.hessian_eigenvalues(loss, params, 4, KEY, data)
    np.testing.assert_allclose(ours, expected, rtol=1e-3)


def curvatures(count):
    return st.lists(st.floats(-10, 10, width=32), min_size=count, max_size=count, unique=True)


@given(st.sampled_from([1, 11, 40]).flatmap(curvatures), seeds)  # each length is compiled once
@example([2.75, 0.0, 4.0, 5.0, 0.5, 0.75, -1.0, 3.0, 1.0, 2.0, 1.5], 370)  # the start is nearly orthogonal to that of 3
@settings(deadline=None, max_examples=25)
def test_eigenvalues_of_a_quadratic_are_its_curvatures(curvatures, seed):
    params = {"w": np.ones(len(curvatures), np.float32)}
    k = max(1, len(curvatures) // 3)
    ours = room.hessian_eigenvalues(quadratic, params, k, jax.random.key(seed), (np.float32(curvatures),))
    np.testing.assert_allclose(ours, sorted(curvatures)[::-1][:k], atol=2e-3 * np.abs(curvatures).max() + 1e-6)


def test_a_spectrum_of_few_distinct_values_is_gone_through_to_its_end():
    curvatures = np.float32([3.0] * 2 + [1.0] * 5 + [0.0] * 4)
    ours = room.hessian_eigenvalues(quadratic, {"w": np.ones(11, np.float32)}, 11, KEY, (curvatures,))
    np.testing.assert_allclose(ours, curvatures, atol=1e-4)


def test_a_flat_loss_has_zero_eigenvalues():
    ours = room.hessian_eigenvalues(quadratic, {"w": np.ones(11, np.float32)}, 2, KEY, (np.zeros(11, np.float32),))
    assert ours.tolist() == [0, 0]


def test_the_product_is_the_hessian_times_the_vector():
    vector = room.random_direction(KEY, PARAMS, None)
    expected = explicit_hessian(SMOOTH_LOSS) @ np.asarray(ravel_pytree(vector)[0])
    product = jax.jit(room.hessian_product, static_argnums=0)(SMOOTH_LOSS, PARAMS, vector, DATA)
    np.testing.assert_allclose(ravel_pytree(product)[0], expected, atol=1e-5)


def test_all_that_asks_the_hessian_shares_two_programs():
    def fresh(params, x):
        return quadratic(params, x)

    params, data = {"w": np.ones(30, np.float32)}, (np.arange(30, dtype=np.float32),)
    programs = room._linearize, room._times
    before = [program._cache_size() for program in programs]
    room.hessian_eigenvalues(fresh, params, 1, KEY, data)
    room.hessian_eigenvalues(fresh, {"w": params["w"] + 1}, 2, KEY, data)
    room.spectral_density(fresh, params, KEY, data, probes=2, iterations=20)
    room.hessian_trace(fresh, params, KEY, data, probes=2)
    assert [program._cache_size() for program in programs] == [size + 1 for size in before]


def test_the_trace_is_exact_for_a_diagonal_hessian_and_unbiased_otherwise():
    exact = room.hessian_trace(quadratic, {"w": jnp.ones(4)}, KEY, (jnp.array([1.0, 2.0, 3.0, -4.0]),))
    np.testing.assert_allclose(exact, 2, rtol=1e-5)
    estimates = room.hessian_trace(SMOOTH_LOSS, PARAMS, KEY, DATA, probes=1000)
    error = estimates.mean() - np.trace(explicit_hessian(SMOOTH_LOSS))
    assert abs(error) < 4 * estimates.std() / np.sqrt(1000)


def test_the_spectral_density_has_the_moments_of_the_spectrum():
    values = np.linalg.eigvalsh(explicit_hessian(SMOOTH_LOSS))
    found = room.spectral_density(SMOOTH_LOSS, PARAMS, KEY, DATA, probes=200, iterations=30)
    np.testing.assert_allclose(found.weights.sum(1), 1, rtol=1e-4)
    moment = [float((found.weights * found.nodes**power).sum(1).mean()) for power in (1, 2)]
    np.testing.assert_allclose(moment, [values.mean(), (values**2).mean()], rtol=0.1)
    assert float(found.nodes.max()) == pytest.approx(values.max(), rel=1e-3)
    grid = np.linspace(2 * values.min() - 1, 2 * values.max() + 1, 2000)
    density = found.density(grid, width=0.05)
    assert np.trapezoid(density, grid) == pytest.approx(1, abs=1e-3)
    bells = np.exp(-(((grid[:, None] - values) / 0.05) ** 2) / 2).mean(1) / (0.05 * np.sqrt(2 * np.pi))
    assert np.trapezoid(np.abs(density - bells), grid) < 0.15


def test_probes_that_are_more_than_the_space_are_cut():
    found = room.spectral_density(quadratic, {"w": jnp.ones(2)}, KEY, (jnp.array([1.0, 3.0]),), iterations=50)
    np.testing.assert_allclose(np.sort(found.nodes), [[1, 3]] * 5, rtol=1e-5)


# What cannot work

SMALL = {"w": np.ones(3, np.float32), "b": np.ones((2, 2), np.float32)}


def total(params):
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "direction", [{"w": np.ones(3)}, {"w": np.ones(3), "b": np.ones((2, 3))}, SMALL | {"c": np.ones(1)}]
)
def test_a_direction_of_another_structure_is_refused(direction):
    with pytest.raises(ValueError, match=r"another structure than the parameters: at \['[bc]'\]"):
        room.line(total, SMALL, direction, [0, 1])
    with pytest.raises(ValueError, match="another structure"):
        room.plane(total, SMALL, SMALL, direction, [0, 1], [0, 1])
    with pytest.raises((TypeError, ValueError), match=r"structure|shape|pytree"):  # says JAX
        room.hessian_product(total, SMALL, direction)


@pytest.mark.parametrize("factor", [1.0, -2.0, 1e-3])
def test_a_plane_through_parallel_directions_is_refused(factor):
    other = jax.tree.map(lambda w: factor * w, SMALL)
    with pytest.raises(ValueError, match="parallel"):
        room.plane(total, SMALL, SMALL, other, [0, 1], [0, 1])


def test_a_plane_through_a_zero_direction_is_refused():
    with pytest.raises(ValueError, match="direction is zero"):
        room.plane(total, SMALL, SMALL, jax.tree.map(np.zeros_like, SMALL), [0, 1], [0, 1])


@pytest.mark.parametrize("k", [0, 8, 1.5])
def test_more_eigenvalues_than_parameters_are_refused(k):
    with pytest.raises(ValueError, match="There are 7 parameters, hence as many eigenvalues"):
        room.hessian_eigenvalues(total, SMALL, k, KEY)


CALLS = {
    "line": lambda loss: room.line(loss, SMALL, SMALL, [0.0, 1.0]),
    "plane": lambda loss: room.plane(loss, SMALL, SMALL, SMALL | {"w": np.zeros(3, np.float32)}, [0, 1], [0, 1]),
    "eigenvalues": lambda loss: room.hessian_eigenvalues(loss, SMALL, 1, KEY),
    "density": lambda loss: room.spectral_density(loss, SMALL, KEY),
    "trace": lambda loss: room.hessian_trace(loss, SMALL, KEY),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_loss_must_be_one_number(call):
    says = r"one number, such as a mean, .*shape=\(3,\)|scalar-output functions. Output had shape: \(3,\)"
    with pytest.raises((ValueError, TypeError), match=says):
        call(lambda params: params["w"] ** 2)
    with pytest.raises((ValueError, TypeError), match=r"such as a mean|scalar-output functions"):
        call(lambda params: (total(params), 0.0))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_loss_that_is_not_finite_is_refused(call):
    with pytest.raises(ValueError, match="loss is not finite at these parameters"):
        call(lambda params: total(params) + jnp.log(-params["w"].sum()))


@pytest.mark.parametrize("params", [{}, {"w": 1.0}, {"w": jnp.arange(3)}, {"w": None}])
def test_parameters_must_be_arrays_of_floats(params):
    with pytest.raises(ValueError, match="pytree of arrays of floats"):
        room.random_direction(KEY, params)


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(ValueError, match="Did you mean 'filter'"):
        room.random_direction(KEY, SMALL, "filters")


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        ({"w": np.ones((2, 3), np.float32)}, "three points or more"),
        ({"w": np.ones((4, 3), np.float32), "b": np.ones((5, 3), np.float32)}, "three points or more"),
        ({"w": np.ones((4, 3), np.float32)}, "lies on a line"),
        ({"w": np.outer(np.arange(4), np.ones(3)).astype(np.float32)}, "lies on a line"),
        ({"w": np.full((4, 3), np.nan, np.float32)}, "not finite"),
    ],
)
def test_trajectories_that_span_no_plane_are_refused(trajectory, message):
    with pytest.raises(ValueError, match=message):
        room.pca_plane(trajectory)


@pytest.mark.parametrize("name", ["probes", "iterations"])
def test_counts_must_be_positive(name):
    with pytest.raises(ValueError, match=name):
        room.spectral_density(total, SMALL, KEY, **{name: 0})


# The recorded nets


@pytest.mark.parametrize("net", experiment.CHOSEN)
def test_a_scan_over_stacked_blocks_is_the_model(net):
    model = models.resnet(experiment.DEPTH, net == "skips", shape=(14, 14, 1))
    params, x = weights(model), np.random.default_rng(0).normal(size=(3, 14, 14, 1)).astype(np.float32)
    stacked = experiment.stacked(params)
    np.testing.assert_allclose(experiment.scores(net, stacked, x), model.apply(params, x), rtol=1e-3, atol=1e-4)
    again = experiment.unstacked(stacked)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True))


def test_equal_weights_are_equal():
    model = models.resnet(experiment.DEPTH, False, shape=(14, 14, 1))
    params, x = weights(model), np.random.default_rng(0).normal(size=(2, 14, 14, 1)).astype(np.float32)
    found = experiment.scores("equal weights", experiment.stacked(params), x)
    x = model.layers["stem"](params["stem"], x)
    for i in range(1, experiment.DEPTH + 1):
        x = (x + model.layers["block1"](params[f"block{i}"], x)) / np.sqrt(2)
    np.testing.assert_allclose(found, model.layers["output"](params["output"], x), rtol=1e-3, atol=1e-4)


def test_one_over_root_20_in_the_weights_is_the_same_function_with_other_eigenvalues():
    params = experiment.stacked(weights(models.resnet(experiment.DEPTH, True, shape=(14, 14, 1))))
    rng, factor = np.random.default_rng(0), np.float32(np.sqrt(experiment.DEPTH))
    x, y = rng.normal(size=(4, 14, 14, 1)).astype(np.float32), rng.integers(0, 10, 4)
    same = params | {"blocks": jax.tree.map(lambda w: w / factor, params["blocks"])}
    loss = experiment.written_in("skips")
    np.testing.assert_allclose(loss(same, x, y, factor), experiment.mean_loss("skips")(params, x, y), rtol=1e-4)
    top = records.read("loss_landscapes-top")
    beside, within = (top.values(what, net="skips") for what in ("top", "written in"))
    assert (within > beside).all()
    surface = records.read("loss_landscapes-skips").values("loss", net="skips", rate=2.0**-6, judged_on="test")
    np.testing.assert_allclose(top.values("loss", net="skips"), surface, rtol=1e-3)  # of the same nets


def test_the_surfaces_are_of_the_chosen_rates_and_all_nets_came_to_the_same_loss():
    record = records.read("loss_landscapes-skips")
    assert {net: record.options("rate", net=net, judged_on="test")[0] for net in experiment.CHOSEN} == experiment.CHOSEN
    losses = np.array([t.measures["loss"] for t in record.select(judged_on="test") if np.isfinite(t.measures["rise"])])
    assert losses.size > 50
    np.testing.assert_allclose(losses, experiment.TARGET, rtol=0.01)


def test_the_attack_is_at_the_best_rates_and_those_beside_them():
    record = records.read("loss_landscapes-batches")
    best = {batch: record.options("rate", batch=batch, judged_on="test")[0] for batch in (16, 500)}
    grid = experiment.MLP_RATES
    small, large = (grid.index(best[batch]) for batch in (16, 500))
    expected = {(16, small), (16, small - 1), (500, small), (500, large), (500, large + 1)}
    assert {(batch, grid.index(rate)) for batch, rate in experiment.ATTACKED} == expected


# The exercises that a reader writes: the naive answers are refused, other right ones are not


def along_line(params, gaussian, distances, axes=lambda w: tuple(range(w.ndim - 1)), still=2):
    def direction(w, d):
        return d * np.sqrt((w**2).sum(axes(w)) / (d**2).sum(axes(w))) if w.ndim >= still else 0 * w

    return [{k: jnp.asarray(w + a * direction(w, gaussian[k])) for k, w in params.items()} for a in distances]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (along_line, True),
        (functools.partial(along_line, axes=lambda w: None), False),  # one size for a whole layer
        (functools.partial(along_line, axes=lambda w: 0), False),  # right for dense layers only
        (functools.partial(along_line, still=1, axes=lambda w: 0), False),  # biases move
        (lambda params, gaussian, distances: along_line(params, gaussian, distances)[:-1], False),
        (lambda params, gaussian, distances: [params for _ in distances], False),
    ],
    ids=["with jax", "by layer", "first axis", "biases", "one missing", "no direction"],
)
def test_the_line_exercise(answer, right):
    assert exercises.line.judge(answer)[0] == right


def by_covariance(points):
    values = np.linalg.eigvalsh(np.cov(points.T))
    return 100 * values[-2:].sum() / values.sum()


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (by_covariance, True),
        (lambda points: by_covariance(points) / 100, False),
        (lambda points: 100 * room.pca_plane({"w": np.float32(points)}).explained.sum(), True),
        (lambda points: 100 * (s := np.linalg.svd(points, compute_uv=False) ** 2)[:2].sum() / s.sum(), False),
        (lambda points: 100 * (s := np.linalg.svd(points - points.mean(0))[1])[:2].sum() / s.sum(), False),
        (lambda points: 100.0, False),
    ],
    ids=["covariance", "fraction", "the room's", "not centred", "not squared", "all"],
)
def test_the_held_exercise(answer, right):
    assert exercises.held.judge(answer)[0] == right


def block_by_block(skip, new, depth):
    first, others = 1.0, 0.0
    for _ in range(depth):
        first, others = skip**2 * first, skip**2 * others + new**2 * (first + others)
    return np.array([first + others, first / (first + others)])


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (block_by_block, True),
        (lambda a, b, depth: ((a * a + b * b) ** depth, (1 + (b / a) ** 2) ** -depth if a else 0), True),
        (lambda a, b, depth: jnp.array(block_by_block(a, b, depth)), True),
        (lambda a, b, depth: (a**2 + depth * b**2, 1 / (1 + depth * b**2)), False),
        (lambda a, b, depth: ((v := (a**2 + b**2) ** depth), a**depth / v), False),
        (lambda a, b, depth: ((v := (a + b) ** depth), a**depth / v), False),
        (lambda a, b, depth: (a**2 + b**2) ** depth, False),
    ],
    ids=["block by block", "a power", "jax", "contributions do not grow", "not squared", "no variances", "no share"],
)
def test_the_signal_exercise(answer, right):
    assert exercises.signal.judge(answer)[0] == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (lambda x, y, w, b, e: x + e * np.where(y[:, None], -1, 1) * np.sign(w), True),
        (lambda x, y, w, b, e: x + e * np.where(y[:, None], 1, -1) * np.sign(w), False),
        (lambda x, y, w, b, e: x + e * np.sign(w), False),
        (lambda x, y, w, b, e: x + e * (1 / (1 + np.exp(-x @ w - b)) - y)[:, None] * w, False),
        (lambda x, y, w, b, e: x, False),
    ],
    ids=["by class", "lower loss", "any class", "no sign", "no attack"],
)
def test_the_attack_exercise(answer, right):
    assert exercises.attack.judge(answer)[0] == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (lambda W1, b1, W2, b2: (W1, b1, W2 / 2, b2 / 2), True),
        (lambda W1, b1, W2, b2: (0.45 * W1, 0.45 * b1, W2, 0.45 * b2), True),
        (lambda W1, b1, W2, b2: (W1, b1, 0.45 * W2, 0.45 * b2 + 5), True),
        (lambda W1, b1, W2, b2: (8 * W1, 8 * b1, W2 / 8, b2), False),
        (lambda W1, b1, W2, b2: (W1, b1, W2 / 2, b2), False),
        (lambda W1, b1, W2, b2: (W1, b1, 1e-6 * W2, 1e-6 * b2), False),
        (lambda W1, b1, W2, b2: (W1, b1, W2, b2), False),
    ],
    ids=["scores", "homogeneous", "shifted", "two layers", "without the bias", "plateau", "unchanged"],
)
def test_the_disguise_exercise(answer, right):
    assert exercises.disguise.judge(answer)[0] == right


def products(times, v, steps, at_right_angles_to=None, first=False):
    """Lanczos' method, each new vector made orthogonal to so many of the last ones, before or after the diagonal."""
    basis, T = [v / np.linalg.norm(v)], np.zeros((steps, steps))
    for i in range(steps):
        new = np.array(times(basis[-1]))
        T[i, i] = new @ basis[-1]
        for _ in range(2):
            for old in basis[-(at_right_angles_to or len(basis)) :]:
                new = new - (new @ old) * old
        basis.append(new / np.linalg.norm(new))
        if i + 1 < steps:
            T[i, i + 1] = T[i + 1, i] = np.linalg.norm(new)
    return T


def another_start(times, v, steps):
    return products(times, v + 1, steps)


def one_more(times, v, steps):
    return times(v) @ v * 0 + products(times, v, steps)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (products, True),
        (lambda times, v, steps: jnp.asarray(products(times, v, steps)), True),
        (functools.partial(products, at_right_angles_to=2), False),
        (functools.partial(products, at_right_angles_to=1), False),
        (another_start, False),
        (one_more, False),
        (lambda times, v, steps: np.eye(steps), False),
    ],
    ids=["by hand", "jax", "ghosts", "last only", "another start", "one product more", "identity"],
)
def test_the_lanczos_exercise(answer, right):
    assert exercises.lanczos.judge(answer)[0] == right


def fair_pairs(nets, same=("rate", "decay", "seed"), limit=0.02, gap=lambda a, b: abs(a - b) / max(a, b)):
    return [
        (i, j)
        for i, a in enumerate(nets)
        for j, b in enumerate(nets[:i])
        if all(a[name] == b[name] for name in same) and a["batch"] != b["batch"] and gap(a["loss"], b["loss"]) < limit
    ]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (fair_pairs, True),
        (lambda nets: {tuple(reversed(pair)) for pair in fair_pairs(nets)}, True),
        (functools.partial(fair_pairs, same=("rate", "seed")), False),
        (functools.partial(fair_pairs, same=("rate", "decay")), False),
        (functools.partial(fair_pairs, limit=1.0), False),
        (functools.partial(fair_pairs, gap=lambda a, b: 0 if np.isnan(a - b) else abs(a - b) / b), False),
        (functools.partial(fair_pairs, gap=lambda a, b: abs(a - b) / min(a, b)), True),
        (functools.partial(fair_pairs, gap=lambda a, b: 2 * abs(a - b) / (a + b)), True),
        (functools.partial(fair_pairs, gap=lambda a, b: abs(np.log(a / b))), True),
        (functools.partial(fair_pairs, gap=lambda a, b: abs(a - b)), False),
        (functools.partial(fair_pairs, gap=lambda a, b: abs(a - b), limit=0.002), False),
        (functools.partial(fair_pairs, limit=0.005), False),
        (functools.partial(fair_pairs, limit=0.2), False),
        (functools.partial(fair_pairs, limit=0.35), False),
        (functools.partial(fair_pairs, gap=lambda a, b: abs(round(a, 2) - round(b, 2)), limit=1e-6), False),
        (lambda nets: [], False),
    ],
    ids=[
        *("right", "a set", "any decay", "any seed", "any loss", "failed runs", "of the lesser", "of the mean"),
        *("logarithms", "absolute", "a small absolute", "half a per cent", "20 %", "35 %", "rounded", "none"),
    ],
)
def test_the_fair_exercise(answer, right):
    assert exercises.fair.judge(answer)[0] == right


def test_training_to_a_loss_ends_at_it():
    for rate, arrives in ((0.25, True), (4.0, False)):
        steps, params, final = experiment.to_loss(16, rate, 0)
        np.testing.assert_allclose(final, experiment.mlp_loss(params, *experiment.signals("training")), rtol=1e-4)
        assert (0.98 * experiment.LOW < final <= 1.001 * experiment.LOW) == arrives
        assert steps < experiment.MOST_STEPS


# What the notebook suggests


def notebook_cells():
    path = Path(__file__).parent.parent / "notebooks" / "02_loss_landscapes.ipynb"
    return {cell.id.removeprefix("landscape-"): cell.source for cell in nbformat.read(path, as_version=4).cells}


def test_the_rise_along_the_line_between_two_solutions_is_taken_both_ways_and_above_each():
    def nets(*weights):
        return [{"params": {"w": np.full(4, w, np.float32)}} for w in weights]

    def square(params, x, y):
        return (params["w"] ** 2).mean()

    how = "no decay", "decay", "no decay, stopped"
    arms = {f"{batch}, {name}": nets(*([w] * 5)) for batch, w in ((16, 0.0), (500, 1.0)) for name in how}
    found, namespace = {}, {"np": np, "jax": jax, "loss_landscapes": room, "loss": square, "arms": arms, "order": {}}
    namespace |= {"HOW": how, "TRAIN": (np.zeros(1), np.zeros(1))}
    namespace["judge"] = lambda ruler, *rises: found.update({ruler: rises})
    for name in ("between", "between-rise"):
        exec(notebook_cells()[name], namespace)
    away, climb = namespace["AWAY"], namespace["climb"]
    np.testing.assert_allclose(climb("decay", 0)[0], away**2, atol=1e-5)
    np.testing.assert_allclose(climb("decay", 1)[0], (1 + away) ** 2 - 1, atol=1e-5)
    assert len(found) == 3
    np.testing.assert_allclose(list(found.values()), 0, atol=1e-3)  # a parabola is as steep at either place


@suggested_by("02_loss_landscapes")
def test_all_that_the_notebook_suggests_works():
    cells = notebook_cells()
    namespace = {"distances": np.linspace(-1, 1, 5)}
    for source in (
        *(cells[name] for name in ("01", "03", "05", "06", "09")),
        cells["17"].split("surfaces = ")[0],
        cells["20"].split("found = ")[0],
    ):
        exec(python(source), namespace)
    suggestions = re.findall(r"```python\n(.*?)```", cells["98"], re.DOTALL)
    results = []
    for source in suggestions:
        *body, last = source.strip().splitlines()
        exec("\n".join([*body, f"result = {last}"]), namespace)
        results.append(namespace["result"])
    slice_of_test, valleys, top, shifted, unbalanced, shift = results
    assert slice_of_test.argmin() == 2 and slice_of_test[2] > np.log(10)
    assert valleys == 1
    assert 1 < top < 2  # 2 / rate
    assert shift.low < 0 < shift.high
    for other in (shifted, unbalanced):
        assert other[2] == pytest.approx(0.007, abs=0.005)
        assert (other[[1, 3]] > 1.5 * eval(suggestions[0].replace("TEST", "TRAIN"), namespace)[[1, 3]]).all()
