"""Guards against a step that computes with the layers' weights, or with tensors that layers made.

The layers belong to the pipeline. Weights of another stage have no values on this rank
(`pipeline.stage.remote_parameters` guards them outside of the step, too). Weights of this rank's
own stage have values, but their gradient would be lost: the schedule delivers only gradients that
came through the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import tensors_of
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors, layer_tensor_error
from lightning_dlres.strategies.hetero_pipe.step.gradient_reads import GradientsOfEarlierBatches

# Operations that read metadata of a tensor, such as its shape, and not its values.
VALUE_FREE_OPERATIONS = {
    *("__get__", "__set__", "__delete__", "__hash__", "__repr__", "__format__"),
    *("size", "dim", "ndimension", "is_inference"),
    *("numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"),
    *("get_device", "register_hook", "requires_grad_", "is_contiguous"),
}
# Names of the functions that read, write and delete an attribute of a tensor.
_ACCESSES = {"__get__", "__set__", "__delete__"}


class PipelinedWeightGuard(TorchFunctionMode):
    """Torch function mode that refuses three kinds of operations.

    These are: an operation on a meta tensor (a weight of another stage), an operation on a tensor
    that layers made (other than the pipelined module's output), and a call of `torch.autograd.grad`
    for a gradient through the layers. It also reports accesses to `.grad`, and calls of backward,
    to `gradients`.

    Args:
        layer_tensors: The tensors that layers made; None for none.
        module: The LightningModule, whose names of parameters errors show; None for no names.
        gradients: The gradients of earlier batches; None if the step may do what it likes to them.

    Raises:
        UnsupportedStepError: If the step makes such an operation; raised by the operation.
    """

    def __init__(
        self,
        layer_tensors: LayerTensors | None = None,
        module: nn.Module | None = None,
        gradients: GradientsOfEarlierBatches | None = None,
    ) -> None:
        super().__init__()
        self.layer_tensors = layer_tensors if layer_tensors is not None else LayerTensors()
        self._module, self._gradients = module, gradients
        self._module_inputs: Sequence[Tensor] = ()
        self._module_outputs: Sequence[Tensor] = ()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        # Code that is cut leaves with an exception of its own, which is no error.
        if self._gradients is not None and (kind is None or not issubclass(kind, Exception)):
            self._gradients.refuse_changes()

    def record_call(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Record the tensors that the pipelined module was called with, and that it returned."""
        self._module_inputs, self._module_outputs = inputs, outputs

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "?")
        if name not in VALUE_FREE_OPERATIONS:
            weight = next(_meta_tensors((*args, *kwargs.values())), None)
            if weight is not None:
                raise layer_weight_error(f"in {name}", weight, self._module)
            if self.layer_tensors:
                layer = self.layer_tensors.layer_within((*args, *kwargs.values()))
                if layer is not None:
                    raise layer_tensor_error(layer, f"in {name}")
        elif self._gradients is not None and _accesses_gradient(function, name):
            self._gradients.before_access(args[0], name, args[1] if len(args) > 1 else None)
        if name == "backward" and self._gradients is not None:
            self._gradients.before_backward()
        if function is torch.autograd.grad:
            outputs, inputs = (tensors_of(list(argument)) for argument in args[:2])
            if _depends(self._module_inputs, inputs) and _depends(outputs, self._module_outputs):
                raise _gradient_through_layers_error()
        return function(*args, **kwargs)


