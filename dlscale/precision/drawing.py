"""Figures and explorers of 05_precision and its further notebook: a line in the notebook calls each."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlscale import precision
from dlscale.course.records import Record
from dlscale.page import figures, widgets

SHORT = ("float16", "bfloat16", "float8_e5m2", "float8_e4m3fn")
EXPONENTS = np.arange(-44, 24)  # of the histograms
COLORS = {"weights": figures.BLACK, "activations": figures.BLUE, "gradients": figures.RED, "updates": figures.GREEN}


def _words(ax: Axes, colors: Mapping[str, str]) -> None:
    """The names of lines in their colours, one below the other."""
    for place, (name, color) in enumerate(colors.items()):
        ax.text(0.02, 0.94 - 0.08 * place, name, color=color, transform=ax.transAxes, va="center")


def opening(record: Record) -> None:
    """Test accuracy of three runs of `precision-formats`, a bar and a mark for each seed."""
    runs = {"float16": "alone, float16"}
    runs |= {f"{name}, loss / 1,024": f"worker, {name}" for name in ("float32", "float16")}
    figure, ax = figures.new(height=2.2)
    said = []
    for place, (name, run) in enumerate(runs.items()):
        accuracy = record.values("accuracy", variant=run, judged_on="test")
        ax.barh(place, accuracy.mean(), color=figures.SKY if place < 2 else figures.RED)
        ax.plot(accuracy, np.full(len(accuracy), place), "|", color=figures.BLACK)
        said.append(f"{name}: {accuracy.mean():.0f} % of the test digits right")
    ax.axvline(10, color=figures.BLACK, linestyle=":")
    ax.text(10.5, -0.65, "guessing", va="center")
    ax.set(xlim=(0, 100), ylim=(2.5, -0.9), xlabel="test accuracy (%), one mark per seed")
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
    return f"{'−' if sign == '1' else ''}{size}"


def bits() -> None:
    """Explore how a number is stored: its bits, and the two neighbours between which it is rounded."""
    parts = {"sign": figures.RED, "exponent": figures.ORANGE, "mantissa": figures.BLUE}

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        ax.set(xlim=(-0.5, 31.5), ylim=(0, 4), xticks=[], yticks=[], frame_on=False)
        squares = ax.bar(np.arange(32), 0.8, 0.92, bottom=2.7)
        digits = [ax.text(i, 3.1, "", ha="center", va="center", color="white") for i in range(32)]
        places = (-0.4, 1.2, 0)
        titles = [ax.text(x, 3.75, part, color=parts[part]) for x, part in zip(places, parts, strict=True)]
        reading = ax.text(-0.4, 2.25, "", va="center")
        ax.plot([2, 29], [1.2, 1.2], color=figures.GREY, linewidth=1)
        ax.plot([6, 15.5, 25], [1.2] * 3, "|", color=figures.BLACK, markersize=16)
        (mark,) = ax.plot([], [], "v", color=figures.RED, markersize=9)
        numbers = [ax.text(place, 0.45, "", ha="center") for place in (6, 15.5, 25)]
        ax.text(15.5, 0.0, "stored", ha="center", color=figures.GREY)
        typed = ax.text(0, 1.62, "", ha="center", color=figures.RED)

        def update(x: float, name: str) -> list[Artist]:
            pattern = precision.bits(x, name)
            colors = [color for some, color in zip(pattern, parts.values(), strict=True) for _ in some]
            for square, digit, bit, color in zip(
                squares, digits, "".join(pattern).ljust(32), colors + ["white"] * (32 - len(colors)), strict=True
            ):
                digit.set_text(bit)
                square.set_facecolor(color)
            titles[2].set_x(0.6 + len(pattern[1]))
            reading.set_text(f"= {_formula(x, name)}")
            number, (below, above) = float(precision.quantize(x, name)), precision.neighbours(x, name)
            gap = above - number if x >= number and np.isfinite(above) else number - below
            place = np.clip((x - number) / gap, -1, 1) if np.isfinite(number) and np.isfinite(gap) else 0.0
            mark.set_data([15.5 + 9.5 * place], [1.4])
            typed.set(x=15.5 + 9.5 * place, text=f"{x:.9g}")
            for text, value in zip(numbers, (below, number, above), strict=True):
                text.set_text(f"{value:.9g}")
            return [*squares, *digits, *titles, reading, mark, *numbers, typed]

        return update

    def caption(x: float, name: str) -> str:
        number = float(precision.quantize(x, name))
        if not np.isfinite(number):
            return f"{x:.9g} is too large for {name}, which ends at {precision.FORMATS[name].max:.9g}."
        error = f"a relative error of {abs(number / x - 1):.2g}" if x and number else "lost" if x else "exact"
        return f"{x:.9g} in {name} becomes {number:.9g} = {_formula(x, name)}: {'exact' if number == x else error}."

    examples = [1.0, -3.14159265, 1e-7, 1e-8, 2049.0, 65519.0, 65520.0, 1e38]
    x = widgets.number("number", 0.1, -3.4e38, 3.4e38, examples)
    name = widgets.menu("format", ["float32", *SHORT], "float16")
    widgets.explore(make, alt=caption, height=2.7, x=x, name=name)


# Section 2


def exponents(values: np.ndarray) -> np.ndarray:
    """Per cent of the numbers other than 0 that have each of the `EXPONENTS`; the outermost ones hold the rest."""
    values = np.asarray(values)[np.asarray(values) != 0]
    place = np.clip(np.frexp(values)[1] - 1 - EXPONENTS[0], 0, len(EXPONENTS) - 1)
    return 100 * np.bincount(place, minlength=len(EXPONENTS)) / len(values)


def histograms(tensors: Mapping[int, Mapping[str, np.ndarray]]) -> None:
    """Explore the exponents of weights, activations, gradients and updates, by step, and what a format loses."""
    counts = {step: {kind: exponents(values) for kind, values in kinds.items()} for step, kinds in tensors.items()}

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        normal, subnormal = (ax.axvspan(0, 1, color=figures.GREY, alpha=alpha, linewidth=0) for alpha in (0.22, 0.1))
        (before,) = ax.plot([], [], ":", color=figures.RED, drawstyle="steps-post")
        lines = {kind: ax.plot([], [], color=color, drawstyle="steps-post")[0] for kind, color in COLORS.items()}
        _words(ax, COLORS | {"dotted: loss × 1": figures.RED})
        zero = ax.axvline(0, color=figures.BLACK, linewidth=1)
        text = ax.text(0, 63, "", color=figures.GREY, ha="right", va="top")
        ax.set(xlim=(-40, 20), ylim=(0, 65), xlabel="size of the number (power of 2)", ylabel="numbers (%)")

        def update(shift: int, step: int, name: str) -> list[Artist]:
            form = precision.FORMATS[name]
            first, full, last = np.clip(np.log2([form.smallest_subnormal, form.smallest_normal, form.max]), -40, 20)
            for span, low, high in ((subnormal, first, full), (normal, full, last)):
                span.set(x=low, width=high - low)
            zero.set_xdata([first - 1] * 2)
            text.set(x=last - 0.5, text=f"range of {name}")
            for kind, line in lines.items():
                line.set_data(EXPONENTS + shift * (kind == "gradients"), counts[step][kind])
            before.set_data(EXPONENTS, counts[step]["gradients"])
            return [normal, subnormal, zero, text, before, *lines.values()]

        return update

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
    widgets.explore(make, alt=caption, shift=shift, step=step, name=widgets.menu("format", SHORT))


# Section 3


def loss_scaling(powers: Sequence[int], runs: Mapping[tuple[str, int], tuple[float, np.ndarray]]) -> None:
    """Explore the loss scale: test accuracy for each power of two, and the zero gradients (%, by step) of one run."""
    steps = len(next(iter(runs.values()))[1])

    def make(fig: Figure) -> widgets.Update:
        left, right = figures.axes(fig, 2)
        (line,) = left.plot([], [], "o-", color=figures.TEST)
        (point,) = left.plot([], [], "o", color=figures.BLACK, markersize=10)
        left.axvline(powers[0], color=figures.GREY, linestyle=":")
        left.text(powers[0] + 0.7, 103, "loss / 1,024", color=figures.GREY, va="center")
        left.set(xlabel="loss multiplied by (power of 2)", ylabel="test accuracy (%)")
        left.set(xlim=(powers[0] - 2, powers[-1] + 2), ylim=(0, 108))
        (curve,) = right.plot([], [], color=figures.BLACK)
        right.set(xlabel="step", ylabel="gradients that are zero (%)", xlim=(0, steps), ylim=(0, 103))

        def update(power: int, name: str) -> list[Artist]:
            line.set_data(powers, [100 * runs[name, other][0] for other in powers])
            point.set_data([power], [100 * runs[name, power][0]])
            curve.set_data(range(steps), 100 * runs[name, power][1])
            return [line, point, curve]

        return update

    def caption(power: int, name: str) -> str:
        accuracy, zeros = runs[name, power]
        return (
            f"{name}, loss multiplied by 2^{power}: the test accuracy is {100 * accuracy:.0f} %. "
            f"At the last step {100 * zeros[-1]:.0f} % of the gradients are zero."
        )

    power = widgets.slider("loss × 2^", powers, powers[0])
    widgets.explore(make, alt=caption, power=power, name=widgets.menu("format", SHORT))


def dynamic_scale(scales: Mapping[str, np.ndarray]) -> None:
    """What multiplies the loss in each step, (steps,), as dynamic loss scaling chose it, for each format."""
    figure, ax = figures.new(height=2.8)
    for (name, scale), color in zip(scales.items(), (figures.BLUE, figures.RED), strict=False):
        figures.name(ax, ax.plot(np.log2(scale), color=color)[0], name)
    ax.set(xlabel="step", ylabel="loss multiplied by (power of 2)", xlim=(0, len(scale)), ylim=(0, 30))
    ends = ", ".join(f"{name} at 2^{np.log2(scale[-1]):.0f}" for name, scale in scales.items())
    said = "The scale divided by 1,024 falls until nothing overflows, then moves up and down."
    figures.show(figure, f"{said} At the end: {ends}.")


# Section 4


def by_rate(accuracies: Mapping[str, np.ndarray], rates: Sequence[float]) -> None:
    """Test accuracy, (seeds, rates) in per cent, by learning rate: a line with its interval for each variant."""
    figure, ax = figures.new(height=3.2)
    pairs = zip(accuracies.items(), (figures.BLACK, figures.BLUE, figures.ORANGE, figures.RED), strict=True)
    lines = {name: figures.band(ax, rates, samples, color, marker="o") for (name, samples), color in pairs}
    figures.names(ax, lines, gap=3.2)
    ax.set(xscale="log", xlabel="learning rate", ylabel="test accuracy (%)")
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ax.minorticks_off()
    best = {name: samples.mean(0).max() for name, samples in accuracies.items()}
    figures.show(figure, f"At the best rate: {', '.join(f'{name} {value:.0f} %' for name, value in best.items())}.")


def updates() -> None:
    """Explore a weight that gets 200 equal updates, rounded to nearest and at random."""
    steps, chance = np.arange(201), np.random.default_rng(1).random((200, 30))

    def walk(size: float, add: np.ndarray) -> np.ndarray:
        path = [np.zeros(add.shape[1])]
        for more in add:
            path.append(np.floor(path[-1] + size + more))
        return np.array(path)

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        paths = [ax.plot([], [], color=figures.SKY, linewidth=0.8)[0] for _ in range(30)]
        colors = {"exact": figures.BLACK, "random, mean of 30": figures.BLUE, "nearest": figures.RED}
        lines = {name: ax.plot([], [], color=color, linewidth=2.5)[0] for name, color in colors.items()}
        lines["exact"].set(linestyle=":", zorder=3)
        _words(ax, colors)
        ax.set(xlim=(0, 200), ylim=(-5, 205), xlabel="updates", ylabel="weight (spacings of the format)")

        def update(size: float) -> list[Artist]:
            random = walk(size, chance)
            nearest = walk(size, np.full((200, 1), 0.5))[:, 0]
            moved = [*paths, *lines.values()]
            for line, values in zip(moved, (*random.T, size * steps, random.mean(1), nearest), strict=True):
                line.set_data(steps, values)
            return moved

        return update

    def caption(size: float) -> str:
        nearest, random = walk(size, np.full((200, 1), 0.5))[-1, 0], walk(size, chance)[-1]
        return (
            f"200 updates of {size:g} spacings each should move the weight by {200 * size:g}. Rounding to nearest "
            f"moves it by {nearest:g}, random rounding by {random.mean():.0f} on average."
        )

    sizes = [0.05, 0.1, 0.2, 0.3, 0.4, 0.49, 0.51, 0.6, 0.7, 0.8, 0.9, 1.0]
    widgets.explore(make, alt=caption, size=widgets.slider("size of an update (spacings)", sizes, 0.3))


# The further notebook


def roundings(results: Mapping[str, Mapping[str, tuple]], choice: str, xlabel: str, ylabel: str) -> None:
    """Explore x and accuracies, (seeds, len(x)) in per cent: a line with its interval for each rounding or format."""
    colors = {"nearest": figures.RED, "random": figures.BLUE, "float32": figures.GREY}

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        ax.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, 102), xscale="log" if "rate" in xlabel else "linear")

        def update(name: str) -> None:
            for artist in [*ax.lines, *ax.collections, *ax.texts]:
                artist.remove()
            for place, (label, (x, samples)) in enumerate(results[name].items()):
                figures.band(ax, x, samples, colors[label], marker="o")
                ax.text(0.98, 0.78 - 0.08 * place, label, color=colors[label], transform=ax.transAxes, ha="right")
            ax.set_xticks(x, [f"{value:g}" for value in x])
            ax.minorticks_off()

        return update

    def caption(name: str) -> str:
        best = (f"{label} {samples.mean(0).max():.0f} %" for label, (_, samples) in results[name].items())
        return f"{choice.capitalize()}: {name}. At the best place: {', '.join(best)}."

    widgets.explore(make, alt=caption, name=widgets.menu(choice, [*results]))


def exponents_by_step(exponents: Mapping[str, np.ndarray]) -> None:
    """The shared exponents of each kind of tensor, (steps, layers), and in bold their mean over the layers."""
    figure, ax = figures.new(height=3.6)
    lines = {}
    colors = (figures.BLACK, figures.BLUE, figures.GREEN, figures.ORANGE, figures.RED)
    for (name, values), color in zip(exponents.items(), colors, strict=True):
        ax.plot(values, color=color, linewidth=0.7, alpha=0.4)
        (lines[name],) = ax.plot(values.mean(1), color=color)
    figures.names(ax, lines, gap=0.9)
    ax.set(xlabel="step", ylabel="shared exponent (power of 2)")
    ends = ", ".join(f"{name} {values[-1].mean():.0f}" for name, values in exponents.items())
    figures.show(figure, f"Mean exponents at the end: {ends}.".replace("-", "−"))


def sums(totals: Mapping[str, Mapping[str, np.ndarray]], exact: np.ndarray) -> None:
    """Explore long sums: totals by format and method, and the `exact` ones, each (length,), after each addition."""
    colors = {"wide": figures.GREY, "Kahan": figures.BLUE, "chunks": figures.ORANGE, "naive": figures.RED}

    def make(fig: Figure) -> widgets.Update:
        ax = figures.axes(fig)
        ax.plot([0, 100], [0, 100], ":", color=figures.BLACK)
        _words(ax, {"exact (dotted)": figures.BLACK} | colors)
        lines = {method: ax.plot([], [], color=color)[0] for method, color in colors.items()}
        lines["wide"].set(linewidth=6, alpha=0.4)
        ax.set(xlabel="numbers added (% of all)", ylabel="total (% of the exact sum)", xlim=(0, 100), ylim=(0, 115))

        def update(name: str, length: int) -> list[Artist]:
            at = np.unique(np.linspace(0, length - 1, 300).astype(int))
            for method, line in lines.items():
                line.set_data(100 * (at + 1) / length, 100 * totals[name][method][at] / exact[length - 1])
            return [*lines.values()]

        return update

    def caption(name: str, length: int) -> str:
        texts = ", ".join(f"{method} {totals[name][method][length - 1]:.4g}" for method in reversed(colors))
        return f"{length:,} numbers in {name}: the exact sum is {exact[length - 1]:.4g}; {texts}."

    length = widgets.slider("length", [10, 30, 100, 300, 1000, 3000, 8000], 8000, "{:,}")
    widgets.explore(make, alt=caption, name=widgets.menu("format", [*totals]), length=length)
