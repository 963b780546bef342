"""Drawing that every notebook shares: one palette, bands over seeds, direct labels, pictures with alt text.

Figures are made without pyplot: nothing stays open behind the notebook, and callbacks may draw from any thread, one at
a time: even threads that draw different figures share fonts and the parser of formulas. What two drew at once was wrong
at times, and the process may die of it; Matplotlib's own lock does not cover an artist that is drawn alone.
"""

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from IPython.display import display
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from dlscale.lab.intervals import interval

# Okabe & Ito 2008: distinct for every kind of colour vision, and in print
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
)  # fmt: skip
GREY = "#767676"
METHODS = {"SGD": BLACK, "momentum": ORANGE, "Nesterov": SKY, "Adagrad": GREEN, "Adadelta": PINK}
METHODS |= {"RMSprop": BLUE, "Adam": RED}
TRAIN, TEST = BLUE, RED

STYLE = dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False) | {"lines.linewidth": 1.8}
STYLE |= {"axes.grid": True, "axes.axisbelow": True, "axes.titlesize": 11, "grid.color": "#e4e4e4"}

drawing = threading.RLock()  # held by whoever draws


def new(columns: int = 1, width: float = 7.2, height: float = 3.4, **options: Any) -> tuple[Figure, Any]:
    """A figure of width × height inches at 100 dpi, and its axes (an array if there are several columns)."""
    figure = FigureCanvasAgg(Figure((width, height), dpi=100, layout="constrained")).figure
    return figure, axes(figure, columns, **options)


def axes(figure: Figure, columns: int = 1, **options: Any) -> Any:
    """Axes side by side in `figure`, in the style of the course."""
    with rc_context(STYLE):
        return figure.subplots(1, columns, **options)


def png(figure: Figure, compression: int = 6, mark: str = "") -> bytes:
    """The figure's present canvas as PNG. Compression 1 is five times as fast as 6, for pictures that live.

    `mark` is a comment in the file, which tells equal pictures apart.
    """
    buffer, pixels, comments = io.BytesIO(), np.asarray(figure.canvas.buffer_rgba()), PngInfo()
    if mark:
        comments.add_text("Comment", mark)
    Image.fromarray(pixels).convert("RGB").save(buffer, "png", compress_level=compression, pnginfo=comments)
    return buffer.getvalue()


def show(figure: Figure, alt: str) -> None:
    """Display the figure; `alt` says in a sentence what is to be seen, for those who cannot see it."""
    with drawing:
        figure.canvas.draw()
    display({"image/png": png(figure)}, raw=True, metadata={"image/png": {"alt": alt}})


def band(ax: Axes, x: Sequence[float], samples: np.ndarray, color: str, label: str = "", **options: Any) -> Line2D:
    """The mean of samples (seeds, len(x)) with its 95 % interval as a band."""
    mean, low, high = interval(samples)
    (line,) = ax.plot(x, mean, color=color, **options)
    ax.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
    if label:
        name(ax, line, label)
    return line


def name(ax: Axes, line: Line2D, label: str, shift: float = 0.0) -> None:
    """Write `label` beside the last point of the line, `shift` points higher, in its colour: no legend to look up."""
    points = line.get_xydata()
    last = points[np.isfinite(points).all(axis=1)][-1]
    beside = {"xytext": (5, shift), "textcoords": "offset points", "va": "center", "clip_on": False}
    ax.annotate(label, last, color=line.get_color(), **beside)


def names(ax: Axes, lines: Mapping[str, Line2D], gap: float) -> None:
    """Write each label beside the last point of its line, in its colour; labels are at least `gap` (in y) apart."""
    place = -np.inf
    for label, line in sorted(lines.items(), key=lambda item: item[1].get_ydata()[-1]):
        x, y = line.get_xydata()[-1]
        place = max(y, place + gap)
        ax.annotate(
            label, (x, place), (6, 0), textcoords="offset points", color=line.get_color(), va="center",
            annotation_clip=False,
        )  # fmt: skip


def forest(groups: Mapping[str, Mapping[str, np.ndarray]], xlabel: str) -> None:
    """A row for each array of samples: their mean and its 95 % interval, with a colour and a heading for each group."""
    figure, ax = new(height=1.2 + 0.24 * sum(bool(group) + len(samples) for group, samples in groups.items()))
    ax.axvline(0, color=BLACK, linewidth=1)
    rows, headings, said = [], {}, []
    for (group, samples), color in zip(groups.items(), (BLUE, RED, GREEN, ORANGE), strict=False):
        if group:
            headings[len(rows)] = color
            rows.append(group)
        means = []
        for row, values in samples.items():
            mean, low, high = interval(values)
            ax.plot([low, high], [len(rows)] * 2, color=color)
            ax.plot(mean, len(rows), "o", color=color)
            rows.append(row)
            means.append(f"{row} {mean:.1f}".replace(" -", " −"))
        said.append(f"{group}: {', '.join(means)}" if group else ", ".join(means))
    ax.set_yticks(range(len(rows)), rows)
    ax.tick_params(axis="y", length=0)
    ax.grid(False, axis="y")
    for place, color in headings.items():
        ax.get_yticklabels()[place].set(color=color, weight="bold")
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlabel=f"{xlabel}, 95 % interval")
    show(figure, f"{xlabel.capitalize()}: {'; '.join(said)}.")


def contour(ax: Axes, f: Callable[..., np.ndarray], x: tuple[float, float], y: tuple[float, float]) -> None:
    """Filled contours of f(x, y) over two ranges, evenly spaced in log (f - min f), with labelled axes."""
    grid_x, grid_y = np.meshgrid(np.linspace(*x, 201), np.linspace(*y, 201))
    value = np.asarray(f(grid_x, grid_y))
    height = np.log10(value - value.min() + 1e-3 * np.ptp(value))
    ax.contourf(grid_x, grid_y, height, 18, cmap="cividis", alpha=0.85)
    ax.set(xlim=x, ylim=y, xlabel="$w_1$", ylabel="$w_2$")
    ax.grid(False)
