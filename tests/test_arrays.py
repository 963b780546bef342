"""Public functions of arrays: what is not a number never becomes an ordinary one, and nothing has an answer, too."""

from __future__ import annotations

import ast
import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import batch_size_and_lars as batches
from dlscale import code_as_data as code
from dlscale import collectives, parallel_training, precision, recomputation, sparsity
from dlscale import gradient_compression as compression
from dlscale import honest_benchmarks as benchmarks
from dlscale import imagenet_in_four_minutes as imagenet
from dlscale import loss_landscapes as landscapes
from dlscale import operators_and_rooflines as operators
from dlscale.lab import intervals, models
from dlscale.sequence_models_and_serving import sequence, serving

PACKAGE = Path(sequence.__file__).parents[1]
BESIDE = {"exercises.py", "experiment.py", "command.py", "drawing.py", "measuring.py", "corpus.py", "__main__.py"}


def together(f):
    """f of what each of the workers has, (workers, …), for all of them."""
    return jax.vmap(f, axis_name="workers")


def there_and_back(compressor):
    return lambda x: compressor.decode(compressor.encode(compressor.init(x), x)[0], x)


def mean_square(params, x=1.0):
    return (params**2 * x).sum()


def ctc(logits):
    batch, frames, _ = logits.shape
    return logits, jnp.full(batch, frames), jnp.tile(jnp.array([1, 2]), (batch, 1)), jnp.full(batch, 2)


KEY = jax.random.key(0)
RULE = serving.Rule(2, 0.1)
KERNEL = jnp.ones((3, 3, 2, 2))
HALF_FLEX = precision.FlexState(jnp.int32(-4), jnp.ones(16))

