"""The recorded experiments of notebook 11: accuracy against bytes, Deep Gradient Compression, lists that fill in."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
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

WORKERS, BATCH, EPOCHS, AXIS = 4, 64, 20, "workers"
MODELS = {"mnist1d": models.mlp((40, 64, 64, 10)), "digits": models.mlp((64, 64, 64, 10))}
TUNING_SEEDS, TEST_SEEDS = range(200, 202), range(30, 40)
DEEP_SEEDS, FRESH_SEEDS = range(50, 60), range(70, 86)  # fresh: for claims whose arms had been seen on other seeds
RATES = tuple(2.0**-i for i in range(5, -1, -1))
MOMENTUM_RATES = tuple(2.0**-i for i in range(8, 0, -1))  # nine tenths of momentum make steps ten times as long
MOMENTUM, CLIP = 0.9, 1.0  # the limit of a gradient's length, divided by √workers for each of them
WARM_UP = 184  # steps: four epochs of MNIST-1D


class Arm(NamedTuple):
    """A compressor, and how the workers' messages are joined and used."""

    compressor: Compressor
    voted: bool = False
    momentum: float = 0.0  # of who updates the parameters


def _with(compressor: Compressor) -> Compressor:
    return room.error_feedback(compressor)


TOP = {share: room.joined(room.top_k(share)) for share in (0.1, 0.01, 0.001)}
ARMS = {
    "dense": Arm(room.dense()),
    "top 10 %, feedback": Arm(_with(TOP[0.1])),
    "top 1 %, feedback": Arm(_with(TOP[0.01])),
    "top 1 %": Arm(TOP[0.01]),
    "top 1 % of each layer": Arm(room.top_k(0.01)),
    "top 0.1 %, feedback": Arm(_with(TOP[0.001])),
    "random 10 %": Arm(room.joined(room.random_k(0.1))),
    "random 10 %, feedback": Arm(_with(room.joined(room.random_k(0.1, unbiased=False)))),
    "1-bit, feedback": Arm(_with(room.one_bit())),
    "1-bit": Arm(room.one_bit()),
    "sign, vote": Arm(room.sign(), voted=True),
    "TernGrad": Arm(room.terngrad()),
    "ternary, stochastic": Arm(room.quantised(1)),
    "ternary, nearest": Arm(room.quantised(1, rounding="nearest")),
    "ternary, nearest, clipped": Arm(room.quantised(1, clip=2.5, rounding="nearest")),
    "ternary, nearest, feedback": Arm(_with(room.quantised(1, rounding="nearest"))),
    "ternary, stochastic, feedback": Arm(_with(room.quantised(1))),
    "3 levels, stochastic": Arm(room.quantised(3)),
    "7 levels, stochastic": Arm(room.quantised(7)),
    "7 levels, nearest": Arm(room.quantised(7, rounding="nearest")),
    "QSGD, 64 levels": Arm(room.quantised(64, "two")),
    "rank 1, feedback": Arm(_with(room.low_rank(1, AXIS))),
    "rank 2, feedback": Arm(_with(room.low_rank(2, AXIS))),
    "rank 2": Arm(room.low_rank(2, AXIS)),
}
CLIPPED_ALIKE = ("TernGrad", "ternary, nearest, clipped")


# Messages whose bytes hang on the numbers: counted in each step of the training


def counting(compressor: Compressor, count: Callable[[Any, Any], Array]) -> Compressor:
    """The same, its state with the bytes of all messages so far: `count(message, gradient)` says how many travel."""

    def encode(state: Any, gradient: Any) -> tuple[Any, Any]:
        message, inner = compressor.encode(state[1], gradient)
        return message, (state[0] + count(message, gradient), inner)

    init = lambda gradient, seed=0: (jnp.float32(0), compressor.init(gradient, seed))  # noqa: E731
    return Compressor(init, encode, compressor.decode)


