"""Structure of real runs: queues, links, the coordinator's traffic, and the calls of codecs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dlres.codecs.gradient import State, ThresholdQuantisation
from lightning_dlres.core.comm.mailbox import Channel
from lightning_dlres.core.trace import Span
from lightning_dlres.core.wire.tree import Tree
from lightning_dlres.gradsync.plan.graph import TaskKind, topology
from lightning_dlres.gradsync.plan.plan import CodecChoice, SyncPlan, make_plan
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.gradient_sync import MODES, REPLAYED_STEP, MessageRecord, OpenSync, open_sync
from tests.support.rank_pool import RankContext, RankPool
from tests.support.sync_tables import unpacked
from tests.support.waiting import wait_until

# Deadline of a wait, in seconds. Only a failing test waits so long.
SECONDS = 20.0
# Elements of each gradient. No two units have equally many, so the number in a call of the codec
# identifies the unit.
# The payloads of a step fill several messages between two ranks.
COUNTS = {"a": 20_000, "b": 9000, "c": 4000, "d": 301, "e": 1_200_000, "f": 1, "g": 850_000}
STEPS = 4
# Channels of the coordinator.
COORDINATION = (Channel.SYNC_REPORT, Channel.SYNC_PLAN)


def plan_for(
    world_size: int,
    topology_name: str,
    counts: dict[str, int] = COUNTS,
    *,
    partitions: int = 1,
    shares: Sequence[float] | None = None,
) -> SyncPlan:
    specs = [GradientSpec(name=key, count=count) for key, count in counts.items()]
    choices = [CodecChoice(codec="tbq", partitions=partitions) for _ in specs]
    return make_plan(
        specs, choices, world_size=world_size, topology=topology_name, alignment=4096, shares=shares
    )


class RecordingCodec(ThresholdQuantisation):
    """Codec that records the elements of each call. A test may set `before_compress` and
    `after_compress`, which get the number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.before_compress: Callable[[int], None] = lambda count: None
        self.after_compress: Callable[[int], None] = lambda count: None

    @override
    def compress(
        self, values: Tensor, state: State, payload: Tensor, *, scale: float = 1.0, seed: int = 0
    ) -> None:
        self.calls.append(("compress", values.numel()))
        self.before_compress(values.numel())
        super().compress(values, state, payload, scale=scale, seed=seed)
        self.after_compress(values.numel())

    @override
    def expand(
        self, payload: Tensor, out: Tensor, *, scale: float = 1.0, accumulate: bool = False
    ) -> None:
        self.calls.append(("expand", out.numel()))
        super().expand(payload, out, scale=scale, accumulate=accumulate)


def gradients(counts: dict[str, int] = COUNTS) -> dict[str, Tensor]:
    return {key: torch.ones(count) for key, count in counts.items()}


def run_steps(
    context: RankContext, topology_name: str, mode: str, partitions: int
) -> tuple[list[Span], list[MessageRecord], list[MessageRecord], list[tuple[str, int]]]:
    """Return the spans of the tasks, the messages sent and received, and the codec's calls."""
    codec = RecordingCodec()
    plan = plan_for(context.world_size, topology_name, partitions=partitions)
    with open_sync(context, plan, {"tbq": codec}, mode=mode) as opened:
        for step in range(STEPS):
            opened.sync.run(step, gradients())
        # Other ranks may still need this one as the coordinator, or to pass a sum on.
        dist.barrier()
        mailbox = opened.mailbox
        for record in (*mailbox.sent, *mailbox.received):
            # Drop the payloads. Otherwise they would travel to the test's process.
            record.tree[2:] = []
        return list(opened.tracer.spans()), mailbox.sent, mailbox.received, codec.calls


@pytest.mark.parametrize("topology_name", ["ps", "ring"])
@pytest.mark.parametrize("mode", MODES)
def test_threads_links_and_calls_of_a_run(pool: RankPool, topology_name: str, mode: str) -> None:
    results = pool.run(run_steps, 3, topology_name, mode, 2)
    plan = plan_for(3, topology_name, partitions=2)
    for rank, (spans, _, _, calls) in enumerate(results):
        check_threads(spans)
        check_calls(plan, rank, spans, calls)
    messages = messages_of(
        [sent for _, sent, _, _ in results], [received for _, _, received, _ in results]
    )
    if mode == "always":
        check_links(messages)
    if mode == "replay":
        check_silence(results)


def check_threads(spans: list[Span]) -> None:
    """Each queue has a thread of its own, and messages arrive in threads of the mailbox."""
    for span in spans:
        if span.name in ("encode", "merge", "decode"):
            assert (span.category, span.thread) == ("compute", "dlres-sync-compute")
        elif span.name == "send":
            assert (span.category, span.thread) == ("transfer", "dlres-sync-transfer")
        else:
            assert (span.name, span.category) == ("receive", "transfer")
            assert span.thread.startswith("receive-GRADIENT_SYNC-")


