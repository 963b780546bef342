"""From a key press on a slider to the first frame with the new picture, in JupyterLab and Chromium on this machine.

One figure drawn by `widgets.explore` and by `interact` with `plt.show`, on a fast line and with 150 ms added to each
message between page and kernel. How long the kernel draws the notebooks' own figures, `cold_start` tells.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import lab
import nbformat
import numpy as np

from benchmarks.timing import Row, row, rows

PRESSES, WARM_UP, ROUNDS = 5, 1, 4
STEPS, STEP_SECONDS = 20, 0.25  # a reader who looks at each picture
DELAYS = {"on a fast line": 0, "with 150 ms added to each message": 150}
TURN = {"ArrowLeft": "ArrowRight", "ArrowRight": "ArrowLeft"}

CURVES = """
import numpy as np
from dlscale.page import figures, widgets
x = np.linspace(0, 10, 400)
values = np.linspace(0.5, 2.5, 41).round(2).tolist()
decorate = dict(xlim=(0, 10), ylim=(-1.1, 1.1), xlabel="time (s)", ylabel="displacement (m)")

def make(figure):
    axes = figures.axes(figure)
    (line,) = axes.plot([], [])
    axes.set(**decorate)

    def update(frequency):
        line.set_data(x, np.sin(frequency * x))
        return [line]

    return update

def told(frequency):
    return f"A wave of frequency {frequency}."
"""
EXPLORE = "widgets.explore(make, alt=told, frequency=widgets.slider('explore', values, 0.5))"
NEW = "widgets.explore(make, alt=told, remembers=True, frequency=widgets.slider('new', values))"  # keeps nothing
INTERACT = """
import ipywidgets, matplotlib.pyplot as plt

def draw(interact):
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    axes.plot(x, np.sin(interact * x))
    axes.set(**decorate)
    plt.show()

ipywidgets.interact(draw, interact=ipywidgets.SelectionSlider(options=values, value=1.5))
"""


CHANGE = """(control, limit) => ({change: new Promise(resolve => {
    const images = () => dlscale.images(control.closest('.jp-Cell'));
    const source = image => image.complete && image.naturalWidth ? image.src : '';
    const before = images().map(source).join(), start = performance.now();
    let pressed = null;
    control.ownerDocument.addEventListener('keydown', event => { pressed = event.timeStamp; },
                                           {capture: true, once: true});
    const frame = () => {
        const now = performance.now(), sources = images().map(source);
        if (pressed !== null && sources.length && sources.every(Boolean) && sources.join() !== before)
            resolve(now - pressed);
        else if (now - start > limit) resolve(null);
        else requestAnimationFrame(frame);
    };
    requestAnimationFrame(frame);
})})"""


def latency(notebook: lab.OpenNotebook, slider: lab.Locator, key: str, limit: float = 10) -> float:
    """Press a key; return the milliseconds until another picture stood in the page, NaN if none came in `limit` s."""
    slider.focus()
    waiting = slider.evaluate_handle(CHANGE, 1000 * limit)
    notebook.page.keyboard.press(key)
    milliseconds = waiting.evaluate("waiting => waiting.change")
    return np.nan if milliseconds is None else milliseconds


def presses(notebook: lab.OpenNotebook, slider: lab.Locator, count: int) -> Iterator[float]:
    """Yield milliseconds of `count` key presses, there and back, each after the one before has been drawn."""
    place = "slider => [slider.value, slider.min, slider.max]"
    value, low, high = slider.evaluate(place) if slider.get_attribute("type") else ("1", "0", "2")
    if low == high:
        raise ValueError("a slider with a single value cannot be timed")
    key = "ArrowLeft" if value == high else "ArrowRight"
    for _ in range(count):
        yield latency(notebook, slider, key)
        notebook.settle()
        key = TURN[key]


def stepping(notebook: lab.OpenNotebook, slider: lab.Locator) -> Iterator[float]:
    """Yield milliseconds of steps through a slider from its start, four a second, to frames that nobody has seen."""
    for _ in range(STEPS):
        start = time.monotonic()
        yield latency(notebook, slider, "ArrowRight")
        time.sleep(max(0.0, start + STEP_SECONDS - time.monotonic()))
    notebook.settle()


def baseline(page: lab.Page, address: str) -> Iterator[Row]:
    with lab.opened(page, address.format("baseline.ipynb")) as notebook:
        for line, delay in DELAYS.items():
            page.evaluate("delay => { dlscale.delay = delay; }", delay)
            explore = notebook.slider("explore")
            sliders = {
                "interact and plt.show": page.locator(".widget-slider").get_by_role("slider"),
                "widgets.explore, a new frame": notebook.slider("new"),
                "widgets.explore, a kept frame": explore,
            }
            walk = list(stepping(notebook, explore))  # before anything else is kept
            times: dict[str, list[list[float]]] = {name: [] for name in sliders}
            for _ in range(ROUNDS):
                for name, slider in sliders.items():
                    times[name].append(list(presses(notebook, slider, WARM_UP + PRESSES))[WARM_UP:])
            task = f"Slider to picture, one figure, {line}"
            yield from rows(task, {name: np.median(rounds, axis=1) for name, rounds in times.items()}, "ms")
            for name, rounds in times.items():
                yield row(task, f"{name}: 95 of 100 presses within", np.quantile(rounds, [0.95]), "ms")
            yield row(task, "widgets.explore, four new steps a second", np.array(walk), "ms")


def run() -> Iterator[Row]:
    if lab.find_chromium() is None:
        raise FileNotFoundError("Chromium is not installed: sliders cannot be timed.")
    with tempfile.TemporaryDirectory() as temporary:
        cells = [nbformat.v4.new_code_cell(source) for source in (CURVES, EXPLORE, NEW, INTERACT)]
        metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=metadata), Path(temporary, "baseline.ipynb"))
        with lab.server(Path(temporary)) as address, lab.chromium() as browser, lab.page(browser) as page:
            yield from baseline(page, address)
