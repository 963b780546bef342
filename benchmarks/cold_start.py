"""Seconds from starting a notebook's kernel to its first picture and to its end: nothing compiled before, and again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from time import perf_counter

import nbformat
import numpy as np
from nbclient import NotebookClient

from benchmarks.timing import table

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def run(path: Path, programs: str) -> tuple[float, float]:
    """Run the notebook with compiled programs kept in the folder `programs`: seconds to first picture, to the end."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = programs
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    notebook = nbformat.read(path, as_version=4)
    pictures: list[float] = []

    def executed(cell, **_: object) -> None:
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            pictures.append(perf_counter() - start)

    client = NotebookClient(
        notebook, timeout=300, on_cell_executed=executed, resources={"metadata": {"path": NOTEBOOKS}}
    )
    start = perf_counter()
    client.execute()
    return pictures[0], perf_counter() - start


def main(rounds: int = 3) -> None:
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cold, again = [], []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as programs:
                cold.append(run(path, programs))
                again.append(run(path, programs))
        (first, whole), (first_again, whole_again) = np.transpose(cold), np.transpose(again)
        seconds = {
            "first start: whole notebook": whole,
            "first start: to the first picture": first,
            "later start: whole notebook": whole_again,
            "later start: to the first picture": first_again,
        }
        table(f"Cold start of {path.stem}", seconds, "first start: whole notebook")


if __name__ == "__main__":
    main()
