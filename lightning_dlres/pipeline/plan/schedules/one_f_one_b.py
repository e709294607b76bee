"""1F1B schedule: one forward, one backward, with few micro-batches in flight."""

from __future__ import annotations

from typing import ClassVar

from lightning_dlres.pipeline.plan.schedules.base import (
    Action,
    Op,
    Schedule,
    backward_actions,
    forward_actions,
)


class OneForwardOneBackward(Schedule):
    """Synchronous 1F1B (PipeDream-flush, Narayanan et al., 2021).

    A stage starts each backward as soon as it can. So stage s of n, counted from 0, has at most
    n - s micro-batches in flight. Every stage but the last has `extra_in_flight` more. Without
    these, two stages of equal speed wait for every message of each other. With one, a message may
    be late and no stage is idle.
    """

    name: ClassVar[str] = "1f1b"
    whole_batch_loss: ClassVar[bool] = False

    def build_actions(
        self, stages: int, stage: int, microbatches: int, recompute: bool, extra_in_flight: int
    ) -> list[Action]:
        is_last = stage == stages - 1
        # Number of forwards before the stage alternates one forward and one backward.
        warmup = min(0 if is_last else stages - 1 - stage + extra_in_flight, microbatches)
        actions = [a for m in range(warmup) for a in forward_actions(stages, stage, m)]
        for m in range(warmup, microbatches):
            actions += forward_actions(stages, stage, m)
            if is_last:
                actions.append(Action(Op.LOSS, m))
            actions += backward_actions(stages, stage, m - warmup, recompute)
        return actions + [
            a
            for m in range(microbatches - warmup, microbatches)
            for a in backward_actions(stages, stage, m, recompute)
        ]
