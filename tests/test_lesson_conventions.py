"""The rules of lessons: a good notebook keeps all of them, and a spoiled one breaks the right one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import conventions
import lesson_conventions
import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell as code
from nbformat.v4 import new_markdown_cell as text

import notebooks  # tools/notebooks.py
from dlscale.course.contents import Further, Notebook

FURTHER = Further("More", 5, 3)
BOOKS = [
    Notebook("00_start.ipynb", "Start", "Why?", "L", (), 5, 3),
    Notebook("01_sample.ipynb", "A title", "Why?", "L", (), 30, 9, FURTHER),
    Notebook("02_next.ipynb", "Next", "Why?", "L", (), 5, 3),
]
LINKS = "[back](00_start.ipynb) · [next](02_next.ipynb) · [further](further/01_sample_further.ipynb)"
CARD = nbformat.v4.new_output("display_data", {conventions.CLAIM_TYPE: {"id": "sample-range"}})

Cells = list[NotebookNode]


@pytest.fixture(autouse=True)
def books(monkeypatch):
    monkeypatch.setattr(lesson_conventions, "contents", lambda: BOOKS)


def picture(alt: str, caption: str = "") -> NotebookNode:
    """A stored picture; with a caption, an explorer's."""
    data = {"image/png": "iVBORw0KGgo="} | ({"text/plain": caption} if caption else {})
    return nbformat.v4.new_output("display_data", data, metadata={"image/png": {"alt": alt}})


def setup() -> NotebookNode:
    return code("import numpy as np\n\nfrom dlscale.sample import drawing, exercises")


def explorer(name: str) -> NotebookNode:
    return code(f"drawing.explore_{name}()", outputs=[picture("A line that rises.", "A line\nthat rises.")])


def closing(links: str) -> Cells:
    said = nbformat.v4.new_output("display_data", {"text/markdown": "R", "text/plain": "R"})
    return [
        text("## What you saw"),
        code("course.say('Range.')", outputs=[said]),
        text("## What to try next\n\n- a\n- b\n- c"),
        text(f"## Where to go on\n\n{links}\n\n## Papers\n\n- A. Author. 2018, arXiv:1710.03740."),
    ]


def lesson() -> Cells:
    times = "30 minutes, 9 seconds of computing · follows the lecture of L"
    objectives = f"- read a float,\n- see it,\n- mend it.\n\n{times}\n\n{LINKS}"
    shown = code("drawing.puzzle()", outputs=[picture("Three bars.")])
    cells = [text("# A title\n\nWhich bits are missing?"), setup(), shown, text(objectives)]
    for number, name in enumerate("abc", 1):
        cells += [text(f"## {number}. Part {name}"), explorer(name)]
        cells += [text(f"**Takeaway.** The range of {name} is too small.")]
        cells += [code(f"exercises.{name}.check(...)", metadata={"tags": [f"answer-sample-{name}"]})]
    return cells + closing(LINKS)


def further() -> Cells:
    times = "5 minutes, 3 seconds of computing · [the lesson](../01_sample.ipynb)"
    cells = [text(f"# More\n\n- Is it so?\n- Is it not?\n\n{times}"), setup(), code("drawing.puzzle()")]
    cells[-1].outputs = [picture("Three bars.")]
    for number, name in enumerate("ab", 1):
        cells += [text(f"## {number}. Part {name}\n\n**Takeaway.** The {name} is too small."), explorer(name)]
    return cells + closing("[the lesson](../01_sample.ipynb)")


def broken(cells: Cells, path: Path, fold: bool = True) -> Iterator[str]:
    """The rules that a notebook of these cells breaks."""
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    for number, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        cell.execution_count = number
    node = nbformat.v4.new_notebook(cells=cells)
    if fold:
        notebooks.fold(node)
    notebook = conventions.Notebook(node, path)
    for rule in lesson_conventions.RULES:
        if rule is not conventions.exercises and list(rule(notebook)):  # whose ids are real ones only in real notebooks
            yield rule.__name__


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "further").mkdir()
    for name in ("00_start", "01_sample", "02_next", "further/01_sample_further"):
        (tmp_path / f"{name}.ipynb").touch()
    return tmp_path


