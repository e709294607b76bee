"""Adapter through which a profiler runs the layers and the loss of the user's LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dlres.pipeline.profile.cluster import Cluster
from lightning_dlres.pipeline.profile.config import ProfileConfig
from lightning_dlres.pipeline.profile.profiled_model import LossRun, ProfiledModel
from lightning_dlres.pipeline.profile.profiler import profile_for_cluster
from lightning_dlres.pipeline.profile.run_profile import RunProfile
from lightning_dlres.strategies.hetero_pipe.data.profile_samples import read_samples
from lightning_dlres.strategies.hetero_pipe.gradient_zeroing import may_drop_old_gradients
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates
from lightning_dlres.strategies.hetero_pipe.step.cutting import cut_on_samples, with_inputs
from lightning_dlres.strategies.hetero_pipe.step.module_search import (
    find_pipelined_module,
    require_layers,
)
from lightning_dlres.strategies.hetero_pipe.step.step_context import SplitBatch, StepContext
from lightning_dlres.strategies.hetero_pipe.step.user_step import LightningStep


def profiled_model(context: StepContext) -> ProfiledModel:
    """Return the context's LightningModule in the form that a profiler runs."""
    layers = context.pipelined.layers

    def start_loss(batch: Any) -> LossRun:
        args = context.trial_args(batch)
        return LightningStep(context, args, keeps_batch=True, is_trial=True)

    return ProfiledModel(
        root=context.module,
        names=layers.names,
        modules=layers.modules,
        bind=context.pipelined.bind,
        device=context.device,
        non_pipelined=layers.non_pipelined_parameters(),
        start_loss=start_loss,
        warn=rank_zero_warn,
    )


def gradient_copies(trainer: Trainer, module: LightningModule) -> int:
    """Return the number of gradients that a parameter has at once.

    It is 2 if the old gradients still exist while the schedule computes new ones, because Lightning
    zeroes them later. It is 1 if the old gradients are dropped when a step begins.
    """
    return 1 if may_drop_old_gradients(trainer, module) else 2


def profile_single_process(
    trainer: Trainer,
    module: LightningModule,
    *,
    path: str | None,
    split_batch: SplitBatch | None,
    config: ProfileConfig,
    microbatches: int,
    cluster: Cluster,
    factors: Sequence[float],
) -> RunProfile:
    """Return a profile for the devices of a cluster file, measured in this process alone.

    Args:
        trainer: Trainer that is about to train `module` on a single device.
        module: The LightningModule.
        path: Name of the module to pipeline; None chooses the only candidate.
        split_batch: The user's function that cuts a batch; None cuts along the first dimension.
        config: Options of the profile.
        microbatches: Number of micro-batches of a batch.
        cluster: Devices and links of the cluster file.
        factors: For each kind of device, the time of a layer on it divided by the time on this
            device.

    Raises:
        ConfigError: If a layer does not fit into the memory of this host.
    """
    pipelined, device = find_pipelined_module(module, path), trainer.strategy.root_device
    precision = trainer.precision_plugin.train_step_context
    context = StepContext(module, pipelined, MetricStates(module), device, precision, split_batch)
    samples = read_samples(trainer, context, config, microbatches)
    try:
        context.pipeline(cut_on_samples(context, samples))
    except Exception as error:
        # A module that cannot be cut is one layer, as in training. Its code may raise anything.
        if pipelined.is_step:
            require_layers(pipelined, 1, f"{error}")
    samples = with_inputs(context, samples)
    return profile_for_cluster(
        profiled_model(context),
        samples,
        config,
        layer_context=precision,
        optimizers=trainer.optimizers,
        gradient_copies=gradient_copies(trainer, module),
        cluster=cluster,
        factors=factors,
    )
