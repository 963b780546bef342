"""Sequences: a recurrent net over sounds that are made here, and connectionist temporal classification (CTC).

A batch has arrays padded at their ends: of each example so many frames count, so many labels. Label 0 is the blank.
"""

import functools
import io
import itertools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dlscale.lab import checks
from dlscale.lab.models import Params

# Connectionist temporal classification (Graves, Fernández, Gomez & Schmidhuber 2006)

NEVER = -1e30  # the logarithm of 0, but finite: differences of two of them make no NaN


def collapse(path: Sequence[int]) -> list[int]:
    """The labels that a path of one label a frame stands for: repetitions are one, blanks are none."""
    return [int(label) for label, _ in itertools.groupby(path) if label]


def extended(labels: Array) -> Array:
    """(batch, 2 × longest + 1) the states of the lattice: the labels with a blank before, between and after them."""
    labels = jnp.asarray(labels)
    return jnp.zeros((len(labels), 2 * labels.shape[1] + 1), labels.dtype).at[:, 1::2].set(labels)


def forward_backward(logits: Array, frames: Array, labels: Array, counts: Array) -> tuple[Array, Array]:
    """Sum over all paths of logits (batch, frames, classes), in one scan over time for the whole batch.

    Returns (batch,) -log p of the labels, infinite where no path fits, and (batch, frames, states) the probability of
    each state at each frame, given them.

    The way back is the way forward through the mirrored example, so both go side by side. Sums are in logarithms, and
    begin anew at each frame, which keeps the digits that sums over hundreds of frames would lose.
    """
    if not logits.shape[1]:
        raise ValueError(f"CTC needs at least one frame; logits (batch, frames, classes) has the shape {logits.shape}.")
    log_p, batch = jax.nn.log_softmax(logits), len(logits)
    both = [jnp.concatenate([a, _mirrored(a, n)]) for a, n in ((log_p, frames), (labels, counts))]
    found, totals = _forward(both[0], jnp.tile(frames, 2), both[1], jnp.tile(counts, 2))
    here, back = found[:batch], _mirrored(found[batch:], frames)
    back = _mirrored(back.swapaxes(1, 2), 2 * counts + 1).swapaxes(1, 2)
    emitted = jnp.take_along_axis(log_p, extended(labels)[:, None], axis=2)  # counted on both ways
    total = totals[:batch]
    return jnp.where(total <= NEVER / 2, jnp.inf, -total), jax.nn.softmax(here + back - emitted)


def _mirrored(x: Array, lengths: Array) -> Array:
    """Each x[i, : lengths[i]] backwards; what is behind stays."""
    place = jnp.arange(x.shape[1])
    place = jnp.where(place < lengths[:, None], lengths[:, None] - 1 - place, place)
    return jnp.take_along_axis(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), axis=1)


