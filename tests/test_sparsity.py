"""Masks, masked training and stored bits by their laws: densities, whole groups, zeros that stay, bits by hand."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Cells
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import sparsity
from dlscale.sparsity import exercises, experiment

DENSE, CONV = (8, 12), (3, 3, 4, 8)
SERVED = [(DENSE, name) for name in ("weight", "filter", "block")]
SERVED += [(CONV, name) for name in sparsity.GRANULARITIES]
DENSITIES = st.floats(0.01171875, 1, width=32)


def weights(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("granularity", "scope"))
def compiled_mask(params, density, granularity="weight", scope="layer"):
    """`mask` as one program for all densities; outside of a program every operation of it is compiled by itself."""
    return sparsity.mask(params, density, granularity, scope)


def groups(array, granularity):
    """(groups, weights of a group): those with the same key, read off the definition of each granularity."""
    *window, i, o = np.indices(np.shape(array))
    key = {"weight": [*window, i, o], "filter": [o], "kernel": [i, o], "vector": [*window[:1], i, o],
           "block": [*window, i // 4, o // 4]}[granularity]  # fmt: skip
    _, group = np.unique(np.reshape(key, (len(key), -1)), axis=1, return_inverse=True)
    return np.ravel(array)[np.argsort(group, kind="stable")].reshape(group.max() + 1, -1)


@pytest.mark.parametrize("shape, granularity", SERVED)
@settings(max_examples=12, deadline=None)
@given(density=DENSITIES, seed=st.integers(0, 99))
def test_a_mask_keeps_whole_groups_the_largest_and_as_many_as_asked(shape, granularity, density, seed):
    w = weights(shape, seed)
    keep = groups(compiled_mask(w, density, granularity), granularity)
    whole = keep[:, 0]
    assert set(np.unique(keep)) <= {0, 1}
    np.testing.assert_array_equal(keep, np.broadcast_to(whole[:, None], keep.shape))
    assert abs(whole.sum() - density * len(whole)) <= 0.5 + 1e-4 or whole.sum() == 1
    sizes = np.abs(groups(w, granularity)).mean(1)
    assert sizes[whole == 1].min() >= sizes[whole == 0].max(initial=0) * (1 - 1e-6)


@settings(max_examples=12, deadline=None)
@given(density=DENSITIES, scale=st.floats(0.01, 100), granularity=st.sampled_from(["weight", "filter"]))
def test_global_masks_share_one_threshold(density, scale, granularity):
    params = {"a": weights(DENSE), "b": weights(CONV, 1) * np.float32(scale), "bias": np.zeros(3, np.float32)}
    keep = compiled_mask(params, density, granularity, scope="global")
    assert (keep["bias"] == 1).all()
    kept = {name: groups(keep[name], granularity)[:, 0] for name in "ab"}
    size = {name: np.abs(groups(params[name], granularity)).mean(1) for name in "ab"}
    total = sum(params[name].size for name in "ab")
    largest = max(groups(keep[name], granularity).shape[1] for name in "ab")
    count = sum(float(keep[name].sum()) for name in "ab")
    assert abs(count - density * total) <= largest / 2 + 1e-3 or sum(part.sum() for part in kept.values()) == 1
    least = min(size[name][kept[name] == 1].min(initial=np.inf) for name in "ab")
    assert all(size[name][kept[name] == 0].max(initial=0) <= least * (1 + 1e-6) for name in "ab")


def test_equal_weights_are_kept_in_order():
    np.testing.assert_array_equal(sparsity.mask(jnp.ones((4, 5)), 0.35).ravel(), np.arange(20) < 7)


ONES = np.ones(DENSE)
REFUSED = [
    (lambda: sparsity.mask(ONES, 0), "density"),
    (lambda: sparsity.mask(ONES, 1.01), "density"),
    (lambda: sparsity.mask(ONES, 0.5, "colum"), "granularity"),
    (lambda: sparsity.mask(ONES, 0.5, "kernel"), "convolution"),
    (lambda: sparsity.mask(np.ones((8, 10)), 0.5, "block"), "multiples of 4 × 4"),
    (lambda: sparsity.mask(ONES, 0.5, scope="model"), "scope"),
    (lambda: sparsity.mask({"b": np.ones(3)}, 0.5), "nothing to prune"),
    (lambda: sparsity.mask(ONES * math.nan, 0.5), "NaN"),
    (lambda: sparsity.gradual(lambda step: 1.0, 0), "every"),
    (lambda: (o := sparsity.masked(optax.sgd(1), 1.0)).update(1.0, o.init(1.0)), "parameters"),
    (lambda: sparsity.stored_bits(ONES, "zip"), "encoding"),
]


@pytest.mark.parametrize("call, words", REFUSED)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "lars": optax.lars(0.1, weight_decay=0.01),
}


@functools.partial(jax.jit, static_argnums=(0, 2))
def walk(optimizer, w, steps):
    """Weights that walk at random for these steps, as far as the optimizer lets them, after each step."""

    def step(state, gradient):
        update, memory = optimizer.update({"w": gradient}, state[1], state[0])
        params = optax.apply_updates(state[0], update)
        return (params, memory), params["w"]

    noise = jax.random.normal(jax.random.key(0), (steps, *w.shape))
    return jax.lax.scan(step, ({"w": w}, optimizer.init({"w": w})), noise)[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_weights_stay_zero_with_every_optimizer(name):
    keep = np.asarray(sparsity.mask(weights(DENSE), 0.3))
    path = np.asarray(walk(sparsity.masked(OPTIMIZERS[name], {"w": keep}), weights(DENSE), 20))
    assert ((path != 0) == (keep == 1)).all(), "exactly"


def test_gradual_pruning_follows_its_schedule_and_never_brings_a_weight_back():
    schedule = optax.polynomial_schedule(1.0, 0.2, power=3, transition_steps=20, transition_begin=4)
    optimizer = sparsity.masked(OPTIMIZERS["adamw"], sparsity.gradual(schedule, 3))
    left = np.asarray(walk(optimizer, weights(DENSE), 40)) != 0
    assert (left[1:] <= left[:-1]).all()
    wanted = [round(float(schedule(step // 3 * 3)) * left[0].size) for step in range(40)]
    np.testing.assert_array_equal(left.sum((1, 2)), wanted)


@pytest.mark.parametrize("shape, granularity", SERVED)
@settings(max_examples=8, deadline=None)
@given(density=DENSITIES)
def test_bits_by_hand(shape, granularity, density):
    """Counted group by group, in the order of the last two axes: a group of zeros that no index can skip is written."""
    w = weights(shape) * np.asarray(compiled_mask(weights(shape), density, granularity))
    alive = groups(w, granularity).any(1)
    values = 16 * w.size // len(alive)
    assert sparsity.stored_bits(w, "bitmap", granularity, 16) == len(alive) + alive.sum() * values
    written, skipped = 0, 0
    for kept in np.trim_zeros(alive, "b"):
        write = kept or skipped == 15
        written, skipped = written + write, 0 if write else skipped + 1
    assert sparsity.stored_bits(w, "relative", granularity, 16) == written * (4 + values)


@pytest.mark.parametrize("last", [1, 4, 8])
def test_shares_of_the_last_layer_keep_as_many_weights(last):
    sizes = {name: math.prod(shape) for name, shape in experiment.SHAPES.items()}
    densities = experiment.layer_densities(0.01, last)
    assert sum(densities[name] * size for name, size in sizes.items()) == pytest.approx(0.01 * sum(sizes.values()))
    assert densities["output"] == 0.01 * last and densities["dense1"] == densities["dense2"]


def test_the_ways_of_notebook_and_record_are_the_library_s():
    found = Cells("06_sparsity")
    found.run("sparsity-setup", "sparsity-schedules", "sparsity-pruned-sgd")
    cubic = optax.polynomial_schedule(1.0, 0.05, power=3, transition_steps=180, transition_begin=72)
    theirs = sparsity.masked(optax.sgd(0.01, 0.9), sparsity.gradual(cubic, 30, scope="global"))
    ways = [theirs, found["pruned_sgd"](0.01, 0.05, 1), experiment.pruned_sgd(0.01, 0.05, 0, "global")]
    ways += [found["pruned_sgd"](0.01, 0.05, 0), experiment.pruned_sgd(0.01, 0.05, 1, "global")]
    library, *gradual, once, again = (walk(way, weights((20, 10)), 360)[-1] for way in ways)
    for ours in gradual:
        np.testing.assert_allclose(ours, library, atol=1e-5)
    np.testing.assert_allclose(again, once, atol=1e-5)
    assert np.count_nonzero(library) == np.count_nonzero(once) == 10 and not np.allclose(once, library, atol=1e-2)


def by_sorting(layers, density):
    """Equal to the reference, by positions in place of a threshold."""
    sizes = np.concatenate([np.abs(w).ravel() for w in layers])
    flat = np.zeros(sizes.size)
    flat[np.argsort(-sizes)[: round(density * sizes.size)]] = 1
    ends = np.cumsum([w.size for w in layers])[:-1]
    return [part.reshape(w.shape) for part, w in zip(np.split(flat, ends), layers, strict=True)]


def by_quantile(layers, density):
    limit = np.quantile(np.concatenate([np.abs(w).ravel() for w in layers]), 1 - density)
    return [np.abs(w) >= limit for w in layers]


@pytest.mark.parametrize(
    "exercise, answer, right",
    [
        (exercises.products, lambda a, e: np.einsum("ni,nj->", a, 1 + 2 * e), True),
        (exercises.products, lambda a, e: a.sum() * e.shape[1] * (1 + 2 * e.mean()), False),  # as if independent
        (exercises.products, lambda a, e: a.sum() * e.shape[1] + (a.T @ e).sum() + e.sum() * a.shape[1], False),
        (exercises.products, lambda a, e: np.array([a.sum() * e.shape[1], *2 * [(a.sum(1) * e.sum(1)).sum()]]), False),
        (exercises.together, by_sorting, True),
        (exercises.together, lambda layers, density: [by_sorting([w], density)[0] for w in layers], False),
        (exercises.together, by_quantile, False),
        (exercises.together, lambda layers, density: by_sorting(layers, density)[:3], False),
        (exercises.together, lambda layers, density: (m.astype(bool) for m in by_sorting(layers, density)), True),
        (exercises.break_even, lambda n, dense, sparse, wait: np.clip((1 / dense - wait / n) * sparse, 0, 1), True),
        (exercises.break_even, lambda size, dense_rate, sparse_rate, start: sparse_rate / dense_rate, False),
        (exercises.break_even, lambda n, dense, sparse, start: min(1, (n / dense - start) * sparse / n), False),
    ],
)
def test_checks_accept_every_right_answer_and_refuse_the_naive_one(exercise, answer, right):
    assert exercise.judge(answer)[0] == right, exercise.judge(answer)[1]


def cells(notebook, changes, *identities):
    found, name = Cells(notebook), notebook.split("/")[-1][3:].replace("_", "-")
    found.run(f"{name}-setup")
    found.changes = changes
    found.run(*(f"{name}-{identity}" for identity in identities))
    return found


@suggested_by("06_sparsity")
def test_the_largest_weights_are_needed():
    changes = {'"at random": at_random': '"largest first": lambda w: -np.abs(w)'}
    found = cells("06_sparsity", changes, "train", "networks", "prune-code", "densities", "accuracies")
    largest, full = found["accuracies"]["largest first"].mean(0)[-2:]
    assert largest < full - 20, "a tenth of them is enough to fail"


@suggested_by("06_sparsity")
@pytest.mark.parametrize("moment", [0.3, 0.7])
def test_no_other_cut_reaches_gradual_pruning(moment):
    changes = {"step < STEPS / 2": f"step < STEPS * {moment}", "range(5), ": "range(2), "}
    changes["[0.01, 0.02, 0.05]"] = "[0.01]"
    found = cells("06_sparsity", changes, "train", "schedules", "pruned-sgd", "when-runs")
    once, gradually = found["by_way"][:, 0, :, -1].mean(1)
    assert once < gradually - 5


@suggested_by("06_sparsity")
def test_one_column():
    cells("06_sparsity", {"1024, 128": "1024, 1"}, "prune-code", "products-code", "products-check", "race-code")


@suggested_by("further/06_sparsity_further")
@pytest.mark.parametrize("density, longer", [(0.01, True), (0.1, False)])
def test_fillers_make_the_relative_index_longer_than_a_bitmap_at_low_densities(density, longer):
    keep = np.asarray(sparsity.mask(weights((3, 3, 8, 16)), density))
    relative, bitmap = (sparsity.stored_bits(keep, name, value_bits=16) for name in ("relative", "bitmap"))
    assert (relative > bitmap) == longer


@suggested_by("further/06_sparsity_further")
def test_half_as_many_parameters_and_connections_that_may_all_move():
    changes = {"density=matched,\n": "density=matched / 2,\n", "SHARE = 0.3": "SHARE = 1.0", "=24,": "=8,"}
    changes |= {"STEPS = 24": "STEPS = 8", "[0.05, 0.1, 0.2, 0.4]": "[0.1]", "range(100, 103)": "range(100, 101)"}
    parts = "gru-code", "signals", "recurrent-record", "pruned-adam", "live", "exchange", "sparse-init", "rigl"
    found = cells("further/06_sparsity_further", changes, *parts, "rigl-runs", "rigl-tuning", "rigl-chosen")
    assert found["live"].history.test_accuracy[-1] < 0.96
    assert np.isfinite(found["means"]).all()
