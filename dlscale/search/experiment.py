"""The recorded experiments: a table of training runs to search in, searches that train, and sizes of nets and data.

The table has a training run for every point of a space of small networks and hyperparameters, with three seeds, and the
validation accuracy after each epoch: so that any search runs on real results in milliseconds, as on NAS-Bench-101
(Ying et al. 2019).
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from dlscale.course.records import Experiment, Record, RunTrials
from dlscale.lab import data, models
from dlscale.lab.models import Layer, Model, Params
from dlscale.search import Evolution, Halving, Point, Search, Space, Table, run, winner

STRUCTURE = {"convolutions": (0, 1, 2), "layers": (1, 2), "width": (16, 64)}
TRAINING = {"rate": tuple(2.0**-i for i in range(7, -1, -1)), "momentum": (0.0, 0.9)}
TRAINING |= {"decay": (0.0, 0.001, 0.01), "schedule": ("constant", "cosine")}
AXES = STRUCTURE | TRAINING
EPOCHS, BATCH, SEEDS = 16, 50, range(3)
JUDGED, TESTED = 1000, 4000  # examples of which an accuracy is counted: of validation and of the test
PACKED = 5  # epochs in one number: three decimal digits each, the right answers of a thousand
EARLY = 20  # the step whose loss hardly hangs on the machine

# Networks and their training

CONVOLUTIONS = {"conv1": (5, 1, 8), "conv2": (3, 8, 16)}  # places that a kernel sees, channels in, channels out
FEATURES = (40, 18 * 8, 8 * 16)  # what comes out of no, one and two convolutions of 40 numbers


def _convolve(own: Params, x: Array) -> Array:
    """A convolution in steps of two: x is (examples, places) or (examples, places, channels)."""
    kernel, channels, _ = own["w"].shape
    x = x.reshape(*x.shape[:2], channels)
    places = (x.shape[1] - kernel) // 2 + 1
    windows = jnp.concatenate([x[:, i : i + 2 * places : 2] for i in range(kernel)], axis=-1)
    return windows @ own["w"].reshape(kernel * channels, -1) + own["b"]


@functools.cache
def network(convolutions: int, layers: int, width: int) -> Model:
    """Convolutions, dense hidden layers, ten classes."""
    head = models.mlp((FEATURES[convolutions], *[width] * layers, 10))
    front = dict(list(CONVOLUTIONS.items())[:convolutions])

    def init(key: Array) -> Params:
        params = head.init(key)
        for number, (name, shape) in enumerate(front.items()):
            drawn = jax.random.normal(jax.random.fold_in(key, number), shape)
            params[name] = {"w": math.sqrt(2 / (shape[0] * shape[1])) * drawn, "b": jnp.zeros(shape[2])}
        return params

    return Model(init, dict.fromkeys(front, Layer(_convolve, jax.nn.relu)) | dict(head.layers))


def parameters(model: Model) -> int:
    """Numbers that are trained."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(jax.eval_shape(model.init, jax.random.key(0))))


@functools.cache
def examples() -> dict[str, tuple[Array, Array]]:
    """MNIST-1D: 3,000 examples to train on, 1,000 others for validation; the test has 4,000 fresh ones."""
    full = data.load("mnist1d_fresh")
    held_out = data.validation_split(full, fraction=0.25)
    parts = {"train": (held_out.x_train, held_out.y_train), "validation": (held_out.x_test, held_out.y_test)}
    return jax.device_put(parts | {"test": (full.x_test, full.y_test)})


@functools.cache
def order(seed: int, epochs: int = EPOCHS) -> np.ndarray:
    """(epochs, steps, batch) rows of the training examples."""
    rng, count = np.random.default_rng(seed), 3 * JUDGED
    return np.stack([rng.permutation(count).reshape(-1, BATCH) for _ in range(epochs)]).astype(np.int32)


