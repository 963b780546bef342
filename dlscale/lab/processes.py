"""Processes that are watched: one child with limits that leaves nothing behind, and groups of peers on this machine.

Between a child and this process stands a keeper, a small process that ends all of the child's when the child ends, when
it is told to, and when this process is gone. `contained` children get, where the system allows it (on Linux, with
`unshare` of util-linux), a namespace of process ids of their own: they see no process but theirs and can signal no
other, and the kernel ends all of theirs with the keeper, whatever they did.

Elsewhere the keeper ends what it finds: what descends from it (on Linux detached processes too) and what bears the
child's mark in its environment. What remains possible there: a child can signal any process of its user, this one too,
and a process that detaches itself, clears its environment and, on Linux, kills the keeper is not found.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import psutil

PYTHON = (sys.executable, "-P")  # no folder in front of the installed packages
NAMESPACE = ("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc")
MARK = "DLSCALE_WATCHED"  # in the environment of all that a child starts: the file of its log
ENDED = "its process ended"
MAX_BYTES = 16_000_000  # of one line
MAX_LINES = 8  # of a child that wait to be received
MAX_PROCESSES = 100  # of a child and all that it started
TICK = 0.1  # seconds between two looks at a child
GRACE = 0.5  # seconds in which a child that fell silent ends, and in which the death that was the cause becomes visible
END = 10  # seconds in which killed processes must be gone; one that hangs in the kernel cannot be waited for
LOOKS = 5  # that find nobody: processes that end while they are looked at may have started another
START = 60  # seconds in which peers have found each other, whatever the limit of their silence


class ChildEnded(Exception):
    """A child ended, by itself or at a limit; the message says why."""


class PeerLost(RuntimeError):
    """A group of peers that did not come to its end; the message says who was lost and why."""


# What processes use


def family(pid: int) -> list[psutil.Process]:
    """A process and those that it started, as far as they descend from it."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def memory(members: Iterable[psutil.Process], exact: bool = True) -> int:
    """Bytes that processes hold together; exactly: at least, with pages that they share counted once.

    The larger of two lower bounds. Private pages and the most that one of them shares: groups of them that share
    different pages hold more. Private pages and each page's part among all who share it (on Linux): others may too.
    """
    held = [(0, 0, 0)]  # of each: private pages, these with its parts of the shared ones, shared ones
    for member in members:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, and holds nothing
            info = member.memory_info()
            with contextlib.suppress(psutil.AccessDenied):  # it hides what it shares
                info = member.memory_full_info() if exact else info
            own = getattr(info, "uss", info.rss)
            held.append((own, getattr(info, "pss", own), info.rss - own))
    private, parts, shared = zip(*held, strict=True)
    return max(sum(parts), sum(private) + max(shared))


def processor_seconds(members: Iterable[psutil.Process]) -> float:
    """Processor seconds, of the user and of the system, of processes and of their children that they waited for."""
    total = 0.0
    for member in members:
        with contextlib.suppress(psutil.Error):
            total += sum(member.cpu_times()[:4])
    return total


class Peak:
    """The most memory that processes held together, in `bytes`, as often as they are looked at."""

    bytes = counted = 0

    def look(self, members: Sequence[psutil.Process]) -> int:
        # to count exactly holds a process up, and can only give less: not where that is no peak, or nothing moved
        pages = memory(members, exact=False)
        if pages > self.bytes and abs(pages - self.counted) > 0.005 * pages:
            self.counted, self.bytes = pages, max(self.bytes, memory(members))
        return self.bytes


# A child


