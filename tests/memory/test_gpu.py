"""The engine on a real GPU: gradients are exact, and predicted peaks are close to measured ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.codecs import ZeroValue
from lightning_dlres.core.device.copiers import StreamCopier
from lightning_dlres.core.device.gpu import CudaGpu
from lightning_dlres.memory.config import ACTIONS, MemoryConfig
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.byte_counter import ByteCounter
from lightning_dlres.memory.execute.policy import Placement
from lightning_dlres.memory.execute.saved_storage import SavedStorage
from lightning_dlres.memory.execute.seen_storages import SeenStorages
from lightning_dlres.memory.execute.spans import span_of
from lightning_dlres.memory.execute.transfer.tiers import SlabTier
from lightning_dlres.memory.offloader import Offloader
from tests.support.models import Block
from tests.support.networks import CASES
from tests.support.reuse_steps import (
    LAYERS,
    Layers,
    RefusingOwner,
    assert_equal_tensors,
    run_step,
    scripted_engine,
)

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def _deterministic_algorithms() -> Iterator[None]:
    """Let torch use deterministic algorithms where it has them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def train(
    make: Any, batch: Any, options: MemoryConfig | None, steps: int = 12
) -> tuple[list[Tensor], Offloader | None]:
    """Return the gradients of the last step, and the offloader; without options there is none."""
    torch.manual_seed(0)
    net = make().to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = batch().to(DEVICE)
    offloader = Offloader(net, options.for_device(DEVICE), DEVICE) if options is not None else None

    def exempt() -> list[Tensor]:
        return [*net.parameters(), *net.buffers()]

    def step() -> None:
        net(x).float().square().mean().backward()
        optimizer.step()

    gradients: list[Tensor] = []
    for number in range(steps):
        # Those of an earlier step would count as memory that the plan does not know.
        gradients.clear()
        torch.manual_seed(number)
        if offloader is None:
            step()
        else:
            with offloader.step("one", exempt(), lambda: [*exempt(), x]):
                step()
        gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
        optimizer.zero_grad()
    return gradients, offloader


def wide_gpt() -> nn.Module:
    return nn.Sequential(*(Block(256, 0.1) for _ in range(6)))


