"""The recorded experiments: when and where to prune, how large the pieces are, and recurrent nets, pruned."""

import functools
import itertools
import math
from dataclasses import replace
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from dlscale import sparsity
from dlscale.course import records
from dlscale.course.records import Experiment, RunTrials
from dlscale.lab import data, models, train
from dlscale.lab.data import Dataset
from dlscale.lab.models import Model, Params

ACCURACY = itemgetter("accuracy")
TEST_SEEDS = range(20)  # the first ten have decided which rules were changed; the others decide by the new ones


def _examples(name: str, judged_on: str) -> Dataset:
    """Training examples, and those held out of them ("validation") or the test set to judge by."""
    full = data.load(name)
    held_out = data.validation_split(full, fraction=0.25)
    return replace(held_out, x_test=full.x_test, y_test=full.y_test) if judged_on == "test" else held_out


@functools.cache
def digits(judged_on: str = "test") -> Dataset:
    """Digits of 14 × 14 pixels, three quarters of the training set, with those to judge by as the test set."""
    examples = _examples("mnist", judged_on)
    return replace(examples, x_train=_pooled(examples.x_train), x_test=_pooled(examples.x_test))


def _pooled(x: np.ndarray) -> np.ndarray:
    """Means over 2×2 pixels of images (count, height, width, 1)."""
    return x.reshape(len(x), x.shape[1] // 2, 2, x.shape[2] // 2, 2, 1).mean((2, 4))


def _order(seed: int, count: int, batch: int, epochs: int) -> np.ndarray:
    """Rows of the examples for each step, each example at most once an epoch."""
    rng, steps = np.random.default_rng(seed), count // batch
    return np.concatenate([rng.permutation(count)[: steps * batch].reshape(steps, batch) for _ in range(epochs)])


def _descend(
    model: Model, optimizer: optax.GradientTransformation, params: Params, order: Array, x: Array, y: Array
) -> tuple[Params, Array]:
    """Trained parameters, and the loss before each step."""

    def loss(params: Params, rows: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x[rows]), y[rows]).mean()

    def step(state: tuple[Params, optax.OptState], rows: Array) -> tuple[tuple[Params, optax.OptState], Array]:
        params, memory = state
        value, gradient = jax.value_and_grad(loss)(params, rows)
        updates, memory = optimizer.update(gradient, memory, params)
        return (optax.apply_updates(params, updates), memory), value

    (params, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), order)
    return params, losses


@functools.partial(jax.jit, static_argnums=0)
def _accuracy(model: Model, params: Params, x: Array, y: Array) -> Array:
    return (model.apply(params, x).argmax(-1) == y).mean()


# Granularity: a convolutional net, trained, pruned at once, trained again

PRUNED = ("conv2", "conv3")
DENSITIES = (0.03, 0.06, 0.12, 0.2, 0.4)
CONV_TUNING = {"learning_rate": (0.025, 0.05, 0.1, 0.2, 0.4), "tuning_seeds": (100, 101), "score": ACCURACY}
DENSE_RATE, CONV_BATCH, CONV_EPOCHS = 0.05, 50, 2


# Three 3×3 convolutions with ReLU, the first two max-pooled, and a dense layer: 14×14 images, ten classes
CONV_SHAPES = {"conv1": (3, 3, 1, 8), "conv2": (3, 3, 8, 16), "conv3": (3, 3, 16, 32), "output": (288, 10)}
CONV_LAYERS = {"conv1": models.conv(pool=True), "conv2": models.conv(pool=True), "conv3": models.conv()}
CONV_NET = Model(lambda key: models.weights(key, CONV_SHAPES), CONV_LAYERS | {"output": models.dense()})


@jax.jit
def _train_conv(params: Params, mask: Params, rate: Array, order: Array, x: Array, y: Array) -> tuple[Params, Array]:
    """SGD with momentum, the rate falling to 0 on half a cosine."""
    optimizer = optax.sgd(optax.cosine_decay_schedule(rate, len(order)), momentum=0.9)
    return _descend(CONV_NET, sparsity.masked(optimizer, mask), params, order, x, y)


def _epochs_of_conv(seed: int, params: Params, mask: Params, rate: float) -> tuple[Params, Array]:
    examples = digits()
    order = _order(seed, len(examples.x_train), CONV_BATCH, CONV_EPOCHS)
    return _train_conv(params, mask, np.float32(rate), order, examples.x_train, examples.y_train)


