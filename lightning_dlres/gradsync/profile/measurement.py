"""Measurement of all costs of gradient synchronisation, in a few seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.core.wire.decoding import from_json
from lightning_dlres.gradsync.plan.costs import LinkCosts, SyncCosts
from lightning_dlres.gradsync.plan.hosts import Hosts, host_leaders
from lightning_dlres.gradsync.profile.codec_times import measure_codecs
from lightning_dlres.gradsync.profile.link_times import measure_links
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages
from lightning_dlres.gradsync.profile.reduce_times import measure_all_reduce

# Seconds for the codecs, for the bandwidth, and for each size of an all-reduce.
_CODEC_SECONDS, _LINK_SECONDS, _REDUCE_SECONDS = 0.4, 0.4, 0.2
# Factor by which a bandwidth, or the time of an all-reduce, may differ from an earlier measurement
# and still count as unchanged.
_SAME_BAND = 1.3
# Largest unit that is measured, in elements, and units into which a rank's part is cut.
_MOST_ELEMENTS, _UNITS_PER_RANK = 1 << 19, 4


def measure_costs(
    messages: ProbeMessages,
    codecs: Mapping[str, GradientCodec],
    device: torch.device,
    *,
    elements: int,
    element_bytes: int = 4,
    earlier: SyncCosts | None = None,
    hosts: Hosts = (),
) -> SyncCosts:
    """Return the costs, the same on all ranks; called by all of them.

    After an earlier measurement, the codecs are measured again only if the links and the all-reduce
    have not changed: the ranks themselves must then have become slower or faster. Kernels that are
    not compiled yet are compiled first, which takes longer.

    Args:
        messages: Messages to the other ranks.
        codecs: Codecs to measure by name, the same on all ranks.
        device: Device of the gradients.
        elements: Elements of all gradients.
        element_bytes: Bytes of an element of a gradient.
        earlier: Costs of an earlier measurement, the same on all ranks; None if there are none.
        hosts: Ranks of each host, if one rank of a host synchronises for the others. The links are
            then those between the hosts.

    Raises:
        PeerError: If a rank is late or lost.
    """
    unit = min(elements // (_UNITS_PER_RANK * (len(hosts) or messages.ranks)), _MOST_ELEMENTS)
    nbytes = elements * element_bytes
    links = _measure_links(messages, hosts)
    all_reduce = measure_all_reduce(messages, device, most_bytes=nbytes, seconds=_REDUCE_SECONDS)
    if (
        earlier is not None
        and codecs.keys() <= earlier.codecs.keys()
        and (
            not _are_alike(earlier.links.bandwidths, links.bandwidths)
            or not _are_alike([earlier.all_reduce.seconds(nbytes)], [all_reduce.seconds(nbytes)])
        )
    ):
        return SyncCosts(codecs=earlier.codecs, links=links, all_reduce=all_reduce)
    return SyncCosts(
        codecs=measure_codecs(codecs, messages, device, unit_elements=unit, seconds=_CODEC_SECONDS),
        links=links,
        all_reduce=all_reduce,
    )


def _are_alike(before: Sequence[float], after: Sequence[float]) -> bool:
    """Return True if positive numbers differ by no more than a factor of `_SAME_BAND`."""
    return all(
        a <= _SAME_BAND * b and b <= _SAME_BAND * a for a, b in zip(before, after, strict=True)
    )


def _measure_links(messages: ProbeMessages, hosts: Hosts) -> LinkCosts:
    """Return the costs of the links between all ranks, or between the first ranks of the hosts."""
    if not hosts:
        return measure_links(messages, seconds=_LINK_SECONDS)
    leaders, text = host_leaders(hosts), ""
    if messages.rank in leaders:
        links = measure_links(messages.among(leaders), seconds=_LINK_SECONDS)
        text = msgspec.json.encode(links).decode()
    return from_json(str(messages.share(text)), LinkCosts)
