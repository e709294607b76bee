"""Devices of the ranks that measure together, and the memory that each may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lightning_dlres.core.host.free_memory import available_bytes

# The part of the free memory that the model may take.
FREE_MEMORY_SHARE = 0.9


class RankDevice(NamedTuple):
    """A rank's device, as the rank describes it to the others.

    Attributes:
        host: Name of the host; equal for ranks that share its memory.
        name: Name of the device model.
        is_cuda: Whether the device is a GPU.
        limit: Bytes that the model may take on the device; None: no limit, only on the CPU.
        free: Bytes that are free on the GPU or, for a rank on the CPU, on its host; None: unknown.
        held: Bytes of the model that the rank holds now on the CPU.
        group: Control group whose limit leaves no more bytes; "" if it is the host's memory.
    """

    host: str
    name: str
    is_cuda: bool
    limit: int | None
    free: int | None
    held: int
    group: str = ""


def with_own_limits(devices: Sequence[RankDevice]) -> list[RankDevice]:
    """Return the devices, with a limit for each rank that is alone in a control group.

    Such a rank shares no memory with the others, even on one host.
    """
    members = Counter((device.host, device.group) for device in devices if not device.is_cuda)

    def limited(device: RankDevice) -> RankDevice:
        is_alone = device.group and members[device.host, device.group] == 1
        if device.is_cuda or not is_alone or device.free is None or device.limit is not None:
            return device
        return device._replace(limit=int((device.free + device.held) * FREE_MEMORY_SHARE))

    return list(map(limited, devices))


def bytes_for_measuring(devices: Sequence[RankDevice], rank: int) -> int | None:
    """Return the bytes that a rank may take while all ranks measure; None: unknown.

    Ranks on the CPU of one host share its free memory equally, and so do those of one control
    group.
    """
    own = devices[rank]
    sharing = [
        device
        for device in devices
        if (device.host, device.group) == (own.host, own.group)
        and not device.is_cuda
        and not own.is_cuda
    ]
    free = [device.free for device in sharing or [own] if device.free is not None]
    limits = [own.limit] if own.limit is not None else []
    if free:
        limits.append(int(min(free) * FREE_MEMORY_SHARE / max(len(sharing), 1)))
    return min(limits, default=None)


def host_memory(devices: Sequence[RankDevice]) -> dict[str, int]:
    """Return the bytes that the ranks of each host may hold together; see `RunProfile`."""
    memory = {}
    for host in {device.host for device in devices}:
        # Only ranks on the CPU may have no limit.
        sharing = [d for d in devices if d.host == host and d.free is not None and d.limit is None]
        if sharing:
            free = min(device.free for device in sharing if device.free is not None)
            # The part of the model that a rank holds now is freed for its stage.
            memory[host] = int((free + sum(d.held for d in sharing)) * FREE_MEMORY_SHARE)
    return memory


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a GPU, or of the host for the CPU; None: unknown."""
    if device.type != "cuda":
        return available_bytes()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached
