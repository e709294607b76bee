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
    Version,
    is_only_in_python,
    owners_of_memory,
    storage_reference,
)
from lightning_dlres.memory.actions import Action
from lightning_dlres.memory.copies import Copies, DirectCopies, Ticket
from lightning_dlres.memory.spans import Span, View
from lightning_dlres.memory.tiers import Parcel, Tier

_ZERO_VALUE = ZeroValue()
_DIRECT = DirectCopies()


@dataclass(frozen=True)
class Order:
    """What is to happen to a datum.

    Attributes:
        action: what.
        tier: where it goes, if it leaves; where it goes, too, if it is to be compressed and takes
            more than `room`.
        offset: its place there; None: any.
        copies: how it gets there and back.
        room: bytes that it may take on the device when compressed; None: any.
    """

    action: Action
    tier: Tier | None = None
    offset: int | None = None
    copies: Copies = _DIRECT
    room: int | None = None


class Ledger:
    """How many bytes of saved data are on the device."""

    def __init__(self) -> None:
        self._now = self._peak = 0
        self._lock = threading.Lock()
        # Data may be dropped by the garbage collector, in any thread at any time.
        self._changes: deque[int] = deque()

    @property
    def now(self) -> int:
        """Return the bytes that are there."""
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


class Datum:
    """The bytes of a span of a storage.

    Args:
        tensor: what was saved.
        span: which bytes of its storage.
        number: how many data were saved before it in this step.
        ledger: is told what is on the device.

    Attributes:
        uses: how often it has been asked for.
    """

    def __init__(self, tensor: Tensor, span: Span, number: int, ledger: Ledger) -> None:
        self._ledger, self._charged = ledger, 0
        self.span, self.number, self.uses = span, number, 0
        self.version = Version(tensor)
        self._dtype, self._device = tensor.dtype, tensor.device
        self._waiting = 0
        self._here: Tensor | None = span.of(tensor)
        self._encoded: Encoded | None = None
        self._parcel: Parcel | None = None
        self._copies: Copies = _DIRECT
        self._leaving: Ticket | None = None
        self._arriving: tuple[Tensor, Ticket] | None = None
        self._given: list[Tensor] = []
        self._original = storage_reference(tensor)
        self._readers: weakref.WeakSet[SavedTensor] = weakref.WeakSet()
        self._loans: list[Callable[[], object]] = []
        self._is_given_up = False
        self._charge(span.nbytes)

    def __del__(self) -> None:
        self._ledger.drop(self._charged)

    def expect(self, reader: SavedTensor) -> None:
        """Note a tensor that will ask for the data."""
        self._waiting += 1
        self._readers.add(reader)

    def give_up(self, tensor: Tensor, reader: SavedTensor) -> bool:
        """Leave the data's memory to one who asked for them, if nobody else can read it.

        Args:
            tensor: over that memory, the only one that the asking one holds.
            reader: what asked; autograd must not ask for it again.

        Returns:
            Whether the memory is the asking one's: all of it, and to write to.
        """
        storage = tensor.untyped_storage()
        if list(self._readers) != [reader] or storage.nbytes() != self.span.nbytes:
            return False
        # Memory of others than torch (an array's), or of other processes, too.
        if not storage.resizable() or (storage.device.type == "cpu" and tensor.is_shared()):
            return False
        del storage
        if self._here is None and not self._original.expired():
            # It is a copy, but with the original kept this would not be possible: what was planned
            # must not depend on where the data are.
            return False
        if not all(is_only_in_python(other) for other in self._given):
            return False
        own = len(self._given) + (self._here is not None)
        if owners_of_memory(tensor) != 1 + own:
            return False
        if self._here is not None and self._encoded is None:
            self._charge(-self.span.nbytes)
        self._is_given_up = True
        self._here = None
        self._given.clear()
        for end in self._loans:
            end()
        self._loans.clear()
        return True

    def obey(self, order: Order) -> bool:
        """Do what is to happen; return whether that was possible."""
        if order.action is Action.KEEP:
            return True
        here, encoded, self._copies = self._here, None, order.copies
        assert here is not None
        if order.action is not Action.OFFLOAD:
            encoded = _ZERO_VALUE.encode(_elements(here, self._dtype))
            if encoded.codec == Raw.name:
                # More than it was: as it is, it is as well off.
                encoded = None
        leaves = order.action is not Action.COMPRESS
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
            if encoded is None:
                encoded = Encoded(
                    Raw.name, here.dtype, here.shape, here.stride(), here, here.numel()
                )
            encoded = replace(encoded, data=self._parcel.data, used=sent.numel())
        else:
            assert encoded is not None
            self._charge(encoded.nbytes)
        self._encoded = encoded
        if self._leaving is None or not order.copies.overlaps:
            self.settle()
        return True

    def settle(self) -> None:
        """Free the memory on the device; what is computed from now on waits until it has left."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None
        if self._here is not None and self._encoded is not None:
            self._here = None
            self._charge(-self.span.nbytes)

    @property
    def is_original(self) -> bool:
        """Return whether it is where it was saved."""
        return self._encoded is None

    @property
    def owners(self) -> int:
        """Return how many tensors of its memory are its own, or were given to backward."""
        return 1 + len(self._given)

    def lend(self, tensor: Tensor) -> None:
        """Note a tensor that backward is given of these data while others still wait for them: a
        second reference, so that autograd does not take it for a gradient of its own."""
        if self._here is not None:
            self._given.append(tensor)

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

    def data(self, first_time: bool) -> Tensor:
        """Return the bytes, uint8[nbytes], on the device.

        Args:
            first_time: whether the tensor that asks had not asked before. The last one to do so
                gets the data alone: nothing of them stays here.
        """
        if self._is_given_up:
            raise RuntimeError(
                "a tensor saved for backward was asked for once more, after its memory was reused: "
                "expected that backward runs once where retain_graph is not set. Set it, or leave "
                "'reuse' out of the actions."
            )
        self.uses += 1
        self._waiting -= first_time
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
        if encoded.data.device != self._device and self._arriving is None:
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


@dataclass(eq=False)
class SavedTensor:
    """What autograd holds in the place of a tensor.

    Attributes:
        view: the tensor but for its data.
        version: whether it was changed in place since.
        datum: its data.
        was_used: whether it has been asked for.
    """

    view: View
    version: Version
    datum: Datum
    was_used: bool = False

    def tensor(self) -> Tensor:
        """Return the tensor."""
        data = self.datum.data(not self.was_used)
        self.was_used = True
        tensor = self.view.on(data, self.datum.span)
        self.datum.lend(tensor)
        return tensor


@dataclass(eq=False)
class Untouched:
    """What autograd holds of a tensor that stays as it is."""

    alias: Tensor
    version: Version

    def tensor(self) -> Tensor:
        """Return the tensor."""
        return self.alias


def _elements(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as elements of this type, if they are a whole number of them."""
    fits = data.numel() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0
    return data.view(dtype) if fits else data
