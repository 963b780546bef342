"""The site: what is drawn for it, and built pages in a browser, from a file:// address, without kernel or network."""

from __future__ import annotations

import functools
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import threading
import urllib.request

import book  # tools/book.py
import frames  # tools/frames.py
import lab
import nbformat
import numpy as np
import pytest
import readme  # tools/readme.py
from PIL import Image

from dlscale.course.contents import contents
from dlscale.page import figures, widgets

CELLS = """
# Waves

[Read online](https://dlscale.github.io/dlscale/notebooks/01_sgd.html)

Which wave is the widest (see notebook 02)? Half of $x^2$ is $\\frac{x^2}{2}$ (arXiv:1706.02677).
---
from IPython.display import display
from dlscale.page import figures, widgets

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
widgets.explore(make, alt=told, slope=widgets.player("slope", range(8), 3, interval=20),
                sign=widgets.menu("sign", ["up", "down"]))
---
said = {"text/markdown": "The fast one was **3** times $x$ wide.", "text/plain": ""}
display(said, raw=True, metadata={"dlscale": {"guess": guess.question}})
display({"text/html": "A card", "application/vnd.dlscale.claim+json": {"id": "sgd-ravine"}}, raw=True)
---
widgets.explore(make, alt=told, slope=widgets.slider("steep", range(16), 5), sign=widgets.menu("way", ["up", "down"]),
                number=widgets.number("offset", 0.5, -9, 9, range(1, 10)))
---
hidden_gradient = ...
"""
STORED = ("05_precision", "07_recomputation", "08_collectives", "further/14_honest_benchmarks_further")
GUIDES = [pytest.param(name, marks=pytest.mark.long) for name in ("docs/INDEX", "docs/INSTRUCTORS")]
LOOKED_AT = ("index", "notebooks/07_recomputation", "docs/CLAIMS")
EXPLORER = "document.querySelectorAll('.dlscale-explorer')[0]"
pytestmark = [pytest.mark.notebook, pytest.mark.long, pytest.mark.xdist_group("site")]  # one worker builds it


def str_told(**values):
    return f"This shows {values}"


def test_frames_are_few_and_like_the_live_ones_and_where_bytes_are_many_one_control_moves(monkeypatch, tmp_path):
    monkeypatch.setattr(widgets, "display", lambda *objects, **options: None)

    def make(figure):
        (line,) = figures.axes(figure).plot([0, 1], [0, 0])
        figure.axes[0].set_ylim(0, 100)
        return lambda **values: line.set_ydata([0, 10 * sum(values.values())]) or [line]

    a, b = widgets.slider("a", range(3), 1), widgets.number("b", 0, 0, 9, [1, 2])
    widgets.explore(make, alt=str_told, width=2, height=1, a=a, b=b)
    every, few = {f"[{a},{b}]" for a in range(3) for b in range(3)}, {"[0,0]", "[1,0]", "[2,0]", "[1,1]", "[1,2]"}
    for most, settings, pictures in ((10**6, every, 5), (10, few, 4)):  # sums from 0 to 4, and to 3
        monkeypatch.setattr(frames, "MAX_BYTES", most)
        told = frames.draw(widgets.explorers[-1], tmp_path, f"{most}")
        text = (tmp_path / f"{most}.js").read_text().removeprefix(f'dlscalePack("{most}", ').removesuffix(");\n")
        pack = json.loads(text)
        assert set(pack) == settings and len([*tmp_path.glob(f"{most}-*.webp")]) == pictures
        assert (told["alone"], told["alt"], told["controls"][1]["texts"]) == (
            settings is few, str_told(a=1, b=0), ["0", "1", "2"])  # fmt: skip
    assert pack["[1,2]"] == [pictures - 1, str_told(a=1, b=2)]
    live = io.BytesIO(widgets.explorers[-1].draw({"a": 1, "b": 2})[0])
    one, other = (np.asarray(Image.open(image).convert("RGB"), int) for image in (live, tmp_path / "10-3.webp"))
    assert np.abs(one - other).mean() < 2  # of 255


