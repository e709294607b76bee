"""Interface between the engine and the policy that decides about saved storages."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from lightning_dlres.core.device.copiers import Copier
from lightning_dlres.core.device.gpu import Gpu
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.spans import ByteSpan
from lightning_dlres.memory.execute.transfer.direct_copier import DirectCopier
from lightning_dlres.memory.execute.transfer.tiers import Tier

if TYPE_CHECKING:
    from lightning_dlres.memory.execute.saved_storage import SavedStorage

_DIRECT = DirectCopier()


@dataclass(frozen=True)
class Placement:
    """Decision of a policy about one saved storage.

    Attributes:
        action: Action to apply.
        tier: Tier that an offloaded storage goes to. A storage that is only compressed goes there,
            too, if it takes more than `capacity` bytes.
        offset: Byte offset in the tier; None: any.
        copier: Copier between the device and the tier.
        capacity: Bytes that the compressed storage may take on the device; None: any number.
        gpu: GPU that compresses into `capacity` bytes while the host continues; None: the CPU
            compresses, and the host waits for it.
    """

    action: MemoryAction
    tier: Tier | None = None
    _: KW_ONLY
    offset: int | None = None
    copier: Copier = _DIRECT
    capacity: int | None = None
    gpu: Gpu | None = None


class OffloadPolicy(Protocol):
    """Decisions about saved storages, and the events that a policy observes.

    The engine calls these methods in the order of the events of a step, under its lock.
    """

    def start(self) -> None:
        """Start a step."""

    def begin_save(self, tensor: Tensor, span: ByteSpan, number: int) -> Placement:
        """Return the placement of a new saved storage.

        Args:
            tensor: Tensor that autograd saves.
            span: Bytes of the tensor's storage that are saved.
            number: Index of the saved storage in this step, in the order of saving.
        """

    def end_save(self, saved_storage: SavedStorage, is_placed: bool) -> None:
        """Observe the end of a save. `is_placed` is False if the placement was not possible."""

    def save_again(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """Observe that autograd saves another tensor over the same storage."""

    def begin_use(self, saved_storage: SavedStorage) -> None:
        """Observe that backward asks for a storage, before it is restored."""

    def end_use(self, saved_storage: SavedStorage) -> None:
        """Observe that a storage was restored."""

    def take_ownership(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """Observe that a backward function has taken over the storage's memory.

        Args:
            saved_storage: Storage that autograd will not ask for again.
            tensor: Tensor over its memory, which the backward function may now overwrite.
        """
