"""What JAX has no public name for, or renames, in one place; tests notice when a new JAX has moved it."""

from collections.abc import Mapping
from typing import Any

import jax
from jax._src import core
from jax._src.lib import _jax

BEFORE_0_11 = jax.__version_info__ < (0, 11)
OLD_FUSION = {"xla_cpu_use_fusion_emitters": False} if BEFORE_0_11 else {}  # compiles faster; later XLA lacks it


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """How many arguments of a traced `scan` stay fixed, and how many are carried."""
    if BEFORE_0_11:
        return params["num_consts"], params["num_carry"]
    fixed, carry, _ = params["ft_in"].unpack()
    return len(fixed), len(carry)


def under_vmap(axis_name: str) -> bool:
    """Is this the axis of a `jax.vmap` that is being traced, and not one of devices?"""
    trace = core.trace_ctx.trace
    while trace is not None and getattr(getattr(trace, "axis_data", None), "name", None) != axis_name:
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def listen_on(host: str) -> None:
    """Let processors' collectives listen on this host's address when JAX starts, which asks for them once.

    Without it they listen on the address that belongs to the machine's name, for all who can reach it.
    """
    make = _jax.make_gloo_tcp_collectives

    def make_once(**options: Any) -> Any:
        _jax.make_gloo_tcp_collectives = make
        return make(hostname=host, **options)

    _jax.make_gloo_tcp_collectives = make_once
