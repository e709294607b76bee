"""A plan changes only if the new one gains more than measurements differ."""

from __future__ import annotations

import pytest

from lightning_dlres.gradsync.plan.cost_model import MARGIN, decide
from lightning_dlres.gradsync.plan.costs import LinearCost
from lightning_dlres.gradsync.plan.decision import StepTrial, SyncDecision
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


def decision_with_gain(gain: float) -> SyncDecision:
    """Return a decision whose plan is predicted to gain a factor over torch's all-reduce."""
    codecs = {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in CODECS}
    best = decide(GRADIENTS, sync_costs([1e6] * 3, codecs), CODECS, algorithms=["int8"])
    seconds = gain * best.prediction.step_seconds
    reduce = LinearCost(fixed_seconds=seconds, seconds_per_item=0.0)
    return decide(GRADIENTS, sync_costs([1e6] * 3, codecs, all_reduce=reduce), CODECS)


@pytest.mark.parametrize(("gain", "is_tried"), [(0.9, False), (1.2, True), (1.9, True), (3, False)])
def test_a_small_gain_needs_a_trial(gain: float, is_tried: bool) -> None:
    decision = decision_with_gain(gain)
    assert decision.is_off == (gain < 1)
    assert decision.needs_trial == is_tried


@pytest.mark.parametrize("algorithms", [["int8"], ["raw"]])
def test_a_named_algorithm_needs_no_trial(algorithms: list[str]) -> None:
    codecs = {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in CODECS}
    costs = sync_costs([1e6] * 3, codecs)
    assert not decide(GRADIENTS, costs, CODECS, algorithms=algorithms).needs_trial


@pytest.mark.parametrize("plan_seconds", [0.94, 0.96, 2.0])
def test_a_trial_decides_by_the_margin(plan_seconds: float) -> None:
    decision = decision_with_gain(1.2)
    trial = StepTrial(plan_seconds=plan_seconds, all_reduce_seconds=1.0)
    after = decision.after_trial(trial, MARGIN)
    assert after.trial == trial
    assert after.is_off == (plan_seconds > 1 - MARGIN)
    assert after.prediction.step_seconds == pytest.approx(
        decision.prediction.step_seconds * (1.2 if after.is_off else 1.0)
    )
    assert SyncDecision.from_json(after.to_json()) == after


def test_a_lost_trial_ends_a_plan_that_is_predicted_to_be_faster() -> None:
    """The prediction was wrong for the new plan, so it is no reason to keep the current one."""
    lost = decision_with_gain(1.2)
    trial = StepTrial(plan_seconds=2.0, all_reduce_seconds=1.0)
    current = decide(
        GRADIENTS,
        sync_costs([1e6] * 3, {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in CODECS}),
        CODECS,
        algorithms=["fp16"],
    )
    found = change_of_plan(
        7, "fp16", current.plan, current.prediction, lost.after_trial(trial, MARGIN), CODECS
    )
    assert found is not None
    assert (found.after, found.before_seconds, found.after_seconds) == ("none", 2.0, 1.0)


def test_the_same_plan_is_no_change() -> None:
    costs = sync_costs([1e6] * 3, {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in CODECS})
    assert change(1e6, "int8", decide(GRADIENTS, costs, CODECS).plan, 5.0) is None


def test_other_owners_are_named() -> None:
    one = PlanChange(
        step=3, before="int8 (ps)", after="int8 (ps)", before_seconds=0.5, after_seconds=0.1
    )
    assert one.line() == (
        "gradient synchronisation: int8 (ps) has other partitions or owners at step 3, because the "
        "steps have drifted: 100 ms expected, 500 ms without the change"
    )


def test_the_current_plan_is_predicted_with_new_costs() -> None:
    codecs = {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in CODECS}
    reduce = LinearCost(fixed_seconds=0.0, seconds_per_item=1e-3)
    costs = sync_costs([1e6] * 3, codecs, all_reduce=reduce)
    decision = decide(GRADIENTS, costs, CODECS)
    assert decision.plan is not None
    predicted = StepPredictor(costs, CODECS).predict_plan(decision.plan)
    assert predicted.step_seconds == pytest.approx(decision.prediction.step_seconds)
