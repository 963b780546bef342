"""Each notebook in JupyterLab in a real browser: what only a browser can tell.

Its cells run there, a control has a name, is reached and moved by keyboard, and picture and caption follow in the page:
one of the first explorer, and for `make test-all` every one. That every end of every control works was seen before,
without a browser (`extremes.check`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import conventions
import lab
import nbformat
import pytest
from conftest import each_notebook

FOLDER = Path(__file__).parent.parent / "notebooks"


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A copy of the notebooks: running them leaves the checkout as it is."""
    return Path(shutil.copytree(FOLDER, tmp_path_factory.mktemp("lab") / "notebooks"))


@pytest.fixture(scope="session")
def address(folder, programs, chromium):
    with lab.server(folder, lab.keep_programs(programs)) as address:
        yield address


@pytest.fixture(scope="session")
def page(address, chromium):
    with lab.page(chromium) as page:
        yield page


def standing(cell):
    """Whether what is stored of the cell is an explorer: a picture with its sentence."""
    shown = [output.get("data", {}) for output in cell.get("outputs", [])]
    return any("image/png" in data and data.get("text/plain") for data in shown)


@each_notebook
def test_the_first_explorer_by_keyboard(path, folder, address, page):
    notebook = nbformat.read(path, as_version=4)
    first = next((number for number, cell in enumerate(notebook.cells) if standing(cell)), None)
    assert first is not None, "no explorer is stored: run `make notebooks`"
    del notebook.cells[first + 1 :]
    nbformat.write(notebook, folder / f"beginning_of_{path.name}")
    with lab.opened(page, address.format(f"beginning_of_{path.name}")) as notebook:
        assert notebook.errors() == []
        if sliders := notebook.sliders():
            check_slider(notebook, sliders[0])
        else:
            check_menu(notebook, notebook.menus()[0])


@pytest.mark.long
@each_notebook
def test_every_control_by_keyboard(path, address, page):
    with lab.opened(page, address.format(path.relative_to(FOLDER).as_posix())) as notebook:
        assert notebook.errors() == []
        assert notebook.sliders()
        for slider in notebook.sliders():
            check_slider(notebook, slider)
        for menu in notebook.menus():
            check_menu(notebook, menu)
        for number in notebook.numbers():
            check_number(notebook, number)
        for button in notebook.players():
            check_player(notebook, button)


def press(notebook, control, what, *keys):
    notebook.press(control, *keys)
    assert control.evaluate("control => document.activeElement === control"), f"{what}: the keyboard lost it"
    assert notebook.errors() == [], f"{what}, key {keys[-1]}"


def check_slider(notebook, slider):
    label = accessible_name(slider)
    assert slider.evaluate("slider => slider.tabIndex") == 0, f"{label}: the Tab key does not reach the slider"
    caption = slider.locator("xpath=ancestor::*[@class='dlscale-explorer']").locator(".dlscale-caption[role=status]")
    seen = []
    for key in ("Home", "End", "ArrowLeft"):
        press(notebook, slider, label, key)
        seen.append((slider.get_attribute("aria-valuetext"), notebook.pictures(slider), caption.inner_text()))
    (start, first_pictures, first_caption), (end, last_pictures, last_caption), (before, pictures, _) = seen
    assert start != end, f"{label}: Home and End do not move the slider"
    assert first_pictures != last_pictures, f"{label}: the picture is the same at both ends"
    assert first_caption != last_caption, f"{label}: the caption is the same at both ends"
    assert before != end, f"{label}: an arrow key does not move the slider"
    assert pictures != last_pictures, f"{label}: an arrow key does not change the picture"


def check_player(notebook, button):
    label = accessible_name(button)
    slider = button.locator("xpath=..").get_by_role("slider")
    press(notebook, slider, label, "End")
    end = slider.get_attribute("aria-valuetext")
    press(notebook, slider, label, "ArrowLeft")
    with notebook.happens(button, "aria-label", label):  # it says Stop meanwhile
        press(notebook, button, label, "Enter")
    notebook.settle()
    assert slider.get_attribute("aria-valuetext") == end, f"{label}: it does not play to the end"


