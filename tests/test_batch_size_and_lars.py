"""Noise scales against sampled batches and closed forms, and the critical batch against the law it fits."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from dlscale import batch_size_and_lars as room
from dlscale.batch_size_and_lars import exercises
from dlscale.batch_size_and_lars import experiment as recorded
from dlscale.course.sources import python
from dlscale.lab import data, models, train
from dlscale.page import figures

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
        decayed = "only" not in arm or name == "w"
        adapted = arm != "LARS, matrices only" or name == "w"
        factor = int(arm.partition("×")[2] or 1)
        step = gradient[name] + factor * recorded.WEIGHT_DECAY * decayed * params[name]
        norms = np.linalg.norm(params[name]), np.linalg.norm(step)
        ratio = recorded.TRUST_COEFFICIENT * norms[0] / norms[1] if adapted and min(norms) > 0 else 1.0
        expected = -rate / 10 * ratio * step  # the first of ten steps of warm-up
        np.testing.assert_allclose(updates[name], expected, rtol=1e-4, atol=1e-6 * np.abs(expected).max(initial=0))


@pytest.mark.parametrize("matrices_only", [False, True])
def test_one_ratio_is_that_of_a_single_layer(matrices_only):
    params, gradient = tree((2.0, 3.0), 0), tree((0.1, 20.0), 1)
    optimizer = recorded.ARMS["one ratio, matrices only" if matrices_only else "one ratio"][0](0.5, 100.0)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    adapted = ["w"] if matrices_only else ["w", "b"]
    steps = {name: gradient[name] + recorded.WEIGHT_DECAY * (name in adapted) * params[name] for name in SHAPES}
    long, step = (np.linalg.norm(np.concatenate([part[name].ravel() for name in adapted])) for part in (params, steps))
    for name in SHAPES:
        ratio = recorded.TRUST_COEFFICIENT * long / step if name in adapted else 1.0
        np.testing.assert_allclose(updates[name], -0.05 * ratio * steps[name], rtol=1e-4)


def test_length_1_is_that_of_the_whole_step():
    params, gradient = tree((2.0, 3.0), 0), tree((0.1, 20.0), 1)
    optimizer = recorded.ARMS["length 1"][0](0.5, 100.0)
    updates, _ = optimizer.update(gradient, optimizer.init(params), params)
    steps = {name: gradient[name] + recorded.WEIGHT_DECAY * params[name] for name in SHAPES}
    length = np.sqrt(sum((step**2).sum() for step in steps.values()))
    for name in SHAPES:
        np.testing.assert_allclose(updates[name], -0.05 * steps[name] / length, rtol=1e-4)


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


# The recorded SGD


def test_descending_is_sgd_with_momentum():
    signals = recorded.fresh_signals("validation")
    rows, rates = (
        recorded.deck(0, 1, len(signals.x_train))[:120].reshape(4, 30),
        np.array([0.1, 0.2, 0.1, 0.3], np.float32),
    )
    (ours, _), losses = recorded.descend(
        recorded.at_rest(0), rows, rates, np.float32(0.9), signals.x_train, signals.y_train
    )
    params = recorded.at_rest(0)[0]

    def loss(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(recorded.NETWORK.apply(params, x), y).mean()

    velocity = jax.tree.map(np.zeros_like, params)
    for batch, rate, seen in zip(rows, rates, losses, strict=True):
        value, gradient = jax.value_and_grad(loss)(params, signals.x_train[batch], signals.y_train[batch])
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradient)
        params = jax.tree.map(lambda w, v, rate=rate: w - rate * v, params, velocity)
        assert seen == pytest.approx(float(value), rel=1e-4)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_deck_deals_every_card_once_in_each_round():
    cards = recorded.deck(3, 4, 50).reshape(4, 50)
    assert (np.sort(cards) == np.arange(50)).all() and len({tuple(round_) for round_ in cards}) == 4


@pytest.mark.parametrize(("rate", "learned"), [(1.0, True), (2.0**20, False)])
def test_a_trial_learns_or_guesses(rate, learned):
    measures = recorded.sgd_trial(512, 16, 2, rate, seed=0, judged_on="test")
    assert (measures["accuracy"] > 30) == learned and measures["early_loss"] <= 99


# Exercises: right answers of other shapes pass, the naive ones do not


def test_the_noise_scale_from_workers():
    def by_variance(gradients, b):  # the noise is b times the unbiased variance between the workers
        noise = b * gradients.var(1, ddof=1).sum(-1).mean()
        return noise / ((gradients.mean(1) ** 2).sum(-1).mean() - noise / (gradients.shape[1] * b))

    def divided_too_early(gradients, b):
        return np.mean([by_variance(one[None], b) for one in gradients])

    def signal_with_noise(gradients, b):
        return b * gradients.var(1, ddof=1).sum(-1).mean() / (gradients.mean(1) ** 2).sum(-1).mean()

    assert exercises.noise.judge(by_variance)[0]
    for naive in (divided_too_early, signal_with_noise):
        assert not exercises.noise.judge(naive)[0]


@pytest.mark.parametrize(
    ("rule", "right"),
    [
        (lambda other, critical, batch, rate: rate * other / batch, False),
        (lambda other, critical, batch, rate: rate * np.sqrt(other / batch), False),
        (lambda other, critical, batch, rate: rate * other / batch * (batch + critical) / (other + critical), True),
    ],
    ids=["linear", "root", "multiplied out"],
)
def test_the_rate_for_another_batch(rule, right):
    assert exercises.rate_for.judge(rule)[0] == right


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([(11, 96, 0.5, 0.75), (5, 480, 0.5, 0.75)], "can be had in at most 300"),
        ([(8, 32, 0.5, 0), (4, 128, 0.5, 0), (4, 512, 0.5, 0)], "can be had in at most 300"),
        ([(10, 128, 0.5, 0), (6, 512, 0.5, 0)], "more than a point lower"),
        ([(16, 512, 64.0, 0.9)], "more than a point lower"),
        ([(17, 512, 0.5, 0.9)], "16 epochs altogether"),
        ([(8, 4096, 0.5, 0.9)], "Batches must be"),
        ([(8, 32, 0.5)], "stages \\(epochs"),
    ],
    ids=["slower", "growing", "no momentum", "diverges", "too long", "too large", "no momentum given"],
)
def test_a_plan_is_judged_by_updates_and_accuracy(stages, words):
    right, line = exercises.plan.judge(stages)
    assert not right
    assert re.search(words, line), line


def test_another_good_plan_passes_and_hears_by_how_much(capsys):
    assert exercises.plan.judge([[12.5, 150, 0.5, 0.75], (3.5, 600, 0.5, 0.75)])[0]
    assert re.search(r"\d+ updates, .* points", capsys.readouterr().out)


def lars_like(gradient_norm="of each", defined=True, decayed=True):
    """A step of LARS in NumPy, or one with a mistake."""

    def steps(weights, momenta, gradients, rate=1.0, coefficient=0.01, decay=5e-4, beta=0.9):
        d = [g + decay * w for w, g in zip(weights, gradients, strict=True)]
        norm = np.linalg.norm
        below = [norm(np.ravel(step if decayed else g)) for step, g in zip(d, gradients, strict=True)]
        above = [norm(np.ravel(w)) for w in weights]
        if gradient_norm == "of all":
            below, above = [norm(below)] * len(d), [norm(above)] * len(d)
        with np.errstate(all="ignore"):
            quotients = coefficient * np.array(above) / below
        defined_at = (np.array(above) > 0) & (np.array(below) > 0)
        ratios = np.where(defined_at, quotients, 1.0) if defined else quotients
        new = [beta * m + rate * r * step for m, r, step in zip(momenta, ratios, d, strict=True)]
        return [w - m for w, m in zip(weights, new, strict=True)], new

    return steps


@pytest.mark.parametrize(
    ("options", "right"),
    [({}, True), ({"gradient_norm": "of all"}, False), ({"defined": False}, False), ({"decayed": False}, False)],
    ids=["right", "one ratio", "zero norms", "decay not in the norm"],
)
def test_a_step_of_lars(options, right):
    assert exercises.step.judge(lars_like(**options))[0] == right


def test_one_output_too_many_is_told():
    right, line = exercises.overflow.judge(32753)
    assert not right and "65,506" in line


# The notebook's own step of LARS


@pytest.mark.parametrize("matrices_only", [False, True])
def test_the_step_in_the_notebook_is_that_of_optax(matrices_only):
    names: dict = {"jnp": jnp}
    exec(source("batch-76"), names)
    masks = dict.fromkeys(("weight_decay_mask", "trust_ratio_mask"), recorded.matrices) if matrices_only else {}
    library = optax.lars(1.0, 5e-4, trust_coefficient=0.01, momentum=0.9, **masks)
    params = {"w": tree((2.0, 0.0), 0)["w"], "b": np.zeros(3, np.float32)}
    state, memory = library.init(params), {name: (np.zeros_like(w),) for name, w in params.items()}
    for seed in range(5):
        gradient = tree((0.1, 20.0) if seed != 3 else (0.0, 0.0), seed)
        updates, state = library.update(gradient, state, params)
        for name, w in params.items():
            new, memory[name] = names["lars_step"](w, memory[name], gradient[name], 1, matrices_only=matrices_only)
            np.testing.assert_allclose(new - w, updates[name], rtol=1e-3, atol=1e-5)
        params = jax.tree.map(lambda w, u: np.asarray(w + u), params, updates)


# Figures


def test_the_tops_of_one_step_and_their_names_lie_within_the_axes(monkeypatch):
    monkeypatch.setattr(figures, "show", lambda figure, alt: figure.canvas.draw())
    batches, rates = (8, 64, 1024), np.geomspace(0.02, 2, 10)
    falls = [np.tile(0.67 * rates - rates**2 / 2 * (0.66 + 18 / batch), (4, 1)) for batch in batches]
    names: dict = {"ONE_STEP": batches, "STEP_RATES": rates, "gained": falls, "bend": 0.66, "shake": 18.0}
    exec(
        source("batch-onestep"),
        names | {"np": np, "figures": figures, "exact": {(0, 4): room.NoiseScale(0.67, 50)}},
        names,
    )
    inside = names["ax"].get_window_extent().contains
    marks = [names["ax"].transData.transform(top) for top in names["tops"].values()]
    corners = [corner for text in names["ax"].texts for corner in text.get_window_extent().corners()]
    assert len(marks) == 3 and len(corners) == 12
    assert all(inside(x, y) for x, y in [*marks, *corners])


# What to try next: each suggestion runs, on the notebook's own cells


NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "04_batch_size_and_lars.ipynb"


def source(identity: str) -> str:
    return next(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.id == identity)


@pytest.fixture(scope="module")
def cells():
    """The names that the notebook's cells define, those that a suggestion needs."""
    path = NOTEBOOK
    names: dict = {}
    wanted = ("01", "03", "05", "07", "target", "09", "10", "14", "26", "warm-method", "61")
    cut = {"batch-14": "descents =", "batch-26": "passed =", "batch-warm-method": "EPOCHS, FAIL ="}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.id in {f"batch-{name}" for name in wanted}:
            exec(python(cell.source).partition(cut.get(cell.id, "\0"))[0], names)
    return names | {"EPOCHS": 16}


