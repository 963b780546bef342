"""What a communication schedule costs: models of a message, machines made of links, and the textbook's formulas.

Times are seconds, sizes bytes. A schedule is that of `dlscale.lab.program`: its rounds follow one another, and
a round lasts until its last message has arrived and is combined. Nothing here is measured: the constants come from the
sources named beside them, or from the caller.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dlscale.lab import checks
from dlscale.lab.program import Message, Schedule


class Link(NamedTuple):
    """One direction of a cable."""

    latency: float  # seconds
    bandwidth: float  # bytes a second


# Constants, each with its source; all bandwidths are nominal, of one direction

NVLINK = Link(1e-6, 20e9)  # NVLink 1.0, one link: 20 GB/s (NVIDIA DGX-1 white paper, 2017); latency assumed
PCIE = Link(2e-6, 15.75e9)  # PCI Express 3.0 x16: 8 GT/s · 16 lanes · 128/130 (PCI-SIG); latency assumed
QPI = Link(0.5e-6, 19.2e9)  # QuickPath Interconnect at 9.6 GT/s, 2 bytes a transfer (Intel); latency assumed
HOST = Link(5e-6, PCIE.bandwidth / 2)  # written to a processor's memory, then read: two copies; latency assumed
INFINIBAND = Link(1e-6, 12.5e9)  # EDR 4x, 100 Gb/s (InfiniBand Trade Association); latency assumed
COMBINE = 3 / 732e9  # seconds to add a byte to another: two reads, one write; memory of a P100 (NVIDIA, 2016)

# The machine of predicted steps of training. A Tesla P100 with NVLink promises 10.6e12 float32 operations a second
# (NVIDIA data sheet, 2016); that a worker reaches half of it is assumed, and so is its wire of 40 Gb/s.
OPERATIONS = 10.6e12 / 2  # a second
WIRE = Link(5e-6, 5e9)


# Models of a message


class _Model:
    """Constants that are times, and the time of a schedule: that of its rounds, one after another."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            checks.finite(name, value)

    def time(self, schedule: Schedule) -> float:
        """Seconds that the schedule takes."""
        rounds = ((self._sending(messages, schedule.workers), combined) for messages, combined in schedule.rounds)
        return sum((sending + combined * self.combine for sending, combined in rounds), 0.0)


def _for_each_worker(of: Callable[[int], float], messages: Sequence[Message], workers: int) -> np.ndarray:
    """(2, workers) the sums of `of(bytes)` over the messages that each worker sends, and over those it receives."""
    sums = np.zeros((2, workers))
    for pairs, size in messages:
        np.add.at(sums, ([[0], [1]], pairs.T), of(size))
    return sums


@dataclass(frozen=True)
class Hockney(_Model):
    """A message of n bytes takes latency + n · per_byte, and combining it n · combine (α, β, γ; Hockney 1994).

    A worker sends one message at a time and receives one at a time, both at once.
    Raises ValueError for numbers that are negative or not finite.
    """

    latency: float
    per_byte: float
    combine: float = 0.0

    def _sending(self, messages: Sequence[Message], workers: int) -> float:
        return _for_each_worker(lambda size: self.latency + size * self.per_byte, messages, workers).max(initial=0)


@dataclass(frozen=True)
class LogGP(_Model):
    """Latency L, overhead o of a send and of a receive, gap g between two messages of a worker, gap G for each further
    byte of one (Culler et al. 1993; Alexandrov et al. 1995). LogP is LogGP with G = 0.

    The last byte of a message of n bytes leaves o + (n - 1) · G after its worker began, and arrives L later; the worker
    may begin the next one max(o, g) after that. Once all of its messages have left, a worker takes in what has come, o
    for each: a processor is busy with every send and with every receive. Raises ValueError for numbers that are
    negative or not finite.
    """

    latency: float
    overhead: float
    gap: float
    gap_per_byte: float = 0.0
    combine: float = 0.0

    def _sending(self, messages: Sequence[Message], workers: int) -> float:
        if not messages:
            return 0.0
        count = _for_each_worker(lambda _: 1, messages, workers)
        chain = _for_each_worker(lambda size: (size - 1) * self.gap_per_byte, messages, workers)
        chain += np.maximum(count - 1, 0) * max(self.overhead, self.gap)
        processor = chain[0] + (np.minimum(count[0], 1) + count[1]) * self.overhead  # of each worker
        return max(chain.max() + 2 * self.overhead + self.latency, processor.max())


# Machines


