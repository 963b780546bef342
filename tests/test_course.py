"""Claims, exercises and the map, and the files that they are read from."""

from __future__ import annotations

import base64
import importlib
import itertools
import json
import math
import pkgutil
import re
import subprocess
import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.formatters import DisplayFormatter

import dlscale.course.exercises
from dlscale import course
from dlscale.course.exercises import Exercise, compare
from dlscale.lab.intervals import Interval

NOTEBOOKS = course.ROOT / "notebooks"
STORED = sorted(NOTEBOOKS.glob("*.ipynb"))
RULES = ("above", "below", "within")

# The files


def test_every_claim_is_complete():
    keys = {"notebook", "statement", "source", "source_figure", "measure", "unit", "rule", "threshold", "seeds"}
    files = {book.file for book in course.contents()}
    for identity, entry in course._read("claims.toml").items():
        assert set(entry) - {"of"} == keys, identity
        assert entry["rule"] in RULES and entry["seeds"] >= 5 and math.isfinite(entry["threshold"]), identity
        assert f"{entry['notebook']}.ipynb" in files, identity
        assert identity.partition("-")[0] in entry["notebook"], identity
        assert all(entry[key].strip() for key in keys - {"threshold", "seeds"}), identity
        if entry["rule"] == "within":
            assert entry["threshold"] > 0, identity


def test_contents_list_the_course_in_order():
    books = course.contents()
    assert [int(book.file[:2]) for book in books] == list(range(18))
    for book in books:
        assert book.title and book.question.endswith("?") and book.lecture, book.file
        assert (book.minutes is not None and book.seconds is not None) == book.available, book.file


EACH = pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)


@EACH
def test_contents_agree_with_the_notebook(path):
    opening = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    (book,) = (book for book in course.contents() if book.file == path.name)
    assert book.available and opening.startswith(f"# {book.title}\n")
    assert re.search(rf"\b{book.minutes} minutes\b.*\b{book.seconds} seconds\b", opening, re.DOTALL)


@EACH
def test_questions_stand_above_the_answers(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    for question, answer in itertools.pairwise(cells):
        for tag in answer["metadata"].get("tags", []):
            if tag.startswith("answer-"):
                exercise = course.exercise(tag.removeprefix("answer-"))
                assert exercise.question in "".join(question["source"]), f"two texts for the question of {exercise.id}"


def test_course_map_links_what_is_available():
    lines = course.course_map("notebooks/").splitlines()
    assert len(lines) == 2 + len(course.contents()) and len({line.count("|") for line in lines}) == 1
    for book, line in zip(course.contents(), lines[2:], strict=True):
        assert (f"](notebooks/{book.file})" in line) == book.available
        assert ("in preparation" in line) != book.available
    assert course.course_map()._repr_markdown_().count("](01_sgd.ipynb)") == 1


# Claims


@pytest.fixture
def claims(monkeypatch):
    """Three small claims, one a rule, in place of the course's; none made yet."""
    entry = {"notebook": "01_sgd", "statement": "A | B <is> & true.", "source": "S 2018", "source_figure": "7 points"}
    entry |= {"measure": "a minus b", "unit": "points", "threshold": 1.0, "seeds": 5}
    table = {f"sgd-{rule}": entry | {"rule": rule} for rule in RULES}
    monkeypatch.setattr(course, "_read", lambda name: table)
    monkeypatch.setattr(course, "_made", {})


CASES = [
    ("above", 1.5, 3, "shows"), ("above", 0.5, 3, "weak"), ("above", -1, 2, "not at this scale"),
    ("above", 1, 2, "weak"),
    ("below", -2, 0.5, "shows"), ("below", -2, 3, "weak"), ("below", 1.5, 3, "not at this scale"),
    ("within", -1, 1, "shows"), ("within", -1.5, 0.5, "weak"), ("within", 1.5, 3, "not at this scale"),
    ("within", -4, 1, "not at this scale"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "low", "high", "verdict"), CASES)
def test_the_rules(rule, low, high, verdict):
    assert course.decide(Interval((low + high) / 2, low, high), rule, 1.0) == verdict


NUMBERS = st.floats(-100, 100)


@given(NUMBERS, st.floats(0, 50), NUMBERS)
def test_below_mirrors_above_and_within_mirrors_itself(mean, half, threshold):
    measured, mirrored = Interval(mean, mean - half, mean + half), Interval(-mean, -mean - half, -mean + half)
    assert course.decide(measured, "above", threshold) == course.decide(mirrored, "below", -threshold)
    assert course.decide(measured, "within", threshold) == course.decide(mirrored, "within", threshold)


@given(NUMBERS, st.floats(0, 50), st.floats(0, 50), NUMBERS, st.sampled_from(RULES))
def test_a_wider_interval_never_gives_a_better_verdict(mean, half, more, threshold, rule):
    order = list(course.VERDICTS)
    narrow, wide = (Interval(mean, mean - h, mean + h) for h in (half, half + more))
    assert order.index(course.decide(narrow, rule, threshold)) <= order.index(course.decide(wide, rule, threshold))


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match="Did you mean 'above'"):
        course.decide(Interval(0, 0, 0), "abov", 0)


