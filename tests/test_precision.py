"""Rounding against ml_dtypes over all bit patterns, the laws of all formats, training in few bits, the exercises."""

# ruff: noqa: A002 - as in dlscale/precision

from __future__ import annotations

import collections
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Cells, changed
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from dlscale import precision
from dlscale.precision import FORMATS, TYPES, Fixed, exercises, experiment, quantize

KEY = jax.random.key(0)
SHORT = [name for name in FORMATS if name != "float32"]

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast:RuntimeWarning")


@functools.cache
def patterns(dtype: np.dtype) -> np.ndarray:
    """All numbers of a format, as float32, in the order of their bit patterns."""
    return np.arange(2 ** (8 * dtype.itemsize)).astype(f"uint{8 * dtype.itemsize}").view(dtype).astype(np.float32)


def same(ours, theirs) -> np.ndarray:
    """Where two arrays hold the same number; 0 and -0 are not."""
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    return (ours.view(np.int32) == theirs.view(np.int32)) | (np.isnan(ours) & np.isnan(theirs))


def ties(own: np.ndarray) -> np.ndarray:
    """All ties of a format's numbers and their neighbours, also that beyond the largest number."""
    numbers = np.unique(np.abs(own[np.isfinite(own)])).astype(float)
    numbers = np.append(numbers, 2 * numbers[-1] - numbers[-2])  # float64 holds what float32 does not
    middle = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    near = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    return np.concatenate([near, -near])


@pytest.mark.parametrize("name", SHORT)
def test_a_format_rounds_as_in_ml_dtypes_and_keeps_its_own_numbers(name):
    theirs, own = TYPES[name], patterns(TYPES[name])
    random = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32)  # also infinities, NaN and subnormals
    x = np.resize(np.concatenate([random.view(np.float32), ties(own), own]), 2**19)  # one length: compiled once
    assert same(quantize(x, name), x.astype(theirs).astype(np.float32)).all()
    own = np.resize(own, 2**16)
    assert same(quantize(own, name, "stochastic", KEY), own).all()


fixed = st.tuples(st.integers(1, 12), st.integers(0, 13)).filter(lambda b: sum(b) > 1).map(lambda b: Fixed(*b))


@given(fixed, st.lists(st.floats(width=32), min_size=30, max_size=30))
def test_fixed_point_is_exact_integer_arithmetic(format, x):
    scale, lowest, highest = 2**format.fraction_bits, -(2 ** (sum(format) - 1)), 2 ** (sum(format) - 1) - 1
    ends = {math.inf: highest, -math.inf: lowest}
    whole = [0 if math.isnan(v) else ends[v] if v in ends else round(Fraction(v) * scale) for v in x]
    expected = [min(max(k, lowest), highest) / scale for k in whole]
    assert same(quantize(np.array(x, np.float32), format), expected).all(), "no -0 and no NaN"


@pytest.mark.parametrize(
    ("format", "x", "step"),
    [
        ("float16", -0.1, 2.0**-14),
        ("float16", 2e-8, 2.0**-24),  # between 0 and the smallest of them
        ("bfloat16", 1e-39, 2.0**-133),  # subnormal in float32 too
        (Fixed(2, 14), -1.3, 2.0**-14),
    ],
)
def test_stochastic_rounding_takes_both_neighbours_and_has_the_mean_it_should(format, x, step):
    x = np.float32(x)
    values = np.asarray(quantize(np.full(2**16, x), format, "stochastic", KEY), np.float64) / step
    low = math.floor(float(x) / step)
    chance = float(x) / step - low
    assert np.isin(values, [low, low + 1]).all()
    assert abs((values - low).mean() - chance) < 4.5 * math.sqrt(chance * (1 - chance) / 2**16)


@pytest.mark.parametrize("shape", [(), (7,), (3, 50)])
def test_random_words_are_those_of_jax(shape):
    key = jax.random.key(2**40 + 3)
    np.testing.assert_array_equal(precision._random_words(key, shape), jax.random.bits(key, shape))


def test_stochastic_rounding_near_the_end_of_the_range():
    x = np.full(2**16, 65512, np.float32)  # a quarter of the way from the largest float16 to what would come next
    assert abs(np.isinf(quantize(x, "float16", "stochastic", KEY)).mean() - 0.25) < 0.01
    assert (quantize(x, Fixed(4, 4), "stochastic", KEY) == 8 - 1 / 16).all()


