"""Text and tables that a notebook shows formatted, with plain text under them for terminals."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

WIDTH = 88  # columns of plain text


class Markdown(str):
    """Text that a notebook shows formatted."""

    __repr__ = _repr_markdown_ = str.__str__


class Shown:
    """What a notebook shows in several MIME types, "text/plain" among them, and the metadata of that output."""

    def __init__(self, bundle: dict[str, Any], **metadata: Any) -> None:
        self.bundle, self.metadata = bundle, metadata

    def __repr__(self) -> str:
        return self.bundle["text/plain"]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.bundle, self.metadata


def show(bundle: dict[str, Any], **metadata: Any) -> None:
    """Show a bundle of MIME types at once, wherever in a cell this is called."""
    from IPython.display import display  # here, since what runs a trial needs no notebook

    display(Shown(bundle, **metadata))


def number(value: float) -> str:
    """Three significant digits at most, with a true minus sign."""
    return f"{float(f'{value:.3g}'):,.9g}".replace("-", "−")


def wrapped(text: str) -> str:
    """Plain text whose lines have at most `WIDTH` columns."""
    return "\n".join(textwrap.fill(line, WIDTH) for line in text.splitlines())


def say(text: str, guess: Any = None) -> None:
    """Show a sentence or two of Markdown, whose numbers come from the run.

    With the `guess` of a question (what `widgets.predict` returned), the text answers it. The output's metadata names
    the question, so that a page without a kernel can answer its reader, too.
    """
    if guess is not None and guess.value is not None:
        text = f"You said *{guess.value}*. Measured: {text}"
    plain = re.sub(r"\*\*|\$|(?<!\w)\*(?=\S)|(?<=\S)\*(?!\w)", "", text)
    metadata = {} if guess is None else {"dlscale": {"guess": guess.question}}
    show({"text/markdown": text, "text/plain": wrapped(plain)}, **metadata)


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Markdown:
    """A Markdown table; a `|` within a cell is escaped."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    lines = [headings, ["---"] * len(headings), *cells]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Show a Markdown table, with aligned plain text under it."""
    rows = [[str(cell) for cell in row] for row in rows]
    show({"text/markdown": markdown_table(headings, rows), "text/plain": aligned(headings, rows)})


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in plain text of at most `WIDTH` columns, two spaces apart: the widest cells are wrapped."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    while sum(widths) + 2 * len(widths) - 2 > WIDTH:
        widths[widths.index(max(widths))] -= 1
    lines = []
    for row in [headings, ["-" * width for width in widths], *rows]:
        cells = (textwrap.wrap(cell, width) or [""] for cell, width in zip(row, widths, strict=True))
        for parts in zip_longest(*cells, fillvalue=""):
            lines.append("  ".join(map(str.ljust, parts, widths)).rstrip())
    return "\n".join(lines)
