"""Every notebook: its form, its stored outputs, one cold run within the memory, and all ends of its controls."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec
from pathlib import Path

import conventions
import extremes
import lesson_conventions
import nbformat
import pytest
from conftest import each_notebook
from lab import keep_programs

import notebooks  # tools/notebooks.py
from dlscale.course import sources
from dlscale.course.contents import paths

NOTEBOOKS = paths(notebooks.FOLDER)
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
RULES = [
    pytest.param(path, rule, id=f"{path.stem}-{rule.__name__}")
    for path in NOTEBOOKS
    for rule in lesson_conventions.RULES
]

CELL_SECONDS = 1800  # after so long a cell hangs, on any machine
EXTREMES = f"{inspect.getsource(extremes)}\n\nassert widgets.explorers\n"


def memory_bytes(path: Path) -> float:
    """What a cold run may hold."""
    return 0.7e9 if path.parent == notebooks.FOLDER else 0.85e9


@functools.cache
def stored(path: Path) -> conventions.Notebook:
    return conventions.Notebook(nbformat.read(path, as_version=4), path)


@pytest.mark.parametrize(("path", "rule"), RULES)
def test_conventions(path, rule):
    assert not list(rule(stored(path)))


@EACH
def test_outputs_are_not_older_than_sources_and_library(path):
    assert not notebooks.stale(path), "run `make notebooks`"


@each_notebook
def test_runs_cold_within_the_memory_to_the_stored_results(path, tmp_path, programs, pytestconfig):
    together = "not long" not in pytestconfig.getoption("markexpr")
    peak = run(nbformat.read(path, as_version=4), tmp_path, together)
    shutil.copytree(tmp_path / "programs", programs, copy_function=shutil.move, dirs_exist_ok=True)
    print(f"{path.stem} held {peak / 1e6:.0f} MB")
    assert peak < memory_bytes(path)


class Failed(AssertionError):
    pass


def run(notebook, folder: Path, together: bool = True) -> int:
    """Run a copy of the notebook under nbval, with a last cell that moves every control to its ends; return its peak.

    The controls move alone, and in `test-all` `together`, too. The peak is the most bytes held at once. Raises Failed
    with what nbval says where a cell fails, writes to stderr or gives another result than the stored one.
    """
    notebook = copy.deepcopy(notebook)
    notebook.cells.append(nbformat.v4.new_code_cell(f"{EXTREMES}check({together})"))
    nbformat.write(notebook, folder / "copy.ipynb")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key not in ("MPLBACKEND", "PYTEST_ADDOPTS")}
    (folder / "programs").mkdir()  # as on a first run: nothing compiled, and all that is compiled is kept
    places = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(places)} | keep_programs(folder / "programs")
    options = f"--nbval-lax --nbval-current-env --nbval-cell-timeout={CELL_SECONDS} --tb=short -q -p nbval_budget"
    command = [sys.executable, "-m", "pytest", *options.split(), "-p", "no:cacheprovider", "--color=no"]
    report = folder / "peak"
    result = subprocess.run(
        [*command, "-c", folder / "pytest.ini", f"--peak-report={report}", folder / "copy.ipynb"],
        env=environment, cwd=folder, capture_output=True, text=True, encoding="utf-8", stdin=subprocess.DEVNULL,
    )  # fmt: skip
    if result.returncode:
        raise Failed(result.stdout[-6000:] + result.stderr[-2000:])
    return int(report.read_text(encoding="utf-8"))


# The rules themselves: a good notebook keeps all of them, and each way of spoiling it breaks the right one.


def picture(alt: str) -> nbformat.NotebookNode:
    return nbformat.v4.new_output("display_data", {"image/png": "iVBORw0KGgo="}, metadata={"image/png": {"alt": alt}})


def good() -> nbformat.NotebookNode:
    """A notebook that keeps all rules except `exercises`, whose ids are real ones only in real notebooks."""
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    opening = (
        "# A title\n\nWhy?\n\n- see\n- say\n- do\n\n5 minutes to read, 9 seconds for the machine.\n\n"
        "**Follows** a lecture.\n\n[back](00_start.ipynb)"
    )
    cells = [text(opening), code("import numpy as np")]
    for name in "abc":
        cells += [
            text(f"## Part {name}\n\n### Detail of {name}\n\n$x^2$"),
            code("widgets.explore(make)"),
            code("answer = ..."),
        ]
        cells[-2].outputs = [picture("A line that rises.")]
        cells[-1].metadata["tags"] = [f"answer-{name}"]
    cells += [text("## What you saw"), code("course.summary(1, 2, 3, 4)")]
    cells += [text("## What to try next\n\n- more"), text("## Papers\n\n- A. Author: *Title*. 2016.")]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    for number, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        cell.execution_count = number
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebooks.fold(notebook)
    return notebook


def replace(number: int, old: str, new: str):
    def spoil(notebook):
        assert old in notebook.cells[number].source
        notebook.cells[number].source = notebook.cells[number].source.replace(old, new)

    return spoil


def output(number: int, **fields):
    def spoil(notebook):
        notebook.cells[number].outputs = [nbformat.v4.new_output(**fields)]

    return spoil


def assign(number: int, **fields):
    def spoil(notebook):
        notebook.cells[number].update(nbformat.from_dict(fields))

    return spoil


SAID = "Each machine works on fifteen examples at a time. Is it"
DOUBLED = {2: f"First. {SAID} so?", 5: f"{SAID} not?"}  # two paragraphs that differ, with one sentence in common
FOLDED = {"tags": ["hide-input"], "jupyter": {"source_hidden": True}, "cellView": "form"}
CARD = {"output_type": "display_data", "data": {conventions.CLAIM_TYPE: {"id": "sgd-root"}}}
SPOILED = {
    "late import": ("imports", replace(4, "answer", "import this; answer")),
    "second title": ("headings", replace(2, "## Part", "# Part")),
    "doubled backslash": ("formulas", replace(2, "$x^2$", r"$\\log x$")),
    "sentence twice": ("repetitions", lambda notebook: [replace(n, "$x^2$", DOUBLED[n])(notebook) for n in (2, 5)]),
    "long cell": ("lengths", replace(4, "answer = ...", "answer = ...\n" * 31)),
    "long cells": ("lengths", lambda notebook: [assign(n, source="a = 1\n" * 9)(notebook) for n in (1, 4, 7, 10, 12)]),
    "random id": ("identities", assign(4, id="0badcafe")),
    "not run": ("execution", assign(4, execution_count=None)),
    "error": ("outputs", output(4, output_type="error", ename="KeyError", evalue="", traceback=[])),
    "stderr": ("outputs", output(4, output_type="stream", name="stderr", text="warning")),
    "widget": ("outputs", output(4, output_type="display_data", data={"application/vnd.jupyter.widget-view+json": {}})),
    "address in memory": ("outputs", output(4, output_type="stream", text="<object at 0x7fa0b2c3d4e5>")),
    "huge output": ("outputs", output(4, output_type="stream", text="x" * 1_500_001)),
    "widget state": ("outputs", lambda notebook: notebook.metadata.update(widgets={})),
    "no picture": ("pictures", assign(3, outputs=[])),
    "no card": ("cards", replace(4, "answer = ...", "course.claim('a', 1)\nprint(1)")),
    "card twice": ("cards", lambda notebook: [output(n, **CARD)(notebook) for n in (4, 7)]),
    "absolute path": ("addresses", replace(4, "...", "'/ho" + "me/me/file'")),
    "registry": ("addresses", replace(2, "Detail", "https://pyp" + "i.org/x")),
    "dead link": ("addresses", replace(2, "Detail", "[here](nowhere.ipynb)")),
}  # fmt: skip


def broken_rules(notebook, folder: Path) -> set[str]:
    (folder / "00_start.ipynb").touch()
    wrapped = conventions.Notebook(notebook, folder / "01_sample.ipynb")
    rules = [rule for rule in conventions.RULES if rule is not conventions.exercises]
    return {rule.__name__ for rule in rules if list(rule(wrapped))}


def test_a_good_notebook_keeps_all_rules(tmp_path):
    assert broken_rules(good(), tmp_path) == set()


def test_what_draws_asks_or_captions_is_folded_and_nothing_else():
    sources = {
        "fig, ax = figures.new()\nax.plot(descent(0.1))": True,
        "guess = widgets.predict('Which?', ['a', 'b'])": True,
        "drawing.loss_scaling(runs)": False,
        "def make(fig):\n    ax = figures.axes(fig)\n    return lambda x: None": True,
        "def caption(x):\n    return f'At {x}.'\n\nwidgets.explore(make, alt=caption)": True,
        "def caption_of_another(x):\n    return f'At {x}.'": True,
        "widgets.explore(make, alt=caption_of_another)": True,
        "def caption_of_none(x):\n    return f'At {x}.'": False,
        "COLOR = figures.RED": False,
        "# Plumbing\ndef prepare():\n    return 1": True,
        "losses = descent(0.1)": False,
        "%time figures": False,
    }
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    notebooks.fold(notebook)
    assert {cell.source: cell.metadata == FOLDED for cell in notebook.cells} == sources


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_notebook_breaks_the_rule(name, tmp_path):
    rule, spoil = SPOILED[name]
    notebook = good()
    spoil(notebook)
    assert rule in broken_rules(notebook, tmp_path)


@pytest.mark.parametrize(
    "answer",
    ["exercises.nothing.check(1)", "exercises.momentum.check(1)", "1"],
    ids=["unknown", "another", "not checked"],
)
def test_an_answer_cell_must_check_a_known_exercise(answer, tmp_path):
    cell = nbformat.v4.new_code_cell(answer, metadata={"tags": ["answer-sgd-nothing"]})
    notebook = conventions.Notebook(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "01_sgd.ipynb")
    assert list(conventions.exercises(notebook))
    cell.metadata["tags"], cell.source = ["answer-sgd-momentum"], "exercises.momentum.check(1)"
    assert not list(conventions.exercises(notebook))
    cell.metadata["tags"] = []
    assert list(conventions.exercises(notebook)), "checked, not tagged"


# The run itself: what it must notice.

EXPLORER = """
from dlscale.page import figures, widgets

