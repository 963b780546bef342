"""The command `python -m dlscale serve`: a recogniser behind a socket of this machine, with its load generator.

A request is a line of JSON, {"id": 7, "sound": "…"}: 16-bit samples, low byte first, 8,000 a second, in base64. So is
its answer, {"id": 7, "heard": "aes", "batch": 3} or {"id": 7, "error": "…"}: every line gets one, in any order. This
module is also the process that a notebook starts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import binascii
import collections
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dlscale.lab import checks, devices
from dlscale.lab.processes import PYTHON, Child, ChildEnded
from dlscale.sequence_models_and_serving import sequence
from dlscale.sequence_models_and_serving.serving import Batcher, Busy, Rule, poisson

ABOUT = """Serve a recogniser that the course has trained, on 127.0.0.1 only, in batches. Each pair of --max-batch and
--max-wait-ms gets a port of its own, all with the same compiled programs. Ctrl-C ends it after those who wait."""
HOST = "127.0.0.1"
MAX_LINE = 30_000  # bytes of a request; the longest sound takes 25,100
MAX_CONNECTIONS, MAX_OPEN = 64, 64  # of all; requests of one that wait
IDLE = 60.0  # seconds until a silent one is closed
MAX_BATCH, ROOM = 256, 256


# Requests


class Refused(ValueError):
    """A request that cannot be served; the message says why. `id` is the request's, if it has one."""

    def __init__(self, message: str, identity: int | str | None = None) -> None:
        super().__init__(message)
        self.id = identity


class Request(NamedTuple):
    id: int | str | None
    sound: np.ndarray  # 16-bit samples, at least one frame


def parse(line: bytes) -> Request:
    """A request from a line. Raises Refused, and nothing else, whatever the line is."""
    if len(line) > MAX_LINE:
        raise Refused(f"a request may have at most {MAX_LINE:,} bytes")
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise Refused('a request must be a line of JSON, {"id": 1, "sound": "…"}') from None
    if not isinstance(content, dict):
        raise Refused('a request must be an object, {"id": 1, "sound": "…"}')
    identity, sound = content.get("id"), content.get("sound")
    whole = isinstance(identity, int) and not isinstance(identity, bool) and abs(identity) < 2**53
    short = isinstance(identity, str) and len(identity) <= 64 and identity.isprintable()
    if not (identity is None or whole or short):
        raise Refused('"id" must be a whole number below 2^53, or a text of at most 64 signs')
    if more := sorted(content.keys() - {"id", "sound"}):
        raise Refused(f'a request has "id" and "sound" only, not {more[0][:40]!r}', identity)
    if not isinstance(sound, str):
        raise Refused('"sound" must be a text: 16-bit samples in base64', identity)
    try:
        samples = base64.b64decode(sound, validate=True)
    except (binascii.Error, ValueError):
        raise Refused('"sound" is not base64', identity) from None
    if len(samples) % 2 or not 2 * sequence.WINDOW <= len(samples) <= 2 * sequence.LONGEST:
        limits = f"{sequence.WINDOW} to {sequence.LONGEST:,} samples of two bytes each"
        raise Refused(f'"sound" must have {limits}, not {len(samples):,} bytes', identity)
    return Request(identity, np.frombuffer(samples, "<i2"))


def request(identity: int, sound: np.ndarray) -> bytes:
    """The line for a sound of 16-bit samples."""
    text = base64.b64encode(np.asarray(sound, "<i2").tobytes()).decode()
    return json.dumps({"id": identity, "sound": text}).encode() + b"\n"


# The server


