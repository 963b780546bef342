"""Pipelines: layers on different workers, and micro-batches that follow one another through them.

A schedule is a table of who does what when, from which the bubble and the stored inputs are read.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jax import Array, lax

from dlscale.lab import checks
from dlscale.lab.models import Layer, Params

KINDS = ("gpipe", "1f1b", "interleaved", "pipelined")
FORWARD, BACKWARD = range(2)


class Task(NamedTuple):
    """One worker's work on one micro-batch: a forward or backward pass through one of its chunks of layers."""

    worker: int
    what: int  # FORWARD or BACKWARD
    microbatch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Who does what when. Worker w has chunks w, w + stages, w + 2 · stages, … of the layers."""

    stages: int
    chunks: int
    tasks: tuple[Task, ...]

    @property
    def time(self) -> float:
        """From the first task's start to the last one's end."""
        return max(task.end for task in self.tasks)

    @property
    def bubble(self) -> float:
        """The share of the workers' time in which they wait."""
        return 1 - sum(task.end - task.start for task in self.tasks) / (self.stages * self.time)

    def alive(self) -> np.ndarray:
        """(stages,) the most inputs of a chunk that a worker stores at once, each until its backward pass."""
        held, most = np.zeros((2, self.stages), int)
        for task in sorted(self.tasks, key=lambda task: (task.start, task.what)):
            held[task.worker] += 1 if task.what == FORWARD else -1
            most = np.maximum(most, held)
        return most


def _order(kind: str, stages: int, microbatches: int, chunks: int, worker: int) -> list[tuple[int, int, int]]:
    """The tasks of a worker, (what, micro-batch, chunk), in its order."""
    count, run = microbatches * chunks, stages * chunks
    forward = [(FORWARD, k // run * stages + k % stages, k % run // stages) for k in range(count)]
    backward = [(BACKWARD, m, chunks - 1 - c) for _, m, c in forward]
    if kind != "interleaved":
        forward, backward = ([(what, m, 0) for m in range(count)] for what in (FORWARD, BACKWARD))
    later = stages - 1 - worker  # stages; as many forward passes come before the first backward pass
    first = min(count, {"gpipe": count, "interleaved": 2 * later + (chunks - 1) * stages}.get(kind, later))
    steady = [task for pair in zip(forward[first:], backward, strict=False) for task in pair]
    return [*forward[:first], *steady, *backward[count - first :]]


@functools.lru_cache(maxsize=512)
def pipeline_schedule(
    kind: str, stages: int, microbatches: int, chunks: int = 1, forward: float = 1.0, backward: float = 1.0
) -> Schedule:
    """The table of a pipeline, in which each task begins as soon as its worker and what it needs are there.

    - "gpipe" (Huang et al. 2019): all forward passes, then all backward passes;
    - "1f1b" (Narayanan et al. 2019): each backward pass as soon as it can, so that few inputs are stored;
    - "interleaved" (Narayanan et al. 2021): each worker has several `chunks` of layers, one behind the other;
    - "pipelined": as 1f1b, but the weights change after each backward pass ("update and consume immediately").

    `forward` and `backward` are the times of a chunk. Raises ValueError for numbers below 1, several chunks elsewhere
    than in "interleaved", and for micro-batches that do not divide among the stages.
    """
    checks.known("kind of pipeline", kind, KINDS)
    for name, value in {"stages": stages, "microbatches": microbatches, "chunks": chunks}.items():
        checks.whole(name, value)
    if chunks > 1 and kind != "interleaved":
        raise ValueError(f'Several chunks a worker are for "interleaved", not for {kind!r}.')
    if kind == "interleaved" and microbatches % stages:
        raise ValueError(f'"interleaved" needs a multiple of {stages} micro-batches, not {microbatches}.')
    waiting = [_order(kind, stages, microbatches, chunks, worker) for worker in range(stages)]
    done, free, tasks = {}, [0.0] * stages, []
    while any(waiting):
        for worker, todo in enumerate(waiting):
            while todo:
                what, m, c = todo[0]
                place, last = c * stages + worker, chunks * stages - 1
                needs = [(FORWARD, m, place - 1)] if place else []
                if what == BACKWARD:
                    needs = [(BACKWARD, m, place + 1) if place < last else (FORWARD, m, place)]
                if not all(need in done for need in needs):
                    break
                start = max([free[worker], *(done[need] for need in needs)])
                free[worker] = done[what, m, place] = start + (forward, backward)[what]
                tasks.append(Task(worker, what, m, c, start, free[worker]))
                todo.pop(0)
    return Schedule(stages, chunks, tuple(tasks))


def mixed(layer: Layer, there: Params, back: Params, x: Array) -> Array:
    """The layer with the weights `there` in the forward pass and the weights `back` in the backward pass."""
    new = layer.compute(back, x)
    return layer.activation(new + lax.stop_gradient(layer.compute(there, x) - new))
