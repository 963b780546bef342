"""Claims, the map and the index, the README, and the files that they are read from."""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys

import conventions
import nbformat
import numpy as np
import pytest
import readme  # tools/readme.py
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.formatters import DisplayFormatter

import dlscale.__main__ as commands
from dlscale import course
from dlscale.course import claims
from dlscale.course.contents import Item, Notebook, contents
from dlscale.lab.intervals import Interval

STORED = sorted((commands.ROOT / "notebooks").glob("*.ipynb"))
RULES = ("above", "below", "within", "between")
OPTIONS = {"of", "samples", "chance", "scale", "history", "telling"}

# The files


def test_every_claim_is_complete():
    keys = {"statement", "source", "source_figure", "measure", "unit", "rule", "threshold", "seeds"}
    rooms = {book.room for book in contents()}
    for identity, entry in claims.rules().items():
        assert set(entry) - OPTIONS == keys, identity
        assert entry["rule"] in RULES and entry["seeds"] >= 5 and np.isfinite(entry["threshold"]).all(), identity
        assert np.ndim(entry["threshold"]) == (entry["rule"] == "between"), identity
        assert np.all(np.diff(entry["threshold"]) > 0) if entry["rule"] == "between" else True, identity
        assert entry.get("of", "source") in ("source", "ours"), identity
        for old in entry.get("history", []):
            assert set(old) == {"date", "from", "to", "why"} and all(old.values()), identity
        assert identity.partition("-")[0] in rooms, identity
        assert all(entry[key].strip() for key in keys - {"threshold", "seeds"}), identity
        if entry["rule"] == "within":
            assert entry["threshold"] > 0, identity


def test_the_telling_claims_are_few_and_not_only_those_that_show():
    """The README shows them: some from each lecture that has claims, and as honest as the whole."""
    entries = claims.rules()
    made = [claim for claim, _ in readme.stored_claims(STORED[0].parent) if entries[claim.id].get("telling")]
    assert sum("telling" in entry for entry in entries.values()) == len(made) <= 10
    for lecture in ("Pedram", "Catanzaro", "Ben-Nun", "Jia", "Hoefler"):
        assert any(lecture in claim.entry["source"] for claim in made), lecture
    assert {claim.verdict for claim in made} >= {"shows", "weak"} and len({claim.verdict for claim in made}) > 2


def test_contents_list_the_course_in_order():
    books = contents()
    assert [int(book.file[:2]) for book in books] == list(range(18))
    for book in books:
        assert book.title and book.question.endswith("?") and book.lecture, book.file
        assert (book.minutes is not None and book.seconds is not None) == book.available, book.file
        assert book.items or book.file.startswith("00"), f"{book.file} lists no items of the lectures"


EACH = pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)


