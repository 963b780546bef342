"""A plugin for the pytest that runs nbval: a cell that writes to stderr fails; memory is measured.

`--peak-report FILE` gets the most bytes that the kernel and its children held at once.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from dlscale.lab.processes import Peak, family

sys.modules.setdefault("rfc3987_syntax", None)  # takes seconds to import, and jsonschema does without

SAMPLE_SECONDS = 0.1


def pytest_addoption(parser):
    parser.addoption("--peak-report", type=Path)


def pytest_configure(config):
    config.pluginmanager.register(Watch(config.option.peak_report))


class Watch:
    def __init__(self, report: Path) -> None:
        self.report, self.peak, self.ended, self.thread = report, Peak(), threading.Event(), None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        if self.thread is None:
            kernel = item.parent.kernel.km.provisioner.pid
            self.thread = threading.Thread(target=self.watch, args=[kernel], daemon=True)
            self.thread.start()
        yield
        for output in item.test_outputs:
            if output.get("name") == "stderr":
                pytest.fail(f"wrote to stderr: {output.text}", pytrace=False)

    def watch(self, kernel: int) -> None:
        while not self.ended.wait(SAMPLE_SECONDS):
            self.peak.look(family(kernel))

    def pytest_sessionfinish(self):
        self.ended.set()
        self.report.write_text(str(self.peak.bytes), encoding="utf-8")
