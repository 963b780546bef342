"""Claims: what a lecture or the course says, what was measured, and the verdict by a rule.

A room's rules stand in its `claims.toml`, under ids "<room>-<slug>". An entry has, beside the texts of its card:

- `rule`: the whole 95 % interval lies above, below or within (±) the threshold, or between two;
- `seeds`: the number of samples, at least five; `samples` says what they are where they are no seeds. `chance = false`:
  they are not drawn at random, and the smallest and largest of them must keep the rule;
- `of = "ours"`: a question of the course, not a statement of the source;
- `scale = false`: if it does not hold, then that is no matter of scale;
- `history`: rules that it had before, each with `date`, `from`, `to` and `why`;
- `telling = true`: docs/CLAIMS.md begins with it;
- `frozen`, a date, and `record`: since then nothing of what decides it was touched, and the experiment `record` decided
  it, on seeds that no other record used. Without them it is exploratory.

What was decided stands in `data/results/claims.json`, which `make notebooks` writes; data/README.md describes it.
"""

import functools
import html
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dlscale.course.markup import number, say, show, wrapped
from dlscale.course.rules import rules
from dlscale.lab import data
from dlscale.lab.checks import known
from dlscale.lab.intervals import Interval, interval

# sign, and the colours of badge and text
VERDICTS = {
    "shows": ("●", "#0072B2", "white"),
    "weak": ("◐", "#E69F00", "black"),
    "not at this scale": ("○", "#6E6E6E", "white"),
}
VERDICTS["does not hold here"] = VERDICTS["not at this scale"]
STATUSES = {
    "confirmed": "the rule was frozen, then decided once, on seeds reserved for it",
    "exploratory": "rule, measure and seeds were open to change after a first look",
    "counted": "nothing in it is random; the range holds all cases",
}
NOTHING = ("none", "no figure", "no number given")  # what a source's figure says where there is none
FILE = "claims.json"  # in data/results
CLAIM_TYPE = "application/vnd.dlscale.claim+json"


@functools.cache
def decided() -> dict[str, dict[str, Any]]:
    """The entries of `claims.json`, by id, in the order of the course."""
    return json.loads((data.data_folder() / "results" / FILE).read_text(encoding="utf-8"))


def counted(entry: dict[str, Any]) -> str:
    """What the samples are."""
    return entry.get("samples", "seeds" if entry.get("chance", True) else "cases")


