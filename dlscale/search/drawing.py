"""Figures and explorers of 15_search and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from dlscale.page import figures, widgets
from dlscale.page.curves import Line, curves
from dlscale.search import Point, Table, Trial

RATES = (*(f"1/{2**k}" for k in range(7, 0, -1)), "1")


def opening(table: Table, found: Mapping[str, float]) -> None:
    """All settings by their test accuracy, and what two searches hand over, in percent."""
    figure, ax = figures.new(height=2.4)
    counts, *_ = ax.hist(100 * table.quality.ravel(), np.arange(5, 91, 2.5), color="#b5b5b5")
    ax.set(xlabel="test accuracy (%)", ylabel="configurations", xlim=(5, 104))
    sides = (figures.BLACK, "right", -1), (figures.BLUE, "left", 1)
    for (name, value), (color, align, shift) in zip(found.items(), sides, strict=True):
        ax.axvline(value, color=color)
        ax.text(value + shift, 0.55 * counts.max(), f"{name}:\n{value:.0f} %", color=color, ha=align)
    said = " and ".join(f"{name} {value:.0f} %" for name, value in found.items())
    figures.show(figure, f"Histogram of the test accuracies of {table.space.size:,} configurations; lines mark {said}.")


def _rows(values: np.ndarray) -> np.ndarray:
    """Of (convolutions, rate, momentum) a row for each momentum and number of convolutions, in percent."""
    return 100 * values.transpose(2, 0, 1).reshape(6, -1)


def _map(ax: Axes, shown: np.ndarray, colors: str, title: str) -> None:
    """Percentages (6, rates) as colours, from 10 to 90."""
    ax.imshow(shown, cmap=colors, vmin=10, vmax=90, aspect="auto")
    ax.set(xlabel="learning rate", xticks=range(len(RATES)), xticklabels=RATES, title=title)
    ax.set(yticks=range(6), yticklabels=[f"{c} conv., momentum {m:g}" for m in (0, 0.9) for c in range(3)])
    ax.grid(False)


def watch(table: Table) -> None:
    """Explore a slice of the table, one hidden layer of 64 and a constant rate: an epoch at a time."""
    decays, mean = table.space.axes["decay"], table.curves[:, 0, 1, :, :, :, 0].mean(-2)

    def part(decay: float, epoch: int) -> tuple[np.ndarray, int, int]:
        shown = _rows(mean[:, :, :, decays.index(decay), epoch - 1])
        return shown, *divmod(int(shown.argmax()), shown.shape[1])

    def paint(ax: Axes, decay: float, epoch: int) -> None:
        shown, row, column = part(decay, epoch)
        _map(ax, shown, "cividis", "validation accuracy, from 10 % (dark) to 90 % (bright)")
        ax.plot(column, row, "o", markersize=18, markerfacecolor="none", color=figures.RED, markeredgewidth=2)

    def caption(decay: float, epoch: int) -> str:
        shown, row, column = part(decay, epoch)
        return (
            f"Epoch {epoch}, one hidden layer of 64, decay {decay:g}, constant rate. Best: {shown.max():.0f} %, "
            f"with {row % 3} convolutions, momentum {(0, 0.9)[row // 3]:g} and rate {RATES[column]}."
        )

    decay = widgets.slider("weight decay", decays, 0.0)
    epoch = widgets.player("epoch", range(1, mean.shape[-1] + 1), mean.shape[-1])
    widgets.explore_axes(paint, alt=caption, height=3.0, decay=decay, epoch=epoch)


def follow(table: Table, logs: Mapping[str, Sequence[Trial]], first: str) -> None:
    """Explore one run of each search: the places of its trials on a map of the table's best settings."""
    most = max(map(len, logs.values()))
    jitter = np.random.default_rng(0).uniform(-0.33, 0.33, (most, 2))

    def paint(ax: Axes, method: str, trials: int) -> None:
        places = np.array([(t.point[3], 3 * t.point[4] + t.point[0]) for t in logs[method][:trials]])
        _map(ax, _rows(table.quality.max((1, 2, 5, 6))), "Greys_r", "a dot for each trial, the last ones yellow")
        look = {"cmap": "viridis", "vmin": 0, "vmax": most, "edgecolors": "white", "linewidths": 0.5}
        ax.scatter(*(places + jitter[:trials]).T, 40, range(trials), **look)

    def caption(method: str, trials: int) -> str:
        scores = 100 * np.array([t.score for t in logs[method][:trials]])
        return (
            f"{method.capitalize()}, {trials} trials: best validation accuracy {scores.max():.0f} %; "
            f"mean of the last ten trials {scores[-10:].mean():.0f} %."
        )

    method, trials = widgets.menu("search", list(logs), first), widgets.player("trials", range(1, most + 1), most)
    widgets.explore_axes(paint, alt=caption, height=3.0, method=method, trials=trials)


