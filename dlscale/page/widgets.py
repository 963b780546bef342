"""Explorers: figures that follow controls. The page draws the controls and keeps frames, the kernel draws frames.

`explorer.js` is the page's side. It asks for a setting, as places: the index of a value for each control, the number
itself for a number field. It may name settings nearby, which are drawn while the kernel has nothing else to do.
"""

from __future__ import annotations

import asyncio
import base64
import collections
import html
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from IPython import get_ipython
from IPython.display import display
from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from dlscale.page import figures
from dlscale.page.recording import record_button as record_button

Update = Callable[..., Iterable[Artist] | None]
Make = Callable[[Figure], Update]
Alt = Callable[..., str]

MAX_FRAME_BYTES = 1_000_000  # a figure of the course takes 30 to 80 kB

# Outputs live apart from the page's other scripts there, so that no picture can be found.
ISOLATED = "google.colab" in sys.modules or not {"VSCODE_PID", "VSCODE_CWD"}.isdisjoint(os.environ)

explorers: list[Explorer] = []  # those of this kernel
cell_runs = threading.Event()  # nothing is drawn ahead then: a cell may be timing something


@dataclass(frozen=True)
class Control:
    """A control: its values stay in the kernel, the page knows their texts. Of a number field, `values` are the limits.

    `examples` are the numbers that a page without a kernel offers for the field.
    """

    kind: str
    label: str
    values: Sequence[Any]
    start: Any
    texts: Sequence[str]
    interval: int = 0
    examples: Sequence[float] = ()

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"The {self.kind} {self.label!r} has no values.")
        number_ = self.kind == "number"
        if not (self.values[0] <= self.start <= self.values[1] if number_ else self.start in self.values):
            known = f"{'outside its limits' if number_ else 'which is not among its values'}: {self.values!r}"
            raise ValueError(f"The {self.kind} {self.label!r} starts at {self.start!r}, {known}.")

    def look(self) -> dict[str, Any]:
        """What the page needs to draw it."""
        start = self.start if self.kind == "number" else self.values.index(self.start)
        return {"kind": self.kind, "label": self.label, "texts": self.texts, "start": start, "interval": self.interval}

    def value(self, place: float) -> Any:
        """What stands at a place: the index of a value, or the number itself, which the page may send as an integer."""
        return float(min(max(place, self.values[0]), self.values[1])) if self.kind == "number" else self.values[place]


