"""Watch a collective operation round by round: what has reached whom.

The traced program is run in NumPy (`dlscale.lab.interpreter`) on numbers that carry labels, one bit for the worker that
they come from and one for their place in the array. Instead of adding, the workers take the bitwise or: a "sum" then
shows whose numbers are in it.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dlscale.collectives import Pairs, operation
from dlscale.lab import checks, interpreter

MOST_WORKERS = 20  # three bits for each fit into a label


class Frame(NamedTuple):
    """One round: sender and receiver of each message, and what workers have seen by its end.

    `seen` (workers, 2 · workers) counts, for each worker and place of the array, the workers whose numbers are in the
    sums that it has had there; where nothing is added, the workers whose numbers have come.
    """

    pairs: Pairs
    seen: np.ndarray


def replay(collective: str, workers: int, algorithm: str | None = None, **options: Any) -> list[Frame]:
    """The frames of a collective operation: the start, and one for each round of `dlscale.collectives.schedule`.

    The array has two places for each worker; where each worker has a part of it, a part is two places. For 2 to 20
    workers. Raises ValueError for an unknown collective, other numbers of workers, and what the operation refuses.
    """
    checks.whole("workers", workers, low=2, high=MOST_WORKERS)
    if collective in ("all_reduce", "reduce", "reduce_scatter"):
        options["op"] = jnp.bitwise_or
    x = _start(collective, workers, options.get("root", 0))
    _, messages = interpreter.run(operation(collective, algorithm, **options), x)
    seen = np.zeros((workers, 2 * workers), np.int64)
    frames = [_frame(seen, [(w, w, x[w]) for w in range(workers)])]
    return frames + [_frame(seen, messages[number]) for number in sorted(messages)]


def _start(collective: str, workers: int, root: int) -> np.ndarray:
    """What each worker begins with: its array, the same in parts, or its own part of it; zeros where it is not used."""
    own, place = np.arange(workers)[:, None], np.arange(2 * workers)
    x = (1 << own) | (1 << workers + place)
    if collective in ("broadcast", "scatter"):
        x = np.where(own == root, x, 0)
    if collective in ("gather", "all_gather"):
        return x[place // 2 == own].reshape(workers, 2)
    return x if collective in ("all_reduce", "reduce", "broadcast") else x.reshape(workers, workers, 2)


def _frame(seen: np.ndarray, messages: list[tuple[int, int, np.ndarray]]) -> Frame:
    """Note in `seen`, worker bits, what the messages' labels say."""
    workers = len(seen)
    for _, receiver, content in messages:
        for label in content[content > 0].tolist():
            seen[receiver, (label >> workers).bit_length() - 1] |= label % (1 << workers)
    return Frame([(a, b) for a, b, _ in messages if a != b], np.bitwise_count(seen))
