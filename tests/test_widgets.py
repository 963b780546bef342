import asyncio
import base64
import io
import threading
from concurrent.futures import ThreadPoolExecutor

import extremes
import numpy as np
import pytest
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from PIL import Image

from dlscale.page import figures, widgets


@pytest.fixture
def shown(monkeypatch):
    """What is displayed, with its metadata, in order. No explorer survives the test."""
    seen = []

    def display(*objects, **options):
        seen.extend((item, options.get("metadata")) for item in objects)

    monkeypatch.setattr(widgets, "display", display)
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
            if kind == "stopped":
                raise KeyboardInterrupt
            if limits:
                ax.set_title(f"slope {slope}")
                return None
            return [line]

        return update

    return make


def explore(**options):
    """An explorer with a slider and a menu, whose answers are collected in its `answers`."""
    widgets.explore(
        options.pop("make", line_figure()),
        alt=lambda slope, kind: f"slope {slope}, {kind}",
        slope=widgets.slider("slope", [1.0, 2.0, 3.0]),
        kind=widgets.menu("kind", options.pop("kinds", ["plain", "fancy"])),
        **options,
    )
    explorer = widgets.explorers[-1]
    explorer.answers = []
    explorer.page.send = lambda message, buffers=(): explorer.answers.append((message, [*buffers]))
    return explorer


def ask(explorer, at, near=()):
    """What the page's side does when a reader moves a control; returns the answer."""
    explorer._on_message(explorer.page, {"at": at, "near": [*near]}, [])
    return explorer.answers[-1]


def pixels(picture: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(picture)), dtype=int)


def test_the_cell_holds_nothing_but_the_first_picture_and_its_sentence(shown):
    explore()
    ((bundle, metadata), (still, _)) = shown
    assert metadata == {"image/png": {"alt": "slope 2.0, plain"}}
    assert '<p class="dlscale-still">slope 2.0, plain <em>Run this cell to move: slope, kind.' in still["text/html"]
    assert set(bundle) == {"image/png", "text/plain"}
    assert bundle["text/plain"] == "slope 2.0, plain"
    assert pixels(bundle["image/png"]).shape == (340, 720, 3)


def test_the_page_is_told_what_it_needs_to_find_the_picture_and_draw_the_controls(shown):
    about = explore().page.about
    assert base64.b64decode(about["picture"].removeprefix("data:image/png;base64,")) == shown[0][0]["image/png"]
    assert about["alt"] == "slope 2.0, plain"
    assert about["keeps"]
    slider = {"kind": "slider", "label": "slope", "texts": ["1", "2", "3"], "start": 1, "interval": 0}
    assert about["controls"] == [
        slider,
        slider | {"kind": "menu", "label": "kind", "texts": ["plain", "fancy"], "start": 0},
    ]
    assert not explore(remembers=True).page.about["keeps"]


def test_equal_pictures_of_two_explorers_differ_in_their_bytes_alone(shown):
    first, second = (explore().page.about["picture"] for _ in range(2))
    assert first != second
    np.testing.assert_array_equal(*(pixels(base64.b64decode(url.partition(",")[2])) for url in (first, second)))


def test_where_outputs_live_apart_the_explorer_itself_is_displayed(shown, monkeypatch):
    monkeypatch.setattr(widgets, "ISOLATED", True)
    explorer = explore()
    assert shown == [(explorer.page, None)]


@pytest.mark.parametrize("limits", [False, True])
def test_a_moved_picture_is_the_one_that_drawing_everything_would_give(shown, limits):
    explorer = explore(make=line_figure(limits))
    for slope in (1.0, 3.0, 2.0, 3.0):
        moved, _ = explorer.draw({"slope": slope, "kind": "plain"})
    for artist in explorer.moving:
        artist.set_animated(False)
    explorer.figure.canvas.draw()
    np.testing.assert_allclose(pixels(moved), pixels(figures.png(explorer.figure)), atol=2)  # of 255: edges blend


