"""Planner of the hook's state. Fixed options, an earlier run or the cost model give the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.gradsync.execute.plan_trials import measure_plan, measure_trial
from lightning_dlres.gradsync.execute.planning import (
    AUTO,
    SyncPlanningOptions,
    codecs_for_auto,
    plan_again,
    plan_rival,
    plan_synchronisation,
)
from lightning_dlres.gradsync.execute.saved_states import saved_plan
from lightning_dlres.gradsync.execute.session import SyncSession
from lightning_dlres.gradsync.hook.gradient_fusion import FUSED_BYTES, GradientFusion
from lightning_dlres.gradsync.plan.cost_model import MARGIN, auto_codecs
from lightning_dlres.gradsync.plan.costs import SyncCosts
from lightning_dlres.gradsync.plan.decision import SyncDecision
from lightning_dlres.gradsync.plan.graph import TOPOLOGIES
from lightning_dlres.gradsync.plan.hosts import Hosts, over_hosts, plan_of_leaders
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan, choices_by_size, make_plan
from lightning_dlres.gradsync.plan.plan_change import PlanChange, change_of_plan
from lightning_dlres.gradsync.plan.prediction import BUCKET_BYTES
from lightning_dlres.gradsync.plan.units import GradientSpec
from lightning_dlres.kernels.gradients.layout import BLOCK

# Returns a context manager with a session for one measurement.
Probing = Callable[[], AbstractContextManager[SyncSession]]


class HookPlanner:
    """Planner of all plans of a run, the same on all ranks.

    Args:
        algorithm: "auto", "raw", or the name of a codec.
        topology: "auto", "ps" or "ring".
        codecs: Codec of the algorithm by its name; empty for "auto" and "raw".
        min_bytes: Gradients with fewer bytes are not compressed.
        is_adam_like: True if one- and two-bit gradients do not suit the optimizers.
        is_coordinated: True if a coordinator plans the messages; see `StepPredictor`.
        bucket_bytes: Bytes of a bucket of DistributedDataParallel.

    Attributes:
        codecs: Codecs by name: that of the algorithm, or those among which "auto" chooses.
        plan: Current plan; None for torch's all-reduce.
        decision: Decision that led to the plan; None if the cost model was not asked.
        algorithm: Algorithm of the current plan; before the first plan, that of the arguments.
        hosts: Ranks of each host, if one rank of a host synchronises for the others; else empty.
            The plan in `decision` then has one rank for each host, and `plan` has all ranks.
    """

    def __init__(
        self,
        *,
        algorithm: str,
        topology: str,
        codecs: Mapping[str, GradientCodec],
        min_bytes: int,
        is_adam_like: bool,
        is_coordinated: bool,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._algorithm, self._topology, self._min_bytes = algorithm, topology, min_bytes
        self._is_adam_like, self._is_coordinated = is_adam_like, is_coordinated
        self._bucket_bytes = bucket_bytes
        self.codecs, self.algorithm = dict(codecs), algorithm
        self.plan: SyncPlan | None = None
        self.decision: SyncDecision | None = None
        self.hosts: Hosts = ()
        self._costs: SyncCosts | None = None

    @property
    def is_automatic(self) -> bool:
        """True if the cost model has something to choose."""
        return AUTO in (self._algorithm, self._topology)

    def require_kernels(self, device: torch.device) -> None:
        """Raise if the named codec does not run on a device of this machine.

        Raises:
            ConfigError: If its kernels are missing.
        """
        if device.type != "cpu" and not all(c.runs_on_gpus() for c in self.codecs.values()):
            raise ConfigError(
                f"algorithm must be one that runs on {device.type} here, got {self._algorithm!r}. "
                "Install the package's extra `cuda`, or use algorithm='fp16'."
            )

    def fusion(self, gradients: Sequence[GradientSpec], element_bytes: int) -> GradientFusion:
        """Return the fusion of the gradients that are too small to be compressed.

        Args:
            gradients: The gradients, in the order of the model.
            element_bytes: Bytes of an element of a gradient.
        """
        return GradientFusion(
            gradients,
            most_elements=-(-self._min_bytes // element_bytes) - 1,
            fused_elements=FUSED_BYTES // element_bytes,
        )

    def make_without_measuring(
        self,
        gradients: Sequence[GradientSpec],
        saved: Sequence[Mapping[str, Any]],
        device: torch.device,
        element_bytes: int,
    ) -> bool:
        """Make the first plan if the options or an earlier run give it; return True if they do.

        Args:
            gradients: The gradients, in the order of the model.
            saved: Saved states of all ranks of an earlier run, by rank; empty without one.
            device: Device of the gradients.
            element_bytes: Bytes of an element of a gradient.
        """
        world_size = dist.get_world_size()
        if not self.is_automatic:
            # With hosts, only their first ranks merge.
            size = len(self.hosts) or world_size
            choices = choices_by_size(
                gradients,
                self.codecs.get(self._algorithm),
                least_elements=-(-self._min_bytes // element_bytes),
                world_size=size,
            )
            plan = make_plan(
                gradients, choices, world_size=size, topology=self._topology, alignment=BLOCK
            )
            self.plan = over_hosts(plan, self.hosts)
            return True
        if self._algorithm == AUTO:
            runnable = {
                name: codec
                for name, codec in codecs_for_auto().items()
                if device.type == "cpu" or codec.runs_on_gpus()
            }
            self.codecs = auto_codecs(runnable, is_adam_like=self._is_adam_like)
        topologies = tuple(TOPOLOGIES) if self._topology == AUTO else (self._topology,)
        continued = saved if self._may_continue(saved, gradients, element_bytes) else ()
        self.plan = saved_plan(
            continued, gradients, self.codecs, topologies, world_size, self.hosts
        )
        if self.plan is not None:
            # A new measurement might lead to another plan, and the run would not continue exactly.
            self.algorithm = saved[0]["algorithm"]
        return self.plan is not None

    def make(
        self,
        gradients: Sequence[GradientSpec],
        probing: Probing,
        device: torch.device,
        element_bytes: int,
    ) -> None:
        """Measure, and make the first plan; called by all ranks together.

        Args:
            gradients: The gradients, in the order of the model.
            probing: Returns a context manager with a session that follows no plan yet, for a
                measurement alone.
            device: Device of the gradients.
            element_bytes: Bytes of an element of a gradient.

        Raises:
            PeerError: If a rank is lost or late.
        """
        options = self._options(device, element_bytes)
        with probing() as session:
            decision = plan_synchronisation(gradients, self.codecs, session.mailbox, options)
            rival = plan_rival(decision, gradients, self.codecs, session.mailbox, options)
        self._follow(self._after_trials(decision, rival, probing, options))

    def make_again(
        self,
        step: int,
        gradients: Sequence[GradientSpec],
        probing: Probing,
        device: torch.device,
        element_bytes: int,
    ) -> PlanChange | None:
        """Measure again, and change the plan if that pays; called by all ranks together.

        For the other arguments see `make`.

        Args:
            step: First step with the new plan.

        Returns:
            The change, the same on all ranks; None if the plan stays.

        Raises:
            PeerError: If a rank is lost or late.
        """
        plan = None if self.plan is None else plan_of_leaders(self.plan)
        options = self._options(device, element_bytes)
        with probing() as session:
            decision, current_prediction = plan_again(
                gradients,
                self.codecs,
                session.mailbox,
                options,
                plan=plan,
                earlier=self._costs,
            )
            self._costs = decision.costs
            is_new = decision.plan != plan
            rival = None
            if is_new:
                rival = plan_rival(decision, gradients, self.codecs, session.mailbox, options)
        if is_new:
            decision = self._after_trials(decision, rival, probing, options)
        change = change_of_plan(
            step, self.algorithm, plan, current_prediction, decision, self.codecs
        )
        if change is not None:
            self._follow(decision)
        return change

    def _after_trials(
        self,
        decision: SyncDecision,
        rival: SyncDecision | None,
        probing: Probing,
        options: SyncPlanningOptions,
    ) -> SyncDecision:
        """Return the decision, or one that trials show to be faster: the rival, with another
        topology, or torch's all-reduce. Each plan is tried in a session of its own."""
        if rival is not None:
            seconds = {}
            for one in (decision, rival):
                with probing() as session:
                    seconds[one.topology] = measure_plan(*self._tried(one, session, options))
            decision = decision.after_topology_trial(rival, seconds)
        if decision.plan is None or not decision.needs_trial:
            return decision
        with probing() as session:
            trial = measure_trial(*self._tried(decision, session, options))
        return decision.after_trial(trial, MARGIN)

    def _tried(
        self, decision: SyncDecision, session: SyncSession, options: SyncPlanningOptions
    ) -> tuple[SyncSession, SyncPlan, dict[str, GradientCodec], SyncPlanningOptions]:
        """Return the arguments of a trial of a decision's plan."""
        assert decision.plan is not None
        plan = over_hosts(decision.plan, self.hosts)
        return session, plan, self.codecs, options

    def _may_continue(
        self,
        saved: Sequence[Mapping[str, Any]],
        gradients: Sequence[GradientSpec],
        element_bytes: int,
    ) -> bool:
        """Return True if an earlier run used an algorithm that this run may use, too."""
        if not saved or self._algorithm in (AUTO, saved[0]["algorithm"]):
            return True
        # Under a named codec, a plan is uncompressed if no gradient is large enough.
        is_small = all(spec.count * element_bytes < self._min_bytes for spec in gradients)
        return is_small and saved[0]["algorithm"] == RAW

    def _options(self, device: torch.device, element_bytes: int) -> SyncPlanningOptions:
        return SyncPlanningOptions(
            algorithm=self._algorithm,
            topology=self._topology,
            is_adam_like=self._is_adam_like,
            least_bytes=self._min_bytes,
            device=device,
            element_bytes=element_bytes,
            bucket_bytes=self._bucket_bytes,
            is_coordinated=self._is_coordinated,
            hosts=self.hosts,
        )

    def _follow(self, decision: SyncDecision) -> None:
        """Make the plan of a decision the current one."""
        self.decision, self.algorithm = decision, decision.algorithm
        self.plan = None if decision.plan is None else over_hosts(decision.plan, self.hosts)
        self._costs = decision.costs
