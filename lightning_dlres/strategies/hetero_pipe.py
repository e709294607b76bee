"""`Trainer(strategy="dlres_hetero_pipe")`: pipeline and data parallel training of an unchanged
LightningModule (Methods D, E)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres import _compat
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.tree import Tree
from lightning_dlres.core.units import parse_seconds
from lightning_dlres.pipeline.buffers import BufferSync
from lightning_dlres.pipeline.gradients import GradientSync, make_groups
from lightning_dlres.pipeline.mailbox import Mailbox
from lightning_dlres.pipeline.partition import (
    Owners,
    is_on_meta,
    materialise,
    partition,
    resident_parameter_bytes,
)
from lightning_dlres.pipeline.plan import PipelinePlan, arrange
from lightning_dlres.pipeline.runtime import Runtime
from lightning_dlres.pipeline.schedule import SCHEDULES
from lightning_dlres.pipeline.stage import Stage
from lightning_dlres.pipeline.states import (
    align_holders,
    gather_model_state,
    gather_optimizer_state,
    make_whole,
    own_optimizer_state,
    spread_from_rank_zero,
)
from lightning_dlres.strategies.capture import PipelinedModule, find_pipelined_module
from lightning_dlres.strategies.connection import Connection, join_process_group
from lightning_dlres.strategies.loaders import SharedLoader, StatefulSharedLoader, is_stateful
from lightning_dlres.strategies.metrics import MetricStates
from lightning_dlres.strategies.optimizers import require_separable, set_state_device
from lightning_dlres.strategies.planning import (
    adopt_plan,
    measured_plan,
    profiling_inputs,
    require_layers,
    unmeasured_plan,
)
from lightning_dlres.strategies.precision import clipping_over_stages, loss_scale, overflow_shared
from lightning_dlres.strategies.step import SplitBatch, StepContext
from lightning_dlres.strategies.steps import StepRunner

Schedule = Literal["auto", "gpipe", "1f1b"]


class HeteroPipeStrategy(ParallelStrategy):
    """Trains one model over several devices of unlike speed: pipeline parallel inside a *virtual
    machine* of one device per stage, data parallel between virtual machines.

    The loader's batch is the optimizer's batch, whatever the plan: it is cut into micro-batches,
    and results are those of single-device training. One rank reads the data for all. Each rank
    holds the parameters and the optimizer state of its stage only. Checkpoints are ordinary
    single-device Lightning checkpoints.

    Args:
        stages: Number of stages of a virtual machine; must divide the number of devices. "auto":
            one virtual machine of all devices.
        microbatches: Into how many parts the batch is cut; a smaller batch is cut into single
            samples. "auto": four per device. What is random in the layers (dropout) depends on this
            number, and on nothing else of the plan.
        schedule: "gpipe" computes the loss once over the whole batch, exact for any loss; "1f1b"
            holds fewer activations, and computes the loss per micro-batch, which is checked on real
            batches and refused where it is not exact. "auto": 1f1b where it is exact, else gpipe.
        module: Name of the module to cut into stages: an `nn.Sequential`, or an `nn.ModuleList`
            whose members are called one after the other. None finds it.
        device_map: For every virtual machine its ranks in stage order. None: consecutive ranks.
        plan: A `PipelinePlan`, or the path of one written as JSON; nothing is measured then.
        split_batch: Called with (batch, sizes), returns the batch cut into parts of these sizes;
            for batches that are more than tensors with samples along the first dimension. Used
            under 1f1b.
        emulate_speed: For demos and tests on one machine: relative speed of every rank, 1.0 the
            fastest; slower ones sleep after computing.
        profile_samples: Number of samples with which layers are timed before training.
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

    def __init__(
        self,
        stages: int | Literal["auto"] = "auto",
        microbatches: int | Literal["auto"] = "auto",
        schedule: Schedule = "auto",
        module: str | None = None,
        device_map: Sequence[Sequence[int]] | None = None,
        plan: PipelinePlan | str | Path | None = None,
        split_batch: SplitBatch | None = None,
        emulate_speed: Sequence[float] | None = None,
        profile_samples: int = 8,
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
        self._stages = _count("stages", stages)
        self._microbatches = _count("microbatches", microbatches)
        if schedule not in ("auto", *SCHEDULES):
            raise ConfigError(
                got_expected(
                    "schedule", schedule, f"'auto' or one of {SCHEDULES}", "schedule='auto'"
                )
            )
        self._schedule = self._used_schedule = schedule
        self._module_path = module
        self._given_plan = PipelinePlan.load(plan) if isinstance(plan, (str, Path)) else plan
        self._device_map = (
            tuple(tuple(ranks) for ranks in device_map) if device_map is not None else None
        )
        self._split_batch = split_batch
        self._emulate_speed = _speeds(emulate_speed)
        self._profile_samples = _count("profile_samples", profile_samples) or 1
        self._timeout = parse_seconds(timeout, "timeout")
        self._process_group_backend = process_group_backend
        self._num_nodes = 1
        self._connection: Connection | None = None
        self._runner: StepRunner | None = None
        self._pipelined: PipelinedModule | None = None
        self._owners: Owners = {}
        self._plan: PipelinePlan | None = None
        self._born_on_meta: bool | None = None
        self._undo = ExitStack()
        self._step_context_factory: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.tracer = Tracer()

    # What the Trainer asks

    @property
    def plan(self) -> PipelinePlan | None:
        """The plan of the current or last run; None before the first."""
        return self._plan

    @property
    def schedule(self) -> str:
        """The schedule of the current or last run; before the first the one that was asked for."""
        return self._runner.schedule if self._runner is not None else self._used_schedule

    @property
    def resident_parameter_bytes(self) -> int:
        """Bytes of parameters that this rank holds."""
        return resident_parameter_bytes(self._module)

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

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
            self.cluster_environment.set_global_rank(
                self.node_rank * self.num_processes + self.local_rank
            )
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        _compat.set_rank(self.global_rank)

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = _compat.script_launcher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    # Setting up

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        names = self._rank_names()
        join_process_group(
            self.cluster_environment, self._process_group_backend, self.root_device, self._timeout
        )
        self._born_on_meta = None
        self._connection = Connection(
            names, self.cluster_environment, self.num_nodes, self._timeout, self.tracer
        )

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # A model that was made on the meta device has nothing to load into before its stage is
        # materialised.
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
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and not module.automatic_optimization:
            raise ConfigError(
                f"{type(module).__name__} uses manual optimization "
                "(automatic_optimization=False), which runs forward and backward where it likes; "
                "a pipeline needs to schedule them. Use automatic optimization with one "
                "optimizer, or another strategy."
            )
        self.model = self.precision_plugin.convert_module(module)
        self._pipelined = find_pipelined_module(module, self._module_path)
        connection, layers = self._connected, self._pipelined.layers
        metrics = MetricStates(module)
        self._undo = ExitStack()
        for metric in metrics.metrics.values():
            self._undo.callback(_compat.never_distributed(metric))
        context = StepContext(
            module,
            self._pipelined,
            metrics,
            self.root_device,
            self._current_context,
            self._split_batch,
        )
        self._step_context_factory = self.precision_plugin.train_step_context
        self._plan = plan = self._make_plan(trainer, context)
        rank_zero_info(f"\n{plan.table()}")
        _, stage = plan.place(self.global_rank)
        self._owners = owners = layers.owners(plan)
        seed = int(connection.broadcast(torch.initial_seed() % (1 << 62), 0))
        whole = not self.restore_checkpoint_after_setup
        if whole:
            spread_from_rank_zero(layers, owners, plan, connection.mailbox)
        partition(layers, owners, plan, stage, self.root_device)
        if not whole:
            materialise(layers, plan, owners, stage, self.root_device, seed)
            align_holders(layers, owners, plan, connection.mailbox)
        self.model_to_device()
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            self._check_optimizers(stage)
        self._runner = self._make_runner(context, plan, stage, seed)
        self._undo.enter_context(
            clipping_over_stages(self.precision_plugin, owners, stage, self._sum_over_stages)
        )

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
        # Parameters and buffers went to their place when the model was partitioned.
        _compat.set_device_property(self._module, self.root_device)

    def _make_plan(self, trainer: Trainer, context: StepContext) -> PipelinePlan:
        assert self._pipelined is not None
        machines = self._machines()
        require_layers(self._pipelined, len(machines[0]))
        if self._given_plan is not None:
            return adopt_plan(self._given_plan, self._pipelined, self.world_size)
        if (
            self._plan is not None
            and tuple(layer.name for layer in self._plan.layers) == self._pipelined.layers.names
        ):
            return self._plan
        inputs = None
        if trainer.state.fn == TrainerFn.FITTING and len(machines[0]) > 1:
            inputs = self._profiling_inputs(trainer, context)
        if inputs is None:
            return unmeasured_plan(self._pipelined, machines)
        rank_zero_info(
            f"dlres: timing {len(self._pipelined.layers.modules)} layers on {self.world_size} "
            "ranks ..."
        )
        return measured_plan(
            self._pipelined,
            machines,
            inputs,
            self.root_device,
            self._current_context,
            self._slowdown,
            self._connected.gather,
        )

    def _profiling_inputs(self, trainer: Trainer, context: StepContext) -> Tree:
        found: Tree = [None, None]
        if self.global_rank == 0:
            try:
                found = [profiling_inputs(trainer, context, self._profile_samples), None]
            except Exception as error:
                found = [None, f"{type(error).__name__}: {error}"]
        inputs, reason = self._connected.broadcast(found, 0)
        if reason is not None:
            rank_zero_info(
                f"dlres: the layers could not be timed before training ({reason}); splitting by "
                "parameter bytes instead."
            )
        return inputs

    def _check_optimizers(self, stage: int) -> None:
        for optimizer in self.optimizers:
            require_separable(optimizer)
            # Adagrad makes state for every parameter at once; foreign ones have none.
            for parameter in [p for p in optimizer.state if p.is_meta]:
                del optimizer.state[parameter]
            set_state_device(optimizer, self.root_device)
        trainable = any(p.requires_grad and stage in held_by for p, held_by in self._owners.items())
        if loss_scale(self.precision_plugin) != 1.0 and not trainable:
            raise ConfigError(
                f"Stage {stage} has nothing to train, and a gradient scaler needs a gradient on "
                "every rank. Use precision='bf16-mixed', or another split: "
                "HeteroPipeStrategy(plan=...)."
            )

    def _make_runner(
        self, context: StepContext, plan: PipelinePlan, stage_index: int, seed: int
    ) -> StepRunner:
        assert self._pipelined is not None
        layers, connection = self._pipelined.layers, self._connected
        indices = plan.layers_of(stage_index)
        trainable, outer = layers.trainable(indices), layers.outer()
        groups = make_groups(plan, self._owners, timedelta(seconds=self._timeout))
        for group in groups.values():
            self._undo.callback(self._destroy, group)
        stage = Stage(
            [self._pipelined.bind(index, layers.modules[index]) for index in indices],
            trainable,
            indices.start,
            self.root_device,
            self._current_context,
        )
        sync = GradientSync(
            trainable,
            outer,
            self._owners,
            groups,
            stage_index,
            self._timeout,
            connection.check,
            self.tracer,
        )
        buffers = [buffer for index in indices for buffer in layers.modules[index].buffers()]
        replicas = groups.get((stage_index,)) if len(plan.machines) > 1 else None
        buffer_sync = BufferSync(
            buffers, replicas, plan.machines[0][stage_index], self._timeout, connection.check
        )
        count = self._microbatches or 4 * plan.world_size
        runtime = Runtime(
            plan,
            self.global_rank,
            stage,
            outer,
            sync,
            buffer_sync,
            connection.mailbox,
            self.tracer,
            count,
            self._slowdown,
        )
        return StepRunner(context, runtime, self._schedule, seed, self.barrier, rank_zero_info)

    # Steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            raise ConfigError(
                f"training_step: got keyword arguments {list(kwargs)}, expected none."
            )
        with self._announcing():
            assert self._runner is not None
            self._step_context_factory = self.precision_plugin.train_step_context
            batch = self._module.trainer.fit_loop.total_batch_idx
            return self._runner.train(args, batch, loss_scale(self.precision_plugin))

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "validation_step", self.precision_plugin.val_step_context, args, kwargs
        )

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(
            "predict_step", self.precision_plugin.predict_step_context, args, kwargs
        )

    def _evaluate(
        self, hook: str, context: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        with self._announcing():
            assert self._runner is not None
            self._step_context_factory = context
            call = getattr(self._module, hook)
            return self._runner.evaluate(lambda *a: call(*a, **kwargs), args)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any
    ) -> Any:
        if getattr(self.precision_plugin, "scaler", None) is not None:
            closure = overflow_shared(
                closure, lambda: self._trained(optimizer), self._connected.any_rank
            )
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        length, stateful = None, False
        if self.global_rank == 0:
            stateful = is_stateful(dataloader)
            try:
                length = len(dataloader)  # type: ignore[arg-type]
            except (TypeError, NotImplementedError):
                length = None
        length, stateful = self._connected.broadcast([length, stateful], 0)
        kind = StatefulSharedLoader if stateful else SharedLoader
        return kind(dataloader, self.is_global_zero, self._mailbox, self.root_device, length)

    # Between ranks

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._connection is not None:
            self._connection.any_rank(False)

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

    # Checkpoints

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = self._module.state_dict()
        if self._pipelined is None or self._plan is None:
            return state
        if self._connection is None and not is_on_meta(self._module):
            return state
        with self._some_mailbox() as mailbox:
            return gather_model_state(state, self._pipelined.layers, self._plan, mailbox)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        state = super().optimizer_state(optimizer)
        if self._plan is None or "state" not in state:
            return state
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with self._some_mailbox() as mailbox:
            return gather_optimizer_state(state, parameters, self._owners, self._plan, mailbox)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._plan is None or not any(p.is_meta for p in self._module.parameters()):
            super().load_model_state_dict(checkpoint, strict)
            return
        mine, given = self._module.state_dict(), checkpoint["state_dict"]
        missing, unexpected = sorted(mine.keys() - given.keys()), sorted(given.keys() - mine.keys())
        wrong = [
            k
            for k in mine.keys() & given.keys()
            if isinstance(mine[k], Tensor) and mine[k].shape != given[k].shape
        ]
        if strict and (missing or unexpected or wrong):
            raise ConfigError(
                f"The checkpoint does not fit {type(self._module).__name__}: missing {missing}, "
                f"unexpected {unexpected}, of another shape {wrong}. Load it into the model that "
                "wrote it, or set strict_loading=False."
            )
        held = {
            k: given[k]
            for k, v in mine.items()
            if k in given and not (isinstance(v, Tensor) and v.is_meta)
        }
        self._module.load_state_dict(held, strict=False)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._plan is not None
        _, stage = self._plan.place(self.global_rank)
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            optimizer.load_state_dict(own_optimizer_state(state, parameters, self._owners, stage))
            set_state_device(optimizer, self.root_device)

    # The end

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._connection is not None:
            self._connection.announce_failure(exception)

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        connection = self._connection
        if connection is not None:
            if not connection.failed and self._runner is not None and not self._born_on_meta:
                assert self._pipelined is not None
                assert self._plan is not None
                make_whole(self._pipelined.layers, self._owners, self._plan, connection.mailbox)
            self._undo.close()
            connection.close()
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

    # Odds and ends

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def _connected(self) -> Connection:
        assert self._connection is not None
        return self._connection

    @property
    def _slowdown(self) -> float:
        return 1.0 / self._emulate_speed[self.global_rank] if self._emulate_speed else 1.0

    def _machines(self) -> tuple[tuple[int, ...], ...]:
        if self._given_plan is not None:
            return self._given_plan.machines
        if self._device_map is not None:
            ranks = sorted(rank for machine in self._device_map for rank in machine)
            if (
                ranks != list(range(self.world_size))
                or len({len(machine) for machine in self._device_map}) != 1
            ):
                raise ConfigError(
                    f"device_map: got {[list(m) for m in self._device_map]}, expected each of the "
                    f"ranks 0 to {self.world_size - 1} once, and virtual machines of equal "
                    "length. Try None."
                )
            return self._device_map
        return arrange(self.world_size, self._stages or self.world_size)

    def _rank_names(self) -> list[str]:
        machines = self._machines()
        if sum(len(machine) for machine in machines) != self.world_size:
            raise ConfigError(
                f"plan: got virtual machines {[list(m) for m in machines]}, expected "
                f"{self.world_size} ranks. Plan again, or change devices."
            )
        if self._emulate_speed and len(self._emulate_speed) != self.world_size:
            raise ConfigError(
                f"emulate_speed: got {len(self._emulate_speed)} numbers, expected one for each of "
                f"the {self.world_size} ranks. Try None."
            )
        placed = PipelinePlan(machines=machines, split=(1,) * len(machines[0]))
        return [placed.rank_name(rank) for rank in range(self.world_size)]

    def _mailbox(self) -> Mailbox:
        return self._connected.mailbox

    @contextmanager
    def _some_mailbox(self) -> Iterator[Mailbox]:
        """Yield the run's mailbox, or, after the run, one for the moment: `trainer.save_checkpoint`
        may come late."""
        if self._connection is not None:
            yield self._connection.mailbox
            return
        assert self.cluster_environment is not None
        connection = Connection(
            self._rank_names(), self.cluster_environment, self.num_nodes, self._timeout, self.tracer
        )
        try:
            yield connection.mailbox
        except BaseException as error:
            connection.announce_failure(error)
            raise
        finally:
            connection.close()

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

    def _current_context(self) -> AbstractContextManager[Any]:
        return self._step_context_factory()

    def _sum_over_stages(self, value: float) -> float:
        assert self._plan is not None
        found = self._connected.gather([value])
        return sum(found[rank][0] for rank in self._plan.machines[0])

    def _trained(self, optimizer: Optimizer) -> Iterator[nn.Parameter]:
        return (p for group in optimizer.param_groups for p in group["params"])

    @staticmethod
    def _destroy(group: dist.ProcessGroup) -> None:
        dist.destroy_process_group(group)


def _count(name: str, value: object) -> int | None:
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(
            got_expected(name, value, "a positive integer or 'auto'", f"{name}='auto'")
        )
    return value


def _speeds(speeds: Sequence[float] | None) -> tuple[float, ...] | None:
    if speeds is None:
        return None
    if not speeds or any(not 0 < float(speed) <= 1 for speed in speeds):
        raise ConfigError(
            got_expected(
                "emulate_speed", list(speeds), "numbers above 0 and up to 1, one per rank", "None"
            )
        )
    return tuple(float(speed) for speed in speeds)
