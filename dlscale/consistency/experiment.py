"""The recorded experiments of notebook 10: the whole spectrum of consistency, and asynchrony with 1 to 64 workers."""

import functools
import math
from operator import itemgetter
from typing import Any

import numpy as np

from dlscale import consistency
from dlscale.consistency import IDEAL, Timeline, Wire
from dlscale.course import records
from dlscale.course.records import Experiment, Measures, RunTrials
from dlscale.lab import data, models, train
from dlscale.lab.data import Dataset

BATCH, GRADIENTS, LOOK, WORKERS = 16, 6400, 400, 8
CHANCE, AIM = 10.0, 50.0  # percent
RATES = (0.00625, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
TUNING_SEEDS, TEST_SEEDS = range(200, 204), range(80, 88)
MEASURES = ("accuracy", "accuracy_in_time", "seconds", "loss", "early_loss")
TOLERANCE = {"accuracy": 1.0, "accuracy_in_time": 1.0, "seconds": 100.0, "loss": 0.02, "early_loss": 1e-3}
CHAOTIC = ("accuracy", "accuracy_in_time", "seconds", "loss")  # rounding grows until it counts as much as another seed

ARMS: dict[str, dict[str, Any]] = {
    "synchronous": {"policy": "synchronous"},
    "stale-synchronous, bound 3": {"policy": "stale-synchronous", "bound": 3},
    "asynchronous": {"policy": "asynchronous"},
    "Downpour, every 5": {"policy": "Downpour", "every": 5},
    "gossip": {"policy": "gossip", "graph": "exponential"},
    "elastic, every 10": {"policy": "elastic", "every": 10},
    "averaging, every 10": {"policy": "averaging", "every": 10},
    "ensemble": {"policy": "ensemble"},
}
SEVEN = "synchronous, slowest left out"
CONTROLS: dict[str, dict[str, Any]] = {
    SEVEN: {"policy": "synchronous"},
    "elastic, every 100": {"policy": "elastic", "every": 100},
    "averaging, every 100": {"policy": "averaging", "every": 100},
    "gossip, ring": {"policy": "gossip", "graph": "ring"},
    "gossip, random pairs": {"policy": "gossip", "graph": "random"},
}
# A gradient takes a second, and on the slow network a message of all weights, too. The server is four machines, so it
# has taken in a quarter of that time what a worker sends; the rest is on the way over the worker's own link.
SLOW_NETWORK = consistency.network(WORKERS, 1.0, 0.01, 1.0, shards=4)._replace(latency=0.01 + 0.75)
SCENARIOS: dict[str, tuple[float, Wire]] = {
    "equal workers": (1.0, IDEAL),
    "one four times slower": (4.0, IDEAL),
    "slow network": (1.0, SLOW_NETWORK),
    "slow network, one four times slower": (4.0, SLOW_NETWORK),
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
def order(arm: str, scenario: str, seed: int, gradients: int = GRADIENTS) -> Timeline:
    """The timeline of eight workers by an arm."""
    slowest, wire = SCENARIOS[scenario]
    times = consistency.durations(WORKERS, gradients // WORKERS * 2, slowest=slowest, seed=seed)
    times = times[:-1] if arm == SEVEN else times
    return consistency.timeline(**(ARMS | CONTROLS)[arm], times=times, gradients=gradients, wire=wire, seed=seed)


@functools.lru_cache(maxsize=64)
def crowd(workers: int, seed: int, gradients: int = GRADIENTS) -> Timeline:
    """The timeline of asynchronous, equal workers."""
    times = consistency.durations(workers, gradients // workers * 2, seed=seed)
    return consistency.timeline("asynchronous", times, gradients)


def measure(timeline: Timeline, learning_rate: float, seed: int, judged_on: str, **options: Any) -> Measures:
    """Accuracies in percent: after all gradients, and in the seconds that equal workers need if nobody waits; seconds
    until the accuracy `AIM` is reached, or, where it is not, until the end."""
    options |= {"batch_size": BATCH, "every": LOOK, "learning_rate": learning_rate, "seed": seed}
    result = consistency.train(timeline, model(), examples()[judged_on], **options)
    losses, accuracy = result.history.loss, 100 * result.history.test_accuracy
    failed = bool(result.diverged_at >= 0)
    seconds = np.maximum.accumulate(timeline.applied)[LOOK - 1 :: LOOK]
    budget = len(losses) / WORKERS
    in_time = float(np.interp(budget, [0, *seconds], [CHANCE, *accuracy]))
    reached = accuracy >= AIM if not failed else np.zeros(len(accuracy), bool)
    until = float(seconds[reached.argmax()] if reached.any() else seconds[-1])
    last = math.nan if failed else float(losses[-LOOK:].mean())
    found = (CHANCE, CHANCE) if failed else (float(accuracy[-1]), in_time)
    return dict(zip(MEASURES, (*found, until, last, float(losses[min(100, len(losses) - 1)])), strict=True))


def tuned(run: RunTrials, rates: tuple[float, ...], **options: Any) -> float:
    """The best of these rates, tested. Where it is the first or the last one, the grid grows by another."""
    best = train.tune(run, learning_rate=rates, **options).setting["learning_rate"]
    if best not in (rates[0], rates[-1]):
        return best
    return tuned(run, (rates[0] / 2, *rates) if best == rates[0] else (*rates, 2 * rates[-1]), **options)


# The spectrum

SCORES = {"accuracy": 1, "accuracy_in_time": 1, "seconds": -1}  # each is tuned for by itself; of seconds, few are best
SPECTRUM_RATES, FRESH_SEEDS = (*RATES[2:], 2 * RATES[-1]), range(56, 64)


def spectrum_trial(arm: str, scenario: str, each: int, learning_rate: float, seed: int, judged_on: str) -> Measures:
    """Eight workers; `each`: so many times the gradients."""
    return measure(order(arm, scenario, seed, each * GRADIENTS), learning_rate, seed, judged_on)


def spectrum_plan(run: RunTrials) -> None:
    """Each arm at the best of the same rates, on held-out examples: by accuracy at the end, by that in time, and by the
    seconds until it is reached. An ensemble sends nothing: on the slow network it is what it is on the fast one."""
    machines = {name: wire == IDEAL for name, (_, wire) in SCENARIOS.items()}
    arms = [(arm, name, SCORES) for name, fast in machines.items() for arm in ARMS if fast or arm != "ensemble"]
    arms += [(SEVEN, name, SCORES) for name in SCENARIOS if SCENARIOS[name][0] > 1]
    arms += [(arm, "equal workers", ["accuracy"]) for arm in CONTROLS if arm != SEVEN]
    for arm, name, scores in arms:
        options = {"seeds": FRESH_SEEDS, "tuning_seeds": TUNING_SEEDS, "each": 1}
        for by in scores:
            score = functools.partial(lambda by, found: SCORES[by] * found[by], by)
            tuned(run, SPECTRUM_RATES, arm=arm, scenario=name, score=score, **options)
    given = {"arm": "ensemble", "scenario": "equal workers", "judged_on": "test", "learning_rate": 0.1}
    run([given | {"each": WORKERS, "seed": seed} for seed in TEST_SEEDS])  # a member has as many as all had


SPECTRUM = Experiment(
    "consistency-spectrum", "from synchronous training to an ensemble: eight ways of agreeing, four machines, tuned",
    spectrum_trial, spectrum_plan, TOLERANCE, CHAOTIC, {"judged_on": "test", "each": 1},
)  # fmt: skip

# The crowd

CROWDS, AWARE, MOMENTA = (1, 2, 4, 8, 16, 32, 64), (16, 32, 64), (0.3, 0.6, 0.9)


def crowd_trial(
    workers: int, aware: bool, momentum: float, each: int, learning_rate: float, seed: int, judged_on: str
) -> Measures:
    """Asynchronous workers; `aware`: the rate of a gradient is divided by its staleness (Zhang et al. 2016)."""
    timeline = crowd(workers, seed, each * GRADIENTS)
    scales = 1 / np.maximum(1, timeline.staleness) if aware else None
    return measure(timeline, learning_rate, seed, judged_on, scales=scales, momentum=momentum)


def crowd_plan(run: RunTrials) -> None:
    """Each tuned on the same rates, and at the rate that is best for one worker, and at half of that, which is as good
    for one; some with more gradients, which are dear, with half of the tuning seeds."""
    options = {"rates": RATES, "seeds": TEST_SEEDS, "tuning_seeds": TUNING_SEEDS, "score": itemgetter("accuracy")}
    arm = {"aware": False, "momentum": 0.0, "each": 1}
    alone = tuned(run, workers=1, **arm, **options)
    tests = [{"learning_rate": r, "seed": seed, "judged_on": "test"} for r in (alone, alone / 2) for seed in TEST_SEEDS]
    for aware, crowds in ((False, CROWDS), (True, AWARE)):
        for workers in crowds:
            own = arm | {"workers": workers, "aware": aware}
            tuned(run, **own, **options)
            run([own | given for given in tests])
    for workers in (1, 16):
        for momentum in MOMENTA:
            tuned(run, workers=workers, **arm | {"momentum": momentum}, **options)
    for workers, aware, each in ((1, False, 4), (32, False, 4), (32, True, 4), (64, False, 4), (1, False, 8)):
        own = arm | {"workers": workers, "aware": aware, "each": each}
        tuned(run, **own, **options | {"tuning_seeds": TUNING_SEEDS[:2]})
        if workers == 32:
            run([own | given for given in tests])


CROWD = Experiment(
    "consistency-crowd", "asynchronous training with 1 to 64 workers: fixed and tuned rates, staleness-aware, momentum",
    crowd_trial, crowd_plan, TOLERANCE, CHAOTIC, {"judged_on": "test"},
)  # fmt: skip

# Controls

SLOW_AT_TIMES = ("all eight", "the first seven of eight", "asynchronous")  # each worker's times deviate by their mean
WIDE = "one wide network"
AGAIN = {  # of the crowd: workers, and how many times the gradients
    "1 worker, four times the gradients": (1, 4),
    "64 workers, four times the gradients": (64, 4),
    "64 workers, asynchronous": (64, 1),
}
LONGER, STALE = [*AGAIN][:2], [*AGAIN][2]
NEW_SEEDS, STALE_SEEDS = range(48, 56), range(64, 80)
AT_ONCE = {"32 workers, synchronous": 32, "64 workers, synchronous": 64}


def controls_trial(arm: str, learning_rate: float, seed: int, judged_on: str) -> Measures:
    """Backup workers (Chen et al. 2016) where each is slow at times; a network of about an ensemble's size; crowds that
    have time, or are asynchronous, on seeds that did not choose their claim; crowds that agree."""
    if arm == WIDE:
        options = {"batch_size": BATCH, "learning_rate": learning_rate, "seed": seed}
        wide = models.mlp((40, 190, 190, 10))
        result = consistency.train(crowd(1, seed), wide, examples()[judged_on], **options)
        accuracy = CHANCE if result.diverged_at >= 0 else 100 * float(result.history.test_accuracy[-1])
        return {"accuracy": accuracy, "accuracy_in_time": accuracy}
    if arm in AGAIN:
        workers, each = AGAIN[arm]
        found = measure(crowd(workers, seed, each * GRADIENTS), learning_rate, seed, judged_on)
    elif arm in AT_ONCE:
        times = consistency.durations(AT_ONCE[arm], GRADIENTS // AT_ONCE[arm] * 2, seed=seed)
        found = measure(consistency.timeline("synchronous", times, GRADIENTS), learning_rate, seed, judged_on)
    else:
        times = consistency.durations(WORKERS, GRADIENTS // WORKERS * 2, jitter=1.0, seed=seed)
        times = np.sort(times, axis=0)[: WORKERS - 1] if arm == SLOW_AT_TIMES[1] else times
        policy = "asynchronous" if arm == "asynchronous" else "synchronous"
        found = measure(consistency.timeline(policy, times, GRADIENTS), learning_rate, seed, judged_on)
    return {name: found[name] for name in ("accuracy", "accuracy_in_time")}


def controls_plan(run: RunTrials) -> None:
    """Each tuned on the same rates, by accuracy in equal time, or after equal gradients where all agree; others at the
    rates that the crowd's record found for them; 64 workers that agree, and that do not, on the same new seeds."""
    options = {"rates": (*RATES[3:], 2 * RATES[-1]), "seeds": TEST_SEEDS, "tuning_seeds": TUNING_SEEDS}
    for arm in (*SLOW_AT_TIMES, WIDE, *AT_ONCE):
        best = tuned(run, arm=arm, score=itemgetter("accuracy" if arm in AT_ONCE else "accuracy_in_time"), **options)
    given = {"arm": arm, "judged_on": "test", "learning_rate": best}  # of the last one: 64 workers that agree
    run([given | {"seed": seed} for seed in STALE_SEEDS])
    crowds = records.read("consistency-crowd")
    for arm, (workers, each) in AGAIN.items():
        which = {"workers": workers, "aware": False, "momentum": 0.0, "each": each, "judged_on": "validation"}
        rates = crowds.options("learning_rate", **which)
        score = {r: crowds.values("accuracy", learning_rate=r, **which).mean() for r in rates}
        given = {"arm": arm, "judged_on": "test", "learning_rate": max(score, key=score.__getitem__)}
        run([given | {"seed": seed} for seed in (STALE_SEEDS if arm == STALE else NEW_SEEDS)])


CONTROLLED = Experiment(
    "consistency-controls", "backup workers where each is slow at times, one wide network, crowds that agree",
    controls_trial, controls_plan, {"accuracy": 1.0, "accuracy_in_time": 1.0}, ("accuracy", "accuracy_in_time"),
    {"judged_on": "test", "arm": SLOW_AT_TIMES[0]},  # a short one is run again
)  # fmt: skip
