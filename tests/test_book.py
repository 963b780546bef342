"""The site: what is drawn for it, and built pages in a browser, from a file:// address, without kernel or network."""

from __future__ import annotations

import functools
import http.server
import io
import json
import os
import re
import threading
import urllib.request
from pathlib import Path

import book  # tools/book.py
import frames  # tools/frames.py
import lab
import nbformat
import numpy as np
import pytest
from PIL import Image

from dlscale.course.contents import contents
from dlscale.page import figures, widgets

CELLS = """
# Waves

[Read online](https://dlscale.github.io/dlscale/notebooks/01_sgd.html)

Which wave is the widest (see notebook 02)? Half of $x^2$ is $\\frac{x^2}{2}$ (arXiv:1706.02677).
---
from IPython.display import display
print("A line that is printed.")
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
said = {"text/markdown": "The fast one was **3** times $x$ wide.", "text/plain": ""}
display(said, raw=True, metadata={"dlscale": {"guess": guess.question}})
---
card = {"text/html": "<div>A card</div>", "text/plain": "A card"}
display(card | {"application/vnd.dlscale.claim+json": {"id": "sgd-ravine"}}, raw=True)
---
## More of them

Second part.
---
widgets.explore(make, alt=told, slope=widgets.slider("steep", range(40), 5), sign=widgets.menu("way", ["up", "down"]),
                number=widgets.number("offset", 0.5, -9, 9, [1, 2, 3, 4]))
---
hidden_gradient = ...
"""
LESSONS = ("05_precision", "07_recomputation", "08_collectives")
LONG = ((390, "light"), (1366, "dark"))
LOOKED_AT = ("index", "notebooks/07_recomputation", "docs/CLAIMS", "docs/INSTRUCTORS")
AXE = (
    "axe-core@4.14.1",
    "axe-core/axe.min.js",
    "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c",
)


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


def test_over_the_limit_the_largest_move_one_at_a_time(monkeypatch):
    two = {"a": widgets.slider("a", range(9), 4), "b": widgets.slider("b", range(9), 4)}
    large, small = frames.draw(explorer(monkeypatch, **two)), frames.draw(explorer(monkeypatch, a=two["a"]))
    size = sum(len(json.dumps(drawn)) for drawn in (large, small))
    before = dict(large["frames"])
    frames.fit([large, small], size)
    assert not large["alone"]
    frames.fit([large, small], size - 1)
    assert (large["alone"], small["alone"]) == (True, False)
    assert set(large["frames"]) == {f"[{a},4]" for a in range(9)} | {f"[4,{b}]" for b in range(9)}
    assert {text for _, text in large["frames"].values()} <= {text for _, text in before.values()}
    assert {number for number, _ in large["frames"].values()} == set(range(len(large["images"])))


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://example.org/a.js"></script>',
        '<img alt="" src="//example.org/a.png">',
        '<link rel="stylesheet" href="http://example.org/a.css">',
        "<style>@import 'https://example.org/a.css';</style>",
        '<p style="background: url(https://example.org/a.png)"></p>',
        '<script>await import("https://example.org/a.mjs")</script>',
    ],
)
def test_remote_sources_are_found(html, tmp_path):
    (tmp_path / "page.html").write_text(html)
    assert len(book.remote(tmp_path / "page.html")) == 1
    (tmp_path / "page.html").write_text('<link rel="canonical" href="https://a.org"><a href="https://a.org">a link</a>')
    assert book.remote(tmp_path / "page.html") == []


def test_items_are_looked_up_by_how_they_begin_and_by_names():
    assert book.words("SGD, momentum, Adam: a race") == ["SGD", "Adam"]
    assert book.words("All-reduce as tree, pipeline (ring all-reduce); the lower bound")[1:] == ["ring all-reduce"]
    assert all(book.words(item.item)[0] for lesson in contents() for item in lesson.items)


def test_each_notebook_tells_where_it_can_be_read():
    for path in sorted((book.ROOT / "notebooks").rglob("[0-9]*.ipynb")):
        opening = nbformat.read(path, as_version=4).cells[0].source
        page = path.relative_to(book.ROOT).with_suffix(".html").as_posix()
        assert f"\n[Read online](https://dlscale.github.io/dlscale/{page})\n" in opening, path.name