def make(figure):
    (line,) = figures.axes(figure).plot([0, 1], [0, 1])
    def update(x):
        line.set_ydata([0, %s])
        return [line]
    return update

widgets.explore(make, alt=lambda x: f"At {x}.", x=widgets.slider("x", [0, 0.5, 1]))
"""


def test_programs_are_found_where_they_were_moved(tmp_path):
    def names(folder: Path) -> set[str]:
        code = "import jax; jax.jit(lambda x: x + 1)(1.0)"
        subprocess.run([sys.executable, "-c", code], env=os.environ | keep_programs(folder), check=True)
        return {file.name for file in folder.iterdir()}

    made = names(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    assert made and made == names(tmp_path / "second")


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("sources", "complaints"),
    [
        pytest.param([EXPLORER % "x"], [], marks=pytest.mark.long),  # as each notebook's run shows, too
        pytest.param([EXPLORER % "1 / x"], ["failed at {'x': 0}", "ZeroDivisionError"], marks=pytest.mark.long),
        (
            [
                EXPLORER % "0",
                "import warnings; warnings.warn('old')",
                "1 + ''",
                "print('other')",
            ],
            ["never changed the picture", "wrote to stderr", "TypeError", "Cell outputs differ"],
        ),
    ],
    ids=["good", "failing control", "dead control, stderr, error, other result"],
)
def test_a_run_notices(sources, complaints, tmp_path):
    cells = [nbformat.v4.new_code_cell(source, execution_count=1) for source in sources]
    cells[-1].outputs = [nbformat.v4.new_output("stream", text="stored\n")]
    cells[-1].metadata["tags"] = ["nbval-check-output"] * cells[-1].source.startswith("print")
    try:
        peak = run(nbformat.v4.new_notebook(cells=cells), tmp_path)
    except Failed as error:
        assert complaints
        assert [complaint for complaint in complaints if complaint not in str(error)] == []
    else:
        assert not complaints
        assert 1e7 < peak < 0.9e9


DECIDES = "from dlscale import course\ncourse.claim('sgd-root', [-0.5, -0.51] * 4)"


@pytest.mark.parametrize("count", range(10))
def test_any_two_controls_are_together_at_all_their_ends(count):
    seen = extremes.corners(dict.fromkeys(range(count), (0, 1)))
    assert len(seen) <= 2 * max(count, 1)
    for two in itertools.combinations(range(count), min(2, count)):
        assert len({tuple(values[name] for name in two) for values in seen}) == 2 ** len(two)


def written(path: Path, code: str) -> nbformat.NotebookNode:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code, id="a")])
    notebook.metadata["dlscale"] = notebooks.hashes(notebook, path.stem)
    nbformat.write(notebook, path)
    return notebook


def test_stale_says_what_changed(tmp_path):
    path = tmp_path / "01_sample.ipynb"
    notebook = written(path, "%matplotlib inline\nfrom dlscale.lab import intervals\nintervals.interval([1, 2])")
    assert notebooks.stale(path) == ""
    notebook.cells[0].source += "\n1"
    nbformat.write(notebook, path)
    assert notebooks.stale(path) == "sources changed"
    notebook.metadata["dlscale"] = notebooks.hashes(notebook, path.stem) | {"library": "other"}
    nbformat.write(notebook, path)
    assert notebooks.stale(path) == "library changed"
    assert notebooks.main(["--check", str(path)]) == 1


def test_only_what_a_notebook_uses_makes_it_stale(tmp_path, monkeypatch):
    """A copy of the library, in which one line after the other changes."""
    shutil.copytree(notebooks.ROOT / "dlscale", tmp_path / "dlscale", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(notebooks.ROOT / "data", tmp_path / "data", ignore=shutil.ignore_patterns("*.npz"))
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(sources, "find_spec", lambda top: ModuleSpec(top, None, origin=str(package / "__init__.py")))
    package, path = tmp_path / "dlscale", tmp_path / "01_sgd.ipynb"
    results = tmp_path / "data" / "results" / "claims.json"
    decided = json.loads(results.read_text(encoding="utf-8"))
    decided["sgd-root"]["notebook"] = path.stem
    results.write_text(json.dumps(decided), encoding="utf-8")
    code = (
        "from dlscale import course\nfrom dlscale.lab import intervals\nfrom dlscale.sgd import drawing, exercises\n"
        "intervals.interval([1, 2])\nexercises.momentum.check(1)\n'sgd-root'\ncourse.course_map()\n'toy-rates'\n"
        "course.claim('precision-bfloat16')\ndrawing.rates()"
    )
    drawn = (
        "from dlscale.page import figures\n\nWIDTH = 4\n\ndef rates():\n    figures.new(WIDTH)\n\ndef other():\n    1\n"
    )
    (package / "sgd" / "drawing.py").write_text(drawn, encoding="utf-8")
    written(path, code)

    def changed(name: str, old: str, new: str) -> bool:
        text = (package / name).read_text(encoding="utf-8")
        assert old in text, f"{name} has no {old!r} to change"
        (package / name).write_text(text.replace(old, new, 1), encoding="utf-8")
        why = notebooks.stale(path)
        (package / name).write_text(text, encoding="utf-8")
        return why == "library changed"

    assert changed("lab/intervals.py", "count - 1", "count - 2")
    assert changed("sgd/exercises.py", "momentum = Exercise(", "momentum = Exercise(0, ")
    assert changed("course/exercises.py", "not yet: ", "no: ")
    assert changed("sgd/claims.toml", "seeds = ", "seeds = 1")
    assert changed("course/contents.toml", "minutes = ", "minutes = 1")
    assert changed("sgd/drawing.py", "WIDTH = ", "WIDTH = 1")
    assert changed("page/figures.py", "def new(", "def new(unused=0, ")
    assert not changed("sgd/drawing.py", "    1", "    2")
    assert not changed("lab/intervals.py", "import NamedTuple", "import NamedTuple  # why")
    assert not changed("lab/intervals.py", "Raises ValueError", "Refuses")
    assert not changed("lab/data.py", "ATTEMPTS = ", "ATTEMPTS = 1")
    assert not changed("sgd/exercises.py", "backward = Exercise(", "backward = Exercise(0, ")
    assert not changed("precision/claims.toml", "seeds = ", "seeds = 1")
    stored = "../data/results/claims.json"
    assert changed(stored, '"precision-bfloat16": {', '"precision-bfloat16": {"new": 1, ')
    assert not changed(stored, '"precision-mixed": {', '"precision-mixed": {"new": 1, ')
    assert not changed(stored, '"sgd-root": {', '"sgd-root": {"new": 1, '), "its own: it decides that one"
    (tmp_path / "data" / "results" / "toy-batches.json").write_text("another record")
    assert notebooks.stale(path) == ""
    (tmp_path / "data" / "results" / "toy-rates.json").write_text("its record")
    assert notebooks.stale(path) == "library changed"


def test_a_further_notebook_comes_before_its_lesson_and_decides_what_that_shows(tmp_path, monkeypatch):
    results = tmp_path / "data" / "results"
    results.mkdir(parents=True)
    (tmp_path / "data" / "SHA256SUMS").touch()
    (results / "claims.json").write_text("{}")
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "FOLDER", tmp_path / "notebooks")
    for name, code in {"01_sgd": "'sgd-root'", "further/01_sgd_further": DECIDES, "00_start_here": "1"}.items():
        path = notebooks.FOLDER / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        written(path, code)
    order = ["00_start_here", "01_sgd_further", "01_sgd"]
    assert [path.stem for path in paths(notebooks.FOLDER)] == order
    lesson, further = notebooks.FOLDER / "01_sgd.ipynb", notebooks.FOLDER / "further" / "01_sgd_further.ipynb"
    notebooks.store(further)
    entry = json.loads((results / "claims.json").read_text(encoding="utf-8"))["sgd-root"]
    assert (entry["notebook"], entry["verdict"]) == ("01_sgd_further", "shows")
    assert (notebooks.stale(further), notebooks.stale(lesson)) == ("", "library changed")
    (tmp_path / "dlscale" / "sgd").mkdir(parents=True)
    (tmp_path / "dlscale" / "sgd" / "claims.toml").write_text("[sgd-root]\nrule = 'above'\n")
    assert notebooks.stale(further) == "library changed", "its room is that of the lesson"


def test_store_keeps_the_file_when_a_cell_fails(tmp_path):
    path = tmp_path / "01_sample.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0", id="a")]), path)
    before = path.read_bytes()
    with pytest.raises(notebooks.Failed, match="ZeroDivisionError"):
        notebooks.store(path)
    assert path.read_bytes() == before


@pytest.mark.long
def test_stored_twice_is_stored_the_same(tmp_path):
    path = tmp_path / "01_sample.ipynb"
    cells = [nbformat.v4.new_code_cell(EXPLORER % "x", id="a"), nbformat.v4.new_code_cell("print(1); print(2)", id="b")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    with ThreadPoolExecutor(1) as pool:  # in a thread: after a browser's test, this one has an event loop
        once, again = (pool.submit(notebooks.store, path).result() or path.read_bytes() for _ in range(2))
    assert once == again
    stored = nbformat.read(path, as_version=4)
    assert [output.output_type for output in stored.cells[0].outputs] == ["display_data"] * 2
    assert stored.cells[0].outputs[0].metadata["image/png"]["alt"] == "At 0.5."
