"""Processes that are watched: one child with limits that leaves nothing behind, and groups of peers on this machine.

Between a child and this process stands a keeper, a small process that ends all of the child's when the child ends, when
it is told to, and when this process is gone. `contained` children get, where the system allows it (on Linux, with
`unshare` of util-linux), a namespace of process ids of their own: they see no process but theirs and can signal no
other, and the kernel ends all of theirs with the keeper, whatever they did.

Elsewhere the keeper ends what it finds: what descends from it (on Linux detached processes too) and what bears the
child's mark in its environment. What remains possible there: a child can signal any process of its user, this one too,
and a process that detaches itself, clears its environment and, on Linux, kills the keeper is not found.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import math
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import psutil

PYTHON = (sys.executable, "-P")  # no folder in front of the installed packages
NAMESPACE = ("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc")
MARK = "DLSCALE_WATCHED"
ENDED = "its process ended"
MAX_BYTES = 16_000_000  # of one line
MAX_LINES = 8  # of a child that wait to be received
MAX_PROCESSES = 100  # of a child and all that it started
TICK = 0.1  # seconds between two looks at a child
GRACE = 0.5  # seconds in which a child that fell silent ends, and in which the death that was the cause becomes visible
END = 10  # seconds in which killed processes must be gone; one that hangs in the kernel cannot be waited for
LOOKS = 5  # that find nobody: processes that end while they are looked at may have started another
START = 60  # seconds in which peers have found each other, whatever the limit of their silence
ATTEMPTS = 3  # to find a port that nobody else takes at the same moment


class ChildEnded(Exception):
    """A child ended, by itself or at a limit; the message says why."""


class PeerLost(RuntimeError):
    """A group of peers that did not come to its end; the message says who was lost and why."""


class _PortTaken(Exception):
    pass


# What processes use


def family(pid: int) -> list[psutil.Process]:
    """A process and those that it started, as far as they descend from it."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def memory(members: Iterable[psutil.Process], exact: bool = True) -> int:
    """Bytes that processes hold together; exactly: shared pages counted once (on Linux, nearly elsewhere)."""
    total = 0
    for member in members:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or hides what it shares
            total += (pages := member.memory_info().rss)
            if exact:
                info = member.memory_full_info()
                total += getattr(info, "pss", info.uss) - pages
    return total


def processor_seconds(members: Iterable[psutil.Process]) -> float:
    """Processor seconds, of the user and of the system, of processes and of their children that they waited for."""
    total = 0.0
    for member in members:
        with contextlib.suppress(psutil.Error):
            total += sum(member.cpu_times()[:4])
    return total


class Peak:
    """The most memory that a process and those it started held at once, in `bytes`, as often as `look` is called."""

    def __init__(self, pid: int) -> None:
        self.pid, self.bytes, self.counted = pid, 0, 0

    def look(self, members: Sequence[psutil.Process] | None = None) -> int:
        # to count exactly holds a process up, and can only give less: not where that is no peak, or nothing moved
        members = family(self.pid) if members is None else members
        pages = memory(members, exact=False)
        if pages > self.bytes and abs(pages - self.counted) > 0.005 * pages:
            self.counted = pages
            self.bytes = max(self.bytes, memory(members))
        return self.bytes


# A child