@functools.cache
def dense_conv_net(seed: int) -> tuple[Params, Array]:
    """The trained net that all arms of a seed are pruned from, and the losses of its training."""
    params = jax.jit(CONV_NET.init)(jax.random.key(seed))
    return _epochs_of_conv(seed, params, jax.tree.map(jnp.ones_like, params), DENSE_RATE)


def granularity_trial(
    granularity: str, density: float, learning_rate: float, seed: int, judged_on: str
) -> dict[str, float]:
    """Accuracy in percent after pruning the second and third convolution, each to this density, and two epochs more;
    density of the pruned layers; groups that the relative encoding writes, fillers included, and the weights of a group
    (counted in groups of conv2).

    `early_loss` is that of the dense net after ten steps.
    """
    dense, losses = dense_conv_net(seed)
    mask = jax.tree.map(jnp.ones_like, dense)
    for name in PRUNED:
        mask[name] |= {"w": sparsity.mask(dense[name]["w"], density, granularity)}
    params = jax.tree.map(jnp.multiply, dense, mask)
    params, _ = _epochs_of_conv(seed + 1000, params, mask, learning_rate)
    kept = np.concatenate([np.ravel(mask[name]["w"]) for name in PRUNED]).mean()
    size = math.prod(sparsity.group_shape(mask[PRUNED[0]]["w"].shape, granularity))
    bits = sum(sparsity.stored_bits(mask[name]["w"], "relative", granularity, 16) for name in PRUNED)
    judged = digits(judged_on)
    accuracy = 100 * float(_accuracy(CONV_NET, params, judged.x_test, judged.y_test))
    found = {"accuracy": accuracy, "density": float(kept), "entries": bits // (4 + 16 * size), "size": size}
    return found | {"early_loss": losses[10]}


def granularity_plan(run: RunTrials) -> None:
    """Each arm at the best of the same rates, found on held-out images; then the test images with other seeds."""
    arms = [*itertools.product(sparsity.GRANULARITIES, DENSITIES), ("weight", 1.0)]
    for granularity, density in arms:
        train.tune(run, granularity=granularity, density=density, seeds=TEST_SEEDS, **CONV_TUNING)


# Recurrent nets: gated recurrent units over the 40 values of MNIST-1D, two at a time

SMALL, LARGE = 32, 80  # hidden units
RECURRENT_TUNING = {"learning_rate": (0.005, 0.01, 0.02, 0.04, 0.08, 0.16), "score": ACCURACY}
RECURRENT_TUNING["tuning_seeds"] = range(100, 106)  # with two, chance chose between neighbouring rates
RECURRENT_DENSITIES = (0.05, 0.1, 0.2, 0.4, 1.0)
RECURRENT_BATCH, RECURRENT_EPOCHS, PRUNE_EVERY = 100, 24, 20


def parameters(hidden: int, density: float = 1.0) -> int:
    """Weights that stay, with all biases."""
    weights = 3 * hidden * (2 + hidden) + 10 * hidden
    return round(density * weights) + 3 * hidden + 10


def matching_density() -> float:
    """The density that leaves the large net as many parameters as the small one has when dense."""
    biases = parameters(LARGE, 0.0)
    return (parameters(SMALL) - biases) / (parameters(LARGE) - biases)


@functools.partial(jax.jit, static_argnums=0)
def _train_recurrent(
    hidden: int, params: Params, density: Array, rate: Array, order: Array, x: Array, y: Array
) -> tuple[Params, Array]:
    """Adam, its rate falling to 0 on half a cosine; pruned on a cubic from an eighth to five eighths of the steps."""
    steps = len(order)
    schedule = optax.polynomial_schedule(1.0, density, 3, steps // 2, steps // 8)
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))
    gradual = sparsity.gradual(schedule, PRUNE_EVERY, scope="global")
    return _descend(models.gru(hidden, features=2), sparsity.masked(optimizer, gradual), params, order, x, y)


def recurrent_trial(
    hidden: int, density: float, learning_rate: float, seed: int, judged_on: str, epochs: int = RECURRENT_EPOCHS
) -> dict[str, float]:
    """Accuracy in percent of a recurrent net that is pruned, all weights together, while it trains.

    `early_loss` is that after twenty steps.
    """
    examples, net = _examples("mnist1d_fresh", judged_on), models.gru(hidden, features=2)
    params = jax.jit(net.init)(jax.random.key(seed))
    order = _order(seed, len(examples.x_train), RECURRENT_BATCH, epochs)
    given = examples.x_train.reshape(-1, 20, 2), examples.y_train
    params, losses = _train_recurrent(hidden, params, np.float32(density), np.float32(learning_rate), order, *given)
    left = sum(int(np.count_nonzero(w)) for w in jax.tree.leaves(params) if np.ndim(w) == 2)
    accuracy = 100 * float(_accuracy(net, params, examples.x_test.reshape(-1, 20, 2), examples.y_test))
    return {"accuracy": accuracy, "weights": left, "early_loss": losses[20]}


