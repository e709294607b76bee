"""Check that the layers of a captured module give what the module gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree, map_tensors, tensors_of
from lightning_dlres.pipeline.capture.block_calls import (
    calls_replaced,
    original_call,
    with_values,
    without_graph,
    without_graphs,
)
from lightning_dlres.pipeline.capture.crossing import without_objects
from lightning_dlres.pipeline.capture.modes import Mode, parameters_restored, seed_layer, trial
from lightning_dlres.pipeline.capture.operations import is_metadata, operation_name
from lightning_dlres.pipeline.capture.trace import Trace, seed_number
from lightning_dlres.pipeline.deferred.values import has_deferred
from lightning_dlres.pipeline.stage.closeness import equal_up_to_rounding

if TYPE_CHECKING:
    from lightning_dlres.pipeline.capture.captured import CapturedModule

# Relative difference of two outputs that counts as rounding.
_TOLERANCE = 1e-3


def check_agreement(
    captured: CapturedModule, inputs: Tree, mode: Mode, device: torch.device
) -> None:
    """Run the module, and then its layers one by one.

    Args:
        captured: The module.
        inputs: (args, kwargs) of a call of it.
        mode: Mode in which it runs.
        device: Device on which it runs.

    Raises:
        UnsupportedStepError: Unless the layers give the output of the module.
    """
    with trial(captured.module, mode, device):
        expected = _output(captured, inputs)
    with trial(captured.module, mode, device):
        _check(captured, inputs, expected)


def _output(captured: CapturedModule, inputs: Tree) -> Tree:
    """Return the output of the module's own code, with the random numbers of `_check`."""
    is_step, count = captured.is_step, len(captured.blocks)

    num_calls = [0] * count

    def call(layer: int, block: nn.Module, args: Any, kwargs: Any) -> Any:
        number = layer + num_calls[layer] * count
        num_calls[layer] += 1
        if number > 0 or is_step:
            seed_layer(number)
        target = with_values(block, (args, kwargs))
        output = original_call(target, args, kwargs)
        if is_step and number == captured.trace.order[-1]:
            seed_layer(count)
        return output if target is block else without_graphs(output, args, kwargs)

    args, kwargs = map_tensors(Tensor.clone, inputs)
    seed_layer(-1 if is_step else 0)
    with (
        captured.opened() as code,
        SeededGlue(captured.trace) as glue,
        calls_replaced(dict(enumerate(captured.blocks)), glue.paused(call)),
    ):
        return code(*args, **kwargs)


class SeededGlue(TorchFunctionMode):
    """Mode that seeds random operations between blocks where the run of layers does.

    Args:
        trace: Trace of the run.
        seed: Called with the `seed_number` of an operation.
    """

    def __init__(self, trace: Trace, seed: Callable[[int], None] = seed_layer) -> None:
        super().__init__()
        self._trace, self._seed = trace, seed
        self._index, self._is_inside = 0, False

    def paused(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call of a block whose operations are not counted."""

        def inside(*args: Any) -> Any:
            self._is_inside = True
            try:
                return call(*args)
            finally:
                self._is_inside = False

        return inside

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (self._is_inside or is_metadata(operation_name(function), args, kwargs)):
            index, self._index = self._index, self._index + 1
            if index < len(self._trace.glue) and self._trace.is_seeded(index):
                self._seed(seed_number(index))
        return function(*args, **kwargs)


def _check(captured: CapturedModule, inputs: Tree, expected: Tree) -> None:
    """Run the layers one by one; raise unless they give the output of the module."""
    crossing, step = map_tensors(Tensor.clone, inputs), captured.step
    if step is not None:
        # The step runs its beginning once more for its end.
        with parameters_restored(captured.module):
            crossing = captured.begin(step, crossing, seed_layer)
    for layer in range(len(captured.blocks)):
        # As between stages; code may ask for a tensor's graph, or if it is a leaf.
        crossing = map_tensors(without_graph, crossing)
        block = captured.blocks[layer]
        copies = {layer: with_values(block, crossing)} if has_deferred(block) else {}
        layers = range(layer, layer + 1)
        crossing = captured.run(layers, crossing, before_layer=seed_layer, copies=copies)
    crossing = map_tensors(without_graph, crossing)
    if step is None:
        output = captured.output(crossing)
    else:
        seed_layer(-1)
        arguments = map_tensors(Tensor.clone, inputs)
        output = captured.finish(step, crossing, arguments, seed_layer)
    ours, theirs = tensors_of(output), tensors_of(without_objects(expected))
    if len(ours) != len(theirs) or not all(map(_is_close, ours, theirs)):
        place = "training_step" if step is not None else "forward"
        raise UnsupportedStepError(
            f"The {place} of {type(captured.module).__name__} must give the same output if its "
            "submodules run on different ranks, got another output. Its submodules must pass "
            "tensors to each other only by their arguments and results."
        )


def _is_close(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if two tensors are equal up to rounding.

    torch has other kernels for whole transformers in evaluation than for their layers.
    """
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if not theirs.is_floating_point() or not theirs.numel():
        return torch.equal(ours, theirs)
    return equal_up_to_rounding(ours, theirs, _TOLERANCE)
