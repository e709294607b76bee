"""The step must not compute with the weights of the layers, which are the pipeline's.

Those of another stage have no values here (`pipeline.stage.remote_parameters` guards them outside
of the step, too). A gradient of those that are here would be lost: the schedule delivers what came
through the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import tensors_of
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors, layer_tensor_error

# What asks for the shape of things, and not for values.
HARMLESS = {
    *("__get__", "__set__", "__hash__", "__repr__", "__format__", "size", "dim", "ndimension"),
    *("numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"),
    *("get_device", "register_hook", "requires_grad_", "is_contiguous"),
}


class PipelinedWeightGuard(TorchFunctionMode):
    """While active, an operation on a tensor without storage is an error, and so is one on a tensor
    that layers made past the module's output, and a gradient through the layers.

    Args:
        made: such tensors; None: none are known.

    Raises:
        UnsupportedStepError: the operation, and what to do.
    """

    def __init__(self, made: LayerTensors | None = None) -> None:
        super().__init__()
        self.made = made if made is not None else LayerTensors()
        self._call: tuple[Sequence[Tensor], Sequence[Tensor]] = ((), ())

    def called(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Remember what the pipelined module was called with, and what it returned."""
        self._call = (inputs, outputs)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "?")
        if name not in HARMLESS and (_has_meta(args) or _has_meta(kwargs.values())):
            raise weight_of_a_layer(f"in {name}")
        if self.made and name not in HARMLESS:
            layer = self.made.layer_within((*args, *kwargs.values()))
            if layer is not None:
                raise layer_tensor_error(layer, f"in {name}")
        if function is torch.autograd.grad:
            inputs, outputs = self._call
            of, by = (tensors_of(list(given)) for given in args[:2])
            if _depends(inputs, by) and _depends(of, outputs):
                raise _gradient_through_layers()
        return function(*args, **kwargs)


class LayerTensorGuard(PipelinedWeightGuard):
    """A guard for a step whose layers run within it: it sees what they make, and refuses an
    operation of the step on it.

    Attributes:
        refusal: the first refusal. User code may have caught it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusal: UnsupportedStepError | None = None
        self._layer: str | None = None
        self._watches = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which nothing is refused: what runs is not the step's own code."""
        self._watches = False
        try:
            yield
        finally:
            self._watches = True

    @contextmanager
    def running(self, layer: str) -> Iterator[None]:
        """Context manager in which a layer runs, with hooks of the user's on it."""

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            # What a custom autograd function returns comes from no operation that a mode sees.
            self._note(output, inputs)

        self._layer = layer
        hook = register_module_forward_hook(note)
        try:
            yield
        finally:
            hook.remove()
            self._layer = None

    def refuse(self, results: Iterable[Any], what: str) -> None:
        """Raise if one of these is a layer's tensor."""
        layer = self.made.layer_within(results)
        if layer is not None:
            raise self._refused(layer, what)
        if self.refusal is not None:
            raise self.refusal

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        operands = (*args, *kwargs.values())
        if self._layer is not None:
            result = function(*args, **kwargs)
            self._note(result, operands)
            return result
        if not self._watches:
            return function(*args, **kwargs)
        layer = self.made.layer_within(operands)
        name = getattr(function, "__name__", "?")
        if layer is not None and name not in HARMLESS:
            raise self._refused(layer, f"in {name}")
        result = super().__torch_function__(function, types, args, kwargs)
        if layer is not None and isinstance(result, Tensor):
            self.made.add(result, layer)
        return result

    def _note(self, result: Any, operands: Iterable[Any]) -> None:
        if isinstance(result, Tensor):
            if self._layer is not None and not _is_among(result, operands):
                self.made.add(result, self._layer)
        elif isinstance(result, (list, tuple)):
            for item in result:
                self._note(item, operands)
        elif isinstance(result, dict):
            self._note(list(result.values()), operands)

    def _refused(self, layer: str, where: str) -> UnsupportedStepError:
        error = layer_tensor_error(layer, where)
        self.refusal = self.refusal or error
        return error


def weight_of_a_layer(where: str) -> UnsupportedStepError:
    """Return the error for a step that uses a layer's weight outside of the pipelined module."""
    return UnsupportedStepError(
        f"The step uses a weight of a layer outside of the pipelined module ({where}), which "
        "another stage may hold, such as for a penalty over self.parameters() or for a weight "
        "shared with other code. Use the optimizer's weight_decay, compute it inside the layers, "
        "or give the layer a second name in the LightningModule, so that all stages hold it."
    )


def leaves_of(results: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves that a gradient of these tensors would reach."""
    return (node.variable for node in _graph_of(results) if hasattr(node, "variable"))


def _graph_of(results: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the graph that these tensors came from."""
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [below for below, _ in node.next_functions if below is not None]


def _depends(results: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether a gradient of some tensors reaches one of the others."""
    identities = {id(tensor) for tensor in others if tensor.requires_grad}
    nodes = {tensor.grad_fn for tensor in others if tensor.grad_fn is not None}
    return any(id(tensor) in identities for tensor in results) or any(
        node in nodes or id(getattr(node, "variable", None)) in identities
        for node in _graph_of(results)
    )


def _gradient_through_layers() -> UnsupportedStepError:
    return UnsupportedStepError(
        "training_step asks torch.autograd.grad for a gradient through the pipelined module, such "
        "as for a gradient penalty on its input. Layers run on their stage's rank, before the "
        "rest of the step, so there is no such gradient. Train such a model on one device."
    )


def _has_meta(values: Iterable[Any]) -> bool:
    return any(
        value.is_meta
        if isinstance(value, Tensor)
        else isinstance(value, (list, tuple)) and _has_meta(value)
        for value in values
    )


def _is_among(result: Tensor, operands: Iterable[Any]) -> bool:
    return any(
        result is value
        if isinstance(value, Tensor)
        else isinstance(value, (list, tuple)) and _is_among(result, value)
        for value in operands
    )
