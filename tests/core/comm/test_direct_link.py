"""Messages over direct links arrive whole and in order, and no ranks wait for each other."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import override

from lightning_dlres.core.comm.direct_link import DirectLink, direct_pairs, open_direct_links
from lightning_dlres.core.comm.mailbox import Channel, Item, Key, Mailbox, SendingEnd
from lightning_dlres.core.errors import PeerError, PeerLostError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.wire import payload
from tests.support.rank_pool import RankContext, RankPool
from tests.support.waiting import no_failure

# Seconds that a receiver waits; only a failing test waits so long.
TIMEOUT = 20.0
DOWN, UP = Channel.ACTIVATION, Channel.GRADIENT


class Group:
    """Stands for a process group that nothing uses."""


class MemoryMailbox(Mailbox):
    """Mailbox whose messages pass through queues of this process.

    Args:
        rank: This rank.
        mailboxes: Mailboxes of all ranks; this one adds itself.
    """

    def __init__(self, rank: int, mailboxes: list[MemoryMailbox]) -> None:
        group: Any = Group()
        names = [f"rank {other}" for other in range(4)]
        super().__init__(group, rank, names, timeout=TIMEOUT, check=no_failure, tracer=Tracer())
        self.mailboxes = mailboxes
        self.handlers: dict[tuple[int, Channel], Callable[[Item], None]] = {}
        self.lock = threading.Lock()
        self.early: list[tuple[int, Channel, Item]] = []
        mailboxes.append(self)

    @override
    def _new_sending_end(self, destination: int, channel: Channel) -> SendingEnd:
        return _MemoryEnd(self.rank, channel, self.mailboxes[destination])

    @override
    def subscribe(self, source: int, channel: Channel, handle: Callable[[Item], None]) -> None:
        with self.lock:
            self.handlers[source, channel] = handle
            for origin, sent, item in self.early:
                assert (origin, sent) in self.handlers
                handle(item)
            self.early = []

    def deliver(self, source: int, channel: Channel, item: Item) -> None:
        with self.lock:
            handle = self.handlers.get((source, channel))
            if handle is None:
                self.early.append((source, channel, item))
            else:
                handle(item)


class _MemoryEnd:
    def __init__(self, rank: int, channel: Channel, destination: MemoryMailbox) -> None:
        self.rank, self.channel, self.destination = rank, channel, destination

    def put(self, key: Key, header: bytes, large: list[Tensor]) -> None:
        tree = payload.decode(payload.decode_header(header, "a rank"), large)
        self.destination.deliver(self.rank, self.channel, (key, tree))


class Rendezvous:
    """Transfers that wait for the other rank's end, and hold up all others of their rank.

    Args:
        own: Lock of this rank's device, which runs one transfer at a time.
        outgoing: Tensors to the other rank.
        incoming: Tensors from it.
    """

    def __init__(
        self, own: threading.Lock, outgoing: queue.Queue[Any], incoming: queue.Queue[Any]
    ) -> None:
        self.own, self.outgoing, self.incoming = own, outgoing, incoming
        self.ready: Callable[[], None] = lambda: None

    def computed(self) -> Callable[[], None]:
        return self.ready

    def send(self, tensors: Sequence[Tensor]) -> None:
        with self.own:
            self.outgoing.put(list(tensors))
            self.outgoing.join()

    def receive(self, sizes: Sequence[int]) -> list[Tensor]:
        with self.own:
            tensors: list[Tensor] = self.incoming.get(timeout=TIMEOUT)
            self.incoming.task_done()
        assert [t.numel() for t in tensors] == list(sizes)
        return [t.clone() for t in tensors]

    def adopt(self, tensor: Tensor) -> Tensor:
        return tensor

    def close(self) -> None:
        assert self.outgoing.empty()
        assert self.incoming.empty()


def path_of(ranks: int) -> tuple[list[MemoryMailbox], dict[tuple[int, int], Any]]:
    """Return connected mailboxes, and the links by (rank, peer) with their transfers."""
    mailboxes: list[MemoryMailbox] = []
    for rank in range(ranks):
        MemoryMailbox(rank, mailboxes)
    devices = [threading.Lock() for _ in range(ranks)]
    links = {}
    for first in range(ranks - 1):
        second = first + 1
        down, up = queue.Queue[Any](), queue.Queue[Any]()
        for rank, peer, outgoing, incoming in (
            (first, second, down, up),
            (second, first, up, down),
        ):
            transfers = Rendezvous(devices[rank], outgoing, incoming)
            decides = rank == first
            link = DirectLink(
                mailboxes[rank],
                peer,
                transfers,
                sends=DOWN if decides else UP,
                receives=UP if decides else DOWN,
                decides=decides,
            )
            links[rank, peer] = (link, transfers)
            link.open()
    return mailboxes, links


def message(rank: int, number: int) -> list[Tensor]:
    """Return a large tensor, a small one, and an empty one."""
    return [
        torch.full((3000 + number,), float(10 * rank + number)),
        torch.tensor([number]),
        torch.empty(0),
    ]


@given(
    ranks=st.integers(2, 4),
    sends=st.lists(st.tuples(st.integers(0, 2), st.booleans()), max_size=12),
    shuffle=st.randoms(use_true_random=False),
)
def test_no_order_in_which_tensors_become_ready_blocks_a_path(
    ranks: int, sends: list[tuple[int, bool]], shuffle: Any
) -> None:
    mailboxes, links = path_of(ranks)
    counts: dict[tuple[int, int], int] = {}
    gates = []
    for pair, downwards in sends:
        first = pair % (ranks - 1)
        rank, peer = (first, first + 1) if downwards else (first + 1, first)
        number = counts.get((rank, peer), 0)
        counts[rank, peer] = number + 1
        gate = threading.Event()
        gates.append(gate)
        _, transfers = links[rank, peer]
        transfers.ready = gate.wait
        channel = DOWN if downwards else UP
        mailboxes[rank].send(peer, channel, ("m", number), message(rank, number))
    shuffle.shuffle(gates)
    for gate in gates:
        gate.set()
    for (rank, peer), count in counts.items():
        channel = DOWN if rank < peer else UP
        for number in range(count):
            got = mailboxes[peer].receive(rank, channel, ("m", number), "a message")
            for one, other in zip(got, message(rank, number), strict=True):
                assert torch.equal(one, other)
    for link, _ in links.values():
        link.close(orderly=True)
        assert not any(thread.is_alive() for thread in link._threads)


def test_an_error_of_a_transfer_reaches_both_sender_and_receiver() -> None:
    mailboxes, links = path_of(2)
    _, transfers = links[0, 1]

    def fail(*_: Any) -> Any:
        raise RuntimeError("NCCL communicator was aborted")

    transfers.send = transfers.receive = fail
    mailboxes[0].send(1, DOWN, ("m", 0), message(0, 0))
    with pytest.raises(PeerLostError, match=r"lost rank 1.*aborted"):
        mailboxes[0].receive(1, UP, ("m", 0), "a message")
    with pytest.raises(PeerLostError, match=r"rank 1 cannot be reached.*aborted"):
        mailboxes[0].send(1, DOWN, ("m", 1), message(0, 1))
    for end in links.values():
        end[0].close(orderly=False)


def exchange(context: RankContext) -> None:
    context.init_process_group()
    group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    assert isinstance(group, dist.ProcessGroup)
    names = [f"rank {rank}" for rank in range(context.world_size)]
    mailbox = Mailbox(
        group, context.rank, names, timeout=TIMEOUT, check=no_failure, tracer=Tracer()
    )
    rank, last = context.rank, context.world_size - 1
    links = open_direct_links(
        mailbox,
        [(first, first + 1) for first in range(last)],
        torch.device("cpu"),
        forward=DOWN,
        backward=UP,
        backend="gloo",
    )
    for number in range(5):
        if rank < last:
            mailbox.send(rank + 1, DOWN, ("m", number), message(rank, number))
        if rank > 0:
            mailbox.send(rank - 1, UP, ("m", number), message(rank, number))
    for number in range(5):
        for peer, channel in ((rank - 1, DOWN), (rank + 1, UP)):
            if 0 <= peer <= last:
                got = mailbox.receive(peer, channel, ("m", number), "a message")
                for one, other in zip(got, message(peer, number), strict=True):
                    assert torch.equal(one, other)
    for link in links:
        link.close(orderly=True)
    mailbox.close(orderly=True)
    dist.barrier()


def test_ranks_exchange_messages_over_groups_of_their_own(pool: RankPool) -> None:
    pool.run(exchange, 3)


def lose_the_peer(context: RankContext) -> str:
    context.init_process_group()
    group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    assert isinstance(group, dist.ProcessGroup)
    mailbox = Mailbox(
        group, context.rank, ["first", "second"], timeout=1.0, check=no_failure, tracer=Tracer()
    )
    (link,) = open_direct_links(
        mailbox, [(0, 1)], torch.device("cpu"), forward=DOWN, backward=UP, backend="gloo"
    )
    text = ""
    if context.rank == 0:
        with pytest.raises(PeerError) as caught:
            mailbox.receive(1, UP, ("m", 0), "the gradients")
        text = str(caught.value)
    dist.barrier()
    link.close(orderly=True)
    mailbox.close(orderly=True)
    return text


def test_a_wait_ends_at_its_deadline_and_names_the_peer(pool: RankPool) -> None:
    text, _ = pool.run(lose_the_peer, 2)
    assert "first waited 1 s for the gradients from second" in text


def test_nccl_links_gpus_of_their_own_with_one_version() -> None:
    pairs = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    gpus = {0: (7.0, 2.29), 1: (8.0, 2.29), 2: (8.0, 2.29), 3: (9.0, 2.28), 5: (1.0, 2.28)}
    assert direct_pairs(pairs, gpus) == [(0, 1)]
