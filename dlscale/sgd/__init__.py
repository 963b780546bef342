"""Room of 01_sgd: seven optimizers, and the landscapes of two weights over which they race."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

METHODS: dict[str, Callable[..., optax.GradientTransformation]] = {  # of a learning rate
    "SGD": optax.sgd,
    "momentum": partial(optax.sgd, momentum=0.9),
    "Nesterov": partial(optax.sgd, momentum=0.9, nesterov=True),
    "Adagrad": partial(optax.adagrad, initial_accumulator_value=0.0),
    "Adadelta": optax.adadelta,
    "RMSprop": optax.rmsprop,
    "Adam": optax.adam,
}


class Landscape(NamedTuple):
    """A loss of two weights: where the race starts, a minimum, what to show, and the loss at which a method arrives."""

    loss: Callable[[Array], Array]
    start: tuple[float, float]
    minimum: tuple[float, float]
    x: tuple[float, float]
    y: tuple[float, float]
    arrived: float


def _beale(w: Array) -> Array:
    x, y = w
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


def _saddle(w: Array) -> Array:
    return w[0] ** 2 - w[1] ** 2 + w[1] ** 4 / 4


def ravine(w: Array) -> Array:
    """A valley along the first axis; across it the curvature is 80 times as large."""
    return w[0] ** 2 / 40 + 2 * w[1] ** 2


def _rotated(loss: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda w: loss(jnp.stack([w[0] + w[1], w[1] - w[0]]) / 2**0.5)


LANDSCAPES = {
    "ravine": Landscape(ravine, (-6.0, 2.5), (0, 0), (-7.0, 4.0), (-4.0, 4.0), 0.001),
    "rotated ravine": Landscape(_rotated(ravine), (-6.0, -2.5), (0, 0), (-7.0, 3.0), (-7.0, 3.0), 0.001),
    "saddle": Landscape(_saddle, (1.2, 0.01), (0, 2**0.5), (-1.6, 1.6), (-0.9, 1.9), -0.99),
    "rotated saddle": Landscape(_rotated(_saddle), (0.8414, 0.8556), (-1, 1), (-1.7, 1.5), (-0.5, 1.7), -0.99),
    "Beale's valley": Landscape(_beale, (1.0, 1.5), (3, 0.5), (-0.5, 4.0), (-2.1, 2.1), 0.01),
}


@jax.jit
def _race(landscape: Array, start: Array, rates: Array) -> tuple[Array, Array]:
    def loss(w: Array) -> Array:
        return lax.switch(landscape, [one.loss for one in LANDSCAPES.values()], w)

    def path(rate: Array) -> tuple[Array, Array]:
        optimizers = [method(rate) for method in METHODS.values()]

        def step(state: tuple, _: None) -> tuple:
            weights, memories = state
            values, gradients = jax.vmap(jax.value_and_grad(loss))(weights)
            each = zip(optimizers, gradients, memories, weights, strict=True)
            updates, memories = zip(*(optimizer.update(*given) for optimizer, *given in each), strict=True)
            return (weights + jnp.stack(updates), memories), (weights, values)

        begin = jnp.tile(start, (len(METHODS), 1)), tuple(optimizer.init(start) for optimizer in optimizers)
        return lax.scan(step, begin, length=201)[1]

    return jax.vmap(path)(rates)


def race(landscape: str, rates: np.ndarray, start: tuple[float, float] | None = None) -> dict[str, tuple]:
    """Let all methods take 200 steps: for each of them the weights, (rates, 201, 2), and the losses, (rates, 201).

    They begin at `start`, by default that of the landscape.
    """
    point = jnp.asarray(start or LANDSCAPES[landscape].start, jnp.float32)
    weights, losses = jax.device_get(_race([*LANDSCAPES].index(landscape), point, jnp.asarray(rates)))
    return {name: (weights[:, :, i], losses[:, :, i]) for i, name in enumerate(METHODS)}


def steps_to_arrive(losses: np.ndarray, arrived: float) -> np.ndarray:
    """Steps after which the losses, (…, 1 + steps), stay below `arrived`; all steps if they do not."""
    away = ~(losses <= arrived)  # NaN is away, too
    last = away.shape[-1] - 1 - np.argmax(away[..., ::-1], -1)
    return np.where(away.any(-1), np.minimum(last + 1, away.shape[-1] - 1), 0)


def best_rate(losses: np.ndarray, arrived: float) -> int:
    """The index of the learning rate, of losses (rates, 1 + steps), that arrives first; or else ends lowest."""
    return int(np.lexsort([np.nan_to_num(losses[:, -1], nan=np.inf), steps_to_arrive(losses, arrived)])[0])
