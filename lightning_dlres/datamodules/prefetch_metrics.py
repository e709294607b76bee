"""The metrics of a prefetch cache for the Trainer's loggers."""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_dlres.prefetch.cache.messages import Metrics
from lightning_dlres.prefetch.loading.loader import PrefetchLoader


class MetricsLog:
    """Logs every `log_every_n_steps` batches what has happened since the last time."""

    def __init__(self) -> None:
        self._last: Metrics | None = None
        self._batches, self._stalled_before = 0, 0.0

    def count_batch(self, trainer: Trainer, loader: PrefetchLoader) -> None:
        """Count a batch that is about to be trained on, and log if it is time."""
        self._batches += 1
        every = max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        if not trainer.loggers or self._batches % every:
            return
        if trainer.is_global_zero:
            now = loader.metrics()
            for logger in trainer.loggers:
                logger.log_metrics(self._figures(now, loader, every), step=trainer.global_step)
            self._last, self._stalled_before = now, loader.stalled_seconds

    def _figures(self, now: Metrics, loader: PrefetchLoader, every: int) -> dict[str, float]:
        before = self._last

        def more(name: str) -> float:
            return float(getattr(now, name) - (getattr(before, name) if before else 0))

        figures = {
            "prefetch/stall_ms": 1000 * (loader.stalled_seconds - self._stalled_before) / every,
            "prefetch/cache_bytes": float(now.cache_bytes),
        }
        # The last batches of an epoch may have been handed over before.
        if samples := more("samples"):
            figures["prefetch/hit_rate"] = (more("hits") + more("pinned_hits")) / samples
            figures["prefetch/bytes_per_sample"] = more("requested_bytes") / samples
            figures["prefetch/requests_per_sample"] = more("requests") / samples
        return figures
