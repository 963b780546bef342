"""Recorded experiments: nothing finished is lost, nothing runs twice, and what the course has stored still holds."""

from __future__ import annotations

import json
import math
import threading
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dlscale.__main__ as commands
from dlscale.course import claims, records
from dlscale.course.records import Experiment
from dlscale.course.rules import frozen_hash
from dlscale.page import recording

calls: list[dict] = []


def trial(rate: float, seed: int) -> dict[str, float]:
    calls.append({"rate": rate, "seed": seed})
    return {"score": 100 - (rate - 0.3) ** 2 - seed / 10 if rate < 1 else math.nan, "steps": seed}


def plan(run):
    """Choose a rate on two seeds, then look at it on three others."""
    scores = run([{"rate": rate, "seed": seed} for rate in (0.1, 0.3, 2.0) for seed in (8, 9)])
    best = (0.1, 0.3, 2.0)[np.nanargmax(np.reshape([score["score"] for score in scores], (3, 2)).sum(1))]
    run([{"rate": best, "seed": seed} for seed in (2, 1, 0)])


TOY = Experiment("toy-rates", "a toy", trial, plan, {"score": 1e-6, "steps": 0})


@pytest.fixture(autouse=True)
def no_calls():
    calls.clear()


def without_seconds(record):
    return [(trial.setting, str(trial.measures)) for trial in record.trials]


def test_a_record_holds_every_trial_in_the_order_of_the_plan(tmp_path):
    record = records.execute(TOY, tmp_path)
    assert str(record.trials) == str(records.read("toy-rates", tmp_path).trials)
    assert [trial.setting for trial in record.trials][-2:] == [{"rate": 0.3, "seed": 1}, {"rate": 0.3, "seed": 0}]
    assert len(record.trials) == len(calls) == 9
    assert record.options("rate") == [0.1, 0.3, 2.0]
    np.testing.assert_allclose(record.values("score", rate=0.3), [100, 99.9, 99.8, 99.2, 99.1])
    assert np.isnan(record.values("score", rate=2.0)).all(), "a run that diverged is kept"
    assert {"jax", "optax", "numpy", "python"} <= record.versions.keys()
    assert "9 trials" in str(record)
    assert "python -m dlscale run toy-rates" in str(record)
    assert [path.name for path in tmp_path.iterdir()] == ["toy-rates.json"]


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    def give_up(done, planned):
        assert planned == 6
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        records.execute(TOY, tmp_path, give_up)
    (part,) = tmp_path.glob("*.part")
    kept = len(part.read_text().splitlines())
    assert kept == len(calls) >= 4, "those that were under way are kept too"
    with part.open("a") as file:
        file.write('{"setting": {"rate"')  # the machine went down while it wrote
    calls.clear()
    with pytest.warns(match=f"lines skipped: 1; whole trials kept: {kept}"):
        record = records.execute(TOY, tmp_path)
    assert len(calls) == 9 - kept
    assert without_seconds(record) == without_seconds(records.execute(TOY, tmp_path / "fresh"))


WHOLE = [json.dumps({"setting": {"rate": 0.1, "seed": seed}, "measures": {"score": None, "steps": 1.0}, "seconds": 1})
         for seed in range(3)]  # fmt: skip
DAMAGE = [b"{}", b"7", b"\xc3", b"[]", b"", b"[" * 100_000, b"9" * 5_000, b'{"set', WHOLE[0].encode()[:-1],
          WHOLE[0].replace("1.0", "1" + 400 * "0").encode(), WHOLE[0].replace("steps", "stops").encode(),
          WHOLE[0].replace('{"rate": 0.1, "seed": 0}', "[]").encode()]  # fmt: skip
LINES = st.sampled_from([line.encode() for line in WHOLE]) | st.sampled_from(DAMAGE) | st.binary(max_size=9)


@given(lines=st.lists(LINES), torn=st.sampled_from(DAMAGE) | st.just(40 * b"\0"))
def test_of_a_damaged_file_what_is_whole_is_kept_and_the_next_trial_too(lines, torn, tmp_path_factory):
    path = tmp_path_factory.mktemp("damaged") / "toy.part"
    path.write_bytes(b"".join(line + b"\n" for line in lines) + torn)
    whole = [line.decode() for line in lines if line.decode(errors="replace") in WHOLE]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = records._read_part(path, TOY)
        with path.open("a") as file:
            file.write(WHOLE[1] + "\n")
        again = records._read_part(path, TOY)
    assert [trial.setting["seed"] for trial in found] == [WHOLE.index(line) for line in whole]
    assert [trial.setting["seed"] for trial in again] == [WHOLE.index(line) for line in [*whole, WHOLE[1]]]
    skipped = path.read_bytes().count(b"\n") - len(whole) - 1
    assert all(f"kept: {len(trials)}" in str(one.message) for one, trials in zip(told, (found, again), strict=False))
    assert len(told) == 2 * bool(skipped)


