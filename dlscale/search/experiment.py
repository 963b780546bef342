"""The recorded experiments of notebook 15: a table of training runs to search in, and a grid of sizes of nets and data.

The table has a training run for every point of a space of small networks and hyperparameters, with three seeds, and the
validation accuracy after each epoch: so that any search runs on real results in milliseconds, as on NAS-Bench-101
(Ying et al. 2019).
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from dlscale.course.records import Experiment, Record, RunTrials, read
from dlscale.lab import data, models
from dlscale.lab.models import Layer, Model, Params
from dlscale.search import Asynchronous, Halving, Job, Point, Population, Search, Space, Table, chosen, evolve, run

STRUCTURE = {"convolutions": (0, 1, 2), "layers": (1, 2), "width": (16, 64)}
TRAINING = {
    "rate": tuple(2.0**-i for i in range(7, -1, -1)),
    "momentum": (0.0, 0.9),
    "decay": (0.0, 0.001, 0.01),
    "schedule": ("constant", "cosine"),
}
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


def flops(convolutions: int, layers: int, width: int) -> int:
    """Multiplications and additions of an example, forward, in convolutions and dense layers."""
    places = (18, 8)
    front = [math.prod(shape) * at for shape, at in zip(CONVOLUTIONS.values(), places, strict=True)][:convolutions]
    sizes = [FEATURES[convolutions], *[width] * layers, 10]
    return 2 * (sum(front) + sum(a * b for a, b in itertools.pairwise(sizes)))


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

    def loss(params: Params, x: Array, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    def step(state: Any, batch: tuple[Array, Array]) -> tuple[Any, Array]:
        params, velocity, number = state
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        half = 0.5 * (1 + jnp.cos(jnp.pi * number / total))
        rate = setting["rate"] * (1 + setting["cosine"] * (half - 1))
        velocity = jax.tree.map(
            lambda v, g, p: setting["momentum"] * v + g + setting["decay"] * p, velocity, gradient, params
        )
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
    """Every point; of each structure one first, so that what it compiles is there for the others."""
    for structure in itertools.product(*STRUCTURE.values()):
        settings = [dict(zip(AXES, structure + rest, strict=True)) for rest in itertools.product(*TRAINING.values())]
        run(settings[:1])
        run(settings)


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
FINAL = {
    f"s{seed}{part}": allowed for seed in SEEDS for part, allowed in (("e16", 100.0), ("test", 400.0))
}  # 10 points
TABLE = Experiment(
    "search-table", "1,152 settings of small networks, each trained with three seeds: accuracy after every epoch",
    table_trial, table_plan, dict.fromkeys(NAMES, PACKED_AT_WILL) | FINAL | {"early_loss": 0.02},
    drawn={"convolutions": 0, "momentum": 0.0},  # others take longer to compile, or lie at the edge of stability
)  # fmt: skip


# Populations, against the same members trained without taking over

MEMBERS, PIECES, POPULATION_SEEDS = 16, 8, range(20, 36)
NET = (0, 2, 32)
ARMS: dict[str, dict[str, Any]] = {
    "population-based": {},
    "exploit only": {"explore": False},
    "random search": {"exploit": False},
    "random search, cosine": {"exploit": False, "cosine": 1.0},
}


@functools.partial(jax.jit, static_argnums=0)
def train_members(
    model: Model, state: Any, settings: Mapping[str, Array], rows: Array, total: int, parts: Mapping[str, Any]
) -> tuple[Any, Array, Array]:
    """Train all members, side by side, for the epochs of `rows`; every leaf has an axis of members.

    Returns the state, validation accuracies at the end, and the loss of an early step.
    """
    one = lambda state, setting, rows: train(model, state, setting, rows, total, parts)  # noqa: E731
    state, (counts, losses) = jax.vmap(one)(state, settings, rows)
    return state, counts[:, -1] / JUDGED, losses[:, 0, EARLY]


@functools.partial(jax.jit, static_argnums=0)
def _start_members(model: Model, seeds: Array) -> Any:
    return jax.vmap(lambda seed: start(model, seed))(seeds)


@functools.partial(jax.jit, static_argnums=0)
def _test_members(model: Model, params: Params, x: Array, y: Array) -> Array:
    return jax.vmap(lambda params: right(model, params, x, y))(params) / len(y)


def population(arm: str, seed: int) -> tuple[Population, dict[str, float]]:
    """A population of one arm, and in percent the test accuracy of the member best on validation, and that one's.

    Rate and decay of the members are drawn, and are what changes; momentum is 0.9.
    """
    rng, model, options = np.random.default_rng([seed, 7]), network(*NET), dict(ARMS[arm])
    fixed = {"momentum": np.full(MEMBERS, 0.9, np.float32)}
    fixed["cosine"] = np.full(MEMBERS, options.pop("cosine", 0.0), np.float32)
    drawn = {"rate": 2 ** rng.uniform(-9, -1, MEMBERS), "decay": 10 ** rng.uniform(-5, -2, MEMBERS)}
    numbers = MEMBERS * seed + np.arange(MEMBERS)
    rows = np.stack([order(int(number)) for number in numbers])
    rows, early = rows.reshape(MEMBERS, PIECES, EPOCHS // PIECES, *rows.shape[2:]), []

    def piece(state: Any, settings: Mapping[str, np.ndarray], number: int) -> tuple[Any, np.ndarray]:
        given = dict(settings) | fixed
        state, scores, losses = train_members(model, state, given, rows[:, number], rows[0].size // BATCH, examples())
        early.append(float(losses.mean()))
        return state, scores

    begin = _start_members(model, numbers.astype(np.uint32))
    settings = {name: values.astype(np.float32) for name, values in drawn.items()}
    found = evolve(piece, begin, settings, PIECES, rng, **options)
    best = found.scores[-1].argmax()
    test = 100 * float(_test_members(model, found.state[0], *examples()["test"])[best])
    return found, {"test": test, "validation": 100 * float(found.scores[-1, best]), "early_loss": early[0]}


def population_trial(arm: str, seed: int) -> dict[str, float]:
    """Test and validation accuracy of the member best on validation, in percent; the members' mean early loss."""
    return population(arm, seed)[1]


