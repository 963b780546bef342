"""Figures and explorers of 01_sgd: a line in the notebook calls each."""

import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.sparse.linalg import svds

from dlscale import sgd
from dlscale.page import figures, widgets


def opening(losses: Mapping[str, np.ndarray]) -> None:
    """Test loss, (epochs,), of networks that look at equally many examples for each update of their own."""
    figure, ax = figures.new(height=2.6)
    for (name, loss), color in zip(losses.items(), (figures.BLUE, figures.GREY), strict=True):
        figures.name(ax, *ax.plot(range(1, len(loss) + 1), loss, "o-", markersize=3, color=color), name)
    ax.set(xlabel="passes over the examples", ylabel="test loss", ylim=(0, 2.4), xlim=(0, len(loss) + 0.2))
    ax.set_xticks(range(0, len(loss) + 1, 2))
    said = ", ".join(f"{name} {loss[-1]:.2f}" for name, loss in losses.items())
    figures.show(figure, f"The test loss after {len(loss)} passes: {said}.")


# Section 1


def learning(curve: Callable[[float, int], np.ndarray]) -> None:
    """Explore the training loss, (updates,), that `curve(learning_rate, batch_size)` gives."""
    curve, smooth = functools.cache(curve), np.ones(20) / 20

    def paint(ax: Axes, learning_rate: float, batch_size: int) -> None:
        losses = curve(learning_rate, batch_size)
        ax.plot(losses, color=figures.SKY, linewidth=0.8)
        ax.plot(np.arange(19, len(losses)), np.convolve(losses, smooth, "valid"), color=figures.TRAIN, linewidth=2.5)
        ax.axhline(np.log(10), color=figures.GREY, linestyle=":")
        ax.text(296, np.log(10) * 1.1, "guessing", color=figures.GREY, ha="right")
        ax.set(xlabel="update", ylabel="training loss", yscale="log", xlim=(0, 300), ylim=(0.003, 20))

    def caption(learning_rate: float, batch_size: int) -> str:
        losses = curve(learning_rate, batch_size)
        return (
            f"Batch {batch_size}, learning rate {learning_rate:g}: the last 20 minibatches have a mean loss of "
            f"{losses[-20:].mean():.2g}. The network has looked at {len(losses) * batch_size:,} examples. "
            "The thin line is the loss of each minibatch, the thick line a mean over 20."
        )

    rates = widgets.slider("learning rate", [2.0**k for k in range(-7, 3)], 0.5, "{:.3g}")
    sizes = widgets.slider("batch size", [1, 4, 16, 64, 256, 1024], 16)
    widgets.explore_axes(paint, alt=caption, learning_rate=rates, batch_size=sizes)


# Section 2


def _shadow(gradients: np.ndarray) -> np.ndarray:
    """Gradients (examples, weights) along the true one and, beside it, where they differ most, in its length."""
    true = gradients.mean(0)
    along = gradients @ true / (true @ true)
    (across,), (size,), _ = (part.T for part in svds(gradients - along[:, None] * true, k=1, tol=0.01))
    return np.stack([along, size * across / np.linalg.norm(true)], axis=1)


