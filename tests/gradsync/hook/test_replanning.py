"""A network that becomes slower or faster changes the plan, and no gradient is lost in between."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient import RESIDUAL
from lightning_dlres.gradsync.execute import planning
from lightning_dlres.gradsync.execute.plan_trials import measure_plan, measure_trial
from lightning_dlres.gradsync.hook import planned_sync, planner
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.hook.drift_watch import DriftWatch
from lightning_dlres.gradsync.hook.lazy_hook import LazyHook
from lightning_dlres.gradsync.plan.costs import LinearCost, SyncCosts
from lightning_dlres.gradsync.plan.decision import StepTrial
from lightning_dlres.gradsync.plan.measured_steps import DriftDetector
from lightning_dlres.gradsync.profile.measurement import measure_costs
from tests.gradsync.plan.costs_for_tests import codec_costs, sync_costs
from tests.support.linear_loss import SHAPES, LinearLoss, random_gradients
from tests.support.rank_pool import RankContext, RankPool

# Bytes per second of virtual links. The best algorithm is torch's all-reduce over fast ones, and
# int8 over slow ones.
FAST, SLOW = 1e12, 1e6
# Settings of the detector of drifts, in steps. It skips 1 step, takes 2 as the reference and pauses
# for 2; the next 2 are the first ones that may show a drift.
WINDOW, SKIP, PAUSE = 2, 1, 2
# Bytes whose transfer is the exposed time of each step.
EXPOSED_BYTES = 1e6


@dataclass
class VirtualNetwork:
    """Links whose speed depends on the step.

    Attributes:
        speeds: Bytes per second, by the first step with that speed; in ascending order of steps.
        ranks: Number of ranks.
        codec_seconds: Seconds per element of each compute task of a codec.
        also_measures: True also measures and tries the real network, and ignores the result.
        step: Current step; the test sets it.
        measured: Steps in which the network was measured.
    """

    speeds: dict[int, float]
    ranks: int
    codec_seconds: float = 1e-10
    also_measures: bool = False
    step: int = 0
    measured: list[int] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Bytes per second in the current step."""
        return [speed for first, speed in self.speeds.items() if first <= self.step][-1]

    def measure(self, *args: Any, **options: Any) -> SyncCosts:
        """Take the place of `measure_costs`."""
        self.measured.append(self.step)
        if self.also_measures:
            measure_costs(*args, **options)
        codecs = {name: codec_costs(1e-6, *[self.codec_seconds] * 3) for name in args[1]}
        # Slower than our own tasks without compression, so that "raw" is best over slow links if
        # codecs are slow as well.
        reduce = LinearCost(fixed_seconds=1e-6, seconds_per_item=2 / self.speed)
        speeds = (self.speed,) * self.ranks
        return sync_costs(speeds, codecs, message_seconds=1e-6, all_reduce=reduce)

    def try_plan(self, *args: Any) -> StepTrial:
        """Take the place of `measure_trial`; the plan is as fast as predicted."""
        if self.also_measures:
            measure_trial(*args)
        return StepTrial(plan_seconds=1.0, all_reduce_seconds=2.0)

    def try_topology(self, *args: Any) -> float:
        """Take the place of `measure_plan`; the topologies are as fast as predicted."""
        if self.also_measures:
            measure_plan(*args)
        return 1.0

    @contextmanager
    def replacing_the_real_one(self) -> Iterator[None]:
        """Context manager in which measurements and drift watches see only this network."""
        network = self

        class VirtualWatch(DriftWatch):
            def add(self, exposed_seconds: float, step_seconds: float) -> None:
                exposed = EXPOSED_BYTES / network.speed
                # A backward takes 1 s in every step.
                super().add(exposed, 1.0 + exposed)

        detector = functools.partial(DriftDetector, window=WINDOW, skip=SKIP)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planning, "measure_costs", self.measure)
            patch.setattr(planner, "measure_trial", self.try_plan)
            patch.setattr(planner, "measure_plan", self.try_topology)
            patch.setattr(
                planned_sync, "DriftWatch", lambda: VirtualWatch(detector(), first_pause=PAUSE)
            )
            yield