def listed_bytes(message: list[room.Sparse], gradient: Any) -> Array:
    """Of lists, without what fills them up."""
    return room.ENTRY * sum((part.indices != room.NOWHERE).sum() for part in message)


def elias_bytes(levels: int, message: list[Any], gradient: Any) -> Array:
    """Of codes in Elias' way: for each that is not 0 the gap before it, a sign, its magnitude; a scale an array."""
    bits = 0
    for part, x in zip(message, jax.tree.leaves(gradient), strict=True):
        codes = room.unpack(part["codes"], x.size).astype(jnp.int32) - levels
        places = jnp.arange(x.size)
        before = jax.lax.cummax(jnp.where(codes == 0, -1, places))
        gaps = places - jnp.append(-1, before[:-1])
        bits += 32 + jnp.where(codes == 0, 0, omega_bits(gaps) + 1 + omega_bits(jnp.abs(codes))).sum()
    return bits / 8


def omega_bits(numbers: Array) -> Array:
    """Bits of whole numbers from 1 to 65,535 in Elias' omega code: a number, before it its length, and so on."""
    bits = jnp.ones_like(numbers)
    for _ in range(3):
        length = 32 - jax.lax.clz(numbers)
        bits, numbers = bits + jnp.where(numbers > 1, length, 0), jnp.where(numbers > 1, length - 1, 1)
    return bits


LIMITS = (0.05, 0.2, 0.8)  # the last only with feedback: hardly a bare gradient's entry reaches it
VARYING = {
    f"threshold {limit:g}, feedback": Arm(counting(_with(room.threshold(limit)), listed_bytes)) for limit in LIMITS
}
VARYING |= {f"threshold {limit:g}": Arm(counting(room.threshold(limit), listed_bytes)) for limit in LIMITS[:2]}
VARYING["QSGD, 64 levels"] = Arm(counting(room.quantised(64, "two"), functools.partial(elias_bytes, 64)))
ON_DIGITS = [arm for arm in ARMS if arm not in VARYING]


def _deep(share: float) -> dict[str, Arm]:
    """Deep Gradient Compression: a part more in each arm; then all parts but the warm-up and one other."""
    entries, local = room.joined(room.top_k(share)), CLIP / math.sqrt(WORKERS)
    warm = room.joined(room.warm_up(share, 0.25, WARM_UP))
    corrected = room.momentum_correction(_with(entries), MOMENTUM)
    masked = room.factor_masking(corrected)
    warmed = room.factor_masking(room.momentum_correction(_with(warm), MOMENTUM))
    return {
        "no feedback": Arm(entries, momentum=MOMENTUM),
        "feedback": Arm(_with(entries), momentum=MOMENTUM),
        "+ correction": Arm(corrected),
        "+ masking": Arm(masked),
        "+ clipping": Arm(room.clipped(masked, local)),
        "+ warm-up": Arm(room.clipped(warmed, local)),
        "without feedback": Arm(room.clipped(room.factor_masking(room.momentum_correction(entries, MOMENTUM)), local)),
        "without correction": Arm(room.clipped(_with(entries), local), momentum=MOMENTUM),
        "without masking": Arm(room.clipped(corrected, local)),
    }


DEEP = {
    "dense": Arm(room.dense(), momentum=MOMENTUM),
    "dense, clipped": Arm(room.clipped(room.dense(), CLIP / math.sqrt(WORKERS)), momentum=MOMENTUM),
}
DEEP |= {f"{100 * share:g} %, {name}": arm for share in (0.01, 0.001) for name, arm in _deep(share).items()}

# Where compression hurts: top 1 % without feedback in one third of the training, or in one layer, exact elsewhere
WHEN = {"first third": (0, 1 / 3), "middle third": (1 / 3, 2 / 3), "last third": (2 / 3, 1)}
LAYERS = ("dense1", "dense2", "output")
HURT = "top 1 %"


def mean_loss(model: models.Model, params: Any, x: Array, y: Array) -> Array:
    """Cross-entropy."""
    return train.LOSSES["cross_entropy"](model.apply(params, x), y).mean()


