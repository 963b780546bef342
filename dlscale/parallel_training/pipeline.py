"""Pipelines: layers on different workers, and micro-batches that follow one another through them.

A schedule is a table: which worker does what when. It draws the picture, tells the bubble and the activations that are
alive, and drives the program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dlscale.lab import checks
from dlscale.lab.models import Layer, Params

KINDS = ("gpipe", "1f1b", "interleaved", "pipelined")
IDLE, FORWARD, BACKWARD = range(3)


class Task(NamedTuple):
    """One worker's work on one micro-batch: there or back through one of its chunks of layers."""

    worker: int
    what: int  # FORWARD or BACKWARD
    microbatch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """Who does what when. Worker w has chunks w, w + stages, w + 2 · stages, … of the layers."""

    kind: str
    stages: int
    microbatches: int
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
        """(stages,) the most micro-batches' inputs of a chunk that a worker keeps at once, each for its way back."""
        held, most = np.zeros((2, self.stages), int)
        for task in sorted(self.tasks, key=lambda task: (task.start, task.what)):
            held[task.worker] += 1 if task.what == FORWARD else -1
            most = np.maximum(most, held)
        return most

    def slots(self) -> np.ndarray:
        """(slots, stages, 3): what, micro-batch and chunk; for tasks that take a unit of time."""
        table = np.zeros((round(self.time), self.stages, 3), np.int32)
        for task in self.tasks:
            table[round(task.start), task.worker] = task[1:4]
        return table


def _order(kind: str, stages: int, microbatches: int, chunks: int, worker: int) -> list[tuple[int, int, int]]:
    """The tasks of a worker, (what, micro-batch, chunk), in its order."""
    count, run = microbatches * chunks, stages * chunks
    there = [(FORWARD, k // run * stages + k % stages, k % run // stages) for k in range(count)]
    back = [(BACKWARD, m, chunks - 1 - c) for _, m, c in there]
    if kind != "interleaved":
        there, back = ([(what, m, 0) for m in range(count)] for what in (FORWARD, BACKWARD))
    ahead = stages - 1 - worker  # how many more are on their way than have come back
    first = min(count, {"gpipe": count, "interleaved": 2 * ahead + (chunks - 1) * stages}.get(kind, ahead))
    steady = [task for pair in zip(there[first:], back, strict=False) for task in pair]
    return [*there[:first], *steady, *back[count - first :]]


@functools.lru_cache(maxsize=512)
def pipeline_schedule(
    kind: str, stages: int, microbatches: int, chunks: int = 1, forward: float = 1.0, backward: float = 1.0
) -> Schedule:
    """The table of a pipeline, in which each task begins as soon as its worker and what it needs are there.

    - "gpipe" (Huang et al. 2019): all micro-batches there, then all back;
    - "1f1b" (Narayanan et al. 2019): back as soon as one is there, so that few are kept;
    - "interleaved" (Narayanan et al. 2021): each worker has several `chunks` of layers, one behind the other;
    - "pipelined": as 1f1b, but the weights change after each task back ("update and consume immediately").

    `forward` and `backward` are the times of a chunk. Raises ValueError for numbers below 1, several chunks elsewhere
    than in "interleaved", and for micro-batches there that do not divide among the stages.
    """
    checks.known("kind of pipeline", kind, KINDS)
    for name, value in {"stages": stages, "microbatches": microbatches, "chunks": chunks}.items():
        checks.whole(name, value)
    if chunks > 1 and kind != "interleaved":
        raise ValueError(f'Several chunks a worker are for "interleaved", not for {kind!r}.')
    if kind == "interleaved" and microbatches % stages:
        raise ValueError(f'"interleaved" needs a multiple of {stages} micro-batches, not {microbatches}.')
    waiting = [_order(kind, stages, microbatches, chunks, worker) for worker in range(stages)]
    length, done, free, tasks = {FORWARD: forward, BACKWARD: backward}, {}, [0.0] * stages, []
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
                free[worker] = done[what, m, place] = start + length[what]
                tasks.append(Task(worker, what, m, c, start, free[worker]))
                todo.pop(0)
    return Schedule(kind, stages, microbatches, chunks, tuple(tasks))


# The program


def stage_params(params: Params, schedule: Schedule) -> Params:
    """Parameters of equal layers, (layers, …), as (stages, chunks, layers of a chunk, …).

    Raises ValueError if there are more stages than layers, or if they do not divide.
    """
    layers, parts = len(jax.tree.leaves(params)[0]), schedule.stages * schedule.chunks
    if layers % parts:
        how = "are fewer than" if layers < parts else "do not divide among"
        raise ValueError(f"{layers} layers {how} {parts} stages: choose a number that divides {layers}.")
    shape = schedule.chunks, schedule.stages, layers // parts
    return jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]).swapaxes(0, 1), params)