def test_a_card_carries_everything(claims):
    made = course.claim("sgd-above", [2, 3, 4, 3, 3])
    assert made.verdict == "shows" and made.interval.mean == 3 and made.id == "sgd-above"
    bundle, _ = DisplayFormatter().format(made)  # as a notebook shows it
    assert set(bundle) == {"text/html", "text/plain", course.CLAIM_TYPE}
    for text in ("S 2018", "7 points", "a minus b", "3 [2.12, 3.88] points, 5 seeds", "● shows"):
        assert text in bundle["text/html"] and text in bundle["text/plain"], text
    assert "A | B &lt;is&gt; &amp; true." in bundle["text/html"] and "A | B <is> & true." in bundle["text/plain"]
    about = json.loads(json.dumps(bundle[course.CLAIM_TYPE]))
    assert about.pop("mean") == 3 and about.pop("low") == pytest.approx(2.122, abs=1e-3)
    assert about.pop("high") == pytest.approx(3.878, abs=1e-3)
    assert about == {"id": "sgd-above", "unit": "points", "seeds": 5, "verdict": "shows"}


def test_tables_of_the_claims_made(claims):
    assert course.verdicts() == ""
    course.claim("sgd-within", np.zeros(5))
    course.claim("sgd-above", [-9, 9, 9, 9, 9])
    course.claim("sgd-below", np.full(5, 2.0))
    course.claim("sgd-within", np.full(5, 3.0))  # made again: it keeps its place
    verdicts = course.verdicts()
    assert repr(verdicts) == "sgd-within: not at this scale\nsgd-above: weak\nsgd-below: not at this scale"
    assert not hasattr(verdicts, "_repr_markdown_") and not hasattr(verdicts, "_repr_html_")
    rows = course.claims_table().splitlines()
    assert len(rows) == 5 and "A \\| B" in rows[2] and "3 [3, 3] points, 5 seeds" in rows[2] and "weak" in rows[3]


def test_bad_samples_are_refused(claims):
    with pytest.raises(ValueError, match="Did you mean 'sgd-above'"):
        course.claim("sgd-abov", np.zeros(5))
    for samples in (np.zeros(4), np.zeros((5, 1)), 3.0):
        with pytest.raises(ValueError, match=r"needs 5 samples, one number for each seed, not an array of shape"):
            course.claim("sgd-above", samples)
    with pytest.raises(ValueError, match=r"2 of the 5 samples.*counts: .*do not drop"):
        course.claim("sgd-above", [1, math.nan, 2, math.inf, 3])
    assert course.verdicts() == ""


def test_summary_is_a_list():
    assert course.summary("one", "two")._repr_markdown_() == "- one\n- two"


# The README


