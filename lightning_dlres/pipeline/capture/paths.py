"""Paths of a forward: its code may decide by the values of tensors, such as those of a mask."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.capture.trace import Boundary, Trace

Decisions = tuple[Any, ...]
# Traces that are kept. Code that reads a number, such as a loss, may decide anew in every call.
_KEPT = 64


class Paths:
    """Traces of a forward by its decisions.

    All stages find the same trace for the same decisions, whatever they have seen before.

    Args:
        first: Trace of a real run.
        record: Returns the trace of a run without data that begins with given decisions.
    """

    def __init__(self, first: Trace, record: Callable[[Decisions], Trace]) -> None:
        self._first, self._record = first, record
        self._traces: OrderedDict[tuple[Decisions, str], Trace] = OrderedDict()

    def trace(self, decisions: Decisions, opening: str = "") -> Trace:
        """Return a trace that begins with these decisions.

        Args:
            decisions: The decisions.
            opening: Fingerprint of the operations before the first block, if they may differ.

        Raises:
            UnsupportedStepError: If the code does something else now.
        """
        if _begins_with(self._first, decisions, opening):
            return self._first
        key = decisions, opening
        if key not in self._traces:
            trace = self._record(decisions)
            if not _begins_with(trace, decisions, opening):
                raise UnsupportedStepError(
                    "Code that is cut must ask for the same decisions by values in every call, got "
                    "others. Ask in every step: without a condition on the number of the step, or "
                    "on an attribute, around it. Or move the code that decides into a submodule."
                )
            self._traces[key] = trace
            if len(self._traces) > _KEPT:
                self._traces.popitem(last=False)
        self._traces.move_to_end(key)
        return self._traces[key]

    def boundary(self, trace: Trace, layer: int) -> Boundary:
        """Return what crosses to a layer.

        Raises:
            UnsupportedStepError: If the forward cannot be cut before the layer.
        """
        boundary = trace.boundary(layer)
        if isinstance(boundary, str):
            raise UnsupportedStepError(f"The forward cannot be cut at layer {layer}: {boundary}.")
        return boundary


def _begins_with(trace: Trace, decisions: Decisions, opening: str) -> bool:
    is_same = trace.decisions[: len(decisions)] == decisions
    return is_same and opening in ("", trace.opening)
