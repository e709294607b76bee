"""Puts formulas around modules' forward, and takes them off again: classes, state dicts' keys and
hooks stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_dlres.memory.audit import Audit
from lightning_dlres.memory.reuse.activations import SignedRelu
from lightning_dlres.memory.reuse.function import InPlaceGradient, Owner, Report
from lightning_dlres.memory.reuse.kinds import Fit, fit_of
from lightning_dlres.memory.reuse.norms import BatchNorm


class InPlace:
    """The forward of a module that writes its input's gradient into its input's memory. A copy of
    the module, or an unpickled one, has one of its own, which knows nobody's memory.

    Args:
        module: whose forward it is.
        owner: knows who reads what.
        report: is told whether it computes what the module does; None: nobody looks.
    """

    def __init__(
        self, module: nn.Module, owner: Owner | None, report: Report | None = None
    ) -> None:
        self.module, self.owner, self.report = module, owner, report

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fit = fit_of(self.module, args, kwargs) if self.owner is not None else None
        if (fit is None or fit.formula is None) and self.report is not None:
            self.report(True)
        if fit is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        if fit.formula is None:
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
        return {"module": self.module, "owner": None, "report": None}


@contextmanager
def reusing(
    root: nn.Module, names: Iterable[str], owner: Owner, audit: Audit | None = None
) -> Iterator[None]:
    """Inside of it, the named modules below a root reuse their inputs' memory.

    Args:
        root: the model.
        names: which modules.
        owner: knows who reads what.
        audit: is told whether they compute the same; None: nobody looks.
    """
    installed = []
    for name in names:
        module = root.get_submodule(name)
        # A forward that somebody else has put there does what it is there for.
        if "forward" not in vars(module):
            report = None if audit is None else partial(audit.note, name)
            module.forward = InPlace(module, owner, report)
            installed.append(module)
    try:
        yield
    finally:
        for module in reversed(installed):
            if isinstance(vars(module).get("forward"), InPlace):
                del module.forward
