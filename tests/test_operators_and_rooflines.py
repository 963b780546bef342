"""Times by a clock that is set, convolutions against float64, plans against exhaustive search, exercises."""

from __future__ import annotations

import functools
import itertools
import math
import os
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import Cells
from conftest import suggested_by

from dlscale import operators_and_rooflines as room
from dlscale.operators_and_rooflines import exercises, experiment

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # quick to compile


def test_a_call_is_timed_without_compiling():
    now = itertools.count()

    def slow_to_compile(v):
        list(itertools.islice(now, 100))
        return v + 1

    assert room.seconds(slow_to_compile, jnp.zeros(8), at_least=0, clock=now.__next__) == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system cannot do that")
def test_on_one_core_and_back():
    before = os.sched_getaffinity(0)
    with pytest.raises(ZeroDivisionError), room.on_one_core() as pinned:
        assert pinned and len(os.sched_getaffinity(0)) == 1
        raise ZeroDivisionError
    assert os.sched_getaffinity(0) == before


def arrays(batch=2, height=11, width=13, channels=3, out=5, k=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, height, width, channels)).astype(np.float32)
    return x, rng.normal(size=(k, k, channels, out)).astype(np.float32)


def true(x, w):
    """In float64, window by window."""
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(float), w.shape[:2], (1, 2))
    return np.einsum("nrcdij,ijdo->nrco", windows, w.astype(float))


@pytest.mark.parametrize("k, height, width", [(3, 11, 13), (1, 4, 4)])
def test_all_algorithms_agree(k, height, width):
    x, w = arrays(height=height, width=width, k=k)
    for name, found in jit(lambda x, w: {n: f(x, w) for n, f in room.ALGORITHMS.items()})(x, w).items():
        np.testing.assert_allclose(found, true(x, w), atol=1e-3 if name == "Winograd 4" else 1e-4, err_msg=name)


X, W = arrays()


@pytest.mark.parametrize("x, w, words", [
    (X[0], W, "x must be"), (X, W[:2], "x must be"), (X[..., :2], W, "x must be"), (X[:, :2], W, "does not fit"),
])  # fmt: skip
def test_shapes_that_do_not_fit_are_told_by_each_algorithm(x, w, words):
    for convolve in room.ALGORITHMS.values():
        with pytest.raises(ValueError, match=words):
            convolve(x, w)


def test_tiles_without_a_result_or_too_large_for_float32_are_refused():
    for m, words in ((0, "m must be"), (12, "be useless")):
        with pytest.raises(ValueError, match=words):
            room.winograd_transforms(m, 3)


@pytest.mark.parametrize("m, r", [(1, 3), (3, 2), (4, 3), (4, 5)])
def test_transforms_are_exact(m, r):
    At, G, Bt = room.winograd_transforms(m, r)
    rng = np.random.default_rng(0)
    w, x = ([Fraction(int(a)) for a in rng.integers(-9, 10, n)] for n in (r, m + r - 1))
    found = At @ ((G @ np.array(w, object)) * (Bt @ np.array(x, object)))
    assert [*found] == [sum(a * b for a, b in zip(w, x[i:], strict=False)) for i in range(m)]


def pieces_of(rng, batch, algorithms=2):
    return [
        room.Piece(str(a), b, float(rng.uniform(0.2, 1) * b**0.8), int(rng.integers(0, 4)) * b)
        for a in range(algorithms)
        for b in range(1, batch + 1)
    ]


def partitions(pieces, batch):
    if batch == 0:
        yield []
    for piece in pieces:
        if piece.batch <= batch:
            yield from ([piece, *rest] for rest in partitions(pieces, batch - piece.batch))


def strided(*axes):
    """Windows as a view, with these axes: batch, rows, columns, channels, k, k."""

    def windows(x, k):
        found = np.lib.stride_tricks.sliding_window_view(x, (k, k), (1, 2))
        return jnp.asarray(found.transpose(axes).reshape(-1, k * k * x.shape[3]))

    return windows


def solved(i, o, peak, bandwidth):
    return max(1, math.ceil(4 * i * o / bandwidth / (2 * i * o / peak - 4 * (i + o) / bandwidth)))


def by_roof(flops, memory):
    return np.maximum(flops, memory).sum() / max(flops.sum(), memory)


ORDER = "Do rows and columns stand in the order"


@pytest.mark.parametrize(
    "exercise, answer, why",
    [
        (exercises.batch_needed, solved, ""),
        (exercises.batch_needed, lambda i, o, peak, bandwidth: math.ceil(2 * peak / bandwidth), "the batch"),
        (exercises.batch_needed, lambda i, o, peak, bandwidth: solved(i, i, peak, bandwidth), "a layer 64 × 4096"),
        (exercises.windows, strided(0, 1, 2, 4, 5, 3), ""),
        (exercises.windows, strided(0, 1, 2, 3, 4, 5), ORDER),
        (exercises.windows, lambda x, k: x.reshape(len(x), -1), "a column for each of its 2·2·1 numbers"),
        (exercises.fusion_gain, lambda f, peak, bandwidth: by_roof(np.array(f), 8 * peak / bandwidth), ""),
        (exercises.fusion_gain, lambda flops, peak, bandwidth: len(flops), "the gain is not"),
    ],
)
def test_exercises_take_every_right_answer_and_no_other(exercise, answer, why):
    right, line = exercise.judge(answer)
    assert right == (not why) and why in line, line


