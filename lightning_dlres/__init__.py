"""Train with PyTorch Lightning on the machines you happen to have.

Importing this package registers its strategies, `Trainer(strategy="dlres_hetero_pipe")`,
`Trainer(strategy="dlres_compressed_ddp")` and `Trainer(strategy="dlres_parameter_server")`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lightning_dlres.callbacks import ActivationOffload, ParameterMirror, ResourceReport
from lightning_dlres.codecs import register as register_codec
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
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.optimizers.momentum_hook import momentum_hook
from lightning_dlres.gradsync.optimizers.momentum_sync import MomentumSync
from lightning_dlres.gradsync.optimizers.one_bit_adam import OneBitAdam
from lightning_dlres.memory.plan.plan import MemoryPlan
from lightning_dlres.paramserver.execute.server.optimizers import register_server_optimizer
from lightning_dlres.pipeline.execute.sharded_checkpoint import consolidate_checkpoint
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.pipeline.profile.config import ProfileConfig
from lightning_dlres.plugins import MemoryPrecision
from lightning_dlres.strategies import (
    CompressedDDPStrategy,
    HeteroPipeStrategy,
    ParameterServerStrategy,
    register_strategies,
)
from lightning_dlres.version import __version__

__all__ = [
    "ActivationOffload",
    "BatchMismatchError",
    "CompressedDDPStrategy",
    "ConfigError",
    "DlresError",
    "GradientSyncState",
    "HeteroPipeStrategy",
    "MemoryPlan",
    "MemoryPrecision",
    "MomentumSync",
    "OneBitAdam",
    "ParameterMirror",
    "ParameterServerStrategy",
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
    "compressed_hook",
    "consolidate_checkpoint",
    "momentum_hook",
    "register_codec",
    "register_server_optimizer",
]

if TYPE_CHECKING:
    from lightning_dlres.datamodules import PrefetchCacheDataModule
    from lightning_dlres.prefetch.cache.samples import Sample
    from lightning_dlres.prefetch.loading.node import PrefetchCacheNode

# Names that are imported at their first use, because only the prefetch cache needs their modules.
_LAZY = {
    "PrefetchCacheDataModule": "lightning_dlres.datamodules",
    "PrefetchCacheNode": "lightning_dlres.prefetch.loading.node",
    "Sample": "lightning_dlres.prefetch.cache.samples",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


register_strategies()
