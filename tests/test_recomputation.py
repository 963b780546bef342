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
LAYERS = st.builds(lambda output, inner, *costs: Layer(output, output + inner, *costs), SIZES, SIZES, COSTS, COSTS)
CHAINS = st.builds(lambda size, layers: Chain(size, tuple(layers)), SIZES, st.lists(LAYERS, min_size=1, max_size=5))
EVERY, SLOTS = functools.partial(room.every, k=3), functools.partial(room.revolve, slots=2)


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
def test_every_step_of_a_plan_has_what_it_needs(make):
    """Played by hand: a step reads what is held or what the step before it made."""
    fresh, backwards = None, []
    for operation, layer, held, _ in make(7).steps(Chain.uniform(7)):
        assert layer in {0, fresh, *(i + 1 if what == "saved" else i for what, i in held)}, "its input"
        backwards += [layer] * (operation == "backward")
        assert operation != "backward" or ("saved", layer) in held
        fresh = layer + 1 if operation != "backward" else fresh
    assert backwards == [6, 5, 4, 3, 2, 1, 0]


@settings(max_examples=30)
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


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Plan((0, (2,), 1)), "each layer once"),
        (lambda: room.revolve(4, 0), "slots"),
        (lambda: room.optimal_plan(Chain.uniform(3), math.nan), "memory"),
        (lambda: room.apply(room.keep_all(3), [dense]), "but 1 functions"),
        (lambda: room.apply(room.keep_all(1), [dense])([], X), "but 0 parameters"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# Programs


def dense(w, x):
    return room.relu(x @ w)


def conv(w, x):
    return room.relu(models.conv2d(x, w))


def weights(*shape):
    drawn = np.random.default_rng(0).normal(size=shape)
    return (drawn / math.sqrt(math.prod(shape[:-1]) / 2)).astype(np.float32)


X = np.ones((4, 8), np.float32)
WIDTHS = (32, 96, 16, 64, 64, 24, 32)
NETS = {
    "dense": ([dense] * 6, [weights(a, b) for a, b in itertools.pairwise(WIDTHS)], weights(1024, 32)),
    "convolutional": ([conv] * 5, [weights(3, 3, 8, 8)] * 5, weights(8, 16, 16, 8)),
}


@pytest.mark.parametrize(
    "name, make",
    [("dense", room.keep_none), ("dense", "optimal"), ("dense", room.recursive), ("convolutional", EVERY)],
)
def test_prediction_program_and_machine_agree(name, make):
    layers, params, x = NETS[name]
    layers, params = [*layers, lambda _, x: (x**2).mean()], [*params, ()]
    chain = room.profile(layers, params, x)
    frontier = room.frontier(chain)
    plan = make(len(layers)) if callable(make) else frontier[len(frontier) // 2].plan
    f = room.apply(plan, layers)

    # memory: an array may take the place of one that is dead, and the convolution of models pads copies of its own
    largest = max(chain.size(position) for position in range(len(layers) + 1))
    taken = room.compiled_bytes(jax.grad(f), params, x)
    assert abs(taken - plan.peak(chain)) <= (3.5 if name == "convolutional" else 1) * largest
    held = next(step.held for step in plan.steps(chain) if step.operation == "backward")
    kept = sum(chain.layers[i].saved if what == "saved" else chain.size(i) for what, i in held)
    assert kept - largest - chain.layers[-1].output <= program.kept_bytes(f, params, x) <= kept, "at last 2 x, not x"

    # work: elementwise operations of the forward pass are not all counted
    unasked = 1.1 * chain.layers[0].forward  # the gradient of the input, which a profile of the layer alone has
    assert plan.cost(chain) - unasked <= program.flops(jax.value_and_grad(f), params, x) <= 1.01 * plan.cost(chain)

    # numbers: the same operations in the same order; only fusions, and with them roundings, may differ
    everything = room.apply(room.keep_all(len(layers)), layers)
    got, wanted = (room.jit(jax.value_and_grad(some))(params, x) for some in (f, everything))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=len(layers) * 2**-20 * float(np.abs(b).max()))


def test_relu_is_relu():
    x = np.array([-1, -0.0, 0, 0.5, 2], np.float32)
    (y, pull), (wanted, wanted_pull) = jax.vjp(room.relu, x), jax.vjp(jax.nn.relu, x)
    np.testing.assert_array_equal((y, *pull(x)), (wanted, *wanted_pull(x)))


# The exercises: what is right is accepted however it is written, what is naive is refused


def with_backward(backward, forward=lambda f, *args: (f(*args), args)):
    def forget(f):
        g = jax.custom_vjp(f)
        g.defvjp(functools.partial(forward, f), functools.partial(backward, f))
        return g

    return forget


def waiting(backward):
    return with_backward(lambda f, args, d: backward(f, *jax.lax.optimization_barrier((args, d))))


RIGHT_FORGET = waiting(lambda f, args, d: jax.grad(lambda *args: jnp.vdot(f(*args), d), (0, 1))(*args))
WRONG_FORGETS = {
    "the library's, hidden": lambda f: jax.jit(jax.checkpoint(lambda *args: f(*args))),
    "nothing forgotten": lambda f: f,
    "a saved pullback": with_backward(lambda f, pull, d: pull(d), jax.vjp),
    "d ignored": waiting(lambda f, args, d: jax.vjp(f, *args)[1](jnp.ones_like(d))),
    "no barrier": exercises.without_barrier,
    "barrier without d": with_backward(lambda f, args, d: jax.vjp(f, *jax.lax.optimization_barrier(args))[1](d)),
    "blank": lambda f: ...,
    "blank inside": lambda f: lambda *args: ...,
}


@pytest.mark.parametrize(
    ("name", "answer", "right"),
    [
        ("forget", exercises.tried(RIGHT_FORGET), True),
        *(pytest.param("forget", exercises.tried(f), False, id=name) for name, f in WRONG_FORGETS.items()),
        ("best_k", lambda n: round(math.sqrt(n)), True),
        ("best_k", lambda n: math.ceil(math.sqrt(n)), False),
        ("best_k", math.isqrt, False),
        ("beat", [[0, 1, 2, 3, 4], [5, 6, 7, 8], 9, 10, 11], True),
        ("beat", ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9), 10, 11), True),
        ("beat", (((0, 1, 2), 3, 4, 5), (6, 7, 8), 9, 10, 11), False),
        ("beat", tuple(range(12)), False),
    ],
)
def test_answers(name, answer, right):
    judged, line = vars(exercises)[name].judge(answer)
    assert judged is right, line


