"""Sizes of a layer: bytes of inputs, outputs, saved tensors and temporary memory.

Sizes are taken from a run of the layer, or without running it, under FakeTensor. FakeTensor follows
shapes and dtypes through every operation, and allocates no storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import fake_tensor_mode, storage_key
from lightning_dlres.core.device.live_bytes import LiveBytes
from lightning_dlres.core.wire.tree import Tree, flatten, map_tensors, tensors_of, unflatten
from lightning_dlres.pipeline.stage.module_attributes import copies_of_results, copy_of_module
from lightning_dlres.pipeline.stage.stage import inplace_safe_aliases

# Takes a layer's index and its module or a copy of it; returns the layer. Layers of equal modules
# may differ in a `role`, an attribute of the returned callable.
Bind = Callable[[int, nn.Module], Callable[[Tree], Tree]]
Context = Callable[[], AbstractContextManager[Any]]


class Sizes(NamedTuple):
    """Bytes of one layer for one micro-batch; see `LayerProfile`."""

    input_bytes: int
    output_bytes: int
    gradient_output_bytes: int
    saved_bytes: int
    workspace_bytes: int


@dataclass(frozen=True)
class LayerCall:
    """A layer with the arguments of its call.

    Attributes:
        module: The layer, on the CPU or the meta device.
        bind: Returns the callable for a layer's index and a copy of its module.
        index: Index of the layer.
        inputs: Inputs of the call.
        device: Device on which a copy of the layer runs.
        context: Returns a context manager for the forward (mixed precision).
    """

    module: nn.Module
    bind: Bind
    index: int
    inputs: Tree
    device: torch.device
    context: Context


class SavedTensorBytes:
    """Bytes of the tensors that autograd saves for the backward of a layer."""

    def __init__(self) -> None:
        # Bytes of each storage by `storage_key`: tensors of one storage count once.
        self._bytes: dict[int, int] = {}
        self._unseen_bytes = 0

    def add_unseen(self, nbytes: int) -> None:
        """Add bytes of saved tensors that could not be recorded."""
        self._unseen_bytes += max(nbytes, 0)

    def recording(self) -> AbstractContextManager[Any]:
        """Context manager that records the tensors saved by the forward inside."""

        def pack(tensor: Tensor) -> Tensor:
            self._bytes[storage_key(tensor)] = _storage_bytes(tensor)
            return tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)

    def sizes(
        self,
        weights: Sequence[Tensor],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        workspace_bytes: int,
    ) -> Sizes:
        """Return the sizes of a layer.

        Args:
            weights: Parameters and buffers of the layer.
            inputs: Inputs of the layer.
            outputs: Outputs of the layer.
            workspace_bytes: Temporary memory of forward or backward beyond saved tensors.
        """
        counted_elsewhere = {storage_key(t) for t in (*weights, *inputs, *outputs)}
        return Sizes(
            _distinct_bytes(inputs),
            _distinct_bytes(outputs),
            _distinct_bytes([t for t in outputs if t.requires_grad]),
            self._unseen_bytes
            + sum(size for key, size in self._bytes.items() if key not in counted_elsewhere),
            workspace_bytes,
        )


def sizes_without_storage(call: LayerCall) -> tuple[Callable[[], Tree], Sizes, int]:
    """Find the sizes of a layer without running it.

    Returns:
        A function that makes an output of zeros on the device; the sizes; and the peak bytes of
        forward and backward while the gradients of a previous run are still held.

    Raises:
        Exception: Of any kind, if the layer reads values of tensors, which FakeTensor lacks.
    """
    device, saved, live = call.device, SavedTensorBytes(), LiveBytes()
    # Memo of `deepcopy`: it replaces the module's tensors, given by their id, with FakeTensors.
    fakes: dict[int, Any] = {**copies_of_results(call.module)}
    with fake_tensor_mode() as mode:
        for tensor in (*call.module.parameters(), *call.module.buffers()):
            fakes[id(tensor)] = _as_parameter_like(tensor, _empty_like(tensor, device))
    # Outside of the mode: tensors in plain attributes of a layer are copied with their values.
    module_copy = copy_of_module(call.module, fakes)
    weights = [*module_copy.parameters(), *module_copy.buffers()]
    with mode:
        trained = [p for p in module_copy.parameters() if p.requires_grad]
        fake_inputs = map_tensors(
            lambda t: _empty_like(t, device).requires_grad_(t.requires_grad), call.inputs
        )
        structure, inputs = flatten(fake_inputs)
        differentiable = [t for t in inputs if t.requires_grad]
        with live:
            with saved.recording(), call.context():
                safe = iter(inplace_safe_aliases(differentiable) if differentiable else ())
                leaves = [next(safe) if t.requires_grad else t for t in inputs]
                output = call.bind(call.index, module_copy)(unflatten(structure, leaves))
            live_after_forward, outputs = live.now, tensors_of(output)
            output_gradients = [(t, torch.ones_like(t)) for t in outputs if t.requires_grad]
            gradients: tuple[Tensor | None, ...] = ()
            if output_gradients and (differentiable or trained):
                gradients = torch.autograd.grad(
                    [t for t, _ in output_gradients],
                    [*differentiable, *trained],
                    [g for _, g in output_gradients],
                    allow_unused=True,
                )
        gradient_bytes = bytes_of(g for g in gradients[len(differentiable) :] if g is not None)
        # At least the gradients, for the reason given in `_Runner.sizes` of `layer_times`.
        workspace_bytes = max(live.peak - live_after_forward, gradient_bytes)
        sizes = saved.sizes(weights, inputs, outputs, workspace_bytes)
        needed_bytes = bytes_of(weights) + sizes.input_bytes + live.peak + gradient_bytes

    def zeros() -> Tree:
        return map_tensors(
            lambda t: torch.zeros(t.shape, dtype=t.dtype, device=device).requires_grad_(
                t.requires_grad
            ),
            output,
        )

    return zeros, sizes, needed_bytes


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all elements of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors)


def _distinct_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors; tensors of one storage count once."""
    return sum({storage_key(t): bytes_of([t]) for t in tensors}.values())


def _storage_bytes(tensor: Tensor) -> int:
    strided = tensor.layout is torch.strided
    return tensor.untyped_storage().nbytes() if strided else bytes_of([tensor])


def _as_parameter_like(tensor: Tensor, fake: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    # Made from the sizes alone: FakeTensor keeps a weak reference to every real tensor that it
    # sees, and `torch.utils.swap_tensors` refuses a tensor with such a reference.
    if tensor.layout is torch.strided:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return torch.empty(tensor.shape, dtype=tensor.dtype, layout=tensor.layout, device=device)
