"""What a training step gives to the loggers itself, beside `self.log`:
`self.logger.log_image(...)`, `self.logger.experiment.add_text(...)`.

Loggers write on rank 0 only, and the step runs elsewhere, and more than once: the calls are taken
down, and made once on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.tree import Tree, map_tensors

_RECORDER = "_dlres_recorder"


@dataclass(frozen=True)
class LoggerCall:
    """A call of a logger's method, or of one of its experiment.

    Attributes:
        logger: number of the logger.
        path: names that lead from the logger to the method.
    """

    logger: int
    path: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to_tree(self) -> Tree:
        """Return the call as plain data; without its arguments if they cannot be sent."""
        try:
            copied = map_tensors(lambda t: t.detach().clone(), [self.args, self.kwargs])
        except ConfigError as error:
            return [self.logger, list(self.path), None, str(error)]
        return [self.logger, list(self.path), *copied]

    @staticmethod
    def make(tree: Tree, loggers: Sequence[Logger]) -> None:
        """Make the call that `to_tree` took down, for real."""
        index, path, args, kwargs = tree
        if args is None:
            rank_zero_warn(
                f"dlres: logger.{'.'.join(path)}(...) in training_step is left out: {kwargs}"
            )
            return
        method: Any = loggers[index]
        for name in path:
            method = getattr(method, name)
        method(*args, **kwargs)


class _Recorder:
    """Stands for a logger's experiment, or for something of it; calls are taken down and return
    nothing."""

    def __init__(self, calls: list[LoggerCall], logger: int, path: tuple[str, ...]) -> None:
        self._calls, self._logger, self._path = calls, logger, path

    def __getattr__(self, name: str) -> _Recorder:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Recorder(self._calls, self._logger, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append(LoggerCall(self._logger, self._path, args, kwargs))

    def __getitem__(self, key: Any) -> _Recorder:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        self._calls.append(LoggerCall(self._logger, (*self._path, "__setitem__"), (key, value), {}))


@contextmanager
def recording_loggers(loggers: Sequence[Logger]) -> Iterator[list[LoggerCall]]:
    """Context manager that takes down what is given to the loggers, in the yielded list: calls of
    methods named `log...`, and of what is in `experiment`."""
    calls: list[LoggerCall] = []
    classes = [type(logger) for logger in loggers]
    for index, logger in enumerate(loggers):
        logger.__class__ = _recording_class(classes[index])
        vars(logger)[_RECORDER] = _Recorder(calls, index, ())
    try:
        yield calls
    finally:
        for logger, kind in zip(loggers, classes, strict=True):
            logger.__class__ = kind
            del vars(logger)[_RECORDER]


@cache
def _recording_class(kind: type[Logger]) -> type[Logger]:
    names = [name for name in dir(kind) if name.startswith("log_") or name == "experiment"]
    methods = [n for n in names if n == "experiment" or callable(getattr(kind, n, None))]
    # A property wins over what an instance has.
    replaced = {name: property(_of_recorder(name)) for name in methods}
    return type(kind.__name__, (kind,), {**replaced, "__module__": kind.__module__})


def _of_recorder(name: str) -> Callable[[Any], Any]:
    return lambda logger: getattr(vars(logger)[_RECORDER], name)
