import os
import socket
import subprocess
import sys
import threading
import types

import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from dlscale.lab import devices


def python(code: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | environment,
    )  # fmt: skip


def output(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def test_emulated_devices_each_hold_their_part():
    code = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from dlscale.lab import devices
assert len(devices.emulate(4)) == 4
mesh = devices.mesh()
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "workers"), mesh=mesh, in_specs=P("workers"), out_specs=P()))
print(total(jnp.arange(4.0)), len(devices.emulate(2)), dict(devices.mesh(2).shape))
try:
    devices.emulate(8)
except devices.DeviceError as error:
    print(error)
"""
    lines = output(python(code)).splitlines()
    assert lines[0] == "[6.] 2 {'workers': 2}"
    assert "8 devices asked, but JAX has already started with 4" in lines[1]
    assert "Restart the kernel" in lines[1]
    assert "dlscale.lab.devices.emulate(8)" in lines[1]


@pytest.mark.parametrize("platforms", ["cuda", "nonsense"])
def test_a_platform_that_is_not_here_is_told_with_the_variable_that_names_it(platforms):
    code = """
from dlscale.lab import devices
devices.prepare()
for ask in (lambda: devices.emulate(8), devices.mesh, lambda: devices.mesh(2)):
    try:
        ask()
    except devices.DeviceError as error:
        print(error)
"""
    lines = output(python(code, JAX_PLATFORMS=platforms)).splitlines()
    assert len(lines) == 3
    assert all(f"JAX_PLATFORMS={platforms} allows" in line and "set it to cpu" in line for line in lines)


@pytest.mark.parametrize("count", [0, -1, 2.0, "8", True])
def test_a_number_of_devices_is_a_whole_number(count):
    for ask in (devices.emulate, devices.mesh):
        with pytest.raises(ValueError, match="The number of devices must be a whole number of at least 1"):
            ask(count)


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        return probe.getsockname()[1]


def test_jobs_run_side_by_side_in_order(monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: 3)
    together = threading.Barrier(3)

    def job(number, power):
        together.wait(60)  # or no three of them would ever run at the same time
        return jnp.full(2, float(number)) ** power

    found = devices.side_by_side(job, [(number, 2) for number in range(6)])
    assert all(isinstance(array, np.ndarray) for array in found)
    np.testing.assert_array_equal(found, [[number**2] * 2 for number in range(6)])
    assert devices.side_by_side(job, []) == []


@pytest.fixture
def stopped(monkeypatch):
    """The event by which jobs are kept from beginning: a job that waits for it ends no sooner, on any machine."""
    event = threading.Event()
    monkeypatch.setattr(devices, "threading", types.SimpleNamespace(Event=lambda: event))
    return event


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_nothing_begins_that_has_not_begun(monkeypatch, stopped, error):
    monkeypatch.setattr(devices, "cores", lambda: 2)
    both, begun = threading.Barrier(2), []

    def job(number):
        begun.append(number)
        both.wait(60)
        if number == 1:
            raise error("stop")
        stopped.wait(60)  # job 0 has begun, and may end
        return number

    with pytest.raises(error, match="stop"):
        devices.side_by_side(job, [(number,) for number in range(50)])
    assert sorted(begun) == [0, 1]


LOOPBACK = ("127.0.0.1", "[::1]") if socket.has_ipv6 else ("127.0.0.1",)


@pytest.mark.parametrize("host", LOOPBACK)
def test_two_processes_add_up_and_listen_on_this_machine_only(host):
    code = """
