"""A loss surface, per point, and Lanczos' method for the Hessian's largest eigenvalue, against the same in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import numpy as np
import optax
import torch
from jax.flatten_util import ravel_pytree
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.timing import Row, interleave, rows
from benchmarks.train_speed import torch_lenet, torch_mlp
from dlscale.lab import data, devices, models
from dlscale.loss_landscapes import hessian_eigenvalues, plane, random_direction

STEPS = 100  # of Lanczos' method: as many as `hessian_eigenvalues` takes when no tolerance ends it sooner


def torch_surface(
    net: nn.Module, x: torch.Tensor, y: torch.Tensor, directions: torch.Tensor, at: np.ndarray, batch_size: int
) -> None:
    batches = list(zip(x.split(batch_size), y.split(batch_size), strict=True))
    origin = parameters_to_vector(net.parameters()).detach().clone()
    with torch.no_grad():
        for b in at:
            for a in at:
                vector_to_parameters(origin + a * directions[0] + b * directions[1], net.parameters())
                sum(nn.functional.cross_entropy(net(x), y, reduction="sum").item() for x, y in batches) / len(y)
        vector_to_parameters(origin, net.parameters())


def torch_eigenvalue(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Lanczos' method with full reorthogonalisation; the graph of the gradient is made once, as PyHessian does it."""
    params = list(net.parameters())

    def flat(tensors: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    gradient = flat(torch.autograd.grad(nn.functional.cross_entropy(net(x), y), params, create_graph=True))
    vector = torch.randn(len(gradient))
    vector /= vector.norm()
    basis, alphas, betas = torch.empty(0, len(gradient)), [], []
    for _ in range(STEPS):
        basis = torch.cat([basis, vector[None]])
        image = flat(torch.autograd.grad(gradient @ vector, params, retain_graph=True))
        alphas.append(float(vector @ image))
        for _ in range(2):
            image = image - (basis @ image) @ basis
        betas.append(float(image.norm()))
        vector = image / image.norm()
    return np.linalg.eigvalsh(np.diag(alphas) + np.diag(betas[:-1], 1) + np.diag(betas[:-1], -1))[-1]


def to_torch(params: dict, net: nn.Module) -> None:
    """Give `net` our parameters, so that both look at the same place."""
    with torch.no_grad():
        for layer, ours in zip([m for m in net if hasattr(m, "weight")], params.values(), strict=True):
            w = np.asarray(ours["w"])
            if w.ndim == 2 and layer.weight.shape[1] == 256:  # torch flattens channels first
                w = w.reshape(4, 4, 16, -1).transpose(2, 0, 1, 3).reshape(256, -1)
            layer.weight.copy_(torch.from_numpy(w.transpose((3, 2, 0, 1) if w.ndim == 4 else (1, 0)).copy()))
            layer.bias.copy_(torch.from_numpy(np.asarray(ours["b"]).copy()))


def compare(
    name: str, model: models.Model, net: nn.Module, x: np.ndarray, y: np.ndarray, side: int, rounds: int, batch: int
) -> Iterator[Row]:
    """A surface of side × side points; the time per point hardly depends on their number. Both go batch by batch."""

    def loss(params: models.Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    params = model.init(jax.random.key(0))
    to_torch(params, net)
    keys = jax.random.split(jax.random.key(1))
    directions = [random_direction(key, params) for key in keys]
    arrays, at = jax.device_put((x, y)), np.linspace(-1, 1, side)
    images = x.transpose(0, 3, 1, 2) if x.ndim == 4 else x
    x_torch, y_torch = torch.from_numpy(images.copy()), torch.from_numpy(y.astype(np.int64))
    directions_torch = torch.from_numpy(np.stack([ravel_pytree(d)[0] for d in directions]))
    ours = float(hessian_eigenvalues(loss, params, 1, keys[0], arrays, tolerance=0)[0])
    theirs = torch_eigenvalue(net, x_torch, y_torch)
    if abs(ours - theirs) > 0.01 * abs(ours):
        raise AssertionError(f"The largest eigenvalue is {ours:.4g} here and {theirs:.4g} in PyTorch.")

    def with_threads(threads: int, task: Callable[..., object], *args: object) -> Callable[[], object]:
        def run() -> object:
            torch.set_num_threads(threads)
            return task(net, x_torch, y_torch, *args)

        return run

    threads = sorted({1, devices.cores()})

    def batched(params: object, *data: jax.Array) -> jax.Array:
        pieces = [array.reshape(-1, batch, *array.shape[1:]) for array in data]
        return jax.lax.map(lambda piece: loss(params, *piece), pieces).mean()

    surface = {"dlscale.loss_landscapes.plane": lambda: plane(batched, params, *directions, at, at, arrays)}
    eigenvalue = {
        "dlscale.loss_landscapes.hessian_eigenvalues": lambda: hessian_eigenvalues(
            loss, params, 1, keys[0], arrays, tolerance=0
        )
    }
    for count in threads:
        surface[f"PyTorch, {count} threads"] = with_threads(count, torch_surface, directions_torch, at, batch)
        eigenvalue[f"PyTorch, {count} threads"] = with_threads(count, torch_eigenvalue)
    per_point = {task: seconds / len(at) ** 2 for task, seconds in interleave(surface, rounds).items()}
    what = f"{name} on {len(x):,} examples"
    yield from rows(f"Loss surface, {what}: per point", per_point, "ms", 1e3)
    yield from rows(f"Largest eigenvalue, {what}, {STEPS} Lanczos steps", interleave(eigenvalue, rounds), "ms", 1e3)


def run() -> Iterator[Row]:
    signals, mnist = data.load("mnist1d"), data.load("mnist")
    signal = signals.x_train, signals.y_train
    image = mnist.x_train[:200], mnist.y_train[:200]  # a hundred Hessian products of more would take minutes
    for sizes in ((40, 32, 32, 10), (40, 128, 128, 10)):
        name = f"{'-'.join(map(str, sizes))} MLP"
        yield from compare(name, models.mlp(sizes), torch_mlp(sizes), *signal, side=11, rounds=3, batch=len(signal[0]))
    # 100 images fit into a cache, more do not: both libraries are faster so
    yield from compare("LeNet", models.lenet(), torch_lenet(), *image, side=7, rounds=3, batch=100)
