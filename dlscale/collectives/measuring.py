"""The measuring tool behind `python -m dlscale measure`: times, bandwidths and correctness of all-reduces.

Bandwidths are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md), so that the numbers can be laid
beside its own: a size is that of a worker's float32 array.
"""

import argparse
import contextlib
import functools
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dlscale import collectives
from dlscale.lab import checks, devices
from dlscale.lab.processes import PeerLost, peers, serve

ALGORITHMS = ("xla", *collectives.ALGORITHMS)
XLA = functools.partial(lax.psum, axis_name="workers")  # JAX's own
WARM_UP = 2  # repeats that are not timed
DEVICES, EMULATED = "emulated devices", 8  # so many, unless another number is asked for
COPIES = 7  # of a worker's data at the same time: input, result, what NumPy expects, and those on the way


class Row(NamedTuple):
    """One measurement. `fastest` and `median` in seconds: a repeat lasts until the last worker has its result.

    `right`: the results of all workers equal NumPy's; the data are whole numbers, whose sums are exact in any order.
    """

    algorithm: str
    workers: int
    bytes: int
    fastest: float
    median: float
    right: bool

    def bandwidths(self) -> tuple[float, float]:
        """Bytes a second: the size over the median time, and what goes through each worker's cable in that time.

        The second, for an algorithm that sends no more than it must, is the first times 2 (P - 1) / P: it can be
        compared with the cable (nccl-tests, doc/PERFORMANCE.md).
        """
        rate = self.bytes / self.median
        return rate, 2 * (self.workers - 1) / self.workers * rate


class Workers(NamedTuple):
    """Who measures, told before the first row: how many, of which `kind`, and the number of the process that tells."""

    count: int
    kind: str
    process: int = 0


Entry = Workers | Row


def parse_size(text: str) -> int:
    """Bytes of "8", "4K", "256M", "1G" (of 1,024 each, as in nccl-tests), also with B or iB. Raises ValueError."""
    found = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE | re.ASCII)
    if not found or not int(found[1]):
        raise ValueError(f"A size is a number of bytes such as 8, 4K, 256M or 1G, unlike {text!r}.")
    return int(found[1]) * 1024 ** " KMG".index(found[2].upper() or " ")


@dataclass
class Measurements:
    """What to measure, `repeats` times each: all-reduces by some algorithms, at sizes in bytes.

    Raises ValueError for what is unknown.
    """

    algorithms: Sequence[str] = ALGORITHMS
    sizes: Sequence[int] = tuple(8**k for k in range(1, 8))
    repeats: int = 10

    def __post_init__(self) -> None:
        for algorithm in self.algorithms:
            checks.known("algorithm", algorithm, ALGORITHMS)
        checks.whole("repeats", self.repeats)

    def entries(self) -> list[tuple[str, int]]:
        """(algorithm, size) of all measurements, sizes rounded up to whole numbers of float32."""
        return list(dict.fromkeys((name, size + -size % 4) for size in self.sizes for name in self.algorithms))

    def check_memory(self, workers: int) -> None:
        """Raise ValueError if the largest size needs more memory than is free, with so many workers on this machine."""
        if (largest := max(self.sizes)) * workers * COPIES > devices.memory().available:
            given = f"{largest:,} bytes with {workers} workers need more memory than is free"
            raise ValueError(f"{given}: choose a smaller largest size or fewer workers.")


# Measuring, in a process that sees all workers or belongs to a group that does


def run(what: Measurements, mesh: Mesh, kind: str) -> Iterator[Entry]:
    """Measure all in this process, or in each process of its group; each entry comes as soon as it is there."""
    yield Workers(mesh.size, kind, jax.process_index())
    for algorithm, size in what.entries():
        yield _measure(algorithm, size, what.repeats, mesh)


