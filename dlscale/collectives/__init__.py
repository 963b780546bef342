"""Collective operations written with one instruction, `jax.lax.ppermute`: "send this array to that worker".

Each function says what one worker does with its array x, and names the axis of workers. It runs unchanged under
`jax.vmap(…, axis_name=…)` (with `jax.jit` outside, not inside), `jax.pmap`, `jax.shard_map`, and in processes
joined by `devices.connect`. All workers call it with arrays of one shape and dtype. `groups` restricts it to groups of
workers, which work side by side: lists of workers, all equally long, none twice; the result means nothing to others.

The words, used for nothing else here:

- a worker is one of the P that run the function, a number from 0 to P - 1 along the axis, e.g. 5;
- a group is a list of workers, e.g. [1, 5, 3]; without `groups` there is one, of all;
- a position is a worker's index in its group: 5 has position 1 in [1, 5, 3]; `root` is one, and so are both of a pair;
- a distance is how many positions further on something is, around the group; `after` is the distance from the root;
- a part is x[i] of an x of shape (P, …): what position i gets, or what came from it;
- a chunk is one of the equally long pieces into which an algorithm itself cuts an x of any shape;
- a place is where a number stands in an array (`dlscale.collectives.replay`);
- a round is all messages of which none waits for another, as `dlscale.lab.program.schedule` finds them.

`schedule` reads from the traced program who sends how much to whom in which round, and `dlscale.collectives.replay`
what has reached whom by then.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dlscale.lab import checks, jax_internals, program

Groups = Sequence[Sequence[int]] | None  # None is one group, of all
Op = Callable[[Array, Array], Array]
Pairs = list[tuple[int, int]]


class _Group(NamedTuple):
    """This worker's position in its group, the groups' size, and how to send within all groups at once."""

    axis_name: str
    groups: list[list[int]]
    position: Array
    size: int

    def send(self, x: Array, pairs: Pairs) -> Array:
        """Send x from position to position; who gets nothing has zeros. Without pairs nothing is sent: x as it is."""
        pairs = [(group[a], group[b]) for group in self.groups for a, b in pairs]
        everybody = set(range(lax.axis_size(self.axis_name)))
        if len(pairs) in (0, len(everybody)) or not jax_internals.under_vmap(self.axis_name):
            return lax.ppermute(x, self.axis_name, pairs) if pairs else x
        # vmap takes only whole permutations: let the others send too, and throw that away
        senders, receivers = zip(*pairs, strict=True)
        others = zip(everybody.difference(senders), everybody.difference(receivers), strict=True)
        received = lax.ppermute(x, self.axis_name, [*pairs, *others])
        meant = (lax.axis_index(self.axis_name) == np.array(receivers)).any()
        return jnp.where(meant, received, jnp.zeros_like(x))

    def shift(self, x: Array, distance: int) -> Array:
        """Send x so many positions on, around the group."""
        return self.send(x, [(a, (a + distance) % self.size) for a in range(self.size)])


def _group(x: Array, axis_name: str, groups: Groups, op: Op | None = None, root: int = 0) -> _Group:
    """The groups of these workers, each from its root on: its position is then the distance from the root."""
    if not hasattr(x, "shape"):
        raise TypeError(f"A collective takes one array, not a {type(x).__name__}: ravel_pytree joins several.")
    if op and ((made := jax.eval_shape(op, x, x)).shape, made.dtype) != (x.shape, x.dtype):
        wanted, found = (f"{a.dtype}{list(a.shape)}" for a in (x, made))
        raise ValueError(f"op must combine two arrays {wanted} into one like them, not into {found}.")
    worker, workers = lax.axis_index(axis_name), lax.axis_size(axis_name)
    groups = [range(workers)] if groups is None else groups
    members = [member for group in groups for member in group]
    alike = len({len(group) for group in groups}) == 1 and len(members) == len(set(members)) > 0
    if not alike or not set(members) <= set(range(workers)):
        who = f"of the workers of the axis {axis_name!r}, 0 to {workers - 1}"
        raise ValueError(f"Groups, {who}, are equally long and share no worker, unlike {groups!r}.")
    size = len(groups[0])
    checks.whole("root", root, low=0, high=size - 1)
    groups = [[*group[root:], *group[:root]] for group in groups]
    positions = {member: position for group in groups for position, member in enumerate(group)}
    position = jnp.asarray([positions.get(w, 0) for w in range(workers)])[worker]
    return _Group(axis_name, groups, position, size)


def _parts(x: Array, group: _Group) -> None:
    if x.shape[:1] != (group.size,):
        raise ValueError(f"x needs one part for each of {group.size} workers: shape ({group.size}, …), not {x.shape}.")


def _doublings(size: int) -> list[int]:
    """1, 2, 4, … below size."""
    return [2**k for k in range((size - 1).bit_length())]


# One root


def broadcast(x: Array, axis_name: str, root: int = 0, groups: Groups = None) -> Array:
    """The root's x for all, by a binomial tree: in each round all who have it send it on, ⌈log₂ P⌉ rounds."""
    group = _group(x, axis_name, groups, root=root)
    for d in _doublings(group.size):
        received = group.send(x, [(a, a + d) for a in range(d) if a + d < group.size])
        x = jnp.where((group.position >= d) & (group.position < 2 * d), received, x)
    return x


