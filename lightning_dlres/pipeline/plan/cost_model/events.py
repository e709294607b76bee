"""A step as a graph of events in a fixed order: what starts when its predecessors have ended.

Made from the very action lists that the runtime executes. The simulator walks it, and the planner's
integer program has one time variable for each event, so that both speak of the same step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES, Action, Op, Schedule


class Work(IntEnum):
    """What takes time in a step."""

    FORWARD = 0
    LOSS = 1
    RECOMPUTE = 2
    BACKWARD = 3
    ACTIVATION = 4
    GRADIENT = 5


COMPUTING = (Work.FORWARD, Work.LOSS, Work.RECOMPUTE, Work.BACKWARD)
_WORK_OF = {
    Op.FORWARD: Work.FORWARD,
    Op.LOSS: Work.LOSS,
    Op.RECOMPUTE: Work.RECOMPUTE,
    Op.BACKWARD: Work.BACKWARD,
    Op.SEND_ACTIVATION: Work.ACTIVATION,
    Op.SEND_GRADIENT: Work.GRADIENT,
}


@dataclass(frozen=True)
class ScheduleEvent:
    """One piece of work.

    Attributes:
        work: what is done; a transfer belongs to the stage that sends.
        replica, stage: where.
        microbatch: index among the replica's micro-batches, or `ALL_MICROBATCHES`.
        after: indices of the events that must have ended before; all smaller than this event's.
    """

    work: Work
    replica: int
    stage: int
    microbatch: int
    after: tuple[int, ...]

    @property
    def key(self) -> tuple[Work, int, int]:
        """What decides how long it takes: every micro-batch takes the same time."""
        return self.work, self.replica, self.stage


@lru_cache(maxsize=64)
def event_graph(
    schedule: Schedule, stages: int, microbatches: tuple[int, ...], extra_in_flight: int = 0
) -> tuple[ScheduleEvent, ...]:
    """Return the events of one step, predecessors first.

    A stage computes one thing at a time, in the order of its actions; messages of one kind between
    two stages travel one after the other, beside the computing. For a loss over the whole
    batch the last stages of all replicas exchange their outputs, so it waits for all forwards.

    Args:
        schedule: order of each stage's actions.
        stages: stages of every replica.
        microbatches: number of micro-batches of each replica; one without any has no events.
        extra_in_flight: see `Schedule.actions`.
    """
    builder = _Builder()
    for replica, count in enumerate(microbatches):
        for stage in range(stages if count else 0):
            actions = schedule.actions(
                stages, stage, count, recompute=True, extra_in_flight=extra_in_flight
            )
            builder.add(replica, stage, actions)
    return builder.build()


class _Builder:
    def __init__(self) -> None:
        self.actions: dict[tuple[int, int], list[Action]] = {}
        self.events: list[ScheduleEvent] = []
        self.index: dict[tuple[Work, int, int, int], int] = {}
        self.latest: dict[tuple[Work | None, int, int], int] = {}
        self.arrived: dict[tuple[int, int], list[int]] = {}

    def add(self, replica: int, stage: int, actions: list[Action]) -> None:
        self.actions[replica, stage] = actions

    def build(self) -> tuple[ScheduleEvent, ...]:
        position = dict.fromkeys(self.actions, 0)
        while any(position[place] < len(self.actions[place]) for place in position):
            before = dict(position)
            for place, actions in self.actions.items():
                while position[place] < len(actions) and self.do(*place, actions[position[place]]):
                    position[place] += 1
            if position == before:
                raise AssertionError(f"The schedule waits for itself at {position}.")
        return tuple(self.events)

    def do(self, replica: int, stage: int, action: Action) -> bool:
        """Add an action's event; False where what it waits for has not been added yet."""
        op, microbatch = action.op, action.microbatch
        if op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            forward = op is Op.RECEIVE_ACTIVATION
            sent = (
                (Work.ACTIVATION, replica, stage - 1, microbatch)
                if forward
                else (Work.GRADIENT, replica, stage + 1, microbatch)
            )
            if sent not in self.index:
                return False
            self.arrived.setdefault((replica, stage), []).append(self.index[sent])
            return True
        work, after = _WORK_OF[op], list[int]()
        if work is Work.LOSS and microbatch == ALL_MICROBATCHES:
            ends = [
                self._last_forward(other, last) for other, last in self.actions if last == stage
            ]
            if None in ends:
                return False
            after += [end for end in ends if end is not None]
        computing = work in COMPUTING
        # A transfer starts when the computing before it has ended, and the transfer before it.
        lines: list[Work | None] = [None] if computing else [None, work]
        after += [
            self.latest[line, replica, stage]
            for line in lines
            if (line, replica, stage) in self.latest
        ]
        if computing:
            after += self.arrived.pop((replica, stage), [])
        index = len(self.events)
        self.events.append(
            ScheduleEvent(work, replica, stage, microbatch, tuple(sorted(set(after))))
        )
        self.index[work, replica, stage, microbatch] = index
        self.latest[None if computing else work, replica, stage] = index
        return True

    def _last_forward(self, replica: int, stage: int) -> int | None:
        """Return the event of the last forward of a stage; None where it has not been added yet."""
        last = [a.microbatch for a in self.actions[replica, stage] if a.op is Op.FORWARD][-1]
        return self.index.get((Work.FORWARD, replica, stage, last))
