"""Figures and explorers of 00_start_here: a line in the notebook calls each."""

from collections.abc import Mapping

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlscale import start_here
from dlscale.course.records import Record
from dlscale.lab.data import Dataset
from dlscale.lab.intervals import interval
from dlscale.page import figures, widgets

EXAMPLES, SHARE = 3000, 15  # of the training set, of a machine in each step
COLORS = {1: figures.BLACK, 5: figures.SKY, 20: figures.BLUE, 50: figures.ORANGE, 200: figures.RED}


def named(machines: int) -> str:
    return f"{machines} machine{'s' * (machines > 1)}"


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

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        ax.barh(0, EXAMPLES, color="#dfeaf3")
        (first,) = ax.barh(0, 0, color=figures.ORANGE)
        (cuts,) = ax.plot([], [], color=figures.BLUE, linewidth=1)
        text = ax.text(0, 0.62, "", color="#a06f00", weight="bold")
        ax.set(xlim=(-5, EXAMPLES + 5), ylim=(-0.5, 1.0), yticks=[], xlabel="one pass: the 3,000 training examples")
        ax.spines["left"].set_visible(False)
        ax.grid(False)

        def update(machines: int) -> list[Artist]:
            size = SHARE * machines
            edges = np.arange(0, EXAMPLES + 1, size)
            first.set_width(size)
            cuts.set_data(np.repeat(edges, 3), np.tile([-0.4, 0.4, np.nan], len(edges)))
            text.set_text(f"one step: {machines} × {SHARE} = {size:,} examples")
            return [first, cuts, text]

        return update

    def caption(machines: int) -> str:
        size = SHARE * machines
        return f"{named(machines)}: a step uses {size:,} examples, so one pass takes {EXAMPLES // size} steps."

    widgets.explore(make, alt=caption, height=1.7, machines=widgets.slider("machines", [2, 5, 10, 40, 50, 100], 10))


# Live


def signals(dataset: Dataset) -> None:
    """Three training signals of each of five classes."""
    figure, columns = figures.new(5, height=1.9)
    for label, ax in enumerate(columns):
        three = dataset.x_train[dataset.y_train == label][:3].T
        ax.plot(np.add(three, [0, 6, 12]), color=figures.BLUE, linewidth=1.2)
        ax.set(title=f"shape {label}", xticks=[], yticks=[])
    figures.show(figure, "Three signals of each of five shapes: height, place, slope and noise differ within a shape.")


def passes_of(curves: np.ndarray, most: int) -> np.ndarray:
    """The passes at which each test of the curves, (seeds, tests), was made."""
    return most * np.arange(1, curves.shape[1] + 1) / curves.shape[1]


def equal_passes(curves: Mapping[int, np.ndarray], most: Mapping[int, int], end: int) -> None:
    """Explore the test accuracy in per cent, (seeds, tests), of one machine and of others, until pass `end`."""
    passes = {n: passes_of(curves[n], most[n]) for n in curves}
    shown = {n: curves[n][:, passes[n] <= end + 1e-6] for n in curves}

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        figures.band(ax, passes[1][: shown[1].shape[1]], shown[1], figures.BLACK)
        ax.text(end + 0.15, shown[1][:, -1].mean(), "1 machine", va="center")
        seeds = [ax.plot([], [], color=figures.RED, linewidth=0.7, alpha=0.6)[0] for _ in shown[1]]
        (line,) = ax.plot([], [], "o-", color=figures.RED, markersize=4)
        label = ax.text(end + 0.15, 0, "", color=figures.RED, va="center")
        ax.set(xlim=(0, end * 1.24), ylim=(0, 65), xlabel="passes through the data", ylabel="test accuracy (%)")
        ax.set_xticks(range(0, end + 1, 2))

        def update(machines: int) -> list[Artist]:
            tested = passes[machines][: shown[machines].shape[1]]
            for seed, values in zip(seeds, shown[machines], strict=True):
                seed.set_data(tested, values)
            mean = shown[machines].mean(0)
            line.set_data(tested, mean)
            label.set(y=min(mean[-1], shown[1][:, -1].mean() - 3.5), text=named(machines))
            return [*seeds, line, label]

        return update

    def caption(machines: int) -> str:
        one, many = (shown[n][:, -1].mean() for n in (1, machines))
        size = SHARE * machines
        return (
            f"{named(machines)}, {EXAMPLES * end // size} steps in {end} passes: test accuracy {many:.1f} %, against "
            f"{one:.1f} % with one machine. Means of five runs; thin: each run; grey band: 95 % interval of the mean."
        )

    machines = widgets.slider("machines", [n for n in curves if n > 1], 200)
    widgets.explore(make, alt=caption, machines=machines)


