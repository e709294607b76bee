"""Progress of training as the loader of the training samples needs it, read from the Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer

from lightning_dlres.datamodules.prefetch_metrics import MetricsLog
from lightning_dlres.prefetch.loading.loader import PrefetchLoader


class TrainingProgress:
    """Difference between the batches that were handed over and those that were trained on.

    Args:
        trainer: The Trainer.
        metrics_log: Log to count the handed over batches in.
    """

    def __init__(self, trainer: Trainer, metrics_log: MetricsLog) -> None:
        self._trainer, self._metrics_log = trainer, metrics_log
        # Number of trained batches when the last batch was handed over.
        self._trained_before: int | None = None

    def loader_hooks(self) -> dict[str, Any]:
        """Return the arguments by which a `PrefetchLoader` asks for the progress.

        The loader has to ask for itself: Lightning saves its state beside that of the data module,
        and both must agree.
        """
        return {
            "on_batch": self._on_batch,
            "count_unfinished": self._count_unfinished,
            "is_epoch_cut": self._is_epoch_cut,
        }

    def _on_batch(self, loader: PrefetchLoader) -> None:
        self._trained_before = _num_trained(self._trainer)
        self._metrics_log.count_batch(self._trainer, loader)

    def _count_unfinished(self) -> int:
        """Return the number of batches in a training step, or in one that has failed."""
        return int(self._trained_before == _num_trained(self._trainer))

    def _is_epoch_cut(self) -> bool:
        """Return true if the Trainer ends the epoch with the last batch, though samples are left:
        under limit_train_batches, or because `on_train_batch_start` has returned -1."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        return bool(progress.is_last_batch) and not self._count_unfinished()


def num_epochs(trainer: Trainer) -> int | None:
    """Return the number of epochs that training will have; None if it is not known."""
    max_epochs = trainer.max_epochs
    return None if max_epochs is None or max_epochs < 0 else max_epochs


def _num_trained(trainer: Trainer) -> int:
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.processed)  # type: ignore[attr-defined]
