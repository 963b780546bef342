"""Rounding ten million float32 numbers to a narrow format, against a copy of them and against emulations in PyTorch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch

from benchmarks.timing import Row, interleave, row, rows
from dlscale import precision

COUNT = 10_000_000
KEY = jax.random.key(0)


def torch_emulation(x: torch.Tensor, form: precision.Float) -> torch.Tensor:
    """What one writes by hand: scale each number by its own power of two, round, scale back, and let overflow be."""
    _, exponent = torch.frexp(x)
    exponent = exponent.clamp(min=2 - form.bias) - 1 - form.mantissa_bits
    rounded = torch.ldexp(torch.round(torch.ldexp(x, -exponent)), exponent)
    return torch.where(rounded.abs() > form.max, rounded * torch.inf, rounded)


def qpytorch() -> Callable[..., torch.Tensor] | str:
    """QPyTorch's `float_quantize`, or why it cannot be used.

    Its C++ is compiled at the first import, which takes a minute and a compiler.
    """
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja, from its wheel
    try:
        from qtorch.quant import float_quantize
    except (ImportError, OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return float_quantize


def compare(name: str, their_dtype: torch.dtype, float_quantize: Callable[..., torch.Tensor] | None) -> Iterator[Row]:
    form = precision.FORMATS[name]
    x = jax.random.normal(KEY, (COUNT,))
    x_torch = torch.from_numpy(np.array(x))
    copy, add = jax.jit(jnp.copy), jax.jit(lambda x: x + 1)
    cast = jax.jit(lambda x: x.astype(name).astype(jnp.float32))
    ours = np.asarray(precision.quantize(x, form))
    for theirs in (cast(x), x_torch.to(their_dtype).float(), torch_emulation(x_torch, form)):
        np.testing.assert_array_equal(ours, theirs)
    candidates = {
        "dlscale quantize": lambda: precision.quantize(x, form).block_until_ready(),
        "dlscale quantize, stochastic": lambda: precision.quantize(x, form, "stochastic", KEY).block_until_ready(),
        "JAX, copy": lambda: copy(x).block_until_ready(),
        "JAX, x + 1": lambda: add(x).block_until_ready(),
        "JAX, cast there and back": lambda: cast(x).block_until_ready(),
        "PyTorch, cast there and back": lambda: x_torch.to(their_dtype).float(),
        "PyTorch, written by hand": lambda: torch_emulation(x_torch, form),
    }
    task = f"{COUNT:,} numbers to {name}"
    if float_quantize is not None:
        bits = {"exp": form.exponent_bits, "man": form.mantissa_bits}
        candidates["QPyTorch, nearest"] = lambda: float_quantize(x_torch, rounding="nearest", **bits)
        candidates["QPyTorch, stochastic"] = lambda: float_quantize(x_torch, rounding="stochastic", **bits)
        wrong = (float_quantize(x_torch, rounding="nearest", **bits).numpy() != ours).sum()
        note = "" if wrong == 0 else f"not {name}: its results differ"
        yield row(task, "QPyTorch, otherwise rounded", np.array([wrong]), "numbers", note=note)
    yield from rows(task, interleave(candidates, rounds=5), "ms", 1e3)


def run() -> Iterator[Row]:
    dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float8_e5m2": torch.float8_e5m2}
    emulation = qpytorch()
    if isinstance(emulation, str):
        yield row("QPyTorch", "could not be used", np.array([0]), "", note=emulation)
        emulation = None
    for name, dtype in dtypes.items():
        yield from compare(name, dtype, emulation)
