"""Properties of the hook's state for its user: the plan, its decision, and a failure."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.hook.planned_sync import PlannedSync
from lightning_dlres.gradsync.hook.planner import HookPlanner
from lightning_dlres.gradsync.plan.decision import SyncDecision
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.plan.plan_change import PlanChange


class SyncStateView:
    """Properties of `GradientSyncState`."""

    _planner: HookPlanner
    _sync: PlannedSync
    _step: int
    _is_open: bool

    @property
    def algorithm(self) -> str:
        """Current algorithm; "auto" until the ranks have chosen one."""
        return self._planner.algorithm

    @property
    def decision(self) -> SyncDecision | None:
        """Decision that led to the current plan, with its table; None without the cost model."""
        return self._planner.decision

    @property
    def plan_changes(self) -> Sequence[PlanChange]:
        """Changes of the plan during the run, the oldest one first."""
        return tuple(self._sync.changes)

    @property
    def suits_adam(self) -> bool:
        """True if the algorithm's gradients may be given to an optimizer like Adam."""
        return all(codec.suits_adam for codec in self._planner.codecs.values())

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the synchronisation; None while there is none."""
        return self._sync.failure

    @property
    def steps(self) -> int:
        """Number of steps that have synchronised gradients, earlier runs included."""
        return self._step

    @property
    def plan(self) -> SyncPlan | None:
        """Plan of the synchronisation; None before `open`, and while torch averages gradients."""
        return self._planner.plan

    @property
    def synchroniser(self) -> GradientSynchroniser | None:
        """Engine that follows the plan; None without a plan, and after `close`."""
        session = self._sync.session
        return None if session is None else session.synchroniser

    @property
    def needs_hook(self) -> bool:
        """False while DistributedDataParallel may average gradients without this hook."""
        is_averaged_by_torch = self._is_open and self.synchroniser is None
        return not (is_averaged_by_torch and self._sync.unsent.is_empty)
