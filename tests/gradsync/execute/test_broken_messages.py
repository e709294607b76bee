"""Tests of broken messages: they end the work of a rank with an error that names the sender.

Only one rank runs. The tests hand messages to the subscribers of its mailbox, in the place of the
other rank.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from lightning_dlres.codecs.gradient import ThresholdQuantisation
from lightning_dlres.core.comm.mailbox import Channel, Item, Mailbox
from lightning_dlres.core.errors import PeerError, PeerLostError, ProtocolError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.coordination import CoordinatorLink
from lightning_dlres.gradsync.execute.messages import FAILURE_KEY
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.plan.plan import RAW, CodecChoice, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.sync_tables import packed, unpacked
from tests.support.waiting import wait_until

SPECS = [GradientSpec(name="a", count=100), GradientSpec(name="b", count=5000)]


@dataclass
class LoneMailbox:
    """Mailbox of a rank whose peers exist only as the messages that a test hands over."""

    rank: int
    ranks: int
    timeout: float = 20.0
    handlers: dict[tuple[int, Channel], Callable[[Item], None]] = field(default_factory=dict)
    sent: list[tuple[int, Channel, Any]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        return [f"rank {rank}" for rank in range(self.ranks)]

    def check(self) -> None:
        """Raise nothing: no failure is known."""

    def connect(self, destination: int, channel: Channel) -> None:
        """Do nothing: messages end in `sent`."""

    def subscribe(self, source: int, channel: Channel, handle: Callable[[Item], None]) -> None:
        self.handlers[source, channel] = handle

    def send(self, destination: int, channel: Channel, key: object, tree: Any) -> None:
        self.sent.append((destination, channel, tree))


@dataclass
class LoneRank:
    """Synchroniser of rank `mailbox.rank`, and its mailbox; the other rank does not run."""

    sync: GradientSynchroniser
    mailbox: LoneMailbox
    errors: list[BaseException | None] = field(default_factory=list)

    def start(self, step: int = 0) -> None:
        gradients = {spec.name: torch.ones(spec.count) for spec in SPECS}
        self.sync.start(step, gradients, self.errors.append)

    def hand_over(self, content: Any, channel: Channel = Channel.GRADIENT_SYNC) -> None:
        self.mailbox.handlers[1, channel]((("gradients",), content))


@contextmanager
def lone_rank(
    rank: int = 0, *, topology: str = "ps", coordinator: int | None = None
) -> Iterator[LoneRank]:
    """Context manager for one of two ranks, without the other one; both units belong to rank 0."""
    plan = make_plan(
        SPECS,
        [CodecChoice(codec=codec, partitions=1) for codec in (RAW, "tbq")],
        world_size=2,
        topology=topology,
        alignment=4096,
        shares=[1.0, 0.0],
    )
    mailbox = LoneMailbox(rank, 2)
    real = cast(Mailbox, mailbox)
    link = None if coordinator is None else CoordinatorLink(real, coordinator)
    sync = GradientSynchroniser(
        plan, {"tbq": ThresholdQuantisation()}, real, Tracer(), coordinator=link
    )
    yield LoneRank(sync, mailbox)
    sync.close()


def zeros(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


# Messages to rank 0, which expects 400 bytes of unit 0 and 1256 bytes of unit 1.
BROKEN = {
    "a text": "hello",
    "nothing": None,
    "too short a list": [0, []],
    "a text as step": ["0", packed([[0, 0, 400]]), zeros(400)],
    "a negative step": [-1, packed([[0, 0, 400]]), zeros(400)],
    "a bool as step": [True, packed([[0, 0, 400]]), zeros(400)],
    "a negative unit": [0, packed([[-1, 0, 400]]), zeros(400)],
    "an unknown unit": [0, packed([[7, 0, 400]]), zeros(400)],
    "an unknown part": [0, packed([[0, 5, 400]]), zeros(400)],
    "a sum for its owner": [0, packed([[0, 1, 400]]), zeros(400)],
    "a negative size": [0, packed([[0, 0, -400]]), zeros(400)],
    "a wrong size": [0, packed([[0, 0, 396]]), zeros(396)],
    "a truncated payload": [0, packed([[0, 0, 400]]), zeros(399)],
    "a longer payload": [0, packed([[0, 0, 400]]), zeros(401)],
    "a truncated second payload": [0, packed([[0, 0, 400], [1, 0, 1256]]), zeros(1000)],
    "an empty table": [0, b"", zeros(400)],
    "half a row": [0, packed([[0, 0, 400]])[:-1], zeros(400)],
    "a list as table": [0, [[0, 0, 400]], zeros(400)],
    "no table": [0, None, zeros(400)],
    "a wrong dtype": [0, packed([[0, 0, 400]]), torch.zeros(400)],
    "a matrix": [0, packed([[0, 0, 400]]), zeros(400).view(20, 20)],
    "no payload": [0, packed([[0, 0, 400]]), None],
    "the same payload twice": [0, packed([[0, 0, 400], [0, 0, 400]]), zeros(800)],
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("is_early", [False, True])
def test_a_broken_message_ends_the_work(content: Any, is_early: bool) -> None:
    """If `is_early`, the message arrives before the step has begun."""
    with lone_rank() as rank:
        if not is_early:
            rank.start()
        rank.hand_over(content)
        if is_early:
            rank.start()
        error = rank.sync.failure
        assert isinstance(error, ProtocolError)
        assert str(error).startswith("rank 1 sent ")
        assert rank.errors == [error]
        with pytest.raises(ProtocolError):
            rank.sync.run(1, {"a": torch.ones(100)})


@pytest.mark.parametrize(
    ("received", "sent"),
    [
        ((FAILURE_KEY, "rank 2 gave up: no sample"), "rank 2 gave up: no sample"),
        (
            RuntimeError("closed"),
            "rank 0 gave up: lost rank 1 while gradients were synchronised: closed",
        ),
    ],
    ids=["another rank's", "its own"],
)
def test_a_rank_announces_the_first_failure(received: Item, sent: str) -> None:
    with lone_rank() as rank:
        rank.start()
        rank.mailbox.handlers[1, Channel.GRADIENT_SYNC](received)
        assert [tree for _, _, tree in rank.mailbox.sent] == [sent]
        assert isinstance(rank.sync.failure, PeerLostError)


def test_a_payload_of_a_finished_step_is_refused() -> None:
    with lone_rank() as rank:
        for _ in range(2):
            content = [0, packed([[0, 0, 400], [1, 0, 1256]]), zeros(1656)]
            rank.hand_over(content)
            rank.start()
            wait_until(lambda: rank.errors, "the step has ended", timeout=120.0)
            if rank.errors == [None]:
                rank.errors.clear()
        assert "rank 1 sent part 0 of unit 0 in step 0, which this rank does not expect" in str(
            rank.sync.failure
        )


def contents() -> st.SearchStrategy[Any]:
    """Return a strategy for contents of messages: any trees, and lists close to a valid content."""
    leaves = st.one_of(
        st.none(), st.booleans(), st.text(max_size=3), st.floats(), st.integers(-3, 2000)
    )
    tensors = st.integers(0, 1700).map(zeros)
    trees = st.recursive(leaves | tensors, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
    rows = st.tuples(st.integers(-1, 3), st.integers(-1, 2), st.integers(-1, 1300))
    tables = st.lists(rows, max_size=3).map(packed) | st.binary(max_size=60)
    almost_valid = st.tuples(st.integers(-1, 2), tables | trees, tensors | trees).map(list)
    return trees | almost_valid


def is_expected(content: Any) -> bool:
    """Return True for a message that the plan expects, if its step has not begun."""
    sizes = {(0, 0): 400, (1, 0): 1256}
    try:
        step, table, message = content
        entries = unpacked(table)
        keys = [(unit, part) for unit, part, _ in entries]
        # A message holds its payloads without gaps: both sizes are multiples of its alignment of 8.
        return bool(
            type(step) is int
            and step >= 0
            and len(set(keys)) == len(keys)
            and all(sizes.get((unit, part)) == nbytes for unit, part, nbytes in entries)
            and message.dtype == torch.uint8
            and message.dim() == 1
            and message.numel() == sum(entry[2] for entry in entries)
        )
    except (AttributeError, TypeError, ValueError, struct.error):
        return False


@example([1, packed([[0, 0, 0]]), zeros(0)])
@given(contents())
def test_any_message_is_expected_or_names_its_sender(content: Any) -> None:
    with lone_rank() as rank:
        rank.start()
        rank.hand_over(content)
        if rank.sync.failure is None and content[0]:
            # The size of a payload for a later step is checked when its unit starts.
            rank.start(content[0])
        error = rank.sync.failure
        if is_expected(content):
            assert error is None
        else:
            assert isinstance(error, PeerError)
            assert "rank 1" in str(error)


REPORTS = {
    "a number": 3,
    "an unknown kind": ["wrong", [[1, 0]]],
    "a list as kind": [["ready"], [[0, 0, 0, 0, 400]]],
    "no rows": ["ready", []],
    "too short a row": ["ready", [[0, 0, 0, 400]]],
    "a negative size": ["ready", [[0, 0, 0, 0, -400]]],
    "an unknown destination": ["ready", [[2, 0, 0, 0, 400]]],
    "a destination that is the sender": ["ready", [[1, 0, 0, 0, 400]]],
    "an arrival from an unknown rank": ["arrived", [[9, 1]]],
    "no step": ["learned", [[None]]],
}


@pytest.mark.parametrize("content", REPORTS.values(), ids=REPORTS)
def test_a_broken_report_ends_the_work_of_the_coordinator(content: Any) -> None:
    with lone_rank(coordinator=0) as rank:
        rank.start()
        rank.hand_over(content, Channel.SYNC_REPORT)
        assert isinstance(rank.sync.failure, ProtocolError)
        assert str(rank.sync.failure).startswith("rank 1 sent a malformed message")


PLANS = {
    "a text": "plan",
    "a number instead of a bool": [0, [[0, 1, [[0, 0, 0]]]]],
    "no rows": [False, None],
    "an unknown rank": [False, [[0, 5, [[0, 0, 0]]]]],
    "no entries": [False, [[0, 1, []]]],
    "a short entry": [False, [[0, 1, [[0, 0]]]]],
    "a negative unit": [False, [[0, 1, [[0, -1, 0]]]]],
    "a payload that is not ready": [False, [[0, 1, [[5, 0, 0]]]]],
}


@pytest.mark.parametrize("content", PLANS.values(), ids=PLANS)
def test_a_broken_plan_ends_the_work(content: Any) -> None:
    with lone_rank(coordinator=1) as rank:
        rank.start()
        rank.hand_over(content, Channel.SYNC_PLAN)
        wait_until(lambda: rank.errors, "the work has ended")
        assert isinstance(rank.sync.failure, ProtocolError)
        assert str(rank.sync.failure).startswith("rank 1")


@pytest.mark.parametrize(
    "channel", [Channel.GRADIENT_SYNC, Channel.SYNC_REPORT], ids=["payloads", "reports"]
)
def test_a_closed_connection_names_the_peer(channel: Channel) -> None:
    with lone_rank(coordinator=0) as rank:
        rank.start()
        rank.mailbox.handlers[1, channel](RuntimeError("connection closed by peer"))
        assert isinstance(rank.sync.failure, PeerLostError)
        assert str(rank.sync.failure) == (
            "lost rank 1 while gradients were synchronised: connection closed by peer"
        )