def arrivals(curves: Mapping[int, np.ndarray], most: Mapping[int, int]) -> None:
    """Explore when the mean run reaches a target: in passes, and in time with what perfect sharing would need."""
    passes = {n: passes_of(curves[n], most[n]) for n in curves}
    best = {n: np.maximum.accumulate(curves[n], axis=1).mean(0) for n in curves}

    def arrival(n: int, target: float) -> float:
        there = curves[n] >= target
        return np.where(there.any(1), passes[n][there.argmax(1)], np.nan).mean()

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        level = left.axhline(0, color=figures.GREY, linestyle=":")
        for n, color in COLORS.items():
            left.plot(passes[n], best[n], color=color)
        left.set(xscale="log", ylim=(10, 65), xlabel="passes through the data", ylabel="best test accuracy so far (%)")
        left.set_xticks([0.2, 1, 5, 20, 60], ["0.2", "1", "5", "20", "60"])
        rows = dict(zip(curves, range(len(curves)), strict=True))
        dots = [left.plot([], [], "o", color=color)[0] for color in COLORS.values()]
        lost = [right.plot([], [], color=color, linewidth=5, alpha=0.3)[0] for color in COLORS.values()]
        ends = [right.plot([], [], "o", color=color, markersize=8)[0] for color in COLORS.values()]
        perfect = [right.plot([], [], "|", color=color, markersize=14)[0] for color in COLORS.values()]
        names = [right.text(1, 4.65, name, color=figures.RED, va="center") for name in ("perfect", "measured")]
        right.set(xscale="log", xlim=(0.003, 14), ylim=(5, -0.6), xlabel="time, in passes of one machine")
        right.set_xticks([0.01, 0.1, 1, 10], ["0.01", "0.1", "1", "10"])
        right.set_yticks([*rows.values()], [named(n) for n in rows])
        for tick, color in zip(right.get_yticklabels(), COLORS.values(), strict=True):
            tick.set_color(color)
        left.minorticks_off()
        right.minorticks_off()

        def update(target: int) -> list[Artist]:
            level.set_ydata([target, target])
            one = arrival(1, target)
            for n, place in rows.items():
                dots[place].set_data([arrival(n, target)], [target])
                ends[place].set_data([arrival(n, target) / n], [place])
                perfect[place].set_data([one / n], [place])
                lost[place].set_data([one / n, arrival(n, target) / n], [place, place])
            for name, where in zip(names, (one / 200, arrival(200, target) / 200), strict=True):
                name.set(x=where if np.isfinite(where) else 1, visible=bool(np.isfinite(where)))
            return [level, *dots, *lost, *ends, *perfect, *names]

        return update

    def caption(target: int) -> str:
        said = ", ".join(f"{named(n)} {arrival(n, target):.1f}" for n in curves if np.isfinite(arrival(n, target)))
        never = [named(n) for n in curves if not np.isfinite(arrival(n, target))]
        return (
            f"Passes to {target} %, mean of five seeds: {said}. "
            f"{'Not every run arrived with ' + ', '.join(never) + '. ' if never else ''}"
            "Right: dots are measured, upright marks show perfect sharing."
        )

    widgets.explore(make, alt=caption, target=widgets.slider("target (%)", list(range(30, 57, 2)), 50))


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
    found = {
        passes: np.stack([start_here.tuned(record, n, f"after {passes} passes")[1] for n in record.options("machines")])
        for passes in start_here.PASSES
    }

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        machines = _machines(ax, record)
        ax.plot(machines, found[10].mean(1), ":", color=figures.GREY)
        ax.text(225, found[10].mean(1)[-1], "after\n10 passes", color=figures.GREY, va="center")
        (line,) = ax.plot([], [], "o-", color=figures.RED)
        (runs,) = ax.plot([], [], "_", color=figures.RED, markersize=10, alpha=0.4)
        (gap,) = ax.plot([], [], "_-", color=figures.BLACK, linewidth=1.2)
        label = ax.text(285, 0, "", va="center")
        name = ax.text(0.95, 46, "", color=figures.RED)
        ax.set(ylim=(0, 68), xlim=(0.9, 900), ylabel="test accuracy (%)")

        def update(passes: int) -> list[Artist]:
            mean = found[passes].mean(1)
            line.set_data(machines, mean)
            runs.set_data(np.repeat(machines, found[passes].shape[1]), found[passes].ravel())
            gap.set_data([250, 250], [mean[-1], mean[0]])
            label.set(y=(mean[0] + mean[-1]) / 2, text=f"{mean[0] - mean[-1]:.1f} points\nbelow 1 machine")
            name.set_text(f"after {passes} passes")
            return [line, runs, gap, label, name]

        return update

    def caption(passes: int) -> str:
        one, many = found[passes][0].mean(), found[passes][-1].mean()
        return (
            f"After {passes} passes: {one:.1f} % with one machine, {many:.1f} % with 200 machines, each at its best "
            "learning rate. A mark for each of 28 runs, and a line through their means."
        )

    widgets.explore(make, alt=caption, passes=widgets.slider("passes", start_here.PASSES, 150))


