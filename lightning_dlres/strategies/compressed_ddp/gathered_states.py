"""States of all ranks in a checkpoint, which rank 0 writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

from lightning_dlres.core.comm.gathered_on_disk import gather_on_disk
from lightning_dlres.gradsync.hook.powersgd import POWERSGD
from lightning_dlres.strategies.connection import Connection


def gathered_states(
    own: dict[str, Any],
    connection: Connection | None,
    connect: Callable[[], Connection],
    *,
    is_alone: bool,
) -> list[dict[str, Any]] | None:
    """Return the states of all ranks on rank 0, or only the own one if there are no residuals.

    Args:
        own: State of this rank.
        connection: Connection to the other ranks; None after a run.
        connect: Makes a new connection.
        is_alone: True if the other ranks may have failed, or may not save a checkpoint.

    Returns:
        The states; None on ranks that have sent theirs to rank 0, and if this rank is alone.
    """
    if not own.keys() & {"units", POWERSGD}:
        return [own]
    if is_alone:
        warnings.warn("The checkpoint has no residuals, because the run failed.", stacklevel=2)
        return None
    if connection is not None:
        return gather_on_disk(own, connection.mailbox, "its residuals")
    # A script saves a checkpoint after the run.
    with closing(connect()) as connection:
        return gather_on_disk(own, connection.mailbox, "its residuals")
