"""How large a batch pays: the noise in a gradient, measured, and the critical batch, fitted.

A batch of B examples drawn at random gives a gradient with mean G, that of all examples, and covariance Σ / B, where Σ
is that of a single example's. Its squared norm is on average |G|² + tr Σ / B: signal and noise are equal at the batch
tr Σ / |G|², the simple noise scale of McCandlish et al. 2018 (arXiv:1812.06162, §2.2).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar

from dlscale.lab import checks
from dlscale.lab.intervals import Interval, interval
from dlscale.loss_landscapes import Loss, Tree, hessian_product


class NoiseScale(NamedTuple):
    """What a gradient is made of; `scale` is the batch at which its two parts are equal."""

    signal: np.ndarray | float  # |G|², or Gᵀ H G. An estimate may be negative: then the noise drowned it
    noise: np.ndarray | float  # tr Σ, or tr(H Σ), of a single example

    @property
    def scale(self) -> np.ndarray | float:
        """The noise scale, in examples."""
        return self.noise / self.signal


def gradient_noise_scale(batch_sizes: ArrayLike, squared_norms: ArrayLike) -> NoiseScale:
    """|G|² and tr Σ from mean squared gradient norms (…, sizes) at two or more batch sizes (sizes,).

    The least-squares line through |G_B|² = |G|² + tr Σ / B; with two sizes it is that of McCandlish et al. 2018
    (appendix A.1). Signal and noise are unbiased if the batches are drawn with replacement; their quotient is not, so
    average both before dividing. Raises ValueError for fewer than two different sizes, sizes below 1 and numbers that
    are not finite.
    """
    sizes, norms = np.asarray(batch_sizes, float), np.asarray(squared_norms, float)
    _check_sizes(sizes, 2, "One size cannot tell signal from noise.")
    if norms.shape[-1:] != sizes.shape or not np.isfinite(norms).all():
        raise ValueError(f"squared_norms must be finite, (…, {len(sizes)}) for the batch sizes, not {norms.shape}.")
    inverse = 1 / sizes - np.mean(1 / sizes)
    noise = norms @ inverse / (inverse @ inverse)
    return NoiseScale(norms.mean(-1) - noise * np.mean(1 / sizes), noise)


def exact_noise_scale(loss: Loss, params: Tree, data: Sequence[Any]) -> NoiseScale:
    """|G|² and tr Σ from the gradient of every single example: for small networks.

    `loss(params, *data)` is the mean over the examples, the first axis of each array of `data`. The examples are the
    whole population: tr Σ is the mean of |g - G|² over them. At most 250 gradients are held at a time. Raises
    ValueError for a loss that is not finite.
    """
    return _measured(_exact(loss, params, tuple(data)))


def hessian_noise_scale(loss: Loss, params: Tree, data: Sequence[Any], key: Array, probes: int = 30) -> NoiseScale:
    """Gᵀ H G and an estimate of tr(H Σ), whose quotient is the noise scale B_noise (McCandlish et al. 2018, §2.2).

    It weighs the noise by the curvature H that it meets. tr(H Σ) is the mean of vᵀ H v over `probes` sums v of the
    centred gradients of all examples with random signs, so that no example's gradient is formed by itself.
    `loss` and `data` are those of `exact_noise_scale`, and so is what is raised.
    """
    return _measured(_hessian(loss, params, tuple(data), key, checks.whole("probes", probes)))


@functools.partial(jax.jit, static_argnums=0)
def _exact(loss: Loss, params: Tree, data: tuple[Any, ...]) -> tuple[Array, Array]:
    def squared_norm(examples: Sequence[Any]) -> Array:
        gradient = jax.grad(loss)(params, *examples)
        return _dot(gradient, gradient)

    signal, single = squared_norm(data), lambda example: squared_norm([part[None] for part in example])
    return signal, jax.lax.map(single, data, batch_size=250).mean() - signal


@functools.partial(jax.jit, static_argnums=(0, 4))
def _hessian(loss: Loss, params: Tree, data: tuple[Any, ...], key: Array, probes: int) -> tuple[Array, Array]:
    def each(params: Tree) -> Array:
        return jax.vmap(lambda *example: loss(params, *(part[None] for part in example)))(*data)

    def curvature(vector: Tree) -> Array:
        return _dot(vector, hessian_product(loss, params, vector, data))

    losses, pull_back = jax.vjp(each, params)

    def probe(key: Array) -> Array:
        signs = jax.random.rademacher(key, losses.shape, losses.dtype)
        return curvature(*pull_back((signs - signs.mean()) / jnp.sqrt(losses.size)))  # of Σ sᵢ (gᵢ - G) / √n

    signal = curvature(*pull_back(jnp.full(losses.size, 1 / losses.size)))
    return signal, jax.lax.map(probe, jax.random.split(key, probes)).mean()


class CriticalBatch(NamedTuple):
    """The law S = S_min (1 + B_c / B) fitted to each seed; the intervals are those of the geometric mean."""

    batch: Interval  # B_c, in examples
    fewest_steps: Interval  # S_min
    batches: np.ndarray  # (seeds,) B_c of each seed

    def steps(self, batch_size: ArrayLike) -> np.ndarray:
        """Steps that the law asks for at a batch size. Times the batch size: the examples."""
        return self.fewest_steps.mean * (1 + self.batch.mean / np.asarray(batch_size, float))


def critical_batch(batch_sizes: ArrayLike, steps: ArrayLike) -> CriticalBatch:
    """The critical batch B_c from the steps to one target (seeds, sizes), by least squares in log steps, seed by seed.

    McCandlish et al. 2018, §2.3: at B_c a run takes twice the fewest steps possible, and twice the fewest
    examples. A B_c that the sizes do not reach cannot be found: the search ends at a thousandth of the smallest size
    and at a thousand times the largest. Raises ValueError for fewer than three different sizes or two seeds, and for
    sizes or steps that are not positive and finite.
    """
    sizes, steps = np.asarray(batch_sizes, float), np.asarray(steps, float)
    _check_sizes(sizes, 3, "Two points fit any such law.")
    if steps.shape[1:] != sizes.shape or not (np.isfinite(steps) & (steps > 0)).all():
        advice = "A run that never reached the target has none: give it more, or choose a nearer target."
        raise ValueError(f"steps must be positive and finite, (seeds, {len(sizes)}), not {steps.shape}. {advice}")

    def rest(log_batch: float, log_steps: np.ndarray) -> np.ndarray:
        return log_steps - np.log1p(np.exp(log_batch) / sizes)

    search = {"bounds": np.log([sizes.min() / 1e3, sizes.max() * 1e3]), "options": {"xatol": 1e-6}}
    fits = [minimize_scalar(lambda b, s=s: rest(b, s).var(), **search).x for s in np.log(steps)]
    fewest = [rest(b, s).mean() for b, s in zip(fits, np.log(steps), strict=True)]
    batch, lowest = (Interval(*map(float, np.exp(interval(np.array(logs))))) for logs in (fits, fewest))
    return CriticalBatch(batch, lowest, np.exp(fits))


def _check_sizes(sizes: np.ndarray, least: int, why: str) -> None:
    if sizes.ndim != 1 or not (np.isfinite(sizes) & (sizes >= 1)).all():
        raise ValueError(f"batch_sizes must be a list of finite numbers of at least 1, not {sizes.tolist()}.")
    if (different := len(np.unique(sizes))) < least:
        raise ValueError(f"At least {least} different batch sizes are needed, not {different}. {why}")


def _dot(a: Tree, b: Tree) -> Array:
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)))


def _measured(parts: tuple[Array, Array]) -> NoiseScale:
    if not np.isfinite(parts).all():
        raise ValueError("The gradients are not finite. Measure before training diverged, and look at the data.")
    return NoiseScale(*map(float, parts))
