"""Figures and explorers of 00_start_here: a line in the notebook calls each."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from dlscale import start_here
from dlscale.course.records import Record
from dlscale.lab.data import Dataset
from dlscale.lab.intervals import interval
from dlscale.page import figures, widgets

EXAMPLES, SHARE = 3000, 15  # of the training set, of a machine in each step


def promise() -> None:
    """The time of an hour's training, if it could be shared without loss."""
    times = ["1 hour ", " 6 minutes", " 36 seconds", " less than 4 seconds?"]
    figure, ax = figures.new(height=2.0)
    bars = ax.barh(range(4), 60 / 10.0 ** np.arange(4), 0.65, color=figures.BLUE)
    ax.bar_label(bars, ["", *times[1:]], color=figures.BLACK)
    ax.text(60, 0, times[0], ha="right", va="center", color="white")
    ax.set_yticks(range(4), ["1 machine", "10 machines", "100 machines", "1,000 machines"])
    ax.set(xlim=(0, 60.5), ylim=(3.6, -0.6), xlabel="minutes, if the work were shared without any loss")
    figures.show(figure, f"One hour, shared without loss by 10, 100 and 1,000 machines:{','.join(times[1:])}")


def steps() -> None:
    """Explore how machines that share a step cut a pass through the data into steps."""

    def paint(ax: Axes, machines: int) -> None:
        size = SHARE * machines
        ax.barh(0, EXAMPLES, color="#dfeaf3")
        ax.barh(0, size, color=figures.ORANGE)
        ax.vlines(np.arange(0, EXAMPLES + 1, size), -0.4, 0.4, color=figures.BLUE, linewidth=1)
        ax.text(0, 0.62, f"one step: {machines} × {SHARE} = {size:,} examples", color="#a06f00", weight="bold")
        ax.set(xlim=(-5, EXAMPLES + 5), ylim=(-0.5, 1.0), yticks=[], xlabel="one pass: the 3,000 training examples")
        ax.spines["left"].set_visible(False)
        ax.grid(False)

    def caption(machines: int) -> str:
        size = SHARE * machines
        return f"{machines} machines: a step uses {size:,} examples, so one pass takes {EXAMPLES // size} steps."

    machines = widgets.slider("machines", [2, 5, 10, 40, 50, 100], 10)
    widgets.explore_axes(paint, alt=caption, height=1.7, machines=machines)


# Live


def signals(dataset: Dataset) -> None:
    """Three training signals of each of five classes."""
    figure, columns = figures.new(5, height=1.9)
    for label, ax in enumerate(columns):
        three = dataset.x_train[dataset.y_train == label][:3].T
        ax.plot(np.add(three, [0, 6, 12]), color=figures.BLUE, linewidth=1.2)
        ax.set(title=f"shape {label}", xticks=[], yticks=[])
    figures.show(figure, "Three signals of each of five shapes: height, place, slope and noise differ within a shape.")


def equal_passes(curves: Mapping[int, np.ndarray], most: Mapping[int, int], end: int) -> None:
    """Explore the test accuracy in per cent, (seeds, tests), of one machine and of others, until pass `end`."""
    passes = {n: most[n] * np.arange(1, curves[n].shape[1] + 1) / curves[n].shape[1] for n in curves}
    shown = {n: curves[n][:, passes[n] <= end + 1e-6] for n in curves}

    def paint(ax: Axes, machines: int) -> None:
        end_of_one = shown[1][:, -1].mean()
        figures.band(ax, passes[1][: shown[1].shape[1]], shown[1], figures.BLACK)
        ax.text(end + 0.15, end_of_one, "1 machine", va="center")
        tested, mean = passes[machines][: shown[machines].shape[1]], shown[machines].mean(0)
        ax.plot(tested, shown[machines].T, color=figures.RED, linewidth=0.7, alpha=0.6)
        ax.plot(tested, mean, "o-", color=figures.RED, markersize=4)
        ax.text(end + 0.15, min(mean[-1], end_of_one - 3.5), f"{machines} machines", color=figures.RED, va="center")
        ax.set(xlim=(0, end * 1.24), ylim=(0, 65), xlabel="passes through the data", ylabel="test accuracy (%)")
        ax.set_xticks(range(0, end + 1, 2))

    def caption(machines: int) -> str:
        one, many = (shown[n][:, -1].mean() for n in (1, machines))
        steps = EXAMPLES * end // (SHARE * machines)
        return (
            f"{machines} machines, {steps} steps in {end} passes: test accuracy {many:.1f} %, against "
            f"{one:.1f} % with one machine. Means of five runs; thin: each run; grey band: 95 % interval of the mean."
        )

    machines = widgets.slider("machines", [n for n in curves if n > 1], 200)
    widgets.explore_axes(paint, alt=caption, machines=machines)


