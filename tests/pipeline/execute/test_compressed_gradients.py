"""Gradients that are compressed between replicas: every replica gets the same sums, nothing is
lost, and skipped or repeated steps leave no trace."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dlres.codecs.gradient import RESIDUAL, gradient_codec
from lightning_dlres.core.errors import PeerError, PeerLostError, PeerTimeoutError
from lightning_dlres.core.trace import Tracer
from lightning_dlres.pipeline.execute.compressed_gradients import CompressedGradientSync
from lightning_dlres.pipeline.execute.gradients import make_groups
from lightning_dlres.pipeline.execute.partition import ModelLayers
from lightning_dlres.pipeline.execute.replica_compression import ReplicaCompression
from lightning_dlres.pipeline.plan.plan import PipelinePlan, consecutive_replicas
from lightning_dlres.pipeline.stage.gradient_buffer import GradientBuffer
from tests.support.rank_pool import RankContext, RankPool

# Gradients of at least this size are compressed here: those of weights.
MIN_BYTES = 4 * 100
LAYERS = 4
COMPRESSED = {"net.0.weight", "net.1.weight", "net.2.weight"}


class Model(nn.Module):
    """Four layers of which three have a gradient to compress, and a parameter outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(70, 90),
            nn.Linear(90, 70).bfloat16(),
            nn.Linear(10, 10, bias=False),
            nn.Linear(40, 40).double(),
        )
        self.outer = nn.Parameter(torch.zeros(20, 20))


@dataclass(frozen=True)
class Step:
    """A step of all ranks.

    Attributes:
        number: Seed of the gradients.
        scale: Loss scale.
        missing: Replica and name of the gradients that are missing.
        idle: Replicas without a micro-batch.
        frozen: Name of a parameter that is not trained.
        is_infinite: True if a gradient of the first replica is infinite.
        then: "undo" to undo the step, "skip" if the optimizer skips, "end" if it steps; "" to
            accumulate gradients.
    """

    number: int
    scale: float = 1.0
    missing: frozenset[tuple[int, str]] = frozenset()
    idle: frozenset[int] = frozenset()
    frozen: str = ""
    is_infinite: bool = False
    then: str = "end"


@dataclass(frozen=True)
class Run:
    """Steps of a run under a plan.

    Attributes:
        codec: Name of the codec.
        plan: Plan of the run.
        steps: Steps of the run.
        saved: Checkpoint to continue from.
    """

    codec: str
    plan: PipelinePlan
    steps: tuple[Step, ...]
    saved: bytes | None = None


