"""Check of a schedule: its stages run as processes that pass messages, without a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES, Action, Op, Schedule

_STAGES = (1, 2, 3)
_MICROBATCHES = (0, 1, 4)
_EXTRA_IN_FLIGHT = (0, 1)
_RECEIVES = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)


def check_schedule(schedule: Schedule) -> None:
    """Run a schedule on small pipelines, and check the rules that runtime and planner rely on.

      - Every stage runs the forward and the backward of every micro-batch once, and the stages
      together reach the end.
    - Messages arrive in the order in which they are sent: a channel is a queue, and the mailbox
      refuses any message but the next one.
    - A stage recomputes a micro-batch right before its backward; only the wait for the gradient may
      come between. The planner's memory bound counts one recomputed micro-batch at a time.
    - The last stage computes one loss over the whole batch, or one for every micro-batch, as
      `whole_batch_loss` says. Losses per micro-batch come in the order of the micro-batches: user
      code sees the batch in its order, and the logs of its parts are merged in this order.

    Raises:
          ConfigError: If the schedule breaks a rule; the message names the stage and the action.
    """
    for stages, microbatches, extra, recompute in product(
        _STAGES, _MICROBATCHES, _EXTRA_IN_FLIGHT, (False, True)
    ):
        actions = [
            schedule.actions(
                stages, stage, microbatches, recompute=recompute, extra_in_flight=extra
            )
            for stage in range(stages)
        ]
        _Walk(schedule, actions, microbatches, recompute).run()


class _Walk:
    """One step of a pipeline in which every stage goes as far as its messages allow."""

    def __init__(
        self,
        schedule: Schedule,
        actions: Sequence[Sequence[Action]],
        microbatches: int,
        recompute: bool,
    ) -> None:
        self._schedule, self._actions, self._recompute = schedule, actions, recompute
        self._everything = set(range(microbatches))
        self._position = [0] * len(actions)
        # (receiving stage, kind of the receive) -> micro-batches on their way, oldest first.
        self._links: dict[tuple[int, Op], deque[int]] = {
            (stage, op): deque() for stage in range(len(actions)) for op in _RECEIVES
        }
        # (stage, kind) -> micro-batches for which the action is done.
        self._done: dict[tuple[int, Op], set[int]] = {
            (stage, op): set() for stage in range(len(actions)) for op in Op
        }

    def run(self) -> None:
        moves = True
        while moves:
            moves = False
            for stage in range(len(self._actions)):
                moves |= self._advance(stage)
        for stage, actions in enumerate(self._actions):
            if self._position[stage] < len(actions):
                self._refuse(stage, actions[self._position[stage]], "waits for ever")
            for op in (Op.FORWARD, Op.BACKWARD):
                for microbatch in self._everything - self._done[stage, op]:
                    self._refuse(stage, Action(op, microbatch), "is missing")
        for (stage, op), messages in self._links.items():
            for microbatch in messages:
                self._refuse(stage, Action(op, microbatch), "is missing")

    def _advance(self, stage: int) -> bool:
        """Run a stage until it waits; return whether it did anything."""
        actions, start = self._actions[stage], self._position[stage]
        while self._position[stage] < len(actions) and self._perform(stage):
            self._position[stage] += 1
        return self._position[stage] > start

    def _perform(self, stage: int) -> bool:
        """Do the next action of a stage; return False if its message has not been sent yet."""
        action = self._actions[stage][self._position[stage]]
        op, microbatch = action.op, action.microbatch
        if op in _RECEIVES:
            if not self._links[stage, op]:
                return False
            if self._links[stage, op].popleft() != microbatch:
                self._refuse(stage, action, "is out of the order of sending")
        if microbatch in self._done[stage, op]:
            self._refuse(stage, action, "comes twice")
        if not self._is_ready(stage, action):
            self._refuse(stage, action, "comes too early or on the wrong stage")
        if op is Op.SEND_ACTIVATION:
            self._links[stage + 1, Op.RECEIVE_ACTIVATION].append(microbatch)
        if op is Op.SEND_GRADIENT:
            self._links[stage - 1, Op.RECEIVE_GRADIENT].append(microbatch)
        self._done[stage, op].add(microbatch)
        return True

    def _is_ready(self, stage: int, action: Action) -> bool:
        """Return whether a stage has everything that an action takes."""
        op, microbatch = action.op, action.microbatch
        is_first, is_last = stage == 0, stage == len(self._actions) - 1

        def done(needed: Op) -> bool:
            return microbatch in self._done[stage, needed]

        if op is Op.LOSS:
            if self._schedule.whole_batch_loss:
                forwards = self._done[stage, Op.FORWARD]
                return is_last and microbatch == ALL_MICROBATCHES and forwards == self._everything
            is_next = microbatch == len(self._done[stage, Op.LOSS])
            return is_last and is_next and done(Op.FORWARD)
        if microbatch not in self._everything:
            return False
        if op is Op.FORWARD:
            return is_first or done(Op.RECEIVE_ACTIVATION)
        if op is Op.SEND_ACTIVATION:
            return not is_last and done(Op.FORWARD)
        if op is Op.RECOMPUTE:
            return self._recompute and done(Op.FORWARD) and self._backward_follows(stage)
        if op is Op.BACKWARD:
            losses = self._done[stage, Op.LOSS]
            has_loss = bool(losses & {microbatch, ALL_MICROBATCHES})
            has_gradient = has_loss if is_last else done(Op.RECEIVE_GRADIENT)
            return has_gradient and (not self._recompute or done(Op.RECOMPUTE))
        if op is Op.SEND_GRADIENT:
            return not is_first and done(Op.BACKWARD)
        return True

    def _backward_follows(self, stage: int) -> bool:
        recompute, *following = self._actions[stage][self._position[stage] :]
        others = [a for a in following if a.op is not Op.RECEIVE_GRADIENT]
        return others[:1] == [Action(Op.BACKWARD, recompute.microbatch)]

    def _refuse(self, stage: int, action: Action, problem: str) -> None:
        raise ConfigError(
            f"schedule {self._schedule.name!r} must be valid on {len(self._actions)} stages with "
            f"{len(self._everything)} micro-batches, got a {action.op.value} of micro-batch "
            f"{action.microbatch} on stage {stage} that {problem}. Correct "
            f"{type(self._schedule).__name__}.build_actions."
        )
