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
    lambda output, inner, forward, backward, *work: Layer(output, output + inner, forward, backward, *work),
    SIZES, SIZES, COSTS, COSTS, SIZES, SIZES,
)  # fmt: skip
CHAINS = st.builds(lambda size, layers: Chain(size, tuple(layers)), SIZES, st.lists(LAYERS, min_size=1, max_size=5))
MAKERS = [
    room.keep_all,
    room.keep_none,
    room.recursive,
    functools.partial(room.every, k=3),
    functools.partial(room.revolve, slots=2),
    functools.partial(room.revolve, slots=4),
]


def all_plans(start, stop):
    """The items of every plan for the layers from start to stop - 1."""
    if start == stop:
        yield ()
    else:
        for rest in all_plans(start + 1, stop):
            yield (start, *rest)
        for middle in range(start + 1, stop):
            for first, rest in itertools.product(all_plans(start, middle), all_plans(middle, stop)):
                yield (first, *rest)


# Plans


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 16])
def test_every_step_of_a_plan_has_what_it_needs(make, length):
    """Played by hand: a step reads what is held or what the step before it made."""
    plan = make(length)
    assert len(plan) == length
    backwards, fresh = [], None
    runs = np.zeros(length, int)
    for operation, layer, held, _ in plan.steps(Chain.uniform(length)):
        have = {0, fresh, *(i + 1 if what == "saved" else i for what, i in held)}
        if operation == "backward":
            assert ("saved", layer) in held
            assert layer in have, "its input"
            backwards.append(layer)
        else:
            assert layer in have
            runs[layer], fresh = runs[layer] + 1, layer + 1
    assert backwards == list(range(length))[::-1]
    np.testing.assert_array_equal(runs, plan.forwards())


@settings(max_examples=60, deadline=None)
@given(CHAINS)
def test_the_frontier_is_that_of_all_plans(chain):
    found = sorted((plan.peak(chain), plan.cost(chain)) for plan in map(Plan, all_plans(0, len(chain.layers))))
    best, wanted = math.inf, []
    for peak, cost in found:
        if cost < best:
            wanted.append((peak, cost))
            best = cost
    frontier = room.frontier(chain)
    assert [(point.peak, point.cost) for point in frontier] == wanted
    for peak, cost, plan in frontier:
        assert (plan.peak(chain), plan.cost(chain)) == (peak, cost)
        assert room.optimal_plan(chain, peak).cost(chain) == cost
    with pytest.raises(ValueError, match=f"at least {float(wanted[0][0])}"):
        room.optimal_plan(chain, np.nextafter(wanted[0][0], -1) if wanted[0][0] else -0.5)


@pytest.mark.parametrize("length", [1, 2, 5, 10, 21, 40])
@pytest.mark.parametrize("slots", [1, 2, 3, 5, 40])
def test_revolve_has_griewanks_closed_form(length, slots):
    plan = room.revolve(length, slots)
    r = next(r for r in itertools.count() if math.comb(slots + r, r) >= length)
    runs = r * length - math.comb(slots + r, r - 1) if r else 0
    assert plan.forwards().sum() - length == runs
    stored = [sum(what == "output" for what, _ in step.held) for step in plan.steps(Chain.uniform(length))]
    assert max(stored) <= slots, "beside the input, which has a slot, the present state, which needs none"


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_memory_grows_with_the_root_or_the_logarithm(k):
    assert room.every(k * k, k).peak(Chain.uniform(k * k)) <= 2 * k + 2, "and two gradients"
    assert room.every(k * k, k).forwards().max() <= 2
    assert room.recursive(2**k).peak(Chain.uniform(2**k)) <= k + 4


def test_plans_can_be_read():
    assert str(Plan(((0, (1, 2)), 3))) == "[0 [1 2]] 3"
    assert str(room.every(5, 2)) == "[0 1] [2 3] 4"
    assert room.keep_none(3) == Plan((((0,), 1), 2))
    assert Plan((0, (1,))).cost(Chain.uniform(2)) == 2 * 3 + 1


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Plan((0, (2,), 1)), "each layer once"),
        (lambda: room.keep_all(0), "length"),
        (lambda: room.revolve(4, 0), "slots"),
        (lambda: room.keep_none(1500), "take at least 2"),
        (lambda: Plan(functools.reduce(lambda inner, _: (inner,), range(900), 0)), "nests at most"),
        (lambda: room.apply(room.keep_none(300), [dense] * 300)([1.0] * 300, X), "299 deep, too deep for JAX"),
        (lambda: Chain(1, (Layer(1234562, 1234561),)), "keeps 1234561 bytes, less than its output: 1234562"),
        (lambda: Chain(1, ()), "empty"),
        (lambda: Chain(-1, (Layer(1, 1),)), "input"),
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


