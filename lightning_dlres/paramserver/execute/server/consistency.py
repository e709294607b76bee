"""Consistency of a job: when a push changes a parameter, and when a worker may have the result.

- "bsp" (bulk synchronous): the pushes of all workers with one number are merged in the order of the
  workers, and their mean is one update. Runs therefore repeat bitwise.
- "asp" (asynchronous): each push is an update of its own, see push_updates.
- "ssp" (stale synchronous; Ho et al., 2013): as "asp", but the result of a worker's push is
  withheld while the worker is ahead of another by more than `staleness` pushes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lightning_dlres.codecs.gradient.base import GradientCodec
from lightning_dlres.core.errors import ProtocolError
from lightning_dlres.paramserver import protocol
from lightning_dlres.paramserver.execute.server.job_workers import JobWorkers
from lightning_dlres.paramserver.execute.server.key_state import KeyState

# Relative difference of two workers' factors that rounding may cause.
_FACTOR_ERROR = 1e-9
BSP, SSP, ASP = "bsp", "ssp", "asp"
CONSISTENCIES = (BSP, SSP, ASP)


@dataclass(frozen=True)
class Answer:
    """Answer to a worker about a key.

    Attributes:
        worker: Worker that gets the answer.
        kind: Kind of the message.
        number: Number in the message, see `KeyReply`.
        workers: Workers that are awaited.
    """

    worker: int
    kind: str
    number: int
    workers: tuple[int, ...] = ()


@dataclass(frozen=True)
class PushedGradient:
    """A push, as far as the merge needs it.

    Attributes:
        worker: Sender.
        number: Number of the push.
        data: Payload; None without a gradient.
        codec: Codec of the payload; None for raw bytes.
        options: Options of the parameter's group.
        is_held: True if the update waits for a commit.
        clip_value: Bound of the merged gradient's elements; 0 for none.
        base: Number from which the worker's process has begun.
    """

    worker: int
    number: int
    data: memoryview | None
    codec: GradientCodec | None
    options: dict[str, Any]
    is_held: bool
    clip_value: float
    base: int


class UnequalClippingError(ProtocolError):
    """Workers clip one gradient in different ways; the job cannot go on."""


# Applies a key's merged gradient to its parameter.
Update = Callable[[KeyState], None]


class Synchronous:
    """Merge of the pushes of all workers, for "bsp".

    Args:
        members: Workers of the job.
        update: See `Update`.
        max_pending_bytes: Bytes of payloads that may wait for those of workers before them.
            Others are discarded, and asked for again when it is their turn.
    """

    def __init__(self, members: JobWorkers, update: Update, max_pending_bytes: int) -> None:
        self._members, self._update = members, update
        self._max_pending_bytes, self._pending_bytes = max_pending_bytes, 0
        self._workers = len(members.by_index)

    def push(self, state: KeyState, push: PushedGradient) -> list[Answer]:
        """Take a push; return the answers that it makes possible.

        Raises:
            UnequalClippingError: If another worker has pushed with another clipping.
        """
        version = state.applied[push.worker]
        if push.number != version + 1 or self._has_pushed(state, push.worker):
            return [self.pull(state, push.worker, push.number)]
        clipping = (push.is_held, push.clip_value)
        if state.merged + len(state.pending) == 0:
            state.clipping = None
        if push.data is not None:
            if state.clipping not in (None, clipping):
                raise UnequalClippingError(_unequal_clipping(state.key.name))
            state.clipping = clipping
        if push.worker == 0:
            # One update has one set of options: those of worker 0 count.
            state.options = push.options
        nbytes = 0 if push.data is None else len(push.data)
        if push.worker != state.merged and self._pending_bytes + nbytes > self._max_pending_bytes:
            state.deferred.add(push.worker)
            return []
        state.has_previous = False
        state.pending[push.worker] = (push.data, push.codec)
        self._pending_bytes += nbytes
        self._merge(state)
        if state.merged in state.deferred:
            state.deferred.discard(state.merged)
            return [Answer(state.merged, protocol.BEHIND, state.applied[state.merged])]
        if state.merged < self._workers:
            return []
        if not state.divides_first:
            state.gradient.div_(self._workers)
        if state.clipping is None:
            # No worker has a gradient.
            state.clipping = clipping
        if state.clipping[0]:
            state.is_held = True
            norm = state.gradient.double().square().sum() if state.has_gradient else 0.0
            state.norm = float(norm)
            return [Answer(worker, protocol.MERGED, push.number) for worker in self._active()]
        self._apply(state)
        return [Answer(worker, protocol.VALUE, push.number) for worker in self._active()]

    def pull(self, state: KeyState, worker: int, number: int) -> Answer:
        """Return the answer to a worker that asks for the value with its push `number`."""
        version = state.applied[worker]
        if number <= version:
            return Answer(worker, protocol.VALUE, number)
        if number > version + 1 or not self._has_pushed(state, worker):
            return Answer(worker, protocol.BEHIND, version)
        if state.is_held:
            return Answer(worker, protocol.MERGED, number)
        missing = [other for other in range(self._workers) if not self._has_pushed(state, other)]
        return Answer(worker, protocol.WAITING, number, tuple(missing))

    def commit(self, state: KeyState, worker: int, number: int, scale: float) -> list[Answer]:
        """Apply a held gradient, multiplied by a factor.

        Raises:
            UnequalClippingError: If another worker has committed with another factor.
        """
        if number == state.applied[worker] + 1 and state.is_held:
            if scale != 1.0:
                state.gradient.mul_(scale)
            self._apply(state)
            state.applied_scale = scale
            # A worker without a gradient has nothing to clip, and commits nothing.
            return [Answer(one, protocol.VALUE, number) for one in self._active()]
        if number == state.applied[worker] and state.applied_scale is not None:
            # Equal bounds give equal factors, since all workers get the same norms. Versions of
            # Python add them up differently.
            is_nan = math.isnan(scale) and math.isnan(state.applied_scale)
            if not is_nan and not math.isclose(scale, state.applied_scale, rel_tol=_FACTOR_ERROR):
                raise UnequalClippingError(_unequal_clipping(state.key.name))
            return []
        return [self.pull(state, worker, number)]

    def rejoin(self, states: Iterable[KeyState], worker: int) -> None:
        """Let a new process of a worker take part; nothing changes, since all wait for it."""

    def shut_out(self, states: Iterable[KeyState]) -> list[tuple[KeyState, Answer]]:
        """Return the answers that are possible now that a worker was shut out: none."""
        return []

    def _has_pushed(self, state: KeyState, worker: int) -> bool:
        return worker < state.merged or worker in state.pending

    def _active(self) -> list[int]:
        return [index for index, one in enumerate(self._members.by_index) if one.is_active]

    def _merge(self, state: KeyState) -> None:
        """Merge the pushes whose turn it is."""
        while state.merged in state.pending:
            data, codec = state.pending.pop(state.merged)
            if data is not None:
                self._pending_bytes -= len(data)
                state.add(data, codec, is_first=not state.has_gradient, parts=self._workers)
                state.has_gradient = True
            state.merged += 1

    def _apply(self, state: KeyState) -> None:
        if state.has_gradient:
            clip_value = 0.0 if state.clipping is None else state.clipping[1]
            if clip_value:
                state.gradient.clamp_(-clip_value, clip_value)
            state.require_unshared()
            previous = state.spare.copy(state.parameter.detach())
            self._update(state)
            # The copy becomes the gradient's tensor, so it is not copied a second time.
            state.spare.keep(state.gradient)
            state.gradient = previous
        else:
            state.gradient.copy_(state.parameter.detach())
        state.has_previous, state.applied_scale = True, None
        state.applied[:] = [version + 1 for version in state.applied]
        state.applied_norm, state.norm = state.norm, 0.0
        state.merged, state.is_held, state.has_gradient = 0, False, False


class Asynchronous:
    """Pushes that are updates of their own, for "asp" and "ssp".

    Args:
        members: Workers of the job.
        update: See `Update`.
        staleness: Largest number of pushes by which a worker may be ahead of another; None for any.
    """

    def __init__(self, members: JobWorkers, update: Update, staleness: int | None) -> None:
        self._members, self._update, self._staleness = members, update, staleness
        # Workers whose results are withheld, by key.
        self._withheld: dict[int, set[int]] = {}

    def push(self, state: KeyState, push: PushedGradient) -> list[Answer]:
        """Take a push; return the answers that it makes possible."""
        # A restarted server may have forgotten that the worker has rejoined.
        state.applied[push.worker] = max(state.applied[push.worker], push.base)
        if push.number != state.applied[push.worker] + 1:
            return [self.pull(state, push.worker, push.number)]
        if push.data is not None:
            state.add(push.data, push.codec, is_first=True)
            if push.clip_value:
                state.gradient.clamp_(-push.clip_value, push.clip_value)
            state.options = push.options
            state.require_unshared()
            self._update(state)
        state.applied[push.worker] += 1
        return [self.pull(state, push.worker, push.number), *self._released(state)]

    def pull(self, state: KeyState, worker: int, number: int) -> Answer:
        """Return the answer to a worker that asks for the value with its push `number`."""
        applied = state.applied[worker]
        if number > applied:
            return Answer(worker, protocol.BEHIND, applied)
        slower = self._slower(state, applied)
        if not slower:
            return Answer(worker, protocol.VALUE, number)
        self._withheld.setdefault(state.key.index, set()).add(worker)
        return Answer(worker, protocol.WAITING, number, tuple(slower))

    def commit(self, state: KeyState, worker: int, number: int, scale: float) -> list[Answer]:
        """Refuse: no update waits for a commit."""
        raise ProtocolError("a commit needs consistency 'bsp'.")

    def rejoin(self, states: Iterable[KeyState], worker: int) -> None:
        """Let a new process of a worker take part, as if it were as far as the slowest other one.

        Otherwise the others would wait until it has caught up.
        """
        for state in states:
            others = [
                state.applied[index]
                for index, one in enumerate(self._members.by_index)
                if index != worker and one.is_active
            ]
            state.applied[worker] = max(state.applied[worker], min(others, default=0))

    def shut_out(self, states: Iterable[KeyState]) -> list[tuple[KeyState, Answer]]:
        """Return the answers that are possible now that a worker was shut out."""
        return [(state, answer) for state in states for answer in self._released(state)]

    def _released(self, state: KeyState) -> list[Answer]:
        """Return the values that need not be withheld any more."""
        withheld = self._withheld.pop(state.key.index, set())
        answers = [self.pull(state, worker, state.applied[worker]) for worker in withheld]
        return [answer for answer in answers if answer.kind == protocol.VALUE]

    def _slower(self, state: KeyState, applied: int) -> list[int]:
        """Return the workers that are too far behind one with so many applied pushes."""
        if self._staleness is None:
            return []
        return [
            index
            for index, one in enumerate(self._members.by_index)
            if not one.is_shut_out
            and not one.has_left
            and applied - state.applied[index] > self._staleness
        ]


def _unequal_clipping(name: str) -> str:
    return (
        f"gradients must be clipped in one way on all ranks, got two for {name}. Clip in every "
        "step with the same bounds: servers clip the merged gradients, so a condition on the "
        "gradients of a rank is not needed."
    )
