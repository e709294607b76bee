"""On a GPU: copies on streams of their own change no bit, and the predicted peak is what torch
counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.memory.offloader import Offloader
from lightning_dlres.memory.options import ACTIONS, MemoryOptions
from tests.memory.networks import CASES
from tests.memory.test_reuse import LAYERS, Layers, Refusing, engine, require_same, trained
from tests.zoo import Block

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


def train(
    make: Any, batch: Any, options: MemoryOptions | None, steps: int = 12
) -> tuple[list[Tensor], Offloader | None]:
    """Return the gradients of the last steps, and who offloaded."""
    torch.manual_seed(0)
    net = make().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = batch().to(DEVICE)
    offloader = Offloader(net, options.on(DEVICE), DEVICE) if options is not None else None
    found: list[Tensor] = []
    for number in range(steps):
        torch.manual_seed(number)

        def held() -> list[Tensor]:
            return [*net.parameters(), *net.buffers(), x]

        def step() -> None:
            net(x).float().square().mean().backward()
            optimizer.step()

        if offloader is None:
            step()
        else:
            with offloader.step("one", [*net.parameters(), *net.buffers()], held):
                step()
        found = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.zero_grad()
    return found, offloader


def wide() -> nn.Module:
    return nn.Sequential(*(Block(256, 0.1) for _ in range(6)))


OPTIONS = {
    "min": MemoryOptions("min", min_size=1),
    "half": MemoryOptions("1PiB", saved_budget=0.6, min_size=1),
    "offload": MemoryOptions("1PiB", saved_budget=0.6, min_size=1, actions=["offload"]),
    "compress": MemoryOptions("min", min_size=1, actions=["compress"]),
    "reuse": MemoryOptions("min", min_size=1, actions=["reuse"]),
    "all": MemoryOptions("min", min_size=1, actions=ACTIONS),
}


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("name", [*CASES, "wide"])
def test_gradients_are_those_of_plain_training(name: str, way: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    make, batch = (
        (wide, lambda: torch.randn(16, 128, 256))
        if name == "wide"
        else (CASES[name].make, CASES[name].batch)
    )
    plain, _ = train(make, batch, None)
    ours, offloader = train(make, batch, OPTIONS[way])
    assert offloader is not None
    assert offloader.plan is not None
    assert offloader.measured.unlike == []
    for expected, found in zip(plain, ours, strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize("way", ["min", "half", "offload"])
def test_the_predicted_peak_is_what_torch_counts(way: str) -> None:
    _, offloader = train(wide, lambda: torch.randn(16, 128, 256), OPTIONS[way], steps=12)
    assert offloader is not None
    assert offloader.plan is not None
    assert offloader.measured.device_peak == pytest.approx(offloader.plan.peak, rel=0.03)


@pytest.mark.parametrize("name", LAYERS)
def test_reused_memory_holds_the_same_gradients(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    net = Layers(make()).to(DEVICE)
    with DEVICE:
        separate, _ = trained(net, shape, engine(), Refusing)
        found, given_up = trained(net, shape, engine())
    require_same(separate, found)
    # cuDNN's batch normalisation runs as it is.
    assert given_up == (not name.startswith(("relu", "batch norm")))
