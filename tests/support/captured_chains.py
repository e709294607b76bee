"""Captured modules that run layer by layer, compared with the modules themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_dlres.core.wire.tree import Tree, flatten, tensors_of, unflatten
from lightning_dlres.pipeline.capture.block_calls import calls_replaced, original_call
from lightning_dlres.pipeline.capture.captured import CapturedModule
from lightning_dlres.pipeline.capture.tracing.agreement import SeededGlue

Result = tuple[list[Tensor], list[Tensor | None]]


def seed(layer: int) -> None:
    torch.manual_seed(100 + layer)


def plain_result(captured: CapturedModule, inputs: Tree) -> Result:
    """Return the output of the module itself, and the gradients of all parameters.

    Random numbers are seeded where the layers are.
    """

    num_calls = [0] * len(captured.blocks)

    def call(layer: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        number = layer + num_calls[layer] * len(captured.blocks)
        num_calls[layer] += 1
        if number > 0:
            seed(number)
        return original_call(block, args, kwargs)

    args, kwargs = _copied(inputs)
    seed(0)
    blocks = dict(enumerate(captured.blocks))
    with SeededGlue(captured.trace, seed) as glue, calls_replaced(blocks, glue.paused(call)):
        output = tensors_of(captured.module(*args, **kwargs))
    parameters = list(captured.module.parameters())
    return _detached(output), _gradients(output, [_gradient(t) for t in output], parameters)


def chain_result(captured: CapturedModule, inputs: Tree, cuts: list[int]) -> Result:
    """Return the same of runs of layers that begin at `cuts`, each with a graph of its own."""
    count = len(captured.blocks)
    starts = sorted({0, *cuts})
    in_blocks = {p for block in captured.blocks for p in block.parameters()}
    between = set(captured.module.parameters()) - in_blocks
    runs = [range(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True)]
    graphs: list[tuple[list[Tensor], list[Tensor], set[nn.Parameter]]] = []
    crossing = _copied(inputs)
    for run in [*runs, None]:
        structure, tensors = flatten(crossing)
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        safe = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
        arguments = unflatten(structure, safe)
        crossing = (
            captured.output(arguments)
            if run is None
            else captured.run(run, arguments, before_layer=seed)
        )
        layers = run or range(count - 1, count)
        own = {p for layer in layers for p in captured.blocks[layer].parameters()}
        graphs.append((leaves, tensors_of(crossing), own | between))
    output = tensors_of(crossing)
    parameters = list(captured.module.parameters())
    totals: list[Tensor | None] = [None] * len(parameters)
    gradients = [_gradient(t) for t in output]
    for leaves, results, own in reversed(graphs):
        found = _gradients(results, gradients, [*leaves, *parameters])
        # Stages ask for the gradients of their own parameters, and of those between layers.
        found[len(leaves) :] = [
            gradient if parameter in own else None
            for gradient, parameter in zip(found[len(leaves) :], parameters, strict=True)
        ]
        gradients = found[: len(leaves)]
        for index, gradient in enumerate(found[len(leaves) :]):
            total = totals[index]
            if gradient is not None:
                totals[index] = gradient if total is None else total + gradient
    return _detached(output), totals


def assert_alike(ours: Result, theirs: Result) -> None:
    """Outputs are equal; gradients are up to the order of sums."""
    assert len(ours[0]) == len(theirs[0])
    assert all(map(torch.equal, ours[0], theirs[0]))
    for mine, reference in zip(ours[1], theirs[1], strict=True):
        assert (mine is None) == (reference is None)
        if mine is not None:
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-6)


def _copied(inputs: Tree) -> Tree:
    structure, tensors = flatten(inputs)
    return unflatten(structure, [tensor.clone() for tensor in tensors])


def _detached(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _gradient(output: Tensor) -> Tensor | None:
    """Return a gradient that depends on the values of an output."""
    return output.detach().cos() if output.requires_grad else None


def _gradients(
    outputs: list[Tensor], gradients: list[Tensor | None], inputs: list[Tensor]
) -> list[Tensor | None]:
    pairs = [
        (o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None
    ]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not pairs or not wanted:
        return [None] * len(inputs)
    found = iter(
        torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True)
    )
    return [next(found) if tensor.requires_grad else None for tensor in inputs]
