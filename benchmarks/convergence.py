"""Convergence of training with compressed gradients, against uncompressed gradients.

    python -m benchmarks.convergence           about 25 minutes
    python -m benchmarks.convergence --quick   few steps: the figures mean little

Four ranks train a classifier of handwritten digits (scikit-learn) and a byte-level GPT, with
SGD with momentum and with AdamW. The spread of three runs without compression, which differ in
their seeds, is the margin: an algorithm converges if its mean loss on the validation data exceeds
that without compression by less than the margin. Two controls drop an error instead of sending it
later; they must exceed the margin. Steps are small, since what is sent later acts as a delay, and
large steps with delays diverge. The ranks run in one process (see
benchmarks/support/virtual_ranks). Needs scikit-learn.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.support.command import Figures, flags
from benchmarks.support.report import Check, at_least, at_most, conclude, table
from benchmarks.support.virtual_ranks import VirtualRanks
from lightning_dlres.demos.byte_gpt import ByteGPT
from lightning_dlres.demos.source_text import SourceTextDataModule

NAME = "convergence"
RANKS, SEEDS = 4, (0, 1, 2)


@dataclass(frozen=True)
class Task:
    """A model with data.

    Attributes:
        make: Makes the model.
        batch: Returns the batch of a rank in a step, given (seed, step, rank).
        loss: Returns the loss of a batch.
        validation: Returns the validation data.
        steps: Steps of a run.
        lr: Learning rate by optimizer.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    validation: Callable[[], tuple[Tensor, Tensor]]
    steps: int
    lr: dict[str, float]


@dataclass(frozen=True)
class Run:
    """Way of synchronising gradients.

    Attributes:
        algorithm: Name of the codec, or "raw".
        options: Options of the codec.
        feedback: Arguments of `VirtualRanks` that drop errors.
        momentum: Momentum of SGD; a codec with momentum of its own leaves none to the optimizer.
    """

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    feedback: dict[str, bool] = field(default_factory=dict)
    momentum: float = 0.9


