"""Verdict on the training of a case: equal to plain training, different, refused or failed."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.support.capture.rank_report import START, RankReport
from benchmarks.support.capture.runs import Run

EQUAL, DIFFERS, REFUSED, TIMEOUT = "equal", "differs", "refused at start", "timeout"
FAILED_AT_START, FAILED_AT_STEP = "failed at start", "failed at a step"
NO_REFERENCE = "no reference"
KINDS = (EQUAL, DIFFERS, REFUSED, FAILED_AT_START, FAILED_AT_STEP, TIMEOUT, NO_REFERENCE)
# Largest relative difference of a step's loss, and of a weight relative to the scale of its tensor.
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-4, 1e-3
# Least scale of a tensor, relative to the largest weight of the model. The gradient of some tensors
# is zero but for rounding, such as that of the bias of keys in attention.
_LEAST_SCALE = 1e-3
# Lines of the innermost frames, and characters of the message, in the report of an error.
_FRAME_LINES, _ERROR_CHARACTERS = 7, 2000


@dataclass(frozen=True)
class Verdict:
    """Verdict on a contender's training of a case.

    Attributes:
        kind: One of `KINDS`.
        detail: Reason; "" for "equal".
        loss_difference: Largest relative difference of a step's loss.
        weight_difference: Largest difference of a weight, relative to the scale of its tensor.
        report: Whole error with its traceback.
        notes: Facts for the table.
    """

    kind: str
    detail: str = ""
    loss_difference: float | None = None
    weight_difference: float | None = None
    report: str = ""
    notes: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Return the verdict for a table."""
        if self.loss_difference is not None and self.weight_difference is not None:
            figures = f"{self.loss_difference:.0e}, {self.weight_difference:.0e}"
            return f"{self.kind} ({figures})" + (f": {self.detail}" if self.detail else "")
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def judge(plain: Run, run: Run) -> Verdict:
    """Return the verdict on a contender's run, given that of plain training."""
    if not plain.is_done:
        return Verdict(NO_REFERENCE, "plain training failed", report=failure(plain).report)
    if not all(map(math.isfinite, plain.losses)):
        return Verdict(NO_REFERENCE, f"losses of plain training are not finite: {plain.losses}")
    notes = {**run.reports[0].notes, "reference": plain.reports[0].notes.get("reference")}
    if not run.is_done:
        return replace(failure(run), notes=notes)
    return compare(plain.losses, run.losses, _load(plain), _load(run), notes)


def compare(
    expected_losses: Sequence[float],
    losses: Sequence[float],
    expected: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    notes: dict[str, Any] | None = None,
) -> Verdict:
    """Return "equal" or "differs", given losses and weights of plain training and of another."""
    if len(losses) != len(expected_losses):
        return Verdict(DIFFERS, f"{len(losses)} losses, not {len(expected_losses)}")
    by_step = [_relative(a, b) for a, b in zip(expected_losses, losses, strict=True)]
    by_name = weight_differences(expected, weights)
    loss, weight = max(by_step), max(by_name.values(), default=math.inf)
    details = []
    if not loss <= LOSS_TOLERANCE:
        step = next(n for n, value in enumerate(by_step) if not value <= LOSS_TOLERANCE)
        details.append(f"losses from step {step + 1}")
    if not weight <= WEIGHT_TOLERANCE:
        largest = max(by_name, key=by_name.__getitem__, default="")
        details.append(f"weights, most {largest}" if largest else "no weights")
    kind = DIFFERS if details else EQUAL
    return Verdict(kind, ", ".join(details), loss, weight, notes=notes or {})


def weight_differences(
    expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return the largest difference of each weight and buffer, relative to the tensor's scale.

    The difference of a tensor without storage, and of unequal integers, is infinite. Tensors that
    only one side has are not compared: the peer has no buffers that do not change.
    """
    largest = max(
        (float(t.abs().max()) for t in expected.values() if t.is_floating_point() and t.numel()),
        default=0.0,
    )
    differences = {}
    for name in expected.keys() & weights.keys():
        ours, theirs = weights[name], expected[name]
        if ours.is_meta or ours.shape != theirs.shape:
            differences[name] = math.inf
        elif not theirs.is_floating_point():
            differences[name] = 0.0 if torch.equal(ours, theirs) else math.inf
        elif theirs.numel():
            scale = max(float(theirs.abs().max()), _LEAST_SCALE * largest)
            difference = float((ours - theirs).abs().max())
            differences[name] = difference / scale if difference else 0.0
    return differences


def failure(run: Run) -> Verdict:
    """Return the verdict on a run that has not come to its end."""
    report = first_error(run.reports)
    whole = "\n".join(
        f"rank {number}: phase {each.phase}, exit status {status}\n{_last_lines(each, output)}"
        for number, (each, status, output) in enumerate(
            zip(run.reports, run.exits, run.outputs, strict=True)
        )
    )
    if report is None:
        phase = min((each.phase for each in run.reports if each.phase != "done"), default=START)
        if run.is_late:
            return Verdict(TIMEOUT, f"at {phase}", report=whole)
        kind = FAILED_AT_START if phase == START else FAILED_AT_STEP
        return Verdict(kind, _crash(run.exits), report=whole)
    text = first_sentence(report.error) or "no message"
    if report.phase == START:
        if report.is_refusal:
            return Verdict(REFUSED, text, report=whole)
        return Verdict(FAILED_AT_START, f"{report.error_class}: {text}", report=whole)
    return Verdict(FAILED_AT_STEP, f"{report.phase}: {report.error_class}: {text}", report=whole)


def first_error(reports: Sequence[RankReport]) -> RankReport | None:
    """Return the report of the error that came first; None without errors.

    Errors of ranks that only lost another one come last.
    """
    failed = [report for report in reports if report.error_class]
    if not failed:
        return None
    return min(failed, key=lambda report: ("Peer" in report.error_class, report.seconds))


def first_sentence(text: str) -> str:
    """Return the first sentence of a message in one line, at most 300 characters of it."""
    line = " ".join(text.strip().split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z(])", line, maxsplit=1)[0]
    return sentence if len(sentence) <= 300 else sentence[:297] + "..."


def _last_lines(report: RankReport, output: str) -> str:
    """Return the end of a rank's traceback; of its output if it has no traceback."""
    if not report.traceback:
        return output
    # The innermost frames come before the message, which may have many lines.
    frames = report.traceback.removesuffix("\n").removesuffix(report.error)
    return "\n".join([*frames.splitlines()[-_FRAME_LINES:], report.error[:_ERROR_CHARACTERS]])


def _crash(exits: Sequence[int | None]) -> str:
    names = [
        signal.Signals(-status).name if status and status < 0 else f"exit status {status}"
        for status in exits
    ]
    return "a process ended without a report: " + ", ".join(names)


def _relative(expected: float, value: float) -> float:
    if not math.isfinite(value):
        return math.inf
    difference = abs(value - expected)
    return difference / max(abs(expected), 1e-12) if difference else 0.0


def _load(run: Run) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in run.weights:
        weights.update(torch.load(path, weights_only=True))
    return weights
