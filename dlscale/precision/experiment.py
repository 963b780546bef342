"""The recorded experiments of precision: small networks in short formats, and LeNet in 16-bit fixed point.

A `Variant` names the formats that are not float32. `weights` and `momentum` are what the optimizer stores between
steps; `forward` and `backward` what products read and write (activations and copies of the weights; gradients).
LeNet follows Gupta et al. 2015 (arXiv:1502.02551): every number is a word of 16 bits, `fraction_bits` of them behind
the point.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from dlscale.course import records
from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import data, models, train
from dlscale.lab.data import Dataset
from dlscale.lab.models import Model, Params
from dlscale.precision import Fixed, dynamic_loss_scale, quantize, store

# Small networks in short formats


HALF, E5M2, E4M3 = "float16", "float8_e5m2", "float8_e4m3fn"


class Task(NamedTuple):
    """A network and how it is trained: `optimizer` gives the direction of a step."""

    dataset: str
    model: Model
    optimizer: optax.GradientTransformation
    batch_size: int
    steps: int
    rates: tuple[float, ...]
    random_labels: float = 0.0  # share of the training labels that are random


SIGNALS = Task("mnist1d_fresh", models.mlp((40, 32, 32, 10)), optax.trace(0.9), 100, 300, (0.025, 0.05, 0.1, 0.2, 0.4))
TASKS = {
    "digits": Task(
        "digits", models.mlp((64, *[32] * 5, 10), "sigmoid"), optax.scale_by_adam(), 32, 1000,
        (0.0025, 0.005, 0.01, 0.02, 0.04),
    ),
    "signals": SIGNALS,
    "mislabelled signals": SIGNALS._replace(random_labels=0.4),
    "noisy digits": Task(
        "digits", models.mlp((64, 24, 10)), optax.trace(0.9), 32, 1500,
        (0.003125, 0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4), 0.3,
    ),
}  # fmt: skip


class Variant(NamedTuple):
    """The format of each kind of tensor, and the loss scale: with `factor` 1 it stays, with 2 it is dynamic."""

    forward: str = "float32"
    backward: str = "float32"
    softmax: str = "float32"
    weights: str = "float32"
    momentum: str = "float32"
    rounding: str = "nearest"  # of the stored weights
    loss_scale: float = 2.0**10
    factor: float = 2.0
    num_workers: int = 1  # that divide the loss before it is differentiated


def logits(model: Model, params: Params, x: Array, variant: Variant) -> Array:
    """The network's outputs (examples, classes); every tensor that a product reads or writes is stored on its way."""
    stored = functools.partial(store, forward_format=variant.forward, backward_format=variant.backward)
    x = stored(x)
    for name, layer in model.layers.items():
        x = stored(layer.activation(stored(layer.compute(jax.tree.map(stored, params[name]), x))))
    return x


def cross_entropy(z: Array, y: Array, name: str) -> Array:
    """The mean loss of logits (examples, classes), with each of its operations stored in the format."""
    stored = functools.partial(store, forward_format=name, backward_format=name)
    z = stored(z - jax.lax.stop_gradient(z.max(1, keepdims=True)))
    total = stored(stored(jnp.exp(z)).sum(1))
    return stored(stored(jnp.log(total)) - jnp.take_along_axis(z, y[:, None], 1)[:, 0]).mean()


def optimizer_of(task: str, variant: Variant) -> optax.GradientTransformation:
    """The task's optimizer behind the variant's loss scale."""
    return dynamic_loss_scale(TASKS[task].optimizer, variant.loss_scale, variant.factor, period=30)


@functools.cache
def training_step(task: str, variant: Variant) -> Callable[..., tuple[Any, Array]]:
    """A training step for `train.run`: state, (rows, key), learning rate, x, y to the next state and the loss."""
    model, optimizer = TASKS[task].model, optimizer_of(task, variant)

    def one(state: tuple, inputs: tuple[Array, Array], learning_rate: Array, x: Array, y: Array) -> tuple:
        (params, memory), (rows, key) = state, inputs

        def objective(params: Params) -> tuple[Array, Array]:
            loss = cross_entropy(logits(model, params, x[rows], variant), y[rows], variant.softmax)
            return memory.scale / variant.num_workers * loss, loss

        gradients, loss = jax.grad(objective, has_aux=True)(params)
        gradients = jax.tree.map(lambda g: variant.num_workers * g, gradients)
        direction, memory = optimizer.update(gradients, memory)
        weights, as_params = ravel_pytree(jax.tree.map(lambda w, d: w - learning_rate * d, params, direction))
        moments, as_inner = ravel_pytree(memory.inner)
        memory = memory._replace(inner=as_inner(quantize(moments, variant.momentum)))
        return (as_params(quantize(weights, variant.weights, variant.rounding, key)), memory), loss

    return one


