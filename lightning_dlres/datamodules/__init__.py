"""Data modules: where samples come from, as Lightning asks for them."""

from lightning_dlres.datamodules.prefetch_cache import PrefetchCacheDataModule

__all__ = ["PrefetchCacheDataModule"]
