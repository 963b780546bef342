"""The house around the library: its size and layers, the lock, the commands, Binder, the web site, its texts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from readme import slug  # tools/readme.py
from vulture import Vulture

import dlscale.__main__ as commands
from dlscale.course.contents import contents, paths

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dlscale"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# Neither blank nor only comment or docstring, drawing included.
MOST_LINES, MOST_LINES_OF_ROOM, MOST_LINES_OF_METHOD, MOST_LINES_OF_TESTS = 13_000, 900, 300, 9_000
# What is not a room's method: what is drawn and asked, recorded, run as a command, and programs to learn from.
BESIDE = {"drawing.py", "exercises.py", "experiment.py", "measuring.py", "command.py", "corpus.py"}
PARTS = {"lab", "page", "course"}
SHARED = {"costs"}  # a room that serves several notebooks
OLDEST_PYTHON = "3.11"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


# The library


def test_imports_only_go_down():
    code = "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == 0, result.stdout


def lines_of_code(path: Path) -> int:
    """Lines that are neither blank nor only comment or docstring."""
    lines, statement = set(), []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NEWLINE:
                if [part.type for part in statement] != [tokenize.STRING]:  # a docstring stands alone
                    lines.update(*(range(part.start[0], part.end[0] + 1) for part in statement))
                statement = []
            elif token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.STRING, tokenize.OP):
                statement.append(token)
    return len(lines)


def test_lines_of_code_count_neither_comments_nor_docstrings(tmp_path):
    path = tmp_path / "sample.py"
    path.write_text('"""Two\nlines."""\n\n# why\ndef f(\n    x,  # unit\n):\n    """One."""\n    return """\n"""\n')
    assert lines_of_code(path) == 5
    path.write_text(path.read_text() + "a = (\n    1)\n@f\nclass B:\n    b = 2\n")
    assert lines_of_code(path) == 10


def test_nothing_is_there_for_tests_alone(tmp_path):
    """No name that only tests use, or nobody: by vulture, which knows only names."""
    called_by_others = ["_ipython_display_", "enable_matplotlib", "gui", "include", "exclude", "description", "xy"]
    called_by_others += ["execution_count", "first_picture", "IDLE", "solution", "download"]  # the last two by readers
    texts = (path.read_text(encoding="utf-8") for path in PACKAGE.glob("*/experiment.py"))
    recorded = [name for text in texts for name in re.findall(r"(?m)^([A-Z_]+) = ", text)]
    cells = [cell for path in paths(ROOT / "notebooks") for cell in nbformat.read(path, as_version=4).cells]
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    (tmp_path / "notebooks.py").write_text(re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", code), encoding="utf-8")
    found = Vulture()
    found.scavenge([PACKAGE, ROOT / "tools", ROOT / "benchmarks", tmp_path / "notebooks.py"])
    unused = [item for item in found.get_unused_code() if item.filename.parent != tmp_path]
    assert not [item.get_report() for item in unused if item.name not in {*called_by_others, *recorded}]


def sizes(package: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Lines of code of the library by part of the house, and those of each room's method."""
    library, methods = Counter(), Counter()
    for path in sorted(package.rglob("*.py")):
        part = path.relative_to(package).parts[0]
        library[part] += lines_of_code(path)
        if path.parent != package and part not in PARTS and path.name not in BESIDE:
            methods[part] += lines_of_code(path)
    return library, methods


def too_large(package: Path) -> str:
    """What is over its size, with a table of all sizes; "" if nothing is."""
    library, methods = sizes(package)
    over = {f"the method of {room}": count - MOST_LINES_OF_METHOD for room, count in methods.items()}
    over |= {f"the room {room}": library[room] - MOST_LINES_OF_ROOM for room in library.keys() - PARTS}
    over["the library"] = sum(library.values()) - MOST_LINES
    table = [f"{part:24}{count:6}{methods.get(part, ''):>10}" for part, count in library.items()]
    table = [f"{'lines of code':24}{sum(library.values()):6}{'method':>10}", *table]
    lines = [f"{what} is {more} lines over its size" for what, more in over.items() if more > 0]
    return "\n".join([*lines, *table]) if lines else ""


def test_the_library_can_be_read_in_a_day_and_a_room_in_a_quarter_of_an_hour():
    assert not (report := too_large(PACKAGE)), f"look for what a well-kept library already does:\n{report}"


def test_the_tests_are_smaller_than_what_they_test():
    assert sum(map(lines_of_code, (ROOT / "tests").glob("*.py"))) <= MOST_LINES_OF_TESTS