def bracket(one: Callable[[int, int], tuple[dict[Point, np.ndarray], dict[Point, int], Point]]) -> None:
    """Explore a bracket of 16 runs: `one(draw, keep)` gives the curves, the epochs paid for, and the winner."""
    labels = {"the winner": figures.BLUE, "best of all at the end": figures.RED, "others": figures.BLACK}

    def paint(ax: Axes, draw: int, keep: int) -> None:
        curves, paid, winner = one(draw, keep)
        shown = dict.fromkeys(curves, figures.BLACK) | {max(curves, key=lambda p: curves[p][-1]): figures.RED}
        for point, color in (shown | {winner: figures.BLUE}).items():
            last, curve, width = paid[point], 100 * curves[point], 1.2 if color == figures.BLACK else 2.6
            ax.plot(range(last, 17), curve[last - 1 :], ":", color=color, linewidth=width / 2, alpha=0.6)
            ax.plot(range(1, last + 1), curve[:last], "o-", color=color, linewidth=width, markevery=[last - 1])
        ax.set(xlabel="epoch", ylabel="validation accuracy (%)", ylim=(0, 108), xticks=[1, 2, 4, 8, 16])
        for height, (text, color) in zip((0.98, 0.91, 0.84), labels.items(), strict=True):
            ax.text(0.02, height, text, color=color, transform=ax.transAxes, va="top")
        ax.text(0.02, 0.77, "dotted: never trained", color=figures.GREY, transform=ax.transAxes, va="top")

    def caption(draw: int, keep: int) -> str:
        curves, paid, winner = one(draw, keep)
        place = 1 + sum(curve[-1] > curves[winner][-1] for curve in curves.values())
        return (
            f"Bracket {draw}, one of {keep} kept: {sum(paid.values())} epochs instead of 256. The winner ends at "
            f"{100 * curves[winner][-1]:.0f} %, place {place} of 16."
        )

    keeps = widgets.slider("one is kept of", (2, 4), 4)
    widgets.explore_axes(paint, alt=caption, draw=widgets.slider("bracket", range(12), 3), keep=keeps)


def population(epochs: np.ndarray, rates: np.ndarray, line: np.ndarray) -> None:
    """Learning rates of a population (epochs, members), and the `line` (epochs,) from which its best descends."""
    figure, ax = figures.new(height=2.7)
    ax.semilogy(epochs, rates, color="#dcdcdc")
    ax.semilogy(epochs, line, "o-", color=figures.BLUE)
    ax.set(xlabel="epoch", xticks=epochs, ylabel="learning rate", title="grey: all members; a jump: overwritten")
    ax.text(epochs[-1], 1.3 * line[-1], "the best and its ancestors", color=figures.BLUE, ha="right")
    figures.show(figure, f"The learning rate of the best member's line goes from {line[0]:.3f} to {line[-1]:.3f}.")


def best_of(found: Mapping[int, np.ndarray], numbers: Sequence[int]) -> None:
    """Explore how good the best of many looks: by validation examples, three accuracies (numbers, 3) in percent.

    What chose it, the test accuracy of the same network, and that with new seeds, from which both are measured.
    """
    styles = {"validation accuracy that chose it": (figures.BLUE, "o-"), "same network, test": (figures.RED, "o-")}
    styles["new seeds, test"] = figures.GREEN, "-"
    axis = {"xscale": "log", "xticks": numbers, "xlabel": "number of trials", "ylabel": "points above new seeds"}
    above = {examples: accuracies - accuracies[:, 2:] for examples, accuracies in found.items()}

    def compute(examples: int) -> dict[str, Line]:
        return {label: (numbers, line) for label, line in zip(styles, above[examples].T, strict=True)}

    def caption(examples: int) -> str:
        lead = above[examples][-1, 0]
        return f"Chosen on {examples:,} examples, the best of {numbers[-1]} looks {lead:.1f} points too good."

    few = widgets.slider("validation examples", list(found), list(found)[-1])
    curves(styles, compute, caption, axis | {"xlim": (0.9, 120), "ylim": (-2, 7)}, examples=few)


def law(lines: Mapping[str, tuple[np.ndarray, np.ndarray]], fit: Callable[[Any, Any], Callable[[Any], Any]]) -> None:
    """Explore a power law: by what grows, its sizes and the losses (sizes, seeds); the fit leaves out the last."""
    styles = {"the law, the mean of a fit for each seed": (figures.BLUE, "-"), "fitted": (figures.BLACK, "o")}
    styles["to be predicted"] = figures.RED, "o"
    axis = {"xscale": "log", "yscale": "log", "xticks": (0.01, 0.03, 0.1, 0.3, 1), "yticks": (0.75, 1, 1.5, 2)}
    axis |= {"xlabel": "size (largest: 1)", "ylabel": "test loss (nats)", "xlim": (0.004, 1.2), "ylim": (0.6, 2.5)}

    def predicted(along: str, at: Any) -> np.ndarray:
        x, losses = lines[along]
        return np.array([fit(x[:-1], own[:-1])(at) for own in losses.T])

    def compute(along: str) -> dict[str, Line]:
        x, losses = lines[along]
        fine, points = np.geomspace(x[0], x[-1], 60), np.array([x / x[-1], losses.mean(1)])
        found = fine / x[-1], predicted(along, fine).mean(0)
        return dict(zip(styles, (found, points[:, :-1], points[:, -1:]), strict=True))

    def caption(along: str) -> str:
        x, losses = lines[along]
        off = 100 * np.mean(losses[-1] / predicted(along, x[-1]) - 1)
        side = "above" if off > 0 else "below"
        return f"Test loss against {along}. The last point lies {abs(off):.0f} % {side} its prediction."

    grows = widgets.menu("what grows", list(lines), list(lines)[-1])
    curves(styles, compute, caption, axis, corner=(0.02, 0.3), along=grows)
