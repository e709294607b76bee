"""Layers of a case's model, and the cuts between stages of equal numbers of layers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from benchmarks.support.capture.task import make_net
from benchmarks.support.capture_models.case import Batch, CaptureCase
from lightning_dlres.pipeline.capture.tracing.blocks import candidate_blocks
from lightning_dlres.pipeline.capture.tracing.capturing import capture


def layer_names(case: CaptureCase, batch: Batch) -> list[str]:
    """Return the names of our layers, or, if the model cannot be captured, of its blocks."""
    try:
        return list(capture(make_net(case), as_call(batch)).names)
    except Exception:
        # Also an error of the model's own code, which capture ran in parts.
        return list(candidate_blocks(make_net(case)))


def captured_layers(case: CaptureCase, batch: Batch) -> int:
    """Return the number of layers of a case's model; 0 if it cannot be captured."""
    try:
        return len(capture(make_net(case), as_call(batch)).names)
    except Exception:
        return 0


def starts(layers: int, stages: int) -> list[int]:
    """Return the first layer of each stage."""
    return [stage * layers // stages for stage in range(stages)]


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    bounds = [*starts(layers, stages), layers]
    return tuple(end - begin for begin, end in pairwise(bounds))


def split_points(names: Sequence[str], stages: int) -> list[str]:
    """Return the first layer of each stage but the first, for stages of equal numbers of layers."""
    return [names[start] for start in starts(len(names), stages)[1:]]


def as_call(batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return a batch as arguments by position and by keyword."""
    return ((), batch) if isinstance(batch, dict) else (batch, {})
