"""Training of a case, the same for all contenders: model, batches, steps and micro-batches."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.support.capture_models import family_cases
from benchmarks.support.capture_models.case import (
    MICRO_SAMPLES,
    SAMPLES,
    Batch,
    CaptureCase,
    call,
    cut,
    seeded,
)

# Parts of names of settings that are probabilities, or widths, of random numbers.
_RANDOM = ("drop", "jitter")
# Patches of an image of the case vit_mae, which chooses some of them at random.
_PATCHES = 16
# Help for the peer with a model, beside that with all models; it gets the first that it can export.
AS_IT_IS, EAGER = "as it is", "attention in plain operations"
# Learning rates of cases that diverge at the usual one, and so amplify rounding.
_LEARNING_RATES = {
    "convnext_tiny": 1e-3,
    "resnext50_32x4d": 1e-4,
    "swin_v2_t": 1e-3,
    "vit_b_16": 1e-3,
}
# References. The first is the usual one.
BATCH, MICRO_BATCHES, ONE_MICRO_BATCH = "batch", "micro-batches", "batch, microbatches=1"


@dataclass(frozen=True, kw_only=True)
class Task:
    """Training of a case by a contender.

    Attributes:
        name: Name of the case.
        family: Its family.
        directory: Directory for the contenders' reports.
        stages: Number of stages, and of processes of a pipeline.
        schedule: Schedule of our pipeline.
        is_even: True cuts ours into equal numbers of layers, and not by a plan.
        is_named: False lets our strategy choose what is cut; True names the whole model.
        is_cut: True trains plainly on micro-batches, also where whole batches are the reference.
        steps: Number of steps.
    """

    name: str
    family: str
    directory: str
    stages: int = 2
    schedule: str = "auto"
    is_even: bool = False
    is_named: bool = True
    is_cut: bool = False
    steps: int = 20

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Return the task of a process's argument."""
        return cls(**json.loads(text))

    def json(self) -> str:
        """Return the argument of a process."""
        return json.dumps(asdict(self))

    def case(self) -> CaptureCase:
        """Return the case."""
        return family_cases(self.family)[self.name]

    def batches(self) -> list[Batch]:
        """Return one batch for each step."""
        case = self.case()
        return [
            _with_noise(case.name, case.batch(SAMPLES, seed), seed) for seed in range(self.steps)
        ]


class CaseModule(L.LightningModule):
    """Model of a case.

    Args:
        case: The case.
        cut_for: References for which the loss is the mean of the losses of micro-batches.

    Attributes:
        net: The model.
        reference: Plain training that a pipeline must equal.
        losses: Loss of each step.
    """

    def __init__(self, case: CaptureCase, *, cut_for: Collection[str] = ()) -> None:
        super().__init__()
        self.case, self.net = case, make_net(case)
        self.reference = reference(case, self.net)
        self._is_cut = self.reference in cut_for
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        if not self._is_cut:
            return self.case.loss(call(self.net, batch))
        parts = cut(batch, MICRO_SAMPLES)
        return torch.stack([self.case.loss(call(self.net, part)) for part in parts]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return make_optimizer(self.case.name, self.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Keep the loss."""
        self.losses.append(float(outputs["loss"]))


def make_net(case: CaptureCase) -> nn.Module:
    """Return the model of a case in training mode, with seeded parameters and without dropout."""
    if case.name == "vilt":
        torch.multinomial = _first_choices
    torch.manual_seed(0)
    net = case.make().train()
    configs = [module.config for module in net.modules() if hasattr(module, "config")]
    for owner in [*net.modules(), *configs]:
        for name, value in vars(owner).items():
            if isinstance(value, float) and any(part in name for part in _RANDOM):
                setattr(owner, name, 0.0)
        is_dropout = isinstance(owner, nn.modules.dropout._DropoutNd)
        if is_dropout or type(owner).__name__ == "StochasticDepth":
            owner.p = 0.0
    return net


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum for a case."""
    return torch.optim.SGD(parameters, lr=_LEARNING_RATES.get(name, 1e-2), momentum=0.9)


def make_loader(batches: list[Batch]) -> DataLoader[Batch]:
    """Return a loader of whole batches."""
    return DataLoader(batches, batch_size=1, collate_fn=_only)  # type: ignore[arg-type]


def reference(case: CaptureCase, net: nn.Module) -> str:
    """Return the plain training that a pipeline must equal.

    - A case whose samples do not affect each other: training on the whole batch.
    - A model with BatchNorm, which sees one micro-batch at a time: training on the mean of the
      losses of the same micro-batches.
    - Another case whose samples affect each other, for instance by its loss: training on the whole
      batch, which is then the only micro-batch.
    """
    if case.is_per_sample:
        return BATCH
    is_batch_norm = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in net.modules())
    return MICRO_BATCHES if is_batch_norm else ONE_MICRO_BATCH


def microbatches(chosen: str) -> int:
    """Return the number of micro-batches of a pipeline, given its reference."""
    return 1 if chosen == ONE_MICRO_BATCH else SAMPLES // MICRO_SAMPLES


def make_trainer(task: Task, **options: Any) -> L.Trainer:
    """Return a silent Trainer on the CPU for one pass over the batches."""
    return L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def _with_noise(name: str, batch: Batch, seed: int) -> Batch:
    """Return a batch with the random numbers that its model would draw in each forward."""
    if name != "vit_mae":
        return batch
    assert isinstance(batch, dict)
    noise = torch.rand(SAMPLES, _PATCHES, generator=seeded(seed))
    return {**batch, "noise": noise}


def _first_choices(weights: Tensor, count: int, replacement: bool = False) -> Tensor:
    """Return the first choices, in place of random ones: ViLT puts its patches in random order."""
    return torch.arange(count, device=weights.device) % len(weights)


def _only(batches: list[Batch]) -> Batch:
    return batches[0]
