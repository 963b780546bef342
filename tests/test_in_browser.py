"""Each notebook in JupyterLab in a browser: controls have names, move by keyboard, and picture and caption follow.

That every end of every control works was seen before, without a browser (`extremes.check`).
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
pytestmark = pytest.mark.notebook


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return Path(shutil.copytree(FOLDER, tmp_path_factory.mktemp("lab") / "notebooks"))


@pytest.fixture(scope="session")
def address(folder, programs, chromium):
    with lab.server(folder, lab.keep_programs(programs)) as address:
        yield address


@pytest.fixture(scope="session")
def page(address, chromium):
    with lab.page(chromium) as page:
        yield page


@each_notebook
def test_the_first_explorer_by_keyboard(path, folder, address, page):
    notebook = nbformat.read(path, as_version=4)
    shown = [[output.get("data", {}) for output in cell.get("outputs", [])] for cell in notebook.cells]
    explorers = [any("image/png" in data and data.get("text/plain") for data in some) for some in shown]
    assert any(explorers), "no explorer is stored: run `make notebooks`"
    del notebook.cells[explorers.index(True) + 1 :]
    nbformat.write(notebook, folder / f"beginning_of_{path.name}")
    with lab.opened(page, address.format(f"beginning_of_{path.name}")) as notebook:
        assert notebook.errors() == []
        if sliders := notebook.controls("[type=range]"):
            check_slider(notebook, sliders[0])
        else:
            check_menu(notebook, notebook.controls("select")[0])


@pytest.mark.long
@each_notebook
def test_every_control_by_keyboard(path, address, page):
    checks = {"[type=range]": check_slider, "select": check_menu, "[type=number]": check_number, "button": check_player}
    with lab.opened(page, address.format(path.relative_to(FOLDER).as_posix())) as notebook:
        assert notebook.errors() == []
        assert notebook.controls("[type=range]")
        for kind, check in checks.items():
            for control in notebook.controls(kind):
                check(notebook, control)


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
    press(notebook, button, label, "Enter")
    for control, attribute, value in ((slider, "aria-valuetext", end), (button, "aria-label", label)):  # to its end
        wait = f"control => control.getAttribute('{attribute}') === {value!r}"
        notebook.page.wait_for_function(wait, arg=control.element_handle())
    notebook.settle()


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


def written(path, text):
    """A notebook in a file, of the cells of a text."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(source.strip()) for source in text.split("---")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)
    return path


@pytest.mark.long
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


def test_a_widget_that_cannot_be_shown_is_noticed(folder, address, page):
    view = {"application/vnd.jupyter.widget-view+json": {"model_id": "none", "version_major": 2, "version_minor": 0}}
    path = written(folder / "lost.ipynb", f"display({view}, raw=True)")
    with lab.opened(page, address.format(path.name)) as notebook:
        page.get_by_text("Error displaying widget").wait_for()
        assert ["Error displaying widget" in error for error in notebook.errors()] == [True]


LIVE = """
from dlscale.page import figures, widgets

def make(figure):
    (line,) = figures.axes(figure).plot([0, 1], [0, 1])

    def update(n, kind, number=0, **others):
        line.set_ydata([1 / (n - 30), n / 40 + number if kind == "rising" else 0])  # fails at 30
        return [line]

    return update
---
widgets.explore(make, alt=lambda n, kind: f"{kind} {n}",
                n=widgets.slider("<b>n</b>", range(40), 10), kind=widgets.menu("kind", ["rising", "flat"]))
---
widgets.explore(make, alt=lambda **all: str(all), n=widgets.player("seven 0", range(40), 10),
                kind=widgets.menu("seven 1", ["rising", "flat"]), number=widgets.number("seven 2", 1, -1e6, 1e6),
                **{f"c{i}": widgets.slider(f"seven {i}", [1, 2, 3]) for i in range(3, 7)})
"""


@pytest.fixture(scope="module")
def live(folder):
    return written(folder / "live.ipynb", LIVE)


@pytest.fixture
def notebook(live, address, page):
    with lab.opened(page, address.format(live.name)) as notebook:
        assert notebook.errors() == []
        yield notebook
        page.evaluate("dlscale.delay = 0")


def told(notebook, part="caption"):
    return notebook.page.locator(f".dlscale-{part}").first.inner_text()