def further(*names):
    found = Cells("further/12_operators_and_rooflines_further")
    found.run(*(f"operators-further-{name}" for name in ("setup", *names)))
    return found


@suggested_by("12_operators_and_rooflines")
def test_what_the_lesson_suggests():
    found = Cells("12_operators_and_rooflines")
    found.run("operators-setup")
    found.run("operators-timed")
    assert found["timed"](jnp.matmul, jnp.ones((256, 256)), jnp.ones((256, 1)), at_least=0.01) < 1
    found.changes = {"return v * 0.5 + 1.0": "return jnp.sqrt(v * 0.5 + 1.0)"}
    found.run("operators-fusing-define")
    np.testing.assert_allclose(found["chain"](2)(jnp.full(3, 2.0)), [np.sqrt(0.5 * np.sqrt(2) + 1)] * 3, rtol=1e-6)
    found["timed"] = lambda *args, **options: 1.0
    found.changes = {"experiment.Shape(4, 32, 16, 16, k)": "experiment.Shape(4, 32, 1, 1, k)"}
    found.run("operators-crossover")
    counted = found["counted"]
    assert [k for k, flop in counted["FFT"].items() if flop < counted["direct"][k]] == [11, 15]


@suggested_by("12_operators_and_rooflines_further")
def test_what_the_further_notebook_suggests():
    names = "number", "graph", "programs", "products", "polynomials", "transforms"
    found = further(*names, "picture", "operands", "traffic", "best", "energy-of")
    nodes = found["graph"](lambda x: found["tree"]([a * a for a in x]), 16)
    assert (len(nodes), max(node.level for node in nodes)) == (31, 5)
    assert [a.shape for a in found["transforms"](3, 3)] == [(3, 5), (5, 3), (5, 5)]
    sizes = {"m": 169, "n": 384, "k": 1728}
    small, large = (found["energy"](sizes, *found["best_tile"](sizes, room))["DRAM"] for room in (2**15, 2**16))
    assert 0.5 < large / small < 0.95


def counted(sizes, tile, order):
    """Run the loops over tiles with one tile of each operand at hand, and count what is fetched and written."""
    held, seen, moved = {}, set(), 0
    for places in itertools.product(*(range(sizes[i] // tile[i]) for i in order)):
        at = dict(zip(order, places, strict=True))
        for name, (a, b) in {"inputs": "mk", "weights": "kn", "outputs": "mn"}.items():
            wanted = name, at[a], at[b]
            if held.get(name) != wanted:
                again = name == "outputs" and wanted in seen  # fetched, and written back once more
                moved += tile[a] * tile[b] * (2 if again else 1)
                held[name] = wanted
                seen.add(wanted)
    return moved


def test_words_that_move_are_those_of_the_loops():
    traffic, tile = further("operands", "traffic")["traffic"], {"m": 2, "n": 1, "k": 3}
    for counts, order in itertools.product(itertools.product((1, 2, 3), repeat=3), itertools.permutations("mnk")):
        sizes = {i: tile[i] * count for i, count in zip("mnk", counts, strict=True)}
        assert traffic(sizes, tile, order) == counted(sizes, tile, order)


def test_micro_batches_and_what_they_share_are_the_best_of_all():
    found, rng = further("split", "plans", "share"), np.random.default_rng(0)
    layers = [[p._replace(workspace=p.workspace * 2**20) for p in pieces_of(rng, 3)] for _ in range(2)]
    ways = [[*partitions(pieces, 3)] for pieces in layers]
    least = sum(min(map(room.workspace, own)) for own in ways) / 2**20
    for limit in (least, least + 1, least + 2, least + 4, 100):
        fitting = (c for c in itertools.product(*ways) if sum(map(room.workspace, c)) <= limit * 2**20)
        shared = found["share"]([found["plans_of"](own, 3) for own in layers], limit)
        assert sum(map(room.workspace, shared)) <= limit * 2**20
        assert [sum(piece.batch for piece in way) for way in shared] == [3, 3]
        assert sum(map(room.total, shared)) == pytest.approx(min(sum(map(room.total, c)) for c in fitting))


def test_ways_that_only_records_have_convolve():
    for channels, out in ((3, 5), (1, 1)):
        x, w = arrays(height=11, width=9, channels=channels, out=out)
        np.testing.assert_allclose(jit(experiment.shifts)(x, w), true(x, w), atol=1e-4)
    for layout in experiment.SPECTRUM_KEPT.values():
        kept = experiment.spectrum(x, w).transpose(layout)
        found = jit(functools.partial(experiment.with_spectrum, k=len(w), layout=layout))(x, kept)
        np.testing.assert_allclose(found, true(x, w), atol=1e-4)


def test_products_follow_one_another():
    assert experiment.repeated(3)(np.ones((2, 1), "float32"), np.float32([[1, 1], [0, 1]])).tolist() == [[4], [1]]
