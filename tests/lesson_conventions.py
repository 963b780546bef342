"""How a lesson and a further notebook read: their rules, beside those of `conventions`, which hold for any."""

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

# Private words, in the meaning that earlier texts gave them, and what the field says. Ordinary English passes.
WORDS = {
    r"\b(?<!all )the way (?:there|back)|\bthere and back\b|\bon the way forward": "forward pass, backward pass",
    r"\bwhat is kept\b|\bkept for the\b": "saved activations",
    r"(?:^|[.,;:(–] ?|\b(?:layer|convolution|gradient|output)s? )by (?:data|model|columns|rows)\b": (
        "data parallel, tensor parallel, column-parallel, row-parallel"
    ),
    r"\b(?:each|every|other|several|different|\d+) moments?\b|\bmoments? of (?:training|the run)\b": "step, time step",
    r"(?<!\bin )\bthe middle of\b|\bhalf of them (?:below|above)\b": "median",
    r"\bthe least (?:and|to) the most\b": "minimum and maximum, range",
    r"\btold apart\b": "distinguishable; we cannot distinguish A from B",
    r"\bhangs on\b|\bhang on (?:the|its|their|how)\b|\bowed to\b": "depends on, is due to",
    r"\bjudged on (?:the )?(?:held-out|validation)\b|\bpromised (?:the )?most\b": "chosen on the validation set",
    r"\b(?:deep|ordinary|easy|hard|harder|same|other|each|every|this|both) grounds?\b(?! truth)": "task, setting",
    r"\b(?:this|each|every|these|all|\d+) stor(?:y|ies)\b|\bis a story\b|\bruns of a kind\b": "run, configuration",
    r"\bfresh (?:page|memory)|\bnew memory\b(?!-)": "memory allocation, page faults",
    r"\boperations (?:for (?:each|every)|a) byte\b": "arithmetic intensity (FLOP per byte)",
    r"\bthousand million\b|\b[mb]illion operations (?:a|each|per) second\b": "GFLOP/s",
    r"\bthe roof's\b|\blimit is (?:the )?memory's\b": "memory-bound, compute-bound",
    r"\bdice\b|\bthrown\b(?! away| out)|\bnumbers (?:are|were) drawn\b": "random, sampled",
    r"\bturned round\b|(?:, |\bwith the |\bhave the )weights first\b": "transposed",
    r"(?<!what )\b(?:goes|went) on\b": "continues, keeps training",
    r"(?<!no )\bsooner\b(?! or later)": "faster; in fewer steps, in less time",
    r"\bby hand\b": "from scratch",
    r"\bof the same intensity\b": "with the same intensity",
}


def book_of(notebook: Notebook):
    """The entry of `contents.toml` for a notebook; None for others."""
    name = notebooks.subject(notebook.path.stem)
    return next((book for book in contents() if book.name == name), None)


def is_further(notebook: Notebook) -> bool:
    return notebook.path.stem.endswith("_further")


def prose(notebook: Notebook) -> Iterator[tuple[str, str]]:
    """What a reader reads, with the cell's id: Markdown without code and formulas, captions and printed text."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            yield cell.id, plain(cell.source)
        for output in cell.get("outputs", []):
            yield cell.id, printed(output) + "\n" + output.get("metadata", {}).get("image/png", {}).get("alt", "")


def plain(markdown: str) -> str:
    """Markdown with a word in place of each piece of code and each formula, and without where links lead."""
    text = re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$|\$[^$]*\$", " x ", markdown, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


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
    count, further = len(re.findall(r"^- ", text, re.MULTILINE)), is_further(notebook)
    if not further and count not in (3, 4):
        yield f"The opening must list three or four objectives, not {count}."
    if further and not 2 <= count <= min(5, text.count("?")):
        yield f"The opening must list two to five questions, one for each part, not {count}."
    if not further and not re.search(r"\bfollows the lectures?\b", text):
        yield "The opening must name the lectures that it follows."
    before, after = around(notebook)
    for link in before + after:
        if f"]({link})" not in text:
            yield f"The opening must link to {link}."


def around(notebook: Notebook) -> tuple[list[str], list[str]]:
    """Where links must lead: the lesson before; the lesson after, and the subject's other notebook."""
    books, book = list(contents()), book_of(notebook)
    if is_further(notebook):
        return [], [f"../{book.file}"]
    here = books.index(book)
    before, after = ([book.file for book in some] for some in (books[:here][-1:], books[here + 1 :][:1]))
    return before, [*after, *(file for file in book.files.values() if file != book.file)]


