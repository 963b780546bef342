"""The recorded experiment of notebook 04: from which batch on do layer-wise rates pay, and until which?

Every arm has the same deep network, epochs, warm-up and decay, and a grid of as many rates, each twice the last.
"""

import functools
from dataclasses import replace
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import data, models, train
from dlscale.lab.data import Dataset

EPOCHS = 40
HIDDEN = (64,) * 6
BATCH_SIZES = (60, 250, 750, 1500, 3000)  # each divides the 3,000 training signals; the last are all of them
TUNING_SEEDS, TEST_SEEDS = (100, 101, 102), range(8)
WEIGHT_DECAY, LAMB_DECAY = 5e-4, 0.01  # as in the papers: LAMB's decay acts on a step that Adam has scaled
TRUST_COEFFICIENT = 0.01


def warm_up_and_decay(peak: Array, steps: Array) -> optax.Schedule:
    """Up to `peak` in a line over the first tenth of the steps, down to zero along a cosine over all of them."""
    first = jnp.ceil(steps / 10)
    return lambda step: peak * jnp.minimum((step + 1) / first, 1) * (1 + jnp.cos(jnp.pi * step / steps)) / 2


def matrices(params: models.Params) -> models.Params:
    """True for weight matrices, False for biases and for the scales and shifts of a normalisation."""
    return jax.tree.map(lambda parameter: parameter.ndim > 1, params)


def momentum(learning_rate: Array, steps: Array) -> optax.GradientTransformation:
    rate = warm_up_and_decay(learning_rate, steps)
    return optax.chain(optax.add_decayed_weights(WEIGHT_DECAY), optax.sgd(rate, 0.9))


def lars(learning_rate: Array, steps: Array, **masks: object) -> optax.GradientTransformation:
    rate = warm_up_and_decay(learning_rate, steps)
    return optax.lars(rate, WEIGHT_DECAY, trust_coefficient=TRUST_COEFFICIENT, momentum=0.9, **masks)


def lamb(learning_rate: Array, steps: Array) -> optax.GradientTransformation:
    return optax.lamb(warm_up_and_decay(learning_rate, steps), weight_decay=LAMB_DECAY)


ARMS = {  # the optimizer, and the exponents of 2 of its grid of rates
    "momentum": (momentum, range(-7, 4)),
    "LARS": (lars, range(-5, 6)),
    "LARS, matrices only": (
        functools.partial(lars, weight_decay_mask=matrices, trust_ratio_mask=matrices),
        range(-5, 6),
    ),
    "LAMB": (lamb, range(-11, 0)),
    "LARS, only matrices decayed": (functools.partial(lars, weight_decay_mask=matrices), range(-5, 6)),
}


@functools.cache
def _signals(judged_on: str) -> Dataset:
    """The same 3,000 training signals, with those held out of them ("validation") or the test set to judge by."""
    signals = data.load("mnist1d")
    held_out = data.validation_split(signals, fraction=0.25)
    return replace(held_out, x_test=signals.x_test, y_test=signals.y_test) if judged_on == "test" else held_out


def trial(arm: str, norm: str, batch_size: int, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracies at the end in percent. A network that has diverged names the first class always: one in ten is right.

    `train_accuracy` is that of the last epoch's minibatches; `second_loss` and `early_loss` are losses after one update
    and after five, at most 99.
    """
    signals = _signals(judged_on)
    updates = len(signals.x_train) // batch_size
    run = train.sweep(
        models.mlp((40, *HIDDEN, 10), norm=None if norm == "none" else norm),
        signals,
        ARMS[arm][0],
        batch_size=batch_size,
        epochs=EPOCHS,
        eval_every=EPOCHS,
        seed=[seed],
        learning_rate=learning_rate,
        steps=EPOCHS * updates,
        progress=False,
    )
    history = run.history
    second_loss, early_loss = np.nan_to_num(history.loss[0, [1, 5]], nan=99).clip(max=99)
    return {
        "accuracy": 100 * history.test_accuracy[0, -1],
        "train_accuracy": 100 * history.accuracy[0, -updates:].mean(),
        "second_loss": second_loss,
        "early_loss": early_loss,
    }


def plan(run: RunTrials) -> None:
    """Tune all arms on validation data, test each at its best rate; ablate the decay where LARS promises most."""
    for norm in ("none", "batch"):
        best = {
            (arm, batch_size): _tune_and_test(run, arm=arm, norm=norm, batch_size=batch_size)
            for batch_size in BATCH_SIZES
            for arm in list(ARMS)[:4]
        }
        promising = max(BATCH_SIZES, key=lambda batch_size: best["LARS", batch_size] - best["momentum", batch_size])
        _tune_and_test(run, arm="LARS, only matrices decayed", norm=norm, batch_size=promising)


def _tune_and_test(run: RunTrials, **setting: object) -> float:
    """The mean validation accuracy of the best rate, which is then tested with other seeds."""
    rates = [2.0**exponent for exponent in ARMS[setting["arm"]][1]]
    tuned = train.tune(
        run, **setting, learning_rate=rates, tuning_seeds=TUNING_SEEDS, seeds=TEST_SEEDS, score=itemgetter("accuracy")
    )
    return float(tuned.scores.mean(-1).max())


LARS = Experiment(
    "batch_size_and_lars-lars",
    "momentum, LARS and LAMB, each tuned, for batches of 60 to all 3,000 signals, with and without batch norm",
    trial,
    plan,
    # One unit in the last place of all initial weights moves the loss, at tuned rates, by 8e-6 after one update, by
    # 0.004 after five and by 0.14 after twenty; a doubled rate moves it by 0.035 or more after five.
    {"accuracy": 1.0, "train_accuracy": 1.0, "second_loss": 1e-4, "early_loss": 0.02},
    chaotic=("accuracy", "train_accuracy"),
    drawn={"judged_on": "test"},  # at tuned rates: beyond them the last bit can decide whether a run recovers
)
