"""`ParameterMirror` on a GPU: what is where, and how much memory of the GPU it takes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_dlres.callbacks import ActivationOffload, ParameterMirror
from lightning_dlres.mirror.config import MirrorConfig
from lightning_dlres.mirror.mirror import Mirror
from tests.support.mirror_models import NETWORKS, Classifier, data
from tests.support.models import QUIET

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
WIDTH, LAYERS = 1024, 32
LAYER = 4 * WIDTH * WIDTH


@pytest.fixture(autouse=True)
def _deterministic_algorithms() -> Iterator[None]:
    """Let torch use deterministic algorithms where it has them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def peak_of(run: Any) -> int:
    """Return the peak bytes of the GPU during a call, without those that were there before."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("window", ["min", "auto"])
@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_equal_those_of_plain_training(network: str, window: str) -> None:
    results = []
    for config in (None, MirrorConfig(window=window)):
        torch.manual_seed(3)
        model = NETWORKS[network]()
        if config is None:
            model.to(DEVICE)
        else:
            for module in model.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(DEVICE))
        mirror = Mirror(model, [], config, DEVICE) if config is not None else None
        for x, y in data():
            inputs, targets = x.to(DEVICE), y.to(DEVICE)
            with mirror.step("training") if mirror is not None else nullcontext():
                F.cross_entropy(model(inputs), targets).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            assert all(gradient.is_cuda == (mirror is None) for gradient in gradients)
            results.append([gradient.cpu().clone() for gradient in gradients])
            model.zero_grad()
        if mirror is not None:
            mirror.close()
    half = len(results) // 2
    for plain, ours in zip(results[:half], results[half:], strict=True):
        assert len(plain) == len(ours)
        for expected, own in zip(plain, ours, strict=True):
            # A module that is used several times adds its gradients in another order.
            torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)


class Stack(LightningModule):
    """Layers whose parameters take much more memory than their activations."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.count = layers
        self.devices: set[str] = set()

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        self.layers = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(self.count))
        )
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.devices.add(f"{batch.device.type} {self.scale.device.type} {self.device.type}")
        return self.layers(batch * self.scale).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fit(module: LightningModule, callbacks: list[Callback], **options: Any) -> Trainer:
    seed_everything(1, verbose=False)
    options = {"max_steps": 6, "callbacks": callbacks, **QUIET, **options}
    trainer = Trainer(accelerator="gpu", devices=1, **options)
    trainer.fit(module, DataLoader(torch.randn(24, WIDTH), 4))
    return trainer


@pytest.mark.parametrize("update", ["after_backward", "layerwise"])
@pytest.mark.parametrize("window", ["min", 3 * LAYER])
def test_the_gpu_holds_the_window_and_few_gradients(window: Any, update: Any) -> None:
    module, mirror = Stack(), ParameterMirror(window=window, update=update)
    peak = peak_of(lambda: fit(module, [mirror]))
    assert mirror.mirror is not None
    most = 3 * LAYER if window != "min" else LAYER
    assert mirror.mirror.window.peak_bytes <= most + LAYER
    # Beside the window: one gradient that is computed and two on their way, activations, and 32 MiB
    # of cuBLAS for each of the two threads that compute.
    assert peak < most + LAYER + 3 * LAYER + (2 << 20) + 2 * (32 << 20)
    assert module.devices == {"cuda cuda cuda"}
    assert all(p.device.type == "cpu" for p in module.parameters())


def test_a_model_larger_than_the_gpu_trains() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    limit = torch.cuda.memory_reserved() + (160 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        # Parameters, gradients and two means take 512 MiB.
        with pytest.raises(torch.OutOfMemoryError):
            fit(Stack(), [])
        gc.collect()
        torch.cuda.empty_cache()
        fit(Stack(), [ParameterMirror(window="min")])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_activations_and_parameters_leave_the_gpu_in_one_trainer() -> None:
    results = []
    for callbacks in (
        [],
        [ParameterMirror(window="min"), ActivationOffload(budget="min", min_size=1)],
    ):
        seed_everything(1, verbose=False)
        module = Stack(6)
        # Plain training would make it on the GPU, with the GPU's random numbers.
        module.configure_model()
        fit(module, callbacks, max_steps=12, max_epochs=2)
        results.append([p.detach().cpu() for p in module.parameters()])
    for expected, own in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)


class ReadsWeights(Classifier):
    """Reads weights outside of their layers' calls, by their names and in a loop."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch[0]), batch[1])
        loss = loss + 0.01 * self.network.head.weight.square().sum()
        loss = loss + 0.01 * sum(p.square().sum() for p in self.network.parameters())
        self.losses.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.losses.append(self.network.head.weight.norm().item())


@pytest.mark.parametrize("network", ["twice", "frozen", "tied embedding"])
def test_weights_may_be_read_outside_of_their_calls(network: str) -> None:
    results = []
    for callbacks in ([], [ParameterMirror(window="min")]):
        seed_everything(3, verbose=False)
        module = ReadsWeights(network, "sgd")
        trainer = Trainer(accelerator="gpu", devices=1, max_epochs=2, callbacks=callbacks, **QUIET)
        trainer.fit(module, data(), data(16))
        results.append(module.losses)
    assert results[1] == pytest.approx(results[0], rel=1e-3)


def test_a_model_on_the_gpu_moves_to_the_host_and_back() -> None:
    seed_everything(3, verbose=False)
    module = Classifier("convolutions", "sgd").to(DEVICE)
    trainer = Trainer(
        accelerator="gpu", devices=1, max_epochs=1, callbacks=[ParameterMirror()], **QUIET
    )
    trainer.fit(module, data(), data(16))
    module.to(DEVICE)
    x, y = next(iter(data()))
    F.cross_entropy(module.network(x.to(DEVICE)), y.to(DEVICE)).backward()
    assert all(p.grad is not None and p.grad.is_cuda for p in module.parameters())
