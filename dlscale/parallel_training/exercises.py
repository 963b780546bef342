"""The exercises of 09_parallel_training."""

import functools
import itertools
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


class _Named(program.Reader):
    """Bytes that JAX's own collectives send from each worker by a ring: they are no messages of a schedule."""

    def __init__(self, workers: int) -> None:
        share = (workers - 1) / workers
        self.shares = {"psum": 2 * share, "all_gather": workers - 1, "reduce_scatter": share, "all_to_all": share}
        self.bytes = 0.0

    def equation(self, equation: Any, given: list[Any]) -> list[Any]:
        self.bytes += self.shares.get(equation.primitive.name, 0) * program.nbytes(*(v.aval for v in equation.invars))
        return [0] * len(equation.outvars)


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
        named = _Named(len(chunks))
        program.follow(program.trace(one, len(chunks), *own), [0] * len(own), named)
        results = np.asarray(jax.jit(jax.vmap(one, axis_name="workers"))(chunks, x, y))
        return results, int(found.sent().sum(0).max(initial=0) + named.bytes)

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


@functools.cache
def _ring_share(workers: int) -> float:
    """Bytes that the busiest sends in a ring's all-reduce over those of the array, counted in its schedule."""
    return collectives.schedule("ring", workers, (workers,)).sent().sum(0).max() / (4 * workers) if workers > 1 else 0.0


def _parts(answer: Any) -> str | None:
    for workers, width, tokens, activation, gradient in (
        (16, 64, 256, 2, 4), (16, 64, 4096, 2, 4), (64, 1024, 2**20, 2, 2), (64, 4096, 16384, 2, 4),
        (8, 64, 8, 4, 4), (12, 48, 500, 2, 4), (12, 48, 500, 4, 2),
    ):  # fmt: skip
        sends = {
            parts: _ring_share(workers // parts) * 12 * width**2 / parts * gradient
            + 4 * _ring_share(parts) * tokens * width * parts / workers * activation
            for parts in range(1, workers + 1)
            if workers % parts == 0
        }
        given = (
            f"For {workers} workers, width {width} and {tokens:,} tokens, {activation} and {gradient} bytes a number,"
        )
        found, best = answer(workers, width, tokens, activation, gradient), min(sends, key=sends.__getitem__)
        if found not in sends:
            return f"{given} the number of parts must divide {workers}: {found!r} does not."
        if sends[found] > sends[best] * (1 + 1e-9):
            return f"{given} {found} parts send {sends[found]:,.0f} bytes each; {sends[best]:,.0f} can be reached."
    return None


parts = Exercise(
    id="parallel_training-parts",
    answer="best_parts",
    question="A transformer block of width $d$ has about $12 d^2$ parameters. Split it among $P$ workers: `parts` of "
    "them share its layers, and $P$ / `parts` groups share the $t$ tokens of a batch. Each worker sends one all-reduce "
    "of its part of the gradient among the groups, and four all-reduces of its group's activations, $d$ numbers for "
    "each token, among the parts. Write `best_parts(workers, width, tokens, activation_bytes, gradient_bytes)`: with "
    "how many parts, a divisor of `workers`, does a worker send the fewest bytes? The last two say how many bytes a "
    "number takes.",
    hints=(
        "An all-reduce of n numbers among q workers sends 2 (q − 1) / q times n numbers; for one worker none.",
        "Among the groups n is 12 d² / parts, among the parts n is d t / groups. Try all divisors.",
    ),
    code="""
def best_parts(workers, width, tokens, activation_bytes, gradient_bytes):
    def sent(parts):
        groups = workers // parts
        gradient = 2 * (groups - 1) / groups * 12 * width**2 / parts * gradient_bytes
        return gradient + 4 * 2 * (parts - 1) / parts * width * tokens / groups * activation_bytes
    return min((p for p in range(1, workers + 1) if workers % p == 0), key=sent)
""",
    wrong=_parts,
    right="the best number grows like the square root of workers × width / tokens. A batch with very many tokens is "
    "split by examples alone; within layers one splits where wires are fast, or where layers do not fit.",
)


def _enough(answer: Any) -> str | None:
    for stages, chunks, bubble in ((4, 1, 0.21), (8, 1, 0.1), (4, 2, 0.15), (2, 1, 0.5), (16, 4, 0.05)):
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
        "M ≥ w (1 − b) / b; then round up to a multiple of stages.",
    ),
    code="""
def enough_microbatches(stages, chunks, bubble):
    waiting = (stages - 1) / chunks
    least = waiting * (1 - bubble) / bubble
    return max(1, math.ceil(least / stages)) * stages
""",
    wrong=_enough,
    right="the bubble shrinks with more micro-batches, but each of them is smaller, and GPipe keeps all of them.",
)


