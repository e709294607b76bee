"""A plan changes only if the new one gains more than measurements differ."""

from __future__ import annotations

import pytest

from lightning_dlres.gradsync.plan.cost_model import MARGIN, decide
from lightning_dlres.gradsync.plan.costs import LinearCost
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.plan.plan_change import PlanChange, change_of_plan
from lightning_dlres.gradsync.plan.prediction import StepPrediction, StepPredictor
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.gradsync.plan.costs_for_tests import codec_costs, codecs_by_name, sync_costs

GRADIENTS = [GradientSpec(name="weight", count=1 << 20), GradientSpec(name="bias", count=100)]
CODECS = codecs_by_name("int8", "fp16")


def change(speed: float, algorithm: str, plan: SyncPlan | None, factor: float) -> PlanChange | None:
    """Return the change at a speed of the links if the step takes `factor` times the best one."""
    costs = sync_costs(
        [speed] * 3, {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in CODECS}
    )
    decision = decide(GRADIENTS, costs, CODECS)
    seconds = decision.prediction.step_seconds * factor
    current = StepPrediction(
        compute_seconds=0.0,
        transfer_seconds=seconds,
        sync_seconds=seconds,
        step_seconds=seconds,
        link_bytes=0.0,
    )
    return change_of_plan(7, algorithm, plan, current, decision, CODECS)


def test_a_less_precise_algorithm_must_gain_the_margin() -> None:
    assert change(1e6, "none", None, 1 + MARGIN / 2) is None
    found = change(1e6, "none", None, 2.0)
    assert found is not None
    assert (found.step, found.before) == (7, "none")
    assert found.after.startswith("int8 (")
    assert found.before_seconds == pytest.approx(2 * found.after_seconds)
    assert found.line().startswith(
        f"gradient synchronisation: none became {found.after} at step 7, because the steps have"
    )


def test_a_more_precise_algorithm_need_only_be_as_fast() -> None:
    costs = sync_costs([1e6] * 3, {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in CODECS})
    plan = decide(GRADIENTS, costs, CODECS).plan
    found = change(1e15, "int8", plan, 1.0)
    assert found is not None
    assert found.after == "none"
    assert change(1e15, "int8", plan, 0.99) is None


def test_the_same_plan_is_no_change() -> None:
    costs = sync_costs([1e6] * 3, {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in CODECS})
    assert change(1e6, "int8", decide(GRADIENTS, costs, CODECS).plan, 5.0) is None


def test_other_owners_are_named() -> None:
    one = PlanChange(
        step=3, before="int8 (ps)", after="int8 (ps)", before_seconds=0.5, after_seconds=0.1
    )
    assert one.line() == (
        "gradient synchronisation: int8 (ps) has other partitions or owners at step 3, because the "
        "steps have drifted: 100 ms predicted, 500 ms without the change"
    )


def test_the_current_plan_is_predicted_with_new_costs() -> None:
    codecs = {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in CODECS}
    reduce = LinearCost(fixed_seconds=0.0, seconds_per_item=1e-3)
    costs = sync_costs([1e6] * 3, codecs, all_reduce=reduce)
    decision = decide(GRADIENTS, costs, CODECS)
    assert decision.plan is not None
    predicted = StepPredictor(costs, CODECS).predict_plan(decision.plan)
    assert predicted.step_seconds == pytest.approx(decision.prediction.step_seconds)