def descent(
    model: models.Model, arm: Arm, rate: Array, seed: Array, rows: Array, on: Array, where: Any, x: Array, y: Array
) -> tuple[Any, Array, Any]:
    """Trained parameters, the loss of each step, and the workers' last states.

    `rows` (steps, workers, examples): which examples each worker has. Compressed are only the steps that are `on`, and
    the layers whose leaf of `where` is true; elsewhere the exact mean is used.
    """
    params = model.init(jax.random.key(seed))
    states = jax.vmap(lambda i: arm.compressor.init(params, seed * WORKERS + i))(jnp.arange(WORKERS))

    def step(carry: Any, given: tuple[Array, Array]) -> tuple[Any, Array]:
        params, velocity, states = carry
        rows, now = given
        losses, gradients = jax.vmap(
            lambda x, y: jax.value_and_grad(functools.partial(mean_loss, model))(params, x, y)
        )(x[rows], y[rows])
        messages, states = jax.vmap(arm.compressor.encode, axis_name=AXIS)(states, gradients)
        decoded = jax.vmap(lambda message: arm.compressor.decode(message, params))(messages)
        joined = jax.tree.map(room.vote if arm.voted else lambda a: a.mean(0), decoded)
        mean = jax.tree.map(lambda a, b, there: jnp.where(now & there, a, b.mean(0)), joined, gradients, where)
        velocity = jax.tree.map(lambda v, g: arm.momentum * v + g, velocity, mean)
        return (jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity, states), losses.mean()

    carry = params, jax.tree.map(jnp.zeros_like, params), states
    (params, _, states), losses = jax.lax.scan(step, carry, (rows, on))
    return params, losses, states


@functools.partial(jax.jit, static_argnums=(0, 1))
def descend(model: models.Model, arm: Arm, *given: Any) -> tuple[Any, Array]:
    """Trained parameters and the loss of each step of a `descent`."""
    return descent(model, arm, *given)[:2]


_descend_counting = functools.partial(jax.jit, static_argnums=(0, 1))(descent)