def _images(answer: Any) -> str | None:
    for inputs, outputs, workers in (
        (9216, 4096, 8),
        (4096, 1000, 8),
        (4096, 1000, 16),
        (25088, 4096, 6),
        (512, 10, 4),
    ):
        layer = planning.LayerSize("", "dense", inputs * outputs, inputs, outputs, 1.0)

        def model_is_no_worse(images: int, layer: planning.LayerSize = layer, workers: int = workers) -> bool:
            sent = functools.partial(planning.layer_bytes, layer, workers=workers, batch=images * workers)
            return sent(before="model", way="model") <= sent(before="data", way="data")

        most = max(images for images in range(1000) if model_is_no_worse(images))
        about = f"For {inputs:,} inputs, {outputs:,} outputs and {workers} workers the number of images"
        given = answer(inputs, outputs, workers)
        if wrong := compare(about, given, most, 1e-9):
            mixed = compare(about, given, outputs // (workers - 1), 1e-9) is None
            return f"{about} is that of data after columns: here each comes after its own kind." if mixed else wrong
    return None


images = Exercise(
    id="parallel_training-images",
    answer="most_images",
    question="How many images can each worker have before a dense layer is better split by data than by columns? Write "
    "`most_images(inputs, outputs, workers)`: the most images *of each worker* with which a dense layer of "
    "`inputs` × `outputs` weights sends no more by columns than by data, each after a layer split in its own way: "
    "columns after columns, data after data, not the mixed case above (without biases; a whole number, perhaps 0).",
    hints=(
        "Set the two formulas above equal: the factor 2 (P − 1) / P and the 4 bytes are in both.",
        "By columns the inputs of the images of *all* workers are gathered.",
    ),
    code="""
def most_images(inputs, outputs, workers):
    return outputs // workers
""",
    wrong=_images,
    right="the number of inputs does not matter (by rows it is theirs that counts), and each doubling of the workers "
    "halves it. AlexNet's last layer, of 1,000 outputs, is past it with 8 GPUs of 128 images (125), and stays by "
    "columns only because the layer before is.",
)


def lost(tau: float, save: float, between: float) -> float:
    """Share of the time that is lost with a checkpoint every `tau` seconds (Daly 2006)."""
    return 1 - tau / (between * math.expm1((tau + save) / between))


def _interval(answer: Any) -> str | None:
    for save, hours, workers in ((120, 10_000, 4096), (30, 1000, 64), (5, 10_000, 512), (600, 50_000, 1024)):
        between, tau = hours * 3600 / workers, float(answer(save, hours, workers))
        if not 0 < tau < 500 * between:
            return f"{tau:.4g} s is no interval for {workers:,} workers of which one fails every {hours:,} h."
        least = min(lost(t, save, between) for t in np.geomspace(save, 20 * between, 2000))
        if (found := lost(tau, save, between)) > 1.02 * least:
            return (
                f"With {workers:,} workers, one failure of each every {hours:,} h and {save} s for a checkpoint, every "
                f"{tau:,.0f} s loses {found:.2%} of the time; {least:.2%} can be reached."
            )
    return None


interval = Exercise(
    id="parallel_training-interval",
    answer="seconds_between_checkpoints",
    question="Write `seconds_between_checkpoints(save, hours, workers)`: saving takes `save` seconds, *one* worker "
    "fails every `hours` hours on average, and there are so many `workers`. At most 1.02 times the least possible "
    "share of the time may be lost.",
    hints=("How often does *any* of the workers fail, in seconds?", "Young's formula is near enough, Daly's, too."),
    code="""
def seconds_between_checkpoints(save, hours, workers):
    between_failures = hours * 3600 / workers
    return math.sqrt(2 * save * between_failures)
""",
    wrong=_interval,
    right="four times as many workers want checkpoints twice as often.",
)


def _versions(answer: Any) -> str | None:
    for stages, count in ((2, 5), (4, 9), (6, 10)):
        updates = dict.fromkeys(range(stages), 0)
        used: dict[tuple[int, int], list[int]] = {}
        for task in sorted(pipeline.pipeline_schedule("pipelined", stages, count).tasks, key=lambda task: task.start):
            used.setdefault((task.worker, task.microbatch), []).append(updates[task.worker])
            updates[task.worker] += task.what == pipeline.BACKWARD
        for (stage, m), wanted in used.items():
            about = f"The numbers of updates there and back, stage {stage} of {stages}, micro-batch {m}, from 0,"
            if wrong := compare(about, answer(stages, stage, m), wanted, 1e-9):
                return wrong
    return None


versions = Exercise(
    id="parallel_training-versions",
    answer="versions_used",
    question="Write `versions_used(stages, stage, m)`: two numbers, how many updates the weights of a stage have had "
    "when micro-batch `m` passes it on its way *there*, and on its way *back*, in pipelined backpropagation without "
    "stashing. Stages and micro-batches are counted from 0; each way back is one update.",
    hints=(
        "On the way back every earlier micro-batch has made its update.",
        "On the way there, those that have not come back yet are missing. At the start, nobody has come back.",
    ),
    code="""
def versions_used(stages, stage, m):
    return max(0, m - (stages - 1 - stage)), m
""",
    wrong=_versions,
    right="only the last stage uses the same weights on both ways; with stashing each stage keeps as many versions as "
    "the two numbers differ by, and one.",
)


@functools.cache
def gradients(network: str, examples: int = 32) -> tuple[list[int], list[float]]:
    """Bytes of each gradient in the order in which backpropagation makes them, and the seconds at which it has."""
    layers = planning.NETWORKS[network]()[::-1]
    ready = np.cumsum([2 * layer.flops * examples / costs.OPERATIONS for layer in layers])
    return [layer.parameters * planning.NUMBER for layer in layers], ready.tolist()


def exposed(sizes: list[int], ready: list[float], workers: int, latency: float, threshold: float) -> float:
    """Seconds that a ring's all-reduces take after backpropagation has ended, in the model of section 8."""
    seconds = functools.partial(_ring, workers, latency, 1 / costs.WIRE.bandwidth)
    return planning.messages(sizes, ready, threshold, seconds)[-1][2] - ready[-1]


def _ring(workers: int, latency: float, per_byte: float, size: float) -> float:
    return costs.formula("ring", workers, size, latency, per_byte)


@functools.cache
def _cases() -> list[tuple[list[int], list[float], int, float, float]]:
    """Networks that nobody has named: sizes and times of gradients, workers, latency, and the least exposed time.

    The best thresholds lie from some KiB to hundreds of MiB, so that no eight fixed ones are near enough to all.
    """
    rng, found, wires = np.random.default_rng(0), [], itertools.cycle((0.1, 1, 10))
    for kind, workers, _ in itertools.product(("equal", "blocks"), (16, 64, 256), range(2)):
        if kind == "equal":  # many small layers
            sizes = [int(4 * rng.integers(2_000, 60_000)) for _ in range(rng.integers(100, 300))]
            ready = np.cumsum(np.full(len(sizes), rng.uniform(2e-4, 6e-4))).tolist()
        else:  # of a transformer: two large gradients each, and vectors between them
            width, blocks = int(rng.choice([512, 768, 1024])), int(rng.integers(12, 36))
            sizes = [4 * n for n in (8 * width**2, *[width] * 4, 4 * width**2, *[width] * 3)] * blocks
            ready = np.cumsum([(2e-10 * size + 1e-6) * rng.uniform(1, 3) for size in sizes]).tolist()
        latency = costs.WIRE.latency * next(wires)
        least = min(exposed(sizes, ready, workers, latency, 2.0**k) for k in np.arange(10, 30, 0.25))
        found.append((sizes, ready, workers, latency, least))
    return found


def _threshold(answer: Any) -> str | None:
    ratios = []
    float(answer([]))  # what is not written yet need not wait for the cases
    for *case, least in _cases():
        tried: list[tuple[float, float]] = []
        for _ in range(8):
            size = float(answer(list(tried)))
            tried.append((size, exposed(*case, size)))
        ratios.append(min(seconds for _, seconds in tried) / least)
    mean = float(np.mean(ratios))
    told = f"After eight tries the exposed time is {mean:.3f} times the least on average, {max(ratios):.2f} at worst"
    return None if mean <= 1.03 else f"{told}; 1.03 on average is asked for."


threshold = Exercise(
    id="parallel_training-threshold",
    answer="next_threshold",
    question="**Open.** Write `next_threshold(tried)`, which searches for the best threshold by trying. `tried` is the "
    "list of what you have tried on a network, pairs (threshold in bytes, exposed seconds), at first empty; return the "
    "next threshold to try. You have eight tries on each of twelve cases: a network, a number of workers and a wire, "
    "of 0.5, 5 or 50 µs a message, none of which you know. The best of the eight may expose at most 1.03 times the "
    "least time on average.",
    hints=(
        "Take the first tries far apart: thresholds matter by factors, from some KiB to many MiB.",
        "`min(tried, key=lambda pair: pair[1])` is the best so far. Where would you look next?",
    ),
    code="""
def next_threshold(tried):
    if len(tried) < 3:
        return [2.0**12, 2.0**20, 2.0**28][len(tried)]
    best, _ = min(tried, key=lambda pair: pair[1])
    below = max([size for size, _ in tried if size < best], default=best)
    above = min([size for size, _ in tried if size > best], default=best)
    return math.sqrt(best * (below if best / below > above / best else above))  # the middle of the wider gap
""",
    wrong=_threshold,
    right="libraries (Horovod's autotuner) search in the same way, by measuring steps of the training itself.",
)

__all__ = ["Exercise", "enough", "gradients", "images", "interval", "math", "parts", "sharded", "threshold", "tried",
           "versions"]  # fmt: skip
