"""The command `python -m dlscale train`: a small network on real digits, split among processes, with checkpoints.

The processes are started here, or by SLURM, MPI or Kubernetes with this very command; they are found, watched and ended
as those of `python -m dlscale measure` are. This module is also what each of them runs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from dlscale import parallel_training as parallel
from dlscale.collectives import measuring
from dlscale.lab import checks, data, devices
from dlscale.lab.models import Params
from dlscale.lab.processes import START, PeerLost, peers, serve
from dlscale.lab.train import LOSSES

ABOUT = """Train a small network on real digits, its batch split among --data groups, its hidden units among the --model
processes of each. The loss is that of one process, up to the order of sums."""
DETAILS = """Example: python -m dlscale train --data 2 --model 2 --checkpoint run. With --checkpoint, the same command
goes on after any kill, also with another split: checkpoints are whole. All processes must see that folder.
Started by srun, mpirun or an indexed job of Kubernetes, leave --processes out; what DLSCALE_COORDINATOR and
DLSCALE_PROCESSES are for, tells `python -m dlscale measure --help`. Exit status: 0; 1 if a process was lost; 2 for
impossible options and checkpoints that cannot be used."""
FILE = "training.npz"


# Checkpoints: one file, written whole or not at all, and read only if it is whole and fits


class Unusable(ValueError):
    """A checkpoint that is not whole, or of another training; the message says which."""


def save(path: Path, step: int, params: Params, about: Mapping[str, Any]) -> None:
    """Write the step, the parameters (whole, not split) and what they belong to, with a hash, over an older file.

    It is written under another name and then renamed, which is one act of the file system: whoever looks finds the
    old file or the new one, never half of one.
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


def load(path: Path, like: Params, about: Mapping[str, Any]) -> tuple[int, Params]:
    """The step and the parameters, in the form of `like`, for any split. Raises Unusable, and FileNotFoundError."""
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
    return step, jax.tree_util.tree_map_with_path(lambda key, _: stored[jax.tree_util.keystr(key)], like)


# Training


def order(**options: Any) -> dict[str, Any]:
    """What is to be trained, checked: whole numbers, a rate, and sizes that divide. Raises ValueError."""
    chosen = {"data": 1, "model": 1, "steps": 100, "batch": 64, "hidden": 64, "every": 20, "rate": 0.1, "seed": 0}
    chosen |= {"checkpoint": None} | options
    for name in ("data", "model", "steps", "batch", "hidden", "every"):
        checks.whole(name, chosen[name])
    checks.finite("rate", chosen["rate"])
    checks.whole("seed", chosen["seed"], low=0)
    for what, whole, parts in (("batch", "batch", "data"), ("hidden", "hidden", "model"), ("steps", "steps", "every")):
        if chosen[whole] % chosen[parts]:
            raise ValueError(f"{what} {chosen[whole]} does not divide by {parts} {chosen[parts]}.")
    return chosen


def training(count: int | None, what: dict[str, Any], timeout: float = 120) -> Iterator[dict[str, Any]]:
    """Train in `count` new processes of this machine, or in this one's place in a group; yield what they tell.

    First {"joined": (process, processes), "pid": …} of each, then {"step": …, "loss": …} of the first, in the end
    {"result": …}. Raises ValueError for what does not fit, and PeerLost, which says who was lost.
    """
    checks.finite("timeout", timeout, low=1)
    if count is not None and count != what["data"] * what["model"]:
        raise ValueError(f"{what['data']} × {what['model']} processes are needed, not {count}.")
    if what["checkpoint"] is not None:
        folder = Path(what["checkpoint"]).absolute()
        what = what | {"checkpoint": str(folder)}
        with contextlib.suppress(FileNotFoundError):  # what cannot be used is told before anything is started
            load(folder / FILE, _start(what), _about(what))
    with contextlib.closing(peers(__name__, count, {"what": what}, timeout)) as messages:
        yield from (message for _, message in messages if "done" not in message)