PLAIN = "uncompressed"
# Algorithms that "auto" may choose for SGD with momentum, and for AdamW.
ANY_OPTIMIZER = {name: Run(name) for name in ("fp16", "bf16", "fp8", "int8", "qsgd")}
SGD_ONLY = {name: Run(name) for name in ("onebit", "tbq", "terngrad", "graddrop")}
CONTROLS = {
    "onebit, no residual of the ranks": Run("onebit", feedback={"has_error_feedback": False}),
    "onebit, no residual of the sum": Run("onebit", feedback={"has_sum_feedback": False}),
}
RUNS = {
    "sgd": {PLAIN: Run("raw"), **ANY_OPTIMIZER, **SGD_ONLY, **CONTROLS},
    "adamw": {PLAIN: Run("raw"), **ANY_OPTIMIZER},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, and return the exit status."""
    quick = flags(NAME, __doc__, argv).quick
    torch.set_num_threads(1)
    tasks = {}
    try:
        tasks["digits"] = digits_task(4 if quick else 1000)
    except ImportError as error:
        print(f"without digits: {error}. Install scikit-learn.", file=sys.stderr)
    tasks["gpt"] = gpt_task(4 if quick else 500)
    conclude(NAME, *compare(tasks, SEEDS[:2] if quick else SEEDS))
    return 0


def compare(tasks: dict[str, Task], seeds: Sequence[int]) -> Figures:
    """Train with every algorithm on every task."""
    rows: list[list[object]] = []
    checks: dict[str, Check] = {}
    raw: dict[str, list[list[float]]] = {}
    for task_name, task in tasks.items():
        for optimizer, runs in RUNS.items():
            losses: dict[str, list[float]] = {}
            for name, run in runs.items():
                start = time.perf_counter()
                curves = [train(task, optimizer, run, seed) for seed in seeds]
                losses[name] = [curve[-1] for curve in curves]
                raw[f"{task_name}, {optimizer}, {name}"] = curves
                print(
                    f"{task_name}, {optimizer}, {name}: "
                    f"{' '.join(f'{loss:.4f}' for loss in losses[name])} "
                    f"({time.perf_counter() - start:.0f} s)",
                    flush=True,
                )
            plain = losses.pop(PLAIN)
            margin, base = max(plain) - min(plain), statistics.mean(plain)
            for name, values in losses.items():
                excess = (statistics.mean(values) - base) / margin
                rows.append([task_name, optimizer, name, statistics.mean(values), excess])
                key = f"{task_name}, {optimizer}, {name}: excess over margin"
                checks[key] = outcome(name, excess)
    print(table(["task", "optimizer", "algorithm", "loss", "excess / margin"], rows))
    return checks, raw


def outcome(name: str, excess: float) -> Check:
    """Return the check of an algorithm, or of a control, which must fail to converge."""
    return at_least(excess, 1.0) if name in CONTROLS else at_most(excess, 1.0)


def train(task: Task, optimizer_name: str, run: Run, seed: int) -> list[float]:
    """Return the mean training loss of each tenth of a run, and last the validation loss."""
    torch.manual_seed(seed)
    model = task.make()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    lr = task.lr[optimizer_name]
    optimizer: torch.optim.Optimizer
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=run.momentum)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, total_steps=task.steps, pct_start=0.1, cycle_momentum=False
    )
    ranks = VirtualRanks(parameters, RANKS, run.algorithm, run.options, **run.feedback)
    losses = []
    for step in range(task.steps):
        gradients = []
        for rank in range(RANKS):
            loss = task.loss(model, task.batch(seed, step, rank))
            values = torch.autograd.grad(loss, list(parameters.values()))
            gradients.append(dict(zip(parameters, values, strict=True)))
            losses.append(float(loss.detach()))
        for name, mean in ranks.mean(gradients).items():
            parameters[name].grad = mean
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        final = float(task.loss(model, task.validation()))
    tenth = max(len(losses) // 10, 1)
    return [statistics.mean(losses[i : i + tenth]) for i in range(0, len(losses), tenth)] + [final]


def digits_task(steps: int) -> Task:
    """Return a classifier of 1,797 images of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    training, held_out = order[:1400], order[1400:]

    def batch(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed((seed * steps + step) * RANKS + rank)
        chosen = training[torch.randint(len(training), (16,), generator=generator)]
        return x[chosen], y[chosen]

    return Task(
        make=lambda: nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        ),
        batch=batch,
        loss=lambda model, data: functional.cross_entropy(model(data[0]), data[1]),
        validation=lambda: (x[held_out], y[held_out]),
        steps=steps,
        lr={"sgd": 0.01, "adamw": 1e-3},
    )


@cache
def texts(context: int) -> tuple[Tensor, Tensor]:
    """Return windows of training and of validation text."""
    data = SourceTextDataModule(context=context, batch_size=256, max_bytes="1MiB")
    data.setup("fit")
    training = torch.stack([data.training[i] for i in range(len(data.training))])
    return training, next(iter(data.val_dataloader()))


def gpt_task(steps: int) -> Task:
    """Return a byte-level GPT on the source of Python's standard library."""
    context = 64

    def batch(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
        training = texts(context)[0]
        generator = torch.Generator().manual_seed((seed * steps + step) * RANKS + rank)
        windows = training[torch.randint(len(training), (4,), generator=generator)].long()
        return windows[:, :-1], windows[:, 1:]

    def validation() -> tuple[Tensor, Tensor]:
        windows = texts(context)[1].long()
        return windows[:, :-1], windows[:, 1:]

    def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(data[0]).flatten(0, 1), data[1].flatten())

    return Task(
        make=lambda: ByteGPT(width=64, depth=2, heads=2, context=context),
        batch=batch,
        loss=loss,
        validation=validation,
        steps=steps,
        lr={"sgd": 0.02, "adamw": 3e-3},
    )


if __name__ == "__main__":
    raise SystemExit(main())
