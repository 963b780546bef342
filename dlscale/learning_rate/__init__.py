"""Training whose rate a person chooses while it runs: recorded, so that it can be rewound and replayed bit for bit.

Schedules that are known beforehand are optax's; this is for those that are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from dlscale.lab import checks

State = Any  # a pytree of arrays: parameters, and whatever else goes from frame to frame
Record = Any  # a pytree of arrays, the same shapes in each frame


class Ride(NamedTuple):
    """A training run, frame by frame: `Ride(frame, (state,))` begins one.

    `frame(state, rate)` trains some steps at a learning rate, a float32, and returns the next state and a record of
    what happened. A ride is never changed: each method returns another one, so that no frame is ever lost.
    """

    frame: Callable[[State, np.float32], tuple[State, Record]]
    states: tuple[State, ...]  # before the first frame and after each
    rates: tuple[float, ...] = ()  # of each frame
    records: tuple[Record, ...] = ()  # of each frame, as NumPy arrays

    @property
    def diverged(self) -> bool:
        """Whether the last record holds a number that is not finite. No frame can follow it."""
        return any(not np.isfinite(leaf).all() for leaf in jax.tree.leaves(self.records[-1:]))

    @property
    def history(self) -> Record:
        """The records as one, each array with the frames as a new first axis. Raises ValueError before any frame."""
        if not self.records:
            raise ValueError("Nothing is recorded yet: drive first.")
        return jax.tree.map(lambda *leaves: np.stack(leaves), *self.records)

    def drive(self, rate: float, frames: int = 1) -> Ride:
        """Go on for `frames` frames at this rate, fewer if the ride diverges: it ends with the frame where it did.

        Raises ValueError for a rate that is negative or not finite, and for a ride that has diverged before.
        """
        rate, ride = np.float32(checks.finite("rate", rate)), self
        if self.diverged:
            raise ValueError(f"The ride diverged in frame {len(self.rates)}. Rewind it, and take a smaller rate.")
        for _ in range(checks.whole("frames", frames, low=0)):
            state, record = self.frame(ride.states[-1], rate)
            states, records = (*ride.states, state), (*ride.records, jax.device_get(record))
            ride = Ride(self.frame, states, (*ride.rates, float(rate)), records)
            if ride.diverged:
                break
        return ride

    def rewind(self, frame: int) -> Ride:
        """The ride as it was after its first `frame` frames. Raises ValueError for a frame that it has not reached."""
        checks.whole("frame", frame, low=0, high=len(self.rates), why="Further frames must be driven first.")
        return Ride(self.frame, self.states[: frame + 1], self.rates[:frame], self.records[:frame])

    def replay(self) -> Ride:
        """Run the recorded rates again from the first state: on the same machine, to the same bits."""
        ride = self.rewind(0)
        for rate in self.rates:
            ride = ride.drive(rate)
        return ride
