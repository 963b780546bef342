"""The ground that training walks on: slices and planes through a loss, and the spectrum of its Hessian.

All functions take a scalar `loss(params, *data)` of any pytree of float arrays, with the arrays `data` handed through:
as inputs of the compiled program they cost nothing to compile, as constants inside `loss` they may cost seconds. The
same loss with other parameters or data of the same shapes is not compiled again. The Hessian is never formed; it is
known by its products with vectors (Pearlmutter 1994), each at the price of a few gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from numpy.typing import ArrayLike

from dlscale.lab import checks, devices

Tree = Any  # a pytree of float arrays: parameters, or a direction in their space
Loss = Callable[..., Array]

CHUNK = 10  # Lanczos steps between two looks at the convergence


# Directions


def random_direction(key: Array, params: Tree, normalize: str | None = "filter") -> Tree:
    """A Gaussian direction with the structure of `params`, scaled as in Li et al. 2018 (arXiv:1712.09913, §4).

    "filter" gives each filter of the direction the norm of that filter of `params`: a filter is what makes one output,
    the last axis of w (…, in, out). "layer" does so for whole arrays. In both, what has fewer than two axes (biases,
    scales and shifts of a normalisation) gets the direction 0, as Li et al. do. None leaves all as drawn, norm √n.
    """
    if normalize is not None:
        checks.known("normalize", normalize, ("filter", "layer"))
    leaves, structure = jax.tree.flatten(_float_arrays(params))

    def norm(w: Array) -> Array:
        return jnp.linalg.norm(w.reshape(-1, w.shape[-1]) if normalize == "filter" else w.ravel(), axis=0)

    def draw(key: Array, w: Array) -> Array:
        if normalize is not None and w.ndim < 2:
            return jnp.zeros_like(w)
        d = jax.random.normal(key, w.shape, w.dtype)
        return d if normalize is None else d * norm(w) / norm(d)

    return structure.unflatten(map(draw, jax.random.split(key, len(leaves)), leaves))


def move(params: Tree, *steps: tuple[float | Array, Tree]) -> Tree:
    """params + Σ distance · direction over the pairs (distance, direction)."""
    for distance, direction in steps:
        params = jax.tree.map(lambda w, d, a=distance: w + a * d, params, direction)
    return params


class PCAPlane(NamedTuple):
    """The plane that shows most of a path. A point (a, b) in it is origin + a · x + b · y."""

    origin: Tree  # the last point of the path
    x: Tree  # unit vector
    y: Tree  # unit vector, at a right angle to x
    path: np.ndarray  # (points, 2), the path's points in it; the last is (0, 0)
    explained: np.ndarray  # (2,) fractions of the path's variance along x and y


def pca_plane(trajectory: Tree) -> PCAPlane:
    """The plane of the two principal components of a path of parameters (Li et al. 2018, §7).

    `trajectory` has the structure of the parameters, each array with the path's points along a new first axis.
    Raises ValueError for fewer than three points, for numbers that are not finite and for a path along a line.
    """
    arrays = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(_float_arrays(trajectory))]
    if len({len(array) if array.ndim else 0 for array in arrays}) != 1 or len(arrays[0]) < 3:
        shapes = ", ".join(str(array.shape) for array in arrays[:4])
        raise ValueError(f"A plane needs three points or more, along the first axis of every array; given: {shapes}.")
    points = np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)
    if not np.isfinite(points).all():
        raise ValueError("The trajectory is not finite. Leave out what comes after training diverged.")
    centred = points - points.mean(0)
    variances, vectors = np.linalg.eigh(centred @ centred.T)  # points × points: there are fewer points than parameters
    variances, vectors = variances[:-3:-1], vectors[:, :-3:-1]
    if variances[1] <= 1e-12 * variances[0]:
        raise ValueError("The trajectory lies on a line (or does not move): it spans no plane. Look at it with `line`.")
    directions = vectors.T @ centred / np.sqrt(variances)[:, None]
    path = (points - points[-1]) @ directions.T
    signs = np.where(path[0] < 0, -1.0, 1.0)  # eigenvectors have no sign of their own: the path starts at the top right
    last = jax.tree.map(lambda leaf: jnp.asarray(leaf[-1]), trajectory)
    _, unravel = ravel_pytree(last)
    x, y = (unravel(jnp.asarray(d, jnp.float32)) for d in directions * signs[:, None])
    return PCAPlane(last, x, y, path * signs, variances / (centred**2).sum())


# Slices


@dataclass(frozen=True)
class Batched:
    """A loss that is a mean over examples, taken batch by batch: the same number, in the memory of one batch.

    A large batch of a convolutional network does not fit into a processor's caches; in batches its slices are faster.
    Goes wherever a loss goes. `loss(params, *data)` is the mean over the first axis of every array of data, and has to
    serve any number of examples: the last batch may be smaller. Raises ValueError for a batch size below 1.
    """

    loss: Loss
    batch_size: int

    def __post_init__(self) -> None:
        checks.whole("batch_size", self.batch_size)

    def __call__(self, params: Tree, *data: Array) -> Array:
        count = len(data[0])
        whole = count - count % self.batch_size
        total = jnp.zeros(())
        if whole:
            batches = [array[:whole].reshape(-1, self.batch_size, *array.shape[1:]) for array in data]
            total = lax.map(lambda batch: self.loss(params, *batch), batches).sum(0) * self.batch_size
        if whole < count:
            total += self.loss(params, *(array[whole:] for array in data)) * (count - whole)
        return total / count


def line(loss: Loss, params: Tree, direction: Tree, distances: ArrayLike, data: Sequence[Any] = ()) -> np.ndarray:
    """loss(params + a · direction) for each a of `distances`: an array of their length.

    Raises ValueError for a direction of another structure, a loss that is not a scalar and one that is NaN at params.
    """
    return _slice(loss, params, [direction], np.reshape(distances, (-1, 1)), data)


def plane(
    loss: Loss, params: Tree, x_direction: Tree, y_direction: Tree, x: ArrayLike, y: ArrayLike, data: Sequence[Any] = ()
) -> np.ndarray:
    """loss(params + a · x_direction + b · y_direction) as an array (len(y), len(x)), as contour plots want it.

    Raises ValueError as `line` does, and for directions that are parallel or zero.
    """
    both = [x_direction, y_direction]
    for direction in both:
        _same_structure(params, direction)
    u, v = (np.asarray(ravel_pytree(direction)[0], np.float64) for direction in both)
    if not (size := np.linalg.norm(u) * np.linalg.norm(v)) > 0:
        raise ValueError("A direction is zero: there is no plane. Draw another one with `random_direction`.")
    if abs(cosine := u @ v / size) > 1 - 1e-6:
        raise ValueError(f"The directions are parallel (cosine {cosine:.6f}): there is no plane. Use another key.")
    points = np.stack(np.meshgrid(x, y), axis=-1)
    return _slice(loss, params, both, points.reshape(-1, 2), data).reshape(points.shape[:2])


def _slice(loss: Loss, params: Tree, directions: list[Tree], points: np.ndarray, data: Sequence[Any]) -> np.ndarray:
    """The loss at (points, len(directions)) coordinates; the points are shared out among the cores."""
    for direction in directions:
        _same_structure(params, direction)
    _check_scalar(loss, params, data)
    points = np.concatenate([np.zeros((1, len(directions))), points]).astype(np.float32)  # params themselves come first
    workers = min(devices.cores(), len(points))
    padded = np.resize(points, (-(-len(points) // workers) * workers, len(directions)))
    with ThreadPoolExecutor(workers) as pool:  # a small network keeps one core busy; side by side they use all
        parts = pool.map(
            lambda part: jax.device_get(_losses(loss, params, directions, part, tuple(data))),
            np.split(padded, workers),
        )
        losses = np.concatenate(list(parts))[: len(points)]
    _finite(losses[:1])
    return losses[1:]


@functools.partial(jax.jit, static_argnums=0)
def _losses(loss: Loss, params: Tree, directions: list[Tree], points: Array, data: tuple[Any, ...]) -> Array:
    return lax.map(lambda point: loss(move(params, *zip(point, directions, strict=True)), *data), points)


# The Hessian


def hessian_product(loss: Loss, params: Tree, vector: Tree, data: Sequence[Any] = ()) -> Tree:
    """The Hessian of the loss at `params` times `vector`: the derivative of the gradient in that direction."""
    _same_structure(params, vector)
    return jax.jvp(lambda p: jax.grad(loss)(p, *data), (params,), (vector,))[1]


def hessian_eigenvalues(
    loss: Loss, params: Tree, k: int, key: Array, data: Sequence[Any] = (), tolerance: float = 1e-3
) -> Array:
    """The k largest eigenvalues of the loss's Hessian, (k,), in descending order, by Lanczos' method (Lanczos 1950).

    It starts at a random vector and ends when the residuals ‖H v − λ v‖ of all k are below `tolerance` times the
    largest |λ| found (the error of λ is then far smaller, of second order), at the earliest after 10 k products, so
    that one to which the start is nearly orthogonal is not overlooked, at the latest after max(100, 20 k). An
    eigenvalue that occurs several times may be found once only.
    Raises ValueError for k above the number of parameters and for a loss that is not a finite number. May be called
    inside `jax.jit` and `jax.lax.map`; it then gives NaN for a loss that is not finite.
    """
    size = _size(params)
    checks.whole("k", k, high=size, why=f"There are {size} parameters, hence as many eigenvalues.")
    _check_scalar(loss, params, data)
    return _finite(_eigenvalues(loss, params, int(k), key, tuple(data), tolerance))


@functools.partial(jax.jit, static_argnums=(0, 2))
def _eigenvalues(loss: Loss, params: Tree, k: int, key: Array, data: tuple[Any, ...], tolerance: float) -> Array:
    value, product, size = _linearize(loss, params, data)
    most = min(size, max(100, 20 * k))

    def unfinished(loop: tuple[_Lanczos, Array]) -> Array:
        state, converged = loop
        return (state.count < most) & ~converged & jnp.isfinite(value)

    def extend(loop: tuple[_Lanczos, Array]) -> tuple[_Lanczos, Array]:
        state = _extend(product, loop[0], jnp.minimum(CHUNK, most - loop[0].count))
        values, vectors = _ritz(state)
        residuals = jnp.abs(state.betas[state.count - 1] * vectors[state.count - 1, -k:])
        enough = state.count >= min(most, CHUNK * k)
        return state, enough & (residuals <= tolerance * jnp.abs(values[-k:]).max()).all()

    state, _ = lax.while_loop(unfinished, extend, (_start(jax.random.normal, key, size, most), False))
    return jnp.where(jnp.isfinite(value), _ritz(state)[0][-k:][::-1], jnp.nan)


class Spectrum(NamedTuple):
    """How the Hessian's eigenvalues are distributed, as a quadrature for each random probe vector."""

    nodes: Array  # (probes, iterations), estimates of eigenvalues
    weights: Array  # (probes, iterations), the fraction of all eigenvalues near each; each probe's sum is 1

    def density(self, at: ArrayLike, width: float) -> np.ndarray:
        """The density of eigenvalues at the points `at`, smoothed by a Gaussian of standard deviation `width`."""
        at, nodes = np.asarray(at), np.ravel(self.nodes)
        bells = np.exp(-(((at[:, None] - nodes) / width) ** 2) / 2) / (width * np.sqrt(2 * np.pi))
        return bells @ np.ravel(self.weights) / len(self.weights)


