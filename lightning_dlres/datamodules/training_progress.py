"""Progress of training, read from the Trainer for the loader of the training samples."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.datamodules.prefetch_metrics import MetricsLog
from lightning_dlres.prefetch.loading.loader import PrefetchLoader


class TrainingProgress:
    """Difference between the batches that a loader yielded and those that the Trainer trained on.

    Args:
        trainer: The Trainer.
        metrics_log: Log that counts the yielded batches.
    """

    def __init__(self, trainer: Trainer, metrics_log: MetricsLog) -> None:
        self._trainer, self._metrics_log = trainer, metrics_log
        # Number of trained batches at the time when the loader yielded its last batch.
        self._num_trained_at_yield: int | None = None

    def loader_hooks(self) -> dict[str, Any]:
        """Return the hooks of a `PrefetchLoader`, by the name of its argument.

        The loader calls `count_unfinished` and `is_epoch_cut` when its state is saved. The Trainer
        then saves its own progress, and both must agree on the next batch.
        """
        return {
            "on_batch": self._on_batch,
            "count_unfinished": self._count_unfinished,
            "is_epoch_cut": self._is_epoch_cut,
        }

    def _on_batch(self, loader: PrefetchLoader) -> None:
        self._num_trained_at_yield = _num_trained(self._trainer)
        self._metrics_log.count_batch(self._trainer, loader)

    def _count_unfinished(self) -> int:
        """Return 1 if the last batch is in a training step that runs or has failed, else 0."""
        return int(self._num_trained_at_yield == _num_trained(self._trainer))

    def _is_epoch_cut(self) -> bool:
        """Return True if the Trainer ends the epoch before the samples do.

        This happens with `limit_train_batches`, or if `on_train_batch_start` returns -1.
        """
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        return bool(progress.is_last_batch) and not self._count_unfinished()


def num_epochs(trainer: Trainer) -> int | None:
    """Return the total number of epochs of the training; None if it is unlimited or unknown."""
    max_epochs = trainer.max_epochs
    return None if max_epochs is None or max_epochs < 0 else max_epochs


def resume_of_same_length(loader: PrefetchLoader, state: dict[str, Any] | None) -> None:
    """Resume a loader of which the Trainer may know the number of batches already.

    Args:
        loader: The loader.
        state: Its state; None leaves it as it is.

    Raises:
        ConfigError: If the number of batches changes, or see `PrefetchLoader.load_state_dict`.
    """
    if state is None:
        return
    batches_before = len(loader)
    loader.load_state_dict(state)
    if len(loader) != batches_before:
        raise ConfigError(
            "Trainer.estimated_stepping_batches must be read after the restore of a checkpoint "
            f"from other ranks, got {batches_before} batches before it and {len(loader)} after. "
            "Read it in configure_optimizers, not in setup."
        )


def keep_order(loader: PrefetchLoader, ended: dict[str, Any] | None) -> None:
    """Give a loader the order of a training that has ended, and leave its position.

    Args:
        loader: The loader.
        ended: State of that training's loader; None keeps the loader's own order.

    Raises:
        ConfigError: See `PrefetchLoader.load_state_dict`.
    """
    if ended is not None:
        place = {name: loader.state_dict()[name] for name in ("epoch", "consumed", "batches")}
        loader.load_state_dict({**ended, **place})


def rewind(loader: PrefetchLoader, epoch: int) -> None:
    """Begin with the first sample of an epoch, at the loader's next `iter`."""
    loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "consumed": 0, "batches": 0})


def _num_trained(trainer: Trainer) -> int:
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)  # type: ignore[attr-defined]
