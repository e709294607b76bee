"""Tiers of an offloader, with their copiers and the measurement of their links."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_dlres.core.device.copiers import Copier, StreamCopier
from lightning_dlres.core.device.gpu import Gpu
from lightning_dlres.memory.config import OffloaderConfig, TierConfig
from lightning_dlres.memory.execute.transfer.direct_copier import DirectCopier
from lightning_dlres.memory.execute.transfer.tiers import GrowingTier, SlabTier
from lightning_dlres.memory.profile.links import measure_link
from lightning_dlres.memory.profile.step_profile import TierLink


class TierSet:
    """Tiers that storages of one device are offloaded to.

    Args:
        config: Configuration with the tiers.
        device: Device of the model.
        gpu: GPU of the device; None: the device is the CPU.

    Attributes:
        slabs: Slab of every tier that a plan uses: memory of fixed size, by the tier's name.
        copiers: Copier of every tier, by the tier's name.
        growing: Tier for unplanned storages, which grows as needed.
    """

    def __init__(self, config: OffloaderConfig, device: torch.device, gpu: Gpu | None) -> None:
        self._config, self._device, self._gpu = config, device, gpu
        self.slabs: dict[str, SlabTier] = {}
        self.copiers = {tier.name: self._copier(tier) for tier in config.tiers}
        # It takes memory of the last tier, which has the most space: the disk, if there is one.
        self.growing = GrowingTier(config.tiers[-1].directory if config.tiers else None)

    @property
    def fallback(self) -> GrowingTier | None:
        """Return the tier for unplanned storages; None if no storage may be offloaded."""
        return self.growing if self._config.tiers else None

    def reserve(self, sizes: Mapping[str, int]) -> None:
        """Give every tier a slab of the size that a plan needs, unless its present slab suffices.

        Args:
            sizes: Bytes that the plan needs in each tier, by the name of the tier.
        """
        for tier in self._config.tiers:
            size = sizes.get(tier.name, 0)
            slab = self.slabs.get(tier.name)
            if size and (slab is None or slab.nbytes < size):
                self.slabs[tier.name] = SlabTier(size, tier.directory, self._is_pinned(tier))

    def measure_links(self, nbytes: int) -> tuple[TierLink, ...]:
        """Return the measured links to all tiers.

        Args:
            nbytes: Size of a typical copy in bytes.
        """
        return tuple(
            measure_link(
                tier.name,
                self.copiers[tier.name],
                self._device,
                directory=tier.directory,
                pinned=self._is_pinned(tier),
                nbytes=nbytes,
                gpu=self._gpu,
            )
            for tier in self._config.tiers
        )

    def close(self) -> None:
        """Release the memory of the tiers, except for storages that live graphs still hold."""
        for copier in self.copiers.values():
            copier.synchronize()
        self.slabs.clear()

    def _copier(self, tier: TierConfig) -> Copier:
        if self._gpu is not None and self._is_pinned(tier):
            return StreamCopier(self._gpu)
        return DirectCopier()

    def _is_pinned(self, tier: TierConfig) -> bool:
        return self._gpu is not None and tier.directory is None
