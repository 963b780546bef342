"""The experiments of consistency: recorded, asynchronous training with 1 to 64 workers; live, ways for eight to agree.

Every arm is judged alike: by the mean of the weights over its last gradients, `LOOK` or `WINDOW` of them. Where each
worker has weights of its own, these are the server's, or the mean of all workers'.
"""

import functools
import math
from operator import itemgetter
from typing import Any

import numpy as np

from dlscale import consistency, costs
from dlscale.consistency import IDEAL, Timeline, Wire
from dlscale.course.records import Experiment, Measures, RunTrials
from dlscale.lab import data, models, train
from dlscale.lab.data import Dataset

BATCH, GRADIENTS, LOOK, WORKERS = 16, 6400, 400, 8
CHANCE = 10.0  # percent
TUNING_SEEDS, CROWD_SEEDS, SPECTRUM_SEEDS = range(200, 204), range(11_100, 11_112), range(11_120, 11_132)
TOLERANCE = {"accuracy": 1.0, "loss": 0.02, "early_loss": 1e-3}  # but for the last: chaotic, as rounding grows

ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"policy": "synchronous"},
    "stale-synchronous, bound 3": {"policy": "stale-synchronous", "bound": 3},
    "asynchronous": {"policy": "asynchronous"},
    "Downpour, every 5": {"policy": "Downpour", "every": 5},
    "gossip": {"policy": "gossip"},
    "elastic, every 10": {"policy": "elastic", "every": 10},
    "averaging, every 10": {"policy": "averaging", "every": 10},
    "ensemble": {"policy": "ensemble"},
}
LEFT_OUT = "synchronous, slowest left out"
ONE_ITERATE = {"synchronous, last weights": "synchronous", "gossip, last weights": "gossip"}  # not averaged over time
CONTROLS = {LEFT_OUT: ARMS["synchronous"]} | {name: ARMS[arm] for name, arm in ONE_ITERATE.items()}
CONTROLS["elastic, every 10, pull by half"] = {"policy": "elastic", "every": 10, "pull": WORKERS / 2}
CONTROLS["Downpour, fetch 1, push 25"] = {"policy": "Downpour", "every": 1, "push": 25}
CONTROLS["Downpour, fetch 25, push 1"] = {"policy": "Downpour", "every": 25, "push": 1}


def slow(shards: int) -> Wire:
    """A network on which a message of all weights takes as long as a gradient, a second, and 0.01 s of latency.

    A server of so many machines has taken in its parts in a fraction of that time; the rest is on the way over the
    worker's own link. All workers together use Rabenseifner's all-reduce.
    """
    among_all = costs.formula("rabenseifner", WORKERS, 1.0, 0.01, 1.0)
    return Wire(latency=0.01 + 1 - 1 / shards, server=2 / shards, all=among_all, pair=1.01)


EQUAL, SLOW_ONE, SLOW_NETWORK = "equal workers", "one four times slower", "slow network"
SHARDED = "slow network, eight shards"
SCENARIOS: dict[str, tuple[float, Wire]] = {  # how many times longer the last worker takes
    EQUAL: (1.0, IDEAL),
    SLOW_ONE: (4.0, IDEAL),
    SLOW_NETWORK: (1.0, slow(4)),
    SHARDED: (1.0, slow(8)),
}


def model() -> models.Model:
    """A small perceptron for MNIST-1D."""
    return models.mlp((40, 64, 64, 10))


@functools.cache
def examples() -> dict[str, Dataset]:
    """MNIST-1D without the examples held out, judged by these ("validation") or by the "test" examples."""
    full, held_out = data.load("mnist1d"), data.validation_split(data.load("mnist1d"), fraction=0.25)
    test = Dataset("mnist1d_test", held_out.x_train, held_out.y_train, full.x_test, full.y_test, full.classes)
    return {"validation": held_out, "test": test}


