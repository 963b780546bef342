"""The grader: honest answers score, and nothing that a submission does scores without being right or stops a batch."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import nbformat
import psutil
import pytest

from dlscale import __main__ as dlscale
from dlscale.course import grading, sandbox
from dlscale.course.exercises import Exercise, compare
from dlscale.lab import processes

ROOM = '''
import numpy as np
from dlscale.course.exercises import Exercise, compare

def _double(f):
    for x in (np.arange(3.0), np.ones((2, 2))):
        if what := compare("Twice x", f(x), 2 * x):
            return what

def _pair(pair):
    return compare("The sum", pair["f"](1) + pair["rest"].second, 5)

number = Exercise("demo-number", "number", ["Count."], "number = 6 * 7",
                  lambda answer: compare("The product", answer, 42), "it is 42.")
double = Exercise("demo-double", "double", ["Add."], "def double(x):\\n    return x + x", _double, "yes.")
pair = Exercise("demo-pair", "pair", ["Pack."], """
from collections import namedtuple
pair = {"f": lambda x: x + 1, "rest": namedtuple("Rest", "first second")(1, 3)}
""", _pair, "yes.")

def _number(answer):
    return compare("The number", answer() if callable(answer) else answer, 42)

for i in range(25):
    globals()[f"n{i}"] = Exercise(f"demo-n{i}", "n", ["Count."], "n = 42", _number, "yes.")
'''

BLANKS = {
    "demo-number": "number = ...\nexercises.number.check(number)",
    "demo-double": "def double(x):\n    return ...\n\nexercises.double.check(double)",
    "demo-pair": "pair = {'f': ..., 'rest': ...}\nexercises.pair.check(pair)",
}
ZERO = "not yet: The number is not 0: that is too small."


def answers(number: str = "number = ...", double: str = "double = ...", pair: str = "pair = ...") -> dict[str, str]:
    sources = {"number": number, "double": double, "pair": pair}
    return {
        f"demo-{name}": f"{textwrap.dedent(source).strip()}\nexercises.{name}.check({name})"
        for name, source in sources.items()
    }


def name(identity: str) -> str:
    return identity.removeprefix("demo-")


FIRST = """
import sys
from pathlib import Path
sys.path.insert(0, {!r})
import demo as exercises
secret = 1
"""


@pytest.fixture
def room(tmp_path, monkeypatch) -> types.ModuleType:
    """The exercises of a course that has only this room."""
    (tmp_path / "package").mkdir()
    path = tmp_path / "package" / "demo.py"
    path.write_text(ROOM, encoding="utf-8")
    specification = importlib.util.spec_from_file_location("demo", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    found = {entry.id: entry for entry in vars(module).values() if isinstance(entry, Exercise)}
    monkeypatch.setattr(dlscale, "exercises", lambda: found)
    return module


@pytest.fixture
def notebook(room):
    """Write a notebook with these answer cells, by id."""

    def write(cells: dict[str, str]) -> nbformat.NotebookNode:
        book = nbformat.v4.new_notebook()
        code = nbformat.v4.new_code_cell
        book.cells = [code(FIRST.format(str(Path(room.__file__).parent))), code("1 / 0"), code("2")]
        book.cells += [code(source, metadata={"tags": [f"answer-{identity}"]}) for identity, source in cells.items()]
        book.cells += [code("import time; time.sleep(1000)")]  # after the last answer: not run
        for number, cell in enumerate(book.cells):
            cell.id = f"demo-{number}"
        return book

    return write


@pytest.fixture
def reference(room):
    return answers(room.number.code, room.double.code, room.pair.code)


@pytest.fixture
def grade(tmp_path, notebook):
    """Grade notebooks, given by the name of the student's folder, and return the CSV's rows by that name."""
    pristine = tmp_path / "course"
    pristine.mkdir()
    nbformat.write(notebook(BLANKS), pristine / "01_demo.ipynb")
    nbformat.write(nbformat.v4.new_notebook(), pristine / "00_demo.ipynb")
    (pristine / "table.txt").write_text("as it was", encoding="utf-8")
    folder = tmp_path / "submissions"
    folder.mkdir()
    out = tmp_path / "grades.csv"
    before = psutil.Process().children()  # multiprocessing keeps one, if another test has shared memory

    def arguments(*more: str, seconds: float = 60, wall: float = 600, memory: float = 1500) -> list[str]:
        options = [f"--seconds={seconds}", f"--wall={wall}", f"--memory={memory}"]
        return ["grade", str(folder), f"--notebooks={pristine}", f"--out={out}", *options, *more]

    def hand_in(**books: dict | bytes) -> None:
        for name, book in books.items():
            path = folder / name / "01_demo.ipynb"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(book if isinstance(book, bytes) else nbformat.writes(notebook(book)).encode())

    def rows() -> dict[str, dict[str, str]]:
        with out.open(encoding="utf-8-sig", newline="") as file:
            return {row["file"].removesuffix("/01_demo.ipynb"): row for row in csv.DictReader(file)}

    def run(*more: str, seconds: float = 60, memory: float = 1500, **books: dict | bytes) -> dict[str, dict[str, str]]:
        hand_in(**books)
        assert dlscale.main(arguments(*more, seconds=seconds, memory=memory)) == 0
        assert (pristine / "table.txt").read_text(encoding="utf-8") == "as it was"
        assert psutil.Process().children() == before
        return rows()

    vars(run).update(folder=folder, pristine=pristine, out=out, arguments=arguments, hand_in=hand_in, rows=rows)
    return run


@pytest.fixture
def fall_asleep(tmp_path, monkeypatch) -> str:
    """A cell that sleeps; the clock of the limits then jumps ahead, so that nobody need wait for them."""
    asleep = tmp_path / "asleep"
    asleep.touch()
    hurried = types.SimpleNamespace(**vars(time))
    hurried.monotonic = lambda: time.monotonic() + 10_000 * asleep.stat().st_size
    monkeypatch.setattr(processes, "time", hurried)
    return f"with open({str(asleep)!r}, 'a') as asleep: asleep.write('x')\nimport time; time.sleep(1000)"


@pytest.fixture
def grade_each(grade, notebook):
    """Grade one notebook with these cells, and a right answer before and after; return each cell's remark."""

    def run(sources: dict[str, str], **limits: float) -> dict[str, str]:
        right = "exercises.ID.check(42)"
        cells = [right, *map(textwrap.dedent, sources.values()), right]
        ids = [f"demo-n{i}" for i in range(len(cells))]
        blank = notebook({identity: f"exercises.{name(identity)}.check(...)" for identity in ids})
        nbformat.write(blank, grade.pristine / "01_demo.ipynb")
        filled = {identity: cell.replace("ID", name(identity)) for identity, cell in zip(ids, cells, strict=True)}
        row = grade(student=filled, **limits)["student"]
        assert [row[identity] for identity in ids] == ["1", *"0" * len(sources), "1"], row["remarks"]
        remarks = dict(remark.split(": ", 1) for remark in row["remarks"].split("; demo-") if remark)
        return {name: remarks[f"n{i}" if i > 1 else "demo-n1"] for i, name in enumerate(sources, 1)}

    return run


