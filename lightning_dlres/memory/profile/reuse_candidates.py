"""Search for modules that could reuse the memory of a storage that they save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import storage_reference
from lightning_dlres.memory.execute.reuse.formula_matching import is_relu, match_formula
from lightning_dlres.memory.execute.reuse.install import has_own_forward
from lightning_dlres.memory.profile.step_profile import Reuse, SavedStorageProfile

# Cost of saving the signs of an output: bytes to copy, as a multiple of the output's bytes. Saving
# reads the output once more.
_SIGNS_COPIES = 2.0


@dataclass(frozen=True)
class _Call:
    """Single call of a module with a formula; modules with several calls are no candidates.

    Attributes:
        is_relu: Whether it is a ReLU, which could save signs.
        reference: Reference to its input's storage; None: autocast converts the input to a new
            tensor.
        nbytes: Bytes of the input as it is saved.
        reusable_bytes: See `Formula.reusable_bytes`.
        extra_copies: See `Formula.extra_copies`.
    """

    is_relu: bool
    reference: Any
    nbytes: int
    reusable_bytes: int
    extra_copies: float


@dataclass(frozen=True)
class _Reader:
    """Module that saves a storage, and whether the storage is its input."""

    name: str
    is_input: bool


class ReuseCandidates:
    """Record of the modules that save each storage in a step. It searches for reuses."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}
        self._excluded: set[str] = set()
        self._readers: dict[int, list[_Reader]] = {}

    def enter(
        self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Record that a module's forward starts."""
        match = None if has_own_forward(module) else match_formula(module, args, kwargs)
        if match is None or name in self._calls:
            self._excluded.add(name)
            return
        self._calls[name] = _Call(
            is_relu=is_relu(module),
            reference=storage_reference(match.x) if match.nbytes == match.x.nbytes else None,
            nbytes=match.nbytes,
            reusable_bytes=match.reusable_bytes,
            extra_copies=match.formula.extra_copies if match.formula is not None else _SIGNS_COPIES,
        )

    def record(self, name: str, tensor: Tensor, number: int) -> None:
        """Record that a module saves a tensor over a storage."""
        call = self._calls.get(name)
        is_input = False
        if call is not None and call.reference is not None:
            is_input = bool(call.reference == storage_reference(tensor))
        elif call is not None:
            is_input = tensor.nbytes == call.nbytes
        self._readers.setdefault(number, []).append(_Reader(name, is_input))

    def reuses(self, storages: Sequence[SavedStorageProfile], rate: float) -> Iterator[Reuse]:
        """Yield the possible reuses.

        Args:
            storages: Storages of the step.
            rate: Bytes per second that the device copies within its memory.
        """
        for number, storage in enumerate(storages):
            readers = self._readers.get(number, [])
            # Each module that saved the storage must read it once in backward. Otherwise the order
            # of the readers is unknown.
            if not storage.uses or len(readers) != len(storage.uses):
                continue
            relu_name, other_readers = self._split_relu(readers)
            names: list[str] = []
            extra_copies, signs = 0.0, 0
            if relu_name is not None:
                names, extra_copies = [relu_name], _SIGNS_COPIES
                # One bit for each element, in whole bytes.
                signs = -(-storage.nbytes // _item_size(storage) // 8)
            if not other_readers:
                if storage.shared_until < storage.uses[0]:
                    yield Reuse(
                        layers=tuple(names),
                        storage=number,
                        overwritten_at=None,
                        signs=signs,
                        seconds=extra_copies / rate * storage.nbytes,
                    )
                continue
            # Backward runs in reverse order: the first module that saved the storage reads it
            # last. A ReLU that saves signs does not read it.
            last_use = storage.uses[len(other_readers) - 1]
            last_reader = self._usable(other_readers[0])
            if (
                last_reader is None
                or last_reader.is_relu
                or last_reader.nbytes != storage.nbytes
                or storage.shared_until > last_use
            ):
                continue
            if last_reader.reusable_bytes > signs:
                names.append(other_readers[0].name)
                extra_copies += last_reader.extra_copies
                yield Reuse(
                    layers=tuple(names),
                    storage=number,
                    overwritten_at=last_use,
                    nbytes=last_reader.reusable_bytes,
                    signs=signs,
                    seconds=extra_copies / rate * storage.nbytes,
                )

    def _split_relu(self, readers: list[_Reader]) -> tuple[str | None, list[_Reader]]:
        """Return the name of a ReLU that could save signs, or None, and the other readers.

        A ReLU saves its own output, so it is the first module that saves this storage.
        """
        call = self._usable(readers[0], needs_input=False)
        if call is None or not call.is_relu:
            return None, readers
        return readers[0].name, readers[1:]

    def _usable(self, reader: _Reader, needs_input: bool = True) -> _Call | None:
        """Return the single call of a reader that could reuse memory; None if it cannot."""
        if reader.name in self._excluded or (needs_input and not reader.is_input):
            return None
        return self._calls.get(reader.name)


def _item_size(storage: SavedStorageProfile) -> int:
    dtype: torch.dtype = getattr(torch, storage.dtype)
    return dtype.itemsize
