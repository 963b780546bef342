"""The recorded experiments of notebook 16: all combinations of the parts that change what is computed, and what the
large batch comes to in more epochs and with compressed gradients, and what two parts are worth in more epochs."""

import functools
import itertools
import math
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
TUNING_SEEDS, SEEDS = (100, 101), range(8)
FRESH_SEEDS = range(20, 28)  # for a claim whose arms had been seen
LONGER_SEEDS = range(30, 38)  # for what parts are worth in more epochs: a look at that had had 20 to 27
CAST_SEEDS = range(40, 56)  # for float16 beside float32, which had been seen on eight


@functools.cache
def signals(judged_on: str) -> Dataset:
    """3,000 training signals, with those held out of them ("validation") or 4,000 fresh ones ("test") to judge by."""
    full = data.load("mnist1d_fresh")
    held_out = data.validation_split(full, fraction=0.25)
    judged = full if judged_on == "test" else held_out
    return replace(
        held_out,
        x_train=held_out.x_train[:3000],
        y_train=held_out.y_train[:3000],
        x_test=judged.x_test,
        y_test=judged.y_test,
    )


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
        value, gradient = jax.value_and_grad(
            lambda params: scale * record.loss(params, x[chosen], y[chosen], extra, half)
        )(params)
        gradient = jax.tree.map(lambda g: g / workers, gradient)
        updates, memory = method.update(gradient, memory, params)
        return (optax.apply_updates(params, updates), memory), value / scale / workers

    return step


@functools.cache
def step_of_senders(keep: float) -> Callable[..., tuple]:
    """Workers in float32, of which each sends this share of its gradient's entries and remembers the others."""
    one = record.worker(False, record.System(keep=keep), "workers")
    workers = jax.vmap(one, ((None, None, 0), 0, None), axis_name="workers")

    def step(state: tuple, chosen: Array, given: dict[str, Any], x: Array, y: Array) -> tuple[tuple, Array]:
        shares = chosen.reshape(-1, SHARE)
        (params, memory, unsent), value = workers(state, (x[shares], y[shares]), given)
        params, memory, value = jax.tree.map(itemgetter(0), (params, memory, value))  # all workers have the same
        return (params, memory, unsent), value

    return step


@functools.partial(jax.jit, static_argnums=0)
def begin(half: bool, seed: Array, given: dict[str, Any]) -> tuple:
    """Weights and the optimizer's memory before the first step."""
    params = record.start(jax.random.key(seed))
    return params, record.scaled(record.optimizer(**given), half).init(params)


@functools.partial(jax.jit, static_argnums=0)
def percent_right(half: bool, params: Any, extra: Array, x_train: Array, x: Array, y: Array) -> Array:
    """Batch norm has the statistics of all training examples together. A net that is not finite is never right."""
    _, known = record.forward(params, x_train, extra, half, share=len(x_train))
    logits, _ = record.forward(params, x, extra, half, known=known)
    return 100 * jnp.where(jnp.isfinite(logits).all(1), logits.argmax(-1) == y, False).mean()


