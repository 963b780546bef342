"""Flow graphs against programs whose wires are known; contexts, vectors, the network, the exercises."""

from __future__ import annotations

import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import programs  # tools/programs.py
import pytest
from cells import Cells
from jax import lax
from programs import floats

from dlscale import code_as_data as room
from dlscale.code_as_data import corpus, exercises


def make(statements, data=(), control=()):
    return room.Graph(tuple(statements), *(np.array(e, int).reshape(-1, 2) for e in (data, control)))


CHOICE = lambda x, y: lax.cond(x < 5.0, lambda: y * y, lambda: 2.0 * y) + 1.0  # noqa: E731  the lecture's example
SUM = lambda x: lax.scan(lambda s, v: (s + jnp.sin(v), s), 0.0, x)  # noqa: E731
DOUBLE = lambda a: lax.while_loop(lambda x: x < 9.0, lambda x: x * 2.0, a)  # noqa: E731
CHOICE_EDGES, SUM_EDGES = [[0, 1], [1, 2], [3, 5], [4, 5], [5, 6]], [[0, 1], [0, 2], [0, 3], [1, 2], [2, 0], [2, 3]]
FLOWS = [
    (CHOICE, (1.0, 2.0), "lt convert_element_type switch mul mul join add", CHOICE_EDGES, [[2, 3], [2, 4]]),
    (SUM, (floats(50),), "scan sin add end", SUM_EDGES, []),
    (DOUBLE, (1.0,), "while lt test mul end", [[0, 1], [0, 3], [0, 4], [1, 2], [3, 0]], [[2, 3], [2, 4]]),
    (lambda x: jax.checkpoint(jax.jit(jnp.sin))(x) * 2, (floats(3),), "sin mul", [[0, 1]], []),
]


@pytest.mark.parametrize("f, args, names, data_edges, control", FLOWS)
def test_choices_branch_loops_lead_back_and_calls_are_opened(f, args, names, data_edges, control):
    one = room.graph(f, *args)
    assert " ".join(text.partition(" ")[0] for text in one.statements) == names
    assert (one.data.tolist(), one.control.tolist()) == (data_edges, control)


def test_statements_have_no_names_sizes_or_constants():
    one, other = room.graph(lambda x: x * 3 + 1, floats(4)), room.graph(lambda y: y * 5 + 7, floats(9))
    assert one.statements == other.statements == ("mul float[n] (float[n], number)", "add float[n] (float[n], number)")
    avals = jnp.zeros((2, 2), int), floats(1, 2, 3, 4), jax.random.key(0)
    assert [*map(room.kind, avals)] == ["int[n,n]", "float[n,n,…]", "key"]
    solver = " ".join(room.graph(jnp.linalg.solve, floats(3, 3), floats(3)).statements)
    assert "custom_linear_solve" not in solver and solver.count("triangular_solve") == 2


ONE, WORDS = make("abcd", [(0, 3)], [(1, 2)]), room.Vocabulary((room.UNKNOWN, "a", "b", "c", "d"))
REFUSED = [
    (lambda: room.graph(lambda x: 1 if x > 0 else 0, 1.0), "cannot be traced.*TracerBoolConversionError.*`if`"),
    (lambda: room.graph(lambda x: x, 1.0), "no statements"),
    (lambda: WORDS.contexts([ONE], "graph"), "Unknown wires"),
    (lambda: room.padded([ONE], WORDS, length=3), "number of statements"),
]


@pytest.mark.parametrize("call, words", REFUSED)
def test_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_contexts_along_wires_and_text():
    assert WORDS.contexts([ONE]).tolist() == [[1, 4], [2, 3], [3, 2], [4, 1]]
    assert WORDS.contexts([ONE], "text").tolist() == [[1, 2], [2, 1], [2, 3], [3, 2], [3, 4], [4, 3]]
    assert room.Vocabulary.of([make("aab"), make("ab"), make("c")], at_least=2).words == (room.UNKNOWN, "a", "b")


def test_vectors_part_words_that_never_stand_together():
    rng = np.random.default_rng(0)
    found = rng.integers(10, size=(4000, 2)) + 10 * rng.integers(2, size=(4000, 1))  # 0 to 9, or 10 to 19
    found = np.concatenate([found, found[:, ::-1]])  # each pair both ways
    counts = room.counted(found, 20)
    for vectors in (room.skip_gram(found, 20, steps=100), room.unit(counts), room.unit(room.shortened(counts, 2))):
        near = vectors @ vectors.T
        assert near[:10, :10].mean() > near[:10, 10:].mean() + 0.5
    assert np.allclose(room.shortened(counts, 20) @ room.shortened(counts, 20).T, counts @ counts.T)
    assert np.allclose(room.counted(found, 20, 0.1), (counts - 0.1).clip(0)), "words of a group meet more often"


def test_hits_and_analogies_on_vectors_made_by_hand():
    vectors = np.array([[1, 0, 0.1], [1, 0, 0], [0, 1, 0.1], [0, 1, 0], [0, 0, 1.0]])
    groups = [("a", "b"), ("c", "e"), ("d", "z")]
    assert room.hits(vectors, list("abcde"), groups, among=1).tolist() == [True, True, False, False]
    words = room.Vocabulary((room.UNKNOWN, "add x", "add y", "mul x", "mul y", "sub x"))
    asked = room.analogies(words, [("add", "mul"), ("add", "sub"), ("add", "none")])
    assert asked.tolist() == [[1, 2, 3, 4], [2, 1, 4, 3]]
    table = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 1, 1], [0.5, 0.1, 0.2]])
    assert room.answered(table, asked).all() and not room.answered(table, asked, "b alone").any()


