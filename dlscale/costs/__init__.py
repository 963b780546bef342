"""What a communication schedule costs: models of a message, machines made of links, and the textbook's formulas.

Times are seconds, sizes bytes. A schedule is that of `dlscale.lab.program`: its rounds follow one another, and
a round lasts until its last message has arrived and is combined. Nothing here is measured: the constants come from the
sources named beside them, or from the caller.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from dlscale.lab import checks
from dlscale.lab.program import Schedule


class Link(NamedTuple):
    """One direction of a cable."""

    latency: float  # seconds
    bandwidth: float  # bytes a second


# Constants, each with its source; all bandwidths are nominal, of one direction

NVLINK = Link(1e-6, 20e9)  # NVLink 1.0, one link: 20 GB/s (NVIDIA DGX-1 white paper, 2017); latency assumed
PCIE = Link(2e-6, 15.75e9)  # PCI Express 3.0 x16: 8 GT/s · 16 lanes · 128/130 (PCI-SIG); latency assumed
QPI = Link(0.5e-6, 19.2e9)  # QuickPath Interconnect at 9.6 GT/s, 2 bytes a transfer (Intel); latency assumed
INFINIBAND = Link(1e-6, 12.5e9)  # EDR 4x, 100 Gb/s (InfiniBand Trade Association); latency assumed
ETHERNET = Link(25e-6, 1.25e9)  # 10 Gigabit Ethernet with TCP; latency assumed
COMBINE = 1 / 10e9  # seconds to add a byte to another, of a processor that reads and writes 10 GB/s: assumed


# Models of a message


@dataclass(frozen=True)
class Hockney:
    """A message of n bytes takes latency + n · per_byte, and combining it n · combine (α, β, γ; Hockney 1994).

    A worker sends one message at a time and receives one at a time, both at once.
    Raises ValueError for numbers that are negative or not finite.
    """

    latency: float
    per_byte: float
    combine: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def time(self, schedule: Schedule) -> float:
        """Seconds that the schedule takes."""
        total = 0.0
        for messages, combined in schedule.rounds:
            busy = np.zeros((2, schedule.workers))
            for pairs, size in messages:
                for side in (0, 1):
                    np.add.at(busy[side], pairs[:, side], self.latency + size * self.per_byte)
            total += busy.max(initial=0) + combined * self.combine
        return total


@dataclass(frozen=True)
class LogGP:
    """Latency L, overhead o of a send and of a receive, gap g between two messages of a worker, gap G for each further
    byte of one (Culler et al. 1993; Alexandrov et al. 1995). LogP is LogGP with G = 0.

    A message of n bytes arrives o + (n - 1) · G + L + o after its worker began; the worker may begin the next one
    max(o, g) after the last byte has left. Raises ValueError for numbers that are negative or not finite.
    """

    latency: float
    overhead: float
    gap: float
    gap_per_byte: float = 0.0
    combine: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    def time(self, schedule: Schedule) -> float:
        """Seconds that the schedule takes."""
        total = 0.0
        for messages, combined in schedule.rounds:
            count, long = np.zeros((2, schedule.workers)), np.zeros((2, schedule.workers))
            for pairs, size in messages:
                for side in (0, 1):
                    np.add.at(count[side], pairs[:, side], 1)
                    np.add.at(long[side], pairs[:, side], (size - 1) * self.gap_per_byte)
            between = np.maximum(count - 1, 0) * max(self.overhead, self.gap)
            if messages:
                total += (long + between).max() + 2 * self.overhead + self.latency
            total += combined * self.combine
        return total


def _check(model: Hockney | LogGP) -> None:
    for name, value in vars(model).items():
        checks.finite(name, value)


# Machines


@dataclass(frozen=True)
class Topology:
    """Workers and the links between them; `route(sender, receiver)` names the links that a message passes, in order."""

    name: str
    workers: int
    links: dict[str, Link]
    route: Callable[[int, int], Sequence[str]] = field(repr=False)

    def loads(self, schedule: Schedule) -> list[dict[str, int]]:
        """For each round, the bytes that pass each link. Raises ValueError for a schedule of other workers."""
        if schedule.workers != self.workers:
            raise ValueError(f"The schedule is for {schedule.workers} workers, {self.name} has {self.workers}.")
        loads = []
        for messages, _ in schedule.rounds:
            load: dict[str, int] = {}
            for pairs, size in messages:
                for sender, receiver in pairs.tolist():
                    for link in self.route(sender, receiver):
                        load[link] = load.get(link, 0) + size
            loads.append(load)
        return loads

    def time(self, schedule: Schedule, combine: float = 0.0) -> float:
        """Seconds that the schedule takes: messages on the same link share its bandwidth.

        A worker may send on several links at once. A message takes the latencies of its links, and as long as the most
        crowded of them needs for all that passes it in this round; `combine` is the time to combine a byte.
        """
        latency, bandwidth = self.parts(schedule)
        return latency + bandwidth + combine * sum(combined for _, combined in schedule.rounds)

    def parts(self, schedule: Schedule) -> tuple[float, float]:
        """The same without combining, as seconds of latency and seconds of bandwidth."""
        parts = np.zeros(2)
        for (messages, _), load in zip(schedule.rounds, self.loads(schedule), strict=True):
            longest = (0.0, 0.0)
            for sender, receiver in (pair for pairs, _ in messages for pair in pairs.tolist()):
                route = self.route(sender, receiver)
                latency = sum(self.links[link].latency for link in route)
                longest = max(
                    longest, (latency, max(load[link] / self.links[link].bandwidth for link in route)), key=sum
                )
            parts += longest
        return float(parts[0]), float(parts[1])


def full_bisection(workers: int, link: Link = INFINIBAND) -> Topology:
    """Every worker has one cable to a switch that is never the bottleneck; a message has the latency of one `link`."""
    half = link._replace(latency=link.latency / 2)
    links = {f"{way} {worker}": half for worker in range(checks.whole("workers", workers)) for way in ("up", "down")}
    return Topology("full bisection", workers, links, lambda a, b: (f"up {a}", f"down {b}"))


def ring(workers: int, link: Link = INFINIBAND) -> Topology:
    """Each worker has a cable to the next one; messages take the shorter way round, and hop from worker to worker."""
    checks.whole("workers", workers)
    links = {f"{a}→{(a + step) % workers}": link for a in range(workers) for step in (1, -1)}

    def route(sender: int, receiver: int) -> list[str]:
        ahead = (receiver - sender) % workers
        step, hops = (1, ahead) if 2 * ahead <= workers else (-1, workers - ahead)
        stops = [(sender + step * hop) % workers for hop in range(hops + 1)]
        return [f"{a}→{b}" for a, b in itertools.pairwise(stops)]

    return Topology("ring", workers, links, route)


def torus(rows: int, columns: int, link: Link = INFINIBAND) -> Topology:
    """A grid whose rows and columns are rings; messages go along their row first, then along the column."""
    checks.whole("rows", rows), checks.whole("columns", columns)
    row, column = ring(columns, link), ring(rows, link)
    links = {f"row {r}: {name}": link for r in range(rows) for name in row.links}
    links |= {f"column {c}: {name}": link for c in range(columns) for name in column.links}

    def route(sender: int, receiver: int) -> list[str]:
        (r, c), (to_r, to_c) = divmod(sender, columns), divmod(receiver, columns)
        along_row = [f"row {r}: {name}" for name in row.route(c, to_c)]
        return along_row + [f"column {to_c}: {name}" for name in column.route(r, to_r)]

    return Topology("torus", rows * columns, links, route)


def fat_tree(workers: int, per_switch: int, oversubscription: float = 1.0, link: Link = INFINIBAND) -> Topology:
    """Two levels of switches: `per_switch` workers share a switch, whose cables upwards carry, together, what its
    workers could send divided by `oversubscription`. Every cable has half of the latency of `link`.

    Raises ValueError unless the workers fill whole switches, and for an oversubscription below 1.
    """
    checks.whole("workers", workers), checks.whole("per_switch", per_switch)
    checks.finite("oversubscription", oversubscription, low=1.0)
    if workers % per_switch:
        raise ValueError(f"{workers} workers do not fill switches of {per_switch}.")
    half = link._replace(latency=link.latency / 2)
    trunk = half._replace(bandwidth=link.bandwidth * per_switch / oversubscription)
    links = {f"{way} {worker}": half for worker in range(workers) for way in ("up", "down")}
    links |= {f"switch {s} {way}": trunk for s in range(workers // per_switch) for way in ("up", "down")}

    def route(sender: int, receiver: int) -> list[str]:
        here, there = sender // per_switch, receiver // per_switch
        middle = [] if here == there else [f"switch {here} up", f"switch {there} down"]
        return [f"up {sender}", *middle, f"down {receiver}"]

    return Topology("fat tree", workers, links, route)


def dgx1(nvlink: bool = True) -> Topology:
    """NVIDIA's DGX-1 (P100): eight GPUs in a hybrid cube mesh, four NVLinks each; two to a PCIe switch, four to a CPU.

    GPUs 0 to 3 are all connected, so are 4 to 7, and each GPU i with i + 4. What has no NVLink goes through PCIe
    switches and, between the halves, through QPI; with `nvlink` False all does.
    """
    quads = [(a, b) for quad in (range(4), range(4, 8)) for a in quad for b in quad if a != b]
    direct = {*quads, *((a, (a + 4) % 8) for a in range(8))} if nvlink else set()
    links = {f"NVLink {a}→{b}": NVLINK for a, b in direct}
    links |= {f"PCIe {gpu} {way}": PCIE for gpu in range(8) for way in ("up", "down")}
    links |= {f"PCIe switch {s} {way}": PCIE for s in range(4) for way in ("up", "down")}
    links |= {f"QPI {a}→{1 - a}": QPI for a in (0, 1)}

    def route(sender: int, receiver: int) -> list[str]:
        if (sender, receiver) in direct:
            return [f"NVLink {sender}→{receiver}"]
        here, there, middle = sender // 2, receiver // 2, []
        if here != there:
            across = [f"QPI {here // 2}→{there // 2}"] if here // 2 != there // 2 else []
            middle = [f"PCIe switch {here} up", *across, f"PCIe switch {there} down"]
        return [f"PCIe {sender} up", *middle, f"PCIe {receiver} down"]

    return Topology("DGX-1" if nvlink else "DGX-1 without NVLink", 8, links, route)


def multi_node(nodes: int, node: Topology, link: Link = INFINIBAND) -> Topology:
    """`nodes` copies of a machine, each with one network card on a switch that is never the bottleneck.

    Worker w of node n has the number n · node.workers + w. All messages of a node to other nodes share its card.
    """
    checks.whole("nodes", nodes)
    half = link._replace(latency=link.latency / 2)
    links = {f"node {n}: {name}": inner for n in range(nodes) for name, inner in node.links.items()}
    links |= {f"card {n} {way}": half for n in range(nodes) for way in ("up", "down")}

    def route(sender: int, receiver: int) -> list[str]:
        (here, a), (there, b) = divmod(sender, node.workers), divmod(receiver, node.workers)
        if here == there:
            return [f"node {here}: {name}" for name in node.route(a, b)]
        return [f"card {here} up", f"card {there} down"]

    return Topology(f"{nodes} × {node.name}", nodes * node.workers, links, route)


# The textbook


def formula(algorithm: str, workers: int, size: float, latency: float, per_byte: float) -> float:
    """Seconds that a lecture's formula gives for an all-reduce of `size` bytes (Hoefler, after Hoefler & Moor 2014).

    T of "tree" 2 L log₂ P + 2 γ m G log₂ P, of "butterfly" half of that, of "ring" (pipeline)
    2 L (P - 1) + 2 γ m G (P - 1) / P, of "rabenseifner" (reduce-scatter and gather)
    2 L log₂ P + 2 γ m G (P - 1) / P, and the "lower_bound" L log₂ P + 2 γ m G (P - 1) / P; P workers, L latency, γ m
    bytes, G seconds a byte. Raises ValueError for other algorithms, and numbers that are negative or not finite.
    """
    checks.known("algorithm", algorithm, ("tree", "butterfly", "ring", "rabenseifner", "lower_bound"))
    rounds = math.log2(checks.whole("workers", workers))
    transfer = checks.finite("size", size) * checks.finite("per_byte", per_byte)
    checks.finite("latency", latency)
    share = 2 * transfer * (workers - 1) / workers
    return {
        "tree": 2 * latency * rounds + 2 * transfer * rounds,
        "butterfly": latency * rounds + transfer * rounds,
        "ring": 2 * latency * (workers - 1) + share,
        "rabenseifner": 2 * latency * rounds + share,
        "lower_bound": latency * rounds + share,
    }[algorithm]


def fit_hockney(sizes: Sequence[float], seconds: Sequence[float]) -> Hockney:
    """Latency and time per byte from measured times of messages of two or more sizes.

    Least squares with weights 1 / seconds², so that small messages count as much as large ones; neither constant is
    let below zero. Raises ValueError for fewer than two sizes and for times that are not positive and finite.
    """
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    good = sizes.shape == seconds.shape and sizes.ndim == 1 and np.isfinite([sizes, seconds]).all()
    if not good or (seconds <= 0).any() or (sizes < 0).any():
        raise ValueError("sizes and seconds must be lists of equally many numbers, finite and positive.")
    if len(np.unique(sizes)) < 2:
        raise ValueError("One size cannot tell latency from time per byte: measure at two or more.")
    (latency, per_byte), _ = nnls(np.column_stack([np.ones_like(sizes), sizes]) / seconds[:, None], np.ones_like(sizes))
    return Hockney(float(latency), float(per_byte))
