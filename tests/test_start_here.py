"""What 00_start_here suggests to try next."""

from __future__ import annotations

import numpy as np
from cells import Cells

FEWER = {
    "machines = [1, 5, 20, 50, 200]": "machines = [1, 20, 200]",
    "seeds=range(8), tuning_seeds=3": "seeds=range(8), tuning_seeds=1",
}
FEWER |= {"range(-8, 2)]": "range(-6, 2, 2)]"}


def scaled(changes: dict[str, str]) -> Cells:
    cells = Cells("00_start_here", FEWER | changes)
    cells.run("start-01", "start-10", "start-11", "start-reach", "start-reach-figure")
    return cells


def test_a_lower_target_is_reached_sooner_and_the_curve_still_bends():
    cells = scaled({"target = 0.50": "target = 0.40"})
    share = [cells["speed_up"][n].mean() / n for n in (1, 20, 200)]
    assert share[0] == 1 > share[1] > share[2]
    assert all((cells["needed"][n] < cells["most"][n]).all() for n in (1, 20, 200))


def test_without_momentum_some_may_never_arrive_and_are_counted():
    cells = scaled({"optax.sgd(learning_rate, momentum=0.9)": "optax.sgd(learning_rate)"})
    assert all(np.isfinite(cells["speed_up"][n]).all() for n in (1, 20, 200))
