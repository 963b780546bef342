"""Figures and explorers of 10_consistency and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from dlscale.consistency import Timeline
from dlscale.lab.intervals import interval
from dlscale.page import figures, widgets

SHADES = ScalarMappable(Normalize(0, 16), "cividis_r")
UNSEEN = "missing gradients"


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

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        fig.colorbar(SHADES, ax=ax, label=UNSEEN, ticks=[0, 4, 8, 12, 16], extend="max")

        def update(policy: str, workers: int, slowest: float, bound: int) -> None:
            ax.clear()
            order = clock(policy, workers, slowest, bound)
            _bars(ax, order, span)
            ax.set_title(_counted(order, span), fontsize=11)

        return update

    def caption(policy: str, workers: int, slowest: float, bound: int) -> str:
        order = clock(policy, workers, slowest, bound)
        unseen = order.unseen[order.finish <= span]
        limit = f" with bound {bound}" * (policy == "stale-synchronous")
        return (
            f"{policy.capitalize()}{limit}, {workers} workers, the last {slowest:g} times slower: "
            f"{_counted(order, span)}; on average {unseen.mean():.1f} gradients are missing."
        )

    widgets.explore(
        make, alt=caption, height=3.2, policy=widgets.menu("policy", policies, "stale-synchronous"),
        workers=widgets.slider("workers", [2, 4, 8], 4),
        slowest=widgets.slider("last worker, times slower", [1, 2, 4], 4),
        bound=widgets.slider("bound (stale-synchronous)", [0, 1, 3, 8], 3),
    )  # fmt: skip


# Section 2


def descent(paths: Mapping[tuple[int, float], np.ndarray]) -> None:
    """Explore descent on a parabola with stale gradients: w after each step, by staleness and learning rate."""
    steps = len(next(iter(paths.values())))
    ages, rates = (list(dict.fromkeys(values)) for values in zip(*paths, strict=True))

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        (fresh,) = ax.plot([], [], color=figures.GREY)
        (line,) = ax.plot([], [], color=figures.RED)
        ax.text(0.01, 0.97, "stale gradients", color=figures.RED, va="top", transform=ax.transAxes)
        ax.text(0.01, 0.87, "fresh gradients", color=figures.GREY, va="top", transform=ax.transAxes)
        ax.set(xlim=(0, steps - 1), ylim=(-3, 3), xlabel="step", ylabel="w (best: 0)")

        def update(age: int, rate: float) -> list[Artist]:
            fresh.set_data(range(steps), paths[0, rate])
            line.set_data(range(steps), np.clip(paths[age, rate], -9, 9))
            return [fresh, line]

        return update

    def caption(age: int, rate: float) -> str:
        early, late = (np.abs(part).max() for part in np.array_split(paths[age, rate][steps // 5 :], 2))
        how = (
            "grows without end" if late > 1.05 * early else "shrinks" if late < 0.95 * early else "oscillates for ever"
        )
        return f"Staleness {age}, rate {rate:g}, their product {age * rate:.2f}: w {how}."

    widgets.explore(
        make, alt=caption, height=2.8,
        age=widgets.slider("staleness", ages, 8), rate=widgets.slider("learning rate", rates, 0.2),
    )  # fmt: skip


def smooth(losses: np.ndarray, window: int = 100) -> np.ndarray:
    """Means over so many losses in a row; a loss that is not finite counts as 9."""
    finite = np.nan_to_num(np.asarray(losses, float), nan=9, posinf=9)
    return np.convolve(finite, np.ones(window) / window, "valid")


def crowd_losses(runs: Mapping[tuple[int, float], tuple[np.ndarray, float]]) -> None:
    """Explore training with a crowd: the loss of each gradient and the test accuracy (%), by workers and rate."""
    crowds, rates = (list(dict.fromkeys(values)) for values in zip(*runs, strict=True))
    x = np.arange(len(smooth(next(iter(runs.values()))[0]))) + 100

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        lines = [ax.plot(x, x, color=color)[0] for color in (figures.GREY, figures.RED)]
        names = [ax.text(0.99, 0.95 - 0.1 * k, "", color=line.get_color(), ha="right", va="top", transform=ax.transAxes)
                 for k, line in enumerate(lines)]  # fmt: skip
        ax.set(xlim=(0, x[-1]), ylim=(0.3, 3), xlabel="gradients in all", ylabel="training loss")

        def update(workers: int, rate: float) -> list[Artist]:
            for line, text, number in zip(lines, names, (1, workers), strict=True):
                losses, accuracy = runs[number, rate]
                line.set_ydata(np.minimum(smooth(losses), 2.99))
                text.set_text(f"{number} worker{'s' * (number > 1)}: test accuracy {accuracy:.0f} %")
            return [*lines, *names]

        return update

    def caption(workers: int, rate: float) -> str:
        return (
            f"{workers} asynchronous workers at rate {rate:g}: test accuracy {runs[workers, rate][1]:.0f} %; "
            f"one worker {runs[1, rate][1]:.0f} %. Staleness times rate is {(workers - 1) * rate:.1f}."
        )

    widgets.explore(
        make, alt=caption, height=3.0, workers=widgets.slider("workers", crowds, crowds[-1]),
        rate=widgets.slider("learning rate", rates, rates[1]),
    )  # fmt: skip


def bounds(runs: Mapping[tuple[str, int], tuple[Timeline, np.ndarray]], span: float, seconds: float) -> None:
    """Explore the staleness bound: the timeline on the left, the loss over time on the right, by kind of workers."""
    kinds, limits = (list(dict.fromkeys(values)) for values in zip(*runs, strict=True))

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)

        def update(kind: str, bound: int) -> None:
            left.clear(), right.clear()
            _bars(left, runs[kind, bound][0], span)
            left.set_title(f"bound {bound}", color=figures.RED)
            for limit, color in ((0, figures.GREY), (bound, figures.RED)):
                order, losses = runs[kind, limit]
                right.plot(np.maximum.accumulate(order.applied)[99:], smooth(losses), color=color)
            right.text(0.98, 0.95, f"bound {bound}", color=figures.RED, ha="right", va="top", transform=right.transAxes)
            right.text(0.98, 0.86, "bound 0", color=figures.GREY, ha="right", va="top", transform=right.transAxes)
            right.set(xlim=(0, seconds), ylim=(0.9, 2.4), xlabel="seconds", ylabel="training loss")

        return update

    def caption(kind: str, bound: int) -> str:
        order, losses = runs[kind, bound]
        return (
            f"Eight workers, {kind}, bound {bound}: {_counted(order, span)}; staleness {order.staleness.mean():.1f} on "
            f"average. The loss is below 1.25 after {until(order, losses):.0f} s."
        )

    widgets.explore(
        make, alt=caption, kind=widgets.menu("workers", kinds, kinds[-1]), bound=widgets.slider("bound", limits, 4)
    )


def until(order: Timeline, losses: np.ndarray, aim: float = 1.25) -> float:
    """Seconds until the mean loss of a hundred gradients is below the aim; infinite if it never is."""
    below = smooth(losses) < aim
    return float(np.maximum.accumulate(order.applied)[99:][below.argmax()]) if below.any() else np.inf


def crowds(numbers: Sequence[int], accuracies: Mapping[str, np.ndarray], xlabel: str) -> None:
    """Test accuracies (seeds, numbers) in per cent, by number of workers or the like: a band for each variant."""
    figure, ax = figures.new(height=3.0)
    colors = (figures.BLUE, figures.RED, figures.GREEN)
    at = range(len(numbers))
    pairs = zip(accuracies.items(), colors, strict=False)
    lines = {name: figures.band(ax, at, samples, color, marker="o") for (name, samples), color in pairs}
    figures.names(ax, lines, gap=4)
    ax.set_xticks(at, [*map(str, numbers)])
    ax.set(xlabel=xlabel, ylabel="test accuracy (%)", ylim=(0, 70))
    said = (f"{name} " + ", ".join(f"{mean:.0f}" for mean in samples.mean(0)) for name, samples in accuracies.items())
    figures.show(figure, f"Test accuracy (%) by {xlabel}, {', '.join(map(str, numbers))}: {'; '.join(said)}.")


# Section 3


def spectrum(results: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Explore the ways of agreeing: test accuracies (seeds,) in per cent by machine and arm, from always to never."""
    first, *_ = results
    arms = [*results[first]]

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        at = np.arange(len(arms))[::-1]
        ax.plot([results[first][arm].mean() for arm in arms], at, "o", color="#c4c4c4", markersize=7)
        (dots,) = ax.plot(at, at, "o", color=figures.BLUE, markersize=7)
        spans = ax.hlines(at, 0, 1, color=figures.BLUE, linewidth=2.5)
        ax.set(xlim=(27, 65), ylim=(-0.7, len(arms) - 0.3), xlabel=f"test accuracy (%); grey: {first}")
        ax.set_yticks(at, arms)
        for place, text in ((at[0], "always agree"), (at[-1], "never")):
            ax.text(64.5, place, text, ha="right", va="center", color=figures.GREY, style="italic")
        title = ax.set_title(" ", fontsize=11)

        def update(machine: str) -> list[Artist]:
            found = [interval(results[machine][arm]) for arm in arms]
            dots.set_xdata([one.mean for one in found])
            spans.set_segments([[(one.low, y), (one.high, y)] for one, y in zip(found, at, strict=True)])
            title.set_text(machine)
            return [dots, spans, title]

        return update

    def caption(machine: str) -> str:
        means = {arm: results[machine][arm].mean() for arm in arms}
        most, least = max(means, key=means.__getitem__), min(means, key=means.__getitem__)
        return f"{machine}: from {means[least]:.0f} % ({least}) to {means[most]:.0f} % ({most})."

    widgets.explore(make, alt=caption, height=3.6, machine=widgets.menu("machine", [*results], [*results][-1]))


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
    colors = (figures.GREY, figures.ORANGE, figures.PINK, figures.BLUE)

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)

        def update(size: float, shards: int, latency: float) -> None:
            ax.clear()
            found = times_of(size, shards, latency)
            for k, ((name, seconds), color) in enumerate(zip(found.items(), colors, strict=True)):
                ax.plot(workers, 1e3 * seconds, "o-", markersize=4, color=color)
                ax.text(0.02, 0.95 - 0.09 * k, name, color=color, va="top", transform=ax.transAxes)
            ax.set(xscale="log", yscale="log", xlabel="workers", ylabel="time of an exchange (ms)")
            ax.set_xticks(workers, [f"{number:,}" for number in workers])
            ax.minorticks_off()

        return update

    def caption(size: float, shards: int, latency: float) -> str:
        said = (f"{name} {1e3 * seconds[5]:.3g} ms" for name, seconds in times_of(size, shards, latency).items())
        return f"{size:g} MB, {latency:g} µs, {workers[5]} workers: {', '.join(said)}."

    widgets.explore(
        make, alt=caption, height=3.3, size=widgets.slider("size (MB)", [0.01, 0.1, 1, 10, 100], 0.1),
        shards=widgets.slider("shards", [4, 16, 64], 16), latency=widgets.slider("latency (µs)", [1, 10, 100], 10),
    )  # fmt: skip


