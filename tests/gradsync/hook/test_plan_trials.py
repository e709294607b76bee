"""A plan that is predicted to be a little faster than torch's all-reduce, or than one with the
other topology, is tried first."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.gradsync.execute import plan_trials, planning
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.hook import planner
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.plan.cost_model import decide
from lightning_dlres.gradsync.plan.costs import LinearCost, SyncCosts
from lightning_dlres.gradsync.plan.decision import SyncDecision
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.gradsync.plan.costs_for_tests import codec_costs, sync_costs
from tests.support.rank_pool import RankContext, RankPool

# Added to a step; every step of the small model is much shorter.
SLOW_SECONDS = 0.3
# Predicted all-reduce over the predicted step of the best plan.
PREDICTED_GAIN = 1.5


def network(model: nn.Module, ranks: int) -> Any:
    """Return a function in the place of `measure_costs`, whose costs predict `PREDICTED_GAIN`."""

    def measure(messages: Any, codecs: dict[str, Any], *args: Any, **options: Any) -> SyncCosts:
        gradients = [GradientSpec(name=n, count=p.numel()) for n, p in model.named_parameters()]
        times = {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in codecs}
        bandwidths = [1e6] * ranks
        best = decide(gradients, sync_costs(bandwidths, times), codecs, algorithms=["int8"])
        seconds = PREDICTED_GAIN * best.prediction.step_seconds
        reduce = LinearCost(fixed_seconds=seconds, seconds_per_item=0.0)
        return sync_costs(bandwidths, times, all_reduce=reduce)

    return measure


def slow_down(patch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """Let a function take `SLOW_SECONDS` longer."""
    function = getattr(owner, name)

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return function(*args, **options)

    patch.setattr(owner, name, slow)


def slow_first_topology(patch: pytest.MonkeyPatch) -> None:
    """Let the steps of the first topology that is tried take `SLOW_SECONDS` longer."""
    function, tried = planner.measure_plan, list[str]()

    def slow(session: Any, plan: SyncPlan, *args: Any) -> float:
        tried.append(plan.topology)
        seconds = function(session, plan, *args)
        return seconds + SLOW_SECONDS if plan.topology == tried[0] else seconds

    patch.setattr(planner, "measure_plan", slow)


def train(
    context: RankContext, slow: str, transport: str = "gloo"
) -> tuple[str, SyncDecision | None, list[Tensor]]:
    """Return the algorithm, the decision, and the weights after some steps.

    Args:
        context: This rank.
        slow: "plan", "all-reduce" or the predicted "topology" is slow in the trials; "" trains
            without our hook.
        transport: Transport of the hook.
    """
    context.init_process_group()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 200), nn.Tanh(), nn.Linear(200, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    wrapped = DistributedDataParallel(model)
    state = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "measure_costs", network(model, context.world_size))
        if slow == "plan":
            slow_down(patch, GradientSynchroniser, "run")
        elif slow == "all-reduce":
            slow_down(patch, plan_trials, "all_reduce")
        elif slow == "topology":
            slow_first_topology(patch)
            slow_down(patch, plan_trials, "all_reduce")
        if slow:
            state = GradientSyncState(coordinator="none", min_bytes=0, transport=transport)
            state.name_parameters(model.named_parameters())
            wrapped.register_comm_hook(state, compressed_hook)
        random_state = torch.get_rng_state()
        for step in range(3):
            seed = torch.Generator().manual_seed(10 * step + context.rank)
            optimizer.zero_grad()
            wrapped(torch.randn(8, 40, generator=seed)).square().mean().backward()
            optimizer.step()
    # Trials have random gradients of their own.
    assert torch.equal(random_state, torch.get_rng_state())
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    if state is None:
        return "", None, weights
    algorithm, decision = state.algorithm, state.decision
    state.close()
    return algorithm, decision, weights


def test_a_plan_that_turns_out_slower_is_not_used(pool: RankPool) -> None:
    plain = pool.run(train, 3, "")
    ranks = pool.run(train, 3, "plan")
    for algorithm, decision, weights in ranks:
        assert algorithm == "none"
        assert decision == ranks[0][1]
        assert all(map(torch.equal, weights, plain[0][2]))
        assert decision.is_off
        assert decision.trial.plan_seconds > SLOW_SECONDS
        assert "In a trial, a step took" in decision.table()


@pytest.mark.parametrize("transport", ["gloo", "zmq"])
def test_a_plan_that_keeps_its_promise_is_used(pool: RankPool, transport: str) -> None:
    ranks = pool.run(train, 2, "all-reduce", transport)
    for algorithm, decision, weights in ranks:
        assert algorithm == "int8"
        assert decision == ranks[0][1]
        assert not decision.is_off
        assert decision.trial.all_reduce_seconds > SLOW_SECONDS
        assert all(map(torch.equal, weights, ranks[0][2]))


def test_the_topology_that_turns_out_faster_is_used(pool: RankPool) -> None:
    ranks = pool.run(train, 3, "topology")
    for algorithm, decision, weights in ranks:
        assert algorithm == "int8"
        assert decision == ranks[0][1]
        predicted, other = decision.topology_seconds
        assert decision.topology == decision.plan.topology == other
        assert decision.topology_seconds[predicted] > SLOW_SECONDS
        assert f"with topology {other!r}" in decision.table()
        assert all(map(torch.equal, weights, ranks[0][2]))


def test_two_ranks_try_no_topology(pool: RankPool) -> None:
    for _, decision, _ in pool.run(train, 2, "all-reduce"):
        assert decision.topology_seconds == {}
