"""Recorded experiments: too long to run live, every trial kept, and each of them can be run again.

An experiment "<room>-<name>" is an instance of `Experiment` in the room's module `experiment`; its record is
`data/results/<id>.json`. `python -m dlscale run` lists them, `… ID` runs one and renews its record.
"""

import hashlib
import json
import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple

import numpy as np

from dlscale.course import sources
from dlscale.course.rules import frozen_hash, rules
from dlscale.lab import checks, data, devices

RESERVED = 10_000  # seeds from here on are for records that confirm claims, each seed for one of them
Setting = dict[str, Any]  # plain values by name
Measures = dict[str, float]
RunTrials = Callable[[Sequence[Setting]], list[Measures]]


@dataclass(frozen=True)
class Experiment:
    """Trials, and the plan that says which.

    `trial(**setting)` is one training run and returns its measures, NaN or infinite ones where it diverged. `plan(run)`
    calls `run(settings)`, which returns their measures in order, as often as it likes: what is asked later may depend
    on what came out.

    A trial that runs again, on any machine, may differ in each measure by its `tolerance`. Where training lets the last
    bits grow until they count as much as another seed, the measure is `chaotic`: four standard deviations over the
    recorded seeds of its setting are allowed beside. `drawn` is the setting of the trials that `rerun` draws from.

    `confirms` names the claims whose rules were frozen before the run. What is not judged on validation data then runs
    on seeds from `RESERVED` on that no other record has.
    """

    id: str
    about: str
    trial: Callable[..., Measures]
    plan: Callable[[RunTrials], object]
    tolerance: Measures
    chaotic: tuple[str, ...] = ()
    drawn: Setting = field(default_factory=dict)
    confirms: tuple[str, ...] = ()


class Trial(NamedTuple):
    """One training run; `seconds` of the core that ran it, compilation included."""

    setting: Setting
    measures: Measures
    seconds: float


@dataclass(frozen=True)
class Record:
    """All trials of an experiment, in the order of its plan, with what they were made with."""

    id: str
    source: str  # fingerprint of the code and the data that made it
    versions: dict[str, str]
    trials: list[Trial]

    def __str__(self) -> str:
        seconds = sum(trial.seconds for trial in self.trials)
        made = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        how = f"python -m dlscale run {self.id}"
        return f"Recorded: {len(self.trials):,} trials, {seconds:,.0f} seconds of one core, {made}. Command: {how}"

    def options(self, name: str, **setting: Any) -> list[Any]:
        """The values that `name` takes in the trials with this setting, in order of appearance."""
        return list(dict.fromkeys(trial.setting[name] for trial in self.select(**setting) if name in trial.setting))

    def values(self, measure: str, **setting: Any) -> np.ndarray:
        """One measure of the trials with this setting, in order of their seeds."""
        trials = sorted(self.select(**setting), key=lambda trial: trial.setting.get("seed", 0))
        checks.known("measure", measure, trials[0].measures)
        return np.array([trial.measures[measure] for trial in trials])

    def select(self, **setting: Any) -> list[Trial]:
        """The trials with this setting, and whatever else. Raises ValueError if there is none."""
        found = [trial for trial in self.trials if setting.items() <= trial.setting.items()]
        if not found:
            raise ValueError(f"No trial of {self.id!r} has {setting}; the first has {self.trials[0].setting}.")
        return found


def fingerprint(chosen: Experiment) -> str:
    """Changes with the code that the trials and their plan depend on, in any module of the package, and with the data.

    Comments, docstrings, layout and what they do not use may change. Raises ValueError where that cannot be told,
    FileNotFoundError where the list of the data's sums is missing.
    """
    path = data.data_folder() / "SHA256SUMS"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. `git checkout data/{path.name}` restores it.")
    sums = path.read_text(encoding="utf-8").splitlines()
    return sources.digest([sources.of(chosen.trial, chosen.plan), *(line for line in sums if line.endswith(".npz"))])


def results_folder() -> Path:
    """Return the folder of the records that come with the course."""
    return data.data_folder() / "results"


