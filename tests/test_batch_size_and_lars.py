"""Noise scales against sampled batches and closed forms, and the critical batch against the law it fits."""

from __future__ import annotations

import dataclasses
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
from dlscale.course import records
from dlscale.course.sources import python
from dlscale.lab import data, models, train

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


def test_where_all_examples_are_alike_there_is_no_noise():
    x, y = (np.repeat(part[:1], 10, axis=0) for part in examples())
    assert exact(loss, PARAMS, (x, y)).scale == pytest.approx(0, abs=1e-5)


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


def test_a_batch_above_the_data_set_is_refused():
    digits = data.load("digits")
    few = dataclasses.replace(digits, x_train=digits.x_train[:50], y_train=digits.y_train[:50])
    with pytest.raises(ValueError, match=r"from 1 to 50, not 64.*has 50 training examples"):
        train.fit(models.build("mlp", few), few, optax.sgd, batch_size=64, epochs=1, learning_rate=0.1)


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
    rates = np.array([recorded.warm_up_and_decay(2.0, 40.0)(step) for step in range(45)])
    assert rates[41:].tolist() == [0] * 4, "and stays there"
    assert recorded.warm_up_and_decay(2.0, 0)(0) == 2, "a run of no steps has a rate, too"
    rates = rates[:41]
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


def test_steps_to_the_target_are_counted_by_looks():
    measures = recorded.steps_trial(512, 1.0, seed=0)
    assert measures["arrived"] == 1
    assert 30 < measures["steps"] < 240
    assert measures["steps"] % 3 == 0
    assert measures["first_noise_scale"] < measures["mean_noise_scale"]
    never = recorded.steps_trial(512, 2.0**-12, seed=0)
    assert (never["arrived"], never["steps"]) == (0, 2 * 80 * 3)


def test_the_first_noise_scale_of_a_trial_is_that_of_the_initial_weights():
    signals = recorded.fresh_signals("validation")

    def mean_loss(params, x, y):
        logits = recorded.NETWORK.apply(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    params = jax.jit(recorded.NETWORK.init)(jax.random.key(7))
    scale = exact(mean_loss, params, (signals.x_train, signals.y_train)).scale
    assert recorded.steps_trial(8, 0.125, seed=7)["first_noise_scale"] == pytest.approx(float(scale), rel=1e-3)


def test_the_tuned_rate_is_the_best_on_validation_data():
    record = records.read("batch_size_and_lars-sgd")
    setting = {"batch_size": 512, "epochs": 16, "warm_up": 0}
    rate = recorded.tuned_rate(record, **setting)
    held_out = {
        other: record.values("accuracy", **setting, learning_rate=other, judged_on="validation").mean()
        for other in recorded.GRID
    }
    assert held_out[rate] == max(held_out.values())
    assert record.options("learning_rate", **setting, judged_on="test")[0] == rate


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


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (lambda critical, waste: critical * waste, True),
        (lambda critical, waste: np.float32(waste) * critical, True),
        (lambda critical, waste: int(critical * waste), False),
        (lambda critical, waste: critical * (1 + waste), False),
        (lambda critical, waste: critical, False),
    ],
    ids=["right", "of NumPy", "rounded", "with the fewest", "critical"],
)
def test_the_largest_batch(answer, right):
    assert exercises.waste.judge(answer)[0] == right
    assert "Do not round" in exercises.waste.question


def test_the_noise_scale_from_workers():
    def by_variance(gradients, b):  # the noise is b times the unbiased variance between the workers
        noise = b * gradients.var(1, ddof=1).sum(-1).mean()
        return noise / ((gradients.mean(1) ** 2).sum(-1).mean() - noise / (gradients.shape[1] * b))

    def in_jax(gradients, b):
        return by_variance(jnp.asarray(gradients), b)

    def divided_too_early(gradients, b):
        return np.mean([by_variance(one[None], b) for one in gradients])

    def signal_with_noise(gradients, b):
        return b * gradients.var(1, ddof=1).sum(-1).mean() / (gradients.mean(1) ** 2).sum(-1).mean()

    for right in (by_variance, in_jax):
        assert exercises.noise.judge(right)[0]
    for naive in (divided_too_early, signal_with_noise):
        assert not exercises.noise.judge(naive)[0]


