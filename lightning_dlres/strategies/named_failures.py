"""DDPStrategy whose ranks are joined by a `Connection`, and whose errors name a lost rank.

Lightning sums logs, gathers predictions and waits at barriers with collectives of torch, and so may
the layers of a model. If a rank is lost, the error of such a collective names no rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres.core.trace import Tracer
from lightning_dlres.strategies.connection import Connection, require_script

_T = TypeVar("_T")


class NamedFailuresStrategy(DDPStrategy):
    """DDPStrategy that raises a `PeerError` in the place of the errors of torch's collectives.

    Subclasses set `_wait_seconds`, the time that a rank waits for another.
    """

    _connection: Connection | None = None
    _wait_seconds: float

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
        return nullcontext() if self._connection is None else self._connection.naming_lost_ranks()

    def _call_naming_lost_ranks(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """Call a function; errors of torch's collectives in it get the name of the lost rank."""
        with self._naming_lost_ranks():
            return call(*args, **kwargs)

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._call_naming_lost_ranks(super().barrier, *args, **kwargs)

    @override
    def broadcast(self, obj: _T, src: int = 0) -> _T:
        with self._naming_lost_ranks():
            return super().broadcast(obj, src)

    @override
    def reduce(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._call_naming_lost_ranks(super().reduce, *args, **kwargs)

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
