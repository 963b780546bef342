"""How a notebook of the course is built, as rules: each yields one sentence for each thing that is wrong."""

from __future__ import annotations

import ast
import json
import re
import statistics
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from nbformat import NotebookNode

import notebooks  # tools/notebooks.py
from dlscale.course.claims import CLAIM_TYPE
from dlscale.course.exercises import Exercise
from notebooks import syntax

MAX_LINES, MAX_MEDIAN_LINES = 30, 8
MAX_OUTPUT_BYTES = 1_500_000
ABSOLUTE = re.compile(r"(?<![\w.:/])/(home|Users|root|work|tmp|private|var|mnt|opt|usr)/\w|\b[A-Z]:\\\\?Users")
REGISTRY = re.compile(r"pypi\.org|pythonhosted\.org|npmjs\.|unpkg\.com|debian\.org|anaconda\.org", re.IGNORECASE)


class Notebook:
    """A notebook with what the rules ask about. `path` need not exist; its neighbours are sought in its folder."""

    def __init__(self, node: NotebookNode, path: Path) -> None:
        self.node, self.path, self.cells = node, path, node.cells
        self.code = [cell for cell in self.cells if cell.cell_type == "code"]
        self.outputs = [(cell, output) for cell in self.code for output in cell.outputs]

    def headings(self) -> list[tuple[int, str]]:
        """Levels and texts, in order."""
        found = []
        for cell in self.cells:
            if cell.cell_type == "markdown":
                prose = re.sub(r"^```.*?^```", "", cell.source, flags=re.MULTILINE | re.DOTALL)
                found += [(len(marks), text) for marks, text in re.findall(r"^(#+) +(.+)$", prose, re.MULTILINE)]
        return found

    def section(self, title: str) -> list[str | NotebookNode]:
        """The Markdown and the code cells from the heading `## title` to the next one of that level."""
        pieces: list[str | NotebookNode] = []
        for cell in self.cells:
            prose = cell.cell_type == "markdown"
            pieces += re.split(r"^(?=## )", cell.source, flags=re.MULTILINE) if prose else [cell]
        inside, found = False, []
        for piece in pieces:
            if isinstance(piece, str) and piece.startswith("## "):
                inside = piece.startswith(f"## {title}")
            if inside:
                found.append(piece)
        return found


def calls(cell: NotebookNode, name: str) -> list[ast.Call]:
    """The calls of a function or method `name` in the cell."""
    found = [node for node in ast.walk(syntax(cell)) if isinstance(node, ast.Call)]
    return [call for call in found if name in (getattr(call.func, "attr", ""), getattr(call.func, "id", ""))]


def answers(notebook: Notebook) -> list[tuple[NotebookNode, str]]:
    """The cells tagged `answer-<id>`, with the id."""
    tagged = [(cell, tag) for cell in notebook.cells for tag in cell.metadata.get("tags", [])]
    return [(cell, tag.removeprefix("answer-")) for cell, tag in tagged if tag.startswith("answer-")]


def imports(notebook: Notebook) -> Iterator[str]:
    importing = [
        number
        for number, cell in enumerate(notebook.code)
        if any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(syntax(cell)))
    ]
    if importing != [0]:
        yield f"Only the first code cell may import, and it must; code cells {importing} do (counted from 0)."


def headings(notebook: Notebook) -> Iterator[str]:
    levels = [level for level, _ in notebook.headings()]
    if levels.count(1) != 1:
        yield f"There must be a single title (# …), not {levels.count(1)}."
    for (before, _), (level, text) in zip(notebook.headings(), notebook.headings()[1:], strict=False):
        if level > before + 1:
            yield f"The heading {text!r} skips a level: {before} is followed by {level}."


def repetitions(notebook: Notebook) -> Iterator[str]:
    """A heading, or a sentence of eight words or more, that stands twice: the old one was left behind."""
    where: dict[str, str] = {}
    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        for paragraph in re.split(r"\n(?:\s*\n|(?=#|[-*] |\d+\. ))", cell.source):
            text = " ".join(paragraph.split())
            for sentence in [text] if text.startswith("#") else re.split(r"(?<=[.?!:])\W+(?=[A-Z$`])", text):
                said = " ".join(re.findall(r"\w+", re.sub(r"\]\(.*?\)", "", sentence))).lower()
                if not text.startswith("#") and said.count(" ") < 7:
                    continue
                if said in where:
                    yield f"Cells {where[said]} and {cell.id} say the same: {sentence[:80]!r}."
                where.setdefault(said, cell.id)


