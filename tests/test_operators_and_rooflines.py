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
from dlscale.lab import program
from dlscale.operators_and_rooflines import exercises, experiment

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # quick to compile


def test_a_call_is_timed_without_compiling_and_in_place():
    kept, now = jnp.zeros(8), [0]

    def clock():
        now[0] += 1
        return now[0]

    def slow_to_compile(v):
        now[0] += 100
        return v + 1

    assert room.seconds(slow_to_compile, kept, again=True, at_least=0, clock=clock) == 1
    assert kept.sum() == 0, "the caller's array is not given away"


def test_on_one_core_and_back():
    if not hasattr(os, "sched_getaffinity"):
        return
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


@pytest.mark.parametrize("k, height, width", [(3, 11, 13), (5, 8, 16), (1, 4, 4)])
def test_all_algorithms_agree(k, height, width):
    x, w = arrays(height=height, width=width, k=k)
    for name, found in jit(lambda x, w: {n: f(x, w) for n, f in room.ALGORITHMS.items()})(x, w).items():
        np.testing.assert_allclose(found, true(x, w), atol=1e-3 if name == "Winograd 4" else 1e-4, err_msg=name)


X, W = arrays()
PIECES = [room.Piece("a", 4, 1.0, 5000), room.Piece("b", 2, 1.0, 3000)]


@pytest.mark.parametrize(
    "call, given, words",
    [
        (room.convolve, ("im2col", X[0], W), r"x must be \(batch, height, width, in\)"),
        (room.convolve, ("im2col", X, W[:2]), r"and w \(k, k, in, out\), not"),
        (room.convolve, ("FFT", X[..., :2], W), "does not fit images"),
        (room.convolve, ("FFT", X[:, :2], W), "does not fit images"),
        (room.convolve, ("Winograd 3", X, W), "Unknown algorithm 'Winograd 3'"),
        (room.winograd_transforms, (12, 3), "float32 would be useless"),
        (room.winograd_transforms, (0, 3), "m must be a whole number of at least 1"),
        (room.split, (PIECES, 4, 100), "4 examples need a workspace of at least 3,000 bytes, not 100"),
        (room.split, (PIECES, 3, 1e9), r"No pieces make up 3 examples: there are only some of \[2, 4\]"),
    ],
)
def test_bad_input(call, given, words):
    with pytest.raises(ValueError, match=words):
        call(*given)


@pytest.mark.parametrize("m, r", [(1, 3), (2, 3), (3, 2), (4, 3), (2, 5), (6, 3), (4, 5)])
def test_transforms_are_exact(m, r):
    At, G, Bt = room.winograd_transforms(m, r)
    rng = np.random.default_rng(0)
    w, x = ([Fraction(int(a)) for a in rng.integers(-9, 10, n)] for n in (r, m + r - 1))
    found = At @ ((G @ np.array(w, object)) * (Bt @ np.array(x, object)))
    assert [*found] == [sum(a * b for a, b in zip(w, x[i:], strict=False)) for i in range(m)]


def test_larger_tiles_multiply_less():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays(height=26, width=26, channels=64, out=64)]
    work = {name: program.work_depth(f, *shapes).work for name, f in room.ALGORITHMS.items()}
    assert work["direct"] == work["im2col"] == 2 * 24**2 * 64 * (2 * 9 * 64 - 1)
    assert work["Winograd 4"] < work["Winograd 2"] < work["direct"]


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


@pytest.mark.parametrize("seed", range(4))
def test_a_split_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    pieces = pieces_of(rng, 4)
    for limit in (0, 2, 5, 20):
        ways = [way for way in partitions(pieces, 4) if room.workspace(way) <= limit]
        if not ways:
            with pytest.raises(ValueError, match="4 examples need a workspace of at least"):
                room.split(pieces, 4, limit)
            continue
        found = room.split(pieces, 4, limit)
        assert room.workspace(found) <= limit and sum(piece.batch for piece in found) == 4
        assert room.total(found) == pytest.approx(min(map(room.total, ways)))


