"""The command `python -m dlscale serve`: a recogniser behind a socket of this machine, with its load generator.

A request is a line of JSON, {"id": 7, "sound": "…"}: 16-bit samples, low byte first, 8,000 a second, in base64. So is
its answer, {"id": 7, "heard": "aes", "batch": 3} or {"id": 7, "error": "…"}: every line gets one, in any order. This
module is also the process that a notebook starts.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dlscale.lab import checks, devices
from dlscale.lab.processes import PYTHON, Child, ChildEnded
from dlscale.sequence_models_and_serving import sequence
from dlscale.sequence_models_and_serving.serving import Batcher, Busy

ABOUT = """Serve a recogniser that the course has trained, on 127.0.0.1 only, in batches. Each --max-batch gets a port
of its own, all with the same compiled programs. Ctrl-C ends it."""
DETAILS = """Example: python -m dlscale serve --model recogniser.npz --max-batch 1 32."""
HOST = "127.0.0.1"
MAX_LINE = 30_000  # bytes of a request; the longest sound takes 25,100
MAX_BATCH, ROOM = 256, 256


# Requests


class Refused(ValueError):
    """A request that cannot be served. Its arguments: the reason, and the request's id if it has one."""


def parse(line: bytes) -> tuple[int | str | None, np.ndarray]:
    """A request's id and its samples, from a line. Raises Refused, and nothing else, whatever the line is."""
    try:
        content = {**json.loads(line)}
    except (ValueError, TypeError, RecursionError):
        raise Refused('a request must be a line of JSON, {"id": 1, "sound": "…"}') from None
    identity, sound = content.get("id"), content.get("sound")
    if not isinstance(identity, int | str | None) or len(str(identity)) > 64:
        raise Refused('"id" must be a whole number or a text, of at most 64 signs')
    try:
        samples = base64.b64decode(sound, validate=True)
    except (TypeError, ValueError):
        raise Refused('"sound" must be a text: 16-bit samples in base64', identity) from None
    if len(samples) % 2 or not 2 * sequence.WINDOW <= len(samples) <= 2 * sequence.LONGEST:
        limits = f"{sequence.WINDOW} to {sequence.LONGEST:,} samples of two bytes each"
        raise Refused(f'"sound" must have {limits}, not {len(samples):,} bytes', identity)
    return identity, np.frombuffer(samples, "<i2")


def request(identity: int, sound: np.ndarray) -> bytes:
    """The line for a sound of 16-bit samples."""
    text = base64.b64encode(np.asarray(sound, "<i2").tobytes()).decode()
    return json.dumps({"id": identity, "sound": text}).encode() + b"\n"


# The server


def compiled(params: Any, most: int) -> Callable[[Sequence[np.ndarray]], list[dict[str, Any]]]:
    """What hears a batch of sounds, with programs for 1, 4, 16, … and `most`, compiled beforehand."""
    run, sizes = jax.jit(sequence.recognise), [1]
    while sizes[-1] < most:
        sizes.append(min(most, 4 * sizes[-1]))

    def work(sounds: Sequence[np.ndarray]) -> list[dict[str, Any]]:
        size = next(size for size in sizes if size >= len(sounds))
        batch, frames = np.zeros((size, sequence.LONGEST), np.int16), np.ones(size, np.int32)
        for i, sound in enumerate(sounds):
            batch[i, : len(sound)], frames[i] = sound, sequence.length_in_frames(len(sound))
        paths = np.asarray(run(params, batch, frames))[: len(sounds)]
        heard = [sequence.collapse(path[:n]) for path, n in zip(paths, frames, strict=False)]
        return [{"heard": sequence.spelled(labels), "batch": len(sounds)} for labels in heard]

    for size in sizes:
        work([np.ones(sequence.LONGEST, np.int16)] * size)
    return work