def cloud(gradient_of_each: Callable, weights: Mapping, errors: Mapping[str, np.ndarray], sizes: Sequence[int]) -> None:
    """Explore minibatch gradients: 150 of them seen in a plane, and the relative errors, (sizes,), with their law.

    `gradient_of_each` gives the gradients of all examples, (examples, weights), for each of the networks in `weights`.
    """
    shadows, laws, batch = {}, {}, np.array(sizes)
    for when, params in weights.items():
        each = np.asarray(gradient_of_each(params))
        shadows[when] = _shadow(each)
        spread = np.sqrt(each.var(0).sum()) / np.linalg.norm(each.mean(0))
        laws[when] = spread * np.sqrt((len(each) - batch) / (len(each) - 1) / batch)

    @functools.cache
    def drawn(batch_size: int, when: str) -> np.ndarray:
        rng, points = np.random.default_rng(batch_size), shadows[when]
        return np.array([points[rng.choice(len(points), batch_size, replace=False)].mean(0) for _ in range(150)])

    def paint(plane: Axes, error: Axes, batch_size: int, when: str) -> None:
        plane.plot(*drawn(batch_size, when).T, "o", color=figures.SKY, markersize=3, alpha=0.7)
        plane.annotate("", (1, 0), (0, 0), arrowprops={"arrowstyle": "-|>", "linewidth": 3, "shrinkA": 0, "shrinkB": 0})
        plane.text(-2.9, 3.9, "arrow: true gradient\ndots: minibatches", va="top")
        plane.set(xlim=(-3, 5), ylim=(-4, 4), xlabel="along the true gradient (its length: 1)", ylabel="across it")
        for (name, law), color in zip(laws.items(), (figures.BLUE, figures.ORANGE), strict=True):
            figures.name(error, *error.plot(sizes, errors[name], "o", color=color, markersize=5), name)
            error.plot(sizes, law, "--", color=color, linewidth=1)
        error.plot(batch_size, errors[when][sizes.index(batch_size)], "o", color=figures.RED, markersize=9)
        error.text(1, 0.25, "red: shown on the left", color=figures.RED, va="center")
        error.set(xscale="log", yscale="log", xlabel="batch size", ylabel="relative error", xlim=(0.8, 4000))
        error.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        error.set_yticks([0.2, 0.5, 1, 2, 5, 10], ["0.2", "0.5", "1", "2", "5", "10"])
        error.minorticks_off()

    def caption(batch_size: int, when: str) -> str:
        uphill = (drawn(batch_size, when)[:, 0] < 0).mean()
        return (
            f"Batch {batch_size}, {when}: the typical error is {errors[when][sizes.index(batch_size)]:.2g} "
            f"times the true gradient. {100 * uphill:.0f} % of the steps go uphill."
        )

    size, when = widgets.slider("batch size", sizes, sizes[2]), widgets.menu("weights", [*errors])
    widgets.explore_axes(paint, columns=2, alt=caption, batch_size=size, when=when)


# Section 3


def race(paths: Mapping[str, Mapping[str, tuple]], rates: np.ndarray) -> None:
    """Explore how the methods cross each landscape, as `sgd.race` found it for these learning rates."""

    @functools.cache
    def chosen(landscape: str, name: str, factor: float) -> tuple[np.ndarray, float, int]:
        """Path, learning rate, and the steps to arrive, for a learning rate that is `factor` times the best one."""
        (weights, losses), arrived = paths[landscape][name], sgd.LANDSCAPES[landscape].arrived
        place = sgd.best_rate(losses, arrived) + int(np.rint(np.log10(factor) / np.log10(rates[1] / rates[0])))
        place = np.clip(place, 0, len(rates) - 1)
        path = np.nan_to_num(weights[place].clip(-1e3, 1e3), nan=1e3)
        return path, rates[place], int(sgd.steps_to_arrive(losses[place], arrived))

    def make(fig: Figure) -> widgets.Update:
        ax, bars = figures.axes(fig, 2, width_ratios=(3, 2))
        shown: list[str] = []
        lines: dict[str, Artist] = {}

        def update(landscape: str, factor: float, steps: int) -> list[Artist] | None:
            found = {name: chosen(landscape, name, factor) for name in sgd.METHODS}
            if fresh := shown != [landscape, factor]:
                shown[:] = [landscape, factor]
                ax.clear()
                bars.clear()
                one = sgd.LANDSCAPES[landscape]
                figures.contour(ax, lambda *w: one.loss(np.stack(w)), one.x, one.y)
                ax.axhspan(*one.y, color="white", alpha=0.6, zorder=1.5)  # paler than the paths
                ax.plot(*found["SGD"][0][0], "o", color="white", markeredgecolor="black", markersize=9, zorder=5)
                ax.annotate("start", found["SGD"][0][0], (7, 7), textcoords="offset points")
                ax.plot(*one.minimum, "x", color="black", markersize=9, markeredgewidth=2, zorder=5)
                ax.annotate("minimum", one.minimum, (8, -10), textcoords="offset points")
                for place, (name, color) in enumerate(figures.METHODS.items()):
                    (lines[name],) = ax.plot([], [], "o-", color=color, linewidth=1, markersize=9, markevery=[-1])
                    count = found[name][2]
                    bars.barh(place, count, color=color)
                    bars.text(count + 4, place, f"{count}".replace("200", "over 200"), color=color, va="center")
                bars.set_yticks(range(len(lines)), [*lines])
                bars.set(xlim=(0, 285), ylim=(6.6, -0.6), xlabel="steps to arrive", xticks=(0, 100, 200))
            for name, line in lines.items():
                line.set_data(*found[name][0][: steps + 1].T)
            return None if fresh else [*lines.values()]

        return update

    def caption(landscape: str, factor: float, steps: int) -> str:
        said = ", ".join(f"{chosen(landscape, name, factor)[1]:.2g} for {name}" for name in ("SGD", "momentum", "Adam"))
        return f"{landscape.capitalize()}, dots after {steps} steps. Learning rates, {factor:g} × the best: {said}."

    landscape = widgets.menu("landscape", [*paths], "rotated ravine")
    factors = [10.0 ** (k / 10) for k in (-10, -7, -3, -1, 0, 1, 2, 3, 5)]
    factor = widgets.slider("learning rate × best", factors, 1.0, "{:.2g}")
    steps = widgets.player("steps", [0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 30, 40, 60, 80, 120, 160, 200], 40)
    widgets.explore(make, alt=caption, height=4, landscape=landscape, factor=factor, steps=steps)