def population_plan(run: RunTrials) -> None:
    """Every arm with the same seeds: the same members, data and orders."""
    run([{"arm": next(iter(ARMS)), "seed": POPULATION_SEEDS[0]}])
    run([{"arm": arm, "seed": seed} for arm in ARMS for seed in POPULATION_SEEDS])


POPULATIONS = Experiment(
    "search-populations", "population-based training and the same populations without exploiting, with 16 seeds",
    population_trial, population_plan, {"test": 1.0, "validation": 1.0, "early_loss": 0.02},
    chaotic=("test", "validation"), drawn={"arm": "population-based"},
)  # fmt: skip


# Sizes: networks from 118 to 23,050 parameters, training sets from 188 to 6,000 examples

WIDTHS = tuple(2**i for i in range(1, 8))
SIZES = (188, 375, 750, 1500, 3000, 6000)
ADAM_RATES = (2.0**-9, 2.0**-7, 2.0**-5)
BEYOND = {0: (2.0**-11,), 2: (2.0**-3,)}  # by the place of the best of these
SIZES_SEEDS = range(10, 15)
STEPS, SIZES_BATCH, PIECE = 2048, 64, 64
NOTED = tuple(64 * 2**i for i in range(6))  # steps after which the test loss is noted


@functools.cache
def many() -> dict[str, tuple[Array, Array]]:
    """MNIST-1D: 4,000 + 2,000 examples to train on, 1,000 for validation, 2,000 to test."""
    old, fresh = data.load("mnist1d"), data.load("mnist1d_fresh")
    train_x, train_y = (
        np.concatenate(pair) for pair in ((old.x_train, fresh.x_test[:2000]), (old.y_train, fresh.y_test[:2000]))
    )
    parts = {"train": (train_x, train_y), "validation": (old.x_test, old.y_test)}
    return jax.device_put(parts | {"test": (fresh.x_test[2000:], fresh.y_test[2000:])})


