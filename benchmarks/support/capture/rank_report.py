"""Report of a process that trains a case: a file of JSON, and one of weights."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

START, DONE = "start", "done"


@dataclass
class RankReport:
    """Report of a process; it is written whenever the phase changes.

    Attributes:
        path: Path of the report; None for one that was read.
        phase: "start", "step n" or "done".
        error: Text of the error; "" if there was none.
        error_class: Name of the error's class.
        is_refusal: True if the contender raised the error on purpose.
        traceback: Traceback of the error.
        seconds: Time of the error, in seconds since the epoch.
        losses: Loss of each step; empty on ranks that have none.
        notes: Facts for the table.
    """

    path: str | None = None
    phase: str = START
    error: str = ""
    error_class: str = ""
    is_refusal: bool = False
    traceback: str = ""
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> RankReport:
        """Return the report of a process; one without a file has not begun."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def enter(self, phase: str) -> None:
        """Write that a phase begins."""
        self.phase = phase
        self.write()

    def write(self) -> None:
        """Write the report; a reader sees the whole file, also if the process is killed."""
        assert self.path is not None
        part = Path(f"{self.path}.part")
        part.write_text(json.dumps(asdict(self)))
        part.replace(self.path)

    def save_weights(self, weights: Mapping[str, Any]) -> None:
        """Save the weights beside the report."""
        import torch

        tensors = {name: value.detach().clone() for name, value in weights.items()}
        torch.save(tensors, f"{self.path}.pt")


@contextmanager
def reporting(path: Path, refusals: Sequence[type[BaseException]]) -> Iterator[RankReport]:
    """Context manager that yields a report, and writes an error into it.

    Args:
        path: Path of the report.
        refusals: Classes of errors that the contender raises on purpose.
    """
    report = RankReport(str(path))
    report.write()
    try:
        yield report
    except BaseException as error:
        report.error, report.error_class = str(error), type(error).__name__
        report.is_refusal = isinstance(error, tuple(refusals))
        report.traceback, report.seconds = traceback.format_exc(), time.time()
        report.write()
        # Threads of a failed process may wait for each other at its end.
        os._exit(1)
    report.enter(DONE)
