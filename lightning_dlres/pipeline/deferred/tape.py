"""Tape of the operations that make tensors, from which the values of some of them are computed.

The tensors of a tape are on the meta device. The tape knows storages, not tensors: a view, a
`Parameter` and its `data` share one storage, and operations that only make views are not on it. An
operation that draws random numbers keeps the state of the generator before it. So any tensor gets
the values that it would have had, in any order, without the tensors that it does not depend on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core._compat import dispatch_modes_disabled, storage_key, version_of
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.nested import mapped, replaced, tensors_in

# Arguments that are on no tape are copied up to this size, since code may change them later.
_COPIED_BYTES = 1 << 20


@dataclass(frozen=True)
class StorageView:
    """Part of a storage, as a tensor.

    Attributes:
        key: Key of the storage.
        dtype: Type of the elements.
        size: Size of each dimension.
        stride: Stride of each dimension, in elements.
        offset: First element.
        is_conj: True for a tensor whose elements are conjugated when they are read.
    """

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> StorageView:
        """Return the view that a tensor is."""
        return cls(
            storage_key(tensor),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
        )

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the same part of another storage."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        return tensor.conj() if self.is_conj else tensor

    def empty(self, device: torch.device) -> Tensor:
        """Return a tensor of the same layout, with any values."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class _Constant:
    """Tensor that is on no tape, and the number of its changes."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Constant:
        is_small = tensor.nbytes <= _COPIED_BYTES
        # Changes of inference tensors are not counted.
        if is_small or tensor.is_inference():
            tensor = tensor.clone()
        return cls(tensor, _changes(tensor))

    def value(self) -> Tensor:
        if _changes(self.tensor) != self.version:
            raise ConfigError(
                f"A tensor of shape {tuple(self.tensor.shape)} from which a model's initial "
                "weights are copied must stay as it is, got one that was changed later. Copy it "
                "before the change."
            )
        return self.tensor


def _changes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)


@dataclass(frozen=True)
class RandomState:
    """State of a generator before an operation.

    Attributes:
        state: The state.
        device: Device of the generator.
        is_own: True for a generator that was passed to the operation; False for torch's default.
    """

    state: Tensor
    device: torch.device
    is_own: bool

    @classmethod
    def now(cls, device: torch.device, generator: torch.Generator | None) -> RandomState:
        """Return the present state of a generator; None for the device's default one."""
        if generator is not None:
            return cls(generator.get_state(), generator.device, is_own=True)
        is_cuda = device.type == "cuda"
        state = torch.cuda.get_rng_state(device) if is_cuda else torch.get_rng_state()
        return cls(state, device, is_own=False)

    def restore(self) -> torch.Generator | None:
        """Return a generator with this state, or set the default one to it and return None."""
        if self.is_own:
            generator = torch.Generator(self.device)
            generator.set_state(self.state)
            return generator
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.state, self.device)
        else:
            torch.set_rng_state(self.state)
        return None


