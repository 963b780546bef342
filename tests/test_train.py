import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dlscale.lab import data, models, train

SIGNALS = data.load("mnist1d")
SMALL = dataclasses.replace(
    SIGNALS, x_train=SIGNALS.x_train[:330], y_train=SIGNALS.y_train[:330], x_test=SIGNALS.x_test[:70],
    y_test=SIGNALS.y_test[:70],
)  # fmt: skip
NET = models.mlp((40, 16, 10))
BUDGET = {"batch_size": 32, "epochs": 4}


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_fit_equals_a_plain_loop_over_the_same_batches():
    """One epoch in the stored order, step by step with optax."""
    run = train.fit(NET, SMALL, optax.adam, batch_size=32, epochs=1, shuffle=False, learning_rate=0.01)
    optimizer = optax.adam(0.01)

    @jax.jit
    def start():
        params = NET.init(jax.random.fold_in(jax.random.key(0), 0))
        return params, optimizer.init(params)

    @jax.jit
    def step(params, memory, x, y):
        def objective(params):
            return optax.softmax_cross_entropy_with_integer_labels(NET.apply(params, x), y).mean()

        loss, gradient = jax.value_and_grad(objective)(params)
        updates, memory = optimizer.update(gradient, memory, params)
        return optax.apply_updates(params, updates), memory, loss

    (params, memory), losses = start(), []
    for rows in np.arange(320).reshape(10, 32):
        params, memory, loss = step(params, memory, SMALL.x_train[rows], SMALL.y_train[rows])
        losses.append(loss)
    np.testing.assert_allclose(run.history.loss, losses, rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(run.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.fixture(scope="module")
def logits():
    """Of 1,234 examples, with the parameters of the key 0."""
    return np.asarray(jax.jit(NET.apply)(NET.init(jax.random.key(0)), np.resize(SIGNALS.x_test, (1234, 40))))


@pytest.mark.parametrize("count", [1, 500, 501, 1234])
def test_evaluate_counts_every_example_once(count, logits):
    x, y = np.resize(SIGNALS.x_test, (count, 40)), np.resize(SIGNALS.y_test, count)
    loss, accuracy = jax.jit(lambda params: train.evaluate(NET, params, x, y))(NET.init(jax.random.key(0)))
    assert float(accuracy) == pytest.approx((logits[:count].argmax(1) == y).mean(), abs=1e-6)
    expected = np.log(np.exp(logits[:count]).sum(1)) - logits[np.arange(count), y]
    assert float(loss) == pytest.approx(expected.mean(), rel=1e-5)


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    runs = [train.fit(NET, SMALL, optax.sgd, **BUDGET, learning_rate=0.1, seed=seed) for seed in (3, 3, 4)]
    assert equal(runs[0], runs[1])
    assert not equal(runs[0].params, runs[2].params)


def test_shuffling_is_new_in_each_epoch_and_leaves_no_example_out():
    """With a model that cannot learn, an epoch's losses say which examples were in each batch."""
    frozen = models.Model(lambda key: {}, {"first ten": models.Layer(lambda own, x: x[:, :10])})
    whole = dataclasses.replace(SMALL, x_train=SMALL.x_train[:320], y_train=SMALL.y_train[:320])
    epochs = train.fit(frozen, whole, optax.sgd, batch_size=1, epochs=2, learning_rate=0.1).history.loss.reshape(2, -1)
    assert not np.array_equal(epochs[0], epochs[1])
    np.testing.assert_allclose(np.sort(epochs[0]), np.sort(epochs[1]), rtol=1e-6)
    stored = train.fit(frozen, whole, optax.sgd, batch_size=1, epochs=2, learning_rate=0.1, shuffle=False).history.loss
    assert np.array_equal(stored[:320], stored[320:])
    np.testing.assert_allclose(np.sort(epochs[0]), np.sort(stored[:320]), rtol=1e-6)
    once = [
        train.fit(
            frozen, whole, optax.sgd, batch_size=1, epochs=2, learning_rate=0.1, shuffle="once", seed=seed
        ).history
        for seed in (0, 1)
    ]
    assert np.array_equal(once[0].loss[:320], once[0].loss[320:])
    assert not np.array_equal(once[0].loss, once[1].loss)
    assert np.array_equal(once[0].loss[:320], epochs[0])


def test_a_sweep_is_fit_for_every_setting_bit_for_bit():
    sweep = train.sweep(
        NET, SMALL, optax.sgd, **BUDGET, learning_rate=[0.05, 0.1], momentum=[0.0, 0.5, 0.9], seed=range(2),
        keep_params=True,
    )  # fmt: skip
    assert sweep.history.loss.shape == (2, 3, 2, 40)
    for i, j, k in [(0, 0, 0), (1, 2, 1), (0, 1, 1)]:
        setting = {"learning_rate": [0.05, 0.1][i], "momentum": [0.0, 0.5, 0.9][j], "seed": k}
        run = train.fit(NET, SMALL, optax.sgd, **BUDGET, **setting)
        assert equal(jax.tree.map(lambda leaf, i=i, j=j, k=k: leaf[i, j, k], sweep), run)


def test_new_values_seeds_and_grid_sizes_compile_nothing(monkeypatch):
    train.sweep(NET, SMALL, optax.sgd, **BUDGET, learning_rate=[0.1])
    train.fit(NET, SMALL, optax.sgd, **BUDGET, learning_rate=0.1)

    def refuse(*_args, **_kwargs):
        raise AssertionError("compiled again")

    monkeypatch.setattr("jax._src.compiler.backend_compile_and_load", refuse)
    with pytest.raises(AssertionError, match="compiled again"):  # the trap works
        jax.jit(lambda x: x * 3.25)(1.0)
    train.sweep(NET, SMALL, optax.sgd, **BUDGET, learning_rate=[0.2, 0.3, 0.7], seed=range(7, 11))
    train.fit(NET, SMALL, optax.sgd, **BUDGET, learning_rate=0.5, seed=9)


def test_a_diverging_fit_stops_and_names_step_and_setting():
    with pytest.raises(
        train.Diverged, match=r"at step \d+ \(epoch 0\) with learning_rate=1e\+06, batch_size=32, seed=0"
    ) as caught:
        train.fit(NET, SMALL, optax.sgd, batch_size=32, epochs=50, learning_rate=1e6)
    history = caught.value.run.history
    step = int((~np.isfinite(history.loss)).argmax())
    assert f"at step {step} " in str(caught.value)
    assert len(history.loss) == 10  # it stopped after the first epoch


def test_a_diverging_run_of_a_sweep_is_marked_and_the_others_go_on():
    sweep = train.sweep(NET, SMALL, optax.sgd, **BUDGET, learning_rate=[0.1, 1e6], seed=range(2))
    assert (sweep.diverged_at[0] == -1).all()
    bad = sweep.diverged_at[1]
    assert (bad >= 0).all()
    for seed in (0, 1):
        assert np.isfinite(sweep.history.loss[1, seed, : bad[seed]]).all()
        assert not np.isfinite(sweep.history.loss[1, seed, bad[seed]])
    assert np.isfinite(sweep.history.loss[0]).all()


@pytest.mark.parametrize("count", [1, 330, 8192, 8193])
def test_a_permutation_holds_every_number_once_and_none_is_favoured(count):
    keys = jax.random.split(jax.random.key(0), 200 if count == 330 else 10)
    orders = np.asarray(jax.jit(jax.vmap(lambda key: train._permutation(key, count)))(keys))
    assert (np.sort(orders, axis=1) == np.arange(count)).all()
    if count == 330:
        assert abs((orders[:, 0] / (count - 1)).mean() - 0.5) < 4 * 0.5 / np.sqrt(200)


def test_tune_keeps_tuning_and_testing_apart():
    rates = [1e-4, 0.1, 1e6]
    tuned = train.tune(train.fits(NET, SMALL, optax.sgd, **BUDGET), learning_rate=rates, seeds=range(5))
    assert tuned.setting == {"learning_rate": 0.1} and tuned.axes == {"learning_rate": tuple(rates)}
    assert not tuned.at_edge
    assert tuned.scores.shape == (3, 3)
    assert tuned.failed.tolist() == [[False] * 3, [False] * 3, [True] * 3]
    held_out = data.validation_split(SMALL, 0.25)
    one = train.fit(NET, held_out, optax.sgd, **BUDGET, learning_rate=0.1, seed=6)
    assert tuned.scores[1, 1] == one.history.test_accuracy[-1] == tuned.validation.history.test_accuracy[1, 1, -1]
    run = train.fit(NET, dataclasses.replace(held_out, x_test=SMALL.x_test, y_test=SMALL.y_test), optax.sgd, **BUDGET,
                    learning_rate=0.1, seed=2)  # fmt: skip
    assert equal(jax.tree.map(lambda leaf: leaf[2], tuned.test.history), run.history)
    narrow = train.tune(train.fits(NET, SMALL, optax.sgd, **BUDGET), learning_rate=[0.01, 0.1])
    assert narrow.at_edge


def test_tune_asks_for_the_whole_grid_then_for_the_best_setting():
    asked = []

    def trials(settings):
        asked.append(settings)
        return [
            {"score": np.nan if s["a"] == 3 else -((s["a"] - 2) ** 2) + s["b"], "seed": s["seed"]} for s in settings
        ]

    tuned = train.tune(
        trials,
        arm="x",
        a=(1, 2, 3),
        b=range(2),
        tuning_seeds=(7, 9),
        seeds=(0, 4),
        score=lambda r: r["score"],
        worst=-9,
    )
    assert asked == [
        [{"arm": "x", "a": a, "b": b, "seed": s, "judged_on": "validation"}
         for a in (1, 2, 3) for b in (0, 1) for s in (7, 9)],
        [{"arm": "x", "a": 2, "b": 1, "seed": s, "judged_on": "test"} for s in (0, 4)],
    ]  # fmt: skip
    assert [*asked[0][0]] == ["arm", "a", "b", "seed", "judged_on"]
    assert tuned.setting == {"a": 2, "b": 1} and tuned.at_edge
    np.testing.assert_array_equal(tuned.scores[..., 0], [[-1, 0], [0, 1], [np.nan, np.nan]])
    assert tuned.validation["seed"].shape == (3, 2, 2) and tuned.test["seed"].tolist() == [0, 4]


# Any step


def count(state, amount, factor):
    return state + factor * amount, state


def looked(state):
    return {"state": state}


def test_run_is_a_scan_whatever_the_size_of_its_pieces():
    amounts = np.arange(10.0, dtype=np.float32)
    _, expected = jax.lax.scan(lambda state, amount: count(state, amount, 2.0), jnp.float32(0), amounts)
    for every, looks in ((None, [90]), (1, np.cumsum(2 * amounts)), (4, [12, 56, 90]), (100, [90])):
        driven = train.run(count, jnp.float32(0), amounts, 2.0, look=looked, every=every, progress=False)
        np.testing.assert_array_equal(driven.records, expected)
        assert driven.state == 90
        np.testing.assert_array_equal(driven.looks["state"], looks)
    assert train.run(count, jnp.float32(0), amounts, 2.0, progress=False).looks is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 331}, "from 1 to 330, not 331"),
        ({"eval_every": 3}, "4 is not a multiple of 3"),
        ({"learning_rate": -0.1}, "learning_rate must be a finite number of at least 0, not -0.1"),
        ({"learning_rate": float("nan")}, "not nan"),
        ({"nesterov": True}, "functools.partial"),
        ({"shuffle": "twice"}, 'shuffle must be True, False or "once"'),
        ({"loss": "cross-entropy"}, "Did you mean 'cross_entropy'"),
    ],
)
def test_bad_settings_are_refused_in_words(change, words):
    for run in (train.fit, train.sweep):
        with pytest.raises(ValueError, match=words):
            run(NET, SMALL, optax.sgd, **({"learning_rate": 0.1} | BUDGET | change))


