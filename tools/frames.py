"""What a page has in a kernel's place: the frames of explorers, drawn while their notebook runs, and its questions."""

import io
import itertools
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from IPython.display import HTML, display
from PIL import Image

from dlscale.page import widgets

MAX_SETTINGS, MAX_BYTES = 300, 600_000  # of an explorer; above, its controls move one at a time
COLORS = 64  # of a frame; it takes a quarter of what the live one takes
ABOUT = '<script type="application/json" class="dlscale-about">{}</script>'
ASKED = '<fieldset class="dlscale-question"><legend>{}</legend>{}<p role="status" class="dlscale-note"></p></fieldset>'
OPTION = '<label><input type="radio" name="{0}" value="{1}"> {1}</label>'


def begin(folder: str, name: str) -> None:
    """From now on this kernel asks in HTML, and behind each explorer's picture it says where its frames lie."""
    explore = widgets.explore

    def explore_and_draw(*given: Any, **named: Any) -> None:
        explore(*given, **named)
        told = draw(widgets.explorers[-1], Path(folder), f"{name}-{len(widgets.explorers):02}")
        display(HTML(ABOUT.format(json.dumps(told).replace("<", "\\u003c"))))

    widgets.explore, widgets.predict = explore_and_draw, ask


def ask(question: str, options: Sequence[str]) -> SimpleNamespace:
    """Stands for `widgets.predict`: the page fills a reader's choice into what was measured."""
    buttons = "".join(OPTION.format(escape(question), escape(option)) for option in options)
    display(HTML(ASKED.format(escape(question), buttons)))
    return SimpleNamespace(question=question, options=options, value=None)


def draw(explorer: widgets.Explorer, folder: Path, name: str) -> dict[str, Any]:
    """Write an explorer's frames into `folder`; return what its page is told.

    `name`.js knows the number of each setting's picture, `name`-number.webp, and its sentence.
    """
    looks, choices = [], []
    for control in explorer.controls.values():
        number = control.kind == "number"  # offers some numbers, as a menu
        choices.append(control.examples if number else control.values)
        texts = {"kind": "menu", "texts": [f"{value:g}" for value in control.examples], "start": 0} if number else {}
        looks.append(control.look() | texts)
    start, places = [look["start"] for look in looks], [range(len(values)) for values in choices]
    moves = ((i, place) for i, some in enumerate(places) for place in some)
    few = [start, *([*start[:i], place, *start[i + 1 :]] for i, place in moves)]
    frames: dict[str, tuple[bytes, str]] = {}
    for setting in few if math.prod(map(len, places)) > MAX_SETTINGS else itertools.product(*places):
        values = [values[place] for values, place in zip(choices, setting, strict=True)]
        png, text = explorer.draw(dict(zip(explorer.controls, values, strict=True)))
        frames[key(setting)] = shrink(png), text
    if sum(map(len, {image for image, _ in frames.values()})) > MAX_BYTES:
        frames = {key(setting): frames[key(setting)] for setting in few}
    images = list(dict.fromkeys(image for image, _ in frames.values()))
    for number, image in enumerate(images):
        (folder / f"{name}-{number}.webp").write_bytes(image)
    pack = {setting: (images.index(image), text) for setting, (image, text) in frames.items()}
    (folder / f"{name}.js").write_text(f'dlscalePack("{name}", {json.dumps(pack)});\n', encoding="utf-8")
    alone = len(frames) < math.prod(map(len, places))
    return {"name": name, "alt": frames[key(start)][1], "controls": looks, "alone": alone}


def key(setting: Sequence[int]) -> str:
    """The setting as the page writes it."""
    return json.dumps([*setting], separators=(",", ":"))


def shrink(png: bytes) -> bytes:
    """The picture in few colours, as WebP without further loss."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).quantize(COLORS).convert("RGB").save(buffer, "webp", lossless=True, method=2)
    return buffer.getvalue()
