"""Figures and explorers of 14_honest_benchmarks and its further notebook: a line in the notebook calls each."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from dlscale import honest_benchmarks as honest
from dlscale.lab import intervals
from dlscale.page import figures, widgets
from dlscale.page.curves import Line, curves


def _strip(ax: Axes, place: float, samples: np.ndarray, color: str) -> None:
    """All finite samples, spread a little to the sides."""
    seen = np.asarray(samples)[np.isfinite(samples)]
    ax.plot(place + np.linspace(-0.15, 0.15, len(seen)), seen, "o", color=color, markersize=4, alpha=0.6)


def _whiskers(ax: Axes, place: float, found: intervals.Interval, color: str = figures.BLACK) -> None:
    low, high = found.mean - found.low, found.high - found.mean
    ax.errorbar(place, found.mean, [[low], [high]], color=color, marker="o", markersize=5, capsize=4)


def _bars(ax: Axes, values: Mapping[str, float], colors: Sequence[str], text: str = "{:.1f}") -> None:
    ax.bar(list(values), list(values.values()), color=colors, width=0.6)
    for place, value in enumerate(values.values()):
        ax.text(place, value, text.format(value), ha="center", va="bottom", fontweight="bold")
    ax.grid(axis="x", visible=False)


# Section 1


def same_runs(theirs: np.ndarray, ours: np.ndarray) -> None:
    """Explore a report on equal runs: ours is the best of some, and the axis begins where you like."""
    tries = [n for n in (1, 2, 5, 10, 20) if n <= len(ours)]
    best = {n: float(honest.expected_best(ours, n)) for n in tries}
    lowest, highest = min(theirs.min(), ours.min()), max(theirs.max(), ours.max())
    cut = float(np.floor(theirs.mean()) - 1)
    starts = [0.0, 20.0, 40.0, cut]

    def make(fig: Figure) -> widgets.Update:
        left, right, apart = figures.axes(fig, 3, width_ratios=[2, 2, 1.3])
        for place, (runs, color) in enumerate(((theirs, figures.GREY), (ours, figures.BLUE))):
            _strip(right, place, runs, color)
            _whiskers(right, place + 0.3, intervals.interval(runs))
        right.set(xticks=[0, 1], xticklabels=["theirs", "ours"], xlim=(-0.5, 1.6), ylim=(lowest - 2, highest + 1))
        right.set(title="all runs, mean and 95 %", ylabel="test accuracy (%)")
        _whiskers(apart, 0, intervals.interval(ours - theirs))
        apart.axhline(0, color=figures.RED)
        apart.set(xticks=[], xlim=(-1, 1), ylim=(-4, 4), title="ours − theirs", ylabel="points")
        right.grid(axis="x", visible=False)

        def update(best_of: int, start: float) -> None:
            left.clear()
            _bars(left, {"theirs": theirs.mean(), "ours": best[best_of]}, [figures.GREY, figures.BLUE])
            top = highest + 0.5 if start else 1.15 * highest
            left.set(ylim=(start, top), ylabel="test accuracy (%)", title="the report")

        return update

    def caption(best_of: int, start: float) -> str:
        gain = best[best_of] - theirs.mean()
        times = theirs.mean() / (theirs.mean() - start)  # Tufte's lie factor
        mean, low, high = intervals.interval(ours - theirs)
        return (
            f"Best of {best_of}, axis from {start:g} %: the report claims {gain:+.1f} points, which look {times:.0f} "
            f"times as large. Ours minus theirs is {mean:.1f} [{low:.1f}, {high:.1f}] points."
        ).replace("-", "−")

    widgets.explore(
        make, alt=caption, height=3.1, best_of=widgets.slider("ours is the best of", tries, tries[-1]),
        start=widgets.slider("axis begins at (%)", starts, cut),
    )  # fmt: skip


def power(deviation: float) -> None:
    """Explore how often a comparison finds a true difference, by the number of seeds; `deviation` is of one run."""
    seeds, sigma, differences = np.arange(2, 81), np.sqrt(2) * deviation, [0.5, 1.0, 2.0, 3.0]
    lines = {delta: [100 * honest.power(delta, sigma, n) for n in seeds] for delta in differences}
    styles = {"power": (figures.BLUE, "-"), "your seeds": (figures.RED, "o-"), "four of five": (figures.GREY, ":")}
    axis = {"xlabel": "seeds of each method", "ylabel": "power (%)", "ylim": (0, 104), "xlim": (0, 81)}

    def compute(delta: float, count: int) -> dict[str, Line]:
        drop = [count, count], [0, lines[delta][count - 2]]
        return {"power": (seeds, lines[delta]), "your seeds": drop, "four of five": ([0, 81], [80, 80])}

    def caption(delta: float, count: int) -> str:
        return (
            f"A true difference of {delta:g} point{'s' * (delta != 1)}: {count} seeds of each method find it in "
            f"{lines[delta][count - 2]:.0f} % of all comparisons. For 80 % you need "
            f"{honest.seeds_needed(delta, sigma)} seeds."
        )

    delta = widgets.slider("true difference (points)", differences, 1.0)
    count = widgets.slider("seeds of each method", [3, 5, 10, 20, 40, 60, 80], 10)
    curves(styles, compute, caption, axis, corner=(0.02, 0.7), height=2.9, delta=delta, count=count)


# Section 2


def searches(test: np.ndarray, fresh: np.ndarray) -> None:
    """How far the best of n runs lies above the mean: on the test set that chose it, and on fresh examples."""
    tries = np.arange(1, len(test) + 1)
    leads = {
        "on the test set that chose it": ([honest.expected_best(test, n) - test.mean() for n in tries], figures.BLUE),
        "on fresh examples": ([honest.expected_best(test, n, of=fresh) - fresh.mean() for n in tries], figures.RED),
    }
    figure, ax = figures.new(height=2.9)
    for label, (lead, color) in leads.items():
        ax.plot(tries, lead, color=color)
        ax.text(tries[-1], lead[-1] + 0.12, label, color=color, ha="right", va="bottom")
    ax.set(xlabel="number of trials n", ylabel="lead of the best of n (points)", xlim=(1, len(tries)))
    ax.set_ylim(0, 1.2 * max(lead[-1] for lead, _ in leads.values()))
    said = (f"{label} {lead[len(tries) // 2 - 1]:.1f} points" for label, (lead, _) in leads.items())
    figures.show(figure, f"The best of {len(tries) // 2} runs leads the mean run: {', '.join(said)}.")


# Section 3


def crossing(examples: np.ndarray, test: np.ndarray, fresh: np.ndarray, target: float) -> None:
    """Explore when a run first shows a target; accuracies (runs, looks) by the test set and by fresh examples."""
    thousands, width = examples / 1e3, 17
    half = width // 2
    smooth = np.array([np.convolve(run, np.ones(width) / width, "valid") for run in test])

    def found(run: int, every: int, target: float) -> int | None:
        seen = np.arange(every - 1, len(examples), every)
        at = honest.first_crossing(seen, test[run, seen], target)
        return int(at) if np.isfinite(at) else None

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        (looks,) = ax.plot([], [], "o-", color=figures.BLUE, markersize=3, linewidth=0.3)
        (mean,) = ax.plot([], [], color=figures.BLACK, linewidth=1.5)
        line = ax.axhline(target, color=figures.GREY, linestyle=":")
        (pair,) = ax.plot([], [], "o-", color=figures.RED, markersize=8, linewidth=1)
        names = [ax.text(0, 0, text, color=figures.RED, va="center") for text in ("first crossing", "fresh examples")]
        ax.text(0.99, 0.04, f"blue: test set; black: its mean of {width} looks", ha="right", transform=ax.transAxes)
        ax.set(xlabel="thousand examples seen in training", ylabel="accuracy (%)", ylim=(40, 60))
        ax.set_xlim(0, thousands[-1])

        def update(run: int, every: int, target: float) -> list[Artist]:
            looks.set_data(thousands[every - 1 :: every], test[run, every - 1 :: every])
            mean.set_data(thousands[half:-half], smooth[run])
            line.set_ydata([target, target])
            at = found(run, every, target)
            x, *heights = (0, 0, 0) if at is None else (thousands[at], test[run, at], fresh[run, at])
            pair.set_data([x, x], heights)
            for text, height, side, align in zip(names, heights, (-1, 1), ("right", "left"), strict=True):
                text.set(x=x + 1.5 * side, y=height - 0.8 * side, ha=align, visible=at is not None)
            return [looks, mean, line, pair, *names]

        return update

    def caption(run: int, every: int, target: float) -> str:
        at, count = found(run, every, target), len(examples) // every
        if at is None:
            return f"Run {run}, {count} looks: the test accuracy never reaches {target:g} %."
        after = test[run, at + 1 : at + 17]
        below = f" Of the next {len(after)} looks, {np.sum(after < target)} lie below." if len(after) else ""
        return (
            f"Run {run}, {count} looks: {target:g} % is first reached after {thousands[at]:.0f} thousand examples. "
            f"Fresh examples give this network {fresh[run, at]:.1f} %.{below}"
        )

    gaps = [test[run, at] - fresh[run, at] if (at := found(run, 1, target)) else -9 for run in range(len(test))]
    widgets.explore(
        make, alt=caption, height=3.2, run=widgets.slider("run", list(range(len(test))), int(np.argmax(gaps))),
        every=widgets.slider("look at every n-th point", [16, 8, 4, 2, 1], 1),
        target=widgets.slider("target (%)", [target - 4, target - 2, target, target + 1, target + 2], target),
    )  # fmt: skip


# Section 4


def systems(seconds: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], rates: Mapping[str, float]) -> None:
    """Explore two systems: examples per second, and the time to a target; `found` are accuracies (runs, looks)."""
    one, many = found
    colors, targets = (figures.GREY, figures.BLUE), [40.0, 44.0, 46.0, 48.0, 50.0]

    def times(target: float) -> list[np.ndarray]:
        return [honest.first_crossing(seconds[name], runs, target, in_a_row=3) for name, runs in found.items()]

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        _bars(left, {name.replace(", ", ",\n"): rate for name, rate in rates.items()}, colors, "{:.0f}")
        left.set(ylabel="thousand examples per second", title="the report", ylim=(0, 1.2 * max(rates.values())))
        for (name, runs), color in zip(found.items(), colors, strict=True):
            figures.band(right, 1e3 * seconds[name], runs, color)
        line = right.axhline(0, color=figures.BLACK, linestyle=":")
        marks = [right.plot([], [], "o", color=color, markersize=9)[0] for color in colors]
        sides = [{"ha": "left", "va": "top"}, {"ha": "right", "va": "bottom"}]  # clear of the curves
        names = [right.text(1, 50, "", color=color, **side) for color, side in zip(colors, sides, strict=True)]
        right.set(xscale="log", xlabel="milliseconds of training", ylabel="test accuracy (%)", ylim=(10, 60))
        right.set_title("what a user gets (mean, 95 %)")

        def update(target: float) -> list[Artist]:
            line.set_ydata([target, target])
            for mark, name, found_at, way in zip(marks, names, times(target), (-1, 1), strict=True):
                at = min(1e3 * honest.median(found_at), 1e9)  # far to the right if never
                mark.set_data([at], [target])
                name.set(text=f"{at:.0f} ms", x=at * 0.85**way, y=target + 1.5 * way, clip_on=True)
            return [line, *marks, *names]

        return update

    def caption(target: float) -> str:
        alone, together = times(target)
        return (
            f"{many}: {rates[many] / rates[one]:.0f} times the examples per second of {one}. Median times to "
            f"{target:g} %: {1e3 * honest.median(together):.0f} and {1e3 * honest.median(alone):.0f} ms; median of "
            f"{len(alone)} speed-ups: {honest.ratio(alone, together).mean:.1f}."
        )

    widgets.explore(make, alt=caption, height=3.2, target=widgets.slider("target (%)", targets, 50.0))


# The further notebook


def levels(measurements: Sequence[honest.Measured]) -> None:
    """Explore one report on four levels: all samples, their quartiles, and the interval of the median."""
    known = {measured.level: measured for measured in measurements}

    def part(level: str, count: int) -> honest.Measured:
        return dataclasses.replace(known[level], samples=known[level].samples[:count])

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)

        def update(level: str, count: int) -> None:
            ax.clear()
            few, everything = part(level, count), known[level].samples
            seen = everything[np.isfinite(everything)]
            top = 1.05 * np.quantile(seen, 0.9)
            samples = few.samples[few.samples <= top]
            ax.plot(samples, np.linspace(-0.2, 0.2, len(samples)), "o", color=figures.SKY, markersize=5)
            rows = {0.5: (few.spread, figures.ORANGE), 0.85: (few.interval[1:], figures.BLUE)}
            for height, ((low, high), color) in rows.items():
                ax.barh(height, min(high, top) - low, left=low, height=0.16, color=color)
            ax.plot([min(few.median, top)] * 2, [0.4, 0.95], color=figures.BLACK)
            beyond = len(few.samples) - len(samples)
            ax.set(yticks=[0, 0.5, 0.85], yticklabels=["runs", "quartiles", "interval"], ylim=(-0.4, 1.15))
            ax.set(xlabel=f"{few.name} ({few.unit})" + f"; {beyond} more to the right" * bool(beyond))
            ax.set_xlim(0.95 * seen.min(), 1.02 * top)

        return update

    level, count = widgets.menu("level", list(known), "network"), widgets.slider("runs", [4, 8, 16, 40], 40)
    widgets.explore(make, alt=lambda level, count: f"{part(level, count)}.", height=2.5, level=level, count=count)


def beside(claimed: Mapping[str, float], hidden: Mapping[str, np.ndarray], labels: tuple[str, str]) -> None:
    """What is claimed, as bars, beside all samples of what it hides, with the median's interval."""
    figure, (left, right) = figures.new(2, height=2.7)
    _bars(left, claimed, [figures.GREY] * (len(claimed) - 1) + [figures.BLUE])
    left.set(title="the report", ylabel=labels[0], ylim=(0, 1.2 * max(claimed.values())))
    medians = {name: honest.bootstrap(samples) for name, samples in hidden.items()}
    for place, (name, samples) in enumerate(hidden.items()):
        _strip(right, place, samples, figures.BLUE if place == len(hidden) - 1 else figures.GREY)
        _whiskers(right, place + 0.3, medians[name])
    right.set(title="what it hides; black: median", ylabel=labels[1], xlim=(-0.5, len(hidden) - 0.4))
    right.set_xticks(range(len(hidden)), [name.replace(", ", ",\n") for name in hidden])
    right.grid(axis="x", visible=False)
    said = "; ".join(f"{name} {value:.3g}" for name, value in claimed.items())
    truth = "; ".join(f"{name} {found}" for name, found in medians.items())
    figures.show(figure, f"The report, {labels[0]}: {said}. What it hides, {labels[1]}: {truth}.")


