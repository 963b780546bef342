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


@settings(max_examples=6, deadline=None)
@given(bits=st.integers(1, 16), size=st.sampled_from([1, 8, 203]), seed=st.integers(0, 99))
def test_packed_and_unpacked_to_the_bit(bits, size, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, size).astype(np.uint8 if bits <= 8 else np.uint16)
    packed = room.pack(jnp.asarray(codes), bits)
    assert packed.dtype == jnp.uint8 and packed.nbytes == bits * math.ceil(size / 8)
    same(room.unpack(packed, size), codes)
    for j in range(bits):
        same(np.unpackbits(np.asarray(packed)[j], count=size), codes >> j & 1)


def test_zero_bits():
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


@pytest.mark.parametrize("k", [0, 11, -1, 2.5])
def test_k_of_zero_or_above_the_size(k):
    with pytest.raises(ValueError, match="k must be a whole number from 1 to 10"):
        room.largest(jnp.ones(10), k)


@pytest.mark.parametrize("make", [room.top_k, room.random_k, lambda share: room.warm_up(0.1, share, 3)])
@pytest.mark.parametrize("share", [0, 1.1, math.nan])
def test_a_share_that_is_none(make, share):
    with pytest.raises(ValueError, match="share must be"):
        make(share)


def test_a_threshold_sends_what_reaches_it_and_counts_only_that():
    tree = gradient()
    message, found, _ = there_and_back(room.threshold(1.0), tree)
    x = flat(tree)
    same(flat(found), np.where(np.abs(x) >= 1, x, 0))
    assert room.nbytes(message) == 8 * (np.abs(x) >= 1).sum() < program.nbytes(*jax.tree.leaves(message))


def test_joined_numbers_compete_with_each_other():
    tree = {"small": jnp.full(50, 0.1), "large": jnp.arange(1.0, 51.0)}
    found = there_and_back(room.joined(room.top_k(0.1)), tree)[1]
    assert not found["small"].any() and np.count_nonzero(found["large"]) == 10
    assert np.count_nonzero(there_and_back(room.top_k(0.1), tree)[1]["small"]) == 5


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


@pytest.mark.parametrize("levels, norm", [(1, "max"), (3, "max"), (4, "two")])
def test_stochastic_rounding_is_right_on_average_with_the_deviation_of_its_coins(levels, norm):
    tree = gradient(shapes=((60,),))
    x = np.asarray(tree["p0"], float)
    step = (np.abs(x).max() if norm == "max" else np.linalg.norm(x)) / levels
    up = x / step - np.floor(x / step)
    deviation = step * np.sqrt(up * (1 - up))  # of a coin that adds a step with this probability
    found = draws(room.quantised(levels, norm), tree)
    assert (np.abs(found.mean(0) - x) <= 5 * deviation / math.sqrt(len(found)) + 1e-4).all()
    assert np.isclose(((found - x) ** 2).sum(1).mean(), (deviation**2).sum(), rtol=0.1)
    nearest = draws(room.quantised(levels, norm, rounding="nearest"), tree, 2)
    assert np.abs(nearest[0] - x).max() <= step / 2 + 1e-4
    assert (np.abs(nearest.mean(0) - x) > 5 * deviation / math.sqrt(len(found)) + 1e-4).any()  # it is not


def test_clipping_comes_before_the_scale():
    tree = gradient(shapes=((60,),))
    x = np.asarray(tree["p0"])
    limit = 2.5 * x.std()
    assert np.abs(x).max() > limit
    assert np.isclose(np.abs(there_and_back(room.terngrad(), tree)[1]["p0"]).max(), limit)


def test_random_entries_are_right_on_average():
    tree = gradient(shapes=((60,),))
    x, found = np.asarray(tree["p0"]), draws(room.random_k(0.2), tree)
    deviation = np.abs(x) * math.sqrt(60 / 12 - 1)  # n / k times x with probability k / n
    assert (np.abs(found.mean(0) - x) <= 5 * deviation / math.sqrt(len(found))).all()
    assert (np.count_nonzero(found, axis=1) == 12).all()