def test_each_notebook_and_the_readme_tell_where_they_can_be_read():
    for path in sorted((book.ROOT / "notebooks").rglob("[0-9]*.ipynb")):
        opening = nbformat.read(path, as_version=4).cells[0].source
        page = path.relative_to(book.ROOT).with_suffix(".html").as_posix()
        assert f"\n[Read online](https://dlscale.github.io/dlscale/{page})\n" in opening, path.name
    assert (book.ROOT / "README.md").read_text(encoding="utf-8").splitlines()[2].startswith("[![Read online]")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A site of a notebook whose explorers move, and of a further one and some lessons as they are stored."""
    try:
        book.npm_packages()
    except (OSError, subprocess.CalledProcessError) as error:
        (pytest.fail if os.environ.get("DLSCALE_REQUIRE_BROWSER") == "1" else pytest.skip)(f"npm ci: {error}")
    folder = tmp_path_factory.mktemp("site")
    cells = [part.strip() for part in CELLS.split("---\n")]
    made = [(nbformat.v4.new_markdown_cell if part[0] == "#" else nbformat.v4.new_code_cell)(part) for part in cells]
    made[2].metadata["tags"], made[-1].metadata["tags"] = ["hide-input"], ["answer-sgd-momentum"]
    nbformat.write(nbformat.v4.new_notebook(cells=made), folder / "01_sgd.ipynb")
    others = [book.ROOT / "notebooks" / f"{name}.ipynb" for name in STORED]
    for path in others:
        (kept := book.kept(path, folder / "drawn")).parent.mkdir(parents=True)
        shutil.copy(path, kept)
    book.build([folder / "01_sgd.ipynb", *others], folder / "site", folder / "work", folder / "drawn")
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


def opened(browser, path, width=1366, scheme="light"):
    """Open a page of the site, or an address: all formulas are set, and no colour is on its way to another."""
    browser.emulate_media(color_scheme=scheme, media="screen")
    browser.set_viewport_size({"width": width, "height": 768})
    browser.asked.clear(), browser.wrong.clear()
    browser.goto(path if isinstance(path, str) else path.as_uri())
    browser.evaluate("globalThis.MathJax?.startup.promise")
    browser.evaluate("document.getAnimations().forEach(one => one.cancel())")
    return browser


def press(page, control, *keys):
    """Press keys at a control, or none, and wait until its explorer shows what it was moved to."""
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
    with urllib.request.urlopen(address) as response:
        return response.read()


@pytest.mark.parametrize("width", [390, pytest.param(683, marks=pytest.mark.long), 1366])  # 683: a laptop at 200 %
def test_every_setting_is_alive_by_keyboard_and_mouse(site, browser, width):
    page = opened(browser, site / "notebooks" / "01_sgd.html", width)
    picture, controls = (page.locator(f".dlscale-{part}").first.bounding_box() for part in ("screen", "controls"))
    assert controls["y"] + controls["height"] <= picture["y"] and picture["width"] <= width
    assert [name for name in page.asked if "/frames/" in name] == []  # until a reader comes near
    slider, menu, button = (page.get_by_label(name, exact=True) for name in ("slope", "sign", "Play slope"))
    start = shown(page, 0)
    press(page, slider, "End")
    press(page, menu, "ArrowDown")
    end = shown(page, 0)
    assert (start[0], end[0]) == (str_told(slope=3, sign="up"), str_told(slope=7, sign="down"))
    assert Image.open(io.BytesIO(end[1])).format == "WEBP"
    came = {name.rpartition("/")[2] for name in page.asked if "/frames/" in name}
    assert "01_sgd-01.js" in came and not any(name.startswith("01_sgd-02") for name in came)
    menu.select_option("up")
    slider.click(position={"x": 1, "y": 10})
    press(page, slider)
    assert shown(page, 0)[0] == str_told(slope=0, sign="up")
    button.click()
    page.wait_for_function(f"{EXPLORER}.querySelector('output').textContent === '7'")
    button.wait_for()  # it says Stop meanwhile
    press(page, slider)
    assert shown(page, 0)[0] == str_told(slope=7, sign="up")
    for name, key, values in (("steep", "End", (15, "up", 0.5)), ("way", "ArrowDown", (5, "down", 0.5)),
                              ("offset", "End", (5, "up", 9))):  # the others go back to their start  # fmt: skip
        press(page, page.get_by_label(name), key)
        assert shown(page, 1)[0] == str_told(**dict(zip(("slope", "sign", "number"), values, strict=True)))
    explorers = page.locator(".dlscale-explorer").all_inner_texts()
    assert ["one control moves at a time" in text for text in explorers] == [False, True]


def test_every_setting_is_alive_by_keyboard_in_firefox_too(site, firefox):
    ready = f"{EXPLORER}?.getAttribute('data-waits') === 'false'"
    wait = f"new Promise(end => {{ const look = () => {ready} ? end(true) : setTimeout(look, 10); look(); }})"
    for width in (390, 1366):
        firefox.open((site / "notebooks" / "01_sgd.html").as_uri(), width)
        firefox.evaluate(wait)
        assert firefox.evaluate("[innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [width, True]
        seen = {}
        for control, key in (("body", ""), ("[type=range]", "End"), ("select", "ArrowDown")):
            firefox.evaluate(f"({EXPLORER}.querySelector('{control}') ?? document.body).focus()")
            firefox.press(*filter(None, [key]))
            firefox.evaluate(wait)
            caption = firefox.evaluate(f"{EXPLORER}.querySelector('.dlscale-caption').innerText")
            seen[caption] = read(firefox.evaluate(f"{EXPLORER}.querySelector('img').src"))
        assert [*seen] == [str_told(slope=slope, sign=sign) for slope, sign in ((3, "up"), (7, "up"), (7, "down"))]
        assert len(set(seen.values())) == 3


def test_what_a_page_has_beside_its_text(site, browser):
    page = opened(browser, site / "notebooks" / "01_sgd.html")
    formulas = page.evaluate("[...MathJax.startup.document.math].map(formula => formula.math)")
    assert formulas == ["x^2", "\\frac{x^2}{2}", "x"] and "(see notebook 02)" in page.locator("article").inner_text()
    assert "Read online" not in page.locator("article").inner_text()
    answer = page.locator(".cell_output", has_text="times")
    assert answer.inner_text().startswith("The fast one was 3 times")
    page.get_by_role("group", name="Which <one>?").get_by_role("radio").first.focus()
    page.keyboard.press("ArrowDown")
    assert answer.inner_text().startswith("You said the fast one. Measured: The fast one was 3 times")
    folded, help_ = page.locator("details.hide"), page.locator("details:not(.hide)", has_text="Solution")
    assert folded.count() == 1 and not folded.get_by_text("make", exact=True).is_visible()
    assert not help_.locator("pre").is_visible() and page.get_by_text("Hint 1").is_visible()
    page.get_by_text("Show the code").click()
    page.get_by_text("Solution").click()
    folded.get_by_text("make", exact=True).wait_for()
    help_.locator("pre", has_text="momentum_gain").wait_for()
    assert page.locator(".bd-sidebar-primary .caption-text").all_inner_texts() == ["Lessons", "Further", "Look up"]
    links = page.locator(".bd-sidebar-primary .toctree-l1 a").all_inner_texts()
    assert {"01 Stochastic gradient descent", "14 Honest benchmarks", "Methods A to Z"} < {*links}
    targets = page.evaluate("[...document.querySelectorAll('a[href]')].map(link => link.href).join(' ')")
    for place in ("docs/CLAIMS.html#sgd-ravine", "mybinder.org", "colab.research.google.com", "dlscale/issues/new",
                  "https://arxiv.org/abs/1706.02677"):  # fmt: skip
        assert place in targets, place
    assert page.locator("meta[name=description]").get_attribute("content") == contents()[1].question
    assert page.locator("link[rel=icon]").count() == page.locator("meta[property='og:image']").count() == 1
    assert "Cite as" in page.locator(".bd-footer-content").inner_text()
    stops = page.evaluate("""[...document.querySelectorAll('.dlscale-explorer *, .cell, .cell *')].filter(part =>
        part.tabIndex >= 0 && part.scrollWidth <= part.clientWidth).map(part => part.localName)""")
    assert {*stops} <= {"input", "select", "button", "summary", "a"} and stops.count("select") == 3


def test_the_front_page_is_alive_under_a_path_of_a_server_too(site, chromium):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_): ...

    handler, failed = functools.partial(Quiet, directory=site.parent), []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, lab.page(chromium) as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.on("response", lambda response: response.ok or response.status == 304 or failed.append(response.url))
        page.goto(f"http://127.0.0.1:{server.server_port}/site/index.html")
        start = shown(page, 0)
        press(page, page.get_by_label("way"), "ArrowDown")
        assert start[0] != (after := shown(page, 0))[0] and start[1] != after[1]
        assert [address for address in failed if "favicon.ico" not in address] == []
        text = page.locator("article").inner_text()
        here = page.get_by_role("link", name="Start here", exact=True).bounding_box()
        server.shutdown()
    assert here["y"] + here["height"] < 768  # on the first screen
    titles = [f"It takes {contents()[0].minutes} minutes", *(lesson.title for lesson in contents())]
    assert [part for part in (*titles, *readme.ROUTES, "For instructors") if part not in text] == []


@pytest.mark.parametrize("name", [*LOOKED_AT, f"notebooks/{STORED[-1]}", "search", *GUIDES])
def test_pages_need_no_network_complain_of_nothing_and_axe_finds_nothing_serious(site, browser, name):
    page = opened(browser, site / f"{name}.html", 390)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [address for address in page.asked if not address.startswith(("file:", "data:", "blob:"))] == []
    assert page.evaluate("[...document.images].filter(image => image.complete && !image.naturalWidth).length") == 0
    assert page.wrong == []
    (title,) = page.get_by_role("heading", level=1).all_inner_texts()
    assert page.locator("main").inner_text().count(title.strip("#")) <= 2  # a title may be a question of the text
    formulas = page.evaluate("[...globalThis.MathJax?.startup.document.math ?? []].map(formula => formula.math)")
    assert [formula for formula in formulas if formula.startswith("(")] == []
    for scheme in ("light", "dark") * (name in LOOKED_AT):
        opened(browser, site / f"{name}.html", scheme=scheme)
        page.evaluate((book.ROOT / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8"))
        found = page.evaluate("axe.run({resultTypes: ['violations'], preload: false}).then(found => found.violations)")
        serious = [(rule["id"], node["html"][:200]) for rule in found for node in rule["nodes"]
                   if rule["impact"] in ("serious", "critical")]  # fmt: skip
        assert serious == [], scheme


@pytest.mark.parametrize("query", ["loss scaling", "ring all-reduce", "checkpointing"])
def test_the_search_leads_to_the_section_first(site, browser, query):
    words = next(words for method, words in readme.methods().items() if method.lower() == query)
    items = [item for lesson in contents() for item in lesson.items]
    sections = {item.section for item in items if words.search(f"{item.item}\n{item.section}")}
    page = opened(browser, (site / "search.html").as_uri() + "?q=" + query.replace(" ", "+"))
    address = page.locator("#search-results li > a").first.evaluate("link => link.href")
    page.goto(address)
    heading = page.locator(f"section:has(#{address.partition('#')[2]})").last.locator("h1, h2, h3").first
    assert heading.inner_text().strip("#") in sections


def grounds(page):
    """The brightest part of each colour that pictures and outputs stand on."""
    colors = page.evaluate("""[document.body, ...document.querySelectorAll('.cell_output, .cell_output .output')]
        .map(part => getComputedStyle(part).backgroundColor)""")
    numbers = [[float(number) for number in re.findall(r"[\d.]+", color)] for color in {*colors}]
    return [max(some[:3]) for some in numbers if some[3:] != [0]]


def test_a_lesson_is_light_dark_in_the_dark_and_on_paper_text_alone(site, browser):
    file = site / "notebooks" / "07_recomputation.html"
    html = file.read_text(encoding="utf-8")
    pictures = {site / "_images" / name for name in re.findall(r"_images/([\w.]+)", html)}
    assert len(pictures) > 5 and len(html.encode()) + sum(path.stat().st_size for path in pictures) < 1.5e6
    assert all("defer" in script for script in re.findall(r"<script[^>]*(?:dlscale|tex-svg-full).js[^>]*>", html))
    page = opened(browser, file, scheme="dark")
    assert max(grounds(page)) < 80
    assert "brightness" in page.evaluate("getComputedStyle(document.querySelector('.cell_output img')).filter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText").startswith("Skip to")
    page.emulate_media(color_scheme="dark", media="print")
    page.wait_for_function("document.documentElement.dataset.theme === 'light'")
    page.evaluate("document.getAnimations().forEach(one => one.cancel())")
    assert min(grounds(page)) > 200
    assert not page.locator(".bd-sidebar-primary").is_visible() and not page.locator(".bd-header-article").is_visible()
    assert page.get_by_role("heading", level=1).is_visible()
