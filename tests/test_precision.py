"""Rounding against ml_dtypes over all bit patterns, the laws of all formats, training in few bits, the exercises."""

# ruff: noqa: A001, A002 - as in dlscale/precision

from __future__ import annotations

import collections
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from cells import Cells
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from dlscale import precision
from dlscale.lab import models
from dlscale.precision import FORMATS, Fixed, Float, exercises, experiment, quantize

KEY = jax.random.key(0)
THEIRS = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in FORMATS if name != "tensorfloat32"}
NARROW = [name for name, dtype in THEIRS.items() if dtype.itemsize == 1]
SIXTEEN = ["float16", "bfloat16"]

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast:RuntimeWarning")


@functools.cache
def patterns(name: str) -> np.ndarray:
    """All numbers of a format of up to 16 bits, as float32, in the order of their bit patterns."""
    words = np.arange(2 ** FORMATS[name].bits)
    return words.astype(f"uint{8 * THEIRS[name].itemsize}").view(THEIRS[name]).astype(np.float32)


def same(ours, theirs) -> np.ndarray:
    """Where two arrays hold the same number; 0 and -0 are not."""
    ours, theirs = np.asarray(ours, np.float32), np.asarray(theirs, np.float32)
    return (ours.view(np.int32) == theirs.view(np.int32)) | (np.isnan(ours) & np.isnan(theirs))


def assert_rounds_as(name: str, x: np.ndarray) -> None:
    ours = np.asarray(quantize(x, name))
    if FORMATS[name].specials == "none":  # what becomes of NaN is not standardised: for ml_dtypes ±0 by chance
        x, ours = x[~np.isnan(x)], ours[~np.isnan(x)]
    theirs = x.astype(THEIRS[name]).astype(np.float32)
    wrong = np.flatnonzero(~same(ours, theirs))
    assert not len(wrong), [(float(x[i]), float(ours[i]), float(theirs[i])) for i in wrong[:5]]


def random_floats(count: int = 1_000_000) -> np.ndarray:
    """Float32 numbers of all magnitudes: a random pattern of bits each, so also infinities, NaN and subnormals."""
    return np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


# Formats


@pytest.mark.parametrize("name", THEIRS)
def test_named_formats_have_the_properties_of_ml_dtypes(name):
    ours, theirs = FORMATS[name], ml_dtypes.finfo(THEIRS[name])
    for ours_is, theirs_is in {
        "max": "max", "smallest_normal": "smallest_normal", "smallest_subnormal": "smallest_subnormal", "epsilon": "eps"
    }.items():  # fmt: skip
        assert getattr(ours, ours_is) == float(getattr(theirs, theirs_is)), ours_is
    assert ours.bits == theirs.bits


# Rounding to nearest


@pytest.mark.parametrize("name", [*NARROW, *SIXTEEN])
@pytest.mark.parametrize("source", SIXTEEN)
def test_all_65536_patterns_of_16_bits_round_as_in_ml_dtypes(source, name):
    assert_rounds_as(name, patterns(source))


@pytest.mark.parametrize("name", [*NARROW, *SIXTEEN])
def test_all_numbers_of_a_format_stay_what_they_are(name):
    x = np.resize(patterns(name), 2**16)  # one length for all formats: nothing is compiled anew
    for rounding in precision.ROUNDINGS:
        assert same(quantize(x, name, rounding, KEY), x).all()


@pytest.mark.parametrize("name", [*NARROW, *SIXTEEN])
def test_all_ties_and_their_neighbours_round_as_in_ml_dtypes(name):
    """Also the tie between the largest number and what would come after it, on either side of which it overflows."""
    numbers = np.unique(np.abs(patterns(name)[np.isfinite(patterns(name))])).astype(float)
    numbers = np.append(numbers, 2 * numbers[-1] - numbers[-2])  # float64 holds what float32 does not
    with np.errstate(over="ignore"):
        ties = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    near = np.concatenate([ties, np.nextafter(ties, 0), np.nextafter(ties, np.inf)])
    assert_rounds_as(name, np.resize(np.concatenate([near, -near]), 2**18))


@pytest.mark.parametrize("name", THEIRS)
def test_a_million_random_floats_round_as_in_ml_dtypes(name):
    assert_rounds_as(name, random_floats())


def test_subnormal_numbers_of_float32_are_kept():
    x = np.concatenate([np.arange(0, 2**23, 997), [1, 2, 2**23 - 1]]).astype(np.int32).view(np.float32)
    assert same(quantize(x, "float32"), x).all()
    assert same(quantize(-x, "float32"), -x).all()
    assert_rounds_as("bfloat16", x)
    assert same(quantize(-x, "float16"), np.full(len(x), -0.0)).all()