def compiled(params: Any, most: int) -> tuple[Callable[[list[np.ndarray]], list[dict[str, Any]]], dict[int, float]]:
    """What hears a batch of sounds, with programs for 1, 4, 16, … and `most`, and the seconds of each."""
    run, sizes, seconds = jax.jit(sequence.recognise), [1], {}
    while sizes[-1] < most:
        sizes.append(min(most, 4 * sizes[-1]))

    def work(sounds: list[np.ndarray]) -> list[dict[str, Any]]:
        size = next(size for size in sizes if size >= len(sounds))
        batch, frames = np.zeros((size, sequence.LONGEST), np.int16), np.ones(size, np.int32)
        for i, sound in enumerate(sounds):
            batch[i, : len(sound)], frames[i] = sound, sequence.length_in_frames(len(sound))
        paths = np.asarray(run(params, batch, frames))
        heard = [sequence.spelled(sequence.collapse(path[:n])) for path, n in zip(paths, frames, strict=True)]
        return [{"heard": text, "batch": len(sounds)} for text in heard[: len(sounds)]]

    for size in sizes:
        sounds = [np.ones(sequence.LONGEST, np.int16)] * size
        work(sounds)
        times = [_timed(lambda sounds=sounds: work(sounds)) for _ in range(5)]
        seconds[size] = min(times)
    return work, seconds


def _timed(task: Callable[[], object]) -> float:
    """Processor seconds, which others on the machine do not change: the work has one thread."""
    start = time.process_time()
    task()
    return time.process_time() - start


