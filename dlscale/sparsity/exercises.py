"""The exercises of 06_sparsity."""

from typing import Any

import numpy as np

from dlscale import sparsity
from dlscale.course import records
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import checks
from dlscale.sparsity import GRANULARITIES
from dlscale.sparsity.experiment import LARGE, SMALL, parameters


def _products(answer: Any) -> str | None:
    for seed, (examples, inputs, outputs) in ((0, (1, 3, 2)), (1, (5, 6, 4)), (2, (32, 20, 10))):
        rng = np.random.default_rng(seed)
        a = (rng.random((examples, inputs)) < rng.random((examples, 1))) * 1.0  # dark examples and bright ones
        e = (rng.random((examples, outputs)) < a.mean(1, keepdims=True)) * 1.0
        a[0, 0] = e[0, 0] = 1.0
        given = f"The number for {examples} examples, {inputs} inputs and {outputs} outputs"
        expected = a.sum() * outputs + 2 * (a.sum(1) * e.sum(1)).sum()
        if wrong := compare(given, answer(a.copy(), e.copy()), expected):
            return wrong
    return None


products = Exercise(
    id="sparsity-products",
    answer="needed_multiplications",
    question="Now for many examples. `a` (examples, inputs) says which inputs of a dense layer are not zero, `e` "
    "(examples, outputs) which errors; both are arrays of 0 and 1. Write `needed_multiplications`: how many "
    "multiplications do the three products need, all examples together? Return one number. Count, do not assume "
    "that zeros are independent.",
    hints=(
        "Forward: each input that is there, times all outputs. On the way back: how many pairs has one example?",
        "An example has a.sum(axis=1) inputs times e.sum(axis=1) errors: multiply before you add up the examples.",
    ),
    code="""
def needed_multiplications(a, e):
    forward = a.sum() * e.shape[1]
    pairs = (a.sum(axis=1) * e.sum(axis=1)).sum()
    return forward + 2 * pairs
""",
    wrong=_products,
    right="both products of the way back need the same pairs, and examples with many inputs may have many errors, too.",
)


def _cubic(answer: Any) -> str | None:
    ways = ((0, 400, 0.1, 400, 100), (72, 252, 0.05, 360, 30), (40, 60, 0.02, 100, 20), (100, 900, 0.2, 1000, 1))
    for begin, end, final, steps, every in ways:
        done = np.clip((np.arange(0, steps, every) - begin) / (end - begin), 0, 1)
        expected = (final + (1 - final) * (1 - done) ** 3).mean()
        given = f"The mean density of {steps} steps, from step {begin} to {end} down to {final}, renewed every {every},"
        if wrong := compare(given, answer(begin, end, final, steps, every), expected, 1e-4):
            return wrong
    return None


cubic = Exercise(
    id="sparsity-cubic",
    answer="mean_density",
    question="Pruning gradually has most of its weights at first: what does it save *while* it trains? The mask "
    "follows the cubic only at the steps 0, `every`, 2 `every`, …, and stays until the next; the density is 1 up to "
    "step `begin` and `final` from step `end` on. Write `mean_density(begin, end, final, steps, every)`: the mean "
    "density over all steps, 0 to `steps` - 1, which is the share of a dense training's multiplications. (`steps` is a "
    "multiple of `every`.)",
    hints=(
        "Which part of the way is done, (step - begin) / (end - begin)? Keep it between 0 and 1, where the cubic ends.",
        "Every mask serves as many steps as any other: take np.arange(0, steps, every), np.clip and the mean.",
    ),
    code="""
def mean_density(begin, end, final, steps, every):
    renewed = np.arange(0, steps, every)
    done = np.clip((renewed - begin) / (end - begin), 0, 1)
    return (final + (1 - final) * (1 - done) ** 3).mean()
""",
    wrong=_cubic,
    right="a mask that is renewed seldom lags behind the cubic and multiplies more; below, you need this number.",
)


