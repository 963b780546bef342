"""Flow graphs against programs whose wires are known; contexts, vectors, the record of programs, the exercises."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells import Cells
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dlscale import code_as_data as room
from dlscale.code_as_data import corpus, exercises, experiment
from dlscale.code_as_data.corpus import floats, ints
from dlscale.course import records
from dlscale.lab import data


def names(one):
    return [text.partition(" ")[0] for text in one.statements]


def edges(array):
    return set(map(tuple, array.tolist()))


def make(statements, data=(), control=()):
    return room.Graph(tuple(statements), *(np.array(e, int).reshape(-1, 2) for e in (data, control)))


# Graphs


def test_the_lectures_example():
    one = room.graph(lambda x, y: lax.cond(x < 5.0, lambda: y * y, lambda: 2.0 * y) + 1.0, 1.0, 2.0)
    assert names(one) == ["lt", "convert_element_type", "switch", "mul", "mul", "join", "add"]
    assert edges(one.data) == {(0, 1), (1, 2), (3, 5), (4, 5), (5, 6)}
    assert edges(one.control) == {(2, 3), (2, 4)}, "each way hangs on the choice"
    assert one.statements[4] == "mul float (float, float)" and one.statements[6] == "add float (float, number)"


def test_a_way_that_computes_nothing_still_hangs_on_the_choice():
    one = room.graph(lambda x: lax.cond(x < 0, lambda x: -x, lambda x: x, x), 1.0)
    assert names(one)[2:] == ["switch", "neg", "join"] and (3, 4) in edges(one.data)
    nothing = room.graph(lambda x, y: lax.cond(x < 0, lambda: x, lambda: y), 1.0, 2.0)
    assert (2, 3) in edges(nothing.control), "no data come from inside, so the choice itself leads to the join"


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
    one, other = room.graph(lambda x: x * 3 + 1, floats(4)), room.graph(lambda y: y * 5 + 7, floats(9))
    assert one.statements == other.statements == ("mul float[n] (float[n], number)", "add float[n] (float[n], number)")
    assert room.graph(lambda x: x * 3, ints(4)).statements == ("mul int[n] (int[n], number)",)
    kinds = [
        (floats(), "float"),
        (ints(2, 2), "int[n,n]"),
        (floats(1, 2, 3, 4), "float[n,n,…]"),
        (jax.random.key(0), "key"),
    ]
    for aval, text in kinds:
        assert room.kind(aval) == text


@pytest.mark.parametrize(
    "f, args, words",
    [
        (lambda x: 1.0 if x > 0 else 0.0, (1.0,), r"cannot be traced \(TracerBoolConversionError.*`if` or `while`"),
        (lambda x: x.no_such, (1.0,), "cannot be traced .AttributeError"),
        (lambda x, y: x @ y, (np.ones(3), np.ones(4)), "cannot be traced"),
        (lambda x: x, (1.0,), "no statements"),
        (lambda x: 3.0, (1.0,), "no statements"),
    ],
)
def test_what_is_no_program(f, args, words):
    with pytest.raises(ValueError, match=words):
        room.graph(f, *args)


def test_the_graph_by_hand_is_the_librarys_where_there_are_no_choices_or_loops():
    cells = Cells("17_code_as_data", {})
    cells.run("code-imports", "code-straight")
    square = lambda x: x * x + 3 * x  # noqa: E731
    for f, args in ((square, (1.0,)), (lambda x, y: jnp.exp(x @ y) / (x @ y), (np.ones(3), np.ones(3)))):
        statements, links = cells["straight"](f, *args)
        one = room.graph(f, *args)
        assert statements == names(one) and set(links) == edges(one.data)


# Contexts and words


@settings(max_examples=40)
@given(count=st.integers(2, 9), radius=st.integers(1, 4), seed=st.integers(0, 999))
def test_reach_is_the_shortest_way(count, radius, seed):
    ends = np.random.default_rng(seed).integers(count, size=(seed % 12, 2))
    away = np.full((count, count), np.inf)
    np.fill_diagonal(away, 0)
    for a, b in ends:
        away[a, b], away[b, a] = min(away[a, b], 1), min(away[b, a], 1)
    for k in range(count):
        away = np.minimum(away, away[:, k : k + 1] + away[k])
    assert np.array_equal(room.reach(ends, count, radius), away <= radius)


def test_pairs_of_both_contexts():
    one = make("abcd", [(0, 3)], [(1, 2)])
    words = room.Vocabulary((room.UNKNOWN, "a", "b", "c", "d"))
    assert edges(room.pairs([one], words, "flow", 1)) == {(1, 4), (4, 1), (2, 3), (3, 2)}
    assert edges(room.pairs([one], words, "sequence", 1)) == {(1, 2), (2, 1), (2, 3), (3, 2), (3, 4), (4, 3)}
    for context, radius, message in (("graph", 1, "Unknown context"), ("flow", 0, "radius must be")):
        with pytest.raises(ValueError, match=message):
            room.pairs([one], words, context, radius)


def test_rare_statements_are_unknown():
    programs = [make("aab"), make("ab"), make("c")]
    words = room.Vocabulary.of(programs, at_least=2)
    assert words.words == (room.UNKNOWN, "a", "b")
    assert words.encode(make("abcz")).tolist() == [1, 2, 0, 0]
    with pytest.raises(ValueError, match="No statement occurs 9 times"):
        room.Vocabulary.of(programs, at_least=9)


def test_skip_gram_learns_who_stands_together():
    """Words 0 to 9 stand with each other, so do 10 to 19: the groups must part."""
    rng = np.random.default_rng(0)
    group = rng.integers(2, size=4000)
    found = np.stack([rng.integers(10, size=4000) + 10 * group for _ in range(2)], axis=1)
    vectors = room.unit(room.skip_gram(found, 20, width=8, steps=300, batch=256, negatives=16))
    near = vectors @ vectors.T
    assert near[:10, :10].mean() > near[:10, 10:].mean() + 0.5
    with pytest.raises(ValueError, match="no pairs"):
        room.skip_gram(np.zeros((0, 2), int), 5)


def test_the_loss_is_that_of_its_formula():
    rng = np.random.default_rng(1)
    both, rows, drawn = rng.normal(size=(2, 7, 3)), rng.integers(7, size=(5, 2)), rng.integers(7, size=4)
    log = lambda x: -np.log1p(np.exp(-x))  # noqa: E731
    wanted = np.mean(
        [-log(both[0][i] @ both[1][j]) - 2 * np.mean([log(-both[0][i] @ both[1][n]) for n in drawn]) for i, j in rows]
    )
    assert room.skip_gram_loss(both, rows, drawn, 2.0) == pytest.approx(wanted, rel=1e-5)


def test_hits_and_analogies_on_vectors_made_by_hand():
    vectors = np.array([[1, 0, 0.1], [1, 0, 0], [0, 1, 0.1], [0, 1, 0], [0, 0, 1.0]])
    assert room.hits(vectors, list("abcde"), [("a", "b"), ("c", "e"), ("d", "z")], among=1).tolist() == [
        True,
        True,
        False,
        False,
    ]
    words = room.Vocabulary((room.UNKNOWN, "add x", "add y", "mul x", "mul y", "sub x"))
    asked = room.analogies(words, [("add", "mul"), ("add", "sub")])
    assert asked == [room.Analogy(1, 2, 3, 4), room.Analogy(2, 1, 4, 3)]
    table = np.array([[0, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 1, 1], [-0.5, 0.1, 1.0]])
    assert room.answered(table, asked).tolist() == [True, True]
    assert room.answered(table, asked, "c").tolist() == [False, True], "the first one's c is nearer to another one"


@settings(max_examples=30)
@given(seed=st.integers(0, 999))
def test_controls_change_wires_or_order_only(seed):
    rng = np.random.default_rng(seed)
    one = corpus.load("families").graphs[seed % 576]
    other = room.reordered(one, rng)
    assert Counter(other.statements) == Counter(one.statements)
    link = lambda g: Counter((g.statements[a], g.statements[b]) for a, b in g.flow)  # noqa: E731
    assert link(other) == link(one), "the same wires"
    assert (other.flow[:, 0] < other.flow[:, 1]).sum() >= (one.flow[:, 0] < one.flow[:, 1]).sum()
    redrawn = room.rewired(one, rng)
    assert redrawn.statements == one.statements
    assert (
        len(redrawn.flow) == len(one.flow) * (len(one.statements) > 1)
        and (redrawn.flow[:, 0] < redrawn.flow[:, 1]).all()
    )


# The record


def test_the_record_is_listed_with_its_sum_and_a_damaged_one_refused(tmp_path, monkeypatch):
    content = corpus.path().read_bytes()
    assert hashlib.sha256(content).hexdigest() == corpus.DIGEST and len(content) < 1_000_000
    assert f"`results/{corpus.path().name}`" in (
        readme := (data.data_folder() / "README.md").read_text(encoding="utf-8")
    )
    assert f"`{corpus.DIGEST}`" in readme
    monkeypatch.setattr(corpus, "path", lambda: tmp_path / "x.npz")
    (tmp_path / "x.npz").write_bytes(content[:-1])
    with pytest.raises(ValueError, match="damaged"):
        corpus.load.__wrapped__("corpus")


def test_the_record_is_what_the_functions_trace_to():
    for part, sources in (("families", corpus.families), ("wirings", corpus.wirings)):
        record = corpus.load(part)
        for i, (source, one) in enumerate(corpus.traced(list(sources())[::97])):
            assert (record.names[97 * i], record.recipes[97 * i]) == (source.name, source.recipe)
            assert record.graphs[97 * i].statements == one.statements and edges(record.graphs[97 * i].flow) == edges(
                one.flow
            )


@pytest.mark.parametrize("family", corpus.FAMILIES)
def test_all_recipes_of_a_family_compute_the_same(family):
    shapes, recipes = corpus.FAMILIES[family]
    args = experiment.examples(corpus.Source(family, "", None, shapes(8)))
    if family == "solve":
        args[0] = 0.2 * args[0] + np.eye(8, dtype=np.float32)  # so that a few turns of an iteration do
    if family == "eigenvalue":
        args[0] = args[0] + 9 * np.outer(np.ones(8), np.ones(8)).astype(np.float32) / 8
    results = [np.asarray(jax.jit(f)(*args)) for f in recipes.values()]
    for recipe, result in zip(recipes, results, strict=True):
        np.testing.assert_allclose(result, results[0], rtol=2e-3, atol=2e-3, err_msg=recipe)


def test_the_wirings_of_a_couple_are_one_bag():
    found = corpus.load("wirings")
    for i in range(0, len(found.graphs), 3):
        bags = [Counter(one.statements) for one in found.graphs[i : i + 3]]
        assert found.names[i : i + 3] == list(corpus.WIRINGS) and bags[0] == bags[1] == bags[2]
        assert len({one.flow.tobytes() + repr(one.statements).encode() for one in found.graphs[i : i + 3]}) == 3


def test_what_is_held_out_is_held_out():
    recipe_of = {
        id(g): r
        for part in ("families", "wirings")
        for g, r in zip(corpus.load(part).graphs, corpus.load(part).recipes, strict=True)
    }
    parts = experiment.family_parts(1)
    used = {part: {(recipe_of[id(g)], y) for g, y in zip(*own, strict=True)} for part, own in parts.items()}
    assert not used["train"] & used["test"] and not used["validation"] & (used["train"] | used["test"])
    assert [len(own) for own in used.values()] == [36, 12, 24]
    parts = experiment.wiring_parts(1)
    couples = {part: {recipe_of[id(g)] for g in own[0]} for part, own in parts.items() if part != "reordered"}
    told = {part: {name for couple in own for name in couple.split()} for part, own in couples.items()}
    assert not couples["train"] & couples["seen"] and told["seen"] <= told["train"]
    assert not told["train"] & (told["test"] | told["validation"]) and not couples["test"] & couples["validation"]


init = jax.jit(experiment.init, static_argnums=(0, 2, 3, 4))  # op by op each one would be compiled
logits = jax.jit(experiment.logits, static_argnums=0)


def seen(network, params, table, one, length=16):
    return logits(network, params, jnp.asarray(table), experiment.padded([one], length))


def test_best_radii_lie_inside_the_grid():
    record = records.read(experiment.VECTORS.id)
    for context in experiment.CONTEXTS:
        mean = [record.values("chosen_by", context=context, radius=r, programs="all").mean() for r in experiment.RADII]
        assert len(mean) == 6 and 0 < int(np.argmax(mean)) < 5


def test_wires_alone_show_no_statement(monkeypatch):
    read = []
    monkeypatch.setattr(experiment, "_train", lambda *given: read.append(given) or ({"validation": [1.0]}, None, None))
    assert experiment.bare_trial("any", 0.01, 0) == {"validation": 100.0}
    parts = read[0][-1]
    whole = experiment.padded(experiment.wiring_parts(0)["test"][0], experiment.LONGEST["wirings"])
    batch = parts["test"][0]
    assert not batch.statements.any() and whole.statements.any()
    assert np.array_equal(batch.there, whole.there) and np.array_equal(batch.edges, whole.edges)


def test_networks_see_what_they_should():
    """A bag no order, a net along the flow no order either but wires; padding nothing."""
    table = experiment.vectors("untrained", 0)
    one = corpus.load("wirings").graphs[0]
    other = room.reordered(one, np.random.default_rng(5))
    wired = make(one.statements, one.data[::-1][:, ::-1])
    key = jax.random.key(0)
    for network, order, wires in (
        ("bag", True, True),
        ("graph", True, False),
        ("recurrent", False, True),
    ):
        params = init(network, key, 32, len(table), 3)
        look = functools.partial(seen, network, params, table)
        assert other.statements != one.statements
        assert np.allclose(look(one), look(other), atol=1e-4) == order, network
        assert np.allclose(look(one), look(wired), atol=1e-4) == wires, network
    assert np.allclose(look(one), look(one, 20), atol=1e-4), "padding is not seen"


# Exercises


def filled(exercise):
    scope = {"np": np, "Counter": Counter}
    exec(exercise.code, scope)
    return scope[exercise.answer]


@pytest.mark.parametrize("name", ["contexts", "ceiling", "words"])
def test_a_solution_is_right(name):
    exercise = getattr(exercises, name)
    assert exercise.judge(filled(exercise))[0]


def test_other_right_answers_and_naive_ones():
    def by_powers(edges, count, radius):
        near = room.reach(edges, count, radius)
        return [pair for pair in np.argwhere(near) if pair[0] != pair[1]]

    def forward_only(edges, count, radius):
        near = np.eye(count)
        near[edges[:, 0], edges[:, 1]] = 1
        return [(i, j) for i, j in np.argwhere(np.linalg.matrix_power(near, radius) > 0) if i != j]

    assert exercises.contexts.judge(by_powers)[0]
    assert not exercises.contexts.judge(forward_only)[0]
    assert not exercises.contexts.judge(lambda edges, count, radius: edges)[0], "one edge apart only"
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


# What the notebook suggests at its end


def test_a_program_of_ones_own_is_drawn():
    power = 'SMALL = {\n    "power": (lambda x: lax.fori_loop(0, 3, lambda i, y: y * x, 1.0), (2.0,)),'
    cells = Cells("17_code_as_data", {"SMALL = {": power})
    cells.run("code-imports", "code-small")
    assert "mul" in names(cells["GRAPHS"]["power"]) and "scan" in names(cells["GRAPHS"]["power"])


def test_what_to_try_next_names_what_the_notebook_has():
    cells = Cells("17_code_as_data").sources
    asked = set(re.findall(r"\b[A-Z][A-Z_]+\b", " ".join(re.findall(r"`([^`]*)`", cells["code-next"])))) - {"GROUPS"}
    made = "\n".join(source for name, source in cells.items() if name != "code-next")
    assert "ALL_BY_TYPES" in asked
    assert not [
        name for name in asked if not re.search(rf"^(\w+, )*{name}(, \w+)* = |^def {name}|\b{name}:", made, re.M)
    ]


def test_contexts_of_one_edge():
    words, programs = experiment.vocabulary(), corpus.load("corpus").graphs[:300]
    vectors = room.skip_gram(room.pairs(programs, words, "flow", 1), len(words.words), steps=30, batch=64)
    found = room.hits(room.of_instructions(vectors, words), list(words.instructions), experiment.GROUPS)
    assert len(found) > 40 and 0 <= found.mean() <= 1


def test_the_network_reads_another_function():
    change = {"return 1 / jnp.exp(x[None] - x[:, None]).sum(1)": "return jnp.sort(jnp.abs(x))[::-1]"}
    cells = Cells("17_code_as_data", change)
    words, table = experiment.vocabulary(), experiment.vectors("untrained", 0)
    network = init("graph", jax.random.key(0), 32, len(table), len(corpus.FAMILIES))
    cells.data |= {
        "WORDS": words,
        "TRAINED": {"flow": table},
        "network": network,
        "TOLD": corpus.load("families"),
        "SEED": 0,
        "measured": {"test": 0.0},
    }
    cells.run("code-imports", "code-own", "code-own-near")
    assert "sort" in names(cells["MINE"])
    assert experiment.read("families", network, table, cells["MINE"]).sum() == pytest.approx(1, abs=1e-4)
