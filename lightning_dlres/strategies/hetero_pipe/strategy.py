"""`Trainer(strategy="dlres_hetero_pipe")`: pipeline and data parallel training of an unchanged
LightningModule (Methods D, E)."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres import _compat
from lightning_dlres.core.checks import instance, one_of
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.pipeline.comm.collectives import any_rank
from lightning_dlres.pipeline.comm.mailbox import Mailbox
from lightning_dlres.pipeline.execute.optimizers import set_state_device
from lightning_dlres.pipeline.execute.partition import is_on_meta, resident_parameter_bytes
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.profile.config import ProfileConfig
from lightning_dlres.strategies.capabilities import MeasuredRun, ReportSections
from lightning_dlres.strategies.connection import (
    Connection,
    join_process_group,
    require_script,
)
from lightning_dlres.strategies.hetero_pipe.data.loaders import (
    SharedLoader,
    StatefulSharedLoader,
    is_stateful,
    whole_data,
)
from lightning_dlres.strategies.hetero_pipe.data.sharding import (
    describe,
    refuse_shards,
    undo_sharding,
)
from lightning_dlres.strategies.hetero_pipe.deployment import ContextFactory, Deployment
from lightning_dlres.strategies.hetero_pipe.options import (
    MemoryLimit,
    PipeOptions,
    Recompute,
)
from lightning_dlres.strategies.hetero_pipe.plain_steps import PlainSteps
from lightning_dlres.strategies.hetero_pipe.precision import loss_scale, overflow_shared
from lightning_dlres.strategies.hetero_pipe.report_sections import pipeline_sections
from lightning_dlres.strategies.hetero_pipe.step.one_device import sees_single_device
from lightning_dlres.strategies.hetero_pipe.step.user_step import SplitBatch
from lightning_dlres.strategies.hetero_pipe.step_runner import StepRunner
from lightning_dlres.strategies.hetero_pipe.unsupported_callbacks import (
    refuse_callbacks,
    refuse_dataloader_iter,
)
from lightning_dlres.strategies.signals import DeferredSignals


class HeteroPipeStrategy(ParallelStrategy):
    """Trains one model over several devices of unlike speed: pipeline parallel inside a
    *replica* of one device per stage, data parallel between replicas.

    The loader's batch is the optimizer's batch, whatever the plan: it is cut into micro-batches,
    and results are those of single-device training. One rank reads the data for all. Each rank
    holds the parameters and the optimizer state of its stage only. Checkpoints are ordinary
    single-device Lightning checkpoints.

    Args:
        stages: Number of stages of a replica; must divide the number of devices. "auto":
            whatever is fastest in the simulator, two or more on several devices; one
            replica of all devices where nothing is measured. 1 is data parallel training.
        microbatches: Into how many parts the batch is cut; a smaller batch is cut into single
            samples. "auto": four per device; one device does not cut the batch. What is random in
            the layers (dropout) depends on this number, and on nothing else of the plan.
        schedule: "gpipe" computes the loss once over the whole batch, exact for any loss; "1f1b"
            holds fewer activations, and computes the loss per micro-batch, which is checked on real
            batches and refused where it is not exact. "auto": 1f1b where it is exact, else gpipe.
            Any other name is that of a schedule registered with `register_schedule`.
        module: Name of the module to cut into stages: an `nn.Sequential`, or an `nn.ModuleList`
            whose members are called one after the other. None finds it.
        device_map: For every replica its ranks in stage order. None: consecutive ranks.
        plan: A `PipelinePlan`, or the path of one written as JSON, as it was or edited; nothing is
            measured then.
        split_batch: Called with (batch, sizes), returns the batch cut into parts of these sizes;
            for batches that are more than tensors with samples along the first dimension. Used
            under 1f1b.
        emulate_speed: For demos and tests on one machine: relative speed of every rank, 1.0 the
            fastest; slower ones sleep after computing.
        memory_limit: Bytes (or "8GiB") that the model may take on a device, for all ranks or a list
            with one for each: weights, gradients, optimizer state, and what micro-batches in flight
            keep. None: nine tenths of what is free, on each GPU or, for CPU ranks together, on
            their host. A limit that no plan meets is refused with the smallest that works.
        recompute: "auto": layers run again before their backward instead of keeping what they save
            for it, where the memory limit asks for it; "never"; "always". Results are the same to
            the bit.
        profile: How layers and links are measured before training.
        timeout: How long a rank waits for another, in seconds or as "10min", before it ends the
            run.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer.
        process_group_backend: Backend of torch.distributed; None chooses gloo on the CPU, and NCCL
            beside gloo on GPUs.

    Raises:
        ConfigError: an argument is of no use; the message says what was expected.
    """

    strategy_name: ClassVar[str] = "dlres_hetero_pipe"
    # Data modules must not shard the data: rank 0 reads it and sends each batch to the others.
    reads_for_all_ranks: ClassVar[bool] = True

    def __init__(
        self,
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
        profile: ProfileConfig | None = None,
        timeout: float | str | timedelta = "10min",
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        self._options = PipeOptions(
            stages,
            microbatches,
            schedule,
            module,
            device_map,
            plan,
            split_batch,
            emulate_speed,
            memory_limit,
            recompute,
            profile,
            timeout,
        )
        if process_group_backend is not None:
            instance(
                "process_group_backend",
                process_group_backend,
                (str,),
                "the name of a backend of torch.distributed",
                "process_group_backend=None",
            )
            known = set(dist.Backend.backend_list)
            for part in process_group_backend.lower().split(","):
                one_of("process_group_backend", part.split(":")[-1], known, "'gloo'")
        self._process_group_backend = process_group_backend
        self._num_nodes = 1
        self._connection: Connection | None = None
        self._signals: DeferredSignals | None = None
        self._run: Deployment | None = None
        self._runner: StepRunner | PlainSteps | None = None
        self._born_on_meta: bool | None = None
        self._used_schedule: str = schedule
        self.tracer = Tracer()
        self._until_teardown = ExitStack()

    @property
    def options(self) -> PipeOptions:
        """The arguments, checked."""
        return self._options

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan of the current or last run; None before the first."""
        return self._run.plan if self._run is not None else None

    @property
    def schedule(self) -> str:
        """The schedule of the current or last run; before the first the one that was asked for."""
        return self._runner.schedule if self._runner is not None else self._used_schedule

    def report_sections(self, run: MeasuredRun) -> ReportSections | None:
        """Return the sections of `ResourceReport` on a run of the plan; None without a plan."""
        plan = self.plan
        return pipeline_sections(plan, self.schedule, run) if plan is not None else None

    @property
    def resident_parameter_bytes(self) -> int:
        """Bytes of parameters that this rank holds."""
        return resident_parameter_bytes(self._module)

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

    @property
    def num_nodes(self) -> int:
        """Number of hosts."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    def num_processes(self) -> int:
        """Number of ranks on this host."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def is_distributed(self) -> bool:
        """False: Lightning shall neither shard the data nor reduce logs, since every rank sees the
        whole batch and all logs."""
        return False

    def set_world_ranks(self) -> None:
        """Tell the cluster environment this process's place; called by the Trainer."""
        if self.cluster_environment is not None:
            rank = self.node_rank * self.num_processes + self.local_rank
            self.cluster_environment.set_global_rank(rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _compat.set_rank(self.global_rank)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        require_script(self.cluster_environment, self.num_processes)
        self._launcher = _compat.script_launcher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        self._options.rank_names(self.world_size)
        self._options.slowdown(self.global_rank, self.world_size)
        self._options.memory_limit(self.global_rank, self.world_size)
        join_process_group(
            self.cluster_environment,
            self._process_group_backend,
            self.root_device,
            self._options.timeout,
        )
        # Every rank logs the value of the whole batch: there is nothing that sync_dist could add.
        warnings.filterwarnings("ignore", message=r".*sync_dist=True.*")
        self._born_on_meta = None
        self._connection = self._connect()
        self._signals = DeferredSignals(self.cluster_environment, self._connection)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # A model made on the meta device has nothing to load into before it is materialised.
        if self._born_on_meta is None:
            self._born_on_meta = is_on_meta(self._module)
        return self._born_on_meta

    @override
    def setup(self, trainer: Trainer) -> None:
        with self._announcing():
            self._set_up(trainer)

    def _set_up(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        if self.world_size > 1:
            self._until_teardown.callback(_compat.without_sigterm_broadcast(trainer))
        if self.is_global_zero and self.world_size > 1:
            self._until_teardown.enter_context(whole_data(module, trainer.datamodule))  # type: ignore[attr-defined]
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and not module.automatic_optimization:
            raise ConfigError(
                f"{type(module).__name__} uses manual optimization "
                "(automatic_optimization=False), which runs forward and backward where it likes; "
                "a pipeline needs to schedule them. Use automatic optimization with one "
                "optimizer, or another strategy."
            )
        if fitting and not self._options.cuts_nothing(self.world_size):
            refuse_callbacks(trainer)
        if not self._options.cuts_nothing(self.world_size):
            refuse_dataloader_iter(trainer, module)
        self.model = self.precision_plugin.convert_module(module)
        run = Deployment(
            self._options,
            module,
            self.precision_plugin,
            self._connected,
            self.root_device,
            self.tracer,
            whole=not self.restore_checkpoint_after_setup,
        )
        self._until_teardown.callback(run.take_back)
        self.model_to_device()
        if fitting:
            # Before the plan, which counts their state. Parameters keep their identity.
            self.setup_optimizers(trainer)
        run.deploy(trainer, self.plan, self.optimizers if fitting else [])
        self._run = run
        self.setup_precision_plugin()
        # Every rank finds the same fault: one that still waited for weights would blame a peer.
        self.barrier()
        if fitting:
            run.check_optimizers(self.optimizers)
        self._runner = run.make_runner(self.barrier)

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        try:
            super().setup_optimizers(trainer)
        except RuntimeError as error:
            if "multiple optimizers" not in str(error):
                raise
            raise ConfigError(
                f"{type(self._module).__name__}.configure_optimizers returns several optimizers, "
                "expected one: a pipeline steps once per batch. Use parameter groups of one "
                "optimizer."
            ) from error

    @override
    def model_to_device(self) -> None:
        # Parameters and buffers went to their place when the model was deployed.
        _compat.set_device_property(self._module, self.root_device)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise ConfigError(
                f"training_step must be called with positional arguments, got keywords "
                f"{list(kwargs)}. Use training_step(batch, batch_idx)."
            )
        with self._announcing(), self._in_context(self.precision_plugin.train_step_context) as run:
            batch = self._module.trainer.fit_loop.total_batch_idx
            if isinstance(run, PlainSteps):
                return run.train(args, batch)
            assert self._run is not None
            self._run.follow_freezing(run.runtime)
            return run.train(args, batch, loss_scale(self.precision_plugin))

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

    def _evaluate(self, hook: str, context: ContextFactory, args: tuple[Any, ...]) -> Any:
        with self._announcing(), self._in_context(context) as runner:
            return runner.evaluate(getattr(self._module, hook), args)

    @contextmanager
    def _in_context(self, context: ContextFactory) -> Iterator[StepRunner | PlainSteps]:
        assert self._run is not None
        assert self._runner is not None
        self._run.step_context = context
        yield self._runner

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        if getattr(self.precision_plugin, "scaler", None) is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            closure = overflow_shared(closure, parameters, self._connected.any_rank)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        if self.world_size == 1:
            return dataloader
        self._until_teardown.callback(undo_sharding(dataloader))
        connection = self._connected
        told = describe(dataloader)
        everywhere = [
            connection.broadcast(told if rank == connection.rank else None, rank)
            for rank in range(connection.world_size)
        ]
        warning = refuse_shards(f"{type(dataloader).__name__}", everywhere)
        if warning is not None:
            rank_zero_warn(f"dlres: {warning}")
        length, stateful = None, False
        if self.is_global_zero:
            stateful = is_stateful(dataloader)
            try:
                length = len(dataloader)  # type: ignore[arg-type]
            except (TypeError, NotImplementedError):
                length = None
        length, stateful = self._connected.broadcast([length, stateful], 0)
        kind = StatefulSharedLoader if stateful else SharedLoader
        return kind(
            dataloader,
            self.is_global_zero,
            self._mailbox,
            self._deferred_signals,
            self.root_device,
            length,
        )

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; after the run, too, so that a checkpoint saved late is there for
        all."""
        if name == "run-stage" and self._signals is not None:
            # The Trainer's first barrier after it has registered its signal handlers.
            self._signals.install()
        if self._connection is not None:
            with self._briefly_after_failure():
                self._connection.any_rank(False)
        elif self._run is not None and dist.is_initialized():
            any_rank(False, self._options.timeout, _nothing_known)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self._connection.broadcast(obj, src) if self._connection is not None else obj

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the tensor: every rank has seen the whole batch, so there is nothing to reduce."""
        return tensor

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return the tensor, as on a single device: every rank has it already."""
        return tensor

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._connection is None:
            return decision
        return self._connection.all_ranks(decision) if all else self._connection.any_rank(decision)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = self._module.state_dict()
        if self._run is None or (self._connection is None and self._run.whole):
            return state
        with self._briefly_after_failure(), self._some_mailbox() as mailbox:
            return self._run.gather_model_state(state, mailbox)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        state = super().optimizer_state(optimizer)
        if self._run is None or "state" not in state:
            return state
        with self._briefly_after_failure(), self._some_mailbox() as mailbox:
            return self._run.gather_optimizer_state(optimizer, state, mailbox)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._run is None or not is_on_meta(self._module):
            super().load_model_state_dict(checkpoint, strict)
        else:
            self._run.load_model_state(checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._run is not None
        states = checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=False):
            self._run.load_optimizer_state(optimizer, state)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._connection is not None and not self._is_agreed_end(exception):
            self._connection.announce_failure(exception)

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        with ExitStack() as closing:
            # Also where the run could not be set up, or does not end well.
            if self._connection is not None:
                closing.callback(self._connection.close)
            closing.push(self._until_teardown.pop_all())
            if None not in (self._connection, self._run, self._runner):
                self._run.end(orderly=not self._connection.failed)  # type: ignore[union-attr]
        self._used_schedule = self.schedule
        self._connection, self._runner = None, None
        for optimizer in self.optimizers:
            set_state_device(optimizer, torch.device("cpu"))
        if self._lightning_module is not None:
            _compat.set_device_property(self._lightning_module, torch.device("cpu"))
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _connected(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def _mailbox(self) -> Mailbox:
        return self._connected.mailbox

    def _deferred_signals(self) -> DeferredSignals:
        assert self._signals is not None
        return self._signals

    def _is_agreed_end(self, exception: BaseException) -> bool:
        """Whether all ranks end here together, after a SIGTERM to one of them."""
        return isinstance(exception, SIGTERMException) and self._deferred_signals().ends_run()

    def _connect(self) -> Connection:
        assert self.cluster_environment is not None
        names = self._options.rank_names(self.world_size)
        return Connection(
            names, self.cluster_environment, self.num_nodes, self._options.timeout, self.tracer
        )

    @contextmanager
    def _some_mailbox(self) -> Iterator[Mailbox]:
        """Yield the run's mailbox, or, after the run, one for the moment: a checkpoint may be saved
        late."""
        if self._connection is not None:
            yield self._connection.mailbox
            return
        connection = self._connect()
        try:
            yield connection.mailbox
        except BaseException as error:
            connection.announce_failure(error)
            raise
        finally:
            connection.close()

    @contextmanager
    def _briefly_after_failure(self) -> Iterator[None]:
        """Context manager for what all ranks do together. A callback that saves a checkpoint when
        this rank has raised does not wait long: the others know of nothing."""
        interrupted = self._module.trainer.state.status == TrainerStatus.INTERRUPTED
        if self._connection is None or not interrupted:
            yield
            return
        cause = sys.exc_info()[1]
        self._connection.hurry()
        try:
            yield
        except BaseException as error:
            self._connection.announce_failure(cause or error)
            # Lightning tears nothing down after a callback that raises here.
            self.teardown()
            raise error from cause

    @contextmanager
    def _announcing(self) -> Iterator[None]:
        """Tell the other ranks of a failure at once: Lightning first calls hooks that may wait for
        them."""
        try:
            yield
        except BaseException as error:
            if self._connection is not None:
                self._connection.announce_failure(error)
            raise


def _nothing_known() -> None:
    """No rank's failure can be known after the run."""
