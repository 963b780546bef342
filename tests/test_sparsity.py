"""Masks, masked training and encodings by their laws: densities, whole groups, zeros that stay, bits that decode."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import pytest
import scipy.sparse
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import sparsity
from dlscale.course import records
from dlscale.lab import data, intervals, models
from dlscale.sparsity import exercises, experiment

DENSE, CONV = (8, 12), (3, 3, 4, 8)
SERVED = [(DENSE, name) for name in ("weight", "filter", "block", "2:4", "1:2")]
SERVED += [(CONV, name) for name in ("weight", "vector", "kernel", "filter", "block", "2:4")]
DENSITIES = st.floats(0.01171875, 1, width=32)


def weights(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("granularity", "scope"))
def compiled_mask(params, density, granularity="weight", scope="layer"):
    """`mask` as one program for all densities; outside of a program every operation of it is compiled by itself."""
    return sparsity.mask(params, density, granularity, scope)


def groups(array, granularity, block=4):
    """(groups, weights of a group), gathered by hand."""
    array = np.asarray(array)
    match granularity:
        case "weight":
            return array.reshape(-1, 1)
        case "filter":
            return array.reshape(-1, array.shape[-1]).T
        case "kernel":
            return np.array([array[..., i, o].ravel() for i, o in np.ndindex(*array.shape[2:])])
        case "vector":
            return np.array([array[r, :, i, o] for r, i, o in np.ndindex(array.shape[0], *array.shape[2:])])
    size, width = (block, block) if granularity == "block" else (int(granularity[-1]), 1)
    flat = array.reshape(-1, *array.shape[-2:])
    cuts = [part for matrix in flat for rows in np.split(matrix, matrix.shape[0] // size) for part in
            np.split(rows, matrix.shape[1] // width, axis=1)]  # fmt: skip
    return np.array([cut.ravel() for cut in cuts])


# Masks


@pytest.mark.parametrize("shape, granularity", [pair for pair in SERVED if ":" not in pair[1]])
@settings(max_examples=12, deadline=None)
@given(density=DENSITIES, seed=st.integers(0, 99))
def test_a_mask_keeps_whole_groups_the_largest_and_as_many_as_asked(shape, granularity, density, seed):
    w = weights(shape, seed)
    keep = groups(compiled_mask(w, density, granularity), granularity)
    whole = keep[:, 0]
    assert set(np.unique(keep)) <= {0, 1}
    np.testing.assert_array_equal(keep, np.broadcast_to(whole[:, None], keep.shape))
    assert whole.sum() == max(np.round(np.float32(density) * np.float32(len(whole))), 1)
    sizes = np.abs(groups(w, granularity)).mean(1)
    assert sizes[whole == 1].min() >= sizes[whole == 0].max(initial=0) * (1 - 1e-6)


@pytest.mark.parametrize("shape, pattern", [pair for pair in SERVED if ":" in pair[1]])
def test_n_of_m(shape, pattern):
    few, many = map(int, pattern.split(":"))
    w = weights(shape)
    keep, size = groups(sparsity.mask(w, few / many, pattern), pattern), np.abs(groups(w, pattern))
    assert (keep.sum(1) == few).all()
    assert (np.where(keep == 1, size, np.inf).min(1) >= np.where(keep == 0, size, 0).max(1)).all()


@settings(max_examples=12, deadline=None)
@given(density=DENSITIES, scale=st.floats(0.01, 100), granularity=st.sampled_from(["weight", "filter"]))
def test_global_masks_share_one_threshold(density, scale, granularity):
    params = {"a": weights(DENSE), "b": weights(CONV, 1) * np.float32(scale), "bias": np.zeros(3, np.float32)}
    keep = compiled_mask(params, density, granularity, scope="global")
    assert (keep["bias"] == 1).all()
    kept = {name: groups(keep[name], granularity)[:, 0] for name in "ab"}
    size = {name: np.abs(groups(params[name], granularity)).mean(1) for name in "ab"}
    total, largest = (
        sum(params[name].size for name in "ab"),
        max(groups(keep[name], granularity).shape[1] for name in "ab"),
    )
    count = sum(float(keep[name].sum()) for name in "ab")
    assert abs(count - density * total) <= largest / 2 + 1e-3 or sum(part.sum() for part in kept.values()) == 1
    least = min(size[name][kept[name] == 1].min(initial=np.inf) for name in "ab")
    assert all(size[name][kept[name] == 0].max(initial=0) <= least * (1 + 1e-6) for name in "ab")


def test_equal_weights_are_kept_in_order_and_density_may_be_traced():
    w = jnp.ones((4, 5))
    np.testing.assert_array_equal(sparsity.mask(w, 0.35).ravel(), np.arange(20) < 7)
    for shape, granularity in (SERVED[0], SERVED[7]):
        w = weights(shape)
        constant = jax.jit(functools.partial(sparsity.mask, w, granularity=granularity))
        for density in (0.05, 0.3, 1.0):
            wanted = sparsity.mask(w, density, granularity)
            np.testing.assert_array_equal(compiled_mask(w, density, granularity), wanted)
            np.testing.assert_array_equal(constant(density), wanted)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((np.ones(DENSE), 0), "density"),
        ((np.ones(DENSE), 1.01), "density"),
        ((np.ones(DENSE), math.nan), "density"),
        ((np.ones(DENSE), 0.5, "colum"), "granularity"),
        ((np.ones(DENSE), 0.5, "kernel"), "convolution"),
        ((np.ones(DENSE), 0.5, "vector"), "convolution"),
        ((np.ones((8, 10)), 0.5, "block"), "multiples of 4 × 4"),
        ((np.ones((6, 10)), 0.5, "2:4"), "multiples of 4 × 1"),
        ((np.ones(DENSE), 0.25, "2:4"), "2:4 has density 0.5"),
        ((np.ones(DENSE), 0.5, "5:4"), "5:4"),
        ((np.ones(DENSE), 0.5, "0:4"), "0:4"),
        ((np.ones(DENSE), 0.5, "weight", "model"), "scope"),
        ((np.ones(DENSE), 0.5, "block", "layer", 0), "block"),
        (({"w": np.ones(DENSE), "v": np.zeros(CONV)}, 0.5), "zero throughout"),
        (({"b": np.ones(3)}, 0.5), "nothing to prune"),
    ],
)
def test_masks_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        sparsity.mask(*arguments)


# Training

OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(0.01, weight_decay=0.1),
    "lars": optax.lars(0.1, weight_decay=0.01),
}
NET = models.mlp((6, 10, 3))
X, Y = weights((20, 6), 7), np.arange(20) % 3


@functools.cache
def start():
    return jax.jit(NET.init)(jax.random.key(0))


def loss(params):
    return optax.softmax_cross_entropy_with_integer_labels(NET.apply(params, X), Y).mean()


def train(optimizer, params, steps):
    """All parameters after each step, and the last state."""

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    (_, state), path = jax.lax.scan(step, (params, optimizer.init(params)), length=steps)
    return path, state


@functools.partial(jax.jit, static_argnums=0)
def train_masked(name, keep, params):
    """20 steps; one program for all masks."""
    return train(sparsity.masked(OPTIMIZERS[name], keep), params, 20)


@functools.partial(jax.jit, static_argnums=0)
def train_plainly(name, params):
    return train(OPTIMIZERS[name], params, 20)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_weights_stay_zero_with_every_optimizer(name):
    keep = compiled_mask(start(), 0.3)
    path, state = train_masked(name, keep, start())
    for w, k in zip(jax.tree.leaves(path), jax.tree.leaves(keep), strict=True):
        w, k = np.asarray(w), np.broadcast_to(k, w.shape)
        assert (w[k == 0] == 0).all(), "exactly"
        assert (w[-1][k[-1] == 1] != 0).any()
    assert int(state.step) == 20


def test_a_mask_of_ones_changes_nothing():
    ones = jax.tree.map(np.ones_like, start())  # as constants: a compiler that knows them rounds as without them
    masked, _ = jax.jit(functools.partial(train, sparsity.masked(OPTIMIZERS["momentum"], ones), steps=20))(start())
    plain = train_plainly("momentum", start())
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), masked, plain))


def test_a_masked_run_equals_one_on_the_smaller_net():
    """Hidden units that are cut off might as well not be there."""
    params = jax.tree.map(np.array, start())
    keep = jax.tree.map(np.ones_like, params)
    for name in "wb":
        keep["dense1"][name][..., 4:] = 0
    keep["output"]["w"][4:] = 0
    path, _ = train_masked("momentum", keep, jax.tree.map(np.multiply, params, keep))
    small = {"dense1": {name: leaf[..., :4] for name, leaf in params["dense1"].items()},
             "output": {"w": params["output"]["w"][:4], "b": params["output"]["b"]}}  # fmt: skip
    wanted = train_plainly("momentum", small)
    np.testing.assert_allclose(path["dense1"]["w"][..., :4], wanted["dense1"]["w"], rtol=2e-4, atol=1e-6)
    np.testing.assert_allclose(path["output"]["b"], wanted["output"]["b"], rtol=2e-4, atol=1e-6)


def test_gradual_pruning_follows_its_schedule_and_never_brings_a_weight_back():
    every = 3
    schedule = optax.polynomial_schedule(1.0, 0.2, power=3, transition_steps=20, transition_begin=4)
    optimizer = sparsity.masked(OPTIMIZERS["adamw"], sparsity.gradual(schedule, every))
    path = jax.tree.map(np.asarray, jax.jit(lambda params: train(optimizer, params, 40)[0])(start()))
    density = np.asarray(jax.vmap(schedule)(np.arange(40) // every * every))
    for name in ("dense1", "output"):
        zero = np.asarray(path[name]["w"]) == 0
        assert (zero[1:] >= zero[:-1]).all()
        for step in range(40):
            assert zero[step].size - zero[step].sum() == round(float(density[step]) * zero[step].size), step
        assert (np.asarray(path[name]["b"][-1]) != 0).all()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: sparsity.gradual(lambda step: 1.0, 0), "every"),
        (lambda: (o := sparsity.masked(optax.sgd(1), 1.0)).update(1.0, o.init(1.0)), "parameters"),
    ],
)
def test_training_that_cannot_be(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Encodings


def decode(payload: np.ndarray, shape: tuple, encoding: str, sides: tuple, index_bits: int, dtype: str) -> np.ndarray:
    """The weights that `encode` was given, read from its bits."""
    grid, size = tuple(n // side for n, side in zip(shape, sides, strict=True)), math.prod(sides)
    columns, value_bits = grid[-1], size * np.dtype(dtype).itemsize * 8
    flat = np.zeros((math.prod(grid), size), dtype)
    if encoding == "dense":
        at, rest = np.arange(len(flat)), payload
    elif encoding == "bitmap":
        at, rest = np.flatnonzero(payload[: len(flat)]), payload[len(flat) :]
    elif encoding == "csr":
        pointers = (len(flat) // columns + 1) * sparsity.POINTER_BITS
        starts, rest = _read_integers(payload[:pointers], sparsity.POINTER_BITS), payload[pointers:]
        row = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        at = row * columns + _read_integers(rest[: len(row) * index_bits], index_bits)
        rest = rest[len(row) * index_bits :]
    else:
        count = len(payload) // (index_bits + value_bits)
        at = np.cumsum(_read_integers(payload[: count * index_bits], index_bits) + 1) - 1
        rest = payload[count * index_bits :]
    flat[at] = np.packbits(rest).view(dtype).reshape(-1, size)
    axes = [axis for a in range(len(grid)) for axis in (a, len(grid) + a)]
    return flat.reshape(*grid, *sides).transpose(axes).reshape(shape)


def _read_integers(payload: np.ndarray, bits: int) -> np.ndarray:
    return payload.reshape(-1, bits).astype(np.int64) @ (1 << np.arange(bits, dtype=np.int64)[::-1])


@pytest.mark.parametrize("shape, granularity", [pair for pair in SERVED if ":" not in pair[1]])
@settings(max_examples=8, deadline=None)
@given(
    density=DENSITIES,
    encoding=st.sampled_from(sparsity.ENCODINGS),
    index_bits=st.integers(1, 12),
    dtype=st.sampled_from(["float32", "float16"]),
)
def test_decoding_gives_back_what_was_encoded(shape, granularity, density, encoding, index_bits, dtype):
    w = np.asarray(weights(shape) * compiled_mask(weights(shape), density, granularity), dtype)
    sides = sparsity.group_shape(shape, granularity)
    if encoding == "csr":
        index_bits = max(1, (shape[-1] // sides[-1] - 1).bit_length())
    encoded = sparsity.encode(w, encoding, granularity, index_bits, dtype)
    back = decode(encoded, shape, encoding, sides, index_bits, dtype)
    np.testing.assert_array_equal(back, w)
    assert back.dtype == dtype
    assert set(np.unique(encoded)) <= {0, 1}
    if encoding == "csr":
        np.testing.assert_array_equal(encoded, sparsity.encode(w, encoding, granularity, None, dtype))


@settings(max_examples=15, deadline=None)
@given(density=DENSITIES, index_bits=st.integers(1, 8), seed=st.integers(0, 99))
def test_bits_by_hand(density, index_bits, seed):
    w = np.asarray(weights(DENSE, seed) * compiled_mask(weights(DENSE, seed), density))
    n, kept = w.size, np.count_nonzero(w)
    assert len(sparsity.encode(w, "dense")) == 32 * n
    assert len(sparsity.encode(w, "bitmap", dtype="float16")) == n + 16 * kept
    csr = scipy.sparse.csr_array(w)
    assert len(sparsity.encode(w, "csr")) == 32 * len(csr.indptr) + 4 * len(csr.indices) + 32 * len(csr.data)
    gaps = np.diff(np.flatnonzero(w), prepend=-1) - 1
    fillers = (gaps // 2**index_bits).sum()
    assert len(sparsity.encode(w, "relative", index_bits=index_bits)) == (32 + index_bits) * (kept + fillers)


def test_blocks_in_csr_as_scipy_has_them():
    w = np.asarray(weights(DENSE) * compiled_mask(weights(DENSE), 0.5, "block"))
    bsr = scipy.sparse.bsr_array(w, blocksize=(4, 4))
    bits = 32 * len(bsr.indptr) + 2 * len(bsr.indices) + 32 * bsr.data.size
    assert len(sparsity.encode(w, "csr", "block")) == bits


def test_a_group_shares_its_index_and_nothing_takes_nothing():
    keep = compiled_mask(weights(CONV), 0.5, "kernel")
    assert len(sparsity.encode(keep, "bitmap", "kernel")) == 32 + 16 * 9 * 32
    nothing = sparsity.encode(np.zeros(DENSE, np.float32), "relative")
    assert len(nothing) == 0
    assert (decode(nothing, DENSE, "relative", (1, 1), 4, "float32") == 0).all()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((np.ones(DENSE), "zip"), "encoding"),
        ((np.ones(DENSE), "csr", "weight", 3), "at least 4 bits"),
        ((np.ones(DENSE), "relative", "weight", 0), "index_bits"),
        ((np.ones(DENSE), "relative", "kernel"), "convolution"),
        ((np.ones(DENSE), "relative", "weight", 4, "int8"), "dtype"),
    ],
)
def test_encodings_that_cannot_be(arguments, words):
    with pytest.raises(ValueError, match=words):
        sparsity.encode(*arguments)


# The records


def test_layers_share_the_density_as_the_records_say():
    sizes = {name: math.prod(shape) for name, shape in experiment.SHAPES.items()}
    for density in (0.01, 0.05, 0.2):
        layers = experiment.erk(density)
        assert max(layers.values()) <= 1
        assert sum(sizes[name] * layers[name] for name in sizes) == pytest.approx(density * sum(sizes.values()))
        ratio = {name: layers[name] * sizes[name] / sum(shape) for name, shape in experiment.SHAPES.items()}
        assert min(ratio.values()) == pytest.approx(max(ratio.values()))
    ways = records.read("sparsity-ways")
    arm = {"way": "gradually", "allocation": "global", "density": 0.05, "judged_on": "test"}
    found = [ways.values(f"{name}_density", **arm).mean() for name in experiment.SHAPES]
    np.testing.assert_allclose(experiment.FOUND, found, atol=6e-4)


def test_small_nets_have_as_many_weights_as_stay_at_five_per_cent():
    record, all_weights = records.read("sparsity-small"), sum(map(math.prod, experiment.SHAPES.values()))
    for net in experiment.SMALL_NETS:
        kept = record.values("weights", net=net, judged_on="test")
        np.testing.assert_allclose(kept / all_weights, 0.05, atol=0.0025)
    digits = experiment._digits("validation")
    assert {experiment._fewer(name, digits).x_test[0].size for name in ("averaged", "liveliest")} == {49}
    averaged = experiment._fewer("averaged", digits).x_test[5, 2, 3, 0]
    assert averaged == pytest.approx(digits.x_test[5, 4:6, 6:8].mean())


def test_the_shares_are_compared_with_the_networks_of_the_other_records():
    share, dynamic, small = (records.read(f"sparsity-{name}") for name in ("share", "dynamic", "small"))
    setting = {"learning_rate": 0.1, "judged_on": "validation"}
    usual = dynamic.values("accuracy", change="RigL", sharing="ERK", scaled=1, times=1, **setting)
    mine = share.values("accuracy", net="196-64-64-10, RigL", share=experiment.CHANGES["RigL"][0], **setting)
    np.testing.assert_allclose(mine, usual, atol=1)
    for net in ("49-64-64-10, RigL", *experiment.RIVALS):
        others = {"share": 0.3} if "RigL" in net else {}
        np.testing.assert_allclose(
            share.values("accuracy", net=net, **others, **setting), small.values("accuracy", net=net, **setting), atol=1
        )
    before = {t.setting["seed"] for record in (dynamic, small) for t in record.select(judged_on="test")
              if t.setting.get("times", 1) == 1}  # fmt: skip
    tested = {t.setting["seed"] for t in share.select(judged_on="test")}
    assert tested == {*experiment.SHARE_SEEDS}
    assert not tested & before
    for net in experiment.SEARCHING:
        (chosen,) = {*share.options("share", net=net, judged_on="test")} - {0.3}
        assert chosen not in (experiment.SHARES[0], experiment.SHARES[-1]), "the best share is not at the grid's edge"


def test_an_exchange_drops_the_smallest_and_grows_where_the_gradient_is_large():
    w, gradient = weights((6, 5)), weights((6, 5), 1)
    mask = (weights((6, 5), 2) > 0) * np.float32(1)
    w *= mask
    new = np.asarray(jax.jit(experiment.exchange)(w, mask, gradient, 0.4, 1, weights((6, 5), 3)))
    moved = round(0.4 * mask.sum())
    dropped, grown = (mask == 1) & (new == 0), (mask == 0) & (new == 1)
    assert dropped.sum() == grown.sum() == moved
    assert np.abs(w[dropped]).max() <= np.abs(w[(mask == 1) & (new == 1)]).min()
    assert np.abs(gradient[grown]).min() >= np.abs(gradient[(mask == 0) & (new == 0)]).max()


def test_a_number_is_the_same_masks_however_it_is_compiled():
    """Alone, among others, and where the weights differ in their last bits, as they do on another processor."""
    w = jnp.asarray(weights((20, 6)))
    alone = [jax.jit(experiment.random_like)(w * (1 + 1e-6), number, 45) for number in (3.0, 4.0)]
    np.testing.assert_array_equal(jax.vmap(lambda n: experiment.random_like(w, n, 45))(jnp.array([3.0, 4.0])), alone)
    others = [experiment.random_like(w, 3.0, 90), experiment.random_like(w[:19], 3.0, 45), alone[1]]
    assert not any(np.isin(other, alone[0]).any() for other in others), "others at every step, layer and number"


@pytest.mark.parametrize("arm", experiment.OUTPUT_ARMS)
def test_the_controls_of_the_last_layer_keep_as_many_weights(arm):
    densities, weights_of = experiment.output_densities(arm), {n: math.prod(s) for n, s in experiment.SHAPES.items()}
    assert sum(densities[name] * count for name, count in weights_of.items()) == pytest.approx(0.01 * 17280)
    by_erk, even = experiment.erk(0.01), 0.01
    hidden = densities["dense1"] / densities["dense2"]
    if arm.startswith("even"):
        assert (densities["output"], hidden) == (by_erk["output"], 1)
    else:
        assert (densities["output"], hidden) == (even, pytest.approx(by_erk["dense1"] / by_erk["dense2"]))
    kept = records.read("sparsity-output").values("output_density", arm=arm, judged_on="test")
    np.testing.assert_allclose(kept, densities["output"], atol=1 / 640)


# Exercises


def counted(a, e):
    """Each multiplication looked at by itself."""
    total = 0
    for inputs, errors in zip(a, e, strict=True):
        for i, j in np.ndindex(len(inputs), len(errors)):
            total += (1 + 2 * errors[j]) * inputs[i]
    return total


def step_by_step(begin, end, final, steps, every):
    """The mask that is in force at each step, by the library's schedule."""
    cubic = optax.polynomial_schedule(1.0, final, power=3, transition_steps=end - begin, transition_begin=begin)
    return np.mean([float(cubic(step - step % every)) for step in range(steps)])


