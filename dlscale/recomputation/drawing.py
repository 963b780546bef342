"""Figures and explorers of 07_recomputation and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dlscale.page import figures, widgets
from dlscale.page.curves import curves
from dlscale.recomputation import Chain, Plan, Step, optimal_plan

STORED, FORWARD, AGAIN, BACKWARD = "#C9D6E2", figures.BLUE, figures.ORANGE, figures.RED
Numbers = Sequence[float] | np.ndarray


def memory(
    stored: Callable[[str, int, int], tuple[float, float]], measured: Mapping[tuple[str, int, int], float]
) -> None:
    """Explore megabytes against the batch size: weights, activations, and what the compiler needs (green)."""
    nets, batches, depths = (list(dict.fromkeys(column)) for column in zip(*measured, strict=True))
    sizes = [2**i for i in range(10)]
    styles = {"activations": (figures.ORANGE, "-"), "weights and their gradients": (figures.BLUE, "-")}
    styles["dots: compiled program, in all"] = (figures.GREEN, "o")

    def compute(net: str, depth: int) -> dict[str, Any]:
        W, D = np.array([stored(net, batch, depth) for batch in sizes]).T / 1e6
        dots = [measured[net, batch, depth] / 1e6 for batch in batches]
        return dict(zip(styles, ((sizes, D), (sizes, 2 * W), (batches, dots)), strict=True))

    def caption(net: str, depth: int) -> str:
        W, D = np.array(stored(net, 256, depth)) / 1e6
        return (
            f"{net}, depth {depth}, batch size 256: weights and their gradients take {2 * W:.2g} MB, activations "
            f"{D:.3g} MB. The compiled program needs {measured[net, 256, depth] / 1e6:.3g} MB in all."
        )

    axis = {"xscale": "log", "yscale": "log", "xlim": (0.9, 600), "ylim": (0.003, 1000), "xticks": sizes[::2]}
    axis |= {"xlabel": "batch size", "ylabel": "memory (MB)"}
    depth = widgets.slider("depth", depths, depths[-1])
    curves(styles, compute, caption, axis, net=widgets.menu("network", nets, nets[-1]), depth=depth)


def _painted(steps: Sequence[Step], length: int, until: int) -> np.ndarray:
    """(length + 1, steps, 3) colours: what happens to each activation in each of the first `until` steps."""
    image, ran = np.ones((length + 1, len(steps), 3)), set()
    image[0] = to_rgb(STORED)
    for t, step in enumerate(steps[:until]):
        for what, i in step.held:  # "saved" names a layer, "output" the row itself
            image[i + (what == "saved"), t] = to_rgb(STORED)
        again = AGAIN if step.layer in ran else FORWARD
        image[step.layer + 1, t] = to_rgb(BACKWARD if step.operation == "backward" else again)
        ran.add(step.layer)
    return image


def schedule(chain: Chain, plans: Mapping[str, Plan], first: str) -> None:
    """Explore plans step by step: what happens to each activation, and how many arrays are in memory."""
    steps, length = {name: plan.steps(chain) for name, plan in plans.items()}, len(chain.layers)

    def until(plan: str, done: int) -> int:  # plans differ in length, and each has the whole slider
        return max(1, done * len(steps[plan]) // 100)

    def make(fig: Figure) -> widgets.Update:
        top, below = (figures.axes(part) for part in fig.subfigures(2, 1, height_ratios=[3, 2]))
        image = top.imshow(np.ones((1, 1, 3)), origin="lower", aspect="auto", interpolation="nearest")
        names = {"stored": figures.GREY, "forward": FORWARD, "again": AGAIN, "backward": BACKWARD}
        for x, (text, color) in enumerate(names.items()):
            top.text(0.15 * x, 1.03, text, color=color, transform=top.transAxes, weight="bold")
        (line,) = below.step([], [], where="mid", color=figures.BLACK)
        (peak,) = below.plot([], [], "--", color=figures.GREY, linewidth=1)
        top.set(ylabel="activation")
        top.grid(visible=False)
        below.set(xlabel="step", ylabel="arrays in memory", ylim=(0, length + 4))

        def update(plan: str, done: int) -> None:
            count, arrays = len(steps[plan]), [s.bytes for s in steps[plan][: until(plan, done)]]
            image.set(data=_painted(steps[plan], length, len(arrays)), extent=(0.5, count + 0.5, -0.5, length + 0.5))
            line.set_data(range(1, len(arrays) + 1), arrays)
            peak.set_data([0.5, count + 0.5], [max(arrays)] * 2)
            below.set_xlim(0.5, count + 0.5)

        return update

    def caption(plan: str, done: int) -> str:
        past = steps[plan][: until(plan, done)]
        way = "backward" if past[-1].operation == "backward" else "forward"
        again = sum(s.operation != "backward" for s in past) - len({s.layer for s in past})
        return (
            f"{plan}, step {len(past)} of {len(steps[plan])}: layer {past[-1].layer} {way}. {past[-1].bytes:g} arrays "
            f"in memory, at most {max(s.bytes for s in past):g} so far; {again} layers computed again."
        )

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
        peak = f"the plan needs {peaks[n][k - 1]:g} at its peak" if k <= len(peaks[n]) else "too long for this chain"
        return (
            f"{n} layers in groups of {k}: n / k + k = {n / k + k:.3g} arrays; {peak}. The lowest is {min(peaks[n]):g}."
        )

    axis = {"xlim": (0, 31), "ylim": (0, 60), "xlabel": "k, layers in a group", "ylabel": "arrays in memory"}
    n, k = widgets.slider("layers n", [*peaks], 100), widgets.slider("group k", [*range(1, 31)], 10)
    curves(styles, compute, caption, axis, (0.98, 0.97), n=n, k=k)


def budget(chain: Chain, again: Mapping[str, Mapping[int, float]]) -> None:
    """Explore the best nested plan for a memory, beside what the best schedule of each kind computes again."""
    nested, *_ = again.values()
    steps = {m: optimal_plan(chain, m).steps(chain) for m in nested}

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        for (name, best), color, shift in zip(again.items(), (figures.GREEN, figures.PINK), (0.35, -0.95), strict=True):
            left.plot([*best], [*best.values()], "o-", color=color, markersize=4)
            left.text(5.6, best[5] * 10**shift, name, color=color)
        (here,) = left.plot([], [], "o", color=figures.RED, markersize=10)
        left.set(yscale="symlog", ylim=(-0.3, 120), yticks=(0, 1, 3, 10, 30, 100), yticklabels=(0, 1, 3, 10, 30, 100))
        left.set(xlabel="arrays in memory", ylabel="layers computed again")
        image = right.imshow(np.ones((1, 1, 3)), origin="lower", aspect="auto", interpolation="nearest")
        right.set(xlabel="step", ylabel="activation", title="the best nested plan")
        right.grid(visible=False)

        def update(memory: int) -> None:
            here.set_data([memory], [nested[memory]])
            shown, count, length = steps[memory], len(steps[memory]), len(chain.layers)
            image.set(data=_painted(shown, length, count), extent=(0.5, count + 0.5, -0.5, length + 0.5))

        return update

    def caption(memory: int) -> str:
        said = ", ".join(f"{name}: {best[memory]:g}" for name, best in again.items())
        return f"{memory} arrays. Layers computed again: {said}. The plan is {optimal_plan(chain, memory)}"

    widgets.explore(make, alt=caption, memory=widgets.slider("arrays", [*nested], 7))


def rows(
    names: Sequence[str], bars: Mapping[float, tuple[Numbers, Numbers]], label: str, quantities: tuple[str, str],
    first: float, alt: Callable[[float], str],
) -> None:  # fmt: skip
    """Explore two quantities of each row, which follow a slider over the keys of `bars`."""

    def make(fig: Figure) -> widgets.Update:
        panels = figures.axes(fig, 2, sharey=True)
        colors = figures.ORANGE, figures.BLUE
        drawn = [
            ax.barh(range(len(names)), [0] * len(names), color=color) for ax, color in zip(panels, colors, strict=True)
        ]
        for i, ax in enumerate(panels):
            ax.set(xlabel=quantities[i], xlim=(0, 1.05 * max(max(pair[i]) for pair in bars.values())))
            ax.grid(visible=False, axis="y")
        panels[0].set_yticks(range(len(names)), names, fontsize=9)
        panels[0].invert_yaxis()

        def update(setting: float) -> list[Artist]:
            for patches, values in zip(drawn, bars[setting], strict=True):
                for patch, value in zip(patches, values, strict=True):
                    patch.set_width(value)
            return [patch for patches in drawn for patch in patches]

        return update

    setting = widgets.slider(label, [*bars], first)
    widgets.explore(make, alt=alt, height=1.2 + 0.2 * len(names), setting=setting)