def scores(row: dict[str, str]) -> list[str]:
    return [row[identity] for identity in BLANKS] + [row["total"]]


def test_blank_reference_and_wrong_answers(grade, reference):
    wrong = answers("number = 41", "def double(x):\n    return 3 * x", "pair = 'garbage'")
    rows = grade(blank=BLANKS, reference=reference, wrong=wrong)
    assert scores(rows["blank"]) == ["0", "0", "0", "0"]
    assert rows["blank"]["remarks"].count("no answer yet") == 3
    assert scores(rows["reference"]) == ["1", "1", "1", "3"] and rows["reference"]["remarks"] == ""
    assert scores(rows["wrong"]) == ["0", "0", "0", "0"]
    assert "demo-number: not yet: The product is not 41: that is too small." in rows["wrong"]["remarks"]
    assert "demo-double: not yet: Twice x differs in 2 of 3 entries, first at [1]." in rows["wrong"]["remarks"]
    assert rows["wrong"]["notebook"] == "01_demo"


def test_a_further_notebook_is_graded_by_its_own_name(grade, reference, notebook):
    """Wherever it lies, and though the lesson's name is part of its own."""
    ids = ("demo-number", "demo-pair")
    (grade.pristine / "further").mkdir()
    further = notebook({identity: BLANKS[identity] for identity in ids})
    nbformat.write(further, grade.pristine / "further" / "01_demo_further.ipynb")
    for file in ("further/01_demo_further", "ann_01_demo_further", "ann_01_demo"):
        path = grade.folder / "ann" / f"{file}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        own = reference if file == "ann_01_demo" else {identity: reference[identity] for identity in ids}
        nbformat.write(notebook(own), path)
    found = {row["file"]: (row["notebook"], row["total"], row["demo-double"]) for row in grade().values()}
    assert found == {
        "ann/ann_01_demo.ipynb": ("01_demo", "3", "1"),
        "ann/ann_01_demo_further.ipynb": ("01_demo_further", "2", ""),
        "ann/further/01_demo_further.ipynb": ("01_demo_further", "2", ""),
    }


