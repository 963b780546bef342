"""JupyterLab on this machine with a notebook open in Chromium, for the browser tests and the slider benchmark."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Locator, Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
CHROMIUM_OPTIONS = [
    "--headless=new",
    "--no-sandbox",  # Chromium's own sandbox does not work for root and in many containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-renderer-backgrounding",
]
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin": {"autosave": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # cells out of sight stay in the page
}
START_SECONDS, RUN_SECONDS, CHANGE_SECONDS = 60, 300, 10

# In the page. A picture's `src` holds its PNG, and equal pixels give equal bytes: a new `src`, completely loaded, is in
# the next frame to be painted.
SCRIPT = """
window.dlscale = {
    notebook: () => window.jupyterapp?.shell.currentWidget,
    idle: () => dlscale.notebook()?.sessionContext?.session?.kernel?.status === 'idle',
    runAll: () => {
        dlscale.done = false;
        jupyterapp.commands.execute('notebook:run-all-cells').finally(() => { dlscale.done = true; });
    },
    last: '',
    calm: () => {
        const before = dlscale.last;
        dlscale.last = [...document.querySelectorAll('.jp-RenderedImage img')].map(image => image.src).join();
        return dlscale.idle() && dlscale.last === before;
    },
    cells: () => dlscale.notebook().content.model.toJSON().cells,
    pictures: control => [...control.closest('.jp-Cell').querySelectorAll('.jp-RenderedImage img')],
    // Resolves to the milliseconds from the next key press to the frame with another picture; null after the limit.
    change: (control, limit) => new Promise(resolve => {
        const source = image => image.complete && image.naturalWidth ? image.src : '';
        const before = dlscale.pictures(control).map(source).join();
        let pressed = null;
        control.ownerDocument.addEventListener('keydown', event => { pressed = event.timeStamp; },
                                               {capture: true, once: true});
        const start = performance.now();
        const frame = () => {
            const now = performance.now(), sources = dlscale.pictures(control).map(source);
            if (pressed !== null && sources.length && sources.every(Boolean) && sources.join() !== before)
                resolve(now - pressed);
            else if (now - start > limit) resolve(null);
            else requestAnimationFrame(frame);
        };
        requestAnimationFrame(frame);
    }),
};
"""


def find_chromium() -> str | None:
    """Return the path of Chromium or a relative of it: from the environment variable CHROMIUM, or from the PATH."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """Run JupyterLab on `folder`, with settings of its own, out of reach for other machines; yield its address.

    The address has a place for a notebook's name: `address.format("01_sgd.ipynb")`.
    """
    token = secrets.token_hex(16)
    with contextlib.ExitStack() as stack:
        private = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        for name, value in SETTINGS.items():
            file = private / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(value), encoding="utf-8")
        folders = {
            "JUPYTER_CONFIG_DIR": "config",
            "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTER_DATA_DIR": "data",
            "JUPYTERLAB_SETTINGS_DIR": "settings",
            "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
            "IPYTHONDIR": "ipython",
        }
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1"]
        command += [f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}"]
        command += [f"--IdentityProvider.token={token}", "--LabApp.expose_app_in_browser=True"]
        log = stack.enter_context((private / "log").open("w+", encoding="utf-8"))
        environment = os.environ | {name: str(private / place) for name, place in folders.items()}
        process = subprocess.Popen(
            command, env=environment, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_up(process, f"{address}/api/status?token={token}", private / "log")
            yield f"{address}/lab/tree/{{}}?token={token}&reset"
        finally:
            process.terminate()  # JupyterLab ends its kernels before itself
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_up(process: subprocess.Popen, address: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(address, timeout=5):
            return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"JupyterLab did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")
        time.sleep(0.2)


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """Start Chromium without a window and yield a page that knows `SCRIPT`."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=find_chromium(), args=CHROMIUM_OPTIONS)
        page = chromium.new_page(viewport={"width": 1280, "height": 1600})
        page.add_init_script(SCRIPT)
        page.on("dialog", lambda dialog: dialog.accept())
        try:
            yield page
        finally:
            chromium.close()


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
        page.goto(address, wait_until="domcontentloaded")
        page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=1000 * START_SECONDS)
        page.wait_for_function("dlscale.idle()", timeout=1000 * START_SECONDS)
        page.evaluate("() => { jupyterapp.shell.collapseLeft(); }")
        page.evaluate("() => dlscale.runAll()")
        page.wait_for_function("dlscale.done && dlscale.idle()", timeout=1000 * RUN_SECONDS)
        self.settle()

    def settle(self) -> None:
        """Wait until the kernel is idle and no picture has changed for a while."""
        calm = 0
        while calm < 3:
            self.page.wait_for_timeout(100)
            calm = calm + 1 if self.page.evaluate("dlscale.calm()") else 0

    def errors(self) -> list[str]:
        """What went wrong so far: in cells, in callbacks, and widgets that could not be shown."""
        found = [
            f"{output['ename']}: {output['evalue']}" if output["output_type"] == "error" else "".join(output["text"])
            for cell in self.page.evaluate("dlscale.cells()")
            for output in cell.get("outputs", [])
            if output["output_type"] == "error" or output.get("name") == "stderr"
        ]
        found += self.page.locator(".jp-Notebook [role=alert]").all_text_contents()
        return found + self.page.get_by_text("Error displaying widget").all_text_contents()

    def sliders(self) -> list[Locator]:
        return self.page.locator(".jp-OutputArea-output .widget-slider [role=slider]").all()

    def slider(self, label: str) -> Locator:
        return self.page.locator(".widget-slider").filter(has_text=label).get_by_role("slider")

    def menus(self) -> list[Locator]:
        return self.page.locator(".jp-OutputArea-output .widget-dropdown select").all()

    def numbers(self) -> list[Locator]:
        return self.page.locator(".jp-OutputArea-output .widget-text input[type=number]").all()

    def label(self, control: Locator) -> str:
        """The words beside the control."""
        return control.evaluate("control => control.closest('.widget-inline-hbox').querySelector('label').innerText")

    def press(self, control: Locator, key: str) -> float | None:
        """Press a key; return the milliseconds until another picture stood in the page, or None if none came."""
        control.focus()
        waiting = control.evaluate_handle(
            "(control, limit) => ({change: dlscale.change(control, limit)})", 1000 * CHANGE_SECONDS
        )
        self.page.keyboard.press(key)
        return waiting.evaluate("waiting => waiting.change")

    def pictures(self, control: Locator) -> list[str]:
        """The pictures in the control's cell, as they stand in the page."""
        return control.evaluate("control => dlscale.pictures(control).map(image => image.src)")
