"""One training step in NumPy, timed in parts, by processes that take turns; each may be told to work as an older one.

OpenBLAS, which multiplies NumPy's matrices, has a program for each generation of processors. OPENBLAS_CORETYPE=Nehalem
makes it use the one of 2008, which does half or a quarter of the arithmetic in a cycle. Nothing else changes.
"""

import contextlib
import os
import sys
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from dlscale.lab import processes

GENERATIONS = {"this processor": {}, "2008": {"OPENBLAS_CORETYPE": "Nehalem"}}
PARTS = ("matrix product", "step", "epoch", "reading")
HIDDEN, BATCH, SIDE, FEW = 256, 256, 512, 16
BATCHES = (1, 4, 16, 64, 256)
STRETCHES = (1, 16)
SHORT = 0.02  # seconds


class Network:
    """784-256-10 in NumPy, with what it needs to learn: small enough to read at a glance."""

    def __init__(self, inputs: int, hidden: int = HIDDEN) -> None:
        rng = np.random.default_rng(0)
        shapes = ((inputs, hidden), (hidden, 10))
        self.weights = [rng.normal(size=s).astype(np.float32) * np.float32(np.sqrt(2 / s[0])) for s in shapes]

    def step(self, x: np.ndarray, y: np.ndarray, rate: float = 0.1) -> None:
        """One update by the gradient of the cross-entropy."""
        hidden = np.maximum(x @ self.weights[0], 0)
        logits = hidden @ self.weights[1]
        error = np.exp(logits - logits.max(1, keepdims=True))
        error /= error.sum(1, keepdims=True)
        error[np.arange(len(y)), y] -= 1
        error /= len(y)
        back = (error @ self.weights[1].T) * (hidden > 0)
        for weight, gradient in zip(self.weights, (x.T @ back, hidden.T @ error), strict=True):
            weight -= np.float32(rate) * gradient

    def epoch(self, x: np.ndarray, y: np.ndarray) -> None:
        """Steps over all examples in a new order."""
        for rows in np.random.default_rng(0).permutation(len(x)).reshape(-1, BATCH):
            self.step(x[rows], y[rows])


def flops(inputs: int, batch: int, hidden: int = HIDDEN) -> float:
    """Additions and multiplications of a step's products: two forward, three backward."""
    return 2 * batch * (2 * inputs * hidden + 3 * hidden * 10)


def read(folder: Path, count: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    """Digits from their compressed file, as numbers from 0 to 1."""
    with np.load(folder / "mnist.npz") as file:
        x, y = file["x_train"][:count], file["y_train"][:count]
    return x.reshape(len(x), -1).astype(np.float32) / x.max(), y.astype(int)


def work(folder: Path) -> dict[str, Callable[[], object]]:
    """What can be timed, by name: a part of training, "batch n" for a step, "stretched n" for one of larger inputs."""
    x, y = read(folder)
    net, a = Network(x.shape[1]), np.ones((SIDE, SIDE), np.float32)
    found = {
        "matrix product": lambda: a @ a,
        "step": lambda: net.step(x[:BATCH], y[:BATCH]),
        "epoch": lambda: net.epoch(x, y),
        "reading": lambda: read(folder),
    }
    found |= {f"batch {n}": lambda n=n: net.step(x[:n], y[:n]) for n in BATCHES}
    for n in STRETCHES:
        large, wide = Network(n * 196, 64), np.tile(x[:FEW, ::4], n)
        found[f"stretched {n}"] = lambda net=large, x=wide: net.step(x, y[:FEW])
    return found


def serve(folder: Path) -> None:
    """Time what is asked for, a name in each line, and answer with the seconds.

    What is short is done again, and the second time counts: the first fetches what others pushed out of the caches.
    """
    tasks = work(folder)
    for line in sys.stdin:
        timer = timeit.Timer(tasks[line.strip()])
        seconds = timer.timeit(1)
        print(timer.timeit(1) if seconds < SHORT else seconds, flush=True)


def measure(
    folder: Path, names: Sequence[str], generations: Sequence[str], rounds: int
) -> dict[str, dict[str, np.ndarray]]:
    """Seconds (rounds,) of each name by each generation, in processes of one thread each.

    In each round all take a turn, one after the other, so that a noisy moment hits all alike; one round more, to warm
    up, does not count. Raises ChildEnded where a process ends early.
    """
    with contextlib.ExitStack() as last:
        workers = []
        for generation in generations:
            own = {"OPENBLAS_NUM_THREADS": "1"} | GENERATIONS[generation]
            workers.append(processes.Child([*processes.PYTHON, __file__, str(folder)], environment=os.environ | own))
            last.callback(workers[-1].close)
            last.callback(workers[-1].stop, "it is over")

        def ask(worker: processes.Child, name: str) -> float:
            worker.send(name.encode() + b"\n")
            return float(worker.receive())

        seconds = [[[ask(worker, name) for worker in workers] for name in names] for _ in range(rounds + 1)]
    by_worker = np.array(seconds[1:]).transpose(2, 1, 0)
    return {who: dict(zip(names, own, strict=True)) for who, own in zip(generations, by_worker, strict=True)}


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
