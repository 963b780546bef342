"""The measuring tool behind `python -m dlscale measure`: times, bandwidths and correctness of collectives.

Sizes and bandwidths are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so that the numbers can
be laid beside its own: a size is what one worker has in the end or, for scatter, what the root has at the beginning.
"""

import contextlib
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
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

ROOTED = ("broadcast", "reduce", "scatter", "gather")
ALGORITHMS = {  # "xla" is JAX's own; those with one root know one algorithm, a binomial tree
    "all_reduce": ("xla", *collectives.ALGORITHMS),
    "all_gather": ("xla", "ring", "bruck"),
    "reduce_scatter": ("xla", "ring", "halving"),
    "all_to_all": ("xla", "pairwise", "bruck"),
    **dict.fromkeys(ROOTED, ("tree",)),
}
XLA = {
    "all_reduce": lambda x: lax.psum(x, "workers"),
    "all_gather": lambda x: lax.all_gather(x, "workers"),
    "reduce_scatter": lambda x: lax.psum_scatter(x, "workers"),
    "all_to_all": lambda x: lax.all_to_all(x, "workers", split_axis=0, concat_axis=0),
}
WHOLE = ("all_reduce", "broadcast", "reduce")  # every worker gives an array of the full size
IN_PARTS = ("scatter", "reduce_scatter", "all_to_all")  # every worker gives a part for each other
DTYPES = ("float32", "float16", "bfloat16", "int32", "int8", "uint8")
PERIOD = 1021  # a prime, so that no chunk of the data looks like its neighbour
DEVICES, EMULATED = "emulated devices", 8  # so many, unless another number is asked for
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


class Workers(NamedTuple):
    """Who measures, told before the first row: how many, of which `kind`, and the number of the process that tells."""

    count: int
    kind: str
    process: int = 0


Entry = Workers | Row | str  # a text says which measurement is left out, since the algorithm cannot serve, and why


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
    checks.whole("factor", factor, low=2)
    if low > high:
        raise ValueError(f"The smallest size, {show_size(low)}, is above the largest, {show_size(high)}.")
    return tuple(low * factor**k for k in range(high.bit_length()) if low * factor**k <= high)


@dataclass
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
        known = {name: ALGORITHMS[checks.known("collective", name, ALGORITHMS)] for name in self.collectives}
        every = dict.fromkeys(algorithm for algorithms in known.values() for algorithm in algorithms)
        chosen = every if self.algorithms is None else [checks.known("algorithm", a, every) for a in self.algorithms]
        self.served = {name: [a for a in algorithms if a in chosen] for name, algorithms in known.items()}
        for name, served in self.served.items():
            if not served:
                raise ValueError(f"No algorithm asked for does {name}: it is done by {', '.join(known[name])}.")
        self.sizes = [checks.whole("A size", size) for size in self.sizes]
        if not self.served or not self.sizes:
            raise ValueError("Measurements need at least one collective and one size.")
        checks.whole("repeats", self.repeats)
        checks.whole("warmup", self.warmup, low=0)
        checks.known("dtype", self.dtype, DTYPES)

    def entries(self, workers: int) -> list[tuple[str, str, int]]:
        """(collective, algorithm, size) of all measurements, sizes rounded up to what can be split among workers."""
        return list(dict.fromkeys(
            (name, algorithm, size + -size % _unit(name, self.dtype, workers))
            for name, algorithms in self.served.items() for size in sorted(self.sizes) for algorithm in algorithms
        ))  # fmt: skip

    def check_memory(self, workers: int) -> None:
        """Raise ValueError if the largest size needs more memory than is free, with so many workers on this machine."""
        largest, free = max(self.sizes), devices.memory().available
        if (needed := largest * workers * COPIES) > free:
            needs = f"{show_size(largest)}B with {workers} workers on one machine need about {needed / 2**30:.1f} GiB"
            advice = f"{free / 2**30:.1f} GiB are free: choose a smaller largest size or fewer workers"
            raise ValueError(f"{needs}, but {advice}.")