def test_what_lies_beyond_the_largest_number():
    x = np.array([464, 464.1, -465, np.inf, 1e30], np.float32)  # float8_e4m3fn ends at 448, and 480 would be its NaN
    np.testing.assert_array_equal(quantize(x, "float8_e4m3fn"), [448, np.nan, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(quantize(x, Float(4, 3, "none")), [448, 480, -480, 480, 480])
    np.testing.assert_array_equal(quantize(x, Float(4, 3)), np.array([1, 1, -1, 1, 1]) * np.inf)
    np.testing.assert_array_equal(quantize(x, "float8_e4m3fn", "toward_zero"), [448, 448, -448, np.nan, 448])
    np.testing.assert_array_equal(quantize(x, Float(4, 3), "toward_zero"), [240, 240, -240, np.inf, 240])
    assert np.isnan(quantize(np.float32(np.nan), "float16")) and quantize(np.float32(np.nan), "float4_e2m1fn") == 0


# Any format: an independent computation in float64, and laws


def reference(x: np.ndarray, format: Float, round_to=np.rint) -> np.ndarray:
    """Rounding in float64, whose range and precision exceed float32's: no subnormals, no double rounding."""
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        step = np.exp2(np.maximum(np.frexp(x)[1] - 1.0, 1 - format.bias) - format.mantissa_bits)
        rounded = np.copysign(np.where(np.isfinite(x), round_to(x / step) * step, x), x)
    beyond = {"ieee": np.inf, "nan": np.nan, "none": format.max}[format.specials]
    if round_to is np.trunc:
        beyond = np.where(np.isinf(x), beyond, format.max)
    rounded = np.where(np.abs(rounded) > format.max, np.copysign(beyond, x), rounded)
    return np.where(np.isnan(x), 0.0 if format.specials == "none" else np.nan, rounded)


def make_float(exponent_bits: int, mantissa_bits: int, specials: str) -> Float:
    return Float(exponent_bits, mantissa_bits, "ieee" if exponent_bits == 8 else specials)


floats = st.builds(make_float, st.integers(2, 8), st.integers(1, 23), st.sampled_from(["ieee", "nan", "none"]))


@given(floats)
@settings(max_examples=60)
def test_any_format_rounds_as_an_independent_computation_does(format):
    x = random_floats(20_000)
    scale = 2.0 ** np.random.default_rng(1).integers(-3, 3, 20_000)  # as many close to both ends of its range
    with np.errstate(over="ignore", invalid="ignore"):
        ends = (
            np.concatenate([scale * format.max, 8 * scale * format.smallest_subnormal]) * random_floats(40_000) / 2e38
        )
        x = np.concatenate([x, ends.astype(np.float32)])
    x = x[(format.specials != "none") | ~np.isnan(x)]
    assert np.array_equal(quantize(x, format), reference(x, format), equal_nan=True)
    assert np.array_equal(quantize(x, format, "toward_zero"), reference(x, format, np.trunc), equal_nan=True)
    assert np.array_equal(np.signbit(quantize(x, format))[~np.isnan(x)], np.signbit(x)[~np.isnan(x)])


fixed = st.tuples(st.integers(1, 12), st.integers(0, 13)).filter(lambda b: sum(b) > 1).map(lambda b: Fixed(*b))
any_format = floats | fixed
numbers = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=30)


def padded(xs: list[float]) -> np.ndarray:
    """One length for all examples: nothing is compiled anew."""
    return np.resize(np.array(xs, np.float32), 30)


@given(any_format, numbers, st.sampled_from(["nearest", "toward_zero"]))
def test_rounding_twice_changes_nothing_and_keeps_the_order(format, xs, rounding):
    x = np.sort(padded(xs))
    once = quantize(x, format, rounding)
    assert same(quantize(once, format, rounding), once).all()
    finite = np.asarray(once)[~np.isnan(once)]
    assert (np.diff(finite[np.isfinite(finite)]) >= 0).all()


def around(x: float, format: Float | Fixed) -> tuple[float, float]:
    """The numbers of a format before and after x, which is none of them."""
    if isinstance(format, Fixed):
        step = 2.0**-format.fraction_bits
    else:
        step = format.epsilon * max(2.0 ** (math.frexp(x)[1] - 1), format.smallest_normal)
    return math.floor(x / step) * step, math.ceil(x / step) * step


def largest(format: Float | Fixed) -> float:
    return format.max if isinstance(format, Float) else (2 ** (sum(format) - 1) - 1) / 2**format.fraction_bits


@given(any_format, numbers)
def test_the_result_is_the_nearer_one_of_the_two_neighbours(format, xs):
    x = padded(xs)
    for value, rounded in zip(x.tolist(), np.asarray(quantize(x, format)).tolist(), strict=True):
        if abs(value) <= largest(format):
            assert rounded in around(value, format)
            assert abs(rounded - value) == min(abs(number - value) for number in around(value, format))


# Stochastic rounding


def deviates(values: np.ndarray, low: float, high: float, x: float) -> float:
    """How many standard deviations of a binomial the number of `high` among values is off its mean."""
    chance = (x - low) / (high - low)
    assert np.isin(values, [low, high]).all()
    spread = math.sqrt(len(values) * chance * (1 - chance))
    return abs((values == high).sum() - len(values) * chance) / spread


@pytest.mark.parametrize(
    ("format", "x"),
    [
        (Float(5, 10), -0.1),
        (Float(5, 10), 3.3e-6),  # among the subnormal numbers
        (Float(5, 10), 2e-8),  # between 0 and the smallest of them
        (Float(8, 7), 1e-39),  # subnormal in float32 too
        (Float(2, 1, "none"), -5.5),
        (Fixed(6, 10), -1e-5),
        (Fixed(2, 14), -1.3),
    ],
)
def test_stochastic_rounding_has_the_mean_it_should(format, x):
    x = np.float32(x)
    values = np.asarray(quantize(np.full(2**16, x), format, "stochastic", KEY), np.float64)
    below, above = around(float(x), format)
    assert deviates(values, below, above, float(x)) < 4.5


def test_stochastic_rounding_near_the_end_of_the_range():
    x = np.full(2**16, 65512, np.float32)  # a quarter of the way from the largest float16 to what would come next
    assert abs(np.isinf(quantize(x, "float16", "stochastic", KEY)).mean() - 0.25) < 0.01
    assert (quantize(x, Fixed(4, 4), "stochastic", KEY) == largest(Fixed(4, 4))).all()


def test_another_key_rounds_otherwise_and_the_same_key_the_same():
    x = jax.random.normal(KEY, (1000,))
    once = quantize(x, "bfloat16", "stochastic", jax.random.key(1))
    assert same(once, quantize(x, "bfloat16", "stochastic", jax.random.key(1))).all()
    assert not same(once, quantize(x, "bfloat16", "stochastic", jax.random.key(2))).all()


# Inside JAX


def test_rounding_inside_compiled_code_and_under_vmap():
    x = random_floats(1000).reshape(10, 100)
    expected = quantize(x, "float16")
    assert same(jax.jit(lambda x: quantize(x, "float16"))(x), expected).all()
    assert same(jax.jit(jax.vmap(lambda x: quantize(x, "float16")))(x), expected).all()
    keys = jax.random.split(KEY, 10)
    rows = jax.jit(jax.vmap(lambda x, key: quantize(x, "float16", "stochastic", key)))(x, keys)
    assert same(rows[3], quantize(x[3], "float16", "stochastic", keys[3])).all()


@pytest.mark.parametrize("format", ["float16", Fixed(4, 4)])
@pytest.mark.parametrize("rounding", precision.ROUNDINGS)
def test_gradients_go_straight_through(format, rounding):
    x = jnp.array([0.1, -3.0, 1e-9, 1e9])
    gradient = jax.grad(lambda x: (jnp.arange(4) * quantize(x, format, rounding, KEY)).sum())(x)
    np.testing.assert_array_equal(gradient, np.arange(4))
    assert jax.jvp(lambda x: quantize(x, format, rounding, KEY), (x,), (2 * x,))[1].tolist() == (2 * x).tolist()


def test_one_program_rounds_to_many_formats():
    x = random_floats(1234)
    quantize(x, "float32"), quantize(x, Fixed(4, 4))
    programs = precision._quantize._cache_size()
    for format in (*FORMATS, Float(6, 9), Fixed(2, 14)):
        quantize(x, format)
    assert precision._quantize._cache_size() == programs


def test_fixed_point_may_be_traced():
    formats = jax.tree.map(lambda *leaves: jnp.array(leaves), *(Fixed(16 - f, f) for f in (14, 10, 8)))
    rounded = jax.jit(jax.vmap(functools.partial(quantize, jnp.float32(0.1))))(formats)
    assert rounded.tolist() == [round(0.1 * 2**f) / 2**f for f in (14, 10, 8)]


@pytest.mark.parametrize("x", [0.1, np.float16(0.1), np.array(0.1), jnp.bfloat16(0.1), np.ones((0, 3), np.float32)])
def test_any_floats_give_float32_of_their_shape(x):
    result = quantize(x, "float8_e5m2")
    assert result.dtype == np.float32 and result.shape == np.shape(x)


# Fixed point


@given(fixed, numbers, st.sampled_from(["nearest", "toward_zero"]))
def test_fixed_point_is_exact_integer_arithmetic(format, xs, rounding):
    scale, x = 2**format.fraction_bits, padded(xs)
    lowest, highest = -(2 ** (sum(format) - 1)), 2 ** (sum(format) - 1) - 1
    expected = []
    for value in x.tolist():
        if math.isinf(value):
            whole = highest if value > 0 else lowest
        else:
            whole = (round if rounding == "nearest" else math.trunc)(Fraction(value) * scale)
        expected.append(min(max(whole, lowest), highest) / scale)
    assert same(quantize(x, format, rounding), np.array(expected) + 0.0).all()


def test_fixed_point_has_no_specials():
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40], np.float32)
    assert same(quantize(x, Fixed(2, 2)), [0, 1.75, -2, 0, 0]).all()


