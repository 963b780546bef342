"""Figures and explorers of 10_consistency and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from dlscale.consistency import Timeline
from dlscale.lab.intervals import interval
from dlscale.page import curves, figures, widgets

SHADES = ScalarMappable(Normalize(0, 16), "cividis_r")
UNSEEN = "missing gradients"
AIM = 1.25  # of the training loss, with a staleness bound


def _bars(ax: Axes, order: Timeline, span: float) -> None:
    """A row for each worker, a bar for each gradient: the darker, the more of the others' gradients it has not seen."""
    for i in range(order.workers):
        own = (order.worker == i) & (order.start < span)
        times = np.column_stack([order.start[own], (order.finish - order.start)[own]])
        shades = SHADES.to_rgba(order.unseen[own])
        ax.broken_barh(times, (i + 0.6, 0.8), facecolors=shades, edgecolor="white", linewidth=0.8)
    ax.set(xlim=(0, span), ylim=(order.workers + 0.5, 0.5), xlabel="seconds", ylabel="worker")
    ax.set_yticks(range(1, order.workers + 1))
    ax.grid(visible=False)


def in_span(order: Timeline, span: float) -> tuple[int, float]:
    """How many gradients are finished within so many seconds, and the share of the workers' time that is waiting."""
    busy = np.minimum(order.finish, span) - np.minimum(order.start, span)
    return int((order.finish <= span).sum()), float(1 - busy.sum() / (span * order.workers))


def _counted(order: Timeline, span: float) -> str:
    made, waits = in_span(order, span)
    return f"{made} gradients in {span:.0f} s, {100 * waits:.0f} % of the time is waiting"


def opening(orders: Mapping[str, Timeline], span: float) -> None:
    """Timelines side by side, by name."""
    figure, panels = figures.new(len(orders), height=2.6, sharey=True)
    for ax, (name, order) in zip(panels, orders.items(), strict=True):
        _bars(ax, order, span)
        ax.set_title(f"{name}: {in_span(order, span)[0]} gradients")
    panels[1].set_ylabel("")
    figure.colorbar(SHADES, ax=panels, label=UNSEEN, ticks=[0, 8, 16], extend="max")
    figures.show(figure, "; ".join(f"{name}: {_counted(order, span)}" for name, order in orders.items()) + ".")


# Section 1


def clocks(clock: Callable[..., Timeline], policies: Sequence[str], span: float) -> None:
    """Explore who computes when and who has seen what: clock(policy, workers, slowest, bound) is a timeline."""

    def paint(ax: Axes, policy: str, workers: int, slowest: float, bound: int) -> None:
        order = clock(policy, workers, slowest, bound)
        _bars(ax, order, span)
        ax.set_title(_counted(order, span))
        if len(ax.figure.axes) == 1:
            ax.figure.colorbar(SHADES, ax=ax, label=UNSEEN, ticks=[0, 4, 8, 12, 16], extend="max")

    def caption(policy: str, workers: int, slowest: float, bound: int) -> str:
        order = clock(policy, workers, slowest, bound)
        limit = f" with bound {bound}" * (policy == "stale-synchronous")
        return (
            f"{policy.capitalize()}{limit}, {workers} workers, the last {slowest:g} times slower: "
            f"{_counted(order, span)}; on average {order.unseen[order.finish <= span].mean():.1f} missing gradients."
        )

    widgets.explore_axes(
        paint, alt=caption, height=3.2, policy=widgets.menu("policy", policies, "stale-synchronous"),
        workers=widgets.slider("workers", [2, 4, 8], 4),
        slowest=widgets.slider("last worker, times slower", [1, 2, 4], 4),
        bound=widgets.slider("bound (stale-synchronous)", [0, 1, 3, 8], 3),
    )  # fmt: skip


# Section 2


def _beside_first(
    lines: Mapping[tuple[int, float], curves.Line], names: Sequence[str], caption: Callable[[int, float], str],
    axis: Mapping[str, Any], corner: tuple[float, float], number: str, start: tuple[int, float],
) -> None:  # fmt: skip
    """Explore a line by number and learning rate (red), beside the line of the first number (grey)."""
    numbers, rates = (list(dict.fromkeys(values)) for values in zip(*lines, strict=True))
    curves.curves(
        {names[0]: (figures.RED, "-"), names[1]: (figures.GREY, "-")},
        lambda number, rate: {names[0]: lines[number, rate], names[1]: lines[numbers[0], rate]},
        caption, axis, corner, height=3.0, number=widgets.slider(number, numbers, start[0]),
        rate=widgets.slider("learning rate", rates, start[1]),
    )  # fmt: skip