# Section 4


def product(batches: Sequence[int], updates: np.ndarray, seconds: Mapping[str, np.ndarray]) -> None:
    """Explore the time to a target: updates, (seeds, batches), times the seconds for an update of each loop."""

    def total(loop: str, overhead: float) -> np.ndarray:
        return updates.mean(0) * (1e3 * seconds[loop] + overhead)  # ms

    def paint(left: Axes, right: Axes, loop: str, overhead: float) -> None:
        each, times = seconds[loop] + overhead / 1e3, total(loop, overhead)
        place = times.argmin()
        figures.band(left, batches, updates / updates.mean(0)[0], figures.BLUE, "updates", marker="o")
        left.plot(batches, each / each[0], "o-", color=figures.ORANGE)
        left.text(1, 2.2, "time per update", color=figures.ORANGE)
        left.set(ylabel="relative to a batch of 1", xlim=(0.7, 20000), ylim=(0.01, 1000), yscale="log")
        left.set_yticks([0.01, 0.1, 1, 10, 100, 1000], ["1/100", "1/10", "1", "10", "100", "1,000"])
        right.plot(batches, times, "o-", color=figures.BLACK)
        right.plot(batches[place], times[place], "o", color=figures.RED, markersize=11)
        text = f"fastest: {'all examples' if place == len(batches) - 1 else f'batch {batches[place]}'}"
        right.text(0.5, 0.95, text, color=figures.RED, transform=right.transAxes, ha="center", va="top")
        right.set(ylabel="time to the target (ms)", xlim=(0.7, 3000), ylim=(1, 2e4), yscale="log")
        right.set_yticks([1, 10, 100, 1000, 10000], ["1", "10", "100", "1,000", "10,000"])
        for ax in (left, right):
            ax.set(xscale="log", xlabel="batch size")
            ax.set_xticks(batches, [*map(str, batches[:-1]), "all"])
            ax.minorticks_off()

    def caption(loop: str, overhead: float) -> str:
        times = total(loop, overhead)
        return (
            f"{loop}, {overhead:g} ms added to each update: {times.min():,.3g} ms to the target at best, "
            f"{times[0]:,.3g} ms with single examples, {times[-1]:,.3g} ms with all."
        )

    overhead = widgets.slider("added to each update (ms)", [0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0], 0.0)
    widgets.explore_axes(paint, columns=2, alt=caption, loop=widgets.menu("loop", [*seconds]), overhead=overhead)
