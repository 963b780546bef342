"""The exercises of 09_parallel_training."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dlscale import collectives, costs
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import program
from dlscale.parallel_training import pipeline, planning


def loss(params: Array, x: Array, y: Array) -> Array:
    """A small network of one flat array of 32 numbers, for the check: 4 inputs, 5 tanh units, one output."""
    w1, b1, w2, b2 = params[:20].reshape(4, 5), params[20:25], params[25:30], params[30]
    return ((jnp.tanh(x @ w1 + b1) @ w2 + b2 + params[31] - y) ** 2).mean()


class _Unanswered(Exception):
    """`...` is what a function returned in the middle of a trace."""


def tried(f: Callable[..., Array]) -> Callable[..., Any]:
    """What f(loss, chunk, x, y, rate, axis_name) does: all workers' new chunks, the bytes that the busiest sends, and
    the most numbers that f returns. Where f is not written yet, `...`.

    A check cannot trace what runs in another process; this runs where f is.
    """

    def run(chunks: np.ndarray, x: np.ndarray, y: np.ndarray, rate: float) -> Any:
        def one(chunk: Array, x: Array, y: Array) -> Array:
            if (result := f(loss, chunk, x, y, rate, "workers")) is ...:
                raise _Unanswered
            return result

        own = [jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for a in (chunks, x, y)]
        try:
            found = program.schedule(one, len(chunks), *own)
        except _Unanswered:
            return ...
        results = np.asarray(jax.jit(jax.vmap(one, axis_name="workers"))(chunks, x, y))
        return results, int(found.sent().sum(0).max(initial=0))

    return run


def _sharded(answer: Any) -> str | None:
    for workers, seed in ((4, 0), (2, 1)):
        rng = np.random.default_rng(seed)
        params, x, y = (rng.normal(size=s).astype(np.float32) for s in ((32,), (16, 4), (16,)))
        parts = params.reshape(workers, -1), x.reshape(workers, -1, 4), y.reshape(workers, -1), 0.1
        try:
            told = answer(*parts)
        except TypeError as error:
            if "missing" not in str(error):
                raise
            told = tried(answer)(*parts)  # the function itself was handed in
            if told is ...:
                raise TypeError("it returns nothing yet") from None
        results, sent = told
        wanted = params - 0.1 * np.asarray(jax.grad(loss)(params, x, y))
        if wrong := compare(
            f"The new parameters of {workers} workers, in chunks,", results, wanted.reshape(workers, -1), 1e-5
        ):
            return wrong
        least = 2 * (workers - 1) * params.nbytes // workers
        if sent > least:
            return f"The step is right, but of {workers} workers one sends {sent} bytes: {least} are enough."
    return None


sharded = Exercise(
    id="parallel_training-sharded",
    answer="sharded_step",
    question="Write a step of training with **sharded parameters**. `chunk` is this worker's part of one flat array of "
    "parameters, `x` and `y` are its examples; `loss(params, x, y)` is the mean over the examples that it is given. "
    "Gather the parameters, take the gradient of your own examples' loss, let each worker get the *mean* over all "
    "workers of its part alone, and return the new chunk. Send no more than one all-gather and one reduce-scatter.",
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
    right="nobody keeps more than a chunk between two steps, and nobody sends more than in an all-reduce. "
    "`collectives` did the rest.",
)


def _cheaper(answer: Any) -> str | None:
    for workers, width in ((2, 8), (4, 16), (8, 64)):
        found = answer(workers, width)
        numbers = 12 * width**2
        gradient = collectives.schedule("ring", workers, (numbers,)).sent().sum(0).max()
        token = collectives.schedule("ring", workers, (workers * width,)).sent().sum(0).max() / workers
        if wrong := compare(
            f"The number of tokens for {workers} workers and width {width}", found, gradient / (4 * token), 1e-6
        ):
            return wrong
    return None


cheaper = Exercise(
    id="parallel_training-cheaper",
    answer="tokens_at_which_both_send_equally",
    question="A transformer block of width $d$ has about $12 d^2$ parameters. Data parallelism sends their gradient in "
    "one all-reduce. Tensor parallelism sends four all-reduces of $t \\times d$ numbers, for a batch of $t$ tokens in "
    "all. Write `tokens_at_which_both_send_equally(workers, width)`.",
    hints=("Both are all-reduces among the same workers: only the numbers in them count.", "12 d² = 4 t d."),
    code="""
def tokens_at_which_both_send_equally(workers, width):
    return 3 * width
