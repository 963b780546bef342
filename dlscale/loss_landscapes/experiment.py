"""The recorded experiments of notebook 02: the ground where training ends at a given training loss.

Of deep networks on images without skips and with two kinds of them, which have the same start, images, batches and grid
of rates; and of one network on signals, trained with small and large batches at many rates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
IMAGES = 200  # to train on: their loss says when to stop, and is sliced and differentiated twice
BATCH, STEPS = 50, 400
TARGET = 0.2  # training loss to stop at
NETS = ("skips", "equal weights", "plain")
RATES = tuple(2.0**k for k in range(-8, -1))
LARGER = (2.0**-1, 1.0, 2.0)  # for the nets with skips; the plain one fails at the last of RATES in each run
TUNING_SEEDS, TEST_SEEDS = (110, 111, 112), range(30, 40)
LINE = np.linspace(-1, 1, 41)  # in sizes of the weights
SLOWER = (2.0**-2, 2.0**-1)  # than the best rate of equal weights, at which many runs fail
CHOSEN = {"skips": 2.0**-6, "plain": 2.0**-4}  # nets and rates of the surfaces
SIDE = np.linspace(-0.5, 0.5, 17)
MIDDLE = len(SIDE) // 2  # the row whose Hessians are looked at


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
    """What `models.resnet` computes, of stacked parameters; or with skips whose two parts weigh the same."""
    layers = _model(net).layers

    def block(x: Array, own: Params) -> tuple[Array, None]:
        new = layers["block1"](own, x)
        return (x + new) / math.sqrt(2) if net == "equal weights" else new, None

    x, _ = lax.scan(block, layers["stem"](params["stem"], x), params["blocks"])
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

    `rise` is that of the loss at distance 0.25, `valleys` counts the low points, along two random lines.
    """
    params, steps, final = trained(net, rate, seed)
    measures = dict.fromkeys(("accuracy", "rise", "valleys"), float("nan"))
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


def directions(params: Params) -> list[Params]:
    """Two random ones, normalised filter by filter."""
    keys = jax.random.split(jax.random.key(0))
    return [stacked(loss_landscapes.random_direction(key, unstacked(params))) for key in keys]


def _ground(net: str, params: Params) -> dict[str, float]:
    ways = directions(params)
    lines = np.array([loss_landscapes.line(mean_loss(net), params, way, LINE, _images("training")) for way in ways])
    middle, quarter = len(LINE) // 2, 5
    return {
        "rise": (lines[:, [middle - quarter, middle + quarter]].mean() - lines[:, middle].mean()),
        "valleys": ((lines[:, 1:-1] < lines[:, :-2]) & (lines[:, 1:-1] < lines[:, 2:])).sum() / len(lines),
    }


def _ends(net: str, params: Params, products: int, seed: int = 0) -> tuple[float, float]:
    """The largest and the smallest eigenvalue of the Hessian, as so many products from a random vector see them."""
    given = mean_loss(net), params, jax.random.key(seed), _images("training")
    nodes = loss_landscapes.spectral_density(*given, probes=1, iterations=products).nodes
    return float(nodes.max()), float(nodes.min())


def plan(run: RunTrials) -> None:
    """Tune all nets; test each at its best rate and at those that are best for the plain net and the one with skips."""

    def tuned(net: str) -> float:
        rates = RATES if net == "plain" else RATES + LARGER
        score = operator.itemgetter("accuracy")
        found = train.tune(run, net=net, rate=rates, tuning_seeds=TUNING_SEEDS, seeds=TEST_SEEDS, score=score)
        return found.setting["rate"]

    best = {net: tuned(net) for net in NETS}
    arms = [(net, rate) for net in NETS for rate in (best["skips"], best["plain"])]
    arms += [("equal weights", rate) for rate in SLOWER]
    run([{"net": net, "rate": r, "seed": seed, "judged_on": "test"} for net, r in arms for seed in TEST_SEEDS])


