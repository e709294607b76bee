"""Metrics of the prefetch cache as the Trainer's loggers get them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_dlres.datamodules.prefetch_metrics import MetricsLog
from lightning_dlres.prefetch.cache.messages import Metrics


class Loader:
    """A loader with given figures."""

    def __init__(self, stalled_seconds: float, samples: int) -> None:
        self.stalled_seconds = stalled_seconds
        counts = dict.fromkeys(Metrics.__struct_fields__, 0)
        self._metrics = Metrics(**{**counts, "samples": samples, "requested_bytes": 10 * samples})

    def metrics(self) -> Metrics:
        return self._metrics


def logged(loaders: list[Loader]) -> list[dict[str, float]]:
    """Return the figures that one batch of each loader logs."""
    records: list[dict[str, float]] = []
    logger = SimpleNamespace(log_metrics=lambda figures, step: records.append(figures))
    trainer: Any = SimpleNamespace(
        log_every_n_steps=1, loggers=[logger], is_global_zero=True, global_step=0
    )
    log = MetricsLog()
    for loader in loaders:
        log.count_batch(trainer, loader)  # type: ignore[arg-type]
    return records


def test_a_new_loader_and_a_new_cache_count_from_zero() -> None:
    # For example, Lightning's Tuner changes `batch_size`, and the loader is made again.
    first, second = logged([Loader(stalled_seconds=2.0, samples=8), Loader(0.5, samples=4)])
    assert first["prefetch/stall_ms"] == 2000.0
    assert second["prefetch/stall_ms"] == 500.0
    assert second["prefetch/bytes_per_sample"] == 10.0
