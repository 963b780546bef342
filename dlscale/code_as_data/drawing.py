"""Figures and explorers of 17_code_as_data and its further notebook: a line in the notebook calls each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from dlscale.code_as_data import Graph, reach
from dlscale.lab.intervals import Interval, interval, widened
from dlscale.page import figures, widgets

COLORS = ["#bababa", "#eaae80", "#80b8d8"]  # of a bag, the text, the wires: bars with dots upon them

# Graphs


def layout(one: Graph) -> np.ndarray:
    """(statements, 2) a place for each statement: below all that it needs, just above what needs it."""
    forward = [edge for edge in sorted(one.flow.tolist(), key=lambda edge: edge[1]) if edge[0] < edge[1]]
    depth = np.zeros(len(one.statements), int)
    for before, after in forward:
        depth[after] = max(depth[after], depth[before] + 1)
    for number in set(range(len(depth))) - {after for _, after in forward}:
        depth[number] = min((depth[after] for before, after in forward if before == number), default=1) - 1
    across = np.zeros(len(depth))
    for level in np.unique(depth):
        own = np.flatnonzero(depth == level)
        across[own] = np.arange(len(own)) - (len(own) - 1) / 2
    return np.stack([across, -depth], axis=1).astype(float)


def draw(ax: Axes, one: Graph, wires: str = "flow", filled: Mapping[int, str] | None = None) -> None:
    """The statements as boxes, some of them `filled` with a colour, and the edges as arrows: control dashed."""
    at = layout(one)
    names = [text.partition(" ")[0] for text in one.statements]
    ax.set(xlim=(at[:, 0].min() - 0.8, at[:, 0].max() + 0.8), ylim=(at[:, 1].min() - 0.5, 0.5))
    ax.axis("off")
    boxes = []
    for i, place in enumerate(at):
        look = {"boxstyle": "round", "edgecolor": figures.BLACK, "facecolor": (filled or {}).get(i, "white")}
        boxes.append(ax.text(*place, names[i], ha="center", va="center", fontsize=9, zorder=4, bbox=look))
    ax.figure.draw_without_rendering()  # where the boxes are: arrows end at their rims
    kinds = [(one.data, figures.BLUE, "-"), (one.control, figures.ORANGE, "--")]
    for edges, color, style in kinds if wires == "flow" else [(getattr(one, wires), figures.RED, "-")]:
        for a, b in edges.tolist():
            low, high = sorted(at[[a, b], 1])
            bend = 0.35 if a > b or any(low < y < high for y in at[:, 1]) else 0.0
            arrow = {"arrowstyle": "-|>", "color": color, "linestyle": style, "connectionstyle": f"arc3,rad={bend}"}
            arrow |= {"patchA": boxes[a].get_bbox_patch(), "patchB": boxes[b].get_bbox_patch()}
            ax.annotate("", at[b], at[a], arrowprops=arrow | {"shrinkA": 1, "shrinkB": 1})


def side_by_side(graphs: Mapping[str, Graph]) -> None:
    """Graphs with their titles."""
    figure, axes = figures.new(len(graphs), width=7.6, height=3.6)
    for ax, (title, one) in zip(axes, graphs.items(), strict=True):
        draw(ax, one)
        ax.set_title(title, fontsize=10)
    figures.show(figure, "Graphs of the same six instructions, connected differently: " + "; ".join(graphs) + ".")


def _bars(ax: Axes, names: Sequence[str], lengths: Sequence[float], color: Any, **options: Any) -> None:
    """A bar for each name, from top to bottom."""
    ax.barh(range(len(names)), lengths, color=color)
    ax.set_yticks(range(len(names)), names)
    ax.set(ylim=(len(names) - 0.5, -0.5), **options)
    ax.grid(visible=False, axis="y")


WIRES = {"the wires": "flow", "the text, line by line": "text"}


def explore_graphs(graphs: Mapping[str, Graph], start: str, answers: Mapping[str, str] | None = None) -> None:
    """Explore the graph of each program, with its wires or the order of its text, and a network's answer about it."""

    def paint(ax: Axes, which: str, order: str) -> None:
        ax.set_title(f"the network's answer: {answers[which]}" if answers else "")
        draw(ax, graphs[which], WIRES[order])
        if order == "the wires":
            ax.text(0.01, 0.97, "data", color=figures.BLUE, transform=ax.transAxes)
            dashed = "control (dashed)" if len(graphs[which].control) else ""
            ax.text(0.01, 0.91, dashed, color=figures.ORANGE, transform=ax.transAxes)

    def caption(which: str, order: str) -> str:
        own = graphs[which]
        edges = f"{len(own.data)} data edges and {len(own.control)} control edges"
        said = f"{which}: {len(own.statements)} statements, {edges}. Drawn along {order}."
        return f"{said} Answer: {answers[which]}." if answers else said

    which, order = widgets.menu("program", [*graphs], start), widgets.menu("arrows along", [*WIRES])
    widgets.explore_axes(paint, alt=caption, width=7.4, height=4.4, which=which, order=order)