def _unit(collective: str, dtype: str, workers: int) -> int:
    """Bytes of one element of a worker's array, or of one in each of its parts."""
    return jnp.dtype(dtype).itemsize * (1 if collective in WHOLE else workers)


# Measuring, in a process that sees all workers or belongs to a group that does


def run(what: Measurements, mesh: Mesh, kind: str) -> Iterator[Entry]:
    """Measure all in this process, or in each process of its group; each entry comes as soon as it is there."""
    yield Workers(mesh.size, kind, jax.process_index())
    for collective, algorithm, size in what.entries(mesh.size):
        try:
            measure = _compiled(collective, algorithm, size, what, mesh)
        except ValueError as error:
            yield f"{collective} by {algorithm} is left out: {error}"
        else:
            yield measure()  # a lost peer may raise ValueError, too


def _compiled(collective: str, algorithm: str, size: int, what: Measurements, mesh: Mesh) -> Callable[[], Row]:
    """What measures a row. Processes start each repeat together, and the slowest of them counts.

    Raises ValueError for workers that the algorithm cannot serve.
    """
    workers, dtype, spec = mesh.size, jnp.dtype(what.dtype), PartitionSpec(mesh.axis_names)
    count = size // _unit(collective, what.dtype, workers)
    shape = (workers, count) if collective in IN_PARTS else (count,)
    own = None if collective in ROOTED else algorithm  # they have only one
    f = XLA[collective] if algorithm == "xla" else collectives.operation(collective, own)
    highest = max(2, min(5, 256 // workers))  # whole numbers whose sums are exact in every dtype
    numbers = np.outer(range(1, workers + 1), range(1, PERIOD + 1)) % PERIOD % highest  # of each worker

    def inputs(ranks: Sequence[int]) -> np.ndarray:
        """The sum of what these workers give."""
        return np.resize(numbers[list(ranks)].sum(axis=0).astype(dtype), shape)

    def right(shard: Any) -> bool:
        rank, found = shard.index[0].start or 0, np.asarray(shard.data)[0]
        return found.dtype == dtype and np.array_equal(found, _expected(collective, rank, workers, inputs))

    x = jax.make_array_from_callback(
        (workers, *shape), NamedSharding(mesh, spec), lambda index: inputs([index[0].start or 0])[None]
    )
    on_mesh = jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(on_mesh).lower(x).compile()

    def measure() -> Row:
        seconds = []
        for _ in range(what.warmup + what.repeats):
            _of_all_processes(np.zeros(1, np.float32))
            start = time.perf_counter()
            result = jax.block_until_ready(program(x))
            seconds.append(time.perf_counter() - start)
        all_right = all(map(right, result.addressable_shards))
        reports = _of_all_processes(np.array([*seconds[what.warmup :], all_right], np.float32))
        times = reports[:, :-1].max(axis=0).astype(float)
        return Row(collective, algorithm, workers, jax.process_count(), size, what.dtype, float(times.min()),
                   float(np.median(times)), bool(reports[:, -1].all()))  # fmt: skip

    return measure


def _expected(collective: str, rank: int, workers: int, inputs: Callable[[Sequence[int]], np.ndarray]) -> np.ndarray:
    """One worker's result; `inputs` gives the sum of what some workers give."""
    everybody = range(workers)
    return {
        "broadcast": lambda: inputs([0]),
        "reduce": lambda: inputs(everybody if rank == 0 else []),
        "scatter": lambda: inputs([0])[rank],
        "gather": lambda: np.stack([inputs([w] if rank == 0 else []) for w in everybody]),
        "all_gather": lambda: np.stack([inputs([w]) for w in everybody]),
        "reduce_scatter": lambda: inputs(everybody)[rank],
        "all_to_all": lambda: np.stack([inputs([w])[rank] for w in everybody]),
        "all_reduce": lambda: inputs(everybody),
    }[collective]()


def _of_all_processes(values: np.ndarray) -> np.ndarray:
    """(processes, …): what each process says, once all have said it."""
    return np.reshape(multihost_utils.process_allgather(values), (jax.process_count(), *values.shape))


def alone(what: Measurements, count: int | None) -> Iterator[Entry]:
    """Measure among devices of this process: so many emulated ones; without a number all accelerators, or 8 emulated
    devices if less than two are found. Raises DeviceError if JAX has started with too few.
    """
    if count is None:
        with contextlib.suppress(RuntimeError):  # raised once JAX has started
            jax.config.update("jax_num_cpu_devices", EMULATED)
        if (found := jax.devices())[0].platform != "cpu" and len(found) > 1:
            yield from run(what, devices.mesh(), found[0].device_kind)
            return
    wanted = EMULATED if count is None else count
    what.check_memory(wanted)
    yield from run(what, devices.mesh(wanted), DEVICES)


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


def processes(count: int, timeout: float = 120, **measurements: Any) -> list[Row]:
    """The rows of `Measurements` (its fields as keywords) among so many new processes of this machine, as `group` does.

    Warns of what is left out. Raises ValueError for what is impossible, and PeerLost.
    """
    entries = list(group(Measurements(**measurements), count, timeout))
    for left_out in (entry for entry in entries if isinstance(entry, str)):
        warnings.warn(left_out, stacklevel=2)
    return [entry for entry in entries if isinstance(entry, Row)]


def group(what: Measurements, count: int | None, timeout: float) -> Iterator[Entry]:
    """Measure among `count` new processes on 127.0.0.1, one worker each; each entry comes as soon as it is there.

    None: this process belongs to a group that was started elsewhere (`launched`); one new process joins it. Processes
    are watched from here, since survivors of a dead peer may hang: when one ends, when nothing was measured for
    `timeout` seconds, and whenever this generator is closed, all that were started here are ended. Raises ValueError
    for what is impossible, and PeerLost, which says what happened.
    """
    checks.finite("timeout", timeout, low=1)
    if count is not None:
        what.check_memory(checks.whole("processes", count))
    told: list[Entry] = []
    try:
        with contextlib.closing(peers(__name__, count, {"what": asdict(what)}, timeout)) as messages:
            for _, message in messages:
                for name in KINDS.keys() & message:
                    entry = KINDS[name](message[name])
                    if isinstance(entry, Workers) and count:
                        entry = entry._replace(process=0)
                    if entry not in told[:1]:  # each says that it has found the others
                        told.append(entry)
                        yield entry
    except PeerLost as error:
        if not told:
            raise PeerLost(f"{error}, before they had found each other.") from None
        entries, rows = what.entries(told[0].count), sum(isinstance(entry, Row) for entry in told)
        collective, algorithm, size = entries[: len(told)][-1]
        where = f"at {collective} by {algorithm}, {show_size(size)}B. The others were ended"
        raise PeerLost(f"{error}, {where}. {rows} of {len(entries)} rows are there.") from None


KINDS = {"joined": Workers._make, "row": Row._make, "left_out": str}  # of messages


def work(order: dict[str, Any], say: Callable[..., None]) -> None:
    """What a process of the group does. Of those that were started together only the first tells of its rows."""
    if "coordinator" in order:
        jax.config.update("jax_num_cpu_devices", 1)
        devices.connect(order["coordinator"], order["processes"], order["process"])
    else:
        join()
    kind = "processes of this machine" if "coordinator" in order else f"{jax.process_count()} processes"
    for entry in run(Measurements(**order["what"]), devices.mesh(), kind):
        if order.get("process", 0) == 0 or isinstance(entry, Workers):
            say(**{"joined" if isinstance(entry, Workers) else "row" if isinstance(entry, Row) else "left_out": entry})


if __name__ == "__main__":
    serve(work)
