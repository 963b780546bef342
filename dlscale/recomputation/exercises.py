"""The exercises of 07_recomputation."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from dlscale import recomputation
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import program


def _batch_from(answer: Any) -> str | None:
    for sizes in ((784, *[128] * 8, 10), (784, 256, 256, 10), (40, 10), (3, 1000, 5, 70, 2), (2, 4, 2)):
        weights = sum(a * b for a, b in itertools.pairwise(sizes))
        first = weights // sum(sizes) + 1
        if wrong := compare(f"The batch for widths {sizes}", answer(sizes), first, 1e-9):
            return wrong
    return None


batch_from = Exercise(
    id="recomputation-batch_from",
    answer="batch_from",
    question="Write `batch_from`, the smallest batch at which the activations $D$ of an MLP take more memory than its "
    "weights $W$. `sizes` are the widths, from the input's to the output's; there are no biases. What is it for the "
    "MLP of depth 8 above?",
    hints=(
        "Per example, the activations are sum(sizes) numbers; between widths a and b there are a · b weights.",
        "The batch is a whole number, and at weights = batch · sum(sizes) it is not yet more.",
    ),
    code="""
def batch_from(sizes):
    weights = sum(a * b for a, b in zip(sizes, sizes[1:]))
    return weights // sum(sizes) + 1
""",
    wrong=_batch_from,
    right="D grows with the batch, W does not: from this batch on, activations are the larger part.",
)


class _Unanswered(Exception):
    """`...` is what a function returned in the middle of a trace."""


def _tanhs(x: Any) -> Any:
    return jnp.tanh(jnp.tanh(jnp.sin(x) * 3) * 2)


def _layers(weights: Any, x: Any) -> Any:
    for w in weights["w"]:
        x = jnp.tanh(x @ w) * weights["scale"]
    return x


def _in_groups(group: Callable[..., Any]) -> Callable[..., Any]:
    """Twelve layers, three to a group."""
    return lambda weights, x: functools.reduce(lambda x, at: group(weights[at : at + 3], x), range(0, 12, 3), x)


def _group(weights: Any, x: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def _compiled(forget: Callable[[Any], Any]) -> int:
    """Bytes that the compiled gradient takes beside arguments and results, where each group is forgotten."""
    f = _in_groups(forget(_group))
    gradient = recomputation.jit(jax.grad(lambda weights, x: f(weights, x).sum()))
    sides = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 12, jax.ShapeDtypeStruct((512, 16), jnp.float32)
    return gradient.lower(*sides).compile().memory_analysis().temp_size_in_bytes


def _case(number: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and arguments for it, fresh ones for each number."""
    draw = np.random.default_rng(number).normal
    x = draw(size=(8 + number, 16)).astype(np.float32)
    weights = {"w": [draw(size=(16, 16)).astype(np.float32) for _ in range(4)], "scale": np.float32(1.5)}
    return (_tanhs, (x,)) if number % 2 else (_layers, (weights, x))


def tried(forget: Callable[[Any], Any]) -> Callable[[int], Any]:
    """What forget(f) does, as a function of a case's number: value and gradients, flat, bytes kept, operations,
    and the bytes that a compiled chain takes whose groups are forgotten.

    Where it is not written yet, `...`. A check cannot trace what runs in another process; this runs where it is.
    """

    def run(number: int) -> Any:
        f, args = _case(number)

        def total(*args: Any) -> Any:
            if (y := g(*args)) is ...:
                raise _Unanswered
            return y.sum()

        if (g := forget(f)) is ...:
            return ...
        try:
            count = recomputation.account(total, *args)
            numbers = jax.tree.leaves(jax.jit(jax.value_and_grad(total, range(len(args))))(*args))
        except _Unanswered:
            return ...
        return np.concatenate([np.ravel(part) for part in numbers]), count.kept, count.gradient, _compiled(forget)

    return run


