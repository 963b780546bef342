"""How large a batch pays: the noise in a gradient, measured, and the critical batch, fitted.

A batch of B examples drawn at random gives a gradient with mean G, that of all examples, and covariance Σ / B, where Σ
is that of a single example's. Its squared norm is on average |G|² + tr Σ / B: signal and noise are equal at the batch
tr Σ / |G|², the simple noise scale of McCandlish et al. 2018 (arXiv:1812.06162, §2.2).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar

from dlscale.lab.intervals import Interval, interval


def exact_noise_scale(loss: Callable[..., Array], params: Any, data: Sequence[Array]) -> tuple[Array, Array]:
    """|G|² and tr Σ from the gradient of every single example: for small networks. May be traced.

    `loss(params, *data)` is the mean over the examples, the first axis of each array of `data`. The examples are the
    whole population: tr Σ is the mean of |g - G|² over them. At most 250 gradients are held at a time.
    """

    def squared_norm(examples: Sequence[Array]) -> Array:
        return sum(jnp.vdot(part, part) for part in jax.tree.leaves(jax.grad(loss)(params, *examples)))

    signal, single = squared_norm(data), lambda example: squared_norm([part[None] for part in example])
    return signal, jax.lax.map(single, tuple(data), batch_size=250).mean() - signal


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
    and at a thousand times the largest. Raises ValueError for fewer than three sizes or two
    seeds, and for steps that are not positive and finite.
    """
    sizes, steps = np.asarray(batch_sizes, float), np.asarray(steps, float)
    if len(np.unique(sizes)) < 3:
        raise ValueError(f"At least 3 different batch sizes are needed, not {sizes.tolist()}: two points fit any law.")
    if not (np.isfinite(steps) & (steps > 0)).all():
        raise ValueError("steps must be positive and finite. A run that never arrived has none: take a nearer target.")

    def rest(log_batch: float, log_steps: np.ndarray) -> np.ndarray:
        return log_steps - np.log1p(np.exp(log_batch) / sizes)

    search = {"bounds": np.log([sizes.min() / 1e3, sizes.max() * 1e3]), "options": {"xatol": 1e-6}}
    fits = [minimize_scalar(lambda b, s=s: rest(b, s).var(), **search).x for s in np.log(steps)]
    fewest = [rest(b, s).mean() for b, s in zip(fits, np.log(steps), strict=True)]
    batch, lowest = (Interval(*map(float, np.exp(interval(np.array(logs))))) for logs in (fits, fewest))
    return CriticalBatch(batch, lowest, np.exp(fits))


def best_rates(rates: ArrayLike, steps: ArrayLike) -> np.ndarray:
    """The rate that needs the fewest steps, (seeds, batch sizes), from rates (batch sizes, rates) and steps.

    `steps` (batch sizes, rates, seeds) are those to the target. The rates of a batch size are a geometric grid; between
    them the best one is the lowest point of a parabola through the best of the grid and its neighbours, in logarithms.
    """
    rates, steps = np.log2(rates), np.log2(np.moveaxis(steps, -1, 0))
    middle = steps.argmin(-1).clip(1, rates.shape[1] - 2)[..., None]
    left, here, right = (np.take_along_axis(steps, middle + place, -1)[..., 0] for place in (-1, 0, 1))
    bend = left - 2 * here + right
    shift = np.where(bend > 0, (left - right) / np.where(bend > 0, 2 * bend, 1), 0).clip(-1, 1)
    spacing = rates[:, 1] - rates[:, 0]
    return 2 ** (np.take_along_axis(rates[None], middle, -1)[..., 0] + shift * spacing)
