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


# Time


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


# Convolution


def arrays(batch=2, height=11, width=13, channels=3, out=5, k=3, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(batch, height, width, channels)).astype(np.float32)
    return x, rng.normal(size=(k, k, channels, out)).astype(np.float32)


def true(x, w):
    """In float64, window by window."""
    k, (_, height, width, _) = len(w), x.shape
    parts = [
        np.einsum("nrci,io->nrco", x[:, i : height - k + 1 + i, j : width - k + 1 + j].astype(float), w[i, j])
        for i in range(k)
        for j in range(k)
    ]
    return sum(parts)


@pytest.mark.parametrize("k, height, width", [(3, 11, 13), (5, 8, 16), (1, 4, 4)])
def test_all_algorithms_agree(k, height, width):
    x, w = arrays(height=height, width=width, k=k)
    for name, found in jit(lambda x, w: {n: f(x, w) for n, f in room.ALGORITHMS.items()})(x, w).items():
        np.testing.assert_allclose(found, true(x, w), atol=1e-3 if name == "Winograd 4" else 1e-4, err_msg=name)


def test_shapes_that_do_not_fit():
    x, w = arrays()
    np.testing.assert_array_equal(room.convolve("direct", x, w), room.direct(x, w))
    for bad in ((x[0], w), (x, w[:2])):
        with pytest.raises(ValueError, match=r"x must be \(batch, height, width, in\)"):
            room.convolve("im2col", *bad)
    for bad in ((x[..., :2], w), (x[:, :2], w)):
        with pytest.raises(ValueError, match="does not fit images"):
            room.convolve("FFT", *bad)
    with pytest.raises(ValueError, match="Unknown algorithm 'Winograd 3'"):
        room.convolve("Winograd 3", x, w)


@pytest.mark.parametrize("m, r", [(1, 3), (2, 3), (3, 2), (4, 3), (2, 5), (6, 3), (4, 5)])
def test_transforms_are_exact(m, r):
    At, G, Bt = room.winograd_transforms(m, r)
    rng = np.random.default_rng(0)
    w, x = ([Fraction(int(a)) for a in rng.integers(-9, 10, n)] for n in (r, m + r - 1))
    found = At @ ((G @ np.array(w, object)) * (Bt @ np.array(x, object)))
    assert [*found] == [sum(a * b for a, b in zip(w, x[i:], strict=False)) for i in range(m)]
    assert all(type(entry) is Fraction or isinstance(entry, int) for t in (At, G, Bt) for entry in t.flat)


def test_too_many_points():
    with pytest.raises(ValueError, match="float32 would be useless"):
        room.winograd_transforms(12, 3)
    with pytest.raises(ValueError, match="m must be a whole number of at least 1"):
        room.winograd_transforms(0, 3)


def test_larger_tiles_multiply_less():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays(height=26, width=26, channels=64, out=64)]
    work = {name: program.work_depth(f, *shapes).work for name, f in room.ALGORITHMS.items()}
    assert work["direct"] == work["im2col"] == 2 * 24**2 * 64 * (2 * 9 * 64 - 1)
    assert work["Winograd 4"] < work["Winograd 2"] < work["direct"]


# Micro-batches


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


def test_the_least_limit_is_named():
    pieces = [room.Piece("a", 4, 1.0, 5000), room.Piece("b", 2, 1.0, 3000)]
    with pytest.raises(ValueError, match="4 examples need a workspace of at least 3,000 bytes, not 100"):
        room.split(pieces, 4, 100)
    with pytest.raises(ValueError, match=r"No pieces make up 3 examples: there are only some of \[2, 4\]"):
        room.split(pieces, 3, 1e9)


# Exercises: what is right in another way, and what is nearly right


def judged(exercise, text):
    names = dict(vars(exercises))
    exec(text, names)
    return exercise.judge(names[exercise.answer])


def test_a_batch_is_not_the_ridge():
    assert not exercises.batch_needed.judge(lambda i, o, peak, bandwidth: math.ceil(2 * peak / bandwidth))[0]
    solved = lambda i, o, peak, bandwidth: max(  # noqa: E731
        1, math.ceil(4 * i * o / bandwidth / (2 * i * o / peak - 4 * (i + o) / bandwidth))
    )
    assert exercises.batch_needed.judge(solved)[0]


