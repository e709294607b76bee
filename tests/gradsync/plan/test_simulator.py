"""The simulator agrees with closed forms and with a naive simulator, and keeps its invariants."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.trace import write_chrome_trace
from lightning_dlres.gradsync.execute.transmitters import DirectTransmitter, ReadySend, WaitingSends
from lightning_dlres.gradsync.plan.costs import CodecCosts, LinearCost, LinkCosts, SyncCosts
from lightning_dlres.gradsync.plan.graph import TOPOLOGIES, Part, SyncTask, TaskKind, topology
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.plan.simulation import sending
from lightning_dlres.gradsync.plan.simulation.result import SimulatedSpan, SimulatedSync
from lightning_dlres.gradsync.plan.simulation.sending import (
    COALESCE_SECONDS,
    CoordinatorCosts,
    HeldTransfers,
    direct_messages,
)
from lightning_dlres.gradsync.plan.simulation.simulator import SimulatedStep, simulate
from lightning_dlres.gradsync.plan.transmissions import MESSAGE_BYTES, Transfer
from lightning_dlres.gradsync.plan.units import SyncUnit
from tests.support.sync_oracle import naive_finish

COORDINATORS = ("none", "always", "replay")
ENCODE, MERGE, DECODE, OWN = 3.0, 5.0, 7.0, 2.0


def costs(
    bandwidths: Sequence[float],
    message_seconds: float = 0.0,
    latency_seconds: float = 0.0,
    incast_share: float = 1.0,
) -> SyncCosts:
    """Return costs with the seconds above for each task of a unit with one element."""

    def per_element(seconds: float) -> LinearCost:
        return LinearCost(fixed_seconds=0.0, seconds_per_item=seconds)

    return SyncCosts(
        codecs={
            "tbq": CodecCosts(
                encode=per_element(ENCODE), merge=per_element(MERGE), decode=per_element(DECODE)
            ),
            "raw": CodecCosts(
                encode=per_element(0.0), merge=per_element(OWN), decode=per_element(1.0)
            ),
        },
        links=LinkCosts(
            message_seconds=message_seconds,
            bandwidths=tuple(bandwidths),
            latency_seconds=latency_seconds,
            incast_share=incast_share,
        ),
        all_reduce=per_element(0.0),
    )


def step_of(
    name: str,
    owners: Sequence[int],
    *,
    bandwidths: Sequence[float],
    counts: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
    ready: Sequence[Sequence[float]] | None = None,
    message_seconds: float = 0.0,
    latency_seconds: float = 0.0,
    incast_share: float = 1.0,
    slowdowns: Sequence[float] | None = None,
    coordinator_costs: CoordinatorCosts | None = None,
) -> SimulatedStep:
    """Return a step whose units are gradients of their own."""
    counts = counts or [1] * len(owners)
    units = tuple(
        SyncUnit(index=i, gradient=f"g{i}", start=0, stop=count, codec="tbq", owner=owner)
        for i, (count, owner) in enumerate(zip(counts, owners, strict=True))
    )
    times = ready or [[0.0] * len(owners)] * len(bandwidths)
    return SimulatedStep(
        plan=SyncPlan(world_size=len(bandwidths), topology=name, units=units),
        costs=costs(bandwidths, message_seconds, latency_seconds, incast_share),
        payload_bytes=sizes or [10] * len(owners),
        ready=[{f"g{i}": time for i, time in enumerate(row)} for row in times],
        slowdowns=slowdowns,
        coordinator_costs=coordinator_costs or CoordinatorCosts(),
    )


def random_step(rng: random.Random) -> SimulatedStep:
    """Return a step in which hardly any two events have the same time.

    Payloads wait for others only in the short one of the two scales.
    """
    size, count, scale = rng.randint(2, 4), rng.randint(1, 8), rng.choice([1.0, 1e-4])
    return step_of(
        rng.choice(sorted(TOPOLOGIES)),
        [rng.randrange(size) for _ in range(count)],
        bandwidths=[rng.uniform(2e4, 5e5) / scale for _ in range(size)],
        counts=[rng.randint(1, 3) for _ in range(count)],
        sizes=[rng.randint(1, MESSAGE_BYTES // (2 * count)) for _ in range(count)],
        ready=[[scale * rng.uniform(0, 30) for _ in range(count)] for _ in range(size)],
        message_seconds=scale * rng.choice([0.0, rng.uniform(0, 5)]),
        latency_seconds=scale * rng.choice([0.0, rng.uniform(0, 5)]),
        incast_share=rng.choice([1.0, 0.7]),
        slowdowns=[scale * rng.uniform(0.1, 2) for _ in range(size)],
    )


TIMES = st.floats(0.01, 10.0, allow_subnormal=False)


@st.composite
def steps(draw: st.DrawFn, *, largest: int = 4, most_units: int = 5) -> SimulatedStep:
    size = draw(st.integers(1, largest))
    count = draw(st.integers(1, most_units))

    def sequence(values: st.SearchStrategy[Any], length: int) -> Any:
        return draw(st.lists(values, min_size=length, max_size=length))

    return step_of(
        draw(st.sampled_from(sorted(TOPOLOGIES))),
        sequence(st.integers(0, size - 1), count),
        bandwidths=sequence(TIMES, size),
        counts=sequence(st.integers(0, 3), count),
        sizes=sequence(st.integers(0, 20), count),
        ready=[sequence(TIMES, count) for _ in range(size)],
        message_seconds=draw(st.sampled_from([0.0, 0.7])),
        latency_seconds=draw(st.sampled_from([0.0, 0.3])),
        incast_share=draw(st.sampled_from([1.0, 0.5])),
        slowdowns=sequence(TIMES, size),
        coordinator_costs=CoordinatorCosts(
            report_seconds=draw(st.sampled_from([0.0, 0.11])),
            plan_seconds=draw(st.sampled_from([0.0, 0.13])),
            handling_seconds=draw(st.sampled_from([0.0, 0.05])),
            rank=draw(st.integers(0, size - 1)),
        ),
    )


# Closed forms.


@pytest.mark.parametrize("coordinator", COORDINATORS)
@pytest.mark.parametrize(("name", "first"), [("ps", 0), ("ring", 0), ("ps", 1), ("ring", 1)])
def test_two_ranks_with_one_unit(coordinator: Any, name: str, first: int) -> None:
    """Encode, send, two merges, encode, send, decode."""
    step = step_of(name, [first], bandwidths=[10.0, 5.0], message_seconds=0.5)
    result = simulate(step, coordinator=coordinator)
    # The slower link carries both messages of 10 bytes.
    transfer = 0.5 + 10 / 5
    other = ENCODE + transfer
    if name == "ps" and first == 0:
        # The owner is rank 0: its own gradient is merged first, while the other one travels.
        merged = max(other, OWN) + MERGE
    else:
        merged = other + MERGE + OWN
    encoded = merged + ENCODE
    last = first if name == "ps" else 1 - first
    expected = [0.0, 0.0]
    expected[last], expected[1 - last] = encoded + DECODE, encoded + transfer + DECODE
    assert result.finish == pytest.approx(expected)
    assert result.exposed == pytest.approx(expected)
    assert result.sending_busy == pytest.approx([0.5 + 10 / 10, 0.5 + 10 / 5])
    assert result.receiving_busy == pytest.approx([0.5 + 10 / 10, 0.5 + 10 / 5])
    assert result.messages == 2


def test_three_ranks_share_the_link_of_the_owner() -> None:
    """Rank 0 owns the unit. Both other messages arrive at the same time, at half the speed."""
    step = step_of("ps", [0], bandwidths=[10.0] * 3)
    direct = simulate(step)
    merged = ENCODE + 2.0 + 2 * MERGE
    assert direct.finish[0] == pytest.approx(merged + ENCODE + DECODE)
    assert direct.finish[1:] == pytest.approx([merged + ENCODE + 2.0 + DECODE] * 2)
    # A coordinator lets one pass before the other, so that its merge overlaps the second message.
    planned = simulate(step, coordinator="always")
    merged = ENCODE + 1.0 + 2 * MERGE
    assert planned.finish[0] == pytest.approx(merged + ENCODE + DECODE)
    assert planned.finish[1:] == pytest.approx(
        [merged + ENCODE + 1.0 + DECODE, merged + ENCODE + 2.0 + DECODE]
    )


@pytest.mark.parametrize("coordinator", COORDINATORS)
def test_a_ring_of_three_is_a_chain(coordinator: Any) -> None:
    result = simulate(step_of("ring", [1], bandwidths=[10.0] * 3), coordinator=coordinator)
    # From rank 1 to rank 2, to rank 0, which completes the sum; then to rank 1 and rank 2.
    encoded = ENCODE + 2 * (1.0 + MERGE + OWN + ENCODE)
    assert result.finish == pytest.approx(
        [encoded + DECODE, encoded + 1.0 + DECODE, encoded + 2.0 + DECODE]
    )


def test_one_rank_encodes_for_its_residual_and_sends_nothing() -> None:
    result = simulate(step_of("ps", [0, 0], bandwidths=[1.0], ready=[[1.0, 100.0]]))
    assert result.finish == (100 + OWN + ENCODE + DECODE,)
    assert result.exposed == (OWN + ENCODE + DECODE,)
    assert result.messages == 0


def test_a_slow_rank_and_a_late_gradient_delay_the_sum() -> None:
    step = step_of("ps", [0], bandwidths=[10.0] * 2, ready=[[0.0], [50.0]], slowdowns=[1.0, 3.0])
    encoded = 50 + 3 * ENCODE + 1.0 + MERGE + ENCODE
    assert simulate(step).finish == pytest.approx([encoded + DECODE, encoded + 1.0 + 3 * DECODE])


def test_reports_and_plans_take_time_on_the_way() -> None:
    """The coordinator on rank 0 is asked by rank 1, and then by its own rank."""
    times = CoordinatorCosts(report_seconds=100.0, plan_seconds=200.0, handling_seconds=1000.0)
    step = step_of("ps", [0], bandwidths=[10.0] * 2, coordinator_costs=times)
    result = simulate(step, coordinator="always")
    arrived = ENCODE + 100 + 1000 + 200 + 1
    # The report of the arrival is handled before that of the sum.
    sum_planned = max(arrived + 1000, arrived + MERGE + ENCODE) + 1000
    # The last task of rank 0 is to send.
    assert result.finish == pytest.approx([sum_planned, sum_planned + 1 + DECODE])
    assert result.reports == 4
    # Repeating its order needs no coordinator.
    assert simulate(step, coordinator="replay").finish == simulate(step).finish


def test_latency_leaves_the_link_to_others() -> None:
    step = step_of("ps", [1, 1], bandwidths=[10.0] * 2, sizes=[300, 300], latency_seconds=1000.0)
    spans = simulate(step, is_traced=True).spans
    receives = [span for span in spans if span.name == "receive" and span.rank == 1]
    # The first payload waits for the second one, but not until that is encoded.
    sent = ENCODE + COALESCE_SECONDS
    assert [span.end for span in receives] == pytest.approx([sent + 30, sent + 60])
    merges = [span for span in spans if span.name == "merge" and span.peer == 0]
    assert [span.start for span in merges] == pytest.approx([sent + 1030, sent + 1060])


# The naive simulator.


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_direct_steps_agree_with_the_naive_simulator(seed: int) -> None:
    step = random_step(random.Random(seed))
    assert simulate(step).finish == pytest.approx(naive_finish(step), rel=1e-6)


# Invariants.


@settings(deadline=None, max_examples=60)
@given(steps(), st.sampled_from(COORDINATORS))
def test_every_task_runs_once_and_after_its_predecessors(
    step: SimulatedStep, coordinator: Any
) -> None:
    result = simulate(step, coordinator=coordinator, is_traced=True)
    plan, graph_of = step.plan, topology(step.plan.topology)
    spans = spans_by_task(result)
    expected = set()
    for unit, rank in itertools.product(plan.units, range(plan.world_size)):
        graph = graph_of(rank, plan.world_size, unit.owner)
        for task in graph:
            key = rank, unit.index, task.kind.value, int(task.part), task.peer
            expected.add(key)
            (span,) = spans[key]
            assert span.start >= step.ready[rank][unit.gradient] or task.kind is TaskKind.RECEIVE
            for before in task.after:
                other = graph[before]
                (earlier,) = spans[rank, unit.index, other.kind.value, int(other.part), other.peer]
                # A send is done when its message is handed over.
                done = earlier.end if other.kind is not TaskKind.SEND else 0.0
                assert span.start >= done - 1e-9
    assert spans.keys() == expected


@settings(deadline=None, max_examples=60)
@given(steps(), st.sampled_from(COORDINATORS))
def test_no_step_beats_its_bounds(step: SimulatedStep, coordinator: Any) -> None:
    result = simulate(step, coordinator=coordinator, is_traced=True)
    links = step.costs.links
    for rank in range(step.plan.world_size):
        work: dict[str, float] = defaultdict(float)
        for span in result.spans:
            if span.rank == rank and span.is_transfer:
                nbytes = sum(step.payload_bytes[unit] for unit, _ in span.payloads)
                seconds = links.message_seconds + nbytes / links.bandwidths[rank]
                work[span.name] += seconds
                assert span.end - span.start >= seconds - 1e-9
            elif span.rank == rank:
                work["compute"] += span.end - span.start
        assert result.sending_busy[rank] == pytest.approx(work["send"])
        assert result.receiving_busy[rank] == pytest.approx(work["receive"])
        assert result.compute_busy[rank] == pytest.approx(work["compute"])
        first = min(step.ready[rank].values())
        assert result.finish[rank] >= first + result.compute_busy[rank] - 1e-9
        begin = min(time for times in step.ready for time in times.values())
        assert result.finish[rank] >= begin + result.receiving_busy[rank] - 1e-9
        # The last messages may leave after the rank's own tasks.
        assert result.seconds >= begin + result.sending_busy[rank] - 1e-9
        assert result.exposed[rank] >= 0
        assert one_after_another([s for s in result.spans if s.rank == rank and not s.is_transfer])


@settings(deadline=None, max_examples=60)
@given(steps())
def test_planned_messages_never_share_a_direction(step: SimulatedStep) -> None:
    result = simulate(step, coordinator="always", is_traced=True)
    directions = defaultdict(list)
    for span in result.spans:
        if span.is_transfer:
            directions[span.rank, span.name].append(span)
    assert all(map(one_after_another, directions.values()))


@settings(deadline=None, max_examples=60)
@given(steps(), st.sampled_from(COORDINATORS))
def test_twice_the_times_take_twice_as_long(step: SimulatedStep, coordinator: Any) -> None:
    """Factors of 2 are exact, so that all comparisons keep their results."""
    links, times = step.costs.links, step.coordinator_costs
    slow_links = replace(
        links,
        message_seconds=2 * links.message_seconds,
        bandwidths=tuple(bandwidth / 2 for bandwidth in links.bandwidths),
        latency_seconds=2 * links.latency_seconds,
    )
    slow = replace(
        step,
        costs=replace(step.costs, links=slow_links),
        ready=[{name: 2 * time for name, time in row.items()} for row in step.ready],
        slowdowns=[2 * factor for factor in step.slowdowns or ()],
        coordinator_costs=replace(
            times,
            report_seconds=2 * times.report_seconds,
            plan_seconds=2 * times.plan_seconds,
            handling_seconds=2 * times.handling_seconds,
        ),
    )
    expected = [2 * time for time in simulate(step, coordinator=coordinator).finish]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sending, "COALESCE_SECONDS", 2 * sending.COALESCE_SECONDS)
        assert list(simulate(slow, coordinator=coordinator).finish) == expected


@settings(deadline=None, max_examples=60)
@given(steps(most_units=1), st.integers(0, 3), TIMES)
def test_more_bandwidth_is_never_later_in_a_fixed_order(
    step: SimulatedStep, rank: int, more: float
) -> None:
    """With several units, a payload that arrives earlier may take another one's place."""
    links = step.costs.links
    bandwidths = list(links.bandwidths)
    bandwidths[rank % len(bandwidths)] += more
    faster = replace(
        step, costs=replace(step.costs, links=replace(links, bandwidths=tuple(bandwidths)))
    )
    pairs = zip(simulate(faster).finish, simulate(step).finish, strict=True)
    assert all(fast <= slow + 1e-9 for fast, slow in pairs)


