"""A plan changes only if the new one gains more than the noise of measurements."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from lightning_dlres.gradsync.plan.cost_model import MARGIN, decide
from lightning_dlres.gradsync.plan.costs import LinearCost, SyncCosts
from lightning_dlres.gradsync.plan.decision import StepTrial, SyncDecision
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.plan.plan_change import PlanChange, change_of_plan
from lightning_dlres.gradsync.plan.prediction import StepPrediction, StepPredictor
from lightning_dlres.gradsync.plan.units import GradientSpec
from tests.gradsync.plan.costs_for_tests import codec_costs, codecs_by_name, sync_costs

GRADIENTS = [GradientSpec(name="weight", count=1 << 20), GradientSpec(name="bias", count=100)]
CODECS = codecs_by_name("int8", "fp16")
# Bytes per second of the links. The best algorithm is int8 over slow ones, and torch's all-reduce
# over fast ones.
SLOW, FAST = 1e6, 1e15


def costs(speed: float, all_reduce: LinearCost | None = None) -> SyncCosts:
    codecs = {name: codec_costs(1e-6, 1e-10, 1e-10, 1e-10) for name in CODECS}
    return sync_costs([speed] * 3, codecs, all_reduce=all_reduce)


def change(speed: float, algorithm: str, plan: SyncPlan | None, factor: float) -> PlanChange | None:
    """Return the change to the best plan; None if it does not pay.

    Args:
        speed: Bytes per second of the links, now.
        algorithm: Current algorithm.
        plan: Current plan; None for torch's all-reduce.
        factor: Predicted step of the current plan, over that of the best one.
    """
    decision = decide(GRADIENTS, costs(speed), CODECS)
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
    assert change(SLOW, "none", None, 1 + MARGIN / 2) is None
    to_int8 = change(SLOW, "none", None, 2.0)
    assert to_int8 is not None
    assert (to_int8.step, to_int8.before) == (7, "none")
    assert to_int8.after.startswith("int8 (")
    assert to_int8.before_seconds == pytest.approx(2 * to_int8.after_seconds)
    assert to_int8.line().startswith(
        f"gradient synchronisation: none became {to_int8.after} at step 7, because the steps have"
    )


def test_a_more_precise_algorithm_need_only_be_as_fast() -> None:
    plan = decide(GRADIENTS, costs(SLOW), CODECS).plan
    to_all_reduce = change(FAST, "int8", plan, 1.0)
    assert to_all_reduce is not None
    assert to_all_reduce.after == "none"
    assert change(FAST, "int8", plan, 0.99) is None


def decision_with_gain(gain: float) -> SyncDecision:
    """Return a decision whose plan is predicted to gain a factor over torch's all-reduce."""
    best = decide(GRADIENTS, costs(SLOW), CODECS, algorithms=["int8"])
    seconds = gain * best.prediction.step_seconds
    reduce = LinearCost(fixed_seconds=seconds, seconds_per_item=0.0)
    return decide(GRADIENTS, costs(SLOW, reduce), CODECS)


@pytest.mark.parametrize(("gain", "is_tried"), [(0.9, False), (1.2, True), (1.9, True), (3, False)])
def test_a_small_gain_needs_a_trial(gain: float, is_tried: bool) -> None:
    decision = decision_with_gain(gain)
    assert decision.is_off == (gain < 1)
    assert decision.needs_trial == is_tried


@pytest.mark.parametrize("algorithms", [["int8"], ["raw"]])
def test_a_named_algorithm_needs_no_trial(algorithms: list[str]) -> None:
    assert not decide(GRADIENTS, costs(SLOW), CODECS, algorithms=algorithms).needs_trial


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


@pytest.mark.parametrize(
    ("seconds", "is_changed"), [((1.0, 0.97), True), ((1.0, 0.99), False), ((1.0, 1.5), False)]
)
def test_a_trial_decides_between_topologies(seconds: tuple[float, float], is_changed: bool) -> None:
    predicted = decide(GRADIENTS, costs(SLOW), CODECS, algorithms=["int8"])
    other = predicted.rival_topology
    assert other is not None
    assert other != predicted.topology
    rival = decide(GRADIENTS, costs(SLOW), CODECS, algorithms=["int8"], topologies=[other])
    tried = dict(zip((predicted.topology, other), seconds, strict=True))
    after = predicted.after_topology_trial(rival, tried)
    chosen = rival if is_changed else predicted
    assert (after.plan, after.choices, after.topology) == (
        chosen.plan,
        chosen.choices,
        chosen.topology,
    )
    assert after.prediction == chosen.prediction
    assert SyncDecision.from_json(after.to_json()) == after


def test_a_topology_that_is_predicted_to_be_much_slower_is_no_rival() -> None:
    decision = decide(GRADIENTS, costs(SLOW), CODECS, algorithms=["int8"])
    seconds = 2.1 * decision.prediction.step_seconds
    slow = tuple(
        msgspec.structs.replace(
            contender,
            prediction=replace(contender.prediction, step_seconds=seconds)
            if contender.topology != decision.topology
            else contender.prediction,
        )
        for contender in decision.contenders
    )
    assert decision.rival_topology is not None
    assert msgspec.structs.replace(decision, contenders=slow).rival_topology is None


def test_a_lost_trial_ends_a_plan_that_is_predicted_to_be_faster() -> None:
    """The prediction was wrong for the new plan, so it is no reason to keep the current one."""
    lost = decision_with_gain(1.2)
    trial = StepTrial(plan_seconds=2.0, all_reduce_seconds=1.0)
    current = decide(GRADIENTS, costs(SLOW), CODECS, algorithms=["fp16"])
    to_all_reduce = change_of_plan(
        7, "fp16", current.plan, current.prediction, lost.after_trial(trial, MARGIN), CODECS
    )
    assert to_all_reduce is not None
    assert to_all_reduce.after == "none"
    assert (to_all_reduce.before_seconds, to_all_reduce.after_seconds) == (2.0, 1.0)


def test_the_same_plan_is_no_change() -> None:
    plan = decide(GRADIENTS, costs(SLOW), CODECS).plan
    assert change(SLOW, "int8", plan, 5.0) is None


def test_the_line_of_a_change_within_an_algorithm_says_what_changed() -> None:
    within_int8 = PlanChange(
        step=3, before="int8 (ps)", after="int8 (ps)", before_seconds=0.5, after_seconds=0.1
    )
    assert within_int8.line() == (
        "gradient synchronisation: int8 (ps) has other partitions or owners at step 3, because the "
        "steps have drifted: 100 ms expected, 500 ms without the change"
    )


def test_a_plan_is_predicted_as_in_the_decision_for_it() -> None:
    """Otherwise the comparison of the current plan with a new one would favour one of them."""
    # So slow that the decision is for a plan of tasks.
    all_reduce = LinearCost(fixed_seconds=0.0, seconds_per_item=1e-3)
    measured = costs(SLOW, all_reduce)
    decision = decide(GRADIENTS, measured, CODECS)
    assert decision.plan is not None
    predicted = StepPredictor(measured, CODECS).predict_plan(decision.plan)
    assert predicted.step_seconds == pytest.approx(decision.prediction.step_seconds)
