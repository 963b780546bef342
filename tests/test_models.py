import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from dlscale.lab import data, models

KEY = jax.random.key(0)
ONE_OF_EACH = {
    "mlp": (models.mlp((40, 16, 16, 10)), (40,)),
    "mlp, batch norm": (models.mlp((40, 16, 10), norm="batch"), (40,)),
    "mlp, layer norm": (models.mlp((40, 16, 10), "tanh", norm="layer"), (40,)),
    "lenet": (models.lenet((16, 20, 3)), (16, 20, 3)),
    "resnet": (models.resnet(3, shape=(10, 8, 2)), (10, 8, 2)),
    "resnet without skips": (models.resnet(3, skip=False, shape=(10, 8, 2)), (10, 8, 2)),
    "gru": (models.gru(8, features=3), (12, 3)),
}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def compiled(model):
    return jax.jit(model.init), jax.jit(model.apply)


@pytest.fixture(params=ONE_OF_EACH)
def case(request):
    """A model, its parameters, and six examples."""
    model, shape = ONE_OF_EACH[request.param]
    return model, compiled(model)[0](KEY), normal(1, 6, *shape)


def test_logits_are_finite_and_their_gradient_reaches_every_parameter(case):
    model, params, x = case
    assert jax.eval_shape(model.apply, params, x).shape == (6, 10)
    gradient = jax.jit(jax.grad(lambda p: (jax.nn.log_softmax(model.apply(p, x)) * np.arange(10)).sum()))(params)
    for (path, value), size in zip(
        jax.tree.leaves_with_path(gradient), map(np.shape, jax.tree.leaves(params)), strict=True
    ):
        value = np.asarray(value)
        assert value.shape == size
        assert np.isfinite(value).all(), path
        # a bias before batch norm is subtracted again: no gradient is right there
        assert np.abs(value).max() > 0 or path[-1].key == "b", path


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_computes_in_the_type_of_parameters_and_inputs(case, dtype):
    model, params, x = case
    params = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype), params)
    assert jax.eval_shape(model.apply, params, jax.ShapeDtypeStruct(x.shape, dtype)).dtype == dtype


def test_the_layers_one_by_one_with_their_own_parameters_are_the_model(case):
    model, params, x = case
    own = model.split(params)
    assert set(params) <= set(model.layers)
    assert sum(len(jax.tree.leaves(part)) for part in own) == len(jax.tree.leaves(params))

    @jax.jit
    def in_a_loop(own, x):
        for layer, part in zip(model.layers.values(), own, strict=True):
            x = layer.activation(layer.compute(part, x))
        return x

    np.testing.assert_array_equal(in_a_loop(own, x), compiled(model)[1](params, x))


def test_a_block_of_a_resnet_adds_to_its_input_and_without_skips_it_does_not():
    with_skips, plain = (models.resnet(4, skip) for skip in (True, False))
    own, x = {"w": normal(0, 3, 3, 8, 8), "b": normal(1, 8)}, normal(2, 5, 7, 7, 8)
    new = plain.layers["block3"](own, x)
    np.testing.assert_allclose(new, models.conv2d(np.maximum(x, 0), own["w"]) + own["b"], atol=1e-5)
    np.testing.assert_allclose(with_skips.layers["block3"](own, x), x + new / 2, atol=1e-5)
    one, other = (compiled(model)[0](KEY) for model in (with_skips, plain))
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))
    assert models.build("resnet", data.load("mnist"), depth=4) is with_skips


def test_a_batch_is_its_examples_unless_batch_norm_mixes_them(case):
    model, params, x = case
    _, apply = compiled(model)
    one_by_one = np.concatenate([apply(params, x[i : i + 1]) for i in range(6)])
    mixed = model is ONE_OF_EACH["mlp, batch norm"][0]
    assert np.allclose(apply(params, x), one_by_one, rtol=1e-4, atol=1e-4) != mixed


