"""Each notebook in JupyterLab in a real browser: what only a browser can tell.

All cells run there, every control has a name, is reached and moved by keyboard, and picture and caption follow in the
page. That every end of every control works was seen before, without a browser (`widgets.check_extremes`).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

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
def address(folder, programs):
    if not lab.find_chromium():
        reason = "Chromium is not installed: no control was moved in a browser."
        if os.environ.get("DLSCALE_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    with lab.server(folder, lab.keep_programs(programs)) as address:
        yield address


@pytest.fixture(scope="session")
def page(address):
    with lab.browser() as page:
        yield page


@each_notebook
def test_every_control_by_keyboard(path, address, page):
    with lab.opened(page, address.format(path.name)) as notebook:
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
    path = folder / "spoiled.ipynb"
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(SPOILED)], metadata=metadata), path)
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