# From the record


def _machines(ax: Axes, record: Record) -> list[int]:
    """Name the numbers of machines on a logarithmic axis, and return them."""
    machines = record.options("machines")
    ax.set(xscale="log", xlabel="machines")
    ax.set_xticks(machines, [str(n) for n in machines])
    ax.minorticks_off()
    return machines


def budgets(record: Record) -> None:
    """Explore the test accuracy after a number of passes, by the number of machines, each at its best rate."""
    found = {}
    for passes in start_here.PASSES:
        best = [start_here.tuned(record, n, f"after {passes} passes") for n in record.options("machines")]
        found[passes] = np.stack([runs for _, runs in best])

    def paint(ax: Axes, passes: int) -> None:
        machines, first, mean = _machines(ax, record), found[10].mean(1), found[passes].mean(1)
        ax.plot(machines, first, ":", color=figures.GREY)
        ax.text(225, first[-1] - 2, "after\n10 passes", color=figures.GREY, va="center")
        ax.plot(machines, found[passes], "_", color=figures.RED, markersize=10, alpha=0.4)
        ax.plot(machines, mean, "o-", color=figures.RED)
        ax.plot([250, 250], [mean[-1], mean[0]], color=figures.BLACK, linewidth=3, solid_capstyle="butt")
        ax.text(285, (mean[0] + mean[-1]) / 2, f"{mean[0] - mean[-1]:.1f} points\nbelow 1 machine", va="center")
        ax.text(0.95, 67, f"after {passes} passes", color=figures.RED)
        ax.set(ylim=(0, 72), xlim=(0.9, 900), ylabel="test accuracy (%)")

    def caption(passes: int) -> str:
        one, many = found[passes][0].mean(), found[passes][-1].mean()
        return (
            f"After {passes} passes: {one:.1f} % with one machine, {many:.1f} % with 200 machines, each at its best "
            "learning rate. Marks: 28 runs each; line: their means."
        )

    widgets.explore_axes(paint, alt=caption, passes=widgets.slider("passes", start_here.PASSES, 150))


def efficiency(record: Record) -> None:
    """Explore speed-up and efficiency to a target, by the number of machines."""
    found = {
        target: np.stack([start_here.speed_up(record, n, target) for n in record.options("machines")], axis=1)
        for target in start_here.TARGETS
    }

    def paint(left: Axes, right: Axes, target: int) -> None:
        machines = _machines(right, record)
        mean, low, high = interval(found[target])
        left.plot([0, 200], [0, 200], "--", color=figures.GREY)
        left.text(118, 128, "perfect", color=figures.GREY, ha="right")
        left.plot(machines, mean, "o-", color=figures.RED, markersize=5)
        left.text(203, mean[-1] + 8, f"{mean[-1]:.0f} times", color=figures.RED, ha="right")
        left.set(xlim=(0, 206), ylim=(0, 206), xlabel="machines", ylabel="times faster than one machine")
        left.set_yticks(range(0, 201, 50))
        shares, bottom, top = (100 * values / machines for values in (mean, low, high))
        right.axhline(100, linestyle="--", color=figures.GREY)
        right.text(300, 103, "perfect", color=figures.GREY, ha="right")
        right.plot(machines, shares, "o-", color=figures.RED, markersize=5)
        right.vlines(machines, bottom, top, color=figures.RED, linewidth=1)
        for n, share in zip(machines[1:], shares[1:], strict=True):
            right.text(n / 1.1, max(1.0, share - 7), f"{share:.0f}", color=figures.RED, ha="right")
        right.set(xlim=(0.9, 330), ylim=(0, 112), ylabel="efficiency (%)")

    def caption(target: int) -> str:
        times = dict(zip(record.options("machines"), found[target].mean(0), strict=True))
        said = "; ".join(f"{n} machines {times[n]:.1f} times faster" for n in (5, 20, 50, 200))
        return f"To {target} % test accuracy: {said}. Bars: 95 % interval over 28 seeds."

    target = widgets.slider("target (%)", start_here.TARGETS, 50)
    widgets.explore_axes(paint, alt=caption, columns=2, height=3.2, target=target)
