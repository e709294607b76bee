"""Paths of a forward: its code may decide by the values of tensors, or by the form of arguments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning_dlres.core.errors import UnsupportedStepError
from lightning_dlres.pipeline.capture.forms import form_of, tensor_places
from lightning_dlres.pipeline.capture.placeholders.skeleton import Skeleton
from lightning_dlres.pipeline.capture.trace import Boundary, Trace

Decisions = tuple[Any, ...]
# Returns the paths for a call with other arguments, given their skeleton and the samples.
OtherForm = Callable[[Skeleton, int | None], "Paths"]
# Traces that are kept. Code that reads a number, such as a loss, may decide anew in every call.
_KEPT = 64


class Paths:
    """Traces of a forward by its decisions.

    All stages find the same trace for the same decisions, whatever they have seen before.

    Args:
        first: Trace of a real run.
        record: Returns the trace of a run without data that begins with given decisions.
        form: Form of the arguments of these traces, as by `form_of`.
        other_form: Returns the paths for arguments of another form.
    """

    def __init__(
        self,
        first: Trace,
        record: Callable[[Decisions], Trace],
        form: bytes,
        other_form: OtherForm,
    ) -> None:
        self._first, self._record = first, record
        self._traces: OrderedDict[tuple[Decisions, str], Trace] = OrderedDict()
        self._form, self._other_form = form, other_form
        self._by_form: OrderedDict[bytes, Paths] = OrderedDict()

    def for_inputs(self, inputs: Skeleton, samples: int | None) -> Paths:
        """Return the paths for arguments of this form.

        Args:
            inputs: Skeleton of (args, kwargs) of the call.
            samples: Samples of the call; None if they are not known.

        Raises:
            UnsupportedStepError: If the code cannot run with such arguments.
        """
        form = form_of(inputs)
        if form == self._form:
            return self
        if form not in self._by_form:
            try:
                self._by_form[form] = self._other_form(inputs, samples)
            except UnsupportedStepError:
                # Flags need not lead to other operations. A run finds out, but not if tensors are
                # at other places.
                if tensor_places(form) != tensor_places(self._form):
                    raise
                self._by_form[form] = self
            if len(self._by_form) > _KEPT:
                self._by_form.popitem(last=False)
        self._by_form.move_to_end(form)
        return self._by_form[form]

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
