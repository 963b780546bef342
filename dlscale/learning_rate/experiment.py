"""The recorded experiment of the learning rate: schedules under one budget, judged by the last and by mean weights."""

import functools
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from dlscale.course.records import Experiment, Measures, Record, RunTrials
from dlscale.lab import data, models, train
from dlscale.learning_rate import schedules

STEPS, BATCH_SIZE, MOMENTUM = 800, 32, 0.9
RATES = tuple(2.0**k for k in range(-7, -1))
SCHEDULES = schedules(STEPS)
ARMS = [*((name, 1.0) for name in SCHEDULES), ("constant", 3.0), ("warm-up", 3.0)]  # schedule, scale of the start
NETWORK = models.mlp((40, 32, 32, 10))


@functools.cache
def _signals(judged_on: str) -> tuple[Array, ...]:
    """3,001 training signals with their labels, and those to judge by: the other 999, or the test set."""
    signals = data.load("mnist1d")
    held_out = data.validation_split(signals, fraction=0.25)
    judge = signals if judged_on == "test" else held_out
    return tuple(map(jnp.asarray, (held_out.x_train, held_out.y_train, judge.x_test, judge.y_test)))


@jax.jit
def _accuracies(rates: Array, scale: float, seed: int, x: Array, y: Array, x_judge: Array, y_judge: Array) -> Measures:
    """Accuracy of the last weights, and of the mean of the weights after each step of the last quarter, in per cent."""
    key = jax.random.key(seed)
    w, as_params = ravel_pytree(NETWORK.init(key))
    batches = jax.random.randint(jax.random.fold_in(key, 1), (STEPS, BATCH_SIZE), 0, len(x))

    def loss(w: Array, batch: Array) -> Array:
        return train.LOSSES["cross_entropy"](NETWORK.apply(as_params(w), x[batch]), y[batch]).mean()

    def step(state: tuple[Array, ...], inputs: tuple[Array, Array]) -> tuple[tuple[Array, ...], None]:
        (w, momentum, total), (rate, batch) = state, inputs
        momentum = MOMENTUM * momentum + jax.grad(loss)(w, batch)
        w = w - rate * momentum
        return (w, momentum, total + w), None

    def accuracy(w: Array) -> Array:
        return 100 * (NETWORK.apply(as_params(w), x_judge).argmax(1) == y_judge).mean()

    parts = jax.tree.map(lambda a: jnp.split(a, [3 * STEPS // 4]), (rates, batches))
    early, late = zip(*parts, strict=True)
    state, _ = lax.scan(step, (scale * w, 0 * w, 0 * w), early)
    (w, _, total), _ = lax.scan(step, (*state[:2], 0 * w), late)
    return {"last": accuracy(w), "mean": accuracy(total / (STEPS - 3 * STEPS // 4))}


def trial(schedule: str, scale: float, learning_rate: float, seed: int, judged_on: str) -> Measures:
    """Train once; a run that became infinite gives every signal the same class, and counts as guessing."""
    rates = jnp.asarray(learning_rate * SCHEDULES[schedule], jnp.float32)
    return _accuracies(rates, scale, seed, *_signals(judged_on))


def compare_schedules(run: RunTrials) -> None:
    """Each arm at the rates that are best for its last and for its mean weights, on held-out signals; then tests."""
    for schedule, scale in ARMS:
        for measure in ("last", "mean"):
            train.tune(
                run, schedule=schedule, scale=scale, learning_rate=RATES, score=itemgetter(measure),
                tuning_seeds=range(100, 108), seeds=range(10_348, 10_380 if scale == 1 else 10_364),
            )  # fmt: skip


def tuned(record: Record, schedule: str, measure: str, scale: float = 1.0, at: str = "") -> np.ndarray:
    """Test accuracies (seeds,) at the rate that is best, on held-out signals, for `measure` or for `at`."""
    arm = {"schedule": schedule, "scale": scale}
    tries = [record.values(at or measure, **arm, learning_rate=rate, judged_on="validation") for rate in RATES]
    return record.values(measure, **arm, learning_rate=RATES[np.mean(tries, 1).argmax()], judged_on="test")


SCHEDULED = Experiment(
    "learning_rate-schedules",
    "A small network under ten schedules, each tuned, judged by its last weights and by their mean",
    trial, compare_schedules,
    {"last": 1.0, "mean": 1.0}, chaotic=("last", "mean"), drawn={"judged_on": "test"},
    confirms=("learning_rate-cosine", "learning_rate-averaging", "learning_rate-warmup_sharp"),
)  # fmt: skip