@EACH
def test_contents_agree_with_the_notebook(path):
    opening = "".join(json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"])
    (book,) = (book for book in contents() if book.file == path.name)
    assert book.available and opening.startswith(f"# {book.title}\n")
    assert re.search(rf"\b{book.minutes} minutes\b.*\b{book.seconds} seconds\b", opening, re.DOTALL)
    headings = {text for _, text in conventions.Notebook(nbformat.read(path, as_version=4), path).headings()}
    for item in book.items:
        assert item.section in headings, f"{item.item}: {path.name} has no section {item.section!r}"


def test_course_map_links_what_is_available():
    lines = course.course_map("notebooks/").splitlines()
    assert len(lines) == 2 + len(contents()) and len({line.count("|") for line in lines}) == 1
    for book, line in zip(contents(), lines[2:], strict=True):
        assert (f"](notebooks/{book.file})" in line) == book.available
        assert ("in preparation" in line) != book.available
    assert course.course_map()._repr_markdown_().count("](01_sgd.ipynb)") == 1


def test_the_index_finds_every_item_under_its_lecture():
    for name, part in zip(readme.LECTURES, readme.index("notebooks/").split("## ")[1:], strict=True):
        lines = part.splitlines()[4:]
        items = [(book, item) for book in contents() for item in book.items if item.id[:1] == name]
        assert part.startswith(readme.LECTURES[name]) and len([*filter(None, lines)]) == len(items)
        for book, item in items:
            where = f"[{item.section}](notebooks/{book.file}#{readme.slug(item.section)})"
            row = f"| {item.id} | {item.item} | {book.file[:2]} | {where if book.available else 'in preparation'} |"
            assert row in lines
    assert readme.slug("3. Loss scaling, static and dynamic") == "3-loss-scaling-static-and-dynamic"


# Claims


@pytest.fixture
def samples(monkeypatch):
    """Three small claims, one a rule, in place of the course's; none made yet."""
    entry = {"statement": "A | B <is> & true.", "source": "S 2018", "source_figure": "7 points"}
    entry |= {"measure": "a minus b", "unit": "points", "threshold": 1.0, "seeds": 5}
    table = {f"sgd-{rule}": entry | {"rule": rule} for rule in RULES}
    table["sgd-between"]["threshold"] = [1.0, 4.0]
    for module in (claims, readme):
        monkeypatch.setattr(module, "rules", lambda: table)
    monkeypatch.setattr(claims, "_made", {})
    return table


CASES = [
    ("above", 1.5, 3, "shows"), ("above", 0.5, 3, "weak"), ("above", -1, 2, "not at this scale"),
    ("above", 1, 2, "weak"),
    ("below", -2, 0.5, "shows"), ("below", -2, 3, "weak"), ("below", 1.5, 3, "not at this scale"),
    ("within", -1, 1, "shows"), ("within", -1.5, 0.5, "weak"), ("within", 1.5, 3, "not at this scale"),
    ("within", -4, 1, "not at this scale"),
    ("between", 1, 4, "shows"), ("between", 0, 4, "weak"), ("between", 3, 6, "not at this scale"),
]  # fmt: skip


def limits(rule, threshold):
    return [threshold, threshold + 3] if rule == "between" else threshold


@pytest.mark.parametrize(("rule", "low", "high", "verdict"), CASES)
def test_the_rules(rule, low, high, verdict):
    measured = Interval((low + high) / 2, low, high)
    assert claims.decide(measured, rule, limits(rule, 1.0)) == verdict
    otherwise = verdict.replace("not at this scale", "does not hold here")
    assert claims.decide(measured, rule, limits(rule, 1.0), scale=False) == otherwise


NUMBERS = st.floats(-100, 100)


@given(NUMBERS, st.floats(0, 50), NUMBERS)
def test_below_mirrors_above_and_within_mirrors_itself(mean, half, threshold):
    measured, mirrored = Interval(mean, mean - half, mean + half), Interval(-mean, -mean - half, -mean + half)
    assert claims.decide(measured, "above", threshold) == claims.decide(mirrored, "below", -threshold)
    assert claims.decide(measured, "within", threshold) == claims.decide(mirrored, "within", threshold)


@given(NUMBERS, st.floats(0, 50), st.floats(0, 50), NUMBERS, st.sampled_from(RULES))
def test_a_wider_interval_never_gives_a_better_verdict(mean, half, more, threshold, rule):
    order = list(claims.VERDICTS)
    narrow, wide = (Interval(mean, mean - h, mean + h) for h in (half, half + more))
    better, worse = (order.index(claims.decide(one, rule, limits(rule, threshold))) for one in (narrow, wide))
    assert better <= worse


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match="Did you mean 'above'"):
        claims.decide(Interval(0, 0, 0), "abov", 0)


