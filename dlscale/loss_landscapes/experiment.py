"""The recorded experiments of 02: what changes the surface, and whether flat minima test better.

Every run ends at the same training loss. Deep networks on digits have skip connections, normalisation, both or
neither. One small network on signals and one on digits are trained with small and large batches at several rates.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from dlscale import loss_landscapes
from dlscale.course.records import Experiment, Record, RunTrials
from dlscale.lab import data, models
from dlscale.loss_landscapes import Loss, Tree

# Training to a loss


def minibatches(seed: int, steps: int, batch_size: int, examples: int) -> np.ndarray:
    """The rows of each step, (steps, batch_size): random orders; what is left over in an epoch is left out."""
    rng, used = np.random.default_rng(seed), examples // batch_size * batch_size
    orders = [rng.permutation(examples)[:used] for _ in range(-(-steps * batch_size // used))]
    return np.concatenate(orders).reshape(-1, batch_size)[:steps].astype(np.int32)


def to_loss(
    loss: Loss, params: Tree, batches: np.ndarray, given: tuple, target: float, learning_rate: float, **more: float
) -> tuple[int, Tree, float]:
    """SGD on loss(params, x, y, …) until the loss of all examples is the target: steps, parameters and loss.

    `given` is (x, y, …) and `batches` (steps, batch_size) are rows of x and y. There is `more`: `momentum`, weight
    `decay`, and the `longest` gradient. The loss is looked at every 20 steps, and after each one from
    three times the target on; the last step is shortened until the loss is the target. Without hope the run ends early.
    """
    recipe = {"momentum": 0.0, "decay": 0.0, "longest": 1e9, "target": target, "learning_rate": learning_rate} | more
    x, y, *variant = given
    setting = {name: np.float32(value) for name, value in recipe.items()}
    steps, end, final = jax.device_get(_to_loss(loss, params, batches, setting, x, y, variant))
    return int(steps), end, float(final)


@functools.partial(jax.jit, static_argnums=0)
def _to_loss(
    loss: Loss, params: Tree, batches: Array, setting: dict[str, Array], x: Array, y: Array, variant: list
) -> tuple[Array, Tree, Array]:
    def step(number: Array, state: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        params, velocity = state
        gradient = jax.grad(loss)(params, x[batches[number]], y[batches[number]], *variant)
        length = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient)))
        shorter = jnp.minimum(1, setting["longest"] / length)

        def faster(v: Array, g: Array, w: Array) -> Array:
            return setting["momentum"] * v + shorter * g + setting["decay"] * w

        velocity = jax.tree.map(faster, velocity, gradient, params)
        return jax.tree.map(lambda w, v: w - setting["learning_rate"] * v, params, velocity), velocity

    def onwards(state: tuple) -> tuple:
        number, now, _, at = state
        until = jnp.minimum(number + jnp.where(at > 3 * setting["target"], 20, 1), len(batches))
        after = lax.fori_loop(number, until, step, now)
        return until, after, now[0], loss(after[0], x, y, *variant)

    def unfinished(state: tuple) -> Array:
        number, _, _, at = state
        hopeless = (number > 600) & (at > 2.2) | jnp.isnan(at)
        return (number < len(batches)) & (at > setting["target"]) & ~hopeless

    start = jnp.int32(0), (params, jax.tree.map(jnp.zeros_like, params)), params, jnp.float32(9)  # above any target
    number, (after, _), before, at = lax.while_loop(unfinished, onwards, start)

    def halve(_: int, ends: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        middle = jax.tree.map(lambda a, b: (a + b) / 2, *ends)
        high = loss(middle, x, y, *variant) > setting["target"]
        return jax.tree.map(functools.partial(jnp.where, high), (middle, ends[1]), (ends[0], middle))

    _, end = lax.fori_loop(0, jnp.where(at <= setting["target"], 8, 0), halve, (before, after))
    return number, end, loss(end, x, y, *variant)


# Deep networks

DEPTH, WIDTH = 20, 32
VARIANTS = {"plain": (False, False), "skip": (True, False), "norm": (False, True), "skip and norm": (True, True)}
DEEP_TARGET, DEEP_STEPS = 0.1, 3000
DEEP_RATES = tuple(2.0**k for k in range(-8, -4))
DEEP_SEEDS = range(10_216, 10_232)


@functools.cache
def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Digits, flat: 500 to train on, and others to test with."""
    training, test = examples("digits")
    return tuple(array[:500] for array in training), test