@functools.cache
def _remembering(number: int) -> tuple[np.ndarray, int, float, int, float]:
    """What a case gives where nothing is forgotten, and the operations of its function."""
    f, args = _case(number)
    return *tried(lambda f: f)(number), recomputation.account(lambda *args: f(*args).sum(), *args).forward


def _forget(answer: Any) -> str | None:
    for number in (2, 3):
        try:
            told = answer(number)
        except (TypeError, AttributeError):  # of the function itself, which takes no number
            told = None
        if not isinstance(told, tuple | list):
            told = tried(answer)(number)  # the function itself was handed in
        if told is ...:
            raise TypeError("it returns nothing yet")
        found, still, operations, taken = told
        expected, kept, least, everything, forward = _remembering(number)
        if wrong := compare("Value and gradient together", found, expected, 1e-4):
            return wrong
        if still > kept / 10:
            return f"The gradient is right, but {still:,} of the {kept:,} bytes between arguments and result are kept."
        if operations - least > 1.3 * forward:
            return f"f runs {(operations - least) / forward + 1:.1f} times in one gradient; twice is enough."
        if taken > 0.8 * everything:
            return (
                f"Right as written. But compiled, groups take {taken / everything:.0%} of the memory of keeping all: "
                "the second run was merged with the first. Must it wait for d?"
            )
    return None


