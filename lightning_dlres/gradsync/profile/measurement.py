"""Measurement of all costs of gradient synchronisation, in a few seconds."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_dlres.codecs.gradient import GradientCodec
from lightning_dlres.gradsync.plan.costs import SyncCosts
from lightning_dlres.gradsync.profile.codec_times import measure_codecs
from lightning_dlres.gradsync.profile.link_times import measure_links
from lightning_dlres.gradsync.profile.probe_messages import ProbeMessages
from lightning_dlres.gradsync.profile.reduce_times import measure_all_reduce

# Seconds for the codecs, for the bandwidth, and for each size of an all-reduce.
_CODEC_SECONDS, _LINK_SECONDS, _REDUCE_SECONDS = 0.4, 0.4, 0.2
# Largest unit that is measured, in elements, and units into which a rank's part is cut.
_MOST_ELEMENTS, _UNITS_PER_RANK = 1 << 19, 4


def measure_costs(
    messages: ProbeMessages,
    codecs: Mapping[str, GradientCodec],
    device: torch.device,
    *,
    elements: int,
    element_bytes: int = 4,
) -> SyncCosts:
    """Return the costs, the same on all ranks; called by all of them.

    Kernels that are not compiled yet are compiled first, which takes longer.

    Args:
        messages: Messages to the other ranks.
        codecs: Codecs to measure by name, the same on all ranks.
        device: Device of the gradients.
        elements: Elements of all gradients.
        element_bytes: Bytes of an element of a gradient.

    Raises:
        PeerError: If a rank is late or lost.
    """
    unit = min(elements // (_UNITS_PER_RANK * messages.ranks), _MOST_ELEMENTS)
    return SyncCosts(
        codecs=measure_codecs(codecs, messages, device, unit_elements=unit, seconds=_CODEC_SECONDS),
        links=measure_links(messages, seconds=_LINK_SECONDS),
        all_reduce=measure_all_reduce(
            messages, device, most_bytes=elements * element_bytes, seconds=_REDUCE_SECONDS
        ),
    )