async def converse(batcher: Batcher, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each line of a connection, in any order; whoever sends too long a line is left."""

    async def answer(line: bytes) -> None:
        identity = None
        try:
            identity, sound = parse(line)
            found = await batcher.ask(sound)
        except (Refused, Busy) as error:
            reason, *known = error.args
            identity, found = known[0] if known else identity, {"error": reason}
        except Exception as error:  # of the net: told, and the server lives on
            found = {"error": f"it failed: {type(error).__name__}"}
        with contextlib.suppress(OSError):
            writer.write(json.dumps({"id": identity, **found}).encode() + b"\n")
            await writer.drain()

    async with asyncio.TaskGroup() as answers:
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                answers.create_task(answer(line))
    writer.close()


async def host(params: Any, sizes: Sequence[int], room: int, port: int) -> None:
    """Serve on a port for each largest batch until cancelled.

    Prints the ports, the system's choice for 0, as a line of JSON.
    """
    work = compiled(params, max(sizes))
    batchers = [Batcher(work, size, room) for size in sizes]
    servers = [
        await asyncio.start_server(functools.partial(converse, batcher), HOST, port and port + i, limit=MAX_LINE)
        for i, batcher in enumerate(batchers)
    ]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.gather(*(batcher.run() for batcher in batchers))


# The load


async def send(port: int, sounds: Sequence[np.ndarray], arrivals: np.ndarray) -> tuple:
    """Send the sounds when they are due, whether or not there were answers. Raises OSError if an answer is missing.

    Returns the seconds from when each was due to its answer, NaN of those that were refused, and the answers.
    """
    lines = [request(i, sound) for i, sound in enumerate(sounds)]
    ends, answers = np.full(len(lines), np.nan), [{} for _ in lines]
    reader, writer = await asyncio.open_connection(HOST, port, limit=MAX_LINE)
    start = time.perf_counter()

    async def receive() -> None:
        for _ in lines:
            if not (line := await reader.readline()):
                raise ConnectionError("the server left without an answer")
            answer = json.loads(line)
            ends[answer["id"]], answers[answer["id"]] = time.perf_counter() - start, answer

    receiving = asyncio.create_task(receive())
    for line, due in zip(lines, arrivals, strict=True):
        await asyncio.sleep(max(0, due - (time.perf_counter() - start)))
        writer.write(line)
        await writer.drain()
    await receiving
    writer.close()
    return np.where(["heard" in answer for answer in answers], ends - arrivals, np.nan), answers


def load(port: int, sounds: Sequence[np.ndarray], arrivals: np.ndarray) -> tuple:
    """`send` in a thread: a notebook has an event loop of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(send(port, sounds, arrivals))).result()


@contextlib.contextmanager
def running(model: Path, sizes: Sequence[int]) -> Iterator[list[int]]:
    """A server in a process of its own while the block lasts: a port for each largest batch.

    Raises ValueError if it does not start.
    """
    child = Child([*PYTHON, "-m", __name__, "--model", str(Path(model).absolute()), "--max-batch", *map(str, sizes)])
    try:
        yield json.loads(child.receive())
    except ChildEnded:
        child.guard.join()
        raise ValueError(f"The server did not start: {child.ending()}") from None
    finally:
        child.close()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m dlscale serve", description=ABOUT, epilog=DETAILS)
    parser.add_argument("--model", type=Path, required=True, help="a file of `sequence.save`")
    parser.add_argument("--max-batch", type=int, nargs="+", default=[16], help="requests of a batch, at most (16)")
    parser.add_argument("--room", type=int, default=ROOM, help="requests that may wait; more are refused (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="the first port; 0: the system chooses (%(default)s)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return an exit status."""
    chosen = options().parse_args(arguments)
    try:
        checks.whole("--port", chosen.port, low=0, high=65_000)
        sizes = [checks.whole("--max-batch", batch, high=MAX_BATCH) for batch in chosen.max_batch]
        checks.whole("--room", chosen.room)
        params = sequence.load(chosen.model)
        # one thread for a batch: the others are for those who ask
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
        devices.prepare()
        asyncio.run(host(params, sizes, chosen.room, chosen.port))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    print("Stopped.", file=sys.stderr)
    return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