@settings(deadline=None, max_examples=30)
@given(steps(), st.sampled_from(COORDINATORS))
def test_the_simulation_is_deterministic(step: SimulatedStep, coordinator: Any) -> None:
    first, second = (simulate(step, coordinator=coordinator, is_traced=True) for _ in range(2))
    assert first == second
    assert simulate(step, coordinator=coordinator).finish == first.finish


# Messages.


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from([10, MESSAGE_BYTES // 2, MESSAGE_BYTES])),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from([20, MESSAGE_BYTES]),
)
def test_messages_are_those_of_the_executor(
    rows: list[tuple[int, int]], message_bytes: int
) -> None:
    transfers = [
        Transfer(0, destination, (0, unit, 0), nbytes)
        for unit, (destination, nbytes) in enumerate(rows)
    ]
    messages = DirectTransmitter(message_bytes).take(
        [_ready_send(transfer) for transfer in transfers]
    )
    assert [
        (m.destination, [unit for _, unit, _ in m.entries])
        for m in direct_messages(transfers, message_bytes)
    ] == [(destination, [send.run.unit.index for send in sends]) for destination, sends in messages]


def _ready_send(transfer: Transfer) -> ReadySend:
    """Return a payload whose unit has only what the executor's rule reads."""
    run: Any = SimpleNamespace(
        unit=SimpleNamespace(index=transfer.entry[1]),
        options=SimpleNamespace(step=0),
        graph=(SyncTask(TaskKind.SEND, Part.GRADIENT, transfer.destination),),
        payload_bytes=lambda part: transfer.nbytes,
    )
    return ReadySend(run, 0)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 3),
            st.sampled_from([10, MESSAGE_BYTES // 2, MESSAGE_BYTES]),
            st.sampled_from([0.0, COALESCE_SECONDS / 2, COALESCE_SECONDS]),
            st.booleans(),
        ),
        max_size=12,
    ),
    st.sampled_from([20, MESSAGE_BYTES]),
)
def test_payloads_wait_as_in_the_executor(
    rows: list[tuple[int, int, float, bool]], message_bytes: int
) -> None:
    now = 0.0
    held = HeldTransfers(message_bytes)
    waiting = WaitingSends(message_bytes, lambda: now)
    for unit, (destination, nbytes, passed, is_last) in enumerate(rows):
        now += passed
        transfer = Transfer(0, destination, (0, unit, 0), nbytes)
        is_first = held.add(transfer, now)
        assert waiting.add(_ready_send(transfer)) == is_first
        assert held.is_full() == waiting.is_full()
        assert held.due_time - now == waiting.seconds_left()
        if is_last or held.is_full() or now >= held.due_time:
            units = [send.run.unit.index for send in waiting.take()]
            assert [taken.entry[1] for taken in held.take()] == units


