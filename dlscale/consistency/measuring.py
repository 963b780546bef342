"""Real processes that write into the same memory, with locks and without (Niu et al. 2011); updates lost are counted.

The processes run this file by its path, so that they need not import JAX: it imports NumPy alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import runpy
import time
from collections.abc import Sequence
from multiprocessing import shared_memory
from typing import Any, NamedTuple

import numpy as np

LOCKS = ("one lock", "a lock for each block", "no lock")
BLOCKS = 16
PATIENCE = 60.0  # seconds after which processes that are silent are ended


class Job(NamedTuple):
    """What some processes do at the same time: updates of the coordinates of edges that they draw."""

    edges: np.ndarray  # (examples, degree)
    lock: str = "no lock"
    workers: int = 2
    rate: float = 0.0  # of descent, beside counting; 0: they only count


class Outcome(NamedTuple):
    """What they left in memory."""

    x: np.ndarray  # (coordinates,)
    added: np.ndarray  # (coordinates,) how often each was counted up, by those counts that survived
    lost: float  # share of the counts that another process has overwritten
    seconds: float


def edges(examples: int, coordinates: int, degree: int, skew: float = 0.0, seed: int = 0) -> np.ndarray:
    """(examples, degree) different coordinates of each example; coordinate k is drawn with weight (k + 1)^-skew."""
    weights, rng = (np.arange(coordinates) + 1.0) ** -skew, np.random.default_rng(seed)
    chances = weights / weights.sum() if skew else None
    return np.array([np.sort(rng.choice(coordinates, degree, replace=False, p=chances)) for _ in range(examples)])


class Sparsity(NamedTuple):
    """Of a hypergraph, as Niu et al. define them."""

    omega: int  # coordinates of the largest edge
    delta: float  # share of the edges that the most frequent coordinate is in
    rho: float  # share of the edges that the edge with the most neighbours meets, itself included


def sparsity(edges: np.ndarray) -> Sparsity:
    """Of edges that are equally large."""
    member = np.zeros((len(edges), edges.max() + 1), np.float32)
    np.put_along_axis(member, edges, 1, axis=1)
    meets = np.count_nonzero(member @ member.T, axis=1)
    return Sparsity(edges.shape[1], float(member.mean(0).max()), float(meets.max() / len(edges)))


def run(jobs: Sequence[Job], updates: int, seed: int = 0) -> list[Outcome]:
    """Do the jobs one after the other, each process so many updates, on memory that they share.

    An update of edge e counts each coordinate of e up by one: it reads, adds, writes. With a rate, it is also a step of
    descent on (mean of x over e - 1)² / 2. Raises ValueError for a job that cannot be, RuntimeError if a process fails.
    """
    for job in jobs:
        if job.lock not in LOCKS:
            raise ValueError(f"Unknown lock {job.lock!r}. Known: {', '.join(map(repr, LOCKS))}.")
        if job.workers < 1 or updates < 1:
            raise ValueError(f"workers and updates must be at least 1, not {job.workers} and {updates}.")
    context = multiprocessing.get_context("spawn")
    coordinates, workers = (
        max(values) for values in zip(*((int(j.edges.max()) + 1, j.workers) for j in jobs), strict=True)
    )
    memory = shared_memory.SharedMemory(create=True, size=16 * coordinates)
    children: list[Any] = []
    outcomes = []
    try:
        meet = context.Barrier(workers + 1, timeout=PATIENCE)
        order = {"memory": memory.name, "coordinates": coordinates, "jobs": jobs, "updates": updates, "meet": meet}
        order["locks"] = [context.Lock() for _ in range(BLOCKS)]
        order["jobs"] = [tuple(job) for job in jobs]  # the processes know no Job
        for rank in range(workers):
            given = {"ORDER": order | {"rank": rank, "seed": (seed, rank)}}
            children.append(context.Process(target=runpy.run_path, args=(__file__, given, "hogwild"), daemon=True))
            children[-1].start()
        both = np.ndarray((2, coordinates), np.float64, memory.buf)
        for job in jobs:
            both[:] = 0
            meet.wait()
            begin = time.perf_counter()
            meet.wait()
            seconds = time.perf_counter() - begin
            x, added = both[:, : int(job.edges.max()) + 1].copy()
            lost = 1 - added.sum() / (job.workers * updates * job.edges.shape[1])
            outcomes.append(Outcome(x, added, float(lost), seconds))
        del both
    finally:
        for child in children:
            child.kill()
            child.join()
        memory.close()
        memory.unlink()
    return outcomes


def work(order: dict[str, Any]) -> None:
    """What a process does."""
    memory = shared_memory.SharedMemory(order["memory"])
    x, added = np.ndarray((2, order["coordinates"]), np.float64, memory.buf)
    rng = np.random.default_rng(order["seed"])
    for edges, lock, workers, rate in order["jobs"]:
        drawn = rng.integers(len(edges), size=order["updates"] if order["rank"] < workers else 0)
        blocks = {LOCKS[0]: lambda e: [0], LOCKS[1]: lambda e: sorted({int(v) % BLOCKS for v in e})}
        held = [[order["locks"][b] for b in blocks.get(lock, lambda e: [])(e)] for e in edges]
        order["meet"].wait()
        for k in drawn:
            e = edges[k]
            with contextlib.ExitStack() as stack:
                for one in held[k]:  # in ascending order: two processes cannot wait for each other
                    stack.enter_context(one)
                if rate:
                    x[e] -= rate * (x[e].mean() - 1)
                added[e] += 1
        order["meet"].wait()
    del x, added
    memory.close()


if __name__ == "hogwild":
    work(globals()["ORDER"])
