"""Exercises: the engine, whatever an answer is, and those of the course with their reference solutions."""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import json
import math
import re
import symtable
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

import dlscale.__main__ as commands
from dlscale.course import grading
from dlscale.course.contents import paths
from dlscale.course.exercises import Exercise, compare, shorten

EACH = pytest.mark.parametrize("path", paths(commands.ROOT / "notebooks"), ids=lambda path: path.stem)


def names(code: str) -> tuple[set[str], set[str]]:
    """The names that code takes from outside of its functions, and those that it gives to the cells below."""
    table = symtable.symtable(code, "cell", "exec")
    scopes = [table]
    for scope in scopes:
        scopes += scope.get_children()
    used = {s.get_name() for scope in scopes for s in scope.get_symbols() if s.is_global() or scope is table}
    given = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    return used, given


@functools.cache
def settings() -> dict[str, tuple[str, str]]:
    """Of each exercise: what its notebook defines above, as far as a solution and its check use it, and its cell."""
    found = {}
    for path in paths(commands.ROOT / "notebooks"):
        above: list[str] = []
        for tag, _, source in grading.read_cells(path):
            if exercise := commands.exercises().get(tag):
                needed, (wanted, _) = [], names(f"{exercise.code}\n{grading.CHECK.search(source)[0]}")
                for statement in reversed(above):
                    used, given = names(statement)
                    if given & wanted:
                        needed.insert(0, statement)
                        wanted |= used
                found[tag] = "\n".join(needed), source
            above += map(ast.unparse, ast.parse(TransformerManager().transform_cell(source)).body)
    return found


def reference(exercise: Exercise) -> object:
    """Run the reference solution with what its notebook defines above, or its module, and return its answer."""
    namespace = {} if exercise.id in settings() else dict(vars(sys.modules[exercise.wrong.__module__]))
    exec(settings().get(exercise.id, ("", ""))[0], namespace)
    exec(exercise.code, namespace)
    return namespace[exercise.answer]


@pytest.mark.long
def test_each_solution_is_right_for_the_grader_as_it_is_printed(capsys, tmp_path):
    pristine, submitted = [], []
    for tag, (needed, blank) in settings().items():
        pristine += [grading.Cell(None, None, needed), grading.Cell(tag, None, blank)]
        commands.exercises()[tag].solution()
        submitted.append(grading.Cell(tag, None, capsys.readouterr().out))
    results = grading.grade_cells(submitted, pristine, tmp_path, commands.exercises())
    assert results.keys() == settings().keys()
    assert {tag: wrong for tag, wrong in results.items() if wrong} == {}


@pytest.mark.parametrize("exercise", commands.exercises().values(), ids=commands.exercises())
def test_an_exercise_of_the_course(exercise):
    room, _, name = exercise.id.partition("-")
    assert vars(importlib.import_module(f"dlscale.{room}.exercises"))[name] is exercise
    assert exercise.hints and all(exercise.hints) and exercise.right
    assert re.search(rf"\b{exercise.answer}\b", exercise.code)
    answer = reference(exercise)
    if "exercises.tried(" in settings().get(exercise.id, ("", ""))[1]:  # so its cell hands it in
        answer = sys.modules[exercise.wrong.__module__].tried(answer)
    right, line = exercise.judge(answer)
    assert right, line
    assert exercise.judge(...) == (False, "no answer yet")
    assert not callable(answer) or exercise.judge(lambda *args: ...) == (False, "no answer yet")
    for nonsense in NONSENSE.values():
        assert not exercise.judge(nonsense)[0]


