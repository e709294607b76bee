"""Changes of a training step to buffers that belong to no layer.

Examples are a running centre, a queue, and the statistics of a norm before or after the pipelined
module. As for attributes, each run of the step works on copies of the values before the step. After
the last run, every rank applies the values that one of the runs left.

The changes of a run are a dict from the name of a buffer to its change. The change is None if the
run has removed the buffer. Otherwise it is a list `[is persistent, encoding, ...]`. The encoding
says how the receiver makes the buffer:

- "none": the buffer is None.
- "new", value: a new tensor.
- "kept", name, value: the tensor that the buffer of this name had before the step. The value is
  written into it, since user code may hold references to it.
- "same", name: the tensor that the buffer of this name has after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import registered_buffers
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.strategies.hetero_pipe.replay.user_state.user_objects import same_tensors

# The encodings; the module's docstring describes them.
_NONE = "none"
_NEW = "new"
_KEPT = "kept"
_SAME = "same"


@dataclass(frozen=True)
class BufferState:
    """A buffer at one point in time.

    Attributes:
        tensor: The tensor itself, not a copy; None for a buffer that is registered without one.
        is_persistent: True if the state dict has the buffer.
    """

    tensor: Tensor | None
    is_persistent: bool

    def equals(self, other: BufferState) -> bool:
        """Return True if both have the same values, or None, and the same persistence."""
        if self.is_persistent != other.is_persistent:
            return False
        if self.tensor is None or other.tensor is None:
            return self.tensor is other.tensor
        # Compared by value: a norm changes its running statistics without raising the version
        # counter.
        return same_tensors(self.tensor, other.tensor)


# The buffers by name, in the order of their modules.
Buffers = dict[str, BufferState]


class NonPipelinedBuffers:
    """The buffers of a model that belong to no layer.

    A buffer that several modules share has one name per module. Make a new instance for every step:
    it looks up the modules only once, and user code may add some between steps.

    Args:
        layers: The model's layers.
        device: Device of this rank, for tensors that `apply` makes.
    """

    def __init__(self, layers: ModelLayers, device: torch.device) -> None:
        self._device = device
        self._modules = dict(layers.non_pipelined_modules())
        # Name and copy of each tensor of the latest `isolate`, by the id of the copy. Holding the
        # copy keeps Python from giving its id to another object.
        self._isolated: dict[int, tuple[str, Tensor]] = {}

    def snapshot(self) -> Buffers:
        """Return the buffers by name."""
        states = {}
        for path, module in self._modules.items():
            buffers, not_persistent = registered_buffers(module)
            for key, tensor in buffers.items():
                name = f"{path}.{key}" if path else key
                states[name] = BufferState(tensor, key not in not_persistent)
        return states

    def isolate(
        self, before: Buffers, shared_copy: Callable[[Tensor], Tensor | None] = lambda _: None
    ) -> None:
        """Replace the buffers of a snapshot by copies. A buffer with two names gets one copy, so
        that it stays shared.

        Args:
            before: The snapshot.
            shared_copy: Returns a copy of a buffer in memory that other copies share; None for a
                buffer with memory of its own.
        """
        firsts = _first_names(before)
        copies = {
            name: _copy(state.tensor, shared_copy(state.tensor))
            for name, state in before.items()
            if state.tensor is not None and firsts[name] == name
        }
        self._isolated = {id(copy): (name, copy) for name, copy in copies.items()}
        for name, first in firsts.items():
            self._set(name, BufferState(copies[first], before[name].is_persistent))

    def observe(self, before: Buffers) -> Buffers:
        """Begin a run that keeps its changes of the buffers; return the snapshot for `diff`."""
        tensors = {name: state.tensor for name, state in before.items()}
        self._isolated = {id(t): (name, t) for name, t in tensors.items() if t is not None}
        copies = {id(t): t.detach().clone() for t in tensors.values() if t is not None}
        return {
            name: BufferState(copies.get(id(state.tensor)), state.is_persistent)
            for name, state in before.items()
        }

    def diff(self, before: Buffers) -> dict[str, Tree]:
        """Return the changes since the snapshot, with copies of the tensors; see the module's
        docstring for their form."""
        now = self.snapshot()
        changes: dict[str, Tree] = {name: None for name in before if name not in now}
        firsts_before, firsts = _first_names(before), _first_names(now)
        for name, state in now.items():
            # A tensor that two names share from now on has changed for the second name, even with
            # equal values: later writes through one name must show through the other.
            is_shared_alike = firsts.get(name) == firsts_before.get(name)
            if name not in before or not is_shared_alike or not state.equals(before[name]):
                changes[name] = self._change(name, state, firsts)
        return changes

    def changed_in(self, modules: Collection[nn.Module], before: Buffers) -> list[str]:
        """Return the names of some modules' buffers that have changed since the snapshot."""
        now = self.snapshot()
        names = [name for name in before | now if self._place(name)[0] in modules]
        return [
            name
            for name in names
            if not (name in before and name in now and now[name].equals(before[name]))
        ]

    def restore(self, before: Buffers) -> None:
        """Put the buffers of a snapshot back, and remove all others."""
        keys: dict[str, list[str]] = {path: [] for path in self._modules}
        for path, _, key in (name.rpartition(".") for name in before):
            keys[path].append(key)
        for path, module in self._modules.items():
            buffers, not_persistent = registered_buffers(module)
            # Start anew, so that the order is restored too: the state dict shows it. The buffers of
            # a ScriptModule cannot be cleared, but have the same names forever.
            if list(buffers.keys()) != keys[path]:
                buffers.clear()
                not_persistent.clear()
        for name, state in before.items():
            self._set(name, state)

    def apply(self, changes: Mapping[str, Tree]) -> None:
        """Give the buffers the values of a `diff`."""
        before = self.snapshot()
        for name, change in changes.items():
            if change is None:
                self._remove(name)
                continue
            is_persistent, *encoded = change
            self._set(name, BufferState(self._decoded(encoded, before), is_persistent))

    def _change(self, name: str, state: BufferState, firsts: Mapping[str, str]) -> Tree:
        if state.tensor is None:
            return [state.is_persistent, _NONE]
        if firsts[name] != name:
            return [state.is_persistent, _SAME, firsts[name]]
        value = state.tensor.detach().clone()
        if id(state.tensor) in self._isolated:
            origin, _ = self._isolated[id(state.tensor)]
            return [state.is_persistent, _KEPT, origin, value]
        return [state.is_persistent, _NEW, value]

    def _decoded(self, encoded: Tree, before: Buffers) -> Tensor | None:
        encoding, *content = encoded
        if encoding == _NONE:
            return None
        if encoding == _SAME:
            module, key = self._place(content[0])
            return registered_buffers(module)[0][key]
        value: Tensor = content[-1]
        kept = before[content[0]].tensor if encoding == _KEPT else None
        # User code may have given the tensor another shape or dtype.
        if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
            return value.to(self._device, copy=True)
        with torch.no_grad():
            return kept.copy_(value)

    def _place(self, name: str) -> tuple[nn.Module, str]:
        path, _, key = name.rpartition(".")
        return self._modules[path], key

    def _set(self, name: str, state: BufferState) -> None:
        module, key = self._place(name)
        buffers, not_persistent = registered_buffers(module)
        buffers[key] = state.tensor
        if state.is_persistent:
            not_persistent.discard(key)
        else:
            not_persistent.add(key)

    def _remove(self, name: str) -> None:
        module, key = self._place(name)
        buffers, not_persistent = registered_buffers(module)
        del buffers[key]
        not_persistent.discard(key)


def _copy(tensor: Tensor, shared: Tensor | None) -> Tensor:
    return tensor.detach().clone() if shared is None else shared


def _first_names(buffers: Buffers) -> dict[str, str]:
    """Return, for each buffer with a tensor, the first name of this tensor."""
    first_by_id: dict[int, str] = {}
    return {
        name: first_by_id.setdefault(id(state.tensor), name)
        for name, state in buffers.items()
        if state.tensor is not None
    }
