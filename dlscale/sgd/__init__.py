"""The room of 01_sgd. All that it teaches stands in the notebook, but for Adam, which the reader writes."""

import jax.numpy as jnp
from jax import Array


def adam(g: Array, m: Array, s: Array, t: Array, beta: float) -> tuple[Array, Array, Array]:
    """The direction of step t = 1, 2, … for the gradient g, and the running means of gradients and squares."""
    m, s = beta * m + (1 - beta) * g, 0.999 * s + 0.001 * g**2
    return m / (1 - beta**t) / (jnp.sqrt(s / (1 - 0.999**t)) + 1e-8), m, s
