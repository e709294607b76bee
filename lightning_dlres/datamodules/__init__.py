"""Lightning data modules over the package's own ways to load samples."""

from lightning_dlres.datamodules.prefetch_cache import PrefetchCacheDataModule

__all__ = ["PrefetchCacheDataModule"]
