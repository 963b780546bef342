"""The recorded experiments of notebook 04: from which batch on layer-wise rates pay, and what a large batch lacks.

In the first every arm has the same deep network, epochs, warm-up and decay, and a grid of as many rates, each twice
the last. In the second SGD goes through one grid of rates for each batch size, number of epochs and warm-up.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from dlscale.batch_size_and_lars import exact_noise_scale
from dlscale.course import records
from dlscale.course.records import Experiment, Record, RunTrials
from dlscale.lab import data, models, train
from dlscale.lab.data import Dataset

EPOCHS = 40
HIDDEN = (64,) * 6
BATCH_SIZES = (60, 250, 750, 1500, 3000)  # each divides the 3,000 training signals; the last are all of them
TUNING_SEEDS, TEST_SEEDS = (100, 101, 102), range(8)
WEIGHT_DECAY = 5e-4
TRUST_COEFFICIENT = 0.01


def warm_up_and_decay(peak: Array, steps: Array, part: int = 10) -> optax.Schedule:
    """Up to `peak` in a line over a `part`-th of the steps, down to zero along a cosine over all of them."""
    rising = lambda step: peak * jnp.minimum((step + 1) / jnp.ceil(steps / part), 1)  # noqa: E731
    return lambda step: rising(step) * (1 + jnp.cos(jnp.pi * jnp.minimum(step / steps, 1))) / 2


def matrices(params: models.Params) -> models.Params:
    """True for weight matrices, False for biases and for the scales and shifts of a normalisation."""
    return jax.tree.map(lambda parameter: parameter.ndim > 1, params)


def momentum(learning_rate: Array, steps: Array, part: int = 10) -> optax.GradientTransformation:
    decay = optax.add_decayed_weights(WEIGHT_DECAY)
    return optax.chain(decay, optax.sgd(warm_up_and_decay(learning_rate, steps, part), 0.9))


def lars(
    learning_rate: Array, steps: Array, decay: float = WEIGHT_DECAY, part: int = 10, **masks: object
) -> optax.GradientTransformation:
    rate = warm_up_and_decay(learning_rate, steps, part)
    return optax.lars(rate, decay, trust_coefficient=TRUST_COEFFICIENT, momentum=0.9, **masks)


def one_factor(
    learning_rate: Array, steps: Array, factor: optax.GradientTransformation, mask: Callable | None = None
) -> optax.GradientTransformation:
    """LARS's control: `factor` scales the whole network alike; what `mask` leaves out is not decayed."""
    rate = optax.scale_by_learning_rate(warm_up_and_decay(learning_rate, steps))
    return optax.chain(optax.add_decayed_weights(WEIGHT_DECAY, mask), factor, rate, optax.trace(0.9))


ONE_RATIO = optax.flatten(optax.scale_by_trust_ratio(trust_coefficient=TRUST_COEFFICIENT))
ARMS = {
    "momentum": momentum,
    "LARS": lars,
    "LARS, matrices only": partial(lars, weight_decay_mask=matrices, trust_ratio_mask=matrices),
    "LARS, only matrices decayed": partial(lars, weight_decay_mask=matrices),
    "one ratio": partial(one_factor, factor=ONE_RATIO),
    "one ratio, matrices only": partial(one_factor, factor=optax.masked(ONE_RATIO, matrices), mask=matrices),
    "LARS, decay ×100": partial(lars, decay=100 * WEIGHT_DECAY),
    "LARS, only matrices decayed ×100": partial(lars, decay=100 * WEIGHT_DECAY, weight_decay_mask=matrices),
    "length 1": partial(one_factor, factor=optax.normalize_by_update_norm()),
}
EXPONENTS = dict.fromkeys(ARMS, range(-5, 6))  # of 2: the grid of rates
EXPONENTS |= {"momentum": range(-7, 4), "length 1": range(-3, 4)}  # the last has fewer: it may only be underrated


@cache
def _signals(judged_on: str, name: str = "mnist1d") -> Dataset:
    """The same 3,000 training signals, with those held out of them ("validation") or the test set to judge by."""
    signals = data.load(name)
    held_out = data.validation_split(signals, fraction=0.25)
    return replace(held_out, x_test=signals.x_test, y_test=signals.y_test) if judged_on == "test" else held_out


