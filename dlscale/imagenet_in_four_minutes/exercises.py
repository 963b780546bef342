"""The exercises of 16_imagenet_in_four_minutes."""

import itertools
import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from dlscale import imagenet_in_four_minutes as record
from dlscale.costs import Link
from dlscale.course.exercises import Exercise, compare

# The step of the system


def _stepped(w: np.ndarray, v: np.ndarray, g: np.ndarray, scale: float, rate: float) -> tuple[np.ndarray, np.ndarray]:
    """What the course's own optimizer makes of one layer."""
    g = g.astype(np.float32) / np.float32(scale)
    if not np.isfinite(g).all():
        return w, v
    step, (velocity, _) = record.optimizer(record.Switches(lars=1.0), rate, 1).update(g, (v, jnp.int32(0)), w)
    return w + np.asarray(step), np.asarray(velocity)


def step_cases() -> list[tuple[str, np.ndarray, np.ndarray, np.ndarray, float, float]]:
    """What it is, and weights, velocity, scaled gradient in float16, scale and rate."""
    rng, cases = np.random.default_rng(1616), []
    sizes = {
        "a gradient whose squares overflow in float16": (1024.0, 0.8),
        "a gradient whose squares vanish in float16": (1.0, 2e-5),
        "an ordinary gradient": (128.0, 0.01),
        "a gradient that float16 loses once it is unscaled": (1024.0, 1e-8),
    }
    for what, (scale, size) in sizes.items():
        w, v = (rng.normal(size=(24, 8)).astype(np.float32) * part for part in (0.3, 0.01))
        cases.append((what, w, v, np.float16(rng.normal(size=w.shape) * size * scale), scale, 0.5))
    w, v, g = rng.normal(size=(3, 24, 8)).astype(np.float32)
    broken, none = np.float16(g), np.zeros_like(g)
    broken[3, 4] = np.inf
    cases.append(("weights that are all zero", none, v, np.float16(g), 1.0, 0.25))
    cases.append(("a gradient that is all zero", w, v, np.float16(none), 1024.0, 0.25))
    return [*cases, ("a gradient with an infinity (the step is skipped)", w, v, broken, 1024.0, 0.5)]


def _mixed_step(answer: Any) -> str | None:
    for what, w, v, g, scale, rate in step_cases():
        wanted = _stepped(w, v, g, scale, rate)
        try:
            weights, velocity = answer(w.copy(), v.copy(), g.copy(), scale, rate)
        except (TypeError, ValueError) as error:
            return f"with {what}, mixed_step must return new weights and velocity; it failed with {error}"
        for name, ours, right in zip(("weights", "velocity"), (weights, velocity), wanted, strict=True):
            if np.asarray(ours).dtype not in (np.float32, np.float64):
                return f"the {name} must be in float32: these are the master copies."
            if wrong := compare(f"With {what}, the array of {name}", ours, right):
                return wrong
    return None


