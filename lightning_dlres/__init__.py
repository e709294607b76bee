"""Train with PyTorch Lightning on the machines you happen to have.

Importing this package registers its strategies: `Trainer(strategy="dlres_hetero_pipe")`.
"""

from __future__ import annotations

from lightning_dlres.core.errors import (
    BatchMismatchError,
    ConfigError,
    DlresError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    ProtocolError,
    UnsupportedStepError,
)
from lightning_dlres.pipeline.plan import LayerProfile, PipelinePlan
from lightning_dlres.strategies import HeteroPipeStrategy, register_strategies

__all__ = [
    "BatchMismatchError",
    "ConfigError",
    "DlresError",
    "HeteroPipeStrategy",
    "LayerProfile",
    "PeerError",
    "PeerLostError",
    "PeerTimeoutError",
    "PipelinePlan",
    "ProtocolError",
    "UnsupportedStepError",
    "__version__",
]

__version__ = "0.1.0"

register_strategies()
