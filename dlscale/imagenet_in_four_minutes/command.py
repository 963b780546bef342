"""The whole system in processes of this machine: each is a worker. This module is also what each of them runs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from dlscale import collectives, precision
from dlscale import imagenet_in_four_minutes as record
from dlscale.imagenet_in_four_minutes import Switches, System
from dlscale.lab import devices
from dlscale.lab.processes import peers, serve

# For a few steps: to compile well would take longer than they do.
QUICK = {"xla_backend_optimization_level": 0}
SIZES = (64, 2**20)  # bytes of the messages that are timed by themselves


def train(count: int, timeout: float = 120, **what: Any) -> dict[str, Any]:
    """Train in `count` new processes: losses, a digest of the weights of each, and when what was done.

    `what`: switches, system (as lists), rate, seed, x (steps, batch, 40) and y as nested lists.
    """
    found: dict[str, Any] = {"digests": []}
    with contextlib.closing(peers(__name__, count, {"what": what}, timeout)) as messages:
        for rank, message in messages:
            if "digest" in message:
                found["digests"].append(message["digest"])
            if rank == 0 and "result" in message:
                found |= message["result"]
    return found


def work(order: dict[str, Any], say: Callable[..., None]) -> None:
    """What a process of the group does."""
    devices.prepare()
    jax.config.update("jax_num_cpu_devices", 1)
    devices.connect(order["coordinator"], order["processes"], order["process"])
    what, mesh = order["what"], devices.mesh()
    switches, system = Switches(*what["switches"]), System(*what["system"])
    half, own, everywhere = bool(switches.half), PartitionSpec("workers"), PartitionSpec()
    x, y = np.array(what["x"], np.float32), np.array(what["y"], np.int32)
    numbers = {"rate": what["rate"], "steps": len(x)}
    given = {name: np.float32(value) for name, value in numbers.items()} | {"switches": switches}

    def program(f: Callable, inputs: Any, outputs: Any) -> Callable:
        inside = jax.shard_map(f, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)
        return jax.jit(inside, compiler_options=QUICK)

    def local(params: Any, scale: Any, x: Any, y: Any) -> Any:
        value, gradient = record.local_gradient(params, scale, (x, y), switches.extra_norm, half, system)
        return jax.tree.map(lambda a: a[None], (value, gradient))

    def together(value: Any, gradient: Any) -> Any:
        total = record.exchange(jax.tree.map(lambda a: a[0], gradient), system, "workers")
        mean = jax.lax.psum(value[0], "workers") / mesh.size
        return mean, jax.tree.map(lambda g: g.astype(jnp.float32) / mesh.size, total)

    gradient_of = program(local, (everywhere, everywhere, own, own), own)
    exchanged = program(together, (own, own), everywhere)
    updated = program(lambda state, gradient: record.update(state, gradient, given, half), everywhere, everywhere)
    barrier = program(lambda x: jax.lax.psum(x[0], "workers"), own, everywhere)
    here = multihost_utils.host_local_array_to_global_array(np.ones((1, 1), np.float32), mesh, own)
    mine = order["process"] * (x.shape[1] // mesh.size) + np.arange(x.shape[1] // mesh.size)
    begin = jax.jit(lambda seed: record.at_rest(seed, half, system, given), compiler_options=QUICK)
    state, losses, marks = _here(begin(np.uint32(what["seed"]))), [], []
    for step in range(len(x)):
        batch = multihost_utils.host_local_array_to_global_array((x[step, mine], y[step, mine]), mesh, own)
        clock = [time.perf_counter()]
        found = jax.block_until_ready(gradient_of(state[0], precision.scale_of(state[1]), *batch))
        clock.append(time.perf_counter())
        jax.block_until_ready(barrier(here))  # who waits for the others does not send yet
        clock.append(time.perf_counter())
        mean, gradient = _here(exchanged(*found))
        clock.append(time.perf_counter())
        state = _here(updated(state, gradient))  # as NumPy's, or the programs would be compiled again for JAX's
        marks.append([*clock, time.perf_counter()])
        losses.append(float(mean))
    weights = jax.tree.leaves(state[0])
    say(digest=float(sum(np.abs(leaf.astype(float)).sum() for leaf in weights)))
    result = {"losses": losses, "marks": np.diff(marks).tolist(), "alone": dict(_alone(mesh, own, program))}
    result["weights"] = [leaf.ravel().tolist() for leaf in weights]
    if order["process"] == 0:
        say(result=result)


def _here(tree: Any) -> Any:
    """What all processes have, as this one's NumPy arrays."""
    return jax.tree.map(lambda a: np.asarray(a.addressable_shards[0].data), tree)


def _alone(mesh: jax.sharding.Mesh, own: PartitionSpec, program: Callable) -> Iterator[tuple[int, float]]:
    """Seconds of an all-reduce of each size, the least of twenty."""
    reduce = program(lambda x: collectives.all_reduce(x[0], "workers", "ring")[None], own, own)
    for size in SIZES:
        x = multihost_utils.host_local_array_to_global_array(np.ones((1, size // 4), np.float32), mesh, own)
        seconds = []
        for _ in range(20):
            begin = time.perf_counter()
            jax.block_until_ready(reduce(x))
            seconds.append(time.perf_counter() - begin)
        yield size, min(seconds)


if __name__ == "__main__":
    serve(work)
