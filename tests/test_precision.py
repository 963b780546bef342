"""Rounding against ml_dtypes over all bit patterns, the laws of all formats, and training in few bits."""

# ruff: noqa: A001, A002 - as in dlscale/precision.py

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
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.flatten_util import ravel_pytree

from dlscale import precision
from dlscale.lab import data, models, train
from dlscale.precision import FORMATS, Fixed, Flexpoint, Float, exercises, quantize

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


@pytest.mark.parametrize("name", SIXTEEN)
def test_floats_near_the_overflow_round_as_in_ml_dtypes(name):
    largest = int(np.float32(FORMATS[name].max).view(np.int32))
    x = np.arange(largest - 70_000, min(largest + 70_000, 0x7F800001), dtype=np.int32).view(np.float32)
    assert_rounds_as(name, np.resize(np.concatenate([x, -x]), 2**19))


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


@given(floats, numbers)
def test_rounding_knows_no_sign(format, xs):
    x = padded(xs)
    assert same(quantize(-x, format), -np.asarray(quantize(x, format))).all()


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
        (Float(5, 10), 1.0001),
        (Float(5, 10), -0.1),
        (Float(5, 10), 3.3e-6),  # among the subnormal numbers
        (Float(5, 10), 2e-8),  # between 0 and the smallest of them
        (Float(5, 10), 3e-10),
        (Float(4, 3, "nan"), 0.0137),
        (Float(8, 7), 1.00390625),
        (Float(8, 7), 1e-39),  # subnormal in float32 too
        (Float(3, 23), 0.1),
        (Float(2, 1, "none"), -5.5),
        (Fixed(6, 10), 0.1),
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


@given(st.integers(-31, 0), numbers)
def test_flexpoint_at_an_exponent_is_fixed_point(exponent, xs):
    x, unit = padded(xs), 2.0**exponent
    expected = np.clip(np.rint(x.astype(float) / unit), -(2**15), 2**15 - 1) * unit + 0.0
    assert same(quantize(x, Flexpoint(16, 5).at(exponent)), expected).all()


def autoflex(maxima: list[float], first: float, mantissa_bits: int) -> list[int]:
    """Köster et al. 2017, Algorithm 2, in plain Python: the exponents predicted for tensors with these maxima."""
    history, top = collections.deque([first], maxlen=16), 2 ** (mantissa_bits - 1) - 1

    def predict(room: float) -> int:
        expected = 2 * (max(history) + 3 * np.std(history) + room)
        return min(max(math.ceil(math.log2(expected)) - mantissa_bits + 1, -31), 0) if expected else -31

    exponents = [predict(0)]
    for maximum in maxima:
        unit = 2.0 ** exponents[-1]
        mantissa = min(round(maximum / unit), top)
        if mantissa >= top:
            history.clear()
            mantissa *= 2
        history.append(mantissa * unit)
        exponents.append(predict(100 * unit))
    return exponents


@functools.cache
def flexpoint_run(mantissa_bits: int):
    """Compiled: a tensor with each of the given maxima, one after the other; the last state and all exponents."""
    format = Flexpoint(mantissa_bits, 5)

    def step(state, maximum):
        x = quantize(jnp.array([maximum, -maximum / 3]), format.at(state.exponent))
        return format.update(state, x), state.exponent

    return jax.jit(lambda maxima: jax.lax.scan(step, format.init(1.5), maxima))


@given(st.lists(st.floats(2.0**-20, 300, width=32), min_size=25, max_size=25), st.sampled_from([8, 12, 16]))
@settings(max_examples=50)
def test_autoflex_predicts_as_the_algorithm_written_out(maxima, mantissa_bits):
    end, exponents = flexpoint_run(mantissa_bits)(jnp.array(maxima, jnp.float32))
    expected = np.array(autoflex(maxima, 1.5, mantissa_bits))
    # a maximum within float32's error of a power of two may go either way
    assert (np.append(exponents, end.exponent) != expected).sum() <= 1


def test_autoflex_finds_the_range_of_a_tensor_that_grows_and_shrinks():
    end, exponents = flexpoint_run(16)(jnp.array([1.5] * 20 + [1500.0] * 40 + [0.015] * 40))
    units = 2.0 ** np.asarray(exponents)
    assert 0 < (units[20:60] * 2**15 < 1500).sum() < 5, "overflows"
    assert 0.03 <= 2.0 ** (15 + int(end.exponent)) < 0.5


