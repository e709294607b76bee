"""Construction of a model whose parameters go to a file as soon as each one is made.

Modules make a parameter, register it, and then write its initial values. So the values are those
of plain construction, and not even one whole layer has to fit into memory twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy

from lightning_dlres.core._compat import storage_owner_count
from lightning_dlres.mirror.execute.region import LEAST_FILE_BYTES, new_tensor


@contextmanager
def constructing(directory: Path) -> Iterator[None]:
    """Context manager in which new parameters lie in a file, each in its own.

    A parameter whose memory other tensors share moves when they are gone, or not at all.

    Args:
        directory: Directory of the files. They have no names, and end with their parameters.
    """

    # Parameters whose memory other code still holds. It may write initial values there.
    held: list[nn.Parameter] = []

    def move(parameter: nn.Parameter | None) -> None:
        is_plain = type(parameter) is nn.Parameter and not is_lazy(parameter)
        if parameter is None or not is_plain or parameter.device.type != "cpu":
            return
        nbytes = parameter.numel() * parameter.element_size()
        # A parameter that is registered a second time lies in its file already.
        if (
            nbytes < LEAST_FILE_BYTES
            or not parameter.untyped_storage().resizable()
            or parameter.layout != torch.strided
        ):
            return
        if storage_owner_count(parameter) > 1:
            held.append(parameter)
            return
        place = new_tensor(parameter.detach(), directory)
        place.copy_(parameter.detach())
        parameter.data = place

    def move_held() -> None:
        waiting = held.copy()
        held.clear()
        for parameter in waiting:
            move(parameter)

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        move_held()
        move(parameter)

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()
        move_held()
