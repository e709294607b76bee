"""Plugins for any Trainer."""

from lightning_dlres.plugins.memory_precision import MemoryPrecision

__all__ = ["MemoryPrecision"]