@dataclass
class Run:
    """Result of one rank.

    Attributes:
        means: Means of each step that the optimizer took.
        changes: First step, plan before and plan after of each change.
        measured: Steps in which the network was measured.
        state: The state's checkpoint at the end.
        hooked: For each step, whether DistributedDataParallel had the hook.
    """

    means: list[dict[str, Tensor]]
    changes: list[tuple[int, str, str]]
    measured: list[int]
    state: dict[str, Any]
    hooked: list[bool]


def train(
    context: RankContext,
    speeds: dict[int, float],
    steps: int,
    *,
    options: dict[str, Any] | None = None,
    codec_seconds: float = 1e-10,
    also_measures: bool = False,
    accumulate: int = 1,
    overflows: Sequence[int] = (),
    resume: Sequence[dict[str, Any]] | None = None,
    is_lazy: bool | None = None,
) -> Run:
    """Train over a virtual network.

    Args:
        context: This rank.
        speeds: Speeds of the network; see `VirtualNetwork`.
        steps: Number of steps.
        options: Options of the hook's state.
        codec_seconds: See `VirtualNetwork`.
        also_measures: See `VirtualNetwork`.
        accumulate: Backwards of a step, of which the last one synchronises.
        overflows: Steps with an infinite gradient on rank 0, which are undone.
        resume: States of all ranks to continue from.
        is_lazy: True registers the hook when it is needed, and False after `open`; None leaves
            `open` to the hook.
    """
    context.init_process_group()
    network = VirtualNetwork(speeds, context.world_size, codec_seconds, also_measures)
    model = LinearLoss()
    with network.replacing_the_real_one():
        chosen = {"coordinator": "none", "min_bytes": 0, **(options or {})}
        state = GradientSyncState(keeps_previous=bool(overflows), **chosen)
        state.name_parameters(model.named_parameters())
        if resume is not None:
            state.load_state_dicts(resume)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.03)
        lazy = None
        if is_lazy is not None:
            state.open(torch.device("cpu"))
        if is_lazy:
            lazy = LazyHook(state, wrapped)
        else:
            wrapped.register_comm_hook(state, compressed_hook)
        means, hooked = [], []
        for step in range(steps):
            network.step = step
            model.zero_grad()
            for part in range(accumulate):
                values = random_gradients(context.rank, step * accumulate + part)
                if step in overflows and context.rank == 0:
                    values["weight"][3, 3] = math.inf
                wrapped.require_backward_grad_sync = part == accumulate - 1
                loss = wrapped(values)
                with nullcontext() if lazy is None else lazy.backward():
                    loss.backward()
            hooked.append(lazy is None or lazy.is_registered)
            if step in overflows:
                state.undo_step()
            else:
                means.append({n: p.grad.clone() for n, p in model.named_parameters()})
        saved = copy.deepcopy(state.state_dict())
        changes = [(one.step, one.before, one.after) for one in state.plan_changes]
        state.close()
    return Run(means, changes, network.measured, saved, hooked)


def unsent(runs: Sequence[Run], name: str) -> Tensor:
    """Return the sum of all ranks' saved residuals of a parameter: flat, float64."""
    total = torch.zeros(SHAPES[name], dtype=torch.float64).view(-1)
    for run in runs:
        for entry in run.state.get("units", []):
            if entry["gradient"] == name and RESIDUAL in entry["tensors"]:
                total[entry["start"] : entry["stop"]] += entry["tensors"][RESIDUAL]
    return total


