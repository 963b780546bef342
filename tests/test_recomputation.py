"""Plans by their laws and closed forms, optimal ones against every plan there is, and all in real programs."""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import Cells
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import recomputation as room
from dlscale.lab import models, program
from dlscale.recomputation import Chain, Layer, Plan, exercises

SIZES, COSTS = st.integers(0, 20), st.integers(1, 9)
LAYERS = st.builds(
    lambda output, inner, *more: Layer(output, output + inner, *more), SIZES, SIZES, COSTS, COSTS, SIZES, SIZES
)
CHAINS = st.builds(lambda size, layers: Chain(size, tuple(layers)), SIZES, st.lists(LAYERS, min_size=1, max_size=5))
EVERY, SLOTS = functools.partial(room.every, k=3), functools.partial(room.revolve, slots=2)
MAY_SAVE = jax.checkpoint_policies


def all_plans(start, stop):
    """The items of every plan for the layers from start to stop - 1."""
    if start == stop:
        yield ()
        return
    for rest in all_plans(start + 1, stop):
        yield (start, *rest)
    for middle in range(start + 1, stop):
        for first, rest in itertools.product(all_plans(start, middle), all_plans(middle, stop)):
            yield (first, *rest)


# Plans


@pytest.mark.parametrize("make", [room.keep_all, room.keep_none, room.recursive, EVERY, SLOTS])
@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_every_step_of_a_plan_has_what_it_needs(make, length):
    """Played by hand: a step reads what is held or what the step before it made."""
    plan, backwards, fresh, runs = make(length), [], None, np.zeros(length, int)
    for operation, layer, held, _ in plan.steps(Chain.uniform(length)):
        assert layer in {0, fresh, *(i + 1 if what == "saved" else i for what, i in held)}, "its input"
        if operation == "backward":
            assert ("saved", layer) in held
            backwards.append(layer)
        else:
            runs[layer], fresh = runs[layer] + 1, layer + 1
    assert backwards == list(range(length))[::-1]
    np.testing.assert_array_equal(runs, plan.forwards())


@settings(max_examples=60)
@given(CHAINS)
def test_the_frontier_is_that_of_all_plans(chain):
    found = sorted((plan.peak(chain), plan.cost(chain)) for plan in map(Plan, all_plans(0, len(chain.layers))))
    lowest = [math.inf, *itertools.accumulate((cost for _, cost in found), min)]
    wanted = [(peak, cost) for (peak, cost), before in zip(found, lowest, strict=False) if cost < before]
    assert [point[:2] for point in room.frontier(chain)] == wanted
    for peak, cost, plan in room.frontier(chain):
        assert (plan.peak(chain), plan.cost(chain)) == (peak, cost)
        assert room.optimal_plan(chain, peak).cost(chain) == cost
    with pytest.raises(ValueError, match=f"at least {float(wanted[0][0])}"):
        room.optimal_plan(chain, np.nextafter(wanted[0][0], -1) if wanted[0][0] else -0.5)


@given(st.integers(1, 40), st.integers(1, 40))
def test_revolve_has_griewanks_closed_form(length, slots):
    plan = room.revolve(length, slots)
    r = next(r for r in itertools.count() if math.comb(slots + r, r) >= length)
    assert plan.forwards().sum() - length == (r * length - math.comb(slots + r, r - 1) if r else 0)
    stored = [sum(what == "output" for what, _ in step.held) for step in plan.steps(Chain.uniform(length))]
    assert max(stored) <= slots, "beside the input, which has a slot, the present state, which needs none"


