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
from typing import NamedTuple

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
FEWEST_VERSIONS = FEWEST_MATRICES = 128  # kept at least: timelines with few of them share a compiled program


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
    policy: str, times: np.ndarray, gradients: int, *,
    bound: int = 0, every: int = 1, push: int | None = None, pull: float = 0.9, wire: Wire = IDEAL,
) -> Timeline:  # fmt: skip
    """Simulate so many gradients of workers whose k-th one takes times[worker, k] seconds (again from 0 at the end).

    - "synchronous": the mean of all workers' gradients, then all go on;
    - "stale-synchronous": none is more than `bound` gradients ahead of the slowest; "asynchronous": none waits;
    - "Downpour": own weights, `every` so many gradients replaced by the server's (n_fetch); what they have gained goes
      there each `push` gradients (n_push, else as often);
    - "elastic": `every` so many gradients, own weights and the server's are drawn to each other by `pull` / workers
      of their difference;
    - "averaging": `every` so many gradients, all take the mean of all;
    - "gossip": after each gradient, the mean with a neighbour, in turn 1, 2, 4, … places ahead;
    - "ensemble": never.

    A single worker exchanges nothing. Raises ValueError for a policy that would wait for ever: an infinite time is that
    of a worker that is dead; for times, a bound or a pull below zero.
    """
    exchange = POLICIES[checks.known("policy", policy, POLICIES)]
    times = np.asarray(times, float)
    times = times[:, None] if times.ndim == 1 else times
    if not (times >= 0).all():
        raise ValueError("times must be seconds of at least 0; an infinite one is that of a dead worker.")
    workers = len(times)
    checks.whole("bound", bound, low=0), checks.finite("pull", pull)
    push = every if push is None or policy != "Downpour" else push
    for name, number in {"gradients": gradients, "every": every, "push": push}.items():
        checks.whole(name, number)
    if policy in SHARED and every > 1:
        raise ValueError(f"{policy!r} exchanges after every gradient: leave out every={every}.")
    slots = 2 * workers + 1 if policy == "Downpour" else workers + 1
    turns = max((workers - 1).bit_length(), 1)  # of gossip
    numbers = {np.eye(slots).tobytes(): 0}  # of each mixing matrix

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
        mixing = 0
        if policy in OWN and meets and (exchange != "all" or together):
            matrix = _mixed(policy, workers, slots, i, (done[i] - 1) % turns, pushes, fetches, pull)
            mixing = numbers.setdefault(matrix.tobytes(), len(numbers))
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
    kept = -(-len(numbers) // FEWEST_MATRICES) * FEWEST_MATRICES
    matrices = np.tile(np.eye(slots, dtype=np.float32), (kept, 1, 1))
    matrices[: len(numbers)] = np.frombuffer(b"".join(numbers)).reshape(-1, slots, slots)
    server = policy in OWN and exchange == "server" and workers > 1
    judged = np.eye(slots)[workers] if server else np.eye(slots)[:workers].mean(0)
    return Timeline(policy, workers, *columns, matrices, judged.astype(np.float32))


@functools.cache
def _mixed(
    policy: str, workers: int, slots: int, i: int, turn: int, pushes: bool, fetches: bool, pull: float
) -> np.ndarray:
    """The matrix that mixes the slots after a worker's step: workers, a server, and what each has already pushed."""
    new, old, centre, a = np.eye(slots), np.eye(slots), workers, pull / workers
    if policy == "averaging":
        new[:centre] = old[:centre].mean(0)
    elif policy == "gossip":
        j = (i + 2**turn) % workers
        new[[i, j]] = (old[i] + old[j]) / 2
    elif policy == "elastic":
        new[i] += a * (old[centre] - old[i])
        new[centre] += a * (old[i] - old[centre])
    elif policy == "Downpour":
        pushed = workers + 1 + i
        if pushes:
            new[centre], new[pushed] = old[centre] + old[i] - old[pushed], old[i]
        if fetches:  # what is not yet pushed is kept apart: own weights less what was pushed
            new[pushed], new[i] = new[centre] - (new[i] - new[pushed]), new[centre]
    return new


# Replay


def train(
    timeline: Timeline, model: Model, dataset: Dataset, *,
    batch_size: int, learning_rate: float, seed: int = 0, every: int | None = None, averaged: int = 1,
) -> Run:  # fmt: skip
    """Train `model` with the gradients of a timeline, in its order; the k-th is of the k-th batch of `train.fit`.

    Tested each `every` gradients (else at the end): the server's weights, the mean of the workers' where there is none,
    and of an ensemble the mean of their predictions. The weights that are tested and returned are the mean of those
    after each of the last `averaged` gradients, for every policy alike. Without staleness this is `train.fit`, bit for
    bit, and so is a single worker of any policy. A run that diverges goes on to its end: see `Run.diverged_at`.
    Timelines with equally many gradients, workers and kept versions share a compiled program.
    """
    count, gradients = len(dataset.x_train), len(timeline.worker)
    each = count // checks.whole("batch_size", batch_size, high=count)
    rate = np.float32(checks.finite("rate", learning_rate))
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
        share = 1 / timeline.workers if timeline.policy == "synchronous" else 1
        events |= {"update": timeline.update, "read_next": np.roll(timeline.read, -1) % kept}
        events |= {"next": (timeline.version + timeline.update) % kept, "share": np.full(gradients, share)}
        ring = np.repeat(first, kept, 0)
        state = (np.zeros_like(first), first[0], first[0], ring, np.zeros_like(first[0]))
        step, given = _shared(model), (rate,)
    else:
        events |= {"worker": timeline.worker, "next": np.roll(timeline.worker, -1), "mixing": timeline.mixing}
        slots = np.repeat(first[:1], len(timeline.judged), 0)
        slots[: len(first)] = first
        parts = np.eye(*slots.shape[:1], dtype=np.float32)[: len(first)] if ensemble else timeline.judged[None]
        step, given = _own(model), (rate, timeline.matrices, parts, timeline.policy == "gossip")
        state = (np.zeros((len(parts), first.shape[1]), np.float32), slots[timeline.worker[0]], slots, slots.copy())
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
    keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(count)).at[0].set(key)
    return jax.vmap(lambda key: ravel_pytree(model.init(key))[0])(keys)


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

    def step(state: tuple, event: dict[str, Array], rate: Array, x: Array, y: Array) -> tuple:
        summed, weights, old, ring, total = state
        noted, found = gradient(old, x[event["rows"]], y[event["rows"]])
        total, update = total + event["share"] * found, event["update"]
        weights, total = jnp.where(update, weights - rate * total, weights), jnp.where(update, 0.0, total)
        # written first, then read for the next gradient: the other way round, XLA copies the ring at every step
        ring = lax.dynamic_update_index_in_dim(ring, weights, event["next"], 0)
        summed = event["kept"] * summed + weights
        return (summed, weights, ring[event["read_next"]], ring, total), noted

    return step