def test_sums_in_a_row_are_too_deep():
    right, line = exercises.work_and_depth.judge(lambda b, i, o: (b * o * (2 * i + 1), 2 + i))
    assert not right and "the depth is not" in line
    for shape in (jnp.array, list, iter):
        assert exercises.work_and_depth.judge(
            lambda b, i, o, s=shape: s([b * o * (2 * i + 1), 3 + (i - 1).bit_length()])
        )[0]
    assert not exercises.work_and_depth.judge(lambda b, i, o: (2 * b * o * i, 3 + math.ceil(math.log2(i))))[0]


def test_pieces_must_be_the_best_and_greedy_ones_are_not():
    greedy = """
def micro_batches(seconds, batch):
    pieces = []
    while batch:
        b = min(range(1, batch + 1), key=lambda b: seconds[b] / b)
        pieces.append(b)
        batch -= b
    return pieces
"""
    right, line = judged(exercises.micro_batches, greedy)
    assert not right and "there are others that take less" in line
    recursive = """
import functools
def micro_batches(seconds, batch):
    @functools.cache
    def best(n):
        if n == 0:
            return 0.0, ()
        return min((best(n - b)[0] + seconds[b], best(n - b)[1] + (b,)) for b in range(1, n + 1))
    return best(batch)[1]
"""
    for best in ("best(batch)[1]", "jnp.array(best(batch)[1])", "reversed(best(batch)[1])"):
        assert judged(exercises.micro_batches, recursive.replace("best(batch)[1]", best))[0]
    theirs = "def micro_batches(seconds, batch): return operators.split([], batch, math.inf)"
    assert "the library's own split" in judged(exercises.micro_batches, theirs)[1]
    assert "sum to 1 examples, not to 5" in exercises.micro_batches.judge(lambda seconds, batch: [1])[1]


def test_windows_stand_in_the_order_of_the_results_and_of_the_weights():
    def strided(x, k, axes):
        found = np.lib.stride_tricks.sliding_window_view(x, (k, k), (1, 2))  # batch, rows, columns, channels, k, k
        return found.transpose(axes).reshape(-1, k * k * x.shape[3])

    def in_loops(x, k):
        n, height, width, _ = x.shape
        places = itertools.product(range(n), range(height - k + 1), range(width - k + 1))
        return [x[b, r : r + k, s : s + k].ravel() for b, r, s in places]

    assert exercises.windows.judge(in_loops)[0]
    assert exercises.windows.judge(lambda x, k: jnp.asarray(strided(x, k, (0, 1, 2, 4, 5, 3))))[0]
    for axes in ((0, 1, 2, 3, 4, 5), (0, 1, 2, 5, 4, 3), (0, 2, 1, 4, 5, 3)):  # as they come; kernel, image turned over
        right, line = exercises.windows.judge(functools.partial(strided, axes=axes))
        assert not right and "Do rows and columns stand in the order" in line
    right, line = exercises.windows.judge(lambda x, k: x.reshape(len(x), -1))
    assert not right and "a column for each of its 2·2·1 numbers" in line


def test_fusing_gains_less_once_arithmetic_is_the_limit():
    assert not exercises.fusion_gain.judge(lambda flops, peak, bandwidth: len(flops))[0]
    bytes_only = lambda flops, peak, bandwidth: len(flops) * 8 / bandwidth / (8 / bandwidth)  # noqa: E731
    assert not exercises.fusion_gain.judge(bytes_only)[0]
    by_time = """
def fusion_gain(flops, peak, bandwidth):
    flops, memory = np.array(flops), 8 * peak / bandwidth
    return np.where(flops > memory, flops, memory).sum() / np.max([flops.sum(), memory])
"""
    assert judged(exercises.fusion_gain, by_time)[0]


# What the notebooks compute and suggest


def lesson(changes, *identities):
    found = Cells("12_operators_and_rooflines")
    found.run("operators-setup")
    found.changes = changes
    found.run(*(f"operators-{identity}" for identity in identities))
    return found


def further(*identities):
    found = Cells("further/12_operators_and_rooflines_further")
    found.run("operators-further-setup", *(f"operators-further-{identity}" for identity in identities))
    return found


@suggested_by("12_operators_and_rooflines")
def test_a_layer_in_a_cache_is_timed_as_a_large_one():
    changes = {"(4096, 4096)": "(256, 256)", "(4096, batch)": "(256, batch)", "64, 128, 256]": "64]"}
    found = lesson(changes, "timed", "dense")
    assert set(found["layer"]) == {1, 2, 4, 8, 16, 32, 64} and all(0 < each < 1 for each in found["layer"].values())


