"""JupyterLab with a notebook open in Chromium, for tests and the slider benchmark; and a page in Firefox."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import websocket
from playwright.sync_api import Browser, Locator, Page, sync_playwright

FIREFOXES = ("firefox", "firefox-esr")
PREFERENCES = {"network.proxy.type": 1, "network.proxy.socks": "127.0.0.1", "network.proxy.socks_port": 9,
               "dom.max_script_run_time": 0, "toolkit.startup.max_resumed_crashes": -1}  # fmt: skip
KEYS = {"End": "\ue010", "ArrowDown": "\ue015"}
CHROMIUMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight stay in the page
}
PLACES = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_DATA_DIR": "data",
          "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
          "IPYTHONDIR": "ipython"}  # fmt: skip
MINUTES = 15  # to wait for an event that should come, on the slowest machine: after that, it never will
SCRIPT = Path(__file__).with_name("lab.js").read_text(encoding="utf-8")  # for the page


def find_chromium() -> str | None:
    """Return the path of Chromium or a relative of it: from the environment variable CHROMIUM, or from the PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUMS)), None)


def keep_programs(folder: Path) -> dict[str, str]:
    """The environment in which JAX keeps all that it compiles in `folder`, and finds it there or where it was moved."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",  # else the name of a program hangs on its folder's
    }


@contextlib.contextmanager
def server(folder: Path, variables: dict[str, str] | None = None) -> Iterator[str]:
    """Run JupyterLab on `folder`, with settings of its own, out of reach for other machines; yield its address.

    Its kernels get the environment `variables` in addition to those of this process.
    The address has a place for a notebook's name: `address.format("01_sgd.ipynb")`.
    Raises RuntimeError at the end, with what JupyterLab and the kernels said, if a kernel died.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as private:
        for name, value in SETTINGS.items():
            file = Path(private, "settings", "@jupyterlab", f"{name}.jupyterlab-settings")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(value), encoding="utf-8")
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0"]
        command += [f"--ServerApp.root_dir={folder}", "--LabApp.expose_app_in_browser=True"]
        command += ["--JupyterNotebookApp.expose_app_in_browser=True"]
        command += [f"--MappingKernelManager.kernel_info_timeout={60 * MINUTES}"]
        places = {name: os.path.join(private, place) for name, place in PLACES.items()}  # noqa: PTH118
        log = Path(private, "log")
        with log.open("w", encoding="utf-8") as said:
            given = {"env": os.environ | places | (variables or {}), "cwd": folder, "stdin": subprocess.DEVNULL}
            process = subprocess.Popen(command, stdout=said, stderr=said, **given)
        try:
            if not (listens := _said(process, log, r"(http://127\.0\.0\.1:\d+/)lab(\?token=\w+)\n")):
                raise RuntimeError(f"JupyterLab did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")
            yield f"{listens[1]}lab/tree/{{}}{listens[2]}&reset"
        finally:
            process.terminate()  # JupyterLab ends its kernels before itself
            _end(process, 20)  # where a kernel was just starting again, it never ends
            before, died, after = log.read_text(encoding="utf-8").partition("KernelRestarter: restarting")
            if died:
                raise RuntimeError(f"A kernel died:\n{before[-6000:]}{died}{after[:1000]}")


def _said(process: subprocess.Popen, log: Path, pattern: str) -> re.Match | None:
    """What a process says sooner or later in its log; None if it ended without."""
    for _ in range(600 * MINUTES):
        ended = process.poll() is not None
        if (found := re.search(pattern, log.read_text(encoding="utf-8", errors="replace"))) or ended:
            return found
        time.sleep(0.1)
    return None


