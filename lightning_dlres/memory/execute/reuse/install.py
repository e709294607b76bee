"""Puts formulas around modules' forward, and takes them off again: classes, state dicts' keys and
hooks stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_dlres.memory.execute.bitwise_check import Audit
from lightning_dlres.memory.execute.calling import Calls
from lightning_dlres.memory.execute.reuse.activations import SignedRelu
from lightning_dlres.memory.execute.reuse.function import InPlaceGradient, Owner, Report
from lightning_dlres.memory.execute.reuse.kinds import Fit, fit_of
from lightning_dlres.memory.execute.reuse.norms import BatchNorm


class InPlace:
    """The forward of a module that writes its input's gradient into its input's memory. A copy of
    the module, or an unpickled one, has one of its own, which knows nobody's memory.

    Args:
        module: whose forward it is.
        owner: knows who reads what.
        calls: knows which module is called.
        report: is told whether it computes what the module does; None: nobody looks.
    """

    def __init__(
        self,
        module: nn.Module,
        owner: Owner | None,
        calls: Calls,
        report: Report | None = None,
    ) -> None:
        self.module, self.owner, self.calls, self.report = module, owner, calls, report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        copy = self.calls.copy_of(self.module, self)
        fit = None
        if copy is None and self.owner is not None:
            fit = fit_of(self.module, args, kwargs)
        if fit is None:
            module = copy or self.module
            return type(module).forward(module, *args, **kwargs)
        if fit.formula is None:
            # Exact whatever it is given.
            if self.report is not None:
                self.report(True)
            return SignedRelu.apply(fit.x, self.module.inplace)  # type: ignore[no-untyped-call]
        self._count(fit)
        x, params = fit.tensors()
        return InPlaceGradient.apply(  # type: ignore[no-untyped-call]
            fit.formula, self.owner, self.report, x, *params
        )

    def _count(self, fit: Fit) -> None:
        """Note the batch, as a batch normalisation does."""
        batches = getattr(self.module, "num_batches_tracked", None)
        tracks = self.module.training and getattr(self.module, "track_running_stats", False)
        if isinstance(fit.formula, BatchNorm) and tracks and batches is not None:
            batches.add_(1)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "owner": None, "report": None}


def has_own_forward(module: nn.Module) -> bool:
    """Return whether somebody else has put a forward there: a copy's that is left over does
    nothing."""
    forward = vars(module).get("forward")
    return forward is not None and not (isinstance(forward, InPlace) and forward.owner is None)


@contextmanager
def patch_reuse(
    root: nn.Module,
    names: Iterable[str],
    owner: Owner,
    calls: Calls | None = None,
    audit: Audit | None = None,
) -> Iterator[None]:
    """Inside of it, the named modules below a root reuse their inputs' memory.

    Args:
        root: the model.
        names: which modules.
        owner: knows who reads what.
        calls: knows which module is called.
        audit: is told whether they compute the same; None: nobody looks.
    """
    installed = []
    for name in names:
        module = root.get_submodule(name)
        # A forward that somebody else has put there does what it is there for.
        if not has_own_forward(module):
            report = None if audit is None else partial(audit.note, name)
            module.forward = InPlace(module, owner, calls or Calls(), report)
            installed.append(module)
    try:
        yield
    finally:
        for module in reversed(installed):
            if isinstance(vars(module).get("forward"), InPlace):
                del module.forward
