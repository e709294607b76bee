"""One stage: its layers forward and backward, one micro-batch at a time.

Every layer gets an autograd graph of its own, cut at the layer's inputs. So backward walks the
layers one by one, the gradients of a layer are final (and can be synchronised) before the layer
below has started, and a layer is the unit of whatever is decided later: profile, recomputation,
offload.

A layer that is recomputed (Method E, E8) keeps its inputs only. Before its backward it runs again,
with the random state and the buffers that it had, so that the gradients are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core.rng import derive_seed, forked, seed_device
from lightning_dlres.core.tree import Structure, Tree, flatten, unflatten
from lightning_dlres.pipeline.checkpoint import BufferStates, snapshot_buffers, with_buffers

Layer = Callable[[Tree], Tree]
Gradients = dict[nn.Parameter, Tensor]


@dataclass
class _Record:
    """What one layer keeps between its forward and its backward: leaves in, outputs with their
    graph. Without outputs it must be recomputed first."""

    structure: Structure
    inputs: list[Tensor]
    outputs: list[Tensor] | None
    buffers: BufferStates


class _Enter(torch.autograd.Function):
    """The identity. A layer that works in place may not touch a leaf, but it may touch this
    function's outputs."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # An output that is not used has no gradient, not one of zeros.
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def enter_inplace_safe(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tensors of the same storage that an in-place operation may change, with gradients
    flowing to the leaves."""
    entered: tuple[Tensor, ...] = _Enter.apply(*leaves)  # type: ignore[no-untyped-call]
    return entered


class GradientBuffer:
    """Sums gradients over micro-batches, and never writes into a tensor that autograd may share
    with another parameter.

    Args:
        once: whether every parameter gets one gradient only, which then needs no copy. A copy at
            the start keeps at most two tensors of a parameter's size alive at a time; adding into a
            new tensor would keep three.
    """

    def __init__(self, once: bool = False) -> None:
        self.gradients: Gradients = {}
        self._once = once
        self._ours: set[nn.Parameter] = set()

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to the parameter's sum."""
        total = self.gradients.get(parameter)
        if total is None:
            copied = not self._once and not gradient.is_sparse
            self.gradients[parameter] = gradient.clone() if copied else gradient
            if copied:
                self._ours.add(parameter)
        elif parameter in self._ours and not gradient.is_sparse:
            total.add_(gradient)
        else:
            sparse_first = total.is_sparse and not gradient.is_sparse
            self.gradients[parameter] = gradient + total if sparse_first else total + gradient
            self._ours.add(parameter)


class Stage:
    """The layers of one stage.

    Args:
        layers: the callables, in order.
        parameters: for every layer its parameters that need a gradient.
        first_layer: index of the first layer in the whole model; part of every layer's random seed,
            so that randomness does not depend on the split.
        device: where the stage computes.
        context: entered around every forward (mixed precision).
        recomputed: the layers' modules that are recomputed, by position in this stage.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        parameters: Sequence[Sequence[nn.Parameter]],
        first_layer: int,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        recomputed: Mapping[int, nn.Module] | None = None,
    ) -> None:
        self._layers = layers
        self.set_parameters(parameters)
        self._first_layer = first_layer
        self._device = device
        self._context = context
        self._recomputed = dict(recomputed or {})
        self._works_in_place: dict[int, bool] = {}
        self._buffers: dict[int, BufferStates] = {}
        self._records: dict[int, list[_Record]] = {}
        self._seeds: dict[int, int] = {}

    def set_parameters(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        """Say which parameters of every layer need a gradient."""
        self.parameters = list(dict.fromkeys(p for some in parameters for p in some))
        self._parameters = parameters

    @property
    def recomputes(self) -> bool:
        """Whether some layer is recomputed."""
        return bool(self._recomputed)

    @property
    def in_flight(self) -> int:
        """Number of micro-batches whose forward is done and whose backward is not."""
        return len(self._records)

    def forward(self, microbatch: int, inputs: Tree, seed: int, keep: bool = True) -> Tree:
        """Run the layers on one micro-batch and return the detached output.

        Args:
            microbatch: index in the global batch; part of the random seed.
            inputs: tensors whose `requires_grad` says whether a gradient is wanted back for them.
            seed: seed of the step.
            keep: whether a backward follows; without it nothing is recorded.
        """
        records = []
        with forked(self._device), self._context():
            for position, layer in enumerate(self._layers):
                self._seed(seed, microbatch, position)
                if keep:
                    call = self._call_lightly if position in self._recomputed else self._call
                    inputs, record = call(position, inputs)
                    records.append(record)
                else:
                    inputs = layer(inputs)
        if keep:
            self._records[microbatch], self._seeds[microbatch] = records, seed
        return inputs

    def recompute(self, microbatch: int) -> None:
        """Run the layers again that kept their inputs only."""
        seed = self._seeds[microbatch]
        with forked(self._device), self._context():
            for position, record in enumerate(self._records[microbatch]):
                if record.outputs is None:
                    self._seed(seed, microbatch, position)
                    self._run_again(position, record)

    def backward(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        buffer: GradientBuffer,
        layer_done: Callable[[int], None] | None = None,
    ) -> list[Tensor | None]:
        """Run the layers backward and return the gradient of every input tensor (None where none is
        wanted).

        Args:
            microbatch: the index given to `forward`.
            gradients: one per output tensor; None where nothing flows back.
            buffer: gets the parameter gradients.
            layer_done: called with the layer's position in this stage when its parameter gradients
                are in the buffer.
        """
        if any(record.outputs is None for record in self._records[microbatch]):
            self.recompute(microbatch)
        records = self._records.pop(microbatch)
        del self._seeds[microbatch]
        for position in reversed(range(len(records))):
            gradients = _backward(records.pop(), gradients, self._parameters[position], buffer)
            if layer_done is not None:
                layer_done(position)
        return list(gradients)

    def forget(self) -> None:
        """Drop what forwards recorded, after a failure."""
        self._records.clear()
        self._seeds.clear()

    def _seed(self, seed: int, microbatch: int, position: int) -> None:
        seed_device(derive_seed(seed, microbatch, self._first_layer + position), self._device)

    def _call(self, position: int, inputs: Tree) -> tuple[Tree, _Record]:
        structure, tensors = flatten(inputs)
        leaves = [_leaf(tensor) for tensor in tensors]
        outputs = self._layers[position](_entered(structure, leaves))
        out_structure, out_tensors = flatten(outputs)
        passed = unflatten(out_structure, [_passed(tensor) for tensor in out_tensors])
        return passed, _Record(structure, leaves, out_tensors, [])

    def _call_lightly(self, position: int, inputs: Tree) -> tuple[Tree, _Record]:
        """Call a layer, and keep what it takes to call it again. The graph is made nevertheless,
        since it tells which outputs need a gradient, and given up at once."""
        structure, tensors = flatten(inputs)
        leaves = [_leaf(tensor) for tensor in tensors]
        given = leaves
        if self._works_in_place.get(position, True):
            given = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        buffers = snapshot_buffers(self._recomputed[position], self._buffers.get(position, []))
        self._buffers[position] = buffers
        outputs = self._layers[position](_entered(structure, given))
        if position not in self._works_in_place:
            self._works_in_place[position] = not all(
                torch.equal(a, b) for a, b in zip(given, leaves, strict=True)
            )
        out_structure, out_tensors = flatten(outputs)
        passed = unflatten(out_structure, [_passed(tensor) for tensor in out_tensors])
        return passed, _Record(structure, leaves, None, buffers)

    def _run_again(self, position: int, record: _Record) -> None:
        with with_buffers(record.buffers):
            outputs = self._layers[position](_entered(record.structure, record.inputs))
        _, record.outputs = flatten(outputs)


def _passed(tensor: Tensor) -> Tensor:
    # Detached here, but still saying whether a gradient is wanted: the next layer, or the next
    # stage, makes its leaves so.
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _entered(structure: Structure, leaves: list[Tensor]) -> Tree:
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not wanted:
        return unflatten(structure, leaves)
    entered = iter(enter_inplace_safe(wanted))
    return unflatten(structure, [next(entered) if leaf.requires_grad else leaf for leaf in leaves])


def _backward(
    record: _Record,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[nn.Parameter],
    buffer: GradientBuffer,
) -> list[Tensor | None]:
    assert record.outputs is not None
    flowing = [
        (o, g)
        for o, g in zip(record.outputs, gradients, strict=True)
        if g is not None and o.requires_grad
    ]
    wanted = [leaf for leaf in record.inputs if leaf.requires_grad]
    if not flowing or not (wanted or parameters):
        return [None] * len(record.inputs)
    outputs, grads = zip(*flowing, strict=True)
    results = torch.autograd.grad(outputs, [*wanted, *parameters], grads, allow_unused=True)
    for parameter, gradient in zip(parameters, results[len(wanted) :], strict=True):
        if gradient is not None:
            buffer.add(parameter, gradient)
    found = iter(results[: len(wanted)])
    return [next(found) if leaf.requires_grad else None for leaf in record.inputs]
