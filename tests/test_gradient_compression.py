"""Messages to the bit, means over draws against derived deviations, nothing lost with feedback, sums over workers."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import Cells
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import gradient_compression as room
from dlscale.gradient_compression import exercises, experiment
from dlscale.lab import program

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # quick to compile


WHERE_LARGEST = jit(room.where_largest)


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


# Packing


def test_zero_bits_and_shares():
    for share in (0, 1.1, math.nan):
        with pytest.raises(ValueError, match="share must be"):
            room.top_k(share)
    with pytest.raises(ValueError, match="k must be a whole number from 1 to 10"):
        room.largest(jnp.ones(10), 11)
    with pytest.raises(ValueError, match="bits must be a whole number from 1 to 16, not 0"):
        room.pack(jnp.zeros(3, jnp.uint8), 0)
    with pytest.raises(ValueError, match="levels must be a whole number from 1 to 32767"):
        room.quantised(0)


# What a message holds


def test_one_bit_is_signs_and_the_means_of_each_column():
    tree = gradient()
    message, found, _ = there_and_back(room.one_bit(), tree)
    matrix = np.asarray(tree["p0"])
    for column, back in zip(matrix.T, np.asarray(found["p0"]).T, strict=True):
        assert np.allclose(back, np.where(column >= 0, column[column >= 0].mean(), column[column < 0].mean()))
    assert room.nbytes(message) == 240 // 8 + 2 * 10 * 4 + 2 + 2 * 4
    one_sided = there_and_back(room.one_bit(), {"w": jnp.ones((4, 2))})[1]
    same(one_sided, {"w": np.ones((4, 2))})


@pytest.mark.parametrize("levels, bits", [(1, 2), (3, 3), (7, 4), (127, 8), (1000, 11)])
def test_quantised_bytes_and_that_levels_come_back(levels, bits):
    x = {"w": jnp.arange(-levels, levels + 1, dtype=jnp.float32) * 0.5}
    message, found, _ = there_and_back(room.quantised(levels), x)
    assert np.allclose(found["w"], x["w"], rtol=1e-6)  # on a level there is nothing to draw
    huge = {"w": x["w"] / levels * 3e38}
    assert np.allclose(there_and_back(room.quantised(levels), huge)[1]["w"] / 3e38, huge["w"] / 3e38, atol=1e-6)
    assert room.nbytes(message) == bits * math.ceil((2 * levels + 1) / 8) + 4


@pytest.mark.parametrize("k", [1, 5, 100, 203])
def test_the_largest_are_those_of_a_sort_with_ties_too(k):
    x = np.random.default_rng(0).integers(-9, 10, 203).astype(np.float32)
    x[:100] = 0
    found = room.largest(jnp.asarray(x), k)
    same(np.flatnonzero(WHERE_LARGEST(jnp.asarray(x), k)), found.indices)
    same(found.indices, np.sort(np.argsort(-np.abs(x), kind="stable")[:k]))
    same(found.values, x[np.asarray(found.indices)])


def test_nan_is_the_largest_of_all():
    x = jnp.zeros(203).at[:4].set(jnp.asarray([1.0, math.nan, math.inf, -5.0]))
    assert room.largest(x, 1).indices == 1 and np.flatnonzero(WHERE_LARGEST(x, 1)).tolist() == [1]


def test_the_share_of_a_warm_up_falls_by_equal_factors():
    compressor, tree = room.warm_up(0.01, 0.25, 2), {"w": gradient(shapes=((2000,),))["p0"]}
    state, counts = compressor.init(tree), []
    for _ in range(4):
        message, found, state = there_and_back(compressor, tree, state)
        counts.append(np.count_nonzero(found["w"]))
        assert room.nbytes(message) == 8 * counts[-1]
    assert counts == [500, 100, 20, 20]
    same(found, there_and_back(room.top_k(0.01), tree)[1])


def test_factors_lose_nothing():
    pair = gradient(shapes=((8, 5), (8, 3)))
    message, _ = room.factors().encode((), (pair["p0"], pair["p1"]))
    same(room.factors().decode(message, None), pair["p0"].T @ pair["p1"])
    assert room.nbytes(message) == 4 * 8 * (5 + 3)


# Right on average, and how far off


def draws(compressor, tree, count=400):
    states = jax.vmap(lambda seed: compressor.init(tree, seed))(jnp.arange(count))

    def one(state):
        return compressor.decode(compressor.encode(state, tree)[0], tree)

    return np.asarray(jit(jax.vmap(one))(states)["p0"])


@pytest.mark.parametrize("levels", [1, 3])
def test_random_rounding_is_right_on_average_with_the_deviation_of_its_coins(levels):
    tree = gradient(shapes=((60,),))
    x = np.asarray(tree["p0"], float)
    step = np.abs(x).max() / levels
    up = x / step - np.floor(x / step)
    deviation = step * np.sqrt(up * (1 - up))  # of a coin that adds a step with this probability
    found = draws(room.quantised(levels), tree)
    assert (np.abs(found.mean(0) - x) <= 5 * deviation / math.sqrt(len(found)) + 1e-4).all()
    assert np.isclose(((found - x) ** 2).sum(1).mean(), (deviation**2).sum(), rtol=0.1)
    nearest = draws(room.quantised(levels, rounding="nearest"), tree, 2)
    assert np.abs(nearest[0] - x).max() <= step / 2 + 1e-4
    omega = (deviation**2).sum() / (x**2).sum()  # divided by 1 + ω: less is left than came
    shrunk = draws(room.quantised(levels, shrink=True), tree)
    assert np.allclose(shrunk * (1 + omega), found, rtol=1e-4, atol=1e-5)
    assert np.isclose(((shrunk - x) ** 2).sum(1).mean(), omega / (1 + omega) * (x**2).sum(), rtol=0.1)


CONTRACTING = {
    "top": (room.top_k(0.25), lambda n: 1 - 0.25),
    "nearest": (room.quantised(4, rounding="nearest"), lambda n: 1.0),
    "one bit": (room.one_bit(), lambda n: 1.0),
    "rank": (room.low_rank(2), lambda n: 1.0),
}


@pytest.mark.parametrize("name", CONTRACTING)
def test_what_is_left_is_shorter_than_what_came(name):
    """‖x − C(x)‖² ≤ (1 − δ) ‖x‖²: what error feedback needs."""
    compressor, factor = CONTRACTING[name]
    f, left = jit(lambda state, tree: compressor.decode(compressor.encode(state, tree)[0], tree)), []
    for seed in range(20):
        tree = gradient(seed, shapes=((20, 12),))
        state = compressor.init(tree, seed)
        back = f(state, tree)
        left.append(((flat(tree) - flat(back)) ** 2).sum() / (flat(tree) ** 2).sum())
    assert max(left) <= factor(240) + 1e-6


SHAPES = [(1, 1), (1, 6), (6, 1), (2, 2), (8, 6), (3, 16), (4, 3, 2)]


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from(SHAPES), rank=st.integers(1, 5), dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    steps=st.lists(st.tuples(st.integers(0, 6), st.integers(-4, 4)), min_size=1, max_size=4), seed=st.integers(0, 99),
    compiled=st.booleans(),
)  # fmt: skip
def test_of_any_matrix_low_rank_leaves_less_and_of_one_of_its_rank_nothing(shape, rank, dtype, steps, seed, compiled):
    rng, compressor, state = np.random.default_rng(seed), room.low_rank(rank), None
    encode = jax.jit(compressor.encode) if compiled else compressor.encode
    for own, power in steps:  # of each gradient its rank, at most, and its size
        sides = shape[0], math.prod(shape[1:])
        x = rng.normal(size=(sides[0], own)) @ rng.normal(size=(own, sides[1])) * 10.0**power
        x = jnp.asarray(x.reshape(shape), dtype)  # which may add to the rank
        state = compressor.init(x) if state is None else state
        message, state = encode(state, x)
        size, left = np.linalg.norm(flat(x).astype(float)), flat(x).astype(float) - flat(compressor.decode(message, x))
        assert np.linalg.norm(left) <= (1 + 1e-5) * size
        if min(*sides, own if dtype == "float32" else 99) <= rank:
            assert np.linalg.norm(left) <= 1e-4 * size


def test_a_direction_that_has_vanished_begins_anew():
    """Two matrices at right angles: what fits the first one is no direction of the second."""
    first, second = jnp.zeros((4, 3)).at[0, 0].set(1.0), jnp.zeros((4, 3)).at[1, 1].set(1.0)
    compressor = room.low_rank(1)
    _, state = compressor.encode(compressor.init(first), first)
    for _ in range(2):
        message, state = compressor.encode(state, second)
    assert np.allclose(compressor.decode(message, second), second, atol=1e-6)


# Wrappers

COMPRESSORS = {
    "dense": room.dense(), "top": room.top_k(0.1), "joined": room.joined(room.top_k(0.1)), "one bit": room.one_bit(),
    "nearest": room.quantised(1, rounding="nearest"), "TernGrad": room.terngrad(),
    "shrunk": room.quantised(4, shrink=True), "rank": room.low_rank(1), "warm-up": room.warm_up(0.05, 0.25, 4),
}  # fmt: skip


KEEPING = [name for name in COMPRESSORS if name not in ("dense", "joined")]  # nothing kept; as top


@pytest.mark.parametrize("name", KEEPING)
def test_with_feedback_nothing_is_lost(name):
    compressor = room.error_feedback(COMPRESSORS[name])
    state, encode, sent, given = compressor.init(gradient()), jit(compressor.encode), 0.0, 0.0
    for seed in range(6):
        tree = gradient(seed)
        message, state = encode(state, tree)
        sent = sent + flat(compressor.decode(message, tree)).astype(float)
        given = given + flat(tree).astype(float)
    assert np.allclose(sent + flat(state.own), given, atol=2e-4)
    assert np.abs(flat(state.own)).max() > 0


def test_clipping_shortens_what_is_too_long():
    tree = gradient()
    for limit in (0.5, 1e6):
        found = flat(there_and_back(room.clipped(room.dense(), limit), tree)[1])
        wanted = flat(tree) * min(1.0, limit / np.linalg.norm(flat(tree)))
        assert np.allclose(found, wanted, rtol=1e-5)


WRAPPED = {
    "feedback": room.error_feedback(room.top_k(0.1)),
    "correction": room.momentum_correction(room.error_feedback(room.one_bit()), 0.9),
    "random": room.error_feedback(room.terngrad()),
    "rank": room.clipped(room.error_feedback(room.low_rank(1)), 1.0),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", WRAPPED)
def test_what_is_not_finite_is_told_and_never_remembered(name, bad):
    compressor, tree = WRAPPED[name], gradient()
    state = jit(compressor.encode)(compressor.init(tree), tree)[1]
    spoilt = tree | {"p0": tree["p0"].at[3, 3].set(bad)}
    with pytest.raises(FloatingPointError, match="the state stays as it was"):
        compressor.encode(state, spoilt)
    message, after = jit(compressor.encode)(state, spoilt)
    key_data = lambda t: jax.tree.map(  # noqa: E731
        lambda a: jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a, t
    )
    same(key_data(after), key_data(state))
    assert np.isnan(flat(compressor.decode(message, tree))).any()


def test_a_gradient_whose_squares_overflow_is_not_clipped_to_nothing():
    clipped = room.clipped(room.dense(), 0.5)
    assert np.allclose(clipped.encode((), jnp.asarray([3.0, 4]))[0][0], [0.3, 0.4])
    assert np.isnan(clipped.encode((), jnp.asarray([3.0, 4]) * 2.0**120)[0][0]).all()


@pytest.mark.parametrize("other", [gradient(shapes=((24, 10),)), gradient(shapes=((10, 24), (10,)))])
def test_another_structure_than_the_states(other):
    compressor = room.error_feedback(room.top_k(0.1))
    with pytest.raises(ValueError, match="call init again"):
        compressor.encode(compressor.init(gradient()), other)


# Workers


def on_all(f, *args):
    return jit(jax.vmap(f, axis_name="w"))(*args)


def of_workers(workers, **options):
    return jax.tree.map(lambda *a: jnp.stack(a), *(gradient(seed, **options) for seed in range(workers)))


@pytest.mark.parametrize("name", ["one bit", "joined"])
def test_gathered_messages_give_all_workers_the_same_mean(name):
    compressor, trees = COMPRESSORS[name], of_workers(4)
    states = jax.vmap(compressor.init)(trees, jnp.arange(4))
    found, _ = on_all(lambda s, g: room.gathered_mean(compressor, s, g, "w"), states, trees)
    decoded = jit(jax.vmap(lambda s, g: compressor.decode(compressor.encode(s, g)[0], g)))(states, trees)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(decoded), strict=True):
        assert (np.asarray(a) == np.asarray(a)[0]).all()
        assert np.allclose(a[0], b.mean(0), atol=1e-6)


def test_low_rank_factors_of_the_mean_are_the_same_for_all():
    compressor, trees = room.low_rank(2, "w"), of_workers(4)
    states = jax.vmap(compressor.init)(trees, jnp.arange(4))
    messages, _ = on_all(compressor.encode, states, trees)
    mean = jax.tree.map(lambda a: a.mean(0), trees)
    alone = room.low_rank(2)
    message, _ = jit(alone.encode)(alone.init(mean), mean)
    for a, b in zip(jax.tree.leaves(messages), jax.tree.leaves(message), strict=True):
        assert np.allclose(a, b[None], atol=1e-4)


@pytest.mark.parametrize("size", [64, 61])
def test_a_compressed_all_reduce_of_everything_is_the_sum(size):
    x = gradient(shapes=((4, size),))["p0"]
    found = on_all(lambda own: room.compressed_all_reduce(own, room.dense(), "w"), x)
    assert np.allclose(found, np.asarray(x).sum(0)[None], atol=1e-5)


def test_a_quantised_all_reduce_is_right_on_average_the_same_for_all_and_sends_two_messages():
    x, compressor = gradient(shapes=((4, 40),))["p0"], room.quantised(7)
    f = jit(jax.vmap(lambda seed: jax.vmap(
        lambda own: room.compressed_all_reduce(own, compressor, "w", seed), axis_name="w")(x)))  # fmt: skip
    found = np.asarray(f(jnp.arange(300)))
    assert (found == found[:, :1]).all()
    spread = found[:, 0].std(0) / math.sqrt(300)
    assert (np.abs(found[:, 0].mean(0) - np.asarray(x).sum(0)) <= 5 * spread).all()
    sent = program.schedule(lambda own: room.compressed_all_reduce(own, compressor, "w"), 4, x[0], axis_name="w").sent()
    part = 4 * math.ceil(10 / 8) + 4
    assert (sent.sum(0) == 2 * 3 * part).all()


@pytest.mark.parametrize(
    "algorithm, switch, size, k",
    [
        ("gather", True, 64, 16),
        *(("doubling", True, 200, 3), ("doubling", True, 64, 16), ("doubling", False, 64, 16)),  # short; switch; full
        *(("split", True, 64, 16), ("split", False, 200, 3)),
    ],
)
def test_sparse_sums_are_the_dense_ones_to_the_bit(algorithm, switch, size, k):
    rng = np.random.default_rng(k)
    x = np.array([rng.permutation(size) - size // 2 for _ in range(8)], np.float32)  # whole: exact in any order
    lists = jax.vmap(lambda own: room.largest(own, k))(jnp.asarray(x))
    found, sent = on_all(lambda own: room.sparse_all_reduce(own, size, "w", algorithm, switch), lists)
    wanted = jax.vmap(lambda own: room.scattered(own, size))(lists).sum(0)
    same(found, np.broadcast_to(wanted, found.shape))
    assert (np.asarray(sent)[:, 0] <= 8 * k * 7).all()
    if not switch and (algorithm == "doubling" or k == 3):  # all lists stay shorter than arrays: as recorded
        own = np.zeros((8, size), bool)
        np.put_along_axis(own, np.asarray(lists.indices), True, 1)
        count = experiment.doubling_bytes if algorithm == "doubling" else experiment.split_bytes
        same(sent.sum(1), count(own))


def test_rounded_sums_are_right_on_average_the_same_for_all_and_an_eighth_of_the_bytes():
    x = gradient(shapes=((4, 64),))["p0"]
    lists = jax.vmap(lambda own: room.largest(own, 32))(x)
    compressed = functools.partial(room.sparse_all_reduce, size=64, axis_name="w", compressor=room.quantised(7))
    split = functools.partial(compressed, algorithm="split")
    over_seeds = jax.vmap(jax.vmap(lambda own, seed: split(own, seed=seed), (0, None), axis_name="w"), (None, 0))
    found, sent = jit(over_seeds)(lists, jnp.arange(300))
    found, wanted = np.asarray(found), np.asarray(jax.vmap(lambda own: room.scattered(own, 64))(lists).sum(0))
    assert np.allclose(found, found[:, :1], atol=1e-6) and (np.asarray(sent)[..., 1] == 3 * (4 * 16 // 8 + 4)).all()
    deviation = np.abs(wanted).max() / 7 / 2  # of a coin between two levels, at most
    assert np.abs(found[:, 0].mean(0) - wanted).max() <= 5 * deviation / math.sqrt(300)
    with pytest.raises(ValueError, match='Only the sums of "split"'):
        on_all(compressed, lists)


def test_doubling_needs_a_power_of_two():
    lists = jax.vmap(lambda own: room.largest(own, 2))(jnp.ones((3, 8)))
    with pytest.raises(ValueError, match='use "split"'):
        jax.vmap(lambda own: room.sparse_all_reduce(own, 8, "w"), axis_name="w")(lists)


# What the notebooks suggest


def cells(notebook, *identities, changes=None):
    found = Cells(notebook, changes)
    found.update(jax=jax, jnp=jnp, np=np, compression=room, math=math, partial=functools.partial)
    found.run(*identities)
    return found


def test_a_memory_that_forgets_leaves_an_error():
    forgets = {"remember * memory": "0.9 * remember * memory"}
    errors = []
    for changes in ({}, forgets):
        found = cells("11_gradient_compression", "compression-methods", "compression-mean", changes=changes)
        few = functools.partial(found["top"], share=0.05)
        errors.append(found["mean_of_messages"](few, np.asarray(gradient()["p0"]), 256, True)[0, -1])
    assert errors[0] < 1e-3 < 0.1 < errors[1]


def test_weak_noise_makes_more_stairs_and_lets_the_quiet_weight_learn_without_a_memory():
    stairs, dropped = [], []
    for noise in ("[-2, 2]", "[-0.5, 0.5]"):
        changes = {"choice([-2, 2]": f"choice({noise}"}
        found = cells("11_gradient_compression", "compression-methods", "compression-toy-run", changes=changes)
        largest = functools.partial(found["top"], share=0.5)
        path, corrected = found["train_toy"](largest, True)
        assert abs(corrected[-1]) < 0.1
        stairs.append(np.count_nonzero(np.diff(path)))
        dropped.append(found["train_toy"](largest, False)[0][-1])
    assert stairs[0] < stairs[1] and dropped[0] == 1 > 0.8 > dropped[1]


def test_equal_lists_never_fill_in():
    doubling = cells("11_gradient_compression", "compression-doubling")["doubling"]
    lists, sent = doubling([{1: 1.0, 5: 2.0}] * 8)
    assert lists == [{1: 8.0, 5: 16.0}] * 8 and (sent == 3 * 2 * 8).all()


def test_whose_block_holds_the_entries_sends_most():
    split_sum = cells("further/11_gradient_compression_further", "compression-further-split")["split_sum"]
    total, sent = split_sum([{1: 1.0, 5: 2.0}] * 8, 64)
    assert total[1] == 8 and total[5] == 16 and (sent[1:] == 16 + 7 * 4 * 8).all() and sent[0] == 7 * 4 * 8


def test_another_momentum_is_the_librarys():
    fed = room.error_feedback(room.joined(room.top_k(0.01)))
    found = cells("further/11_gradient_compression_further", "compression-further-correction")
    both = [found["correction_and_masking"](fed, 0.5), room.factor_masking(room.momentum_correction(fed, 0.5))]
    states = [one.init(gradient()) for one in both]
    for seed in range(3):
        (a, mine), (b, theirs) = (jit(c.encode)(s, gradient(seed)) for c, s in zip(both, states, strict=True))
        same(a, b)
        states = [mine, theirs]


def test_rank_four_leaves_less_than_rank_two():
    found = cells("further/11_gradient_compression_further", "compression-further-power-step")
    matrix, left = np.asarray(gradient(shapes=((64, 64),))["p0"]), []
    for rank in (2, 4):
        q = np.random.default_rng(0).normal(size=(64, rank))
        for _ in range(10):
            p, q = found["power_step"](matrix, q)
        left.append(np.linalg.norm(matrix - p @ q.T))
    assert left[1] < left[0] < np.linalg.norm(matrix)


# Exercises: what is right in another way, and what is nearly right


def judged(exercise, text):
    names = dict(vars(exercises)) | {"np": np}
    exec(text, names)
    return exercise.judge(names[exercise.answer])


def test_a_step_with_feedback_must_keep_what_it_did_not_send():
    code = exercises.feedback.code
    assert judged(
        exercises.feedback, code.replace("np.argsort(-np.abs(due))[:k]", "np.argpartition(np.abs(due), -k)[-k:]")
    )[0]
    for naive, why in (
        (code.replace("memory + gradient", "gradient"), "in step 2"),
        (code.replace("    kept[indices] = 0\n", ""), "what is kept"),
        (code.replace("np.abs(due)", "due"), "the indices are not"),
        (code.replace("due = memory + gradient", "memory += gradient; due = memory"), "changes the arrays"),
    ):
        right, line = judged(exercises.feedback, naive)
        assert not right and why in line, line


def test_other_exercises_refuse_the_naive_answer():
    assert not exercises.bits_each.judge(lambda rows, columns: 1)[0]
    assert exercises.bits_each.judge(lambda rows, columns: 8 * (-(-rows * columns // 8) / columns + 8) / rows)[0]
    assert not exercises.crossing.judge(lambda size, k: 2 ** math.ceil(math.log2(size / k)))[0]
    last_round = lambda size, k: next(  # noqa: E731
        2**i for i in range(1, 40) if 8 * room.expected_union(size, k, 2**i) >= 4 * size
    )
    assert not exercises.crossing.judge(last_round)[0]
