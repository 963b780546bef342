"""Frames of explorers for pages without a kernel: `draw_new` runs in a notebook's kernel, `run` where the book is made.

A pack is a script that calls `dlscalePack(name, {frames, images})`: frames lead from a setting's key to the number of
an image and a sentence. Scripts load from a file:// address, where a page may not read files by itself.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
from html import escape
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

from dlscale.page import widgets

MAX_SETTINGS = 300  # above, controls move one at a time, the others where they start
MAX_BYTES = 6_000_000  # of one notebook's packs
COLORS = 64  # of a frame; it takes a quarter of what the live one takes
CELL_SECONDS = 1800
WIDGET = "application/vnd.jupyter.widget-view+json"

drawn: list[widgets.Explorer] = []


def draw_new(folder: str) -> None:
    """Draw all settings of the explorers that were made since the last call, each into a file of `folder`."""
    for explorer in widgets.explorers[len(drawn) :]:
        path = Path(folder) / f"{len(drawn):02}.json"
        path.write_text(json.dumps(draw(explorer)), encoding="utf-8")
        drawn.append(explorer)


def draw(explorer: widgets.Explorer) -> dict[str, Any]:
    """Return what the page is told about an explorer, and its frames and images."""
    looks, places, values = [], [], []
    for control in explorer.controls.values():
        look, choices = control.look(), control.values
        if control.kind == "number":  # offers some numbers, as a menu
            choices = control.examples
            look |= {"kind": "menu", "texts": [f"{number:g}" for number in choices], "start": 0}
        looks.append(look)
        values.append(choices)
        places.append(look["start"])
    alone = len(list(itertools.islice(itertools.product(*values), MAX_SETTINGS + 1))) > MAX_SETTINGS
    settings = one_at_a_time(looks) if alone else itertools.product(*(range(len(look["texts"])) for look in looks))
    frames: dict[str, tuple[int, str]] = {}
    images: dict[bytes, int] = {}
    for setting in settings:
        chosen = [choices[place] for choices, place in zip(values, setting, strict=True)]
        picture, text = explorer.draw(dict(zip(explorer.controls, chosen, strict=True)))
        number = images.setdefault(shrink(picture), len(images))
        frames[key(setting)] = (number, text)
    encoded = [base64.b64encode(image).decode() for image in images]
    return {"controls": looks, "alone": alone, "frames": frames, "images": encoded}


def key(setting: Any) -> str:
    """The setting as the page writes it."""
    return json.dumps(list(setting), separators=(",", ":"))


def one_at_a_time(looks: list[dict[str, Any]]) -> list[list[int]]:
    """The start, then each control's places with the others at the start."""
    start = [look["start"] for look in looks]
    moved = [
        [*start[:i], place, *start[i + 1 :]] for i, look in enumerate(looks) for place in range(len(look["texts"]))
    ]
    return [start, *moved]


def shrink(png: bytes) -> bytes:
    """The picture in few colours, as WebP without further loss."""
    buffer = io.BytesIO()
    Image.open(io.BytesIO(png)).quantize(COLORS).convert("RGB").save(buffer, "webp", lossless=True, method=2)
    return buffer.getvalue()


def run(path: Path, folder: Path) -> tuple[NotebookNode, list[dict[str, Any]]]:
    """Run the notebook with its explorers drawn into `folder`; return it, and what was drawn, in order.

    A cell's explorers are drawn right after it: a later one may use its names for other things. An output that is an
    explorer's picture gets its number as metadata `explorer`; a prediction becomes HTML, other widgets are left out.
    """
    notebook = nbformat.read(path, as_version=4)
    cells = notebook.cells
    call = f"__import__('frames').draw_new({os.fspath(folder)!r})"  # no new name comes into the notebook
    hidden = {id(cell): nbformat.v4.new_code_cell(call) for cell in cells if "explore(" in cell.source}
    notebook.cells = [part for cell in cells for part in (cell, hidden.get(id(cell))) if part]
    tools = os.pathsep.join(filter(None, [os.fspath(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    client = NotebookClient(
        notebook,
        timeout=CELL_SECONDS,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": os.fspath(path.resolve().parent)}},
    )
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    client.execute(env=environment | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": tools})
    notebook.cells = cells
    notebook.metadata.pop("widgets", None)
    count = 0
    for cell in cells:
        kept = []
        for output in cell.get("outputs", []):
            if {"image/png", "text/plain"} <= output.get("data", {}).keys():
                output.metadata["explorer"] = count
                count += 1
            elif WIDGET in output.get("data", {}):
                output = prediction(output.data[WIDGET]["model_id"], client.widget_state, len(kept))
            kept += [output] if output else []
        if cell.cell_type == "code":
            cell.outputs = kept
    explorers = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    assert len(explorers) == count, f"{path.name}: {count} pictures of explorers, {len(explorers)} were drawn"
    fit(explorers, path.name)
    return notebook, explorers


def fit(explorers: list[dict[str, Any]], name: str, limit: int = MAX_BYTES) -> None:
    """Let the largest explorers move one control at a time, in place, until all take at most `limit` bytes."""
    while (total := sum(len(json.dumps(explorer)) for explorer in explorers)) > limit:
        whole = [explorer for explorer in explorers if not explorer["alone"] and len(explorer["controls"]) > 1]
        if not whole:
            raise ValueError(f"{name}: the frames take {total:,} bytes, over {limit:,}.")
        largest = max(whole, key=lambda explorer: len(json.dumps(explorer)))
        few = {key(setting): largest["frames"][key(setting)] for setting in one_at_a_time(largest["controls"])}
        used = sorted({number for number, _ in few.values()})
        largest["frames"] = {name: (used.index(number), text) for name, (number, text) in few.items()}
        largest["images"] = [largest["images"][number] for number in used]
        largest["alone"] = True


def prediction(model: str, state: dict[str, dict[str, Any]], number: int) -> NotebookNode | None:
    """A question with radio buttons as HTML; None if the widget is no prediction."""
    asked = state.get(model, {})
    if not {"question", "options"} <= asked.keys():
        return None
    question, options = asked["question"], asked["options"]
    buttons = "".join(
        f'<label><input type="radio" name="{model}-{number}"> {escape(option)}</label>' for option in options
    )
    html = f'<fieldset class="guess"><legend>{escape(question)}</legend>{buttons}</fieldset>'
    return nbformat.v4.new_output("display_data", {"text/html": html})


def pack(name: str, explorer: dict[str, Any]) -> str:
    """The script that hands an explorer's frames to the page."""
    content = {"frames": explorer["frames"], "images": explorer["images"]}
    return f"dlscalePack({json.dumps(name)}, {json.dumps(content, separators=(',', ':'))});\n"