# name: (the function of one array, the array's shape)
CALLS = {
    "batch_size_and_lars.critical_batch": (lambda x: batches.critical_batch([1, 2, 3], x), (4, 3)),
    "code_as_data.skip_gram_loss": (
        lambda x: code.skip_gram_loss(x, jnp.array([[0, 1]]), jnp.array([1]), 5.0), (2, 3, 4)),
    "code_as_data.unit": (code.unit, (3, 4)),
    "code_as_data.listen": (lambda x: code.listen(
        x, jnp.eye(len(x)), jnp.ones((3 * x.shape[1], x.shape[1])), jnp.zeros(x.shape[1])), (3, 4)),
    "code_as_data.of_instructions": (lambda x: code.of_instructions(x, code.Vocabulary(("a", "b"))), (2, 4)),
    "code_as_data.hits": (lambda x: code.hits(x, "abcd", [["a", "b"], ["c", "d"]], 1), (4, 3)),
    "code_as_data.answered": (lambda x: code.answered(x, np.array([[0, 1, 2, 3]])), (4, 3)),
    **{f"collectives.{name}": (together(collectives.operation(name)), (4, 4, 3)) for name in collectives.COLLECTIVES},
    "gradient_compression.where_largest": (lambda x: jnp.where(compression.where_largest(x, 2), x, 0), (5,)),
    "gradient_compression.largest": (lambda x: compression.largest(x, 2), (5,)),
    **{f"gradient_compression.{name}": (there_and_back(made), (4, 3)) for name, made in {
        "dense": compression.dense(), "one_bit": compression.one_bit(),
        "quantised": compression.quantised(4, shrink=True),
        "top_k": compression.top_k(0.5), "low_rank": compression.low_rank(2),
        "error_feedback": compression.error_feedback(compression.dense()),
        "joined": compression.joined(compression.dense()), "clipped": compression.clipped(compression.dense(), 9.0),
    }.items()},
    "honest_benchmarks.median": (benchmarks.median, (5,)),
    "honest_benchmarks.bootstrap": (lambda x: benchmarks.bootstrap(x), (5,)),
    "honest_benchmarks.ratio": (lambda x: benchmarks.ratio(x, np.ones(5)), (5,)),
    "honest_benchmarks.expected_best": (lambda x: benchmarks.expected_best(x, 2), (5,)),
    "honest_benchmarks.first_crossing": (lambda x: benchmarks.first_crossing(range(3), x, 3.0), (2, 3)),
    "honest_benchmarks.survival": (lambda x: benchmarks.survival(x, np.ones(len(x))), (5,)),
    "honest_benchmarks.slope": (lambda x: benchmarks.slope(1 + np.arange(len(x)), x), (5,)),
    "imagenet_in_four_minutes.length": (imagenet.length, (3, 4)),
    "lab.intervals.interval": (intervals.interval, (5,)),
    "lab.intervals.widened": (lambda x: intervals.widened(x, 0.5), (5,)),
    "lab.models.conv2d": (lambda x: models.conv2d(x, KERNEL), (1, 6, 6, 2)),
    "lab.models.max_pool": (models.max_pool, (1, 4, 4, 2)),
    "loss_landscapes.random_direction": (lambda x: landscapes.random_direction(KEY, x), (3, 4)),
    "loss_landscapes.move": (lambda x: landscapes.move(x, (0.5, jnp.ones(x.shape))), (3, 4)),
    "loss_landscapes.line": (lambda x: landscapes.line(mean_square, x, jnp.ones(x.shape), [0.0, 1.0]), (3, 4)),
    "loss_landscapes.plane": (
        lambda x: landscapes.plane(mean_square, x, jnp.ones(x.shape), jnp.eye(*x.shape), [0.0], [0.0, 1.0]), (3, 4)),
    "loss_landscapes.hessian_eigenvalues": (
        lambda x: landscapes.hessian_eigenvalues(lambda p: (p**4).sum(), x, 1, KEY), (3, 4)),
    "loss_landscapes.spectral_density": (
        lambda x: landscapes.spectral_density(lambda p: (p**4).sum(), x, KEY, probes=2, iterations=3), (3, 4)),
    **{f"operators_and_rooflines.{name}": (
        lambda x, name=name: operators.ALGORITHMS[name](x, KERNEL), (1, 6, 6, 2)) for name in operators.ALGORITHMS},
    "parallel_training.copied": (together(lambda x: parallel_training.copied(x, "workers")), (2, 3)),
    "parallel_training.summed": (together(lambda x: parallel_training.summed(x, "workers")), (2, 3)),
    "parallel_training.added": (together(lambda x: parallel_training.added(x, "workers")), (2, 3)),
    "parallel_training.gathered": (together(lambda x: parallel_training.gathered(x, "workers")), (2, 3)),
    "parallel_training.data_parallel": (together(
        lambda x: parallel_training.data_parallel(mean_square, jnp.float32(2), x, axis_name="workers")), (2, 3)),
    "parallel_training.shares": (lambda x: parallel_training.shares(x, 2), (4, 3)),
    "parallel_training.chunks": (lambda x: parallel_training.chunks({"w": x}, 2), (4, 3)),
    "precision.quantize": (lambda x: precision.quantize(x, "float8_e5m2"), (3, 4)),
    "precision.store": (lambda x: precision.store(x, "float16", "float16"), (3, 4)),
    "precision.autoflex": (lambda x: precision.autoflex(HALF_FLEX, jnp.abs(x).max(initial=0)).maxima, (3, 4)),
    "recomputation.relu": (recomputation.relu, (3, 4)),
    "sequence_models_and_serving.sequence.forward_backward": (lambda x: sequence.forward_backward(*ctc(x)), (2, 5, 4)),
    "sequence_models_and_serving.sequence.ctc_loss": (lambda x: sequence.ctc_loss(*ctc(x)), (2, 5, 4)),
    "sequence_models_and_serving.sequence.ctc_loss, its gradient": (
        lambda x: jax.grad(lambda x: sequence.ctc_loss(x, *ctc(x)[1:]).sum())(x), (2, 5, 4)),
    "sequence_models_and_serving.sequence.spectrogram": (sequence.spectrogram, (2, sequence.LONGEST)),
    "sequence_models_and_serving.serving.simulate": (
        lambda x: serving.simulate(np.sort(x), lambda count: 1.0, RULE).ends, (4,)),
    "sparsity.mask": (lambda x: jnp.where(sparsity.mask(x, 0.5), x, 0), (4, 4)),
}  # fmt: skip