def spectral_density(
    loss: Loss, params: Tree, key: Array, data: Sequence[Any] = (), probes: int = 5, iterations: int = 60
) -> Spectrum:
    """The density of the Hessian's eigenvalues by stochastic Lanczos quadrature (Ghorbani et al. 2019,
    arXiv:1901.10159).

    Costs probes × iterations products. The extremes of the spectrum are sharp; within it, structure finer than its
    range over `iterations` is lost. Raises ValueError for a loss that is not a finite number; may be called inside
    `jax.jit`.
    """
    checks.whole("probes", probes)
    checks.whole("iterations", iterations)
    _check_scalar(loss, params, data)
    iterations = min(int(iterations), _size(params))
    return Spectrum(*map(_finite, _quadrature(loss, params, key, tuple(data), int(probes), iterations)))


@functools.partial(jax.jit, static_argnums=(0, 4, 5))
def _quadrature(
    loss: Loss, params: Tree, key: Array, data: tuple[Any, ...], probes: int, iterations: int
) -> tuple[Array, Array]:
    value, product, size = _linearize(loss, params, data)

    def probe(key: Array) -> tuple[Array, Array]:
        nodes, vectors = _ritz(_extend(product, _start(jax.random.rademacher, key, size, iterations), iterations))
        return jnp.where(jnp.isfinite(value), nodes, jnp.nan), vectors[0] ** 2

    return lax.map(probe, jax.random.split(key, probes))


