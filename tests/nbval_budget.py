"""A plugin for the pytest that runs nbval: a cell that writes to stderr fails; memory is measured.

`--peak-report FILE` gets the most bytes that the kernel and its children held at once.
"""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

SAMPLE_SECONDS = 0.1


def pytest_addoption(parser):
    parser.addoption("--peak-report", type=Path)


def pytest_configure(config):
    config.pluginmanager.register(Watch(config.option.peak_report))


class Watch:
    def __init__(self, report: Path) -> None:
        self.report, self.peak, self.ended, self.thread = report, 0, threading.Event(), None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        if self.thread is None:
            kernel = psutil.Process(item.parent.kernel.km.provisioner.pid)
            self.thread = threading.Thread(target=self.watch, args=[kernel], daemon=True)
            self.thread.start()
        yield
        for output in item.test_outputs:
            if output.get("name") == "stderr":
                pytest.fail(f"wrote to stderr: {output.text}", pytrace=False)

    def watch(self, kernel: psutil.Process) -> None:
        counted = 0
        while kernel.is_running() and not self.ended.wait(SAMPLE_SECONDS):
            # to count exactly holds the kernel up, and can only give less: not where that is no peak, or nothing moved
            pages = memory(kernel, exact=False)
            if pages > self.peak and abs(pages - counted) > 0.005 * pages:
                counted = pages
                self.peak = max(self.peak, memory(kernel))

    def pytest_sessionfinish(self):
        self.ended.set()
        self.report.write_text(str(self.peak), encoding="utf-8")


def memory(process: psutil.Process, exact: bool = True) -> int:
    """Bytes that a process and its children hold; exactly: pages that they share counted once.

    Not by each page's part among all processes: that part shrinks when another kernel runs beside this one.
    """
    held, private = [0], 0
    try:
        for member in [process, *process.children(recursive=True)]:
            info = member.memory_full_info() if exact else member.memory_info()
            own = info.uss if exact else info.rss
            private += own
            held.append(info.rss - own)
    except psutil.Error:  # it ended meanwhile
        pass
    return private + max(held)