def _together(answer: Any) -> str | None:
    for seed, density in ((0, 0.5), (1, 0.05), (2, 0.21)):
        rng = np.random.default_rng(seed)
        layers = [(scale * rng.normal(size=shape)).astype(np.float32) for scale, shape in
                  ((1.0, (6, 8)), (5.0, (4, 3)), (0.2, (3, 3, 2, 4)))]  # fmt: skip
        masks = [np.asarray(mask, float) for mask in answer([w.copy() for w in layers], density)]
        if wrong := compare("The shapes of the masks", [m.size for m in masks], [w.size for w in layers]):
            return wrong
        if any(m.shape != w.shape or not np.isin(m, (0, 1)).all() for m, w in zip(masks, layers, strict=True)):
            return "A mask has its layer's shape and is made of 1 (the weight stays) and 0 (it goes)."
        count = round(density * sum(w.size for w in layers))
        if wrong := compare("The number of weights that stay", sum(m.sum() for m in masks), count):
            return wrong
        sizes = np.concatenate([np.abs(w).ravel() for w in layers])
        stays = sum((np.abs(w) * m).sum() for w, m in zip(layers, masks, strict=True))
        if wrong := compare("The sum of the sizes that stay", stays, np.sort(sizes)[-count:].sum(), 1e-5):
            return wrong
    return None


together = Exercise(
    id="sparsity-together",
    answer="prune_together",
    question="Write pruning with all layers together. "
    "`prune_together` gets a list of weight arrays (NumPy, any shapes) and a density above 0. It returns a list of "
    "masks of the same shapes, 1 where a weight stays and 0 where not. Of all weights together stay the largest in "
    "size, `round(density * number of weights)` of them. (No two weights of the check are equally large.)",
    hints=(
        "Put the sizes of all layers into one long array: np.concatenate([np.abs(w).ravel() for w in layers]).",
        "Sort it; the count-th from the end is the smallest that stays. Compare each layer with that one number.",
    ),
    code="""
def prune_together(layers, density):
    sizes = np.concatenate([np.abs(w).ravel() for w in layers])
    count = round(density * sizes.size)
    smallest_kept = np.sort(sizes)[-count]
    masks = []
    for w in layers:
        masks.append((np.abs(w) >= smallest_kept) * 1.0)
    return masks
""",
    wrong=_together,
    right="one threshold for all layers; which layer keeps how much is for training to decide.",
)


def _gaps(seed: int, length: int, density: float) -> tuple[np.ndarray, list[int]]:
    """A matrix of one column whose weights are kept at random, and the zeros before each that is."""
    keep = np.random.default_rng(seed).random(length) < density
    return keep[:, None].astype(np.float32), (np.diff(np.flatnonzero(keep), prepend=-1) - 1).tolist()


