"""The recorded experiments of gradient compression: accuracy of all methods, its parts, and lists that fill in.

Four workers train a small network on MNIST-1D by plain descent. All runs of a method, each with a learning rate and a
seed of its own, are trained side by side, as one compiled program.
"""

import functools
import math
import threading
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from dlscale import gradient_compression as room
from dlscale.course.records import Experiment, RunTrials
from dlscale.gradient_compression import Compressor
from dlscale.lab import data, models, train

WORKERS, BATCH, EPOCHS, AXIS = 4, 64, 15, "workers"
MODEL = models.mlp((40, 64, 64, 10))
TUNING_SEEDS = range(200, 204)
TUNED: dict[str, Any] = {"tuning_seeds": TUNING_SEEDS, "score": itemgetter("accuracy")}
RATES = tuple(2.0**-i for i in range(4, -2, -1))
MOMENTUM_RATES = tuple(2.0**-i for i in range(6, 0, -1))  # nine tenths of momentum make steps ten times as long
SEEDS = {"bits": range(11_200, 11_224), "deep": range(11_224, 11_248), "fill": range(11_260, 11_268)}
MOMENTUM, CLIP = 0.9, 1.0  # the limit of a gradient's length, divided by √workers for each of them
WARM_UP = 138  # steps: three epochs


class Arm(NamedTuple):
    """A compressor, the momentum of who updates the parameters, and what codes the workers' sum once more."""

    compressor: Compressor
    momentum: float = 0.0
    of_sum: Compressor | None = None


_with = room.error_feedback
TOP = {share: room.joined(room.top_k(share)) for share in (0.01, 0.001)}
ARMS = {
    "dense": Arm(room.dense()),
    "top 1 %": Arm(TOP[0.01]),
    "top 1 %, feedback": Arm(_with(TOP[0.01])),
    "top 0.1 %, feedback": Arm(_with(TOP[0.001])),
    "1-bit": Arm(room.one_bit()),
    "1-bit, feedback": Arm(_with(room.one_bit())),
    "ternary, nearest": Arm(room.quantised(1, rounding="nearest")),
    "ternary, nearest, feedback": Arm(_with(room.quantised(1, rounding="nearest"))),
    "ternary, random": Arm(room.quantised(1)),
    "ternary, random, feedback": Arm(_with(room.quantised(1))),
    "ternary, random, shrunk, feedback": Arm(_with(room.quantised(1, shrink=True))),
    "TernGrad": Arm(room.quantised(1, clip=2.5)),
    "ternary, nearest, clipped": Arm(room.quantised(1, clip=2.5, rounding="nearest")),
    "7 levels, random": Arm(room.quantised(7)),
    "rank 2, feedback": Arm(_with(room.low_rank(2, AXIS))),
    "1-bit, feedback; sum 1-bit": Arm(_with(room.one_bit()), of_sum=room.one_bit()),
    "1-bit, feedback; sum 1-bit, feedback": Arm(_with(room.one_bit()), of_sum=_with(room.one_bit())),
    "top 1 %, feedback; sum 7 levels": Arm(_with(TOP[0.01]), of_sum=room.quantised(7)),
}


def _masked(compressor: Compressor) -> Compressor:
    return room.factor_masking(room.momentum_correction(_with(compressor), MOMENTUM))


LOCAL, WARM = CLIP / math.sqrt(WORKERS), room.joined(room.warm_up(0.001, 0.25, WARM_UP))
DEEP = {  # Deep Gradient Compression at 0.1 %: a part more in each arm; and the whole gradient, clipped alike
    "dense, clipped": Arm(room.clipped(room.dense(), LOCAL), momentum=MOMENTUM),
    "no feedback": Arm(TOP[0.001], momentum=MOMENTUM),
    "feedback": Arm(_with(TOP[0.001]), momentum=MOMENTUM),
    "+ correction": Arm(room.momentum_correction(_with(TOP[0.001]), MOMENTUM)),
    "+ masking": Arm(_masked(TOP[0.001])),
    "+ clipping": Arm(room.clipped(_masked(TOP[0.001]), LOCAL)),
    "+ warm-up": Arm(room.clipped(_masked(WARM), LOCAL)),
}


def mean_loss(params: Any, x: Array, y: Array) -> Array:
    """Cross-entropy."""
    return train.LOSSES["cross_entropy"](MODEL.apply(params, x), y).mean()


def descent(arm: Arm, rate: Array, seed: Array, rows: Array, x: Array, y: Array) -> tuple[Any, Array]:
    """Trained parameters and the loss of each step. `rows` (steps, workers, examples): which examples each has."""
    params = MODEL.init(jax.random.key(seed))
    states = jax.vmap(lambda i: arm.compressor.init(params, seed * WORKERS + i))(jnp.arange(WORKERS))
    of_sum = arm.of_sum.init(params, seed) if arm.of_sum else ()

    def step(carry: Any, rows: Array) -> tuple[Any, Array]:
        params, velocity, states, of_sum = carry
        losses, gradients = jax.vmap(lambda x, y: jax.value_and_grad(mean_loss)(params, x, y))(x[rows], y[rows])
        messages, states = jax.vmap(arm.compressor.encode, axis_name=AXIS)(states, gradients)
        decoded = jax.vmap(lambda message: arm.compressor.decode(message, params))(messages)
        mean = jax.tree.map(lambda a: a.mean(0), decoded)
        if arm.of_sum:
            message, of_sum = arm.of_sum.encode(of_sum, mean)
            mean = arm.of_sum.decode(message, params)
        velocity = jax.tree.map(lambda v, g: arm.momentum * v + g, velocity, mean)
        return (jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity, states, of_sum), losses.mean()

    carry = params, jax.tree.map(jnp.zeros_like, params), states, of_sum
    (params, *_), losses = jax.lax.scan(step, carry, rows)
    return params, losses


