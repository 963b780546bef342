import io

import numpy as np
import pytest
from IPython.display import DisplayHandle
from PIL import Image

from dlscale.page import figures, widgets


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, in order; updates of a picture too. No explorer survives the test."""
    seen = []

    def display(*objects, **options):
        seen.extend((item, options.get("metadata")) for item in objects)
        return DisplayHandle() if options.get("display_id") else None

    monkeypatch.setattr(widgets, "display", display)
    monkeypatch.setattr(
        widgets.DisplayHandle if hasattr(widgets, "DisplayHandle") else DisplayHandle,
        "update",
        lambda self, item, **options: seen.append((item, options.get("metadata"))),
    )
    monkeypatch.setattr(widgets, "explorers", [])
    return seen


def line_figure(limits: bool = False):
    """An explorer's `make`: a line with a slope; with `limits`, a new title each time."""

    def make(figure):
        ax = figures.axes(figure)
        (line,) = ax.plot([0, 1], [0, 0], color="k")
        ax.set(xlim=(0, 1), ylim=(-5, 5))

        def update(slope, kind):
            line.set_ydata([0, slope])
            if kind == "broken":
                raise RuntimeError("no such kind")
            if limits:
                ax.set_title(f"slope {slope}")
                return None
            return [line]

        return update

    return make


def explore(**options):
    widgets.explore(
        options.pop("make", line_figure()),
        alt=lambda slope, kind: f"slope {slope}, {kind}",
        slope=widgets.slider("slope", [1.0, 2.0, 3.0]),
        kind=widgets.menu("kind", options.pop("kinds", ["plain", "fancy"])),
    )
    return widgets.explorers[-1]


def pixels(picture: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture)), dtype=int)


def test_the_first_picture_is_displayed_with_its_alt_text(shown):
    explore()
    bundle, metadata = shown[-1]
    assert metadata == {"image/png": {"alt": "slope 2.0, plain"}}
    assert bundle["text/plain"] == "slope 2.0, plain"
    assert pixels(bundle["image/png"]).shape == (340, 720, 3)


@pytest.mark.parametrize("limits", [False, True])
def test_a_moved_picture_is_the_one_that_drawing_everything_would_give(shown, limits):
    explorer = explore(make=line_figure(limits))
    for slope in (1.0, 3.0, 2.0, 3.0):
        explorer.controls["slope"].value = slope
    moved = pixels(explorer.picture)
    for artist in explorer.moving:
        artist.set_animated(False)
    explorer.canvas.draw()
    np.testing.assert_allclose(moved, pixels(figures.png(explorer.figure)), atol=2)  # of 255: edges are blended


def test_every_change_updates_picture_caption_and_alt(shown):
    explorer = explore()
    before, count = explorer.picture, len(shown)
    explorer.controls["slope"].value = 3.0
    assert len(shown) == count + 1
    assert shown[-1][1]["image/png"]["alt"] == "slope 3.0, plain"
    assert "slope 3.0, plain" in explorer.caption.value
    assert explorer.picture != before


def test_an_error_in_a_callback_is_shown_and_the_next_value_recovers(shown):
    explorer = explore(kinds=["plain", "broken"])
    explorer.controls["kind"].value = "broken"
    assert isinstance(explorer.error, RuntimeError)
    assert "RuntimeError: no such kind" in explorer.caption.value
    assert "no such kind" in shown[-1][0]["text/plain"]
    explorer.controls["kind"].value = "plain"
    assert explorer.error is None
    assert "image/png" in shown[-1][0]


def test_check_extremes_visits_every_end_and_restores_the_start(shown):
    seen = []

    def make(figure):
        update = line_figure()(figure)
        return lambda slope, kind: seen.append((slope, kind)) or update(slope * (2 if kind == "fancy" else 1), "plain")

    explorer = explore(make=make, kinds=["plain", "fancy", "third"])
    widgets.check_extremes()
    assert {(1.0, "plain"), (3.0, "plain"), (1.0, "third"), (3.0, "third"), (2.0, "fancy")} <= set(seen)
    assert (explorer.controls["slope"].value, explorer.controls["kind"].value) == (2.0, "plain")


def test_check_extremes_fails_for_a_failing_callback_and_for_an_idle_control(shown):
    explore(kinds=["plain", "broken"])
    with pytest.raises(AssertionError, match="failed at"):
        widgets.check_extremes()
    widgets.explorers.clear()
    explore()  # "kind" moves nothing
    with pytest.raises(AssertionError, match="'kind' of explorer 0 never changed the picture"):
        widgets.check_extremes()


def test_controls_have_accessible_names_and_start_where_asked():
    slider = widgets.slider("learning rate", [0.1, 0.2, 0.5], 0.5, "{:.2f}")
    assert (slider.value, slider.description, slider.tooltip) == (0.5, "learning rate", "learning rate")
    assert [label for label, _ in slider._options_full] == ["0.10", "0.20", "0.50"]
    assert widgets.slider("x", [1, 2, 3]).value == 2
    with pytest.raises(ValueError, match="'x' starts at 5, which is not among its values"):
        widgets.slider("x", [1, 2, 3], 5)
    assert widgets.menu("m", ["a", "b"]).value == "a"


def test_a_prediction_starts_open(shown):
    guess = widgets.predict("Which <one>?", ["a", "b"])
    assert guess.value is None
    assert "Which &lt;one&gt;?" in shown[-1][0].children[0].value
