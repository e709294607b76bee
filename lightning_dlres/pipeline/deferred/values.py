"""Values of parameters and buffers that were made without memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from lightning_dlres.pipeline.deferred.tape import StorageView, Tape

# Attribute of a tensor on a tape. It lives as long as the tensor has no memory.
_ATTRIBUTE = "_dlres_deferred"


@dataclass(frozen=True)
class _Handle:
    """Place of a tensor's values.

    Attributes:
        tape: The tape.
        view: Tensor of the tape of which this one is a copy; None for one that is on the tape.
    """

    tape: Tape
    view: StorageView | None = None

    def __deepcopy__(self, memo: object) -> _Handle:
        return self


def put_on_tape(tensor: Tensor, tape: Tape) -> None:
    """Note that a tape has the values of a parameter or buffer."""
    tensor.__dict__[_ATTRIBUTE] = _Handle(tape)


def is_deferred(tensor: Tensor) -> bool:
    """Return True for a tensor without memory whose values are on a tape."""
    return _place(tensor) is not None


def has_deferred(module: nn.Module) -> bool:
    """Return True if some parameter or buffer of a module is deferred."""
    return any(is_deferred(tensor) for _, tensor in _tensors_of(module))


def deferred_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the values of deferred tensors, each with memory of its own.

    They are computed anew at each call.
    """
    by_tape: dict[int, tuple[Tape, list[int], list[StorageView]]] = {}
    for position, tensor in enumerate(tensors):
        place = _place(tensor)
        assert place is not None
        tape, view = place
        _, positions, views = by_tape.setdefault(id(tape), (tape, [], []))
        positions.append(position)
        views.append(view)
    values: dict[int, Tensor] = {}
    for tape, positions, views in by_tape.values():
        users = Counter(view.key for view in views)
        for position, view, value in zip(positions, views, tape.values(views), strict=True):
            is_whole = value.untyped_storage().nbytes() == value.nbytes
            values[position] = value if is_whole and users[view.key] == 1 else value.clone()
    return [values[position] for position in range(len(tensors))]


def stand_in_values(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return values of deferred tensors for runs that only measure or trace.

    Floating-point parameters of several dimensions get numbers of the usual size, the same at each
    call. They cost a copy, while the tape may take seconds. All other tensors get their values.
    """
    exact = iter(deferred_values([tensor for tensor in tensors if not _is_weight(tensor)]))
    return [_numbers(tensor) if _is_weight(tensor) else next(exact) for tensor in tensors]


def _is_weight(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.is_floating_point() and tensor.dim() > 1


@cache
def _pool() -> Tensor:
    """Return normal numbers, which are made without torch's default generator."""
    return torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))


def _numbers(tensor: Tensor) -> Tensor:
    """Return the pool's numbers in the shape of a tensor, as large as initial weights."""
    pool = _pool() * (tensor.shape[0] / max(tensor.numel(), 1)) ** 0.5
    copies = -(-tensor.numel() // pool.numel())
    numbers: Tensor = pool.to(tensor.dtype).repeat(copies)[: tensor.numel()]
    return numbers.view(tensor.shape)


def share_deferred(module: nn.Module, copy: nn.Module) -> None:
    """Let the tensors of a module's copy have the values of the module's deferred tensors."""
    copies = dict(_tensors_of(copy))
    for name, tensor in _tensors_of(module):
        place = _place(tensor)
        if place is not None:
            copies[name].__dict__[_ATTRIBUTE] = _Handle(*place)


def forget_deferred(*tensors: Tensor) -> None:
    """Let tensors forget their tapes, such as those that have got their values."""
    for tensor in tensors:
        tensor.__dict__.pop(_ATTRIBUTE, None)


def _place(tensor: Tensor) -> tuple[Tape, StorageView] | None:
    handle = tensor.__dict__.get(_ATTRIBUTE)
    if not isinstance(handle, _Handle) or not tensor.is_meta:
        return None
    if handle.view is not None:
        return handle.tape, handle.view
    return (handle.tape, StorageView.of(tensor)) if tensor in handle.tape else None


def _tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
