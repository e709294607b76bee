"""Output of a block without its data, from which a run without data makes it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lightning_dlres.core.wire.nested import named_tensors_in
from lightning_dlres.core.wire.tree import Tree, tensors_of, unflatten
from lightning_dlres.pipeline.capture.placeholders.skeleton import Skeleton


@dataclass(frozen=True)
class BlockOutput:
    """Output of a block, without data.

    Attributes:
        skeleton: Skeleton of the output.
        arguments: Tensors that are arguments of the block: their positions in the output, and their
            places among the arguments, which have other positions where an argument is None.
    """

    skeleton: Skeleton
    arguments: dict[int, str]

    @classmethod
    def of(cls, output: Tree, args: Any, kwargs: Any) -> BlockOutput:
        """Return the description of an output.

        Raises:
            ConfigError: If the output has an object that cannot be sent.
        """
        places = {id(tensor): place for place, tensor in named_tensors_in((args, kwargs))}
        tensors = enumerate(tensors_of(output))
        same = {at: places[id(tensor)] for at, tensor in tensors if id(tensor) in places}
        return cls(Skeleton.of(output), same)

    def made_with(self, args: Any, kwargs: Any) -> Tree:
        """Return an output of zeros, and of these arguments."""
        tensors = [
            torch.zeros(shape, dtype=getattr(torch, dtype))
            for shape, dtype, _ in self.skeleton.tensors
        ]
        arguments = dict(named_tensors_in((args, kwargs)))
        for at, place in self.arguments.items():
            tensors[at] = arguments.get(place, tensors[at])
        return unflatten(self.skeleton.structure, tensors)