def test_convolutions_train_too():
    mnist = data.load("mnist")
    part = dataclasses.replace(mnist, x_train=mnist.x_train[:640], y_train=mnist.y_train[:640],
                               x_test=mnist.x_test[:100], y_test=mnist.y_test[:100])  # fmt: skip
    run = train.fit(models.lenet(), part, optax.adam, batch_size=32, epochs=4, learning_rate=0.003)
    assert run.history.test_accuracy[-1] > 0.6
    assert jnp.isfinite(run.params["conv1"]["w"]).all()


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to itself")
def test_a_real_interrupt_ends_training_soon_and_the_next_run_works():
    code = """
import faulthandler, gc, os, signal, threading
import optax
from dlscale.lab import data, models, train
long = (models.mlp((40, 64, 10)), data.load("mnist1d"), optax.sgd)

def next_run():
    return train.fit(*long, learning_rate=0.1, batch_size=32, epochs=1).history.test_accuracy.shape

def interrupt(ended):
    for _ in range(3):  # where Python ignores what a callback raises, one has no effect: who waits asks again
        os.kill(os.getpid(), signal.SIGINT)
        if ended.wait(60):
            return
    faulthandler.dump_traceback()
    os._exit(1)

next_run()
gc.disable()  # an interrupt that comes while JAX's own callback of the collector runs is lost
ended = threading.Event()
threading.Timer(0.5, interrupt, [ended]).start()
try:
    train.sweep(*long, learning_rate=[0.1] * 2_000, batch_size=32, epochs=100, progress=False)
    print("it ran to its end, which takes hours")
except KeyboardInterrupt:
    ended.set()
    print("interrupted, then", next_run())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert result.stdout.splitlines() == ["interrupted, then (1,)"], result.stderr