@pytest.mark.parametrize(
    ("rule", "right"),
    [
        (lambda other, critical, batch, rate: rate * other / batch, False),
        (lambda other, critical, batch, rate: rate * np.sqrt(other / batch), False),
        (lambda other, critical, batch, rate: rate * min(other, critical) / min(batch, critical), False),
        (lambda other, critical, batch, rate: rate * other / batch * (batch + critical) / (other + critical), True),
    ],
    ids=["linear", "root", "linear, then flat", "multiplied out"],
)
def test_the_rate_for_another_batch(rule, right):
    assert exercises.rate_for.judge(rule)[0] == right


def lars_like(np_=np, norm="its own", defined=True, decayed=True, momentum="m", ratio_inside=True):
    """A step of LARS, or one with a mistake."""

    def step(w, m, g, rate=1.0, coefficient=0.01, decay=5e-4, beta=0.9):
        d = g + decay * w
        above, below = (np_.sqrt((part**2).sum()) for part in (w, d if decayed else g))
        if norm == "the paper's":
            below = np_.sqrt((g**2).sum()) + decay * above
        with np.errstate(all="ignore"):
            ratio = 1.0 if defined and not (above > 0 and below > 0) else coefficient * above / below
        if momentum == "without the rate":
            m = beta * m + ratio * d
            return w - rate * m, m
        if momentum == "without the ratio":
            m = beta * m + rate * d
            return w - ratio * m, m
        if momentum == "averaged":
            m = beta * m + (1 - beta) * rate * ratio * d
            return w - m / (1 - beta), m
        m = beta * m + rate * ratio * d
        return [w - m, m] if momentum == "list" else (w - m, m)

    return step


@pytest.mark.parametrize(
    ("options", "right"),
    [
        ({}, True),
        ({"np_": jnp}, True),
        ({"momentum": "list"}, True),
        ({"norm": "the paper's"}, False),
        ({"defined": False}, False),
        ({"decayed": False}, False),
        ({"momentum": "without the rate"}, False),
        ({"momentum": "without the ratio"}, False),
        ({"momentum": "averaged"}, False),
    ],
    ids=lambda given: "-".join(map(str, given.values())) or "right" if isinstance(given, dict) else "",
)
def test_a_step_of_lars(options, right):
    assert exercises.step.judge(lars_like(**options))[0] == right


def test_new_weights_alone_are_no_step_of_lars():
    right, line = exercises.step.judge(lambda *given: lars_like()(*given)[0])
    assert not right
    assert "two arrays" in line


def norm_of(tensors, np_=np):
    return np_.linalg.norm(np_.concatenate([np_.ravel(part) for part in tensors]))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (lambda w, d, c: c * norm_of(w) / norm_of(d), True),
        (lambda w, d, c: c * norm_of(w, jnp) / norm_of(d, jnp), True),
        (lambda w, d, c: c * np.mean([norm_of([a]) / norm_of([b]) for a, b in zip(w, d, strict=True)]), False),
        (lambda w, d, c: c * sum(norm_of([a]) for a in w) / sum(norm_of([b]) for b in d), False),
        (lambda w, d, c: c * norm_of(w[:1]) / norm_of(d[:1]), False),
        (lambda w, d, c: c * norm_of(w) ** 2 / norm_of(d) ** 2, False),
    ],
    ids=["right", "in JAX", "mean of ratios", "sums of norms", "of one layer", "no root"],
)
def test_one_ratio_for_the_whole_network(answer, right):
    assert exercises.one_ratio.judge(answer)[0] == right


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (lambda critical, overhead, each: (critical * overhead / each) ** 0.5, True),
        (lambda critical, overhead, each: critical, False),
        (lambda critical, overhead, each: overhead / each, False),
        (lambda critical, overhead, each: np.ceil(np.sqrt(critical * overhead / each)), False),
    ],
    ids=["right", "critical", "overhead", "rounded"],
)
def test_the_batch_that_takes_the_least_time(answer, right):
    assert exercises.best.judge(answer)[0] == right


# The lesson's own step of LARS, and what it suggests to try


LESSON = Path(__file__).parent.parent / "notebooks" / "04_batch_size_and_lars.ipynb"
FURTHER = LESSON.parent / "further" / "04_batch_size_and_lars_further.ipynb"