def test_a_card_carries_everything(samples):
    made = course.claim("sgd-above", [2, 3, 4, 3, 3])
    assert made.verdict == "shows" and made.interval.mean == 3 and made.id == "sgd-above"
    bundle, _ = DisplayFormatter().format(made)  # as a notebook shows it
    assert set(bundle) == {"text/html", "text/plain", claims.CLAIM_TYPE}
    for text in ("S 2018", "7 points", "a minus b", "3 [2.12, 3.88] points, 5 seeds", "● shows"):
        assert text in bundle["text/html"] and text in bundle["text/plain"], text
    assert "A | B &lt;is&gt; &amp; true." in bundle["text/html"] and "A | B <is> & true." in bundle["text/plain"]
    about = json.loads(json.dumps(bundle[claims.CLAIM_TYPE]))
    assert about.pop("mean") == 3 and about.pop("low") == pytest.approx(2.122, abs=1e-3)
    assert about.pop("high") == pytest.approx(3.878, abs=1e-3)
    assert about == {"id": "sgd-above", "unit": "points", "seeds": 5, "verdict": "shows"}


def test_a_card_says_whose_question_it_is_what_is_not_random_and_what_it_was_before(samples):
    old = {"date": "2026-01-02", "from": "above 0", "to": "above 1", "why": "a walk does it, too"}
    samples["sgd-above"] |= {"of": "ours", "chance": False, "samples": "nets", "scale": False, "history": [old]}
    made = course.claim("sgd-above", [2, 3, 4, 3, 3])
    assert made.interval == (3, 2, 4) and made.verdict == "shows"  # all of them, not the interval of a mean
    text = str(made)
    assert "S 2018: (our question) 7 points" in text and "3 [2, 4] points, the least and the most of 5 nets" in text
    assert "a minus b: all lie above 1 points" in text
    assert "Before:  to 2026-01-02 “above 0”, then “above 1”: a walk does it, too" in text
    shown = made._repr_mimebundle_()["text/html"]
    assert shown.endswith("<b>Before:</b> to 2026-01-02 “above 0”, then “above 1”: a walk does it, too</details></div>")
    assert made.row()[1] == "(our question) 7 points"
    assert course.claim("sgd-above", [0, 0, 0, 0, 3]).verdict == "does not hold here"
    assert "a minus b: the 95 % interval lies between 1 and 4 points" in str(course.claim("sgd-between", range(5)))


def test_tables_of_the_claims_made(samples):
    assert course.verdicts() == ""
    course.claim("sgd-within", np.zeros(5))
    course.claim("sgd-above", [-9, 9, 9, 9, 9])
    course.claim("sgd-below", np.full(5, 2.0))
    course.claim("sgd-within", np.full(5, 3.0))  # made again: it keeps its place
    verdicts = course.verdicts()
    assert repr(verdicts) == "sgd-within: not at this scale\nsgd-above: weak\nsgd-below: not at this scale"
    assert not hasattr(verdicts, "_repr_markdown_") and not hasattr(verdicts, "_repr_html_")
    rows = course.claims_table().splitlines()
    assert len(rows) == 5 and "A \\| B" in rows[2] and "3 [3, 3] points, 5 seeds" in rows[2] and "weak" in rows[3]


def test_bad_samples_are_refused(samples):
    with pytest.raises(ValueError, match="Did you mean 'sgd-above'"):
        course.claim("sgd-abov", np.zeros(5))
    for bad in (np.zeros(4), np.zeros((5, 1)), 3.0):
        with pytest.raises(ValueError, match=r"needs 5 samples, one number for each seed, not an array of shape"):
            course.claim("sgd-above", bad)
    with pytest.raises(ValueError, match=r"2 of the 5 samples.*counts: .*do not drop"):
        course.claim("sgd-above", [1, math.nan, 2, math.inf, 3])
    assert course.verdicts() == ""


def test_summary_is_a_list():
    assert course.summary("one", "two")._repr_markdown_() == "- one\n- two"


# The README and its pages