def test_autoflex_begins_with_a_bit_to_spare():
    format = Flexpoint(16, 5)
    assert [int(format.init(size).exponent) for size in (0.99, 1.0, 1.01, 2.0**14, 1e6)] == [-14, -14, -13, 0, 0]


def test_autoflex_of_a_tensor_of_zeros_takes_the_smallest_unit():
    format = Flexpoint(16, 5)
    state = format.init(0.0)
    for _ in range(3):
        state = format.update(state, quantize(jnp.zeros(2), format.at(state.exponent)))
    assert int(state.exponent) == -31


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


def test_bits_and_neighbours_by_hand():
    assert precision.bits(0.1, "float16") == ("0", "01011", "1001100110")
    assert precision.bits(-65520, "float16") == ("1", "11111", "0000000000")
    assert precision.neighbours(65519, "float16") == (65472, math.inf)
    assert all(map(math.isnan, precision.neighbours(-1e10, "float8_e4m3fn")))


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


def in_half(model: models.Model) -> models.Model:
    """The model with parameters and products in float16."""

    def short(tree):
        return jax.tree.map(lambda a: a.astype(jnp.float16), tree)

    def within(layer):
        return models.Layer(lambda own, x: layer(own, x.astype(jnp.float16)))

    layers = {name: within(layer) for name, layer in model.layers.items()}
    return models.Model(lambda key: short(model.init(key)), layers)


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


def test_gradients_that_float16_loses_come_back_with_a_loss_scale():
    model = in_half(NET)
    tiny, steps = 2.0**-24, 30
    lost, _ = descend(precision.dynamic_loss_scale(optax.sgd(0.5 / tiny), 1.0, 1.0), 3, model, tiny)
    assert all(map(np.array_equal, jax.tree.leaves(lost), jax.tree.leaves(start(model))))
    scaled = precision.dynamic_loss_scale(optax.sgd(0.5 / tiny), initial=2.0**48, period=1000)
    params, scales = descend(scaled, steps, model, tiny)
    assert 1 <= math.log2(scales[0] / scales[-1]) < 10 and scales == sorted(scales, reverse=True)
    assert loss_of(model)(params) < 0.95 * loss_of(model)(start(model))


def test_a_static_scale_needs_no_more_than_another_loss_in_fit():
    digits, model = data.load("digits"), in_half(models.mlp((64, 10)))
    run = train.fit(
        model,
        digits,
        lambda learning_rate, scale: precision.dynamic_loss_scale(optax.sgd(learning_rate), scale, 1.0),
        loss=lambda logits, y: 2.0**10 * train.LOSSES["cross_entropy"](logits.astype(np.float32), y),
        batch_size=32,
        epochs=2,
        learning_rate=0.1,
        scale=2.0**10,
        progress=False,
    )
    assert run.history.test_accuracy[-1] > 0.7


def test_the_scale_is_found_inside_other_states():
    optimizer = optax.chain(optax.clip(1.0), precision.dynamic_loss_scale(optax.sgd(0.1), 32.0))
    assert precision.scale_of(optimizer.init(jnp.ones(2))) == 32
    with pytest.raises(ValueError, match="no loss scale: wrap the optimizer"):
        precision.scale_of(optax.sgd(0.1).init(jnp.ones(2)))


