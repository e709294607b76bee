"""Shared loaders: rank 0 reads each batch and sends it to every rank.

Were each rank to iterate its own loader, equal seeds would give equal shuffles and augmentations
in the first epoch only: by its end, the ranks' random generators have diverged. So only rank 0, the
reader, iterates the user's loader. Every rank yields the reader's batch, and sets its random
generators to the reader's state. The user's code then draws the same numbers on every rank as in
plain training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_dlres import _compat
from lightning_dlres.core import rng
from lightning_dlres.core.comm.mailbox import Channel, Mailbox
from lightning_dlres.strategies.connection import Connection
from lightning_dlres.strategies.hetero_pipe.data.sharding import describe, refuse_shards
from lightning_dlres.strategies.hetero_pipe.step.single_device_view import single_device_view
from lightning_dlres.strategies.signals import DeferredSignals

# Hooks of a LightningModule or data module that make loaders.
_LOADER_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
# Names the user code in errors of `single_device_view`.
_USER_CODE = "The loader's code"


class SharedLoader:
    """Loader that yields the reader's batches on every rank. Its other attributes are those of the
    user's loader.

    The reader sends messages of four items: signals to handle; a list with the batch, empty at the
    end of an epoch or beside signals; the state of the reader's random generators; and the indices
    of the batch's samples.

    Args:
        loader: The user's loader; iterated on rank 0 only.
        is_reader: True on rank 0, the reader.
        mailbox: Returns the mailbox of the current run; a function, because a loader may outlive
            a run.
        signals: Returns the signals of the current run; they are handled between two batches.
        device: Device whose random generator is shared along with the CPU's.
        length: The reader's number of batches; None if unknown.
    """

    def __init__(
        self,
        loader: Any,
        *,
        is_reader: bool,
        mailbox: Callable[[], Mailbox],
        signals: Callable[[], DeferredSignals],
        device: torch.device,
        length: int | None,
    ) -> None:
        # A plain assignment would set the attributes of the user's loader (see `__setattr__`).
        self.__dict__.update(
            _loader=loader,
            _is_reader=is_reader,
            _mailbox=mailbox,
            _signals=signals,
            _device=device,
            _length=length,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader, name, value)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"object of type {type(self._loader).__name__!r} has no len()")
        return int(self._length)

    def __iter__(self) -> Iterator[Any]:
        # Make the reader's iterator here, not at the first batch. Making it draws from the global
        # random generator, and plain training does it at this point.
        if not self._is_reader:
            return self._receive_batches()
        with single_device_view(_USER_CODE):
            iterator = iter(self._loader)
        return self._read_batches(iterator)

    def _read_batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        mailbox, signals = self._mailbox(), self._signals()
        indices = _SampleIndices(self._loader)
        content: list[Any]
        while True:
            # Handle signals before reading the next batch: a handler may save a checkpoint with the
            # loader's position, which must not be one batch ahead.
            due_signals = signals.due()
            if due_signals:
                message = [due_signals, [], rng.snapshot(self._device), []]
                mailbox.broadcast(0, Channel.BATCH, ("batch",), message, "a batch")
                signals.handle(due_signals)
            try:
                with single_device_view(_USER_CODE):
                    content = [next(iterator)]
            except StopIteration:
                content = []
            message = [[], content, rng.snapshot(self._device), indices.pop_new()]
            mailbox.broadcast(0, Channel.BATCH, ("batch",), message, "a batch")
            if not content:
                return
            yield content[0]

    def _receive_batches(self) -> Iterator[Any]:
        mailbox, signals = self._mailbox(), self._signals()
        indices = _SampleIndices(self._loader)
        indices.clear()
        while True:
            due_signals, content, random_state, indices_of_batch = mailbox.broadcast(
                0, Channel.BATCH, ("batch",), None, "the next batch"
            )
            rng.restore(random_state, self._device)
            if due_signals:
                signals.handle(due_signals)
                continue
            indices.add(indices_of_batch)
            if not content:
                return
            yield content[0]


class _SampleIndices:
    """Sample indices of each batch, sent from the reader to the other ranks for callbacks that
    write predictions.

    In prediction, Lightning's batch sampler records these indices. It runs on the reader only.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: Any) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        self._sampler = sampler if isinstance(sampler, _compat.INDEX_SAMPLER) else None
        self._num_sent = 0

    def clear(self) -> None:
        """Forget the last epoch's indices, on a rank that is not the reader."""
        if self._sampler is not None:
            self._sampler.seen_batch_indices = []

    def pop_new(self) -> list[list[int]]:
        """Return the indices of the batches that the reader has drawn since the last call."""
        if self._sampler is None:
            return []
        drawn = self._sampler.seen_batch_indices[self._num_sent :]
        self._num_sent += len(drawn)
        return drawn

    def add(self, drawn: list[list[int]]) -> None:
        """Append the indices of batches that the reader has drawn."""
        if self._sampler is not None:
            self._sampler.seen_batch_indices += drawn


