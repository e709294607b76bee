"""Copies of the user's tensors and arrays, which one run of a step may write to."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from lightning_dlres.pipeline.stage.shared_memory import (
    copies_in_shared_memory,
)
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import same_tensors

# Largest tensor of a data set, in bytes, whose values are compared after each run.
_COMPARED_SETTING_BYTES = 64 << 10


class ValueCopy(NamedTuple):
    """A copy of a tensor or array.

    Attributes:
        copy: The copy. While this object exists, Python gives its id to no other object.
        original: The original.
        place: Place of the original; see "in place" in `attribute_changes`.
        version: Version counter of the copy when the run began; 0 for an array.
        original_version: The same of the original.
        compares_values: Whether values of a tensor are compared after the run, too.
        shares_memory: Whether the copy shares memory with another one.
    """

    copy: Any
    original: Any
    place: list[Any]
    version: int
    original_version: int
    compares_values: bool
    shares_memory: bool


class ValueCopies:
    """The copies that one run of the step has in place of tensors and arrays.

    A tensor or array that several objects refer to has one copy.

    Args:
        last: Copies of the run before, in the same step, which is over. Those that it has left
            alone serve this run, too.
        keeps_originals: True: the run has the originals themselves, to write to them. Copies are
            kept for comparison; they take the part of the originals here.

    Attributes:
        in_shared_memory: By the id of the original, the copies that share memory with another one,
            or that are both a buffer and another value.
    """

    def __init__(self, last: ValueCopies | None = None, *, keeps_originals: bool = False) -> None:
        self._keeps_originals = keeps_originals
        self._last = {} if last is None else last._reusable()
        self._by_original: dict[int, ValueCopy] = {}
        # By the id of the copy.
        self.copies: dict[int, ValueCopy] = {}
        # By the id of the copy: whether the run has written to it, as far as that was asked.
        self._is_written: dict[int, bool] = {}
        # By the id of the original: all that `prepare` got, and the copies that share memory.
        self._prepared: dict[int, Any] = {}
        self.in_shared_memory: dict[int, Any] = {}
        self._last_unshared = {} if last is None or last.in_shared_memory else last._prepared

    def prepare(self, originals: Collection[Any], buffers: Collection[Tensor]) -> None:
        """Look for originals that share memory, whose copies must do so, too; called before
        `copy_of`.

        Args:
            originals: All that `copy_of` will get.
            buffers: Tensors that the caller replaces, by `in_shared_memory` if they are there.
        """
        if self._keeps_originals:
            return
        self._prepared = {id(value): value for value in (*originals, *buffers)}
        if len(self._prepared) > 1 and self._prepared.keys() != self._last_unshared.keys():
            self.in_shared_memory = copies_in_shared_memory(self._prepared.values())
        ids = set(map(id, originals))
        for buffer in buffers:
            if id(buffer) in ids and id(buffer) not in self.in_shared_memory:
                self.in_shared_memory[id(buffer)] = _new_copy(buffer)

    def copy_of(self, original: Any, place: list[Any], is_setting: bool) -> Any:
        """Return the copy of a tensor or array, a new one if it has none.

        Args:
            original: The tensor or array.
            place: Its place; see `ValueCopy`.
            is_setting: Whether it belongs to a data set or another object of kind "settings". A
                large tensor of those is rarely written to, and its values are not compared.
        """
        known = self._by_original.get(id(original))
        if known is None:
            last = self._last.get(id(original))
            shared = self.in_shared_memory.get(id(original))
            if shared is not None:
                copy = shared
            else:
                copy = _new_copy(original) if last is None else last.copy
            compares_values = not is_setting or original.nbytes <= _COMPARED_SETTING_BYTES
            used, kept = (original, copy) if self._keeps_originals else (copy, original)
            known = ValueCopy(
                copy=used,
                original=kept,
                place=place,
                version=_version(used),
                original_version=_version(kept),
                compares_values=compares_values,
                shares_memory=shared is not None,
            )
            self._by_original[id(original)] = self.copies[id(known.copy)] = known
        return known.copy

    def is_written(self, value: Any) -> bool:
        """Return whether a value is a copy that the run has written to; asked after the run.

        A write of the same values counts, if it went through an operation on the tensor itself.
        Writes through `.data`, and through an array of the same memory, show in the values only.
        """
        known = self.copies.get(id(value))
        if known is None:
            return False
        if id(value) not in self._is_written:
            self._is_written[id(value)] = not _is_unchanged(known)
        return self._is_written[id(value)]

    def forget_writes(self) -> None:
        """Ask again which copies the run has written to, since it goes on."""
        self._is_written.clear()

    def _reusable(self) -> dict[int, ValueCopy]:
        """Return the copies that are as they were at the start of the run, by the id of their
        original. A copy that was not asked for may have changed."""
        return {
            id(known.original): known
            for key, known in self.copies.items()
            if self._is_written.get(key) is False and _may_serve_again(known)
        }


def _may_serve_again(known: ValueCopy) -> bool:
    """Return whether an unwritten copy still equals its original in all that user code can see."""
    copy, original = known.copy, known.original
    # Layers run between two runs of the step, and their hooks may write to the original.
    return (
        isinstance(copy, Tensor)
        and not known.shares_memory
        and not copy.requires_grad
        and not original.requires_grad
        and not vars(copy)
        and _version(original) == known.original_version
    )


def _new_copy(original: Any) -> Any:
    if isinstance(original, Tensor):
        return original.detach().clone().requires_grad_(original.requires_grad)
    return original.copy()


def _is_unchanged(known: ValueCopy) -> bool:
    copy, original = known.copy, known.original
    if isinstance(copy, Tensor):
        return _version(copy) == known.version and (
            not known.compares_values or same_tensors(copy.detach(), original.detach())
        )
    return bool(copy.shape == original.shape and copy.tobytes() == original.tobytes())


def _version(value: Any) -> int:
    return 0 if isinstance(value, np.ndarray) else int(value._version)
