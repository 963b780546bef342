"""Rides, which can be rewound and replayed; answers to the exercises, right and naive; what the notebook suggests."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import optax
import pytest
from conftest import suggested_by
from hypothesis import given, settings
from hypothesis import strategies as st

from dlscale.course.sources import python
from dlscale.learning_rate import Ride, exercises

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "03_learning_rate.ipynb"

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


# The exercises: what is right is accepted however it is written, what is naive is refused


def follow_in_other_words(w, v, rate, steps):
    a, b = map(float, w)
    noted = np.zeros(steps)
    for step in range(steps):
        error = a * b - 1
        H = np.outer([b, a], [b, a]) + error * np.array([[0, 1], [1, 0]])
        product = H @ v
        noted[step], v = np.dot(product, v), product / np.sqrt((product**2).sum())
        a, b = a - rate * error * b, b - rate * error * a
    return [np.array([a, b]), noted]


def broken(line: str, instead: str):
    """The reference answer with one line spoilt."""
    assert line in exercises.follow.code
    namespace = {"np": np}
    exec(exercises.follow.code.replace(line, instead), namespace)
    return namespace["follow"]


NAIVE_FOLLOWERS = {
    "the length of v": broken("v = Hv / np.linalg.norm(Hv)", "v = Hv"),
    "v stays": broken("v = Hv / np.linalg.norm(Hv)", "pass"),
    "no curvature of the network itself": broken("2 * a * b - 1], [2 * a * b - 1", "a * b], [a * b"),
    "one weight after the other": broken(
        "w = w - rate * (a * b - 1) * np.array([b, a])",
        "a = a - rate * (a * b - 1) * b; b = b - rate * (a * b - 1) * a; w = np.array([a, b])",
    ),
    "uphill": broken("w - rate", "w + rate"),
    "a step less": broken("range(steps)", "range(steps - 1)"),
    "the weights alone": lambda *args: follow_in_other_words(*args)[0],
}


def test_following_the_sharpness_in_other_words_is_right():
    right, line = exercises.follow.judge(follow_in_other_words)
    assert right, line


@pytest.mark.parametrize("name", NAIVE_FOLLOWERS)
def test_a_naive_follower_is_refused(name):
    assert not exercises.follow.judge(NAIVE_FOLLOWERS[name])[0]


def smoothed(rates, losses):
    means = [losses[max(0, i - 40) : i + 41].mean() for i in range(len(losses))]
    return rates[int(np.argmin(means))]


def in_blocks(rates, losses):
    """As section 3 of the notebook reads it."""
    count = len(losses) // 31
    return rates[15 + 31 * losses[: 31 * count].reshape(count, 31).mean(1).argmin()]


def at_step(offset):
    """A mean over 61 steps, read at this one of them."""
    return lambda rates, losses: rates[offset + np.convolve(losses, np.ones(61) / 61, mode="valid").argmin()]


def largest_by_power(A, beta):
    return (1 + beta) * 2 / np.linalg.norm(A, 2)


def in_two_pieces(step, total, warmup, peak):
    return float(optax.warmup_cosine_decay_schedule(0.0, peak, warmup, total)(step))


@pytest.mark.parametrize(
    ("name", "answer", "right"),
    [
        ("stable", largest_by_power, True),
        ("stable", lambda A, beta: 2 * (1 + beta) / np.diag(A).max(), False),
        ("stable", lambda A, beta: 2 / np.linalg.eigvalsh(A)[-1], False),
        ("stable", lambda A, beta: 2 / np.linalg.eigvalsh(A)[-1] / (1 - beta), False),
        ("steps", lambda low, high, rate: int(np.ceil(np.log(1000) / -np.log(abs(1 - rate * low)))), False),
        ("read", smoothed, True),
        ("read", in_blocks, True),
        ("read", lambda rates, losses: in_blocks(rates, losses) / 10, False),
        ("read", lambda rates, losses: rates[np.argmin(losses)], False),
        ("read", at_step(0), False),
        ("read", at_step(60), False),
        ("schedule", in_two_pieces, True),
        ("schedule", lambda step, total, warmup, peak: peak * (1 + np.cos(np.pi * step / total)) / 2, False),
    ],
)
def test_answers(name, answer, right):
    judged, line = vars(exercises)[name].judge(answer)
    assert judged is right, line


STEP = np.arange(744)
SHAPES = {
    "a straight fall": (0.09 * (1 - STEP / 744), True),
    "a climb and a cosine": (0.1 * np.minimum(1, (STEP + 1) / 74) * (1 + np.cos(np.pi * STEP / 744)) / 2, True),
    "the constant rate itself": (np.full(744, exercises.BEST_CONSTANT), False),
    "half of it": (np.full(744, exercises.BEST_CONSTANT / 2), False),
    "too large": (np.full(744, 3.0), False),
    "uphill": (np.linspace(0.1, -0.01, 744), False),
    "too short": (np.linspace(0.1, 0, 743), False),
    "not finite": (np.full(744, np.nan), False),
}


MORE = ("a climb and a cosine", "half of it", "too large")  # each trains for as long as the first and the constant one


@pytest.mark.parametrize("shape", [pytest.param(s, marks=[pytest.mark.long] * (s in MORE)) for s in SHAPES])
def test_only_rates_that_beat_the_constant_one_on_fresh_seeds_are_right(shape):
    rates, right = SHAPES[shape]
    judged, line = exercises.beat.judge(rates)
    assert judged is right, line


@pytest.mark.parametrize("rate", [1 / 64, pytest.param(1 / 16, marks=pytest.mark.long)])
def test_the_constant_rate_to_beat_is_the_best_of_its_grid(rate):
    best, other = exercises._accuracies(np.full(744, rate), range(980, 990)).mean(1)
    assert other < best


# What the notebook suggests to try


CELLS = {cell.id.removeprefix("learning_rate-"): cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells}
LIGHT = {
    "seed=range(8, 18), learning_rate=RATES": "seed=range(8, 10), learning_rate=RATES[-2:]",
    "seeds=range(40, 56), tuning_seeds=range(30, 33)": "seeds=range(40, 42), tuning_seeds=range(30, 31)",
    "more = dict(seeds=range(40, 88))": "more = {}",
    "fresh = dict(seeds=range(88, 104))": "fresh = {}",
}


def run_cells(names: str, edits: dict[str, str]) -> dict:
    """Run these cells of the notebook with all edits made, and with the few seeds of LIGHT; return their names."""
    namespace: dict = {}
    sources = {name: CELLS[name] for name in names.split()}
    for old, new in (edits | LIGHT).items():
        found = [name for name, source in sources.items() if old in source]
        assert found or old in LIGHT, f"no cell has {old!r}"
        sources |= {name: sources[name].replace(old, new) for name in found}
    for source in sources.values():
        exec(python(source), namespace)
    return namespace


def suggested(code: str) -> str:
    assert f"`{code}`" in CELLS["91"], f"the notebook does not suggest {code}"
    return code


COMPARING = "01 03 05 first-line-method 40 41 42 scheduled 57 58-method shape-guess 60 schedule-table"
LINEAR = suggested('"linear": 1 - step / STEPS')
SUGGESTIONS = {
    "a schedule of one's own": {'"range test": 2.0 **': f'{LINEAR},\n    "range test": 2.0 **'},
    "Adam": {
        "optax.sgd(lambda step: learning_rate * TABLE[jnp.int32(schedule), step], momentum=momentum)": suggested(
            "optax.adam(lambda step: learning_rate * TABLE[jnp.int32(schedule), step], b1=momentum)"
        ),
        "GRID = [2.0**k for k in range(-6, -1)]": "GRID = [2.0**k / 8 for k in range(-6, -1)]",
    },
    "twice the budget": {"epochs=8": suggested("epochs=16")},
}


@suggested_by("03_learning_rate")
@pytest.mark.parametrize("name", SUGGESTIONS)
def test_a_comparison_that_is_suggested_runs(name, monkeypatch, capsys):
    monkeypatch.setenv("DLSCALE_CACHE", "off")
    monkeypatch.setattr("dlscale.page.figures.display", lambda *given, **options: None)
    found = run_cells(COMPARING, SUGGESTIONS[name])
    printed = capsys.readouterr().out
    assert "equal to optax within rounding: False" not in printed
    assert ("linear" in found["arms"]) == (name == "a schedule of one's own")
    assert len(found["step"]) == found["STEPS"] == (1488 if name == "twice the budget" else 744)
    assert all(np.isfinite(found["tested"](arm)).all() for arm in found["arms"])


@suggested_by("03_learning_rate")
def test_cross_entropy_in_section_2_does_not_stay_at_the_line(monkeypatch):
    monkeypatch.setenv("DLSCALE_CACHE", "off")
    body = CELLS["23"][CELLS["23"].index("    error = ") :]
    logits = "tanh_network.apply(as_params(w), x)"
    new = suggested(f"optax.softmax_cross_entropy_with_integer_labels({logits}, y).mean()")
    found = run_cells("01 03 23 25 26 34", {body: f"    return {new}\n"})
    for rate in (0.1, 0.2, 0.4, 0.8):
        sharpness = np.array(found["descend"](found["first"](8), rate, found["x"], found["y"])[0])
        assert sharpness[0] < sharpness.max() > 1.5 * sharpness[-1]
        assert (sharpness.max() > 2 / rate) == (rate == 0.8)
