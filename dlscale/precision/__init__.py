"""Numbers in few bits: formats, exact rounding to them, and what makes training in them work.

Formats are emulated: `quantize` rounds float32 numbers to the nearest number of a format and returns them as float32.
It works on the bits, in integers, because a CPU's floating-point unit flushes float32's subnormal numbers to zero.
"""

# ruff: noqa: A001, A002 - a number's format is called "format", as everywhere in the field

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from dlscale.lab import checks
from dlscale.lab.models import Params

Tree = Any  # a pytree of arrays
SIGN, INFINITY, NAN = -(2**31), 0x7F800000, 0x7FC00000  # bit patterns of float32, as int32


# Formats


class Float(NamedTuple):
    """A floating-point format: a sign, exponent bits with a bias, and mantissa bits."""

    exponent_bits: int
    mantissa_bits: int
    bias: int  # what is added to an exponent to store it
    epsilon: float  # distance from 1 to the next larger number
    smallest_normal: float  # the smallest positive number with all its mantissa bits
    smallest_subnormal: float
    max: float  # the largest finite number
    beyond: float  # what is too large becomes infinity, or NaN where a format has none


def float_format(number: np.dtype) -> Float:
    """The format of a NumPy or ml_dtypes type that float32 can hold."""
    about = ml_dtypes.finfo(number)
    numbers = about.eps, about.smallest_normal, about.smallest_subnormal, about.max, number.type(np.inf)
    return Float(about.nexp, about.nmant, 1 - about.minexp, *map(float, numbers))


TYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in ("float32", "bfloat16", "float16", "float8_e5m2", "float8_e4m3fn")
}
FORMATS = {name: float_format(number) for name, number in TYPES.items()}


class Fixed(NamedTuple):
    """Fixed point ⟨integer_bits, fraction_bits⟩ in two's complement (Gupta et al. 2015, arXiv:1502.02551).

    The sign is one of the integer bits. Numbers too large become the largest or lowest one, NaN becomes 0. Its two
    numbers may be traced: the format is then an input of a compiled program. Where they are not, `quantize` raises
    ValueError for bit counts that are impossible or too many for float32 to hold.
    """

    integer_bits: int | Array
    fraction_bits: int | Array


Format = Float | Fixed | str  # a string is a name in `FORMATS`


# Rounding


def quantize(x: ArrayLike, format: Format, rounding: str = "nearest", key: Array | None = None) -> Array:
    """x, an array of floats, rounded to `format`: a float32 array of the same shape. Exact, also for subnormal numbers.

    "nearest" takes the even one of two that are equally near. "stochastic" takes one of the two neighbours at random,
    so that the mean is x (Gupta et al. 2015, arXiv:1502.02551), and needs a `key`.
    May be called inside `jax.jit`, `jax.vmap` and `jax.grad`: the derivative is 1 everywhere ("straight through": that
    of rounding itself is 0 or infinite). x of more than 32 bits is first rounded to float32.
    Raises ValueError for integers, unknown or impossible formats, unknown roundings, and a missing key.
    """
    format = _known(format)
    checks.known("rounding", rounding, ("nearest", "stochastic"))
    if rounding == "stochastic" and key is None:
        raise ValueError("Stochastic rounding needs random numbers: pass key=jax.random.key(…), a new one each time.")
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise ValueError(f"quantize rounds floats, not {jnp.result_type(x)}: convert with x.astype(jnp.float32).")
    if format is FORMATS["float32"]:
        return jnp.asarray(x, jnp.float32)
    return _quantize(jnp.asarray(x, jnp.float32), format, rounding, key)


@functools.partial(jax.jit, static_argnums=2)
def _quantize(x: Array, format: Float | Fixed, rounding: str, key: Array | None) -> Array:
    round_to = _round_float if isinstance(format, Float) else _round_fixed
    return _straight_through(x, round_to(x, format, rounding, key))


@jax.custom_jvp
def _straight_through(x: Array, rounded: Array) -> Array:
    return rounded


_straight_through.defjvp(lambda primals, tangents: (primals[1], tangents[0]))