@functools.cache
def examples(dataset: str) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Training examples without those held out, and what to judge by: those held out ("validation"), or "test"."""
    full = data.load(dataset)
    held_out = data.validation_split(full, fraction=0.25)
    flat = lambda x: np.asarray(x).reshape(len(x), -1)  # noqa: E731
    judged = {"validation": held_out, "test": full}
    return (flat(held_out.x_train), held_out.y_train), {k: (flat(d.x_test), d.y_test) for k, d in judged.items()}


def order(dataset: str, seed: int, epochs: int = EPOCHS) -> np.ndarray:
    """(steps, workers, examples of one) rows of the examples, each at most once an epoch."""
    count, rng = len(examples(dataset)[0][0]), np.random.default_rng(seed)
    whole = [rng.permutation(count)[: count // BATCH * BATCH] for _ in range(epochs)]
    return np.concatenate(whole).reshape(-1, WORKERS, BATCH // WORKERS)


@functools.partial(jax.jit, static_argnums=0)
def _accuracy(model: models.Model, params: Any, x: Array, y: Array) -> Array:
    return (model.apply(params, x).argmax(-1) == y).mean()


def leaves(model: models.Model, layers: Sequence[str] | None = None) -> Any:
    """For each array of the parameters: is its layer among these? All of them by default."""
    shapes: Mapping = jax.eval_shape(model.init, jax.random.key(0))
    chosen = {name: layers is None or name in layers for name in shapes}
    return {name: dict.fromkeys(own, chosen[name]) for name, own in shapes.items()}


def _trial(
    arm: Arm, dataset: str, learning_rate: float, seed: int, judged_on: str, when: str = "always", layer: str = "all",
    how: Callable = descend,
) -> dict[str, float]:  # fmt: skip
    model, (x, y), rows = MODELS[dataset], examples(dataset)[0], order(dataset, seed)
    begin, end = WHEN.get(when, (0, 1))
    at = np.arange(len(rows)) / len(rows)
    where = leaves(model, None if layer == "all" else [layer])
    on = (begin <= at) & (at < end)
    params, losses, *counted = how(model, arm, np.float32(learning_rate), np.uint32(seed), rows, on, where, x, y)
    losses = np.asarray(losses)
    failed = not np.isfinite(losses).all()
    judged = examples(dataset)[1][judged_on]
    accuracy = 100 / 10 if failed else 100 * float(_accuracy(model, params, *judged))
    last = math.nan if failed else float(losses[-len(losses) // EPOCHS :].mean())
    measures = {"accuracy": accuracy, "loss": last, "early_loss": float(losses[20])}
    return measures | ({"bytes": float(counted[0][0].mean()) / len(rows)} if counted else {})


def bits_trial(
    arm: str, dataset: str, learning_rate: float, seed: int, judged_on: str, when: str = "always", layer: str = "all"
) -> dict[str, float]:
    """Accuracy in percent, chance where it diverged, loss of the last epoch, and that after twenty updates."""
    return _trial(ARMS[arm], dataset, learning_rate, seed, judged_on, when, layer)


def varying_trial(arm: str, dataset: str, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """The same, and the bytes that a worker sent in a step, on average over the training."""
    return _trial(VARYING[arm], dataset, learning_rate, seed, judged_on, how=_descend_counting)


def deep_trial(arm: str, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """The same for a part of Deep Gradient Compression, on MNIST-1D."""
    return _trial(DEEP[arm], "mnist1d", learning_rate, seed, judged_on)


TUNED = {"seeds": TEST_SEEDS, "tuning_seeds": TUNING_SEEDS, "score": itemgetter("accuracy")}


def _tune(run: RunTrials, rates: tuple[float, ...], seeds: Sequence[int] = TEST_SEEDS, **setting: Any) -> None:
    """Where the last rate is the best, with a rate more: what is tested last is what counts."""
    found = train.tune(run, **setting, learning_rate=rates, **TUNED | {"seeds": seeds})
    if found.setting["learning_rate"] == rates[-1]:
        _tune(run, (*rates, 2 * rates[-1]), seeds, **setting)


def bits_plan(run: RunTrials) -> None:
    """Each arm at the best of the same rates, found on held-out examples; then the test examples with other seeds."""
    for arm in ARMS:
        _tune(run, RATES, arm=arm, dataset="mnist1d")
    for arm in CLIPPED_ALIKE:
        _tune(run, RATES, FRESH_SEEDS, arm=arm, dataset="mnist1d")
    for part in [{"when": when} for when in WHEN] + [{"layer": layer} for layer in LAYERS]:
        _tune(run, RATES, arm=HURT, dataset="mnist1d", **part)
    for arm in ON_DIGITS:
        _tune(run, RATES, arm=arm, dataset="digits")


def varying_plan(run: RunTrials) -> None:
    """Tuned and tested as the others, with the same seeds, on both tasks."""
    for dataset in MODELS:
        for arm in VARYING:
            _tune(run, RATES, arm=arm, dataset=dataset)


def deep_plan(run: RunTrials) -> None:
    """The same for the parts of Deep Gradient Compression, on a grid of rates of their own."""
    for arm in DEEP:
        _tune(run, MOMENTUM_RATES, DEEP_SEEDS, arm=arm)
    for arm in ("dense, clipped", "0.1 %, + warm-up"):
        _tune(run, MOMENTUM_RATES, FRESH_SEEDS, arm=arm)


# Lists of many workers: how they fill in, and what the busiest worker sends

TEAM, TEAM_BATCH, TEAM_STEPS, TEAM_RATE = 256, 11, 60, 0.25
TEAMS = tuple(2**i for i in range(1, 9))
FILL_SHARES, FILL_SEEDS = (0.001, 0.01, 0.03, 0.1), range(65, 70)
TRAINED = 230  # steps: five epochs of MNIST-1D, everything sent


def doubling_bytes(own: np.ndarray) -> np.ndarray:
    """(workers,) bytes sent in all rounds, without a switch to arrays; `own` (workers, n): where each has an entry."""
    workers, size = own.shape
    rounds = [own.reshape(-1, 2**i, size).any(1).sum(1).repeat(2**i) for i in range(workers.bit_length() - 1)]
    return room.ENTRY * np.sum(rounds, 0)


def split_bytes(own: np.ndarray, dealt: bool = False) -> np.ndarray:
    """(workers,) bytes sent: its entries to those who sum them, and then its sum to all, as the shorter of two forms.

    Worker i sums the i-th block of indices, or, `dealt`, each index that is i modulo the number of workers.
    """
    workers, size = own.shape
    part = -(-size // workers)
    padded = np.pad(own, ((0, 0), (0, part * workers - size)))
    by_owner = padded.reshape(workers, part, workers).swapaxes(1, 2) if dealt else padded.reshape(workers, workers, -1)
    each = by_owner.sum(2)
    sums = np.minimum(room.ENTRY * by_owner.any(0).sum(1), 4 * part)
    return room.ENTRY * (each.sum(1) - each.diagonal()) + (workers - 1) * sums


@functools.partial(jax.jit, static_argnums=(0, 1))
def supports(model: models.Model, share: float, params: Any, rows: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Indices (workers, k) of the largest of the bare gradient, and of what is due with error feedback.

    After as many steps from `params` as `rows` (steps + 1, workers, examples) say, with the lists that are due.
    """
    compressor = room.error_feedback(room.joined(room.top_k(share)))
    states = jax.vmap(lambda i: compressor.init(params, i))(jnp.arange(rows.shape[1]))
    gradient = jax.grad(functools.partial(mean_loss, model))
    gradients = lambda params, rows: jax.vmap(lambda own: gradient(params, x[own], y[own]))(rows)  # noqa: E731

    def step(carry: Any, rows: Array) -> tuple[Any, None]:
        params, states = carry
        messages, states = jax.vmap(compressor.encode)(states, gradients(params, rows))
        sent = jax.vmap(lambda message: compressor.decode(message, params))(messages)
        return (jax.tree.map(lambda p, a: p - TEAM_RATE * a.mean(0), params, sent), states), None

    (params, states), _ = jax.lax.scan(step, (params, states), rows[:-1])
    bare = gradients(params, rows[-1])
    flat = jax.vmap(lambda tree: ravel_pytree(tree)[0])
    largest = jax.vmap(lambda own: room.largest(own, room.count(share, own.size)).indices)
    return largest(flat(bare)), largest(flat(bare) + flat(states.own))


