"""Claims, the map and the index, the README, and the files that they are read from."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
from collections import Counter
from datetime import date
from itertools import chain
from types import SimpleNamespace

import conventions
import jsonschema
import nbformat
import numpy as np
import pytest
import readme  # tools/readme.py
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.formatters import DisplayFormatter
from nbclient import NotebookClient

import dlscale.__main__ as commands
import notebooks  # tools/notebooks.py
from dlscale import course
from dlscale.course import claims, markup
from dlscale.course.contents import contents, paths
from dlscale.lab.intervals import Interval

NOTEBOOKS = commands.ROOT / "notebooks"
RULES = ("above", "below", "within", "between")
OPTIONS = {"of", "samples", "chance", "scale", "history", "telling", "frozen", "record"}

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
        assert ("frozen" in entry) == ("record" in entry), identity
        if "frozen" in entry:
            assert date.fromisoformat(entry["frozen"]) and 8 <= entry["seeds"] <= 32, identity
            assert identity in commands.experiments()[entry["record"]].confirms, identity
        assert all(entry[key].strip() for key in keys - {"threshold", "seeds"}), identity
        if entry["rule"] == "within":
            assert entry["threshold"] > 0, identity


SCHEMA = json.loads((commands.ROOT / "data" / "claims.schema.json").read_text(encoding="utf-8"))


def test_the_decided_claims_keep_their_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    wrong = [f"{error.json_path}: {error.message[:200]}" for error in VALIDATOR.iter_errors(claims.decided())]
    assert not wrong, wrong[:5]


VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def test_the_schema_refuses_a_claim_without_samples_or_of_an_unknown_verdict(samples, shown):
    course.claim("sgd-between", range(5))
    entry = notebooks.claim_entry("01_sgd", shown[0][0][claims.CLAIM_TYPE])
    assert VALIDATOR.is_valid({"sgd-between": entry})
    for change in ({"samples": None}, {"samples": [1.0]}, {"verdict": "perhaps"}, {"threshold": [1.0]}, {"more": 1}):
        assert not VALIDATOR.is_valid({"sgd-between": entry | change}), change
    assert not VALIDATOR.is_valid({"sgd-between": {key: entry[key] for key in entry if key != "status"}})


def test_the_decided_claims_follow_from_their_samples_and_the_present_rules():
    for identity, entry in claims.decided().items():
        rule = claims.rules()[identity]
        again = claims._decide(identity, rule, np.array(entry["samples"]))
        assert again.verdict == entry["verdict"] and again.status == entry["status"], identity
        assert [entry[end] for end in Interval._fields] == pytest.approx(list(again.interval), rel=1e-3, abs=1e-9), (
            identity
        )
        card = {"id": identity, **entry}
        present = notebooks.claim_entry(entry["notebook"], card) | {"versions": entry["versions"]}
        assert present == entry, f"{identity}: store {entry['notebook']} again"


def test_the_decided_claims_are_those_that_the_notebooks_decide():
    found = {}
    for path in paths(NOTEBOOKS):
        outputs = (output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", []))
        cards = [output.data[claims.CLAIM_TYPE] for output in outputs if claims.CLAIM_TYPE in output.get("data", {})]
        decided = [card["id"] for card in cards if card["decided"]]
        assert not set(decided) & set(found), f"{path.stem} decides what another notebook has decided"
        found |= dict.fromkeys(decided, path.stem)
    assert found == {identity: entry["notebook"] for identity, entry in claims.decided().items()}
    assert found.keys() == claims.rules().keys(), "a rule that no notebook asks"


def test_the_telling_claims_are_few_and_not_only_those_that_show():
    """docs/CLAIMS.md begins with them: some from each lecture that has claims, and as honest as the whole."""
    entries = claims.rules()
    made = [claim for claim in readme.decided_claims() if entries[claim.id].get("telling")]
    assert sum("telling" in entry for entry in entries.values()) == len(made) <= 10
    for lecture in ("Pedram", "Catanzaro", "Ben-Nun", "Jia", "Hoefler"):
        assert any(lecture in claim.entry["source"] for claim in made), lecture
    assert {claim.verdict for claim in made} >= {"shows", "weak"} and len({claim.verdict for claim in made}) > 2


def test_contents_list_the_course_in_order():
    books = contents()
    assert [int(book.file[:2]) for book in books] == list(range(18))
    for book in books:
        assert book.title and book.question.endswith("?") and book.lecture, book.file
        assert book.items or book.file.startswith("00"), f"{book.file} lists no items of the lectures"


@pytest.mark.parametrize("book", contents(), ids=lambda book: book.name)
def test_contents_agree_with_the_notebooks(book):
    for (title, file), times in zip(book.files.items(), (book, book.further), strict=False):
        notebook = conventions.Notebook(nbformat.read(NOTEBOOKS / file, as_version=4), NOTEBOOKS / file)
        prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
        assert prose.startswith(f"# {title}\n")
        opening = prose.partition("\n## ")[0]
        assert re.search(rf"\b{times.minutes} minutes\b.*\b{times.seconds} seconds\b", opening, re.DOTALL)
        headings = {text for _, text in notebook.headings()}
        for item in book.items:
            if item.further == (times is book.further):
                assert item.section in headings, f"{item.item}: {file} has no section {item.section!r}"


def test_course_map_links_every_subject():
    lines = course.course_map("notebooks/").splitlines()
    assert len(lines) == 2 + len(contents()) and len({line.count("|") for line in lines}) == 1
    for book, line in zip(contents(), lines[2:], strict=True):
        assert f"](notebooks/{book.file})" in line
        assert (book.question in line) == ("?" not in book.title), "a question, unless the title asks it"
        assert book.further is None or line.endswith(f"further.ipynb) | {book.further.minutes} |")
    assert course.course_map()._repr_markdown_().count("](01_sgd.ipynb)") == 1


def test_the_index_finds_every_item_under_its_lecture():
    for name, part in zip(readme.LECTURES, readme.index("notebooks/").split("\n## ")[1:], strict=True):
        lines = part.splitlines()[4:]
        items = [(book, item) for book in contents() for item in book.items if item.id[:1] == name]
        assert part.startswith(readme.LECTURES[name]) and len([*filter(None, lines)]) == len(items)
        for book, item in items:
            file, number = [*book.files.values()][item.further], f"{book.file[:2]}{', further' * item.further}"
            where = f"[{number}: {item.section}](notebooks/{file}#{readme.slug(item.section)})"
            assert f"| {item.item} | {where} | {item.id} |" in lines
    assert readme.slug("3. Loss scaling, static and dynamic") == "3-loss-scaling-static-and-dynamic"


def test_the_index_finds_methods_from_a_to_z():
    methods = readme.index("").partition("\n## ")[0]
    rows = dict(re.findall(r"^\| ([^|]+) \| (\[.*?) \|", methods, re.MULTILINE))
    assert {*rows} == {*readme.methods()} and [*rows] == sorted(rows, key=str.lower)
    for method, section in {"Adam": "3. Momentum and its relatives", "Checkpointing": "The compiler may undo it",
                            "LARS": "LARS in float16", "Top-k": "Error feedback, and why"}.items():  # fmt: skip
        assert section in rows[method], method
    assert "Project" not in rows["Adam"] and "Other messages" not in rows["Adam"]


NEEDS = readme.needs(NOTEBOOKS)


def test_the_picture_of_needs_shows_what_the_openings_say():
    assert all(before < lesson for lesson, some in NEEDS.items() for before in some)
    assert [lesson for lesson, some in NEEDS.items() if not some] == ["00"]
    drawn, told = readme.needs_picture({"01": [], "02": ["01"], "03": ["01", "02"], "04": ["01"]})
    assert told == "Which lesson comes before which: 01 before 02, 04; 02 before 03."
    assert drawn.count("<path") == 3 and drawn.count("<text") == 4


def ways(guide: str) -> dict[str, list[str]]:
    """The lessons of each route and of each plan, in order."""
    plans = dict(re.findall(r"^## (Twelve weeks|Three days)\n(.*?)(?=^## )", guide, re.MULTILINE | re.DOTALL))
    found = {name: re.findall(r"/(\d\d)_\w+\.ipynb\)", plan) for name, plan in plans.items()}
    return found | {name: [*numbers] for name, numbers in readme.ROUTES.items()}


def test_no_way_through_the_course_meets_a_lesson_before_those_that_it_needs():
    found = ways((commands.ROOT / "docs" / "INSTRUCTORS.md").read_text(encoding="utf-8"))
    assert len(found) == 5 and sorted(found["Twelve weeks"]) == [*NEEDS]
    for name, way in found.items():
        for place, lesson in enumerate(way):
            assert set(NEEDS[lesson]) <= set(way[:place]), f"{name}: {lesson} needs {NEEDS[lesson]}"


def test_the_exercises_to_set_stand_in_their_lessons():
    guide = (commands.ROOT / "docs" / "INSTRUCTORS.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d\d) \| (`[^|]+) \|", guide, re.MULTILINE)
    assert len(rows) >= 15
    for book in contents():
        text = (NOTEBOOKS / book.file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", dict(rows).get(book.file[:2], "")):
            assert f'"answer-{book.room}-{name}"' in text, f"{book.file} has no exercise {name}"


# Claims


@pytest.fixture
def samples(monkeypatch):
    """Small claims, one for each rule, in place of the course's; none made yet."""
    entry = {"statement": "A | B <is> & true.", "source": "S 2018", "source_figure": "7 points"}
    entry |= {"measure": "a minus b", "unit": "points", "threshold": 1.0, "seeds": 5}
    table = {f"sgd-{rule}": entry | {"rule": rule} for rule in RULES}
    table["sgd-between"]["threshold"] = [1.0, 4.0]
    for module in (claims, readme):
        monkeypatch.setattr(module, "rules", lambda: table)
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