mixed_step = Exercise(
    id="imagenet_in_four_minutes-mixed_step",
    answer="mixed_step",
    question="Write this step for one layer, `mixed_step(w, v, g, scale, rate)`, in NumPy. `w` and `v` are the weights "
    "and the velocity in float32; `g` is the float16 gradient of `scale` times the loss. Cast `g` to float32 and "
    "divide it by the scale. If anything in it is not finite, return `w` and `v` as they are. The ratio is TRUST · |w| "
    "/ (|g| + DECAY · |w|), or 1 where |w| or |g| is 0. The new velocity is MOMENTUM · v + rate · ratio · (g + DECAY · "
    "w). The new weights are w minus the new velocity. Return both. The constants are `record.TRUST` and so on.",
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


# What each part is worth


def games() -> list[tuple[tuple[str, ...], dict[tuple[str, ...], Any]]]:
    """Parts, and what each set of them is worth: a number, or one for each of five seeds. Parts help and hinder."""
    rng, found = np.random.default_rng(1953), []
    for parts, shape in ((("a", "b", "c"), ()), (("schedule", "lars", "spared", "extra_norm"), (5,))):
        sets = [tuple(sorted(s)) for size in range(len(parts) + 1) for s in itertools.combinations(parts, size)]
        worth = [60 + 6 * len(s) + 9 * rng.normal(size=shape) for s in sets]
        found.append((parts, {s: w if shape else float(w) for s, w in zip(sets, worth, strict=True)}))
    return found


def _shapley(answer: Any) -> str | None:
    for parts, worth in games():
        shares = answer(dict(worth), parts)
        if not isinstance(shares, dict) or shares.keys() != set(parts):
            return f"for the parts {', '.join(parts)} the answer is a dict with a share for each of them."
        wanted = record.shapley({frozenset(s): w for s, w in worth.items()}, parts)
        for part in parts:
            if wrong := compare(f"With {len(parts)} parts, the share of {part!r}", shares[part], wanted[part]):
                return f"{wrong} Do your shares add up to all minus none?"
    return None


shapley = Exercise(
    id="imagenet_in_four_minutes-shapley",
    answer="shapley_values",
    question="Write it from its definition, `shapley_values(worth, parts)`: a dict that gives each part, by name, its "
    "Shapley value. What a system is worth is a number, or an array with one number for each seed. It stands in the "
    "dict `worth` under the tuple of the parts that are on, in alphabetical order: `worth[()]` has nothing on, and "
    "`worth[tuple(sorted(some))]` has the parts in `some`.",
    hints=(
        "`itertools.permutations(parts)` gives all orders. What did the third part of an order bring?",
        "The part at a place of an order brings what the parts up to it, itself included, are worth, minus what those "
        "before it are worth: `order[: place + 1]` and `order[:place]`. A part's value is the mean over all orders.",
    ),
    code="""
def shapley_values(worth, parts):
    brought = {part: [] for part in parts}
    for order in itertools.permutations(parts):
        for place, part in enumerate(order):
            before, after = (tuple(sorted(order[:n])) for n in (place, place + 1))
            brought[part].append(worth[after] - worth[before])
    return {part: np.mean(found, axis=0) for part, found in brought.items()}
""",
    wrong=_shapley,
    right="every order counts alike, and the shares add up to the whole.",
)


# Tensor fusion


def fusion_cases() -> list[tuple[list[int], float]]:
    """Sizes of gradients, in the order in which they are ready, and a threshold."""
    rng = np.random.default_rng(2018)
    random = [(rng.integers(1, 100, 20).tolist(), float(rng.integers(50, 300))) for _ in range(5)]
    return [([10, 20, 5, 40, 1], 30), ([10, 20, 5, 40, 1], 0), ([3, 4], math.inf), ([64, 8, 8, 8], 16), *random]


def _fusion(answer: Any) -> str | None:
    for sizes, threshold in fusion_cases():
        given = f"With sizes {sizes if len(sizes) < 6 else [*sizes[:5], '…']} and a threshold of {threshold:g},"
        try:
            found = [[int(size) for size in message] for message in answer([*sizes], threshold)]
        except TypeError:
            return f"{given} fuse must return a list of messages, each a list of sizes."
        if list(itertools.chain(*found)) != sizes or [] in found:
            return f"{given} all gradients must be sent in the order in which they are ready, and no message is empty."
        wanted = [[sizes[i] for i in message] for message in record.joined(sizes, threshold)]
        if found != wanted:
            return f"{given} some message leaves before it has enough bytes, or waits longer than it must."
    return None


fusion = Exercise(
    id="imagenet_in_four_minutes-fusion",
    answer="fuse",
    question="Write tensor fusion, `fuse(sizes, threshold)`. `sizes` are the bytes of the gradients, in the order in "
    "which the backward pass makes them ready. Gradients wait until together they have at least `threshold` bytes, and "
    "then travel in one message. Whatever waits at the end is sent, too. Return a list of messages, each a list of "
    "sizes.",
    hints=(
        "Keep a list of what waits. What must be true for it to be sent?",
        "For each size: waiting.append(size); if sum(waiting) >= threshold, put `waiting` on the list of messages and "
        "begin an empty one. What is left after the last gradient?",
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

TARGET = {"minutes": 4.4, "batch": 5120, "gpus": 256}  # two thirds of the paper's minutes, an eighth of its GPUs
SLOWER = 3  # the network at a third of its data sheet


def slower(machine: record.Machine, k: float) -> record.Machine:
    """The whole network, in the nodes and between them, at 1/k of its data sheet."""
    near, far = (Link(k * link.latency, link.bandwidth / k) for link in (machine.inside, machine.outside))
    return machine._replace(inside=near, outside=far)


def _plan(answer: Any) -> str | None:
    if not isinstance(answer, dict) or answer.keys() != {"machine", "gpus", "share", "fuse"}:
        return 'a plan is a dict with "machine", "gpus", "share" and "fuse".'
    if answer["machine"] not in record.MACHINES:
        return f"the machines are {', '.join(map(repr, record.MACHINES))}."
    try:  # NumPy's and JAX's whole numbers, too
        gpus, share = operator.index(answer["gpus"]), operator.index(answer["share"])
    except TypeError:
        return "gpus and share must be whole numbers, written without a point."
    if min(gpus, share) < 1 or gpus % 8 or gpus > TARGET["gpus"] or gpus * share > TARGET["batch"]:
        return f"{gpus} GPUs with {share} images each, a batch of {gpus * share:,}, are not allowed."
    machine, network = slower(record.MACHINES[answer["machine"]], SLOWER), record.NETWORKS["ResNet-50"]
    minutes = record.timeline(network, machine, gpus, share, fuse=float(answer["fuse"])).minutes
    if minutes > TARGET["minutes"]:
        return f"predicted are {minutes:.1f} minutes; {TARGET['minutes']:g} are the target."
    return None


plan = Exercise(
    id="imagenet_in_four_minutes-plan",
    answer="plan",
    question='Plan a record of your own: `plan = {"machine": …, "gpus": …, "share": …, "fuse": …}`. The machine is a '
    "key of `record.MACHINES`. GPUs come in nodes of eight. `share` is the number of images on each GPU, and `fuse` is "
    "the threshold in bytes. Your links are slow: `exercises.slower(machine, 3)` has a third of their bandwidth and "
    "three times their latency. The ring waits in every round. ResNet-50 must be predicted to train in 4.4 minutes, "
    "with at most 256 GPUs and a batch of at most 5,120.",
    hints=(
        "Try `record.timeline(RESNET, exercises.slower(record.MACHINES[machine], 3), gpus, share, fuse=fuse).minutes`.",
        "On slow links each message costs more before its first byte: try larger thresholds than 4 MB.",
    ),
    code="""
plan = {"machine": "A100, 2020", "gpus": 256, "share": 20, "fuse": 32e6}
""",
    wrong=_plan,
    right="a younger machine, and a threshold that suits its network.",
)
