"""The exercises of 16_imagenet_in_four_minutes."""

import functools
import itertools
import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from dlscale import imagenet_in_four_minutes as record
from dlscale.costs import Link
from dlscale.course.exercises import Exercise, compare
from dlscale.imagenet_in_four_minutes import DECAY, MOMENTUM, TRUST  # noqa: F401  the answer's code uses them

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
    for what, scale, size in (
        ("a gradient whose squares overflow in float16", 1024.0, 0.8),
        ("a gradient whose squares vanish in float16", 1.0, 2e-5),
        ("an ordinary gradient", 128.0, 0.01),
        ("a gradient that float16 loses once it is unscaled", 1024.0, 1e-8),
    ):
        w, v = (rng.normal(size=(24, 8)).astype(np.float32) * part for part in (0.3, 0.01))
        cases.append((what, w, v, np.float16(rng.normal(size=w.shape) * size * scale), scale, 0.5))
    w, v, g = (rng.normal(size=(24, 8)).astype(np.float32) for _ in range(3))
    cases.append(("weights that are all zero", np.zeros_like(w), v, np.float16(g), 1.0, 0.25))
    cases.append(("a gradient that is all zero", w, v, np.zeros_like(w, np.float16), 1024.0, 0.25))
    broken = np.float16(g)
    broken[3, 4] = np.inf
    cases.append(("a gradient with an infinity (the step is skipped)", w, v, broken, 1024.0, 0.5))
    return cases


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
    question="Write the step of the system for one layer, `mixed_step(w, v, g, scale, rate)`, in NumPy. w and v are "
    "the master weights and the velocity, float32; g is the float16 gradient of `scale` times the loss. Cast g to "
    "float32 and divide it by the scale. If anything in it is not finite, return w and v as they are. The ratio is "
    "TRUST · |w| / (|g| + DECAY · |w|), or 1 where |w| or |g| is 0. The new velocity is MOMENTUM · v + rate · ratio · "
    "(g + DECAY · w), the new weights are w minus that. Return both.",
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
    ratio = TRUST * ours / (its + DECAY * ours) if ours > 0 and its > 0 else 1.0
    v = np.float32(MOMENTUM * v + rate * ratio * (g + DECAY * w))
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
    answer="shapley_by_hand",
    question="Write `shapley_by_hand(worth, parts)`: a dict that gives each part, by name, its Shapley value. What a "
    "system is worth is a number, or an array with one for each seed, and stands in the dict `worth` under the tuple "
    "of the parts that are on, in alphabetical order: `worth[()]` has nothing on, and `worth[tuple(sorted(some))]` "
    "has the parts in `some`.",
    hints=(
        "`itertools.permutations(parts)` gives all orders. What did the third part of an order bring?",
        "The part at a place of an order brings what the parts up to it, itself included, are worth, minus what those "
        "before it are worth: `order[: place + 1]` and `order[:place]`. A part's value is the mean over all orders.",
    ),
    code="""
def shapley_by_hand(worth, parts):
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


# How well it scales


def _efficiency(answer: Any) -> str | None:
    cases = [(90, 1_281_167, 8.7, 1024, 218.0), (90, 1_281_167, 6.6, 2048, 218.0), (10, 50_000, 2.0, 16, 500.0)]
    for epochs, images, minutes, gpus, alone in cases:
        wanted = epochs * images / (60 * minutes) / (gpus * alone)
        if wrong := compare(
            f"For {gpus} GPUs and {minutes} minutes, the efficiency",
            answer(epochs, images, minutes, gpus, alone),
            wanted,
        ):
            return wrong
    return None


efficiency = Exercise(
    id="imagenet_in_four_minutes-efficiency",
    answer="efficiency",
    question="Write `efficiency(epochs, images, minutes, gpus, alone)`: the images a second of the whole system, "
    "divided by what as many GPUs would do if each were as fast as one `alone` (images a second).",
    hints=("How many images pass in all, and in how many seconds?", "epochs · images / (60 · minutes) is the speed."),
    code="""
def efficiency(epochs, images, minutes, gpus, alone):
    return epochs * images / (60 * minutes) / (gpus * alone)
