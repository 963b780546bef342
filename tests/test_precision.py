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
from dlscale.precision import FORMATS, Fixed, Float, exercises, experiment, quantize

KEY = jax.random.key(0)
THEIRS = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in FORMATS}
SHORT = [name for name in FORMATS if name != "float32"]

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


def random_floats(count: int) -> np.ndarray:
    """Float32 numbers of all magnitudes: a random pattern of bits each, so also infinities, NaN and subnormals."""
    return np.random.default_rng(0).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


def ties(name: str) -> np.ndarray:
    """All ties and their neighbours, also that between the largest number and what would come after it."""
    numbers = np.unique(np.abs(patterns(name)[np.isfinite(patterns(name))])).astype(float)
    numbers = np.append(numbers, 2 * numbers[-1] - numbers[-2])  # float64 holds what float32 does not
    with np.errstate(over="ignore"):
        middle = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    near = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)])
    return np.concatenate([near, -near])


# Formats and rounding


@pytest.mark.parametrize("name", FORMATS)
def test_named_formats_have_the_properties_of_ml_dtypes(name):
    ours, theirs = FORMATS[name], ml_dtypes.finfo(THEIRS[name])
    expected = theirs.max, theirs.smallest_normal, theirs.smallest_subnormal, theirs.eps, theirs.bits
    assert (ours.max, ours.smallest_normal, ours.smallest_subnormal, ours.epsilon, ours.bits) == expected


@pytest.mark.parametrize("name", SHORT)
def test_a_format_rounds_as_in_ml_dtypes_and_keeps_its_own_numbers(name):
    x = np.concatenate([random_floats(2**20), patterns("float16"), patterns("bfloat16"), ties(name), patterns(name)])
    x = np.resize(x, 2**21)  # one length for all formats: nothing is compiled anew
    assert same(quantize(x, name), x.astype(THEIRS[name]).astype(np.float32)).all()
    own = np.resize(patterns(name), 2**16)
    assert same(quantize(own, name, "stochastic", KEY), own).all()


def reference(x: np.ndarray, format: Float) -> np.ndarray:
    """Rounding in float64, whose range and precision exceed float32's: no subnormals, no double rounding."""
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        step = np.exp2(np.maximum(np.frexp(x)[1] - 1.0, 1 - format.bias) - format.mantissa_bits)
        rounded = np.copysign(np.where(np.isfinite(x), np.rint(x / step) * step, x), x)
    return np.where(np.abs(rounded) > format.max, np.copysign(np.inf if format.infinities else np.nan, x), rounded)


floats = st.builds(lambda e, m, infinities: Float(e, m, infinities or e == 8), st.integers(2, 8), st.integers(1, 23),
                   st.booleans())  # fmt: skip


@given(floats)
@settings(max_examples=60)
def test_any_format_rounds_as_an_independent_computation_does(format):
    scale = 2.0 ** np.random.default_rng(1).integers(-3, 3, 20_000)  # as many close to both ends of its range
    with np.errstate(over="ignore", invalid="ignore"):
        ends = np.concatenate([scale * format.max, 8 * scale * format.smallest_subnormal])
        x = np.concatenate([random_floats(20_000), (ends * random_floats(40_000) / 2e38).astype(np.float32)])
    assert same(quantize(x, format), reference(x, format).astype(np.float32)).all()


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
        (Float(5, 10), -0.1, 2.0**-14),
        (Float(5, 10), 3.3e-6, 2.0**-24),  # among the subnormal numbers
        (Float(5, 10), 2e-8, 2.0**-24),  # between 0 and the smallest of them
        (Float(8, 7), 1e-39, 2.0**-133),  # subnormal in float32 too
        (Fixed(6, 10), -1e-5, 2.0**-10),
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


def test_stochastic_rounding_near_the_end_of_the_range():
    x = np.full(2**16, 65512, np.float32)  # a quarter of the way from the largest float16 to what would come next
    assert abs(np.isinf(quantize(x, "float16", "stochastic", KEY)).mean() - 0.25) < 0.01
    assert (quantize(x, Fixed(4, 4), "stochastic", KEY) == 8 - 1 / 16).all()


