"""Figures and explorers of 06_sparsity and its further notebook: a line in the notebook calls each."""

from collections.abc import Callable, Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlscale import sparsity
from dlscale.course.records import Record
from dlscale.page import figures, widgets

COLORS = matplotlib.colormaps["RdBu_r"].with_extremes(bad="black")
PRODUCTS = {"forward": figures.BLUE, "weight gradient": figures.ORANGE, "input error": figures.RED}
PIECES = {"weight": figures.RED, "vector": figures.BLUE, "kernel": figures.GREEN, "filter": figures.BLACK}
PIECES |= {"block": figures.ORANGE, "2:4": figures.PINK}


def mosaic(tiles: np.ndarray, columns: int) -> np.ndarray:
    """Tiles (count, height, width) as one picture, with a gap between them; NaN stays NaN."""
    framed = np.pad(tiles, ((0, 0), (0, 1), (0, 1)))
    return np.vstack([np.hstack(framed[i : i + columns]) for i in range(0, len(framed), columns)])


def _percent_axis(ax: Axes, densities: Sequence[float], label: str = "density (%)") -> None:
    """A logarithmic axis of per cent with a tick for each density."""
    ax.set(xscale="log", xlabel=label)
    ax.set_xticks(100 * np.array(densities), [f"{100 * density:g}" for density in densities])
    ax.minorticks_off()


def opening(record: Record) -> None:
    """Test accuracy of three runs of `sparsity-ways`, a bar and a mark for each seed."""
    arms = {
        "all weights": ("not at all", "global", 1.0),
        "1 % of each layer": ("gradually", "uniform", 0.01),
        "1 %, but 4 % of the last layer": ("gradually", "last layer × 4", 0.01),
    }
    names = ("way", "allocation", "density")
    figure, ax = figures.new(height=2.2)
    said = []
    for place, (label, arm) in enumerate(arms.items()):
        accuracy = record.values("accuracy", **dict(zip(names, arm, strict=True)), judged_on="test")
        ax.barh(place, accuracy.mean(), color=figures.RED if place == 1 else figures.SKY)
        ax.plot(accuracy, np.full(len(accuracy), place), "|", color=figures.BLACK)
        said.append(f"{label}: {accuracy.mean():.0f} % of the test digits right")
    ax.set(xlim=(0, 100), ylim=(2.5, -0.5), xlabel="test accuracy (%), one mark per seed")
    ax.set_yticks(range(3), list(arms))
    figures.show(figure, "; ".join(said))


# Section 1


def pruning(weights: np.ndarray, accuracies: Mapping[str, np.ndarray], densities: Sequence[float]) -> None:
    """Explore the density: `weights` (196 pixels, units) of a network; accuracies, (seeds, densities), in per cent."""
    sizes = np.sort(np.abs(weights).ravel())

    def threshold(density: float) -> float:
        return sizes[-round(density * sizes.size)] if density < 1 else 0.0

    def filters(density: float) -> np.ndarray:
        kept = np.where(np.abs(weights) >= threshold(density), weights, np.nan)
        return mosaic(kept.T[:16].reshape(16, 14, 14), 4)

    def make(fig: Figure) -> widgets.Update:
        left, middle, right = figures.axes(fig, 3)
        counts, *_ = left.hist(weights.ravel(), np.linspace(-0.5, 0.5, 51), color=figures.BLUE)
        cut = left.axvspan(0, 0, color=figures.GREY, alpha=0.5, linewidth=0)
        left.set(xlim=(-0.5, 0.5), ylim=(0, 1.1 * counts.max()), xticks=[-0.5, 0, 0.5], title="grey: pruned")
        left.set(xlabel="weight, first layer", ylabel="number of weights")
        picture = middle.imshow(filters(1.0), cmap=COLORS, vmin=-0.5, vmax=0.5)
        middle.set_title("16 units; black: pruned")
        middle.axis("off")
        for (name, samples), color, place in zip(
            accuracies.items(), (figures.BLUE, figures.RED), (98, 88), strict=True
        ):
            figures.band(right, 100 * np.array(densities), samples, color)
            right.text(1, place, name, color=color, va="bottom")
        here = right.axvline(100, color=figures.BLACK, linewidth=1)
        _percent_axis(right, [0.01, 0.1, 0.5, 1])
        right.set(ylabel="test accuracy (%)", ylim=(0, 108))

        def update(density: float) -> list[Artist]:
            cut.set(x=-threshold(density), width=2 * threshold(density))
            picture.set_data(filters(density))
            here.set_xdata([100 * density] * 2)
            return [cut, picture, here]

        return update

    def caption(density: float) -> str:
        reached = {name: samples[:, densities.index(density)].mean() for name, samples in accuracies.items()}
        said = " and ".join(f"{value:.0f} % if weights are pruned {name}" for name, value in reached.items())
        return f"Density {100 * density:g} %. Five networks reach a mean test accuracy of {said}."

    widgets.explore(make, alt=caption, density=widgets.slider("density", densities, 0.5, "{:.0%}"))


