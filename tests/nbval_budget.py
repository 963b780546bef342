"""A plugin for the pytest that runs nbval: a cell that writes to stderr fails; time and memory are measured.

`--budget-report FILE` gets JSON: `cells`, for each its `end` in seconds since before the kernel's start and whether it
showed a `picture`; `peak`, the most memory the kernel and its children held at once, in bytes.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import psutil
import pytest

SAMPLE_SECONDS = 0.1


def pytest_addoption(parser):
    parser.addoption("--budget-report", type=Path)


def pytest_configure(config):
    config.pluginmanager.register(Budget(config.option.budget_report))


class Budget:
    def __init__(self, report: Path) -> None:
        self.report, self.start, self.cells, self.peak = report, 0.0, [], 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        self.start = self.start or time.perf_counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        if not self.cells:
            kernel = psutil.Process(item.parent.kernel.km.provisioner.pid)
            threading.Thread(target=self.watch, args=[kernel], daemon=True).start()
        yield
        picture = any("image/png" in output.get("data", {}) for output in item.test_outputs)
        self.cells.append({"end": time.perf_counter() - self.start, "picture": picture})
        for output in item.test_outputs:
            if output.get("name") == "stderr":
                pytest.fail(f"wrote to stderr: {output.text}", pytrace=False)

    def watch(self, kernel: psutil.Process) -> None:
        counted = 0
        while kernel.is_running():
            # to count exactly holds the kernel up, and can only give less: not where that is no peak, or nothing moved
            pages = memory(kernel, exact=False)
            if pages > self.peak and abs(pages - counted) > 0.005 * pages:
                counted = pages
                self.peak = max(self.peak, memory(kernel))
            time.sleep(SAMPLE_SECONDS)

    def pytest_sessionfinish(self):
        self.report.write_text(json.dumps({"cells": self.cells, "peak": self.peak}), encoding="utf-8")


def memory(process: psutil.Process, exact: bool = True) -> int:
    """Bytes that a process and its children hold; exactly: shared pages counted once (on Linux, nearly elsewhere)."""
    total = 0
    try:
        for member in [process, *process.children(recursive=True)]:
            info = member.memory_full_info() if exact else member.memory_info()
            total += getattr(info, "pss", info.uss) if exact else info.rss
    except psutil.Error:  # it ended meanwhile
        pass
    return total
