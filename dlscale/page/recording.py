"""The button that runs a recorded experiment again."""

import threading
from pathlib import Path

import ipywidgets
from IPython.display import display

from dlscale.course import records
from dlscale.lab import devices


class RunStopped(Exception):
    """The reader stopped a run."""


def record_button(chosen: records.Experiment, folder: Path | None = None) -> None:
    """Show a button that runs the whole and renews the record; pressed again, it stops and keeps what it has."""
    stored = records.read(chosen.id, folder)
    minutes = sum(trial.seconds for trial in stored.trials) / 60 / devices.cores()
    label = f"Run all {len(stored.trials):,} trials again"
    start = ipywidgets.Button(description=label, tooltip=label, layout={"width": "max-content"})
    status = ipywidgets.HTML(f"<p>About {minutes:.0f} minutes here. The record is replaced when all is done.</p>")
    stop, running = threading.Event(), threading.Lock()

    def tell(done: int, planned: int) -> None:
        status.value = f'<p role="status">{done:,} of {planned:,} trials planned so far</p>'
        if stop.is_set():
            raise RunStopped

    def work() -> None:
        with running:
            start.description = "Stop"
            try:
                records.execute(chosen, folder, tell)
                text = "Done. Run the notebook again to see the new record."
            except RunStopped:
                text = "Stopped. The button goes on from here."
            except Exception as error:  # in a thread it would vanish without a trace
                text = f"It failed: {type(error).__name__}: {error}"
            start.description, status.value = label, f'<p role="status">{text}</p>'
            stop.clear()

    def pressed(_: ipywidgets.Button) -> None:
        if running.locked():
            stop.set()
        else:
            threading.Thread(target=work, daemon=True).start()

    start.on_click(pressed)
    display(ipywidgets.VBox([start, status]))
