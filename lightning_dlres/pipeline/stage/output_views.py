"""Outputs of a call that share memory with its inputs, or with each other.

A rank that gets the outputs of another one gets copies. Here they become views again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_dlres.core.wire.tree import Tree


def views_in(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> list[Tree]:
    """Return the outputs that are views of an input or of another output, for `with_views`.

    Args:
        inputs: Tensors among the inputs of the call.
        outputs: Tensors in its output.
    """
    views: list[Tree] = []
    # Positions of outputs that are views of nothing.
    roots: list[int] = []
    for position in sorted(range(len(outputs)), key=lambda index: _rank(outputs[index])):
        output = outputs[position]
        same = next((index for index, one in enumerate(inputs) if one is output), None)
        if same is not None:
            views.append([position, "input", same, None])
            continue
        candidates = [("input", index, one) for index, one in enumerate(inputs)]
        candidates += [("output", index, outputs[index]) for index in roots]
        source = next((c for c in candidates if _contains(c[2], output)), None)
        if source is None:
            roots.append(position)
            continue
        kind, index, base = source
        offset = output.storage_offset() - base.storage_offset()
        layout = [list(base.shape), list(base.stride()), list(output.shape)]
        views.append([position, kind, index, [*layout, list(output.stride()), offset]])
    return views


def with_views(
    views: Sequence[Tree], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[Tensor]:
    """Return the outputs, with views in the place of copies.

    A view of an input stays a copy if the input has another layout on this rank.

    Args:
        views: Result of `views_in` on the rank that made the call.
        inputs: Tensors among the inputs of the call on this rank, with the changes of the call.
        outputs: Tensors in its output.
    """
    result = list(outputs)
    for position, kind, index, layout in views:
        source = inputs[index] if kind == "input" else result[index]
        if layout is None:
            result[position] = source
            continue
        shape, stride, own_shape, own_stride, offset = layout
        if kind == "output" and list(source.stride()) != stride:
            # A tensor that has been sent has its elements in the order of its dimensions.
            laid_out = torch.empty_strided(shape, stride, dtype=source.dtype, device=source.device)
            source = result[index] = laid_out.copy_(source.detach())
        if (list(source.shape), list(source.stride())) == (shape, stride):
            result[position] = source.detach().as_strided(
                own_shape, own_stride, source.storage_offset() + offset
            )
    return result


def _contains(base: Tensor, view: Tensor) -> bool:
    """Return True if all elements of a tensor are elements of another one, in the same memory.

    The other one must have no gaps, since a rank that gets a copy of it has no values for these.
    """
    if any(t.layout is not torch.strided or t.is_neg() or t.is_conj() for t in (base, view)):
        return False
    is_same_memory = (
        view.numel() > 0
        and base.dtype == view.dtype
        and base.device == view.device
        and base.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    )
    if not is_same_memory or _length(base) != base.numel():
        return False
    offset = view.storage_offset() - base.storage_offset()
    return offset >= 0 and offset + _length(view) <= base.numel()


def _rank(tensor: Tensor) -> tuple[int, bool]:
    """Return a sort key by which a tensor without gaps comes before its views."""
    if tensor.layout is not torch.strided:
        return 0, False
    return -_length(tensor), _length(tensor) != tensor.numel()


def _length(tensor: Tensor) -> int:
    """Return the number of elements of memory from the first to the last one of a tensor."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps)
