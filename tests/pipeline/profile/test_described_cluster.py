"""The costs of a described cluster are those measured here, scaled to its devices."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_dlres.pipeline.profile import profiler
from lightning_dlres.pipeline.profile.device_measurement import DeviceMeasurement


def test_every_measured_cost_of_a_step_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = DeviceMeasurement(
        layers=[],
        loss=1.0,
        update=2.0,
        run_overhead_seconds=3.0,
        loss_bytes=5,
        wall_per_cpu_second=1.0,
    )
    monkeypatch.setattr(profiler, "measure_device", lambda *_, **__: (measurement, None))
    monkeypatch.setattr(profiler, "layer_profiles", lambda *_: ())
    model: Any = SimpleNamespace(device=torch.device("cpu"), names=[])
    samples: Any = SimpleNamespace(microbatches=4)
    unused: Any = None
    profile = profiler.profile_for_cluster(
        model,
        samples,
        unused,
        layer_context=nullcontext,
        optimizers=[],
        gradient_copies=1,
        cluster=unused,
        factors=[1.0, 0.5],
    )
    assert profile.step.loss == (1.0, 0.5)
    assert profile.step.update == (2.0, 1.0)
    assert profile.step.run_overhead_seconds == (3.0, 1.5)
