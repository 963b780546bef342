"""Checkpoints: one file, written whole or not at all, and read only if it is whole and fits."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

Tree = Any


class Unusable(ValueError):
    """A checkpoint that is not whole, or of another training; the message says which."""


def save(path: Path, step: int, params: Tree, about: Mapping[str, Any]) -> None:
    """Write the step, the parameters (whole, not split) and what they belong to, with a hash, in place of an older file.

    It is written under another name and then renamed, which is one act of the file system: whoever looks finds the old
    file or the new one, never half of one.
    """
    named = {jax.tree_util.keystr(key): np.asarray(leaf) for key, leaf in jax.tree_util.tree_leaves_with_path(params)}
    memory = io.BytesIO()
    np.savez(memory, **named, about=np.array(json.dumps({**about, "step": step}, sort_keys=True)))
    content = memory.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    with unfinished.open("wb") as file:
        file.write(hashlib.sha256(content).digest() + content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load(path: Path, like: Tree, about: Mapping[str, Any]) -> tuple[int, Tree]:
    """The step and the parameters, in the form of `like`, for whatever split. Raises Unusable, and FileNotFoundError."""
    digest, content = (whole := path.read_bytes())[:32], whole[32:]
    if hashlib.sha256(content).digest() != digest:
        raise Unusable(f"{path.name} is not whole: its hash is another. Delete it, or begin elsewhere.")
    with np.load(io.BytesIO(content)) as file:
        stored = {name: file[name] for name in file.files}
    told = json.loads(str(stored.pop("about")))
    step = told.pop("step")
    if different := [name for name in {**told, **about} if told.get(name) != about.get(name)]:
        pairs = ", ".join(f"{name} {told.get(name)!r}, not {about.get(name)!r}" for name in sorted(different))
        raise Unusable(f"{path.name} belongs to another training: {pairs}.")
    names = [jax.tree_util.keystr(key) for key, _ in jax.tree_util.tree_leaves_with_path(like)]
    leaves = jax.tree.leaves(like)
    if {n: s.shape for n, s in stored.items()} != {n: a.shape for n, a in zip(names, leaves, strict=True)}:
        raise Unusable(f"{path.name} is of another model: {', '.join(stored)}.")
    return step, jax.tree.structure(like).unflatten([stored[name] for name in names])
