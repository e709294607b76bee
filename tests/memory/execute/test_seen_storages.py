"""Storages of parameters are exempt, also after a parameter got a new storage."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dlres.memory.execute.seen_storages import SeenStorages


def same_memory(memory: bytearray) -> Tensor:
    """Return a tensor with a new storage over the given memory, which is always the same."""
    return torch.frombuffer(memory, dtype=torch.float32)


def test_a_new_storage_at_the_old_address_is_exempt() -> None:
    memory = bytearray(4 * 16)
    parameter = nn.Parameter(same_memory(memory))
    storages, address = SeenStorages(), parameter.data_ptr()
    storages.start([parameter])
    # An allocator does the same if a parameter is converted to another type and back.
    parameter.data = same_memory(memory)
    assert parameter.data_ptr() == address
    storages.start([parameter])
    assert storages.of(parameter).is_exempt


def test_unchanged_parameters_keep_their_entries() -> None:
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
    storages = SeenStorages()
    storages.start(parameters)
    before = [storages.of(parameter) for parameter in parameters]
    storages.start(parameters)
    after = [storages.of(parameter) for parameter in parameters]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_step_forgets_the_tensors_of_the_last_one() -> None:
    storages, tensor = SeenStorages(), torch.ones(4)
    storages.start([tensor])
    assert storages.of(tensor).is_exempt
    storages.start([])
    assert not storages.of(tensor).is_exempt
