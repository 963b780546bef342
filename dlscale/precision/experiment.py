"""The recorded experiment of notebook 05: LeNet in 16-bit fixed point, to the nearest number or to a random neighbour.

Gupta et al. 2015 (arXiv:1502.02551): every number is a word of 16 bits, `fraction_bits` of them behind the point.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import data, models, train
from dlscale.lab.data import Dataset
from dlscale.precision import Fixed, quantize

STEPS, BATCH_SIZE, MOMENTUM = 300, 32, 0.9
FRACTION_BITS = (6, 8, 10, 12, 14)
ROUNDINGS = ("nearest", "stochastic")
RATES = tuple(2.0**exponent for exponent in range(-11, -3))
SCALES = (1.0, 32.0)  # by which the loss is multiplied: 32 undoes the mean over a batch
TUNING_SEEDS, TEST_SEEDS = (100, 101), range(8, 16)
OUTPUTS = Fixed(6, 10)  # of the layers, whatever the rest has: in words with a longer fraction they overflow


@functools.cache
def _images(judged_on: str) -> Dataset:
    """The same 6,000 training images, with those held out of them ("validation") or the test set to judge by."""
    images = data.load("mnist")
    held_out = data.validation_split(images, fraction=0.25)
    return replace(held_out, x_test=images.x_test, y_test=images.y_test) if judged_on == "test" else held_out


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


def _logits(params: models.Params, x: Array, output: Callable[[Array], Array]) -> Array:
    """LeNet, with `output` applied to what each layer computes."""
    for name, layer in models.lenet().layers.items():
        x = layer.activation(output(layer.compute(params[name], x)))
    return x


@functools.partial(jax.jit, static_argnames="rounding")
def _train(
    params: models.Params,
    order: Array,
    x: Array,
    y: Array,
    key: Array,
    word: Fixed,
    rate: Array,
    scale: Array,
    rounding: str,
) -> tuple[models.Params, Array]:
    """Parameters and the losses (steps,) of SGD with momentum.

    Weights, their steps and the errors of the scaled loss are words, products and the softmax are float32.
    """
    start, as_layers = ravel_pytree(params)  # one array: fewer generators of random numbers to compile

    def step(state: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple:
        (w, memory), (rows, number) = state, inputs
        keys = map(functools.partial(jax.random.fold_in, jax.random.fold_in(key, number)), itertools.count())

        def loss(w: Array) -> Array:
            z = _logits(as_layers(w), x[rows], lambda h: _output(h, word, next(keys), rounding))
            return -scale * jnp.take_along_axis(jax.nn.log_softmax(z), y[rows][:, None], 1).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        memory = _round(MOMENTUM * memory + gradient / scale, word, rounding, next(keys))
        return (_round(w - rate * memory, word, rounding, next(keys)), memory), value / scale

    (w, _), losses = jax.lax.scan(step, (start, jnp.zeros_like(start)), (order, jnp.arange(len(order))))
    return as_layers(w), losses


@jax.jit
def _accuracy(params: models.Params, x: Array, y: Array) -> Array:
    return train.evaluate(models.lenet(), params, x, y)[1]


def trial(
    fraction_bits: int, rounding: str, loss_scale: float, learning_rate: float, seed: int, judged_on: str
) -> dict[str, float]:
    """Accuracy in percent after 300 steps, and losses after one step and after five.

    `rounding` "none" trains in float32, whatever `fraction_bits` says.
    """
    images = _images(judged_on)
    rng, count = np.random.default_rng(seed), len(images.x_train)
    order = np.concatenate([rng.permutation(count) for _ in range(-(-STEPS * BATCH_SIZE // count))])
    # rbg: a generator that compiles and draws far faster than JAX's usual one
    keys = jax.random.key(seed), jax.random.key(seed, impl="unsafe_rbg")
    params = jax.jit(models.lenet().init)(keys[0])
    rows = order[: STEPS * BATCH_SIZE].reshape(STEPS, BATCH_SIZE)
    word = Fixed(16 - fraction_bits, fraction_bits)
    numbers = np.float32(learning_rate), np.float32(loss_scale)
    params, losses = _train(params, rows, images.x_train, images.y_train, keys[1], word, *numbers, rounding)
    accuracy = 100 * float(_accuracy(params, images.x_test, images.y_test))
    return {"accuracy": accuracy, "second_loss": losses[1], "early_loss": losses[5]}


def plan(run: RunTrials) -> None:
    """Each arm at the best of the same rates, found on validation images; then the test images with other seeds."""
    for arm in [*itertools.product(FRACTION_BITS, ROUNDINGS, SCALES), (14, "none", 1.0)]:
        setting = dict(zip(("fraction_bits", "rounding", "loss_scale"), arm, strict=True))
        train.tune(
            run,
            **setting,
            learning_rate=RATES,
            tuning_seeds=TUNING_SEEDS,
            seeds=TEST_SEEDS,
            score=itemgetter("accuracy"),
        )


LENET = Experiment(
    "precision-lenet",
    "LeNet on MNIST in 16-bit fixed point: 6 to 14 fraction bits, nearest or stochastic rounding, loss scaled or not",
    trial,
    plan,
    # One unit in the last place of all initial weights moves the loss, at tuned rates, by 0.0004 after one step, by
    # 0.009 after five and by 0.15 after twenty; a doubled rate moves it by 0.005 or more after one step.
    {"accuracy": 1.0, "second_loss": 0.002, "early_loss": 0.02},
    chaotic=("accuracy",),
    drawn={"judged_on": "test", "rounding": "nearest"},  # at tuned rates; random numbers take longer to compile
)
