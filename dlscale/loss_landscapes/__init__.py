"""The ground that training walks on: slices and planes through a loss, and the spectrum of its Hessian.

All functions take a scalar `loss(params, *data)` of any pytree of float arrays, with the arrays `data` handed through:
as inputs of the compiled program they cost nothing to compile, as constants inside `loss` they may cost seconds. The
same loss with other parameters or data of the same shapes is not compiled again. The Hessian is never formed; it is
known by its products with vectors (Pearlmutter 1994), each at the price of a few gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
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
ROWS = 100  # of a basis, at least: eigenvalues and densities then share one compiled program


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
    drawn = [w for w in leaves if normalize is None or w.ndim > 1] or leaves
    normals = _normals(key, len(leaves), max(w.size for w in drawn))
    return structure.unflatten(_scaled(normals, leaves, normalize))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normals(key: Array, count: int, longest: int) -> Array:
    """Numbers for `count` arrays, drawn in one go: a generator for each shape would take most of the compile time."""
    return jax.vmap(lambda key: jax.random.normal(key, (longest,)))(jax.random.split(key, count))


@functools.partial(jax.jit, static_argnums=2)
def _scaled(normals: Array, leaves: list[Array], normalize: str | None) -> list[Array]:
    def norm(w: Array) -> Array:
        return jnp.linalg.norm(w.reshape(-1, w.shape[-1]) if normalize == "filter" else w.ravel(), axis=0)

    def scale(normals: Array, w: Array) -> Array:
        if normalize is not None and w.ndim < 2:
            return jnp.zeros_like(w)
        d = normals[: w.size].reshape(w.shape).astype(w.dtype)
        return d if normalize is None else d * norm(w) / norm(d)

    return [scale(*pair) for pair in zip(normals, leaves, strict=True)]


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
    structure, ends = jax.tree.structure(trajectory), np.cumsum([array[0].size for array in arrays])[:-1]

    def tree(flat: np.ndarray) -> Tree:
        parts = np.split(flat.astype(np.float32), ends)
        return structure.unflatten(part.reshape(array.shape[1:]) for part, array in zip(parts, arrays, strict=True))

    x, y = map(tree, directions * signs[:, None])
    return PCAPlane(tree(points[-1]), x, y, path * signs, variances / (centred**2).sum())


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
    u, v = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(d)]).astype(np.float64) for d in both)
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
    jobs = [(loss, params, directions, part, tuple(data)) for part in np.split(padded, workers)]
    losses = np.concatenate(devices.side_by_side(_losses, jobs))[: len(points)]
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
) -> np.ndarray:
    """The k largest eigenvalues of the loss's Hessian, (k,), in descending order, by Lanczos' method (Lanczos 1950).

    It starts at a random vector and ends when the residuals ‖H v − λ v‖ of all k are below `tolerance` times the
    largest |λ| found (the error of λ is then far smaller, of second order), at the earliest after 10 k products, so
    that one to which the start is nearly orthogonal is not overlooked, at the latest after max(100, 20 k). An
    eigenvalue that occurs several times may be found once only.
    Raises ValueError for k above the number of parameters and for a loss that is not a finite number.
    """
    size = _size(params)
    checks.whole("k", k, high=size, why=f"There are {size} parameters, hence as many eigenvalues.")
    most = min(size, max(100, 20 * k))
    for matrix, beta in _lanczos(jax.random.normal, loss, params, key, data, most):
        values, vectors = np.linalg.eigh(matrix)
        residuals = np.abs(beta * vectors[-1, -k:])
        if len(values) >= min(most, CHUNK * k) and (residuals <= tolerance * np.abs(values[-k:]).max()).all():
            break
    return values[-k:][::-1]


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
    checks.whole("probes", probes)
    most = min(checks.whole("iterations", iterations), _size(params))

    def probe(key: Array) -> tuple[np.ndarray, np.ndarray]:
        *_, (matrix, _) = _lanczos(jax.random.rademacher, loss, params, key, data, most)
        nodes, vectors = np.linalg.eigh(matrix)
        return nodes, vectors[0] ** 2

    return Spectrum(*map(np.stack, zip(*map(probe, jax.random.split(key, probes)), strict=True)))


def hessian_trace(loss: Loss, params: Tree, key: Array, data: Sequence[Any] = (), probes: int = 30) -> Array:
    """Independent unbiased estimates of the Hessian's trace, (probes,): zᵀ H z for random signs z (Hutchinson 1989).

    Their mean is the estimate, and their spread says how good it is. Raises ValueError for a loss that is not a finite
    number.
    """
    checks.whole("probes", probes)
    _check_scalar(loss, params, data)
    return _finite(_trace(loss, params, key, tuple(data), int(probes)))


@functools.partial(jax.jit, static_argnums=(0, 4))
def _trace(loss: Loss, params: Tree, key: Array, data: tuple[Any, ...], probes: int) -> Array:
    value, product = _linearize(loss, params, data)

    def probe(key: Array) -> Array:
        z = jax.random.rademacher(key, (_size(params),), jnp.float32)
        return z @ product(z)

    return jnp.where(jnp.isfinite(value), lax.map(probe, jax.random.split(key, probes)), jnp.nan)


class _Lanczos(NamedTuple):
    """A basis of a Krylov space, and the Hessian in it: tridiagonal, `alphas` on the diagonal, `betas` beside it."""

    basis: Array  # (rows, size), orthonormal, 0 from `count` on
    alphas: Array  # (rows,)
    betas: Array  # (rows,)
    vector: Array  # (size,), the next row
    count: Array  # products so far
    ended: Array  # whether nothing is left: the Hessian maps the space into itself


def _lanczos(
    draw: Callable[..., Array], loss: Loss, params: Tree, key: Array, data: Sequence[Any], most: int
) -> Iterator[tuple[np.ndarray, float]]:
    """The Hessian in a basis that grows by CHUNK vectors up to `most`, and the beta beyond its edge."""
    _check_scalar(loss, params, data)
    size, rows = _size(params), -(-max(most, ROWS) // CHUNK) * CHUNK
    key, vector = _random_unit(draw, key, size)
    zeros = np.zeros(rows, np.float32)
    state = jax.device_put(_Lanczos(np.zeros((rows, size), np.float32), zeros, zeros, vector, np.int32(0), np.False_))
    for until in (*range(CHUNK, most, CHUNK), most):
        while int(state.count) < until:
            value, state = _extend(loss, params, tuple(data), state, np.int32(until))
            _finite(value)
            if state.ended:  # go on from a new random vector
                key, vector = _random_unit(jax.random.normal, key, size)
                basis, vector = np.asarray(state.basis), np.asarray(vector)
                for _ in range(2):
                    vector = vector - (basis @ vector) @ basis
                vector /= max(np.linalg.norm(vector), 1e-30)
                state = state._replace(vector=vector, ended=np.False_)
        alphas, betas = (np.asarray(part, np.float64)[:until] for part in (state.alphas, state.betas))
        yield np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1), betas[-1]


@functools.partial(jax.jit, static_argnums=(0, 2))
def _random_unit(draw: Callable[..., Array], key: Array, size: int) -> tuple[Array, Array]:
    """Another key, and a random vector of length 1."""
    key, key_vector = jax.random.split(key)
    vector = draw(key_vector, (size,)).astype(jnp.float32)
    return key, vector / jnp.linalg.norm(vector)


@functools.partial(jax.jit, static_argnums=0)
def _extend(loss: Loss, params: Tree, data: tuple[Any, ...], state: _Lanczos, until: Array) -> tuple[Array, _Lanczos]:
    """The loss, and the basis with `until` vectors, fewer where the space ended before."""
    value, product = _linearize(loss, params, data)

    def step(state: _Lanczos) -> _Lanczos:
        i = state.count
        basis = state.basis.at[i].set(state.vector)
        image = rest = product(state.vector)

        def chunk(number: Array, vector: Array) -> Array:
            part = lax.dynamic_slice_in_dim(basis, number % chunks * CHUNK, CHUNK)
            return vector - (part @ vector) @ part

        chunks = i // CHUNK + 1  # those that hold rows already: the others are many, and zero
        # rounding would undo the right angles: each vector is orthogonalised anew, twice
        rest = lax.fori_loop(0, 2 * chunks, chunk, rest)
        beta = jnp.linalg.norm(rest)
        ended = beta <= 1e-6 * jnp.maximum(jnp.linalg.norm(image), jnp.abs(state.alphas).max())
        return _Lanczos(
            basis,
            state.alphas.at[i].set(state.vector @ image),
            state.betas.at[i].set(jnp.where(ended, 0, beta)),
            rest / jnp.maximum(beta, 1e-30),
            i + 1,
            ended,
        )

    return value, lax.while_loop(lambda state: (state.count < until) & ~state.ended, step, state)


def _linearize(loss: Loss, params: Tree, data: tuple[Any, ...]) -> tuple[Array, Callable[[Array], Array]]:
    """The loss, and the product of its Hessian with a flat vector.

    What the product needs of the forward and backward pass is computed once for all vectors.
    """
    flat, unravel = ravel_pytree(params)

    def gradient(flat: Array) -> tuple[Array, Array]:
        value, gradient = jax.value_and_grad(lambda flat: loss(unravel(flat), *data))(flat)
        return gradient, value

    _, product, value = jax.linearize(gradient, flat, has_aux=True)
    return value, product


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
    if not np.isfinite(result).all():
        raise ValueError(
            "The loss is not finite at these parameters (or its derivatives are not): did training diverge?"
        )
    return result