def read(identity: str, folder: Path | None = None) -> Record:
    """Read the record of an experiment. Raises FileNotFoundError where there is none, ValueError if it is damaged."""
    path = (folder or results_folder()) / f"{identity}.json"
    again = f"`git checkout data/results/{path.name}` restores it, `python -m dlscale run {identity}` renews it."
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. {again}")
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        return Record(entry["id"], entry["source"], entry["versions"], [_trial(line) for line in entry["trials"]])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is damaged. {again}") from None


def reserved_seeds(path: Path) -> set[int]:
    """The seeds from `RESERVED` on in the file of a record."""
    seeds = map(int, re.findall(r'"seed": (\d{5,})', path.read_text(encoding="utf-8")))
    return {seed for seed in seeds if seed >= RESERVED}


def frozen(path: Path) -> dict[str, str]:
    """The hashes of the rules that a record confirms, by claim, as they were when it was made."""
    return json.loads(path.read_text(encoding="utf-8")).get("frozen", {})


def confirmed(identity: str, entry: dict[str, Any], folder: Path | None = None) -> bool:
    """Whether a claim's `record` was run after its rule was frozen, as it still is, on seeds reserved for it."""
    folder = folder or results_folder()
    path = folder / f"{entry['record']}.json"
    if not path.is_file() or frozen(path).get(identity) != frozen_hash(entry):
        return False
    seeds: dict[bool, set[int]] = {True: set(), False: set()}
    for trial in read(entry["record"], folder).trials:
        seeds[trial.setting.get("judged_on") == "validation"].add(trial.setting.get("seed", 0))
    tuning, deciding = seeds[True], seeds[False]
    others = set().union(*map(reserved_seeds, set(folder.glob("*-*.json")) - {path}))
    return min(deciding, default=0) >= RESERVED and not deciding & tuning and not reserved_seeds(path) & others


def _frozen(chosen: Experiment) -> dict[str, str]:
    """The hashes of the rules that an experiment confirms. Raises ValueError for one that is not frozen for it."""
    for identity in chosen.confirms:
        entry = rules()[checks.known("claim", identity, rules())]
        if "frozen" not in entry or entry.get("record") != chosen.id:
            advice = f'give its entry in claims.toml `frozen = "<date>"` and `record = "{chosen.id}"`'
            raise ValueError(f"Claim {identity!r} is not frozen for {chosen.id!r}: {advice}, then change it no more.")
    return {identity: frozen_hash(rules()[identity]) for identity in chosen.confirms}


def _trial(line: dict[str, Any]) -> Trial:
    measures = {name: float("nan" if value is None else value) for name, value in line["measures"].items()}
    return Trial(line["setting"], measures, line["seconds"])


def _line(trial: Trial) -> dict[str, Any]:
    """What JSON can hold: NaN becomes null, since JSON has no word for it."""
    finite = {name: value if np.isfinite(value) else None for name, value in trial.measures.items()}
    return trial._replace(measures=finite)._asdict()


def _key(setting: Setting) -> str:
    return json.dumps(setting, sort_keys=True)


def _measure(chosen: Experiment, setting: Setting) -> Trial:
    start = time.perf_counter()
    measures = {name: float(value) for name, value in chosen.trial(**setting).items()}
    if measures.keys() != chosen.tolerance.keys():
        raise ValueError(f"A trial of {chosen.id!r} measured {[*measures]}, its tolerance is of {[*chosen.tolerance]}.")
    return Trial(setting, measures, round(time.perf_counter() - start, 3))


