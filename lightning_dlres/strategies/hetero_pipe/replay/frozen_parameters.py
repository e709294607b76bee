"""Changes of a training step to frozen parameters that belong to no layer.

Examples are the centres of a codebook, which no optimizer changes. As for buffers, each run of the
step works on copies, and every rank applies the values that one of the runs left. Large parameters
are not copied: a step that changes one is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import same_tensors

# Bytes of the largest parameter that is copied and compared for each run of a step.
_COPIED_BYTES = 1 << 20


class NonPipelinedFrozenParameters:
    """The frozen parameters of a model that belong to no layer.

    Make a new instance for every step: it looks up the modules only once.

    Args:
        layers: The model's layers.
    """

    def __init__(self, layers: ModelLayers) -> None:
        inside = layers.layer_parameters
        self._places: dict[str, tuple[nn.Module, str, nn.Parameter]] = {}
        for path, module in layers.non_pipelined_modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                # Parameters of other classes may not be made from a tensor alone.
                is_plain = type(parameter) is nn.Parameter and not parameter.is_meta
                if is_plain and not parameter.requires_grad and parameter not in inside:
                    self._places[f"{path}.{key}" if path else key] = module, key, parameter
        self._versions: dict[str, int] = {}

    def isolate(self) -> None:
        """Put copies in the place of the parameters; one with two names gets one copy."""
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for name, (module, key, parameter) in self._places.items():
            if parameter.numel() * parameter.element_size() > _COPIED_BYTES:
                self._versions[name] = parameter._version
                continue
            if parameter not in copies:
                copies[parameter] = nn.Parameter(parameter.detach().clone(), requires_grad=False)
            setattr(module, key, copies[parameter])

    def changed_in(self, modules: Collection[nn.Module]) -> list[str]:
        """Return the names of some modules' parameters that have changed since `isolate`."""
        return [name for name in self.diff() if self._places[name][0] in modules]

    def diff(self) -> dict[str, Tree]:
        """Return the new values of parameters that have changed since `isolate`, by name.

        Raises:
            UnsupportedStepError: If a large parameter has changed.
        """
        changes: dict[str, Tree] = {}
        for name, (module, key, parameter) in self._places.items():
            if name not in self._versions:
                now = getattr(module, key)
                if not same_tensors(now.data, parameter.data):
                    changes[name] = now.detach().clone()
            elif parameter._version != self._versions[name]:
                raise UnsupportedStepError(
                    f"training_step must not change the parameter {name!r}, which has more than "
                    f"{_COPIED_BYTES >> 20} MiB, got a change. Change it in on_train_batch_end, "
                    "which runs on all ranks, or register it as a buffer."
                )
        return changes

    def restore(self) -> None:
        """Put the parameters back."""
        for module, key, parameter in self._places.values():
            if getattr(module, key) is not parameter:
                setattr(module, key, parameter)

    def apply(self, changes: Mapping[str, Tree]) -> None:
        """Give the parameters the values of a `diff`."""
        with torch.no_grad():
            for name, value in changes.items():
                self._places[name][2].copy_(value)