def whole_params(own: Params) -> Params:
    """The inverse of `stage_params`."""
    return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[3:]), own)


def mixed(layer: Layer, there: Params, back: Params, x: Array) -> Array:
    """The layer with the weights `there`, whose gradient is taken with the weights `back`, from what came there."""
    new = layer.compute(back, x)
    return layer.activation(new + lax.stop_gradient(layer.compute(there, x) - new))


def pipeline(
    layer: Layer, loss: Callable[[Array, Array], Array], schedule: Schedule, axis_name: str,
    rate: float | Array | None = None, stash: bool = False,
) -> Callable[[Params, Array, Array], tuple[Array, Params]]:  # fmt: skip
    """What a worker does, slot by slot, as a function of its own parameters (chunks, layers, …), and of all
    micro-batches x (microbatches, examples, width) and labels y. All layers are equal and keep the shape of x.

    The result is the mean loss, at the last stage (zero elsewhere), and the gradient of it; or, with a `rate`, each
    micro-batch's loss, and the parameters after a step of plain descent for each: a worker then goes back with the
    weights that it has by then, or, with `stash`, with those that it had on the way there. In each slot all workers
    compute one task and send its result to their neighbours; what the table does not ask for is thrown away.
    """
    table, stages, chunks = jnp.asarray(schedule.slots()), schedule.stages, schedule.chunks
    kept, count = int(schedule.alive().max()), schedule.microbatches

    def send(x: Array, by: int) -> Array:
        return lax.ppermute(x, axis_name, [(s, (s + by) % stages) for s in range(stages)])

    def run(own: Params, x: Array, y: Array) -> tuple[Array, Params]:
        me = lax.axis_index(axis_name)
        if lax.axis_size(axis_name) != stages or len(x) != count:
            raise ValueError(f"The table is for {stages} stages and {count} micro-batches, not for these.")

        def through(back: Params, there: Params, h: Array) -> Array:
            one = layer if rate is None else lambda two, h: mixed(layer, *two, h)
            return lax.scan(lambda h, p: (one(p, h), None), h, back if rate is None else (there, back))[0]

        def at(tree: Params, *place: Array) -> Params:
            return jax.tree.map(lambda a: a[place], tree)

        def store(buffer: Array, arrived: Array, good: Array, *place: Array) -> Array:
            return buffer.at[place].set(jnp.where(good, arrived, buffer[place]))

        def slot(carry: tuple, row: Array) -> tuple[tuple, None]:
            changed, old, inputs, gradients, losses = carry  # changed are sums of gradients, or parameters
            what, m, c = row[me]
            final, coming = (me == stages - 1) & (c == chunks - 1), what == BACKWARD
            there = mine = at(own if rate is None else changed, c)
            if rate is not None:
                old = jax.tree.map(lambda a, b: store(a, b, what == FORWARD, c, m % kept), old, mine)
                there = at(old, c, m % kept)
            back = there if stash else mine
            result, pull = jax.vjp(lambda back, h: through(back, there, h), back, inputs[c, m])
            value, start = jax.value_and_grad(loss)(result, y[m])
            found, onward = pull(jnp.where(final, start, gradients[c, m]))
            losses = store(losses, value, coming & final, m)
            by = jnp.where(coming, 1 / count if rate is None else -rate, 0)
            changed = jax.tree.map(lambda a, g: a.at[c].add(jnp.where(coming, by * g, 0)), changed, found)
            # what the neighbours did tells what it is that came from them
            kind, m, c = row[(me - 1) % stages]
            c = c + (me == 0)
            inputs = store(inputs, send(result, 1), (kind == FORWARD) & (c < chunks), c, m)
            kind, m, c = row[(me + 1) % stages]
            c = c - (me == stages - 1)
            gradients = store(gradients, send(onward, -1), (kind == BACKWARD) & (c >= 0), c, m)
            return (changed, old, inputs, gradients, losses), None

        empty = jnp.zeros((chunks, *x.shape), x.dtype)
        old = jax.tree.map(lambda a: jnp.stack([a] * kept, 1), own) if rate is not None else None
        changed = jax.tree.map(jnp.zeros_like, own) if rate is None else own
        carry = changed, old, empty.at[0].set(x), empty, jnp.zeros(count, x.dtype)
        changed, *_, losses = lax.scan(slot, carry, table)[0]
        return (losses.mean() if rate is None else losses), changed

    return run
