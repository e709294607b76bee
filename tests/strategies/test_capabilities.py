"""Strategies are asked for their capabilities by attribute; Lightning's own have none."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_dlres.core.trace import Tracer
from lightning_dlres.pipeline.plan.plan import PipelinePlan
from lightning_dlres.strategies import HeteroPipeStrategy
from lightning_dlres.strategies.capabilities import (
    PipelinePlanning,
    ReportsRun,
    plan_of,
    reads_for_all_ranks,
    tracer_of,
)


def test_the_pipeline_strategy_has_all_capabilities() -> None:
    strategy = HeteroPipeStrategy()
    assert isinstance(strategy, PipelinePlanning)
    assert isinstance(strategy, ReportsRun)
    assert reads_for_all_ranks(strategy)
    assert tracer_of(strategy) is strategy.tracer
    assert plan_of(strategy) is None, "there is no plan before the first run"


def test_strategies_of_lightning_have_no_capability() -> None:
    for strategy in (SingleDeviceStrategy("cpu"), DDPStrategy()):
        assert not isinstance(strategy, (PipelinePlanning, ReportsRun))
        assert not reads_for_all_ranks(strategy)
        assert tracer_of(strategy) is None
        assert plan_of(strategy) is None


def test_any_strategy_can_have_a_capability() -> None:
    class Capable(SingleDeviceStrategy):
        reads_for_all_ranks = True
        plan = PipelinePlan(replicas=((0,),), split=(1,))
        tracer = Tracer()

    strategy = Capable("cpu")
    assert reads_for_all_ranks(strategy)
    assert plan_of(strategy) is Capable.plan
    assert tracer_of(strategy) is Capable.tracer


def test_attributes_of_other_types_are_no_capability() -> None:
    class Unrelated(SingleDeviceStrategy):
        plan = "a plan of another kind"
        tracer = print

    assert plan_of(Unrelated("cpu")) is None
    assert tracer_of(Unrelated("cpu")) is None
