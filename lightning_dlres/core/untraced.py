"""Functions that torch.compile calls, and does not trace.

A traced function becomes part of compiled code, with the objects that it has seen at that time. A
hook that keeps a state of its own must run anew in each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., object])


def untraced(function: _F) -> _F:
    """Return a function that compiled code calls as it is."""
    disabled: _F = torch.compiler.disable(function)
    return disabled
