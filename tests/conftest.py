"""What all tests share."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from dlscale.course.contents import paths

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in the background of a script: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
with contextlib.suppress(ImportError):  # Windows knows no such limit
    import resource

    # Some processes of tests end by an abort: what a system may keep of their memory would lie in the checkout.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the same numbers on a machine with an accelerator
os.environ["DLSCALE_CACHE"] = "off"  # tests see what a first run sees

# A first example may compile for a second: hypothesis must not call that flaky. In CI the examples are the same each
# time, so that a change is judged by itself; elsewhere new ones are tried.
settings.register_profile("dlscale", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("dlscale")


# One notebook is run cold and then in the browser by the same worker (pytest-xdist, --dist loadgroup), so that the
# browser finds what the cold run compiled.


@pytest.hookimpl(trylast=True)  # after pytest-xdist, which writes the group behind the name
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path.stem == "test_in_browser")
    grouped = [item for item in items if item.get_closest_marker("xdist_group")]
    if config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in grouped):
        raise pytest.UsageError("This pytest-xdist keeps no groups together under this pytest: take those of the lock.")


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> Path:
    """What the cold runs of this worker's notebooks compiled."""
    return tmp_path_factory.mktemp("programs")


def each_notebook(test):
    """Run the test for each notebook, as `path`, with the marker `notebook`, and for further notebooks `long`.

    All of one notebook runs in one worker.
    """
    folder, cases = Path(__file__).parent.parent / "notebooks", []
    for path in paths(folder):
        marks = [pytest.mark.xdist_group(path.stem), *[pytest.mark.long] * (path.parent != folder)]
        cases.append(pytest.param(path, id=path.stem, marks=marks))
    return pytest.mark.notebook(pytest.mark.parametrize("path", cases)(test))


def suggested_by(notebook: str):
    """What a notebook suggests, on its own cells: as costly as the notebook, and beside it, in one worker."""
    marks = [pytest.mark.notebook, pytest.mark.long, pytest.mark.xdist_group(f"suggested by {notebook}")]
    return lambda test: functools.reduce(lambda test, mark: mark(test), marks, test)


def _lacks(browser: str) -> None:
    """Skip what needs it, or fail where all must be shown."""
    reason = f"{browser} is not installed: no page was opened."
    if os.environ.get("DLSCALE_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def chromium():
    """This worker's browser."""
    import lab  # needs Playwright, which the smoke test of the oldest versions does without

    if not lab.find_chromium():
        _lacks("Chromium")
    with lab.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def firefox(tmp_path_factory):
    import lab

    if not any(map(shutil.which, lab.FIREFOXES)):
        _lacks("Firefox")
    with contextlib.closing(lab.Firefox(tmp_path_factory.mktemp("firefox"))) as page:
        yield page
