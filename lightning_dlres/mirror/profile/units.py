"""Units of a model's parameters: those of one module, which move to the device together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_dlres.core._compat import storage_key
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.host.slab import aligned


@dataclass(frozen=True, eq=False)
class ParameterUnit:
    """Parameters that one module owns.

    Attributes:
        name: Name of the module; "" for the model itself, if it owns parameters directly.
        parameters: The parameters, each in one unit only.
        names: Names of the parameters in the model.
        offsets: Offset of each parameter in the unit's memory, in bytes.
        nbytes: Bytes of the unit's memory.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    names: tuple[str, ...]
    offsets: tuple[int, ...]
    nbytes: int

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the parameters' values in the memory of the unit.

        Args:
            memory: uint8[nbytes] at an aligned address.
        """
        return [
            typed_view(memory, offset, parameter)
            for offset, parameter in zip(self.offsets, self.parameters, strict=True)
        ]


def typed_view(memory: Tensor, offset: int, like: Tensor) -> Tensor:
    """Return a tensor at an offset of some memory, with the dtype, shape and strides of another.

    Args:
        memory: uint8[n].
        offset: First byte.
        like: Dense tensor without overlaps.
    """
    span = memory[offset : offset + like.numel() * like.element_size()]
    return span.view(like.dtype).as_strided(like.shape, like.stride())


def find_units(model: nn.Module) -> list[ParameterUnit]:
    """Return the units of a model, in the order of its modules.

    A parameter of several modules belongs to the unit of the first one.

    Raises:
        ConfigError: If a parameter has no memory that can be moved.
    """
    units, seen, storages = [], set(), dict[int, tuple[str, nn.Parameter]]()
    for module_name, module in model.named_modules():
        own = []
        for name, parameter in module.named_parameters(module_name, recurse=False):
            if parameter not in seen:
                seen.add(parameter)
                _require_movable(name, parameter, storages)
                own.append((name, parameter))
        if own:
            units.append(_unit(module_name, own))
    return units


def units_by_module(
    model: nn.Module, units: Sequence[ParameterUnit]
) -> dict[nn.Module, tuple[int, ...]]:
    """Return the units of each module's own parameters, by module.

    The unit of a tied parameter counts for every module that owns the parameter.
    """
    unit_of = {p: index for index, unit in enumerate(units) for p in unit.parameters}
    found = {}
    for module in model.modules():
        own = (unit_of[p] for _, p in _own_parameters(module))
        needed = tuple(dict.fromkeys(own))
        if needed:
            found[module] = needed
    return found


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)


def _unit(name: str, own: Sequence[tuple[str, nn.Parameter]]) -> ParameterUnit:
    offsets, end = [], 0
    for _, parameter in own:
        offsets.append(end)
        end += aligned(parameter.numel() * parameter.element_size())
    return ParameterUnit(
        name=name,
        parameters=tuple(parameter for _, parameter in own),
        names=tuple(name for name, _ in own),
        offsets=tuple(offsets),
        nbytes=end,
    )


def _require_movable(
    name: str, parameter: nn.Parameter, storages: dict[int, tuple[str, nn.Parameter]]
) -> None:
    """Raise unless a parameter is a dense tensor with memory of its own.

    Args:
        name: Name of the parameter.
        parameter: The parameter.
        storages: Names of the parameters so far, and the parameters, by storage; this one is added.
    """
    rule = "the parameters must be dense tensors with memory of their own"
    if is_lazy(parameter) or parameter.is_meta:
        raise ConfigError(
            f"{rule}, got {name!r} without memory. Run the model once before training, or make it "
            "without a meta device."
        )
    plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    if not plain or parameter.is_quantized:
        raise ConfigError(
            f"{rule}, got {name!r} of type {type(parameter).__name__} and layout "
            f"{parameter.layout}. Use a plain nn.Parameter."
        )
    if not _is_dense(parameter):
        raise ConfigError(
            f"{rule}, got {name!r} with strides {tuple(parameter.stride())}. Make the Parameter "
            "from a contiguous tensor."
        )
    if parameter.numel():
        other, former = storages.setdefault(storage_key(parameter), (name, parameter))
        if former is not parameter:
            state = "in parts of one tensor"
            fix = "Give each a copy: parameter.data = parameter.data.clone()."
            if parameter.data_ptr() == former.data_ptr():
                state = "in the same memory"
                fix = "Register one Parameter in both places to tie them."
            raise ConfigError(f"{rule}, got {name!r} and {other!r} {state}. {fix}")


def _is_dense(tensor: Tensor) -> bool:
    """Return True if the elements lie one behind the other in memory, in some order of the axes."""
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