import sys
import jax, numpy as np
from jax._src.lib import _jax
original = _jax.make_gloo_tcp_collectives
from jax.sharding import NamedSharding, PartitionSpec as P
from dlscale.lab import devices
rank, size = devices.connect()
mesh = devices.mesh()
mine = jax.make_array_from_process_local_data(NamedSharding(mesh, P("workers")), np.array([10.0 + rank]))
add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "workers"), mesh=mesh, in_specs=P("workers"), out_specs=P()))
print("sum", rank, size, float(add(mine).addressable_data(0)[0]), flush=True)
assert _jax.make_gloo_tcp_collectives is original, "nothing of JAX stays changed"
sys.stdin.read()
"""
    address = f"{host}:{free_port(host.strip('[]'))}"
    group = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"DLSCALE_COORDINATOR": address, "DLSCALE_PROCESSES": "2", "DLSCALE_PROCESS": str(rank)},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        # the transport reports its connections on the same stream
        sums = [next(line for line in process.stdout if line.startswith("sum")) for process in group]
        assert sums == ["sum 0 2 21.0\n", "sum 1 2 21.0\n"]
        listening = {
            connection.laddr.ip
            for process in group
            for connection in psutil.Process(process.pid).net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        for process in group:  # both at once: each waits for the other before it ends
            process.stdin.close()
        assert [process.wait(60) for process in group] == [0, 0]
    finally:
        for process in group:
            process.kill()
            process.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "pass coordinator=… or set the environment variable DLSCALE_COORDINATOR"),
        ({"coordinator": "127.0.0.1"}, "needs processes"),
        ({"coordinator": "127.0.0.1", "processes": 2, "process": 0}, "must be host:port"),
        ({"coordinator": "127.0.0.1:1", "processes": 2, "process": 2}, "process must be a whole number from 0 to 1"),
        ({"coordinator": "127.0.0.1:1", "processes": "two", "process": 0}, "not 'two'"),
        *(
            ({"coordinator": address, "processes": 1, "process": 0}, "must be host:port")
            for address in ("127.0.0.1:65536", "127.0.0.1:０", "http://a:1", ":1", "a b:3", "a:-1")
        ),
    ],
)
def test_impossible_groups_are_refused_in_words(arguments, words):
    with pytest.raises(ValueError, match=words):
        devices.connect(**arguments)


def test_a_container_limit_counts_before_the_machine(monkeypatch):
    files = {"cpu.max": "150000 100000", "memory.max": str(2**30), "memory.current": str(2**28)}
    monkeypatch.setattr(devices, "_text", lambda path: files[path.rpartition("/")[2]])
    monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert devices.cores() == 1
    memory = devices.memory()
    assert memory.total == 2**30
    assert memory.available <= 2**30 - 2**28
    files.update({"cpu.max": "max 100000", "memory.max": "max"})
    assert devices.cores() == 8
    assert devices.memory().total == psutil.virtual_memory().total


def test_importing_any_module_changes_no_setting_of_jax():
    code = """
import importlib, pkgutil
import jax
before = dict(jax.config.values)
import dlscale
names = [module.name for module in pkgutil.walk_packages(dlscale.__path__, "dlscale.")]
for name in names:
    if name != "dlscale.__main__":
        importlib.import_module(name)
after = dict(jax.config.values)
print(len(names), {name: value for name, value in after.items() if name not in before or before[name] != value})
"""
    count, *rest = output(python(code)).split(maxsplit=1)
    assert int(count) > 30
    assert rest == ["{}\n"]


def test_compiled_programs_are_kept_and_change_no_bits(tmp_path):
    code = """
import jax, jax.numpy as jnp
from dlscale.lab import devices
devices.prepare()
result = jax.jit(lambda x: jnp.sin(x) @ x)(jnp.arange(9.0).reshape(3, 3))
print(result.tobytes().hex(), jax.config.jax_compilation_cache_dir)
"""
    home = {"HOME": str(tmp_path), "USERPROFILE": str(tmp_path)}
    first, again = (output(python(code, DLSCALE_CACHE="on", **home)).split() for _ in range(2))
    assert first == again
    assert list((tmp_path / ".cache" / "dlscale" / "programs").glob("*/*"))
    off = output(python(code, DLSCALE_CACHE="off", **home)).split()
    assert off == [first[0], "None"]
    (tmp_path / "file").write_text("not a folder")
    broken = output(python(code, DLSCALE_CACHE="on", HOME=str(tmp_path / "file"), USERPROFILE=str(tmp_path / "file")))
    assert broken.split() == off


HOMELESS = """
import os, pwd
def nobody(number):
    raise KeyError(number)
pwd.getpwuid = nobody
del os.environ["HOME"]
"""


@pytest.mark.parametrize("folder", ["~/downloads", "~nobody_at_all/downloads"])
def test_a_home_that_is_not_there_is_told_with_the_variable_that_names_it(folder):
    with python(HOMELESS + "import dlscale.lab", DLSCALE_DATA=folder) as process:
        assert f"ValueError: DLSCALE_DATA={folder} names a home folder that is not here" in process.communicate()[1]


@pytest.mark.skipif(sys.platform == "win32", reason="a user there always has a home")
@pytest.mark.parametrize("given", ["", "somewhere"])
def test_without_a_home_programs_are_compiled_and_downloads_have_a_place(given, tmp_path):
    code = """
from dlscale.lab import data, devices
devices.prepare()
import jax
print(jax.config.jax_compilation_cache_dir)
try:
    data.load("cifar10")
except FileNotFoundError as error:
    print(error)
"""
    folder = str(tmp_path / given) if given else ""
    kept, told = output(
        python(HOMELESS + code, DLSCALE_CACHE="on", DLSCALE_DATA=folder, TMPDIR=str(tmp_path))
    ).splitlines()
    assert kept == "None"
    assert told.startswith(f"{folder or tmp_path / 'dlscale'}/cifar10 has no ")
    assert "data.download('cifar10')" in told
