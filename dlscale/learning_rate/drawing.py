"""Figures and explorers of 03_learning_rate and its further notebook: a line in the notebook calls each."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from dlscale.page import figures, widgets

COLORS = (figures.BLACK, figures.ORANGE, figures.BLUE, figures.GREEN, figures.RED, figures.PINK)
START = np.array([-9.0, 6.0])  # of the runs on a bowl


def _log_rates(ax: Axes, low: float, high: float, every: int = 1) -> None:
    """A logarithmic axis of learning rates with ticks at powers of two."""
    ticks = 2.0 ** np.arange(np.log2(low), np.log2(high) + 0.1, every)
    ax.set_xscale("log")
    ax.set_xticks(ticks, [f"1/{1 / rate:.0f}" if rate < 1 else f"{rate:g}" for rate in ticks])
    ax.minorticks_off()


def by_rate(
    accuracies: Mapping[str, np.ndarray], rates: Sequence[float], gap: float = 1.5,
    xlabel: str = "learning rate", colors: Sequence[str] = COLORS,
) -> None:  # fmt: skip
    """Validation accuracy, (seeds, rates) in per cent, by learning rate, for each schedule; warm-up is dashed."""
    figure, ax = figures.new(height=3.2)
    lines = {
        name: figures.band(ax, rates, values, color, marker="o", linestyle="--" if "warm-up" in name else "-")
        for (name, values), color in zip(accuracies.items(), colors, strict=False)
    }
    figures.names(ax, lines, gap)
    ax.set(xlabel=xlabel, ylabel="validation accuracy (%)")
    ax.set_title("band: 95 % interval of the mean over the seeds", fontsize=9, color=figures.GREY)
    if min(values.mean(0).min() for values in accuracies.values()) < 15:
        ax.axhline(10, linestyle=":", color=figures.GREY)
        ax.text(rates[0], 11, "guessing", color=figures.GREY)
        ax.set_ylim(0, None)
    _log_rates(ax, min(rates), max(rates))
    best = (f"{values.mean(0).max():.0f} % at {rates[values.mean(0).argmax()]:.2g} ({name})".removesuffix(" ()")
            for name, values in accuracies.items())  # fmt: skip
    figures.show(figure, f"Highest validation accuracy, and its learning rate: {'; '.join(best)}.")


# Section 1


def bowl() -> None:
    """Explore gradient descent on a bowl, 100 times as curved across as along: its path, and the factor of a step."""
    curvature, rates = np.array([0.01, 1.0]), np.linspace(0, 2.4, 200)

    def walk(rate: float) -> np.ndarray:
        return START * (1 - rate * curvature) ** np.arange(31)[:, None]

    def paint(left: Axes, right: Axes, rate: float) -> None:
        figures.contour(left, lambda x, y: (0.01 * x**2 + y**2) / 2, (-10, 10), (-10, 10))
        left.set(xlabel="along, λ = 0.01", ylabel="across, λ = 1", title="30 steps")
        left.plot(*np.clip(walk(rate), -99, 99).T, "o-", color="white", markersize=3, linewidth=1)
        right.axhline(1, color=figures.GREY, linestyle="--")
        right.text(0.03, 1.03, "above: diverges", color=figures.GREY)
        for factor, color in zip(abs(1 - rates[:, None] * curvature).T, (figures.ORANGE, figures.BLUE), strict=True):
            right.plot(rates, factor, color=color)
        right.text(0.3, 0.9, "along, λ = 0.01", color=figures.ORANGE)
        right.text(1.12, 0.04, "across, λ = 1", color=figures.BLUE)
        right.plot([rate] * 2, abs(1 - rate * curvature), "o", color=figures.BLACK)
        right.set(xlabel="learning rate", ylabel="factor of each step, |1 − ηλ|", xlim=(0, 2.4), ylim=(0, 1.45))

    def caption(rate: float) -> str:
        slow, fast = abs(1 - rate * curvature)
        size = abs(walk(rate)[-1])
        return (
            f"Rate {rate:g}: each step multiplies the weight along by {slow:.3f} and the weight across by {fast:.2f}. "
            f"After 30 steps they are {size[0]:.2g} and {size[1]:.2g}."
        )

    rates_of_slider = [0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 1.8, 1.9, 2.0, 2.02, 2.05, 2.1, 2.2, 2.4]
    widgets.explore_axes(paint, alt=caption, columns=2, rate=widgets.slider("learning rate", rates_of_slider, 1.9))


# Sections 1 and 2


def sharpness(
    runs: Mapping[float, tuple[np.ndarray, np.ndarray, float]], every: int, label: str, value: float, highest: float
) -> None:
    """Explore losses and sharpnesses, (seeds, looks), of full-batch runs and their rate, by what the slider sets.

    There are `every` steps from one look to the next; the axis of the sharpness ends at `highest`.
    """

    def paint(left: Axes, right: Axes, choice: float) -> None:
        losses, sharp, rate = runs[choice]
        steps = every * np.arange(losses.shape[1])
        for ax, curves in ((left, losses), (right, sharp)):
            ax.plot(steps, np.clip(np.nan_to_num(curves, nan=1e3), 1e-3, 1e3).T, color=figures.TRAIN, linewidth=1.2)
        (edge,) = right.plot([0, steps[-1]], [2 / rate] * 2, "--", color=figures.RED)
        figures.name(right, edge, "2 / rate")
        left.set(xlabel="step", ylabel="training loss", yscale="log", ylim=(0.005, 20))
        right.set(xlabel="step", ylabel="sharpness", ylim=(0, highest))

    def caption(choice: float) -> str:
        losses, sharp, rate = runs[choice]
        trains = np.isfinite(losses[:, -1])
        said = f"Rate {rate:.2g}, so 2 / rate is {2 / rate:.1f}."
        if not trains.all():
            said += f" {(~trains).sum()} of {len(trains)} runs diverge."
        if trains.any():
            low, high, end = sharp[trains].min(), sharp[trains].max(), sharp[trains, -1].mean()
            said += f" The sharpness ranges from {low:.1f} to {high:.1f}, and ends near {end:.1f}."
        return said

    widgets.explore_axes(paint, alt=caption, columns=2, choice=widgets.slider(label, list(runs), value, "{:.2g}"))


# Section 3


def range_test(tried: np.ndarray, losses: np.ndarray, best: float) -> None:
    """The loss (steps,) of a run whose rate grows as `tried`; the rates that it suggests, and the best constant one."""
    figure, ax = figures.new(height=2.8)
    middles, means = tried[15::31], losses.reshape(-1, 31).mean(1)
    lowest = middles[means.argmin()]
    ax.plot(tried, np.clip(losses, 0, 5), color=figures.SKY, linewidth=0.5)
    ax.plot(middles, means, color=figures.TRAIN)
    ax.axvspan(lowest / 4, lowest, color=figures.GREY, alpha=0.2, linewidth=0)
    ax.text(lowest / 4.3, 3.7, "grey: rates to try", color=figures.GREY, ha="right")
    ax.axvline(best, color=figures.TEST, linestyle="--")
    ax.text(1.7 * lowest, 1.2, "dashed: best constant rate", color=figures.TEST)
    ax.set(xlabel="learning rate", ylabel="training loss", ylim=(1, 4))
    _log_rates(ax, 2**-9, 2**3, every=2)
    figures.show(figure, f"The range test has its lowest loss at {lowest:.2g}; the best constant rate is {best:.2g}.")


# Section 4


def noisy_walks(rates: np.ndarray, curvature: np.ndarray, noise: float, runs: int) -> np.ndarray:
    """Gradient descent (steps + 1, runs, 2) on a bowl, whose gradients carry Gaussian noise, with a rate each step."""
    rng, path = np.random.default_rng(4), np.tile(START, (len(rates) + 1, runs, 1))
    for t, rate in enumerate(rates):
        path[t + 1] = path[t] - rate * (curvature * path[t] + noise * rng.standard_normal((runs, 2)))
    return path


def noisy_bowl(steps: int = 200, noise: float = 3.0) -> None:
    """Explore gradient descent with noisy gradients on a bowl: the last weights, and the mean of the last quarter."""
    curvature, last = np.array([0.2, 1.0]), 3 * steps // 4
    shapes = {"constant": np.ones(steps), "cosine": (1 + np.cos(np.pi * np.arange(steps) / steps)) / 2}

    def loss(w: np.ndarray) -> np.ndarray:
        return (curvature * w**2).sum(-1).mean(-1) / 2

    def paint(left: Axes, right: Axes, rate: float, schedule: str) -> None:
        path = noisy_walks(rate * shapes[schedule], curvature, noise, 200)
        mean = path[last + 1 :].mean(0)
        figures.contour(left, lambda x, y: (0.2 * x**2 + y**2) / 2, (-10, 10), (-10, 10))
        left.plot(*path[: last + 2, 0].T, color="white", linewidth=0.8)
        left.plot(*path[last + 1 :, 0].T, color=figures.BLACK, linewidth=0.9)
        left.plot(*path[-1, 0], "o", color=figures.RED, markeredgecolor="white", markersize=9)
        left.plot(*mean[0], "*", color=figures.GREEN, markeredgecolor="white", markersize=17)
        left.set(xlabel="weight along, λ = 0.2", ylabel="weight across, λ = 1", title="one run; last quarter: black")
        right.plot(range(steps + 1), loss(path), color=figures.RED)
        right.plot([last, steps], [loss(mean)] * 2, color=figures.GREEN, linewidth=4)
        right.text(0.97, 0.92, "● weights of each step", color=figures.RED, ha="right", transform=right.transAxes)
        right.text(0.97, 0.84, "★ mean of the last quarter", color=figures.GREEN, ha="right", transform=right.transAxes)
        right.set(xlabel="step", ylabel="loss", yscale="log", xlim=(0, steps), ylim=(0.03, 60))
        right.set_title("mean of 200 runs")

    def caption(rate: float, schedule: str) -> str:
        path = noisy_walks(rate * shapes[schedule], curvature, noise, 200)
        return (
            f"{schedule.capitalize()}, learning rate {rate:g}: the last weights (dot) have a mean loss of "
            f"{loss(path[-1]):.2g}, the mean weights of the last quarter (star) {loss(path[last + 1 :].mean(0)):.2g}."
        )

    rate = widgets.slider("learning rate", [0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2], 0.4)
    widgets.explore_axes(paint, alt=caption, columns=2, rate=rate, schedule=widgets.menu("schedule", [*shapes]))


# The further notebook


def oscillation(sharp: Mapping[str, np.ndarray], sizes: np.ndarray, edge: float) -> None:
    """Explore the sharpness (seeds, steps) of each method from the edge on, and the oscillation (seeds, steps)."""

    def paint(left: Axes, right: Axes, seed: int) -> None:
        for place, (name, values) in enumerate(sharp.items()):
            color = (figures.BLUE, figures.ORANGE, figures.BLACK, figures.GREEN)[place]
            left.plot(values[seed], ":" if place == 2 else "-", color=color)
            left.text(0.03, 0.93 - 0.08 * place, name, color=color, transform=left.transAxes)
        left.axhline(edge, color=figures.RED, linestyle="--")
        left.text(5, 0.98 * edge, "2 / rate", color=figures.RED, va="top")
        left.set(xlabel="step after 2 / rate is passed", ylabel="sharpness", ylim=(0.6 * edge, 1.7 * edge))
        right.plot(sizes[seed], color=figures.BLUE, linewidth=0.7)
        right.set(xlabel="step after 2 / rate is passed", ylabel="oscillation of whole steps", ylim=(-0.25, 0.25))

    def caption(seed: int) -> str:
        ends = ", ".join(f"{name} {values[seed, -100:].mean():.1f}" for name, values in sharp.items())
        return f"Start {seed}. Sharpness in the last 100 steps: {ends}. The edge is {edge:g}."

    widgets.explore_axes(paint, alt=caption, columns=2, seed=widgets.slider("start", range(len(sizes)), 5))
