"""What notebook 13 trains on, sounds made from formants; its training; its record: more to learn from, a larger net.

Recorded: the recogniser with fewer or more utterances to learn from, and with a small or a larger net, each at its best
learning rate.
"""

import functools
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from scipy import signal

from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import checks, train
from dlscale.sequence_models_and_serving import sequence
from dlscale.sequence_models_and_serving.sequence import HERTZ, LONGEST, MOST_SYMBOLS, SYMBOLS

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


def heard(made: Utterances, piece: int = 100) -> Utterances:
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


def _rate(count: Array) -> Array:
    """The factor on the learning rate: up in a line, then down as a cosine."""
    down = (1 + jnp.cos(jnp.pi * jnp.clip((count - WARM_UP) / (STEPS - WARM_UP), 0, 1))) / 2
    return jnp.minimum(1, (count + 1) / WARM_UP) * down


OPTIMIZER = optax.chain(optax.clip_by_global_norm(CLIP), optax.scale_by_adam(), optax.scale_by_schedule(_rate))


def step(state: tuple[Any, Any], rows: Array, rate: Array, made: Utterances) -> tuple[tuple[Any, Any], Array]:
    """One step of Adam on the mean CTC loss for each symbol; its record is that loss."""
    params, memory = state
    sounds, frames, labels, counts = (a[rows] for a in made)

    def loss(params: Any) -> Array:
        return sequence.ctc_loss(sequence.hear(params, sounds, frames), frames, labels, counts).sum() / counts.sum()

    value, gradient = jax.value_and_grad(loss)(params)
    updates, memory = OPTIMIZER.update(gradient, memory)
    return (jax.tree.map(lambda p, u: p - rate * u, params, updates), memory), value


@functools.partial(jax.jit, static_argnums=1)
def start(seed: Array, hidden: int) -> tuple[Any, Any]:
    """Parameters and the optimizer's memory before the first step."""
    params = sequence.init(jax.random.key(seed), hidden)
    return params, OPTIMIZER.init(params)


