"""A key on a server: its parameter, the gradient that is being merged, and its version."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import zmq
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_dlres.codecs.gradient.base import GradientCodec
from lightning_dlres.core.arrays import byte_array
from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.core.wire.checksum import checksum_of
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.spare_tensors import SpareTensors
from lightning_dlres.paramserver.plan.keys import Key


@dataclass
class KeyState:
    """State of a key.

    Under "bsp" all workers' pushes of a number are merged into one update. Otherwise every push is
    an update.

    Attributes:
        key: The key.
        parameter: Its value.
        gradient: Gradient that is being merged. Under "bsp" it holds the previous value of the
            parameter between an update and the next push, for a worker that rejoins in between.
        applied: For each worker, the number of its latest push that the parameter contains.
        durable: The same for the copy of the parameter in the latest snapshot.
        updates: Number of updates.
        pending: Payloads that cannot be merged yet, with their codecs, by worker; None for a push
            without gradient, and for a push without codec.
        deferred: Workers whose payloads were discarded, since too many wait.
        merged: Number of workers whose pushes are merged. Pushes are merged in the order of the
            workers, so it is also the index of the next one.
        has_gradient: True if one of the merged pushes had a gradient.
        is_held: True if all pushes are merged, and the update waits for a commit.
        norm: Squared norm of the merged gradient, if it is held.
        applied_norm: The same of the latest update; 0 if that was not held.
        options: Options of the parameter's group for the update.
        applied_scale: Factor of the commit of the latest update; None if that was not held.
        clipping: Of the pushes with a gradient that are being merged: `is_held`, and the bound of
            the merged gradient's elements, which is 0 for none. None before the first of them.
        has_previous: True if `gradient` holds the previous value of the parameter.
        loaded: True once the initial value has arrived.
        spare: Memory for copies, shared by the keys of a server.
    """

    key: Key
    parameter: nn.Parameter
    gradient: Tensor
    applied: list[int]
    durable: list[int]
    updates: int = 0
    pending: dict[int, tuple[memoryview | None, GradientCodec | None]] = field(default_factory=dict)
    deferred: set[int] = field(default_factory=set)
    merged: int = 0
    has_gradient: bool = False
    is_held: bool = False
    norm: float = 0.0
    applied_norm: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)
    applied_scale: float | None = None
    clipping: tuple[bool, float] | None = None
    has_previous: bool = False
    loaded: bool = False
    spare: SpareTensors = field(default_factory=SpareTensors)
    _checksum: int | None = None
    _sent: list[zmq.MessageTracker] = field(default_factory=list)

    @classmethod
    def new(cls, key: Key, workers: int, spare: SpareTensors | None = None) -> KeyState:
        """Return the state of a key without a value.

        Args:
            key: The key.
            workers: Number of workers.
            spare: Memory for copies of all keys; None for one of its own.

        Raises:
            ProtocolError: If the key's description contradicts itself.
        """
        dtype = protocol.PARAMETER_DTYPES.get(key.dtype)
        if dtype is None:
            raise ProtocolError(
                f"{key} has the dtype {key.dtype!r}, expected one of "
                f"{', '.join(protocol.PARAMETER_DTYPES)}."
            )
        if len(key.shape) > protocol.MAX_DIMENSIONS or min(key.shape, default=0) < 0:
            raise ProtocolError(f"{key} has {len(key.shape)} dimensions, or a negative size.")
        count = math.prod(key.shape)
        if count != key.count or count * dtype.itemsize != key.nbytes:
            raise ProtocolError(f"{key} has {key.nbytes} bytes, but the shape {key.shape}.")
        try:
            value, gradient = (torch.empty(key.shape, dtype=dtype) for _ in range(2))
        except (RuntimeError, TypeError, OverflowError) as error:
            raise ProtocolError(f"no memory for {key.nbytes} bytes of {key}.") from error
        return cls(
            key=key,
            parameter=nn.Parameter(value, requires_grad=False),
            gradient=gradient,
            applied=[0] * workers,
            durable=[0] * workers,
            spare=SpareTensors() if spare is None else spare,
        )

    def payload(self) -> NDArray[np.uint8]:
        """Return the parameter's bytes, without a copy."""
        return byte_array(self.parameter.detach())

    def previous(self) -> NDArray[np.uint8]:
        """Return the bytes of the parameter's previous value, without a copy."""
        return byte_array(self.gradient)

    def checksum(self) -> int:
        """Return the checksum of the parameter's bytes."""
        if self._checksum is None:
            self._checksum = checksum_of(self.payload().data)
        return self._checksum

    def note_sent(self, tracker: zmq.MessageTracker) -> None:
        """Note that ZeroMQ still reads the parameter until a tracker is done."""
        self._sent = [*(one for one in self._sent if not one.done), tracker]

    def set_value(self, data: memoryview) -> None:
        """Replace the value by raw bytes, whose number must fit."""
        self.require_unshared()
        self.payload()[:] = np.frombuffer(data, np.uint8)

    def require_unshared(self) -> None:
        """Move the value to other memory if ZeroMQ may still send the old one."""
        self._checksum = None
        if any(not tracker.done for tracker in self._sent):
            former = self.parameter.data
            self.parameter.data = self.spare.copy(former)
            self.spare.keep(former, self._sent)
        self._sent = []

    @property
    def divides_first(self) -> bool:
        """True if gradients are divided before they are added: a sum in float16 may be infinite
        where the mean is not."""
        return self.gradient.dtype == torch.float16

    def add(
        self, data: memoryview, codec: GradientCodec | None, *, is_first: bool, parts: int = 1
    ) -> None:
        """Add a pushed gradient to the merged one, or put it there if it is the first.

        Args:
            data: Payload of the push.
            codec: Its codec; None for raw bytes.
            is_first: Discard what the merged gradient has.
            parts: Number of gradients whose mean is wanted, see `divides_first`.
        """
        values, total = as_tensor(data), self.gradient.view(-1)
        if codec is None and self.divides_first and parts > 1:
            values = values.view(total.dtype).div(parts).view(torch.uint8)
        if codec is not None:
            codec.expand(values, total, accumulate=not is_first)
        elif is_first:
            byte_array(self.gradient)[:] = values.numpy()
        else:
            total.add_(values.view(total.dtype))


def as_tensor(data: memoryview) -> Tensor:
    """Return uint8[n] over received bytes, or over a copy if they are not aligned or writable."""
    if not data:
        # An empty array may have strides that no view of a tensor can have.
        return torch.empty(0, dtype=torch.uint8)
    array = np.frombuffer(data, np.uint8)
    if array.ctypes.data % 8 or not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array)
