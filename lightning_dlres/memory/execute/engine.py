"""Moves what autograd saves, as it is told, and brings it back for backward (Method A, A4, A5).

`torch.autograd.graph.saved_tensors_hooks` shows every saved tensor. Storages are known by identity,
never by address, as freed memory is used again: what several nodes save of one storage moves once,
and every view is made anew as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import (
    graph_is_kept,
    owners_of_memory,
    storage_key,
    version_of,
)
from lightning_dlres.memory.execute.saved import (
    ByteCounter,
    Placement,
    SavedStorage,
    SavedTensor,
    Untouched,
)
from lightning_dlres.memory.execute.spans import ByteSpan, span_of
from lightning_dlres.memory.execute.storages import SeenStorage, SeenStorages, has_storage


class OffloadPolicy(Protocol):
    """Says what happens, and is told what has happened."""

    def start(self) -> None:
        """A step begins."""

    def begin_save(self, tensor: Tensor, span: ByteSpan, number: int) -> Placement:
        """A saved_storage is new; return what is to happen to it.

        Args:
            tensor: what is saved.
            span: which bytes of its storage.
            number: how many data were saved before it in this step.
        """

    def end_save(self, saved_storage: SavedStorage, done: bool) -> None:
        """It has happened, or was not possible."""

    def save_again(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """Another tensor over the same data is saved."""

    def begin_use(self, saved_storage: SavedStorage) -> None:
        """Backward asks for a saved_storage."""

    def end_use(self, saved_storage: SavedStorage) -> None:
        """It is there."""

    def take_ownership(self, saved_storage: SavedStorage, tensor: Tensor) -> None:
        """Its memory is no saved_storage any more, but what a tensor over it is used for."""


class SavedTensors:
    """What autograd has saved under `hooks`.

    Args:
        min_bytes: tensors with less stay as they are.
        device: tensors elsewhere stay as they are; None: none do.

    Attributes:
        ledger: the bytes of data on the device.
    """

    def __init__(self, min_bytes: int = 1 << 20, device: torch.device | None = None) -> None:
        self._min_bytes, self._device = max(min_bytes, 1), device
        self.ledger = ByteCounter()
        self._count = 0
        self._storages = SeenStorages()
        # Tensors that backward got over memory that others hold, too, by storage. Without this
        # second reference autograd could take one for a gradient that it may write to.
        self._shared: dict[int, Tensor] = {}
        self._lock = threading.RLock()
        self._asked = threading.local()

    @contextmanager
    def hooks(self, conductor: OffloadPolicy, stays: Iterable[Tensor] = ()) -> Iterator[None]:
        """Inside of it, a conductor decides about what autograd saves; around one step.

        Args:
            conductor: is asked about data that are saved here, also after the step.
            stays: tensors that never move, nor views of them: parameters and buffers.
        """
        self._count = 0
        self._shared.clear()
        staying = list(stays)
        self._storages.start(staying)
        conductor.start()

        def pack(tensor: Tensor) -> _Packed:
            with self._lock:
                return self._pack(tensor, conductor)

        leaves = (tensor for tensor in staying if tensor.requires_grad and tensor.is_leaf)
        handles = [leaf.register_hook(self._own_gradient) for leaf in leaves]
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, self._unpack):
                yield
        finally:
            for handle in handles:
                handle.remove()
            self._shared.clear()

    def _pack(self, tensor: Tensor, conductor: OffloadPolicy) -> _Packed:
        storage = self._storage_of(tensor)
        if storage is None or storage.stays:
            return _Packed(Untouched(tensor), None)
        nbytes = storage.nbytes(tensor)
        if nbytes < self._min_bytes:
            return _Packed(Untouched(tensor), None)
        span = span_of(tensor, nbytes, storage.shift)
        saved_storage = storage.find(tensor, span)
        if saved_storage is not None:
            conductor.save_again(saved_storage, tensor)
        else:
            number = self._count
            self._count += 1
            order = conductor.begin_save(tensor, span, number)
            saved_storage = SavedStorage(tensor, storage, span, number, self.ledger)
            done = saved_storage.place(order)
            storage.add(span, saved_storage)
            conductor.end_save(saved_storage, done)
        return _Packed(saved_storage.read_by(tensor, storage), conductor)

    def _storage_of(self, tensor: Tensor) -> SeenStorage | None:
        """Return the storage of a tensor that may move; None: its kind never does."""
        if type(tensor) not in (Tensor, nn.Parameter) or not has_storage(tensor):
            return None
        if not self._is_here(tensor.device):
            return None
        return None if tensor.is_conj() or tensor.is_neg() else self._storages.of(tensor)

    def _is_here(self, device: torch.device) -> bool:
        own = self._device
        if own is None or device == own:
            return True
        # A GPU without a number is the one that computes.
        return own.index is None and device.type == own.type

    def _unpack(self, packed: _Packed) -> Tensor:
        saved, conductor = packed.saved, packed.conductor
        if isinstance(saved, Untouched) or conductor is None:
            assert isinstance(saved, Untouched)
            _require_unchanged(saved.alias, saved.version)
            self._share(saved.alias, 1)
            return saved.alias
        with self._lock:
            saved_storage = saved.saved_storage
            _require_unchanged(saved_storage.witness, saved.version)
            conductor.begin_use(saved_storage)
            tensor = saved_storage.tensor_for(saved)
            conductor.end_use(saved_storage)
            asked = getattr(self._asked, "found", None)
            if asked is not None:
                asked.append((storage_key(tensor), saved, conductor))
            if saved_storage.is_original:
                self._share(tensor, saved_storage.owners(tensor))
            elif saved.view is not None:
                offset = int(tensor.storage_offset()) * tensor.element_size()
                self._storages.add_copy(tensor, saved_storage.storage, saved.view.start - offset)
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

    def take_ownership(self, tensor: Tensor, asked: list[Asked]) -> bool:
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
                if key == memory and saved.saved_storage.take_ownership(tensor, saved):
                    conductor.take_ownership(saved.saved_storage, tensor)
                    return True
        return False

    def _share(self, tensor: Tensor, ours: int) -> None:
        if has_storage(tensor) and owners_of_memory(tensor) > ours:
            self._shared.setdefault(storage_key(tensor), tensor)

    def _own_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """Give a parameter a gradient of its own where a custom function returns a tensor that it
        has saved. Under hooks autograd takes that for a new tensor, and would make it `.grad`:
        clipping, the optimizer or DDP would then write to the saved tensor, even to a weight."""
        if gradient is None or not self._shared or not has_storage(gradient):
            return None
        return gradient.clone() if storage_key(gradient) in self._shared else None


# The memory that somebody got, for what, and who decides about that.
Asked = tuple[int, SavedTensor, OffloadPolicy]


class _Packed:
    """What autograd holds: a saved tensor, and who decides about it."""

    __slots__ = ("conductor", "saved")

    def __init__(self, saved: SavedTensor | Untouched, conductor: OffloadPolicy | None) -> None:
        self.saved, self.conductor = saved, conductor


def _require_unchanged(tensor: Tensor, version: int) -> None:
    """Raise autograd's own error, which it leaves out where hooks take what it saves."""
    now = version_of(tensor)
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: it is at version {now}; expected version {version} instead."
        )
