"""The exercises of 05_precision."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _largest(answer: Any) -> str | None:
    for exponent_bits, mantissa_bits in ((5, 10), (8, 7), (5, 2), (4, 3)):
        expected = (2 - 2.0**-mantissa_bits) * 2.0 ** (2 ** (exponent_bits - 1) - 1)
        given = f"{exponent_bits} exponent and {mantissa_bits} mantissa bits"
        if wrong := compare(f"The largest number with {given}", answer(exponent_bits, mantissa_bits), expected, 1e-6):
            return wrong
    return None


largest = Exercise(
    id="precision-largest",
    answer="largest",
    question='Write `largest`, the largest finite number of a format with infinity ("fn" formats reach further). The '
    "highest exponent is kept for infinity, so "
    r"the largest one in use is $2^{e-1} - 1$ with $e$ exponent bits (15 in float16). All mantissa bits are 1 then: "
    r"what is $1 + \tfrac12 + \tfrac14 + \dots$ with $m$ of them?",
    hints=(
        "One more step after the largest mantissa would be 2. A step is 2 ** -mantissa_bits.",
        "(2 - step) times 2 to the largest exponent.",
    ),
    code="""
def largest(exponent_bits, mantissa_bits):
    return (2 - 2.0**-mantissa_bits) * 2.0 ** (2 ** (exponent_bits - 1) - 1)
""",
    wrong=_largest,
    right="65,504 for float16: a sum of squares is soon beyond that.",
)


def _tenth(answer: Any) -> str | None:
    expected = 154 / 128 / 4
    if wrong := compare("The number", answer, expected, tolerance=0.01):
        return wrong
    mantissa = float(answer) * 4 * 128
    if mantissa != round(mantissa):
        return (
            f"{float(answer):.12g} is {mantissa:.9g} steps of 2^-9; a bfloat16 of this size is a whole number of them."
        )
    return compare("The number", answer, expected, tolerance=1e-9)


tenth = Exercise(
    id="precision-tenth",
    answer="three_tenths",
    question=r"By hand: which bfloat16 is nearest to 0.3? It is $1.2 \cdot 2^{-2}$, and the 1.2 gets 7 bits behind the "
    "point. Give the number itself, as a fraction or with all its digits.",
    hints=(
        "Seven bits behind the point: whole multiples of 1/128. Which multiple is nearest to 1.2?",
        "1.2 · 128 = 153.6. Round it, divide by 128 again, and then by 4.",
    ),
    code="three_tenths = round(1.2 * 128) / 128 / 4",
    wrong=_tenth,
    right="0.30078125: wrong in the third digit, and 0.3 is no special case.",
)


def _scale(answer: Any) -> str | None:
    rng = np.random.default_rng(5)
    for largest_gradient in (3e-4, 0.7, 40.0):
        gradients = rng.normal(size=200) * 10.0 ** rng.uniform(-6, 0, 200)
        gradients *= largest_gradient / np.abs(gradients).max()
        given = f"The scale for gradients up to {largest_gradient:g} in size"
        expected = 2.0 ** np.floor(np.log2(65504 / largest_gradient))
        scale = answer(gradients)
        if wrong := compare(given, np.shape(scale), np.shape(0.0)):
            return wrong
        lost = int((np.abs(gradients) * float(scale) > 65504).sum())
        if lost:
            return f"{given} is too large: {lost} of {len(gradients)} become infinite in float16 (signs do not matter)."
        if wrong := compare(given, scale, expected, 1e-6):
            return wrong
    return None


scale = Exercise(
    id="precision-scale",
    answer="best_scale",
    question="Given an array of `gradients`, write `best_scale`: the largest power of two by which the loss can be "
    "multiplied so that none exceeds float16's largest number, 65,504, in size. (Why a power of two? Because then "
    "nothing is rounded by it.)",
    hints=(
        "Only the largest gradient in size matters: np.abs(gradients).max().",
        "2.0 ** np.floor(np.log2(a)) is the largest power of two that is at most a.",
    ),
    code="""
def best_scale(gradients):
    return 2.0 ** np.floor(np.log2(65504 / np.abs(gradients).max()))
""",
    wrong=_scale,
    right="the dynamic scale finds this number by itself, by going one doubling too far now and then.",
)


def _update(answer: Any) -> str | None:
    for weight, mantissa_bits in ((1.0, 7), (1.0, 10), (1.9, 7), (0.3, 10), (-6.0, 3), (0.25, 2)):
        expected = 2.0 ** (np.floor(np.log2(abs(weight))) - mantissa_bits - 1)
        given = f"The size for a weight of {weight:g} with {mantissa_bits} mantissa bits"
        if wrong := compare(given, answer(weight, mantissa_bits), expected, 1e-6):
            return wrong
    return None


update = Exercise(
    id="precision-update",
    answer="lost_below",
    question="A weight is stored with `mantissa_bits` and an update is added to it, then rounded to nearest. Write "
    "`lost_below`: the size under which an update that makes the weight larger in size changes nothing. (Downwards "
    "from an exact power of two half of that is enough, for the lower neighbour is nearer.) First think of a weight of "
    "1.0 in bfloat16, then of 1.9 and of 0.3, and of negative weights.",
    hints=(
        "An update is lost if it is less than half a step. The step depends on the power of two below the weight.",
        "np.floor(np.log2(abs(weight))) is the exponent of that power; a step is 2 ** (exponent - mantissa_bits).",
    ),
    code="""
def lost_below(weight, mantissa_bits):
    exponent = np.floor(np.log2(abs(weight)))
    return 2.0 ** (exponent - mantissa_bits) / 2
""",
    wrong=_update,
    right="for 1.0 in bfloat16 it is 1/256: a step up of less than 0.4 % never happens.",
)


def _bytes(answer: Any) -> str | None:
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        return "The answer must be two numbers: bytes in float32, bytes in mixed precision."
    for what, value in zip(("float32", "mixed precision"), answer, strict=True):
        if wrong := compare(f"The number of bytes in {what}", value, 12):
            return wrong
    return None


memory = Exercise(
    id="precision-memory",
    answer="bytes_per_parameter",
    question="How many bytes does each parameter take during training with momentum? Give two numbers: everything in "
    "float32; and mixed precision, with weights and gradients in float16, and a float32 master copy of the weights "
    "and float32 momentum besides.",
    hints=(
        "Float32: a weight, its gradient and its momentum, four bytes each.",
        "Mixed: two for the weight, two for the gradient, four for the master copy, four for the momentum.",
    ),
    code="bytes_per_parameter = (4 + 4 + 4, 2 + 2 + 4 + 4)",
    wrong=_bytes,
    right="the same! What mixed precision halves are the activations, and what is sent and fetched at each step.",
)
