"""Profile and plan in a real run: profiling changes nothing, memory limits are met or refused,
plans can be passed back, and recomputation is exact."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_dlres import ConfigError, HeteroPipeStrategy, PipelinePlan, ProfileConfig
from lightning_dlres.pipeline.plan.cost_model.simulator import simulate
from tests.support.examples import checkered
from tests.support.models import QUIET, Task, loaders
from tests.support.rank_pool import RankContext, RankPool
from tests.support.training_cases import QUICK


class Losses(Callback):
    """Callback that records the bits of every loss."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train_loss_step"]))


def fit(
    context: RankContext, kind: str, dropout: float, batch: int = 8, **options: Any
) -> dict[str, Any]:
    """Train six steps of `batch` samples; return losses, weights and the plan."""
    seed_everything(5, verbose=False)
    task = Task(kind, dropout=dropout, optimizer="adamw")
    train, _ = loaders(task, 3 * batch, batch, True, 0, torch.float32)
    strategy = HeteroPipeStrategy(**{"microbatches": 4, "timeout": 60, "profile": QUICK, **options})
    losses = Losses()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=context.world_size,
        plugins=[context.environment],
        callbacks=[losses],
        max_epochs=2,
        **QUIET,
    )
    trainer.fit(task, train)
    assert strategy.plan is not None
    weights = {name: value.clone() for name, value in task.state_dict().items()}
    return {
        "losses": losses.seen,
        "weights": weights,
        "plan": strategy.plan.to_json(),
        "schedule": strategy.schedule,
    }


def assert_same_run(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["losses"] == b["losses"]
    assert a["weights"].keys() == b["weights"].keys()
    for name, value in a["weights"].items():
        assert torch.equal(value, b["weights"][name]), name


def test_profiling_changes_nothing(pool: RankPool) -> None:
    measured = pool.run(fit, 2, "gpt", 0.2, stages=2)
    plan = PipelinePlan.from_json(measured[0]["plan"])
    assert plan.is_measured
    assert all(outcome["plan"] == measured[0]["plan"] for outcome in measured)
    given = pool.run(fit, 2, "gpt", 0.2, plan=plan)
    assert_same_run(measured[0], given[0])


@pytest.mark.parametrize(("kind", "schedule"), checkered(["gpt", "cnn"], ["1f1b", "gpipe"]))
def test_recomputing_changes_nothing(pool: RankPool, kind: str, schedule: str) -> None:
    layers = 5 if kind == "gpt" else 11
    plan = PipelinePlan(replicas=((0, 1),), split=(2, layers - 2), schedule=schedule)
    recompute_all = msgspec.structs.replace(plan, recompute=tuple(range(layers)))
    some = msgspec.structs.replace(plan, recompute=(1, 3))
    runs = [
        pool.run(fit, 2, kind, 0.2, plan=p, schedule=schedule)[0]
        for p in (plan, recompute_all, some)
    ]
    assert_same_run(runs[0], runs[1])
    assert_same_run(runs[0], runs[2])


def test_a_memory_limit_is_met_by_recomputing(pool: RankPool) -> None:
    # A large batch, all of it in flight: saved tensors of the blocks outweigh their weights.
    free = PipelinePlan.from_json(
        pool.run(fit, 2, "gpt", 0.0, 96, schedule="gpipe", stages=2)[0]["plan"]
    )
    peaks = simulate(free.workload(), free.split, free.recompute).peak_bytes
    refused = pool.run_expecting_errors(
        fit, 2, "gpt", 0.0, 96, schedule="gpipe", stages=2, memory_limit=1, keep=True
    )
    smallest = {
        int(n) for o in refused for n in re.findall(r"at least (\d+) bytes", o.error_message)
    }
    assert len(smallest) == 1, [outcome.error_message for outcome in refused]
    (limit,) = smallest
    assert limit < max(peaks)
    limited = pool.run(fit, 2, "gpt", 0.0, 96, schedule="gpipe", stages=2, memory_limit=limit)[0]
    plan = PipelinePlan.from_json(limited["plan"])
    assert plan.recompute
    assert max(simulate(plan.workload(), plan.split, plan.recompute).peak_bytes) <= limit
    keeps_all = msgspec.structs.replace(plan, recompute=())
    for outcome in pool.run_expecting_errors(
        fit, 2, "gpt", 0.0, 96, schedule="gpipe", plan=keeps_all, keep=True
    ):
        assert "its memory limit" in outcome.error_message
    # A plan without a cluster has no limits.
    unlimited = msgspec.structs.replace(keeps_all, cluster=None)
    assert_same_run(limited, pool.run(fit, 2, "gpt", 0.0, 96, schedule="gpipe", plan=unlimited)[0])
    never_recomputed, *_ = pool.run_expecting_errors(
        fit,
        2,
        "gpt",
        0.0,
        96,
        schedule="gpipe",
        stages=2,
        memory_limit=limit,
        recompute="never",
        keep=True,
    )
    assert "no plan fits" in never_recomputed.error_message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory_limit": "many"}, ", got 'many'"),
        ({"memory_limit": -1}, "memory_limit"),
        ({"recompute": "sometimes"}, ", got 'sometimes'"),
    ],
)
def test_bad_options_are_refused_at_construction(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HeteroPipeStrategy(**options)


@pytest.mark.parametrize(
    "options", [{"samples": 0}, {"microbatch": True}, {"batch": "some"}, {"repeats": 0}]
)
def test_a_bad_profile_config_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="profile"):
        ProfileConfig(**options)


