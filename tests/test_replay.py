"""The replay of a collective operation against the operation itself and against its schedule."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from collective_cases import OPERATIONS, ROOTED
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale import collectives
from dlscale.collectives import replay


def end(collective, workers, root):
    """How many workers' numbers each worker has seen at each place when all is done."""
    ones, own = np.ones((workers, 2 * workers), int), np.repeat(np.eye(workers, dtype=int), 2, axis=1)
    at_root = (np.arange(workers) == root)[:, None]
    return {"all_reduce": workers * ones, "broadcast": ones, "all_gather": ones,
            "reduce": workers * at_root * ones, "gather": at_root * ones, "scatter": np.where(at_root, 1, own),
            "reduce_scatter": workers * own, "all_to_all": own * workers}[collective]  # fmt: skip


@pytest.mark.parametrize("collective, algorithm", OPERATIONS)
@settings(max_examples=3)
@given(st.data())
def test_rounds_are_those_of_the_schedule_and_at_the_end_all_has_arrived(collective, algorithm, data):
    workers = data.draw(
        st.sampled_from([2, 4, 8, 16]) if algorithm == "halving" else st.integers(2, replay.MOST_WORKERS)
    )
    options = {"root": data.draw(st.integers(0, workers - 1))} if collective in ROOTED else {}
    frames = replay.replay(collective, workers, algorithm, **options)
    shape = {"gather": (2,), "all_gather": (2,), "scatter": (workers, 2), "reduce_scatter": (workers, 2),
             "all_to_all": (workers, 2)}.get(collective, (2 * workers,))  # fmt: skip
    rounds = collectives.schedule(algorithm, workers, shape, collective=collective, **options).rounds
    assert len(frames) == 1 + len(rounds)
    assert not frames[0].pairs
    for frame, (messages, _) in zip(frames[1:], rounds, strict=True):
        assert sorted(frame.pairs) == sorted(tuple(pair) for pairs, _ in messages for pair in pairs.tolist())
    for earlier, later in itertools.pairwise(frames):
        receivers = {b for _, b in later.pairs}
        changed = (earlier.seen != later.seen).any(1)
        assert (earlier.seen <= later.seen).all()  # nothing is forgotten
        assert set(np.flatnonzero(changed)) <= receivers
    wanted = end(collective, workers, options.get("root", 0))
    assert (frames[-1].seen >= wanted).all()
    if collective in ("all_reduce", "broadcast", "all_gather"):
        np.testing.assert_array_equal(frames[-1].seen, wanted)


def test_frames_of_three_workers_by_hand():
    start, first, second = replay.replay("broadcast", 3, root=1)
    np.testing.assert_array_equal(start.seen.any(1), [False, True, False])
    assert first.pairs == [(1, 2)]
    assert second.pairs == [(1, 0)]
    ring = replay.replay("all_reduce", 3, "ring")
    assert [frame.seen.max() for frame in ring] == [1, 2, 3, 3, 3]
    assert all(frame.pairs == [(0, 1), (1, 2), (2, 0)] for frame in ring[1:])
