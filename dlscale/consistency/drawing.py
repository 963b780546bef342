"""Figures and explorers of 10_consistency and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from dlscale.consistency import Timeline
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
        unseen = order.unseen[order.finish <= span]
        limit = f" with bound {bound}" * (policy == "stale-synchronous")
        return (
            f"{policy.capitalize()}{limit}, {workers} workers, the last {slowest:g} times slower: "
            f"{_counted(order, span)}; on average {unseen.mean():.1f} gradients are missing."
        )

    widgets.explore_axes(
        paint, alt=caption, height=3.2, policy=widgets.menu("policy", policies, "stale-synchronous"),
        workers=widgets.slider("workers", [2, 4, 8], 4),
        slowest=widgets.slider("last worker, times slower", [1, 2, 4], 4),
        bound=widgets.slider("bound (stale-synchronous)", [0, 1, 3, 8], 3),
    )  # fmt: skip


# Section 2


def descent(paths: Mapping[tuple[int, float], np.ndarray]) -> None:
    """Explore descent on a parabola with stale gradients: w after each step, by staleness and learning rate."""
    ages, rates = (list(dict.fromkeys(values)) for values in zip(*paths, strict=True))
    steps = np.arange(len(paths[0, rates[0]]))

    def caption(age: int, rate: float) -> str:
        early, late = (np.abs(part).max() for part in np.array_split(paths[age, rate][len(steps) // 5 :], 2))
        how = "grows without end" if late > 1.05 * early else "shrinks" if late < 0.95 * early else "oscillates"
        return f"Staleness {age}, rate {rate:g}, their product {age * rate:.2f}: w {how}."

    curves.curves(
        {"stale gradients": (figures.RED, "-"), "fresh gradients": (figures.GREY, "-")},
        lambda age, rate: {
            "stale gradients": (steps, np.clip(paths[age, rate], -9, 9)), "fresh gradients": (steps, paths[0, rate]),
        },
        caption, {"xlim": (0, steps[-1]), "ylim": (-3, 3), "xlabel": "step", "ylabel": "w (best: 0)"}, height=2.8,
        age=widgets.slider("staleness", ages, 8), rate=widgets.slider("learning rate", rates, 0.2),
    )  # fmt: skip


def smooth(losses: np.ndarray, window: int = 100) -> np.ndarray:
    """Means over so many losses in a row; a loss that is not finite counts as 9."""
    finite = np.nan_to_num(np.asarray(losses, float), nan=9, posinf=9)
    return np.convolve(finite, np.ones(window) / window, "valid")


def crowd_losses(runs: Mapping[tuple[int, float], tuple[np.ndarray, float]]) -> None:
    """Explore training with a crowd: the loss of each gradient and the test accuracy (%), by workers and rate."""
    numbers, rates = (list(dict.fromkeys(values)) for values in zip(*runs, strict=True))
    steps = np.arange(100, len(runs[1, rates[0]][0]) + 1)

    def compute(workers: int, rate: float) -> dict[str, curves.Line]:
        return {name: (steps, smooth(runs[k, rate][0])) for name, k in (("the crowd", workers), ("one worker", 1))}

    def caption(workers: int, rate: float) -> str:
        return (
            f"{workers} asynchronous workers at rate {rate:g}: test accuracy {runs[workers, rate][1]:.0f} %; "
            f"one worker {runs[1, rate][1]:.0f} %. Staleness times rate is {(workers - 1) * rate:.1f}."
        )

    curves.curves(
        {"the crowd": (figures.RED, "-"), "one worker": (figures.GREY, "-")}, compute, caption,
        {"xlim": (0, steps[-1]), "ylim": (0.3, 3), "xlabel": "gradients in all", "ylabel": "training loss"},
        corner=(0.98, 0.97), height=3.0, workers=widgets.slider("workers", numbers, numbers[-1]),
        rate=widgets.slider("learning rate", rates, rates[1]),
    )  # fmt: skip


def bounds(runs: Mapping[tuple[str, int], tuple[Timeline, np.ndarray]], span: float, seconds: float) -> None:
    """Explore the staleness bound: the timeline on the left, the loss over time on the right, by kind of workers.

    The largest bound stands for none.
    """
    kinds, limits = (list(dict.fromkeys(values)) for values in zip(*runs, strict=True))
    names = {limit: f"bound {limit}" for limit in limits} | {limits[-1]: "no bound"}

    def paint(left: Axes, right: Axes, kind: str, bound: int) -> None:
        _bars(left, runs[kind, bound][0], span)
        left.set(title=f"{kind}, {names[bound]}", xlabel="seconds (darker: more missing gradients)")
        colors = {limits[0]: figures.GREY, limits[-1]: figures.BLUE} | {bound: figures.RED}
        for row, (limit, color) in enumerate(sorted(colors.items())):  # as the curves lie, from above
            order, losses = runs[kind, limit]
            right.plot(np.maximum.accumulate(order.applied)[99:], smooth(losses), color=color)
            place = {"ha": "right", "va": "top", "transform": right.transAxes}
            right.text(0.98, 0.97 - 0.09 * row, names[limit], color=color, **place)
        right.axhline(AIM, color=figures.BLACK, linestyle=":", linewidth=1)
        right.text(seconds, AIM, f"loss {AIM}", ha="right", va="bottom")
        right.set(xlim=(0, seconds), ylim=(0.9, 2.4), xlabel="seconds", ylabel="training loss")

    def caption(kind: str, bound: int) -> str:
        order, losses = runs[kind, bound]
        return (
            f"Eight workers, {kind}, {names[bound]}: {_counted(order, span)}; staleness {order.staleness.mean():.1f} "
            f"on average. The loss is below {AIM} after {until(order, losses):.0f} s."
        )

    widgets.explore_axes(
        paint, alt=caption, columns=2, kind=widgets.menu("workers", kinds, kinds[-1]),
        bound=widgets.slider("bound", limits, 1),
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


def exchange(times_of: Callable[..., Mapping[str, np.ndarray]], workers: np.ndarray) -> None:
    """Explore the time (s) of an exchange among `workers` by way, for a size (MB), shards and a latency (µs)."""
    colors = {"one server": figures.GREY, "sharded server": figures.ORANGE, "hierarchical": figures.PINK}
    styles = {name: (color, "o-") for name, color in (colors | {"all-reduce": figures.BLUE}).items()}

    def compute(**values: float) -> dict[str, curves.Line]:
        return {name: (workers, 1e3 * seconds) for name, seconds in times_of(*values.values()).items()}

    def caption(size: float, shards: int, latency: float) -> str:
        said = (f"{name} {1e3 * seconds[5]:.3g} ms" for name, seconds in times_of(size, shards, latency).items())
        return f"{size:g} MB, {latency:g} µs, {workers[5]} workers: {', '.join(said)}."

    axis = {"xscale": "log", "yscale": "log", "xlabel": "workers", "ylabel": "time of an exchange (ms)"}
    curves.curves(
        styles, compute, caption, axis | {"xticks": workers, "ylim": (1e-3, 1e4)}, height=3.3,
        size=widgets.slider("size (MB)", [0.01, 0.1, 1, 10, 100], 0.1),
        shards=widgets.slider("shards", [4, 16, 64], 16), latency=widgets.slider("latency (µs)", [1, 10, 100], 10),
    )  # fmt: skip


def queue(order_of: Callable[[int, float], Timeline], workers: np.ndarray) -> None:
    """Explore the gradients per second of so many `workers`, whose server is busy for some time with each gradient."""

    def compute(busy: float) -> dict[str, curves.Line]:
        made = [len(order.worker) / order.applied[-1] for order in (order_of(int(k), busy) for k in workers)]
        return {"if nobody had to queue": (workers, workers / (1 + busy)), "with the queue": (workers, np.array(made))}

    def caption(busy: float) -> str:
        free, queued = (line[1][-1] for line in compute(busy).values())
        return (
            f"{busy:g} s of service: {workers[-1]} workers make {queued:.1f} gradients per second, {free:.1f} if "
            f"nobody had to queue. The server can take {1 / busy:.3g}."
        )

    curves.curves(
        {"if nobody had to queue": (figures.GREY, "o-"), "with the queue": (figures.RED, "o-")}, compute, caption,
        {"xlim": (0, 12.5), "ylim": (0, 12.5), "xlabel": "workers", "ylabel": "gradients per second"},
        height=3.0, busy=widgets.slider("seconds of service", [0.02, 0.05, 0.1, 0.2, 0.4], 0.2),
    )  # fmt: skip
