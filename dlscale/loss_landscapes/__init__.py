"""The ground that training walks on: slices and planes through a loss, and the spectrum of its Hessian.

All functions take a scalar `loss(params, *data)` of any pytree of float arrays, with the arrays `data` handed through:
as inputs of the compiled program they cost nothing to compile, as constants inside `loss` they may cost seconds. The
same loss with other parameters or data of the same shapes is not compiled again. The Hessian is never formed; it is
known by its products with vectors (Pearlmutter 1994), each at the price of a few gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from numpy.typing import ArrayLike
from scipy.linalg import eigh_tridiagonal

from dlscale.lab import checks, devices

Tree = Any  # a pytree of float arrays: parameters, or a direction in their space
Loss = Callable[..., Array]


# Directions


def random_direction(key: Array, params: Tree, normalize: str | None = "filter") -> Tree:
    """A Gaussian direction with the structure of `params`, scaled as in Li et al. 2018 (arXiv:1712.09913, §4).

    "filter" gives each filter of the direction the norm of that filter of `params`: a filter is what makes one output,
    the last axis of w (…, in, out). What has fewer than two axes (biases, scales and shifts of a normalisation) gets
    the direction 0, as Li et al. do. None leaves all as drawn, norm √n.
    """
    if normalize is not None:
        checks.known("normalize", normalize, ("filter",))
    leaves, structure = jax.tree.flatten(_float_arrays(params))
    # drawn for all arrays in one go: a generator for each shape would take most of the compile time
    longest = max(w.size for w in leaves)
    normals = jax.vmap(lambda key: jax.random.normal(key, (longest,)))(jax.random.split(key, len(leaves)))
    return structure.unflatten(_scaled(normals, leaves, normalize))


@functools.partial(jax.jit, static_argnums=2)
def _scaled(normals: Array, leaves: list[Array], normalize: str | None) -> list[Array]:
    def scaled(normals: Array, w: Array) -> Array:
        d = normals[: w.size].reshape(w.shape).astype(w.dtype)
        if normalize is None or not w.size:
            return d
        sizes = [jnp.linalg.norm(a.reshape(-1, *a.shape[-1:]), axis=0) for a in (w, d)]
        return d * sizes[0] / sizes[1] if w.ndim > 1 else jnp.zeros_like(w)

    return list(map(scaled, normals, leaves))


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
    Raises ValueError for numbers that are not finite, and for a path along a line, such as one of two points.
    """
    arrays = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(_float_arrays(trajectory))]
    points = np.concatenate([array.reshape(len(array), -1) for array in arrays], axis=1)
    if not np.isfinite(points).all():
        raise ValueError("The trajectory is not finite. Leave out what comes after training diverged.")
    vectors, sizes, _ = np.linalg.svd(points - points.mean(0), full_matrices=False)
    if (sizes > 1e-6 * sizes[0]).sum() < 2:
        raise ValueError("The trajectory lies on a line (or does not move): it spans no plane. Look at it with `line`.")
    path = vectors[:, :2] * sizes[:2]
    signs = np.where(path[0] < path[-1], -1.0, 1.0)  # vectors have no sign of their own: the path starts at top right

    def mixed(shares: np.ndarray) -> Tree:
        return jax.tree.map(lambda leaf: np.tensordot(shares, leaf, 1).astype(np.float32), trajectory)

    x, y = map(mixed, (vectors[:, :2] / sizes[:2] * signs).T)
    last = jax.tree.map(lambda leaf: np.asarray(leaf[-1], np.float32), trajectory)
    return PCAPlane(last, x, y, (path - path[-1]) * signs, sizes[:2] ** 2 / (sizes**2).sum())


# Slices


