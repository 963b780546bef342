"""Figures and explorers of 04_batch_size_and_lars and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from dlscale.batch_size_and_lars import CriticalBatch
from dlscale.course.records import Record
from dlscale.lab.intervals import interval
from dlscale.page import figures, widgets


def _batch_axis(ax: Axes, batches: Sequence[int], every: int = 1) -> None:
    """A logarithmic axis with a mark at each batch size, and its number at `every` second, third … one."""
    ax.set(xscale="log", xlabel="batch size (examples)")
    _ticks(ax.xaxis, batches, every)


def _ticks(axis: Axis, values: Sequence[float], every: int = 1) -> None:
    """Marks of a logarithmic axis, with plain numbers."""
    axis.set_ticks(values, [f"{value:,}" if place % every == 0 else "" for place, value in enumerate(values)])
    axis.set_minor_locator(NullLocator())


def opening(record: Record) -> None:
    """Steps to the same loss for three batches of `batch_size_and_lars-steps`, and what perfect scaling would need."""
    steps = {}
    for size in (8, 64, 512):
        rates = record.options("learning_rate", batch_size=size)
        steps[size] = min(record.values("steps", batch_size=size, learning_rate=rate).mean() for rate in rates)
    figure, ax = figures.new(height=2.1)
    for place, (size, count) in enumerate(steps.items()):
        ax.barh(place, count, color=figures.SKY)
        ax.plot([8 * steps[8] / size] * 2, [place - 0.4, place + 0.4], color=figures.RED)
        ax.text(count + 8, place, f"{count:.0f}", va="center")
    ax.text(180, 1.5, "red: if twice the batch always halved the steps", color=figures.RED, va="center")
    ax.set(xlabel="steps to the same loss, each batch at its best learning rate", ylim=(2.5, -0.5))
    ax.set_yticks(range(3), [f"batch {size}" for size in steps])
    said = (f"batch {size} needs {count:.0f} steps" for size, count in steps.items())
    figures.show(figure, f"Recorded, 16 seeds: {', '.join(said)}.")


# Section 1


def law(batches: np.ndarray, steps: np.ndarray, curves: Mapping[int, tuple], fit: CriticalBatch, target: float) -> None:
    """Explore the batch size: loss by step, `curves[batch]`, and steps (seeds, batches) to the target, with the law."""
    perfect = steps[:, 0].mean() * batches[0] / batches
    fine = np.geomspace(batches[0], batches[-1])
    means = dict(zip(batches.tolist(), steps.mean(0), strict=True))

    def paint(left: Axes, right: Axes, batch: int) -> None:
        for x, y in curves.values():
            left.plot(x, y, color=figures.GREY, alpha=0.35, linewidth=1)
        left.axhline(target, color=figures.RED, linestyle="--", linewidth=1)
        left.text(0.03, target - 0.015, "target", color=figures.RED, va="top", transform=left.get_yaxis_transform())
        left.plot(*curves[batch], color=figures.BLUE, linewidth=2.5)
        for end, ha, nudge in ((batches[0], "left", 1.1), (batches[-1], "right", 0.9)):
            x, y = np.array(curves[end])[:, 0]
            left.text(nudge * x, y, f"batch {end}", color=figures.GREY, ha=ha, va="center")
        left.text(0.97, 0.95, f"batch {batch}", color=figures.BLUE, ha="right", va="top", transform=left.transAxes)
        left.set(xscale="log", xlabel="steps", ylabel="lowest held-out loss so far", ylim=(target - 0.12, 2.35))
        left.set_xlim(0.2, None)
        figures.band(right, batches, steps, figures.BLUE, marker="o", linestyle="none")
        right.plot(fine, fit.steps(fine), color=figures.BLACK)
        right.plot(batches, perfect, ":", color=figures.GREY)
        right.text(30, 0.8 * perfect[2], "half the steps\nfor each\ndoubling", color=figures.GREY, ha="right", va="top")
        right.axvline(fit.batch.mean, color=figures.RED, linestyle="--", linewidth=1)
        right.text(1.15 * fit.batch.mean, steps[:, 0].mean(), "critical batch", color=figures.RED, va="center")
        right.plot(batch, means[batch], "o", color=figures.BLUE, markersize=11)
        right.set(yscale="log", ylabel="steps to the target", ylim=(0.5 * min(means.values()), None))
        _batch_axis(right, batches)
        _ticks(right.yaxis, [30, 100, 300, 1000])

    def caption(batch: int) -> str:
        count, first = means[batch], means[batches[0]]
        return (
            f"Batch {batch} needs {count:.0f} steps, {first / count:.1f} times fewer than batch {batches[0]}, "
            f"and {batch * count / (batches[0] * first):.1f} times as many examples. "
            f"The band is the 95 % interval over {len(steps)} seeds."
        )

    widgets.explore_axes(paint, alt=caption, columns=2, batch=widgets.slider("batch size", list(means), 64))


# Section 2


def noise(clouds: Mapping[int, Mapping[int, np.ndarray]], parts: Mapping[int, tuple[float, float]]) -> None:
    """Explore batch gradients: along and across that of all examples, and their squared norms, by step and batch.

    `clouds[step][batch]` is (draws, 2), in units of the length of the whole gradient; `parts[step]` are signal and
    noise.
    """
    batches = np.array(list(next(iter(clouds.values()))))
    fine = np.geomspace(batches[0], batches[-1])

    def paint(left: Axes, right: Axes, step: int, batch: int) -> None:
        left.annotate("", (1, 0), (0, 0), arrowprops={"arrowstyle": "-|>", "color": figures.BLACK, "lw": 2.5})
        left.plot(*clouds[step][batch].T, "o", color=figures.BLUE, markersize=3.5, alpha=0.5)
        left.set(xlim=(-1.5, 4.5), ylim=(-0.2, 8), xlabel="along G (G has length 1)", ylabel="length across G")
        left.text(0.5, 0.15, "G", ha="center")
        signal, noise = parts[step]
        for name, values, color in (
            ("signal", signal + 0 * fine, figures.BLACK), ("noise / batch", noise / fine, figures.BLUE),
        ):  # fmt: skip
            right.plot(fine, values, color=color)
            right.text(batches[0], 1.1 * values[0], name, color=color, va="bottom")
        right.axvline(batch, color=figures.BLUE, linestyle=":")
        right.axvline(noise / signal, color=figures.RED, linestyle="--", linewidth=1)
        right.text(0.9 * noise / signal, 30, "noise scale", color=figures.RED, ha="right", va="center")
        _batch_axis(right, batches, 2)
        right.set(yscale="log", xlim=(6, 700), ylim=(0.05, 50), ylabel="part of a gradient's squared length")

    def caption(step: int, batch: int) -> str:
        (signal, noise), (along, across) = parts[step], clouds[step][batch].T
        angle = np.degrees(np.arctan2(across, along)).mean()
        return (
            f"Step {step}, squared lengths: signal {signal:.2g}, noise {noise:.2g} / {batch} = {noise / batch:.2g}, "
            f"equal at batch {noise / signal:.0f}. Gradients of batch {batch} are off by {angle:.0f}° on average."
        )

    step = widgets.slider("step", list(clouds), list(clouds)[2])
    batch = widgets.slider("batch size", batches.tolist(), 32)
    widgets.explore_axes(paint, alt=caption, columns=2, step=step, batch=batch)


def rates(batches: np.ndarray, grid: np.ndarray, steps: np.ndarray, best: np.ndarray, fit: CriticalBatch) -> None:
    """Explore the batch size: steps by learning rate, and the best rate (seeds, batches) by batch, with the formula.

    `grid` are the rates (batches, rates), `steps` (batches, rates, seeds); NaN where runs did not arrive.
    """
    arrive, best, places = (
        np.isfinite(steps),
        np.log2(best),
        dict(zip(batches.tolist(), range(len(batches)), strict=True)),
    )
    mean = np.where(arrive, steps, 0).sum(-1) / np.where(arrive.any(-1), arrive.sum(-1), np.nan)
    shape = 1 / (1 + fit.batch.mean / batches)
    height = np.exp2((best.mean(0) - np.log2(shape)).mean())
    first, fine = np.exp2(best[:, 0].mean()), np.geomspace(batches[0], batches[-1])

    def paint(left: Axes, right: Axes, batch: int) -> None:
        here = places[batch]
        for place in {0, len(batches) - 1, here}:
            color = figures.BLUE if place == here else figures.GREY
            left.plot(grid[place], mean[place], color=color)
            some = arrive[place].any(-1) & ~arrive[place].all(-1)
            for which, face in ((arrive[place].all(-1), color), (some, "white")):
                left.plot(grid[place][which], mean[place][which], "o", color=color, markerfacecolor=face)
            x, y = np.array([grid[place], mean[place]])[:, arrive[place].any(-1)][:, 0]
            across, up, ha = (0.85, 0.95, "right") if batches[place] == batches[-1] else (1, 1.15, "left")
            left.text(across * x, up * y, f"batch {batches[place]}", color=color, ha=ha)
        failed = grid[here][~arrive[here].any(-1)]
        left.plot(failed, np.full(len(failed), 0.95), "x", color=figures.BLUE, transform=left.get_xaxis_transform())
        left.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="steps to the target", ylim=(45, 1400))
        left.set_title("hollow: mean of the runs that arrive; ×: none arrives", fontsize=9, color=figures.GREY)
        _ticks(left.yaxis, [50, 100, 200, 500, 1000])
        middle, low, high = interval(best)
        right.plot([batches, batches], [2**low, 2**high], color=figures.BLUE)
        right.plot(batches, 2**middle, "o", color=figures.BLUE, markersize=5)
        right.plot(fine, height / (1 + fit.batch.mean / fine), color=figures.BLACK)
        for power, text, at in ((1, "linear", 4), (0.5, "square root", 3)):
            line = first * (batches / batches[0]) ** power
            right.plot(batches, line, ":", color=figures.GREY)
            ha, va, lift = ("right", "bottom", 1.15) if power == 1 else ("left", "top", 0.8)
            right.text(batches[at], line[at] * lift, text, color=figures.GREY, ha=ha, va=va)
        right.axvline(fit.batch.mean, color=figures.RED, linestyle="--", linewidth=1)
        right.text(1.1 * fit.batch.mean, 0.75 * first, "critical batch", color=figures.RED, va="center")
        right.plot(batch, 2 ** middle[here], "o", color=figures.BLUE, markersize=11)
        right.set(yscale="log", ylabel="best learning rate", ylim=(0.6 * first, 5))
        for axis in (left.xaxis, right.yaxis):
            _ticks(axis, [0.1, 0.3, 1, 3])
        _batch_axis(right, batches)

    def caption(batch: int) -> str:
        measured, formula = 2 ** best[:, places[batch]].mean(), height * shape[places[batch]]
        return (
            f"Batch {batch}: the best learning rate is {measured:.2g}. "
            f"The formula, its height fitted to these rates, gives {formula:.2g}."
        )

    widgets.explore_axes(paint, alt=caption, columns=2, batch=widgets.slider("batch size", list(places), 64))


# Section 3


def ladder(accuracies: Mapping[int, np.ndarray], epochs: Sequence[int], examples: int) -> None:
    """Test accuracy, (seeds, epochs) in per cent, of each batch by the number of updates; equal epochs in red."""
    figure, ax = figures.new(height=3.2)
    for (batch, samples), color in zip(accuracies.items(), (figures.BLUE, figures.GREEN, figures.ORANGE), strict=True):
        line = figures.band(ax, np.array(epochs) * examples // batch, samples, color, marker="o")
        figures.name(ax, line, f"batch {batch}", -10 if batch == 512 else 0)
        for end, ha, down in ((0, "right" if batch == 32 else "left", batch != 32), (-1, "right", batch == 512)):
            place = line.get_xydata()[end], (4 if ha == "left" else -4, -13 if down else 7)
            ax.annotate(f"{epochs[end]}", *place, textcoords="offset points", color=color, ha=ha)
    ax.set_title("numbers: epochs, which double from dot to dot", fontsize=9, color=figures.GREY)
    ax.axvline(epochs[0] * examples // 32, color=figures.RED, linestyle="--", linewidth=1)
    ax.text(epochs[0] * examples // 32 * 1.05, 45, "equal updates", color=figures.RED)
    ax.set(xscale="log", xlabel="updates", xlim=(60, 60_000))
    ax.set(ylabel="test accuracy (%)", ylim=(41, 61), yticks=range(45, 61, 5))
    ends = ", ".join(f"batch {batch} {samples[:, -1].mean():.0f} %" for batch, samples in accuracies.items())
    figures.show(figure, f"Recorded: test accuracy by updates. After {epochs[-1]} epochs: {ends}.")


# Section 4


def layers(ratios: np.ndarray, moves: Mapping[str, np.ndarray], names: Sequence[str]) -> None:
    """Explore ‖w‖ / ‖g‖ of each layer, (steps, layers), and by how much of its length each optimizer moves it (%)."""

    def paint(left: Axes, right: Axes, step: int) -> None:
        left.plot(names, ratios[step], "o", color=figures.BLACK, markersize=8)
        left.set(yscale="log", ylim=(ratios.min() / 1.5, ratios.max() * 1.5), xlabel="layer", ylabel="‖w‖ / ‖g‖")
        for place, (name, values) in enumerate(moves.items()):
            color = (figures.ORANGE, figures.BLUE)[place]
            right.plot(names, values[step], "o-", color=color)
            right.text(0.03, 0.95 - 0.08 * place, name, color=color, transform=right.transAxes, va="top")
        values = np.concatenate(list(moves.values()))
        right.set(yscale="log", ylim=(values.min() / 1.5, values.max() * 4), xlabel="layer")
        right.set_ylabel("‖change of w‖ / ‖w‖ (%)")

    def caption(step: int) -> str:
        one_rate, lars = (values[step] for values in moves.values())
        return (
            f"Step {step}: the largest ‖w‖ / ‖g‖ is {ratios[step].max() / ratios[step].min():.1f} times the smallest. "
            f"One rate for all moves the layers by {one_rate.min():.2g} to {one_rate.max():.2g} % of their length, "
            f"LARS by {lars.mean():.2g} % on average."
        )

    steps = [0, 1, 2, 3, 5, 7, *range(10, len(ratios), 5)]
    widgets.explore_axes(paint, alt=caption, columns=2, step=widgets.slider("step", steps, 0))


def lars_record(curves: Mapping[str, np.ndarray], batches: Sequence[int], leads: Mapping[str, np.ndarray]) -> None:
    """Recorded test accuracy (seeds, batches) by batch, and the leads over momentum (seeds,) at one batch."""
    figure, (left, right) = figures.new(2, height=3.0)
    for (name, samples), color in zip(curves.items(), (figures.ORANGE, figures.BLUE), strict=True):
        line = figures.band(left, batches, samples, color, marker="o")
        x, y = line.get_xydata()[2]
        ha, x, y = ("left", 1.1 * x, y + 1) if name == "LARS" else ("right", 0.8 * x, y - 2)
        left.text(x, y, name, color=color, ha=ha)
    _batch_axis(left, batches)
    left.set(ylabel="test accuracy (%)")
    for place, values in enumerate(leads.values()):
        mean, low, high = interval(values)
        right.plot([low, high], [place] * 2, color=figures.BLUE)
        right.plot(mean, place, "o", color=figures.BLUE)
    right.axvline(0, color=figures.ORANGE)
    right.text(0.25, len(leads) - 0.55, "momentum", color=figures.ORANGE, va="center")
    right.set_yticks(range(len(leads)), list(leads))
    right.set(ylim=(len(leads) - 0.3, -0.5), xlim=(-1, 13), xlabel="lead at batch 750 (points)", xticks=[0, 5, 10])
    said = (f"{name.replace(chr(10), ' ')} {values.mean():.1f}" for name, values in leads.items())
    figures.show(figure, f"Recorded, with batch normalisation. Leads over momentum at batch 750: {', '.join(said)}.")


# The further notebook


def machine(seconds: Callable[..., np.ndarray], critical: float) -> None:
    """Explore how fast a cluster trains: `seconds(batch, workers, overhead, latency, megabytes, way)` to the target."""
    workers, batches = 2 ** np.arange(11), 2.0 ** np.arange(0, 14.1, 0.25)

    def results(count: int, parts: dict) -> tuple[np.ndarray, np.ndarray]:
        times = seconds(batches, workers[:, None], **parts)
        return times[workers == count][0], times[0].min() / times.min(1)

    def paint(left: Axes, right: Axes, count: int, **parts: float) -> None:
        row, gains = results(count, parts)
        left.plot(batches, row, color=figures.BLUE)
        left.plot(batches[row.argmin()], row.min(), "o", color=figures.BLUE)
        left.axvline(critical, color=figures.RED, linestyle="--", linewidth=1)
        left.text(1.2 * critical, 100, "critical batch", color=figures.RED)
        left.set(xlim=(1, 2**14), ylim=(0.05, 300), xlabel="batch size (examples)", ylabel="seconds to the target")
        figures.name(right, right.plot(workers, workers, ":", color=figures.GREY)[0], "ideal")
        right.plot(workers, gains, color=figures.BLUE)
        right.plot(count, gains[workers == count], "o", color=figures.BLUE)
        right.set(xlim=(0.8, 3000), ylim=(0.5, 1500), xlabel="workers", ylabel="speed-up, each at its best batch")
        for ax in (left, right):
            ax.set(xscale="log", yscale="log")

    def caption(count: int, **parts: float) -> str:
        row, gains = results(count, parts)
        return (
            f"{count:,} workers: the best batch is {batches[row.argmin()]:.0f}. They reach the target in "
            f"{row.min():.2f} s, {gains[workers == count][0]:.1f} times faster than one worker at its best batch."
        )

    widgets.explore_axes(
        paint, alt=caption, columns=2,
        count=widgets.slider("workers", workers.tolist(), 64),
        overhead=widgets.slider("overhead per step (ms)", [0.1, 0.3, 1, 3, 10, 30], 1),
        latency=widgets.slider("latency (µs)", [0, 1, 3, 10, 30, 100], 10),
        megabytes=widgets.slider("gradients (MB)", [0.01, 0.1, 1, 10, 100], 1),
        way=widgets.menu("all-reduce", ["reduce-scatter + gather", "ring", "tree"]),
    )  # fmt: skip


def warm_up(maps: Mapping[str, np.ndarray], sizes: Sequence[int], grid: Sequence[float], base: float) -> None:
    """Explore held-out accuracy (rates, batch sizes) with and without warm-up: where does the linear rule leave it?"""

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        mesh = ax.pcolormesh(range(len(sizes)), np.log2(grid), maps["none"], cmap="viridis", vmin=10, vmax=58)
        fig.colorbar(mesh, ax=ax, label="accuracy on held-out signals (%)")
        places = np.log2(np.array(sizes) / sizes[0])
        (best,) = ax.plot([], [], "o", color=figures.RED)
        ax.plot(places, np.log2(base) + places, "--", color="white")
        ax.text(4.35, np.log2(base) + 4.9, "linear rule", color="white", ha="right")
        ax.set(xlabel="batch size (examples)", ylabel="learning rate", xlim=(-0.5, len(sizes) - 0.5), ylim=(-5.5, 4.5))
        ax.set_xticks(range(len(sizes)), [f"{size:,}" for size in sizes])
        ax.set_yticks(np.log2(grid), [f"{rate:g}" for rate in grid])
        ax.grid(False)

        def update(name: str) -> list[Artist]:
            mesh.set_array(maps[name].ravel())
            best.set_data(range(len(sizes)), np.log2(grid)[maps[name].argmax(0)])
            return [mesh, *ax.lines, *ax.texts]

        return update

    def caption(name: str) -> str:
        top = ", ".join(f"{grid[place]:g}" for place in maps[name].argmax(0))
        return f"Warm-up: {name}. Best learning rates for batches {sizes[0]} to {sizes[-1]:,}, in red: {top}."

    widgets.explore(make, alt=caption, name=widgets.menu("warm-up", list(maps)))