def formulas(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.cells:
        prose = cell.source if cell.cell_type == "markdown" else ""
        for formula in re.findall(r"\$\$.+?\$\$|\$[^$\n]+\$", prose, re.DOTALL):
            if re.search(r"\\\\[A-Za-z,]", formula):
                yield f"Cell {cell.id} doubles a backslash, so that this shows no formula: {formula!r}."


def lengths(notebook: Notebook) -> Iterator[str]:
    lines = [len(cell.source.splitlines()) for cell in notebook.code]
    if (median := statistics.median(lines)) > MAX_MEDIAN_LINES:
        yield f"The median code cell has {median:g} lines, over {MAX_MEDIAN_LINES}."
    for cell, count in zip(notebook.code, lines, strict=True):
        if count > MAX_LINES:
            yield f"Cell {cell.id} has {count} lines, over {MAX_LINES}."


def exercises(notebook: Notebook) -> Iterator[str]:
    room = notebooks.room(notebook.path.stem)
    entries = vars(import_module(f"dlscale.{room}.exercises")).items()
    known = {name for name, entry in entries if isinstance(entry, Exercise)}
    tags = [identity for _, identity in answers(notebook)]
    if len(set(tags)) < len(tags):
        yield f"An exercise has two answer cells: {sorted(tags)}."
    for cell in notebook.code:
        tagged = {identity for answer, identity in answers(notebook) if answer is cell}
        checked = {ast.unparse(call.func.value).removeprefix("exercises.") for call in calls(cell, "check")}
        if tagged != {f"{room}-{name}" for name in checked}:
            yield f"Cell {cell.id} is tagged as answer to {sorted(tagged)}, but checks {sorted(checked)}."
        for name in sorted(checked - known):
            yield f"Cell {cell.id} checks {name}, which is no exercise of {room}."


def identities(notebook: Notebook) -> Iterator[str]:
    names = [cell.get("id", "") for cell in notebook.cells]
    if len(set(names)) < len(names) or not all(names):
        yield "Every cell needs an id of its own."
    for name in names:
        if re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f-]+)?", name):
            yield f"The id {name!r} is a random one; give the cell a name that stays."


def execution(notebook: Notebook) -> Iterator[str]:
    counts = [cell.execution_count for cell in notebook.code]
    if counts != list(range(1, len(counts) + 1)):
        yield f"The cells were not run once, in order: {counts}."


def outputs(notebook: Notebook) -> Iterator[str]:
    for cell, output in notebook.outputs:
        if output.output_type == "error":
            yield f"Cell {cell.id} ended with {output.ename}."
        if output.get("name") == "stderr":
            yield f"Cell {cell.id} wrote to stderr."
        text = json.dumps({kind: data for kind, data in output.get("data", {}).items() if kind != "image/png"})
        if "widget-view+json" in text:
            yield f"Cell {cell.id} stores a widget, which is dead without a kernel."
        if re.search(r" at 0x[0-9a-f]{6}", text + output.get("text", "")):
            yield f"Cell {cell.id} shows an address in memory, which differs in each run."
    if "widgets" in notebook.node.metadata:
        yield "The notebook stores the state of widgets."
    size = sum(len(json.dumps(output)) for _, output in notebook.outputs)
    if size > MAX_OUTPUT_BYTES:
        yield f"The outputs take {size:,} bytes, over {MAX_OUTPUT_BYTES:,}."


def pictures(notebook: Notebook) -> Iterator[str]:
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type != "code":
            continue
        images = [output for output in cell.outputs if "image/png" in output.get("data", {})]
        for output in images:
            alt = output.metadata.get("image/png", {}).get("alt", "")
            if len(alt) < 10 and [next_.cell_type for next_ in notebook.cells[number + 1 : number + 2]] != ["markdown"]:
                yield f"A picture of cell {cell.id} has neither an alt text nor a sentence below."
        described = [output for output in images if output.metadata.get("image/png", {}).get("alt")]
        if len(described) < len(calls(cell, "explore")):
            yield f"Cell {cell.id} calls explore, but stores no picture with an alt text."


def cards(notebook: Notebook) -> Iterator[str]:
    """Each claim shows its card, once."""
    where: dict[str, str] = {}
    for cell in notebook.code:
        shown = [output.data[CLAIM_TYPE]["id"] for output in cell.outputs if CLAIM_TYPE in output.get("data", {})]
        if len(shown) < (made := len(calls(cell, "claim"))):  # more in a loop
            yield f"Cell {cell.id} makes {made} claims, but shows {len(shown)} cards."
        for identity in shown:
            if identity in where:
                yield f"Cells {where[identity]} and {cell.id} show the card of {identity}."
            where.setdefault(identity, cell.id)


def addresses(notebook: Notebook) -> Iterator[str]:
    for cell in notebook.cells:
        pieces = [cell.source]
        for output in cell.get("outputs", []):
            data = {kind: value for kind, value in output.get("data", {}).items() if kind != "image/png"}
            pieces += [output.get("text", ""), json.dumps(data)]
        for pattern, what in ((ABSOLUTE, "an absolute path"), (REGISTRY, "the address of a registry")):
            if match := pattern.search("\n".join(pieces)):
                yield f"Cell {cell.id} shows {what}: {match.group()!r}."
        if cell.cell_type == "markdown":
            for link in re.findall(r"\]\(([^)#:\s]+)[^):\s]*\)", cell.source):
                if not (notebook.path.parent / link).exists():
                    yield f"Cell {cell.id} links to {link}, which does not exist."


RULES = (
    imports, headings, repetitions, formulas, lengths, exercises, identities, execution, outputs, pictures, cards,
    addresses,
)  # fmt: skip
