"""The book: what is drawn for it, and its pages in a browser, from a file:// address, without kernel or network."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import book  # tools/book.py
import frames  # tools/frames.py
import lab
import nbformat
import numpy as np
import pytest
from PIL import Image

from dlscale.page import figures, widgets

CELLS = """
# Waves

Which wave is the widest? A rare word: heffalump.
---
from dlscale.page import figures, widgets
---
guess = widgets.predict("Which <one>?", ["the slow one", "the fast one"])
---
def make(figure):
    (line,) = figures.axes(figure).plot([0, 1], [0, 0])
    figure.axes[0].set_ylim(-5, 50)

    def update(slope, sign, number=0.0):
        line.set_ydata([number, slope if sign == "up" else -slope])
        return [line]

    return update

def told(**values):
    return f"This shows {values}"
---
widgets.explore(make, alt=told, slope=widgets.player("slope", range(20), 3, interval=20),
                sign=widgets.menu("sign", ["up", "down"]))
---
## More of them

Second part.
---
widgets.explore(make, alt=told, slope=widgets.slider("steep", range(40), 5), sign=widgets.menu("way", ["up", "down"]),
                number=widgets.number("offset", 0.5, -9, 9, [1, 2, 3, 4]))
---
hidden_gradient = ...
"""


def explorer(monkeypatch, **controls):
    """An explorer whose picture shows the sum of its controls' values."""
    monkeypatch.setattr(widgets, "display", lambda *objects, **options: None)
    monkeypatch.setattr(widgets, "explorers", [])

    def make(figure):
        (line,) = figures.axes(figure).plot([0, 1], [0, 0])
        figure.axes[0].set_ylim(0, 100)

        def update(**values):
            line.set_ydata([0, sum(values.values())])
            return [line]

        return update

    widgets.explore(make, alt=str_of, width=2, height=1, **controls)
    return widgets.explorers[0]


def str_of(**values):
    return str(values)


def test_all_settings_are_drawn_where_they_are_few(monkeypatch):
    drawn = frames.draw(explorer(monkeypatch, a=widgets.slider("a", [1, 2, 3]), b=widgets.player("b", [0, 1])))
    assert not drawn["alone"]
    assert sorted(drawn["frames"]) == sorted(f"[{a},{b}]" for a in range(3) for b in range(2))
    assert drawn["frames"]["[2,1]"][1] == str({"a": 3, "b": 1})
    assert len(drawn["images"]) == 4  # the sums from 1 to 4
    assert drawn["frames"]["[2,0]"][0] == drawn["frames"]["[1,1]"][0]


def test_each_control_is_drawn_over_its_range_where_settings_are_many(monkeypatch):
    drawn = frames.draw(explorer(monkeypatch, a=widgets.slider("a", range(31), 4), b=widgets.slider("b", range(10), 2)))
    assert drawn["alone"]
    assert set(drawn["frames"]) == {f"[{a},2]" for a in range(31)} | {f"[4,{b}]" for b in range(10)}


def test_a_number_field_becomes_a_menu_of_its_examples(monkeypatch):
    drawn = frames.draw(explorer(monkeypatch, a=widgets.number("a", 0.5, 0, 9, [1, 7.25])))
    (look,) = drawn["controls"]
    assert (look["kind"], look["texts"], look["start"]) == ("menu", ["0.5", "1", "7.25"], 0)
    assert [text for _, text in drawn["frames"].values()] == [str({"a": value}) for value in (0.5, 1, 7.25)]


def test_a_frame_in_few_colours_looks_like_the_live_one(monkeypatch):
    live = explorer(monkeypatch, a=widgets.slider("a", [30, 60])).draw({"a": 60})[0]
    small = frames.shrink(live)
    assert len(small) < len(live)
    one, other = (np.asarray(Image.open(io.BytesIO(image)).convert("RGB"), dtype=int) for image in (live, small))
    assert np.abs(one - other).mean() < 2  # of 255


