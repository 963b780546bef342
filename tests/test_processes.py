"""Watched processes: their limits, what their end leaves behind, and who is named when a group loses a peer."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

import psutil
import pytest

from dlscale.lab import processes
from dlscale.lab.processes import Child, ChildEnded, PeerLost, family

posix = pytest.mark.skipif(os.name != "posix", reason="signals and forks")


@pytest.fixture(params=["in a namespace", "without one"])
def start(request, monkeypatch):
    """Start Python code as a child, with and without a namespace of its own; close it afterwards."""
    if request.param == "without one":
        monkeypatch.setattr(processes, "namespace", lambda: ())
    elif not processes.namespace():
        pytest.skip("this system allows no namespace")
    before = psutil.Process().children()
    with contextlib.ExitStack() as stack:

        def run(code: str, **more: object) -> Child:
            child = Child([sys.executable, "-c", code], contained=True, **more)
            stack.callback(child.close)
            return child

        yield run
    assert psutil.Process().children() == before


def end_of(child: Child) -> str:
    with pytest.raises(ChildEnded) as caught:
        while child.receive():
            pass
    return str(caught.value)


def gone(members: list[psutil.Process]) -> bool:
    for process in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def test_a_child_that_does_not_read_or_writes_without_end_holds_nobody_up(start):
    deaf = start("import time; time.sleep(1000)")
    for _ in range(3):
        deaf.send(b"x" * 5_000_000 + b"\n")
    deaf.close()
    loud = start("while True: print('x' * 1000)")
    assert loud.receive() == b"x" * 1000 + b"\n"
    loud.limit(seconds=1)
    time.sleep(0.5)
    assert loud.inbox.qsize() <= processes.MAX_LINES + 1
    loud.close()
    endless = start("while True: print('x' * 10**6, end='')")
    assert len(endless.receive()) == processes.MAX_BYTES + 1


@pytest.mark.parametrize("code, words", [
    ("import sys; sys.exit(3)", "ended with exit status 3: it left no message"),
    ("raise ValueError('of no use')", "ended with exit status 1: ValueError: of no use"),
    pytest.param("import os; os.kill(os.getpid(), 9)", "was ended by SIGKILL", marks=posix),
])  # fmt: skip
def test_how_it_ended(start, code, words):
    child = start(code)
    assert end_of(child) == processes.ENDED
    assert child.ending() == words


DAEMON = """
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        code = "import time; print(1, flush=True); time.sleep(1000)"
        os.execve(sys.executable, [sys.executable, "-c", code], ENVIRONMENT)
    os._exit(0)
os.wait()
time.sleep(SECONDS)
"""


@posix
@pytest.mark.parametrize("contained", [True, False])
def test_nothing_outlives_this_process(contained, tmp_path):
    daemon = DAEMON.replace("SECONDS", "1000").replace("ENVIRONMENT", "{}" if sys.platform == "linux" else "os.environ")
    code = f"""
import sys
from dlscale.lab.processes import Child
child = Child([sys.executable, "-c", {daemon!r}], contained={contained})
child.receive()
print(1, flush=True)
child.receive()"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        parent.stdout.readline()
        members = psutil.Process(parent.pid).children(recursive=True)
        assert any("print(1" in str(process.cmdline()) for process in members)
        parent.kill()
    psutil.wait_procs(members, timeout=600)
    assert gone(members)


@posix
def test_memory_counts_shared_pages_once_and_seconds_those_of_children_too():
    code = """
import os, sys, time
kept = bytes(1) * 10**8
kept = kept.replace(b"\\0", b"x")
def spend():
    while time.process_time() < 0.3: pass
if os.fork() == 0:
    spend()
    os._exit(0)
os.wait()
if os.fork() == 0:
    time.sleep(1000)
print(1, flush=True)
time.sleep(1000)"""
    child = Child([sys.executable, "-c", code])
    with contextlib.closing(child):
        child.receive()
        members = family(child.process.pid)
        shared, pages = processes.memory(members), processes.memory(members, exact=False)
        assert pages > 2e8
        if sys.platform == "linux":
            assert 1e8 < shared < 1.7e8
        assert processes.processor_seconds(members) > 0.3
        peak = processes.Peak()
        assert peak.look(members) == peak.bytes == pytest.approx(shared, rel=0.1)
    assert peak.look(members) == peak.bytes


# Groups


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of peers without JAX: each does what the order says for it."""
    code = """
import os, time
from dlscale.lab import processes
def work(order, say):
    say(joined=True, pid=os.getpid(), seen=[order["processes"], order["process"]])
    exec(order["code"], {"say": say, "rank": order["process"], "time": time, "os": os, "order": order})
processes.serve(work)
"""
    (tmp_path / "peer_of_a_test.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "peer_of_a_test"


def test_peers_say_what_they_have_to_say(module):
    before = psutil.Process().children()  # such as a tracker of shared memory, which an earlier test has left
    code = "print('to the log'); say(square=rank ** 2)"
    found = list(processes.peers(module, 3, {"code": code}, 60))
    assert sorted((rank, message["square"]) for rank, message in found if "square" in message) == [
        (0, 0),
        (1, 1),
        (2, 4),
    ]
    assert sorted((rank, *message["seen"]) for rank, message in found if "seen" in message) == [
        (0, 3, 0),
        (1, 3, 1),
        (2, 3, 2),
    ]
    assert psutil.Process().children() == before


@pytest.mark.parametrize("code, words", [
    ("if rank == 1: raise ValueError('odd')\ntime.sleep(1000)", r"Process 1 \(of 0 to 2\) failed with ValueError: odd"),
    ("if rank == 2: os._exit(4)\ntime.sleep(1000)", r"Process 2 \(of 0 to 2\) ended with exit status 4"),
    pytest.param("if rank == 0: os.kill(os.getpid(), 9)\nif rank == 1: raise ValueError\nos.abort()",
                 r"Process 0 \(of 0 to 2\) was ended by SIGKILL", marks=posix),
    ("time.sleep(1000)", "Nothing came from the processes within a limit of 0.3 s by the clock"),
])  # fmt: skip
def test_who_is_lost_is_named_and_the_others_are_ended(module, code, words):
    pids = []
    with pytest.raises(PeerLost, match=words):
        for _, message in processes.peers(module, 3, {"code": code}, 0.3 if "Nothing" in words else 60):
            pids += [message["pid"]] if "pid" in message else []
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)


def test_a_group_ends_when_nobody_listens(module):
    before = psutil.Process().children()
    messages = processes.peers(module, 2, {"code": "time.sleep(1000)"}, 60)
    _, message = next(messages)
    assert psutil.pid_exists(message["pid"])
    messages.close()
    assert psutil.Process().children() == before and not psutil.pid_exists(message["pid"])
