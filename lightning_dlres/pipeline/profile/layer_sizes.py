"""The sizes of a layer: what enters, leaves, is kept for backward, and is needed for a moment.

Whether a device has room for a layer is found without running it: under FakeTensor, which follows
shapes and dtypes through every operation, and makes no storage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import LiveBytes, storage_key, without_storage
from lightning_dlres.core.wire.tree import Tree, flatten, map_tensors, tensors_of, unflatten
from lightning_dlres.pipeline.stage.stage import enter_inplace_safe

Bind = Callable[[int, nn.Module], Callable[[Tree], Tree]]
Context = Callable[[], AbstractContextManager[Any]]


class Sizes(NamedTuple):
    """Bytes of one layer, under one micro-batch; see `LayerProfile`."""

    input_bytes: int
    output_bytes: int
    gradient_output_bytes: int
    saved_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class LayerCall:
    """A layer, and what it takes to call it.

    Attributes:
        module: the layer; on the CPU or the meta device.
        bind: makes a callable of a layer's index and its copy.
        index: the layer's.
        inputs: what it is called with.
        device: where it runs.
        context: entered around its forward (mixed precision).
    """

    module: nn.Module
    bind: Bind
    index: int
    inputs: Tree
    device: torch.device
    context: Context


class SavedTensorBytes:
    """What autograd keeps for the backward of a layer."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def recorded(self) -> AbstractContextManager[Any]:
        """Enter this around the forward."""

        def pack(tensor: Tensor) -> Tensor:
            self._bytes[storage_key(tensor)] = _storage_bytes(tensor)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def sizes(
        self, held: Sequence[Tensor], entered: Sequence[Tensor], left: Sequence[Tensor], moment: int
    ) -> Sizes:
        """Return the sizes of a layer.

        Args:
            held: its parameters and buffers.
            entered, left: its inputs and outputs.
            moment: bytes that its backward needs for a moment.
        """
        known = {storage_key(t) for t in (*held, *entered, *left)}
        return Sizes(
            _distinct_bytes(entered),
            _distinct_bytes(left),
            _distinct_bytes([t for t in left if t.requires_grad]),
            sum(size for key, size in self._bytes.items() if key not in known),
            moment,
        )


def sizes_without_storage(call: LayerCall) -> tuple[Callable[[], Tree], Sizes, int]:
    """Return what makes the output of a layer, as zeros on the device; its sizes; and the bytes
    that it takes to run it forward and backward, the gradients of a run before among them.

    Raises:
        Exception: of any kind, where the layer asks for values, which there are not.
    """
    device, saved, live = call.device, SavedTensorBytes(), LiveBytes()
    made: dict[int, Any] = {}
    with without_storage() as mode:
        for tensor in (*call.module.parameters(), *call.module.buffers()):
            made[id(tensor)] = _of_its_kind(tensor, _empty_like(tensor, device))
    # Outside: plain tensors that a layer holds are copied with their values.
    module_copy = copy.deepcopy(call.module, made).train()
    held = [*module_copy.parameters(), *module_copy.buffers()]
    with mode:
        weights = [p for p in module_copy.parameters() if p.requires_grad]
        given = map_tensors(
            lambda t: _empty_like(t, device).requires_grad_(t.requires_grad), call.inputs
        )
        structure, entered = flatten(given)
        wanted = [t for t in entered if t.requires_grad]
        with live:
            with saved.recorded(), call.context():
                safe = iter(enter_inplace_safe(wanted) if wanted else ())
                leaves = [next(safe) if t.requires_grad else t for t in entered]
                output = call.bind(call.index, module_copy)(unflatten(structure, leaves))
            kept, left = live.now, tensors_of(output)
            flowing = [(t, torch.ones_like(t)) for t in left if t.requires_grad]
            gradients: tuple[Tensor | None, ...] = ()
            if flowing and (wanted or weights):
                gradients = torch.autograd.grad(
                    [t for t, _ in flowing],
                    [*wanted, *weights],
                    [g for _, g in flowing],
                    allow_unused=True,
                )
        of_weights = bytes_of(g for g in gradients[len(wanted) :] if g is not None)
        sizes = saved.sizes(held, entered, left, max(live.peak - kept, of_weights))
        need = bytes_of(held) + sizes.input_bytes + live.peak + of_weights

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


def _distinct_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors, of which those in the same memory count once."""
    return sum({storage_key(t): bytes_of([t]) for t in tensors}.values())


def _storage_bytes(tensor: Tensor) -> int:
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
