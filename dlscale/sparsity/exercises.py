"""The exercises of 06_sparsity."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _products(answer: Any) -> str | None:
    for seed, (examples, inputs, outputs) in ((0, (1, 3, 2)), (1, (5, 6, 4)), (2, (32, 20, 10))):
        rng = np.random.default_rng(seed)
        a = (rng.random((examples, inputs)) < rng.random((examples, 1))) * 1.0  # dark examples and bright ones
        e = (rng.random((examples, outputs)) < a.mean(1, keepdims=True)) * 1.0
        a[0, 0] = e[0, 0] = 1.0
        given = f"The number for a batch of {examples}, {inputs} inputs and {outputs} outputs"
        expected = a.sum() * outputs + 2 * (a.sum(1) * e.sum(1)).sum()
        if wrong := compare(given, answer(a.copy(), e.copy()), expected):
            return wrong
    return None


products = Exercise(
    id="sparsity-products",
    answer="needed_multiplications",
    hints=(
        "Forward product: every nonzero input times all outputs. The other two: how many pairs has one example?",
        "An example has a.sum(axis=1) inputs times e.sum(axis=1) errors: multiply before you add up the examples.",
    ),
    code="""
def needed_multiplications(a, e):
    forward = a.sum() * e.shape[1]
    pairs = (a.sum(axis=1) * e.sum(axis=1)).sum()
    return forward + 2 * pairs
""",
    wrong=_products,
    right="both products of the backward pass need the same pairs, counted example by example.",
)


def _together(answer: Any) -> str | None:
    for seed, density in ((0, 0.5), (1, 0.05), (2, 0.21), (3, 0.97)):
        rng = np.random.default_rng(seed)
        layers = [(scale * rng.normal(size=shape)).astype(np.float32) for scale, shape in
                  ((1.0, (6, 8)), (5.0, (4, 3)), (0.2, (3, 3, 2, 4)), (1.0, (7,)))]  # fmt: skip
        masks = [np.asarray(mask, float) for mask in answer([w.copy() for w in layers], density)]
        if wrong := compare("The list of masks", np.arange(len(masks)), np.arange(len(layers))):
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
    right="one threshold for all layers: a layer with large weights keeps more of them.",
)


def _break_even(answer: Any) -> str | None:
    rng = np.random.default_rng(6)
    cases = [(1e6, 1e9, 1e8, 0.0), (1e6, 1e9, 1e8, 4e-4), (1e6, 1e9, 1e8, 2e-3), (1e6, 1e9, 2e9, 0.0)]
    for size, dense in zip(10 ** rng.uniform(5, 8, 6), 10 ** rng.uniform(8, 11, 6), strict=True):
        cases.append((size, dense, dense * rng.random(), rng.random() * size / dense))
    for size, dense_rate, sparse_rate, start in cases:
        rates = f"{dense_rate:.3g} per second dense, {sparse_rate:.3g} sparse"
        given = f"The density for {size:.3g} multiplications, {rates}, which takes {start:.3g} s to start,"
        expected = min(max((size / dense_rate - start) * sparse_rate / size, 0.0), 1.0)
        if wrong := compare(given, answer(size, dense_rate, sparse_rate, start), expected, 1e-3):
            return wrong
    return None


break_even = Exercise(
    id="sparsity-break_even",
    answer="density_that_pays",
    hints=(
        "The dense product takes size / dense_rate seconds. How many of these seconds are left after the start?",
        "Then the sparse product does seconds * sparse_rate multiplications. Which part of `size` is that?",
    ),
    code="""
def density_that_pays(size, dense_rate, sparse_rate, start):
    seconds = size / dense_rate - start
    return min(1, max(0, seconds * sparse_rate / size))
""",
    wrong=_break_even,
    right="without a start, it is the ratio of the two rates: what counts is the price of one multiplication.",
)