@pytest.fixture
def shown(monkeypatch):
    """Bundle and metadata of each output, in order, as a notebook shows them."""
    found = []
    monkeypatch.setattr("IPython.display.display", lambda one: found.append(DisplayFormatter().format(one)))
    return found


def text_of(card: str) -> str:
    """What is read of a card where all tags are gone, folded lines included."""
    return html.unescape(re.sub(r"<[^>]*>", "", card))


def test_a_card_shows_verdict_and_claim_then_the_numbers_then_the_rule_in_a_fold(samples, shown):
    made = course.claim("sgd-above", [-2, 3, 4, 3, 3])
    ((bundle, _),) = shown
    assert set(bundle) == {"text/html", "text/plain", claims.CLAIM_TYPE}
    card, plain = bundle["text/html"], bundle["text/plain"]
    assert "<b>A | B &lt;is&gt; &amp; true.</b>" in card
    first, second, fold = (part.strip() for part in text_of(card).strip().split("\n", 2))
    assert first == "◐ weak A | B <is> & true."
    assert second == "Ours: 2.2 [−0.764, 5.16] points, 5 seeds. Source: 7 points (S 2018)."
    assert card.index(second) < card.index("<details>") < card.index("a minus b")
    assert "95 % interval lies above 1 point" in fold and "Exploratory: " in fold
    assert plain.splitlines()[:2] == ["◐ weak: A | B <is> & true.", second]
    assert max(map(len, plain.splitlines())) <= markup.WIDTH < max(map(len, fold.splitlines()))
    about = json.loads(json.dumps(bundle[claims.CLAIM_TYPE]))
    assert [about.pop(end) for end in Interval._fields] == pytest.approx(list(made.interval))
    assert about.pop("samples") == [-2, 3, 4, 3, 3]
    rest = {"id": "sgd-above", "unit": "points", "seeds": 5, "verdict": "weak", "status": "exploratory"}
    assert about == rest | {"decided": True}


