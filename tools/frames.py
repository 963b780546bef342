"""Explorers' frames for pages without a kernel: `begin` works in a notebook's kernel, `run` where the site is made."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
from IPython import get_ipython
from IPython.display import HTML, display
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

from dlscale.page import widgets

MAX_SETTINGS = 300  # above, controls move one at a time, the others where they start
MAX_BYTES = 2_000_000  # of one notebook's explorers
COLORS = 64  # of a frame; it takes a quarter of what the live one takes
CELL_SECONDS = 1800
WIDGET = "application/vnd.jupyter.widget-view+json"


def begin(folder: str) -> None:
    """From now on questions are asked in HTML, and explorers are drawn, each into a file of `folder`, after their cell.

    Not later: another cell may use the same names for other things.
    """
    drawn: list[widgets.Explorer] = []

    def draw_new(_result: object) -> None:
        for explorer in widgets.explorers[len(drawn) :]:
            Path(folder, f"{len(drawn):02}.json").write_text(json.dumps(draw(explorer)), encoding="utf-8")
            drawn.append(explorer)

    widgets.predict = ask
    get_ipython().events.register("post_run_cell", draw_new)


def ask(question: str, options: Sequence[str]) -> SimpleNamespace:
    """Stands for `widgets.predict`: the page fills a reader's choice into what was measured."""
    buttons = "".join(
        f'<label><input type="radio" name="{escape(question)}" value="{escape(option)}"> {escape(option)}</label>'
        for option in options
    )
    note = '<p role="status" class="dlscale-note"></p>'
    display(HTML(f'<fieldset class="dlscale-question"><legend>{escape(question)}</legend>{buttons}{note}</fieldset>'))
    return SimpleNamespace(question=question, options=options, value=None)


def draw(explorer: widgets.Explorer) -> dict[str, Any]:
    """The first picture, what the page is told, and each setting's frame: the number of an image and a sentence."""
    looks, choices = [], []
    for control in explorer.controls.values():
        number = control.kind == "number"  # offers some numbers, as a menu
        choices.append(control.examples if number else control.values)
        texts = {"kind": "menu", "texts": [f"{value:g}" for value in control.examples], "start": 0} if number else {}
        looks.append(control.look() | texts)
    places = [range(len(values)) for values in choices]
    alone = math.prod(map(len, places)) > MAX_SETTINGS
    frames: dict[str, tuple[int, str]] = {}
    images: dict[bytes, int] = {}
    for setting in one_at_a_time(looks) if alone else itertools.product(*places):
        values = [values[place] for values, place in zip(choices, setting, strict=True)]
        picture, text = explorer.draw(dict(zip(explorer.controls, values, strict=True)))
        frames[key(setting)] = images.setdefault(shrink(picture), len(images)), text
    encoded = [base64.b64encode(image).decode() for image in images]
    first = explorer.page.about["picture"].partition(",")[2]
    return {"picture": first, "controls": looks, "alone": alone, "frames": frames, "images": encoded}


def key(setting: Any) -> str:
    """The setting as the page writes it."""
    return json.dumps(list(setting), separators=(",", ":"))


def one_at_a_time(looks: list[dict[str, Any]]) -> list[list[int]]:
    """The start, then each control's places with the others at the start."""
    start = [look["start"] for look in looks]
    places = ((i, place) for i, look in enumerate(looks) for place in range(len(look["texts"])))
    return [start, *([*start[:i], place, *start[i + 1 :]] for i, place in places)]


def shrink(png: bytes) -> bytes:
    """The picture in few colours, as WebP without further loss."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).quantize(COLORS).convert("RGB").save(buffer, "webp", lossless=True, method=2)
    return buffer.getvalue()


def run(path: Path, folder: Path) -> tuple[NotebookNode, list[dict[str, Any]]]:
    """Run the notebook with its explorers drawn into `folder`; return it, and what was drawn, in order.

    An output that is an explorer's picture gets its number as metadata `explorer`; widgets are left out.
    """
    notebook = nbformat.read(path, as_version=4)
    call = f"__import__('frames').begin({os.fspath(folder)!r})"  # no new name comes into the notebook
    notebook.cells.insert(0, nbformat.v4.new_code_cell(call))
    tools = os.pathsep.join(filter(None, [os.fspath(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    resources = {"metadata": {"path": os.fspath(path.resolve().parent)}}
    options = {"timeout": CELL_SECONDS, "kernel_name": "python3", "coalesce_streams": True, "resources": resources}
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    client = NotebookClient(notebook, store_widget_state=False, **options)
    client.execute(env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": tools})
    del notebook.cells[0]
    explorers = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    numbers = {explorer.pop("picture"): number for number, explorer in enumerate(explorers)}
    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
        for output in cell.outputs:
            picture = output.get("data", {}).get("image/png", "").replace("\n", "")
            if picture in numbers:
                output.metadata["explorer"] = numbers.pop(picture)
    assert not numbers, f"{path.name}: explorers {[*numbers.values()]} were drawn, but their pictures are not shown"
    fit(explorers)
    return notebook, explorers


def fit(explorers: list[dict[str, Any]], limit: int = MAX_BYTES) -> None:
    """Let the largest explorers move one control at a time, in place, until all take at most `limit` bytes."""
    size = {id(explorer): len(json.dumps(explorer)) for explorer in explorers}
    for largest in sorted(explorers, key=lambda explorer: -size[id(explorer)]):
        if sum(size.values()) > limit and not largest["alone"] and len(largest["controls"]) > 1:
            few = {key(setting): largest["frames"][key(setting)] for setting in one_at_a_time(largest["controls"])}
            used = sorted({number for number, _ in few.values()})
            largest["frames"] = {name: (used.index(number), text) for name, (number, text) in few.items()}
            largest["images"] = [largest["images"][number] for number in used]
            largest["alone"] = True
            size[id(largest)] = len(json.dumps(largest))
