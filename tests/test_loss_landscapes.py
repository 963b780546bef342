"""Slices against the loss itself, spectra against an explicit Hessian and SciPy, and the laws of rescaling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree
from scipy.sparse.linalg import LinearOperator, eigsh

from dlscale import loss_landscapes as room
from dlscale.lab import models

KEY = jax.random.key(0)
NET = models.mlp((4, 6, 5, 3))
SMOOTH = models.mlp((4, 6, 5, 3), activation="tanh")
LENET = models.lenet((16, 16, 1), classes=3)
seeds = st.integers(0, 2**31 - 1)


def cross_entropy(model: models.Model):
    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    return loss


LOSS, SMOOTH_LOSS = cross_entropy(NET), cross_entropy(SMOOTH)


def examples(model_shape: tuple[int, ...] = (4,), seed: int = 0, count: int = 20):
    key_x, key_y = jax.random.split(jax.random.key(seed))
    return jax.random.normal(key_x, (count, *model_shape)), jax.random.randint(key_y, (count,), 0, 3)


def explicit_hessian(loss, params, data) -> np.ndarray:
    flat, unravel = ravel_pytree(params)
    return np.asarray(jax.jit(jax.hessian(lambda w: loss(unravel(w), *data)))(flat), np.float64)


def quadratic(w, curvatures):
    return (curvatures * w["w"] ** 2).sum() / 2


# Directions


def filter_norms(tree):
    return [jnp.sqrt((w**2).sum(tuple(range(w.ndim - 1)))) for w in jax.tree.leaves(tree) if w.ndim > 1]


@pytest.mark.parametrize("model", [NET, LENET])
def test_filters_of_the_direction_have_the_norms_of_the_parameters(model):
    params = jax.jit(model.init)(KEY)
    direction = room.random_direction(KEY, params)
    for ours, theirs in zip(filter_norms(direction), filter_norms(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    flat = [d for d in jax.tree.leaves(direction) if d.ndim < 2]
    assert flat and not any(d.any() for d in flat)


def test_layers_of_the_direction_have_the_norms_of_the_parameters():
    params = NET.init(KEY)
    direction = room.random_direction(KEY, params, "layer")
    for name in params:
        np.testing.assert_allclose(jnp.linalg.norm(direction[name]["w"]), jnp.linalg.norm(params[name]["w"]), rtol=1e-5)
        assert not direction[name]["b"].any()
    assert not np.allclose(filter_norms(direction)[0], filter_norms(params)[0], rtol=1e-2)


def test_a_direction_as_drawn_is_standard_normal_in_every_parameter():
    params = {"w": jnp.zeros((300, 300)), "b": jnp.zeros(10_000)}
    for d in jax.tree.leaves(room.random_direction(KEY, params, None)):
        assert abs(float(d.mean())) < 0.03
        assert abs(float(d.std()) - 1) < 0.03


def test_directions_differ_by_key_and_array_and_repeat_for_the_same_key():
    params = {"a": jnp.ones((5, 5)), "b": jnp.ones((5, 5))}
    one, again, other = (room.random_direction(jax.random.key(i), params) for i in (1, 1, 2))
    assert (one["a"] == again["a"]).all()
    assert not jnp.allclose(one["a"], one["b"])
    assert not jnp.allclose(one["a"], other["a"])


def test_a_zero_filter_gets_a_zero_direction():
    params = {"w": jnp.ones((3, 2)).at[:, 1].set(0)}
    direction = room.random_direction(KEY, params)["w"]
    assert direction[:, 0].any()
    assert not direction[:, 1].any()


def rescale(params, factor):
    """The same function: ReLU passes a positive factor on."""
    w, b = params["dense1"]["w"] * factor, params["dense1"]["b"] * factor
    return params | {"dense1": {"w": w, "b": b}, "dense2": params["dense2"] | {"w": params["dense2"]["w"] / factor}}


@given(seeds, st.floats(-3, 3))
@settings(deadline=None, max_examples=25)
def test_a_filter_normalised_slice_does_not_change_when_a_relu_layer_is_rescaled(seed, log2_factor):
    key, data = jax.random.key(seed), examples(seed=seed)
    distances = np.linspace(-1, 1, 9)
    params = NET.init(key)
    params = jax.tree.map(lambda w: w + 0.1, params)  # biases too
    curves = [
        room.line(LOSS, p, room.random_direction(key, p), distances, data)
        for p in (params, rescale(params, 2**log2_factor))
    ]
    np.testing.assert_allclose(*curves, rtol=2e-4, atol=1e-5)


def test_an_unnormalised_slice_does_change_when_a_relu_layer_is_rescaled():
    params, data, distances = NET.init(KEY), examples(), np.linspace(-1, 1, 9)
    direction = room.random_direction(KEY, params, None)
    curves = [room.line(LOSS, p, direction, distances, data) for p in (params, rescale(params, 8.0))]
    assert np.abs(curves[0] - curves[1]).max() > 0.1


# Slices


def test_line_and_plane_are_the_loss_at_the_points():
    params, data = NET.init(KEY), examples()
    u, v = (room.random_direction(key, params) for key in jax.random.split(KEY))
    x, y = np.linspace(-1, 1, 5), np.linspace(-0.5, 2, 4)
    surface = room.plane(LOSS, params, u, v, x, y, data)
    assert surface.shape == (4, 5)
    for i, b in enumerate(y):
        for j, a in enumerate(x):
            moved = jax.tree.map(lambda w, d, e, a=a, b=b: w + a * d + b * e, params, u, v)
            np.testing.assert_allclose(surface[i, j], LOSS(moved, *data), rtol=1e-5)
    np.testing.assert_allclose(
        room.line(LOSS, params, u, x, data),
        room.plane(LOSS, params, u, v, x, [0.0], data)[0],
        rtol=1e-5,
    )


@pytest.mark.parametrize("batch_size", [1, 7, 10, 20, 30])
def test_a_batched_loss_is_the_same_loss(batch_size):
    params, data, distances = NET.init(KEY), examples(count=20), np.linspace(-1, 1, 5)
    direction, batched = room.random_direction(KEY, params), room.Batched(LOSS, batch_size)
    np.testing.assert_allclose(
        room.line(batched, params, direction, distances, data),
        room.line(LOSS, params, direction, distances, data),
        rtol=1e-5,
    )
    ours, whole = (room.hessian_product(loss, params, direction, data) for loss in (batched, LOSS))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    assert room.Batched(LOSS, batch_size) == batched, "compiled once"


@pytest.mark.parametrize("batch_size", [0, -1, 2.5])
def test_batches_of_no_examples(batch_size):
    with pytest.raises(ValueError, match="batch_size must be a whole number"):
        room.Batched(LOSS, batch_size)


def test_a_batched_loss_that_is_not_a_mean_is_no_loss():
    def each(params, x, y):
        return (NET.apply(params, x) ** 2).mean(0)

    with pytest.raises(ValueError, match="must be one number"):
        room.line(room.Batched(each, 5), NET.init(KEY), NET.init(KEY), [0.0], examples())


@pytest.mark.parametrize("count", [1, 2, 3, 7])
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


@pytest.mark.parametrize(("model", "loss"), [(NET, LOSS), (SMOOTH, SMOOTH_LOSS)])
def test_eigenvalues_are_those_of_the_explicit_hessian(model, loss):
    params, data = model.init(KEY), examples()
    expected = np.linalg.eigvalsh(explicit_hessian(loss, params, data))[::-1]
    for k in (1, 8):
        ours = room.hessian_eigenvalues(loss, params, k, KEY, data)
        np.testing.assert_allclose(ours, expected[:k], rtol=1e-3, atol=1e-3 * expected[0])


def test_all_eigenvalues_of_a_small_net():
    model = models.mlp((2, 3, 2), activation="tanh")
    loss, params = cross_entropy(model), model.init(KEY)
    x, y = examples((2,))
    data = x, y % 2
    expected = np.linalg.eigvalsh(explicit_hessian(loss, params, data))[::-1]
    ours = room.hessian_eigenvalues(loss, params, len(expected), KEY, data)
    np.testing.assert_allclose(ours, expected, atol=1e-4 * expected[0])


def test_eigenvalues_are_those_of_scipy_on_lenet():
    params, data = LENET.init(KEY), examples((16, 16, 1))
    loss = cross_entropy(LENET)
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


@given(st.sampled_from([1, 2, 11, 40]).flatmap(curvatures), seeds)  # each length is compiled once
@example([2.75, 0.0, 4.0, 5.0, 0.5, 0.75, -1.0, 3.0, 1.0, 2.0, 1.5], 370)  # the start is nearly orthogonal to that of 3
@settings(deadline=None, max_examples=40)
def test_eigenvalues_of_a_quadratic_are_its_curvatures(curvatures, seed):
    params = {"w": jnp.ones(len(curvatures))}
    k = max(1, len(curvatures) // 3)
    ours = room.hessian_eigenvalues(quadratic, params, k, jax.random.key(seed), (jnp.array(curvatures),))
    np.testing.assert_allclose(ours, sorted(curvatures)[::-1][:k], atol=2e-3 * np.abs(curvatures).max() + 1e-6)


def test_a_spectrum_of_few_distinct_values_is_gone_through_to_its_end():
    curvatures = jnp.array([3.0] * 2 + [1.0] * 5 + [0.0] * 10)
    ours = room.hessian_eigenvalues(quadratic, {"w": jnp.ones(17)}, 17, KEY, (curvatures,))
    np.testing.assert_allclose(ours, curvatures, atol=1e-4)


def test_a_flat_loss_has_zero_eigenvalues():
    ours = room.hessian_eigenvalues(quadratic, {"w": jnp.ones(20)}, 2, KEY, (jnp.zeros(20),))
    assert ours.tolist() == [0, 0]


def test_the_product_is_the_hessian_times_the_vector():
    params, data = SMOOTH.init(KEY), examples()
    vector = room.random_direction(KEY, params, None)
    expected = explicit_hessian(SMOOTH_LOSS, params, data) @ np.asarray(ravel_pytree(vector)[0])
    ours = ravel_pytree(room.hessian_product(SMOOTH_LOSS, params, vector, data))[0]
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_eigenvalues_and_density_share_one_program():
    def fresh(params, x):
        return quadratic(params, x)

    params, data = {"w": jnp.ones(30)}, (jnp.arange(30.0),)
    before = room._extend._cache_size()
    room.hessian_eigenvalues(fresh, params, 1, KEY, data)
    room.hessian_eigenvalues(fresh, params, 2, KEY, data)
    room.spectral_density(fresh, params, KEY, data, probes=2, iterations=20)
    assert room._extend._cache_size() == before + 1


def test_the_trace_is_exact_for_a_diagonal_hessian_and_unbiased_otherwise():
    exact = room.hessian_trace(quadratic, {"w": jnp.ones(4)}, KEY, (jnp.array([1.0, 2.0, 3.0, -4.0]),))
    np.testing.assert_allclose(exact, 2, rtol=1e-5)
    params, data = SMOOTH.init(KEY), examples()
    estimates = np.asarray(room.hessian_trace(SMOOTH_LOSS, params, KEY, data, probes=1000))
    error = estimates.mean() - np.trace(explicit_hessian(SMOOTH_LOSS, params, data))
    assert abs(error) < 4 * estimates.std() / np.sqrt(1000)


def test_the_spectral_density_has_the_moments_of_the_spectrum():
    params, data = SMOOTH.init(KEY), examples()
    values = np.linalg.eigvalsh(explicit_hessian(SMOOTH_LOSS, params, data))
    found = room.spectral_density(SMOOTH_LOSS, params, KEY, data, probes=200, iterations=30)
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

PARAMS = {"w": jnp.ones(3), "b": jnp.ones((2, 2))}


def total(params):
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "direction", [{"w": jnp.ones(3)}, {"w": jnp.ones(3), "b": jnp.ones((2, 3))}, PARAMS | {"c": jnp.ones(1)}]
)
def test_a_direction_of_another_structure_is_refused(direction):
    with pytest.raises(ValueError, match=r"another structure than the parameters: at \['[bc]'\]"):
        room.line(total, PARAMS, direction, [0, 1])
    with pytest.raises(ValueError, match="another structure"):
        room.plane(total, PARAMS, PARAMS, direction, [0, 1], [0, 1])
    with pytest.raises(ValueError, match="another structure"):
        room.hessian_product(total, PARAMS, direction)


@pytest.mark.parametrize("factor", [1.0, -2.0, 1e-3])
def test_a_plane_through_parallel_directions_is_refused(factor):
    other = jax.tree.map(lambda w: factor * w, PARAMS)
    with pytest.raises(ValueError, match="parallel"):
        room.plane(total, PARAMS, PARAMS, other, [0, 1], [0, 1])


def test_a_plane_through_a_zero_direction_is_refused():
    with pytest.raises(ValueError, match="direction is zero"):
        room.plane(total, PARAMS, PARAMS, jax.tree.map(jnp.zeros_like, PARAMS), [0, 1], [0, 1])


@pytest.mark.parametrize("k", [0, 8, 1.5])
def test_more_eigenvalues_than_parameters_are_refused(k):
    with pytest.raises(ValueError, match="There are 7 parameters, hence as many eigenvalues"):
        room.hessian_eigenvalues(total, PARAMS, k, KEY)


CALLS = {
    "line": lambda loss: room.line(loss, PARAMS, PARAMS, [0.0, 1.0]),
    "plane": lambda loss: room.plane(loss, PARAMS, PARAMS, PARAMS | {"w": jnp.zeros(3)}, [0, 1], [0, 1]),
    "eigenvalues": lambda loss: room.hessian_eigenvalues(loss, PARAMS, 1, KEY),
    "density": lambda loss: room.spectral_density(loss, PARAMS, KEY),
    "trace": lambda loss: room.hessian_trace(loss, PARAMS, KEY),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_loss_must_be_one_number(call):
    with pytest.raises(ValueError, match=r"array of shape \(3,\): take its mean"):
        call(lambda params: params["w"] ** 2)
    with pytest.raises(ValueError, match="several values"):
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
        room.random_direction(KEY, PARAMS, "filters")


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
        room.spectral_density(total, PARAMS, KEY, **{name: 0})
