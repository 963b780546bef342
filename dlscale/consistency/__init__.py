"""Workers that need not agree: who has read which weights when, and what training makes of it.

`timeline` simulates who computes when, which weights each gradient has seen and when it is applied. `train` replays
exactly that order as a compiled program: learning depends on the order alone, time on the simulation alone, and neither
on the machine.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from dlscale.lab import checks
from dlscale.lab import train as training
from dlscale.lab.data import Dataset
from dlscale.lab.models import Model, Params
from dlscale.lab.train import History, Run

# What a policy exchanges with: the server, which serves one worker at a time; all others, who wait for each other; one
# other worker; nobody. In the first three all have the same weights, in the others each worker has its own.
SHARED = {"synchronous": "all", "stale-synchronous": "server", "asynchronous": "server"}
OWN = {"Downpour": "server", "elastic": "server", "averaging": "all", "gossip": "pair", "ensemble": "nobody"}
POLICIES = SHARED | OWN

LOSS = training.LOSSES["cross_entropy"]
FEWEST_VERSIONS = FEWEST_MATRICES = 64  # kept at least: timelines with few of them share a compiled program


class Wire(NamedTuple):
    """Seconds: the way to the server or back; for which it is busy with a worker; of an exchange of all, and of two."""

    latency: float = 0.0
    server: float = 0.0
    all: float = 0.0
    pair: float = 0.0


IDEAL = Wire()


class Timeline(NamedTuple):
    """What each gradient is, in the order in which they are applied: arrays (gradients,). Times are seconds."""

    policy: str
    workers: int
    worker: np.ndarray  # who computes it
    start: np.ndarray
    finish: np.ndarray
    applied: np.ndarray  # when the weights that it changes have it
    read: np.ndarray  # the updates that its weights have seen
    version: np.ndarray  # the updates that there are when it is applied
    unseen: np.ndarray  # gradients of other workers since its worker's last exchange
    update: np.ndarray  # whether an update is made then
    mixing: np.ndarray  # which matrix mixes the workers' weights then; 0: none
    matrices: np.ndarray  # (matrices, slots, slots): slots are the workers, then what a server keeps
    judged: np.ndarray  # (slots,) parts of the weights that are tested

    @property
    def staleness(self) -> np.ndarray:
        """Updates between the reading of the weights and their change."""
        return self.version - self.read


def durations(workers: int, steps: int, jitter: float = 0.2, slowest: float = 1.0, seed: int = 0) -> np.ndarray:
    """(workers, steps) seconds of a gradient: log-normal, mean 1, so much deviation; the last worker's times longer."""
    width = math.sqrt(math.log1p(checks.finite("jitter", jitter) ** 2))
    normal = np.random.default_rng(seed).normal(size=(checks.whole("workers", workers), checks.whole("steps", steps)))
    times = np.exp(width * normal - width**2 / 2)
    times[-1] *= checks.finite("slowest", slowest)
    return times


