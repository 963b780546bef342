"""The table of grades: whatever it held before is in it, or beside it, afterwards."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from dlscale.course.gradebook import Gradebook

EXERCISES = ["demo-a", "demo-b", "other-a"]


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "grades.csv"


def grade(out: Path, folder: str, **keys: str) -> list[str]:
    """Enter the files of a folder that are due."""
    book = Gradebook(out, out.parent / folder, EXERCISES)
    due = book.due(keys)
    for file in due:
        row = {"file": file, "total": 1, "of": 2, "remarks": f'in {folder}, "ä"', "look": 0, "notebook": "01_demo"}
        book.enter({**row, "demo-a": 1, "demo-b": 0, "key": keys[file]})
    return due


def held(out: Path) -> set[tuple[str, str]]:
    """All that is written in the table and in its copies, each with its row's file."""
    found = set()
    for path in (out, *out.parent.glob(f"{out.name}.old*")):
        text = path.read_text(encoding="utf-8-sig")
        rows = list(csv.reader(text.splitlines(), delimiter=";" if ";" in text.partition("\n")[0] else ",")) or [
            ["file"]
        ]
        found |= {(row[rows[0].index("file")], cell) for row in rows for cell in row if cell}
    return found


TABLES = {  # what becomes of the table's rows between two batches
    "as it is": lambda rows: rows,
    "a column more": lambda rows: [[*row[:2], f"comment {i}", *row[2:]] for i, row in enumerate(rows)],
    "no heading": lambda rows: [[*row, *(2 * [f"comment {i}" if i else ""])] for i, row in enumerate(rows)],
    "two alike": lambda rows: [[*row, row[1], f"x{i or ''}", "y", f"x{-i or ''}"] for i, row in enumerate(rows)],
    "longer rows": lambda rows: [row if i == 0 else [*row, "a", "b"] for i, row in enumerate(rows)],
    "a row twice, and one of nobody": lambda rows: [*rows, [*rows[1][:3], "seen", *rows[1][4:]], ["to do"]],
    "no column of folders": lambda rows: [row[:-2] + row[-1:] for row in rows],
    "another order": lambda rows: [row[::-1] for row in rows[:1] + rows[:0:-1]],
    "no rows": lambda rows: rows[:1],
    "nothing": lambda rows: [],
}


@pytest.mark.parametrize("delimiter", [",", ";"])
@pytest.mark.parametrize("ended", [None, (os, "fsync"), (Path, "replace")], ids=["to the end", "written", "replaced"])
@pytest.mark.parametrize("change", TABLES)
def test_whatever_the_table_held_is_in_it_or_beside_it(change, ended, delimiter, out, monkeypatch):
    grade(out, "week A", anna="key 1", bob="key 1")
    with out.open(encoding="utf-8-sig", newline="") as file:
        rows = TABLES[change](list(csv.reader(file)))
    with out.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    before = held(out)

    def killed(*_) -> None:
        raise KeyboardInterrupt

    for folder, key in (("week A", "key 2"), ("week B", "key 2"), ("week A", "key 3"), ("week A", "key 2")):
        if ended:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(*ended, killed)
                grade(out, folder, anna=key, bob=key)
            assert before <= held(out)
        assert grade(out, folder, anna=key, bob=key) == ["anna", "bob"]
        assert before <= held(out)
        assert {("anna", folder), ("bob", folder)} <= held(out)
        before = held(out)


def test_a_row_stays_unless_its_key_is_new(out):
    assert grade(out, "week", bob="1", anna="1") == ["bob", "anna"]
    assert grade(out, "week", bob="1", anna="2", carl="1") == ["anna", "carl"]
    book = Gradebook(out, out.parent / "week", EXERCISES)
    assert {file: row["key"] for file, row in book.rows().items()} == {"bob": "1", "anna": "2", "carl": "1"}
    head, *rows = out.read_text(encoding="utf-8-sig").splitlines()
    assert head == "file,total,of,remarks,look,notebook,demo-a,demo-b,folder,key"  # of what occurs: no other-a
    assert [row.partition(",")[0] for row in rows] == ["bob", "anna", "carl"]
    assert rows[0] == 'bob,1,2,"in week, ""ä""",0,01_demo,1,0,week,1'
    assert sorted(path.name for path in out.parent.iterdir()) == ["grades.csv", "grades.csv.old1"]


def test_what_is_written_meanwhile_stays(out):
    book = Gradebook(out, out.parent / "week", EXERCISES)
    book.enter({"file": "anna", "key": "1"})
    grade(out, "other", anna="1")
    text = out.read_text(encoding="utf-8-sig").replace("file,", "comment,file,").replace("anna,", "well done,anna,")
    out.write_text(text, encoding="utf-8")
    book.enter({"file": "bob", "key": "1"})
    book.enter({"file": "anna", "key": "2"})
    assert {("anna", "other"), ("anna", "week"), ("bob", "week"), ("anna", "well done")} <= held(out)
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("text", ["name,mark\nanna,1\n", "\0", "file,total\n", 'file,total,remarks,key\n"a', "\xff"])
def test_another_table_is_refused(text, out):
    out.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match="stays as it is: name one for grades with --out"):
        Gradebook(out, out.parent, EXERCISES)
    assert out.read_text(encoding="latin-1") == text
    for place in (out.parent / "nowhere" / "grades.csv", out.parent):
        with pytest.raises(ValueError, match="name another table with --out"):
            Gradebook(place, out.parent, EXERCISES)