def mean_square(_, x):
    return (x**2).mean()


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
}


@functools.cache
def net(name):
    layers, params, x = NETS[name]
    layers, params = [*layers, mean_square], [*params, ()]
    return layers, params, x, room.profile(layers, params, x)


@pytest.mark.parametrize(
    "name, make",
    [("dense", make) for make in [*MAKERS[:4], "optimal"]]
    + [(name, make) for name in ("residual", "convolutional") for make in (room.recursive, "optimal")],
)
def test_prediction_program_and_machine_agree(name, make):
    layers, params, x, chain = net(name)
    frontier = room.frontier(chain)
    plan = make(len(layers)) if callable(make) else frontier[len(frontier) // 2].plan
    f = room.apply(plan, layers)

    # memory: an array may take the place of one that is dead, and this convolution pads copies of its own
    largest = max(chain.size(position) for position in range(len(layers) + 1))
    assert abs(peak(f, params, x) - plan.peak(chain)) <= (2.5 if name == "convolutional" else 1) * largest
    last_of_first_pass = next(i for i, step in enumerate(plan.steps(chain)) if step.operation == "backward")
    held = plan.steps(chain)[last_of_first_pass].held
    kept = sum(chain.layers[i].saved if what == "saved" else chain.size(i) for what, i in held)
    assert kept - largest - chain.layers[-1].output <= program.kept_bytes(f, params, x) <= kept, "at last 2 x, not x"

    # work: elementwise operations on the way are not all counted
    gradient = program.flops(jax.value_and_grad(f), params, x)
    unasked = 1.1 * chain.layers[0].forward  # the gradient of the input, which a profile of the layer alone has
    assert plan.cost(chain) - unasked <= gradient <= 1.01 * plan.cost(chain)


@pytest.mark.parametrize(
    "name, makers", [("dense", MAKERS[1:4]), ("residual", MAKERS[2:3]), ("convolutional", MAKERS[3:4])]
)
def test_gradients_are_those_without_a_plan(name, makers):
    layers, params, x, _ = net(name)
    wanted = room.jit(jax.value_and_grad(room.apply(room.keep_all(len(layers)), layers)))(params, x)
    for make in makers:
        f = room.apply(make(len(layers)), layers)
        got = room.jit(jax.value_and_grad(f))(params, x)
        # the same operations in the same order; only fusions, and with them roundings, may differ
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=len(layers) * 2**-20 * float(np.abs(b).max()))


def test_a_layer_that_comes_several_times_is_traced_once():
    traced = []

    def layer(w, x):
        traced.append(x.shape)
        return jnp.tanh(x @ w)

    params, x = [np.full((3, 3), 0.1 * i, np.float32) for i in range(1, 7)], np.ones((2, 3), np.float32)
    made = jax.jit(room.apply(room.every(6, 2), [layer] * 6))(params, x)
    assert traced == [x.shape]
    np.testing.assert_allclose(made, functools.reduce(lambda x, w: np.tanh(x @ w), params, x), rtol=1e-6)


def test_plain_jit_on_a_cpu_undoes_the_plan():
    layers, params, x, _ = net("dense")
    f = room.apply(room.recursive(len(layers)), layers)
    plain, ours = peak(f, params, x, jit=jax.jit), peak(f, params, x)
    if jax.default_backend() == "cpu":
        assert ours < 0.7 * plain
    keep_all = room.apply(room.keep_all(len(layers)), layers)
    assert ours < peak(keep_all, params, x)


def test_what_a_convolution_keeps_is_in_memory_once():
    """The compiler alone would hold it a second time, in the order that the backward pass reads."""

    def layer(w, x):
        dimensions = ("NHWC", "HWIO", "NHWC")
        return room.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dimensions))

    layers, params, x = [*[layer] * 8, mean_square], [*[weights(3, 3, 8, 8)] * 8, ()], weights(16, 16, 16, 8)
    plan, array = room.keep_all(len(layers)), 4 * x.size
    predicted = plan.peak(room.profile(layers, params, x))
    assert abs(peak(room.apply(plan, layers), params, x) - predicted) <= array