class StatefulSharedLoader(SharedLoader):
    """Shared loader over a loader that can save and restore its position on the reader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state; empty on the other ranks, which write no checkpoint."""
        return dict(self._loader.state_dict()) if self._is_reader else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the position of the reader's loader."""
        if self._is_reader:
            self._loader.load_state_dict(state)


def share_loader(
    loader: Any,
    *,
    connection: Connection,
    mailbox: Callable[[], Mailbox],
    signals: Callable[[], DeferredSignals],
    device: torch.device,
) -> SharedLoader:
    """Return a loader that yields rank 0's batches on every rank; called by all ranks.

    Args:
        loader: The user's loader.
        connection: Connection to the other ranks.
        mailbox: Returns the mailbox of the current run.
        signals: Returns the signals of the current run.
        device: Device whose random generator is shared along with the CPU's.

    Raises:
        ConfigError: If the loader holds one rank's part of the data.
    """
    own_description = describe(loader)
    descriptions = [
        connection.broadcast(own_description if rank == connection.rank else None, rank)
        for rank in range(connection.world_size)
    ]
    warning = refuse_shards(type(loader).__name__, descriptions)
    if warning is not None:
        rank_zero_warn(f"dlres: {warning}")
    length, stateful = None, False
    if connection.rank == 0:
        stateful = is_stateful(loader)
        try:
            length = len(loader)
        except (TypeError, NotImplementedError):
            length = None
    length, stateful = connection.broadcast([length, stateful], 0)
    kind = StatefulSharedLoader if stateful else SharedLoader
    return kind(
        loader,
        is_reader=connection.rank == 0,
        mailbox=mailbox,
        signals=signals,
        device=device,
        length=length,
    )


@contextmanager
def unsharded_loaders(*owners: Any) -> Iterator[None]:
    """Context manager that runs the owners' loader hooks as if there were a single device.

    Args:
        *owners: The LightningModule and the data module; None is skipped.
    """
    saved = []
    for owner in filter(None, owners):
        for name in _LOADER_HOOKS:
            saved.append((vars(owner), name, vars(owner).get(name)))
            vars(owner)[name] = _on_single_device(getattr(owner, name))
    try:
        yield
    finally:
        # Put back a hook that was set on the instance. Without one, the class's hook applies again.
        for attributes, name, instance_hook in saved:
            attributes.pop(name, None)
            if instance_hook is not None:
                attributes[name] = instance_hook


def _on_single_device(hook: Callable[[], Any]) -> Callable[[], Any]:
    """Return a hook that sees a single device, so that it adds no distributed sampler."""

    @wraps(hook)
    def make() -> Any:
        with single_device_view(hook.__name__, allows_collectives=True):
            return hook()

    return make


def is_stateful(loader: Any) -> bool:
    """Return True if the loader can save and restore its position."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