# Flexpoint


def written_out(maxima: list[float], exponent: int, mantissa_bits: int) -> list[int]:
    """Köster et al. 2017, Algorithm 2, in plain Python: the exponents of tensors with these maxima, the first given."""
    history, top = collections.deque(maxlen=16), 2 ** (mantissa_bits - 1) - 1
    exponents = [exponent]
    for maximum in maxima:
        unit = 2.0 ** exponents[-1]
        mantissa = min(round(maximum / unit), top)
        if mantissa >= top:
            history.clear()
            mantissa *= 2
        history.append(mantissa * unit)
        expected = 2 * (max(history) + 3 * np.std(history) + 100 * unit)
        exponents.append(min(max(math.ceil(math.log2(expected)) - mantissa_bits + 1, -31), 0))
    return exponents


@functools.cache
def flexpoint_run(mantissa_bits: int):
    """Compiled: a tensor with each of the given maxima, one after the other; the exponents, and the next one."""

    def step(state, maximum):
        word = Fixed(mantissa_bits + state.exponent, -state.exponent)
        rounded = quantize(jnp.array([maximum, -maximum / 3]), word)
        return precision.autoflex(state, jnp.abs(rounded).max(), mantissa_bits), state.exponent

    def run(maxima):
        state = precision.FlexState(jnp.int32(-12), jnp.full(16, jnp.nan))
        state, exponents = jax.lax.scan(step, state, maxima)
        return jnp.append(exponents, state.exponent)

    return jax.jit(run)