@pytest.fixture
def page(claims, monkeypatch, tmp_path):
    monkeypatch.setattr(course, "contents", lambda: [course.Notebook("01_sgd.ipynb", "T", "Q?", "L", True, 5, 6)])
    card = course.claim("sgd-above", [2, 3, 4, 3, 3])._repr_mimebundle_()
    cells = [
        {"cell_type": "markdown", "source": "", "metadata": {}},
        {"cell_type": "code", "source": "", "metadata": {}, "outputs": [{"output_type": "stream", "text": ""}]},
        {
            "cell_type": "code",
            "source": "",
            "metadata": {},
            "outputs": [
                {"output_type": "display_data", "data": {"image/png": base64.b64encode(b"an early picture").decode()}},
                {"output_type": "execute_result", "data": card},
                {"output_type": "display_data", "data": {"image/png": base64.b64encode(b"the last picture").decode()}},
            ],
        },
    ]
    (tmp_path / "01_sgd.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    page = tmp_path / "README.md"
    page.write_text(
        "# é\n<!-- claims:begin -->\nold\n<!-- claims:end -->\n<!-- map:begin --><!-- map:end -->\nend", "utf-8"
    )
    return page


def test_the_readme_is_renewed(page, capsys):
    options = ["readme", f"--page={page}", f"--notebooks={page.parent}"]
    assert course.main([*options, "--check"]) == 1 and "python -m dlscale readme" in capsys.readouterr().err
    assert course.main(options) == 0 and course.main([*options, "--check"]) == 0
    assert (page.parent / "docs" / "start.png").read_bytes() == b"the last picture"
    text = page.read_text(encoding="utf-8")
    row = (
        r"| A \| B <is> & true. | 7 points | 3 [2.12, 3.88] points, 5 seeds | shows | [01_sgd](notebooks/01_sgd.ipynb)"
    )
    assert f"{row} |" in text and "[T](notebooks/01_sgd.ipynb)" in text
    assert (
        text.startswith("# é\n<!-- claims:begin -->\n") and text.endswith("<!-- map:end -->\nend") and "old" not in text
    )


def test_a_notebook_without_a_picture_is_named(page):
    cells = json.loads((page.parent / "01_sgd.ipynb").read_text(encoding="utf-8"))["cells"][:2]
    (page.parent / "00_bare.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"00_bare\.ipynb stores no picture"):
        course.picture(page.parent)


def test_a_readme_without_a_place_is_refused(page, capsys):
    page.write_text("<!-- claims:end --><!-- claims:begin -->", encoding="utf-8")
    assert course.main(["readme", f"--page={page}", f"--notebooks={page.parent}"]) == 2
    assert "<!-- claims:begin -->" in capsys.readouterr().err


def test_a_stored_claim_that_is_gone_is_named(page, monkeypatch):
    monkeypatch.setattr(course, "_read", lambda name: {"sgd-below": {}})
    with pytest.raises(ValueError, match=r"01_sgd\.ipynb.*'sgd-above'"):
        course.readme_table(page.parent)


def test_the_command_line_and_a_light_import():
    script = "import sys, dlscale.course, dlscale.course.grading; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
    shown = subprocess.run([sys.executable, "-m", "dlscale.course", "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "grade" in shown.stdout and "readme" in shown.stdout


# Exercises


def reference(exercise: Exercise) -> object:
    """Run the reference solution, which sees what the module of the check imports, and return its answer."""
    namespace = dict(vars(sys.modules[exercise.wrong.__module__]))
    exec(exercise.code, namespace)
    return namespace[exercise.answer]


def exercises_of_the_course() -> list[Exercise]:
    rooms = pkgutil.iter_modules(dlscale.__path__.exercises)
    modules = [importlib.import_module(f"dlscale.exercises.{room.name}") for room in rooms]
    return [entry for module in modules for entry in vars(module).values() if isinstance(entry, Exercise)]


@pytest.mark.parametrize("exercise", exercises_of_the_course(), ids=lambda exercise: exercise.id)
def test_an_exercise_of_the_course(exercise):
    assert (
        exercise.id.split("-")[0] == exercise.wrong.__module__.split(".")[-1]
        and course.exercise(exercise.id) is exercise
    )
    assert exercise.question.strip() and exercise.hints and all(exercise.hints) and exercise.right
    assert re.search(rf"\b{exercise.answer}\b", exercise.code)
    right, line = exercise.judge(reference(exercise))
    assert right, line
    assert exercise.judge(...) == exercise.judge(lambda *args: ...) == (False, "no answer yet") or not callable(
        reference(exercise)
    )
    for nonsense in NONSENSE.values():
        assert not exercise.judge(nonsense)[0]


@pytest.fixture
def product():
    return Exercise(
        id="demo-product", answer="product", question="Six times seven?", hints=["Add.", "Add again."],
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


def test_a_warning_does_not_hide_what_is_wrong(product):
    assert product.judge(NONSENSE["warns"]) == (False, "not yet: The product is not finite.")


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


def test_exercises_are_found_by_id(product, monkeypatch, tmp_path):
    (tmp_path / "demo.py").touch()
    monkeypatch.setattr(dlscale.course.exercises, "__path__", [str(tmp_path)])
    module = types.ModuleType("dlscale.demo.exercises")
    module.product = product
    monkeypatch.setitem(sys.modules, "dlscale.demo.exercises", module)
    assert course.exercise("demo-product") is product
    for unknown in ("demo-produkt", "dema-product", "sys", 3, ""):
        with pytest.raises(ValueError, match=r"Unknown exercise .*'demo-product'"):
            course.exercise(unknown)


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
    line = dlscale.shorten.exercises(text, limit)
    assert len(line) <= limit and len(line.splitlines()) <= 1
    assert line.encode("utf-8") or not text.split()
    assert dlscale.shorten.exercises("\ud800x") == "?x"
