"""What a class needs: many kernels run all cells of one lesson together, on this machine.

Nobody pauses to read, so this is the worst case: a class that presses *Run All* at once. Memory is that of the kernels
and what they start. PSS counts a page that several processes share once; RSS counts it in each of them. JAX keeps
compiled programs on disk: "off" compiles everything in each kernel, "shared" starts with an empty folder for all, and
"filled" with the folder of an earlier run. The table is Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import nbformat
import numpy as np
import psutil
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
CACHES = ("off", "shared", "filled")
SAMPLE_SECONDS = 0.5
HEADINGS = ("Kernels", "Compiled programs", "First done", "Last done", "Processor, each", "PSS, all", "PSS, each",
            "RSS, all", "Failed", "First failure")  # fmt: skip


class Memory(threading.Thread):
    """Looks at the memory of all that this process has started, until it is told to stop; keeps the peaks in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.pss = self.rss = 0
        self.least_free = psutil.virtual_memory().available
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(SAMPLE_SECONDS):
            pss = rss = 0
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it ended meanwhile
                    info = process.memory_full_info()
                    pss, rss = pss + getattr(info, "pss", info.uss), rss + info.rss
            self.pss, self.rss = max(self.pss, pss), max(self.rss, rss)
            self.least_free = min(self.least_free, psutil.virtual_memory().available)


async def student(path: Path, environment: dict[str, str], timeout: float, start: float) -> dict[str, Any]:
    """Run a notebook in a kernel of its own; say when it was done, what it computed for, and where it failed."""
    at, processor = "before the first cell", 0.0

    def begins(cell: nbformat.NotebookNode, cell_index: int) -> None:
        nonlocal at
        at = f"cell {cell_index} ({cell.get('id', 'no id')})"

    def executed(**_: object) -> None:
        nonlocal processor
        processor = sum(psutil.Process(client.km.provisioner.pid).cpu_times()[:4])

    where = {"metadata": {"path": str(path.parent)}}
    limits = {
        "timeout": timeout,
        "startup_timeout": timeout,
        "kernel_name": "python3",
        "extra_arguments": ["--log-level=ERROR"],
    }
    hooks = {"on_cell_start": begins, "on_cell_executed": executed}
    client, failure = NotebookClient(nbformat.read(path, as_version=4), resources=where, **limits, **hooks), None
    try:
        await client.async_execute(env=environment)
    except Exception as error:  # whatever a class may meet: a dead kernel, an error, a limit
        failure = f"{type(error).__name__}, {at}"
    return {"seconds": perf_counter() - start, "processor": processor, "failure": failure}


async def together(path: Path, environments: Sequence[dict[str, str]], timeout: float) -> list[dict[str, Any]]:
    start = perf_counter()
    return await asyncio.gather(*(student(path, one, timeout, start) for one in environments))


def measured(path: Path, kernels: int, cache: str, timeout: float) -> dict[str, Any]:
    """One line of the table: `kernels` run the notebook at the same time."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        kept = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        environment = os.environ | ({"DLSCALE_CACHE": "off"} if cache == "off" else kept)
        if cache == "filled":
            asyncio.run(together(path, [environment], timeout))
        memory = Memory()
        memory.start()
        try:
            students = asyncio.run(together(path, [environment] * kernels, timeout))
        finally:
            memory.ended.set()
            memory.join()
    failed = sorted((one["seconds"], one["failure"]) for one in students if one["failure"])
    done = [one for one in students if not one["failure"]] or students
    return {
        "notebook": path.stem, "kernels": kernels, "cache": cache,
        "first_seconds": min(one["seconds"] for one in done),
        "last_seconds": max(one["seconds"] for one in students),
        "processor_seconds": float(np.median([one["processor"] for one in students])),
        "pss_bytes": memory.pss, "rss_bytes": memory.rss, "least_free_bytes": memory.least_free,
        "failed": len(failed), "first_failure": f"after {failed[0][0]:.0f} s: {failed[0][1]}" if failed else "",
    }  # fmt: skip


def machine() -> str:
    """This machine in a few words."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.is_file() else []
    name = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    memory = psutil.virtual_memory().total / 1e9
    return f"{len(psutil.Process().cpu_affinity()) if lines else os.cpu_count()} cores ({name}), {memory:.0f} GB"


def cells(row: dict[str, Any]) -> list[str]:
    """What the table says of a row of `measured`."""
    pss, rss = row["pss_bytes"] / 1e9, row["rss_bytes"] / 1e9
    seconds = [f"{row[f'{name}_seconds']:.0f} s" for name in ("first", "last", "processor")]
    sizes = [f"{pss:.1f} GB", f"{pss / row['kernels']:.2f} GB", f"{rss:.1f} GB"]
    return [str(row["kernels"]), row["cache"], *seconds, *sizes, str(row["failed"]), row["first_failure"] or "none"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=int, nargs="+", default=[30], help="default: 30")
    parser.add_argument("--cache", nargs="+", choices=CACHES, default=CACHES, help="default: all three")
    parser.add_argument("--notebook", type=Path, default=NOTEBOOKS / "05_precision.ipynb", help="default: %(default)s")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a kernel to start, and for each cell")
    parser.add_argument("--json", type=Path, help="a file for the same numbers")
    options = parser.parse_args(arguments)
    rows = []
    print(f"{options.notebook.stem} on {machine()}\n")
    for line in (HEADINGS, ["---"] * len(HEADINGS)):
        print(f"| {' | '.join(line)} |", flush=True)
    for kernels in options.kernels:
        for cache in options.cache:
            rows.append(measured(options.notebook, kernels, cache, options.timeout))
            print(f"| {' | '.join(cells(rows[-1]))} |", flush=True)
    if options.json:
        text = json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n"
        options.json.write_text(text, encoding="utf-8")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