@pytest.mark.parametrize("format", ["float16", Fixed(4, 4)])
def test_gradients_go_straight_through_and_store_rounds_them(format):
    x, slopes = jnp.array([1.01, -3.0, 1e-9, 70000.0]), jnp.array([0.1, 1e-9, 3.0, 1e5])
    np.testing.assert_array_equal(jax.grad(lambda x: (slopes * quantize(x, format)).sum())(x), slopes)
    y, pull = jax.vjp(lambda x: precision.store(x, "bfloat16", format), x)
    assert same(y, quantize(x, "bfloat16")).all() and same(pull(slopes)[0], quantize(slopes, format)).all()


AUTOFLEX = jax.jit(precision.autoflex, static_argnums=2)


@given(st.lists(st.floats(2.0**-20, 300, width=32), min_size=25, max_size=25), st.sampled_from([8, 12, 16]))
@settings(max_examples=30)
def test_autoflex_predicts_as_the_algorithm_written_out(maxima, mantissa_bits):
    """Köster et al. 2017, Algorithm 2, in plain Python."""
    state, top, wrong = precision.FlexState(jnp.int32(-12), jnp.full(16, jnp.nan)), 2 ** (mantissa_bits - 1) - 1, 0
    history, exponent = collections.deque(maxlen=16), -12
    for maximum in maxima:
        unit = 2.0**exponent
        mantissa = min(round(maximum / unit), top)
        state = AUTOFLEX(state._replace(exponent=jnp.int32(exponent)), jnp.float32(mantissa * unit), mantissa_bits)
        if mantissa >= top:
            history.clear()
            mantissa *= 2
        history.append(mantissa * unit)
        expected = 2 * (max(history) + 3 * np.std(history) + 100 * unit)
        exponent = min(max(math.ceil(math.log2(expected)) - mantissa_bits + 1, -31), 0)
        wrong += int(state.exponent) != exponent
    assert wrong <= 1, "a maximum within float32's error of a power of two may go either way"


