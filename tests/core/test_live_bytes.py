"""Counts of live bytes on the CPU."""

from __future__ import annotations

import torch

from lightning_dlres.core.device.live_bytes import LiveBytes


def test_tensors_from_before_are_not_counted_even_as_out() -> None:
    before, target = torch.ones(1000), torch.empty(1000)
    with LiveBytes() as live:
        torch.add(before, 1, out=target)
        assert (live.now, live.peak) == (0, 0)
        result = torch.add(before, 1)
        assert live.now == result.nbytes
        del result
        assert (live.now, live.peak) == (0, before.nbytes)