def check_calls(plan: SyncPlan, rank: int, spans: list[Span], calls: list[tuple[str, int]]) -> None:
    """Each call of the codec is one task of one unit. A rank merges its own gradient without a
    call."""
    graph_of = topology(plan.topology)
    sizes = {unit.count for unit in plan.units}
    assert len(sizes) == len(plan.units)
    tasks: Counter[tuple[str, int]] = Counter()
    expected: Counter[tuple[str, int]] = Counter()
    for unit in plan.units:
        for task in graph_of(rank, plan.world_size, unit.owner):
            if not task.kind.is_transfer:
                tasks[task.kind.value, unit.index] += STEPS
            if task.kind is TaskKind.ENCODE:
                expected["compress", unit.count] += STEPS
            elif not task.kind.is_transfer and task.peer != rank:
                expected["expand", unit.count] += STEPS
    assert Counter((s.name, s.args["unit"]) for s in spans if s.category == "compute") == tasks
    assert Counter(calls) == expected


def messages_of(
    sent: list[list[MessageRecord]], received: list[list[MessageRecord]]
) -> list[tuple[MessageRecord, MessageRecord]]:
    """Return each payload message as its sender and as its receiver recorded it."""
    pairs = []
    for source in range(len(sent)):
        for destination in range(len(sent)):
            link = source, destination, Channel.GRADIENT_SYNC
            ends = [
                [r for r in records if (r.source, r.destination, r.channel) == link]
                for records in (sent[source], received[destination])
            ]
            pairs += list(zip(*ends, strict=True))
    return pairs


def check_links(messages: list[tuple[MessageRecord, MessageRecord]]) -> None:
    """No link has two messages in one direction at once.

    The times of all ranks can be compared: processes of one host read one clock.
    """
    for end in ("source", "destination"):
        for rank in range(3):
            own = [pair for pair in messages if getattr(pair[0], end) == rank]
            assert {sent.tree[0] for sent, _ in own} == set(range(STEPS))
            intervals = sorted((sent.time_ns, received.time_ns) for sent, received in own)
            for (_, stop), (start, _) in pairwise(intervals):
                assert stop <= start


def check_silence(results: list[Any]) -> None:
    """Ranks report all payloads of the steps before `REPLAYED_STEP`, and none of later steps."""
    for rank, (_, sent, received, _) in enumerate(results):
        reports = [record.tree for record in sent if record.channel is Channel.SYNC_REPORT]
        # Step and table of each message with gradients.
        sent_early, received_early = (
            [
                record.tree
                for record in records
                if record.channel not in COORDINATION and record.tree[0] < REPLAYED_STEP
            ]
            for records in (sent, received)
        )
        sent_late = [
            record
            for record in sent
            if record.channel not in COORDINATION and record.tree[0] >= REPLAYED_STEP
        ]
        # The number of messages depends on how many payloads were ready at once.
        assert {record.tree[0] for record in sent_late} == set(range(REPLAYED_STEP, STEPS))
        if rank == 0:
            # The coordinator gets the reports of its own rank without messages.
            assert not reports
            plans = [record.tree for record in sent if record.channel is Channel.SYNC_PLAN]
            # Each of the two other ranks gets the plan to repeat.
            assert sum(is_learned for is_learned, _ in plans) == 2
            continue
        ready = [row for kind, rows in reports for row in rows if kind == "ready"]
        assert sorted(row[1:4] for row in ready) == sorted(
            [step, unit, part] for step, table in sent_early for unit, part, _ in unpacked(table)
        )
        kinds = Counter(kind for kind, _ in reports)
        assert kinds["arrived"] == len(received_early)
        assert kinds["learned"] == 1


def payloads_of_messages(context: RankContext, mode: str, message_bytes: int) -> list[int]:
    """Return the number of payloads in each message of a step with units of 128 bytes."""
    counts = {f"unit {i}": 512 for i in range(24)}
    plan = msgspec.structs.replace(
        plan_for(context.world_size, "ps", counts), message_bytes=message_bytes
    )
    with open_sync(context, plan, {"tbq": ThresholdQuantisation()}, mode=mode) as opened:
        opened.sync.run(0, gradients(counts))
        dist.barrier()
        return [
            len(unpacked(record.tree[1]))
            for record in opened.mailbox.sent
            if record.channel is Channel.GRADIENT_SYNC
        ]


@pytest.mark.parametrize("mode", ["none", "always"])
def test_messages_are_as_large_as_the_plan_says(pool: RankPool, mode: str) -> None:
    single, several = (
        pool.run(payloads_of_messages, 2, mode, message_bytes) for message_bytes in (1, 200)
    )
    # A rank encodes 12 gradients and 12 sums.
    assert single == [[1] * 24] * 2
    for counts in several:
        assert sum(counts) == 24
        assert max(counts) <= 2


def coordinator_records(
    context: RankContext, topology_name: str, elements: int
) -> list[MessageRecord]:
    """Return the messages that this rank sends to or as the coordinator, for gradients of about
    `elements` elements."""
    counts = {f"unit {i}": elements + 4 * i for i in range(5)}
    plan = plan_for(context.world_size, topology_name, counts)
    with open_sync(context, plan, {"tbq": ThresholdQuantisation()}, mode="always") as opened:
        for step in range(2):
            # One gradient at a time. Otherwise the payloads in a report would depend on the
            # duration of transfers.
            for key, gradient in gradients(counts).items():
                opened.sync.run(step, {key: gradient})
                dist.barrier()
        return [record for record in opened.mailbox.sent if record.channel in COORDINATION]


