"""Parts of the hook's state beside the reduction of buckets: properties, failures and times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.hook.planned_sync import PlannedSync
from lightning_dlres.gradsync.hook.planner import HookPlanner
from lightning_dlres.gradsync.plan.decision import SyncDecision
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.plan.plan_change import PlanChange


class SyncStateView:
    """Base of `GradientSyncState`: its properties, and notes of failures and times."""

    last_ready: float
    _is_closed: bool
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

    def note_ready(self) -> None:
        """Note that gradients of this rank are ready; the last call in a step counts."""
        self.last_ready = time.perf_counter()
        if self._sync.watch is not None:
            self._sync.watch.ready()

    def _note_done(self) -> None:
        if self._sync.watch is not None:
            self._sync.watch.done()

    def _fail(self, error: BaseException) -> None:
        """Keep the first error; `close` then does not wait for other ranks."""
        self._sync.failure = self._sync.failure or error

    @contextmanager
    def _keeping_failures(self) -> Iterator[None]:
        """Context manager that raises an earlier failure, and keeps one of its block."""
        if self.failure is not None:
            raise self.failure
        self._refuse_after_close()
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _refuse_after_close(self) -> None:
        # Torch's all-reduce would silently take over.
        if self._is_closed:
            got, rule = "one that was closed", "open during training"
            raise ConfigError(got_expected("state", got, rule, "a new state and module"))