def run_cell(source: str, value: str = "n") -> str:
    return f"{source}\nexercises.ID.check({value})"


CRASHES = {
    "raises": (run_cell("n = 42\nraise ValueError('boom')"), "crashed: ValueError: boom"),
    "syntax": (run_cell("n = = 42"), "crashed: SyntaxError"),
    "sys.exit": (run_cell("import sys\nsys.exit(0)"), "crashed: SystemExit"),
    "odd error": (run_cell("class Odd(Exception):\n  def __str__(self): raise self\nraise Odd"), "crashed: Odd"),
    "no check": ("n = 42", "no answer yet"),  # which the course's own check says
    "os._exit": (run_cell("import os\nos._exit(0)"), "its process ended"),
    "huge": (run_cell("n = 'x' * 17_000_000"), "crashed: ValueError: the answer is larger than 16 MB"),
    "circle": (run_cell("n = []\nn.append(n)"), "crashed: RecursionError"),
    "object": (run_cell("n = object()"), "not yet: The number must be a number"),
    **{f"a function that returns {value[:20]}": (run_cell("", f"lambda: {value}"), remark) for value, remark in {
        "float('nan')": "not yet: The number is not finite", "[42, 42]": "not yet: The number has shape (2,)",
        "print": "not yet: The number must be a number", "1 / 0": "not yet: checking it raised ZeroDivisionError",
        "__import__('sys').exit()": "not yet: checking it raised SystemExit", "...": "no answer yet",
        "'x' * 17_000_000": "not yet: checking it raised ValueError: the answer is larger",
        "__import__('os')._exit(0)": "its process ended",
    }.items()},
}  # fmt: skip


def test_a_crash_costs_its_own_answer_only(grade_each):
    remarks = grade_each({name: source for name, (source, _) in CRASHES.items()})
    for name, (_, remark) in CRASHES.items():
        assert remarks[name].startswith(remark), name


@pytest.mark.long
def test_limits_cost_the_guilty_answers_only(grade_each):
    cells = {
        "loop": "while True:\n    pass",
        "busy function": run_cell("", "lambda: any(iter(int, 1))"),
        "busy processes": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'while True: pass'])",
        "hog": "import time\nimport numpy as np\nkept = np.ones(3 * 10**7)\ntime.sleep(1000)",
        "many processes": """
            import subprocess, time
            kept = [subprocess.Popen(["sleep", "1000"]) for _ in range(120)]
            time.sleep(1000)""",
    }
    if os.name != "posix":
        del cells["many processes"]
    remarks = grade_each(cells, seconds=1.5, memory=250)
    assert remarks.pop("hog") == "memory limit of 250 MB"
    assert remarks.pop("many processes", "limit of 100 processes") == "limit of 100 processes"
    assert set(remarks.values()) == {"limit of 1.5 processor seconds"}


