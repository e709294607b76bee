"""Record of the modules: its own work counts neither as their time nor as their memory."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.memory.execute.engine import OffloadEngine
from lightning_dlres.memory.execute.side_effects import SideEffectProbe
from lightning_dlres.memory.execute.transfer.tiers import GrowingTier
from lightning_dlres.memory.profile import layer_record
from lightning_dlres.memory.profile.layer_record import LayerRecord
from lightning_dlres.memory.profile.meter import NullMeter, ProfilerMeter
from lightning_dlres.memory.profile.profiling_policy import ProfilingPolicy
from lightning_dlres.memory.profile.step_profile import StepProfile

# Seconds and bytes of each use of a probe; far more than those of the modules.
SECONDS, BYTES = 0.1, 64 << 20


class CostlyProbe(SideEffectProbe):
    """Probe that takes much time and memory, as that of a large module does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.work()

    def has_side_effects(self) -> bool:
        self.work()
        return super().has_side_effects()

    def work(self) -> None:
        torch.ones(BYTES, dtype=torch.uint8)
        time.sleep(SECONDS)


class Sines(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin().cos().exp()


def profile_of_a_step(meter: Any) -> StepProfile:
    # The probes of the inner modules run while the outer one is open.
    net = nn.Sequential(nn.Sequential(Sines(), Sines()), nn.Linear(16, 16))
    engine = OffloadEngine(1)
    policy = ProfilingPolicy(
        GrowingTier(None),
        meter=meter,
        byte_counter=engine.byte_counter,
        layers=LayerRecord(net),
        gpu=None,
        measures_codec=False,
    )
    x = torch.randn(64, 16, requires_grad=True)
    with engine.hooks(policy), policy.recording(lambda: [x, *net.parameters()]):
        net(x).sum().backward()
    return policy.profile([])


def test_probes_do_not_count_as_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    profile_of_a_step(NullMeter())
    monkeypatch.setattr(layer_record, "SideEffectProbe", CostlyProbe)
    profile = profile_of_a_step(NullMeter())
    assert {region.layer for region in profile.regions} >= {"0.0", "0.1"}
    assert max(region.seconds for region in profile.regions) < SECONDS
    assert sum(profile.seconds) < SECONDS


def test_probes_do_not_count_as_memory_of_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_record, "SideEffectProbe", CostlyProbe)
    profile = profile_of_a_step(ProfilerMeter())
    assert {layer.name for layer in profile.layers} == {"0.0", "0.1", "1"}
    assert 0 < max(layer.workspace for layer in profile.layers) < BYTES
    assert 0 < max(region.workspace for region in profile.regions) < BYTES
    assert 0 < max(profile.base) < BYTES
