"""The command `python -m dlscale measure`: a table of measurements as they are made, and CSV and plot of them."""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from tqdm import tqdm

from dlscale.collectives import measuring
from dlscale.collectives.measuring import Entry, Measurements, Row, Skipped, Workers
from dlscale.lab import checks, devices
from dlscale.lab.processes import PeerLost

ABOUT = """Time collective operations among workers and check their results, as nccl-tests and the OSU micro-benchmarks
do. Workers are emulated devices of this process (which say nothing about a network), processes of this machine
(--processes), or the processes that srun, mpirun or Kubernetes started with this very command."""
DETAILS = """The defaults (8, 64, 512, … bytes up to 2M) take about half a minute on a laptop. Sizes are in bytes, K, M
or G (of 1,024 each). Bandwidths are those of nccl-tests, of the median time; the CSV has seconds and bytes per second.
Where the launcher does not name the machine of process 0, set DLSCALE_COORDINATOR=HOST:PORT for all processes; without
a launcher also DLSCALE_PROCESSES, their number, and DLSCALE_PROCESS, from 0 on. Exit status: 0, or 1 if a result is
wrong or a process was lost, 2 for impossible options."""
EMULATED = "Emulated devices share this processor and its memory: these times say nothing about a network."
HEADINGS = ("collective", "algorithm", "size", "fastest [µs]", "median [µs]", "algorithm [MB/s]", "bus [MB/s]", "right")
FIELDS = (*Row._fields, "algorithm_bandwidth", "bus_bandwidth")