@functools.cache
def namespace() -> tuple[str, ...]:
    """What to put before a command that gets a namespace of its own; () where the system does not allow it."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([*NAMESPACE, "true"], stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=START)
        return NAMESPACE
    return ()


class Child:
    """A command in a session of its own that talks in lines on its standard input and output; stderr goes to a log.

    No message, no size and no silence of it can hold up this process. `why` says why it ended, "" while it runs. Once
    it is closed nothing of it is left. `inbox` gets (child, line) of each line and (child, b"") at its end; several
    children may share one. One that is contained works in a folder of its own.
    """

    def __init__(
        self, command: Sequence[str], *, contained: bool = False, environment: Mapping[str, str] = os.environ,
        inbox: queue.SimpleQueue | None = None,
    ) -> None:  # fmt: skip
        self.why, self.peak = "", Peak()
        self.inbox, self.outbox = inbox or queue.SimpleQueue(), queue.SimpleQueue()
        self.room, self.stopping = threading.Semaphore(MAX_LINES), threading.Event()
        self.place = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.log = Path(self.place.name, "log")
        self.log.touch()
        paths = filter(None, (str(Path(__file__).parents[2]), environment.get("PYTHONPATH")))
        marked = {**environment, MARK: str(self.log), "PYTHONPATH": os.pathsep.join(paths)}
        leashed, self.leash = os.pipe()  # held by this process alone: its end tells the keeper
        self.process = subprocess.Popen(
            [*(namespace() if contained else ()), *PYTHON, __file__, *command], env=marked, start_new_session=True,
            cwd=self.place.name if contained else None, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=leashed,
        )  # fmt: skip
        os.close(leashed)
        self.limit()
        tasks = (self._guard, self._read, self._write)
        self.guard, *others = (threading.Thread(target=task, daemon=True) for task in tasks)
        for thread in (self.guard, *others):
            thread.start()

    def limit(self, *, seconds: float = math.inf, wall: float = math.inf, memory: float = math.inf) -> None:
        """From now on end it after so many processor seconds of all its processes, seconds of the clock, or at MB."""
        spent = processor_seconds(family(self.process.pid)) if seconds < math.inf else 0.0
        end = time.monotonic() + wall
        self.limits = {
            ENDED: lambda _: self.process.poll() is not None,
            f"limit of {seconds:g} processor seconds": lambda members: processor_seconds(members) > spent + seconds,
            f"limit of {wall:g} s by the clock": lambda _: time.monotonic() > end,
            f"limit of {MAX_PROCESSES} processes": lambda members: len(members) > MAX_PROCESSES,
            f"memory limit of {memory:g} MB": lambda members: self.peak.look(members) > memory * 1e6,
        }

    def send(self, line: bytes) -> None:
        self.outbox.put(line)

    def receive(self) -> bytes:
        """Its next line. Raises ChildEnded if there is none."""
        if line := received(self.inbox)[1]:
            return line
        raise ChildEnded(self.why)

    def stop(self, why: str) -> None:
        """Begin to end it."""
        self.why = self.why or why
        self.stopping.set()

    def close(self) -> None:
        self.stop("it is over")
        self.guard.join()
        self.place.cleanup()

    def ending(self) -> str:
        """What became of it, in words, once its guard has left."""
        if self.why != ENDED:
            return self.why
        code = self.process.returncode
        with contextlib.suppress(ValueError):  # there is no such signal
            return f"was ended by {signal.Signals(code - 128).name}"
        lines = ["it left no message", *self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()]
        return f"ended with exit status {code}: {lines[-1][:300]}"

    def _write(self) -> None:  # in a thread that may wait: a child need not read
        with contextlib.suppress(OSError), self.process.stdin as pipe:
            for line in iter(self.outbox.get, b""):
                pipe.write(line)
                pipe.flush()

    def _read(self) -> None:  # no more than is received: a child may write without end
        with self.process.stdout as pipe:
            while self.room.acquire() and not self.stopping.is_set() and (line := pipe.readline(MAX_BYTES + 1)):
                self.inbox.put((self, line))
        self.stop(ENDED)

    def _guard(self) -> None:
        while not self.stopping.wait(TICK):
            members = family(self.process.pid)
            if why := next((why for why, reached in self.limits.items() if reached(members)), ""):
                self.stop(why)
        if self.why == ENDED:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        _end(self.process.pid, str(self.log))
        with contextlib.suppress(subprocess.TimeoutExpired):  # the keeper, which has nobody left to keep
            self.process.wait(GRACE)
        self.process.kill()
        self.process.wait()
        os.close(self.leash)
        self.outbox.put(b"")
        self.room.release(MAX_LINES)
        self.inbox.put((self, b""))


def received(inbox: queue.SimpleQueue[tuple[Child, bytes]]) -> tuple[Child, bytes]:
    """The next (child, line) of children that share an inbox; the line is b"" when the child has ended."""
    while True:  # an endless wait could not be interrupted everywhere
        with contextlib.suppress(queue.Empty):
            child, line = inbox.get(timeout=TICK)
            child.room.release()
            return child, line


def _end(pid: int, mark: str) -> None:
    """Kill all that a process has started and all that bears the mark, until several looks have found nobody."""
    looks, end = LOOKS, time.monotonic() + END
    while looks and time.monotonic() < end:
        looks -= 1
        descended = family(pid)
        for process in (*descended, *psutil.process_iter()):
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid in (pid, os.getpid()) or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process in descended or process.environ().get(MARK) == mark:
                    looks = LOOKS
                    if sys.platform != "win32" and (group := os.getpgid(process.pid)) not in (pid, os.getpgrp()):
                        os.killpg(group, signal.SIGKILL)  # at once, while each of them starts another and ends
                    process.kill()
        time.sleep(TICK / 10)


def _keep(*command: str) -> int:
    """The keeper: start the command and stay until it has ended; return its exit status, of a signal 128 more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # children may send them; handlers, unlike SIG_IGN, are not inherited
    with contextlib.suppress(AttributeError, OSError, TypeError):  # on Linux
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: who detaches itself comes to the keeper
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, the child goes first
    with Path(os.environ[MARK]).open("wb") as log:
        child = subprocess.Popen(command, stderr=log)
    os.closerange(0, 2)  # they are the child's alone

    def wait_for_the_end_of_the_leash() -> None:
        os.read(2, 1)
        child.kill()

    threading.Thread(target=wait_for_the_end_of_the_leash, daemon=True).start()
    if sys.platform == "win32":
        code = child.wait()
    else:
        pid = status = 0
        while pid != child.pid:
            pid, status = os.wait()  # orphans too
        code = os.waitstatus_to_exitcode(status)
    _end(os.getpid(), os.environ[MARK])
    return code if code >= 0 else 128 - code