@EACH
def test_an_exercise_is_asked_above_its_answer(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for question, answer in itertools.pairwise(cells):
        if any(tag.startswith("answer-") for tag in answer["metadata"].get("tags", [])):
            assert "xercise" in "".join(question["source"]), f"no question above {answer['id']}"


@pytest.fixture
def product():
    return Exercise(
        id="demo-product", answer="product", hints=["Add.", "Add again."],
        code="\nproduct = 6 * 7\n", wrong=_wrong_product, right="it is a product.",
    )  # fmt: skip


def _wrong_product(answer):
    return compare("The product", answer(6, 7) if callable(answer) else answer, 42)


def raising(*_):
    raise ZeroDivisionError("no")


def leaving(*_):
    sys.exit(0)


class Hostile(Exception):
    def __getattr__(self, name):
        raise self

    __str__ = __repr__ = __eq__ = __array__ = raising
    __hash__ = None


def hostile(*_):
    raise Hostile


CIRCLE = []
CIRCLE.append(CIRCLE)
NONSENSE = {
    "none": None, "text": "42", "text of a page": "x" * 10**6, "nan": math.nan, "infinity": math.inf, "complex": 42j,
    "list": [1, 2], "ragged": [[1], [1, 2]], "dict": {"a": 1}, "array": np.zeros((3, 3)), "object": object(),
    "large": 10**400, "empty": [], "type": Hostile, "hostile": Hostile(), "raises": raising, "leaves": leaving,
    "raises oddly": hostile, "no arguments": lambda: 1, "returns nan": lambda *a: math.nan, "circle": CIRCLE,
    "endless": lambda *a: (lambda f: f(f))(lambda f: f(f)), "warns": lambda *a: np.array(0.0) / 0,
}  # fmt: skip


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_told_in_one_line(product, name, capsys):
    assert product.check(NONSENSE[name]) is None
    out, err = capsys.readouterr()
    assert out.startswith("not yet: ") and out.count("\n") == 1 and len(out) < 320 and not err


def test_right_and_blank_answers(product, capsys):
    for answer in (42, 42.0, np.int64(42), np.float32(42), np.array(42), lambda a, b: a * b):
        assert product.check(answer) is None
    assert capsys.readouterr().out == "✓ right: it is a product.\n" * 6
    for answer in (..., [...], [1, (2, {"a": ...})], lambda *a: ..., lambda *a: [1, ...]):
        assert product.check(answer) is None
    assert capsys.readouterr().out == "no answer yet\n" * 5
    with pytest.raises(KeyboardInterrupt):
        product.check(lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))


def test_hints_come_in_turn_and_the_solution_is_right(product, capsys):
    for _ in range(3):
        product.hint()
    assert capsys.readouterr().out == "Hint 1 of 2: Add.\nHint 2 of 2: Add again.\nHint 1 of 2: Add.\n"
    product.solution()
    assert capsys.readouterr().out == "product = 6 * 7\n" and product.judge(reference(product))[0]


NUMBERS = st.floats(-1e6, 1e6).filter(lambda number: number == 0 or abs(number) > 1e-6)  # smaller ones round to nothing


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.floats(-1, 1))
def test_compare_keeps_the_tolerance(expected, error):
    expected = np.array(expected)
    scale = np.abs(expected).max()
    within = compare("x", expected + 0.9e-3 * error * scale, expected, 1e-3) is None
    beyond = compare("x", expected + np.copysign(1.1e-3, error) * scale, expected, 1e-3) is None
    assert within and (not beyond or scale == 0)


def test_compare_says_what_is_wrong():
    assert compare("It", 41, 42) == "It is not 41: that is too small."
    assert compare("It", 43, 42) == "It is not 43: that is too large."
    assert compare("It", [1, 2, 4], [1, 2, 3]) == "It differs in 1 of 3 entries, first at [2]."
    assert compare("It", [1, 2], [1, 2, 3]) == "It has 2 numbers, but should have 3."
    assert compare("It", [[1, 2]], [1, 2]) == "It has shape (1, 2), but should have (2,)."
    assert compare("It", [1, math.nan], [1, 2]) == "It is not finite."
    assert compare("It", "1", 1) == "It must be a number, not str."
    assert compare("It", True, 1) == "It must be a number, not bool."
    assert compare("It", None, [1.0]) == "It must be made of numbers, not NoneType."


@given(st.text(), st.integers(10, 400))
def test_shorten_gives_one_line_that_can_be_written(text, limit):
    line = shorten(text, limit)
    assert len(line) <= limit and len(line.splitlines()) <= 1
    assert line.encode("utf-8") or not text.split()
    assert shorten("\ud800x") == "?x"