def mean_loss(params: Params, model: Model, x: Array, y: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()


def right(model: Model, params: Params, x: Array, y: Array) -> Array:
    """How many examples are classified rightly; of a net that diverged, those of the first class."""
    return (model.apply(params, x).argmax(-1) == y).sum()


def start(model: Model, seed: Array) -> tuple[Params, Params, Array]:
    """Parameters, velocities, and the number of the next step."""
    params = model.init(jax.random.key(seed))
    return params, jax.tree.map(jnp.zeros_like, params), jnp.int32(0)


def train(
    model: Model, state: Any, setting: Mapping[str, Array], rows: Array, total: int, parts: Mapping[str, Any]
) -> tuple[Any, tuple[Array, Array]]:
    """Train for the epochs of `rows`; return the state, and after each epoch right answers and the steps' losses.

    `setting` has numbers: rate, momentum, decay, and cosine, 1 if the rate falls to 0 in `total` steps, else 0.
    """
    x, y = parts["train"]
    momentum, decay = setting["momentum"], setting["decay"]

    def step(state: Any, batch: tuple[Array, Array]) -> tuple[Any, Array]:
        params, velocity, number = state
        value, gradient = jax.value_and_grad(mean_loss)(params, model, *batch)
        half = 0.5 * (1 + jnp.cos(jnp.pi * number / total))
        rate = setting["rate"] * (1 + setting["cosine"] * (half - 1))
        velocity = jax.tree.map(lambda v, g, p: momentum * v + g + decay * p, velocity, gradient, params)
        return (jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity, number + 1), value

    def epoch(state: Any, rows: Array) -> tuple[Any, tuple[Array, Array]]:
        state, losses = jax.lax.scan(step, state, (x[rows], y[rows]))
        return state, (right(model, state[0], *parts["validation"]), losses)

    return jax.lax.scan(epoch, state, rows)


@functools.partial(jax.jit, static_argnums=0)
def _three(
    model: Model, setting: Mapping[str, Array], seeds: Array, rows: Array, parts: Mapping[str, Any]
) -> tuple[Array, Array, Array]:
    """Side by side, for each seed: right answers of validation after each epoch, those of the test, an early loss."""

    def one(seed: Array, rows: Array) -> tuple[Array, Array, Array]:
        state, (counts, losses) = train(model, start(model, seed), setting, rows, rows.size // BATCH, parts)
        return counts, right(model, state[0], *parts["test"]), losses[0, EARLY]

    return jax.vmap(one)(seeds, rows)


def numbers(rate: float, momentum: float, decay: float, schedule: str) -> dict[str, np.float32]:
    """A setting as the numbers that `train` takes."""
    given = {"rate": rate, "momentum": momentum, "decay": decay, "cosine": schedule == "cosine"}
    return {name: np.float32(value) for name, value in given.items()}


# The table


def table_trial(
    convolutions: int, layers: int, width: int, rate: float, momentum: float, decay: float, schedule: str
) -> dict[str, float]:
    """A point of the space, trained with each seed.

    "s0e6": the right answers of a thousand after epochs 6 to 10 of seed 0, three digits each; "s0e16" those after the
    last; "s0test" of the test's four thousand; "early_loss": the seeds' mean loss at an early step.
    """
    model, setting = network(convolutions, layers, width), numbers(rate, momentum, decay, schedule)
    rows = np.stack([order(seed) for seed in SEEDS])
    counts, tested, early = _three(model, setting, np.array(SEEDS, np.uint32), rows, examples())
    found = {}
    for seed in SEEDS:
        digits = np.minimum(np.asarray(counts[seed]), 999).astype(int)
        for first in range(0, EPOCHS, PACKED):
            found[f"s{seed}e{first + 1}"] = functools.reduce(lambda a, b: 1000 * a + b, digits[first : first + PACKED])
        found[f"s{seed}test"] = tested[seed]
    return {name: int(value) for name, value in found.items()} | {"early_loss": round(float(early.mean()), 5)}


def unpack(measures: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """Of a trial: validation accuracy (seeds, epochs) and test accuracy (seeds,), fractions."""

    def curve(seed: int) -> list[float]:
        firsts = range(1, EPOCHS + 1, PACKED)
        text = "".join(f"{int(measures[f's{seed}e{e}']):0{3 * min(PACKED, EPOCHS + 1 - e)}d}" for e in firsts)
        return [int(text[i : i + 3]) / JUDGED for i in range(0, len(text), 3)]

    return np.array([curve(seed) for seed in SEEDS]), np.array([measures[f"s{seed}test"] / TESTED for seed in SEEDS])


def table_plan(run: RunTrials) -> None:
    """Every point."""
    run([dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())])


def table(record: Record) -> Table:
    """The record as a table to search in."""
    space = Space(AXES)
    curves, tested = np.zeros((*space.sizes, len(SEEDS), EPOCHS)), np.zeros((*space.sizes, len(SEEDS)))
    for trial in record.trials:
        point = tuple(values.index(trial.setting[name]) for name, values in AXES.items())
        curves[point], tested[point] = unpack(trial.measures)
    return Table(space, curves, tested)


NAMES = [f"s{seed}{part}" for seed in SEEDS for part in (*(f"e{e + 1}" for e in range(0, EPOCHS, PACKED)), "test")]
PACKED_AT_WILL = 1e18  # curves in one number each: the last epoch and the test stand by themselves
FINAL = {f"s{seed}{part}": points for seed in SEEDS for part, points in (("e16", 100.0), ("test", 400.0))}  # 10 points
TABLE = Experiment(
    "search-table", "1,152 settings of small networks, each trained with three seeds: accuracy after every epoch",
    table_trial, table_plan, dict.fromkeys(NAMES, PACKED_AT_WILL) | FINAL | {"early_loss": 0.02},
    drawn={"convolutions": 0, "momentum": 0.0},  # others take longer to compile, or lie at the edge of stability
)  # fmt: skip


# The race: searches that train, on reserved seeds

BUDGET, MEMBERS, PIECE_EPOCHS = 640, 40, 2
RACE_SEEDS = range(11_600, 11_632)
AGAIN = 3  # trainings of a setting that is judged
RACERS = {"random": Search, "evolution": Evolution, "halving": Halving}  # as they come: halving keeps one of four


@functools.partial(jax.jit, static_argnums=0)
def _epoch(
    model: Model, state: Any, setting: Mapping[str, Array], rows: Array, parts: Mapping[str, Any]
) -> tuple[Any, Array, Array]:
    """One epoch: the state, right answers of validation, and the loss of an early step."""
    state, (counts, losses) = train(model, state, setting, rows, EPOCHS * rows.size // BATCH, parts)
    return state, counts[0], losses[0, EARLY]


_right, _start = jax.jit(right, static_argnums=0), jax.jit(start, static_argnums=0)


class Network:
    """One network in training: `train` continues it, `validation` is its accuracy now."""

    def __init__(self, point: Point, seed: int) -> None:
        setting = Space(AXES).setting(point)
        self.model = network(*(setting[name] for name in STRUCTURE))
        self.setting = numbers(*(setting[name] for name in TRAINING))
        self.state, self.rows, self.epochs = _start(self.model, np.uint32(seed)), order(seed), 0

    def train(self, epochs: int) -> float:
        """Train up to so many epochs in all; return the validation accuracy then."""
        for number in range(self.epochs, epochs):
            rows = self.rows[number : number + 1]
            self.state, count, early = _epoch(self.model, self.state, self.setting, rows, examples())
            self.early_loss = self.early_loss if number else float(early)
            self.validation = int(count) / JUDGED
        self.epochs = epochs
        return self.validation

    def test(self) -> float:
        return int(_right(self.model, self.state[0], *examples()["test"])) / TESTED

    def copy(self, other: "Network") -> None:
        """Take over the weights, the structure and the settings of another."""
        self.model, self.state, self.setting = other.model, other.state, dict(other.setting)


class Training:
    """What `Lookup` is for a table, with training in its place: called with a point and its epochs."""

    def __init__(self, seed: int) -> None:
        self.seeds, self.networks = np.random.default_rng([seed, 1]), {}

    def __call__(self, point: Point, epochs: int) -> float:
        if point not in self.networks:
            self.networks[point] = Network(point, int(self.seeds.integers(2**31)))
        return self.networks[point].train(epochs)


def evolve(seed: int) -> list[Network]:
    """Population-based training (Jaderberg et al. 2017): the members at the end.

    They begin as the trials of random search with this seed. After every piece of two epochs but the last, the worst
    quarter take over weights and settings of one of the best quarter each.
    """
    search, training = Search(Space(AXES), np.random.default_rng(seed), EPOCHS), Training(seed)
    points, rng = [search.ask()[0] for _ in range(MEMBERS)], np.random.default_rng([seed, 2])
    for epochs in range(PIECE_EPOCHS, EPOCHS + 1, PIECE_EPOCHS):
        ranked = np.argsort([training(point, epochs) for point in points])
        members = [training.networks[point] for point in points]
        if epochs < EPOCHS:
            losers, leaders = ranked[: MEMBERS // 4], rng.permutation(ranked[-(MEMBERS // 4) :])
            for loser, leader in sorted(zip(losers, leaders, strict=True)):
                members[loser].copy(members[leader])
                for name in ("rate", "decay"):
                    members[loser].setting[name] *= np.float32(rng.choice([0.8, 1.2]))
    return members


def race_trial(method: str, seed: int) -> dict[str, float]:
    """What a search hands over after 640 epochs of training, in percent: its network's test and validation accuracy.

    Of random search also the test accuracy after 1,280 epochs, and that of the setting chosen after 640, trained again.
    """
    twice = again = math.nan
    if method == "population":
        first, *_ = members = evolve(seed)
        best = max(members, key=lambda member: member.validation)
    else:
        training = Training(seed)
        search = RACERS[method](Space(AXES), np.random.default_rng(seed), EPOCHS)
        log = run(search, training, BUDGET * (1 + (method == "random")))
        point = winner(log, EPOCHS, BUDGET)
        best, first = training.networks[point], training.networks[log[0].point]
        if method == "random":
            twice = 100 * training.networks[winner(log, EPOCHS)].test()
            new = [Network(point, int(other)) for other in np.random.default_rng([seed, 3]).integers(2**31, size=AGAIN)]
            for one in new:
                one.train(EPOCHS)
            again = 100 * float(np.mean([one.test() for one in new]))
    found = {"test": 100 * best.test(), "validation": 100 * best.validation, "twice": twice, "again": again}
    return {name: round(value, 3) for name, value in found.items()} | {"early_loss": round(first.early_loss, 5)}


def race_plan(run: RunTrials) -> None:
    """Every method with the same seeds: the same first settings, weights and orders."""
    run([{"method": method, "seed": seed} for seed in RACE_SEEDS for method in (*RACERS, "population")])


RACE = Experiment(
    "search-race", "random search, evolution, halving and population-based training, 640 epochs each, reserved seeds",
    race_trial, race_plan,
    dict.fromkeys(("test", "validation", "twice", "again"), 2.0) | {"early_loss": 0.02},
    chaotic=("test", "validation", "twice", "again"), drawn={"method": "population"},
    confirms=("search-evolution", "search-population", "search-halving", "search-flatter"),
)  # fmt: skip


# Sizes of networks and training sets, for a scaling law, on reserved seeds

WIDTHS = tuple(2**i for i in range(1, 8))
SIZES = (188, 375, 750, 1500, 3000, 6000)
# Adam's rate, a power of two: the best of three or four, by the validation loss of seeds 10 to 14
RATES = {("dense", width, 6000): power for width, power in zip(WIDTHS, (-5, -5, -5, -7, -7, -7, -7), strict=True)}
RATES |= {("dense", 128, size): power for size, power in zip(SIZES, (-11, -11, -11, -9, -7, -7), strict=True)}
RATES |= {("convolutional", 64, size): -5 for size in (750, 6000)}
SIZES_SEEDS = range(11_640, 11_656)
STEPS, SIZES_BATCH, PIECE = 2048, 64, 64


@functools.cache
def many() -> dict[str, tuple[Array, Array]]:
    """MNIST-1D: 4,000 + 2,000 examples to train on, 1,000 for validation, 2,000 to test."""
    old, fresh = data.load("mnist1d"), data.load("mnist1d_fresh")
    more, test = ((fresh.x_test[some], fresh.y_test[some]) for some in (slice(2000), slice(2000, None)))
    full = tuple(map(np.concatenate, zip((old.x_train, old.y_train), more, strict=True)))
    return jax.device_put({"train": full, "validation": (old.x_test, old.y_test), "test": test})


def sized(net: str, width: int) -> Model:
    """ "dense": two hidden layers of this width; "convolutional": two convolutions before a dense layer of it."""
    return models.mlp((40, width, width, 10)) if net == "dense" else network(2, 1, width)


@functools.partial(jax.jit, static_argnums=0)
def _grow(model: Model, rate: Array, seed: Array, rows: Array, parts: Mapping[str, Any]) -> tuple[Array, ...]:
    """After each piece of `rows` (pieces, steps, batch): loss of validation and test, accuracy of the test.

    And the loss of each step.
    """
    (x, y), optimizer, params = parts["train"], optax.adam(rate), model.init(jax.random.key(seed))

    def step(state: Any, rows: Array) -> tuple[Any, Array]:
        params, memory = state
        value, gradient = jax.value_and_grad(mean_loss)(params, model, x[rows], y[rows])
        updates, memory = optimizer.update(gradient, memory)
        return (optax.apply_updates(params, updates), memory), value

    def piece(state: Any, rows: Array) -> tuple[Any, tuple[Array, ...]]:
        state, losses = jax.lax.scan(step, state, rows)
        judged = [mean_loss(state[0], model, *parts[part]) for part in ("validation", "test")]
        return state, (*judged, right(model, state[0], *parts["test"]) / len(parts["test"][1]), losses)

    return jax.lax.scan(piece, (params, optimizer.init(params)), rows)[1]


def sizes_trial(net: str, width: int, examples: int, seed: int) -> dict[str, float]:
    """Stopped where the validation loss is least: test loss and accuracy (percent), steps until then.

    And the loss of step 20's minibatch.
    """
    rng, parts, rate = np.random.default_rng(seed), many(), 2.0 ** RATES[net, width, examples]
    chosen = rng.permutation(len(parts["train"][1]))[:examples]
    epochs = -(-STEPS * SIZES_BATCH // examples)
    rows = np.concatenate([rng.permutation(chosen) for _ in range(epochs)])[: STEPS * SIZES_BATCH]
    rows = rows.reshape(STEPS // PIECE, PIECE, SIZES_BATCH).astype(np.int32)
    validation, test, accuracy, losses = map(
        np.asarray, _grow(sized(net, width), np.float32(rate), np.uint32(seed), rows, parts)
    )
    best = int(np.argmin(np.nan_to_num(validation, nan=np.inf)))
    found = {"loss": test[best], "accuracy": 100 * accuracy[best], "early_loss": losses[0, EARLY]}
    return {name: round(float(value), 4) for name, value in found.items()} | {"steps": PIECE * (best + 1)}


def sizes_plan(run: RunTrials) -> None:
    """Dense nets of every width on all examples, the widest on fewer, a convolutional net on 750 and on all."""
    for net, width, examples in RATES:
        run([{"net": net, "width": width, "examples": examples, "seed": seed} for seed in SIZES_SEEDS])


SIZES_RUN = Experiment(
    "search-sizes", "test loss against the sizes of network and training set, stopped early, reserved seeds",
    sizes_trial, sizes_plan, {"loss": 0.05, "accuracy": 2.0, "early_loss": 0.02, "steps": 64.0},
    chaotic=("loss", "accuracy", "steps"), drawn={"net": "dense", "width": 16},
    confirms=("search-bigger", "search-cleverness", "search-parameters", "search-examples"),
)  # fmt: skip