def hessian_trace(loss: Loss, params: Tree, key: Array, data: Sequence[Any] = (), probes: int = 30) -> Array:
    """Independent unbiased estimates of the Hessian's trace, (probes,): zᵀ H z for random signs z (Hutchinson 1989).

    Their mean is the estimate, and their spread says how good it is. Raises ValueError for a loss that is not a finite
    number; may be called inside `jax.jit`.
    """
    checks.whole("probes", probes)
    _check_scalar(loss, params, data)
    return _finite(_trace(loss, params, key, tuple(data), int(probes)))


@functools.partial(jax.jit, static_argnums=(0, 4))
def _trace(loss: Loss, params: Tree, key: Array, data: tuple[Any, ...], probes: int) -> Array:
    value, product, size = _linearize(loss, params, data)

    def probe(key: Array) -> Array:
        z = jax.random.rademacher(key, (size,), jnp.float32)
        return z @ product(z)

    return jnp.where(jnp.isfinite(value), lax.map(probe, jax.random.split(key, probes)), jnp.nan)


class _Lanczos(NamedTuple):
    """A basis of a Krylov space, and the Hessian in it: tridiagonal, `alphas` on the diagonal, `betas` beside it."""

    key: Array
    basis: Array  # (most, rounded up to whole chunks; size), orthonormal rows, 0 from `count` on
    alphas: Array  # (most,)
    betas: Array  # (most,)
    vector: Array  # (size,), the next row
    count: Array  # products so far


