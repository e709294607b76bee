"""Lightning strategies: thin classes whose hooks call the engine in `pipeline`."""

from __future__ import annotations

from lightning.pytorch.strategies import StrategyRegistry

from lightning_dlres.strategies.hetero_pipe.strategy import HeteroPipeStrategy

__all__ = ["HeteroPipeStrategy", "register_strategies"]


def register_strategies() -> None:
    """Register the names of the strategies with Lightning's Trainer; safe to call again."""
    if HeteroPipeStrategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            HeteroPipeStrategy.strategy_name,
            HeteroPipeStrategy,
            description="Pipeline and data parallel training over devices of different speed",
        )
