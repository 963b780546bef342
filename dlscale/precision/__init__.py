"""Numbers in few bits: formats, exact rounding to them, and what makes training in them work.

Formats are emulated: `quantize` rounds float32 numbers to the nearest number of a format and returns them as float32.
It works on the bits, in integers, because a CPU's floating-point unit flushes float32's subnormal numbers to zero.
"""

# ruff: noqa: A001, A002 - a number's format is called "format", as everywhere in the field

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.typing import ArrayLike

from dlscale.lab import checks
from dlscale.lab.models import Layer, Model, Params

Tree = Any  # a pytree of arrays
SIGN, INFINITY, NAN = -(2**31), 0x7F800000, 0x7FC00000  # bit patterns of float32, as int32
ROUNDINGS = ("nearest", "stochastic", "toward_zero")


# Formats


class FloatLayout(NamedTuple):
    """What rounding to a `Float` needs to know of it, as integers. They may be traced: the format is then an input."""

    mantissa_bits: int | Array
    lowest: int | Array  # exponent of the smallest normal number, as float32 stores it (plus 127)
    largest: int | Array  # float32's bits of the largest finite number
    overflow: int | Array  # and of what lies beyond: infinity, NaN, or the largest number again
    nan: int | Array  # and of what becomes of NaN


class FixedLayout(NamedTuple):
    """Whole multiples of a unit, from `lowest` to `highest` of them. May be traced, as a `FloatLayout` may."""

    exponent: int | Array  # the unit is 2^exponent
    lowest: int | Array
    highest: int | Array