def test_a_card_shows_once_in_a_notebook():
    """In a real kernel, at the end of a cell, in the middle, in a loop and by display()."""
    samples = list(range(course.claims.rules()["sgd-root"]["seeds"]))
    cell = f"for _ in range(2):\n    course.claim('sgd-root', {samples})\ndisplay(course.claim('sgd-root', {samples}))"
    sources = [
        "from dlscale import course",
        f"course.claim('sgd-root', {samples})",
        f"{cell}\ncourse.claim('sgd-root')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, kernel_name="python3").execute()
    assert [len(cell.outputs) for cell in notebook.cells] == [0, 1, 4]
    assert all(claims.CLAIM_TYPE in output.data for cell in notebook.cells for output in cell.outputs)


@pytest.mark.parametrize("verdict", claims.VERDICTS)
def test_a_badge_can_be_read(verdict):
    """The contrast that WCAG asks of small text."""
    named = {"white": "#FFFFFF", "black": "#000000"}
    _, *colours = claims.VERDICTS[verdict]
    parts = [[int(named.get(colour, colour)[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in colours]
    linear = np.where(np.array(parts) <= 0.04045, np.array(parts) / 12.92, ((np.array(parts) + 0.055) / 1.055) ** 2.4)
    dark, light = sorted(linear @ [0.2126, 0.7152, 0.0722])
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_a_card_says_whose_question_it_is_and_what_is_not_random(samples, shown):
    ours = {"of": "ours", "source": "a control", "source_figure": "no number given"}
    samples["sgd-above"] |= ours | {"chance": False, "samples": "nets", "scale": False}
    made = course.claim("sgd-above", [2, 3, 4, 3, 3])
    assert made.interval == (3, 2, 4) and made.verdict == "shows"  # all of them, not the interval of a mean
    assert made.status == "counted"
    assert made.row()[1:] == ["our question", "3 points, range 2 to 4, 5 nets", "shows", "counted"]
    for text in (shown[0][0]["text/plain"], text_of(shown[0][0]["text/html"])):
        assert "Ours: 3 points, range 2 to 4, 5 nets. Our question." in text
        assert "the whole range lies above 1 point" in text and "Counted: " in text and "Background: a control." in text
        assert "interval" not in text and "no number" not in text
    assert course.claim("sgd-above", [0, 0, 0, 0, 3]).verdict == "does not hold here"
    course.claim("sgd-between", range(5))
    assert "the whole 95 % interval lies between 1 and 4 points" in " ".join(shown[-1][0]["text/plain"].split())


def test_a_claim_without_samples_is_what_is_stored(samples, shown, monkeypatch):
    made = course.claim("sgd-above", [2, 3, 4, 3, 3])
    entry = notebooks.claim_entry("01_sgd", shown[0][0][claims.CLAIM_TYPE])
    monkeypatch.setattr(claims, "decided", lambda: {"sgd-above": entry})
    again = course.claim("sgd-above")
    assert again.verdict == made.verdict and again.interval == pytest.approx(made.interval, rel=1e-5)
    (first, _), (second, _) = shown
    assert first["text/html"] == second["text/html"] and first["text/plain"] == second["text/plain"]
    assert [card[claims.CLAIM_TYPE]["decided"] for card in (first, second)] == [True, False]
    with pytest.raises(ValueError, match="'sgd-below' is not decided yet"):
        course.claim("sgd-below")
    with pytest.raises(ValueError, match="Did you mean 'sgd-above'"):
        course.claim("sgd-abov")


def test_storing_a_notebook_renews_its_claims_and_no_others(samples, shown, monkeypatch, tmp_path):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    file = tmp_path / "data" / "results" / "claims.json"
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    for rule, sample in {"above": 3, "below": 1, "within": 1 / 3}.items():
        course.claim(f"sgd-{rule}", np.full(5, sample))
    above, below, within = (
        nbformat.v4.new_code_cell(outputs=[nbformat.v4.new_output("display_data", bundle)]) for bundle, _ in shown
    )

    def kept(name, *cells):
        notebooks.keep_claims(nbformat.v4.new_notebook(cells=cells), name)
        return {key: entry["notebook"] for key, entry in notebooks.kept_claims().items()}

    assert kept("02_b", above) == {"sgd-above": "02_b"}
    assert list(kept("01_a", below, within).items()) == [
        ("sgd-below", "01_a"), ("sgd-within", "01_a"), ("sgd-above", "02_b"),
    ]  # fmt: skip
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 5 and '"samples": [0.333333, ' in lines[2]
    before = file.stat().st_mtime_ns
    assert list(kept("01_a", below, within)) == ["sgd-below", "sgd-within", "sgd-above"]
    assert file.stat().st_mtime_ns == before, "nothing new: left untouched"
    assert list(kept("01_a", within)) == ["sgd-within", "sgd-above"], "gone from its notebook"
    assert kept("03_c", within) == {"sgd-above": "02_b", "sgd-within": "03_c"}, "moved"
    above.outputs[0].data[claims.CLAIM_TYPE]["decided"] = False
    assert kept("01_a", above) == {"sgd-above": "02_b", "sgd-within": "03_c"}, "shown here, decided there"


# Sentences and tables


def test_a_sentence_stands_alone_and_answers_a_guess(shown):
    guess = SimpleNamespace(question="What happens?", value=None)
    course.say("It reaches **10 %** of $x^2$, 2 * 3 = 6.")
    course.say("Nothing.", guess)
    guess.value = "it learns"
    course.say("Nothing.", guess)
    asked = {"dlscale": {"guess": "What happens?"}}
    assert shown == [
        (
            {
                "text/markdown": "It reaches **10 %** of $x^2$, 2 * 3 = 6.",
                "text/plain": "It reaches 10 % of x^2, 2 * 3 = 6.",
            },
            {},
        ),
        ({"text/markdown": "Nothing.", "text/plain": "Nothing."}, asked),
        (
            {
                "text/markdown": "You said *it learns*. Measured: Nothing.",
                "text/plain": "You said it learns. Measured: Nothing.",
            },
            asked,
        ),
    ]


def test_a_table_is_real_and_its_plain_text_aligned(shown):
    course.table(["way", "points"], [["a|b", 1.5], ["longer", "−2"]])
    ((bundle, _),) = shown
    assert bundle["text/markdown"] == "| way | points |\n| --- | --- |\n| a\\|b | 1.5 |\n| longer | −2 |"
    assert bundle["text/plain"] == "way     points\n------  ------\na|b     1.5\nlonger  −2"


WORDS = st.lists(st.text("abc −", max_size=60), min_size=3, max_size=3)


@given(st.lists(WORDS, min_size=1, max_size=4))
def test_no_plain_table_is_wider_than_a_laptop_shows_and_none_loses_a_word(rows):
    text = markup.aligned(["one", "two", "three"], rows)
    assert max(map(len, text.splitlines())) <= markup.WIDTH
    letters = [Counter(re.sub(r"[\s-]", "", part)) for part in (text, "".join(["onetwothree", *chain(*rows)]))]
    assert letters[0] == letters[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [(-26.16, "−26.2"), (1234.5, "1,230"), (0.0, "0"), (-0.00123456, "−0.00123"), (1.5e-7, "1.5e−07"), (100, "100")],
)
def test_numbers_are_short(value, text):
    assert markup.number(value) == text


def test_bad_samples_are_refused(samples):
    with pytest.raises(ValueError, match="Did you mean 'sgd-above'"):
        course.claim("sgd-abov", np.zeros(5))
    for bad in (np.zeros(4), np.zeros((5, 1)), 3.0):
        with pytest.raises(ValueError, match=r"needs 5 samples, one number for each seed, not an array of shape"):
            course.claim("sgd-above", bad)
    with pytest.raises(ValueError, match=r"2 of the 5 samples.*counts: .*do not drop"):
        course.claim("sgd-above", [1, math.nan, 2, math.inf, 3])


# The README and its pages


@pytest.fixture
def page(tmp_path):
    """A README with an old text between its marks, and no other page."""
    page = tmp_path / "README.md"
    page.write_text("# é\n" + "".join(f"<!-- {n}:begin -->@@<!-- {n}:end -->\n" for n in ("counts", "map")), "utf-8")
    return page


def test_the_readme_and_its_pages_are_renewed(page, capsys):
    assert readme.renew(page, NOTEBOOKS, check=True) == 1
    assert "README.md is stale. Run `python tools/readme.py`." in capsys.readouterr().err
    assert "@@" in page.read_text(encoding="utf-8")
    assert readme.renew(page, NOTEBOOKS, check=False) == readme.renew(page, NOTEBOOKS, check=True) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# é\n<!-- counts:begin -->\n") and "@@" not in text
    for name in ("CLAIMS.md", "INDEX.md"):
        made = (page.parent / "docs" / name).read_text(encoding="utf-8")
        assert made == (commands.ROOT / "docs" / name).read_text(encoding="utf-8")
    (page.parent / "docs" / "CLAIMS.md").write_text("by hand")
    assert readme.renew(page, NOTEBOOKS, check=True) == 1 and "CLAIMS.md is stale" in capsys.readouterr().err


def test_every_claim_has_its_place_among_all():
    everything = (commands.ROOT / "docs" / "CLAIMS.md").read_text(encoding="utf-8")
    lectures, ours = everything.split("\n## Questions of our own\n")
    for part, mine in ((lectures, False), (ours, True)):
        found = re.findall(r'<a id="([\w-]+)"></a>', part)
        assert found == [claim.id for claim in readme.decided_claims() if claim.is_ours == mine]
        assert all(f"\n**`{identity}`** " in part for identity in found), "a rule for each"


def test_what_the_course_has_stored_is_in_its_readme():
    assert readme.main(["--check"]) == 0


def test_a_readme_without_a_place_is_refused(page):
    page.write_text("<!-- map:end --><!-- map:begin -->", encoding="utf-8")
    with pytest.raises(ValueError, match="<!-- map:begin -->"):
        readme.renew(page, NOTEBOOKS, check=False)


def test_a_stored_claim_that_is_gone_is_named(samples):
    with pytest.raises(ValueError, match=r"claims\.json '[\w-]+'"):
        readme.decided_claims()


def test_a_light_import():
    script = "import sys, dlscale.course; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
