"""`ActivationOffload(budget=...)`: training within a budget of device memory, with the same
gradients, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_dlres.callbacks.offloading import TrainingSteps
from lightning_dlres.memory.options import DEFAULT_ACTIONS, MemoryOptions
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.memory.profile.step_profile import StepProfile


class ActivationOffload(Callback):
    """Keeps device memory within a budget (Method A, A1 and A3 to A6).

    The first steps of every batch shape are measured, while all that autograd saves is away, so
    that they fit where any plan does. Then a plan says for each saved tensor whether it stays, is
    compressed (ZVC: zeros left out), goes to the host's memory or a disk and is brought back ahead
    of its use, is overwritten by a gradient as soon as it may be, or is computed again, at the
    least predicted time. Gradients are those of plain training, bit for bit; the LightningModule
    is not changed. Where the budget holds everything, nothing stays installed.

    Works on one device and with DDP; strategies that shard the model are refused.

    Attributes:
        plan: the latest plan; None before the measured steps are over.
        profile: what it was made from.

    Args:
        budget: What the device may hold in a step: bytes ("8GiB"), a share of the device's memory
            (0.9 or "90%"; on the CPU: of what is available), or "min" for as little as possible.
        saved_budget: What saved tensors alone may take there: bytes, or a share of what plain
            training would save. None: no limit of their own.
        host_budget: Bytes of pinned host memory for what leaves a GPU. None: four fifths of what
            is available.
        disk: Directory on a fast local disk for what the host has no room for. On the CPU this is
            where data go: None is the system's directory for temporary files there.
        disk_budget: Bytes on that disk. None: no limit.
        min_size: Smaller tensors stay.
        actions: Some of "compress", "offload", "reuse" and "recompute". "reuse" lets layers write
            their input's gradient into their input's memory where nobody else reads it. The last
            is off by default: a module that runs again in backward yields the same bits only if
            its forward depends on nothing but its inputs, weights and torch's random state.
            Modules that are seen to leave traces never run again; what a forward does outside of
            its module cannot be seen.
        profile_steps: Steps that are measured for a shape; the first one is slow for other reasons.
        exact: Whether modules are changed (reuse, recompute) only if, in one more step, they
            compute the same bits as before. False: rounding may differ.
        on_over_budget: What happens where no plan meets the budget for a batch, such as a larger
            one that comes late: "error", or "warn" to go on with the smallest peak that can be met.
        plan: A plan of an earlier run, or the path of the JSON that its `to_json` wrote. Steps that
            save what it knows follow it from the first one on; all others are measured.

    Raises:
        ConfigError: an argument is of no use; when `fit` starts: the strategy or device cannot
            work with it; after the measured steps: the budget cannot be met, with the smallest one
            that can.
    """

    def __init__(
        self,
        budget: int | float | str = 0.9,
        saved_budget: int | float | str | None = None,
        host_budget: int | str | None = None,
        disk: str | Path | None = None,
        disk_budget: int | str | None = None,
        min_size: int | str = "64KiB",
        actions: Sequence[str] = DEFAULT_ACTIONS,
        profile_steps: int = 2,
        exact: bool = True,
        on_over_budget: Literal["error", "warn"] = "error",
        plan: MemoryPlan | str | Path | None = None,
    ) -> None:
        super().__init__()
        self._options = MemoryOptions(
            budget,
            saved_budget,
            host_budget,
            disk,
            disk_budget,
            min_size,
            actions,
            profile_steps,
            exact,
            on_over_budget,
            plan,
        )
        self.training_steps: TrainingSteps | None = None

    @property
    def plan(self) -> MemoryPlan | None:
        """Return the latest plan."""
        offloader = self.training_steps.offloader if self.training_steps is not None else None
        return offloader.plan if offloader is not None else None

    @property
    def profile(self) -> StepProfile | None:
        """Return what the latest plan was made from."""
        offloader = self.training_steps.offloader if self.training_steps is not None else None
        return offloader.profile if offloader is not None else None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.training_steps = TrainingSteps(self._options, trainer, type(self).__name__)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.training_steps is not None:
            every = trainer.accumulate_grad_batches
            stepping = (batch_idx + 1) % every == 0 or trainer.is_last_batch
            self.training_steps.begin(pl_module, batch, stepping)

    @override
    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self.training_steps is not None:
            self.training_steps.end()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # A hook may have ended the epoch in the middle of a step.
        if self.training_steps is not None:
            self.training_steps.abandon()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.training_steps is not None:
            self.training_steps.abandon()

    @override
    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        if self.training_steps is not None:
            self.training_steps.abandon()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        line = self.training_steps.summary() if self.training_steps is not None else None
        if line is not None:
            rank_zero_info(line)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.training_steps is not None:
            self.training_steps.close()

    def __getstate__(self) -> dict[str, Any]:
        # What belongs to a run stays with it.
        return {**self.__dict__, "training_steps": None}