""",
    wrong=_cheaper,
    right="below it tensor parallelism sends less. A batch has far more tokens than three times the width, so "
    "splitting within layers is for wires that are fast, or for layers that do not fit.",
)


def _enough(answer: Any) -> str | None:
    for stages, chunks, bubble in ((4, 1, 0.2), (8, 1, 0.1), (4, 2, 0.15), (2, 1, 0.5), (16, 4, 0.05)):
        found = answer(stages, chunks, bubble)
        fits = [m for m in range(stages, 400, stages)
                if (stages - 1) / chunks / (m + (stages - 1) / chunks) <= bubble + 1e-12]  # fmt: skip
        if wrong := compare(
            f"For {stages} stages, {chunks} chunks and a bubble of {bubble:.0%}, the number", found, fits[0], 1e-9
        ):
            kind = "interleaved" if chunks > 1 else "1f1b"
            told = ""
            if isinstance(found, int) and 0 < found < 400 and found % stages == 0:
                told = f" The table then has {pipeline.pipeline_schedule(kind, stages, found, chunks).bubble:.1%}."
            return wrong + told
    return None


enough = Exercise(
    id="parallel_training-enough",
    answer="enough_microbatches",
    question="Write `enough_microbatches(stages, chunks, bubble)`: the fewest micro-batches, a multiple of `stages`, "
    "with which the bubble is at most that share.",
    hints=(
        "Solve w / (M + w) ≤ b for M, with w = (stages − 1) / chunks.",
        "M ≥ w (1 − b) / b; then round up to a multiple of stages. Take care with 0.999999….",
    ),
    code="""
def enough_microbatches(stages, chunks, bubble):
    waiting = (stages - 1) / chunks
    least = waiting * (1 - bubble) / bubble
    return max(1, math.ceil(least / stages - 1e-9)) * stages
""",
    wrong=_enough,
    right="the bubble shrinks with more micro-batches, but each of them is smaller, and GPipe keeps all of them.",
)


FASTEST, LINK = 5.3e12, (5e-6, 5e9)  # operations a second of a worker; seconds a message and bytes a second


@functools.cache
def gradients(network: str, examples: int = 32) -> tuple[list[int], list[float]]:
    """Bytes of each gradient in the order in which backpropagation makes them, and the seconds at which it has."""
    layers = planning.NETWORKS[network]()[::-1]
    ready = np.cumsum([2 * layer.flops * examples / FASTEST for layer in layers])
    return [layer.parameters * planning.NUMBER for layer in layers], ready.tolist()


def exposed(network: str, workers: int, threshold: float) -> float:
    """Seconds that communication takes after backpropagation has ended, in the model of section 7."""
    sizes, ready = gradients(network)
    latency, bandwidth = LINK
    seconds = functools.partial(_ring, workers, latency, 1 / bandwidth)
    return planning.messages(sizes, ready, threshold, seconds)[-1][2] - ready[-1]


def _ring(workers: int, latency: float, per_byte: float, size: float) -> float:
    return costs.formula("ring", workers, size, latency, per_byte)


@functools.cache
def best(network: str, workers: int) -> float:
    """The least exposed time over many thresholds."""
    return min(exposed(network, workers, 2.0**k) for k in np.arange(10, 30, 0.25))


def _threshold(answer: Any) -> str | None:
    told = []
    for network in planning.NETWORKS:
        for workers in (4, 32, 256):
            given = answer(network, workers)
            ratio = exposed(network, workers, float(given)) / best(network, workers)
            told.append((ratio, f"{network} on {workers}: {ratio:.2f}"))
    slow = [text for ratio, text in told if not ratio <= 1.1]
    return f"Exposed time over the least: {'; '.join(slow)}; at most 1.10 is asked for." if slow else None


threshold = Exercise(
    id="parallel_training-threshold",
    answer="threshold",
    question="**Open.** Write `threshold(network, workers)`, in bytes: with it the exposed time must be at most 1.1 "
    "times the least that any threshold gives, for AlexNet, VGG-16 and ResNet-50 on 4, 32 and 256 workers. "
    "`exercises.exposed(network, workers, bytes)` tells you the time.",
    hints=(
        "No single number will do. You may try many and keep the best: that is what libraries call autotuning.",
        "min(candidates, key=lambda bytes: exercises.exposed(network, workers, bytes)), for powers of two.",
    ),
    code="""
def threshold(network, workers):
    return min((2.0 ** (k / 4) for k in range(40, 120)), key=lambda size: exposed(network, workers, size))
""",
    wrong=_threshold,
    right="libraries (Horovod's autotuner) search in the same way, by measuring steps of the training itself.",
)

__all__ = ["Exercise", "cheaper", "enough", "exposed", "gradients", "math", "sharded", "threshold", "tried"]
