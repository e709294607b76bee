"""Gradient synchronisation of one rank of a job, over a mailbox that records its messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.comm.mailbox import Channel, Item, Key, Mailbox
from lightning_dlres.core.comm.socket_mailbox import SocketMailbox
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire import payload
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.gradsync.execute.coordination import CoordinatorLink
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.plan.plan import SyncPlan
from tests.support.rank_pool import RankContext

# Ways to send: at once, as the coordinator says in every step, or as it said in an earlier one.
MODES = ("none", "always", "replay")
# First step that repeats a plan, in the mode "replay".
REPLAYED_STEP = 2


@dataclass(frozen=True)
class MessageRecord:
    """Message that a rank has sent or received.

    Attributes:
        channel: Channel of the message.
        source: Rank that has sent it.
        destination: Rank that has received it.
        time_ns: Time from `time.perf_counter_ns`, at which it was sent or received.
        header_bytes: Size of its header, small tensors included.
        large_bytes: Size of its large tensors, which follow the header.
        tree: Content.
    """

    channel: Channel
    source: int
    destination: int
    time_ns: int
    header_bytes: int
    large_bytes: int
    tree: Tree


class RecordingMailbox(Mailbox):
    """Mailbox that records all messages. `before_send` may hold a message back."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent: list[MessageRecord] = []
        self.received: list[MessageRecord] = []
        self.before_send: Callable[[int, Channel, Tree], None] = lambda *_: None

    def send(self, destination: int, channel: Channel, key: Key, tree: Tree) -> None:
        self.before_send(destination, channel, tree)
        self.sent.append(_record(channel, self.rank, destination, key, tree))
        super().send(destination, channel, key, tree)

    def subscribe(self, source: int, channel: Channel, handle: Callable[[Item], None]) -> None:
        def record(item: Item) -> None:
            if isinstance(item, tuple):
                self.received.append(_record(channel, source, self.rank, *item))
            handle(item)

        super().subscribe(source, channel, record)


class RecordingSocketMailbox(RecordingMailbox, SocketMailbox):
    """Mailbox over ZeroMQ that records all messages."""


def _record(channel: Channel, source: int, destination: int, key: Key, tree: Tree) -> MessageRecord:
    now = time.perf_counter_ns()
    header, large = payload.encode(tree, key)
    large_bytes = sum(tensor.numel() for tensor in large)
    return MessageRecord(channel, source, destination, now, len(header), large_bytes, tree)


@dataclass
class OpenSync:
    """Synchronisation of this rank, with its mailbox and the spans of its tasks."""

    sync: GradientSynchroniser
    mailbox: RecordingMailbox
    tracer: Tracer


@contextmanager
def open_sync(
    context: RankContext,
    plan: SyncPlan,
    codecs: Mapping[str, GradientCodec],
    *,
    mode: str = "none",
    timeout: float = 20.0,
    check: Callable[[], None] = lambda: None,
    transport: str = "gloo",
    **options: Any,
) -> Iterator[OpenSync]:
    """Context manager that connects all ranks of a job, and ends their threads.

    After a failure of the synchronisation it does not wait for the other ranks. If its block
    raises, it leaves the threads to the pool, which replaces the rank.

    Args:
        context: This rank.
        plan: Plan, the same on all ranks.
        codecs: Codecs of the plan by name.
        mode: Way to send; see `MODES`.
        timeout: Seconds that a rank waits for another.
        check: Called while waiting; raises if a rank is known to have failed.
        transport: "gloo" or "zmq".
        options: Further arguments of `GradientSynchroniser`.
    """
    if not dist.is_initialized():
        context.init_process_group()
    group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    assert isinstance(group, dist.ProcessGroup)
    names = [f"rank {rank}" for rank in range(context.world_size)]
    kind = RecordingSocketMailbox if transport == "zmq" else RecordingMailbox
    mailbox = kind(group, context.rank, names, timeout=timeout, check=check, tracer=Tracer())
    tracer = Tracer()
    sync = GradientSynchroniser(
        plan,
        codecs,
        mailbox,
        tracer,
        coordinator=None if mode == "none" else CoordinatorLink(mailbox),
        replay_from=REPLAYED_STEP if mode == "replay" else None,
        **options,
    )
    yield OpenSync(sync, mailbox, tracer)
    is_orderly = sync.failure is None
    if is_orderly:
        # Other ranks may still need this one as the coordinator, or to pass a sum on.
        dist.barrier()
    sync.close()
    mailbox.close(orderly=is_orderly)
    if is_orderly:
        dist.barrier()


def threads_of(prefixes: Sequence[str], before: Collection[threading.Thread]) -> list[str]:
    """Return the names of the living threads that begin with one of the prefixes.

    Threads of `before` do not count: earlier jobs of a process may have abandoned some.
    """
    new = set(threading.enumerate()) - set(before)
    return [thread.name for thread in new if thread.name.startswith(tuple(prefixes))]