def options(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser("python -m dlscale measure", description=ABOUT, epilog=DETAILS)
    every = dict.fromkeys(name for names in measuring.ALGORITHMS.values() for name in names)
    names = lambda text: [name.strip() for name in text.split(",") if name.strip()]  # noqa: E731

    def size(text: str) -> int:
        try:
            return measuring.parse_size(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def add(name: str, meaning: str, **more: object) -> None:
        shown = " (default: %(default)s)" if more.get("default") is not None else ""
        parser.add_argument(name, help=meaning + shown, **more)

    add("--collectives", f"of {', '.join(measuring.ALGORITHMS)}", type=names, default="all_reduce", metavar="NAMES")
    add("--algorithms", f"of {', '.join(every)}; without it, all that the collective knows", type=names,
        metavar="NAMES")  # fmt: skip
    add("--min", "smallest size", type=size, default="8", metavar="SIZE")
    add("--max", "largest size, for example 256M", type=size, default="2M", metavar="SIZE")
    add("--factor", "between one size and the next", type=int, default=8, metavar="N")
    add("--repeats", "that are timed", type=int, default=10, metavar="N")
    add("--warmup", "repeats before them that are not", type=int, default=2, metavar="N")
    add("--dtype", f"of {', '.join(measuring.DTYPES)}", default="float32", metavar="NAME")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--devices", type=int, metavar="N", help="emulated devices (default: 8, or accelerators)")
    where.add_argument("--processes", type=int, metavar="N", help="start N processes on this machine")
    add("--csv", "write the rows to this file, each as soon as it is there", type=Path, metavar="FILE")
    add("--plot", "draw time against size, for example to times.png", type=Path, metavar="FILE")
    add("--timeout", "without a new row, after which a group is given up", type=float, default=120, metavar="SECONDS")
    return parser, parser.parse_args(arguments)


class Report:
    """Prints each row under its heading as soon as it is there, in the first process, and writes it to the CSV file."""

    def __init__(self, what: Measurements, path: Path | None, plot: Path | None) -> None:
        self.what, self.path, self.plot, self.title = what, path, plot, ""
        self.rows: list[Row] = []
        self.left_out: set[Skipped] = set()
        self.bar = self.file = None

    @staticmethod
    def line(cells: Sequence[str]) -> str:
        return "{:<14}  {:<18}  {:>9}  {:>12}  {:>12}  {:>16}  {:>11}  {:>5}".format(*cells)

    def write(self, cells: Sequence[object]) -> None:
        if self.file:
            csv.writer(self.file).writerow(cells)
            self.file.flush()  # a run that is cut off keeps what it has

    def tell(self, entry: Entry) -> None:
        if isinstance(entry, Workers):
            self.start(entry)
            return
        if isinstance(entry, Row):
            self.rows.append(entry)
        if not self.bar:  # the first process shows it
            return
        self.bar.clear()
        if isinstance(entry, Row):
            bandwidths = (entry.algorithm_bandwidth, entry.bus_bandwidth)
            self.write((*entry, *bandwidths))
            times = (f"{seconds * 1e6:.1f}" for seconds in (entry.fastest, entry.median))
            rates = (f"{rate / 1e6:.3f}" for rate in bandwidths)
            size, right = measuring.show_size(entry.bytes), "yes" if entry.right else "NO"
            print(self.line((entry.collective, entry.algorithm, size, *times, *rates, right)), flush=True)
        elif entry not in self.left_out:
            self.left_out.add(entry)
            print(entry, flush=True)
        self.bar.update()

    def start(self, workers: Workers) -> None:
        self.title = f"{workers.count} workers ({workers.kind}), {self.what.dtype}"
        self.title += f"\n{EMULATED}" if workers.kind == "emulated devices" else ""
        if workers.process == 0:
            self.file = self.path and self.path.open("w", encoding="utf-8", newline="")
            self.write(FIELDS)
            heading = self.line(HEADINGS)
            print(self.title, heading, "-" * len(heading), sep="\n", flush=True)
            self.bar = tqdm(total=len(self.what.entries(workers.count)), unit="row", leave=False, disable=None)

    def close(self) -> None:
        if self.bar:
            self.bar.close()
        if self.file:
            self.file.close()
        if self.plot and self.bar and self.rows:
            draw(self.rows, self.title).savefig(self.plot)


def draw(rows: Sequence[Row], title: str) -> Figure:
    """Median time against size, both logarithmic: a panel for each collective, a line for each algorithm."""
    collectives = list(dict.fromkeys(row.collective for row in rows))
    columns = min(len(collectives), 2)
    lines = math.ceil(len(collectives) / columns)
    figure = Figure(figsize=(7 * columns, 1 + 4.5 * lines), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize="medium")
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for panel in panels[len(collectives) :]:
        panel.remove()
    for panel, collective in zip(panels, collectives, strict=False):
        panel.set(title=collective, xlabel="size [bytes]", ylabel="median time [s]", xscale="log", yscale="log")
        panel.spines[["top", "right"]].set_visible(False)
        chosen = [row for row in rows if row.collective == collective]
        ends = []
        for algorithm in dict.fromkeys(row.algorithm for row in chosen):
            points = [(row.bytes, row.median) for row in chosen if row.algorithm == algorithm]
            (curve,) = panel.plot(*zip(*points, strict=True), marker="o", markersize=3)
            ends.append((points[-1], algorithm, curve.get_color()))
        bottom, top = panel.get_ylim()
        right, apart, height = max(row.bytes for row in chosen), (top / bottom) ** (1 / 20), 0.0
        for end, algorithm, color in sorted(ends, key=lambda entry: entry[0][1]):
            height = max(end[1], height * apart)
            leader = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "relpos": (0, 0.5), "shrinkA": 0}
            place = {"xytext": (right * 1.6, height), "va": "center", "annotation_clip": False}
            panel.annotate(algorithm, end, color=color, arrowprops=leader, **place)
    return figure


def main(arguments: Sequence[str] | None = None) -> int:
    parser, chosen = options(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by way of all `finally`, like Ctrl-C
    try:
        sizes = measuring.sizes(chosen.min, chosen.max, chosen.factor)
        what = Measurements(
            chosen.collectives, chosen.algorithms, sizes, chosen.repeats, chosen.warmup, chosen.dtype
        )  # fmt: skip
        checks.finite("timeout", chosen.timeout, low=1)
        for path in filter(None, (chosen.csv, chosen.plot)):
            if not path.absolute().parent.is_dir():
                raise ValueError(f"There is no folder {path.absolute().parent} for {path.name}.")
        if chosen.plot:
            checks.known("kind of picture", chosen.plot.suffix[1:].lower(), FigureCanvasBase.get_supported_filetypes())
        alone = chosen.processes is None and (chosen.devices is not None or not measuring.launched())
        mesh = measuring.local_mesh(chosen.devices) if alone else None
        if mesh and mesh.devices.flat[0].platform == "cpu":
            what.check_memory(mesh.size)
        with contextlib.closing(Report(what, chosen.csv, chosen.plot)) as report:
            if mesh:
                measuring.run(what, mesh, report.tell)
            else:
                measuring.processes(chosen.processes, chosen.timeout, report.tell, **asdict(what))
    except (ValueError, OSError, devices.DeviceError) as error:
        parser.error(str(error))
    except (PeerLost, jax.errors.JaxRuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 128 + signal.SIGINT
    right = all(row.right for row in report.rows)
    if not right:
        print("Not all results are right: see the last column.", file=sys.stderr)
    return int(not right)