# Section 2


def pairs() -> None:
    """Explore which multiplications of a layer with six inputs and four outputs are needed."""
    inputs, outputs = 6, 4

    def make(fig: Figure) -> widgets.Update:
        axes = figures.axes(fig, 3)
        grids = [ax.imshow(np.zeros((inputs, outputs)), cmap="Blues", vmin=-0.1, vmax=1.4) for ax in axes]
        edges = []
        for ax, product in zip(axes, PRODUCTS, strict=True):
            ax.set(xticks=range(outputs), yticks=range(inputs), xlabel="output", title=product)
            ax.set(xticklabels=[f"$z_{i + 1}$" for i in range(outputs)])
            ax.set(yticklabels=[f"$x_{i + 1}$" for i in range(inputs)])
            ax.grid(False)
            edges.append(ax.hlines(np.arange(inputs) - 0.5, -0.5, outputs - 0.5, color="white", linewidth=3))
            edges.append(ax.vlines(np.arange(outputs) - 0.5, -0.5, inputs - 0.5, color="white", linewidth=3))
        axes[0].set_ylabel("input")

        def update(zeros: int, errors: int) -> list[Artist]:
            for grid, product in zip(grids, PRODUCTS, strict=True):
                alive = np.arange(inputs) >= zeros
                both = np.outer(alive, np.arange(outputs) >= (0 if product == "forward" else errors))
                grid.set_data(both)
            return [*grids, *edges]

        return update

    def caption(zeros: int, errors: int) -> str:
        forward, pair = (inputs - zeros) * outputs, (inputs - zeros) * (outputs - errors)
        return (
            f"{zeros} of {inputs} inputs and {errors} of {outputs} errors are zero. Needed (blue): {forward} of "
            f"{inputs * outputs} multiplications in the forward product, {pair} in each of the other two."
        )

    zeros = widgets.slider("inputs that are zero", range(inputs + 1), 2)
    widgets.explore(
        make, alt=caption, height=2.9, zeros=zeros,
        errors=widgets.slider("errors that are zero", range(outputs + 1), 3),
    )  # fmt: skip


def zeros(shares: Mapping[str, Mapping[str, np.ndarray]], maps: Mapping[str, np.ndarray], steps: Sequence[int]) -> None:
    """Explore zeros through training: per cent by direction and layer, (steps,), and six maps of a digit at each."""
    hues = (figures.BLUE, figures.RED, figures.GREEN, figures.ORANGE)

    def tiles(direction: str, step: int) -> np.ndarray:
        values = maps[direction][steps.index(step)]
        return mosaic(np.where(values == 0, np.nan, values / np.abs(values).max()), 3)

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        here = left.axvline(0, color=figures.GREY, linewidth=1)
        left.set(xlim=(0, 1.3 * steps[-1]), ylim=(0, 100), xlabel="step", ylabel="zeros (%)")
        picture = right.imshow(tiles(next(iter(maps)), steps[0]), cmap=COLORS, vmin=-1, vmax=1)
        right.set_title("one digit in conv1; black: zero")
        right.axis("off")

        def update(direction: str, step: int) -> None:
            for artist in [*left.lines[1:], *left.texts]:
                artist.remove()
            drawn = zip(shares[direction].items(), hues, strict=True)
            figures.names(left, {n: left.plot(steps, share, color=hue)[0] for (n, share), hue in drawn}, gap=6)
            here.set_xdata([step, step])
            picture.set_data(tiles(direction, step))

        return update

    def caption(direction: str, step: int) -> str:
        said = ", ".join(f"{name} {share[steps.index(step)]:.0f} %" for name, share in shares[direction].items())
        return f"Zeros after step {step}, {direction}: {said}."

    step = widgets.slider("step", steps, steps[-1])
    widgets.explore(make, alt=caption, direction=widgets.menu("direction", [*shares]), step=step)


