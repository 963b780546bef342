"""Figures and explorers of 11_gradient_compression and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from dlscale.lab import intervals
from dlscale.page import curves, figures, widgets

BY_WORKERS = {"xlabel": "workers", "xscale": "log", "xlim": (1.8, 285)}
KINDS = {"without memory": (figures.RED, "-"), "with memory": (figures.BLUE, "-")}
Methods = Mapping[str, Sequence[tuple[str, np.ndarray, float]]]  # of each its settings: name, what arrives, bytes


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
    names, other = [*dict.fromkeys(name for name, _ in errors)], f"{reference}, without memory"
    numbers = np.arange(1, len(errors[reference, False]) + 1)

    def compute(method: str) -> dict[str, curves.Line]:
        shown = {"without memory": errors[method, False], "with memory": errors[method, True]}
        return {name: (numbers, error) for name, error in (shown | {other: errors[reference, False]}).items()}

    def caption(method: str) -> str:
        without, with_memory = (100 * errors[method, memory][-1] for memory in (False, True))
        return (
            f"{method}: after {len(numbers)} messages the mean is wrong by {without:.2g} % of the squared length "
            f"without a memory, and by {with_memory:.2g} % with one."
        )

    labels = {"xlabel": "messages about the same gradient", "ylabel": "squared error of their mean\n(1: nothing sent)"}
    curves.curves(
        KINDS | {other: (figures.ORANGE, "--")}, compute, caption,
        labels | {"xscale": "log", "yscale": "log", "xlim": (1, numbers[-1]), "ylim": (1e-4, 10)},
        corner=(0.02, 0.27), method=widgets.menu("method", names, names[2]),
    )  # fmt: skip


def paths(lines: Mapping[str, np.ndarray], xlabel: str, ylabel: str) -> None:
    """Curves over the steps, named at their ends."""
    figure, ax = figures.new(height=3.0)
    pairs = zip(lines.items(), (figures.ORANGE, figures.GREY, figures.BLUE, figures.PINK), strict=True)
    drawn = {name: ax.plot(y, color=color)[0] for (name, y), color in pairs}
    figures.names(ax, drawn, gap=0.09 * max(y.max() for y in lines.values()))
    ax.set(xlim=(0, max(map(len, lines.values())) - 1), xlabel=xlabel, ylabel=ylabel)
    figures.show(figure, f"{ylabel}, in the end: {'; '.join(f'{name} {y[-1]:.2g}' for name, y in lines.items())}.")


# Section 3


def training(dense: np.ndarray, losses: Mapping[tuple[float, bool], np.ndarray]) -> None:
    """Explore the training loss, (steps,), by the share of entries that is sent, with a memory (True) and without."""
    window = 12
    steps = np.arange(window, len(dense) + 1)

    def compute(share: float) -> dict[str, curves.Line]:
        lines = {"without memory": losses[share, False], "with memory": losses[share, True], "everything sent": dense}
        return {name: (steps, np.convolve(loss, np.ones(window) / window, "valid")) for name, loss in lines.items()}

    def caption(share: float) -> str:
        without, with_memory, everything = (loss[-1] for _, loss in compute(share).values())
        return (
            f"Largest {100 * share:g} % sent: the loss ends at {without:.2f} without a memory and at "
            f"{with_memory:.2f} with one. With everything sent it ends at {everything:.2f}."
        )

    shares = sorted({share for share, _ in losses}, reverse=True)
    curves.curves(
        KINDS | {"everything sent": (figures.BLACK, ":")}, compute, caption,
        {"xlabel": "step", "ylabel": f"training loss, mean of {window}", "xlim": (0, steps[-1]), "ylim": (1, 2.6)},
        corner=(0.98, 0.97), share=widgets.slider("share of the entries sent", shares, 0.01, "{:.1%}"),
    )  # fmt: skip


# Section 4


def accuracies(dense: np.ndarray, rows: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Test accuracy, (seeds,) in per cent: a row for each compressor, its runs "without memory" and "with memory"."""
    figure, ax = figures.new(height=3.8, width=7.6)
    _, low, high = intervals.interval(dense)
    ax.axvspan(low, high, color=figures.BLACK, alpha=0.15, linewidth=0)
    ax.text(dense.mean(), -0.75, "everything sent", ha="center")
    for place, row in enumerate(rows.values()):
        means = [samples.mean() for samples in row.values()]
        ax.plot([min(means), max(means)], [place, place], color="#cccccc", linewidth=3, zorder=0)
        for name, samples in row.items():
            mean, low, high = intervals.interval(samples)
            ax.plot([low, high], [place, place], color=KINDS[name][0])
            ax.plot(mean, place, "o", color=KINDS[name][0])
    for place, (name, (color, _)) in enumerate((KINDS | {"no dot: not trained": (figures.GREY, "")}).items()):
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
    equal = "list as long as the array"

    def compute(share: float) -> dict[str, curves.Line]:
        lines = {"random lists": [expected(share, workers) for workers in teams], equal: [0.5] * len(teams)}
        lines |= {name: filled[name, share].mean(0) for name in KINDS}
        return {name: (teams, 100 * np.array(line)) for name, line in lines.items()}

    def caption(share: float) -> str:
        random, _, bare, due = (line[-1] for _, line in compute(share).values())
        return (
            f"Largest {100 * share:g} % of {teams[-1]} workers: with a memory the sum has {due:.0f} % of all entries, "
            f"without a memory {bare:.0f} %. Random lists would have {random:.0f} %."
        )

    shares = sorted({share for _, share in filled})
    curves.curves(
        {"random lists": (figures.ORANGE, "o:")} | KINDS | {equal: (figures.BLACK, "--")}, compute, caption,
        BY_WORKERS | {"xticks": teams, "ylim": (0, 104), "ylabel": "entries of the sum (%)"},
        share=widgets.slider("share of the entries sent", shares, 0.01, "{:.1%}"),
    )  # fmt: skip


# The further notebook


def sums(teams: Sequence[int], ratios: Mapping[float, Mapping[str, np.ndarray]]) -> None:
    """Explore the bytes of the busiest worker over those of a dense all-reduce, (teams,), by share and algorithm."""
    colors, dense = (figures.GREEN, figures.PINK, figures.RED, figures.BLUE), {"dense all-reduce": np.ones(len(teams))}

    def compute(share: float) -> dict[str, curves.Line]:
        return {name: (teams, ratio) for name, ratio in (ratios[share] | dense).items()}

    def caption(share: float) -> str:
        said = ", ".join(f"{name} {ratio[-1]:.2g}" for name, ratio in ratios[share].items())
        return f"Largest {100 * share:g} % of {teams[-1]} workers, bytes over those of a dense all-reduce: {said}."

    styles = {name: (color, "o-") for name, color in zip(next(iter(ratios.values())), colors, strict=True)}
    curves.curves(
        styles | {"dense all-reduce": (figures.BLACK, "--")}, compute, caption,
        BY_WORKERS | {"yscale": "log", "xticks": teams, "ylim": (1e-3, 200), "ylabel": "bytes (dense all-reduce = 1)"},
        title=lambda share: f"the largest {100 * share:g} % are sent",
        share=widgets.slider("share sent", [*ratios], 0.01, "{:.1%}"),
    )  # fmt: skip