def _forward(log_p: Array, frames: Array, labels: Array, counts: Array) -> tuple[Array, Array]:
    """Logarithms of the sums over beginnings of paths, at each frame up to a constant, and of the sum over paths."""
    states = extended(labels)
    number = jnp.arange(states.shape[1])
    inside = number <= 2 * counts[:, None]
    jump = jnp.pad((states[:, 2:] != states[:, :-2]) & (states[:, 2:] != 0), ((0, 0), (2, 0)))[:, : len(number)]
    emitted = jnp.where(inside[:, None], jnp.take_along_axis(log_p, states[:, None], axis=2), NEVER)

    def later(alpha: Array, by: int) -> Array:
        return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=NEVER)[:, :-by]

    def step(carry: tuple[Array, Array], frame: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
        alpha, total = carry
        now, t = frame
        ways = jnp.stack([alpha, later(alpha, 1), jnp.where(jump, later(alpha, 2), NEVER)])
        most = ways.max(0)
        new = jnp.maximum(most + jnp.log(jnp.exp(ways - most).sum(0)) + now, NEVER)
        scale = new.max(1)
        goes_on = t < frames
        alpha = jnp.where(goes_on[:, None], jnp.maximum(new - scale[:, None], NEVER), alpha)
        return (alpha, total + jnp.where(goes_on, scale, 0)), alpha

    start = jnp.where(number == 0, 0.0, NEVER) * jnp.ones_like(emitted[:, 0]), jnp.zeros(len(log_p), log_p.dtype)
    (alpha, total), found = lax.scan(step, start, (emitted.swapaxes(0, 1), jnp.arange(log_p.shape[1])))
    ends = (number == 2 * counts[:, None]) | (number == 2 * counts[:, None] - 1)  # the last blank or the last label
    return found.swapaxes(0, 1), total + jax.nn.logsumexp(jnp.where(ends, alpha, NEVER), axis=1)


@jax.custom_vjp
def ctc_loss(logits: Array, frames: Array, labels: Array, counts: Array) -> Array:
    """(batch,) -log p(labels | logits (batch, frames, classes)). The gradient is softmax minus each class's share.

    Infinite, with gradient 0, where no path fits: too few frames, since a blank must stand between equal labels. NaN,
    with its gradient, where a logit is.
    """
    return forward_backward(logits, frames, labels, counts)[0]


def _ctc_forward(logits: Array, frames: Array, labels: Array, counts: Array) -> tuple[Array, Array]:
    loss, states = forward_backward(logits, frames, labels, counts)
    states_of = jax.nn.one_hot(extended(labels), logits.shape[2], dtype=states.dtype)
    gradient = jax.nn.softmax(logits) - jnp.einsum("bts,bsk->btk", states, states_of)
    counted = (jnp.arange(logits.shape[1]) < frames[:, None]) & ~jnp.isposinf(loss)[:, None]
    return loss, jnp.where(counted[:, :, None], gradient, 0)


ctc_loss.defvjp(_ctc_forward, lambda gradient, given: (given[:, None, None] * gradient, None, None, None))


def edits(heard: Sequence, said: Sequence) -> int:
    """The fewest symbols to put in, take out or change that make one of the other (Levenshtein 1966)."""
    row = list(range(len(said) + 1))
    for i, a in enumerate(heard, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(said, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


# Sounds

SYMBOLS = "aeious"  # label 1 is "a"
CLASSES = len(SYMBOLS) + 1
HERTZ, LONGEST, MOST_SYMBOLS = 8000, 9376, 7  # samples a second, samples and symbols of an utterance
WINDOW, HOP, BANDS = 256, 160, 28  # samples of a frame, from one to the next; numbers for each
FRAMES = 1 + (LONGEST - WINDOW) // HOP


def spectrogram(sounds: Array) -> Array:
    """(batch, FRAMES, BANDS) logarithms of the power in each band of sounds (batch, LONGEST), less their mean."""
    if sounds.shape[1] != LONGEST:
        raise ValueError(f"Pad sounds to {LONGEST} samples: their shape is {sounds.shape}.")
    places = HOP * np.arange(FRAMES)[:, None] + np.arange(WINDOW)
    pieces = sounds.astype(jnp.float32)[:, places] * np.hanning(WINDOW).astype(np.float32)
    power = jnp.abs(jnp.fft.rfft(pieces)) ** 2 @ _bands()
    logs = jnp.log(power + 1.0)
    sounding = power.sum(2, keepdims=True) != 0
    mean = jnp.where(sounding, logs, 0).sum((1, 2), keepdims=True) / BANDS
    mean = mean / jnp.maximum(1, sounding.sum(1, keepdims=True))
    return jnp.where(sounding, logs - mean, 0) / 3


@functools.cache
def _bands() -> np.ndarray:
    """(WINDOW / 2 + 1, BANDS) triangles, evenly spaced on the mel scale of pitch (O'Shaughnessy 1987)."""
    mel = np.linspace(0, 1127 * np.log1p(HERTZ / 2 / 700), BANDS + 2)
    hertz = 700 * np.expm1(mel / 1127)
    at = np.linspace(0, HERTZ / 2, WINDOW // 2 + 1)[:, None]
    low, middle, high = hertz[:-2], hertz[1:-1], hertz[2:]
    return np.clip(np.minimum((at - low) / (middle - low), (high - at) / (high - middle)), 0, None).astype(np.float32)


def length_in_frames(samples: int) -> int:
    """Frames that begin and end within so many samples, at least one."""
    return max(1, 1 + (samples - WINDOW) // HOP)


def spelled(labels: Sequence[int]) -> str:
    """Labels as a string."""
    return "".join(SYMBOLS[label - 1] for label in labels)


# A net that hears


def init(seed: int, hidden: int = 64) -> Params:
    """Parameters of gated recurrent units (Cho et al. 2014) in both directions of time, and a dense layer."""
    checks.whole("hidden", hidden)
    rng = np.random.default_rng([seed, 7])
    along = [np.linalg.qr(rng.normal(size=(2, hidden, hidden)))[0] for _gate in range(3)]
    first, last = rng.normal(size=(2, BANDS, 3 * hidden)), rng.normal(size=(2 * hidden, CLASSES))
    params = {
        "input": {"w": first / BANDS**0.5, "b": np.zeros((2, 1, 1, 3 * hidden))},
        "recurrent": {"w": np.concatenate(along, axis=2)},
        "output": {"w": last / hidden**0.5 / 4, "b": np.zeros(CLASSES)},
    }
    return jax.tree.map(np.float32, params)


def hear(params: Params, heard: Array, frames: Array) -> Array:
    """(batch, frames, classes) logits from what `spectrogram` gives. Both directions go side by side, in one scan."""
    both = jnp.stack([heard, _mirrored(heard, frames)])
    inputs = jnp.einsum("dbtf,dfg->dbtg", both, params["input"]["w"]) + params["input"]["b"]  # all steps in one product

    def step(h: Array, x: Array) -> tuple[Array, Array]:
        (xz, xr, xn), (hz, hr, hn) = jnp.split(x, 3, axis=2), jnp.split(h @ params["recurrent"]["w"], 3, axis=2)
        z, r = jax.nn.sigmoid(xz + hz), jax.nn.sigmoid(xr + hr)
        h = (1 - z) * jnp.tanh(xn + r * hn) + z * h
        return h, h

    hidden = params["recurrent"]["w"].shape[1]
    _, states = lax.scan(step, jnp.zeros((2, len(heard), hidden)), jnp.moveaxis(inputs, 2, 0))
    states = jnp.moveaxis(states, 0, 2)
    states = jnp.concatenate([states[0], _mirrored(states[1], frames)], axis=2)
    return states @ params["output"]["w"] + params["output"]["b"]


def save(path: Path, params: Params) -> None:
    """Write the parameters to a file that `load` reads."""
    with path.open("wb") as file:
        np.savez(file, *jax.tree.leaves(params))


def load(path: Path) -> Params:
    """The parameters in a file. Raises ValueError if it is damaged or of another net, OSError if it cannot be read."""
    content = io.BytesIO(path.read_bytes())
    try:
        with np.load(content, allow_pickle=False) as file:
            stored = [*file.values()]
        params = init(0, stored[-1].shape[1])
    except Exception as error:  # a damaged zip raises whatever it likes
        raise ValueError(f"{path.name} is damaged, or no recogniser: {error}") from None
    wanted = [a.shape for a in jax.tree.leaves(params)]
    if [a.shape for a in stored] != wanted or not all(np.isfinite(a).all() for a in stored):
        raise ValueError(f"{path.name} is of another net: it must hold finite numbers of shapes {wanted}.")
    return jax.tree.unflatten(jax.tree.structure(params), stored)