@functools.cache
def namespace() -> tuple[str, ...]:
    """What to put before a command that gets a namespace of its own; () where the system does not allow it."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        subprocess.run([*NAMESPACE, *PYTHON, __file__], **pipes, check=True, timeout=START)
        return NAMESPACE
    return ()


class Child:
    """A command in a session of its own that talks in lines on its standard input and output; stderr goes to a log.

    No message, no size and no silence of it can hold up this process. `why` says why it ended, "" while it runs. Once
    it is closed nothing of it is left. `inbox` gets (child, line) of each line and (child, b"") at its end; several
    children may share one.
    """

    def __init__(
        self, command: Sequence[str], *, contained: bool = False, environment: Mapping[str, str] | None = None,
        folder: Path | None = None, inbox: queue.SimpleQueue | None = None,
    ) -> None:  # fmt: skip
        self.why, self.error, self.mark = "", "", secrets.token_hex(8)
        self.inbox = inbox or queue.SimpleQueue()
        self.place = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.log = Path(self.place.name, "log")
        environment = dict(os.environ if environment is None else environment)
        paths = filter(None, (str(Path(__file__).parents[2]), environment.get("PYTHONPATH")))
        environment |= {MARK: self.mark, "PYTHONPATH": os.pathsep.join(paths)}
        before = namespace() if contained else ()
        leashed, self.leash = os.pipe()  # held by this process alone: its end tells the keeper
        self.process = subprocess.Popen(
            [*before, *PYTHON, __file__, str(self.log), *command], cwd=folder, env=environment, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=leashed,
        )  # fmt: skip
        os.close(leashed)
        self.peak, self.stopping = Peak(self.process.pid), threading.Event()
        self.outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.room = threading.Semaphore(MAX_LINES)
        self.limit()
        self.threads = [threading.Thread(target=task, daemon=True) for task in (self._guard, self._read, self._write)]
        for thread in self.threads:
            thread.start()

    def limit(self, *, processor: float = math.inf, wall: float = math.inf, memory: float = math.inf) -> None:
        """From now on end it after so many processor seconds of all its processes, seconds of the clock, or at MB."""
        spent = processor_seconds(family(self.process.pid)) if processor < math.inf else 0.0
        end = time.monotonic() + wall
        self.limits = {
            f"limit of {processor:g} processor seconds": lambda members: processor_seconds(members) > spent + processor,
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
        self.threads[0].join()
        for thread in self.threads[1:]:  # a process that could not be found may hold their pipes open
            thread.join(GRACE)
        self.place.cleanup()

    def ending(self) -> str:
        """What became of it, in words, once its guard has left."""
        code = self.process.returncode
        if self.error or self.why != ENDED:
            return f"failed with {self.error or self.why}"
        if code > 128:
            names = {member.value: member.name for member in signal.Signals}
            return f"was ended by {names.get(code - 128, f'signal {code - 128}')}"
        lines = self.logged().strip().splitlines() or ["it left no message"]
        return f"ended with exit status {code}: {lines[-1][:300]}"

    def logged(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

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
            gone = ENDED if self.process.poll() is not None else ""
            if why := gone or next((why for why, reached in self.limits.items() if reached(members)), ""):
                self.stop(why)
        if self.why == ENDED:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(GRACE)
        _end(self.process.pid, self.mark)
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
    found_nobody, end = 0, time.monotonic() + END
    while found_nobody < LOOKS and time.monotonic() < end:
        found_nobody += 1
        descended = family(pid)
        for process in (*descended, *psutil.process_iter()):
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid in (pid, os.getpid()) or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process not in descended and process.environ().get(MARK) != mark:
                    continue
                found_nobody = 0
                if sys.platform != "win32" and (group := os.getpgid(process.pid)) not in (pid, os.getpgrp()):
                    os.killpg(group, signal.SIGKILL)  # at once, while each of them starts another and ends
                process.kill()
        time.sleep(TICK / 10)


def _keep(log: str, *command: str) -> int:
    """The keeper: start the command and stay until it has ended; return its exit status, of a signal 128 more."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # children may send them; handlers, unlike SIG_IGN, are not inherited
    with contextlib.suppress(AttributeError, OSError, TypeError):  # Linux: who detaches itself comes to the keeper
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    with contextlib.suppress(OSError):  # Linux: where memory is short, the child goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    with Path(log).open("wb") as file:
        child = subprocess.Popen(command, stderr=file)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # they are the child's alone
        os.dup2(nothing, stream)

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
    if os.getpid() > 1:  # the first process of a namespace takes all others with it
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
    for attempt in range(ATTEMPTS):
        with contextlib.suppress(_PortTaken):
            yield from _group(module, count, order, seconds, hold_port=attempt == 0)
            return
    raise PeerLost(f"No free port was found on 127.0.0.1 in {ATTEMPTS} attempts.")


def _bound() -> socket.socket:
    """A socket that keeps a port of 127.0.0.1 from all but those who may share it, as JAX's coordinator does."""
    held = socket.socket()
    if hasattr(socket, "SO_REUSEPORT"):
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held


def _group(
    module: str, count: int | None, order: Mapping[str, Any], seconds: float, hold_port: bool
) -> Iterator[tuple[int, Any]]:
    inbox: queue.SimpleQueue[tuple[Child, bytes]] = queue.SimpleQueue()
    children: list[Child] = []
    joined, done = False, 0
    with _bound() as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        if not hold_port or not hasattr(socket, "SO_REUSEPORT"):
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
                joined |= "joined" in message
                done += "done" in message
                child.error = message.get("error", "")
                if child.error or not line:
                    _lost(child, children, joined)
                if child is children[0]:
                    child.limit(wall=seconds)
                yield children.index(child), message
        finally:
            for child in children:
                child.stop("it is over")
            for child in children:
                child.close()


def _lost(first: Child, children: Sequence[Child], joined: bool) -> NoReturn:
    """Name the peer that was lost first: one that was killed, rather than those that complain or abort for it."""
    time.sleep(GRACE)
    silent = [child for child in children if child.why == ENDED and not child.error]
    for child in silent:
        child.threads[0].join()
    if not joined and "Failed to add port" in children[0].logged():
        raise _PortTaken
    for child in children:  # one that met its limit was ended for it; what the others say of that does not count
        if child.why not in ("", ENDED):
            raise PeerLost(f"Nothing came from the processes within a {child.why}")
    guilty = min(silent, key=lambda child: child.process.returncode == 128 + signal.SIGABRT, default=first)
    raise PeerLost(f"Process {children.index(guilty)} (of 0 to {len(children) - 1}) {guilty.ending()}")


def serve(task: Callable[[dict[str, Any], Callable[..., None]], object]) -> None:
    """In a process of a group: do the task, `task(order, say)`, and stay until the group is at its end.

    `say(name=value, …)` is a message of plain values. The task says `joined` when it has found its peers.
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


if __name__ == "__main__" and len(sys.argv) > 1:
    sys.exit(_keep(*sys.argv[1:]))