def line(loss: Loss, params: Tree, direction: Tree, distances: ArrayLike, data: Sequence[Any] = ()) -> np.ndarray:
    """loss(params + a · direction) for each a of `distances`: an array of their length.

    Raises ValueError for a direction of another structure, a loss that is not a scalar and one that is NaN at params.
    """
    _same_structure(params, direction)
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
    u, v = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(d)]).astype(np.float64) for d in both)
    if not abs(u @ v) < (1 - 1e-6) * np.linalg.norm(u) * np.linalg.norm(v):
        raise ValueError("The directions are parallel, or a direction is zero: there is no plane. Use another key.")
    points = np.stack(np.meshgrid(x, y), axis=-1)
    return _slice(loss, params, both, points.reshape(-1, 2), data).reshape(points.shape[:2])


def _slice(loss: Loss, params: Tree, directions: list[Tree], points: np.ndarray, data: Sequence[Any]) -> np.ndarray:
    """The loss at (points, len(directions)) coordinates; the points are shared out among the cores."""
    result = jax.eval_shape(loss, params, *data)
    if jax.tree.map(lambda part: part.shape, result) != ():
        raise ValueError(f"The loss must be one number, such as a mean, but it returns {result}.")
    points = np.concatenate([np.zeros((1, len(directions))), points]).astype(np.float32)  # params themselves come first
    workers = min(devices.cores(), len(points))
    shares = np.resize(points, (workers, -(-len(points) // workers), len(directions)))
    jobs = [(loss, params, directions, share, tuple(data)) for share in shares]
    losses = np.concatenate(devices.side_by_side(_losses, jobs))[: len(points)]
    _finite(losses[:1])
    return losses[1:]


@functools.partial(jax.jit, static_argnums=0)
def _losses(loss: Loss, params: Tree, directions: list[Tree], points: Array, data: tuple[Any, ...]) -> Array:
    return lax.map(lambda point: loss(move(params, *zip(point, directions, strict=True)), *data), points)


# The Hessian


def hessian_eigenvalues(
    loss: Loss, params: Tree, k: int, key: Array, data: Sequence[Any] = (), tolerance: float = 1e-3
) -> np.ndarray:
    """The k largest eigenvalues of the loss's Hessian, (k,), in descending order, by Lanczos' method (Lanczos 1950).

    It starts at a random vector and ends when the residuals ‖H v − λ v‖ of all k are below `tolerance` times the
    largest |λ| found (the error of λ is then far smaller, of second order), at the earliest after 10 k products, so
    that one to which the start is nearly orthogonal is not overlooked, at the latest after max(100, 20 k). An
    eigenvalue that occurs several times may be found once only.
    Raises ValueError for k above the number of parameters and for a loss that is not a finite number.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(_float_arrays(params)))
    checks.whole("k", k, high=size, why=f"There are {size} parameters, hence as many eigenvalues.")
    most, products = min(max(100, 20 * k), size), min(10 * k, size)
    state = _start(jax.random.normal(jax.random.split(key)[1], (size,)), most)
    while True:
        alphas, betas, state = _lanczos(loss, params, data, state, products)
        largest = len(alphas) - k, len(alphas) - 1
        values, vectors = eigh_tridiagonal(alphas, betas[:-1], select="i", select_range=largest)
        if products == most or (np.abs(betas[-1] * vectors[-1]) <= tolerance * np.abs(values).max()).all():
            return values[::-1]
        products = min(products + 10, most)


class Spectrum(NamedTuple):
    """How the Hessian's eigenvalues are distributed, as a quadrature for each random probe vector."""

    nodes: np.ndarray  # (probes, iterations), estimates of eigenvalues
    weights: np.ndarray  # (probes, iterations), the fraction of all eigenvalues near each; each probe's sum is 1

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
    range over `iterations` is lost. Raises ValueError for a loss that is not a finite number.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(_float_arrays(params)))
    most = min(checks.whole("iterations", iterations), checks.whole("The number of parameters", size))

    def probe(key: Array) -> tuple[np.ndarray, np.ndarray]:
        signs = jax.random.rademacher(jax.random.split(key)[1], (size,), jnp.float32)
        alphas, betas, _ = _lanczos(loss, params, data, _start(signs, most), most)
        nodes, vectors = eigh_tridiagonal(alphas, betas[:-1])
        return nodes, vectors[0] ** 2

    keys = jax.random.split(key, checks.whole("probes", probes))
    return Spectrum(*map(np.stack, zip(*map(probe, keys), strict=True)))


class _Basis(NamedTuple):
    """What Lanczos' method has found: of all rows and numbers, the first `count`."""

    rows: Array  # (rows, n), orthonormal
    alphas: Array  # in this basis, the Hessian's diagonal …
    betas: Array  # … and what stands beside it; the last leads out of the basis
    vector: Array  # (n,) the next row
    count: Array


def _start(vector: Array, most: int) -> _Basis:
    """An empty basis with room for `most` rows; a multiple of 100, so that few sizes are compiled."""
    rows, vector = -(-most // 100) * 100, np.asarray(vector)
    empty, zeros = np.zeros((rows, vector.size), np.float32), np.zeros(rows, np.float32)
    return _Basis(empty, zeros, zeros, vector / np.linalg.norm(vector), np.int32(0))


def _lanczos(
    loss: Loss, params: Tree, data: Sequence[Any], basis: _Basis, products: int
) -> tuple[np.ndarray, np.ndarray, _Basis]:
    """Lanczos' method up to so many products in all: alphas and betas (products,), and the basis.

    Raises ValueError where the loss or the Hessian is not finite.
    """
    value, basis = _grow(loss, params, tuple(data), basis, products)
    alphas, betas = (np.asarray(part, np.float64)[:products] for part in _finite((basis.alphas, basis.betas)))
    _finite(value)
    return alphas, betas, basis


@functools.partial(jax.jit, static_argnums=0)
def _grow(loss: Loss, params: Tree, data: tuple[Any, ...], basis: _Basis, products: Array) -> tuple[Array, _Basis]:
    """One program: what a product needs of the forward and backward pass is computed once for all."""
    flat, unravel = ravel_pytree(params)

    def gradient(flat: Array) -> Array:
        return jax.grad(lambda flat: loss(unravel(flat), *data))(flat)

    def one(i: Array, basis: _Basis) -> _Basis:
        rows = basis.rows.at[i].set(basis.vector)
        image = jax.jvp(gradient, (flat,), (basis.vector,))[1]
        alphas = basis.alphas.at[i].set(basis.vector @ image)
        new = _orthogonal(image, rows, i)
        beta = jnp.linalg.norm(new)
        ended = beta <= 1e-6 * jnp.maximum(jnp.linalg.norm(image), jnp.abs(alphas).max())  # mapped into itself
        fresh = jax.random.normal(jax.random.key(i), flat.shape)
        new = lax.cond(ended, lambda: _orthogonal(fresh, rows, i), lambda: new)
        betas = basis.betas.at[i].set(jnp.where(ended, 0, beta))
        return _Basis(rows, alphas, betas, new / jnp.linalg.norm(new), i + 1)

    return loss(params, *data), lax.fori_loop(basis.count, products, one, basis)


def _orthogonal(vector: Array, rows: Array, count: Array) -> Array:
    """The part of a vector at right angles to the first `count` rows; the repeat removes what rounding left."""
    blocks = count // 10 + 1  # rows that are still 0 cost nothing

    def without(i: Array, vector: Array) -> Array:
        block = lax.dynamic_slice_in_dim(rows, 10 * (i % blocks), 10)
        return vector - (block @ vector) @ block

    return lax.fori_loop(0, 2 * blocks, without, vector)


# What cannot work


def _float_arrays(params: Tree) -> Tree:
    leaves = jax.tree.leaves(params)
    if not leaves or not all(hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves):
        raise ValueError("The parameters must be a pytree of arrays of floats, such as `train.fit(…).params`.")
    return params


def _same_structure(params: Tree, direction: Tree) -> None:
    wanted, given = (jax.tree.map(jnp.shape, tree) for tree in (_float_arrays(params), direction))
    if wanted != given:
        raise ValueError(f"The direction has the shapes {given}, but the parameters {wanted}. Use `random_direction`.")


def _finite(result: Any) -> Any:
    if not np.isfinite(result).all():
        raise ValueError("The loss is not finite at these parameters, or a derivative: did training diverge?")
    return result