def deep_start(seed: int) -> list[np.ndarray]:
    """The matrices of a deep network: of the first layer, of the blocks and of the last."""
    rng, sizes = np.random.default_rng(seed), [64, *[WIDTH] * (DEPTH + 1), 10]
    shapes = itertools.pairwise(sizes)
    return [np.float32(rng.normal(size=shape) * math.sqrt(2 / shape[0])) for shape in shapes]


def deep_scores(params: list[Array], x: Array, skip: bool, norm: bool) -> Array:
    """A deep network with the same matrices for all variants."""
    first, *blocks, last = params

    def block(x: Array, w: Array) -> tuple[Array, None]:
        spread = jnp.sqrt(x.var(1, keepdims=True) + 1e-3)
        seen = jnp.where(norm, (x - x.mean(1, keepdims=True)) / spread, x)
        new = jax.nn.relu(seen) @ w
        return jnp.where(skip, x + new / math.sqrt(DEPTH), new), None

    x, _ = lax.scan(block, x @ first, jnp.stack(blocks))
    return jax.nn.relu(x) @ last


def deep_loss(params: list[Array], x: Array, y: Array, skip: bool, norm: bool) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(deep_scores(params, x, skip, norm), y).mean()


_deep_labels = jax.jit(lambda *given: deep_scores(*given).argmax(1))


def rise(loss: Loss, params: Tree, given: tuple, distance: float = 0.25, normalize: str | None = "filter") -> float:
    """How far the loss rises at this distance: the mean over four random directions and both ways."""
    places = np.array([-distance, 0, distance])
    ways = [loss_landscapes.random_direction(jax.random.key(k), params, normalize) for k in range(4)]
    low, middle, high = np.mean([loss_landscapes.line(loss, params, way, places, given) for way in ways], axis=0)
    return float((low + high) / 2 - middle)


def deep_trial(variant: str, rate: float, seed: int) -> dict[str, float]:
    """Where training ended, and how far the loss rises around it; NaN where the run never reached the loss.

    Momentum is on gradients of length 1 at most, without which no rate suits all.
    """
    training, (x, y) = digits()
    given, batches = (*training, *VARIANTS[variant]), minibatches(seed, DEEP_STEPS, 50, 500)
    recipe = {"target": DEEP_TARGET, "learning_rate": rate, "momentum": 0.9, "longest": 1.0}
    steps, params, final = to_loss(deep_loss, deep_start(seed), batches, given, **recipe)
    measures = {"steps": steps, "loss": final, "accuracy": math.nan, "rise": math.nan}
    if final <= DEEP_TARGET:
        measures["accuracy"] = float(100 * (np.asarray(_deep_labels(params, x, *VARIANTS[variant])) == y).mean())
        measures["rise"] = rise(deep_loss, params, given)
    return measures


def deep_plan(run: RunTrials) -> None:
    """All variants at all rates."""
    arms = [{"variant": variant, "rate": rate} for variant in VARIANTS for rate in DEEP_RATES]
    run([arm | {"seed": seed} for arm in arms for seed in DEEP_SEEDS])


DEEP = Experiment(
    "loss_landscapes-deep",
    "deep networks on digits with skip connections, normalisation, both or neither, at one training loss",
    deep_trial,
    deep_plan,
    {"accuracy": 2, "rise": 0.05, "steps": 3, "loss": 0.002},
    chaotic=("accuracy", "rise", "steps"),
    drawn={"variant": "skip"},
    confirms=("loss_landscapes-skip",),
)


# Small and large batches

TARGET, MOST_STEPS, EXAMPLES = 0.05, 12_000, 1000
ARMS = {
    "signals": ((16, 1 / 16), (16, 1 / 8), (16, 1 / 4), *((500, 2.0**k) for k in range(-3, 2))),
    "digits": ((16, 0.05), (16, 0.1), (16, 0.2), *((500, 0.05 * 2**k) for k in range(5))),
}
NETS = {"signals": models.mlp((40, 64, 64, 10)), "digits": models.mlp((64, 32, 32, 10))}
SEEDS = range(10_200, 10_216)
STRENGTHS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


