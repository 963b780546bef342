"""The measuring tool behind `python -m dlscale measure`: times, bandwidths and correctness of collectives.

Sizes and bandwidths are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so that the numbers can
be laid beside its own: a size is what one worker has in the end or, for scatter, what the root has at the beginning.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import queue
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dlscale import collectives
from dlscale.lab import checks, devices

ALGORITHMS = {  # "xla" is JAX's own; those with one root know one algorithm, a binomial tree
    "all_reduce": ("xla", *collectives.ALGORITHMS),
    "all_gather": ("xla", "ring", "bruck"),
    "reduce_scatter": ("xla", "ring", "halving"),
    "all_to_all": ("xla", "pairwise", "bruck"),
    **dict.fromkeys(("broadcast", "reduce", "scatter", "gather"), ("tree",)),
}
XLA = {
    "all_reduce": lax.psum,
    "all_gather": lax.all_gather,
    "reduce_scatter": lax.psum_scatter,
    "all_to_all": functools.partial(lax.all_to_all, split_axis=0, concat_axis=0),
}
WHOLE = ("all_reduce", "broadcast", "reduce")  # every worker gives an array of the full size
IN_PARTS = ("scatter", "reduce_scatter", "all_to_all")  # every worker gives a part for each other
DTYPES = ("float32", "float16", "bfloat16", "int32", "int8", "uint8")
PERIOD = 1021  # a prime, so that no chunk of the data looks like its neighbour
EMULATED = 8  # devices, unless another number is asked for
COPIES = 7  # of a worker's data at the same time: input, result, what NumPy expects, and those on the way
UNITS = ("", "K", "M", "G")
START = 60  # seconds in which processes have found each other, whatever the time limit of a measurement
TICK = 0.1  # seconds between two looks at the time limit
GRACE = 0.5  # seconds in which the death that was the cause becomes visible beside those that it caused
ATTEMPTS = 3  # to find a port that nobody else takes at the same moment


class Failed(RuntimeError):
    """A group of processes that did not come to its end: the message says who and why, `rows` is what it measured."""

    def __init__(self, message: str, rows: list[Row]) -> None:
        super().__init__(message)
        self.rows = rows


class _PortTaken(Exception):
    pass


class Row(NamedTuple):
    """One measurement. `fastest` and `median` in seconds: a repeat lasts until the last worker has its result.

    `right`: the results of all workers equal NumPy's; the data are whole numbers, whose sums are exact in any order.
    """

    collective: str
    algorithm: str
    workers: int
    processes: int
    bytes: int
    dtype: str
    fastest: float
    median: float
    right: bool

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes a second: the size over the median time."""
        return self.bytes / self.median

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second through each worker's cable, for an operation that sends no more than it must.

        The algorithm bandwidth times 2 (P - 1) / P for an all-reduce, 1 for broadcast and reduce, (P - 1) / P for
        others: it can be compared with the cable, whatever the number of workers and the operation (nccl-tests,
        doc/PERFORMANCE.md).
        """
        share = (self.workers - 1) / self.workers
        factors = {"all_reduce": 2 * share, "broadcast": 1, "reduce": 1}
        return factors.get(self.collective, share) * self.algorithm_bandwidth


class Skipped(NamedTuple):
    """A measurement that an algorithm cannot serve, and its reason."""

    collective: str
    algorithm: str
    reason: str

    def __str__(self) -> str:
        return f"{self.collective} by {self.algorithm} is left out: {self.reason}"


Tell = Callable[[Row | Skipped], object]


def parse_size(text: str) -> int:
    """Bytes of "8", "4K", "256M", "1G" (of 1,024 each, as in nccl-tests), also with B or iB. Raises ValueError."""
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if not found or not int(found[1]):
        raise ValueError(f"A size is a number of bytes such as 8, 4K, 256M or 1G, unlike {text!r}.")
    return int(found[1]) * 1024 ** UNITS.index(found[2].upper())


def show_size(size: int) -> str:
    """What `parse_size` reads: 8, 4K, 256M; a number of bytes that is no whole number of a unit stays as it is."""
    power = next(power for power in (3, 2, 1, 0) if size % 1024**power == 0 and size >= 1024**power)
    return f"{size // 1024**power}{UNITS[power]}"


def sizes(low: int = 8, high: int = 2 * 2**20, factor: int = 8) -> tuple[int, ...]:
    """low, low · factor, … up to high, in bytes. Raises ValueError if there is none."""
    checks.whole("min", low)
    checks.whole("factor", factor, low=2)
    if low > high:
        raise ValueError(f"The smallest size, {show_size(low)}, is above the largest, {show_size(high)}.")
    return tuple(low * factor**k for k in range(high.bit_length()) if low * factor**k <= high)


@dataclass(frozen=True)
class Plan:
    """What to measure: each collective with those of the algorithms that it knows (None: all), at each size in bytes.

    Each is run `warmup` and then `repeats` times. Raises ValueError for what is unknown or impossible.
    """

    collectives: Sequence[str] = ("all_reduce",)
    algorithms: Sequence[str] | None = None
    sizes: Sequence[int] = sizes()
    repeats: int = 10
    warmup: int = 2
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for field in ("collectives", "sizes"):
            object.__setattr__(self, field, tuple(getattr(self, field)))  # of arrays and ranges too
        for collective in self.collectives:
            checks.known("collective", collective, ALGORITHMS)
        every = dict.fromkeys(name for collective in self.collectives for name in ALGORITHMS[collective])
        for algorithm in self.algorithms or ():
            checks.known("algorithm", algorithm, every)
        for collective in self.collectives:
            if not self.served(collective):
                known = ", ".join(ALGORITHMS[collective])
                raise ValueError(f"None of the algorithms asked for does {collective}: it is done by {known}.")
        for size in self.sizes:
            checks.whole("A size", size)
        if not self.collectives or not self.sizes:
            raise ValueError("A plan needs at least one collective and one size.")
        checks.whole("repeats", self.repeats)
        checks.whole("warmup", self.warmup, low=0)
        checks.known("dtype", self.dtype, DTYPES)

    def served(self, collective: str) -> list[str]:
        """The algorithms to measure of this collective."""
        return [name for name in ALGORITHMS[collective] if self.algorithms is None or name in self.algorithms]

    def entries(self, workers: int) -> list[tuple[str, str, int]]:
        """(collective, algorithm, size) of all measurements, sizes rounded up to what can be split among workers."""
        return list(dict.fromkeys(
            (collective, algorithm, _count(collective, size, self.dtype, workers)[1])
            for collective in self.collectives for size in sorted(self.sizes) for algorithm in self.served(collective)
        ))  # fmt: skip

    def check_memory(self, workers: int) -> None:
        """Raise ValueError if the largest size needs more memory than is free, with so many workers on this machine."""
        largest, free = max(self.sizes), devices.memory().available
        if (needed := largest * workers * COPIES) > free:
            raise ValueError(
                f"{show_size(largest)}B with {workers} workers on one machine need about {needed / 2**30:.1f} GiB, "
                f"but {free / 2**30:.1f} GiB are free: choose a smaller largest size or fewer workers."
            )


def _count(collective: str, size: int, dtype: str, workers: int) -> tuple[int, int]:
    """Elements of a worker's array, or of one of its parts, and the bytes that they make in total."""
    unit = jnp.dtype(dtype).itemsize * (1 if collective in WHOLE else workers)
    count = math.ceil(size / unit)
    return count, count * unit


