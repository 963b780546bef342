"""The two things that JAX has no public name for, in one place; tests notice when a new JAX has moved them."""

from typing import Any

from jax._src import core
from jax._src.lib import _jax


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
