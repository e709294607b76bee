"""Lightning data modules that load samples through the prefetch cache."""

from lightning_dlres.datamodules.prefetch_cache import PrefetchCacheDataModule

__all__ = ["PrefetchCacheDataModule"]