def fill_trial(share: float, seed: int) -> dict[str, float]:
    """Of the first 2, 4, … workers: the share of all entries that their sum has; bytes of the busiest, of dense ones.

    "bare": lists of the largest of each gradient; "due": of the gradient and what error feedback kept.
    """
    model, (x, y) = MODELS["mnist1d"], examples("mnist1d")[0]
    rows, all_on = order("mnist1d", seed)[:TRAINED], np.ones(TRAINED, bool)
    begin = np.float32(TEAM_RATE), np.uint32(seed), rows, all_on, leaves(model), x, y
    params, losses = descend(model, ARMS["dense"], *begin)
    rng = np.random.default_rng(seed)
    drawn = [rng.permutation(len(x))[: TEAM * TEAM_BATCH].reshape(TEAM, -1) for _ in range(TEAM_STEPS + 1)]
    found = jax.device_get(supports(model, share, params, np.array(drawn), x, y))
    measures, size = {"early_loss": float(losses[20])}, sum(leaf.size for leaf in jax.tree.leaves(params))
    for kind, indices in zip(("bare", "due"), found, strict=True):
        own = np.zeros((TEAM, size), bool)
        np.put_along_axis(own, indices, True, 1)
        for workers in TEAMS:
            few, dense = own[:workers], 8 * size * (workers - 1) / workers
            ways = {"doubling": doubling_bytes(few), "split": split_bytes(few), "dealt": split_bytes(few, dealt=True)}
            measures[f"{kind}, union, {workers}"] = float(few.any(0).mean())
            measures |= {f"{kind}, {way}, {workers}": float(sent.max() / dense) for way, sent in ways.items()}
    return measures


