"""Optimizers and gradient scaler of the Trainer: they restrict how gradients are synchronised."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.plugins.precision import Precision
from torch.optim import LBFGS, Optimizer

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.optimizers.momentum_sync import MomentumSync
from lightning_dlres.gradsync.optimizers.one_bit_adam import OneBitAdam
from lightning_dlres.strategies.few_bits import unwrapped, warn_about_few_bits


def momentum_of(optimizers: Sequence[Optimizer]) -> MomentumSync | None:
    """Return the momentum synchronisation of a `OneBitAdam`; None for other optimizers.

    Args:
        optimizers: Optimizers of the Trainer, which Lightning may have wrapped.

    Raises:
        ConfigError: If there are other optimizers beside a OneBitAdam.
    """
    inner = [unwrapped(optimizer) for optimizer in optimizers]
    syncs = [optimizer.sync for optimizer in inner if isinstance(optimizer, OneBitAdam)]
    if syncs and len(inner) > 1:
        names = [type(optimizer).__name__ for optimizer in inner]
        raise ConfigError(
            got_expected("optimizers", names, "a single one with OneBitAdam", "torch.optim.AdamW")
        )
    return syncs[0] if syncs else None


def warn_about_optimizers(state: GradientSyncState, optimizers: Sequence[Optimizer]) -> None:
    """Warn if the codec has too few bits for an optimizer that may be like Adam.

    Args:
        state: State of the synchronisation.
        optimizers: Optimizers of the Trainer, which Lightning may have wrapped.
    """
    if not state.suits_adam:
        fix = "the optimizer lightning_dlres.OneBitAdam"
        warn_about_few_bits("algorithm", state.algorithm, optimizers, fix=fix)


def require_equal_backwards(optimizers: Sequence[Optimizer]) -> None:
    """Raise if an optimizer may call backward more often on one rank than on another.

    A line search runs backward until its loss is low enough, or until it changes little, and each
    rank has the loss of its own samples. A rank would then wait for the gradients of another one.

    Args:
        optimizers: Optimizers of the Trainer, which Lightning may have wrapped.

    Raises:
        ConfigError: If an optimizer searches along a line, or ends a step when its loss changes
            little.
    """
    for optimizer in map(unwrapped, optimizers):
        searches = [group.get("line_search_fn") for group in optimizer.param_groups]
        if isinstance(optimizer, LBFGS) and any(searches):
            got, rule = searches[0], "None with several ranks, whose losses differ"
            fix = "LBFGS(..., line_search_fn=None)"
            raise ConfigError(got_expected("line_search_fn", got, rule, fix))
        # Only this tolerance ends a step by the loss of the rank.
        tolerances = [
            group["tolerance_change"]
            for group in optimizer.param_groups
            if isinstance(optimizer, LBFGS) and group["max_iter"] > 1
        ]
        if any(tolerances):
            got, rule = tolerances[0], "0 with several ranks, whose losses differ"
            fix = "LBFGS(..., tolerance_change=0)"
            raise ConfigError(got_expected("tolerance_change", got, rule, fix))


def has_scaler(plugin: Precision) -> bool:
    """Return True if a gradient scaler multiplies losses, and may skip steps."""
    scaler = getattr(plugin, "scaler", None)
    return scaler is not None and bool(scaler.is_enabled())


def loss_scale(plugin: Precision) -> float:
    """Return the factor by which a gradient scaler multiplies losses; 1 without one."""
    return float(plugin.scaler.get_scale()) if has_scaler(plugin) else 1.0  # type: ignore[attr-defined]
