"""Strategy `dlres_parameter_server`: data parallel training with parameter servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres.core.checks import flag, timeout_seconds
from lightning_dlres.core.comm.collectives import gather_bytes
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.units import format_bytes
from lightning_dlres.paramserver.execute.server.consistency import BSP
from lightning_dlres.paramserver.execute.worker.session import WorkerSession
from lightning_dlres.paramserver.execute.worker.state.parameters import KeyedParameters
from lightning_dlres.paramserver.report.server_report import ServerReport
from lightning_dlres.paramserver.setup.config import EMBEDDED, ParameterServerConfig
from lightning_dlres.paramserver.setup.initial_values import broadcast_from_rank_0, share_model
from lightning_dlres.paramserver.setup.model_keys import ModelKeys, keys_of
from lightning_dlres.paramserver.setup.optimizer_states import (
    fill_state,
    states_by_key,
)
from lightning_dlres.strategies.connected_ddp import ConnectedDDPStrategy
from lightning_dlres.strategies.connection import Connection, announcing_failures
from lightning_dlres.strategies.few_bits import unwrapped, warn_about_few_bits
from lightning_dlres.strategies.lazy_parameters import refuse_lazy_parameters
from lightning_dlres.strategies.parameter_server.clipping import (
    Clipping,
    trainer_bounds,
)
from lightning_dlres.strategies.parameter_server.remote_update import RemoteUpdates
from lightning_dlres.strategies.parameter_server.residuals import CheckpointedResiduals
from lightning_dlres.strategies.parameter_server.server_hosting import (
    HostedServers,
    host_servers,
    job_of,
)
from lightning_dlres.strategies.parameter_server.trainer_checks import (
    gradients_are_seen,
    refuse_callbacks,
)
from lightning_dlres.strategies.process_group import check_backend

# Longest wait for the servers' answers to the farewell of a rank that has failed, in seconds.
_LEAVE_SECONDS_AFTER_FAILURE = 1.0
# Most waits of rank 0 for the servers while the other ranks wait for it.
_WAITS_OF_RANK_0 = 3


class ParameterServerStrategy(ConnectedDDPStrategy):
    """Data parallel strategy whose parameters are updated on servers.

    Each rank pushes its gradients to the servers, which hold the parameters and the optimizer, and
    gets the new parameters back. A rank has no optimizer state. Pushes overlap with backward, and
    the parameters of a layer come back while gradients of others are still on their way.

    Checkpoints are ordinary ones, with the state of the servers' optimizer; any Trainer can resume
    from them without this package. With a codec they also hold the residuals of all ranks.

    Args:
        consistency: "bsp": each step waits for the gradients of all ranks, and updates with their
            mean, like training on the joint batch. "asp": no rank waits for another; each gradient
            is an update of its own, with 1/ranks of the learning rate. "ssp": like "asp", but a
            rank waits when it is ahead of another by more than `staleness` steps (Ho et al., 2013).
        staleness: Largest number of steps by which a rank may be ahead of another under "ssp".
        servers: "embedded" for servers in rank 0's process, or addresses of `dlres ps serve`, such
            as ["tcp://10.0.0.1:5600"]. Parameters are shared out over the servers by bytes.
        embedded_servers: Number of embedded servers.
        codec: Name of a gradient codec for pushes; None leaves gradients as they are.
        codec_options: Keyword arguments of the codec.
        key_bytes: Largest part of a parameter that is pushed and pulled at once.
        overlap: Push gradients in backward. False pushes them after it, when nothing can change
            them any more.
        worker_deadline: Time of silence after which servers shut a rank out.
        log_bytes: Bytes of pushes that each rank keeps for a restarted server, at least those of
            two steps.
        log_directory: Directory in memory, such as /dev/shm, for that log; a rank that is killed
            leaves its file there. None: own memory.
        key: File of this rank's secret key, for servers that were started with keys.
        server_key: File of the servers' public key, or one file per server.
        timeout: Time that a rank waits for another, or for a server: seconds, text such as
            "10min", or a timedelta.
        process_group_backend: Backend of torch.distributed; None chooses gloo on the CPU, and NCCL
            beside gloo on GPUs.
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer.

    Attributes:
        tracer: Recorder of this rank's spans.
        state_directory: Directory of files for the optimizer states that rank 0 fetches for
            checkpoints; None for memory. `ParameterMirror(disk=...)` sets it.

    Raises:
        ConfigError: If an argument has a bad value; when training starts, if the optimizer, the
            precision or a parameter does not suit a parameter server.
    """

    strategy_name: ClassVar[str] = "dlres_parameter_server"
    # Read by callbacks: the optimizers keep no state on a rank.
    updates_elsewhere: ClassVar[bool] = True

    def __init__(
        self,
        *,
        consistency: Literal["bsp", "ssp", "asp"] = "bsp",
        staleness: int = 2,
        servers: str | list[str] = EMBEDDED,
        embedded_servers: int = 1,
        codec: str | None = None,
        codec_options: dict[str, Any] | None = None,
        key_bytes: int | str = "512KiB",
        overlap: bool = True,
        worker_deadline: float | str = "1min",
        log_bytes: int | str = "256MiB",
        log_directory: str | Path | None = None,
        key: str | Path | None = None,
        server_key: str | Path | list[str | Path] | None = None,
        timeout: float | str | timedelta = "5min",
        process_group_backend: str | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        self._options = ParameterServerConfig(
            consistency=consistency,
            staleness=staleness,
            servers=servers,
            embedded_servers=embedded_servers,
            codec=codec,
            codec_options=codec_options,
            key_bytes=key_bytes,
            overlap=flag("overlap", overlap),
            worker_deadline=worker_deadline,
            log_bytes=log_bytes,
            log_directory=log_directory,
            key=key,
            server_key=server_key,
            timeout=timeout,
        )
        check_backend(process_group_backend)
        self._wait_seconds = timeout_seconds(timeout)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=self._wait_seconds),
        )
        self._tracer = Tracer()
        self._hosted: HostedServers | None = None
        self._session: WorkerSession | None = None
        self._updates: RemoteUpdates | None = None
        self._keys: ModelKeys | None = None
        self._clipping = Clipping()
        self._residuals = CheckpointedResiduals(may_exist=codec is not None)
        # True after a run whose optimizer states were lost with its servers.
        self._has_lost_states = False
        # On rank 0, from the start of the first training on.
        self._report: ServerReport | None = None
        # True while Lightning runs a backward whose gradients are accumulated only.
        self._accumulates = False
        self.state_directory: Path | None = None

    @property
    @override
    def tracer(self) -> Tracer:
        return self._tracer

    @property
    def session(self) -> WorkerSession | None:
        """Session of this rank with the servers; None outside of training."""
        return self._session

    @property
    def server_report(self) -> str | None:
        """State of the servers at the end of the latest training, as Markdown; None before it, and
        on ranks other than 0."""
        return None if self._report is None else self._report.text

    @override
    def setup_environment(self) -> None:
        self._residuals.begin_run()
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        with announcing_failures(lambda: self._connection):
            super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self._residuals.begin_fit()
            self._has_lost_states = False

    @override
    def configure_ddp(self) -> None:
        """Give all ranks the parameters and buffers of rank 0; nothing wraps the model."""
        refuse_lazy_parameters(self._module)
        scaler = getattr(self.precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            got, fix = self.precision_plugin.precision, 'precision="bf16-mixed"'
            rule = "one without a loss scaler for a parameter server"
            raise ConfigError(got_expected("precision", got, rule, fix))
        if self.world_size > 1:
            assert self._connection is not None
            share_model(self._module, self._wait_seconds, self._connection.check)

    @property
    @override
    def _ranks_wait_for_each_other(self) -> bool:
        return self._options.consistency == BSP

    @override
    def on_train_start(self) -> None:
        """Start the job: now optimizers have the state of a checkpoint."""
        super().on_train_start()
        with announcing_failures(lambda: self._connection):
            self._start_session()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Start the job again if a callback has run the training loop within this one."""
        super().on_train_batch_start(batch, batch_idx)
        if self._session is None:
            with announcing_failures(lambda: self._connection):
                self._start_session()

    def _start_session(self) -> None:
        assert self._connection is not None
        # A callback may run the training loop at any time, such as a search of the learning rate.
        self._end_session()
        connection, options = self._connection, self._options
        optimizers = [unwrapped(optimizer) for optimizer in self.optimizers]
        refuse_callbacks(self._module.trainer, self._module)
        codec = options.made_codec()
        if codec is not None and not codec.suits_adam:
            fix = "an optimizer such as SGD"
            warn_about_few_bits("codec", codec.name, self.optimizers, fix=fix)
        self._hosted = host_servers(options, self.global_rank, self._wait_seconds, connection.check)
        servers = len(self._hosted.addresses)
        self._keys = keys_of(self._module, optimizers, servers, options.key_size())
        parameters = KeyedParameters(self._keys.parameters)
        job = job_of(
            options, self._hosted, self._keys, self.global_rank, self.world_size, self._wait_seconds
        )
        if self.global_rank == 0:
            self._session = WorkerSession(job, parameters, connection.check)
            self._session.start(states_by_key(self._keys, optimizers))
        # The other ranks connect later. If a server cannot hold so many connections, it may close
        # that of rank 0, which could then not learn that the server refuses the job. They wait for
        # longer than rank 0, whose error names the server.
        gather_bytes(b"", _WAITS_OF_RANK_0 * self._wait_seconds, connection.check)
        self._session = self._session or WorkerSession(job, parameters, connection.check)
        self._residuals.continue_in(self._session)
        self._session.join()
        trainer = self._module.trainer
        pushes_early, bounds = self._pushes_early(), None
        if pushes_early and self._ranks_wait_for_each_other:
            # No other code may clip then, but a callback may change the Trainer's bounds.
            bounds = partial(trainer_bounds, trainer)
        self._clipping = Clipping(bounds)
        if self._ranks_wait_for_each_other:
            self._clipping.attach(self.precision_plugin)
        self._updates = RemoteUpdates(
            self._session,
            self._keys,
            optimizers,
            self._clipping,
            lambda: pushes_early and not self._accumulates and not self._clips_itself(),
        )
        if self.global_rank == 0:
            hosted = self._hosted
            self._report = ServerReport(hosted.addresses, hosted.curve, hosted.server_keys)
        nbytes = sum(key.nbytes for key in self._keys.keys)
        rank_zero_info(
            f"dlres: {len(self._keys.keys)} keys with {format_bytes(nbytes)} on {servers} "
            f"parameter server(s), {options.consistency}."
        )

    def _pushes_early(self) -> bool:
        """Return True if gradients may be pushed in the last backward before a step."""
        trainer = self._module.trainer
        return (
            self._options.overlap
            and self._module.automatic_optimization
            and not gradients_are_seen(trainer, self._module)
            # A plugin of the user's own may change gradients in its `optimizer_step`.
            and type(self.precision_plugin).__module__.startswith("lightning.")
        )

    def _clips_itself(self) -> bool:
        """Return True if Lightning clips the gradients of each rank."""
        clip_val = self._module.trainer.gradient_clip_val
        return not self._ranks_wait_for_each_other and bool(clip_val)

    @override
    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._updates is not None:
            self._updates.prepare_step(unwrapped(optimizer))
        return super().optimizer_step(optimizer, *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context manager for a backward whose gradients are accumulated only."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer; of one on the servers only on rank 0."""
        inner = unwrapped(optimizer)
        if self._session is None or self._keys is None or not self.is_global_zero:
            if self._has_lost_states:
                rank_zero_warn(
                    "The servers have ended with the failed run, so this checkpoint has no state "
                    "of the optimizer. To resume, use one that was saved before, or in "
                    "on_exception of a callback."
                )
            return super().optimizer_state(optimizer)
        try:
            fill_state(self._keys, inner, self._session.states, self.state_directory)
            return inner.state_dict()
        finally:
            # Other code may not clear it, see `RemoteUpdates`.
            dict.clear(inner.state)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the module; while ranks train without waiting for each other, all
        must call it, and rank 0 has the updates by the pushes of all of them."""
        self._take_latest_values()
        return super().lightning_module_state_dict()

    def _take_latest_values(self) -> None:
        session, connection = self._session, self._connection
        is_running = self._module.trainer.state.status == TrainerStatus.RUNNING
        if session is None or connection is None or self._ranks_wait_for_each_other:
            return
        if not is_running:
            # After a failure, other ranks may not come here, and miss pushes.
            session.end_pushes([])
        elif not self._end_pushes(session, connection) and self.is_global_zero and self._updates:
            self._updates.refresh()

    def _end_pushes(self, session: WorkerSession, connection: Connection) -> bool:
        """Let values and states from the servers have the pushes of all ranks; return True if a
        callback has put other values there, such as averages."""
        has_edits = self._updates is not None and self._updates.are_edited()
        is_edited = connection.any_rank(has_edits)
        if not self._ranks_wait_for_each_other:
            numbers = connection.gather(list(map(float, session.numbers())))
            session.end_pushes([list(map(int, one)) for one in numbers])
        return is_edited

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        self._residuals.add_to(checkpoint, self._session, self._gathered)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        is_used = self._module.trainer.state.fn == TrainerFn.FITTING
        self._residuals.take_from(checkpoint, is_used=is_used)
        return checkpoint

    @override
    def on_train_end(self) -> None:
        """Give the optimizers of rank 0 their state, for a checkpoint that a script saves now."""
        super().on_train_end()
        if self._session is None or self._keys is None or self._connection is None:
            return
        if self._report is not None:
            # Before the other ranks leave.
            self._report.finish()
        is_edited = self._end_pushes(self._session, self._connection)
        if not self._ranks_wait_for_each_other:
            if is_edited:
                # Each rank has averaged the weights that it had.
                for parameter in self._module.parameters():
                    broadcast_from_rank_0(parameter.detach())
            elif self._updates is not None:
                self._updates.refresh()
        if self.is_global_zero:
            for optimizer in map(unwrapped, self.optimizers):
                fill_state(self._keys, optimizer, self._session.states, self.state_directory)
        # Until here, a server that is started again needs the pushes of all ranks.
        self._connection.any_rank(False)
        self._end_session(self._connection)

    def _end_session(self, connection: Connection | None = None) -> None:
        """Leave the servers, and stop those of this process.

        Args:
            connection: Connection to the other ranks, which end their sessions, too. None: they may
                not do so, since a rank has failed.
        """
        updates, self._updates = self._updates, None
        session, self._session = self._session, None
        hosted, self._hosted = self._hosted, None
        self._clipping.detach(self.precision_plugin)
        if updates is not None:
            updates.close()
        if session is not None:
            self._residuals.keep(session)
            # After a failure, servers of another process or rank may have ended, too.
            session.leave(None if connection is not None else _LEAVE_SECONDS_AFTER_FAILURE)
        try:
            if connection is not None:
                # A rank that has not left yet would wait for the servers.
                connection.any_rank(False)
        finally:
            if hosted is not None:
                hosted.close()

    @override
    def teardown(self) -> None:
        connection, self._connection = self._connection, None
        self._has_lost_states |= self._session is not None
        try:
            self._end_session(connection if self._ends_on_all_ranks else None)
        finally:
            if connection is not None:
                connection.close()
            super().teardown()