# Where a NaN does not come through, and why that is right.
LOSE_NAN = {
    "collectives.broadcast": "only the root's array counts",
    "collectives.scatter": "only the root's array counts",
    "honest_benchmarks.first_crossing": "a run that diverged is not at the target",
    "code_as_data.skip_gram_loss": "only the rows that are drawn count",
}
# Functions of arrays that are not asked here, and why.
NOT_ASKED = {
    "batch_size_and_lars": {"best_rates": "counts of steps", "exact_noise_scale": "computes with a network"},
    "sgd": {"ravine": "two weights, whose loss tells a NaN", "best_rate": "a run that diverged is not the best",
            "race": "learning rates", "steps_to_arrive": "a run that diverged never arrives"},
    "code_as_data": {"reach": "whole numbers", "skip_gram": "whole numbers", "counted": "whole numbers",
                     "shortened": "counts", "fit": "trains", "initial": "takes a key", "logits": "a network's"},
    "consistency": {"timeline": "durations, checked in its own tests"},
    "gradient_compression": {"pack": "whole numbers", "unpack": "bytes"},
    "imagenet_in_four_minutes": dict.fromkeys(
        ["init", "forward", "loss", "optimizer"], "a network's, whose loss tells a NaN"),
    "lab.interpreter": {"run": "whole numbers"},
    "lab.models": {"weights": "takes a key", "freeze": "a network's"},
    "lab.train": {"evaluate": "a network's, whose loss tells a NaN"},
    "operators_and_rooflines": dict.fromkeys(["fft", "winograd"], "asked by the names of its algorithms"),
    "parallel_training": dict.fromkeys(["unchunked", "two_layers", "attention", "block"], "a network's layers"),
    "parallel_training.pipeline": {"mixed": "a network's layers"},
    "recomputation": {"profile": "counts bytes"},
    "sequence_models_and_serving.sequence": {
        "extended": "whole numbers", "hear": "a network"},
    "sparsity": {"stored_bits": "its result is a count"},
}  # fmt: skip
ALSO = {f"operators_and_rooflines.{name}" for name in ("direct", "im2col")}  # under the names of its algorithms


def clear(error: BaseException) -> bool:
    """Was it raised by the library itself, as an error of what was given?"""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    good = isinstance(error, ValueError | TypeError | FloatingPointError)
    return good and Path(last).is_relative_to(PACKAGE)


def holds_nan(result: object) -> bool:
    leaves = map(np.asarray, jax.tree.leaves(result))
    return any(np.isnan(leaf.astype(float)).any() for leaf in leaves if leaf.dtype.kind in "fV")


def nan_is_told(name: str, place: float, seed: int = 0) -> bool:
    """Does a NaN in a place, from 0 to 1 of the array, come out, or is it an error in words?"""
    call, shape = CALLS[name]
    x = np.random.default_rng(seed).uniform(0.5, 2, shape).astype(np.float32)
    assert not holds_nan(call(x)), "without one there is none"
    x.flat[int(place * x.size)] = np.nan
    try:
        return holds_nan(call(x))
    except Exception as error:
        if not clear(error):
            raise
        return True


WORKERS = ("collectives.", "parallel_training.")


def unclear(name: str) -> list[str]:
    """The errors, not in words, for the array with one axis of length 0; that of the workers stays."""
    call, shape = CALLS[name]
    found = []
    for axis in range(name.startswith(WORKERS), len(shape)):
        try:
            call(np.zeros([*shape[:axis], 0, *shape[axis + 1 :]], np.float32))
        except Exception as error:
            found += [] if clear(error) else [f"axis {axis}: {type(error).__name__}: {error}"]
    return found


@pytest.mark.parametrize("name", [name for name in CALLS if name not in LOSE_NAN])
@settings(max_examples=4)
@given(place=st.floats(0, 1, exclude_max=True))
def test_a_nan_stays_a_nan_or_is_an_error(name, place):
    assert nan_is_told(name, place)


@pytest.mark.filterwarnings("ignore:Mean of empty", "ignore:invalid value")
@pytest.mark.parametrize("name", CALLS)
def test_no_numbers_have_an_answer_or_an_error_in_words(name):
    assert unclear(name) == []


@pytest.mark.parametrize("name", LOSE_NAN)
def test_the_list_of_those_that_lose_a_nan_is_not_too_long(name):
    assert not all(nan_is_told(name, place) for place in np.arange(0, 1, 1 / 16))


def asked_for() -> set[str]:
    """Public functions of the rooms' methods and the laboratory with a parameter that is annotated as an array."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if path.name in BESIDE or parts[0] in ("course", "page"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                kinds = [ast.unparse(arg.annotation) for arg in ast.walk(node.args) if getattr(arg, "annotation", None)]
                if any(re.search(r"\b(Array|ArrayLike|ndarray)\b", kind) and "Callable" not in kind for kind in kinds):
                    found.add(".".join([*parts, node.name]).replace("__init__.", ""))
    return found


def test_every_public_function_of_arrays_is_asked_or_says_why_not():
    others = {f"{part}.{name}" for part, reasons in NOT_ASKED.items() for name in reasons}
    named = {name.partition(",")[0] for name in CALLS} | ALSO
    assert asked_for() - named == others