def test_the_record_is_what_the_functions_trace_to_and_a_damaged_one_is_refused(monkeypatch):
    record, chosen, sources = corpus.load("wirings"), range(0, 1440, 97), list(programs.wirings())
    for i, (source, one) in zip(chosen, programs.traced(sources[i] for i in chosen), strict=True):
        assert (record.names[i], record.recipes[i]) == (source.name, source.recipe)
        assert record.graphs[i].statements == one.statements and (record.graphs[i].flow == one.flow).all()
    assert all(corpus.vocabulary().encode(one).min() > 0 for one in record.graphs), "no statement is unknown"
    monkeypatch.setattr(corpus, "DIGEST", "of another file")
    with pytest.raises(ValueError, match="damaged"):
        corpus.load.__wrapped__("corpus")


def test_what_is_held_out_is_held_out():
    _, recipes, graphs = corpus.load("wirings")
    recipe_of, parts = dict(zip(map(id, graphs), recipes, strict=True)), corpus.split(1)
    pairs = {part: {recipe_of[id(g)] for g in own[0]} for part, own in parts.items() if part != "reordered"}
    used = {part: {name for pair in own for name in pair.split()} for part, own in pairs.items()}
    assert not pairs["train"] & pairs["known"] and used["known"] <= used["train"]
    assert not used["train"] & (used["new"] | used["validation"]) and not pairs["new"] & pairs["validation"]
    sizes = {part: len(labels) for part, (_, labels) in parts.items()}
    assert sizes["known"] / sizes["train"] == 0.25 and sizes["new"] / sizes["train"] == 1.0, "the claims' overlaps"


@pytest.mark.parametrize("wires", ["flow", "text", "none"])
def test_a_network_sees_its_wires_only_and_no_padding(wires):
    words, one = corpus.vocabulary(), corpus.load("wirings").graphs[0]
    table = room.unit(np.random.default_rng(0).normal(size=(len(words.words), 32)))
    params = room.initial(jax.random.key(0), 3)

    def read(g, length=20):
        return room.logits(params, table, room.padded([g], words, wires, length))

    other, rewired = room.reordered(one, np.random.default_rng(5)), make(one.statements, one.data[::-1][:, ::-1])
    links = [Counter((g.statements[a], g.statements[b]) for a, b in g.flow) for g in (one, other)]
    assert links[0] == links[1] and (other.flow[:, 0] < other.flow[:, 1]).all() and other.statements != one.statements
    assert np.allclose(read(one), read(other), atol=1e-4) == (wires != "text")
    assert np.allclose(read(one), read(rewired), atol=1e-4) == (wires != "flow")
    assert np.allclose(read(one), read(one, 17), atol=1e-4), "padding is not seen"


def by_maker(jaxpr, made=None):
    maker = {v: i for i, equation in enumerate(jaxpr.eqns) for v in equation.outvars[:made]}
    return [(maker[v], j) for j, equation in enumerate(jaxpr.eqns) for v in equation.invars if v in maker]


def in_runs(seen, labels):  # wrong where equal programs stand apart
    runs = itertools.groupby(zip(seen, labels, strict=True), lambda pair: pair[0])
    return sum(max(Counter(run).values()) for _, run in runs) / len(labels)


ANSWERS = [
    ("wires", by_maker, True),  # a list, a wire twice if it is used twice
    ("wires", lambda jaxpr: by_maker(jaxpr, 1), False),  # the first result only
    ("ceiling", lambda seen, labels: in_runs(*zip(*sorted(zip(seen, labels, strict=True)), strict=True)), True),
    ("ceiling", in_runs, False),
    ("words", lambda s, e: [f"{s[a]}>{s[b]}" for a, b in e.tolist()], True),
    ("words", lambda s, e: [f"{a}>{b}" for a, b in itertools.pairwise(s)], False),
]


@pytest.mark.parametrize("name, answer, right", ANSWERS)
def test_right_answers_are_accepted_and_naive_ones_refused(name, answer, right):
    assert getattr(exercises, name).judge(answer)[0] == right


def test_a_program_of_ones_own_is_drawn_and_may_fool_the_network():
    power = 'PROGRAMS = {\n    "power": (lambda x: lax.fori_loop(0, 3, lambda i, y: y * x, 1.0), (2.0,)),'
    cells = Cells("17_code_as_data", {"PROGRAMS = {": power})
    cells.run("code-setup", "code-three", "code-trace", "code-slide", "code-graphs", "code-own")
    assert cells["graphs"]["power"].statements[0].startswith("scan")
    positive = lambda x, y: jnp.sum(jnp.abs(jnp.cumsum(jnp.exp(x + 1))) + 2 * y)  # noqa: E731
    values = [float(f(np.ones(8), np.ones(8))) for f in [*[*cells["OWN"].values()][:5], positive]]
    assert np.ptp(values) < 1e-3, "they compute the same"