def source(path: Path, identity: str) -> str:
    return next(python(cell.source) for cell in nbformat.read(path, as_version=4).cells if cell.id == identity)


def names_of(path: Path, *identities: str, **given: str) -> dict:
    """What these cells define, in order; `given` is code that stands after one of them."""
    names: dict = {}
    for identity in identities:
        exec(source(path, identity) + given.get(identity.rpartition("-")[2], ""), names)
    return names


def test_the_step_in_the_lesson_is_that_of_optax():
    names: dict = {"jnp": jnp, "jax": jax}
    exec(source(LESSON, "batch-lars-code"), names)
    library = optax.lars(1.0, 5e-4, trust_coefficient=0.01, momentum=0.9)
    ours = theirs = {"w": tree((2.0, 0.0), 0)["w"], "b": np.zeros(3, np.float32)}
    state, momenta = library.init(theirs), jax.tree.map(np.zeros_like, ours)
    for seed in range(5):
        gradient = tree((0.1, 20.0) if seed != 3 else (0.0, 0.0), seed)
        updates, state = library.update(gradient, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        ours, momenta = names["lars"](ours, momenta, gradient, 1.0)
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-3, atol=1e-5)


def swept(target: str = "", data_: str = "") -> dict:
    cells = [f"batch-{name}" for name in ("setup", "data", "gradient", "train", "runs", "count", "steps", "fit")]
    return names_of(LESSON, *cells, data=data_, runs=target)


@pytest.fixture(scope="module")
def easier():
    return swept("\nTARGET = 1.7")


@suggested_by("04_batch_size_and_lars")
def test_an_easier_target_has_a_smaller_critical_batch(easier):
    assert easier["arrived"].any(1).all()
    assert 50 < easier["critical_batch"] < 88


@suggested_by("04_batch_size_and_lars")
def test_wrong_labels_make_the_critical_batch_larger(easier):
    names = swept("\nTARGET = 1.7", "\ny_train = y_train.at[::10].set(0)")
    assert names["arrived"].any((1, 2)).all()
    assert names["critical_batch"] > 1.1 * easier["critical_batch"]


@suggested_by("04_batch_size_and_lars")
def test_lars_moves_by_the_rate_and_runs_away_at_a_large_one():
    names = names_of(LESSON, *(f"batch-{name}" for name in ("setup", "data", "lars-code", "deep-train")))
    train_ = jax.jit(names["train_deep"], static_argnums=0)
    for rate in (0.1, 10.0):
        seen = np.asarray(train_(names["lars"], rate, 0))
        np.testing.assert_allclose(seen[0, 2] / seen[0, 0], 0.01 * rate, rtol=1e-3)


@suggested_by("04_batch_size_and_lars_further")
def test_another_plan_runs():
    names = names_of(FURTHER, "batch-further-setup", "batch-further-plans")
    names["PLANS"]["both"] = ((32, 64, 128), (1, 1 / 2, 1 / 4), 0.0)
    looks = names["train_plan"]("both", 0.5, 20)
    assert looks.shape == (16, 2)
    assert looks[-1, 1] > 45
    assert looks[-1, 0] < 1488


@suggested_by("04_batch_size_and_lars_further")
def test_faster_examples_ask_for_a_larger_batch():
    names = {"np": np, "fit": room.critical_batch(SIZES, np.tile(50 * (1 + 90 / SIZES), (2, 1)))}
    code, batches = source(FURTHER, "batch-further-seconds"), 2.0 ** np.arange(0, 14, 0.25)
    best = []
    for text in (code, code.replace("1e-3  # an", "1e-5  # an")):
        exec(text, names)
        best.append(batches[names["seconds"](batches, 64, 1, 10, 1, "reduce-scatter + gather").argmin()])
    assert best[1] > best[0]


@suggested_by("04_batch_size_and_lars_further")
def test_bfloat16_loses_norms_by_precision_alone():
    names: dict = {}
    for name in ("setup", "ratios", "deep-loss", "watch", "watched", "squares"):
        exec(source(FURTHER, f"batch-further-{name}"), names)
    lost = names["lost"]
    assert lost(1024.0, jnp.float32).mean() < 0.02 < lost(1024.0, jnp.float16).mean()
    assert lost(1024.0, jnp.bfloat16).mean() < 0.1