@pytest.mark.parametrize("coordinator", ["none", "always"])
def test_small_messages_shorten_steps_over_a_slow_link(coordinator: Any) -> None:
    """The last rank owns nothing, and its link is the slow one: sums come back while later
    gradients are on their way."""
    step = step_of(
        "ps",
        [unit % 3 for unit in range(24)],
        bandwidths=[25e6, 25e6, 25e6, 6.25e6],
        sizes=[64 << 10] * 24,
    )
    no_time = LinearCost(fixed_seconds=0.0, seconds_per_item=0.0)
    free = CodecCosts(encode=no_time, merge=no_time, decode=no_time)
    step = replace(step, costs=replace(step.costs, codecs={"tbq": free}))
    large = simulate(step, coordinator=coordinator)
    small = simulate(
        replace(step, plan=msgspec.structs.replace(step.plan, message_bytes=62_500)),
        coordinator=coordinator,
    )
    least = 24 * (64 << 10) / 6.25e6
    assert least < max(small.finish) < 1.2 * least
    assert max(small.finish) < 0.9 * max(large.finish)


def test_payloads_that_are_ready_together_share_a_message() -> None:
    """The owner's sums wait for one merge each; rank 1 encodes nothing, so both leave at once."""
    step = step_of("ps", [0, 0], bandwidths=[10.0] * 2, counts=[0, 0])
    result = simulate(step)
    assert [message.entries for message in result.order] == [
        ((0, 0, int(Part.GRADIENT)), (0, 1, int(Part.GRADIENT))),
        ((0, 0, int(Part.SUM)), (0, 1, int(Part.SUM))),
    ]
    assert result.messages == 2
    assert result.seconds == pytest.approx(4.0)


