"""Metrics of a prefetch cache for the Trainer's loggers."""

from __future__ import annotations

import weakref

from lightning.pytorch import Trainer

from lightning_dlres.prefetch.cache.messages import Metrics
from lightning_dlres.prefetch.loading.loader import PrefetchLoader


class MetricsLog:
    """Log of a loader's metrics. Every `log_every_n_steps` batches it logs the change since the
    last entry."""

    def __init__(self) -> None:
        self._last: Metrics | None = None
        self._batches, self._stalled_before = 0, 0.0
        self._loader: weakref.ref[PrefetchLoader] | None = None

    def count_batch(self, trainer: Trainer, loader: PrefetchLoader) -> None:
        """Count a batch that is about to be trained on, and log if it ends the interval."""
        self._batches += 1
        if self._loader is None or self._loader() is not loader:
            # A new batch size makes a new loader, whose `stalled_seconds` begin at 0.
            self._loader, self._stalled_before = weakref.ref(loader), 0.0
        interval = max(trainer.log_every_n_steps, 1)  # type: ignore[attr-defined]
        if not trainer.loggers or self._batches % interval:
            return
        if trainer.is_global_zero:
            metrics = loader.metrics()
            figures = self._figures(metrics, loader, interval)
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)
            self._last, self._stalled_before = metrics, loader.stalled_seconds

    def _figures(self, metrics: Metrics, loader: PrefetchLoader, interval: int) -> dict[str, float]:
        last = self._last
        if last is not None and metrics.samples < last.samples:
            # The cache was started again, and counts from 0.
            last = None

        def increase(name: str) -> float:
            return float(getattr(metrics, name) - (getattr(last, name) if last else 0))

        stalled_seconds = loader.stalled_seconds - self._stalled_before
        figures = {
            "prefetch/stall_ms": 1000 * stalled_seconds / interval,
            "prefetch/cache_bytes": float(metrics.cache_bytes),
        }
        # Batches are requested ahead of need, so there may be no new sample near the end of an
        # epoch.
        if samples := increase("samples"):
            hits = increase("hits") + increase("pinned_hits")
            figures["prefetch/hit_rate"] = hits / samples
            figures["prefetch/bytes_per_sample"] = increase("requested_bytes") / samples
            figures["prefetch/requests_per_sample"] = increase("requests") / samples
        return figures