class Server:
    """A port whose requests go to one batcher."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher, self.tasks = batcher, set()
        self.counts: collections.Counter[str] = collections.Counter()

    async def open(self, port: int) -> int:
        """Listen, and return the port, which the system chooses for 0."""
        self.runner = asyncio.create_task(self.batcher.run())
        self.socket = await asyncio.start_server(self._connected, HOST, port, limit=MAX_LINE)
        return self.socket.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Take no more, answer all who wait, and leave."""
        self.socket.close()
        self.batcher.close()
        await self.runner
        while self.tasks:
            done, _ = await asyncio.wait(self.tasks, timeout=2)
            if not done:  # they read nothing
                for task in self.tasks:
                    task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        answers: set[asyncio.Task] = set()
        slots, self.counts["connections"] = asyncio.Semaphore(MAX_OPEN), self.counts["connections"] + 1
        self.tasks.add(task)
        try:
            if self.counts["connections"] > MAX_CONNECTIONS:
                await self._write(writer, {"id": None, "error": f"{MAX_CONNECTIONS} connections are open already"})
                return
            while not self.batcher.closing:
                await slots.acquire()
                line = await self._line(reader)
                if line is None:
                    await self._write(writer, {"id": None, "error": f"a line may have at most {MAX_LINE:,} bytes"})
                    break
                if not line:
                    break
                answer = asyncio.create_task(self._answer(line, writer, slots))
                answers.add(answer)
                answer.add_done_callback(answers.discard)
            await asyncio.gather(*answers, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self.counts["connections"] -= 1
            self.tasks.discard(task)
            with contextlib.suppress(OSError):
                writer.close()

    async def _line(self, reader: asyncio.StreamReader) -> bytes | None:
        """The next line; b"" at the end, after a long silence, and when the server closes; None if it is too long."""
        reading, closing = asyncio.ensure_future(reader.readline()), self.runner
        await asyncio.wait({reading, closing}, timeout=IDLE, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            return b""
        try:
            return reading.result()
        except ValueError:
            return None

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter, slots: asyncio.Semaphore) -> None:
        identity = None
        try:
            identity, sound = parse(line)
            found = await self.batcher.ask(sound)
            self.counts["answered"] += 1
        except (Refused, Busy) as error:
            identity, found = getattr(error, "id", identity), {"error": str(error)}
            self.counts["refused"] += 1
        except Exception as error:  # of the net: told, and the server lives on
            found = {"error": f"it failed: {type(error).__name__}"}
            self.counts["failed"] += 1
        with contextlib.suppress(OSError):
            await self._write(writer, {"id": identity, **found})
        slots.release()

    async def _write(self, writer: asyncio.StreamWriter, answer: dict[str, Any]) -> None:
        writer.write(json.dumps(answer).encode() + b"\n")
        try:
            async with asyncio.timeout(IDLE):
                await writer.drain()
        except TimeoutError:  # who asks without end and never reads
            writer.transport.abort()


async def host(params: Any, rules: Sequence[Rule], port: int, tell: Callable[..., None]) -> collections.Counter[str]:
    """Serve on a port for each rule until SIGINT or SIGTERM; return how many requests were answered and refused."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt there
            loop.add_signal_handler(number, stop.set)
    with ThreadPoolExecutor(1) as thread:
        work, seconds = await loop.run_in_executor(thread, compiled, params, max(rule.max_batch for rule in rules))
        servers = [Server(Batcher(work, rule, thread)) for rule in rules]
        ports = [await server.open(port + i if port else 0) for i, server in enumerate(servers)]
        tell(ports=ports, seconds=seconds)
        await stop.wait()
        for server in servers:
            await server.close()
    return sum((server.counts for server in servers), collections.Counter())


# The load


class Load(NamedTuple):
    """What came back, in the order of the requests: seconds from when it was due to its answer, and the answers."""

    seconds: np.ndarray
    answers: list[dict[str, Any]]

    @property
    def answered(self) -> np.ndarray:
        """The seconds of those that were not refused."""
        return self.seconds[["heard" in answer for answer in self.answers]]

    @property
    def refused(self) -> int:
        return len(self.seconds) - len(self.answered)


async def send(port: int, sounds: Sequence[np.ndarray], arrivals: np.ndarray, connections: int = 8) -> Load:
    """Send the sounds when they are due, whether or not there were answers. Raises OSError if an answer is missing."""
    lines = [request(i, sound) for i, sound in enumerate(sounds)]
    ends, answers = np.full(len(lines), np.nan), [{} for _ in lines]
    start = time.perf_counter() + 0.02

    async def one(first: int) -> None:
        reader, writer = await asyncio.open_connection(HOST, port, limit=MAX_LINE)
        mine = range(first, len(lines), connections)

        async def receive() -> None:
            for _ in mine:
                answer = json.loads(await reader.readline() or "null")
                if answer is None:
                    raise ConnectionError("the server left without an answer")
                ends[answer["id"]], answers[answer["id"]] = time.perf_counter() - start, answer

        receiving = asyncio.create_task(receive())
        for i in mine:
            if (wait := arrivals[i] - (time.perf_counter() - start)) > 0:
                await asyncio.sleep(wait)
            writer.write(lines[i])
            await writer.drain()
        await receiving
        writer.close()

    await asyncio.gather(*(one(first) for first in range(min(connections, len(lines)))))
    return Load(ends - arrivals, answers)


class Running(NamedTuple):
    """A server in a process of its own: a port for each rule, and the seconds of a batch of each size."""

    ports: list[int]
    seconds: dict[int, float]

    def load(self, place: int, sounds: Sequence[np.ndarray], arrivals: np.ndarray) -> Load:
        """`send` to the port of a rule, in a thread: a notebook has an event loop of its own."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(send(self.ports[place], sounds, arrivals))).result()


@contextlib.contextmanager
def running(model: Path, rules: Sequence[Rule]) -> Iterator[Running]:
    """A server for these rules while the block lasts; all have the room of the first. Raises ValueError if it fails."""
    batches, waits = [str(rule.max_batch) for rule in rules], [f"{1e3 * rule.max_wait:g}" for rule in rules]
    command = [*PYTHON, "-m", __name__ if __name__ != "__main__" else __spec__.name]
    command += ["--model", str(Path(model).absolute()), "--max-batch", *batches]
    command += ["--max-wait-ms", *waits, "--room", str(rules[0].room), "--json"]
    child = Child(command)
    try:
        told = json.loads(child.receive())
        yield Running(told["ports"], {int(size): s for size, s in told["seconds"].items()})
    except ChildEnded:
        child.guard.join()
        raise ValueError(f"The server did not start: {child.ending()}") from None
    finally:
        child.close()


def bench(model: Path, rules: Sequence[Rule], rates: Sequence[float], seconds: float = 2.0) -> None:
    """Print the latency of each rule at each arrival rate."""
    sound = np.random.default_rng(0).integers(-9999, 9999, sequence.LONGEST)
    with running(model, rules) as server:
        print("a batch of " + ", ".join(f"{size}: {1e3 * s:.1f} ms" for size, s in server.seconds.items()))
        print(f"{'max batch':>9} {'wait ms':>8} {'rate/s':>8} {'median ms':>10} {'95 % ms':>9} {'refused':>8}")
        for place, rule in enumerate(rules):
            for rate in rates:
                arrivals = poisson(rate, max(1, int(rate * seconds)), 0)
                found = server.load(place, [sound] * len(arrivals), arrivals)
                middle, late = 1e3 * np.quantile(found.answered, [0.5, 0.95])
                times = f"{middle:10.1f} {late:9.1f} {found.refused:8}"
                print(f"{rule.max_batch:9} {1e3 * rule.max_wait:8g} {rate:8g} {times}", flush=True)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m dlscale serve", description=ABOUT)
    parser.add_argument("--model", type=Path, required=True, help="a file of `sequence.save`, as notebook 13 writes it")
    parser.add_argument("--max-batch", type=int, nargs="+", default=[32], help="requests of a batch, at most (32)")
    parser.add_argument(
        "--max-wait-ms", type=float, nargs="+", default=[0.0], help="that a request waits for others (0)"
    )
    parser.add_argument(
        "--room", type=int, default=ROOM, help="requests that may wait; others are refused (%(default)s)"
    )
    parser.add_argument("--port", type=int, default=0, help="the first port; 0: the system chooses (%(default)s)")
    parser.add_argument("--bench", action="store_true", help="start it, put load on it, print latencies, and end")
    parser.add_argument("--rates", type=float, nargs="+", default=[50, 200, 800], help="requests a second for --bench")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)  # for the process that started it
    return parser


