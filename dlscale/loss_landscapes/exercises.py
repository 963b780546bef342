"""The exercises of 02_loss_landscapes."""

import operator
from typing import Any

import numpy as np

from dlscale.course.exercises import Exercise, compare


def _direction(answer: Any) -> str | None:
    rng = np.random.default_rng(7)
    shapes = {"kernels": (3, 3, 2, 4), "dense": (5, 3), "bias": (4,), "scale": (3,)}
    w, d = ({name: rng.normal(size=shape) for name, shape in shapes.items()} for _ in range(2))
    w["kernels"] *= [0.1, 1, 3, 10]
    found = answer({name: array.copy() for name, array in w.items()}, {name: array.copy() for name, array in d.items()})
    if not isinstance(found, dict) or found.keys() != w.keys():
        return f"The answer must be a dictionary of the arrays {', '.join(w)}."
    for name, array in w.items():
        expected = np.zeros_like(array)
        if array.ndim > 1:
            axes = tuple(range(array.ndim - 1))
            expected = d[name] * np.sqrt((array**2).sum(axes) / (d[name] ** 2).sum(axes))
        if wrong := compare(f"The direction of {name}, of shape {array.shape},", found[name], expected):
            return wrong
    return None


direction = Exercise(
    id="loss_landscapes-direction",
    answer="filter_normalised",
    question="Write filter normalisation for any network. `params` and `gaussian` are dictionaries of arrays with the "
    "same shapes. Return a dictionary with the normalised direction. A convolution has kernels of shape "
    "$(k, k, \\text{in}, \\text{out})$, and its filter $j$ is `w[:, :, :, j]`: the last axis counts the filters. An "
    "array with only one axis gets zeros.",
    hints=(
        "All axes but the last belong to one filter: sum over them. `tuple(range(w.ndim - 1))` names them.",
        "np.sqrt((w**2).sum(axes) / (d**2).sum(axes)) is one number for each filter: multiply d by it.",
    ),
    code="""
def filter_normalised(params, gaussian):
    direction = {}
    for name, w in params.items():
        d, axes = gaussian[name], tuple(range(w.ndim - 1))
        length = np.sqrt((w**2).sum(axes) / (d**2).sum(axes))
        direction[name] = d * length if w.ndim > 1 else np.zeros_like(w)
    return direction
""",
    wrong=_direction,
    right="each filter of the direction is as long as the network's own, for dense layers and kernels alike.",
)


def _power(answer: Any) -> str | None:
    rng = np.random.default_rng(3)
    for values in ((5.0, 2.0, -1.0, 0.5, 0.1), (-4.0, 2.0, 1.0, 0.3, 0.1), (0.3, 0.1, 0.05, 0.0, -0.1)):
        basis, asked = np.linalg.qr(rng.normal(size=(5, 5)))[0], 0

        def times(v: Any, H: np.ndarray = (basis * values) @ basis.T) -> np.ndarray:
            nonlocal asked
            asked += 1
            return H @ np.asarray(v, float)

        found = answer(times, rng.normal(size=5), 30)
        if wrong := compare("The eigenvalue with the largest absolute value", found, values[0], 1e-3):
            return f"{wrong} The eigenvalues are {', '.join(f'{value:g}' for value in values)}."
        if asked > 31:
            return f"{asked} products were made, but steps was 30."
    return None


power = Exercise(
    id="loss_landscapes-power",
    answer="power_iteration",
    question="Write power iteration. `times(v)` returns $Hv$. Start from `v`, make `steps` products, and return the "
    "eigenvalue with the largest absolute value, *with its sign*: it is $v^\\top H v$ for the final unit vector $v$. "
    "One more product does no harm.",
    hints=(
        "In each step: divide v by its length, then multiply: new = times(v).",
        "v @ new is vᵀHv for the unit vector v. Then let v = new. The length of new has no sign.",
    ),
    code="""
def power_iteration(times, v, steps):
    for _ in range(steps):
        v = v / np.linalg.norm(v)
        new = times(v)
        eigenvalue = v @ new
        v = new
    return eigenvalue
""",
    wrong=_power,
    right="each step multiplies the other directions by the ratio of two eigenvalues, so close ones take many steps.",
)


def _sharp(answer: Any) -> str | None:
    if np.ndim(answer) or isinstance(answer, str):
        return "c must be one number."
    c = float(answer)
    if c == 0:
        return "c = 0 is no minimum: 1 / c must exist."
    return compare("λmax at your c", c**2 + c**-2, 100.0, tolerance=5e-3)


sharp = Exercise(
    id="loss_landscapes-sharp",
    answer="c",
    question=r'Make a minimum as sharp as you like. A "network" with two weights computes $w_2 w_1$, and its loss is '
    r"$\tfrac12 (w_1 w_2 - 1)^2$. Every point $(c, 1/c)$ is a minimum with loss 0. Find a $c$ with $\lambda_{\max} = "
    r"100$. At loss 0 the Hessian is $g g^\top$ with $g = (w_2, w_1)$.",
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
        if now > 3 * before:
            return f"Too flat: the loss in the middle is {now / before:.2f} times what it was; at most 3 is asked."
    return None


disguise = Exercise(
    id="loss_landscapes-disguise",
    answer="disguise",
    question="Open: fake a flat minimum. A network computes `np.maximum(x @ W1 + b1, 0) @ W2 + b2`. "
    "Return four arrays of the same shapes that classify *every* input as before, yet whose loss rises at most half as "
    "much at filter-normalised distance 0.25, and is at most 3 times as high in the middle. Try first what you did "
    "to two layers in the lesson. Why does it not help?",
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
            given = {tuple(sorted(map(operator.index, pair))) for pair in given}
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
    question="Here is a list of trained networks, each a dictionary with `batch`, `rate`, `decay`, `seed` (of the "
    "start) and training `loss`, which is NaN if the run failed. For which pairs may the batch *alone* explain a "
    "difference in sharpness? Return a list of the pairs `(i, j)` of their places, $i < j$. Losses that differ by less "
    "than 2 % count as equal.",
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
