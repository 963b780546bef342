"""Rides against gradient descent written out, and the laws of recording: what is driven can be rewound and replayed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale.learning_rate import Ride

CURVATURES = np.array([1.0, 4.0], np.float32)
START = np.array([1.0, -2.0], np.float32)
RATES = st.lists(st.floats(0, 0.6), min_size=1, max_size=8)


@jax.jit
def frame(w, rate):
    """Two steps on ½ Σ curvature · w², and the loss before each."""

    def step(w, _):
        return w - rate * CURVATURES * w, (CURVATURES * w**2).sum() / 2

    w, losses = jax.lax.scan(step, w, length=2)
    return w, {"loss": losses, "distance": jnp.linalg.norm(w)}


def driven(rates, ride=None):
    ride = Ride(frame, (START,)) if ride is None else ride
    for rate in rates:
        ride = ride.drive(rate)
    return ride


def bits(ride):
    return ride.rates, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((ride.states, ride.records))]


def test_drives_as_gradient_descent_does():
    rates = [0.1, 0.3, 0.3, 0.45]
    ride, w, losses = driven(rates), START.astype(float), []
    for rate in np.repeat(rates, 2):
        losses.append((CURVATURES * w**2).sum() / 2)
        w = w * (1 - rate * CURVATURES)
    np.testing.assert_allclose(ride.history["loss"].ravel(), losses, rtol=1e-4)
    np.testing.assert_allclose(ride.states[-1], w, rtol=1e-4)
    assert ride.rates == tuple(float(np.float32(rate)) for rate in rates)
    assert ride.history["distance"].shape == (4,)
    assert bits(Ride(frame, (START,)).drive(0.1).drive(0.3, frames=2).drive(0.45)) == bits(ride)


@given(RATES)
def test_a_replay_has_the_same_bits(rates):
    ride = driven(rates)
    assert bits(ride.replay()) == bits(ride)


@settings(max_examples=50)
@given(RATES, RATES, st.data())
def test_nothing_is_lost_by_going_back(rates, others, data):
    ride = driven(rates)
    before, at = bits(ride), data.draw(st.integers(0, len(rates)))
    back = ride.rewind(at)
    assert bits(back) == bits(driven(rates[:at]))
    other = driven(others, back)
    assert bits(ride) == before, "driving on from an earlier frame changed the first ride"
    assert other.rates[:at] == ride.rates[:at]
    assert bits(driven(rates[at:], back)) == before


def test_a_ride_ends_where_it_diverges_and_can_be_rewound():
    ride = driven([0.1, 0.2]).drive(1e18, frames=9)
    assert ride.diverged and len(ride.rates) < 11
    assert not ride.rewind(2).diverged
    with pytest.raises(ValueError, match=rf"diverged in frame {len(ride.rates)}. Rewind it"):
        ride.drive(0.1)
    assert bits(ride.replay()) == bits(ride)
    assert bits(ride.rewind(2).drive(0.3)) == bits(driven([0.1, 0.2, 0.3]))


@pytest.mark.parametrize("rate", [-0.1, np.nan, np.inf, "fast"])
def test_a_bad_rate_is_refused(rate):
    with pytest.raises(ValueError, match="rate must be a finite number of at least 0"):
        Ride(frame, (START,)).drive(rate)


@pytest.mark.parametrize("at", [-1, 3, 1.0])
def test_only_driven_frames_can_be_gone_back_to(at):
    with pytest.raises(ValueError, match="frame must be a whole number from 0 to 2"):
        driven([0.1, 0.2]).rewind(at)


def test_an_empty_ride():
    ride = Ride(frame, (START,))
    assert not ride.diverged
    assert bits(ride.replay()) == bits(ride.drive(0.1, frames=0)) == bits(ride)
    with pytest.raises(ValueError, match="drive first"):
        _ = ride.history
    with pytest.raises(ValueError, match="frames must be a whole number"):
        ride.drive(0.1, frames=-1)
