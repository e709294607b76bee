"""The computation of one stage: its layers forward and backward, one micro-batch at a time.

Layers run in *runs* of consecutive layers. Each run has an autograd graph of its own, which is cut
at the run's inputs. A recomputed layer is a run of its own. Each layer is a run of its own if
layers of the stage share a parameter, or if gradients are sent while earlier layers still run
backward. Otherwise a run is as long as possible, since every cut costs 0.1 to 0.2 ms for each
micro-batch.

A recomputed layer keeps only its inputs. Before its backward it runs again, with the random state
and the buffers of its first run, so that the gradients are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core.rng import derive_seed, forked, seed_device
from lightning_dlres.core.wire.tree import Structure, Tree, flatten, unflatten
from lightning_dlres.pipeline.stage.buffer_states import (
    BufferStates,
    buffers_replaced,
    snapshot_buffers,
)
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer

Layer = Callable[[Tree], Tree]
# Runs layers, given as their range in the whole model, on an input tree. It calls the function with
# the index of each layer before it runs.
Chain = Callable[[range, Tree, Callable[[int], None]], Tree]


@dataclass
class _RunRecord:
    """State of a run between its forward and its backward.

    Attributes:
        structure: Structure of the input tree.
        inputs: Tensors of the input tree; leaves of the run's graph.
        outputs: Output tensors with their graph; None until a recomputed layer has run again.
        buffers: Buffers as the first run saw them; empty if the layer is not recomputed.
    """

    structure: Structure
    inputs: list[Tensor]
    outputs: list[Tensor] | None
    buffers: BufferStates


class _Identity(torch.autograd.Function):
    """Identity function. Its outputs may be changed in place, which autograd refuses for leaves."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        # An unused output then gets None as its gradient, instead of a tensor of zeros.
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def inplace_safe_aliases(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return aliases of leaves. In-place operations may change an alias, but not a leaf.

    The aliases share the storage of the leaves, and gradients flow to the leaves.
    """
    safe: tuple[Tensor, ...] = _Identity.apply(*leaves)  # type: ignore[no-untyped-call]
    return safe


class Stage:
    """The layers of one stage.

    Args:
        layers: Layers as callables, in order.
        parameters: For each layer, its parameters that need a gradient.
        first_layer: Index of the first layer in the whole model. It is part of every layer's random
            seed, so that randomness does not depend on the split.
        device: Device of the stage.
        context: Factory of the context manager around every forward for training, such as
            autocast.
        recomputed: Modules of the recomputed layers, by position in this stage.
        by_layer: True makes every layer a run, so that `backward` calls `layer_done` after each.
        chain: Runs several layers at once; None runs them one after the other.
        between: Parameters that need a gradient and that code between any two layers may use.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        parameters: Sequence[Sequence[nn.Parameter]],
        *,
        first_layer: int,
        device: torch.device,
        context: Callable[[], AbstractContextManager[Any]],
        recomputed: Mapping[int, nn.Module] | None = None,
        by_layer: bool = False,
        chain: Chain | None = None,
        between: Sequence[nn.Parameter] = (),
    ) -> None:
        self._layers, self._chain = layers, chain
        self._first_layer = first_layer
        self.device = device
        self._context = context
        self._recomputed = dict(recomputed or {})
        self._by_layer = by_layer
        self.set_parameters(parameters, between)
        # By position of a layer in this stage: True if the layer changes its inputs in place, known
        # after its first run.
        self._changes_inputs: dict[int, bool] = {}
        # By position: the last snapshot of the layer's buffers.
        self._buffers: dict[int, BufferStates] = {}
        # By micro-batch in flight: one record per run, and the seed of its step.
        self._records: dict[int, list[_RunRecord]] = {}
        self._seeds: dict[int, int] = {}

    def set_parameters(
        self, parameters: Sequence[Sequence[nn.Parameter]], between: Sequence[nn.Parameter] = ()
    ) -> None:
        """Set the parameters that need a gradient.

        Args:
            parameters: Those of each layer.
            between: Those that code between any two layers may use.
        """
        self.parameters = list(dict.fromkeys(p for group in parameters for p in group))
        # With tied parameters every layer is a run. The gradients of a tied parameter are then
        # added in the same order for any choice of recomputed layers.
        has_tied = sum(len(set(group)) for group in parameters) > len(self.parameters)
        single = set(range(len(parameters)) if self._by_layer or has_tied else self._recomputed)
        self._runs = _runs(len(parameters), single)
        self._run_parameters = [
            list(dict.fromkeys((*(p for at in run for p in parameters[at]), *between)))
            for run in self._runs
        ]
        # By first position of a run: the result of `_has_known_leaves_only`.
        self._known_leaves_only: dict[int, bool] = {}

    @property
    def recomputes(self) -> bool:
        """True if some layer is recomputed."""
        return bool(self._recomputed)

    @property
    def in_flight(self) -> int:
        """Number of micro-batches between forward and backward."""
        return len(self._records)

    def forward(self, microbatch: int, inputs: Tree, seed: int, for_backward: bool = True) -> Tree:
        """Run the layers on one micro-batch and return the detached output.

        Args:
            microbatch: Index in the global batch; part of the random seed.
            inputs: Input tree; `requires_grad` of a tensor asks for its gradient.
            seed: Seed of the step.
            for_backward: False if no backward follows; nothing is recorded then.
        """
        records = []
        # The caller's autocast holds if nothing is recorded: all ranks make such a call together.
        with forked(self.device), self._context() if for_backward else nullcontext():
            for run in self._runs:
                if not for_backward:
                    inputs = self._run_layers(run, inputs, seed, microbatch)
                    continue
                recomputed = run.start in self._recomputed
                call = self._forward_inputs_only if recomputed else self._forward_recorded
                inputs, record = call(run, inputs, seed, microbatch)
                records.append(record)
        if for_backward:
            self._records[microbatch], self._seeds[microbatch] = records, seed
        return inputs

    def recompute(self, microbatch: int) -> None:
        """Run the recomputed layers again, to make their graphs; `backward` does it if needed."""
        seed = self._seeds[microbatch]
        with forked(self.device), self._context():
            for run, record in zip(self._runs, self._records[microbatch], strict=True):
                if record.outputs is None:
                    with buffers_replaced(record.buffers):
                        safe = _inplace_safe_tree(record.structure, record.inputs)
                        outputs = self._run_layers(run, safe, seed, microbatch)
                    _, record.outputs = flatten(outputs)

    def backward(
        self,
        microbatch: int,
        gradients: Sequence[Tensor | None],
        buffer: GradientBuffer,
        layer_done: Callable[[int], None] | None = None,
    ) -> list[Tensor | None]:
        """Run the layers backward and return the gradient of every input tensor.

        It is None for inputs that need no gradient, or to which none flows.

        Args:
            microbatch: Index that was given to `forward`.
            gradients: Gradient of every output tensor; None where no gradient flows back.
            buffer: Destination of the parameter gradients.
            layer_done: Called with the position in this stage of a run's first layer, as soon as
                the parameter gradients of this and all later layers are in the buffer.
        """
        if any(record.outputs is None for record in self._records[microbatch]):
            self.recompute(microbatch)
        records = self._records.pop(microbatch)
        del self._seeds[microbatch]
        for run, parameters in zip(
            reversed(self._runs), reversed(self._run_parameters), strict=True
        ):
            record = records.pop()
            if run.start not in self._known_leaves_only:
                self._known_leaves_only[run.start] = _has_known_leaves_only(record, parameters)
            gradients = _backward(
                record, gradients, parameters, buffer, self._known_leaves_only[run.start]
            )
            if layer_done is not None:
                layer_done(run.start)
        return list(gradients)

    def drop_records(self) -> None:
        """Drop the records of all forwards, after a failure."""
        self._records.clear()
        self._seeds.clear()

    def _run_layers(self, run: range, inputs: Tree, seed: int, microbatch: int) -> Tree:
        # Derive all seeds first. Between two layers it is slower, since the layer has pushed the
        # code for it out of the processor's caches.
        first = self._first_layer
        if self._chain is not None:
            indices = range(first + run.start, first + run.stop)

            def begin(layer: int) -> None:
                seed_device(derive_seed(seed, microbatch, layer), self.device)

            return self._chain(indices, inputs, begin)
        seeds = [derive_seed(seed, microbatch, first + position) for position in run]
        for position, layer_seed in zip(run, seeds, strict=True):
            seed_device(layer_seed, self.device)
            inputs = self._layers[position](inputs)
        return inputs

    def _forward_recorded(
        self, run: range, inputs: Tree, seed: int, microbatch: int
    ) -> tuple[Tree, _RunRecord]:
        """Return the detached output of a run, and a record with its graph."""
        structure, tensors = flatten(inputs)
        leaves = [_detached(tensor) for tensor in tensors]
        outputs = self._run_layers(run, _inplace_safe_tree(structure, leaves), seed, microbatch)
        out_structure, out_tensors = flatten(outputs)
        detached = unflatten(out_structure, [_detached(tensor) for tensor in out_tensors])
        return detached, _RunRecord(structure, leaves, out_tensors, [])

    def _forward_inputs_only(
        self, run: range, inputs: Tree, seed: int, microbatch: int
    ) -> tuple[Tree, _RunRecord]:
        """Return the detached output of a recomputed layer, and a record without its graph.

        Autograd records the run nevertheless, because only the graph shows which outputs need a
        gradient. The graph is freed on return.
        """
        position = run.start
        structure, tensors = flatten(inputs)
        leaves = [_detached(tensor) for tensor in tensors]
        arguments = leaves
        # A layer that works in place would overwrite the inputs of its second run. So run it
        # on copies. The very first run needs copies too, because it shows if the layer does so.
        if self._changes_inputs.get(position, True):
            arguments = [
                leaf.detach().clone().requires_grad_(leaf.requires_grad) for leaf in leaves
            ]
        buffers = snapshot_buffers(self._recomputed[position], self._buffers.get(position, []))
        self._buffers[position] = buffers
        outputs = self._run_layers(run, _inplace_safe_tree(structure, arguments), seed, microbatch)
        if position not in self._changes_inputs:
            self._changes_inputs[position] = not all(
                torch.equal(a, b) for a, b in zip(arguments, leaves, strict=True)
            )
        out_structure, out_tensors = flatten(outputs)
        detached = unflatten(out_structure, [_detached(tensor) for tensor in out_tensors])
        return detached, _RunRecord(structure, leaves, None, buffers)


