"""The rules of all claims, as the rooms' `claims.toml` state them; what an entry holds is told in `claims`."""

import functools
import tomllib
from pathlib import Path
from typing import Any

from dlscale.course import sources

FROZEN = ("statement", "measure", "unit", "rule", "threshold", "seeds", "samples", "chance")


@functools.cache
def rules() -> dict[str, dict[str, Any]]:
    """The entries of all rooms' `claims.toml`, by id."""
    files = sorted(Path(__file__).parents[1].glob("*/claims.toml"))
    return {key: entry for file in files for key, entry in tomllib.loads(file.read_text(encoding="utf-8")).items()}


def frozen_hash(entry: dict[str, Any]) -> str:
    """Changes with all that decides a claim."""
    return sources.digest(entry.get(name) for name in FROZEN)