CONTRACTING = {
    "top": (room.top_k(0.25), lambda n: 1 - 0.25),
    "random": (room.random_k(0.25, unbiased=False), lambda n: 1 - 0.25),
    "nearest": (room.quantised(4, rounding="nearest"), lambda n: 1.0),
    "one bit": (room.one_bit(), lambda n: 1.0),
    "rank": (room.low_rank(2), lambda n: 1.0),
}


@pytest.mark.parametrize("name", CONTRACTING)
def test_what_is_left_is_shorter_than_what_came(name):
    """‖x − C(x)‖² ≤ (1 − δ) ‖x‖²: what error feedback needs; of random entries on average."""
    compressor, factor = CONTRACTING[name]
    f, left = jit(lambda state, tree: compressor.decode(compressor.encode(state, tree)[0], tree)), []
    for seed in range(20):
        tree = gradient(seed, shapes=((20, 12),))
        state = compressor.init(tree, seed)
        back = f(state, tree)
        left.append(((flat(tree) - flat(back)) ** 2).sum() / (flat(tree) ** 2).sum())
    assert (np.mean(left) if name == "random" else max(left)) <= factor(240) + (0.05 if name == "random" else 1e-6)


def test_a_matrix_of_low_rank_comes_back_and_a_second_step_is_better():
    rng = np.random.default_rng(0)
    tree = {"b": jnp.asarray(rng.normal(size=5), jnp.float32)}
    tree["w"] = jnp.asarray(rng.normal(size=(12, 2)) @ rng.normal(size=(2, 9)), jnp.float32)
    message, found, _ = there_and_back(room.low_rank(2), tree)
    assert all(np.allclose(a, b, atol=1e-4) for a, b in zip(*map(jax.tree.leaves, (found, tree)), strict=True))
    assert room.nbytes(message) == 4 * (5 + 2 * (12 + 9))
    tree, compressor, errors = gradient(shapes=((30, 20),)), room.low_rank(2), []
    state = compressor.init(tree)
    for _ in range(20):
        _, found, state = there_and_back(compressor, tree, state)
        errors.append(np.linalg.norm(flat(found) - flat(tree)))
    best = np.linalg.svd(np.asarray(tree["p0"]), compute_uv=False)[2:]
    assert errors[-1] < errors[0] and errors[-1] == pytest.approx(np.linalg.norm(best), rel=0.02)


# Wrappers

COMPRESSORS = {
    "dense": room.dense(), "top": room.top_k(0.1), "joined": room.joined(room.top_k(0.1)), "one bit": room.one_bit(),
    "sign": room.sign(), "random": room.random_k(0.2, unbiased=False), "threshold": room.threshold(1.0),
    "nearest": room.quantised(1, rounding="nearest"), "TernGrad": room.terngrad(), "QSGD": room.quantised(4, "two"),
    "rank": room.low_rank(1), "warm-up": room.warm_up(0.05, 0.25, 4),
}  # fmt: skip


KEEPING = [name for name in COMPRESSORS if name not in ("dense", "joined", "QSGD")]  # nothing kept; as top; as TernGrad


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


def test_velocity_is_what_is_compressed_and_masking_restarts_it():
    inner, trees = room.error_feedback(room.joined(room.top_k(0.1))), [gradient(seed) for seed in range(3)]
    corrected = room.momentum_correction(inner, 0.9)
    velocity, state, plain = 0.0, corrected.init(trees[0]), inner.init(trees[0])
    for tree in trees:
        velocity = 0.9 * velocity + flat(tree)
        message, state = jit(corrected.encode)(state, tree)
        names = jax.tree.unflatten(jax.tree.structure(tree), np.split(velocity, [240]))
        expected, plain = jit(inner.encode)(plain, jax.tree.map(lambda a, t: jnp.reshape(a, t.shape), names, tree))
        assert (np.asarray(message.indices if hasattr(message, "indices") else message[0].indices) >= 0).all()
        assert np.allclose(flat(corrected.decode(message, tree)), flat(inner.decode(expected, tree)), atol=1e-5)
    assert np.allclose(flat(state.own), velocity, atol=1e-5)
    masked = room.factor_masking(corrected)
    message, state = jit(masked.encode)(masked.init(trees[0]), trees[0])
    sent = flat(masked.decode(message, trees[0])) != 0
    same(flat(state.own), np.where(sent, 0, flat(trees[0])))
    assert sent.sum() == 25


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


