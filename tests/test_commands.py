"""The commands: what the benchmarks do when stopped, what `make clean` removes, what the smoke run covers."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import dlscale
import dlscale.__main__ as commands

ROOT = Path(__file__).parent.parent
KEPT = {"/data/downloads/", "/data/results/*.part"}  # data that somebody waited for


@pytest.mark.parametrize("name", [module.name for module in pkgutil.walk_packages(dlscale.__path__, "dlscale.")])
def test_every_module_can_be_imported(name):
    if not name.endswith("__main__"):
        importlib.import_module(name)


def test_the_smoke_run_names_tests_that_exist():
    lines = (ROOT / "tests" / "smoke.txt").read_text(encoding="utf-8").splitlines()
    assert len(lines) > 10
    for line in lines:
        file, _, name = line.partition("[")[0].partition("::")
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), f"tests/smoke.txt: there is no {line}"


# make clean


def ignored() -> list[str]:
    return (ROOT / ".gitignore").read_text(encoding="utf-8").split()


@pytest.mark.skipif(shutil.which("make") is None or shutil.which("git") is None, reason="make or git is missing")
def test_clean_removes_all_that_git_ignores_but_data(tmp_path):
    for name in ("Makefile", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    for pattern in ignored():
        # git takes a pattern without a slash before its end at any depth
        for folder in ("",) if pattern.startswith("/") else ("", "notebooks/", "dlscale/lab/"):
            path = tmp_path / folder / pattern.strip("/").replace("*", "x")
            path.parent.mkdir(parents=True, exist_ok=True)
            if pattern.endswith("/"):
                path.mkdir(parents=True)
                path /= "file"
            path.write_text("made")
    subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True)
    status = ["git", "status", "--porcelain", "--ignored=matching", "--untracked-files=all"]
    left = subprocess.run(status, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert set(ignored()) > KEPT
    assert set(re.findall(r"^!! (.*)$", left, re.MULTILINE)) == {kept[1:].replace("*", "x") for kept in KEPT}


# Benchmarks


def benchmarks(*arguments: str, **options: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=-1, stderr=-1, **options)


def test_an_unknown_benchmark_is_refused_in_words():
    with benchmarks("speed") as runner:
        assert "There is no benchmark speed; there are calibration, slider_latency" in runner.communicate()[1]
    assert runner.returncode == 2


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as on Linux and macOS")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_benchmark_ends_with_its_children_and_one_line(number, tmp_path):
    with benchmarks("calibration", f"--json={tmp_path / 'rows.json'}", start_new_session=True) as runner:
        family = psutil.Process(runner.pid)
        assert runner.stderr.read(len("calibration")) == "calibration"  # it has begun
        while not (children := family.children(recursive=True)):
            assert runner.poll() is None
        os.killpg(runner.pid, number)
        out, error = runner.communicate()
    assert (runner.returncode, out) == (130, "")
    assert error.partition("\n")[2] == "Stopped: all that was started has ended.\n"
    assert not any(child.is_running() for child in children)
    assert not (tmp_path / "rows.json").exists()


# The list of commands


def test_without_a_command_they_are_listed(capsys):
    assert commands.main([]) == 0
    said = capsys.readouterr().out
    assert all(f"\n    {name} " in said for name in ("run", "grade", "measure", "train", "serve"))


@pytest.mark.parametrize("name", ["run", "grade", *commands.TOOLS])
def test_each_help_has_an_example_that_its_options_allow(name, capsys):
    with pytest.raises(SystemExit, match="0"):
        commands.main([name, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    (example,) = re.findall(rf"Example: python -m dlscale {name} (.*?)\.(?: [A-Z]|$)", said)
    if name in commands.TOOLS:
        commands.TOOLS[name].options().parse_args(shlex.split(example))
    assert name != "run" or "takes a minute to some hours" in said


def test_a_help_can_be_written_in_any_encoding():
    command = [sys.executable, "-m", "dlscale", "measure", "--help"]
    found = subprocess.run(command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, cwd=ROOT)
    assert found.returncode == 0 and b"Example" in found.stdout


def test_run_lists_every_experiment_with_its_time(capsys, monkeypatch):
    assert commands.main(["run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [*commands.experiments()]
    assert all(re.search(r"; about [\d,]+ minutes? of one core$", line) for line in lines)
    monkeypatch.setattr(commands.records, "results_folder", lambda: Path("nowhere"))
    assert commands.duration("precision-formats") == "not recorded yet"