def descent(paths: Mapping[tuple[int, float], np.ndarray]) -> None:
    """Explore descent on a parabola with stale gradients: w after each step, by staleness and learning rate."""
    lines = {key: (range(len(path)), np.clip(path, -9, 9)) for key, path in paths.items()}

    def caption(number: int, rate: float) -> str:
        early, late = (np.abs(part).max() for part in np.array_split(paths[number, rate][40:], 2))
        how = "grows without end" if late > 1.05 * early else "shrinks" if late < 0.95 * early else "oscillates"
        return f"Staleness {number}, rate {rate:g}, their product {number * rate:.2f}: w {how}."

    axis = {"xlim": (0, 200), "ylim": (-3, 3), "xlabel": "step", "ylabel": "w (best: 0)"}
    _beside_first(lines, ["stale gradients", "fresh gradients"], caption, axis, (0.02, 0.97), "staleness", (8, 0.2))


def smooth(losses: np.ndarray, window: int = 100) -> np.ndarray:
    """Means over so many losses in a row; a loss that is not finite counts as 9."""
    finite = np.nan_to_num(np.asarray(losses, float), nan=9, posinf=9)
    return np.convolve(finite, np.ones(window) / window, "valid")


def crowd_losses(runs: Mapping[tuple[int, float], tuple[np.ndarray, float]]) -> None:
    """Explore training with a crowd: the loss of each gradient and the test accuracy (%), by workers and rate."""
    lines = {key: (range(100, len(losses) + 1), smooth(losses)) for key, (losses, _) in runs.items()}

    def caption(number: int, rate: float) -> str:
        return (
            f"{number} asynchronous workers at rate {rate:g}: test accuracy {runs[number, rate][1]:.0f} %; "
            f"one worker {runs[1, rate][1]:.0f} %. Staleness times rate is {(number - 1) * rate:.1f}."
        )

    axis = {"xlim": (0, 3200), "ylim": (0.3, 3), "xlabel": "gradients in all", "ylabel": "training loss"}
    _beside_first(lines, ["the crowd", "one worker"], caption, axis, (0.98, 0.97), "workers", (max(runs)[0], 0.1))


def bounds(runs: Mapping[tuple[str, int], tuple[Timeline, np.ndarray]], seconds: float) -> None:
    """Explore the staleness bound: the loss over time, by kind of workers. The largest bound stands for none."""
    kinds, limits = (list(dict.fromkeys(values)) for values in zip(*runs, strict=True))
    styles = {"bound 0": (figures.GREY, "-"), "the chosen bound": (figures.RED, "-"), "no bound": (figures.BLUE, "-")}

    def compute(kind: str, bound: int) -> dict[str, curves.Line]:
        shown = [runs[kind, limit] for limit in (limits[0], bound, limits[-1])]
        lines = [(np.maximum.accumulate(order.applied)[99:], smooth(losses)) for order, losses in shown]
        return dict(zip(styles, lines, strict=True)) | {f"loss {AIM}": ((0, seconds), (AIM, AIM))}

    def caption(kind: str, bound: int) -> str:
        order, losses = runs[kind, bound]
        limit = "no bound" if bound == limits[-1] else f"bound {bound}"
        return (
            f"Eight workers, {kind}, {limit}: {_counted(order, 100)}; staleness {order.staleness.mean():.1f} on "
            f"average. The loss is below {AIM} after {until(order, losses):.0f} s."
        )

    curves.curves(
        styles | {f"loss {AIM}": (figures.BLACK, ":")}, compute, caption,
        {"xlim": (0, seconds), "ylim": (0.9, 2.4), "xlabel": "seconds", "ylabel": "training loss"}, (0.98, 0.97),
        kind=widgets.menu("workers", kinds, kinds[-1]), bound=widgets.slider("bound", limits, 1),
    )  # fmt: skip


def until(order: Timeline, losses: np.ndarray) -> float:
    """Seconds until the mean loss of a hundred gradients is below `AIM`; infinite if it never is."""
    below = smooth(losses) < AIM
    return float(np.maximum.accumulate(order.applied)[99:][below.argmax()]) if below.any() else np.inf


