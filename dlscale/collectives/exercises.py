"""The exercises of 08_collectives."""

import math
import numbers
import operator
from typing import Any

from dlscale import collectives, costs
from dlscale.course.exercises import Exercise, compare

TEXTBOOK = ("tree", "butterfly", "ring", "rabenseifner")


def _sent(answer: Any) -> str | None:
    for workers, parts in ((4, 1), (2, 5), (7, 3), (64, 100)):
        size = 4 * workers * parts
        given = f"{workers} workers and {size} bytes"
        expected = collectives.schedule("ring", workers, (size // 4,)).sent().sum(0).max()
        if wrong := compare(f"The number of bytes for {given}", answer(workers, size), expected, 1e-9):
            return wrong
    return None


sent = Exercise(
    id="collectives-sent",
    answer="ring_sends",
    question="Write `ring_sends`, the bytes that each worker sends in this ring all-reduce of `size` bytes among "
    "`workers` workers. (The check counts them in the program.)",
    hints=(
        "A message is one chunk: size / workers bytes.",
        "There are workers − 1 rounds of adding, and as many of passing on.",
    ),
    code="""
def ring_sends(workers, size):
    return 2 * (workers - 1) * size / workers
""",
    wrong=_sent,
    right="less than twice the array, however many workers there are. That is why the ring is loved for large arrays.",
)


def _pairs(answer: Any) -> str | None:
    for workers in (2, 8, 32):
        for k in range(int(math.log2(workers))):
            given = f"round {k} of {workers} workers"
            found = answer(k, workers)
            try:
                found = sorted((operator.index(sender), operator.index(receiver)) for sender, receiver in found)
            except (TypeError, ValueError):
                return f"In {given}, a list of pairs (sender, receiver) is asked for."
            if [sender for sender, _ in found] != list(range(workers)):
                return f"In {given}, each worker from 0 to {workers - 1} should send once."
            for sender, receiver in found:
                if receiver ^ sender != 2**k:
                    what = "itself" if receiver == sender else f"worker {receiver}"
                    return f"In {given}, worker {sender} sends to {what}: the two must differ in bit {k} only."
    return None


pairs = Exercise(
    id="collectives-pairs",
    answer="pairs",
    question="In a **butterfly**, in round $k = 0, 1, 2, \\ldots$ you swap your whole sum with the worker whose number "
    "differs from yours in bit $k$, $2^k$ away, and add. Write `pairs`, the list of (sender, receiver) that `ppermute` "
    "needs in round `k` among `workers` workers, a power of two.",
    hints=(
        "In round 0, 0 and 1 swap, 2 and 3, …; each swap is two messages.",
        "`worker ^ 2**k` turns bit k over.",
    ),
    code="""
def pairs(k, workers):
    return [(worker, worker ^ 2**k) for worker in range(workers)]
""",
    wrong=_pairs,
    right="with `x = x + ppermute(x, axis_name, pairs(k, P))` in each round, that is the whole algorithm.",
)


def _rounds(answer: Any) -> str | None:
    if not isinstance(answer, list | tuple) or len(answer) != 2:
        return "Two numbers are asked for: of the butterfly and of the ring."
    if list(answer) == [126, 6]:
        return "Both are right, but the butterfly comes first."
    for algorithm, found in zip(("butterfly", "ring"), answer, strict=True):
        expected = len(collectives.schedule(algorithm, 64, (64,)).rounds)
        if wrong := compare(f"The number of rounds of the {algorithm}", found, expected, 1e-9):
            return wrong
    return None


rounds = Exercise(
    id="collectives-rounds",
    answer="rounds",
    question="By hand: how many rounds do a butterfly and a ring need among 64 workers?",
    hints=(
        "Butterfly: after one round each sum holds 2 gradients, after two rounds 4, …",
        "The ring goes round twice, less one worker each time.",
    ),
    code="rounds = [6, 126]",
    wrong=_rounds,
    right="log₂ P against 2 (P − 1). Whoever pays for each round will not like the ring.",
)


def _crossover(answer: Any) -> str | None:
    for workers, latency, per_byte in ((8, 1e-6, 1e-10), (64, 5e-6, 1e-9), (16, 1e-3, 1e-7), (4, 2.0, 1.0)):
        size = answer(workers, latency, per_byte)
        if not isinstance(size, numbers.Real):
            return f"A number of bytes is asked for, not {type(size).__name__}."
        expected = latency * (2 * (workers - 1) - math.log2(workers))
        expected /= per_byte * (math.log2(workers) - 2 * (workers - 1) / workers)
        given = f"{workers} workers, {latency:g} s a message and {per_byte:g} s a byte"
        if wrong := compare(f"The size for {given}", size, expected, 1e-6):
            at = {name: costs.formula(name, workers, max(0.0, size), latency, per_byte)
                  for name in ("butterfly", "ring")} if math.isfinite(size) else {}  # fmt: skip
            told = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in at.items())
            return f"{wrong} There: {told or 'no times'}."
    return None


crossover = Exercise(
    id="collectives-crossover",
    answer="crossover",
    question="Write `crossover`, the size in bytes at which butterfly and ring take equally long, from their two "
    "formulas. `workers` is over 2; `latency` is $L$, `per_byte` is $G$.",
    hints=(
        "Set L log₂ P + G s log₂ P = 2 L (P − 1) + 2 G s (P − 1) / P and solve for s.",
        "s = L (2 (P − 1) − log₂ P) / (G (log₂ P − 2 (P − 1) / P)).",
    ),
    code="""
def crossover(workers, latency, per_byte):
    rounds, share = math.log2(workers), (workers - 1) / workers
    return latency * (2 * (workers - 1) - rounds) / (per_byte * (rounds - 2 * share))
""",
    wrong=_crossover,
    right="it depends on L / G only: the bytes that the network could carry while a message waits.",
)


def _fastest(answer: Any) -> str | None:
    for workers in (4, 32, 512):
        for size in (8, 3e3, 1e5, 3e6, 1e9):
            for latency, per_byte in ((1e-6, 1e-10), (3e-5, 1e-9), (0.0, 1e-9)):
                seconds = {name: costs.formula(name, workers, size, latency, per_byte) for name in TEXTBOOK}
                name = answer(workers, size, latency, per_byte)
                if name not in TEXTBOOK:
                    return f"{name!r} is none of {', '.join(TEXTBOOK)}."
                if seconds[name] > min(seconds.values()) * (1 + 1e-9):
                    given = f"{workers} workers, {size:g} bytes, {latency:g} s a message and {per_byte:g} s a byte"
                    least = min(seconds.values())
                    return f"For {given}, {name} takes {seconds[name]:.3g} s, and another {least:.3g} s."
    return None


fastest = Exercise(
    id="collectives-fastest",
    answer="fastest",
    question='Write `fastest`: it names the algorithm, "tree", "butterfly", "ring" or "rabenseifner", that takes the '
    "least time. `costs.formula(name, workers, size, latency, per_byte)` is at hand.",
    hints=(
        "min(names, key=…) returns the name for which the key is smallest.",
        "The key is lambda name: costs.formula(name, workers, size, latency, per_byte).",
    ),
    code="""
def fastest(workers, size, latency, per_byte):
    names = ["tree", "butterfly", "ring", "rabenseifner"]
    return min(names, key=lambda name: costs.formula(name, workers, size, latency, per_byte))
""",
    wrong=_fastest,
    right="this is what MPI and NCCL do at each call, with tables tuned for the kind of machine.",
)


def _bisection(answer: Any) -> str | None:
    for workers, per_switch, oversubscription in ((32, 8, 1.0), (32, 8, 4.0), (64, 4, 2.0), (16, 8, 8.0)):
        links = costs.fat_tree(workers, per_switch, oversubscription).links
        half = workers // per_switch // 2
        expected = sum(links[f"switch {switch} up"].bandwidth for switch in range(half))
        given = f"{workers} workers and an oversubscription of {oversubscription:g}"
        found = answer(workers, oversubscription, costs.INFINIBAND.bandwidth)
        if wrong := compare(f"The bisection bandwidth for {given}", found, expected, 1e-9):
            return wrong
    return None


bisection = Exercise(
    id="collectives-bisection",
    answer="bisection",
    question="Cut a fat tree in two halves of equally many switches. Write `bisection`, the bytes a second that the "
    "workers of one half can send to the other, all together; each worker's own cable carries `bandwidth`.",
    hints=(
        "With an oversubscription of 1, every worker of one half can send at full speed.",
        "A switch's cable upwards carries what its workers could send, divided by the oversubscription.",
    ),
    code="""
def bisection(workers, oversubscription, bandwidth):
    return workers / 2 * bandwidth / oversubscription
""",
    wrong=_bisection,
    right="whatever has to cross the middle shares this. A good order of ranks lets little cross it.",
)
