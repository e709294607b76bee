"""Which modules are not as they were while a plan is followed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from torch import nn

from lightning_dlres.memory.execute.bitwise_check import Audit
from lightning_dlres.memory.execute.calling import Calls
from lightning_dlres.memory.execute.recompute import patch_recompute
from lightning_dlres.memory.execute.reuse.function import Owner
from lightning_dlres.memory.execute.reuse.install import patch_reuse
from lightning_dlres.memory.profile.step_profile import StepProfile


@dataclass(frozen=True)
class ModulePatches:
    """Names of modules.

    Attributes:
        recompute: they run again in backward.
        reuse: they reuse their inputs' memory, or save signs.
    """

    recompute: tuple[str, ...] = ()
    reuse: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """Return all names."""
        return {*self.recompute, *self.reuse}

    @contextmanager
    def applied(self, root: nn.Module, owner: Owner, audit: Audit | None) -> Iterator[None]:
        """Inside of it, the modules below a root are changed.

        Args:
            root: the model.
            owner: knows who reads what is saved.
            audit: looks at what they compute; None: nobody does.
        """
        if not self.names:
            yield
            return
        calls = Calls()
        with (
            calls.followed(),
            patch_recompute(root, self.recompute, calls, audit),
            patch_reuse(root, self.reuse, owner, calls, audit),
        ):
            yield


UNCHANGED = ModulePatches()


def without(profile: StepProfile, names: set[str]) -> StepProfile:
    """Return a profile that knows of no changes of these modules."""
    return msgspec.structs.replace(
        profile,
        regions=tuple(region for region in profile.regions if region.layer not in names),
        reuses=tuple(reuse for reuse in profile.reuses if not names.intersection(reuse.layers)),
    )