# What a child uses


def channel() -> tuple[BinaryIO, BinaryIO]:
    """A child's (input, output) for lines. Its standard input is then empty, and what it prints goes to the log."""
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return pipes


# Groups of peers


def peers(module: str, count: int | None, order: Mapping[str, Any], seconds: float) -> Iterator[tuple[int, Any]]:
    """Run `module`, which calls `serve`, in `count` processes on 127.0.0.1; yield what they say: (process, message).

    Each gets the order, and in it `coordinator` (host:port), `processes` (their number) and `process` (its own), until
    all are done. None: only one, which belongs to a group that was started elsewhere and finds it by itself. When one
    is lost, when the first says nothing for `seconds`, and when the generator is closed, all of them are ended.
    Raises PeerLost.
    """
    inbox: queue.SimpleQueue[tuple[Child, bytes]] = queue.SimpleQueue()
    children: list[Child] = []
    done = 0
    with socket.socket() as held:  # a port, kept from all but those who may share it, as JAX's coordinator does
        if may_share := hasattr(socket, "SO_REUSEPORT"):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        if not may_share:
            held.close()
        try:
            for rank in range(count or 1):
                children.append(Child([*PYTHON, "-m", module], inbox=inbox))
                place = {"coordinator": address, "processes": count, "process": rank} if count else {}
                children[rank].send(json.dumps({**order, **place}, default=int).encode() + b"\n")
            children[0].limit(wall=max(seconds, START))
            while done < len(children):
                child, line = received(inbox)
                message = json.loads(line or "{}")
                if "error" in message:
                    child.why = f"failed with {message['error']}"
                if "error" in message or not line:
                    raise _lost(child, children)
                done += "done" in message
                if child is children[0]:
                    child.limit(wall=seconds)
                yield children.index(child), message
        finally:
            for child in children:
                child.stop("it is over")
            for child in children:
                child.close()


def _lost(first: Child, children: Sequence[Child]) -> PeerLost:
    """Name the peer that was lost first: one that was killed, rather than those that complain or abort for it."""
    time.sleep(GRACE)
    silent = [child for child in children if child.why == ENDED]
    for child in silent:
        child.guard.join()
    for child in children:  # one that met its limit was ended for it; what the others say of that does not count
        if child.why.startswith("limit"):
            return PeerLost(f"Nothing came from the processes within a {child.why}")
    guilty = min(silent, key=lambda child: child.process.returncode == 128 + signal.SIGABRT, default=first)
    return PeerLost(f"Process {children.index(guilty)} (of 0 to {len(children) - 1}) {guilty.ending()}")


def serve(task: Callable[[dict[str, Any], Callable[..., None]], object]) -> None:
    """In a process of a group: do the task, `task(order, say)`, and stay until the group is at its end.

    `say(name=value, …)` is a message of plain values.
    """
    requests, replies = channel()

    def say(**message: Any) -> None:
        replies.write(json.dumps(message).encode() + b"\n")
        replies.flush()

    try:
        task(json.loads(requests.readline()), say)
        say(done=True)
    except Exception as error:
        say(error=": ".join([type(error).__name__, *str(error).splitlines()[:1]])[:500])
    requests.read()  # stays reachable until it is seen who was first


if __name__ == "__main__":
    sys.exit(_keep(*sys.argv[1:]))