@pytest.mark.parametrize(
    ("height", "width", "k", "channels", "out", "padding"),
    [
        (5, 5, 5, 3, 1, "VALID"),  # one output
        (7, 14, 3, 2, 6, "SAME"),  # tiles of 14 columns: one
        (6, 13, 2, 1, 16, "SAME"),  # of 4 columns, the last one beyond the image; more padding behind than before
        (6, 9, 5, 2, 16, "SAME"),
        (8, 12, 3, 3, 100, "VALID"),  # of one column
        (5, 7, 1, 3, 6, "VALID"),
    ],
)
def test_conv2d_and_its_gradient_equal_the_librarys(height, width, k, channels, out, padding):
    x, w = normal(0, 2, height, width, channels), normal(1, k, k, channels, out)

    def library(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    error = normal(2, *jax.eval_shape(library, x, w).shape)

    @jax.jit
    def both(x, w):
        results = []
        for convolve in (lambda x, w: models.conv2d(x, w, padding), library):
            y, backward = jax.vjp(convolve, x, w)
            results.append((y, *backward(error)))
        return results

    for ours, theirs in zip(*both(x, w), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-3, rtol=1e-4)


def test_max_pool_equals_the_librarys_and_drops_odd_edges():
    x = normal(0, 2, 7, 8, 3)
    window = lax.reduce_window(x, -np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    np.testing.assert_array_equal(jax.jit(models.max_pool)(x), window)


@pytest.mark.parametrize(("norm", "axes"), [("batch", 0), ("layer", 1)])
def test_norms_give_mean_0_and_variance_1(norm, axes):
    h = normal(0, 50, 30) * 7 + 3
    out = np.asarray(jax.jit(models._norm(norm, "linear"))({"scale": 1.0, "shift": 0.0}, h))
    np.testing.assert_allclose(out.mean(axes), 0, atol=1e-5)
    np.testing.assert_allclose(out.var(axes), 1, atol=1e-4)


def test_frozen_batch_norm_uses_the_statistics_of_the_examples_it_was_given():
    x = normal(0, 90, 40) * 3 + 1
    net = models.mlp((40, 16, 12, 10), norm="batch")
    init, apply = compiled(net)
    freeze = jax.jit(lambda params, x, piece: models.freeze(net, params, x, piece), static_argnums=2)
    params = init(KEY)
    frozen = freeze(params, x, 500)
    h = x @ np.asarray(params["dense1"]["w"])
    mean, variance = frozen["norm1"]["statistics"]
    np.testing.assert_allclose(mean[0], h.mean(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(variance[0], h.var(0), rtol=1e-4)
    # all examples in one piece: the batch of all of them, as in training
    together = apply(frozen, x)
    np.testing.assert_allclose(together, apply(params, x), atol=1e-4)
    np.testing.assert_allclose(apply(frozen, x[:1]), together[:1], atol=1e-5)
    odd = freeze(params, x[:89], 30)["norm1"]["statistics"]  # three pieces of 29
    np.testing.assert_allclose(odd.mean[0], h[:87].mean(0), rtol=1e-4, atol=1e-4)


def test_relu_layers_start_with_the_variance_of_he_et_al():
    w = np.asarray(jax.jit(models.mlp((400, 300, 10)).init)(KEY)["dense1"]["w"])
    assert w.var() == pytest.approx(2 / 400, rel=0.05)


def test_two_threads_may_draw_recurrent_weights():
    code = """
import jax
from concurrent.futures import ThreadPoolExecutor
from dlscale.lab import models
init = jax.jit(models.gru(64).init)
with ThreadPoolExecutor(2) as threads:
    for _ in range(10):
        list(threads.map(lambda seed: jax.block_until_ready(init(jax.random.key(seed))), range(8)))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)  # it used to hang


def test_build_passes_options_and_fits_gru():
    signals = data.load("mnist1d")
    assert models.build("mlp", signals, hidden=(7,)) is models.mlp((40, 7, 10))
    assert models.build("gru", signals, hidden=8) is models.gru(hidden=8, features=1, classes=10)


def applied(model, *shape):
    return jax.eval_shape(lambda: model.apply(model.init(KEY), jnp.ones(shape)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: models.build("lennet", data.load("mnist")), "Did you mean 'lenet'"),
        (lambda: models.build("lenet", data.load("digits")), "at least 16×16"),
        (lambda: models.mlp((40,)), "at least inputs and classes"),
        (lambda: applied(models.mlp((40, 10)), 2, 28, 28), "not 784"),
        (lambda: applied(models.gru(8), 2, 5, 4), "not 4"),
    ],
)
def test_what_cannot_work_is_refused_in_words(call, words):
    with pytest.raises(ValueError, match=words):
        call()
