"""Metrics of the prefetch cache as the Trainer's loggers get them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightning_dlres.datamodules.prefetch_metrics import MetricsLog
from lightning_dlres.prefetch.cache.messages import Metrics


class Loader:
    """Loader with given figures.

    Args:
        stalled_seconds: Value of the attribute.
        samples: Number of samples that its cache has counted.
        requested_bytes: Number of bytes that its cache has requested.
    """

    def __init__(self, stalled_seconds: float, samples: int, requested_bytes: int) -> None:
        self.stalled_seconds = stalled_seconds
        counts = dict.fromkeys(Metrics.__struct_fields__, 0)
        self._metrics = Metrics(
            **{**counts, "samples": samples, "requested_bytes": requested_bytes}
        )

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


def test_a_new_loader_counts_its_stalls_from_zero() -> None:
    # For example, Lightning's Tuner changes `batch_size`, and the loader is made again.
    first, second = logged([Loader(2.0, 8, 80), Loader(0.5, 12, 200)])
    assert first["prefetch/stall_ms"] == 2000.0
    assert second["prefetch/stall_ms"] == 500.0


def test_the_same_cache_counts_on_and_a_new_cache_counts_from_zero() -> None:
    first, same, new = logged([Loader(0.0, 8, 80), Loader(0.0, 12, 200), Loader(0.0, 4, 28)])
    assert first["prefetch/bytes_per_sample"] == 80 / 8
    assert same["prefetch/bytes_per_sample"] == (200 - 80) / (12 - 8)
    # A cache with fewer samples than before is a new one.
    assert new["prefetch/bytes_per_sample"] == 28 / 4
