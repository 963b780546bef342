"""What notebook 13 trains on, sounds made from formants; its training; its record: more to learn from, a larger net.

Recorded: the recogniser with fewer or more utterances to learn from, and with a small or a larger net, each at its best
learning rate.
"""

import functools
import itertools
import json
import os
import subprocess
import threading
import timeit
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from scipy import signal

from dlscale.course import records
from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import checks, processes, train
from dlscale.sequence_models_and_serving import sequence
from dlscale.sequence_models_and_serving.sequence import HERTZ, LONGEST, MOST_SYMBOLS, SYMBOLS

# Sounds

FORMANTS = {  # hertz of the three lowest resonances (Peterson & Barney 1952, men, rounded)
    "a": (730, 1090, 2440), "e": (530, 1840, 2480), "i": (270, 2290, 3010), "o": (570, 840, 2410),
    "u": (300, 870, 2240),
}  # fmt: skip


def say(string: str, voice: int, rng: np.random.Generator) -> np.ndarray:
    """A string as sound, with durations, intonation and noise of the throat drawn at random; `voice` is a seed, too.

    A voice has a pitch in hertz, a factor on all resonances (a short throat has a large one), and one on durations.
    Raises ValueError for no or too many symbols, and for one that nobody can say.
    """
    checks.whole("The number of symbols", len(string), high=MOST_SYMBOLS)
    own, parts = np.random.default_rng([voice, 1]), []
    pitch, tract, pace = 90 * 2.6 ** own.random(), own.uniform(0.87, 1.17), own.uniform(0.85, 1.15)
    for symbol in string:
        checks.known("symbol", symbol, SYMBOLS)
        count = int(HERTZ * pace * rng.uniform(0.075, 0.145))
        noise = rng.normal(size=count)
        if symbol == "s":
            sound = _resonance(noise, 3300 * tract**0.5, 900)
        else:
            glide = pitch * (1 + 0.06 * np.cumsum(rng.normal(size=2))[[0, 1]])
            turns = np.cumsum(np.linspace(*glide, count)) / HERTZ
            sound = np.diff(np.floor(turns), prepend=0) + 0.02 * noise  # a pulse for each turn
            for hertz, width in zip(FORMANTS[symbol], (80, 100, 140), strict=True):
                sound = _resonance(sound, hertz * tract * rng.normal(1, 0.02), width)
        ends = np.minimum(1, np.minimum(np.arange(count), np.arange(count)[::-1]) / (0.015 * HERTZ))
        parts.append(sound * ends / (np.std(sound * ends) + 1e-9) * (0.4 if symbol == "s" else 1.0))
    return np.concatenate(parts)[:LONGEST]


def _resonance(sound: np.ndarray, hertz: float, width: float) -> np.ndarray:
    radius = np.exp(-np.pi * width / HERTZ)
    angle = 2 * np.pi * min(hertz, 0.48 * HERTZ) / HERTZ
    return signal.lfilter([1 - radius], [1, -2 * radius * np.cos(angle), radius**2], sound)


class Utterances(NamedTuple):
    """Sounds (count, LONGEST) of 16 bits or what `spectrogram` makes of them, and what was said."""

    sounds: np.ndarray
    frames: np.ndarray  # (count,)
    labels: np.ndarray  # (count, MOST_SYMBOLS)
    counts: np.ndarray  # (count,)


def utterances(strings: Sequence[str], voices: Sequence[int], decibels: Sequence[float], seed: int) -> Utterances:
    """Strings as a microphone hears them, each by its voice, with noise so many decibels below it, at any level."""
    rng = np.random.default_rng([seed, 2])
    sounds = np.zeros((len(strings), LONGEST), np.int16)
    labels, frames = np.zeros((len(strings), MOST_SYMBOLS), np.int32), np.zeros(len(strings), np.int32)
    for i, (string, voice, noise) in enumerate(zip(strings, voices, decibels, strict=True)):
        sound = say(string, voice, rng)
        sound = sound + rng.normal(size=len(sound)) * np.std(sound) * 10 ** (-noise / 20)
        sounds[i, : len(sound)] = np.round(sound / np.abs(sound).max() * rng.uniform(3e3, 3e4))
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

_spectrogram = jax.jit(sequence.spectrogram)


