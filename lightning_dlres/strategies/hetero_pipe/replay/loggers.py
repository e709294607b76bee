"""Calls that a training step makes to the loggers directly, not through `self.log`.

Examples are `self.logger.log_image(...)` and `self.logger.experiment.add_text(...)`. Loggers write
on rank 0 only, but the step may run on another rank, and may run several times. The calls of a run
are recorded, and then made once on every rank.
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
    """One call of a method of a logger, or of its experiment.

    Attributes:
        logger: Index of the logger in `trainer.loggers`.
        path: Steps that lead from the logger to the method. A string is an attribute's name; a
            tuple with one element is a key. `logger.experiment["loss"].append(...)` has the path
            `("experiment", ("loss",), "append")`.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    logger: int
    path: tuple[str | tuple[Any], ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to_tree(self) -> Tree:
        """Return the call as plain data. If its arguments cannot be sent, the error replaces
        them."""
        try:
            return map_tensors(
                lambda t: t.detach().clone(),
                [self.logger, list(self.path), self.args, self.kwargs],
            )
        except ConfigError as error:
            path = [step if isinstance(step, str) else (repr(step[0]),) for step in self.path]
            return [self.logger, path, None, str(error)]

    @staticmethod
    def replay(tree: Tree, loggers: Sequence[Logger]) -> None:
        """Make the call that `to_tree` encoded; warn if its arguments could not be sent."""
        index, path, args, kwargs_or_error = tree
        if args is None:
            steps = [f".{step}" if isinstance(step, str) else f"[{step[0]}]" for step in path]
            rank_zero_warn(
                f"dlres: the call logger{''.join(steps)}(...) in training_step is left out: "
                f"{kwargs_or_error}"
            )
            return
        method: Any = loggers[index]
        for step in path:
            method = getattr(method, step) if isinstance(step, str) else method[step[0]]
        method(*args, **kwargs_or_error)


class _Recorder:
    """Replacement for a logger's `log_` methods and its experiment, and for parts of these.

    Every attribute and item is again a recorder. Calls are recorded and return None.
    """

    def __init__(
        self, calls: list[LoggerCall], logger: int, path: tuple[str | tuple[Any], ...]
    ) -> None:
        self._calls, self._logger, self._path = calls, logger, path

    def __getattr__(self, name: str) -> _Recorder:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Recorder(self._calls, self._logger, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._calls.append(LoggerCall(self._logger, self._path, args, kwargs))

    def __getitem__(self, key: Any) -> _Recorder:
        return _Recorder(self._calls, self._logger, (*self._path, (key,)))

    def __setitem__(self, key: Any, value: Any) -> None:
        self._calls.append(LoggerCall(self._logger, (*self._path, "__setitem__"), (key, value), {}))


@contextmanager
def isolated_loggers(loggers: Sequence[Logger]) -> Iterator[list[LoggerCall]]:
    """Context manager that records calls to the loggers in the yielded list, and does not make
    them.

    It records calls of methods whose name starts with `log_`, and all uses of `experiment`.
    """
    calls: list[LoggerCall] = []
    # A run may be isolated within another one, when its path is recorded again.
    before = [(type(logger), vars(logger).get(_RECORDER)) for logger in loggers]
    for index, logger in enumerate(loggers):
        kind, recorder = before[index]
        logger.__class__ = _recording_class(kind) if recorder is None else kind
        vars(logger)[_RECORDER] = _Recorder(calls, index, ())
    try:
        yield calls
    finally:
        for logger, (kind, recorder) in zip(loggers, before, strict=True):
            logger.__class__ = kind
            if recorder is None:
                del vars(logger)[_RECORDER]
            else:
                vars(logger)[_RECORDER] = recorder


@cache
def _recording_class(kind: type[Logger]) -> type[Logger]:
    """Return a subclass of a logger class that takes `log_` methods and `experiment` from the
    instance's recorder."""
    names = [name for name in dir(kind) if name.startswith("log_") or name == "experiment"]
    methods = [n for n in names if n == "experiment" or callable(getattr(kind, n, None))]
    # `experiment` is often a property of the class, which takes precedence over an attribute of the
    # instance. Only a property of a subclass can replace it.
    replaced = {name: property(_recorder_attribute(name)) for name in methods}
    return type(kind.__name__, (kind,), {**replaced, "__module__": kind.__module__})


def _recorder_attribute(name: str) -> Callable[[Any], Any]:
    return lambda logger: getattr(vars(logger)[_RECORDER], name)
