"""Searches on the recorded table of training runs, against Optuna's: what they hand over, and time for a search."""

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
SPACE, EPOCHS = TABLE.space, TABLE.curves.shape[-1]
BUDGET = TRIALS * EPOCHS

Accuracies = np.ndarray  # test accuracies in percent of what each search hands over


def ours(make: Callable[..., search.Search]) -> Accuracies:
    found = []
    for own, luck in (np.random.default_rng([seed, 21]).spawn(2) for seed in range(REPEATS)):
        lookup = search.Lookup(TABLE, luck)
        found.append(100 * lookup.test(search.winner(search.run(make(SPACE, own, EPOCHS), lookup, BUDGET), EPOCHS)))
    return np.array(found)


def theirs(sampler: Callable[[int], optuna.samplers.BaseSampler], keep: int | None = None) -> Accuracies:
    """Optuna with the same axes as categories; with `keep`, its asynchronous halving stops trials."""
    pruner = optuna.pruners.NopPruner()
    if keep:
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=keep)
    lookups = [search.Lookup(TABLE, np.random.default_rng([seed, 22])) for seed in range(REPEATS)]
    found = [_their_log(sampler(seed), pruner, lookup) for seed, lookup in enumerate(lookups)]
    return np.array([100 * one.test(search.winner(log, EPOCHS)) for one, log in zip(lookups, found, strict=True)])


def _their_log(
    sampler: optuna.samplers.BaseSampler, pruner: optuna.pruners.BasePruner, score: search.Lookup
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
        log.append(search.Trial(point, epochs, epochs, score(point, epochs)))
        pruned = epochs < EPOCHS
        study.tell(
            trial,
            None if pruned else log[-1].score,
            state=optuna.trial.TrialState.PRUNED if pruned else optuna.trial.TrialState.COMPLETE,
        )


def compared(task: str, candidates: dict[str, Callable[[], Accuracies]]) -> Iterator[Row]:
    """Mean accuracy with its 95 % interval as the range; seconds for a search as a note."""
    first = None
    for name, make in candidates.items():
        begin = time.perf_counter()
        found = make()
        each = (time.perf_counter() - begin) / REPEATS
        mean, half = found.mean(), 2 * found.std(ddof=1) / np.sqrt(REPEATS)
        first = first or mean
        yield row(task, name, np.array([mean - half, mean, mean + half]), "%", mean / first, f"{each:.3f} s a search")


def run() -> list[Row]:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    random = {
        "dlscale Search": functools.partial(ours, search.Search),
        "Optuna RandomSampler": lambda: theirs(lambda seed: optuna.samplers.RandomSampler(seed=seed)),
    }
    halving = {
        "dlscale Halving": lambda: ours(search.Halving),
        "Optuna SuccessiveHalvingPruner": lambda: theirs(lambda seed: optuna.samplers.RandomSampler(seed=seed), 4),
    }
    task = f"test accuracy after {BUDGET} epochs on a table of {SPACE.size:,} settings, mean of {REPEATS}"
    return [*compared(f"Random search, {task}", random), *compared(f"Halving, one of 4 kept, {task}", halving)]
