"""Training as one compiled program whose inputs are the hyperparameters and the seed.

A new learning rate, momentum or seed is only another input, so nothing is compiled again. `run` drives any step in
compiled pieces; `fit` stands on it and goes epoch by epoch; `sweep` puts the same pieces into one program and runs it
for every setting of a grid, one setting a core. On a CPU this beats `vmap` over the settings: each core has its own
run, memory is that of one run a core, and a sweep's run equals `fit` bit for bit. `tune` chooses among settings.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from tqdm.auto import tqdm

from dlscale.lab import checks, devices, models
from dlscale.lab.data import Dataset, validation_split
from dlscale.lab.models import Model, Params

Tree = Any  # a pytree of arrays
Loss = Callable[[Array, Array], Array]
Optimizer = optax.GradientTransformation | Callable[..., optax.GradientTransformation]

COPY_AT_MOST = 2**24  # numbers of training data gathered for a whole epoch: faster than step by step, takes memory

LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda logits, y: optax.softmax_cross_entropy(logits, jax.nn.one_hot(y, logits.shape[-1])),
    "squared": lambda logits, y: jnp.sum((logits - jax.nn.one_hot(y, logits.shape[-1])) ** 2, axis=-1),
}


# Any step


class Driven(NamedTuple):
    """Where `run` came to, and what was noted on the way: arrays with the steps, or the looks, as their first axis."""

    state: Tree
    records: Tree
    looks: Tree


def run(
    step: Callable[..., tuple[Tree, Tree]],
    state: Tree,
    inputs: Tree,
    *given: Tree,
    look: Callable[..., Tree] | None = None,
    every: int | None = None,
    stop: Callable[[Tree, Tree], bool] | None = None,
    progress: bool = True,
) -> Driven:
    """Call `state, record = step(state, input, *given)` for all `inputs` (steps, …), compiled as `lax.scan`.

    After each `every` steps (default: at the end) `look(state, *given)` is noted, too, and `stop(records, look)`, with
    the latest ones, may end the run. Between two looks nothing leaves the compiled program: Ctrl-C and the progress bar
    wait for the next. What is `given` is data: the same functions `step` and `look` with other values are not compiled
    again. Raises ValueError for no inputs and an `every` below 1.
    """
    steps = len(jax.tree.leaves(inputs)[0])
    checks.whole("The number of inputs", steps)
    every = steps if every is None else checks.whole("every", every)
    parts = []
    with tqdm(total=steps, desc="training", delay=1, leave=False, disable=not progress) as bar:
        for begin in range(0, steps, every):
            part = jax.tree.map(lambda leaf, i=begin: leaf[i : i + every], inputs)
            state, noted = _piece(step, look, state, part, given)
            parts.append(jax.device_get(noted))
            bar.update(len(jax.tree.leaves(part)[0]))
            if stop is not None and stop(*parts[-1]):
                break
    records, looks = zip(*parts, strict=True)
    return Driven(state, jax.tree.map(lambda *a: np.concatenate(a), *records), _stack(looks))


def _scan(step: Callable, look: Callable | None, state: Tree, inputs: Tree, given: tuple) -> tuple[Tree, tuple]:
    """Some steps and a look at where they led."""
    state, records = lax.scan(lambda state, one: step(state, one, *given), state, inputs)
    return state, (records, look(state, *given) if look else None)


_piece = jax.jit(_scan, static_argnums=(0, 1))


def _stack(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


# A model on a data set


class History(NamedTuple):
    """What training recorded. A sweep's arrays have the grid's axes in front."""

    loss: np.ndarray  # (steps,) mean loss of each step's minibatch, before its update
    accuracy: np.ndarray  # (steps,) fraction of that minibatch classified rightly
    test_loss: np.ndarray  # (evaluations,)
    test_accuracy: np.ndarray  # (evaluations,)
    evaluated_at: np.ndarray  # (evaluations,) steps taken by then; without a grid's axes


class Run(NamedTuple):
    """A trained model's parameters, None where they were not to be kept, and its history."""

    params: Params | None
    history: History

    @property
    def diverged_at(self) -> np.ndarray:
        """First step whose loss was not finite; -1 if there is none."""
        bad = ~np.isfinite(self.history.loss)
        return np.where(bad.any(-1), bad.argmax(-1), -1)


