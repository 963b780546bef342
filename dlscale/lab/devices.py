"""The machine: its cores and memory, emulated devices on one processor, and processes that work together."""

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import psutil
from tqdm.auto import tqdm

from dlscale.lab import checks, jax_internals


def _text(path: str) -> str:
    with contextlib.suppress(OSError):  # not Linux, or no container
        return Path(path).read_text().strip()
    return ""


def prepare() -> None:
    """Let a notebook take less memory, and be ready in seconds when it is started again: same bits, no compiling.

    JAX keeps what it compiles on disk, in a folder for each kind of processor, since homes are shared between machines
    and compiled programs are not. DLSCALE_CACHE=off turns that off; a folder that JAX was already given stays.
    """
    with contextlib.suppress(AttributeError, KeyError, OSError, TypeError):  # only with glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(-8, 2)  # M_ARENA_MAX: what one thread has freed serves all others, a sixth of the memory
        # without a shell there is no cell after which to give back what compiling has freed
        sys.modules["IPython"].get_ipython().events.register("post_run_cell", lambda _result: libc.malloc_trim(0))
    if os.environ.get("DLSCALE_CACHE") == "off" or jax.config.jax_compilation_cache_dir:
        return
    flags = (line for line in _text("/proc/cpuinfo").splitlines() if line.startswith(("flags", "Features")))
    processor = next(flags, None) or platform.processor()
    kind = hashlib.sha256(f"{platform.machine()} {processor}".encode()).hexdigest()[:12]
    folder = Path("~/.cache/dlscale/programs", kind)
    with contextlib.suppress(OSError, RuntimeError):  # no home, or one that cannot be written to: compile each time
        folder = folder.expanduser()
        folder.mkdir(parents=True, exist_ok=True)
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


class DeviceError(RuntimeError):
    """JAX was started in a way that cannot serve what is asked; the message says which line must come first."""


def _found(platform: str | None = None) -> list[jax.Device]:
    """The devices that JAX finds. Raises DeviceError, with the variable's name, where it may not look for any here."""
    try:
        return jax.devices(platform)
    except (RuntimeError, AssertionError) as error:
        if not (asked := jax.config.jax_platforms):
            raise
        advice = "Take the variable out of the environment, or set it to cpu; then restart the kernel."
        raise DeviceError(f"JAX_PLATFORMS={asked} allows JAX no device that is here ({error}). {advice}") from error


def emulate(count: int) -> list[jax.Device]:
    """Let JAX see `count` devices on this processor, and return them.

    They share its cores: right for seeing who holds and sends what, wrong for measuring speed. Must come before JAX
    first computes; asking again for as many, or fewer, is harmless. Raises DeviceError when it comes too late, or where
    JAX_PLATFORMS leaves no processor.
    """
    count = checks.whole("The number of devices", count)
    with contextlib.suppress(RuntimeError):  # raised once JAX has started: then its devices have to do
        jax.config.update("jax_num_cpu_devices", count)
    have = _found("cpu")  # also where there is a GPU
    if len(have) < count:
        line = f"dlscale.lab.devices.emulate({count})"
        advice = f"Restart the kernel (menu Kernel > Restart) and run this line before anything else uses JAX: {line}"
        raise DeviceError(f"{count} devices asked, but JAX has already started with {len(have)}. {advice}")
    return have[:count]


def mesh(count: int | None = None) -> jax.sharding.Mesh:
    """A mesh for `jax.shard_map` with the axis "workers": of `count` emulated devices, or of all that JAX has found.

    Raises as `emulate` does.
    """
    found = _found() if count is None else emulate(count)
    return jax.make_mesh((len(found),), ("workers",), axis_types=(jax.sharding.AxisType.Auto,), devices=found)