def test_stages_are_chosen_by_simulated_time(pool: RankPool) -> None:
    # One device is far slower, and would slow down data parallel training.
    result = pool.run(fit, 2, "gpt", 0.0, emulate_speed=[1.0, 0.05])[0]
    plan = PipelinePlan.from_json(result["plan"])
    assert plan.stages == 2
    assert plan.split[plan.position(0)[1]] > plan.split[plan.position(1)[1]]
    assert plan.even_seconds is not None
    assert plan.predicted_seconds is not None
    assert plan.predicted_seconds < plan.even_seconds


def trace(context: RankContext) -> list[tuple[str, int, int, int]]:
    """Train with recomputation on the first stage and a slow second stage; return this rank's
    spans."""
    seed_everything(5, verbose=False)
    task = Task("gpt")
    train, _ = loaders(task, 24, 8, False, 0, torch.float32)
    plan = PipelinePlan(replicas=((0, 1),), split=(2, 3), recompute=(0, 1))
    strategy = HeteroPipeStrategy(
        plan=plan, microbatches=8, timeout=60, emulate_speed=[1.0, 0.1], schedule="1f1b"
    )
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        plugins=[context.environment],
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(task, train)
    return [
        (span.name, int(span.args.get("microbatch") or 0), span.start_ns, span.end_ns)
        for span in strategy.tracer.spans()
        if span.name in ("recompute", "backward", "receive gradient")
    ]


def test_recompute_starts_before_its_gradient_arrives(pool: RankPool) -> None:
    spans = pool.run(trace, 2)[0]
    arrivals = sorted(end for name, _, _, end in spans if name == "receive gradient")
    recomputes = [(start, end) for name, _, start, end in spans if name == "recompute"]
    backwards = [start for name, _, start, _ in spans if name == "backward"]
    assert len(arrivals) == len(recomputes) == len(backwards) == 3 * 8
    # The slow stage is the bottleneck, so the first stage waits for nearly all gradients.
    early = [start < arrival for (start, _), arrival in zip(recomputes, arrivals, strict=True)]
    assert sum(early) >= 3 * 7, "all but the last ones, which find their gradient there"
    for (_, end), start in zip(recomputes, backwards, strict=True):
        assert end <= start


def test_a_plan_is_a_file_that_can_be_edited(pool: RankPool, tmp_path: Path) -> None:
    result = pool.run(fit, 2, "gpt", 0.0, stages=2)[0]
    edited = json.loads(result["plan"])
    # A different split than the planned one, which depends on measurements.
    split = [1, 4] if edited["split"] != [1, 4] else [3, 2]
    edited.update(split=split, recompute=[2])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(edited))
    resumed = pool.run(fit, 2, "gpt", 0.0, plan=str(path))[0]
    plan = PipelinePlan.from_json(resumed["plan"])
    assert (plan.split, plan.recompute) == (tuple(split), (2,))
    assert plan.predicted_seconds != edited["predicted_seconds"], "predicted anew"
    assert (resumed["schedule"], plan.schedule) == ("1f1b", "1f1b")
    edited["schedule"] = "gpipe"
    path.write_text(json.dumps(edited))
    options = {"plan": str(path), "microbatches": 2}
    for schedule, expected in (("auto", "gpipe"), ("1f1b", "1f1b")):
        rerun = pool.run(fit, 2, "gpt", 0.0, schedule=schedule, **options)[0]
        plan = PipelinePlan.from_json(rerun["plan"])
        assert (rerun["schedule"], plan.schedule, plan.microbatches) == (expected, expected, 2)