@given(st.integers(1, 8))
def test_memory_grows_with_the_root_or_the_logarithm(k):
    assert room.every(k * k, k).peak(Chain.uniform(k * k)) <= 2 * k + 2, "and two gradients"
    assert room.every(k * k, k).forwards().max() <= 2
    assert room.recursive(2**k).peak(Chain.uniform(2**k)) <= k + 4


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Plan((0, (2,), 1)), "each layer once"),
        (lambda: room.revolve(4, 0), "slots"),
        (lambda: room.keep_none(1500), "take more slots"),
        (lambda: Plan(functools.reduce(lambda inner, _: (inner,), range(900), 0)), "nests at most"),
        (lambda: room.apply(room.keep_none(300), [dense] * 300)([1.0] * 300, X), "299 deep, too deep for JAX"),
        (lambda: Chain(1, (Layer(1234562, 1234561),)), "keeps 1234561 bytes, less than its output: 1234562"),
        (lambda: Chain(1, ()), "empty"),
        (lambda: Chain(1, (Layer(1, 1), Layer(1, math.nan))), "saved of layer 1"),
        (lambda: room.keep_all(3).peak(Chain.uniform(2)), "3 layers, but 2 layers are given"),
        (lambda: room.optimal_plan(Chain.uniform(3), math.nan), "memory"),
        (lambda: room.apply(room.keep_all(3), [dense]), "3 layers, but 1 functions are given"),
        (lambda: room.apply(room.keep_all(1), [dense])([], X), "1 layers, but 0 parameters are given"),
        (lambda: room.apply(room.keep_all(1), [lambda p, x: (x, x)])([0], X), "Layer 0 returns a tuple"),
        (lambda: room.profile([lambda p, x: (x, x)], [0.0], X), "Layer 0 returns a tuple"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# Programs


def dense(w, x):
    return room.relu(x @ w)


def block(p, x):
    return x + dense(p[1], dense(p[0], x))


def conv(w, x):
    return room.relu(models.conv2d(x, w))


def lax_conv(w, x):
    return room.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))


def weights(*shape):
    drawn = np.random.default_rng(math.prod(shape)).normal(size=shape)
    return (drawn / math.sqrt(math.prod(shape[:-1]) / 2)).astype(np.float32)


def peak(f, *args, jit=room.jit):
    """Bytes that the compiled gradient of f takes beside its arguments and results."""
    return room.compiled_bytes(jax.grad(f), *args, jit=jit)


X = np.ones((4, 8), np.float32)
WIDTHS = (32, 96, 16, 64, 64, 24, 32)
NETS = {
    "dense": ([dense] * 6, [weights(a, b) for a, b in itertools.pairwise(WIDTHS)], weights(1024, 32)),
    "residual": ([block] * 8, [(weights(32, 32), weights(32, 32))] * 8, weights(1024, 32)),
    "convolutional": ([conv] * 5, [weights(3, 3, 8, 8)] * 5, weights(16, 16, 16, 8)),
    "lax": ([lax_conv] * 8, [weights(3, 3, 8, 8)] * 8, weights(16, 16, 16, 8)),
}


@functools.cache
def net(name):
    layers, params, x = NETS[name]
    layers, params = [*layers, lambda _, x: (x**2).mean()], [*params, ()]
    wanted = room.jit(jax.value_and_grad(room.apply(room.keep_all(len(layers)), layers)))(params, x)
    return layers, params, x, room.profile(layers, params, x), wanted


@pytest.mark.parametrize(
    "name, make",
    [("dense", make) for make in (room.keep_all, room.keep_none, room.recursive, EVERY, "optimal")]
    + [("residual", room.recursive), ("convolutional", EVERY), ("convolutional", "optimal"), ("lax", room.keep_all)],
)
def test_prediction_program_and_machine_agree(name, make):
    layers, params, x, chain, wanted = net(name)
    frontier = room.frontier(chain)
    plan = make(len(layers)) if callable(make) else frontier[len(frontier) // 2].plan
    f = room.apply(plan, layers)

    # memory: an array may take the place of one that is dead, and the convolution of models pads copies of its own
    largest = max(chain.size(position) for position in range(len(layers) + 1))
    assert abs(peak(f, params, x) - plan.peak(chain)) <= (2.5 if name == "convolutional" else 1) * largest
    held = next(step.held for step in plan.steps(chain) if step.operation == "backward")
    kept = sum(chain.layers[i].saved if what == "saved" else chain.size(i) for what, i in held)
    assert kept - largest - chain.layers[-1].output <= program.kept_bytes(f, params, x) <= kept, "at last 2 x, not x"

    # work: elementwise operations of the forward pass are not all counted
    unasked = 1.1 * chain.layers[0].forward  # the gradient of the input, which a profile of the layer alone has
    assert plan.cost(chain) - unasked <= program.flops(jax.value_and_grad(f), params, x) <= 1.01 * plan.cost(chain)

    # numbers: the same operations in the same order; only fusions, and with them roundings, may differ
    got = room.jit(jax.value_and_grad(f))(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=len(layers) * 2**-20 * float(np.abs(b).max()))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="elsewhere the compiler keeps barriers")
