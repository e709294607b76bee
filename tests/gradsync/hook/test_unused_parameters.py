"""Parameters that no rank uses in a step: DDP drops their means, and nothing is lost by that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient import RESIDUAL
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.hook.parameter_names import sparse_parameters
from lightning_dlres.gradsync.plan.graph import Part
from tests.support.rank_pool import RankContext, RankPool

# Ranks that use the layer "b", by step.
USERS = [{0, 1, 2}, {0, 1, 2}, set(), {1}, set(), set()]
SIZE = 60


class Branches(nn.Module):
    """Module with a layer that is not used in all steps, whose gradients are random."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(SIZE, SIZE))
        self.b = nn.Parameter(torch.zeros(SIZE, SIZE))

    def forward(self, noise: Tensor, uses_b: bool) -> Tensor:
        return ((self.a + self.b if uses_b else self.a) * noise).sum()


def train(
    context: RankContext, options: dict[str, Any], users: list[set[int]], unsent: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the sums over steps of the means, and of this rank's gradients less its residuals.

    Args:
        context: This rank.
        options: Options of the hook's state.
        users: Ranks that use the layer "b", by step.
        unsent: Residual of all elements of an earlier run, which this run must send.
    """
    context.init_process_group()
    model = Branches()
    state = GradientSyncState(coordinator="none", min_bytes=0, **options)
    state.name_parameters(model.named_parameters())
    left = {name: torch.full((SIZE * SIZE,), unsent) for name in ("a", "b")}
    if unsent:
        units = [
            {
                "gradient": name,
                "start": 0,
                "stop": value.numel(),
                "part": int(Part.GRADIENT),
                "codec": "raw",
                "tensors": {RESIDUAL: value},
            }
            for name, value in left.items()
        ]
        saved = {"world_size": 3, "units": units, "step": 1, "algorithm": "none"}
        state.load_state_dicts([saved] * 3)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.register_comm_hook(state, compressed_hook)
    means = {name: torch.zeros(SIZE, SIZE) for name in ("a", "b")}
    own = {name: value.view(SIZE, SIZE).clone() for name, value in left.items()}
    for step, ranks in enumerate(users):
        model.zero_grad()
        generator = torch.Generator().manual_seed(100 * step + context.rank)
        noise = torch.randn(SIZE, SIZE, generator=generator)
        wrapped(noise, context.rank in ranks).backward()
        own["a"] += noise
        own["b"] += noise * (context.rank in ranks)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                means[name] += parameter.grad
    for entry in state.state_dict().get("units", ()):
        residual = entry["tensors"][RESIDUAL]
        own[entry["gradient"]].view(-1)[entry["start"] : entry["stop"]] -= residual
    state.close()
    return means, own


@pytest.mark.parametrize(
    ("algorithm", "topology"), [("int8", "ps"), ("int8", "ring"), ("onebit", "ps"), ("tbq", "ring")]
)
def test_residuals_of_unused_parameters_are_kept(
    pool: RankPool, algorithm: str, topology: str
) -> None:
    ranks = pool.run(train, 3, {"algorithm": algorithm, "topology": topology}, USERS, 0.0)
    for name, mean in ranks[0][0].items():
        sent = torch.stack([own[name] for _, own in ranks]).sum(0)
        torch.testing.assert_close(3 * mean, sent, rtol=0, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["int8", "raw", "none"])
def test_what_an_earlier_run_left_unsent_waits_for_a_use(pool: RankPool, algorithm: str) -> None:
    users = [set(), {0, 1, 2}, {0, 1, 2}]
    ranks = pool.run(train, 3, {"algorithm": algorithm, "topology": "ps"}, users, 0.5)
    for name, mean in ranks[0][0].items():
        sent = torch.stack([own[name] for _, own in ranks]).sum(0)
        torch.testing.assert_close(3 * mean, sent, rtol=0, atol=1e-4)


def train_in_turn(
    context: RankContext, algorithms: list[str], users: list[set[int]]
) -> tuple[dict[str, Tensor], list[list[str]]]:
    """Train a step under each algorithm, each of which loads the states of the one before.

    Returns:
        Sums of the means and of the last residuals, less those of the ranks' gradients, and the
        keys of all ranks' states after each step. The sums are zero if nothing was lost.
    """
    context.init_process_group()
    model = Branches()
    sums = {name: torch.zeros(SIZE, SIZE) for name in ("a", "b")}
    states: list[Any] = []
    all_keys = []
    for step, (algorithm, ranks) in enumerate(zip(algorithms, users, strict=True)):
        state = GradientSyncState(
            algorithm=algorithm, topology="ps", coordinator="none", min_bytes=0
        )
        state.name_parameters(model.named_parameters())
        if states:
            state.load_state_dicts(states)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        wrapped.register_comm_hook(state, compressed_hook)
        model.zero_grad()
        noise = [
            torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(100 * step + rank))
            for rank in range(context.world_size)
        ]
        wrapped(noise[context.rank], context.rank in ranks).backward()
        sums["a"] -= sum(noise)
        sums["b"] -= sum(noise[rank] for rank in ranks)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                sums[name] += context.world_size * parameter.grad
        states = [None] * context.world_size
        dist.all_gather_object(states, state.state_dict())
        all_keys.append([",".join(sorted(one)) for one in states])
        state.close()
    for one in states:
        for entry in one.get("units", ()):
            target = sums[entry["gradient"]].view(-1)[entry["start"] : entry["stop"]]
            target += entry["tensors"][RESIDUAL]
    return sums, all_keys


@pytest.mark.parametrize("last", ["none", "int8", "raw"])
def test_ranks_agree_whether_they_have_residuals(pool: RankPool, last: str) -> None:
    """With torch's all-reduce, rank 0 keeps its residual of "b", and rank 1 sends it."""
    algorithms, users = ["int8", "none", last], [{0, 1}, {1}, {0, 1}]
    for sums, all_keys in pool.run(train_in_turn, 2, algorithms, users):
        assert all(len(set(keys)) == 1 for keys in all_keys)
        for name, value in sums.items():
            torch.testing.assert_close(value, torch.zeros(SIZE, SIZE), rtol=0, atol=1e-4, msg=name)


def train_beside_old_gradients(
    context: RankContext, options: dict[str, Any], has_hosts: bool, as_view: bool, keeps_all: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[bool]]:
    """Train with gradients of earlier backwards, as manual optimization may leave them.

    DistributedDataParallel puts the old gradient of an unused parameter into its bucket. It counts
    if another rank has used the parameter.

    Args:
        context: This rank.
        options: Options of the hook's state.
        has_hosts: Let ranks 0 and 2 share a host.
        as_view: Let gradients be views of buckets.
        keeps_all: Keep all old gradients; else only those that the backward does not use.

    Returns:
        Sums over steps of the means, and of this rank's gradients less its residuals; and True for
        each step without a use of "b" that left its gradient as it was.
    """
    context.init_process_group()
    model = Branches()
    host = "ab"[context.rank % 2] if has_hosts else str(context.rank)
    state = GradientSyncState(coordinator="none", min_bytes=0, host=host, **options)
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(
        model, find_unused_parameters=True, gradient_as_bucket_view=as_view
    )
    wrapped.register_comm_hook(state, compressed_hook)
    means = {name: torch.zeros(SIZE, SIZE) for name in ("a", "b")}
    own = {name: torch.zeros(SIZE, SIZE) for name in ("a", "b")}
    is_kept = []
    for step, ranks in enumerate(USERS):
        if not keeps_all:
            model.a.grad = None
            model.b.grad = None if ranks else model.b.grad
        noise = torch.randn(
            SIZE, SIZE, generator=torch.Generator().manual_seed(100 * step + context.rank)
        )
        old = {
            name: torch.zeros(SIZE, SIZE) if one.grad is None else one.grad.clone()
            for name, one in model.named_parameters()
        }
        wrapped(noise, context.rank in ranks).backward()
        own["a"] += noise + old["a"]
        means["a"] += model.a.grad
        if ranks:
            own["b"] += noise * (context.rank in ranks) + old["b"]
            means["b"] += model.b.grad
        else:
            is_kept.append(torch.equal(model.b.grad, old["b"]))
    for entry in state.state_dict()["units"]:
        residual = entry["tensors"][RESIDUAL]
        own[entry["gradient"]].view(-1)[entry["start"] : entry["stop"]] -= residual
    state.close()
    return means, own, is_kept


@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "topology", "has_hosts", "as_view"),
    [
        ("int8", "ps", False, False),
        ("int8", "ring", False, True),
        ("onebit", "ring", False, False),
        ("tbq", "ps", True, True),
    ],
)
def test_old_gradients_of_unused_parameters_change_no_residual(
    pool: RankPool, algorithm: str, topology: str, has_hosts: bool, as_view: bool, keeps_all: bool
) -> None:
    options = {"algorithm": algorithm, "topology": topology}
    ranks = pool.run(train_beside_old_gradients, 3, options, has_hosts, as_view, keeps_all)
    for name, mean in ranks[0][0].items():
        assert all(torch.equal(mean, means[name]) for means, _, _ in ranks)
        sent = torch.stack([own[name] for _, own, _ in ranks]).sum(0)
        torch.testing.assert_close(3 * mean, sent, rtol=0, atol=1e-3)
    assert all(all(is_kept) for _, _, is_kept in ranks)


