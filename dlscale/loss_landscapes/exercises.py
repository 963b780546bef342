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
    if np.ndim(answer) or isinstance(answer, str) or answer == 0:
        return "c must be one number other than 0: 1 / c must exist."
    return compare("λmax at your c", float(answer) ** 2 + float(answer) ** -2, 100.0, tolerance=5e-3)


sharp = Exercise(
    id="loss_landscapes-sharp",
    answer="c",
    hints=(
        "The matrix g gᵀ has one eigenvalue that is not zero, and its eigenvector is g itself.",
        "g gᵀ g = ‖g‖² g, so λmax = ‖g‖² = c² + 1/c². Which c makes that 100?",
    ),
    code="c = ((100 + (100**2 - 4) ** 0.5) / 2) ** 0.5",
    wrong=_sharp,
    right="the same function, as sharp as you like: an eigenvalue alone says nothing about it.",
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
