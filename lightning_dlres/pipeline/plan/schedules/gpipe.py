"""GPipe schedule: all forwards, one loss over the whole batch, then all backwards."""

from __future__ import annotations

from typing import ClassVar

from lightning_dlres.pipeline.plan.schedules.base import (
    ALL_MICROBATCHES,
    Action,
    Op,
    Schedule,
    backward_actions,
    forward_actions,
)


class GPipe(Schedule):
    """GPipe (Huang et al., 2019): exact for any loss, with all micro-batches in flight."""

    name: ClassVar[str] = "gpipe"
    whole_batch_loss: ClassVar[bool] = True

    def build_actions(
        self, stages: int, stage: int, microbatches: int, recompute: bool, extra_in_flight: int
    ) -> list[Action]:
        loss = [Action(Op.LOSS, ALL_MICROBATCHES)] if stage == stages - 1 else []
        forwards = [
            action
            for microbatch in range(microbatches)
            for action in forward_actions(stages, stage, microbatch)
        ]
        backwards = [
            action
            for microbatch in range(microbatches)
            for action in backward_actions(stages, stage, microbatch, recompute)
        ]
        return [*forwards, *loss, *backwards]
