"""From a key press on a slider to the first frame with the new picture, in JupyterLab and Chromium on this machine.

First one figure drawn by `widgets.explore` and by `interact` with `plt.show`; then every slider of every notebook.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import lab
import nbformat
import numpy as np

from benchmarks.timing import Row, row, rows

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
PRESSES, WARM_UP, ROUNDS = 5, 1, 7
TURN = {"ArrowLeft": "ArrowRight", "ArrowRight": "ArrowLeft"}

CURVES = """
import numpy as np
from dlscale.page import figures, widgets
x = np.linspace(0, 10, 400)
values = np.linspace(0.5, 2.5, 41).round(2).tolist()
decorate = dict(xlim=(0, 10), ylim=(-1.1, 1.1), xlabel="time (s)", ylabel="displacement (m)")
"""
EXPLORE = """
def make(figure):
    axes = figures.axes(figure)
    (line,) = axes.plot([], [])
    axes.set(**decorate)

    def update(frequency):
        line.set_data(x, np.sin(frequency * x))
        return [line]

    return update

widgets.explore(make, alt=lambda frequency: f"A wave of frequency {frequency}.",
                frequency=widgets.slider("explore", values))
"""
INTERACT = """
import ipywidgets, matplotlib.pyplot as plt

def draw(interact):
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    axes.plot(x, np.sin(interact * x))
    axes.set(**decorate)
    plt.show()

ipywidgets.interact(draw, interact=ipywidgets.SelectionSlider(options=values, value=1.5))
"""


def presses(notebook: lab.OpenNotebook, slider: lab.Locator, count: int) -> Iterator[float]:
    """Yield milliseconds of `count` key presses, each after the one before has been drawn."""
    key, since_turn = "ArrowRight", 0
    while count:
        before = slider.get_attribute("aria-valuenow")
        at_end = before == slider.get_attribute(f"aria-value{'max' if key == 'ArrowRight' else 'min'}")
        if at_end:
            key, since_turn = TURN[key], since_turn + 1
            if since_turn > 1:
                raise ValueError("a slider with a single value cannot be timed")
            continue
        since_turn, count = 0, count - 1
        milliseconds = notebook.latency(slider, key)
        yield np.nan if milliseconds is None else milliseconds


def baseline(page: lab.Page, address: str) -> Iterator[Row]:
    with lab.opened(page, address.format("baseline.ipynb")) as notebook:
        times: dict[str, list[float]] = {"explore": [], "interact": []}
        for _ in range(ROUNDS):
            for label, medians in times.items():
                medians.append(float(np.median(list(presses(notebook, notebook.slider(label), WARM_UP + 5))[WARM_UP:])))
    names = {"widgets.explore": "explore", "interact and plt.show": "interact"}
    seconds = {name: np.array(times[label]) for name, label in names.items()}
    yield from rows("Slider to picture, one figure both ways", seconds, "ms")


def each_slider(page: lab.Page, address: str, path: Path) -> Iterator[Row]:
    with lab.opened(page, address.format(path.name)) as notebook:
        for slider in notebook.sliders():
            times = np.array(list(presses(notebook, slider, WARM_UP + PRESSES))[WARM_UP:])
            idle = int(np.isnan(times).sum())
            note = f"{idle} of {PRESSES} key presses changed no picture" if idle else ""
            seen = times[~np.isnan(times)] if idle < PRESSES else times
            yield row(f"Slider to picture, {path.stem}", notebook.label(slider), seen, "ms", note=note)


def run() -> Iterator[Row]:
    if lab.find_chromium() is None:
        raise FileNotFoundError("Chromium is not installed: sliders cannot be timed.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(NOTEBOOKS, Path(temporary) / "notebooks"))
        paths = sorted(folder.glob("*.ipynb"))
        cells = [nbformat.v4.new_code_cell(source) for source in (CURVES, EXPLORE, INTERACT)]
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), folder / "baseline.ipynb")
        with lab.server(folder) as address, lab.browser() as page:
            yield from baseline(page, address)
            for path in paths:
                yield from each_slider(page, address, path)
