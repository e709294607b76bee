"""Strategy `dlres_hetero_pipe`: pipeline and data parallel training of an unchanged
LightningModule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres import _compat
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.deferred.recording import deferred_init as deferred
from lightning_dlres.pipeline.execute.optimizers import set_state_device
from lightning_dlres.pipeline.execute.partition import has_meta_tensors
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.profile.config import ProfileConfig
from lightning_dlres.strategies.capabilities import MeasuredRun, ReportSections
from lightning_dlres.strategies.hetero_pipe.checkpoints import PartitionedStrategy
from lightning_dlres.strategies.hetero_pipe.data.loaders import share_loader, unsharded_loaders
from lightning_dlres.strategies.hetero_pipe.data.sharding import undo_sharding
from lightning_dlres.strategies.hetero_pipe.deployment import Deployment, is_left_partitioned
from lightning_dlres.strategies.hetero_pipe.evaluation.whole_model import Evaluation
from lightning_dlres.strategies.hetero_pipe.options import MemoryLimit, PipeOptions, Recompute
from lightning_dlres.strategies.hetero_pipe.plain_steps import PlainSteps
from lightning_dlres.strategies.hetero_pipe.precision import (
    enabled_scaler,
    loss_scale,
    overflow_shared,
)
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates, metric_sync_disabled
from lightning_dlres.strategies.hetero_pipe.report_sections import pipeline_sections
from lightning_dlres.strategies.hetero_pipe.runner_setup import make_runner
from lightning_dlres.strategies.hetero_pipe.step.module_search import find_pipelined_module
from lightning_dlres.strategies.hetero_pipe.step.single_device_view import sees_single_device
from lightning_dlres.strategies.hetero_pipe.step.step_context import SplitBatch, StepContext
from lightning_dlres.strategies.hetero_pipe.step_runner import StepRunner
from lightning_dlres.strategies.hetero_pipe.trainer_adaptations import (
    adapted_trainer,
    refusing_stop_iteration,
)
from lightning_dlres.strategies.hetero_pipe.unsupported_callbacks import refuse_unsupported

PrecisionContext = Callable[[], AbstractContextManager[Any]]


class HeteroPipeStrategy(PartitionedStrategy):
    """Strategy that trains one model over several devices of different speed.

    A *replica* of the model has one device per stage and works as a pipeline. Several replicas
    train data parallel. The loader's batch is the optimizer's batch under every plan. It is cut
    into micro-batches, and results are those of single-device training. Rank 0 reads the data for
    all ranks. Each rank holds the parameters and the optimizer state of its stage only. Checkpoints
    are ordinary single-device Lightning checkpoints.

    Args:
        stages: Number of stages of a replica; must divide the number of devices. "auto" takes the
            number that is fastest in the simulator, and at least two on several devices. If nothing
            is measured, all devices form one replica. 1 means data parallel training only.
        microbatches: Number of micro-batches of a batch. A smaller batch is cut into single
            samples. "auto": four per device, or an uncut batch on one device. Random numbers in
            the layers (dropout) depend on this number, and on nothing else of the plan.
        schedule: "gpipe" computes the loss once over the whole batch, which is exact for any loss.
            "1f1b" holds fewer activations and computes the loss per micro-batch. Checks on real
            batches show if that is exact; if not, the run ends with an error. "auto" takes 1f1b
            and falls back to gpipe if it is not exact. Any other name is that of a schedule
            registered with `register_schedule`.
        module: Name of the module to cut into stages, of any class, or "training_step" for a step
            that calls several modules. None chooses the only candidate, and else the step.
        device_map: Ranks of every replica in stage order, such as [[0, 2], [1, 3]]. None lets the
            planner choose, and takes consecutive ranks if nothing is measured.
        plan: A `PipelinePlan`, or the path of its JSON file, which you may edit. Layers and links
            are then not measured.
        split_batch: Function that gets (batch, sizes) and returns the batch in parts of these
            sizes. Needed under 1f1b for batches that are more than tensors with samples along the
            first dimension.
        emulate_speed: For demos and tests on one machine: relative speed of every rank, above 0 and
            up to 1.0, the fastest. Slower ranks sleep after computing.
        memory_limit: Bytes, or text such as "8GiB", that the model may take on a device: one for
            all ranks, or one per rank. It covers weights, gradients, optimizer state, and saved
            activations. None: nine tenths of the free memory of each GPU, or of the host for its
            CPU ranks together. If no plan meets it, the error names the smallest one that works.
        recompute: "auto" runs layers again before their backward, instead of keeping saved tensors,
            where the memory limit needs it; "never": none; "always": all. Results are the same.
        gradient_codec: Name of the codec that compresses the gradients of layers between replicas,
            such as "int8" or "fp16"; None compresses none. Gradients below 16 KiB, in float64, of
            tied parameters or outside of the layers are not compressed, nor those of one replica.
        gpu_transfers: "nccl" sends activations and gradients from GPU to GPU where NCCL links them;
            "host" sends all through host memory. The former has not yet been run on GPUs.
        evaluation: Place of validation, test and prediction: "stages", or "whole": each rank then
            holds the whole model. "auto" takes the latter for what stages cannot do, such as
            generation with a cache, unless the model does not fit in a rank's memory.
        deferred_init: True builds a model that is too large for a rank's memory. Each rank makes
            only its own stage's part of what `configure_model` makes, or of what is made within
            `Trainer.init_module`. Values are bitwise those of a whole construction from the same
            seed. After training, each rank keeps its part.
        save_distributed_checkpoint: True writes a checkpoint as a directory on shared storage, with
            a part from each rank. Only this strategy resumes it; see `consolidate_checkpoint`.
        profile: Options of the measurement of layers and links before training.
        timeout: Time that a rank waits for another, in seconds or as text such as "10min".
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer.
        process_group_backend: Backend of torch.distributed; None: gloo, for devices of any kinds.

    Raises:
        ConfigError: If an argument has a wrong value.
    """

    strategy_name: ClassVar[str] = "dlres_hetero_pipe"
    # Data modules must not shard the data: rank 0 reads it and sends each batch to the others.
    reads_for_all_ranks: ClassVar[bool] = True

    def __init__(
        self,
        *,
        stages: int | Literal["auto"] = "auto",
        microbatches: int | Literal["auto"] = "auto",
        schedule: str = "auto",
        module: str | None = None,
        device_map: Sequence[Sequence[int]] | None = None,
        plan: PipelinePlan | str | Path | None = None,
        split_batch: SplitBatch | None = None,
        emulate_speed: Sequence[float] | None = None,
        memory_limit: MemoryLimit = None,
        recompute: Recompute = "auto",
        gradient_codec: str | None = None,
        gpu_transfers: Literal["host", "nccl"] = "host",
        evaluation: Evaluation = "auto",
        deferred_init: bool = False,
        save_distributed_checkpoint: bool = False,
        profile: ProfileConfig | None = None,
        timeout: float | str | timedelta = "10min",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        self._options = PipeOptions(
            stages=stages,
            microbatches=microbatches,
            schedule=schedule,
            module=module,
            device_map=device_map,
            plan=plan,
            split_batch=split_batch,
            emulate_speed=emulate_speed,
            memory_limit=memory_limit,
            recompute=recompute,
            gradient_codec=gradient_codec,
            gpu_transfers=gpu_transfers,
            evaluation=evaluation,
            deferred_init=deferred_init,
            save_distributed_checkpoint=save_distributed_checkpoint,
            profile=ProfileConfig() if profile is None else profile,
            timeout=timeout,
        )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=self._options.timeout_seconds,
            saves_shards=save_distributed_checkpoint,
        )
        self._runner: StepRunner | PlainSteps | None = None
        self._made_on_meta: bool | None = None
        self._used_schedule: str = schedule
        self._precision_context: PrecisionContext = nullcontext
        self._until_teardown = ExitStack()

    @property
    def options(self) -> PipeOptions:
        """The checked arguments."""
        return self._options

    @property
    def schedule(self) -> str:
        """Schedule of the current run or the last `fit`; before both, the option `schedule`."""
        return self._runner.schedule if self._runner is not None else self._used_schedule

    def report_sections(self, run: MeasuredRun) -> ReportSections | None:
        """Return the sections of `ResourceReport` on a run of the plan; None without a plan."""
        plan = self.plan
        return pipeline_sections(plan, self.schedule, run) if plan is not None else None

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[super().local_rank]

    @property
    @override
    def world_size(self) -> int:
        return 1 if sees_single_device() else super().world_size

    @property
    @override
    def global_rank(self) -> int:
        return 0 if sees_single_device() else super().global_rank

    @property
    @override
    def local_rank(self) -> int:
        return 0 if sees_single_device() else super().local_rank

    @override
    def _rank_names(self) -> list[str]:
        return self._options.rank_names(self.world_size)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Refuse options that do not fit the number of ranks before any rank waits for another.
        self._options.rank_names(self.world_size)
        self._options.slowdown(self.global_rank, self.world_size)
        self._options.memory_limit_of(self.global_rank, self.world_size)
        self._made_on_meta = None
        self._join_ranks()

    @contextmanager
    @override
    def model_sharded_context(self) -> Iterator[None]:
        is_deferred = self._options.deferred_init and self.world_size > 1
        with deferred() if is_deferred else nullcontext():
            yield

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # A model on the meta device has no storage for a checkpoint before `setup` materialises it.
        # Read once: after `setup`, remote parameters of every model are on the meta device.
        if self._made_on_meta is None:
            is_meta = has_meta_tensors(self._module)
            self._made_on_meta = is_meta and not is_left_partitioned(self._module)
        return self._made_on_meta or is_left_partitioned(self._module)

    @override
    def setup(self, trainer: Trainer) -> None:
        with self._announcing_failures():
            self._set_up(trainer)

    def _set_up(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        if self.world_size > 1:
            # The ranks learn of signals together with each batch.
            self._until_teardown.callback(_compat.replace_sigterm_broadcast(trainer, lambda: None))
        if self.is_global_zero and self.world_size > 1:
            self._until_teardown.enter_context(unsharded_loaders(module, trainer.datamodule))  # type: ignore[attr-defined]
        fitting = trainer.state.fn == TrainerFn.FITTING
        is_plain = self._options.is_plain_training(self.world_size)
        refuse_unsupported(trainer, module, is_plain=is_plain)
        if self.world_size > 1:
            self._until_teardown.enter_context(adapted_trainer(trainer, module, self._connected))
        self.model = self.precision_plugin.convert_module(module)
        is_whole = not self.restore_checkpoint_after_setup
        if is_whole and fitting and self._options.deferred_init and self.world_size > 1:
            rank_zero_warn(
                f"dlres: deferred_init has no effect, because {type(module).__name__} has no large "
                "tensors that were made in configure_model. Make it in configure_model, or within "
                "Trainer.init_module."
            )
        context = self._make_step_context()
        self._until_teardown.enter_context(metric_sync_disabled(context.all_metrics))
        self.model_to_device()
        if fitting:
            # Before planning, because the plan counts the optimizers' state. The optimizers stay
            # valid, because partitioning keeps the identity of parameters.
            self.setup_optimizers(trainer)
        self._precision_context = self.precision_plugin.train_step_context
        deployment = Deployment.deploy(
            context=context,
            options=self._options,
            connection=self._connected,
            trainer=trainer,
            previous=self.plan,
            optimizers=self.optimizers if fitting else [],
            is_whole=is_whole,
        )
        self._deployment = deployment
        self.setup_precision_plugin()
        # The next checks fail on all ranks alike. Without this barrier, a rank that still waits for
        # weights would report the failure of a peer instead.
        self.barrier()
        if fitting:
            deployment.prepare_optimizers(self.optimizers)
        self._runner = make_runner(
            deployment,
            options=self._options,
            precision=self.precision_plugin,
            tracer=self.tracer,
            barrier=self.barrier,
            undo=self._until_teardown,
        )
        self._load_residuals()

    def _make_step_context(self) -> StepContext:
        module = self._module
        stages = self._options.least_stages(self.world_size)
        pipelined = find_pipelined_module(module, self._options.module, stages)
        if self._deployment is not None:
            # A module that was cut for `fit` is cut alike for `test`.
            pipelined = pipelined.cut_like(self._deployment.context.pipelined)
        return StepContext(
            module,
            pipelined,
            MetricStates(module),
            self.root_device,
            lambda: self._precision_context(),
            self._options.split_batch,
        )

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise ConfigError(
                f"{type(self._module).__name__}.configure_optimizers must return one optimizer, "
                "since a pipeline steps once per batch, got several optimizers. Use parameter "
                "groups of one optimizer."
            ) from error

    @override
    def model_to_device(self) -> None:
        # `Deployment` moves the parameters and buffers. Only the `device` property is left.
        _compat.set_device_property(self._module, self.root_device)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise ConfigError(
                f"training_step must be called with positional arguments, got keywords "
                f"{list(kwargs)}. Use training_step(batch, batch_idx)."
            )
        with self._announcing_failures(), refusing_stop_iteration("training_step", self.world_size):
            runner = self._runner_in(self.precision_plugin.train_step_context)
            batch = self._module.trainer.fit_loop.total_batch_idx
            if isinstance(runner, PlainSteps):
                return runner.train(args, batch)
            return runner.train(args, batch, loss_scale(self.precision_plugin))

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._runner.backward() if isinstance(self._runner, PlainSteps) else nullcontext():
            return super().backward(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args)

    def _evaluate(self, hook: str, context: PrecisionContext, args: tuple[Any, ...]) -> Any:
        with self._announcing_failures(), refusing_stop_iteration(hook, self.world_size):
            return self._runner_in(context).evaluate(getattr(self._module, hook), args)

    def _runner_in(self, context: PrecisionContext) -> StepRunner | PlainSteps:
        """Return the runner, and set the precision context in which its next steps run."""
        assert self._runner is not None
        self._precision_context = context
        return self._runner

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        scale = loss_scale(self.precision_plugin)
        with ExitStack() as stack:
            if enabled_scaler(self.precision_plugin) is not None:
                shared = overflow_shared(
                    optimizer, closure, self._connected.any_rank, self.root_device
                )
                closure = stack.enter_context(shared)
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._deployment is not None and self._deployment.compression is not None:
            # The gradient scaler lowers the scale when it skips a step.
            is_skipped = loss_scale(self.precision_plugin) < scale
            self._deployment.compression.end_window(is_skipped=is_skipped)
        return result

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.world_size == 1:
            return dataloader
        self._until_teardown.callback(undo_sharding(dataloader))
        return share_loader(
            dataloader,
            connection=self._connected,
            mailbox=self._mailbox,
            signals=self._deferred_signals,
            device=self.root_device,
        )

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        with ExitStack() as closing:
            # In this order: `end`, undo the run's changes, close; the latter two also after errors.
            if self._connection is not None:
                closing.callback(self._connection.close)
            closing.push(self._until_teardown.pop_all())
            if None not in (self._connection, self._deployment, self._runner):
                orderly = not self._connection.failed  # type: ignore[union-attr]
                with self._announcing_failures():
                    if orderly and isinstance(self._runner, StepRunner):
                        self._runner.runtime.meet("at the end of the run")
                    self._deployment.end(orderly)  # type: ignore[union-attr]
        if self._deployment is not None and self._deployment.optimizers:
            self._used_schedule = self.schedule
        self._connection, self._runner, self._saved_residuals = None, None, None
        for optimizer in self.optimizers:
            set_state_device(optimizer, torch.device("cpu"))
        if self._lightning_module is not None:
            _compat.set_device_property(self._lightning_module, torch.device("cpu"))
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
