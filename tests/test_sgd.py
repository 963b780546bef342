"""The race of 01_sgd, answers that its exercises must take and refuse, and what its notebooks suggest to try."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cells import Cells, changed
from conftest import suggested_by

from dlscale import sgd
from dlscale.sgd import exercises


def test_rotation_turns_the_paths_of_plain_methods_only():
    rotation = np.array([[1, 1], [-1, 1]]) / 2**0.5
    start, rate = tuple(np.array(sgd.LANDSCAPES["ravine"].start) @ rotation), np.array([0.1, 0.1])
    plain, rotated = sgd.race("ravine", rate), sgd.race("rotated ravine", rate, start)
    off = {method: np.abs(rotated[method][0] - plain[method][0] @ rotation)[:, :20].max() for method in sgd.METHODS}
    assert max(off[method] for method in ("SGD", "momentum", "Nesterov")) < 0.01 < 0.1 < off["Adagrad"]


def test_steps_are_counted_until_the_losses_stay_low():
    losses = np.array([[5, 0, 5, 0, 0], [0, 0, 0, 0, 0], [5, 5, 5, 5, 5], [5, 0, 0, np.nan, 0], [5, 4, 3, 2, 0]])
    assert sgd.steps_to_arrive(losses, 1.0).tolist() == [3, 0, 4, 4, 4]
    assert sgd.best_rate(losses, 1.0) == 1
    assert sgd.best_rate(np.array([[9, 9, np.nan], [9, 9, 3.0], [9, 9, 2.0]]), 1.0) == 2


def orders(first, following):
    """SGD with epochs that each make their order of the one before."""
    loop, order = "    for _ in range(epochs):\n", "        order = rng.permutation(len(x))\n"
    return changed(exercises.epochs, loop + order, f"    order = {first}\n{loop}        order = {following}\n")


def backward_by_jax(W2, W3, X, Y, Z1, Z2, P):
    """Repeats the forward pass without its biases, and lets JAX differentiate it."""

    def loss(Z1, W2, W3):
        return optax.softmax_cross_entropy(jax.nn.relu(jax.nn.relu(Z1) @ W2) @ W3, Y).mean()

    delta1, *rest = jax.grad(loss, argnums=(0, 1, 2))(Z1, W2, W3)
    return [X.T @ delta1, *rest]


ONE_ORDER, BATCHES = "rng.permutation(len(x))", "rng.permutation(len(x)).reshape(-1, batch_size)"
KINGMA = "learning_rate * (1 - 0.999**step)**0.5 / (1 - 0.9**step) * m / (v**0.5 + 1e-8)"
ANSWERS = [  # an exercise, an answer or a change of the solution, and what is said of it: None if it is right
    ("epochs", orders("0", "np.argsort(rng.random(len(x)))"), None),
    ("epochs", orders(ONE_ORDER, "order[::-1]"), "store copies"),
    ("epochs", orders("0", "np.arange(len(x))"), "nearly the stored order"),
    ("epochs", orders("0", "rng.choice(len(x), len(x))"), "comes twice"),
    ("epochs", orders(BATCHES, "rng.permutation(order)"), "nearly the order"),
    ("epochs", orders(BATCHES, "rng.permuted(rng.permutation(order), axis=1)"), "the same minibatches"),
    ("epochs", ("w = w -", "last = w -"), "The last w"),
    ("momentum", 1.9, "The factor"),
    ("adam", ("learning_rate * m_corrected / (v_corrected**0.5 + 1e-8)", KINGMA), None),
    ("adam", ("m = 0.9 * m + 0.1 * gradient", "m *= 0.9; m += 0.1 * gradient"), None),
    ("adam", ("m / (1 - 0.9**step)", "m"), "The direction of step"),
    ("adam", ("1e-8), m, v", "1e-8), m_corrected, v_corrected"), "The direction of step"),
    ("adam", ("v_corrected**0.5 + 1e-8", "(v_corrected + 1e-8)**0.5"), "The direction of step"),
    ("adam", (" + 1e-8", ""), "not finite"),
    ("backward", lambda *given: map(jnp.float32, exercises.three_layers(*given)), None),
    ("backward", ("(Z1 > 0)\n", "1\n"), "The gradient of W"),
    ("backward", backward_by_jax, "The gradient of W"),
]


@pytest.mark.parametrize(("name", "answer", "told"), ANSWERS)
def test_answers(name, answer, told):
    exercise = getattr(exercises, name)
    right, said = exercise.judge(changed(exercise, *answer) if isinstance(answer, tuple) else answer)
    assert right if told is None else told in said, said


def test_the_solution_of_the_backward_pass_is_that_of_jax():
    rng = np.random.default_rng(0)
    X, W1, W2, W3 = (np.float32(rng.normal(size=shape)) for shape in [(7, 4), (4, 5), (5, 6), (6, 3)])
    Y, Z1 = np.eye(3, dtype="f")[np.arange(7) % 3], X @ W1
    Z2 = np.maximum(Z1, 0) @ W2
    saved = W2, W3, X, Y, Z1, Z2, np.array(jax.nn.softmax(np.maximum(Z2, 0) @ W3))
    for ours, theirs in zip(exercises.three_layers(*saved), backward_by_jax(*saved), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def cells(notebook: str, changes: dict[str, str], names: str) -> Cells:
    found = Cells(notebook, changes)
    prefix = "sgd-further" if "further" in notebook else "sgd"
    found.run(*(f"{prefix}-{name}" for name in ("setup", *names.split())))
    return found


@suggested_by("01_sgd")
def test_polyaks_momentum_is_the_best_of_four():
    path = cells("01_sgd", {}, "path")["path"]
    far = {b: np.linalg.norm(path(sgd.ravine, jnp.array([-6.0, 2.5]), 0.8, b)[40]) for b in (0.5, 0.64, 0.8, 0.9)}
    assert min(far, key=far.get) == 0.64 and far[0.5] > 10


@suggested_by("01_sgd")
def test_a_lower_target_needs_more_updates():
    found = cells("01_sgd", {}, "loss sgd count")
    needed = [found["updates_to_target"](256, 1.0, 0) for found.data["TARGET"] in (0.3, 0.25)]
    assert needed[0] < needed[1] < 5000


@suggested_by("01_sgd")
def test_from_the_ridge_of_the_saddle_nobody_leaves_and_beside_it_adagrad_does_at_once():
    rates = 10.0 ** np.arange(-3.0, 2.01, 0.05)
    on, beside = ({name: sgd.steps_to_arrive(losses, -0.99).min() for name, (_, losses) in found.items()}
                  for found in (sgd.race("saddle", rates, (1.2, w)) for w in (0.0, 1e-4)))  # fmt: skip
    assert {*on.values()} == {200}
    assert beside["Adagrad"] < 8 and beside["SGD"] > 12


@suggested_by("01_sgd_further")
@pytest.mark.parametrize("bug", ["no mask", "doubled"])
def test_tuning_hides_a_doubled_gradient_but_no_missing_mask(bug):
    mask, output = "(delta2 @ W2.T) * (Z2 > 0)", "(jax.nn.softmax(H2 @ W3) - Y) / len(X)"
    doubled = {mask: "(delta2 @ W2.T) * (Z1 > 0)", output: f"2 * {output}"}
    names = "suspect signals batch tuned bug-code frozen bug-learn bug-trial bug-run bug-accuracy"
    found = cells("further/01_sgd_further", {mask: "delta2 @ W2.T"} if bug == "no mask" else doubled, names)
    lost = (found["good"] - found["bad"]).mean()
    assert lost > 1.5 if bug == "no mask" else abs(lost) < 1.5


@suggested_by("01_sgd_further")
def test_a_larger_batch_can_be_dealt():
    changes = {"BATCH, EPOCHS = 30, 15": "BATCH, EPOCHS = 300, 15", "range(10120, 10136)": "range(10120, 10123)"}
    names = "signals batch tuned learn orders one-order orders-all orders-run orders-tune"
    accuracy = cells("further/01_sgd_further", changes, names)["test_accuracy"]
    assert accuracy["reshuffled"].mean() > accuracy["sorted"].mean() + 5


@suggested_by("01_sgd_further")
def test_nesterovs_steps_can_join():
    changes = {
        '[("SGD", size) for size in BATCHES] + [': '[("SGD", len(x_fit)), ("Nesterov", len(x_fit))] + [',
        'GRID = {"SGD": ': 'GRID = {"Nesterov": [2.0**k for k in range(-6, 3)], "SGD": ',
    }
    names = "digits live-code target-code target-loss target-several target target-pairs target-run"
    search = cells("further/01_sgd_further", changes, names)["search"]
    everything = {name: search[name, size].test.mean() for name, size in search if size > 1000}
    assert everything["Nesterov"] < everything["SGD"]
