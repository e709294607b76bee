"""Links that other engines use, too."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lightning_dlres.core.device.link_use import LinkUse
from lightning_dlres.memory.profile.step_profile import TierLink

# Largest share of a link that counts as taken. Where others need all of it, a step takes longer
# than its computation, and they leave a part of that time.
_MOST_TAKEN = 0.9


def shared_links(
    links: Sequence[TierLink], use: LinkUse, step_seconds: float
) -> tuple[TierLink, ...]:
    """Return the links with the share that other engines take of each.

    Only links that overlap with the computation are shared. Over any other link the device waits
    for each copy, and so do the copies of others.

    Args:
        links: Measured links.
        use: Copies of the other engines in a step.
        step_seconds: Computation of a step, in seconds.
    """
    if use == LinkUse() or step_seconds <= 0:
        return tuple(links)
    return tuple(
        msgspec.structs.replace(link, taken=_share_taken(link, use, step_seconds))
        if link.overlaps
        else link
        for link in links
    )


def _share_taken(link: TierLink, use: LinkUse, step_seconds: float) -> float:
    seconds = use.to_device / link.in_rate + use.from_device / link.out_rate
    return min(seconds / step_seconds, _MOST_TAKEN)
