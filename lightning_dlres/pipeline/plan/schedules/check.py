"""Check of a schedule: a dry run of its stages, which pass messages but compute nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product

from lightning_dlres.core.errors import ConfigError
from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES, Action, Op, Schedule

# Sizes of the pipelines that a schedule is checked on. They are small, since each import of the
# package runs the check.
_STAGES = (1, 2, 3)
_MICROBATCHES = (0, 1, 4)
_EXTRA_IN_FLIGHT = (0, 1)
_RECEIVES = (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT)


def check_schedule(schedule: Schedule) -> None:
    """Run a schedule on small pipelines, and check the rules that runtime and planner rely on.

    - Every stage runs the forward and the backward of every micro-batch once. No stage waits for a
      message forever.
    - A stage receives messages in the order in which its neighbour sends them. The runtime's
      mailbox refuses any message but the next one.
    - A stage recomputes a micro-batch right before its backward; only the receive of the gradient
      may come between. The planner's memory bound counts one recomputed micro-batch at a time.
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
        _DryRun(schedule, actions, microbatches, recompute).run()


class _DryRun:
    """Dry run of one step: every stage does its actions until it must wait for a message."""

    def __init__(
        self,
        schedule: Schedule,
        actions: Sequence[Sequence[Action]],
        microbatches: int,
        recompute: bool,
    ) -> None:
        self._schedule, self._actions, self._recompute = schedule, actions, recompute
        self._microbatches = set(range(microbatches))
        # Index of the next action of every stage.
        self._position = [0] * len(actions)
        # (receiving stage, kind of receive) -> micro-batches sent but not received, oldest first.
        self._queues: dict[tuple[int, Op], deque[int]] = {
            (stage, op): deque() for stage in range(len(actions)) for op in _RECEIVES
        }
        # (stage, kind of action) -> micro-batches for which the stage has done this action.
        self._done: dict[tuple[int, Op], set[int]] = {
            (stage, op): set() for stage in range(len(actions)) for op in Op
        }

    def run(self) -> None:
        """Run all stages to the end of their actions.

        Raises:
            ConfigError: If the schedule breaks a rule of `check_schedule`.
        """
        has_progressed = True
        while has_progressed:
            has_progressed = False
            for stage in range(len(self._actions)):
                has_progressed |= self._advance(stage)
        for stage, actions in enumerate(self._actions):
            if self._position[stage] < len(actions):
                self._refuse(stage, actions[self._position[stage]], "waits forever")
            for op in (Op.FORWARD, Op.BACKWARD):
                for microbatch in self._microbatches - self._done[stage, op]:
                    self._refuse_missing(stage, Action(op, microbatch))
        for (stage, op), microbatches in self._queues.items():
            for microbatch in microbatches:
                self._refuse_missing(stage, Action(op, microbatch))

    def _advance(self, stage: int) -> bool:
        """Run a stage until it waits or ends; return whether it did any action."""
        actions, start = self._actions[stage], self._position[stage]
        while self._position[stage] < len(actions) and self._perform(stage):
            self._position[stage] += 1
        return self._position[stage] > start

    def _perform(self, stage: int) -> bool:
        """Do the next action of a stage; return False if its message has not been sent yet."""
        action = self._actions[stage][self._position[stage]]
        op, microbatch = action.op, action.microbatch
        if op in _RECEIVES:
            if not self._queues[stage, op]:
                return False
            if self._queues[stage, op].popleft() != microbatch:
                self._refuse(stage, action, "is not in the order of sending")
        if microbatch in self._done[stage, op]:
            self._refuse(stage, action, "comes twice")
        if not self._is_ready(stage, action):
            self._refuse(
                stage, action, "comes too early, on the wrong stage or for the wrong micro-batch"
            )
        if op is Op.SEND_ACTIVATION:
            self._queues[stage + 1, Op.RECEIVE_ACTIVATION].append(microbatch)
        if op is Op.SEND_GRADIENT:
            self._queues[stage - 1, Op.RECEIVE_GRADIENT].append(microbatch)
        self._done[stage, op].add(microbatch)
        return True

    def _is_ready(self, stage: int, action: Action) -> bool:
        """Return whether an action is allowed now: on this stage, and after all that it needs."""
        op, microbatch = action.op, action.microbatch
        is_first, is_last = stage == 0, stage == len(self._actions) - 1

        def done(needed: Op) -> bool:
            return microbatch in self._done[stage, needed]

        if op is Op.LOSS:
            if self._schedule.whole_batch_loss:
                forwards = self._done[stage, Op.FORWARD]
                return is_last and microbatch == ALL_MICROBATCHES and forwards == self._microbatches
            is_next = microbatch == len(self._done[stage, Op.LOSS])
            return is_last and is_next and done(Op.FORWARD)
        if microbatch not in self._microbatches:
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
        """Return whether the backward follows the recomputation that the stage is at."""
        recompute, *following = self._actions[stage][self._position[stage] :]
        others = [a for a in following if a.op is not Op.RECEIVE_GRADIENT]
        return others[:1] == [Action(Op.BACKWARD, recompute.microbatch)]

    def _refuse(self, stage: int, action: Action, problem: str) -> None:
        self._raise(f"a {_description(action)} on stage {stage} that {problem}")

    def _refuse_missing(self, stage: int, action: Action) -> None:
        self._raise(f"no {_description(action)} on stage {stage}")

    def _raise(self, got: str) -> None:
        raise ConfigError(
            f"schedule {self._schedule.name!r} must be valid on {len(self._actions)} stages with "
            f"{len(self._microbatches)} micro-batches, got {got}. Correct "
            f"{type(self._schedule).__name__}.build_actions."
        )


def _description(action: Action) -> str:
    """Return an action in words, for an error message."""
    if action.microbatch == ALL_MICROBATCHES:
        return f"{action.op.value} of the whole batch"
    return f"{action.op.value} of micro-batch {action.microbatch}"
