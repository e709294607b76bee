"""Session of a synchroniser: the ranks' process group, their mailbox, the engine, and their end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lightning_dlres.codecs import base as registry
from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.comm.collectives import wait_for_collective
from lightning_dlres.core.comm.mailbox import LONGER_THAN_ANY_RUN, Mailbox
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.coordination import CoordinatorLink
from lightning_dlres.gradsync.execute.states import CodecStates
from lightning_dlres.gradsync.execute.synchroniser import GradientSynchroniser
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan


class SyncSession:
    """Connection of all ranks of the default process group, and the engine that uses it.

    All ranks create a session together.

    Args:
        plan: Plan, the same on all ranks.
        codecs: Codecs of the plan by name, with equal options on all ranks.
        states: States of this rank's codecs.
        has_coordinator: True asks a coordinator on rank 0 when to send each payload.
        timeout: Seconds that a rank waits for another.
        check: Called while waiting; raises if a rank is known to have failed.
        tracer: Gets a span for each task.

    Attributes:
        synchroniser: The engine.
    """

    def __init__(
        self,
        plan: SyncPlan,
        codecs: Mapping[str, GradientCodec],
        *,
        states: CodecStates,
        has_coordinator: bool,
        timeout: float,
        check: Callable[[], None],
        tracer: Tracer,
    ) -> None:
        self._group = gloo_group()
        self._mailbox = Mailbox(
            self._group,
            dist.get_rank(),
            [f"rank {rank}" for rank in range(plan.world_size)],
            timeout=timeout,
            check=check,
            tracer=tracer,
        )
        # A thread inside gloo would abort the process at its exit, so a script that does not call
        # `close` abandons the threads.
        self._end = weakref.finalize(self, self._mailbox.close, False)
        self.synchroniser = GradientSynchroniser(
            plan,
            codecs,
            self._mailbox,
            tracer,
            states=states,
            coordinator=CoordinatorLink(self._mailbox) if has_coordinator else None,
        )

    def close(self, *, orderly: bool) -> None:
        """End the threads.

        Args:
            orderly: True after all ranks have finished their last step; False after a failure.
        """
        self.synchroniser.close()
        self._end.detach()
        self._mailbox.close(orderly=orderly)
        if orderly:
            dist.destroy_process_group(self._group)


def gloo_group() -> dist.ProcessGroup:
    """Return a new gloo group of all ranks, without a timeout of its own; all call it together."""
    group = dist.new_group(backend="gloo", timeout=LONGER_THAN_ANY_RUN)
    assert isinstance(group, dist.ProcessGroup)
    return group


def all_ranks_agree(
    flag: bool, group: dist.ProcessGroup, timeout: float, check: Callable[[], None]
) -> bool:
    """Return True if the flag is set on all ranks; called by all of them.

    Args:
        flag: Flag of this rank.
        group: Gloo group of all ranks.
        timeout: Deadline in seconds.
        check: Called while waiting; raises if a rank is known to have failed.

    Raises:
        PeerTimeoutError: If some rank does not take part in time.
        PeerLostError: If a rank has failed, or its connection broke.
    """
    value = torch.tensor([int(flag)])
    work = dist.all_reduce(value, op=dist.ReduceOp.MIN, group=group, async_op=True)
    wait_for_collective(work, "the other ranks", timeout, check)
    return bool(value)


def gradient_codecs(algorithm: str, options: Mapping[str, Any]) -> dict[str, GradientCodec]:
    """Return the codec of an algorithm by its name; an empty dict for "raw".

    Raises:
        ConfigError: If no gradient codec has that name, or an option has a bad value.
    """
    if algorithm == RAW:
        if options:
            raise ConfigError(got_expected("codec_options", dict(options), "None", "None"))
        return {}
    names = [name for name in registry.names() if isinstance(registry.codec(name), GradientCodec)]
    if algorithm not in names:
        rule = f"one of {[RAW, *names]}"
        raise ConfigError(got_expected("algorithm", algorithm, rule, "algorithm='onebit'"))
    codec = type(registry.codec(algorithm))(**options)
    assert isinstance(codec, GradientCodec)
    return {algorithm: codec}