def queue(order_of: Callable[[int, float], Timeline]) -> None:
    """Explore the queue at a server that is busy for so many seconds with each gradient."""
    colors = {"computes": figures.SKY, "waits in the queue": figures.RED, "is served": figures.ORANGE}

    def rate(order: Timeline) -> float:
        return len(order.worker) / order.applied[-1]

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)

        def update(workers: int, busy: float) -> None:
            ax.clear()
            order = order_of(workers, busy)
            for i in range(workers):
                own = (order.worker == i) & (order.start < 10)
                ends = [order.start[own], order.finish[own], order.applied[own] - busy, order.applied[own]]
                for color, begin, end in zip(colors.values(), ends, ends[1:], strict=False):
                    ax.broken_barh(np.column_stack([begin, end - begin]), (i + 0.6, 0.8), color=color, linewidth=0)
            ax.set(xlim=(0, 10), ylim=(workers + 0.5, -0.9), xlabel="seconds (a gradient takes one)", ylabel="worker")
            ax.set_yticks(range(1, workers + 1))
            for k, (name, color) in enumerate(colors.items()):
                ax.text(0.1 + 3.3 * k, -0.1, name, color=color, va="center")
            ax.grid(visible=False)

        return update

    def caption(workers: int, busy: float) -> str:
        return (
            f"{workers} workers, {busy:g} s of service: {rate(order_of(workers, busy)):.1f} gradients per second, "
            f"{workers / (1 + busy):.1f} without a queue. The server can take {1 / busy:.3g}."
        )

    widgets.explore(
        make, alt=caption, height=3.2, workers=widgets.slider("workers", [2, 4, 8, 12], 8),
        busy=widgets.slider("seconds of service", [0.02, 0.05, 0.1, 0.2, 0.4], 0.2),
    )  # fmt: skip