# In a browser


def npm(package: str, inside: str, sha256: str) -> Path:
    """A file of an npm package; skips what needs it, or fails where all must be shown."""
    try:
        return book.fetch(package, inside, sha256, book.ROOT / "build" / "npm")
    except SystemExit as error:
        (pytest.fail if os.environ.get("DLSCALE_REQUIRE_BROWSER") == "1" else pytest.skip)(str(error))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site of one notebook, whose explorers move, and a further one."""
    folder = tmp_path_factory.mktemp("site")
    cells = [part.strip() for part in CELLS.split("---\n")]
    made = [(nbformat.v4.new_markdown_cell if part[0] == "#" else nbformat.v4.new_code_cell)(part) for part in cells]
    made[3].metadata["tags"] = ["hide-input"]
    made[-1].metadata["tags"] = ["answer-sgd-momentum"]
    nbformat.write(nbformat.v4.new_notebook(cells=made), folder / "01_sgd.ipynb")
    (folder / "further").mkdir()
    more = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# Waves, further\n\nAnd [back](../01_sgd.ipynb).")]
    )
    nbformat.write(more, folder / "further" / "01_sgd_further.ipynb")
    paths = [folder / "01_sgd.ipynb", folder / "further" / "01_sgd_further.ipynb"]
    book.build(paths, folder / "site", npm(*book.MATHJAX), folder / "work", folder / "drawn")
    return folder / "site"


@pytest.fixture(scope="module")
def lessons(tmp_path_factory):
    """A site of some lessons as they are stored."""
    folder = tmp_path_factory.mktemp("lessons")
    paths = [book.ROOT / "notebooks" / f"{name}.ipynb" for name in LESSONS]
    book.build(paths, folder / "site", npm(*book.MATHJAX), folder / "work")
    return folder / "site"


@pytest.fixture(scope="module")
def browser(chromium):
    """A page without a network that keeps what it asked for and what went wrong."""
    with lab.page(chromium) as page:
        page.context.set_offline(True)
        page.asked, page.wrong = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.wrong.append(str(error)))
        page.on("console", lambda message: message.type in ("error", "warning") and page.wrong.append(message.text))
        yield page


def opened(browser, address: str, width: int = 1366, scheme: str = "light"):
    browser.emulate_media(color_scheme=scheme)
    browser.set_viewport_size({"width": width, "height": 768})
    browser.asked.clear(), browser.wrong.clear()
    browser.goto(address)
    browser.evaluate("globalThis.MathJax?.startup.promise")
    browser.evaluate("Promise.allSettled(document.getAnimations().map(change => change.finished))")  # colours, too
    return browser


@pytest.fixture(params=[390, 683, 1366])  # a phone, a laptop at 200 %, a laptop
def page(request, site, browser):
    """The notebook's page, at three widths."""
    opened(browser, (site / "notebooks" / "01_sgd.html").as_uri(), request.param)
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
    return explorer.locator(".dlscale-caption").inner_text(), read(explorer.locator("img").evaluate("({src}) => src"))


