"""The sizes of a layer: what enters, leaves, is kept for backward, and is needed for a moment.

Whether a device has room for a layer is found without running it: under FakeTensor, which follows
shapes and dtypes through every operation, and makes no storage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import LiveBytes, storage_key, without_storage
from lightning_dlres.core.tree import Tree, flatten, map_tensors, tensors_of, unflatten
from lightning_dlres.pipeline.stage import enter_inplace_safe

Bind = Callable[[int, nn.Module], Callable[[Tree], Tree]]
Context = Callable[[], AbstractContextManager[Any]]


class Sizes(NamedTuple):
    """Bytes of one layer, under one micro-batch; see `LayerProfile`."""

    input_bytes: int
    output_bytes: int
    gradient_output_bytes: int
    saved_bytes: int
    workspace_bytes: int


def sizes_without_storage(
    module: nn.Module,
    bind: Bind,
    index: int,
    inputs: Tree,
    device: torch.device,
    context: Context,
) -> tuple[Callable[[], Tree], Sizes, int]:
    """Return what makes the output of a layer, as zeros on the device; its sizes; and the bytes
    that it takes to run it forward and backward, the gradients of a run before among them.

    Args:
        module: the layer; on the CPU or the meta device.
        bind: makes a callable of a layer's index and its copy.
        index: the layer's.
        inputs: what it is called with.
        device: where it would run.
        context: entered around its forward (mixed precision).

    Raises:
        Exception: of any kind, where the layer asks for values, which there are not.
    """
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[storage_key(tensor)] = storage_bytes(tensor)
        return tensor

    made: dict[int, Any] = {}
    with without_storage() as mode:
        for tensor in (*module.parameters(), *module.buffers()):
            made[id(tensor)] = _of_its_kind(tensor, _empty_like(tensor, device))
    # Outside: plain tensors that a layer holds are copied with their values.
    replica = copy.deepcopy(module, made).train()
    with mode:
        weights = [p for p in replica.parameters() if p.requires_grad]
        given = map_tensors(
            lambda t: _empty_like(t, device).requires_grad_(t.requires_grad), inputs
        )
        structure, entered = flatten(given)
        wanted, live = [t for t in entered if t.requires_grad], LiveBytes()
        with live:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), context():
                safe = iter(enter_inplace_safe(wanted) if wanted else ())
                leaves = [next(safe) if t.requires_grad else t for t in entered]
                output = bind(index, replica)(unflatten(structure, leaves))
            kept, left = live.now, tensors_of(output)
            flowing = [(t, torch.ones_like(t)) for t in left if t.requires_grad]
            if flowing and (wanted or weights):
                gradients = torch.autograd.grad(
                    [t for t, _ in flowing],
                    [*wanted, *weights],
                    [g for _, g in flowing],
                    allow_unused=True,
                )
                of_weights = gradients[len(wanted) :]
            else:
                of_weights = ()
        held = [*replica.parameters(), *replica.buffers()]
        known = {storage_key(t) for t in (*held, *entered, *left)}
        sizes = Sizes(
            distinct_bytes(entered, storage_key),
            distinct_bytes(left, storage_key),
            distinct_bytes([t for t in left if t.requires_grad], storage_key),
            sum(size for key, size in saved.items() if key not in known),
            max(live.peak - kept, bytes_of(g for g in of_weights if g is not None)),
        )
        twice = bytes_of(g for g in of_weights if g is not None)
        need = bytes_of(held) + sizes.input_bytes + live.peak + twice

    def zeros() -> Tree:
        return map_tensors(
            lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device).requires_grad_(
                t.requires_grad
            ),
            output,
        )

    return zeros, sizes, need


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


def distinct_bytes(tensors: Sequence[Tensor], key: Callable[[Tensor], int]) -> int:
    """Return the bytes of tensors, of which those of one key count once."""
    return sum({key(t): bytes_of([t]) for t in tensors}.values())


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes of the memory that a tensor lies in."""
    strided = tensor.layout is torch.strided
    return tensor.untyped_storage().nbytes() if strided else bytes_of([tensor])


def _of_its_kind(tensor: Tensor, made: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, tensor.requires_grad) if is_parameter else made


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    # From its sizes: FakeTensor notes down every tensor that it is given, which then cannot be
    # swapped any more.
    if tensor.layout is torch.strided:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, device=device)