def test_a_profile_from_scratch():
    chain = room.profile([dense, mean_square], [weights(32, 16), ()], weights(1024, 32))
    assert chain.input == 4 * 1024 * 32
    first, last = chain.layers
    assert first.output == first.saved == 4 * 1024 * 16, "this relu needs its output only"
    assert 2 * 1024 * 32 * 16 <= first.forward <= 1.1 * 2 * 1024 * 32 * 16
    assert 2 * first.forward * 0.9 <= first.backward <= 2 * first.forward * 1.1
    assert last.output == 4
    both = room.profile([lambda w, x: jax.nn.relu(x @ w)], [weights(32, 16)], weights(1024, 32), False).layers[0]
    assert both.saved == first.output + 1024 * 16, "this one keeps a bit, in a byte, for each number"


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_relu_is_relu(seed):
    x = np.random.default_rng(seed).normal(size=50).round(1).astype(np.float32)
    y, pull = jax.vjp(room.relu, x)
    wanted, wanted_pull = jax.vjp(jax.nn.relu, x)
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(pull(x)[0], wanted_pull(x)[0])


@pytest.mark.parametrize("tokens", [64, 1024])
def test_what_a_transformer_block_saves_and_computes_again(tokens):
    may_save = jax.checkpoint_policies
    everything, dots, some, nothing = (
        room.kept_and_again(policy, tokens)
        for policy in (
            may_save.everything_saveable, may_save.dots_saveable,
            may_save.save_only_these_names("attention", "hidden", "scores"), may_save.nothing_saveable,
        )
    )  # fmt: skip
    assert everything[1] == 0 and nothing[1] > 60, "all but the last product"
    assert nothing[0] < some[0] < everything[0] and nothing[0] < dots[0] < everything[0]
    scores = 6 * 4 * 8 * 4 * tokens**2 / 1e6
    assert some[0] - room.kept_and_again(may_save.save_only_these_names("attention", "hidden"), tokens)[0] == (
        pytest.approx(scores, rel=1e-6)
    )


# The exercises: what is right is accepted however it is written, what is naive is refused


def with_backward(backward, forward=None):
    def forget(f):
        g = jax.custom_vjp(f)
        g.defvjp(
            lambda *args: (f(*args), args) if forward is None else forward(f, *args), lambda a, d: backward(f, a, d)
        )
        return g

    return forget


def waits(args, d):
    return jax.lax.optimization_barrier((args, d))


def by_grad(f, args, d):
    """The gradient of a product with d, which is as right as a pullback."""
    args, d = waits(args, d)
    return jax.grad(lambda *args: jnp.vdot(f(*args), d), range(len(args)))(*args)


FORGETS = {
    "a product with d": (with_backward(by_grad), True),
    "the library's": (jax.checkpoint, False),
    "the library's, hidden": (lambda f: jax.jit(jax.checkpoint(lambda *args: f(*args))), False),
    "nothing forgotten": (lambda f: f, False),
    "a saved pullback": (with_backward(lambda f, pull, d: pull(d), lambda f, *args: jax.vjp(f, *args)), False),
    "three runs": (with_backward(lambda f, args, d: jax.vjp(f, *args)[1](d + 0 * f(*args))), False),
    "no barrier": (exercises.without_barrier, False),
    "barrier without d": (
        with_backward(lambda f, args, d: jax.vjp(f, *jax.lax.optimization_barrier(args))[1](d)), False,
    ),
    "a wrong gradient": (with_backward(lambda f, args, d: jax.vjp(f, *args)[1](2 * d)), False),
}  # fmt: skip
BEST = ((0, 1, 2, 3, 4), (5, 6, 7, 8), 9, 10, 11)


@pytest.mark.parametrize("name", FORGETS)
def test_forget(name):
    forget, right = FORGETS[name]
    judged, line = exercises.forget.judge(exercises.tried(forget))
    assert judged is right, line


