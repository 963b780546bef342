"""The map: the notebooks of the course, in order, as `contents.toml` lists them."""

import functools
import tomllib
from pathlib import Path
from typing import NamedTuple

from dlscale.course.markup import Markdown, markdown_table


class Item(NamedTuple):
    """What a lecture teaches, and the heading of the section that lets a reader run it.

    The section stands in the lesson, or with `further` in the subject's further notebook.
    """

    id: str
    item: str
    section: str
    further: bool = False


class Further(NamedTuple):
    """The second notebook of a subject."""

    title: str
    minutes: int
    seconds: int


class Notebook(NamedTuple):
    """An entry of `contents.toml`: `minutes` to read and `seconds` for the machine."""

    file: str
    title: str
    question: str
    lecture: str
    items: tuple[Item, ...]
    minutes: int
    seconds: int
    further: Further | None = None

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.file.removesuffix(".ipynb")

    @property
    def room(self) -> str:
        """The package of the notebook: its name without its number."""
        return self.name.partition("_")[2]

    @property
    def files(self) -> dict[str, str]:
        """The files of the subject by title, below notebooks/: the lesson, and the further notebook if it has one."""
        further = {self.further.title: f"further/{self.name}_further.ipynb"} if self.further else {}
        return {self.title: self.file} | further


@functools.cache
def contents() -> tuple[Notebook, ...]:
    """The notebooks of the course, in order."""
    entries = tomllib.loads(Path(__file__).with_name("contents.toml").read_text(encoding="utf-8"))
    items = {name: tuple(Item(**item) for item in entry["items"]) for name, entry in entries.items()}
    further = {name: Further(**entry["further"]) for name, entry in entries.items() if "further" in entry}
    return tuple(
        Notebook(f"{name}.ipynb", **entry | {"items": items[name], "further": further.get(name)})
        for name, entry in entries.items()
    )


def paths(folder: Path) -> list[Path]:
    """The notebooks in a folder and in its folder further/, in the order of the course.

    A further notebook comes before its lesson, which shows claims that it decides.
    """
    found = [*folder.glob("*.ipynb"), *folder.glob("further/*.ipynb")]
    return sorted(found, key=lambda path: (path.stem.removesuffix("_further"), path.parent == folder))


def course_map(folder: str = "") -> Markdown:
    """A table of the subjects; links begin with `folder`, for example "notebooks/".

    A question stands there only where the title asks none.
    """
    rows = []
    for book in contents():
        links = [f"[{title}]({folder}{file})" for title, file in book.files.items()]
        links[0] += "" if "?" in book.title else f"<br>{book.question}"
        times = [str(one.minutes) for one in (book, book.further) if one]
        rows.append([book.file[:2], links[0], times[0], *(links[1:] or [""]), *(times[1:] or [""])])
    return markdown_table(("No.", "Lesson", "Minutes", "Further notebook", "Minutes"), rows)