""",
    wrong=_efficiency,
    right="with it, a record tells how much of its machine it used.",
)


# A threshold for a network


def on_network(latency: float, bandwidth: float) -> record.Machine:
    """GPUs of the paper on a network with these two constants; products reach half of the peak."""
    return record.MACHINES["P40, 2016"]._replace(outside=Link(latency, bandwidth))


def networks() -> list[tuple[float, float]]:
    """Fresh networks: a latency and a bandwidth each."""
    rng = np.random.default_rng(1024)
    return [(float(2e-6 * 2 ** rng.uniform(0, 4)), float(3e9 * 2 ** rng.uniform(0, 3))) for _ in range(10)]


def step_seconds(latency: float, bandwidth: float, fuse: float) -> float:
    """A step of ResNet-50 on 512 GPUs, 16 images each, float16, all-reduces around a ring."""
    machine = on_network(latency, bandwidth)
    return record.predict(record.NETWORKS["ResNet-50"], machine, 512, 16, fuse=fuse, algorithm="ring").step


THRESHOLDS = (0.0, *(float(2.0**exponent) for exponent in np.arange(16, 27, 0.25)), math.inf)
SLACK = 1.03


@functools.cache
def _best(latency: float, bandwidth: float) -> float:
    return min(step_seconds(latency, bandwidth, fuse) for fuse in THRESHOLDS)


def _threshold(answer: Any) -> str | None:
    for latency, bandwidth in networks():
        best = _best(latency, bandwidth)
        fuse = float(np.asarray(answer(latency, bandwidth)))
        if math.isnan(fuse) or fuse < 0:
            return f"a threshold is a number of bytes from 0 on, not {fuse!r}."
        yours = step_seconds(latency, bandwidth, fuse)
        if yours > SLACK * best:
            about = f"{1e6 * latency:.0f} µs and {bandwidth / 1e9:.1f} GB/s"
            return f"on a network of {about} your step takes {1e3 * yours:.1f} ms; {1e3 * best:.1f} ms are possible."
    return None


threshold = Exercise(
    id="imagenet_in_four_minutes-threshold",
    answer="threshold",
    question="**Open.** Write `threshold(latency, bandwidth)`: the bytes at which joined gradients are sent, for "
    "ResNet-50 on 512 GPUs, 16 images each, in float16, around a ring, on a network with this latency (seconds) and "
    "bandwidth (bytes a second). It is judged on ten networks: on each, the predicted step may take at most 3 % "
    "longer than with the best threshold. No single number does that, and no smooth formula: the minutes jump where "
    "two gradients begin to share a message. Search.",
    hints=(
        "What does a message too many cost, and what does a message that begins too late?",
        "`exercises.step_seconds(latency, bandwidth, fuse)` predicts a step. How many thresholds must you try?",
    ),
    code="""
def threshold(latency, bandwidth):
    return min(2.0 ** np.arange(20, 27, 0.25), key=lambda fuse: exercises.step_seconds(latency, bandwidth, fuse))
""",
    wrong=_threshold,
    right="a threshold belongs to a network, as a rate belongs to a batch.",
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
    if min(gpus, share) < 1:
        return "gpus and share must be at least 1."
    if gpus % 8:
        return f"GPUs come in nodes of eight: {gpus} is no multiple of it."
    if gpus > TARGET["gpus"] or gpus * share > TARGET["batch"]:
        return f"{gpus} GPUs with {share} images each are a batch of {gpus * share:,}: more than is allowed."
    machine, network = slower(record.MACHINES[answer["machine"]], SLOWER), record.NETWORKS["ResNet-50"]
    minutes = record.predict(network, machine, gpus, share, fuse=float(answer["fuse"])).minutes
    if minutes > TARGET["minutes"]:
        return f"predicted are {minutes:.1f} minutes; {TARGET['minutes']:g} are the target."
    return None


plan = Exercise(
    id="imagenet_in_four_minutes-plan",
    answer="plan",
    question='Your own record: `plan = {"machine": …, "gpus": …, "share": …, "fuse": …}`, a key of record.MACHINES, '
    "GPUs in nodes of eight, images on each, and the bytes at which joined gradients are sent. The whole network comes "
    "to a third of its data sheet. ResNet-50 in float16 with the hybrid all-reduce must be predicted to train in 4.4 "
    "minutes or less, two thirds of the paper's 6.6, with at most 256 GPUs, an eighth of theirs, and a batch of at "
    "most 5,120, twenty times 256.",
    hints=(
        "Which machine's images a second, times 256, would do? Then look at what is sent after the last gradient.",
        "On a slow network each message costs more before its first byte: try larger thresholds than 4 MB.",
    ),
    code="""
plan = {"machine": "A100, 2020", "gpus": 256, "share": 20, "fuse": 32e6}
""",
    wrong=_plan,
    right="a younger machine, and a threshold that suits its network.",
)
