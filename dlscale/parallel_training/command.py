"""The command `python -m dlscale train`: a small network on real digits, split among processes, with checkpoints.

The processes are started here, or by SLURM, MPI or Kubernetes with this very command; they are found, watched and ended
as those of `python -m dlscale measure` are. This module is also what each of them runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dlscale import parallel_training as parallel
from dlscale.collectives import measuring
from dlscale.lab import checks, data, devices
from dlscale.lab.models import Params
from dlscale.lab.processes import START, peers, serve
from dlscale.lab.train import LOSSES

ABOUT = """Train a small network on real digits, its batch split among --data groups, its hidden units among the --model
processes of each. The loss is that of one process, up to the order of sums."""
DETAILS = """Example: python -m dlscale train --data 2 --model 2 --checkpoint run. With --checkpoint, the same command
goes on after any kill, also with another split: checkpoints are whole. All processes must see that folder.
What srun, mpirun or an indexed job of Kubernetes must say, tells `python -m dlscale measure --help`.
Exit status: 0; 1 if a process was lost; 2 for impossible options and checkpoints that cannot be used."""
FILE, RATE = "training.npz", 0.1
NUMBERS = {  # options, their defaults and meanings
    "data": (1, "groups among which each batch is split"),
    "model": (1, "processes of a group, among which hidden units are split"),
    "steps": (100, "of training"), "batch": (64, "examples of a step, in all"), "hidden": (64, "units"),
    "every": (20, "steps between two checkpoints and lines"),
}  # fmt: skip


# Checkpoints: one file, written whole or not at all, and read only if it fits


def save(path: Path, step: int, params: Params, about: Mapping[str, Any]) -> None:
    """Write the step, the parameters (whole, not split) and what they belong to over an older file.

    It is written under another name and then renamed, which is one act of the file system: whoever looks finds the
    old file or the new one, never half of one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, **params, about=np.array(json.dumps({**about, "step": step})))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def load(path: Path, about: Mapping[str, Any]) -> tuple[int, Params]:
    """The step and the parameters, for any split. Raises ValueError, and FileNotFoundError."""
    try:
        with path.open("rb") as opened, np.load(opened) as file:
            stored = dict(file)
        told = json.loads(str(stored.pop("about")))
        step = told.pop("step")
    except (EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path.name} is not whole: delete it, or begin elsewhere.") from error
    if told != about:
        raise ValueError(f"{path.name} belongs to another training: {told}, not {about}.")
    return step, stored


# Training


def order(**options: Any) -> dict[str, Any]:
    """What is to be trained, checked: whole numbers, and sizes that divide. Raises ValueError."""
    chosen = {name: default for name, (default, _) in NUMBERS.items()} | {"checkpoint": None} | options
    for name in NUMBERS:
        checks.whole(name, chosen[name])
    for whole, part in (("batch", "data"), ("hidden", "model"), ("steps", "every")):
        if chosen[whole] % chosen[part]:
            raise ValueError(f"{whole} {chosen[whole]} does not divide by {part} {chosen[part]}.")
    return chosen


def training(what: dict[str, Any], timeout: float = 120) -> Iterator[dict[str, Any]]:
    """Train in new processes of this machine, or in this one's place in a group; yield what they tell.

    First {"joined": (process, processes), "pid": …} of each, then {"step": …, "loss": …} of the first. Raises
    ValueError for what does not fit, and PeerLost, which says who was lost.
    """
    checks.finite("timeout", timeout, low=1)
    if what["checkpoint"] is not None:
        what = what | {"checkpoint": str(Path(what["checkpoint"]).absolute())}
    begin(what)  # what cannot be used is told before anything is started
    count = None if measuring.launched() else what["data"] * what["model"]
    with contextlib.closing(peers(__name__, count, {"what": what}, timeout)) as messages:
        yield from (message for _, message in messages if "done" not in message)