def recurrent_plan(run: RunTrials) -> None:
    """As `granularity_plan`, for both widths; the large net also with as many parameters as the small one."""
    arms = [*itertools.product((SMALL, LARGE), RECURRENT_DENSITIES), (LARGE, matching_density())]
    for hidden, density in arms:
        seeds = TEST_SEEDS if hidden == LARGE and density in (0.1, 1.0) else TEST_SEEDS[:10]
        train.tune(run, hidden=hidden, density=density, seeds=seeds, **RECURRENT_TUNING)


# Is "large, then pruned" better, or only more work? The small dense net, trained for longer

LONGER = 3  # times the epochs: more multiplications than those of the large net's kept weights


def longer_trial(times: int, **setting: float | str) -> dict[str, float]:
    """Accuracy in percent of the small dense net after `times` the epochs."""
    return {"accuracy": recurrent_trial(SMALL, 1.0, epochs=times * RECURRENT_EPOCHS, **setting)["accuracy"]}


def longer_plan(run: RunTrials) -> None:
    """Tuned as in `recurrent_plan`, with the same networks at the start."""
    train.tune(run, times=LONGER, seeds=TEST_SEEDS[:10], **RECURRENT_TUNING)


# When to prune, and where: an MLP on digits

ALLOCATIONS = ("global", "uniform", "last layer × 4")  # one ranking; each layer alike; all but the last layer alike
WAY_DENSITIES = (0.01, 0.02, 0.05, 0.1)
WAY_TUNING = {"learning_rate": (0.05, 0.1, 0.2, 0.4, 0.8), "tuning_seeds": range(100, 104), "score": ACCURACY}
STEPS, EVERY, WAY_BATCH, WAY_EPOCHS = 360, 30, 100, 6
SHAPES = {"dense1": (196, 64), "dense2": (64, 64), "output": (64, 10)}
NETWORK = models.mlp((196, 64, 64, 10))


def layer_densities(density: float | Array, last: float = 1.0) -> dict[str, float | Array]:
    """Densities of the layers: the last has `last` times that of the net, the others share the rest alike."""
    *others, output = map(math.prod, SHAPES.values())
    rest = density * (sum(others) + (1 - last) * output) / sum(others)
    return dict.fromkeys(SHAPES, rest) | {"output": last * density}


