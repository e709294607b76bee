"""Lightning strategies: thin classes whose hooks call the engines of other rooms."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dlres.strategies.compressed_ddp.strategy import CompressedDDPStrategy
from lightning_dlres.strategies.hetero_pipe.strategy import HeteroPipeStrategy
from lightning_dlres.strategies.parameter_server.strategy import ParameterServerStrategy

__all__ = [
    "CompressedDDPStrategy",
    "HeteroPipeStrategy",
    "ParameterServerStrategy",
    "register_strategies",
]


def register_strategies() -> None:
    """Register the names of the strategies with Lightning's Trainer; safe to call again."""
    for cls, description in (
        (HeteroPipeStrategy, "Pipeline and data parallel training over devices of different speed"),
        (CompressedDDPStrategy, "Data parallel training with compressed gradients"),
        (ParameterServerStrategy, "Data parallel training with parameter servers"),
    ):
        if cls.strategy_name not in StrategyRegistry:
            StrategyRegistry.register(cls.strategy_name, cls, description=description)