@functools.cache
def examples(task: str) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """A thousand to train on, and others to test with."""
    source = data.load({"signals": "mnist1d_fresh", "digits": "digits"}[task])
    x, y = (np.concatenate([source.x_train, source.x_test]), np.concatenate([source.y_train, source.y_test]))
    x, others = x.reshape(len(x), -1), slice(-3000, None) if task == "signals" else slice(EXAMPLES, None)
    return (x[:EXAMPLES], y[:EXAMPLES]), (x[others], y[others])


@functools.cache
def mean_loss(task: str) -> Loss:
    def loss(params: Tree, x: Array, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(NETS[task].apply(params, x), y).mean()

    return loss


@functools.cache
def _starts(task: str) -> Any:
    return jax.jit(NETS[task].init)


def trained(
    task: str, batch: int, rate: float, seed: int, target: float = TARGET, decay: float = 0.0
) -> tuple[int, Tree, float]:
    """Steps, parameters and training loss."""
    batches = minibatches(seed, MOST_STEPS, batch, EXAMPLES)
    start = _starts(task)(jax.random.key(seed))
    return to_loss(mean_loss(task), start, batches, examples(task)[0], target, rate, decay=decay)


def accuracy(task: str, params: Tree, x: Array, y: Array) -> float:
    return float(100 * (np.asarray(NETS[task].apply(params, x)).argmax(1) == y).mean())


@functools.partial(jax.jit, static_argnums=0)
def _attack(task: str, params: Tree, x: Array, y: Array) -> Array:
    """The direction of each input number that raises the loss (FGSM)."""
    return jnp.sign(jax.grad(mean_loss(task), argnums=1)(params, x, y))


def minima_trial(task: str, batch: int, rate: float, seed: int) -> dict[str, float]:
    """Where training ended, how sharp it is there, and how the network does on other inputs."""
    steps, params, final = trained(task, batch, rate, seed)
    training, test = examples(task)
    signs = {"attacked": _attack(task, params, *test), "noise": np.random.default_rng(0).choice([-1, 1], test[0].shape)}
    found = {
        name: np.mean([accuracy(task, params, np.float32(test[0] + e * sign), test[1]) for e in STRENGTHS])
        for name, sign in signs.items()
    }
    top = loss_landscapes.hessian_eigenvalues(mean_loss(task), params, 1, jax.random.key(0), training)[0]
    found |= {"top": top, "accuracy": accuracy(task, params, *test), "steps": steps, "loss": final}
    return {name: float(value) for name, value in found.items()}


def minima_plan(run: RunTrials) -> None:
    """All arms of both tasks."""
    arms = [{"task": task, "batch": batch, "rate": rate} for task in ARMS for batch, rate in ARMS[task]]
    run([arm | {"seed": seed} for arm in arms for seed in SEEDS])


def rank_correlations(record: Record, task: str) -> list[float]:
    """Spearman's, of sharpness and test accuracy over the arms of a task, for each seed."""
    from scipy.stats import spearmanr  # here: nothing else needs so large a module

    top, accuracy = (
        np.array([record.values(what, task=task, batch=batch, rate=rate) for batch, rate in ARMS[task]]).T
        for what in ("top", "accuracy")
    )
    return [float(spearmanr(*pair).statistic) for pair in zip(top, accuracy, strict=True)]


MINIMA = Experiment(
    "loss_landscapes-minima",
    "small networks on signals and on digits, batches of 16 and 500 at several rates, all trained to one loss",
    minima_trial,
    minima_plan,
    {"steps": 10, "loss": 0.001, "top": 0.1, "accuracy": 2, "attacked": 1, "noise": 2},
    chaotic=("accuracy", "top", "attacked", "noise", "steps"),
    drawn={"task": "digits", "batch": 500},
    confirms=("loss_landscapes-same-rate", "loss_landscapes-flat-signals", "loss_landscapes-flat-digits"),
)
