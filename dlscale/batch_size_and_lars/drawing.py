"""Figures and explorers of 04_batch_size_and_lars and its further notebook: a line in the notebook calls each."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
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


def law(batches: np.ndarray, steps: np.ndarray, fit: CriticalBatch) -> None:
    """Explore the batch size: steps (seeds, batches) to the target, with the law."""
    perfect = steps[:, 0].mean() * batches[0] / batches
    fine = np.geomspace(batches[0], batches[-1])
    means = dict(zip(batches.tolist(), steps.mean(0), strict=True))

    def paint(ax: Axes, batch: int) -> None:
        figures.band(ax, batches, steps, figures.BLUE, marker="o", linestyle="none")
        ax.plot(fine, fit.steps(fine), color=figures.BLACK)
        ax.plot(batches, perfect, ":", color=figures.GREY)
        ax.text(40, 0.8 * perfect[2], "half the steps\nfor each doubling", color=figures.GREY, ha="right", va="top")
        ax.axvline(fit.batch.mean, color=figures.RED, linestyle="--", linewidth=1)
        ax.text(1.1 * fit.batch.mean, steps[:, 0].mean(), "critical batch", color=figures.RED, va="center")
        ax.plot(batch, means[batch], "o", color=figures.BLUE, markersize=11)
        ax.set(yscale="log", ylabel="steps to the target", ylim=(0.5 * min(means.values()), None))
        _batch_axis(ax, batches)
        _ticks(ax.yaxis, [30, 100, 300, 1000])

    def caption(batch: int) -> str:
        count, first = means[batch], means[batches[0]]
        return (
            f"Batch {batch} needs {count:.0f} steps, {first / count:.1f} times fewer than batch {batches[0]}, "
            f"and {batch * count / (batches[0] * first):.1f} times as many examples. "
            f"The band is the 95 % interval over {len(steps)} seeds."
        )

    widgets.explore_axes(paint, alt=caption, batch=widgets.slider("batch size", list(means), 64))


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
        lines = {"signal": (signal + 0 * fine, figures.BLACK), "noise / B": (noise / fine, figures.BLUE)}
        for name, (values, color) in lines.items():
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

    `grid` are the rates (batches, rates), `steps` (batches, rates, seeds).
    """
    mean, best = steps.mean(-1), np.log2(best)
    places = {batch: place for place, batch in enumerate(batches.tolist())}
    shape = 1 / (1 + fit.batch.mean / batches)
    height = np.exp2((best.mean(0) - np.log2(shape)).mean())
    first, fine = np.exp2(best[:, 0].mean()), np.geomspace(batches[0], batches[-1])

    def paint(left: Axes, right: Axes, batch: int) -> None:
        here = places[batch]
        for place in {0, len(batches) - 1, here}:
            color = figures.BLUE if place == here else figures.GREY
            left.plot(grid[place], mean[place], "o-", color=color)
            low = mean[place].argmin()
            left.text(grid[place, low], 0.72 * mean[place, low], f"batch {batches[place]}", color=color, ha="center")
        left.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="steps to the target", ylim=(40, 2800))
        left.set_title("a run that never arrives counts twice the steps", fontsize=9, color=figures.GREY)
        _ticks(left.yaxis, [50, 100, 200, 500, 1000, 2000])
        middle, low, high = interval(best)
        right.plot([batches, batches], [2**low, 2**high], color=figures.BLUE)
        right.plot(batches, 2**middle, "o", color=figures.BLUE, markersize=5)
        right.plot(fine, height / (1 + fit.batch.mean / fine), color=figures.BLACK)
        right.plot(batches, first * batches / batches[0], ":", color=figures.GREY)
        right.text(64, 1.15 * first * 64 / batches[0], "linear", color=figures.GREY, ha="right", va="bottom")
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
    doubled = f"dots: {epochs[0]} to {epochs[-1]} epochs, which double from dot to dot"
    ax.set_title(doubled, fontsize=9, color=figures.GREY)
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


def lars_record(curves: Mapping[str, np.ndarray], batches: Sequence[int]) -> None:
    """Recorded test accuracy (seeds, batches) of momentum and LARS, by batch."""
    figure, ax = figures.new(height=2.8)
    lines = zip(curves.items(), (figures.ORANGE, figures.BLUE), (-12, 8), strict=True)
    for (name, samples), color, shift in lines:
        figures.name(ax, figures.band(ax, batches, samples, color, marker="o"), name, shift)
    _batch_axis(ax, batches)
    ax.set(ylabel="test accuracy (%)")
    ends = ", ".join(f"{name} {samples[:, 2].mean():.0f} %" for name, samples in curves.items())
    figures.show(figure, f"Recorded, with batch normalisation. At batch {batches[2]}: {ends}.")
