"""Strategy `dlres_compressed_ddp`: data parallel training with compressed gradients."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres.core.checks import finite, flag, timeout_seconds
from lightning_dlres.core.errors import ConfigError, PeerError, got_expected
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.hook.ddp_state import NONE, GradientSyncState
from lightning_dlres.gradsync.hook.lazy_hook import LazyHook
from lightning_dlres.gradsync.hook.parameter_names import sparse_parameters
from lightning_dlres.gradsync.hook.powersgd import POWERSGD
from lightning_dlres.gradsync.optimizers.momentum_hook import momentum_hook
from lightning_dlres.gradsync.optimizers.momentum_sync import MomentumSync
from lightning_dlres.strategies.capabilities import MeasuredRun, ReportSections
from lightning_dlres.strategies.compressed_ddp.balance import SpeedBalance, checked_shares
from lightning_dlres.strategies.compressed_ddp.frozen_parameters import FrozenParameters
from lightning_dlres.strategies.compressed_ddp.optimizers import (
    has_scaler,
    loss_scale,
    momentum_of,
    require_equal_backwards,
    warn_about_optimizers,
)
from lightning_dlres.strategies.compressed_ddp.repeated_batch import RepeatedBatch
from lightning_dlres.strategies.compressed_ddp.report_sections import sync_sections
from lightning_dlres.strategies.compressed_ddp.step_recorder import StepRecorder
from lightning_dlres.strategies.compressed_ddp.uneven_loaders import (
    UnevenLoader,
    samples_of,
    weight_of,
    with_equal_length,
)
from lightning_dlres.strategies.connected_ddp import ConnectedDDPStrategy
from lightning_dlres.strategies.connection import announcing_failures
from lightning_dlres.strategies.few_bits import unwrapped
from lightning_dlres.strategies.parameter_groups import order_groups_alike
from lightning_dlres.strategies.process_group import check_backend

# Key, in a Lightning checkpoint, of the residuals of all ranks.
CHECKPOINT_KEY = "dlres_gradient_sync"

# MiB of buckets: all gradients in one, and several of which the first is ready early in backward.
_SINGLE_BUCKET_MB, _EARLY_BUCKET_MB = 1_000_000, 8


class CompressedDDPStrategy(ConnectedDDPStrategy):
    """Data parallel strategy that sends compressed gradients, for slow links between the ranks.

    It is Lightning's `DDPStrategy` with another synchronisation of gradients, on the CPU and on
    GPUs. What compression leaves out of a gradient is kept as a residual, and sent in later steps.
    Checkpoints are ordinary ones, which any Trainer can load; they also hold the residuals.

    With the optimizer `OneBitAdam`, the strategy synchronises the optimizer's momentum in the place
    of the gradients, as the optimizer's `sync` says. `algorithm` then has no effect.

    Ranks may have training loaders of different lengths. A rank whose loader has ended takes part
    with the weight zero, and the gradients of the others are weighted by their samples.

    Args:
        algorithm: "auto" measures the ranks and links at the start, prints a table, and takes the
            algorithm with the shortest predicted step; `DDPStrategy`'s all-reduce is one of them.
            It takes no codec with less than 8 bits per element. Other values: the name of a
            gradient codec, "raw" for uncompressed gradients that travel like compressed ones,
            "powersgd" for torch's PowerSGD hook in a single bucket, or "none" for the all-reduce.
        codec_options: Keyword arguments of the codec. Those of "powersgd" are `rank`, `start_step`,
            `error_feedback`, `warm_start`, `least_ratio` and `seed`.
        topology: "ps" (each rank is the parameter server of a part of the gradients), "ring", or
            "auto" for the one with the shorter predicted step, or, where predictions of at least
            three ranks are close, the one with the shorter step in a trial.
        coordinator: "always" asks a coordinator on rank 0 when to send each payload; "replay"
            learns its plan in a step and repeats it; "none" sends payloads within milliseconds
            after they are ready. "auto" tries both at the start, and takes "replay" if it gains
            more than 2 %.
        transport: "gloo", "zmq" (ZeroMQ, encrypted between hosts), or "auto" for "gloo".
        hierarchy: "auto" adds uncompressed gradients inside each host, and compresses only what
            travels between hosts. "off" lets each rank synchronise by itself.
        min_bytes: Gradients with fewer bytes are not compressed.
        replan: "auto" measures again when the steps have become slower or faster. If it pays, that
            changes `algorithm` or `topology`, where they are "auto". False keeps the first plan.
        share_samples: "equal" gives each rank as many samples of a batch as the others. "speed"
            measures the ranks, and gives faster ones more samples; a list of one number per rank
            sets the shares. A global batch has as many samples as with equal shares.
        timeout: Time that a rank waits for another: seconds, text such as "10min", or a timedelta.
        find_unused_parameters: True if a step may leave parameters without a gradient.
        static_graph: True if every step uses the same parameters in the same way.
        gradient_as_bucket_view: True lets gradients be views of DDP's buckets, which saves memory
            and two copies of all gradients per step. Backward then overwrites the gradients that
            other code has kept from an earlier step.
        bucket_cap_mb: MiB of DDP's buckets. None: 8, 25 for "none", no limit for "powersgd".
        process_group_backend: Backend of torch.distributed; None chooses gloo on the CPU, and NCCL
            beside gloo on GPUs.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer.

    Attributes:
        tracer: Recorder of this rank's tasks as spans.

    Raises:
        ConfigError: If an argument has a bad value.
    """

    strategy_name: ClassVar[str] = "dlres_compressed_ddp"

    def __init__(
        self,
        *,
        algorithm: str = "auto",
        codec_options: dict[str, Any] | None = None,
        topology: Literal["auto", "ps", "ring"] = "auto",
        coordinator: Literal["auto", "always", "replay", "none"] = "auto",
        transport: Literal["auto", "gloo", "zmq"] = "auto",
        hierarchy: Literal["auto", "off"] = "auto",
        min_bytes: int = 16 << 10,
        replan: Literal["auto", False] = "auto",
        share_samples: Literal["equal", "speed"] | list[float] = "equal",
        timeout: float | str | timedelta = "5min",
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._wait_seconds = timeout_seconds(timeout)
        check_backend(process_group_backend)
        if bucket_cap_mb is not None:
            finite("bucket_cap_mb", bucket_cap_mb, "bucket_cap_mb=25", above=True)
        elif algorithm == POWERSGD:
            # With several buckets, torch's PowerSGD hook deadlocks gloo.
            bucket_cap_mb = _SINGLE_BUCKET_MB
        elif algorithm != NONE:
            bucket_cap_mb = _EARLY_BUCKET_MB
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self._wait_seconds),
            find_unused_parameters=flag("find_unused_parameters", find_unused_parameters),
            static_graph=flag("static_graph", static_graph),
            gradient_as_bucket_view=flag("gradient_as_bucket_view", gradient_as_bucket_view),
            bucket_cap_mb=bucket_cap_mb,
        )
        self._sync_options: dict[str, Any] = {
            "algorithm": algorithm,
            "codec_options": codec_options,
            "topology": topology,
            "coordinator": coordinator,
            "transport": transport,
            "hierarchy": hierarchy,
            "min_bytes": min_bytes,
            "replan": replan,
            "bucket_cap_mb": 25 if bucket_cap_mb is None else bucket_cap_mb,
            "timeout": timeout,
        }
        # Raise errors of the options now, not in the middle of a run.
        self._state = GradientSyncState(**self._sync_options)
        self._share_samples = checked_shares(share_samples)
        self._balance: SpeedBalance | None = None
        self._recorder = StepRecorder(self.tracer)
        # One of the two is used.
        self._hook: LazyHook | None = None
        self._momentum: MomentumSync | None = None
        self._frozen: FrozenParameters | None = None
        # States of a checkpoint that was loaded, until they are used; None without such a one.
        self._loaded_states: list[Mapping[str, Any]] | None = None
        self._uneven_loaders: list[UnevenLoader] = []
        # The current batch if this rank repeats it.
        self._repeated: RepeatedBatch | None = None
        # Samples of the current batch, and whether any batch of this optimizer step had data.
        self._samples, self._step_has_data = 1, False
        self._training_step_start = 0.0

    @property
    def sync_state(self) -> GradientSyncState:
        """State of the synchronisation, of the current or the last run."""
        return self._state

    @property
    @override
    def tracer(self) -> Tracer:
        return self._state.tracer

    def report_sections(self, run: MeasuredRun) -> ReportSections | None:
        """Return the sections of `ResourceReport` on a run; None if no step was recorded."""
        decision = self._state.decision
        return sync_sections(self._state, run, None if decision is None else decision.prediction)

    @override
    def setup_environment(self) -> None:
        shares = self._share_samples
        if isinstance(shares, list) and len(shares) != self.world_size:
            rule = f"one number per rank ({self.world_size})"
            raise ConfigError(got_expected("share_samples", shares, rule, "share_samples='speed'"))
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        with announcing_failures(lambda: self._connection):
            super().setup(trainer)
            if trainer.state.fn == TrainerFn.FITTING:
                # Only now the optimizers are known.
                self._start_synchronisation()

    @override
    def configure_ddp(self) -> None:
        super().configure_ddp()
        self._balance = None
        if self._share_samples != "equal" and self.world_size > 1:
            is_measured = self._share_samples == "speed"
            shares = [1.0] * self.world_size if is_measured else self._share_samples
            self._balance = SpeedBalance(shares, is_measured=is_measured)  # type: ignore[arg-type]

    def _start_synchronisation(self) -> None:
        """Register the hook that synchronises gradients, or the momentum of `OneBitAdam`."""
        assert isinstance(self.model, DistributedDataParallel)
        assert self._connection is not None
        module = self.model.module
        self._frozen, self._hook = FrozenParameters(module), None
        self._momentum = momentum_of(self.optimizers)
        if self.world_size > 1:
            require_equal_backwards(self.optimizers)
            order_groups_alike(self.optimizers, module, self._connection, may_differ=True)
        self._state = GradientSyncState(
            **self._sync_options,
            optimizers=[unwrapped(optimizer) for optimizer in self.optimizers],
            check=self._connection.check,
            keeps_previous=has_scaler(self.precision_plugin),
            tracer=self.tracer,
        )
        self._recorder = StepRecorder(self.tracer)
        if self._momentum is not None:
            self._momentum.attach(
                self._connection.check,
                self.tracer,
                timeout=self._wait_seconds,
                shares_overflows=has_scaler(self.precision_plugin),
            )
            self.model.register_comm_hook(self._momentum, momentum_hook)
            return
        warn_about_optimizers(self._state, self.optimizers)
        self._state.name_parameters(module.named_parameters(), sparse_parameters(module))
        if self._loaded_states:
            self._state.load_state_dicts(self._loaded_states)
        self._loaded_states = None
        parameters = [p for p in module.parameters() if p.requires_grad]
        self._state.open(self.root_device, parameters[0].element_size())
        self._hook = LazyHook(self._state, self.model)
        if self._state.decision is not None:
            rank_zero_info(f"dlres: gradient synchronisation\n{self._state.decision.table()}")

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        states, self._loaded_states = self._loaded_states, None
        if states is None:
            return
        if self._momentum is None:
            # A callback returns to an earlier step, as after a search of the learning rate.
            nothing = {"step": 0, "algorithm": self._state.algorithm}
            self._state.load_state_dicts(states or [nothing])
        elif states:
            # The optimizer forgets what was not sent when its state is loaded.
            self._momentum.load_state_dicts(states)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        """Return a loader; for training, one of equal length on all ranks, which call together."""
        loader = super().process_dataloader(dataloader)
        trainer = self._module.trainer
        if self.world_size == 1 or not trainer.training:
            return loader
        assert self._connection is not None
        if any(loader.has_begun for loader in self._uneven_loaders):
            # Lightning loads new loaders in the place of these.
            self._uneven_loaders.clear()
        if self._balance is not None:
            loader = self._balance.share(loader, self._connection, self._uneven_loaders)
        is_weighted = self._balance is not None
        uneven = with_equal_length(loader, trainer, self._connection, is_weighted=is_weighted)
        if uneven is None:
            return loader
        self._uneven_loaders.append(uneven)
        self._keeps_fractions = True
        return uneven

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._uneven_loaders:
            self._samples = samples_of(args[0], self._module.trainer.train_dataloader)
        self._end_batch()
        if self._uneven_loaders and not self._has_data():
            self._repeated = RepeatedBatch(self._module)
        self._training_step_start = time.perf_counter()
        with self._recorder.forward():
            output = super().training_step(*args, **kwargs)
        if not self._module.automatic_optimization:
            self._end_batch()
        return output

    def _has_data(self) -> bool:
        """Return False if the current batch of this rank repeats an earlier one."""
        batch_idx = self._module.trainer.fit_loop.batch_idx
        return any(loader.has_data(batch_idx) for loader in self._uneven_loaders)

    def _end_batch(self) -> None:
        """Take back what a repeated batch has changed."""
        repeated, self._repeated = self._repeated, None
        if repeated is not None:
            repeated.take_back()

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        assert self._frozen is not None
        self._frozen.require_frozen()
        self._state.loss_scale = loss_scale(self.precision_plugin)
        if self._uneven_loaders:
            closure_loss = closure_loss * self._weight()
        repeated = self._repeated
        try:
            with (
                nullcontext() if repeated is None else repeated.without_gradients(),
                self._recorder.backward(self._state, self._module),
                nullcontext() if self._hook is None else self._hook.backward(),
            ):
                loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        except Exception as error:
            failure = (self._momentum or self._state).failure
            if failure is None and self._connection is not None:
                failure = self._connection.reason_of(error)
            if failure is None or failure is error:
                raise
            # DistributedDataParallel shows only the type of an error in its hook.
            raise failure from error
        if repeated is not None and self._module.automatic_optimization:
            repeated.take_back()
        return loss

    def _weight(self) -> float:
        """Return the weight of this rank's loss: its samples over the ranks' mean of samples."""
        assert self._connection is not None
        has_data = self._has_data()
        self._step_has_data |= has_data
        self._state.has_data = self._step_has_data
        if self._balance is not None:
            # All ranks know the division of a batch. Asking would make the fast ones wait here.
            batch_idx = self._module.trainer.fit_loop.batch_idx
            batch = batch_idx - self._uneven_loaders[0].first_batch
            return self._balance.weight(batch, self.global_rank)
        rows = self._connection.gather([float(self._samples if has_data else 0)])
        loaders = self._module.trainer.train_dataloader
        return weight_of(self.global_rank, [row[0] for row in rows], loaders)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Any,
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        before = loss_scale(self.precision_plugin)
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._module.automatic_optimization:
            self._end_batch()
        if self._balance is not None:
            self._rebalance(self._balance)
        if loss_scale(self.precision_plugin) < before:
            # The gradient scaler has found an overflow on all ranks, and skipped the step.
            self._state.undo_step(p for group in optimizer.param_groups for p in group["params"])
        self._step_has_data = False
        return result

    def _rebalance(self, balance: SpeedBalance) -> None:
        """Record the computing time of a step; change the shares of samples from time to time."""
        assert self._connection is not None
        loader = self._uneven_loaders[0]
        batch_idx = self._module.trainer.fit_loop.batch_idx
        if loader.has_data(batch_idx):
            seconds = (self._momentum or self._state).last_ready - self._training_step_start
            balance.record(seconds / self._samples)
        balance.update(batch_idx - loader.first_batch, self._connection)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        # A checkpoint of weights alone has no optimizer states, and needs no residuals.
        if "optimizer_states" in checkpoint:
            own = (self._momentum or self._state).state_dict()
            # Without residuals, the ranks' states are alike.
            has_residuals = bool(own.keys() & {"units", POWERSGD})
            states = self._gathered(own, "residuals") if has_residuals else [own]
            if states is not None:
                checkpoint[CHECKPOINT_KEY] = states
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        states = checkpoint.pop(CHECKPOINT_KEY, [])
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._loaded_states = list(states)
        return checkpoint

    @override
    def teardown(self) -> None:
        self._uneven_loaders.clear()
        self._repeated = None
        if self._hook is not None:
            self._hook.close()
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                # Also after a failure: running threads would abort the process at its exit.
                with suppress(PeerError) if connection.failed else nullcontext():
                    (self._momentum or self._state).close()
        finally:
            if connection is not None:
                connection.close()
            super().teardown()
