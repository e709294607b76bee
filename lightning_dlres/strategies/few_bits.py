"""Optimizers of the Trainer that few bits do not suit, or that need another strategy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.execute.planning import is_adam_like
from lightning_dlres.gradsync.optimizers.one_bit_adam import OneBitAdam


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside Lightning's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def refuse_one_bit_adam(optimizers: Sequence[Optimizer], strategy: str) -> None:
    """Refuse `OneBitAdam`, whose ranks must hold the same parameters and exchange their momenta.

    Raises:
        ConfigError: If an optimizer is a OneBitAdam.
    """
    if any(isinstance(unwrapped(optimizer), OneBitAdam) for optimizer in optimizers):
        raise ConfigError(
            f"optimizers must not be OneBitAdam with {strategy}, got one. Use torch.optim.AdamW, "
            "or the strategy 'dlres_compressed_ddp'."
        )


def warn_about_few_bits(
    argument: str, codec: str, optimizers: Sequence[Optimizer], *, fix: str
) -> None:
    """Warn if gradients of few bits go to an optimizer that may be like Adam.

    Args:
        argument: Argument that chooses the codec.
        codec: Its value, the name of a codec that does not suit Adam.
        optimizers: Optimizers of the Trainer, which Lightning may have wrapped.
        fix: Alternative to a codec with more bits.
    """
    inner = [unwrapped(optimizer) for optimizer in optimizers]
    names = sorted({type(o).__name__ for o in inner if is_adam_like([o])})
    if names:
        warnings.warn(
            f"{argument}={codec!r} may diverge with {' and '.join(names)}: so few bits change the "
            f"ratio of a gradient's mean to its variance. Use {argument}='int8', or {fix}.",
            stacklevel=2,
        )
