"""Objects that all training steps of a run share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from lightning_dlres.core import rng
from lightning_dlres.pipeline.execute.layer_settings import LayerSettings
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors
from lightning_dlres.strategies.hetero_pipe.calls.changes import StateOfCall
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates
from lightning_dlres.strategies.hetero_pipe.replay.trainer_settings import settings_owners
from lightning_dlres.strategies.hetero_pipe.replay.untracked_state import UntrackedState
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attributes import UserState
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import is_data_source
from lightning_dlres.strategies.hetero_pipe.step.gradient_reads import GradientsOfEarlierBatches
from lightning_dlres.strategies.hetero_pipe.step.pipelined_module import PipelinedModule
from lightning_dlres.strategies.hetero_pipe.step.pipelined_step import PipelinedStep

# The module or the step that is cut into stages.
Pipelined = PipelinedModule | PipelinedStep
# Takes a batch and the sizes of its parts in samples, and returns the parts.
SplitBatch = Callable[[Any, Sequence[int]], Sequence[Any]]


@dataclass
class StepContext:
    """Objects that all steps of a run share.

    Attributes:
        module: The LightningModule.
        pipelined: The module that is cut into stages.
        metrics: The metrics of the LightningModule, of callbacks, and of what these refer to.
        device: Device of this rank.
        precision: Returns the precision plugin's context, in which the step runs.
        split_batch: The user's function that cuts a batch, described at `SplitBatch`; None for the
            built-in one.
        layer_tensors: Tensors that layers made before training and that user code still holds.
        settings: Settings of the layers, which a step must not change.
        state: The user's state, which a step may change.
        gradients: The gradients of earlier batches.
    """

    module: LightningModule
    pipelined: Pipelined
    metrics: MetricStates
    device: torch.device
    precision: Callable[[], AbstractContextManager[Any]]
    split_batch: SplitBatch | None = None
    layer_tensors: LayerTensors = field(default_factory=LayerTensors)

    def __post_init__(self) -> None:
        # Restores the random state from the start of the current step.
        self.rewind_random_state: Callable[[], None] = rng.rewinder(self.device)
        # Arguments of the current step; empty before the first.
        self.step_arguments: tuple[Any, ...] = ()
        self.gradients = GradientsOfEarlierBatches(self.module)
        self.pipeline(self.pipelined)

    def pipeline(self, pipelined: Pipelined) -> None:
        """Set the module that is cut into stages, with other layers than before."""
        self.pipelined = pipelined
        self._state_of_call: StateOfCall | None = None
        layers = pipelined.layers
        trainer = self.module.trainer
        shared = (module for _, module in layers.non_pipelined_modules())
        self.settings = LayerSettings(self.module, layers.modules, shared, pipelined.called_modules)
        self.state = UserState(
            layers.non_pipelined_modules,
            layers.modules,
            trainer.callbacks,  # type: ignore[attr-defined]
            lambda: settings_owners(trainer),
        )

    def state_of_call(self) -> StateOfCall | None:
        """Return the state that the pipelined module can read; None for a step that is cut."""
        pipelined = self.pipelined
        if self._state_of_call is None and not pipelined.is_step:
            self._state_of_call = StateOfCall(
                pipelined.called_modules, pipelined.layers.modules, self.state
            )
        return self._state_of_call

    def untracked_state(self) -> UntrackedState:
        """Return, as it is now, the state that a step can change and that no run undoes."""
        module, layers = self.module, self.pipelined.layers
        callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
        roots = [
            ("self", module),
            *((f"trainer.callbacks[{i}]", c) for i, c in enumerate(callbacks)),
        ]
        settings = settings_owners(module.trainer)
        roots += [item for item in settings.items() if is_data_source(item[1])]
        owners = [module, *(m for _, m in layers.non_pipelined_modules()), *callbacks]
        return UntrackedState(roots, [type(owner) for owner in owners], layers.modules)

    def trial_args(self, batch: Any) -> tuple[Any, ...]:
        """Return the arguments of `training_step` for a trial on a batch, by Lightning's rule: the
        batch, and 0 as its index if the step takes one."""
        takes_index = is_param_in_hook_signature(self.module.training_step, "batch_idx", min_args=2)
        return (batch, 0) if takes_index else (batch,)

    def begin_step(self, args: tuple[Any, ...]) -> None:
        """Note the arguments of a training step, and the random state from which it starts."""
        self.step_arguments, self.rewind_random_state = args, rng.rewinder(self.device)

    def register_metrics(self) -> None:
        """Register all metrics in the user's state, also those that are no submodules.

        Called before every step, because user code may make metrics at any time.
        """
        self.metrics.register(self.state.all_metrics())

    def all_metrics(self) -> list[Metric]:
        """Return the metrics of the LightningModule, of callbacks, and of what these refer to."""
        self.register_metrics()
        return list(self.metrics.metrics.values())