@suggested_by("12_operators_and_rooflines")
def test_an_operator_with_a_root_can_be_fused():
    found = lesson({"return v * 0.5 + 1.0": "return jnp.sqrt(v * 0.5 + 1.0)"}, "fusing-define")
    v = jnp.full(3, 2.0)
    np.testing.assert_allclose(found["chain"](2)(v), [np.sqrt(0.5 * np.sqrt(2) + 1)] * 3, rtol=1e-6)


@suggested_by("12_operators_and_rooflines")
def test_with_one_channel_fft_has_fewer_flop_for_large_kernels():
    found = lesson({})
    found["timed"] = lambda *args, **options: 1.0
    found.changes = {"experiment.Shape(4, 32, 16, 16, k)": "experiment.Shape(4, 32, 1, 1, k)"}
    found.run("operators-crossover")
    fewer = [k for k, flop in found["counted"]["FFT"].items() if flop < found["counted"]["direct"][k]]
    assert fewer == [11, 15]


@suggested_by("12_operators_and_rooflines_further")
def test_a_sum_of_squares_is_as_deep_as_its_trace_says():
    found = further("number", "graph", "programs", "products")
    nodes = found["graph"](lambda x: found["tree"]([a * a for a in x]), 16)
    traced = program.work_depth(lambda x: jnp.sum(x * x), jax.ShapeDtypeStruct((16,), "float32"))
    assert traced == (len(nodes), max(node.level for node in nodes)) == (31, 5)


@suggested_by("12_operators_and_rooflines_further")
def test_three_results_of_three_weights_take_five_products():
    At, G, Bt = further("polynomials", "transforms")["transforms"](3, 3)
    assert (At.shape, G.shape, Bt.shape) == ((3, 5), (5, 3), (5, 5))
    for ours, library in zip((At, G, Bt), room.winograd_transforms(3, 3), strict=True):
        np.testing.assert_array_equal(ours.astype(float), library.astype(float))


@suggested_by("12_operators_and_rooflines_further")
def test_a_larger_memory_costs_less_energy():
    found = further("picture", "operands", "traffic", "best", "energy-of")
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


def test_modelled_hardware_multiplies():
    found = further("systolic", "nfu", "anna-model")
    rng = np.random.default_rng(0)
    a, b = rng.integers(-5, 6, (3, 5)), rng.integers(-5, 6, (5, 2))
    states = found["systolic"](a, b)
    np.testing.assert_array_equal(states[-1][2], a @ b)
    assert len(states) == 3 + 2 + 5 - 2
    for (right, down, _), (later_right, later_down, _) in itertools.pairwise(states):  # neighbours only
        np.testing.assert_array_equal(later_right[:, 1:], right[:, :-1])
        np.testing.assert_array_equal(later_down[1:], down[:-1])
    results, cycles, read = found["functional_unit"](np.ones((2, 20), int), np.ones((20, 16), int), 1)
    np.testing.assert_array_equal(results, 10)
    assert cycles == 2 * 2 + 2 and read == 4 * (16 + 256)
    x, w = (np.round(4 * values).astype(int) for values in arrays(height=10, width=10))
    results, came = found["anna"](x[0], w)
    np.testing.assert_allclose(results, true(x[:1], w)[0])
    assert came == 8 * (3 * 3 + 7 * 3) * 3  # of a row of windows one whole, then columns


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


def test_each_experiment_measures_what_its_tolerance_names(monkeypatch):
    monkeypatch.setattr(experiment, "timed_in_kept_memory", lambda way, shapes: [[1.0, 2.0]] * len(shapes))
    monkeypatch.setattr(room, "seconds", lambda f, x, w, **options: 1e-6 * w.size)
    monkeypatch.setattr(experiment, "DENSE_BATCHES", (1,))
    for chosen in (experiment.KERNEL_SIZES, experiment.PIECES, experiment.BATCHES):
        planned = []
        chosen.plan(planned.extend)
        assert len(planned) in (42, 20, 12) and chosen.trial(**planned[0]).keys() <= chosen.tolerance.keys()
    assert experiment.batch_trial(seed=0) == pytest.approx({"log2_us 4096 1": 24, "log2_us 256 1": 16 - math.log2(100)})


def test_products_follow_one_another_and_errors_grow_with_the_tile():
    x, w = np.ones((2, 1), np.float32), np.float32([[1, 1], [0, 1]])
    np.testing.assert_array_equal(experiment.repeated(3)(x, w), [[4], [1]])
    found = experiment.errors_trial(seed=1)
    assert found.keys() == experiment.ERRORS.tolerance.keys() and found["Winograd 4"] > found["Winograd 2"] + 1
