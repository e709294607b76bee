"""Hooks that choose algorithm, topology and coordinator by themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient import OneBit, gradient_codec
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.execute.session import SyncSession
from lightning_dlres.gradsync.hook import planner
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.hook.parameter_names import sparse_parameters
from lightning_dlres.gradsync.plan.decision import SyncDecision
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.rank_pool import RankContext, RankPool

STEPS = 3


def train(
    context: RankContext, options: dict[str, Any] | None, optimizer_name: str = "SGD"
) -> tuple[list[torch.Tensor], SyncDecision | None]:
    """Return the weights after some steps, and the cost model's decision (None without one).

    Args:
        context: This rank.
        options: Options of the hook's state; None trains with plain DDP.
        optimizer_name: Class in `torch.optim`.
    """
    context.init_process_group()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 200), nn.Tanh(), nn.Linear(200, 1))
    optimizer = getattr(torch.optim, optimizer_name)(model.parameters(), lr=0.01)
    wrapped = DistributedDataParallel(model)
    state = None
    if options is not None:
        state = GradientSyncState(optimizers=[optimizer], **options)
        state.name_parameters(model.named_parameters())
        wrapped.register_comm_hook(state, compressed_hook)
    for step in range(STEPS):
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + context.rank))
        optimizer.zero_grad()
        wrapped(x).square().mean().backward()
        optimizer.step()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    if state is None:
        return weights, None
    state.close()
    return weights, state.decision


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_all_ranks_take_one_decision(pool: RankPool, optimizer: str) -> None:
    plain = pool.run(train, 3, None, optimizer)
    ranks = pool.run(train, 3, {}, optimizer)
    weights, decision = ranks[0]
    assert decision is not None
    for others, other_decision in ranks[1:]:
        assert other_decision == decision
        assert all(map(torch.equal, weights, others))
    names = {contender.algorithm for contender in decision.contenders}
    assert {"none", "raw", "int8", "fp16"} <= names
    assert not {"terngrad", "tbq", "onebit"} & names
    assert "chosen" in decision.table()
    for ours, theirs in zip(weights, plain[0][0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)


@pytest.mark.parametrize("coordinator", ["auto", "replay"])
def test_a_named_algorithm_is_not_turned_off(pool: RankPool, coordinator: str) -> None:
    options = {"algorithm": "int8", "coordinator": coordinator, "min_bytes": 0}
    ranks = pool.run(train, 3, options)
    decision = ranks[0][1]
    assert decision is not None
    assert decision.plan is not None
    assert decision.algorithm == "int8"
    assert all(map(torch.equal, ranks[0][0], ranks[2][0]))


def resume(
    context: RankContext, saved: list[dict[str, Any]] | None, algorithm: str = "int8"
) -> tuple[dict[str, Any], SyncDecision | None]:
    """Return the saved state of this rank after one step, and the decision.

    Args:
        context: This rank.
        saved: States of all ranks of the run to continue; None begins a new one.
        algorithm: Algorithm of the state.
    """
    context.init_process_group()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(40, 200), nn.Tanh(), nn.Linear(200, 1))
    # The resumed run leaves the topology open: it would measure if it did not keep the plan.
    state = GradientSyncState(
        algorithm=algorithm, topology="ring" if saved is None else "auto", min_bytes=0
    )
    state.name_parameters(model.named_parameters())
    if saved is not None:
        state.load_state_dicts(saved)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    wrapped(torch.ones(2, 40)).square().mean().backward()
    result = copy.deepcopy(state.state_dict())
    state.close()
    return result, state.decision


def test_a_resumed_run_keeps_the_plan(pool: RankPool) -> None:
    first = [state for state, _ in pool.run(resume, 2, None)]
    second = pool.run(resume, 2, first)
    assert second[0][0]["plan"] == first[0]["plan"]
    assert [state["step"] for state, _ in second] == [2, 2]
    assert [decision for _, decision in second] == [None, None]


def test_a_resumed_run_with_another_algorithm_does_not_keep_the_plan(pool: RankPool) -> None:
    """Uncompressed gradients would suit any algorithm."""
    first = [state for state, _ in pool.run(resume, 2, None, "raw")]
    for state, decision in pool.run(resume, 2, first, "int8"):
        assert decision is not None
        assert state["algorithm"] == "int8"
        assert {entry["codec"] for entry in state["units"]} == {"int8"}


@pytest.mark.parametrize(("element_bytes", "codec"), [(2, "raw"), (4, "int8")])
def test_gradients_of_fewer_bytes_stay_uncompressed(
    monkeypatch: pytest.MonkeyPatch, element_bytes: int, codec: str
) -> None:
    monkeypatch.setattr(planner.dist, "get_world_size", lambda: 2)
    made = planner.HookPlanner(
        algorithm="int8",
        topology="ps",
        codecs={"int8": gradient_codec("int8")},
        min_bytes=4096,
        is_adam_like=True,
        is_coordinated=False,
    )
    gradients = [GradientSpec(name="weight", count=1500)]
    assert made.make_without_measuring(gradients, (), torch.device("cpu"), element_bytes)
    assert made.plan is not None
    assert {unit.codec for unit in made.plan.units} == {codec}


def fail_to_plan(context: RankContext) -> tuple[str, list[bool]]:
    """Let the planning fail on rank 1; return this rank's error, and `orderly` of each session that
    it closed."""
    context.init_process_group()
    state = GradientSyncState(timeout=2.0)
    state.name_parameters(nn.Linear(8, 8).named_parameters())
    closed: list[bool] = []
    close = SyncSession.close

    def record(session: SyncSession, *, orderly: bool) -> None:
        closed.append(orderly)
        close(session, orderly=orderly)

    message = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SyncSession, "close", record)
        if context.rank:
            patch.setattr(planner, "plan_synchronisation", refuse)
        try:
            state.open(torch.device("cpu"))
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
    state.close()
    return message, closed


def refuse(*args: Any) -> SyncDecision:
    raise ValueError("no plan today")


def test_sessions_end_if_no_plan_can_be_made(pool: RankPool) -> None:
    (first, closed), (second, other_closed) = pool.run(fail_to_plan, 2)
    assert "rank 1" in first
    assert second == "ValueError: no plan today"
    assert closed == other_closed == [False]


def open_on_a_gpu(context: RankContext) -> str:
    """Return the error of a codec that has no kernels for GPUs. It comes before any use of one."""
    context.init_process_group()
    state = GradientSyncState(algorithm="onebit", topology="ps")
    state.name_parameters(nn.Linear(8, 8).named_parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OneBit, "runs_on_gpus", lambda codec: False)
        with pytest.raises(ConfigError) as error:
            state.open(torch.device("cuda"))
    return str(error.value)


def test_a_codec_without_kernels_for_the_device_is_refused(pool: RankPool) -> None:
    for message in pool.run(open_on_a_gpu, 2):
        assert message == (
            "algorithm must be one that runs on cuda here, got 'onebit'. Install the package's "
            "extra `cuda`, or use algorithm='fp16'."
        )


def has_coordinator(context: RankContext, options: dict[str, Any]) -> bool:
    """Return True if the value "auto" of `coordinator` has led to one."""
    context.init_process_group()
    state = GradientSyncState(coordinator="auto", **options)
    state.name_parameters(nn.Linear(8, 8).named_parameters())
    state.open(torch.device("cpu"))
    assert state.synchroniser is not None
    result = state.synchroniser.coordinator is not None
    state.close()
    return result


def test_two_ranks_need_no_coordinator(pool: RankPool) -> None:
    options = {"algorithm": "fp16", "topology": "ring", "min_bytes": 0}
    assert pool.run(has_coordinator, 2, options) == [False, False]


def test_with_algorithm_and_topology_the_cost_model_is_not_asked(pool: RankPool) -> None:
    ranks = pool.run(train, 2, {"algorithm": "fp16", "topology": "ring", "min_bytes": 0})
    assert [decision for _, decision in ranks] == [None, None]
    assert all(map(torch.equal, ranks[0][0], ranks[1][0]))


def sparse_plan(context: RankContext) -> tuple[set[str], int, bool]:
    """Return the names of the planned gradients, the number of their elements, and True if the
    embedding's gradient has the rows of both ranks."""
    context.init_process_group()
    model = nn.ModuleDict(
        {"tokens": nn.Embedding(10_000, 8, sparse=True), "head": nn.Linear(8, 4000)}
    )
    state = GradientSyncState(algorithm="int8", coordinator="none", min_bytes=0)
    state.name_parameters(model.named_parameters(), sparse_parameters(model))
    wrapped = DistributedDataParallel(TokenModel(model))
    wrapped.register_comm_hook(state, compressed_hook)
    for step in range(2):
        model.zero_grad()
        wrapped(torch.tensor([context.rank, 5 + step])).backward()
    gradient = model["tokens"].weight.grad
    rows = gradient.to_dense().abs().sum(1).nonzero().flatten().tolist()
    assert state.plan is not None
    assert state.decision is not None
    names = {unit.gradient for unit in state.plan.units}
    elements = sum(unit.count for unit in state.plan.units)
    state.close()
    return names, elements, rows == [0, 1, 6]


class TokenModel(nn.Module):
    """Module that applies a model's head to the embeddings of tokens."""

    def __init__(self, model: nn.ModuleDict) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model["head"](self.model["tokens"](tokens)).square().mean()  # type: ignore[no-any-return]


def test_sparse_gradients_have_no_part_in_the_plan(pool: RankPool) -> None:
    """Torch's all-reduce sums their few rows, whatever the plan."""
    for names, elements, has_all_rows in pool.run(sparse_plan, 2):
        assert names == {"head.weight", "head.bias"}
        assert elements == 8 * 4000 + 4000
        assert has_all_rows
