"""Slices against the loss itself, spectra against an explicit Hessian, and the laws of rescaling."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Cells, changed
from conftest import suggested_by
from jax.flatten_util import ravel_pytree

from dlscale import loss_landscapes as room
from dlscale.course import records
from dlscale.lab import models
from dlscale.loss_landscapes import exercises, experiment

KEY = jax.random.key(0)
NET = models.mlp((4, 6, 5, 3))
SMOOTH = models.mlp((4, 6, 5, 3), activation="tanh")


def cross_entropy(model: models.Model):
    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    return loss


def weights(model: models.Model, seed: int = 0):
    """Of the shapes of the model's own, drawn by NumPy, which compiles nothing."""
    rng, shapes = np.random.default_rng(seed), jax.eval_shape(model.init, KEY)
    return jax.tree.map(lambda w: np.float32(rng.normal(size=w.shape) / np.sqrt(w.size / w.shape[-1])), shapes)


LOSS, SMOOTH_LOSS = cross_entropy(NET), cross_entropy(SMOOTH)
RNG = np.random.default_rng(0)
PARAMS, DATA = weights(NET), (np.float32(RNG.normal(size=(20, 4))), RNG.integers(0, 3, 20))


@functools.cache
def explicit_hessian() -> np.ndarray:
    flat, unravel = ravel_pytree(PARAMS)
    return np.asarray(jax.jit(jax.hessian(lambda w: SMOOTH_LOSS(unravel(w), *DATA)))(flat), np.float64)


def quadratic(w, curvatures):
    return (curvatures * w["w"] ** 2).sum() / 2


def filter_norms(tree):
    return [np.linalg.norm(np.reshape(w, (-1, w.shape[-1])), axis=0) for w in jax.tree.leaves(tree) if w.ndim > 1]


