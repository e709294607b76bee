"""Predictions of a plan against counts that share no code with the engine."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import lightning_dlres as dlres
from tests.support.models import Block
from tests.support.networks import UNet
from tests.support.offload_tasks import Regression, fit

MIB = 1 << 20


def wide_gpt() -> nn.Module:
    return nn.Sequential(*(Block(128, 0.1) for _ in range(4)), nn.Linear(128, 8))


def deep_mlp() -> nn.Module:
    layers = [layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(*layers)


def large_mlp() -> nn.Module:
    return nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(64, 64, bias=False), nn.ReLU()))
    )


class WideUNet(UNet):
    pass


class Checkpointed(nn.Module):
    """Network with checkpointing of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(128, 0.1) for _ in range(3))
        self.head = nn.Linear(128, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "gpt": (wide_gpt, lambda: torch.randn(8, 96, 128)),
    "mlp": (deep_mlp, lambda: torch.randn(2048, 256)),
    "checkpointed": (Checkpointed, lambda: torch.randn(8, 96, 128)),
    "unet": (WideUNet, lambda: torch.randn(4, 3, 64, 64)),
}


class Wide(Regression):
    """Task with one of the networks."""

    def __init__(self, name: str) -> None:
        super().__init__("mlp")
        torch.manual_seed(1)
        self.net = CASES[name][0]()

    def configure_optimizers(self) -> Any:
        # The number of zeros must not change: it determines the size of compressed storages.
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


class AllocatorPeak(Callback):
    """Callback that counts allocations and frees of torch's allocator in one step."""

    def __init__(self, step: int) -> None:
        self.step, self.peak = step, 0
        self.profiler: Any = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.step:
            gc.collect()
            self.known = storage_sizes(there(trainer, pl_module, batch))
            self.before = sum(self.known.values())
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.__enter__()

    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if self.profiler is not None:
            grads = (p.grad for p in pl_module.parameters() if p.grad is not None)
            self.gradients = storage_sizes(grads)
            with record_function("gradients go"):
                pass

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.step:
            self.profiler.__exit__(None, None, None)
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory, "trace.json")
                self.profiler.export_chrome_trace(str(path))
                events = json.loads(path.read_text())["traceEvents"]
            self.profiler = None
            self.count(sorted((e for e in events if "ts" in e), key=lambda e: float(e["ts"])))

    def count(self, events: list[Any]) -> None:
        # Memory that is freed without an allocation existed before the step.
        there = set(self.known)
        for event in events:
            if event["name"] == "[memory]":
                address, change = event["args"]["Addr"], event["args"]["Bytes"]
                if change < 0 and address not in there:
                    self.before -= change
                (there.add if change > 0 else there.discard)(address)
        # The profiler does not always report that memory from before the step is freed.
        now, given_back = self.before, set()
        for event in events:
            if event["name"] == "gradients go" and event.get("cat") == "user_annotation":
                now -= sum(self.gradients.values())
                given_back = set(self.gradients)
            elif event["name"] == "[memory]":
                address, change = event["args"]["Addr"], event["args"]["Bytes"]
                if address in given_back:
                    given_back.remove(address)
                    change = max(change, 0)
                now += change
                self.peak = max(self.peak, now)


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
    "reuse": {"budget": "min", "actions": ["reuse"]},
    "recompute": {"budget": "min", "actions": ["recompute"]},
    "all": {"budget": "min", "actions": ["offload", "compress", "reuse", "recompute"]},
    "some": {"budget": "1TiB", "saved_budget": 0.6},
}


COUNTED = [(name, way) for name in ("gpt", "mlp", "unet") for way in WAYS]
COUNTED += [("checkpointed", "keep"), ("checkpointed", "offload")]


@pytest.mark.parametrize(("name", "way"), COUNTED)
def test_the_predicted_peak_equals_the_allocators(name: str, way: str) -> None:
    callback, counter = dlres.ActivationOffload(**WAYS[way]), AllocatorPeak(6)
    fit(Wide(name), loader(name, 7), callback, counter)
    assert callback.plan is not None
    assert callback.plan.peak == pytest.approx(counter.peak, rel=0.03)


PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "GELU -> Linear": (
        lambda: nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)),
        lambda: torch.randn(2048, 64),
    ),
    "LayerNorm -> Linear": (
        lambda: nn.Sequential(nn.Linear(64, 512), nn.LayerNorm(512), nn.Linear(512, 64)),
        lambda: torch.randn(2048, 64),
    ),
    "Conv -> ReLU -> Conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 3)),
        lambda: torch.randn(16, 3, 32, 32),
    ),
}


class Listening(nn.Module):
    """Network with a hook that keeps the input of one layer."""

    def __init__(self, net: nn.Module, name: str) -> None:
        super().__init__()
        self.net = net
        self.kept: list[Tensor] = []
        net.get_submodule(name).register_forward_pre_hook(self.keep)

    def keep(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.kept = list(args)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("name", PAIRS)
def test_memory_is_reused_and_the_peak_drops_by_what_the_plan_says(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, name, PAIRS[name])
    plain, ours = AllocatorPeak(6), AllocatorPeak(6)
    callback = dlres.ActivationOffload(budget="min", actions=["reuse"])
    weights = [fit(Wide(name), loader(name, 7), plain)]
    weights.append(fit(Wide(name), loader(name, 7), ours, callback))
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key])
    plan = callback.plan
    assert plan is not None
    assert plan.reuse == ("net.1", "net.2")
    predicted, counted = plan.plain_peak - plan.peak, plain.peak - ours.peak
    assert predicted > 0.1 * plan.plain_peak
    assert counted == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize("name", PAIRS)
def test_memory_with_other_holders_is_not_reused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, batch = PAIRS[name]
    monkeypatch.setitem(CASES, name, (lambda: Listening(make(), "2"), batch))
    ours = AllocatorPeak(6)
    callback = dlres.ActivationOffload(budget="min", actions=["reuse"])
    fit(Wide(name), loader(name, 7), ours, callback)
    assert callback.plan is not None
    assert "net.net.2" not in callback.plan.reuse
    assert ours.peak == pytest.approx(callback.plan.peak, rel=0.03)