def timeline(
    policy: str,
    times: np.ndarray,
    gradients: int,
    *,
    bound: int = 0,
    every: int = 1,
    push: int | None = None,
    wire: Wire = IDEAL,
) -> Timeline:
    """Simulate so many gradients of workers whose k-th one takes times[worker, k] seconds (again from 0 at the end).

    - "synchronous": the mean of all workers' gradients, then all go on;
    - "stale-synchronous": none is more than `bound` gradients ahead of the slowest; "asynchronous": none waits;
    - "Downpour": own weights, `every` so many gradients replaced by the server's (n_fetch); what they have gained goes
      there each `push` gradients (n_push, else as often);
    - "elastic": `every` so many gradients, own weights and the server's are drawn to each other by 0.9 / workers of
      their difference;
    - "averaging": `every` so many gradients, all take the mean of all;
    - "gossip": after each gradient, the mean with a neighbour, in turn 1, 2, 4, … places ahead;
    - "ensemble": never.

    A single worker exchanges nothing. Raises ValueError for a policy that would wait for ever: an infinite time is that
    of a worker that is dead; for times below zero, and a bound below zero.
    """
    exchange = POLICIES[checks.known("policy", policy, POLICIES)]
    times = _times(times)
    workers = len(times)
    checks.whole("bound", bound, low=0)
    push = every if push is None or policy != "Downpour" else push
    for name, number in {"gradients": gradients, "every": every, "push": push}.items():
        checks.whole(name, number)
    if policy in SHARED and every > 1:
        raise ValueError(f"{policy!r} exchanges after every gradient: leave out every={every}.")
    for name, seconds in zip(wire._fields, wire, strict=True):
        checks.finite(name, seconds)
    mix = _Mixing(policy, workers)

    def may_start(worker: int) -> bool:
        if exchange == "all" and workers > 1:
            return done[worker] % every > 0 or min(done) >= done[worker]
        return policy != "stale-synchronous" or done[worker] - min(done) <= bound

    running = [(float(times[i, 0]), i) for i in range(workers)]
    heapq.heapify(running)
    begun, done, seen, own, waiting = [0.0] * workers, [0] * workers, [0] * workers, [0] * workers, []
    free, updates, rows = 0.0, 0, []
    while len(rows) < gradients:
        if not running or math.isinf(running[0][0]):
            dead = ", ".join(str(i) for i in range(workers) if np.isinf(times[i]).any())
            raise ValueError(f"{policy!r} waits for ever: worker {dead} never finishes a gradient.")
        finish, i = heapq.heappop(running)
        done[i] += 1
        pushes, fetches = (workers > 1 and done[i] % often == 0 for often in (push, every))
        meets, now = pushes or fetches, finish
        together = fetches and exchange == "all" and min(done) >= done[i]
        if meets and exchange == "server":
            now = free = max(finish + wire.latency, free) + wire.server
        elif meets:
            now += wire.pair * (exchange == "pair") + wire.all * together
        update = policy != "synchronous" or workers == 1 or together
        mixing = mix.after(i, done[i], pushes, fetches) if meets and (exchange != "all" or together) else 0
        rows.append((i, begun[i], finish, now, seen[i], updates, updates - seen[i] - own[i], update, mixing))
        updates += update
        own[i] += 1
        waiting.append(i)
        for j in [j for j in waiting if may_start(j)]:
            waiting.remove(j)
            begun[j] = now + wire.latency * (meets and exchange == "server")
            heapq.heappush(running, (begun[j] + float(times[j, done[j] % times.shape[1]]), j))
            if policy in SHARED or (exchange != "nobody" and workers > 1 and done[j] % every == 0):
                seen[j], own[j] = updates, 0
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Timeline(policy, workers, *columns, mix.stacked(), mix.judged())


def _times(times: np.ndarray) -> np.ndarray:
    times = np.asarray(times, float)
    times = times[:, None] if times.ndim == 1 else times
    if times.ndim != 2 or not times.size:
        raise ValueError(f"times must be (workers,) or (workers, steps) seconds, not of shape {times.shape}.")
    if np.isnan(times).any() or (times < 0).any():
        raise ValueError("times must be seconds of at least 0; an infinite one is that of a dead worker.")
    return times


