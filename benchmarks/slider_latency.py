"""From a key press on a slider to the first frame with the new picture, in JupyterLab and Chromium on this machine.

First every slider of every notebook; then one figure drawn by `widgets.explore` and by `interact` with `plt.show`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import lab  # noqa: E402

PRESSES, WARM_UP, ROUNDS = 20, 2, 7
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
        milliseconds = notebook.press(slider, key)
        yield np.nan if milliseconds is None else milliseconds
        notebook.settle()


def notebooks(page: lab.Page, address: str, names: list[str]) -> None:
    print(f"Slider to picture, ms, {PRESSES} key presses each")
    print(f"  {'':58}  median     p95   worst")
    for name in names:
        with lab.opened(page, address.format(name)) as notebook:
            for slider in notebook.sliders():
                times = list(presses(notebook, slider, WARM_UP + PRESSES))[WARM_UP:]
                changed = np.array([t for t in times if not np.isnan(t)] or [np.nan])
                same = f"  ({PRESSES - len(changed)} presses changed no picture)" if len(changed) < PRESSES else ""
                median, p95, worst = np.quantile(changed, (0.5, 0.95, 1))
                label = f"{name}, {notebook.label(slider)}"
                print(f"  {label:58}  {median:6.0f}  {p95:6.0f}  {worst:6.0f}{same}", flush=True)


def baseline(page: lab.Page, address: str) -> None:
    with lab.opened(page, address.format("baseline.ipynb")) as notebook:
        times: dict[str, list[float]] = {"explore": [], "interact": []}
        for _ in range(ROUNDS):
            for label, medians in times.items():
                medians.append(float(np.median(list(presses(notebook, notebook.slider(label), WARM_UP + 5))[WARM_UP:])))
    explore, interact = np.array(times["explore"]), np.array(times["interact"])
    print(f"\nThe same figure both ways, ms, median of {ROUNDS} rounds [range]")
    for label, values in (("widgets.explore", explore), ("interact and plt.show", interact)):
        print(f"  {label:24} {np.median(values):6.0f} [{values.min():.0f}, {values.max():.0f}]")
    ratio = interact / explore
    print(f"  {'ratio':24} {np.median(ratio):6.2f} [{ratio.min():.2f}, {ratio.max():.2f}]")


def main() -> None:
    if lab.find_chromium() is None:
        sys.exit("Chromium is not installed: sliders cannot be timed.")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(ROOT / "notebooks", Path(temporary) / "notebooks"))
        names = sorted(path.name for path in folder.glob("*.ipynb"))
        cells = [nbformat.v4.new_code_cell(source) for source in (CURVES, EXPLORE, INTERACT)]
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), folder / "baseline.ipynb")
        with lab.server(folder) as address, lab.browser() as page:
            notebooks(page, address, names)
            baseline(page, address)


if __name__ == "__main__":
    main()