def _end(process: subprocess.Popen, seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium without a window; once at a time in a process, since Playwright runs in it once."""
    options = {"executable_path": find_chromium(), "args": ["--disable-gpu", "--disable-quic"]}
    with sync_playwright() as playwright, playwright.chromium.launch(**options, timeout=60_000 * MINUTES) as browser:
        yield browser


class Firefox:
    """A page in Firefox, without a network, by WebDriver BiDi (w3.org/TR/webdriver-bidi): Playwright needs its own."""

    def __init__(self, folder: Path) -> None:
        program = next(filter(None, map(shutil.which, FIREFOXES)))
        preferences = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in PREFERENCES.items()]
        for attempt in map(str, range(5)):  # it may end before it listens
            (profile := folder / attempt).mkdir()
            (profile / "user.js").write_text("\n".join(preferences), encoding="utf-8")
            command = [program, "--headless", "--no-remote", "--remote-debugging-port=0", f"--profile={profile}"]
            with (log := folder / f"{attempt}.log").open("w") as said:
                self.process = subprocess.Popen(command, stdout=said, stderr=said)
            if listens := _said(self.process, log, r"BiDi listening on (ws://\S+)\n"):
                break
        self.socket = websocket.create_connection(f"{listens[1]}/session", 60 * MINUTES, suppress_origin=True)
        self.asked = 0
        self.ask("session.new", capabilities={})
        self.place = {"context": self.ask("browsingContext.getTree")["contexts"][0]["context"]}

    def ask(self, method: str, **params: object) -> dict:
        self.asked += 1
        self.socket.send(json.dumps({"id": self.asked, "method": method, "params": params}))
        while (answer := json.loads(self.socket.recv())).get("id") != self.asked:
            pass  # events
        assert answer["type"] == "success", answer
        return answer["result"]

    def open(self, address: str, width: int) -> None:
        self.ask("browsingContext.setViewport", **self.place, viewport={"width": width, "height": 768})
        self.ask("browsingContext.navigate", **self.place, url=address, wait="complete")

    def evaluate(self, expression: str) -> object:
        """The value of an expression, or of what it promises, by way of JSON."""
        asked = {"expression": f"(async () => JSON.stringify(await ({expression})))()", "target": self.place}
        answer = self.ask("script.evaluate", **asked, awaitPromise=True)
        assert answer["type"] == "success", answer
        return json.loads(answer["result"].get("value", "null"))

    def press(self, *keys: str) -> None:
        presses = [{"type": kind, "value": KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("input.performActions", **self.place, actions=[{"type": "key", "id": "keyboard", "actions": presses}])

    def close(self) -> None:
        with contextlib.suppress(websocket.WebSocketException, OSError):
            self.ask("browser.close")
        self.socket.close()
        _end(self.process, 60)


@contextlib.contextmanager
def page(browser: Browser) -> Iterator[Page]:
    """Open a page, in a context of its own, that knows `SCRIPT`."""
    with browser.new_context(viewport={"width": 1280, "height": 1600}) as context:
        context.set_default_timeout(5 * 60_000)  # ten times Playwright's own
        page = context.new_page()
        page.add_init_script(SCRIPT)
        page.on("dialog", lambda dialog: dialog.accept())
        yield page


@contextlib.contextmanager
def opened(page: Page, address: str) -> Iterator[OpenNotebook]:
    """Open the notebook, run all its cells, and shut its kernel down afterwards."""
    notebook = OpenNotebook(page, address)
    try:
        yield notebook
    finally:
        page.evaluate("() => dlscale.notebook().sessionContext.shutdown()")


class OpenNotebook:
    """A notebook in JupyterLab, all cells run."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        page.set_default_timeout(60_000 * MINUTES)
        page.goto(address, wait_until="domcontentloaded")
        page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
        page.wait_for_function("globalThis.jupyterapp?.shell.currentWidget?.sessionContext")
        page.evaluate("dlscale.watch()")
        page.evaluate("jupyterapp.shell.collapseLeft?.()")
        page.evaluate("minutes => dlscale.runAll(minutes)", MINUTES)

    def settle(self) -> None:
        """Wait until the kernel has answered all that was sent to it, and the page shows its pictures."""
        self.page.evaluate("minutes => dlscale.settled(minutes)", MINUTES)

    def errors(self) -> list[str]:
        """What went wrong so far: in cells, in callbacks, and widgets that could not be shown."""
        return self.page.evaluate("dlscale.errors()")

    def controls(self, kind: str) -> list[Locator]:
        return self.page.locator(f".dlscale-explorer {kind}").all()

    def slider(self, label: str) -> Locator:
        return self.page.get_by_role("slider", name=label, exact=True)

    def press(self, control: Locator, *keys: str) -> None:
        """Press keys at the control, one after the other, and wait until all has settled."""
        control.focus()
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def until(self, condition: str) -> None:
        """Wait until an expression in the page is true; it is looked at whenever something happened."""
        wait = f"minutes => dlscale.until(() => {condition}, () => 'until ' + {json.dumps(condition)}, minutes)"
        self.page.evaluate(wait, MINUTES)

    def pictures(self, control: Locator) -> list[str]:
        """The pictures in the control's cell, as they stand in the page."""
        return control.evaluate("control => dlscale.pictures(control)")
