"""DDPStrategy whose errors name the rank that was lost.

Lightning sums logs, gathers predictions and waits at barriers with collectives of torch, and so may
the layers of a model. If a rank is lost, the error of such a collective names no rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dlres.strategies.connection import Connection

_T = TypeVar("_T")


class NamedFailuresStrategy(DDPStrategy):
    """DDPStrategy that raises a `PeerError` in the place of the errors of torch's collectives."""

    _connection: Connection | None = None

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
