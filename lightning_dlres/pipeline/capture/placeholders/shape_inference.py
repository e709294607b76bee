"""Results of operations without data, which are kept: each micro-batch asks for the same ones."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core._compat import fake_tensor_mode
from lightning_dlres.core.wire.nested import replaced, tensors_in
from lightning_dlres.pipeline.capture.placeholders.skeleton import meta_of

# Results that are kept. A batch with sequences of another length needs others.
_KEPT = 4096
# Stands for a result that depends on values; None is the result of an assignment.
UNKNOWN = object()
_MISSING = object()


class ShapeInference:
    """Results of operations, computed from the shapes and dtypes of their arguments."""

    def __init__(self) -> None:
        self._results: OrderedDict[Any, Any] = OrderedDict()

    def result(self, function: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """Return the result of a function of torch, with FakeTensors in the place of tensors.

        Args:
            function: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            device: Device of all tensors.

        Returns:
            The result; UNKNOWN if it depends on values.
        """
        if not any(True for _ in tensors_in((args, kwargs))):
            # It may change a setting of torch, such as that of `no_grad`.
            return self._computed(function, args, kwargs, device)
        key = function, _key(args), _key(kwargs), device, _settings(device)
        try:
            known = self._results.get(key, _MISSING)
        except TypeError:
            # Some argument has no hash.
            return self._computed(function, args, kwargs, device)
        if known is _MISSING:
            known = self._results[key] = self._computed(function, args, kwargs, device)
            if len(self._results) > _KEPT:
                self._results.popitem(last=False)
        return known

    def _computed(self, function: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        def fake_of(tensor: Tensor) -> Tensor:
            shape, dtype, requires_grad = meta_of(tensor)
            fake = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            return fake.requires_grad_(requires_grad)

        try:
            with self._fakes:
                fake_args, fake_kwargs = replaced(fake_of, (args, kwargs))
                return function(*fake_args, **fake_kwargs)
        except Exception:
            return UNKNOWN

    @cached_property
    def _fakes(self) -> AbstractContextManager[Any]:
        return fake_tensor_mode()


def _settings(device: torch.device) -> tuple[Any, ...]:
    """Return the settings of torch on which the dtype or graph of a result depends."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.get_default_dtype(),
    )


def _key(value: Any) -> Any:
    """Return a key that is equal for arguments that give results of the same shapes and dtypes."""
    if isinstance(value, Tensor):
        return Tensor, meta_of(value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_key, value))
    if isinstance(value, dict):
        return dict, tuple((name, _key(item)) for name, item in value.items())
    # True, 1 and 1.0 are equal, but make results of other dtypes.
    return type(value), value
