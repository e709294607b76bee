"""Asynchronous updates reach the loss of training on the joint batch.

The margin is fixed beforehand: the spread of the joint training's losses over three seeds.
"""

from __future__ import annotations

import random
import statistics
import time

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LinearLR

from benchmarks.support.parameter_server.jobs import packed_options
from benchmarks.support.parameter_server.thread_job import ThreadJob, open_servers

WORKERS, STEPS, SEEDS = 3, 100, (0, 1, 2)
BATCH, CLASSES, PIXELS = 16, 10, 64
TRAINING, SAMPLES = 1400, 1800
# Standard deviation of the pixels' noise, beside prototypes between 0 and 1.
NOISE = 0.6
# Longest emulated computation of a step, in seconds.
DELAY = 0.002


@pytest.fixture(scope="module")
def images() -> tuple[Tensor, Tensor]:
    """Noisy copies of ten prototypes, as large as scikit-learn's digits, with their classes."""
    generator = torch.Generator().manual_seed(0)
    prototypes = torch.rand(CLASSES, PIXELS, generator=generator)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return prototypes[y] + NOISE * torch.randn(SAMPLES, PIXELS, generator=generator), y


def make_model(seed: int) -> nn.Module:
    """Return a classifier; not for threads, which share torch's seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(PIXELS, 32), nn.ReLU(), nn.Linear(32, CLASSES))


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, LinearLR]:
    """Return an optimizer, and a schedule that ends at a learning rate of zero.

    With a constant rate, the last few gradients would decide how far a loss is from the least one.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer, LinearLR(optimizer, 1.0, 0.0, total_iters=STEPS)


def batch(images: tuple[Tensor, Tensor], seed: int, step: int, worker: int) -> list[Tensor]:
    """Return images and classes of a worker in a step."""
    generator = torch.Generator().manual_seed((seed * STEPS + step) * WORKERS + worker)
    chosen = torch.randint(TRAINING, (BATCH,), generator=generator)
    return [part[chosen] for part in images]


def validation_loss(model: nn.Module, images: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        return float(functional.cross_entropy(model(images[0][TRAINING:]), images[1][TRAINING:]))


def joint_loss(images: tuple[Tensor, Tensor], seed: int) -> float:
    """Train on the joint batch; return the loss on validation data."""
    model = make_model(seed)
    optimizer, schedule = make_optimizer(model)
    for step in range(STEPS):
        parts = [batch(images, seed, step, worker) for worker in range(WORKERS)]
        x, y = (torch.cat(part) for part in zip(*parts, strict=True))
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return validation_loss(model, images)


def server_loss(images: tuple[Tensor, Tensor], seed: int, **options: object) -> float:
    """Train with servers and unlike delays of the workers; return the loss of the result."""
    models = [make_model(seed) for _ in range(WORKERS)]
    with open_servers(2) as servers:
        job = ThreadJob(servers, WORKERS, **options)

        def work(worker: int) -> None:
            model, delays = models[worker], random.Random(seed * WORKERS + worker)
            parameters = dict(model.named_parameters())
            optimizer, schedule = make_optimizer(model)
            session = job.join(worker, parameters, optimizer)
            for step in range(STEPS):
                x, y = batch(images, seed, step, worker)
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                time.sleep(DELAY * delays.random())
                packed = packed_options(optimizer)
                for one in reversed(session.exchange.keys):
                    session.push(one.key.index, parameters[one.key.name].grad, packed)
                session.wait()
                session.land()
                # Servers step the optimizer; the schedule would warn that it was never called.
                optimizer._opt_called = True  # type: ignore[attr-defined]
                schedule.step()
            job.land_final(session, packed_options(optimizer))
            session.leave()

        job.run(work)
    return validation_loss(models[0], images)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"consistency": "ssp", "staleness": 2}, id="ssp"),
        pytest.param({"consistency": "asp"}, id="asp", marks=pytest.mark.exhaustive),
    ],
)
def test_asynchronous_training_converges(
    images: tuple[Tensor, Tensor], options: dict[str, object]
) -> None:
    joint = [joint_loss(images, seed) for seed in SEEDS]
    margin = max(joint) - min(joint)
    losses = [server_loss(images, seed, **options) for seed in SEEDS]
    assert statistics.mean(losses) <= statistics.mean(joint) + margin, (losses, joint)
    # Far below the loss of guesses, log(10), so the margin has a meaning.
    assert margin < 0.1 < functional.cross_entropy(torch.zeros(1, CLASSES), torch.zeros(1).long())
