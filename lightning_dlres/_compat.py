"""Private names of Lightning, torch and torchmetrics that this package needs, with reasons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, ThroughputMonitor
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.utils import _python_dispatch
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

# Names of the reductions of metric states that can be merged.
MERGEABLE: dict[Any, str] = {
    dim_zero_sum: "sum",
    dim_zero_cat: "cat",
    dim_zero_max: "max",
    dim_zero_min: "min",
}


# Lightning wraps the batch sampler of a predict loader in this class. It reads the sampled indices
# from the wrapper for `BasePredictionWriter`. There is no public way to wrap or to read.
INDEX_SAMPLER = _IndexBatchSamplerWrapper


def script_launcher(environment: ClusterEnvironment, processes: int, nodes: int) -> Any:
    """Return Lightning's launcher that starts the user's script once per device.

    Lightning has no public name for it.
    """
    return _SubprocessScriptLauncher(environment, processes, nodes)


def set_rank(rank: int) -> None:
    """Set the rank of Lightning's `rank_zero_only` functions; they read a private attribute."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]


def set_device_property(module: LightningModule, device: torch.device) -> None:
    """Set `LightningModule.device` to the device of the stage.

    `module.to(device)` would set it, but fails for a module with meta parameters.
    """
    for child in module.modules():
        if hasattr(child, "_device") and hasattr(child, "_dtype"):
            child._device = device  # type: ignore[assignment]


def replace_sigterm_broadcast(
    trainer: Trainer, replacement: Callable[[], None]
) -> Callable[[], None]:
    """Replace Lightning's broadcast about SIGTERM before each batch; return the undo function.

    Lightning's broadcast lets all ranks wait for rank 0. It does not notice or name a failed rank,
    and swallows the error of a timeout. No option disables it.
    """
    loop = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = replacement  # type: ignore[method-assign]

    def undo() -> None:
        vars(loop).pop("_broadcast_sigterm_tensor", None)

    return undo


def allow_skipped_steps(trainer: Trainer) -> Callable[[], None]:
    """Let `training_step` return None on several ranks; return the undo function.

    Lightning refuses that, since in DDP only some ranks may skip the step. No option allows it.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization

    def training_step(kwargs: Any) -> ClosureResult:
        output = call._call_strategy_hook(trainer, "training_step", *kwargs.values())
        trainer.strategy.post_training_step()
        return ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches)

    loop._training_step = training_step  # type: ignore[method-assign]
    return lambda: vars(loop).pop("_training_step", None)


def replace_timed_validation(
    trainer: Trainer, on_all_ranks: Callable[[bool], bool]
) -> Callable[[], None]:
    """Let all ranks decide alike if a validation is due by `val_check_interval` as a time.

    Lightning compares the time with each rank's own clock, and has no hook for the decision.

    Args:
        trainer: Trainer of the run.
        on_all_ranks: Returns the same decision on all ranks, given that of each.

    Returns:
        The undo function.
    """
    if trainer._val_check_time_interval is None:  # type: ignore[attr-defined]
        return lambda: None
    loop = trainer.fit_loop.epoch_loop
    by_own_clock = loop._should_check_val_fx

    def is_due(data_fetcher: Any) -> bool:
        return on_all_ranks(by_own_clock(data_fetcher))

    loop._should_check_val_fx = is_due  # type: ignore[method-assign]
    return lambda: vars(loop).pop("_should_check_val_fx", None)


def throughputs(monitor: ThroughputMonitor) -> list[Throughput]:
    """Return the counters of a ThroughputMonitor; they have no public name."""
    return list(monitor._throughputs.values())


def summarise_now(
    callback: ModelSummary, trainer: Trainer, module: LightningModule
) -> Callable[[], None]:
    """Let a ModelSummary show the module as it is now; return the undo function.

    The callback has no public method that computes the summary, which may run the module.
    """
    if not callback._max_depth:
        return lambda: None
    summary = callback._summary(trainer, module)
    callback._summary = lambda *_: summary  # type: ignore[method-assign]
    return lambda: vars(callback).pop("_summary", None)


def syncs_batchnorm(strategy: ParallelStrategy) -> bool:
    """Return True if the Trainer has `sync_batchnorm=True`; only a private attribute tells."""
    return strategy._layer_sync is not None


def note_sigterm(trainer: Trainer) -> None:
    """Let the Trainer end after the current batch, as after a SIGTERM.

    Only a private handler sets the public property `received_sigterm`. It also starts a collective.
    """
    trainer._signal_connector.received_sigterm = True


def given_train_loaders(trainer: Trainer) -> Any:
    """Return the loaders that `fit` has got as an argument, also before its loop begins; None
    without any.

    The Trainer's public `train_dataloader` is None until then.
    """
    source = trainer.fit_loop._data_source
    return None if source.is_module() else source.instance


def train_loader(trainer: Trainer) -> Any:
    """Return a new train loader for profiling.

    `trainer.fit_loop.setup_data()` is public, but creates the epoch's iterator earlier than plain
    training does. That would change the shuffle.
    """
    return trainer.fit_loop._data_source.dataloader()


def metric_mergers(metric: Metric) -> dict[str, str | None]:
    """Return the reduction of each metric state: "sum", "cat", "max", "min", or None if unknown.

    torchmetrics has no public name for the reductions.
    """
    reductions: dict[str, Any] = metric._reductions
    return {name: MERGEABLE.get(reduction) for name, reduction in reductions.items()}


def metric_defaults(metric: Metric) -> dict[str, Any]:
    """Return the states of a new metric by name: tensors, or empty lists.

    torchmetrics has no public name for them.
    """
    return dict(metric._defaults)


def metric_progress(metric: Metric) -> tuple[int, Any]:
    """Return a metric's number of updates and the value of its last `forward`.

    That value has no public name.
    """
    return metric.update_count, metric._forward_cache


def set_metric_progress(metric: Metric, updates: int, last_value: Any) -> None:
    """Set a metric's number of updates and last value; clear the cached result of `compute`."""
    metric._update_count = updates
    metric._forward_cache = last_value
    metric._computed = None


