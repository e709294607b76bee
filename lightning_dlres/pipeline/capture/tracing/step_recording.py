"""Recording of a training step as a trace of blocks and glue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_dlres.core._compat import storage_key
from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.core.wire.nested import tensors_in
from lightning_dlres.pipeline.capture.paths import Decisions
from lightning_dlres.pipeline.capture.placeholders.block_output import BlockOutput
from lightning_dlres.pipeline.capture.segment_state import OpenStep
from lightning_dlres.pipeline.capture.trace import Event, Trace, Value
from lightning_dlres.pipeline.capture.tracing.recording import Recorder


class StepTraceRecorder(Recorder):
    """Recorder of a training step.

    After its last call of a block, a step may do anything. What it may need there is noted: results
    that its variables still hold, and changes between the blocks of tensors from outside.

    Args:
        module: The module with the blocks.
        blocks: The blocks, by name; their order gives their indices.
        before_block: Called with the number of a call before it runs; with -1 at the start.
        outputs: As for `Recorder`.
        decisions: As for `Recorder`.
        step: Opens the training step.
        last: Number of the last call of a block.
        allows_repeats: True if a block may be called several times.
    """

    _first_seed = -1

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        before_block: Callable[[int], None],
        outputs: Mapping[int, BlockOutput] | None = None,
        decisions: Decisions = (),
        *,
        step: OpenStep,
        last: int | None,
        allows_repeats: bool = False,
    ) -> None:
        super().__init__(
            module, blocks, before_block, outputs, decisions, allows_repeats=allows_repeats
        )
        self._step, self._last = step, last
        # Storages of tensors that were there before the step, and those that it changes between
        # blocks.
        self._outside: set[int] = set()
        self._changed: set[int] = set()
        self._held: tuple[Value, ...] | None = None
        # Buffers are tensors from outside like others.
        self._buffers = {}

    def _opened(self) -> AbstractContextManager[Callable[..., Any]]:
        return self._step()

    @property
    def _place(self) -> str:
        return f"{type(self._module).__name__}.training_step"

    def _checked(self, trace: Trace) -> Trace:
        calls = (at for at, event in enumerate(self._events) if event.block is not None)
        return replace(
            trace,
            held=self._held or (),
            outside=frozenset(self._outside),
            prefix=next(calls, len(self._events)),
        )

    def _note_outside(
        self, name: str, arguments: Sequence[Tensor], written: Collection[int], result: Any
    ) -> bool:
        """Note tensors from outside; return True if an operation changes one between blocks.

        Args:
            name: Name of the operation.
            arguments: Tensors that it takes.
            written: Storages that it writes to.
            result: Its result.
        """
        self._outside.update(storage_key(t) for t in arguments if not self._is_known(t))
        changed = self._outside.intersection(written) if self.order else set()
        results = list(tensors_in(result))
        is_use = not results or any(storage_key(t) not in self._outside for t in results)
        if is_use and not changed and self._changed.intersection(map(storage_key, arguments)):
            raise UnsupportedStepError(
                f"{self._place} must not use a tensor between its submodules that it has changed "
                f"there, such as a buffer, got {name}. Change it after the last submodule."
            )
        if any(map(self._is_known, arguments)):
            # All stages change a counter, which does not depend on the batch, alike.
            self._changed |= changed
        return bool(changed)

    def _held_by_step(self) -> tuple[Value, ...]:
        """Return the values in variables of the step and of functions that it calls, and in
        attributes, where it may use them in other steps."""
        tensors = [tensor for _, tensor in self._kept_elsewhere(*self._arguments)]
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not Recorder.run.__code__:
            # Variables of a `forward` are mostly used up, and may be large.
            if frame.f_code.co_name != "forward" and frame.f_globals.get("__name__") != __name__:
                tensors += tensors_in(dict(frame.f_locals))
            frame = frame.f_back  # type: ignore[assignment]
        return tuple(dict.fromkeys(self._value(t) for t in tensors if self._is_known(t)))

    def _after_blocks(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation after the last block, where a step may do anything."""
        if self._held is None:
            self._held = self._held_by_step()
        arguments = list(tensors_in((args, kwargs)))
        for tensor in arguments:
            self._note_use(tensor, "", name)
        inputs = tuple(self._value(t) for t in arguments if self._is_known(t))
        self._events += [Event(name, None, inputs)] if inputs else []
        return function(*args, **kwargs)