# Measuring, in a process that sees all workers or belongs to a group that does


def measure(
    collective: str, algorithm: str, size: int, repeats: int = 10, warmup: int = 2, dtype: str = "float32",
    mesh: Mesh | None = None,
) -> Row:  # fmt: skip
    """Time a collective among the workers of a one-dimensional mesh (default: all devices).

    `size` in bytes is rounded up to what can be split among them. In a group of processes all must call it alike.
    Raises ValueError for what is unknown, and with the algorithm's own words if it cannot serve so many workers.
    """
    Plan((collective,), (algorithm,), (size,), repeats, warmup, dtype)
    measurement = _Measurement(collective, algorithm, size, dtype, mesh or devices.mesh())
    return measurement.take(repeats, warmup)


class _Measurement:
    """A compiled collective with its data."""

    def __init__(self, collective: str, algorithm: str, size: int, dtype: str, mesh: Mesh) -> None:
        """Raises ValueError for workers that the algorithm cannot serve."""
        self.name, self.workers, self.dtype = (collective, algorithm), mesh.size, jnp.dtype(dtype)
        count, self.bytes = _count(collective, size, dtype, mesh.size)
        self.shape = (mesh.size, count) if collective in IN_PARTS else (count,)
        axis_name, spec = mesh.axis_names[0], PartitionSpec(mesh.axis_names[0])
        self.x = jax.make_array_from_callback(
            (mesh.size, *self.shape), NamedSharding(mesh, spec), lambda index: self.values([index[0].start or 0])[None]
        )

        def work(x: jax.Array) -> jax.Array:
            if algorithm == "xla":
                return XLA[collective](x[0], axis_name)[None]
            options = {} if algorithm == "tree" and collective != "all_reduce" else {"algorithm": algorithm}
            return collectives.COLLECTIVES[collective](x[0], axis_name, **options)[None]

        program = jax.jit(jax.shard_map(work, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        self.run = program.lower(self.x).compile()

    def values(self, ranks: Sequence[int]) -> np.ndarray:
        """The sum of these workers' inputs: whole numbers, small enough to be exact in every dtype."""
        highest = max(2, min(5, 256 // self.workers))
        tables = (np.arange(1, PERIOD + 1) * (rank + 1) % PERIOD % highest for rank in ranks)
        return np.resize(sum(tables, np.zeros(PERIOD, int)).astype(self.dtype), self.shape)

    def take(self, repeats: int, warmup: int) -> Row:
        """Run and time it. Processes start each repeat together, and the slowest of them counts."""
        seconds = []
        for _ in range(warmup + repeats):
            _of_all_processes(np.zeros(1, np.float32))
            start = time.perf_counter()
            result = jax.block_until_ready(self.run(self.x))
            seconds.append(time.perf_counter() - start)
        right = all(map(self.right, result.addressable_shards))
        reports = _of_all_processes(np.array([*seconds[warmup:], right], np.float32))
        times = reports[:, :-1].max(axis=0).tolist()
        return Row(*self.name, self.workers, jax.process_count(), self.bytes, str(self.dtype), min(times),
                   statistics.median(times), bool(reports[:, -1].all()))  # fmt: skip

    def right(self, shard: Any) -> bool:
        """Whether one worker's result is what NumPy says."""
        rank, found, everybody = shard.index[0].start or 0, np.asarray(shard.data)[0], range(self.workers)
        wanted = {
            "broadcast": lambda: self.values([0]),
            "reduce": lambda: self.values(everybody if rank == 0 else []),
            "scatter": lambda: self.values([0])[rank],
            "gather": lambda: np.stack([self.values([w] if rank == 0 else []) for w in everybody]),
            "all_gather": lambda: np.stack([self.values([w]) for w in everybody]),
            "reduce_scatter": lambda: self.values(everybody)[rank],
            "all_to_all": lambda: np.stack([self.values([w])[rank] for w in everybody]),
            "all_reduce": lambda: self.values(everybody),
        }[self.name[0]]()
        return found.dtype == self.dtype and np.array_equal(found, wanted)


def _of_all_processes(values: np.ndarray) -> np.ndarray:
    """(processes, …): what each process says, once all have said it."""
    return np.reshape(multihost_utils.process_allgather(values), (jax.process_count(), *values.shape))


def warn(entry: Row | Skipped) -> None:
    """Warn of what is left out."""
    if isinstance(entry, Skipped):
        warnings.warn(str(entry), stacklevel=5)  # who called `processes`


def run(plan: Plan, mesh: Mesh, tell: Tell = warn) -> list[Row]:
    """Measure all of a plan in this process, or in each process of its group. `tell` hears of each entry at once."""
    rows = []
    for collective, algorithm, size in plan.entries(mesh.size):
        try:
            measurement = _Measurement(collective, algorithm, size, plan.dtype, mesh)
        except ValueError as error:
            tell(Skipped(collective, algorithm, str(error)))
        else:
            rows.append(measurement.take(plan.repeats, plan.warmup))
            tell(rows[-1])
    return rows


def local_mesh(count: int | None = None) -> Mesh:
    """Workers of this process: `count` emulated devices; without it, all accelerators, or 8 emulated devices if less
    than two are found. Raises DeviceError if JAX has started with too few.
    """
    wanted = EMULATED if count is None else checks.whole("The number of devices", count)
    with contextlib.suppress(RuntimeError):  # raised once JAX has started
        jax.config.update("jax_num_cpu_devices", wanted)
    found = jax.devices()
    if found[0].platform == "cpu":
        return devices.mesh(wanted)
    if count or len(found) < 2:
        found = jax.devices("cpu")[:wanted]
    return jax.make_mesh((len(found),), ("workers",), axis_types=(jax.sharding.AxisType.Auto,), devices=found)


def join() -> bool:
    """Join the group of processes that the environment tells of, and return whether it tells of one.

    SLURM (`srun`) and Open MPI 4 say all that is needed. Where only the rank is known (other MPI, an indexed job of
    Kubernetes), or nothing, DLSCALE_COORDINATOR is the host:port of process 0, DLSCALE_PROCESSES their number, and
    DLSCALE_PROCESS the rank. Raises ValueError if something is missing.
    """
    known = {  # what names the rank, and the number of processes
        "DLSCALE_PROCESS": "DLSCALE_PROCESSES", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
        "PMI_RANK": "PMI_SIZE", "SLURM_PROCID": "SLURM_STEP_NUM_TASKS", "JOB_COMPLETION_INDEX": "DLSCALE_PROCESSES",
    }  # fmt: skip
    said = {name: int(os.environ[name]) for pair in known.items() for name in pair if name in os.environ}
    pair = next((pair for pair in known.items() if pair[0] in said and said.get(pair[1], 1) > 1), None)
    if pair is None:
        return False
    if "DLSCALE_COORDINATOR" in os.environ or pair[0] == "DLSCALE_PROCESS":
        devices.connect(None, said[pair[1]], said[pair[0]])
        return True
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=10)
    except ValueError as error:
        advice = "set DLSCALE_COORDINATOR to host:port of process 0, for all processes"
        raise ValueError(f"{pair[0]} is set, but not where process 0 is ({error}): {advice}.") from None
    return True


# A group of processes on this machine


def processes(count: int, timeout: float = 120, tell: Tell = warn, **plan: Any) -> list[Row]:
    """Measure a `Plan` (its fields as keywords) among `count` new processes on 127.0.0.1, one worker each.

    They are watched from here, since survivors of a dead peer may hang: when one ends, when nothing was measured for
    `timeout` seconds, and whenever this call is left, all of them are ended. They also leave when this process does.
    `tell` hears of each row, and of each one left out, as soon as it is there. Raises ValueError for an impossible
    plan, and Failed, which says what happened.
    """
    count, what = checks.whole("processes", count), Plan(**plan)
    checks.finite("timeout", timeout)
    what.check_memory(count)
    for attempt in range(ATTEMPTS):
        with contextlib.suppress(_PortTaken):
            return _Group(count, what, timeout, tell).watch(hold_port=attempt == 0)
    raise Failed(f"No free port was found on 127.0.0.1 in {ATTEMPTS} attempts.", [])


def _bound() -> socket.socket:
    """A socket that keeps a port of 127.0.0.1 from all but those who may share it, as JAX's coordinator does."""
    held = socket.socket()
    if hasattr(socket, "SO_REUSEPORT"):
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


class _Child:
    """A process of the group; `messages` gets (rank, message) of each of its lines and (rank, None) at its end."""

    def __init__(self, rank: int, order: dict[str, Any], messages: queue.SimpleQueue) -> None:
        self.rank, self.error, self.log = rank, "", tempfile.TemporaryFile()  # noqa: SIM115  open until `close`
        paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__], env=environment, start_new_session=True,  # Ctrl-C is for the parent
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip

        def read() -> None:
            for line in self.process.stdout:
                messages.put((rank, json.loads(line)))
            messages.put((rank, None))

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        with contextlib.suppress(OSError):  # it has ended already: the reader tells
            self.process.stdin.write(json.dumps(order | {"process": rank}, default=int).encode() + b"\n")
            self.process.stdin.flush()

    def logged(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def ending(self) -> str:
        """What became of it, in words."""
        code = self.process.poll()
        if self.error or code is None:
            return f"failed with {self.error}" if self.error else "closed its channel"
        if code < 0:
            names = {member.value: member.name for member in signal.Signals}
            return f"was ended by {names.get(-code, f'signal {-code}')}"
        lines = self.logged().strip().splitlines() or ["it left no message"]
        return f"ended with exit status {code}: {lines[-1][:300]}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()


class _Group:
    def __init__(self, count: int, plan: Plan, timeout: float, tell: Tell) -> None:
        self.count, self.plan, self.timeout, self.tell = count, plan, timeout, tell
        self.entries, self.told, self.joined = plan.entries(count), 0, False
        self.rows: list[Row] = []
        self.children: list[_Child] = []

    def watch(self, hold_port: bool) -> list[Row]:
        """Start the processes, wait for all of them, and end them whatever happens."""
        messages: queue.SimpleQueue[tuple[int, dict[str, Any] | None]] = queue.SimpleQueue()
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(_bound())
            order = {"coordinator": f"127.0.0.1:{held.getsockname()[1]}", "processes": self.count}
            if not hold_port or not hasattr(socket, "SO_REUSEPORT"):
                held.close()
            for rank in range(self.count):
                self.children.append(_Child(rank, order | {"plan": asdict(self.plan)}, messages))
                stack.callback(self.children[-1].close)
            done, deadline = 0, time.monotonic() + max(self.timeout, START)
            while done < self.count:
                try:
                    rank, message = messages.get(timeout=TICK)
                except queue.Empty:
                    if time.monotonic() > deadline:
                        limit = self.timeout if self.joined else max(self.timeout, START)
                        self.fail(f"Nothing came from the processes for {limit:g} s", "a longer timeout allows more")
                    continue
                match message:
                    case {"row": values}:
                        self.rows.append(Row(*values))
                        self.hear(self.rows[-1])
                    case {"skipped": values}:
                        self.hear(Skipped(*values))
                    case {"joined": _}:
                        self.joined = True
                    case {"done": _}:
                        done += 1
                    case {"error": text}:
                        self.children[rank].error = text
                        self.lost(self.children[rank])
                    case _:
                        self.lost(self.children[rank])
                if rank == 0:
                    deadline = time.monotonic() + self.timeout
        return self.rows

    def hear(self, entry: Row | Skipped) -> None:
        self.told += 1
        self.tell(entry)

    def lost(self, first: _Child) -> NoReturn:
        """Name the process that ended first: one that was killed, rather than those that complain or abort for it."""
        time.sleep(GRACE)
        silent = [child for child in self.children if not child.error and child.process.poll() is not None]
        silent.sort(key=lambda child: child.process.returncode == -signal.SIGABRT)
        guilty = silent[0] if silent else first
        if not self.joined and "Failed to add port" in self.children[0].logged():
            raise _PortTaken
        self.fail(f"Process {guilty.rank} (of 0 to {self.count - 1}) {guilty.ending()}", "the others were stopped")

    def fail(self, what: str, then: str) -> NoReturn:
        where = "before they had found each other"
        if self.joined:
            collective, algorithm, size = self.entries[min(self.told, len(self.entries) - 1)]
            where = f"at {collective} by {algorithm}, {show_size(size)}B"
        raise Failed(f"{what}, {where}; {then}. {len(self.rows)} of {len(self.entries)} rows are there.", self.rows)


def work() -> None:
    """A process of the group: its order comes on standard input, what it measures leaves on standard output."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # Gloo prints

    def say(**message: Any) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    def leave_with_parent() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    order = json.loads(sys.stdin.buffer.readline() or "null")
    guard = threading.Thread(target=leave_with_parent, daemon=True)
    guard.start()
    try:
        jax.config.update("jax_num_cpu_devices", 1)
        rank, _ = devices.connect(order["coordinator"], order["processes"], order["process"])
        mesh = devices.mesh()
        say(joined=True)
        speak = say if rank == 0 else lambda **message: None
        run(Plan(**order["plan"]), mesh,
            lambda entry: speak(**{"row" if isinstance(entry, Row) else "skipped": entry}))  # fmt: skip
        say(done=True)
    except Exception as error:
        say(error=": ".join([type(error).__name__, *str(error).splitlines()[:1]])[:500])
    guard.join()  # stays reachable until the parent has seen who was first


if __name__ == "__main__":
    work()