def to_the_law(truth: str) -> dict:
    """All cells from the target to the law, with a nearer target and these labels."""
    names: dict = {}
    for identity in ("01", "03", "05", "07", "target", "09", "10", "14", "16", "19"):
        code = "TARGET, LOOKS = 1.6, 56" if identity == "target" else source(f"batch-{identity}")
        exec(code + truth * (identity == "03"), names)
    return names


@pytest.fixture(scope="module")
def nearer():
    return to_the_law(truth="")


@suggested_by("04_batch_size_and_lars")
def test_a_nearer_target_has_a_smaller_critical_batch(nearer):
    assert 20 < nearer["law"].batch.mean < 155
    assert nearer["arrived"].shape == (7, 4, 8) and (nearer["needed"] > 0).all()


@suggested_by("04_batch_size_and_lars")
def test_wrong_labels_make_the_critical_batch_of_the_nearer_target_larger(nearer):
    spoiled = "\ny_train = y_train.copy()\ny_train[::10] = np.random.default_rng(0).integers(0, 10, len(y_train[::10]))"
    assert to_the_law(spoiled)["law"].batch.mean > 1.2 * nearer["law"].batch.mean


@suggested_by("04_batch_size_and_lars")
def test_a_target_that_few_reach_is_not_fitted(nearer):
    names = nearer | {"arrived": np.zeros((7, 4, 8), bool)}
    with pytest.raises(ValueError, match="nearer TARGET"):
        exec(source("batch-16"), names)