def test_good_controls_pass_and_bad_ones_are_noticed(notebook):
    check_menu(notebook, notebook.controls("select")[1])
    notebook.controls("select")[1].select_option("rising")
    check_number(notebook, notebook.controls("[type=number]")[0])
    slider = notebook.slider("<b>n</b>")  # as text, not as markup
    check_slider(notebook, slider)
    with pytest.raises(AssertionError, match="seven 3: the picture is the same at both ends"):
        check_slider(notebook, notebook.slider("seven 3"))
    notebook.press(slider, "End", *["ArrowLeft"] * 8)
    with pytest.raises(AssertionError, match="failing, key ArrowLeft"):
        press(notebook, slider, "failing", "ArrowLeft")
    (error,) = notebook.errors()  # stands in the picture's place, and the next move works
    assert "ZeroDivisionError" in error
    assert not notebook.page.locator(".dlscale-screen").first.is_visible()
    press(notebook, slider, "next", "ArrowLeft")
    assert told(notebook) == "rising 29"
    assert notebook.page.locator(".dlscale-screen").first.is_visible()


@pytest.mark.long
def test_what_was_seen_or_drawn_ahead_is_shown_without_the_kernel(notebook):
    slider = notebook.slider("<b>n</b>")
    notebook.press(slider, "ArrowRight")
    assert told(notebook) == "rising 11"
    notebook.until("dlscale.came.includes('[12,0]') && dlscale.came.includes('[11,1]')")
    notebook.settle()
    asked = notebook.page.evaluate("dlscale.asked.length")
    notebook.press(slider, "ArrowRight", "ArrowLeft")
    notebook.press(notebook.controls("select")[0], "ArrowDown")
    assert told(notebook) == "flat 11"
    assert notebook.page.evaluate("dlscale.asked.length") == asked


@pytest.mark.long
def test_frames_take_no_more_than_their_limit_and_the_one_that_is_shown_stays(notebook):
    notebook.page.evaluate("() => { globalThis[Symbol.for('dlscale.frames')].limit = 60_000; }")  # some three frames
    slider = notebook.slider("<b>n</b>")
    for _ in range(8):
        notebook.press(slider, "ArrowRight")
    assert told(notebook) == "rising 18"
    assert notebook.page.evaluate("globalThis[Symbol.for('dlscale.frames')].bytes") <= 100_000  # and those in use
    assert notebook.pictures(slider)
    notebook.press(slider, *["ArrowLeft"] * 8)  # the first ones are drawn again
    assert told(notebook) == "rising 10"


@pytest.mark.long
def test_a_fast_drag_over_a_slow_line_ends_at_the_last_setting_and_never_goes_back(notebook):
    notebook.page.evaluate("""() => {
        dlscale.delay = 150;
        dlscale.told = [];
        const caption = document.querySelector('.dlscale-caption');
        new MutationObserver(() => dlscale.told.push(Number(caption.innerText.split(' ')[1])))
            .observe(caption, {childList: true, characterData: true, subtree: true});
    }""")
    asked = notebook.page.evaluate("dlscale.asked.length")
    slider = notebook.slider("<b>n</b>")
    slider.evaluate("""slider => {
        for (slider.value = 11; slider.value < 22; slider.value++) slider.dispatchEvent(new Event('input'));
        slider.dispatchEvent(new Event('input'));
    }""")
    notebook.settle()
    told = notebook.page.evaluate("dlscale.told")
    assert told[-1] == 22
    assert told == sorted(told)
    assert notebook.page.evaluate("dlscale.asked.length") - asked < 12  # most were left out


@pytest.mark.long
def test_a_kernel_that_is_silent_is_said_to_be_busy_and_nothing_is_lost(notebook):
    notebook.page.evaluate("""() => {
        dlscale.delay = 3000;
        dlscale.said = new Promise(said => new MutationObserver(() => said(document.querySelector('.dlscale-note')
            .textContent)).observe(document.querySelector('.dlscale-note'), {childList: true}));
    }""")
    notebook.slider("<b>n</b>").press("Home")
    assert "The kernel is busy" in notebook.page.evaluate("dlscale.said")
    notebook.page.keyboard.press("End")
    notebook.settle()
    assert told(notebook) == "rising 39"
    assert told(notebook, "note") == ""


@pytest.mark.long
def test_a_move_while_a_cell_runs_is_not_lost_when_the_cell_is_interrupted(notebook):
    slider = notebook.slider("<b>n</b>")
    notebook.page.evaluate("""() => new Promise(runs => {
        const code = "import threading; print('runs', flush=True); threading.Event().wait()";
        dlscale.lasting = dlscale.kernel().requestExecute({code});
        dlscale.lasting.onIOPub = ({header}) => header.msg_type === 'stream' && runs();
    })""")
    slider.press("Home")  # some kernels answer now, others later
    notebook.page.evaluate("dlscale.kernel().interrupt().then(() => dlscale.lasting.done)")
    notebook.settle()
    assert told(notebook) == "rising 0"
    notebook.press(slider, "End")
    assert told(notebook) == "rising 39"
    assert told(notebook, "note") == ""