def assert_nothing_is_lost(runs: Sequence[Run], steps: Sequence[int]) -> None:
    """Assert that all ranks have the same means, and that nothing is missing in them but residuals.

    Args:
        runs: Results of all ranks.
        steps: Numbers that chose the gradients: those of the steps, or of all accumulated
            backwards.
    """
    for run in runs[1:]:
        for one, other in zip(runs[0].means, run.means, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SHAPES)
    for name in SHAPES:
        given = sum(
            random_gradients(rank, step)[name].double()
            for step in steps
            for rank in range(len(runs))
        )
        got = len(runs) * sum(means[name].double() for means in runs[0].means)
        got = got.view(-1) + unsent(runs, name)
        torch.testing.assert_close(got, given.view(-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("before", "after"), [(FAST, SLOW), (SLOW, FAST)])
# With the larger bound, the bias and the scalar are too small to be compressed.
@pytest.mark.parametrize(("ranks", "min_bytes"), [(2, 4096), (3, 0)])
def test_a_link_of_another_speed_changes_the_plan_once(
    pool: RankPool, ranks: int, min_bytes: int, before: float, after: float
) -> None:
    options = {"min_bytes": min_bytes}
    runs = pool.run(train, ranks, {0: before, 6: after}, 20, options=options)
    algorithms = ["none", "int8"] if before == FAST else ["int8", "none"]
    for run in runs:
        assert run.changes == runs[0].changes
        ((step, *plans),) = run.changes
        assert [plan.split(" ")[0] for plan in plans] == algorithms
        assert step > 6
        assert run.measured == [0, step]
    assert_nothing_is_lost(runs, range(20))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_hook_is_registered_with_the_first_plan_that_needs_it(
    pool: RankPool, ranks: int, accumulate: int
) -> None:
    speeds = {0: FAST, 6: SLOW, 20: FAST}
    lazy = pool.run(train, ranks, speeds, 40, accumulate=accumulate, is_lazy=True)
    always = pool.run(train, ranks, speeds, 40, accumulate=accumulate, is_lazy=False)
    for run, other in zip(lazy, always, strict=True):
        assert [plan.split(" ")[0] for _, _, plan in run.changes] == ["int8", "none"]
        assert run.changes == other.changes
        assert run.state["step"] == other.state["step"] == 40
        first = run.changes[0][0]
        assert run.hooked == [False] * first + [True] * (40 - first)
        for means, expected in zip(run.means, other.means, strict=True):
            assert all(torch.equal(means[name], expected[name]) for name in SHAPES)


def test_residuals_that_torch_averages_need_the_hook(pool: RankPool) -> None:
    first = pool.run(train, 2, {0: SLOW}, 4, options={"algorithm": "int8"})
    resume = [run.state for run in first]
    second = pool.run(
        train, 2, {0: FAST}, 3, options={"algorithm": "none"}, resume=resume, is_lazy=True
    )
    assert all(run.hooked == [True] * 3 for run in second)
    runs = [
        Run(one.means + other.means, [], [], other.state, [])
        for one, other in zip(first, second, strict=True)
    ]
    assert_nothing_is_lost(runs, [*range(4), *range(3)])


def test_a_plan_that_changes_often_pauses_longer_each_time(pool: RankPool) -> None:
    speeds = {0: FAST, 6: SLOW, 12: FAST, 24: SLOW, 48: FAST}
    runs = pool.run(train, 2, speeds, 60)
    steps = [step for step, _, _ in runs[0].changes]
    assert len(steps) == 4
    pauses = [later - earlier for earlier, later in pairwise(steps)]
    assert all(pause >= PAUSE * 2 ** (index + 1) for index, pause in enumerate(pauses))
    assert_nothing_is_lost(runs, range(60))


@pytest.mark.parametrize(
    ("speeds", "options"),
    [
        ({0: SLOW}, {}),
        ({0: FAST, 6: SLOW}, {"replan": False}),
        ({0: FAST, 6: SLOW}, {"algorithm": "int8", "topology": "ring"}),
    ],
)
def test_constant_times_or_a_fixed_plan_are_never_measured_again(
    pool: RankPool, speeds: dict[int, float], options: dict[str, Any]
) -> None:
    for run in pool.run(train, 2, speeds, 16, options=options):
        assert not run.changes
        assert set(run.measured) <= {0}


def test_training_with_changes_between_uncompressed_plans_is_that_of_ddp(pool: RankPool) -> None:
    """A sum of two gradients has one order only, so the means are equal bit for bit."""
    speeds = {0: FAST, 6: SLOW, 12: FAST}
    # At a second per element, no codec is worth its time.
    runs = pool.run(train, 2, speeds, 24, codec_seconds=1.0)
    changes = [(before.split(" ")[0], after.split(" ")[0]) for _, before, after in runs[0].changes]
    assert changes == [("none", "raw"), ("raw", "none")]
    plain = pool.run(train, 2, {0: FAST}, 24, options={"algorithm": "none"})
    for one, other in zip(runs[0].means, plain[0].means, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in SHAPES)


@pytest.mark.parametrize(("before", "after"), [(FAST, SLOW), (SLOW, FAST)])
def test_accumulated_gradients_survive_a_change(
    pool: RankPool, before: float, after: float
) -> None:
    runs = pool.run(train, 3, {0: before, 6: after}, 12, accumulate=2)
    assert len(runs[0].changes) == 1
    assert_nothing_is_lost(runs, range(24))


@pytest.mark.parametrize(("before", "after"), [(FAST, SLOW), (SLOW, FAST)])
def test_a_step_that_overflows_in_a_change_loses_nothing(
    pool: RankPool, before: float, after: float
) -> None:
    """Residuals that fit no state of the new plan go into the next step, or into the checkpoint."""
    speeds = {0: before, 6: after}
    change = pool.run(train, 2, speeds, 12)[0].changes[0][0]
    skipped = [change - 1, change, change + 1]
    for steps in (12, change + 2):
        runs = pool.run(train, 2, speeds, steps, overflows=skipped)
        assert runs[0].changes[0][0] == change
        assert_nothing_is_lost(runs, [step for step in range(steps) if step not in skipped])


@pytest.mark.parametrize("speed", [FAST, SLOW])
def test_a_checkpoint_amid_a_change_continues(pool: RankPool, speed: float) -> None:
    """The step of the change overflows, and the run ends after it."""
    change = pool.run(train, 2, {0: SLOW, 6: FAST}, 12)[0].changes[0][0]
    first = pool.run(train, 2, {0: SLOW, 6: FAST}, change + 1, overflows=[change])
    assert unsent(first, "weight").abs().sum() > 0
    resumed = pool.run(train, 2, {0: speed}, 4, resume=[run.state for run in first])
    for run, earlier in zip(resumed, first, strict=True):
        run.means = earlier.means + run.means
    assert_nothing_is_lost(resumed, [*range(change), *range(4)])


def test_a_run_may_end_where_the_ranks_would_agree(pool: RankPool) -> None:
    change = pool.run(train, 2, {0: FAST, 6: SLOW}, 12)[0].changes[0][0]
    runs = pool.run(train, 2, {0: FAST, 6: SLOW}, change)
    assert not runs[0].changes
    runs = pool.run(train, 2, {0: FAST, 6: SLOW}, change + 1)
    assert len(runs[0].changes) == 1
    assert_nothing_is_lost(runs, range(change + 1))


@pytest.mark.parametrize(
    "coordinator",
    ["auto", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("always", "replay"))],
)
def test_ranks_measure_and_try_coordinators_between_two_steps(
    pool: RankPool, coordinator: str
) -> None:
    speeds = {0: FAST, 6: SLOW, 12: FAST}
    options = {"coordinator": coordinator}
    runs = pool.run(train, 3, speeds, 22, options=options, also_measures=True)
    assert len(runs[0].changes) == 2
    assert_nothing_is_lost(runs, range(22))


def fail_to_measure(context: RankContext) -> str:
    """Return the error of a rank if the second measurement fails on rank 1."""
    measure = VirtualNetwork.measure

    def fail(network: VirtualNetwork, *args: Any, **options: Any) -> SyncCosts:
        if context.rank and network.measured:
            raise ValueError("no measurement today")
        return measure(network, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VirtualNetwork, "measure", fail)
        try:
            train(context, {0: FAST, 6: SLOW}, 12, options={"timeout": 2.0})
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_cannot_measure_ends_the_others(pool: RankPool) -> None:
    first, second = pool.run(fail_to_measure, 2)
    # DistributedDataParallel shows the error as text.
    assert "from rank 1" in first
    assert second == "ValueError: no measurement today"
