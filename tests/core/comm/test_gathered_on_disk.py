"""Trees of all ranks arrive on rank 0 as they were, in files without a name."""

from __future__ import annotations

import errno
import os
import tempfile
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_dlres.core.comm.gathered_on_disk import gather_on_disk
from lightning_dlres.core.comm.mailbox import Mailbox
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.trace import Tracer
from tests.support.rank_pool import RankContext, RankPool


def tree(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    return {
        "step": rank,
        "units": [{"name": "weight", "tensors": {"a": torch.randn(5000, generator=generator)}}],
        "half": torch.randn(3, 4, generator=generator).bfloat16(),
        "empty": torch.zeros(0),
        "scalar": torch.tensor(rank),
    }


def mailbox_of(context: RankContext) -> Mailbox:
    context.init_process_group()
    group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    assert isinstance(group, dist.ProcessGroup)
    names = [f"rank {rank}" for rank in range(context.world_size)]
    return Mailbox(group, context.rank, names, timeout=20.0, check=lambda: None, tracer=Tracer())


def gather(context: RankContext) -> tuple[list[dict[str, Any]] | None, bool]:
    """Return the gathered trees, and True if this rank has mapped files for them."""
    mailbox = mailbox_of(context)
    with pytest.MonkeyPatch.context() as patch:
        # Other tests put files into the usual directory at the same time.
        patch.setattr(tempfile, "tempdir", str(context.tmp))
        trees = gather_on_disk(tree(context.rank), mailbox, "its tree")
    with open("/proc/self/maps") as maps:
        is_mapped = "dlres-gathered-" in maps.read()
    if context.rank == 0:
        # Other ranks may come here while rank 0 makes a file, which then still has a name.
        assert not list(context.tmp.iterdir())
    mailbox.close(orderly=True)
    return trees, is_mapped


def test_trees_of_all_ranks_arrive_on_rank_0(pool: RankPool) -> None:
    (trees, is_mapped), *others = pool.run(gather, 3)
    assert is_mapped
    assert others == [(None, False)] * 2
    assert trees is not None
    for rank, got in enumerate(trees):
        expected = tree(rank)
        assert got["step"] == rank
        assert got["units"][0]["name"] == "weight"
        pairs = [
            (got["units"][0]["tensors"]["a"], expected["units"][0]["tensors"]["a"]),
            *((got[key], expected[key]) for key in ("half", "empty", "scalar")),
        ]
        for one, other in pairs:
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(one, other)


def gather_on_a_full_disk(context: RankContext) -> str:
    mailbox = mailbox_of(context)

    def has_no_room(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    words = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(context.tmp))
        patch.setattr(os, "posix_fallocate", has_no_room)
        try:
            gather_on_disk(tree(context.rank), mailbox, "its tree")
        except ConfigError as error:
            words = str(error)
    if context.rank == 0:
        assert not list(context.tmp.iterdir())
    mailbox.close(orderly=True)
    return words


def test_a_full_disk_is_an_error_and_kills_no_process(pool: RankPool) -> None:
    words, other = pool.run(gather_on_a_full_disk, 2)
    assert words.startswith("rank 1 sent its tree, which must fit into rank 0's directory for")
    assert "of free space" in words
    assert other == ""
