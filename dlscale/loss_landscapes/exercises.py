"""The exercises of 02_loss_landscapes."""

from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _filter(answer: Any) -> str | None:
    rng = np.random.default_rng(7)
    w, d = rng.normal(size=(5, 5, 3, 4)) * [0.1, 1, 3, 10], rng.normal(size=(5, 5, 3, 4))
    given = answer(d, w)
    expected = np.stack([d[..., j] * np.linalg.norm(w[..., j]) / np.linalg.norm(d[..., j]) for j in range(4)], axis=-1)
    if wrong := compare("The direction", given, expected):
        return wrong
    c = np.array([2.0, 1.0, 0.5, 8.0])  # each filter rescaled: so is its direction
    return compare("The direction after each filter was rescaled", answer(d, c * w), c * expected)


direction = Exercise(
    id="loss_landscapes-direction",
    answer="normalize",
    question=r"A convolution's kernels lie in an array $w$ of shape $(k, k, \text{in}, \text{out})$; one filter is "
    "$w[:, :, :, j]$. Given $w$ and a Gaussian $d$ of the same shape, return the filter-normalised direction. "
    "(`np.linalg.norm` takes at most two axes; the root of a sum of squares takes any.)",
    hints=(
        "All axes but the last belong to one filter: take the norm over them.",
        "The norm of several axes at once is np.sqrt((w**2).sum((0, 1, 2))): one number for each filter.",
    ),
    code="""
def normalize(d, w):
    return d * np.sqrt((w**2).sum((0, 1, 2)) / (d**2).sum((0, 1, 2)))
""",
    wrong=_filter,
    right="each filter of the direction has the size of that filter, and follows it when it is rescaled.",
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