def _runs(count: int, single: Collection[int]) -> list[range]:
    """Return the runs of `count` layers; each layer in `single` is a run of its own."""
    starts = [i for i in range(count) if i in single or i == 0 or i - 1 in single]
    return [range(a, b) for a, b in pairwise([*starts, count])]


def _detached(tensor: Tensor) -> Tensor:
    # `requires_grad` is kept: the next run or stage needs it to ask for a gradient.
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _inplace_safe_tree(structure: Structure, leaves: list[Tensor]) -> Tree:
    """Return the tree of the leaves, with those that need a gradient as `inplace_safe_aliases`."""
    with_gradient = [leaf for leaf in leaves if leaf.requires_grad]
    if not with_gradient:
        return unflatten(structure, leaves)
    safe = iter(inplace_safe_aliases(with_gradient))
    return unflatten(structure, [next(safe) if leaf.requires_grad else leaf for leaf in leaves])


def _backward(
    record: _RunRecord,
    gradients: Sequence[Tensor | None],
    parameters: Sequence[nn.Parameter],
    buffer: GradientBuffer,
    known_leaves_only: bool,
) -> list[Tensor | None]:
    """Run backward through one run's graph; see `Stage.backward`."""
    assert record.outputs is not None
    pairs = [
        (output, gradient)
        for output, gradient in zip(record.outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    input_leaves = [leaf for leaf in record.inputs if leaf.requires_grad]
    if not pairs or not (input_leaves or parameters):
        return [None] * len(record.inputs)
    outputs, output_gradients = zip(*pairs, strict=True)
    with buffer.as_grad(parameters):
        # `inputs` keeps autograd from accumulating gradients in leaves outside of the run. But
        # autograd then looks up every node, which costs time. So omit it without such leaves.
        inputs = None if known_leaves_only else [*input_leaves, *parameters]
        torch.autograd.backward(outputs, output_gradients, inputs=inputs)
    return [leaf.grad for leaf in record.inputs]


def _has_known_leaves_only(record: _RunRecord, parameters: Sequence[nn.Parameter]) -> bool:
    """Return True if the run's inputs and parameters are the only leaves of its graph."""
    assert record.outputs is not None
    known = {id(tensor) for tensor in (*record.inputs, *parameters)}
    pending: list[Any] = [output.grad_fn for output in record.outputs]
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # Nodes that accumulate a leaf's gradient have the leaf as `variable`.
        if hasattr(node, "variable") and id(node.variable) not in known:
            return False
        pending += [next_node for next_node, _ in node.next_functions]
    return True
