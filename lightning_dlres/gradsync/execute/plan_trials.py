"""Trials of plans: the times of steps with a plan, and of steps with torch's all-reduce."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.gradsync.execute.session import SyncSession
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.plan.decision import StepTrial
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.plan.prediction import BUCKET_BYTES
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages
from lightning_dlres.gradsync.profile.reduce_times import all_reduce

# Steps, or pairs of steps: those that are not measured, since connections are made in them, and
# those that are.
_WARM_UP, _MEASURED = 1, 5


def measure_plan(
    session: SyncSession,
    plan: SyncPlan,
    codecs: Mapping[str, GradientCodec],
    device: torch.device,
    element_bytes: int,
) -> float:
    """Return the median seconds of steps with a plan, on the slowest rank; called by all ranks.

    For the arguments see `measure_trial`.

    Raises:
        PeerError: If a rank is lost or late.
    """
    trial = _Trial(session, plan, codecs, device, element_bytes)
    seconds = [trial.step_with_plan(step) for step in range(_WARM_UP + _MEASURED)]
    return statistics.median(seconds[_WARM_UP:])


def measure_trial(
    session: SyncSession,
    plan: SyncPlan,
    codecs: Mapping[str, GradientCodec],
    device: torch.device,
    element_bytes: int,
) -> StepTrial:
    """Return the times of steps with a plan, and with torch's all-reduce; called by all ranks.

    Both take turns, so that other work on the machine slows both down.

    Args:
        session: Session that follows no plan yet, for this trial alone.
        plan: Plan to try.
        codecs: Codecs of the plan by name.
        device: Device of the gradients.
        element_bytes: Bytes of an element of a gradient.

    Raises:
        PeerError: If a rank is lost or late.
    """
    trial = _Trial(session, plan, codecs, device, element_bytes)
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
        device: torch.device,
        element_bytes: int,
    ) -> None:
        session.start(plan, codecs, CodecStates())
        self._session, self._messages = session, ProbeMessages(session.mailbox)
        self._device = device
        generator = torch.Generator(device).manual_seed(session.mailbox.rank)
        counts = plan.gradient_counts()
        total = sum(counts.values())
        # Only the number of bytes matters for the time of an all-reduce, so float32 will do.
        reduced = -(-total * element_bytes // 4)
        flat = torch.randn(max(total, reduced), generator=generator, device=device)
        pieces = flat[:total].split(list(counts.values()))
        self._gradients = dict(zip(counts, pieces, strict=True))
        self._buckets = flat[:reduced].split(BUCKET_BYTES // 4)

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