def begin(what: dict[str, Any]) -> tuple[int, Params]:
    """The step and the parameters to begin with: of the checkpoint, if there is one, or random ones."""
    if what["checkpoint"] is not None:
        with contextlib.suppress(FileNotFoundError):
            return load(Path(what["checkpoint"], FILE), _about(what))
    rng, hidden = np.random.default_rng(0), what["hidden"]
    weights = {"w1": rng.normal(size=(64, hidden)) / np.sqrt(32), "w2": rng.normal(size=(hidden, 10)) / np.sqrt(hidden)}
    whole = weights | {"b1": np.zeros(hidden), "b2": np.zeros(10)}
    return 0, {name: array.astype(np.float32) for name, array in whole.items()}


def _about(what: dict[str, Any]) -> dict[str, Any]:
    return {name: what[name] for name in ("batch", "hidden")}


def _rows(what: dict[str, Any], first: int, examples: int) -> np.ndarray:
    """(every, batch) of examples: those of a step depend on its number alone."""
    steps = range(first, first + what["every"])
    return np.stack([np.random.default_rng(step).permutation(examples)[: what["batch"]] for step in steps])


def _loss(own: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return LOSSES["cross_entropy"](parallel.two_layers(own, x, "model"), y).mean()


def _steps(groups: int, own: Params, rows: jax.Array, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array]:
    """Several steps as one worker does them: new parameters and losses."""

    def step(own: Params, rows: jax.Array) -> tuple[Params, jax.Array]:
        rows = parallel.shares(rows, groups)[lax.axis_index("data")]
        value, found = parallel.data_parallel(_loss, own, x[rows], y[rows], axis_name="data")
        return jax.tree.map(lambda p, g: p - RATE * g, own, found), value

    return lax.scan(step, own, rows)


def work(order: dict[str, Any], say: Callable[..., None]) -> None:
    """What a process of the group does. Of those that were started together only the first tells of its steps."""
    what = order["what"]
    devices.prepare()  # who goes on after a kill finds what was compiled
    measuring.join(order)
    say(joined=(jax.process_index(), jax.process_count()), pid=os.getpid())
    if jax.device_count() != what["data"] * what["model"]:
        raise ValueError(f"{what['data']} × {what['model']} workers are needed, not {jax.device_count()}.")
    mesh = jax.make_mesh((what["data"], what["model"]), ("data", "model"), (AxisType.Auto,) * 2)
    digits = data.load("digits")
    x, y = digits.x_train.reshape(-1, 64), digits.y_train
    first, params = begin(what)
    specs = {name: P(*[None] * parallel.SPLIT[name], "model") if name in parallel.SPLIT else P() for name in params}
    inside = {"in_specs": (specs, P(), P(), P()), "out_specs": (specs, P())}
    run = jax.jit(jax.shard_map(functools.partial(_steps, what["data"]), mesh=mesh, **inside, check_vma=False))
    own = {
        name: jax.make_array_from_callback(a.shape, NamedSharding(mesh, specs[name]), a.__getitem__)
        for name, a in params.items()
    }
    for step in range(first, what["steps"], what["every"]):
        own, losses = run(own, _rows(what, step, len(x)), x, y)
        params = multihost_utils.process_allgather(own, tiled=True)
        if jax.process_index() == 0 and what["checkpoint"] is not None:
            save(Path(what["checkpoint"], FILE), step + what["every"], params, _about(what))
        if order.get("process", 0) == 0:
            say(step=step + what["every"], loss=float(np.asarray(losses.addressable_shards[0].data)[-1]))


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m dlscale train", description=ABOUT, epilog=DETAILS)
    for name, (default, meaning) in NUMBERS.items():
        parser.add_argument(f"--{name}", help=f"{meaning} (default: {default})", default=default, type=int, metavar="N")
    parser.add_argument("--checkpoint", help="go on from there, and write it there", type=Path, metavar="FOLDER")
    silent = f"without a word, after which a group is given up (default: 120); at least {START} to find each other"
    parser.add_argument("--timeout", help=silent, default=120, type=float, metavar="SECONDS")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    return measuring.status(parser, lambda: _main(**vars(parser.parse_args(arguments))))


def _main(timeout: float, **chosen: Any) -> int:
    first = False
    with contextlib.closing(training(order(**chosen), timeout)) as messages:
        for message in messages:
            if "joined" in message:
                first = first or message["joined"][0] == 0
            elif first:
                print(f"step {message['step']:6}  loss {message['loss']:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    serve(work)