@dataclass
class Result:
    """Result of a run on one rank.

    Attributes:
        sums: Sums of each step by name, without the loss scale.
        states: States of this rank after each step.
        checkpoint: States of all ranks, on all ranks.
        warnings: Warnings of loading.
    """

    sums: list[dict[str, Tensor]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    checkpoint: bytes = b""
    warnings: list[str] = field(default_factory=list)


def plan_of(replicas: int, *split: int) -> PipelinePlan:
    stages = len(split)
    return PipelinePlan(replicas=consecutive_replicas(replicas * stages, stages), split=split)


def gradient(name: str, replica: int, step: Step) -> Tensor | None:
    """Return a replica's gradient, without the loss scale; None if it has none."""
    if replica in step.idle or (replica, name) in step.missing or name == step.frozen:
        return None
    parameter = dict(Model().named_parameters())[name]
    generator = torch.Generator().manual_seed(1000 * step.number + 100 * replica + len(name))
    value = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    if step.is_infinite and not replica:
        value.view(-1)[0] = torch.inf
    return value


@contextmanager
def opened(
    context: RankContext, codec: str, plan: PipelinePlan, timeout: float = 20.0
) -> Iterator[tuple[Model, ReplicaCompression, Any]]:
    """Context manager that yields a model, its compression, and a function that makes the sync."""
    model = Model()
    layers = ModelLayers(model, tuple(f"net.{i}" for i in range(LAYERS)), tuple(model.net))
    owners = layers.owners(plan)
    groups = make_groups(plan, owners, timedelta(seconds=timeout))
    _, stage = plan.position(context.rank)
    compression = ReplicaCompression(
        gradient_codec(codec),
        layers=layers,
        owners=owners,
        plan=plan,
        rank=context.rank,
        timeout=timeout,
        check=lambda: None,
        undoes_windows=True,
        min_bytes=MIN_BYTES,
        bucket_bytes=1,
    )

    def make_sync() -> CompressedGradientSync:
        return CompressedGradientSync(
            layers.trainable(plan.layers_of(stage)),
            layers.non_pipelined_parameters(),
            compression=compression,
            owners=owners,
            groups=groups,
            stage=stage,
            timeout=timeout,
            check=lambda: None,
            tracer=Tracer(),
        )

    orderly = False
    try:
        yield model, compression, make_sync
        orderly = True
    finally:
        compression.close(orderly=orderly)


def held_parameters(model: Model, plan: PipelinePlan, stage: int) -> dict[str, nn.Parameter]:
    own = [f"net.{layer}." for layer in plan.layers_of(stage)]
    return {n: p for n, p in model.named_parameters() if n.startswith((*own, "outer"))}


def run(context: RankContext, *runs: Run) -> list[Result]:
    """Run several runs one after the other; a run without a checkpoint takes that of the last."""
    context.init_process_group()
    results: list[Result] = []
    for planned_run in runs:
        saved = planned_run.saved
        if saved is None and results:
            saved = results[-1].checkpoint
        results.append(_run(context, replace(planned_run, saved=saved)))
    return results


def _run(context: RankContext, planned_run: Run) -> Result:
    plan, result = planned_run.plan, Result()
    replica, stage = plan.position(context.rank)
    with opened(context, planned_run.codec, plan) as (model, compression, make_sync):
        if planned_run.saved:
            # Only tensors and primitive types pass.
            saved = torch.load(io.BytesIO(planned_run.saved), weights_only=True)
            with pytest.WarningsRecorder(_ispytest=True) as record:
                compression.load_states(saved, torch.device("cpu"))
            result.warnings = [str(w.message) for w in record if "residuals" in str(w.message)]
        parameters = held_parameters(model, plan, stage)
        for step in planned_run.steps:
            for name, parameter in parameters.items():
                parameter.requires_grad_(name != step.frozen)
            sync, buffer = make_sync(), GradientBuffer()
            sync.begin(loss_scale=step.scale, has_data=replica not in step.idle)
            for name, parameter in parameters.items():
                value = gradient(name, replica, step)
                if value is not None:
                    buffer.add(parameter, value * step.scale)
            for position in reversed(range(len(plan.layers_of(stage)))):
                sync.layer_done(position, buffer)
            sync.finish(buffer)
            totals = {n: buffer.gradients.get(p) for n, p in parameters.items()}
            result.sums.append({n: t / step.scale for n, t in totals.items() if t is not None})
            if step.then == "undo":
                sync.undo_step()
            elif step.then:
                compression.end_window(is_skipped=step.then == "skip")
            result.states.append(compression.state_dict())
        states: list[Any] = [None] * plan.world_size
        dist.all_gather_object(states, compression.state_dict())
        stream = io.BytesIO()
        torch.save(compression.merge(states), stream)
        result.checkpoint = stream.getvalue()
    return result


def unsent(checkpoint: bytes) -> dict[str, Tensor]:
    """Return the sums of all residuals in a checkpoint, in float64."""
    model = Model()
    total = {
        n: torch.zeros(p.numel(), dtype=torch.float64)
        for n, p in model.named_parameters()
        if n in COMPRESSED
    }
    for replica in torch.load(io.BytesIO(checkpoint), weights_only=True)["replicas"]:
        for entry in replica["units"]:
            part = total[entry["gradient"]][entry["start"] : entry["stop"]]
            part += entry["tensors"].get(RESIDUAL, 0)
    return total


def sums_of(results: Iterable[Result], plan: PipelinePlan) -> list[dict[str, Tensor]]:
    """Return the sums of each step, after checking that all replicas have the same ones."""
    by_rank = [result.sums for result in results]
    merged: list[dict[str, Tensor]] = []
    for step in range(len(by_rank[0])):
        merged.append({})
        for stage in range(plan.stages):
            first, *others = [by_rank[replica[stage]][step] for replica in plan.replicas]
            for other in others:
                assert other.keys() == first.keys()
                assert all(torch.equal(other[name], first[name]) for name in first)
            merged[-1].update(first)
    return merged


def assert_conserved(pairs: Iterable[tuple[Run, list[Result]]]) -> None:
    """Assert that the sums of all steps, and the residuals at the end, are the gradients."""
    zero = torch.zeros((), dtype=torch.float64)
    got, given = dict.fromkeys(COMPRESSED, zero), dict.fromkeys(COMPRESSED, zero)
    for planned_run, results in pairs:
        for sums in sums_of(results, planned_run.plan):
            for name in COMPRESSED & sums.keys():
                got[name] = got[name] + sums[name].double().view(-1)
        for step in planned_run.steps:
            for replica in range(len(planned_run.plan.replicas)):
                for name in COMPRESSED:
                    value = gradient(name, replica, step)
                    if value is not None:
                        given[name] = given[name] + value.double().view(-1)
        last = results[0].checkpoint
    for name, rest in unsent(last).items():
        # The sums of a bfloat16 parameter are rounded to 8 bits.
        tolerance = 0.1 if name == "net.1.weight" else 2e-5
        sent = given[name].expand_as(rest)
        torch.testing.assert_close(got[name] + rest, sent, rtol=0, atol=tolerance)


STEPS = (
    Step(0),
    Step(1, missing=frozenset({(0, "net.0.weight"), (1, "net.2.weight"), (1, "net.3.bias")})),
    Step(2, idle=frozenset({1}), scale=256.0),
    Step(3, missing=frozenset((r, n) for r in range(3) for n in ("net.0.weight", "net.0.bias"))),
    Step(4, frozen="net.2.weight"),
)


@pytest.mark.parametrize(
    ("codec", "plan"),
    [
        ("tbq", plan_of(2, 1, 3)),
        ("int8", plan_of(3, 4)),
        *(
            pytest.param(codec, plan, marks=pytest.mark.exhaustive)
            for codec in ("onebit", "fp16", "bf16", "fp8", "dgc", "graddrop")
            for plan in (plan_of(2, 4), plan_of(3, 4), plan_of(2, 2, 2))
        ),
    ],
)
def test_replicas_get_the_same_sums_and_nothing_is_lost(
    pool: RankPool, codec: str, plan: PipelinePlan
) -> None:
    planned_run = Run(codec, plan, STEPS)
    results = [result for (result,) in pool.run(run, plan.world_size, planned_run)]
    assert_conserved([(planned_run, results)])
    sums = sums_of(results, plan)
    for number, step in enumerate(STEPS):
        for name, parameter in Model().named_parameters():
            values = [gradient(name, replica, step) for replica in range(len(plan.replicas))]
            parts = [value for value in values if value is not None]
            if name in COMPRESSED:
                continue
            # Gradients that are not compressed are exact sums over all holders.
            holders = plan.stages if name == "outer" else 1
            assert (name in sums[number]) == bool(parts)
            if parts:
                total = holders * sum(parts[1:], start=parts[0])
                # The order of the sum matters in bfloat16.
                atol = 0.1 if total.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(sums[number][name], total, rtol=0, atol=atol)
                assert sums[number][name].dtype == parameter.dtype


def test_residuals_are_sent_in_steps_without_a_gradient(pool: RankPool) -> None:
    nowhere = frozenset((r, n) for r in range(2) for n in ("net.0.weight", "net.1.weight"))
    never = frozenset((r, "net.2.weight") for r in range(2))
    steps = (Step(0, missing=never), *(Step(n, missing=nowhere | never) for n in (1, 2)))
    for codec, has_residuals in (("tbq", True), ("qsgd", False)):
        planned_run = Run(codec, plan_of(2, 4), steps)
        results = [result for (result,) in pool.run(run, 2, planned_run)]
        sums = sums_of(results, planned_run.plan)
        assert {"net.0.weight", "net.1.weight"} <= sums[0].keys()
        for later in sums[1:]:
            assert ("net.0.weight" in later) == has_residuals, "residuals are sent, zeros are not"
            assert "net.2.weight" not in later
        if has_residuals:
            assert_conserved([(planned_run, results)])


def test_codecs_of_enough_bits_are_near_the_exact_sums(pool: RankPool) -> None:
    for codec, tolerance in (("fp16", 1e-3), ("int8", 0.03)):
        planned_run = Run(codec, plan_of(3, 4), (Step(0), Step(1)))
        results = [result for (result,) in pool.run(run, 3, planned_run)]
        for step, sums in zip(planned_run.steps, sums_of(results, planned_run.plan), strict=True):
            total = sum(gradient("net.0.weight", replica, step) for replica in range(3))
            error = torch.linalg.vector_norm(sums["net.0.weight"] - total)
            assert error < tolerance * torch.linalg.vector_norm(total), codec


def equal_states(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if the states of two ranks are equal to the bit."""
    keys = ("gradient", "start", "stop", "part")
    first, second = (
        {tuple(entry[key] for key in keys): entry["tensors"] for entry in states["units"]}
        for states in (one, other)
    )
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[key][name])
        for key, tensors in first.items()
        for name, tensor in tensors.items()
    )


def test_the_loss_scale_leaves_no_trace(pool: RankPool) -> None:
    plan, steps = plan_of(2, 4), tuple(Step(n) for n in range(3))
    scaled = tuple(
        replace(step, scale=scale) for step, scale in zip(steps, (1024.0, 2.0, 0.5), strict=True)
    )
    runs = Run("onebit", plan, steps, b""), Run("onebit", plan, scaled, b"")
    for plain, other in pool.run(run, 2, *runs):
        for sums, other_sums in zip(plain.sums, other.sums, strict=True):
            assert all(torch.equal(sums[name], other_sums[name]) for name in COMPRESSED)
        assert equal_states(plain.states[-1], other.states[-1])


@pytest.mark.parametrize("first", [0, 1])
def test_steps_that_are_not_used_leave_no_trace(pool: RankPool, first: int) -> None:
    """The steps `first` and later: an undone one, and windows of two steps that are skipped."""
    plan, used = plan_of(2, 4), tuple(Step(n) for n in range(3))
    undone = Step(7, then="undo")
    overflow = (Step(8, then=""), Step(9, is_infinite=True, then="skip"))
    # The second step of a window is undone, and the step that runs in its place has an overflow.
    nested = (Step(8, then=""), undone, Step(9, is_infinite=True, then="skip"))
    unused = (*used[:first], undone, *overflow, *nested, *used[first:])
    kept = [number for number, step in enumerate(unused) if step in used]
    for plain, other in pool.run(
        run, 2, Run("onebit", plan, used, b""), Run("onebit", plan, unused, b"")
    ):
        for state, number in zip(plain.states, kept, strict=True):
            assert equal_states(state, other.states[number])
        infinite = [s for s, step in zip(other.sums, unused, strict=True) if step.is_infinite]
        assert not any(sums["net.0.weight"].isfinite().all() for sums in infinite)


def test_a_replica_without_a_micro_batch_keeps_its_residuals(pool: RankPool) -> None:
    steps = (Step(0), Step(1, idle=frozenset({1})))
    planned_run = Run("tbq", plan_of(2, 4), steps)
    (first,), (second,) = pool.run(run, 2, planned_run)

    def own(states: dict[str, Any]) -> dict[str, Any]:
        return {"units": [entry for entry in states["units"] if not entry["part"]]}

    assert own(second.states[0])["units"]
    assert equal_states(*map(own, second.states))
    assert not equal_states(*map(own, first.states))


def test_a_resumed_run_continues_exactly(pool: RankPool) -> None:
    plan, steps = plan_of(2, 2, 2), tuple(Step(n) for n in range(4))
    whole = Run("dgc", plan, steps)
    halves = Run("dgc", plan, steps[:2], b""), Run("dgc", plan, steps[2:])
    for once, first, second in pool.run(run, 4, whole, *halves):
        for sums, others in zip(once.sums, first.sums + second.sums, strict=True):
            assert all(torch.equal(sums[name], others[name]) for name in sums.keys() & COMPRESSED)
        assert equal_states(once.states[-1], second.states[-1])
        assert once.states[-1]["step"] == second.states[-1]["step"] == 4
        assert not second.warnings


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (plan_of(2, 4), plan_of(3, 4)),
        *(
            pytest.param(before, after, marks=pytest.mark.exhaustive)
            for before, after in [
                (plan_of(3, 4), plan_of(2, 4)),
                (plan_of(2, 1, 3), plan_of(2, 3, 1)),
                (plan_of(2, 2, 2), plan_of(4, 4)),
                (plan_of(2, 4), PipelinePlan(replicas=((1,), (0,)), split=(4,))),
            ]
        ),
    ],
)
def test_another_plan_shares_residuals_out_again(
    pool: RankPool, before: PipelinePlan, after: PipelinePlan
) -> None:
    first = Run("tbq", before, tuple(Step(n) for n in range(3)))
    results = [result for (result,) in pool.run(run, before.world_size, first)]
    second = Run("tbq", after, tuple(Step(n) for n in range(3, 6)), results[0].checkpoint)
    others = [result for (result,) in pool.run(run, after.world_size, second)]
    assert_conserved([(first, results), (second, others)])
    warned = [result.warnings for result in others]
    if len(before.replicas) != len(after.replicas):
        assert all("they were shared out again" in text for (text,) in warned)
    assert all(result.states[-1]["step"] == 6 for result in others)


def load_another_codec(context: RankContext, checkpoint: bytes) -> list[str]:
    """Return the warnings of loading residuals of 'tbq' into a run of 'int8'."""
    context.init_process_group()
    saved = torch.load(io.BytesIO(checkpoint), weights_only=True)
    saved["replicas"][0]["units"].append(
        {**saved["replicas"][0]["units"][0], "gradient": "net.9.weight"}
    )
    with opened(context, "int8", plan_of(2, 4)) as (_, compression, _):
        with pytest.WarningsRecorder(_ispytest=True) as record:
            compression.load_states(saved, torch.device("cpu"))
        assert not any(entry["tensors"] for entry in compression.state_dict()["units"])
    return [str(warning.message) for warning in record]


def test_a_warning_names_residuals_that_are_dropped(pool: RankPool) -> None:
    (result,), _ = pool.run(run, 2, Run("tbq", plan_of(2, 4), (Step(0),)))
    for messages in pool.run(load_another_codec, 2, result.checkpoint):
        names = sorted({*COMPRESSED, "net.9.weight"})
        assert any(f"residuals of {names} were dropped" in text for text in messages)


def names_started_by_layer(context: RankContext) -> list[list[str]]:
    """Return the gradients whose synchronisation starts after the backward of each layer.

    The last layer comes first.
    """
    context.init_process_group()
    started: list[list[str]] = []
    with opened(context, "int8", plan_of(2, 4)) as (model, compression, make_sync):
        start = compression.start

        def recording_start(gradients: Mapping[str, Tensor], on_done: Any) -> None:
            started[-1] += [name for name in gradients if name in COMPRESSED]
            start(gradients, on_done)

        compression.start = recording_start  # type: ignore[method-assign]
        sync, buffer = make_sync(), GradientBuffer()
        sync.begin(loss_scale=1.0, has_data=True)
        for position in reversed(range(LAYERS)):
            for parameter in model.net[position].parameters():
                buffer.add(parameter, torch.ones_like(parameter))
            started.append([])
            sync.layer_done(position, buffer)
        sync.finish(buffer)
    return started


def test_gradients_are_sent_when_backward_has_passed_their_layer(pool: RankPool) -> None:
    expected = [[], ["net.2.weight"], ["net.1.weight"], ["net.0.weight"]]
    assert pool.run(names_started_by_layer, 2) == [expected] * 2


def wait_in_vain(context: RankContext, is_dead: bool) -> None:
    """Wait for the gradients of rank 1, which is dead or late."""
    context.init_process_group()
    shared = dist.FileStore(str(context.tmp / "shared"), 2)
    with opened(context, "int8", plan_of(2, 4), timeout=20.0 if is_dead else 1.0) as (
        model,
        _,
        make_sync,
    ):
        if context.rank == 1:
            if is_dead:
                os.kill(os.getpid(), signal.SIGKILL)
            shared.wait(["given up"], timedelta(seconds=30))
            raise ValueError("rank 1 ends")
        sync, buffer = make_sync(), GradientBuffer()
        sync.begin(loss_scale=1.0, has_data=True)
        for parameter in model.net.parameters():
            buffer.add(parameter, torch.ones_like(parameter))
        try:
            sync.finish(buffer)
        finally:
            shared.set("given up", "")


@pytest.mark.parametrize(
    ("is_dead", "error"), [(True, PeerLostError), (False, PeerTimeoutError)], ids=["dead", "late"]
)
def test_the_error_names_a_replica_that_is_dead_or_late(
    pool: RankPool, is_dead: bool, error: type[PeerError]
) -> None:
    outcome, _ = pool.run_expecting_errors(wait_in_vain, 2, is_dead)
    assert outcome.error_type == error.__name__
    assert "stage 0 of replica 1 (rank 1)" in outcome.error_message
