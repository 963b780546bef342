import io

import numpy as np
import pytest
from PIL import Image

from dlscale.lab.intervals import interval
from dlscale.page import figures


def luminance(color: str) -> float:
    """Relative luminance (WCAG 2)."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, (0.2126, 0.7152, 0.0722)))


def test_methods_have_distinct_colours_that_show_on_white():
    assert len(set(figures.METHODS.values())) == 7
    for color in (*figures.METHODS.values(), figures.GREY):
        assert (1.05) / (luminance(color) + 0.05) > 2, color


def test_show_displays_a_png_with_alt_text(monkeypatch):
    seen = []
    monkeypatch.setattr(figures, "display", lambda bundle, **options: seen.append((bundle, options["metadata"])))
    figure, axes = figures.new(2, width=5, height=3)
    assert len(axes) == 2
    figures.show(figure, "two empty axes")
    bundle, metadata = seen[0]
    assert metadata == {"image/png": {"alt": "two empty axes"}}
    assert Image.open(io.BytesIO(bundle["image/png"])).size == (500, 300)


def test_a_band_is_the_interval_over_seeds():
    _, ax = figures.new()
    samples = np.random.default_rng(0).normal(size=(6, 4))
    line = figures.band(ax, range(4), samples, figures.BLUE, "train")
    mean, low, high = interval(samples)
    np.testing.assert_allclose(line.get_ydata(), mean)
    box = ax.collections[0].get_paths()[0].get_extents()
    assert (box.ymin, box.ymax) == pytest.approx((low.min(), high.max()))
    assert [text.get_text() for text in ax.texts] == ["train"]
    assert ax.texts[0].get_color() == figures.BLUE


def test_a_name_stands_at_the_last_finite_point():
    _, ax = figures.new()
    (line,) = ax.plot([1, 2, 3], [4, 5, np.nan])
    figures.name(ax, line, "here")
    assert tuple(ax.texts[0].xy) == (2, 5)


def test_contour_keeps_the_ranges_and_shows_the_minimum():
    _, ax = figures.new()
    figures.contour(ax, lambda x, y: x**2 + y**2, (-1, 2), (-3, 1))
    assert ax.get_xlim() == (-1, 2)
    assert ax.get_ylim() == (-3, 1)
    levels = np.asarray(ax.collections[0].get_array(), dtype=float)
    assert np.isfinite(levels).all()
