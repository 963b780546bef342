"""The roof by a clock that is set, convolutions against the library's, plans against exhaustive search."""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import Cells
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import operators_and_rooflines as room
from dlscale.lab import program
from dlscale.operators_and_rooflines import exercises, experiment

jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # quick to compile


# The roof


def test_the_roof_is_the_lower_of_two():
    machine = room.Machine(100e9, 20e9)
    assert machine.ridge == 5
    np.testing.assert_array_equal(machine.attainable([1, 5, 50]), [20e9, 100e9, 100e9])
    assert machine.seconds(100e9, 1e9) == 1 and machine.seconds(1e9, 40e9) == 2


def test_what_is_timed_is_what_is_counted(monkeypatch):
    asked = {}

    def clock(f, *args, again=False, **_):
        asked.update(f=f, args=args, again=again)
        return 0.5

    monkeypatch.setattr(room, "seconds", clock)
    assert room.measured_peak(64) == 2 * 64**3 / 0.5
    assert [a.shape for a in asked["args"]] == [(64, 64)] * 2
    timed = lambda run, arrays: asked.update(run=run, arrays=arrays) or (1.0, 0.5)  # noqa: E731
    monkeypatch.setattr(room, "together", timed)
    assert room.measured_bandwidth(2**26) == 2 * 2**26 * 4 / 0.5
    (v,) = asked["arrays"]
    assert v.nbytes == 2**26
    asked["run"](v)
    assert v.is_deleted(), "in place"
    # every turn is run: after so many, v has come so near to 2
    np.testing.assert_allclose(room.sweep(4)(jnp.zeros(3)), 2 - 0.5**3)
    with pytest.raises(ValueError, match="size must be a whole number of at least 1"):
        room.measured_peak(0)
    with pytest.raises(ValueError, match="nbytes must be a whole number of at least 4"):
        room.measured_bandwidth(1)


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


def test_threads_that_were_started_on_one_core_are_freed():
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) == 1:
        return
    where, free = [], threading.Event()
    with room.on_one_core():
        thread = threading.Thread(target=lambda: (free.wait(60), where.append(os.sched_getaffinity(0))))
        thread.start()
    assert len(os.sched_getaffinity(thread.native_id)) == 1, "the reason why there is another function"
    room.on_all_cores()
    free.set(), thread.join()
    assert where == [os.sched_getaffinity(0)]


