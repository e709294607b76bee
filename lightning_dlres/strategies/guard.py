"""User code must not compute with the weights of another stage.

They are meta tensors here. Not all of torch's operations refuse those: on the CPU a matrix product
with a meta weight returns uninitialised memory, and training would go on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
            raise UnsupportedStepError(
                f"The step uses a weight that another stage holds (in {name}), such as for a "
                "penalty over self.parameters() or for a weight shared with code outside of the "
                "pipelined module. Use the optimizer's weight_decay, compute it inside the "
                "layers, or give the layer a second name in the LightningModule, so that all "
                "stages hold it."
            )
        return function(*args, **kwargs)


def _has_meta(values: Iterable[Any]) -> bool:
    return any(
        value.is_meta
        if isinstance(value, Tensor)
        else isinstance(value, (list, tuple)) and _has_meta(value)
        for value in values
    )
