"""The command `python -m dlscale measure`: a table of measurements as they are made, and CSV of them."""

import argparse
import contextlib
import csv
import functools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlscale.collectives import measuring
from dlscale.collectives.measuring import Entry, Measurements

ABOUT = """Time all-reduces among workers and check their results, as nccl-tests and the OSU micro-benchmarks do.
Workers are emulated devices of this process (which say nothing about a network), processes of this machine
(--processes), or the processes that srun, mpirun or Kubernetes started with this very command."""
DETAILS = """Example: python -m dlscale measure --processes 4 --max 1M --csv rows.csv. The defaults take about half a
minute on a laptop. Sizes are in bytes, K, M or G (of 1,024 each); the CSV has seconds and bytes per second.
Where the launcher does not name the machine of process 0, set DLSCALE_COORDINATOR=HOST:PORT for all processes; without
a launcher also DLSCALE_PROCESSES, their number, and DLSCALE_PROCESS, from 0 on.
Exit status: 0; 1 if a result is wrong or a process was lost; 2 for impossible options."""
EMULATED = "Emulated devices share this processor and its memory: these times say nothing about a network."
HEADINGS = ("algorithm", "size", "fastest [µs]", "median [µs]", "algorithm [MB/s]", "bus [MB/s]", "right")
LINE = "{:<18}  {:>10}  {:>12}  {:>12}  {:>16}  {:>11}  {:>5}"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m dlscale measure", description=ABOUT, epilog=DETAILS)

    def add(name: str, meaning: str, default: object, **more: object) -> None:
        parser.add_argument(name, help=f"{meaning} (default: %(default)s)", default=default, **more)

    known = {"default": measuring.ALGORITHMS, "help": f"of {', '.join(measuring.ALGORITHMS)} (default: all)"}
    parser.add_argument("--algorithms", type=lambda text: text.split(","), metavar="NAMES", **known)
    add("--min", "smallest size; the next one is 8 times as large", "8", metavar="SIZE")
    add("--max", "largest size, for example 256M", "2M", metavar="SIZE")
    add("--repeats", "that are timed", 10, type=int, metavar="N")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--devices", type=int, metavar="N", help="emulated devices (default: 8, or accelerators)")
    where.add_argument("--processes", type=int, metavar="N", help="start N processes on this machine")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="write each row to this file, too, as soon as it is there"
    )
    add("--timeout", "without a new row, after which a group is given up", 120, type=float, metavar="SECONDS")
    return parser


def start(chosen: argparse.Namespace) -> Iterator[Entry]:
    """The entries as they come. Raises ValueError for impossible options."""
    low, high = map(measuring.parse_size, (chosen.min, chosen.max))
    if low > high:
        raise ValueError(f"The smallest size, {chosen.min}, is above the largest, {chosen.max}.")
    sizes = [low * 8**k for k in range(high.bit_length()) if low * 8**k <= high]
    what = Measurements(chosen.algorithms, sizes, chosen.repeats)
    if chosen.processes is None and (chosen.devices is not None or not measuring.launched()):
        return measuring.alone(what, chosen.devices)
    return measuring.group(what, chosen.processes, chosen.timeout)


def report(entries: Iterator[Entry], table: Path | None) -> int:
    """Print and write each row as soon as it is there, in the first process; 1 if a result is wrong, or 0."""
    workers, wrong = next(entries), 0
    first = workers.process == 0
    show = functools.partial(print, flush=True) if first else lambda line: None
    show(f"{workers.count} workers ({workers.kind})" + f"\n{EMULATED}" * (workers.kind == measuring.DEVICES))
    show((heading := LINE.format(*HEADINGS)) + "\n" + "-" * len(heading))
    with Path(table if table and first else os.devnull).open("w", buffering=1, encoding="utf-8", newline="") as file:
        write = csv.writer(file).writerow
        write((*measuring.Row._fields, "algorithm_bandwidth", "bus_bandwidth"))
        for row in entries:
            write((*row, *row.bandwidths()))
            times = (f"{seconds * 1e6:.1f}" for seconds in (row.fastest, row.median))
            rates = (f"{rate / 1e6:.3f}" for rate in row.bandwidths())
            show(LINE.format(row.algorithm, row.bytes, *times, *rates, "yes" if row.right else "NO"))
            wrong = wrong or int(not row.right)
    if wrong:
        print("Not all results are right: see the last column.", file=sys.stderr)
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()

    def task() -> int:
        chosen = parser.parse_args(arguments)
        with contextlib.closing(start(chosen)) as entries:
            return report(entries, chosen.csv)

    return measuring.status(parser, task)
