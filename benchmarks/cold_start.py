"""Each notebook from its kernel's start to its end, nothing compiled before, over the calibration beside it.

Then, in the same kernel, how long it draws a frame of each control of its explorers: what a slider waits for.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import lab
import nbformat
import numpy as np
import psutil
from nbclient import NotebookClient

from benchmarks import calibration
from benchmarks.timing import Row, row
from dlscale.course.contents import paths

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LESSON_SECONDS, FURTHER_SECONDS = 20, 45  # on the machine of calibration.QUIET_SECONDS
FIRST_PICTURE_SECONDS = 15
FRAME_MS = 100  # for one frame
FRAMES = """
import json, time
from dlscale.page import widgets

def milliseconds(explorer, name, control):
    values = [value for value in control.values if value != control.start][:5]
    begin = time.perf_counter()
    for value in values:
        explorer.draw(explorer.start | {name: value})
    return 1000 * (time.perf_counter() - begin) / len(values)

print(json.dumps([milliseconds(e, *control) for e in widgets.explorers for control in e.controls.items()]))
"""


class Cold(NamedTuple):
    """Seconds from the kernel's start: to the first picture, to the end; and of the processor, children included."""

    first_picture: float
    wall: float
    processor: float


def cold(path: Path) -> tuple[Cold, list[float]]:
    """Run the notebook in a new kernel that finds no compiled program; also milliseconds of a frame of each control."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(FRAMES))
    pictures, wall, processor = [], 0.0, 0.0

    def executed(cell: nbformat.NotebookNode, cell_index: int, **_: object) -> None:
        nonlocal wall, processor
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            pictures.append(perf_counter() - start)
        if cell_index < len(notebook.cells) - 1:
            wall = perf_counter() - start
            processor = sum(psutil.Process(client.km.provisioner.pid).cpu_times()[:4])

    client = NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        on_cell_executed=executed,
        resources={"metadata": {"path": str(path.parent)}},
    )
    with tempfile.TemporaryDirectory() as programs:
        start = perf_counter()
        client.execute(env=os.environ | lab.keep_programs(Path(programs)))
    return Cold(pictures[0], wall, processor), json.loads(notebook.cells[-1].outputs[0].text)


def run() -> Iterator[Row]:
    calibration.once()
    before = calibration.once()
    for path in paths(NOTEBOOKS):
        (seconds, frames), after = cold(path), calibration.once()
        wall, processor = ((before[name] + after[name]) / 2 for name in ("whole", "processor"))
        before, task = after, f"{path.stem}, from cold: ratio to the calibration"
        budget = LESSON_SECONDS if path.parent == NOTEBOOKS else FURTHER_SECONDS
        limits = {"wall": budget, "first_picture": FIRST_PICTURE_SECONDS}
        for name, value in seconds._asdict().items():
            ratio, limit = value / (processor if name == "processor" else wall), limits.get(name)
            over = limit is not None and ratio > limit / calibration.QUIET_SECONDS
            note = f"OVER its budget of {limit / calibration.QUIET_SECONDS:.2f}" if over else ""
            yield row(task, name.replace("_", " "), np.array([value]), "s", ratio, note)
        note = f"a frame took over {FRAME_MS} ms" if max(frames) > FRAME_MS else ""
        yield row(
            f"{path.stem}, the kernel's part of a move", f"{len(frames)} controls", np.array(frames), "ms", note=note
        )