def test_too_large_a_room_is_named(tmp_path):
    for name, lines in {"hall/__init__": 301, "hall/exercises": 199, "hall/measuring": 400, "lab/models": 400}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text("a = 1\n" * lines)
    assert too_large(tmp_path).startswith("the method of hall is 1 lines over its size\nlines of code")
    (tmp_path / "hall" / "__init__.py").write_text("a = 1\n" * 300)
    assert too_large(tmp_path) == ""
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "drawing.py").write_text("a = 1\n" * 901)
    assert too_large(tmp_path).startswith("the room precision is 1 lines over its size")
    (tmp_path / "precision" / "drawing.py").unlink()
    (tmp_path / "lab" / "models.py").write_text("a = 1\n" * (MOST_LINES - 700))
    assert too_large(tmp_path).startswith("the library is 199 lines over its size")


def test_a_subject_has_its_four_places():
    """Notebook, room, test, contents: under one name."""
    files = {ROOT / "notebooks" / file for book in contents() for file in book.files.values()}
    assert {*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "notebooks").glob("further/*.ipynb")} == files
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - PARTS
    assert rooms == {*(book.room for book in contents()), *SHARED}
    _, methods = sizes(PACKAGE)
    for room in rooms:  # 00 and 01 have none: there all that is taught stands in the notebook
        assert (ROOT / "tests" / f"test_{room}.py").is_file() or not methods[room], f"{room} has a method, but no test"


def test_all_code_cells_are_held_by_ruff():
    assert "exclude" not in tomllib.loads(read("notebooks/ruff.toml"))


# The lock


def locked() -> dict[str, list[Requirement]]:
    """Pins by name; there may be several for one package, for different machines."""
    pins: dict[str, list[Requirement]] = {}
    for line in re.sub(r" *\\\n +", " ", read("requirements.txt")).splitlines():
        if line and not line.lstrip().startswith("#"):
            pin, *hashes = re.split(r" --hash=", line)
            assert hashes, f"{pin} has no hash"
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", hash_) for hash_ in hashes), pin
            requirement = Requirement(pin)
            assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), f"{pin} is not pinned"
            pins.setdefault(normal(requirement.name), []).append(requirement)
    return pins


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def asked() -> list[Requirement]:
    lines = [line.partition("#")[0].strip() for line in read("requirements.in").splitlines()]
    return [Requirement(line) for line in lines if line]


def test_lock_has_only_pins_with_hashes():
    assert len(locked()) > len(asked())
    assert not re.search(r"^--|://|@ ", read("requirements.txt"), re.MULTILINE)


@pytest.mark.parametrize("wanted", [*asked(), *map(Requirement, PROJECT["project"]["dependencies"])], ids=str)
def test_lock_satisfies(wanted):
    assert locked().get(normal(wanted.name)), f"run `make lock`: {wanted} is not in requirements.txt"
    for pin in locked()[normal(wanted.name)]:
        assert str(pin.specifier).removeprefix("==") in wanted.specifier, f"run `make lock`: {pin} is not {wanted}"


def test_what_the_package_needs_is_asked_for():
    needed = {normal(Requirement(line).name) for line in PROJECT["project"]["dependencies"]}
    assert needed <= {normal(wanted.name) for wanted in asked()}


def test_the_oldest_python_is_the_same_everywhere():
    assert Version(OLDEST_PYTHON) in SpecifierSet(PROJECT["project"]["requires-python"])
    assert Version("3.10") not in SpecifierSet(PROJECT["project"]["requires-python"])
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + OLDEST_PYTHON.replace(".", "")
    assert read("binder/runtime.txt").strip() == f"python-{OLDEST_PYTHON}"
    assert f"--python-version {OLDEST_PYTHON} " in read("Makefile")
    assert f"sys.version_info < ({OLDEST_PYTHON.replace('.', ', ')})" in read("Makefile")


# Commands


def make_targets() -> dict[str, str]:
    return dict(re.findall(r"^([a-z-]+):.*?(?:## (.*))?$", read("Makefile"), re.MULTILINE))


def test_every_command_explains_itself():
    assert {"lab", "test", "test-all", "notebooks", "bench", "book", "lock", "clean"} <= set(make_targets())
    assert [target for target, text in make_targets().items() if not text] == []


def test_commands_in_the_readme_exist(capsys):
    texts = "\n".join(read(name) for name in TEXTS)
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", texts, re.MULTILINE))
    assert {"lab", "check", "test", "test-all"} <= targets
    assert targets <= set(make_targets())
    for name in re.findall(r"(?:^|`)python3? ((?:tools|data|benchmarks)/\w+\.py)", texts, re.MULTILINE):
        assert (ROOT / name).is_file(), name
    own = set(re.findall(r"python -m (dlscale[.\w]*)(?: (\w+))?", texts))
    with pytest.raises(SystemExit, match="0"):
        commands.main(["--help"])
    shown = capsys.readouterr().out
    assert {module for module, _ in own} == {"dlscale"}
    assert all(
        f"    {command} " in shown for command in ("run", "grade", "measure", *(name for _, name in own if name))
    )


