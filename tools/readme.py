"""Renew the tables and the picture of README.md, and the pages in docs/.

The README shows the map of the notebooks, how many claims have each verdict, and the claims marked `telling`;
docs/CLAIMS.md shows every claim of data/results/claims.json and what its rule was before, docs/INDEX.md every item of
the lectures. The picture is one that the first notebook stores.
"""

from __future__ import annotations

import argparse
import base64
import json
import re
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from dlscale.course.claims import HEADINGS, STATUSES, VERDICTS, Claim, decided, rules
from dlscale.course.contents import contents, course_map
from dlscale.course.markup import Markdown, markdown_table
from dlscale.lab.checks import known

ROOT = Path(__file__).resolve().parent.parent

ROUTES = {  # notebooks by number
    "One evening": ("00", "05", "08"),
    "Systems": ("00", "07", "08", "09", "10", "11", "12", "16"),
    "Precision and sparsity": ("00", "01", "05", "06", "11", "12"),
}
CLAIMS = """# Every claim of the course

Each is decided by a rule, in `claims.toml` of its notebook's room, under `dlscale/`. A claim *shows* where the whole
interval keeps the rule, and is *weak* where only the mean does. Those that do not show stay. In brackets stands the
95 % interval of the mean. Where nothing is random, the range stands in its place.

- *Exploratory*: {exploratory}. What changed stands under each table.
- *Confirmed*: {confirmed}.
- *Counted*: {counted}.

`python tools/readme.py` makes this page from `data/results/claims.json`.""".format(**STATUSES)
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


def decided_claims() -> list[Claim]:
    """The claims of claims.json, in the order of the course. Raises ValueError for one that no `claims.toml` knows."""
    return [Claim.stored(known("claim in claims.json", key, rules()), entry) for key, entry in decided().items()]


def link(notebook: str, folder: str) -> str:
    """A link to a notebook by its name; `folder` is that of the lessons."""
    return f"[{notebook}]({folder}{'further/' if notebook.endswith('_further') else ''}{notebook}.ipynb)"


def tally(made: Sequence[Claim]) -> str:
    """How many claims of the lectures, and questions of our own, have each verdict; how many have each status."""
    parts = {
        "Claims of the lectures": ([claim.verdict for claim in made if not claim.is_ours], VERDICTS),
        "Questions of our own": ([claim.verdict for claim in made if claim.is_ours], VERDICTS),
        "All together": ([claim.status for claim in made], STATUSES),
    }
    return " ".join(
        f"{what} ({len(found)}): {', '.join(f'{found.count(name)} *{name}*' for name in names if name in found)}."
        for what, (found, names) in parts.items()
        if found
    )


def claims_page(made: Sequence[Claim], folder: str) -> str:
    """docs/CLAIMS.md: a table for each notebook, and the rules that its claims had before in a fold."""
    sections = [CLAIMS, tally(made)]
    for notebook, group in groupby(made, key=lambda claim: claim.entry["notebook"]):
        own = list(group)
        rows = [[f'<a id="{claim.id}"></a>`{claim.id}`', *claim.row()] for claim in own]
        sections += [f"## {link(notebook, folder)}", tally(own), markdown_table(("Id", *HEADINGS), rows)]
        if changes := [change for claim in own for change in history(claim.id)]:
            sections += [f"<details><summary>What changed after a first look: {len(changes)} times</summary>"]
            sections += ["\n".join(changes), "</details>"]
    return "\n\n".join(sections) + "\n"


def history(identity: str) -> list[str]:
    """The rules that a claim had before, as items of a list."""
    before = rules()[identity].get("history", ())
    return [f"- `{identity}`, {{date}}: “{{from}}”, then “{{to}}”: {{why}}".format(**old) for old in before]


def index(folder: str) -> Markdown:
    """Tables of every item, lecture by lecture, with links to its section, which begin with `folder`."""
    items = [(item, book) for book in contents() for item in book.items]
    items.sort(key=lambda pair: [int(number) for number in re.findall(r"\d+", pair[0].id)])
    parts = []
    for letter, lecture in LECTURES.items():
        rows = []
        for item, book in items:
            if item.id[:1] == letter:
                file = [*book.files.values()][item.further] if book.available else ""
                section = f"[{item.section}]({folder}{file}#{slug(item.section)})" if file else "in preparation"
                rows.append([item.id, item.item, book.file[:2], section])
        parts.append(f"## {lecture}\n\n{markdown_table(('', 'Item', 'Notebook', 'Section'), rows)}")
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


def picture(notebooks: Path | str) -> bytes:
    """The last picture stored in the first notebook of a folder, as PNG. Raises ValueError if there is none."""
    first = min(Path(notebooks).glob("*.ipynb"))
    cells = json.loads(first.read_text(encoding="utf-8"))["cells"]
    shown = (output.get("data", {}) for cell in cells for output in cell.get("outputs", []))
    if not (pictures := [data["image/png"] for data in shown if "image/png" in data]):
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
    made, docs = decided_claims(), page.parent / "docs"
    telling = [claim for claim in made if rules()[claim.id].get("telling")]
    rows = [[*claim.row(), link(claim.entry["notebook"], "notebooks/")] for claim in telling]
    text = fill(page.read_text(encoding="utf-8"), "map", f"{routes('notebooks/')}\n\n{course_map('notebooks/')}")
    changed = sum(bool(history(claim.id)) for claim in made)
    counts = f"{tally(made)} After a first look, {changed} of the {len(made)} had their rule, measure or seeds changed."
    text = fill(text, "counts", counts)
    text = fill(text, "claims", markdown_table((*HEADINGS, "Notebook"), rows))
    files = {
        page: text.encode(),
        docs / "start.png": picture(notebooks),
        docs / "CLAIMS.md": claims_page(made, "../notebooks/").encode(),
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