def _start(what: dict[str, Any]) -> dict[str, np.ndarray]:
    rng, hidden = np.random.default_rng(what["seed"]), what["hidden"]
    weights = {"w1": rng.normal(size=(64, hidden)) / np.sqrt(32), "w2": rng.normal(size=(hidden, 10)) / np.sqrt(hidden)}
    whole = weights | {"b1": np.zeros(hidden), "b2": np.zeros(10)}
    return {name: array.astype(np.float32) for name, array in whole.items()}


def _about(what: dict[str, Any]) -> dict[str, Any]:
    return {name: what[name] for name in ("batch", "hidden", "rate", "seed")}


def _rows(what: dict[str, Any], first: int, examples: int) -> np.ndarray:
    """(every, batch) of examples: those of a step depend on its number alone."""
    steps = range(first, first + what["every"])
    return np.stack([np.random.default_rng([what["seed"], s]).permutation(examples)[: what["batch"]] for s in steps])


def _steps(what: dict[str, Any], split: bool) -> Callable[..., tuple[Any, jax.Array]]:
    """Several steps as one worker does them: (own parameters, rows, x, y) to new parameters and losses."""
    model, groups = ("model", what["data"]) if split else (None, 1)

    def loss(own: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return LOSSES["cross_entropy"](parallel.two_layers(own, x, model), y).mean()

    def step(x: jax.Array, y: jax.Array, own: Any, rows: jax.Array) -> tuple[Any, jax.Array]:
        if split:
            rows = parallel.shares(rows, groups)[lax.axis_index("data")]
            value, found = parallel.data_parallel(loss, own, x[rows], y[rows], axis_name="data")
        else:
            value, found = jax.value_and_grad(loss)(own, x[rows], y[rows])
        return jax.tree.map(lambda p, g: p - what["rate"] * g, own, found), value

    return lambda own, rows, x, y: lax.scan(functools.partial(step, x, y), own, rows)


def work(order: dict[str, Any], say: Callable[..., None]) -> None:
    """What a process of the group does. Of those that were started together only the first tells of its steps."""
    what = order["what"]
    devices.prepare()  # who goes on after a kill finds what was compiled
    if "coordinator" in order:
        jax.config.update("jax_num_cpu_devices", 1)
        devices.connect(order["coordinator"], order["processes"], order["process"])
    else:
        measuring.join()
    say(joined=(jax.process_index(), jax.process_count()), pid=os.getpid())
    if jax.device_count() != what["data"] * what["model"]:
        raise ValueError(f"{what['data']} × {what['model']} workers are needed, not {jax.device_count()}.")
    mesh = jax.make_mesh((what["data"], what["model"]), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    digits = data.load("digits")
    x, y = digits.x_train.reshape(-1, 64), digits.y_train
    path, first, params = None, 0, _start(what)
    if what["checkpoint"] is not None:
        path = Path(what["checkpoint"], FILE)
        with contextlib.suppress(FileNotFoundError):
            first, params = load(path, params, _about(what))

    of_model, everywhere = PartitionSpec("model"), PartitionSpec()
    inside = _steps(what, split=True)

    def body(own: Any, rows: Any, x: Any, y: Any) -> Any:
        own, losses = inside(jax.tree.map(lambda a: a[0], own), rows, x, y)
        return jax.tree.map(lambda a: a[None], own), losses

    specs = {"in_specs": (of_model, everywhere, everywhere, everywhere), "out_specs": (of_model, everywhere)}
    run = jax.jit(jax.shard_map(body, mesh=mesh, **specs, check_vma=False))
    local = _local(parallel.split_within(params, what["model"]), mesh)
    own = multihost_utils.host_local_array_to_global_array(local, mesh, of_model)
    for step in range(first, what["steps"], what["every"]):
        own, losses = run(own, _rows(what, step, len(x)), x, y)
        params = _whole(own, mesh)
        done = step + what["every"]
        if jax.process_index() == 0:
            if path:
                save(path, done, params, _about(what))
            say(step=done, loss=float(np.asarray(losses.addressable_shards[0].data)[-1]))
    if jax.process_index() == 0 or "coordinator" not in order:
        say(result=_result(what, params, x, y))


def _local(split: Any, mesh: jax.sharding.Mesh) -> Any:
    """This process's part of what is split among the columns of the mesh."""
    columns = sorted({int(np.argwhere(mesh.devices == device)[0][1]) for device in jax.local_devices()})
    return jax.tree.map(lambda a: np.asarray(a)[columns], split)


def _whole(own: Any, mesh: jax.sharding.Mesh) -> dict[str, np.ndarray]:
    """The parameters, not split, on every process."""
    local = multihost_utils.global_array_to_host_local_array(own, mesh, PartitionSpec("model"))
    every = jax.tree.map(np.asarray, multihost_utils.process_allgather(local))  # (processes, columns of one, …)
    every = jax.tree.map(lambda a: a.reshape(-1, *a.shape[-(a.ndim - 2) :])[: mesh.devices.shape[1]], every)
    axes = parallel.SPLIT
    return {name: np.concatenate([*a], axes[name]) if name in axes else a[0] for name, a in every.items()}


def _result(what: dict[str, Any], params: Any, x: Any, y: Any) -> dict[str, Any]:
    """Losses on all examples, of the group and of one process that trains alone, and a hash of the parameters."""
    alone, run = _start(what), jax.jit(_steps(what, split=False))
    for step in range(0, what["steps"], what["every"]):
        alone, _ = run(alone, _rows(what, step, len(x)), x, y)
    score = jax.jit(lambda p: LOSSES["cross_entropy"](parallel.two_layers(p, x), y).mean())
    digest = hashlib.sha256(b"".join(params[name].tobytes() for name in sorted(params))).hexdigest()
    return {"loss": float(score(params)), "alone": float(score(alone)), "bits": digest[:16]}


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m dlscale train", description=ABOUT, epilog=DETAILS)

    def add(name: str, meaning: str, default: object, **more: Any) -> None:
        parser.add_argument(name, help=f"{meaning} (default: %(default)s)", default=default, **more)

    add("--processes", "start so many on this machine; without a launcher data × model", None, type=int, metavar="N")
    for name, meaning, default in (
        ("data", "groups among which each batch is split", 1),
        ("model", "processes of a group, among which hidden units are split", 1),
        ("steps", "of training", 100), ("batch", "examples of a step, in all", 64), ("hidden", "units", 64),
        ("every", "steps between two checkpoints and lines", 20), ("seed", "of weights and batches", 0),
    ):  # fmt: skip
        add(f"--{name}", meaning, default, type=int, metavar="N")
    add("--rate", "of learning", 0.1, type=float, metavar="RATE")
    parser.add_argument("--checkpoint", help="go on from there, and write it there", type=Path, metavar="FOLDER")
    silent = f"without a word, after which a group is given up; at least {START} to find each other"
    add("--timeout", silent, 120, type=float, metavar="SECONDS")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options()
    chosen = vars(parser.parse_args(arguments))
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # by way of all `finally`, like Ctrl-C
    count, timeout, first = chosen.pop("processes"), chosen.pop("timeout"), True
    try:
        what = order(**chosen)
        if count is None and not measuring.launched():
            count = what["data"] * what["model"]
        with contextlib.closing(training(count, what, timeout)) as messages:
            for message in messages:
                if "joined" in message:
                    first = count is not None or message["joined"][0] == 0
                elif first and "step" in message:
                    print(f"step {message['step']:6}  loss {message['loss']:.4f}", flush=True)
                elif first and "result" in message:
                    loss, alone, bits = message["result"].values()
                    print(f"loss on all examples {loss:.6f}, of one process alone {alone:.6f}")
                    print(f"the parameters' bits: {bits}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    except (PeerLost, jax.errors.JaxRuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Stopped: with --checkpoint, the same command goes on from the last one.", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    serve(work)
