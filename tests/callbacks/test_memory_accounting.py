"""Peaks that a plan predicts against peaks that torch's profiler counts."""

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

import lightning_dlres as dlres
from tests.support.offload_tasks import fit
from tests.support.wide_networks import NETWORKS, WideRegression, loader

# Event in the profiler's trace just before the optimizer's zero_grad frees all gradients.
GRADIENTS_FREED = "gradients are freed"


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
            self.known = storage_sizes(tensors_before_step(trainer, pl_module, batch))
            self.before = sum(self.known.values())
            self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self.profiler.__enter__()

    def on_before_zero_grad(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
    ) -> None:
        if self.profiler is not None:
            grads = (p.grad for p in pl_module.parameters() if p.grad is not None)
            self.gradients = storage_sizes(grads)
            with record_function(GRADIENTS_FREED):
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
        """Set `peak` from the events of a step, in the order of their times."""
        # Memory that is freed without an allocation existed before the step.
        allocated = set(self.known)
        for event in events:
            if event["name"] == "[memory]":
                address, change = event["args"]["Addr"], event["args"]["Bytes"]
                if change < 0 and address not in allocated:
                    self.before -= change
                (allocated.add if change > 0 else allocated.discard)(address)
        # The profiler does not always report that memory from before the step is freed.
        now, already_subtracted = self.before, set()
        for event in events:
            if event["name"] == GRADIENTS_FREED and event.get("cat") == "user_annotation":
                now -= sum(self.gradients.values())
                already_subtracted = set(self.gradients)
            elif event["name"] == "[memory]":
                address, change = event["args"]["Addr"], event["args"]["Bytes"]
                if address in already_subtracted:
                    already_subtracted.remove(address)
                    change = max(change, 0)
                now += change
                self.peak = max(self.peak, now)


def tensors_before_step(
    trainer: Trainer, module: LightningModule, batch: Tensor
) -> Iterator[Tensor]:
    """Yield the tensors that exist when a step starts."""
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


OPTIONS: dict[str, dict[str, Any]] = {
    "keep": {"budget": "1TiB"},
    "offload": {"budget": "min", "actions": ["offload"]},
    "compress": {"budget": "min", "actions": ["offload", "compress"]},
    "reuse": {"budget": "min", "actions": ["reuse"]},
    "recompute": {"budget": "min", "actions": ["recompute"]},
    "all": {"budget": "min", "actions": ["offload", "compress", "reuse", "recompute"]},
    "some": {"budget": "1TiB", "saved_budget": 0.6},
}


# The networks that `make test` counts, by options.
COVERING = {
    "keep": ["unet"],
    "offload": ["mlp"],
    "compress": ["unet"],
    "reuse": ["mlp"],
    "recompute": ["gpt"],
    "all": ["gpt", "mlp"],
    "some": ["unet"],
}
COUNTED = [
    pytest.param(name, options, marks=[] if name in COVERING[options] else pytest.mark.exhaustive)
    for name in ("gpt", "mlp", "unet")
    for options in OPTIONS
]
COUNTED += [pytest.param("checkpointed", "keep"), pytest.param("checkpointed", "offload")]


@pytest.mark.parametrize(("name", "options"), COUNTED)
def test_the_predicted_peak_equals_the_allocators(name: str, options: str) -> None:
    callback, counter = dlres.ActivationOffload(**OPTIONS[options]), AllocatorPeak(6)
    fit(WideRegression(name), loader(name, 7), callback, counter)
    assert callback.plan is not None
    assert callback.plan.peak == pytest.approx(counter.peak, rel=0.03)


# Network whose layers 1 and 2 can reuse memory, and batch, by name.
REUSING: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
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


class KeepsInput(nn.Module):
    """Network with a hook that holds on to the input of one layer, so that it cannot be reused."""

    def __init__(self, net: nn.Module, name: str) -> None:
        super().__init__()
        self.net = net
        self.kept: list[Tensor] = []
        net.get_submodule(name).register_forward_pre_hook(self.keep)

    def keep(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.kept = list(args)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.parametrize("name", REUSING)
def test_memory_is_reused_and_the_peak_drops_as_predicted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NETWORKS, name, REUSING[name])
    plain, ours = AllocatorPeak(6), AllocatorPeak(6)
    callback = dlres.ActivationOffload(budget="min", actions=["reuse"])
    weights = [fit(WideRegression(name), loader(name, 7), plain)]
    weights.append(fit(WideRegression(name), loader(name, 7), ours, callback))
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key])
    plan = callback.plan
    assert plan is not None
    assert plan.reuse == ("net.1", "net.2")
    predicted, counted = plan.plain_peak - plan.peak, plain.peak - ours.peak
    assert predicted > 0.1 * plan.plain_peak
    assert counted == pytest.approx(predicted, rel=0.03)


@pytest.mark.parametrize("name", REUSING)
def test_memory_with_other_holders_is_not_reused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, batch = REUSING[name]
    monkeypatch.setitem(NETWORKS, name, (lambda: KeepsInput(make(), "2"), batch))
    ours = AllocatorPeak(6)
    callback = dlres.ActivationOffload(budget="min", actions=["reuse"])
    fit(WideRegression(name), loader(name, 7), ours, callback)
    assert callback.plan is not None
    assert "net.net.2" not in callback.plan.reuse
    assert ours.peak == pytest.approx(callback.plan.peak, rel=0.03)