@given(st.lists(st.floats(2.0**-20, 300, width=32), min_size=25, max_size=25), st.sampled_from([8, 12, 16]))
@settings(max_examples=50)
def test_autoflex_predicts_as_the_algorithm_written_out(maxima, mantissa_bits):
    exponents = np.asarray(flexpoint_run(mantissa_bits)(jnp.array(maxima, jnp.float32)))
    # a maximum within float32's error of a power of two may go either way
    assert (exponents != written_out(maxima, -12, mantissa_bits)).sum() <= 1


def test_autoflex_finds_the_range_of_a_tensor_that_grows_and_shrinks():
    units = 2.0 ** np.asarray(flexpoint_run(16)(jnp.array([1.5] * 20 + [1500.0] * 40 + [0.015] * 40)))
    assert 0 < (units[20:60] * 2**15 < 1500).sum() < 5, "overflows"
    assert 0.03 <= units[-1] * 2**15 < 0.5
    assert units[-1] > flexpoint_run(16)(jnp.zeros(40))[-1] == -31


# Tensors in memory


def test_store_rounds_forward_and_backward():
    x = jnp.array([1.01, -0.3, 70000.0])
    y, pull = jax.vjp(lambda x: precision.store(x, "bfloat16", "float8_e5m2"), x)
    assert same(y, quantize(x, "bfloat16")).all()
    assert same(pull(x)[0], quantize(x, "float8_e5m2")).all()


# One number