def pruned_sgd(learning_rate: Array, density: Array, at_once: Array, allocation: str) -> optax.GradientTransformation:
    """SGD with momentum that prunes half-way, or on a cubic from 20 to 70 % of the steps."""
    densities = layer_densities(density, 4.0 if allocation == ALLOCATIONS[2] else 1.0)

    def update(step: Array, params: Params, present: Params, gradient: Params) -> Params:
        cubic = (1 - jnp.clip((step / STEPS - 0.2) / 0.5, 0, 1)) ** 3
        to_go = jnp.where(at_once > 0, 1.0 * (step < STEPS // 2), cubic)  # of the way from all weights to the last ones

        def renewed() -> Params:
            if allocation == "global":
                return sparsity.mask(params, density + (1 - density) * to_go, scope="global")
            return {name: sparsity.mask(params[name], d + (1 - d) * to_go) for name, d in densities.items()}

        return jax.lax.cond(step % EVERY == 0, renewed, lambda: present)

    return sparsity.masked(optax.sgd(learning_rate, momentum=0.9), update)


PRUNING = {name: functools.partial(pruned_sgd, allocation=name) for name in ALLOCATIONS}


def ways_trial(
    way: str, allocation: str, density: float, learning_rate: float, seed: int, judged_on: str
) -> dict[str, float]:
    """Accuracy in percent, NaN for a run that diverged, and the density of the last layer."""
    setting = {"density": density, "learning_rate": learning_rate, "at_once": float(way == "at once")}
    options = {"batch_size": WAY_BATCH, "epochs": WAY_EPOCHS, "eval_every": WAY_EPOCHS, "progress": False}
    try:
        run = train.fit(NETWORK, digits(judged_on), PRUNING[allocation], seed=seed, **options, **setting)
    except train.Diverged:
        return {"accuracy": math.nan, "output_density": math.nan}
    left = float(np.mean(np.asarray(run.params["output"]["w"]) != 0))
    return {"accuracy": 100 * float(run.history.test_accuracy[-1]), "output_density": left}


def ways_plan(run: RunTrials) -> None:
    """Both ways with one ranking of all weights, and the gradual one with two other allocations; each arm tuned."""
    arms = [("not at all", "global", 1.0)]
    arms += [("at once", "global", density) for density in WAY_DENSITIES]
    arms += [("gradually", *arm) for arm in itertools.product(ALLOCATIONS, WAY_DENSITIES)]
    for way, allocation, density in arms:
        arm = {"way": way, "allocation": allocation, "density": density}
        train.tune(run, **arm, seeds=range(20, 36), **WAY_TUNING)


# The variants that decide claims, at the rates that were found, with seeds that nothing else used

STUDIES = {"ways": ways_trial, "granularity": granularity_trial, "recurrent": recurrent_trial}
CONFIRMED_ARMS = [
    *(("ways", 32, {"way": way, "allocation": "global", "density": 0.05}) for way in ("at once", "gradually")),
    *(("ways", 32, {"way": "gradually", "allocation": name, "density": 0.01}) for name in ALLOCATIONS[1:]),
    *(("granularity", 16, {"granularity": name, "density": 0.2}) for name in ("weight", "filter")),
    *(("recurrent", 16, {"hidden": LARGE, "density": density}) for density in (0.1, matching_density(), 1.0)),
    ("recurrent", 16, {"hidden": SMALL, "density": 1.0}),
]


def confirmed_trial(study: str, **setting: float | str) -> dict[str, float]:
    """The accuracy, in percent, of a trial of another record."""
    return {"accuracy": STUDIES[study](**setting)["accuracy"]}


def confirmed_plan(run: RunTrials) -> None:
    for study, count, arm in CONFIRMED_ARMS:
        (rate,) = records.read(f"sparsity-{study}").options("learning_rate", **arm, judged_on="test")
        setting = {"study": study, **arm, "learning_rate": rate, "judged_on": "test"}
        run([setting | {"seed": seed} for seed in range(10_700, 10_700 + count)])


GRANULARITY = Experiment(
    "sparsity-granularity",
    "a convolutional net pruned by weights, vectors, kernels, filters and blocks to five densities, tuned",
    granularity_trial, granularity_plan,
    # One unit in the last place of all initial weights moves the dense net's loss by up to 9e-6 after ten steps.
    # The net that is pruned may be another by then: its accuracy, and the groups that it keeps, are compared with the
    # spread over seeds.
    {"accuracy": 1.0, "density": 1e-6, "entries": 1.0, "size": 0.0, "early_loss": 1e-3},
    chaotic=("accuracy", "entries"), drawn={"judged_on": "test"},
)  # fmt: skip

RECURRENT = Experiment(
    "sparsity-recurrent",
    "small and large recurrent nets on MNIST-1D, dense and pruned while they train, tuned",
    recurrent_trial, recurrent_plan,
    # One unit in the last place of all initial weights moves the loss by 2e-6 after twenty steps, at tuned rates; a
    # rate 10 % off moves it by 0.0046 or more.
    {"accuracy": 1.0, "weights": 0.0, "early_loss": 1e-3}, chaotic=("accuracy",), drawn={"judged_on": "test"},
)  # fmt: skip

LONGER_RECORD = Experiment(
    "sparsity-longer",
    "the small recurrent net, dense, trained for three times the epochs, tuned",
    longer_trial, longer_plan, {"accuracy": 1.0}, chaotic=("accuracy",), drawn={"judged_on": "test"},
)  # fmt: skip

# Training lets the last bits grow: accuracies are compared with the spread over seeds.
WAYS_RECORD = Experiment(
    "sparsity-ways",
    "a network on digits, pruned at once and gradually, with three allocations to the layers, tuned",
    ways_trial, ways_plan, {"accuracy": 1.0, "output_density": 0.2},
    chaotic=("accuracy",), drawn={"judged_on": "test"},
)  # fmt: skip

CONFIRMED = Experiment(
    "sparsity-confirmed",
    "the variants of the other records that decide claims, with other seeds",
    confirmed_trial, confirmed_plan, {"accuracy": 1.0},
    chaotic=("accuracy",), drawn={"study": "ways"},
    confirms=(
        "sparsity-gradual", "sparsity-last-layer", "sparsity-granularity", "sparsity-recurrent-90",
        "sparsity-recurrent-large",
    ),
)  # fmt: skip
