"""The rules of the third edition, beside those of `conventions` that hold for every notebook."""

from __future__ import annotations

import re
from collections.abc import Iterator

import conventions
from conventions import Notebook, calls
from lesson_size import complaints, printed, size

import notebooks  # tools/notebooks.py
from dlscale.course.contents import contents

COLUMNS = 88
MAX_OUTPUT_BYTES = 1_000_000
AVERAGE_WORDS, MOST_WORDS = 18, 40  # of a sentence
CLOSING = ["What you saw", "What to try next", "Where to go on", "Papers"]

# Private words, as they stood in earlier texts, and what the field says.
WORDS = {
    r"way there|way back|there and back|way forward": "forward pass, backward pass",
    r"kept for": "saved activations",
    r"(split|divided|shared) by (data|model|columns|rows)": "data parallel, tensor parallel, column- or row-parallel",
    r"moments?": "step, time step",
    r"the middle of|half of them below": "median",
    r"the least and the most": "minimum and maximum, range",
    r"told apart": "distinguishable",
    r"hangs? on|owed to": "depends on, is due to",
    r"judged on": "chosen on the validation set",
    r"ground|grounds": "task, setting",
    r"story|stories|jobs?": "run, configuration",
    r"fresh pages?|new memory": "memory allocation, page faults",
    r"operations for each byte": "arithmetic intensity",
    r"thousand million": "billion; GFLOP/s",
    r"dice|thrown": "random, sampled",
    r"weights first|turned round": "transposed",
    r"goes on|went on": "continues, keeps training",
    r"by hand": "from scratch",
    r"of the same intensity": "with the same intensity",
}


def book_of(notebook: Notebook):
    """The entry of `contents.toml` for a notebook of the third edition; None for others."""
    name = notebooks.subject(notebook.path.stem)
    return next((book for book in contents() if book.name == name and book.edition >= 3), None)


def is_further(notebook: Notebook) -> bool:
    return notebook.path.stem.endswith("_further")


