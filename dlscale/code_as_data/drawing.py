"""Figures and explorers of 17_code_as_data and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlscale.code_as_data import Graph, reach
from dlscale.lab.intervals import Interval, interval, widened
from dlscale.page import figures, widgets

Answer = Callable[[Graph], np.ndarray]
COLORS = {"flow": figures.BLUE, "text": figures.RED, "none": figures.GREY}

# Graphs


def layout(one: Graph) -> np.ndarray:
    """(statements, 2) a place for each statement: below all that it needs, just above what needs it."""
    forward = [edge for edge in sorted(one.flow.tolist(), key=lambda edge: edge[1]) if edge[0] < edge[1]]
    depth = np.zeros(len(one.statements), int)
    for before, after in forward:
        depth[after] = max(depth[after], depth[before] + 1)
    for number in set(range(len(depth))) - {after for _, after in forward}:
        users = [depth[after] for before, after in forward if before == number]
        depth[number] = min(users, default=1) - 1
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


def _explore(
    paint: Callable[..., None], caption: Callable[..., str], height: float, columns: int = 1, **controls
) -> None:
    """An explorer that paints anew on empty axes."""

    def make(fig: Figure) -> widgets.Update:
        axes = np.atleast_1d(figures.axes(fig, columns))

        def update(**values: Any) -> None:
            with rc_context(figures.STYLE):
                for ax in axes:
                    ax.clear()
                    ax.tick_params(grid_color="#e4e4e4")
                paint(*axes, **values)

        return update

    widgets.explore(make, alt=caption, width=7.4, height=height, **controls)


WIRES = {"the wires": "flow", "the text, line by line": "text"}


def explore_graphs(graphs: Mapping[str, Graph], start: str) -> None:
    """Explore the graph of each program, with its wires or with the order of its text."""

    def paint(ax: Axes, which: str, order: str) -> None:
        draw(ax, graphs[which], WIRES[order])
        if order == "the wires":
            ax.text(0.01, 0.97, "data", color=figures.BLUE, transform=ax.transAxes)
            ax.text(0.01, 0.91, "control (dashed)", color=figures.ORANGE, transform=ax.transAxes)

    def caption(which: str, order: str) -> str:
        one, back = graphs[which], sum(a > b for a, b in graphs[which].data.tolist())
        said = (
            f"{which}: {len(one.statements)} statements, {len(one.data)} data edges, {back} of them back to the head "
        )
        return f"{said}of a loop, {len(one.control)} control edges. Drawn along {order}."

    which, order = widgets.menu("program", [*graphs], start), widgets.menu("arrows along", [*WIRES])
    _explore(paint, caption, 4.4, which=which, order=order)


def explore_rounds(one: Graph) -> None:
    """Explore which statements have been heard of by one statement after some rounds of messages."""
    names = [f"{i}: {text.partition(' ')[0]}" for i, text in enumerate(one.statements)]

    def heard(which: str, order: str, rounds: int) -> np.ndarray:
        own = names.index(which)
        return reach(getattr(one, WIRES[order]), len(names), rounds)[own] if rounds else np.arange(len(names)) == own

    def paint(ax: Axes, which: str, order: str, rounds: int) -> None:
        filled = {int(i): figures.YELLOW for i in np.flatnonzero(heard(which, order, rounds))}
        draw(ax, one, WIRES[order], filled | {names.index(which): figures.ORANGE})

    def caption(which: str, order: str, rounds: int) -> str:
        count = int(heard(which, order, rounds).sum()) - 1
        return f"After {rounds} rounds along {order}, statement {which} (orange) depends on {count} others (yellow)."

    which, order = widgets.menu("statement", names, names[3]), widgets.menu("messages along", [*WIRES])
    rounds = widgets.player("round", range(4), 1, interval=900)
    _explore(paint, caption, 3.8, which=which, order=order, rounds=rounds)


# Networks


def readers(accuracies: Mapping[str, np.ndarray], ceilings: Mapping[str, float]) -> None:
    """Accuracy of each reader, a dot for each split, below the most that its input allows."""
    figure, ax = figures.new(height=2.4)
    for place, (name, accuracy) in enumerate(accuracies.items()):
        ax.barh(place, np.mean(accuracy), 0.6, color=[*COLORS.values()][::-1][place], alpha=0.5)
        ax.plot(accuracy, np.full(len(accuracy), place), ".", color=figures.BLACK)
        ax.plot([ceilings[name]] * 2, [place - 0.4, place + 0.4], color=figures.BLACK, linewidth=3)
    first = next(iter(accuracies))
    ax.text(ceilings[first] + 1.5, 0, "the most that its input allows", va="center")
    ax.set(xlim=(0, 103), ylim=(2.6, -0.6), xlabel="right on couples held out (%), one dot per split")
    ax.set_yticks(range(3), list(accuracies))
    ax.grid(visible=False, axis="y")
    said = (f"{name} {np.mean(found):.0f} %, at most {ceilings[name]:.0f} %" for name, found in accuracies.items())
    figures.show(figure, "; ".join(said) + ".")


def explore_answers(graphs: Mapping[str, Graph], start: str, answer: Answer, classes: Sequence[str]) -> None:
    """Explore what a trained network says of programs: the graph, and a bar for each class."""

    def paint(ax: Axes, right: Axes, which: str) -> None:
        right.barh(range(len(classes)), 100 * answer(graphs[which]), color=figures.BLUE)
        right.set_yticks(range(len(classes)), classes)
        right.set(xlim=(0, 100), ylim=(len(classes) - 0.5, -0.5), xlabel="the network's answer (%)")
        right.grid(visible=False, axis="y")
        draw(ax, graphs[which])  # last: it asks where the boxes are

    def caption(which: str) -> str:
        found = answer(graphs[which])
        return f"{which}: {100 * found.max():.0f} % {classes[int(found.argmax())]}."

    _explore(paint, caption, 3.6, 2, which=widgets.menu("program", [*graphs], start))


# Vectors


def explore_neighbours(tables: Mapping[str, np.ndarray], names: Sequence[str], groups: Sequence[Sequence[str]]) -> None:
    """Explore the nearest instructions of each, the related ones in blue."""

    def nearest(query: str, along: str) -> list[tuple[str, float]]:
        cosine = tables[along] @ tables[along][names.index(query)]
        return [(names[i], float(cosine[i])) for i in np.argsort(-cosine) if names[i] != query][:5]

    def paint(ax: Axes, query: str, along: str) -> None:
        found = nearest(query, along)
        related = {name for group in groups if query in group for name in group}
        ax.barh(range(5), [c for _, c in found], color=[figures.BLUE if n in related else "#c8c8c8" for n, _ in found])
        ax.set_yticks(range(5), [name for name, _ in found])
        ax.set(xlabel=f"cosine with {query}", xlim=(0, 1), ylim=(4.6, -0.6))
        ax.grid(visible=False, axis="y")
        ax.set_title("blue: on our list of related ones", color=figures.BLUE, loc="right", fontsize=10)

    def caption(query: str, along: str) -> str:
        said = ", ".join(f"{name} {cosine:.2f}" for name, cosine in nearest(query, along))
        return f"Nearest to {query}, vectors {along}: {said}."

    listed = sorted({name for group in groups for name in group} & set(names))
    query, along = widgets.menu("instruction", listed, "floor"), widgets.menu("vectors", [*tables])
    _explore(paint, caption, 2.7, query=query, along=along)


def lost(shares: Mapping[str, Mapping[str, float]], types: float, chance: float) -> None:
    """Related instructions among the five nearest: from counts to short vectors to learnt ones, and two references."""
    figure, ax = figures.new(height=3.2)
    for (wires, found), shift in zip(shares.items(), (-0.18, 0.18), strict=True):
        color = COLORS["flow" if "wires" in wires else "text"]
        bars = ax.bar(np.arange(len(found)) + shift, found.values(), 0.34, color=color)
        ax.bar_label(bars, [f"{share:.0f}" for share in found.values()])
        ax.text(shift, 3, wires, color="white", rotation=90, ha="center", fontsize=9)
    for level, name in ((types, "types alone"), (chance, "random vectors")):
        ax.plot([-0.5, 2.42], [level, level], color=figures.GREY, linestyle=":")
        ax.text(2.45, level, name, color=figures.GREY, va="center")
    ax.set(ylim=(0, 75), xlim=(-0.5, 3.1), ylabel="related one among\nthe five nearest (%)")
    ax.set_xticks(range(3), [*next(iter(shares.values()))])
    ax.grid(visible=False, axis="x")
    said = (f"{wires}: " + ", ".join(f"{n} {v:.0f} %" for n, v in found.items()) for wires, found in shares.items())
    figures.show(figure, "; ".join(said) + f"; types alone {types:.0f} %, random vectors {chance:.0f} %.")


def new_operations(shares: Mapping[str, np.ndarray]) -> None:
    """How much is right with each kind of vectors: a mark for each split, a dot for the mean."""
    figure, ax = figures.new(height=2.4)
    for place, found in enumerate(shares.values()):
        ax.plot(found, np.full(len(found), place), "|", color=figures.GREY, markersize=14)
        ax.plot(found.mean(), place, "o", color=figures.BLUE, markersize=9)
    ax.axvline(100 / 3, color=figures.BLACK, linestyle=":")
    ax.text(34, -0.65, "guessing", va="center")
    ax.set(xlim=(20, 100), ylim=(len(shares) - 0.5, -0.9))
    ax.set_xlabel("right on new operations (%): a mark for each split, a dot for the mean")
    ax.set_yticks(range(len(shares)), [*shares])
    figures.show(figure, "; ".join(f"{name} {found.mean():.0f} %" for name, found in shares.items()) + ".")


def explore_splits(differences: Mapping[str, np.ndarray], overlap: float) -> None:
    """Explore the mean of the first splits, with the interval for independent samples and the widened one."""

    def both(which: str, count: int) -> dict[str, Interval]:
        own = differences[which][:count]
        return {"as if independent": interval(own), "widened for overlap": interval(widened(own, overlap))}

    def paint(ax: Axes, which: str, count: int) -> None:
        for row, (mean, low, high) in enumerate(both(which, count).values()):
            ax.plot([low, high], [row, row], color=(color := (figures.GREY, figures.BLUE)[row]), linewidth=4)
            ax.plot(mean, row, "o", color=color, markersize=9)
        ax.plot(differences[which][:count], np.full(count, 2), "|", color=figures.BLACK, markersize=14)
        ax.axvline(0, color=figures.BLACK, linewidth=1)
        ax.set(ylim=(2.4, -0.6), xlim=(-60, 60), xlabel="gain of learnt vectors (points)")
        ax.set_yticks(range(3), [*both(which, count), "each split"])

    def caption(which: str, count: int) -> str:
        said = ", ".join(f"{name} {found}" for name, found in both(which, count).items())
        return f"Learnt vectors minus {which}, {count} splits: {said} points."

    which = widgets.menu("learnt vectors minus", [*differences])
    _explore(paint, caption, 2.6, which=which, count=widgets.slider("splits", [4, 8, 16, 24], 24))