def test_the_fastest_round_counts_among_those_in_which_the_cores_were_busy(monkeypatch):
    now, turns = {"wall": 0.0, "work": 0.0}, [(9.0, 18.0), (4.0, 2.0), (3.0, 6.0), (2.1, 4.0), (1.5, 1.6)]

    def run(number):  # the first one compiles; wall and processor seconds of a round, of two cores together
        wall, work = turns[int(number)]
        now["wall"], now["work"] = now["wall"] + wall / 2, now["work"] + work / 2
        return number + 1

    monkeypatch.setattr(room.time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(room.time, "process_time", lambda: now["work"])
    busy, work = room.together(run, [jnp.zeros(())] * 2, rounds=4)
    assert (busy, work) == pytest.approx((2.0 / 2.1, 2.0)), "not 0.8, of a round that had half of the cores"
    turns[1:] = [(4.0, 2.0)] * 6 + [(1.0, 2.0)]
    assert room.together(run, [jnp.zeros(())] * 2, rounds=4) == pytest.approx((1.0, 1.0)), "waits for a busy round"
    turns[1:] = [(4.0, 2.0)] * 8
    assert room.together(run, [jnp.zeros(())] * 2, rounds=4) == pytest.approx((0.25, 1.0)), "not for ever"


def test_measured_in_a_moment_and_within_reason():
    peak, bandwidth = room.measured_peak(256), room.measured_bandwidth(2**20)
    assert 1e8 < peak < 1e15 and 1e8 < bandwidth < 1e14


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


def error_bound(algorithm, x, w):
    """How far a result of an algorithm may lie from the true one: γ(n) times the same sum of magnitudes (Higham 2002).

    n is the number of roundings on the longest way from a number to a result, γ(n) = nu / (1 - nu). Of the Fourier
    transform the bound is for the whole image, of lengths (Higham 2002, theorem 24.2).
    """
    k, _, channels, _ = w.shape
    if algorithm == "FFT":
        lengths = jnp.sqrt(jnp.einsum("nrci,nrci->ni", x, x)) @ jnp.sqrt(jnp.einsum("klio,klio->io", w, w))
        levels = 3 * math.log2(room._quick(x.shape[1]) * room._quick(x.shape[2]))
        return gamma(8 * levels + channels) * lengths[:, None, None]
    if not algorithm.startswith("Winograd"):
        return gamma(k * k * channels) * room.direct(jnp.abs(x), jnp.abs(w))
    m = int(algorithm.split()[1])
    transforms = room.Transforms(*(np.abs(t.astype(float)) for t in room.winograd_transforms(m, k)))
    n = 2 * (m + k - 1) ** 2 + k * k + channels + 3  # of the three transforms, their entries, and the sum
    return gamma(n) * room.winograd(jnp.abs(x), jnp.abs(w), m, transforms)


def gamma(n):
    """The relative error that n roundings in a row of float32, each 2^-24 at most, may make together."""
    return n * 2.0**-24 / (1 - n * 2.0**-24)


@pytest.mark.parametrize("k, height, width", [(3, 11, 13), (5, 8, 16), (1, 4, 4)])
def test_all_algorithms_agree_within_derived_bounds(k, height, width):
    x, w = arrays(height=height, width=width, k=k)
    wanted = true(x, w)
    everything = lambda x, w: {n: (f(x, w), error_bound(n, x, w)) for n, f in room.ALGORITHMS.items()}  # noqa: E731
    for name, (found, bound) in jit(everything)(x, w).items():
        error = np.abs(np.asarray(found) - wanted)
        assert (error <= np.asarray(bound)).all(), name
        assert bound.max() < 0.3, f"{name}: the bound says something"


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


@pytest.mark.parametrize("tile", [2, 7, 32])
def test_overlapping_tiles_are_the_whole(tile):
    x, w = arrays(height=17, width=9)
    run = jit(functools.partial(room.fft_in_tiles, tile=tile))
    np.testing.assert_allclose(run(x, w), true(x, w), atol=1e-4)
    with pytest.raises(ValueError, match="tile must be a whole number of at least 4"):
        room.fft_in_tiles(*arrays(k=5), tile=3)


@pytest.mark.parametrize("m, r", [(1, 3), (2, 3), (3, 2), (4, 3), (2, 5), (6, 3), (4, 5)])
def test_transforms_are_exact(m, r):
    At, G, Bt = room.winograd_transforms(m, r)
    rng = np.random.default_rng(0)
    w, x = ([Fraction(int(a)) for a in rng.integers(-9, 10, n)] for n in (r, m + r - 1))
    found = At @ ((G @ np.array(w, object)) * (Bt @ np.array(x, object)))
    assert [*found] == [sum(a * b for a, b in zip(w, x[i:], strict=False)) for i in range(m)]
    assert all(type(entry) is Fraction or isinstance(entry, int) for t in (At, G, Bt) for entry in t.flat)


def test_the_transforms_of_lavin_and_gray():
    """F(2, 3), but for signs that cancel: rows of G and Bt may both be negated."""
    _, G, Bt = room.winograd_transforms(2, 3)
    theirs_g = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
    theirs_b = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]])
    for ours, theirs in ((G, theirs_g), (Bt, theirs_b)):
        np.testing.assert_array_equal(np.abs(ours.astype(float)), np.abs(theirs))


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


@pytest.mark.parametrize("seed", range(3))
def test_a_shared_limit_is_shared_as_well_as_can_be(seed):
    rng = np.random.default_rng(seed)
    layers = [pieces_of(rng, 3) for _ in range(3)]
    ways = [[*partitions(pieces, 3)] for pieces in layers]
    least = sum(min(map(room.workspace, own)) for own in ways)
    for limit in (least, least + 2, least + 5, 100):
        fitting = (c for c in itertools.product(*ways) if sum(map(room.workspace, c)) <= limit)
        best = min(sum(map(room.total, c)) for c in fitting)
        found = room.share(layers, 3, limit)
        assert sum(map(room.workspace, found)) <= limit
        assert sum(map(room.total, found)) == pytest.approx(best)
    if least:
        with pytest.raises(ValueError, match=f"at least {least} bytes together"):
            room.share(layers, 3, least - 1)


