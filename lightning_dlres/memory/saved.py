"""One piece of memory that autograd has saved, for all tensors that are views of it: on the device,
compressed there, away, and back again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from lightning_dlres import codecs
from lightning_dlres.codecs import Encoded, Raw, ZeroValue
from lightning_dlres.core._compat import Version
from lightning_dlres.memory.spans import Span, View
from lightning_dlres.memory.tiers import Parcel, Tier

_ZERO_VALUE = ZeroValue()


class Action(Enum):
    """What happens to a datum between its forward and its backward."""

    KEEP = "keep"
    COMPRESS = "compress"
    OFFLOAD = "offload"
    BOTH = "compress, offload"


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
        """Return the most that were there at a time."""
        self.add(0)
        return self._peak

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


class Datum:
    """The bytes of a span of a storage.

    Args:
        tensor: what was saved.
        span: which bytes of its storage.
        action: what happens to them.
        tier: where they go.
        ledger: is told what is on the device.
    """

    def __init__(
        self, tensor: Tensor, span: Span, action: Action, tier: Tier | None, ledger: Ledger
    ) -> None:
        self._ledger, self._charged = ledger, 0
        self.span, self.action = span, action
        self.version = Version(tensor)
        self._waiting = 0
        self._here: Tensor | None = span.of(tensor)
        self._encoded: Encoded | None = None
        self._parcel: Parcel | None = None
        self._charge(span.nbytes)
        if action is not Action.KEEP:
            self._leave(tensor.dtype, tier)

    def __del__(self) -> None:
        self._ledger.drop(self._charged)

    def expect(self) -> None:
        """Note that one more tensor will ask for the data."""
        self._waiting += 1

    def data(self, first_time: bool) -> Tensor:
        """Return the bytes, uint8[nbytes], on the device.

        Args:
            first_time: whether the tensor that asks had not asked before. The last one to do so
                gets the data alone: nothing of them stays here.
        """
        self._waiting -= first_time
        if self._here is None:
            self._here = self._fetch()
            self._charge(self.span.nbytes)
        data = self._here
        if self._waiting <= 0 and self._encoded is not None:
            self._here = None
            self._charge(-self.span.nbytes)
        return data

    def _charge(self, nbytes: int) -> None:
        self._charged += nbytes
        self._ledger.add(nbytes)

    def _leave(self, dtype: torch.dtype, tier: Tier | None) -> None:
        here, encoded = self._here, None
        assert here is not None
        if self.action is not Action.OFFLOAD:
            encoded = _ZERO_VALUE.encode(_elements(here, dtype))
            if self.action is Action.COMPRESS and encoded.codec == Raw.name:
                return
        if self.action is not Action.COMPRESS:
            assert tier is not None
            self._parcel = tier.put(here if encoded is None else encoded.payload)
            if self._parcel is None:
                return
            if encoded is None:
                encoded = Encoded(
                    Raw.name,
                    here.dtype,
                    here.shape,
                    here.stride(),
                    self._parcel.data,
                    here.numel(),
                )
            else:
                encoded = replace(encoded, data=self._parcel.data)
        else:
            assert encoded is not None
            self._charge(encoded.nbytes)
        self._encoded, self._here = encoded, None
        self._charge(-self.span.nbytes)

    def _fetch(self) -> Tensor:
        assert self._encoded is not None
        flat = codecs.decode(self._encoded)
        return flat.view(torch.uint8)


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
        return self.view.on(data, self.datum.span)


@dataclass(eq=False)
class Untouched:
    """What autograd holds of a tensor that stays as it is."""

    alias: Tensor
    version: Version

    def tensor(self) -> Tensor:
        """Return the tensor."""
        return self.alias


Decide = Callable[[int, Tensor], Action]


def _elements(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return bytes as elements of this type, if they are a whole number of them."""
    fits = data.numel() % dtype.itemsize == 0 and data.storage_offset() % dtype.itemsize == 0
    return data.view(dtype) if fits else data
