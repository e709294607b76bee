"""Patches of modules that a plan needs: recomputation, and reuse of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from torch import nn

from lightning_dlres.memory.execute.bitwise_check import BitwiseCheck
from lightning_dlres.memory.execute.call_tracker import CallTracker
from lightning_dlres.memory.execute.recompute import patch_recompute
from lightning_dlres.memory.execute.reuse.function import MemoryOwner
from lightning_dlres.memory.execute.reuse.install import patch_reuse
from lightning_dlres.memory.profile.step_profile import StepProfile


@dataclass(frozen=True)
class ModulePatches:
    """Names of the patched modules.

    Attributes:
        recompute: Modules that run again in backward.
        reuse: Modules that reuse their inputs' memory, or that save signs.
    """

    recompute: tuple[str, ...] = ()
    reuse: tuple[str, ...] = ()

    @property
    def names(self) -> set[str]:
        """Return all names."""
        return {*self.recompute, *self.reuse}

    @contextmanager
    def applied(
        self, root: nn.Module, owner: MemoryOwner, bitwise_check: BitwiseCheck | None
    ) -> Iterator[None]:
        """Context manager that patches the modules below a root.

        Args:
            root: Model.
            owner: Owner of the memory that autograd saves. A module that reuses memory asks it for
                ownership.
            bitwise_check: Compares patched with unpatched modules; None: no comparison.
        """
        if not self.names:
            yield
            return
        tracker = CallTracker()
        with (
            tracker.tracking(),
            patch_recompute(root, self.recompute, tracker, bitwise_check),
            patch_reuse(root, self.reuse, owner, tracker, bitwise_check),
        ):
            yield


NO_PATCHES = ModulePatches()


def without_patches_of(profile: StepProfile, names: set[str]) -> StepProfile:
    """Return a profile that offers no patches of these modules."""
    return msgspec.structs.replace(
        profile,
        regions=tuple(region for region in profile.regions if region.layer not in names),
        reuses=tuple(reuse for reuse in profile.reuses if not names.intersection(reuse.layers)),
    )