# Traces and errors.


def test_a_trace_has_a_row_for_each_queue_and_peer(tmp_path: Any) -> None:
    result = simulate(step_of("ps", [0, 1], bandwidths=[1.0] * 3), is_traced=True)
    processes = result.processes()
    assert list(processes) == ["rank 0", "rank 1", "rank 2"]
    assert {span.thread for span in processes["rank 2"]} == {
        *("compute", "send to 0", "send to 1", "receive from 0", "receive from 1")
    }
    for spans in processes.values():
        rows = defaultdict(list)
        for span in spans:
            rows[span.thread].append(span)
        for row in rows.values():
            row.sort(key=lambda span: span.start_ns)
            assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(row))
    assert list(result.processes([1])) == ["rank 1"]
    write_chrome_trace(tmp_path / "trace.json", processes)
    assert (tmp_path / "trace.json").stat().st_size > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bandwidths": [1.0, 0.0]}, r"bandwidths must be a positive number for each of 2 ranks"),
        ({"sizes": [1, 2]}, "payload_bytes must be one size for each of the plan's 1 units"),
        ({"ready": [[0.0]]}, "ready must be the times of the plan's 1 gradients for each of 2"),
        ({"slowdowns": [1.0]}, "slowdowns must be a positive factor for each of 2 ranks"),
    ],
)
def test_inputs_that_do_not_fit_the_plan_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step_of("ps", [0], **{"bandwidths": [1.0, 1.0], **changes})


def test_an_unknown_coordinator_is_refused() -> None:
    with pytest.raises(ConfigError, match="coordinator must be one of"):
        simulate(step_of("ps", [0], bandwidths=[1.0]), coordinator="auto")  # type: ignore[arg-type]


def spans_by_task(result: SimulatedSync) -> dict[tuple[Any, ...], list[SimulatedSpan]]:
    """Return the spans by rank, unit, kind, part and peer; a message counts for all its units."""
    spans = defaultdict(list)
    for span in result.spans:
        for unit, part in span.payloads:
            spans[span.rank, unit, span.name, part, span.peer].append(span)
    return dict(spans)


def one_after_another(spans: Sequence[SimulatedSpan]) -> bool:
    """Return True if no two spans overlap by more than rounding."""
    in_order = sorted(spans, key=lambda span: (span.start, span.end))
    return all(
        a.end <= b.start or math.isclose(a.end, b.start) for a, b in itertools.pairwise(in_order)
    )
