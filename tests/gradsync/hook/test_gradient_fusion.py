"""Small gradients travel together, whatever bucket they come in, and none is lost or mixed up."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dlres.codecs.gradient import RESIDUAL
from lightning_dlres.gradsync.hook import planner
from lightning_dlres.gradsync.hook.ddp_hook import compressed_hook
from lightning_dlres.gradsync.hook.ddp_state import GradientSyncState
from lightning_dlres.gradsync.hook.gradient_fusion import GradientFusion, OnDone
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.support.rank_pool import RankContext, RankPool

LAYERS, MIN_BYTES = 6, 4096
# Biases have two dtypes, which DDP puts into buckets of their own.
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
for layer in range(LAYERS):
    SHAPES[f"{layer}.weight"] = (40, 60), torch.float32
    SHAPES[f"{layer}.bias"] = (60 + layer,), torch.float64 if layer == 2 else torch.float32
    SHAPES[f"{layer}.scale"] = (), torch.float32

counts = st.lists(st.integers(0, 30), max_size=12)


def fusion_of(sizes: list[int], most: int, fused: int) -> GradientFusion:
    gradients = [GradientSpec(name=f"g{i}", count=count) for i, count in enumerate(sizes)]
    return GradientFusion(gradients, most_elements=most, fused_elements=fused)


@given(counts, st.integers(-1, 20), st.integers(1, 50))
def test_a_fused_gradient_has_small_neighbours_only(
    sizes: list[int], most: int, fused: int
) -> None:
    fusion = fusion_of(sizes, most, fused)
    assert sum(spec.count for spec in fusion.specs) == sum(sizes)
    assert len({spec.name for spec in fusion.specs}) == len(fusion.specs)
    seen = []
    for spec in fusion.specs:
        pieces = fusion.split({spec.name: torch.zeros(spec.count)})
        assert spec.is_compressible == (len(pieces) == 1)
        if len(pieces) > 1:
            assert spec.count <= fused
            assert all(piece.numel() <= most for piece in pieces.values())
        seen += [(name, piece.numel()) for name, piece in pieces.items()]
    assert sorted(seen) == sorted((f"g{i}", count) for i, count in enumerate(sizes))


@given(counts, st.integers(0, 20), st.integers(1, 50), st.randoms(use_true_random=False), st.data())
def test_means_go_back_to_their_gradients(
    sizes: list[int], most: int, fused: int, order: random.Random, data: st.DataObject
) -> None:
    """The order of buckets, and of the gradients that become means, is arbitrary."""
    fusion = fusion_of(sizes, most, fused)
    names = [f"g{i}" for i in range(len(sizes))]
    order.shuffle(names)
    # An element is the number of the gradient. A mean has the sign changed.
    gradients = {name: torch.full((sizes[int(name[1:])],), float(name[1:])) for name in names}
    started: list[tuple[Mapping[str, Tensor], OnDone]] = []
    flags: list[bool] = []

    def start(gradients: Mapping[str, Tensor], on_done: OnDone, has_data: bool) -> None:
        started.append((gradients, on_done))
        flags.append(has_data)

    done: dict[int, list[BaseException | None]] = {}
    buckets = []
    while names:
        size = data.draw(st.integers(1, len(names)))
        buckets.append([names.pop() for _ in range(size)])
    for index, bucket in enumerate(buckets):
        done[index] = []
        fusion.start(
            {name: gradients[name] for name in bucket}, start, done[index].append, has_data=True
        )
    assert all(flags)
    assert {name for some, _ in started for name in some} == {spec.name for spec in fusion.specs}
    order.shuffle(started)
    for some, on_done in started:
        for gradient in some.values():
            gradient.neg_()
        on_done(None)
    assert all(results == [None] for results in done.values())
    for name, gradient in gradients.items():
        assert torch.equal(gradient, torch.full_like(gradient, -float(name[1:])))


def test_an_error_reaches_each_bucket_once() -> None:
    fusion = fusion_of([5, 5, 50], most=10, fused=100)
    started: list[OnDone] = []
    results: list[list[BaseException | None]] = [[], []]

    def start(gradients: Mapping[str, Tensor], on_done: OnDone, has_data: bool) -> None:
        started.append(on_done)

    fusion.start(
        {"g0": torch.ones(5), "g2": torch.ones(50)}, start, results[0].append, has_data=True
    )
    fusion.start({"g1": torch.ones(5)}, start, results[1].append, has_data=True)
    error = ValueError("lost")
    for on_done in started:
        on_done(error)
    assert results == [[error], [error]]


def test_a_fused_gradient_does_not_wait_for_a_member_that_does_not_come() -> None:
    fusion = fusion_of([5, 3, 50, 2], most=10, fused=100)
    started: list[tuple[Mapping[str, Tensor], OnDone]] = []
    results: list[BaseException | None] = []

    def start(gradients: Mapping[str, Tensor], on_done: OnDone, has_data: bool) -> None:
        started.append((gradients, on_done))

    for _ in range(2):
        own = {"g3": torch.full((2,), 4.0), "g0": torch.ones(5)}
        fusion.start(own, start, results.append, has_data=True)
        assert not started
        fusion.end_step()
        ((gradients, on_done),) = started
        assert gradients["g0 and 2 more"].tolist() == [1] * 5 + [0] * 3 + [4] * 2
        gradients["g0 and 2 more"].neg_()
        on_done(None)
        assert own["g0"].tolist() == [-1] * 5
        assert own["g3"].tolist() == [-4] * 2
        started.clear()
    assert results == [None, None]
    fusion.end_step()
    assert not started


def test_saved_states_move_with_their_gradients() -> None:
    fusion = fusion_of([5, 50, 7], most=10, fused=100)
    entries = [
        {"gradient": name, "start": 1, "stop": 4, "tensors": {}} for name in ("g0", "g1", "g2", "x")
    ]
    (moved,) = fusion.fused_states([{"world_size": 1, "units": entries}])
    assert moved["world_size"] == 1
    assert [(e["gradient"], e["start"], e["stop"]) for e in moved["units"]] == [
        ("g0 and 1 more", 1, 4),
        ("g1", 1, 4),
        ("g0 and 1 more", 6, 9),
        ("x", 1, 4),
    ]


class ManyLayers(nn.Module):
    """Module whose parameters get random gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.ParameterDict(
            {
                name.replace(".", "_"): nn.Parameter(torch.zeros(shape, dtype=dtype))
                for name, (shape, dtype) in SHAPES.items()
            }
        )

    def forward(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        losses = [
            (p * torch.randn(p.shape, generator=generator)).sum() for p in self.values.values()
        ]
        return torch.stack([loss.double() for loss in losses]).sum()


def train(
    context: RankContext,
    options: dict[str, Any] | None,
    steps: Sequence[int],
    *,
    saved: list[dict[str, Any]] | None = None,
    skipped: int = -1,
) -> tuple[list[dict[str, Tensor]], dict[str, Any], int]:
    """Return the means of the steps, the saved state, and the number of units of the plan.

    Args:
        context: This rank.
        options: Options of the hook's state; None for plain DDP.
        steps: Numbers of the steps, which choose the gradients.
        saved: States of all ranks of the run to continue.
        skipped: Step that an optimizer skips.
    """
    context.init_process_group()
    model = ManyLayers()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
    state = None
    means = []
    with pytest.MonkeyPatch.context() as patch:
        # Two fused gradients or more.
        patch.setattr(planner, "FUSED_BYTES", 700)
        if options is not None:
            state = GradientSyncState(keeps_previous=skipped >= 0, **options)
            state.name_parameters(model.named_parameters())
            if saved is not None:
                state.load_state_dicts(saved)
            wrapped.register_comm_hook(state, compressed_hook)
        for step in steps:
            model.zero_grad()
            wrapped(context.rank, step).backward()
            if state is not None and step == skipped:
                state.undo_step()
                continue
            means.append({n: p.grad.clone() for n, p in model.named_parameters()})  # type: ignore[union-attr]
    if state is None:
        return means, {}, 0
    result = copy.deepcopy(state.state_dict())
    units = 0 if state.plan is None else len(state.plan.units)
    state.close()
    return means, result, units


def options_of(algorithm: str, topology: str = "ps", coordinator: str = "none") -> dict[str, Any]:
    return {
        "algorithm": algorithm,
        "topology": topology,
        "coordinator": coordinator,
        "min_bytes": MIN_BYTES,
    }


@pytest.mark.parametrize(
    ("topology", "coordinator"), [("ps", "none"), ("ring", "none"), ("ps", "replay")]
)
def test_small_gradients_of_all_buckets_become_means(
    pool: RankPool, topology: str, coordinator: str
) -> None:
    plain = pool.run(train, 3, None, range(6))
    ranks = pool.run(train, 3, options_of("int8", topology, coordinator), range(6))
    for means, _, units in ranks:
        # Fewer than one for each gradient.
        assert LAYERS < units <= 2 * LAYERS
        for mean, first, expected in zip(means, ranks[0][0], plain[0][0], strict=True):
            for name, value in mean.items():
                assert torch.equal(value, first[name])
                tolerance = 0.05 if "weight" in name else 1e-6
                torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance)


