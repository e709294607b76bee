"""Step of a callback that may be left open: an exception or a hook may prevent its end hook."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack


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