def heard(made: Utterances, piece: int = 25) -> Utterances:
    """The same with spectrograms in place of sounds, piece by piece: frames of them all at once take much memory."""
    padded = np.pad(made.sounds, ((0, -len(made.sounds) % piece), (0, 0)))
    pieces = [np.asarray(_spectrogram(part)) for part in np.split(padded, len(padded) // piece)]
    return made._replace(sounds=np.concatenate(pieces)[: len(made.sounds)])


@functools.cache
def lessons(count: int = 2000) -> Utterances:
    """Utterances to learn from: strings, voices and noise drawn at random."""
    rng = np.random.default_rng(5)
    voices = rng.choice(TRAINING_VOICES, count)
    return heard(utterances(strings(count, 0), voices, rng.uniform(QUIET, LOUD, count), 0))


@functools.lru_cache(2)
def exam(voices: Sequence[int], decibels: float | None = None, count: int = 360) -> Utterances:
    """Strings that no lesson has, by these voices, in turn; noise as in the lessons, or as given."""
    new = strings(count, voices[0], strings(2000, 0))
    noise = np.random.default_rng(voices[0]).uniform(QUIET, LOUD, count) if decibels is None else [decibels] * count
    return heard(utterances(new, np.resize(voices, count), noise, voices[0]))


# Training

STEPS, BATCH, CLIP = 250, 32, 5.0
WARM_UP = 30


OPTIMIZER = optax.chain(optax.clip_by_global_norm(CLIP), optax.scale_by_adam())


def rates(rate: float, steps: int = STEPS) -> np.ndarray:
    """(steps,) the learning rate of each: up in a line, then down as a cosine."""
    count = np.arange(steps)
    down = (1 + np.cos(np.pi * np.clip((count - WARM_UP) / (steps - WARM_UP), 0, 1))) / 2
    return np.float32(rate * np.minimum(1, (count + 1) / WARM_UP) * down)


@functools.cache
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


hear = jax.jit(sequence.hear)
step = stepping(hear)


def order(count: int, seed: int, steps: int = STEPS) -> np.ndarray:
    """(steps, batch) rows: all of the lessons in a new order, again and again."""
    rng = np.random.default_rng([seed, 6])
    whole = [rng.permutation(count) for _ in range(-(-steps * BATCH // count))]
    return np.concatenate(whole)[: steps * BATCH].reshape(steps, BATCH)


PIECE = 60  # utterances that are heard at once: one program for an exam and for a single sound


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


# The record

COUNTS, RATES = (125, 500, 2000), (0.003, 0.01, 0.03, 0.1, 0.3)
TUNING_SEEDS, TEST_SEEDS = range(100, 102), range(10, 16)


def tested(net: Callable[..., Array], params: Any, rows: np.ndarray, rate: float, made: Utterances) -> dict[str, float]:
    """Train a net; the percentage of symbols that it then gets wrong, 100 at most, and the loss of step 10."""
    inputs = rows, rates(rate, len(rows))
    driven = train.run(stepping(net), (params, OPTIMIZER.init(params)), inputs, lessons(), progress=False)
    found = wrong(driven.state[0], made, net).sum(0)
    return {"error": min(100.0, 100 * found[0] / found[1]), "early": driven.records[9]}


def trial(count: int, hidden: int, rate: float, seed: int, judged_on: str, steps: int = STEPS) -> dict[str, float]:
    """A recurrent net after so many of the lessons."""
    made = exam({"validation": VALIDATION_VOICES, "test": TEST_VOICES}[judged_on])
    return tested(hear, sequence.init(seed, hidden), order(count, seed, steps), rate, made)


def tune(run: RunTrials, seeds: Sequence[int], **arm: int) -> None:
    """Test the arm at the rate that is best on other voices, strings and seeds than it is then judged on."""
    options = {"tuning_seeds": TUNING_SEEDS, "score": lambda measures: -measures["error"]}
    train.tune(run, seeds=seeds, rate=RATES, **options, **arm)


SMALL = {"count": 2000, "hidden": 16}
ARMS = [SMALL | {"steps": STEPS}, SMALL | {"steps": 2 * STEPS}, *({"count": count, "hidden": 64} for count in COUNTS)]


def plan(run: RunTrials) -> None:
    """Each arm at its own rate."""
    for arm in ARMS:
        tune(run, TEST_SEEDS, **arm)


SCALE = Experiment(
    "sequence_models_and_serving-scale",
    "The recogniser's error against the number of utterances and the size of the net (five arms, five rates)",
    trial, plan, {"error": 1.0, "early": 0.02}, ("error",), {"hidden": 64, "count": 2000, "judged_on": "test"},
)  # fmt: skip

# The claims, decided once on seeds that nothing else has used; a net without recurrence is the control

REACH, WINDOW_UNITS = 15, 128  # frames that are seen at a time; units of each of two hidden layers
OWN_VOICES, RESERVED_SEEDS = 10_000, range(11_400, 11_412)  # each seed is judged by sixty voices of its own


def window_init(seed: int) -> list[dict[str, np.ndarray]]:
    """Parameters of dense layers over `REACH` frames, two of them hidden, each with a bias as a GRU has."""
    rng = np.random.default_rng([seed, 8])
    sizes = itertools.pairwise([REACH * sequence.BANDS, WINDOW_UNITS, WINDOW_UNITS, sequence.CLASSES])
    return [{"w": np.float32(rng.normal(size=(a, b)) / a**0.5), "b": np.zeros(b, np.float32)} for a, b in sizes]


@jax.jit
def window_hear(params: Any, sounds: Array, frames: Array) -> Array:
    """Logits, each from the frames around it: no frame waits for another."""
    padded = jnp.pad(sounds, ((0, 0), (REACH // 2, REACH // 2), (0, 0)))
    seen = jnp.concatenate([padded[:, i : i + sounds.shape[1]] for i in range(REACH)], axis=2)
    for layer in params[:-1]:
        seen = jnp.tanh(seen @ layer["w"] + layer["b"])
    return seen @ params[-1]["w"] + params[-1]["b"]


def confirmed_trial(count: int, hidden: int, rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """As `trial`, tested by sixty voices of the seed's own. No `hidden` units: the window of `REACH` frames."""
    first = OWN_VOICES + 60 * seed
    made = exam(range(first, first + 60), count=600) if judged_on == "test" else exam(VALIDATION_VOICES)
    net, params = (hear, sequence.init(seed, hidden)) if hidden else (window_hear, window_init(seed))
    return tested(net, params, order(count, seed), rate, made)


def confirmed_plan(run: RunTrials) -> None:
    """Recurrent nets at the rate that the first record chose on validation voices; the window's is chosen here."""
    arms = [{"count": 2000, "hidden": 64}, {"count": 500, "hidden": 64}, {"count": 2000, "hidden": 16}]
    first = records.read("sequence_models_and_serving-scale")
    arms = [arm | {"rate": first.options("rate", judged_on="test", **arm)[0]} for arm in arms]
    run([arm | {"seed": seed, "judged_on": "test"} for seed in RESERVED_SEEDS for arm in arms])
    tune(run, RESERVED_SEEDS, count=2000, hidden=0)


CONFIRMED = Experiment(
    "sequence_models_and_serving-confirmed",
    "The recogniser after fewer utterances, with fewer units, and without recurrence, on seeds of their own",
    confirmed_trial, confirmed_plan, {"error": 1.0, "early": 0.02}, ("error",), {"hidden": 0, "judged_on": "test"},
    confirms=tuple(f"sequence_models_and_serving-{name}" for name in ("hears", "data", "size", "recurrence")),
)  # fmt: skip

# By the clock, in fresh processes: each number is the shortest of many runs, which a busy machine disturbs least


@jax.jit
def chain(h: Array, w: Array, steps: Array) -> Array:
    """`steps` small products, each of which needs the one before."""
    return lax.fori_loop(0, steps, lambda _, h: jnp.tanh(h @ w), h)


@jax.jit
def loop(rows: Array, w: Array) -> Array:
    """As many small products, of which none needs another, still one after the other."""
    return lax.map(lambda row: jnp.tanh(row @ w), rows)


@jax.jit
def product(rows: Array, w: Array) -> Array:
    """The same in one product."""
    return jax.vmap(lambda row: jnp.tanh(row @ w))(rows)


def shortest(times: int, *tasks: Callable[[], object]) -> list[float]:
    """The least seconds of each task, the tasks in turn; the first round compiles."""

    def once(task: Callable[[], object]) -> float:
        return timeit.timeit(lambda: jax.block_until_ready(task()), number=1)

    return np.min([[once(task) for task in tasks] for _ in range(times + 1)][1:], axis=0).tolist()


def clocked() -> dict[str, float]:
    """Logarithms of base 2 of seconds: 64 steps of 1,024 neurons in three ways; a weight of 48 MB and of 1 MB."""
    w, rows = jnp.full((1024, 1024), 1e-3), jnp.ones((64, 1024))
    large, small = (jnp.full((n, n), 1e-3) for n in (3520, 512))
    tasks = [lambda: chain(rows[0], w, 64), lambda: loop(rows, w), lambda: product(rows, w)]
    tasks += [lambda: chain(jnp.ones(3520), large, 2), lambda: chain(jnp.ones(512), small, 64)]
    found = np.array(shortest(30, *tasks)) / [1, 1, 1, 2 * large.size, 64 * small.size]
    return dict(zip(("chain", "loop", "product", "far", "near"), np.log2(found).tolist(), strict=True))


ONE_AT_A_TIME = threading.Lock()


def clock_trial(process: int, threads: int) -> dict[str, float]:
    """`clocked` in a fresh process, where JAX has so many threads; `process` is only its number."""
    code = f"import json; from {__name__} import {clocked.__name__} as f; print(json.dumps(f()))"
    given = os.environ | {"NPROC": str(threads)}  # the size of the pool of threads, by XLA's own variable
    with ONE_AT_A_TIME:
        done = subprocess.run([*processes.PYTHON, "-c", code], capture_output=True, text=True, check=True, env=given)
    return json.loads(done.stdout)


def clock_plan(run: RunTrials) -> None:
    """Five processes for each number of threads, in turn."""
    run([{"process": number, "threads": threads} for number in range(5) for threads in (1, 2, 4)])


CLOCK = Experiment(
    "sequence_models_and_serving-clock",
    "Steps that wait, a loop that need not, and one product, with 1, 2 and 4 threads; near and far weights",
    clock_trial, clock_plan, dict.fromkeys(("chain", "loop", "product", "far", "near"), 100.0),
)  # fmt: skip
