"""Convergence of training with compressed gradients, against uncompressed gradients.

    python -m benchmarks.convergence                                     about 35 minutes
    python -m benchmarks.convergence --curves curves.json --plot losses.svg
    python -m benchmarks.convergence --quick   few steps: the figures mean little

Four ranks train a classifier of handwritten digits (scikit-learn) and a byte-level GPT, each with
SGD with momentum and with AdamW. Each training runs with three seeds. The spread of the validation
losses without compression, the largest minus the smallest, is the margin. An algorithm converges if
its mean loss exceeds the mean without compression by at most the margin. Controls drop all
compression errors, or those of the ranks or of the sums, instead of sending them later; they must
exceed the margin. Learning rates are small: an error that is sent later acts as a delayed gradient,
and large steps with delays diverge. `OneBitAdam` compresses momenta after a quarter of the steps;
it is compared with AdamW. The ranks run in one process (see benchmarks/support/virtual_ranks and
virtual_momentum). Needs scikit-learn.

`--plot` draws the losses over the steps, and over simulated time: that of steps with larger
gradients on a slow network. See benchmarks/support/convergence_plot.
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
        batch: Returns the inputs and targets of a rank in a step, given (seed, step, rank).
        loss: Returns the loss of a model, given (inputs, targets).
        validation: Returns the inputs and targets for validation.
        steps: Steps of a run.
        lr: Largest learning rate, by optimizer: "sgd" or "adamw".
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    validation: Callable[[], tuple[Tensor, Tensor]]
    steps: int
    lr: dict[str, float]


@dataclass(frozen=True)
class Run:
    """Algorithm that synchronises gradients or momenta, with its options.

    Attributes:
        algorithm: Name of the codec, or "raw".
        options: Options of the codec.
        feedback: Arguments of `VirtualRanks` that switch off a part of the error feedback.
        momentum: Momentum of SGD.
        is_one_bit_adam: True if the codec compresses the momentum of `OneBitAdam`, not gradients.
    """

    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    feedback: dict[str, bool] = field(default_factory=dict)
    momentum: float = 0.9
    is_one_bit_adam: bool = False


@dataclass(frozen=True)
class Curve:
    """Losses of a training.

    Attributes:
        training: Mean loss of the ranks' batches in each step.
        validation: Loss on the validation data after the last step.
    """

    training: list[float]
    validation: float


PLAIN, ONE_BIT_ADAM = convergence_plot.PLAIN, convergence_plot.ONE_BIT_ADAM
# Algorithms that run with both optimizers, and those that run with SGD only.
ANY_OPTIMIZER = {name: Run(name) for name in ("fp16", "bf16", "fp8", "int8", "qsgd")}
SGD_ONLY = {name: Run(name) for name in ("onebit", "tbq", "terngrad", "graddrop")}
# Runs that drop an error instead of sending it later, and so must not converge.
CONTROLS = {
    "onebit, no error feedback": Run(
        "onebit", feedback={"has_error_feedback": False, "has_sum_feedback": False}
    ),
    "onebit, no residual of the ranks": Run("onebit", feedback={"has_error_feedback": False}),
    "onebit, no residual of the sum": Run("onebit", feedback={"has_sum_feedback": False}),
}
MOMENTUM_CONTROLS = {
    name.replace("onebit", ONE_BIT_ADAM): replace(run, is_one_bit_adam=True)
    for name, run in CONTROLS.items()
}
# Runs by optimizer and name.
RUNS = {
    "sgd": {PLAIN: Run("raw"), **ANY_OPTIMIZER, **SGD_ONLY, **CONTROLS},
    "adamw": {
        PLAIN: Run("raw"),
        **ANY_OPTIMIZER,
        ONE_BIT_ADAM: Run("onebit", is_one_bit_adam=True),
        **MOMENTUM_CONTROLS,
    },
}
# Largest loss that is recorded, also for NaN and infinity, which JSON has not.
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
        Checks; the result of `tenths` for each run and seed; and the training losses of each step,
        as means over the seeds, by task, optimizer and algorithm.
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
    """Return the check of an algorithm, which must converge, or of a control, which must not.

    Args:
        name: Name of the run.
        excess: Mean loss above that without compression, over the margin.
    """
    is_control = name in CONTROLS or name in MOMENTUM_CONTROLS
    return at_least(excess, 1.0) if is_control else at_most(excess, 1.0)


def train(task: Task, optimizer_name: str, run: Run, seed: int) -> Curve:
    """Train with a seed, and return the losses."""
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
        gradients, rank_losses = [], []
        for rank in range(RANKS):
            loss = task.loss(model, task.batch(seed, step, rank))
            values = torch.autograd.grad(loss, list(parameters.values()))
            gradients.append(dict(zip(parameters, values, strict=True)))
            rank_losses.append(recorded(loss.detach()))
        losses.append(statistics.mean(rank_losses))
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
    """Return the ranks' optimizers, and a function that updates the model from their gradients.

    With `OneBitAdam`, each rank has an optimizer. Otherwise all ranks have the same mean gradients,
    and share one.
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
    """Return the mean training loss of each tenth of the steps, and last the validation loss."""
    losses = curve.training
    size = max(len(losses) // 10, 1)
    parts = [statistics.mean(losses[i : i + size]) for i in range(0, len(losses), size)]
    return [*parts, curve.validation]


def digits_task(steps: int) -> Task:
    """Return the task of classifying 1,797 images of 8 x 8 pixels."""
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
    """Return windows of training text and of validation text, uint8[windows, context + 1].

    There are at most 256 windows for validation.
    """
    data = SourceTextDataModule(context=context, batch_size=256, max_bytes="1MiB")
    data.setup("fit")
    training = torch.stack([data.training[i] for i in range(len(data.training))])
    return training, next(iter(data.val_dataloader()))


def gpt_task(steps: int) -> Task:
    """Return the task of a byte-level GPT that predicts the source of Python's standard library."""
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
