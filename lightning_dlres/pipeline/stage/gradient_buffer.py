"""Sums of parameter gradients over micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Gradients = dict[nn.Parameter, Tensor]


class GradientBuffer:
    """Sums of gradients over micro-batches.

    The buffer never writes to a tensor that autograd may share with another parameter.
    """

    def __init__(self) -> None:
        # The keys are id(parameter). Hashing a tensor is a call of a Python function, which would
        # be slow here: every micro-batch looks up every parameter.
        self._sums: dict[int, Tensor] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        # Parameters whose sum is a tensor made here, so that it may be added to in place.
        self._owned: set[int] = set()
        self._new_storages: set[int] = set()

    @property
    def gradients(self) -> Gradients:
        """The sums."""
        return {self._parameters[key]: total for key, total in self._sums.items()}

    @contextmanager
    def as_grad(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Context manager that makes the sums the parameters' `.grad`.

        Autograd then adds each gradient as soon as it has computed it, and need not hold all of
        them at once. The previous `.grad` comes back afterwards.
        """
        previous = [parameter.grad for parameter in parameters]
        sums = [self._sums.get(id(parameter)) for parameter in parameters]
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = total
        try:
            yield
        finally:
            for parameter, total, gradient in zip(parameters, sums, previous, strict=True):
                new_total = parameter.grad
                if new_total is not None and new_total is not total:
                    self.put(parameter, new_total)
                    self._owned.add(id(parameter))
                parameter.grad = gradient

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Add a gradient to the parameter's sum."""
        total = self._sums.get(id(parameter))
        if total is None:
            self.put(parameter, gradient)
        elif id(parameter) in self._owned and not gradient.is_sparse:
            total.add_(gradient)
        else:
            # Torch can add a sparse tensor to a dense one, but not the other way round.
            sparse_first = total.is_sparse and not gradient.is_sparse
            self.put(parameter, gradient + total if sparse_first else total + gradient)
            self._owned.add(id(parameter))

    def put(self, parameter: nn.Parameter, total: Tensor) -> None:
        """Make this tensor the parameter's sum."""
        self._sums[id(parameter)], self._parameters[id(parameter)] = total, parameter
        self._new_storages.add(storage_id(total))

    def pop(self, parameter: nn.Parameter) -> Tensor | None:
        """Remove the parameter's sum and return it; None if there is none."""
        self._owned.discard(id(parameter))
        return self._sums.pop(id(parameter), None)

    def pop_new_storages(self) -> set[int]:
        """Return the `storage_id` of every tensor that became a sum since the last call."""
        new, self._new_storages = self._new_storages, set()
        return new


def storage_id(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share storage."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
