"""Errors in plain words for arguments that cannot work: what was given, and what to do instead."""

import difflib
import math
import numbers
from collections.abc import Iterable


def known(kind: str, name: str, names: Iterable[str]) -> str:
    """Return `name` if it is one of `names`; otherwise raise a ValueError that lists them and suggests one."""
    names = list(names)
    if name in names:
        return name
    close = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(map(repr, names))}.")


def whole(name: str, value: object, *, low: int = 1, high: int | None = None, why: str = "") -> int:
    """Return `value` as an int in [low, high]; otherwise raise a ValueError, with `why` as advice."""
    limits = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    good = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not good or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {limits}, not {value!r}.{' ' + why if why else ''}")
    return int(value)


def finite(name: str, value: object, *, low: float = 0.0) -> float:
    """Return `value` as a finite float of at least `low`; otherwise raise a ValueError."""
    good = isinstance(value, numbers.Real) and math.isfinite(value) and value >= low
    if not good:
        raise ValueError(f"{name} must be a finite number of at least {low:g}, not {value!r}.")
    return float(value)
