"""How long a notebook takes, and what it may take: `python tools/lesson_size.py [NOTEBOOK …]`.

Minutes are computed, not guessed: 200 words of prose or output a minute, ten visible lines of code a minute, two
minutes for an explorer, seven for an exercise, rounded up to five.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode

from dlscale.course.claims import CLAIM_TYPE
from dlscale.course.contents import contents

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


class Size(NamedTuple):
    """What a reader reads, moves and solves."""

    prose: int  # words
    printed: int  # words, those of cards apart
    code: int  # visible lines that are not empty
    widest: int  # columns of the widest visible line
    explorers: int
    exercises: int
    cards: int

    @property
    def minutes(self) -> int:
        """By the formula, rounded up to five."""
        reading = (self.prose + self.printed) / 200 + self.code / 10
        return 5 * -(-round(reading + 2 * self.explorers + 7 * self.exercises) // 5)


# the least and the most of each; minutes beside them
LESSON = (Size(0, 0, 0, 0, 3, 3, 0), Size(2500, 600, 200, 88, 5, 4, 5), 60)
FURTHER = (Size(0, 0, 0, 0, 2, 0, 0), Size(3000, 900, 250, 88, 99, 4, 99), 75)


def size(notebook: NotebookNode) -> Size:
    """Count a stored notebook."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    visible = [cell for cell in code if not cell.metadata.get("jupyter", {}).get("source_hidden")]
    lines = [line for cell in visible for line in cell.source.splitlines() if line.strip()]
    outputs = [output for cell in code for output in cell.outputs]
    data = [output.get("data", {}) for output in outputs]
    return Size(
        prose=sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown"),
        printed=sum(len(printed(output).split()) for output in outputs),
        code=len(lines),
        widest=max(map(len, lines), default=0),
        explorers=sum("image/png" in kinds and "text/plain" in kinds for kinds in data),
        exercises=sum(".check(" in cell.source for cell in code),
        cards=sum(CLAIM_TYPE in kinds for kinds in data),
    )


def printed(output: NotebookNode) -> str:
    """What a reader reads of an output; nothing of a card, which repeats a claim."""
    data = output.get("data", {})
    return "" if CLAIM_TYPE in data else output.get("text") or data.get("text/markdown") or data.get("text/plain") or ""


def complaints(found: Size, further: bool) -> list[str]:
    """What is outside the limits of a lesson, or of a further notebook."""
    least, most, minutes = FURTHER if further else LESSON
    wrong = []
    for name, number, low, high in zip(Size._fields, found, least, most, strict=True):
        if not low <= number <= high:
            wrong.append(f"{name}: {number}, not {low} to {high}.")
    return [*wrong, *([f"{found.minutes} minutes, over {minutes}."] if found.minutes > minutes else [])]


def main(paths: list[str]) -> int:
    for path in map(Path, paths or [FOLDER / file for book in contents() for file in book.files.values()]):
        found = size(nbformat.read(path, as_version=4))
        numbers = ", ".join(f"{name} {number}" for name, number in found._asdict().items())
        wrong = " ".join(complaints(found, path.stem.endswith("_further")))
        print(f"{path.stem}: {found.minutes} minutes; {numbers}. {wrong or 'Within the limits.'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
