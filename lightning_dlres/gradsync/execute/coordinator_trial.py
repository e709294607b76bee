"""Trial of the coordinator at the start: it is used only if it makes steps clearly shorter."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.session import SyncSession, random_gradients
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.plan.measured_steps import choose_coordinator
from lightning_dlres.gradsync.plan.plan import SyncPlan
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages

# Values of `coordinator` whose steps are measured. "always" is not measured: it sends the payloads
# in the same order as "replay", and also asks the coordinator in every step.
_CANDIDATES = ("none", "replay")
# Number of unmeasured steps, and of measured ones after them. In the first, connections are made,
# and "replay" records the messages that it repeats later.
_WARM_UP_STEPS, _STEPS = 2, 4


def choose_coordinator_by_trial(
    plan: SyncPlan,
    codecs: Mapping[str, GradientCodec],
    device: torch.device,
    *,
    element_bytes: int = 4,
    timeout: float,
    check: Callable[[], None],
    group: dist.ProcessGroup | None = None,
    transport: str = "gloo",
) -> str:
    """Measure steps without and with a coordinator, and return the value of `coordinator` to use.

    All ranks call it together and get the same value: "none" or "replay". "replay" must gain more
    than `COORDINATOR_GAIN`. Messages between only two ranks cannot collide, so two ranks get "none"
    without a trial.

    Args:
        plan: Plan to try.
        codecs: Codecs of the plan by name.
        device: Device of the gradients.
        element_bytes: Bytes of an element of a gradient.
        timeout: Seconds that a rank waits for another.
        check: Called while waiting; raises if a rank is known to have failed.
        group: Gloo group of all ranks for the trial; None makes one.
        transport: Transport of the messages; see `SyncSession`.

    Raises:
        PeerError: If a rank is lost or late.
    """
    if plan.world_size < 3:
        return "none"
    seconds = {}
    for coordinator in _CANDIDATES:
        session = SyncSession(
            timeout=timeout,
            check=check,
            tracer=Tracer(enabled=False),
            group=group,
            transport=transport,
        )
        with session.ended_by_failures():
            session.start(
                plan, codecs, CodecStates(), coordinator=coordinator, replay_from=_WARM_UP_STEPS
            )
            gradients = random_gradients(plan, session.mailbox.rank, device, element_bytes)
            own = _step_seconds(session, gradients)
            # The slowest rank's median counts. Gathering it is also the barrier before `close`.
            slowest = ProbeMessages(session.mailbox).slowest([statistics.median(own)])
        seconds[coordinator] = slowest
        session.close(orderly=True)
    return choose_coordinator(seconds)


def _step_seconds(session: SyncSession, gradients: Mapping[str, Tensor]) -> list[float]:
    """Return the seconds of some steps."""
    seconds = []
    for step in range(_WARM_UP_STEPS + _STEPS):
        start = time.perf_counter()
        session.synchroniser.run(step, gradients)
        seconds.append(time.perf_counter() - start)
    return seconds[_WARM_UP_STEPS:]