@pytest.mark.long
def test_after_a_restart_the_page_says_so_and_the_cell_run_again_goes_on(notebook):
    slider = notebook.slider("<b>n</b>")
    notebook.press(slider, "End")
    notebook.page.evaluate("dlscale.notebook().sessionContext.session.kernel.restart()")
    slider.press("Home")
    notebook.page.locator(".dlscale-note").first.get_by_text("The kernel was restarted").wait_for()
    slider.press("End")  # seen before
    notebook.page.locator(".dlscale-caption", has_text="rising 39").wait_for()
    notebook.page.evaluate("minutes => dlscale.runAll(minutes)", lab.MINUTES)
    notebook.press(notebook.slider("<b>n</b>"), "Home")
    assert told(notebook) == "rising 0"
    assert told(notebook, "note") == ""


@pytest.mark.long
def test_the_saved_notebook_holds_pictures_alone_and_a_second_tab_moves_by_itself(live, address, notebook, chromium):
    notebook.press(notebook.slider("<b>n</b>"), "End")
    notebook.page.evaluate("dlscale.notebook().context.save()")
    saved = nbformat.read(live, as_version=4)
    assert list(conventions.outputs(conventions.Notebook(saved, live))) == []
    outputs = [output for cell in saved.cells[1:3] for output in cell.outputs]
    assert [[*output.data] for output in outputs] == 2 * [["image/png", "text/plain"], ["text/html", "text/plain"]]
    assert outputs[0].metadata["image/png"]["alt"] == "rising 10"
    assert "rising 10 <em>Run this cell to move: &lt;b&gt;n&lt;/b&gt;, kind." in outputs[1].data["text/html"]
    assert not notebook.page.locator(".dlscale-still").first.is_visible()
    with lab.page(chromium) as tab:
        tab.goto(address.format(live.name).replace("&reset", ""), wait_until="domcontentloaded")
        tab.get_by_role("slider", name="<b>n</b>").press("Home")
        tab.locator(".dlscale-caption", has_text="rising 0").wait_for()
    assert told(notebook) == "rising 39"
    notebook.press(notebook.slider("<b>n</b>"), "ArrowLeft")
    assert told(notebook) == "rising 38"


@pytest.mark.long
def test_seven_controls_picture_and_caption_fit_one_screen(notebook):
    notebook.page.set_viewport_size({"width": 1366, "height": 768})
    explorer = notebook.page.locator(".dlscale-explorer").nth(1)
    explorer.evaluate("explorer => explorer.scrollIntoView()")
    view = notebook.page.locator(".jp-WindowedPanel-outer").bounding_box()
    boxes = [explorer.locator(f".dlscale-{part}").bounding_box() for part in ("controls", "screen", "caption")]
    notebook.page.set_viewport_size({"width": 1280, "height": 1600})
    for start, size in (("x", "width"), ("y", "height")):
        assert all(view[start] <= box[start] for box in boxes)
        assert all(box[start] + box[size] <= view[start] + view[size] for box in boxes)


@pytest.mark.long
def test_jupyter_notebook_7_works_the_same(live, address, page):
    with lab.opened(page, address.format(live.name).replace("/lab/tree/", "/notebooks/")) as notebook:
        check_slider(notebook, notebook.slider("<b>n</b>"))
        check_menu(notebook, notebook.controls("select")[0])
        check_player(notebook, notebook.controls("button")[0])


@pytest.mark.long
def test_where_outputs_live_apart_the_explorer_stands_alone(folder, address, page):
    make, explore = LIVE.split("---")[:2]
    path = written(folder / "apart.ipynb", f"{make}\nwidgets.ISOLATED = True\n---{explore}")
    with lab.opened(page, address.format(path.name)) as notebook:
        notebook.press(notebook.slider("<b>n</b>"), "Home", "ArrowRight")
        assert told(notebook) == "rising 1"


@pytest.mark.parametrize("place", ["lab/tree", pytest.param("notebooks", marks=pytest.mark.long)])  # of Notebook 7
def test_a_prediction_is_made_by_keyboard_and_answered(folder, address, page, place):
    text = """from dlscale import course; from dlscale.page import widgets
---
guess = widgets.predict("Which one?", ["the first", "the second", "the third"])
---
course.say("It is the **third**.", guess=guess)"""
    path = written(folder / "question.ipynb", text)
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
