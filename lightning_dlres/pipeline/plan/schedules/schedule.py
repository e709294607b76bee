"""Which stage does what, in which order: plain lists of actions from a pure function.

GPipe (Huang et al., 2019) runs all forwards, then the loss once, then all backwards. Synchronous
1F1B (PipeDream-flush, Narayanan et al., 2021) starts a backward as soon as it can, so that stage s
of n holds at most n - s micro-batches. Both flush at the end of the step: the weights are those of
single-device training.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from lightning_dlres.core.errors import ConfigError, got_expected

SCHEDULES = ("gpipe", "1f1b")


class Op(str, Enum):
    """What a stage can be told to do with a micro-batch."""

    RECEIVE_ACTIVATION = "receive activation"
    FORWARD = "forward"
    SEND_ACTIVATION = "send activation"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    RECEIVE_GRADIENT = "receive gradient"
    BACKWARD = "backward"
    SEND_GRADIENT = "send gradient"


ALL_MICROBATCHES = -1


@dataclass(frozen=True)
class Action:
    """One instruction. `microbatch` is an index into the replica's own micro-batches, or
    `ALL_MICROBATCHES` for a loss over the whole batch."""

    op: Op
    microbatch: int


def build_schedule(
    name: str,
    stages: int,
    stage: int,
    microbatches: int,
    recompute: bool = False,
    extra_in_flight: int = 0,
) -> list[Action]:
    """Return the actions of one stage for one step.

    Args:
        name: "gpipe" or "1f1b".
        stages: number of stages of the pipeline.
        stage: index of the stage, 0 is the first.
        microbatches: number of micro-batches that this pipeline gets in the step; may be smaller
            than `stages`, or 0.
        recompute: whether the stage recomputes something before a micro-batch's backward. It does
            so before it waits for the gradient: in time that would be idle (Method E, E8).
        extra_in_flight: under 1F1B, by how many micro-batches stages before the last one run ahead
            beyond what it takes to fill the pipeline. With none, two stages of one speed wait for
            each other's every message; with one, a message may be late without a stage being idle.

    Raises:
        ConfigError: unknown name, or indices out of range.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            got_expected("schedule", name, f"one of {', '.join(SCHEDULES)}", "schedule='auto'")
        )
    if not 0 <= stage < stages or microbatches < 0:
        raise ConfigError(f"No stage {stage} of {stages} with {microbatches} micro-batches.")
    if name == "gpipe":
        loss = [Action(Op.LOSS, ALL_MICROBATCHES)] if stage == stages - 1 else []
        return [
            *(a for m in range(microbatches) for a in _forward(stages, stage, m)),
            *loss,
            *(a for m in range(microbatches) for a in _backward(stages, stage, m, recompute)),
        ]
    return _one_forward_one_backward(stages, stage, microbatches, recompute, extra_in_flight)


def in_flight(
    name: str, stages: int, stage: int, microbatches: int, extra_in_flight: int = 0
) -> int:
    """Return the most micro-batches whose forward is done and whose backward is not, on a stage."""
    if name == "gpipe":
        return microbatches
    return min(1 + _warmup(stages, stage, extra_in_flight), microbatches)


def _warmup(stages: int, stage: int, extra_in_flight: int) -> int:
    """Return the number of forwards before the first pair of a forward and a backward."""
    return stages - 1 - stage + extra_in_flight if stage < stages - 1 else 0


def _one_forward_one_backward(
    stages: int, stage: int, microbatches: int, recompute: bool, extra_in_flight: int
) -> list[Action]:
    warmup = min(_warmup(stages, stage, extra_in_flight), microbatches)
    last = stage == stages - 1
    actions = [a for m in range(warmup) for a in _forward(stages, stage, m)]
    for m in range(warmup, microbatches):
        actions += _forward(stages, stage, m)
        if last:
            actions.append(Action(Op.LOSS, m))
        actions += _backward(stages, stage, m - warmup, recompute)
    return actions + [
        a
        for m in range(microbatches - warmup, microbatches)
        for a in _backward(stages, stage, m, recompute)
    ]


def _forward(stages: int, stage: int, m: int) -> list[Action]:
    receive = [Action(Op.RECEIVE_ACTIVATION, m)] if stage > 0 else []
    send = [Action(Op.SEND_ACTIVATION, m)] if stage < stages - 1 else []
    return [*receive, Action(Op.FORWARD, m), *send]


def _backward(stages: int, stage: int, m: int, recompute: bool) -> list[Action]:
    again = [Action(Op.RECOMPUTE, m)] if recompute else []
    receive = [Action(Op.RECEIVE_GRADIENT, m)] if stage < stages - 1 else []
    send = [Action(Op.SEND_GRADIENT, m)] if stage > 0 else []
    return [*again, *receive, Action(Op.BACKWARD, m), *send]
