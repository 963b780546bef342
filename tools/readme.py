"""Renew what is generated in README.md, docs/ and data/README.md.

README.md has routes, the map of the notebooks, and how many claims have each verdict. docs/CLAIMS.md shows every claim
of data/results/claims.json, with its rule and the rules before. docs/INDEX.md finds methods from A to Z and every item
of the lectures. docs/INSTRUCTORS.md and docs/needs.svg show which lesson needs which, as the lessons' openings say.
data/README.md lists records and data sets. The picture of the README is one that the first notebook stores.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from dlscale.__main__ import experiments
from dlscale.course import records
from dlscale.course.claims import CLAIM_TYPE, STATUSES, VERDICTS, Claim, decided, rules
from dlscale.course.contents import Item, Notebook, contents, course_map
from dlscale.course.markup import Markdown, markdown_table
from dlscale.lab.checks import known

ROOT = Path(__file__).resolve().parent.parent

ROUTES = {  # lessons by number, each behind those that it needs
    "One evening": ("00", "01", "05"),
    "Systems": ("00", "01", "02", "03", "04", "07", "08", "09", "11", "12"),
    "Precision and sparsity": ("00", "01", "02", "05", "06", "12"),
}
SETS = ("mnist", "mnist1d", "digits")
PARTS = {"Claims of the lectures": False, "Questions of our own": True}  # whether they are ours
CLAIMS = """# Every claim of the course

The lectures behind the course make claims, and we add questions of our own. A rule decides each of them. A claim
*shows* if the whole 95 % interval satisfies its rule. It is *weak* if only the mean does. Otherwise it is *not at this
scale*, or it *does not hold here* where scale does not matter. Brackets hold the interval of the mean. A claim without
chance gives its range instead.

- *Confirmed*: {confirmed}.
- *Exploratory*: {exploratory}.
- *Counted*: {counted}.

The fold under each table tells how its claims were decided, and lists every change of a rule. An earlier rule of a
confirmed claim may have been decided on other seeds. `python tools/readme.py` makes this page.""".format(**STATUSES)
LECTURES = {  # by the letter of their items
    "P": "Pedram, Lynch & Lauterbach",
    "C": "Catanzaro",
    "B": "Ben-Nun",
    "J": "Notes on Jia et al.",
    "E": "Hoefler",
    "": "The course's own",
}
INDEX = """# Methods from A to Z, and every item of the lectures

