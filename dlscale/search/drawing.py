"""Figures and explorers of 15_search and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlscale.lab import intervals
from dlscale.page import figures, widgets
from dlscale.search import Point, Table, Trial

COLORS = {"random search": figures.BLACK, "evolution": figures.GREEN, "halving": figures.BLUE}
COLORS |= {"population": figures.ORANGE, "swarm": figures.PINK, "controller": figures.RED, "Hyperband": figures.SKY}
ACCURACY = "test accuracy (%)"


def opening(table: Table, found: Mapping[str, float]) -> None:
    """All settings by their test accuracy, and what two searches hand over, in percent."""
    figure, ax = figures.new(height=2.4)
    counts, *_ = ax.hist(100 * table.quality.ravel(), np.arange(5, 91, 2.5), color="#b5b5b5")
    ax.text(50, 0.8 * counts.max(), f"all {table.space.size:,} configurations", color=figures.GREY, ha="center")
    ax.set(xlabel=ACCURACY, ylabel="number of configurations", xlim=(5, 104), ylim=(0, 1.1 * counts.max()))
    sides = (figures.BLACK, "right", -1), (figures.BLUE, "left", 1)
    for (name, value), (color, align, shift) in zip(found.items(), sides, strict=True):
        ax.axvline(value, color=color)
        ax.text(value + shift, 0.55 * counts.max(), f"{name}:\n{value:.0f} %", color=color, ha=align)
    said = " and ".join(f"{name} {value:.0f} %" for name, value in found.items())
    figures.show(figure, f"Histogram of the test accuracies of {table.space.size:,} configurations; lines mark {said}.")


def _rates(table: Table) -> list[str]:
    return [f"1/{round(1 / rate)}" if rate < 1 else "1" for rate in table.space.axes["rate"]]


def _rate_axis(ax: Axes, table: Table) -> None:
    rates = _rates(table)
    ax.set(xlabel="learning rate", xticks=range(len(rates)), xticklabels=rates)
    ax.set(yticks=range(6), yticklabels=[f"{c} conv., momentum {m:g}" for m in (0, 0.9) for c in range(3)])
    ax.grid(False)


def watch(table: Table) -> None:
    """Explore a slice of the table: learning rate against convolutions and momentum, an epoch at a time."""
    axes, mean = table.space.axes, table.curves.mean(-2)

    def part(units: int, decay: float, schedule: str, epoch: int) -> tuple[np.ndarray, int, int]:
        places = [axes[n].index(v) for n, v in (("width", units), ("decay", decay), ("schedule", schedule))]
        found = mean[:, 0, places[0], :, :, places[1], places[2], epoch - 1]  # (convolutions, rate, momentum)
        shown = 100 * found.transpose(2, 0, 1).reshape(6, -1)
        return shown, *divmod(int(shown.argmax()), shown.shape[1])

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        image = ax.imshow(np.zeros((6, 8)), cmap="cividis", vmin=10, vmax=90, aspect="auto")
        (ring,) = ax.plot(0, 0, "o", markersize=18, markerfacecolor="none", color=figures.RED, markeredgewidth=2)
        _rate_axis(ax, table)
        fig.colorbar(image, ax=ax, label="validation accuracy (%)")

        def update(units: int, decay: float, schedule: str, epoch: int) -> list[Artist]:
            shown, row, column = part(units, decay, schedule, epoch)
            image.set_data(shown)
            ring.set_data([column], [row])
            return [image, ring]

        return update

    def caption(units: int, decay: float, schedule: str, epoch: int) -> str:
        shown, row, column = part(units, decay, schedule, epoch)
        return (
            f"Epoch {epoch}, one hidden layer of {units}, decay {decay:g}, {schedule} rate. Best: {shown.max():.0f} %, "
            f"with {row % 3} convolutions, momentum {(0, 0.9)[row // 3]:g} and rate {_rates(table)[column]}."
        )

    widgets.explore(
        make, alt=caption, height=3.0, units=widgets.slider("width of the hidden layer", axes["width"], 64),
        decay=widgets.slider("weight decay", axes["decay"], 0.0),
        schedule=widgets.menu("schedule", axes["schedule"], "constant"),
        epoch=widgets.player("epoch", range(1, table.epochs + 1), table.epochs),
    )  # fmt: skip


def follow(table: Table, logs: Mapping[str, Sequence[Trial]], first: str) -> None:
    """Explore one run of each search: the places of its trials, and the best validation accuracy so far."""
    back = 100 * table.quality.max((1, 2, 5, 6)).transpose(2, 0, 1).reshape(6, -1)  # (momentum, convolutions) × rate
    most = max(map(len, logs.values()))
    jitter = np.random.default_rng(0).uniform(-0.33, 0.33, (most, 2))

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2, width_ratios=(1.3, 1))
        left.imshow(back, cmap="Greys_r", vmin=10, vmax=90, aspect="auto")
        _rate_axis(left, table)
        dots = left.scatter([], [], c=[], cmap="viridis", vmin=0, vmax=most, s=26, edgecolors="white", linewidths=0.5)
        left.set_title("dark dots: first trials; yellow: last", fontsize=9)
        (tried,) = right.plot([], [], "o", color=figures.GREY, markersize=3)
        (best,) = right.plot([], [], color=figures.BLUE, drawstyle="steps-post")
        right.set(xlabel="trial", ylabel="validation accuracy (%)", xlim=(0, most + 1), ylim=(0, 92))
        right.set_title("line: best so far", fontsize=9, color=figures.BLUE)

        def update(method: str, trials: int) -> list[Artist]:
            log = logs[method][:trials]
            dots.set_offsets(np.array([(t.point[3], 3 * t.point[4] + t.point[0]) for t in log]) + jitter[: len(log)])
            dots.set_array(np.arange(len(log)))
            scores = 100 * np.array([t.score for t in log])
            tried.set_data(range(1, len(log) + 1), scores)
            best.set_data(range(1, len(log) + 1), np.maximum.accumulate(scores))
            return [dots, tried, best]

        return update

    def caption(method: str, trials: int) -> str:
        scores = 100 * np.array([t.score for t in logs[method][:trials]])
        return (
            f"{method.capitalize()}, {trials} trials: best validation accuracy {scores.max():.0f} %; "
            f"mean of the last ten trials {scores[-10:].mean():.0f} %."
        )

    widgets.explore(
        make, alt=caption, width=8.8, height=3.2, method=widgets.menu("search", list(logs), first),
        trials=widgets.player("trials", range(1, most + 1), most),
    )  # fmt: skip


def bracket(one: Callable[[int, int], tuple[dict[Point, np.ndarray], dict[Point, int], Point]]) -> None:
    """Explore a bracket of 16 runs: `one(draw, keep)` gives the curves, the epochs paid for, and the winner."""

    def paint(ax: Axes, draw: int, keep: int) -> None:
        curves, trained, winner = one(draw, keep)
        for point, curve in curves.items():
            last = trained[point]
            ax.plot(range(last, 17), 100 * curve[last - 1 :], color="#d8d8d8", linewidth=1, zorder=1)
            color, width = (figures.BLUE, 2.6) if point == winner else (figures.BLACK, 1.2)
            ax.plot(range(1, last + 1), 100 * curve[:last], "o-", color=color, linewidth=width, markevery=[last - 1])
        ax.plot(
            16,
            100 * max(curve[-1] for curve in curves.values()),
            "o",
            markersize=13,
            fillstyle="none",
            color=figures.RED,
        )
        rungs = [keep**rung for rung in range(5) if keep**rung <= 16]
        ax.set(xlabel="epoch", ylabel="validation accuracy (%)", xlim=(0.8, 16.6), ylim=(0, 108), xticks=rungs)
        labels = {"the winner": figures.BLUE, "paid for": figures.BLACK, "never trained": figures.GREY}
        for number, (text, color) in enumerate((labels | {"best of all at the end": figures.RED}).items()):
            ax.text(0.02, 0.98 - 0.07 * number, text, color=color, transform=ax.transAxes, va="top")

    def caption(draw: int, keep: int) -> str:
        curves, trained, winner = one(draw, keep)
        place = 1 + sum(curve[-1] > curves[winner][-1] for curve in curves.values())
        return (
            f"Bracket {draw}, one of {keep} kept: {sum(trained.values())} epochs instead of 256. The winner ends at "
            f"{100 * curves[winner][-1]:.0f} %, place {place} of 16."
        )

    keeps = widgets.slider("one is kept of", (2, 4), 4)
    widgets.explore_axes(paint, alt=caption, draw=widgets.slider("bracket", range(12), 3), keep=keeps)


def population(epochs: np.ndarray, rates: np.ndarray, scores: np.ndarray, lines: np.ndarray) -> None:
    """Explore a population: rates and accuracies (epochs, members), and `lines` of whom each descends from, best first.

    `lines[i, rank]` is the place at `epochs[i]` of the ancestor of the member that has this rank in the end.
    """
    rows = np.arange(len(epochs))

    def paint(left: Axes, right: Axes, rank: int) -> None:
        for ax, values in ((left, rates), (right, 100 * scores)):
            ax.plot(epochs, values, color="#dcdcdc", linewidth=1)
            ax.plot(epochs, values[rows, lines[:, rank - 1]], "o-", color=figures.BLUE, linewidth=2.5, markersize=5)
            ax.set(xlabel="epoch", xticks=epochs)
        left.set(yscale="log", ylabel="learning rate")
        left.set_title("grey: all members; a jump: overwritten", fontsize=9, color=figures.GREY)
        right.set(ylabel="validation accuracy (%)", ylim=(0, 100))
        right.set_title("blue: this member and its ancestors", fontsize=9, color=figures.BLUE)

    def caption(rank: int) -> str:
        own, end = rates[rows, lines[:, rank - 1]], 100 * scores[-1, lines[-1, rank - 1]]
        return (
            f"Member {rank} from the top ends at {end:.0f} %. The learning rate of its line went from {own[0]:.3f} to "
            f"{own[-1]:.3f}."
        )

    ranks = widgets.slider("member, from the best down", range(1, rates.shape[1] + 1), 1)
    widgets.explore_axes(paint, alt=caption, columns=2, width=8.4, height=3.0, rank=ranks)


def race(found: Mapping[str, np.ndarray], usual: float | None = None) -> None:
    """A row for each search, in percent: a dot for each seed, and the mean with its 95 % interval.

    With `usual`, the dots of the first row are cases, not seeds: it gets no interval, and a mark at this value.
    """
    figure, ax = figures.new(height=0.9 + 0.42 * len(found))
    said = []
    for place, (name, values) in enumerate(found.items()):
        cases = usual is not None and not place
        color = figures.BLUE if cases else COLORS.get(name, figures.GREY)
        mean, low, high = intervals.interval(values)
        ax.plot(values, [place] * len(values), "o", color=color, alpha=0.8 if cases else 0.3, markersize=4)
        if not cases:
            ax.plot([low, high], [place] * 2, color=color, linewidth=9, solid_capstyle="butt")
        ax.plot(mean, place, "|", color=color, markersize=20, markeredgewidth=1.5)
        ax.text(1.01, place, f"{mean:.1f} %", color=color, transform=ax.get_yaxis_transform(), va="center")
        said.append(f"{name} {mean:.1f} %")
    if usual is not None:
        ax.plot(usual, 0, "o", color=figures.RED, markersize=9)
        ax.text(usual, -0.25, "usual values", color=figures.RED, ha="center", va="bottom")
    ax.set_yticks(range(len(found)), list(found))
    ax.set(
        xlabel=f"{ACCURACY}; dot: a search{' (grid: a way)' * (usual is not None)}, tick: mean, bar: 95 % interval",
        ylim=(len(found) - 0.5, -0.5 if usual is None else -0.9),
    )
    ax.locator_params(axis="x", integer=True)
    figures.show(figure, f"Mean {ACCURACY}: {', '.join(said)}.")


def best_of(found: Mapping[int, np.ndarray], numbers: Sequence[int]) -> None:
    """How good the best of many looks: by validation examples, three accuracies (numbers, 3) in percent.

    What chose it, the test accuracy of the same network, and that with new seeds, from which both are measured.
    """
    figure, axes = figures.new(len(found), width=8.4, height=3.0, sharey=True)
    said = []
    for ax, (examples, accuracies) in zip(axes, found.items(), strict=True):
        above = accuracies[:, :2] - accuracies[:, 2:]
        for line, color in zip(above.T, (figures.BLUE, figures.RED), strict=True):
            ax.plot(numbers, line, "o-", color=color, markersize=4)
        ax.axhline(0, color=figures.GREEN)
        ax.set(xscale="log", xlabel="number of trials", title=f"chosen on {examples:,} examples")
        ax.set_xticks(numbers, numbers)
        ax.minorticks_off()
        said.append(f"on {examples:,} examples by {above[-1, 0]:.1f} and {above[-1, 1]:.1f}")
    axes[0].set(ylabel="points above new seeds")
    labels = ("validation accuracy that chose it", "test accuracy, same network", "test accuracy, new seeds")
    for place, label, color in zip((0.9, 0.8, 0.7), labels, (figures.BLUE, figures.RED, figures.GREEN), strict=True):
        axes[1].text(0.03, place, label, color=color, transform=axes[1].transAxes)
    figures.show(figure, f"Points by which the best of {numbers[-1]} looks too good, chosen {'; '.join(said)}.")


def law(lines: Mapping[str, tuple[np.ndarray, np.ndarray]], fit: Callable[[Any, Any], Callable[[Any], Any]]) -> None:
    """Explore a power law: by what grows, its sizes and the losses (sizes, seeds); the last sizes are left out."""

    def predicted(along: str, left_out: int, at: Any) -> np.ndarray:
        x, losses = lines[along]
        return np.array([fit(x[:-left_out], own[:-left_out])(at) for own in losses.T])

    def paint(ax: Axes, along: str, left_out: int) -> None:
        x, losses = lines[along]
        fine = np.geomspace(x[0], x[-1], 60)
        figures.band(ax, fine, predicted(along, left_out, fine), figures.BLUE)
        ax.plot(x[:-left_out], losses[:-left_out].mean(1), "o", color=figures.BLACK)
        ax.plot(x[-left_out:], losses[-left_out:].mean(1), "o", color=figures.RED)
        ax.set(xscale="log", yscale="log", xlabel=along, ylabel="test loss (nats)", ylim=(0.6, 2.5))
        ax.set_yticks((0.75, 1, 1.5, 2), (0.75, 1, 1.5, 2))
        ax.set_xticks(x, [f"{size:,}" for size in x])
        ax.minorticks_off()
        ax.text(0.02, 0.16, "black: fitted", transform=ax.transAxes)
        ax.text(0.02, 0.06, "orange: to be predicted", color=figures.RED, transform=ax.transAxes)

    def caption(along: str, left_out: int) -> str:
        x, losses = lines[along]
        off = 100 * np.mean(losses[-1] / predicted(along, left_out, x[-1]) - 1)
        side = "above" if off > 0 else "below"
        return f"Test loss against {along}. The last point lies {abs(off):.0f} % {side} its prediction."

    left_out = widgets.slider("points left out of the fit", (1, 2), 1)
    widgets.explore_axes(
        paint, alt=caption, along=widgets.menu("what grows", list(lines), list(lines)[-1]), left_out=left_out
    )
