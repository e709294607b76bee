"""Progress of training steps: timed on every rank, shown on rank 0 in a terminal or a log."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

# Number of progress lines in all, if the output is not a terminal.
LINES_IN_A_LOG = 10
# Steps excluded from the median: caches and connections are cold.
WARM_UP_STEPS = 3


class StepProgress(Callback):
    """Callback that times every step, and shows a bar in a terminal or some lines in a log.

    The module must log "train_loss" in nats per byte.

    Args:
        title: Title of the bar.
        steps: Number of steps.
        console: Console for the output.

    Attributes:
        seconds: Time of each step, in seconds.
    """

    def __init__(self, title: str, steps: int, console: Console) -> None:
        self.title, self.steps, self.console = title, steps, console
        self.seconds: list[float] = []
        self._last = 0.0
        self._bar: Progress | None = None

    @property
    def median_seconds(self) -> float:
        """Median time of a step, in seconds. Warm-up steps count only if there are no others.

        Raises:
            statistics.StatisticsError: If no step has ended.
        """
        return statistics.median(self.seconds[WARM_UP_STEPS:] or self.seconds)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = time.perf_counter()
        if trainer.is_global_zero and self.console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self._bar.add_task(self.title, total=self.steps, figures="")
            self._bar.start()
        elif trainer.is_global_zero:
            self.console.print(self.title, highlight=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        if trainer.is_global_zero:
            bits = float(trainer.callback_metrics["train_loss"]) / math.log(2)
            self._show(f"{self.seconds[-1]:.2f} s/step, {bits:.2f} bits/byte")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    def _show(self, figures: str) -> None:
        done = len(self.seconds)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, figures=figures)
        elif done * LINES_IN_A_LOG // self.steps > (done - 1) * LINES_IN_A_LOG // self.steps:
            self.console.print(f"  {done:4}/{self.steps} steps, {figures}", highlight=False)

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
