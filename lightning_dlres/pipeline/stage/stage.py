"""One stage: its layers forward and backward, one micro-batch at a time.

Layers run in *runs* of consecutive ones, each with an autograd graph of its own that is cut at its
inputs. A run is one layer where something must happen between layers: its gradients are
synchronised while the layers below go backward, or it is recomputed. Otherwise it is as many layers
as there are, since every cut takes a tenth of a millisecond or two, for each micro-batch.

A layer that is recomputed (Method E, E8) keeps its inputs only. Before its backward it runs again,
with the random state and the buffers that it had, so that the gradients are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core.rng import derive_seed, forked, seed_device
from lightning_dlres.core.wire.tree import Structure, Tree, flatten, unflatten
from lightning_dlres.pipeline.stage.buffer_states import (
    BufferStates,
    snapshot_buffers,
    with_buffers,
)

Layer = Callable[[Tree], Tree]
Gradients = dict[nn.Parameter, Tensor]


@dataclass
class _Record:
    """What a run keeps between its forward and its backward: leaves in, outputs with their
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
    with another parameter."""

    def __init__(self) -> None:
        # By identity: a tensor's hash is a Python call, and this is done for every micro-batch.
        self._sums: dict[int, Tensor] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        self._ours: set[int] = set()
        self._new_memory: set[int] = set()

    @property
    def gradients(self) -> Gradients:
        """The sums."""
        return {self._parameters[key]: total for key, total in self._sums.items()}

    @contextmanager
    def lent(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside of it, the sums are the parameters' `.grad`, so that autograd adds to them as soon
        as it has a gradient, one at a time; what `.grad` was comes back afterwards."""
        before = [parameter.grad for parameter in parameters]
        sums = [self._sums.get(id(parameter)) for parameter in parameters]
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total
        try:
            yield
        finally:
            for parameter, total, gradient in zip(parameters, sums, before, strict=True):
                found = parameter.grad
                if found is not None and found is not total:
                    self.put(parameter, found)
                    self._ours.add(id(parameter))
                parameter.grad = gradient

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add to the parameter's sum."""
        total = self._sums.get(id(parameter))
        if total is None:
            self.put(parameter, gradient)
        elif id(parameter) in self._ours and not gradient.is_sparse:
            total.add_(gradient)
        else:
            sparse_first = total.is_sparse and not gradient.is_sparse
            self.put(parameter, gradient + total if sparse_first else total + gradient)
            self._ours.add(id(parameter))

    def put(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Make this tensor the parameter's sum."""
        self._sums[id(parameter)], self._parameters[id(parameter)] = total, parameter
        self._new_memory.add(memory_of(total))

    def pop(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter's sum, if there is one, and forget it."""
        self._ours.discard(id(parameter))
        return self._sums.pop(id(parameter), None)

    def take_new_memory(self) -> set[int]:
        """Return where the sums lie that have become other tensors since the last call."""
        new, self._new_memory = self._new_memory, set()
        return new


def memory_of(tensor: Tensor) -> int:
    """Return a number that tensors share which lie in the same memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


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
        by_layer: whether gradients are wanted layer by layer.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        parameters: Sequence[Sequence[nn.Parameter]],
        first_layer: int,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        recomputed: Mapping[int, nn.Module] | None = None,
        by_layer: bool = False,
    ) -> None:
        self._layers = layers
        self._first_layer = first_layer
        self._device = device
        self._context = context
        self._recomputed = dict(recomputed or {})
        self._by_layer = by_layer
        self.set_parameters(parameters)
        self._works_in_place: dict[int, bool] = {}
        self._buffers: dict[int, BufferStates] = {}
        self._records: dict[int, list[_Record]] = {}
        self._seeds: dict[int, int] = {}

    def set_parameters(self, parameters: Sequence[Sequence[nn.Parameter]]) -> None:
        """Say which parameters of every layer need a gradient."""
        self.parameters = list(dict.fromkeys(p for some in parameters for p in some))
        # A tied parameter's gradients are added in one order, whatever is recomputed.
        tied = sum(len(set(some)) for some in parameters) > len(self.parameters)
        cut = set(range(len(parameters)) if self._by_layer or tied else self._recomputed)
        self._runs = _runs(len(parameters), cut)
        self._run_parameters = [
            list(dict.fromkeys(p for position in run for p in parameters[position]))
            for run in self._runs
        ]
        self._closed: dict[int, bool] = {}

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
            for run in self._runs:
                if not keep:
                    inputs = self._through(run, inputs, seed, microbatch)
                    continue
                light = run.start in self._recomputed
                call = self._call_lightly if light else self._call
                inputs, record = call(run, inputs, seed, microbatch)
                records.append(record)
        if keep:
            self._records[microbatch], self._seeds[microbatch] = records, seed
        return inputs

    def recompute(self, microbatch: int) -> None:
        """Run the layers again that kept their inputs only."""
        seed = self._seeds[microbatch]
        with forked(self._device), self._context():
            for run, record in zip(self._runs, self._records[microbatch], strict=True):
                if record.outputs is None:
                    with with_buffers(record.buffers):
                        entered = _entered(record.structure, record.inputs)
                        outputs = self._through(run, entered, seed, microbatch)
                    _, record.outputs = flatten(outputs)

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
            layer_done: called with a layer's position in this stage when its parameter gradients,
                and those of the layers above, are in the buffer.
        """
        if any(record.outputs is None for record in self._records[microbatch]):
            self.recompute(microbatch)
        records = self._records.pop(microbatch)
        del self._seeds[microbatch]
        for run, parameters in zip(
            reversed(self._runs), reversed(self._run_parameters), strict=True
        ):
            record = records.pop()
            if run.start not in self._closed:
                self._closed[run.start] = _is_closed(record, parameters)
            gradients = _backward(record, gradients, parameters, buffer, self._closed[run.start])
            if layer_done is not None:
                layer_done(run.start)
        return list(gradients)

    def forget(self) -> None:
        """Drop what forwards recorded, after a failure."""
        self._records.clear()
        self._seeds.clear()

    def _through(self, run: range, inputs: Tree, seed: int, microbatch: int) -> Tree:
        # All at once: what is called between two layers is no longer in the processor's caches.
        first = self._first_layer
        seeds = [derive_seed(seed, microbatch, first + position) for position in run]
        for position, own_seed in zip(run, seeds, strict=True):
            seed_device(own_seed, self._device)
            inputs = self._layers[position](inputs)
        return inputs

    def _call(self, run: range, inputs: Tree, seed: int, microbatch: int) -> tuple[Tree, _Record]:
        structure, tensors = flatten(inputs)
        leaves = [_leaf(tensor) for tensor in tensors]
        outputs = self._through(run, _entered(structure, leaves), seed, microbatch)
        out_structure, out_tensors = flatten(outputs)
        passed = unflatten(out_structure, [_passed(tensor) for tensor in out_tensors])
        return passed, _Record(structure, leaves, out_tensors, [])

    def _call_lightly(
        self, run: range, inputs: Tree, seed: int, microbatch: int
    ) -> tuple[Tree, _Record]:
        """Call a layer, and keep what it takes to call it again. The graph is made nevertheless,
        since it tells which outputs need a gradient, and given up at once."""
        position = run.start
        structure, tensors = flatten(inputs)
        leaves = [_leaf(tensor) for tensor in tensors]
        given = leaves
        if self._works_in_place.get(position, True):
            given = [leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves]
        buffers = snapshot_buffers(self._recomputed[position], self._buffers.get(position, []))
        self._buffers[position] = buffers
        outputs = self._through(run, _entered(structure, given), seed, microbatch)
        if position not in self._works_in_place:
            self._works_in_place[position] = not all(
                torch.equal(a, b) for a, b in zip(given, leaves, strict=True)
            )
        out_structure, out_tensors = flatten(outputs)
        passed = unflatten(out_structure, [_passed(tensor) for tensor in out_tensors])
        return passed, _Record(structure, leaves, None, buffers)


def _runs(count: int, cut: Collection[int]) -> list[range]:
    """Return the runs of so many layers, of which some stand alone."""
    starts = [i for i in range(count) if i in cut or i == 0 or i - 1 in cut]
    return [range(a, b) for a, b in pairwise([*starts, count])]


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
    closed: bool,
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
    with buffer.lent(parameters):
        # Naming the inputs makes autograd look up every node of the graph.
        inputs = None if closed else [*wanted, *parameters]
        torch.autograd.backward(outputs, grads, inputs=inputs)
    return [leaf.grad for leaf in record.inputs]


def _is_closed(record: _Record, parameters: Sequence[nn.Parameter]) -> bool:
    """Return whether gradients can flow nowhere but to the run's inputs and parameters: then
    autograd need not be told to go nowhere else."""
    assert record.outputs is not None
    known = {id(tensor) for tensor in (*record.inputs, *parameters)}
    waiting: list[Any] = [output.grad_fn for output in record.outputs]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and id(node.variable) not in known:
            return False
        waiting += [above for above, _ in node.next_functions]
    return True
