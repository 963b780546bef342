"""Figures and explorers of 02_loss_landscapes and its further notebook: a line in the notebook calls each."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlscale.course.records import Record
from dlscale.loss_landscapes import PCAPlane, Spectrum
from dlscale.page import figures, widgets

GUESSING, HIGHEST = np.log(10), 3.0  # the loss of guessing one of ten classes; where the opening's picture ends
VARIANTS = {"plain": figures.RED, "norm": figures.ORANGE, "skip": figures.BLUE, "skip and norm": figures.GREEN}
LONG = {"plain": "plain", "norm": "normalisation", "skip": "skip connections", "skip and norm": "both"}


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


# Section 1


def zoom(surfaces: Mapping[tuple[str, float], np.ndarray]) -> None:
    """Explore square planes of the loss by network and half width: contours, and the cut through the centre."""
    names, widths = (list(dict.fromkeys(key[i] for key in surfaces)) for i in (0, 1))

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        fig.set_layout_engine("none")
        left.set_position((0.13, 0.15, 0.33, 0.74))
        right.set_position((0.59, 0.15, 0.39, 0.74))

        def update(name: str, half: float) -> None:
            height = surfaces[name, half]
            along, middle = np.linspace(-half, half, len(height)), len(height) // 2
            left.clear()
            right.clear()
            levels = np.geomspace(height.min() + 0.02 * np.ptp(height), height.max(), 10)
            lines = left.contour(along, along, height, levels, cmap="viridis", norm="log")
            left.clabel(lines, lines.levels[::3], fontsize=8, fmt="%.2g")
            left.plot(0, 0, "x", color=figures.BLACK)
            left.set(xlabel="distance a", ylabel="distance b", title="contours of the training loss")
            left.locator_params(nbins=5)
            right.plot(along, height[middle], color=figures.BLUE)
            right.axhline(GUESSING, color=figures.GREY, linestyle="--")
            if height[middle].max() > 0.5 * GUESSING:
                right.text(along[0], GUESSING, "guessing", color=figures.GREY, va="bottom")
            right.set(xlabel="distance a", ylabel="training loss", title="along b = 0")
            right.set_ylim(0, 1.1 * height[middle].max())

        return update

    def caption(name: str, half: float) -> str:
        height = surfaces[name, half]
        rim = np.concatenate([height[0], height[-1], height[:, 0], height[:, -1]])
        centre = height[len(height) // 2, len(height) // 2]
        return (
            f"Around the {name} network, up to distance {half:g}: the loss is {centre:.3g} at the centre and "
            f"{rim.min():.3g} to {rim.max():.3g} at the rim."
        )

    half = widgets.slider("half width", widths, widths[2])
    widgets.explore(make, alt=caption, height=3.5, half=half, name=widgets.menu("network", names))


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


def ritz(found: Mapping[str, Mapping[int, np.ndarray]], exact: np.ndarray) -> None:
    """Explore the eigenvalues that Lanczos's method finds, by right angles and products, beside the exact ones."""
    right_angles, products = list(found), list(next(iter(found.values())))

    def paint(ax: Axes, steps: int, kept: str = right_angles[0]) -> None:
        values, again = found[kept][steps], "; stacked: found again" * (len(right_angles) > 1)
        near = np.abs(values[:, None] - values) < 1e-3 * exact[-1]
        copies = np.tril(near & (values > 0.1 * exact[-1])[:, None], -1).sum(1)
        ax.vlines(exact, 0, 0.45, color=figures.SKY, linewidth=0.8)
        ax.plot(values, 0.55 + 0.08 * copies, "o", color=figures.RED, markersize=5)
        ax.text(0, 1.04, f"lines: all {len(exact)} eigenvalues", color=figures.BLUE, transform=ax.transAxes)
        ax.text(0.33, 1.04, f"dots: found by Lanczos's method{again}", color=figures.RED, transform=ax.transAxes)
        ax.set(xlabel="eigenvalue", xlim=1.05 * exact[[0, -1]], ylim=(0, 1.1), yticks=[])

    def caption(steps: int, kept: str = right_angles[0]) -> str:
        values = found[kept][steps]
        copies = int((np.abs(values - exact[-1]) < 1e-3 * exact[-1]).sum())
        said = f"After {steps} products the largest value found is {values[-1]:.4g}, and the largest eigenvalue is "
        return f"{said}{exact[-1]:.4g}." + f" Copies of it among the values found: {copies}." * (len(right_angles) > 1)

    controls = {"steps": widgets.slider("products", products, 7 if len(right_angles) == 1 else products[-1])}
    if len(right_angles) > 1:
        controls["kept"] = widgets.menu("right angles to all", right_angles)
    widgets.explore_axes(paint, alt=caption, height=2.3, **controls)


