"""Convergence of training with compressed gradients, against uncompressed gradients.

    python -m benchmarks.convergence                                     about 35 minutes
    python -m benchmarks.convergence --curves curves.json --plot losses.svg
    python -m benchmarks.convergence --quick   few steps: the figures mean little

Four ranks train a classifier of handwritten digits (scikit-learn) and a byte-level GPT, with
SGD with momentum and with AdamW. The spread of three runs without compression, which differ in
their seeds, is the margin: an algorithm converges if its mean loss on the validation data exceeds
that without compression by less than the margin. Two controls drop an error instead of sending it
later; they must exceed the margin. Steps are small, since what is sent later acts as a delay, and
large steps with delays diverge. `OneBitAdam` compresses momenta after a quarter of the steps; it is
compared with AdamW. The ranks run in one process (see benchmarks/support/virtual_ranks and
virtual_momentum). Needs scikit-learn.

`--plot` draws the losses over the steps, and over the time of the steps on a slow network; see
benchmarks/support/convergence_plot.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.support import convergence_plot
from benchmarks.support.command import flags
from benchmarks.support.convergence_plot import Curves
from benchmarks.support.report import Check, at_least, at_most, conclude, table
from benchmarks.support.virtual_momentum import MomentumRanks
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
        is_one_bit_adam: The codec compresses the momentum of `OneBitAdam`, not gradients.
    """

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    feedback: dict[str, bool] = field(default_factory=dict)
    momentum: float = 0.9
    is_one_bit_adam: bool = False


@dataclass(frozen=True)
class Curve:
    """Losses of a run.

    Attributes:
        training: Mean loss of the ranks' batches in each step.
        validation: Loss on the validation data after the last step.
    """

    training: list[float]
    validation: float


PLAIN, ONE_BIT_ADAM = convergence_plot.PLAIN, convergence_plot.ONE_BIT_ADAM
# Algorithms that "auto" may choose for SGD with momentum, and for AdamW.
ANY_OPTIMIZER = {name: Run(name) for name in ("fp16", "bf16", "fp8", "int8", "qsgd")}
SGD_ONLY = {name: Run(name) for name in ("onebit", "tbq", "terngrad", "graddrop")}
CONTROLS = {
    "onebit, no residual of the ranks": Run("onebit", feedback={"has_error_feedback": False}),
    "onebit, no residual of the sum": Run("onebit", feedback={"has_sum_feedback": False}),
}
MOMENTUM_CONTROLS = {
    name.replace("onebit", ONE_BIT_ADAM): replace(run, is_one_bit_adam=True)
    for name, run in CONTROLS.items()
}
RUNS = {
    "sgd": {PLAIN: Run("raw"), **ANY_OPTIMIZER, **SGD_ONLY, **CONTROLS},
    "adamw": {
        PLAIN: Run("raw"),
        **ANY_OPTIMIZER,
        ONE_BIT_ADAM: Run("onebit", is_one_bit_adam=True),
        **MOMENTUM_CONTROLS,
    },
}
# Loss of a run that diverged. JSON has no infinity.
_DIVERGED = 1000.0
# Weight decay of AdamW and `OneBitAdam`.
_WEIGHT_DECAY = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    """Train, print, and return the exit status."""
    arguments = flags(
        NAME,
        __doc__,
        argv,
        quick="few steps: the figures mean little",
        files={
            "curves": "write the loss of each step of each algorithm as JSON",
            "plot": "draw the losses as SVG",
        },
    )
    quick = arguments.quick
    torch.set_num_threads(1)
    tasks = {}
    try:
        tasks["digits"] = digits_task(4 if quick else 1000)
    except ImportError as error:
        print(f"without digits: {error}. Install scikit-learn.", file=sys.stderr)
    tasks["gpt"] = gpt_task(4 if quick else 500)
    checks, raw, curves = compare(tasks, SEEDS[:2] if quick else SEEDS)
    if arguments.curves:
        arguments.curves.write_text(json.dumps(curves))
    if arguments.plot:
        arguments.plot.write_text(convergence_plot.draw(curves))
    conclude(NAME, checks, raw)
    return 0