def fill_plan(run: RunTrials) -> None:
    """All shares with the same seeds."""
    run([{"share": share, "seed": seed} for share in FILL_SHARES for seed in FILL_SEEDS])


# Rounding moves the loss after twenty updates a little; what follows is chaotic.
ALLOWED = {"accuracy": 1.0, "loss": 0.02, "early_loss": 0.02}
BITS = Experiment(
    "gradient_compression-bits", "accuracy with all compressors, tuned; and where one of them hurts",
    bits_trial, bits_plan, ALLOWED, chaotic=("accuracy", "loss"), drawn={"judged_on": "test", "dataset": "mnist1d"},
)  # fmt: skip
VARIED = Experiment(
    "gradient_compression-varying", "accuracy and bytes where the numbers decide how many travel, tuned",
    varying_trial, varying_plan, ALLOWED | {"bytes": 20.0}, chaotic=("accuracy", "loss", "bytes"),
    # at a rate far from divergence
    drawn={"judged_on": "test", "dataset": "mnist1d", "arm": "threshold 0.8, feedback"},
)  # fmt: skip
DEEP_PARTS = Experiment(
    "gradient_compression-deep", "the parts of Deep Gradient Compression at 1 % and 0.1 % of the entries, tuned",
    deep_trial, deep_plan, ALLOWED, chaotic=("accuracy", "loss"), drawn={"judged_on": "test"},
)  # fmt: skip
FILLED = tuple(
    f"{kind}, {way}, {workers}"
    for kind in ("bare", "due") for workers in TEAMS for way in ("union", "doubling", "split", "dealt")
)  # fmt: skip
FILL = Experiment(
    "gradient_compression-fill", "how the lists of up to 256 workers fill in, with and without error feedback",
    fill_trial, fill_plan, dict.fromkeys(FILLED, 0.02) | {"early_loss": 0.02}, chaotic=FILLED, drawn={"share": 0.01},
)  # fmt: skip

# Coded twice: by each worker, and what they sum once more, as a compressed all-reduce does


def _twice(first: Compressor, second: Compressor) -> Compressor:
    """Every worker's message is the coded sum of what all workers' messages say: the same for all."""

    def encode(states: Any, gradient: Any) -> tuple[Any, Any]:
        message, own = first.encode(states[0], gradient)
        joined = jax.tree.map(lambda a: jax.lax.pmean(a, AXIS), first.decode(message, gradient))
        message, kept = second.encode(states[1], joined)
        return message, (own, kept)

    return Compressor(lambda like, seed=0: (first.init(like, seed), second.init(like, 0)), encode, second.decode)


TWICE = {
    "1-bit, feedback": Arm(_twice(_with(room.one_bit()), room.one_bit())),
    "1-bit, feedback, and at the sum": Arm(_twice(_with(room.one_bit()), _with(room.one_bit()))),
    "7 levels, stochastic": Arm(_twice(room.quantised(7), room.quantised(7))),
}


def twice_trial(arm: str, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """As the first record's, on MNIST-1D, where the sum is coded, too."""
    return _trial(TWICE[arm], "mnist1d", learning_rate, seed, judged_on)


def twice_plan(run: RunTrials) -> None:
    """Tuned and tested as the arms that are coded once, with the same seeds."""
    for arm in TWICE:
        _tune(run, RATES, arm=arm)


CODED_TWICE = Experiment(
    "gradient_compression-twice", "accuracy where the workers' messages and their sum are coded, tuned",
    twice_trial, twice_plan, ALLOWED, chaotic=("accuracy", "loss"), drawn={"judged_on": "test"},
)  # fmt: skip
