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
    question='Write `decode`, which reads a number from three strings of bits, such as `decode("0", "01011", '
    '"1001100110")`. The lengths of the strings tell you the format. Mind the subnormal numbers. No infinity or NaN.',
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
            if not isinstance(pair, tuple | list) or len(pair) != 2:
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
    question="Write that rule, in plain Python. `finite` says whether all gradients of this step were finite. "
    "`good_steps` counts the good steps before this one, since the scale last changed. Return the new scale and the "
    "new count. Double the scale when the count, with this step, reaches `period`. Whenever the scale changes, the "
    "count starts again at 0.",
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
    right="the scale climbs until a gradient overflows, falls, and climbs again: it stays near the best one.",
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
    question="Write `lost_below(weight, mantissa_bits)`, which returns the size below which an update is lost. The "
    "spacing is the power of two from section 1 times epsilon, and epsilon is $2^{-m}$ for $m$ mantissa bits. Consider"
    " updates that move the weight away from zero.",
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


def _random(answer: Any) -> str | None:
    rng = np.random.default_rng(8)
    for x, fraction_bits in ((0.3, 4), (-1.7, 3), (-0.01, 5), (2.99, 10), (-1.25, 3), (0.5, 1)):
        step, given = 2.0**-fraction_bits, f"{x:g} with {fraction_bits} fraction bits"
        rounded = np.asarray(answer(np.full((200, 100), x), fraction_bits, rng), float)
        if wrong := compare(f"The shape of 200 × 100 times {given}", rounded.shape, (200, 100)):
            return wrong
        low = np.floor(x / step) * step
        if not np.isin(rounded, [low, x] if low == x else [low, low + step]).all():
            return f"{given}: some numbers go elsewhere than to one of the two neighbours (a multiple is its own)."
        spread = np.sqrt((x - low) * (low + step - x))  # of a single draw; of means over rows and columns, and of all
        off = [np.abs(rounded.mean(axis) - x).max() * np.sqrt(n) for axis, n in ((0, 200), (1, 100), (None, 20_000))]
        if max(off) > 5.5 * spread:
            return f"{given}, 20,000 draws: the mean {rounded.mean():.5g}, or that of a row or column, is too far off."
    return None


random = Exercise(
    id="precision-random",
    answer="at_random",
    question="Write `at_random(x, fraction_bits, rng)`, random rounding of an array of floats, some of them negative. "
    "Each number needs a random draw of its own from `rng`, a `np.random.Generator`. Multiples of the spacing "
    "$2^{-FL}$ stay as they are, and nothing here is too large.",
    hints=(
        "Count in steps: scaled = x * 2.0**fraction_bits; np.floor gives the lower neighbour, of negative numbers too.",
        "rng.random(x.shape) < p is true with the probability p, for each number by itself.",
    ),
    code="""
def at_random(x, fraction_bits, rng):
    scaled = x * 2.0**fraction_bits
    lower = np.floor(scaled)
    up = rng.random(x.shape) < scaled - lower
    return (lower + up) / 2.0**fraction_bits
""",
    wrong=_random,
    right="each result is wrong by up to a step, and their mean is right: small updates add up.",
)


def _summing(answer: Any) -> str | None:
    rng = np.random.default_rng(9)
    for what, values in (("0.1, 3,000 times", np.full(3000, 0.1)), ("2,500 numbers", rng.uniform(0, 0.3, 2500))):
        pairs = np.asarray(answer(len(values)))
        if pairs.shape != (len(pairs), 2) or pairs.dtype.kind not in "iu" or len(pairs) > 2 * len(values):
            return "`adding_order` must return pairs (i, j) of whole numbers, at most two for each number."
        if pairs.min() < 0 or pairs.max() >= len(values) or (pairs[:, 0] == pairs[:, 1]).any():
            return f"{what}: the places go from 0 to {len(values) - 1}, and the two of a pair must differ."
        totals = values.astype(np.float16)
        exact = float(totals.sum(dtype=float))
        for i, j in pairs.tolist():
            totals[i], totals[j] = totals[i] + totals[j], 0
        if totals[1:].any():
            return f"{what}: {np.count_nonzero(totals[1:])} numbers have not come to place 0."
        if wrong := compare(f"The sum of {what},", totals[0], exact, 1 / 100):
            return wrong
    return None


summing = Exercise(
    id="precision-summing",
    answer="adding_order",
    question="Write `adding_order(count)`, a list of pairs (i, j). Each pair adds the number at place j to the number "
    "at place i, rounds to float16, and leaves 0 at place j. At the end everything must be at place 0, and wrong by at "
    "most 1 %. Take at most two additions for each number.",
    hints=(
        "A sum goes wrong where a small number meets a large total. In which order do numbers of like size meet?",
        "Add neighbours in pairs, then the sums of pairs in pairs, and so on; or chunks first, then their totals.",
    ),
    code="""
def adding_order(count):
    pairs, apart = [], 1
    while apart < count:
        pairs += [(i, i + apart) for i in range(0, count - apart, 2 * apart)]
        apart *= 2
    return pairs
""",
    wrong=_summing,
    right="with as many additions as the naive sum. Only the order differs.",
)
