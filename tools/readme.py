"""Renew the tables and the picture of README.md, and the pages in docs/, from the stored notebooks.

The README shows the map of the notebooks, how many claims have each verdict, and the claims marked `telling`;
docs/CLAIMS.md shows every claim, docs/INDEX.md every item of the lectures.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dlscale.course.claims import CLAIM_TYPE, HEADINGS, VERDICTS, Claim, rules
from dlscale.course.contents import contents, course_map
from dlscale.course.markup import Markdown, table
from dlscale.lab.checks import known
from dlscale.lab.intervals import Interval

ROOT = Path(__file__).resolve().parent.parent

ROUTES = {  # notebooks by number
    "One evening": ("00", "05", "08"),
    "Systems": ("00", "07", "08", "09", "10", "11", "12", "16"),
    "Precision and sparsity": ("00", "01", "05", "06", "11", "12"),
}
ADDRESS = '<a id="{}"></a>'
CLAIMS = """# Every claim of the course

Each is decided by a rule that was written before its run and stands in `claims.toml` of its notebook's room, under
`dlscale/`. A claim shows where the whole interval keeps the rule, and is weak where only the mean does. Those that do
not show stay. `python tools/readme.py` makes this page from the outputs that the notebooks store.
"""
INDEX = """# Every item of the lectures

Each with the section that lets you run it; several share a number where a lecture says more in one place. `python
tools/readme.py` makes this page from `dlscale/course/contents.toml`.
"""
LECTURES = {  # by the letter of their items
    "P": "Pedram, Lynch & Lauterbach",
    "C": "Catanzaro",
    "B": "Ben-Nun",
    "J": "Notes on Jia et al.",
    "E": "Hoefler",
    "": "The course's own",
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    options = parser.parse_args(arguments)
    return renew(ROOT / "README.md", ROOT / "notebooks", options.check)


def _stored(notebook: Path, kind: str) -> list[Any]:
    """What the cells of a notebook show in this MIME type, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return [data[kind] for data in shown if kind in data]


def stored_claims(notebooks: Path | str) -> list[tuple[Claim, str]]:
    """The claims whose cards are stored in the notebooks of a folder, in order, each with its notebook's name.

    Raises ValueError for a stored claim that no `claims.toml` knows.
    """
    entries, made = rules(), []
    for path in sorted(Path(notebooks).glob("*.ipynb")):
        for card in _stored(path, CLAIM_TYPE):
            entry = entries[known(f"claim, stored in {path.name},", card["id"], entries)] | card
            interval = Interval(card["mean"], card["low"], card["high"])
            made.append((Claim(card["id"], entry, interval, card["verdict"]), path.stem))
    return made


def claims_table_of(made: Iterable[tuple[Claim, str]], folder: str, address: str = "") -> Markdown:
    """A table of claims with links to their notebooks, which stand in `folder`; `address` stands before each, with {}
    for its id."""
    rows = [
        [address.format(claim.id) + first, *rest, f"[{name}]({folder}{name}.ipynb)"]
        for claim, name in made
        for first, *rest in [claim.row()]
    ]
    return table((*HEADINGS, "Notebook"), rows)


def index(folder: str) -> Markdown:
    """Tables of every item, lecture by lecture, with links to its section, which begin with `folder`."""
    items = [(item, book) for book in contents() for item in book.items]
    items.sort(key=lambda pair: [int(number) for number in re.findall(r"\d+", pair[0].id)])
    parts = []
    for letter, lecture in LECTURES.items():
        rows = []
        for item, book in items:
            if item.id[:1] == letter:
                section = f"[{item.section}]({folder}{book.file}#{slug(item.section)})"
                rows.append([item.id, item.item, book.file[:2], section if book.available else "in preparation"])
        parts.append(f"## {lecture}\n\n{table(('', 'Item', 'Notebook', 'Section'), rows)}")
    return Markdown("\n\n".join(parts))


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower().replace(" ", "-"))


def routes(folder: str) -> Markdown:
    """Ways through the course, each with its minutes; links begin with `folder`."""
    books, lines = {book.file[:2]: book for book in contents() if book.available}, []
    for name, numbers in ROUTES.items():
        way = [books[number] for number in numbers if number in books]
        links = " → ".join(f"[{book.file[:2]} {book.title.partition(':')[0]}]({folder}{book.file})" for book in way)
        lines.append(f"- **{name}** ({sum(book.minutes or 0 for book in way) / 60:.0f} hours): {links}")
    return Markdown("\n".join(lines))


def counts(made: Sequence[tuple[Claim, str]]) -> Markdown:
    """A table of how many claims of each notebook, and of all, have each verdict."""
    found = {name: [claim.verdict for claim, other in made if other == name] for _, name in made}
    found["all"] = [claim.verdict for claim, _ in made]
    rows = [[name, *(str(verdicts.count(verdict)) for verdict in VERDICTS)] for name, verdicts in found.items()]
    return table(("Notebook", *VERDICTS), rows)


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
    """Bring the README, its picture and the two pages in docs/ up to date, or with `check` only say what is stale.

    Returns an exit status.
    """
    made, docs = stored_claims(notebooks), page.parent / "docs"
    text = fill(page.read_text(encoding="utf-8"), "map", f"{routes('notebooks/')}\n\n{course_map('notebooks/')}")
    found = Counter(claim.verdict for claim, _ in made)
    total = ", ".join(f"{found[verdict]} *{verdict}*" for verdict in VERDICTS if found[verdict])
    text = fill(text, "counts", f"{len(made)} claims so far: {total}.")
    text = fill(text, "claims", claims_table_of((pair for pair in made if pair[0].entry.get("telling")), "notebooks/"))
    files = {
        page: text.encode(),
        docs / "start.png": picture(notebooks),
        docs / "CLAIMS.md": f"{CLAIMS}\n{counts(made)}\n\n{claims_table_of(made, '../notebooks/', ADDRESS)}\n".encode(),
        docs / "INDEX.md": f"{INDEX}\n{index('../notebooks/')}\n".encode(),
    }
    stale = [path for path, content in files.items() if not path.is_file() or path.read_bytes() != content]
    if check:
        for path in stale:
            print(f"{path.name} is stale. Run `python tools/readme.py`.", file=sys.stderr)
        return 1 if stale else 0
    docs.mkdir(exist_ok=True)
    for path in stale:
        path.write_bytes(files[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
