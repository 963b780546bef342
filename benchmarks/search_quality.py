"""Searches on the recorded table of training runs, against Optuna's: regret at equal budgets, and time for a trial."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import numpy as np
import optuna

from benchmarks.timing import Row, row
from dlscale import search
from dlscale.course import records
from dlscale.search import experiment

REPEATS, TRIALS = 60, 40
TABLE = experiment.table(records.read("search-table"))
SPACE, EPOCHS = TABLE.space, TABLE.epochs
BUDGET = TRIALS * EPOCHS

Logs = list[list[search.Trial]]


def ours(make: Callable[..., search.Search]) -> Logs:
    streams = [np.random.default_rng([seed, 21]).spawn(2) for seed in range(REPEATS)]
    return [search.run(make(SPACE, own, EPOCHS), TABLE.scorer(luck), BUDGET) for own, luck in streams]


def theirs(sampler: Callable[[int], optuna.samplers.BaseSampler], keep: int | None = None) -> Logs:
    """Optuna with the same axes as categories; with `keep`, its asynchronous halving stops trials."""
    pruner = optuna.pruners.NopPruner()
    if keep:
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=keep)
    return [
        _their_log(sampler(seed), pruner, TABLE.scorer(np.random.default_rng([seed, 22]))) for seed in range(REPEATS)
    ]


def _their_log(
    sampler: optuna.samplers.BaseSampler, pruner: optuna.pruners.BasePruner, score: Callable[[search.Point, int], float]
) -> list[search.Trial]:
    study, log, spent = optuna.create_study(direction="maximize", sampler=sampler, pruner=pruner), [], 0
    while True:
        trial = study.ask()
        point = tuple(
            trial.suggest_categorical(name, range(size)) for name, size in zip(SPACE.axes, SPACE.sizes, strict=True)
        )
        epochs = EPOCHS
        if not isinstance(pruner, optuna.pruners.NopPruner):
            for epochs in range(1, EPOCHS + 1):
                trial.report(score(point, epochs), epochs)
                if trial.should_prune():
                    break
        spent += epochs
        if spent > BUDGET:
            return log
        log.append(search.Trial(point, epochs, epochs, score(point, epochs), spent - epochs, spent, 0))
        pruned = epochs < EPOCHS
        study.tell(
            trial,
            None if pruned else log[-1].score,
            state=optuna.trial.TrialState.PRUNED if pruned else optuna.trial.TrialState.COMPLETE,
        )


def compared(task: str, candidates: dict[str, Callable[[], Logs]]) -> Iterator[Row]:
    """Mean regret with its 95 % interval as the range; milliseconds for a trial as a note."""
    first = None
    for name, make in candidates.items():
        begin = time.perf_counter()
        logs = make()
        each = (time.perf_counter() - begin) / sum(map(len, logs))
        regret = 100 * (TABLE.quality.max() - np.array([search.chosen(log, TABLE, [BUDGET])[0] for log in logs]))
        half = 2 * regret.std(ddof=1) / np.sqrt(REPEATS)
        mean = regret.mean()
        first = first or mean
        note = f"{1e3 * each:.2f} ms and {sum(map(len, logs)) / REPEATS:.0f} jobs a search"
        yield row(task, name, np.array([mean - half, mean, mean + half]), "points", mean / first, note)


def run() -> list[Row]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    random = {
        "dlscale Search": functools.partial(ours, search.Search),
        "Optuna RandomSampler": lambda: theirs(lambda seed: optuna.samplers.RandomSampler(seed=seed)),
    }
    parzen = {
        "dlscale Parzen, its best tenth": lambda: ours(functools.partial(search.Parzen, good=0.1)),
        "Optuna TPESampler": lambda: theirs(lambda seed: optuna.samplers.TPESampler(seed=seed)),
    }
    halving = {
        "dlscale Asynchronous": lambda: ours(search.Asynchronous),
        "dlscale Halving": lambda: ours(search.Halving),
        "Optuna SuccessiveHalvingPruner": lambda: theirs(lambda seed: optuna.samplers.RandomSampler(seed=seed), 4),
    }
    task = f"regret after {BUDGET} epochs on a table of {SPACE.size:,} settings, mean of {REPEATS}"
    return [
        *compared(f"Random search, {task}", random),
        *compared(f"Parzen estimators, {task}", parzen),
        *compared(f"Halving, one of 4 kept, {task}", halving),
    ]