forget = Exercise(
    id="recomputation-forget",
    answer="forget",
    question="Write `forget(f)`: it returns a function that computes what `f` does and has the same gradient, but "
    "keeps of `f` nothing besides its arguments and computes `f` again in the backward pass, compiled, too. Use "
    "`jax.custom_vjp`: "
    "`g.defvjp(forward, backward)`, where `forward(*args)` returns the result and what is kept, and "
    "`backward(kept, d)` gets that and the gradient `d` of the result, and returns a tuple with the gradient of each "
    "argument. A barrier, `kept, d = jax.lax.optimization_barrier((kept, d))`, lets what comes after it wait for `d`.",
    hints=(
        "forward keeps its own arguments: return f(*args), args.",
        "jax.vjp(f, *args) runs f and returns its result and a function from d to the gradients. When must it be "
        "called, so that nothing else is kept?",
        "The barrier is the first line of backward: then f(*args) there is not what it was in forward.",
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
    right="equal gradients, nothing kept but the arguments, compiled, too, and f runs once more. That is a checkpoint.",
)


def by_hand(f: Callable[..., Any], barrier: bool = True) -> Callable[..., Any]:
    """The solution of `forget`, with its barrier or without."""

    def backward(args: Any, d: Any) -> Any:
        if barrier:
            args, d = jax.lax.optimization_barrier((args, d))
        return jax.vjp(f, *args)[1](d)

    g = jax.custom_vjp(f)
    g.defvjp(lambda *args: (f(*args), args), backward)
    return g


def _held(answer: Any) -> str | None:
    steps = recomputation.every(9, 3).steps(recomputation.Chain.uniform(9))
    held = max(len(step.held) for step in steps)
    wrong = compare("The number of arrays", answer, held, 1e-9)
    if wrong and answer in (held + 1, held + 2):
        return f"{wrong} Did you count the gradients, or a snapshot at the end of the last group?"
    return wrong


held = Exercise(
    id="recomputation-held",
    answer="most_held",
    question="By hand: the plan `[0 1 2] [3 4 5] 6 7 8` keeps, of each bracket, only what comes out at its end, until "
    "its turn comes back. How many activations does it hold at most at the same time? The input and the gradients do "
    "not count.",
    hints=(
        "At the turning point: what comes out of the two brackets, and what layers 6, 7 and 8 keep.",
        "Then look at the moment when layers 3 to 5 were computed again. Is that more?",
    ),
    code="most_held = 2 + 3",
    wrong=_held,
    right="two snapshots and three layers in full, where keeping everything holds nine.",
)


def _best_k(answer: Any) -> str | None:
    for n in (4, 10, 30, 50, 100, 144, 1000):
        k = answer(n)
        if wrong := compare(f"k for {n} layers", k, float(np.clip(round(float(k)), 1, n)), 1e-9):
            return f"{wrong} It must be a whole number from 1 to {n}."
        least = min(n / j + j for j in range(1, n + 1))
        if not math.isclose(n / k + k, least):
            return f"For {n} layers, your k = {k} costs {n / k + k:.4g} arrays, and another k costs {least:.4g}."
    return None


best_k = Exercise(
    id="recomputation-best_k",
    answer="best_k",
    question="Write `best_k`, the whole number $k$ for which $n / k + k$ is smallest.",
    hints=(
        "Treat k as a real number, set the derivative 1 − n / k² to zero, then round.",
        "Or try all k from 1 to n: min(range(1, n + 1), key=…).",
    ),
    code="""
def best_k(n):
    return min(range(1, n + 1), key=lambda k: n / k + k)
""",
    wrong=_best_k,
    right="the square root of n: then snapshots and the group at work take the same room, √n each.",
)


def _repeats(answer: Any) -> str | None:
    for n, slots in ((30, 3), (10, 3), (11, 3), (10, 1), (21, 5), (8, 8), (1000, 4)):
        expected = next(r for r in itertools.count() if math.comb(slots + r, r) >= n)
        if wrong := compare(f"The repeats for {n} layers and {slots} slots", answer(n, slots), expected, 1e-9):
            return wrong
    return None


repeats = Exercise(
    id="recomputation-repeats",
    answer="repeats",
    question=r"How many layers do 3 slots serve with at most 2 repeats, and how many repeats do 30 layers need? Find "
    r"it by hand, then write `repeats`, the smallest $r$ for which $\beta(s, r) \ge n$. `math.comb(a, b)` is "
    r"$\binom{a}{b}$.",
    hints=(
        "β(3, 2) = 5 · 4 / 2; the next ones are β(3, 3) = 6 · 5 · 4 / 6 and β(3, 4).",
        "Count r up from 0 while math.comb(slots + r, r) < n.",
    ),
    code="""
def repeats(n, slots):
    r = 0
    while math.comb(slots + r, r) < n:
        r += 1
    return r
""",
    wrong=_repeats,
    right="with one slot more or one repeat more, the number of layers that can be served grows like a binomial.",
)


def plan(answer: Any) -> recomputation.Plan:
    """An answer as a plan; brackets may be lists, too."""

    def items(answer: Any) -> Any:
        return tuple(map(items, answer)) if isinstance(answer, list | tuple) else answer

    return answer if isinstance(answer, recomputation.Plan) else recomputation.Plan(items(answer))


def shown(answer: Any) -> recomputation.Plan | None:
    """The plan of an answer, or None where it is not one for the exercise's chain: there is nothing to draw then."""
    try:
        written = plan(answer)
        written.peak(recomputation.Chain.uniform(12))
    except Exception:  # an answer may be anything
        return None
    return written


def _beat(answer: Any) -> str | None:
    written = plan(answer)
    peak, again = written.peak(recomputation.Chain.uniform(12)), int(written.forwards().sum()) - 12
    if peak > 7 or again > 11:
        return f"It takes {peak:g} arrays and computes {again} layers again; 7 and 11 are allowed."
    return None


beat = Exercise(
    id="recomputation-beat",
    answer="my_plan",
    question="**Open.** Halves of halves takes 7 arrays for 12 layers and computes 20 again; without the brackets "
    "around single layers it is `[[0 1 2] 3 4 5] [6 7 8] 9 10 11` and computes 12 again. Write a plan that computes "
    "fewer than 12 again in the same 7 arrays. How near to 9, the best there is, do you come? Brackets are tuples: "
    "`[0 1] 2 [3]` is `((0, 1), 2, (3,))`.",
    hints=(
        "Look in the picture for moments below the limit: room that nobody uses. Flat groups are enough.",
        "When the last group is done, its room is free: the group before it may hold one array more, the first one "
        "most of all. So let the groups shrink, and leave the last one without brackets.",
    ),
    code="""
my_plan = ((0, 1, 2, 3, 4), (5, 6, 7, 8), 9, 10, 11)
""",
    wrong=_beat,
    right="fewer runs in the same memory. The picture has your plan; none with these brackets is below 9.",
)


NAMES = ("qkv", "scores", "average", "attention", "hidden")


def _transformer_block(p: Any, x: Any) -> Any:
    """The block of the notebook, with its names."""
    norm = lambda x: x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)  # noqa: E731
    qkv = checkpoint_name(norm(x) @ p["qkv"], "qkv")
    q, k, v = qkv.reshape(*x.shape[:2], 3, 4, -1).transpose(2, 0, 3, 1, 4)
    scores = checkpoint_name(q @ k.swapaxes(-1, -2), "scores")
    average = checkpoint_name(jax.nn.softmax(scores / math.sqrt(q.shape[-1])) @ v, "average")
    x = x + checkpoint_name(average.swapaxes(1, 2).reshape(x.shape) @ p["out"], "attention")
    return x + jax.nn.gelu(checkpoint_name(norm(x) @ p["up"], "hidden")) @ p["down"]


