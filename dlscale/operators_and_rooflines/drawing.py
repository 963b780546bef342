"""Figures and explorers of 12_operators_and_rooflines and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from dlscale.operators_and_rooflines import Piece, total, workspace
from dlscale.page import figures, widgets
from dlscale.page.curves import Line, curves

WAYS = {"direct": figures.BLACK, "shifts": figures.PINK, "im2col": figures.ORANGE, "FFT": figures.BLUE}
COLORS = (figures.BLUE, figures.RED, figures.GREEN, figures.PINK, figures.ORANGE)
WAYS |= {"Winograd 2": figures.SKY, "Winograd 4": figures.GREEN}
PARTS = {"FLOP ×": figures.SKY, "time ×": figures.RED, "arithmetic": figures.GREEN, "registers": figures.SKY}
PARTS |= {"SRAM": figures.ORANGE, "DRAM": figures.RED}


def bars(groups: Mapping[str, Mapping[str, float]], xlabel: str, start: float, end: float) -> None:
    """Bars from `start` on a logarithmic axis to `end`: a row for each group, in it a bar for each of its parts."""
    figure, ax = figures.new(height=1 + 0.6 * len(groups))
    parts = [part for part in PARTS if any(part in values for values in groups.values())]
    said = []
    for row, (group, values) in enumerate(groups.items()):
        for part, value in values.items():
            at = row + 0.8 * ((parts.index(part) + 0.5) / len(parts) - 0.5)
            text = f"{part} {float(f'{value:.2g}'):,g}"
            ax.barh(at, value - start, 0.72 / len(parts), left=start, color=PARTS[part])
            ax.text(1.1 * max(value, start), at, text, va="center", color=PARTS[part], fontsize=8)
            said.append(f"{' '.join(group.split())}: {text}".removeprefix(": "))
    ax.axvline(start, color=figures.BLACK, linewidth=1)
    ax.set(xscale="log", xlim=(min(start, 0.2), end), ylim=(len(groups) - 0.5, -0.5), xlabel=xlabel)
    ax.xaxis.set_major_formatter("{x:,g}")
    named = [(row, group) for row, group in enumerate(groups) if group]
    ax.set_yticks([row for row, _ in named], [group for _, group in named])
    figures.show(figure, f"{xlabel[0].upper()}{xlabel[1:]}: {'; '.join(said)}.")


# The roof


def _by_size(
    sizes: np.ndarray, times: Sequence[np.ndarray], styles: Mapping[str, tuple[str, str]],
    mark: Callable[[int], Line], caption: Callable[[int], str], what: str, start: int,
) -> None:  # fmt: skip
    """Explore milliseconds by size on logarithmic axes, with a mark in black at the size that is chosen."""
    axis = {"xscale": "log", "yscale": "log", "xlabel": what, "ylabel": "milliseconds", "xticks": sizes}
    axis |= {"xlim": (0.9 * sizes[0], 1.1 * sizes[-1]), "ylim": (0.6 * np.min(times), 1.6 * np.max(times))}
    lines = {name: (sizes, own) for name, own in zip(styles, times, strict=True)}
    slider = widgets.slider(what, sizes.tolist(), start)
    curves(styles | {"": (figures.BLACK, "o-")}, lambda size: lines | {"": mark(size)}, caption, axis, size=slider)


def dense(seconds: Mapping[int, float], side: int, peak: float, bandwidth: float) -> None:
    """Explore a dense layer by batch: its time, and the two times below which it cannot be."""
    batches = np.array([*seconds])
    memory, arithmetic = 4e3 * (side**2 + 2 * batches * side) / bandwidth, 2e3 * batches * side**2 / peak

    def caption(size: int) -> str:
        i = [*seconds].index(size)
        limit = "memory" if memory[i] > arithmetic[i] else "compute"
        return (
            f"Batch {size}: memory needs {memory[i]:.2g} ms, arithmetic {arithmetic[i]:.2g} ms, so the layer is "
            f"{limit}-bound. Measured: {1e3 * seconds[size]:.3g} ms."
        )

    styles = {"memory": (figures.RED, "-"), "arithmetic": (figures.BLUE, "-"), "measured": (figures.BLACK, ".-")}
    times = memory, arithmetic, 1e3 * np.array([*seconds.values()])
    _by_size(batches, times, styles, lambda size: ([size], [1e3 * seconds[size]]), caption, "batch", 1)


LOWEST, MOST = 0.03, 2500  # FLOP per byte at the edges


def roof(points: Mapping[str, tuple[float, float]], peak: float, bandwidth: float) -> None:
    """Explore where operators lie: FLOP/s over arithmetic intensity, below the roof."""
    kinds = dict(zip(dict.fromkeys(name.split(",")[0] for name in points), COLORS, strict=True))

    # two have the same intensity: the upper one's name stands left
    upper = max(("element-wise", "sum"), key=lambda name: points[name][1])
    ends = [name for name in points if "," in name]
    named = {name: name for name in points if name not in ends} | {ends[0]: ends[0], ends[-1]: ends[-1].split(", ")[1]}

    def paint(ax: Axes, operator: str) -> None:
        intensity = np.geomspace(LOWEST, MOST, 300)
        ax.plot(intensity, np.minimum(peak, bandwidth * intensity) / 1e9, color=figures.BLACK, linewidth=2.5)
        ax.text(0.7, 1.35 * 0.7 * bandwidth / 1e9, "bandwidth", rotation=47, rotation_mode="anchor")
        ax.text(0.9 * MOST, 1.15 * peak / 1e9, "peak", ha="right")
        for kind, color in kinds.items():
            own = np.array([point for name, point in points.items() if name.split(",")[0] == kind]).T
            ax.plot(own[0], own[1] / 1e9, "o-", color=color, markersize=5, linewidth=0.8)
        for name, label in named.items():
            (x, y), color = points[name], kinds[name.split(",")[0]]
            if name == upper:
                ax.text(0.93 * x, max(y, 1.05 * bandwidth * x) / 1e9, label, color=color, va="bottom", ha="right")
            else:
                ax.text(1.15 * x, 0.95 * y / 1e9, label, color=color, va="top")
        x, y = points[operator]
        ax.plot(x, y / 1e9, "o", color=figures.BLACK, markersize=12, fillstyle="none", markeredgewidth=2)
        ax.plot([x, x], [y / 1e9, min(peak, bandwidth * x) / 1e9], ":", color=figures.BLACK)
        ax.set(xscale="log", yscale="log", xlim=(LOWEST, MOST), ylim=(0.01 * peak / 1e9, 2.2 * peak / 1e9))
        ax.set(xlabel="arithmetic intensity (FLOP per byte)", ylabel="GFLOP/s")

    def caption(operator: str) -> str:
        x, y = points[operator]
        limit = "memory" if bandwidth * x < peak else "compute"
        return (
            f"{operator}: {x:.3g} FLOP per byte, {limit}-bound. It reaches {y / 1e9:.2g} GFLOP/s, "
            f"{100 * y / peak:.0f} % of the peak and {100 * y / min(peak, bandwidth * x):.0f} % of the roof."
        )

    widgets.explore_axes(paint, alt=caption, height=4, operator=widgets.menu("operator", [*points], "element-wise"))


def fusion(
    separate: Mapping[int, float], fused: Mapping[int, float], numbers: int, peak: float, bandwidth: float
) -> None:
    """Explore a chain of element-wise operators: its time in separate calls and fused, by its length."""
    lengths = np.array([*separate])

    def caption(size: int) -> str:
        return (
            f"{size} operators: {1e3 * separate[size]:.3g} ms in separate calls, {1e3 * fused[size]:.3g} ms "
            f"fused, {separate[size] / fused[size]:.1f} times faster."
        )

    times = [1e3 * np.array([*found.values()]) for found in (separate, fused)]
    times += [2e3 * numbers / peak * lengths, 8e3 * numbers / bandwidth + 0 * lengths]
    styles = {"separate": (figures.RED, ".-"), "fused": (figures.BLUE, ".-")}
    styles |= {"arithmetic alone": (figures.GREEN, "--"), "memory alone": (figures.GREY, ":")}
    mark = lambda size: ([size] * 2, [1e3 * fused[size], 1e3 * separate[size]])  # noqa: E731
    _by_size(lengths, times, styles, mark, caption, "operators in the chain", 8)


# Convolution


def convolution(seconds: Mapping[str, Mapping[int, float]], flops: Mapping[str, Mapping[int, float]]) -> None:
    """Explore convolutions by the side of the kernel: FLOP on the left, time on the right."""
    sizes = [*seconds["FFT"]]

    def paint(left: Axes, right: Axes, kernel: int) -> None:
        for ax, found, scale in ((left, flops, 1e-6), (right, seconds, 1e3)):
            for way, f in found.items():
                line = ax.plot([*f], [scale * v for v in f.values()], "o-", color=WAYS[way], markersize=4)[0]
                label = "direct, im2col" if ax is left and way == "direct" else way
                figures.name(ax, line, label, -12 * (len(f) == 1))  # a single point: below it, beside the curves
            ax.axvline(kernel, color=figures.GREY, linewidth=6, alpha=0.3)
            ax.set(yscale="log", xlabel="side of the kernel (pixels)", xlim=(2, 20), xticks=sizes)
            ax.set_ylim(bottom=0.6 * ax.get_ylim()[0])
            values, (low, high) = [0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500], ax.get_ylim()
            ax.minorticks_off()
            ax.set_yticks(ticks := [value for value in values if low <= value <= high], list(map(str, ticks)))
        left.set_ylabel("million FLOP")
        right.set_ylabel("milliseconds")

    def caption(kernel: int) -> str:
        less, longer = (found["FFT"][kernel] / found["direct"][kernel] for found in (flops, seconds))
        return (
            f"Kernel {kernel} × {kernel}: FFT does {less:.2g} times the FLOP of direct, in {longer:.2g} times the time."
        )

    widgets.explore_axes(
        paint, alt=caption, columns=2, height=3.4, kernel=widgets.slider("side of the kernel", sizes, sizes[2])
    )


# Further


def schedules(programs: Mapping[str, Sequence], schedule: Callable, processors: Sequence[int]) -> None:
    """Explore the steps of p processors: the graph of a program by level, and who does what in each step."""

    def chain_of(nodes: Sequence) -> set:
        chain = [max(nodes, key=lambda node: node.level)]
        while chain[-1].level > 1:
            chain.append(max(chain[-1].parents, key=lambda node: node.level))
        return set(chain)

    def paint(left: Axes, right: Axes, program: str, p: int) -> None:
        nodes, steps = programs[program], schedule(programs[program], p)
        chain = chain_of(nodes)
        colors_of = lambda some: [figures.RED if n in chain else figures.BLUE for n in some]  # noqa: E731
        levels = [[n for n in nodes if n.level == i] for i in range(1, len(chain) + 1)]
        place = {n: (j - len(row) / 2, i) for i, row in enumerate(levels, 1) for j, n in enumerate(row)}
        for n in nodes:
            for q in filter(place.get, n.parents):
                color = figures.RED if {n, q} <= chain else "#bbbbbb"
                left.plot(*zip(place[q], place[n], strict=True), color=color, linewidth=0.8, zorder=1)
        left.scatter(*zip(*place.values(), strict=True), c=colors_of(place), s=26)
        left.set(xticks=[], ylabel="level", ylim=(len(chain) + 0.5, 0.5), title="red: a longest chain")
        for t, now in enumerate(steps):
            right.barh(range(1, len(now) + 1), 0.9, left=t + 0.05, color=colors_of(now), height=0.85)
        right.set(title=f"{p} processors: {len(steps)} steps", xlabel="step", ylabel="processor")
        right.set(xlim=(0, max(len(steps), 8)), ylim=(0.3, max(p, 4) + 0.7))

    def caption(program: str, p: int) -> str:
        work, steps = len(programs[program]), len(schedule(programs[program], p))
        depth = max(node.level for node in programs[program])
        return (
            f"{program}: work {work}, depth {depth}. {p} processors need {steps} steps; Brent's bounds are "
            f"{max(depth, work / p):.1f} and {depth + (work - depth) / p:.1f}."
        )

    menu, slider = widgets.menu("program", [*programs]), widgets.slider("processors", processors, 6)
    widgets.explore_axes(paint, alt=caption, columns=2, height=3.6, program=menu, p=slider)


def plans(found: Mapping[int, Mapping[str, Sequence[Piece]]], start: int) -> None:
    """Explore plans of micro-batches by the limit in MiB: a row for each name, a bar for each micro-batch."""
    longest = 1e3 * max(total(way) for plan in found.values() for way in plan.values())

    def paint(ax: Axes, limit: int) -> None:
        for row, way in enumerate(found[limit].values()):
            ends = 1e3 * np.cumsum([0, *(piece.seconds for piece in way)])
            colors = [WAYS[piece.algorithm] for piece in way]
            ax.barh(row, np.diff(ends), left=ends[:-1], color=colors, edgecolor="white", height=0.6)
            names = ", ".join(dict.fromkeys(piece.algorithm for piece in way))
            ax.text(ends[-1] + 0.01 * longest, row, f"{names}, {workspace(way) / 2**20:.1f} MiB", va="center")
        ax.set_yticks(range(len(found[limit])), [*found[limit]])
        ax.set(xlim=(0, 1.45 * longest), ylim=(len(found[limit]) - 0.4, -0.6))
        ax.set(title=f"limit {limit} MiB", xlabel="milliseconds (each segment is a micro-batch)")

    def caption(limit: int) -> str:
        times = (f"{name} {1e3 * total(way):.0f} ms" for name, way in found[limit].items())
        return f"Limit {limit} MiB: {', '.join(times)}."

    widgets.explore_axes(paint, alt=caption, height=2.8, limit=widgets.slider("limit (MiB)", [*found], start))


def systolic(states: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], a: np.ndarray, b: np.ndarray) -> None:
    """Step an array of cells that multiplies a and b: what each received from the left and from above, and its sum."""

    def waiting(numbers: np.ndarray, entered: int) -> list[str]:
        left = [*map(str, numbers[max(entered, 0) :])][::-1]
        return ["\u2007"] * (len(numbers) - len(left)) + left  # the next one stands by its arrow

    def paint(ax: Axes, cycle: int) -> None:
        for (i, j), total_ in np.ndenumerate(states[cycle - 1][2]):
            right, down = (state[i, j] for state in states[cycle - 1][:2])
            works = np.isfinite(right) and np.isfinite(down)
            ax.fill([j, j + 0.94, j + 0.94, j], [i, i, i + 0.94, i + 0.94], color="#fdd0a2" if works else "#f0f0f0")
            text = f"→ {right:.0f}\n↓ {down:.0f}" if works else "waits" if total_ == 0 else "done"
            ax.text(j + 0.47, i + 0.35, text, ha="center", va="center")
            ax.text(j + 0.47, i + 0.78, f"sum {total_:.0f}", ha="center", va="center", color=figures.BLUE)
        ax.set(xlim=(-0.1, len(states[0][2][0])), ylim=(len(states[0][2]), -0.1), title=f"cycle {cycle}")
        ax.set_yticks(np.arange(len(a)) + 0.47, [" ".join(waiting(row, cycle - i)) + " →" for i, row in enumerate(a)])
        ax.set_xticks(
            np.arange(b.shape[1]) + 0.47, ["\n".join(waiting(row, cycle - i)) + "\n↓" for i, row in enumerate(b.T)]
        )
        ax.xaxis.tick_top(), ax.tick_params(length=0), ax.grid(False), ax.set_frame_on(False)

    def caption(cycle: int) -> str:
        works = np.isfinite(states[cycle - 1][0] + states[cycle - 1][1])
        return f"Cycle {cycle} of {len(states)}: {works.sum()} of {works.size} cells work."

    player = widgets.player("cycle", range(1, len(states) + 1), 3, interval=700)
    widgets.explore_axes(paint, alt=caption, width=5, height=3.6, cycle=player)
