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
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import Version, is_zeros_without_memory, storage_reference
from lightning_dlres.memory.saved import Action, Datum, Decide, Ledger, SavedTensor, Untouched
from lightning_dlres.memory.spans import Span, span_of, view_of
from lightning_dlres.memory.tiers import Tier


class SavedTensors:
    """What autograd has saved under `hooks`.

    Args:
        decide: what to do with a tensor, by how many were saved before it in this step.
        tier: where data go; None where nothing is offloaded.
        min_bytes: tensors with less stay as they are.
    """

    def __init__(self, decide: Decide, tier: Tier | None = None, min_bytes: int = 1 << 20) -> None:
        self._decide, self._tier, self._min_bytes = decide, tier, min_bytes
        self.ledger = Ledger()
        self._count = 0
        self._stays: set[Any] = set()
        self._known: weakref.WeakValueDictionary[tuple[Any, Span], Datum] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.RLock()

    @contextmanager
    def hooks(self, stays: Iterable[Tensor] = ()) -> Iterator[None]:
        """Inside of it, this decides about what autograd saves; around one step.

        Args:
            stays: tensors that never move, nor views of them: parameters and buffers.
        """
        self._count = 0
        self._stays = {storage_reference(tensor) for tensor in stays if _has_storage(tensor)}
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield

    def _pack(self, tensor: Tensor) -> SavedTensor | Untouched:
        with self._lock:
            number = self._count
            self._count += 1
            version = Version(tensor)
            if not self._may_move(tensor):
                # Not the tensor itself: if it is an output, its node would hold itself.
                return Untouched(tensor.detach(), version)
            datum = self._datum(tensor, number)
            datum.expect()
            return SavedTensor(view_of(tensor), version, datum)

    def _datum(self, tensor: Tensor, number: int) -> Datum:
        reference, span = storage_reference(tensor), span_of(tensor)
        known = self._known.get((reference, span))
        if known is not None and known.version.now == known.version.saved:
            return known
        action = self._decide(number, tensor)
        datum = Datum(tensor, span, action, self._tier, self.ledger)
        self._known[reference, span] = datum
        return datum

    def _may_move(self, tensor: Tensor) -> bool:
        return (
            type(tensor) in (Tensor, nn.Parameter)
            and _has_storage(tensor)
            and tensor.untyped_storage().nbytes() >= max(self._min_bytes, 1)
            and not (tensor.is_conj() or tensor.is_neg())
            and storage_reference(tensor) not in self._stays
        )

    def _unpack(self, saved: SavedTensor | Untouched) -> Tensor:
        version = saved.version
        if version.now != version.saved:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: it is at version {version.now}; expected version "
                f"{version.saved} instead."
            )
        with self._lock:
            return saved.tensor()


def _has_storage(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not is_zeros_without_memory(tensor)
        and not tensor.is_quantized
        and tensor.numel() > 0
    )


__all__ = ["Action", "SavedTensors"]
