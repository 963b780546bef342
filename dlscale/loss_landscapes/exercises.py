"""The exercises of 02_loss_landscapes."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _line(answer: Any) -> str | None:
    rng = np.random.default_rng(7)
    shapes = {"kernels": (3, 3, 2, 4), "dense": (5, 3), "bias": (4,), "scale": (3,)}
    w, d = ({name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(2))
    w["kernels"] *= [0.1, 1, 3, 10]
    distances = [-0.5, 0.0, 1.5]
    found = answer({name: array.copy() for name, array in w.items()}, d, distances)
    if not isinstance(found, list | tuple) or len(found) != len(distances):
        return f"The answer must be a list of {len(distances)} networks, one for each distance."
    for a, network in zip(distances, found, strict=True):
        if not isinstance(network, dict) or network.keys() != w.keys():
            return f"Each network must be a dict of the arrays {', '.join(w)}."
        for name, array in w.items():
            expected = array
            if array.ndim > 1:
                axes = tuple(range(array.ndim - 1))
                expected = array + a * d[name] * np.sqrt((array**2).sum(axes) / (d[name] ** 2).sum(axes))
            if wrong := compare(f"{name}, of shape {array.shape}, at distance {a:g}", network[name], expected):
                return wrong
    return None


line = Exercise(
    id="loss_landscapes-line",
    answer="along_line",
    question="Write the whole method for any network: `params` and `gaussian` are dicts of arrays of the same shapes. "
    "Return the list of the networks, dicts again, at the given `distances` along the filter-normalised direction. "
    "Kernels of a convolution have shape $(k, k, \\text{in}, \\text{out})$, and one filter is `w[:, :, :, j]`: the "
    "last axis counts the filters, whatever comes before. An array of one axis does not move.",
    hints=(
        "All axes but the last belong to one filter: sum over them. `tuple(range(w.ndim - 1))` names them.",
        "np.sqrt((w**2).sum(axes) / (d**2).sum(axes)) is one number for each filter: multiply d by it.",
        "Collect the direction first, name by name; then make a dict {name: w + a * direction[name]} for each a.",
    ),
    code="""
def along_line(params, gaussian, distances):
    direction = {}
    for name, w in params.items():
        if w.ndim < 2:
            direction[name] = np.zeros_like(w)
        else:
            d, axes = gaussian[name], tuple(range(w.ndim - 1))
            direction[name] = d * np.sqrt((w**2).sum(axes) / (d**2).sum(axes))
    return [{name: w + a * direction[name] for name, w in params.items()} for a in distances]
""",
    wrong=_line,
    right="the loss of these networks, one after the other, is the slice, for dense layers and kernels alike.",
)


def _share(answer: Any) -> str | None:
    for n in (2, 100, 7434):
        if wrong := compare(f"The fraction in {n} dimensions", answer(n), 2 / n):
            return wrong
    return None


share = Exercise(
    id="loss_landscapes-share",
    answer="share_of_random_plane",
    question="Why does a *random* plane show nothing? Write the fraction of a path's variance that a random plane in "
    "$n$ dimensions holds on average. (No direction is special, and the fractions along all $n$ axes add up to 1.)",
    hints=(
        "Along one random direction, what is the average fraction, if all n axes share equally?",
        "A plane is two such directions at a right angle: their fractions add up.",
    ),
    code="""
def share_of_random_plane(n):
    return 2 / n
""",
    wrong=_share,
    right="in thousands of dimensions two random ones hold almost nothing, so the plane has to be chosen.",
)


def _memory(answer: Any) -> str | None:
    for n, m in ((418, 100), (7434, 60), (25_000_000, 100)):
        given = answer(n, m)
        if not isinstance(given, tuple | list) or len(given) != 2:
            return "The answer must be two numbers: bytes of the Hessian, bytes of the basis."
        for what, value, expected in zip(("the Hessian", "the basis"), given, (4 * n * n, 4 * n * m), strict=True):
            if wrong := compare(f"The bytes of {what} for n={n:,} and m={m}", value, expected):
                return wrong
    return None


memory = Exercise(
    id="loss_landscapes-memory",
    answer="memory",
    question="What does that cost? For $n$ parameters in 4-byte numbers, return two numbers of bytes: the explicit "
    "Hessian, and the basis of Lanczos: the $m$ vectors that were multiplied. Then try 25 million parameters and "
    "100 products.",
    hints=("The Hessian has a row and a column for each parameter.", "The basis has m vectors of n numbers."),
    code="""
def memory(n, m):
    return 4 * n * n, 4 * n * m
""",
    wrong=_memory,
    right="for 25 million parameters, 2.5 petabytes against 10 gigabytes.",
)


def _trace(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    H = np.diag(np.arange(1.0, 7.0))
    Z = np.sign(rng.normal(size=(5, 6)))
    if wrong := compare("The estimate for a diagonal matrix, where it is exact,", answer(Z, Z @ H), np.trace(H)):
        return wrong
    H = rng.normal(size=(6, 6))
    H, Z = H + H.T, np.sign(rng.normal(size=(40, 6)))
    return compare("The estimate for a symmetric matrix", answer(Z, Z @ H), np.einsum("mi,ij,mj->", Z, H, Z) / 40)


trace = Exercise(
    id="loss_landscapes-trace",
    answer="trace",
    question="The **trace**, the sum of all eigenvalues, needs no eigenvalue at all (Hutchinson 1989): for a vector "
    r"$z$ of random signs, $\mathbb{E}[z^\top H z] = \operatorname{tr} H$, since $\mathbb{E}[z_i z_j]$ is 1 for "
    "$i = j$ and 0 otherwise. Given the sign vectors as rows of `Z` and the products $Hz$ as rows of `HZ`, return "
    "the estimate.",
    hints=(
        "One row z and its product Hz give one estimate: the sum of their products, entry by entry.",
        "Average that over the rows.",
    ),
    code="""
