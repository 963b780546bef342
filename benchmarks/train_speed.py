"""A sweep of 32 settings, and one epoch of LeNet, against PyTorch and against JAX called step by step."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import jax
import numpy as np
import optax
import torch
from torch import nn

from benchmarks.timing import Row, interleave, rows
from dlscale.lab import data, devices, models, train

RATES = np.logspace(-2.5, -0.5, 32).tolist()


def torch_mlp(sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        layers += [nn.ReLU()] * (i > 0) + [nn.Linear(inputs, outputs)]
    return nn.Sequential(*layers)


def torch_steps(net: nn.Module, x: torch.Tensor, y: torch.Tensor, batch_size: int, steps: int, rate: float) -> None:
    """Plain eager training, as in PyTorch's own tutorials, from data that is in memory already."""
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    done = 0
    while done < steps:
        for batch in torch.randperm(len(x))[: len(x) // batch_size * batch_size].view(-1, batch_size)[: steps - done]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
            done += 1


def jax_steps(model: models.Model, dataset: data.Dataset, batch_size: int, steps: int):
    """The usual JAX loop: one compiled step, called from Python. Returns a function of the learning rate."""
    x, y = jax.device_put((dataset.x_train, dataset.y_train))

    @jax.jit
    def step(params, batch, rate):
        loss, gradient = jax.value_and_grad(
            lambda p: optax.softmax_cross_entropy_with_integer_labels(model.apply(p, x[batch]), y[batch]).mean()
        )(params)
        return jax.tree.map(lambda w, g: w - rate * g, params, gradient), loss

    def run(rate: float) -> None:
        params, order = model.init(jax.random.key(0)), np.random.default_rng(0)
        for _ in range(steps):
            params, loss = step(params, order.integers(0, len(x), batch_size), np.float32(rate))
        loss.block_until_ready()

    return run


def sweep(sizes: tuple[int, ...], batch_size: int, few: int = 4) -> list[Row]:
    """1,000 steps for each of 32 rates. The slow candidates run `few` of the 32, which only spares time."""
    signals, model = data.load("mnist1d"), models.mlp(sizes)
    x, y = torch.from_numpy(signals.x_train.copy()), torch.from_numpy(signals.y_train.astype(np.int64))
    epochs = 1000 * batch_size // len(signals.x_train)
    steps = epochs * (len(signals.x_train) // batch_size)
    budget = {"batch_size": batch_size, "epochs": epochs, "eval_every": epochs, "progress": False}
    step_loop = jax_steps(model, signals, batch_size, steps)

    def eager(threads: int) -> None:
        torch.set_num_threads(threads)
        for rate in RATES[:few]:
            torch_steps(torch_mlp(sizes), x, y, batch_size, steps, rate)

    seconds = interleave(
        {
            "dlscale.lab.train.sweep": lambda: train.sweep(
                model, signals, optax.sgd, seed=0, learning_rate=RATES, **budget
            ),
            "JAX, a compiled step in a loop": lambda: [step_loop(rate) for rate in RATES[:few]],
            "PyTorch eager, 1 thread": lambda: eager(1),
            f"PyTorch eager, {devices.cores()} threads": lambda: eager(devices.cores()),
        },
        rounds=3,
    )
    per_setting = {name: s / (len(RATES) if name.startswith("dlscale") else few) for name, s in seconds.items()}
    title = f"Sweep, {'-'.join(map(str, sizes))} MLP on mnist1d, batch {batch_size}, {steps} steps: per setting"
    return rows(title, per_setting, "ms", 1e3)


def torch_lenet() -> nn.Sequential:
    features = [nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)]
    return nn.Sequential(*features, nn.Flatten(), *head)


def lenet() -> list[Row]:
    mnist, model = data.load("mnist"), models.lenet()
    x = torch.from_numpy(mnist.x_train.transpose(0, 3, 1, 2).copy())
    y, steps = torch.from_numpy(mnist.y_train.astype(np.int64)), len(mnist.x_train) // 128
    budget = {"batch_size": 128, "epochs": 1, "learning_rate": 0.1, "progress": False}

    def eager(threads: int) -> None:
        torch.set_num_threads(threads)
        torch_steps(torch_lenet(), x, y, 128, steps, 0.1)

    seconds = interleave(
        {
            "dlscale.lab.train.fit (with its test)": lambda: train.fit(model, mnist, optax.sgd, **budget),
            "PyTorch eager, 1 thread": lambda: eager(1),
            f"PyTorch eager, {devices.cores()} threads": lambda: eager(devices.cores()),
        },
        rounds=5,
    )
    return rows("LeNet, one epoch of 8,000 digits, batch 128", seconds, "ms", 1e3)


def run() -> Iterator[Row]:
    yield from sweep((40, 32, 32, 10), batch_size=32)
    yield from sweep((40, 128, 128, 10), batch_size=64)
    yield from lenet()