@dataclass(frozen=True)
class Topology:
    """Workers and the links between them; `route(sender, receiver)` names the links that a message passes, in order.

    `outside(worker, way)` names those between a worker and its network card, for the way "up" and "down"; the workers
    share `cards` of them evenly, neighbours the same one.
    """

    name: str
    workers: int
    links: dict[str, Link]
    route: Callable[[int, int], Sequence[str]] = field(repr=False)
    outside: Callable[[int, str], Sequence[str]] = field(default=lambda worker, way: (), repr=False)
    cards: int = 1

    def parts(self, schedule: Schedule, times: ArrayLike = 1.0) -> np.ndarray:
        """Seconds of latency and seconds of bandwidth that the schedule takes, without combining.

        A worker may send on several links at once. A message takes the latencies of its links, and as long as the most
        crowded of them needs for all that passes it in this round; a round takes what its slowest message takes.
        For so many `times` the bytes, of any shape, the result is (*shape, 2).
        Raises ValueError for a schedule of another number of workers.
        """
        if schedule.workers != self.workers:
            raise ValueError(f"The schedule is for {schedule.workers} workers, {self.name} has {self.workers}.")
        times, alike = np.asarray(times, float), {}  # rounds of equal messages take equally long
        for messages in filter(None, (messages for messages, _ in schedule.rounds)):
            alike.setdefault(tuple((size, pairs.tobytes()) for pairs, size in messages), []).append(messages)
        parts = np.zeros((*times.shape, 2))
        for same in alike.values():
            sent = [(self.route(*pair), size) for pairs, size in same[0] for pair in pairs.tolist()]
            load: Counter[str] = Counter()  # bytes that pass each link
            for route, size in sent:
                load.update(dict.fromkeys(route, size))
            busy = {name: size / self.links[name].bandwidth for name, size in load.items()}
            latencies = np.array([sum(self.links[name].latency for name in route) for route, _ in sent])
            crowded = np.array([max(map(busy.__getitem__, route)) for route, _ in sent])
            slowest = (latencies + np.multiply.outer(times, crowded)).argmax(-1)
            parts += len(same) * np.stack([latencies[slowest], times * crowded[slowest]], -1)
        return parts