@dataclass(frozen=True)
class Float:
    """A floating-point format: a sign, `exponent_bits` with the bias 2^(exponent_bits − 1) − 1, and `mantissa_bits`.

    `specials` says what the highest exponent is kept for: "ieee": infinities and NaN, as in IEEE 754; "nan": ordinary
    numbers but for NaN in the last pattern, and what is too large becomes NaN (Micikevicius et al. 2022,
    arXiv:2209.05433, e4m3); "none": ordinary numbers only, what is too large becomes the largest, and NaN becomes 0
    (formats of 4 and 6 bits of the OCP Microscaling specification, 2023).
    Raises ValueError for bit counts that are impossible, and for a format that float32 cannot hold.
    """

    exponent_bits: int
    mantissa_bits: int
    specials: str = "ieee"

    def __post_init__(self) -> None:
        why = "Wider formats than float32, 8 and 23 bits, cannot be emulated in it."
        checks.whole("exponent_bits", self.exponent_bits, low=2, high=8, why=why)
        checks.whole("mantissa_bits", self.mantissa_bits, high=23, why=why)
        checks.known("specials", self.specials, ("ieee", "nan", "none"))
        if self.exponent_bits == 8 and self.specials != "ieee":
            raise ValueError('8 exponent bits without infinities reach beyond float32. Use 7, or specials="ieee".')

    @property
    def name(self) -> str:
        """As in `FORMATS`, else after the bits."""
        usual = f"float{self.bits}_e{self.exponent_bits}m{self.mantissa_bits}" + "fn" * (self.specials != "ieee")
        return next((name for name, format in FORMATS.items() if format == self), usual)

    @property
    def bits(self) -> int:
        """Of one number, with its sign."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """What is added to an exponent to store it."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def max(self) -> float:
        """The largest finite number."""
        top = self.bias if self.specials == "ieee" else self.bias + 1
        return (2 - 2.0**-self.mantissa_bits * (2 if self.specials == "nan" else 1)) * 2.0**top

    @property
    def smallest_normal(self) -> float:
        """The smallest positive number with all its mantissa bits."""
        return 2.0 ** (1 - self.bias)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive number."""
        return self.smallest_normal * self.epsilon

    @property
    def epsilon(self) -> float:
        """The distance from 1 to the next larger number."""
        return 2.0**-self.mantissa_bits

    @property
    def layout(self) -> FloatLayout:
        """The format as data for `quantize`: one compiled program then serves many formats."""
        largest = int(np.float32(self.max).view(np.int32))
        overflow = {"ieee": INFINITY, "nan": NAN, "none": largest}[self.specials]
        nan = 0 if self.specials == "none" else NAN
        return FloatLayout(self.mantissa_bits, 127 + 1 - self.bias, largest, overflow, nan)


FORMATS = {
    "float32": Float(8, 23),
    "tensorfloat32": Float(8, 10),
    "bfloat16": Float(8, 7),
    "float16": Float(5, 10),
    "float8_e5m2": Float(5, 2),
    "float8_e4m3": Float(4, 3),
    "float8_e4m3fn": Float(4, 3, "nan"),
    "float8_e3m4": Float(3, 4),
    "float6_e3m2fn": Float(3, 2, "none"),
    "float6_e2m3fn": Float(2, 3, "none"),
    "float4_e2m1fn": Float(2, 1, "none"),
}


@dataclass(frozen=True)
class Fixed:
    """Fixed point ⟨integer_bits, fraction_bits⟩ in two's complement (Gupta et al. 2015, arXiv:1502.02551).

    The sign is one of the integer bits. Numbers too large become the largest or lowest one, NaN becomes 0.
    Raises ValueError for bit counts that are impossible or too many for float32 to hold.
    """

    integer_bits: int
    fraction_bits: int

    def __post_init__(self) -> None:
        checks.whole("integer_bits", self.integer_bits, why="The sign is one of them.")
        checks.whole("fraction_bits", self.fraction_bits, low=0)
        why = "With more, float32 does not hold them all."
        checks.whole("integer_bits + fraction_bits", self.bits, low=2, high=25, why=why)

    @property
    def bits(self) -> int:
        """Of one number."""
        return self.integer_bits + self.fraction_bits

    @property
    def epsilon(self) -> float:
        """The distance between neighbours."""
        return 2.0**-self.fraction_bits

    @property
    def max(self) -> float:
        """The largest number; the lowest is -max - epsilon."""
        return self.layout.highest * self.epsilon

    @property
    def layout(self) -> FixedLayout:
        """The format as data for `quantize`: one compiled program then serves many formats."""
        return FixedLayout(-self.fraction_bits, -(2 ** (self.bits - 1)), 2 ** (self.bits - 1) - 1)


class FlexState(NamedTuple):
    """What Autoflex knows of a tensor that is computed again and again."""

    exponent: Array  # () int32, for the tensor to come: its unit is 2^exponent
    maxima: Array  # (16,) float32, largest magnitudes of the latest tensors, the last one last; NaN before there are 16


@dataclass(frozen=True)
class Flexpoint:
    """A tensor of integers of `mantissa_bits` in two's complement times one power of two (Köster et al. 2017,
    arXiv:1711.02213); their flex16+5 is Flexpoint(16, 5). The power is 2^0 down to 2^-(2^exponent_bits - 1).

    `at(exponent)` is the format with this exponent. Hardware must choose the exponent before it knows the tensor, from
    those that came before: `state = init(first_maximum)`, then each time `x = quantize(x, at(state.exponent))` and
    `state = update(state, x)`. Raises ValueError for bit counts that are impossible or too many for float32.
    """

    mantissa_bits: int
    exponent_bits: int

    def __post_init__(self) -> None:
        checks.whole("mantissa_bits", self.mantissa_bits, low=2, high=25, why="float32 must hold them.")
        checks.whole("exponent_bits", self.exponent_bits, low=0, high=6, why="float32 must reach so far.")

    def at(self, exponent: ArrayLike) -> FixedLayout:
        """The format with the unit 2^exponent."""
        half = 2 ** (self.mantissa_bits - 1)
        return FixedLayout(jnp.clip(jnp.int32(exponent), 1 - 2**self.exponent_bits, 0), -half, half - 1)

    def fitting(self, x: Array) -> FixedLayout:
        """The format with the smallest unit in which x does not overflow."""
        largest = jnp.abs(jnp.where(jnp.isfinite(x), x, 0)).max(initial=0)
        layout = self.at(self._exponent(largest))
        return self.at(layout.exponent + (largest > layout.highest * _power_of_two(layout.exponent)))

    def init(self, maximum: ArrayLike) -> FlexState:
        """Begin with a tensor whose largest magnitude is about `maximum`."""
        return self._predict(jnp.full(16, jnp.nan, jnp.float32).at[-1].set(maximum), 0.0)

    def update(self, state: FlexState, x: Array) -> FlexState:
        """Predict the next exponent, after x was quantized with the present one (Köster et al. 2017, Algorithm 2).

        It should hold twice the largest of the last 16 maxima plus 3 of their standard deviations and 100 units. After
        an overflow nobody knows how large x was: what came before is forgotten, and twice the maximum is assumed.
        """
        maximum, layout = jnp.abs(x).max(), self.at(state.exponent)
        unit = _power_of_two(layout.exponent)
        overflow = maximum >= layout.highest * unit
        maxima = jnp.where(overflow, jnp.nan, jnp.roll(state.maxima, -1))
        return self._predict(maxima.at[-1].set(jnp.where(overflow, 2 * maximum, maximum)), 100 * unit)

    def _predict(self, maxima: Array, room: ArrayLike) -> FlexState:
        expected = 2 * (jnp.nanmax(maxima) + 3 * jnp.nanstd(maxima) + room)
        return FlexState(self.at(self._exponent(expected)).exponent, maxima)

    def _exponent(self, size: Array) -> Array:
        """⌈log₂ size⌉ + 1 - mantissa_bits: in this unit, `size` and its negative need all bits."""
        fraction, exponent = jnp.frexp(size)
        return jnp.where(size > 0, exponent - (fraction == 0.5) + 1 - self.mantissa_bits, -(2**30))


Format = Float | FloatLayout | Fixed | FixedLayout | Flexpoint | str  # a string is a name in `FORMATS`


# Rounding


def quantize(x: ArrayLike, format: Format, rounding: str = "nearest", key: Array | None = None) -> Array:
    """x, an array of floats, rounded to `format`: a float32 array of the same shape. Exact, also for subnormal numbers.

    "nearest" takes the even one of two that are equally near; "toward_zero" cuts off, and what is finite stays so;
    "stochastic" takes one of the two neighbours at random, so that the mean is x (Gupta et al. 2015,
    arXiv:1502.02551), and needs a `key`. A `Flexpoint` gets the smallest unit in which x does not overflow.
    May be called inside `jax.jit`, `jax.vmap` and `jax.grad`: the derivative is 1 everywhere ("straight through": that
    of rounding itself is 0 or infinite). x of more than 32 bits is first rounded to float32.
    Raises ValueError for integers, unknown formats and roundings, and a missing key.
    """
    format = _known(format)
    checks.known("rounding", rounding, ROUNDINGS)
    if rounding == "stochastic" and key is None:
        raise ValueError("Stochastic rounding needs random numbers: pass key=jax.random.key(…), a new one each time.")
    if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
        raise ValueError(f"quantize rounds floats, not {jnp.result_type(x)}: convert with x.astype(jnp.float32).")
    x = jnp.asarray(x, jnp.float32)
    if isinstance(format, Flexpoint):
        format = format.fitting(x)
    layout = format.layout if isinstance(format, Float | Fixed) else format
    return _quantize(x, layout, rounding, key)


@functools.partial(jax.jit, static_argnums=2)
def _quantize(x: Array, layout: FloatLayout | FixedLayout, rounding: str, key: Array | None) -> Array:
    round_to = _round_float if isinstance(layout, FloatLayout) else _round_fixed
    return _straight_through(x, round_to(x, layout, rounding, key))


@jax.custom_jvp
def _straight_through(x: Array, rounded: Array) -> Array:
    return rounded


_straight_through.defjvp(lambda primals, tangents: (primals[1], tangents[0]))


def _round_float(x: Array, layout: FloatLayout, rounding: str, key: Array | None) -> Array:
    """Round x = ± significand · 2^exponent by cutting the significand's last `cut` bits after adding a `bump`."""
    word = lax.bitcast_convert_type(x, jnp.int32)
    size = word & ~SIGN
    exponent = jnp.maximum(size >> 23, 1)  # a subnormal number's exponent is that of the smallest normal one
    tiny = layout.lowest - layout.mantissa_bits  # exponent of the smallest subnormal number
    shared = jnp.maximum(exponent, tiny)
    # 6 bits below the 24 of float32: what lies below the smallest subnormal number keeps its place between it and 0
    significand = (size - ((exponent - 1) << 23)) << 6 >> jnp.minimum(shared - exponent, 31)
    cut = 29 - layout.mantissa_bits + jnp.maximum(layout.lowest - shared, 0)
    if rounding == "nearest":
        bump = (1 << (cut - 1)) - 1 + (significand >> cut & 1)
    elif rounding == "stochastic":
        bump = jax.random.bits(key, x.shape).astype(jnp.int32) & ((1 << cut) - 1)
    else:
        bump = 0
    kept = (significand + bump) >> cut
    result = jnp.where(kept == 0, 0, (kept << (cut - 6)) + ((shared - 1) << 23))  # a carry enters the exponent
    beyond = layout.overflow
    if rounding == "toward_zero":
        beyond = jnp.where(size < INFINITY, layout.largest, layout.overflow)
    result = jnp.where(result > layout.largest, beyond, result)
    result = jnp.where(size > INFINITY, layout.nan, result)
    return lax.bitcast_convert_type(result | (word & SIGN), jnp.float32)


