"""Base class of pipeline schedules: the order of each stage's actions within one training step.

A schedule states its actions and the granularity of its loss. The simulator, the planner and the
runtime derive everything else from these two, so all three agree on the order of a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import ClassVar, final

from lightning_dlres.core.errors import ConfigError


class Op(str, Enum):
    """Kind of a stage's action."""

    RECEIVE_ACTIVATION = "receive activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send activation"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    RECEIVE_GRADIENT = "receive gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send gradient"


ALL_MICROBATCHES = -1
"""Micro-batch index of an action on the whole batch."""


@dataclass(frozen=True)
class Action:
    """One action of a stage.

    Attributes:
        op: Kind of the action.
        microbatch: Index into the replica's own micro-batches, or `ALL_MICROBATCHES` for a loss
            over the whole batch.
    """

    op: Op
    microbatch: int


class Schedule(ABC):
    """Order of each stage's actions within one training step.

    A subclass defines `name`, `whole_batch_loss` and `build_actions`. It must keep no state, since
    one instance serves all runs of the process. At the end of a step, no micro-batch may be in
    flight. `register_schedule` checks the subclass and makes it available by its name.

    Attributes:
        name: Name in options, plan.json and error messages.
        whole_batch_loss: Whether the last stage computes the loss once, over the whole batch, which
            is exact for any loss. Otherwise the loss is computed per micro-batch, which is exact
            only for a mean over samples. No backward can start before a loss over the whole batch,
            so all forwards of every stage then precede all its backwards.
    """

    name: ClassVar[str]
    whole_batch_loss: ClassVar[bool]

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def build_actions(
        self, stages: int, stage: int, microbatches: int, recompute: bool, extra_in_flight: int
    ) -> list[Action]:
        """Return the actions of one stage for one step; see `actions` for the arguments.

        Build them from `forward_actions` and `backward_actions`, which add the receives and sends
        of a micro-batch. `check_schedule` lists the rules for the order.
        """

    @final
    def actions(
        self,
        stages: int,
        stage: int,
        microbatches: int,
        *,
        recompute: bool = False,
        extra_in_flight: int = 0,
    ) -> list[Action]:
        """Return the actions of one stage for one step.

        Args:
            stages: Number of stages of the pipeline.
            stage: Index of the stage; 0 is the first.
            microbatches: Number of micro-batches of this replica in the step. It may be 0, or
                smaller than `stages`.
            recompute: Whether the stage recomputes layers before a micro-batch's backward.
            extra_in_flight: Number of micro-batches that each stage but the last keeps in flight in
                addition to those that fill the pipeline. A schedule may ignore it.

        Raises:
            ConfigError: If `stage` or `microbatches` is out of range.
        """
        if not 0 <= stage < stages:
            raise ConfigError(
                f"stage must be at least 0 and less than the number of stages ({stages}), got "
                f"{stage}. Number the stages from 0."
            )
        if microbatches < 0:
            raise ConfigError(
                f"microbatches must be at least 0, got {microbatches}. Use microbatches=0 for a "
                "replica without micro-batches."
            )
        return self.build_actions(stages, stage, microbatches, recompute, extra_in_flight)

    @final
    def max_in_flight(
        self, stages: int, stage: int, microbatches: int, extra_in_flight: int = 0
    ) -> int:
        """Return the largest number of micro-batches in flight on a stage.

        A micro-batch is in flight from the start of its forward to the end of its backward.

        Raises:
            ConfigError: If `stage` or `microbatches` is out of range.
        """
        return _counts(self, stages, stage, microbatches, extra_in_flight).max_in_flight

    @final
    def serial_forwards(
        self, stages: int, stage: int, microbatches: int, extra_in_flight: int = 0
    ) -> int:
        """Return the number of forwards of a stage that cannot overlap with the first round trip.

        The first round trip belongs to the micro-batch with the first backward on this stage. It
        leads through all later stages and back. Forwards up to that micro-batch's own come before
        the round trip, and those after the first backward come after it: both count. Forwards in
        between may overlap. A loss over the whole batch waits for all forwards, so all count.

        Raises:
            ConfigError: If `stage` or `microbatches` is out of range.
        """
        return _counts(self, stages, stage, microbatches, extra_in_flight).serial_forwards

    @final
    def losses(self, microbatches: int) -> int:
        """Return the number of losses that a replica's last stage computes in one step."""
        return 1 if self.whole_batch_loss else microbatches


def forward_actions(stages: int, stage: int, microbatch: int) -> list[Action]:
    """Return the forward of one micro-batch on one stage, with its receive and its send."""
    receive = [Action(Op.RECEIVE_ACTIVATION, microbatch)] if stage > 0 else []
    send = [Action(Op.SEND_ACTIVATION, microbatch)] if stage < stages - 1 else []
    return [*receive, Action(Op.FORWARD, microbatch), *send]


def backward_actions(stages: int, stage: int, microbatch: int, recompute: bool) -> list[Action]:
    """Return the backward of one micro-batch on one stage, with its receive and its send.

    The stage recomputes before it waits for the gradient, in time that would otherwise be idle.
    """
    recomputation = [Action(Op.RECOMPUTE, microbatch)] if recompute else []
    receive = [Action(Op.RECEIVE_GRADIENT, microbatch)] if stage < stages - 1 else []
    send = [Action(Op.SEND_GRADIENT, microbatch)] if stage > 0 else []
    return [*recomputation, *receive, Action(Op.BACKWARD, microbatch), *send]


@dataclass(frozen=True)
class _Counts:
    """Results of `Schedule.max_in_flight` and `Schedule.serial_forwards` for one stage."""

    max_in_flight: int
    serial_forwards: int


@lru_cache(maxsize=4096)
def _counts(
    schedule: Schedule, stages: int, stage: int, microbatches: int, extra_in_flight: int
) -> _Counts:
    """Return the counts of one stage; cached, since the planner asks for the same ones often."""
    actions = schedule.actions(stages, stage, microbatches, extra_in_flight=extra_in_flight)
    in_flight = max_in_flight = 0
    forwards: list[int] = []
    before_round_trip = after_round_trip = 0
    first_backward: int | None = None
    for action in actions:
        if action.op is Op.FORWARD:
            in_flight += 1
            max_in_flight = max(max_in_flight, in_flight)
            forwards.append(action.microbatch)
            after_round_trip += first_backward is not None
        elif action.op is Op.BACKWARD:
            in_flight -= 1
            if first_backward is None:
                first_backward = action.microbatch
                before_round_trip = forwards.index(first_backward) + 1
    if schedule.whole_batch_loss:
        return _Counts(max_in_flight, microbatches)
    return _Counts(max_in_flight, before_round_trip + after_round_trip)
