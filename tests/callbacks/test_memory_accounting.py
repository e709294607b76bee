"""What a plan predicts against counts that share no code with the engine: torch's allocator, and
the kernel's."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_dlres as dlres
from tests.callbacks.offload_tasks import Regression, fit
from tests.memory.networks import UNet
from tests.zoo import Block

MIB = 1 << 20


def wide_gpt() -> nn.Module:
    return nn.Sequential(*(Block(128, 0.1) for _ in range(4)), nn.Linear(128, 8))


def deep_mlp() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers)


def large_mlp() -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(256, 256, bias=False), nn.ReLU()))
    )


class WideUNet(UNet):
    pass


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (wide_gpt, lambda: torch.randn(16, 96, 128)),
    "mlp": (deep_mlp, lambda: torch.randn(4096, 256)),
    "unet": (WideUNet, lambda: torch.randn(8, 3, 64, 64)),
}


class Wide(Regression):
    """One of the cases."""

    def __init__(self, name: str) -> None:
        super().__init__("mlp")
        torch.manual_seed(1)
        self.net = CASES[name][0]()

    def configure_optimizers(self) -> Any:
        # Zeros must not become more or fewer: compressed data would change in size.
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


class AllocatorPeak(Callback):
    """Counts what torch's allocator gives and takes back in one step."""

    def __init__(self, step: int) -> None:
        self.step, self.peak = step, 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.step:
            # The profiler does not always tell of memory from before that is given back.
            pl_module.zero_grad()
            gc.collect()
            self.before = sum(storage_sizes(there(trainer, pl_module, batch)).values())
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.step:
            self.profiler.__exit__(None, None, None)
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory, "trace.json")
                self.profiler.export_chrome_trace(str(path))
                events = json.loads(path.read_text())["traceEvents"]
            changes = [e for e in events if e["name"] == "[memory]"]
            now = 0
            for change in sorted(changes, key=lambda e: e["ts"]):
                now += change["args"]["Bytes"]
                self.peak = max(self.peak, self.before + now)


def there(trainer: Trainer, module: LightningModule, batch: Tensor) -> Iterator[Tensor]:
    yield batch
    for parameter in module.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
        for value in trainer.optimizers[0].state[parameter].values():
            if isinstance(value, Tensor):
                yield value
    yield from module.buffers()


def storage_sizes(tensors: Iterator[Tensor]) -> dict[int, int]:
    return {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def loader(name: str, count: int) -> DataLoader[Any]:
    torch.manual_seed(2)
    data = [CASES[name][1]() for _ in range(count)]
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


WAYS: dict[str, dict[str, Any]] = {
    "keep": {"budget": "1TiB"},
    "offload": {"budget": "min", "actions": ["offload"]},
    "compress": {"budget": "min", "actions": ["offload", "compress"]},
    "some": {"budget": "1TiB", "saved_budget": 0.6},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_the_predicted_peak_is_what_the_allocator_counts(name: str, way: str) -> None:
    callback, counter = dlres.ActivationOffload(**WAYS[way]), AllocatorPeak(11)
    fit(Wide(name), loader(name, 12), callback, counter)
    assert callback.plan is not None
    assert callback.plan.peak == pytest.approx(counter.peak, rel=0.03)


def anonymous_bytes() -> int:
    """Return what this process holds that is no file's."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such line")


class AtTurn(Callback):
    """Looks at what the process's memory has grown by between forward and backward."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        gc.collect()
        self.before = anonymous_bytes()

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        self.seen.append(anonymous_bytes() - self.before)


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_with_the_disk_the_process_itself_gets_smaller(tmp_path: Path) -> None:
    CASES["large"] = (large_mlp, lambda: torch.randn(40960, 256))
    try:
        plain, ours = AtTurn(), AtTurn()
        fit(Wide("large"), loader("large", 4), plain)
        callback = dlres.ActivationOffload(
            "1TiB", saved_budget=0.5, disk=tmp_path, actions=["offload"], profile_steps=1
        )
        fit(Wide("large"), loader("large", 4), ours, callback)
    finally:
        del CASES["large"]
    assert callback.plan is not None
    planned_out = callback.plan.tiers["disk"]
    assert planned_out > 100 * MIB
    assert plain.seen[-1] - ours.seen[-1] >= 0.8 * planned_out


class Resident(Callback):
    """Notes what the process holds after every hundred steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []
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
            slabs = sum(tier.nbytes for tier in steps.offloader._tiers.values())
            self.seen.append((anonymous_bytes(), len(os.listdir("/proc/self/fd")), slabs))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_nothing_grows_in_many_steps() -> None:
    watcher = Resident()
    watcher.offload = dlres.ActivationOffload("1TiB", saved_budget=0.5, min_size=1)
    data = [torch.randn(3, 10 - (number % 20 == 0), 16) for number in range(2000)]
    task = Regression("mlp")
    task.net = nn.Sequential(Block(16, 0.1))
    fit(task, DataLoader(data, batch_size=None), watcher, watcher.offload)  # type: ignore[arg-type]
    early, late = watcher.seen[9], watcher.seen[-1]
    assert late[0] - early[0] < 2 * MIB
    assert late[1:] == early[1:]


@pytest.mark.parametrize("actions", [["offload"], ["offload", "compress", "recompute"]], ids=str)
@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_saved_data_never_take_more_than_half(name: str, actions: list[str]) -> None:
    callback = dlres.ActivationOffload("1TiB", saved_budget=0.5, actions=actions)
    fit(Wide(name), loader(name, 10), callback)
    steps = callback.training_steps
    assert callback.plan is not None
    assert steps is not None
    assert steps.offloader is not None
    # Counted whenever a tensor is saved or asked for.
    assert 0 < steps.offloader.measured.saved_peak <= 0.5 * callback.plan.plain_saved_peak