def test_momentum_can_be_given(cells):
    looks = cells["to_target"](3, 1, 0, momentum=0.5)
    assert np.nanmin(looks[:, 1]) <= 1.4


def test_another_plan_runs(cells):
    cells["train_plan"].__globals__["EPOCHS"] = 16
    cells["PLANS"]["smaller stages"] = ((32, 64, 128), np.array([1, 1 / 2, 1 / 4]), 0.0)
    looks = cells["train_plan"]("smaller stages", 0.5, 0)
    assert looks[-1, 6] > 0.4
    assert looks[-1, 0] < 1501
    colors = re.search(r"\(figures\.GREY[^)]*\)", source("batch-63"))[0]
    assert colors.count("figures.") >= len(cells["PLANS"])  # the fifth is drawn, too


def test_wrong_labels_change_signal_and_noise(cells):
    x, y = cells["x_train"], cells["y_train"].copy()
    y[::10] = np.random.default_rng(0).integers(0, 10, len(y[::10]))
    params = cells["run"](0, (cells["VALIDATION"],), 1.0, 256, every=256 * 60, looks=1)[0]
    right, wrong = (room.exact_noise_scale(cells["loss"], params, (x, labels)) for labels in (cells["y_train"], y))
    assert wrong.noise > 1.02 * right.noise, (right, wrong)