@pytest.mark.parametrize("name", COMPRESSORS)
def test_no_compressor_makes_a_number_of_what_is_none(name):
    if name in ("random", "threshold"):  # the one may not have drawn it; the other sends it beside the rest
        return
    tree = {"w": jnp.full((6, 5), jnp.nan)}
    assert np.isnan(flat(there_and_back(COMPRESSORS[name], tree)[1])).any()


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
        *(("split", True, 64, 16), ("split", False, 200, 3), ("split", False, 64, 16)),
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


def test_who_sums_sends_its_sum_in_the_shorter_form_and_dealing_shares_the_work():
    own = np.zeros((4, 16), bool)
    own[:, 12:] = True  # all is in the last block: who sums it sends four numbers to three others
    same(experiment.split_bytes(own), [32, 32, 32, 3 * 16])
    same(experiment.split_bytes(own, dealt=True), [24 + 3 * 8] * 4)


def test_bytes_of_doubling_are_those_of_unions_until_the_switch():
    size, k, workers = 128, 8, 16
    rng = np.random.default_rng(0)
    indices = np.sort([rng.choice(size, k, replace=False) for _ in range(workers)]).astype(np.int32)
    lists = room.Sparse(jnp.asarray(indices), jnp.ones((workers, k)))
    unions = [8 * len(np.unique(indices[:d])) for d in (1, 2, 4, 8)]  # of worker 0 and those it has heard of
    assert unions[3] < 4 * size  # the switch is cautious: 8 · k entries might have been as long as the array
    for switch, last in ((False, unions[3]), (True, 4 * size)):
        f = functools.partial(room.sparse_all_reduce, size=size, axis_name="w", algorithm="doubling", switch=switch)
        same(on_all(f, lists)[1][0], np.array([*unions[:3], last]))


def test_equal_supports_never_fill_in():
    lists = room.Sparse(jnp.tile(jnp.arange(0, 40, 5, dtype=jnp.int32), (8, 1)), jnp.ones((8, 8)))
    found, sent = on_all(lambda own: room.sparse_all_reduce(own, 200, "w", "doubling", False), lists)
    same(sent, np.full((8, 3), 64))
    assert np.count_nonzero(found[0]) == 8


def test_expected_unions():
    rng = np.random.default_rng(0)
    unions = [len(np.unique([rng.choice(300, 20, replace=False) for _ in range(6)])) for _ in range(200)]
    assert room.expected_union(300, 20, 6) == pytest.approx(np.mean(unions), rel=0.01)


def test_doubling_needs_a_power_of_two():
    lists = jax.vmap(lambda own: room.largest(own, 2))(jnp.ones((3, 8)))
    with pytest.raises(ValueError, match='use "split"'):
        jax.vmap(lambda own: room.sparse_all_reduce(own, 8, "w"), axis_name="w")(lists)


def test_a_vote_is_what_most_say():
    decoded = jnp.asarray([[0.1, -0.2, 0.3], [0.1, 0.2, 0.3], [0.1, -0.2, -0.3]])
    assert np.allclose(room.vote(decoded), [0.1, -0.2, 0.3])


# What the notebook suggests

NAMES = {"jax": jax, "jnp": jnp, "np": np, "compression": room, "math": math}


def cells(*identities):
    found = Cells("11_gradient_compression")
    found.update(NAMES)
    found.run(*identities)
    return found


def test_equal_entries_by_hand_never_fill_in():
    lists, sent = cells("compression-doubling-hand")["doubling_by_hand"]([{1: 1.0, 5: 2.0}] * 8)
    assert lists == [{1: 8.0, 5: 16.0}] * 8 and (sent == 3 * 2 * 8).all()


def test_feedback_by_hand_around_one_bit_loses_nothing():
    compressor = cells("compression-feedback-hand")["error_feedback_by_hand"](room.one_bit())
    state, sent, given_ = compressor.init(gradient()), 0.0, 0.0
    for seed in range(4):
        message, state = jit(compressor.encode)(state, gradient(seed))
        sent, given_ = sent + flat(compressor.decode(message, gradient())), given_ + flat(gradient(seed))
    assert np.allclose(sent + flat(state[0]), given_, atol=1e-4)


