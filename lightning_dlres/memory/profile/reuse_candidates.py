"""Which modules save which saved_storage, and which of them could do with less memory: the part of a
profile that reuse needs (Method A, A6)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import storage_reference
from lightning_dlres.memory.execute.reuse.install import has_own_forward
from lightning_dlres.memory.execute.reuse.kinds import fit_of, is_relu
from lightning_dlres.memory.profile.step_profile import Reuse, SavedStorageProfile

# A ReLU's output is read once more for its signs, and they are written.
_SIGNS_COPIES = 2.0


@dataclass(frozen=True)
class _Call:
    """A module that could, if it is called no second time.

    Attributes:
        reference: its input's memory; None: autocast makes another one of it.
        nbytes: of the input as it is saved.
        spare, copies: see `Formula`.
    """

    is_relu: bool
    reference: Any
    nbytes: int
    spare: int
    copies: float


@dataclass(frozen=True)
class _Reader:
    """Who saves a saved_storage, and whether it is its input."""

    name: str
    is_input: bool


class Readers:
    """Who saves what in one step."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}
        self._refused: set[str] = set()
        self._of: dict[int, list[_Reader]] = {}

    def enter(
        self, name: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Note that a module's forward begins."""
        fit = None if has_own_forward(module) else fit_of(module, args, kwargs)
        if fit is None or name in self._calls:
            self._refused.add(name)
            return
        self._calls[name] = _Call(
            is_relu=is_relu(module),
            reference=storage_reference(fit.x) if fit.nbytes == fit.x.nbytes else None,
            nbytes=fit.nbytes,
            spare=fit.spare,
            copies=fit.formula.copies if fit.formula is not None else _SIGNS_COPIES,
        )

    def note(self, name: str, tensor: Tensor, number: int) -> None:
        """Note that a module saves a tensor over a saved_storage."""
        call = self._calls.get(name)
        is_input = False
        if call is not None and call.reference is not None:
            is_input = bool(call.reference == storage_reference(tensor))
        elif call is not None:
            is_input = tensor.nbytes == call.nbytes
        self._of.setdefault(number, []).append(_Reader(name, is_input))

    def reuses(self, data: Sequence[SavedStorageProfile], rate: float) -> Iterator[Reuse]:
        """Yield what could be done.

        Args:
            data: of the step.
            rate: bytes a second that the device copies.
        """
        for number, saved_storage in enumerate(data):
            readers = self._of.get(number, [])
            if not saved_storage.uses or len(readers) != len(saved_storage.uses):
                continue
            relu, rest = self._relu(readers)
            names: list[str] = []
            copies, signs = 0.0, 0
            if relu is not None:
                names, copies = [relu], _SIGNS_COPIES
                signs = -(-saved_storage.nbytes // _item(saved_storage) // 8)
            if not rest:
                if saved_storage.gone < saved_storage.uses[0]:
                    yield _reuse(names, number, saved_storage, None, 0, signs, copies / rate)
                continue
            # Backward goes the other way: who saved first reads last.
            at = saved_storage.uses[len(rest) - 1]
            last = self._usable(rest[0])
            if (
                last is None
                or last.is_relu
                or last.nbytes != saved_storage.nbytes
                or saved_storage.gone > at
            ):
                continue
            if last.spare > signs:
                names.append(rest[0].name)
                copies += last.copies
                yield _reuse(names, number, saved_storage, at, last.spare, signs, copies / rate)

    def _relu(self, readers: list[_Reader]) -> tuple[str | None, list[_Reader]]:
        """Return the ReLU that could save signs, and who else reads."""
        call = self._usable(readers[0], needs_input=False)
        if call is None or not call.is_relu:
            return None, readers
        return readers[0].name, readers[1:]

    def _usable(self, reader: _Reader, needs_input: bool = True) -> _Call | None:
        if reader.name in self._refused or (needs_input and not reader.is_input):
            return None
        return self._calls.get(reader.name)


def _reuse(
    names: list[str],
    number: int,
    saved_storage: SavedStorageProfile,
    at: int | None,
    nbytes: int,
    signs: int,
    seconds: float,
) -> Reuse:
    return Reuse(
        layers=tuple(names),
        saved_storage=number,
        at=at,
        nbytes=nbytes,
        signs=signs,
        seconds=seconds * saved_storage.nbytes,
    )


def _item(saved_storage: SavedStorageProfile) -> int:
    dtype: torch.dtype = getattr(torch, saved_storage.dtype)
    return dtype.itemsize