# What the notebooks compute and suggest

LESSON, FURTHER = "07_recomputation", "further/07_recomputation_further"


def cells(notebook, *identities, changes=None):
    start = "recomputation-further-" if notebook == FURTHER else "recomputation-"
    named = Cells(notebook, changes)
    named.run(*(start + identity for identity in ("setup", *identities)))
    return named


def test_without_d_the_barrier_does_not_hold_the_second_run_back():
    right = "args, d = jax.lax.optimization_barrier((args, d))"
    code = exercises.forget.code.replace(right, "args = jax.lax.optimization_barrier(args)")
    used = ("layer", "measured", "in-groups", "same", "forget-answer", "arrays")
    named = cells(LESSON, *used, changes={"def forget(f):\n    return ...": code})
    assert named["arrays"](named["in_groups"](3, named["forget"])) == pytest.approx(16, abs=0.1)


def test_what_the_lesson_suggests_to_try():
    assert room.optimal_plan(Chain.uniform(12), 6).forwards().sum() - 12 > 9
    named, rule = cells(LESSON, "extra", "free"), room.every(100, 10)
    assert rule.peak(Chain.uniform(100)) == 21
    assert named["runs"](100, 21, False) - 100 < named["extra"](100, 21) < rule.forwards().sum() - 100


@suggested_by(FURTHER)
def test_wider_layers_are_forgotten():
    again = []
    for changes in ({}, {"*small(64, 64, 64)": "*small(128, 128, 128)"}):
        chain = cells(FURTHER, "layers", "conv", "dense", "build", "three", "chain", changes=changes)["chain"]
        again.append(room.optimal_plan(chain, 0.75 * room.keep_all(len(chain.layers)).peak(chain)).forwards() - 1)
    assert again[1][2:5].sum() > again[0][2:5].sum()


@suggested_by(FURTHER)
def test_a_batch_of_one_saves_less_and_scores_cost_memory():
    used = ("layers", "conv", "blocks", "norms", "lean-norm", "writings-3", "resnet", "block-shapes", "resnet-2")
    used += ("resnet-net", "tried-on", "deep", "block", "policies", "kept-and-again")
    named = cells(FURTHER, *used, changes={"half(16,": "half(1,"})
    assert named["tried_on"]("before, plain", 26)[0] < 60
    by_name, tokens = jax.checkpoint_policies.save_only_these_names, 1024
    less, more = (named["kept_and_again"](by_name("attention", "hidden", *also), tokens) for also in ((), ("scores",)))
    assert more[0] - less[0] == pytest.approx(6 * 4 * 8 * 4 * tokens**2 / 1e6), "six blocks of scores"
    assert more[1] < less[1]
