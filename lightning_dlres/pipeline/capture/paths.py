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
        self._traces: OrderedDict[Decisions, Trace] = OrderedDict()

    def trace(self, decisions: Decisions) -> Trace:
        """Return a trace that begins with these decisions."""
        if _begins_with(self._first, decisions):
            return self._first
        if decisions not in self._traces:
            trace = self._record(decisions)
            if not _begins_with(trace, decisions):
                raise UnsupportedStepError(
                    "Code that is cut must ask for the same decisions by values in every call, got "
                    "others. Ask in every step: without a condition on the number of the step, or "
                    "on an attribute, around it. Or move the code that decides into a submodule."
                )
            self._traces[decisions] = trace
            if len(self._traces) > _KEPT:
                self._traces.popitem(last=False)
        self._traces.move_to_end(decisions)
        return self._traces[decisions]

    def boundary(self, trace: Trace, layer: int) -> Boundary:
        """Return what crosses to a layer.

        Raises:
            UnsupportedStepError: If the forward cannot be cut before the layer.
        """
        boundary = trace.boundary(layer)
        if isinstance(boundary, str):
            raise UnsupportedStepError(f"The forward cannot be cut at layer {layer}: {boundary}.")
        return boundary


def _begins_with(trace: Trace, decisions: Decisions) -> bool:
    return trace.decisions[: len(decisions)] == decisions
