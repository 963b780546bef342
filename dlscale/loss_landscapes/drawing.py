"""Figures and explorers of 02_loss_landscapes and its further notebook: a line in the notebook calls each."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from dlscale.course.records import Record
from dlscale.loss_landscapes import PCAPlane, Spectrum
from dlscale.page import figures, widgets

GUESSING, HIGHEST = np.log(10), 3.0  # the loss of guessing one of ten classes; where the opening's picture ends
VARIANTS = {"plain": figures.RED, "norm": figures.ORANGE, "skip": figures.BLUE, "skip and norm": figures.GREEN}
AXES = {
    "rate": ("learning rate", (0.05, 0.1, 0.2, 0.5, 1, 2)),
    "top": ("largest eigenvalue (sharpness)", (0.5, 1, 2, 4, 8)),
    "accuracy": ("test accuracy (%)", ()),
}


def opening(along: np.ndarray, surfaces: Mapping[str, np.ndarray]) -> None:
    """The loss over a plane around two networks, (len(along), len(along)) each, cut off at the same height."""
    figure, every = figures.new(2, height=3.1, subplot_kw={"projection": "3d"})
    for ax, (name, height) in zip(every, surfaces.items(), strict=True):
        low = np.minimum(height, HIGHEST)
        ax.plot_surface(*np.meshgrid(along, along), low, cmap="viridis", vmin=0, vmax=HIGHEST, rcount=99, ccount=99)
        ax.view_init(38, 40)
        ax.set(title=f"training loss around {name}", zlim=(0, HIGHEST), zticks=[0, 1, 2, 3], xticks=[], yticks=[])
        ax.set_box_aspect((1, 1, 0.6), zoom=1.1)
    rims = (f"{name}: {height[0].mean():.1f} on average along one edge" for name, height in surfaces.items())
    figures.show(figure, f"The training loss around two networks, over the same distances. {'; '.join(rims)}.")


# Sections 1 and 4


def planes(surfaces: Mapping[tuple[str, float], np.ndarray], half: float, together: bool = False) -> None:
    """Explore square planes of the loss by network and half width: contours, and the cut through the centre.

    With `together`, the cuts of all networks stand beside each other on a logarithmic axis.
    """
    names, widths = (list(dict.fromkeys(key[i] for key in surfaces)) for i in (0, 1))

    def paint(left: Axes, right: Axes, name: str, half: float = half) -> None:
        height = surfaces[name, half]
        along, middle = np.linspace(-half, half, len(height)), len(height) // 2
        levels = np.geomspace(height.min() + 0.02 * np.ptp(height), height.max(), 10)
        lines = left.contour(along, along, height, levels, cmap="viridis", norm="log")
        left.clabel(lines, lines.levels[::3], fontsize=8, fmt=lambda level: f"{float(f'{level:.2g}'):g}")
        left.plot(0, 0, "x", color=figures.BLACK)
        left.set(xlabel="distance a", ylabel="distance b", title=f"{name}: training loss")
        left.locator_params(nbins=5)
        for other in names if together else [name]:
            color, width = VARIANTS.get(other, figures.BLUE), 3 if other == name else 1.5
            (line,) = right.plot(along, surfaces[other, half][middle], color=color, linewidth=width)
            if together:
                figures.name(right, line, other, {"norm": -7, "skip": 7}.get(other, 0))
        right.axhline(GUESSING, color=figures.GREY, linestyle="--")
        right.text(along[0], GUESSING, "guessing", color=figures.GREY, va="bottom", clip_on=True)
        right.set(xlabel="distance a", ylabel="training loss", title="along b = 0")
        right.set(yscale="log", ylim=(0.05, 300)) if together else right.set_ylim(0, 1.1 * height[middle].max())
        for ax in (left, right):
            ax.yaxis.set_label_coords(-0.26, 0.5)  # whatever the ticks need

    def caption(name: str, half: float = half) -> str:
        height = surfaces[name, half]
        rim = np.concatenate([height[0], height[-1], height[:, 0], height[:, -1]])
        centre = height[len(height) // 2, len(height) // 2]
        return (
            f"Around the {name} network, up to distance {half:g}: the loss is {centre:.3g} at the centre and "
            f"{rim.min():.3g} to {rim.max():.3g} at the rim."
        )

    controls = {"half": widgets.slider("half width", widths, half)} if len(widths) > 1 else {}
    widgets.explore_axes(paint, columns=2, alt=caption, height=3.3, **controls, name=widgets.menu("network", names))


# Section 2


def rescaled(
    plain: Mapping[float, np.ndarray], normalised: Mapping[float, np.ndarray], places: Sequence[np.ndarray]
) -> None:
    """Explore the factor of a rescaled layer: slices by factor at the `places` of a plain and a normalised slice."""

    titles = "plain direction", "filter-normalised direction"

    def paint(left: Axes, right: Axes, c: float) -> None:
        for ax, slices, x, title in zip((left, right), (plain, normalised), places, titles, strict=True):
            ax.plot(x, slices[1.0], color=figures.GREY, linewidth=5, alpha=0.5)
            ax.plot(x, slices[c], color=figures.BLUE)
            ax.set(ylim=(0, 8), xlabel="distance", title=title)
        left.set_ylabel("training loss")
        left.text(0.02, 0.17, "grey: c = 1", color=figures.GREY, transform=left.transAxes)
        left.text(0.02, 0.06, f"blue: c = {c:g}", color=figures.BLUE, transform=left.transAxes)

    def caption(c: float) -> str:
        at, far = (np.interp(place, x, s[c]) for place, x, s in zip((0.1, 0.5), places, (plain, normalised)))  # noqa: B905
        return (
            f"c = {c:g}: the loss is {at:.2f} at distance 0.1 along the plain direction, and {far:.2f} at distance 0.5 "
            "along the filter-normalised one."
        )

    widgets.explore_axes(paint, columns=2, alt=caption, height=3.1, c=widgets.slider("c", list(plain), max(plain)))


# Section 3


def ritz(found: Mapping[int, np.ndarray], exact: np.ndarray, start: int) -> None:
    """Explore the eigenvalues that Lanczos's method finds, by products, over the exact ones."""

    def copies(values: np.ndarray) -> np.ndarray:
        """How often each large value was found before."""
        near = np.abs(values[:, None] - values) < 1e-3 * exact[-1]
        return np.tril(near & (values > 0.1 * exact[-1])[:, None], -1).sum(1)

    def paint(ax: Axes, steps: int) -> None:
        values = found[steps]
        ax.vlines(exact, 0, 0.45, color=figures.SKY, linewidth=0.8)
        ax.plot(values, 0.55 + 0.08 * copies(values), "o", color=figures.RED, markersize=5)
        ax.text(0, 1.04, f"lines: all {len(exact)} eigenvalues", color=figures.BLUE, transform=ax.transAxes)
        ax.text(0.33, 1.04, "dots: found by Lanczos's method", color=figures.RED, transform=ax.transAxes)
        ax.set(xlabel="eigenvalue", xlim=1.05 * exact[[0, -1]], ylim=(0, 1.1), yticks=[])

    def caption(steps: int) -> str:
        largest = f"{found[steps][-1]:.4g}; the largest eigenvalue is {exact[-1]:.4g}"
        return f"After {steps} products the largest value found is {largest}."

    widgets.explore_axes(paint, alt=caption, height=2.3, steps=widgets.slider("products", [*found], start))


