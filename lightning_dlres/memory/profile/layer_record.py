"""Which module runs, what goes into it and comes out of it, and what its forward takes: the part of
a profile that needs modules (Method A, A1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor, nn

from lightning_dlres.core._compat import (
    Version,
    has_forward_hooks,
    is_in_backward,
    is_transforming,
    storage_reference,
)
from lightning_dlres.memory.execute.recompute import comes_back
from lightning_dlres.memory.execute.side_effects import Traces, tensors_in
from lightning_dlres.memory.profile.meter import MemoryTrace
from lightning_dlres.memory.profile.readers import Readers
from lightning_dlres.memory.profile.step_profile import Layer, Region, Reuse, SavedStorageProfile

# So many steps of autograd's graph lie at most between a module's input and who made it.
_MOST_NODES = 64


class LayerClock(Protocol):
    """What a recorder tells."""

    @property
    def place(self) -> int: ...

    @property
    def mark(self) -> int: ...

    def clock(self) -> float: ...

    def mark_memory(self) -> int: ...


@dataclass(eq=False)
class _Call:
    """One call of a module's forward."""

    name: str
    module: nn.Module
    entry: int
    first_mark: int
    began: float
    memory_mark: int
    inputs: list[tuple[Any, int]]
    after: tuple[str, ...]
    before: Traces | None
    versions: list[Version]
    takes_plain_arguments: bool
    last_memory_mark: int = 0
    last_mark: int = 0
    seconds: float = 0.0
    output_bytes: int = 0
    leaves_traces: bool = False
    saved: list[tuple[int, Any, str]] = field(default_factory=list)
    is_done: bool = False

    def peak(self, trace: MemoryTrace) -> int:
        """Return the most bytes on the device meanwhile."""
        return trace.peak(self.memory_mark, max(self.memory_mark, self.last_memory_mark))

    def workspace(self, trace: MemoryTrace) -> int:
        """Return the bytes that it takes and gives back."""
        after = trace.at(max(self.memory_mark, self.last_memory_mark))
        return self.peak(trace) - max(trace.at(self.memory_mark), after)


