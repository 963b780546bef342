import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dlscale.lab import data, models

KEY = jax.random.key(0)
ONE_OF_EACH = {
    "mlp": (models.mlp((40, 16, 16, 10)), (40,)),
    "mlp, batch norm": (models.mlp((40, 16, 10), norm="batch"), (40,)),
    "mlp, layer norm": (models.mlp((40, 16, 10), "tanh", norm="layer"), (40,)),
    "lenet": (models.lenet(), (28, 28, 1)),
    "lenet, colour": (models.lenet((32, 32, 3)), (32, 32, 3)),
    "resnet": (models.resnet(8, width=4), (28, 28, 1)),
    "plain": (models.resnet(14, skip=False, width=4, norm="layer"), (9, 7, 1)),
    "rnn": (models.rnn(8), (40,)),
    "gru": (models.rnn(8, "gru"), (40, 1)),
    "lstm": (models.rnn(8, "lstm", features=3), (12, 3)),
}


@pytest.fixture(params=ONE_OF_EACH)
def case(request):
    return ONE_OF_EACH[request.param]


def test_logits_are_finite_and_their_gradient_reaches_every_parameter(case):
    model, shape = case
    params = jax.jit(model.init)(KEY)
    x = jax.random.normal(jax.random.key(1), (6, *shape))
    assert jax.eval_shape(model.apply, params, x).shape == (6, 10)
    gradient = jax.jit(jax.grad(lambda p: (jax.nn.log_softmax(model.apply(p, x)) * jnp.arange(10)).sum()))(params)
    for (path, value), size in zip(
        jax.tree.leaves_with_path(gradient), map(jnp.shape, jax.tree.leaves(params)), strict=True
    ):
        assert value.shape == size
        assert jnp.isfinite(value).all(), path
        # a bias before batch norm is subtracted again: no gradient is right there
        assert jnp.abs(value).max() > 0 or path[-1].key == "b", path


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_computes_in_the_type_of_parameters_and_inputs(case, dtype):
    model, shape = case
    params = jax.eval_shape(lambda: jax.tree.map(lambda w: w.astype(dtype), model.init(KEY)))
    assert jax.eval_shape(model.apply, params, jax.ShapeDtypeStruct((6, *shape), dtype)).dtype == dtype


def test_the_layers_one_by_one_with_their_own_parameters_are_the_model(case):
    model, shape = case
    params = jax.jit(model.init)(KEY)
    own = model.split(params)
    assert set(params) <= set(model.layers)
    assert sum(len(jax.tree.leaves(part)) for part in own) == len(jax.tree.leaves(params))
    x = jax.random.normal(jax.random.key(1), (6, *shape))

    @jax.jit
    def in_a_loop(own, x):
        for layer, part in zip(model.layers.values(), own, strict=True):
            x = layer.activation(layer.compute(part, x))
        return x

    np.testing.assert_array_equal(in_a_loop(own, x), jax.jit(model.apply)(params, x))


def test_layers_that_compute_the_same_are_equal():
    lenet, deep = models.lenet().layers, models.resnet(20).layers
    assert lenet["conv1"] == lenet["conv2"] != lenet["dense1"] == lenet["dense2"] != lenet["output"]
    assert len(set(deep.values())) == 4  # the first, blocks that keep and that halve the image, and the last