def test_plain_jit_on_a_cpu_undoes_the_plan():
    layers, params, x, *_ = net("dense")
    f = room.apply(room.recursive(len(layers)), layers)
    assert peak(f, params, x) < 0.7 * peak(f, params, x, jit=jax.jit)


def test_relu_is_relu():
    x = np.array([-1, -0.0, 0, 0.5, 2], np.float32)
    (y, pull), (wanted, wanted_pull) = jax.vjp(room.relu, x), jax.vjp(jax.nn.relu, x)
    np.testing.assert_array_equal((y, *pull(x)), (wanted, *wanted_pull(x)))


@pytest.mark.parametrize("tokens", [64, 1024])
def test_what_a_transformer_block_saves_and_computes_again(tokens):
    by_name, names = MAY_SAVE.save_only_these_names, ("attention", "hidden")
    policies = MAY_SAVE.everything_saveable, by_name(*names, "scores"), by_name(*names), MAY_SAVE.nothing_saveable
    kept, again = zip(*(room.kept_and_again(policy, tokens) for policy in policies), strict=True)
    assert again[0] == 0 and again[3] > 60, "all but the last product"
    assert sorted(kept, reverse=True) == list(kept)
    assert kept[1] - kept[2] == pytest.approx(6 * 4 * 8 * 4 * tokens**2 / 1e6), "six blocks of scores"


# The exercises: what is right is accepted however it is written, what is naive is refused


def with_backward(backward, forward=lambda f, *args: (f(*args), args)):
    def forget(f):
        g = jax.custom_vjp(f)
        g.defvjp(functools.partial(forward, f), functools.partial(backward, f))
        return g

    return forget


def waiting(backward):
    return with_backward(lambda f, args, d: backward(f, *jax.lax.optimization_barrier((args, d))))


def saving_the_result(f, saved, d):
    (args, _), d = jax.lax.optimization_barrier((saved, d))
    return jax.vjp(f, *args)[1](d)


FORGETS = {
    "gradient of a product with d": (
        waiting(lambda f, args, d: jax.grad(lambda *args: jnp.vdot(f(*args), d), (0, 1))(*args)), True,
    ),
    "linearized and transposed": (
        waiting(lambda f, args, d: jax.linear_transpose(jax.linearize(f, *args)[1], *args)(d)), True,
    ),
    "the library's": (jax.checkpoint, False),
    "the library's, hidden": (lambda f: jax.jit(jax.checkpoint(lambda *args: f(*args))), False),
    "nothing forgotten": (lambda f: f, False),
    "a saved pullback": (with_backward(lambda f, pull, d: pull(d), jax.vjp), False),
    "a saved result": (with_backward(saving_the_result, lambda f, *args: (f(*args), (args, f(*args)))), False),
    "three runs": (with_backward(lambda f, args, d: jax.vjp(f, *args)[1](d + 0 * f(*args))), False),
    "no barrier": (exercises.without_barrier, False),
    "barrier without d": (
        with_backward(lambda f, args, d: jax.vjp(f, *jax.lax.optimization_barrier(args))[1](d)), False,
    ),
}  # fmt: skip
BEST = ((0, 1, 2, 3, 4), (5, 6, 7, 8), 9, 10, 11)


@pytest.mark.parametrize(
    ("name", "answer", "right"),
    [
        *(pytest.param("forget", exercises.tried(f), right, id=name) for name, (f, right) in FORGETS.items()),
        ("best_k", lambda n: round(math.sqrt(n)), True),
        ("best_k", lambda n: jnp.round(jnp.sqrt(n)).astype(int), True),
        ("best_k", lambda n: math.ceil(math.sqrt(n)), False),
        ("best_k", math.isqrt, False),
        ("best_k", math.sqrt, False),
        ("beat", [[0, 1, 2, 3, 4], [5, 6, 7, 8], 9, 10, 11], True),
        ("beat", Plan(BEST), True),
        ("beat", ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9), 10, 11), True),
        ("beat", (*BEST, 12), False),
        ("beat", (((0, 1, 2), 3, 4, 5), (6, 7, 8), 9, 10, 11), False),
        ("beat", tuple(range(12)), False),
        ("names", {"hidden", "average", "qkv"}, True),
        ("names", ("attention", "hidden"), False),
        ("names", "average", False),
        ("names", exercises.NAMES, False),
        ("names", ["dots"], False),
    ],
)
def test_answers(name, answer, right):
    judged, line = vars(exercises)[name].judge(answer)
    assert judged is right, line


