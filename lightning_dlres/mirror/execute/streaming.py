"""Streaming of parameters to the device, around each call of a module and in backward.

Outside of these, a parameter's data is its value in the mirror. So the optimizer, clipping,
checkpoints and callbacks work on the mirror, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import (
    backward_number,
    is_in_backward,
    storage_key,
    storage_owner_count,
    version_of,
    version_witness,
)
from lightning_dlres.core.saved_tensors import Restore, require_unchanged
from lightning_dlres.mirror.execute.parameter_reads import data_of
from lightning_dlres.mirror.execute.window import DeviceCopy, Window
from lightning_dlres.mirror.profile.units import ParameterUnit


class UseObserver(Protocol):
    """Observer of the uses of units in a step; it decides what is on the device."""

    def begin(self, unit: int) -> None:
        """Observe that a use of a unit begins, in a call or in backward; its parameters are
        required next."""

    def end(self, unit: int) -> None:
        """Observe that a use of a unit has ended."""


class ParameterStreaming:
    """Exchange of the parameters' data: on the device during a use, in the mirror otherwise.

    Args:
        units: All units.
        values: Values of each unit's parameters in the mirror.
        window: Copies on the device.
        observer: Observer of the uses.
        changes_device: True if the device is not the CPU, where the mirror is. Autograd then has a
            gradient of its own for each use of a parameter, and adds up nothing.

    Attributes:
        observer: See above; it may be changed between steps.
        unit_of: Unit of each parameter.
        forbids_late_uses: True if units are updated as soon as their gradients are complete.
        late_uses: Units that backward has used after their last gradient, in any step so far. An
            update of such a unit amid backward would change values that are still needed.
    """

    def __init__(
        self,
        units: Sequence[ParameterUnit],
        values: Sequence[Sequence[Tensor]],
        window: Window,
        observer: UseObserver,
        *,
        changes_device: bool = False,
    ) -> None:
        self._changes_device = changes_device
        # Units that code uses outside of their calls, in each of the calls that surround it.
        self._borrowed: list[list[int]] = [[]]
        # True if backward has run since the last call outside of backward.
        self._may_be_updated = False
        # Number of uses of each unit for which backward computes gradients.
        self._uses: dict[int, int] = {}
        self._units, self._values, self._window = units, values, window
        self.observer = observer
        self.unit_of = {p: index for index, unit in enumerate(units) for p in unit.parameters}
        # Calls that use a unit and have not returned.
        self._calls = [0] * len(units)
        # The unit that backward has used last, until its gradients are there or another unit is
        # used. Other gradients of it may never come: layers are frozen, or in no loss.
        self._in_backward: int | None = None
        # Number of gradients that are still to come for each unit, in the backward of this number.
        self._gradients_to_come: dict[int, int] = {}
        self._backward = -1
        # Units by the storage key of each value in the mirror.
        self._unit_at = {
            storage_key(value): index
            for index, own in enumerate(values)
            for value in own
            if value.numel()
        }
        # Units with a value in the mirror that autograd has saved, such as that of a detached
        # weight. Backward may need it after the unit's gradients.
        self._saved_in_mirror: set[int] = set()
        # Units whose gradients are all there, and those that backward has used after that.
        self._complete: set[int] = set()
        self.late_uses: set[int] = set()
        self.forbids_late_uses = False
        # Units whose values other code may change without a trace, through `parameter.data`.
        self._exposed: set[int] = set()
        # Units with a parameter whose data other code has replaced.
        self._replaced: set[int] = set()
        # Such units in a call: for each parameter its data, and the version before the call.
        self._replaced_in_call: dict[int, list[tuple[nn.Parameter, Tensor, int]]] = {}

    def start(self) -> None:
        """Start a step: nothing on the device is up to date."""
        self.end_calls()
        self._uses.clear()
        self._exposed.clear()
        self._in_backward = None
        self._gradients_to_come.clear()
        self._complete.clear()
        self._saved_in_mirror.clear()
        self._window.drop_all()
        for unit in tuple(self._replaced):
            self._take_back(unit)

    def enter(self, unit: int) -> None:
        """Bring a unit to the device for a call, unless a call has brought it there."""
        if self._calls[unit]:
            self._calls[unit] += 1
            return
        if self._check_replaced(unit):
            self._calls[unit] = 1
            self._bring_replaced(unit)
            return
        if self._may_be_updated and not is_in_backward():
            # Fused kernels of optimizers leave no trace in a parameter's version.
            self._may_be_updated = False
            self._window.drop_idle()
        if torch.is_grad_enabled():
            self._uses[unit] = self._uses.get(unit, 0) + 1
        if unit in self._complete and is_in_backward():
            # A checkpoint runs the call again, with the weights of its first run.
            self._note_late_use(unit)
        if unit in self._exposed:
            self._window.drop(unit)
        if unit != self._in_backward:
            self._end_use_in_backward()
            self.observer.begin(unit)
        copy = self._window.require(unit)
        # From here on `leave` must undo the call.
        self._calls[unit] = 1
        self._window.hold(unit)
        for parameter, view in zip(self._units[unit].parameters, copy.views, strict=True):
            parameter.data = view

    def leave(self, unit: int) -> None:
        """Return a unit to the mirror at the end of a call."""
        if not self._calls[unit]:
            # Its fetch has failed, or a hook of other code failed before it. torch then still runs
            # the hooks at the end of a call.
            return
        self._calls[unit] -= 1
        if self._calls[unit]:
            return
        if unit in self._replaced:
            self._return_replaced(unit)
            return
        # A method of its own: no local of it may hold a view when the copy is dropped.
        is_stale = self._return_to_mirror(unit)
        self._window.let_go(unit)
        if is_stale:
            self._window.drop(unit)
        if unit != self._in_backward:
            self.observer.end(unit)

    def open_call(self) -> None:
        """Open a scope for units that code inside of a call borrows."""
        self._borrowed.append([])

    def close_call(self) -> None:
        """Return the units that were borrowed inside of a call."""
        # A call has no scope if a hook of other code failed before the scope was opened.
        if len(self._borrowed) > 1:
            self._return(self._borrowed.pop())

    def end_calls(self) -> None:
        """End all calls that have not returned: no module runs between two steps.

        An exception such as KeyboardInterrupt skips the hooks at the end of a call.
        """
        while len(self._borrowed) > 1:
            self.close_call()
        self.return_borrowed()
        for unit, calls in enumerate(self._calls):
            for _ in range(calls):
                self.leave(unit)

    def borrow(self, parameter: nn.Parameter) -> None:
        """Bring a parameter's unit to the device: code reads the parameter outside of its call.

        It returns at the end of the call that surrounds the code; without one, at the next
        backward or update.
        """
        unit = self.unit_of.get(parameter)
        if unit is not None and not self._calls[unit]:
            self._borrowed[-1].append(unit)
            self.enter(unit)

    def return_borrowed(self) -> None:
        """Return the units that were borrowed outside of any call."""
        borrowed, self._borrowed[0] = self._borrowed[0], []
        self._return(borrowed)

    def _return(self, borrowed: Sequence[int]) -> None:
        for unit in reversed(borrowed):
            self.leave(unit)

    def _return_to_mirror(self, unit: int) -> bool:
        """Let the parameters have their values in the mirror again as their data.

        Returns:
            True if the copy has other values: the module has given a parameter other data, which
            leaves no trace in its version.
        """
        is_stale = False
        copy = self._window.require(unit)
        states = zip(
            self._units[unit].parameters,
            copy.views,
            self._values[unit],
            copy.versions,
            strict=True,
        )
        for parameter, view, value, version in states:
            data = data_of(parameter)
            is_replaced = data.data_ptr() != view.data_ptr()
            if is_replaced or version_of(parameter) != version or unit in self._exposed:
                # The module has changed its own parameter, or may have.
                value.copy_(data)
            is_stale |= is_replaced
            parameter.data = value
        return is_stale

    def expose(self, parameter: nn.Parameter) -> None:
        """Note that code reads `parameter.data`, and may change it without a trace."""
        unit = self.unit_of.get(parameter)
        if unit is not None:
            self._exposed.add(unit)

    def note_read(self, parameter: nn.Parameter) -> None:
        """Note that code reads a parameter from its module, where the device has no other copy."""
        unit = self.unit_of.get(parameter)
        if unit in self._complete and not self._calls[unit] and is_in_backward():
            self._note_late_use(unit)

    def claim(self, tensor: Tensor) -> Restore | None:
        """Return the function that restores a saved tensor; None if it is no part of a device copy.

        Instead of keeping the copy, the function fetches the tensor's unit again.
        """
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        unit = self._window.unit_at(tensor)
        if unit is None:
            in_mirror = self._unit_at.get(storage_key(tensor))
            if in_mirror is not None:
                self._saved_in_mirror.add(in_mirror)
            return None
        witness, version = version_witness(tensor), version_of(tensor)
        dtype, shape, stride = tensor.dtype, tensor.shape, tensor.stride()
        offset = tensor.storage_offset()

        def restore() -> Tensor:
            require_unchanged(witness, version)
            memory = self._use_in_backward(unit).memory
            return memory.view(dtype).as_strided(shape, stride, offset)

        return restore

    def gradient_arrived(self, parameter: nn.Parameter) -> int | None:
        """Observe that backward has computed a parameter's gradient.

        Returns:
            The parameter's unit, if this was the last of its gradients; otherwise None.
        """
        self._may_be_updated = True
        unit = self.unit_of.get(parameter)
        if unit is None:
            # The user has put another parameter in the place of one of the mirror's.
            return None
        if unit in self._complete:
            self._note_late_use(unit)
            return None
        number = backward_number()
        if number != self._backward:
            # An earlier backward may have left some out.
            self._backward = number
            self._gradients_to_come.clear()
        to_come = self._gradients_to_come.pop(unit, None)
        if to_come is None:
            to_come = sum(p.requires_grad for p in self._units[unit].parameters)
        if to_come > 1:
            self._gradients_to_come[unit] = to_come - 1
            return None
        if unit == self._in_backward:
            self._end_use_in_backward()
        if self._changes_device and self._uses.get(unit, 0) > 1:
            # Those of other uses may still come.
            return None
        if unit in self._saved_in_mirror:
            return None
        self._complete.add(unit)
        return unit

    def _use_in_backward(self, unit: int) -> DeviceCopy:
        """Return the copy of a unit for backward, which uses it now.

        An operation holds what it uses. So a use that ends too early costs another fetch at most.
        """
        self._may_be_updated = True
        if self._borrowed[0]:
            self.return_borrowed()
        if unit in self._complete:
            self._note_late_use(unit)
        if unit != self._in_backward:
            self._end_use_in_backward()
            self._in_backward = unit
            if not self._calls[unit]:
                self.observer.begin(unit)
        if unit in self._exposed and not self._calls[unit]:
            self._window.drop(unit)
        return self._window.require(unit)

    def _end_use_in_backward(self) -> None:
        unit, self._in_backward = self._in_backward, None
        if unit is not None and not self._calls[unit]:
            self.observer.end(unit)

    def _note_late_use(self, unit: int) -> None:
        """Note that backward uses a unit after its last gradient.

        Raises:
            RuntimeError: If the unit was updated then.
        """
        self.late_uses.add(unit)
        if self.forbids_late_uses:
            raise RuntimeError(
                f"backward needs a parameter of {self._units[unit].name or 'the model'!r} after "
                "its gradients are complete, and it was updated then. Set "
                "ParameterMirror(update='after_backward')."
            )

    def _check_replaced(self, unit: int) -> bool:
        """Return True if other code has given a parameter of a unit another tensor as its data.

        It also updates `_replaced`, and drops the copy of such a unit.

        Such a unit does not stream. Its values in the mirror stay, since that code may have kept
        them to put them back.
        """
        pairs = zip(self._units[unit].parameters, self._values[unit], strict=True)
        if not all(_is_over(parameter, value) for parameter, value in pairs):
            self._replaced.add(unit)
            self._window.drop(unit)
        else:
            self._replaced.discard(unit)
        return unit in self._replaced

    def _bring_replaced(self, unit: int) -> None:
        """Copy the data of a replaced unit to the device, for a call."""
        if not self._changes_device:
            return
        self._replaced_in_call[unit] = []
        for parameter in self._units[unit].parameters:
            data = data_of(parameter)
            state = (parameter, data, version_of(parameter))
            self._replaced_in_call[unit].append(state)
            parameter.data = data.to(self._window.device)

    def _return_replaced(self, unit: int) -> None:
        """Let a replaced unit have its own data again, with the changes of its call."""
        for parameter, data, version in self._replaced_in_call.pop(unit, ()):
            on_device = data_of(parameter)
            if version_of(parameter) != version or unit in self._exposed:
                data.copy_(on_device)
            parameter.data = data

    def _take_back(self, unit: int) -> None:
        """Copy a unit's replaced data to the mirror, and stream the unit again.

        A parameter stays as it is if other code has kept its values in the mirror to put them back,
        or if its data has another dtype or shape, for which the mirror has no place.
        """
        for parameter, value in zip(self._units[unit].parameters, self._values[unit], strict=True):
            fits = (parameter.dtype, parameter.shape) == (value.dtype, value.shape)
            if fits and not _is_over(parameter, value) and storage_owner_count(value) == 1:
                value.copy_(data_of(parameter))
                parameter.data = value
        self._check_replaced(unit)


def _is_over(parameter: nn.Parameter, value: Tensor) -> bool:
    """Return True if a parameter's data lies over the memory of a value, and in its form."""
    return (
        parameter.data_ptr() == value.data_ptr()
        and parameter.shape == value.shape
        and parameter.stride() == value.stride()
        and parameter.dtype == value.dtype
    )
