"""Large trees of all ranks, gathered on rank 0 without holding them in its memory.

Rank 0 receives the tree of one rank at a time, and copies its tensors into files that are mapped
into memory. The files are unlinked at once, so the operating system frees each one with its tensor.
"""

from __future__ import annotations

import itertools
import os
import tempfile

import torch
from torch import Tensor

from lightning_dlres.core.comm.mailbox import Channel, Mailbox
from lightning_dlres.core.wire.tree import Tree, map_tensors

_KEY = ("gathered on disk",)


def gather_on_disk(own: Tree, mailbox: Mailbox, what: str) -> list[Tree] | None:
    """Return the trees of all ranks on rank 0, by rank, and None elsewhere; called by all ranks.

    The tensors of other ranks lie in files. Those of rank 0 are returned as they are.

    Args:
        own: Tree of this rank.
        mailbox: Messages to the other ranks.
        what: Description of the trees for errors, such as "its residuals".

    Raises:
        PeerError: If a rank is lost or late.
    """
    if mailbox.rank:
        # Rank 0 asks for one tree after the other.
        mailbox.receive(0, Channel.STATE, _KEY, f"the request for {what}")
        mailbox.send(0, Channel.STATE, _KEY, own)
        return None
    trees = [own]
    for rank in range(1, len(mailbox.names)):
        mailbox.send(rank, Channel.STATE, _KEY, None)
        trees.append(_on_disk(mailbox.receive(rank, Channel.STATE, _KEY, what)))
    return trees


def _on_disk(tree: Tree) -> Tree:
    """Return a tree whose tensors lie in files."""
    numbers = itertools.count()
    with tempfile.TemporaryDirectory(prefix="dlres-gathered-") as directory:
        return map_tensors(
            lambda tensor: _mapped(tensor, os.path.join(directory, str(next(numbers)))), tree
        )


def _mapped(tensor: Tensor, path: str) -> Tensor:
    if not tensor.numel():
        return tensor
    mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape).copy_(tensor)
