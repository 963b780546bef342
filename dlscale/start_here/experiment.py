"""The recorded experiment of start_here: accuracy and time to a target, by the number of machines.

Machines that share a step, with 15 examples each, take it on a batch of 15 examples times their number.
"""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace

import jax
import numpy as np
import optax
from jax import Array

from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import data, models, train
from dlscale.lab.data import Dataset
from dlscale.start_here import NEVER, PASSES, TARGETS

# by the number of machines: passes that are tested often, and steps from test to test; then it is every 10 passes
OFTEN = {1: (10, 40), 5: (10, 8), 10: (20, 5), 20: (20, 4), 50: (30, 2), 100: (60, 2), 200: (90, 2)}
SMALLEST = {1: -9, 5: -6, 10: -5} | dict.fromkeys((20, 50, 100, 200), -4)  # of six learning rates, as a power of two
MEASURES = (*(f"after {passes} passes" for passes in PASSES), *(f"passes to {target} %" for target in TARGETS))
EXAMPLES = 3000
NETWORK = models.mlp((40, 64, 64, 10))


def step(state: tuple, rows: Array, learning_rate: Array, x: Array, y: Array) -> tuple:
    """One step of all machines together, for `train.run`."""
    params, memory = state

    def loss(params: models.Params) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(NETWORK.apply(params, x[rows]), y[rows]).mean()

    updates, memory = optax.sgd(learning_rate, momentum=0.9).update(jax.grad(loss)(params), memory)
    return (optax.apply_updates(params, updates), memory), None


@functools.cache
def _signals(judged_on: str) -> Dataset:
    """The same training examples, with those held out of them ("validation") or the test set to judge by."""
    full = data.load("mnist1d")
    held_out = data.validation_split(full, fraction=0.25)
    return replace(held_out, x_test=full.x_test, y_test=full.y_test) if judged_on == "test" else held_out


@jax.jit
def _percent_right(params: models.Params, x: Array, y: Array) -> Array:
    return 100 * (NETWORK.apply(params, x).argmax(1) == y).mean()


def train_machines(machines: int, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracy in per cent after so many passes; passes until each target, NaN where it was not reached."""
    signals, order = _signals(judged_on), np.random.default_rng(seed)
    rows = np.concatenate([order.permutation(EXAMPLES) for _ in range(PASSES[-1])]).reshape(-1, 15 * machines)
    (often, every), steps = OFTEN[machines], EXAMPLES // (15 * machines)  # steps of a pass
    params = jax.jit(NETWORK.init)(jax.random.key(seed))
    state, curve, tested = (params, optax.sgd(1.0, momentum=0.9).init(params)), [], []
    for begin, end, each in ((0, often, every), (often, PASSES[-1], 10 * steps)):
        run = train.run(
            step, state, rows[begin * steps : end * steps],
            np.float32(learning_rate), signals.x_train, signals.y_train,
            look=lambda state: _percent_right(state[0], signals.x_test, signals.y_test), every=each, progress=False,
        )  # fmt: skip
        state, curve = run.state, [*curve, *run.looks]
        tested += [*(begin + each / steps * np.arange(1, len(run.looks) + 1))]
    passes, accuracy = np.round(tested, 6), np.array(curve)
    after = [accuracy[passes == number][0] for number in PASSES]
    reached = [passes[accuracy >= target][0] if (accuracy >= target).any() else np.nan for target in TARGETS]
    return dict(zip(MEASURES, map(float, (*after, *reached)), strict=True))


def _score(measures: Mapping[str, float], measure: str) -> float:
    return measures[measure] if measure.startswith("after") else -measures[measure]


def more_machines(run: RunTrials) -> None:
    """For each measure and number of machines the best learning rate on validation examples; then reserved seeds."""
    for machines, measure in itertools.product(OFTEN, MEASURES):
        rates = tuple(2.0**power for power in range(SMALLEST[machines], SMALLEST[machines] + 6))
        chosen = {"machines": machines, "learning_rate": rates, "score": functools.partial(_score, measure=measure)}
        train.tune(run, **chosen, worst=-NEVER, tuning_seeds=range(100, 112), seeds=range(10_572, 10_600))


MACHINES = Experiment(
    "start_here-machines",
    "A small network on MNIST-1D, its batch divided between 1 to 200 machines",
    train_machines, more_machines, dict.fromkeys(MEASURES, 2.0), chaotic=MEASURES, drawn={"judged_on": "test"},
    confirms=("start_here-large-batch", "start_here-speed-up", "start_here-bend"),
)  # fmt: skip
