"""Training as one compiled program whose inputs are the hyperparameters and the seed.

A new learning rate, momentum or seed is only another input, so nothing is compiled again. `fit` runs the program epoch
by epoch with progress; `sweep` runs it for every setting of a grid, one setting a core. On a CPU this beats `vmap` over
the settings: each core has its own run, memory is that of one run a core, and a sweep's run equals `fit` bit for bit.
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

from dlscale.lab import checks, devices
from dlscale.lab.data import Dataset, validation_split
from dlscale.lab.models import Model, Params

Loss = Callable[[Array, Array], Array]
Optimizer = optax.GradientTransformation | Callable[..., optax.GradientTransformation]

COPY_AT_MOST = 2**24  # numbers of training data gathered for a whole epoch: faster than step by step, takes memory

LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda logits, y: optax.softmax_cross_entropy(logits, jax.nn.one_hot(y, logits.shape[-1])),
    "squared": lambda logits, y: jnp.sum((logits - jax.nn.one_hot(y, logits.shape[-1])) ** 2, axis=-1),
}


class History(NamedTuple):
    """What training recorded. A sweep's arrays have the grid's axes in front."""

    loss: np.ndarray  # (steps,) mean loss of each step's minibatch, before its update
    accuracy: np.ndarray  # (steps,) fraction of that minibatch classified rightly
    test_loss: np.ndarray  # (evaluations,)
    test_accuracy: np.ndarray  # (evaluations,)
    evaluated_at: np.ndarray  # (evaluations,) steps taken by then; without a grid's axes


class Run(NamedTuple):
    """A trained model's parameters and its history."""

    params: Params
    history: History


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

    Raises ValueError for settings that cannot work, and Diverged when the loss stops being finite: it names the step.
    """
    program = _program(model, dataset, optimizer, batch_size, epochs, loss, shuffle, eval_every)
    setting = {name: _number(name, value) for name, value in hyperparameters.items()}
    key, arrays = _seed(seed), jax.device_put(_arrays(dataset))
    state, records = program.start(setting, key), []
    for epoch in tqdm(range(0, epochs, eval_every), "training", delay=1, leave=False, disable=not progress):
        state, record = program.advance(state, setting, key, epoch, arrays)
        records.append(jax.device_get(record))
        if not np.isfinite(records[-1].loss).all():
            break
    per_step = [np.concatenate(column) for column in zip(*(record[:2] for record in records), strict=True)]
    per_test = [np.stack(column) for column in zip(*(record[2:4] for record in records), strict=True)]
    steps = len(dataset.x_train) // batch_size
    run = Run(state[0], History(*per_step, *per_test, steps * eval_every * np.arange(1, len(records) + 1)))
    if (step := int(_first_bad(run.history.loss))) >= 0:
        given = {**{name: f"{value:g}" for name, value in setting.items()}, "batch_size": batch_size, "seed": seed}
        raise Diverged(
            f"The loss is {run.history.loss[step]} at step {step} (epoch {step // steps}) with "
            + ", ".join(f"{name}={value}" for name, value in given.items())
            + ". A smaller learning rate usually helps. This error's .run holds the run so far.",
            run,
        )
    return run


def sweep(
    model: Model,
    dataset: Dataset,
    optimizer: Callable[..., optax.GradientTransformation],
    *,
    batch_size: int,
    epochs: int,
    seed: int | Iterable[int] = range(5),
    loss: str | Loss = "cross_entropy",
    shuffle: bool | str = True,
    eval_every: int = 1,
    keep_params: bool = False,
    progress: bool = True,
    **grid: float | Sequence[float],
) -> Sweep:
    """`fit` for every combination of the optimizer's arguments and seeds, as one compiled program.

    Each argument of `optimizer` is a number or a sequence of numbers. Sequences become axes of the result, in the order
    given; `seed` is the last axis. A run that diverges is marked in `diverged_at` and the others go on.
    As many runs go side by side as there are cores, fewer if memory would not do. Raises ValueError for an empty grid.
    """
    given = {**grid, "seed": [seed] if np.ndim(seed) == 0 and not isinstance(seed, range) else list(seed)}
    axes = {name: tuple(np.ravel(values).tolist()) for name, values in given.items() if np.ndim(values) > 0}
    if empty := [name for name, values in axes.items() if not values]:
        raise ValueError(f"The grid is empty: give at least one value for {', '.join(empty)}.")
    program = _program(model, dataset, optimizer, batch_size, epochs, loss, shuffle, eval_every)
    settings = [given | dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    keys = [_seed(setting.pop("seed")) for setting in settings]
    settings = [{name: _number(name, value) for name, value in setting.items()} for setting in settings]
    arrays = jax.device_put(_arrays(dataset))
    segments = np.arange(0, epochs, eval_every)
    shapes = tuple((array.shape, array.dtype.name) for array in arrays)
    run = _executable(program, tuple(settings[0]), len(segments), eval_every, shapes)

    def one(i: int) -> tuple[Params | None, History]:
        params, record = run(settings[i], keys[i], segments, arrays)
        return jax.device_get((params if keep_params else None, record))

    results: list[Any] = [None] * len(settings)
    bar = tqdm(total=len(settings), desc="sweep", delay=1, leave=False, disable=not progress)
    pool = ThreadPoolExecutor(_workers(run))
    try:
        jobs = {pool.submit(one, i): i for i in range(len(settings))}
        for job in as_completed(jobs):
            results[jobs[job]] = job.result()
            bar.update()
    finally:  # an interrupted cell comes here too: what has not begun never does
        pool.shutdown(cancel_futures=True)
        bar.close()

    shape = tuple(len(values) for values in axes.values())
    params, history = jax.tree.map(lambda *leaves: np.stack(leaves).reshape(shape + leaves[0].shape), *results)
    history = history._replace(evaluated_at=len(dataset.x_train) // batch_size * (segments + eval_every))
    return Sweep(axes, history, _first_bad(history.loss), params)


class Tuned(NamedTuple):
    """An arm of a comparison: the grid on validation data, its best setting, and that setting on test data."""

    setting: dict[str, float]  # of the highest mean validation accuracy at the end
    validation: Sweep  # (*grid, tuning seeds)
    test: Sweep  # (seeds,), trained on the same examples with other seeds
    at_edge: bool  # the best value is the first or last of its axis: the grid is too narrow to be fair


def tune(
    model: Model,
    dataset: Dataset,
    optimizer: Callable[..., optax.GradientTransformation],
    *,
    seed: Iterable[int] = range(5),
    tuning_seeds: int = 3,
    **options: Any,
) -> Tuned:
    """Choose among the settings of a grid on a quarter of the training data held out, then test the best one.

    `options` are those of `sweep`. A run that diverged counts as accuracy 0. The test runs have seeds of their own, so
    luck in the choice does not carry over, and the same shapes where the validation and test sets are equally large, so
    nothing is compiled again.
    """
    held_out = validation_split(dataset, fraction=0.25)
    report = dataclasses.replace(held_out, x_test=dataset.x_test, y_test=dataset.y_test)
    first = max(seeds := list(seed)) + 1
    validation = sweep(model, held_out, optimizer, seed=range(first, first + tuning_seeds), **options)
    grid = {name: values for name, values in validation.axes.items() if name != "seed"}
    accuracy = np.where(validation.diverged_at < 0, validation.history.test_accuracy[..., -1], 0).mean(-1)
    best = np.unravel_index(accuracy.argmax(), accuracy.shape)
    setting = {name: values[i] for (name, values), i in zip(grid.items(), best, strict=True)}
    at_edge = any(i in (0, len(values) - 1) for values, i in zip(grid.values(), best, strict=True) if len(values) > 1)
    return Tuned(setting, validation, sweep(model, report, optimizer, seed=seeds, **(options | setting)), at_edge)


def evaluate(
    model: Model, params: Params, x: Array, y: Array, loss: str | Loss = "cross_entropy"
) -> tuple[Array, Array]:
    """Mean loss and accuracy (a fraction) of `model` on examples x with labels y, in pieces of at most 500."""
    count = -(-len(x) // 500)
    size = -(-len(x) // count)
    last = len(x) - size  # the last piece may overlap the one before: all pieces have one shape
    pieces = lax.map(
        lambda start: model.apply(params, lax.dynamic_slice_in_dim(x, start, size)),
        jnp.minimum(np.arange(count) * size, last),
    )
    logits = jnp.concatenate([pieces[:-1].reshape(-1, pieces.shape[-1]), pieces[-1, (count - 1) * size - last :]])
    return _loss(loss)(logits, y).mean(), (logits.argmax(-1) == y).mean()


class _Program(NamedTuple):
    """The jitted parts of a training run; all take hyperparameters and seed as inputs."""

    start: Callable[..., Any]
    advance: Callable[..., Any]
    whole: Callable[..., Any]


def _program(
    model: Model,
    dataset: Dataset,
    optimizer: Optimizer,
    batch_size: int,
    epochs: int,
    loss: str | Loss,
    shuffle: bool | str,
    eval_every: int,
) -> _Program:
    """Check what was asked and find its program."""
    examples = len(dataset.x_train)
    checks.whole("batch_size", batch_size, high=examples, why=f"{dataset.name} has {examples} training examples.")
    checks.whole("epochs", epochs)
    checks.whole("eval_every", eval_every, high=epochs)
    if epochs % eval_every:
        raise ValueError(f"eval_every must divide epochs, but {epochs} is not a multiple of {eval_every}.")
    outputs = _outputs(model, dataset.x_train.shape[1:], dataset.x_train.dtype)
    if outputs != len(dataset.classes):
        raise ValueError(f"The model has {outputs} outputs, but {dataset.name} has {len(dataset.classes)} classes.")
    if shuffle not in (True, False, "once"):
        raise ValueError(f'shuffle must be True, False or "once", not {shuffle!r}.')
    return _compile(model, optimizer, _loss(loss), int(batch_size), shuffle, int(eval_every))


@functools.lru_cache(maxsize=256)
def _outputs(model: Model, shape: tuple[int, ...], dtype: np.dtype) -> int:
    one = jax.ShapeDtypeStruct((1, *shape), dtype)
    return jax.eval_shape(lambda x: model.apply(model.init(jax.random.key(0)), x), one).shape[-1]


@functools.lru_cache(maxsize=256)
def _compile(
    model: Model, optimizer: Optimizer, loss: Loss, batch_size: int, shuffle: bool | str, eval_every: int
) -> _Program:
    def transformation(setting: dict[str, Array]) -> optax.GradientTransformation:
        if not isinstance(optimizer, optax.GradientTransformation):
            return optimizer(**setting)
        if setting:
            raise ValueError(
                f"This optimizer is ready made: pass the function that makes it to set {', '.join(setting)}."
            )
        return optimizer

    def start(setting: dict[str, Array], seed: Array) -> tuple[Params, Any]:
        params = model.init(jax.random.fold_in(jax.random.key(seed), 0))
        return params, transformation(setting).init(params)

    def batch_loss(params: Params, x: Array, y: Array) -> tuple[Array, Array]:
        logits = model.apply(params, x)
        return loss(logits, y).mean(), (logits.argmax(-1) == y).mean()

    def advance(state: Any, setting: dict[str, Array], seed: Array, epoch: Array, arrays: Any) -> tuple[Any, History]:
        x_train, y_train, x_test, y_test = arrays
        update, examples = transformation(setting).update, len(x_train)
        order_key = jax.random.fold_in(jax.random.key(seed), 1)

        def gather(order: Array) -> tuple[Array, Array]:
            return x_train[order], y_train[order]

        copy_whole = x_train.size <= COPY_AT_MOST

        def step(state: Any, batch: Any) -> tuple[Any, tuple[Array, Array]]:
            params, memory = state
            x, y = batch if copy_whole else gather(batch)
            results, gradient = jax.value_and_grad(batch_loss, has_aux=True)(params, x, y)
            updates, memory = update(gradient, memory, params)
            return (optax.apply_updates(params, updates), memory), results

        def one_epoch(state: Any, number: Array) -> tuple[Any, tuple[Array, Array]]:
            order = jnp.arange(examples)
            if shuffle:
                which = 0 if shuffle == "once" else number
                order = _permutation(jax.random.fold_in(order_key, which), examples)
            order = order[: examples // batch_size * batch_size].reshape(-1, batch_size)
            return lax.scan(step, state, gather(order) if copy_whole else order)

        state, (losses, accuracies) = lax.scan(one_epoch, state, epoch + jnp.arange(eval_every))
        tested = evaluate(model, state[0], x_test, y_test, loss)
        return state, History(losses.ravel(), accuracies.ravel(), *tested, None)

    def whole(setting: dict[str, Array], seed: Array, segments: Array, arrays: Any) -> tuple[Params, History]:
        state, record = lax.scan(
            lambda state, epoch: advance(state, setting, seed, epoch, arrays), start(setting, seed), segments
        )
        return state[0], record._replace(loss=record.loss.ravel(), accuracy=record.accuracy.ravel())

    return _Program(jax.jit(start), jax.jit(advance), jax.jit(whole))


@functools.lru_cache(maxsize=256)
def _executable(
    program: _Program, names: tuple[str, ...], segments: int, eval_every: int, shapes: tuple
) -> jax.stages.Compiled:
    """`program.whole` compiled ahead for arguments of these shapes: one of these serves every grid and seed."""
    setting = {name: jax.ShapeDtypeStruct((), np.float32) for name in names}
    arrays = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes)
    epochs = np.arange(segments) * eval_every
    return program.whole.lower(setting, _seed(0), epochs, arrays).compile()


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


def _arrays(dataset: Dataset) -> tuple[np.ndarray, ...]:
    return dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test


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


def _first_bad(loss: np.ndarray) -> np.ndarray:
    """Index along the last axis of the first loss that is not finite, or -1."""
    bad = ~np.isfinite(loss)
    return np.where(bad.any(-1), bad.argmax(-1), -1)
