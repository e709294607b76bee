"""One piece of memory that autograd has saved, for all tensors that are views of it: on the device,
compressed there, away, and back again."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_dlres import codecs
from lightning_dlres.codecs import Encoded, Raw, ZeroValue
from lightning_dlres.core._compat import (
    MemoryReference,
    is_only_in_python,
    owners_of_memory,
    storage_key,
    storage_reference,
    version_of,
    with_counter_of,
    without_memory,
)
from lightning_dlres.kernels import zvc
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.copies import Copies, DirectCopies, Ticket
from lightning_dlres.memory.execute.gpu import Gpu
from lightning_dlres.memory.execute.packing import Packing
from lightning_dlres.memory.execute.spans import ByteSpan, View, view_of
from lightning_dlres.memory.execute.storages import SeenStorage
from lightning_dlres.memory.execute.tiers import Allocation, Tier

_ZERO_VALUE = ZeroValue()
_DIRECT = DirectCopies()


@dataclass(frozen=True)
class Placement:
    """What is to happen to a saved_storage.

    Attributes:
        action: what.
        tier: where it goes, if it leaves; where it goes, too, if it is to be compressed and takes
            more than `room`.
        offset: its place there; None: any.
        copies: how it gets there and back.
        room: bytes that it may take on the device when compressed; None: any.
        gpu: what compresses it, into `room`, while the host goes on; None: the CPU, at once.
    """

    action: MemoryAction
    tier: Tier | None = None
    offset: int | None = None
    copies: Copies = _DIRECT
    room: int | None = None
    gpu: Gpu | None = None


class ByteCounter:
    """How many bytes of saved data are on the device."""

    def __init__(self) -> None:
        self._now = self._peak = 0
        self._lock = threading.Lock()
        # Data may be dropped by the garbage collector, in any thread at any time.
        self._changes: deque[int] = deque()

    @property
    def now(self) -> int:
        """Return the bytes that are there."""
        if self._changes:
            self.add(0)
        return self._now

    @property
    def peak(self) -> int:
        """Return the most that were there at a time, since the last `start_peak`."""
        self.add(0)
        return self._peak

    def start_peak(self) -> None:
        """Forget what was there."""
        self.add(0)
        self._peak = self._now

    def add(self, nbytes: int) -> None:
        """Note that so many bytes have come, or gone if negative."""
        self._changes.append(nbytes)
        with self._lock:
            while self._changes:
                self._now += self._changes.popleft()
                self._peak = max(self._peak, self._now)

    def drop(self, nbytes: int) -> None:
        """Note that so many bytes have gone; may be called while another call is under way."""
        self._changes.append(-nbytes)

    def lend(self, data: Tensor) -> Callable[[], object]:
        """Note memory that counts until nobody holds it, or what is returned is called."""
        storage = data.untyped_storage()
        self.add(storage.nbytes())
        end = weakref.finalize(storage, self.drop, storage.nbytes())
        end.atexit = False
        return end


class SavedStorage:
    """The bytes of a span of a storage.

    Args:
        tensor: the first one that was saved of them.
        storage: where the tensor lies.
        span: which bytes of the storage, or of the one that it is a copy of.
        number: how many data were saved before it in this step.
        ledger: is told what is on the device.

    Attributes:
        version: the tensor's version when it was saved.
        uses: how often it has been asked for.
    """

    def __init__(
        self, tensor: Tensor, storage: SeenStorage, span: ByteSpan, number: int, ledger: ByteCounter
    ) -> None:
        self._ledger, self._charged = ledger, 0
        self.storage, self.span, self.number, self.uses = storage, span, number, 0
        self.version = version_of(tensor)
        self._dtype, self._device = tensor.dtype, tensor.device
        self._waiting = 0
        # Shares the tensor's version counter; until the saved_storage moves, its memory, too.
        self._witness: Tensor | None = tensor.detach()
        # Its bytes on the device, if it is one that moves.
        self._here: Tensor | None = None
        self._encoded: Encoded | None = None
        self._parcel: Allocation | None = None
        self._copies: Copies = _DIRECT
        self._leaving: Ticket | None = None
        self._arriving: tuple[Tensor, Ticket] | None = None
        # Under way on a GPU, and what is to be done if its room is too small.
        self._packing: tuple[Packing, Placement] | None = None
        self._has_left = False
        self._given: list[Tensor] = []
        self._original: MemoryReference | None = None
        self._readers: list[weakref.ref[SavedTensor]] = []
        self._loans: list[Callable[[], object]] = []
        self._charge(span.nbytes)

    def __del__(self) -> None:
        self._ledger.drop(self._charged)

    @property
    def witness(self) -> Tensor:
        """Return what shares the version counter of the tensors that were saved."""
        if self._witness is None:
            raise RuntimeError(
                "a tensor saved for backward was asked for once more, after its memory was reused: "
                "expected that backward runs once where retain_graph is not set. Set it, or leave "
                "'reuse' out of the actions."
            )
        return self._witness

    @property
    def is_current(self) -> bool:
        """Return whether a tensor that is saved now may have these bytes."""
        return self._witness is not None and version_of(self._witness) == self.version

    def read_by(self, tensor: Tensor, storage: SeenStorage) -> SavedTensor:
        """Return what autograd holds in the place of a tensor over these bytes.

        Args:
            tensor: what is saved.
            storage: where it lies: the saved_storage's, or a copy.
        """
        reader = SavedTensor(self, tensor, storage.shift)
        self._waiting += 1
        self._readers.append(weakref.ref(reader))
        return reader

    def _live_readers(self) -> list[SavedTensor]:
        found = [reference() for reference in self._readers]
        return [reader for reader in found if reader is not None]

    def take_ownership(self, tensor: Tensor, reader: SavedTensor) -> bool:
        """Leave the data's memory to one who asked for them, if nobody else can read it.

        Args:
            tensor: over that memory, the only one that the asking one holds.
            reader: what asked; autograd must not ask for it again.

        Returns:
            Whether the memory is the asking one's: all of it, and to write to.
        """
        storage = tensor.untyped_storage()
        if self._live_readers() != [reader] or storage.nbytes() != self.span.nbytes:
            return False
        # Memory of others than torch (an array's), or of other processes, too.
        if not storage.resizable() or (storage.device.type == "cpu" and tensor.is_shared()):
            return False
        del storage
        if self._here is None and self._original is not None and not self._original.expired():
            # It is a copy, but with the original kept this would not be possible: what was planned
            # must not depend on where the data are.
            return False
        own = self._over_memory(tensor, [reader])
        if not all(is_only_in_python(other) for other in own):
            return False
        if owners_of_memory(tensor) != 1 + len(own):
            return False
        if self.is_in_place:
            self._charge(-self.span.nbytes)
        reader.alias = self._witness = self._here = self._packing = None
        self._given.clear()
        for end in self._loans:
            end()
        self._loans.clear()
        return True

    def _over_memory(self, tensor: Tensor, readers: list[SavedTensor]) -> list[Tensor]:
        """Return all tensors of this package that share a tensor's memory."""
        found = [*self._given, *(reader.alias for reader in readers), self._here, self._witness]
        memory = storage_key(tensor)
        own = {id(t): t for t in found if t is not None and storage_key(t) == memory}
        return list(own.values())

    def place(self, order: Placement) -> bool:
        """Do what is to happen; return whether that was possible."""
        if order.action is MemoryAction.KEEP:
            return True
        witness, encoded, self._copies = self.witness, None, order.copies
        here = self.span.of(witness, self.storage.shift)
        if order.gpu is not None and order.action is not MemoryAction.OFFLOAD:
            if not self._pack(here, order, order.gpu):
                return False
            self._move(here)
            if self._leaving is not None and not order.copies.overlaps:
                self.wait_offloaded()
            return True
        if order.action is not MemoryAction.OFFLOAD:
            encoded = _ZERO_VALUE.encode(_elements(here, self._dtype))
            if encoded.codec == Raw.name:
                # More than it was: as it is, it is as well off.
                encoded = None
        leaves = order.action is not MemoryAction.COMPRESS
        if not leaves and encoded is None:
            return False
        if not leaves and order.tier is not None and order.room is not None:
            leaves = encoded is not None and encoded.nbytes > order.room
        if leaves:
            assert order.tier is not None
            sent = here if encoded is None else encoded.payload
            self._parcel = order.tier.take(sent.numel(), order.offset)
            if self._parcel is None:
                return False
            self._leaving = order.copies.out(sent, self._parcel.data)
            encoded = (
                _raw(here, self._parcel)
                if encoded is None
                else replace(encoded, data=self._parcel.data, used=sent.numel())
            )
        else:
            assert encoded is not None
            self._charge(encoded.nbytes)
        self._encoded = encoded
        self._move(here)
        if self._leaving is None or not order.copies.overlaps:
            self.wait_offloaded()
        return True

    def _move(self, here: Tensor) -> None:
        """Hold the bytes, and nothing else of what was saved."""
        witness = self.witness
        self._here, self._original = here, storage_reference(witness)
        self._witness = without_memory(witness)

    def _pack(self, here: Tensor, order: Placement, gpu: Gpu) -> bool:
        """Begin to compress, and to send away what comes of it."""
        assert order.room is not None
        elements = _elements(here, self._dtype)
        if elements.element_size() not in zvc.WIDTHS:
            return False
        packing = Packing(gpu, elements, order.room)
        if order.action is MemoryAction.BOTH:
            assert order.tier is not None
            self._parcel = order.tier.take(packing.memory.numel(), order.offset)
            if self._parcel is None:
                return False
            # All of its room: how much of it counts is not known yet.
            self._leaving = order.copies.out(packing.memory, self._parcel.data)
        else:
            self._charge(packing.memory.numel())
        self._packing = packing, order
        return True

    def _finish_packing(self, packing: Packing, order: Placement) -> None:
        self._encoded = packing.finish()
        if self._encoded is not None:
            if self._parcel is not None:
                self._encoded = replace(self._encoded, data=self._parcel.data)
            return
        # It takes more than was planned: it leaves as it is, or stays.
        if self._leaving is None:
            self._charge(-packing.memory.numel())
        else:
            self._leaving.wait()
            self._leaving = None
        self._parcel = None if order.tier is None else order.tier.take(self.span.nbytes)
        if self._parcel is not None and self._here is not None:
            self._leaving = order.copies.out(self._here, self._parcel.data)
            self._encoded = _raw(self._here, self._parcel)

    def wait_offloaded(self) -> None:
        """Free the memory on the device; what is computed from now on waits until it has left."""
        if self._packing is not None:
            packing, self._packing = self._packing, None
            self._finish_packing(*packing)
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
        if self._here is not None and self._encoded is not None and not self._has_left:
            self._here, self._has_left = None, True
            self._charge(-self.span.nbytes)

    @property
    def is_original(self) -> bool:
        """Return whether it stays where it was saved."""
        return self._original is None

    @property
    def is_in_place(self) -> bool:
        """Return whether it is where it was saved, be it until it has left."""
        return not self._has_left

    def owners(self, tensor: Tensor) -> int:
        """Return how many tensors that share a tensor's memory are the saved_storage's own, or were given
        to backward."""
        return len(self._over_memory(tensor, self._live_readers()))

    def tensor_for(self, reader: SavedTensor) -> Tensor:
        """Return the tensor that a reader stands for.

        Raises:
            RuntimeError: its memory was given up.
        """
        witness, alias = self.witness, reader.alias
        self.uses += 1
        self._waiting -= not reader.was_used
        reader.was_used = True
        if alias is None:
            assert reader.view is not None
            alias = with_counter_of(witness, reader.view.on(self._data(), self.span))
        if self.is_original or self._here is not None:
            # A second reference while others still wait for these data, so that autograd does not
            # take the tensor for a gradient of its own.
            self._given.append(alias)
        return alias

    @property
    def is_away(self) -> bool:
        """Return whether it is not on the device, nor on its way."""
        return self._here is None and self._arriving is None

    def fetch(self) -> None:
        """Begin to bring it back, if it is away and copies run beside the computing."""
        if self.is_away and self._copies.overlaps:
            self._begin_to_arrive()

    def _begin_to_arrive(self) -> None:
        if self._parcel is not None:
            self._arriving = self._copies.back(self._parcel.data, self._device)
            self._loans.append(self._ledger.lend(self._arriving[0]))

    def _data(self) -> Tensor:
        """Return the bytes, uint8[nbytes], on the device. The last one to ask for the first time
        gets them alone: nothing of them stays here."""
        if self._here is None:
            self._here = self._restored()
        data = self._here
        if self._waiting <= 0 and self._encoded is not None and self._leaving is None:
            self._here = None
        return data

    def _charge(self, nbytes: int) -> None:
        self._charged += nbytes
        self._ledger.add(nbytes)

    def _restored(self) -> Tensor:
        assert self._encoded is not None
        encoded = self._encoded
        is_far = encoded.data.device != self._device or self._copies.overlaps
        if is_far and self._arriving is None:
            self._begin_to_arrive()
        if self._arriving is not None:
            data, ticket = self._arriving
            ticket.wait()
            self._arriving = None
            if encoded.codec == Raw.name:
                return data
            encoded = replace(encoded, data=data)
        restored = codecs.decode(encoded).view(torch.uint8)
        self._loans.append(self._ledger.lend(restored))
        return restored


