"""Large trees of all ranks, gathered on rank 0 without holding them in its memory.

Rank 0 receives the tree of one rank at a time, and copies its tensors into files that are mapped
into memory. The files are unlinked at once, so the operating system frees each one with its tensor.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from lightning_dlres.core.comm.mailbox import Channel, Mailbox
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.host.disk import temporary_file
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
        ConfigError: If the directory for temporary files has too little free space.
    """
    if mailbox.rank:
        # Rank 0 asks for one tree after the other.
        mailbox.receive(0, Channel.STATE, _KEY, f"the request for {what}")
        mailbox.send(0, Channel.STATE, _KEY, own)
        return None
    trees = [own]
    for rank in range(1, len(mailbox.names)):
        mailbox.send(rank, Channel.STATE, _KEY, None)
        tree = mailbox.receive(rank, Channel.STATE, _KEY, what)
        try:
            trees.append(map_tensors(_mapped, tree))
        except ConfigError as error:
            raise ConfigError(
                f"{mailbox.names[rank]} sent {what}, which must fit into rank 0's directory for "
                f"temporary files: {error} The variable TMPDIR names another one."
            ) from error
    return trees


def _mapped(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor that lies in a file."""
    if not tensor.numel():
        return tensor
    descriptor, path = temporary_file(Path(tempfile.gettempdir()), "dlres-gathered", tensor.nbytes)
    try:
        mapped = torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype)
    finally:
        os.close(descriptor)
        os.unlink(path)
    return mapped.view(tensor.shape).copy_(tensor)