# Inside JAX


def test_rounding_under_vmap_and_with_keys():
    x = jax.random.normal(KEY, (10, 100))
    assert same(jax.jit(jax.vmap(lambda x: quantize(x, "float16")))(x), quantize(x, "float16")).all()
    keys = jax.random.split(KEY, 10)
    rows = jax.vmap(lambda x, key: quantize(x, "bfloat16", "stochastic", key))(x, keys)
    assert same(rows[3], quantize(x[3], "bfloat16", "stochastic", keys[3])).all()
    assert not same(rows[3], quantize(x[3], "bfloat16", "stochastic", keys[4])).all()


@pytest.mark.parametrize("format", ["float16", "float32", Fixed(4, 4)])
@pytest.mark.parametrize("rounding", precision.ROUNDINGS)
def test_gradients_go_straight_through(format, rounding):
    x = jnp.array([0.1, -3.0, 1e-9, 1e9])
    gradient = jax.grad(lambda x: (jnp.arange(4) * quantize(x, format, rounding, KEY)).sum())(x)
    np.testing.assert_array_equal(gradient, np.arange(4))


def test_one_program_rounds_to_many_formats():
    x = random_floats(1234)
    quantize(x, "float16"), quantize(x, Fixed(4, 4))
    programs = precision._quantize._cache_size()
    for format in (*FORMATS, Float(6, 9), Fixed(2, 14)):
        quantize(x, format)
    assert precision._quantize._cache_size() == programs


def test_store_rounds_forward_and_backward():
    x = jnp.array([1.01, -0.3, 70000.0])
    y, pull = jax.vjp(lambda x: precision.store(x, "bfloat16", "float8_e5m2"), x)
    assert same(y, quantize(x, "bfloat16")).all() and same(pull(x)[0], quantize(x, "float8_e5m2")).all()


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


# One number


