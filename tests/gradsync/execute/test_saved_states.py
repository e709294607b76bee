"""Residuals in checkpoints: nothing is lost when a run goes on, on as many ranks or on others."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient import RESIDUAL
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from tests.support.linear_loss import SHAPES, LinearLoss, means_of_steps, random_gradients
from tests.support.rank_pool import RankContext, RankPool

STEPS = 3


def train(
    context: RankContext,
    options: dict[str, Any],
    first: int,
    saved: bytes | None,
    scales: tuple[float, ...] = (1.0,) * STEPS,
) -> tuple[list[dict[str, Tensor]], bytes, list[str]]:
    """Return the means of some steps, the saved states, and the warnings of loading."""
    context.init_process_group()
    model = LinearLoss()
    state = GradientSyncState(min_bytes=0, coordinator="none", **options)
    state.name_parameters(model.named_parameters())
    if saved is not None:
        # Only tensors and primitive types pass.
        state.load_state_dicts(torch.load(io.BytesIO(saved), weights_only=True))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.03)
    wrapped.register_comm_hook(state, compressed_hook)
    means = []
    with pytest.WarningsRecorder(_ispytest=True) as record:
        for step in range(first, first + len(scales)):
            model.zero_grad()
            state.loss_scale = scales[step - first]
            (wrapped(random_gradients(context.rank, step)) * state.loss_scale).backward()
            means.append(
                {n: p.grad.clone() / state.loss_scale for n, p in model.named_parameters()}
            )
    buffer = io.BytesIO()
    torch.save(state.state_dict(), buffer)
    state.close()
    return means, buffer.getvalue(), [str(w.message) for w in record if "ranks" in str(w.message)]


def merged(saved: list[bytes]) -> bytes:
    """Return the states of all ranks as one checkpoint."""
    buffer = io.BytesIO()
    torch.save([torch.load(io.BytesIO(one), weights_only=True) for one in saved], buffer)
    return buffer.getvalue()


def unsent(saved: list[bytes]) -> dict[str, Tensor]:
    """Return the sum of all residuals, in float64."""
    total = {
        name: torch.zeros(shape, dtype=torch.float64).view(-1) for name, shape in SHAPES.items()
    }
    for one in saved:
        for entry in torch.load(io.BytesIO(one), weights_only=True).get("units", []):
            total[entry["gradient"]][entry["start"] : entry["stop"]] += entry["tensors"][RESIDUAL]
    return total


def mean_of_ranks(world_size: int, step: int, name: str) -> Tensor:
    own = [random_gradients(rank, step)[name].double() for rank in range(world_size)]
    return torch.stack(own).mean(0)


@pytest.mark.parametrize("topology", ["ps", "ring"])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 2), (3, 1), (1, 2)])
def test_nothing_is_lost_when_a_run_goes_on(
    pool: RankPool, topology: str, before: int, after: int
) -> None:
    options = {"algorithm": "tbq", "topology": topology}
    first = pool.run(train, before, options, 0, None)
    second = pool.run(train, after, options, STEPS, merged([saved for _, saved, _ in first]))
    remaining = unsent([saved for _, saved, _ in second])
    for name in SHAPES:
        got = sum(means[name].double() for means in first[0][0] + second[0][0])
        got = got.view(-1) + remaining[name] / after
        given = sum(mean_of_ranks(before, step, name) for step in range(STEPS))
        given += sum(mean_of_ranks(after, step, name) for step in range(STEPS, 2 * STEPS))
        torch.testing.assert_close(got, given.view(-1), rtol=0, atol=1e-5)
    warning = (
        f"The checkpoint has residuals of {before} ranks, and this run has {after}: they were "
        "shared out again."
    )
    has_changed = before > 1 and after > 1 and before != after
    assert all(messages == [warning] * has_changed for _, _, messages in second)


def train_again(
    context: RankContext, options: dict[str, Any], with_residuals: bool
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Return the means of some steps after a return to the step before them, twice."""
    context.init_process_group()
    model = LinearLoss()
    state = GradientSyncState(min_bytes=0, coordinator="none", **options)
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.03)
    wrapped.register_comm_hook(state, compressed_hook)

    def means_of(steps: range) -> list[dict[str, Tensor]]:
        return means_of_steps(wrapped, partial(random_gradients, context.rank), steps)

    means_of(range(STEPS))
    own = copy.deepcopy(state.state_dict())
    if not with_residuals:
        own = {"step": STEPS, "algorithm": state.algorithm}
    saved: list[Any] = [None] * context.world_size
    dist.all_gather_object(saved, own)
    runs = []
    if with_residuals:
        runs.append(means_of(range(STEPS, 2 * STEPS)))
    while len(runs) < 2:
        state.load_state_dicts(saved)
        runs.append(means_of(range(STEPS, 2 * STEPS)))
    state.close()
    return runs[0], runs[1]


