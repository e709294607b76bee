"""Moves what autograd saves, as it is told, and brings it back for backward (Method A, A4, A5).

`torch.autograd.graph.saved_tensors_hooks` shows every saved tensor. Storages are known by identity,
never by address, as freed memory is used again: what several nodes save of one storage moves once,
and every view is made anew as it was.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_dlres.core._compat import (
    Version,
    graph_is_kept,
    is_batched,
    is_zeros_without_memory,
    owners_of_memory,
    storage_key,
    storage_reference,
)
from lightning_dlres.memory.saved import Datum, Ledger, Order, SavedTensor, Untouched
from lightning_dlres.memory.spans import Span, span_of, view_of


class Conductor(Protocol):
    """Says what happens, and is told what has happened."""

    def start(self) -> None:
        """A step begins."""

    def begin_save(self, tensor: Tensor, span: Span, number: int) -> Order:
        """A datum is new; return what is to happen to it.

        Args:
            tensor: what is saved.
            span: which bytes of its storage.
            number: how many data were saved before it in this step.
        """

    def end_save(self, datum: Datum, done: bool) -> None:
        """It has happened, or was not possible."""

    def save_again(self, datum: Datum, tensor: Tensor) -> None:
        """Another tensor over the same data is saved."""

    def begin_use(self, datum: Datum) -> None:
        """Backward asks for a datum."""

    def end_use(self, datum: Datum) -> None:
        """It is there."""

    def give_up(self, datum: Datum, tensor: Tensor) -> None:
        """Its memory is no datum any more, but what a tensor over it is used for."""


class SavedTensors:
    """What autograd has saved under `hooks`.

    Args:
        min_bytes: tensors with less stay as they are.

    Attributes:
        ledger: the bytes of data on the device.
    """

    def __init__(self, min_bytes: int = 1 << 20) -> None:
        self._min_bytes = min_bytes
        self.ledger = Ledger()
        self._count = 0
        self._stays: set[Any] = set()
        self._places: list[tuple[int, int]] = []
        # What backward was given of memory that others hold, too. Were there no second reference,
        # autograd could take it for a gradient that it may write to.
        self._shared: list[Tensor] = []
        self._known: weakref.WeakValueDictionary[tuple[Any, Span], Datum] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.RLock()
        self._asked = threading.local()

    @contextmanager
    def hooks(self, conductor: Conductor, stays: Iterable[Tensor] = ()) -> Iterator[None]:
        """Inside of it, a conductor decides about what autograd saves; around one step.

        Args:
            conductor: is asked about data that are saved here, also after the step.
            stays: tensors that never move, nor views of them: parameters and buffers.
        """
        self._count = 0
        self._shared.clear()
        self._keep(list(stays))
        conductor.start()

        def pack(tensor: Tensor) -> _Packed:
            with self._lock:
                return self._pack(tensor, conductor)

        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                yield
        finally:
            self._shared.clear()

    def _keep(self, stays: list[Tensor]) -> None:
        # Mostly the same tensors with the same memory, step for step.
        places = [
            (id(tensor), tensor.data_ptr() if _has_storage(tensor) else 0) for tensor in stays
        ]
        if places != self._places:
            self._places = places
            self._stays = {storage_reference(t) for t in stays if _has_storage(t)}

    def _pack(self, tensor: Tensor, conductor: Conductor) -> _Packed:
        version = Version(tensor)
        if not self._may_move(tensor):
            # Not the tensor itself: if it is an output, its node would hold itself.
            return _Packed(Untouched(tensor.detach(), version), None)
        reference, span = storage_reference(tensor), span_of(tensor)
        datum = self._known.get((reference, span))
        if datum is not None and datum.version.now == datum.version.saved:
            conductor.save_again(datum, tensor)
        else:
            number = self._count
            self._count += 1
            order = conductor.begin_save(tensor, span, number)
            datum = Datum(tensor, span, number, self.ledger)
            done = datum.obey(order)
            self._known[reference, span] = datum
            conductor.end_save(datum, done)
        saved = SavedTensor(view_of(tensor), version, datum)
        datum.expect(saved)
        return _Packed(saved, conductor)

    def _may_move(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in (Tensor, nn.Parameter)
            and _has_storage(tensor)
            and tensor.untyped_storage().nbytes() >= max(self._min_bytes, 1)
            and not (tensor.is_conj() or tensor.is_neg())
            and storage_reference(tensor) not in self._stays
        )

    def _unpack(self, packed: _Packed) -> Tensor:
        saved, version = packed.saved, packed.saved.version
        if version.now != version.saved:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: it is at version {version.now}; expected version "
                f"{version.saved} instead."
            )
        if isinstance(saved, Untouched) or packed.conductor is None:
            tensor = saved.tensor()
            self._share(tensor, 1)
            return tensor
        with self._lock:
            packed.conductor.begin_use(saved.datum)
            tensor = saved.tensor()
            packed.conductor.end_use(saved.datum)
            asked = getattr(self._asked, "found", None)
            if asked is not None:
                asked.append((storage_key(tensor), saved, packed.conductor))
            if saved.datum.is_original:
                self._share(tensor, saved.datum.owners)
            return tensor

    @contextmanager
    def asking(self) -> Iterator[list[Asked]]:
        """Inside of it, what this thread asks for is noted (Method A, A6)."""
        before = getattr(self._asked, "found", None)
        found: list[Asked] = []
        self._asked.found = found
        try:
            yield found
        finally:
            self._asked.found = before

    def give_up(self, tensor: Tensor, asked: list[Asked]) -> bool:
        """Return whether a tensor's memory is the caller's from now on, to write to: it was saved
        under `hooks`, and by count nobody else can read it any more.

        Args:
            tensor: that was asked for, and that only the caller holds.
            asked: what was noted meanwhile.
        """
        if graph_is_kept():
            return False
        memory = storage_key(tensor)
        with self._lock:
            for key, saved, conductor in asked:
                if key == memory and saved.datum.give_up(tensor, saved):
                    conductor.give_up(saved.datum, tensor)
                    return True
        return False

    def _share(self, tensor: Tensor, ours: int) -> None:
        if _has_storage(tensor) and owners_of_memory(tensor) > ours:
            self._shared.append(tensor)


# The memory that somebody got, for what, and who decides about that.
Asked = tuple[int, SavedTensor, Conductor]


class _Packed:
    """What autograd holds: a saved tensor, and who decides about it."""

    __slots__ = ("conductor", "saved")

    def __init__(self, saved: SavedTensor | Untouched, conductor: Conductor | None) -> None:
        self.saved, self.conductor = saved, conductor


def _has_storage(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and not is_lazy(tensor)
        and not is_batched(tensor)
        and tensor.device.type != "meta"
        and not is_zeros_without_memory(tensor)
        and not tensor.is_quantized
        and tensor.numel() > 0
    )