def needed(shares: np.ndarray, counts: np.ndarray, layers: Sequence[str]) -> None:
    """Per cent of the multiplications that are needed, (layers, products), and how many there are for a digit."""
    figure, ax = figures.new(height=2.9)
    for i, (product, color) in enumerate(PRODUCTS.items()):
        there = np.flatnonzero(counts[:, i])
        ax.bar(there + 0.27 * (i - 1), [100] * len(there), 0.25, color="white", edgecolor=figures.GREY)
        ax.bar(there + 0.27 * (i - 1), shares[there, i], 0.25, color=color)
        ax.text(1 + 1.3 * i, 108, product, color=color, ha="center")
    ax.set_xticks(range(len(layers)), [f"{n}\n{c:,.0f}" for n, c in zip(layers, counts.sum(1), strict=True)])
    ax.set(
        xlabel="layer, and its multiplications for one digit",
        ylabel="needed (%)",
        ylim=(0, 122),
        yticks=range(0, 101, 25),
    )
    total = [f"{n} {(s * c).sum() / c.sum():.0f} %" for n, s, c in zip(layers, shares, counts, strict=True)]
    figures.show(figure, f"Multiplications that are needed after training: {', '.join(total)}.")


# Section 3


def when(curves: Mapping[str, np.ndarray], densities: Sequence[float], schedules: Mapping[str, Callable]) -> None:
    """Explore the final density: when weights go, by step and density, and accuracies (densities, seeds, epochs)."""
    colors = (figures.RED, figures.BLUE)
    steps, epochs = np.arange(0, 361), np.arange(1, 7)  # a new mask in every 30th step

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)

        def update(final: float) -> None:
            for artist in [a for ax in (left, right) for a in [*ax.lines, *ax.collections, *ax.texts]]:
                artist.remove()
            for i, ((name, samples), color) in enumerate(zip(curves.items(), colors, strict=True)):
                left.plot(steps, 100 * (final + (1 - final) * schedules[name](steps // 30 * 30)), color=color)
                figures.band(right, epochs, samples[densities.index(final)], color, marker="o", markersize=4)
                right.text(0.97, 0.16 - 0.1 * i, name, color=color, transform=right.transAxes, ha="right")
            left.set(xlabel="step", ylabel="density (%)", ylim=(0, 104))
            right.set(xlabel="epoch (60 steps)", ylabel="test accuracy (%)", ylim=(0, 100))

        return update

    def caption(final: float) -> str:
        ends = {name: samples[densities.index(final), :, -1].mean() for name, samples in curves.items()}
        said = ", ".join(f"{name} {value:.0f} %" for name, value in ends.items())
        return f"Pruned to {100 * final:g} %. Test accuracy at the end, mean of five networks: {said}."

    widgets.explore(make, alt=caption, final=widgets.slider("final density", densities, densities[1], "{:.0%}"))


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
    """Explore the time of sparse products, by kind and density, in times of the dense one."""
    hues = dict(zip(ratios, (figures.RED, figures.ORANGE, figures.GREEN), strict=True))

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        for kind, ratio in ratios.items():
            (line,) = ax.plot(100 * np.array([*ratio]), [*ratio.values()], "o-", color=hues[kind], alpha=0.4)
            figures.name(ax, line, kind, {0: 5, 1: 4}.get([*ratios].index(kind), -5))
        ax.plot([1, 100], [0.01, 1], "--", color=figures.GREY)
        ax.text(22, 0.13, "multiplications", color=figures.GREY)
        ax.plot([0.8, 100], [1, 1], color=figures.BLACK, linewidth=1)
        ax.text(0.95, 1.15, "dense product", color=figures.BLACK)
        (chosen,) = ax.plot([], [], "o-", linewidth=2.5)
        (even,) = ax.plot([], [], "D", markersize=10)
        _percent_axis(ax, [0.01, 0.03, 0.1, 0.3, 1])
        ax.set(yscale="log", ylabel="time / time of the dense product", xlim=(0.8, 330))
        ax.set_yticks([0.01, 0.1, 1, 10], [0.01, 0.1, 1, 10])

        def update(kind: str) -> list[Artist]:
            chosen.set_data(100 * np.array([*ratios[kind]]), [*ratios[kind].values()])
            place = break_even(kind)
            even.set_data(*([[100 * place], [1]] if place else [[], []]))
            for artist in (chosen, even):
                artist.set_color(hues[kind])
            return [chosen, even]

        return update

    def caption(kind: str) -> str:
        place = break_even(kind)
        found = f"at a density of {100 * place:.2g} % (diamond)" if place else "at none of these densities"
        return f"{kind}: as fast as dense {found}; with all weights it takes {ratios[kind][1.0]:.2g} times as long."

    widgets.explore(make, alt=caption, height=3.8, kind=widgets.menu("pruned", [*ratios]))


# The further notebook


def pieces(kernel: np.ndarray, densities: Sequence[float]) -> None:
    """Explore what is left of a convolution (height, width, in, out) pruned by pieces, and the bits it takes."""
    encodings = ("dense", "bitmap", "relative", "csr")
    side, _, rows, columns = kernel.shape

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2, width_ratios=(3, 2))
        picture = left.imshow(np.zeros((rows * (side + 1), columns * (side + 1))), cmap=COLORS, vmin=-0.3, vmax=0.3)
        left.set(title="kernels; black: pruned", xlabel="output channel", ylabel="input channel", xticks=[], yticks=[])
        left.grid(False)
        bars = right.bar(encodings, [0] * 4, color=[figures.GREY, figures.SKY, figures.BLUE, figures.GREEN])
        texts = [right.text(i, 0, "", ha="center", va="bottom") for i in range(4)]
        right.set(ylim=(0, 24), ylabel="bits per weight")

        def update(piece: str, density: float) -> list[Artist]:
            keep = np.asarray(sparsity.mask(kernel, density, piece))
            tiles = np.where(keep == 0, np.nan, kernel).transpose(2, 3, 0, 1).reshape(-1, side, side)
            picture.set_data(mosaic(tiles, columns))
            for bar, text, name in zip(bars, texts, encodings, strict=True):
                bits = len(sparsity.encode(keep, name, piece, dtype="float16")) / kernel.size
                bar.set_height(bits)
                text.set(y=bits, text=f"{bits:.1f}")
            return [picture, *bars, *texts]

        return update

    def caption(piece: str, density: float) -> str:
        keep = np.asarray(sparsity.mask(kernel, density, piece))
        bits = [len(sparsity.encode(keep, name, piece, dtype="float16")) / kernel.size for name in encodings]
        said = ", ".join(f"{name} {b:.1f}" for name, b in zip(encodings, bits, strict=True))
        return f"Pruned by {piece}s to {100 * keep.mean():.0f} %. Bits per weight: {said}."

    piece = widgets.menu("pieces", [*PIECES][:5], "block")
    widgets.explore(make, alt=caption, piece=piece, density=widgets.slider("density", densities, 0.25, "{:.0%}"))


def stored(accuracies: Mapping[str, np.ndarray], sizes: Callable[[str, int, str], np.ndarray], dense: float) -> None:
    """Explore accuracy, (densities, seeds), by kilobytes of storage, (densities,), for each kind of pieces."""

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)

        def update(bits: int, encoding: str) -> None:
            for artist in [*ax.lines, *ax.collections, *ax.texts]:
                artist.remove()
            ax.axhline(dense, color=figures.GREY, linestyle="--")
            for place, (piece, samples) in enumerate(accuracies.items()):
                size = sizes(piece, bits, encoding)
                ax.plot(size, samples.mean(1), "o-", color=PIECES[piece], markersize=4)
                ax.text(0.98, 0.4 - 0.08 * place, piece, color=PIECES[piece], transform=ax.transAxes, ha="right")
            ax.text(1, dense + 0.1, "dense", color=figures.GREY, transform=ax.get_yaxis_transform(), ha="right")
            ax.set(xscale="log", xlabel="stored kilobytes", ylabel="test accuracy (%)", ylim=(85, dense + 0.9))
            ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if ax.get_xlim()[0] < tick < ax.get_xlim()[1]]
            ax.set_xticks(ticks, ticks)
            ax.minorticks_off()

        return update

    def caption(bits: int, encoding: str) -> str:
        at = {p: np.interp(0, np.log(sizes(p, bits, encoding)), a.mean(1), left=np.nan) for p, a in accuracies.items()}
        said = ", ".join(f"{p} {value:.1f} %" for p, value in at.items() if np.isfinite(value))
        return f"Values of {bits} bits, {encoding} index. Accuracy with one kilobyte: {said}; dense {dense:.1f} %."

    bits = widgets.slider("bits of a value", [2, 4, 8, 16, 32], 8)
    widgets.explore(make, alt=caption, height=3.8, bits=bits, encoding=widgets.menu("index", ["relative", "bitmap"]))