def check_menu(notebook, menu):
    label = accessible_name(menu)
    press(notebook, menu, label, "Home")
    first = notebook.pictures(menu)
    for entry in menu.locator("option").all_inner_texts()[1:]:
        press(notebook, menu, label, "ArrowDown")
        assert menu.locator("option:checked").inner_text() == entry
        if notebook.pictures(menu) != first:
            return
    pytest.fail(f"{label}: the picture is the same for all entries")


def check_number(notebook, number):
    label, seen = accessible_name(number), set()
    for text in ("-0.3", "65519", "1e99"):  # the last is beyond every limit
        number.fill(text)
        press(notebook, number, f"{label} at {text}", "Enter")
        seen.add(tuple(notebook.pictures(number)))
    assert len(seen) == 3, f"{label}: the picture does not follow the number"


def accessible_name(control):
    """What a screen reader says; fails if it has nothing to say."""
    description = control.aria_snapshot().splitlines()[0]
    assert '"' in description, f"a control has no accessible name: {description}"
    return description.split('"')[1]


def written(path, *sources):
    """A notebook of these cells, in a file."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return path


@pytest.mark.notebook
def test_a_kernel_that_dies_is_noticed_and_what_it_said_is_shown(chromium, tmp_path):
    path = written(tmp_path / "a.ipynb", "import os\nos.write(2, b'its last words\\n')\nos.abort()")
    with (
        pytest.raises(RuntimeError, match=r"(?s)A kernel died.*its last words.*KernelRestarter"),
        lab.server(tmp_path) as address,
        lab.page(chromium) as page,
        pytest.raises(Exception, match="the kernel died"),
        lab.opened(page, address.format(path.name)),
    ):
        pass


@pytest.mark.notebook
def test_a_widget_that_cannot_be_shown_is_noticed(folder, address, page):
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "none", "version_major": 2, "version_minor": 0}}
    path = written(folder / "lost.ipynb", f"display({view}, raw=True)")
    with lab.opened(page, address.format(path.name)) as notebook:
        page.get_by_text("Error displaying widget").wait_for()
        assert ["Error displaying widget" in error for error in notebook.errors()] == [True]


SPOILED = """
import time
from dlscale.page import figures, widgets

def make(figure):
    (line,) = figures.axes(figure).plot([0, 1], [0, 1])

    def update(good, slow, dead, failing, menu, number, small):
        time.sleep(0.5 * (slow - 1))
        line.set_ydata([slow / failing, good + number if menu == "rising" else -good])
        return [line]

    return update

widgets.explore(
    make,
    alt=lambda **values: str(values),
    good=widgets.slider("good", [1, 2, 3]),
    slow=widgets.slider("slow", [1, 2, 3], 1),
    dead=widgets.slider("dead", [1, 2, 3]),
    failing=widgets.slider("failing", [1, 2, 0]),
    menu=widgets.menu("menu", ["rising", "falling"]),
    number=widgets.number("number", 0.1, -1e6, 1e6),
    small=widgets.number("dead number", 0.1, -1e6, 1e6),
)
"""


@pytest.mark.notebook
def test_bad_controls_are_noticed(folder, address, page):
    path = written(folder / "spoiled.ipynb", SPOILED)
    with lab.opened(page, address.format(path.name)) as notebook:
        assert notebook.errors() == []
        check_slider(notebook, notebook.slider("good"))
        check_slider(notebook, notebook.slider("slow"))
        notebook.press(notebook.slider("slow"), "Home")
        check_menu(notebook, notebook.menus()[0])
        notebook.menus()[0].select_option("rising")
        check_number(notebook, notebook.numbers()[0])
        with pytest.raises(AssertionError, match="dead number: the picture does not follow"):
            check_number(notebook, notebook.numbers()[1])
        with pytest.raises(AssertionError, match="dead: the picture is the same at both ends"):
            check_slider(notebook, notebook.slider("dead"))
        with pytest.raises(AssertionError, match="failing, key End"):
            check_slider(notebook, notebook.slider("failing"))


LIVE = """
from dlscale.page import figures, widgets