def execute(
    chosen: Experiment, folder: Path | None = None, tell: Callable[[int, int], object] = lambda done, planned: None
) -> Record:
    """Run an experiment, one trial a core, and write its record.

    Each trial is kept as soon as it is finished, in a `.part` file beside the record: a run that was interrupted goes
    on where it stopped, unless code or versions changed; damaged lines are told and their trials run again. The old
    record stays until the new one is complete.
    `tell(done, planned)` hears of each trial, in the thread that ran it; the run ends with what it raises.
    """
    folder = folder or results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib", "numpy", "optax")}
    made = {"id": chosen.id, "source": fingerprint(chosen), "versions": {"python": python_version(), **versions}}
    made |= {"frozen": _frozen(chosen)} if chosen.confirms else {}
    part = folder / f"{chosen.id}.{hashlib.sha256(repr(made).encode()).hexdigest()[:8]}.part"
    done = {_key(trial.setting): trial for trial in _read_part(part, chosen)}
    asked: dict[str, None] = {}
    lock = threading.Lock()

    def run(settings: Sequence[Setting]) -> list[Measures]:
        keys = [_key(setting) for setting in settings]
        asked.update(dict.fromkeys(keys))
        waiting = {key: setting for key, setting in zip(keys, settings, strict=True) if key not in done}
        planned = len(done) + len(waiting)

        def one(key: str, setting: Setting) -> None:
            trial = _measure(chosen, setting)
            with lock, part.open("a", encoding="utf-8") as file:
                done[key] = trial
                file.write(json.dumps(_line(trial)) + "\n")
                tell(len(done), planned)

        devices.side_by_side(one, waiting.items())
        return [done[key].measures for key in keys]

    chosen.plan(run)
    # one trial a line, so that a change shows in a diff as what it is
    lines = ",\n".join(json.dumps(_line(done[key])) for key in asked)
    path, new = folder / f"{chosen.id}.json", folder / f"{chosen.id}.new"
    new.write_text(f'{json.dumps(made)[:-1]}, "trials": [\n{lines}\n]}}\n', encoding="utf-8")
    new.replace(path)
    part.unlink(missing_ok=True)
    return read(chosen.id, folder)


def _read_part(path: Path, chosen: Experiment) -> list[Trial]:
    """The whole trials of a `.part` file. What else stands there is skipped, with a warning that says how many lines.

    A torn last line, of a machine that went down while it wrote, is ended: the next trial gets a line of its own.
    """
    if not path.is_file():
        return []
    content, trials, damaged = path.read_bytes(), [], 0
    if content and not content.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
    for line in content.splitlines():
        try:
            trial = _trial(json.loads(line.strip(b"\0")))  # NULs: room that was given, but not written
            if not isinstance(trial.setting, dict) or trial.measures.keys() != chosen.tolerance.keys():
                raise ValueError("it is no trial of this experiment")
            trials.append(trial._replace(seconds=float(trial.seconds)))
        except Exception:  # whatever damage may look like
            damaged += 1
    if damaged:
        warnings.warn(f"{path} is damaged: lines skipped: {damaged}; whole trials kept: {len(trials)}.", stacklevel=2)
    return trials


class Rerun(NamedTuple):
    """A trial that was run again, and how far each measure may lie from the recorded one."""

    recorded: Trial
    again: Trial
    allowed: Measures

    @property
    def agrees(self) -> bool:
        old, new = self.recorded.measures, self.again.measures
        return all(np.isclose(new[name], old[name], 0, limit, equal_nan=True) for name, limit in self.allowed.items())

    def __repr__(self) -> str:
        setting = ", ".join(f"{name} {value}" for name, value in self.recorded.setting.items())
        lines = [
            f"{name}: recorded {value:.6g}, now {self.again.measures[name]:.6g} (allowed: ±{self.allowed[name]:.2g})"
            for name, value in self.recorded.measures.items()
        ]
        verdict = "It agrees." if self.agrees else "It does not agree."
        return "\n".join([f"Run again: {setting}", *lines, f"{verdict} {self.again.seconds:.1f} s"])


def rerun(chosen: Experiment, draw: int | None = None, folder: Path | None = None) -> Rerun:
    """Run one recorded trial again, drawn at random; `draw` is the seed of the draw, if it is to be the same again."""
    record = read(chosen.id, folder)
    trial = random.Random(draw).choice(record.select(**chosen.drawn))
    arm = {name: value for name, value in trial.setting.items() if name != "seed"}
    spread = {name: np.nan_to_num(4 * record.values(name, **arm).std(ddof=1)) for name in chosen.chaotic}
    allowed = {name: float(limit + spread.get(name, 0)) for name, limit in chosen.tolerance.items()}
    return Rerun(trial, _measure(chosen, trial.setting), allowed)