@pytest.mark.long
def test_to_wait_costs_no_processor_seconds_but_ends_at_a_limit_by_the_clock(grade_each, fall_asleep):
    remarks = grade_each({"patient": run_cell("import time\ntime.sleep(1.2)", "0"), "asleep": fall_asleep}, seconds=1)
    assert remarks == {"patient": ZERO, "asleep": "limit of 600 s by the clock"}


def test_the_cells_of_the_course_cost_no_answer_anything_but_end_too(grade, reference, notebook, fall_asleep):
    book = notebook(BLANKS)
    book.cells[1].source = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end:\n    pass"
    nbformat.write(book, grade.pristine / "01_demo.ipynb")
    assert scores(grade(student=reference, seconds=1)["student"]) == ["1", "1", "1", "3"]
    book.cells[1].source = fall_asleep
    nbformat.write(book, grade.pristine / "01_demo.ipynb")
    row = grade()["student"]
    assert scores(row) == ["0", "0", "0", "0"] and row["remarks"].count("not reached: limit of 600 s by the clock") == 3


# Each is the whole source of a cell. None may score, and the answers around them keep what they earn.
WRITE = """
import os
for fd in range(3, 20):
    try:
        os.write(fd, MESSAGE)
    except OSError:
        pass
"""
CHEATS = {
    "patched check": """
        from dlscale.course import exercises as engine
        engine.Exercise.judge = lambda self, answer: (True, "")
        engine.compare = lambda *args: None
        for exercise in vars(exercises).values():
            if isinstance(exercise, engine.Exercise):
                exercise.wrong = lambda answer: None
        exercises.ID.check(0)""",
    "equal to all": """
        class Any:
            def __eq__(self, other): return True
            def __float__(self): return 42.0
            def __array__(self, *args, **kwargs): return __import__("numpy").array(42.0)
        exercises.ID.check(Any())""",
    "spoiled files": """
        Path("table.txt").write_text("spoiled")
        Path("01_demo.ipynb").write_text("spoiled")
        exercises.ID.check(0)""",
    "left process": """
        import subprocess, sys
        command = [sys.executable, "-c", "import time; time.sleep(1000)  # left by a cheat"]
        subprocess.Popen(command, start_new_session=True)""",
    "garbage": WRITE.replace("MESSAGE", r"""b"\x80\x04garbage\n" + b"[" * 100_000 + b"\n" """),
    "flood": "while True:" + WRITE.replace("\n", "\n    ").replace("MESSAGE", 'b"x" * 1_000_000'),
}  # fmt: skip


def test_cheats_do_not_score(grade_each):
    remarks = grade_each(CHEATS, seconds=1, memory=600)
    for name in ("garbage", "flood"):
        assert remarks[name] == sandbox.UNTRUSTED, name
    for name in ("patched check", "spoiled files"):
        assert remarks[name] == ZERO, name