def _switched(name: str, workers: int, latency: float, cables: Mapping[str, tuple[int, float]]) -> Topology:
    """A tree of switches: for each kind of cable, from the bottom up, how many workers share one, and its bandwidth.

    A message passes, up and down again, the cables that its sender does not share with its receiver.
    """
    links = {
        f"{kind} {number} {way}": Link(latency, bandwidth)
        for kind, (below, bandwidth) in cables.items()
        for number in range(checks.whole("workers", workers) // below) for way in ("up", "down")
    }  # fmt: skip

    def route(sender: int, receiver: int) -> list[str]:
        passed = [(kind, below) for kind, (below, _) in cables.items() if sender // below != receiver // below]
        up = [f"{kind} {sender // below} up" for kind, below in passed]
        return up + [f"{kind} {receiver // below} down" for kind, below in reversed(passed)]

    return Topology(name, workers, links, route)


def full_bisection(workers: int, link: Link = INFINIBAND) -> Topology:
    """Every worker has one cable to a switch that is never the bottleneck; a message has the latency of one `link`."""
    return _switched("full bisection", workers, link.latency / 2, {"worker": (1, link.bandwidth)})


def ring(workers: int, link: Link = INFINIBAND) -> Topology:
    """Each worker has a cable to the next one; messages take the shorter way round, and hop from worker to worker."""
    checks.whole("workers", workers)
    links = {f"{a}→{(a + step) % workers}": link for a in range(workers) for step in (1, -1)}

    def route(sender: int, receiver: int) -> list[str]:
        ahead = (receiver - sender) % workers
        step, hops = (1, ahead) if 2 * ahead <= workers else (-1, workers - ahead)
        return [f"{(sender + step * hop) % workers}→{(sender + step * (hop + 1)) % workers}" for hop in range(hops)]

    return Topology("ring", workers, links, route)


def torus(rows: int, columns: int, link: Link = INFINIBAND) -> Topology:
    """A grid whose rows and columns are rings; messages go along their row first, then along the column."""
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
    cables = {"worker": (1, link.bandwidth), "switch": (per_switch, link.bandwidth * per_switch / oversubscription)}
    return _switched("fat tree", workers, link.latency / 2, cables)


def dgx1(nvlink: bool = True, one_card: bool = False) -> Topology:
    """NVIDIA's DGX-1 (P100): eight GPUs in a hybrid cube mesh, four NVLinks each; two to a PCIe switch, four to a CPU.

    GPUs 0 to 3 are all connected, so are 4 to 7, and each GPU i with i + 4. What has no NVLink goes through PCIe
    switches; with `nvlink` False all does. The halves are peer domains: from one to the other, bytes are staged in the
    memory of the processors and cross QPI. Four cards lead outside, one at each PCIe switch; or else a single one, at
    the processor of GPUs 0 to 3.
    """
    wired = [(a, b) for a, b in itertools.permutations(range(8), 2) if a // 4 == b // 4 or abs(a - b) == 4]
    direct = {f"NVLink {a}→{b}": NVLINK for a, b in wired if nvlink}
    switched = _switched("PCIe", 8, PCIE.latency, {"PCIe": (1, PCIE.bandwidth), "PCIe switch": (2, PCIE.bandwidth)})

    def route(sender: int, receiver: int) -> list[str]:
        if (straight := f"NVLink {sender}→{receiver}") in direct:
            return [straight]
        path, here, there = switched.route(sender, receiver), sender // 4, receiver // 4
        return path if here == there else [*path[:2], f"host {sender} up", f"QPI {here}→{there}", *path[2:]]

    def outside(worker: int, way: str) -> list[str]:
        staged = [f"host {worker} {way}", "QPI 1→0" if way == "up" else "QPI 0→1"] if worker >= 4 else []
        return [f"PCIe {worker} {way}", *([f"PCIe switch {worker // 2} {way}", *staged] if one_card else [])]

    links = {**direct, **switched.links, "QPI 0→1": QPI, "QPI 1→0": QPI}
    links |= {f"host {gpu} {way}": HOST for gpu in range(8) for way in ("up", "down")}
    return Topology("DGX-1" if nvlink else "DGX-1 without NVLink", 8, links, route, outside, 1 if one_card else 4)


def multi_node(nodes: int, node: Topology, link: Link = INFINIBAND) -> Topology:
    """`nodes` copies of a machine, whose network cards are on a switch that is never the bottleneck.

    Worker w of node n has the number n · node.workers + w. All messages to other nodes share the card of their worker,
    and the way to it.
    """
    workers = checks.whole("nodes", nodes) * node.workers
    cards = _switched("cards", workers, link.latency / 2, {"card": (node.workers // node.cards, link.bandwidth)})
    links = cards.links | {f"node {n}: {name}": inner for n in range(nodes) for name, inner in node.links.items()}

    def route(sender: int, receiver: int) -> list[str]:
        (here, a), (there, b) = divmod(sender, node.workers), divmod(receiver, node.workers)
        if here == there:
            return [f"node {here}: {name}" for name in node.route(a, b)]
        up = [f"node {here}: {name}" for name in node.outside(a, "up")]
        down = [f"node {there}: {name}" for name in reversed(node.outside(b, "down"))]
        return [*up, *cards.route(sender, receiver), *down]

    return Topology(f"{nodes} × {node.name}", workers, links, route)


# The textbook


def formula(algorithm: str, workers: int, size: float, latency: float, per_byte: float) -> float:
    """Seconds that a lecture's formula gives for an all-reduce of `size` bytes (Hoefler, after Hoefler & Moor 2014).

    T of "tree" 2 L log₂ P + 2 γ m G log₂ P, of "butterfly" half of that, of "ring" (pipeline)
    2 L (P - 1) + 2 γ m G (P - 1) / P, of "rabenseifner" (reduce-scatter and gather)
    2 L log₂ P + 2 γ m G (P - 1) / P, and the "lower_bound" L log₂ P + 2 γ m G (P - 1) / P; P workers, L latency, γ m
    bytes, G seconds a byte. Raises ValueError for other algorithms, and numbers that are negative or not finite.
    """
    rounds = math.log2(checks.whole("workers", workers))
    transfer = checks.finite("size", size) * checks.finite("per_byte", per_byte)
    checks.finite("latency", latency)
    share = 2 * transfer * (workers - 1) / workers
    formulas = {
        "tree": 2 * latency * rounds + 2 * transfer * rounds, "butterfly": latency * rounds + transfer * rounds,
        "ring": 2 * latency * (workers - 1) + share, "rabenseifner": 2 * latency * rounds + share,
        "lower_bound": latency * rounds + share,
    }  # fmt: skip
    return formulas[checks.known("algorithm", algorithm, formulas)]


def fit_hockney(sizes: Sequence[float], seconds: Sequence[float]) -> Hockney:
    """Latency and time per byte from measured times of messages of two or more sizes.

    Least squares with weights 1 / seconds², so that small messages count as much as large ones; neither constant is
    let below zero. Raises ValueError for fewer than two sizes and for times that are not positive and finite.
    """
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    if not (np.isfinite(sizes) & np.isfinite(seconds) & (seconds > 0)).all():
        raise ValueError("sizes and seconds must be finite, and seconds positive.")
    if len(np.unique(sizes)) < 2:
        raise ValueError("One size cannot tell latency from time per byte: measure at two or more.")
    from scipy.optimize import nnls  # here: it takes 40 MB, in each process of a group

    (latency, per_byte), _ = nnls(np.column_stack([np.ones_like(sizes), sizes]) / seconds[:, None], np.ones_like(sizes))
    return Hockney(float(latency), float(per_byte))