def accumulate_without_samples(context: RankContext) -> float:
    """Return the largest part of the gradients that is lost, if a rank has no samples in the second
    of two synchronised backwards of each step."""
    context.init_process_group()
    model = Branches()
    state = GradientSyncState(algorithm="tbq", topology="ps", coordinator="none", min_bytes=0)
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    lost = torch.zeros(SIZE, SIZE)
    for step in range(4):
        model.zero_grad()
        for part in range(2):
            seed = 100 * step + 10 * part + context.rank
            noise = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
            state.has_data = part == 0 or context.rank != 1
            noise *= state.has_data
            before = torch.zeros(SIZE, SIZE) if model.a.grad is None else model.a.grad.clone()
            wrapped(noise, True).backward()
            assert model.a.grad is not None
            lost += noise + before - model.a.grad
    for entry in state.state_dict()["units"]:
        if entry["gradient"] == "a":
            lost.view(-1)[entry["start"] : entry["stop"]] -= entry["tensors"][RESIDUAL]
    state.close()
    dist.all_reduce(lost)
    return float(lost.abs().max())


def test_a_rank_without_samples_loses_nothing_of_an_earlier_backward(pool: RankPool) -> None:
    assert max(pool.run(accumulate_without_samples, 2)) < 1e-3


class WithEmbedding(nn.Module):
    """The branches behind a sparse embedding, whose bucket is the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, SIZE, sparse=True)
        self.branches = Branches()

    def forward(self, noise: Tensor, uses_b: bool) -> Tensor:
        return self.branches(noise, uses_b) + self.embedding(torch.tensor([1])).sum()


def lost_beside_an_embedding(context: RankContext) -> float:
    """Return the largest part of the gradients of "b" that is lost beside old gradients."""
    context.init_process_group()
    model = WithEmbedding()
    state = GradientSyncState(algorithm="tbq", topology="ps", coordinator="none", min_bytes=0)
    state.name_parameters(model.named_parameters(), sparse_parameters(model))
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped.register_comm_hook(state, compressed_hook)
    lost = torch.zeros(SIZE, SIZE)
    for step in range(8):
        uses_b = step % 2 == 0
        model.branches.a.grad = model.embedding.weight.grad = None
        if uses_b:
            model.branches.b.grad = None
        seed = 100 * step + context.rank
        noise = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
        wrapped(noise, uses_b).backward()
        if uses_b:
            lost += noise - model.branches.b.grad
    for entry in state.state_dict()["units"]:
        if entry["gradient"] == "branches.b":
            lost.view(-1)[entry["start"] : entry["stop"]] -= entry["tensors"][RESIDUAL]
    state.close()
    dist.all_reduce(lost)
    return float(lost.abs().max())


def test_a_sparse_last_bucket_changes_nothing(pool: RankPool) -> None:
    assert max(pool.run(lost_beside_an_embedding, 2)) < 1e-3


def train_with_a_frozen_parameter(context: RankContext, algorithm: str) -> bool:
    """Return True if a hook without names trains beside a parameter that was frozen late."""
    context.init_process_group()
    model = Branches()
    state = GradientSyncState(algorithm=algorithm, topology="ps", coordinator="none", min_bytes=0)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=1000)
    wrapped.register_comm_hook(state, compressed_hook)
    model.b.requires_grad_(False)
    for _ in range(3):
        wrapped(torch.ones(SIZE, SIZE), True).backward()
    state.close()
    return model.b.grad is None and model.a.grad is not None


@pytest.mark.parametrize("algorithm", ["int8", "powersgd"])
def test_a_parameter_may_be_frozen_before_the_first_step(pool: RankPool, algorithm: str) -> None:
    assert pool.run(train_with_a_frozen_parameter, 2, algorithm) == [True, True]