# Section 4


def _cuts(ax: Axes, along: np.ndarray, planes: Mapping[str, np.ndarray]) -> dict[str, Artist]:
    """The cut through the centre of each plane, by variant."""
    lines = {}
    for name, height in planes.items():
        (lines[name],) = ax.plot(along, height[len(height) // 2], color=VARIANTS[name])
    ax.set(yscale="log", ylim=(0.05, 300), xlabel="distance a", ylabel="training loss", title="along b = 0")
    ax.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    return lines


def deep(along: np.ndarray, planes: Mapping[str, np.ndarray]) -> None:
    """Explore the planes around one deep network of each variant: contours, and the cuts through all centres."""

    def make(fig: Figure) -> widgets.Update:
        fig.set_layout_engine("none")
        left, bar, right = (fig.add_axes(box) for box in ((0.09, 0.15, 0.3, 0.72), (0.41, 0.15, 0.015, 0.72),
                                                         (0.58, 0.15, 0.27, 0.72)))  # fmt: skip
        first = np.log10(next(iter(planes.values())))
        filled = left.pcolormesh(along, along, first, vmin=-1, vmax=2, cmap="viridis", shading="gouraud")
        (cross,) = left.plot(0, 0, "x", color="white", markeredgewidth=2)
        cut = left.axhline(0, color="white", linewidth=1)
        left.set(xlabel="distance a", ylabel="distance b")
        fig.colorbar(filled, cax=bar, ticks=range(-1, 3)).set_ticklabels(["0.1", "1", "10", "100"])
        lines = _cuts(right, along, planes)
        for name, line in lines.items():
            figures.name(right, line, name, {"norm": -7, "skip": 7}.get(name, 0))

        def update(name: str) -> list[Artist]:
            filled.set_array(np.log10(planes[name]))
            left.set_title(f"{name}: training loss")
            for other, line in lines.items():
                line.set(alpha=1 if other == name else 0.35, linewidth=3 if other == name else 1.5)
            return [filled, cut, cross, left.title, *lines.values()]

        return update

    def caption(name: str) -> str:
        height = planes[name]
        middle = len(height) // 2
        return (
            f"The loss around one network: {name}. It is {height[middle, middle]:.2g} at the cross "
            f"and {height[middle, [0, -1]].mean():.2g} on average at the ends of the white line."
        )

    widgets.explore(make, alt=caption, height=3.1, name=widgets.menu("network", list(planes), "plain"))


def rises(record: Record) -> None:
    """How far the loss rises around the deep networks, by learning rate: medians over seeds, and a mark for each."""
    figure, ax = figures.new(height=3.0)
    rates, lines = record.options("rate"), {}
    for name, color in VARIANTS.items():
        values = np.array([record.values("rise", variant=name, rate=rate) for rate in rates])
        ax.plot(np.repeat(rates, values.shape[1]), values.ravel(), "_", color=color, alpha=0.5)
        (lines[name],) = ax.plot(rates, np.nanmedian(values, axis=1), color=color)
        figures.name(ax, lines[name], LONG[name])
    ax.set(xscale="log", yscale="log", xlabel="learning rate", ylabel="rise of the loss at distance 0.25")
    ax.set_xticks(rates, [f"1/{1 / rate:.0f}" for rate in rates])
    ax.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
    ax.minorticks_off()
    said = (f"{LONG[name]} {np.exp(np.log(line.get_ydata()).mean()):.2g}" for name, line in lines.items())
    figures.show(
        figure, f"A mark for each of 16 seeds, lines at the medians. Geometric mean over the rates: {', '.join(said)}."
    )


def flat(record: Record, target: float) -> None:
    """Test accuracy against the largest eigenvalue, by batch, on both tasks: each run that came to the target loss, and
    the mean of each learning rate.
    """
    figure, axes = figures.new(2, height=3.1)
    said = []
    for ax, task in zip(axes, ("signals", "digits"), strict=True):
        for batch, color in ((16, figures.BLUE), (500, figures.ORANGE)):
            for rate in record.options("rate", task=task, batch=batch):
                arm = {"task": task, "batch": batch, "rate": rate}
                arrived = record.values("loss", **arm) < 1.02 * target
                tops, accuracies = (record.values(name, **arm)[arrived] for name in ("top", "accuracy"))
                ax.plot(tops, accuracies, ".", color=color, alpha=0.3, markersize=4)
                top = np.exp(np.log(tops).mean())
                ax.plot(top, accuracies.mean(), "o", color=color, markeredgecolor="black")
                said.append(f"{task}, batch {batch}, rate {rate:.3g}: {top:.1f} and {accuracies.mean():.1f} %")
        ax.set(xscale="log", xlabel="largest eigenvalue (sharpness)", title=task)
        ax.set_xticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        ax.minorticks_off()
    axes[0].set_ylabel("test accuracy (%)")
    for place, (name, color) in enumerate({"batch 16": figures.BLUE, "batch 500": figures.ORANGE}.items()):
        axes[0].text(0.97, 0.93 - 0.09 * place, name, color=color, transform=axes[0].transAxes, ha="right")
    figures.show(figure, f"Geometric mean of the sharpness, and mean test accuracy. {'; '.join(said)}.")


# The further notebook


def path(
    planes: Mapping[float, PCAPlane],
    surfaces: Mapping[float, tuple[np.ndarray, np.ndarray, np.ndarray]],
    losses: Mapping[float, np.ndarray],
) -> None:
    """Explore the path of training in its plane, by learning rate and epoch: coordinates and loss of the surfaces."""

    def make(fig: Figure) -> widgets.Update:
        fig.set_layout_engine("none")
        ax, bar = fig.add_axes((0.09, 0.14, 0.72, 0.83)), fig.add_axes((0.86, 0.14, 0.02, 0.83))

        def update(rate: float, epoch: int) -> None:
            (x, y, height), points = surfaces[rate], planes[rate].path
            ax.clear()
            bar.clear()
            filled = ax.contourf(x, y, np.log10(height), np.linspace(-2, 0.5, 21), cmap="cividis", extend="both")
            fig.colorbar(filled, cax=bar, ticks=[-2, -1, 0], label="training loss").set_ticklabels(["0.01", "0.1", "1"])
            ax.plot(*points.T, color=figures.RED, linewidth=1)
            ax.plot(*points[: epoch + 1].T, color=figures.RED, linewidth=3)
            ax.plot(*points[epoch], "o", color="white", markersize=9, markeredgecolor="black", markeredgewidth=2)
            for text, place, color in (("start", points[0], "black"), ("end", points[-1], "white")):
                ax.annotate(text, place, xytext=(0, 10), textcoords="offset points", ha="center", color=color)
            first, second = 100 * planes[rate].explained
            ax.set_xlabel(f"first component ({first:.0f} % of the variance)")
            ax.set_ylabel(f"second component ({second:.0f} %)")

        return update

    def caption(rate: float, epoch: int) -> str:
        (x, y, height), (a, b) = surfaces[rate], planes[rate].path[epoch]
        drawn = height[np.abs(y - b).argmin(), np.abs(x - a).argmin()]
        return (
            f"Learning rate {rate:g}, after epoch {epoch}: the training loss is {losses[rate][epoch]:.3f}, and the "
            f"plane shows {drawn:.3f} at this point."
        )

    epoch = widgets.slider("epoch", list(range(0, 61, 3)), 9)
    rate = widgets.slider("learning rate", sorted(planes), max(planes))
    widgets.explore(make, alt=caption, height=3.6, rate=rate, epoch=epoch)


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


def sharpness(record: Record, target: float) -> None:
    """The largest eigenvalue by learning rate, for both batches on both tasks, of the runs that came to the target
    loss, with the limit 2 / learning rate.
    """
    figure, axes = figures.new(2, height=3.0)
    said = []
    for ax, task in zip(axes, ("signals", "digits"), strict=True):
        for batch, color in ((16, figures.BLUE), (500, figures.ORANGE)):
            rates = record.options("rate", task=task, batch=batch)
            arms = [{"task": task, "batch": batch, "rate": rate} for rate in rates]
            tops = np.array([record.values("top", **arm) for arm in arms])
            tops[np.array([record.values("loss", **arm) for arm in arms]) > 1.02 * target] = np.nan
            ax.plot(np.repeat(rates, tops.shape[1]), tops.ravel(), "_", color=color, alpha=0.5)
            (line,) = ax.plot(rates, middle := np.nanmedian(tops, axis=1), color=color)
            ax.annotate(f"batch {batch}", line.get_xydata()[-1], (-46, -20), textcoords="offset points", color=color)
            said.append(f"{task}, batch {batch}: {middle[0]:.1f} to {middle[-1]:.1f}")
        limit = np.array([0.2, 2.0])
        ax.plot(limit, 2 / limit, color=figures.GREY, linewidth=1)
        ax.text(0.5, 5.4, "2 / learning rate", color=figures.GREY)
        ax.set(xscale="log", yscale="log", xlabel="learning rate", title=task, xlim=(0.04, 4), ylim=(0.3, 16))
        ax.set_xticks([1 / 16, 1 / 4, 1], ["1/16", "1/4", "1"])
        ax.set_yticks([0.5, 1, 2, 4, 8], ["0.5", "1", "2", "4", "8"])
        ax.minorticks_off()
    axes[0].set_ylabel("largest eigenvalue")
    figures.show(figure, f"Medians of 16 seeds, from the smallest to the largest rate. {'; '.join(said)}.")


def attack(attacked: Mapping[tuple[int, float], np.ndarray], accuracies: Mapping[tuple[int, float], float]) -> None:
    """Explore FGSM by batch and ε: one attacked signal, and the test accuracy (%) of both networks."""
    batches, epsilons = (list(dict.fromkeys(key[i] for key in attacked)) for i in (0, 1))

    def paint(left: Axes, right: Axes, batch: str, epsilon: float) -> None:
        left.plot(attacked[batches[0], 0.0], color=figures.GREY, linewidth=4, alpha=0.5)
        left.plot(attacked[int(batch), epsilon], color=figures.RED)
        left.text(0.03, 0.93, "grey: original", color=figures.GREY, transform=left.transAxes)
        left.text(0.03, 0.85, "red: attacked", color=figures.RED, transform=left.transAxes)
        left.set(xlabel="position", ylabel="value of the signal", ylim=(-4, 5))
        for place, (size, color) in enumerate(zip(batches, (figures.BLUE, figures.ORANGE), strict=True)):
            right.plot(epsilons, [accuracies[size, each] for each in epsilons], color=color)
            right.text(0.95, 0.93 - 0.09 * place, f"batch {size}", color=color, transform=right.transAxes, ha="right")
        right.plot(epsilon, accuracies[int(batch), epsilon], "o", color=figures.BLACK)
        right.set(xlabel="strength ε of the attack", ylabel="test accuracy (%)", ylim=(0, 60))

    def caption(batch: str, epsilon: float) -> str:
        return (
            f"Trained with batches of {batch}, the network recognises {accuracies[int(batch), epsilon]:.1f} % of the "
            f"test signals at ε = {epsilon:g}, and {accuracies[int(batch), 0.0]:.1f} % without attack."
        )

    epsilon = widgets.slider("ε", epsilons, 0.2)
    widgets.explore_axes(
        paint, columns=2, alt=caption, height=3, batch=widgets.menu("batch", list(map(str, batches))), epsilon=epsilon
    )