def test_a_good_lesson_keeps_all_rules(folder):
    assert list(broken(lesson(), folder / "01_sample.ipynb")) == []


def test_a_good_further_notebook_keeps_all_rules(folder):
    assert list(broken(further(), folder / "further" / "01_sample_further.ipynb")) == []


def instead(number: int, old: str, new: str) -> Callable[[Cells], None]:
    def spoil(cells: Cells) -> None:
        assert old in cells[number].source
        cells[number].source = cells[number].source.replace(old, new)

    return spoil


def printing(number: int, text: str) -> Callable[[Cells], None]:
    return lambda cells: cells[number].outputs.append(nbformat.v4.new_output("stream", text=text))


SPOILED = {
    "no puzzle": ("opening", instead(0, "missing?", "missing.")),
    "no picture": ("opening", lambda cells: cells[2].outputs.clear()),
    "no lecture": ("opening", instead(3, "follows the lecture", "follows nothing")),
    "no link to the further notebook": ("opening", instead(3, "further/01_sample_further", "00_start")),
    "other minutes": ("sizes", instead(3, "30 minutes", "35 minutes")),
    "longer than it says": ("sizes", instead(4, "Part a", f"Part a\n\n{'Say. ' * 1000}")),
    "wide code": ("sizes", instead(2, "()", f"({'a' * 80})")),
    "six cards": ("sizes", lambda cells: cells[5].outputs.extend([CARD] * 6)),
    "wide line": ("widths", printing(5, "a" * 89)),
    "huge output": ("widths", printing(5, f"{'a' * 87}\n" * 11_600)),
    "folded exercise": ("folding", lambda cells: cells[7].metadata.update(tags=[notebooks.FOLDED])),
    "two takeaways": ("sections", instead(6, "too small.", "too small. **Takeaway.** It is.")),
    "no answer": ("sections", instead(2, "()", "()\nwidgets.predict('Which?', ['a', 'b'])")),
    "nothing to try": ("closing", instead(18, "What to try next", "The end")),
    "nowhere to go on": ("closing", instead(19, "[next](02_next.ipynb)", "")),
    "no number": ("closing", instead(19, "1710.03740", "")),
    "long sentence": ("sentences", instead(6, "The range", "word " * 41)),
    "long sentences": ("sentences", instead(6, "The", f"{'word ' * 30}. " * 20)),
    "private prose": ("words", instead(6, "is", "hangs\non")),
    "private caption": ("words", lambda cells: cells[5].outputs[0].data.update({"text/plain": "Made by\nhand."})),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_lesson_breaks_the_rule(name, folder):
    rule, spoil = SPOILED[name]
    cells = lesson()
    spoil(cells)
    assert rule in broken(cells, folder / "01_sample.ipynb")


def test_the_set_up_must_be_folded(folder):
    assert list(broken(lesson(), folder / "01_sample.ipynb", fold=False)) == ["folding"]


SPOILED_FURTHER = {
    "one question": ("opening", instead(0, "- Is it not?\n", "")),
    "no questions": ("opening", instead(0, "Is it not?", "It is.")),
    "no way back": ("opening", instead(0, "[the lesson](../01_sample.ipynb)", "")),
    "other minutes": ("sizes", instead(0, "5 minutes", "10 minutes")),
    "one explorer": ("sizes", lambda cells: cells[4].outputs.clear()),
}


@pytest.mark.parametrize("name", SPOILED_FURTHER)
def test_a_spoiled_further_notebook_breaks_the_rule(name, folder):
    rule, spoil = SPOILED_FURTHER[name]
    cells = further()
    spoil(cells)
    assert rule in broken(cells, folder / "further" / "01_sample_further.ipynb")