def make(figure):
    (line,) = figures.axes(figure).plot([0, 1], [0, 1])

    def update(n, kind, **others):
        line.set_ydata([1 / (n - 30), n / 40 if kind == "rising" else 0])  # fails at 30
        return [line]

    return update
---
widgets.explore(make, alt=lambda n, kind: f"{kind} {n}",
                n=widgets.slider("<b>n</b>", range(40), 10), kind=widgets.menu("kind", ["rising", "flat"]))
---
widgets.explore(make, alt=lambda **all: str(all), n=widgets.player("seven 0", range(40), 10),
                kind=widgets.menu("seven 1", ["rising", "flat"]), number=widgets.number("seven 2", 1, 0, 2),
                **{f"c{i}": widgets.slider(f"seven {i}", [1, 2, 3]) for i in range(3, 7)})
---
import threading
threading.Event().wait(1e-9)  # put a time here that lasts
"""


@pytest.fixture(scope="module")
def live(folder):
    """A notebook with two explorers and a cell that can be made to last."""
    return written(folder / "live.ipynb", *map(str.strip, LIVE.split("---")))


@pytest.fixture
def notebook(live, address, page):
    with lab.opened(page, address.format(live.name)) as notebook:
        assert notebook.errors() == []
        yield notebook
        page.evaluate("dlscale.delay = 0")


def told(notebook):
    return notebook.page.locator(".dlscale-caption").first.inner_text()


def note(notebook):
    return notebook.page.locator(".dlscale-note").first


@pytest.mark.long
@pytest.mark.notebook
def test_what_was_seen_or_drawn_ahead_is_shown_without_the_kernel(notebook):
    slider = notebook.slider("<b>n</b>")  # as text, not as markup
    notebook.press(slider, "ArrowRight")
    assert told(notebook) == "rising 11"
    notebook.until("dlscale.came.includes('[12,0]') && dlscale.came.includes('[11,1]')")
    notebook.settle()
    asked = notebook.page.evaluate("dlscale.asked.length")
    notebook.press(slider, "ArrowRight", "ArrowLeft")
    notebook.press(notebook.menus()[0], "ArrowDown")
    assert told(notebook) == "flat 11"
    assert notebook.page.evaluate("dlscale.asked.length") == asked


@pytest.mark.long
@pytest.mark.notebook
def test_frames_take_no_more_than_their_limit_and_the_one_that_is_shown_stays(notebook):
    notebook.page.evaluate("() => { globalThis[Symbol.for('dlscale.frames')].limit = 60_000; }")  # some three frames
    slider = notebook.slider("<b>n</b>")
    for _ in range(8):
        notebook.press(slider, "ArrowRight")
    assert told(notebook) == "rising 18"
    kept = notebook.page.evaluate("(f => [f.bytes, f.kept.size])(globalThis[Symbol.for('dlscale.frames')])")
    assert kept[0] <= 60_000 + 40_000  # the one that just came, and those in use
    assert kept[1] >= 1
    assert notebook.pictures(slider)
    notebook.press(slider, *["ArrowLeft"] * 8)  # the first ones are drawn again
    assert told(notebook) == "rising 10"


@pytest.mark.long
@pytest.mark.notebook
def test_a_fast_drag_over_a_slow_line_ends_at_the_last_setting_and_never_goes_back(notebook):
    notebook.page.evaluate("""() => {
        dlscale.delay = 150;
        dlscale.told = [];
        const caption = document.querySelector('.dlscale-caption');
        new MutationObserver(() => dlscale.told.push(Number(caption.innerText.split(' ')[1])))
            .observe(caption, {childList: true, characterData: true, subtree: true});
    }""")
    asked = notebook.page.evaluate("dlscale.asked.length")
    notebook.press(notebook.slider("<b>n</b>"), *["ArrowRight"] * 12)
    told = notebook.page.evaluate("dlscale.told")
    assert told[-1] == 22
    assert told == sorted(told)
    assert notebook.page.evaluate("dlscale.asked.length") - asked < 12  # most were left out


@pytest.mark.notebook
def test_an_error_stands_in_place_and_the_next_move_works(notebook):
    slider = notebook.slider("<b>n</b>")
    notebook.press(slider, "End", *["ArrowLeft"] * 9)
    (error,) = notebook.errors()
    assert "ZeroDivisionError" in error
    assert not notebook.page.locator(".dlscale-screen").first.is_visible()
    notebook.press(slider, "ArrowLeft")
    assert notebook.errors() == []
    assert told(notebook) == "rising 29"
    assert notebook.page.locator(".dlscale-screen").first.is_visible()


@pytest.mark.long
@pytest.mark.notebook
def test_a_kernel_that_is_silent_is_said_to_be_busy_and_nothing_is_lost(notebook):
    notebook.page.evaluate("dlscale.delay = 3000")
    notebook.slider("<b>n</b>").press("Home")
    note(notebook).get_by_text("The kernel is busy").wait_for()
    notebook.page.keyboard.press("End")
    notebook.settle()
    assert told(notebook) == "rising 39"
    assert note(notebook).inner_text() == ""


@pytest.mark.long
@pytest.mark.notebook
def test_a_move_while_a_cell_runs_is_not_lost_when_the_cell_is_interrupted(notebook):
    slider = notebook.slider("<b>n</b>")
    notebook.page.evaluate("""() => {
        dlscale.lasting = dlscale.kernel().requestExecute({code: 'threading.Event().wait()'});
    }""")
    slider.press("Home")  # some kernels answer now, others later
    notebook.page.evaluate("dlscale.kernel().interrupt().then(() => dlscale.lasting.done)")
    notebook.settle()
    assert told(notebook) == "rising 0"
    notebook.press(slider, "End")
    assert told(notebook) == "rising 39"
    assert note(notebook).inner_text() == ""


@pytest.mark.long
@pytest.mark.notebook
def test_after_a_restart_the_page_says_so_and_the_cell_run_again_goes_on(notebook):
    slider = notebook.slider("<b>n</b>")
    notebook.press(slider, "End")
    notebook.page.evaluate("dlscale.notebook().sessionContext.session.kernel.restart()")
    slider.press("Home")
    note(notebook).get_by_text("The kernel was restarted").wait_for()
    slider.press("End")  # seen before
    notebook.page.locator(".dlscale-caption", has_text="rising 39").wait_for()
    notebook.page.evaluate("minutes => dlscale.runAll(minutes)", lab.MINUTES)
    notebook.press(notebook.slider("<b>n</b>"), "Home")
    assert told(notebook) == "rising 0"
    assert note(notebook).inner_text() == ""


@pytest.mark.long
@pytest.mark.notebook
def test_the_saved_notebook_holds_pictures_alone_and_a_second_tab_moves_by_itself(live, address, notebook):
    notebook.press(notebook.slider("<b>n</b>"), "End")
    notebook.page.evaluate("dlscale.notebook().context.save()")
    saved = nbformat.read(live, as_version=4)
    assert list(conventions.outputs(conventions.Notebook(saved, live))) == []
    outputs = [output for cell in saved.cells[1:3] for output in cell.outputs]
    assert [[*output.data] for output in outputs] == 2 * [["image/png", "text/plain"], ["text/html", "text/plain"]]
    assert outputs[0].metadata["image/png"]["alt"] == "rising 10"
    assert "rising 10 <em>Run this cell to move: &lt;b&gt;n&lt;/b&gt;, kind." in outputs[1].data["text/html"]
    assert not notebook.page.locator(".dlscale-still").first.is_visible()
    tab = notebook.page.context.browser.new_page()
    tab.add_init_script(lab.SCRIPT)
    tab.goto(address.format(live.name).replace("&reset", ""), wait_until="domcontentloaded")
    slider = tab.get_by_role("slider", name="<b>n</b>")
    slider.press("Home")
    tab.locator(".dlscale-caption", has_text="rising 0").wait_for()
    tab.close()
    assert told(notebook) == "rising 39"
    notebook.press(notebook.slider("<b>n</b>"), "ArrowLeft")
    assert told(notebook) == "rising 38"


@pytest.mark.long
@pytest.mark.notebook
def test_seven_controls_picture_and_caption_fit_one_screen(notebook):
    notebook.page.set_viewport_size({"width": 1366, "height": 768})
    try:
        explorer = notebook.page.locator(".dlscale-explorer").nth(1)
        explorer.evaluate("explorer => explorer.scrollIntoView()")
        view = notebook.page.locator(".jp-WindowedPanel-outer").bounding_box()
        for part in (".dlscale-controls", ".dlscale-screen", ".dlscale-caption"):
            box = explorer.locator(part).bounding_box()
            assert view["y"] <= box["y"], part
            assert box["y"] + box["height"] <= view["y"] + view["height"], part
            assert view["x"] <= box["x"], part
            assert box["x"] + box["width"] <= view["x"] + view["width"], part
    finally:
        notebook.page.set_viewport_size({"width": 1280, "height": 1600})


@pytest.mark.long
@pytest.mark.notebook
def test_jupyter_notebook_7_works_the_same(live, address, page):
    with lab.opened(page, address.format(live.name).replace("/lab/tree/", "/notebooks/")) as notebook:
        slider = notebook.slider("<b>n</b>")
        check_slider(notebook, slider)
        check_menu(notebook, notebook.menus()[0])
        check_player(notebook, notebook.players()[0])


@pytest.mark.long
@pytest.mark.notebook
def test_where_outputs_live_apart_the_explorer_stands_alone(folder, address, page):
    make, explore = LIVE.split("---")[:2]
    path = written(folder / "apart.ipynb", f"{make}\nwidgets.ISOLATED = True", explore)
    with lab.opened(page, address.format(path.name)) as notebook:
        slider = notebook.slider("<b>n</b>")
        notebook.press(slider, "Home")
        assert told(notebook) == "rising 0"
        notebook.press(slider, "ArrowRight")
        assert told(notebook) == "rising 1"


QUESTION = """
from dlscale import course
from dlscale.page import widgets
---
guess = widgets.predict("Which one?", ["the first", "the second", "the third"])
---
course.say("It is the **third**.", guess=guess)
"""


@pytest.mark.notebook
@pytest.mark.parametrize("place", ["lab/tree", "notebooks"])  # in JupyterLab, and in Notebook 7
def test_a_prediction_is_made_by_keyboard_and_answered(folder, address, page, place):
    path = written(folder / "question.ipynb", *map(str.strip, QUESTION.split("---")))
    with lab.opened(page, address.format(path.name).replace("lab/tree", place)) as notebook:
        assert notebook.errors() == []
        group = page.get_by_role("group", name="Which one?")
        group.get_by_role("radio").first.focus()
        for option, key in (("the first", "Space"), ("the second", "ArrowDown"), ("the third", "ArrowDown")):
            page.keyboard.press(key)
            group.get_by_role("status").get_by_text(f"Noted: {option}").wait_for()
            assert group.get_by_role("radio", name=option).evaluate("radio => document.activeElement === radio")
        page.evaluate("dlscale.notebook().content.activeCellIndex = 2")
        page.evaluate("() => { jupyterapp.commands.execute('notebook:run-cell'); }")
        page.get_by_text("You said the third. Measured: It is the third.").wait_for()
