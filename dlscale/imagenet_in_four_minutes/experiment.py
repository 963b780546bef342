"""The recorded experiment of notebook 16: the parts that change what is computed, alone, together and taken away."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from dlscale import imagenet_in_four_minutes as record
from dlscale.course.records import Experiment, RunTrials
from dlscale.imagenet_in_four_minutes import PARTS, SHARE, Switches
from dlscale.lab import data, train
from dlscale.lab.data import Dataset
from dlscale.precision import scale_of

EPOCHS, LARGE = 20, 1000  # twenty workers of 50 examples
RATES = tuple(2.0**exponent for exponent in range(-5, 2))
TUNING_SEEDS, SEEDS = (100, 101), range(11_700, 11_724)
EVERY = 60  # steps between two looks, so that one compiled program serves all numbers of epochs


@functools.cache
def signals(judged_on: str) -> Dataset:
    """3,000 training signals, with those held out of them ("validation") or 4,000 fresh ones ("test") to judge by."""
    full = data.load("mnist1d_fresh")
    held_out = data.validation_split(full, fraction=0.25)
    judged = full if judged_on == "test" else held_out
    x, y = held_out.x_train[:3000], held_out.y_train[:3000]
    return replace(held_out, x_train=x, y_train=y, x_test=judged.x_test, y_test=judged.y_test)


def rows(seed: int, epochs: int, batch_size: int, examples: int = 3000) -> np.ndarray:
    """(steps, batch size) which examples: all of them in a new order in every epoch, whole batches only."""
    orders = np.random.default_rng(seed).permuted(np.tile(np.arange(examples), (epochs, 1)), axis=1)
    return orders[:, : examples // batch_size * batch_size].reshape(-1, batch_size).astype(np.int32)


@functools.cache
def step_of(half: bool) -> Callable[..., tuple]:
    """What one worker's program does, here on all examples of the batch, each worker's share normalised by itself."""

    def step(state: tuple, chosen: Array, given: dict[str, Any], x: Array, y: Array) -> tuple[tuple, Array]:
        params, memory = state
        method = record.scaled(record.optimizer(**given), half)
        scale, workers, extra = scale_of(memory), len(chosen) / SHARE, given["switches"].extra_norm
        loss = lambda params: scale * record.loss(params, x[chosen], y[chosen], extra, half)  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(params)
        gradient = jax.tree.map(lambda g: g / workers, gradient)
        updates, memory = method.update(gradient, memory, params)
        return (optax.apply_updates(params, updates), memory), value / scale / workers

    return step


@functools.partial(jax.jit, static_argnums=0)
def begin(half: bool, seed: Array, given: dict[str, Any]) -> tuple:
    """Weights and the optimizer's memory before the first step."""
    params = record.init(jax.random.key(seed))
    return params, record.scaled(record.optimizer(**given), half).init(params)


@functools.partial(jax.jit, static_argnums=0)
def percent_right(half: bool, params: Any, extra: Array, x_train: Array, x: Array, y: Array) -> Array:
    """Batch norm has the statistics of all training examples together. A net that is not finite is never right."""
    _, known = record.forward(params, x_train, extra, half, share=len(x_train))
    logits, _ = record.forward(params, x, extra, half, known=known)
    return 100 * jnp.where(jnp.isfinite(logits).all(1), logits.argmax(-1) == y, False).mean()


def trial(
    batch_size: int, learning_rate: float, seed: int, judged_on: str, epochs: int, norm_scale: float, **switches: float
) -> dict[str, float]:
    """Accuracies in percent, and the loss of the fifth batch, at most 99."""
    given_signals, chosen = signals(judged_on), Switches(**switches)
    order, half = rows(seed, epochs, batch_size), bool(chosen.half)
    numbers = {"rate": learning_rate, "steps": len(order)} | ({"norm_scale": norm_scale} if norm_scale else {})
    given = {name: np.float32(value) for name, value in numbers.items()}
    given["switches"] = Switches(*map(np.float32, chosen))
    x, y = given_signals.x_train, given_signals.y_train.astype(np.int32)
    state, options = begin(half, np.uint32(seed), given), {"every": EVERY, "progress": False}
    (params, _), losses, _ = train.run(step_of(half), state, order, given, x, y, **options)
    extra = given["switches"].extra_norm
    judge = lambda x, y: float(percent_right(half, params, extra, given_signals.x_train, x, y))  # noqa: E731
    return {
        "accuracy": judge(given_signals.x_test, given_signals.y_test),
        "train_accuracy": judge(x, y),
        "early_loss": float(np.nan_to_num(losses[4], nan=99, posinf=99).clip(max=99)),
    }


def arm(batch_size: int = LARGE, epochs: int = EPOCHS, norm_scale: float = 0.0, **on: float) -> dict[str, Any]:
    """The setting of a variant: these parts on, the others off."""
    return {"batch_size": batch_size, "epochs": epochs, "norm_scale": norm_scale} | dict.fromkeys(PARTS, 0.0) | on


ALL = dict.fromkeys(PARTS, 1.0)
FLOAT32 = ALL | {"half": 0.0}
ARMS = [arm(**dict(zip(PARTS, (*on, 0.0), strict=True))) for on in itertools.product((0.0, 1.0), repeat=3)]
ARMS += [arm(**ALL), arm(norm_scale=2.0**10, **ALL)]  # float16; with the norms of LARS in it, too
ARMS += [arm(batch_size=SHARE), arm(epochs=4 * EPOCHS, **FLOAT32)]  # the small batch; four times the epochs


def plan(run: RunTrials) -> None:
    """Each variant tuned on validation data with the same grid, then tested with the reserved seeds."""
    for setting in ARMS:
        rates = (*RATES, 4.0) if setting["norm_scale"] else RATES  # small ratios want large rates
        options = {"tuning_seeds": TUNING_SEEDS, "seeds": SEEDS, "score": itemgetter("accuracy")}
        train.tune(run, learning_rate=rates, **options, **setting)


CLAIMS = "lars spared extra half baseline casts shares longer"
ALLOWED = {"accuracy": 1.0, "train_accuracy": 1.0, "early_loss": 0.05}
CONFIRMED = Experiment(
    "imagenet_in_four_minutes-confirmed",
    "a small residual net on MNIST-1D at batch 1,000 with every combination of LARS, no decay on biases and batch "
    "norm, and an extra batch norm; all of them in float16, with LARS in float16, too, and for four times the epochs; "
    "batch 50 beside; each tuned",
    trial, plan, ALLOWED, chaotic=tuple(ALLOWED),
    drawn={"judged_on": "test", **arm(**FLOAT32)},  # seeds differ least there, so that the tolerance means something
    confirms=tuple(f"imagenet_in_four_minutes-{name}" for name in CLAIMS.split()),
)  # fmt: skip
