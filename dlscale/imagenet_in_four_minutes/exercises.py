"""The exercises of 16_imagenet_in_four_minutes."""

import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from dlscale import imagenet_in_four_minutes as record
from dlscale.costs import Link
from dlscale.course.exercises import Exercise, compare

# The step of the system


STEP_CASES = {  # scale, sizes of the gradient and of the weights, and an entry of the scaled gradient if not 0
    "a gradient whose squares overflow in float16": (1024.0, 0.8, 0.3, 0.0),
    "a gradient whose squares vanish in float16": (1.0, 2e-5, 0.3, 0.0),
    "a gradient that float16 loses once it is unscaled": (1024.0, 5e-9, 0.3, 0.0),
    "weights that are all zero": (1.0, 1.0, 0.0, 0.0),
    "a gradient that is all zero": (1024.0, 0.0, 1.0, 0.0),
    "a gradient with an infinity (the step is skipped)": (1024.0, 1.0, 1.0, math.inf),
    "a gradient with a NaN (the step is skipped)": (1024.0, 1.0, 1.0, math.nan),
}


def _mixed_step(answer: Any) -> str | None:
    rng, rate = np.random.default_rng(1616), 0.5
    for what, (scale, size, weight, entry) in STEP_CASES.items():
        w, v, g = (np.float32(part * rng.normal(size=(24, 8))) for part in (weight, 0.01, size))
        g = np.float16(g * scale)
        if entry:
            g[3, 4] = entry
        weights, velocity = answer(w.copy(), v.copy(), g.copy(), scale, rate)
        given, wanted = (weights, velocity), (w, v)
        if not entry:
            method, unscaled = record.optimizer(record.Switches(lars=1.0), rate, 1), np.float32(g) / np.float32(scale)
            step, (velocity, _) = method.update(unscaled, (v, jnp.int32(0)), w)
            wanted = w + np.asarray(step), np.asarray(velocity)
        for name, ours, right in zip(("weights", "velocity"), given, wanted, strict=True):
            if np.asarray(ours).dtype not in (np.float32, np.float64):
                return f"the {name} must be in float32: these are the master copies."
            if wrong := compare(f"With {what}, the array of {name}", ours, right):
                return wrong
    return None


mixed_step = Exercise(
    id="imagenet_in_four_minutes-mixed_step",
    answer="mixed_step",
    hints=(
        "Which numbers must be float32 before anything is squared?",
        "g = g.astype(np.float32) / scale comes first; np.isfinite(g).all() next; np.linalg.norm gives |w| and |g|.",
    ),
    code="""
def mixed_step(w, v, g, scale, rate):
    g = g.astype(np.float32) / np.float32(scale)
    if not np.isfinite(g).all():
        return w, v
    ours, its = np.linalg.norm(w), np.linalg.norm(g)
    ratio = 1.0
    if ours > 0 and its > 0:
        ratio = record.TRUST * ours / (its + record.DECAY * ours)
    v = np.float32(record.MOMENTUM * v + rate * ratio * (g + record.DECAY * w))
    return w - v, v
""",
    wrong=_mixed_step,
    right="forward and backward in float16, and not a single norm in it: that is the system's first part.",
)


# Tensor fusion


def _fusion(answer: Any) -> str | None:
    cases = [([10, 20, 5, 40, 1], 30), ([10, 20, 5, 40, 1], 0), ([3, 4], math.inf), ([64, 8, 8, 8], 16)]
    for sizes, threshold in cases:
        given = f"With sizes {sizes} and a threshold of {threshold:g},"
        found = [[int(size) for size in message] for message in answer([*sizes], threshold)]
        if [size for message in found for size in message] != sizes or [] in found:
            return f"{given} all gradients must be sent in the order in which they are ready, and no message is empty."
        if found != [[sizes[i] for i in message] for message in record.joined(sizes, threshold)]:
            return f"{given} some message leaves before it has enough bytes, or waits longer than it must."
    return None


fusion = Exercise(
    id="imagenet_in_four_minutes-fusion",
    answer="fuse",
    hints=(
        "Keep a list of what waits. What must be true for it to be sent?",
        "After waiting.append(size), is sum(waiting) >= threshold? What is left after the last gradient?",
    ),
    code="""
def fuse(sizes, threshold):
    messages, waiting = [], []
    for size in sizes:
        waiting.append(size)
        if sum(waiting) >= threshold:
            messages.append(waiting)
            waiting = []
    return messages + [waiting] if waiting else messages
""",
    wrong=_fusion,
    right="few large messages instead of many small ones, and each leaves as early as the threshold allows.",
)


# A record of one's own


def slower(machine: record.Machine, k: float) -> record.Machine:
    """The whole network, in the nodes and between them, at 1/k of its data sheet."""
    near, far = (Link(k * link.latency, link.bandwidth / k) for link in (machine.inside, machine.outside))
    return machine._replace(inside=near, outside=far)


def _plan(answer: Any) -> str | None:
    if not isinstance(answer, dict) or answer.keys() != {"machine", "gpus", "share", "fuse"}:
        return 'a plan is a dict with "machine", "gpus", "share" and "fuse".'
    gpus, share = operator.index(answer["gpus"]), operator.index(answer["share"])  # NumPy's and JAX's, too
    if min(gpus, share) < 1 or gpus % 8 or gpus > 256 or gpus * share > 5120:
        return f"{gpus} GPUs with {share} images each, a batch of {gpus * share:,}, are not allowed."
    machine, network = slower(record.MACHINES[answer["machine"]], 3), record.NETWORKS["ResNet-50"]
    minutes = record.timeline(network, machine, gpus, share, fuse=float(answer["fuse"])).minutes
    return None if minutes <= 4.4 else f"predicted are {minutes:.1f} minutes; 4.4 are the target."


plan = Exercise(
    id="imagenet_in_four_minutes-plan",
    answer="plan",
    hints=(
        "Which machine does the arithmetic fastest, and which `share` uses the whole batch?",
        "On slow links each message costs more before its first byte: try larger thresholds than 4 MB.",
    ),
    code="""
plan = {"machine": "A100, 2020", "gpus": 256, "share": 20, "fuse": 32e6}
""",
    wrong=_plan,
    right="a younger machine, and a threshold that suits its network.",
)