def _sweep(
    optimizer: Callable, norm: str, batch_size: int, learning_rate: float, seed: int, judged_on: str
) -> train.Run:
    """One run of the deep network."""
    signals = _signals(judged_on)
    return train.sweep(
        models.mlp((40, *HIDDEN, 10), norm=None if norm == "none" else norm), signals, optimizer,
        batch_size=batch_size, epochs=EPOCHS, eval_every=EPOCHS, seed=[seed], learning_rate=learning_rate,
        steps=EPOCHS * (len(signals.x_train) // batch_size), progress=False,
    )  # fmt: skip


def trial(arm: str, norm: str, batch_size: int, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracies at the end in percent. A network that has diverged names the first class always: one in ten is right.

    `train_accuracy` is that of the last epoch's minibatches; `second_loss` and `early_loss` are losses after one update
    and after five, at most 99.
    """
    history = _sweep(ARMS[arm], norm, batch_size, learning_rate, seed, judged_on).history
    second_loss, early_loss = np.nan_to_num(history.loss[0, [1, 5]], nan=99).clip(max=99)
    return {
        "accuracy": 100 * history.test_accuracy[0, -1],
        "train_accuracy": 100 * history.accuracy[0, -(len(history.accuracy[0]) // EPOCHS) :].mean(),
        "second_loss": second_loss,
        "early_loss": early_loss,
    }


def plan(run: RunTrials) -> None:
    """Tune all arms on validation data, test each at its best rate; run LARS's controls where it promises most."""
    controls = {
        "none": ("one ratio, matrices only",),
        "batch": ("one ratio", "length 1", *(arm for arm in ARMS if "decay" in arm)),
    }
    for norm, arms in controls.items():
        best = {
            (arm, batch_size): _tune_and_test(run, arm=arm, norm=norm, batch_size=batch_size)
            for batch_size in BATCH_SIZES
            for arm in list(ARMS)[:3]
        }
        promising = max(BATCH_SIZES, key=lambda batch_size: best["LARS", batch_size] - best["momentum", batch_size])
        for arm in arms:
            _tune_and_test(run, arm=arm, norm=norm, batch_size=promising)


def _tune_and_test(run: RunTrials, **setting: object) -> float:
    """The mean validation accuracy of the best rate, which is then tested with other seeds."""
    rates = [2.0**exponent for exponent in EXPONENTS[setting["arm"]]]
    tuned = train.tune(
        run, **setting, learning_rate=rates, tuning_seeds=TUNING_SEEDS, seeds=TEST_SEEDS, score=itemgetter("accuracy")
    )
    return float(tuned.scores.mean(-1).max())


LARS = Experiment(
    "batch_size_and_lars-lars",
    "momentum and LARS, each tuned, for batches of 60 to all 3,000 signals, with and without batch norm",
    trial, plan,
    # One unit in the last place of all initial weights moves the loss, at tuned rates, by 8e-6 after one update, by
    # 0.004 after five and by 0.14 after twenty; a doubled rate moves it by 0.035 or more after five.
    {"accuracy": 1.0, "train_accuracy": 1.0, "second_loss": 1e-4, "early_loss": 0.02},
    chaotic=("accuracy", "train_accuracy"),
    drawn={"judged_on": "test"},  # at tuned rates: beyond them the last bit can decide whether a run recovers
)  # fmt: skip


# Plain SGD: what a large batch lacks

NETWORK = models.mlp((40, 32, 32, 10))
SIZES = (8, 16, 32, 64, 128, 256, 512, 2048)
LADDER = (16, 32, 64, 128, 256)  # epochs
GRID = tuple(2.0**exponent for exponent in range(-5, 5))
SGD_TUNING_SEEDS, SGD_TEST_SEEDS = (200, 201, 202), range(300, 324)


@jax.jit
def descend(
    state: tuple[models.Params, models.Params], rows: Array, rates: Array, momentum: Array, x: Array, y: Array
) -> tuple[tuple[models.Params, models.Params], Array]:
    """SGD with momentum over the batches at `rows` (steps, batch) of the examples, and the loss before each step.

    `state` is weights and velocity, `rates` are (steps,).
    """

    def loss(params: models.Params, batch: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(NETWORK.apply(params, x[batch]), y[batch]).mean()

    def step(state: tuple[models.Params, models.Params], now: tuple[Array, Array]) -> tuple:
        (params, velocity), (batch, rate) = state, now
        value, gradient = jax.value_and_grad(loss)(params, batch)
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient)
        return (jax.tree.map(lambda w, v: w - rate * v, params, velocity), velocity), value

    return lax.scan(step, state, (rows, rates))


fresh_signals = partial(_signals, name="mnist1d_fresh")


def deck(seed: int, epochs: int, examples: int) -> np.ndarray:
    """All examples shuffled, then shuffled anew, and so on."""
    decks = np.tile(np.arange(examples, dtype=np.int16), (epochs, 1))
    return np.random.default_rng(seed).permuted(decks, axis=1).ravel()


_init, _logits = jax.jit(NETWORK.init), jax.jit(NETWORK.apply)


def at_rest(seed: int) -> tuple[models.Params, models.Params]:
    """Initial weights, and no velocity."""
    params = _init(jax.random.key(seed))
    return params, jax.tree.map(jnp.zeros_like, params)


def percent_right(params: models.Params, x: Array, y: Array) -> float:
    """A network that has diverged names the first class always."""
    return 100 * float((np.asarray(_logits(params, x)).argmax(-1) == y).mean())


def sgd_trial(
    batch_size: int, epochs: int, warm_up: int, learning_rate: float, seed: int, judged_on: str
) -> dict[str, float]:
    """Accuracies at the end in percent, and the loss of the batch after 20 updates, at most 99.

    The rate rises in a line over `warm_up` epochs and falls in a line to zero over all of them.
    """
    signals = fresh_signals(judged_on)
    updates = epochs * len(signals.x_train) // batch_size
    rows = deck(seed, epochs, len(signals.x_train))[: updates * batch_size].reshape(updates, batch_size)
    dealt = np.arange(updates) * batch_size / len(signals.x_train)  # in epochs
    rising = np.minimum(1, (dealt + batch_size / len(signals.x_train)) / warm_up) if warm_up else 1.0
    rates = np.float32(learning_rate * (1 - dealt / epochs) * rising)
    (params, _), losses = descend(at_rest(seed), rows, rates, np.float32(0), signals.x_train, signals.y_train)
    return {
        "accuracy": percent_right(params, signals.x_test, signals.y_test),
        "train_accuracy": percent_right(params, signals.x_train, signals.y_train),
        "early_loss": float(np.nan_to_num(losses[20], nan=99).clip(max=99)),
    }


def sgd_plan(run: RunTrials) -> None:
    """Tune the rate of each batch, warm-up and length, and test it with other seeds."""
    arms = [(size, 16, warm_up) for warm_up in (0, 2) for size in SIZES]
    for size, epochs, warm_up in arms + [(size, epochs, 0) for size in (32, 128, 512) for epochs in LADDER[1:]]:
        setting = {"batch_size": size, "epochs": epochs, "warm_up": warm_up, "learning_rate": GRID}
        train.tune(run, **setting, tuning_seeds=SGD_TUNING_SEEDS, seeds=SGD_TEST_SEEDS, score=itemgetter("accuracy"))


SGD = Experiment(
    "batch_size_and_lars-sgd",
    "SGD at ten rates for batches of 8 to 2,048 and 16 to 256 epochs, with and without warm-up",
    sgd_trial, sgd_plan,
    # One unit in the last place of all initial weights moves the loss after 20 updates by less than 1e-6 at batch 32, a
    # doubled rate by 0.007 or more; at batch 128 and its tuned rate the former is 0.06 already.
    {"accuracy": 1.0, "train_accuracy": 1.0, "early_loss": 1e-3}, chaotic=("accuracy", "train_accuracy"),
    drawn={"judged_on": "test", "batch_size": 32},
)  # fmt: skip


# The arms that decide claims, again, with seeds reserved for them


def tuned_rate(record: Record, **setting: object) -> float:
    """The rate that did best on the validation data of a record, mean over its tuning seeds."""
    setting["judged_on"] = "validation"
    rates = record.options("learning_rate", **setting)
    return max(rates, key=lambda rate: record.values("accuracy", learning_rate=rate, **setting).mean())


_claim = "batch_size_and_lars-{}".format
LARS_ARMS = {  # by normalisation; the batches are those where LARS leads by most on the validation data
    ("batch", 750): ("momentum", "LARS", "one ratio", "LARS, only matrices decayed"),
    ("none", 3000): ("momentum", "LARS", "LARS, matrices only"),
}


def lars_confirmation(run: RunTrials) -> None:
    """Each arm at the rate that the record of all arms chose."""
    record = records.read("batch_size_and_lars-lars")
    for (norm, batch_size), arms in LARS_ARMS.items():
        for arm in arms:
            setting = {"arm": arm, "norm": norm, "batch_size": batch_size}
            setting |= {"learning_rate": tuned_rate(record, **setting), "judged_on": "test"}
            run([setting | {"seed": seed} for seed in range(10_416, 10_440)])


LARS_CONFIRMED = replace(
    LARS, id="batch_size_and_lars-lars_confirmed",
    about="The arms of batch_size_and_lars-lars that decide claims, with other seeds",
    plan=lars_confirmation,
    confirms=tuple(map(_claim, ("lars", "lars-norm", "one-ratio", "layers", "lars-matrices", "lars-decay"))),
)  # fmt: skip


def sgd_confirmation(run: RunTrials) -> None:
    """The tuned arms of 16 and 256 epochs, and the linear rule from batch 8 to 128 and from 32 to 512."""
    record = records.read("batch_size_and_lars-sgd")

    def tuned(batch_size: int, epochs: int = 16) -> tuple:
        rate = tuned_rate(record, batch_size=batch_size, epochs=epochs, warm_up=0)
        return batch_size, epochs, 0, rate

    arms = [*map(tuned, (16, 32, 64, 512)), tuned(512, 256), (512, 16, 2, 16 * tuned(32)[-1])]
    arms += [(128, 16, warm_up, 16 * tuned(8)[-1]) for warm_up in (0, 2)]
    for arm in arms:
        setting = dict(zip(("batch_size", "epochs", "warm_up", "learning_rate"), arm, strict=True))
        run([{**setting, "seed": seed, "judged_on": "test"} for seed in range(10_440, 10_464)])


SGD_CONFIRMED = replace(
    SGD, id="batch_size_and_lars-sgd_confirmed",
    about="The arms of batch_size_and_lars-sgd that decide claims, with other seeds",
    plan=sgd_confirmation,
    confirms=tuple(map(_claim, ("warm-up", "warm-up-helps", "equal-epochs", "small-best", "equal-updates"))),
)  # fmt: skip


# Plain SGD at a constant rate: how many steps a batch saves

STEP_SIZES = (8, 16, 32, 64, 128, 256, 512)
FIRST_RATES = (1 / 16, 1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 2, 1 / 2)  # each with the next three powers of two
TARGET, STAGES, LOOKS, PIECE = 1.6, 20, 4, 8


@jax.jit
def _descent(seed: Array, batch_size: Array, rate: Array, every: Array, train: tuple, held_out: tuple) -> tuple:
    """Noise scales before each stage (STAGES,), and held-out losses after each `every` steps (STAGES, LOOKS)."""

    def loss(params: models.Params, x: Array, y: Array) -> Array:
        return optax.softmax_cross_entropy_with_integer_labels(NETWORK.apply(params, x), y).mean()

    def step(at: Array, params: models.Params) -> models.Params:
        def add(piece: Array, total: models.Params) -> models.Params:  # in pieces: one program serves all sizes
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), at), piece)
            rows = jax.random.randint(key, (PIECE,), 0, len(train[0]))
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *(part[rows] for part in train)))

        total = lax.fori_loop(0, batch_size // PIECE, add, jax.tree.map(jnp.zeros_like, params))
        return jax.tree.map(lambda w, g: w - rate * PIECE / batch_size * g, params, total)

    def look(params: models.Params, first: Array) -> tuple[models.Params, Array]:
        params = lax.fori_loop(first, first + every, step, params)
        return params, loss(params, *held_out)

    def stage(params: models.Params, firsts: Array) -> tuple[models.Params, tuple[Array, Array]]:
        signal, noise = exact_noise_scale(loss, params, train)
        params, losses = lax.scan(look, params, firsts)
        return params, (noise / signal, losses)

    firsts = every * jnp.arange(STAGES * LOOKS).reshape(STAGES, LOOKS)
    return lax.scan(stage, NETWORK.init(jax.random.key(seed)), firsts)[1]


def steps_trial(batch_size: int, learning_rate: float, seed: int) -> dict[str, float]:
    """Steps to the target, twice those allowed if it is not reached, and noise scales on the path to it."""
    signals, every = fresh_signals("validation"), 3 + 136 // batch_size
    train, held_out = (signals.x_train, signals.y_train), (signals.x_test, signals.y_test)
    scales, losses = map(np.asarray, _descent(seed, batch_size, learning_rate, every, train, held_out))
    arrived = losses.ravel() <= TARGET
    looks = arrived.argmax() + 1 if arrived.any() else 2 * losses.size
    path = np.interp(np.linspace(0, looks / LOOKS, 50), np.arange(STAGES), scales)
    return {
        "steps": float(looks * every),
        "arrived": float(arrived.any()),
        "first_noise_scale": path[0],
        "mean_noise_scale": path.mean(),
        "last_noise_scale": path[-1],
    }


def steps_plan(run: RunTrials) -> None:
    """Every batch at four rates, all seeds."""
    for size, first in zip(STEP_SIZES, FIRST_RATES, strict=True):
        rates = [{"batch_size": size, "learning_rate": first * factor} for factor in (1, 2, 4, 8)]
        run([{**rate, "seed": seed} for rate in rates for seed in range(10_400, 10_416)])


STEPS = Experiment(
    "batch_size_and_lars-steps",
    f"Steps of SGD to a held-out loss of {TARGET} for batches of 8 to 512, each at four rates, and the noise scale",
    steps_trial, steps_plan,
    {"steps": 1.0, "arrived": 0.0, "first_noise_scale": 0.1, "mean_noise_scale": 1.0, "last_noise_scale": 1.0},
    chaotic=("steps", "arrived", "mean_noise_scale", "last_noise_scale"),
    confirms=tuple(map(_claim, ("no-return", "noise-grows", "noise-scale", "linear-rate", "rate-curve"))),
)  # fmt: skip


# Momentum and LARS with batch norm at batch 750, when the warm-up takes half of the steps


WARM_ARMS = {name: partial(arm, part=2) for name, arm in (("momentum", momentum), ("LARS", lars))}


def warm_trial(arm: str, learning_rate: float, seed: int, judged_on: str) -> dict[str, float]:
    """Accuracy at the end in percent, and the loss after five updates, at most 99."""
    history = _sweep(WARM_ARMS[arm], "batch", 750, learning_rate, seed, judged_on).history
    early_loss = np.nan_to_num(history.loss[0, 5], nan=99).clip(max=99)
    return {"accuracy": 100 * history.test_accuracy[0, -1], "early_loss": early_loss}


def warm_plan(run: RunTrials) -> None:
    """Tune both on validation data, test each at its best rate."""
    for arm in WARM_ARMS:
        rates, seeds = [2.0**exponent for exponent in range(-1, 7)], range(464, 480)
        setting = {"arm": arm, "learning_rate": rates, "tuning_seeds": TUNING_SEEDS, "seeds": seeds}
        train.tune(run, **setting, score=itemgetter("accuracy"))


WARM = Experiment(
    "batch_size_and_lars-warm_up",
    "momentum and LARS with batch norm at batch 750, with a warm-up over half of the steps, each tuned",
    warm_trial, warm_plan,
    {"accuracy": 1.0, "early_loss": 0.02}, chaotic=("accuracy",), drawn={"judged_on": "test"},
)  # fmt: skip