# What cannot work


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Float(-1, 3), "exponent_bits must be a whole number from 2 to 8"),
        (lambda: Float(9, 3), "Wider formats than float32"),
        (lambda: Float(5, 24), "mantissa_bits must be a whole number from 1 to 23"),
        (lambda: Float(5, 0), "mantissa_bits must be"),
        (lambda: Float(5, 2.5), "mantissa_bits must be"),
        (lambda: Float(5, 2, "fn"), "Unknown specials 'fn'"),
        (lambda: Float(8, 3, "nan"), "reach beyond float32"),
        (lambda: quantize(1.0, Fixed(0, 8)), "integer_bits must be a whole number of at least 1"),
        (lambda: quantize(1.0, Fixed(8, -1)), "fraction_bits must be a whole number of at least 0"),
        (lambda: quantize(1.0, Fixed(16, 10)), r"integer_bits \+ fraction_bits must be a whole number from 2 to 25"),
        (lambda: quantize(1.0, Fixed(1, 0)), "from 2 to 25"),
        (lambda: Flexpoint(1, 5), "mantissa_bits must be a whole number from 2 to 25"),
        (lambda: Flexpoint(16, 7), "exponent_bits must be a whole number from 0 to 6"),
        (lambda: quantize(np.arange(3), "float16"), "quantize rounds floats, not int"),
        (lambda: quantize(1, "float16"), "quantize rounds floats, not int"),
        (lambda: quantize(True, "float16"), "quantize rounds floats, not bool"),
        (lambda: quantize(1.0, "float15"), "Did you mean 'float16'"),
        (lambda: quantize(1.0, np.float16), "format must be a Float, a Fixed or the name"),
        (lambda: quantize(1.0, "float16", "up"), "Unknown rounding 'up'"),
        (lambda: quantize(1.0, "float16", "stochastic"), "pass key="),
        (lambda: quantize(1.0, Flexpoint(16, 5)), "format must be a Float, a Fixed or the name"),
        (lambda: precision.bits(1.0, "tensorfloat32"), "Unknown format 'tensorfloat32'"),
        (lambda: precision.neighbours(1.0, "float17"), "Unknown format"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), 0.0), "A loss scale of 0"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), -2.0), "initial must be a finite number"),
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


def scaled_by_counting(w, gradients, rate, scale, period):
    scales, since = [], 0
    for row in gradients:
        scales.append(scale)
        g = (np.float32(scale) * row).astype(np.float16)
        if np.isinf(g).any():
            scale, since = scale * 0.5, 0
            continue
        w = w - rate * (np.float64(g) / scale)
        since += 1
        if since % period == 0:
            scale, since = scale * 2.0, 0
    return np.asarray(w), np.array(scales)


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
        (exercises.scaler, scaled_by_counting),
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
    (exercises.scaler, ".astype(np.float32) / scale", " / np.float16(scale)"),
    (exercises.scaler, "scale, good = scale / 2, 0", "scale = scale / 2"),
    (exercises.scaler, "scale, good = 2 * scale, 0", "scale = 2 * scale"),
    (exercises.scaler, "if np.isfinite(g).all():", "if True:"),
    (exercises.random, "rng.random(x.shape) < chance", "chance >= 0.5"),
    (exercises.random, "rng.random(x.shape) < chance", "(rng.random(x.shape) < 0.5) * (chance > 0)"),
    (exercises.random, "rng.random(x.shape) < chance", "rng.random(x.shape) < 1 - chance"),
    (exercises.random, "rng.random(x.shape) < chance", "rng.random() < chance"),
    (exercises.random, "rng.random(x.shape) < chance", "rng.random(x.shape[1]) < chance"),
    (exercises.random, "lower = np.floor(scaled)", "lower = np.trunc(scaled)"),
    (exercises.flex, "+ 100 * unit", ""),
    (exercises.flex, "3 * maxima.std()", "0"),
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
        (lambda count: [(0, 1)] * (3 * count), "more than two"),
    ],
)
def test_a_naive_order_of_adding_is_refused(order, why):
    right, line = exercises.summing.judge(order)
    assert not right and why in line


# The notebook: what it says of its own rounding, and what it suggests

ROUNDING = ("precision-01", "precision-03", "precision-07", "precision-08")


@functools.cache
def rounding() -> Cells:
    cells = Cells("05_precision")
    cells.run(*ROUNDING)
    return cells


def test_the_rounding_of_the_notebook_is_exact_from_its_bounds_on():
    cells = rounding()
    x = random_floats(200_000)
    for name in cells["FORMATS"]:
        f = FORMATS[name]
        bound = 2.0**-126 / f.epsilon if f.smallest_subnormal < 2.0**-126 else f.smallest_subnormal
        inside = x[(np.abs(x) >= bound) & (np.abs(x) <= f.max)]
        assert np.array_equal(jax.jit(cells["round_to"])(inside, cells["number"](name)), quantize(inside, name)), name
    below = np.float32(1.01 * 2.0**-124)
    assert jax.jit(cells["round_to"])(below, cells["number"]("bfloat16")) != quantize(below, "bfloat16")


