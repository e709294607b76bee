"""Sums of a stage's gradients over the micro-batches of a step.

Autograd adds to the sums itself, as the parameters' `.grad`. Reading and writing `.grad` takes some
microseconds for each parameter, because layers have pushed it out of the processor's caches. So the
buffer touches `.grad` as rarely as it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Gradients = dict[nn.Parameter, Tensor]


class GradientBuffer:
    """Sums of gradients over micro-batches.

    The buffer never writes to a tensor that autograd may share with another parameter.

    Args:
        keeps_grad: True leaves the sums in the parameters' `.grad` after `as_grad`, until
            `give_back`. Call that before user code may read or replace `.grad`.
    """

    def __init__(self, *, keeps_grad: bool = False) -> None:
        # The keys are id(parameter). Hashing a tensor is a call of a Python function, which would
        # be slow here: every micro-batch looks up every parameter.
        self._sums: dict[int, Tensor] = {}
        self._parameters: dict[int, nn.Parameter] = {}
        # By id(parameter): parameters whose sum only this buffer holds, so that `add` may change it
        # in place.
        self._owned: set[int] = set()
        # `storage_id` of every tensor that became a sum since `pop_new_storages`.
        self._new_storages: set[int] = set()
        self._keeps_grad = keeps_grad
        # By id(parameter): parameters whose `.grad` is their sum now, each with its previous one.
        self._borrowed: dict[int, tuple[nn.Parameter, Tensor | None]] = {}
        # By id(parameter): those of them whose sum autograd changes in place.
        self._settled: set[int] = set()

    @property
    def gradients(self) -> Gradients:
        """Sum of each parameter's gradients; without parameters that have none."""
        return {self._parameters[key]: total for key, total in self._sums.items()}

    @contextmanager
    def as_grad(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Context manager that makes the sums the parameters' `.grad`.

        Autograd then adds each gradient as soon as it has computed it, and need not hold all of
        them at once. The previous `.grad` comes back afterwards, or in `give_back`.
        """
        unsettled = [p for p in parameters if id(p) not in self._settled]
        for parameter in unsettled:
            if id(parameter) not in self._borrowed:
                self._borrowed[id(parameter)] = (parameter, parameter.grad)
                parameter.grad = self._own_sum(parameter)
        try:
            yield
        finally:
            for parameter in unsettled:
                self._take(parameter)
            if not self._keeps_grad:
                self.give_back()

    def give_back(self) -> None:
        """Give the parameters their previous `.grad` back."""
        for parameter, gradient in self._borrowed.values():
            # A hook of a layer may have replaced a sum.
            self._take(parameter)
            parameter.grad = gradient
        self._borrowed.clear()
        self._settled.clear()

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
        """Replace the parameter's sum by this tensor."""
        self._owned.discard(id(parameter))
        self._hold(parameter, total)
        if id(parameter) in self._borrowed:
            # Autograd would write to it, and it may belong to another parameter, too.
            self._settled.discard(id(parameter))
            _, parameter.grad = self._borrowed.pop(id(parameter))

    def pop(self, parameter: nn.Parameter) -> Tensor | None:
        """Remove the parameter's sum and return it; None if there is none."""
        self._owned.discard(id(parameter))
        if id(parameter) in self._borrowed:
            self._settled.discard(id(parameter))
            parameter.grad = None
        return self._sums.pop(id(parameter), None)

    def pop_new_storages(self) -> set[int]:
        """Return the `storage_id` of every tensor that became a sum since the last call."""
        new, self._new_storages = self._new_storages, set()
        return new

    def _own_sum(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the parameter's sum, to which autograd may write."""
        total = self._sums.get(id(parameter))
        if total is not None and id(parameter) not in self._owned:
            total = total.clone()
            self._hold(parameter, total)
            self._owned.add(id(parameter))
        return total

    def _hold(self, parameter: nn.Parameter, total: Tensor) -> None:
        self._sums[id(parameter)], self._parameters[id(parameter)] = total, parameter
        self._new_storages.add(storage_id(total))

    def _take(self, parameter: nn.Parameter) -> None:
        """Hold the sum that autograd has left in a borrowed `.grad`."""
        key, total = id(parameter), parameter.grad
        if total is None:
            return
        if total is not self._sums.get(key):
            self._hold(parameter, total)
            self._owned.add(key)
        if self._keeps_grad and total.layout is torch.strided:
            self._settled.add(key)


def storage_id(tensor: Tensor) -> int:
    """Return a number that is equal for strided tensors that share storage."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)
