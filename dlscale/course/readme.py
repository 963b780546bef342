"""The tables and the picture of README.md, made from the stored notebooks."""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

from dlscale.course.claims import CLAIM_TYPE, HEADINGS, Claim, rules
from dlscale.course.contents import course_map
from dlscale.course.markup import Markdown, table
from dlscale.lab.checks import known
from dlscale.lab.intervals import Interval


def _stored(notebook: Path, kind: str) -> list[Any]:
    """What the cells of a notebook show in this MIME type, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return [data[kind] for data in shown if kind in data]


def claims_table_of(notebooks: Path | str) -> Markdown:
    """A table of the claims whose cards are stored in the notebooks of a folder, in their order.

    Raises ValueError for a stored claim that `claims.toml` does not know.
    """
    claims, rows = rules(), []
    for path in sorted(Path(notebooks).glob("*.ipynb")):
        for card in _stored(path, CLAIM_TYPE):
            entry = claims[known(f"claim, stored in {path.name},", card["id"], claims)]
            made = Claim(card["id"], entry | card, Interval(card["mean"], card["low"], card["high"]), card["verdict"])
            rows.append([*made.row(), f"[{path.stem}](notebooks/{path.name})"])
    return table((*HEADINGS, "Notebook"), rows)


def picture(notebooks: Path | str) -> bytes:
    """The last picture stored in the first notebook of a folder, as PNG. Raises ValueError if there is none."""
    first = min(Path(notebooks).glob("*.ipynb"))
    if not (pictures := _stored(first, "image/png")):
        raise ValueError(f"{first.name} stores no picture: run `make notebooks`.")
    return base64.b64decode(pictures[-1])


def fill(page: str, name: str, content: str) -> str:
    """Return the page with `content` between `<!-- name:begin -->` and `<!-- name:end -->`; both must be there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found_begin, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"The page needs the lines {begin} and {end}, in this order, around its table.")
    return f"{head}{begin}\n\n{content}\n\n{end}{tail}"


def renew(page: Path, notebooks: Path, check: bool) -> int:
    """Bring the page and the picture beside it up to date, or with `check` only say what is stale; an exit status."""
    text = page.read_text(encoding="utf-8")
    text = fill(fill(text, "claims", claims_table_of(notebooks)), "map", course_map("notebooks/"))
    for path, content in {page: text.encode(), page.parent / "docs" / "start.png": picture(notebooks)}.items():
        if path.is_file() and path.read_bytes() == content:
            continue
        if check:
            print(f"{path.name} is stale. Run `python -m dlscale readme`.", file=sys.stderr)
            return 1
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return 0
