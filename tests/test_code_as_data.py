"""Flow graphs against programs whose wires are known; contexts, vectors, the network, the exercises."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import Cells
from jax import lax

from dlscale import code_as_data as room
from dlscale.code_as_data import corpus, exercises
from dlscale.code_as_data.corpus import floats
from dlscale.lab import data


def names(one):
    return [text.partition(" ")[0] for text in one.statements]


def edges(array):
    return set(map(tuple, array.tolist()))


def make(statements, data=(), control=()):
    return room.Graph(tuple(statements), *(np.array(e, int).reshape(-1, 2) for e in (data, control)))


def test_the_lectures_example():
    one = room.graph(lambda x, y: lax.cond(x < 5.0, lambda: y * y, lambda: 2.0 * y) + 1.0, 1.0, 2.0)
    assert names(one) == ["lt", "convert_element_type", "switch", "mul", "mul", "join", "add"]
    assert edges(one.data) == {(0, 1), (1, 2), (3, 5), (4, 5), (5, 6)}
    assert edges(one.control) == {(2, 3), (2, 4)}, "each way hangs on the choice"
    assert one.statements[4] == "mul float (float, float)" and one.statements[6] == "add float (float, number)"


def test_a_scan_is_in_the_graph_once_with_an_edge_back():
    short, long = (room.graph(lambda x: lax.scan(lambda s, v: (s + jnp.sin(v), s), 0.0, x), floats(n)) for n in (2, 50))
    assert short.statements == long.statements and edges(short.flow) == edges(long.flow)
    assert names(short) == ["scan", "sin", "add", "end"]
    assert edges(short.data) == {(0, 1), (0, 2), (1, 2), (2, 0), (2, 3), (0, 3)}


def test_a_while_loop_is_tested_before_each_turn():
    one = room.graph(lambda a: lax.while_loop(lambda x: x < 9.0, lambda x: x * 2.0, a), 1.0)
    assert names(one) == ["while", "lt", "test", "mul", "end"]
    assert edges(one.data) == {(0, 1), (1, 2), (0, 3), (3, 0), (0, 4)}
    assert edges(one.control) == {(2, 3), (2, 4)}, "the test decides on another turn, and on the end"


def test_calls_are_opened_and_do_not_show():
    plain = room.graph(lambda x: jnp.sin(x) * 2, floats(3))
    for wrap in (jax.jit, jax.checkpoint):
        one = room.graph(lambda x, wrap=wrap: wrap(jnp.sin)(x) * 2, floats(3))
        assert one.statements == plain.statements and edges(one.flow) == edges(plain.flow)
    solved = names(room.graph(jnp.linalg.solve, floats(3, 3), floats(3)))
    assert "custom_linear_solve" not in solved and solved.count("triangular_solve") == 2
    assert "custom_jvp_call" not in names(room.graph(jax.nn.relu, floats(3)))


def test_statements_have_no_names_sizes_or_constants():
    key = jax.random.key(0)
    one, other = room.graph(lambda x: x * 3 + 1, floats(4)), room.graph(lambda y: y * 5 + 7, floats(9))
    assert one.statements == other.statements == ("mul float[n] (float[n], number)", "add float[n] (float[n], number)")
    for aval, text in ((jnp.zeros((2, 2), int), "int[n,n]"), (floats(1, 2, 3, 4), "float[n,n,…]"), (key, "key")):
        assert room.kind(aval) == text


BRANCH = (lambda x: 1.0 if x > 0 else 0.0), r"cannot be traced \(TracerBoolConversionError.*`if` or `while`"
REFUSED = [BRANCH, (lambda x: x.no_such, "cannot be traced .AttributeError"), (lambda x: x, "no statements")]


@pytest.mark.parametrize("f, words", REFUSED)
def test_what_is_no_program(f, words):
    with pytest.raises(ValueError, match=words):
        room.graph(f, 1.0)


def test_contexts_along_wires_and_text():
    one = make("abcd", [(0, 3)], [(1, 2)])
    words = room.Vocabulary((room.UNKNOWN, "a", "b", "c", "d"))
    assert edges(words.contexts([one])) == {(1, 4), (4, 1), (2, 3), (3, 2)}
    assert edges(words.contexts([one], "text")) == {(1, 2), (2, 1), (2, 3), (3, 2), (3, 4), (4, 3)}
    assert (1, 3) in edges(words.contexts([one], "text", radius=2))
    assert room.Vocabulary.of([make("aab"), make("ab"), make("c")], at_least=2).words == (room.UNKNOWN, "a", "b")
    assert words.encode(make("dax")).tolist() == [4, 1, 0]
    for wires, radius, message in (("graph", 1, "Unknown wires"), ("flow", 0, "radius must be")):
        with pytest.raises(ValueError, match=message):
            words.contexts([one], wires, radius)


def test_skip_gram_learns_who_stands_together():
    """Words 0 to 9 stand with each other, so do 10 to 19: the groups must part, also in counts and cut to two."""
    rng = np.random.default_rng(0)
    found = np.stack([rng.integers(10, size=4000) for _ in range(2)], axis=1) + 10 * rng.integers(2, size=(4000, 1))
    found = np.concatenate([found, found[:, ::-1]])  # each pair both ways
    counts = room.counted(found, 20)
    for vectors in (
        room.skip_gram(found, 20, width=8, steps=300, batch=256, negatives=16),
        room.unit(counts),
        room.unit(room.shortened(counts, 2)),
    ):
        near = vectors @ vectors.T
        assert near[:10, :10].mean() > near[:10, 10:].mean() + 0.5
    assert np.allclose(room.shortened(counts, 20) @ room.shortened(counts, 20).T, counts @ counts.T)
    with pytest.raises(ValueError, match="no pairs"):
        room.skip_gram(np.zeros((0, 2), int), 5)


def test_hits_and_analogies_on_vectors_made_by_hand():
    vectors = np.array([[1, 0, 0.1], [1, 0, 0], [0, 1, 0.1], [0, 1, 0], [0, 0, 1.0]])
    groups = [("a", "b"), ("c", "e"), ("d", "z")]
    assert room.hits(vectors, list("abcde"), groups, among=1).tolist() == [True, True, False, False]
    words = room.Vocabulary((room.UNKNOWN, "add x", "add y", "mul x", "mul y", "sub x"))
    asked = room.analogies(words, [("add", "mul"), ("add", "sub")])
    assert asked.tolist() == [[1, 2, 3, 4], [2, 1, 4, 3]]
    table = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 1, 1], [0.5, 0.1, 0.2]])
    assert room.answered(table, asked).tolist() == [True, True]
    assert room.answered(table, asked, "b alone").tolist() == [False, False]
    assert len(room.analogies(words, [("add", "none")])) == 0


def test_the_record_is_listed_with_its_sum_and_a_damaged_one_refused(tmp_path, monkeypatch):
    content = corpus.path().read_bytes()
    assert hashlib.sha256(content).hexdigest() == corpus.DIGEST and len(content) < 1_000_000
    readme = (data.data_folder() / "README.md").read_text(encoding="utf-8")
    assert f"`results/{corpus.path().name}`" in readme and f"`{corpus.DIGEST}`" in readme
    monkeypatch.setattr(corpus, "path", lambda: tmp_path / "x.gz")
    (tmp_path / "x.gz").write_bytes(content[:-1])
    with pytest.raises(ValueError, match="damaged"):
        corpus.load.__wrapped__("corpus")


def test_the_record_is_what_the_functions_trace_to():
    record, chosen = corpus.load("wirings"), range(0, 1440, 97)
    sources = list(corpus.wirings())
    for i, (source, one) in zip(chosen, corpus.traced(sources[i] for i in chosen), strict=True):
        assert (record.names[i], record.recipes[i]) == (source.name, source.recipe)
        assert record.graphs[i].statements == one.statements and edges(record.graphs[i].flow) == edges(one.flow)


def test_the_wirings_of_a_couple_are_one_bag_of_known_statements():
    found = corpus.load("wirings")
    for i in range(0, len(found.graphs), 3):
        bags = [Counter(one.statements) for one in found.graphs[i : i + 3]]
        assert found.names[i : i + 3] == list(corpus.WIRINGS) and bags[0] == bags[1] == bags[2]
        assert len({one.flow.tobytes() + repr(one.statements).encode() for one in found.graphs[i : i + 3]}) == 3
    assert all(corpus.vocabulary().encode(one).min() > 0 for one in found.graphs)


def test_what_is_held_out_is_held_out():
    recipe_of = dict(zip(map(id, corpus.load("wirings").graphs), corpus.load("wirings").recipes, strict=True))
    parts = corpus.split(1)
    couples = {part: {recipe_of[id(g)] for g in own[0]} for part, own in parts.items() if part != "reordered"}
    told = {part: {name for couple in own for name in couple.split()} for part, own in couples.items()}
    assert not couples["train"] & couples["known"] and told["known"] <= told["train"]
    assert not told["train"] & (told["new"] | told["validation"]) and not couples["new"] & couples["validation"]
    sizes = {part: len(labels) for part, (_, labels) in parts.items()}
    assert sizes["known"] / sizes["train"] == 0.25 and sizes["new"] / sizes["train"] == 1.0, "the claims' overlaps"


@pytest.mark.parametrize("wires", ["flow", "text", "none"])
def test_a_network_sees_its_wires_only_and_no_padding(wires):
    words, one = corpus.vocabulary(), corpus.load("wirings").graphs[0]
    table = room.unit(np.random.default_rng(0).normal(size=(len(words.words), 32)))
    params = room.initial(jax.random.key(0), 3)
    read = lambda g, length=20: room.logits(params, table, room.padded([g], words, wires, length))  # noqa: E731
    other = room.reordered(one, np.random.default_rng(5))
    link = lambda g: Counter((g.statements[a], g.statements[b]) for a, b in g.flow)  # noqa: E731
    assert link(other) == link(one) and (other.flow[:, 0] < other.flow[:, 1]).all()
    rewired = make(one.statements, one.data[::-1][:, ::-1])
    assert other.statements != one.statements
    assert np.allclose(read(one), read(other), atol=1e-4) == (wires != "text")
    assert np.allclose(read(one), read(rewired), atol=1e-4) == (wires != "flow")
    assert np.allclose(read(one), read(one, 17), atol=1e-4), "padding is not seen"
    with pytest.raises(ValueError, match="number of statements"):
        read(one, 2)


def filled(exercise):
    scope = {"np": np, "Counter": Counter}
    exec(exercise.code, scope)
    return scope[exercise.answer]


@pytest.mark.parametrize("name", ["wires", "ceiling", "words"])
def test_a_solution_is_right(name):
    exercise = getattr(exercises, name)
    assert exercise.judge(filled(exercise))[0]


def test_other_right_answers_and_naive_ones():
    def by_maker(jaxpr):
        maker, found = {}, []
        for number, equation in enumerate(jaxpr.eqns):
            found += [(maker[v], number) for v in equation.invars if v in maker]
            maker |= dict.fromkeys(equation.outvars, number)
        return found

    assert exercises.wires.judge(by_maker)[0], "a list, a wire twice if it is used twice"
    assert not exercises.wires.judge(lambda jaxpr: [(i, i + 1) for i in range(len(jaxpr.eqns) - 1)])[0], "the text"
    assert not exercises.wires.judge(lambda jaxpr: {(j, i) for i, j in by_maker(jaxpr)})[0], "turned round"
    assert not exercises.wires.judge(lambda jaxpr: set())[0]
    assert not exercises.ceiling.judge(lambda seen, labels: max(Counter(labels).values()) / len(labels))[0]
    assert not exercises.ceiling.judge(lambda seen, labels: 1.0)[0]


def test_words_of_wires_are_accepted_and_words_without_refused():
    assert exercises.words.judge(lambda s, e: [f"{s[a]}>{s[b]}" for a, b in e.tolist()])[0], "a bag of edges"
    for naive in (
        lambda s, e: s,
        lambda s, e: [f"{a}>{b}" for a, b in itertools.pairwise(s)],
        lambda s, e: [f"{i}{w}" for i, w in enumerate(s)],
    ):
        assert not exercises.words.judge(naive)[0]
    assert exercises.told(lambda s, e: s) == pytest.approx(1 / 3)


def test_a_program_of_ones_own_is_drawn():
    power = 'PROGRAMS = {\n    "power": (lambda x: lax.fori_loop(0, 3, lambda i, y: y * x, 1.0), (2.0,)),'
    cells = Cells("17_code_as_data", {"PROGRAMS = {": power})
    cells.run("code-setup", "code-three", "code-trace", "code-slide", "code-graphs")
    assert "mul" in names(cells["graphs"]["power"]) and "scan" in names(cells["graphs"]["power"])


def test_one_may_fool_the_network_and_train_the_vectors_longer():
    cells = Cells("17_code_as_data", {"steps=1000": "steps=20"})
    cells.run("code-setup", "code-three", "code-loss", "code-skip-gram", "code-own")
    positive = lambda x, y: jnp.sum(jnp.abs(jnp.cumsum(jnp.exp(x + 1))) + 2 * y)  # noqa: E731
    values = {float(f(np.ones(8), np.ones(8))) for f in [*[*cells["OWN"].values()][:4], positive]}
    assert np.ptp([*values]) < 1e-3, "they compute the same"
    found, size = corpus.vocabulary().contexts(corpus.load("corpus").graphs[:100]), len(corpus.vocabulary().words)
    assert cells["skip_gram"](found, size, steps=30).shape == (size, 32)
