"""The command `python -m dlscale measure`: a table of measurements as they are made, and CSV of them."""

import argparse
import contextlib
import csv
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from dlscale.collectives import measuring
from dlscale.collectives.measuring import Entry, Measurements, Row
from dlscale.lab import devices
from dlscale.lab.processes import PeerLost

ABOUT = """Time collective operations among workers and check their results, as nccl-tests and the OSU micro-benchmarks
do. Workers are emulated devices of this process (which say nothing about a network), processes of this machine
(--processes), or the processes that srun, mpirun or Kubernetes started with this very command."""
DETAILS = """Example: python -m dlscale measure --processes 4 --max 1M --csv rows.csv. The defaults (8, 64, 512, …
bytes up to 2M) take about half a minute on a laptop. Sizes are in bytes, K, M or G (of 1,024 each). Bandwidths are
those of nccl-tests, of the median time; the CSV has seconds and bytes per second. Where the launcher does not name
the machine of process 0, set DLSCALE_COORDINATOR=HOST:PORT for all processes; without a launcher also
DLSCALE_PROCESSES, their number, and DLSCALE_PROCESS, from 0 on. Exit status: 0, or 1 if a result is wrong or a
process was lost, 2 for impossible options."""
EMULATED = "Emulated devices share this processor and its memory: these times say nothing about a network."
HEADINGS = ("collective", "algorithm", "size", "fastest [µs]", "median [µs]", "algorithm [MB/s]", "bus [MB/s]", "right")
LINE = "{:<14}  {:<18}  {:>9}  {:>12}  {:>12}  {:>16}  {:>11}  {:>5}"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m dlscale measure", description=ABOUT, epilog=DETAILS)
    every = dict.fromkeys(name for names in measuring.ALGORITHMS.values() for name in names)
    names = re.compile(r"[^,\s]+").findall

    def add(name: str, meaning: str, default: object = None, **more: object) -> None:
        shown = "" if default is None else " (default: %(default)s)"
        parser.add_argument(name, help=meaning + shown, default=default, **more)

    add("--collectives", f"of {', '.join(measuring.ALGORITHMS)}", "all_reduce", type=names, metavar="NAMES")
    add("--algorithms", f"of {', '.join(every)}; without it, all that it knows", type=names, metavar="NAMES")
    add("--min", "smallest size", "8", metavar="SIZE")
    add("--max", "largest size, for example 256M", "2M", metavar="SIZE")
    add("--factor", "between one size and the next", 8, type=int, metavar="N")
    add("--repeats", "that are timed", 10, type=int, metavar="N")
    add("--warmup", "repeats before them that are not", 2, type=int, metavar="N")
    add("--dtype", f"of {', '.join(measuring.DTYPES)}", "float32", metavar="NAME")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--devices", type=int, metavar="N", help="emulated devices (default: 8, or accelerators)")
    where.add_argument("--processes", type=int, metavar="N", help="start N processes on this machine")
    add("--csv", "write the rows to this file, each as soon as it is there", type=Path, metavar="FILE")
    add("--timeout", "without a new row, after which a group is given up", 120, type=float, metavar="SECONDS")
    return parser


def start(chosen: argparse.Namespace) -> tuple[Measurements, Iterator[Entry]]:
    """What is to be measured, and its entries as they come. Raises ValueError for impossible options."""
    sizes = measuring.sizes(*map(measuring.parse_size, (chosen.min, chosen.max)), chosen.factor)
    what = Measurements(chosen.collectives, chosen.algorithms, sizes, chosen.repeats, chosen.warmup, chosen.dtype)
    if chosen.csv and not chosen.csv.absolute().parent.is_dir():
        raise ValueError(f"There is no folder {chosen.csv.absolute().parent} for {chosen.csv.name}.")
    if chosen.processes is None and (chosen.devices is not None or not measuring.launched()):
        return what, measuring.alone(what, chosen.devices)
    return what, measuring.group(what, chosen.processes, chosen.timeout)


def report(what: Measurements, entries: Iterator[Entry], table: Path | None) -> list[Row]:
    """Print each row under its heading as soon as it is there, in the first process, and write it to the files."""
    workers, rows, left_out = next(entries), [], set()
    if workers.process > 0:
        return [entry for entry in entries if isinstance(entry, Row)]
    warning = f"\n{EMULATED}" * (workers.kind == measuring.DEVICES)
    title = f"{workers.count} workers ({workers.kind}), {what.dtype}{warning}"
    # by lines: a run that is cut off keeps what it has
    with (table or Path(os.devnull)).open("w", buffering=1, encoding="utf-8", newline="") as file:
        write = csv.writer(file).writerow
        write((*Row._fields, "algorithm_bandwidth", "bus_bandwidth"))
        print(title, heading := LINE.format(*HEADINGS), "-" * len(heading), sep="\n", flush=True)
        for entry in entries:
            if isinstance(entry, Row):
                rows.append(entry)
                write((*entry, *(bandwidths := (entry.algorithm_bandwidth, entry.bus_bandwidth))))
                times = (f"{seconds * 1e6:.1f}" for seconds in (entry.fastest, entry.median))
                rates = (f"{rate / 1e6:.3f}" for rate in bandwidths)
                size, right = measuring.show_size(entry.bytes), "yes" if entry.right else "NO"
                print(LINE.format(*entry[:2], size, *times, *rates, right), flush=True)
            elif entry not in left_out:
                left_out.add(entry)
                print(entry, flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by way of all `finally`, like Ctrl-C
    try:
        what, entries = start(chosen)
        with contextlib.closing(entries):
            rows = report(what, entries, chosen.csv)
    except (ValueError, OSError, devices.DeviceError) as error:
        parser.error(str(error))
    except (PeerLost, jax.errors.JaxRuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 128 + signal.SIGINT
    if wrong := not all(row.right for row in rows):
        print("Not all results are right: see the last column.", file=sys.stderr)
    return int(wrong)