def slider(label: str, values: Sequence[float], value: float | None = None, text: str = "{:g}") -> Control:
    """A slider over the given values, in their order, even or not; it starts at `value`, or in the middle.

    Raises ValueError if there are no values or `value` is not among them.
    """
    start = [*values][len(values) // 2 :][:1] if value is None else [value]
    return Control("slider", label, [*values], *(start or [None]), [text.format(value) for value in values])


def player(label: str, values: Sequence[float], value: Any = None, text: str = "{:g}", interval: int = 250) -> Control:
    """A slider with a button that plays it from what is shown to the end, a step each `interval` ms or slower."""
    return replace(slider(label, values, value, text), kind="player", interval=interval)


def menu(label: str, options: Sequence[str], value: str | None = None) -> Control:
    """A drop-down menu; it starts at `value`, or at the first option. Raises ValueError as `slider` does."""
    options = [*options]
    return Control("menu", label, options, value if options and value is not None else (options or [""])[0], options)


def number(label: str, value: float, low: float, high: float, examples: Sequence[float] = ()) -> Control:
    """A field for numbers from `low` to `high`. A page without a kernel offers `value` and the `examples`."""
    return Control("number", label, [low, high], value, [str(low), str(high)], examples=[value, *examples])


class Prediction(anywidget.AnyWidget):
    """A reader's guess before an experiment: `value` is the option that was chosen, None before."""

    _esm = Path(__file__).with_name("predict.js")
    _css = Path(__file__).with_name("explorer.css")
    question = traitlets.Unicode().tag(sync=True)
    options = traitlets.List(traitlets.Unicode()).tag(sync=True)
    value = traitlets.Unicode(None, allow_none=True).tag(sync=True)


def predict(question: str, options: Sequence[str]) -> Prediction:
    """Ask for a guess before an experiment; `course.say(…, guess=…)` answers it.

    The saved notebook keeps question and options as text. Raises ValueError for fewer than two options.
    """
    if len(options) < 2:
        raise ValueError(f"A prediction needs at least two options, not {[*options]!r}.")
    guess = Prediction(question=question, options=[*options])
    live, *metadata = guess._repr_mimebundle_()
    text = "\n".join([f"**{question}**", "", *(f"- {option}" for option in options)])
    plain = "\n".join([question, *(f"( ) {option}" for option in options)])
    display(live | {"text/markdown": text, "text/plain": plain}, raw=True, metadata=metadata[0] if metadata else None)
    return guess


def explore(
    make: Make, *, alt: Alt, width: float = 7.2, height: float = 3.4, remembers: bool = False, **controls: Control
) -> None:
    """Show a figure of width × height inches that follows its controls; it stays as a picture in a saved notebook.

    `make(figure)` draws what stays and returns `update(**values)`, which moves what moves and returns those artists;
    only they are drawn again, over the rest. It returns None where axes or titles changed: then all is drawn again.
    `alt(**values)` says in a sentence what is to be seen; it stands under the figure and in the saved picture.
    `controls` are made by `slider`, `player`, `menu` and `number`. An error in `update` is shown in the figure's place.
    With `remembers`, a picture may hang on those shown before: none is kept or drawn ahead.

    Raises TypeError if `make` returns no function or a control is none, ValueError if the picture is too large.
    """
    if strange := [name for name, control in controls.items() if not isinstance(control, Control)]:
        raise TypeError(f"The control {strange[0]!r} must be made by widgets.slider, player, menu or number.")
    explorers.append(Explorer(make, alt, Figure((width, height), dpi=100, layout="constrained"), controls, remembers))


def explore_axes(paint: Callable[..., None], *, alt: Alt, columns: int = 1, **options: Any) -> None:
    """As `explore`, of `columns` axes side by side: they are emptied, and `paint(*axes, **values)` draws all anew."""

    def make(figure: Figure) -> Update:
        axes = [figures.axes(figure)] if columns == 1 else [*figures.axes(figure, columns)]

        def update(**values: Any) -> None:
            with rc_context(figures.STYLE):
                for ax in axes:
                    ax.clear()
                    ax.tick_params(grid_color=figures.STYLE["grid.color"])  # ticks are made later, without the style
                paint(*axes, **values)

        return update

    explore(make, alt=alt, **options)


class Page(anywidget.AnyWidget):
    """What the page's side knows; it lives as long as the kernel and is never saved."""

    _esm = Path(__file__).with_name("explorer.js")
    _css = Path(__file__).with_name("explorer.css")
    about = traitlets.Dict().tag(sync=True)


class Explorer:
    """What `explore` shows: the saved picture, and the page's side, which takes that picture's place."""

    def __init__(self, make: Make, alt: Alt, figure: Figure, controls: dict[str, Control], remembers: bool) -> None:
        self.alt, self.controls, self.figure = alt, controls, figures.FigureCanvasAgg(figure).figure
        with figures.drawing:  # what the page asks comes on another thread than cells do, at times on both
            self.update = make(figure)
        if not callable(self.update):
            raise TypeError(f"make(figure) must return the function update(**values), not {self.update!r}.")
        self.background: Any = None
        self.moving: list[Artist] = []
        self.sent: collections.deque[list[float]] = collections.deque(maxlen=16)
        self.start = {name: control.start for name, control in controls.items()}
        # The page finds the picture by its bytes: no two of one kernel may be equal.
        png, text = self.draw(self.start, f"explorer {len(explorers)}")
        url = "data:image/png;base64," + base64.b64encode(png).decode()
        looks = [control.look() for control in controls.values()]
        self.page = Page(about={"controls": looks, "picture": url, "alt": text, "keeps": not remembers})
        self.page.on_msg(self._on_message)
        if ISOLATED:
            display(self.page)
        else:
            display({"image/png": png, "text/plain": text}, raw=True, metadata={"image/png": {"alt": text}})
            display({"text/html": self._still(text), "text/plain": ""}, raw=True)

    def _still(self, text: str) -> str:
        """The caption of the saved picture, which the page hides when it takes the picture's place."""
        labels = ", ".join(control.label for control in self.controls.values())
        move = f"Run this cell to move: {labels}. Where no controls appear, open the notebook in JupyterLab."
        return f'<p class="dlscale-still">{html.escape(text)} <em>{html.escape(move)}</em></p>'

    def draw(self, values: dict[str, Any], mark: str = "") -> tuple[bytes, str]:
        """Return a setting's picture, with `mark` in the file, and its sentence. Raises what `update` and `alt` do."""
        with figures.drawing:
            try:
                moved = self.update(**values)
                if moved is None or self.background is None:
                    self._draw_all(moved)
                else:
                    self.figure.canvas.restore_region(self.background)
                for artist in self.moving:
                    self.figure.draw_artist(artist)
                png, text = figures.png(self.figure, compression=1, mark=mark), self.alt(**values)
            except BaseException:
                self.background = None  # an interrupt may have left anything on the canvas
                raise
        if len(png) > MAX_FRAME_BYTES:
            raise ValueError(f"The picture takes {len(png):,} bytes, over {MAX_FRAME_BYTES:,}: make it smaller.")
        return png, text

    def _draw_all(self, moved: Iterable[Artist] | None) -> None:
        for artist in self.moving:
            artist.set_animated(False)
        self.moving = sorted(moved or (), key=Artist.get_zorder)
        for artist in self.moving:
            artist.set_animated(True)  # left out of the background
        self.figure.canvas.draw()
        self.figure.set_layout_engine("none")  # nothing jumps from here on
        self.background = self.figure.canvas.copy_from_bbox(self.figure.bbox) if self.moving else None

    def _on_message(self, _page: Page, message: dict[str, Any], _buffers: object) -> None:
        self.near = message["near"]
        if "at" in message:
            self._answer(message["at"])
        if self.near:
            self.ahead = asyncio.get_running_loop().create_task(self._draw_ahead(self.near))

    async def _draw_ahead(self, settings: list[list[float]]) -> None:
        """Draw each in a turn of its own, while no newer list came: what the page wants to show comes in between."""
        for at in settings:
            await asyncio.sleep(0.001)
            while cell_runs.is_set():
                await asyncio.sleep(0.2)
            if settings is self.near and at not in self.sent:  # else it may be on its way
                self._answer(at)

    def _answer(self, at: list[float]) -> None:
        try:
            controls = zip(self.controls.items(), at, strict=True)
            png, text = self.draw({name: control.value(place) for (name, control), place in controls})
        except BaseException as error:  # raised here, it would vanish without a trace
            self.page.send({"at": at, "error": "".join(traceback.format_exception(error)[-3:])})
        else:
            self.sent.append(at)
            self.page.send({"at": at, "alt": text}, [png])


def cell_ended(_result: object) -> None:
    """Let the pages drop what they keep: the cell may have changed what a figure shows."""
    cell_runs.clear()
    for explorer in explorers:
        if explorer.sent:  # else its page never asked for anything
            explorer.sent.clear()
            explorer.page.send({"forget": True})


if shell := get_ipython():
    shell.events.register("pre_run_cell", lambda _info: cell_runs.set())
    shell.events.register("post_run_cell", cell_ended)