@pytest.mark.parametrize(
    ("name", "answer", "right"),
    [
        ("best_k", lambda n: round(math.sqrt(n)), True),
        ("best_k", lambda n: math.ceil(math.sqrt(n)), False),
        ("best_k", math.isqrt, False),
        ("best_k", lambda n: n // 2, False),
        ("beat", BEST, True),
        ("beat", [[0, 1, 2, 3, 4], [5, 6, 7, 8], 9, 10, 11], True),
        ("beat", Plan(BEST), True),
        ("beat", ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9), 10, 11), True),
        ("beat", (0, 1, 2, 3), False),
        ("beat", (((0, 1, 2), 3, 4, 5), (6, 7, 8), 9, 10, 11), False),
        ("beat", room.recursive(12).items, False),
        ("beat", tuple(range(12)), False),
        ("names", ("qkv", "average", "attention", "hidden"), True),
        ("names", {"hidden", "average", "qkv"}, True),
        ("names", ("attention", "hidden"), False),
        ("names", "average", False),
        ("names", ("qkv", "scores", "average", "attention", "hidden"), False),
        ("names", ["dots"], False),
    ],
)
def test_answers(name, answer, right):
    judged, line = vars(exercises)[name].judge(answer)
    assert judged is right, line


@pytest.mark.parametrize("answer", [..., lambda f: ..., lambda f: lambda *args: ...])
def test_a_blank_forget_is_no_answer(answer):
    blank = answer if answer is ... else exercises.tried(answer)
    assert exercises.forget.judge(blank) == (False, "no answer yet")


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
    free, nested = named["runs"](100, 21, False) - 100, named["extra"](100, 21)
    assert room.every(100, 10).peak(Chain.uniform(100)) == 21 and room.every(100, 10).forwards().sum() == 190
    assert free < nested < 90


@pytest.mark.parametrize("length", [1, 2, 5, 7])
def test_free_schedules_are_those_of_a_search(length):
    free, search = cells(LESSON, "free")["runs"], cells(FURTHER, "best-of-all")["best_of_all"]
    for memory in range(3, length + 3):
        assert search(length, memory) == free(length, memory, False) - length
        assert search(length, memory) <= cells(LESSON, "extra")["extra"](length, memory)


NETS_OF = ("layers", "conv", "local-norm", "dense", "build", "three")
BLOCKS = (
    "layers",
    "conv",
    "blocks",
    "norms",
    "lean-norm",
    "writings-3",
    "resnet",
    "block-shapes",
    "resnet-2",
    "resnet-net",
)


def test_the_lean_norm_keeps_the_deviation_of_a_channel_with_a_large_mean():
    x = (30 + np.random.default_rng(0).normal(size=(4, 16, 16, 8))).astype(np.float16)
    norm = jax.jit(cells(FURTHER, "norms", "lean-norm")["lean_norm"])
    y = np.asarray(norm((np.ones(8, np.float16), np.zeros(8, np.float16)), x), np.float32)
    np.testing.assert_allclose(y.std((0, 1, 2)), 1, atol=0.01)


@pytest.mark.parametrize(("writing", "more"), [("after, plain", 100 / 3), ("before, plain", 100 * (1 - 4 / 17) / 3)])
def test_a_preactivation_block_does_not_run_its_last_convolution_again(writing, more):
    named = cells(FURTHER, *BLOCKS)
    (_, layer, *_), w = named["PARTS"][writing], named["block_shapes"](256, 64, "before" in writing)
    chains = (room.profile([f], [w], named["half"](16, 112, 112, 256), False) for f in (layer, jax.checkpoint(layer)))
    plain, again = (room.keep_all(1).cost(chain) for chain in chains)
    assert 100 * (again / plain - 1) == pytest.approx(more, abs=0.3)


@suggested_by(FURTHER)
def test_wider_layers_are_forgotten():
    again = []
    for changes in ({}, {"*small(64, 64, 64)": "*small(128, 128, 128)"}):
        chain = cells(FURTHER, *NETS_OF, "chain", changes=changes)["chain"]
        again.append(room.optimal_plan(chain, 0.75 * room.keep_all(len(chain.layers)).peak(chain)).forwards() - 1)
    assert again[1][2:5].sum() > again[0][2:5].sum()


@suggested_by(FURTHER)
def test_a_batch_of_one_saves_less():
    named = cells(FURTHER, *BLOCKS, "tried-on", changes={"half(16,": "half(1,"})
    assert named["tried_on"]("before, plain", 26)[0] < 60
