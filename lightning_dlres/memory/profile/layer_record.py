"""Record of the modules in one step: their calls, inputs, outputs, memory and side effects.

This is the part of a profile that needs modules, and not only saved storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import (
    ChangeDetector,
    has_forward_hooks,
    is_in_backward,
    is_transforming,
    storage_reference,
)
from lightning_dlres.core.untraced import untraced
from lightning_dlres.memory.execute.recompute import has_repeatable_arguments
from lightning_dlres.memory.execute.side_effects import SideEffectProbe, tensors_in
from lightning_dlres.memory.profile.meter import MemoryTrace
from lightning_dlres.memory.profile.reuse_candidates import ReuseCandidates
from lightning_dlres.memory.profile.step_profile import (
    LayerMemory,
    Region,
    Reuse,
    SavedStorageProfile,
)

# Largest number of autograd nodes to search for the layer that produced a tensor.
_MAX_NODES = 64


class StepClock(Protocol):
    """Clock of a step, which tells the event, the save mark, the seconds and the memory mark.

    `ProfilingPolicy` implements it.
    """

    @property
    def next_event(self) -> int:
        """Return the number of the next event: the next saving or use of a storage."""

    @property
    def save_mark(self) -> int:
        """Return the save mark: the number of events and of repeated savings so far."""

    def clock(self) -> float:
        """Return the seconds of computation so far."""

    def mark_memory(self) -> int:
        """Mark the present time in the trace of the device's memory; return the mark."""

    def own_work(self) -> AbstractContextManager[None]:
        """Context manager of the package's own work, whose seconds and memory do not count."""


@dataclass(eq=False)
class _Call:
    """One call of a module's forward.

    Attributes:
        entry: Event before which it starts.
        first_save_mark: Save mark at its start; `last_save_mark` at its end.
        inputs: (storage reference, bytes of the storage) of each input tensor.
        producers: Names of the layers that produced its inputs.
        probe: Probe for side effects; None: side effects are assumed.
        versions: Versions of the input tensors.
        is_repeatable: Whether a second run can be given the same arguments.
        start: Clock at its start, in seconds.
        memory_mark: Memory mark at its start; `last_memory_mark` at its end.
        seconds: Seconds of computation of the call.
        output_bytes: Bytes of its outputs that require a gradient.
        saved: (index, storage reference, role) of each storage that it saves.
        is_done: Whether its forward has returned a value.
    """

    name: str
    module: nn.Module
    entry: int
    first_save_mark: int
    inputs: list[tuple[Any, int]]
    producers: tuple[str, ...]
    probe: SideEffectProbe | None
    versions: list[ChangeDetector]
    is_repeatable: bool
    start: float = 0.0
    memory_mark: int = 0
    last_memory_mark: int = 0
    last_save_mark: int = 0
    seconds: float = 0.0
    output_bytes: int = 0
    has_side_effects: bool = False
    saved: list[tuple[int, Any, str]] = field(default_factory=list)
    is_done: bool = False

    def peak(self, trace: MemoryTrace) -> int:
        """Return the most bytes on the device during the call."""
        return trace.peak(self.memory_mark, max(self.memory_mark, self.last_memory_mark))

    def workspace(self, trace: MemoryTrace) -> int:
        """Return the temporary bytes of the call."""
        after = trace.at(max(self.memory_mark, self.last_memory_mark))
        return self.peak(trace) - max(trace.at(self.memory_mark), after)


