"""Figures and explorers of 06_sparsity and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from dlscale import sparsity
from dlscale.course.records import Record
from dlscale.page import figures, widgets
from dlscale.page.curves import curves

COLORS = matplotlib.colormaps["RdBu_r"].with_extremes(bad="black")
PRODUCTS = {"forward": figures.BLUE, "weight gradient": figures.ORANGE, "input error": figures.RED}
PIECES = {"weight": figures.RED, "vector": figures.BLUE, "kernel": figures.GREEN, "filter": figures.BLACK}
PIECES["block"] = figures.PINK


def mosaic(tiles: np.ndarray, columns: int) -> np.ndarray:
    """Tiles (count, height, width) as one picture, with a gap between them; NaN stays NaN."""
    framed = np.pad(tiles, ((0, 0), (0, 1), (0, 1)))
    return np.vstack([np.hstack(framed[i : i + columns]) for i in range(0, len(framed), columns)])


def _percent_axis(ax: Axes, densities: Sequence[float]) -> None:
    """A logarithmic axis of per cent with a tick for each density."""
    ax.set(xscale="log", xlabel="density (%)")
    ax.set_xticks(100 * np.array(densities), [f"{100 * density:g}" for density in densities])
    ax.minorticks_off()


def opening(record: Record) -> None:
    """Test accuracy of three runs of `sparsity-ways`, a bar and a mark for each seed."""
    arms = {"all weights": ("not at all", "global", 1.0), "1 % of each layer": ("gradually", "uniform", 0.01)}
    arms["1 %, but 4 % of the last layer"] = "gradually", "last layer × 4", 0.01
    figure, ax = figures.new(height=2.2)
    said = []
    for place, (label, (way, allocation, density)) in enumerate(arms.items()):
        accuracy = record.values("accuracy", way=way, allocation=allocation, density=density, judged_on="test")
        ax.barh(label, accuracy.mean(), color=figures.RED if place == 1 else figures.SKY)
        ax.plot(accuracy, np.full(len(accuracy), place), "|", color=figures.BLACK)
        said.append(f"{label}: {accuracy.mean():.0f} % of the test digits right")
    ax.set(xlim=(0, 100), ylim=(2.5, -0.5), xlabel="test accuracy (%), one mark per seed")
    figures.show(figure, "; ".join(said))


# Section 1


def pruning(weights: np.ndarray, accuracies: Mapping[str, np.ndarray], densities: Sequence[float]) -> None:
    """Explore the density: `weights` (196 pixels, units) of a network; accuracies, (seeds, densities), in per cent."""
    sizes = np.sort(np.abs(weights).ravel())

    def paint(left: Axes, middle: Axes, right: Axes, density: float) -> None:
        smallest = sizes[-round(density * sizes.size)] if density < 1 else 0.0
        left.hist(weights.ravel(), np.linspace(-0.5, 0.5, 51), color=figures.BLUE)
        left.axvspan(-smallest, smallest, color=figures.GREY, alpha=0.5, linewidth=0)
        left.set(xlim=(-0.5, 0.5), xticks=[-0.5, 0, 0.5], title="grey: pruned")
        left.set(xlabel="weight, first layer", ylabel="number of weights")
        kept = np.where(np.abs(weights) >= smallest, weights, np.nan)
        middle.imshow(mosaic(kept.T[:16].reshape(16, 14, 14), 4), cmap=COLORS, vmin=-0.5, vmax=0.5)
        middle.set_title("16 units: red +, blue −,\nblack: pruned")
        middle.axis("off")
        drawn = zip(accuracies.items(), (figures.BLUE, figures.RED), (98, 88), strict=True)
        for (name, samples), color, place in drawn:
            figures.band(right, 100 * np.array(densities), samples, color)
            right.text(1, place, name, color=color, va="bottom")
        right.axvline(100 * density, color=figures.BLACK, linewidth=1)
        _percent_axis(right, [0.01, 0.1, 0.5, 1])
        right.set(ylabel="test accuracy (%)", ylim=(0, 108))

    def caption(density: float) -> str:
        reached = {name: samples[:, densities.index(density)].mean() for name, samples in accuracies.items()}
        said = " and ".join(f"{value:.0f} % if weights are pruned {name}" for name, value in reached.items())
        return f"Density {100 * density:g} %. Five networks reach a mean test accuracy of {said}."

    widgets.explore_axes(paint, columns=3, alt=caption, density=widgets.slider("density", densities, 0.5, "{:.0%}"))


# Section 2


def pairs() -> None:
    """Explore which multiplications of a layer with six inputs and four outputs are needed."""
    inputs, outputs = 6, 4

    def paint(*axes: Axes, zeros: int, errors: int) -> None:
        for ax, product in zip(axes, PRODUCTS, strict=True):
            nonzero = np.arange(outputs) >= (0 if product == "forward" else errors)
            ax.imshow(np.outer(np.arange(inputs) >= zeros, nonzero), cmap="Blues", vmin=-0.1, vmax=1.4)
            ax.set_xticks(range(outputs), [f"$z_{i + 1}$" for i in range(outputs)])
            ax.set_yticks(range(inputs), [f"$x_{i + 1}$" for i in range(inputs)])
            ax.set(xlabel="output", title=product)
            ax.grid(False)
            ax.hlines(np.arange(inputs) - 0.5, -0.5, outputs - 0.5, color="white", linewidth=3)
            ax.vlines(np.arange(outputs) - 0.5, -0.5, inputs - 0.5, color="white", linewidth=3)
        axes[0].set_ylabel("input")

    def caption(zeros: int, errors: int) -> str:
        forward, pair = (inputs - zeros) * outputs, (inputs - zeros) * (outputs - errors)
        return (
            f"{zeros} of {inputs} inputs and {errors} of {outputs} errors are zero. Needed (blue): {forward} of "
            f"{inputs * outputs} multiplications in the forward product, {pair} in each of the other two."
        )

    zeros = widgets.slider("inputs that are zero", range(inputs + 1), 2)
    errors = widgets.slider("errors that are zero", range(outputs + 1), 3)
    widgets.explore_axes(paint, columns=3, alt=caption, height=2.9, zeros=zeros, errors=errors)


def zeros(shares: Mapping[str, Mapping[str, np.ndarray]], steps: Sequence[int]) -> None:
    """Zeros in per cent by direction and layer, (steps,), through training."""
    figure, axes = figures.new(2, height=3.0)
    for ax, (direction, layers) in zip(axes, shares.items(), strict=True):
        drawn = zip(layers.items(), (figures.BLUE, figures.RED, figures.GREEN, figures.ORANGE), strict=True)
        figures.names(ax, {n: ax.plot(steps, share, color=hue)[0] for (n, share), hue in drawn}, gap=6)
        ax.set(xlim=(0, 1.35 * steps[-1]), ylim=(0, 100), xlabel="step", ylabel="zeros (%)", title=direction)
    ends = (f"{direction}, {n} {share[-1]:.0f} %" for direction, of in shares.items() for n, share in of.items())
    figures.show(figure, f"Zeros after step {steps[-1]}: {'; '.join(ends)}.")


def needed(shares: np.ndarray, counts: np.ndarray, layers: Sequence[str]) -> None:
    """Per cent of the multiplications that are needed, (layers, products), and how many there are for a digit."""
    figure, ax = figures.new(height=2.9)
    for i, (product, color) in enumerate(PRODUCTS.items()):
        there = np.flatnonzero(counts[:, i])
        ax.bar(there + 0.27 * (i - 1), [100] * len(there), 0.25, color="white", edgecolor=figures.GREY)
        ax.bar(there + 0.27 * (i - 1), shares[there, i], 0.25, color=color)
        ax.text((-0.4, 0.2, 1.25)[i], 108, product, color=color)
    ax.set_xticks(range(len(layers)), [f"{n}\n{c:,.0f}" for n, c in zip(layers, counts.sum(1), strict=True)])
    ax.text(0.27, 3, "no error", color=figures.RED, ha="center", rotation=90)
    ax.set(xlabel="layer, and its multiplications for one digit", ylabel="needed (%)", ylim=(0, 122))
    ax.set(yticks=range(0, 101, 25), title=f"white: not needed, {100 - (shares * counts).sum() / counts.sum():.0f} %")
    total = [f"{n} {(s * c).sum() / c.sum():.0f} %" for n, s, c in zip(layers, shares, counts, strict=True)]
    figures.show(figure, f"Multiplications that are needed after training: {', '.join(total)}.")


# Section 3


def when(reached: Mapping[str, np.ndarray], densities: Sequence[float], schedules: Mapping[str, Callable]) -> None:
    """Explore the final density: when weights go, by step and density, and accuracies (densities, seeds, epochs)."""
    steps = np.arange(0, 361)  # a new mask in every 30th step

    def paint(left: Axes, right: Axes, final: float) -> None:
        for i, ((name, samples), color) in enumerate(zip(reached.items(), (figures.RED, figures.BLUE), strict=True)):
            left.plot(steps, 100 * (final + (1 - final) * schedules[name](steps // 30 * 30)), color=color)
            figures.band(right, range(60, 361, 60), samples[densities.index(final)], color, marker="o", markersize=4)
            right.text(0.97, 0.16 - 0.1 * i, name, color=color, transform=right.transAxes, ha="right")
        left.set(xlabel="step", ylabel="density (%)", xlim=(0, 370), ylim=(0, 104))
        right.set(xlabel="step", ylabel="test accuracy (%)", xlim=(0, 370), ylim=(0, 100))

    def caption(final: float) -> str:
        ends = {name: samples[densities.index(final), :, -1].mean() for name, samples in reached.items()}
        said = ", ".join(f"{name} {value:.0f} %" for name, value in ends.items())
        return f"Pruned to {100 * final:g} %. Test accuracy at the end, mean of five networks: {said}."

    final = widgets.slider("final density", densities, densities[1], "{:.0%}")
    widgets.explore_axes(paint, columns=2, alt=caption, final=final)


def where(masks: Mapping[int, np.ndarray], accuracies: np.ndarray, per_cent: Sequence[int]) -> None:
    """Kept weights of the last layer (units, classes) at two of its densities, and accuracies (densities, seeds)."""
    figure, (*grids, right) = figures.new(3, height=3.0)
    said = []
    for ax, (density, kept) in zip(grids, masks.items(), strict=True):
        ax.imshow(kept.T, cmap="Greys", vmin=0, vmax=1, aspect="auto")
        ax.set(xlabel="hidden unit", yticks=range(10), title=f"last layer, {density} % kept")
        ax.grid(False)
        said.append(f"With {density} % of the last layer, {(kept.sum(0) == 0).sum()} of 10 classes have no weight.")
    grids[0].set_ylabel("class")
    figures.band(right, per_cent, accuracies.T, figures.TEST, marker="o")
    right.set(xscale="log", xlabel="kept of the last layer (%)", ylabel="test accuracy (%)", ylim=(0, 100))
    right.set_xticks(per_cent, per_cent)
    right.minorticks_off()
    reached = ", ".join(f"{d} %: {a:.0f} %" for d, a in zip(per_cent, accuracies.mean(1), strict=True))
    figures.show(figure, f"{' '.join(said)} Mean test accuracy by what the last layer keeps: {reached}.")


# Section 4


def times(ratios: Mapping[str, Mapping[float, float]], break_even: Callable[[str], float | None]) -> None:
    """The time of sparse products, by kind and density, in times of the dense one."""
    figure, ax = figures.new(height=3.6)
    said = []
    colors = figures.RED, figures.ORANGE, figures.GREEN
    for (kind, ratio), color, shift in zip(ratios.items(), colors, (-1, 4, -5), strict=True):
        (line,) = ax.plot(100 * np.array([*ratio]), [*ratio.values()], "o-", color=color)
        figures.name(ax, line, kind, shift)
        if place := break_even(kind):
            ax.plot(100 * place, 1, "D", color=color, markersize=9)
        said.append(f"{kind}, at {100 * place:.2g} %" if place else f"{kind}, at no density")
    ax.plot([1, 100], [0.01, 1], "--", color=figures.GREY)
    ax.text(22, 0.13, "multiplications", color=figures.GREY)
    ax.plot([0.8, 100], [1, 1], color=figures.BLACK, linewidth=1)
    ax.text(0.95, 1.15, "dense product", color=figures.BLACK)
    _percent_axis(ax, [0.01, 0.03, 0.1, 0.3, 1])
    ax.set(yscale="log", ylabel="time / time of the dense product", xlim=(0.8, 330))
    ax.set_yticks([0.01, 0.1, 1, 10], [0.01, 0.1, 1, 10])
    figures.show(figure, f"As fast as the dense product (diamonds): {'; '.join(said)}.")


# The further notebook


def pieces(kernel: np.ndarray, densities: Sequence[float]) -> None:
    """Explore what is left of a convolution (height, width, in, out) pruned by pieces, and the bits it takes."""
    side, _, shown, columns = kernel.shape  # as many outputs are shown as there are inputs

    def bits(keep: np.ndarray, piece: str) -> dict[str, float]:
        stored = {f"+ {n}": sparsity.stored_bits(keep, n, piece, 16) / kernel.size for n in ("bitmap", "relative")}
        return {"all values": 16, "kept values": 16 * keep.mean()} | stored

    def paint(left: Axes, right: Axes, piece: str, density: float) -> None:
        keep = np.asarray(sparsity.mask(kernel, density, piece))
        tiles = np.where(keep == 0, np.nan, kernel)[..., :shown].transpose(2, 3, 0, 1)
        left.imshow(mosaic(tiles.reshape(-1, side, side), shown), cmap=COLORS, vmin=-0.3, vmax=0.3)
        left.set(title=f"each square: a {side} × {side} kernel\nblack: pruned; red +, blue −", xticks=[], yticks=[])
        left.set(xlabel=f"output channel ({shown} of {columns})", ylabel="input channel")
        left.grid(False)
        bars = right.bar(*zip(*bits(keep, piece).items(), strict=True), color=[figures.GREY] * 2 + [figures.BLUE] * 2)
        right.bar_label(bars, fmt="%.1f")
        right.tick_params(axis="x", labelsize=9)
        right.set(ylim=(0, 22), yticks=range(0, 21, 5), ylabel="bits per weight")

    def caption(piece: str, density: float) -> str:
        keep = np.asarray(sparsity.mask(kernel, density, piece))
        said = ", ".join(f"{name} {b:.1f}" for name, b in bits(keep, piece).items())
        return f"Pruned by {piece}s to {100 * keep.mean():.0f} %. Bits per weight: {said}."

    piece = widgets.menu("pieces", [*PIECES], "block")
    density = widgets.slider("density", densities, 0.25, "{:.0%}")
    widgets.explore_axes(paint, columns=2, alt=caption, piece=piece, density=density)


def stored(accuracies: Mapping[str, np.ndarray], sizes: Callable[[str, int, str], np.ndarray], dense: float) -> None:
    """Explore accuracy, (densities, seeds), by kilobytes of storage, (densities,), for each kind of pieces."""

    def compute(bits: int, encoding: str) -> dict[str, tuple]:
        lines = {piece: (sizes(piece, bits, encoding), samples.mean(1)) for piece, samples in accuracies.items()}
        return lines | {"dense": ((0.1, 15), (dense, dense))}

    def caption(bits: int, encoding: str) -> str:
        at = {p: np.interp(0, np.log(sizes(p, bits, encoding)), a.mean(1), left=np.nan) for p, a in accuracies.items()}
        said = ", ".join(f"{p} {value:.1f} %" for p, value in at.items() if np.isfinite(value))
        return f"Values of {bits} bits, {encoding} index. Accuracy with one kilobyte: {said}; dense {dense:.1f} %."

    marked = zip(PIECES.items(), "os^Dv", strict=True)
    styles = {piece: (color, f"{mark}-") for (piece, color), mark in marked} | {"dense": (figures.GREY, "--")}
    axis = {"xscale": "log", "xlim": (0.1, 15), "xticks": (0.1, 0.2, 0.5, 1, 2, 5, 10), "ylim": (89, dense + 0.6)}
    axis |= {"xlabel": "stored kilobytes", "ylabel": "test accuracy (%)"}
    bits = widgets.slider("bits of a value", [2, 4, 8, 16, 32], 8)
    encoding = widgets.menu("index", ["relative", "bitmap"])
    curves(styles, compute, caption, axis, corner=(0.98, 0.5), height=3.8, bits=bits, encoding=encoding)


def recurrent(errors: Mapping[str, Mapping[int, np.ndarray]], small: int) -> None:
    """Test errors, (seeds,) in per cent, of two networks by their number of parameters."""
    figure, ax = figures.new(height=3.2)
    drawn = zip(errors.items(), (figures.BLUE, figures.RED), ((420, 9), (1400, 22)), strict=True)
    for (name, samples), color, place in drawn:
        figures.band(ax, [*samples], np.transpose([*samples.values()]), color, marker="o", markersize=4)
        ax.text(*place, name, color=color)
    ax.axvline(small, color=figures.GREY, linestyle="--", linewidth=1)
    ax.text(1.04 * small, 60, "all parameters\nof the small net", color=figures.GREY, va="center")
    ax.set(xscale="log", yscale="log", ylim=(3.5, 90), xlabel="parameters left", ylabel="test error (%)")
    ax.set_xticks([300, 1000, 3000, 10000, 20000], ["300", "1,000", "3,000", "10,000", "20,000"])
    ax.set_yticks([5, 10, 20, 50], [5, 10, 20, 50])
    ax.minorticks_off()
    said = (f"{name} {samples[small].mean():.1f} %" for name, samples in errors.items())
    figures.show(figure, f"Test errors with {small:,} parameters: {', '.join(said)}.")


def connections(maps: Mapping[str, np.ndarray]) -> None:
    """How many connections lead from each pixel, for each network: counts (14, 14)."""
    figure, axes = figures.new(len(maps), height=3.1)
    top = max(counts.max() for counts in maps.values())
    middle = {name: f"{100 * counts[3:11, 3:11].sum() / counts.sum():.0f} %" for name, counts in maps.items()}
    for ax, (name, counts) in zip(axes, maps.items(), strict=True):
        ax.imshow(counts, cmap="cividis", vmin=0, vmax=top)
        ax.set(title=name, xlabel=f"{middle[name]} in the middle")
        ax.set(xticks=[], yticks=[], frame_on=False)
    figure.supxlabel("each square is a pixel; yellow: many connections, blue: few", fontsize="medium")
    said = ", ".join(f"{name} {share}" for name, share in middle.items())
    figures.show(figure, f"Brighter: more connections. Share of the middle 8 × 8 pixels: {said}.")
