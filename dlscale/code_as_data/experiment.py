"""The recorded experiments of notebook 17: vectors of statements, and networks that read programs along wires."""

import functools
import re
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlscale import code_as_data as room
from dlscale.code_as_data import corpus
from dlscale.course.records import Experiment, RunTrials

# Vectors of statements

VECTORS_SEEDS = range(11_800, 11_832)


@functools.cache
def contexts(wires: str) -> np.ndarray:
    """(n, 2) statements that one wire joins, all over the corpus."""
    return corpus.vocabulary().contexts(corpus.load("corpus").graphs, wires)


def vectors_trial(wires: str, seed: int) -> dict[str, float]:
    """In percent: instructions with a related one among their five nearest; analogies answered in both ways."""
    words = corpus.vocabulary()
    table = room.skip_gram(contexts(wires), len(words.words), seed=seed)
    asked = room.analogies(words, corpus.COUPLES)
    found = {
        "related": room.hits(room.of_instructions(table, words), list(words.instructions), corpus.GROUPS),
        "b − a + c": room.answered(table, asked),
        "b alone": room.answered(table, asked, "b alone"),
    }
    return {name: round(100 * float(share.mean()), 3) for name, share in found.items()}


def vectors_plan(run: RunTrials) -> None:
    run([{"wires": wires, "seed": seed} for wires in ("flow", "text") for seed in VECTORS_SEEDS])


VECTORS_MEASURES = ("related", "b − a + c", "b alone")
VECTORS = Experiment(
    "code_as_data-vectors", "related instructions and analogies, by vectors learnt along the flow and along the text",
    vectors_trial, vectors_plan, dict.fromkeys(VECTORS_MEASURES, 1.0), chaotic=VECTORS_MEASURES,
    drawn={"wires": "flow"}, confirms=("code_as_data-flow", "code_as_data-analogies"),
)  # fmt: skip

# Networks that read programs

READERS = {
    "instructions only": ("none", "random"),
    "along the text": ("text", "random"),
    "along the wires": ("flow", "random"),
    "along the wires, learnt vectors": ("flow", "learnt"),
    "along the wires, types": ("flow", "types"),
    "along the wires, one vector for all": ("flow", "same"),
}
RATES = (2.0**-13, 2.0**-11, 2.0**-9, 2.0**-7, 2.0**-5)
TUNING_SEEDS, READERS_SEEDS = range(8), range(11_856, 11_880)


@functools.lru_cache(maxsize=64)
def table(vectors: str, seed: int) -> np.ndarray:
    """(words, 32) vectors of length one: "learnt", "random", random for each of its "types", or the "same"."""
    words, rng = corpus.vocabulary().words, np.random.default_rng([seed, 1])
    if vectors == "learnt":
        return room.skip_gram(contexts("flow"), len(words), seed=seed)
    random: dict[Any, np.ndarray] = defaultdict(lambda: rng.normal(size=32))
    parts = {"random": lambda word: [word], "types": types, "same": lambda word: [0]}[vectors]
    return room.unit(np.array([np.sum([random[part] for part in parts(word)], axis=0) for word in words]))


def types(word: str) -> list[Any]:
    """The kinds of a statement's result and operands, with their places, as of "mul float (float, number)"."""
    return [*enumerate(re.sub(r"[()]|,(?= )", "", word).split()[1:])] or [word]


def readers_trial(reader: str, rate: float, judged_on: str, seed: int) -> dict[str, float]:
    """Percent right, on couples of known operations, the same reordered, new operations, and the validation set."""
    wires, vectors = READERS[reader]
    own = jnp.asarray(table(vectors, seed), jnp.float32)
    parts = {name: (room.padded(g, corpus.vocabulary(), wires), y) for name, (g, y) in corpus.split(seed).items()}
    params = room.fit(*parts.pop("train"), own, rate, seed)
    right = {name: room.logits(params, own, batch).argmax(1) == y for name, (batch, y) in parts.items()}
    return {name: round(100 * float(share.mean()), 3) for name, share in jax.device_get(right).items()}


def readers_plan(run: RunTrials) -> None:
    """Each reader at the rate that is best on the validation sets of other splits."""
    for reader in READERS:
        means = {}
        for rate in RATES:
            setting = {"reader": reader, "rate": rate, "judged_on": "validation"}
            means[rate] = np.mean([trial["validation"] for trial in run([setting | {"seed": s} for s in TUNING_SEEDS])])
        setting = {"reader": reader, "rate": max(RATES, key=lambda rate: means[rate]), "judged_on": "test"}
        run([setting | {"seed": seed} for seed in READERS_SEEDS])


READERS_MEASURES = ("validation", "known", "reordered", "new")
WIRINGS = Experiment(
    "code_as_data-wirings", "how two operations are wired, by one network along six kinds of wires and vectors",
    readers_trial, readers_plan, dict.fromkeys(READERS_MEASURES, 3.0), chaotic=READERS_MEASURES,
    drawn={"judged_on": "test"}, confirms=("code_as_data-wiring", "code_as_data-unseen"),
)  # fmt: skip