def recurrent(errors: Mapping[str, Mapping[int, np.ndarray]], small: int) -> None:
    """Explore test errors, (seeds,) in per cent, of two networks by their number of parameters."""
    choices = {f"{name}, {size:,} parameters": (name, size) for name in errors for size in errors[name]}
    dense = {name: samples[max(samples)].mean() for name, samples in errors.items()}

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        for (name, samples), color, place in zip(
            errors.items(), (figures.BLUE, figures.RED), ((420, 9), (1800, 22)), strict=True
        ):
            figures.band(ax, [*samples], np.transpose([*samples.values()]), color, marker="o", markersize=4)
            ax.text(*place, name, color=color)
        ax.axvline(small, color=figures.GREY, linestyle="--", linewidth=1)
        ax.text(1.04 * small, 60, "all parameters\nof the small net", color=figures.GREY, va="center")
        (here,) = ax.plot([], [], "o", color=figures.BLACK, markersize=9)
        ax.set(xscale="log", yscale="log", xlim=(250, 25000), ylim=(3.5, 90))
        ax.set(xlabel="parameters left", ylabel="test error (%)")
        ax.set_xticks([300, 1000, 3000, 10000, 20000], ["300", "1,000", "3,000", "10,000", "20,000"])
        ax.set_yticks([5, 10, 20, 50], [5, 10, 20, 50])
        ax.minorticks_off()

        def update(choice: str) -> list[Artist]:
            name, size = choices[choice]
            here.set_data([size], [errors[name][size].mean()])
            return [here]

        return update

    def caption(choice: str) -> str:
        name, size = choices[choice]
        found = errors[name][size].mean()
        return f"{choice}: test error {found:.1f} %. The {name} net has {dense[name]:.1f} % with all its parameters."

    start = next(choice for choice, (name, size) in choices.items() if name == [*errors][1] and size == small)
    widgets.explore(make, alt=caption, choice=widgets.menu("network", [*choices], start))


def connections(maps: Mapping[str, np.ndarray]) -> None:
    """How many connections lead from each pixel, for each network: counts (14, 14)."""
    figure, axes = figures.new(len(maps), height=2.8)
    top = max(counts.max() for counts in maps.values())
    for ax, (name, counts) in zip(axes, maps.items(), strict=True):
        ax.imshow(counts, cmap="cividis", vmin=0, vmax=top)
        ax.set_title(name)
        ax.axis("off")
    middle = (f"{name} {100 * counts[3:11, 3:11].sum() / counts.sum():.0f} %" for name, counts in maps.items())
    figures.show(figure, f"Brighter: more connections. Share of the middle 8 × 8 pixels: {', '.join(middle)}.")