def test_over_the_limit_the_largest_move_one_at_a_time_and_no_less_is_refused(monkeypatch):
    two = {"a": widgets.slider("a", range(9), 4), "b": widgets.slider("b", range(9), 4)}
    large, small = frames.draw(explorer(monkeypatch, **two)), frames.draw(explorer(monkeypatch, a=two["a"]))
    size = sum(len(json.dumps(drawn)) for drawn in (large, small))
    before = dict(large["frames"])
    frames.fit([large, small], "x", size - 1)
    assert (large["alone"], small["alone"]) == (True, False)
    assert set(large["frames"]) == {f"[{a},4]" for a in range(9)} | {f"[4,{b}]" for b in range(9)}
    assert {text for _, text in large["frames"].values()} <= {text for _, text in before.values()}
    assert {number for number, _ in large["frames"].values()} == set(range(len(large["images"])))
    with pytest.raises(ValueError, match=r"x: the frames take [\d,]+ bytes, over 1,000"):
        frames.fit([large, small], "x", 1000)


# In a browser


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A book of one notebook, whose frames were drawn."""
    folder = tmp_path_factory.mktemp("book")
    cells = [part.strip() for part in CELLS.split("---\n")]
    made = [(nbformat.v4.new_markdown_cell if part[0] == "#" else nbformat.v4.new_code_cell)(part) for part in cells]
    made[3].metadata["tags"] = ["hide-input"]
    made[-1].metadata["tags"] = ["answer-sgd-momentum"]
    nbformat.write(nbformat.v4.new_notebook(cells=made), folder / "01_sgd.ipynb")
    (folder / book.MATHJAX_FILE).write_text("")
    book.build([folder / "01_sgd.ipynb"], folder / "site", folder / book.MATHJAX_FILE, folder / "drawn")
    return folder / "site"


@pytest.fixture(scope="module")
def browser(chromium):
    with lab.page(chromium) as page:
        yield page


@pytest.fixture(params=[390, 1366])
def page(request, site, browser):
    """The notebook's page, without a network, at two widths."""
    browser.context.set_offline(True)
    browser.set_viewport_size({"width": request.param, "height": 768})
    browser.goto((site / "01_sgd.html").as_uri())
    browser.wait_for_selector(".dlscale-explorer")
    return browser


def press(page, control, *keys):
    """Press keys at a control and wait until its explorer shows what they led to."""
    control.focus()
    for key in keys:
        page.keyboard.press(key)
    explorer = control.locator("xpath=ancestor::*[@class='dlscale-explorer']").element_handle()
    page.wait_for_function("explorer => explorer.getAttribute('data-waits') === 'false'", arg=explorer)


def shown(page, number):
    """What an explorer shows: caption and the bytes of its picture."""
    explorer = page.locator(".dlscale-explorer").nth(number)
    picture = explorer.locator("img").evaluate(
        "async image => [...new Uint8Array(await (await fetch(image.src)).arrayBuffer())]"
    )
    return explorer.locator(".dlscale-caption").inner_text(), bytes(picture)


@pytest.mark.notebook
def test_every_setting_is_alive_by_keyboard_from_a_file(page):
    slider, menu = page.get_by_role("slider", name="slope"), page.get_by_label("sign")
    start = shown(page, 0)
    assert start[0] == str_told(slope=3, sign="up")
    press(page, slider, "End")
    press(page, menu, "ArrowDown")
    caption, picture = shown(page, 0)
    assert caption == str_told(slope=19, sign="down")
    assert Image.open(io.BytesIO(picture)).format == "WEBP"
    assert "Every setting is here" in page.locator(".dlscale-explorer").first.inner_text()


EXPLORER = "document.querySelectorAll('.dlscale-explorer')[0]"