def _round_fixed(x: Array, layout: FixedLayout, rounding: str, key: Array | None) -> Array:
    scaled = x * _power_of_two(-layout.exponent)  # exact: at the worst infinite
    if rounding == "nearest":
        whole = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
    elif rounding == "stochastic":
        whole = jnp.floor(scaled)
        whole += jax.random.uniform(key, x.shape) < scaled - whole
    else:
        whole = jnp.trunc(scaled)
    whole = jnp.clip(whole, layout.lowest, layout.highest)
    whole = jnp.where(jnp.isnan(whole) | (whole == 0), 0, whole)  # two's complement has no -0
    return whole * _power_of_two(layout.exponent)


def _power_of_two(exponent: int | Array) -> Array:
    """2^exponent, exactly; jnp.exp2 need not be exact."""
    return lax.bitcast_convert_type(jnp.int32(exponent + 127) << 23, jnp.float32)


def _known(format: Format) -> Format:
    if isinstance(format, str):
        return FORMATS[checks.known("format", format, FORMATS)]
    if not isinstance(format, Float | FloatLayout | Fixed | FixedLayout | Flexpoint):
        raise ValueError(f"format must be a Float, Fixed, Flexpoint or the name of one in FORMATS, not {format!r}.")
    return format


# One number


def bits(x: float, format: Float | Fixed | str) -> tuple[str, str, str]:
    """The bits of the number that x is rounded to, as three strings: sign, exponent and mantissa of a `Float`, sign,
    integer and fraction of a `Fixed`. Raises ValueError for other formats.
    """
    format, value = _single(format), float(quantize(float(x), format))
    size, step = abs(value), _step(value, format)
    if isinstance(format, Fixed):
        first, word = format.integer_bits - 1, int(value / step) % 2**format.bits
    else:
        first, steps = format.exponent_bits, 2**format.mantissa_bits
        if math.isfinite(value):  # the exponent counts how often the step doubled since the smallest
            word = int(math.log2(step / format.smallest_subnormal)) * steps + int(size / step)
        else:
            word = 2 ** (format.bits - 1) - (steps if math.isinf(value) else 1)
        word += (math.copysign(1, value) < 0) * 2 ** (format.bits - 1)
    text = f"{word:0{format.bits}b}"
    return text[0], text[1 : first + 1], text[first + 1 :]