# Section 4


def rises(record: Record) -> None:
    """How far the loss rises around the deep networks, by learning rate: medians over seeds, and a mark for each."""
    figure, ax = figures.new(height=3.0)
    rates, lines = record.options("rate"), {}
    for name, color in VARIANTS.items():
        values = np.array([record.values("rise", variant=name, rate=rate) for rate in rates])
        ax.plot(np.repeat(rates, values.shape[1]), values.ravel(), "_", color=color, alpha=0.5)
        (lines[name],) = ax.plot(rates, np.nanmedian(values, axis=1), color=color)
        figures.name(ax, lines[name], name)
    ax.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="rise of the loss at distance 0.25")
    ax.set_xticks(rates, [f"1/{1 / rate:.0f}" for rate in rates])
    ax.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
    ax.minorticks_off()
    said = (f"{name} {np.exp(np.log(line.get_ydata()).mean()):.2g}" for name, line in lines.items())
    figures.show(
        figure, f"A mark for each of 16 seeds, lines at the medians. Geometric mean over the rates: {', '.join(said)}."
    )


def minima(record: Record, target: float, x: str, y: str) -> None:
    """Two of "rate", "top" and "accuracy" by batch, on both tasks: each run that came to the target loss, and the
    geometric mean of each learning rate.
    """
    figure, axes = figures.new(2, height=3.1)
    said = []
    for ax, task in zip(axes, ("signals", "digits"), strict=True):
        for place, (batch, color) in enumerate({16: figures.BLUE, 500: figures.ORANGE}.items()):
            means = []
            for rate in record.options("rate", task=task, batch=batch):
                arm = {"task": task, "batch": batch, "rate": rate}
                arrived = record.values("loss", **arm) < 1.02 * target
                measured = {name: record.values(name, **arm)[arrived] for name in ("top", "accuracy")}
                measured["rate"] = np.full(arrived.sum(), rate)
                ax.plot(measured[x], measured[y], ".", color=color, alpha=0.3, markersize=4)
                means.append([np.exp(np.log(measured[name]).mean()) for name in (x, y)])
                said.append(f"{task}, batch {batch}, rate {rate:.3g}: {means[-1][0]:.2g} and {means[-1][1]:.3g}")
            ax.plot(*np.transpose(means), "o-", color=color, markeredgecolor="black", linewidth=1)
            ax.text(0.97, 0.93 - 0.09 * place, f"batch {batch}", color=color, transform=ax.transAxes, ha="right")
        for which, name in (("x", x), ("y", y)):
            label, ticks = AXES[name]
            ax.set(**{f"{which}label": label})
            if ticks:
                ax.set(**{f"{which}scale": "log"})
                getattr(ax, f"set_{which}ticks")(ticks, [f"{tick:g}" for tick in ticks])
        if x == "rate":
            ax.plot((0.25, 2), (8, 1), color=figures.GREY)
            ax.text(0.47, 4.5, "2 / learning rate", color=figures.GREY)
        ax.set_title(task)
        ax.minorticks_off()
    figures.show(figure, f"Geometric means over the seeds. {'; '.join(said)}.")


