"""Base class of strategies whose ranks are joined by a `Connection`.

A connection is a process group, a mailbox for messages between ranks, and a watch that notices
dead ranks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from typing_extensions import override

from lightning_dlres import _compat
from lightning_dlres.core.comm.collectives import any_rank, no_check
from lightning_dlres.core.comm.mailbox import Mailbox
from lightning_dlres.core.errors import PeerTimeoutError, add_note
from lightning_dlres.core.trace import Tracer
from lightning_dlres.strategies.connection import (
    Connection,
    announcing_failures,
    require_script,
)
from lightning_dlres.strategies.process_group import DEFAULT_GROUP, check_backend
from lightning_dlres.strategies.signals import DeferredSignals


class ConnectedStrategy(ParallelStrategy):
    """Strategy that launches one process per device and joins them in a `Connection`.

    Every rank sees the whole batch and all logs, so `reduce` and `all_gather` return their
    argument.

    Args:
        accelerator: Set by the Trainer.
        parallel_devices: Set by the Trainer.
        cluster_environment: Set by the Trainer.
        checkpoint_io: Set by the Trainer.
        precision_plugin: Set by the Trainer.
        process_group_backend: Backend of torch.distributed; None chooses gloo, which takes ranks
            with devices of different kinds.
        timeout: Seconds that a rank waits for another.

    Attributes:
        tracer: Recorder of this rank's computations and transfers as spans.
    """

    def __init__(
        self,
        *,
        accelerator: Accelerator | None,
        parallel_devices: list[torch.device] | None,
        cluster_environment: ClusterEnvironment | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
        process_group_backend: str | None,
        timeout: float,
    ) -> None:
        super().__init__(
            accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin
        )
        check_backend(process_group_backend)
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._num_nodes = 1
        self._connection: Connection | None = None
        self._signals: DeferredSignals | None = None
        self.tracer = Tracer()

    def _rank_names(self) -> list[str]:
        """Return the name of each rank in messages."""
        return [f"rank {rank}" for rank in range(self.world_size)]

    @property
    def _has_run(self) -> bool:
        """True once a run was set up; subclasses override it.

        From then on, `barrier` also waits when no run is active.
        """
        return False

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
        """False, so that Lightning neither shards the data nor reduces logs: every rank sees the
        whole batch and all logs."""
        return False

    def set_world_ranks(self) -> None:
        """Set this process's global rank in the cluster environment; called by the Trainer."""
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

    def _join_ranks(self) -> None:
        """Join the process group and connect the ranks; called by all ranks."""
        assert self.cluster_environment is not None
        DEFAULT_GROUP.join(
            self.cluster_environment,
            self._process_group_backend,
            limit=timedelta(seconds=self._timeout),
            wait_seconds=self._timeout,
        )
        # Lightning advises sync_dist=True on several ranks. Here every rank logs the value of the
        # whole batch already.
        warnings.filterwarnings("ignore", message=r".*sync_dist=True.*")
        self._connection = self._connect()
        self._signals = DeferredSignals(self.cluster_environment, self._connection)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks.

        It also waits after the run: a checkpoint that is saved then must exist before a rank reads
        it.
        """
        if name == "run-stage" and self._signals is not None:
            # This is the Trainer's first barrier after it has registered its signal handlers.
            self._signals.install()
        if self._connection is not None:
            with self._short_timeout_after_failure():
                self._connection.any_rank(False)
        elif self._has_run and dist.is_initialized():
            any_rank(False, self._timeout, no_check)

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
    def on_exception(self, exception: BaseException) -> None:
        if self._connection is not None and not self._ends_on_all_ranks(exception):
            self._connection.announce_failure(exception)

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

    def _ends_on_all_ranks(self, exception: BaseException) -> bool:
        """Return True if all ranks end here together, after a SIGTERM to one of them."""
        return isinstance(exception, SIGTERMException) and self._deferred_signals().ends_run()

    def _connect(self) -> Connection:
        assert self.cluster_environment is not None
        return Connection(
            self._rank_names(), self.cluster_environment, self.num_nodes, self._timeout, self.tracer
        )

    @contextmanager
    def _mailbox_in_or_after_run(self) -> Iterator[Mailbox]:
        """Context manager that yields a mailbox, also when no run is active.

        During the run it is the run's mailbox. After the run it belongs to a temporary connection,
        for a script that saves a checkpoint then.
        """
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
    def _short_timeout_after_failure(self) -> Iterator[None]:
        """Context manager that shortens the timeout of collective calls if this rank has raised.

        A callback may save a checkpoint after an exception on this rank alone. The other ranks do
        not know of the checkpoint, and so do not take part.
        """
        interrupted = self._module.trainer.state.status == TrainerStatus.INTERRUPTED
        if self._connection is None or not interrupted:
            yield
            return
        cause = sys.exc_info()[1]
        self._connection.shorten_timeout()
        try:
            yield
            return
        except BaseException as error:
            self._connection.announce_failure(cause or error)
            # Lightning does not call teardown after a callback that raises here.
            self.teardown()
            if cause is None or not isinstance(error, PeerTimeoutError):
                raise error from cause
        add_note(cause, "The other ranks did not raise, so no checkpoint was saved after this.")
        raise cause

    def _announcing_failures(self) -> AbstractContextManager[None]:
        """Context manager that tells the other ranks of a failure at once."""
        return announcing_failures(lambda: self._connection)