def test_a_resumed_run_continues_exactly(pool: RankPool) -> None:
    whole = pool.run(train, 2, options_of("tbq"), range(8))
    first = pool.run(train, 2, options_of("tbq"), range(4))
    saved = [state for _, state, _ in first]
    second = pool.run(train, 2, options_of("tbq"), range(4, 8), saved=saved)
    for (means, _, _), (rest, _, _) in zip(whole, second, strict=True):
        for mean, other in zip(means[4:], rest, strict=True):
            assert all(torch.equal(mean[name], other[name]) for name in mean)


def test_a_skipped_step_leaves_no_trace(pool: RankPool) -> None:
    with_skip = pool.run(train, 2, options_of("tbq"), range(6), skipped=2)
    without = pool.run(train, 2, options_of("tbq"), [0, 1, 3, 4, 5])
    for (means, _, _), (others, _, _) in zip(with_skip, without, strict=True):
        for mean, other in zip(means, others, strict=True):
            assert all(torch.equal(mean[name], other[name]) for name in mean)


def test_what_an_earlier_run_left_unsent_is_sent(pool: RankPool) -> None:
    """As after a change to torch's all-reduce, which leaves residuals of all gradients."""
    unsent = {
        name: torch.full((torch.Size(shape).numel(),), 0.5) for name, (shape, _) in SHAPES.items()
    }
    units = [
        {
            "gradient": "values." + name.replace(".", "_"),
            "start": 0,
            "stop": value.numel(),
            "part": 0,
            "codec": "raw",
            "tensors": {RESIDUAL: value},
        }
        for name, value in unsent.items()
    ]
    saved = [{"world_size": 2, "units": units, "step": 1, "algorithm": "none"}] * 2
    plain = pool.run(train, 2, None, range(1, 2))
    ranks = pool.run(train, 2, options_of("raw"), range(1, 2), saved=saved)
    for (means, _, _), (expected, _, _) in zip(ranks, plain, strict=True):
        for name, value in means[0].items():
            torch.testing.assert_close(value, expected[0][name] + 0.5, rtol=0, atol=1e-6)


