"""Figures and explorers of 11_gradient_compression and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlscale.lab import intervals
from dlscale.page import figures, widgets

Named = Mapping[str, np.ndarray]
Methods = Mapping[str, Sequence[tuple[str, np.ndarray, float]]]  # of each its settings: name, what arrives, bytes


def opening(accuracies: Mapping[str, np.ndarray], numbers: Mapping[str, float]) -> None:
    """Test accuracy of some methods, (seeds,) in per cent, as bars; `numbers`: how many each sends in a step."""
    figure, ax = figures.new(height=2.0)
    for place, (name, samples) in enumerate(accuracies.items()):
        mean, low, high = intervals.interval(samples)
        ax.barh(place, mean, 0.6, color=figures.RED if mean < 50 and place else figures.BLUE)
        ax.plot([low, high], [place, place], color=figures.BLACK)
        ax.text(high + 1, place, f"{mean:.0f} %, {numbers[name]:,.0f} numbers sent", va="center")
    ax.set_yticks(range(len(accuracies)), [*accuracies])
    ax.set(xlabel="test accuracy (%), 95 % interval", xlim=(0, 100), ylim=(len(accuracies) - 0.5, -0.5))
    ax.grid(visible=False, axis="y")
    said = "; ".join(f"{name}: {samples.mean():.0f} %" for name, samples in accuracies.items())
    figures.show(figure, f"Test accuracy. {said}.")


# Section 1


def left_behind(matrix: np.ndarray, arrives: np.ndarray) -> float:
    """The squared length of what is left behind, over that of the matrix."""
    return float(((matrix - arrives) ** 2).sum() / (matrix**2).sum())


def compressors(matrix: np.ndarray, methods: Methods, levels: Sequence[str]) -> None:
    """Explore a gradient: what arrives with each method and setting, and what is left behind."""

    def make(fig: Figure) -> widgets.Update:
        axes = figures.axes(fig, 3, sharey=True)
        limit = np.quantile(np.abs(matrix), 0.995)
        images = [ax.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit) for ax in axes]
        for ax, title in zip(axes, ("gradient", "what arrives", "what is left behind"), strict=True):
            ax.set(title=title, xlabel="output unit")
            ax.grid(visible=False)
        axes[0].set(ylabel="input unit")
        fig.colorbar(images[0], ax=axes[2], label="entry of the gradient")

        def update(method: str, strength: int) -> None:
            arrives = methods[method][strength][1]
            images[1].set_data(arrives)
            images[2].set_data(matrix - arrives)

        return update

    def caption(method: str, strength: int) -> str:
        name, arrives, size = methods[method][strength]
        right = np.mean((arrives != 0) & (np.sign(arrives) == np.sign(matrix)))
        return (
            f"{method}, {name}: {size:,.0f} bytes instead of {matrix.nbytes:,}. Left behind: "
            f"{100 * left_behind(matrix, arrives):.0f} % of the squared length. "
            f"{100 * right:.0f} % of the entries arrive with the right sign."
        )

    strength = widgets.Control("slider", "compression", range(len(levels)), 4, levels)
    menu = widgets.menu("method", [*methods])
    widgets.explore(make, alt=caption, width=8.6, height=3.2, method=menu, strength=strength)


# Section 2


def messages(errors: Mapping[tuple[str, bool], np.ndarray], reference: str) -> None:
    """Explore the squared error of the mean of many messages, by method, with a memory (True) and without."""
    names = [*dict.fromkeys(name for name, _ in errors)]
    count = len(errors[reference, False])

    def paint(ax: Axes, method: str) -> None:
        shown = {"without memory": errors[method, False], "with memory": errors[method, True]}
        shown |= {f"{reference},\nwithout memory": errors[reference, False]} if method != reference else {}
        logs = {name: np.log10(error) for name, error in shown.items()}
        _lines(ax, range(1, count + 1), logs, (figures.GREY, figures.BLUE, figures.ORANGE), gap=0.4)
        ax.axhline(0, color=figures.BLACK, linewidth=1, linestyle=":")
        ax.text(10, 0.1, "as if nothing had been sent")
        ax.set(xlabel="messages about the same gradient", ylabel="squared error of their mean\n(squared length = 1)")
        ax.set(xscale="log", xlim=(1, count), ylim=(-4, 1), title=method)
        ax.set_yticks(range(-4, 2), [f"$10^{{{power}}}$" for power in range(-4, 2)])

    def caption(method: str) -> str:
        without, with_memory = (100 * errors[method, memory][-1] for memory in (False, True))
        return (
            f"{method}: after {count} messages the mean is wrong by {without:.2g} % of the squared length without a "
            f"memory, and by {with_memory:.2g} % with one."
        )

    widgets.explore_axes(paint, alt=caption, height=3.3, method=widgets.menu("method", names, names[2]))


def _lines(ax: Axes, x: Sequence[float], shown: Named, colors: Sequence[str], gap: float, style: str = "-") -> None:
    """Curves over x, named at their ends, with names at least `gap` apart."""
    pairs = zip(shown.items(), colors, strict=False)
    figures.names(ax, {name: ax.plot(x, y, style, color=color)[0] for (name, y), color in pairs}, gap)


def memories(lengths: Mapping[str, np.ndarray]) -> None:
    """How long the memory is after each message, in lengths of the gradient, by method."""
    figure, ax = figures.new(height=3.0)
    count = len(next(iter(lengths.values())))
    colors = (figures.ORANGE, figures.GREEN, figures.BLUE, figures.PINK)
    _lines(ax, range(1, count + 1), lengths, colors, gap=0.08 * max(length.max() for length in lengths.values()))
    ax.set(xlabel="messages about the same gradient", ylabel="length of the memory\n(length of the gradient = 1)")
    ax.set(xlim=(1, count), ylim=(0, None))
    said = "; ".join(f"{name} {length[-1]:.1f}" for name, length in lengths.items())
    figures.show(figure, f"Length of the memory after {count} messages: {said}.")


# Section 3


def staircase(paths: Mapping[str, np.ndarray]) -> None:
    """The quiet weight of the toy problem, (steps,), of SGD, without memory, with memory, and corrected."""
    figure, ax = figures.new(height=3.0)
    count = len(paths["SGD"])
    _lines(ax, range(count), paths, (figures.PINK, figures.GREY, figures.BLUE, figures.ORANGE), gap=0.09)
    ax.lines[0].set(linewidth=5, alpha=0.4)
    ax.lines[-1].set_linestyle(":")
    ax.set(xlabel="step", ylabel="quiet weight (its best value is 0)", xlim=(0, count - 1), ylim=(-0.15, 1.08))
    said = "; ".join(f"{name} {path[-1]:.2f}" for name, path in paths.items())
    figures.show(figure, f"The quiet weight after {count - 1} steps: {said}. With memory it falls in stairs.")


def training(dense: np.ndarray, losses: Mapping[tuple[float, bool], np.ndarray]) -> None:
    """Explore the training loss, (steps,), by the share of entries that is sent, with a memory (True) and without."""
    window = 12
    smooth = lambda loss: np.convolve(loss, np.ones(window) / window, "valid")  # noqa: E731
    t = np.arange(window, len(dense) + 1)

    def shown(share: float) -> dict[str, np.ndarray]:
        curves = {"everything": dense, "without memory": losses[share, False], "with memory": losses[share, True]}
        return {name: smooth(loss) for name, loss in curves.items()}

    def paint(ax: Axes, share: float) -> None:
        _lines(ax, t, shown(share), (figures.BLACK, figures.GREY, figures.BLUE), gap=0.11)
        ax.set(xlabel="step", ylabel=f"training loss, mean of {window} steps", xlim=(0, t[-1]), ylim=(1, 2.6))

    def caption(share: float) -> str:
        everything, without, with_memory = (loss[-1] for loss in shown(share).values())
        return (
            f"Largest {100 * share:g} % sent: the loss ends at {without:.2f} without a memory and at "
            f"{with_memory:.2f} with one. With everything sent it ends at {everything:.2f}."
        )

    shares = sorted({share for share, _ in losses}, reverse=True)
    share = widgets.slider("share of the entries sent", shares, 0.01, "{:.1%}")
    widgets.explore_axes(paint, alt=caption, height=3.3, share=share)


# Section 4


def accuracies(dense: np.ndarray, rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Test accuracy, (seeds,) in per cent: a row for each compressor, its runs "without memory" and "with memory"."""
    figure, ax = figures.new(height=3.8, width=7.6)
    colors = {"without memory": figures.RED, "with memory": figures.BLUE}
    _, low, high = intervals.interval(dense)
    ax.axvspan(low, high, color=figures.BLACK, alpha=0.15, linewidth=0)
    ax.text(dense.mean(), -0.75, "everything sent", ha="center")
    for place, row in enumerate(rows.values()):
        means = [samples.mean() for samples in row.values()]
        ax.plot([min(means), max(means)], [place, place], color="#cccccc", linewidth=3, zorder=0)
        for name, samples in row.items():
            mean, low, high = intervals.interval(samples)
            ax.plot([low, high], [place, place], color=colors[name])
            ax.plot(mean, place, "o", color=colors[name])
    for place, (name, color) in enumerate((colors | {"no dot: not trained": figures.GREY}).items()):
        ax.text(0.02, 0.93 - 0.07 * place, name, color=color, transform=ax.transAxes)
    ax.set_yticks(range(len(rows)), [*rows])
    ax.set(xlabel="test accuracy (%), 95 % interval", ylim=(len(rows) - 0.4, -1.2))
    said = [f"{row}, {name} {samples.mean():.0f} %" for row, of in rows.items() for name, samples in of.items()]
    figures.show(figure, f"Test accuracy; everything sent {dense.mean():.0f} %. {'; '.join(said)}.")


