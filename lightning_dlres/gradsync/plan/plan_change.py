"""Change of the plan during training, after links or ranks have become slower or faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.units import format_seconds
from lightning_dlres.gradsync.plan.cost_model import MARGIN, precision
from lightning_dlres.gradsync.plan.decision import ALL_REDUCE, SyncDecision
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.plan.prediction import StepPrediction


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """A new plan in the place of another one.

    Attributes:
        step: First step with the new plan.
        before: Algorithm and topology before, such as "int8 (ps)"; "none" for torch's all-reduce.
        after: Algorithm and topology from this step on.
        before_seconds: Expected step without the change, by a prediction or a trial.
        after_seconds: Expected step of the new plan.
    """

    step: int
    before: str
    after: str
    before_seconds: float
    after_seconds: float

    def line(self) -> str:
        """Return the change as a line for a log."""
        change = f"{self.before} became {self.after}"
        if self.before == self.after:
            change = f"{self.after} has other partitions or owners"
        return (
            f"gradient synchronisation: {change} at step {self.step}, because the steps have "
            f"drifted: {format_seconds(self.after_seconds)} expected, "
            f"{format_seconds(self.before_seconds)} without the change"
        )


def change_of_plan(
    step: int,
    algorithm: str,
    plan: SyncPlan | None,
    current: StepPrediction,
    decision: SyncDecision,
    codecs: Mapping[str, GradientCodec],
) -> PlanChange | None:
    """Return the change to a new decision; None if it does not pay.

    A new plan must gain the cost model's margin, since measurements have noise. A more precise
    algorithm need only be as fast.

    Args:
        step: First step with the new plan.
        algorithm: Current algorithm.
        plan: Current plan; None for torch's all-reduce.
        current: Prediction for the current plan, with the costs of the new decision.
        decision: New decision.
        codecs: Codecs by name.
    """
    if decision.plan == plan:
        return None
    before, after = current.step_seconds, decision.prediction.step_seconds
    if decision.plan is None and decision.trial is not None:
        # Torch's all-reduce was faster than a plan that should be faster than the current one.
        before, after = decision.trial.plan_seconds, decision.trial.all_reduce_seconds
    # The sort key of a more precise algorithm is less.
    is_more_precise = precision(decision.algorithm, codecs) < precision(algorithm, codecs)
    if after > before * (1.0 if is_more_precise else 1 - MARGIN):
        return None
    return PlanChange(
        step=step,
        before=_name(algorithm, plan),
        after=_name(decision.algorithm, decision.plan),
        before_seconds=before,
        after_seconds=after,
    )


def _name(algorithm: str, plan: SyncPlan | None) -> str:
    return ALL_REDUCE if plan is None else f"{algorithm} ({plan.topology})"