def crowds(numbers: Sequence[int], accuracies: Mapping[str, np.ndarray], xlabel: str) -> None:
    """Test accuracies (seeds, numbers) in per cent, by number of workers or the like: a band for each variant."""
    figure, ax = figures.new(height=3.0)
    at, colors = range(len(numbers)), (figures.BLUE, figures.RED)
    pairs = zip(accuracies.items(), colors, strict=True)
    lines = {name: figures.band(ax, at, samples, color, marker="o") for (name, samples), color in pairs}
    ax.hlines(10, 0, len(numbers) - 1, color=figures.GREY, linestyle=":", linewidth=1)
    ax.text(0, 11, "guessing", color=figures.GREY)
    figures.names(ax, lines, gap=4)
    ax.set_xticks(at, [*map(str, numbers)])
    ax.set(xlabel=xlabel, ylabel="test accuracy (%)", ylim=(0, 70))
    said = (f"{name} " + ", ".join(f"{mean:.0f}" for mean in samples.mean(0)) for name, samples in accuracies.items())
    figures.show(figure, f"Test accuracy (%) by {xlabel}, {', '.join(map(str, numbers))}: {'; '.join(said)}.")


def spectrum(groups: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Test accuracies (seeds,) in per cent with their intervals: a row for each method, a colour for each group."""
    figure, ax = figures.new(height=3.2)
    said = []
    for place, ((name, found), color) in enumerate(zip(groups.items(), (figures.BLUE, figures.RED), strict=True)):
        rows = np.arange(len(found)) + 0.2 * place - 0.1
        mean, low, high = interval(np.transpose([*found.values()]))
        ax.hlines(rows, low, high, color=color)
        ax.plot(mean, rows, "o", color=color)
        ax.text(0.25 * place, 1.03, name, color=color, transform=ax.transAxes)
        said.append(f"{name}: {', '.join(f'{arm} {value:.1f}' for arm, value in zip(found, mean, strict=True))}")
    ax.set_yticks(range(len(found)), [*found])
    ax.grid(visible=False, axis="y")
    ax.set(ylim=(len(found) - 0.4, -0.6), xlabel="test accuracy (%), 95 % interval")
    figures.show(figure, f"Test accuracy (%): {'; '.join(said)}.")


# Section 4


def hyperedges(problems: Mapping[str, np.ndarray]) -> None:
    """The coordinates that the first twenty examples of each problem touch; red where the first one touches them."""
    figure, panels = figures.new(len(problems), height=2.7, sharey=True)
    for ax, (name, edges) in zip(panels, problems.items(), strict=True):
        for row, edge in enumerate(edges[:20], 1):
            shared = np.isin(edge, edges[0])
            for chosen, color, size in ((~shared, figures.BLACK, 3), (shared, figures.RED, 6)):
                ax.plot(edge[chosen] + 1, np.full(chosen.sum(), row), ".", markersize=size, color=color)
        top = 10 ** len(str(edges.max()))
        ax.set(title=name, xlabel="coordinate", ylim=(20.7, 0.3), xticks=(0, top // 2, top))
        ax.grid(visible=False)
    panels[0].set(ylabel="example")
    said = ", ".join(f"{name} {np.isin(some[1:20], some[0]).any(1).sum()} of 19" for name, some in problems.items())
    figures.show(figure, f"Examples that share a coordinate with the first one: {said}.")


# The further notebook


def by_workers(
    values_of: Callable[..., Mapping[str, np.ndarray]], workers: np.ndarray, names: Sequence[str],
    axis: Mapping[str, Any], **controls: widgets.Control,
) -> None:  # fmt: skip
    """Explore lines over so many `workers`: values_of(**controls) by name. The caption has those of workers[5]."""

    def compute(**values: float) -> dict[str, curves.Line]:
        return {name: (workers, found) for name, found in values_of(**values).items()}

    def caption(**values: float) -> str:
        given = ", ".join(f"{controls[name].label} {value:g}" for name, value in values.items())
        said = ", ".join(f"{name} {found[5]:.3g}" for name, found in values_of(**values).items())
        return f"With {given} and {workers[5]} workers, {axis['ylabel']}: {said}."

    colors = (figures.GREY, figures.RED, figures.PINK, figures.BLUE)
    styles = {name: (color, "o-") for name, color in zip(names, colors, strict=False)}
    curves.curves(styles, compute, caption, {"xlabel": "workers"} | axis, **controls)