def efficiency(record: Record) -> None:
    """Explore speed-up and efficiency to a target, by the number of machines."""
    found = {
        target: np.stack([start_here.speed_up(record, n, target) for n in record.options("machines")], axis=1)
        for target in start_here.TARGETS
    }

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        machines = record.options("machines")
        left.plot([0, 200], [0, 200], "--", color=figures.GREY)
        left.text(118, 128, "perfect", color=figures.GREY, ha="right")
        left.set(xlim=(0, 206), ylim=(0, 206), xlabel="machines", ylabel="times faster than one machine")
        left.set_yticks(range(0, 201, 50))
        _machines(right, record)
        right.axhline(100, linestyle="--", color=figures.GREY)
        right.text(300, 103, "perfect", color=figures.GREY, ha="right")
        right.set(xlim=(0.9, 330), ylim=(0, 112), ylabel="efficiency (%)")
        (speed,) = left.plot([], [], "o-", color=figures.RED, markersize=5)
        note = left.text(203, 0, "", color=figures.RED, ha="right")
        (percent,) = right.plot([], [], "o-", color=figures.RED, markersize=5)
        bars = [right.plot([], [], color=figures.RED, linewidth=1)[0] for _ in machines]
        texts = [right.text(n / 1.1, 0, "", color=figures.RED, ha="right") for n in machines]

        def update(target: int) -> list[Artist]:
            mean, low, high = interval(found[target])
            speed.set_data(machines, mean)
            note.set(y=mean[-1] + 8, text=f"{mean[-1]:.0f} times")
            shares = 100 * mean / machines
            percent.set_data(machines, shares)
            for n, bar, text, share, bottom, top in zip(machines, bars, texts, shares, low, high, strict=True):
                bar.set_data([n, n], [100 * bottom / n, 100 * top / n])
                text.set(y=max(1.0, share - 7), text=f"{share:.0f}" if n > 1 else "")
            return [speed, note, percent, *bars, *texts]

        return update

    def caption(target: int) -> str:
        times = dict(zip(record.options("machines"), found[target].mean(0), strict=True))
        said = "; ".join(f"{named(n)} {times[n]:.1f} times faster" for n in COLORS if n > 1)
        return (
            f"To {target} % test accuracy: {said}. Efficiency is the speed-up divided by the number of machines. "
            "Bars: 95 % interval over 28 seeds."
        )

    target = widgets.slider("target (%)", start_here.TARGETS, 50)
    widgets.explore(make, alt=caption, height=3.2, target=target)