class _Mixing:
    """The matrices that mix the slots: workers first, a server's weights, and what each worker has already pushed."""

    def __init__(self, policy: str, workers: int) -> None:
        self.policy, self.workers = policy, workers
        self.slots = 2 * workers + 1 if policy == "Downpour" else workers + 1
        self.numbers: dict[tuple, int] = {}
        self.matrices = [np.eye(self.slots)]

    def after(self, i: int, step: int, pushes: bool, fetches: bool) -> int:
        """The number of the matrix after a worker's step."""
        if self.policy in SHARED or self.policy == "ensemble":
            return 0
        j = (i + 2 ** ((step - 1) % (self.workers - 1).bit_length())) % self.workers
        keys = {"gossip": (min(i, j), max(i, j)), "averaging": ()}
        key = keys.get(self.policy, (i, pushes, fetches))
        if key not in self.numbers:
            self.numbers[key] = len(self.matrices)
            self.matrices.append(self.matrix(*key))
        return self.numbers[key]

    def matrix(self, *key: Any) -> np.ndarray:
        new, old, centre, a = np.eye(self.slots), np.eye(self.slots), self.workers, 0.9 / self.workers
        if self.policy == "averaging":
            new[:centre] = old[:centre].mean(0)
        elif self.policy == "gossip":
            new[list(key)] = old[list(key)].mean(0)
        elif self.policy == "Downpour":
            i, pushes, fetches = key
            pushed = self.workers + 1 + i
            if pushes:
                new[centre], new[pushed] = old[centre] + old[i] - old[pushed], old[i]
            if fetches:  # what is not yet pushed is kept apart: own weights less what was pushed
                new[pushed], new[i] = new[centre] - (new[i] - new[pushed]), new[centre]
        else:
            i = key[0]
            new[i] += a * (old[centre] - old[i])
            new[centre] += a * (old[i] - old[centre])
        return new

    def stacked(self) -> np.ndarray:
        count = -(-len(self.matrices) // FEWEST_MATRICES) * FEWEST_MATRICES
        padded = [*self.matrices, *[self.matrices[0]] * (count - len(self.matrices))]
        return np.array(padded, np.float32)

    def judged(self) -> np.ndarray:
        parts, centre = np.zeros(self.slots, np.float32), self.workers
        if self.workers > 1 and self.policy in ("Downpour", "elastic"):
            parts[centre] = 1
        else:
            parts[:centre] = 1 / self.workers
        return parts


# Replay


def train(
    timeline: Timeline,
    model: Model,
    dataset: Dataset,
    *,
    batch_size: int,
    learning_rate: float,
    momentum: float = 0.0,
    scales: np.ndarray | None = None,
    seed: int = 0,
    every: int | None = None,
    averaged: int = 1,
) -> Run:
    """Train `model` with the gradients of a timeline, in its order; the k-th is of the k-th batch of `train.fit`.

    Tested each `every` gradients (else at the end): the server's weights, the mean of the workers' where there is none,
    and of an ensemble the mean of their predictions. The weights that are tested and returned are the mean of those
    after each of the last `averaged` gradients, for every policy alike. `scales` (gradients,) multiply the learning
    rate; `momentum` is the server's. Without staleness this is `train.fit`, bit for bit (with momentum up to rounding),
    and so is a single worker of any policy. A run that diverges goes on to its end: see `Run.diverged_at`. Timelines
    with equally many gradients, workers and kept versions share a compiled program.
    """
    count, gradients = len(dataset.x_train), len(timeline.worker)
    each = count // checks.whole("batch_size", batch_size, high=count)
    rate, momentum = (np.float32(checks.finite(*named)) for named in (("rate", learning_rate), ("momentum", momentum)))
    order = np.asarray(_orders(np.uint32(checks.whole("seed", seed, low=0)), count, -(-gradients // each)))
    events: dict[str, np.ndarray] = {"rows": order[:, : each * batch_size].reshape(-1, batch_size)[:gradients]}
    ensemble = timeline.policy == "ensemble" and timeline.workers > 1
    first = np.asarray(_draw(model, np.uint32(seed), timeline.workers if ensemble else 1))
    examples, tests = jax.device_put(((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)))
    every = gradients if every is None else checks.whole("every", every, high=gradients)
    checks.whole("averaged", averaged, high=every)
    if averaged > 1 and gradients % every:
        raise ValueError(f"With averaged weights, every must divide the {gradients} gradients, and {every} does not.")
    # of the sum of the weights: it starts again where the last ones before a look begin
    events["kept"] = (np.arange(gradients) % every != every - averaged) & (averaged > 1)
    if timeline.policy in SHARED:
        kept = -(-(timeline.staleness.max() + 2) // FEWEST_VERSIONS) * FEWEST_VERSIONS
        share = 1 / timeline.workers if timeline.policy == "synchronous" else 1.0
        events |= {"update": timeline.update, "read_next": np.roll(timeline.read, -1) % kept}
        events |= {"next": (timeline.version + timeline.update) % kept}
        events |= {"share": np.float32(share) * np.ones(gradients, np.float32) if scales is None else share * scales}
        ring = np.repeat(first, kept, 0)
        state = (np.zeros_like(first), first[0], first[0], ring, *np.zeros_like(ring[:2]))
        step, given = _shared(model), (rate, momentum)
    else:
        if momentum or scales is not None:
            raise ValueError(f"{timeline.policy!r} has no momentum and no scales: each worker has its own weights.")
        events |= {"worker": timeline.worker, "next": np.roll(timeline.worker, -1), "mixing": timeline.mixing}
        slots = np.repeat(first[:1], len(timeline.judged), 0)
        slots[: len(first)] = first
        parts = np.eye(*slots.shape[:1], dtype=np.float32)[: len(first)] if ensemble else timeline.judged[None]
        step, given = _own(model, timeline.policy == "gossip"), (rate, timeline.matrices, parts)
        state = (np.zeros((len(parts), first.shape[1]), np.float32), slots[timeline.worker[0]], slots, slots.copy())
    kinds = {"share": np.float32, "kept": np.float32, "update": bool}
    events = {name: np.asarray(a, kinds.get(name, np.int32)) for name, a in events.items()}
    look = lambda state: _test(model, state[0] / averaged, *tests)  # noqa: E731
    given = (*given, *examples)
    state, noted, looks = training.run(step, state, events, *given, look=look, every=every, progress=False)
    found = [_unravel(model)(row) for row in np.asarray(state[0]) / np.float32(averaged)]
    params = jax.tree.map(lambda *leaves: np.stack(leaves), *found) if ensemble else found[0]
    return Run(params, History(*noted, *looks))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _orders(seed: Array, count: int, epochs: int) -> Array:
    """(epochs, count) the order of the examples that `train.fit` takes."""
    key = jax.random.fold_in(jax.random.key(seed), 1)
    return jax.vmap(lambda number: training._permutation(jax.random.fold_in(key, number), count))(jnp.arange(epochs))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _draw(model: Model, seed: Array, count: int) -> Array:
    """(count, numbers) initial weights; the first are those of `train.fit`."""
    key = jax.random.fold_in(jax.random.key(seed), 0)
    keys = [key, *(jax.random.fold_in(key, number) for number in range(1, count))]
    return jnp.stack([ravel_pytree(model.init(key))[0] for key in keys])


@functools.cache
def _unravel(model: Model) -> Callable[[Array], Params]:
    """The parameters whose numbers these are."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return ravel_pytree(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))[1]


@functools.cache
def _gradient(model: Model) -> Callable[..., tuple]:
    """((loss, accuracy), gradient) of a batch, of flat weights."""
    unravel = _unravel(model)

    def batch_loss(params: Params, x: Array, y: Array) -> tuple[Array, Array]:
        logits = model.apply(params, x)
        return LOSS(logits, y).mean(), (logits.argmax(-1) == y).mean()

    def gradient(flat: Array, x: Array, y: Array) -> tuple:
        noted, found = jax.value_and_grad(batch_loss, has_aux=True)(unravel(flat), x, y)
        return noted, ravel_pytree(found)[0]

    return gradient


@functools.cache  # one function, so that what was compiled for it is found again
def _shared(model: Model) -> Callable[..., tuple]:
    """A gradient where all share the weights: the last versions are kept, each in its place of a ring."""
    gradient = _gradient(model)

    def step(state: tuple, event: dict[str, Array], rate: Array, momentum: Array, x: Array, y: Array) -> tuple:
        summed, weights, old, ring, total, velocity = state
        noted, found = gradient(old, x[event["rows"]], y[event["rows"]])
        total, update = total + event["share"] * found, event["update"]
        faster = momentum * velocity + total
        weights = jnp.where(update, weights - rate * faster, weights)
        total, velocity = jnp.where(update, 0.0, total), jnp.where(update, faster, velocity)
        # written first, then read for the next gradient: the other way round, XLA copies the ring at every step
        ring = lax.dynamic_update_index_in_dim(ring, weights, event["next"], 0)
        summed = event["kept"] * summed + weights
        return (summed, weights, ring[event["read_next"]], ring, total, velocity), noted

    return step


@functools.cache
def _own(model: Model, in_between: bool) -> Callable[..., tuple]:
    """A gradient where each has weights of its own; with `in_between`, others change them while it is computed."""
    gradient = _gradient(model)

    def step(
        state: tuple, event: dict[str, Array], rate: Array, matrices: Array, parts: Array, x: Array, y: Array
    ) -> tuple:
        summed, old, slots, read = state
        i, mixing = event["worker"], event["mixing"]
        noted, found = gradient(old, x[event["rows"]], y[event["rows"]])
        slots = slots.at[i].add(-rate * found)
        slots = lax.cond(mixing > 0, lambda: matrices[mixing] @ slots, lambda: slots)
        read = read.at[i].set(slots[i]) if in_between else read
        summed = event["kept"] * summed + parts @ slots
        return (summed, (read if in_between else slots)[event["next"]], slots, read), noted

    return step


@functools.partial(jax.jit, static_argnums=0)
def _test(model: Model, weights: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Loss and accuracy of the members' mean prediction."""
    unravel = _unravel(model)
    if len(weights) == 1:
        return training.evaluate(model, unravel(weights[0]), x, y, LOSS)
    chances = jax.vmap(lambda flat: jax.nn.softmax(model.apply(unravel(flat), x)))(weights).mean(0)
    return LOSS(jnp.log(chances), y).mean(), (chances.argmax(-1) == y).mean()
