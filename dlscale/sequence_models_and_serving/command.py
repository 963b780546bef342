"""The command `python -m dlscale serve`: a recogniser behind a socket of this machine, with its load generator.

A request is a connection: 16-bit samples, low byte first, 8,000 a second, and no more. Its answer is a line of JSON,
{"heard": "aes", "batch": 3} or {"error": "…"}. This module is also the process that a notebook starts.
"""

from __future__ import annotations

import argparse
import asyncio
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

ABOUT = """Serve a recogniser that the course has trained, on 127.0.0.1 only, in batches. Each --max-batch gets a port
of its own, all with the same compiled programs. Ctrl-C ends it."""
DETAILS = """Example: python -m dlscale serve --model recogniser.npz --max-batch 1 16."""
HOST = "127.0.0.1"
PROGRAMS = (1, 4, 16)  # requests of a batch for which there is a compiled program


def compiled(params: Any) -> Callable[[Sequence[np.ndarray]], list[str]]:
    """What hears a batch of sounds, compiled beforehand."""
    run = jax.jit(lambda sounds, frames: sequence.hear(params, sequence.spectrogram(sounds), frames).argmax(2))

    def work(sounds: Sequence[np.ndarray]) -> list[str]:
        size = next(size for size in PROGRAMS if size >= len(sounds))
        batch, frames = np.zeros((size, sequence.LONGEST), np.int16), np.ones(size, np.int32)
        for i, sound in enumerate(sounds):
            batch[i, : len(sound)], frames[i] = sound, sequence.length_in_frames(len(sound))
        paths = np.asarray(run(batch, frames))[: len(sounds)]
        return [sequence.spelled(sequence.collapse(path[:n])) for path, n in zip(paths, frames, strict=False)]

    for size in PROGRAMS:
        work([np.ones(sequence.LONGEST, np.int16)] * size)
    return work


async def batches(work: Callable[[Sequence[np.ndarray]], list[str]], waiting: asyncio.Queue, most: int) -> None:
    """Eager batches until cancelled: as soon as `work` is free, it takes all that wait, at most `most`."""
    while True:
        batch = [await waiting.get()]
        while len(batch) < most and not waiting.empty():
            batch.append(waiting.get_nowait())
        sounds, answers = zip(*batch, strict=True)
        for answer, heard in zip(answers, await asyncio.to_thread(work, sounds), strict=True):
            answer.set_result({"heard": heard, "batch": len(batch)})


async def converse(waiting: asyncio.Queue, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer a connection; whoever sends too much is left."""
    answer, longest = asyncio.get_running_loop().create_future(), 2 * sequence.LONGEST
    with contextlib.suppress(OSError), contextlib.closing(writer):
        try:
            await reader.readexactly(longest + 1)
            return
        except asyncio.IncompleteReadError as end:
            sound = end.partial
        if len(sound) % 2 or len(sound) < 2 * sequence.WINDOW:
            answer.set_result({"error": f"send {sequence.WINDOW} to {sequence.LONGEST:,} samples of two bytes each"})
        else:
            waiting.put_nowait((np.frombuffer(sound, "<i2"), answer))
        writer.write(json.dumps(await answer).encode() + b"\n")
        await writer.drain()


async def host(params: Any, sizes: Sequence[int]) -> None:
    """Serve on a port for each largest batch until cancelled. Prints the ports as a line of JSON."""
    work, queues = compiled(params), [asyncio.Queue() for _ in sizes]
    conversations = [functools.partial(converse, waiting) for waiting in queues]
    servers = [await asyncio.start_server(answer, HOST, 0, backlog=512) for answer in conversations]
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.gather(*(batches(work, waiting, most) for waiting, most in zip(queues, sizes, strict=True)))


def load(port: int, sounds: Sequence[bytes], arrivals: np.ndarray) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Send the sounds when they are due, whether or not there were answers.

    Returns the seconds from when each was due to its answer, and the answers. Raises OSError if one is missing.
    """

    async def ask(sound: bytes, due: float) -> tuple[float, dict[str, Any]]:
        await asyncio.sleep(max(0, start + due - time.perf_counter()))
        reader, writer = await asyncio.open_connection(HOST, port)
        with contextlib.closing(writer):
            writer.write(sound)
            writer.write_eof()
            if not (line := await reader.readline()):
                raise ConnectionError("the server left without an answer")
        return time.perf_counter() - start - due, json.loads(line)

    async def all_at_once() -> list[tuple[float, dict[str, Any]]]:
        return await asyncio.gather(*map(ask, sounds, arrivals))

    with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop of its own
        start = time.perf_counter()
        waited, answers = zip(*thread.submit(lambda: asyncio.run(all_at_once())).result(), strict=True)
    return np.array(waited), [*answers]


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
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return an exit status."""
    chosen = options().parse_args(arguments)
    try:
        sizes = [checks.whole("--max-batch", batch, high=PROGRAMS[-1]) for batch in chosen.max_batch]
        params = sequence.load(chosen.model)
        # one thread for a batch: the others are for those who ask
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
        devices.prepare()
        asyncio.run(host(params, sizes))
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        pass
    print("Stopped.", file=sys.stderr)
    return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