OPTIONS = {
    "min": MemoryConfig(budget="min", min_size=1),
    "half": MemoryConfig(budget="1PiB", saved_budget=0.6, min_size=1),
    "offload": MemoryConfig(budget="1PiB", saved_budget=0.6, min_size=1, actions=["offload"]),
    "compress": MemoryConfig(budget="min", min_size=1, actions=["compress"]),
    "reuse": MemoryConfig(budget="min", min_size=1, actions=["reuse"]),
    "all": MemoryConfig(budget="min", min_size=1, actions=ACTIONS),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", [*CASES, "wide"])
def test_gradients_equal_those_of_plain_training(name: str, options: str) -> None:
    make, batch = (
        (wide_gpt, lambda: torch.randn(16, 128, 256))
        if name == "wide"
        else (CASES[name].make, CASES[name].batch)
    )
    if name == "lstm" and OPTIONS[options].saved_budget is not None:
        pytest.skip("cuDNN saves one storage, which is larger than the budget")
    plain, _ = train(make, batch, None)
    ours, offloader = train(make, batch, OPTIONS[options])
    assert offloader is not None
    assert offloader.plan is not None
    assert offloader.measurements.mismatches == []
    for expected, actual in zip(plain, ours, strict=True):
        assert torch.equal(expected, actual)


@pytest.mark.parametrize("options", ["min", "half", "offload"])
def test_the_predicted_peak_is_close_to_torchs_counter(options: str) -> None:
    _, offloader = train(wide_gpt, lambda: torch.randn(16, 128, 256), OPTIONS[options], steps=12)
    assert offloader is not None
    assert offloader.plan is not None
    assert offloader.measurements.device_peak == pytest.approx(offloader.plan.peak, rel=0.05)


def test_compressed_storages_free_their_original_memory() -> None:
    def allocated() -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    gpu, byte_counter = CudaGpu(DEVICE), ByteCounter()
    tensor = torch.relu(torch.randn(1 << 22, device=DEVICE) - 1)
    expected = tensor.cpu()
    capacity = int(ZeroValue().encode(tensor, density=0.0).nbytes * 1.1)
    before = allocated()
    saved_storage = SavedStorage(
        tensor, SeenStorages().of(tensor), span_of(tensor), 0, byte_counter
    )
    assert saved_storage.place(Placement(MemoryAction.COMPRESS, capacity=capacity, gpu=gpu))
    reader = saved_storage.add_reader(tensor, saved_storage.storage)
    del tensor
    saved_storage.wait_offloaded()
    # The allocator may give a tensor up to a MiB more than it needs.
    assert before - allocated() > expected.nbytes - capacity - (1 << 20)
    assert torch.equal(saved_storage.tensor_for(reader).cpu(), expected)


def test_offloaded_memory_is_allocated_again_at_once() -> None:
    gpu = CudaGpu(DEVICE)
    copier, tier = StreamCopier(gpu), SlabTier(64 << 20, None, pinned=True)
    first, second = (tier.allocate(32 << 20) for _ in range(2))
    assert first is not None
    assert second is not None
    source = torch.full((32 << 20,), 3, dtype=torch.uint8, device=DEVICE)
    address = source.data_ptr()
    first_copy = copier.to_tier(source, first.data)
    other = torch.full((32 << 20,), 4, dtype=torch.uint8, device=DEVICE)
    copier.to_tier(other, second.data)
    # After `wait`, the allocator may give the memory to work that is queued behind the copy.
    first_copy.wait()
    del source, first_copy
    again = torch.full((32 << 20,), 5, dtype=torch.uint8, device=DEVICE)
    assert again.data_ptr() == address
    copier.synchronize()
    assert bool((first.data == 3).all())
    assert bool((second.data == 4).all())


def test_a_slab_stays_pinned_while_it_is_copied() -> None:
    gpu = CudaGpu(DEVICE)
    copier, source = StreamCopier(gpu), torch.ones(64 << 20, dtype=torch.uint8, device=DEVICE)
    for _ in range(4):
        tier = SlabTier(64 << 20, None, pinned=True)
        allocation = tier.allocate(64 << 20)
        assert allocation is not None
        copier.to_tier(source, allocation.data)
        copier.to_device(allocation.data, DEVICE)
        # The copies must keep the slab alive; if they do not, `synchronize` raises.
        del tier, allocation
    copier.synchronize()
    torch.cuda.synchronize()


def test_host_tensors_stay() -> None:
    weight = torch.randn(256, 256, requires_grad=True)

    def step() -> Tensor:
        weight.grad = None
        on_gpu = (weight.relu() * weight).to(DEVICE)
        (on_gpu.relu() * on_gpu).sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected = step()
    settings = MemoryConfig(budget="min", min_size=1, actions=["offload"]).for_device(DEVICE)
    offloader = Offloader(nn.Identity(), settings, DEVICE)
    for _ in range(5):
        with offloader.step("one", [weight], lambda: [weight]):
            gradient = step()
        assert torch.equal(gradient, expected)
    assert offloader.profile is not None
    # The copy on the GPU, and the output of its ReLU.
    assert len(offloader.profile.storages) == 2


def test_planned_steps_do_not_reset_the_users_peak_counter() -> None:
    x = torch.randn(1 << 20, device=DEVICE, requires_grad=True)
    settings = MemoryConfig(budget="min", min_size=1, actions=["offload"]).for_device(DEVICE)
    offloader = Offloader(nn.Identity(), settings, DEVICE)
    before = 0
    for number in range(6):
        if number == 4:
            # From here on steps follow the plan. The tensor raises the peak, and is freed at once.
            assert offloader.plan is not None
            torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
            before = torch.cuda.max_memory_allocated()
        with offloader.step("one", [], lambda: [x]):
            x.exp().sin().sum().backward()
    assert torch.cuda.max_memory_allocated() >= before > 64 << 20


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_in_reused_memory_are_exact(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(1)
    net = Layers(make()).to(DEVICE)
    with DEVICE:
        separate, _ = run_step(net, shape, scripted_engine(), RefusingOwner)
        reused, num_reused = run_step(net, shape, scripted_engine())
    assert_equal_tensors(separate, reused)
    # ReLU never reuses memory, and cuDNN's batch normalisation is not patched.
    assert num_reused == (0 if name.startswith(("relu", "batch norm")) else 1)