@dataclass(frozen=True)
class Claim:
    """What `claims.toml` says of a claim, the samples in its unit, what they come to, and the verdict."""

    id: str
    entry: dict[str, Any]
    samples: list[float]
    interval: Interval
    verdict: str
    status: str
    decided: bool = True  # in this kernel, not read from the store

    @classmethod
    def stored(cls, identity: str, entry: dict[str, Any]) -> "Claim":
        """A claim from its entry in `claims.json`."""
        measured = Interval(*(entry[name] for name in Interval._fields))
        texts = entry | {"samples": entry["samples_are"]}
        return cls(identity, texts, entry["samples"], measured, entry["verdict"], entry["status"], False)

    @property
    def is_ours(self) -> bool:
        """Whether it is a question of the course, not a statement of its source."""
        return self.entry.get("of") == "ours"

    def ours(self) -> str:
        """What was measured, with its interval, or its range where nothing is random."""
        (mean, low, high), unit = map(number, self.interval), self.entry["unit"]
        random = self.entry.get("chance", True)
        said = f"{mean} [{low}, {high}] {unit}" if random else f"{mean} {unit}, range {low} to {high}"
        return f"{said}, {self.entry['seeds']} {counted(self.entry)}"

    def row(self) -> list[str]:
        """Its line in a table: claim, the source's figure, ours, verdict and status."""
        figure = "our question" if self.is_ours else self.entry["source_figure"]
        return [self.entry["statement"], figure, self.ours(), self.verdict, self.status]

    def show(self) -> None:
        """Show the card: verdict and claim, then the numbers, then rule and status in a fold."""
        sign, colour, text = VERDICTS[self.verdict]
        style = f"background:{colour};color:{text};border-radius:.3em;padding:.1em .5em;white-space:nowrap"
        claim, numbers, *more = map(html.escape, (self.entry["statement"], self._numbers(), *self._more()))
        card = (
            f'<div style="border:1px solid #888;border-left:6px solid {colour};padding:0 1em .5em;max-width:50em">\n'
            f'<p><span style="{style}">{sign} {self.verdict}</span> <b>{claim}</b></p>\n<p>{numbers}</p>\n'
            f"<details><summary>{self.status.capitalize()}: how it was decided</summary>\n"
            f"{''.join(f'<p>{line}</p>' for line in more)}</details>\n</div>"
        )
        chosen = {name: self.entry[name] for name in ("unit", "seeds")}
        about = {"id": self.id, "samples": self.samples, **self.interval._asdict(), "verdict": self.verdict}
        about |= {"status": self.status, "decided": self.decided, **chosen}
        show({"text/html": card, "text/plain": str(self), CLAIM_TYPE: about})

    def _numbers(self) -> str:
        source = f"Source: {self.entry['source_figure']} ({self.entry['source']})."
        return f"Ours: {self.ours()}. {'Our question.' if self.is_ours else source}"

    def _more(self) -> list[str]:
        """The rule, what the status means and, of a question of ours, what it comes from."""
        *_, last = limits = [f"{limit:,.9g}".replace("-", "−") for limit in np.ravel(self.entry["threshold"])]
        low = "±" if self.entry["rule"] == "within" else f"{limits[0]} and " if len(limits) > 1 else ""
        what = "95 % interval" if self.entry.get("chance", True) else "range"
        unit = (
            re.sub(r"^(point|doubling|decade)s$", r"\1", self.entry["unit"])
            if last in ("1", "−1")
            else self.entry["unit"]
        )
        rule = f"the whole {what} lies {self.entry['rule']} {low}{last} {unit}"
        given = [text for text in (self.entry["source"], self.entry["source_figure"]) if text not in NOTHING]
        return [
            f"Measure: {self.entry['measure']}.",
            f"Rule: it shows if {rule}; it is weak if only the mean does.",
            f"{self.status.capitalize()}: {STATUSES[self.status]}.",
            *([f"Background: {'; '.join(given)}."] if self.is_ours else []),
        ]

    def __str__(self) -> str:
        first = f"{VERDICTS[self.verdict][0]} {self.verdict}: {self.entry['statement']}"
        return wrapped("\n".join([first, self._numbers(), *self._more()]))

    def _ipython_display_(self) -> None:
        """Nothing more: `claim` has shown the card."""


def claim(identity: str, samples: ArrayLike | None = None) -> Claim:
    """Show the card of a claim, decided by its rule from `samples`; without them, as it stands in `claims.json`.

    `samples` (seeds,) are the measurements in the claim's unit, one for each seed; where two arms are compared, their
    differences or ratios, paired by seed. Raises ValueError for an unknown claim, one that is not decided yet,
    another number of samples than the rule asks for, and samples that are not finite.
    """
    entry = rules()[known("claim", identity, rules())]
    if samples is not None:
        made = _decide(identity, entry, np.asarray(samples, dtype=float))
    elif identity in decided():
        made = Claim.stored(identity, decided()[identity])
    else:
        raise ValueError(f"Claim {identity!r} is not decided yet. Store a notebook that hands its samples to claim().")
    made.show()
    return made


def _decide(identity: str, entry: dict[str, Any], samples: np.ndarray) -> Claim:
    if samples.shape != (entry["seeds"],):
        wanted = f"{entry['seeds']} samples, one number for each seed"
        raise ValueError(f"Claim {identity!r} needs {wanted}, not an array of shape {samples.shape}.")
    if bad := np.count_nonzero(~np.isfinite(samples)):
        advice = "A diverged run counts: give it the value of a failed run (for accuracy, chance), do not drop it."
        raise ValueError(f"{bad} of the {samples.size} samples for claim {identity!r} are not finite. {advice}")
    chance = entry.get("chance", True)
    measured = interval(samples) if chance else Interval(samples.mean(), samples.min(), samples.max())
    measured = Interval(*map(float, measured))
    verdict = decide(measured, entry["rule"], entry["threshold"], entry.get("scale", True))
    return Claim(identity, entry, samples.tolist(), measured, verdict, status(identity, entry))


def status(identity: str, entry: dict[str, Any]) -> str:
    """One of `STATUSES`: how far the verdict on a claim can be trusted."""
    from dlscale.course import records  # here, since it brings JAX, which a page of tables does without

    if not entry.get("chance", True):
        return "counted"
    return "confirmed" if "frozen" in entry and records.confirmed(identity, entry) else "exploratory"


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


def summary(*points: str) -> None:
    """Show what the reader saw, as a list: its numbers come from the cells above, not from prose."""
    say("\n".join(f"- {point}" for point in points))
