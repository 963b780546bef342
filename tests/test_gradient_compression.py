"""Messages to the bit, means over draws against derived deviations, nothing lost with feedback, sums of lists."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import Cells, changed
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import gradient_compression as room
from dlscale.gradient_compression import exercises, experiment

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # quick to compile
WHERE_LARGEST = jit(room.where_largest)
FURTHER = "further/11_gradient_compression_further"


def gradient(seed=0, shapes=((24, 10), (10,))):
    rng = np.random.default_rng(seed)
    return {f"p{i}": jnp.asarray(rng.standard_t(3, size=shape), jnp.float32) for i, shape in enumerate(shapes)}


def there_and_back(compressor, tree, state=None):
    state = compressor.init(tree) if state is None else state
    message, state = jit(compressor.encode)(state, tree)
    return message, jit(compressor.decode)(message, tree), state


def flat(tree):
    return np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)])


def same(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


@pytest.mark.parametrize(
    "call, advice",
    [
        *((lambda share=share: room.top_k(share), "share must be") for share in (0, 1.1, math.nan)),
        *((lambda clip=clip: room.quantised(1, clip), "clip must be") for clip in (-2.5, math.nan)),
        (lambda: room.largest(jnp.ones(10), 11), "k must be"), (lambda: room.low_rank(0), "rank must be"),
        (lambda: room.quantised(0), "levels must be"), (lambda: room.quantised(1, rounding="up"), "Unknown rounding"),
        (lambda: room.clipped(room.one_bit(), -1.0), "limit must be"),
        (lambda: room.momentum_correction(room.one_bit(), math.inf), "momentum must be"),
    ],
)  # fmt: skip
def test_what_cannot_be(call, advice):
    with pytest.raises(ValueError, match=advice):
        call()


def test_one_bit_is_signs_and_the_means_of_each_column():
    tree = gradient() | {"p2": jnp.ones((4, 2))}
    _, found, _ = there_and_back(room.one_bit(), tree)
    for column, back in zip(np.asarray(tree["p0"]).T, np.asarray(found["p0"]).T, strict=True):
        assert np.allclose(back, np.where(column >= 0, column[column >= 0].mean(), column[column < 0].mean()))
    same(found["p2"], tree["p2"])


@pytest.mark.parametrize("levels, bits", [(7, 4), (1000, 11)])
def test_quantised_bytes_and_that_levels_come_back(levels, bits):
    x = jnp.arange(-levels, levels + 1, dtype=jnp.float32) * 0.5
    message, found, _ = there_and_back(room.quantised(levels), x * (3e38 / levels))
    assert np.allclose(np.asarray(found) / (3e38 / levels), x, rtol=1e-5)  # on a level there is nothing to draw
    assert room.nbytes(message) == bits * math.ceil((2 * levels + 1) / 8) + 4
    nearest = there_and_back(room.quantised(levels, rounding="nearest"), x.at[1:-1].add(0.24))[1]
    assert np.allclose(nearest, x, rtol=1e-5)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 99), st.sampled_from([1, 104, 203]), st.sampled_from([0.0, math.nan, math.inf]))
def test_the_largest_are_those_of_a_sort_with_ties_and_nan_too(seed, k, special):
    x = np.random.default_rng(seed).integers(-9, 10, 203).astype(np.float32)
    x[:100], x[50] = 0, special
    found = room.largest(jnp.asarray(x), k)
    order = np.argsort(-np.where(np.isnan(x), np.inf, np.abs(x)), kind="stable")
    same(found.indices, np.sort(order[:k]))
    same(np.flatnonzero(WHERE_LARGEST(jnp.asarray(x), k)), found.indices)
    same(found.values, x[np.asarray(found.indices)])


def test_the_share_of_a_warm_up_falls_by_equal_factors():
    compressor, tree = room.warm_up(0.01, 0.25, 2), {"w": gradient(shapes=((2000,),))["p0"]}
    state = compressor.init(tree)
    for count in (500, 100, 20, 20):
        message, found, state = there_and_back(compressor, tree, state)
        assert np.count_nonzero(found["w"]) == room.nbytes(message) / 8 == count


def test_random_rounding_is_right_on_average_with_the_deviation_of_its_coins():
    def draws(compressor):
        decoded = lambda seed: compressor.decode(compressor.encode(compressor.init(x, seed), x)[0], x)  # noqa: E731
        return np.asarray(jit(jax.vmap(decoded))(jnp.arange(400)))

    x = gradient(shapes=((60,),))["p0"]
    step = np.abs(x).max()
    up = x / step - np.floor(x / step)
    deviation = step * np.sqrt(up * (1 - up))  # of a coin that adds a step with this probability
    found = draws(room.quantised(1))
    assert (np.abs(found.mean(0) - x) <= 5 * deviation / math.sqrt(len(found)) + 1e-4).all()
    assert np.isclose(((found - x) ** 2).sum(1).mean(), (deviation**2).sum(), rtol=0.1)
    omega = (deviation**2).sum() / (x**2).sum()  # divided by 1 + ω: less is left than came
    shrunk = draws(room.quantised(1, shrink=True))
    assert np.allclose(shrunk * (1 + omega), found, rtol=1e-4, atol=1e-5)
    assert np.isclose(((shrunk - x) ** 2).sum(1).mean(), omega / (1 + omega) * (x**2).sum(), rtol=0.1)


@settings(max_examples=6, deadline=None)
@given(
    shape=st.sampled_from([(1, 6), (6, 1), (4, 3, 2)]), rank=st.sampled_from([1, 3]),
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(-4, 3)), min_size=2, max_size=4), seed=st.integers(0, 99),
)  # fmt: skip
def test_of_any_matrix_low_rank_leaves_less_and_of_one_of_its_rank_nothing(shape, rank, steps, seed):
    rng, compressor, state = np.random.default_rng(seed), room.low_rank(rank), None
    for own, power in steps:  # of each gradient its rank, at most, and its size
        sides = shape[0], math.prod(shape[1:])
        x = rng.normal(size=(sides[0], own)) @ rng.normal(size=(own, sides[1])) * 10.0**power
        x = jnp.asarray(x.reshape(shape), jnp.float32)
        message, state = compressor.encode(compressor.init(x) if state is None else state, x)
        size, left = np.linalg.norm(flat(x).astype(float)), flat(x).astype(float) - flat(compressor.decode(message, x))
        assert np.linalg.norm(left) <= (1 + 1e-5) * size
        if min(*sides, own) <= rank:
            assert np.linalg.norm(left) <= 1e-4 * size


@pytest.mark.parametrize(
    "inside, size, most",  # bytes of a message, and the share of the squared length that it may leave
    [
        (room.joined(room.top_k(0.1)), 8 * 25, 0.9), (room.one_bit(), (30 + 8 * 10) + (2 + 8), 1),
        (room.quantised(1, clip=2.5), (2 * 30 + 4) + (2 * 2 + 4), math.inf),
        (room.low_rank(1), 4 * (24 + 10 + 10), 1),
    ],
)  # fmt: skip
def test_messages_have_their_bytes_and_with_feedback_nothing_is_lost(inside, size, most):
    compressor, sent, given = room.error_feedback(inside), 0.0, 0.0
    state, encode = compressor.init(gradient()), jit(compressor.encode)
    for seed in range(4):
        message, state = encode(state, tree := gradient(seed))
        sent, given = sent + flat(compressor.decode(message, tree)).astype(float), given + flat(tree).astype(float)
        if seed == 0:
            assert room.nbytes(message) == size
            assert 0 < (flat(state.own) ** 2).sum() <= most * (flat(tree) ** 2).sum()
    assert np.allclose(sent + flat(state.own), given, atol=2e-4)


def test_clipping_shortens_what_is_too_long_and_tells_what_overflows():
    clipped = room.clipped(room.dense(), 0.5)
    for x, wanted in (([3.0, 4], [0.3, 0.4]), ([0.3, 0.2], [0.3, 0.2]), ([2.0**120, 2.0**121], [np.nan] * 2)):
        assert np.allclose(clipped.encode((), jnp.asarray(x))[0][0], wanted, equal_nan=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_told_and_never_remembered(bad):
    inside = room.momentum_correction(room.error_feedback(room.low_rank(1)), 0.9)
    compressor, tree = room.clipped(inside, 1.0), gradient()
    state = jit(compressor.encode)(compressor.init(tree), tree)[1]
    spoilt = tree | {"p0": tree["p0"].at[3, 3].set(bad)}
    message, after = jit(compressor.encode)(state, spoilt)
    same(after, state)
    assert np.isnan(flat(compressor.decode(message, tree))).any()


def test_low_rank_factors_of_the_mean_are_the_same_for_all():
    trees = jax.tree.map(lambda *a: jnp.stack(a), gradient(0), gradient(1))
    compressor, alone, mean = room.low_rank(2, "w"), room.low_rank(2), jax.tree.map(lambda a: a.mean(0), trees)
    states = jax.vmap(compressor.init)(trees, jnp.arange(2))
    messages, _ = jit(jax.vmap(compressor.encode, axis_name="w"))(states, trees)
    message, _ = jit(alone.encode)(alone.init(mean), mean)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.stack([b] * 2), atol=1e-4), messages, message)


def cells(*identities, notebook="11_gradient_compression", **changes):
    found = Cells(notebook, changes)
    found.update(jax=jax, jnp=jnp, np=np, compression=room, math=math)
    found.run(*identities)
    return found


def test_a_memory_that_forgets_leaves_an_error():
    errors = []
    for changes in ({}, {"remember * memory": "0.9 * remember * memory"}):
        found = cells("compression-methods", "compression-mean", **changes)
        few = functools.partial(found["top"], share=0.05)
        errors.append(found["mean_of_messages"](few, np.asarray(gradient()["p0"]), 256, True)[0, -1])
    assert errors[0] < 1e-3 < 0.1 < errors[1]


def test_weak_noise_makes_more_stairs_and_lets_the_quiet_weight_learn_without_a_memory():
    stairs, dropped = [], []
    for noise in ("[-2, 2]", "[-0.5, 0.5]"):
        found = cells("compression-methods", "compression-toy-run", **{"choice([-2, 2]": f"choice({noise}"})
        half = functools.partial(found["top"], share=0.5)
        (path, _), (without, _) = (found["train_toy"](half, remember) for remember in (True, False))
        stairs.append(np.count_nonzero(np.diff(path)))
        dropped.append(without[-1])
    assert stairs[0] < stairs[1] and dropped[0] == 1 > 0.8 > dropped[1]


CODERS = functools.partial(cells, "compression-further-split", "compression-further-levels", notebook=FURTHER)


@pytest.mark.parametrize("size, k", [(2000, 3), (64, 16)])  # the lists stay short; they fill in
def test_sums_of_lists_are_the_dense_ones_and_send_what_is_recorded(size, k):
    rng, own = np.random.default_rng(k), np.zeros((8, size), bool)
    np.put_along_axis(own, np.array([rng.permutation(size)[:k] for _ in range(8)]), True, 1)
    lists = [{i: float(w + 1) for i in np.flatnonzero(few).tolist()} for w, few in enumerate(own)]
    wanted = (own * np.arange(1.0, 9)[:, None]).sum(0)
    same(cells("compression-doubling")["doubling"](lists)[1], experiment.doubling_bytes(own))
    found = CODERS()
    same(found["split_sum"](lists, size, found["shorter"])[0], wanted)
    same(found["split_sum"](lists, size, found["shorter"])[1], experiment.split_bytes(own))


def test_rounded_sums_are_right_on_average_and_take_two_messages():
    found, x = CODERS(), np.asarray(gradient(shapes=((4, 37),))["p0"])
    found.run("compression-further-compressed")
    draws = (found["compressed_all_reduce"](x, found["seven_levels"]) for _ in range(300))
    sums, sizes = zip(*draws, strict=True)
    assert (np.abs(np.mean(sums, 0) - x.sum(0)) <= 5 * np.std(sums, 0).max() / math.sqrt(300)).all()
    assert sizes[0] == 2 * 3 * (4 * math.ceil(10 / 8) + 4)


def test_equal_lists_never_fill_in_and_as_lists_the_worker_of_their_block_sends_most():
    equal = [{1: 1.0, 5: 2.0}] * 8
    assert (cells("compression-doubling")["doubling"](equal)[1] == 3 * 2 * 8).all()
    found = CODERS()
    assert [*found["split_sum"](equal, 64)[1]] == [7 * 32] + [16 + 7 * 32] * 7
    assert [*found["split_sum"](equal, 64, found["shorter"])[1]] == [7 * 16] + [16] * 7


def test_half_the_momentum_is_the_librarys_and_rank_four_leaves_less_than_two():
    found = cells("compression-further-correction", "compression-further-power-step", notebook=FURTHER)
    fed = room.error_feedback(room.top_k(0.1))
    both = found["correction_and_masking"](fed, 0.5), room.factor_masking(room.momentum_correction(fed, 0.5))
    states, left = [one.init(gradient()) for one in both], []
    for seed in range(3):
        (ours, a), (theirs, b) = (jit(c.encode)(s, gradient(seed)) for c, s in zip(both, states, strict=True))
        same(ours, theirs)
        states = a, b
    for rank in (2, 4):
        p = q = np.random.default_rng(0).normal(size=(5, rank))
        for _ in range(10):
            p, q = found["power_step"](np.diag([9.0, 8, 4, 3, 1]), q)
        left.append(np.linalg.norm(np.diag([9, 8, 4, 3, 1]) - p @ q.T))
    assert left[1] < 1.1 < left[0]


KEEP, DUE = "    kept[indices] = 0\n", "memory + gradient"


@pytest.mark.parametrize(
    "exercise, answer, why",
    [
        (exercises.feedback, ("np.argsort(-np.abs(due))[:k]", "np.argpartition(np.abs(due), -k)[-k:]"), "✓"),
        (exercises.bits_each, lambda rows, columns: 8 * (-(-rows * columns // 8) / columns + 8) / rows, "✓"),
        (exercises.feedback, (DUE, "gradient"), "in step 2"),
        (exercises.feedback, (KEEP, ""), "what is kept"),
        (exercises.feedback, ("np.abs(due)", "due"), "the indices are not"),
        (exercises.feedback, ("due[indices]", "gradient[indices]"), "what is sent"),
        (exercises.feedback, ("due = memory + gradient", "memory += gradient; due = memory"), "changes the"),
        (exercises.bits_each, ("2 * 4 * columns", "2 * 4 * rows"), "too"),
        (exercises.bits_each, ("math.ceil(rows * columns / 8)", "rows * columns / 8"), "too small"),
        (exercises.crossing, lambda size, k: 2 ** math.ceil(math.log2(size / k)), "the number of workers"),
        (exercises.crossing, ("sent += ", "sent = "), "the number of workers"),  # the last round only
        (exercises.crossing, ("(size, k, workers)", "(size, k, 1) * workers"), "the number of workers"),
    ],
)  # fmt: skip
def test_right_answers_are_taken_and_naive_ones_refused(exercise, answer, why):
    right, line = exercise.judge(changed(exercise, *answer, compression=room) if isinstance(answer, tuple) else answer)
    assert why in line and right == (why == "✓"), line
