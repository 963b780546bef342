"""Figures and explorers of 07_recomputation and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dlscale.page import figures, widgets
from dlscale.page.curves import curves
from dlscale.recomputation import Chain, Plan, Step

STORED, FORWARD, AGAIN, BACKWARD = "#C9D6E2", figures.BLUE, figures.ORANGE, figures.RED
Numbers = Sequence[float] | np.ndarray


def memory(
    stored: Callable[[str, int, int], tuple[float, float]], measured: Mapping[tuple[str, int, int], float]
) -> None:
    """Explore megabytes against the batch size: weights, activations, and what the compiler needs (green)."""
    nets, batches, depths = (list(dict.fromkeys(column)) for column in zip(*measured, strict=True))
    sizes = [2**i for i in range(10)]
    styles = {"activations": (figures.ORANGE, "-"), "weights and their gradients": (figures.BLUE, "-")}
    styles["dots: whole compiled program"] = (figures.GREEN, "o")

    def compute(net: str, depth: int) -> dict[str, Any]:
        W, D = np.array([stored(net, batch, depth) for batch in sizes]).T / 1e6
        dots = [measured[net, batch, depth] / 1e6 for batch in batches]
        return dict(zip(styles, ((sizes, D), (sizes, 2 * W), (batches, dots)), strict=True))

    def caption(net: str, depth: int) -> str:
        activations, needed = stored(net, 256, depth)[1] / 1e6, measured[net, 256, depth] / 1e6
        return f"{net}, depth {depth}, 256 images: activations take {activations:.3g} MB of {needed:.3g} MB."

    axis = {"xscale": "log", "yscale": "log", "xlim": (0.9, 600), "ylim": (0.003, 1000), "xticks": sizes[::2]}
    axis |= {"xlabel": "batch size", "ylabel": "memory (MB)"}
    depth = widgets.slider("depth", depths, depths[-1])
    curves(styles, compute, caption, axis, net=widgets.menu("network", nets, nets[-1]), depth=depth)


def _painted(ax: Axes, steps: Sequence[Step], done: int) -> None:
    """Draw what happens to each activation in each of the first `done` steps."""
    count, length = len(steps), max(step.layer for step in steps) + 1
    image, ran = np.ones((length + 1, count, 3)), set()
    image[0] = to_rgb(STORED)
    for t, step in enumerate(steps[:done]):
        for what, i in step.held:  # "saved" names a layer, "output" the row itself
            image[i + (what == "saved"), t] = to_rgb(STORED)
        again = AGAIN if step.layer in ran else FORWARD
        image[step.layer + 1, t] = to_rgb(BACKWARD if step.operation == "backward" else again)
        ran.add(step.layer)
    extent = (0.5, count + 0.5, -0.5, length + 0.5)
    ax.imshow(image, origin="lower", aspect="auto", interpolation="nearest", extent=extent)
    names = {"stored": figures.GREY, "forward": FORWARD, "again": AGAIN, "backward": BACKWARD}
    for i, (text, color) in enumerate(names.items()):
        ax.text(0.25 * i, 1.03, text, color=color, transform=ax.transAxes, weight="bold", fontsize=9)
    ax.set(ylabel="activation")
    ax.grid(visible=False)


def schedule(chain: Chain, plans: Mapping[str, Plan], first: str) -> None:
    """Explore plans step by step: what happens to each activation, and how many arrays are in memory."""
    steps = {name: plan.steps(chain) for name, plan in plans.items()}

    def played(plan: str, done: int) -> list[Step]:  # plans differ in length, and each has the whole slider
        return steps[plan][: max(1, done * len(steps[plan]) // 100)]

    def make(fig: Figure) -> widgets.Update:
        top, below = (figures.axes(part) for part in fig.subfigures(2, 1, height_ratios=[3, 2]))
        (line,) = below.step([], [], where="mid", color=figures.BLACK)
        peak = below.axhline(0, color=figures.GREY, linestyle="--", linewidth=1)
        below.set(xlabel="step", ylabel="arrays in memory", ylim=(0, len(chain.layers) + 4))

        def update(plan: str, done: int) -> None:
            arrays = [step.bytes for step in played(plan, done)]
            top.clear()
            _painted(top, steps[plan], len(arrays))
            line.set_data(range(1, len(arrays) + 1), arrays)
            peak.set_ydata([max(arrays)] * 2)
            below.set_xlim(0.5, len(steps[plan]) + 0.5)

        return update

    def caption(plan: str, done: int) -> str:
        past = played(plan, done)
        runs, most = sum(step.operation != "backward" for step in past), max(step.bytes for step in past)
        again = runs - len({step.layer for step in past})
        return f"{plan}, {len(past)} steps: at most {most:g} arrays in memory, {again} layers computed again."

    done = widgets.player("done (%)", range(1, 101), 100, interval=150)
    widgets.explore(make, alt=caption, height=4.2, plan=widgets.menu("plan", [*plans], first), done=done)


def groups(peaks: Mapping[int, Numbers]) -> None:
    """Explore the memory of groups of k layers: the two parts of n / k + k, and the peak of the plan (green)."""
    styles = {"n / k + k": (figures.BLACK, "-"), "n / k snapshots": (figures.SKY, "-")}
    styles |= {"k layers in a group": (figures.ORANGE, "-"), "the plan's peak": (figures.GREEN, ".")}
    styles["your k"] = (figures.RED, "o")

    def compute(n: int, k: int) -> dict[str, Any]:
        ks = np.arange(1, 31)
        parts = (ks, n / ks + ks), (ks, n / ks), (ks, ks), (ks[: len(peaks[n])], peaks[n][:30]), ([k], [n / k + k])
        return dict(zip(styles, parts, strict=True))

    def caption(n: int, k: int) -> str:
        return f"{n} layers in groups of {k}: n / k + k = {n / k + k:.3g} arrays. The lowest peak is {min(peaks[n]):g}."

    axis = {"xlim": (0, 31), "ylim": (0, 60), "xlabel": "k, layers in a group", "ylabel": "arrays in memory"}
    n, k = widgets.slider("layers n", [*peaks], 64), widgets.slider("group k", [*range(1, 31)], 8)
    curves(styles, compute, caption, axis, (0.98, 0.97), n=n, k=k)


def budget(again: Mapping[str, Mapping[int, float]]) -> None:
    """What the best schedule of each kind computes again, by the arrays in memory."""
    figure, ax = figures.new(height=3.0)
    for place, ((name, best), color) in enumerate(zip(again.items(), (figures.GREEN, figures.PINK), strict=True)):
        ax.plot([*best], [*best.values()], "o-", color=color)
        ax.text(0.97, 0.95 - 0.1 * place, name, color=color, ha="right", va="top", transform=ax.transAxes)
    ax.set(xlabel="arrays in memory", ylabel="layers computed again", ylim=(0, None))
    said = (f"{name} {', '.join(f'{n:g}' for n in best.values())}" for name, best in again.items())
    figures.show(figure, f"Layers computed again with {min(best)} to {max(best)} arrays: {'; '.join(said)}.")


def rows(
    names: Sequence[str], bars: Mapping[float, tuple[Numbers, Numbers]], label: str, quantities: tuple[str, str],
    first: float, alt: Callable[[float], str],
) -> None:  # fmt: skip
    """Explore two quantities of each row, which follow a slider over the keys of `bars`."""

    def paint(*panels: Axes, setting: float) -> None:
        for i, (ax, color) in enumerate(zip(panels, (figures.ORANGE, figures.BLUE), strict=True)):
            ax.barh(range(len(names)), bars[setting][i], color=color)
            ax.set(xlabel=quantities[i], xlim=(0, 1.05 * max(max(pair[i]) for pair in bars.values())))
            ax.grid(visible=False, axis="y")
            ax.set_yticks(range(len(names)), [*names] if not i else [], fontsize=9)
            ax.invert_yaxis()
        panels[0].set_title(f"{label}: {setting:g}")

    setting = widgets.slider(label, [*bars], first)
    widgets.explore_axes(paint, alt=alt, columns=2, height=1.2 + 0.2 * len(names), setting=setting)