def order(count: int, seed: int) -> np.ndarray:
    """(steps, batch) rows: all of the lessons in a new order, again and again."""
    rng = np.random.default_rng([seed, 6])
    whole = [rng.permutation(count) for _ in range(-(-STEPS * BATCH // count))]
    return np.concatenate(whole)[: STEPS * BATCH].reshape(STEPS, BATCH)


def learn(count: int, hidden: int, rate: float, seed: int, **options: Any) -> train.Driven:
    """Train on the first `count` lessons; `options` are those of `train.run`."""
    return train.run(step, start(np.uint32(seed), hidden), order(count, seed), np.float32(rate), lessons(), **options)


hear = jax.jit(sequence.hear)


def wrong(params: Any, made: Utterances) -> np.ndarray:
    """(utterances, 2) symbols to put in, take out or change in what the best path says, and symbols said."""
    paths = np.asarray(hear(params, made.sounds, made.frames)).argmax(2)
    found = (sequence.collapse(path[:n]) for path, n in zip(paths, made.frames, strict=True))
    said = (row[:n].tolist() for row, n in zip(made.labels, made.counts, strict=True))
    return np.array([(sequence.edits(a, b), len(b)) for a, b in zip(found, said, strict=True)])


def rates_of_voices(params: Any, made: Utterances) -> np.ndarray:
    """(voices,) the percentage of symbols that are wrong, of each of the twelve voices of an exam."""
    found = wrong(params, made)
    return np.array([100 * part[:, 0].sum() / part[:, 1].sum() for part in (found[i::12] for i in range(12))])


# The record

COUNTS, RATES = (125, 500, 2000), (0.003, 0.01, 0.03, 0.1)
TUNING_SEEDS, TEST_SEEDS = range(100, 102), range(10, 16)


def trial(count: int, hidden: int, rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """The percentage of wrong symbols after training, 100 at most, and the loss of step 10."""
    driven = learn(count, hidden, rate, seed, progress=False)
    found = wrong(driven.state[0], exam(judged_on)).sum(0)
    return {"error": min(100.0, 100 * found[0] / found[1]), "early": driven.records[9]}


ARMS = [{"count": 2000, "hidden": 16}, *({"count": count, "hidden": 64} for count in COUNTS)]


def plan(run: RunTrials) -> None:
    """Each arm's rate is chosen on other voices, strings and seeds than it is then judged on."""
    for arm in ARMS:
        tuning = [arm | {"rate": r, "seed": s, "judged_on": "validation"} for r in RATES for s in TUNING_SEEDS]
        found = np.array([m["error"] for m in run(tuning)]).reshape(len(RATES), -1).mean(1)
        best = min(zip(found, RATES, strict=True), key=itemgetter(0))[1]
        run([arm | {"rate": best, "seed": s, "judged_on": "test"} for s in TEST_SEEDS])


SCALE = Experiment(
    id="sequence_models_and_serving-scale",
    about="The recogniser's error against the number of lessons and the size of the net (four arms, four rates)",
    trial=trial,
    plan=plan,
    tolerance={"error": 1.0, "early": 0.02},
    chaotic=("error",),
    drawn={"hidden": 64, "count": 2000, "judged_on": "test"},
)

# The control: a net without recurrence, which sees five frames at a time

REACH, WINDOW_UNITS = 5, 128


@functools.partial(jax.jit, static_argnums=1)
def window_start(seed: Array, reach: int = REACH) -> tuple[Any, Any]:
    """As `start`, of two dense layers over `reach` frames."""
    into, out = jax.random.split(jax.random.key(seed))
    inputs = reach * sequence.BANDS
    params = {
        "u": jax.random.normal(into, (inputs, WINDOW_UNITS)) / inputs**0.5,
        "v": jax.random.normal(out, (WINDOW_UNITS, sequence.CLASSES)) / WINDOW_UNITS**0.5,
    }
    return params, OPTIMIZER.init(params)


@jax.jit
def window_hear(params: Any, sounds: Array, frames: Array) -> Array:
    """Logits, each from the frames around it: nothing waits."""
    reach = params["u"].shape[0] // sequence.BANDS
    padded = jnp.pad(sounds, ((0, 0), (reach // 2, reach // 2), (0, 0)))
    pieces = [padded[:, i : i + sounds.shape[1]] for i in range(reach)]
    return jnp.tanh(jnp.concatenate(pieces, axis=2) @ params["u"]) @ params["v"]


def window_step(state: tuple[Any, Any], rows: Array, rate: Array, made: Utterances) -> tuple[tuple[Any, Any], Array]:
    """As `step`."""
    params, memory = state
    sounds, frames, labels, counts = (a[rows] for a in made)

    def loss(params: Any) -> Array:
        return sequence.ctc_loss(window_hear(params, sounds, frames), frames, labels, counts).sum() / counts.sum()

    value, gradient = jax.value_and_grad(loss)(params)
    updates, memory = OPTIMIZER.update(gradient, memory)
    return (jax.tree.map(lambda p, u: p - rate * u, params, updates), memory), value


def window_trial(reach: int, rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """As `trial`, after 2,000 lessons."""
    begin, made = window_start(np.uint32(seed), reach), exam(judged_on)
    driven = train.run(window_step, begin, order(2000, seed), np.float32(rate), lessons(), progress=False)
    paths = np.asarray(window_hear(driven.state[0], made.sounds, made.frames)).argmax(2)
    pairs = [
        (sequence.collapse(path[:n]), row[:m].tolist())
        for path, n, row, m in zip(paths, made.frames, made.labels, made.counts, strict=True)
    ]
    wrong_ones = sum(sequence.edits(*pair) for pair in pairs)
    return {"error": min(100.0, 100 * wrong_ones / made.counts.sum()), "early": driven.records[9]}


def window_plan(run: RunTrials) -> None:
    """As `plan`, for windows of one frame and of five."""
    for reach in (REACH, 1):
        tuning = [
            {"reach": reach, "rate": r, "seed": s, "judged_on": "validation"} for r in RATES for s in TUNING_SEEDS
        ]
        found = np.array([m["error"] for m in run(tuning)]).reshape(len(RATES), -1).mean(1)
        best = min(zip(found, RATES, strict=True), key=itemgetter(0))[1]
        run([{"reach": reach, "rate": best, "seed": s, "judged_on": "test"} for s in TEST_SEEDS])


CONTROL = Experiment(
    id="sequence_models_and_serving-window",
    about="A recogniser without recurrence: one frame or five at a time, four rates",
    trial=window_trial,
    plan=window_plan,
    tolerance={"error": 1.0, "early": 0.02},
    chaotic=("error",),
    drawn={"reach": 5, "judged_on": "test"},
)
