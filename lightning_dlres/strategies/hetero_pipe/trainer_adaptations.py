"""Adaptations of the Trainer and its callbacks to ranks that train one model together.

Lightning takes several ranks for several models, each with batches of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, ThroughputMonitor
from lightning.pytorch.trainer.states import TrainerFn

from lightning_dlres import _compat
from lightning_dlres.core.error_places import place_of
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.execute.partition import has_meta_tensors
from lightning_dlres.strategies.connection import Connection


@contextmanager
def adapted_trainer(
    trainer: Trainer, module: LightningModule, connection: Connection
) -> Iterator[None]:
    """Context manager for one run on several ranks; entered by all ranks, with the whole model.

    In it, `training_step` may return None, rank 0's clock decides about validations, a
    `ThroughputMonitor` counts each batch once, and a `ModelSummary` shows the whole model.

    Args:
        trainer: Trainer of the run.
        module: The LightningModule, before other stages' parameters are dropped.
        connection: Connection to the other ranks.
    """

    def as_on_rank_zero(decision: bool) -> bool:
        return connection.broadcast_flags([decision], 0)[0]

    with ExitStack() as undo:
        undo.callback(_compat.allow_skipped_steps(trainer))
        undo.callback(_compat.replace_timed_validation(trainer, as_on_rank_zero))
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ThroughputMonitor):
                _count_as_one_device(callback, connection)
            elif isinstance(callback, ModelSummary) and trainer.state.fn == TrainerFn.FITTING:
                undo.callback(_summarise_whole_model(callback, trainer, module))
        yield


@contextmanager
def refusing_stop_iteration(hook: str, ranks: int) -> Iterator[None]:
    """Context manager of a step of the user's, which may not end the epoch by an exception.

    Lightning takes `StopIteration` for the end of the data. Other ranks would go on.

    Args:
        hook: Name of the step.
        ranks: Number of ranks. A single one does as in plain training.

    Raises:
        UnsupportedStepError: If the step raises `StopIteration`.
    """
    try:
        yield
    except StopIteration as error:
        if ranks == 1:
            raise
        place = place_of(error)
        # As its cause, `contextlib` would raise the StopIteration in the place of this error.
        raise UnsupportedStepError(
            f"{hook} must not raise StopIteration, which ends the epoch in Lightning, got one"
            f"{f' at {place}' if place else ''}. Catch it, or give next() a default."
        ) from None


def _count_as_one_device(monitor: ThroughputMonitor, connection: Connection) -> None:
    """Let a monitor count each batch once, for one device with the power of all."""
    for throughput in _compat.throughputs(monitor):
        flops = connection.gather([float(throughput.available_flops or 0)])
        throughput.world_size = 1
        # A device of unknown power has 0: no sum would be right.
        known = all(value for (value,) in flops)
        throughput.available_flops = sum(value for (value,) in flops) if known else None


def _summarise_whole_model(
    callback: ModelSummary, trainer: Trainer, module: LightningModule
) -> Callable[[], None]:
    """Let a ModelSummary run the example input before other stages' layers lose their values;
    return the undo function."""
    if module.example_input_array is not None and not has_meta_tensors(module):
        # The layers are still on the host. If they cannot run there, the summary runs them through
        # the pipeline later, and shows the sizes of one stage.
        with suppress(Exception):
            return _compat.summarise_now(callback, trainer, module)
    return lambda: None