def reduce(x: Array, axis_name: str, root: int = 0, op: Op = jnp.add, groups: Groups = None) -> Array:
    """All workers' x, combined by `op`, at the root, and zeros elsewhere: a broadcast backwards."""
    group = _group(x, axis_name, groups, op, root)
    for d in reversed(_doublings(group.size)):
        received = group.send(x, [(a + d, a) for a in range(d) if a + d < group.size])
        x = jnp.where((group.position < d) & (group.position + d < group.size), op(x, received), x)
    return jnp.where(group.position == 0, x, jnp.zeros_like(x))


def scatter(x: Array, axis_name: str, root: int = 0, groups: Groups = None) -> Array:
    """Part i of the root's x (P, …) for worker i. Down a binomial tree, with half as much in each round."""
    group = _group(x, axis_name, groups, root=root)
    _parts(x, group)
    steps = _doublings(group.size)
    x = jnp.pad(jnp.roll(x, -root, axis=0), [(0, 2 ** len(steps) - group.size)] + [(0, 0)] * (x.ndim - 1))
    for d in reversed(steps):
        received = group.send(x[d:], [(a, a + d) for a in range(0, group.size, 2 * d) if a + d < group.size])
        x = jnp.where(group.position % (2 * d) == d, received, x[:d])
    return x[0]


def gather(x: Array, axis_name: str, root: int = 0, groups: Groups = None) -> Array:
    """All workers' x as (P, …) at the root, and zeros elsewhere: a scatter backwards."""
    group = _group(x, axis_name, groups, root=root)
    x = x[None]
    for d in _doublings(group.size):
        received = group.send(x, [(a + d, a) for a in range(0, group.size, 2 * d) if a + d < group.size])
        x = jnp.concatenate([x, received])
    return jnp.where(group.position == 0, jnp.roll(x[: group.size], root, axis=0), jnp.zeros((), x.dtype))


# No root


def all_gather(x: Array, axis_name: str, algorithm: str = "ring", groups: Groups = None) -> Array:
    """All workers' x as (P, …), for all.

    "ring": P - 1 rounds, each passes on what the last one brought. "bruck" (Bruck et al. 1997): ⌈log₂ P⌉ rounds, in
    which what a worker has doubles.
    """
    checks.known("algorithm", algorithm, ("ring", "bruck"))
    group = _group(x, axis_name, groups)
    if algorithm == "ring":
        return _ring_gather(x, group)
    parts = x[None]  # those of the positions from this one on
    for d in _doublings(group.size):
        parts = jnp.concatenate([parts, group.shift(parts[: min(d, group.size - d)], -d)])
    return parts[(jnp.arange(group.size) - group.position) % group.size]


