"""The recorded experiments of notebook 02: the ground around deep networks on images, with and without skips.

Both nets have the same start, images, batches and grid of rates, and stop at the same training loss.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from dlscale import loss_landscapes
from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import data, models, train
from dlscale.lab.models import Params

DEPTH = 20
IMAGES, LOOKED_AT = 500, 100  # to train on; those of them whose loss is sliced and differentiated twice
BATCH, STEPS = 50, 400
TARGET = 0.2  # training loss to stop at
NETS = ("skips", "plain")
RATES = tuple(2.0**k for k in range(-8, -1))
TUNING_SEEDS, TEST_SEEDS = (100, 101, 102), range(10)
LINE = np.linspace(-1, 1, 41)  # in sizes of the weights
CHOSEN = {"skips": 2.0**-6, "plain": 2.0**-4}  # rates that SKIPS finds best: those of the surfaces
SIDE = np.linspace(-0.5, 0.5, 15)


@functools.cache
def _images(part: str) -> tuple[Array, Array]:
    """MNIST at half its size. To train on, to choose rates by and to test with: different ones."""
    mnist = data.load("mnist")
    x, y = (mnist.x_test, mnist.y_test) if part == "test" else (mnist.x_train, mnist.y_train)
    rows = slice(0, IMAGES) if part == "training" else slice(1000, 3000)
    small = x[rows].reshape(-1, 14, 2, 14, 2, 1).mean((2, 4))
    return jnp.asarray((small - 0.13) / 0.3), jnp.asarray(y[rows])


def stacked(params: Params) -> Params:
    """The parameters with those of all blocks in one array each, on which a scan, which compiles faster, can run."""
    params = jax.device_get(params)
    blocks = jax.tree.map(lambda *each: np.stack(each), *(params[f"block{i + 1}"] for i in range(DEPTH)))
    return {"stem": params["stem"], "blocks": blocks, "output": params["output"]}


def unstacked(params: Params) -> Params:
    """The same as `models.resnet` has them."""
    blocks = {f"block{i + 1}": jax.tree.map(operator.itemgetter(i), params["blocks"]) for i in range(DEPTH)}
    return {"stem": params["stem"], **blocks, "output": params["output"]}


def scores(net: str, params: Params, x: Array) -> Array:
    """What `models.resnet` computes, of stacked parameters."""
    layers = _model(net).layers
    x = layers["stem"](params["stem"], x)
    x, _ = lax.scan(lambda x, own: (layers["block1"](own, x), None), x, params["blocks"])
    return layers["output"](params["output"], x)


def _model(net: str) -> models.Model:
    return models.resnet(DEPTH, net == "skips", shape=(14, 14, 1))


@functools.cache
def mean_loss(net: str) -> Callable[..., Array]:
    def loss(params: Params, x: Array, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(scores(net, params, x), y).mean()

    return loss


@functools.partial(jax.jit, static_argnums=0)
def _descend(net: str, params: Params, rate: Array, rows: Array, x: Array, y: Array) -> tuple[Params, Array, Array]:
    """Momentum on gradients of length 1 at most, or no rate would serve the plain net, until the target.

    The loss on all images is looked at after every 5 steps, and after each one where it is near. The last step is
    shortened until the loss is the target.
    """
    loss = mean_loss(net)

    def step(number: Array, state: tuple[Params, Params]) -> tuple[Params, Params]:
        params, velocity = state
        gradient = jax.grad(loss)(params, x[rows[number]], y[rows[number]])
        shorter = jnp.minimum(1, 1 / jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradient))))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + shorter * g, velocity, gradient)
        return jax.tree.map(lambda w, v: w - rate * v, params, velocity), velocity

    def steps(state: tuple) -> tuple:
        number, (before, velocity), _, now = state
        until = number + jnp.where(now > 3 * TARGET, 5, 1)
        after = lax.fori_loop(number, until, step, (before, velocity))
        return until, after, before, loss(after[0], x, y)

    def unfinished(state: tuple) -> Array:
        return (state[0] < STEPS) & (state[3] > TARGET) & jnp.isfinite(state[3])

    start = jnp.int32(0), (params, jax.tree.map(jnp.zeros_like, params)), params, jnp.float32(9)  # above any target
    number, (params, _), before, final = lax.while_loop(unfinished, steps, start)

    def halve(_: int, ends: tuple[Params, Params]) -> tuple[Params, Params]:
        above, below = ends
        middle = jax.tree.map(lambda a, b: (a + b) / 2, above, below)
        high = loss(middle, x, y) > TARGET
        return jax.tree.map(functools.partial(jnp.where, high), (middle, below), (above, middle))

    _, end = lax.fori_loop(0, jnp.where(final <= TARGET, 8, 0), halve, (before, params))
    return end, number, loss(end, x, y)


@functools.cache
def trained(net: str, rate: float, seed: int) -> tuple[Params, int, float]:
    """Stacked parameters, steps taken and training loss."""
    x, y = _images("training")
    rng = np.random.default_rng(seed)
    rows = np.concatenate([rng.permutation(IMAGES) for _ in range(STEPS * BATCH // IMAGES + 1)]).reshape(-1, BATCH)
    start = stacked(jax.jit(_model("plain").init)(jax.random.key(seed)))  # the same for both: compiled once
    return jax.device_get(_descend(net, start, np.float32(rate), rows, x, y))


def trial(net: str, rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Where training ended, and how the ground is there; that is measured on test only, and where it came to its end.

    `rise` is that of the loss at distance 0.25; `valleys` and `downhill`, the share of all ups and downs on the way out
    that leads down, say how rugged it is along two random lines. A smooth bowl has one valley and no downhill.
    """
    params, steps, final = trained(net, rate, seed)
    measures = dict.fromkeys(("accuracy", "top", "bottom", "rise", "valleys", "downhill"), float("nan"))
    measures |= {"steps": steps, "loss": final}
    if final <= TARGET:  # else it gave up
        x, y = _images(judged_on)
        right = np.asarray(_labels(net, params, x)) == np.asarray(y)
        measures["accuracy"] = 100 * right.mean()
        if judged_on == "test":
            measures |= _ground(net, params)
    return measures


