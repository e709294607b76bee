"""Trials of plans: the times of steps with a plan, and of steps with torch's all-reduce."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.gradsync.execute.planning import SyncPlanningOptions
from lightning_dlres.gradsync.execute.session import SyncSession, random_gradients
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.plan.decision import StepTrial
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages
from lightning_dlres.gradsync.profile.reduce_times import all_reduce

# Steps, or pairs of steps: those that are not measured, since connections are made in them, and
# those that are.
_WARM_UP, _MEASURED = 1, 5


def measure_plan(
    session: SyncSession,
    plan: SyncPlan,
    codecs: Mapping[str, GradientCodec],
    options: SyncPlanningOptions,
) -> float:
    """Return the median seconds of steps with a plan, on the slowest rank; called by all ranks.

    For the arguments see `measure_trial`.

    Raises:
        PeerError: If a rank is lost or late.
    """
    trial = _Trial(session, plan, codecs, options)
    seconds = [trial.step_with_plan(step) for step in range(_WARM_UP + _MEASURED)]
    return statistics.median(seconds[_WARM_UP:])


def measure_trial(
    session: SyncSession,
    plan: SyncPlan,
    codecs: Mapping[str, GradientCodec],
    options: SyncPlanningOptions,
) -> StepTrial:
    """Return the times of steps with a plan, and with torch's all-reduce; called by all ranks.

    Both take turns, so that other work on the machine slows both down.

    Args:
        session: Session that follows no plan yet, for this trial alone.
        plan: Plan to try.
        codecs: Codecs of the plan by name.
        options: Device, bytes of an element and bytes of a bucket of the gradients.

    Raises:
        PeerError: If a rank is lost or late.
    """
    trial = _Trial(session, plan, codecs, options)
    pairs = [
        (trial.step_with_plan(step), trial.step_with_all_reduce())
        for step in range(_WARM_UP + _MEASURED)
    ]
    own, all_reduce = zip(*pairs[_WARM_UP:], strict=True)
    return StepTrial(
        plan_seconds=statistics.median(own), all_reduce_seconds=statistics.median(all_reduce)
    )


class _Trial:
    """Steps with random gradients."""

    def __init__(
        self,
        session: SyncSession,
        plan: SyncPlan,
        codecs: Mapping[str, GradientCodec],
        options: SyncPlanningOptions,
    ) -> None:
        session.start(plan, codecs, CodecStates())
        self._session, self._messages = session, ProbeMessages(session.mailbox)
        self._device = options.device
        self._gradients = random_gradients(
            plan, session.mailbox.rank, options.device, options.element_bytes
        )
        # Only the number of bytes matters for the time of an all-reduce, so float32 will do. Not
        # `randn`, which would change the user's random numbers.
        total = sum(plan.gradient_counts().values())
        flat = torch.ones(-(-total * options.element_bytes // 4), device=options.device)
        self._buckets = flat.split(max(options.bucket_bytes // 4, 1))

    def step_with_plan(self, step: int) -> float:
        """Return the seconds of a step with the plan, on the slowest rank."""
        synchroniser = self._session.synchroniser
        return self._messages.time(lambda: synchroniser.run(step, self._gradients), self._device)

    def step_with_all_reduce(self) -> float:
        """Return the seconds of a step with torch's all-reduce, on the slowest rank."""
        return self._messages.time(self._all_reduce, self._device)

    def _all_reduce(self) -> None:
        """Average all gradients as DistributedDataParallel does, bucket by bucket."""
        factor = 1 / self._messages.ranks
        all_reduce(self._messages, [bucket.mul_(factor) for bucket in self._buckets])
