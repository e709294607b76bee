"""Steps of a callback: the batch that ends with an update, and a step that may be left open.

An exception or a hook may prevent the hook at the end of a step.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

from lightning.pytorch import Trainer


def is_stepping_batch(trainer: Trainer) -> bool:
    """Return True if the optimizer steps after the batch that is about to be trained.

    The index that hooks get is that of an earlier batch if `training_step` fetches batches itself,
    so the loop is asked. If the loader has no length, the last such batch is not known as that.
    """
    number = trainer.fit_loop.epoch_loop.batch_idx + 1
    is_last = trainer.is_last_batch or number == trainer.num_training_batches
    return is_last or number % trainer.accumulate_grad_batches == 0


class OpenStep:
    """Context of the step that has begun and not ended; at most one."""

    def __init__(self) -> None:
        self._stack: ExitStack | None = None

    def begin(self, context: AbstractContextManager[object]) -> None:
        """Enter the context of a step. A step that was left open is abandoned."""
        self.abandon()
        stack = ExitStack()
        stack.enter_context(context)
        self._stack = stack

    def end(self) -> None:
        """Leave the context of a step that has reached its end."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def abandon(self) -> None:
        """Leave a step that did not reach its end; no effect without an open step."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(_AbandonedStep, _AbandonedStep(), None)


class _AbandonedStep(BaseException):
    """Exception that tells the open context of a step that the step did not reach its end."""
