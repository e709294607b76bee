"""What a training step gives to the loggers itself (`self.logger.log_metrics`), beside `self.log`.

Loggers write on rank 0 only, and the step runs elsewhere, and more than once: the calls are taken
down, and made once on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.loggers import Logger

from lightning_dlres.core.tree import Tree, map_tensors

_METHOD = "log_metrics"


@dataclass(frozen=True)
class LoggerCall:
    """A call of `log_metrics` of the logger with this number."""

    logger: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to_tree(self) -> Tree:
        """Return the call as plain data."""
        copied = map_tensors(lambda t: t.detach().clone(), [self.args, self.kwargs])
        return [self.logger, *copied]

    @staticmethod
    def make(tree: Tree, loggers: Sequence[Logger]) -> None:
        """Make the call that `to_tree` took down, for real."""
        index, args, kwargs = tree
        getattr(loggers[index], _METHOD)(*args, **kwargs)


@contextmanager
def recording_loggers(loggers: Sequence[Logger]) -> Iterator[list[LoggerCall]]:
    """While active, calls of `log_metrics` go into the yielded list."""
    calls: list[LoggerCall] = []

    def recorder(index: int) -> Any:
        def log_metrics(*args: Any, **kwargs: Any) -> None:
            calls.append(LoggerCall(index, args, kwargs))

        return log_metrics

    saved = [vars(logger).get(_METHOD) for logger in loggers]
    for index, logger in enumerate(loggers):
        vars(logger)[_METHOD] = recorder(index)
    try:
        yield calls
    finally:
        for logger, own in zip(loggers, saved, strict=True):
            vars(logger).pop(_METHOD, None)
            if own is not None:
                vars(logger)[_METHOD] = own
