"""The recorded experiments of notebook 14: four systems that train one network, tuned alike, watched closely."""

import functools
from collections.abc import Iterable
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from dlscale.course.records import Experiment, RunTrials, read
from dlscale.honest_benchmarks import first_crossing
from dlscale.lab import checks, data, devices, models, train

NETWORK = models.mlp((40, 32, 32, 10))
EXAMPLES, LOOK, OWN = 81_920, 512, 32  # seen in all; from one look to the next; a worker's share of a batch
LOOKS = EXAMPLES // LOOK
SYSTEMS = {"1 worker": (1, 0.0), "1 worker, momentum": (1, 0.9)}  # workers, momentum
SYSTEMS |= {"16 workers": (16, 0.0), "16 workers, momentum": (16, 0.9)}
RATES, LENGTHS = tuple(2.0**k for k in range(-7, 3)), (1, 2, 4, 8)  # lengths of training, times EXAMPLES
TUNING_SEEDS, TEST_SEEDS, RESERVED_SEEDS = (500, 501, 502), range(510, 526), range(11_500, 11_600)
JUDGES = ("validation", "test", "fresh")
FIRST, STAYS = 54.0, 50.0  # targets in percent: for a first crossing; for the time to stay there


@functools.cache
def signals() -> tuple[tuple[np.ndarray, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray]]]:
    """3,000 training signals; to judge by, 1,000 held out of them, the 1,000 of the test set, and 2,000 fresh ones."""
    test, fresh = data.load("mnist1d"), data.load("mnist1d_fresh")
    held_out = data.validation_split(test, fraction=0.25)
    judges = dict(zip(JUDGES, ((d.x_test[:2000], d.y_test[:2000]) for d in (held_out, test, fresh)), strict=True))
    return (held_out.x_train, held_out.y_train), judges


def mean_loss(params: models.Params, x: Array, y: Array) -> Array:
    """Cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(NETWORK.apply(params, x), y).mean()


def percent_right(params: models.Params, judge: tuple[Array, Array]) -> Array:
    """Accuracy in percent. A network that has diverged names the first class always: one in ten is right."""
    return 100 * (jnp.nan_to_num(NETWORK.apply(params, judge[0])).argmax(-1) == judge[1]).mean()


@functools.partial(jax.jit, static_argnames=("batch", "length"))
def race(
    seed: Array, rate: Array, momentum: Array, examples: tuple[Array, Array], judges: dict, batch: int, length: int
) -> tuple[dict, Array, Array]:
    """Accuracy by each judge after each look (looks,); at the end the accuracy in training; the loss of batch 4."""
    key = jax.random.key(seed)
    params, shape = NETWORK.init(key), (LOOKS, LOOK * length // batch, batch)
    rows = jax.random.randint(jax.random.fold_in(key, 1), shape, 0, len(examples[0]))

    def step(state: tuple, rows: Array) -> tuple:
        params, velocity = state
        loss, gradient = jax.value_and_grad(mean_loss)(params, examples[0][rows], examples[1][rows])
        velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient)
        return (jax.tree.map(lambda w, v: w - rate * v, params, velocity), velocity), loss

    def look(state: tuple, rows: Array) -> tuple:
        state, losses = lax.scan(step, state, rows)
        return state, ({name: percent_right(state[0], judge) for name, judge in judges.items()}, losses)

    (params, _), (accuracy, losses) = lax.scan(look, (params, jax.tree.map(jnp.zeros_like, params)), rows)
    return accuracy, percent_right(params, examples), losses.ravel()[3]


def curves(
    system: str, learning_rate: float, seed: int, judges: Iterable[str] = JUDGES, length: int = 1
) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """One run: accuracies in percent (looks,) by judge, at the end in training, and the loss of batch 4."""
    workers, momentum = SYSTEMS[system]
    examples, known = signals()
    given = np.uint32(seed), np.float32(learning_rate), np.float32(momentum)
    return race(*given, examples, {name: known[name] for name in judges}, batch=workers * OWN, length=length)


def watch(system: str, learning_rate: float, seeds: Iterable[int]) -> dict[str, np.ndarray]:
    """Train a system with each seed: accuracy in percent on "test" and "fresh" examples, (runs, looks)."""
    run = lambda seed: curves(system, learning_rate, seed, ("test", "fresh"))[0]  # noqa: E731
    found = devices.side_by_side(run, [(seed,) for seed in seeds])
    return {judge: np.stack([one[judge] for one in found]) for judge in ("test", "fresh")}


def trial(system: str, learning_rate: float, seed: int, length: int = 1, judged_on: str = "test") -> dict[str, float]:
    """What one run comes to: `score` is the mean of the last eight looks, the other accuracies are those at the end.

    At the first crossing of `FIRST` on the test set: `apart`, the test accuracy minus that on fresh examples (NaN if
    it never crosses); `usual` is the mean of this in the second half. `reached`: after how many looks the test
    accuracy was at `STAYS` for three looks in a row, infinite if never.
    """
    accuracy, training, early = jax.device_get(curves(system, learning_rate, seed, JUDGES, length))
    apart, looks = accuracy["test"] - accuracy["fresh"], np.arange(LOOKS)
    first = first_crossing(looks, accuracy["test"], FIRST)
    found = {"score": accuracy[judged_on][-8:].mean(), "train": training}
    found |= {judge: accuracy[judge][-1] for judge in JUDGES}
    found |= {"apart": apart[int(first)] if np.isfinite(first) else np.nan, "usual": apart[LOOKS // 2 :].mean()}
    found["reached"] = 1 + first_crossing(looks, accuracy["test"], STAYS, in_a_row=3)
    found["early_loss"] = np.nan_to_num(early, nan=99).clip(max=99)
    return {name: round(float(value), 3) for name, value in found.items()}


def race_plan(run: RunTrials) -> None:
    """Each system at the best of the same rates, found on held-out examples; one worker's length is tuned, too."""
    seeds = {"tuning_seeds": TUNING_SEEDS, "seeds": TEST_SEEDS, "score": itemgetter("score")}
    for system in SYSTEMS:
        train.tune(run, system=system, length=1, learning_rate=RATES, **seeds)
    train.tune(run, system="1 worker", length=LENGTHS, learning_rate=RATES, **seeds)