def compare(
    tasks: dict[str, Task], seeds: Sequence[int]
) -> tuple[dict[str, Check], dict[str, Any], Curves]:
    """Train with every algorithm on every task.

    Returns:
        Checks; the losses of each tenth of each run; and the mean losses over the seeds, by task,
        optimizer and algorithm.
    """
    rows: list[list[object]] = []
    checks: dict[str, Check] = {}
    raw: dict[str, list[list[float]]] = {}
    means: Curves = {}
    for task_name, task in tasks.items():
        for optimizer, runs in RUNS.items():
            losses: dict[str, list[float]] = {}
            panel = means.setdefault(task_name, {}).setdefault(optimizer, {})
            for name, run in runs.items():
                start = time.perf_counter()
                curves = [train(task, optimizer, run, seed) for seed in seeds]
                losses[name] = [curve.validation for curve in curves]
                raw[f"{task_name}, {optimizer}, {name}"] = [tenths(curve) for curve in curves]
                training = zip(*(curve.training for curve in curves), strict=True)
                panel[name] = [round(statistics.mean(step), 4) for step in training]
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
    return checks, raw, means


def outcome(name: str, excess: float) -> Check:
    """Return the check of an algorithm, or of a control, which must fail to converge."""
    is_control = name in CONTROLS or name in MOMENTUM_CONTROLS
    return at_least(excess, 1.0) if is_control else at_most(excess, 1.0)


def train(task: Task, optimizer_name: str, run: Run, seed: int) -> Curve:
    """Return the losses of a run."""
    torch.manual_seed(seed)
    model = task.make()
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    lr = task.lr[optimizer_name]
    optimizers, step_of_ranks = ranks_of(task, optimizer_name, run, model)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, lr, total_steps=task.steps, pct_start=0.1, cycle_momentum=False
        )
        for optimizer in optimizers
    ]
    losses = []
    for step in range(task.steps):
        gradients, of_step = [], []
        for rank in range(RANKS):
            loss = task.loss(model, task.batch(seed, step, rank))
            values = torch.autograd.grad(loss, list(parameters.values()))
            gradients.append(dict(zip(parameters, values, strict=True)))
            of_step.append(recorded(loss.detach()))
        losses.append(statistics.mean(of_step))
        step_of_ranks(gradients)
        for schedule in schedules:
            schedule.step()
    with torch.no_grad():
        return Curve(losses, recorded(task.loss(model, task.validation())))


def recorded(loss: Tensor) -> float:
    """Return a loss, or the largest recorded one if training has diverged."""
    value = float(loss)
    # The comparison with NaN is false.
    return value if value < _DIVERGED else _DIVERGED


def ranks_of(
    task: Task, optimizer_name: str, run: Run, model: nn.Module
) -> tuple[Sequence[torch.optim.Optimizer], Callable[[Sequence[Mapping[str, Tensor]]], None]]:
    """Return the ranks' optimizers, and a function that updates the model.

    Ranks whose gradients are averaged have the same step, and share an optimizer.
    """
    lr = task.lr[optimizer_name]
    if run.is_one_bit_adam:
        options = {
            "lr": lr,
            "weight_decay": _WEIGHT_DECAY,
            "freeze_step": max(1, int(convergence_plot.WARM_UP_PART * task.steps)),
        }
        momentum_ranks = MomentumRanks(model, RANKS, run.algorithm, options, **run.feedback)
        return momentum_ranks.optimizers, momentum_ranks.step
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer: torch.optim.Optimizer
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=run.momentum)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=_WEIGHT_DECAY)
    ranks = VirtualRanks(parameters, RANKS, run.algorithm, run.options, **run.feedback)

    def step(gradients: Sequence[Mapping[str, Tensor]]) -> None:
        for name, mean in ranks.mean(gradients).items():
            parameters[name].grad = mean
        optimizer.step()

    return [optimizer], step


def tenths(curve: Curve) -> list[float]:
    """Return the mean training loss of each tenth of a run, and last the validation loss."""
    losses = curve.training
    size = max(len(losses) // 10, 1)
    parts = [statistics.mean(losses[i : i + size]) for i in range(0, len(losses), size)]
    return [*parts, curve.validation]


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
