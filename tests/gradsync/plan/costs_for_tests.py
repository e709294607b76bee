"""Costs of an imagined network, for tests of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_dlres.codecs.gradient import GradientCodec, gradient_codec
from lightning_dlres.gradsync.plan.costs import CodecCosts, LinearCost, LinkCosts, SyncCosts
from lightning_dlres.gradsync.plan.plan import RAW

# Cost of a task that takes no time.
FREE = LinearCost(fixed_seconds=0.0, seconds_per_item=0.0)


def codecs_by_name(*names: str) -> dict[str, GradientCodec]:
    return {name: gradient_codec(name) for name in names}


def codec_costs(fixed: float, encode: float, merge: float, decode: float) -> CodecCosts:
    """Return the costs of a codec: `fixed` seconds for each task, and seconds per element of each
    kind of task."""
    return CodecCosts(
        encode=LinearCost(fixed_seconds=fixed, seconds_per_item=encode),
        merge=LinearCost(fixed_seconds=fixed, seconds_per_item=merge),
        decode=LinearCost(fixed_seconds=fixed, seconds_per_item=decode),
    )


def sync_costs(
    bandwidths: Sequence[float],
    codecs: Mapping[str, CodecCosts] | None = None,
    *,
    message_seconds: float = 1e-4,
    latency_seconds: float = 0.0,
    incast_share: float = 1.0,
    all_reduce: LinearCost | None = None,
) -> SyncCosts:
    """Return the costs of ranks with these links.

    Args:
        bandwidths: Bytes per second of each rank's link, in each direction.
        codecs: Costs of codecs by name, besides those of uncompressed gradients.
        message_seconds: See `LinkCosts`.
        latency_seconds: See `LinkCosts`.
        incast_share: See `LinkCosts`.
        all_reduce: Cost of torch's all-reduce, by bytes. None: that of a ring over the slowest
            link.
    """
    ranks = len(bandwidths)
    ring = LinearCost(
        fixed_seconds=message_seconds,
        seconds_per_item=2 * (ranks - 1) / ranks / min(bandwidths),
    )
    return SyncCosts(
        codecs={
            RAW: codec_costs(1e-6, 0.0, 4e-10, 4e-10),
            **(codecs or {}),
        },
        links=LinkCosts(
            message_seconds=message_seconds,
            bandwidths=tuple(bandwidths),
            latency_seconds=latency_seconds,
            incast_share=incast_share,
        ),
        all_reduce=all_reduce or ring,
    )
