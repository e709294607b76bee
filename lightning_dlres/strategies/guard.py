"""The step must not compute with the weights of the layers, which are the pipeline's.

Those of another stage have no values here (see `pipeline.foreign`, which watches over them outside
of the step, too). A gradient of those that are here would be lost: the schedule delivers what came
through the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_dlres.core.errors import UnsupportedStepError

# What asks for the shape of things, and not for values.
_HARMLESS = {
    *("__get__", "__set__", "__hash__", "__repr__", "__format__", "size", "dim", "ndimension"),
    *("numel", "nelement", "stride", "element_size", "is_floating_point", "is_complex"),
    *("get_device", "register_hook", "requires_grad_", "is_contiguous"),
}


class ForeignWeightGuard(TorchFunctionMode):
    """While active, an operation on a tensor without storage is an error.

    Raises:
        UnsupportedStepError: the operation, and what to do.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "?")
        if name not in _HARMLESS and (_has_meta(args) or _has_meta(kwargs.values())):
            raise weight_of_a_layer(f"in {name}")
        return function(*args, **kwargs)


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
    seen: set[Any] = set()
    waiting = [tensor.grad_fn for tensor in results if tensor.grad_fn is not None]
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [below for below, _ in node.next_functions if below is not None]


def _has_meta(values: Iterable[Any]) -> bool:
    return any(
        value.is_meta
        if isinstance(value, Tensor)
        else isinstance(value, (list, tuple)) and _has_meta(value)
        for value in values
    )
