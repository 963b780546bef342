"""Figures and explorers of 13_sequence_models_and_serving: a line in the notebook calls each."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from dlscale.page import figures, widgets
from dlscale.page.curves import Line, curves
from dlscale.sequence_models_and_serving import sequence

NAMES = ["–", *sequence.SYMBOLS]
COLORS = [figures.GREY, figures.RED, figures.BLUE, figures.SKY, figures.GREEN, figures.ORANGE, figures.BLACK]


def processors(counts: Mapping[tuple[str, int], tuple[int, int]]) -> None:
    """Explore how many processors help: (work, depth) by program and length of the sequence."""
    many = np.logspace(0, 6, 61)
    styles = {"recurrent": (figures.RED, "-"), "linear": (figures.BLUE, "-"), "× work / depth": (figures.BLACK, "x")}
    axis = {"xscale": "log", "yscale": "log", "xlim": (1, 1e6), "ylim": (10, 1e8)}
    axis |= {"xlabel": "processors", "ylabel": "rounds"}

    def compute(length: int) -> dict[str, Line]:
        both = {name: counts[name, length] for name in ("recurrent", "linear")}
        lines = {name: (many, work / many + depth) for name, (work, depth) in both.items()}
        ends = [(work / depth, 2 * depth) for work, depth in both.values()]
        return lines | {"× work / depth": tuple(zip(*ends, strict=True))}

    def caption(length: int) -> str:
        parts = ("{}: {:,} operations, depth {:,}".format(name, *counts[name, length]) for name in [*styles][:2])
        return f"{length} steps of 64 neurons. {'; '.join(parts)}."

    lengths = sorted({length for _, length in counts})
    slider = widgets.slider("steps of the sequence", lengths, lengths[-1])
    curves(styles, compute, caption, axis, corner=(0.98, 0.97), length=slider)


def lattice(tables: Mapping[str, np.ndarray], names: Sequence[str], truth: int) -> None:
    """Where a path is at each frame, as tables (frames, states) of forward–backward tell it, side by side.

    A ring marks the state `truth` at frame 9.
    """
    figure, panels = figures.new(len(tables), height=3.0, sharey=True)
    said = []
    for ax, (title, table) in zip(panels, tables.items(), strict=True):
        share = table / table.sum(1, keepdims=True)
        extent = (0.5, len(share) + 0.5, len(names) - 0.5, -0.5)
        ax.imshow(share.T, aspect="auto", cmap="cividis", vmin=0, vmax=1, extent=extent)
        ax.plot(9, truth, "o", markersize=13, markerfacecolor="none", color="white", markeredgewidth=2)
        found = names[share[8].argmax()]
        ax.set(title=f"{title}\nat frame 9: {found}", xlabel="frame", xticks=(1, 9, 24), yticks=range(len(names)))
        ax.grid(False)
        said.append(f"{title} says {found}")
    panels[0].set(ylabel="state")
    panels[0].set_yticks(range(len(names)), names)
    figures.show(figure, f"Bright is probable. At frame 9, {'; '.join(said)}; the truth is {names[truth]}.")


def learning(looks: Mapping[int, np.ndarray], word: str, ends: Sequence[float]) -> None:
    """Explore the training: the probabilities of each class, (frames, classes), after some numbers of steps.

    `ends` are the seconds at which the symbols of the word end.
    """
    frames = len(next(iter(looks.values())))
    times = 0.02 * np.arange(frames) + 0.016  # the middle of each frame

    def paint(ax: Axes, steps: int) -> None:
        for end, start, symbol in zip(ends, [0, *ends], word, strict=False):
            ax.axvline(end, color=figures.GREY, linewidth=1)
            ax.text((start + end) / 2, 1.1, f"says {symbol}", color=figures.GREY, ha="center")
        ax.set(xlabel="time (s)", ylabel="probability", ylim=(0, 1.2), xlim=(0, times[-1]))
        for name, values, color in zip(NAMES, looks[steps].T, COLORS, strict=True):
            ax.plot(times, values, ":" if name == "–" else "-", color=color)
        path = looks[steps].argmax(1)
        begins = np.flatnonzero(np.diff(path, prepend=-1))
        for begin, end in zip(begins, [*begins[1:], frames], strict=True):
            look = {"color": COLORS[path[begin]], "ha": "center", "weight": "bold"}
            ax.text(times[begin:end].mean(), 1.02, NAMES[path[begin]], **look)

    def caption(steps: int) -> str:
        path = looks[steps].argmax(1)
        heard = sequence.spelled(sequence.collapse(path))
        blank = f"{100 * np.mean(path == 0):.0f} % of the frames are blank."
        return f"After {steps} steps: “{word}” is heard as “{heard}”. {blank}"

    widgets.explore_axes(paint, alt=caption, height=3.0, steps=widgets.player("training steps", [*looks], [*looks][-1]))
