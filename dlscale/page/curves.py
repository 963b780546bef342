"""An explorer of lines over one axis."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.figure import Figure

from dlscale.page import figures, widgets

Line = tuple[Sequence[float], Sequence[float]]


def curves(
    styles: Mapping[str, tuple[str, str]], compute: Callable[..., Mapping[str, Line]], caption: Callable[..., str],
    axis: Mapping[str, Any], corner: tuple[float, float] = (0.02, 0.97), height: float = 3.2,
    title: Callable[..., str] = "".format, **controls: Any,
) -> None:  # fmt: skip
    """Explore lines over one axis: `compute` gives x and y of each label, whose color and style `styles` names.

    The labels stand below each other from `corner` on; ticks of `axis` are labelled with their own numbers. `title` is
    called as `caption` is.
    """

    def make(fig: Figure) -> widgets.Update:
        ax, lines = figures.axes(fig), {}
        for place, (label, (color, style)) in enumerate(styles.items()):
            (lines[label],) = ax.plot([], [], style, color=color)
            side = {"ha": "right" if corner[0] > 0.5 else "left", "va": "top", "transform": ax.transAxes}
            ax.text(corner[0], corner[1] - 0.08 * place, label, color=color, **side)
        ax.set(**{name: value for name, value in axis.items() if name[1:] != "ticks"})
        for which in {"xticks", "yticks"} & axis.keys():
            getattr(ax, f"set_{which}")(axis[which], [f"{value:,g}" for value in axis[which]])
            ax.minorticks_off()

        def update(**values: Any) -> list[Artist]:
            found = compute(**values)
            for label, line in lines.items():
                line.set_data(*found[label])
            ax.set_title(title(**values))
            return [*lines.values(), ax.title]

        return update

    widgets.explore(make, alt=caption, height=height, **controls)