def sized(net: str, width: int) -> Model:
    """ "dense": two hidden layers of this width; "convolutional": two convolutions before a dense layer of it."""
    return models.mlp((40, width, width, 10)) if net == "dense" else network(2, 1, width)


@functools.partial(jax.jit, static_argnums=0)
def _grow(model: Model, rate: Array, seed: Array, rows: Array, parts: Mapping[str, Any]) -> tuple[Array, ...]:
    """After each piece of `rows` (pieces, steps, batch): loss of validation and test, accuracy of the test.

    And the loss of each step.
    """
    x, y = parts["train"]
    optimizer = optax.adam(rate)
    params = model.init(jax.random.key(seed))

    def loss(params: Params, x: Array, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    def step(state: Any, rows: Array) -> tuple[Any, Array]:
        params, memory = state
        value, gradient = jax.value_and_grad(loss)(params, x[rows], y[rows])
        updates, memory = optimizer.update(gradient, memory)
        return (optax.apply_updates(params, updates), memory), value

    def piece(state: Any, rows: Array) -> tuple[Any, tuple[Array, ...]]:
        state, losses = jax.lax.scan(step, state, rows)
        judged = loss(state[0], *parts["validation"]), loss(state[0], *parts["test"])
        return state, (*judged, right(model, state[0], *parts["test"]) / len(parts["test"][1]), losses)

    return jax.lax.scan(piece, (params, optimizer.init(params)), rows)[1]


def sizes_trial(net: str, width: int, examples: int, rate: float, seed: int) -> dict[str, float]:
    """Stopped where the validation loss is least: test loss and accuracy (percent), validation loss, steps until then.

    And the test loss after some numbers of steps, that of step 20's minibatch.
    """
    rng, parts = np.random.default_rng(seed), many()
    chosen = rng.permutation(len(parts["train"][1]))[:examples]
    epochs = -(-STEPS * SIZES_BATCH // examples)
    rows = np.concatenate([rng.permutation(chosen) for _ in range(epochs)])[: STEPS * SIZES_BATCH]
    rows = rows.reshape(STEPS // PIECE, PIECE, SIZES_BATCH).astype(np.int32)
    validation, test, accuracy, losses = map(
        np.asarray, _grow(sized(net, width), np.float32(rate), np.uint32(seed), rows, parts)
    )
    best = int(np.argmin(np.nan_to_num(validation, nan=np.inf)))
    found = {"loss": test[best], "validation": validation[best], "accuracy": 100 * accuracy[best]}
    found |= {f"after{steps}": test[steps // PIECE - 1] for steps in NOTED} | {"early_loss": losses[0, EARLY]}
    return {name: round(float(value), 4) for name, value in found.items()} | {"steps": PIECE * (best + 1)}


def sizes_plan(run: RunTrials) -> None:
    """Every width with every number of examples, and one convolutional net with each of these; three rates each.

    And where the best of them, by the validation loss, is the first or the last, the rate beyond it.
    """
    pairs = [*(("dense", width) for width in WIDTHS), ("convolutional", 64)]
    for (net, width), size in itertools.product(pairs, SIZES):

        def trained(rates: tuple[float, ...], at: Any = (net, width, size)) -> list[float]:
            given = ((*at, *rest) for rest in itertools.product(rates, SIZES_SEEDS))
            settings = [dict(zip(("net", "width", "examples", "rate", "seed"), one, strict=True)) for one in given]
            run(settings[:1])  # what it compiles is there for the others
            return [found["validation"] for found in run(settings)]

        losses = np.reshape(trained(ADAM_RATES), (len(ADAM_RATES), -1)).mean(1)
        trained(BEYOND.get(int(np.nan_to_num(losses, nan=np.inf).argmin()), ()))


SIZES_RUN = Experiment(
    "search-sizes", "test loss against the sizes of network and training set, early stopped, at three or four rates",
    sizes_trial, sizes_plan,
    {"loss": 0.05, "validation": 0.05, "accuracy": 2.0, "early_loss": 0.02, "steps": 64.0}
    | dict.fromkeys((f"after{steps}" for steps in NOTED), 0.05),
    chaotic=("loss", "validation", "accuracy", "steps", *(f"after{steps}" for steps in NOTED)),
    drawn={"net": "dense", "width": 16},
)  # fmt: skip


# Many workers, some slow jobs: searches on the table, in simulated time

WORKERS, SLOW_SHARE, HORIZON = 16, 0.2, 4 * EPOCHS
CHOOSING, JUDGING = range(300, 340), range(7000, 7300)  # pairs that choose both rivals, and those that judge them


class Busy(Search):
    """Synchronous halving that leaves no worker idle: where every open bracket waits, it begins another."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given)
        self.given, self.options, self.open, self.owner = given, options, [], {}

    def ask(self) -> Job:
        for bracket in self.open:
            if (job := bracket.ask()) is not None:
                break
        else:
            bracket = Halving(*self.given, **self.options)
            bracket.asked = self.asked  # no point twice, whichever bracket it is in
            self.open.append(bracket)
            job = bracket.ask()
        self.owner[job[0]] = bracket
        return job

    def tell(self, point: Point, epochs: int, score: float) -> None:
        self.owner[point].tell(point, epochs, score)


def _way(kind: type[Search], first: int) -> Callable[..., Search]:
    return lambda *given, keep: kind(*given, keep=keep, plan=[(first, 1)])


WAITING = {
    "halving": _way(Halving, 16), "halving, brackets of 64": _way(Halving, 64),
    "halving, always busy": _way(Busy, 16), "halving, always busy, of 64": _way(Busy, 64),
}  # fmt: skip
WAYS = WAITING | {"asynchronous halving": Asynchronous}


@functools.cache
def _recorded() -> Table:
    return table(read("search-table"))


def clock_trial(method: str, keep: int, factor: int, seed: int) -> dict[str, float]:
    """Test accuracy in percent of the setting chosen after the time of four full trainings; some jobs are slow.

    A job in five takes `factor` times as long; `keep`: one of how many goes on.
    """
    ours, luck, slow = np.random.default_rng([seed, 8]).spawn(3)
    search = WAYS[method](Space(AXES), ours, EPOCHS, keep=keep)

    def seconds(point: Point, epochs: int) -> int:
        return epochs * (factor if slow.random() < SLOW_SHARE else 1)

    log = run(search, _recorded().scorer(luck), WORKERS * HORIZON, WORKERS, seconds)
    return {"accuracy": round(100 * float(chosen(log, _recorded(), [HORIZON], "end")[0]), 4)}


def clock_plan(run: RunTrials) -> None:
    """Every way with one of 2 and one of 4 kept, on seeds that choose; on others the best that does not wait.

    And the best two that wait.
    """

    def asked(method: str, keep: int, seeds: range) -> float:
        some = [{"method": method, "keep": keep, "factor": f, "seed": seed} for f in (4, 1) for seed in seeds]
        return float(np.mean([found["accuracy"] for found in run(some)[: len(seeds)]]))  # with slow jobs

    for ways, judged in ((WAITING, 2), (WAYS.keys() - WAITING, 1)):
        means = {arm: asked(*arm, CHOOSING) for arm in itertools.product(ways, (2, 4))}
        for arm in sorted(means, key=lambda arm: -means[arm])[:judged]:
            asked(*arm, JUDGING)


CLOCKS = Experiment(
    "search-workers", "halving that waits and halving that does not: what is chosen in the same time, some jobs slow",
    clock_trial, clock_plan, {"accuracy": 1e-3},
)  # fmt: skip
