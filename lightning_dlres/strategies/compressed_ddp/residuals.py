"""Residuals of all ranks in the checkpoint that rank 0 writes.

Rank 0 receives the residuals of one rank at a time, and puts them into files that are mapped into
memory. So its memory need not hold the residuals of all ranks. The files have no name any more, and
the operating system removes them with the last tensor.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_dlres.core.comm.mailbox import Channel, Mailbox

# Key of the residuals in a Lightning checkpoint.
CHECKPOINT_KEY = "dlres_gradient_sync"
_KEY = ("residuals",)


def gather_states(own: dict[str, Any], mailbox: Mailbox) -> list[dict[str, Any]] | None:
    """Return the states of all ranks on rank 0, and None elsewhere; called by all ranks.

    Args:
        own: State of this rank: a tree of numbers, strings and tensors.
        mailbox: Messages to the other ranks.

    Raises:
        PeerError: If a rank is lost or late.
    """
    if mailbox.rank:
        # Rank 0 asks for one state after the other.
        mailbox.receive(0, Channel.STATE, _KEY, "the request for its residuals")
        mailbox.send(0, Channel.STATE, _KEY, own)
        return None
    states = [own]
    for rank in range(1, len(mailbox.names)):
        mailbox.send(rank, Channel.STATE, _KEY, None)
        states.append(_on_disk(mailbox.receive(rank, Channel.STATE, _KEY, "its residuals")))
    return states


def _on_disk(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state whose tensors lie in a file."""
    with tempfile.TemporaryDirectory(prefix="dlres-residuals-") as directory:
        units = [
            {
                **unit,
                "tensors": {
                    name: _mapped(tensor, os.path.join(directory, f"{number}-{name}"))
                    for name, tensor in unit["tensors"].items()
                },
            }
            for number, unit in enumerate(state.get("units", []))
        ]
    return {**state, "units": units} if "units" in state else dict(state)


def _mapped(tensor: Tensor, path: str) -> Tensor:
    if not tensor.numel():
        return tensor
    mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape).copy_(tensor)
