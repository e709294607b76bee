"""Measures a step while all its data are away, so that it fits wherever any plan does (Method A,
A1)."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf

import torch
from torch import Tensor

from lightning_dlres.codecs import Raw, ZeroValue, decode
from lightning_dlres.codecs.zvc import pays
from lightning_dlres.kernels import zvc
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.gpu import Gpu
from lightning_dlres.memory.execute.saved import ByteCounter, Placement, SavedStorage
from lightning_dlres.memory.execute.spans import ByteSpan, dtype_name
from lightning_dlres.memory.execute.tiers import Tier
from lightning_dlres.memory.profile import step_profile as profile
from lightning_dlres.memory.profile.layer_record import LayerRecord
from lightning_dlres.memory.profile.meter import Held, MemoryTrace, Meter
from lightning_dlres.memory.profile.step_profile import StepProfile

_ZERO_VALUE = ZeroValue()


@dataclass(eq=False)
class _Noted:
    """What is known of a saved_storage."""

    tensor_dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    saved: int
    layer: str
    role: str
    packed: int | None
    encode_seconds: float
    decode_seconds: float
    first_mark: int
    last_mark: int
    gone: int | None = None
    is_counted: bool = True
    # Where its memory was when somebody else got it.
    given_up: int | None = None
    uses: list[int] = field(default_factory=list)
    end: int | None = None


class ProfilingPolicy:
    """A policy that sends everything away, and notes what it sees.

    Args:
        tier: where everything goes.
        meter: counts the device's bytes.
        ledger: knows how many of them are data.
        layers: knows which module runs; None: nobody does.
        gpu: what computes; None: the CPU.
        measures_codec: whether compression is tried.
    """

    def __init__(
        self,
        tier: Tier,
        meter: Meter,
        ledger: ByteCounter,
        layers: LayerRecord | None,
        gpu: Gpu | None,
        measures_codec: bool = True,
    ) -> None:
        self._tier, self._meter, self._ledger = tier, meter, ledger
        self._layers, self._gpu, self._measures_codec = layers, gpu, measures_codec
        self._data: list[_Noted] = []
        self._of: weakref.WeakKeyDictionary[SavedStorage, _Noted] = weakref.WeakKeyDictionary()
        self._seconds: list[float] = []
        # For every interval the marks at its beginning and its end, and what is there at its
        # beginning that is not the base.
        self._intervals: list[tuple[int, int, int]] = []
        self._marks = self._began = self._held = 0
        # Bytes of data that are away, and of which others hold the memory still.
        self._lingering = 0
        # For every interval the marks at which data ended in it, with their bytes.
        self._ends: dict[int, list[tuple[int, int]]] = {}
        self._is_in_event = False
        self._since = self._computed = 0.0
        self._is_open = False

    @contextmanager
    def recording(self, held: Held) -> Iterator[None]:
        """Around the step: inside of it, this is measured.

        Args:
            held: returns what is on the device before.
        """
        watching = self._layers.watching(self) if self._layers is not None else nullcontext()
        with self._meter.running(held), watching:
            self._is_open = True
            self._resume()
            try:
                yield
            finally:
                if self._is_open:
                    self._enter()
                self._is_open = False

    @property
    def place(self) -> int:
        """Return the number of the next event."""
        return len(self._seconds)

    @property
    def mark(self) -> int:
        """Return a number that grows with everything that is saved."""
        return self._marks

    @property
    def usual_bytes(self) -> int:
        """Return the size of a saved_storage, half of all bytes being in smaller ones."""
        sizes = sorted(noted.nbytes for noted in self._data)
        half, below = sum(sizes) / 2, 0
        for size in sizes:
            below += size
            if below >= half:
                return size
        return 0

    def clock(self) -> float:
        """Return how many seconds have been computed."""
        if self._gpu is not None:
            self._gpu.synchronize()
        return self._computed + time.perf_counter() - self._since

    def mark_memory(self) -> int:
        """Note this moment in the meter's trace."""
        return self._meter.mark(ours=False)

    def profile(self, links: Iterable[profile.TierLink], rate: float = inf) -> StepProfile:
        """Return what was measured.

        Args:
            links: to the tiers.
            rate: bytes a second that the device copies.
        """
        last = len(self._seconds) - 1
        data = tuple(
            profile.SavedStorageProfile(
                nbytes=noted.nbytes,
                dtype=dtype_name(noted.tensor_dtype),
                shape=noted.shape,
                layer=noted.layer,
                role=noted.role,
                saved=noted.saved,
                gone=last if noted.gone is None else max(noted.gone, noted.saved + 1),
                uses=tuple(noted.uses),
                end=max([noted.saved, *noted.uses, last if noted.end is None else noted.end]),
                packed=noted.packed,
                encode_seconds=noted.encode_seconds,
                decode_seconds=noted.decode_seconds,
            )
            for noted in self._data
        )
        layers: tuple[profile.Layer, ...] = ()
        regions: tuple[profile.Region, ...] = ()
        reuses: tuple[profile.Reuse, ...] = ()
        trace = self._meter.trace()
        base = [max(0, self._base(trace, place)) for place in range(len(self._intervals))]
        if self._layers is not None:
            data = self._layers.with_roles(data)
            marks = [(noted.first_mark, noted.last_mark) for noted in self._data]
            regions = self._layers.regions(data, marks, trace)
            reuses = self._layers.reuses(data, rate)
            layers = self._layers.layers(data, trace)
        return StepProfile(
            seconds=tuple(self._seconds),
            base=tuple(base),
            data=data,
            links=tuple(links),
            regions=regions,
            reuses=reuses,
            layers=layers,
        )

    def _base(self, trace: MemoryTrace, place: int) -> int:
        """Return the most bytes beside data in an interval. A saved_storage that ends in it counts to its
        end as if it were there: less may be beside it before than after."""
        began, ended, held = self._intervals[place]
        most, released = 0, 0
        for mark, nbytes in self._ends.get(place, []):
            most = max(most, trace.peak(began, mark) - held - released)
            began = mark
            if not self._meter.counts_fetched:
                released += nbytes
        return max(most, trace.peak(began, ended) - held - released)

    def start(self) -> None:
        """See `OffloadPolicy`."""

    def begin_save(self, tensor: Tensor, span: ByteSpan, number: int) -> Placement:
        """See `OffloadPolicy`."""
        self._enter()
        packed, encode_seconds, decode_seconds = self._try_codec(span.of(tensor), tensor.dtype)
        layer, role = "", "internal"
        if self._layers is not None:
            layer, role = self._layers.saving(tensor, number)
        noted = _Noted(
            tensor_dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            nbytes=span.nbytes,
            saved=len(self._seconds) - 1,
            layer=layer,
            role=role,
            packed=packed,
            encode_seconds=encode_seconds,
            decode_seconds=decode_seconds,
            first_mark=self._marks,
            last_mark=self._marks,
        )
        self._data.append(noted)
        self._lingering += span.nbytes
        storage = tensor.untyped_storage()
        weakref.finalize(storage, self._gone, noted).atexit = False
        return Placement(MemoryAction.OFFLOAD, self._tier)

    def end_save(self, saved_storage: SavedStorage, done: bool) -> None:
        """See `OffloadPolicy`."""
        noted = self._data[-1]
        self._of[saved_storage] = noted
        weakref.finalize(saved_storage, self._ended, noted).atexit = False
        self._resume()

    def save_again(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """See `OffloadPolicy`."""
        self._marks += 1
        noted = self._of.get(saved_storage)
        if noted is not None:
            noted.last_mark = self._marks
        if self._layers is not None:
            self._layers.saving_again(tensor, saved_storage.number)

    def begin_use(self, saved_storage: SavedStorage) -> None:
        """See `OffloadPolicy`."""
        if self._is_open:
            self._enter()
            noted = self._of.get(saved_storage)
            if noted is not None:
                noted.uses.append(len(self._seconds) - 1)

    def end_use(self, saved_storage: SavedStorage) -> None:
        """See `OffloadPolicy`."""
        if self._is_open:
            self._resume()

    def take_ownership(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """See `OffloadPolicy`."""
        noted = self._of.get(saved_storage)
        if noted is not None:
            noted.given_up = tensor.data_ptr()

    def _enter(self) -> None:
        """An event: the interval before it is over."""
        if self._gpu is not None:
            self._gpu.synchronize()
        seconds = time.perf_counter() - self._since
        self._seconds.append(seconds)
        self._computed += seconds
        self._intervals.append((self._began, self._meter.mark(ours=True), self._held))
        self._is_in_event = True
        self._marks += 1

    def _resume(self) -> None:
        if self._gpu is not None:
            self._gpu.synchronize()
        self._began = self._meter.mark(ours=False)
        self._is_in_event = False
        fetched = self._ledger.now if self._meter.counts_fetched else 0
        self._held = self._lingering + fetched
        self._since = time.perf_counter()

    def _gone(self, noted: _Noted) -> None:
        if self._is_open:
            noted.gone = self.place
            if noted.is_counted:
                self._lingering -= noted.nbytes

    def _ended(self, noted: _Noted) -> None:
        if self._is_open:
            noted.end = self.place - 1
            if noted.gone is not None and not self._is_in_event:
                mark = self._meter.mark(ours=False)
                self._ends.setdefault(self.place, []).append((mark, noted.nbytes))
                if noted.given_up is not None:
                    # A saved_storage up to here, something that others hold from here on.
                    self._meter.hand_over(mark, noted.given_up)
            elif noted.gone is None:
                # From now on it is no saved_storage, but something that others hold.
                self._lingering -= noted.nbytes
                noted.is_counted = False

    def _try_codec(self, data: Tensor, dtype: torch.dtype) -> tuple[int | None, float, float]:
        """Return the bytes of compressed data, None where that does not pay, and how long that
        takes, and its reverse."""
        width = dtype.itemsize
        if not self._measures_codec or width not in zvc.WIDTHS or data.numel() % width:
            return None, 0.0, 0.0
        if not pays(float(zvc.density(data, width)), width):
            return None, 0.0, 0.0
        began = self._now()
        encoded = _ZERO_VALUE.encode(data.view(dtype))
        packed, between = encoded.nbytes, self._now()
        if encoded.codec == Raw.name:
            return None, 0.0, 0.0
        decode(encoded)
        return packed, between - began, self._now() - between

    def _now(self) -> float:
        if self._gpu is not None:
            self._gpu.synchronize()
        return time.perf_counter()