@functools.lru_cache(maxsize=64)
def order(arm: str, scenario: str, seed: int) -> Timeline:
    """The timeline of eight workers by an arm."""
    slowest, wire = SCENARIOS[scenario]
    times = consistency.durations(WORKERS, STEPS // WORKERS * 2, slowest=slowest, seed=seed)
    times = times[:-1] if arm == LEFT_OUT else times
    return consistency.timeline(**(ARMS | CONTROLS)[arm], times=times, gradients=STEPS, wire=wire)


def tuned(run: RunTrials, rates: tuple[float, ...], by: str = "accuracy", **options: Any) -> float:
    """The best of these rates, tested. Where it is the first or the last one, the grid grows by another."""
    score = itemgetter(by)
    best = train.tune(run, learning_rate=rates, score=score, tuning_seeds=TUNING_SEEDS, **options)
    rate = best.setting["learning_rate"]
    if rate not in (rates[0], rates[-1]):
        return rate
    return tuned(run, (rate / 2, *rates) if rate == rates[0] else (*rates, 2 * rate), by, **options)


# The spectrum: small enough to be run in the notebooks

STEPS, WINDOW, SPECTRUM_RATES = 1600, 200, (0.1, 0.2, 0.4, 0.8)  # gradients, those averaged, rates


BEST = dict.fromkeys(("synchronous", "synchronous, last weights", "gossip"), 1.6)  # what `spectrum` finds
BEST |= dict.fromkeys(("averaging, every 10", "ensemble", "gossip, last weights"), 0.8)
BEST |= {"stale-synchronous, bound 3": 0.2, "asynchronous": 0.2, "Downpour, every 5": 0.05, "elastic, every 10": 0.4}
TUNED = {EQUAL: BEST, SLOW_ONE: BEST | {"Downpour, every 5": 0.1}}


@functools.cache
def spectrum_trial(arm: str, scenario: str, learning_rate: float, seed: int, judged_on: str = "test") -> Measures:
    """Accuracies in percent, after all gradients and in equal time, of a network with one small hidden layer."""
    found = order(arm, scenario, seed)
    options = {"batch_size": BATCH, "every": WINDOW, "averaged": 1 if arm in ONE_ITERATE else WINDOW, "seed": seed}
    network = models.mlp((40, 32, 10))
    result = consistency.train(found, network, examples()[judged_on], learning_rate=learning_rate, **options)
    accuracy = 100 * result.history.test_accuracy if result.diverged_at < 0 else np.full(STEPS // WINDOW, CHANCE)
    seconds = np.maximum.accumulate(found.applied)[WINDOW - 1 :: WINDOW]
    in_time = np.interp(STEPS / WORKERS, [0, *seconds], [CHANCE, *accuracy])
    return {"accuracy": float(accuracy[-1]), "accuracy_in_time": float(in_time)}


def spectrum(arm: str, scenario: str) -> np.ndarray:
    """(8,) test accuracies by seed at the best of the same rates on held-out examples: after equal gradients where all
    workers are equal, in equal time where one is slow."""
    run, by = train.each(spectrum_trial), "accuracy" if scenario == EQUAL else "accuracy_in_time"
    rate = tuned(run, SPECTRUM_RATES, by, arm=arm, scenario=scenario, seeds=SPECTRUM_SEEDS[:1])
    given = {"learning_rate": rate, "arm": arm, "scenario": scenario}
    return np.array([one[by] for one in run([given | {"seed": s, "judged_on": "test"} for s in SPECTRUM_SEEDS[:8]])])


# The crowd

CROWDS, CROWD_RATES = (1, 2, 4, 8, 16, 32, 64), (0.025, 0.05, 0.1, 0.2, 0.4)


def crowd_trial(
    workers: int, learning_rate: float, seed: int, judged_on: str, each: int = 1, policy: str = "asynchronous"
) -> Measures:
    """Equal workers and `each` times the gradients."""
    times = consistency.durations(workers, each * GRADIENTS // workers * 2, seed=seed)
    timeline = consistency.timeline(policy, times, each * GRADIENTS)
    options = {"batch_size": BATCH, "learning_rate": learning_rate, "seed": seed, "every": LOOK, "averaged": LOOK}
    result = consistency.train(timeline, model(), examples()[judged_on], **options)
    losses, failed = result.history.loss, result.diverged_at >= 0
    return {
        "accuracy": CHANCE if failed else float(100 * result.history.test_accuracy[-1]),
        "loss": math.nan if failed else float(losses[-LOOK:].mean()),
        "early_loss": float(losses[100]),
    }


def crowd_plan(run: RunTrials) -> None:
    """Each tuned on the same rates, with the same four seeds; and at the rate that is best for one worker."""
    options = {"rates": CROWD_RATES, "seeds": CROWD_SEEDS}
    alone = tuned(run, workers=1, each=1, **options)
    for workers in CROWDS:
        tuned(run, workers=workers, each=1, **options)
        arm = {"workers": workers, "each": 1, "learning_rate": alone, "judged_on": "test"}
        run([arm | {"seed": seed} for seed in CROWD_SEEDS])
    for workers in (32, 64):
        tuned(run, workers=workers, policy="synchronous", **options)
    for workers in (1, 64):
        tuned(run, workers=workers, each=4, **options)


CROWD = Experiment(
    "consistency-crowd", "asynchronous training with 1 to 64 workers: one rate for all, and tuned; controls",
    crowd_trial, crowd_plan, TOLERANCE, ("accuracy", "loss"), {"judged_on": "test", "each": 1},
    tuple(f"consistency-{name}" for name in ("fixed", "crowd", "crowd-stale", "crowd-longer")),
)  # fmt: skip