def test_the_least_limit_is_named():
    pieces = [room.Piece("a", 4, 1.0, 5000), room.Piece("b", 2, 1.0, 3000)]
    with pytest.raises(ValueError, match="4 examples need a workspace of at least 3,000 bytes, not 100"):
        room.split(pieces, 4, 100)
    with pytest.raises(ValueError, match=r"No pieces make up 3 examples: there are only some of \[2, 4\]"):
        room.split(pieces, 3, 1e9)


# Tiles


def counted(sizes, tile, order):
    """Run the loops over tiles with one tile of each operand at hand, and count what is fetched and written."""
    held, seen, moved = {}, set(), dict.fromkeys(room.OPERANDS, 0)
    for places in itertools.product(*(range(sizes[i] // tile[i]) for i in order)):
        at = dict(zip(order, places, strict=True))
        for name, (a, b) in room.OPERANDS.items():
            wanted, size = (at[a], at[b]), tile[a] * tile[b]
            if held.get(name) != wanted:
                again = (name, wanted) in seen
                moved[name] += size * (2 if again else 1)  # of an output: fetched if not new, and written later
                if name != "outputs" and again:
                    moved[name] -= size
                held[name] = wanted
                seen.add((name, wanted))
    return moved


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_words_that_move_are_those_of_the_loops(data):
    tile = {i: data.draw(st.integers(1, 3)) for i in "mnk"}
    sizes = {i: tile[i] * data.draw(st.integers(1, 4)) for i in "mnk"}
    order = "".join(data.draw(st.permutations("mnk")))
    assert room.traffic(sizes, tile, order) == counted(sizes, tile, order)


def test_tiles_that_do_not_fit():
    sizes = {"m": 4, "n": 4, "k": 4}
    with pytest.raises(ValueError, match="does not along n, k"):
        room.traffic(sizes, {"m": 2, "n": 3, "k": 8}, "mnk")
    with pytest.raises(ValueError, match="order must name the loops m, n and k once each, not 'mn'"):
        room.traffic(sizes, sizes, "mn")
    with pytest.raises(ValueError, match="three, not 2"):
        room.best_tiling(sizes, 2, 64, {})


def test_the_best_tiling_is_the_best_of_all():
    prices = {"DRAM": 640.0, "SRAM": 11.0, "registers": 0.23, "arithmetic": 0.8}
    sizes = {"m": 8, "n": 6, "k": 4}
    found = room.best_tiling(sizes, 24, 8, prices)
    assert room.words(found.sram) <= 24 and room.words(found.registers) <= 8
    tiles = [dict(zip("mnk", t, strict=True)) for t in itertools.product((1, 2, 4, 8), (1, 2, 3, 6), (1, 2, 4))]
    orders = ["".join(o) for o in itertools.permutations("mnk")]
    least = min(sum(room.traffic(sizes, t, o).values()) for t in tiles if room.words(t) <= 24 for o in orders)
    moved = room.accesses(sizes, found)
    assert moved["DRAM"] == least and moved["arithmetic"] == 8 * 6 * 4 and moved["registers"] == 4 * 8 * 6 * 4
    inner = [t for t in tiles if room.words(t) <= 8]
    ties = [
        room.Tiling(outer, small, (order, turned))
        for outer in tiles
        for order in orders
        if room.words(outer) <= 24 and sum(room.traffic(sizes, outer, order).values()) == least
        for small in inner
        for turned in orders
        if all(outer[i] % small[i] == 0 for i in "mnk")
    ]
    energy = lambda tiling: sum(prices[level] * n for level, n in room.accesses(sizes, tiling).items())  # noqa: E731
    assert energy(found) == pytest.approx(min(map(energy, ties)))
    everything = room.Tiling(sizes, sizes)
    assert room.accesses(sizes, everything)["DRAM"] == 8 * 4 + 4 * 6 + 8 * 6


# Systolic arrays


@pytest.mark.parametrize("keeps", ["outputs", "weights"])
@pytest.mark.parametrize("m, depth, n", [(1, 1, 1), (3, 5, 2), (4, 4, 4), (2, 1, 6)])
def test_an_array_of_cells_multiplies(keeps, m, depth, n):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-5, 6, (m, depth)), rng.integers(-5, 6, (depth, n))
    found, steps = room.systolic(a, b, keeps)
    np.testing.assert_array_equal(found, a @ b)
    rows = m if keeps == "outputs" else depth
    assert len(steps) == room.systolic_cycles(m, n, depth, rows, n, keeps) == m + n + depth - 2


def test_cells_hear_only_from_their_neighbours():
    rng = np.random.default_rng(1)
    _, steps = room.systolic(rng.normal(size=(3, 4)), rng.normal(size=(4, 3)))
    for before, after in itertools.pairwise(steps):
        np.testing.assert_array_equal(after.across[:, 1:], before.across[:, :-1])
        np.testing.assert_array_equal(after.down[1:], before.down[:-1])


def test_shapes_that_no_array_multiplies():
    with pytest.raises(ValueError, match=r"shapes \(2, 3\) and \(2, 3\)"):
        room.systolic(np.ones((2, 3)), np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"Unknown keeps 'output'\. Did you mean 'outputs'"):
        room.systolic(np.ones((2, 2)), np.ones((2, 2)), "output")


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
    assert judged(exercises.micro_batches, recursive)[0]
    assert "together, not" in exercises.micro_batches.judge(lambda seconds, batch: [1])[1]


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


def test_a_tile_must_fit_and_move_little():
    assert "the memory has" in exercises.tile.judge(lambda sizes, room: (sizes, "mnk"))[1]
    assert "Give two things" in exercises.tile.judge(lambda sizes, room: {"m": 1, "n": 1, "k": 1})[1]
    right, line = exercises.tile.judge(lambda sizes, room: ({"m": 1, "n": 1, "k": 1}, "mnk"))
    assert not right and "as many words move" in line
    all_of_them = """
def choose_tile(sizes, room):
    sides = {i: [d for d in range(1, sizes[i] + 1) if sizes[i] % d == 0] for i in "mnk"}
    tiles = [{"m": m, "n": n, "k": DEPTHS} for m in sides["m"] for n in sides["n"] for k in sides["k"]]
    choices = [(t, "mnk") for t in tiles if operators.words(t) <= room]
    return min(choices, key=lambda c: sum(operators.traffic(sizes, *c).values()))
"""
    right, line = judged(exercises.tile, all_of_them.replace("DEPTHS", "k"))
    assert not right and "was asked" in line and "may be 200 times" in line
    # outputs that stay, their sides as large as fits: right but for the one layer whose weights should stay
    outputs_stay = """
def choose_tile(sizes, room):
    sides = {i: [d for d in range(1, sizes[i] + 1) if sizes[i] % d == 0] for i in "mn"}
    tiles = [{"m": m, "n": n, "k": 1} for m in sides["m"] for n in sides["n"]]
    choices = [(t, "mnk") for t in tiles if operators.words(t) <= room]
    return min(choices, key=lambda c: sum(operators.traffic(sizes, *c).values()))
"""
    right, line = judged(exercises.tile, outputs_stay)
    assert not right and "'m': 1024" in line
    by_rule = """
def choose_tile(sizes, room):
    divisors = lambda n: [d for d in range(1, n + 1) if n % d == 0]
    def largest(a, b, c):                       # a formula of one's own, no traffic asked
        fits = [{a: x, b: y, c: 1} for x in divisors(sizes[a]) for y in divisors(sizes[b])]
        fits = [t for t in fits if operators.words(t) <= room]
        cost = lambda t: sizes["m"] * sizes["n"] * sizes["k"] * (1 / t[a] + 1 / t[b])
        return min(fits, key=cost)
    ways = [(largest("m", "n", "k"), "mnk"), (largest("n", "k", "m"), "nkm"), (largest("m", "k", "n"), "mkn")]
    return min(ways, key=lambda way: sum(operators.traffic(sizes, *way).values()))
"""
    assert judged(exercises.tile, by_rule)[0], judged(exercises.tile, by_rule)[1]


# What the notebook suggests


def cells(*identities):
    found = Cells("12_operators_and_rooflines")
    found.run("operators-imports", *(f"operators-{identity}" for identity in identities))
    return found


def test_only_the_small_network_gains_from_the_sixteenth_processor():
    found = cells("number", "programs", "graphs", "schedule")
    steps = {name: {p: len(way) for p, way in ways.items()} for name, ways in found["STEPS"].items()}
    assert [name for name in steps if steps[name][16] < steps[name][15]] == ["a small network"]
    assert steps["matrix product, 3 × 3"][12] == steps["matrix product, 3 × 3"][16] < steps["matrix product, 3 × 3"][8]


def test_the_slope_by_hand_sweeps_in_place_as_often_as_it_counts():
    smaller = {"2**28        # 256 MiB": "2**20", "(2**18, 2**22, 2**26, LARGE)": "(LARGE,)", "range(3)": "range(1)"}
    found = Cells("12_operators_and_rooflines", smaller | {"zeros(2**24)": "zeros(2**8)"})
    found.run("operators-imports", "operators-peak-hand", "operators-bandwidth-hand")
    v = jnp.zeros(3)
    np.testing.assert_array_equal(found["sweep"](v), room.sweep(2)(jnp.zeros(3)))
    assert v.is_deleted()
    found.update(time=SimpleNamespace(process_time=itertools.count().__next__))
    assert found["swept"](jnp.zeros(4)) == 2 * 2 * 16


def test_a_sum_of_squares_is_as_deep_as_its_trace_says():
    found = cells("number", "programs")
    nodes = found["graph"](lambda x: found["tree"]([a * a for a in x]), 16)
    traced = program.work_depth(lambda x: jnp.sum(x * x), jax.ShapeDtypeStruct((16,), "float32"))
    assert traced == (len(nodes), max(node.level for node in nodes)) == (31, 5)


def test_three_results_of_three_weights_take_five_products():
    At, G, Bt = cells("winograd-hand")["transforms"](3, 3)
    assert (At.shape, G.shape, Bt.shape) == ((3, 5), (5, 3), (5, 5))
    for ours, library in zip((At, G, Bt), room.winograd_transforms(3, 3), strict=True):
        np.testing.assert_array_equal(ours.astype(float), library.astype(float))


def test_a_limit_of_its_own_is_at_least_as_good_as_a_share():
    found = cells("micro-pieces", "micro-plans")
    alone = sum(room.total(room.split(own, 16, 8 * 2**20)) for own in found["PIECES"].values())
    assert alone < found["SECONDS"]["any size", 8]


def test_a_measured_plan_gives_what_the_whole_batch_gives():
    run_plan = cells("own-run-hand")["run_plan"]
    x, w = arrays(batch=5)
    way = [room.Piece("im2col", 2, 1.0, 0)] * 2 + [room.Piece("direct", 1, 1.0, 0)]
    np.testing.assert_allclose(jit(run_plan(way))(x, w), true(x, w), atol=1e-4)


def test_a_larger_memory_moves_fewer_words():
    found = cells("energy-table", "energy-layer")
    sizes = found["CONV"]["conv3"]
    larger = room.best_tiling(sizes, 2**16, 64, found["PRICE"])
    moved = [room.accesses(sizes, tiling)["DRAM"] for tiling in (found["BEST"]["conv3"], larger)]
    assert 0.5 < moved[1] / moved[0] < 0.95


def test_by_hand_in_the_notebook_is_what_the_library_does():
    found = cells("three-hand", "winograd-hand", "winograd-2d-hand", "energy-count", "systolic-hand", "nfu")
    found.run("operators-anna", "operators-anna-model")
    x, w = arrays(height=10, width=10)
    for name in ("direct_by_hand", "fft_by_hand"):
        np.testing.assert_allclose(found[name](x.astype(float), w.astype(float)), true(x, w), atol=1e-10)
    np.testing.assert_allclose(found["winograd_by_hand"](x, w, 4), true(x, w), atol=1e-3)
    sizes, tile = {"m": 6, "n": 4, "k": 6}, {"m": 2, "n": 2, "k": 3}
    for order in ("mnk", "kmn", "nkm"):
        assert found["count_words"](sizes, tile, order) == counted(sizes, tile, order)
    a, b = np.arange(6).reshape(2, 3), np.arange(12).reshape(3, 4)
    product, cycles = found["keeps_outputs"](a, b)
    np.testing.assert_array_equal(product, a @ b)
    assert cycles == room.systolic_cycles(2, 4, 3, 2, 4)
    results, cycles, words = found["neural_functional_unit"](np.ones((2, 20), int), np.ones((20, 16), int), 1)
    np.testing.assert_array_equal(results, 10)
    assert cycles == 2 * 2 + 2 and words == {"inputs": 4 * 16, "weights": 4 * 256, "sums": 2 * 16 * 3}
    whole = [np.round(4 * a).astype(int) for a in (x[0], w)]
    results, cycles, came = found["anna"](*whole)
    np.testing.assert_allclose(results, true(whole[0][None], whole[1])[0])
    assert cycles == 41 * 8 * 8 and came == 8 * (3 * 3 + 7 * 3) * 3  # of a row of windows one whole, then columns


def test_what_the_record_leaves_out_is_large():
    shape = experiment.Shape(16, 56, 64, 64, 3)
    assert experiment.needs("im2col", shape) == 4 * 16 * 56**2 * 9 * 64
    assert experiment.needs("FFT", shape) == 8 * 64 * 64 * 58**2
    assert experiment.needs("direct", shape) == 0
    settings_run = []
    experiment.convolution_plan(settings_run.extend)
    assert {setting["algorithm"] for setting in settings_run} == {*room.ALGORITHMS}
    layers = [s for s in settings_run if s["side"] == 7]
    assert {s["batch"] for s in layers if s["algorithm"] == "direct"} == {*experiment.SIZES}


def test_a_trial_measures_what_it_says(monkeypatch):
    monkeypatch.setattr(room, "seconds", lambda f, *args, **options: 32e-6)
    found = experiment.convolution_trial("im2col", 1, 4, 2, 3, 3)
    assert found["log2_us"] == pytest.approx(5) and 0 <= found["log2_workspace"] < 20


def test_shifts_convolve():
    for channels, out in ((3, 5), (1, 1)):
        x, w = arrays(channels=channels, out=out)
        np.testing.assert_allclose(jit(experiment.shifts)(x, w), true(x, w), atol=1e-4)


def test_small_kernels_are_timed_by_their_rivals(monkeypatch):
    planned = []
    monkeypatch.setattr(
        experiment, "timed_in_kept_memory", lambda way, shapes: [[5.0, 1.0]] if shapes[0].k == 3 else []
    )
    experiment.small_plan(planned.extend)
    assert len(planned) == 4 * len(experiment.SHAPES)
    assert experiment.small_trial(**planned[0]) == {"log2_us": 5.0}
    assert {setting["way"] for setting in planned} == {"direct", "shifts", "Winograd 2", "Winograd 4"}


def test_what_is_too_large_to_try_is_not_timed(monkeypatch):
    monkeypatch.setattr(room, "seconds", lambda f, *args, **options: 32e-6)
    small, large = [1, 4, 2, 3, 3], [16, 128, 64, 64, 15]
    (first, workspace), second = experiment.timed("shifts", [small, small])
    assert first == pytest.approx(5) == second[0] and 0 <= workspace < 20
    for way in ("im2col", "FFT", *experiment.SPECTRUM_KEPT):
        found = experiment.timed(way, [small, large])
        assert found[0][0] == pytest.approx(5) and all(map(math.isnan, found[1]))


def test_a_kept_spectrum_gives_the_same():
    x, w = arrays(height=11, width=9, channels=3, out=5)
    for layout in experiment.SPECTRUM_KEPT.values():
        kept = experiment.spectrum(x, w).transpose(layout)
        found = jit(functools.partial(experiment.with_spectrum, k=len(w), layout=layout))(x, kept)
        np.testing.assert_allclose(found, true(x, w), atol=1e-4)


def test_each_way_is_timed_with_each_shape_in_kept_memory(monkeypatch):
    asked, planned = [], []
    timed = lambda *args: asked.append(args) or [[1.0, 2.0]] * len(args[1])  # noqa: E731
    monkeypatch.setattr(experiment, "timed_in_kept_memory", timed)
    experiment.kernels_plan(planned.extend)
    for setting in planned:
        assert experiment.kernels_trial(**setting).keys() == experiment.KERNEL_SIZES.tolerance.keys()
    ways = {*experiment.WAYS, *experiment.SPECTRUM_KEPT}
    assert len(planned) == len(ways) * (len(experiment.SHAPES) + len(experiment.ALONE))
    assert asked[0][1][-1] == (*experiment.SHAPES[planned[0]["shape"]], 15)
    planned.clear(), experiment.pieces_plan(planned.extend)
    assert {s["algorithm"] for s in planned} == {"shifts", *room.ALGORITHMS} - {"FFT"} and len(planned) == 20
    found = experiment.pieces_trial(**planned[0])
    assert found.keys() == experiment.PIECES.tolerance.keys()
    assert (found["log2_us of 16"], found["log2_workspace of 16"]) == (1, 2)
