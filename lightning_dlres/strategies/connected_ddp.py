"""DDPStrategy whose ranks are joined by a `Connection`.

Its errors name a lost rank, and a SIGTERM to one rank ends all.

Lightning sums logs, gathers predictions and waits at barriers with collectives of torch, and so may
the layers of a model. If a rank is lost, the error of such a collective names no rank. Lightning's
handler of SIGTERM itself starts a collective, at a place where the other ranks start another one.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres.core.comm.gathered_on_disk import gather_on_disk
from lightning_dlres.core.trace import Tracer
from lightning_dlres.strategies.connection import Connection, require_script
from lightning_dlres.strategies.process_group import DEFAULT_GROUP
from lightning_dlres.strategies.signals import DeferredSignals, handle_before_batches

_T = TypeVar("_T")


class ConnectedDDPStrategy(DDPStrategy):
    """DDPStrategy that raises a `PeerError` in the place of the errors of torch's collectives, and
    handles signals before the same training batch on all ranks.

    Subclasses set `_wait_seconds`, the time that a rank waits for another.
    """

    _connection: Connection | None = None
    _wait_seconds: float
    # Signals of this run; None before its setup.
    _signals: DeferredSignals | None = None
    _undo_signals: Callable[[], None] | None = None
    # Lightning divides sums of logged values by mean counts of samples. It rounds means of whole
    # numbers down, which is exact only if all ranks have equal counts.
    _keeps_fractions = False

    @property
    def tracer(self) -> Tracer:
        """Recorder of this rank's tasks as spans."""
        raise NotImplementedError

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        require_script(self.cluster_environment, self.num_processes)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        if self._process_group_backend is None and self.root_device.type == "cuda":
            # Small messages between the ranks, and those of the mailbox, lie on the CPU.
            self._process_group_backend = "cpu:gloo,cuda:nccl"
        super().setup_environment()
        self._connection = self._connect()
        assert self.cluster_environment is not None
        self._signals = DeferredSignals(self.cluster_environment, self._connection)

    @override
    def setup_distributed(self) -> None:
        self.set_world_ranks()
        assert self.cluster_environment is not None
        # Lightning leaves a group that exists as it is.
        DEFAULT_GROUP.join(
            self.cluster_environment,
            self._process_group_backend,
            limit=self._timeout,
            wait_seconds=self._wait_seconds,
            device=self.root_device if self.root_device.type != "cpu" else None,
        )
        super().setup_distributed()

    @property
    def _ranks_wait_for_each_other(self) -> bool:
        """True if all ranks train the same batch at the same time; subclasses override it."""
        return True

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # Training may start more than once in a run, as after a search of the learning rate.
        if self.world_size > 1 and self._undo_signals is None:
            assert self._signals is not None
            self._undo_signals = handle_before_batches(
                self._module.trainer, self._signals, together=self._ranks_wait_for_each_other
            )

    @property
    def _ends_on_all_ranks(self) -> bool:
        """True if all ranks end the run together, after a SIGTERM to one of them."""
        return self._signals is not None and self._signals.ends_run()

    @property
    def _has_failed_alone(self) -> bool:
        """True after an exception on this rank, if other ranks may go on or have failed, too."""
        if self.lightning_module is None or self._ends_on_all_ranks:
            return False
        return self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED

    @override
    def teardown(self) -> None:
        undo, self._undo_signals = self._undo_signals, None
        if undo is not None:
            undo()
        self._signals = None
        super().teardown()

    def _connect(self) -> Connection:
        assert self.cluster_environment is not None
        names = [f"rank {rank}" for rank in range(self.world_size)]
        return Connection(
            names, self.cluster_environment, self.num_nodes, self._wait_seconds, self.tracer
        )

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._connection is not None and not isinstance(exception, SIGTERMException):
            # A collective that the user's code has called may be broken by another rank.
            self._connection.announce_failure(self._connection.reason_of(exception))

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _naming_lost_ranks(self) -> AbstractContextManager[None]:
        """Context manager that gives errors of torch's collectives the name of the lost rank."""
        self._announce_exception()
        return nullcontext() if self._connection is None else self._connection.naming_lost_ranks()

    def _call_naming_lost_ranks(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call a function; errors of torch's collectives in it get the name of the lost rank."""
        with self._naming_lost_ranks():
            return call(*args, **kwargs)

    def _gathered(self, own: dict[str, Any], what: str) -> list[dict[str, Any]] | None:
        """Return every rank's part of a checkpoint on rank 0; None elsewhere.

        None on rank 0, with a warning, if other ranks may have failed or save no checkpoint.

        Args:
            own: This rank's part.
            what: Name of the part in messages.
        """
        if self._has_failed_alone:
            warnings.warn(f"The checkpoint has no {what}, because the run failed.", stacklevel=2)
            return None
        if self._connection is not None:
            return gather_on_disk(own, self._connection.mailbox, f"its {what}")
        # A script saves a checkpoint after the run.
        with closing(self._connect()) as connection:
            return gather_on_disk(own, connection.mailbox, f"its {what}")

    def _announce_exception(self) -> None:
        """Tell the other ranks of an exception on this one that Lightning is about to handle.

        A callback's `on_exception` may save a checkpoint, or call other collectives, before the
        strategy's `on_exception`. The other ranks would wait for this one until their deadline.
        """
        # Lightning calls `on_exception` in its `except` clause.
        exception = sys.exc_info()[1]
        if self._connection is None or exception is None or not self._has_failed_alone:
            return
        if not isinstance(exception, SIGTERMException):
            self._connection.announce_failure(self._connection.reason_of(exception))
            self._connection.shorten_timeout()

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if self._has_failed_alone:
            # The other ranks do not come.
            self._announce_exception()
            return
        # This is the Trainer's first barrier after it has registered its signal handlers.
        is_first = args[:1] == ("run-stage",) and self.world_size > 1
        if is_first and self._module.trainer.state.fn == TrainerFn.FITTING:
            assert self._signals is not None
            # Lightning's handler of the other signal, which ends a SLURM job, needs all ranks.
            self._signals.install(only_sigterm=not self._ranks_wait_for_each_other)
        self._call_naming_lost_ranks(super().barrier, *args, **kwargs)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        with self._naming_lost_ranks():
            return super().broadcast(obj, src)

    @override
    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: Any = "mean") -> Tensor:
        is_whole = isinstance(tensor, Tensor) and not torch.is_floating_point(tensor)
        if self._keeps_fractions and is_whole and reduce_op in ("mean", "avg"):
            tensor = tensor.double()
        return self._call_naming_lost_ranks(super().reduce, tensor, group, reduce_op)

    @override
    def all_gather(
        self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False
    ) -> Tensor:
        return self._call_naming_lost_ranks(super().all_gather, tensor, group, sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._call_naming_lost_ranks(super().reduce_boolean_decision, decision, all)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_naming_lost_ranks(super().training_step, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_naming_lost_ranks(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_naming_lost_ranks(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._call_naming_lost_ranks(super().predict_step, *args, **kwargs)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return self._call_naming_lost_ranks(
            super().optimizer_step, optimizer, closure, *args, **kwargs
        )
