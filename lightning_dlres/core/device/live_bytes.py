"""Count of the memory of tensors, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core._compat import DispatchMode, storage_key


class LiveBytes(DispatchMode):
    """Context manager that counts the bytes of live tensors that were created in it.

    torch counts the memory of accelerators, but not that of the CPU. The dispatch mode sees every
    operation, including those of backward.

    Attributes:
        now: Bytes that are live now.
        peak: Largest value of `now`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Inputs existed before and count as 0 bytes. They must be known first: a result may be a
        # view of an input. The argument `out` is both, and is passed by keyword.
        for tensor in _strided((*args, *(kwargs or {}).values())):
            self._count(tensor, 0)
        result = func(*args, **(kwargs or {}))
        for tensor in _strided((result,)):
            self._count(tensor, tensor.untyped_storage().nbytes())
        return result

    def _count(self, tensor: Tensor, size: int) -> None:
        key = storage_key(tensor)
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(tensor.untyped_storage(), self._subtract, key, size)

    def _subtract(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _strided(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _strided(value)
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            yield value
