"""Figures and explorers of 03_learning_rate and its further notebook: a line in the notebook calls each."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlscale.page import figures, widgets

COLORS = (figures.BLACK, figures.ORANGE, figures.BLUE, figures.GREEN, figures.RED, figures.PINK)
START = np.array([-9.0, 6.0])  # of the runs on a bowl


def _log_rates(ax: Axes, low: float, high: float, every: int = 1) -> None:
    """A logarithmic axis of learning rates with ticks at powers of two."""
    ticks = 2.0 ** np.arange(np.log2(low), np.log2(high) + 0.1, every)
    ax.set_xscale("log")
    ax.set_xticks(ticks, [f"1/{1 / rate:.0f}" if rate < 1 else f"{rate:g}" for rate in ticks])
    ax.minorticks_off()


def _accuracies(
    accuracies: Mapping[str, np.ndarray], x: Sequence[float], gap: float, colors: Sequence[str] = COLORS
) -> tuple[Figure, Axes]:
    """A line with its interval for each array of accuracies, (seeds, len(x)) in per cent; names are `gap` apart."""
    figure, ax = figures.new(height=3.2)
    pairs = zip(accuracies.items(), colors, strict=False)
    lines = {name: figures.band(ax, x, values, color, marker="o") for (name, values), color in pairs}
    figures.names(ax, lines, gap)
    ax.set(ylabel="validation accuracy (%)")
    ax.set_title("band: 95 % interval of the mean over the seeds", fontsize=9, color=figures.GREY)
    return figure, ax


def by_rate(
    accuracies: Mapping[str, np.ndarray], rates: Sequence[float], gap: float = 1.5, xlabel: str = "learning rate"
) -> None:
    """Validation accuracy, (seeds, rates) in per cent, by learning rate, for each schedule."""
    figure, ax = _accuracies(accuracies, rates, gap)
    ax.set(xlabel=xlabel)
    if min(values.mean(0).min() for values in accuracies.values()) < 15:
        ax.axhline(10, color=figures.GREY, linestyle=":")
        ax.text(rates[0], 11, "guessing", color=figures.GREY)
        ax.set_ylim(0, None)
    _log_rates(ax, min(rates), max(rates))
    best = (f"{name} {values.mean(0).max():.0f} % at {rates[values.mean(0).argmax()]:.2g}".strip()
            for name, values in accuracies.items())  # fmt: skip
    figures.show(figure, f"Validation accuracy at the best learning rate: {', '.join(best)}.")


# Section 1


def bowl() -> None:
    """Explore gradient descent on a bowl, 100 times as curved across as along: its path, and the factor of a step."""
    curvature, rates = np.array([0.01, 1.0]), np.linspace(0, 2.4, 200)

    def walk(rate: float) -> np.ndarray:
        return START * (1 - rate * curvature) ** np.arange(31)[:, None]

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        figures.contour(left, lambda x, y: (0.01 * x**2 + y**2) / 2, (-10, 10), (-10, 10))
        left.set(xlabel="along, λ = 0.01", ylabel="across, λ = 1", title="30 steps")
        (path,) = left.plot([], [], "o-", color="white", markersize=3, linewidth=1)
        right.axhline(1, color=figures.GREY, linestyle="--")
        right.text(0.03, 1.03, "above: diverges", color=figures.GREY)
        for factor, color in zip(abs(1 - rates[:, None] * curvature).T, (figures.ORANGE, figures.BLUE), strict=True):
            right.plot(rates, factor, color=color)
        right.text(0.3, 0.9, "along, λ = 0.01", color=figures.ORANGE)
        right.text(1.12, 0.04, "across, λ = 1", color=figures.BLUE)
        (dots,) = right.plot([], [], "o", color=figures.BLACK)
        right.set(xlabel="learning rate", ylabel="factor of each step, |1 − ηλ|", xlim=(0, 2.4), ylim=(0, 1.45))

        def update(rate: float) -> list[Artist]:
            path.set_data(*np.clip(walk(rate), -99, 99).T)
            dots.set_data([rate] * 2, abs(1 - rate * curvature))
            return [path, dots]

        return update

    def caption(rate: float) -> str:
        slow, fast = abs(1 - rate * curvature)
        size = abs(walk(rate)[-1])
        return (
            f"Rate {rate:g}: each step multiplies the weight along by {slow:.3f} and the weight across by {fast:.2f}. "
            f"After 30 steps they are {size[0]:.2g} and {size[1]:.2g}."
        )

    rates_of_slider = [0.05, 0.1, 0.2, 0.5, 1.0, 1.5, 1.8, 1.9, 2.0, 2.02, 2.05, 2.1, 2.2, 2.4]
    widgets.explore(make, alt=caption, rate=widgets.slider("learning rate", rates_of_slider, 1.9))


# Sections 1 and 2


def sharpness(
    runs: Mapping[float, tuple[np.ndarray, np.ndarray, float]], every: int, label: str, value: float, highest: float
) -> None:
    """Explore losses and sharpnesses, (seeds, looks), of full-batch runs and their rate, by what the slider sets.

    There are `every` steps from one look to the next; the axis of the sharpness ends at `highest`.
    """
    seeds, looks = next(iter(runs.values()))[0].shape
    steps = every * np.arange(looks)

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        fall, rise = (
            ax.plot(steps, np.ones((looks, seeds)), color=figures.TRAIN, linewidth=1.2) for ax in (left, right)
        )
        (limit,) = right.plot([0, steps[-1]], [0, 0], "--", color=figures.RED)
        text = right.text(steps[-1], 0, "2 / rate", color=figures.RED, ha="right", va="top")
        left.set(xlabel="step", ylabel="training loss", yscale="log", ylim=(0.005, 20))
        right.set(xlabel="step", ylabel="sharpness", ylim=(0, highest))

        def update(choice: float) -> list[Artist]:
            losses, sharp, rate = runs[choice]
            for line, curve in zip([*fall, *rise], [*losses, *sharp], strict=True):
                line.set_ydata(np.clip(np.nan_to_num(curve, nan=1e3), 1e-3, 1e3))
            limit.set_ydata([2 / rate] * 2)
            text.set_y(2 / rate - highest / 50)
            return [*fall, *rise, limit, text]

        return update

    def caption(choice: float) -> str:
        losses, sharp, rate = runs[choice]
        begin = f"Rate {rate:.2g}, so 2 / rate is {2 / rate:.1f}. The sharpness begins at {sharp[:, 0].mean():.1f}"
        if (failed := (~np.isfinite(losses[:, -1])).sum()) == seeds:
            return f"{begin}. The run diverges." if seeds == 1 else f"{begin}. All runs diverge."
        fall, end = np.nanmin(sharp, 1).mean(), np.nanmean(sharp[:, -1])
        said = f"{begin}, falls to {fall:.1f} at its lowest, and ends at {end:.1f}."
        return said + (f" {failed} of {seeds} runs diverge." if failed else "")

    widgets.explore(make, alt=caption, choice=widgets.slider(label, list(runs), value, "{:.2g}"))


# Section 3


def range_test(tried: np.ndarray, losses: np.ndarray, rates: Sequence[float], accuracies: np.ndarray) -> None:
    """The loss (steps,) of a run whose rate grows as `tried`, over accuracies (seeds, rates) of constant rates."""
    figure = figures.new(height=4.2)[0]
    figure.clear()
    upper, lower = figure.subplots(2, 1, sharex=True)
    middles, means = tried[15::31], losses.reshape(-1, 31).mean(1)
    lowest, best = middles[means.argmin()], rates[accuracies.mean(0).argmax()]
    upper.plot(tried, np.clip(losses, 0, 5), color=figures.SKY, linewidth=0.5)
    upper.plot(middles, means, color=figures.TRAIN)
    upper.text(tried[5], 1.3, "one run, its rate growing", color=figures.TRAIN)
    figures.band(lower, rates, accuracies, figures.TEST, marker="o", markersize=4)
    lower.text(tried[5], 42, "many runs, each at one rate", color=figures.TEST)
    for ax in (upper, lower):
        ax.axvspan(lowest / 4, lowest, color=figures.GREY, alpha=0.2, linewidth=0)
        ax.spines[["top", "right"]].set_visible(False)
    upper.axvline(lowest, color=figures.GREY, linestyle="--")
    upper.text(1.05 * lowest, 3.5, "lowest loss", color=figures.GREY)
    lower.text(lowest / 2, 9, "rates to try", color=figures.GREY, ha="center")
    upper.set(ylabel="training loss", ylim=(1, 4))
    lower.set(xlabel="learning rate", ylabel="validation\naccuracy (%)", ylim=(5, 55))
    _log_rates(lower, 2**-9, 2**3, every=2)
    said = f"The range test has its lowest loss at {lowest:.2g}; the best constant rate is {best:.2g}."
    figures.show(figure, said)


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

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        figures.contour(left, lambda x, y: (0.2 * x**2 + y**2) / 2, (-10, 10), (-10, 10))
        (early,) = left.plot([], [], color="white", linewidth=0.5, alpha=0.6)
        (late,) = left.plot([], [], color=figures.BLUE, linewidth=0.7)
        (end,) = left.plot([], [], "o", color=figures.RED, markeredgecolor="white", markersize=9)
        (middle,) = left.plot([], [], "*", color=figures.GREEN, markeredgecolor="white", markersize=17)
        left.set(xlabel="weight along, λ = 0.2", ylabel="weight across, λ = 1", title="one run")
        for x, name, color in ((-9.5, "● last weights", figures.RED), (-0.5, "★ mean, blue part", figures.GREEN)):
            left.text(x, 8.7, name, color=color, backgroundcolor="white")
        (curve,) = right.plot([], [], color=figures.RED)
        (level,) = right.plot([], [], color=figures.GREEN, linewidth=4)
        right.text(0.97, 0.92, "weights of each step", color=figures.RED, ha="right", transform=right.transAxes)
        right.text(0.97, 0.84, "mean of the last quarter", color=figures.GREEN, ha="right", transform=right.transAxes)
        right.set(xlabel="step", ylabel="loss", yscale="log", xlim=(0, steps), ylim=(0.03, 60))
        right.set_title("mean of 200 runs")

        def update(rate: float, schedule: str) -> list[Artist]:
            path = noisy_walks(rate * shapes[schedule], curvature, noise, 200)
            mean = path[last + 1 :].mean(0)
            early.set_data(*path[: last + 2, 0].T)
            late.set_data(*path[last + 1 :, 0].T)
            end.set_data(*path[-1:, 0].T)
            middle.set_data(*mean[:1].T)
            curve.set_data(range(steps + 1), loss(path))
            level.set_data([last, steps], [loss(mean)] * 2)
            return [early, late, end, middle, curve, level]

        return update

    def caption(rate: float, schedule: str) -> str:
        path = noisy_walks(rate * shapes[schedule], curvature, noise, 200)
        return (
            f"{schedule.capitalize()}, learning rate {rate:g}: the last weights (dot) have a mean loss of "
            f"{loss(path[-1]):.2g}, the mean weights of the last quarter (star) {loss(path[last + 1 :].mean(0)):.2g}."
        )

    rate = widgets.slider("learning rate", [0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2], 0.4)
    widgets.explore(make, alt=caption, rate=rate, schedule=widgets.menu("schedule", [*shapes]))


def averages(accuracies: Mapping[str, np.ndarray], parts: Sequence[int]) -> None:
    """Validation accuracy (seeds, parts) of mean weights over the last `parts` sixteenths of a run; 0: last weights."""
    figure, ax = _accuracies(accuracies, range(len(parts)), 0.7, (figures.BLACK, figures.BLUE))
    ax.set_xticks(range(len(parts)), ["last\nweights", *(f"{100 * part / 16:.0f} %" for part in parts[1:])])
    ax.set(xlabel="part of the run whose weights are averaged")
    ends = {name: (values[:, 0].mean(), values.mean(0).max()) for name, values in accuracies.items()}
    said = ", ".join(f"{name} from {last:.1f} to {best:.1f} %" for name, (last, best) in ends.items())
    figures.show(figure, f"From the last weights to the best mean: {said}.")


# The further notebook


def oscillation(sharp: Mapping[str, np.ndarray], sizes: np.ndarray, edge: float) -> None:
    """Explore the sharpness (seeds, steps) of each method from the edge on, and the oscillation (seeds, steps)."""

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        steps, lines = np.arange(sizes.shape[1]), []
        colors = (figures.BLUE, figures.ORANGE, figures.BLACK, figures.GREEN)
        for place, (name, color) in enumerate(zip(sharp, colors, strict=False)):
            lines += left.plot(steps, 0.0 * steps, ":" if place == 2 else "-", color=color)
            left.text(0.03, 0.93 - 0.08 * place, name, color=color, transform=left.transAxes)
        left.axhline(edge, color=figures.RED, linestyle="--")
        left.text(5, 0.98 * edge, "2 / rate", color=figures.RED, va="top")
        left.set(xlabel="step after 2 / rate is passed", ylabel="sharpness", ylim=(0.6 * edge, 1.7 * edge))
        (curve,) = right.plot(steps, 0.0 * steps, color=figures.BLUE, linewidth=0.7)
        right.set(xlabel="step after 2 / rate is passed", ylabel="size of the oscillation", ylim=(-0.25, 0.25))
        right.set_title("whole step")

        def update(seed: int) -> list[Artist]:
            for line, values in zip(lines, sharp.values(), strict=True):
                line.set_ydata(values[seed])
            curve.set_ydata(sizes[seed])
            return [*lines, curve]

        return update

    def caption(seed: int) -> str:
        ends = ", ".join(f"{name} {values[seed, -100:].mean():.1f}" for name, values in sharp.items())
        return f"Start {seed}. Sharpness in the last 100 steps: {ends}. The edge is {edge:g}."

    widgets.explore(make, alt=caption, seed=widgets.slider("start", range(len(sizes)), 5))


def rate_and_momentum(rates: Sequence[float], momenta: Sequence[float], accuracy: np.ndarray) -> None:
    """Validation accuracy, (rates, momenta, seeds) in per cent: by rate, and beside it by the effective rate."""
    figure, panels = figures.new(2, height=3.2, sharey=True)
    for ax, xlabel, power in zip(panels, ("learning rate η", "effective rate η / (1 − β)"), (0, 1), strict=True):
        for j, (beta, color) in enumerate(zip(momenta, COLORS, strict=False)):
            figures.band(ax, np.array(rates) / (1 - beta) ** power, accuracy[:, j].T, color, marker="o", markersize=4)
            if power:
                ax.text(0.98, 0.93 - 0.08 * j, f"β = {beta:.2g}", color=color, transform=ax.transAxes, ha="right")
        ax.set(xlabel=xlabel, ylim=(5, 60))
        _log_rates(ax, rates[0], rates[-1] / (1 - max(momenta)) ** power, every=2)
    panels[0].set(ylabel="validation accuracy (%)")
    tops = zip(momenta, np.take(rates, accuracy.mean(2).argmax(0)), strict=True)
    best = ", ".join(f"{rate:.2g}, effectively {rate / (1 - beta):.2g}, for β = {beta:.2g}" for beta, rate in tops)
    figures.show(figure, f"Best rates: {best}.")


def schedules(shapes: Mapping[str, np.ndarray]) -> None:
    """The schedules as small curves, each from 0 to its peak."""
    figure = figures.new(height=1.6)[0]
    figure.clear()
    for ax, (name, shape) in zip(figure.subplots(1, len(shapes), sharey=True), shapes.items(), strict=True):
        ax.plot(shape, color=figures.BLACK)
        ax.set_title(name, fontsize=8)
        ax.set(xticks=[], yticks=[0, 1], ylim=(0, 1.05))
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("rate / peak", fontsize=9)
    figures.show(figure, f"The rate by step of each schedule: {', '.join(shapes)}.")
