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


def _held(answer: Any) -> str | None:
    rng = np.random.default_rng(4)
    for count, size, far in ((61, 500, 3.0), (300, 6, 100.0)):
        points = rng.normal(size=(count, size)) * np.geomspace(4, 0.5, size) + far
        variances = np.linalg.svd(points - points.mean(0), compute_uv=False) ** 2
        expected = 100 * variances[:2].sum() / variances.sum()
        if wrong := compare(f"The share of {count} points in {size} dimensions", answer(points.copy()), expected):
            return wrong
    return None


held = Exercise(
    id="loss_landscapes-held",
    answer="share_held",
    question="Write the measure of this section: `points` holds one point a row. Return how many *percent* of their "
    "variance, the mean squared distance from their mean, the best plane holds.",
    hints=(
        "The variance along the principal components: the squared singular values of the points less their mean.",
        "np.linalg.svd(…, compute_uv=False) gives the singular values, the largest first: the plane has two of them.",
    ),
    code="""
def share_held(points):
    variances = np.linalg.svd(points - points.mean(0), compute_uv=False) ** 2
    return 100 * variances[:2].sum() / variances.sum()
""",
    wrong=_held,
    right="of any path, aimless ones, too: that is what the controls are for.",
)


def _spread(n: int, seed: int, smallest: float) -> np.ndarray:
    """A symmetric matrix with eigenvalues from 1 down to `smallest`, of both signs."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(n, n)))[0]
    return (basis * np.geomspace(1, smallest, n) * np.where(np.arange(n) % 3, 1, -1)) @ basis.T


def _lanczos(answer: Any) -> str | None:
    for n, steps, smallest in ((12, 5, 0.1), (60, 60, 1e-4)):
        H, asked = _spread(n, n, smallest), 0

        def times(v: np.ndarray, H: np.ndarray = H) -> np.ndarray:
            nonlocal asked
            asked += 1
            return H @ np.asarray(v, float)

        v = np.random.default_rng(1).normal(size=n)
        T = answer(times, v.copy(), steps)
        if wrong := compare(f"T after {steps} products, without its numbers,", np.shape(T), (steps, steps)):
            return wrong
        if asked > steps:
            return f"{asked} products were made; {steps} are enough."
        T = np.asarray(T, float)
        if not np.allclose(T, T.T) or np.abs(np.triu(T, 2)).max() > 1e-6:
            return "T must be symmetric, with three diagonals, and 0 elsewhere."
        basis = np.linalg.qr(np.stack([np.linalg.matrix_power(H, k) @ v for k in range(min(steps, 5))], axis=1))[0]
        what = "The five first entries of T's diagonal"
        if wrong := compare(what, np.diag(T)[:5], np.diag(basis.T @ H @ basis), tolerance=1e-3):
            return wrong
        if steps == n:
            what = f"The eigenvalues of T after as many products as H has rows, {n},"
            if wrong := compare(what, np.linalg.eigvalsh(T), np.linalg.eigvalsh(H), tolerance=1e-4):
                return f"{wrong} Is each new vector at a right angle to all before?"
        elif wrong := compare("What stands beside the diagonal of T", np.abs(np.diag(T, 1)), _beside(H, v, steps)):
            return wrong
    return None


def _beside(H: np.ndarray, v: np.ndarray, steps: int) -> np.ndarray:
    krylov = np.stack([np.linalg.matrix_power(H, k) @ v for k in range(steps)], axis=1)
    basis = np.linalg.qr(krylov)[0]
    return np.abs(np.diag(basis.T @ H @ basis, 1))


lanczos = Exercise(
    id="loss_landscapes-lanczos",
    answer="lanczos_by_you",
    question="Write it. `times(v)` is $Hv$, `v` the random vector to start from. Make `steps` products and "
    "return $T$, an array (steps, steps). Put each new vector at a right angle to *all* before it, by subtracting its "
    "parts along them: in exact arithmetic, the last two would do.",
    hints=(
        "Begin with basis = [v / np.linalg.norm(v)] and T = np.zeros((steps + 1, steps + 1)): cut off its last row.",
        "In step i: new = times(basis[i]); T[i, i] = new @ basis[i]; then take its parts along the basis away.",
        "With Q = np.stack(basis), new - (Q @ new) @ Q is without them; a second time removes what rounding left. "
        "The length of what is new is T[i, i + 1] = T[i + 1, i], and divided by it, it joins the basis.",
    ),
    code="""
