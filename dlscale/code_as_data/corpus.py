"""The programs of notebook 17: a corpus to learn statements from, and a task whose answers only the wires tell.

`tools/programs.py` has the functions, traces all of them and writes `data/results/code_as_data-programs.gz`; its
SHA-256 goes into `DIGEST` here and into `data/README.md`. The corpus has no labels; the task has.
"""

import functools
import gzip
import hashlib
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlscale.code_as_data import Graph, Vocabulary, reordered
from dlscale.lab import data

DIGEST = "26e1329de432fb0c47d55b269c82b88b3dfc39db913b0a80bbf9829add8d9022"


class Programs(NamedTuple):
    """Part of the record: what each program computes, of what it is made, and its graph."""

    names: list[str]
    recipes: list[str]
    graphs: list[Graph]


def path() -> Path:
    return data.data_folder() / "results" / "code_as_data-programs.gz"


@functools.cache
def load(part: str) -> Programs:
    """The "corpus" or the "wirings". Raises ValueError if the record is damaged."""
    content = path().read_bytes()
    if hashlib.sha256(content).hexdigest() != DIGEST:
        raise ValueError(f"{path()} is damaged. `git checkout data/results/{path().name}` restores it.")
    names, recipes, programs = json.loads(gzip.decompress(content))[part]
    edges = ((np.array(pairs, int).reshape(-1, 2) for pairs in one[1:]) for one in programs)
    graphs = [Graph(tuple(one[0]), *pairs) for one, pairs in zip(programs, edges, strict=True)]
    return Programs(names, recipes, graphs)


@functools.cache
def vocabulary() -> Vocabulary:
    """Of the corpus."""
    return Vocabulary.of(load("corpus").graphs)


# The task: the same statements, connected in three ways

_ELEMENTWISE = "exp log sin cos tanh sqrt logistic erf abs neg floor round log1p expm1 rsqrt ceil"
_ACROSS = "cumsum cumprod sort reverse centre shares largest roll softmax length"  # a result depends on other numbers
ELEMENTWISE, ACROSS = _ELEMENTWISE.split(), _ACROSS.split()
WIRINGS = ("elementwise first", "side by side", "elementwise last")


def split(seed: int) -> dict[str, tuple[list[Graph], np.ndarray]]:
    """Half of the operations to train with, a quarter for validation, a quarter for the test: programs and wirings.

    "known": couples of the first half that were held out. "reordered": the same, their statements in another order.
    "new": neither operation is in any program to train on, and one at least in none for validation.
    """
    programs, rng = load("wirings"), np.random.default_rng([seed, 4])
    orders = [rng.permutation(table).tolist() for table in (ELEMENTWISE, ACROSS)]
    known = {name for order in orders for name in order[: len(order) // 2]}
    other = {name for order in orders for name in order[len(order) // 2 : len(order) * 3 // 4]}
    couples = sorted({recipe for recipe in programs.recipes if set(recipe.split()) <= known})
    held_out = set(rng.choice(couples, len(couples) // 5, replace=False).tolist())
    rows: dict[str, list[int]] = {"train": [], "validation": [], "known": [], "new": []}
    for i, recipe in enumerate(programs.recipes):
        own = set(recipe.split())
        if own <= known:
            rows["known" if recipe in held_out else "train"].append(i)
        elif not own & known:
            rows["validation" if own <= other else "new"].append(i)
    labels = np.array([WIRINGS.index(name) for name in programs.names], np.int32)
    found = {part: ([programs.graphs[i] for i in own], labels[own]) for part, own in rows.items()}
    return found | {"reordered": ([reordered(one, rng) for one in found["known"][0]], found["known"][1])}


# Questions to ask the vectors, written down before any vector was trained

_GROUPS = """
    sin cos tan; asin acos atan; sinh cosh tanh; asinh acosh atanh; exp exp2 expm1; log log1p; sqrt rsqrt cbrt;
    floor ceil round; lt le gt ge; eq ne; and or xor not; max min; add sub; mul div; reduce_max reduce_min;
    reduce_and reduce_or; argmax argmin; reduce_sum reduce_prod; cumsum cumprod cummax cummin cumlogsumexp;
    erf erfc erf_inv; lgamma digamma polygamma zeta; bessel_i0e bessel_i1e; slice dynamic_slice gather;
    dynamic_update_slice scatter scatter-add; shift_left shift_right_logical shift_right_arithmetic;
    lu cholesky geqrf eigh svd; real imag conj; while scan; pow integer_pow; igamma igammac;
    squeeze reshape transpose; dot_general conv_general_dilated; switch join; is_finite sign
"""
GROUPS = [group.split() for group in _GROUPS.split(";")]  # instructions that do related things
_COUPLES = """
    add sub; mul div; max min; lt gt; eq ne; and or; add mul; reduce_max reduce_min; reduce_sum reduce_prod; sin cos;
    exp log; argmax argmin; floor ceil; cumsum cumprod; sqrt rsqrt; reduce_and reduce_or; sub div
"""
COUPLES = [couple.split() for couple in _COUPLES.split(";")]  # for analogies