@pytest.mark.parametrize("with_residuals", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "tbq", "topology": "ps"},
        {"algorithm": "onebit", "topology": "ring"},
        # Its random numbers depend on the step.
        {"algorithm": "terngrad", "topology": "ps"},
        {"algorithm": "none"},
    ],
    ids=lambda options: options["algorithm"],
)
def test_a_run_that_returns_to_an_earlier_step_repeats_it(
    pool: RankPool, options: dict[str, Any], with_residuals: bool
) -> None:
    for first, second in pool.run(train_again, 3, options, with_residuals):
        for means, again in zip(first, second, strict=True):
            for name in SHAPES:
                assert torch.equal(means[name], again[name]), name


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_before_the_first_step_has_all_that_was_loaded(
    pool: RankPool, ranks: int
) -> None:
    options = {"algorithm": "tbq", "topology": "ps"}
    first = merged([saved for _, saved, _ in pool.run(train, 2, options, 0, None)])
    # This run ends before its first step.
    second = merged([saved for _, saved, _ in pool.run(train, ranks, options, STEPS, first, ())])
    direct = pool.run(train, 2, options, STEPS, first)
    passed_on = pool.run(train, 2, options, STEPS, second)
    for (means, _, messages), (others, _, others_messages) in zip(direct, passed_on, strict=True):
        assert messages == others_messages == []
        for one, other in zip(means, others, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SHAPES)


@pytest.mark.parametrize("topology", ["ps", "ring"])
@pytest.mark.parametrize("algorithm", ["onebit", "dgc", "qsgd"])
def test_a_resumed_run_continues_exactly(pool: RankPool, topology: str, algorithm: str) -> None:
    options = {"algorithm": algorithm, "topology": topology}
    whole = pool.run(
        train, 3, options, STEPS, merged([s for _, s, _ in pool.run(train, 3, options, 0, None)])
    )
    again = pool.run(train_twice, 3, options)
    for (means, _, _), expected in zip(whole, again, strict=True):
        for one, other in zip(means, expected, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SHAPES)


def train_twice(context: RankContext, options: dict[str, Any]) -> list[dict[str, Tensor]]:
    """Return the means of the second half of an uninterrupted run."""
    context.init_process_group()
    model = LinearLoss()
    state = GradientSyncState(min_bytes=0, coordinator="none", **options)
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.03)
    wrapped.register_comm_hook(state, compressed_hook)
    means = []
    for step in range(2 * STEPS):
        model.zero_grad()
        wrapped(random_gradients(context.rank, step)).backward()
        means.append({n: p.grad.clone() for n, p in model.named_parameters()})
    state.close()
    return means[STEPS:]


@pytest.mark.parametrize("topology", ["ps", "ring"])
def test_the_plan_of_a_resumed_run_may_be_another(pool: RankPool, topology: str) -> None:
    """Owners of a ring are its last ranks, so most units change hands."""
    other = {"ps": "ring", "ring": "ps"}[topology]
    first = pool.run(train, 3, {"algorithm": "tbq", "topology": topology}, 0, None)
    second = pool.run(
        train,
        3,
        {"algorithm": "tbq", "topology": other},
        STEPS,
        merged([saved for _, saved, _ in first]),
    )
    remaining = unsent([saved for _, saved, _ in second])
    for name in SHAPES:
        got = sum(means[name].double() for means in first[0][0] + second[0][0])
        given = sum(mean_of_ranks(3, step, name) for step in range(2 * STEPS))
        torch.testing.assert_close(
            got.view(-1) + remaining[name] / 3, given.view(-1), rtol=0, atol=1e-5
        )


