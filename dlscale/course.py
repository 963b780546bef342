"""What a notebook of the course calls: claims, exercises, tables.

`python -m dlscale.course readme` renews the tables of README.md, `… grade FOLDER` grades submissions.
"""

from __future__ import annotations

import argparse
import base64
import functools
import html
import importlib
import json
import sys
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dlscale.checks import known
from dlscale.exercises import exercise as exercise
from dlscale.statistics import Interval, interval

VERDICTS = {"shows": ("●", "#0072B2"), "weak": ("◐", "#E69F00"), "not at this scale": ("○", "#767676")}
HEADINGS = ("Claim", "Source's figure", "Ours, with 95 % interval", "Verdict")
CLAIM_TYPE = "application/vnd.dlscale.claim+json"
ROOT = Path(__file__).resolve().parent.parent


class Text(str):
    """Text that a notebook shows as it is."""

    __repr__ = str.__str__


class Markdown(Text):
    """Text that a notebook shows formatted."""

    _repr_markdown_ = str.__str__


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Markdown:
    lines = [headings, ["---"] * len(headings), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


@functools.cache
def _read(name: str) -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


# Claims


@dataclass(frozen=True)
class Claim:
    """What `claims.toml` says of a claim, what was measured, in its unit, and the verdict; shown as a card."""

    id: str
    entry: dict[str, Any]
    interval: Interval
    verdict: str

    def ours(self) -> str:
        return f"{self.interval} {self.entry['unit']}, {self.entry['seeds']} {self.entry.get('of', 'seeds')}"

    def row(self) -> list[str]:
        """Its line in a table with `HEADINGS`."""
        return [self.entry["statement"], self.entry["source_figure"], self.ours(), self.verdict]

    def _lines(self) -> list[tuple[str, str]]:
        criterion = f"{'±' if self.entry['rule'] == 'within' else ''}{self.entry['threshold']:g} {self.entry['unit']}"
        return [
            ("Claim", self.entry["statement"]),
            ("Source", f"{self.entry['source']}: {self.entry['source_figure']}"),
            ("Rule", f"{self.entry['measure']}: the 95 % interval lies {self.entry['rule']} {criterion}"),
            ("Ours", self.ours()),
            ("Verdict", f"{VERDICTS[self.verdict][0]} {self.verdict}"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name + ':':9}{text}" for name, text in self._lines())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        body = "<br>".join(f"<b>{name}:</b> {html.escape(text)}" for name, text in self._lines())
        edge = f"border:1px solid #888;border-left:6px solid {VERDICTS[self.verdict][1]}"
        style = f"{edge};padding:.6em 1em;max-width:50em;line-height:1.5"
        numbers = {name: float(number) for name, number in self.interval._asdict().items()}
        about = {"id": self.id, **numbers, "verdict": self.verdict} | {k: self.entry[k] for k in ("unit", "seeds")}
        return {"text/html": f'<div style="{style}">{body}</div>', "text/plain": str(self), CLAIM_TYPE: about}


_made: dict[str, Claim] = {}  # those of this kernel, in the order of making


def claim(identity: str, samples: ArrayLike) -> Claim:
    """Decide a claim by the rule that `claims.toml` states for it.

    `samples` (seeds,) are the measurements in the claim's unit, one for each seed; where two arms are compared, their
    differences or ratios, paired by seed. Raises ValueError for an unknown claim, another number of samples than the
    rule asks for, and samples that are not finite.
    """
    claims = _read("claims.toml")
    entry = claims[known("claim", identity, claims)]
    samples = np.asarray(samples, dtype=float)
    if samples.shape != (entry["seeds"],):
        wanted = f"{entry['seeds']} samples, one number for each seed"
        raise ValueError(f"Claim {identity!r} needs {wanted}, not an array of shape {samples.shape}.")
    if bad := np.count_nonzero(~np.isfinite(samples)):
        advice = "A diverged run counts: give it the value of a failed run (for accuracy, chance), do not drop it."
        raise ValueError(f"{bad} of the {samples.size} samples for claim {identity!r} are not finite. {advice}")
    measured = interval(samples)
    _made[identity] = Claim(identity, entry, measured, decide(measured, entry["rule"], entry["threshold"]))
    return _made[identity]


def decide(measured: Interval, rule: str, threshold: float) -> str:
    """Return "shows" if the whole interval keeps the rule, "weak" if its mean does, else "not at this scale"."""
    keeps = {"above": np.greater, "below": np.less, "within": lambda value, limit: abs(value) <= limit}
    known("rule", rule, keeps)
    mean, low, high = (keeps[rule](value, threshold) for value in measured)
    return "shows" if low and high else "weak" if mean else "not at this scale"


def verdicts() -> Text:
    """The verdicts of the claims made in this kernel, without numbers: the same on every machine, if they hold."""
    return Text("\n".join(f"{made.id}: {made.verdict}" for made in _made.values()))


def claims_table() -> Markdown:
    """A table of the claims made in this kernel, with numbers."""
    return _table(HEADINGS, [made.row() for made in _made.values()])


def _stored(notebook: Path, kind: str) -> list[Any]:
    """What the cells of a notebook show in this MIME type, in order."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return [data[kind] for data in shown if kind in data]


def readme_table(notebooks: Path | str) -> Markdown:
    """A table of the claims whose cards are stored in the notebooks of a folder, in their order.

    Raises ValueError for a stored claim that `claims.toml` does not know.
    """
    claims, rows = _read("claims.toml"), []
    for path in sorted(Path(notebooks).glob("*.ipynb")):
        for card in _stored(path, CLAIM_TYPE):
            entry = claims[known(f"claim, stored in {path.name},", card["id"], claims)]
            made = Claim(card["id"], entry | card, Interval(card["mean"], card["low"], card["high"]), card["verdict"])
            rows.append([*made.row(), f"[{path.stem}](notebooks/{path.name})"])
    return _table((*HEADINGS, "Notebook"), rows)


def picture(notebooks: Path | str) -> bytes:
    """The last picture stored in the first notebook of a folder, as PNG. Raises ValueError if there is none."""
    first = min(Path(notebooks).glob("*.ipynb"))
    if not (pictures := _stored(first, "image/png")):
        raise ValueError(f"{first.name} stores no picture: run `make notebooks`.")
    return base64.b64decode(pictures[-1])


def summary(*points: str) -> Markdown:
    """What the reader saw, as a list: its numbers come from the cells above, not from prose."""
    return Markdown("\n".join(f"- {point}" for point in points))


# The map


class Notebook(NamedTuple):
    """An entry of `contents.toml`: `minutes` to read and `seconds` for the machine are None until it is available."""

    file: str
    title: str
    question: str
    lecture: str
    available: bool = True
    minutes: int | None = None
    seconds: int | None = None


def contents() -> list[Notebook]:
    """The notebooks of the course, in order."""
    return [Notebook(f"{name}.ipynb", **entry) for name, entry in _read("contents.toml").items()]


def course_map(folder: str = "") -> Markdown:
    """A table of the notebooks; links to the available ones begin with `folder`, for example "notebooks/"."""
    rows = []
    for book in contents():
        title = f"[{book.title}]({folder}{book.file})" if book.available else book.title
        times = f"{book.minutes} min, {book.seconds} s" if book.available else "in preparation"
        rows.append([book.file[:2], title, book.question, times])
    return _table(("", "Notebook", "Question", "Reading, machine"), rows)


def fill(page: str, name: str, content: str) -> str:
    """Return the page with `content` between `<!-- name:begin -->` and `<!-- name:end -->`; both must be there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found_begin, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"The page needs the lines {begin} and {end}, in this order, around its table.")
    return f"{head}{begin}\n\n{content}\n\n{end}{tail}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dlscale.course", description="Tables of the README, and grading.")
    commands = parser.add_subparsers(dest="command", required=True)
    readme = commands.add_parser("readme", help="renew the tables of claims and of notebooks in README.md")
    readme.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a table is stale")
    readme.add_argument("--page", type=Path, default=ROOT / "README.md")
    grade = commands.add_parser("grade", help="grade a folder of submitted notebooks; see dlscale.grading")
    grade.add_argument("folder", type=Path, help="submissions, at any depth: alice/01_sgd.ipynb or alice_01_sgd.ipynb")
    grade.add_argument("--out", type=Path, default=Path("grades.csv"))
    grade.add_argument("--seconds", type=float, default=180, help="for each answer and the cells after it")
    grade.add_argument("--memory", type=float, default=1500, help="in megabytes, for each notebook")
    for command in (readme, grade):
        command.add_argument("--notebooks", type=Path, default=ROOT / "notebooks", help="the course's own notebooks")
    options = vars(parser.parse_args(arguments))
    try:
        if options.pop("command") == "readme":
            return _renew(**options)
        importlib.import_module("dlscale.grading").grade(**options)  # by name: it lies a floor above
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _renew(page: Path, notebooks: Path, check: bool) -> int:
    text = page.read_text(encoding="utf-8")
    text = fill(fill(text, "claims", readme_table(notebooks)), "map", course_map("notebooks/"))
    for path, content in {page: text.encode(), page.parent / "docs" / "start.png": picture(notebooks)}.items():
        if path.is_file() and path.read_bytes() == content:
            continue
        if check:
            print(f"{path.name} is stale. Run `python -m dlscale.course readme`.", file=sys.stderr)
            return 1
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return 0


if __name__ == "__main__":  # the imported module, so that its classes exist once
    sys.exit(importlib.import_module("dlscale.course").main())