@pytest.mark.parametrize("answer", [lambda f: ..., lambda f: lambda *args: ...])
def test_a_blank_forget_is_no_answer(answer):
    assert exercises.forget.judge(exercises.tried(answer)) == (False, "no answer yet")


# What the notebooks compute and suggest

LESSON, FURTHER = "07_recomputation", "further/07_recomputation_further"


def cells(notebook, *identities, changes=None):
    start = "recomputation-further-" if notebook == FURTHER else "recomputation-"
    named = Cells(notebook, changes)
    named.run(*(start + identity for identity in ("setup", *identities)))
    return named


@pytest.mark.parametrize(("barrier", "arrays"), [("(args, d)", 8), ("args", 16)])
def test_groups_can_be_forgotten_from_scratch(barrier, arrays):
    right = "args, d = jax.lax.optimization_barrier((args, d))"
    code = exercises.forget.code.replace(right, f"{barrier.strip('()')} = jax.lax.optimization_barrier({barrier})")
    used = ("layer", "measured", "in-groups", "same", "forget-answer", "arrays")
    named = cells(LESSON, *used, changes={"def forget(f):\n    return ...": code})
    assert named["arrays"](named["in_groups"](3, named["forget"])) == pytest.approx(arrays, abs=0.1)


def test_what_the_lesson_suggests_to_try():
    plan = room.optimal_plan(Chain.uniform(12), 6)
    assert plan.peak(Chain.uniform(12)) == 6 and plan.forwards().sum() - 12 > 9
    named = cells(LESSON, "extra", "free")
    assert room.every(100, 10).peak(Chain.uniform(100)) == 21 and room.every(100, 10).forwards().sum() == 190
    assert named["runs"](100, 21, False) - 100 < named["extra"](100, 21) < 90


@pytest.mark.parametrize("length", [1, 2, 5, 7])
def test_free_schedules_are_those_of_a_search(length):
    lesson, search = cells(LESSON, "extra", "free"), cells(FURTHER, "best-of-all")["best_of_all"]
    for memory in range(3, length + 3):
        assert search(length, memory) == lesson["runs"](length, memory, False) - length
        assert search(length, memory) <= lesson["extra"](length, memory)


def test_the_lean_norm_keeps_the_deviation_of_a_channel_with_a_large_mean():
    x = (30 + np.random.default_rng(0).normal(size=(4, 16, 16, 8))).astype(np.float16)
    norm = jax.jit(cells(FURTHER, "norms", "lean-norm")["lean_norm"])
    y = np.asarray(norm((np.ones(8, np.float16), np.zeros(8, np.float16)), x), np.float32)
    np.testing.assert_allclose(y.std((0, 1, 2)), 1, atol=0.01)


@suggested_by(FURTHER)
def test_wider_layers_are_forgotten():
    again = []
    for changes in ({}, {"*small(64, 64, 64)": "*small(128, 128, 128)"}):
        used = ("layers", "conv", "local-norm", "dense", "build", "three", "chain")
        chain = cells(FURTHER, *used, changes=changes)["chain"]
        again.append(room.optimal_plan(chain, 0.75 * room.keep_all(len(chain.layers)).peak(chain)).forwards() - 1)
    assert again[1][2:5].sum() > again[0][2:5].sum()


@suggested_by(FURTHER)
def test_a_batch_of_one_saves_less():
    used = ("layers", "conv", "blocks", "norms", "lean-norm", "writings-3", "resnet", "block-shapes", "resnet-2")
    named = cells(FURTHER, *used, "resnet-net", "tried-on", changes={"half(16,": "half(1,"})
    assert named["tried_on"]("before, plain", 26)[0] < 60