# Exercises: what is right in another way, and what is nearly right


def strided(*axes):
    """Windows as a view, with these axes: batch, rows, columns, channels, k, k."""

    def windows(x, k):
        found = np.lib.stride_tricks.sliding_window_view(x, (k, k), (1, 2))
        return jnp.asarray(found.transpose(axes).reshape(-1, k * k * x.shape[3]))

    return windows


def in_loops(x, k):
    n, height, width, _ = x.shape
    places = itertools.product(range(n), range(height - k + 1), range(width - k + 1))
    return [x[b, r : r + k, s : s + k].ravel() for b, r, s in places]


def greedy(seconds, batch):
    pieces = []
    while batch:
        pieces.append(min(range(1, batch + 1), key=lambda b: seconds[b] / b))
        batch -= pieces[-1]
    return pieces


def recursive(seconds, batch):
    @functools.cache
    def best(n):
        return min((best(n - b)[0] + seconds[b], (*best(n - b)[1], b)) for b in range(1, n + 1)) if n else (0.0, ())

    return best(batch)[1]


def by_time(flops, peak, bandwidth):
    flops, memory = np.array(flops), 8 * peak / bandwidth
    return np.maximum(flops, memory).sum() / np.max([flops.sum(), memory])


def solved(i, o, peak, bandwidth):
    return max(1, math.ceil(4 * i * o / bandwidth / (2 * i * o / peak - 4 * (i + o) / bandwidth)))


ORDER = "Do rows and columns stand in the order"


@pytest.mark.parametrize(
    "exercise, answer, why",
    [
        (exercises.batch_needed, solved, ""),
        (exercises.batch_needed, lambda i, o, peak, bandwidth: math.ceil(2 * peak / bandwidth), "the batch"),
        (exercises.work_and_depth, lambda b, i, o: [b * o * (2 * i + 1), 3 + (i - 1).bit_length()], ""),
        (exercises.work_and_depth, lambda b, i, o: (b * o * (2 * i + 1), 2 + i), "the depth is not"),
        (exercises.work_and_depth, lambda b, i, o: (2 * b * o * i, 3 + math.ceil(math.log2(i))), "the work is not"),
        (exercises.work_and_depth, lambda b, i, o: iter([b * o * (2 * i + 1), 3 + (i - 1).bit_length()]), ""),
        (exercises.micro_batches, recursive, ""),
        (exercises.micro_batches, lambda seconds, batch: jnp.array(recursive(seconds, batch)), ""),
        (exercises.micro_batches, lambda seconds, batch: reversed(recursive(seconds, batch)), ""),
        (exercises.micro_batches, lambda s, batch: room.split([], batch, math.inf), "the library's own split"),
        (exercises.micro_batches, greedy, "there are others that take less"),
        (exercises.micro_batches, lambda seconds, batch: [1], "sum to 1 examples, not to 5"),
        (exercises.windows, in_loops, ""),
        (exercises.windows, strided(0, 1, 2, 4, 5, 3), ""),
        (exercises.windows, strided(0, 1, 2, 3, 4, 5), ORDER),
        (exercises.windows, strided(0, 1, 2, 5, 4, 3), ORDER),  # the kernel turned over
        (exercises.windows, strided(0, 2, 1, 4, 5, 3), ORDER),  # the image
        (exercises.windows, lambda x, k: x.reshape(len(x), -1), "a column for each of its 2·2·1 numbers"),
        (exercises.fusion_gain, by_time, ""),
        (exercises.fusion_gain, lambda flops, peak, bandwidth: len(flops), "the gain is not"),
    ],
)
def test_exercises_take_every_right_answer_and_no_other(exercise, answer, why):
    right, line = exercise.judge(answer)
    assert right == (not why) and why in line, line


# What the notebooks compute and suggest


def further(*names):
    found = Cells("further/12_operators_and_rooflines_further")
    found.run(*(f"operators-further-{name}" for name in ("setup", *names)))
    return found


