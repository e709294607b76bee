"""Calls of `self.log` in a training step: recorded on the rank that computes the loss, and replayed
on every rank.

If the step ran per micro-batch, the records of the micro-batches are merged first.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates

_LOG_SIGNATURE = inspect.signature(LightningModule.log)
# Functions that merge the values of micro-batches, by the name of `reduce_fx`.
_MERGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


@dataclass
class LogRecord:
    """One call of `self.log`.

    Attributes:
        name: The name that the value is logged under.
        value: A number, a tensor, or a metric of the module.
        options: Keyword arguments of `self.log`.
    """

    name: str
    value: Any
    options: dict[str, Any]

    def to_tree(self, metrics: MetricStates) -> Tree:
        """Return the record as plain data.

        A metric is replaced by its name, and a reduce function by its import path.

        Raises:
            UnsupportedStepError: If other ranks cannot find the metric or the reduce function.
        """
        # A process group cannot be sent. Replayed values need none: they are equal on all ranks.
        options = {k: v for k, v in self.options.items() if k != "sync_dist_group"}
        reduce_fx = options.get("reduce_fx")
        if callable(reduce_fx):
            options["reduce_fx"] = ["function", _import_path(reduce_fx, self.name)]
        if isinstance(self.value, Metric):
            metric_name = metrics.name_of(self.value)
            if metric_name is None:
                raise UnsupportedStepError(
                    f"self.log({self.name!r}, ...) must get a metric that is a submodule of the "
                    f"LightningModule, got a {type(self.value).__name__} that is no submodule: "
                    "other ranks cannot find it. Make it an attribute, or put it into an "
                    "nn.ModuleDict or nn.ModuleList."
                )
            return [self.name, ["metric", metric_name], options]
        value = self.value.detach().clone() if isinstance(self.value, Tensor) else self.value
        return [self.name, ["value", value], options]

    @staticmethod
    def from_tree(tree: Tree, metrics: MetricStates) -> LogRecord:
        """Return the record that `to_tree` encoded.

        Raises:
            UnsupportedStepError: If this rank does not have the reduce function.
        """
        name, (kind, value), options = tree
        if isinstance(options.get("reduce_fx"), list):
            options["reduce_fx"] = _function_at(options["reduce_fx"][1])
        return LogRecord(name, metrics.metrics[value] if kind == "metric" else value, options)

    def replay(self, module: LightningModule) -> None:
        """Log the value with the module's own `self.log`."""
        module.log(self.name, self.value, **self.options)


def logs_in(records: Sequence[Tree], metrics: MetricStates) -> list[list[LogRecord]]:
    """Return the calls of `self.log` for every run of a step, in the order of micro-batches.

    Args:
        records: Results of `StepEffects.to_tree` of the ranks that ran the step.
        metrics: The metrics of this rank.

    Raises:
        UnsupportedStepError: If this rank does not have a reduce function of a call.
    """
    runs = [run for record in records for run in record["logs"]]
    return [[LogRecord.from_tree(tree, metrics) for tree in run] for run in runs]


@contextmanager
def isolated_log_calls(module: LightningModule) -> Iterator[list[LogRecord]]:
    """Context manager that records `self.log` and `self.log_dict` in the yielded list, and does not
    log.

    `self.print` prints on every rank, not only on rank 0. The caller captures the text, see
    `printing.isolated_output`.
    """
    records: list[LogRecord] = []

    def log(*args: Any, **kwargs: Any) -> None:
        # Wrong arguments raise the TypeError that the replaced method would raise.
        arguments = _LOG_SIGNATURE.bind(module, *args, **kwargs).arguments
        del arguments["self"]
        name, value = arguments.pop("name"), arguments.pop("value")
        records.append(LogRecord(name, value, options=arguments))

    replacements = {"log": log, "print": print}
    saved = {name: module.__dict__[name] for name in replacements if name in module.__dict__}
    module.__dict__.update(replacements)
    try:
        yield records
    finally:
        for name in replacements:
            module.__dict__.pop(name, None)
        module.__dict__.update(saved)


def merge_parts(parts: Sequence[Sequence[LogRecord]], sizes: Sequence[int]) -> list[LogRecord]:
    """Return the records of the batch, merged from those of its micro-batches.

    Means are weighted by samples. Sums, maxima and minima are those of the values. A reduce
    function of the user's gets the stacked values. Micro-batches that did not log a name do not
    count for it. If each micro-batch logged a name several times, the first calls are merged with
    each other, then the second calls, and so on.

    Args:
        parts: Records of every micro-batch.
        sizes: Samples of every micro-batch.
    """
    columns: dict[tuple[str, int], list[tuple[LogRecord, int]]] = {}
    for part, size in zip(parts, sizes, strict=True):
        num_calls: dict[str, int] = {}
        for record in part:
            call = num_calls[record.name] = num_calls.get(record.name, 0) + 1
            columns.setdefault((record.name, call), []).append((record, size))
    return [_merge(*zip(*column, strict=True)) for column in columns.values()]


def _merge(column: Sequence[LogRecord], sizes: Sequence[int]) -> LogRecord:
    first = column[0]
    if isinstance(first.value, Metric):
        # The states of metrics are merged by `MetricStates`.
        return first
    options = dict(first.options)
    if options.get("batch_size") is not None:
        options["batch_size"] = sum(record.options["batch_size"] for record in column)
    values = torch.stack(
        [torch.as_tensor(record.value, dtype=torch.float64).cpu() for record in column]
    )
    reduce_fx = options.get("reduce_fx", "mean")
    if isinstance(reduce_fx, str):
        # Lightning ignores the case.
        reduce_fx = reduce_fx.lower()
    if reduce_fx in ("mean", "avg", torch.mean):
        weights = torch.tensor(sizes, dtype=torch.float64).view(-1, *[1] * (values.dim() - 1))
        merged = (values * weights).sum(0) / sum(sizes)
    else:
        reduce = reduce_fx if callable(reduce_fx) else _MERGERS[reduce_fx]
        merged = reduce(values)
    dtype = first.value.dtype if isinstance(first.value, Tensor) else torch.get_default_dtype()
    return LogRecord(
        first.name,
        # The mean of integers is not an integer.
        merged.to(dtype if dtype.is_floating_point else torch.get_default_dtype()),
        options,
    )


def _import_path(function: Callable[..., Any], name: str) -> str:
    """Return "module:qualname" of a reduce function.

    Args:
        function: The reduce function.
        name: Name of the logged value, for the message.

    Raises:
        UnsupportedStepError: If this path does not lead to the function.
    """
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "?")
    path = f"{module or 'torch'}:{qualname}"
    try:
        result = _function_at(path)
    except UnsupportedStepError:
        result = None
    if result is function:
        return path
    # Functions of torch that are written in C++ do not name their module correctly.
    if getattr(torch, getattr(function, "__name__", "?"), None) is function:
        return f"torch:{getattr(function, '__name__', '?')}"
    raise UnsupportedStepError(
        f"reduce_fx of self.log({name!r}) must be a function that all ranks can import, got "
        f"{function!r}. Use a name such as 'mean' or 'max', or a function defined at the top of a "
        "module."
    )


def _function_at(path: str) -> Callable[..., Any]:
    module, _, qualname = path.partition(":")
    result: Any = sys.modules.get(module)
    for part in qualname.split("."):
        result = getattr(result, part, None)
    if not callable(result):
        raise UnsupportedStepError(
            f"The reduce function {path!r} of self.log must exist on every rank, but this rank has "
            "no such function. Import its module on all ranks."
        )
    return result  # type: ignore[no-any-return]