def test_one_figure_is_drawn_at_a_time_whatever_the_thread(shown, monkeypatch):
    monkeypatch.setattr(figures, "display", lambda *_, **__: None)
    two, met = threading.Barrier(2), []

    class Meeting(Artist):
        def draw(self, renderer):
            try:
                met.append(two.wait(0.3))
            except threading.BrokenBarrierError:
                two.reset()

    def make(figure):
        moving = figure.add_artist(Meeting())
        return lambda slope, kind: [moving]

    figure, _ = figures.new()
    figure.add_artist(Meeting())
    first, second = explore(make=make), explore(make=make)
    with ThreadPoolExecutor(2) as pool:
        for other in (lambda: second.draw(second.start), lambda: figures.show(figure, "a figure")):
            jobs = [pool.submit(first.draw, first.start), pool.submit(other)]
            assert [job.exception() for job in jobs] == [None] * 2
            assert not met


def test_an_answer_carries_the_setting_the_sentence_and_the_picture(shown):
    explorer = explore()
    message, (picture,) = ask(explorer, [2, 1])
    assert message == {"at": [2, 1], "alt": "slope 3.0, fancy"}
    assert picture == explorer.draw({"slope": 3.0, "kind": "fancy"})[0]
    assert picture != ask(explorer, [0, 1])[1][0]


@pytest.mark.parametrize(("kind", "what"), [("broken", "RuntimeError: no such kind"), ("stopped", "KeyboardInterrupt")])
def test_an_error_or_an_interrupt_is_the_answer_and_the_next_setting_is_drawn_anew(shown, kind, what):
    explorer = explore(kinds=["plain", kind])
    message, buffers = ask(explorer, [0, 1])
    assert message["at"] == [0, 1]
    assert what in message["error"]
    assert buffers == []
    message, (picture,) = ask(explorer, [2, 0])
    assert message["alt"] == "slope 3.0, plain"
    np.testing.assert_allclose(pixels(picture), pixels(explore().draw({"slope": 3.0, "kind": "plain"})[0]), atol=2)


def drawn_ahead(explorer, work):
    """Run `work` in a loop until nothing waits to be drawn; return the settings answered, in order."""

    async def run():
        work()
        await asyncio.wait([explorer.ahead])

    asyncio.run(run())
    return [message["at"] for message, _ in explorer.answers]


def test_settings_nearby_are_drawn_after_what_is_asked_for_and_a_newer_list_replaces_the_old(shown):
    explorer = explore()

    def work():
        ask(explorer, [0, 0], near=[[1, 0], [2, 0]])
        ask(explorer, [0, 1], near=[[1, 1], [2, 1], [0, 0]])

    answered = drawn_ahead(explorer, work)
    assert answered == [[0, 0], [0, 1], [1, 1], [2, 1]]  # the last of the list was sent before


def test_nothing_is_drawn_ahead_while_a_cell_runs_and_all_after_it(shown, monkeypatch):
    explorer, waited = explore(), []

    async def sleep(seconds):
        waited.append((seconds, len(explorer.answers)))
        if len(waited) > 5:
            widgets.cell_runs.clear()

    monkeypatch.setattr(widgets.asyncio, "sleep", sleep)
    widgets.cell_runs.set()
    answered = drawn_ahead(explorer, lambda: ask(explorer, [0, 0], near=[[1, 0]]))
    assert {answers for _, answers in waited} == {1}
    assert answered == [[0, 0], [1, 0]]


def test_after_a_cell_pages_that_asked_forget_what_they_keep(shown):
    asked, idle = explore(), explore()
    ask(asked, [0, 0])
    widgets.cell_ended(None)
    widgets.cell_ended(None)
    assert [message for message, _ in asked.answers[1:]] == [{"forget": True}]
    assert idle.answers == []


def test_check_extremes_visits_every_end(shown):
    seen = []

    def make(figure):
        update = line_figure()(figure)
        return lambda slope, kind: seen.append((slope, kind)) or update(slope * (2 if kind == "fancy" else 1), "plain")

    explore(make=make, kinds=["plain", "fancy", "third"])
    extremes.check()
    assert {(1.0, "plain"), (3.0, "plain"), (1.0, "third"), (3.0, "third"), (2.0, "fancy")} <= set(seen)


def test_check_extremes_fails_for_a_failing_callback_and_for_an_idle_control(shown):
    explore(kinds=["plain", "broken"])
    with pytest.raises(AssertionError, match="failed at"):
        extremes.check()
    widgets.explorers.clear()
    explore()  # "kind" moves nothing
    with pytest.raises(AssertionError, match="'kind' of explorer 0 never changed the picture"):
        extremes.check()