def test_the_readme_is_a_front_page():
    """What it is, for whom, how long it takes and how to start: on the first screen."""
    lines = read("README.md").splitlines()
    assert len(lines) < 120
    first = "\n".join(lines[: next(place for place, line in enumerate(lines) if line.startswith("## "))])
    for words in ("Python, calculus and a first course", "about an hour", "Start in Binder", "Read online", "make lab"):
        assert words in first, words
    rule = tomllib.loads(read("dlscale/start_here/claims.toml"))["start_here-speed-up"]
    assert f"{rule['seeds']} seeds" in first and first.count("docs/start.png") == 1


def test_the_citation_is_of_this_version():
    assert f"version: {PROJECT['project']['version']}\n" in read("CITATION.cff")


@pytest.mark.skipif(os.name != "posix", reason="the executable bit is kept on Linux and macOS only")
@pytest.mark.parametrize("name", [".ci/run", "binder/postBuild", "binder/start"])
def test_scripts_can_be_executed(name):
    assert os.access(ROOT / name, os.X_OK)
    assert read(name).startswith("#!/bin/bash\n")
    subprocess.run(["bash", "-n", ROOT / name], check=True)


def test_binder_folder_has_the_form_that_binder_wants():
    assert read("binder/requirements.txt") == "-r ../requirements.txt\n"
    assert re.fullmatch(r"python-3\.\d+\n", read("binder/runtime.txt"))
    assert read("binder/postBuild").endswith("\npython -m pip install --no-cache-dir --no-deps -e .\n")
    assert read("binder/start").endswith('\nexec "$@"\n')


@pytest.mark.skipif(os.name != "posix", reason="Binder runs Linux")
def test_binder_start_runs_the_command_on_the_processor():
    command = [ROOT / "binder" / "start", "sh", "-c", 'echo "$JAX_PLATFORMS $1"', "sh", "two words"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "cpu two words\n"


# Texts

TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "data/README.md", "docs/CLAIMS.md", "docs/INDEX.md",
         "docs/INSTRUCTORS.md", "docs/MEASURING.md", "docs/BENCHMARKS.md")  # fmt: skip
# Sentences that were there once and do not hold.
UNTRUE = (
    r"every figure comes from|from your own run|written before (?:the|its) run|notebooks are ready|tell most"
    r"|at first free"
)


def anchors(path: Path) -> set[str]:
    """The headings of a text or a notebook, as links name them, and the places that a text marks."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
        text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    else:
        text = path.read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {slug(heading) for heading in headings} | set(re.findall(r'<a id="([\w-]+)">', text))


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_files_and_headings_that_are_there(name):
    links = set(re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)]*))?\)", read(name)))
    known: dict[Path, set[str]] = {}
    for file, anchor in links:
        path = ((ROOT / name).parent / file).resolve() if file else ROOT / name
        assert path.exists(), f"{name} links to {file}"
        if anchor:
            assert anchor in known.setdefault(path, anchors(path)), f"{name}: {file} has no heading {anchor}"


@pytest.mark.parametrize("name", [*TEXTS, "docs/index.md"])
def test_no_sentence_promises_what_does_not_hold(name):
    assert not re.search(UNTRUE, read(name).replace("\n", " "), re.IGNORECASE)


STRAY = {
    "an absolute path": r"(?<![\w.:~$}])/(home|Users|root|work|mnt)/\w|\b[A-Z]:\\Users",
    "the address of a registry": r"pypi\.org|pythonhosted\.org|npmjs\.(com|org)|(deb|security)\.debian\.org",
}


def committed() -> list[str]:
    command = ["git", "-c", "safe.directory=*", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is not a git checkout: what is committed is not known")
    return [name for name in listing.splitlines() if (ROOT / name).is_file()]


def stray(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if len(line) < 5000]  # not the pictures in notebooks
    return [f"{what}: {line.strip()}" for what, pattern in STRAY.items() for line in lines if re.search(pattern, line)]


def test_no_stray_paths_or_addresses():
    found = {}
    for name in committed():
        content = (ROOT / name).read_bytes()
        if b"\0" not in content[:8000] and (lines := stray(content.decode("utf-8"))):
            found[name] = lines
    assert found == {}


def test_what_is_no_text_is_pictures_and_data():
    binary = {name for name in committed() if b"\0" in (ROOT / name).read_bytes()[:8000]}
    assert {name for name in binary if Path(name).suffix not in (".png", ".npz", ".gz")} == set()


def test_stray_paths_and_addresses_are_noticed():
    assert stray("open('/ho" + "me/me/x')")
    assert stray("https://pypi" + ".org/simple")
    assert not stray("https://example.org/home/x, ~/work/x, /usr/bin/python3, $HOME/work/x")
