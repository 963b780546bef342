"""Sliders that answer at once: `explore` draws what stays once and only what moves again."""

from __future__ import annotations

import html
import itertools
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ipywidgets
from IPython.display import display
from ipywidgets import Widget
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from dlscale.course import records
from dlscale.course.records import Experiment
from dlscale.lab import devices
from dlscale.page import figures

Update = Callable[..., Iterable[Artist] | None]
Make = Callable[[Figure], Update]
Alt = Callable[..., str]

explorers: list[Explorer] = []  # those of this kernel, for `check_extremes`


def slider(label: str, values: Sequence[float], value: float | None = None, text: str = "{:g}") -> Widget:
    """A slider over the given values, in their order, even or not; it starts at `value`, or in the middle.

    Raises ValueError if `value` is not among them.
    """
    values = list(values)
    start = values[len(values) // 2] if value is None else value
    if start not in values:
        raise ValueError(f"The slider {label!r} starts at {start!r}, which is not among its values: {values!r}.")
    return ipywidgets.SelectionSlider(options=[(text.format(v), v) for v in values], value=start, **_looks(label))


def menu(label: str, options: Sequence[str], value: str | None = None) -> Widget:
    """A drop-down menu; it starts at `value`, or at the first option."""
    return ipywidgets.Dropdown(options=list(options), value=options[0] if value is None else value, **_looks(label))


def _looks(label: str) -> dict[str, Any]:
    looks = {"style": {"description_width": "9em"}, "layout": {"width": "32em", "max_width": "98%"}}
    return looks | {"description": label, "tooltip": label}  # the tooltip is the control's accessible name


def predict(question: str, options: Sequence[str]) -> Widget:
    """Ask for a guess before an experiment. The returned widget's `value` is the reader's choice, None before it."""
    layout = {"width": "max-content"}
    guess = ipywidgets.RadioButtons(options=list(options), value=None, layout=layout, tooltip=question)
    display(ipywidgets.VBox([ipywidgets.HTML(f"<b>{html.escape(question)}</b>"), guess]))
    return guess


def explore(make: Make, *, alt: Alt, width: float = 7.2, height: float = 3.4, **controls: Widget) -> None:
    """Show a figure of width × height inches that follows its controls; it stays as a picture in a saved notebook.

    `make(figure)` draws what stays and returns `update(**values)`, which moves what moves and returns those artists;
    only they are drawn again, over the rest. It returns None where axes or titles changed: then all is drawn again.
    `alt(**values)` says in a sentence what is to be seen; it stands under the figure and in the saved picture.
    `controls` are widgets with a `value`, such as `slider` and `menu` make. An error in `update` is shown in place of
    the figure.
    """
    explorers.append(Explorer(make, alt, Figure((width, height), dpi=100, layout="constrained"), controls))


class Explorer:
    """What `explore` shows: controls, figure and caption."""

    def __init__(self, make: Make, alt: Alt, figure: Figure, controls: dict[str, Widget]) -> None:
        self.alt, self.figure, self.controls = alt, figure, controls
        self.lock = threading.Lock()  # callbacks come on another thread than cells do
        self.error: BaseException | None = None
        self.canvas = figures.FigureCanvasAgg(figure)
        self.update = make(figure)
        self.background: Any = None
        self.moving: list[Artist] = []
        self.caption = ipywidgets.HTML()
        display(ipywidgets.VBox([*controls.values(), self.caption]))
        bundle, metadata = self._draw()
        self.handle = display(bundle, raw=True, metadata=metadata, display_id=True)
        for control in controls.values():
            control.observe(self._on_change, "value")

    def _draw(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw the present values; return the picture as a MIME bundle and its metadata."""
        values = {name: control.value for name, control in self.controls.items()}
        moved = self.update(**values)
        if moved is None or self.background is None:
            self._draw_all(moved)
        else:
            self.canvas.restore_region(self.background)
        for artist in self.moving:
            self.figure.draw_artist(artist)
        text = self.alt(**values)
        self.caption.value = f'<p role="status" style="line-height:1.4">{html.escape(text)}</p>'
        self.picture = figures.png(self.figure, compression=1)
        return {"image/png": self.picture, "text/plain": text}, {"image/png": {"alt": text}}

    def _draw_all(self, moved: Iterable[Artist] | None) -> None:
        for artist in self.moving:
            artist.set_animated(False)
        self.moving = sorted(moved or (), key=Artist.get_zorder)
        for artist in self.moving:
            artist.set_animated(True)  # left out of the background
        self.canvas.draw()
        self.figure.set_layout_engine("none")  # nothing jumps from here on
        self.background = self.canvas.copy_from_bbox(self.figure.bbox) if self.moving else None

    def _on_change(self, _change: Any) -> None:
        with self.lock:
            try:
                bundle, metadata = self._draw()
                self.error = None
            except Exception as error:  # an error in a callback would vanish without a trace
                self.error = error
                lines = "".join(traceback.format_exception(error)[-3:])
                self.caption.value = f'<pre role="alert" style="color:#B3261E">{html.escape(lines)}</pre>'
                bundle, metadata = {"text/plain": f"This setting failed: {error!r}"}, {}
            self.handle.update(bundle, raw=True, metadata=metadata)

    def at(self, values: dict[str, Any]) -> bytes:
        """Set controls and return the picture. Raises AssertionError if its callback failed."""
        for name, value in values.items():
            self.controls[name].value = value
        if self.error:
            raise AssertionError(f"Explorer {explorers.index(self)} failed at {values}.") from self.error
        return self.picture


def check_extremes() -> None:
    """Move every control of every explorer to its ends, alone and together, and each menu to all its entries.

    Raises AssertionError for a callback that failed and for a control that never changed the picture.
    """
    for number, explorer in enumerate(explorers):
        start = {name: control.value for name, control in explorer.controls.items()}
        ends = {name: _ends(control) for name, control in explorer.controls.items()}
        for name, values in ends.items():
            if len({explorer.at(start | {name: value}) for value in values}) < 2:
                raise AssertionError(f"Control {name!r} of explorer {number} never changed the picture.")
        for corner in itertools.product(*((values[0], values[-1]) for values in ends.values())):
            explorer.at(dict(zip(ends, corner, strict=True)))
        explorer.at(start)


def _ends(control: Widget) -> list[Any]:
    if hasattr(control, "options"):
        values = [value for _, value in control._options_full]
        return [values[0], values[-1]] if isinstance(control, ipywidgets.SelectionSlider) else values
    return [False, True] if isinstance(control.value, bool) else [control.min, control.max]


class RunStopped(Exception):
    """The reader stopped a run."""


def record_button(chosen: Experiment, folder: Path | None = None) -> None:
    """Show a button that runs the whole and renews the record; pressed again, it stops and keeps what it has."""
    stored = records.read(chosen.id, folder)
    minutes = sum(trial.seconds for trial in stored.trials) / 60 / devices.cores()
    label = f"Run all {len(stored.trials):,} trials again"
    start = ipywidgets.Button(description=label, tooltip=label, layout={"width": "max-content"})
    status = ipywidgets.HTML(f"<p>About {minutes:.0f} minutes here. The record is replaced when all is done.</p>")
    stop, running = threading.Event(), threading.Lock()

    def tell(done: int, planned: int) -> None:
        status.value = f'<p role="status">{done:,} of {planned:,} trials planned so far</p>'
        if stop.is_set():
            raise RunStopped

    def work() -> None:
        with running:
            start.description = "Stop"
            try:
                records.execute(chosen, folder, tell)
                text = "Done. Run the notebook again to see the new record."
            except RunStopped:
                text = "Stopped. The button goes on from here."
            except Exception as error:  # in a thread it would vanish without a trace
                text = f"It failed: {type(error).__name__}: {error}"
            start.description, status.value = label, f'<p role="status">{text}</p>'
            stop.clear()

    def pressed(_: ipywidgets.Button) -> None:
        if running.locked():
            stop.set()
        else:
            threading.Thread(target=work, daemon=True).start()

    start.on_click(pressed)
    display(ipywidgets.VBox([start, status]))