def lanczos_by_you(times, v, steps):
    basis, T = [v / np.linalg.norm(v)], np.zeros((steps + 1, steps + 1))
    for i in range(steps):
        new = times(basis[i])
        T[i, i] = new @ basis[i]
        Q = np.stack(basis)
        for _ in range(2):
            new = new - (Q @ new) @ Q
        T[i, i + 1] = T[i + 1, i] = np.linalg.norm(new)
        basis.append(new / T[i, i + 1])
    return T[:steps, :steps]
""",
    wrong=_lanczos,
    right="products alone, and the outermost eigenvalues of a matrix that nobody has written down.",
)


def _signal(answer: Any) -> str | None:
    for skip, new, depth in ((1.0, 0.2, 30), (0.8, 0.6, 7), (0.0, 1.1, 3), (1.0, 1.0, 12), (0.9, 0.7, 1)):
        found = answer(skip, new, depth)
        if not np.iterable(found) or len(found := list(found)) != 2:
            return "The answer must be two numbers: the variance at the end, and a share of it."
        variance = (skip**2 + new**2) ** depth
        expected = {"The variance": variance, "The share of the first input": skip ** (2 * depth) / variance}
        for number, (what, value) in zip(found, expected.items(), strict=True):
            if wrong := compare(f"{what} after {depth} blocks of weights {skip:g} and {new:g}", number, value):
                return wrong
    return None


signal = Exercise(
    id="loss_landscapes-signal",
    answer="after_blocks",
    question="Why these weights? A signal of variance 1 goes through `depth` blocks. Each passes on `skip` times its "
    "input plus `new` times its contribution. Take each contribution to be independent of the block's input, with mean "
    "0 and as much variance as that input. Return two numbers: the variance at the end, and which share of it is the "
    "very first input, come through all the skips. Then ask it about the three nets, and about `skip = new = 1`.",
    hints=(
        "Variances of independent parts add up, and a factor of the signal counts squared.",
        "One block turns a variance v into skip² v + new² v: the contribution has grown along with its input.",
    ),
    code="""
def after_blocks(skip, new, depth):
    variance = (skip**2 + new**2) ** depth
    return variance, skip ** (2 * depth) / variance
""",
    wrong=_signal,
    right="small contributions leave room for the first input, equal weights all but drown it.",
)


def _sharp(answer: Any) -> str | None:
    if np.ndim(answer):
        return "c must be one number, not several."
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


def _rise(x: np.ndarray, y: np.ndarray, net: list[np.ndarray]) -> tuple[float, float]:
    """The loss, and its rise at filter-normalised distance 0.25, the mean of both ways along eight directions."""

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
    return loss(net), float(np.mean(there)) - loss(net)


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
        (now, rise), (before, rise_before) = _rise(x, y, given), _rise(x, y, net)
        if (ratio := rise / rise_before) > 0.5:
            return f"The loss still rises {ratio:.2f} times as much: at most half is asked."
        if now > 2.5 * before:
            return f"Too flat: the loss in the middle is {now / before:.2f} times what it was; at most 2.5 is asked."
    return None


disguise = Exercise(
    id="loss_landscapes-disguise",
    answer="disguise",
    question="Open: fake a flat minimum. A network computes `np.maximum(x @ W1 + b1, 0) @ W2 + b2`. "
    "Return four arrays of the same shapes that classify *every* input as before, yet whose loss rises at most half as "
    "much at filter-normalised distance 0.25, and is at most 2.5 times as high in the middle. (Try first what you did "
    "to two layers above. Why does it not help? And which control of this section unmasks your fake?)",
    hints=(
        "The filter-normalised slice cannot see a factor that another layer takes back. Which is never taken back?",
        "The class is the place of the largest score; the loss is made of the sizes of the scores.",
    ),
    code="""
def disguise(W1, b1, W2, b2):
    return W1, b1, 0.45 * W2, 0.45 * b2