@pytest.mark.parametrize("how", ["everywhere", "at one setting alone", "in place"])
def test_check_extremes_fails_for_what_moves_and_is_not_returned(shown, how):
    def make(figure):
        update, (other,) = line_figure()(figure), figure.axes[0].fill([0, 1, 1], [0, 0, 1])

        def update_more(slope, kind):
            if how == "everywhere":
                figure.axes[0].set_title(f"{slope:g}, {kind}")
            elif how == "in place":
                other.get_xy()[2] = 1, slope  # the figure is not told
            elif (slope, kind) == (3.0, "plain"):
                other.set_color("red")
            return update(slope * (2 if kind == "fancy" else 1), "plain")

        return update_more

    explore(make=make)
    with pytest.raises(AssertionError, match="Explorer 0 is not drawn in full"):
        extremes.check()


def test_controls_start_where_asked_and_know_their_texts():
    slider = widgets.slider("learning rate", [0.1, 0.2, 0.5], 0.5, "{:.2f}")
    assert (slider.start, slider.label, slider.texts) == (0.5, "learning rate", ["0.10", "0.20", "0.50"])
    assert widgets.slider("x", [1, 2, 3]).start == 2
    assert (slider.value(0), slider.look()["start"]) == (0.1, 2)
    player = widgets.player("step", range(5), 0, interval=100)
    assert (player.kind, player.look()["start"], player.interval) == ("player", 0, 100)
    assert widgets.menu("m", ["a", "b"]).start == "a"
    assert widgets.menu("m", {"a": 1, "b": 2}, "b").look()["start"] == 1
    number = widgets.number("n", 0.1, -1.0, 1e9, [0.5])
    assert (number.look()["start"], number.value(2e9), number.value(-3), number.value(0.3)) == (0.1, 1e9, -1.0, 0.3)
    assert isinstance(number.value(1), float)
    assert number.examples == [0.1, 0.5]


def test_bad_controls_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="The slider 'x' starts at 5, which is not among its values: \\[1, 2, 3\\]"):
        widgets.slider("x", [1, 2, 3], 5)
    with pytest.raises(ValueError, match="The slider 'x' has no values"):
        widgets.slider("x", [])
    with pytest.raises(ValueError, match="The slider 'x' has no values"):
        widgets.player("x", [], 3)
    with pytest.raises(ValueError, match="The menu 'x' has no values"):
        widgets.menu("x", [])
    with pytest.raises(ValueError, match="The menu 'x' starts at 'c'"):
        widgets.menu("x", ["a", "b"], "c")
    with pytest.raises(ValueError, match="The number 'x' starts at 7, outside its limits: \\[0, 5\\]"):
        widgets.number("x", 7, 0, 5)


def test_bad_explorers_are_refused_with_the_reason(shown):
    with pytest.raises(TypeError, match="make\\(figure\\) must return the function update\\(\\*\\*values\\), not None"):
        explore(make=lambda figure: None)
    with pytest.raises(TypeError, match=r"The control 'x' must be made by widgets\.slider, player, menu or number"):
        widgets.explore(line_figure(), alt=str, x=3)
    assert shown == widgets.explorers == []


def test_a_picture_over_the_limit_is_refused(shown, monkeypatch):
    monkeypatch.setattr(widgets, "MAX_FRAME_BYTES", 2_000)
    with pytest.raises(ValueError, match=r"The picture takes [\d,]+ bytes, over 2,000: make it smaller"):
        explore()


def test_an_explorer_needs_no_control(shown):
    widgets.explore(lambda figure: lambda: None, alt=lambda: "empty", width=2, height=1)
    assert pixels(shown[0][0]["image/png"]).shape == (100, 200, 3)
    assert isinstance(widgets.explorers[0].figure, Figure)


def test_a_prediction_starts_open_and_the_saved_file_keeps_the_question(shown):
    guess = widgets.predict("Which <one>?", ["a", "b"])
    assert (guess.value, guess.question, guess.options) == (None, "Which <one>?", ["a", "b"])
    assert shown[-1][0]["text/markdown"] == "**Which <one>?**\n\n- a\n- b"
    assert shown[-1][0]["text/plain"] == "Which <one>?\n( ) a\n( ) b"
    with pytest.raises(ValueError, match="at least two options, not \\['a'\\]"):
        widgets.predict("Which?", ["a"])