def _start(draw: Callable[..., Array], key: Array, size: int, most: int) -> _Lanczos:
    key, key_vector = jax.random.split(key)
    vector = draw(key_vector, (size,)).astype(jnp.float32)
    zeros = jnp.zeros(most)
    basis = jnp.zeros((-(-most // CHUNK) * CHUNK, size))
    return _Lanczos(key, basis, zeros, zeros, vector / jnp.linalg.norm(vector), jnp.int32(0))


def _extend(product: Callable[[Array], Array], state: _Lanczos, count: int | Array) -> _Lanczos:
    """Add `count` vectors to the basis. Rounding would undo their right angles: each is orthogonalised anew, twice."""

    def orthogonal(vector: Array, basis: Array, rows: Array) -> Array:
        def chunk(number: Array, vector: Array) -> Array:
            part = lax.dynamic_slice_in_dim(basis, number * CHUNK, CHUNK)
            return vector - (part @ vector) @ part

        chunks = (rows - 1) // CHUNK + 1  # those that hold rows already: the others are many, and zero
        for _ in range(2):
            vector = lax.fori_loop(0, chunks, chunk, vector)
        return vector

    def step(_: Array, state: _Lanczos) -> _Lanczos:
        i = state.count
        basis = state.basis.at[i].set(state.vector)
        image = product(state.vector)
        rest = orthogonal(image, basis, i + 1)
        beta = jnp.linalg.norm(rest)
        # nothing is left in a space that the Hessian maps into itself: go on from a new random vector
        ended = beta <= 1e-6 * jnp.maximum(jnp.linalg.norm(image), jnp.abs(state.alphas).max())
        new_key = jax.random.fold_in(state.key, i)
        rest = lax.cond(ended, lambda: orthogonal(jax.random.normal(new_key, rest.shape), basis, i + 1), lambda: rest)
        return state._replace(
            basis=basis,
            alphas=state.alphas.at[i].set(state.vector @ image),
            betas=state.betas.at[i].set(jnp.where(ended, 0, beta)),
            vector=rest / jnp.maximum(jnp.linalg.norm(rest), 1e-30),
            count=i + 1,
        )

    return lax.fori_loop(0, count, step, state)


def _ritz(state: _Lanczos) -> tuple[Array, Array]:
    """Eigenvalues, ascending, and eigenvectors of the Hessian in the basis; rows not reached yet sort to the bottom."""
    reached = jnp.arange(len(state.alphas)) < state.count
    below = -4 * (jnp.abs(state.alphas).max() + state.betas.max()) - 1
    beside = jnp.where(reached[1:], state.betas[:-1], 0)
    return jnp.linalg.eigh(
        jnp.diag(jnp.where(reached, state.alphas, below)) + jnp.diag(beside, 1) + jnp.diag(beside, -1)
    )


def _linearize(loss: Loss, params: Tree, data: tuple[Any, ...]) -> tuple[Array, Callable[[Array], Array], int]:
    """The loss, the product of its Hessian with a flat vector, and the number of parameters.

    What the product needs of the forward and backward pass is computed once for all vectors.
    """
    flat, unravel = ravel_pytree(params)

    def gradient(flat: Array) -> tuple[Array, Array]:
        value, gradient = jax.value_and_grad(lambda flat: loss(unravel(flat), *data))(flat)
        return gradient, value

    _, product, value = jax.linearize(gradient, flat, has_aux=True)
    return value, product, flat.size


# What cannot work


def _size(params: Tree) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(_float_arrays(params)))


def _float_arrays(params: Tree) -> Tree:
    leaves = jax.tree.leaves(params)
    if not leaves or not all(hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise ValueError("The parameters must be a pytree of arrays of floats, such as `train.fit(…).params`.")
    return params


def _same_structure(params: Tree, direction: Tree) -> None:
    wanted, given = (
        {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (_float_arrays(params), direction)
    )
    if wanted != given:
        name = next(name for name in (*wanted, *given) if wanted.get(name) != given.get(name))
        raise ValueError(
            f"The direction has another structure than the parameters: at {name or 'the top'} it has "
            f"{given.get(name, 'nothing')}, the parameters {wanted.get(name, 'nothing')}. "
            "Draw it for these parameters with `random_direction`."
        )


def _check_scalar(loss: Loss, params: Tree, data: Sequence[Any]) -> None:
    result = jax.eval_shape(loss, params, *data)
    if getattr(result, "shape", None) != ():
        what = f"an array of shape {result.shape}: take its mean" if hasattr(result, "shape") else "several values"
        raise ValueError(f"The loss must be one number, but it returns {what}.")


def _finite(result: Array) -> Array:
    """Raise where it can be known: not while JAX traces."""
    if not isinstance(result, jax.core.Tracer) and not np.isfinite(result).all():
        raise ValueError(
            "The loss is not finite at these parameters (or its derivatives are not): did training diverge?"
        )
    return result
