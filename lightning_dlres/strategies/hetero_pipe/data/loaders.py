"""One rank reads for all: a loader that hands the reader's batches, and the state of its random
generators, to every rank.

Processes that each draw from their own generators see different shuffles and augmentations from the
second epoch on. Here rank 0 alone iterates the user's loader; every rank yields that batch, with
its own generators set to the reader's, so that what user code draws next is the same everywhere and
the same as in plain training.
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
from lightning_dlres.pipeline.comm.mailbox import Channel, Mailbox
from lightning_dlres.strategies.connection import Connection
from lightning_dlres.strategies.hetero_pipe.data.sharding import describe, refuse_shards
from lightning_dlres.strategies.hetero_pipe.step.one_device import single_device_view
from lightning_dlres.strategies.signals import DeferredSignals

_HOOKS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_WHERE = "The loader's code"


class SharedLoader:
    """Wraps the user's loader; attributes that it lacks are those of the user's loader.

    Args:
        loader: the user's loader; iterated on rank 0 only.
        reads: whether this rank is the reader, rank 0.
        mailbox: returns the messages of the current run.
        signals: returns those of the current run; they are handled between two batches.
        device: the device whose generator is shared along with the CPU's.
        length: the reader's number of batches; None if unknown.
    """

    def __init__(
        self,
        loader: Any,
        reads: bool,
        mailbox: Callable[[], Mailbox],
        signals: Callable[[], DeferredSignals],
        device: torch.device,
        length: int | None,
    ) -> None:
        self.__dict__.update(
            _loader=loader,
            _reads=reads,
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
        # The reader's iterator is made at once, as in plain training: making it draws from the
        # global generator.
        if not self._reads:
            return self._follow()
        with single_device_view(_WHERE):
            iterator = iter(self._loader)
        return self._read(iterator)

    def _read(self, iterator: Iterator[Any]) -> Iterator[Any]:
        mailbox, signals = self._mailbox(), self._signals()
        indices = _SeenIndices(self._loader)
        content: list[Any]
        while True:
            # Before the next batch is read: a checkpoint has the loader's position.
            due = signals.due()
            if due:
                message = [due, [], rng.snapshot(self._device), []]
                mailbox.broadcast(0, Channel.BATCH, ("batch",), message, "a batch")
                signals.handle(due)
            try:
                with single_device_view(_WHERE):
                    content = [next(iterator)]
            except StopIteration:
                content = []
            message = [[], content, rng.snapshot(self._device), indices.new()]
            mailbox.broadcast(0, Channel.BATCH, ("batch",), message, "a batch")
            if not content:
                return
            yield content[0]

    def _follow(self) -> Iterator[Any]:
        mailbox, signals = self._mailbox(), self._signals()
        indices = _SeenIndices(self._loader)
        indices.clear()
        while True:
            due, content, state, drawn = mailbox.broadcast(
                0, Channel.BATCH, ("batch",), None, "the next batch"
            )
            rng.restore(state, self._device)
            if due:
                signals.handle(due)
                continue
            indices.add(drawn)
            if not content:
                return
            yield content[0]


class _SeenIndices:
    """The indices of the samples in each batch. In prediction Lightning's own batch sampler keeps
    them for callbacks that write predictions; it runs on the reader only.

    Args:
        loader: the user's loader.
    """

    def __init__(self, loader: Any) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        self._sampler = sampler if isinstance(sampler, _compat.INDEX_SAMPLER) else None
        self._told = 0

    def clear(self) -> None:
        """Begin an epoch on a rank that does not read."""
        if self._sampler is not None:
            self._sampler.seen_batch_indices = []

    def new(self) -> list[list[int]]:
        """Return those of the batches drawn since the last call."""
        if self._sampler is None:
            return []
        drawn = self._sampler.seen_batch_indices[self._told :]
        self._told += len(drawn)
        return drawn

    def add(self, drawn: list[list[int]]) -> None:
        """Take over what the reader has drawn."""
        if self._sampler is not None:
            self._sampler.seen_batch_indices += drawn


class StatefulSharedLoader(SharedLoader):
    """A `SharedLoader` over a loader that can save and restore its position; only the reader's
    counts."""

    def state_dict(self) -> dict[str, Any]:
        """Return the reader's state; empty on the other ranks, which write no checkpoint."""
        return dict(self._loader.state_dict()) if self._reads else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the reader's loader where the checkpoint left it."""
        if self._reads:
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
    return kind(loader, connection.rank == 0, mailbox, signals, device, length)


@contextmanager
def whole_data(*owners: Any) -> Iterator[None]:
    """Context manager that lets the owners' hooks make loaders as on a single device."""
    saved = []
    for owner in filter(None, owners):
        for name in _HOOKS:
            saved.append((vars(owner), name, vars(owner).get(name)))
            vars(owner)[name] = _made_alone(getattr(owner, name))
    try:
        yield
    finally:
        for attributes, name, own in saved:
            attributes.pop(name, None)
            if own is not None:
                attributes[name] = own


def _made_alone(hook: Callable[[], Any]) -> Callable[[], Any]:
    @wraps(hook)
    def make() -> Any:
        with single_device_view(hook.__name__, allows_collectives=True):
            return hook()

    return make


def is_stateful(loader: Any) -> bool:
    """Whether the loader can save and restore its position."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