def test_filters_of_the_direction_have_the_norms_of_the_parameters():
    params = weights(models.lenet((16, 16, 1)))
    direction = room.random_direction(KEY, params)
    for ours, theirs in zip(filter_norms(direction), filter_norms(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert not any(np.any(d) for d in jax.tree.leaves(direction) if d.ndim < 2)
    assert np.any(room.random_direction(KEY, {"w": np.float32([[1, 0]] * 3)})["w"], axis=0).tolist() == [True, False]


def test_an_unnormalised_direction_is_standard_normal_and_depends_on_key_and_array():
    params = dict.fromkeys("ab", np.zeros((100, 100), np.float32))
    one, again, other = (jax.device_get(room.random_direction(jax.random.key(i), params, None)) for i in (1, 1, 2))
    assert max(abs(one["a"].mean()), abs(one["a"].std() - 1)) < 0.03
    assert (one["a"] == again["a"]).all()
    assert not np.allclose(one["a"], one["b"]) and not np.allclose(one["a"], other["a"])


def rescale(params, factor):
    """The same function: ReLU passes a positive factor on."""
    w, b = params["dense1"]["w"] * factor, params["dense1"]["b"] * factor
    return params | {"dense1": {"w": w, "b": b}, "dense2": params["dense2"] | {"w": params["dense2"]["w"] / factor}}


@pytest.mark.parametrize("factor", [0.2, 8.0])
def test_rescaling_a_relu_layer_changes_an_unnormalised_slice_only(factor):
    distances = np.linspace(-1, 1, 9)
    for normalize in ("filter", None):
        one, other = (
            room.line(LOSS, p, room.random_direction(KEY, p, normalize), distances, DATA)
            for p in (PARAMS, rescale(PARAMS, factor))
        )
        if normalize:
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
        else:
            assert np.abs(one - other).max() > 0.1


def test_line_and_plane_are_the_loss_at_the_points():
    u, v = (jax.device_get(room.random_direction(key, PARAMS)) for key in jax.random.split(KEY))
    x, y = np.linspace(-1, 1, 5), np.linspace(-0.5, 2, 4)
    surface, at = room.plane(LOSS, PARAMS, u, v, x, y, DATA), jax.jit(LOSS)

    def moved(a, b):
        return jax.tree.map(lambda w, d, e: np.float32(w + a * d + b * e), PARAMS, u, v)

    np.testing.assert_allclose(surface, [[at(moved(a, b), *DATA) for a in x] for b in y], rtol=1e-5)
    np.testing.assert_allclose(room.line(LOSS, PARAMS, u, x, DATA), [at(moved(a, 0), *DATA) for a in x], rtol=1e-5)


@pytest.mark.parametrize("count", [1, 7])
def test_any_number_of_points_is_shared_out_among_the_cores(count, monkeypatch):
    monkeypatch.setattr(room.devices, "cores", lambda: 3)
    params = {"w": jnp.array([1.0, 2.0])}
    distances = np.linspace(0, 1, count)
    ours = room.line(quadratic, params, {"w": jnp.array([1.0, 0.0])}, distances, (jnp.array([2.0, 4.0]),))
    np.testing.assert_allclose(ours, (1 + distances) ** 2 + 8, rtol=1e-6)


def test_pca_plane_finds_the_plane_of_a_path_that_lies_in_one():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.normal(size=(12, 2)))[0]
    coordinates = np.cumsum(rng.normal(size=(30, 2)) * (3, 1), axis=0)
    points = rng.normal(size=12) + coordinates @ basis.T
    found = room.pca_plane({"a": jnp.asarray(points[:, :8].reshape(30, 2, 4)), "b": jnp.asarray(points[:, 8:])})
    squares = np.linalg.svd(points - points.mean(0), compute_uv=False) ** 2
    np.testing.assert_allclose(found.explained, squares[:2] / squares.sum(), rtol=1e-4)
    np.testing.assert_allclose(found.path[-1], 0, atol=1e-5)
    assert (found.path[0] >= 0).all()
    axes = np.stack([ravel_pytree(tree)[0] for tree in (found.x, found.y)])
    np.testing.assert_allclose(ravel_pytree(found.origin)[0] + found.path @ axes, points, atol=1e-4)
    np.testing.assert_allclose(axes @ axes.T, np.eye(2), atol=1e-5)


def test_eigenvalues_are_those_of_the_explicit_hessian():
    expected = np.linalg.eigvalsh(explicit_hessian())[::-1]
    ours = room.hessian_eigenvalues(SMOOTH_LOSS, PARAMS, 8, KEY, DATA)
    np.testing.assert_allclose(ours, expected[:8], rtol=1e-3, atol=1e-3 * expected[0])


START = [2.75, 0.0, 4.0, 5.0, 0.5, 0.75, -1.0, 3.0, 1.0, 2.0, 1.5]  # the start is nearly orthogonal to that of 3


@pytest.mark.parametrize("curvatures", [[3.0] * 2 + [1.0] * 5 + [0.0] * 4, [0.0] * 11, START])
def test_a_spectrum_is_gone_through_to_its_end(curvatures):
    key = jax.random.key(370)
    ours = room.hessian_eigenvalues(quadratic, {"w": np.ones(11, np.float32)}, 11, key, (np.float32(curvatures),))
    np.testing.assert_allclose(ours, sorted(curvatures)[::-1], atol=1e-3)


def test_the_spectral_density_has_the_moments_of_the_spectrum():
    values = np.linalg.eigvalsh(explicit_hessian())
    found = room.spectral_density(SMOOTH_LOSS, PARAMS, KEY, DATA, probes=100, iterations=20)
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


SMALL = {"w": np.ones(3, np.float32), "b": np.ones((2, 2), np.float32)}


def total(params):
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(params))


def undefined(params):
    return total(params) + jnp.log(-params["w"].sum())


def plane_along(direction):
    return room.plane(total, SMALL, SMALL, direction, [0, 1], [0, 1])


def path(**trajectory):
    return room.pca_plane({name: np.float32(points) for name, points in trajectory.items()})