def explore_rounds(one: Graph) -> None:
    """Explore which statements have been heard of by one statement after some rounds of messages."""
    names = [f"{i}: {text.partition(' ')[0]}" for i, text in enumerate(one.statements)]

    def heard(which: str, order: str, rounds: int) -> np.ndarray:
        return reach(getattr(one, WIRES[order]), len(names), rounds)[names.index(which)]

    def paint(ax: Axes, which: str, order: str, rounds: int) -> None:
        filled = {int(i): figures.YELLOW for i in np.flatnonzero(heard(which, order, rounds))}
        draw(ax, one, WIRES[order], filled | {names.index(which): figures.ORANGE})

    def caption(which: str, order: str, rounds: int) -> str:
        count = int(heard(which, order, rounds).sum()) - 1
        after, others = (f"{n} {name}{'s' * (n != 1)}" for n, name in ((rounds, "round"), (count, "other")))
        return f"After {after} along {order}, statement {which} (orange) depends on {others} (yellow)."

    which, order = widgets.menu("statement", names, names[3]), widgets.menu("messages along", [*WIRES])
    rounds = widgets.player("round", range(1, 4), 1, interval=900)
    widgets.explore_axes(paint, alt=caption, width=7.4, height=3.8, which=which, order=order, rounds=rounds)


# Networks


def readers(accuracies: Mapping[str, np.ndarray], ceilings: Mapping[str, float]) -> None:
    """Accuracy of each reader, a dot for each split, below the most that its input allows."""
    figure, ax = figures.new(height=2.4)
    means, most = [np.mean(found) for found in accuracies.values()], [ceilings[name] for name in accuracies]
    _bars(ax, [*accuracies], means, COLORS, xlim=(0, 103), xlabel="right on pairs held out (%)")
    for place, found in enumerate(accuracies.values()):
        ax.plot(found, [place] * len(found), "o", color=figures.BLACK, markerfacecolor="white", markersize=5)
    ax.text(means[1] - 2, 1, "bar: mean; dot: a split", va="center", ha="right")
    ax.vlines(most, np.arange(3) - 0.4, np.arange(3) + 0.4, color=figures.BLACK, linewidth=3)
    ax.text(most[0] + 1.5, 0, "the most that its input allows", va="center")
    said = (f"{name} {np.mean(found):.0f} %, at most {ceilings[name]:.0f} %" for name, found in accuracies.items())
    figures.show(figure, "; ".join(said) + ".")


# Vectors


def explore_neighbours(tables: Mapping[str, np.ndarray], names: Sequence[str], groups: Sequence[Sequence[str]]) -> None:
    """Explore the nearest instructions of each, the related ones in blue."""

    def nearest(query: str, along: str) -> list[tuple[str, float]]:
        cosine = tables[along] @ tables[along][names.index(query)]
        return [(names[i], float(cosine[i])) for i in np.argsort(-cosine) if names[i] != query][:5]

    def paint(ax: Axes, query: str, along: str) -> None:
        found = nearest(query, along)
        related = {name for group in groups if query in group for name in group}
        shown, cosines = zip(*found, strict=True)
        colors = [figures.BLUE if name in related else "#c8c8c8" for name in shown]
        _bars(ax, shown, cosines, colors, xlabel=f"cosine with {query}", xlim=(0, 1))
        ax.set_title("blue: on our list of related ones", color=figures.BLUE, loc="right", fontsize=10)

    def caption(query: str, along: str) -> str:
        said = ", ".join(f"{name} {cosine:.2f}" for name, cosine in nearest(query, along))
        return f"Nearest to {query}, vectors {along}: {said}."

    listed = sorted({name for group in groups for name in group} & set(names))
    query, along = widgets.menu("instruction", listed, "floor"), widgets.menu("vectors", [*tables])
    widgets.explore_axes(paint, alt=caption, width=7.4, height=2.7, query=query, along=along)


def explore_splits(differences: Mapping[str, np.ndarray], overlap: float) -> None:
    """Explore the mean of the first splits, with the interval for independent samples and the widened one."""

    def both(which: str, count: int) -> dict[str, Interval]:
        own = differences[which][:count]
        return {"as if independent": interval(own), "widened for overlap": interval(widened(own, overlap))}

    def paint(ax: Axes, which: str, count: int) -> None:
        mean, low, high = np.transpose([*both(which, count).values()])
        ax.hlines([0, 1], low, high, color=(colors := [figures.GREY, figures.BLUE]), linewidth=4)
        ax.scatter(mean, [0, 1], 80, colors, zorder=3)
        ax.eventplot(differences[which][:count], lineoffsets=2, linelengths=0.4, colors=figures.BLACK)
        ax.axvline(0, color=figures.BLACK, linewidth=1)
        ax.set(ylim=(2.4, -0.6), xlim=(-60, 60), xlabel=f"learned vectors minus {which} (points)")
        ax.set_yticks(range(3), [*both(which, count), "each split"])

    def caption(which: str, count: int) -> str:
        said = ", ".join(f"{name} {found}" for name, found in both(which, count).items())
        return f"Learned vectors minus {which}, {count} splits: {said} points.".replace("-", "−")

    which = widgets.menu("learned vectors minus", [*differences])
    widgets.explore_axes(
        paint, alt=caption, width=7.4, height=2.6, which=which, count=widgets.slider("splits", [4, 8, 16, 24], 24)
    )
