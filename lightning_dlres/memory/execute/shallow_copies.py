"""Removal of a patched forward from the shallow copies of its module.

`copy.copy` of a patched module, or a copy of its `__dict__`, shares the patched forward. It would
stay there after the step, and compute with the weights of the original.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def unpatch_copies(
    forwards: Iterable[weakref.ref[Any]], previous_forward: Callable[[Any], Any]
) -> None:
    """Give all modules that still have one of these forwards their previous one.

    Args:
        forwards: Patched forwards that were removed from their own modules. Nothing but a copy
            keeps one alive, except by rare accident, so the costly search is rare, too.
        previous_forward: Returns the forward that was in the place of a patched one; None: that of
            the class.
    """
    shared = [forward for reference in forwards if (forward := reference()) is not None]
    if not shared:
        return
    for referrer in gc.get_referrers(*shared):
        attributes = vars(referrer) if isinstance(referrer, nn.Module) else referrer
        # Only the `__dict__` of a module has "_parameters". Other dicts that hold the forward, such
        # as the user's own, stay as they are.
        if not isinstance(attributes, dict) or "_parameters" not in attributes:
            continue
        forward = attributes.get("forward")
        if not any(forward is one for one in shared):
            continue
        previous = previous_forward(forward)
        if previous is None:
            del attributes["forward"]
        else:
            attributes["forward"] = previous