@dataclass(frozen=True)
class Operation:
    """An operation on the tape.

    Attributes:
        function: The operation.
        args: Positional arguments, with a view or a constant in the place of each tensor.
        kwargs: Keyword arguments, likewise.
        results: Tensors with a storage of their own in the result: their position and view.
        touched: Keys of the storages that it reads or writes.
        random: State of the generator that it uses, if any.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    results: tuple[tuple[int, StorageView], ...]
    touched: frozenset[int]
    random: RandomState | None


@dataclass
class Tape:
    """Operations in order of execution, and the storages that they make or change."""

    _operations: list[Operation] = field(default_factory=list)
    # By key: the indices of the operations that make or change the storage.
    _writers: dict[int, list[int]] = field(default_factory=dict)
    # By key: the storage, which is kept so that its key stays its own, and the device of its data.
    _storages: dict[int, tuple[torch.UntypedStorage, torch.device]] = field(default_factory=dict)

    def __contains__(self, tensor: Tensor) -> bool:
        try:
            return tensor.layout is torch.strided and storage_key(tensor) in self._storages
        except ValueError:
            # A parameter of a lazy module has no storage yet.
            return False

    def device_of(self, tensor: Tensor) -> torch.device:
        """Return the device on which a tensor of the tape will be."""
        return self._storages[storage_key(tensor)][1]

    def add(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        *,
        result: Any,
        written: Iterable[Tensor],
        device: torch.device,
        random: RandomState | None,
    ) -> None:
        """Add an operation, unless it only makes views.

        Args:
            function: The operation.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            result: Its result, with tensors on the meta device.
            written: Tensors of the tape that it changes.
            device: Device of its results.
            random: State of the generator that it uses, if any.
        """
        keys = {storage_key(tensor) for tensor in written}
        known = {storage_key(t) for t in tensors_in((args, kwargs)) if t in self}
        results = []
        for position, tensor in enumerate(tensors_in(result)):
            if storage_key(tensor) not in self._storages:
                results.append((position, StorageView.of(tensor)))
                keys.add(storage_key(tensor))
                storage = tensor.untyped_storage()
                self._storages[storage_key(tensor)] = storage, device
        if not keys:
            return

        def recorded(tensor: Tensor) -> Any:
            return StorageView.of(tensor) if tensor in self else _Constant.of(tensor)

        args, kwargs = replaced(recorded, (args, kwargs))
        for key in keys:
            self._writers.setdefault(key, []).append(len(self._operations))
        touched = frozenset(keys | known)
        self._operations.append(Operation(function, args, kwargs, tuple(results), touched, random))

    def values(self, views: Sequence[StorageView]) -> list[Tensor]:
        """Return tensors with the values that the operations give them.

        Views of one storage share memory. Random states stay as they are.

        Args:
            views: Views of storages of the tape.
        """
        targets = {view.key for view in views}
        needed = sorted(self._needed(targets))
        last_use = {key: index for index in needed for key in self._operations[index].touched}
        storages: dict[int, torch.UntypedStorage] = {}
        devices = {self._storages[key][1] for key in last_use}
        cuda = [device for device in devices if device.type == "cuda"]
        # Code may ask for values while other operations are recorded.
        with dispatch_modes_disabled(), torch.no_grad(), torch.random.fork_rng(cuda):
            for index in needed:
                operation = self._operations[index]
                self._run(operation, storages)
                for key in operation.touched - targets:
                    if last_use[key] == index:
                        del storages[key]
        return [view.on(storages[view.key]) for view in views]

    def real(self, arguments: Any) -> Any:
        """Return nested arguments with the values of tensors of the tape."""
        return replaced(
            lambda t: self.values([StorageView.of(t)])[0] if t in self else t, arguments
        )

    def _needed(self, targets: Iterable[int]) -> set[int]:
        """Return the indices of the operations on which the values of storages depend."""
        pending = [(key, len(self._operations)) for key in targets]
        seen: dict[int, int] = {}
        needed: set[int] = set()
        while pending:
            key, end = pending.pop()
            if seen.get(key, 0) >= end:
                continue
            seen[key] = end
            for index in self._writers[key]:
                if index < end and index not in needed:
                    needed.add(index)
                    pending += [(other, index) for other in self._operations[index].touched - {key}]
        return needed

    def _run(self, operation: Operation, storages: dict[int, torch.UntypedStorage]) -> None:
        def value(recorded: Any) -> Any:
            if isinstance(recorded, StorageView):
                return recorded.on(storages[recorded.key])
            return recorded.value() if isinstance(recorded, _Constant) else recorded

        args, kwargs = mapped(value, (operation.args, operation.kwargs))
        if operation.random is not None:
            generator = operation.random.restore()
            if generator is not None:
                kwargs["generator"] = generator
        made = list(tensors_in(operation.function(*args, **kwargs)))
        for position, view in operation.results:
            tensor = made[position]
            if StorageView.of(tensor) != StorageView(storage_key(tensor), *_layout(view)):
                tensor = view.empty(tensor.device).copy_(tensor)
            storages[view.key] = tensor.untyped_storage()


def _layout(view: StorageView) -> tuple[Any, ...]:
    return view.dtype, view.size, view.stride, view.offset, view.is_conj
