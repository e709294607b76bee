"""Attributes of layers, which change on the ranks of the layers only.

A layer may keep a flag of its first call, a moving average or a list in plain attributes. Other
ranks get these together with its weights: for evaluation on the whole model, and at a run's end.
"""

from __future__ import annotations

import re
import warnings
from functools import partial

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_dlres.core.comm.mailbox import Channel, Mailbox
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attribute_changes import (
    unsendable_values,
)
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attributes import (
    IsolatedState,
    UserState,
)


class LayerAttributes:
    """The attributes of all layers, beside their parameters and buffers.

    Made at the start of a run, when all ranks have the same attributes. All ranks call its methods
    together.

    Args:
        module: The LightningModule.
        layers: Its layers.
        plan: Plan of the run.
        mailbox: Mailbox for messages between the ranks.
        device: Device of this rank.
    """

    def __init__(
        self,
        module: LightningModule,
        layers: ModelLayers,
        plan: PipelinePlan,
        mailbox: Mailbox,
        device: torch.device,
    ) -> None:
        self._mailbox, self._device = mailbox, device
        # A module that several stages run counts on the first of them.
        stages: dict[nn.Module, int] = {}
        for index, layer in enumerate(layers.modules):
            for inner in layer.modules():
                stages.setdefault(inner, plan.stage_of(index))
        named = [
            [(name, inner) for name, inner in module.named_modules() if stages.get(inner) == stage]
            for stage in range(len(plan.split))
        ]
        self._names = [[name for name, _ in own] for own in named]
        # Objects in attributes count, but not modules: each has its own place.
        self._states = [UserState(partial(list, own), [module]) for own in named]
        self._sources = list(plan.replicas[0])
        self._observed = {
            stage: self._states[stage].observe()
            for stage, source in enumerate(self._sources)
            if source == mailbox.rank
        }
        self._lent: list[IsolatedState] = []
        self._reported: set[str] = set()

    def lend(self) -> None:
        """Give every rank the present attributes of all layers, until `take_back`."""
        self._lent = [
            state.isolate()
            for stage, state in enumerate(self._states)
            if stage not in self._observed
        ]
        self.share()

    def take_back(self) -> None:
        """Give each rank the attributes of other ranks' layers that it had before `lend`."""
        for isolated in self._lent:
            isolated.restore()
        self._lent = []

    def share(self) -> None:
        """Give every rank the present attributes of all layers.

        A module with an attribute that cannot be sent stays as it was, which a warning says: a flag
        without the function that it announces would be worse.
        """
        lost: dict[str, str] = {}
        for stage, source in enumerate(self._sources):
            changes = None
            if stage in self._observed:
                changes = map_tensors(Tensor.cpu, self._observed[stage].diff_so_far())
            changes = self._mailbox.broadcast(
                source, Channel.STATE, ("attributes", stage), changes, "attributes of layers"
            )
            lost |= unsendable_values(changes)
            if stage not in self._observed:
                own = map_tensors(lambda tensor: tensor.to(self._device), changes)
                self._states[stage].apply(self._of_sendable_modules(own, stage), {})
        self._warn_of(lost)

    def _of_sendable_modules(self, changes: Tree, stage: int) -> Tree:
        """Return the changes in modules of which everything could be sent."""
        owner = {path: self._module_of(path, stage) for path in changes}
        lost = {owner[path] for path in changes if unsendable_values({path: changes[path]})}
        # Changes of several modules may refer to the shared values.
        return {
            path: change
            for path, change in changes.items()
            if change[0] == "shared" or owner[path] not in lost
        }

    def _module_of(self, path: str, stage: int) -> str:
        """Return the name of the module that has an attribute, or holds an object in one."""
        starts = [n for n in self._names[stage] if re.match(rf"{re.escape(n)}(\W|$)", path)]
        return max(starts, key=len, default="")

    def _warn_of(self, lost: dict[str, str]) -> None:
        new = {name: kind for name, kind in lost.items() if name not in self._reported}
        self._reported |= new.keys()
        if new and self._mailbox.rank == 0:
            names = ", ".join(f"{name} ({kind})" for name, kind in sorted(new.items()))
            warnings.warn(
                f"Layers have set {names}, which cannot be sent: the attributes of these modules "
                "change on their own ranks only, not in evaluation on the whole model, nor on all "
                "ranks after the run. Keep tensors, numbers and strings in attributes, in lists "
                "and in dicts.",
                stacklevel=2,
            )
