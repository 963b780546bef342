"""The pictures of 16_imagenet_in_four_minutes and its further notebook: whatever they show, they get as arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from dlscale.imagenet_in_four_minutes import PUBLISHED, RINGS, Prediction
from dlscale.lab.intervals import interval
from dlscale.page import figures, widgets

NAMES = {"lars": "LARS", "no_decay": "no decay", "extra_norm": "extra batch norm", "half": "float16"}
OFF_ON = ("off", "on")


def spoken(parts: frozenset[str]) -> str:
    """The parts that are on, in words."""
    return " + ".join(name for part, name in NAMES.items() if part in parts) or "no part"


def _switched(chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value == "on" if value in OFF_ON else value for name, value in chosen.items()}


# Section 1


def without(minutes: Mapping[str, float], points: Mapping[str, float], base: float) -> None:
    """Two rows of bars: by how much a run of `base` minutes is longer, and a network less accurate, without a part."""
    (fig, axes), said = figures.new(2, height=2.1), []
    labels = (f"minutes longer without it (all on: {base:.1f})", "accuracy points lost without it")
    for ax, found, label, color in zip(axes, (minutes, points), labels, (figures.BLUE, figures.ORANGE), strict=True):
        texts = [f"{value:.1f}".replace("-", "−") for value in found.values()]
        ax.bar_label(ax.barh([*found], [*found.values()], 0.6, color=color), texts, padding=3)
        ax.set(xlabel=label, ylim=(len(found) - 0.5, -0.5), xmargin=0.3)
        ax.grid(visible=False, axis="y")
        said.append(f"{label}: " + ", ".join(map(" ".join, zip(found, texts, strict=True))))
    figures.show(fig, "; ".join(said) + ".")


def switchboard(
    losses: Callable[..., np.ndarray], sent: Callable[..., tuple[int, int]], travel: Sequence[Sequence[str]]
) -> None:
    """Explore six switches: the training loss, and what travels in a step; `travel` are fusions and all-reduces."""
    before = losses(**dict.fromkeys(NAMES, False))

    def paint(ax: Axes, **chosen: str) -> None:
        (line,) = ax.plot(before, color=figures.GREY, linewidth=1)
        figures.name(ax, line, "all off", 6)
        (line,) = ax.plot(losses(**_switched(chosen)), color=figures.RED)
        figures.name(ax, line, "your parts", -6)
        ax.set(xlabel="step", ylabel="loss of the eight workers", ylim=(0, 3), xlim=(0, len(before) + 6))
        ax.set_title("sent in a step: {:,} messages, {:,} bytes".format(*sent(**_switched(chosen))))

    def caption(**chosen: str) -> str:
        (messages, size), last = sent(**_switched(chosen)), losses(**_switched(chosen))[-10:].mean()
        on = [NAMES[name] for name in NAMES if chosen[name] == "on"]
        return (
            f"On: {', '.join(on) or 'nothing'}; fusion {chosen['fusion']}, all-reduce {chosen['all_reduce']}. "
            f"Mean loss of the last ten steps {last:.2f}; {messages:,} messages and {size:,} bytes a step."
        )

    controls = {n: widgets.menu(NAMES[n], OFF_ON, "on" if n in ("lars", "extra_norm") else "off") for n in NAMES}
    controls["fusion"] = widgets.menu("fusion", travel[0], travel[0][1])
    controls["all_reduce"] = widgets.menu("all-reduce", travel[1])
    widgets.explore_axes(paint, alt=caption, height=3.2, **controls)


def norms(exponents: Sequence[int], ratios: np.ndarray) -> None:
    """The norm in float16 over the right one, for gradients of these sizes (powers of two)."""
    fig, ax = figures.new(height=2.6)
    ax.plot(exponents, np.minimum(ratios, 2.0), "o-", color=figures.BLUE, markersize=4)
    ax.axhline(1, color=figures.GREY, linestyle=":", linewidth=1)
    ax.set_yticks((0, 0.5, 1, 2), ("zero", "0.5", "1", "infinite"))
    ax.set(xlabel="size of the gradient's entries (power of two)", ylabel="norm in float16 / norm", ylim=(-0.1, 2.2))
    good = [e for e, ratio in zip(exponents, ratios, strict=True) if abs(ratio - 1) < 0.05]
    said = f"right to 5 % from 2 to the power {good[0]} to {good[-1]}; too short below, infinite above"
    figures.show(fig, f"The norm of a gradient computed in float16: {said}.".replace("-", "−"))


# Section 2


def systems(worth: Mapping[frozenset[str], np.ndarray], small: np.ndarray) -> None:
    """Explore which parts are on: accuracies (seeds,) of all systems, and those at the small batch."""
    order = sorted(worth, key=lambda parts: worth[parts].mean())

    def chosen_parts(chosen: Mapping[str, str]) -> frozenset[str]:
        return frozenset(name for name, value in chosen.items() if value == "on")

    def paint(ax: Axes, **chosen: str) -> None:
        for place, parts in enumerate(order):
            mean, _, high = interval(worth[parts])
            color, width = (figures.RED, 6) if parts == chosen_parts(chosen) else ("#b0b0b0", 3)
            ax.errorbar(mean, place, xerr=high - mean, fmt="o", color=color, elinewidth=width, markersize=width + 2)
        ax.axvline(small.mean(), color=figures.BLUE, linewidth=1.5)
        ax.text(small.mean() - 0.4, 0, "batch 50,\nno part", color=figures.BLUE, ha="right", va="center")
        ax.set_yticks(range(len(order)), [spoken(parts) for parts in order])
        ax.set(xlabel="test accuracy at batch 1,000 (%), 95 % interval", ylim=(-0.6, len(order) - 0.4))
        ax.grid(visible=False, axis="y")

    def caption(**chosen: str) -> str:
        parts = chosen_parts(chosen)
        gain = f"{(worth[parts] - worth[frozenset()]).mean():+.1f}".replace("-", "−")
        return f"On: {spoken(parts)}. Test accuracy {worth[parts].mean():.1f} %, {gain} points against no part."

    controls = {name: widgets.menu(NAMES[name], OFF_ON, "on" if name == "lars" else "off") for name in [*NAMES][:3]}
    widgets.explore_axes(paint, alt=caption, height=3.2, **controls)


# Section 4


def timeline(predicted: Callable[..., Prediction], network: str = "ResNet-50", fusion: str = "off") -> None:
    """Explore the timeline of a step: what is computed and sent when, as the parts are switched."""

    def paint(ax: Axes, **chosen: Any) -> None:
        now = predicted(**_switched(chosen))
        _, begin, end = np.transpose(now.messages)
        forward, backward = np.split(np.append(now.forward, now.backward), 2)
        rows = [(begin, end), (np.append(forward[-1], backward[:-1]), backward), (np.append(0, forward[:-1]), forward)]
        for place, ((a, b), color) in enumerate(zip(rows, (figures.ORANGE, figures.BLUE, figures.SKY), strict=True)):
            ax.barh([place] * len(a), 1e3 * (b - a), 0.6, 1e3 * a, color=color, edgecolor="white", linewidth=0.3)
        ax.axvline(1e3 * backward[-1], color=figures.GREY, linestyle=":", linewidth=1)
        ax.text(1e3 * backward[-1], 2.45, " last gradient", color=figures.GREY, va="top")
        ax.set_yticks((0, 1, 2), ("messages", "backward", "forward"))
        paper = PUBLISHED.get((chosen["network"], chosen["gpus"]))
        beside = f"; published, all parts on: {paper:.1f}" if paper else ""
        ax.set_title(f"{chosen['network']}, {chosen['gpus']:,} GPUs: {now.minutes:.1f} minutes{beside}", loc="left")
        ax.set(xlabel="time in a step (ms)", xlim=(0, 1020 * now.step), ylim=(-0.5, 2.5))
        ax.grid(visible=False, axis="y")

    def caption(**chosen: Any) -> str:
        now = predicted(**_switched(chosen))
        exposed = 1e3 * (now.step - now.backward[-1])
        return (
            f"{chosen['network']} on {chosen['gpus']:,} GPUs: a step takes {1e3 * now.step:.0f} ms, {exposed:.0f} of "
            f"them after the last gradient; messages: {len(now.messages)}; {now.minutes:.1f} minutes."
        )

    controls = {"network": widgets.menu("network", ("ResNet-50", "AlexNet"), network)}
    controls |= {"gpus": widgets.slider("GPUs", (64, 256, 1024, 2048), 2048, "{:,}")}
    controls |= {"half": widgets.menu("float16", OFF_ON, "on"), "ring": widgets.menu("ring", RINGS, RINGS[1])}
    controls |= {"fusion": widgets.menu("fusion", OFF_ON, fusion), "overlap": widgets.menu("overlap", OFF_ON, "on")}
    controls["algorithm"] = widgets.menu("all-reduce", ("ring", "hierarchical", "hybrid"))
    widgets.explore_axes(paint, alt=caption, height=3.0, **controls)


# Further


def sensitivity(moved: Callable[[str], tuple[dict[str, Sequence[float]], float, float]], runs: Sequence[str]) -> None:
    """Explore constants: `moved(run)` gives minutes with each halved and doubled, as they are, and published."""

    def paint(ax: Axes, run: str) -> None:
        found, usual, paper = moved(run)
        for values, color in zip(np.transpose([*found.values()]), (figures.ORANGE, figures.BLUE), strict=True):
            ax.barh([*found], values - usual, 0.6, usual, color=color)
        ax.axvline(usual, color=figures.BLACK, linewidth=1)
        ax.axvline(paper, color=figures.RED, linewidth=1.5, linestyle=":")
        ax.text(paper, len(found) - 0.45, " published", color=figures.RED, va="bottom")
        ax.set(xlabel="predicted minutes", ylim=(len(found) - 0.4, -0.6), xlim=(0, None))
        ax.set_title(f"{run}: each constant halved (orange) or doubled (blue)", fontsize=10, loc="left")
        ax.grid(visible=False, axis="y")

    def caption(run: str) -> str:
        found, usual, paper = moved(run)
        most = max(found, key=lambda name: np.ptp(found[name]))
        changed = "{:.1f} minutes if halved, {:.1f} if doubled".format(*found[most])
        return f"{run}: predicted {usual:.1f} minutes, published {paper:.1f}. The {most} counts most: {changed}."

    widgets.explore_axes(paint, alt=caption, height=3.0, run=widgets.menu("run", runs, runs[1]))
