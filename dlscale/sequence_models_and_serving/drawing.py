"""Figures and explorers of 13_sequence_models_and_serving: a line in the notebook calls each."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from dlscale.course.records import Record
from dlscale.page import figures, widgets
from dlscale.sequence_models_and_serving import sequence

NAMES = ["blank", *sequence.SYMBOLS]
COLORS = [figures.GREY, figures.RED, figures.BLUE, figures.SKY, figures.GREEN, figures.ORANGE, figures.BLACK]


# Section 1


def by_threads(record: Record) -> None:
    """Milliseconds of 64 steps in three ways, with one, two and four threads."""
    figure, ax = figures.new(height=2.8)
    labels = {"chain": "chain: each needs the one before", "loop": "loop: independent steps", "product": "one product"}
    threads, said = (1, 2, 4), []
    for (name, label), color, shift in zip(labels.items(), COLORS[1::4] + COLORS[2:3], (7, -7, 0), strict=True):
        ms = np.transpose([1e3 * 2 ** record.values(name, threads=count) for count in threads])
        figures.name(ax, figures.band(ax, threads, ms, color, marker="o"), label, shift)
        said.append(f"{name} {', '.join(f'{mean:.1f}' for mean in ms.mean(0))} ms")
    ax.set(xlabel="threads", ylabel="time (ms)", xscale="log", xlim=(0.9, 16), ylim=(0, None))
    ax.set_xticks(threads, [str(count) for count in threads])
    ax.minorticks_off()
    figures.show(figure, f"64 steps with 1, 2 and 4 threads: {'; '.join(said)}.")


def processors(counts: Mapping[tuple[str, int], tuple[int, int]]) -> None:
    """Explore how many processors help: (work, depth) by program and length of the sequence."""
    many = np.logspace(0, 6, 61)
    colors = {"recurrent": figures.RED, "linear": figures.BLUE}

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        ax.set(xscale="log", yscale="log", xlabel="processors", ylabel="time steps", xlim=(1, 1e6), ylim=(10, 1e8))
        lines = {name: ax.plot(many, many, color=color)[0] for name, color in colors.items()}
        texts = {name: ax.text(4e4, 1, name, color=color, va="bottom") for name, color in colors.items()}

        def update(length: int) -> list[Artist]:
            for name, line in lines.items():
                work, depth = counts[name, length]
                line.set_ydata(work / many + depth)
                texts[name].set_y(1.15 * (work / 4e4 + depth))
            return [*lines.values(), *texts.values()]

        return update

    def caption(length: int) -> str:
        parts = ("{}: {:,} operations, depth {:,}".format(name, *counts[name, length]) for name in colors)
        return f"{length} steps of 64 neurons. {'; '.join(parts)}."

    lengths = sorted({length for _, length in counts})
    widgets.explore(make, alt=caption, length=widgets.slider("steps of the sequence", lengths, lengths[-1]))


# Sections 2 and 3


def lattice(alpha: np.ndarray, beta: np.ndarray, gamma: np.ndarray, names: Sequence[str]) -> None:
    """Explore the tables of forward–backward, each (frames, states): where is the path at a frame?"""
    shares = {"before: α": alpha, "after: β": beta, "both: γ": gamma}
    shares = {name: table / table.sum(1, keepdims=True) for name, table in shares.items()}
    colors = (figures.SKY, figures.RED, figures.BLACK)

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2, width_ratios=[2, 1])
        extent = (0.5, len(gamma) + 0.5, len(names) - 0.5, -0.5)
        left.imshow(shares["both: γ"].T, aspect="auto", cmap="cividis", vmin=0, vmax=1, extent=extent)
        now, bars = left.axvline(1, color=figures.ORANGE, linewidth=2.5), []
        for i, (name, color) in enumerate(zip(shares, colors, strict=True)):
            bars += right.barh(np.arange(len(names)) + 0.27 * (i - 1), 0, 0.25, color=color)
            right.text(0.98, 0.9 - 0.09 * i, name, color=color, transform=right.transAxes, ha="right")
        for ax in (left, right):
            ax.set_yticks(range(len(names)), names)
        left.set(xlabel="frame", ylabel="state", title="γ: bright is probable")
        left.grid(False)
        right.set(xlim=(0, 1.05), xlabel="share at this frame", ylim=(len(names) - 0.4, -0.6))

        def update(frame: int) -> list[Artist]:
            now.set_xdata([frame, frame])
            for bar, share in zip(bars, np.concatenate([table[frame - 1] for table in shares.values()]), strict=True):
                bar.set_width(share)
            return [now, *bars]

        return update

    def caption(frame: int) -> str:
        place = {name: int(table[frame - 1].argmax()) for name, table in shares.items()}
        said = (f"{name[-1]} says {state} ({names[state]})" for name, state in place.items())
        return f"Frame {frame}, most probable state: {', '.join(said)}."

    widgets.explore(make, alt=caption, frame=widgets.player("frame", range(1, len(gamma) + 1), 9))


def learning(looks: Mapping[int, np.ndarray], frames: int, word: str) -> None:
    """Explore the training: the probabilities of each class, (frames, classes), after some numbers of steps."""

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        lines = [ax.plot(0.02 * np.arange(frames), np.zeros(frames), color=color)[0] for color in COLORS]
        lines[0].set_linestyle(":")
        for place, name in enumerate(NAMES):
            at = 0.09 * place + 0.04 * (place > 0), 1.02
            ax.text(*at, name, color=COLORS[place], transform=ax.transAxes, weight="bold")
        ax.set(xlabel="time (s)", ylabel="probability", ylim=(0, 1.05), xlim=(0, 0.02 * frames))

        def update(steps: int) -> list[Artist]:
            for line, values in zip(lines, looks[steps].T, strict=True):
                line.set_ydata(values[:frames])
            return lines

        return update

    def caption(steps: int) -> str:
        path = looks[steps][:frames].argmax(1)
        heard = sequence.spelled(sequence.collapse(path))
        blank = f"{100 * np.mean(path == 0):.0f} % of the frames are blank."
        return f"After {steps} steps: “{word}” is heard as “{heard}”. {blank}"

    widgets.explore(make, alt=caption, height=3.0, steps=widgets.player("training steps", [*looks], [*looks][-1]))