@pytest.mark.parametrize("name", [*NARROW, "float16", "bfloat16"])
def test_bits_are_the_bit_pattern(name):
    form = FORMATS[name]
    for word in range(0, 2**form.bits, max(1, 2**form.bits // 64 - 1)):
        value = float(patterns(name)[word])
        sign, exponent, mantissa = precision.bits(value, name)
        assert (len(sign), len(exponent), len(mantissa)) == (1, form.exponent_bits, form.mantissa_bits)
        if not math.isnan(value):
            assert sign + exponent + mantissa == f"{word:0{form.bits}b}"
        else:
            assert exponent == "1" * form.exponent_bits and "1" in mantissa


@pytest.mark.parametrize("name", NARROW)
def test_neighbours_are_the_next_numbers(name):
    sorted_values = np.unique(patterns(name)[np.isfinite(patterns(name))]).tolist()
    points = [-math.inf, *sorted_values, math.inf]
    for before, value, after in [*zip(points, points[1:], points[2:], strict=False)][:: 1 + len(points) // 64]:
        assert precision.neighbours(value, name) == (before, after)
    assert precision.neighbours(sorted_values[0], name) == (-math.inf, sorted_values[1])
    assert precision.neighbours(sorted_values[-1], name) == (sorted_values[-2], math.inf)
    if FORMATS[name].specials == "ieee":
        assert precision.neighbours(math.inf, name) == (sorted_values[-1], math.inf)
        assert all(map(math.isnan, precision.neighbours(math.nan, name)))


# Loss scaling

NET = models.mlp((4, 6, 3))
X, Y = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32), np.arange(20) % 3


@functools.cache
def start(model: models.Model) -> models.Params:
    return jax.jit(model.init)(KEY)


@functools.cache
def loss_of(model: models.Model):
    def loss(params):
        logits = model.apply(params, X).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, Y).mean()

    return jax.jit(loss)


@functools.cache
def gradient_of(model: models.Model, loss_factor: float):
    """Apart from the update: fused with it, XLA may contract a product and a sum, which rounds once and not twice."""
    as_tree = ravel_pytree(start(model))[1]
    return jax.jit(jax.grad(lambda params, scale: scale * loss_factor * loss_of(model)(as_tree(params))))


def descend(optimizer, steps: int = 20, model: models.Model = NET, loss_factor: float = 1.0):
    """Train, multiplying the loss by the present scale if there is one; also the scales before each step."""

    params, as_tree = ravel_pytree(start(model))  # one array: few programs
    gradient = gradient_of(model, loss_factor)
    state, scales = optimizer.init(params), []
    for _ in range(steps):
        scale = precision.scale_of(state) if isinstance(state, precision.LossScaleState) else jnp.float32(1)
        updates, state = optimizer.update(gradient(params, scale), state, params)
        params = optax.apply_updates(params, updates)
        scales.append(float(scale))
    return as_tree(params), scales


@pytest.mark.parametrize("make", [functools.partial(optax.sgd, 0.1, 0.9), functools.partial(optax.adamw, 0.01)])
@pytest.mark.parametrize(
    "scaled",
    [lambda o: precision.dynamic_loss_scale(o, 2.0**10, 1.0), lambda o: precision.dynamic_loss_scale(o, 2.0**3, 4, 5)],
)
def test_with_powers_of_two_scaled_training_has_the_bits_of_plain_training(make, scaled):
    plain, _ = descend(make())
    params, scales = descend(scaled(make()))
    assert all(same(a, b).all() for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True))
    assert scales == sorted(scales) and len(set(scales)) in (1, 4), "no step is skipped"


def test_steps_that_overflow_are_skipped_and_the_scale_recovers():
    optimizer = precision.dynamic_loss_scale(optax.sgd(1.0, 0.5), initial=8.0, factor=2.0, period=3)
    params = {"w": jnp.float32(0), "v": jnp.zeros(2)}
    state, seen = optimizer.init(params), []
    for bad in (None, np.nan, np.inf, None, None, None, -np.inf, None, None, None, None, None, None):
        gradient = {"w": 1.0 if bad is None else bad, "v": jnp.ones(2)}
        scale = precision.scale_of(state)
        gradient = jax.tree.map(lambda g, scale=scale: jnp.float32(g) * scale, gradient)
        updates, after = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        if bad is not None:
            assert not any(u.any() for u in jax.tree.leaves(updates))
            assert all(map(np.array_equal, jax.tree.leaves(after.inner), jax.tree.leaves(state.inner)))
        state = after
        seen.append(float(state.scale))
    assert seen == [8, 4, 2, 2, 2, 4, 2, 2, 2, 4, 4, 4, 8]
    momentum, expected = 0.0, 0.0
    for _ in range(10):  # as if the bad steps had never been
        momentum = 1 + 0.5 * momentum
        expected -= momentum
    assert same(params["w"], expected) and same(params["v"], [expected] * 2).all()


def test_the_scale_stays_a_number_whatever_happens():
    optimizer, params = precision.dynamic_loss_scale(optax.sgd(1.0), 1.0, 2.0**20, 1), jnp.ones(1)
    for value, limit in ((0.0, 2.0**126), (np.nan, 2.0**-126)):
        state = optimizer.init(params)
        for _ in range(20):
            _, state = optimizer.update(jnp.full(1, value), state, params)
        assert float(state.scale) == limit