@pytest.fixture
def page(samples, monkeypatch, tmp_path):
    samples["sgd-above"]["telling"] = True
    book = Notebook("01_sgd.ipynb", "T", "Q?", "L", (Item("P1", "A | loss", "S"),), True, 5, 6)
    for module in (sys.modules["dlscale.course.contents"], readme):
        monkeypatch.setattr(module, "contents", lambda: [book])
    cards = [course.claim(f"sgd-{rule}", [2, 3, 4, 3, 3])._repr_mimebundle_() for rule in ("above", "below")]
    cells = [
        {"cell_type": "markdown", "source": "", "metadata": {}},
        {"cell_type": "code", "source": "", "metadata": {}, "outputs": [{"output_type": "stream", "text": ""}]},
        {
            "cell_type": "code",
            "source": "",
            "metadata": {},
            "outputs": [
                {"output_type": "display_data", "data": {"image/png": base64.b64encode(b"an early picture").decode()}},
                *({"output_type": "execute_result", "data": card} for card in cards),
                {"output_type": "display_data", "data": {"image/png": base64.b64encode(b"the last picture").decode()}},
            ],
        },
    ]
    (tmp_path / "01_sgd.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    page = tmp_path / "README.md"
    places = "\n".join(f"<!-- {name}:begin -->old<!-- {name}:end -->" for name in ("counts", "claims", "map"))
    page.write_text(f"# é\n{places}\nend", "utf-8")
    return page


ROW = r"| A \| B <is> & true. | 7 points | 3 [2.12, 3.88] points, 5 seeds | {} | [01_sgd]({}notebooks/01_sgd.ipynb) |"


def test_the_readme_and_its_pages_are_renewed(page, capsys):
    assert readme.renew(page, page.parent, check=True) == 1
    assert "INDEX.md is stale. Run `python tools/readme.py`." in capsys.readouterr().err
    assert not (page.parent / "docs").exists()
    assert readme.renew(page, page.parent, check=False) == readme.renew(page, page.parent, check=True) == 0
    assert (page.parent / "docs" / "start.png").read_bytes() == b"the last picture"
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# é\n<!-- counts:begin -->\n") and text.endswith("<!-- map:end -->\nend")
    assert "old" not in text and "[T](notebooks/01_sgd.ipynb)" in text
    assert "2 claims so far: 1 *shows*, 1 *not at this scale*." in text
    assert ROW.format("shows", "") in text and text.count("7 points") == 1, "only the telling one"
    everything = (page.parent / "docs" / "CLAIMS.md").read_text(encoding="utf-8")
    for name, verdict in (("above", "shows"), ("below", "not at this scale")):
        assert ROW.format(verdict, "../").replace("| A", f'| <a id="sgd-{name}"></a>A', 1) in everything
    assert "| 01_sgd | 1 | 0 | 1 | 0 |\n| all | 1 | 0 | 1 | 0 |" in everything
    item = r"| P1 | A \| loss | 01 | [S](../notebooks/01_sgd.ipynb#s) |"
    assert item in (page.parent / "docs" / "INDEX.md").read_text(encoding="utf-8")
    (page.parent / "docs" / "CLAIMS.md").write_text("by hand")
    assert readme.renew(page, page.parent, check=True) == 1 and "CLAIMS.md is stale" in capsys.readouterr().err


def test_what_the_course_has_stored_is_in_its_readme():
    assert readme.main(["--check"]) == 0


def test_a_notebook_without_a_picture_is_named(page):
    cells = json.loads((page.parent / "01_sgd.ipynb").read_text(encoding="utf-8"))["cells"][:2]
    (page.parent / "00_bare.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"00_bare\.ipynb stores no picture"):
        readme.picture(page.parent)


def test_a_readme_without_a_place_is_refused(page):
    page.write_text("<!-- map:end --><!-- map:begin -->", encoding="utf-8")
    with pytest.raises(ValueError, match="<!-- map:begin -->"):
        readme.renew(page, page.parent, check=False)


def test_a_stored_claim_that_is_gone_is_named(page, samples):
    del samples["sgd-above"]
    with pytest.raises(ValueError, match=r"01_sgd\.ipynb.*'sgd-above'"):
        readme.stored_claims(page.parent)


def test_a_light_import():
    script = "import sys, dlscale.course; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
