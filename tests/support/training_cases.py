"""Training runs on a single device and through the pipeline, and the differences between them."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.distributed import FileStore
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres import (
    HeteroPipeStrategy,
    PeerLostError,
    PipelinePlan,
    ProfileConfig,
    UnsupportedStepError,
)
from tests.support.models import QUIET, Samples
from tests.support.parity import relative
from tests.support.rank_pool import RankContext

# A short profile, for tests to which the plan does not matter.
QUICK = ProfileConfig(repeats=1, seconds=0.0)
# Time that the ranks wait for the plain runs on rank 0, in seconds.
_PLAIN_SECONDS = 100
# Number of calls of `differences_in`, by the directory of the job. Each call needs its own store.
_calls = Counter[Path]()


class Classifier(LightningModule):
    """Network of a few layers, with a loss that is a mean over samples.

    Attributes:
        observed: Numbers that hooks of a subclass record; they are compared.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net: nn.Module = nn.Sequential(
            nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5)
        )
        self.observed: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def batches() -> DataLoader[Any]:
    """Return a loader of four batches of eight samples."""
    return DataLoader(Samples(False, 32), batch_size=8)


@dataclass(frozen=True)
class Case:
    """Training run to compare.

    Attributes:
        make: Makes the model.
        schedule: Option `schedule` of the strategy.
        expected_schedule: Schedule at the end of the run; None accepts any.
        data: Makes the loader.
        options: Further arguments of the strategy.
        trainer: Further arguments of the Trainer.
        callbacks: Makes the callbacks of a run.
    """

    make: Callable[[], LightningModule]
    schedule: str = "auto"
    expected_schedule: str | None = None
    data: Callable[[], Any] = batches
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[Callback]] | None = None


@dataclass
class Fitted:
    """Result of a training run.

    Attributes:
        schedule: Schedule at the end; empty for a plain run.
        steps: Number of optimizer steps.
        logged: Logged values, by name.
        state: State dict of the model.
        observed: Numbers that hooks of the model recorded.
    """

    schedule: str
    steps: int
    logged: dict[str, float]
    state: dict[str, Tensor]
    observed: list[float]


def trainer_for(context: RankContext | None, **options: Any) -> Trainer:
    """Return a quiet Trainer for a pipeline over the job's ranks, or for one device.

    Args:
        context: The job's ranks; None for one device.
        **options: Arguments of the strategy, and others of the Trainer. By default a plan is given,
            so that nothing is measured; `plan=None` measures.
    """
    strategy_options = (
        "schedule",
        "module",
        "plan",
        "microbatches",
        "stages",
        "profile",
        "memory_limit",
        "gpu_transfers",
        "evaluation",
        "deferred_init",
        "save_distributed_checkpoint",
        "timeout",
    )
    chosen = {name: options.pop(name) for name in strategy_options if name in options}
    place: dict[str, Any] = {"devices": 1}
    if context is not None:
        replicas = tuple((rank, rank + 1) for rank in range(0, context.world_size, 2))
        defaults = {
            "stages": 2 if chosen.get("plan", "default") is None else "auto",
            "microbatches": 3,
            "timeout": 30,
            "profile": QUICK,
            "plan": PipelinePlan(replicas=replicas, split=(2, 3)),
        }
        place = {
            "strategy": HeteroPipeStrategy(**{**defaults, **chosen}),
            "devices": context.world_size,
            "plugins": [context.environment],
        }
    return Trainer(**{**QUIET, "max_epochs": 2, "accelerator": "cpu", **place, **options})


def fit(context: RankContext | None, case: Case) -> Fitted:
    """Train one case; on one device without a context."""
    seed_everything(3, verbose=False)
    model, strategy = case.make(), {**case.options, "schedule": case.schedule}
    callbacks = {} if case.callbacks is None else {"callbacks": case.callbacks()}
    trainer = trainer_for(context, **strategy, **case.trainer, **callbacks)
    trainer.fit(model, case.data())
    return Fitted(
        str(getattr(trainer.strategy, "schedule", "")),
        trainer.global_step,
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        {name: value.detach().clone() for name, value in model.state_dict().items()},
        list(getattr(model, "observed", ())),
    )


def expect_refusal(context: RankContext, case: Case, words: str) -> None:
    """Check that a case ends with an error that has these words, a pattern.

    A rank that has not met the error itself names that of another one.
    """
    with pytest.raises((UnsupportedStepError, PeerLostError), match=words):
        fit(context, case)


def differences_in(
    context: RankContext, cases: Mapping[str, Case], tolerance: float = 1e-5
) -> dict[str, list[str]]:
    """Run every case on one device and through the pipeline; return the differences of each."""
    # The plain runs come first: once a process group exists, their metrics would be reduced over
    # it. Rank 0 trains for all ranks.
    _calls[context.tmp] += 1
    shared = FileStore(str(context.tmp / f"plain{_calls[context.tmp]}"), context.world_size)
    if context.rank == 0:
        plain = {name: fit(None, case) for name, case in cases.items()}
        shared.set("fitted", pickle.dumps(plain))
    shared.wait(["fitted"], timedelta(seconds=_PLAIN_SECONDS))
    expected = pickle.loads(shared.get("fitted"))
    return {
        name: _differences(fit(context, case), expected[name], case, tolerance)
        for name, case in cases.items()
    }


def no_differences_in(cases: Mapping[str, Case], ranks: int = 2) -> list[dict[str, list[str]]]:
    """Return the results of `differences_in` on all ranks if nothing differs."""
    return [{name: [] for name in cases}] * ranks


def _differences(actual: Fitted, expected: Fitted, case: Case, tolerance: float) -> list[str]:
    differences = []
    if case.expected_schedule not in (None, actual.schedule):
        differences.append(f"schedule {actual.schedule}")
    if actual.steps != expected.steps:
        differences.append(f"{actual.steps} steps, not {expected.steps}")
    numbers = [(name, actual.logged.get(name), v) for name, v in expected.logged.items()]
    unexpected = sorted(actual.logged.keys() - expected.logged.keys())
    differences += [f"{name}: logged only in the pipeline" for name in unexpected]
    if len(actual.observed) != len(expected.observed):
        differences.append(f"observed {len(actual.observed)}, not {len(expected.observed)}")
    numbers += [
        (f"observed {i}", a, b)
        for i, (a, b) in enumerate(zip(actual.observed, expected.observed, strict=False))
    ]
    for name, a, b in numbers:
        if a is None or abs(a - b) > tolerance * max(1.0, abs(b)):
            differences.append(f"{name}: {a}, not {b}")
    for name in sorted(expected.state.keys() ^ actual.state.keys()):
        differences.append(
            f"{name}: only in the {'expected' if name in expected.state else 'actual'} state"
        )
    for name, value in expected.state.items():
        if name in actual.state and relative(actual.state[name], value) > tolerance:
            differences.append(f"{name}: {actual.state[name]}, not {value}")
    return differences