# Section 5


def fill(teams: Sequence[int], filled: Mapping[tuple[str, float], np.ndarray], expected: Callable) -> None:
    """Explore the entries of the sum of many lists, (seeds, teams) as a share of all, by kind and by share sent.

    `expected(share, workers)` is that share for lists drawn at random.
    """
    kinds = {"with memory": figures.BLUE, "without memory": figures.GREY}

    def paint(ax: Axes, share: float) -> None:
        random = [100 * expected(share, workers) for workers in teams]
        lines = {"random lists": ax.plot(teams, random, "o:", color=figures.ORANGE)[0]}
        for name, color in kinds.items():
            lines[name] = figures.band(ax, teams, 100 * filled[name, share], color, marker="o")
        ax.axhline(50, color=figures.BLACK, linewidth=1)
        ax.text(2, 52, "from here on the list is longer than the array")
        figures.names(ax, lines, gap=7)
        _by_workers(ax, teams)
        ax.set(ylabel="entries of the sum (%)", ylim=(0, 104))

    def caption(share: float) -> str:
        due, bare = (100 * filled[name, share][:, -1].mean() for name in kinds)
        return (
            f"Largest {100 * share:g} % of {teams[-1]} workers: with a memory the sum has {due:.0f} % of all entries, "
            f"without a memory {bare:.0f} %. Random lists would have {100 * expected(share, teams[-1]):.0f} %."
        )

    shares = sorted({share for _, share in filled})
    slider = widgets.slider("share of the entries sent", shares, 0.01, "{:.1%}")
    widgets.explore_axes(paint, alt=caption, height=3.3, share=slider)


