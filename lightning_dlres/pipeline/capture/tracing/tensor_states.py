"""States of tensors before and after an operation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core._compat import storage_key
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.nested import tensors_in
from lightning_dlres.core.wire.tree import tensors_of


def random_states(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the state of the CPU's random generator, and of those of the tensors' devices."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def tensors_in_output(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in data; objects of other classes are left out."""
    try:
        yield from tensors_of(value)
    except ConfigError:
        yield from tensors_in(value)


def version(tensor: Tensor) -> int:
    with suppress(RuntimeError):
        return tensor._version
    return 0


def written_storages(tensors: list[Tensor], versions: list[int]) -> frozenset[int]:
    """Return the storages of the tensors whose version has changed."""
    return frozenset(
        storage_key(tensor)
        for tensor, before in zip(tensors, versions, strict=True)
        if version(tensor) != before
    )