def has_foreign_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Return True if code outside of this package gets a parameter's accumulated gradient.

    torch has no public way to list the hooks.
    """
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    package = __name__.split(".")[0]
    modules = [getattr(hook, "__module__", None) or "" for hook in hooks.values()]
    return any(module.split(".")[0] != package for module in modules)


def has_replaced_step(optimizer: Optimizer) -> bool:
    """Return True if code outside of torch has replaced an optimizer's `step`.

    Schedulers wrap the step that they find. torch has no public way to tell their wrappers from
    those of others.
    """
    step = vars(optimizer).get("step")
    if hasattr(step, "_wrapped_by_lr_sched"):
        return getattr(step, "__wrapped__", None) is not type(optimizer).step
    return step is not None


class EpochLogs:
    """Values of `self.log` for the current epoch of training, as they are when this is made.

    Lightning accumulates them in private objects, and cannot be told that a batch does not count.

    Args:
        trainer: Trainer in `fit`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._results = trainer.fit_loop.epoch_loop._results
        self._values = {
            key: {name: getattr(logged, name) for name in metric_defaults(logged)}
            for key, logged in self._results.items()
        }

    def ignore_batch(self) -> None:
        """Give the current batch the weight zero in means whose `batch_size` the user leaves out.

        A hook after the step may log such a mean.
        """
        self._results.batch_size = 0

    def restore(self) -> None:
        """Give the values that are accumulated over the epoch their contents from before.

        Values that were first logged since then get the contents of an empty epoch.
        """
        for key, logged in self._results.items():
            if not (logged.is_tensor and logged.meta.on_epoch):
                # A metric object accumulates by itself, and a step's value is used once.
                continue
            empty = {n: v.to(logged.value.device) for n, v in metric_defaults(logged).items()}
            for name, value in self._values.get(key, empty).items():
                setattr(logged, name, value)


def is_compiled(module: nn.Module) -> bool:
    """Return True if a module or one of its submodules was compiled by torch.compile.

    Neither torch nor Lightning has a public way to ask.
    """
    return getattr(module, "_compiler_ctx", None) is not None or bool(compiled_names(module))


def compiled_names(module: nn.Module) -> list[str]:
    """Return the names of the submodules that torch.compile has compiled; "" is the module itself.

    torch has no public way to ask.
    """
    return [
        name
        for name, inner in module.named_modules()
        if hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None
    ]


def pose_as_rank_zero() -> Callable[[], None]:
    """Make Lightning's `rank_zero_only` functions run on this rank; return the undo function."""
    saved = getattr(rank_zero_only, "rank", None)
    set_rank(0)

    def undo() -> None:
        rank_zero_only.rank = saved  # type: ignore[attr-defined]

    return undo


def replace_default_group(replace: Callable[[Any], Any]) -> Callable[[], None]:
    """Replace torch.distributed's default process group; return the undo function.

    Modules often import `get_rank` and `get_world_size` by name. Replacing these two functions
    would have no effect there. Both call the function that is replaced here.

    Args:
        replace: Function that gets the real group and returns the one to use.
    """
    original = distributed_c10d._get_default_group

    def replaced() -> Any:
        return replace(original())

    distributed_c10d._get_default_group = replaced

    def undo() -> None:
        distributed_c10d._get_default_group = original

    return undo


def function_modes() -> list[Any]:
    """Return the modes for torch functions and operations, and the innermost saved-tensor hook.

    Those of torch's activation checkpoints and `save_on_cpu` are left out: they keep all values.
    torch has no public names for the modes and hooks in force.
    """
    saved = torch._C._autograd._top_saved_tensors_default_hooks(True)
    modes = [
        *torch.overrides._get_current_function_mode_stack(),
        *_python_dispatch._get_current_dispatch_mode_stack(),
        *(saved or ())[:1],
    ]
    harmless = ("torch.utils.checkpoint", "torch.autograd.graph")
    return [mode for mode in modes if getattr(mode, "__module__", "") not in harmless]


def is_fake(value: Any) -> bool:
    """Return True for a tensor without values, in place of one of another stage.

    torch documents FakeTensor, but has no public name for it.
    """
    return isinstance(value, FakeTensor)


# Attributes in which recurrent layers of torch hold their weights once more. They change when the
# weights are replaced, and there is no public list of them.
RECURRENT_CACHES = frozenset({"_flat_weights", "_flat_weight_refs"})
