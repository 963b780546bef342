"""The map: the notebooks of the course, in order, as `contents.toml` lists them."""

import functools
import tomllib
from pathlib import Path
from typing import NamedTuple

from dlscale.course.markup import Markdown, markdown_table


class Item(NamedTuple):
    """What a lecture teaches, and the heading of the section that lets a reader run it; "" until it is there."""

    id: str
    item: str
    section: str = ""


class Notebook(NamedTuple):
    """An entry of `contents.toml`: `minutes` to read and `seconds` for the machine are None until it is available."""

    file: str
    title: str
    question: str
    lecture: str
    items: tuple[Item, ...]
    available: bool = True
    minutes: int | None = None
    seconds: int | None = None

    @property
    def room(self) -> str:
        """The package of the notebook: its name without its number."""
        return self.file.removesuffix(".ipynb").partition("_")[2]


@functools.cache
def contents() -> tuple[Notebook, ...]:
    """The notebooks of the course, in order."""
    entries = tomllib.loads(Path(__file__).with_name("contents.toml").read_text(encoding="utf-8"))
    items = {name: tuple(Item(**item) for item in entry["items"]) for name, entry in entries.items()}
    return tuple(Notebook(f"{name}.ipynb", **entry | {"items": items[name]}) for name, entry in entries.items())


def course_map(folder: str = "") -> Markdown:
    """A table of the notebooks; links to the available ones begin with `folder`, for example "notebooks/"."""
    rows = []
    for book in contents():
        title = f"[{book.title}]({folder}{book.file})" if book.available else book.title
        times = f"{book.minutes} min, {book.seconds} s" if book.available else "in preparation"
        rows.append([book.file[:2], title, book.question, times])
    return markdown_table(("", "Notebook", "Question", "Reading, machine"), rows)