class _Hook:
    """A hook that stays with its module: a copy of that, or an unpickled one, has one that does
    nothing."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._call(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        return _inert, ()


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _inert() -> Callable[..., None]:
    return _nothing


class LayerRecord:
    """Follows the modules below a root through one step.

    Args:
        root: the model.
        history: returns the bytes that the optimizer keeps for a parameter.
        min_bytes: smaller inputs cost nothing to keep.
        finds_regions: whether modules that can run again are looked for, which takes time.
        finds_reuses: whether modules that can do with less memory are looked for.
    """

    def __init__(
        self,
        root: nn.Module,
        history: Callable[[nn.Parameter], int] = lambda parameter: 0,
        min_bytes: int = 0,
        finds_regions: bool = True,
        finds_reuses: bool = True,
    ) -> None:
        self._root, self._history, self._min_bytes = root, history, min_bytes
        self._finds_regions = finds_regions
        self._readers = Readers() if finds_reuses else None
        self._open: list[_Call] = []
        self._calls: dict[str, list[_Call]] = {}
        self._roles: dict[int, str] = {}
        self._known: dict[Any, int] = {}
        self._makers: dict[Any, str] = {}
        self._storage_makers: dict[Any, str] = {}
        self._clock: LayerClock | None = None
        self._hooked: set[str] = set()

    @contextmanager
    def watching(self, clock: LayerClock) -> Iterator[None]:
        """Inside of it, modules are followed."""
        self._clock, handles = clock, []
        # What hooks do would be done again.
        self._hooked = {
            name
            for name, module in self._root.named_modules()
            if any(has_forward_hooks(inner) for inner in module.modules())
        }
        for name, module in self._root.named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):
                before, after = _Hook(self._entering(name)), _Hook(self._leaving(name))
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
            self._makers.clear()
            self._storage_makers.clear()

    def saving(self, tensor: Tensor, number: int) -> tuple[str, str]:
        """Note a saved_storage; return the module that saves it, and what it is to that."""
        reference = storage_reference(tensor)
        self._known[reference] = number
        self.saving_again(tensor, number)
        if not self._open:
            return "", "internal"
        call = self._open[-1]
        role = "input" if any(r == reference for r, _ in call.inputs) else "internal"
        call.saved.append((number, reference, role))
        return call.name, role

    def saving_again(self, tensor: Tensor, number: int) -> None:
        """Note that another tensor over the same saved_storage is saved."""
        if self._readers is not None:
            self._readers.note(self._open[-1].name if self._open else "", tensor, number)

    def with_roles(self, data: Sequence[SavedStorageProfile]) -> tuple[SavedStorageProfile, ...]:
        """Return the data with what is known only once their module has returned."""
        return tuple(
            msgspec.structs.replace(saved_storage, role=self._roles.get(number, saved_storage.role))
            for number, saved_storage in enumerate(data)
        )

    def _entering(self, name: str) -> Callable[..., None]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            assert self._clock is not None
            if not torch.is_grad_enabled() or is_in_backward():
                # Nothing is saved, or a checkpoint runs again: what it makes must not be held.
                return
            tensors = list(tensors_in((args, kwargs)))
            # Under a transform nothing can run again, nor can all parameters be read.
            finds_traces = self._finds_regions and not is_transforming()
            call = _Call(
                name=name,
                module=module,
                entry=self._clock.place,
                first_mark=self._clock.mark,
                began=self._clock.clock(),
                memory_mark=self._clock.mark_memory(),
                inputs=[(storage_reference(t), t.untyped_storage().nbytes()) for t in tensors],
                after=self._makers_of(tensors),
                before=Traces(module) if finds_traces else None,
                versions=[Version(tensor) for tensor in tensors],
                takes_plain_arguments=comes_back(args, kwargs),
            )
            self._calls.setdefault(name, []).append(call)
            self._open.append(call)
            if self._readers is not None:
                self._readers.enter(name, module, args, kwargs)

        return before

    def _leaving(self, name: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            assert self._clock is not None
            if not any(call.name == name for call in self._open) or is_in_backward():
                return
            # Those above it have ended in an exception that somebody has caught.
            while self._open:
                call = self._open.pop()
                if call.name == name:
                    break
            call.seconds = self._clock.clock() - call.began
            call.last_mark = self._clock.mark
            call.last_memory_mark = self._clock.mark_memory()
            call.leaves_traces = call.before is None or call.before.are_left()
            call.is_done = output is not None
            outputs = list(tensors_in(output))
            references = [storage_reference(t) for t in outputs]
            for number, reference, role in call.saved:
                if role == "internal" and reference in references:
                    self._roles[number] = "output"
            call.output_bytes = sum(t.nbytes for t in outputs if t.requires_grad)
            if not any(True for _ in module.children()):
                self._note_maker(outputs, references, name)

        return after

    def _note_maker(self, outputs: list[Tensor], references: list[Any], name: str) -> None:
        for tensor, reference in zip(outputs, references, strict=True):
            self._storage_makers[reference] = name
            if tensor.grad_fn is not None:
                self._makers[tensor.grad_fn] = name

    def _makers_of(self, tensors: list[Tensor]) -> tuple[str, ...]:
        """Return the modules without children from which tensors come, through operations that
        belong to none."""
        found: dict[str, None] = {}
        for tensor in tensors:
            maker = self._storage_makers.get(storage_reference(tensor))
            if maker is not None:
                found[maker] = None
                continue
            nodes, seen = [tensor.grad_fn], 0
            while nodes and seen < _MOST_NODES:
                node = nodes.pop()
                seen += 1
                if node in self._makers:
                    found[self._makers[node]] = None
                elif node is not None:
                    nodes += [above for above, _ in node.next_functions]
        return tuple(found)

    def regions(
        self,
        data: Sequence[SavedStorageProfile],
        marks: Sequence[tuple[int, int]],
        trace: MemoryTrace,
    ) -> tuple[Region, ...]:
        """Return the modules that can run again.

        Args:
            data: of the step.
            marks: when each was saved first and last.
            trace: the device's memory.
        """
        found: dict[tuple[int, ...], Region] = {}
        for calls in self._calls.values():
            call = calls[0]
            if len(calls) != 1 or not call.is_done or call.leaves_traces:
                continue
            # torch's checkpoint sees a change of positional tensors only, and calls it an error.
            changed = any(v.now != v.saved for v in call.versions)
            if changed or not call.takes_plain_arguments or call.name in self._hooked:
                continue
            inputs = {reference for reference, _ in call.inputs}
            given = {self._known[r] for r in inputs if r in self._known}
            inside = tuple(
                number
                for number, (first, last) in enumerate(marks)
                if call.first_mark < first
                and last <= call.last_mark
                and number not in given
                and data[number].uses
                and data[number].saved >= call.entry
            )
            if not inside:
                continue
            last_saved = max(data[number].saved for number in inside)
            if min(data[number].uses[0] for number in inside) < last_saved:
                continue
            unknown = [size for r, size in call.inputs if r not in self._known]
            region = Region(
                layer=call.name,
                data=inside,
                seconds=call.seconds,
                entry=call.entry,
                inputs=sum(size for size in unknown if size >= self._min_bytes),
                workspace=call.peak(trace) - trace.at(call.memory_mark),
            )
            # Of modules that save the same, the innermost is the least work.
            if inside not in found or region.seconds <= found[inside].seconds:
                found[inside] = region
        return tuple(found.values())

    def reuses(self, data: Sequence[SavedStorageProfile], rate: float) -> tuple[Reuse, ...]:
        """Return the modules that can do with less memory.

        Args:
            data: of the step.
            rate: bytes a second that the device copies.
        """
        return () if self._readers is None else tuple(self._readers.reuses(data, rate))

    def layers(self, data: Sequence[SavedStorageProfile], trace: MemoryTrace) -> tuple[Layer, ...]:
        """Return the modules without children, in the order in which they ran."""
        found = []
        for name, calls in self._calls.items():
            module = calls[0].module
            if any(True for _ in module.children()):
                continue
            own = [saved_storage for saved_storage in data if saved_storage.layer == name]
            parameters = list(module.parameters(recurse=False))
            sizes = [p.numel() * p.element_size() for p in parameters]
            trained = [s for p, s in zip(parameters, sizes, strict=True) if p.requires_grad]
            roles = {saved_storage.role for saved_storage in own if saved_storage.uses}
            found.append(
                Layer(
                    name=name,
                    kind=type(module).__name__,
                    parameters=sum(sizes),
                    gradients=sum(trained),
                    history=sum(self._history(p) for p in parameters),
                    maps=sum(saved_storage.nbytes for saved_storage in own),
                    map_gradients=sum(call.output_bytes for call in calls),
                    workspace=max(call.workspace(trace) for call in calls),
                    needs=tuple(sorted(roles)),
                    after=tuple(dict.fromkeys(n for call in calls for n in call.after)),
                )
            )
        return tuple(found)
