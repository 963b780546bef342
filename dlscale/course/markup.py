"""Text that a notebook shows formatted, and tables in it."""

from collections.abc import Iterable, Sequence


class Text(str):
    """Text that a notebook shows as it is."""

    __repr__ = str.__str__


class Markdown(Text):
    """Text that a notebook shows formatted."""

    _repr_markdown_ = str.__str__


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Markdown:
    """A Markdown table; a `|` within a cell is escaped."""
    lines = [headings, ["---"] * len(headings), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))
