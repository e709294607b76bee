"""Patches that replace the forwards of modules by formulas.

Classes, state dict keys and hooks of the modules stay the same, and a patch can be removed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_dlres.memory.execute.bitwise_check import BitwiseCheck
from lightning_dlres.memory.execute.call_tracker import CallTracker
from lightning_dlres.memory.execute.reuse.activations import SignedRelu
from lightning_dlres.memory.execute.reuse.formula_matching import FormulaMatch, match_formula
from lightning_dlres.memory.execute.reuse.function import InPlaceGradient, MemoryOwner, ReportMatch
from lightning_dlres.memory.execute.reuse.norms import BatchNormFormula
from lightning_dlres.memory.execute.shallow_copies import unpatch_copies


class ReusingForward:
    """Forward of a module that writes its input's gradient into its input's memory.

    A copied or unpickled module gets a copy of this object without an owner, which runs the forward
    of the module's class.

    Args:
        module: Module whose forward it replaces.
        owner: Owner of the memory that autograd saves; None: run the forward of the class.
        tracker: Tracker of the modules that each thread is calling; it finds copies of a module.
        report: Gets True if the formula computes the same bits as the module; None: no check.
    """

    def __init__(
        self,
        module: nn.Module,
        owner: MemoryOwner | None,
        tracker: CallTracker,
        report: ReportMatch | None = None,
    ) -> None:
        self.module, self.owner, self.tracker, self.report = module, owner, tracker, report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # `copy.copy` of a module shares this object; the copy must compute with its own weights.
        copy = self.tracker.copy_of(self.module, self)
        match = None
        if copy is None and self.owner is not None:
            match = match_formula(self.module, args, kwargs)
        if match is None:
            module = copy or self.module
            return type(module).forward(module, *args, **kwargs)
        if match.formula is None:
            # Signs are exact for every input, so there is nothing to compare.
            if self.report is not None:
                self.report(True)
            return SignedRelu.apply(match.x, self.module.inplace)  # type: ignore[no-untyped-call]
        self._count_batch(match)
        x, params = match.tensors()
        return InPlaceGradient.apply(  # type: ignore[no-untyped-call]
            match.formula, self.owner, self.report, x, *params
        )

    def _count_batch(self, match: FormulaMatch) -> None:
        """Count the batch in `num_batches_tracked`, as a batch normalisation's forward does."""
        batches = getattr(self.module, "num_batches_tracked", None)
        tracks = self.module.training and getattr(self.module, "track_running_stats", False)
        if isinstance(match.formula, BatchNormFormula) and tracks and batches is not None:
            batches.add_(1)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "owner": None, "report": None}


def has_own_forward(module: nn.Module) -> bool:
    """Return whether other code has replaced a module's forward.

    The inactive forward of a copied module does not count.
    """
    forward = vars(module).get("forward")
    return forward is not None and not (
        isinstance(forward, ReusingForward) and forward.owner is None
    )


@contextmanager
def patch_reuse(
    root: nn.Module,
    names: Iterable[str],
    owner: MemoryOwner,
    tracker: CallTracker | None = None,
    bitwise_check: BitwiseCheck | None = None,
) -> Iterator[None]:
    """Context manager that makes modules reuse their inputs' memory.

    Args:
        root: Model.
        names: Paths of the modules below the root.
        owner: Owner of the memory that autograd saves.
        tracker: Tracker of the modules that each thread is calling; it finds copies of a module.
        bitwise_check: Receives comparisons with the forward of the class; None: no comparison.
    """
    patched, references = [], []
    for name in names:
        module = root.get_submodule(name)
        # Do not replace a forward that other code has patched in.
        if not has_own_forward(module):
            report = None if bitwise_check is None else partial(bitwise_check.record, name)
            forward = ReusingForward(module, owner, tracker or CallTracker(), report)
            module.forward = forward
            patched.append(module)
            references.append(weakref.ref(forward))
            del forward
    try:
        yield
    finally:
        for module in reversed(patched):
            if isinstance(vars(module).get("forward"), ReusingForward):
                del module.forward
        unpatch_copies(references, lambda forward: None)