def trace(Z, HZ):
    return (Z * HZ).sum(axis=1).mean()
""",
    wrong=_trace,
    right="a few products with random signs estimate the sum of millions of eigenvalues.",
)


def _sharp(answer: Any) -> str | None:
    if wrong := compare("c, which must be one number,", np.shape(answer), np.shape(0.0)):
        return wrong
    c = float(answer)
    if c == 0:
        return "c = 0 is no minimum: 1 / c must exist."
    return compare("λmax at your c", c**2 + c**-2, 100.0, tolerance=1e-2)


sharp = Exercise(
    id="loss_landscapes-sharp",
    answer="c",
    question=r'The smallest example: a "network" $w_2 w_1$ with loss $\tfrac12 (w_1 w_2 - 1)^2$. All points '
    r"$(c, 1/c)$ are minima of loss 0. Find a $c$ where $\lambda_{\max}$ is 100. (At loss 0 the Hessian is "
    r"$g g^\top$ with $g = (w_2, w_1)$.)",
    hints=(
        "The matrix g gᵀ has one eigenvalue that is not zero, and its eigenvector is g itself.",
        "g gᵀ g = ‖g‖² g, so λmax = ‖g‖² = c² + 1/c². Which c makes that 100?",
    ),
    code="c = ((100 + (100**2 - 4) ** 0.5) / 2) ** 0.5",
    wrong=_sharp,
    right="the same function, as sharp as you like: an eigenvalue alone says nothing about it.",
)


def _scores(x: np.ndarray, w1: np.ndarray, b1: np.ndarray, w2: np.ndarray, b2: np.ndarray) -> np.ndarray:
    return np.maximum(x @ w1 + b1, 0) @ w2 + b2


def _rise(x: np.ndarray, y: np.ndarray, net: list[np.ndarray]) -> float:
    """Of the loss at filter-normalised distance 0.25, the mean of both ways along eight directions."""

    def loss(net: list[np.ndarray]) -> float:
        z = _scores(x, *net)
        z = z - z.max(1, keepdims=True)
        return float((np.log(np.exp(z).sum(1)) - z[np.arange(len(y)), y]).mean())

    rng, there = np.random.default_rng(5), []
    for _ in range(8):
        drawn = [rng.normal(size=w.shape) * (w.ndim > 1) for w in net]
        sizes = [
            np.linalg.norm(w, axis=0) / np.maximum(np.linalg.norm(d, axis=0), 1e-30)
            for d, w in zip(drawn, net, strict=True)
        ]
        there += [loss([w + a * size * d for w, size, d in zip(net, sizes, drawn, strict=True)]) for a in (-0.25, 0.25)]
    return float(np.mean(there)) - loss(net)


def _disguise(answer: Any) -> str | None:
    for seed in (11, 12, 13):
        rng = np.random.default_rng(seed)
        sizes = ((8, 20), (20,), (20, 4), (4,))
        net = [rng.normal(size=size) * scale for size, scale in zip(sizes, (0.5, 0.1, 2.0, 0.1), strict=True)]
        x, fresh = rng.normal(size=(300, 8)), rng.normal(size=(2000, 8))
        y = _scores(x, *net).argmax(1)
        given = answer(*(w.copy() for w in net))
        if not isinstance(given, list | tuple) or len(given) != 4:
            return "The answer must be four arrays: W1, b1, W2, b2."
        given = [np.asarray(w, float) for w in given]
        if any(w.shape != size for w, size in zip(given, sizes, strict=True)):
            return f"The arrays must keep their shapes {sizes}."
        if not all(np.isfinite(w).all() for w in given):
            return "A weight is not finite."
        if (changed := (_scores(fresh, *given).argmax(1) != _scores(fresh, *net).argmax(1)).sum()) > 0:
            return f"{changed} of 2,000 fresh inputs are classified in another way."
        if (ratio := _rise(x, y, given) / _rise(x, y, net)) > 0.5:
            return f"The loss still rises {ratio:.2f} times as much: at most half is asked."
    return None


disguise = Exercise(
    id="loss_landscapes-disguise",
    answer="disguise",
    question="Open: fake a flat minimum. A network computes `np.maximum(x @ W1 + b1, 0) @ W2 + b2`. "
    "Return four arrays of the same shapes that classify *every* input as before, yet whose loss rises at most half as "
    "much at filter-normalised distance 0.25. (Try first what you did to two layers above. Why does it not help?)",
    hints=(
        "The filter-normalised slice cannot see a factor that another layer takes back. Which is never taken back?",
        "The class is the place of the largest score; the loss is made of the sizes of the scores.",
    ),
    code="""
def disguise(W1, b1, W2, b2):
    return W1, b1, 0.2 * W2, 0.2 * b2
""",
    wrong=_disguise,
    right="smaller scores, the same decisions: a slice of the loss calls it flat, a slice of the accuracy would not.",
)