def train_some_of_the_named(context: RankContext, case: str, is_plain: bool) -> dict[str, Tensor]:
    """Return the means of a step, of a module that has not all parameters with names.

    Args:
        context: This rank.
        case: Reason why some gradients do not come; see the test.
        is_plain: True for plain DDP.
    """
    context.init_process_group()
    torch.manual_seed(0)
    embedding = nn.Embedding(7, 6, sparse=case == "sparse")
    model = nn.Sequential(embedding, nn.Linear(6, 5), nn.Linear(5, 4))
    named = nn.Sequential(nn.Linear(3, 2), model, nn.Linear(2, 2)) if case == "outside" else model
    state = GradientSyncState(algorithm="int8", topology="ps", coordinator="none", timeout=20)
    state.name_parameters(named.named_parameters())
    if case == "frozen":
        model[1].bias.requires_grad_(False)
    if case == "ignored":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.bias"])
    wrapped = DistributedDataParallel(model)
    if not is_plain:
        wrapped.register_comm_hook(state, compressed_hook)
    for step in range(3):
        model.zero_grad()
        inputs = torch.arange(4) + step % 2 + context.rank
        wrapped(inputs).square().mean().backward()
    state.close()
    return {
        name: parameter.grad.to_dense()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and (case, name) != ("ignored", "1.bias")
    }


@pytest.mark.parametrize("case", ["outside", "sparse", "frozen", "ignored"])
def test_named_parameters_without_gradients_delay_no_others(pool: RankPool, case: str) -> None:
    """Of parameters outside the module, with sparse gradients, frozen later, or ignored by DDP."""
    plain = pool.run(train_some_of_the_named, 2, case, True)
    for means in pool.run(train_some_of_the_named, 2, case, False):
        assert means.keys() == plain[0].keys()
        for name, value in means.items():
            torch.testing.assert_close(value, plain[0][name])