# What a process does to others. None may score, outlive its batch, or cost more than its answer.
ATTACKS = {
    "ends its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nexercises.ID.check(0)",
    "kills its parent": """
        import os, signal, time
        parent = os.getppid()
        os.kill(parent, signal.SIGKILL)
        waited = [time.sleep(0.01) for _ in range(100) if os.getppid() == parent]
        exercises.ID.check(0)""",
    "stops its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nfall_asleep",
    "ends its group": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "leaves a daemon": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                forever = "while [ -e PLACE ]; do echo >> PLACE/written; sleep 0.01; done"
                os.execve("/bin/sh", ["sh", "-c", forever.replace("PLACE", DAEMONS)], {})
            os._exit(0)
        while not Path(DAEMONS, "written").exists():
            time.sleep(0.01)""",
}
KILL_ALL = """
    import os, signal
    assert os.readlink("/proc/self/ns/pid") != OUTSIDE, "it would really kill all"
    os.kill(-1, signal.SIGKILL)
    exercises.ID.check(0)"""


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="signals and forks")
@pytest.mark.parametrize("contained", [True, False], ids=["in a namespace", "without one"])
def test_attacks_end_with_their_answer(contained, grade_each, fall_asleep, tmp_path, monkeypatch):
    if contained and not processes.namespace():
        pytest.skip("this system allows no namespace")
    if not contained:
        monkeypatch.setattr(processes, "namespace", lambda: ())
    daemons = tmp_path / "daemons"
    daemons.mkdir()
    attacks = dict(ATTACKS)
    if contained:
        outside = repr(str(Path("/proc/self/ns/pid").readlink()))  # the cell looks before it kills
        attacks["kills all"] = KILL_ALL.replace("OUTSIDE", outside)
    attacks = {name: source.replace("DAEMONS", repr(str(daemons))) for name, source in attacks.items()}
    attacks = {name: source.replace("fall_asleep", fall_asleep) for name, source in attacks.items()}
    try:
        remarks = grade_each(attacks)
        written = {path.name: path.stat().st_size for path in daemons.iterdir()}
        assert set(written) == {"written"}, remarks
        time.sleep(0.2)
        assert written == {path.name: path.stat().st_size for path in daemons.iterdir()}, "a daemon lives on"
    finally:
        for path in daemons.iterdir():
            path.unlink()
        daemons.rmdir()  # should one have got through, it ends now
    assert remarks["ends its parent"] == ZERO
    assert remarks["kills its parent"] == (ZERO if contained else processes.ENDED)
    # without a namespace it may also be seen to have ended first
    assert remarks["stops its parent"] in {"limit of 600 s by the clock", *([] if contained else [processes.ENDED])}
    assert remarks["leaves a daemon"] == "no answer yet"
    assert remarks.get("kills all", ZERO) == ZERO


def test_a_check_can_hand_over_functions_of_the_answer_and_of_its_own(grade, room, monkeypatch):
    def wrong(pair):
        f, g = pair["f"], pair["rest"]
        there_and_back = f(lambda x: f(lambda y: g(y) - 1, x) + 1, 1)
        return compare("They", [f(g, 1), f(lambda x: x + 1, 1), there_and_back], [2, 2, 2]) or f(lambda x: 1 / 0, 1)

    monkeypatch.setattr(room.pair, "wrong", wrong)
    row = grade(student=answers(pair="pair = {'f': lambda g, x: g(x), 'rest': lambda x: x + 1}"))["student"]
    assert "demo-pair: not yet: checking it raised AnswerError: ZeroDivisionError: division by zero" in row["remarks"]


# What editors, and students with them, do to cells and files; none of it makes a right answer wrong.

RIGHT, BLANK, CHECK = "ID = 42\nexercises.ID.check(ID)", "ID = ...\nexercises.ID.check(ID)", "exercises.ID.check(ID)"
TAG, KNOWN = 1, 2
CELLS = {  # what becomes of an answer's cell: sources, with what is left of tag and id
    "a helper above": [("half_ID = lambda: 21", 0), ("ID = 2 * half_ID()\nexercises.ID.check(ID)", TAG | KNOWN)],
    "a helper in the course's own cell": [("ID = helper\n" + CHECK, TAG | KNOWN)],
    "split": [("ID = 42", TAG | KNOWN), (CHECK, TAG)],
    "split without the tag": [("ID = 42", TAG | KNOWN), (CHECK, 0)],
    "split in the middle": [("if True:", TAG | KNOWN), ("    ID = 42", TAG), ("ID = 42", TAG), (CHECK, 0)],
    "copied, and one more try": [(RIGHT, TAG | KNOWN), (BLANK, TAG), ("ID = = 42", TAG)],
    "answered in the copy": [(BLANK, TAG | KNOWN), (RIGHT, TAG)],
    "answered in a cell below": [(BLANK, TAG | KNOWN), (RIGHT, 0)],
    "answered in a cell above": [("ID = 42", 0), (CHECK, TAG | KNOWN)],
    "the tag is gone": [(RIGHT, KNOWN)],
    "tag and id are gone": [(RIGHT, 0)],
    "the solution is pasted over it": [("ID = 42", TAG | KNOWN)],
    "pasted, and the tag is gone": [("ID = 42", KNOWN)],
    "pasted into a new cell": [("ID = 42", 0)],
    "magics": [("%matplotlib inline\n%matplotlib qt\n%load_ext no\n%no\n!echo > made\n" + RIGHT, TAG | KNOWN)],
    "what they leave": [("assert not Path('made').exists()\n%pylab widget\nplt.plot(ID := 42)\n" + CHECK, TAG | KNOWN)],
    "timed": [("%%time\n" + RIGHT, TAG | KNOWN)],
    "a crash after the check": [(RIGHT + "\n1 / 0", TAG | KNOWN)],
    "a failed try": [("1 / 0", 0), ("sys.exit()", 0), ("ID = = 0", 0), (RIGHT, TAG | KNOWN)],
    "merged with the next": [(RIGHT + "\n" + RIGHT.replace("ID", "NEXT"), TAG | KNOWN)],
    "merged into the last": [],
    "empty cells": [("", 0), ("", 0), ("# to do", 0), (RIGHT, TAG | KNOWN)],
}  # fmt: skip


def test_what_editors_make_of_cells(grade, notebook):
    ids = [f"demo-n{number}" for number in range(len(CELLS))]
    blank = notebook({identity: BLANK.replace("ID", name(identity)) for identity in ids})
    nbformat.write(blank, grade.pristine / "01_demo.ipynb")
    book = notebook({})
    book.cells.pop()
    for number, cells in enumerate(CELLS.values()):
        for source, kept in cells:
            metadata = {"tags": [f"answer-demo-n{number}"]} if kept & TAG else {}
            source = source.replace("ID", f"n{number}").replace("NEXT", f"n{number + 1}")
            place = number + 3 if kept & KNOWN else 100 + len(book.cells)
            book.cells.append(nbformat.v4.new_code_cell(source, metadata=metadata, id=f"demo-{place}"))
    book.cells[0].source += "\nhelper = 42"
    row = grade(student=nbformat.writes(book).encode())["student"]
    assert (row["remarks"], row["total"], row["of"]) == ("", str(len(CELLS)), str(len(CELLS)))


def each(change):  # cell of a notebook that is no answer
    return lambda book: {
        **book, "cells": [cell if cell["metadata"].get("tags") else cell | change(cell) for cell in book["cells"]]
    }  # fmt: skip


FILES = {
    "null tags": each(lambda cell: {"metadata": {"tags": None}}),
    "null metadata": each(lambda cell: {"metadata": None}),
    "odd metadata": each(lambda cell: {"metadata": [1], "id": 3}),
    "odd cells": lambda book: {**book, "cells": [None, 3, {}, {"cell_type": "code", "source": None}, *book["cells"]]},
    "sources alone": lambda book: {"cells": [{"cell_type": "code", "source": c["source"]} for c in book["cells"]]},
    "colab": lambda book: {"cells": [{**cell, "metadata": {"id": cell["id"]}, "id": None} for cell in book["cells"]]},
    "answers alone": lambda book: {**book, "cells": book["cells"][3:-1]},
    "windows": lambda book: json.loads(json.dumps(book).replace("\\n", "\\r\\n")),
    "mark": lambda book: json.dumps(book, ensure_ascii=False).encode("utf-8-sig"),
    "utf-16": lambda book: json.dumps(book, ensure_ascii=False).encode("utf-16"),
}


@pytest.mark.parametrize("change", FILES)
def test_what_editors_make_of_files(change, grade, reference, notebook, tmp_path):
    def run(book: dict | bytes) -> list[list[str]]:
        path = tmp_path / "01_demo.ipynb"
        path.write_bytes(book if isinstance(book, bytes) else json.dumps(book).encode())
        steps = grading.arrange(grading.read_cells(path), grading.read_cells(grade.pristine / path.name), {})
        return [step.source.splitlines() for step in steps]

    solved = json.loads(nbformat.writes(notebook(reference | {"demo-pair": "'ä'\n" + reference["demo-pair"]})))
    expected = run(solved)
    assert [source[0] for source in expected[3:]] == ["number = 6 * 7", "def double(x):", "'ä'"]
    assert run(FILES[change](solved)) == expected


@pytest.mark.long
def test_what_a_student_adds_may_end_at_a_limit(grade, reference, notebook, monkeypatch):
    book = notebook({**reference, "demo-number": "number = 2 * half\nexercises.number.check(number)"})
    added = ["while True: pass", "half = 21", "import os; os._exit(0)"]
    book.cells[3:3] = map(nbformat.v4.new_code_cell, added)
    assert scores(grade(student=nbformat.writes(book).encode(), seconds=1)["student"]) == ["1", "1", "1", "3"]
    monkeypatch.setattr(grading, "MAX_LEFT_OUT", 1)  # then none of them is run
    row = grade(seconds=1.1)["student"]
    assert scores(row) == ["0", "1", "1", "2"] and row["look"] == "1"
    assert "demo-number: without a cell that is no answer (limit of 1.1 processor seconds): crash" in row["remarks"]


def test_damaged_and_missing_files_do_not_stop_the_batch(grade, reference, notebook):
    good = nbformat.writes(notebook(reference)).encode()
    old = json.dumps({"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": []}).encode()
    lost = notebook(reference)
    del lost.cells[3]
    (grade.folder / "nobody").mkdir()
    for name in ("essay.ipynb", "=1+1_01_demo.ipynb", "my 01_Demo (1).ipynb.txt", "01_DEMO.IPYNB", "._01_demo.ipynb"):
        (grade.folder / name).write_bytes(good)
    (grade.folder / "folder_01_demo.ipynb").mkdir()
    damaged = {"truncated": good[: len(good) // 2], "empty": b"", "binary": b"\x80\x04\xff", "deep": b"[" * 1_000_000,
               "list": b"[]", "cells": b'{"nbformat": 4, "cells": {"cell_type": "code"}}'}  # fmt: skip
    rows = grade(**damaged, old=old, lost=nbformat.writes(lost).encode(), zoe=good)
    for name in damaged:
        assert scores(rows[name]) == ["0"] * 4 and "damaged" in rows[name]["remarks"], name
    assert "old format" in rows["old"]["remarks"] and rows["old"]["total"] == "0"
    assert scores(rows["lost"]) == ["0", "1", "1", "2"] and "missing" in rows["lost"]["remarks"]
    for name in ("zoe", "./=1+1_01_demo.ipynb", "my 01_Demo (1).ipynb.txt", "01_DEMO.IPYNB"):
        assert scores(rows[name]) == ["1", "1", "1", "3"], name
    for name in ("nobody", "essay.ipynb", "folder_01_demo.ipynb"):
        assert "nothing was handed in" in rows[name]["remarks"], name
    assert len(rows) == 15


def test_what_the_instructor_is_told(tmp_path, notebook, capsys):
    def told(*arguments: object) -> str:
        assert dlscale.main(["grade", *map(str, arguments), f"--out={tmp_path / 'out.csv'}"]) == 2
        return capsys.readouterr().err

    assert "--notebooks" in told(tmp_path, f"--notebooks={tmp_path}")
    nbformat.write(notebook(BLANKS), tmp_path / "01_demo.ipynb")
    (tmp_path / "in").mkdir()
    assert "--seconds must be" in told(tmp_path, "--seconds=nan")
    assert "No submissions" in told(tmp_path / "in", f"--notebooks={tmp_path}")
    (tmp_path / "out.csv").write_text("name,mark", encoding="utf-8")
    assert "--out" in told(tmp_path, f"--notebooks={tmp_path}")


# A batch that was ended goes on, and no table is lost


@pytest.fixture
def graded(monkeypatch):
    """The names of the students whose notebooks were graded, and not taken from an earlier table.

    No answer runs: all that are filled in count as right.
    """
    names = []

    def judge(submitted: list[grading.Cell], pristine: list[grading.Cell], *_, **__) -> dict[str, str]:
        sources = {cell.tag: cell.source for cell in submitted}
        blank = {cell.tag: "..." in sources.get(cell.tag, "...") for cell in pristine if cell.tag}
        return {identity: "no answer yet" if blank[identity] else "" for identity in blank}

    write = grading.tqdm.write
    monkeypatch.setattr(
        grading.tqdm, "write", lambda line: names.extend(re.findall(r"^\d+ of \d+: (\w+)/", line)) or write(line)
    )
    monkeypatch.setattr(grading, "grade_cells", judge)
    return names


def test_what_was_graded_is_not_graded_again_unless_something_is_new(grade, reference, notebook, graded, capsys):
    first = grade(anna=reference, bob=b"damaged", carl=BLANKS)
    assert graded == ["anna", "bob", "carl"]
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "1 of 3: anna/01_demo.ipynb: 3 of 3 right"
    assert said[2] == "2 of 3: bob/01_demo.ipynb: 0 of 3 right: the file is damaged: it is no notebook"
    assert "demo-pair: no answer yet" in said[3] and said[4].startswith("1 of 3 need a look")
    assert grade() == first and len(graded) == 3

    def new(**more: object) -> list[str]:
        graded.clear()
        grade(**more)
        return list(graded)

    assert new(bob=reference, aaron=BLANKS) == ["aaron", "bob"]
    assert list(grade.rows()) == ["anna", "bob", "carl", "aaron"]
    assert new(seconds=50) == ["aaron", "anna", "bob", "carl"]
    nbformat.write(notebook({"demo-number": "1"}), grade.pristine / "02_demo.ipynb")
    assert new(seconds=50) == ["aaron", "anna", "bob", "carl"]


@pytest.mark.parametrize("sent", ["SIGINT", *(pytest.param(s, marks=pytest.mark.long) for s in ("SIGTERM", "SIGKILL"))])
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_batch_that_is_ended_leaves_nothing_and_goes_on(sent, grade, reference, room, tmp_path, graded):
    asleep = tmp_path / "asleep"
    waiting = f"import os\nPath({str(asleep)!r}).write_text('x')\n" + "while True:\n    import time; time.sleep(1)"
    grade.hand_in(anna=b"damaged", bob={**BLANKS, "demo-number": waiting})
    script = f"""
import sys
sys.path.insert(0, {str(Path(room.__file__).parent)!r})
import demo
from dlscale import __main__ as dlscale
dlscale.exercises = lambda: {{entry.id: entry for entry in vars(demo).values() if isinstance(entry, demo.Exercise)}}
sys.exit(dlscale.main({grade.arguments()!r}))
"""
    batch = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    with batch:
        while not asleep.exists():
            assert batch.poll() is None
            time.sleep(0.05)
        started = psutil.Process(batch.pid).children(recursive=True)
        assert len(started) > 1
        batch.send_signal(getattr(signal, sent))
        error = batch.stderr.read().decode()
    assert batch.returncode == (130 if sent == "SIGINT" else -getattr(signal, sent))
    assert "Traceback" not in error
    psutil.wait_procs(started, timeout=600)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in started)
    assert list(grade.rows()) == ["anna"]
    assert scores(grade(bob=reference)["bob"]) == ["1", "1", "1", "3"] and graded == ["bob"]
