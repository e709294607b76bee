"""Graph of a step's events: each event starts when its predecessors have ended.

The graph is made from the action lists that the runtime executes. The simulator and the planner's
integer program both use it, so they predict the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from lightning_dlres.pipeline.plan.schedules.base import ALL_MICROBATCHES, Action, Op, Schedule


class Work(IntEnum):
    """Kind of an event: computation or transfer."""

    FORWARD = 0
    LOSS = 1
    RECOMPUTE = 2
    BACKWARD = 3
    ACTIVATION = 4
    GRADIENT = 5


# Kinds of events that occupy the stage's device; the others are transfers.
COMPUTING = (Work.FORWARD, Work.LOSS, Work.RECOMPUTE, Work.BACKWARD)
# A receive has no event of its own: the next computation waits for the sender's transfer.
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
    """One computation or transfer of a step.

    Attributes:
        work: Kind of the event. A transfer belongs to the stage that sends.
        replica: Replica of the event.
        stage: Stage of the event.
        microbatch: Index among the replica's micro-batches, or `ALL_MICROBATCHES`.
        after: Indices of the event's predecessors, which must end first. All are smaller than this
            event's own index.
    """

    work: Work
    replica: int
    stage: int
    microbatch: int
    after: tuple[int, ...]

    @property
    def key(self) -> tuple[Work, int, int]:
        """Key of the event's duration, which is equal for all micro-batches."""
        return self.work, self.replica, self.stage


@lru_cache(maxsize=64)
def event_graph(
    schedule: Schedule, stages: int, microbatches: tuple[int, ...], extra_in_flight: int = 0
) -> tuple[ScheduleEvent, ...]:
    """Return the events of one step, predecessors first.

    A stage computes one thing at a time, in the order of its actions. Messages of one kind between
    two stages travel one after the other, while the stages compute. For a loss over the whole
    batch the last stages of all replicas exchange their outputs. So the loss waits for the forwards
    of all last stages. Every stage has events of recomputation, which take no time where nothing is
    recomputed.

    Args:
        schedule: Order of each stage's actions.
        stages: Number of stages of every replica.
        microbatches: Number of micro-batches of each replica; a replica without any has no events.
        extra_in_flight: See `Schedule.actions`.
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
    """Builder of an event graph.

    It takes the stages in turn. It adds a stage's events until it meets one whose predecessor has
    not been added yet.

    Attributes:
        actions: Actions by (replica, stage).
        events: Events so far, predecessors first.
        index: Index of an event by (work, replica, stage, micro-batch).
        latest: Index of a stage's latest event, by (work, replica, stage). Each kind of transfer
            has an entry of its own; all computations share the entry with work None.
        arrived: Indices of the transfers to a stage that its next computation waits for, by
            (replica, stage).
    """

    def __init__(self) -> None:
        self.actions: dict[tuple[int, int], list[Action]] = {}
        self.events: list[ScheduleEvent] = []
        self.index: dict[tuple[Work, int, int, int], int] = {}
        self.latest: dict[tuple[Work | None, int, int], int] = {}
        self.arrived: dict[tuple[int, int], list[int]] = {}

    def add(self, replica: int, stage: int, actions: list[Action]) -> None:
        """Add the actions of a stage."""
        self.actions[replica, stage] = actions

    def build(self) -> tuple[ScheduleEvent, ...]:
        """Return the events of all actions, predecessors first."""
        # Index of the next action, by (replica, stage).
        next_action = dict.fromkeys(self.actions, 0)
        while any(next_action[key] < len(self.actions[key]) for key in next_action):
            previous = dict(next_action)
            for key, actions in self.actions.items():
                while next_action[key] < len(actions) and self.add_event(
                    *key, actions[next_action[key]]
                ):
                    next_action[key] += 1
            if next_action == previous:
                raise AssertionError(f"The schedule deadlocks at {next_action}.")
        return tuple(self.events)

    def add_event(self, replica: int, stage: int, action: Action) -> bool:
        """Add an action's event; return False if its predecessor has not been added yet."""
        op, microbatch = action.op, action.microbatch
        if op in (Op.RECEIVE_ACTIVATION, Op.RECEIVE_GRADIENT):
            transfer = (
                (Work.ACTIVATION, replica, stage - 1, microbatch)
                if op is Op.RECEIVE_ACTIVATION
                else (Work.GRADIENT, replica, stage + 1, microbatch)
            )
            if transfer not in self.index:
                return False
            self.arrived.setdefault((replica, stage), []).append(self.index[transfer])
            return True
        work, after = _WORK_OF[op], list[int]()
        if work is Work.LOSS and microbatch == ALL_MICROBATCHES:
            last_forwards = [
                self._last_forward(other_replica, other_stage)
                for other_replica, other_stage in self.actions
                if other_stage == stage
            ]
            if None in last_forwards:
                return False
            after += [index for index in last_forwards if index is not None]
        is_computation = work in COMPUTING
        # A transfer starts when the computation before it and the transfer before it have ended.
        latest_keys: list[Work | None] = [None] if is_computation else [None, work]
        after += [
            self.latest[key, replica, stage]
            for key in latest_keys
            if (key, replica, stage) in self.latest
        ]
        if is_computation:
            after += self.arrived.pop((replica, stage), [])
        index = len(self.events)
        self.events.append(
            ScheduleEvent(work, replica, stage, microbatch, tuple(sorted(set(after))))
        )
        self.index[work, replica, stage, microbatch] = index
        self.latest[None if is_computation else work, replica, stage] = index
        return True

    def _last_forward(self, replica: int, stage: int) -> int | None:
        """Return the index of a stage's last forward; None if it has not been added yet."""
        last = [a.microbatch for a in self.actions[replica, stage] if a.op is Op.FORWARD][-1]
        return self.index.get((Work.FORWARD, replica, stage, last))