def folding(notebook: Notebook) -> Iterator[str]:
    """Set-up and questions are folded, and a fold is the same for every front end."""
    only = notebooks.plumbing(notebook.node)
    for cell in notebook.code:
        tagged, jupyter = notebooks.FOLDED in cell.metadata.get("tags", []), cell.metadata.get("jupyter", {})
        if len({tagged, jupyter.get("source_hidden", False), cell.metadata.get("cellView") == "form"}) > 1:
            yield f"Cell {cell.id} is folded for some front ends only: run tools/notebooks.py."
        if not tagged and only.get(cell.id):
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
    for link in around(notebook)[1]:
        if f"]({link})" not in text["Where to go on"]:
            yield f"'Where to go on' must link to {link}."
    for line in re.findall(r"^- .*$", text["Papers"], re.MULTILINE) or ["the empty list"]:
        if not re.search(r"\b(19|20)\d\d\b", line):
            yield f"A paper has no year: {line}"
        if "arxiv" in line.lower() and not re.search(r"\d{4}\.\d{4,5}|[a-z-]+/\d{7}", line):
            yield f"A paper of arXiv has no number: {line}"


def words(notebook: Notebook) -> Iterator[str]:
    for identity, text in prose(notebook):
        for private, standard in WORDS.items():
            if match := re.search(private, " ".join(text.split()), re.IGNORECASE):
                yield f"Cell {identity} says {match.group()!r}; the field says: {standard}."


def sentences(notebook: Notebook) -> Iterator[str]:
    """Short on the average, and none that needs two breaths."""
    found = [
        (cell.id, sentence)
        for cell in notebook.cells
        if cell.cell_type == "markdown" and "## Papers" not in cell.source
        for sentence in split(cell.source)
    ]
    counts = [len(re.findall(r"\w[\w'’.-]*", sentence)) for _, sentence in found]
    if (average := sum(counts) / max(len(counts), 1)) > AVERAGE_WORDS:
        yield f"A sentence has {average:.1f} words on the average, over {AVERAGE_WORDS}."
    for (identity, sentence), count in zip(found, counts, strict=True):
        if count > MOST_WORDS:
            yield f"Cell {identity} has a sentence of {count} words, over {MOST_WORDS}: {sentence[:60]!r} …"


def split(markdown: str) -> list[str]:
    """The sentences of its paragraphs and lists; headings and tables have none."""
    text = re.sub(r"^ *[|#].*$", "", plain(markdown), flags=re.MULTILINE)
    paragraphs = re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", text)
    sentences = [part for paragraph in paragraphs for part in re.split(r"(?<=[.?!:])[\W_]*\s", paragraph)]
    return [sentence for sentence in sentences if len(sentence.split()) > 2]


def widths(notebook: Notebook) -> Iterator[str]:
    for cell, output in notebook.outputs:
        data = output.get("data", {})
        text = "" if "image/png" in data else output.get("text") or data.get("text/plain") or ""
        if wide := [line for line in text.splitlines() if len(line) > COLUMNS]:
            yield f"Cell {cell.id} prints a line of {len(wide[0])} columns, over {COLUMNS}."
    if (total := sum(len(str(output)) for _, output in notebook.outputs)) > MAX_OUTPUT_BYTES:
        yield f"The outputs take {total:,} bytes, over {MAX_OUTPUT_BYTES:,}."


RULES = (
    sizes, opening, folding, sections, closing, words, sentences, widths, *conventions.RULES,
)  # fmt: skip