@pytest.mark.notebook
@pytest.mark.parametrize("width", [390, 1366])
def test_every_setting_is_alive_by_keyboard_in_firefox_too(site, firefox, width):
    firefox.open((site / "01_sgd.html").as_uri(), width)
    wait = f"""new Promise(resolve => {{
        const look = () => {EXPLORER}?.getAttribute('data-waits') === 'false' ? resolve(true) : setTimeout(look, 10);
        look();
    }})"""
    firefox.evaluate(wait)
    assert firefox.evaluate("innerWidth") == width
    assert firefox.evaluate("document.documentElement.scrollWidth <= innerWidth")
    seen = {}
    for control, key in (("", ""), ("[type=range]", "End"), ("select", "ArrowDown")):
        if control:
            firefox.evaluate(f"{EXPLORER}.querySelector('{control}').focus()")
            firefox.press(key)
            firefox.evaluate(wait)
        caption = firefox.evaluate(f"{EXPLORER}.querySelector('.dlscale-caption').innerText")
        image = f"await (await fetch({EXPLORER}.querySelector('img').src)).arrayBuffer()"
        picture = bytes(firefox.evaluate(f"(async () => [...new Uint8Array({image})])()"))
        assert Image.open(io.BytesIO(picture)).size == (720, 340)
        seen[caption] = picture
    assert [*seen] == [str_told(slope=slope, sign=sign) for slope, sign in ((3, "up"), (19, "up"), (19, "down"))]
    assert len(set(seen.values())) == 3


@pytest.mark.notebook
def test_where_settings_are_many_the_other_controls_go_back_to_their_start(page):
    slider, menu = page.get_by_role("slider", name="steep"), page.get_by_label("way")
    press(page, slider, "End")
    assert shown(page, 1)[0] == str_told(slope=39, sign="up", number=0.5)
    press(page, menu, "ArrowDown")
    assert shown(page, 1)[0] == str_told(slope=5, sign="down", number=0.5)
    assert slider.get_attribute("aria-valuetext") == "5"
    press(page, page.get_by_label("offset"), "End")
    assert shown(page, 1)[0] == str_told(slope=5, sign="up", number=4)
    assert "one control moves at a time" in page.locator(".dlscale-explorer").nth(1).inner_text()


@pytest.mark.notebook
def test_the_player_plays_from_what_is_shown_to_the_end(page):
    press(page, page.get_by_role("slider", name="slope"), "Home", "ArrowRight")
    button = page.get_by_role("button", name="Play slope")
    button.press("Enter")
    page.wait_for_function("document.querySelector('.dlscale-player output').textContent === '19'")
    button.wait_for()  # it says Play again
    assert shown(page, 0)[0] == str_told(slope=19, sign="up")


def str_told(**values):
    return f"This shows {values}"


@pytest.mark.notebook
def test_picture_and_controls_fit_the_page(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    picture, controls = (
        page.locator(".dlscale-screen").first.bounding_box(),
        page.locator(".dlscale-controls").first.bounding_box(),
    )
    if page.viewport_size["width"] == 390:
        assert controls["y"] + controls["height"] <= picture["y"]
    else:
        assert controls["x"] >= picture["x"] + picture["width"]


@pytest.mark.notebook
def test_search_predictions_exercises_and_folded_code(page):
    page.get_by_label("Search").fill("heffalump")
    page.locator("#found a").wait_for()
    assert page.locator("#found a").get_attribute("href").startswith("01_sgd.html#")
    assert "1 section" in page.locator("#found").inner_text()
    page.get_by_label("Search").fill("")
    assert page.get_by_role("group", name="Which <one>?").get_by_role("radio").count() == 2
    folded = page.locator("details.folded")
    assert folded.count() == 1
    assert not folded.get_by_text("def make").is_visible()
    page.get_by_text("Show the code").click()
    assert folded.get_by_text("def").first.is_visible()
    solution = page.locator(".help pre")
    assert not solution.is_visible()
    page.get_by_text("Solution").click()
    assert "momentum_gain" in solution.inner_text()
    assert page.locator(".buttons a").all_inner_texts() == ["Run on Binder", "Run on Colab", "Download"]


@pytest.mark.notebook
def test_packs_stay_out_until_a_reader_comes_near(site, page):
    assert page.evaluate("performance.getEntriesByType('resource').filter(e => e.name.includes('01_sgd-')).length") == 0
    assert {path.name for path in Path(site).glob("01_sgd-*.js")} == {"01_sgd-00.js", "01_sgd-01.js"}
    content = (Path(site) / "01_sgd-00.js").read_text(encoding="utf-8")
    images = json.loads(content.partition(", ")[2].removesuffix(");\n"))["images"]
    assert Image.open(io.BytesIO(base64.b64decode(images[0]))).size == (720, 340)