def connect(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> tuple[int, int]:
    """Join this process to a group and return (its number, the group's size). Call it before JAX first computes.

    `coordinator` is "host:port" of process 0; `processes` the group's size; `process` this one's number. Left out, they
    come from the environment: DLSCALE_COORDINATOR, DLSCALE_PROCESSES, DLSCALE_PROCESS. Process 0 listens on the
    coordinator's own address only, and all listen on loopback only if that does: a group on "127.0.0.1:PORT" is out of
    reach for other machines, and so is one on "[::1]:PORT".
    Raises ValueError for a missing or impossible setting; JAX raises RuntimeError when it has started already.
    """
    address = str(_setting("coordinator", coordinator))
    size = checks.whole("processes", _setting("processes", processes))
    rank = checks.whole("process", _setting("process", process), low=0, high=size - 1)
    found = re.fullmatch(r"([\w.-]+|\[[\w:.%]+\]):(\d{1,5})", address, re.ASCII)
    if not found or int(found[2]) >= 2**16:
        raise ValueError(f"coordinator must be host:port, for example 127.0.0.1:12345, not {address!r}.")
    jax.distributed.initialize(address, size, rank, coordinator_bind_address=address, initialization_timeout=60)
    if found[1] in ("127.0.0.1", "localhost", "[::1]"):
        jax_internals.listen_on(found[1].strip("[]"))
    return rank, size


def _setting(name: str, value: object) -> object:
    """The value, or else what the environment says; digits count as a number."""
    variable = f"DLSCALE_{name.upper()}"
    if value is None and (value := os.environ.get(variable)) is None:
        raise ValueError(f"connect() needs {name}: pass {name}=… or set the environment variable {variable}.")
    return int(value) if isinstance(value, str) and value.strip().isdecimal() else value


def cores() -> int:
    """Processor cores this process may use: of the machine, its affinity mask and its container's quota, the least."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        allowed = min(allowed, max(1, int(quota) // int(period)))
    return allowed


def side_by_side(
    function: Callable[..., Any], jobs: Iterable[Sequence[Any]], workers: int | None = None, progress: str = ""
) -> list[Any]:
    """[function(*job) for job in jobs], one job a core. Results come as NumPy arrays where they were JAX's.

    A small network keeps one core busy; compiled programs of several run at the same time. When a job raises, or the
    cell is interrupted, what has not begun never does. `workers`: how many at a time, if not one a core. `progress`:
    the title of a progress bar.
    """
    stop, jobs = threading.Event(), list(jobs)

    def one(job: Sequence[Any]) -> Any:
        if stop.is_set():
            return None
        try:
            return jax.device_get(function(*job))
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(workers or cores()) as pool:
        try:
            done = pool.map(one, jobs)
            return list(tqdm(done, desc=progress, total=len(jobs), delay=1, leave=False, disable=not progress))
        finally:
            stop.set()


class Memory(NamedTuple):
    """Memory of the machine, or of the container if that has less, in bytes."""

    total: int
    available: int


def memory() -> Memory:
    """What this process may use. On Binder and JupyterHub the container's limit counts, not the machine's memory."""
    machine = psutil.virtual_memory()
    limit = _text("/sys/fs/cgroup/memory.max") or os.environ.get("MEM_LIMIT", "")
    if not limit.isdigit() or int(limit) > machine.total:
        return Memory(machine.total, machine.available)
    used = int(_text("/sys/fs/cgroup/memory.current") or psutil.Process().memory_info().rss)
    return Memory(int(limit), min(machine.available, max(0, int(limit) - used)))


class Finding(NamedTuple):
    """One line of the machine's report: what was looked at, what was found, and what to do if it falls short."""

    item: str
    found: str
    advice: str = ""


def report() -> list[Finding]:
    """Look at Python, packages, cores, memory and emulated devices, and say in words what is missing."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("jax", "optax", "numpy", "matplotlib"))
    total, free = (amount / 2**30 for amount in memory())
    # in a process of its own: here JAX may have started, and emulation is not for every notebook
    code = "from dlscale.lab import devices; print(len(devices.emulate(8)))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    seen, problem = child.stdout.strip(), child.stderr.strip()[-200:]
    shut_down = "A notebook needs up to 1 GiB: Kernel > Shut Down All Kernels, then start again."
    return [
        Finding("Python", platform.python_version()),
        Finding("packages", versions),
        Finding("cores", str(cores()), "" if cores() > 1 else "It works, in about twice the time a notebook names."),
        Finding("free memory", f"{free:.1f} of {total:.1f} GiB", "" if free >= 1 else shut_down),
        Finding("emulated devices", seen or "none", "" if seen == "8" else f"Parallelism needs them. {problem}"),
    ]
