"""Figures and explorers of 14_honest_benchmarks and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from dlscale import honest_benchmarks as honest
from dlscale.lab import intervals
from dlscale.page import figures, widgets
from dlscale.page.curves import Line, curves


def _strip(ax: Axes, place: float, samples: np.ndarray, color: str) -> None:
    """All samples, spread a little to the sides."""
    ax.plot(place + np.linspace(-0.15, 0.15, len(samples)), samples, "o", color=color, markersize=4, alpha=0.6)


def _whiskers(ax: Axes, place: float, found: intervals.Interval) -> None:
    low, high = found.mean - found.low, found.high - found.mean
    ax.errorbar(place, found.mean, [[low], [high]], color=figures.BLACK, marker="o", markersize=5, capsize=4)


def _bars(ax: Axes, values: Mapping[str, float], colors: Sequence[str]) -> None:
    ax.bar(list(values), list(values.values()), color=colors, width=0.6)
    for place, value in enumerate(values.values()):
        ax.text(place, value, f"{value:.1f}", ha="center", va="bottom", fontweight="bold")
    ax.grid(axis="x", visible=False)


# Section 1


def same_runs(theirs: np.ndarray, ours: np.ndarray) -> None:
    """Explore a report on equal runs: ours is the best of some, and the axis begins where you like."""
    tries = [n for n in (1, 2, 5, 10, 20) if n <= len(ours)]
    best = {n: float(honest.expected_best(ours, n)) for n in tries}
    lowest, highest = min(theirs.min(), ours.min()), max(theirs.max(), ours.max())
    cut = float(np.floor(theirs.mean()) - 1)
    starts = [0.0, 20.0, 40.0, cut]

    def paint(left: Axes, right: Axes, apart: Axes, best_of: int, start: float) -> None:
        _bars(left, {"theirs": theirs.mean(), "ours": best[best_of]}, [figures.GREY, figures.BLUE])
        top = highest + 0.5 if start else 1.15 * highest
        left.set(ylim=(start, top), ylabel="test accuracy (%)", title="the report")
        for place, (runs, color) in enumerate(((theirs, figures.GREY), (ours, figures.BLUE))):
            _strip(right, place, runs, color)
            _whiskers(right, place + 0.3, intervals.interval(runs))
        right.set(xticks=[0, 1], xticklabels=["theirs", "ours"], xlim=(-0.5, 1.6), ylim=(lowest - 2, highest + 1))
        right.set(title="all runs, mean and 95 %", ylabel="test accuracy (%)")
        _whiskers(apart, 0, intervals.interval(ours - theirs))
        apart.axhline(0, color=figures.RED)
        apart.set(xticks=[], xlim=(-1, 1), ylim=(-4, 4), title="ours − theirs", ylabel="points")
        right.grid(axis="x", visible=False)

    def caption(best_of: int, start: float) -> str:
        gain = best[best_of] - theirs.mean()
        times = theirs.mean() / (theirs.mean() - start)  # Tufte's lie factor
        mean, low, high = intervals.interval(ours - theirs)
        return (
            f"Best of {best_of}, axis from {start:g} %: the report claims {gain:+.1f} points, which look {times:.0f} "
            f"times as large. Ours minus theirs is {mean:.1f} [{low:.1f}, {high:.1f}] points."
        ).replace("-", "−")

    widgets.explore_axes(
        paint, alt=caption, columns=3, height=3.1, best_of=widgets.slider("ours is the best of", tries, tries[-1]),
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
    thousands = examples / 1e3
    styles = {"test set": (figures.BLUE, "."), "mean of 17 looks": (figures.BLACK, "-"), "target": (figures.GREY, ":")}
    styles["first crossing, and the same network on fresh examples"] = figures.RED, "o-"
    axis = {"xlabel": "thousand examples seen in training", "ylabel": "accuracy (%)"}

    def found(run: int, every: int, target: float) -> int | None:
        seen = np.arange(every - 1, len(examples), every)
        at = honest.first_crossing(seen, test[run, seen], target)
        return int(at) if np.isfinite(at) else None

    def compute(run: int, every: int, target: float) -> dict[str, Line]:
        at, smooth = found(run, every, target), np.convolve(test[run], np.ones(17) / 17, "valid")
        looks = thousands[every - 1 :: every], test[run, every - 1 :: every]
        pair = ([], []) if at is None else ([thousands[at]] * 2, [test[run, at], fresh[run, at]])
        line = [0, thousands[-1]], [target] * 2
        return dict(zip(styles, (looks, (thousands[8:-8], smooth), line, pair), strict=True))

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
    curves(
        styles, compute, caption, axis | {"xlim": (0, thousands[-1]), "ylim": (40, 60)}, corner=(0.98, 0.3),
        run=widgets.slider("run", list(range(len(test))), int(np.argmax(gaps))),
        every=widgets.slider("look at every n-th point", [16, 8, 4, 2, 1], 1),
        target=widgets.slider("target (%)", [target - 4, target - 2, target, target + 1, target + 2], target),
    )  # fmt: skip


# Section 4


def systems(seconds: Mapping[str, np.ndarray], found: Mapping[str, np.ndarray], work: float) -> None:
    """Explore the times of two systems to a target; `found` are accuracies (runs, looks), `work` the ratio of rates."""
    one, many = found
    styles = {one: (figures.BLACK, "-"), many: (figures.BLUE, "-"), "target": (figures.GREY, ":")}
    styles["median times to the target"] = figures.RED, "o"
    axis = {"xscale": "log", "xlabel": "milliseconds of training", "ylabel": "test accuracy (%)", "ylim": (10, 60)}
    axis |= {"xlim": (1, 3000), "xticks": (1, 10, 100, 1000)}
    means = {name: (1e3 * seconds[name], runs.mean(0)) for name, runs in found.items()}

    def times(target: float) -> list[np.ndarray]:
        return [1e3 * honest.first_crossing(seconds[name], runs, target, in_a_row=3) for name, runs in found.items()]

    def compute(target: float) -> dict[str, Line]:
        medians = [min(honest.median(own), 1e9) for own in times(target)]  # far to the right if never
        return means | dict(zip([*styles][2:], (([1, 3000], [target] * 2), (medians, [target] * 2)), strict=True))

    def caption(target: float) -> str:
        alone, together = times(target)
        return (
            f"{many}: {work:.0f} times the examples per second of {one}. Median times to {target:g} %: "
            f"{honest.median(together):.0f} and {honest.median(alone):.0f} ms; median of {len(alone)} speed-ups: "
            f"{honest.ratio(alone, together).mean:.1f}."
        )

    targets = widgets.slider("target (%)", [40.0, 44.0, 46.0, 48.0, 50.0], 50.0)
    curves(styles, compute, caption, axis, corner=(0.02, 0.72), target=targets)


# The further notebook


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


def waiting(times: np.ndarray, ways: Mapping[str, Callable[[int], np.ndarray]], end: float) -> None:
    """Explore the share of runs that still wait, of those that arrive at `times` (runs,) and are watched until `end`.

    `ways[who](seed)` says when each run is stopped; three estimates: with all runs, and from those that were stopped.
    """
    styles = {"all runs": (figures.BLACK, "-"), "Kaplan–Meier": (figures.BLUE, "-"), "left out": (figures.RED, "-")}
    axis = {"xlabel": "thousand examples", "ylabel": "runs that still wait (%)", "ylim": (-3, 103), "xlim": (0, end)}

    def estimates(who: str, seed: int) -> list[honest.Survival]:
        stopped = ways[who](seed)
        watched, arrived = np.minimum(times, stopped), times <= stopped
        everybody = np.minimum(times, end + 1), np.isfinite(times)
        left = watched[arrived], arrived[arrived]
        return [honest.survival(*known) for known in (everybody, (watched, arrived), left)]

    def compute(who: str, seed: int) -> dict[str, Line]:
        return {
            name: (np.repeat([0, *one.times, end], 2)[1:-1], 100 * np.repeat([1, *one.waiting], 2))
            for name, one in zip(styles, estimates(who, seed), strict=True)
        }

    def caption(who: str, seed: int) -> str:
        said = ", ".join(f"{name} {one.median:.0f}" for name, one in zip(styles, estimates(who, seed), strict=True))
        return f"Runs are stopped by {who}. Median thousands of examples: {said}."

    stops = widgets.menu("who stops runs", list(ways), [*ways][1])
    curves(styles, compute, caption, axis, corner=(0.98, 0.97), who=stops, seed=widgets.slider("seed", range(8), 1))


def records(rows: Sequence[Mapping[str, Any]]) -> None:
    """Explore the records of ImageNet over the number of processors, with a fitted line and ideal scaling."""

    def chosen(which: str) -> tuple[list[Mapping], np.ndarray]:
        inside = [row for row in rows if which in ("all", row["model"])]
        return inside, np.array([(row["processors"], row["time_hours"]) for row in inside]).T

    def paint(ax: Axes, which: str) -> None:
        inside, (x, y) = chosen(which)
        middle, level = np.exp(np.log([x, y]).mean(1))
        for row, at, height in zip(inside, x, y, strict=True):
            color = figures.BLUE if row["model"] == "ResNet-50" else figures.ORANGE
            ax.plot(at, height, "o", color=color)
            group = row["group"].split(" (")[0].replace("UC ", "")
            side, ha = ((5, 3), "left") if at * height > middle * level else ((-5, -9), "right")  # away from the line
            ax.annotate(group, (at, height), side, textcoords="offset points", ha=ha, fontsize=8)
        ends = np.array([x.min(), x.max()])
        for name, power, style in (("fit", honest.slope(x, y).mean, "k-"), ("ideal scaling", -1, "g--")):
            (line,) = ax.plot(ends, level * (ends / middle) ** power, style, linewidth=1)
            figures.name(ax, line, name)
        ax.set(yscale="log", xscale="log", xlabel="processors", ylabel="hours")
        ax.set_title("blue: ResNet-50, orange: other networks", fontsize=9)
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.margins(x=0.2, y=0.15)

    def caption(which: str) -> str:
        inside, (x, y) = chosen(which)
        slopes = f"the fitted line has the slope {honest.slope(x, y)}, ideal scaling -1".replace("-", "−")
        return f"Hours of {len(inside)} records ({which}): {slopes}."

    widgets.explore_axes(paint, alt=caption, which=widgets.menu("networks", ["all", "ResNet-50"], "ResNet-50"))
