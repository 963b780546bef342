"""The measuring tool behind `python -m dlscale measure`: times, bandwidths and correctness of collectives.

Sizes and bandwidths are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so that the numbers can
be laid beside its own: a size is what one worker has in the end or, for scatter, what the root has at the beginning.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dlscale import collectives
from dlscale.lab import checks, devices
from dlscale.lab.processes import PeerLost, peers, serve

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


class Workers(NamedTuple):
    """Who measures, told before the first row: how many, of which `kind`, and which process of `processes` tells it."""

    count: int
    kind: str
    process: int = 0
    processes: int = 1


Entry = Workers | Row | Skipped


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
class Measurements:
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
            raise ValueError("Measurements need at least one collective and one size.")
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


def warn(entry: Entry) -> None:
    """Warn of what is left out."""
    if isinstance(entry, Skipped):
        warnings.warn(str(entry), stacklevel=3)  # who called `processes`


def run(what: Measurements, mesh: Mesh, tell: Callable[[Entry], object]) -> None:
    """Measure all in this process, or in each process of its group. `tell` hears of each entry at once."""
    processes, first = jax.process_count(), mesh.devices.flat[0]
    kind = "emulated devices" if first.platform == "cpu" else first.device_kind
    tell(Workers(mesh.size, kind if processes == 1 else f"{processes} processes", jax.process_index(), processes))
    for collective, algorithm, size in what.entries(mesh.size):
        try:
            measurement = _Measurement(collective, algorithm, size, what.dtype, mesh)
        except ValueError as error:
            tell(Skipped(collective, algorithm, str(error)))
        else:
            tell(measurement.take(what.repeats, what.warmup))


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


RANKS = {  # what names the number of a process, and that of all processes
    "DLSCALE_PROCESS": "DLSCALE_PROCESSES", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE", "SLURM_PROCID": "SLURM_STEP_NUM_TASKS", "JOB_COMPLETION_INDEX": "DLSCALE_PROCESSES",
}  # fmt: skip


def launched() -> str | None:
    """The variable of the environment that names this process's place in a group, if there is a group."""
    return next((rank for rank, size in RANKS.items() if rank in os.environ and int(os.environ.get(size, 1)) > 1), None)


def join() -> object:
    """Join the group that the environment tells of.

    SLURM (`srun`) and Open MPI 4 say all that is needed. Where only the rank is known (other MPI, an indexed job of
    Kubernetes), or nothing, DLSCALE_COORDINATOR is the host:port of process 0, DLSCALE_PROCESSES their number, and
    DLSCALE_PROCESS the rank. Raises ValueError if something is missing.
    """
    rank = launched()
    if "DLSCALE_COORDINATOR" in os.environ or rank == "DLSCALE_PROCESS":
        return devices.connect(None, int(os.environ[RANKS[rank]]), int(os.environ[rank]))
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=10)
    except ValueError as error:
        advice = "set DLSCALE_COORDINATOR to host:port of process 0, for all processes"
        raise ValueError(f"{rank} is set, but not where process 0 is ({error}): {advice}.") from None


# A group of processes


def processes(
    count: int | None, timeout: float = 120, tell: Callable[[Entry], object] = warn, **measurements: Any
) -> list[Row]:
    """Take `Measurements` (its fields as keywords) among `count` new processes on 127.0.0.1, one worker each.

    None: this process belongs to a group that was started elsewhere (`launched`); one new process joins it. Processes
    are watched from here, since survivors of a dead peer may hang: when one ends, when nothing was measured for
    `timeout` seconds, and whenever this call is left, all that were started here are ended. `tell` hears of each entry
    as soon as it is there. Raises ValueError for what is impossible, and PeerLost, which says what happened.
    """
    what = Measurements(**measurements)
    checks.finite("timeout", timeout)
    if count is not None:
        what.check_memory(checks.whole("processes", count))
    told: list[Entry] = []
    rows: list[Row] = []
    try:
        with contextlib.closing(peers(__name__, count, {"what": asdict(what)}, timeout)) as messages:
            for _, message in messages:
                for entry in (kind(*message[name]) for name, kind in KINDS.items() if name in message):
                    told.append(entry._replace(kind="processes of this machine") if count and not told else entry)
                    rows += [entry] if isinstance(entry, Row) else []
                    tell(told[-1])
    except PeerLost as error:
        if not told:
            raise PeerLost(f"{error}, before they had found each other.") from None
        entries = what.entries(told[0].count)
        collective, algorithm, size = entries[min(len(told), len(entries)) - 1]
        where = f"at {collective} by {algorithm}, {show_size(size)}B"
        done = f"The others were ended. {len(rows)} of {len(entries)} rows are there."
        raise PeerLost(f"{error}, {where}. {done}") from None
    return rows


KINDS = {"joined": Workers, "row": Row, "skipped": Skipped}


def work(order: dict[str, Any], say: Callable[..., None]) -> None:
    """What a process of the group does; of those that were started together only the first speaks."""
    if "coordinator" in order:
        jax.config.update("jax_num_cpu_devices", 1)
        devices.connect(order["coordinator"], order["processes"], order["process"])
    else:
        join()
    silent = order.get("process", 0) > 0

    def tell(entry: Entry) -> None:
        if not silent:
            say(**{name: entry for name, kind in KINDS.items() if isinstance(entry, kind)})

    run(Measurements(**order["what"]), devices.mesh(), tell)


if __name__ == "__main__":
    serve(work)