def test_the_scale_is_found_inside_other_states():
    optimizer = optax.chain(optax.clip(1.0), precision.dynamic_loss_scale(optax.sgd(0.1), 32.0))
    assert precision.scale_of(optimizer.init(jnp.ones(2))) == 32
    with pytest.raises(ValueError, match="no loss scale: wrap the optimizer"):
        precision.scale_of(optax.sgd(0.1).init(jnp.ones(2)))


# What cannot work


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Float(9, 3), "Wider formats than float32"),
        (lambda: Float(5, 24), "mantissa_bits must be a whole number from 1 to 23"),
        (lambda: Float(5, 2.5), "mantissa_bits must be"),
        (lambda: Float(5, 2, "fn"), "Unknown specials 'fn'"),
        (lambda: Float(8, 3, "nan"), "reach beyond float32"),
        (lambda: quantize(1.0, Fixed(0, 8)), "integer_bits must be a whole number of at least 1"),
        (lambda: quantize(1.0, Fixed(8, -1)), "fraction_bits must be a whole number of at least 0"),
        (lambda: quantize(1.0, Fixed(16, 10)), r"integer_bits \+ fraction_bits must be a whole number from 2 to 25"),
        (lambda: quantize(np.arange(3), "float16"), "quantize rounds floats, not int"),
        (lambda: quantize(True, "float16"), "quantize rounds floats, not bool"),
        (lambda: quantize(1.0, "float15"), "Did you mean 'float16'"),
        (lambda: quantize(1.0, np.float16), "format must be a Float, a Fixed or the name"),
        (lambda: quantize(1.0, "float16", "up"), "Unknown rounding 'up'"),
        (lambda: quantize(1.0, "float16", "stochastic"), "pass key="),
        (lambda: precision.bits(1.0, "tensorfloat32"), "Unknown format 'tensorfloat32'"),
        (lambda: precision.neighbours(1.0, "float17"), "Unknown format"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), 0.0), "initial must be from"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), -2.0), "initial must be a finite number"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), 1e39), "initial must be from"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), 1e-46), "initial must be from"),
        (
            lambda: precision.dynamic_loss_scale(optax.sgd(0.1), factor=0.5),
            "factor must be a finite number of at l",
        ),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), period=0), "period must be a whole number of at least 1"),
    ],
)
def test_what_cannot_work_is_refused_in_plain_words(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# The exercises: what is right is accepted however it is written, what is naive is refused


def decode_by_steps(sign, exponent, mantissa):
    digits = [int(bit) / 2 ** (k + 1) for k, bit in enumerate(mantissa)]
    power = max(int(exponent, 2), 1) - (2 ** (len(exponent) - 1) - 1)
    return math.copysign(math.ldexp(sum(digits) + ("1" in exponent), power), 0.5 - int(sign))


def flex_by_hand(maxima, unit, mantissa_bits):
    expected = 2 * max(maxima) + 6 * np.std(maxima) + 200 * unit
    return max(-31, min(0, math.ceil(math.log2(expected)) + 1 - mantissa_bits))


def spoilt(exercise, line: str, instead: str):
    """The reference answer with one line spoilt."""
    assert line in exercise.code
    namespace = {"np": np}
    exec(exercise.code.replace(line, instead), namespace)
    return namespace[exercise.answer]


def scale_by_branches(scale, good_steps, finite, period=2000):
    good_steps = good_steps + 1 if finite else 0
    scale = scale * (1.0 if finite else 0.5)
    return (2.0 * scale, 0) if good_steps >= period else [scale, good_steps]


def at_random_by_noise(x, fraction_bits, rng):
    return np.floor(np.ldexp(x, fraction_bits) + rng.random(x.shape)) * 2.0**-fraction_bits


def at_random_by_shift(x, fraction_bits, rng):
    draws = [rng.uniform(-0.5, 0.5) for _ in range(x.size)]
    return np.round(x * 2**fraction_bits + np.reshape(draws, x.shape)) / 2**fraction_bits


def in_chunks(size: int):
    def adding_order(count):
        heads = range(0, count, size)
        within = [(head, k) for head in heads for k in range(head + 1, min(head + size, count))]
        return np.array(within + [(0, head) for head in heads[1:]])

    return adding_order


@pytest.mark.parametrize(
    ("exercise", "answer"),
    [
        (exercises.decode, decode_by_steps),
        (exercises.dynamic_scale, scale_by_branches),
        (exercises.update, lambda w, bits: abs(w) / np.frexp(abs(w))[0] * 2.0 ** (-2 - bits)),
        (exercises.random, at_random_by_noise),
        (exercises.random, at_random_by_shift),
        (exercises.flex, flex_by_hand),
        (exercises.summing, in_chunks(50)),
        (exercises.summing, in_chunks(32)),
    ],
)  # fmt: skip
def test_an_answer_in_other_words_is_right(exercise, answer):
    right, line = exercise.judge(answer)
    assert right, line


SPOILT = [
    (exercises.decode, "M * 2.0 ** (1 - bias)", "M * 2.0 ** (0 - bias)"),
    (exercises.decode, "if E > 0 else M * 2.0 ** (1 - bias)", ""),
    (exercises.decode, '-size if sign == "1" else size', "size"),
    (exercises.dynamic_scale, "return scale / 2, 0", "return scale / 2, good_steps"),
    (exercises.dynamic_scale, "good_steps + 1 == period", "good_steps + 1 > period"),
    (exercises.dynamic_scale, "return scale * 2, 0", "return scale * 2, good_steps + 1"),
    (exercises.update, "abs(weight)", "1.0"),
    (exercises.update, " / 2", ""),
    (exercises.random, "rng.random(x.shape) < scaled - lower", "scaled - lower >= 0.5"),
    (exercises.random, "rng.random(x.shape) < scaled - lower", "(rng.random(x.shape) < 0.5) * (scaled > lower)"),
    (exercises.random, "rng.random(x.shape) < scaled - lower", "rng.random(x.shape) < 1 - scaled + lower"),
    (exercises.random, "rng.random(x.shape) <", "rng.random() <"),
    (exercises.random, "rng.random(x.shape) <", "rng.random(x.shape[1]) <"),
    (exercises.random, "lower = np.floor(scaled)", "lower = np.trunc(scaled)"),
    (exercises.flex, "+ 100 * unit", ""),
    (exercises.flex, "3 * maxima.std()", "0"),
    (exercises.flex, "maxima.std()", "maxima.std(ddof=1)"),
    (exercises.flex, "np.clip(np.ceil(np.log2(expected)) + 1 - mantissa_bits, -31, 0)", "np.ceil(np.log2(expected))"),
]


@pytest.mark.parametrize(("exercise", "line", "instead"), SPOILT)
def test_a_naive_answer_is_refused(exercise, line, instead):
    assert not exercise.judge(spoilt(exercise, line, instead))[0]


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (lambda count: [(0, k) for k in range(1, count)], "is not"),
        (lambda count: in_chunks(16)(count)[:-1], "have not come to place 0"),
        (lambda count: [(0, 0)] * count, "must differ"),
        (lambda count: [(0, 1)] * (3 * count), "at most two"),
    ],
)
def test_a_naive_order_of_adding_is_refused(order, why):
    right, line = exercises.summing.judge(order)
    assert not right and why in line