def read(address):
    """What lies at the address of a picture, a file or of a server."""
    with urllib.request.urlopen(address) as response:
        return response.read()


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
    firefox.open((site / "notebooks" / "01_sgd.html").as_uri(), width)
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
        picture = read(firefox.evaluate(f"{EXPLORER}.querySelector('img').src"))
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
def test_nothing_is_wider_than_the_page_and_controls_stand_above_the_picture(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    picture, controls = (page.locator(f".dlscale-{part}").first.bounding_box() for part in ("screen", "controls"))
    assert controls["y"] + controls["height"] <= picture["y"]
    assert picture["width"] <= page.viewport_size["width"]


@pytest.mark.notebook
def test_a_choice_fills_in_what_was_said(page):
    answer = page.locator(".cell_output", has_text="times")
    assert answer.inner_text().startswith("The fast one was 3 times")
    page.get_by_role("group", name="Which <one>?").get_by_role("radio").first.focus()
    page.keyboard.press("ArrowDown")
    assert answer.inner_text().startswith("You said the fast one. Measured: The fast one was 3 times")


@pytest.mark.notebook
def test_words_in_parentheses_are_no_formulas(page):
    formulas = page.evaluate("[...MathJax.startup.document.math].map(formula => formula.math)")
    assert formulas == ["x^2", "\\frac{x^2}{2}", "x"]
    assert "(see notebook 02)" in page.locator("article").inner_text()


@pytest.mark.notebook
def test_a_page_has_its_title_once_its_number_of_arxiv_and_its_folds(page):
    assert page.get_by_role("heading", level=1).all_inner_texts() == ["Waves"]
    assert "Read online" not in page.locator("article").inner_text()
    assert page.get_by_role("link", name="arXiv:1706.02677").get_attribute("href").endswith("arxiv.org/abs/1706.02677")
    folded = page.locator("details.hide")
    assert folded.count() == 1 and not folded.get_by_text("make", exact=True).is_visible()
    page.get_by_text("Show the code").click()
    assert folded.get_by_text("make", exact=True).is_visible()
    help_ = page.locator("details:not(.hide)", has_text="Solution")
    assert not help_.locator("pre").is_visible()
    page.get_by_text("Solution").click()
    assert "momentum_gain" in help_.locator("pre").inner_text()
    assert page.get_by_text("Hint 1").is_visible()


@pytest.mark.notebook
def test_lessons_and_further_notebooks_stand_apart_and_link_to_claims_and_tools(site, browser):
    page = opened(browser, (site / "notebooks" / "01_sgd.html").as_uri())
    captions = page.locator(".bd-sidebar-primary .caption-text").all_inner_texts()
    assert captions == ["Lessons", "Further", "Look up"]
    links = page.locator(".bd-sidebar-primary .toctree-l1 a").all_inner_texts()
    assert links[:2] == 2 * ["01 Stochastic gradient descent"]
    targets = page.evaluate("[...document.querySelectorAll('a[href]')].map(link => link.href)")
    assert any(target.endswith("docs/CLAIMS.html#sgd-ravine") for target in targets)
    for place in ("mybinder.org", "colab.research.google.com", "github.com/dlscale/dlscale/issues/new"):
        assert any(place in target for target in targets), place
    assert page.locator("meta[name=description]").get_attribute("content") == contents()[1].question
    assert page.locator("link[rel=icon]").count() == 1
    assert "Cite as" in page.locator(".bd-footer-content").inner_text()


@pytest.mark.notebook
def test_packs_stay_out_until_a_reader_comes_near(site, page):
    assert [address for address in page.asked if "/frames/" in address] == []
    assert page.locator("script[src*='dlscale.js']").get_attribute("defer") is not None
    press(page, page.get_by_role("slider", name="slope"), "End")
    came = {address.rpartition("/")[2] for address in page.asked if "/frames/" in address}
    assert "01_sgd-00.js" in came and 2 < len(came) < 20 and not any(name.startswith("01_sgd-01") for name in came)
    assert len([*(site / "_static" / "frames").glob("01_sgd-00-*.webp")]) == 39  # up or down by 0 is the same


@pytest.mark.notebook
def test_the_front_page_has_a_living_picture_routes_and_a_map(site, browser):
    page = opened(browser, (site / "index.html").as_uri())
    start = shown(page, 0)
    press(page, page.get_by_label("way"), "ArrowDown")
    assert start[0] != (after := shown(page, 0))[0] and start[1] != after[1]
    text = page.locator("article").inner_text()
    assert all(part in text for part in ("Start here", "One evening", "Systems", "Numbers and bits", "For instructors"))
    assert all(lesson.title in text for lesson in contents())
    assert page.locator("meta[property='og:image']").count() == 1


@pytest.mark.notebook
def test_under_a_path_of_a_server_it_is_alive_too(site, chromium):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_): ...

    handler = functools.partial(Quiet, directory=site.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, lab.page(chromium) as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        failed = []
        page.on("response", lambda response: response.ok or response.status == 304 or failed.append(response.url))
        page.goto(f"http://127.0.0.1:{server.server_port}/site/notebooks/01_sgd.html")
        press(page, page.get_by_role("slider", name="slope"), "End")
        assert shown(page, 0)[0] == str_told(slope=19, sign="up")
        assert [address for address in failed if "favicon.ico" not in address] == []
        server.shutdown()


@pytest.mark.notebook
@pytest.mark.parametrize("name", [*LOOKED_AT, "docs/INDEX", "docs/MEASURING", "search", "genindex"])
def test_pages_need_no_network_and_complain_of_nothing(lessons, browser, name):
    page = opened(browser, (lessons / f"{name}.html").as_uri())
    assert [address for address in page.asked if not address.startswith(("file:", "data:", "blob:"))] == []
    assert page.wrong == []
    assert page.evaluate("[...document.images].filter(image => image.complete && !image.naturalWidth).length") == 0
    assert book.remote(lessons / f"{name}.html") == []


@pytest.mark.notebook
@pytest.mark.parametrize("query", ["loss scaling", "ring all-reduce", "checkpointing"])
def test_the_search_leads_to_the_section_first(lessons, browser, query):
    items = ((item, lesson) for lesson in contents() for item in lesson.items)
    item, lesson = next(pair for pair in items if query in map(str.lower, book.words(pair[0].item)))
    page = opened(browser, (lessons / "search.html").as_uri() + "?q=" + query.replace(" ", "+"))
    page.locator("#search-results li > a").first.click()
    page.wait_for_load_state()
    address, _, anchor = page.url.partition("#")
    assert address.endswith(lesson.name + ".html")
    heading = page.locator(f"section:has(#{anchor})").last.locator("h1, h2, h3").first
    assert heading.inner_text() == item.section


@pytest.mark.notebook
def test_the_dark_is_dark_around_pictures_and_outputs(lessons, browser):
    page = opened(browser, (lessons / "notebooks" / "07_recomputation.html").as_uri(), scheme="dark")
    grounds = page.evaluate("""() => [document.body, ...document.querySelectorAll('.cell_output, .cell_output .output')]
        .map(part => getComputedStyle(part).backgroundColor)""")
    for ground in set(grounds):
        red, green, blue, *alpha = (float(number) for number in re.findall(r"[\d.]+", ground))
        assert (alpha or [1])[0] == 0 or max(red, green, blue) < 80, ground
    dimmed = page.evaluate("getComputedStyle(document.querySelector('.cell_output img')).filter")
    assert "brightness" in dimmed


@pytest.mark.notebook
def test_only_controls_and_what_scrolls_can_be_reached_by_tab(lessons, browser):
    page = opened(browser, (lessons / "notebooks" / "07_recomputation.html").as_uri())
    assert (
        page.evaluate("""[...document.querySelectorAll('[tabindex="0"]')].filter(
        part => part.scrollWidth <= part.clientWidth && part.scrollHeight <= part.clientHeight).length""")
        == 0
    )
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText").startswith("Skip to")


@pytest.mark.notebook
def test_print_leaves_out_what_is_around_the_text(lessons, browser):
    page = opened(browser, (lessons / "notebooks" / "07_recomputation.html").as_uri())
    page.emulate_media(media="print")
    assert not page.locator(".bd-sidebar-primary").is_visible() and not page.locator(".bd-header-article").is_visible()
    assert page.get_by_role("heading", level=1).is_visible()
    page.emulate_media(media="screen")


@pytest.mark.notebook
def test_a_lesson_is_light(lessons):
    html = (lessons / "notebooks" / "07_recomputation.html").read_text(encoding="utf-8")
    pictures = {lessons / "_images" / name for name in re.findall(r"_images/([\w.]+)", html)}
    assert len(pictures) > 5
    assert len(html.encode()) + sum(path.stat().st_size for path in pictures) < 1.5e6


@pytest.mark.notebook
@pytest.mark.parametrize(
    ("width", "scheme"),
    [(1366, "light"), (390, "dark"), *(pytest.param(*more, marks=pytest.mark.long) for more in LONG)],
)
@pytest.mark.parametrize("name", LOOKED_AT)
def test_axe_finds_nothing_serious(lessons, browser, name, width, scheme):
    page = opened(browser, (lessons / f"{name}.html").as_uri(), width, scheme)
    page.evaluate(npm(*AXE).read_text(encoding="utf-8"))
    found = page.evaluate("axe.run().then(result => result.violations)")
    serious = {(rule["id"], node["html"][:200]) for rule in found for node in rule["nodes"]
               if rule["impact"] in ("serious", "critical")}  # fmt: skip
    assert serious == set()
