"""Optimizers whose momentum is synchronised with compression, instead of the gradients."""

from lightning_dlres.gradsync.optimizers.momentum_hook import momentum_hook
from lightning_dlres.gradsync.optimizers.momentum_sync import MomentumSync
from lightning_dlres.gradsync.optimizers.one_bit_adam import OneBitAdam

__all__ = ["MomentumSync", "OneBitAdam", "momentum_hook"]
