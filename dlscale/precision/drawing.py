"""Figures and explorers of 05_precision and its further notebook: a line in the notebook calls each."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes

from dlscale import precision
from dlscale.course.records import Record
from dlscale.page import figures, widgets
from dlscale.page.curves import curves

SHORT = ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
EXPONENTS = np.arange(-44, 24)  # of the histograms
KINDS = {  # colour, and the side of its peak on which its name stands
    "weights": (figures.BLACK, "right"),
    "activations": (figures.BLUE, "left"),
    "gradients": (figures.RED, "left"),
    "updates": (figures.GREEN, "center"),
}


def opening(record: Record) -> None:
    """Test accuracy of three runs of `precision-formats`, a bar and a mark for each seed."""
    runs = {"float16": "alone, float16"}
    runs |= {f"{name}, loss / 1,024": f"worker, {name}" for name in ("float32", "float16")}
    figure, ax = figures.new(height=2.2)
    found = [record.values("accuracy", variant=run, judged_on="test") for run in runs.values()]
    ax.barh(range(3), np.mean(found, 1), color=[figures.SKY, figures.SKY, figures.RED])
    ax.plot(np.transpose(found), np.tile(range(3), (len(found[0]), 1)), "|", color=figures.BLACK)
    said = (f"{name}: {values.mean():.0f} % of the test digits right" for name, values in zip(runs, found, strict=True))
    ax.set(xlim=(0, 100), ylim=(2.5, -0.5), xlabel="test accuracy (%), one mark per seed")
    ax.set_yticks(range(3), list(runs))
    figures.show(figure, "; ".join(said))


# Section 1


def _formula(x: float, name: str) -> str:
    """How the stored number is read from its bits."""
    sign, exponent, mantissa = precision.bits(x, name)
    stored, power, part = int(exponent, 2), 2 ** len(mantissa), int(mantissa, 2)
    bias = precision.FORMATS[name].bias
    if not np.isfinite(float(precision.quantize(x, name))):
        return "the pattern of infinity or NaN"
    size = f"2^({stored} − {bias}) × (1 + {part}/{power})" if stored else f"2^(1 − {bias}) × {part}/{power}"
    return size if sign == "0" else f"−{size}"


def bits() -> None:
    """Explore how a number is stored: its bits, and the two neighbours between which it is rounded."""
    parts = {"sign": figures.RED, "exponent": figures.ORANGE, "mantissa": figures.BLUE}

    def paint(ax: Axes, x: float, name: str) -> None:
        pattern = precision.bits(x, name)
        colors = [color for some, color in zip(pattern, parts.values(), strict=True) for _ in some]
        ax.bar(range(len(colors)), 0.8, 0.92, bottom=2.7, color=colors)
        for place, bit in enumerate("".join(pattern)):
            ax.text(place, 3.1, bit, ha="center", va="center", color="white")
        for place, (part, color) in zip((-0.4, 1.2, 0.6 + len(pattern[1])), parts.items(), strict=True):
            ax.text(place, 3.75, part, color=color)
        ax.text(-0.4, 2.25, f"= {_formula(x, name)}", va="center")
        number, (below, above) = float(precision.quantize(x, name)), precision.neighbours(x, name)
        ax.plot([2, 29], [1.2, 1.2], color=figures.GREY, linewidth=1)
        for place, value in zip((6, 15.5, 25), (below, number, above), strict=True):
            ax.plot(place, 1.2, "|", color=figures.BLACK, markersize=16)
            ax.text(place, 0.45, f"{value:.9g}", ha="center")
        ax.text(15.5, 0.0, "stored", ha="center", color=figures.GREY)
        gap = above - number if x >= number and np.isfinite(above) else number - below
        place = np.clip((x - number) / gap, -1, 1) if np.isfinite(number) and np.isfinite(gap) else 0.0
        ax.plot(15.5 + 9.5 * place, 1.4, "v", color=figures.RED, markersize=9)
        ax.text(15.5 + 9.5 * place, 1.62, f"{x:.9g}", ha="center", color=figures.RED)
        ax.set(xlim=(-0.5, 31.5), ylim=(0, 4))
        ax.axis("off")

    def caption(x: float, name: str) -> str:
        number = float(precision.quantize(x, name))
        if not np.isfinite(number):
            return f"{x:.9g} is too large for {name}, which ends at {precision.FORMATS[name].max:.9g}."
        error = f"a relative error of {abs(number / x - 1):.2g}" if x and number else "lost" if x else "exact"
        return f"{x:.9g} in {name} becomes {number:.9g} = {_formula(x, name)}: {'exact' if number == x else error}."

    examples = [1.0, -3.14159265, 1e-7, 1e-8, 2049.0, 65519.0, 65520.0, 1e38]
    x = widgets.number("number", 0.1, -3.4e38, 3.4e38, examples)
    name = widgets.menu("format", ["float32", *SHORT], "float16")
    widgets.explore_axes(paint, alt=caption, height=2.7, x=x, name=name)


# Section 2


def histograms(tensors: Mapping[int, Mapping[str, np.ndarray]]) -> None:
    """Explore the exponents of weights, activations, gradients and updates, by step, and what a format loses."""

    def exponents(values: np.ndarray) -> np.ndarray:
        """Per cent of the numbers other than 0 that have each of the `EXPONENTS`; the outermost ones hold the rest."""
        place = np.frexp(np.asarray(values)[np.asarray(values) != 0])[1] - 1 - EXPONENTS[0]
        return 100 * np.bincount(place.clip(0, len(EXPONENTS) - 1), minlength=len(EXPONENTS)) / len(place)

    counts = {step: {kind: exponents(values) for kind, values in kinds.items()} for step, kinds in tensors.items()}

    def paint(ax: Axes, shift: int, step: int, name: str) -> None:
        form = precision.FORMATS[name]
        first, full, last = np.clip(np.log2([form.smallest_subnormal, form.smallest_normal, form.max]), -40, 20)
        ax.axvspan(first, full, color=figures.GREY, alpha=0.1, linewidth=0)
        ax.axvspan(full, last, color=figures.GREY, alpha=0.22, linewidth=0)
        ax.axvline(first - 1, color=figures.GREY, linestyle="--")
        top = 1.25 * max(values.max() for values in counts[step].values())
        grey = {"color": figures.GREY, "ha": "right", "va": "top"}
        ax.text(first - 1.4, 0.98 * top, "become zero", **grey)
        ax.text(last - 0.5, 0.98 * top, f"range of {name}", **grey)
        for kind, (color, side) in KINDS.items():
            x, y = EXPONENTS + shift * (kind == "gradients"), counts[step][kind]
            ax.plot(x, y, color=color, drawstyle="steps-post")
            ax.text(x[y.argmax()] + 0.5, y.max() + 0.02 * top, kind, color=color, ha=side, clip_on=True)
        ax.set(xlim=(-40, 20), ylim=(0, top), xlabel="size of the number (power of 2)", ylabel="numbers (%)")

    def caption(shift: int, step: int, name: str) -> str:
        form, count, size = precision.FORMATS[name], counts[step]["gradients"], EXPONENTS + shift
        zero = count[size < np.log2(form.smallest_subnormal) - 1].sum()
        infinite = count[size > np.log2(form.max)].sum()
        return (
            f"After {step} steps, with the loss multiplied by 2^{shift}: {name} rounds {zero:.0f} % of the gradients "
            f"to zero and makes {infinite:.0f} % infinite."
        )

    shift = widgets.slider("loss × 2^", list(range(-12, 22)), -10)
    step = widgets.slider("step", list(tensors), min(tensors))
    widgets.explore_axes(paint, alt=caption, shift=shift, step=step, name=widgets.menu("format", SHORT))


# Section 3


def loss_scaling(powers: Sequence[int], runs: Mapping[tuple[str, int], tuple[float, np.ndarray]]) -> None:
    """Explore the loss scale: test accuracy for each power of two, and the zero gradients (%, by step) of one run."""

    def paint(left: Axes, right: Axes, power: int, name: str) -> None:
        left.plot(powers, [100 * runs[name, other][0] for other in powers], "o-", color=figures.TEST)
        left.plot(power, 100 * runs[name, power][0], "o", color=figures.BLACK, markersize=10)
        left.axvline(powers[0], color=figures.GREY, linestyle=":")
        left.text(powers[0] + 0.7, 103, "loss / 1,024", color=figures.GREY, va="center")
        left.set(xlabel="loss multiplied by (power of 2)", ylabel="test accuracy (%)", ylim=(0, 108), title=name)
        right.plot(100 * runs[name, power][1], color=figures.BLACK)
        right.set(xlabel="step", ylabel="gradients that are zero (%)", ylim=(0, 108), title="run of the black point")

    def caption(power: int, name: str) -> str:
        accuracy, zeros = runs[name, power]
        return (
            f"{name}, loss multiplied by 2^{power}: the test accuracy is {100 * accuracy:.0f} %. "
            f"At the last step {100 * zeros[-1]:.0f} % of the gradients are zero."
        )

    power = widgets.slider("loss × 2^", powers, powers[0])
    widgets.explore_axes(paint, columns=2, alt=caption, power=power, name=widgets.menu("format", SHORT))


def dynamic_scale(scales: Mapping[str, np.ndarray]) -> None:
    """What multiplies the loss in each step, (steps,), as dynamic loss scaling chose it, for each format."""
    figure, ax = figures.new(height=2.8)
    for (name, scale), color in zip(scales.items(), (figures.BLUE, figures.RED), strict=True):
        figures.name(ax, ax.plot(np.log2(scale), color=color)[0], name)
    ax.set(xlabel="step", ylabel="loss multiplied by (power of 2)")
    ax.locator_params("y", integer=True)
    ends = ", ".join(f"{name} 2^{np.log2(scale[-1]):.0f}" for name, scale in scales.items())
    figures.show(figure, f"The scale falls until nothing overflows, then moves up and down. At the end: {ends}.")


# Section 4


def accuracies(panels: Mapping[str, tuple], xlabel: str, ylabel: str) -> None:
    """A panel for each title: x, and a line with its interval for each name, (seeds, len(x)) in per cent."""
    figure, axes = figures.new(len(panels), height=3.2, sharey=True, squeeze=False)
    said = []
    for ax, (title, (x, variants)) in zip(axes[0], panels.items(), strict=True):
        pairs = zip(variants.items(), (figures.BLACK, figures.BLUE, figures.ORANGE, figures.RED), strict=False)
        lines = {name: figures.band(ax, x, samples, color, marker="o") for (name, samples), color in pairs}
        figures.names(ax, lines, gap=0.06 * np.ptp(ax.get_ylim()))
        ax.set(title=title, xlabel=xlabel, xscale="log" if xlabel == "learning rate" else "linear")
        ticks = x if len(x) < 6 else x[::-2]
        ax.set_xticks(ticks, [f"{value:g}" for value in ticks])
        ax.minorticks_off()
        said += [f"{title} {name} {samples.mean(0).max():.0f} %".strip() for name, samples in variants.items()]
    axes[0, 0].set_ylabel(ylabel)
    figures.show(figure, f"The highest means: {', '.join(said)}.")


def updates() -> None:
    """Explore a weight that gets 200 equal updates, rounded to nearest and at random."""
    steps, chance = np.arange(201), np.random.default_rng(1).random((200, 30))

    def compute(size: float) -> dict[str, tuple]:
        random = np.vstack([np.zeros(30), np.floor(size + chance).cumsum(0)])
        apart = np.vstack([random, np.full(30, np.nan)]).ravel("F")  # thirty lines as one
        return {
            "random, 30 weights": (np.tile([*steps, np.nan], 30), apart), "random, mean": (steps, random.mean(1)),
            "nearest": (steps, np.floor(size + 0.5) * steps), "exact": (steps, size * steps),
        }  # fmt: skip

    def caption(size: float) -> str:
        random, nearest = (compute(size)[name][1][-1] for name in ("random, mean", "nearest"))
        return (
            f"200 updates of {size:g} spacings each should move the weight by {200 * size:g}. Rounding to nearest "
            f"moves it by {nearest:g}, random rounding by {random:.0f} on average."
        )

    colors = figures.SKY, figures.BLUE, figures.RED, figures.BLACK
    styles = dict(zip(compute(0.5), zip(colors, ("-", "-", "-", ":"), strict=True), strict=True))
    sizes = [0.05, 0.1, 0.2, 0.3, 0.4, 0.49, 0.51, 0.6, 0.7, 0.8, 0.9, 1.0]
    axis = {"xlim": (0, 200), "ylim": (-4, 204), "xlabel": "updates", "ylabel": "weight (spacings of the format)"}
    size = widgets.slider("size of an update (spacings)", sizes, 0.49)
    curves(styles, compute, caption, axis, size=size)


# The further notebook


def sums(totals: Mapping[str, Mapping[str, np.ndarray]], exact: np.ndarray) -> None:
    """Explore long sums: totals by format and method, and the `exact` ones, each (length,), after each addition."""
    colors = {"exact": figures.BLACK, "Kahan": figures.BLUE, "chunks": figures.ORANGE, "naive": figures.RED}
    styles = {name: (color, "-") for name, color in colors.items()} | {"wide": (figures.GREY, "--")}

    def compute(name: str, length: int) -> dict[str, tuple]:
        at = np.unique(np.linspace(0, length - 1, 300).astype(int))
        found = totals[name] | {"exact": exact}
        return {method: (100 * (at + 1) / length, 100 * found[method][at] / exact[length - 1]) for method in styles}

    def caption(name: str, length: int) -> str:
        texts = ", ".join(f"{method} {values[length - 1]:.4g}" for method, values in totals[name].items())
        return f"{length:,} numbers in {name}: the exact sum is {exact[length - 1]:.4g}; {texts}."

    axis = {"xlim": (0, 100), "ylim": (0, 115), "xlabel": "numbers added (% of all)"}
    axis["ylabel"] = "total (% of the exact sum)"
    length = widgets.slider("length", [10, 30, 100, 300, 1000, 3000, 8000], 8000, "{:,}")
    curves(styles, compute, caption, axis, name=widgets.menu("format", [*totals]), length=length)
