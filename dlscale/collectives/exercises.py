"""The exercises of 08_collectives."""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax import Array, lax  # noqa: F401 (for the solutions)

from dlscale import costs
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import program

LIBRARY = ValueError("It calls the library's own collective: write it with jax.lax.ppermute.")


def tried(f: Callable[[Array, str], Array]) -> Callable[[np.ndarray], Any]:
    """What f(x, axis_name) does, as a function of all workers' x, (workers, …).

    It returns their results, and for each round of the traced program its messages: (pairs, bytes). Where f is not
    written yet, `...`. A check cannot trace what runs in another process; this runs where f is.
    """

    def run(x: np.ndarray) -> Any:
        own, answers = jax.ShapeDtypeStruct(x.shape[1:], x.dtype), []

        def one(x: Array) -> Array:
            answers.append(f(x, "workers"))
            return x if answers[-1] is ... else answers[-1]

        with mock.patch("dlscale.collectives._group", side_effect=LIBRARY):
            found = program.schedule(one, len(x), own)
        if answers[0] is ...:
            return ...
        others = r"\b(psum|pmax|pmin|pbroadcast|all_gather|all_to_all|reduce_scatter)"
        if used := re.search(others, str(program.trace(one, len(x), own))):
            raise ValueError(f"It calls JAX's own {used[1]}: write it with jax.lax.ppermute.")
        rounds = [[(message.pairs.tolist(), message.bytes) for message in messages] for messages, _ in found.rounds]
        return np.asarray(jax.jit(jax.vmap(one, axis_name="workers"))(x)), rounds

    return run


def _butterfly(answer: Any) -> str | None:
    for workers in (4, 2, 16):
        x = np.random.default_rng(workers).integers(0, 100, (workers, 3 * workers)).astype(np.int32)
        results, rounds = answer(x)
        if wrong := compare(f"The array of {workers} workers' sums", results, np.broadcast_to(x.sum(0), x.shape), 1e-9):
            return wrong
        for messages in rounds:
            pairs = {(a, b) for pairs, _ in messages for a, b in pairs}
            if lonely := [(a, b) for a, b in pairs if (b, a) not in pairs]:
                a, b = min(lonely)
                return f"The sums are right, but of {workers} workers {a} sends to {b} and {b} does not send to {a}."
        sent = [size for messages in rounds for _, size in messages]
        if len(rounds) > (enough := int(math.log2(workers))) or sum(sent) > enough * x[0].nbytes:
            given = f"{workers} workers send {sum(sent) / x[0].nbytes:.3g} arrays in {len(rounds)} rounds"
            return f"The sums are right, but {given}; {enough} of both are enough."
    return None


butterfly = Exercise(
    id="collectives-butterfly",
    answer="butterfly",
    hints=(
        "`w ^ 2**k` is the number w with its bit k changed, and `P.bit_length() - 1` is log₂ P.",
        "In every round all workers send the whole x: one ppermute with a pair (w, partner) for each worker w.",
    ),
    code="""
def butterfly(x, axis_name):
    P = lax.axis_size(axis_name)
    for k in range(P.bit_length() - 1):
        partners = [(w, w ^ 2**k) for w in range(P)]
        x = x + lax.ppermute(x, axis_name, partners)
    return x
""",
    wrong=_butterfly,
    right="the sums are NumPy's, after log₂ P rounds of one whole array each. No all-reduce needs fewer rounds.",
)


def _crossover(answer: Any) -> str | None:
    for workers, latency, per_byte in ((8, 1e-6, 1e-10), (64, 5e-6, 1e-9), (16, 1e-3, 1e-7), (4, 2.0, 1.0)):
        expected = latency * (2 * (workers - 1) - math.log2(workers))
        expected /= per_byte * (math.log2(workers) - 2 * (workers - 1) / workers)
        given = f"{workers} workers, {latency:g} s a message and {per_byte:g} s a byte"
        if wrong := compare(f"The size for {given}", answer(workers, latency, per_byte), expected, 1e-4):
            return wrong
    return None


crossover = Exercise(
    id="collectives-crossover",
    answer="crossover",
    hints=(
        "Write down both times, each as rounds · α + arrays · size · β, and set them equal.",
        "Solve α log₂ P + β n log₂ P = 2 (P − 1) α + 2 (P − 1) / P · β n for n.",
    ),
    code="""
def crossover(workers, latency, per_byte):
    rounds, share = math.log2(workers), (workers - 1) / workers
    return latency * (2 * (workers - 1) - rounds) / (per_byte * (rounds - 2 * share))
""",
    wrong=_crossover,
    right="it depends on α / β alone: the bytes that the network could carry while a message waits.",
)


def _wire(answer: Any) -> str | None:
    for workers, distance in ((8, 1), (8, 3), (8, 4), (8, 7), (7, 4), (64, 32), (12, 9), (47, 20)):
        passed = Counter(e for w in range(workers) for e in costs.ring(workers).route(w, (w + distance) % workers))
        given = f"{workers} workers and a distance of {distance}"
        if wrong := compare(f"The number of messages for {given}", answer(workers, distance), max(passed.values()), 0):
            return wrong
    return None


wire = Exercise(
    id="collectives-wire",
    answer="on_busiest_wire",
    hints=(
        "Draw eight workers and a distance of 3: which messages pass the wire from worker 4 to worker 5?",
        "With a distance of 7 among 8 workers, the shorter way is one wire long, backwards.",
    ),
    code="""
def on_busiest_wire(workers, distance):
    return min(distance, workers - distance)
""",
    wrong=_wire,
    right="each of these messages gets only its share of the wire's bandwidth. Only neighbours have a wire to "
    "themselves.",
)