def _means(system: str, by: str, lengths: Iterable[int]) -> list[tuple[float, dict[str, float]]]:
    """The mean of a measure over the tuning runs of the record with each setting."""
    checks.known("system", system, SYSTEMS)
    kept = read("honest_benchmarks-race")
    settings = [{"learning_rate": rate, "length": length} for length in lengths for rate in RATES]
    return [(kept.values(by, system=system, judged_on="validation", **one).mean(), one) for one in settings]


def tuned(system: str, by: str = "score", lengths: Iterable[int] = (1,)) -> dict[str, float]:
    """The setting with the highest mean of a measure in the record: "score" on the validation set, or "train".

    Raises ValueError for an unknown system or measure.
    """
    return max(_means(system, by, lengths), key=itemgetter(0))[1]


def best_system(workers: int) -> str:
    """With momentum or without: what the validation set chooses for so many workers."""
    names = [name for name, (count, _) in SYSTEMS.items() if count == workers]
    return max(names, key=lambda name: max(_means(name, "score", (1,)), key=itemgetter(0))[0])


def confirmed_plan(run: RunTrials) -> None:
    """One worker with a hundred seeds; the first 32 for the other systems, and for both ways to choose a length."""
    arms = [(100, {"system": "1 worker"} | tuned("1 worker"))]
    arms += [(32, {"system": system} | tuned(system)) for system in list(SYSTEMS)[1:]]
    arms += [(32, {"system": "1 worker"} | tuned("1 worker", by, LENGTHS)) for by in ("score", "train")]
    for count, arm in arms:
        run([arm | {"seed": seed} for seed in RESERVED_SEEDS[:count]])


ACCURACIES = ("score", "train", *JUDGES, "apart", "usual", "reached")
TOLERANCE = dict.fromkeys(ACCURACIES, 1.0) | {"early_loss": 1e-3}
CONFIRMS = (*(f"honest_benchmarks-{name}" for name in ("best", "search", "power", "crossing", "speed-up", "training")),)
RACE = Experiment(
    "honest_benchmarks-race",
    "four ways to train one network on MNIST-1D, tuned alike, its accuracy looked at 160 times on two test sets",
    trial, race_plan, TOLERANCE, ACCURACIES, {"judged_on": "test"},
)  # fmt: skip
CONFIRMED = Experiment(
    "honest_benchmarks-confirmed",
    "the four systems at their tuned rates, and one worker trained longer, on seeds that nothing else used",
    trial, confirmed_plan, TOLERANCE, ACCURACIES, {"system": "1 worker", "length": 1}, confirms=CONFIRMS,
)  # fmt: skip