def _by_workers(ax: Axes, teams: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(teams, teams)
    ax.set(xlabel="workers")


# The further notebook


def parts(lost: Mapping[str, np.ndarray], by_rate: Mapping[str, np.ndarray], rates: Sequence[float]) -> None:
    """Explore points lost, (seeds,), and validation accuracy, (rates, seeds) in per cent, by method."""
    names = [*lost]

    def paint(left: Axes, right: Axes, method: str) -> None:
        for place, (name, samples) in enumerate(lost.items()):
            mean, low, high = intervals.interval(samples)
            color = figures.BLUE if name == method else figures.GREY
            left.plot([low, high], [place, place], color=color)
            left.plot(mean, place, "o", color=color)
        left.axvline(0, color=figures.BLACK, linewidth=1)
        left.set_yticks(range(len(names)), names)
        left.set(xlabel="points lost, 95 % interval", ylim=(len(names) - 0.4, -0.6), title="test set, best rate")
        for place, (name, color) in enumerate(((method, figures.BLUE), ("dense, clipped", figures.BLACK))):
            figures.band(right, rates, by_rate[name].T, color, marker="o")
            right.text(0.02, 0.02 + 0.08 * place, name, color=color, transform=right.transAxes)
        right.set_xscale("log", base=2)
        right.set_xticks(rates, [f"1/{1 / rate:.0f}" for rate in rates])
        right.set(xlabel="learning rate", ylabel="accuracy (%)", ylim=(0, 65), title="validation set, each rate")

    def caption(method: str) -> str:
        best = rates[int(by_rate[method].mean(1).argmax())]
        return f"{method}: {lost[method].mean():.1f} points lost; its best learning rate is 1/{1 / best:.0f}."

    menu = widgets.menu("method", names, "feedback")
    widgets.explore_axes(paint, alt=caption, columns=2, width=8.4, height=3.4, method=menu)


def sums(teams: Sequence[int], ratios: Mapping[float, Mapping[str, np.ndarray]]) -> None:
    """Explore the bytes of the busiest worker over those of a dense all-reduce, (teams,), by share and algorithm."""

    def paint(ax: Axes, share: float) -> None:
        logs = {name: np.log10(ratio) for name, ratio in ratios[share].items()}
        colors = (figures.GREEN, figures.PINK, figures.RED, figures.BLUE)
        _lines(ax, teams, logs, colors, style="o-", gap=0.25)
        ax.axhline(0, color=figures.BLACK, linewidth=1)
        ax.text(2, 0.06, "dense all-reduce")
        _by_workers(ax, teams)
        ax.set_yticks(range(-3, 2), ["0.001", "0.01", "0.1", "1", "10"])
        ax.set(ylabel="bytes of the busiest worker\n(dense all-reduce = 1)", ylim=(-3, 1.6))

    def caption(share: float) -> str:
        said = ", ".join(f"{name} {ratio[-1]:.2g}" for name, ratio in ratios[share].items())
        return f"Largest {100 * share:g} % of {teams[-1]} workers, bytes over those of a dense all-reduce: {said}."

    widgets.explore_axes(paint, alt=caption, height=3.4, share=widgets.slider("share sent", [*ratios], 0.01, "{:.1%}"))
