"""Copier between the CPU and a tier, which blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_dlres.core.device.copiers import PendingCopy
from lightning_dlres.kernels.copying import copy_past_cache


class _DoneCopy:
    def wait(self) -> None:
        pass


_DONE = _DoneCopy()


class DirectCopier:
    """Copier that blocks the host until each copy is done."""

    overlaps = False

    def to_tier(self, source: Tensor, target: Tensor) -> PendingCopy:
        copy_past_cache(target, source)
        return _DONE

    def to_device(self, source: Tensor, device: torch.device) -> tuple[Tensor, PendingCopy]:
        data = torch.empty(source.numel(), dtype=torch.uint8, device=device)
        # An ordinary copy, not `copy_past_cache`: backward reads the data from the cache at once.
        data.copy_(source)
        return data, _DONE

    def synchronize(self) -> None:
        pass