def waiting(estimates: Mapping[str, honest.Survival], stopped: np.ndarray, end: float) -> None:
    """The share of runs that have not arrived, by several estimates, and when runs were stopped."""
    figure, ax = figures.new(height=2.7)
    for (name, found), color in zip(estimates.items(), (figures.BLACK, figures.BLUE, figures.RED), strict=False):
        shares = 100 * np.append(1, found.waiting)
        (line,) = ax.step([0, *found.times, end], [*shares, shares[-1]], where="post", color=color)
        figures.name(ax, line, name, {"all runs": -7, "Kaplan–Meier": 7}.get(name, 0))
    ax.plot(stopped, np.full(len(stopped), 104), "v", color=figures.GREY, markersize=5)
    ax.text(0.5, 107, "▾ a run was stopped", color=figures.GREY, va="bottom", fontsize=9)
    ax.axhline(50, color=figures.GREY, linestyle=":")
    ax.set(xlabel="thousand examples", ylabel="runs that still wait (%)", ylim=(-3, 118), xlim=(0, end))
    said = ", ".join(f"{name} {found.median:.0f}" for name, found in estimates.items())
    figures.show(figure, f"Median time to the target in thousand examples: {said}.")


def records(rows: Sequence[Mapping[str, Any]]) -> None:
    """Explore the records of ImageNet over the number of processors, with a fitted line and ideal scaling."""

    def chosen(which: str) -> tuple[list[Mapping], np.ndarray]:
        inside = [row for row in rows if which in ("all", row["model"])]
        return inside, np.array([(row["processors"], row["time_hours"]) for row in inside]).T

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)

        def update(which: str) -> None:
            ax.clear()
            inside, (x, y) = chosen(which)
            middle, level = np.exp(np.log([x, y]).mean(1))
            for row, at, height in zip(inside, x, y, strict=True):
                ax.plot(at, height, "o", color=figures.BLUE if row["model"] == "ResNet-50" else figures.ORANGE)
                box = {"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 0}
                side = {"ha": "right" if at > middle else "left", "fontsize": 8, "textcoords": "offset points"}
                ax.annotate(row["group"].split(" (")[0].replace("UC ", ""), (at, height), (0, 5), bbox=box, **side)
            ends = np.array([x.min(), x.max()])
            for name, power, style in (("fit", honest.slope(x, y).mean, "k-"), ("ideal scaling", -1, "g--")):
                (line,) = ax.plot(ends, level * (ends / middle) ** power, style, linewidth=1)
                figures.name(ax, line, name)
            ax.set(yscale="log", xscale="log", xlabel="processors", ylabel="hours")
            if which == "all":
                ax.set_title("blue: ResNet-50, orange: other networks", fontsize=9)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axis.set_major_formatter("{x:g}")
            ax.minorticks_off()
            ax.margins(x=0.2, y=0.15)

        return update

    def caption(which: str) -> str:
        inside, (x, y) = chosen(which)
        slopes = f"the fitted line has the slope {honest.slope(x, y)}, ideal scaling -1".replace("-", "−")
        return f"Hours of {len(inside)} records ({which}): {slopes}."

    which = widgets.menu("networks", ["all", "ResNet-50"], "ResNet-50")
    widgets.explore(make, alt=caption, height=3.4, which=which)