# The recorded experiment


def steps_of(variant: experiment.Variant, count: int):
    """The weights, as one array, and the loss scale after each step of an experiment on the signals."""
    task, examples = experiment.SIGNALS, experiment._examples("signals", "test")
    params = jax.jit(task.model.init)(KEY)
    state = params, task.optimizer.init(params), jnp.float32(variant.loss_scale), jnp.int32(0)
    rows = jax.random.randint(KEY, (count, task.batch_size), 0, len(examples.x_train))
    given = np.float32(0.1), jnp.asarray(examples.x_train), jnp.asarray(examples.y_train)
    step = experiment.training_step("signals", variant)

    def one(state, inputs):
        state, _ = step(state, inputs, *given)
        return state, (ravel_pytree(state[0])[0], state[2])

    return params, rows, given, jax.jit(lambda: jax.lax.scan(one, state, (rows, jax.random.split(KEY, count)))[1])()


def by_library(optimizer, variant: experiment.Variant, params, rows, given):
    """The same steps, with an optimizer of optax or of the library."""
    learning_rate, x, y = given

    def one(state, rows):
        params, memory = state
        scale = precision.scale_of(memory) if isinstance(memory, precision.LossScaleState) else jnp.float32(1)

        def loss(params):
            logits = experiment.logits(experiment.SIGNALS.model, params, x[rows], variant)
            return scale * optax.softmax_cross_entropy_with_integer_labels(logits, y[rows]).mean()

        direction, memory = optimizer.update(jax.grad(loss)(params), memory, params)
        params = jax.tree.map(lambda w, d: w - learning_rate * d, params, direction)
        return (params, memory), (ravel_pytree(params)[0], scale)

    return jax.jit(lambda: jax.lax.scan(one, (params, optimizer.init(params)), rows)[1])()


def test_in_float32_a_variant_trains_as_plain_training_does():
    *setting, (weights, _) = steps_of(experiment.Variant(), 20)
    plain, _ = by_library(optax.trace(0.9), experiment.Variant(), *setting)
    np.testing.assert_allclose(weights, plain, atol=1e-5)
    x = setting[2][1][:8]
    expected = experiment.SIGNALS.model.apply(setting[0], x)
    assert same(experiment.logits(experiment.SIGNALS.model, setting[0], x, experiment.Variant()), expected).all()