def neighbours(x: float, format: Float | Fixed | str) -> tuple[float, float]:
    """The format's next number below x and the next above, both other than x; infinite where there is none.

    Raises ValueError for formats that are neither `Float` nor `Fixed`.
    """
    format, x = _single(format), float(x)
    lowest = -format.max - format.epsilon if isinstance(format, Fixed) else -format.max
    return _below(x, format, lowest, format.max), -_below(-x, format, -format.max, -lowest)


def _below(x: float, format: Float | Fixed, lowest: float, highest: float) -> float:
    if not lowest < x:
        return math.nan if math.isnan(x) else -math.inf
    if x > highest:
        return highest
    x = math.nextafter(x, -math.inf)  # in float64, which is finer than any format
    return max(math.floor(x / _step(x, format)) * _step(x, format), lowest)


def _step(x: float, format: Float | Fixed) -> float:
    """The distance between the numbers around x."""
    if isinstance(format, Fixed):
        return format.epsilon
    return format.epsilon * max(2.0 ** (math.frexp(x)[1] - 1) if x else 0.0, format.smallest_normal)


def _single(format: Float | Fixed | str) -> Float | Fixed:
    format = _known(format)
    if not isinstance(format, Float | Fixed):
        raise ValueError(f"A single number needs a Float or a Fixed, not {format!r}.")
    return format


# Training


def cast(tree: Tree, format: Format) -> Tree:
    """All arrays of floats of a pytree in `format`: float32, float16 and bfloat16 as arrays of that type, which JAX
    computes with, others as float32 arrays of the numbers that `format` has. Other arrays stay as they are.
    """
    format = _known(format)
    dtype = format.name if isinstance(format, Float) and format.name in ("float32", "float16", "bfloat16") else None

    def convert(leaf: Array) -> Array:
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            return leaf
        return jnp.asarray(leaf, dtype) if dtype else quantize(leaf, format)

    return jax.tree.map(convert, tree)


