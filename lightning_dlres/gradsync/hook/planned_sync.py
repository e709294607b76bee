"""Synchronisation by the current plan of a hook, and changes of the plan between two steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.core.comm.mailbox import message_group, release_group
from lightning_dlres.core.errors import PeerTimeoutError
from lightning_dlres.core.host.identity import host_identity
from lightning_dlres.core.trace import Tracer
from lightning_dlres.core.units import format_seconds
from lightning_dlres.gradsync.execute.carried_states import carried_states
from lightning_dlres.gradsync.execute.coordinator_trial import choose_coordinator_by_trial
from lightning_dlres.gradsync.execute.planning import AUTO
from lightning_dlres.gradsync.execute.saved_states import (
    continue_states,
    save_states,
    unsent_mean,
    unsent_raw,
)
from lightning_dlres.gradsync.execute.session import (
    SyncSession,
    all_ranks_agree,
    hosts_of_ranks,
)
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.hook.drift_watch import DriftWatch
from lightning_dlres.gradsync.hook.gradient_fusion import GradientFusion, OnDone
from lightning_dlres.gradsync.hook.options import require_equal_options
from lightning_dlres.gradsync.hook.planner import HookPlanner
from lightning_dlres.gradsync.hook.unsent_gradients import UnsentGradients
from lightning_dlres.gradsync.plan.hosts import shares_hosts
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.plan.plan_change import PlanChange
from lightning_dlres.gradsync.plan.units import GradientSpec

# Steps of a plan before the replay, which repeats the messages of the last of them. The first two
# are not typical: DDP sorts parameters into other buckets after step 0, and step 1 is slow because
# connections are made in it.
_STEPS_BEFORE_REPLAY = 3
# Numbers of the states that are connected, by default process group.
_numbers: WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = WeakKeyDictionary()
_log = logging.getLogger(__name__)


class PlannedSync:
    """Synchronisation that follows the planner: the ranks' session, and this rank's codec states.

    A new plan gets a new session, and takes over the states.

    Args:
        planner: Planner, which holds the current plan.
        coordinator: "auto", "always", "replay" or "none".
        transport: "gloo" or "zmq".
        has_hierarchy: True lets one rank of a host synchronise for the others.
        host: Identity of this rank's host; None for that of `host_identity`.
        may_replan: True plans again when the steps drift, if the planner has something to choose.
        timeout: Seconds that a rank waits for another.
        check: Called while waiting; raises if a rank is known to have failed.
        keeps_previous: True copies the codecs' states before each step.
        tracer: Gets a span for each task.

    Attributes:
        session: Current session; None before `open`, and with torch's all-reduce.
        states: This rank's states of the codecs.
        unsent: Residuals that no state can take.
        watch: Watch over the steps; None before `open`, and if the first plan stays.
        changes: Changes of the plan, the oldest one first.
        failure: Error that ended the synchronisation; None while there is none.
    """

    def __init__(
        self,
        planner: HookPlanner,
        *,
        coordinator: str,
        transport: str,
        has_hierarchy: bool,
        host: str | None,
        may_replan: bool,
        timeout: float,
        check: Callable[[], None],
        keeps_previous: bool,
        tracer: Tracer,
    ) -> None:
        self._planner, self._coordinator, self._may_replan = planner, coordinator, may_replan
        self._transport, self._has_hierarchy, self._host = transport, has_hierarchy, host
        self._timeout, self._check, self._tracer = timeout, check, tracer
        self._keeps_previous = keeps_previous
        self.session: SyncSession | None = None
        self.states, self.unsent = CodecStates(), UnsentGradients()
        self.watch: DriftWatch | None = None
        self.changes: list[PlanChange] = []
        self.failure: BaseException | None = None
        # Serves sessions, measurements and agreements. Made at the start: making a group hangs if a
        # rank is lost.
        self._group: dist.ProcessGroup | None = None
        # Its place among those that the ranks have connected, in the same order.
        self._number = 0
        self._fusion: GradientFusion | None = None
        # The gradients as the plan has them.
        self._gradients: Sequence[GradientSpec] = ()
        self._device, self._element_bytes = torch.device("cpu"), 4

    def connect(self, options: Mapping[str, str], *, is_used: bool) -> None:
        """Connect the ranks and compare their options; called by all ranks together, before `open`.

        Args:
            options: Options as text, by name.
            is_used: False if `close` need not wait for the other ranks, and `open` will have no
                plan. The ranks are then disconnected again.

        Raises:
            ConfigError: If the ranks' options differ.
            PeerError: If a rank is lost or late.
        """
        group = message_group()
        try:
            require_equal_options(options, group, self._timeout, self._check)
        except BaseException as error:
            self.failure = error
            raise
        if is_used:
            world = dist.group.WORLD
            assert world is not None
            self._group, self._number = group, next(_numbers.setdefault(world, count()))
        else:
            release_group(group)

    def open(
        self,
        gradients: Sequence[GradientSpec],
        saved: Sequence[Mapping[str, Any]],
        *,
        step: int,
        device: torch.device,
        element_bytes: int,
        has_plan: bool,
    ) -> None:
        """Make the plan, and fill the states; called by all ranks together.

        Args:
            gradients: The gradients, in the order of the model.
            saved: Saved states of all ranks of an earlier run, by rank; empty without one.
            step: Number of the first step.
            device: Device of the gradients.
            element_bytes: Bytes of an element of a gradient.
            has_plan: False for torch's all-reduce.

        Raises:
            PeerError: If a rank is lost or late.
            ConfigError: If the codec does not run on the device.
        """
        self._device, self._element_bytes = device, element_bytes
        self._fusion = self._planner.fusion(gradients, element_bytes)
        self._gradients = self._fusion.specs
        if has_plan:
            self._planner.require_kernels(device)
            try:
                self._begin(self._fusion.fused_states(saved), step)
            except BaseException as error:
                self.failure = error
                raise
        self._put_unsent_means(gradients, saved)

    def _put_unsent_means(
        self, gradients: Sequence[GradientSpec], saved: Sequence[Mapping[str, Any]]
    ) -> None:
        """Keep saved residuals for the next gradients if torch's all-reduce averages these."""
        if saved and self._planner.plan is None:
            # Every rank adds the mean, so the all-reduce of the gradients leaves it unchanged.
            self.unsent.put({spec.name: unsent_mean(saved, spec) for spec in gradients})

    def _begin(self, saved: Sequence[Mapping[str, Any]], step: int) -> None:
        planner = self._planner
        if self._has_hierarchy:
            assert self._group is not None
            identity = host_identity() if self._host is None else self._host
            hosts = hosts_of_ranks(identity, self._group, self._timeout, self._check)
            planner.hosts = hosts if shares_hosts(hosts) else ()
        device, element_bytes = self._device, self._element_bytes
        if not planner.make_without_measuring(self._gradients, saved, device, element_bytes):
            planner.make(self._gradients, self._probing, device, element_bytes)
        self._continue(saved, step)
        if self._may_replan and planner.is_automatic:
            self.watch = DriftWatch()

    def reload(
        self,
        gradients: Sequence[GradientSpec],
        saved: Sequence[Mapping[str, Any]],
        step: int,
    ) -> None:
        """Replace all states between two steps, under the same plan; called by all ranks together.

        Args:
            gradients: As for `open`, which was called before.
            saved: Saved states of all ranks, by rank; empty to begin without residuals.
            step: Number of the next step.

        Raises:
            PeerError: If a rank is lost or late.
        """
        assert self._fusion is not None
        session, self.session = self.session, None
        self.states, self.unsent = CodecStates(), UnsentGradients()
        try:
            if session is not None:
                assert self._group is not None
                with session.ended_by_failures():
                    # Another rank's last messages may still need the coordinator on this one.
                    all_ranks_agree(True, self._group, self._timeout, self._check)
                session.close(orderly=True)
            self._continue(self._fusion.fused_states(saved), step)
        except BaseException as error:
            self.failure = error
            raise
        self._put_unsent_means(gradients, saved)

    def _continue(self, saved: Sequence[Mapping[str, Any]], step: int) -> None:
        """Fill the new states, and start to follow the plan; do nothing without a plan.

        Args:
            saved: States of all ranks, of the gradients as the plan has them.
            step: Number of the next step.
        """
        planner, rank = self._planner, dist.get_rank()
        if planner.plan is None:
            return
        session = self._new_session(self._group, self._tracer)
        with session.ended_by_failures():
            continue_states(saved, planner.plan, planner.codecs, rank, self._device, self.states)
            if saved:
                self._put_unsent(unsent_raw(saved, planner.plan, rank))
            self._start(session, planner.plan, step)

    @contextmanager
    def _probing(self) -> Iterator[SyncSession]:
        """Context manager that opens a session for a measurement, and closes it on all ranks."""
        # The probe's messages are not those of training, so no tracer records them.
        probe = self._new_session(self._group, Tracer(enabled=False))
        with probe.ended_by_failures():
            yield probe
        probe.close(orderly=True)

    def _new_session(self, group: dist.ProcessGroup | None, tracer: Tracer) -> SyncSession:
        return SyncSession(
            timeout=self._timeout,
            check=self._check,
            tracer=tracer,
            group=group,
            transport=self._transport,
        )

    def _start(self, session: SyncSession, plan: SyncPlan, step: int) -> None:
        coordinator, codecs = self._coordinator, self._planner.codecs
        if coordinator == AUTO:
            coordinator = choose_coordinator_by_trial(
                plan,
                codecs,
                self._device,
                element_bytes=self._element_bytes,
                timeout=self._timeout,
                check=self._check,
                group=self._group,
                transport=self._transport,
            )
        session.start(
            plan,
            codecs,
            self.states,
            coordinator=coordinator,
            replay_from=step + _STEPS_BEFORE_REPLAY,
            keeps_previous=self._keeps_previous,
            # DistributedDataParallel drops the mean of a parameter that no rank has used. What had
            # been sent of its residual would be lost.
            keeps_zeros=True,
        )
        self.session = session

    def begin_backward(self, step: int, continues: bool) -> None:
        """Prepare for the first bucket of a backward; change the plan if it is time for that.

        The plan may change here, because all gradients of the step before are means. The ranks may
        agree here, because all of them take the same steps.

        Args:
            step: Number of the step.
            continues: True if the step belongs to the optimizer step of the one before.

        Raises:
            PeerError: If a rank is lost or late.
        """
        if not continues:
            self.unsent.begin()
        if self.watch is None:
            return
        self.watch.begin_step()
        # Not within an optimizer step: `undo_step` needs copies of states under one plan.
        if not self.watch.is_due or continues:
            return
        assert self._group is not None
        is_steady = not self.watch.is_drifting
        if all_ranks_agree(is_steady, self._group, self._timeout, self._check):
            self.watch.agreed()
        else:
            self._plan_again(step)
            self.watch.planned()

    def _plan_again(self, step: int) -> None:
        """Measure again, and change the plan if that pays; called by all ranks together."""
        planner, before, rank = self._planner, self._planner.plan, dist.get_rank()
        change = planner.make_again(
            step, self._gradients, self._probing, self._device, self._element_bytes
        )
        if change is None:
            return
        session, self.session = self.session, None
        if session is not None:
            session.close(orderly=True)
        if before is not None:
            self.states, unsent = carried_states(
                self.states, before, planner.plan, planner.codecs, rank, self._device
            )
            self._put_unsent(unsent)
        if planner.plan is not None:
            session = self._new_session(self._group, self._tracer)
            with session.ended_by_failures():
                self._start(session, planner.plan, step)
        self.changes.append(change)
        if rank == 0:
            _log.info(change.line())

    def _put_unsent(self, values: Mapping[str, Tensor]) -> None:
        assert self._fusion is not None
        self.unsent.put(self._fusion.split(values))

    def start(
        self,
        step: int,
        gradients: Mapping[str, Tensor],
        on_done: OnDone,
        *,
        loss_scale: float,
        has_data: bool,
        continues: bool,
        unused: Collection[str],
    ) -> None:
        """Start to replace gradients by their means, without waiting; needs a session.

        For the arguments see `GradientSynchroniser.start`. All gradients of a step must come, in
        whatever groups, before the first of them is waited for.
        """
        assert self.session is not None
        assert self._fusion is not None
        synchroniser = self.session.synchroniser

        def start(gradients: Mapping[str, Tensor], on_done: OnDone, has_data: bool) -> None:
            synchroniser.start(
                step,
                gradients,
                on_done,
                loss_scale=loss_scale,
                has_data=has_data,
                continues=continues,
                unused=unused,
            )

        self._fusion.start(gradients, start, on_done, has_data=has_data)

    def end_step(self) -> None:
        """Start what waits for more gradients, because all of the step have come."""
        if self._fusion is not None:
            self._fusion.end_step()

    def undo_step(self, gradients: Collection[str] | None = None) -> None:
        """Restore the states of gradients, or of all, from before the last optimizer step."""
        self.unsent.undo(gradients)
        if self.session is not None:
            # Fused gradients are not compressed, so they have no states.
            self.session.synchroniser.undo_step(gradients)

    def saved_states(self) -> dict[str, Any]:
        """Return this rank's states for a checkpoint; empty if no rank has any.

        A rank without states has the key "units", too, if another rank may have states. The ranks
        gather their states by this key, and all must take part.
        """
        plan, unsent = self._planner.plan, self.unsent.entries()
        if plan is None:
            is_gathered = self.unsent.was_filled
            return {"world_size": dist.get_world_size(), "units": unsent} if is_gathered else {}
        saved = save_states(self.states, plan)
        return {**saved, "units": [*saved["units"], *unsent]}

    def close(self) -> None:
        """End the threads. All ranks call it together, unless one has failed.

        Raises:
            PeerError: If a rank does not call it in time.
            ConfigError: If another rank closes another state.
        """
        session, self.session = self.session, None
        group, self._group = self._group, None
        is_orderly = False
        try:
            if group is not None and self.failure is None:
                # The last messages of other ranks may still need the coordinator on this rank, or
                # pass through this rank in a ring.
                self._agree_to_close(group)
                is_orderly = True
        finally:
            if session is not None:
                session.close(orderly=is_orderly)
            if is_orderly:
                assert group is not None
                release_group(group)

    def _agree_to_close(self, group: dist.ProcessGroup) -> None:
        """Wait until all ranks close this state."""
        number = {"The state that is closed": str(self._number)}
        fix = "Close the states in the same order on all ranks."
        # After a failure, other ranks are in another collective call, and would send other data.
        self._check()
        try:
            require_equal_options(number, group, self._timeout, self._check, fix)
        except PeerTimeoutError as error:
            raise PeerTimeoutError(
                f"`close` waited {format_seconds(self._timeout)} for the other ranks, and some "
                "rank did not call it. Call it on all ranks, after the same step."
            ) from error