def test_trials_of_other_code_are_not_mixed_in(tmp_path, monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        records.execute(TOY, tmp_path, lambda done, planned: (_ for _ in ()).throw(KeyboardInterrupt))
    calls.clear()
    monkeypatch.setattr(records, "fingerprint", lambda chosen: "other code")
    assert records.execute(TOY, tmp_path).source == "other code"
    assert len(calls) == 9


def test_a_failed_trial_leaves_the_old_record(tmp_path):
    old = records.execute(TOY, tmp_path)
    broken = Experiment(TOY.id, TOY.about, trial, lambda run: run([{"rate": "fast", "seed": 0}]), TOY.tolerance)
    with pytest.raises(TypeError):
        records.execute(broken, tmp_path)
    assert str(records.read("toy-rates", tmp_path).trials) == str(old.trials)


def test_a_trial_run_again_agrees_or_not(tmp_path):
    record = records.execute(TOY, tmp_path)
    again = records.rerun(TOY, draw=0, folder=tmp_path)
    assert again.agrees
    assert again.recorded in record.trials
    assert "It agrees." in repr(again)
    diverged = again._replace(recorded=record.select(rate=2.0, seed=8)[0])
    assert not diverged.agrees, "finite now, NaN then"
    assert diverged._replace(again=diverged.recorded).agrees, "NaN both times"
    for measure, value in {"steps": again.recorded.measures["steps"] + 1, "score": 0.0}.items():
        off = again.again._replace(measures=again.again.measures | {measure: value})
        assert "It does not agree." in repr(again._replace(again=off))
    drawn = {str(records.rerun(TOY, draw, tmp_path).recorded.setting) for draw in range(20)}
    assert len(drawn) > 3


def test_a_chaotic_measure_may_differ_as_other_seeds_do(tmp_path):
    records.execute(TOY, tmp_path)
    chaotic = replace(TOY, chaotic=("score",), drawn={"rate": 0.3})
    again = records.rerun(chaotic, draw=0, folder=tmp_path)
    assert again.recorded.setting["rate"] == 0.3
    seeds = [100 - seed / 10 for seed in (0, 1, 2, 8, 9)]
    assert again.allowed == {"score": pytest.approx(1e-6 + 4 * np.std(seeds, ddof=1)), "steps": 0}
    diverged = records.rerun(replace(chaotic, drawn={"rate": 2.0}), draw=0, folder=tmp_path)
    assert diverged.agrees and diverged.allowed["score"] == 1e-6


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"id": 1, "source": "", "versions": {}, "trials": [{}]}'])
def test_a_damaged_record_says_how_to_mend_it(content, tmp_path):
    (tmp_path / "toy-rates.json").write_text(content)
    with pytest.raises(ValueError, match=r"damaged.*git checkout"):
        records.read("toy-rates", tmp_path)


# Confirming: a rule that is frozen, a run that follows, seeds that nobody has seen.

RULE = {"statement": "S", "measure": "M", "unit": "points", "rule": "above", "threshold": 0.0, "seeds": 8}
RULE |= {"frozen": "2026-11-27", "record": "toy-rates"}
SECOND = 20_000


def confirming(tune=range(8, 10), test=range(SECOND, SECOND + 8), identity="toy-rates"):
    def plan(run):
        run([{"rate": 0.1, "seed": seed, "judged_on": "validation"} for seed in tune])
        run([{"rate": 0.1, "seed": seed, "judged_on": "test"} for seed in test])

    def judged(rate, seed, judged_on):
        return trial(rate, seed)

    return Experiment(identity, "", judged, plan, TOY.tolerance, confirms=("toy-claim",))


@pytest.fixture
def rule(monkeypatch):
    entry = dict(RULE)
    monkeypatch.setattr(records, "fingerprint", lambda chosen: "code")
    monkeypatch.setattr(records, "rules", lambda: {"toy-claim": entry})
    monkeypatch.setattr(claims, "rules", lambda: {"toy-claim": entry})
    return entry


def status(entry, folder, monkeypatch):
    monkeypatch.setattr(records, "results_folder", lambda: folder)
    return claims.status("toy-claim", entry)


def test_a_frozen_rule_run_once_on_reserved_seeds_is_confirmed(rule, tmp_path, monkeypatch):
    assert status(rule, tmp_path, monkeypatch) == "exploratory", "frozen, not run yet"
    records.execute(confirming(), tmp_path)
    assert records.frozen(tmp_path / "toy-rates.json") == {"toy-claim": frozen_hash(RULE)}
    records.execute(TOY_ELSEWHERE, tmp_path)
    assert status(rule, tmp_path, monkeypatch) == "confirmed"
    assert status(rule | {"chance": False}, tmp_path, monkeypatch) == "counted"
    assert status({key: rule[key] for key in rule if key != "frozen"}, tmp_path, monkeypatch) == "exploratory"
    assert claims.status("another-claim", rule) == "exploratory"