@dataclass(frozen=True)
class Policy:
    """The formats in which a model keeps its parameters, computes, and gives its logits.

    With `compute` float32, float16 or bfloat16 every operation is JAX's own in that type. (On a CPU a matrix product
    and a sum then accumulate in float32 and round once.) Any other format is emulated: parameters and inputs are
    rounded to it, what comes between is float32, and gradients pass the rounding unchanged.
    Raises ValueError for unknown formats.
    """

    parameters: Format = "float32"
    compute: Format = "float32"
    output: Format = "float32"

    def __post_init__(self) -> None:
        for format in (self.parameters, self.compute, self.output):
            _known(format)

    def apply(self, model: Model) -> Model:
        """The model under this policy; the same arguments give the same `Model`.

        Its gradients have the type of its parameters. Raises ValueError when called, if the model does not keep to the
        type of its inputs.
        """
        return _with_policy(model, self)


@functools.cache
def _with_policy(model: Model, policy: Policy) -> Model:
    def init(key: Array) -> Params:
        return cast(model.init(key), policy.parameters)

    def within(number: int, layer: Layer) -> Layer:
        def prepared(own: Params, x: Array) -> tuple[Params, Array]:
            return cast(own, policy.compute), x if number else cast(x, policy.compute)

        def compute(own: Params, x: Array) -> Array:
            own, x = prepared(own, x)
            y = layer(own, x)
            if y.dtype != x.dtype:
                raise ValueError(
                    f"This model computes in {y.dtype} when its inputs are {x.dtype}. "
                    "Arrays that it makes itself, with jnp.zeros or from NumPy, must have the type of its inputs."
                )
            return y if number < len(model.layers) - 1 else cast(y, policy.output)

        return Layer(compute, measure=layer.measure and (lambda own, x: layer.measure(*prepared(own, x))))

    layers = {name: within(i, layer) for i, (name, layer) in enumerate(model.layers.items())}
    return Model(init, layers)


class LossScaleState(NamedTuple):
    """The state of a loss scale around that of an optimizer."""

    scale: Array  # () float32, by which to multiply the loss of the step to come
    good_steps: Array  # () int32, since the scale last changed
    skipped: Array  # () int32, steps in all that were not taken
    inner: Tree


def dynamic_loss_scale(
    optimizer: optax.GradientTransformation, initial: float = 2.0**15, factor: float = 2.0, period: int = 2000
) -> optax.GradientTransformation:
    """Unscale gradients of a scaled loss in float32, and skip steps where one is not finite (Micikevicius et al. 2017,
    arXiv:1710.03740, §3.2): the scale is then divided by `factor`, and multiplied by it after `period` good steps.

    With the factor 1 it stays. The loss must be multiplied by `scale_of(state)`, with the state before the update. With
    powers of two no bit of a float32 gradient changes by scaling and unscaling, as long as nothing over- or underflows.
    Raises ValueError for an initial scale that is not positive and finite, a factor below 1 and a period below 1.
    """
    if not isinstance(initial, Array) and checks.finite("initial", initial) == 0:
        raise ValueError("A loss scale of 0 would leave nothing of the gradients. Begin with 2.0**15.")
    checks.finite("factor", factor, low=1.0)
    checks.whole("period", period)

    def init(params: Params) -> LossScaleState:
        inner = optimizer.init(cast(params, "float32"))
        return LossScaleState(jnp.asarray(initial, jnp.float32), jnp.int32(0), jnp.int32(0), inner)

    def update(gradients: Tree, state: LossScaleState, params: Params | None = None) -> tuple[Tree, LossScaleState]:
        gradients = jax.tree.map(lambda g: g / state.scale, cast(gradients, "float32"))
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]).all()
        updates, inner = optimizer.update(gradients, state.inner, cast(params, "float32"))
        updates = jax.tree.map(lambda u: jnp.where(finite, u, 0), updates)
        inner = jax.tree.map(lambda new, old: jnp.where(finite, new, old), inner, state.inner)
        good_steps = jnp.where(finite, state.good_steps + 1, 0)
        change = jnp.where(finite, jnp.where(good_steps == period, factor, 1.0), 1.0 / factor)
        scale = jnp.clip(state.scale * change, 2.0**-126, 2.0**126)
        return updates, LossScaleState(scale, good_steps % period, state.skipped + ~finite, inner)

    return optax.GradientTransformation(init, update)


def scale_of(state: Tree) -> Array:
    """The number by which to multiply the loss, found in an optimizer's state. Raises ValueError if there is none."""
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, LossScaleState))
    scales = [leaf.scale for leaf in leaves if isinstance(leaf, LossScaleState)]
    if not scales:
        raise ValueError("This state has no loss scale: wrap the optimizer in dynamic_loss_scale.")
    return scales[0]
