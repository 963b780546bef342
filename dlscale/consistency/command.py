"""A parameter server and its workers as real processes that talk through sockets on 127.0.0.1.

Asynchronous, or with a bound on how far a worker may be ahead of the slowest. When a worker dies, the others go on;
when the server dies, every worker ends with a message. The processes run this file by its path: they import no JAX.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np

from dlscale.lab import checks, data, processes

SILENCE = 10.0  # seconds after which the other side counts as lost
WALL = 120.0  # seconds after which a process is ended, whatever it does
RATE, BATCH, EVERY = 0.2, 16, 100  # of softmax regression on MNIST-1D; gradients between two reports

Say = Callable[..., None]


def send(connection: socket.socket, header: dict[str, Any], array: np.ndarray) -> None:
    """A message: the length of its header, the header, the numbers."""
    head, raw = json.dumps(header).encode(), array.astype(np.float32).tobytes()
    connection.sendall(struct.pack("!II", len(head), len(raw)) + head + raw)


def receive(stream: BinaryIO) -> tuple[dict[str, Any], np.ndarray]:
    """The next message. Raises ConnectionError where there is none."""
    first = stream.read(8)
    if len(first) < 8:
        raise ConnectionError("the connection ended")
    lengths = struct.unpack("!II", first)
    head, raw = (stream.read(length) for length in lengths)
    if len(raw) < lengths[1]:
        raise ConnectionError("the connection ended within a message")
    return json.loads(head), np.frombuffer(raw, np.float32)


def loss(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean cross-entropy of softmax regression, and its gradient; the weights are flat, those of the bias last."""
    w = weights.reshape(x.shape[1] + 1, -1)
    logits = x @ w[:-1] + w[-1]
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    value = -np.log(chances[np.arange(len(y)), y]).mean()
    chances[np.arange(len(y)), y] -= 1
    return float(value), (np.vstack([x.T @ chances, chances.sum(0)]) / len(y)).ravel()


def serve(order: dict[str, Any], say: Say) -> None:
    """The server: keeps the weights, and makes an update of each gradient that comes."""
    examples, bound, gradients = data.load("mnist1d"), order["bound"], order["gradients"]
    weights = np.zeros((examples.x_train.shape[1] + 1) * len(examples.classes), np.float32)
    done, staleness, turn = dict.fromkeys(range(order["workers"]), 0), [], threading.Condition()

    def may_go_on(rank: int) -> bool:
        return len(staleness) >= gradients or bound is None or done[rank] - min(done.values()) <= bound

    def attend(connection: socket.socket, stream: BinaryIO, rank: int) -> None:
        while True:
            with turn:
                turn.wait_for(lambda: may_go_on(rank))
                version, over, now = len(staleness), len(staleness) >= gradients, weights.copy()
            send(connection, {"version": version, "over": over}, now)
            if over:
                return
            header, gradient = receive(stream)
            with turn:
                weights[:] -= RATE * gradient
                done[rank] += 1
                staleness.append(len(staleness) - header["version"])
                if len(staleness) % EVERY == 0:
                    say(gradients=len(staleness))
                turn.notify_all()

    def attend_until_it_is_lost(connection: socket.socket) -> None:
        connection.settimeout(SILENCE)
        with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError):
            rank = receive(stream)[0]["rank"]
            try:
                attend(connection, stream, rank)
            finally:
                with turn:
                    done[rank] = math.inf  # nobody waits for it any more
                    turn.notify_all()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        say(port=listening.getsockname()[1])
        listening.settimeout(SILENCE + 10)
        threads = []
        for _ in range(order["workers"]):
            threads.append(threading.Thread(target=attend_until_it_is_lost, args=(listening.accept()[0],)))
            threads[-1].start()
        for thread in threads:
            thread.join()
    if len(staleness) < gradients:
        raise ConnectionError(f"all workers are gone after {len(staleness)} of {gradients} gradients")
    value, _ = loss(weights, examples.x_train.reshape(-1, 40), examples.y_train)
    say(result={"loss": value, "staleness": staleness[:gradients]})


def work(order: dict[str, Any], say: Say) -> None:
    """A worker: fetches weights, computes a gradient, pushes it, until the server says that it is over."""
    examples, rng = data.load("mnist1d"), np.random.default_rng(order["rank"])
    x, y = examples.x_train.reshape(-1, 40), examples.y_train
    pushed = 0
    try:
        connection = socket.create_connection(("127.0.0.1", order["port"]), SILENCE)
        with connection, connection.makefile("rb") as stream:
            send(connection, {"rank": order["rank"]}, np.zeros(0))
            while True:
                header, weights = receive(stream)
                if header["over"]:
                    break
                rows = rng.integers(len(x), size=BATCH)
                gradient = loss(weights, x[rows], y[rows])[1]
                time.sleep(order["pause"])
                send(connection, {"version": header["version"]}, gradient)
                pushed += 1
    except OSError as error:
        raise ConnectionError(f"the server is gone after {pushed} gradients of this worker ({error})") from None
    say(pushed=pushed)


def training(
    workers: int = 3, gradients: int = 600, bound: int | None = None, pause: float = 0.002, slowest: float = 1.0
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Train with a server and workers; yield what they say: ("server" or "worker 0", …; message).

    Each says its `pid` first. A process that ends early has an `error`, or `ended`, which says why. A gradient takes
    `pause` seconds and more, the last worker's `slowest` times as many. When the generator is closed, all are ended.
    """
    order = {"workers": checks.whole("workers", workers), "gradients": checks.whole("gradients", gradients)}
    order["bound"] = bound if bound is None else checks.whole("bound", bound, low=0)
    inbox: queue.SimpleQueue[tuple[processes.Child, bytes]] = queue.SimpleQueue()
    children: dict[processes.Child, str] = {}

    def start(name: str, **own: Any) -> None:
        child = processes.Child([*processes.PYTHON, __file__], inbox=inbox)
        child.limit(wall=WALL)
        child.send(json.dumps(order | own).encode() + b"\n")
        children[child] = name

    start("server")
    try:
        working = {"server", *(f"worker {rank}" for rank in range(workers))}
        while working:
            child, line = processes.received(inbox)
            message = json.loads(line or "{}")
            if not line:
                child.guard.join()
                message = {"ended": child.ending()}
            if children[child] in working:
                yield children[child], message
            if {"done", "error", "ended"} & message.keys():
                working.discard(children[child])
                if children[child] == "server" and len(children) == 1:  # before it had a port
                    return
            for rank in range(workers) if "port" in message else ():
                slow = checks.finite("slowest", slowest) if rank == workers - 1 else 1.0
                start(f"worker {rank}", rank=rank, port=message["port"], pause=checks.finite("pause", pause) * slow)
    finally:
        for child in children:
            child.stop("it is over")
        for child in children:
            child.close()


def _task(order: dict[str, Any], say: Say) -> None:
    say(pid=os.getpid())
    (work if "rank" in order else serve)(order, say)


if __name__ == "__main__":
    processes.serve(_task)