def cubic_as_written(begin, end, final, steps, every):
    """Not kept between 0 and 1."""
    done = (np.arange(0, steps, every) - begin) / (end - begin)
    return (final + (1 - final) * (1 - done) ** 3).mean()


def renewed_always(begin, end, final, steps, every):
    return step_by_step(begin, end, final, steps, 1)


def only_between(begin, end, final, steps, every):
    """The mean of the way down, without the steps before it and after."""
    return final + (1 - final) / 4


def pays(size, dense_rate, sparse_rate, start):
    """By halving, from the two times."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        faster = start + middle * size / sparse_rate < size / dense_rate
        low, high = (middle, high) if faster else (low, middle)
    return low


def any_two(w):
    """Two of four, by taking turns."""
    mask = np.zeros(w.shape)
    for first in range(0, len(w), 4):
        mask[first + np.argsort(np.abs(w[first : first + 4]))[2:]] = 1
    return mask


def by_sorting(layers, density):
    """Equal to the reference, by positions in place of a threshold."""
    sizes = np.concatenate([np.abs(w).ravel() for w in layers])
    flat = np.zeros(sizes.size)
    flat[np.argsort(-sizes)[: round(density * sizes.size)]] = 1
    ends = np.cumsum([w.size for w in layers])[:-1]
    return [part.reshape(w.shape) for part, w in zip(np.split(flat, ends), layers, strict=True)]


def each_layer(layers, density):
    return [part for w in layers for part in by_sorting([w], density)]


def by_hand(sizes, errors, target):
    at = int(np.argmax(errors < target))
    share = (errors[at - 1] - target) / (errors[at - 1] - errors[at])
    return math.exp((1 - share) * math.log(sizes[at - 1]) + share * math.log(sizes[at]))


@pytest.mark.parametrize(
    "exercise, answer, right",
    [
        (exercises.products, counted, True),
        (exercises.products, lambda a, e: a.sum() * e.shape[1] * (1 + 2 * e.mean()), False),  # as if independent
        (exercises.products, lambda a, e: a.sum() * e.shape[1] + (a.T @ e).sum() + e.sum() * a.shape[1], False),
        (exercises.products, lambda a, e: np.array([a.sum() * e.shape[1], *2 * [(a.sum(1) * e.sum(1)).sum()]]), False),
        (exercises.cubic, step_by_step, True),
        (exercises.cubic, cubic_as_written, False),
        (exercises.cubic, renewed_always, False),
        (exercises.cubic, only_between, False),
        (exercises.together, by_sorting, True),
        (exercises.together, each_layer, False),
        (exercises.two_of_four, any_two, True),
        (exercises.two_of_four, lambda w: np.abs(w) >= np.median(np.abs(w)), False),  # half, but not of every four
        (exercises.two_of_four, lambda w: np.tile([1, 1, 0, 0], len(w) // 4), False),
        (exercises.break_even, pays, True),
        (exercises.break_even, lambda size, dense_rate, sparse_rate, start: sparse_rate / dense_rate, False),
        (exercises.break_even, lambda n, dense, sparse, start: min(1, (n / dense - start) * sparse / n), False),
        (exercises.crossing, by_hand, True),
        (exercises.crossing, lambda sizes, errors, target: np.interp(-target, -errors, sizes), False),
        (exercises.crossing, lambda sizes, errors, target: sizes[np.argmax(errors < target)], False),
        (exercises.plan, {"piece": "weight", "density": 0.12, "bits": 8, "encoding": "relative"}, True),
        (exercises.plan, {"piece": "weight", "density": 0.2, "bits": 16, "encoding": "relative"}, False),
        (exercises.plan, {"piece": "filter", "density": 0.12, "bits": 8, "encoding": "bitmap"}, False),
        (exercises.plan, {"piece": "weight", "density": 0.4, "bits": 2, "encoding": "bitmap"}, False),
    ],
)
def test_checks_accept_every_right_answer_and_refuse_the_naive_one(exercise, answer, right):
    assert exercise.judge(answer)[0] == right, exercise.judge(answer)[1]


# What the notebook suggests


def cells(changes, *identities):
    """Cells of the notebook, run with changes, on few digits."""
    from cells import Cells

    found = Cells("06_sparsity")
    found.run("sparsity-01")
    found.changes = changes
    digits = data.load("digits")
    found["digits"] = dataclasses.replace(digits, x_train=pad(digits.x_train[:800]), y_train=digits.y_train[:800],
                                          x_test=pad(digits.x_test), y_test=digits.y_test)  # fmt: skip
    found["network"] = models.mlp((196, 64, 64, 10))
    found.run(*(f"sparsity-{identity}" for identity in identities))
    return found


def pad(images):
    return np.pad(images, ((0, 0), (3, 3), (3, 3), (0, 0)))


def follow(optimizer, steps):
    """The last of 200 weights that walk at random, as far as the optimizer lets them."""
    rng = np.random.default_rng(0)
    w, noise = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((20, 10), (steps, 20, 10)))

    def step(state, gradient):
        params, memory = state
        update, memory = optimizer.update({"w": gradient}, memory, params)
        return (optax.apply_updates(params, update), memory), None

    start = {"w": w}
    return np.asarray(jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), noise)[0][0]["w"])())


def test_the_gradual_way_of_the_notebook_is_the_library_s():
    found = cells({}, "36", "40")
    cubic = optax.polynomial_schedule(1.0, 0.05, power=3, transition_steps=180, transition_begin=72)
    theirs = sparsity.masked(optax.sgd(0.01, 0.9), sparsity.gradual(cubic, 30, scope="global"))
    ours = follow(found["pruning"](0.01, 0.05, 2), 360)
    np.testing.assert_allclose(ours, follow(theirs, 360), atol=1e-5)
    assert np.count_nonzero(ours) == 10


def test_the_gated_unit_of_the_notebook_is_the_library_s():
    found, hidden = cells({}, "77-gru"), 7
    own, inputs = {"w": weights((hidden, 3 * hidden))}, weights((5, 4, 3 * hidden), 1)
    library = models.gru(hidden, features=2).layers["recurrent"]
    np.testing.assert_allclose(found["last_state"](own, inputs), library(own, inputs), atol=1e-6)


def test_other_weights_under_the_same_mask():
    changes = {
        "jax.tree.map(jnp.zeros_like, params), params)": "jax.tree.map(jnp.zeros_like, params), "
        "jax.tree.map(lambda w: w[::-1], params))",
        "early = jax.tree.map(lambda w, e: jnp.where(step == EARLY, w, e), params, state.early)": "early = state.early",
        "STEPS, ROUNDS, EVERY, EARLY = 360, 4, 30, 15": "STEPS, ROUNDS, EVERY, EARLY = 40, 4, 10, 5",
    }
    found = cells(changes, "36", "40")
    rewound = follow(found["pruning"](0.01, 0.2, 4), 40)
    assert np.count_nonzero(rewound) == 40
    assert not np.array_equal(rewound, follow(found["pruning"](0.01, 0.2, 3), 40))
    rising = sparsity.masked(
        optax.sgd(0.01, 0.9),
        lambda step, params, mask, gradient: jax.tree.map(
            lambda w, m: jnp.where(w.ndim > 1, m * (jnp.abs(w) > 1e-2 * step), m), params, mask
        ),
    )
    assert 0 < np.count_nonzero(follow(rising, 40)) < 200


@suggested_by("06_sparsity")
def test_twice_the_steps_and_connections_that_may_all_move(monkeypatch, capsys):
    changes = {
        "360, 4": "720, 4",
        "epochs=6": "epochs=12",
        "range(2)": "range(1)",
        "WAYS_TO_PRUNE):": "[*WAYS_TO_PRUNE][:1]):",
    }
    monkeypatch.setitem(experiment.CHANGES, "RigL", (1.0, 1))
    found = cells(changes, "36", "40", "46", "46-run", "53-erk", "106", "108", "109", "109-run")
    assert found["rewired"].keys() == experiment.CHANGES.keys()
    assert "RigL" in capsys.readouterr().out
    left = np.count_nonzero(found["rewired"]["RigL"].params["dense1"]["w"])
    assert left <= round(found["erk"](0.05)["dense1"] * 196 * 64)


@suggested_by("06_sparsity")
def test_other_blocks():
    changes = {
        "BLOCKS = 512, 128": "BLOCKS = 256, 8",
        "[16, 64]": "[8, 256]",
    }
    found = cells(
        changes, "91", "92", "93", "94", "95", "97", "98", "98-times", "99", "101", "97-machine", "97-predict"
    )
    assert found["relative_time"]("blocks of 256").keys() == {1.0}
    assert len(found["relative_time"]("blocks of 8")) == 5


# What the notebook says


@pytest.fixture(scope="module")
def ways():
    found = cells({}, "36", "46", "47")
    return {(way, d): found["way_results"](way, d) for way in found["WAYS_TO_PRUNE"] for d in found["FINAL"]}, found


def test_rewinding_costs_at_shallow_cuts_and_rounds_fall_behind_at_deep_ones(ways):
    reached, found = ways

    def against_rounds(way):
        return {d: found["told_apart"](reached[way, d] - reached["in rounds", d]) for d in found["FINAL"]}

    rewound, gradually = against_rounds("in rounds, rewound"), against_rounds("gradually")
    assert rewound == {0.01: "not told apart", 0.02: "not told apart", 0.05: "behind", 0.1: "behind"}
    assert gradually[0.01] == gradually[0.02] == "ahead"
    assert gradually[0.05] == "not told apart"


def test_which_pieces_lie_above_single_weights_and_how_the_figure_ends():
    changes = {"conv = kernels[0]": "conv = None"}
    found = cells(changes, "54", "46", "67", "68", "69-differences", "69-left", "69")

    def above(piece, bits, index):
        gains = found["bytes_and_gains"](piece, bits, index)[1]
        return [gain.low > 0 for gain in map(intervals.interval, gains.T) if np.isfinite(gain.mean)]

    for piece in ("kernel", "block"):
        assert all(above(piece, 2, "relative"))
        assert not any(above(piece, 8, "relative") + above(piece, 32, "relative"))
    assert above("vector", 8, "relative") == [False, False, True]
    assert above("vector", 8, "bitmap")[0]

    fig = matplotlib.figure.Figure()
    update = found["make_stored"](fig)
    update(32, "relative")
    right = fig.axes[1]
    below = [text.get_text() for text in right.texts]
    assert len(below) == 2
    assert all(text.startswith("▼ -") for text in below)
    update(2, "bitmap")
    assert [text.get_text() for text in right.texts] == ["no size in common: kernel, filter, block"]
    update(4, "bitmap")
    highest = np.nanmax(intervals.interval(found["bytes_and_gains"]("vector", 4, "bitmap")[1]).high)
    assert 1.8 < highest < right.get_ylim()[1]
    update(4, "relative")
    assert not right.texts


def test_zeros_before_and_after_pooling_are_those_of_the_results():
    found = cells({}, "17", "19")
    params = found["lenet"].init(jax.random.key(5))
    x, y = jnp.pad(weights((4, 20, 20, 1)), ((0, 0), (4, 4), (4, 4), (0, 0))), jnp.arange(4)
    *_, signs = found["zeros"](params, x, y)
    plain = np.asarray(models.conv2d(x, params["conv1"]["w"], padding="VALID"))
    largest = plain.reshape(4, 12, 2, 12, 2, 6).max((2, 4))
    for name, z in (("conv1", plain), ("conv1, pooled", largest)):
        np.testing.assert_allclose(signs[name], [100 * (z < 0).mean(), 100 * (z == 0).mean()], atol=0.1)