def test_the_loss_scale_of_the_notebook_adapts_as_the_librarys():
    cells, rng = Cells("05_precision"), np.random.default_rng(0)
    cells.data |= rounding().data
    cells.run("precision-24")
    gradients = jnp.asarray(rng.normal(size=(300, 4)), jnp.float32).at[rng.integers(0, 300, 20)].set(jnp.inf)
    optimizer = precision.dynamic_loss_scale(optax.sgd(0.1, 0.9), initial=1024.0, period=10)

    def ours(state, g):
        w, m, scale, good = state
        finite = jnp.isfinite(g).all()
        new_m = 0.9 * m + g / scale
        w, m = jnp.where(finite, w - 0.1 * new_m, w), jnp.where(finite, new_m, m)
        return (w, m, *cells["adapt"](scale, good, finite, 10, 2.0)), scale

    def library(state, g):
        w, memory = state
        step, new_memory = optimizer.update(g, memory, w)
        return (optax.apply_updates(w, step), new_memory), precision.scale_of(memory)

    zero = jnp.zeros(4)
    (w_ours, *_), scales_ours = jax.lax.scan(ours, (zero, zero, jnp.float32(1024), jnp.int32(0)), gradients)
    (w_library, _), scales_library = jax.lax.scan(library, (zero, optimizer.init(zero)), gradients)
    assert (scales_ours == scales_library).all() and len(set(scales_ours.tolist())) > 4
    np.testing.assert_allclose(w_ours, w_library, atol=1e-6)


TRAINING = (
    "precision-17", "precision-21", "precision-22", "precision-24", "precision-25", "precision-27",
    "precision-chances", "precision-27-prepare", "precision-28", "precision-28-job", "precision-29",
)  # fmt: skip


@functools.cache
def training() -> Cells:
    """The ordinary ground of the notebook, for one pass over its examples, three runs at once."""
    changes = {"TOGETHER = (100, 101), 10": "TOGETHER = (100, 101), 3", "0.9), 100, 10, [": "0.9), 100, 2, ["}
    cells = Cells("05_precision", changes)
    cells.run(*ROUNDING, "precision-plain-data", "precision-plain-rate", *TRAINING)
    cells["SCALED"] = {"scale": 2.0**10}
    return cells


def test_formats_of_ones_own_train():
    cells = training()
    f = precision.Float(exponent_bits=4, mantissa_bits=7)
    cells["NUMBERS"]["mine"] = cells["Number"](f.epsilon, f.smallest_subnormal, f.max)
    assert cells["run_all"](cells["ordinary"], [dict(cells["SCALED"], rate=0.1, products="mine")])[0].test > 20


def test_weights_in_another_format_can_be_rounded_at_random():
    cells = training()
    how = dict(cells["SCALED"], rate=0.1, weights="float8_e4m3fn", dice=1.0, momentum="float32")
    jobs = [dict(how, seed=seed) for seed in range(200, 203)]
    assert all(run.test > 20 for run in cells["run_all"](cells["ordinary"], jobs))


def test_the_dice_of_the_notebook_have_the_mean_they_should():
    """The same weight at many moments, and many weights at one: a third of a step up is a third of all."""
    cells = training()
    f, chances = cells["NUMBERS"]["float8_e5m2"], cells["chances"]
    for size, moments in ((2**13, [5]), (64, range(2_000_000, 2_000_128))):
        rounded = np.stack([f.fit(jnp.full(size, 1 + 1 / 12), chances(moment, (size,))) for moment in moments])
        assert set(np.unique(rounded)) == {1.0, 1.25}
        assert abs((rounded == 1.25).mean() - 1 / 3) < 0.03


def test_the_other_two_suggestions_change_what_they_name():
    flex = Flexpoint(mantissa_bits=8, exponent_bits=5)
    state = flex.init(1.0)
    state = flex.update(state, quantize(jnp.full(3, 4.0), flex.at(state.exponent)))
    assert int(state.exponent) > int(flex.init(1.0).exponent), "an overflow raises the exponent"
    totals = {}
    for size in (8, 64, 512):
        cells = Cells("05_precision", {"i % 64 == 63": f"i % {size} == {size - 1}"})
        cells.data |= rounding().data
        cells.run("precision-101")
        sums = jax.jit(cells["partial_sums"])(np.full(8000, 0.1, np.float32), cells["number"]("float16"))
        totals[size] = abs(float(sums[1][-1]) - 799.8)
    assert totals[64] < min(totals[8], totals[512])