@pytest.mark.parametrize("name", SHORT)
def test_bits_and_neighbours_are_those_of_the_bit_patterns(name):
    numbers = patterns(TYPES[name])
    values = [-math.inf, *np.unique(numbers[np.isfinite(numbers)]).tolist(), math.inf]
    for word in range(0, len(numbers), max(1, len(numbers) // 64 - 1)):
        value = float(numbers[word])
        sign, exponent, mantissa = precision.bits(value, name)
        assert (len(exponent), len(mantissa)) == (FORMATS[name].exponent_bits, FORMATS[name].mantissa_bits)
        assert math.isnan(value) or sign + exponent + mantissa == f"{word:0{8 * TYPES[name].itemsize}b}"
        if math.isfinite(value):
            at = values.index(value)
            assert precision.neighbours(value, name) == (values[at - 1], values[at + 1])


@pytest.mark.parametrize("settings", [(2.0**10, 1.0), (2.0**3, 4.0, 5)])
def test_with_powers_of_two_scaled_updates_have_the_bits_of_plain_ones(settings):
    optimizer, params = optax.adamw(0.01), jnp.ones(50)
    scaled = optax.chain(precision.dynamic_loss_scale(optimizer, *settings))
    state, scaled_state, scales = optimizer.init(params), scaled.init(params), set()
    for gradient in np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32):
        scale = precision.scale_of(scaled_state)
        plain, state = optimizer.update(gradient, state, params)
        updates, scaled_state = scaled.update(scale * gradient, scaled_state, params)
        assert same(updates, plain).all()
        scales.add(float(scale))
    assert len(scales) == (4 if len(settings) == 3 else 1)


def test_steps_that_overflow_are_skipped_and_the_scale_recovers():
    optimizer = precision.dynamic_loss_scale(optax.sgd(1.0, 0.5), initial=8.0, factor=2.0, period=3)
    params = {"w": jnp.float32(0), "v": jnp.zeros(2)}
    state, scales, expected, momentum = optimizer.init(params), [], 0.0, 0.0
    for bad in (None, np.nan, np.inf, None, None, None, -np.inf, None, None, None, None, None, None):
        gradient = {"w": state.scale if bad is None else jnp.float32(bad), "v": jnp.full(2, state.scale)}
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        scales.append(float(state.scale))
        if bad is None:  # weights and momentum are as if the bad steps had never been
            momentum = 1 + 0.5 * momentum
            expected -= momentum
        assert same(params["w"], expected) and same(params["v"], [expected] * 2).all()
    assert scales == [8, 4, 2, 2, 2, 4, 2, 2, 2, 4, 4, 4, 8]


def test_the_scale_stays_a_number_whatever_happens():
    optimizer, params = precision.dynamic_loss_scale(optax.sgd(1.0), 1.0, 2.0**20, 1), jnp.ones(1)
    for value, limit in ((0.0, 2.0**126), (np.nan, 2.0**-126)):
        state = optimizer.init(params)
        for _ in range(20):
            _, state = optimizer.update(jnp.full(1, value), state, params)
        assert float(state.scale) == limit


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: quantize(1.0, Fixed(0, 8)), "integer_bits"),
        (lambda: quantize(1.0, Fixed(8, -1)), "fraction_bits"),
        (lambda: quantize(1.0, Fixed(16, 10)), r"integer_bits \+ fraction_bits"),
        (lambda: quantize(np.arange(3), "float16"), "convert with"),
        (lambda: quantize(1.0, "float15"), "Did you mean 'float16'"),
        (lambda: quantize(1.0, "float16", "up"), "Unknown rounding 'up'"),
        (lambda: quantize(1.0, "float16", "stochastic"), "pass key="),
        (lambda: precision.scale_of(optax.sgd(0.1).init(jnp.ones(2))), "wrap the optimizer"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), 1e39), "initial must be from"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), factor=0.5), "factor"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), period=0), "period"),
    ],
)
def test_what_cannot_work_is_refused_in_plain_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def scale_by_branches(scale, good_steps, finite, period=2000):
    good_steps = good_steps + 1 if finite else 0
    scale = scale * (1.0 if finite else 0.5)
    return (2.0 * scale, 0) if good_steps >= period else [scale, good_steps]


SIZE = "(1 + M) * 2.0 ** (E - bias) if E > 0 else M * 2.0 ** (1 - bias)"
RIGHT = [
    (exercises.decode, changed(exercises.decode, SIZE, "np.ldexp(M + (E > 0), max(E, 1) - bias)")),
    (exercises.dynamic_scale, scale_by_branches),
    (exercises.dynamic_scale, lambda *given: np.array(scale_by_branches(*given))),
    (exercises.update, lambda w, bits: abs(w) / np.frexp(abs(w))[0] * 2.0 ** (-2 - bits)),
]
SPOILT = [
    (exercises.decode, "M * 2.0 ** (1 - bias)", "M * 2.0 ** (0 - bias)"),
    (exercises.decode, "if E > 0 else M * 2.0 ** (1 - bias)", ""),
    (exercises.decode, '-size if sign == "1" else size', "size"),
    (exercises.dynamic_scale, "return scale / 2, 0", "return scale / 2, good_steps"),
    (exercises.dynamic_scale, "good_steps + 1 == period", "good_steps + 1 > period"),
    (exercises.dynamic_scale, "return scale * 2, 0", "return scale * 2, good_steps + 1"),
    (exercises.dynamic_scale, "== period", "== 2000"),
    (exercises.update, "abs(weight)", "1.0"),
    (exercises.update, " / 2", ""),
    (exercises.update, "np.floor(", "np.round("),
]
NAIVE = [(exercise, changed(exercise, line, instead)) for exercise, line, instead in SPOILT]


@pytest.mark.parametrize(("exercise", "answer"), RIGHT + NAIVE)
def test_what_is_right_is_accepted_however_it_is_written_and_what_is_naive_is_refused(exercise, answer):
    right, line = exercise.judge(answer)
    assert right == ((exercise, answer) in RIGHT) and "raised" not in line, line


