"""Figures and explorers of 11_gradient_compression and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dlscale.lab import intervals
from dlscale.page import figures, widgets

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
    ax.set(xlabel="test accuracy (%)", xlim=(0, 100), ylim=(len(accuracies) - 0.5, -0.5))
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
    count = len(next(iter(errors.values())))
    names = [*dict.fromkeys(name for name, _ in errors)]

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)

        def update(method: str) -> None:
            ax.clear()
            shown = {"without memory": errors[method, False], "with memory": errors[method, True]}
            shown |= {f"{reference},\nwithout memory": errors[reference, False]} if method != reference else {}
            pairs = zip(shown.items(), (figures.GREY, figures.BLUE, figures.ORANGE), strict=False)
            lines = {name: ax.plot(range(1, count + 1), np.log10(e), color=color)[0] for (name, e), color in pairs}
            figures.names(ax, lines, gap=0.4)
            ax.axhline(0, color=figures.BLACK, linewidth=1, linestyle=":")
            ax.text(10, 0.1, "as if nothing had been sent")
            ax.set(
                xlabel="messages about the same gradient", ylabel="squared error of their mean\n(squared length = 1)"
            )
            ax.set(xscale="log", xlim=(1, count), ylim=(-4, 1))
            ax.set_yticks(range(-4, 2), [f"$10^{{{power}}}$" for power in range(-4, 2)])

        return update

    def caption(method: str) -> str:
        without, with_memory = (100 * errors[method, memory][-1] for memory in (False, True))
        return (
            f"{method}: after {count} messages the mean is wrong by {without:.2g} % of the squared length without a "
            f"memory, and by {with_memory:.2g} % with one."
        )

    widgets.explore(make, alt=caption, height=3.3, method=widgets.menu("method", names, names[2]))


def memories(lengths: Mapping[str, np.ndarray]) -> None:
    """How long the memory is after each message, in lengths of the gradient, by method."""
    figure, ax = figures.new(height=3.0)
    lines = {}
    for (name, length), color in zip(
        lengths.items(), (figures.ORANGE, figures.GREEN, figures.BLUE, figures.PINK), strict=True
    ):
        (lines[name],) = ax.plot(np.arange(1, len(length) + 1), length, color=color)
    figures.names(ax, lines, gap=0.08 * max(length.max() for length in lengths.values()))
    ax.set(xlabel="messages about the same gradient", ylabel="length of the memory\n(length of the gradient = 1)")
    ax.set(xlim=(1, len(length)), ylim=(0, None))
    said = "; ".join(f"{name} {length[-1]:.1f}" for name, length in lengths.items())
    figures.show(figure, f"Length of the memory after {len(length)} messages: {said}.")


# Section 3


def staircase(paths: Mapping[str, np.ndarray]) -> None:
    """The quiet weight of the toy problem, (steps,), by method."""
    figure, ax = figures.new(height=3.0)
    colors = {"SGD": figures.BLACK, "without memory": figures.GREY, "with memory": figures.BLUE}
    colors["with memory, corrected"] = figures.ORANGE
    lines = {}
    for name, path in paths.items():
        (lines[name],) = ax.plot(path, color=colors[name], linestyle=":" if "corrected" in name else "-")
    lines["SGD"].set(linewidth=5, alpha=0.25)
    figures.names(ax, lines, gap=0.09)
    ax.set(xlabel="step", ylabel="quiet weight (its best value is 0)", xlim=(0, len(path) - 1), ylim=(-0.15, 1.08))
    said = "; ".join(f"{name} {path[-1]:.2f}" for name, path in paths.items())
    figures.show(figure, f"The quiet weight after {len(path) - 1} steps: {said}. With memory it falls in stairs.")


def training(dense: np.ndarray, losses: Mapping[tuple[float, bool], np.ndarray]) -> None:
    """Explore the training loss, (steps,), by the share of entries that is sent, with a memory (True) and without."""
    window = 12
    smooth = lambda loss: np.convolve(loss, np.ones(window) / window, "valid")  # noqa: E731
    everything, curves = smooth(dense), {key: smooth(loss) for key, loss in losses.items()}

    def make(fig: Figure) -> widgets.Update:
        ax, t = figures.axes(fig), np.arange(len(everything)) + window

        def update(share: float) -> None:
            ax.clear()
            shown = {"everything": everything}
            shown |= {"without memory": curves[share, False], "with memory": curves[share, True]}
            pairs = zip(shown.items(), (figures.BLACK, figures.GREY, figures.BLUE), strict=True)
            figures.names(ax, {name: ax.plot(t, loss, color=color)[0] for (name, loss), color in pairs}, gap=0.11)
            ax.set(xlabel="step", ylabel=f"training loss, mean of {window} steps", xlim=(0, t[-1]), ylim=(1, 2.6))

        return update

    def caption(share: float) -> str:
        without, with_memory = (curves[share, memory][-1] for memory in (False, True))
        return (
            f"Largest {100 * share:g} % sent: the loss ends at {without:.2f} without a memory and at "
            f"{with_memory:.2f} with one. With everything sent it ends at {everything[-1]:.2f}."
        )

    shares = sorted({share for share, _ in losses}, reverse=True)
    share = widgets.slider("share of the entries sent", shares, 0.01, "{:.1%}")
    widgets.explore(make, alt=caption, height=3.3, share=share)


# Section 4


def accuracies(dense: np.ndarray, rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Test accuracy, (seeds,) in per cent: a row for each compressor, its runs "without memory" and "with memory"."""
    figure, ax = figures.new(height=3.8, width=7.6)
    colors = {"without memory": figures.GREY, "with memory": figures.BLUE}
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
    for place, (name, color) in enumerate(colors.items()):
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
    shares = sorted({share for _, share in filled})
    names = {"random lists": figures.ORANGE, "with memory": figures.BLUE, "without memory": figures.GREY}

    def random(share: float) -> list[float]:
        return [100 * expected(share, workers) for workers in teams]

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)

        def update(share: float) -> None:
            ax.clear()
            (line,) = ax.plot(teams, random(share), "o:", color=names["random lists"])
            lines = {"random lists": line}
            for name in [*names][1:]:
                lines[name] = figures.band(ax, teams, 100 * filled[name, share], names[name], marker="o")
            ax.axhline(50, color=figures.BLACK, linewidth=1)
            ax.text(2, 52, "from here on the list is longer than the array")
            figures.names(ax, lines, gap=7)
            ax.set_xscale("log", base=2)
            ax.set_xticks(teams, teams)
            ax.set(xlabel="workers", ylabel="entries of the sum (%)", ylim=(0, 104))

        return update

    def caption(share: float) -> str:
        ends = {name: 100 * filled[name, share][:, -1].mean() for name in [*names][1:]}
        return (
            f"Largest {100 * share:g} % of {teams[-1]} workers: with a memory the sum has "
            f"{ends['with memory']:.0f} % of all entries, without a memory {ends['without memory']:.0f} %. Random "
            f"lists would have {random(share)[-1]:.0f} %."
        )

    slider = widgets.slider("share of the entries sent", shares, 0.01, "{:.1%}")
    widgets.explore(make, alt=caption, height=3.3, share=slider)


