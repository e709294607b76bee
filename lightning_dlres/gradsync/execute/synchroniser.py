"""Synchronisation of the gradients of one rank with those of the others, as a plan says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.comm.mailbox import Mailbox
from lightning_dlres.core.errors import ConfigError, got_expected
from lightning_dlres.core.trace import Tracer
from lightning_dlres.gradsync.execute.coordination import CoordinatorLink
from lightning_dlres.gradsync.execute.executor import SyncExecutor
from lightning_dlres.gradsync.execute.states import CodecStates, StateCopies
from lightning_dlres.gradsync.execute.unit_graphs import unit_graph
from lightning_dlres.gradsync.execute.unit_run import StepOptions, UnitRun, UnitTasks
from lightning_dlres.gradsync.plan.graph import Part, TaskKind
from lightning_dlres.gradsync.plan.plan import RAW, SyncPlan
from lightning_dlres.gradsync.plan.units import SyncUnit


class GradientSynchroniser:
    """Replaces gradients by their means over all ranks.

    Args:
        plan: Plan, the same on all ranks.
        codecs: Codecs of the plan by name, with equal options on all ranks.
        mailbox: Messages to the other ranks.
        tracer: Gets a span for each task.
        has_error_feedback: False drops what a rank did not send of its own gradient, or of the sum
            that it passes on in a ring.
        has_sum_feedback: False drops what was not sent of a complete sum.
        coordinator: Link to the coordinator, on all ranks or on none.
        replay_from: First step that repeats the messages of the step before, without the
            coordinator; None asks it in every step.
        states: States of this rank's codecs, such as those of a checkpoint; None: new ones.
        keeps_previous: True copies the codecs' states before each step, so that `undo_step` can
            undo the last one.
        keeps_zeros: If a gradient is zero, True keeps its residual for a later step, and False
            sends it.

    Attributes:
        plan: The plan.
        coordinator: Link to the coordinator; None without one.
        states: States of this rank's codecs.

    Raises:
        ConfigError: If a codec of the plan is missing.
    """

    def __init__(
        self,
        plan: SyncPlan,
        codecs: Mapping[str, GradientCodec],
        mailbox: Mailbox,
        tracer: Tracer,
        *,
        has_error_feedback: bool = True,
        has_sum_feedback: bool = True,
        coordinator: CoordinatorLink | None = None,
        replay_from: int | None = None,
        states: CodecStates | None = None,
        keeps_previous: bool = False,
        keeps_zeros: bool = False,
    ) -> None:
        missing = {unit.codec for unit in plan.units} - {RAW, *codecs}
        if missing:
            raise ConfigError(
                got_expected(
                    "codecs", sorted(codecs), "those of the plan", f"also {sorted(missing)}"
                )
            )
        self.plan, self.coordinator = plan, coordinator
        self.states = CodecStates() if states is None else states
        self._before_step = StateCopies(self.states) if keeps_previous else None
        self._newest_step = -1
        self._codecs = dict(codecs)
        self._rank, self._world_size = mailbox.rank, plan.world_size
        self._feedback = has_error_feedback, has_sum_feedback
        self._keeps_zeros = keeps_zeros
        self._units = {
            name: [
                UnitTasks(unit, unit_graph(plan, unit, mailbox.rank, self._codecs))
                for unit in plan.units_of(name)
            ]
            for name in {unit.gradient for unit in plan.units}
        }
        tasks = [
            (unit_tasks.unit, task)
            for units in self._units.values()
            for unit_tasks in units
            for task in unit_tasks.graph
        ]
        expected: dict[int, set[tuple[int, Part]]] = {}
        for unit, task in tasks:
            if task.kind is TaskKind.RECEIVE and task.peer is not None:
                expected.setdefault(task.peer, set()).add((unit.index, task.part))
        self._executor = SyncExecutor(
            mailbox,
            tracer,
            expected=expected,
            destinations={
                task.peer
                for _, task in tasks
                if task.kind is TaskKind.SEND and task.peer is not None
            },
            coordinator=coordinator,
            replay_from=replay_from,
            message_bytes=plan.message_bytes,
        )

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the synchronisation; None while there is none."""
        return self._executor.failure

    def start(
        self,
        step: int,
        gradients: Mapping[str, Tensor],
        on_done: Callable[[BaseException | None], None],
        *,
        loss_scale: float = 1.0,
        has_data: bool = True,
        continues: bool = False,
        unused: Collection[str] = (),
    ) -> None:
        """Start to replace gradients by their means, without waiting.

        Args:
            step: Number of the step, the same on all ranks.
            gradients: Contiguous gradients by name. They must not be used until `on_done`.
            on_done: Called once, from another thread: with None, or with the error.
            loss_scale: Factor of the gradients, a power of two.
            has_data: False if this rank had no samples. The residuals of its own gradients that are
                zero stay unchanged. A ring still keeps the error of each hop.
            continues: True if `undo_step` shall undo the step before, too.
            unused: Gradients whose parameters this rank has not used since the last mean. Those
                that no rank has used stay unchanged, and so do their states.
        """
        options = StepOptions(
            step=step,
            rank=self._rank,
            world_size=self._world_size,
            loss_scale=loss_scale,
            has_error_feedback=self._feedback[0],
            has_sum_feedback=self._feedback[1],
            has_data=has_data,
            keeps_zeros=self._keeps_zeros,
        )
        runs = [
            UnitRun(
                tasks=tasks,
                codec=self._codec(tasks.unit, step),
                gradient=_piece(gradient, tasks.unit),
                options=options,
                states=self.states,
                is_used=name not in unused,
            )
            for name, gradient in gradients.items()
            for tasks in self._units[name]
        ]
        if self._before_step is not None:
            if step != self._newest_step and not continues:
                self._before_step.forget()
            self._before_step.save(run.unit for run in runs)
        self._newest_step = step
        self._executor.start(step, runs, on_done)

    def run(self, step: int, gradients: Mapping[str, Tensor], *, loss_scale: float = 1.0) -> None:
        """Replace gradients by their means, and wait; see `start`.

        Raises:
            PeerError: If a rank is lost or late.
        """
        finished = threading.Event()
        marks = []

        def on_done(error: BaseException | None) -> None:
            marks.append(self.mark())
            finished.set()

        self.start(step, gradients, on_done, loss_scale=loss_scale)
        finished.wait()
        self.wait_for(marks[0])
        if self.failure is not None:
            raise self.failure

    def mark(self) -> Any:
        """Return a mark after the device's work on gradients; see `DeviceStream.mark`.

        Call it only in `on_done` of `start`.
        """
        return self._executor.mark()

    def wait_for(self, mark: Any) -> None:
        """Let the calling thread's later work on the device wait for the work before a mark."""
        self._executor.wait_for(mark)

    def undo_step(self, gradients: Collection[str] | None = None) -> None:
        """Restore the codecs' states from before the last step; needs `keeps_previous`.

        If that step continues earlier ones (see `start`), undo these, too.

        Args:
            gradients: Names of the gradients whose states are restored; None for all.
        """
        assert self._before_step is not None
        self._before_step.restore(gradients)

    def close(self) -> None:
        """End the threads."""
        self._executor.close()

    def _codec(self, unit: SyncUnit, step: int) -> GradientCodec | None:
        return None if unit.codec == RAW else self._codecs[unit.codec].at_step(step)


def _piece(gradient: Tensor, unit: SyncUnit) -> Tensor:
    """Return the elements of a unit, as a flat view."""
    flat = gradient if gradient.dim() == 1 else gradient.view(-1)
    return flat if unit.count == flat.numel() else flat[unit.start : unit.stop]