class Sweep(NamedTuple):
    """A grid of runs. `axes` names the grid's axes, in order, and holds their values."""

    axes: dict[str, tuple[float, ...]]
    history: History
    diverged_at: np.ndarray  # (*axes,) first step whose loss was not finite; -1 where none
    params: Params | None  # stacked along the axes, if they were to be kept


class Diverged(FloatingPointError):
    """The training loss became NaN or infinite. `.run` holds parameters and history up to there."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


@dataclasses.dataclass(frozen=True)
class _Training:
    """What is compiled: the parts of a run as functions of its state, (parameters, the optimizer's memory)."""

    model: Model
    optimizer: Optimizer
    batch_size: int
    loss: Loss
    shuffle: bool | str

    def transformation(self, setting: dict[str, Array]) -> optax.GradientTransformation:
        if not isinstance(self.optimizer, optax.GradientTransformation):
            return self.optimizer(**setting)
        if setting:
            names = ", ".join(setting)
            raise ValueError(f"This optimizer is ready made: pass the function that makes it to set {names}.")
        return self.optimizer

    def start(self, setting: dict[str, Array], seed: Array) -> tuple[Params, Tree]:
        params = self.model.init(jax.random.fold_in(jax.random.key(seed), 0))
        return params, self.transformation(setting).init(params)

    def step(self, setting: dict[str, Array], state: tuple[Params, Tree], batch: tuple[Array, Array]) -> tuple:
        def batch_loss(params: Params, x: Array, y: Array) -> tuple[Array, Array]:
            logits = self.model.apply(params, x)
            return self.loss(logits, y).mean(), (logits.argmax(-1) == y).mean()

        params, memory = state
        results, gradient = jax.value_and_grad(batch_loss, has_aux=True)(params, *batch)
        updates, memory = self.transformation(setting).update(gradient, memory, params)
        return (optax.apply_updates(params, updates), memory), results

    def epoch(self, state: Tree, number: Array, setting: dict[str, Array], seed: Array, data: Sequence[Array]) -> tuple:
        x, y, *_ = data
        order = self.order(seed, number, len(x))

        def gather(rows: Array) -> tuple[Array, Array]:
            return x[rows], y[rows]

        if x.size <= COPY_AT_MOST:
            return lax.scan(functools.partial(self.step, setting), state, gather(order))
        return lax.scan(lambda state, rows: self.step(setting, state, gather(rows)), state, order)

    def order(self, seed: Array, number: Array, examples: int) -> Array:
        """Rows of the examples for each step of an epoch, (steps, batch)."""
        order = jnp.arange(examples)
        if self.shuffle:
            key = jax.random.fold_in(jax.random.key(seed), 1)
            order = _permutation(jax.random.fold_in(key, 0 if self.shuffle == "once" else number), examples)
        return order[: examples // self.batch_size * self.batch_size].reshape(-1, self.batch_size)

    def test(self, state: Tree, setting: dict[str, Array], seed: Array, data: Sequence[Array]) -> tuple[Array, Array]:
        x_train, _, x_test, y_test = data
        return evaluate(self.model, models.freeze(self.model, state[0], x_train), x_test, y_test, self.loss)


_training = functools.lru_cache(maxsize=256)(_Training)  # the same object, so that what was compiled is found again
_start = jax.jit(_Training.start, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def _whole(
    training: _Training, setting: dict[str, Array], seed: Array, epochs: Array, data: Sequence[Array]
) -> tuple[Params, tuple]:
    """A run from its beginning to its end; epochs (evaluations, epochs between them)."""
    given = setting, seed, data
    one_look = functools.partial(_scan, training.epoch, training.test)
    (params, _), noted = lax.scan(
        lambda state, some: one_look(state, some, given), _start(training, *given[:2]), epochs
    )
    return params, noted


@dataclasses.dataclass(frozen=True, eq=False)
class _Task:
    """What `fit` and its likes are asked for, checked."""

    model: Model
    dataset: Dataset
    optimizer: Optimizer
    batch_size: int
    epochs: int
    loss: str | Loss = "cross_entropy"
    shuffle: bool | str = True
    eval_every: int = 1

    def __post_init__(self) -> None:
        dataset, examples = self.dataset, len(self.dataset.x_train)
        why = f"{dataset.name} has {examples} training examples."
        checks.whole("batch_size", self.batch_size, high=examples, why=why)
        checks.whole("epochs", self.epochs)
        checks.whole("eval_every", self.eval_every, high=self.epochs)
        if self.epochs % self.eval_every:
            raise ValueError(
                f"eval_every must divide epochs, but {self.epochs} is not a multiple of {self.eval_every}."
            )
        outputs = _outputs(self.model, dataset.x_train.shape[1:], dataset.x_train.dtype)
        if outputs != len(dataset.classes):
            raise ValueError(f"The model has {outputs} outputs, but {dataset.name} has {len(dataset.classes)} classes.")
        if self.shuffle not in (True, False, "once"):
            raise ValueError(f'shuffle must be True, False or "once", not {self.shuffle!r}.')
        _loss(self.loss)

    @classmethod
    def split(cls, model: Model, dataset: Dataset, optimizer: Optimizer, options: dict) -> tuple[_Task, dict]:
        """The task that `options` describe, and those that are the optimizer's."""
        own = {field.name for field in dataclasses.fields(cls)} & options.keys()
        rest = {name: value for name, value in options.items() if name not in own}
        return cls(model, dataset, optimizer, **{name: options[name] for name in own}), rest

    @property
    def training(self) -> _Training:
        return _training(self.model, self.optimizer, int(self.batch_size), _loss(self.loss), self.shuffle)

    @property
    def data(self) -> tuple[np.ndarray, ...]:
        return self.dataset.x_train, self.dataset.y_train, self.dataset.x_test, self.dataset.y_test

    @property
    def steps(self) -> int:
        """Of an epoch."""
        return len(self.dataset.x_train) // self.batch_size

    def run(self, params: Params | None, losses: np.ndarray, accuracies: np.ndarray, tested: Sequence) -> Run:
        looks = np.arange(1, len(tested[0]) + 1)
        return Run(params, History(losses.ravel(), accuracies.ravel(), *tested, self.steps * self.eval_every * looks))

    def runs(self, settings: Sequence[dict[str, Any]], keep_params: bool, progress: bool) -> list[Run]:
        """`fit` for each setting, with its "seed", one a core."""
        keys = [_seed(setting["seed"]) for setting in settings]
        numbers = [{name: _number(name, v) for name, v in setting.items() if name != "seed"} for setting in settings]
        data = jax.device_put(self.data)
        epochs = np.arange(self.epochs).reshape(-1, self.eval_every)
        shapes = tuple((array.shape, array.dtype.name) for array in data)
        program = _executable(self.training, tuple(numbers[0]), epochs.shape, shapes)

        def one(i: int) -> Run:
            params, noted = program(numbers[i], keys[i], epochs, data)
            params, ((losses, accuracies), tested) = jax.device_get((params if keep_params else None, noted))
            return self.run(params, losses, accuracies, tested)

        return _in_parallel(one, len(settings), _workers(program), progress)


def fit(
    model: Model,
    dataset: Dataset,
    optimizer: Optimizer,
    *,
    batch_size: int,
    epochs: int,
    seed: int = 0,
    loss: str | Loss = "cross_entropy",
    shuffle: bool | str = True,
    eval_every: int = 1,
    progress: bool = True,
    **hyperparameters: float,
) -> Run:
    """Train `model` on the training set, test it every `eval_every` epochs, and return parameters and history.

    `optimizer` is an optax transformation, or better a function that makes one, such as `optax.sgd`, with its arguments
    as `hyperparameters` (learning_rate=0.1): then other values need no new compilation. The seed decides the initial
    parameters and the order of the examples: with `shuffle` True a new one in every epoch, with "once" the same one in
    every epoch; with False examples come as they are stored.
    Each epoch takes whole batches only: the last n mod batch_size examples of its order are left out.
    With batch norm, tests use the training set's statistics (`models.freeze`); the parameters returned are as trained.

    Raises ValueError for settings that cannot work, and Diverged when the loss stops being finite: it names the step.
    """
    task = _Task(model, dataset, optimizer, batch_size, epochs, loss, shuffle, eval_every)
    setting = {name: _number(name, value) for name, value in hyperparameters.items()}
    training, key, data = task.training, _seed(seed), jax.device_put(task.data)
    state, records, tested = run(
        training.epoch, _start(training, setting, key), np.arange(epochs), setting, key, data,
        look=training.test, every=eval_every, stop=lambda records, _: not np.isfinite(records[0]).all(),
        progress=progress,
    )  # fmt: skip
    result = task.run(state[0], *records, tested)
    if (step := int(result.diverged_at)) >= 0:
        given = {**{name: f"{value:g}" for name, value in setting.items()}, "batch_size": batch_size, "seed": seed}
        raise Diverged(
            f"The loss is {result.history.loss[step]} at step {step} (epoch {step // task.steps}) with "
            + ", ".join(f"{name}={value}" for name, value in given.items())
            + ". A smaller learning rate usually helps. This error's .run holds the run so far.",
            result,
        )
    return result


def sweep(
    model: Model,
    dataset: Dataset,
    optimizer: Callable[..., optax.GradientTransformation],
    *,
    seed: int | Iterable[int] = range(5),
    keep_params: bool = False,
    progress: bool = True,
    **options: Any,
) -> Sweep:
    """`fit` for every combination of the optimizer's arguments and seeds, as one compiled program.

    `options` are those of `fit`; each argument of `optimizer` is a number or a sequence of numbers. Sequences become
    axes of the result, in the order given; `seed` is the last axis. A run that diverges is marked in `diverged_at` and
    the others go on. As many runs go side by side as there are cores, fewer if memory would not do. Raises ValueError
    for an empty grid.
    """
    task, grid = _Task.split(model, dataset, optimizer, options)
    axes, settings = _grid(grid | {"seed": [seed] if np.ndim(seed) == 0 else list(seed)})
    runs = task.runs(settings, keep_params, progress)
    stacked = _on_grid(axes, runs)
    history = stacked.history._replace(evaluated_at=runs[0].history.evaluated_at)
    return Sweep(axes, history, stacked.diverged_at, stacked.params)


def _grid(given: dict[str, Any]) -> tuple[dict[str, tuple], list[dict[str, Any]]]:
    """The axes, which are the sequences in what is given, and the settings at all their points, the last axis first."""
    axes = {name: tuple(np.ravel(values).tolist()) for name, values in given.items() if np.ndim(values) > 0}
    if empty := [name for name, values in axes.items() if not values]:
        raise ValueError(f"The grid is empty: give at least one value for {', '.join(empty)}.")
    return axes, [given | dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]


def _on_grid(axes: dict[str, tuple], results: Sequence[Tree]) -> Tree:
    """Results at the points of `_grid`, each leaf stacked along the axes."""
    shape = tuple(map(len, axes.values()))
    return jax.tree.map(lambda leaf: leaf.reshape(shape + leaf.shape[1:]), _stack(results))


def _in_parallel(one: Callable[[int], Any], count: int, workers: int, progress: bool) -> list[Any]:
    """[one(0), one(1), …], so many at a time."""
    bar = tqdm(total=count, desc="sweep", delay=1, leave=False, disable=not progress)
    pool = ThreadPoolExecutor(workers)
    try:
        jobs = [pool.submit(one, i) for i in range(count)]
        for job in as_completed(jobs):
            job.result()
            bar.update()
        return [job.result() for job in jobs]
    finally:  # an interrupted cell comes here too: what has not begun never does
        pool.shutdown(cancel_futures=True)
        bar.close()


# Choosing a setting


class Tuned(NamedTuple):
    """An arm of a comparison: what was tried on validation data, the best setting, and what it does on test data."""

    axes: dict[str, tuple]  # of the grid
    setting: dict[str, Any]  # of the highest mean score
    scores: np.ndarray  # (*grid, tuning seeds), NaN where a run failed
    at_edge: bool  # the best value is the first or last of its axis: the grid is too narrow to be fair
    validation: Tree  # the results, stacked: (*grid, tuning seeds, …)
    test: Tree  # (seeds, …), trained on the same examples with other seeds

    @property
    def failed(self) -> np.ndarray:
        """(*grid, tuning seeds) of truth values."""
        return np.isnan(self.scores)

    def __str__(self) -> str:
        chosen = ", ".join(f"{name} {value:g}" for name, value in self.setting.items())
        edge, count = " (at the edge of the grid)" * self.at_edge, int(self.failed.sum())
        return f"best {chosen}{edge}" + f"; {count} of {self.failed.size} runs failed" * (count > 0)


def accuracy_at_end(result: Run) -> float:
    """The last test accuracy of a run, NaN if it diverged."""
    return result.history.test_accuracy[-1] if result.diverged_at < 0 else np.float32(np.nan)


def tune(
    trials: Callable[[Sequence[dict[str, Any]]], Sequence[Tree]],
    *,
    seeds: Iterable[int] = range(5),
    tuning_seeds: int | Sequence[int] = 3,
    score: Callable[[Tree], float] = accuracy_at_end,
    worst: float = 0.0,
    **grid: Any,
) -> Tuned:
    """Choose the setting of a grid with the best mean score on validation data, then test it with other seeds.

    `trials(settings)` returns a result, a tree of numbers or arrays, for each setting: values by name, with "seed" and
    "judged_on" ("validation" or "test"). `fits` makes one of a model and `each` one of any function. In `grid`,
    sequences are axes, other values stay as they are. A score that is not finite is that of a run that failed: it
    counts as `worst`. `tuning_seeds` says which they are, or how many after the last of `seeds`: luck in the choice
    does not carry over. Raises ValueError for an empty grid.
    """
    seeds = list(seeds)
    first = max(seeds) + 1
    tuning_seeds = list(range(first, first + tuning_seeds) if isinstance(tuning_seeds, int) else tuning_seeds)
    axes, settings = _grid(grid | {"seed": tuning_seeds})
    results = trials([setting | {"judged_on": "validation"} for setting in settings])
    scores = np.reshape([score(result) for result in results], [len(values) for values in axes.values()])
    scores = np.where(np.isfinite(scores), scores, np.nan)
    axes.pop("seed")
    means = np.where(np.isnan(scores), np.asarray(worst, scores.dtype), scores).mean(-1)
    best = np.unravel_index(means.argmax(), means.shape)
    setting = {name: values[i] for (name, values), i in zip(axes.items(), best, strict=True)}
    at_edge = any(i in (0, len(values) - 1) for values, i in zip(axes.values(), best, strict=True) if len(values) > 1)
    tested = trials([grid | setting | {"seed": seed, "judged_on": "test"} for seed in seeds])
    return Tuned(axes, setting, scores, at_edge, _on_grid(axes | {"seed": tuning_seeds}, results), _stack(tested))


def each(trial: Callable[..., Tree]) -> Callable[[Sequence[dict[str, Any]]], list[Tree]]:
    """For `tune`: trial(**setting, seed=…, judged_on=…) for each setting, one a core."""
    return lambda settings: devices.side_by_side(lambda setting: trial(**setting), [(s,) for s in settings])


def fits(
    model: Model,
    dataset: Dataset,
    optimizer: Callable[..., optax.GradientTransformation],
    *,
    keep_params: bool = False,
    progress: bool = True,
    **options: Any,
) -> Callable[[Sequence[dict[str, Any]]], list[Run]]:
    """For `tune`: `fit` with these `options` and each setting of the optimizer, one a core.

    A quarter of the training data is held out for validation, and in the tests, too: both train on the same examples.
    Where validation and test set are equally large, nothing is compiled again.
    """
    held_out = validation_split(dataset, fraction=0.25)
    judged = dataclasses.replace(held_out, x_test=dataset.x_test, y_test=dataset.y_test)
    tasks = {on: _Task(model, half, optimizer, **options) for on, half in (("validation", held_out), ("test", judged))}

    def trials(settings: Sequence[dict[str, Any]]) -> list[Run]:
        (on,) = {setting["judged_on"] for setting in settings}
        plain = [{name: value for name, value in setting.items() if name != "judged_on"} for setting in settings]
        return tasks[on].runs(plain, keep_params, progress)

    return trials


def evaluate(
    model: Model, params: Params, x: Array, y: Array, loss: str | Loss = "cross_entropy"
) -> tuple[Array, Array]:
    """Mean loss and accuracy (a fraction) of `model` on examples x with labels y, in pieces of at most 500.

    With batch norm, `models.freeze` the parameters before, or each piece is normalised by itself.
    """
    count = -(-len(x) // 500)
    size = -(-len(x) // count)
    last = len(x) - size  # the last piece may overlap the one before: all pieces have one shape
    pieces = lax.map(
        lambda start: model.apply(params, lax.dynamic_slice_in_dim(x, start, size)),
        jnp.minimum(np.arange(count) * size, last),
    )
    logits = jnp.concatenate([pieces[:-1].reshape(-1, pieces.shape[-1]), pieces[-1, (count - 1) * size - last :]])
    return _loss(loss)(logits, y).mean(), (logits.argmax(-1) == y).mean()


@functools.lru_cache(maxsize=256)
def _outputs(model: Model, shape: tuple[int, ...], dtype: np.dtype) -> int:
    one = jax.ShapeDtypeStruct((1, *shape), dtype)
    return jax.eval_shape(lambda x: model.apply(model.init(jax.random.key(0)), x), one).shape[-1]


@functools.lru_cache(maxsize=256)
def _executable(training: _Training, names: tuple[str, ...], epochs: tuple[int, int], shapes: tuple) -> Any:
    """`_whole` compiled ahead for arguments of these shapes: one of these serves every grid and seed."""
    setting = {name: jax.ShapeDtypeStruct((), np.float32) for name in names}
    data = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
    return _whole.lower(training, setting, _seed(0), np.zeros(epochs, int), data).compile()


def _permutation(key: Array, count: int) -> Array:
    """A random order of `count` numbers, six times as fast on a CPU as `jax.random.permutation` for up to 8,192.

    Then a random key and its number share one word, so that sorting needs no second array. Two of the (at least) 19-bit
    keys are equal for few pairs, which stay in their order.
    """
    if count > 8192:
        return jax.random.permutation(key, count)
    bits = max(1, (count - 1).bit_length())
    words = jax.random.bits(key, (count,)) << bits | jnp.arange(count, dtype=jnp.uint32)
    return (jnp.sort(words) & (2**bits - 1)).astype(jnp.int32)


def _workers(run: jax.stages.Compiled) -> int:
    """How many runs may go side by side: one a core, fewer if they would take over half of the free memory."""
    used = run.memory_analysis()
    each = max(1, used.temp_size_in_bytes + used.output_size_in_bytes)
    return max(1, min(devices.cores(), devices.memory().available // 2 // each))


def _loss(loss: str | Loss) -> Loss:
    return LOSSES[checks.known("loss", loss, LOSSES)] if isinstance(loss, str) else loss


def _number(name: str, value: float) -> np.float32:
    if isinstance(value, bool):
        raise ValueError(
            f"{name} is a choice, not a number: pass functools.partial(…, {name}={value}) as the optimizer."
        )
    return np.float32(checks.finite(name, value))


def _seed(seed: int) -> np.uint32:
    return np.uint32(checks.whole("seed", seed, low=0, high=2**32 - 1))