class LayerTensorGuard(PipelinedWeightGuard):
    """Guard for a step whose layers run within it, on this rank.

    It records the tensors that the layers make, and refuses an operation of the step on them.

    Attributes:
        refusal: The first error that the guard raised; None without one. It is kept because user
            code may catch the exception.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refusal: UnsupportedStepError | None = None
        self._running_layer: str | None = None
        self._is_active = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context manager in which the guard refuses nothing, for code that does not belong to the
        step."""
        self._is_active = False
        try:
            yield
        finally:
            self._is_active = True

    @contextmanager
    def running(self, layer: str) -> Iterator[None]:
        """Context manager in which a layer runs, with the user's hooks on it. Tensors that it
        makes belong to the layer."""

        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            # A torch function mode does not see calls of custom autograd functions, so the outputs
            # of the layer's modules are recorded, too.
            self._record(output, inputs)

        self._running_layer = layer
        hook = register_module_forward_hook(record)
        try:
            yield
        finally:
            hook.remove()
            self._running_layer = None

    def refuse(self, results: Iterable[Any], use: str) -> None:
        """Check that no result of the step is a layer's tensor, and that the guard refused nothing.

        Args:
            results: Results of the step.
            use: Description of their use, for the message, such as "as the loss".

        Raises:
            UnsupportedStepError: If a result is a layer's tensor, or an operation was refused
                before.
        """
        layer = self.layer_tensors.layer_within(results)
        if layer is not None:
            raise self._refused(layer, use)
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
        if self._running_layer is not None:
            result = function(*args, **kwargs)
            self._record(result, operands)
            return result
        if not self._is_active:
            return function(*args, **kwargs)
        layer = self.layer_tensors.layer_within(operands)
        name = getattr(function, "__name__", "?")
        if layer is not None and name not in VALUE_FREE_OPERATIONS:
            raise self._refused(layer, f"in {name}")
        result = super().__torch_function__(function, types, args, kwargs)
        if layer is not None and isinstance(result, Tensor):
            # An attribute of a layer's tensor, such as `.data`, is again a layer's tensor.
            self.layer_tensors.add(result, layer)
        return result

    def _record(self, result: Any, operands: Iterable[Any]) -> None:
        """Record the tensors in an operation's result as tensors of the running layer."""
        if isinstance(result, Tensor):
            # An operation that returns one of its operands, such as `add_`, made no new tensor.
            if self._running_layer is not None and not _is_among(result, operands):
                self.layer_tensors.add(result, self._running_layer)
        elif isinstance(result, (list, tuple)):
            for item in result:
                self._record(item, operands)
        elif isinstance(result, dict):
            self._record(list(result.values()), operands)

    def _refused(self, layer: str, use: str) -> UnsupportedStepError:
        error = layer_tensor_error(layer, use)
        self.refusal = self.refusal or error
        return error


def layer_weight_error(use: str, weight: Tensor, module: nn.Module | None) -> UnsupportedStepError:
    """Return the error for a step that uses a layer's weight outside of the pipelined module.

    Args:
        use: Description of the use, such as "in mul".
        weight: The weight, or a tensor that was computed from one.
        module: The LightningModule, in which the weight may have a name; None for no name.
    """
    parameters = [] if module is None else module.named_parameters()
    name = next((name for name, parameter in parameters if parameter is weight), None)
    subject = "a layer's weight" if name is None else f"the layer's weight {name!r}"
    is_made = name is None and not isinstance(weight, nn.Parameter)
    made_there = " Make new tensors on the device of an input, not of a weight." * is_made
    return UnsupportedStepError(
        f"A step must not use {subject} outside of the pipelined module ({use}): "
        "another stage may hold the weight. Examples are a penalty over self.parameters() and a "
        "weight that other code shares. Use the optimizer's weight_decay, compute the term inside "
        "the layers, or assign the layer to a second attribute of the LightningModule: then all "
        f"stages hold it.{made_there}"
    )


def graph_leaves(results: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves that a gradient of these tensors would reach."""
    return (node.variable for node in _graph_nodes(results) if hasattr(node, "variable"))


def _graph_nodes(results: Iterable[Tensor]) -> Iterator[Any]:
    """Yield the nodes of the autograd graph that these tensors came from."""
    seen: set[Any] = set()
    pending = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    while pending:
        node: Any = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        pending += [below for below, _ in node.next_functions if below is not None]


def _depends(results: Sequence[Tensor], sources: Sequence[Tensor]) -> bool:
    """Return whether a gradient of one of the results reaches one of the sources."""
    source_ids = {id(tensor) for tensor in sources if tensor.requires_grad}
    source_nodes = {tensor.grad_fn for tensor in sources if tensor.grad_fn is not None}
    return any(id(tensor) in source_ids for tensor in results) or any(
        node in source_nodes or id(getattr(node, "variable", None)) in source_ids
        for node in _graph_nodes(results)
    )


def _gradient_through_layers_error() -> UnsupportedStepError:
    return UnsupportedStepError(
        "training_step must not ask torch.autograd.grad for a gradient through the pipelined "
        "module, as a gradient penalty on its input does. Layers run on their stage's rank, before "
        "the rest of the step, so that there is no such gradient. Train such a model on one device."
    )


def _accesses_gradient(function: Callable[..., Any], name: str) -> bool:
    return name in _ACCESSES and getattr(function, "__self__", None) is Tensor.grad


def _meta_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            if value.is_meta:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _meta_tensors(value)


def _is_among(result: Tensor, operands: Iterable[Any]) -> bool:
    return any(
        result is value
        if isinstance(value, Tensor)
        else isinstance(value, (list, tuple)) and _is_among(result, value)
        for value in operands
    )