@functools.partial(jax.jit, static_argnums=0)
def _labels(net: str, params: Params, x: Array) -> Array:
    return lax.map(lambda x: scores(net, params, x), x.reshape(-1, 100, *x.shape[1:])).argmax(-1).ravel()


def _looked_at() -> tuple[Array, Array]:
    x, y = _images("training")
    return x[:LOOKED_AT], y[:LOOKED_AT]


def directions(params: Params) -> list[Params]:
    """Two random ones, normalised filter by filter."""
    keys = jax.random.split(jax.random.key(0))
    return [stacked(loss_landscapes.random_direction(key, unstacked(params))) for key in keys]


def _ground(net: str, params: Params) -> dict[str, float]:
    ways = directions(params)
    lines = np.array([loss_landscapes.line(mean_loss(net), params, way, LINE, _looked_at()) for way in ways])
    top, bottom = _ends(net, params)
    middle, quarter = len(LINE) // 2, 5
    out = np.concatenate([np.diff(lines[:, middle:]), np.diff(lines[:, middle::-1])])
    return {
        "top": top,
        "bottom": bottom,
        "rise": (lines[:, [middle - quarter, middle + quarter]].mean() - lines[:, middle].mean()),
        "valleys": ((lines[:, 1:-1] < lines[:, :-2]) & (lines[:, 1:-1] < lines[:, 2:])).sum() / len(lines),
        "downhill": np.mean([-way[way < 0].sum() / np.abs(way).sum() for way in out]),
    }


def _ends(net: str, params: Params, products: int = 20) -> tuple[float, float]:
    """The largest and the smallest eigenvalue of the Hessian, as so many products from a random vector see them."""
    given = mean_loss(net), params, jax.random.key(0), _looked_at()
    nodes = loss_landscapes.spectral_density(*given, probes=1, iterations=products).nodes
    return float(nodes.max()), float(nodes.min())


def plan(run: RunTrials) -> None:
    """Tune both nets on the same grid, test each at its best rate, and the net with skips at that of the other, too."""
    best = {
        net: train.tune(
            run, net=net, rate=RATES, tuning_seeds=TUNING_SEEDS, seeds=TEST_SEEDS, score=operator.itemgetter("accuracy")
        ).setting["rate"]
        for net in NETS
    }
    run([{"net": "skips", "rate": best["plain"], "seed": seed, "judged_on": "test"} for seed in TEST_SEEDS])


SKIPS = Experiment(
    "loss_landscapes-skips",
    "deep convolutional nets on images, with and without skips, each tuned: how the ground is where they end",
    trial,
    plan,
    # a doubled rate moves the largest eigenvalue by more than ten
    {"accuracy": 2, "top": 3, "bottom": 1, "rise": 0.02, "valleys": 0.5, "downhill": 0.01, "steps": 3, "loss": 0.002},
    drawn={"net": "skips", "judged_on": "test"},  # rounding sends the plain net, whose ground is steeper, elsewhere
)


def row(net: str, number: int) -> dict[str, float]:
    """One row of the surface around the net of seed 0: the loss, and the least over the largest eigenvalue, in size."""
    params, _, _ = trained(net, CHOSEN[net], 0)
    x, y = directions(params)
    here = loss_landscapes.move(params, (SIDE[number], y))
    losses = loss_landscapes.line(mean_loss(net), here, x, SIDE, _looked_at())
    ends = [_ends(net, loss_landscapes.move(here, (a, x)), products=12) for a in SIDE]
    found = {f"log10 loss {i}": np.log10(loss) for i, loss in enumerate(losses)}
    return found | {f"ratio {i}": abs(bottom / top) for i, (top, bottom) in enumerate(ends)}


def rows(run: RunTrials) -> None:
    """All rows of both surfaces."""
    run([{"net": net, "number": number} for net in NETS for number in range(len(SIDE))])


SURFACE = Experiment(
    "loss_landscapes-surface",
    "the surfaces around one deep net with skips and one without: the loss, and where it curves down, row by row",
    row,
    rows,
    dict.fromkeys((f"{what} {i}" for what in ("log10 loss", "ratio") for i in range(len(SIDE))), 0.1),
    drawn={"net": "skips"},
)
