"""Saved storage: memory that autograd has saved, with the handles of all tensors that are views of
it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_dlres import codecs
from lightning_dlres.codecs import Encoded
from lightning_dlres.core._compat import (
    StorageReference,
    is_only_in_python,
    storage_key,
    storage_owner_count,
    storage_reference,
    version_of,
    version_witness,
    with_counter_of,
)
from lightning_dlres.core.device.copiers import Copier, PendingCopy
from lightning_dlres.core.device.gpu import Gpu
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.byte_counter import ByteCounter
from lightning_dlres.memory.execute.compression import elements_of, storage_codec
from lightning_dlres.memory.execute.policy import Placement
from lightning_dlres.memory.execute.seen_storages import SeenStorage
from lightning_dlres.memory.execute.spans import ByteSpan, View, view_of
from lightning_dlres.memory.execute.transfer.direct_copier import DirectCopier
from lightning_dlres.memory.execute.transfer.gpu_compression import GpuCompression
from lightning_dlres.memory.execute.transfer.tiers import Allocation

_DIRECT = DirectCopier()


class SavedStorage:
    """Bytes of one span of a storage: on the device, compressed, offloaded, or restored.

    A storage that is placed with `KEEP` stays "original": readers alias the tensor itself. Any
    other placement makes it "moved": readers get new views over restored bytes.

    Args:
        tensor: First tensor over these bytes that autograd saves.
        storage: Storage of the tensor.
        span: Byte range in the storage. For a restored copy: byte range in its original.
        number: Index in this step, in the order of saving.
        byte_counter: Counter of the bytes on the device.

    Attributes:
        version: Version of the tensor when it was saved.
        uses: Number of times that backward has asked for it.
    """

    def __init__(
        self,
        tensor: Tensor,
        storage: SeenStorage,
        span: ByteSpan,
        number: int,
        byte_counter: ByteCounter,
    ) -> None:
        self._byte_counter, self._charged = byte_counter, 0
        self.storage, self.span, self.number, self.uses = storage, span, number, 0
        self.version = version_of(tensor)
        self._dtype, self._device = tensor.dtype, tensor.device
        # Number of readers that have not asked for their tensor yet.
        self._waiting_readers = 0
        # Shares the tensor's version counter, and, until the storage moves, its memory.
        self._witness: Tensor | None = tensor.detach()
        # Bytes on the device of a moved storage: the original ones until they have left, or
        # restored ones.
        self._on_device: Tensor | None = None
        # The moved bytes, as they lie in the tier or compressed on the device. Uncompressed bytes
        # are uint8[nbytes].
        self._moved: Tensor | Encoded | None = None
        self._allocation: Allocation | None = None
        self._copier: Copier = _DIRECT
        self._offload: PendingCopy | None = None
        self._prefetch: tuple[Tensor, PendingCopy] | None = None
        # Compression in flight, and the placement to fall back on if its capacity is too small.
        self._compression: tuple[GpuCompression, Placement] | None = None
        # True once the original bytes have left the device.
        self._has_left_device = False
        # Tensors that were handed to backward and share memory with later readers.
        self._handed_out: list[Tensor] = []
        # The original memory of a moved storage; expired once all other holders have released it.
        self._original: StorageReference | None = None
        self._readers: list[weakref.ref[SavedTensor]] = []
        # Functions that stop counting restored bytes.
        self._stop_counting: list[Callable[[], object]] = []
        self._charge(span.nbytes)

    def __del__(self) -> None:
        self._byte_counter.drop(self._charged)

    @property
    def witness(self) -> Tensor:
        """Return a tensor that shares the version counter of the saved tensors.

        Raises:
            RuntimeError: If a backward function has taken over the memory.
        """
        if self._witness is None:
            raise RuntimeError(
                "a tensor saved for backward was needed again after a gradient had overwritten it: "
                "the graph must run backward only once without retain_graph=True. Set "
                "retain_graph=True, or remove 'reuse' from actions."
            )
        return self._witness

    @property
    def is_current(self) -> bool:
        """Return whether nothing has changed the bytes since they were saved."""
        return self._witness is not None and version_of(self._witness) == self.version

    @property
    def is_original(self) -> bool:
        """Return whether the original memory holds the bytes: nothing was moved."""
        return self._original is None

    @property
    def is_offloaded(self) -> bool:
        """Return whether it is neither on the device nor on its way back."""
        return self._on_device is None and self._prefetch is None

    def add_reader(self, tensor: Tensor, storage: SeenStorage) -> SavedTensor:
        """Return the handle that autograd holds in place of a tensor over these bytes.

        Args:
            tensor: Tensor that autograd saves.
            storage: Storage of the tensor: the original, or a restored copy.
        """
        reader = SavedTensor(self, tensor, storage.shift)
        self._waiting_readers += 1
        self._readers.append(weakref.ref(reader))
        return reader

    def _live_readers(self) -> list[SavedTensor]:
        readers = [reference() for reference in self._readers]
        return [reader for reader in readers if reader is not None]

    # --- Hand-over of the memory -------------------------------------------------------------

    def take_ownership(self, tensor: Tensor, reader: SavedTensor) -> bool:
        """Hand the whole memory over to a backward function, if nothing else can read it.

        Args:
            tensor: Tensor over that memory, the only one that the backward function holds.
            reader: Handle of that tensor. Autograd must not ask for it again.

        Returns:
            True if the backward function now owns the memory, and may overwrite it.
        """
        storage = tensor.untyped_storage()
        if self._live_readers() != [reader] or storage.nbytes() != self.span.nbytes:
            return False
        # Torch did not allocate this memory (NumPy did), or other processes share it.
        if not storage.resizable() or (storage.device.type == "cpu" and tensor.is_shared()):
            return False
        del storage
        if self._on_device is None and self._original is not None and not self._original.expired():
            # Other code still holds the original memory. With `KEEP`, backward could not take it
            # over. Refuse restored bytes, too: results must not depend on the plan's actions.
            return False
        own = self._aliases(tensor, [reader])
        if not all(is_only_in_python(other) for other in own):
            return False
        if storage_owner_count(tensor) != 1 + len(own):
            return False
        if not self._has_left_device:
            self._charge(-self.span.nbytes)
        reader.alias = self._witness = self._on_device = self._compression = None
        self._handed_out.clear()
        for stop in self._stop_counting:
            stop()
        self._stop_counting.clear()
        return True

    def owner_count(self, tensor: Tensor) -> int:
        """Return the number of tensors over a tensor's memory that the engine knows of."""
        return len(self._aliases(tensor, self._live_readers()))

    def _aliases(self, tensor: Tensor, readers: list[SavedTensor]) -> list[Tensor]:
        """Return all tensors of the engine that share a tensor's memory."""
        known = [*self._handed_out, *(reader.alias for reader in readers)]
        known += [self._on_device, self._witness]
        memory = storage_key(tensor)
        own = {id(t): t for t in known if t is not None and storage_key(t) == memory}
        return list(own.values())

    # --- Away from the device ----------------------------------------------------------------

    def place(self, placement: Placement) -> bool:
        """Apply a placement; return whether that was possible."""
        if placement.action is MemoryAction.KEEP:
            return True
        witness, encoded, self._copier = self.witness, None, placement.copier
        on_device = self.span.of(witness, self.storage.shift)
        if placement.gpu is not None and placement.action is not MemoryAction.OFFLOAD:
            if not self._start_compression(on_device, placement, placement.gpu):
                return False
            self._hold_bytes(on_device)
            if self._offload is not None and not placement.copier.overlaps:
                self.wait_offloaded()
            return True
        if placement.action is not MemoryAction.OFFLOAD:
            codec = storage_codec()
            encoded = codec.encode(elements_of(on_device, self._dtype))
            if encoded.codec != codec.name:
                # Compression did not shrink it; keep the original.
                encoded = None
        uses_tier = placement.action is not MemoryAction.COMPRESS
        if not uses_tier and encoded is None:
            return False
        if not uses_tier and placement.tier is not None and placement.capacity is not None:
            uses_tier = encoded is not None and encoded.nbytes > placement.capacity
        if uses_tier:
            assert placement.tier is not None
            payload = on_device if encoded is None else encoded.payload
            self._allocation = placement.tier.allocate(payload.numel(), placement.offset)
            if self._allocation is None:
                return False
            self._offload = placement.copier.to_tier(payload, self._allocation.data)
            self._moved = (
                self._allocation.data
                if encoded is None
                else replace(encoded, data=self._allocation.data, used=payload.numel())
            )
        else:
            assert encoded is not None
            self._charge(encoded.nbytes)
            self._moved = encoded
        self._hold_bytes(on_device)
        if self._offload is None or not placement.copier.overlaps:
            self.wait_offloaded()
        return True

    def _hold_bytes(self, on_device: Tensor) -> None:
        """Drop the references to the saved tensor's memory, except for the bytes to move."""
        witness = self.witness
        self._on_device, self._original = on_device, storage_reference(witness)
        self._witness = version_witness(witness)

    def _start_compression(self, on_device: Tensor, placement: Placement, gpu: Gpu) -> bool:
        """Start compression on a GPU, and the copy of its result to the tier."""
        assert placement.capacity is not None
        codec, elements = storage_codec(), elements_of(on_device, self._dtype)
        if not codec.can_encode_within(elements):
            return False
        compression = GpuCompression(gpu, codec, elements, placement.capacity)
        if placement.action is MemoryAction.BOTH:
            assert placement.tier is not None
            nbytes = compression.memory.numel()
            self._allocation = placement.tier.allocate(nbytes, placement.offset)
            if self._allocation is None:
                return False
            # The whole capacity is copied, as the compressed size is not known yet.
            self._offload = placement.copier.to_tier(compression.memory, self._allocation.data)
        else:
            self._charge(compression.memory.numel())
        self._compression = compression, placement
        return True

    def _finish_compression(self, compression: GpuCompression, placement: Placement) -> None:
        """Adopt the result of a GPU's compression, or offload the original if it is too large."""
        encoded = compression.finish()
        if encoded is not None:
            in_tier = self._allocation
            self._moved = encoded if in_tier is None else replace(encoded, data=in_tier.data)
            return
        # The result exceeds the planned capacity: offload uncompressed, or else keep the original.
        if self._offload is None:
            self._charge(-compression.memory.numel())
        else:
            self._offload.wait()
            self._offload = None
        tier = placement.tier
        self._allocation = None if tier is None else tier.allocate(self.span.nbytes)
        if self._allocation is not None and self._on_device is not None:
            self._offload = placement.copier.to_tier(self._on_device, self._allocation.data)
            self._moved = self._allocation.data

    def wait_offloaded(self) -> None:
        """Finish the move, and free the memory on the device; later GPU work waits for the copy."""
        if self._compression is not None:
            compression, self._compression = self._compression, None
            self._finish_compression(*compression)
        if self._offload is not None:
            self._offload.wait()
            self._offload = None
        if self._on_device is not None and self._moved is not None and not self._has_left_device:
            self._on_device, self._has_left_device = None, True
            self._charge(-self.span.nbytes)

    # --- Back to the device ------------------------------------------------------------------

    def prefetch(self) -> None:
        """Start the copy to the device, if it is offloaded and copies overlap with computation."""
        if self.is_offloaded and self._copier.overlaps:
            self._start_prefetch()

    def _start_prefetch(self) -> None:
        if self._allocation is not None:
            self._prefetch = self._copier.to_device(self._allocation.data, self._device)
            self._stop_counting.append(self._byte_counter.count_until_freed(self._prefetch[0]))

    def tensor_for(self, reader: SavedTensor) -> Tensor:
        """Return the tensor of a reader, restored if needed.

        Raises:
            RuntimeError: If a backward function has taken over the memory.
        """
        witness, alias = self.witness, reader.alias
        self.uses += 1
        self._waiting_readers -= not reader.was_used
        reader.was_used = True
        if alias is None:
            assert reader.view is not None
            alias = with_counter_of(witness, reader.view.on(self._restored_bytes(), self.span))
        if self.is_original or self._on_device is not None:
            # Hold a second reference, as other readers may still need this memory. Autograd writes
            # into tensors that only it holds, when it sums gradients.
            self._handed_out.append(alias)
        return alias

    def _restored_bytes(self) -> Tensor:
        """Return the bytes on the device, uint8[nbytes].

        Once every reader has asked, the last one alone holds the bytes, and frees them.
        """
        if self._on_device is None:
            self._on_device = self._restore()
        data = self._on_device
        if self._waiting_readers <= 0 and self._moved is not None and self._offload is None:
            self._on_device = None
        return data

    def _restore(self) -> Tensor:
        moved = self._moved
        assert moved is not None
        data = moved.data if isinstance(moved, Encoded) else moved
        # Bytes in the device's own memory, or in a file that the CPU maps, are read where they are.
        needs_fetch = data.device != self._device or self._copier.overlaps
        if needs_fetch and self._prefetch is None:
            self._start_prefetch()
        was_fetched = self._prefetch is not None
        if self._prefetch is not None:
            data, copy = self._prefetch
            copy.wait()
            self._prefetch = None
        if not isinstance(moved, Encoded):
            if was_fetched:
                return data
            restored = data.clone()
        else:
            restored = codecs.decode(replace(moved, data=data)).view(torch.uint8)
        self._stop_counting.append(self._byte_counter.count_until_freed(restored))
        return restored

    def _charge(self, nbytes: int) -> None:
        self._charged += nbytes
        self._byte_counter.add(nbytes)


class SavedTensor:
    """Handle of a saved tensor whose storage the engine manages.

    Args:
        saved_storage: Storage that holds the tensor's bytes.
        tensor: Tensor that autograd saves.
        shift: Offset in bytes, see `ByteSpan.of`.

    Attributes:
        version: Version of the tensor when it was saved.
        alias: The tensor, if its storage stays where it is; else None, and `view` describes it.
        was_used: Whether backward has asked for it.
    """

    __slots__ = ("__weakref__", "alias", "saved_storage", "version", "view", "was_used")

    def __init__(self, saved_storage: SavedStorage, tensor: Tensor, shift: int) -> None:
        self.saved_storage, self.version = saved_storage, saved_storage.version
        self.was_used = False
        self.alias: Tensor | None = None
        self.view: View | None = None
        if saved_storage.is_original:
            # Hold an alias instead of the tensor. A node that saves its own output would hold the
            # tensor, which holds the node: the two would never be freed.
            self.alias = tensor.detach()
        else:
            self.view = view_of(tensor, shift)
