"""Learning-rate schedules as arrays of multipliers, one for each step."""

import numpy as np


def schedules(steps: int) -> dict[str, np.ndarray]:
    """What each schedule multiplies the learning rate by at each step, (steps,); at most 1.

    "step" divides by ten at half and at three quarters of the time, "step, later" at three quarters and seven eighths;
    "exponential" falls by 100 in all. "cyclical" goes up and down four times between 0.1 and 1; "one-cycle" climbs for
    30 % of the time and is back at 85 % (Smith & Topin 2017, arXiv:1708.07120). "warm-up" climbs for a tenth, and
    "late" falls to 0 in the last quarter.
    """
    time = np.arange(steps) / steps
    return {
        "constant": np.ones(steps),
        "warm-up": np.minimum(1, 10 * (time + 1 / steps)),
        "step": np.where(time < 1 / 2, 1, np.where(time < 3 / 4, 0.1, 0.01)),
        "step, later": np.where(time < 3 / 4, 1, np.where(time < 7 / 8, 0.1, 0.01)),
        "exponential": 0.01**time,
        "cyclical": np.interp(4 * time % 1, [0, 0.5, 1], [0.1, 1, 0.1]),
        "one-cycle": np.interp(time, [0, 0.3, 0.85, 1], [1 / 25, 1, 1 / 25, 1 / 250_000]),
        "cosine": (1 + np.cos(np.pi * time)) / 2,
        "linear": 1 - time,
        "late": np.minimum(1, 4 - 4 * time),
    }