def test_a_float32_worker_trains_as_plain_training_does():
    task, examples = experiment.SIGNALS, experiment._examples("mnist1d_fresh", "test")
    rows = jax.random.randint(KEY, (20, task.batch_size), 0, len(examples.x_train))
    x, y = jnp.asarray(examples.x_train), jnp.asarray(examples.y_train)
    variant, optimizer = experiment.Variant(num_workers=64), optax.sgd(0.1, 0.9)
    plain = task.model.init(KEY)
    state, memory = (plain, experiment.optimizer_of("signals", variant).init(plain)), optimizer.init(plain)
    step = jax.jit(experiment.training_step("signals", variant))

    @jax.jit
    @jax.grad
    def gradient(params, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(task.model.apply(params, x), y).mean()

    for batch in rows:
        state, _ = step(state, (batch, KEY), jnp.float32(0.1), x, y)
        updates, memory = optimizer.update(gradient(plain, x[batch], y[batch]), memory)
        plain = optax.apply_updates(plain, updates)
    np.testing.assert_allclose(ravel_pytree(state[0])[0], ravel_pytree(plain)[0], atol=1e-5)


def lesson(*identities: str) -> Cells:
    cells = Cells("05_precision")
    parts = "setup", "format", "numbers", "data", "step", "custom", "forward", *identities
    cells.run(*(f"precision-{name}" for name in parts))
    return cells


@suggested_by("05_precision")
def test_the_smallest_number_of_a_format_decides_whether_it_learns_and_a_scale_that_starts_low_climbs():
    cells = lesson("train-scaled")
    numbers, train = cells["Format"](2.0**-3, 2.0**-20, 2.0**15), cells["train_scaled"]
    assert train(2.0**-10, numbers)[0] < 0.5 < train(2.0**-10, numbers._replace(smallest=2.0**-40))[0]
    cells.changes = {"initial=2.0**36": "initial=1.0"}
    cells.run("precision-train-dynamic")
    _, multipliers = cells["dynamic"]["float16"]
    assert multipliers[0] == 2.0**-10 and (multipliers[50::50] == 2.0 * multipliers[:-50:50]).all()


@suggested_by("05_precision")
def test_weights_with_one_mantissa_bit_more_train():
    cells = lesson("signals-data", "train-stored")
    formats = cells["Formats"](cells["FORMATS"]["float8_e4m3fn"], cells["wide"], cells["wide"])
    for random in (0.0, 1.0):
        accuracy, lost = cells["train_stored"](formats, 0.1, 0, random, False)
        assert accuracy > 25 and lost > 10


@suggested_by("05_precision_further")
def test_a_variant_of_ones_own_trains(monkeypatch):
    mine = experiment.Variant(weights="float8_e4m3fn", rounding="stochastic")
    monkeypatch.setitem(experiment.VARIANTS, "mine", ("signals", mine))
    assert experiment.train_variant("mine", 0.1, seed=0, judged_on="test")["accuracy"] > 35


def further(old: str, new: str, *identities: str) -> Cells:
    cells = Cells("further/05_precision_further", {old: new})
    cells.run(*(f"precision-further-{name}" for name in ("setup", *identities)))
    return cells


@suggested_by("05_precision_further")
def test_eight_bits_in_flexpoint_cost_accuracy_and_raise_the_exponents():
    parts = "half-forward", "data", "hold-code", "flex-step", "flex-update", "flex-networks"
    cells, found = further("(300, 100)", "(300, 16)", *parts), {}
    for cells["MANTISSA_BITS"] in (16, 8):
        cells.changes = {}
        cells.run("precision-further-flex-networks")
        _, exponents, accuracy = cells["train"](cells["to_flex"], jnp.arange(2), 300, 1.0)
        found[cells["MANTISSA_BITS"]] = float(exponents[:, -1].mean()), float(accuracy.mean())
    assert found[8][0] > found[16][0] + 6 and found[8][1] < found[16][1] + 2


@suggested_by("05_precision_further")
def test_chunks_near_the_root_of_the_length_are_best():
    errors = {}
    for size in (8, 64, 512):
        cells = further("position % 64 == 63", f"position % {size} == {size - 1}", "add-up")
        total = cells["running_totals"](np.full(2000, 0.1, np.float32), "float16")["chunks"][-1]
        errors[size] = abs(float(total) - 200)
    assert errors[64] < min(errors[8], errors[512])
