"""Engine that moves the tensors that autograd saves, and restores them for backward.

`torch.autograd.graph.saved_tensors_hooks` passes every saved tensor to the engine. The engine asks
a policy where each storage goes. It knows storages by identity, never by address, since freed
memory is allocated again. A storage that several operations save moves once, and each saved tensor
is rebuilt as a view of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import graph_is_kept, storage_key
from lightning_dlres.core.saved_tensors import (
    Restore,
    SharedMemoryGuard,
    UnmanagedTensor,
    claimed,
    has_storage,
    is_written_later,
    require_unchanged,
)
from lightning_dlres.core.untraced import untraced
from lightning_dlres.memory.execute.byte_counter import ByteCounter
from lightning_dlres.memory.execute.policy import OffloadPolicy
from lightning_dlres.memory.execute.saved_storage import SavedStorage, SavedTensor
from lightning_dlres.memory.execute.seen_storages import SeenStorage, SeenStorages
from lightning_dlres.memory.execute.spans import span_of

# One restored tensor: storage key of its memory, its handle, and the policy that placed it.
Unpacked = tuple[int, SavedTensor, OffloadPolicy]


class OffloadEngine:
    """Engine for the tensors that autograd saves in the steps that run under `hooks`.

    Args:
        min_bytes: Storages with fewer bytes are not managed.
        device: Device whose tensors are managed; None: tensors of all devices.

    Attributes:
        byte_counter: Counter of the bytes of saved storages on the device.
    """

    def __init__(self, min_bytes: int = 1 << 20, device: torch.device | None = None) -> None:
        self._min_bytes, self._device = max(min_bytes, 1), device
        self.byte_counter = ByteCounter()
        # Number of storages that the present step has saved.
        self._count = 0
        self._storages = SeenStorages()
        self._guard = SharedMemoryGuard()
        # Autograd runs backward of several devices in several threads.
        self._lock = threading.RLock()
        self._thread = threading.local()

    @contextmanager
    def hooks(self, policy: OffloadPolicy, exempt: Iterable[Tensor] = ()) -> Iterator[None]:
        """Context manager that manages the tensors saved in one step.

        Args:
            policy: Policy for the storages that are saved inside. It also gets their uses after the
                context has ended.
            exempt: Tensors that never move, like all views of them: parameters and buffers.
        """
        self._count = 0
        exempt_tensors = list(exempt)
        self._storages.start(exempt_tensors)
        policy.start()

        @untraced
        def pack(tensor: Tensor) -> _Packed | Restore:
            # Another engine may manage the tensor. Autograd then holds that engine's function.
            restore = claimed(tensor)
            if restore is not None:
                return restore
            if is_written_later():
                return _Packed(UnmanagedTensor(tensor), None)
            with self._lock:
                return self._pack(tensor, policy)

        with (
            self._guard.protecting(exempt_tensors),
            torch.autograd.graph.saved_tensors_hooks(pack, untraced(self._unpack)),
        ):
            yield

    def _pack(self, tensor: Tensor, policy: OffloadPolicy) -> _Packed:
        storage = self._storage_of(tensor)
        if storage is None or storage.is_exempt:
            return _Packed(UnmanagedTensor(tensor), None)
        nbytes = storage.nbytes(tensor)
        if nbytes < self._min_bytes:
            return _Packed(UnmanagedTensor(tensor), None)
        span = span_of(tensor, nbytes, storage.shift)
        saved_storage = storage.find(tensor, span)
        if saved_storage is not None:
            policy.save_again(saved_storage, tensor)
        else:
            number = self._count
            self._count += 1
            placement = policy.begin_save(tensor, span, number)
            saved_storage = SavedStorage(tensor, storage, span, number, self.byte_counter)
            is_placed = saved_storage.place(placement)
            storage.add(span, saved_storage)
            policy.end_save(saved_storage, is_placed)
        return _Packed(saved_storage.add_reader(tensor, storage), policy)

    def _storage_of(self, tensor: Tensor) -> SeenStorage | None:
        """Return the storage of a tensor; None for kinds of tensors that are never managed."""
        if type(tensor) not in (Tensor, nn.Parameter) or not has_storage(tensor):
            return None
        if not self._is_on_device(tensor.device):
            return None
        return None if tensor.is_conj() or tensor.is_neg() else self._storages.of(tensor)

    def _is_on_device(self, device: torch.device) -> bool:
        own = self._device
        if own is None or device == own:
            return True
        # torch.device("cuda") without an index stands for the GPU that computes.
        return own.index is None and device.type == own.type

    def _unpack(self, packed: _Packed | Restore) -> Tensor:
        if not isinstance(packed, _Packed):
            return packed()
        saved, policy = packed.saved, packed.policy
        if isinstance(saved, UnmanagedTensor) or policy is None:
            assert isinstance(saved, UnmanagedTensor)
            require_unchanged(saved.alias, saved.version)
            self._guard.hand_over(saved.alias, 1)
            return saved.alias
        with self._lock:
            saved_storage = saved.saved_storage
            require_unchanged(saved_storage.witness, saved.version)
            policy.begin_use(saved_storage)
            tensor = saved_storage.tensor_for(saved)
            policy.end_use(saved_storage)
            recorded = getattr(self._thread, "unpacked", None)
            if recorded is not None:
                recorded.append((storage_key(tensor), saved, policy))
            if saved_storage.is_original:
                self._guard.hand_over(tensor, saved_storage.owner_count(tensor))
            elif saved.view is not None:
                offset = int(tensor.storage_offset()) * tensor.element_size()
                self._storages.add_copy(tensor, saved_storage.storage, saved.view.start - offset)
            return tensor

    @contextmanager
    def recording_unpacked(self) -> Iterator[list[Unpacked]]:
        """Context manager that records the tensors that this thread unpacks."""
        outer = getattr(self._thread, "unpacked", None)
        unpacked: list[Unpacked] = []
        self._thread.unpacked = unpacked
        try:
            yield unpacked
        finally:
            self._thread.unpacked = outer

    def take_ownership(self, tensor: Tensor, unpacked: list[Unpacked]) -> bool:
        """Hand the memory of an unpacked tensor over to the caller, if nothing else can read it.

        Reference counts decide. The caller never gets memory of a graph that is kept for a second
        backward.

        Args:
            tensor: Unpacked tensor, which only the caller holds.
            unpacked: Record of `recording_unpacked`.

        Returns:
            Whether the caller owns the memory now, and may overwrite it.
        """
        if graph_is_kept():
            return False
        memory = storage_key(tensor)
        with self._lock:
            for key, saved, policy in unpacked:
                if key == memory and saved.saved_storage.take_ownership(tensor, saved):
                    policy.take_ownership(saved.saved_storage, tensor)
                    return True
        return False


class _Packed:
    """Object that autograd holds: the handle of a saved tensor, and the policy that placed it.

    The policy of an unmanaged tensor is None.
    """

    __slots__ = ("policy", "saved")

    def __init__(self, saved: SavedTensor | UnmanagedTensor, policy: OffloadPolicy | None) -> None:
        self.saved, self.policy = saved, policy