def trial(
    batch_size: int,
    learning_rate: float,
    seed: int,
    judged_on: str,
    decay: float = record.DECAY,
    norms: float = 0.0,
    epochs: int = EPOCHS,
    keep: float = 1.0,
    **switches: float,
) -> dict[str, float]:
    """Accuracies in percent, and the loss of the fifth batch, at most 99."""
    given_signals, chosen = signals(judged_on), Switches(**switches)
    order, half = rows(seed, epochs, batch_size), bool(chosen.half)
    numbers = {"rate": learning_rate, "steps": len(order), "decay": decay} | ({"norms": norms} if norms else {})
    given = {name: np.float32(value) for name, value in numbers.items()}
    given["switches"] = Switches(*map(np.float32, chosen))
    x, y = given_signals.x_train, given_signals.y_train.astype(np.int32)
    state, step = begin(half, np.uint32(seed), given), step_of(half)
    if keep < 1:
        unsent = record.compressor(record.System(keep=keep)).init(state[0])
        state = (*state, jax.tree.map(lambda a: np.zeros((batch_size // SHARE, *a.shape), a.dtype), unsent))
        step = step_of_senders(keep)
    (params, *_), losses, _ = train.run(step, state, order, given, x, y, progress=False)
    extra = given["switches"].extra_norm
    judge = lambda x, y: float(percent_right(half, params, extra, given_signals.x_train, x, y))  # noqa: E731
    return {
        "accuracy": judge(given_signals.x_test, given_signals.y_test),
        "train_accuracy": judge(x, y),
        "early_loss": float(np.nan_to_num(losses[4], nan=99, posinf=99).clip(max=99)),
    }


def tuned(
    run: RunTrials, seeds: range, rates: tuple[float, ...] = RATES, **setting: float
) -> dict[str, float | str | int]:
    """Tune the rate on validation data, then test with other seeds; the best setting."""
    options = {"tuning_seeds": TUNING_SEEDS, "seeds": seeds, "score": itemgetter("accuracy")}
    return train.tune(run, learning_rate=rates, **options, **setting).setting


ALL = dict.fromkeys(PARTS, 1.0)
NONE = dict.fromkeys(PARTS, 0.0)


def plan(run: RunTrials) -> None:
    """Tune and test all 32 combinations at the large batch, then the controls and other batches."""

    test = functools.partial(tuned, run, SEEDS)
    usual = {"decay": record.DECAY, "norms": 0.0}
    # small batches first: what the large one is measured by
    for chosen in (NONE | {"schedule": 1.0}, NONE | {"schedule": 1.0, "extra_norm": 1.0}, ALL | {"half": 0.0}):
        small = {"batch_size": SHARE, **usual, **chosen}
        best = small | test(**small)
        if not chosen["lars"]:
            run([best | {"seed": seed, "judged_on": "test"} for seed in FRESH_SEEDS])
    for chosen in itertools.product((0.0, 1.0), repeat=len(PARTS) - 1):
        test(batch_size=LARGE, **usual, **dict(zip(PARTS, (*chosen, 0.0), strict=True)))
    test(batch_size=LARGE, **usual, **ALL)
    for norms in (1.0, 2.0**10):  # LARS without casts; small ratios want large rates
        test((*RATES, 4.0), batch_size=LARGE, decay=record.DECAY, norms=norms, **ALL)
    test(batch_size=LARGE, **usual, **(ALL | {"lars": 2.0, "half": 0.0}))  # one ratio for the whole net
    for spared in (0.0, 1.0):  # a decay that bites
        test(batch_size=LARGE, decay=20 * record.DECAY, norms=0.0, **(ALL | {"half": 0.0, "spared": spared}))
    for batch_size in (200, 3000):
        for chosen in (NONE, ALL | {"half": 0.0}):
            test(batch_size=batch_size, **usual, **chosen)
    for chosen in itertools.product((0.0, 1.0), repeat=len(PARTS) - 1):
        test(batch_size=LARGE, **usual, **dict(zip(PARTS, (*chosen, 1.0), strict=True)))


ALLOWED = {"accuracy": 1.0, "train_accuracy": 1.0, "early_loss": 0.05}
SWITCHES = Experiment(
    "imagenet_in_four_minutes-switches",
    "a small residual net on MNIST-1D at batch 1,000 with every combination of LARS, schedule, spared decay, extra "
    "batch norm and float16, each tuned; with controls and other batches",
    trial,
    plan,
    ALLOWED,
    chaotic=tuple(ALLOWED),
    drawn={  # seeds differ least there, so that the tolerance means something; float16 takes twice as long to compile
        "judged_on": "test",
        "batch_size": LARGE,
        "decay": record.DECAY,
        "norms": 0.0,
        "lars": 1.0,
        "schedule": 1.0,
        "extra_norm": 1.0,
        "half": 0.0,
    },
)


def plan_further(run: RunTrials) -> None:
    """All parts in float32, tuned alike, tested on seeds that no other arm of them had: four times the epochs, at the
    small batch, too; few entries sent, with all of them beside; and all parts in float16, on seeds of their own."""
    setting = ALL | {"half": 0.0, "decay": record.DECAY, "norms": 0.0}
    for more in ({"epochs": EPOCHS}, {"epochs": 4 * EPOCHS}, {"keep": 0.1}, {"keep": 0.01}):
        tuned(run, FRESH_SEEDS, batch_size=LARGE, **setting, **more)
    small = setting | dict.fromkeys(PARTS, 0.0) | {"schedule": 1.0}
    tuned(run, FRESH_SEEDS, batch_size=SHARE, epochs=4 * EPOCHS, **small)
    for half in (0.0, 1.0):
        tuned(run, CAST_SEEDS, batch_size=LARGE, epochs=EPOCHS, **(setting | {"half": half}))


FURTHER = Experiment(
    "imagenet_in_four_minutes-further",
    "the small residual net on MNIST-1D at batch 1,000 with LARS, schedule, spared decay and extra batch norm: four "
    "times the epochs, a tenth or a hundredth of the gradient's entries sent, and float16 on sixteen fresh seeds, each "
    "tuned; with controls",
    trial,
    plan_further,
    ALLOWED,
    chaotic=tuple(ALLOWED),
    # the shortest arm, at its best rate: at the rates where runs diverge two seeds can be alike by chance
    drawn={"judged_on": "test", "batch_size": LARGE, "epochs": EPOCHS, "half": 0.0},
)


def plan_longer(run: RunTrials) -> None:
    """Both lengths, float32: the four parts for accuracy, the same without LARS or without the extra batch norm, and
    the schedule alone. Each tuned on the same grid at its own length, all tested on the same fresh seeds."""
    four = ALL | {"half": 0.0}
    for epochs in (EPOCHS, 4 * EPOCHS):
        for chosen in (four, four | {"lars": 0.0}, four | {"extra_norm": 0.0}, NONE | {"schedule": 1.0}):
            setting = {"batch_size": LARGE, "epochs": epochs, "decay": record.DECAY, "norms": 0.0}
            tuned(run, LONGER_SEEDS, **setting, **chosen)


LONGER = Experiment(
    "imagenet_in_four_minutes-longer",
    "the small residual net on MNIST-1D at batch 1,000 with LARS, schedule, spared decay and extra batch norm, without "
    "LARS, without the extra batch norm, and with the schedule alone, for 60 and for 240 updates, each tuned",
    trial,
    plan_longer,
    ALLOWED,
    chaotic=tuple(ALLOWED),
    drawn={"judged_on": "test", "epochs": EPOCHS, "lars": 1.0, "extra_norm": 1.0},
)


def skipped(learning_rate: float, seed: int) -> dict[str, float]:
    """How many updates the loss scale skips in all five parts' training: it is halved each time, and grows in none of
    so few updates."""
    given_signals, order = signals("test"), rows(seed, EPOCHS, LARGE)
    given = {"rate": np.float32(learning_rate), "steps": np.float32(len(order)), "decay": np.float32(record.DECAY)}
    given["switches"] = Switches(*(np.float32(ALL[name]) for name in PARTS))
    x, y = given_signals.x_train, given_signals.y_train.astype(np.int32)
    state = begin(True, np.uint32(seed), given)
    (_, memory), _, _ = train.run(step_of(True), state, order, given, x, y, progress=False)
    return {"skipped": math.log2(float(scale_of(state[1])) / float(scale_of(memory)))}


def plan_skips(run: RunTrials) -> None:
    """At the rate that tuning chose for all five parts, on the seeds of the claim about float16."""
    run([{"learning_rate": 1.0, "seed": seed} for seed in CAST_SEEDS])


SKIPS = Experiment(
    "imagenet_in_four_minutes-skips",
    "how many of its 60 updates the small residual net in float16 with all parts on skips for its loss scale",
    skipped,
    plan_skips,
    {"skipped": 1.0},
    chaotic=("skipped",),
)