""",
    wrong=_disguise,
    right="smaller scores, the same decisions: flat in the loss. Equal loss unmasks it: in the middle it lies higher. "
    "So do slices of the error, and margins made alike. (One factor for each hidden unit moves the slice, too.)",
)


ALIKE = "rate", "decay", "seed"
_LOSSES = 0.0499, 0.05, 0.0508, 0.0515, 0.08, np.nan


def _fair(answer: Any) -> str | None:
    for number in range(5):
        rng = np.random.default_rng(number)
        nets = [
            {
                "batch": int(rng.choice([16, 500])),
                "rate": float(rng.choice([0.25, 2.0])),
                "decay": float(rng.choice([0.0, 0.0, 0.001])),
                "seed": int(rng.choice([0, 1])),
                # neighbours lie within 2 %, 0.0515 is beyond it from the first two
                "loss": float(rng.choice(_LOSSES, p=[0.25, 0.2, 0.2, 0.2, 0.05, 0.1])),
            }
            for _ in range(30)
        ]
        given = answer([net.copy() for net in nets])
        try:
            given = {tuple(sorted(map(int, pair))) for pair in given}
        except (TypeError, ValueError):
            return "The answer must be a list of pairs of numbers (i, j)."
        if bad := [pair for pair in given if len(pair) != 2 or not 0 <= pair[0] < pair[1] < len(nets)]:
            return f"{bad[0]} is no pair of two networks."
        for i in range(len(nets)):
            for j in range(i + 1, len(nets)):
                one, other = nets[i], nets[j]
                why = [f"the {name} differs" for name in ALIKE if one[name] != other[name]]
                if one["batch"] == other["batch"]:
                    why.append("the batch is the same")
                if not abs(one["loss"] / other["loss"] - 1) < 0.02:
                    why.append("the losses are not equal")
                if ((i, j) in given) == bool(why):
                    return f"Networks {one} and {other}: {', '.join(why) or 'a fair pair, and left out'}."
    return None


fair = Exercise(
    id="loss_landscapes-fair",
    answer="fair_pairs",
    question="You are handed a list of trained networks, each a dict with `batch`, `rate`, `decay`, `seed` (of the "
    "start) and training `loss` (NaN if it failed). For which pairs may a difference in sharpness be put down to "
    "the batch *alone*? Return a list of the pairs `(i, j)` of their places, $i < j$. Losses that differ by less than "
    "2 % count as equal.",
    hints=(
        "Go through all pairs i < j. What must differ, and what must not?",
        "NaN is equal to nothing: a comparison with < is false for it, so write the test so that false means unfair.",
    ),
    code="""
def fair_pairs(nets):
    def fair(one, other):
        alike = all(one[name] == other[name] for name in ("rate", "decay", "seed"))
        return alike and one["batch"] != other["batch"] and abs(one["loss"] / other["loss"] - 1) < 0.02
    return [(i, j) for j in range(len(nets)) for i in range(j) if fair(nets[i], nets[j])]
""",
    wrong=_fair,
    right="one thing differs, all others are alike, failed runs are out: that is a control.",
)


def _attack(answer: Any) -> str | None:
    for seed, epsilon in ((1, 0.1), (2, 0.5)):
        rng = np.random.default_rng(seed)
        x, w, y = rng.normal(size=(40, 6)), rng.normal(size=6), rng.integers(0, 2, 40)
        expected = x + epsilon * np.sign(np.outer(1 / (1 + np.exp(-(x @ w + 0.3))) - y, w))
        found = answer(x.copy(), y.copy(), w.copy(), 0.3, epsilon)
        if wrong := compare(f"The attacked inputs at ε = {epsilon:g}", found, expected):
            return wrong
    return None


attack = Exercise(
    id="loss_landscapes-attack",
    answer="attack",
    question="Write it for the smallest classifier. A logistic model says that an input, a row of `x`, is of "
    "class 1 with probability $p = 1 / (1 + e^{-z})$, $z = x \\cdot w + b$. Its loss is $-\\log p$ where `y` is 1 and "
    "$-\\log(1 - p)$ where it is 0. Return the attacked `x`, without any library for gradients.",
    hints=(
        "The derivative of the loss with respect to z is p − y. And that of z with respect to x?",
        "So the gradient of row i is (p[i] - y[i]) * w. Only its sign is needed.",
    ),
    code="""
def attack(x, y, w, b, epsilon):
    p = 1 / (1 + np.exp(-(x @ w + b)))
    return x + epsilon * np.sign((p - y)[:, None] * w)
""",
    wrong=_attack,
    right="p is never beyond y, so for this model the direction hangs on the class alone.",
)
