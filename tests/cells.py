"""Some code cells of a notebook, run here with changes: what its last section suggests."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path

import nbformat

from dlscale.course.sources import python

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


class Cells(UserDict):
    """The names that the cells define. `changes` to their sources must each be found in some cell that was run."""

    def __init__(self, notebook: str, changes: dict[str, str] | None = None) -> None:
        super().__init__(display=lambda *shown: None)
        self.sources = {cell.id: cell.source for cell in nbformat.read(NOTEBOOKS / f"{notebook}.ipynb", 4).cells}
        self.changes = changes or {}

    def run(self, *identities: str) -> None:
        sources = [self.sources[identity] for identity in identities]
        for old, new in self.changes.items():
            assert any(old in source for source in sources), f"no cell has {old!r}"
            sources = [source.replace(old, new) for source in sources]
        for source in sources:
            exec(python(source), self.data)
