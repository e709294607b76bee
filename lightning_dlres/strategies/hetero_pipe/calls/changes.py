"""Changes of user code's state that a training step makes before it calls the pipelined module.

The module's own code and its layers run on all ranks, and read attributes of modules and what these
refer to. Other ranks get the changes of a step after it, so the module would read old values.
`LayerSettings` compares the attributes of the layers themselves; here is all other state.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn

from lightning_dlres.pipeline.execute.layer_settings import change_error
from lightning_dlres.pipeline.execute.layer_tensors import LayerTensors
from lightning_dlres.strategies.hetero_pipe.replay.step_effects import IsolatedRun, StepEffects
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attribute_changes import name_of
from lightning_dlres.strategies.hetero_pipe.replay.user_state.attributes import (
    IsolatedState,
    UserState,
)
from lightning_dlres.strategies.hetero_pipe.replay.user_state.reading import Reading
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import (
    ObjectState,
    is_library_class,
)


class StateOfCall:
    """State of user code that the pipelined module can read.

    Args:
        modules: The modules whose code or attributes a call uses, by name.
        layers: The layers among them.
        state: The state that every run of the step records.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, nn.Module]],
        layers: Collection[nn.Module],
        state: UserState,
    ) -> None:
        layer_modules = {inner for layer in layers for inner in layer.modules()}
        self._modules = {module for _, module in modules} - layer_modules
        states = UserState(lambda: modules).read().states
        # A weight to which a weak reference exists cannot be moved: recurrent modules have a list
        # of them, which must not outlive its place there.
        states = [one for one in states if weakref.ref not in one.types]
        states += _configurations(modules)
        # The objects are kept, so that no other object gets one of these ids.
        self._owners = {id(one.owner): one.owner for one in states}
        recorded = {id(one.owner) for one in state.read().states} | set(map(id, layer_modules))
        self._unrecorded = [one for one in states if id(one.owner) not in recorded]

    def begin(self) -> IsolatedState:
        """Return the state at the start of a step that no run of the step records."""
        self._unrecorded = [
            one if one.is_surely_unchanged() else ObjectState.read(one.path, one.owner, one.kind)
            for one in self._unrecorded
        ]
        return IsolatedState(
            Reading(self._unrecorded, (), None), LayerTensors(), keeps_changes=True
        )

    def change(self, before: IsolatedState, effects: StepEffects, run: IsolatedRun) -> str | None:
        """Return an error message that names a change since the start of a step; None without.

        Args:
            before: The result of `begin`.
            effects: Side effects of the step.
            run: The run of the step, up to its call.
        """
        names = [
            name_of(path, change)
            for state in (before, run.state)
            for path, change in state.diff_so_far().items()
            if id(_owner(path, state)) in self._owners
        ]
        names += map(repr, effects.tensors_changed_in(self._modules))
        return change_error(f"{names[0]} before it calls the module") if names else None


def _configurations(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[ObjectState]:
    """Yield the settings of a library's objects that modules refer to.

    An example is a model's configuration in transformers. The user's state leaves them out, because
    a library may write to its own objects in any call.
    """
    seen: set[int] = set()
    for name, module in modules:
        for attribute, value in vars(module).items():
            if id(value) in seen or not is_library_class(type(value)):
                continue
            seen.add(id(value))
            if hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module, Tensor)):
                path = ".".join(filter(None, (name, attribute)))
                settings = ObjectState.read(path, value, "settings")
                yield settings
                for inner, items in settings.children():
                    yield ObjectState.read(inner, items, "list")


def _owner(path: str, state: IsolatedState) -> object:
    """Return the object of a path; None for shared new values, which are no object's change."""
    return next((one.owner for one in state.reading.states if one.path == path), None)
