"""The exercises of 09_parallel_training and its further notebook."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlscale.course.exercises import Exercise, compare
from dlscale.lab import program


def loss(params: Array, x: Array, y: Array) -> Array:
    """A small network of one flat array of 32 numbers, for the check: 4 inputs, 5 tanh units, one output."""
    w1, b1, w2, b2 = params[:20].reshape(4, 5), params[20:25], params[25:30], params[30]
    return ((jnp.tanh(x @ w1 + b1) @ w2 + b2 + params[31] - y) ** 2).mean()


def tried(f: Callable[..., Array]) -> Callable[..., Any]:
    """What f(loss, chunk, x, y, rate, axis_name) does: all workers' new chunks, and the bytes that the busiest sends.
    Where f is not written yet, `...`.

    A check cannot trace what runs in another process; this runs where f is.
    """

    def run(chunks: np.ndarray, x: np.ndarray, y: np.ndarray, rate: float) -> Any:
        own, answers = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (chunks, x, y)], []

        def one(chunk: Array, x: Array, y: Array) -> Array:
            answers.append(f(loss, chunk, x, y, rate, "workers"))
            return chunk if answers[-1] is ... else answers[-1]

        found = program.schedule(one, len(chunks), *own)
        if answers[0] is ...:
            return ...
        others = r"\b(psum|pmean|all_gather|all_to_all|reduce_scatter)"
        if used := re.search(others, str(program.trace(one, len(chunks), *own))):
            raise ValueError(f"It calls JAX's own {used[1]}, whose bytes are not counted: take that of `collectives`.")
        return np.asarray(jax.jit(jax.vmap(one, axis_name="workers"))(chunks, x, y)), int(found.sent().sum(0).max())

    return run


def _sharded(answer: Any) -> str | None:
    for workers, seed in ((4, 0), (2, 1)):
        rng = np.random.default_rng(seed)
        params, x, y = (rng.normal(size=s).astype(np.float32) for s in ((32,), (16, 4), (16,)))
        parts = (params.reshape(workers, -1), x.reshape(workers, -1, 4), y.reshape(workers, -1), 0.1)
        results, sent = answer(*parts)
        wanted = (params - 0.1 * np.asarray(jax.grad(loss)(params, x, y))).reshape(workers, -1)
        if wrong := compare(f"The new parameters of {workers} workers, in chunks,", results, wanted, 1e-5):
            return wrong
        least = 2 * (workers - 1) * params.nbytes // workers
        if sent > least:
            return f"The step is right, but of {workers} workers one sends {sent} bytes: {least} are enough."
    return None


sharded = Exercise(
    id="parallel_training-sharded",
    answer="sharded_step",
    hints=(
        "collectives.all_gather(chunk, axis_name) is (P, …): .ravel() makes it the flat array.",
        "collectives.reduce_scatter wants (P, …): part i of the sum is for worker i. The mean is the sum over P.",
    ),
    code="""
def sharded_step(loss, chunk, x, y, rate, axis_name):
    P = jax.lax.axis_size(axis_name)
    params = collectives.all_gather(chunk, axis_name).ravel()
    gradient = jax.grad(loss)(params, x, y)
    own = collectives.reduce_scatter(gradient.reshape(P, -1), axis_name) / P
    return chunk - rate * own
""",
    wrong=_sharded,
    right="between two steps each worker holds its chunk only, and no worker sends more than in an all-reduce.",
)


def _one_f_one_b(answer: Any) -> str | None:
    for stages, count in ((1, 3), (2, 2), (4, 8), (3, 7), (5, 2)):
        table = answer(stages, count)
        given = f"With stages = {stages} and micro_batches = {count},"
        if not isinstance(table, dict):
            return f"{given} the schedule must be a dictionary, not {type(table).__name__}."
        if any(slot % 1 for slot, _ in table):
            return f"{given} a slot is not a whole number."
        when = {(task[0], stage, task[1]): slot for (slot, stage), task in table.items()}
        wanted = set(itertools.product("FB", range(stages), range(count)))
        if when.keys() != wanted or len(table) != len(wanted):
            return f"{given} each stage must do the forward and the backward pass of each micro-batch once."
        for (what, stage, m), slot in when.items():
            before = ("F", stage - 1, m) if what == "F" else ("B", stage + 1, m)
            before = before if before in when else ("F", stage, m)
            if before != (what, stage, m) and when[before] >= slot:
                name = "forward" if what == "F" else "backward"
                return f"{given} stage {stage} does the {name} pass of micro-batch {m} before its input is there."
        slots, least = max(when.values()) - min(when.values()) + 1, 2 * (stages + count - 1)
        if slots > least:
            return f"{given} the schedule takes {slots} slots; {least} are enough."
        for stage in range(stages):
            order = [what for (_, other), (what, _) in sorted(table.items()) if other == stage]
            stored = max(itertools.accumulate(1 if what == "F" else -1 for what in order))
            if stored > min(stages - stage, count):
                return f"{given} stage {stage} stores {stored} inputs; {min(stages - stage, count)} are enough."
    return None


one_f_one_b = Exercise(
    id="parallel_training-one_f_one_b",
    answer="one_f_one_b",
    hints=(
        "Start with the last stage: it alternates F and B from slot stages - 1 on. A B then moves up, a slot a stage.",
        "The backward pass of m at stage s is in slot 2 * stages - 1 - s + 2 * m. The first stages - s forward passes "
        "come a slot after each other, the others two slots after each other.",
    ),
    code="""
def one_f_one_b(stages, micro_batches):
    table = {}
    for s in range(stages):
        for m in range(micro_batches):
            forward = s + m if m < stages - s else s + 2 * m
            table[forward, s] = "F", m
            table[2 * stages - 1 - s + 2 * m, s] = "B", m
    return table
""",
    wrong=_one_f_one_b,
    right="as few slots as GPipe, and a stage stores no more than the micro-batches that are on their way behind it. "
    "More micro-batches of the same size now cost no memory, and they shrink the bubble.",
    library="dlscale.parallel_training.pipeline.pipeline_schedule",
)


def _interval(answer: Any) -> str | None:
    for save, hours, share in ((120, 10_000, 0.1), (30, 1000, 0.05), (5, 50_000, 0.01), (600, 50_000, 0.2)):
        given = f"With {save} s for a checkpoint, and {hours:,} h, the group that loses {share:.0%}"
        if wrong := compare(given, answer(save, hours, share), hours * 3600 * share**2 / (2 * save), 0.02):
            return wrong
    return None


interval = Exercise(
    id="parallel_training-interval",
    answer="largest_group",
    hints=(
        "Put Young's interval into the sum: what share of the time is lost at the best interval?",
        "It is √(2 C / M). How long may M be, and how many workers make a failure come so often?",
    ),
    code="""
def largest_group(save, hours, lost):
    between_failures = 2 * save / lost**2
    return hours * 3600 / between_failures
""",
    wrong=_interval,
    right="four times as many workers lose twice the share: it grows like the square root of their number.",
)
