"""Shares of the merging work that follow the speed of the ranks' links.

With a parameter server, rank r sends its gradient to the owners, and the sums that it owns to all
other ranks. With N ranks, S bytes of gradient and s of them owned by r, S - s + (N - 1) s bytes
pass each direction of its link. A rank with a slow link should therefore own little.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dlres.core.errors import ConfigError, got_expected


def link_shares(bandwidths: Sequence[float]) -> tuple[list[float], float]:
    """Return each rank's share of the gradient, and the slowest link's time for one byte of it.

    The shares minimise that time. All links take equally long, unless the slowest one takes longer
    even with the share 0. The other shares are then proportional to the bytes that each link can
    carry in that time beyond its own gradient.

    Args:
        bandwidths: Bytes per second of each rank's link, in each direction.

    Raises:
        ConfigError: If a bandwidth is not positive.
    """
    if not bandwidths or min(bandwidths) <= 0:
        raise ConfigError(
            got_expected("bandwidths", list(bandwidths), "positive numbers", "[25e6, 25e6]")
        )
    ranks = len(bandwidths)
    if ranks < 2:
        return [1.0], 0.0
    if ranks == 2:
        # Both directions of both links carry S bytes, whoever owns what.
        return [0.5, 0.5], 1 / min(bandwidths)
    # With a share f = s / S, the link of a rank takes (1 + (N - 2) f) / bandwidth for each byte of
    # the gradient. In a time t it can own f = (t * bandwidth - 1) / (N - 2). All shares sum to 1.
    least = 1 / min(bandwidths)
    time = max(least, (2 * ranks - 2) / sum(bandwidths))
    # Rounding may take the share of the slowest rank below 0.
    shares = [max((time * bandwidth - 1) / (ranks - 2), 0.0) for bandwidth in bandwidths]
    total = sum(shares)
    return [share / total for share in shares], time
