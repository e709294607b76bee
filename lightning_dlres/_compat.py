"""Every private name of Lightning, torch and torchmetrics that this package cannot do without, each
with its reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.distributed import distributed_c10d
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

MERGEABLE: dict[Any, str] = {
    dim_zero_sum: "sum",
    dim_zero_cat: "cat",
    dim_zero_max: "max",
    dim_zero_min: "min",
}


# The method of nn.Module that runs hooks and forward. A stand-in for a module must take the place
# of both, or hooks would see what stands in for tensors; `__call__` itself cannot be replaced on an
# instance.
CALL = "_call_impl"


# Lightning puts it around the batch sampler of a loader that predicts, and reads the indices that
# it has seen for `BasePredictionWriter`; there is no public way to either.
INDEX_SAMPLER = _IndexBatchSamplerWrapper


def script_launcher(environment: ClusterEnvironment, processes: int, nodes: int) -> Any:
    """Return Lightning's launcher that starts the user's script once per device; Lightning has no
    public name for it."""
    return _SubprocessScriptLauncher(environment, processes, nodes)


def set_rank(rank: int) -> None:
    """Tell Lightning's `rank_zero_only` functions which rank this is; the attribute is how they are
    told."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def set_device_property(module: LightningModule, device: torch.device) -> None:
    """Make `LightningModule.device` say where the stage computes.

    `module.to(device)` would set it, but cannot be called on a module with meta parameters.
    """
    for child in module.modules():
        if hasattr(child, "_device") and hasattr(child, "_dtype"):
            child._device = device  # type: ignore[assignment]


def without_sigterm_broadcast(trainer: Trainer) -> Callable[[], None]:
    """Take Lightning's exchange about SIGTERM before every batch out of the Trainer, and return the
    undo. There is no option for it.

    The strategy tells the ranks of a signal along with a batch. Lightning's broadcast waits without
    a name or a check for failed ranks, and swallows the error when its time is over.
    """
    loop = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = _do_nothing  # type: ignore[method-assign]

    def undo() -> None:
        vars(loop).pop("_broadcast_sigterm_tensor", None)

    return undo


def _do_nothing() -> None:
    """Stands in for an exchange that is not needed."""


def train_loader(trainer: Trainer) -> Any:
    """Return a train loader made for profiling.

    `trainer.fit_loop.setup_data()` is public, but makes the iterator that the epoch will use,
    earlier than plain training does, and so changes the shuffle.
    """
    return trainer.fit_loop._data_source.dataloader()


def metric_mergers(metric: Metric) -> dict[str, str | None]:
    """Return for every state of a metric how parts of it merge: "sum", "cat", "max", "min", or None
    if that is not known.

    torchmetrics keeps the reductions to itself.
    """
    reductions: dict[str, Any] = metric._reductions
    return {name: MERGEABLE.get(reduction) for name, reduction in reductions.items()}


def metric_progress(metric: Metric) -> tuple[int, Any]:
    """Return a metric's number of updates and the value of its last `forward`, which has no public
    name."""
    return metric.update_count, metric._forward_cache


def set_metric_progress(metric: Metric, updates: int, last_value: Any) -> None:
    """Set what `metric_progress` returns, and forget a computed value."""
    metric._update_count = updates
    metric._forward_cache = last_value
    metric._computed = None


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has had its hands on a module or one inside of it. Neither torch
    nor Lightning has a public way to ask."""
    return getattr(module, "_compiler_ctx", None) is not None or any(
        hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None
        for inner in module.modules()
    )


def pose_as_rank_zero() -> Callable[[], None]:
    """Let Lightning's `rank_zero_only` functions act here, and return the undo; the attribute is
    how they are told."""
    saved = getattr(rank_zero_only, "rank", None)
    set_rank(0)

    def undo() -> None:
        rank_zero_only.rank = saved  # type: ignore[attr-defined]

    return undo


def replace_default_group(replace: Callable[[Any], Any]) -> Callable[[], None]:
    """Let torch.distributed take what `replace` returns for its default process group, and return
    the undo.

    `get_rank` and `get_world_size` are often imported by name, so replacing these is not enough:
    both ask this function.
    """
    own = distributed_c10d._get_default_group

    def replaced() -> Any:
        return replace(own())

    distributed_c10d._get_default_group = replaced

    def undo() -> None:
        distributed_c10d._get_default_group = own

    return undo