def _measure(algorithm: str, size: int, repeats: int, mesh: Mesh) -> Row:
    """Processes start each repeat together, and the slowest of them counts."""
    workers, spec = mesh.size, PartitionSpec(mesh.axis_names)
    f = XLA if algorithm == "xla" else collectives.operation("all_reduce", algorithm)

    def given(rank: int) -> np.ndarray:
        """A worker's numbers, small whole ones, in a period of a prime: no chunk looks like its neighbour."""
        return np.resize(np.arange(1, 1022) * (rank + 1) % 1021 % 5, size // 4).astype(np.float32)

    x = jax.make_array_from_callback(
        (workers, size // 4), NamedSharding(mesh, spec), lambda index: given(index[0].start or 0)[None]
    )
    on_mesh = jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program, seconds = jax.jit(on_mesh).lower(x).compile(), []
    for _ in range(WARM_UP + repeats):
        _of_all_processes(np.zeros(1, np.float32))
        start = time.perf_counter()
        result = jax.block_until_ready(program(x))
        seconds.append(time.perf_counter() - start)
    expected = sum(map(given, range(workers)))
    all_right = all(np.array_equal(np.asarray(shard.data)[0], expected) for shard in result.addressable_shards)
    reports = _of_all_processes(np.array([*seconds[WARM_UP:], all_right], np.float32))
    times = reports[:, :-1].max(axis=0).astype(float)
    return Row(algorithm, workers, size, times.min(), float(np.median(times)), bool(reports[:, -1].all()))


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


# A group of processes


RANKS = {  # what names the number of a process, and that of all processes
    "DLSCALE_PROCESS": "DLSCALE_PROCESSES", "OMPI_COMM_WORLD_RANK": "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK": "PMI_SIZE", "SLURM_PROCID": "SLURM_STEP_NUM_TASKS", "JOB_COMPLETION_INDEX": "DLSCALE_PROCESSES",
}  # fmt: skip


def launched() -> str | None:
    """The variable of the environment that names this process's place in a group, if there is a group."""
    return next((rank for rank, size in RANKS.items() if rank in os.environ and int(os.environ.get(size, 1)) > 1), None)


def join(order: dict[str, Any]) -> object:
    """Join the group that the order of `peers` tells of, or else the environment.

    SLURM (`srun`) and Open MPI 4 say all that is needed. Where only the rank is known (other MPI, an indexed job of
    Kubernetes), or nothing, DLSCALE_COORDINATOR is the host:port of process 0, DLSCALE_PROCESSES their number, and
    DLSCALE_PROCESS the rank. Raises ValueError if something is missing.
    """
    if "coordinator" in order:
        jax.config.update("jax_num_cpu_devices", 1)
        return devices.connect(order["coordinator"], order["processes"], order["process"])
    rank = launched()
    if "DLSCALE_COORDINATOR" in os.environ or rank == "DLSCALE_PROCESS":
        return devices.connect(None, int(os.environ[RANKS[rank]]), int(os.environ[rank]))
    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=10)
    except ValueError as error:
        advice = "set DLSCALE_COORDINATOR to host:port of process 0, for all processes"
        raise ValueError(f"{rank} is set, but not where process 0 is ({error}): {advice}.") from None


def group(what: Measurements, count: int | None, timeout: float = 120) -> Iterator[Entry]:
    """Measure among `count` new processes on 127.0.0.1, one worker each; each entry comes as soon as it is there.

    None: this process belongs to a group that was started elsewhere (`launched`); one new process joins it. Processes
    are watched from here, since survivors of a dead peer may hang: when one ends, when nothing was measured for
    `timeout` seconds, and whenever this generator is closed, all that were started here are ended. Raises ValueError
    for what is impossible, and PeerLost, which says what happened.
    """
    checks.finite("timeout", timeout, low=1)
    if count is not None:
        what.check_memory(checks.whole("processes", count))
    rows = -1  # who measures comes first
    try:
        with contextlib.closing(peers(__name__, count, {"what": asdict(what)}, timeout)) as messages:
            for _, message in messages:
                if "entry" in message:
                    rows += 1
                    yield (Row if rows else Workers)(*message["entry"])
    except PeerLost as error:
        when = "before they had found each other" if rows < 0 else f"after {rows} rows. The others were ended"
        raise PeerLost(f"{error}, {when}.") from None


def work(order: dict[str, Any], say: Callable[..., None]) -> None:
    """What a process of the group does. Of those that were started together only the first tells."""
    join(order)
    kind = "processes of this machine" if "coordinator" in order else f"{jax.process_count()} processes"
    for entry in run(Measurements(**order["what"]), devices.mesh(), kind):
        if order.get("process", 0) == 0:
            say(entry=entry)


def status(parser: argparse.ArgumentParser, task: Callable[[], int]) -> int:
    """The exit status of a command that measures, or works in such a group: its own, or 1, 2 or 130 with a message."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by way of all `finally`, like Ctrl-C
    try:
        return task()
    except (ValueError, OSError, devices.DeviceError) as error:
        parser.error(str(error))
    except (PeerLost, jax.errors.JaxRuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    serve(work)