Each link names the section in which you run the method. The last column names the items of the lectures, whose letters
are {}. `python tools/readme.py` makes this page from `dlscale/course/contents.toml` and `tools/methods.txt`.
""".format(", ".join(f"{letter} ({lecture})" for letter, lecture in LECTURES.items() if letter))
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" font-family="sans-serif" font-size="14">'
BOX = '<rect x="{}" y="{}" width="156" height="48" rx="5" fill="#E8F1F8" stroke="#0072B2"/>'
TEXT = '<tspan x="{}" y="{}">{}</tspan>'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is stale")
    options = parser.parse_args(arguments)
    return renew(ROOT / "README.md", ROOT / "notebooks", options.check)


def cells(path: Path) -> list[dict]:
    """The cells of a stored notebook, each source as one text."""
    stored = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in stored]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower().replace(" ", "-"))


# Claims


def decided_claims() -> list[Claim]:
    """The claims of claims.json, in the order of the course. Raises ValueError for one that no `claims.toml` knows."""
    return [Claim.stored(known("claim in claims.json", key, rules()), entry) for key, entry in decided().items()]


def tally(made: Sequence[Claim]) -> str:
    """How many claims of each part have each verdict and each status, and how many changed: a line each."""
    lines = []
    for what, ours in PARTS.items():
        if some := [claim for claim in made if claim.is_ours == ours]:
            kinds = ([claim.verdict for claim in some], VERDICTS), ([claim.status for claim in some], STATUSES)
            counts = [[f"{found.count(one)} *{one}*" for one in names if one in found] for found, names in kinds]
            lines.append(f"- **{what} ({len(some)}):** {'; '.join(map(', '.join, counts))}.")
    changed = f"{sum('history' in rules()[claim.id] for claim in made)} of all {len(made)} had their rule, measure or"
    return "\n".join(
        [*lines, f"- **Changed after a first look:** {changed} seeds changed. The list shows each change."]
    )


def headings(path: Path) -> dict[str, str]:
    """The heading above each claim that a stored notebook decides."""
    heading, found = "", {}
    for cell in cells(path):
        if cell["cell_type"] == "markdown":
            heading = [heading, *re.findall(r"^##+ (.*)$", cell["source"], re.MULTILINE)][-1]
        cards = (output.get("data", {}).get(CLAIM_TYPE) for output in cell.get("outputs", []))
        found |= {card["id"]: heading for card in cards if card and card["decided"]}
    return found


def claims_page(made: Sequence[Claim], notebooks: Path, folder: str) -> str:
    """docs/CLAIMS.md: for each part a table for each notebook, with the rules in a fold; links begin with `folder`."""
    pairs = [(f"{book.file[:2]} {title}", file) for book in contents() for title, file in book.files.items()]
    telling = [claim for claim in made if rules()[claim.id].get("telling")]
    pages = [CLAIMS, tally(made), "A few to begin with. Some of them may surprise you:"]
    pages += ["\n".join(f"- [{claim.entry['statement']}](#{claim.id}) *{claim.verdict}*" for claim in telling)]
    for part, ours in PARTS.items():
        pages.append(f"## {part}")
        names = ("Claim", *(() if ours else ("Source's figure",)), "Ours", "Verdict", "Status", "Section")
        for title, file in pairs:
            own = [one for one in made if one.is_ours == ours and one.entry["notebook"] == Path(file).stem]
            where, rows = headings(notebooks / file) if own else {}, []
            for claim in own:
                statement, figure, *measured = claim.row()
                first = f'<a id="{claim.id}"></a>{statement}<br>`{claim.id}`'
                section = f"[{where[claim.id]}]({folder}{file}#{slug(where[claim.id])})"
                rows.append([first, *(() if ours else (figure,)), *measured, section])
            if own:
                pages += [f"### [{title}]({folder}{file})", markdown_table(names, rows)]
                pages += ["<details><summary>How these were decided</summary>", *map(rule_of, own), "</details>"]
    return "\n\n".join(pages) + "\n"


def rule_of(claim: Claim) -> str:
    """Source, measure, rule and status of a claim, and what they were before."""
    source = "" if claim.is_ours else f"Source: {claim.entry['source']}. "
    changes = rules()[claim.id].get("history", ())
    before = ["\n- {date}: “{from}” became “{to}”. Why: {why}.".format(**change) for change in changes]
    return f"**`{claim.id}`** {source}{' '.join(claim._more())}\n{''.join(before)}".rstrip()


def methods() -> dict[str, re.Pattern[str]]:
    """What tools/methods.txt lists, with a pattern of the words by which each method is found."""
    lines = (ROOT / "tools" / "methods.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.partition(": ") for line in lines if line and not line.startswith("#"))
    words = {name: "|".join(map(re.escape, (others or name).split("; "))) for name, _, others in pairs}
    return {name: re.compile(rf"(?<![\w-])(?:{some})(?!\w)", re.IGNORECASE) for name, some in words.items()}


def index(folder: str) -> Markdown:
    """Tables of the methods by their first letter, then of all items by lecture; links begin with `folder`."""
    items, parts, rows = [(item, book) for book in contents() for item in book.items], ["## Methods from A to Z"], []
    for name, words in methods().items():
        if found := [pair for pair in items if words.search(f"{pair[0].item}\n{pair[0].section}")]:
            rows.append([name, *places(found, folder)])
    rows.sort(key=lambda row: row[0].lower())
    for letter, group in itertools.groupby(
        rows, key=lambda row: row[0][0].upper() if row[0][0].isalpha() else "0 to 9"
    ):
        parts += [f"### {letter}", markdown_table(("Method", "Section", "Items"), group)]
    items.sort(key=lambda pair: [int(number) for number in re.findall(r"\d+", pair[0].id)])
    for letter, lecture in LECTURES.items():
        rows = [[pair[0].item, *places([pair], folder)] for pair in items if pair[0].id[:1] == letter]
        parts += [f"## {lecture}", markdown_table(("Item", "Section", "Items"), rows)]
    return Markdown("\n\n".join(parts))


def places(found: Iterable[tuple[Item, Notebook]], folder: str) -> tuple[str, str]:
    """Links to the sections of items, each once, and the names of the items."""
    links = []
    for item, book in found:
        number = f"{book.file[:2]}{', further' * item.further}"
        links.append(f"[{number}: {item.section}]({folder}{[*book.files.values()][item.further]}#{slug(item.section)})")
    return "<br>".join(dict.fromkeys(links)), ", ".join(dict.fromkeys(item.id for item, _ in found if item.id))


def routes(folder: str) -> Markdown:
    """Ways through the course, each with its hours; links begin with `folder`."""
    books, lines = {book.file[:2]: book for book in contents()}, []
    for name, numbers in ROUTES.items():
        way = [books[number] for number in numbers if number in books]
        links = " → ".join(f"[{book.file[:2]} {book.title.partition(':')[0]}]({folder}{book.file})" for book in way)
        lines.append(f"- **{name}** ({sum(book.minutes for book in way) / 60:.0f} hours): {links}")
    hours = sum(book.minutes for book in books.values()) / 60
    return Markdown("\n".join([*lines, f"- **A whole semester** ({hours:.0f} hours): all lessons, in order"]))


def needs(notebooks: Path) -> dict[str, list[str]]:
    """The lessons, by number, that each lesson needs. Its opening says so."""
    found = {}
    for book in contents():
        opening = "\n".join(cell["source"] for cell in cells(notebooks / book.file)[:8])
        said = re.search(r"(?:you need|\*\*For whom\.\*\*)([^·\n]*)", opening)
        found[book.file[:2]] = sorted(re.findall(r"\]\((\d\d)_", said[1] if said else ""))
    return found


def needs_picture(before: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """An SVG with a line to each lesson from those that it needs, and the same in words.

    A lesson that another needed lesson needs already gets no line of its own.
    """
    rank, all_before, rows, free = {}, {}, {}, itertools.count()
    for lesson, some in before.items():
        rank[lesson] = 1 + max((rank[one] for one in some), default=-1)
        all_before[lesson] = {*some, *(one for other in some for one in all_before[other])}
    direct = {one: [x for x in some if not any(x in all_before[y] for y in some)] for one, some in before.items()}
    after = {lesson: [one for one in direct if lesson in direct[one]] for lesson in direct}

    def place(lesson: str) -> None:  # halfway between the first and the last that follow, or in a row of its own
        follows = [one for one in after[lesson] if max(direct[one], key=rank.get) == lesson]
        for one in follows:
            place(one)
        rows[lesson] = (rows[follows[0]] + rows[follows[-1]]) / 2 if follows else next(free)

    for lesson in (lesson for lesson in before if not before[lesson]):
        place(lesson)
    corner = {lesson: (10 + 182 * rank[lesson], round(10 + 58 * rows[lesson])) for lesson in before}
    size = 176 + 182 * max(rank.values()), 68 + round(58 * max(rows.values()))
    lines = [SVG.format(*size), f'<rect width="{size[0]}" height="{size[1]}" fill="white"/>']
    for lesson, (x, y) in corner.items():
        for left, top in (corner[one] for one in direct[lesson]):
            line = f"M{left + 156} {top + 24} H{x - 26} C{x - 12} {top + 24} {x - 16} {y + 24} {x} {y + 24}"
            lines.append(f'<path d="{line}" fill="none" stroke="#777"/>')
    titles = {book.file[:2]: book.title.partition(":")[0] for book in contents()}
    for lesson, (x, y) in corner.items():
        words = textwrap.wrap(f"{lesson} {titles[lesson]}", 18)
        spots = ((x + 7, y + 38 - 9 * len(words) + 18 * line) for line in range(len(words)))
        text = (TEXT.format(*spot, escape(word)) for spot, word in zip(spots, words, strict=True))
        lines += [BOX.format(x, y), f"<text>{''.join(text)}</text>"]
    told = "; ".join(f"{lesson} before {', '.join(some)}" for lesson, some in after.items() if some)
    return "\n".join([*lines, "</svg>\n"]), f"Which lesson comes before which: {told}."


def picture(notebooks: Path | str) -> bytes:
    """The last picture stored in the first notebook of a folder, as PNG. Raises ValueError if there is none."""
    first = min(Path(notebooks).glob("*.ipynb"))
    shown = (output.get("data", {}) for cell in cells(first) for output in cell.get("outputs", []))
    if not (pictures := [data["image/png"] for data in shown if "image/png" in data]):
        raise ValueError(f"{first.name} stores no picture: run `make notebooks`.")
    return base64.b64decode(pictures[-1])


def recorded() -> Markdown:
    """A row for each record: its file, its notebook, what it holds, its trials, and the minutes of one core."""
    rows, trials, size = [], 0, 0
    for name, chosen in sorted(experiments().items()):
        seconds = [trial.seconds for trial in records.read(name).trials]
        number = next(book.file[:2] for book in contents() if book.room == name.partition("-")[0])
        rows.append([f"`results/{name}.json`", number, chosen.about, f"{len(seconds):,}", f"{sum(seconds) / 60:,.0f}"])
        trials, size = trials + len(seconds), size + (records.results_folder() / f"{name}.json").stat().st_size
    total = f"The {len(rows)} records hold {trials:,} trials and take {size / 1e6:.1f} MB."
    return Markdown(f"{total}\n\n{markdown_table(('File', 'Notebook', 'What', 'Trials', 'Minutes of one core'), rows)}")


def uses(notebooks: Path) -> Markdown:
    """For each data set, the notebooks whose cells or rooms name it."""
    rows: dict[str, list[str]] = {name: [] for name in SETS}
    for book in contents():
        code = [path.read_text(encoding="utf-8") for path in (ROOT / "dlscale" / book.room).glob("*.py")]
        code += [cell["source"] for file in book.files.values() for cell in cells(notebooks / file)]
        for name in SETS:
            if re.search(rf'"{name}(_fresh)?"', "\n".join(code)):
                rows[name].append(book.file[:2])
    return markdown_table(
        ("Set", "Used by notebooks"), [[f"`{name}`", ", ".join(found)] for name, found in rows.items()]
    )


def fill(page: str, name: str, content: str) -> str:
    """Return the page with `content` between `<!-- name:begin -->` and `<!-- name:end -->`; both must be there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found_begin, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"The page needs the lines {begin} and {end}, in this order, around its table.")
    return f"{head}{begin}\n\n{content}\n\n{end}{tail}"


def renew(page: Path, notebooks: Path, check: bool) -> int:
    """Bring the README, its picture and the pages in docs/ up to date, or with `check` only say what is stale.

    Returns an exit status.
    """
    made, docs = decided_claims(), page.parent / "docs"
    text = fill(page.read_text(encoding="utf-8"), "map", f"{routes('notebooks/')}\n\n{course_map('notebooks/')}")
    files = {
        page: fill(text, "counts", tally(made)).encode(),
        docs / "start.png": picture(notebooks),
        docs / "CLAIMS.md": claims_page(made, notebooks, "../notebooks/").encode(),
        docs / "INDEX.md": f"{INDEX}\n{index('../notebooks/')}\n".encode(),
    }
    if (data := page.parent / "data" / "README.md").is_file():
        text = fill(data.read_text(encoding="utf-8"), "records", recorded())
        files[data] = fill(text, "uses", uses(notebooks)).encode()
    if (guide := docs / "INSTRUCTORS.md").is_file():
        drawn, told = needs_picture(needs(notebooks))
        files[docs / "needs.svg"] = drawn.encode()
        files[guide] = fill(guide.read_text(encoding="utf-8"), "needs", f"![{told}](needs.svg)").encode()
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
