"""Notes of code that reads a parameter's data, or a parameter from its module.

Torch has no way to learn of these reads, so two of its attributes are patched during a step. Steps
of several mirrors may overlap in several threads. They share one patch, which ends with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

Note = Callable[[nn.Parameter], None]
Undo = Callable[[], None]

# Torch's descriptor behind the attribute `data` of a tensor; it has no other name.
_DATA: Any = Tensor.data


def data_of(parameter: nn.Parameter) -> Tensor:
    """Return `parameter.data`; inside `data_reads`, its function is not called for this read."""
    data: Tensor = _DATA.__get__(parameter)
    return data


class _Reads:
    """Functions that are called for reads of one kind, in all threads.

    Args:
        patch: Lets torch call a function for each read, and returns the function that undoes it.
    """

    def __init__(self, patch: Callable[[Note], Undo]) -> None:
        self._patch = patch
        self._undo: Undo | None = None
        # Replaced and never changed: another thread may walk through it.
        self._notes: tuple[Note, ...] = ()
        self._lock = Lock()

    @contextmanager
    def noted(self, note: Note) -> Iterator[None]:
        """Context manager that calls a function for each read."""
        with self._lock:
            if self._undo is None:
                self._undo = self._patch(self._call)
            self._notes = (*self._notes, note)
        try:
            yield
        finally:
            with self._lock:
                index = self._notes.index(note)
                self._notes = self._notes[:index] + self._notes[index + 1 :]
                if not self._notes:
                    self._undo()
                    self._undo = None

    def _call(self, parameter: nn.Parameter) -> None:
        for note in self._notes:
            note(parameter)


def _patch_data(note: Note) -> Undo:
    before = nn.Parameter.__dict__.get("data")

    def read(parameter: nn.Parameter) -> Tensor:
        if torch.compiler.is_compiling():
            # The compiler traces this function, and knows no descriptors.
            return parameter.detach()
        note(parameter)
        return data_of(parameter)

    def undo() -> None:
        if before is None:
            del nn.Parameter.data
        else:
            nn.Parameter.data = before

    nn.Parameter.data = property(read, _DATA.__set__)  # type: ignore[assignment]
    return undo


def _patch_modules(note: Note) -> Undo:
    find: Any = nn.Module.__getattr__

    def read(module: nn.Module, name: str) -> Any:
        value = find(module, name)
        if type(value) is nn.Parameter:
            note(value)
        return value

    def undo() -> None:
        nn.Module.__getattr__ = find  # type: ignore[method-assign]

    nn.Module.__getattr__ = read  # type: ignore[method-assign]
    return undo


_data_reads, _module_reads = _Reads(_patch_data), _Reads(_patch_modules)

# Context manager that calls a function with each parameter whose attribute `data` is read. The
# attribute is an alias without the parameter's version counter, so changes through it leave no
# trace. A mode for torch functions would see the reads, too, but modules such as
# `nn.MultiheadAttention` compute in another way under one.
data_reads = _data_reads.noted

# Context manager that calls a function with each parameter that is read from its module. Modules
# find their parameters in `__getattr__`, since they are no ordinary attributes.
parameter_reads = _module_reads.noted
