"""Claims: what a lecture or the course says, what was measured, and the verdict by a rule written before the run.

A room's rules stand in its `claims.toml`, under ids "<room>-<slug>". An entry has, beside the texts of its card:

- `rule`: the whole 95 % interval lies above, below or within (±) the threshold, or between two;
- `seeds`: the number of samples, at least five; `samples` says what they are where they are no seeds. `chance = false`:
  they are not drawn at random, and the smallest and largest of them must keep the rule;
- `of = "ours"`: a question of the course, not a statement of the source;
- `scale = false`: if it does not hold, then that is no matter of scale;
- `history`: rules that it had before, each with `date`, `from`, `to` and `why`;
- `telling = true`: the README shows it.
"""

import functools
import html
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dlscale.course.markup import Markdown, Text, table
from dlscale.lab.checks import known
from dlscale.lab.intervals import Interval, interval

VERDICTS = {"shows": ("●", "#0072B2"), "weak": ("◐", "#E69F00"), "not at this scale": ("○", "#767676")}
VERDICTS["does not hold here"] = VERDICTS["not at this scale"]
HEADINGS = ("Claim", "Source's figure", "Ours, with 95 % interval", "Verdict")
CLAIM_TYPE = "application/vnd.dlscale.claim+json"


@functools.cache
def rules() -> dict[str, dict[str, Any]]:
    """The entries of all rooms' `claims.toml`, by id."""
    files = sorted(Path(__file__).parents[1].glob("*/claims.toml"))
    return {key: entry for file in files for key, entry in tomllib.loads(file.read_text(encoding="utf-8")).items()}


@dataclass(frozen=True)
class Claim:
    """What `claims.toml` says of a claim, what was measured, in its unit, and the verdict; shown as a card."""

    id: str
    entry: dict[str, Any]
    interval: Interval
    verdict: str

    def ours(self) -> str:
        number = f"{self.entry['seeds']} {self.entry.get('samples', 'seeds')}"
        kind = "" if self.entry.get("chance", True) else "the least and the most of "
        return f"{self.interval} {self.entry['unit']}, {kind}{number}"

    def row(self) -> list[str]:
        """Its line in a table with `HEADINGS`."""
        return [self.entry["statement"], self._figure(), self.ours(), self.verdict]

    def _figure(self) -> str:
        return f"{'(our question) ' * (self.entry.get('of') == 'ours')}{self.entry['source_figure']}"

    def _lines(self) -> list[tuple[str, str]]:
        sign = "±" if self.entry["rule"] == "within" else ""
        limits = sign + " and ".join(f"{limit:g}" for limit in np.ravel(self.entry["threshold"]))
        what = "the 95 % interval lies" if self.entry.get("chance", True) else "all lie"
        return [
            ("Claim", self.entry["statement"]),
            ("Source", f"{self.entry['source']}: {self._figure()}"),
            ("Rule", f"{self.entry['measure']}: {what} {self.entry['rule']} {limits} {self.entry['unit']}"),
            *(
                ("Before", "to {date} “{from}”, then “{to}”: {why}".format(**old))
                for old in self.entry.get("history", ())
            ),
            ("Ours", self.ours()),
            ("Verdict", f"{VERDICTS[self.verdict][0]} {self.verdict}"),
        ]

    def __str__(self) -> str:
        return "\n".join(f"{name + ':':9}{text}" for name, text in self._lines())

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        lines = [(name == "Before", f"<b>{name}:</b> {html.escape(text)}") for name, text in self._lines()]
        body, before = ("<br>".join(text for old, text in lines if old is wanted) for wanted in (False, True))
        body += f"<details><summary>Rules before</summary>{before}</details>" if before else ""
        edge = f"border:1px solid #888;border-left:6px solid {VERDICTS[self.verdict][1]}"
        style = f"{edge};padding:.6em 1em;max-width:50em;line-height:1.5"
        chosen = {name: self.entry[name] for name in ("unit", "seeds")}
        about = {"id": self.id, **self.interval._asdict(), "verdict": self.verdict, **chosen}
        return {"text/html": f'<div style="{style}">{body}</div>', "text/plain": str(self), CLAIM_TYPE: about}


_made: dict[str, Claim] = {}  # those of this kernel, in the order of making


def claim(identity: str, samples: ArrayLike) -> Claim:
    """Decide a claim by the rule that its room's `claims.toml` states for it.

    `samples` (seeds,) are the measurements in the claim's unit, one for each seed; where two arms are compared, their
    differences or ratios, paired by seed. Raises ValueError for an unknown claim, another number of samples than the
    rule asks for, and samples that are not finite.
    """
    entry = rules()[known("claim", identity, rules())]
    samples = np.asarray(samples, dtype=float)
    if samples.shape != (entry["seeds"],):
        wanted = f"{entry['seeds']} samples, one number for each seed"
        raise ValueError(f"Claim {identity!r} needs {wanted}, not an array of shape {samples.shape}.")
    if bad := np.count_nonzero(~np.isfinite(samples)):
        advice = "A diverged run counts: give it the value of a failed run (for accuracy, chance), do not drop it."
        raise ValueError(f"{bad} of the {samples.size} samples for claim {identity!r} are not finite. {advice}")
    chance = entry.get("chance", True)
    measured = interval(samples) if chance else Interval(samples.mean(), samples.min(), samples.max())
    verdict = decide(measured, entry["rule"], entry["threshold"], entry.get("scale", True))
    _made[identity] = Claim(identity, entry, measured, verdict)
    return _made[identity]


def decide(measured: Interval, rule: str, threshold: ArrayLike, scale: bool = True) -> str:
    """Return "shows" if the whole interval keeps the rule, "weak" if its mean does, else "not at this scale".

    Or "does not hold here", where it is no matter of `scale`. The rule "between" has two numbers as its threshold.
    """
    keeps = {
        "above": np.greater,
        "below": np.less,
        "within": lambda value, limit: abs(value) <= limit,
        "between": lambda value, limits: limits[0] <= value <= limits[1],
    }
    known("rule", rule, keeps)
    mean, low, high = (keeps[rule](value, threshold) for value in measured)
    return "shows" if low and high else "weak" if mean else "not at this scale" if scale else "does not hold here"


def verdicts() -> Text:
    """The verdicts of the claims made in this kernel, without numbers: the same on every machine, if they hold."""
    return Text("\n".join(f"{made.id}: {made.verdict}" for made in _made.values()))


def claims_table() -> Markdown:
    """A table of the claims made in this kernel, with numbers."""
    return table(HEADINGS, [made.row() for made in _made.values()])


def summary(*points: str) -> Markdown:
    """What the reader saw, as a list: its numbers come from the cells above, not from prose."""
    return Markdown("\n".join(f"- {point}" for point in points))