@suggested_by("12_operators_and_rooflines")
def test_what_the_lesson_suggests():
    found = Cells("12_operators_and_rooflines")
    found.run("operators-setup")
    found.changes = {"(4096, 4096)": "(256, 256)", "(4096, batch)": "(256, batch)", "64, 128, 256]": "64]"}
    found.run("operators-timed", "operators-dense")
    assert set(found["layer"]) == {1, 2, 4, 8, 16, 32, 64} and all(0 < each < 1 for each in found["layer"].values())
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
    traced = program.work_depth(lambda x: jnp.sum(x * x), jax.ShapeDtypeStruct((16,), "float32"))
    assert traced == (len(nodes), max(node.level for node in nodes)) == (31, 5)
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
            wanted = (at[a], at[b])
            if held.get(name) != wanted:
                again = name == "outputs" and wanted in seen  # fetched, and written back once more
                moved += tile[a] * tile[b] * (2 if again else 1)
                held[name] = wanted
                seen |= {wanted} if name == "outputs" else set()
    return moved


def test_words_that_move_are_those_of_the_loops():
    traffic = further("operands", "traffic")["traffic"]
    for sides, counts in itertools.product(itertools.product((1, 2, 3), repeat=3), ((1, 2, 3), (3, 1, 2), (2, 3, 1))):
        tile = dict(zip("mnk", sides, strict=True))
        sizes = {i: tile[i] * count for i, count in zip("mnk", counts, strict=True)}
        for order in itertools.permutations("mnk"):
            assert traffic(sizes, tile, order) == counted(sizes, tile, order)


@pytest.mark.parametrize("seed", range(3))
def test_a_shared_limit_is_shared_as_well_as_can_be(seed):
    found, rng = further("plans", "share"), np.random.default_rng(seed)
    layers = [[p._replace(workspace=p.workspace * 2**20) for p in pieces_of(rng, 3)] for _ in range(3)]
    ways = [[*partitions(pieces, 3)] for pieces in layers]
    least = sum(min(map(room.workspace, own)) for own in ways) / 2**20
    for limit in (least, least + 2, least + 5, 100):
        fitting = (c for c in itertools.product(*ways) if sum(map(room.workspace, c)) <= limit * 2**20)
        best = min(sum(map(room.total, c)) for c in fitting)
        shared = found["share"]([found["plans_of"](own, 3) for own in layers], limit)
        assert sum(map(room.workspace, shared)) <= limit * 2**20
        assert sum(map(room.total, shared)) == pytest.approx(best)


# What is recorded


def test_ways_that_only_records_have_convolve():
    for channels, out in ((3, 5), (1, 1)):
        x, w = arrays(height=11, width=9, channels=channels, out=out)
        np.testing.assert_allclose(jit(experiment.shifts)(x, w), true(x, w), atol=1e-4)
    for layout in experiment.SPECTRUM_KEPT.values():
        kept = experiment.spectrum(x, w).transpose(layout)
        found = jit(functools.partial(experiment.with_spectrum, k=len(w), layout=layout))(x, kept)
        np.testing.assert_allclose(found, true(x, w), atol=1e-4)


def test_what_is_too_large_to_try_is_not_timed(monkeypatch):
    monkeypatch.setattr(room, "seconds", lambda f, *args, **options: 32e-6)
    small, large = [1, 4, 2, 3, 3], [16, 128, 64, 64, 15]
    for way in ("im2col", "FFT", *experiment.SPECTRUM_KEPT):
        found = experiment.timed(way, [small, large])
        assert found[0][0] == pytest.approx(5) and all(map(math.isnan, found[1]))


def test_products_follow_one_another_and_errors_grow_with_the_tile():
    x, w = np.ones((2, 1), np.float32), np.float32([[1, 1], [0, 1]])
    np.testing.assert_array_equal(experiment.repeated(3)(x, w), [[4], [1]])
    found = experiment.errors_trial(seed=1)
    assert found.keys() == experiment.ERRORS.tolerance.keys() and found["Winograd 4"] > found["Winograd 2"] + 1