@pytest.mark.parametrize("topology_name", ["ps", "ring"])
def test_the_bytes_of_the_coordinator_do_not_depend_on_the_size(
    pool: RankPool, topology_name: str
) -> None:
    small, large = (
        pool.run(coordinator_records, 2, topology_name, elements) for elements in (64, 1_000_000)
    )
    for one, other in zip(small, large, strict=True):
        assert len(one) == len(other) > 5
        assert sum(record.large_bytes for record in (*one, *other)) == 0
        # A row of a report has one size. msgpack writes a larger number with up to 4 more bytes.
        rows = sum(len(record.tree[1]) for record in one)
        difference = sum(r.header_bytes for r in other) - sum(r.header_bytes for r in one)
        assert 0 <= difference <= 4 * rows


def wait_for(event: threading.Event) -> None:
    assert event.wait(SECONDS), "the threads of the two queues must not wait for each other"


def spans_of(opened: OpenSync, name: str) -> list[Span]:
    return [span for span in opened.tracer.spans() if span.name == name]


def encloses(outer: Span, inner: Span) -> bool:
    return outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns


def encode_in_a_transfer(context: RankContext) -> None:
    """The first payload leaves only when the second gradient has been encoded."""
    counts, codec = {"a": 100, "b": 200}, RecordingCodec()
    sending, encoded = threading.Event(), threading.Event()
    # Rank 0 owns all, so that rank 1 encodes and sends both.
    plan = plan_for(2, "ps", counts, shares=[1.0, 0.0])
    with open_sync(context, plan, {"tbq": codec}) as opened:
        if context.rank == 1:

            def hold(destination: int, channel: Channel, tree: Tree) -> None:
                sending.set()
                wait_for(encoded)

            opened.mailbox.before_send = hold
            codec.before_compress = lambda count: wait_for(sending) if count == 200 else None
            codec.after_compress = lambda count: encoded.set() if count == 200 else None
        opened.sync.run(0, gradients(counts))
        if context.rank == 1:
            send, encode = spans_of(opened, "send")[0], spans_of(opened, "encode")[1]
            assert send.start_ns < encode.end_ns
            assert encode.start_ns < send.end_ns
            assert codec.calls[:2] == [("compress", 100), ("compress", 200)]
            assert encode.args["unit"] == 1


def test_a_gradient_is_encoded_while_another_one_is_sent(pool: RankPool) -> None:
    pool.run(encode_in_a_transfer, 2)


def transfers_in_an_encode(context: RankContext) -> None:
    """The second gradient is encoded only when the sum of the first one has come back."""
    counts, codec = {"a": 100, "b": 200}, RecordingCodec()
    plan = plan_for(2, "ps", counts, shares=[1.0, 0.0])
    with open_sync(context, plan, {"tbq": codec}) as opened:
        if context.rank == 1:

            def wait_for_sum(count: int) -> None:
                if count == 200:
                    wait_until(lambda: spans_of(opened, "receive"), "the sum has come back")

            codec.before_compress = wait_for_sum
        opened.sync.run(0, gradients(counts))
        if context.rank == 1:
            encode = spans_of(opened, "encode")[1]
            assert encode.args["unit"] == 1
            assert encloses(encode, spans_of(opened, "receive")[0])


def test_transfers_go_on_while_a_gradient_is_encoded(pool: RankPool) -> None:
    pool.run(transfers_in_an_encode, 2)


def late_unit(context: RankContext, topology_name: str, mode: str) -> list[str]:
    """Return the order in which this rank finished the gradients "a" and "b" of a step.

    The other ranks start "a" before "b". The last rank starts only "b", and "a" after all ranks
    have finished "b".
    """
    counts = {"a": 100, "b": 200}
    done: list[str] = []
    events = {key: threading.Event() for key in counts}
    plan = plan_for(3, topology_name, counts)
    with open_sync(context, plan, {"tbq": ThresholdQuantisation()}, mode=mode) as opened:

        def start(key: str) -> None:
            def finish(error: BaseException | None) -> None:
                assert error is None
                done.append(key)
                events[key].set()

            opened.sync.start(0, {key: torch.ones(counts[key])}, finish)

        is_late = context.rank == 2
        for key in "b" if is_late else "ab":
            start(key)
        assert events["b"].wait(SECONDS)
        dist.barrier()
        if is_late:
            start("a")
        assert events["a"].wait(SECONDS)
    return done


@pytest.mark.parametrize("topology_name", ["ps", "ring"])
@pytest.mark.parametrize("mode", ["none", "always"])
def test_a_late_rank_holds_back_no_other_unit(
    pool: RankPool, topology_name: str, mode: str
) -> None:
    assert pool.run(late_unit, 3, topology_name, mode) == [["b", "a"]] * 3