@functools.cache
def _examples(dataset: str, judged_on: str, share: float = 0.0) -> Dataset:
    """Training examples, a `share` with random labels, and those held out of them ("validation") or the test set."""
    full = data.load(dataset)
    held_out = data.validation_split(full, fraction=0.25)
    if share:
        rng, labels = np.random.default_rng(2), held_out.y_train
        wrong = rng.integers(0, len(full.classes), len(labels)).astype(labels.dtype)
        held_out = replace(held_out, y_train=np.where(rng.random(len(labels)) < share, wrong, labels))
    return replace(held_out, x_test=full.x_test, y_test=full.y_test) if judged_on == "test" else held_out


@functools.partial(jax.jit, static_argnums=0)
def _percent_right(model: Model, params: Params, x: Array, y: Array) -> Array:
    return 100 * train.evaluate(model, params, x, y)[1]


WORKER = Variant(num_workers=1024, loss_scale=1.0, factor=1.0)
HALF_WORKER = WORKER._replace(forward=HALF, backward=HALF)
PRODUCTS = {name: Variant(forward=name, backward=name) for name in (HALF, E5M2, E4M3)}
MIXED, EVERYTHING = PRODUCTS[HALF], Variant(*[HALF] * 5)
VARIANTS: dict[str, tuple[str, Variant]] = {
    "worker, float32": ("digits", WORKER),
    "worker, float16": ("digits", HALF_WORKER),
    "worker, float16, scale 2^20": ("digits", HALF_WORKER._replace(loss_scale=2.0**20)),
    "worker, float16, dynamic": ("digits", HALF_WORKER._replace(loss_scale=2.0**15, factor=2.0)),
    "worker, bfloat16": ("digits", WORKER._replace(forward="bfloat16", backward="bfloat16")),
    "alone, float16": ("digits", HALF_WORKER._replace(num_workers=1)),
    "float32": ("signals", Variant()),
    **{f"products {name}": ("signals", variant) for name, variant in PRODUCTS.items()},
    "softmax float16": ("signals", MIXED._replace(softmax=HALF)),
    "weights float16": ("signals", MIXED._replace(weights=HALF, momentum=HALF)),
    "softmax e4m3": ("signals", PRODUCTS[E4M3]._replace(softmax=E4M3)),
    "weights e4m3": ("signals", PRODUCTS[E4M3]._replace(weights=E4M3, momentum=E4M3)),
    "everything float16": ("signals", EVERYTHING),
    "mislabelled, float32": ("mislabelled signals", Variant()),
    "mislabelled, everything float16": ("mislabelled signals", EVERYTHING),
    "activations e5m2": ("signals", Variant(forward=E5M2)),
    "gradients e5m2": ("signals", Variant(backward=E5M2)),
    "momentum e5m2": ("signals", Variant(momentum=E5M2)),
    "stored e5m2": ("signals", Variant(weights=E5M2)),
    "stored e5m2, random": ("signals", Variant(weights=E5M2, rounding="stochastic")),
    "noisy digits, float32": ("noisy digits", Variant()),
    "noisy digits, stored e5m2": ("noisy digits", Variant(weights=E5M2)),
    "noisy digits, stored e5m2, random": ("noisy digits", Variant(weights=E5M2, rounding="stochastic")),
}


