"""The exercises of 05_precision and its further notebook."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare
from dlscale.precision import FORMATS, bits, quantize


def _decode(answer: Any) -> str | None:
    rng = np.random.default_rng(4)
    for name in ("float16", "bfloat16", "float8_e5m2"):
        for x in rng.normal(size=12) * FORMATS[name].smallest_normal * 2.0 ** np.arange(-2, 22, 2):
            parts, expected = bits(x, name), float(quantize(x, name))
            given = f"The number that {' '.join(parts)} stands for in {name}"
            if wrong := compare(given, answer(*parts), expected, 1e-9):
                return wrong
    return None


decode = Exercise(
    id="precision-decode",
    answer="decode",
    hints=(
        "int(exponent, 2) reads a string of bits as a whole number, and len(exponent) gives the bias.",
        "If the exponent bits are all 0: no 1 before the point, and the power of the smallest normal number, 1 - bias.",
    ),
    code="""
def decode(sign, exponent, mantissa):
    bias = 2 ** (len(exponent) - 1) - 1
    E, M = int(exponent, 2), int(mantissa, 2) / 2 ** len(mantissa)
    size = (1 + M) * 2.0 ** (E - bias) if E > 0 else M * 2.0 ** (1 - bias)
    return -size if sign == "1" else size
""",
    wrong=_decode,
    right="one formula for all formats; what differs is how many bits each part has.",
)


def _dynamic_scale(answer: Any) -> str | None:
    rng = np.random.default_rng(6)
    for period, share in ((3, 0.8), (5, 0.95), (2000, 0.5)):
        scale, good_steps = 2.0**10, 0
        for finite in rng.random(40) < share:
            given = f"scale {scale:g}, {good_steps} good steps, finite {bool(finite)}, period {period}"
            pair = answer(scale, good_steps, bool(finite), period)
            if not isinstance(pair, tuple | list | np.ndarray) or len(pair) != 2:
                return "`update_scale` must return two things: the new scale and the new count of good steps."
            good_steps = good_steps + 1 if finite else 0
            scale *= 1.0 if finite else 0.5
            if good_steps == period:
                scale, good_steps = 2 * scale, 0
            for what, value, expected in zip(("scale", "count"), pair, (scale, good_steps), strict=True):
                if wrong := compare(f"For {given}: the new {what}", value, expected, 1e-9):
                    return wrong
    return None


dynamic_scale = Exercise(
    id="precision-dynamic_scale",
    answer="update_scale",
    hints=(
        "Two cases. If the gradients are not finite: half the scale, and the count starts again at 0.",
        "Else count this step. If the count has reached `period`, double the scale and start again at 0.",
    ),
    code="""
def update_scale(scale, good_steps, finite, period=2000):
    if not finite:
        return scale / 2, 0
    if good_steps + 1 == period:
        return scale * 2, 0
    return scale, good_steps + 1
""",
    wrong=_dynamic_scale,
    right="with `period=1` the scale would double after each good step, until every second step overflows.",
)


def _update(answer: Any) -> str | None:
    for weight, mantissa_bits in ((1.0, 7), (1.0, 10), (1.5, 7), (0.3125, 10), (-6.0, 3), (0.25, 2)):
        expected = 2.0 ** (np.floor(np.log2(abs(weight))) - mantissa_bits - 1)
        given = f"The size for a weight of {weight:g} with {mantissa_bits} mantissa bits"
        if wrong := compare(given, answer(weight, mantissa_bits), expected, 1e-6):
            return wrong
    return None


update = Exercise(
    id="precision-update",
    answer="lost_below",
    hints=(
        "An update is lost if it is less than half the spacing, which depends on the power of two below the weight.",
        "np.floor(np.log2(abs(weight))) is the exponent of that power; the spacing is 2 ** (exponent - mantissa_bits).",
    ),
    code="""
def lost_below(weight, mantissa_bits):
    exponent = np.floor(np.log2(abs(weight)))
    return 2.0 ** (exponent - mantissa_bits) / 2
""",
    wrong=_update,
    right="for 1.0 in bfloat16 it is 1/256: a step up of less than 0.4 % never happens.",
)
