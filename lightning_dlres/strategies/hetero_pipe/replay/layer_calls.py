"""Calls of single layers outside of training, whose side effects reach all ranks.

All ranks run the user's code, and each call of a layer runs on one rank that holds it. All others
go on with its result, and with all else that it changes: inputs, attributes of the layer and of
modules outside of the layers, metrics, logs, and the random state.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import cache

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_dlres.core._compat import has_user_hooks
from lightning_dlres.core.wire.tree import Tree, map_tensors
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.pipeline.stage.layer_call import call_with_changes, with_changes_made
from lightning_dlres.strategies.hetero_pipe.replay.metrics import MetricStates
from lightning_dlres.strategies.hetero_pipe.replay.step_effects import StepEffects
from lightning_dlres.strategies.hetero_pipe.replay.trainer_settings import settings_owners
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attribute_changes import (
    unsendable_values,
)
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attributes import UserState


class LayerCalls:
    """The calls of single layers in one run.

    Args:
        module: The LightningModule.
        layers: Its layers.
        metrics: States of the model's metrics.
        device: Device of this rank.
    """

    def __init__(
        self,
        module: LightningModule,
        layers: ModelLayers,
        metrics: MetricStates,
        device: torch.device,
    ) -> None:
        self._module, self._layers = module, layers
        self._metrics, self._device = metrics, device
        # Effects of the call that runs now.
        self._effects: StepEffects | None = None
        self._has_warned = False
        self._state_of = cache(self._new_state)

    def begin(self, layer: int) -> None:
        """Begin a call of a layer; called by all ranks."""
        state = self._state_of(layer)
        self._metrics.register(state.all_metrics())
        self._effects = StepEffects(self._module, self._layers, state, self._metrics, self._device)

    def run(self, layer: int, inputs: Tree, call: Callable[[], Tree]) -> Tree:
        """Run a call on the rank that holds the layer, and return what `finish` needs.

        Args:
            layer: Index of the layer.
            inputs: Inputs of the call.
            call: Makes the call.
        """
        effects = self._begun()
        name, module = self._layers.names[layer], self._layers.modules[layer]
        if not self._has_warned and any(map(has_user_hooks, module.modules())):
            self._has_warned = True
            warnings.warn(
                f"Forward hooks in {name!r} run on the rank of the layer only. What they keep in "
                "attributes of the LightningModule, its modules and callbacks reaches all ranks; "
                "what they keep in other variables does not.",
                stacklevel=2,
            )
        with effects.observed() as run:
            result = call_with_changes(name, inputs, call)
            effects.collect(run)
        return [*result, effects.to_tree(by_parts=False)]

    def finish(self, inputs: Tree, result: Tree) -> Tree:
        """Return the output of the call; called by all ranks.

        Args:
            inputs: Inputs of the call.
            result: What `run` has returned on the rank that made the call.
        """
        effects = self._begun()
        *changes, record = result
        on_device = map_tensors(lambda tensor: tensor.to(self._device), changes)
        output = with_changes_made(inputs, on_device)
        lost = unsendable_values(record["attributes"])
        if lost:
            names = ", ".join(f"{path} ({kind})" for path, kind in sorted(lost.items()))
            warnings.warn(
                f"A layer sets {names}, which cannot be sent: only the rank of the layer has it. "
                "Keep tensors, numbers and strings in attributes, in lists and in dicts.",
                stacklevel=2,
            )
        effects.apply([record], None)
        self._effects = None
        return output

    def _begun(self) -> StepEffects:
        assert self._effects is not None
        return self._effects

    def _new_state(self, layer: int) -> UserState:
        """Return the state that a call of a layer can change."""
        own = self._layers.modules[layer]
        others = [m for index, m in enumerate(self._layers.modules) if index != layer]
        foreign = {inner for other in others for inner in other.modules()}.difference(own.modules())

        def modules() -> Iterator[tuple[str, nn.Module]]:
            return (item for item in self._module.named_modules() if item[1] not in foreign)

        trainer = self._module.trainer
        return UserState(
            modules,
            list(foreign),
            trainer.callbacks,  # type: ignore[attr-defined]
            lambda: settings_owners(trainer),
        )