REFUSED = [
    (lambda: room.line(total, SMALL, {"w": np.ones(3)}, [0, 1]), "The direction has the shapes"),
    (lambda: room.line(total, SMALL, SMALL | {"b": np.ones((2, 3))}, [0, 1]), "The direction has the shapes"),
    (lambda: plane_along(jax.tree.map(lambda w: -2 * w, SMALL)), "parallel"),
    (lambda: plane_along(jax.tree.map(np.zeros_like, SMALL)), "direction is zero"),
    *((lambda k=k: room.hessian_eigenvalues(total, SMALL, k, KEY), "There are 7 parameters") for k in (0, 8)),
    *((lambda w=w: room.random_direction(KEY, w), "arrays of floats") for w in ({}, {"w": 1.0}, {"w": jnp.arange(3)})),
    (lambda: room.random_direction(KEY, SMALL, "filters"), "Did you mean 'filter'"),
    (lambda: path(w=np.arange(6).reshape(2, 3)), "lies on a line"),
    (lambda: path(w=np.outer(np.arange(4), np.ones(3))), "lies on a line"),
    (lambda: path(w=np.full((4, 3), np.nan)), "not finite"),
    (lambda: room.spectral_density(total, SMALL, KEY, probes=0), "probes"),
    (lambda: room.spectral_density(total, SMALL, KEY, iterations=0), "iterations"),
    (lambda: room.line(lambda params: params["w"] ** 2, SMALL, SMALL, [0.0, 1.0]), "such as a mean"),
    (lambda: room.line(undefined, SMALL, SMALL, [0.0, 1.0]), "loss is not finite at these parameters"),
    (lambda: room.hessian_eigenvalues(undefined, SMALL, 1, KEY), "loss is not finite at these parameters"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_cannot_work_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_all_recorded_networks_came_to_the_same_loss():
    minima, deep = (records.read(f"loss_landscapes-{name}") for name in ("minima", "deep"))
    losses = np.array([trial.measures["loss"] for trial in minima.trials])
    assert (np.abs(losses / experiment.TARGET - 1) > 0.01).sum() == 1  # a rate that was too large for one seed
    arrived = np.array([t.measures["loss"] for t in deep.trials if np.isfinite(t.measures["rise"])])
    assert arrived.size > 0.9 * len(deep.trials)
    np.testing.assert_allclose(arrived, experiment.DEEP_TARGET, rtol=0.01)


def halved_square(w, x, y):
    return (w**2).sum() / 2


def ended(steps, target, rate, **more):
    """Training whose every step is known: it multiplies w = (3, 4) by 1 - rate."""
    given, batches = (np.zeros((1, 1), np.float32), np.zeros(1, np.int32)), np.zeros((steps, 1), np.int32)
    return experiment.to_loss(halved_square, np.float32([3, 4]), batches, given, target, rate, **more)


@pytest.mark.parametrize(("rate", "arrives"), [(0.1, True), (10.0, False)])
def test_training_to_a_loss_ends_at_it(rate, arrives):
    steps, w, final = ended(2000, 0.05, rate)
    np.testing.assert_allclose(final, halved_square(w, 0, 0), rtol=1e-4)
    assert (0.98 * 0.05 < final <= 1.001 * 0.05) == arrives and steps < 2000


def test_decay_shortens_and_a_longest_gradient_shortens_steps():
    plain, decayed, short = (ended(1, 0.0, 0.5, **more)[1] for more in ({}, {"decay": 0.2}, {"longest": 0.01}))
    np.testing.assert_allclose([plain, decayed, short], [[1.5, 2], [1.2, 1.6], [2.997, 3.996]], rtol=1e-5)


@pytest.mark.long
def test_the_largest_eigenvalue_and_the_normalised_rise_rank_minima_alike():
    loss, (training, _), measures = experiment.mean_loss("signals"), experiment.examples("signals"), []
    for batch, rate in experiment.ARMS["signals"]:
        _, params, _ = experiment.trained("signals", batch, rate, 0)
        (top,) = room.hessian_eigenvalues(loss, params, 1, KEY, training)
        measures.append((top, experiment.rise(loss, params, training)))
    ranks = np.argsort(np.argsort(measures, axis=0), axis=0)
    assert np.corrcoef(ranks.T)[0, 1] > 0.85


GAP = 'abs(one["loss"] / other["loss"] - 1)'
ANSWERS = {  # of each exercise: answers or changes of the solution, and whether they are right
    "direction": [
        (("return direction", "return {name: jnp.asarray(d) for name, d in direction.items()}"), True),
        (("tuple(range(w.ndim - 1))", "None"), False),  # one size for a whole layer
        (("tuple(range(w.ndim - 1))", "0"), False),  # right for dense layers only
        (("if w.ndim > 1 else np.zeros_like(w)", ""), False),  # biases move
    ],
    "power": [
        (("range(steps)", "range(steps + 1)"), True),  # the value of the last vector
        (("v @ new", "new[0] / v[0]"), True),
        (("v @ new", "np.linalg.norm(new)"), False),
        (("range(steps)", "range(3)"), False),
        (("range(steps)", "range(300)"), False),
    ],
    "sharp": [(10, True), (-0.1, True), (99**0.5, False), (100, False), (0, False)],
    "fair": [
        ((GAP, 'abs(np.log(one["loss"] / other["loss"]))'), True),
        (("for i in range(j)", "for i in range(j + 1)"), True),
        (('("rate", "decay", "seed")', '("rate", "seed")'), False),
        (('("rate", "decay", "seed")', '("rate", "decay")'), False),
        ((f"{GAP} < 0.02", f"not {GAP} >= 0.02"), False),  # a failed run is fair
        ((GAP, 'abs(one["loss"] - other["loss"])'), False),
        ((f"{GAP} < 0.02", 'round(one["loss"], 2) == round(other["loss"], 2)'), False),
        *((("< 0.02", f"< {limit}"), False) for limit in (0.005, 0.2, 1.0)),
        (lambda nets: [], False),
    ],
}


@pytest.mark.parametrize(
    ("name", "answer", "right"), [(name, *pair) for name, answers in ANSWERS.items() for pair in answers]
)
def test_answers(name, answer, right):
    exercise = getattr(exercises, name)
    judged, line = exercise.judge(changed(exercise, *answer) if isinstance(answer, tuple) else answer)
    assert judged is right, line


LESSON = "02_loss_landscapes"


def lesson(changes, *identities, notebook=LESSON, prefix="landscape"):
    cells = Cells(notebook, changes)
    cells.run(*(f"{prefix}-{name}" for name in ("setup", *identities)))
    return cells


def test_the_deep_network_of_the_record_is_that_of_the_lesson():
    given, cells = (experiment.deep_start(0), *experiment.digits()[1]), lesson({}, "block")
    for switches in experiment.VARIANTS.values():
        assert cells["deep_loss"](*given, *switches) == pytest.approx(experiment.deep_loss(*given, *switches), rel=1e-3)


@suggested_by(LESSON)
def test_two_slices_of_one_network_look_alike():
    cells = lesson({}, "network", "plane")
    directions = [cells["random_direction"](cells["trained"], seed) for seed in (5, 6)]
    along = np.linspace(-0.1, 0.1, 3, dtype=np.float32)
    height = np.asarray(cells["plane"](cells["trained"], *directions, along))
    others = height[[0, 1, 1, 2], [1, 0, 2, 1]]
    assert others.min() > height[1, 1] and others.max() < 4 * others.min()


@suggested_by(LESSON)
def test_another_start_finds_the_same_eigenvalue():
    cells = lesson({}, "network", "small", "lanczos-code")
    tops = [
        np.linalg.eigvalsh(cells["lanczos"](cells["hessian_times"], v, 20))[-1]
        for v in (np.ones(418), np.random.default_rng(0).normal(size=418).astype(np.float32))
    ]
    assert tops[0] == pytest.approx(tops[1], rel=1e-2)


@suggested_by(LESSON)
def test_with_a_larger_share_for_each_block_the_valley_is_narrow():
    others = ('"plain": (False, False),', '"norm": (False, True),', '"skip and norm": (True, True),')
    changes = dict.fromkeys(others, "") | {"17)": "5)"}
    wide, narrow = (lesson(changes | more, "network", "block", "deep-train") for more in ({}, {"np.sqrt(20)": "1.0"}))
    ends = [cells["planes"]["skip", 0.5][2, [1, 3]].mean() for cells in (wide, narrow)]
    assert not ends[1] < 2 * ends[0]


FURTHER = "02_loss_landscapes_further"


@suggested_by(FURTHER)
def test_a_walk_of_equal_steps_lies_in_a_plane_as_theory_says():
    cells = lesson({}, "aimless", "held", notebook=f"further/{FURTHER}", prefix="landscape-further")
    steps = cells["random_steps"](np.ones(60), np.random.default_rng(0))
    assert cells["share_held"](np.cumsum(steps, axis=0)) == pytest.approx(76, abs=3)


@suggested_by(FURTHER)
def test_in_64_bits_ghosts_come_later():
    cells = lesson({}, "short", "short-method", notebook=f"further/{FURTHER}", prefix="landscape-further")
    H = np.float64(jax.jit(jax.hessian(cells["small_loss"]))(cells["start"]))
    v = np.random.default_rng(0).normal(size=len(H))
    copies = []
    for times, start in ((lambda u: H @ u, v), (cells["hessian_times"], np.float32(v))):
        values = np.linalg.eigvalsh(cells["short_lanczos"](times, start, 100))
        copies.append((np.abs(values / values[-1] - 1) < 1e-3).sum())
    assert copies[0] <= copies[1] and copies[1] > 1


@suggested_by(FURTHER)
def test_a_tenth_of_the_decay_shortens_less():
    cells = lesson({"range(200, 216)": "range(200, 201)", "0.001": "0.0001"}, "decay-train", "decay-rises",
                   notebook=f"further/{FURTHER}", prefix="landscape-further")  # fmt: skip
    assert 0.9 < cells["length"](cells["decayed"][0]) / cells["length"](cells["without"][0]) < 1.05
