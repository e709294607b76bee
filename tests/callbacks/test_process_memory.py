"""Offloading shrinks the process as the kernel counts it, and nothing grows over many steps."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_dlres as dlres
from tests.support.examples import checkered
from tests.support.models import Block
from tests.support.offload_tasks import Regression, fit
from tests.support.process_memory import anonymous_bytes
from tests.support.wide_networks import NETWORKS, WideRegression, large_mlp, loader

MIB = 1 << 20


class GrowthBeforeBackward(Callback):
    """Callback that records the growth of the process between forward and backward."""

    def __init__(self) -> None:
        self.growths: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        gc.collect()
        self.before = anonymous_bytes()

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        self.growths.append(anonymous_bytes() - self.before)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_offloading_to_disk_shrinks_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 33 MiB each: up to 32 MiB, glibc may reuse memory that earlier tests have freed.
    monkeypatch.setitem(NETWORKS, "large", (large_mlp, lambda: torch.randn(135168, 64)))
    plain, ours = GrowthBeforeBackward(), GrowthBeforeBackward()
    fit(WideRegression("large"), loader("large", 2), plain)
    callback = dlres.ActivationOffload(
        budget="1TiB", saved_budget=0.5, disk=tmp_path, actions=["offload"], profile_steps=1
    )
    fit(WideRegression("large"), loader("large", 3), ours, callback)
    assert callback.plan is not None
    planned_disk_bytes = callback.plan.tiers["disk"]
    assert planned_disk_bytes > 80 * MIB
    assert plain.growths[-1] - ours.growths[-1] >= 0.8 * planned_disk_bytes


class Resources(NamedTuple):
    """Memory and files of the process at one time."""

    anonymous_bytes: int
    open_files: int
    slab_bytes: int


class ResourceRecorder(Callback):
    """Callback that records the resources of the process after every hundred steps."""

    def __init__(self, offload: dlres.ActivationOffload) -> None:
        self.samples: list[Resources] = []
        self.offload = offload

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 100 == 99:
            gc.collect()
            steps = self.offload.training_steps
            assert steps is not None
            assert steps.offloader is not None
            slab_bytes = sum(tier.nbytes for tier in steps.offloader._tiers.slabs.values())
            open_files = len(os.listdir("/proc/self/fd"))
            self.samples.append(Resources(anonymous_bytes(), open_files, slab_bytes))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
@pytest.mark.parametrize("steps", [400, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_memory_does_not_grow_over_many_steps(steps: int) -> None:
    offload = dlres.ActivationOffload(budget="1TiB", saved_budget=0.5, min_size=1)
    recorder = ResourceRecorder(offload)
    # Every twentieth batch is smaller than the plan expects.
    data = [torch.randn(3, 10 - (number % 20 == 0), 16) for number in range(steps)]
    task = Regression("mlp")
    task.net = nn.Sequential(Block(16, 0.1))
    fit(task, DataLoader(data, batch_size=None), recorder, offload)  # type: ignore[arg-type]
    half, end = recorder.samples[steps // 200 - 1], recorder.samples[-1]
    # At most 2 KiB per step.
    assert end.anonymous_bytes - half.anonymous_bytes < steps / 1000 * MIB
    assert end.open_files == half.open_files
    assert end.slab_bytes == half.slab_bytes


@pytest.mark.parametrize(
    ("name", "actions"),
    checkered(["gpt", "mlp"], [["offload"], ["offload", "compress", "recompute"]], start=1),
    ids=str,
)
def test_saved_tensors_never_exceed_half(name: str, actions: list[str]) -> None:
    callback = dlres.ActivationOffload(budget="1TiB", saved_budget=0.5, actions=actions)
    fit(WideRegression(name), loader(name, 10), callback)
    steps = callback.training_steps
    assert callback.plan is not None
    assert steps is not None
    assert steps.offloader is not None
    # Counted whenever a tensor is saved or unpacked.
    assert 0 < steps.offloader.measurements.saved_peak <= 0.5 * callback.plan.plain_saved_peak
