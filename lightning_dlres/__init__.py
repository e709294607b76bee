"""Train with PyTorch Lightning on the machines you happen to have.

Importing this package registers its strategies: `Trainer(strategy="dlres_hetero_pipe")`.
"""

from __future__ import annotations

from lightning_dlres.callbacks import ActivationOffload, ResourceReport
from lightning_dlres.core.errors import (
    BatchMismatchError,
    ConfigError,
    DlresError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    StorageError,
    UnsupportedStepError,
)
from lightning_dlres.datamodules import PrefetchCacheDataModule
from lightning_dlres.memory.plan import MemoryPlan
from lightning_dlres.pipeline.plan import PipelinePlan
from lightning_dlres.pipeline.profile import Cluster, Device, LayerProfile, Link
from lightning_dlres.plugins import MemoryPrecision
from lightning_dlres.prefetch.node import PrefetchCacheNode
from lightning_dlres.prefetch.samples import Sample
from lightning_dlres.strategies import HeteroPipeStrategy, register_strategies
from lightning_dlres.strategies.samples import ProfileConfig

__all__ = [
    "ActivationOffload",
    "BatchMismatchError",
    "Cluster",
    "ConfigError",
    "Device",
    "DlresError",
    "HeteroPipeStrategy",
    "LayerProfile",
    "Link",
    "MemoryPlan",
    "MemoryPrecision",
    "PeerError",
    "PeerLostError",
    "PeerTimeoutError",
    "PipelinePlan",
    "PrefetchCacheDataModule",
    "PrefetchCacheNode",
    "ProfileConfig",
    "ProtocolError",
    "ResourceReport",
    "Sample",
    "StorageError",
    "UnsupportedStepError",
    "__version__",
]

__version__ = "0.1.0"

register_strategies()
