"""Set-up of the runner of a rank's steps, with its stage, its runtime and its process groups."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import pairwise

import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_dlres.codecs.gradient import gradient_codec
from lightning_dlres.codecs.gradient.contract import require_contract
from lightning_dlres.core.comm.device_transfers import nccl_identity
from lightning_dlres.core.comm.direct_link import DirectLink, direct_pairs, open_direct_links
from lightning_dlres.core.comm.mailbox import Channel
from lightning_dlres.core.trace import Tracer
from lightning_dlres.pipeline.execute.buffers import BufferSync
from lightning_dlres.pipeline.execute.compressed_gradients import CompressedGradientSync
from lightning_dlres.pipeline.execute.gradients import GradientSync, make_groups
from lightning_dlres.pipeline.execute.optimizers import require_owned
from lightning_dlres.pipeline.execute.replica_compression import (
    ReplicaCompression,
)
from lightning_dlres.pipeline.execute.runtime import Runtime
from lightning_dlres.pipeline.plan.schedules.registry import AUTO
from lightning_dlres.pipeline.stage.stage import Stage
from lightning_dlres.strategies.connection import Connection
from lightning_dlres.strategies.few_bits import warn_about_few_bits
from lightning_dlres.strategies.hetero_pipe.deployment import Deployment
from lightning_dlres.strategies.hetero_pipe.evaluation.evaluator import Evaluator
from lightning_dlres.strategies.hetero_pipe.evaluation.whole_model import WholeModel
from lightning_dlres.strategies.hetero_pipe.gradient_zeroing import may_drop_old_gradients
from lightning_dlres.strategies.hetero_pipe.options import PipeOptions
from lightning_dlres.strategies.hetero_pipe.plain_steps import PlainSteps
from lightning_dlres.strategies.hetero_pipe.precision import clipping_over_stages, enabled_scaler
from lightning_dlres.strategies.hetero_pipe.step.gradient_reads import gradient_read_warning
from lightning_dlres.strategies.hetero_pipe.step_runner import StepRunner

# Function that makes the gradient synchronisation from the trainable parameters of each layer of
# the stage, and the non-pipelined parameters.
SyncFactory = Callable[[list[list[nn.Parameter]], list[nn.Parameter]], GradientSync]


def make_runner(
    deployment: Deployment,
    *,
    options: PipeOptions,
    precision: Precision,
    tracer: Tracer,
    barrier: Callable[[], None],
    undo: ExitStack,
) -> StepRunner | PlainSteps:
    """Return the runner of this rank's steps; called by all ranks.

    Args:
        deployment: The model on this rank.
        options: Options of the strategy.
        precision: Precision plugin of the Trainer.
        tracer: Gets a span for every computation and transfer.
        barrier: Waits for all ranks.
        undo: Exit stack that reverts all changes outside of the model; closed at the run's end.
    """
    context, connection = deployment.context, deployment.connection
    if options.is_plain_training(connection.world_size):
        return PlainSteps(deployment.module, context.precision, tracer)
    plan, stage, layers = deployment.plan, deployment.stage, deployment.layers
    indices = plan.layers_of(stage)
    modules = [layers.modules[index] for index in indices]
    trainable, non_pipelined = layers.trainable(indices), layers.non_pipelined_parameters()
    timeout, check = options.timeout_seconds, connection.check
    groups = make_groups(plan, deployment.owners, timedelta(seconds=timeout))
    for group in groups.values():
        undo.callback(dist.destroy_process_group, group)
    _open_direct_links(deployment, options.gpu_transfers, undo)
    compression = _open_compression(deployment, options=options, precision=precision, undo=undo)
    deployment.compression = compression

    def make_sync(
        trainable: list[list[nn.Parameter]], non_pipelined: list[nn.Parameter]
    ) -> GradientSync:
        make = (
            GradientSync
            if compression is None
            else partial(CompressedGradientSync, compression=compression)
        )
        return make(
            trainable,
            non_pipelined,
            owners=deployment.owners,
            groups=groups,
            stage=stage,
            timeout=timeout,
            check=check,
            tracer=tracer,
        )

    def changed_in_forward() -> list[Tensor]:
        written = deployment.written_in_forward
        buffers = [buffer for module in modules for buffer in module.buffers()]
        return buffers + [p for module in modules for p in module.parameters() if p in written]

    buffers = BufferSync(
        changed_in_forward,
        group=groups.get((stage,)) if len(plan.replicas) > 1 else None,
        source=plan.replicas[0][stage],
        timeout=timeout,
        check=check,
    )
    runtime = Runtime(
        plan=plan,
        rank=connection.rank,
        stage=Stage(
            [context.pipelined.bind(i, module) for i, module in zip(indices, modules, strict=True)],
            trainable,
            first_layer=indices.start,
            device=context.device,
            context=context.precision,
            recomputed={
                position: modules[position]
                for position, layer in enumerate(indices)
                if layer in plan.recompute
            },
            by_layer=len(plan.replicas) > 1,
            chain=context.pipelined.chain,
            between=layers.trainable_between(),
        ),
        non_pipelined=non_pipelined,
        sync=make_sync(trainable, non_pipelined),
        buffers=buffers,
        mailbox=connection.mailbox,
        tracer=tracer,
        microbatches=options.num_microbatches(plan.world_size, plan.microbatches),
        slowdown=options.slowdown(connection.rank, connection.world_size),
    )

    def sum_over_stages(value: float) -> float:
        # Every replica has the same values. All ranks add those of the first replica, in stage
        # order: another order would round differently and make replicas diverge.
        values = connection.gather([value])
        return sum(values[rank][0] for rank in deployment.plan.replicas[0])

    undo.enter_context(clipping_over_stages(precision, deployment.owners, stage, sum_over_stages))
    undo.enter_context(
        gradient_read_warning(deployment.module, deployment.optimizers, rank_zero_warn)
    )
    context.gradients.are_zeroed = lambda: may_drop_old_gradients(
        deployment.module.trainer, deployment.module
    )
    whole = WholeModel(
        layers,
        deployment.owners,
        plan,
        connection,
        deployment.attributes,
        device=context.device,
        limit=options.memory_limit_of(connection.rank, connection.world_size),
    )
    evaluator = Evaluator(
        context,
        whole,
        options.evaluation,
        connection.any_rank,
        runtime.meet,
        runtime.microbatches,
    )
    runner = StepRunner(
        context,
        runtime,
        evaluator,
        schedule=options.first_schedule,
        may_change_schedule=options.schedule == AUTO,
        seed=deployment.seed,
        barrier=barrier,
        log_rank_zero=rank_zero_info,
        on_schedule_change=deployment.follow_schedule,
        update_trainable=_TrainableUpdater(deployment, runtime, make_sync).update,
    )
    # Calls outside of steps (a summary, generated samples) go through the pipeline on all ranks.
    undo.enter_context(context.pipelined.intercepted(runner.answer, evaluator.runs_here))
    return runner


def _open_direct_links(deployment: Deployment, gpu_transfers: str, undo: ExitStack) -> None:
    """Open the links by which neighbouring stages exchange messages from GPU to GPU; called by all
    ranks.

    Args:
        deployment: The model on this rank.
        gpu_transfers: The option of the strategy.
        undo: Exit stack that is closed at the run's end, and then closes the links.
    """
    if gpu_transfers != "nccl":
        return
    connection, device = deployment.connection, deployment.context.device
    neighbours = [pair for ranks in deployment.plan.replicas for pair in pairwise(ranks)]
    gpus = {
        rank: (identifier, version)
        for rank, (identifier, version) in enumerate(connection.gather(nccl_identity(device)))
        if version
    }
    pairs = direct_pairs(neighbours, gpus)
    others = [pair for pair in neighbours if pair not in pairs]
    if others:
        rank_zero_warn(
            "gpu_transfers='nccl' needs a GPU of its own and the same version of NCCL on both "
            f"ranks. Messages between the ranks {others} go through host memory."
        )
    links = open_direct_links(
        connection.mailbox,
        pairs,
        device,
        forward=Channel.ACTIVATION,
        backward=Channel.GRADIENT,
        backend=gpu_transfers,
    )
    for link in links:
        undo.callback(_close_link, link, connection)


def _close_link(link: DirectLink, connection: Connection) -> None:
    link.close(orderly=not connection.failed)


def _open_compression(
    deployment: Deployment, *, options: PipeOptions, precision: Precision, undo: ExitStack
) -> ReplicaCompression | None:
    """Return the compression between replicas, or None if there is none; called by all ranks.

    Args:
        deployment: The model on this rank.
        options: Options of the strategy.
        precision: Precision plugin of the Trainer.
        undo: Exit stack that is closed at the run's end, and then ends the compression.
    """
    plan, connection = deployment.plan, deployment.connection
    is_training = bool(deployment.optimizers)
    if options.gradient_codec is None or len(plan.replicas) == 1 or not is_training:
        return None
    codec = gradient_codec(options.gradient_codec)
    require_contract(codec)
    if not codec.suits_adam:
        warn_about_few_bits("gradient_codec", codec.name, deployment.optimizers, fix="SGD")
    compression = ReplicaCompression(
        codec,
        layers=deployment.layers,
        owners=deployment.owners,
        plan=plan,
        rank=connection.rank,
        timeout=options.timeout_seconds,
        check=connection.check,
        undoes_windows=enabled_scaler(precision) is not None,
    )
    undo.callback(lambda: compression.close(orderly=not connection.failed))
    return compression


class _TrainableUpdater:
    """Updater of the runtime's trainable parameters when the user freezes or unfreezes some.

    Args:
        deployment: The model on this rank.
        runtime: The runtime to update.
        make_sync: Makes the gradient synchronisation for new trainable parameters.
    """

    def __init__(self, deployment: Deployment, runtime: Runtime, make_sync: SyncFactory) -> None:
        self._deployment, self._runtime, self._make_sync = deployment, runtime, make_sync
        self._requires_grad = self._read_requires_grad()

    def update(self) -> None:
        """Set the runtime's trainable parameters if any `requires_grad` has changed.

        Raises:
            ConfigError: If an optimizer has got a parameter that is not the model's.
        """
        deployment = self._deployment
        for optimizer in deployment.optimizers:
            # The user's hooks may add parameter groups at any time.
            require_owned(optimizer, deployment.owners, type(deployment.module).__name__)
        requires_grad = self._read_requires_grad()
        if requires_grad == self._requires_grad:
            return
        self._requires_grad = requires_grad
        layers = deployment.layers
        trainable = layers.trainable(deployment.plan.layers_of(deployment.stage))
        non_pipelined = layers.non_pipelined_parameters()
        self._runtime.set_trainable(
            trainable,
            non_pipelined,
            self._make_sync(trainable, non_pipelined),
            layers.trainable_between(),
        )

    def _read_requires_grad(self) -> list[bool]:
        owners, stage = self._deployment.owners, self._deployment.stage
        return [p.requires_grad for p, stages in owners.items() if stage in stages]