@functools.cache
def kept_and_again(names: frozenset[str]) -> tuple[float, float]:
    """Megabytes that six blocks keep at 1,024 tokens where these names are kept, and % of a forward pass again."""
    sides = {"qkv": (64, 192), "out": (64, 64), "up": (64, 256), "down": (256, 64)}
    weights = {name: jax.ShapeDtypeStruct(side, jnp.float32) for name, side in sides.items()}
    x = jax.ShapeDtypeStruct((8, 1024, 64), jnp.float32)
    policies = jax.checkpoint_policies

    def loss(policy: Any) -> Callable[..., Any]:
        block = jax.checkpoint(_transformer_block, policy=policy)
        return lambda p, x: (block(p, x) ** 2).mean()

    some = loss(policies.save_only_these_names(*names))
    runs = [program.flops(jax.value_and_grad(f), weights, x) for f in (some, loss(policies.everything_saveable))]
    again = (runs[0] - runs[1]) / program.flops(_transformer_block, weights, x)
    return 6 * program.kept_bytes(some, weights, x) / 1e6, 100 * again


def _chosen(answer: Any) -> frozenset[Any]:
    return frozenset([answer] if isinstance(answer, str) else answer)


def _names(answer: Any) -> str | None:
    wanted = _chosen(answer)
    if strange := wanted - set(NAMES):
        return f"No result is called {sorted(map(str, strange))[0]!r}; there are {', '.join(NAMES)}."
    kept, again = kept_and_again(wanted)
    if kept > 150 or again > 45:
        return f"It keeps {kept:.0f} MB and computes {again:.0f} % of a forward pass again; allowed: 150 MB, 45 %."
    return None


class _Pair(Exercise):
    """Several answers are right, and they differ: the line says what this one keeps and costs."""

    def judge(self, answer: object) -> tuple[bool, str]:
        right, line = super().judge(answer)
        if right:
            kept, again = kept_and_again(_chosen(answer))
            line += f" Yours keeps {kept:.0f} MB and computes {again:.0f} % of a forward pass again."
        return right, line


names = _Pair(
    id="recomputation-names",
    answer="my_names",
    question="At 1,024 tokens, six blocks may keep 150 MB. Of the five policies, the best that fits computes most of a "
    'forward pass again. Choose better: write `my_names`, a tuple of names out of "qkv", "scores", "average", '
    '"attention" and "hidden" (they stand in the cells above), so that at most 45 % of a forward pass runs again. '
    "Which product is the dear one, and what must be kept so that it does not run?",
    hints=(
        "Two products grow with the square of the tokens: that of queries and keys, and that of weights and values. "
        "What does each of them leave behind, and how large is it?",
        "The scores do not fit. But the gradient of `out` needs only what the weights made of the values.",
    ),
    code="""
my_names = ("qkv", "average", "attention", "hidden")
""",
    wrong=_names,
    right="one of attention's two large products does not run again, for one more small array in each block.",
)