def train_variant(variant: str, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracy in per cent at the end, and the loss of the sixth step."""
    name, chosen = VARIANTS[variant]
    task = TASKS[name]
    examples = _examples(task.dataset, judged_on, task.random_labels)
    rng, count = np.random.default_rng(seed), len(examples.x_train)
    whole = count - count % task.batch_size  # each epoch takes whole batches only
    epochs = -(-task.steps * task.batch_size // whole)
    rows = np.concatenate([rng.permutation(count)[:whole] for _ in range(epochs)]).reshape(-1, task.batch_size)
    # rbg: a generator that compiles and draws far faster than JAX's usual one
    keys = jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), task.steps)
    params = jax.tree.map(lambda w: quantize(w, chosen.weights), jax.jit(task.model.init)(jax.random.key(seed)))
    state = params, optimizer_of(name, chosen).init(params)
    given = np.float32(learning_rate), examples.x_train, examples.y_train
    run = train.run(training_step(name, chosen), state, (rows[: task.steps], keys), *given, progress=False)
    accuracy = _percent_right(task.model, run.state[0], examples.x_test, examples.y_test)
    return {"accuracy": float(accuracy), "early_loss": float(run.records[5])}


def compare_variants(run: RunTrials) -> None:
    """Each variant at the best of its task's learning rates, found on validation examples; then reserved seeds.

    Both roundings of the noisy digits' weights also at one rate: what a comparison without tuning would see.
    """
    seeds = range(10_000, 10_032)
    for variant, (task, _) in VARIANTS.items():
        chosen = {"variant": variant, "learning_rate": TASKS[task].rates, "score": itemgetter("accuracy")}
        train.tune(run, **chosen, tuning_seeds=(100, 101, 102, 103), seeds=seeds)
    for variant in ("noisy digits, stored e5m2", "noisy digits, stored e5m2, random"):
        run([{"variant": variant, "learning_rate": 0.1, "seed": seed, "judged_on": "test"} for seed in seeds])


FORMATS = Experiment(
    "precision-formats",
    "Small networks in short formats: one of 1,024 workers, one kind of tensor after the other, stored weights",
    train_variant, compare_variants,
    {"accuracy": 1.0, "early_loss": 0.05}, chaotic=("accuracy",), drawn={"judged_on": "test"},
    confirms=(
        "precision-loss_scaling", "precision-bfloat16", "precision-dynamic", "precision-mixed", "precision-softmax",
        "precision-update", "precision-weights-in-8-bits", "precision-labels", "precision-random-weights",
        "precision-random-weights-noisy", "precision-random-weights-untuned",
    ),
)  # fmt: skip


# LeNet in fixed point

STEPS, BATCH_SIZE, MOMENTUM = 300, 32, 0.9
FRACTION_BITS = (6, 8, 10, 12, 14)
ROUNDINGS = ("nearest", "stochastic")
OUTPUTS = Fixed(6, 10)  # of the layers, whatever the rest has: in words with a longer fraction they overflow
LENET_MODEL = models.lenet()


def _round(x: Array, word: Fixed, rounding: str, key: Array) -> Array:
    return x if rounding == "none" else quantize(x, word, rounding, key)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _output(x: Array, word: Fixed, key: Array, rounding: str) -> Array:
    """A layer's output in the format of outputs; its error, on the way back, as a `word`."""
    return _round(x, OUTPUTS, rounding, jax.random.fold_in(key, 0))


_output.defvjp(
    lambda x, word, key, rounding: (_output(x, word, key, rounding), (word, key)),
    lambda rounding, kept, g: (_round(g, kept[0], rounding, jax.random.fold_in(kept[1], 1)), None, None),
)


@functools.partial(jax.jit, static_argnames="rounding")
def _train(
    params: models.Params, order: Array, x: Array, y: Array, key: Array, word: Fixed, rate: Array, scale: Array,
    rounding: str,
) -> tuple[models.Params, Array]:  # fmt: skip
    """Parameters and the losses (steps,) of SGD with momentum.

    Weights, their steps and the errors of the scaled loss are words, products and the softmax are float32.
    """
    start, as_layers = ravel_pytree(params)  # one array: fewer generators of random numbers to compile

    def step(state: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple:
        (w, memory), (rows, number) = state, inputs
        keys = map(functools.partial(jax.random.fold_in, jax.random.fold_in(key, number)), itertools.count())

        def loss(w: Array) -> Array:
            h, layers = x[rows], as_layers(w)
            for name, layer in LENET_MODEL.layers.items():
                h = layer.activation(_output(layer.compute(layers[name], h), word, next(keys), rounding))
            return -scale * jnp.take_along_axis(jax.nn.log_softmax(h), y[rows][:, None], 1).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        memory = _round(MOMENTUM * memory + gradient / scale, word, rounding, next(keys))
        return (_round(w - rate * memory, word, rounding, next(keys)), memory), value / scale

    (w, _), losses = jax.lax.scan(step, (start, jnp.zeros_like(start)), (order, jnp.arange(len(order))))
    return as_layers(w), losses


def trial(
    fraction_bits: int, rounding: str, loss_scale: float, learning_rate: float, seed: int, judged_on: str
) -> dict[str, float]:
    """Accuracy in percent after 300 steps, and losses after one step and after five.

    `rounding` "none" trains in float32, whatever `fraction_bits` says.
    """
    images = _examples("mnist", judged_on)
    rng, count = np.random.default_rng(seed), len(images.x_train)
    order = np.concatenate([rng.permutation(count) for _ in range(-(-STEPS * BATCH_SIZE // count))])
    # rbg: a generator that compiles and draws far faster than JAX's usual one
    keys = jax.random.key(seed), jax.random.key(seed, impl="unsafe_rbg")
    params = jax.jit(LENET_MODEL.init)(keys[0])
    rows = order[: STEPS * BATCH_SIZE].reshape(STEPS, BATCH_SIZE)
    word = Fixed(16 - fraction_bits, fraction_bits)
    numbers = np.float32(learning_rate), np.float32(loss_scale)
    params, losses = _train(params, rows, images.x_train, images.y_train, keys[1], word, *numbers, rounding)
    accuracy = _percent_right(LENET_MODEL, params, images.x_test, images.y_test)
    return {"accuracy": float(accuracy), "second_loss": losses[1], "early_loss": losses[5]}


def plan(run: RunTrials) -> None:
    """Each arm at the best of the same rates, found on validation images; then the test images with other seeds."""
    rates = {"learning_rate": tuple(2.0**exponent for exponent in range(-11, -3)), "score": itemgetter("accuracy")}
    scales = 1.0, 32.0  # by which the loss is multiplied: 32 undoes the mean over a batch
    for arm in [*itertools.product(FRACTION_BITS, ROUNDINGS, scales), (14, "none", 1.0)]:
        setting = dict(zip(("fraction_bits", "rounding", "loss_scale"), arm, strict=True))
        train.tune(run, **setting, **rates, tuning_seeds=(100, 101), seeds=range(8, 16))


LENET = Experiment(
    "precision-lenet",
    "LeNet on MNIST in 16-bit fixed point: 6 to 14 fraction bits, nearest or stochastic rounding, loss scaled or not",
    trial, plan,
    # One unit in the last place of all initial weights moves the loss, at tuned rates, by 0.0004 after one step, by
    # 0.009 after five and by 0.15 after twenty; a doubled rate moves it by 0.005 or more after one step.
    {"accuracy": 1.0, "second_loss": 0.002, "early_loss": 0.02}, chaotic=("accuracy",),
    drawn={"judged_on": "test", "rounding": "nearest"},  # at tuned rates; random numbers take longer to compile
)  # fmt: skip


# The arms that decide claims, at the rates that were found, with seeds that nothing else used
CONFIRMED_ARMS = [(bits, rounding, 1.0) for bits in (12, 14) for rounding in ROUNDINGS]
CONFIRMED_ARMS += [(8, "stochastic", 1.0), (8, "nearest", 32.0)]


def plan_confirmation(run: RunTrials) -> None:
    """The test images with reserved seeds, each arm at the rate that the record of all arms tested."""
    record = records.read("precision-lenet")
    for arm in CONFIRMED_ARMS:
        setting = dict(zip(("fraction_bits", "rounding", "loss_scale"), arm, strict=True))
        (rate,) = record.options("learning_rate", **setting, judged_on="test")
        setting |= {"learning_rate": rate, "judged_on": "test"}
        run([setting | {"seed": seed} for seed in range(10_032, 10_048)])


LENET_CONFIRMED = replace(
    LENET, id="precision-lenet_confirmed",
    about="The arms of precision-lenet that decide claims, with other seeds",
    plan=plan_confirmation,
    confirms=("precision-stochastic", "precision-scale-instead"),
)  # fmt: skip
