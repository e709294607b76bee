"""Places of a mirror: memory for each parameter, gradient and optimizer history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from lightning_dlres.mirror.execute.region import MirrorRegion
from lightning_dlres.mirror.plan.region_table import Kind, RegionItem, make_table
from lightning_dlres.mirror.profile.units import ParameterUnit

# Tensors that are like the history of each parameter, by the key of its state.
History = Mapping[nn.Parameter, Mapping[str, Tensor]]


class MirrorPlaces:
    """Places of all tensors of a mirror, in one region. Its memory ends with the last of them.

    Args:
        units: Units of the model.
        histories: History of each optimizer, without memory.
        directory: Directory of a file with the memory; None: host memory.
        pinned: Lock host memory, so that copies of a GPU overlap with computation.
        has_gradients: False leaves out the places of gradients.

    Attributes:
        table: Table of the region.
        unit_memories: Values of each unit's parameters, uint8[nbytes] each.
        values: Values of each unit's parameters.
        gradients: Place of each parameter's gradient.
        histories: Places of each optimizer's history.

    Raises:
        ConfigError: If the directory is not writable or has too little space.
    """

    def __init__(
        self,
        units: Sequence[ParameterUnit],
        histories: Sequence[History],
        *,
        directory: Path | None,
        pinned: bool,
        has_gradients: bool,
    ) -> None:
        like = dict(_tensors(units, histories, has_gradients=has_gradients))
        self.table = make_table(
            RegionItem(
                kind=kind,
                unit=unit,
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                nbytes=tensor.numel() * tensor.element_size(),
            )
            for (kind, unit, name), tensor in like.items()
        )
        region = MirrorRegion(self.table.nbytes, directory, pinned=pinned)
        tensors, offsets = {}, {}
        for item, offset in zip(self.table.items, self.table.offsets, strict=True):
            tensor = like[item.kind, item.unit, item.name]
            tensors[item.kind, item.name] = region.tensor(offset, tensor)
            offsets[item.kind, item.name] = offset
        self.unit_memories = [
            region.bytes_at(offsets["parameter", unit.names[0]], unit.nbytes) for unit in units
        ]
        self.values = [[tensors["parameter", name] for name in unit.names] for unit in units]
        names = {p: n for unit in units for n, p in zip(unit.names, unit.parameters, strict=True)}
        self.gradients = {
            parameter: tensors["gradient", name]
            for parameter, name in names.items()
            if ("gradient", name) in tensors
        }
        self.histories = [
            {
                parameter: {
                    key: tensors["history", _history_name(names[parameter], number, key)]
                    for key in kept
                }
                for parameter, kept in history.items()
                if parameter in names
            }
            for number, history in enumerate(histories)
        ]


def _tensors(
    units: Sequence[ParameterUnit], histories: Sequence[History], *, has_gradients: bool
) -> Iterator[tuple[tuple[Kind, int, str], Tensor]]:
    """Yield kind, unit and name of each tensor that needs a place, and a tensor like it."""
    for index, unit in enumerate(units):
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            yield ("parameter", index, name), parameter.detach()
            if parameter.requires_grad and has_gradients:
                yield ("gradient", index, name), parameter.detach()
            for number, history in enumerate(histories):
                for key, tensor in history.get(parameter, {}).items():
                    yield ("history", index, _history_name(name, number, key)), tensor


def _history_name(name: str, number: int, key: str) -> str:
    """Return the name of an item of history; several optimizers may update one parameter."""
    return f"{name}/{number}/{key}"