TOY_ELSEWHERE = replace(TOY, id="toy-elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        {"statement": "T"}, {"measure": "N"}, {"unit": "%"}, {"rule": "below"}, {"threshold": 0.5}, {"seeds": 9},
        {"samples": "nets"},
    ],
    ids=str,
)  # fmt: skip
def test_a_rule_changed_after_its_freeze_is_exploratory_again(change, rule, tmp_path, monkeypatch):
    records.execute(confirming(), tmp_path)
    assert status(rule | {"source": "U", "telling": True}, tmp_path, monkeypatch) == "confirmed", "decides nothing"
    assert status(rule | change, tmp_path, monkeypatch) == "exploratory"


@pytest.mark.parametrize(
    ("seeds", "other", "outcome"),
    [
        ({"tune": range(SECOND + 8, SECOND + 10)}, None, "confirmed"),
        ({"tune": range(SECOND + 7, SECOND + 9)}, None, "exploratory"),
        ({"test": range(records.RESERVED - 1, records.RESERVED + 7)}, None, "exploratory"),
        ({"test": ()}, None, "exploratory"),
        ({}, {"test": range(SECOND + 8, SECOND + 16)}, "confirmed"),
        ({}, {"test": range(SECOND + 7, SECOND + 15)}, "exploratory"),
        ({}, {"tune": (SECOND,), "test": range(30_000, 30_008)}, "exploratory"),
    ],
    ids=["tuned on its own", "tuned on one that decides", "not reserved", "nothing decides", "others have others",
         "another decides by one of them", "another tunes on one of them"],
)  # fmt: skip
def test_only_reserved_seeds_that_nobody_else_has_confirm(seeds, other, outcome, rule, tmp_path, monkeypatch):
    records.execute(confirming(**seeds), tmp_path)
    if other:
        records.execute(replace(confirming(**other, identity="toy-other"), confirms=()), tmp_path)
    assert status(rule, tmp_path, monkeypatch) == outcome


@pytest.mark.parametrize("without", ["frozen", "record"])
def test_a_run_confirms_no_rule_that_is_not_frozen_for_it(without, rule, tmp_path):
    del rule[without]
    with pytest.raises(ValueError, match="'toy-claim' is not frozen for 'toy-rates': give its entry"):
        records.execute(confirming(), tmp_path)
    assert not calls


def test_the_button_runs_stops_and_goes_on(tmp_path, monkeypatch):
    gate, shown = threading.Event(), []

    def wait_for(condition):
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)

    slow = Experiment(TOY.id, TOY.about, lambda **setting: gate.wait() and trial(**setting), plan, TOY.tolerance)
    records.execute(TOY, tmp_path)
    calls.clear()
    monkeypatch.setattr(recording, "display", shown.append)
    recording.record_button(slow, tmp_path)
    start, status = shown[0].children
    start.click()
    wait_for(lambda: start.description == "Stop")
    start.click()
    gate.set()
    wait_for(lambda: "Stopped" in status.value)
    assert 0 < len(calls) < 9
    start.click()
    wait_for(lambda: "Done" in status.value)
    assert len(calls) == 9, "finished trials are not run again"
    monkeypatch.setattr(records, "execute", lambda *rest: 1 / 0)
    start.click()
    wait_for(lambda: "ZeroDivisionError" in status.value)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(commands, "experiments", lambda: {TOY.id: TOY})
    assert commands.main(["run", "toy-rates", "--folder", str(tmp_path)]) == 0
    assert "Recorded: 9 trials" in capsys.readouterr().out
    assert commands.main(["run"]) == 0
    assert "toy-rates: a toy" in capsys.readouterr().out
    assert commands.main(["run", "nothing"]) == 2
    assert "Known: 'toy-rates'" in capsys.readouterr().err


# What the course has stored

STORED = commands.experiments()
EACH = pytest.mark.parametrize("chosen", STORED.values(), ids=STORED)


def test_every_record_belongs_to_an_experiment():
    listed = (commands.ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert all(f"| `results/{name}.json` |" in listed for name in STORED)
    assert {path.name for path in records.results_folder().glob("*-*.json")} == {f"{name}.json" for name in STORED}


@EACH
def test_a_stored_record_was_made_by_the_present_code(chosen):
    record = records.read(chosen.id)
    assert record.id == chosen.id
    assert record.source == records.fingerprint(chosen), f"run `python -m dlscale run {chosen.id}`"
    assert all(trial.measures.keys() == chosen.tolerance.keys() for trial in record.trials)
    settings = [json.dumps(trial.setting, sort_keys=True) for trial in record.trials]
    assert len(settings) == len(set(settings))


def test_reserved_seeds_are_for_confirming_and_each_for_one_record():
    owners: dict[int, str] = {}
    for path in sorted(records.results_folder().glob("*-*.json")):
        confirming = STORED[path.stem].confirms
        assert set(records.frozen(path)) == set(confirming), path.stem
        for seed in records.reserved_seeds(path):
            assert confirming, f"{path.stem} confirms nothing, but has seed {seed}"
            assert owners.setdefault(seed, path.stem) == path.stem, f"{path.stem} shares seed {seed}"


@pytest.mark.record
@EACH
def test_a_stored_trial_comes_out_the_same_again(chosen):
    again = records.rerun(chosen, draw=0)
    assert again.agrees, repr(again)
