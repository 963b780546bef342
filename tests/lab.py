"""JupyterLab on this machine with a notebook open in Chromium, for the browser tests and the slider benchmark.

Also a page in Firefox, for the book.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import websocket
from playwright.sync_api import Browser, Locator, Page, sync_playwright

FIREFOXES = ("firefox", "firefox-esr")
NO_NETWORK = {"network.proxy.type": 1, "network.proxy.http": "127.0.0.1", "network.proxy.http_port": 9,
              "network.proxy.ssl": "127.0.0.1", "network.proxy.ssl_port": 9}  # fmt: skip
KEYS = {"End": "\ue010", "Home": "\ue011", "ArrowRight": "\ue014", "ArrowDown": "\ue015", "Enter": "\ue007"}
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
MINUTES = 15  # to wait for an event that should come, on the slowest machine: after that, it never will

# In the page. Nothing is waited for by the clock: `until` looks again whenever the kernel has said something, the page
# has changed or a picture was loaded. The kernel has done what was asked when each message sent to it was followed by
# "idle"; a picture's `src` holds its PNG, so the page has followed when it shows what the notebook's model holds.
SCRIPT = """
// Messages between page and kernel can be delayed, each way, by a time that is 0 at first.
window.WebSocket = class extends WebSocket {
    send(data) {
        if (dlscale.delay) setTimeout(() => super.send(data), dlscale.delay);
        else super.send(data);
    }
    set onmessage(receive) {
        super.onmessage = event => dlscale.delay ? setTimeout(() => receive(event), dlscale.delay) : receive(event);
    }
};
window.dlscale = {
    delay: 0,
    asked: [],  // what explorers asked to show, and what came
    came: [],
    notebook: () => jupyterapp.shell.currentWidget,
    kernel: () => dlscale.notebook().sessionContext.session.kernel,
    events: new EventTarget(),
    happened: () => dlscale.events.dispatchEvent(new Event('happened')),
    until: (condition, what, minutes) => new Promise((resolve, reject) => {
        const end = (settle, value) => {
            clearTimeout(timer);
            dlscale.events.removeEventListener('happened', look);
            settle(value);
        };
        const look = () => {
            if (dlscale.died) end(reject, new Error('the kernel died'));
            else if (condition()) end(resolve);
        };
        const timer = setTimeout(() => end(reject, new Error(`waited ${minutes} minutes ${what()}`)), 60000 * minutes);
        dlscale.events.addEventListener('happened', look);
        look();
    }),
    watch: async () => {
        await dlscale.notebook().sessionContext.ready;
        const kernel = dlscale.kernel(), idle = msg => msg.content.execution_state === 'idle';
        await kernel.info;
        dlscale.unanswered = new Set();
        kernel.anyMessage.connect((_, {msg, direction}) => {
            if (direction === 'send' && msg.channel === 'shell') dlscale.unanswered.add(msg.header.msg_id);
            const at = msg.content.data?.content?.at;
            if (at) dlscale[direction === 'send' ? 'asked' : 'came'].push(JSON.stringify(at));
        });
        kernel.iopubMessage.connect((_, msg) => {
            if (msg.header.msg_type === 'status' && idle(msg)) dlscale.unanswered.delete(msg.parent_header.msg_id);
            dlscale.happened();
        });
        kernel.statusChanged.connect((_, status) => {
            dlscale.died = ['dead', 'autorestarting'].includes(status);
            dlscale.happened();
        });
        const watched = ['src', 'data-waits', 'hidden'];
        const page = {subtree: true, childList: true, attributes: true, attributeFilter: watched};
        new MutationObserver(dlscale.happened).observe(dlscale.notebook().node, page);
        dlscale.notebook().node.addEventListener('load', dlscale.happened, {capture: true});
    },
    runAll: async minutes => {
        let ran = false;
        jupyterapp.commands.execute('notebook:run-all-cells').finally(() => { ran = true; dlscale.happened(); });
        await dlscale.until(() => ran, () => 'for all cells to run', minutes);
        await dlscale.settled(minutes);
    },
    outputs: () => [...dlscale.notebook().content.model.cells].flatMap(cell => cell.outputs?.toJSON() ?? []),
    images: node => [...node.querySelectorAll('.jp-RenderedImage img, .dlscale-explorer img')],
    explorers: () => [...dlscale.notebook().node.querySelectorAll('.dlscale-explorer')],
    shown: () => {
        const pictures = dlscale.outputs().filter(output => output.data?.['image/png']);
        const images = dlscale.images(dlscale.notebook().node).filter(image => !image.closest('.jupyter-widgets'));
        // an explorer's picture comes with its sentence; where outputs live apart, it is a widget
        const text = output => output.data?.['text/plain'] ?? '';
        const apart = dlscale.outputs().filter(output => /dlscale.page.widgets.Page/.test(text(output))).length;
        const explorers = pictures.filter(text).length + apart;
        return images.length === pictures.length + apart && images.every(image => image.complete)
            && dlscale.explorers().length === explorers
            && dlscale.explorers().every(explorer => explorer.getAttribute('data-waits') === 'false');
    },
    frame: () => new Promise(requestAnimationFrame),
    lacking: () => {
        const waits = dlscale.explorers().filter(explorer => explorer.getAttribute('data-waits') !== 'false');
        const pictures = dlscale.images(dlscale.notebook().node).filter(image => !image.complete).length;
        return `for ${dlscale.unanswered.size} answers of the kernel, ${pictures} pictures to load and the explorers `
            + `[${waits.map(explorer => explorer.innerText.replace(/\\s+/g, ' ').slice(0, 300)).join('; ')}]`;
    },
    settled: async minutes => {
        const done = () => dlscale.unanswered.size === 0 && dlscale.shown();
        do {
            await dlscale.until(done, dlscale.lacking, minutes);
            await dlscale.frame();
            await dlscale.frame();  // captions are drawn, and a control that waited for the kernel has spoken
        } while (!done());
    },
    errors: () => {
        const bad = output => output.output_type === 'error' || output.name === 'stderr';
        const text = output => output.text ?? `${output.ename}: ${output.evalue}`;
        const alerts = [...dlscale.notebook().node.querySelectorAll('[role=alert]:not([hidden])')];
        const lost = dlscale.notebook().node.textContent.match(/Error displaying widget.{0,200}/g) ?? [];
        return [...dlscale.outputs().filter(bad).map(text), ...alerts.map(alert => alert.innerText), ...lost];
    },
    pictures: control => Promise.all(dlscale.images(control.closest('.jp-Cell')).map(async image =>
        btoa(Array.from(await dlscale.bytes(image), byte => String.fromCharCode(byte)).join('')))),
    bytes: async image => new Uint8Array(await (await fetch(image.src)).arrayBuffer()),
    // Resolves to the milliseconds from the next key press to the frame with another picture; null after the limit.
    change: (control, limit) => new Promise(resolve => {
        const images = () => dlscale.images(control.closest('.jp-Cell'));
        const source = image => image.complete && image.naturalWidth ? image.src : '';
        const before = images().map(source).join();
        let pressed = null;
        control.ownerDocument.addEventListener('keydown', event => { pressed = event.timeStamp; },
                                               {capture: true, once: true});
        const start = performance.now();
        const frame = () => {
            const now = performance.now(), sources = images().map(source);
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
        command += ["--JupyterNotebookApp.expose_app_in_browser=True"]
        log = stack.enter_context((private / "log").open("w+", encoding="utf-8"))
        environment = os.environ | {name: str(private / place) for name, place in folders.items()} | (variables or {})
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
            before, died, after = (private / "log").read_text(encoding="utf-8").partition("KernelRestarter: restarting")
            if died:
                raise RuntimeError(f"A kernel died:\n{before[-6000:]}{died}{after[:1000]}")


def _wait_until_up(process: subprocess.Popen, address: str, log: Path) -> None:
    end = time.monotonic() + 60 * MINUTES
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=60):
            return
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"JupyterLab did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")
        time.sleep(0.2)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Start Chromium without a window; once at a time in a process, since Playwright runs in it once."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=CHROMIUM_OPTIONS)
        try:
            yield browser
        finally:
            browser.close()


class Firefox:
    """A page in Firefox, without a network, by WebDriver BiDi (w3.org/TR/webdriver-bidi): Playwright needs its own."""

    def __init__(self, profile: Path) -> None:
        prefs = "".join(f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in NO_NETWORK.items())
        (profile / "user.js").write_text(prefs, encoding="utf-8")
        program = next(filter(None, map(shutil.which, FIREFOXES)))
        command = [program, "--headless", "--no-remote", "--remote-debugging-port=0", f"--profile={profile}"]
        for _ in range(3):  # with a new profile it may end before it listens
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            said = [re.search(r"BiDi listening on (ws://\S+)|$", line)[1] for line in self._first_words()]
            if said and said[-1]:
                break
        self.socket = websocket.create_connection(f"{said[-1]}/session", 60 * MINUTES, suppress_origin=True)
        self.reader = threading.Thread(target=self.process.stderr.read, daemon=True)  # or it would wait for one
        self.reader.start()
        self.asked = 0
        self.ask("session.new", capabilities={})
        self.place = {"context": self.ask("browsingContext.getTree")["contexts"][0]["context"]}

    def _first_words(self) -> Iterator[str]:
        """What it says until it listens, or ends."""
        for line in self.process.stderr:
            yield line
            if "BiDi listening" in line:
                return

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
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.reader.join()
        self.process.stderr.close()


@contextlib.contextmanager
def page(browser: Browser) -> Iterator[Page]:
    """Open a page, in a context of its own, that knows `SCRIPT`."""
    with browser.new_context(viewport={"width": 1280, "height": 1600}) as context:
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
        page.evaluate("dlscale.watch()")
        page.evaluate("jupyterapp.shell.collapseLeft?.()")
        page.evaluate("minutes => dlscale.runAll(minutes)", MINUTES)

    def settle(self) -> None:
        """Wait until the kernel has answered all that was sent to it, and the page shows its pictures."""
        self.page.evaluate("minutes => dlscale.settled(minutes)", MINUTES)

    def errors(self) -> list[str]:
        """What went wrong so far: in cells, in callbacks, and widgets that could not be shown."""
        return self.page.evaluate("dlscale.errors()")

    def sliders(self) -> list[Locator]:
        return self.page.locator(".dlscale-explorer input[type=range]").all()

    def slider(self, label: str) -> Locator:
        return self.page.get_by_role("slider", name=label, exact=True)

    def menus(self) -> list[Locator]:
        return self.page.locator(".dlscale-explorer select").all()

    def numbers(self) -> list[Locator]:
        return self.page.locator(".dlscale-explorer input[type=number]").all()

    def players(self) -> list[Locator]:
        return self.page.locator(".dlscale-explorer button").all()

    def press(self, control: Locator, *keys: str) -> None:
        """Press keys at the control, one after the other, and wait until all has settled."""
        control.focus()
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    @contextlib.contextmanager
    def happens(self, control: Locator, attribute: str, value: str) -> Iterator[None]:
        """Wait until the control's attribute was changed and then came to have the value."""
        wait = """([control, attribute, value]) => ({done: new Promise(resolve => new MutationObserver(() =>
            control.getAttribute(attribute) === value && resolve())
            .observe(control, {attributeFilter: [attribute]}))})"""
        waiting = self.page.evaluate_handle(wait, [control.element_handle(), attribute, value])
        yield
        waiting.evaluate("waiting => waiting.done")

    def latency(self, control: Locator, key: str, limit: float = 10, settle: bool = True) -> float | None:
        """Press a key; return the milliseconds until another picture stood in the page, None if none came in `limit` s.

        All is settled afterwards, unless the next key is to come at once.
        """
        control.focus()
        waiting = control.evaluate_handle(
            "(control, limit) => ({change: dlscale.change(control, limit)})", 1000 * limit
        )
        self.page.keyboard.press(key)
        milliseconds = waiting.evaluate("waiting => waiting.change")
        if settle:
            self.settle()
        return milliseconds

    def until(self, condition: str) -> None:
        """Wait until an expression in the page is true; it is looked at whenever something happened."""
        wait = f"minutes => dlscale.until(() => {condition}, () => 'until ' + {json.dumps(condition)}, minutes)"
        self.page.evaluate(wait, MINUTES)

    def pictures(self, control: Locator) -> list[str]:
        """The pictures in the control's cell, as they stand in the page."""
        return control.evaluate("control => dlscale.pictures(control)")
