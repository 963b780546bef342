"""The exercises of 00_start_here."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare

steps = Exercise(
    id="start_here-steps",
    answer="steps",
    hints=(
        "All machines together make one step. How many examples does that step use?",
        "With one machine a step uses 15 examples, so a pass takes 3,000 / 15 steps.",
    ),
    code="steps = [3000 // (15 * n) for n in (1, 20, 200)]",
    wrong=lambda answer: compare("The list of three numbers of steps", answer, [200, 10, 1]),
    right="more machines make fewer steps, and with 200 a pass is a single one.",
)


def _speed_up(answer: Any) -> str | None:
    rng = np.random.default_rng(11)
    for machines, target, late in ((5, 0.5, 1.2), (20, 0.4, 3), (200, 0.5, 8), (50, 0.45, 1000), (200, 0.3, 0.1)):
        passes = np.arange(1, 61)
        one, many = (0.7 * passes / (passes + slow) + rng.normal(0, 0.03, 60) for slow in (3, 3 * late))
        one[5] = many[19] = target  # exactly at the target is there
        many = many if late < 1000 else many - 0.3
        there = [(curve >= target).argmax() + 1 for curve in (one, many)]
        given = f"{machines} machines and the target {target:g}"
        found = answer(one.copy(), many.copy(), machines, target)
        if (many < target).all():
            if found is not None and found == found:  # a NaN is not
                return f"For {given} the run of {machines} never arrives: nobody knows what it needs, so None."
        elif wrong := compare(f"The speed-up for {given}", found, machines * there[0] / there[1], 1e-6):
            return wrong
    return None


speed_up = Exercise(
    id="start_here-speed_up",
    answer="speed_up",
    hints=(
        "`arrived = one >= target` is true or false for each pass; `arrived.argmax()` is the place of the first true.",
        "Places count from 0, passes from 1. Where nothing is true, `argmax` gives 0: ask `arrived.any()` first.",
    ),
    code="""
def speed_up(one, many, machines, target):
    arrived = many >= target
    if not arrived.any():
        return None
    return machines * ((one >= target).argmax() + 1) / (arrived.argmax() + 1)
""",
    wrong=_speed_up,
    right="the first arrivals are compared, and a run that never arrives gives no number.",
)


def pair(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Two noisy runs that end equally high: the first still climbs, the second has levelled off."""
    looks, end = int(rng.integers(30, 80)), rng.uniform(0.3, 0.55)
    share = np.arange(1, looks + 1) / looks
    bend = rng.uniform(0.2, 1)
    climbing = (1 - bend) * share + bend * share / (share + 0.3) * 1.3
    waited = rng.uniform(0, 0.4)  # so that the later one is not always the one that climbs
    level = 1 - np.exp(-np.clip(share - waited, 0, None) / rng.uniform(0.03, 0.09))
    first, second = (0.1 + (end - 0.1) * curve + rng.normal(0, 0.012, looks) for curve in (climbing, level))
    return first, second


def _stopped(answer: Any) -> str | None:
    rng, right = np.random.default_rng(5), 0
    for _ in range(500):
        runs, swap = pair(rng), int(rng.integers(2))
        said = answer(runs[swap], runs[1 - swap])
        if np.asarray(said).dtype.kind not in "biuf" or said not in (0, 1):
            return f"Your function must return 0 or 1, not {said}."
        right += said == swap
    if right >= 435:
        return None
    return f"Of 500 pairs {right} were right; at least 435 are wanted. Do you compare means of many late values?"


stopped = Exercise(
    id="start_here-stopped",
    answer="stopped",
    hints=(
        "Both runs end equally high. A mean of neighbouring differences is a difference of two values, and noisy.",
        "Average over the last fifth of a run, and over the fifth before it. Which run rose more in between?",
    ),
    code="""
def stopped(first, second):
    fifth = len(first) // 5
    rose = [run[-fifth:].mean() - run[-2 * fifth:-fifth].mean() for run in (first, second)]
    return int(rose[1] > rose[0])
""",
    wrong=_stopped,
    right="a run that still climbs at its end was stopped too early; one that is level there was not.",
)