def chosen_rules(chosen: argparse.Namespace) -> list[Rule]:
    """A rule for each pair of options. Raises ValueError for numbers that cannot be."""
    many = max(len(chosen.max_batch), len(chosen.max_wait_ms))
    lists = [values * many if len(values) == 1 else values for values in (chosen.max_batch, chosen.max_wait_ms)]
    if len(lists[0]) != len(lists[1]):
        raise ValueError("--max-batch and --max-wait-ms must be equally many, or one.")
    for batch in lists[0]:
        checks.whole("--max-batch", batch, high=MAX_BATCH)
    checks.whole("--port", chosen.port, low=0, high=65_535 - many)
    return [Rule(batch, wait / 1e3, chosen.room).checked() for batch, wait in zip(*lists, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return an exit status."""
    parser = options()
    chosen = parser.parse_args(arguments)
    try:
        rules = chosen_rules(chosen)
        params = sequence.load(chosen.model)
        if chosen.bench:
            for rate in chosen.rates:
                poisson(rate, 1, 0)
            bench(chosen.model, rules, chosen.rates)
            return 0
        # one thread for a batch: the others are for those who ask
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
        devices.prepare()

        def tell(ports: list[int], seconds: dict[int, float]) -> None:
            if chosen.json:
                print(json.dumps({"ports": ports, "seconds": seconds}), flush=True)
            else:
                for rule, port in zip(rules, ports, strict=True):
                    print(f"{HOST}:{port}: batches of at most {rule.max_batch}, {1e3 * rule.max_wait:g} ms", flush=True)

        counts = asyncio.run(host(params, rules, chosen.port, tell))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 128 + signal.SIGINT
    print(f"Stopped: {counts['answered']:,} requests answered, {counts['refused']:,} refused.", file=sys.stderr)
    return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