@pytest.mark.parametrize("name", SHORT)
def test_bits_are_the_bit_pattern(name):
    for word in range(0, 2 ** FORMATS[name].bits, max(1, 2 ** FORMATS[name].bits // 64 - 1)):
        value = float(patterns(name)[word])
        sign, exponent, mantissa = precision.bits(value, name)
        assert (len(exponent), len(mantissa)) == (FORMATS[name].exponent_bits, FORMATS[name].mantissa_bits)
        assert math.isnan(value) or sign + exponent + mantissa == f"{word:0{FORMATS[name].bits}b}"


@pytest.mark.parametrize("name", ["float8_e5m2", "float8_e4m3fn"])
def test_neighbours_are_the_next_numbers(name):
    values = [-math.inf, *np.unique(patterns(name)[np.isfinite(patterns(name))]).tolist(), math.inf]
    for before, value, after in zip(values, values[1:], values[2:], strict=False):
        assert precision.neighbours(value, name) == (before, after)
    if FORMATS[name].infinities:
        assert precision.neighbours(math.inf, name) == (values[-2], math.inf)


# Loss scaling


@pytest.mark.parametrize("make", [functools.partial(optax.sgd, 0.1, 0.9), functools.partial(optax.adamw, 0.01)])
@pytest.mark.parametrize("settings", [(2.0**10, 1.0), (2.0**3, 4.0, 5)])
def test_with_powers_of_two_scaled_updates_have_the_bits_of_plain_ones(make, settings):
    optimizer, scaled, params = make(), precision.dynamic_loss_scale(make(), *settings), jnp.ones(50)
    state, scaled_state, scales = optimizer.init(params), scaled.init(params), set()
    for gradient in np.random.default_rng(0).normal(size=(20, 50)).astype(np.float32):
        scale = precision.scale_of(scaled_state)
        plain, state = optimizer.update(gradient, state, params)
        updates, scaled_state = scaled.update(scale * gradient, scaled_state, params)
        assert same(updates, plain).all()
        scales.add(float(scale))
    assert len(scales) == (4 if len(settings) == 3 else 1), "the scale rises where it is dynamic"


def test_steps_that_overflow_are_skipped_and_the_scale_recovers():
    optimizer = precision.dynamic_loss_scale(optax.sgd(1.0, 0.5), initial=8.0, factor=2.0, period=3)
    params = {"w": jnp.float32(0), "v": jnp.zeros(2)}
    state, scales, expected, momentum = optimizer.init(params), [], 0.0, 0.0
    for bad in (None, np.nan, np.inf, None, None, None, -np.inf, None, None, None, None, None, None):
        scale = precision.scale_of(state)
        gradient = {"w": scale if bad is None else jnp.float32(bad), "v": jnp.full(2, scale)}
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


def test_the_scale_is_found_inside_other_states():
    optimizer = optax.chain(optax.clip(1.0), precision.dynamic_loss_scale(optax.sgd(0.1), 32.0))
    assert precision.scale_of(optimizer.init(jnp.ones(2))) == 32


# What cannot work


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Float(9, 3), "Wider formats than float32"),
        (lambda: Float(5, 24), "mantissa_bits must be a whole number from 1 to 23"),
        (lambda: Float(8, 3, infinities=False), "Wider formats than float32"),
        (lambda: quantize(1.0, Fixed(0, 8)), "integer_bits must be a whole number of at least 1"),
        (lambda: quantize(1.0, Fixed(8, -1)), "fraction_bits must be a whole number of at least 0"),
        (lambda: quantize(1.0, Fixed(16, 10)), r"integer_bits \+ fraction_bits must be a whole number from 2 to 25"),
        (lambda: quantize(np.arange(3), "float16"), "quantize rounds floats, not int"),
        (lambda: quantize(1.0, "float15"), "Did you mean 'float16'"),
        (lambda: quantize(1.0, np.float16), "format must be a Float, a Fixed or the name"),
        (lambda: quantize(1.0, "float16", "up"), "Unknown rounding 'up'"),
        (lambda: quantize(1.0, "float16", "stochastic"), "pass key="),
        (lambda: precision.bits(1.0, "tensorfloat32"), "Unknown format"),
        (lambda: precision.scale_of(optax.sgd(0.1).init(jnp.ones(2))), "no loss scale: wrap the optimizer"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), 0.0), "initial must be from"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), 1e39), "initial must be from"),
        (lambda: precision.dynamic_loss_scale(optax.sgd(0.1), factor=0.5), "factor must be a finite number"),
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
        (exercises.random, lambda x, f, rng: np.floor(np.ldexp(x, f) + rng.random(x.shape)) * 2.0**-f),
        (exercises.random, lambda x, f, rng: np.round(x * 2**f + rng.uniform(-0.5, 0.5, x.shape)) / 2**f),
        (exercises.summing, in_chunks(50)),
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
    (exercises.update, "np.floor(", "np.trunc("),
    (exercises.update, "np.floor(", "np.round("),
    (exercises.dynamic_scale, "== period", "== 2000"),
    (exercises.random, "rng.random(x.shape) < scaled - lower", "scaled - lower >= 0.5"),
    (exercises.random, "rng.random(x.shape) < scaled - lower", "(rng.random(x.shape) < 0.5) * (scaled > lower)"),
    (exercises.random, "rng.random(x.shape) < scaled - lower", "rng.random(x.shape) < 1 - scaled + lower"),
    (exercises.random, "rng.random(x.shape) <", "rng.random() <"),
    (exercises.random, "rng.random(x.shape) <", "rng.random(x.shape[1]) <"),
    (exercises.random, "lower = np.floor(scaled)", "lower = np.trunc(scaled)"),
]


ORDERS = (
    lambda count: [(0, k) for k in range(1, count)],
    lambda count: in_chunks(16)(count)[:-1],
    lambda count: [(0, 0)] * count,
    lambda count: [(0, 1)] * (3 * count),
)
NAIVE = [(exercise, spoilt(exercise, line, instead)) for exercise, line, instead in SPOILT]


