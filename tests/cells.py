"""Code of the course, run with changes: cells as their last section suggests, solutions as a reader may write them."""

from __future__ import annotations

import math
from collections import UserDict
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import nbformat
import numpy as np

from dlscale.course.exercises import Exercise
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


def changed(exercise: Exercise, *parts: str, **names: Any) -> Any:
    """The answer that the exercise's solution gives with changes, (old, new, old, new, …); the old are found in it."""
    code = exercise.code
    for old, new in zip(parts[::2], parts[1::2], strict=True):
        assert old in code, f"{exercise.id} has no {old!r}"
        code = code.replace(old, new)
    found = {"np": np, "jnp": jnp, "math": math} | names
    exec(code, found)
    return found[exercise.answer]
