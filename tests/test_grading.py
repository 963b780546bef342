"""The grader: honest answers score, and nothing that a submission does scores without being right or stops a batch."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import ml_dtypes
import nbformat
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dlscale import __main__ as dlscale
from dlscale.course import grading
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

number = Exercise("demo-number", "number", "Six times seven?", ["Count."], "number = 6 * 7",
                  lambda answer: compare("The product", answer, 42), "it is 42.")
double = Exercise("demo-double", "double", "Double x.", ["Add."], "def double(x):\\n    return x + x", _double, "yes.")
pair = Exercise("demo-pair", "pair", "Pack.", ["Pack."], """
from collections import namedtuple
pair = {"f": lambda x: x + 1, "rest": namedtuple("Rest", "first second")(1, 3)}
""", _pair, "yes.")

def _number(answer):
    return compare("The number", answer() if callable(answer) else answer, 42)

for i in range(20):
    globals()[f"n{i}"] = Exercise(f"demo-n{i}", "n", "Six times seven?", ["Count."], "n = 42", _number, "yes.")
'''

BLANKS = {
    "demo-number": "number = ...\nexercises.number.check(number)",
    "demo-double": "def double(x):\n    return ...\n\nexercises.double.check(double)",
    "demo-pair": "pair = {'f': ..., 'rest': ...}\nexercises.pair.check(pair)",
}
ALL = {"demo-number": True, "demo-double": True, "demo-pair": True}


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
    "asks": (run_cell("n = input()"), "crashed: "),
    "odd error": (run_cell("class Odd(Exception):\n  def __str__(self): raise self\nraise Odd"), "crashed: Odd"),
    "no check": ("n = 42", "its check was not called"),
    "os._exit": (run_cell("import os\nos._exit(0)"), "its process ended"),
    "huge": (run_cell("n = 'x' * 17_000_000"), "crashed: ValueError: the answer is larger than 16 MB"),
    "circle": (run_cell("n = []\nn.append(n)"), "crashed: RecursionError"),
    "huge number": (run_cell("n = 10**100_000"), "crashed: ValueError"),
    "object": (run_cell("n = object()"), "not yet: The number must be a number"),
}


def test_a_crash_costs_its_own_answer_only(grade_each):
    remarks = grade_each({name: source for name, (source, _) in CRASHES.items()})
    for name, (_, remark) in CRASHES.items():
        assert remarks[name].startswith(remark), name


GARBAGE = {
    "NaN": ("float('nan')", "not yet: The number is not finite"),
    "text": ("'42'", "not yet: The number must be a number, not str"),
    "array": ("[42, 42]", "not yet: The number has shape (2,)"),
    "object": ("object()", "not yet: The number must be a number"),
    "function": ("print", "not yet: The number must be a number"),
    "error": ("1 / 0", "not yet: checking it raised ZeroDivisionError"),
    "exit": ("__import__('sys').exit()", "not yet: checking it raised SystemExit"),
    "huge": ("'x' * 17_000_000", "not yet: checking it raised ValueError: the answer is larger"),
    "blank": ("...", "no answer yet"),
    "_exit": ("__import__('os')._exit(0)", "its process ended"),
}


def test_a_function_that_returns_garbage(grade_each):
    remarks = grade_each({name: run_cell("", f"lambda: {value}") for name, (value, _) in GARBAGE.items()})
    for name, (_, remark) in GARBAGE.items():
        assert remarks[name].startswith(remark), name


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


def test_to_wait_costs_no_processor_seconds_but_ends_at_a_limit_by_the_clock(grade_each, fall_asleep):
    cells = {
        "patient": run_cell("import time\ntime.sleep(1.2)", "0"),
        "asleep": fall_asleep,
    }
    remarks = grade_each(cells, seconds=1)
    assert remarks == {
        "patient": "not yet: The number is not 0: that is too small.",
        "asleep": "limit of 600 s by the clock",
    }


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
    "patched hand_in": """
        from dlscale.course import exercises as engine
        given = engine.hand_in
        engine.hand_in = None
        exercises.ID.check(0)
        engine.hand_in = given""",
    "equal to all": """
        class Any:
            def __eq__(self, other): return True
            def __float__(self): return 42.0
            def __array__(self, *args, **kwargs): return __import__("numpy").array(42.0)
        exercises.ID.check(Any())""",
    "printed messages": """
        import os, sys
        line = '{"right": "demo-n3"}\\n{"answer": "demo-n3", "value": 42, "right": true}\\n{"finished": true}'
        print(line); print(line, file=sys.__stdout__); os.write(1, line.encode())""",
    "spoiled files": """
        Path("table.txt").write_text("spoiled")
        Path("01_demo.ipynb").write_text("spoiled")
        exercises.ID.check(0)""",
    "left process": """
        import subprocess, sys
        command = [sys.executable, "-c", "import time; time.sleep(1000)  # left by a cheat"]
        subprocess.Popen(command, start_new_session=True)""",
    "forged result": WRITE.replace("MESSAGE", r"""b'{"right": "demo-n6", "score": 1}\n'"""),
    "garbage": WRITE.replace("MESSAGE", r"""b"\x80\x04garbage\n" + b"[" * 100_000 + b"\n" """),
    "pickle": WRITE.replace("MESSAGE", """__import__("pickle").dumps(print) + b"\\n" """),
    "flood": "while True:" + WRITE.replace("\n", "\n    ").replace("MESSAGE", 'b"x" * 1_000_000'),
    "printed flood": "while True:\n    print('x' * 1_000_000)",
}  # fmt: skip


def test_cheats_do_not_score(grade_each):
    remarks = grade_each(CHEATS, seconds=1, memory=600)
    for name in ("forged result", "garbage", "pickle", "flood"):
        assert remarks[name] == grading.UNTRUSTED, name
    for name in ("patched check", "spoiled files"):
        assert remarks[name] == "not yet: The number is not 0: that is too small.", name
    assert remarks["patched hand_in"] == "its check was not called"
    assert remarks["printed flood"] in ("limit of 1 processor seconds", "memory limit of 600 MB")  # IPython keeps it


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
    "closes its files": "import os\nos.closerange(0, 256)\nfall_asleep",
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
    "leaves a daemon that forks": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            while os.path.exists(DAEMONS):
                if os.fork():
                    os._exit(0)
                Path(DAEMONS, "forked").open("a").write("x")
        while not Path(DAEMONS, "forked").exists():
            time.sleep(0.01)""",
}
KILL_ALL = """
    import os, signal
    assert os.readlink("/proc/self/ns/pid") != OUTSIDE, "it would really kill all"
    os.kill(-1, signal.SIGKILL)
    exercises.ID.check(0)"""


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
        assert set(written) == {"written", "forked"}, remarks
        time.sleep(0.2)
        assert written == {path.name: path.stat().st_size for path in daemons.iterdir()}, "a daemon lives on"
    finally:
        for path in daemons.iterdir():
            path.unlink()
        daemons.rmdir()  # should one have got through, it ends now
    zero = "not yet: The number is not 0: that is too small."
    assert remarks["ends its parent"] == zero
    assert remarks["kills its parent"] == (zero if contained else processes.ENDED)
    # without a namespace it may also be seen to have ended first
    assert remarks["stops its parent"] in {"limit of 600 s by the clock", *([] if contained else [processes.ENDED])}
    assert remarks["leaves a daemon"] == "its check was not called"
    assert remarks.get("kills all", zero) == zero


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_a_hidden_process_that_keeps_the_channel_open_holds_nothing_up(grade_each):
    hide = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(0)
        os._exit(0)"""
    assert grade_each({"hidden": hide}) == {"hidden": processes.ENDED}


def test_a_check_can_hand_back_functions_of_the_answer_but_none_of_its_own(grade, room, monkeypatch):
    exercise = room.pair
    answer = answers(pair="pair = {'f': lambda g, x: g(x), 'rest': lambda x: x + 1}")
    monkeypatch.setattr(exercise, "wrong", lambda pair: compare("It", pair["f"](pair["rest"], 1), 2))
    assert scores(grade(theirs=answer)["theirs"]) == ["0", "0", "1", "1"]
    monkeypatch.setattr(exercise, "wrong", lambda pair: compare("It", pair["f"](abs, 1), 1))
    assert "cannot hand a function of its own" in grade(own=answer)["own"]["remarks"]


def test_an_answer_that_a_cell_gave_counts_even_if_the_cell_then_crashes(grade, reference):
    row = grade(student={**BLANKS, "demo-number": f"{reference['demo-number']}\n1 / 0"})["student"]
    assert scores(row) == ["1", "0", "0", "1"]


def test_a_cell_cannot_answer_for_another(grade, reference):
    stolen = reference["demo-pair"] + "\nexercises.number.check(42)"
    row = grade(student={**BLANKS, "demo-pair": stolen})["student"]
    assert scores(row) == ["0", "0", "1", "1"]


def test_only_answer_cells_are_taken(grade, reference, notebook):
    book = notebook(BLANKS)
    book.cells[0].source = "class exercises:\n    number = None"
    book.cells.insert(3, nbformat.v4.new_code_cell(reference["demo-number"]))
    text = nbformat.writes(book).encode()
    row = grade(student=text)["student"]
    assert scores(row) == ["0", "0", "0", "0"] and "demo-number: no answer yet" in row["remarks"]


def test_damaged_and_missing_files_do_not_stop_the_batch(grade, reference, notebook):
    good = nbformat.writes(notebook(reference)).encode()
    old = json.dumps({"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": []}).encode()
    twice = notebook(reference)
    twice.cells.append(nbformat.v4.new_code_cell(twice.cells[3].source, metadata=twice.cells[3].metadata))
    lost = notebook(reference)
    del lost.cells[3]
    (grade.folder / "nobody").mkdir()
    (grade.folder / "essay.ipynb").write_bytes(good)
    (grade.folder / "=1+1_01_demo.ipynb").write_bytes(good)
    (grade.folder / "folder_01_demo.ipynb").mkdir()
    rows = grade(
        truncated=good[: len(good) // 2],
        empty=b"",
        binary=b"\x80\x04\xff",
        deep=b"[" * 1_000_000,
        list=b"[]",
        cells=b'{"nbformat": 4, "cells": [{"cell_type": "code", "source": 3, "metadata": {"tags": [1]}}]}',
        old=old,
        twice=nbformat.writes(twice).encode(),
        lost=nbformat.writes(lost).encode(),
        zoe=good,
    )
    for name in ("truncated", "empty", "binary", "deep", "list", "cells"):
        assert scores(rows[name]) == ["0"] * 4 and "damaged" in rows[name]["remarks"], name
    assert "old format" in rows["old"]["remarks"] and rows["old"]["total"] == "0"
    assert scores(rows["twice"]) == ["0", "1", "1", "2"] and "several cells" in rows["twice"]["remarks"]
    assert scores(rows["lost"]) == ["0", "1", "1", "2"] and "missing" in rows["lost"]["remarks"]
    assert scores(rows["zoe"]) == ["1", "1", "1", "3"]
    assert "nothing was handed in" in rows["nobody"]["remarks"]
    assert "nothing was handed in" in rows["essay.ipynb"]["remarks"]
    assert rows["./=1+1_01_demo.ipynb"]["total"] == "3"
    assert "nothing was handed in" in rows["folder_01_demo.ipynb"]["remarks"]
    assert len(rows) == 14


def test_what_the_instructor_is_told(tmp_path, notebook, capsys):
    def told(*arguments: object) -> str:
        assert dlscale.main(["grade", *map(str, arguments), f"--out={tmp_path / 'out.csv'}"]) == 2
        return capsys.readouterr().err

    assert "--notebooks" in told(tmp_path, f"--notebooks={tmp_path}")
    nbformat.write(notebook(BLANKS), tmp_path / "01_demo.ipynb")
    (tmp_path / "in").mkdir()
    assert "No submissions" in told(tmp_path / "in", f"--notebooks={tmp_path}")
    assert "nowhere" in told(tmp_path / "nowhere", f"--notebooks={tmp_path}")
    nbformat.write(notebook({"demo-nummer": "1"}), tmp_path / "01_demo.ipynb")
    assert "Did you mean 'demo-number'" in told(tmp_path / "in", f"--notebooks={tmp_path}")
    assert not (tmp_path / "out.csv").exists()


# A batch that was ended goes on


@pytest.fixture
def graded(monkeypatch):
    """The names of the students whose notebooks were graded, and not taken from an earlier table.

    No answer runs: all that are filled in count as right.
    """
    names = []

    def tell(line: str) -> None:
        names.extend(re.findall(r"^\d+ of \d+: (\w+)/", line))
        print(line)

    def judge(submitted: grading.Cells, pristine: grading.Cells, *_, **__) -> dict[str, str]:
        sources = dict(submitted)
        return {
            identity: "blank" if "..." in sources.get(identity, "...") else "" for identity, _ in pristine if identity
        }

    monkeypatch.setattr(grading, "print", tell, raising=False)
    monkeypatch.setattr(grading, "grade_cells", judge)
    return names


def test_what_was_graded_is_not_graded_again_unless_something_is_new(grade, reference, notebook, graded, capsys):
    first = grade(anna=reference, bob=b"damaged", carl=BLANKS)
    assert graded == ["anna", "bob", "carl"]
    assert grade() == first and len(graded) == 3
    assert "3 of 3 were graded before" in capsys.readouterr().out

    def new(**more: object) -> list[str]:
        graded.clear()
        grade(**more)
        return list(graded)

    assert new(bob=reference, aaron=BLANKS) == ["aaron", "bob"]
    assert list(grade.rows()) == ["aaron", "anna", "bob", "carl"]
    assert scores(grade.rows()["bob"]) == ["1", "1", "1", "3"]
    assert scores(grade.rows()["anna"]) == ["1", "1", "1", "3"]
    assert new(seconds=50) == ["aaron", "anna", "bob", "carl"]
    for path in list(grade.folder.glob("[abc]*/*")):
        if path.parent.name != "carl":
            path.unlink()
            path.parent.rmdir()
    assert new(seconds=50) == [] and list(grade.rows()) == ["carl"]
    nbformat.write(notebook({"demo-number": "1"}), grade.pristine / "01_demo.ipynb")
    assert new(seconds=50) == ["carl"]
    grade.out.write_bytes(b"\xff\0 something else")
    assert new(seconds=50) == ["carl"]


def test_an_end_in_the_middle_of_a_row_loses_that_row_only(grade, reference, graded, monkeypatch, capsys):
    writerows = csv.DictWriter.writerows

    def interrupted(self, rows):
        rows = list(rows)
        writerows(self, rows[:1])
        if len(rows) > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(csv.DictWriter, "writerows", interrupted)
    grade.hand_in(anna=reference, bob=reference, carl=BLANKS)
    assert dlscale.main(grade.arguments()) == 130
    assert "goes on" in capsys.readouterr().err
    assert list(grade.rows()) == ["anna"] and graded == ["anna"]
    monkeypatch.setattr(csv.DictWriter, "writerows", writerows)
    assert list(grade()) == ["anna", "bob", "carl"] and graded == ["anna", "bob", "carl"]


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGKILL"])
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


# Values on the way


def no_function(*_):
    raise AssertionError


def there(value: object) -> object:
    return grading.unpack(grading.pack(value, no_function), no_function)


PLAIN = st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.text() | st.just(...)
NESTED = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@given(NESTED)
def test_plain_values_arrive_as_they_were(value):
    assert there(value) == value and type(there(value)) is type(value)


@given(
    arrays.arrays(st.sampled_from(["?", "i4", "u1", "f2", "f4", ">f8", "c8", "U3"]), arrays.array_shapes(min_dims=0))
)
def test_arrays_arrive_as_they_were(array):
    arrived = there(array)
    assert isinstance(arrived, np.ndarray) and arrived.dtype == array.dtype
    assert arrived.shape == array.shape and arrived.tobytes() == array.tobytes() and arrived.flags.writeable


def test_other_values():
    assert math.isnan(there(float("nan"))) and there(np.float32(2)) == 2 and type(there(np.float32(2))) is np.float32
    assert there(np.ones(2, ml_dtypes.bfloat16)).dtype == ml_dtypes.bfloat16
    for value in (np.array([object()]), object(), {1}):  # of these only the type is told
        assert type(there(value)).__name__ == type(value).__name__ and type(there(value)) is not type(value)
    functions = []
    line = grading.pack(print, lambda f: functions.append(f) or 7)
    assert functions == [print] and grading.unpack(line, lambda number: (max, number)) == (max, 7)


def test_jax_arrays_stay_jax_arrays():
    jax = pytest.importorskip("jax")
    arrived = there(jax.numpy.arange(3, dtype="bfloat16"))
    assert isinstance(arrived, jax.Array) and arrived.dtype == "bfloat16" and arrived.tolist() == [0, 1, 2]


MALFORMED = [
    {"tuple": 3, "fields": None}, {"tuple": [1], "fields": ["class"]}, {"tuple": [1], "fields": ["a", "b"]},
    {"tuple": [0] * 101, "fields": [f"f{i}" for i in range(101)]}, {"dict": [[[], 1]]}, {"dict": [1]}, {"unknown": 1},
    {},
    {"dict": [[i, 0] for i in range(20_000)]}, {"kind": "array", "dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="},
    {"kind": "array", "dtype": "f8", "shape": [2], "data": "AAAAAAAAAAA="},
    {"kind": "array", "dtype": "f8", "shape": [0, 10**12], "data": ""},
    {"kind": "array", "dtype": "no", "shape": [1], "data": "AAAAAAAAAAA="},
]  # fmt: skip


@pytest.mark.parametrize("message", MALFORMED)
def test_malformed_messages_raise(message):
    with pytest.raises(Exception):  # noqa: B017  any will do: the parent stops the child
        grading.unpack(json.dumps(message).encode(), no_function)
