"""Figures and explorers of 07_recomputation and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dlscale.page import figures, widgets
from dlscale.recomputation import Chain, Plan, Step, optimal_plan

STORED, FORWARD, AGAIN, BACKWARD = "#C9D6E2", figures.BLUE, figures.ORANGE, figures.RED
Numbers = Sequence[float] | np.ndarray


def memory(
    stored: Callable[[str, int, int], tuple[float, float]], measured: Mapping[tuple[str, int, int], float]
) -> None:
    """Explore megabytes against the batch size: weights, activations, and what the compiler needs (green)."""
    nets, batches, depths = (list(dict.fromkeys(column)) for column in zip(*measured, strict=True))
    sizes = 2.0 ** np.arange(10)

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        colors = {"weights and their gradients": figures.BLUE, "activations": figures.ORANGE}
        lines = [ax.plot([], [], color=color)[0] for color in colors.values()]
        labels = [ax.text(560, 1, name, color=color, va="center") for name, color in colors.items()]
        (dots,) = ax.plot([], [], "o", color=figures.GREEN)
        ax.text(0.02, 0.93, "dots: compiled program, in all", color=figures.GREEN, transform=ax.transAxes)
        ax.set(xscale="log", yscale="log", xlim=(0.9, 9000), ylim=(0.003, 400), ylabel="memory (MB)")
        ax.set(xlabel="batch size", xticks=sizes[::2], xticklabels=[f"{size:.0f}" for size in sizes[::2]])
        ax.minorticks_off()

        def update(net: str, depth: int) -> None:
            W, D = np.array([stored(net, batch, depth) for batch in sizes]).T / 1e6
            for line, label, values in zip(lines, labels, (2 * W, D), strict=True):
                line.set_data(sizes, values)
                label.set_y(values[-1])
            dots.set_data(batches, [measured[net, batch, depth] / 1e6 for batch in batches])

        return update

    def caption(net: str, depth: int) -> str:
        W, D = np.array(stored(net, 256, depth)) / 1e6
        return (
            f"{net}, depth {depth}, batch size 256: weights and their gradients take {2 * W:.2g} MB, activations "
            f"{D:.3g} MB. The compiled program needs {measured[net, 256, depth] / 1e6:.3g} MB in all."
        )

    depth = widgets.slider("depth", depths, depths[-1])
    widgets.explore(make, alt=caption, net=widgets.menu("network", nets, nets[-1]), depth=depth)


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


def _again(steps: Sequence[Step]) -> int:
    return sum(s.operation != "backward" for s in steps) - len({s.layer for s in steps})


def schedule(chain: Chain, plans: Mapping[str, Plan], first: str) -> None:
    """Explore plans step by step: what happens to each activation, and how many arrays are in memory."""
    steps, length = {name: plan.steps(chain) for name, plan in plans.items()}, len(chain.layers)

    def until(plan: str, step: int) -> int:
        return (step - 1) % len(steps[plan]) + 1  # after its last step a plan begins again

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

        def update(plan: str, step: int) -> None:
            end, count = until(plan, step), len(steps[plan])
            image.set(data=_painted(steps[plan], length, end), extent=(0.5, count + 0.5, -0.5, length + 0.5))
            arrays = [s.bytes for s in steps[plan][:end]]
            line.set_data(range(1, end + 1), arrays)
            peak.set_data([0.5, count + 0.5], [max(arrays)] * 2)
            below.set_xlim(0.5, count + 0.5)

        return update

    def caption(plan: str, step: int) -> str:
        done = steps[plan][: until(plan, step)]
        way = "backward" if done[-1].operation == "backward" else "forward"
        return (
            f"{plan}, step {len(done)} of {len(steps[plan])}: layer {done[-1].layer} {way}. {done[-1].bytes:g} arrays "
            f"in memory, at most {max(s.bytes for s in done):g} so far; {_again(done)} layers computed again."
        )

    longest, start = max(map(len, steps.values())), len(steps[first])
    step = widgets.player("step", range(1, longest + 1), start, interval=150)
    widgets.explore(make, alt=caption, height=4.2, plan=widgets.menu("plan", [*plans], first), step=step)


def groups(peaks: Mapping[int, Numbers]) -> None:
    """Explore the memory of groups of k layers: the two parts of n / k + k, and the peak of the plan (green)."""

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        colors = {"snapshots n / k": figures.SKY, "group k": figures.ORANGE, "n / k + k": figures.BLACK}
        lines = [ax.plot([], [], color=color)[0] for color in colors.values()]
        (real,), (here,) = ax.plot([], [], ".", color=figures.GREEN), ax.plot([], [], "o", color=figures.RED)
        for row, (name, color) in enumerate([*colors.items(), ("dots: the plan's peak", figures.GREEN)]):
            ax.text(0.7, 0.92 - 0.09 * row, name, color=color, transform=ax.transAxes)
        ax.set(xlim=(0, 31), ylim=(0, 60), xlabel="k, layers in a group", ylabel="arrays in memory")

        def update(n: int, k: int) -> None:
            ks = np.arange(1, 31)
            for line, values in zip(lines, (n / ks, ks, n / ks + ks), strict=True):
                line.set_data(ks, values)
            real.set_data(ks[: len(peaks[n])], peaks[n][:30])
            here.set_data([k], [n / k + k])

        return update

    def caption(n: int, k: int) -> str:
        peak = f"the plan needs {peaks[n][k - 1]:g} at its peak" if k <= len(peaks[n]) else "too long for this chain"
        return (
            f"{n} layers in groups of {k}: n / k + k = {n / k + k:.3g} arrays; {peak}. The lowest is {min(peaks[n]):g}."
        )

    n, k = widgets.slider("layers n", [*peaks], 100), widgets.slider("group k", [*range(1, 31)], 10)
    widgets.explore(make, alt=caption, n=n, k=k)


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
        drawn = [ax.barh(range(len(names)), [0] * len(names)) for ax in panels]
        for i, (ax, patches, color) in enumerate(zip(panels, drawn, (figures.ORANGE, figures.BLUE), strict=True)):
            ax.set(xlabel=quantities[i], xlim=(0, 1.05 * max(max(pair[i]) for pair in bars.values())))
            ax.grid(visible=False, axis="y")
            for patch in patches:
                patch.set_color(color)
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
