"""What notebook 13 trains on, sounds made from formants; its training; its record: more to learn from, a larger net.

Recorded: the recogniser with fewer or more utterances to learn from, and with a small or a larger net, each at its best
learning rate.
"""

import functools
import itertools
import json
import math
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from scipy import signal

from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import checks, processes, train
from dlscale.sequence_models_and_serving import command, sequence
from dlscale.sequence_models_and_serving.sequence import HERTZ, LONGEST, MOST_SYMBOLS, SYMBOLS
from dlscale.sequence_models_and_serving.serving import Rule

# Sounds

FORMANTS = {  # hertz of the three lowest resonances (Peterson & Barney 1952, men, rounded)
    "a": (730, 1090, 2440), "e": (530, 1840, 2480), "i": (270, 2290, 3010), "o": (570, 840, 2410),
    "u": (300, 870, 2240),
}  # fmt: skip


class Speaker(NamedTuple):
    """A voice: pitch in hertz, the factor on all resonances (a short throat has a large one), and on durations."""

    pitch: float
    tract: float
    pace: float


def speaker(seed: int) -> Speaker:
    """A voice drawn at random."""
    rng = np.random.default_rng([seed, 1])
    return Speaker(90 * 2.6 ** rng.random(), rng.uniform(0.87, 1.17), rng.uniform(0.85, 1.15))


def say(string: str, voice: Speaker, rng: np.random.Generator) -> np.ndarray:
    """A string as sound, with durations, intonation and noise of the throat drawn at random.

    Raises ValueError for no or too many symbols, and for one that nobody can say.
    """
    checks.whole("The number of symbols", len(string), high=MOST_SYMBOLS)
    for symbol in string:
        checks.known("symbol", symbol, SYMBOLS)
    parts = []
    for symbol in string:
        count = int(HERTZ * voice.pace * rng.uniform(0.075, 0.145))
        noise = rng.normal(size=count)
        if symbol == "s":
            sound = _resonance(noise, 3300 * voice.tract**0.5, 900)
        else:
            pitch = voice.pitch * (1 + 0.06 * np.cumsum(rng.normal(size=2))[[0, 1]])
            turns = np.cumsum(np.linspace(*pitch, count)) / HERTZ
            sound = np.diff(np.floor(turns), prepend=0) + 0.02 * noise  # a pulse for each turn
            for hertz, width in zip(FORMANTS[symbol], (80, 100, 140), strict=True):
                sound = _resonance(sound, hertz * voice.tract * rng.normal(1, 0.02), width)
        ends = np.minimum(1, np.minimum(np.arange(count), np.arange(count)[::-1]) / (0.015 * HERTZ))
        parts.append(sound * ends / (np.std(sound * ends) + 1e-9) * (0.4 if symbol == "s" else 1.0))
    return np.concatenate(parts)[:LONGEST]


def _resonance(sound: np.ndarray, hertz: float, width: float) -> np.ndarray:
    radius = np.exp(-np.pi * width / HERTZ)
    angle = 2 * np.pi * min(hertz, 0.48 * HERTZ) / HERTZ
    return signal.lfilter([1 - radius], [1, -2 * radius * np.cos(angle), radius**2], sound)


def recorded(sound: np.ndarray, decibels: float, rng: np.random.Generator) -> np.ndarray:
    """What a microphone makes of it, as 16-bit samples: noise, so many decibels below the sound, and a level."""
    noise = rng.normal(size=len(sound)) * np.std(sound) * 10 ** (-decibels / 20)
    mixed = sound + noise
    return np.round(mixed / np.abs(mixed).max() * rng.uniform(3e3, 3e4)).astype(np.int16)


class Utterances(NamedTuple):
    """Sounds (count, LONGEST) of 16 bits or what `spectrogram` makes of them, and what was said."""

    sounds: np.ndarray
    frames: np.ndarray  # (count,)
    labels: np.ndarray  # (count, MOST_SYMBOLS)
    counts: np.ndarray  # (count,)