class SavedTensor:
    """What autograd holds in the place of a tensor.

    Args:
        saved_storage: its data.
        tensor: what is saved.
        shift: see `ByteSpan.of`.

    Attributes:
        version: the tensor's when it was saved.
        alias: the tensor, if its data stay where they are; else None, and `view` is all else.
        was_used: whether it has been asked for.
    """

    __slots__ = ("__weakref__", "alias", "saved_storage", "version", "view", "was_used")

    def __init__(self, saved_storage: SavedStorage, tensor: Tensor, shift: int) -> None:
        self.saved_storage, self.version, self.was_used = (
            saved_storage,
            saved_storage.version,
            False,
        )
        self.alias: Tensor | None = None
        self.view: View | None = None
        if saved_storage.is_original:
            # Not the tensor itself: if it is an output, its node would hold itself.
            self.alias = tensor.detach()
        else:
            self.view = view_of(tensor, shift)


class Untouched:
    """What autograd holds of a tensor that stays as it is.

    Attributes:
        alias: the tensor, with its version counter. Not itself: if it is an output, its node would
            hold itself.
        version: the tensor's when it was saved.
    """

    __slots__ = ("alias", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.alias = tensor.detach()
        self.version = version_of(self.alias)


def _raw(data: Tensor, parcel: Allocation) -> Encoded:
    """Return bytes as they are in a tier."""
    return Encoded(Raw.name, data.dtype, data.shape, data.stride(), parcel.data, data.numel())


def _elements(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as elements of this type, if they are a whole number of them."""
    fits = data.numel() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0
    return data.view(dtype) if fits else data