# The further notebook


def path(
    planes: Mapping[float, PCAPlane],
    surfaces: Mapping[float, tuple[np.ndarray, np.ndarray, np.ndarray]],
    losses: Mapping[float, np.ndarray],
) -> None:
    """Explore the path of training in its plane, by learning rate and epoch: coordinates and loss of the surfaces."""

    def paint(ax: Axes, rate: float, epoch: int) -> None:
        (x, y, height), points = surfaces[rate], planes[rate].path
        lines = ax.contour(x, y, height, np.geomspace(0.01, 3, 11), cmap="viridis", norm="log")
        ax.clabel(lines, fontsize=8, fmt="%.2g")
        ax.plot(*points.T, color=figures.RED, linewidth=1)
        ax.plot(*points[: epoch + 1].T, color=figures.RED, linewidth=3)
        ax.plot(*points[epoch], "o", color="white", markersize=9, markeredgecolor="black", markeredgewidth=2)
        for text, place in (("start", points[0]), ("end", points[-1])):
            ax.annotate(text, place, xytext=(0, 10), textcoords="offset points", ha="center")
        first, second = 100 * planes[rate].explained
        ax.set(ylabel=f"second component ({second:.0f} %)", title="contours of the training loss")
        ax.set_xlabel(f"first component ({first:.0f} % of the variance)")

    def caption(rate: float, epoch: int) -> str:
        (x, y, height), (a, b) = surfaces[rate], planes[rate].path[epoch]
        drawn = height[np.abs(y - b).argmin(), np.abs(x - a).argmin()]
        return (
            f"Learning rate {rate:g}, after epoch {epoch}: the training loss is {losses[rate][epoch]:.3f}, and the "
            f"plane shows {drawn:.3f} at this point."
        )

    epoch = widgets.slider("epoch", list(range(0, 61, 3)), 9)
    rate = widgets.slider("learning rate", sorted(planes), max(planes))
    widgets.explore_axes(paint, alt=caption, height=3.6, rate=rate, epoch=epoch)


def spectrum(spectra: Mapping[int, Spectrum], losses: np.ndarray) -> None:
    """Explore the density of the Hessian's eigenvalues by epoch; `losses` are those of all epochs."""

    def paint(ax: Axes, epoch: int) -> None:
        nodes = np.ravel(spectra[epoch].nodes)
        view = np.linspace(min(-0.15 * nodes.max(), 1.1 * nodes.min()), 1.1 * nodes.max(), 401)
        ax.plot(view, spectra[epoch].density(view, 0.012 * nodes.max()), color=figures.BLUE)
        ax.plot(nodes, np.full(nodes.size, 1.7e-5), "|", color=figures.BLACK)
        ax.set(yscale="log", ylim=(1e-5, 1e2), xlim=view[[0, -1]], xlabel="eigenvalue", ylabel="density")

    def caption(epoch: int) -> str:
        nodes = spectra[epoch].nodes
        return (
            f"After epoch {epoch}, at a training loss of {losses[epoch]:.3f}, the eigenvalues reach from "
            f"{nodes.min():.2f} to {nodes.max():.2f}. The ticks mark the values found."
        )

    widgets.explore_axes(paint, alt=caption, height=3, epoch=widgets.slider("epoch", list(spectra), 2))