def test_the_loss_scale_leaves_no_trace_in_residuals(pool: RankPool) -> None:
    options = {"algorithm": "onebit"}
    plain = pool.run(train, 2, options, 0, None)
    scaled = pool.run(train, 2, options, 0, None, (1024.0, 2.0, 0.5))
    for (means, saved, _), (others, other_saved, _) in zip(plain, scaled, strict=True):
        assert all(
            torch.equal(one[name], other[name])
            for one, other in zip(means, others, strict=True)
            for name in SHAPES
        )
        one, other = (torch.load(io.BytesIO(s), weights_only=True) for s in (saved, other_saved))
        for entry, other_entry in zip(one["units"], other["units"], strict=True):
            assert torch.equal(entry["tensors"][RESIDUAL], other_entry["tensors"][RESIDUAL])


def overflow(context: RankContext, step_of_overflow: int) -> list[dict[str, Tensor]]:
    """Return the means of all steps but one, in which a gradient of rank 0 is infinite."""
    context.init_process_group()
    model = LinearLoss()
    state = GradientSyncState(algorithm="tbq", topology="ps", min_bytes=0, keeps_previous=True)
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    means = []
    for step in range(STEPS):
        if step == step_of_overflow:
            model.zero_grad()
            values = random_gradients(context.rank, 99)
            if context.rank == 0:
                values["weight"][3, 3] = torch.inf
            wrapped(values).backward()
            assert not model.weight.grad.isfinite().all()
            state.undo_step()
        model.zero_grad()
        wrapped(random_gradients(context.rank, step)).backward()
        means.append({n: p.grad.clone() for n, p in model.named_parameters()})
    state.close()
    return means


@pytest.mark.parametrize("step", [0, 2])
def test_a_step_that_is_undone_leaves_no_trace(pool: RankPool, step: int) -> None:
    for means, expected in zip(pool.run(overflow, 2, step), pool.run(overflow, 2, -1), strict=True):
        for one, other in zip(means, expected, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SHAPES)


def without_samples(context: RankContext) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Return the means of three steps; rank 1 has no samples in the second. Also its residuals."""
    context.init_process_group()
    model = LinearLoss()
    state = GradientSyncState(algorithm="tbq", topology="ps", min_bytes=0)
    state.name_parameters(model.named_parameters())
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, compressed_hook)
    means, residuals = [], []
    for step in range(3):
        state.has_data = step != 1 or context.rank != 1
        model.zero_grad()
        (wrapped(random_gradients(context.rank, step)) * state.has_data).backward()
        means.append({n: p.grad.clone() for n, p in model.named_parameters()})
        own = [e["tensors"][RESIDUAL] for e in state.state_dict()["units"] if not e["part"]]
        residuals.append(torch.cat([own.flatten() for own in own]) if own else torch.zeros(0))
    state.close()
    return means, residuals


def test_a_rank_without_samples_keeps_its_residuals(pool: RankPool) -> None:
    (means, first), (others, second) = pool.run(without_samples, 2)
    assert all(torch.equal(a[n], b[n]) for a, b in zip(means, others, strict=True) for n in SHAPES)
    assert torch.equal(second[0], second[1])
    assert not torch.equal(second[1], second[2])
    assert not torch.equal(first[0], first[1])


def test_states_are_loaded_before_the_first_step() -> None:
    state = GradientSyncState(algorithm="tbq")
    with pytest.raises(ConfigError, match=r"a list of the states of all ranks, got \[\]"):
        state.load_state_dicts([])
    with pytest.raises(ConfigError, match="keeps_previous must be True for `undo_step`"):
        state.undo_step()
