"""Transfers of tensors between two ranks over a process group of their own, such as one of NCCL."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class DeviceTransfers:
    """Sends tensors to one rank and receives its tensors, from device memory to device memory.

    Both ranks must call `send` and `receive` in one agreed order: a transfer by NCCL waits on the
    device until the other rank has started its end, and holds up all transfers behind it.

    Args:
        group: Process group of the two ranks, used for nothing else.
        peer: The other rank.
        device: This rank's device.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group, self._peer, self._device = group, peer, device
        # Transfers on the stream of the computation would wait for all that is queued there.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def computed(self) -> Callable[[], None]:
        """Return a function that waits until the device has computed all tensors of the calling
        thread so far; another thread may call it."""
        if self._stream is None:
            return _already_computed
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event.synchronize

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send computed tensors; return when they may be written to or freed."""
        self._transfer(dist.isend, tensors)

    def receive(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return received tensors of these sizes in bytes, each uint8[size]."""
        with self._on_stream():
            buffers = [torch.empty(n, dtype=torch.uint8, device=self._device) for n in sizes]
        self._transfer(dist.irecv, buffers)
        return buffers

    def adopt(self, tensor: Tensor) -> Tensor:
        """Return a received tensor that the calling thread's computation may use from now on.

        Its memory belongs to another stream. Without this call it could be reused while the
        computation still reads it.
        """
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))
        return tensor

    def close(self) -> None:
        """Free the process group; called by both ranks after their last transfer."""
        dist.destroy_process_group(self._group)

    def _transfer(self, operation: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        if not tensors:
            return
        with self._on_stream():
            operations = [dist.P2POp(operation, t, self._peer, self._group) for t in tensors]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        if self._stream is not None:
            self._stream.synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        # A new thread has another current device, which the stream's context corrects.
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _already_computed() -> None:
    """On the CPU, a tensor is computed when the operation returns."""


def nccl_identity(device: torch.device) -> list[float]:
    """Return an identifier of a GPU, and the version of NCCL; zeros for a device that NCCL does not
    link."""
    if device.type != "cuda" or not dist.is_nccl_available():
        return [0.0, 0.0]
    identifier = zlib.crc32(str(torch.cuda.get_device_properties(device).uuid).encode())
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return [float(identifier), float(major * 10_000 + minor * 100 + patch)]