def test_initialisation_is_a_function_of_the_key(case):
    model, _ = case
    same, again, other = (jax.tree.leaves(jax.jit(model.init)(jax.random.key(k))) for k in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(same, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(same, other, strict=True))


def test_a_batch_is_its_examples_unless_batch_norm_mixes_them(case):
    model, shape = case
    params, apply = jax.jit(model.init)(KEY), jax.jit(model.apply)
    x = jax.random.normal(jax.random.key(1), (4, *shape))
    one_by_one = jnp.concatenate([apply(params, x[i : i + 1]) for i in range(4)])
    mixed = model in (ONE_OF_EACH["mlp, batch norm"][0], ONE_OF_EACH["resnet"][0])
    assert np.allclose(apply(params, x), one_by_one, rtol=1e-4, atol=1e-4) != mixed


@settings(max_examples=6, deadline=None)  # each compiles four programs
@given(
    height=st.integers(5, 14),
    width=st.integers(5, 14),
    k=st.sampled_from([1, 2, 3, 5]),
    stride=st.integers(1, 3),
    channels=st.integers(1, 3),
    out=st.sampled_from([1, 6, 16, 64, 100]),
    padding=st.sampled_from(["SAME", "VALID"]),
)
def test_conv2d_and_its_gradient_equal_the_librarys(height, width, k, stride, channels, out, padding):
    x = jax.random.normal(KEY, (2, height, width, channels))
    w = jax.random.normal(jax.random.key(1), (k, k, channels, out))

    def library(x, w):
        return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    error = jax.random.normal(jax.random.key(2), jax.eval_shape(library, x, w).shape)

    @jax.jit
    def both(x, w):
        results = []
        for convolve in (lambda x, w: models.conv2d(x, w, stride, padding), library):
            y, backward = jax.vjp(convolve, x, w)
            results.append((y, *backward(error)))
        return results

    for ours, theirs in zip(*both(x, w), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=1e-4)


def test_max_pool_equals_the_librarys_and_drops_odd_edges():
    x = jax.random.normal(KEY, (2, 7, 8, 3))
    window = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    np.testing.assert_array_equal(models.max_pool(x), window)


@pytest.mark.parametrize(("norm", "axes"), [("batch", 0), ("layer", 1)])
def test_norms_give_mean_0_and_variance_1(norm, axes):
    h = jax.random.normal(KEY, (50, 30)) * 7 + 3
    out = models._norm(norm, "linear")({"scale": 1.0, "shift": 0.0}, h)
    np.testing.assert_allclose(out.mean(axes), 0, atol=1e-5)
    np.testing.assert_allclose(out.var(axes), 1, atol=1e-4)


def test_frozen_batch_norm_uses_the_statistics_of_the_examples_it_was_given():
    x = jax.random.normal(KEY, (90, 40)) * 3 + 1
    net = models.mlp((40, 16, 12, 10), norm="batch")
    params = jax.jit(net.init)(KEY)
    frozen = jax.jit(lambda params, x: models.freeze(net, params, x))(params, x)
    h = x @ params["dense1"]["w"] + params["dense1"]["b"]
    mean, variance = frozen["norm1"]["statistics"]
    np.testing.assert_allclose(mean[0], h.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(variance[0], h.var(0), rtol=1e-4)
    # all examples in one piece: the batch of all of them, as in training
    np.testing.assert_allclose(net.apply(frozen, x), net.apply(params, x), atol=1e-4)
    np.testing.assert_allclose(net.apply(frozen, x[:1]), net.apply(frozen, x)[:1], atol=1e-5)
    pieces = models.freeze(net, params, x, piece=30)
    np.testing.assert_allclose(pieces["norm1"]["statistics"].mean, mean, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(pieces["norm1"]["statistics"].variance, variance, rtol=1e-4)
    odd = models.freeze(net, params, x[:89], piece=30)["norm1"]["statistics"]  # three pieces of 29
    np.testing.assert_allclose(odd.mean[0], h[:87].mean(0), rtol=1e-4, atol=1e-4)


def test_frozen_models_judge_each_example_by_itself(case):
    model, shape = case
    params = jax.jit(model.init)(KEY)
    x = jax.random.normal(jax.random.key(1), (8, *shape))

    @jax.jit
    def both(params, x):
        frozen = models.freeze(model, params, x)
        return model.apply(frozen, x), jnp.concatenate([model.apply(frozen, x[i : i + 1]) for i in range(2)])

    together, alone = both(params, x)
    np.testing.assert_allclose(together[:2], alone, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(together, jax.jit(model.apply)(params, x), rtol=1e-3, atol=1e-3)


def test_a_model_without_batch_norm_has_nothing_to_freeze():
    params = models.lenet().init(KEY)
    assert models.freeze(models.lenet(), params, jnp.ones((2, 28, 28, 1))) is params


def test_relu_layers_start_with_the_variance_of_he_et_al():
    w = models.mlp((400, 300, 10)).init(KEY)["dense1"]["w"]
    assert w.var() == pytest.approx(2 / 400, rel=0.05)


def test_a_residual_block_adds_its_input():
    skip, plain = models.resnet(8, width=4, norm=None), models.resnet(8, skip=False, width=4, norm=None)
    params = jax.jit(skip.init)(KEY)
    for name in ("stage1_block1", "stage2_block1", "stage3_block1"):
        params[name]["conv2"] = jax.tree.map(jnp.zeros_like, params[name]["conv2"])
    x = jax.random.normal(KEY, (2, 8, 8, 1))
    assert jnp.abs(jax.jit(skip.apply)(params, x)).max() > 0
    assert jnp.abs(jax.jit(plain.apply)(params, x)).max() == 0  # the output layer's bias starts at 0


def test_the_same_arguments_give_the_same_model():
    assert models.lenet() is models.lenet()
    assert models.mlp((4, 3)) is not models.mlp((4, 2))


@pytest.mark.parametrize("name", ["mlp", "lenet", "resnet"])
def test_build_fits_a_model_to_a_data_set(name):
    mnist = data.load("mnist")
    model = models.build(name, mnist)
    assert jax.eval_shape(lambda: model.apply(model.init(KEY), mnist.x_test[:3])).shape == (3, 10)


def test_two_threads_may_draw_recurrent_weights():
    code = """
import jax
from concurrent.futures import ThreadPoolExecutor
from dlscale.lab import models
init = jax.jit(models.rnn(64, "lstm").init)
with ThreadPoolExecutor(2) as threads:
    for _ in range(40):
        list(threads.map(lambda seed: jax.block_until_ready(init(jax.random.key(seed))), range(8)))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)  # it used to hang


def test_build_passes_options_and_fits_rnn():
    signals = data.load("mnist1d")
    assert models.build("mlp", signals, hidden=(7,)) is models.mlp((40, 7, 10))
    assert models.build("rnn", signals, hidden=8) is models.rnn(hidden=8, features=1, classes=10)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: models.build("lennet", data.load("mnist")), "Did you mean 'lenet'"),
        (lambda: models.build("lenet", data.load("mnist1d")), "needs images"),
        (lambda: models.build("lenet", data.load("digits")), "at least 16×16"),
        (lambda: models.mlp((40,)), "at least inputs and classes"),
        (lambda: models.mlp((40, 10), "rellu"), "Did you mean 'relu'"),
        (lambda: models.mlp((40, 10), norm="bach"), "Did you mean 'batch'"),
        (lambda: models.resnet(9), "6 n \\+ 2"),
        (lambda: models.rnn(cell="grue"), "Did you mean 'gru'"),
        (lambda: models.mlp((40, 10)).apply(models.mlp((40, 10)).init(KEY), jnp.ones((2, 28, 28))), "not 784"),
        (lambda: models.rnn(8).apply(models.rnn(8).init(KEY), jnp.ones((2, 5, 4))), "not 4"),
    ],
)
def test_what_cannot_work_is_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call()
