"""Memory of the process by the kernel's count, and bytes of saved tensors at every hook."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_dlres as dlres
from tests.callbacks.test_memory_accounting import CASES, MIB, Wide, large_mlp, loader
from tests.support.models import Block
from tests.support.offload_tasks import Regression, fit


def anonymous_bytes() -> int:
    """Return the bytes of anonymous memory of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such line")


class GrowthBeforeBackward(Callback):
    """Callback that records the growth of the process between forward and backward."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        gc.collect()
        self.before = anonymous_bytes()

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        self.seen.append(anonymous_bytes() - self.before)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_offloading_to_disk_shrinks_the_process(tmp_path: Path) -> None:
    # 33 MiB each: up to 32 MiB, glibc may reuse memory that earlier tests have freed.
    CASES["large"] = (large_mlp, lambda: torch.randn(135168, 64))
    try:
        plain, ours = GrowthBeforeBackward(), GrowthBeforeBackward()
        fit(Wide("large"), loader("large", 2), plain)
        callback = dlres.ActivationOffload(
            budget="1TiB", saved_budget=0.5, disk=tmp_path, actions=["offload"], profile_steps=1
        )
        fit(Wide("large"), loader("large", 3), ours, callback)
    finally:
        del CASES["large"]
    assert callback.plan is not None
    planned_disk_bytes = callback.plan.tiers["disk"]
    assert planned_disk_bytes > 80 * MIB
    assert plain.seen[-1] - ours.seen[-1] >= 0.8 * planned_disk_bytes


class Resident(Callback):
    """Callback that records what the process holds after every hundred steps.

    Attributes:
        samples: Bytes of anonymous memory, number of open files, and bytes of slabs.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[int, int, int]] = []
        self.offload: dlres.ActivationOffload | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % 100 == 99:
            gc.collect()
            assert self.offload is not None
            steps = self.offload.training_steps
            assert steps is not None
            assert steps.offloader is not None
            slabs = sum(tier.nbytes for tier in steps.offloader._tiers.slabs.values())
            self.samples.append((anonymous_bytes(), len(os.listdir("/proc/self/fd")), slabs))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
@pytest.mark.parametrize("steps", [400, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_memory_does_not_grow_over_many_steps(steps: int) -> None:
    watcher = Resident()
    watcher.offload = dlres.ActivationOffload(budget="1TiB", saved_budget=0.5, min_size=1)
    data = [torch.randn(3, 10 - (number % 20 == 0), 16) for number in range(steps)]
    task = Regression("mlp")
    task.net = nn.Sequential(Block(16, 0.1))
    fit(task, DataLoader(data, batch_size=None), watcher, watcher.offload)  # type: ignore[arg-type]
    early, late = watcher.samples[steps // 200 - 1], watcher.samples[-1]
    assert late[0] - early[0] < steps / 1000 * MIB
    assert late[1:] == early[1:]


@pytest.mark.parametrize("actions", [["offload"], ["offload", "compress", "recompute"]], ids=str)
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_saved_tensors_never_exceed_half(name: str, actions: list[str]) -> None:
    callback = dlres.ActivationOffload(budget="1TiB", saved_budget=0.5, actions=actions)
    fit(Wide(name), loader(name, 10), callback)
    steps = callback.training_steps
    assert callback.plan is not None
    assert steps is not None
    assert steps.offloader is not None
    # Counted whenever a tensor is saved or unpacked.
    assert 0 < steps.offloader.measurements.saved_peak <= 0.5 * callback.plan.plain_saved_peak
