"""The exercises of 07_recomputation."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlscale import recomputation
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import program


def _group(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def tried(forget: Callable[[Any], Any]) -> Callable[[int], Any]:
    """What forget(f) does with a batch: value and gradients, flat, bytes kept, the bytes that twelve compiled layers
    take whose groups are forgotten, and whether JAX's own checkpoint does it.

    Where it is not written yet, `...`. A check cannot trace what runs in another process; this runs where it is.
    """

    def run(batch: int) -> Any:
        draw = np.random.default_rng(batch).normal
        args = list(draw(size=(4, 16, 16)).astype(np.float32)), draw(size=(batch, 16)).astype(np.float32)
        if (g := forget(_group)) is ... or g(*args) is ...:
            return ...

        def gradient(*args: Any) -> Any:
            value, back = jax.vjp(g, *args)
            return value, back(value)  # numbers that differ: who ignores d is found out

        def total(weights: Any, x: Any) -> Any:
            return functools.reduce(lambda x, at: g(weights[at : at + 3], x), range(0, len(weights), 3), x).sum()

        numbers = [np.ravel(part) for part in jax.tree.leaves(jax.jit(gradient)(*args))]
        theirs = re.search(r"\b(checkpoint|remat2?)\[", str(jax.make_jaxpr(gradient)(*args))) is not None
        sides = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 12, jax.ShapeDtypeStruct((512, 16), jnp.float32)
        taken = recomputation.compiled_bytes(jax.grad(total), *sides)
        return np.concatenate(numbers), program.kept_bytes(lambda *args: g(*args).sum(), *args), taken, theirs

    return run


_remembering = functools.cache(tried(lambda f: f))


def _forget(answer: Any) -> str | None:
    found, still, taken, theirs = answer(10)
    expected, kept, everything, _ = _remembering(10)
    if theirs:
        return "That is what jax.checkpoint does, and it does it for you. Write it with jax.custom_vjp."
    if wrong := compare("Value and gradient together", found, expected, 1e-4):
        return wrong
    if still > kept / 10:
        return f"The gradient is right, but {still:,} of the {kept:,} bytes between arguments and result are saved."
    if taken > 0.8 * everything:
        return (
            f"Right as written. But compiled, groups take {taken / everything:.0%} of the memory of saving all: "
            "the second run is merged with the first, or begins too early. Does the barrier hold args and d?"
        )
    return None


forget = Exercise(
    id="recomputation-forget",
    answer="forget",
    hints=(
        "forward saves its own arguments: return f(*args), args.",
        "jax.vjp(f, *args) runs f and returns its result and a function from d to the gradients. When must it be "
        "called, so that nothing else is saved?",
    ),
    code="""
def forget(f):
    def forward(*args):
        return f(*args), args

    def backward(args, d):
        args, d = jax.lax.optimization_barrier((args, d))
        return jax.vjp(f, *args)[1](d)

    g = jax.custom_vjp(f)
    g.defvjp(forward, backward)
    return g
""",
    wrong=_forget,
    right="equal gradients, and only the arguments saved, compiled, too. That is a checkpoint.",
)


def without_barrier(f: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint as in `forget`, but the second run of f waits for nothing."""
    g = jax.custom_vjp(f)
    g.defvjp(lambda *args: (f(*args), args), lambda args, d: jax.vjp(f, *args)[1](d))
    return g


def _best_k(answer: Any) -> str | None:
    for n in (4, 10, 30, 50, 100, 144, 1000):
        k = float(answer(n))  # not in the 32 bits of jax.numpy
        if k not in range(1, n + 1):
            return f"k for {n} layers is {k:g}. It must be a whole number from 1 to {n}."
        least = min(n / j + j for j in range(1, n + 1))
        if not math.isclose(n / k + k, least):
            return f"For {n} layers, your k = {k:g} costs {n / k + k:.4g} arrays, and another k costs {least:.4g}."
    return None


best_k = Exercise(
    id="recomputation-best_k",
    answer="best_k",
    hints=(
        "The derivative of n / k + k by k is 1 - n / k². Where is it 0?",
        "√n need not be whole: compare n / k + k at the whole numbers around it, or at all from 1 to n.",
    ),
    code="""
def best_k(n):
    return min(range(1, n + 1), key=lambda k: n / k + k)
""",
    wrong=_best_k,
    right="2 √n arrays instead of n, for less than one more forward pass.",
)


def _nested(answer: Any) -> Any:
    """The items of a plan, whose brackets may be lists, too."""
    items = getattr(answer, "items", answer)
    return tuple(map(_nested, items)) if isinstance(items, list | tuple) else items


def _beat(answer: Any) -> str | None:
    written = recomputation.Plan(_nested(answer))
    peak, again = written.peak(recomputation.Chain.uniform(12)), int(written.forwards().sum()) - 12
    if peak > 7 or again > 11:
        return f"It takes {peak:g} arrays and computes {again} layers again; 7 and 11 are allowed."
    return None


beat = Exercise(
    id="recomputation-beat",
    answer="my_plan",
    hints=(
        "Look in the explorer of section 2 for steps below the peak: memory that nobody uses. Flat groups are enough.",
        "When the last group is done, its memory is free: the group before it may hold one array more, the first one "
        "most of all. So let the groups shrink, and leave the last one without brackets.",
    ),
    code="""
my_plan = ((0, 1, 2, 3, 4), (5, 6, 7, 8), 9, 10, 11)
""",
    wrong=_beat,
    right="fewer layers run again in the same memory. No nested plan is below 9.",
)