class _Hook:
    """Hook that is active on its own module only.

    A copy of the module, or an unpickled one, gets a hook that does nothing.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _do_nothing

    def __reduce__(self) -> Any:
        return _inactive_hook, ()


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _inactive_hook() -> Callable[..., None]:
    return _do_nothing


class LayerRecord:
    """Record of the modules below a root in one step.

    Args:
        root: Model.
        optimizer_bytes: Returns the bytes of optimizer state of a parameter.
        min_bytes: Inputs with fewer bytes do not count in `Region.inputs`.
        finds_regions: Whether to look for modules that can run again, which takes time.
        finds_reuses: Whether to look for modules that can reuse memory.
    """

    def __init__(
        self,
        root: nn.Module,
        optimizer_bytes: Callable[[nn.Parameter], int] = lambda parameter: 0,
        min_bytes: int = 0,
        finds_regions: bool = True,
        finds_reuses: bool = True,
    ) -> None:
        self._root, self._optimizer_bytes, self._min_bytes = root, optimizer_bytes, min_bytes
        self._finds_regions = finds_regions
        self._candidates = ReuseCandidates() if finds_reuses else None
        # Calls that have not returned, the innermost last.
        self._open: list[_Call] = []
        self._calls: dict[str, list[_Call]] = {}
        self._roles: dict[int, str] = {}
        # Index of each saved storage, by storage reference.
        self._numbers: dict[Any, int] = {}
        # Name of the layer that produced a tensor, by its storage. An autograd node has it in its
        # metadata: holding the node would keep a graph that the step has dropped.
        self._storage_producers: dict[Any, str] = {}
        self._clock: StepClock | None = None
        self._hooked: set[str] = set()

    @contextmanager
    def watching(self, clock: StepClock) -> Iterator[None]:
        """Context manager that records module calls."""
        self._clock, handles = clock, []
        # Modules with user hooks are not recomputed: a second run would call the hooks again.
        self._hooked = {
            name
            for name, module in self._root.named_modules()
            if any(has_forward_hooks(inner) for inner in module.modules())
        }
        for name, module in self._root.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):
                before, after = _Hook(self._enter_hook(name)), _Hook(self._leave_hook(name))
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(
                    module.register_forward_hook(after, with_kwargs=True, always_call=True)
                )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._open.clear()
            self._storage_producers.clear()

    def record_save(self, tensor: Tensor, number: int) -> tuple[str, str]:
        """Record a new saved storage; return the module that saves it, and its role there."""
        reference = storage_reference(tensor)
        self._numbers[reference] = number
        self.record_save_again(tensor, number)
        if not self._open:
            return "", "internal"
        call = self._open[-1]
        role = "input" if any(r == reference for r, _ in call.inputs) else "internal"
        call.saved.append((number, reference, role))
        return call.name, role

    def record_save_again(self, tensor: Tensor, number: int) -> None:
        """Record that another tensor over the same storage is saved."""
        if self._candidates is not None:
            self._candidates.record(self._open[-1].name if self._open else "", tensor, number)

    def with_roles(
        self, storages: Sequence[SavedStorageProfile]
    ) -> tuple[SavedStorageProfile, ...]:
        """Return the storages with role "output" where a module has returned the storage."""
        return tuple(
            msgspec.structs.replace(storage, role=self._roles.get(number, storage.role))
            for number, storage in enumerate(storages)
        )

    def _enter_hook(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            assert self._clock is not None
            if not torch.is_grad_enabled() or is_in_backward():
                # Without gradients nothing is saved. In backward, a checkpoint recomputes, and a
                # record would keep its tensors alive.
                return
            with self._clock.own_work():
                self._enter(name, module, args, kwargs)
                call = self._open[-1]
            # Last, so that they are those of the moment at which the forward starts.
            call.start, call.memory_mark = self._clock.clock(), self._clock.mark_memory()

        return before

    def _leave_hook(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            assert self._clock is not None
            if not any(call.name == name for call in self._open) or is_in_backward():
                return
            # Calls above it on the stack ended in an exception that user code has caught.
            while self._open:
                call = self._open.pop()
                if call.name == name:
                    break
            call.seconds = self._clock.clock() - call.start
            call.last_memory_mark = self._clock.mark_memory()
            with self._clock.own_work():
                self._leave(call, output)

        return after

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record a call that begins."""
        assert self._clock is not None
        tensors = list(tensors_in((args, kwargs)))
        # Under a transform no module can run again, and parameters may be unreadable.
        finds_side_effects = self._finds_regions and not is_transforming()
        call = _Call(
            name=name,
            module=module,
            entry=self._clock.next_event,
            first_save_mark=self._clock.save_mark,
            inputs=[(storage_reference(t), t.untyped_storage().nbytes()) for t in tensors],
            producers=self._producers_of(tensors),
            probe=SideEffectProbe(module) if finds_side_effects else None,
            versions=[ChangeDetector(tensor) for tensor in tensors],
            is_repeatable=has_repeatable_arguments(args, kwargs),
        )
        self._calls.setdefault(name, []).append(call)
        self._open.append(call)
        if self._candidates is not None:
            self._candidates.enter(name, module, args, kwargs)

    def _leave(self, call: _Call, output: Any) -> None:
        """Record a call that ends; its output is None if the forward raised an exception."""
        assert self._clock is not None
        call.last_save_mark = self._clock.save_mark
        call.has_side_effects = call.probe is None or call.probe.has_side_effects()
        call.is_done = output is not None
        outputs = list(tensors_in(output))
        references = [storage_reference(t) for t in outputs]
        for number, reference, role in call.saved:
            if role == "internal" and reference in references:
                self._roles[number] = "output"
        call.output_bytes = sum(t.nbytes for t in outputs if t.requires_grad)
        if not any(True for _ in call.module.children()):
            self._record_producer(outputs, references, call.name)

    def _record_producer(self, outputs: list[Tensor], references: list[Any], name: str) -> None:
        for tensor, reference in zip(outputs, references, strict=True):
            self._storage_producers[reference] = name
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn)[self] = name

    def _producers_of(self, tensors: list[Tensor]) -> tuple[str, ...]:
        """Return the layers that produced tensors, even if operations outside of layers follow."""
        # A dict keeps the order, and drops repetitions.
        producers: dict[str, None] = {}
        for tensor in tensors:
            producer = self._storage_producers.get(storage_reference(tensor))
            if producer is not None:
                producers[producer] = None
                continue
            nodes, visited = [tensor.grad_fn], 0
            while nodes and visited < _MAX_NODES:
                node = nodes.pop()
                visited += 1
                if node is None:
                    continue
                if self in _metadata(node):
                    producers[_metadata(node)[self]] = None
                else:
                    nodes += [earlier for earlier, _ in node.next_functions]
        return tuple(producers)

    def regions(
        self,
        storages: Sequence[SavedStorageProfile],
        marks: Sequence[tuple[int, int]],
        trace: MemoryTrace,
    ) -> tuple[Region, ...]:
        """Return the modules that can run again in backward.

        Args:
            storages: Storages of the step.
            marks: Save marks of the first and the latest saving of each storage.
            trace: Trace of the device's memory.
        """
        by_storages: dict[tuple[int, ...], Region] = {}
        for calls in self._calls.values():
            call = calls[0]
            if len(calls) != 1 or not call.is_done or call.has_side_effects:
                continue
            # Inputs that changed in place would change the result of a second run. Torch's
            # checkpoint refuses only those that are positional arguments.
            changed = any(v.now != v.saved for v in call.versions)
            if changed or not call.is_repeatable or call.name in self._hooked:
                continue
            inputs = {reference for reference, _ in call.inputs}
            saved_inputs = {self._numbers[r] for r in inputs if r in self._numbers}
            saved_inside = tuple(
                number
                for number, (first, last) in enumerate(marks)
                if call.first_save_mark < first
                and last <= call.last_save_mark
                and number not in saved_inputs
                and storages[number].uses
                and storages[number].saved >= call.entry
            )
            if not saved_inside:
                continue
            # A single recomputation restores all of them, so backward must not need any of them
            # before the last one is saved.
            last_saved = max(storages[number].saved for number in saved_inside)
            if min(storages[number].uses[0] for number in saved_inside) < last_saved:
                continue
            unsaved_inputs = [size for r, size in call.inputs if r not in self._numbers]
            region = Region(
                layer=call.name,
                storages=saved_inside,
                seconds=call.seconds,
                entry=call.entry,
                inputs=sum(size for size in unsaved_inputs if size >= self._min_bytes),
                workspace=call.peak(trace) - trace.at(call.memory_mark),
            )
            # Nested modules can save the same storages: choose the innermost one, the fastest.
            earlier = by_storages.get(saved_inside)
            if earlier is None or region.seconds <= earlier.seconds:
                by_storages[saved_inside] = region
        return tuple(by_storages.values())

    def reuses(self, storages: Sequence[SavedStorageProfile], rate: float) -> tuple[Reuse, ...]:
        """Return the possible reuses.

        Args:
            storages: Storages of the step.
            rate: Bytes per second that the device copies within its memory.
        """
        return () if self._candidates is None else tuple(self._candidates.reuses(storages, rate))

    def layers(
        self, storages: Sequence[SavedStorageProfile], trace: MemoryTrace
    ) -> tuple[LayerMemory, ...]:
        """Return the modules without children, in the order in which they ran."""
        layers = []
        for name, calls in self._calls.items():
            module = calls[0].module
            if any(True for _ in module.children()):
                continue
            saved = [storage for storage in storages if storage.layer == name]
            parameters = list(module.parameters(recurse=False))
            sizes = [p.numel() * p.element_size() for p in parameters]
            trained = [s for p, s in zip(parameters, sizes, strict=True) if p.requires_grad]
            roles = {storage.role for storage in saved if storage.uses}
            layers.append(
                LayerMemory(
                    name=name,
                    kind=type(module).__name__,
                    parameters=sum(sizes),
                    gradients=sum(trained),
                    optimizer_state=sum(self._optimizer_bytes(p) for p in parameters),
                    feature_maps=sum(storage.nbytes for storage in saved),
                    feature_map_gradients=sum(call.output_bytes for call in calls),
                    workspace=max(call.workspace(trace) for call in calls),
                    needs=tuple(sorted(roles)),
                    after=tuple(dict.fromkeys(n for call in calls for n in call.producers)),
                )
            )
        return tuple(layers)


def _metadata(node: Any) -> dict[Any, Any]:
    """Return the metadata of an autograd node; torch's annotation takes it for a method."""
    metadata: dict[Any, Any] = node.metadata
    return metadata
