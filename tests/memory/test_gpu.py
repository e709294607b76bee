"""On a GPU: copies on streams of their own change no bit, and the predicted peak is what torch
counts."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.codecs import ZeroValue
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.copies import StreamCopies
from lightning_dlres.memory.execute.gpu import CudaGpu
from lightning_dlres.memory.execute.saved import ByteCounter, Placement, SavedStorage
from lightning_dlres.memory.execute.spans import span_of
from lightning_dlres.memory.execute.storages import SeenStorages
from lightning_dlres.memory.execute.tiers import SlabTier
from lightning_dlres.memory.offloader import Offloader
from lightning_dlres.memory.options import ACTIONS, MemoryOptions
from tests.memory.execute.test_reuse import LAYERS, Layers, Refusing, engine, require_same, trained
from tests.support.models import Block
from tests.support.networks import CASES

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


def test_compressed_data_free_their_memory() -> None:
    def held() -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    gpu, ledger = CudaGpu(DEVICE), ByteCounter()
    tensor = torch.relu(torch.randn(1 << 22, device=DEVICE) - 1)
    expected = tensor.cpu()
    room = int(ZeroValue().encode(tensor, density=0.0).nbytes * 1.1)
    before = held()
    saved_storage = SavedStorage(tensor, SeenStorages().of(tensor), span_of(tensor), 0, ledger)
    assert saved_storage.place(Placement(MemoryAction.COMPRESS, room=room, gpu=gpu))
    reader = saved_storage.read_by(tensor)
    del tensor
    saved_storage.wait_offloaded()
    assert before - held() > expected.nbytes - room - (1 << 16)
    assert torch.equal(saved_storage.tensor_for(reader).cpu(), expected)


def test_memory_that_has_left_is_given_out_again_at_once() -> None:
    gpu = CudaGpu(DEVICE)
    copies, tier = StreamCopies(gpu), SlabTier(64 << 20, None, pinned=True)
    first, second = (tier.take(32 << 20) for _ in range(2))
    assert first is not None
    assert second is not None
    source = torch.full((32 << 20,), 3, dtype=torch.uint8, device=DEVICE)
    address = source.data_ptr()
    leaving = copies.out(source, first.data)
    other = torch.full((32 << 20,), 4, dtype=torch.uint8, device=DEVICE)
    copies.out(other, second.data)
    leaving.wait()
    del source, leaving
    again = torch.full((32 << 20,), 5, dtype=torch.uint8, device=DEVICE)
    assert again.data_ptr() == address
    copies.finish()
    assert bool((first.data == 3).all())
    assert bool((second.data == 4).all())


def test_a_slab_stays_locked_while_it_is_copied() -> None:
    gpu = CudaGpu(DEVICE)
    copies, source = StreamCopies(gpu), torch.ones(64 << 20, dtype=torch.uint8, device=DEVICE)
    for _ in range(4):
        tier = SlabTier(64 << 20, None, pinned=True)
        parcel = tier.take(64 << 20)
        assert parcel is not None
        copies.out(source, parcel.data)
        copies.back(parcel.data, DEVICE)
        del tier, parcel
    copies.finish()
    torch.cuda.synchronize()


def test_tensors_of_the_host_stay() -> None:
    weight = torch.randn(256, 256, requires_grad=True)

    def step() -> Tensor:
        weight.grad = None
        on_gpu = (weight.relu() * weight).to(DEVICE)
        (on_gpu.relu() * on_gpu).sum().backward()
        assert weight.grad is not None
        return weight.grad

    expected = step()
    settings = MemoryOptions("min", min_size=1, actions=["offload"]).on(DEVICE)
    offloader = Offloader(nn.Identity(), settings, DEVICE)
    for _ in range(5):
        with offloader.step("one", [weight], lambda: [weight]):
            found = step()
        assert torch.equal(found, expected)
    assert offloader.profile is not None
    # The copy on the GPU, and what its ReLU makes.
    assert len(offloader.profile.data) == 2


def test_planned_steps_leave_the_users_most_bytes_alone() -> None:
    x = torch.randn(1 << 20, device=DEVICE, requires_grad=True)
    settings = MemoryOptions("min", min_size=1, actions=["offload"]).on(DEVICE)
    offloader = Offloader(nn.Identity(), settings, DEVICE)
    before = 0
    for number in range(6):
        if number == 4:
            assert offloader.plan is not None
            torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
            before = torch.cuda.max_memory_allocated()
        with offloader.step("one", [], lambda: [x]):
            x.exp().sin().sum().backward()
    assert torch.cuda.max_memory_allocated() >= before > 64 << 20


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