def _relative(answer: Any) -> str | None:
    for gaps, b, v in (([0, 3, 1], 4, 16), ([15], 4, 16), ([16], 4, 16), ([2, 40, 0], 4, 8), ([9, 0, 5], 2, 32)):
        expected = sum(1 + gap // 2**b for gap in gaps) * (b + v)
        given = f"The number of bits for gaps {gaps} with {b}-bit indices and {v}-bit values"
        if wrong := compare(given, answer(list(gaps), b, v), expected):
            return wrong
    mask, gaps = _gaps(5, 400, 0.08)
    encoded = len(sparsity.encode(mask, "relative", index_bits=3, dtype="float16"))
    return compare("The number of bits of 400 weights, as they are really encoded,", answer(gaps, 3, 16), encoded)


relative = Exercise(
    id="sparsity-relative",
    answer="relative_bits",
    question="Now with fillers. `gaps` lists, for each weight that is kept, how many zeros are before it since the "
    "last one that was kept. With an index of $b$ bits, a filler stands for $2^b - 1$ zeros and itself, $2^b$ in all. "
    "Write `relative_bits`: the bits for indices and values of $v$ bits, fillers included.",
    hints=(
        "An index of b bits counts up to 2 ** b - 1 zeros. A gap of 2 ** b needs one filler, how many does 2 · 2 ** b?",
        "A gap needs gap // 2 ** b fillers. Each filler, and each weight, takes an index and a value.",
    ),
    code="""
def relative_bits(gaps, b, v):
    return sum(1 + gap // 2**b for gap in gaps) * (b + v)
""",
    wrong=_relative,
    right="that is what the library's encoder writes, bit for bit: at low densities fillers are a large part of it.",
)


def _two_of_four(answer: Any) -> str | None:
    rng = np.random.default_rng(4)
    for w in (np.array([0.1, -3.0, 2.0, 0.5]), rng.normal(size=8), rng.normal(size=40)):
        mask = np.asarray(answer(w.copy()), float)
        if wrong := compare("The mask's shape", mask.shape, w.shape):
            return wrong
        if not np.isin(mask, (0, 1)).all():
            return "A mask is made of 1 (the weight stays) and 0 (it goes); this one has other numbers."
        if (kept := mask.reshape(-1, 4).sum(1).tolist()) != [2.0] * (len(w) // 4):
            return f"Of every four neighbours two must stay. Of w = {w.round(2).tolist()} stay {kept}."
        expected = np.asarray(sparsity.mask(w[:, None], 0.5, "2:4"))[:, 0]
        if wrong := compare("The sum of the sizes that stay", np.abs(w * mask).sum(), np.abs(w * expected).sum(), 1e-5):
            return wrong
    return None


two_of_four = Exercise(
    id="sparsity-two_of_four",
    answer="two_of_four",
    question="Write `two_of_four`: the mask (1 and 0) that keeps the two largest in size of every four neighbours of "
    "a vector `w`. Its length is a multiple of four. If several are equally large, take any two.",
    hints=(
        "w.reshape(-1, 4) has a row for each four. np.argsort(np.abs(...), axis=1) orders a row, smallest first.",
        "np.argsort of that argsort is each one's rank in its row, 0 for the smallest: keep ranks 2 and 3.",
    ),
    code="""
def two_of_four(w):
    order = np.argsort(np.abs(w).reshape(-1, 4), axis=1)
    return (np.argsort(order, axis=1) >= 2).astype(float).reshape(w.shape)
""",
    wrong=_two_of_four,
    right="regular enough for a matrix unit: each four weights become two values and two 2-bit positions.",
)


ROOM, FRESH = 1500, slice(10, 20)  # bytes; seeds


def _plan(answer: Any) -> str | None:
    piece, density, bits, encoding = (answer[name] for name in ("piece", "density", "bits", "encoding"))
    trials = records.read("sparsity-granularity")
    checks.known("piece", piece, GRANULARITIES)
    checks.known("density", density, trials.options("density", granularity=piece))
    checks.known("encoding", encoding, ("relative", "bitmap"))
    if not 8 <= bits <= 16:
        return f"Values have 8 to 16 bits here, not {bits}: with fewer, the recorded accuracies would not hold."
    arm = {"granularity": piece, "density": density, "judged_on": "test"}
    size, weights = trials.values("size", **arm)[0], 8 * 16 * 9 + 16 * 32 * 9
    stored = trials.values("entries", **arm) * (4 + bits * size) / 8
    if encoding == "bitmap":
        stored = (weights / size + bits * weights * trials.values("density", **arm)) / 8
    if stored[FRESH].mean() > ROOM:
        return f"That takes {stored[FRESH].mean():,.0f} bytes, more than {ROOM:,}."
    dense = trials.values("accuracy", granularity="weight", density=1.0, judged_on="test")
    lost = (dense - trials.values("accuracy", **arm))[FRESH].mean()
    return f"It fits, but these ten networks lose {lost:.2f} points." if lost > 1.25 else None


plan = Exercise(
    id="sparsity-plan",
    answer="plan",
    question="An open one. A device has room for 1,500 bytes for the two layers. Choose `plan`: the kind of pieces, "
    'the density, one of `HAVE`, the bits of a value, from 8 to 16, and the encoding ("relative" or "bitmap"). '
    "It must fit, and its accuracy, over the ten networks with seeds 10 to 19, must be within 1.25 points of the dense "
    "ones'.",
    hints=(
        "Set the slider to 8 bits: which density of each kind has its mark between 1 and 1.5 kilobytes? Then see left "
        "how far below the dashed line it is.",
        "kilobytes(piece, density, bits, encoding).mean() tells the size. Half the bits: nearly twice the weights.",
    ),
    code='plan = dict(piece="weight", density=0.12, bits=8, encoding="relative")',
    wrong=_plan,
    right="several plans do: single weights leave room for more bits; larger pieces need more weights, at fewer bits.",
)


def _crossing(answer: Any) -> str | None:
    runs = records.read("sparsity-recurrent")

    def errors(hidden: int, density: float) -> float:
        return 100 - runs.values("accuracy", hidden=hidden, density=density, judged_on="test").mean()

    densities = sorted(runs.options("density", hidden=LARGE))
    recorded = [parameters(LARGE, density) for density in densities], [errors(LARGE, density) for density in densities]
    made_up = [100, 1000, 10000], [30.0, 10.0, 5.0]
    for (sizes, large), small in ((made_up, 20.0), (made_up, 8.0), (recorded, errors(SMALL, 1.0))):
        at = next(i for i, error in enumerate(large) if error < small)  # the first point below
        share = (large[at - 1] - small) / (large[at - 1] - large[at])
        exact = sizes[at - 1] ** (1 - share) * sizes[at] ** share
        given = f"The size at which errors of {', '.join(f'{e:.3g}' for e in large)} % come down to {small:.3g} %"
        if wrong := compare(given, float(answer(np.array(sizes), np.array(large), small)), exact, 1e-3):
            return wrong
    return None


crossing = Exercise(
    id="sparsity-crossing",
    answer="crossing_size",
    question="How many parameters may one take away? Write `crossing_size`: from rising `sizes` and falling `errors`, "
    "both arrays, the size at which the errors come down to `target`, on straight lines over the logarithm of the "
    "sizes. Then ask at which size the large net makes as many errors as the small dense one.",
    hints=(
        "np.interp(x, xs, ys) draws straight lines, but its xs must rise. Errors fall: take -errors, and -target.",
        "The ys are np.log(sizes). Turn the result back with np.exp.",
    ),
    code="""
def crossing_size(sizes, errors, target):
    return np.exp(np.interp(-target, -errors, np.log(sizes)))
""",
    wrong=_crossing,
    right="so many parameters of a large, pruned net are worth all those of the small dense one.",
)


def _break_even(answer: Any) -> str | None:
    rng = np.random.default_rng(6)
    cases = [(1e6, 1e9, 1e8, 0.0), (1e6, 1e9, 1e8, 4e-4), (1e6, 1e9, 1e8, 2e-3), (1e6, 1e9, 2e9, 0.0)]
    for size, dense in zip(10 ** rng.uniform(5, 8, 6), 10 ** rng.uniform(8, 11, 6), strict=True):
        cases.append((size, dense, dense * rng.random(), rng.random() * size / dense))
    for size, dense_rate, sparse_rate, start in cases:
        given = (
            f"The density for {size:.3g} multiplications at {dense_rate:.3g} a second dense, {sparse_rate:.3g} sparse, "
            f"which takes {start:.3g} s to start,"
        )
        expected = min(max((size / dense_rate - start) * sparse_rate / size, 0.0), 1.0)
        if wrong := compare(given, answer(size, dense_rate, sparse_rate, start), expected, 1e-3):
            return wrong
    return None


break_even = Exercise(
    id="sparsity-break_even",
    answer="density_that_pays",
    question="A dense product has `size` multiplications and does `dense_rate` of them a second. A sparse one needs "
    "`start` seconds to begin, and then does `sparse_rate` a second, of the kept ones only. Write "
    "`density_that_pays`: the density at which both take equally long, 0 if the sparse one comes too late at any "
    "density, and never above 1.",
    hints=(
        "The dense product takes size / dense_rate seconds. How many are left for multiplying after the start?",
        "In so many seconds the sparse one does seconds * sparse_rate multiplications. Which part of `size` is that?",
    ),
    code="""
def density_that_pays(size, dense_rate, sparse_rate, start):
    seconds = size / dense_rate - start
    return min(1, max(0, seconds * sparse_rate / size))
""",
    wrong=_break_even,
    right="where starting is quick, it is the ratio of the two rates: what one weight costs, not how many are left.",
)
