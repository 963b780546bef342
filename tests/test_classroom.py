"""The script that measures what a class needs, with two small kernels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "classroom.py"


@pytest.mark.skipif(sys.platform != "linux", reason="PSS is measured on Linux only")
@pytest.mark.parametrize("fails", [False, True])
def test_a_class_is_measured_and_its_first_failure_named(tmp_path, fails):
    sources = ["held = bytearray(60_000_000); import time; time.sleep(1)", *["1 / 0"] * fails]
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{place}") for place, source in enumerate(sources)]
    path, out = tmp_path / "small.ipynb", tmp_path / "out.json"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    wanted = ["--kernels", "2", "--cache", "off", "--notebook", path, "--json", out]
    result = subprocess.run([sys.executable, SCRIPT, *wanted], capture_output=True, text=True, encoding="utf-8")
    assert result.returncode == fails, result.stderr
    (row,) = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert 120e6 < row["pss_bytes"] < row["rss_bytes"] and row["processor_seconds"] > 0
    assert 1 < row["first_seconds"] <= row["last_seconds"]
    assert row["failed"] == 2 * fails
    assert ("CellExecutionError, cell 1 (cell-1)" in row["first_failure"]) == fails
    assert "small on " in result.stdout and result.stdout.count("\n| 2 | off | ") == 1