def _ring_gather(x: Array, group: _Group, direction: int = 1) -> Array:
    parts = jnp.zeros((group.size, *x.shape), x.dtype).at[group.position].set(x)

    def step(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        parts, passing = carry
        passing = group.shift(passing, direction)
        return parts.at[(group.position - direction * number) % group.size].set(passing), passing

    return lax.fori_loop(1, group.size, step, (parts, x))[0]


def reduce_scatter(x: Array, axis_name: str, algorithm: str = "ring", op: Op = jnp.add, groups: Groups = None) -> Array:
    """Part i of all workers' x (P, …), combined by `op`, for worker i.

    "ring": P - 1 rounds of one part. "halving": log₂ P rounds, half as much in each; for powers of two only.
    Raises ValueError for another number of workers than the algorithm serves.
    """
    checks.known("algorithm", algorithm, ("ring", "halving"))
    group = _group(x, axis_name, groups, op)
    _parts(x, group)
    if algorithm == "ring":
        return _ring_scatter(x, group, op)
    if group.size & (group.size - 1):
        raise ValueError(f'"halving" needs a power of two of workers, not {group.size}: use "ring".')
    return _halving_scatter(x, group, op)[0]


def _ring_scatter(x: Array, group: _Group, op: Op, direction: int = 1) -> Array:
    def step(number: Array, passing: Array) -> Array:
        return op(group.shift(passing, direction), x[(group.position - direction * number) % group.size])

    return lax.fori_loop(2, group.size + 1, step, x[(group.position - direction) % group.size])


def _exchange(x: Array, group: _Group, d: int) -> Array:
    return group.send(x, [(a, a ^ d) for a in range(group.size)])


def _halving_scatter(x: Array, group: _Group, op: Op) -> Array:
    for d in reversed(_doublings(group.size)):
        upper = (group.position & d) > 0
        low, high = jnp.split(x, 2)
        x = op(jnp.where(upper, high, low), _exchange(jnp.where(upper, low, high), group, d))
    return x


def _doubling_gather(x: Array, group: _Group) -> Array:
    for d in _doublings(group.size):
        other = _exchange(x, group, d)
        x = jnp.where((group.position & d) > 0, jnp.concatenate([other, x]), jnp.concatenate([x, other]))
    return x


def all_to_all(x: Array, axis_name: str, algorithm: str = "pairwise", groups: Groups = None) -> Array:
    """Part i of worker j's x (P, …) becomes part j of worker i's result.

    "pairwise": P - 1 messages of one part, each straight to its worker; none waits for another, so they make one round.
    "bruck": ⌈log₂ P⌉ rounds of half of the parts, each of which travels by the binary digits of its distance.
    """
    checks.known("algorithm", algorithm, ("pairwise", "bruck"))
    group = _group(x, axis_name, groups)
    _parts(x, group)
    distances = jnp.arange(group.size)
    parts = x[(group.position + distances) % group.size]  # by how far they have to go
    if algorithm == "bruck":
        for d in _doublings(group.size):
            moving = np.flatnonzero(np.arange(group.size) & d)
            parts = parts.at[moving].set(group.shift(parts[moving], d))
    else:
        parts = jnp.stack([parts[0], *(group.shift(parts[d], d) for d in range(1, group.size))])
    return parts[(group.position - distances) % group.size]


# All-reduce


def all_reduce(
    x: Array, axis_name: str, algorithm: str = "ring", op: Op = jnp.add, groups: Groups = None, **options: Any
) -> Array:
    """All workers' x, combined by `op` element by element, for all.

    - "ring" (the lecture's pipeline; Patarasuk & Yuan 2009): reduce-scatter and all-gather around a ring.
    - "bidirectional_ring": one half of x around each way.
    - "tree": reduce to worker 0, then broadcast.
    - "butterfly": recursive doubling, everybody exchanges all with a partner twice as far away in each round.
    - "rabenseifner" (2004; the lecture's RedScat+Gat): reduce-scatter by halving, all-gather by doubling.
    - "circulant": the ring's bytes in 2⌈log₂ P⌉ rounds, for any number of workers (after Bruck et al. 1997).
    - "torus", as nearly square as can be: reduce-scatter along rows, all-reduce along columns, all-gather along rows.
    - "hierarchical", `group_size`: reduce within groups, a ring of their first members, broadcast within groups (Jia
      et al. 2018, arXiv:1807.11205).

    Where the number of workers is no power of two, butterfly and rabenseifner let those beyond it hand over their x
    first and get the result last. The group size is the square root of their number, or a little less, unless given.
    Raises ValueError for an unknown algorithm and for workers that it cannot serve.
    """
    checks.known("algorithm", algorithm, ALGORITHMS)
    group = _group(x, axis_name, groups, op)
    return _ALL_REDUCE[algorithm](x, group, op, **options) if group.size > 1 else x


def _chunked(x: Array, count: int) -> Array:
    """x as (count, …), flat, with zeros behind it."""
    return jnp.pad(x.ravel(), (0, -x.size % count)).reshape(count, -1)


def _whole(chunks: Array, like: Array) -> Array:
    return chunks.ravel()[: like.size].reshape(like.shape)


def _ring(x: Array, group: _Group, op: Op, direction: int = 1) -> Array:
    chunk = _ring_scatter(_chunked(x, group.size), group, op, direction)
    return _whole(_ring_gather(chunk, group, direction), x)


def _rings(x: Array, group: _Group, op: Op) -> Array:
    there, back = _chunked(x, 2)
    return _whole(jnp.stack([_ring(there, group, op), _ring(back, group, op, -1)]), x)


def _tree(x: Array, group: _Group, op: Op) -> Array:
    return broadcast(reduce(x, group.axis_name, 0, op, group.groups), group.axis_name, 0, group.groups)


def _power_of_two(work: Callable[[Array, _Group], Array], x: Array, group: _Group, op: Op) -> Array:
    """Let `work` do with the first 2ᵏ of a group; those beyond are served by the first of them."""
    power = 2 ** (group.size.bit_length() - 1)
    beyond = [(power + a, a) for a in range(group.size - power)]
    x = jnp.where(group.position < len(beyond), op(x, group.send(x, beyond)), x)
    x = work(x, group._replace(groups=[members[:power] for members in group.groups], size=power))
    return jnp.where(group.position >= power, group.send(x, [(a, b) for b, a in beyond]), x)


def _butterfly(x: Array, group: _Group, op: Op) -> Array:
    def work(x: Array, group: _Group) -> Array:
        for d in _doublings(group.size):
            x = op(x, _exchange(x, group, d))
        return x

    return _power_of_two(work, x, group, op)


def _rabenseifner(x: Array, group: _Group, op: Op) -> Array:
    def work(x: Array, group: _Group) -> Array:
        return _whole(_doubling_gather(_halving_scatter(_chunked(x, group.size), group, op), group), x)

    return _power_of_two(work, x, group, op)


def _nearly_square(size: int) -> int:
    return next(side for side in range(math.isqrt(size), 0, -1) if size % side == 0)


def _torus(x: Array, group: _Group, op: Op) -> Array:
    columns = group.size // _nearly_square(group.size)
    along_rows = [members[i : i + columns] for members in group.groups for i in range(0, group.size, columns)]
    along_columns = [members[i::columns] for members in group.groups for i in range(columns)]
    chunk = reduce_scatter(_chunked(x, columns), group.axis_name, "ring", op, along_rows)
    chunk = all_reduce(chunk, group.axis_name, "ring", op, along_columns)
    return _whole(all_gather(chunk, group.axis_name, "ring", along_rows), x)


def _hierarchical(x: Array, group: _Group, op: Op, group_size: int | None = None) -> Array:
    size = _nearly_square(group.size) if group_size is None else checks.whole("group_size", group_size)
    if group.size % size:
        raise ValueError(f"Groups of {size} do not divide {group.size} workers.")
    small = [members[i : i + size] for members in group.groups for i in range(0, group.size, size)]
    first = [members[::size] for members in group.groups]
    x = reduce(x, group.axis_name, 0, op, small)
    x = all_reduce(x, group.axis_name, "ring", op, first)
    return broadcast(x, group.axis_name, 0, small)


def _circulant(x: Array, group: _Group, op: Op) -> Array:
    """Bruck's all-gather, and before it the same backwards: chunk i of `mine` is for the worker i further on."""
    mine = _chunked(x, group.size)[(jnp.arange(group.size) + group.position) % group.size]
    for d in reversed(_doublings(group.size)):
        count = min(d, group.size - d)
        mine = jnp.concatenate([op(mine[:count], group.shift(mine[d : d + count], d)), mine[count:d]])
    return _whole(all_gather(mine[0], group.axis_name, "bruck", group.groups), x)


_ALL_REDUCE: dict[str, Callable[..., Array]] = {
    "ring": _ring, "bidirectional_ring": _rings, "tree": _tree, "butterfly": _butterfly,
    "rabenseifner": _rabenseifner, "circulant": _circulant, "torus": _torus, "hierarchical": _hierarchical,
}  # fmt: skip
ALGORITHMS = tuple(_ALL_REDUCE)


# What the program does


def schedule(
    algorithm: str | None, workers: int, shape: Sequence[int], dtype: Any = "float32", collective: str = "all_reduce",
    **options: Any,
) -> program.Schedule:  # fmt: skip
    """The rounds of a collective operation on arrays x of this shape, read by `program.schedule`; nothing is run.

    `algorithm` is None for operations that have only one. Raises ValueError for what the operation refuses.
    """
    x = jax.ShapeDtypeStruct(tuple(shape), dtype)
    return program.schedule(operation(collective, algorithm, **options), checks.whole("workers", workers), x)


def operation(collective: str, algorithm: str | None = None, **options: Any) -> Callable[[Array], Array]:
    """A collective operation as a function of a worker's x, on the axis "workers".

    Raises ValueError for an unknown collective.
    """
    f = COLLECTIVES[checks.known("collective", collective, COLLECTIVES)]
    options |= {} if algorithm is None else {"algorithm": algorithm}
    return functools.partial(f, axis_name="workers", **options)


COLLECTIVES = {
    f.__name__: f for f in (broadcast, reduce, scatter, gather, all_gather, reduce_scatter, all_reduce, all_to_all)
}
