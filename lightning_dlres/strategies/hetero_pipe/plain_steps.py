"""Runner of steps on one device without micro-batches, as in plain Lightning training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

from lightning.pytorch import LightningModule

from lightning_dlres.core.trace import Tracer
from lightning_dlres.pipeline.plan.schedules.gpipe import GPipe


class PlainSteps:
    """Runner of training and evaluation steps for one rank and one micro-batch.

    It has no schedule, no seeding of layers and no replay of logs. These would take time in every
    step and change no result.

    Args:
        module: The LightningModule.
        precision: Returns the context manager in which a step runs.
        tracer: Gets the spans of every training step.
    """

    schedule: ClassVar[str] = GPipe.name
    """Name of the schedule: that of GPipe, since the loss is computed once over the whole batch."""

    def __init__(
        self,
        module: LightningModule,
        precision: Callable[[], AbstractContextManager[Any]],
        tracer: Tracer,
    ) -> None:
        self._module, self._precision, self._tracer = module, precision, tracer
        self._batch, self._start_ns = 0, 0

    def train(self, args: tuple[Any, ...], batch: int) -> Any:
        """Run one training step.

        Args:
            args: Arguments of `training_step`; the first is the batch.
            batch: Index of the batch since the start of training.
        """
        self._batch, self._start_ns = batch, time.perf_counter_ns()
        with self._compute_span("forward"), self._precision():
            return self._module.training_step(*args)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context manager that traces a backward pass. The step's span ends with it."""
        with self._compute_span("backward"):
            yield
        end_ns = time.perf_counter_ns()
        self._tracer.add("step", "step", self._start_ns, end_ns, batch=self._batch)

    def evaluate(self, hook: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a validation, test or predict step."""
        with self._precision():
            return hook(*args)

    def _compute_span(self, name: str) -> AbstractContextManager[None]:
        return self._tracer.span(name, "compute", stage=0, microbatch=0)