def utterances(strings: Sequence[str], voices: Sequence[Speaker], decibels: Sequence[float], seed: int) -> Utterances:
    """Strings as sound, each by its voice and with its noise."""
    rng = np.random.default_rng([seed, 2])
    sounds = np.zeros((len(strings), LONGEST), np.int16)
    labels, frames = np.zeros((len(strings), MOST_SYMBOLS), np.int32), np.zeros(len(strings), np.int32)
    for i, (string, voice, noise) in enumerate(zip(strings, voices, decibels, strict=True)):
        sound = recorded(say(string, voice, rng), noise, rng)
        sounds[i, : len(sound)] = sound
        frames[i] = sequence.length_in_frames(len(sound))
        labels[i, : len(string)] = [1 + SYMBOLS.index(symbol) for symbol in string]
    return Utterances(sounds, frames, labels, np.array([len(string) for string in strings], np.int32))


def strings(count: int, seed: int, without: Sequence[str] = ()) -> list[str]:
    """Strings of 3 to 7 symbols drawn at random, none of them among those `without`."""
    rng, known, found = np.random.default_rng([seed, 4]), set(without), []
    while len(found) < count:
        string = "".join(rng.choice(list(SYMBOLS), rng.integers(3, MOST_SYMBOLS + 1)))
        if string not in known:
            found.append(string)
    return found


TRAINING_VOICES, VALIDATION_VOICES, TEST_VOICES = range(200), range(1000, 1012), range(2000, 2012)
QUIET, LOUD = 5.0, 20.0  # decibels from noise to sound
TEST_COUNT = 360  # utterances, 30 of each voice

_spectrogram = jax.jit(sequence.spectrogram)


def heard(made: Utterances, piece: int = 25) -> Utterances:
    """The same with spectrograms in place of sounds, piece by piece: frames of them all at once take much memory."""
    padded = np.pad(made.sounds, ((0, -len(made.sounds) % piece), (0, 0)))
    pieces = [np.asarray(_spectrogram(part)) for part in np.split(padded, len(padded) // piece)]
    return made._replace(sounds=np.concatenate(pieces)[: len(made.sounds)])


@functools.cache
def training_strings(count: int) -> list[str]:
    """What is said in the first so many utterances to learn from."""
    return strings(count, 0)


@functools.cache
def lessons(count: int = 2000) -> Utterances:
    """Utterances to learn from: strings, voices and noise drawn at random."""
    rng = np.random.default_rng(5)
    voices = [speaker(int(seed)) for seed in rng.choice(TRAINING_VOICES, count)]
    return heard(utterances(training_strings(count), voices, rng.uniform(QUIET, LOUD, count), 0))


@functools.cache
def exam(judged_on: str, decibels: float | None = None, count: int = TEST_COUNT) -> Utterances:
    """Strings that no lesson has, by voices that no lesson has, in turn; noise as in the lessons, or as given."""
    voices = {"validation": VALIDATION_VOICES, "test": TEST_VOICES}[judged_on]
    new = strings(count, voices[0], training_strings(2000))
    noise = np.random.default_rng(voices[0]).uniform(QUIET, LOUD, count) if decibels is None else [decibels] * count
    return heard(utterances(new, [speaker(voices[i % len(voices)]) for i in range(count)], noise, voices[0]))


# Training

STEPS, BATCH, CLIP = 250, 32, 5.0
WARM_UP = 30


OPTIMIZER = optax.chain(optax.clip_by_global_norm(CLIP), optax.scale_by_adam())


def rates(rate: float, steps: int = STEPS) -> np.ndarray:
    """(steps,) the learning rate of each: up in a line, then down as a cosine."""
    count = np.arange(steps)
    down = (1 + np.cos(np.pi * np.clip((count - WARM_UP) / (steps - WARM_UP), 0, 1))) / 2
    return np.float32(rate * np.minimum(1, (count + 1) / WARM_UP) * down)


def stepping(net: Callable[..., Array]) -> Callable[..., Any]:
    """What takes one step of Adam on a net's mean CTC loss for each symbol; its record is that loss."""

    def step(state: tuple[Any, Any], now: tuple[Array, Array], made: Utterances) -> tuple[tuple[Any, Any], Array]:
        (params, memory), (rows, rate) = state, now
        sounds, frames, labels, counts = (a[rows] for a in made)

        def loss(params: Any) -> Array:
            return sequence.ctc_loss(net(params, sounds, frames), frames, labels, counts).sum() / counts.sum()

        value, gradient = jax.value_and_grad(loss)(params)
        updates, memory = OPTIMIZER.update(gradient, memory)
        return (jax.tree.map(lambda p, u: p - rate * u, params, updates), memory), value

    return step


step = stepping(sequence.hear)


def ready(params: Any) -> tuple[Any, Any]:
    """Parameters and the optimizer's memory before the first step: all of it is 0."""
    return params, jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), jax.eval_shape(OPTIMIZER.init, params))