@functools.cache
def _own(model: Model) -> Callable[..., tuple]:
    """A gradient where each has weights of its own; if `in_between`, others change them while it is computed."""
    gradient = _gradient(model)

    def step(
        state: tuple, event: dict[str, Array], rate: Array, matrices: Array, parts: Array, in_between: Array, x: Array,
        y: Array,
    ) -> tuple:  # fmt: skip
        summed, old, slots, read = state
        i, mixing = event["worker"], event["mixing"]
        noted, found = gradient(old, x[event["rows"]], y[event["rows"]])
        slots = slots.at[i].add(-rate * found)
        slots = lax.cond(mixing > 0, lambda: matrices[mixing] @ slots, lambda: slots)
        read = jnp.where(in_between, read.at[i].set(slots[i]), slots)
        summed = event["kept"] * summed + parts @ slots
        return (summed, read[event["next"]], slots, read), noted

    return step


@functools.partial(jax.jit, static_argnums=0)
def _test(model: Model, weights: Array, x: Array, y: Array) -> tuple[Array, Array]:
    """Loss and accuracy of the members' mean prediction."""
    unravel = _unravel(model)
    if len(weights) == 1:
        return training.evaluate(model, unravel(weights[0]), x, y, LOSS)
    chances = jax.vmap(lambda flat: jax.nn.softmax(model.apply(unravel(flat), x)))(weights).mean(0)
    return LOSS(jnp.log(chances), y).mean(), (chances.argmax(-1) == y).mean()
