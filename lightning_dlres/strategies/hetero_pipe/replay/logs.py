"""What the user logs in a training step, taken down on the rank that computes it and said again on
every rank."""

from __future__ import annotations

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

_MERGERS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


@dataclass
class LogRecord:
    """One call of `self.log`. `value` is a number, a tensor, or a metric of the module."""

    name: str
    value: Any
    options: dict[str, Any]

    def to_tree(self, metrics: MetricStates) -> Tree:
        """Return the record as plain data; a metric by its name, a reduce function by its import
        path."""
        options = {k: v for k, v in self.options.items() if k != "sync_dist_group"}
        reduce_fx = options.get("reduce_fx")
        if callable(reduce_fx):
            options["reduce_fx"] = ["function", _path_of(reduce_fx, self.name)]
        if isinstance(self.value, Metric):
            known = metrics.name_of(self.value)
            if known is None:
                raise UnsupportedStepError(
                    f"self.log({self.name!r}, ...): the {type(self.value).__name__} is no "
                    "submodule of the LightningModule, so that other ranks cannot follow it. Make "
                    "it an attribute, or put it into an nn.ModuleDict or nn.ModuleList."
                )
            return [self.name, ["metric", known], options]
        value = self.value.detach().clone() if isinstance(self.value, Tensor) else self.value
        return [self.name, ["value", value], options]

    @staticmethod
    def from_tree(tree: Tree, metrics: MetricStates) -> LogRecord:
        """Build the record that `to_tree` took apart."""
        name, (kind, value), options = tree
        if isinstance(options.get("reduce_fx"), list):
            options["reduce_fx"] = _function_at(options["reduce_fx"][1])
        return LogRecord(name, metrics.metrics[value] if kind == "metric" else value, options)

    def replay(self, module: LightningModule) -> None:
        """Log it, for real."""
        module.log(self.name, self.value, **self.options)


@contextmanager
def recording(module: LightningModule) -> Iterator[list[LogRecord]]:
    """While active, `self.log` and `self.log_dict` of the module write into the yielded list, and
    `self.print` prints on this rank, too."""
    records: list[LogRecord] = []

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        named = dict(
            zip(("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx"), args, strict=False)
        )
        records.append(LogRecord(name, value, {**named, **options}))

    replaced = {"log": log, "print": print}
    saved = {name: module.__dict__[name] for name in replaced if name in module.__dict__}
    module.__dict__.update(replaced)
    try:
        yield records
    finally:
        for name in replaced:
            module.__dict__.pop(name, None)
        module.__dict__.update(saved)


def merge_parts(parts: Sequence[Sequence[LogRecord]], sizes: Sequence[int]) -> list[LogRecord]:
    """Return the records of the whole batch from those of its micro-batches: means weighted by
    samples, sums, maxima, minima, or what a reduce function makes of the stacked values. A name
    that was logged for some micro-batches only counts there."""
    columns: dict[tuple[str, int], list[tuple[LogRecord, int]]] = {}
    for part, size in zip(parts, sizes, strict=True):
        met: dict[str, int] = {}
        for record in part:
            turn = met[record.name] = met.get(record.name, 0) + 1
            columns.setdefault((record.name, turn), []).append((record, size))
    return [_merge(*zip(*column, strict=True)) for column in columns.values()]


def _merge(column: Sequence[LogRecord], sizes: Sequence[int]) -> LogRecord:
    first = column[0]
    if isinstance(first.value, Metric):
        return first
    options = dict(first.options)
    if options.get("batch_size") is not None:
        options["batch_size"] = sum(record.options["batch_size"] for record in column)
    values = torch.stack(
        [torch.as_tensor(record.value, dtype=torch.float64).cpu() for record in column]
    )
    reduce_fx = options.get("reduce_fx", "mean")
    if reduce_fx in ("mean", "avg", torch.mean):
        weights = torch.tensor(sizes, dtype=torch.float64).view(-1, *[1] * (values.dim() - 1))
        merged = (values * weights).sum(0) / sum(sizes)
    else:
        reduce = reduce_fx if callable(reduce_fx) else _MERGERS[reduce_fx]
        merged = reduce(values)
    dtype = first.value.dtype if isinstance(first.value, Tensor) else torch.get_default_dtype()
    return LogRecord(
        first.name,
        merged.to(dtype if dtype.is_floating_point else torch.get_default_dtype()),
        options,
    )


def _path_of(function: Callable[..., Any], name: str) -> str:
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "?")
    path = f"{module or 'torch'}:{qualname}"
    try:
        found = _function_at(path)
    except UnsupportedStepError:
        found = None
    builtin = f"torch:{getattr(function, '__name__', '?')}"
    if found is function:
        return path
    if getattr(torch, getattr(function, "__name__", "?"), None) is function:
        return builtin
    raise UnsupportedStepError(
        f"self.log({name!r}, reduce_fx={function!r}): the function must be known to all ranks by "
        "name. Use a name such as 'mean' or 'max', or a function defined at the top of a module."
    )


def _function_at(path: str) -> Callable[..., Any]:
    module, _, qualname = path.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise UnsupportedStepError(
            f"The reduce function {path!r} of a log record is not known on this rank: import it "
            "on all ranks."
        )
    return found  # type: ignore[no-any-return]