def test_another_momentum_by_hand_is_the_librarys():
    fed = room.error_feedback(room.joined(room.top_k(0.01)))
    ours = cells("compression-deep-hand")["correction_and_masking_by_hand"](fed, 0.5)
    library = room.factor_masking(room.momentum_correction(fed, 0.5))
    states = [c.init(gradient()) for c in (ours, library)]
    for seed in range(3):
        (a, mine), (b, theirs) = (
            jit(c.encode)(s, gradient(seed)) for c, s in zip((ours, library), states, strict=True)
        )
        same(a, b)
        states = [mine, theirs]


def test_eight_bits_leave_little_behind():
    x = flat(gradient())
    assert np.sum((cells("compression-methods")["level"](x, 8) - x) ** 2) < 1e-2 * np.sum(x**2)


def test_elias_bits_by_hand_are_those_of_codes_written_out():
    def omega(number):
        code = "0"
        while number > 1:
            code, number = f"{number:b}" + code, number.bit_length() - 1
        return code

    codes = np.random.default_rng(0).integers(-9, 10, 400) * (np.random.default_rng(1).random(400) < 0.2)
    text, last = "", -1
    for place in np.flatnonzero(codes):
        text += omega(int(place - last)) + "+" + omega(abs(int(codes[place])))
        last = place
    assert cells("compression-elias-hand")["elias_bits"](codes) == len(text)
    message = [{"codes": room.pack(jnp.asarray(codes + 9, jnp.uint8), 5), "scale": 1.0}]
    assert experiment.elias_bytes(9, message, {"w": jnp.zeros(400)}) == (32 + len(text)) / 8
    assert experiment.omega_bits(jnp.asarray([65_535])) == len(omega(65_535))


def test_bytes_are_counted_in_each_step_and_counting_changes_nothing():
    inner, trees = room.error_feedback(room.threshold(1.0)), [gradient(seed) for seed in range(3)]
    compressor, wanted = experiment.counting(inner, experiment.listed_bytes), 0
    state, plain = compressor.init(trees[0]), inner.init(trees[0])
    for tree in trees:
        message, state = jit(compressor.encode)(state, tree)
        expected, plain = jit(inner.encode)(plain, tree)
        same(message, expected)
        wanted += room.nbytes(expected)
    assert state[0] == wanted > 0


# Exercises: what is right in another way, and what is nearly right


def judged(exercise, text):
    names = dict(vars(exercises)) | {"np": np}
    exec(text, names)
    return exercise.judge(names[exercise.answer])


def test_a_code_book_must_fit_and_even_levels_do_not():
    even = """
def codebook(x):
    table = np.linspace(x.min(), x.max(), 4)
    return np.abs(x[:, None] - table).argmin(1), table
"""
    signs = """
def codebook(x):
    a = np.abs(x).mean()
    return (x > 0).astype(int), np.array([-a, a, 0, 0])
"""
    for text in (even, signs):
        right, line = judged(exercises.codebook, text)
        assert not right and "times that of a good code book" in line
    quantiles = exercises.codebook.code.replace("[0.05, 0.3, 0.7, 0.95]", "[0.1, 0.4, 0.6, 0.9]")
    assert judged(exercises.codebook, quantiles)[0]


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


def test_a_choice_must_keep_to_what_may_be_lost_and_count_the_whole_step():
    slow = """
def choose(steps, lost, most):
    for name in sorted(steps, key=lambda name: math.fsum(steps[name])):
        if intervals.interval(lost[name]).high <= most:
            return name
"""
    assert judged(exercises.choose, slow)[0]
    for naive, why in (
        ("intervals.interval(lost[name]).high <= most", "True"),
        ("intervals.interval(lost[name]).high", "lost[name].mean()"),
        ("sum(steps[name])", "steps[name][2]"),
    ):
        right, line = judged(exercises.choose, exercises.choose.code.replace(naive, why))
        assert not right and ("may be lost" in line or "can be had" in line), line