def prose(notebook: Notebook) -> Iterator[tuple[str, str]]:
    """What a reader reads, with the cell's id: Markdown without code and formulas, captions and printed text."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text = re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$", " x ", cell.source, flags=re.DOTALL)
            yield cell.id, re.sub(r"\]\([^)]*\)", "]", text)
        for output in cell.get("outputs", []):
            yield cell.id, printed(output) + "\n" + output.get("metadata", {}).get("image/png", {}).get("alt", "")


def sizes(notebook: Notebook) -> Iterator[str]:
    """The limits, and the minutes that opening and contents.toml say."""
    found, book = size(notebook.node), book_of(notebook)
    yield from complaints(found, is_further(notebook))
    entry = book.further if is_further(notebook) else book
    if entry.minutes != found.minutes:
        yield f"contents.toml says {entry.minutes} minutes; by the formula there are {found.minutes}."
    text = "\n".join(cell.source for cell in notebook.cells[:5] if cell.cell_type == "markdown")
    if f"{entry.minutes} minutes, {entry.seconds} seconds of computing" not in text:
        yield f"The opening must say: {entry.minutes} minutes, {entry.seconds} seconds of computing."


def opening(notebook: Notebook) -> Iterator[str]:
    """A puzzle, a picture, objectives, the lecture, and where to go from here: on one screen."""
    first, *rest = notebook.cells[:5]
    text = "\n".join(cell.source for cell in notebook.cells[:5] if cell.cell_type == "markdown")
    if not (first.cell_type == "markdown" and first.source.startswith("# ") and "?" in first.source.partition("\n")[2]):
        yield "The first cell must hold the title and a puzzle with a question mark."
    if not any("image/png" in output.get("data", {}) for cell in rest for output in cell.get("outputs", [])):
        yield "The opening shows no picture."
    if not 3 <= (count := len(re.findall(r"^- ", text, re.MULTILINE))) <= 5:
        yield f"The opening must list 3 to 5 objectives or questions, not {count}."
    if not is_further(notebook) and not re.search(r"\bfollows\b", text):
        yield "The opening must name the lectures that it follows."
    books = list(contents())
    here = books.index(book_of(notebook))
    names = [book.file for book in books[max(0, here - 1) : here] + books[here + 1 : here + 2] if book.available]
    own = [file for file in books[here].files.values() if notebook.path.name not in file]
    links = [f"../{file}" for file in own] if is_further(notebook) else [*names, *own]
    for link in links:
        if f"]({link})" not in text:
            yield f"The opening must link to {link}."


def folding(notebook: Notebook) -> Iterator[str]:
    """Set-up and questions are folded, and a fold is the same for every front end."""
    only = notebooks.plumbing(notebook.node)
    for number, cell in enumerate(notebook.code):
        tagged, jupyter = notebooks.FOLDED in cell.metadata.get("tags", []), cell.metadata.get("jupyter", {})
        if len({tagged, jupyter.get("source_hidden", False), cell.metadata.get("cellView") == "form"}) > 1:
            yield f"Cell {cell.id} is folded for some front ends only: run tools/notebooks.py."
        if not tagged and (number == 0 or only.get(cell.id)):
            yield f"Cell {cell.id} must be folded."
        if tagged and calls(cell, "check"):
            yield f"Cell {cell.id} asks for an answer and must not be folded."


def sections(notebook: Notebook) -> Iterator[str]:
    """Each numbered section ends with a takeaway; each prediction is answered."""
    parts = re.split(r"^## ", "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown"), flags=re.M)[1:]
    numbered = [part for part in parts if re.match(r"\d+\.", part)]
    if len(numbered) < 2:
        yield f"There must be at least two numbered sections, not {len(numbered)}."
    for part in numbered:
        if part.count("**Takeaway.**") != 1:
            yield f"Section {part.splitlines()[0]!r} needs one takeaway."
    asked = sum(len(calls(cell, "predict")) for cell in notebook.code)
    answered = sum("guess" in {word.arg for word in call.keywords} for c in notebook.code for call in calls(c, "say"))
    if asked != answered:
        yield f"{asked} predictions have {answered} answers (course.say(…, guess=guess))."


def closing(notebook: Notebook) -> Iterator[str]:
    titles = [text for level, text in notebook.headings() if level == 2]
    if titles[-4:] != CLOSING:
        yield f"It must close with the sections {', '.join(CLOSING)}; there are {', '.join(titles[-4:])}."
    text = {name: "\n".join(piece for piece in notebook.section(name) if isinstance(piece, str)) for name in CLOSING}
    if (count := len(re.findall(r"^- ", text["What to try next"], re.MULTILINE))) != 3:
        yield f"There must be three things to try next, not {count}."
    for line in re.findall(r"^- .*$", text["Papers"], re.MULTILINE) or ["the empty list"]:
        if not re.search(r"\b(19|20)\d\d\b", line):
            yield f"A paper has no year: {line}"


def words(notebook: Notebook) -> Iterator[str]:
    for identity, text in prose(notebook):
        for private, standard in WORDS.items():
            if match := re.search(rf"\b({private})\b", text, re.IGNORECASE):
                yield f"Cell {identity} says {match.group()!r}; the field says: {standard}."


def sentences(notebook: Notebook) -> Iterator[str]:
    """Short on the average, and none that needs two breaths."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and "## Papers" not in cell.source:
            text = re.sub(r"\$\$.*?\$\$|^(#|- ).*$|\]\([^)]*\)", " ", cell.source, flags=re.DOTALL | re.MULTILINE)
            found += [(cell.id, part) for part in re.split(r"(?<=[.?!:])[*)]*\s+|\n\n", text) if len(part.split()) > 2]
    counts = [len(part.split()) for _, part in found]
    if (average := sum(counts) / len(counts)) > AVERAGE_WORDS:
        yield f"A sentence has {average:.1f} words on the average, over {AVERAGE_WORDS}."
    for (identity, part), count in zip(found, counts, strict=True):
        if count > MOST_WORDS:
            yield f"Cell {identity} has a sentence of {count} words, over {MOST_WORDS}: {part[:60]!r} …"


def widths(notebook: Notebook) -> Iterator[str]:
    for cell, output in notebook.outputs:
        data = output.get("data", {})
        text = "" if "image/png" in data else output.get("text") or data.get("text/plain") or ""
        if wide := [line for line in text.splitlines() if len(line) > COLUMNS]:
            yield f"Cell {cell.id} prints a line of {len(wide[0])} columns, over {COLUMNS}."
    if (total := sum(len(str(output)) for _, output in notebook.outputs)) > MAX_OUTPUT_BYTES:
        yield f"The outputs take {total:,} bytes, over {MAX_OUTPUT_BYTES:,}."


RULES = (
    sizes, opening, folding, sections, closing, words, sentences, widths, conventions.imports, conventions.headings,
    conventions.repetitions, conventions.formulas, conventions.lengths, conventions.exercises, conventions.identities,
    conventions.execution, conventions.outputs, conventions.pictures, conventions.cards, conventions.addresses,
)  # fmt: skip