# The further notebook


def parts(lost: Mapping[str, np.ndarray], by_rate: Mapping[str, np.ndarray], rates: Sequence[float]) -> None:
    """Explore points lost, (seeds,), and validation accuracy, (rates, seeds) in per cent, by method."""
    names = [*lost]

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2, width_ratios=[1, 1.1])
        for place, samples in enumerate(lost.values()):
            mean, low, high = intervals.interval(samples)
            left.plot([low, high], [place, place], color=figures.BLUE)
            left.plot(mean, place, "o", color=figures.BLUE)
        left.axvline(0, color=figures.BLACK, linewidth=1)
        left.set_yticks(range(len(names)), names)
        left.set(xlabel="points lost, 95 % interval", ylim=(len(names) - 0.4, -0.6))

        def update(method: str) -> None:
            right.clear()
            for place, (name, color) in enumerate(((method, figures.BLUE), ("dense, clipped", figures.BLACK))):
                figures.band(right, rates, by_rate[name].T, color, marker="o")
                right.text(0.02, 0.02 + 0.08 * place, name, color=color, transform=right.transAxes)
            right.set_xscale("log", base=2)
            right.set_xticks(rates, [f"1/{1 / rate:.0f}" for rate in rates])
            right.set(xlabel="learning rate", ylabel="validation accuracy (%)", ylim=(0, 65))

        return update

    def caption(method: str) -> str:
        best = rates[int(by_rate[method].mean(1).argmax())]
        return f"{method}: {lost[method].mean():.1f} points lost; its best learning rate is 1/{1 / best:.0f}."

    menu = widgets.menu("method", names, "feedback")
    widgets.explore(make, alt=caption, width=8.4, height=3.4, method=menu)


def sums(teams: Sequence[int], ratios: Mapping[float, Mapping[str, np.ndarray]]) -> None:
    """Explore the bytes of the busiest worker over those of a dense all-reduce, (teams,), by share and algorithm."""
    colors = (figures.GREEN, figures.PINK, figures.RED, figures.BLUE)

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)

        def update(share: float) -> None:
            ax.clear()
            pairs = zip(ratios[share].items(), colors, strict=True)
            lines = {name: ax.plot(teams, np.log10(ratio), "o-", color=color)[0] for (name, ratio), color in pairs}
            figures.names(ax, lines, gap=0.25)
            ax.axhline(0, color=figures.BLACK, linewidth=1)
            ax.text(2, 0.06, "dense all-reduce")
            ax.set_xscale("log", base=2)
            ax.set_xticks(teams, teams)
            ax.set_yticks(range(-3, 2), ["0.001", "0.01", "0.1", "1", "10"])
            ax.set(xlabel="workers", ylabel="bytes of the busiest worker\n(dense all-reduce = 1)", ylim=(-3, 1.6))

        return update

    def caption(share: float) -> str:
        said = ", ".join(f"{name} {ratio[-1]:.2g}" for name, ratio in ratios[share].items())
        return f"Largest {100 * share:g} % of {teams[-1]} workers, bytes over those of a dense all-reduce: {said}."

    widgets.explore(make, alt=caption, height=3.4, share=widgets.slider("share sent", [*ratios], 0.01, "{:.1%}"))