def _round_float(x: Array, format: Float, rounding: str, key: Array | None) -> Array:
    """Round x = ± significand · 2^exponent by cutting the significand's last `cut` bits after adding a `bump`.

    The format's numbers are inputs of the compiled program: it serves all formats.
    """
    largest, beyond = lax.bitcast_convert_type(jnp.float32([format.max, format.beyond]), jnp.int32)
    lowest = 128 - format.bias  # exponent of the smallest normal number, as float32 stores it (plus 127)
    word = lax.bitcast_convert_type(x, jnp.int32)
    size = word & ~SIGN
    exponent = jnp.maximum(size >> 23, 1)  # a subnormal number's exponent is that of the smallest normal one
    tiny = lowest - format.mantissa_bits  # exponent of the smallest subnormal number
    shared = jnp.maximum(exponent, tiny)
    # 6 bits below the 24 of float32: what lies below the smallest subnormal number keeps its place between it and 0
    significand = (size - ((exponent - 1) << 23)) << 6 >> jnp.minimum(shared - exponent, 31)
    cut = 29 - format.mantissa_bits + jnp.maximum(lowest - shared, 0)
    if rounding == "nearest":
        bump = (1 << (cut - 1)) - 1 + (significand >> cut & 1)
    else:
        bump = _random_words(key, x.shape).astype(jnp.int32) & ((1 << cut) - 1)
    kept = (significand + bump) >> cut
    result = jnp.where(kept == 0, 0, (kept << (cut - 6)) + ((shared - 1) << 23))  # a carry enters the exponent
    result = jnp.where(result > largest, beyond, result)
    result = jnp.where(size > INFINITY, NAN, result)
    return lax.bitcast_convert_type(result | (word & SIGN), jnp.float32)


def _round_fixed(x: Array, format: Fixed, rounding: str, key: Array | None) -> Array:
    scaled = x * _power_of_two(format.fraction_bits)  # exact: at the worst infinite
    if rounding == "nearest":
        whole = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
    else:
        whole = jnp.floor(scaled)
        whole += (_random_words(key, x.shape) >> 9) * jnp.float32(2.0**-23) < scaled - whole
    half = 1 << (format.integer_bits + format.fraction_bits - 1)
    whole = jnp.clip(whole, -half, half - 1)
    whole = jnp.where(jnp.isnan(whole) | (whole == 0), 0, whole)  # two's complement has no -0
    return whole * _power_of_two(-format.fraction_bits)


def _random_words(key: Array, shape: tuple[int, ...]) -> Array:
    """The numbers of `jax.random.bits`, by the same Threefry (Salmon et al. 2011), in a tenth of its time on a CPU.

    There JAX writes the whole array back to memory after each round; here all rounds are one loop over its elements.
    """
    first, second = jax.random.key_data(key)[:2]
    keys = first, second, first ^ second ^ 0x1BD11BDA
    left = jnp.broadcast_to(first, shape)
    right = second + lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    for group in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            left += right
            right = left ^ (right << turn | right >> (32 - turn))
        left += keys[(group + 1) % 3]
        right += keys[(group + 2) % 3] + (group + 1)
    return left ^ right


def _power_of_two(exponent: int | Array) -> Array:
    """2^exponent, exactly; jnp.exp2 need not be exact."""
    return lax.bitcast_convert_type(jnp.int32(exponent + 127) << 23, jnp.float32)


def _known(format: Format) -> Float | Fixed:
    """The format itself, also for its name; ValueError for one that cannot be."""
    if not isinstance(format, Float | Fixed):
        return FORMATS[checks.known("format", format, FORMATS)]
    if isinstance(format, Fixed) and not any(isinstance(number, Array) for number in format):
        checks.whole("integer_bits", format.integer_bits, why="The sign is one of them.")
        checks.whole("fraction_bits", format.fraction_bits, low=0)
        checks.whole("integer_bits + fraction_bits", sum(format), low=2, high=25, why="float32 must hold them.")
    return format


# Flexpoint


class FlexState(NamedTuple):
    """What Autoflex knows of a Flexpoint tensor, which is computed again and again: integers times one power of two."""

    exponent: Array  # () int32, for the tensor to come: its unit is 2^exponent
    maxima: Array  # (16,) float32, largest magnitudes of the latest tensors, the last one last; NaN before there are 16


def autoflex(state: FlexState, maximum: Array, mantissa_bits: int = 16) -> FlexState:
    """Predict the next exponent from the largest magnitude of the present tensor (Köster et al. 2017, arXiv:1711.02213,
    Algorithm 2), whose integers have `mantissa_bits`. It lies from -31 to 0, as in their flex16+5.

    It should hold twice the largest of the last 16 maxima plus 3 of their standard deviations and 100 units. After an
    overflow nobody knows how large the tensor was: what came before is forgotten, and twice the maximum is assumed.
    """
    unit = _power_of_two(state.exponent)
    overflow = maximum >= (2 ** (mantissa_bits - 1) - 1) * unit
    maxima = jnp.where(overflow, jnp.nan, jnp.roll(state.maxima, -1))
    maxima = maxima.at[-1].set(jnp.where(overflow, 2 * maximum, maximum))
    fraction, power = jnp.frexp(2 * (jnp.nanmax(maxima) + 3 * jnp.nanstd(maxima) + 100 * unit))
    return FlexState(jnp.clip(power - (fraction == 0.5) + 1 - mantissa_bits, -31, 0), maxima)


