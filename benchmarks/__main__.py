"""Time what the course is made of beside what a user would pick instead: `make bench`, some ten minutes.

One table, and the same as JSON in benchmarks/results.json. Each benchmark runs in a process of its own. The notebooks
themselves take half an hour: `make bench ONLY=cold_start`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import psutil

from benchmarks.timing import Row
from dlscale.course.markup import markdown_table
from dlscale.lab import devices

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))  # for lab.py
USUAL = ("calibration", "slider_latency", "train_speed", "landscape_speed", "quantize_speed", "search_quality")
BENCHMARKS = (*USUAL, "cold_start")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    which = f"some of {', '.join(BENCHMARKS)}; default: all but cold_start"
    parser.add_argument("names", nargs="*", metavar="NAME", help=which)
    parser.add_argument("--json", type=Path, default=HERE / "results.json", help="default: %(default)s")
    parser.add_argument("--page", type=Path, help="also write the table as Markdown, such as docs/BENCHMARKS.md")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in this process, without a table
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"There is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}.")
    if options.here:
        rows = importlib.import_module(f"benchmarks.{options.names[0]}").run()
        options.json.write_text(json.dumps([row._asdict() for row in rows]), encoding="utf-8")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            results = {name: in_child(name, Path(folder)) for name in options.names or USUAL}
    except KeyboardInterrupt:
        print("\nStopped: all that was started has ended.", file=sys.stderr)
        return 130
    options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table(results)
    if options.page:
        options.page.write_text(page(results), encoding="utf-8")
    print(f"\nAlso in {options.json}")
    return int(any("failed" in result for result in results.values()))


def in_child(name: str, folder: Path) -> dict[str, object]:
    """Run one benchmark in a session of its own; return its `rows`, or why it `failed`, and its `seconds`.

    What it leaves is in `folder`.
    """
    print(f"{name} … ", end="", file=sys.stderr, flush=True)
    start, file = time.perf_counter(), folder / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks", "--here", name, f"--json={file}"]
    environment = os.environ | {"TMPDIR": str(folder)}
    try:
        child = subprocess.Popen(
            command, cwd=HERE.parent, env=environment, start_new_session=True, text=True, encoding="utf-8",
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        error = child.communicate()[1]
    finally:  # also when Ctrl-C comes while the child is being started
        end_children()
    seconds = round(time.perf_counter() - start, 1)
    print(f"{seconds} s", file=sys.stderr)
    if child.returncode:
        last = (error.strip().splitlines() or [f"ended with {child.returncode}"])[-1]
        return {"seconds": seconds, "failed": last}
    return {"seconds": seconds, "rows": json.loads(file.read_text(encoding="utf-8"))}


def end_children() -> None:
    """End all that this process started, in turn: kernels and browsers are in sessions of their own."""
    family = psutil.Process().children(recursive=True)
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family)


def table(results: dict[str, dict]) -> None:
    """Print all rows, and below them the notes."""
    notes, task = [], None
    print(f"{'':48} {'median':>14} {'half between':>22} {'ratio':>8} (95 %)")
    for name, result in results.items():
        if "failed" in result:
            notes.append(f"{name} failed: {result['failed']}")
        for row in (Row(**fields) for fields in result.get("rows", ())):
            if row.task != task:
                print(f"\n{row.task}")
            task, (median, between, ratio, sure) = row.task, columns(row)
            print(f"  {row.candidate:46} {median:>14} {between:>22} {ratio:>8} {sure}")
            if row.note:
                notes.append(f"{row.task.partition(',')[0]}, {row.candidate}: {row.note}")
    if notes:
        print("", *notes, sep="\n")


def columns(row: Row) -> tuple[str, str, str, str]:
    """Median with its unit, quartiles, ratio, and the ratio's 95 % interval."""
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    sure = "" if row.ratio_low in (None, row.ratio_high) else f"[{row.ratio_low:.2f}, {row.ratio_high:.2f}]"
    return (
        f"{row.median:.4g} {row.unit}",
        "" if row.low == row.high else f"{row.low:.4g} to {row.high:.4g}",
        ratio,
        sure,
    )


def page(results: dict[str, dict]) -> str:
    """The table as a page of Markdown, with the machine and the versions."""
    model = next(iter(re.findall(r"model name\s*: (.*)", _text("/proc/cpuinfo"))), platform.processor())
    machine = f"{model}, {devices.cores()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    others = _text(HERE / "requirements.txt").split()
    versions = [f"Python {platform.python_version()}", f"jax=={importlib.metadata.version('jax')}", *others]
    parts = [
        f"""# Benchmarks

`make bench` measures these. Compare ratios from one run, not seconds of two runs. The first line of each group has the
ratio 1 unless its title says otherwise. Brackets hold a 95 % interval over the rounds.

{date.today():%d %B %Y}, {machine}; {", ".join(versions)}"""
    ]
    for name, result in results.items():
        parts.append(f"## {name.replace('_', ' ').capitalize()}")
        if "failed" in result:
            parts.append(f"It failed: {result['failed']}")
        found = [Row(**fields) for fields in result.get("rows", ())]
        for task, group in itertools.groupby(found, key=lambda row: row.task):
            rows = [[row.candidate, *columns(row), row.note] for row in group]
            heads = ("", "median", "half between", "ratio", "95 %", "note")
            parts += [f"**{task}**", markdown_table(heads, rows)]
    return "\n\n".join(parts) + "\n"


def _text(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8")
    return ""


if __name__ == "__main__":
    sys.exit(main())