def test_the_scale_of_a_variant_adapts_as_the_librarys():
    variant = experiment.PRODUCTS["float16"]._replace(loss_scale=2.0**24)
    *setting, (weights, scales) = steps_of(variant, 120)
    library = precision.dynamic_loss_scale(optax.trace(0.9), 2.0**24, 2.0, 30)
    expected, before = by_library(library, variant, *setting)
    assert scales[:-1].tolist() == before[1:].tolist()
    assert scales[0] < 2.0**24 and (jnp.diff(scales) > 0).any(), "it falls, and rises again"
    np.testing.assert_allclose(weights[:20], expected[:20], atol=1e-3)


def test_stored_weights_are_numbers_of_their_format():
    *_, (weights, _) = steps_of(experiment.Variant(weights="float8_e5m2", rounding="stochastic"), 5)
    assert same(weights, quantize(weights, "float8_e5m2")).all()
    assert not same(weights[0], weights[-1]).all()


# What the notebooks suggest


def lesson(changes: dict[str, str], *identities: str) -> Cells:
    cells = Cells("05_precision", changes | {"steps=1000, batch_size=32": "steps=250, batch_size=32"})
    cells.run(*(f"precision-{name}" for name in ("setup", "format", "numbers", "data", "step", "custom", "forward")))
    cells.changes = {}
    cells.run(*(f"precision-{name}" for name in identities))
    return cells


@suggested_by("05_precision")
def test_the_smallest_number_of_a_format_decides_whether_it_learns():
    cells = lesson({}, "train-scaled")
    numbers, train = cells["Format"](2.0**-3, 2.0**-20, 2.0**15), cells["train_scaled"]
    assert train(2.0**-10, numbers, seed=0)[0] < 0.5 < train(2.0**-10, numbers._replace(smallest=2.0**-40), seed=0)[0]


@suggested_by("05_precision")
def test_a_scale_that_starts_too_low_climbs():
    cells = Cells("05_precision", {"initial=2.0**36": "initial=1.0"})
    cells.data |= lesson({}, "train-scaled").data
    cells.run("precision-train-dynamic")
    _, multipliers = cells["dynamic"]["float16"]
    assert multipliers[0] == 2.0**-10 and (multipliers[50::50] == 2.0 * multipliers[:-50:50]).all()


@suggested_by("05_precision")
def test_weights_with_one_mantissa_bit_more_train():
    cells = lesson({}, "signals-data", "train-stored")
    formats = cells["Formats"](cells["FORMATS"]["float8_e4m3fn"], cells["wide"], cells["wide"])
    for random in (0.0, 1.0):
        accuracy, lost = cells["train_stored"](formats, 0.1, 0, random, False)
        assert accuracy > 25 and lost > 10


@suggested_by("05_precision_further")
def test_a_variant_of_ones_own_trains(monkeypatch):
    mine = experiment.Variant(weights="float8_e4m3fn", rounding="stochastic")
    monkeypatch.setitem(experiment.VARIANTS, "mine", ("signals", mine))
    assert experiment.train_variant("mine", 0.1, seed=0, judged_on="test")["accuracy"] > 35


def further(changes: dict[str, str], *identities: str) -> Cells:
    cells = Cells("further/05_precision_further", changes)
    cells.run(*(f"precision-further-{name}" for name in ("setup", *identities)))
    return cells


@suggested_by("05_precision_further")
def test_eight_bits_in_flexpoint_cost_accuracy_and_raise_the_exponents():
    identities = "data", "hold-code", "flex-step", "flex-runs"
    runs = [
        further({"arange(30)": "arange(4)", "MANTISSA_BITS = 16": f"MANTISSA_BITS = {bits}"}, *identities)
        for bits in (16, 8)
    ]
    wide, narrow = (np.mean(run["exponents"][:, -1]) for run in runs)
    assert narrow > wide + 6
    assert runs[1]["flex_accuracy"].mean() < runs[0]["flex_accuracy"].mean() + 2


@suggested_by("05_precision_further")
def test_chunks_near_the_root_of_the_length_are_best():
    errors = {}
    for size in (8, 64, 512):
        cells = further({"position % 64 == 63": f"position % {size} == {size - 1}"}, "add-up")
        total = cells["running_totals"](np.full(8000, 0.1, np.float32), "float16")["chunks"][-1]
        errors[size] = abs(float(total) - 800)
    assert errors[64] < min(errors[8], errors[512])
