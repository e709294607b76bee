"""Training and checkpoints with the hook if ranks share hosts, which then sum dense gradients."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient import RESIDUAL
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.host.identity import host_identity
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.plan.hosts import ranks_by_host
from tests.gradsync.execute.test_saved_states import mean_of_ranks, merged, unsent
from tests.support.linear_loss import SHAPES, LinearLoss, random_gradients
from tests.support.rank_pool import RankContext, RankPool

STEPS = 3
# Hosts of three ranks: a letter for each rank.
HOSTS = "aba"
exhaustive = pytest.mark.exhaustive


def train(
    context: RankContext,
    hosts: str,
    first: int = 0,
    saved: bytes | None = None,
    *,
    steps: int = STEPS,
    accumulate: int = 1,
    undone: int | None = None,
    **options: Any,
) -> tuple[list[dict[str, Tensor]], bytes]:
    """Return the means of all steps that were not undone, and the saved state of this rank.

    It checks that the plan has the hosts if ranks share them.

    Args:
        context: This rank.
        hosts: A letter for the host of each rank.
        first: Number of the first step, which chooses the gradients.
        saved: States of all ranks to continue from.
        steps: Number of steps.
        accumulate: Backwards of a step, each with a part of its gradient.
        undone: Step to undo.
        options: Options of the hook's state.
    """
    context.init_process_group()
    model = LinearLoss()
    state = GradientSyncState(
        host=hosts[context.rank],
        keeps_previous=undone is not None,
        **{"algorithm": "tbq", "topology": "ps", "coordinator": "none", "min_bytes": 0, **options},
    )
    state.name_parameters(model.named_parameters())
    if saved is not None:
        state.load_state_dicts(torch.load(io.BytesIO(saved), weights_only=True))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.03)
    wrapped.register_comm_hook(state, compressed_hook)
    means = []
    for step in range(first, first + steps):
        model.zero_grad()
        for part in range(accumulate):
            wrapped.require_backward_grad_sync = part == accumulate - 1
            scaled = {k: v / accumulate for k, v in random_gradients(context.rank, step).items()}
            (wrapped(scaled) * state.loss_scale).backward()
        if step == undone:
            state.undo_step()
        else:
            means.append({n: p.grad / state.loss_scale for n, p in model.named_parameters()})
        # A gradient scaler may change its scale after any step.
        state.loss_scale *= 2
    assert (state.plan is not None) == (len(hosts) > 1)
    is_shared = len(set(hosts)) > 1 and len(set(hosts)) < len(hosts)
    if state.plan is not None:
        has_hosts = is_shared and "hierarchy" not in options
        assert state.plan.hosts == (ranks_by_host(hosts) if has_hosts else ())
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    state.close()
    return means, buffer.getvalue()


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a[name], b[name]) for a, b in pairs for name in SHAPES)


def has_residuals(saved: bytes) -> bool:
    """Return True if a saved state has a residual other than zero."""
    entries = torch.load(io.BytesIO(saved), weights_only=True)["units"]
    return any(entry["tensors"][RESIDUAL].any() for entry in entries)


@pytest.mark.parametrize(
    ("topology", "before", "after"),
    [
        ("ps", "aba", "aabb"),
        ("ring", "aab", "abc"),
        ("ps", "abc", "aab"),
        ("ps", "aab", "a"),
        pytest.param("ring", "aab", "aab", marks=exhaustive),
        pytest.param("ring", "aabb", "aab", marks=exhaustive),
        pytest.param("ps", "aabb", "aab", marks=exhaustive),
        pytest.param("ps", "aab", "abc", marks=exhaustive),
        pytest.param("ring", "abc", "aab", marks=exhaustive),
    ],
)
def test_nothing_is_lost_when_a_run_continues_on_other_hosts(
    pool: RankPool, topology: str, before: str, after: str
) -> None:
    """All means and the last residuals add up to the means of all gradients."""
    first = pool.run(train, len(before), before, topology=topology)
    saved = merged([one for _, one in first])
    second = pool.run(train, len(after), after, STEPS, saved, topology=topology)
    remaining = unsent([one for _, one in second])
    assert all(same(first[0][0], means) for means, _ in first)
    assert all(same(second[0][0], means) for means, _ in second)
    for name in SHAPES:
        got = sum(means[name].double() for means in first[0][0] + second[0][0]).view(-1)
        got = got + remaining[name] / len(after)
        given = sum(mean_of_ranks(len(before), step, name) for step in range(STEPS))
        given += sum(mean_of_ranks(len(after), step, name) for step in range(STEPS, 2 * STEPS))
        torch.testing.assert_close(got, given.view(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["onebit", pytest.param("dgc", marks=exhaustive)])
def test_a_resumed_run_continues_exactly(pool: RankPool, algorithm: str) -> None:
    whole = pool.run(train, 3, HOSTS, algorithm=algorithm, steps=2 * STEPS)
    first = pool.run(train, 3, HOSTS, algorithm=algorithm)
    saved = merged([one for _, one in first])
    second = pool.run(train, 3, HOSTS, STEPS, saved, algorithm=algorithm)
    for (expected, _), (before, _), (after, _) in zip(whole, first, second, strict=True):
        assert same(before + after, expected)


def test_only_the_first_rank_of_a_host_saves_residuals(pool: RankPool) -> None:
    results = pool.run(train, 3, HOSTS)
    assert [has_residuals(saved) for _, saved in results] == [True, True, False]


def test_an_undone_step_leaves_no_trace(pool: RankPool) -> None:
    """The step after it sends the residuals of the step before it."""
    results = pool.run(train, 3, HOSTS, undone=1)
    remaining = unsent([one for _, one in results])
    for name in SHAPES:
        got = sum(means[name].double() for means in results[0][0]).view(-1) + remaining[name] / 3
        given = sum(mean_of_ranks(3, step, name) for step in (0, 2))
        torch.testing.assert_close(got, given.view(-1), rtol=0, atol=1e-5)


def test_gradients_may_be_accumulated(pool: RankPool) -> None:
    once = pool.run(train, 3, HOSTS, algorithm="raw")
    twice = pool.run(train, 3, HOSTS, algorithm="raw", accumulate=2)
    assert all(same(one, other) for (one, _), (other, _) in zip(once, twice, strict=True))


@pytest.mark.parametrize(
    ("hosts", "options"), [("aaa", {}), ("abc", {}), ("aba", {"hierarchy": "off"})]
)
def test_without_hosts_to_tell_apart_each_rank_synchronises_by_itself(
    pool: RankPool, hosts: str, options: dict[str, Any]
) -> None:
    results = pool.run(train, 3, hosts, **options)
    assert all(has_residuals(saved) for _, saved in results)


def test_the_cost_model_plans_for_hosts(pool: RankPool) -> None:
    """`train` asserts that the plan has the hosts."""
    results = pool.run(train, 3, HOSTS, algorithm="int8", topology="auto")
    assert all(same(results[0][0], means) for means, _ in results)


def identity_of(context: RankContext) -> str:
    return host_identity()


def test_processes_of_one_host_have_one_identity(pool: RankPool) -> None:
    assert set(pool.run(identity_of, 2)) == {host_identity()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hierarchy": "racks"}, "hierarchy must be one of 'auto' or 'off', got 'racks'"),
        ({"host": 3}, "host must be a non-empty text or None, got 3"),
        ({"host": ""}, "host must be a non-empty text or None, got ''"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientSyncState(**options)