SKIPS = Experiment(
    "loss_landscapes-skips",
    "deep convolutional nets on images, without skips and with two kinds, each tuned: how the ground is where they end",
    trial,
    plan,
    {"accuracy": 2, "rise": 0.02, "valleys": 0.5, "steps": 3, "loss": 0.002},
    drawn={"net": "skips", "judged_on": "test"},  # rounding sends the plain net, whose ground is steeper, elsewhere
)


@functools.cache
def mean_error(net: str) -> Callable[..., Array]:
    def error(params: Params, x: Array, y: Array) -> Array:
        return 100 * (scores(net, params, x).argmax(-1) != y).mean()

    return error


def wider_trial(net: str, rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """As `trial`; and by other rulers: the rise of the loss at distance 0.1, and of the error (%) at 0.25."""
    measures = trial(net, rate, seed, judged_on) | {"near": float("nan"), "error rise": float("nan")}
    if np.isfinite(measures["rise"]):
        params, _, _ = trained(net, rate, seed)
        for name, measure, far in (("near", mean_loss(net), 0.1), ("error rise", mean_error(net), 0.25)):
            places = np.array([-far, 0, far])
            rises = [loss_landscapes.line(measure, params, d, places, _images("training")) for d in directions(params)]
            measures[name] = np.mean([(line[0] + line[2]) / 2 - line[1] for line in rises])
    return measures


def wider_plan(run: RunTrials) -> None:
    """Both nets of the surfaces, and skips at the larger rates of equal weights, with the seeds of the test."""
    arms = [*CHOSEN.items(), *(("skips", rate) for rate in SLOWER)]
    run([{"net": net, "rate": r, "seed": seed, "judged_on": "test"} for net, r in arms for seed in TEST_SEEDS])


WIDER = dataclasses.replace(
    SKIPS,
    id="loss_landscapes-wider",
    about="the deep net with skips at larger rates, and by other rulers: how the ground is where it ends",
    trial=wider_trial,
    plan=wider_plan,
    tolerance=SKIPS.tolerance | {"near": 0.02, "error rise": 2},
)


@functools.cache
def written_in(net: str) -> Callable[..., Array]:
    """The same function of other weights: those of the blocks are multiplied by a factor before they are used."""
    loss = mean_loss(net)

    def other(params: Params, x: Array, y: Array, factor: Array) -> Array:
        return loss(params | {"blocks": jax.tree.map(lambda w: factor * w, params["blocks"])}, x, y)

    return other


def top_trial(net: str, seed: int) -> dict[str, float]:
    """The largest eigenvalue where training ended; of skips also with 1/√20 written in the weights, not beside them."""
    params, _, final = trained(net, CHOSEN[net], seed)
    loss = written_in(net)

    def top(factor: float) -> float:
        same = params | {"blocks": jax.tree.map(lambda w: w / np.float32(factor), params["blocks"])}
        given = *_images("training"), np.float32(factor)
        return float(loss_landscapes.hessian_eigenvalues(loss, same, 1, jax.random.key(0), given, tolerance=1e-2)[0])

    return {"loss": final, "top": top(1), "written in": top(math.sqrt(DEPTH)) if net == "skips" else float("nan")}


def top_plan(run: RunTrials) -> None:
    """Both nets of the surfaces, with the seeds of the test."""
    run([{"net": net, "seed": seed} for seed in TEST_SEEDS for net in CHOSEN])


TOP = Experiment(
    "loss_landscapes-top",
    "the largest eigenvalue of the deep nets, and of the one with skips in two ways of writing the same function",
    top_trial,
    top_plan,
    {"loss": 0.002, "top": 3, "written in": 20},
    chaotic=("top", "written in"),
    drawn={"net": "skips"},
)


def row(net: str, number: int) -> dict[str, float]:
    """One row of the surface around the net of seed 0: the loss, and of the middle row the Hessian's extremes, too.

    `ratio` is the size of the least eigenvalue over the largest, by 40 products. `control` is the same at every second
    point, from another vector and by 60: where it differs, 40 were too few.
    """
    params, _, _ = trained(net, CHOSEN[net], 0)
    x, y = directions(params)
    here = loss_landscapes.move(params, (SIDE[number], y))
    losses = loss_landscapes.line(mean_loss(net), here, x, SIDE, _images("training"))

    def ratio(i: int, *how: int) -> float:
        if number != MIDDLE:
            return float("nan")
        top, bottom = _ends(net, loss_landscapes.move(here, (SIDE[i], x)), *how)
        return abs(bottom / top)

    found = {f"log10 loss {i}": np.log10(loss) for i, loss in enumerate(losses)}
    found |= {f"ratio {i}": ratio(i, 40) for i in range(len(SIDE))}
    return found | {f"control {i}": ratio(i, 60, 1) for i in range(0, len(SIDE), 2)}


def rows(run: RunTrials) -> None:
    """All rows of both surfaces."""
    run([{"net": net, "number": number} for net in CHOSEN for number in range(len(SIDE))])


SURFACE = Experiment(
    "loss_landscapes-surface",
    "the surfaces around one deep net with skips and one without: the loss, and along a line where it curves down",
    row,
    rows,
    dict.fromkeys([f"{what} {i}" for what in ("log10 loss", "ratio") for i in range(len(SIDE))], 0.1)
    | dict.fromkeys((f"control {i}" for i in range(0, len(SIDE), 2)), 0.1),
    drawn={"net": "skips", "number": 0},
)


MAPPED = SIDE[::2]
WRITTEN_IN = "skips, 1/√20 in the weights"


def point(net: str, row: int, column: int) -> dict[str, float]:
    """|λmin/λmax| at one point of the surface around the net of seed 0, as 20 products from a random vector see it.

    `control`, at every fourth point both ways, is the same from another vector by 40: far off, 20 were too few.
    """
    kind, factor = ("skips", np.float32(math.sqrt(DEPTH))) if net == WRITTEN_IN else (net, np.float32(1))
    params, _, _ = trained(kind, CHOSEN[kind], 0)
    x, y = directions(params)
    there = loss_landscapes.move(params, (MAPPED[column], x), (MAPPED[row], y))
    there["blocks"] = jax.tree.map(lambda w: w / factor, there["blocks"])

    def ratio(seed: int, products: int) -> float:
        given = jax.random.key(seed), (*_images("training"), factor)
        nodes = loss_landscapes.spectral_density(written_in(kind), there, *given, probes=1, iterations=products).nodes
        return float(abs(nodes.min() / nodes.max()))

    return {"ratio": ratio(0, 20), "control": ratio(1, 40) if row % 4 == column % 4 == 0 else float("nan")}


def points(run: RunTrials) -> None:
    """Both surfaces; and of the middle line the net with skips in another writing."""
    size, middle = range(len(MAPPED)), len(MAPPED) // 2
    run([{"net": net, "row": row, "column": column} for net in CHOSEN for row in size for column in size])
    run([{"net": WRITTEN_IN, "row": middle, "column": column} for column in size])


MAP = Experiment(
    "loss_landscapes-map",
    "maps of how strongly the ground curves down around one deep net with skips and one without",
    point,
    points,
    {"ratio": 0.02, "control": 0.02},
    drawn={"net": "skips", "row": 3},  # without a control: it takes as long as the training
)


# Small and large batches

SIGNALS, LOW = 1000, 0.05  # to train on, and the training loss to stop at
MLP = models.mlp((40, 64, 64, 10))
MOST_STEPS = 12_000
MLP_RATES = tuple(2.0 ** (k / 2) for k in range(-6, 5))
FACTORS = (1, 2, 4, 8, 31.25)  # of a batch of 16 and its rate
SMALL_RATES = (2.0**-6, 2.0**-4)
SEVERAL = range(300, 316)
STRENGTHS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


def mlp_loss(params: Params, x: Array, y: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(MLP.apply(params, x), y).mean()


def mlp_error(params: Params, x: Array, y: Array) -> Array:
    """Examples that are classified wrongly, in percent: a slice of it is a slice of accuracy, upside down."""
    return 100 * (MLP.apply(params, x).argmax(1) != y).mean()


@functools.cache
def signals(part: str) -> tuple[np.ndarray, np.ndarray]:
    """To train on, to choose rates by and to test with: different ones."""
    source = data.load("mnist1d_fresh")
    if part == "test":
        return source.x_test[:3000], source.y_test[:3000]
    rows = slice(0, SIGNALS) if part == "training" else slice(SIGNALS, None)
    return source.x_train[rows], source.y_train[rows]


@jax.jit
def _to_loss(params: Params, rows: Array, setting: dict[str, Array], x: Array, y: Array) -> tuple[Array, Params, Array]:
    """Steps of SGD to the target, or to the last, or to where it is hopeless; the last one is shortened to fit.

    The loss is looked at every 20 steps, and after each one from three times the target on.
    """

    def step(number: Array, params: Params) -> Params:
        gradient = jax.grad(mlp_loss)(params, x[rows[number]], y[rows[number]])
        return jax.tree.map(lambda w, g: w - setting["rate"] * (g + setting["decay"] * w), params, gradient)

    def onwards(state: tuple) -> tuple:
        number, before, _, now = state
        until = jnp.minimum(number + jnp.where(now > 3 * setting["target"], 20, 1), setting["steps"])
        after = lax.fori_loop(number, until, step, before)
        return until, after, before, mlp_loss(after, x, y)

    def unfinished(state: tuple) -> Array:
        number, _, _, now = state
        hopeless = (number > 600) & (now > 2.2) | jnp.isnan(now)
        return (number < setting["steps"]) & (now > setting["target"]) & ~hopeless

    start = jnp.int32(0), params, params, jnp.float32(9)  # above any target
    number, after, before, final = lax.while_loop(unfinished, onwards, start)

    def halve(_: int, ends: tuple[Params, Params]) -> tuple[Params, Params]:
        middle = jax.tree.map(lambda a, b: (a + b) / 2, *ends)
        high = mlp_loss(middle, x, y) > setting["target"]
        return jax.tree.map(functools.partial(jnp.where, high), (middle, ends[1]), (ends[0], middle))

    _, end = lax.fori_loop(0, jnp.where(final <= setting["target"], 8, 0), halve, (before, after))
    return number, end, mlp_loss(end, x, y)


_mlp_start = jax.jit(MLP.init)


def to_loss(
    batch: int, rate: float, seed: int, decay: float = 0.0, target: float = LOW, steps: int = MOST_STEPS
) -> tuple[int, Params, float]:
    """Steps taken, parameters and training loss: at the target, or where it was given up."""
    rng, epochs = np.random.default_rng(seed), -(-MOST_STEPS // (SIGNALS // batch))
    orders = [rng.permutation(SIGNALS)[: SIGNALS // batch * batch].astype(np.int32) for _ in range(epochs)]
    rows = np.concatenate(orders).reshape(-1, batch)[:MOST_STEPS]
    setting = {"rate": np.float32(rate), "decay": np.float32(decay), "target": np.float32(target), "steps": steps}
    return jax.device_get(_to_loss(_mlp_start(jax.random.key(seed)), rows, setting, *signals("training")))


@functools.partial(jax.jit, static_argnums=0)
def mean_rise(
    measure: Callable[..., Array], params: Params, directions: Params, distance: Array, x: Array, y: Array
) -> Array:
    """How far loss or error rise at this distance, to both sides, over stacked directions."""

    def both(d: Params) -> Array:
        ends = (loss_landscapes.move(params, (way * distance, d)) for way in (1, -1))
        return sum(measure(end, x, y) for end in ends) / 2

    return lax.map(both, directions).mean() - measure(params, x, y)


def four_directions(params: Params, normalize: str | None = "filter") -> Params:
    """Random ones, stacked."""
    drawn = [loss_landscapes.random_direction(jax.random.key(k), params, normalize) for k in range(4)]
    return jax.tree.map(lambda *each: np.stack(each), *jax.device_get(drawn))


@jax.jit
def _attacked(params: Params, x: Array, y: Array) -> tuple[Array, Array]:
    """The accuracy (%), a mean over the strengths: under the attack, and under noise of random signs as strong."""
    worst = jnp.sign(jax.grad(mlp_loss, argnums=1)(params, x, y))
    random = jax.random.rademacher(jax.random.key(0), x.shape, x.dtype)

    def accuracies(signs: Array) -> Array:
        return lax.map(lambda strength: 100 - mlp_error(params, x + strength * signs, y), jnp.array(STRENGTHS)).mean()

    return accuracies(worst), accuracies(random)


_mlp_error = jax.jit(mlp_error)


def batch_trial(batch: int, rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Where training ended, and how the ground is there; that only where it came to its end."""
    names = "accuracy", "tested", "top", "trace", "rise", "error rise", "attacked", "noise"
    steps, params, final = to_loss(batch, rate, seed)
    measures = dict.fromkeys(names, float("nan")) | {"steps": steps, "loss": final}
    if not final <= LOW:  # it gave up
        return measures
    given, key = signals("training"), jax.random.key(0)
    tested, ways = 100 - _mlp_error(params, *signals("test")), four_directions(params)
    found = (
        tested if judged_on == "test" else 100 - _mlp_error(params, *signals("validation")),
        tested,
        loss_landscapes.hessian_eigenvalues(mlp_loss, params, 1, key, given)[0],
        loss_landscapes.hessian_trace(mlp_loss, params, key, given, probes=10).mean(),
        *(mean_rise(measure, params, ways, 0.25, *given) for measure in (mlp_loss, mlp_error)),
        *_attacked(params, *signals("test")),
    )
    return measures | dict(zip(names, map(float, found), strict=True))


def batch_plan(run: RunTrials) -> None:
    """Tune both batches on the same grid and test them; the large one at the other's rate; rate over batch kept."""
    best = {
        batch: train.tune(
            run, batch=batch, rate=MLP_RATES, tuning_seeds=8, seeds=SEVERAL, score=operator.itemgetter("accuracy")
        ).setting["rate"]
        for batch in (16, 500)
    }
    pairs = [(500, best[16]), *((int(16 * k), rate * k) for rate in SMALL_RATES for k in FACTORS)]
    run([{"batch": b, "rate": r, "seed": seed, "judged_on": "test"} for b, r in pairs for seed in SEVERAL[:8]])


BATCHES = Experiment(
    "loss_landscapes-batches",
    "one network on signals to one training loss, small and large batches at many rates: how the ground is there",
    batch_trial,
    batch_plan,
    {"accuracy": 2, "tested": 2, "top": 0.1, "trace": 2, "rise": 0.03, "error rise": 1, "attacked": 1, "noise": 2}
    | {"steps": 10, "loss": 0.001},
    chaotic=("accuracy", "tested", "top", "trace", "rise", "error rise", "attacked", "noise", "steps"),
    drawn={"batch": 500, "judged_on": "test"},  # after thousands of small steps a measure may lie far out
)


def noise_plan(run: RunTrials) -> None:
    """A batch four times as large, with a rate as much larger and with the same rate, on seeds of its own."""
    arms = (16, 2.0**-6), (64, 2.0**-4), (64, 2.0**-6)
    run([{"batch": b, "rate": r, "seed": seed, "judged_on": "test"} for b, r in arms for seed in range(338, 346)])


NOISE = dataclasses.replace(
    BATCHES,
    id="loss_landscapes-noise",
    about="the same network, batches of 16 and 64: what remains of a larger batch where the rate grows with it",
    plan=noise_plan,
    drawn={"batch": 64, "rate": 2.0**-4},
)


# One rate for both, its neighbour, and the two between which the choice for batch 500 hangs on one failed run
ATTACKED = (16, 2.0**-2), (16, 2.0**-2.5), (500, 2.0**-2), (500, 2.0), (500, 2.0**1.5)


def attack_plan(run: RunTrials) -> None:
    """Small and large batches at one rate, and at those near the best of each, on seeds of their own."""
    run([{"batch": b, "rate": r, "seed": seed, "judged_on": "test"} for b, r in ATTACKED for seed in range(346, 362)])


ATTACK = dataclasses.replace(
    BATCHES,
    id="loss_landscapes-attack",
    about="the same network, batches of 16 and 500 at one rate and at the largest that train: how they bear an attack",
    plan=attack_plan,
    drawn={"batch": 500, "rate": 2.0},
)