@functools.partial(jax.jit, static_argnums=0)
def side_by_side(arm: Arm, rates: Array, seeds: Array, rows: Array, given: tuple, judge: tuple) -> tuple[Array, Array]:
    """Of each run the share of `judge` that is right, and its losses."""

    def one(rate: Array, seed: Array, rows: Array) -> tuple[Array, Array]:
        params, losses = descent(arm, rate, seed, rows, *given)
        return (MODEL.apply(params, judge[0]).argmax(-1) == judge[1]).mean(), losses

    return jax.vmap(one)(rates, seeds, rows)


@functools.cache
def examples() -> tuple[tuple[np.ndarray, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Training examples without those held out, and what to judge by: those held out ("validation"), or "test"."""
    full = data.load("mnist1d")
    held_out = data.validation_split(full, fraction=0.25)
    judged = {"validation": (held_out.x_test, held_out.y_test), "test": (full.x_test, full.y_test)}
    return (held_out.x_train, held_out.y_train), judged


def order(seed: int, epochs: int = EPOCHS) -> np.ndarray:
    """(steps, workers, examples of one) rows of the examples, each at most once an epoch."""
    count, rng = len(examples()[0][0]), np.random.default_rng(seed)
    whole = [rng.permutation(count)[: count // BATCH * BATCH] for _ in range(epochs)]
    return np.concatenate(whole).reshape(-1, WORKERS, BATCH // WORKERS)


_one_at_a_time = threading.Lock()


@functools.cache
def _runs(arm: Arm, settings: tuple[tuple[float, int], ...], judged_on: str) -> dict[tuple[float, int], dict]:
    """The measures of runs that are trained together, by learning rate and seed."""
    rates, seeds = (np.array(column) for column in zip(*settings, strict=True))
    rows = np.stack([order(seed) for seed in seeds])
    given, judges = examples()
    right, losses = jax.device_get(
        side_by_side(arm, rates.astype(np.float32), seeds.astype(np.uint32), rows, given, judges[judged_on])
    )
    failed = ~np.isfinite(losses).all(1)
    accuracy, last = np.where(failed, 10.0, 100 * right), losses[:, -losses.shape[1] // EPOCHS :].mean(1)
    measures = zip(accuracy, np.where(failed, math.nan, last), losses[:, 20], strict=True)
    return {s: dict(zip(("accuracy", "loss", "early_loss"), m, strict=True)) for s, m in zip(settings, measures)}  # noqa: B905


def _trial(arm: Arm, rates: tuple[float, ...], seeds: range, rate: float, seed: int, judged_on: str) -> dict:
    """The measures of a run, with all those that belong to it: all rates and tuning seeds, or all seeds of a rate."""
    tuning = tuple((r, s) for r in rates for s in TUNING_SEEDS)
    with _one_at_a_time:
        group = tuning if judged_on == "validation" else tuple((rate, s) for s in seeds)
        return _runs(arm, group, judged_on)[rate, seed]


def bits_trial(arm: str, dataset: str, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracy in per cent, chance where it diverged, loss of the last epoch, and that after twenty updates."""
    return _trial(ARMS[arm], RATES, SEEDS["bits"], learning_rate, seed, judged_on)


def deep_trial(arm: str, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """The same for a part of Deep Gradient Compression."""
    return _trial(DEEP[arm], MOMENTUM_RATES, SEEDS["deep"], learning_rate, seed, judged_on)


def bits_plan(run: RunTrials) -> None:
    """Each arm at the best of the same rates, found on held-out examples; then the test examples with other seeds."""
    for arm in ARMS:
        train.tune(run, arm=arm, dataset="mnist1d", learning_rate=RATES, seeds=SEEDS["bits"], **TUNED)


def deep_plan(run: RunTrials) -> None:
    """The same for the parts of Deep Gradient Compression, on a grid of rates of their own."""
    for arm in DEEP:
        train.tune(run, arm=arm, learning_rate=MOMENTUM_RATES, seeds=SEEDS["deep"], **TUNED)


# Lists of many workers: how they fill in, and what the busiest worker sends

TEAM, TEAM_BATCH, TEAM_STEPS, TEAM_RATE = 256, 11, 60, 0.25  # so many steps with the whole gradient, then with lists
TEAMS = tuple(2**i for i in range(1, 9))
FILL_SHARES = (0.001, 0.01, 0.1)


def doubling_bytes(own: np.ndarray) -> np.ndarray:
    """(workers,) bytes sent in all rounds, without a switch to arrays; `own` (workers, n): where each has an entry."""
    workers, size = own.shape
    rounds = [own.reshape(-1, 2**i, size).any(1).sum(1).repeat(2**i) for i in range(workers.bit_length() - 1)]
    return room.ENTRY * np.sum(rounds, 0)


def split_bytes(own: np.ndarray) -> np.ndarray:
    """(workers,) bytes sent: its entries to those who sum them, and then its sum to all, as the shorter of two forms.

    Worker i sums the i-th block of indices.
    """
    workers, size = own.shape
    part = -(-size // workers)
    by_owner = np.pad(own, ((0, 0), (0, part * workers - size))).reshape(workers, workers, -1)
    each = by_owner.sum(2)
    sums = np.minimum(room.ENTRY * by_owner.any(0).sum(1), 4 * part)
    return room.ENTRY * (each.sum(1) - each.diagonal()) + (workers - 1) * sums


WAYS = {"doubling": doubling_bytes, "split": split_bytes}


@jax.jit
def gradients(params: Any, rows: Array, x: Array, y: Array) -> Array:
    """(workers, n): each worker's gradient of the examples in its row, all layers as one array."""
    return jax.vmap(lambda own: ravel_pytree(jax.grad(mean_loss)(params, x[own], y[own]))[0])(rows)


def supports(k: int, params: Any, rows: np.ndarray, x: Array, y: Array) -> tuple[np.ndarray, np.ndarray]:
    """Whether each number (workers, n) is among the k largest of the bare gradient, and of what is due with a memory.

    `rows` (steps, workers, examples): first the whole gradient is used, then, with memories, the k largest of each.
    """
    flat, unravel = ravel_pytree(params)
    flat, memory = np.asarray(flat), np.zeros((rows.shape[1], flat.size), np.float32)

    def few(own: np.ndarray) -> np.ndarray:
        return np.abs(own) >= -np.partition(-np.abs(own), k - 1, axis=1)[:, k - 1 : k]

    for step, own in enumerate(rows[:-1]):
        due = memory + gradients(unravel(flat), own, x, y)
        sent = due if step < TEAM_STEPS else np.where(few(due), due, 0)
        flat, memory = flat - TEAM_RATE * sent.mean(0), due - sent
    bare = np.asarray(gradients(unravel(flat), rows[-1], x, y))
    return few(bare), few(bare + memory)


def fill_trial(share: float, seed: int) -> dict[str, float]:
    """Of the first 2, 4, … workers: the share of all entries that their sum has; bytes of the busiest, of dense ones.

    "bare": lists of the largest of each gradient; "due": of the gradient and what error feedback kept.
    """
    x, y = examples()[0]
    params, rng = MODEL.init(jax.random.key(seed)), np.random.default_rng(seed)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = [rng.permutation(len(x))[: TEAM * TEAM_BATCH].reshape(TEAM, -1) for _ in range(2 * TEAM_STEPS + 1)]
    found = supports(room.count(share, size), params, np.array(rows), x, y)
    measures: dict[str, float] = {}
    for kind, own in zip(("bare", "due"), found, strict=True):
        for workers in TEAMS:
            few, dense = own[:workers], 8 * size * (workers - 1) / workers
            measures[f"{kind}, union, {workers}"] = float(few.any(0).mean())
            measures |= {f"{kind}, {way}, {workers}": float(f(few).max() / dense) for way, f in WAYS.items()}
    return measures


def fill_plan(run: RunTrials) -> None:
    """All shares with the same seeds."""
    run([{"share": share, "seed": seed} for share in FILL_SHARES for seed in SEEDS["fill"]])


# Rounding moves the loss after twenty updates a little; what follows is chaotic.
ALLOWED = {"accuracy": 1.0, "loss": 0.02, "early_loss": 0.02}
BITS = Experiment(
    "gradient_compression-bits", "accuracy with all compressors, tuned, MNIST-1D",
    bits_trial, bits_plan, ALLOWED, chaotic=("accuracy", "loss"), drawn={"judged_on": "test", "arm": "dense"},
    confirms=tuple(
        f"gradient_compression-{name}"
        for name in ("feedback", "one-bit", "unbiased", "coin", "memory", "contraction", "terngrad")
    ),
)  # fmt: skip
DEEP_PARTS = Experiment(
    "gradient_compression-deep", "the parts of Deep Gradient Compression at 0.1 % of the entries, tuned",
    deep_trial, deep_plan, ALLOWED, chaotic=("accuracy", "loss"), drawn={"judged_on": "test"},
    confirms=("gradient_compression-deep", "gradient_compression-correction"),
)  # fmt: skip
FILLED = tuple(f"{kind}, {way}, {workers}" for kind in ("bare", "due") for workers in TEAMS for way in ("union", *WAYS))
FILL = Experiment(
    "gradient_compression-fill", "how the lists of up to 256 workers fill in, with and without error feedback",
    fill_trial, fill_plan, dict.fromkeys(FILLED, 0.02), chaotic=FILLED, drawn={"share": 0.01},
    confirms=("gradient_compression-fill",),
)  # fmt: skip
