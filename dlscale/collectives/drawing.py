"""The pictures of 08_collectives and its further notebook: whatever they show, they get as arrays."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

from dlscale.collectives.replay import Frame
from dlscale.page import figures, widgets

COLORS = {
    "tree": figures.BLACK, "butterfly": figures.ORANGE, "ring": figures.BLUE, "rabenseifner": figures.GREEN,
    "circulant": figures.RED, "bidirectional_ring": figures.SKY, "torus": figures.PINK, "hierarchical": figures.GREY,
}  # fmt: skip
PLACES = {  # where the eight GPUs of a DGX-1 are drawn, and its two processors
    "DGX-1": [*zip((1, 0, 0, 1, 2, 3, 3, 2, 0.5, 2.5), (8, 11, -1, 2, 8, 11, -1, 2, -8, -8), strict=True)],
    "a ring": [(1.5 + 1.2 * math.sin(math.pi * w / 4), 2 + 10 * math.cos(math.pi * w / 4)) for w in range(8)],
}


def spoken(algorithm: str) -> str:
    """An algorithm's name in a text."""
    return "Rabenseifner" if algorithm == "rabenseifner" else algorithm.replace("_", " ")


def show_bytes(size: float) -> str:
    """So many bytes with a unit, such as 3.5 MiB."""
    power = min(int(math.log2(max(size, 1))) // 10, 3)
    number = size / 1024**power
    return f"{number:.{0 if number >= 10 else 1}f} {('B', 'KiB', 'MiB', 'GiB')[power]}".replace(".0 ", " ")


# Section 1


def rounds(frames: Mapping[str, Sequence[Frame]]) -> None:
    """Explore operations round by round: who sends to whom, and whose numbers have arrived where."""
    workers = len(next(iter(frames.values()))[0].seen)

    def chosen(name: str, number: int) -> tuple[int, Frame, np.ndarray]:
        now = number % len(frames[name])  # after the last round all begins again
        return now, frames[name][now], frames[name][max(0, now - 1)].seen

    def make(fig: Figure) -> widgets.Update:
        wires, grid = figures.axes(fig, 2, width_ratios=[1, 2.2], sharey=True)
        (arrows,) = wires.plot([], [], color=figures.RED, marker=">", markevery=(1, 3))
        image = grid.imshow(np.zeros((workers, 2 * workers)), cmap="cividis_r", vmin=0, vmax=workers, aspect="auto")
        (new,) = grid.plot([], [], "s", markerfacecolor="none", markeredgecolor=figures.RED, markersize=12)
        clock = wires.text(0.5, 1.03, "", ha="center", transform=wires.transAxes)
        wires.set(xlim=(-0.15, 1.1), xticks=[0, 1], xticklabels=["sender", "receiver"], ylabel="worker")
        wires.set(yticks=range(workers), ylim=(workers - 0.4, -0.6))
        wires.grid(visible=False), grid.grid(visible=False)
        grid.set(xlabel="place in the array", xticks=range(0, 2 * workers, 4))
        fig.colorbar(image, ax=grid, ticks=range(0, workers + 1, 2), label="workers whose numbers are in it")

        def update(name: str, number: int) -> list[Artist]:
            now, frame, before = chosen(name, number)
            clock.set_text(f"round {now} of {len(frames[name]) - 1}")
            ends = np.insert(np.reshape(frame.pairs, (-1, 2)).astype(float), 2, np.nan, axis=1)
            arrows.set_data(np.tile([0, 1, np.nan], len(ends)), ends.ravel())
            image.set_data(np.where(frame.seen, frame.seen, np.nan))
            new.set_data(*np.argwhere(frame.seen != before)[:, ::-1].T)
            return [arrows, clock, image, new]

        return update

    def caption(name: str, number: int) -> str:
        now, frame, before = chosen(name, number)
        changed, last = np.count_nonzero(frame.seen != before), len(frames[name]) - 1
        return f"{name}, round {now} of {last}: {len(frame.pairs)} messages change {changed} places."

    operation = widgets.menu("operation", [*frames], "all-reduce: ring")
    number = widgets.player("round", range(max(map(len, frames.values()))), 3, interval=700)
    widgets.explore(make, alt=caption, height=3.6, name=operation, number=number)


# Section 2 and 3


def race(ratios: Callable[..., Any], sizes: np.ndarray, ylabel: str = "time / lower bound", **controls: Any) -> None:
    """Explore times as multiples of a bound: for these `controls`, `ratios` has (sizes,) by algorithm."""

    def paint(ax: Axes, **chosen: Any) -> None:
        found = ratios(**chosen)
        top, least = max(9, 1.3 * np.max([*found.values()])), np.min([*found.values()], axis=0)
        equal: dict[str, list[str]] = {}  # drawn as one line
        for name in sorted(found, key=lambda name: found[name][-1]):
            one = next((one for one in equal if np.allclose(found[one], found[name], rtol=0.01)), name)
            equal.setdefault(one, []).append(spoken(name))
        gaps = np.arange(len(equal)) * math.log(top / 0.8) * 0.065  # labels stand as near to their lines as they can
        places = isotonic_regression(np.log([found[name][-1] for name in equal]) - gaps).x + gaps
        places = np.maximum(places, math.log(0.84) + gaps)
        if "bidirectional_ring" in found:  # the longest label that may come
            ax.text(sizes[-1] * 1.4, 1, "ring = bidirectional ring", alpha=0)
        for (name, names), place in zip(equal.items(), places, strict=True):
            values, color = found[name], COLORS[name]
            wins = np.where(values <= 1.01 * least, values, np.nan)
            ax.plot(sizes, wins, "o-", color=color, linewidth=4, markersize=5)
            ax.plot(sizes, values, color=color, linewidth=1)
            ax.text(sizes[-1] * 1.4, math.exp(place), " = ".join(names), color=color, va="center")
        times = [tick for tick in (1, 3, 10, 30, 100) if tick < top]
        ax.set(xscale="log", yscale="log", xlabel="size of the array", ylabel=ylabel)
        ax.set(xlim=(sizes[0] / 1.3, sizes[-1]), ylim=(0.8, top), yticks=times, yticklabels=times)
        ticks = [size for size in 2.0 ** np.arange(10, 31, 5) if size >= sizes[0]]
        ax.set_xticks(ticks, [show_bytes(size) for size in ticks])
        ax.minorticks_off()
        named = (f"{controls[name].label}: {value}" for name, value in chosen.items())
        ax.set_title(", ".join(named))

    def caption(**chosen: Any) -> str:
        found = ratios(**chosen)
        times = np.array([*found.values()])
        first = times <= 1.01 * times.min(0)  # (algorithms, sizes)
        changes = [i for i in range(len(sizes)) if i == 0 or (first[:, i] != first[:, i - 1]).any()]
        winners = [[spoken(name) for name, wins in zip(found, first[:, i], strict=True) if wins] for i in changes]
        said = ", ".join(f"{' = '.join(w)} from {show_bytes(sizes[i])}" for w, i in zip(winners, changes, strict=True))
        return f"Fastest within 1 % (thick): {said}. The highest line reaches {times.max():.3g}."

    widgets.explore_axes(paint, alt=caption, **controls)


# Section 3


def _ends(wire: str) -> tuple[int, int] | None:
    """The two ends of a wire, as indices of `PLACES`, the smaller one first; None for what lies inside a path."""
    ends = sorted(map(int, re.findall(r"\d+", wire)))
    if "→" in wire:
        return (8, 9) if "QPI" in wire else tuple(ends)
    return None if "switch" in wire else (ends[0], 8 + ends[0] // 4)


def wires(busy: Mapping[tuple[str, str, str], Sequence[Mapping[str, float]]]) -> None:
    """Explore how many seconds each wire is busy in each round: by wiring, algorithm and order of the ranks."""

    def paint(left: Axes, right: Axes, wiring: str, algorithm: str, order: str, number: int) -> None:
        of_rounds, places = busy[wiring, algorithm, order], PLACES[wiring]
        most = max(max(one.values()) for key in busy if key[:2] == (wiring, algorithm) for one in busy[key])
        now, ring = (number - 1) % len(of_rounds) + 1, wiring == "a ring"
        wired = [(a, b) for b in range(8) for a in range(b) if (b - a in (1, 7) if ring else a // 4 == b // 4)]
        load = dict.fromkeys(wired + [(a, a + 4) for a in range(4) if not ring], 0.0)
        for wire, seconds in of_rounds[now - 1].items():
            if ends := _ends(wire):
                load[ends] = max(load.get(ends, 0.0), seconds)
        for (a, b), seconds in load.items():
            line = {"color": figures.RED if seconds else "0.85", "linewidth": 1.2 + 9 * seconds / most}
            left.plot(*zip(places[a], places[b], strict=True), solid_capstyle="round", **line)
        for worker, (x, y) in enumerate(places):
            if worker < 8 or any(worker in ends for ends, seconds in load.items() if seconds):
                text, color = (str(worker), figures.BLUE) if worker < 8 else ("host", figures.GREY)
                box = {"boxstyle": "circle" if worker < 8 else "round", "facecolor": color, "edgecolor": "none"}
                left.text(x, y, text, color="white", ha="center", va="center", bbox=box)
        heights = [1e3 * max(one.values()) for one in of_rounds]
        colors = [figures.RED if i == now - 1 else figures.GREY for i in range(len(heights))]
        right.bar(ticks := range(1, 1 + len(heights)), heights, color=colors)
        right.set(xlim=(0.4, len(heights) + 0.6), xticks=ticks, xlabel="round", ylabel="busiest wire (ms)")
        left.set(xlim=(-0.4, 3.4), ylim=(-11, 14), title=f"round {now} of {len(of_rounds)}: {heights[now - 1]:.2g} ms")
        left.axis("off")
        right.set_title(f"{spoken(algorithm)} on {wiring}")

    def caption(wiring: str, algorithm: str, order: str, number: int) -> str:
        of_rounds = busy[wiring, algorithm, order]
        now, total = (number - 1) % len(of_rounds) + 1, 1e3 * sum(max(one.values()) for one in of_rounds)
        name = spoken(algorithm).capitalize()
        return f"{name} on {wiring}, ranks {order}, round {now}; all rounds take {total:.3g} ms."

    def menu(label: str, place: int, start: str | None = None) -> widgets.Control:
        return widgets.menu(label, list(dict.fromkeys(key[place] for key in busy)), start)

    number = widgets.player("round", range(1, max(map(len, busy.values())) + 1), 3, interval=700)
    chosen = {"wiring": menu("wiring", 0, "DGX-1"), "algorithm": menu("algorithm", 1, "ring")}
    chosen |= {"order": menu("ranks", 2), "number": number}
    widgets.explore_axes(paint, alt=caption, columns=2, height=3.3, **chosen)