# Tensors in memory


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def store(x: Array, forward_format: str, backward_format: str) -> Array:
    """x as it is read again after it was written to memory in `forward_format`; its gradient in `backward_format`."""
    return quantize(x, forward_format)


store.defvjp(
    lambda x, forward_format, backward_format: (quantize(x, forward_format), None),
    lambda forward_format, backward_format, _, gradient: (quantize(gradient, backward_format),),
)


# One number


def bits(x: float, name: str) -> tuple[str, str, str]:
    """The bits of the number that x is rounded to, as three strings: sign, exponent and mantissa."""
    number, first = _stored(x, name), 1 + FORMATS[name].exponent_bits
    text = f"{int(number.view(f'u{number.itemsize}')):0{8 * number.itemsize}b}"
    return text[0], text[1:first], text[first:]


def neighbours(x: float, name: str) -> tuple[float, float]:
    """The numbers before and after the one that x is rounded to; infinite where there is none."""
    number = _stored(x, name)
    ends = ml_dtypes.finfo(number.dtype)
    below = -np.inf if number <= ends.min else float(np.nextafter(number, ends.min))
    return below, np.inf if number >= ends.max else float(np.nextafter(number, ends.max))


def _stored(x: float, name: str) -> np.ndarray:
    """x rounded to a format, as an array () of this type. Raises ValueError for an unknown format."""
    return np.asarray(quantize(float(x), name)).astype(TYPES[name])


# Training

_float32 = functools.partial(optax.tree_utils.tree_cast, dtype=jnp.float32)


class LossScaleState(NamedTuple):
    """The state of a loss scale around that of an optimizer."""

    scale: Array  # () float32, by which to multiply the loss of the step to come
    good_steps: Array  # () int32, since the scale last changed
    inner: Tree


def dynamic_loss_scale(
    optimizer: optax.GradientTransformation, initial: float = 2.0**15, factor: float = 2.0, period: int = 2000
) -> optax.GradientTransformation:
    """Unscale gradients of a scaled loss in float32, and skip steps where one is not finite (Micikevicius et al. 2017,
    arXiv:1710.03740, §3.2): the scale is then divided by `factor`, and multiplied by it after `period` good steps.

    With the factor 1 it stays. The loss must be multiplied by `scale_of(state)`, with the state before the update. With
    powers of two no bit of a float32 gradient changes by scaling and unscaling, as long as nothing over- or underflows.
    Raises ValueError for an initial scale that is no normal float32, a factor below 1 and a period below 1.
    """
    if not 2.0**-126 <= checks.finite("initial", initial) < 2.0**128:
        raise ValueError(f"initial must be from 2**-126 to below 2**128, as in float32, not {initial!r}: try 2.0**15.")
    checks.finite("factor", factor, low=1.0)
    checks.whole("period", period)

    def init(params: Params) -> LossScaleState:
        return LossScaleState(jnp.asarray(initial, jnp.float32), jnp.int32(0), optimizer.init(_float32(params)))

    def update(gradients: Tree, state: LossScaleState, params: Params | None = None) -> tuple[Tree, LossScaleState]:
        gradients = jax.tree.map(lambda g: g / state.scale, _float32(gradients))
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()
        taken = optimizer.update(gradients, state.inner, _float32(params))
        skipped = jax.tree.map(jnp.zeros_like, taken[0]), state.inner
        updates, inner = jax.tree.map(functools.partial(jnp.where, finite), taken, skipped)
        good_steps = jnp.where(finite, state.good_steps + 1, 0)
        change = jnp.where(finite, jnp.where(good_steps == period, factor, 1.0), 1.0 / factor)
        scale = jnp.clip(state.scale * change, 2.0**-126, 2.0**126)
        return updates, LossScaleState(scale, good_steps % period, inner)

    return optax.GradientTransformation(init, update)


def scale_of(state: Tree) -> Array:
    """The number by which to multiply the loss, found in an optimizer's state. Raises ValueError if there is none."""
    found = optax.tree_utils.tree_get(state, "LossScaleState")
    if found is None:
        raise ValueError("This state has no loss scale: wrap the optimizer in dynamic_loss_scale.")
    return found.scale