def order(count: int, seed: int, steps: int = STEPS) -> np.ndarray:
    """(steps, batch) rows: all of the lessons in a new order, again and again."""
    rng = np.random.default_rng([seed, 6])
    whole = [rng.permutation(count) for _ in range(-(-steps * BATCH // count))]
    return np.concatenate(whole)[: steps * BATCH].reshape(steps, BATCH)


def learn(count: int, hidden: int, rate: float, seed: int, steps: int = STEPS, **options: Any) -> train.Driven:
    """Train on the first `count` lessons; `options` are those of `train.run`."""
    inputs = order(count, seed, steps), rates(rate, steps)
    return train.run(step, ready(sequence.init(seed, hidden)), inputs, lessons(), **options)


PIECE = 60  # utterances that are heard at once: one program for an exam and for a single sound
hear = jax.jit(sequence.hear)


def logits(params: Any, made: Utterances, net: Callable[..., Array] = hear) -> np.ndarray:
    """(utterances, FRAMES, classes) what the net says, piece by piece."""
    count = len(made.frames)
    places = np.resize(np.arange(count), -(-count // PIECE) * PIECE).reshape(-1, PIECE)
    return np.concatenate([np.asarray(net(params, made.sounds[i], made.frames[i])) for i in places])[:count]


def wrong(params: Any, made: Utterances, net: Callable[..., Array] = hear) -> np.ndarray:
    """(utterances, 2) symbols to put in, take out or change in what the best path says, and symbols said."""
    paths = logits(params, made, net).argmax(2)
    found = (sequence.collapse(path[:n]) for path, n in zip(paths, made.frames, strict=True))
    said = (row[:n].tolist() for row, n in zip(made.labels, made.counts, strict=True))
    return np.array([(sequence.edits(a, b), len(b)) for a, b in zip(found, said, strict=True)])


def rates_of_voices(found: np.ndarray) -> np.ndarray:
    """(voices,) the percentage of symbols that are wrong, of each of the twelve voices, from what `wrong` found."""
    return np.array([100 * part[:, 0].sum() / part[:, 1].sum() for part in (found[i::12] for i in range(12))])


# The record

COUNTS, RATES = (125, 500, 2000), (0.003, 0.01, 0.03, 0.1, 0.3)
TUNING_SEEDS, TEST_SEEDS = range(100, 102), range(10, 16)


def trial(count: int, hidden: int, rate: float, seed: int, judged_on: str, steps: int = STEPS) -> dict[str, float]:
    """The percentage of wrong symbols after training, 100 at most, and the loss of step 10."""
    driven = learn(count, hidden, rate, seed, steps, progress=False)
    found = wrong(driven.state[0], exam(judged_on)).sum(0)
    return {"error": min(100.0, 100 * found[0] / found[1]), "early": driven.records[9]}


SMALL = {"count": 2000, "hidden": 16}
ARMS = [SMALL | {"steps": STEPS}, SMALL | {"steps": 2 * STEPS}, *({"count": count, "hidden": 64} for count in COUNTS)]


def plan(run: RunTrials) -> None:
    """Each arm's rate is chosen on other voices, strings and seeds than it is then judged on."""
    for arm in ARMS:
        tuning = [arm | {"rate": r, "seed": s, "judged_on": "validation"} for r in RATES for s in TUNING_SEEDS]
        found = np.array([m["error"] for m in run(tuning)]).reshape(len(RATES), -1).mean(1)
        best = min(zip(found, RATES, strict=True), key=itemgetter(0))[1]
        run([arm | {"rate": best, "seed": s, "judged_on": "test"} for s in TEST_SEEDS])


SCALE = Experiment(
    id="sequence_models_and_serving-scale",
    about="The recogniser's error against the number of lessons and the size of the net (five arms, five rates)",
    trial=trial,
    plan=plan,
    tolerance={"error": 1.0, "early": 0.02},
    chaotic=("error",),
    drawn={"hidden": 64, "count": 2000, "judged_on": "test"},
)

# The control: nets without recurrence, which see some frames at a time

REACH, WINDOW_UNITS = 15, 128  # frames that are seen at a time, at most; units of each hidden layer
BEST_RATE = 0.03  # of the recurrent net with 64 units, after 500 lessons as after 2,000, from the record above
NARROW_RATES = RATES[2:]  # where the best rate of windows of one and of five frames was found to lie
OWN_VOICES, OWN_SEEDS = 10_000, range(200, 212)  # each of these seeds is judged by sixty voices of its own


def window_init(seed: int, reach: int = REACH, layers: int = 1) -> list[dict[str, np.ndarray]]:
    """Parameters of dense layers over `reach` frames, `layers` of them hidden, each with a bias as a GRU has."""
    rng = np.random.default_rng([seed, 8])
    sizes = itertools.pairwise([reach * sequence.BANDS, *[WINDOW_UNITS] * layers, sequence.CLASSES])
    return [{"w": np.float32(rng.normal(size=(a, b)) / a**0.5), "b": np.zeros(b, np.float32)} for a, b in sizes]


@jax.jit
def window_hear(params: Any, sounds: Array, frames: Array) -> Array:
    """Logits, each from the frames around it: nothing waits."""
    *hidden, last = params
    reach = len(params[0]["w"]) // sequence.BANDS
    padded = jnp.pad(sounds, ((0, 0), (reach // 2, reach // 2), (0, 0)))
    seen = jnp.concatenate([padded[:, i : i + sounds.shape[1]] for i in range(reach)], axis=2)
    for layer in hidden:
        seen = jnp.tanh(seen @ layer["w"] + layer["b"])
    return seen @ last["w"] + last["b"]


window_step = stepping(window_hear)


@functools.lru_cache(2)
def fresh(first: int, count: int = 600) -> Utterances:
    """As `exam`, by sixty voices from the `first` on that stand in neither of the two: ten strings each."""
    new, noise = strings(count, first, training_strings(2000)), np.random.default_rng(first)
    voices = [speaker(first + i % 60) for i in range(count)]
    return heard(utterances(new, voices, noise.uniform(QUIET, LOUD, count), first))


def window_trial(
    rate: float, seed: int, judged_on: str, reach: int, layers: int = 0, count: int = 2000
) -> dict[str, float]:
    """As `trial`; no `reach` is the recurrent net with 64 units. `own`: by other voices for every seed."""
    made = fresh(OWN_VOICES + 60 * seed) if judged_on == "own" else exam(judged_on)
    if reach:
        begin = ready(window_init(seed, reach, layers))
        driven = train.run(window_step, begin, (order(count, seed), rates(rate)), lessons(), progress=False)
    else:
        driven = learn(count, 64, rate, seed, progress=False)
    found = wrong(driven.state[0], made, window_hear if reach else hear).sum(0)
    return {"error": min(100.0, 100 * found[0] / found[1]), "early": driven.records[9]}


RECURRENT = {"reach": 0}
FEWER = {"reach": 0, "count": 500}
WINDOWS = [{"reach": reach, "layers": layers} for reach, layers in ((1, 1), (5, 1), (REACH, 1), (REACH, 2))]


def window_plan(run: RunTrials) -> None:
    """As `plan`, for four windows; the narrow ones are then judged by twelve voices, as the record above.

    The widest, and the recurrent net after 500 lessons and after 2,000, by sixty of its own for each of twelve seeds.
    """
    judged = [FEWER | {"rate": BEST_RATE}, RECURRENT | {"rate": BEST_RATE}]
    for arm in WINDOWS:
        tried = RATES if arm["reach"] == REACH else NARROW_RATES
        tuning = [arm | {"rate": r, "seed": s, "judged_on": "validation"} for r in tried for s in TUNING_SEEDS]
        found = np.array([m["error"] for m in run(tuning)]).reshape(len(tried), -1).mean(1)
        best = arm | {"rate": min(zip(found, tried, strict=True), key=itemgetter(0))[1]}
        if arm["reach"] == REACH:
            judged.append(best)
        else:
            run([best | {"seed": s, "judged_on": "test"} for s in TEST_SEEDS])
    run([arm | {"seed": s, "judged_on": "own"} for s in OWN_SEEDS for arm in judged])


CONTROL = Experiment(
    id="sequence_models_and_serving-window",
    about="Recognisers without recurrence: one, five or fifteen frames at a time, beside the recurrent net",
    trial=window_trial,
    plan=window_plan,
    tolerance={"error": 1.0, "early": 0.02},
    chaotic=("error",),
    drawn={"reach": 1, "judged_on": "test"},
)

# The clock: what takes how many times as long as what, each time in a process of its own


@jax.jit
def one_after_the_other(h: Array, w: Array, steps: Array) -> Array:
    """`steps` products, each of which needs the one before."""
    return lax.fori_loop(0, steps, lambda _, h: jnp.tanh(h @ w), h)


@jax.jit
def in_one_product(h: Array, w: Array) -> Array:
    """All at once."""
    return jnp.tanh(h @ w)


def middles(times: int, *tasks: Callable[[], object]) -> np.ndarray:
    """The median processor seconds of each task, of all threads together, the tasks in turn; the first round compiles.

    The least would be wrong: now and then a short run is counted too low.
    """

    def once(task: Callable[[], object]) -> float:
        start = time.process_time()
        jax.block_until_ready(task())
        return time.process_time() - start

    return np.median([[once(task) for task in tasks] for _ in range(times + 1)][1:], axis=0)


def python_table(log_p: np.ndarray, states: Sequence[int]) -> list[list[float]]:
    """The logarithms of alpha, one number after the other."""
    table: list[list[float]] = []
    jump = [s > 1 and k != 0 and k != states[s - 2] for s, k in enumerate(states)]
    for t, row in enumerate(log_p.tolist()):
        before, now = table[-1] if t else [], []
        for s, label in enumerate(states):
            ways = [before[s - i] for i in range(min(s, 1) + 1 + jump[s])] if t else [0.0 if s < 2 else sequence.NEVER]
            most = max(ways)
            now.append(most + math.log(sum(math.exp(way - most) for way in ways)) + row[label])
        table.append(now)
    return table


def numpy_table(log_p: np.ndarray, states: Sequence[int]) -> np.ndarray:
    """The logarithms of alpha, all states of a frame at once."""
    labels = np.array(states)
    jump = np.r_[False, False, (labels[2:] != labels[:-2]) & (labels[2:] != 0)]
    table, now = np.zeros((len(log_p), len(labels))), np.full(len(labels), sequence.NEVER)
    now[0] = 0
    for t, emitted in enumerate(log_p[:, labels]):
        before = np.logaddexp(now, np.r_[sequence.NEVER, now[:-1]])
        over = np.where(jump, np.r_[sequence.NEVER, sequence.NEVER, now[:-2]], sequence.NEVER)
        table[t] = now = np.logaddexp(before, over) + emitted
    return table


def with_gradient(log_p: np.ndarray, labels: Sequence[int], table: Callable[..., Any]) -> tuple[float, np.ndarray]:
    """CTC loss of one utterance and its gradient by the logits; `table` gives the logarithms of alpha."""
    states = [0, *(s for label in labels for s in (label, 0))]
    there, back = np.array(table(log_p, states)), np.array(table(log_p[::-1], states[::-1]))[::-1, ::-1]
    total = np.logaddexp(there[-1, -1], there[-1, -2])
    p = np.exp(log_p)
    shares = np.zeros_like(p)
    np.add.at(shares.T, states, np.exp(there + back - log_p[:, states] - total).T)
    return -total, p - shares


class Speech(NamedTuple):
    """Logits and labels of 32 utterances of up to 200 frames, in 28 classes: letters, a space, and the blank."""

    logits: np.ndarray
    frames: np.ndarray
    labels: np.ndarray
    counts: np.ndarray


def speech(count: int = 32, frames: int = 200, classes: int = 28) -> Speech:
    """Drawn at random."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(count, frames, classes)).astype(np.float32)
    lengths, labels = rng.integers(frames * 3 // 4, frames + 1, count), rng.integers(1, classes, (count, 30))
    return Speech(z, lengths, labels.astype(np.int32), rng.integers(10, 31, count))


@jax.jit
def batched(made: Speech) -> tuple[Array, Array]:
    """CTC loss, all together, and its gradient."""
    return jax.value_and_grad(lambda z: sequence.ctc_loss(z, *made[1:]).sum())(made.logits)


def one_by_one(made: Speech, table: Callable[..., Any], rows: Sequence[int]) -> list[tuple[float, np.ndarray]]:
    """`with_gradient` of some utterances."""
    z = made.logits.astype(float)
    log_p = z - np.log(np.exp(z).sum(2, keepdims=True))
    return [with_gradient(log_p[i, : made.frames[i]], made.labels[i, : made.counts[i]].tolist(), table) for i in rows]


def clocked() -> dict[str, float]:
    """Processor seconds of one way over those of another, and those of a server for a request; all as log2."""
    found = {}
    small, wide = (jnp.full((n, n), 1e-3) for n in (512, 3520))
    w, rows = jnp.full((1024, 1024), 1e-3), jnp.ones((64, 1024))
    chain, product = middles(15, lambda: one_after_the_other(rows[:1], w, 64), lambda: in_one_product(rows, w))
    found["dependence"] = chain / product
    far, near = middles(
        15, *(lambda w=w, n=n: one_after_the_other(jnp.ones((1, len(w))), w, n) for w, n in ((wide, 2), (small, 64)))
    )
    found["cache"] = far / 2 / wide.size / (near / 64 / small.size)
    made = speech()
    alone = [Speech(*(a[i : i + 1] for a in made)) for i in range(len(made.frames))]
    whole, each, by_numpy, by_python = middles(
        5,
        lambda: batched(made),
        lambda: [batched(one) for one in alone],
        lambda: one_by_one(made, numpy_table, range(8)),
        lambda: one_by_one(made, python_table, range(4)),
    )
    found |= {"compiled": each / whole, "numpy": 4 * by_numpy / whole, "python": 8 * by_python / whole}
    with tempfile.TemporaryDirectory() as folder:
        sequence.save(path := Path(folder, "net.npz"), sequence.init(0))
        with command.running(path, [Rule(1, 0.0, 64), Rule(16, 0.0, 64)]) as server:
            sound = np.random.default_rng(0).integers(-9999, 9999, LONGEST)
            for place, name in enumerate(("alone", "batch")):
                before = _of_children()
                for _ in range(8):
                    server.load(place, [sound] * 48, np.zeros(48))
                found[name] = (_of_children() - before) / 8 / 48
    return {name: float(np.log2(value)) for name, value in found.items()}


def _of_children() -> float:
    return processes.processor_seconds(processes.family(os.getpid())[1:])


ONE_AT_A_TIME = threading.Lock()


def clock_trial(process: int) -> dict[str, float]:
    """`clocked` in a fresh process; `process` is only its number."""
    code = f"import json; from {__name__} import {clocked.__name__} as f; print(json.dumps(f()))"
    with ONE_AT_A_TIME:  # what is timed has the machine to itself
        done = subprocess.run([*processes.PYTHON, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def clock_plan(run: RunTrials) -> None:
    """Eight processes."""
    run([{"process": number} for number in range(8)])


RATIOS = ("dependence", "cache", "compiled", "numpy", "python")

# Ratios of medians may be eight times as large on another machine, or as small; seconds are not compared (100 octaves).
CLOCK = Experiment(
    id="sequence_models_and_serving-clock",
    about="Dependence, CTC, caches and batches by the clock, in eight fresh processes",
    trial=clock_trial,
    plan=clock_plan,
    tolerance=dict.fromkeys(RATIOS, 3.0) | dict.fromkeys(("alone", "batch"), 100.0),
)
