"""The recorded experiments of notebook 06: how large the pieces are that are pruned, and recurrent nets, pruned."""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from dlscale import sparsity
from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import data, models, train
from dlscale.lab.data import Dataset
from dlscale.lab.models import Model, Params

TEST_SEEDS = range(20)  # the first ten have decided which rules were changed; the others decide by the new ones
INDEX_BITS = 4


@functools.cache
def _halves(name: str) -> tuple[Dataset, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Training examples without those held out, and what to judge by: those held out ("validation"), or "test"."""
    full = data.load(name)
    held_out = data.validation_split(full, fraction=0.25)
    return held_out, {"validation": (held_out.x_test, held_out.y_test), "test": (full.x_test, full.y_test)}


def _order(seed: int, count: int, batch: int, epochs: int) -> np.ndarray:
    """Rows of the examples for each step, each example at most once an epoch."""
    rng, steps = np.random.default_rng(seed), count // batch
    return np.concatenate([rng.permutation(count)[: steps * batch].reshape(steps, batch) for _ in range(epochs)])


def _descend(
    model: Model, optimizer: optax.GradientTransformation, params: Params, order: Array, x: Array, y: Array
) -> tuple[Params, Array]:
    """Trained parameters, and the loss before each step."""

    def loss(params: Params, rows: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x[rows]), y[rows]).mean()

    def step(state: tuple[Params, optax.OptState], rows: Array) -> tuple[tuple[Params, optax.OptState], Array]:
        params, memory = state
        value, gradient = jax.value_and_grad(loss)(params, rows)
        updates, memory = optimizer.update(gradient, memory, params)
        return (optax.apply_updates(params, updates), memory), value

    (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), order)
    return params, losses


@functools.partial(jax.jit, static_argnums=0)
def _accuracy(model: Model, params: Params, x: Array, y: Array) -> Array:
    return (model.apply(params, x).argmax(-1) == y).mean()


# Granularity: a convolutional net, trained, pruned at once, trained again

PRUNED = ("conv2", "conv3")
DENSITIES = (0.03, 0.06, 0.12, 0.2, 0.4)
GRANULARITIES = ("weight", "vector", "kernel", "filter", "block")
CONV_RATES, CONV_TUNING_SEEDS = (0.025, 0.05, 0.1, 0.2, 0.4), (100, 101)
DENSE_RATE, CONV_BATCH, CONV_EPOCHS = 0.05, 50, 2


@functools.cache
def _images() -> tuple[Dataset, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """MNIST at half the resolution."""
    examples, judged = _halves("mnist")
    return examples, {name: (_pooled(x), y) for name, (x, y) in judged.items()}


def _pooled(x: np.ndarray) -> np.ndarray:
    """Means over 2×2 pixels of images (count, height, width, 1)."""
    return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, 1).mean((2, 4))


@functools.cache
def _conv_net() -> Model:
    """Three 3×3 convolutions with ReLU, the first two max-pooled, and a dense layer: 14×14 images, ten classes."""
    shapes = {"conv1": (3, 3, 1, 8), "conv2": (3, 3, 8, 16), "conv3": (3, 3, 16, 32), "output": (288, 10)}
    layers = {"conv1": models.conv(pool=True), "conv2": models.conv(pool=True), "conv3": models.conv()}

    def init(key: Array) -> Params:
        params = {}
        for (name, shape), k in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
            deviation = math.sqrt((1 if name == "output" else 2) / math.prod(shape[:-1]))
            params[name] = {"w": deviation * jax.random.normal(k, shape), "b": jnp.zeros(shape[-1])}
        return params

    return Model(init, layers | {"output": models.dense()})


@jax.jit
def _train_conv(params: Params, mask: Params, rate: Array, order: Array, x: Array, y: Array) -> tuple[Params, Array]:
    """SGD with momentum, the rate falling to 0 on half a cosine."""
    optimizer = optax.sgd(optax.cosine_decay_schedule(rate, len(order)), momentum=0.9)
    return _descend(_conv_net(), sparsity.masked(optimizer, mask), params, order, x, y)


def _epochs_of_conv(seed: int, params: Params, mask: Params, rate: float) -> tuple[Params, Array]:
    examples, _ = _images()
    order = _order(seed, len(examples.x_train), CONV_BATCH, CONV_EPOCHS)
    return _train_conv(params, mask, np.float32(rate), order, _pooled(examples.x_train), examples.y_train)


@functools.cache
def dense_conv_net(seed: int) -> tuple[Params, Array]:
    """The trained net that all arms of a seed are pruned from, and the losses of its training."""
    params = jax.jit(_conv_net().init)(jax.random.key(seed))
    return _epochs_of_conv(seed, params, jax.tree.map(jnp.ones_like, params), DENSE_RATE)


def prune_conv_net(params: Params, granularity: str, density: float) -> tuple[Params, Params]:
    """The pruned net and its mask: only the second and third convolution are pruned, each to this density."""
    mask = jax.tree.map(jnp.ones_like, params)
    for name in PRUNED:
        mask[name] = {**mask[name], "w": sparsity.mask(params[name]["w"], density, granularity)}
    return jax.tree.map(jnp.multiply, params, mask), mask


def entries(mask: Params, granularity: str) -> tuple[int, int]:
    """Groups that the relative encoding writes, fillers included, and the weights of a group.

    In "N:M" the groups have no common fate: each weight is written on its own.
    """
    granularity = "weight" if ":" in granularity else granularity
    made = [sparsity.encode(mask[name]["w"], "relative", granularity, INDEX_BITS, dtype="float16") for name in PRUNED]
    size = math.prod(sparsity.group_shape(mask[PRUNED[0]]["w"].shape, granularity))
    return sum(map(len, made)) // (INDEX_BITS + 16 * size), size


def granularity_trial(
    granularity: str, density: float, learning_rate: float, seed: int, judged_on: str
) -> dict[str, float]:
    """Accuracy in percent after pruning and two epochs more; density of the pruned layers; numbers to store.

    `early_loss` is that of the dense net after ten steps.
    """
    dense, losses = dense_conv_net(seed)
    params, mask = prune_conv_net(dense, granularity, density)
    params, _ = _epochs_of_conv(seed + 1000, params, mask, learning_rate)
    kept = np.concatenate([np.ravel(mask[name]["w"]) for name in PRUNED]).mean()
    written, size = entries(mask, granularity)
    accuracy = 100 * float(_accuracy(_conv_net(), params, *_images()[1][judged_on]))
    return {"accuracy": accuracy, "density": float(kept), "entries": written, "size": size, "early_loss": losses[10]}


def granularity_plan(run: RunTrials) -> None:
    """Each arm at the best of the same rates, found on held-out images; then the test images with other seeds."""
    arms = [*itertools.product(GRANULARITIES, DENSITIES), ("2:4", 0.5), ("weight", 0.5), ("weight", 1.0)]
    for granularity, density in arms:
        _tuned(run, CONV_RATES, CONV_TUNING_SEEDS, TEST_SEEDS, granularity=granularity, density=density)


def _tuned(
    run: RunTrials, rates: Sequence[float], tuning_seeds: Sequence[int], seeds: Sequence[int], **arm: float | str
) -> None:
    accuracy = itemgetter("accuracy")
    train.tune(run, **arm, learning_rate=rates, tuning_seeds=tuning_seeds, seeds=seeds, score=accuracy)


# Recurrent nets: gated recurrent units over the 40 values of MNIST-1D, two at a time

SMALL, LARGE = 32, 80  # hidden units
RECURRENT_RATES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
RECURRENT_TUNING_SEEDS = range(100, 106)  # with two, chance chose between neighbouring rates
RECURRENT_DENSITIES = (0.05, 0.1, 0.2, 0.4, 1.0)
RECURRENT_BATCH, RECURRENT_EPOCHS, PRUNE_EVERY = 100, 24, 20


def _recurrent_net(hidden: int) -> Model:
    return models.gru(hidden, features=2)


def _initial(hidden: int, seed: int) -> Params:
    return jax.jit(_recurrent_net(hidden).init)(jax.random.key(seed))


def parameters(hidden: int, density: float = 1.0) -> int:
    """Weights that stay, with all biases."""
    weights = 3 * hidden * (2 + hidden) + 10 * hidden
    return round(density * weights) + 3 * hidden + 10


def matching_density() -> float:
    """The density that leaves the large net as many parameters as the small one has when dense."""
    biases = parameters(LARGE, 0.0)
    return (parameters(SMALL) - biases) / (parameters(LARGE) - biases)


@functools.partial(jax.jit, static_argnums=0)
def _train_recurrent(
    hidden: int, params: Params, density: Array, rate: Array, order: Array, x: Array, y: Array
) -> tuple[Params, Array]:
    """Adam, its rate falling to 0 on half a cosine; pruned on a cubic from an eighth to five eighths of the steps."""
    steps = len(order)
    schedule = optax.polynomial_schedule(1.0, density, 3, steps // 2, steps // 8)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    gradual = sparsity.gradual(schedule, PRUNE_EVERY, scope="global")
    return _descend(_recurrent_net(hidden), sparsity.masked(optimizer, gradual), params, order, x, y)


def recurrent_trial(hidden: int, density: float, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracy in percent of a recurrent net that is pruned, all weights together, while it trains.

    `early_loss` is that after twenty steps.
    """
    examples, judged = _halves("mnist1d_fresh")
    params = _initial(hidden, seed)
    order = _order(seed, len(examples.x_train), RECURRENT_BATCH, RECURRENT_EPOCHS)
    x = examples.x_train.reshape(-1, 20, 2)
    params, losses = _train_recurrent(
        hidden, params, np.float32(density), np.float32(learning_rate), order, x, examples.y_train
    )
    x, y = judged[judged_on]
    left = sum(int(np.count_nonzero(w)) for w in jax.tree.leaves(params) if np.ndim(w) == 2)
    accuracy = 100 * float(_accuracy(_recurrent_net(hidden), params, x.reshape(-1, 20, 2), y))
    return {"accuracy": accuracy, "weights": left, "early_loss": losses[20]}


def recurrent_plan(run: RunTrials) -> None:
    """As `granularity_plan`, for both widths; the large net also with as many parameters as the small one."""
    arms = [*itertools.product((SMALL, LARGE), RECURRENT_DENSITIES), (LARGE, matching_density())]
    for hidden, density in arms:
        seeds = TEST_SEEDS if hidden == LARGE and density in (0.1, 1.0) else TEST_SEEDS[:10]
        _tuned(run, RECURRENT_RATES, RECURRENT_TUNING_SEEDS, seeds, hidden=hidden, density=density)


# Is "large, then pruned" better, or only more work? The small dense net, trained for longer

LONGER = 3  # times the epochs: more multiplications than those of the large net's kept weights


def longer_trial(times: int, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracy in percent of the small dense net after `times` the epochs."""
    examples, judged = _halves("mnist1d_fresh")
    order = _order(seed, len(examples.x_train), RECURRENT_BATCH, RECURRENT_EPOCHS * times)
    given, rate = (examples.x_train.reshape(-1, 20, 2), examples.y_train), np.float32(learning_rate)
    params, _ = _train_recurrent(SMALL, _initial(SMALL, seed), np.float32(1), rate, order, *given)
    x, y = judged[judged_on]
    return {"accuracy": 100 * float(_accuracy(_recurrent_net(SMALL), params, x.reshape(-1, 20, 2), y))}


def longer_plan(run: RunTrials) -> None:
    """Tuned as in `recurrent_plan`, with the same networks at the start."""
    _tuned(run, RECURRENT_RATES, RECURRENT_TUNING_SEEDS, TEST_SEEDS[:10], times=LONGER)


# When to prune, and where: an MLP on digits, the way, the allocation and the density being settings

WAYS = ("not at all", "at once", "gradually", "in rounds", "in rounds, rewound")
CUTS = {"at once at 30 %": 0.3, "at once at 60 %": 0.6}  # of the steps: is half of them a bad moment?
NARROW = "narrow, dense"  # a network that is small from the start
ALLOCATIONS = ("global", "uniform", "ERK")
WAY_DENSITIES = (0.01, 0.02, 0.05, 0.1)
RATES, WAY_TUNING_SEEDS, WAY_SEEDS = (0.05, 0.1, 0.2, 0.4, 0.8), range(100, 104), range(20, 36)
EQUAL_WORK_SEEDS = range(36, 68)
LOWER_RATES = (0.0125, 0.025, *RATES)  # for the narrow net and for long training, which learn best at small rates
STEPS, ROUNDS, EVERY, EARLY = 360, 4, 30, 15
WAY_BATCH, WAY_EPOCHS = 100, 6
NETWORK, NARROW_NETWORK = models.mlp((196, 64, 64, 10)), models.mlp((196, 4, 10, 10))  # 5.4 % of the weights
SHAPES = {"dense1": (196, 64), "dense2": (64, 64), "output": (64, 10)}


def erk(density: float | Array) -> dict[str, float | Array]:
    """Densities of the layers in proportion to (in + out) / (in × out) (Evci et al. 2020), for `density` up to 0.2.

    Above, the last layer would have to keep more than all of its weights.
    """
    weights = sum(map(math.prod, SHAPES.values()))
    sides = sum(map(sum, SHAPES.values()))
    return {name: density * weights / sides * sum(s) / math.prod(s) for name, s in SHAPES.items()}


class Pruning(NamedTuple):
    """What `pruning` remembers; `early` are the weights to go back to."""

    step: Array
    mask: Params
    momentum: Params
    early: Params


def density_at(step: Array, final: Array, way: Array) -> Array:
    """The density that a way wants at a step; the cubic runs from 20 to 70 % of the steps."""
    done = step / STEPS
    at_once = jnp.where(done < 1 / 2, 1.0, final)
    cubic = final + (1 - final) * (1 - jnp.clip((done - 0.2) / 0.5, 0, 1)) ** 3
    rounds = final ** (jnp.floor(done * ROUNDS) / (ROUNDS - 1))
    others = [jnp.where(done < moment, 1.0, final) for moment in CUTS.values()]
    return jnp.stack([jnp.ones_like(cubic), at_once, cubic, rounds, rounds, *others])[way]


def _momentum(
    learning_rate: Array, back: Array, gradient: Params, state: Pruning, params: Params, mask: Params
) -> tuple[Params, Pruning]:
    """One step of masked SGD with momentum 0.9 that may go back to the early weights."""
    early = jax.tree.map(lambda w, e: jnp.where(state.step == EARLY, w, e), params, state.early)
    memory = jax.tree.map(lambda m, g, k: jnp.where(back, 0, 0.9 * m + k * g), state.momentum, gradient, mask)
    begin = jax.tree.map(lambda w, e: jnp.where(back, e, w), params, early)
    new = jax.tree.map(lambda w, m, k: k * (w - learning_rate * m), begin, memory, mask)
    return jax.tree.map(jnp.subtract, new, params), Pruning(state.step + 1, mask, memory, early)


def _begin(params: Params) -> Pruning:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return Pruning(jnp.int32(0), jax.tree.map(jnp.ones_like, params), zeros, params)


def _thinned(params: Params, density: Array, final: Array, allocation: str) -> Params:
    """Masks at a density of all weights, the layers' shares by the allocation; ERK's are reached along with `final`."""
    if allocation == "global":
        return sparsity.mask(params, density, scope="global")
    if allocation == "uniform":
        return sparsity.mask(params, density)
    to_go = (density - final) / (1 - final)
    return {name: sparsity.mask(params[name], d + (1 - d) * to_go) for name, d in erk(final).items()}


def pruning(learning_rate: Array, density: Array, way: Array, allocation: str) -> optax.GradientTransformation:
    """SGD with momentum that prunes in the way of this number, in `STEPS` steps."""
    way = jnp.int32(way)

    def update(gradient: Params, state: Pruning, params: Params) -> tuple[Params, Pruning]:
        step, now = state.step, density_at(state.step, density, way)
        mask = jax.lax.cond(step % EVERY == 0, lambda: _thinned(params, now, density, allocation), lambda: state.mask)
        back = (way == 4) & (step > 0) & (step % (STEPS // ROUNDS) == 0)
        return _momentum(learning_rate, back, gradient, state, params, mask)

    return optax.GradientTransformation(_begin, update)


PRUNING = {name: functools.partial(pruning, allocation=name) for name in ALLOCATIONS}


@functools.cache
def _digits(judged_on: str) -> Dataset:
    """The digits of `_images`, three quarters of them to train on, with those to judge by as the test set."""
    examples, judged = _images()
    x, y = judged[judged_on]
    return replace(examples, x_train=_pooled(examples.x_train), x_test=x, y_test=y)


def _fitted(
    optimizer: train.Optimizer, judged_on: str, epochs: int, seed: int, network: Model = NETWORK, **setting: float
) -> train.Run:
    """A run, also one that diverged: its accuracies from there on are NaN."""
    options = {"batch_size": WAY_BATCH, "epochs": epochs, "seed": seed, "progress": False, **setting}
    try:
        return train.fit(network, _digits(judged_on), optimizer, **options)
    except train.Diverged as error:
        reached = error.run.history.test_accuracy
        accuracy = np.concatenate([reached[:-1], np.full(epochs - len(reached) + 1, np.nan)])
        return train.Run(error.run.params, error.run.history._replace(test_accuracy=accuracy))


def _kept(params: Params) -> dict[str, float]:
    return {f"{name}_density": float(np.mean(np.asarray(params[name]["w"]) != 0)) for name in SHAPES}


def ways_trial(
    way: str, allocation: str, density: float, learning_rate: float, seed: int, judged_on: str
) -> dict[str, float]:
    """Accuracies in percent after each epoch, the last as "accuracy", and the layers' densities in the end."""
    network, number = (NARROW_NETWORK, 0) if way == NARROW else (NETWORK, [*WAYS, *CUTS].index(way))
    setting = {"way": number, "density": density, "learning_rate": learning_rate}
    run = _fitted(PRUNING[allocation], judged_on, WAY_EPOCHS, seed, network, **setting)
    accuracies = {f"epoch{i + 1}": 100 * float(a) for i, a in enumerate(run.history.test_accuracy)}
    accuracies["accuracy"] = accuracies.pop(f"epoch{WAY_EPOCHS}")
    return accuracies | _kept(run.params)


def ways_plan(run: RunTrials) -> None:
    """All ways with one ranking of all weights, and the gradual one with two other allocations; each arm tuned."""
    arms = [("not at all", "global", 1.0)]
    arms += [(way, "global", density) for way in WAYS[1:] for density in WAY_DENSITIES]
    arms += [("gradually", allocation, density) for allocation in ALLOCATIONS[1:] for density in WAY_DENSITIES]
    arms += [(way, "global", 0.05) for way in CUTS] + [(NARROW, "global", 1.0)]
    for way, allocation, density in arms:
        arm = {"way": way, "allocation": allocation, "density": density}
        rates = LOWER_RATES if way == NARROW else RATES
        compared = (allocation, density) == ("ERK", 0.05)  # with RigL at equal work
        _tuned(run, rates, WAY_TUNING_SEEDS, [*WAY_SEEDS, *(EQUAL_WORK_SEEDS if compared else [])], **arm)


# Is it the last layer that starves at 1 %? Even shares but for the last layer, and ERK's but for the last layer

OUTPUT_DENSITY = 0.01
OUTPUT_ARMS = ("even, the last by ERK", "ERK, the last even")


def output_densities(arm: str, density: float = OUTPUT_DENSITY) -> dict[str, float]:
    """Densities of the layers: the last one's by one allocation, those of the others by the other one, scaled to fit.

    All arms keep as many weights.
    """
    weights, by_erk = {name: math.prod(shape) for name, shape in SHAPES.items()}, erk(density)
    even = dict.fromkeys(SHAPES, density)
    last, others = (by_erk, even) if arm == OUTPUT_ARMS[0] else (even, by_erk)
    left = density * sum(weights.values()) - last["output"] * weights["output"]
    others = {name: share for name, share in others.items() if name != "output"}
    scale = left / sum(share * weights[name] for name, share in others.items())
    return {name: scale * share for name, share in others.items()} | {"output": last["output"]}


def allotted(learning_rate: Array, dense1: Array, dense2: Array, output: Array) -> optax.GradientTransformation:
    """`pruning` gradually, each layer to a density of its own; none waits for another."""
    final = {"dense1": dense1, "dense2": dense2, "output": output}

    def update(gradient: Params, state: Pruning, params: Params) -> tuple[Params, Pruning]:
        to_go = density_at(state.step, jnp.float32(0), jnp.int32(WAYS.index("gradually")))

        def thinned() -> Params:
            return {name: sparsity.mask(params[name], d + (1 - d) * to_go) for name, d in final.items()}

        mask = jax.lax.cond(state.step % EVERY == 0, thinned, lambda: state.mask)
        return _momentum(learning_rate, jnp.bool_(False), gradient, state, params, mask)

    return optax.GradientTransformation(_begin, update)


def output_trial(arm: str, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracy in percent, and the layers' densities in the end."""
    run = _fitted(allotted, judged_on, WAY_EPOCHS, seed, learning_rate=learning_rate, **output_densities(arm))
    return {"accuracy": 100 * float(run.history.test_accuracy[-1])} | _kept(run.params)


def output_plan(run: RunTrials) -> None:
    """Tuned as in `ways_plan`, with the same networks at the start."""
    for arm in OUTPUT_ARMS:
        _tuned(run, RATES, WAY_TUNING_SEEDS, WAY_SEEDS, arm=arm)


# Rounds in full: each as long as the first training, with the same schedule of the rate

RETRAININGS = ("fine-tuned", "fine-tuned, ten times the rate", "weights rewound", "rate rewound")
FULL_ROUNDS = 5  # each halves the density
ROUND_RATES = {0.2: range(40, 64), 0.4: range(40, 52)}  # and their seeds: the dense net's best rate, and twice that
ROUND_DENSITIES = tuple(0.5**i for i in range(FULL_ROUNDS + 1))


def in_full_rounds(learning_rate: Array, retraining: Array) -> optax.GradientTransformation:
    """Training, then `FULL_ROUNDS` times: half of the weights go, training again as Renda et al. 2020 name it."""
    retraining = jnp.int32(retraining)

    def update(gradient: Params, state: Pruning, params: Params) -> tuple[Params, Pruning]:
        number, within = jnp.divmod(state.step, STEPS)
        last = 0.01  # the schedule: 1, from half of the steps 0.1, from three quarters 0.01
        scheduled = jnp.where(within < STEPS // 2, 1.0, jnp.where(within < 3 * STEPS // 4, 0.1, last))
        fixed = jnp.stack([last, 10 * last, scheduled, scheduled])[retraining]
        rate = learning_rate * jnp.where(number == 0, scheduled, fixed)
        cut = (within == 0) & (number > 0)
        density = 0.5 ** number.astype(jnp.float32)
        mask = jax.lax.cond(cut, lambda: sparsity.mask(params, density, scope="global"), lambda: state.mask)
        emptied = _begin(params).momentum  # a new training begins without momentum, in every arm
        memory = jax.tree.map(lambda m, zero: jnp.where(cut, zero, m), state.momentum, emptied)
        return _momentum(rate, cut & (retraining == 2), gradient, state._replace(momentum=memory), params, mask)

    return optax.GradientTransformation(_begin, update)


def rounds_trial(retraining: str, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracy in percent after each round; "accuracy" is that of the last, at the lowest density."""
    setting = {"retraining": RETRAININGS.index(retraining), "learning_rate": learning_rate}
    run = _fitted(in_full_rounds, judged_on, WAY_EPOCHS * (FULL_ROUNDS + 1), seed, **setting)
    ends = 100 * run.history.test_accuracy[WAY_EPOCHS - 1 :: WAY_EPOCHS]
    return {f"round{i}": float(a) for i, a in enumerate(ends[:-1])} | {"accuracy": float(ends[-1])}


def rounds_plan(run: RunTrials) -> None:
    """Every rate for the dense net, on held-out digits; then all arms at one rate: they differ by nothing else."""
    first = {"retraining": RETRAININGS[0], "judged_on": "validation"}  # before the first cut all arms are the same
    run([first | {"learning_rate": rate, "seed": seed} for rate in RATES for seed in WAY_TUNING_SEEDS])
    arms = [(name, rate, seed) for name in RETRAININGS for rate, seeds in ROUND_RATES.items() for seed in seeds]
    run([{"retraining": name, "learning_rate": rate, "seed": seed, "judged_on": "test"} for name, rate, seed in arms])


# Never dense: SET, RigL and a mask that stays

CHANGES = {"fixed mask": (0.0, 0), "SET": (0.3, 0), "RigL": (0.3, 1)}  # the share that moves first; by gradient?
SHARINGS = ("uniform", "ERK", "found")
FOUND = (0.032, 0.077, 0.224)  # the layers' densities that gradual pruning with one ranking ends at
EXCHANGE_EVERY = 45
EQUAL_WORK = 7  # times the steps: RigL at 5 % then does about as many multiplications as pruning gradually does


def _rank(scores: Array) -> Array:
    order = jnp.argsort(-scores.ravel())
    return jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(scores.shape)  # 0 for the largest


def random_like(w: Array, number: Array, step: Array) -> Array:
    """Others for every network, by its number, for every step, and for every layer: the layers differ in size.

    Made from whole numbers alone: bits of a weight or of a sum are others on another processor, or under `vmap`.
    """
    key = jax.random.fold_in(jax.random.key(jnp.uint32(number)), w.size)
    return jax.random.uniform(jax.random.fold_in(key, step), w.shape)


def exchange(w: Array, mask: Array, gradient: Array, share: Array, by_gradient: Array, other: Array) -> Array:
    """The mask after the smallest `share` of its weights are dropped and as many are grown.

    They grow where the gradient is large, or else the numbers `other`.
    """
    moved = jnp.round(share * mask.sum())
    stays = _rank(jnp.abs(w) * mask) < mask.sum() - moved
    wish = jnp.where(by_gradient > 0, jnp.abs(gradient), other)
    grows = _rank(jnp.where(mask == 0, wish, -1.0)) < moved
    return (stays | grows) * 1.0


def layer_densities(sharing: str, density: float) -> dict[str, float]:
    """Densities of the layers; "found" serves the density 0.05 only."""
    if sharing == "ERK":
        return erk(density)
    return dict(zip(SHAPES, FOUND if sharing == "found" else [density] * len(SHAPES), strict=True))


def dynamic(
    learning_rate: Array, dense1: Array, dense2: Array, output: Array, share: Array, by_gradient: Array, scaled: Array,
    times: Array, number: Array,
) -> optax.GradientTransformation:  # fmt: skip
    """SGD with momentum under a random mask, its connections exchanged until 3/4 of the steps, `times` the usual.

    Where `scaled`, the first step divides the initial weights by the root of their layer's density: a unit with fewer
    inputs then begins with sums as large as those of a dense one. `number` says which masks are drawn.
    """
    densities = {"dense1": dense1, "dense2": dense2, "output": output}

    def first(params: Params) -> Params:
        mask = jax.tree.map(jnp.ones_like, params)
        for name, density in densities.items():
            w = params[name]["w"]
            mask[name] = {**mask[name], "w": (_rank(random_like(w, number, 0)) < jnp.round(density * w.size)) * 1.0}
        return mask

    def init(params: Params) -> Pruning:
        return _begin(params)._replace(mask=first(params))

    def update(gradient: Params, state: Pruning, params: Params) -> tuple[Params, Pruning]:
        step = state.step
        now = share * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(step / (0.75 * STEPS * times), 1)))

        def moved() -> Params:
            def change(w: Array, m: Array, g: Array) -> Array:
                return exchange(w, m, g, now, by_gradient, random_like(w, number, step)) if w.ndim > 1 else m

            return jax.tree.map(change, params, state.mask, gradient)

        due = (step > 0) & (step % EXCHANGE_EVERY == 0)
        mask = jax.lax.cond(due, moved, lambda: state.mask)
        grown = {
            name: {"w": jnp.where((step == 0) & (scaled > 0), 1 / jnp.sqrt(density), 1.0), "b": 1.0}
            for name, density in densities.items()
        }
        live = jnp.where(step == 0, 0.0, 1.0)  # the first gradient is that of a dense net: not used
        memory = jax.tree.map(lambda m, g, k: k * (0.9 * m + live * g), state.momentum, gradient, mask)
        new = jax.tree.map(lambda w, s, m, k: k * (s * w - learning_rate * m), params, grown, memory, mask)
        return jax.tree.map(jnp.subtract, new, params), Pruning(step + 1, mask, memory, state.early)

    return optax.GradientTransformation(init, update)


def dynamic_trial(
    change: str, sharing: str, scaled: int, times: int, density: float, learning_rate: float, seed: int, judged_on: str
) -> dict[str, float]:
    """Accuracy in percent, the densities reached and, in percent, connections from the middle 8 × 8 of the pixels."""
    share, by_gradient = CHANGES[change]
    setting = layer_densities(sharing, density) | {"share": share, "by_gradient": by_gradient, "scaled": scaled}
    setting |= {"learning_rate": learning_rate, "times": times, "number": seed}
    run = _fitted(dynamic, judged_on, WAY_EPOCHS * times, seed, **setting)
    used = (np.asarray(run.params["dense1"]["w"]) != 0).sum(1).reshape(14, 14)
    middle = 100 * float(used[3:11, 3:11].sum() / used.sum())
    return {"accuracy": 100 * float(run.history.test_accuracy[-1]), "middle": middle} | _kept(run.params)


def dynamic_plan(run: RunTrials) -> None:
    """Three ways to change, three allocations; ERK also without the larger initial weights, and RigL for longer."""
    arms = [(*arm, 1, 1) for arm in itertools.product(CHANGES, SHARINGS)] + [(name, "ERK", 0, 1) for name in CHANGES]
    for change, sharing, scaled, times in [*arms, ("RigL", "ERK", 1, EQUAL_WORK)]:
        arm = {"change": change, "sharing": sharing, "scaled": scaled, "times": times, "density": 0.05}
        rates, seeds = (RATES, WAY_SEEDS) if times == 1 else (LOWER_RATES, EQUAL_WORK_SEEDS)
        _tuned(run, rates, WAY_TUNING_SEEDS, seeds, **arm)


# Is it worth starting large? Networks that are small from the start, with about the weights that stay at 5 %

SMALL_NETS = {  # which pixels, hidden units, the way (the last two keep as many weights as "49-14-10"), times the steps
    "196-4-10": ("all", (4,), "not at all", 1),
    "49-12-12-10": ("averaged", (12, 12), "not at all", 1),
    "49-14-10": ("averaged", (14,), "not at all", 1),
    "49 of 196-14-10": ("liveliest", (14,), "not at all", 1),
    "49-14-10, for longer": ("averaged", (14,), "not at all", 8),  # then it multiplies as pruning gradually does
    "49 of 196-14-10, for longer": ("liveliest", (14,), "not at all", 8),
    "49-64-64-10, gradually": ("averaged", (64, 64), "gradually", 1),
    "49-64-64-10, RigL": ("averaged", (64, 64), "RigL", 1),
}
SMALL_WEIGHTS = 49 * 14 + 14 * 10


def _fewer(pixels: str, examples: Dataset) -> Dataset:
    """49 pixels of 196: means over 2 × 2, which knows that they are an image, or those that vary most."""
    liveliest = np.argsort(-examples.x_train.std(0).ravel())[:49]
    chosen = {"all": lambda x: x, "averaged": _pooled, "liveliest": lambda x: x.reshape(len(x), -1)[:, liveliest]}
    return replace(examples, x_train=chosen[pixels](examples.x_train), x_test=chosen[pixels](examples.x_test))


def small_trial(net: str, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracy in percent, and the weights that are not zero in the end."""
    pixels, hidden, way, times = SMALL_NETS[net]
    sizes = [196 if pixels == "all" else 49, *hidden, 10]
    shapes = [*itertools.pairwise(sizes)]
    density = 1.0 if way == "not at all" else SMALL_WEIGHTS / sum(map(math.prod, shapes))
    optimizer, setting = PRUNING["global"], {"way": WAYS.index(way) if way in WAYS else 0, "density": density}
    if way == "RigL":  # by ERK
        shares = [SMALL_WEIGHTS / sum(map(sum, shapes)) * sum(shape) / math.prod(shape) for shape in shapes]
        optimizer, setting = dynamic, dict(zip(SHAPES, shares, strict=True)) | {"scaled": 1, "times": 1, "number": seed}
        setting |= dict(zip(("share", "by_gradient"), CHANGES[way], strict=True))
    options = {"batch_size": WAY_BATCH, "epochs": WAY_EPOCHS * times, "eval_every": WAY_EPOCHS, "progress": False}
    examples = _fewer(pixels, _digits(judged_on))
    try:
        run = train.fit(
            models.mlp(sizes), examples, optimizer, learning_rate=learning_rate, seed=seed, **options, **setting
        )
    except train.Diverged:
        return {"accuracy": math.nan, "weights": math.nan}
    weights = sum(np.count_nonzero(layer["w"]) for layer in run.params.values())
    return {"accuracy": 100 * float(run.history.test_accuracy[-1]), "weights": weights}


def small_plan(run: RunTrials) -> None:
    """All on the grid that served the first narrow net, with the seeds of the ways to prune."""
    for net in SMALL_NETS:
        _tuned(run, LOWER_RATES, WAY_TUNING_SEEDS, WAY_SEEDS, net=net)


# Does RigL stay behind small networks because it moves too few connections? Its share tuned, on fresh test seeds

SHARES, SHARE_SEEDS = (0.3, 0.5, 0.7, 1.0), range(36, 52)
SEARCHING = {"196-64-64-10, RigL": "all", "49-64-64-10, RigL": "averaged"}  # which pixels; by ERK, with 5 % of 196's
RIVALS = ("49-14-10", "49 of 196-14-10")


def share_trial(net: str, learning_rate: float, seed: int, judged_on: str, share: float = 0.0) -> dict[str, float]:
    """As `small_trial`, but for the share of its connections that RigL moves first; the rivals have none to move."""
    if net not in SEARCHING:
        return small_trial(net, learning_rate, seed, judged_on)
    examples, sizes = _digits(judged_on), [196, 64, 64, 10]
    densities = erk(0.05)
    if SEARCHING[net] != "all":
        examples, sizes[0] = _fewer(SEARCHING[net], examples), 49
        shapes = [*itertools.pairwise(sizes)]
        parts = [SMALL_WEIGHTS / sum(map(sum, shapes)) * sum(shape) / math.prod(shape) for shape in shapes]
        densities = dict(zip(SHAPES, parts, strict=True))
    setting = densities | {"share": share, "by_gradient": 1, "scaled": 1, "times": 1, "number": seed}
    options = {"batch_size": WAY_BATCH, "epochs": WAY_EPOCHS, "eval_every": WAY_EPOCHS, "progress": False}
    try:
        run = train.fit(
            models.mlp(sizes), examples, dynamic, learning_rate=learning_rate, seed=seed, **options, **setting
        )
    except train.Diverged:
        return {"accuracy": math.nan, "weights": math.nan}
    weights = sum(np.count_nonzero(layer["w"]) for layer in run.params.values())
    return {"accuracy": 100 * float(run.history.test_accuracy[-1]), "weights": weights}


def share_plan(run: RunTrials) -> None:
    """RigL at its best share and rate, and at the usual share and its best rate; the small rivals at theirs."""
    for net in SEARCHING:
        for shares in (SHARES, SHARES[:1]):
            arm = {"net": net, "share": shares, "learning_rate": RATES[:4]}
            accuracy = itemgetter("accuracy")
            train.tune(run, **arm, tuning_seeds=WAY_TUNING_SEEDS, seeds=SHARE_SEEDS, score=accuracy)
    for net in RIVALS:
        _tuned(run, RATES, WAY_TUNING_SEEDS, SHARE_SEEDS, net=net)


GRANULARITY = Experiment(
    "sparsity-granularity",
    "a convolutional net pruned by weights, vectors, kernels, filters, blocks and 2:4 to five densities, tuned",
    granularity_trial,
    granularity_plan,
    # One unit in the last place of all initial weights moves the dense net's loss by up to 9e-6 after ten steps.
    # Training after pruning starts from a net that may be another by then: its accuracy is compared with the spread
    # over seeds.
    {"accuracy": 1.0, "density": 1e-6, "entries": 60.0, "size": 0.0, "early_loss": 1e-3},
    chaotic=("accuracy",),
    drawn={"judged_on": "test"},
)

RECURRENT = Experiment(
    "sparsity-recurrent",
    "small and large recurrent nets on MNIST-1D, dense and pruned while they train, tuned",
    recurrent_trial,
    recurrent_plan,
    # One unit in the last place of all initial weights moves the loss by 2e-6 after twenty steps, at tuned rates; a
    # rate 10 % off moves it by 0.0046 or more.
    {"accuracy": 1.0, "weights": 0.0, "early_loss": 1e-3},
    chaotic=("accuracy",),
    drawn={"judged_on": "test"},
)

LONGER_RECORD = Experiment(
    "sparsity-longer",
    "the small recurrent net, dense, trained for three times the epochs, tuned",
    longer_trial,
    longer_plan,
    {"accuracy": 1.0},
    chaotic=("accuracy",),
    drawn={"judged_on": "test"},
)

# Training lets the last bits grow: accuracies are compared with the spread over seeds.
_LAYERS = dict.fromkeys((f"{name}_density" for name in SHAPES), 0.2)

WAYS_RECORD = Experiment(
    "sparsity-ways",
    "four ways to prune, three allocations to the layers, other moments of the cut and a narrow net, tuned",
    ways_trial,
    ways_plan,
    dict.fromkeys((*(f"epoch{i}" for i in range(1, WAY_EPOCHS)), "accuracy"), 1.0) | _LAYERS,
    chaotic=(*(f"epoch{i}" for i in range(1, WAY_EPOCHS)), "accuracy"),
    drawn={"judged_on": "test"},
)

OUTPUT_RECORD = Experiment(
    "sparsity-output",
    "pruned gradually to 1 %, even shares but for the last layer and ERK's but for the last layer, tuned",
    output_trial,
    output_plan,
    {"accuracy": 1.0} | _LAYERS,
    chaotic=("accuracy",),
    drawn={"judged_on": "test"},
)

ROUNDS_RECORD = Experiment(
    "sparsity-rounds",
    "pruning in rounds of full length: fine-tuned, weights rewound, rate rewound, all at one rate",
    rounds_trial,
    rounds_plan,
    dict.fromkeys((*(f"round{i}" for i in range(FULL_ROUNDS)), "accuracy"), 1.0),
    chaotic=(*(f"round{i}" for i in range(FULL_ROUNDS)), "accuracy"),
    drawn={"judged_on": "test"},
)

DYNAMIC = Experiment(
    "sparsity-dynamic",
    "a mask that stays, SET and RigL, with three allocations to the layers, tuned",
    dynamic_trial,
    dynamic_plan,
    {"accuracy": 1.0, "middle": 2.0} | _LAYERS,
    chaotic=("accuracy", "middle"),
    drawn={"judged_on": "test"},
)

SMALL_RECORD = Experiment(
    "sparsity-small",
    "networks of some 830 weights on digits, dense or pruned, on all pixels or on 49, tuned",
    small_trial,
    small_plan,
    {"accuracy": 1.0, "weights": 5.0},
    chaotic=("accuracy", "weights"),
    drawn={"judged_on": "test"},
)

SHARE_RECORD = Experiment(
    "sparsity-share",
    "RigL with the share of connections that move chosen, too, and small dense networks, tuned",
    share_trial,
    share_plan,
    {"accuracy": 1.0, "weights": 5.0},
    chaotic=("accuracy", "weights"),
    drawn={"judged_on": "test"},
)
