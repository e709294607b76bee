"""Comparison of all ranks' options before the first message.

Ranks whose options differ would wait for messages that never come, or refuse each other's payloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch.distributed as dist

from lightning_dlres.core.comm.collectives import gather_bytes
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.wire.decoding import from_json


def as_text(**options: object) -> dict[str, str]:
    """Return values of options as text, by the names of the options."""
    return {
        name: repr(dict(sorted(value.items(), key=repr)) if isinstance(value, Mapping) else value)
        for name, value in options.items()
    }


def require_equal_options(
    options: Mapping[str, str],
    group: dist.ProcessGroup,
    timeout: float,
    check: Callable[[], None],
) -> None:
    """Raise an error on all ranks if an option differs between them; called by all ranks together.

    Args:
        options: Values as text, by the names of the options.
        group: Gloo group of all ranks.
        timeout: Deadline in seconds.
        check: Called while waiting; raises if a rank is known to have failed.

    Raises:
        ConfigError: If an option differs. The error names it, and two ranks with their values.
        PeerError: If a rank is lost or late.
    """
    texts = gather_bytes(msgspec.json.encode(options), timeout, check, group)
    first, *others = (from_json(text, dict[str, str]) for text in texts)
    for name in first:
        for rank, other in enumerate(others, 1):
            if first[name] != other.get(name):
                raise ConfigError(
                    f"{name} must be the same on all ranks, got {first[name]} on rank 0 and "
                    f"{other.get(name)} on rank {rank}. Give all ranks the same options."
                )