@pytest.mark.parametrize(("exercise", "answer"), [*NAIVE, *((exercises.summing, order) for order in ORDERS)])
def test_a_naive_answer_is_refused(exercise, answer):
    right, line = exercise.judge(answer)
    assert not right and "raised" not in line


# The recorded experiment


def signals():
    """Initial parameters, batches of places, and the examples."""
    task, examples = experiment.SIGNALS, experiment._examples("mnist1d_fresh", "test")
    batches = jax.random.randint(KEY, (20, task.batch_size), 0, len(examples.x_train))
    return jax.jit(task.model.init)(KEY), batches, jnp.asarray(examples.x_train), jnp.asarray(examples.y_train)


def trained(variant: experiment.Variant):
    """The weights after 20 steps of an experiment on the signals, as one array."""
    params, batches, x, y = signals()
    state = params, experiment.optimizer_of("signals", variant).init(params)
    step = jax.jit(experiment.training_step("signals", variant))
    for rows, key in zip(batches, jax.random.split(KEY, len(batches)), strict=True):
        state, _ = step(state, (rows, key), jnp.float32(0.1), x, y)
    return ravel_pytree(state[0])[0]


def test_a_float32_worker_trains_as_plain_training_does():
    params, batches, x, y = signals()
    optimizer = optax.sgd(0.1, 0.9)
    state = optimizer.init(params)

    @jax.jit
    @jax.grad
    def gradient(params, rows):
        logits = experiment.SIGNALS.model.apply(params, x[rows])
        return optax.softmax_cross_entropy_with_integer_labels(logits, y[rows]).mean()

    for rows in batches:
        updates, state = optimizer.update(gradient(params, rows), state)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(trained(experiment.Variant(num_workers=64)), ravel_pytree(params)[0], atol=1e-5)


def test_stored_weights_are_numbers_of_their_format():
    weights = trained(experiment.Variant(weights="float8_e5m2", rounding="stochastic"))
    assert same(weights, quantize(weights, "float8_e5m2")).all()


# What the notebooks suggest


def lesson(*identities: str) -> Cells:
    cells = Cells("05_precision", {"steps=1000, batch_size=32": "steps=250, batch_size=32"})
    cells.run(*(f"precision-{name}" for name in ("setup", "format", "numbers", "data", "step", "custom", "forward")))
    cells.changes = {}
    cells.run(*(f"precision-{name}" for name in identities))
    return cells


@suggested_by("05_precision")
def test_the_smallest_number_of_a_format_decides_whether_it_learns():
    cells = lesson("train-scaled")
    numbers, train = cells["Format"](2.0**-3, 2.0**-20, 2.0**15), cells["train_scaled"]
    assert train(2.0**-10, numbers, seed=0)[0] < 0.5 < train(2.0**-10, numbers._replace(smallest=2.0**-40), seed=0)[0]


@suggested_by("05_precision")
def test_a_scale_that_starts_too_low_climbs():
    cells = Cells("05_precision", {"initial=2.0**36": "initial=1.0"})
    cells.data |= lesson("train-scaled").data
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
    identities = "half-forward", "data", "hold-code", "flex-step", "flex-update", "flex-networks", "flex-runs"
    cells = further("arange(30)", "arange(4)", *identities)
    wide, fine = np.mean(cells["exponents"][:, -1]), cells["flex_accuracy"].mean()
    cells["MANTISSA_BITS"] = 8
    cells.run("precision-further-flex-networks", "precision-further-flex-runs")
    assert np.mean(cells["exponents"][:, -1]) > wide + 6 and cells["flex_accuracy"].mean() < fine + 2


@suggested_by("05_precision_further")
def test_chunks_near_the_root_of_the_length_are_best():
    errors = {}
    for size in (8, 64, 512):
        cells = further("position % 64 == 63", f"position % {size} == {size - 1}", "add-up")
        total = cells["running_totals"](np.full(8000, 0.1, np.float32), "float16")["chunks"][-1]
        errors[size] = abs(float(total) - 800)
    assert errors[64] < min(errors[8], errors[512])
