"""The whole engine on a model of a GPU.

Copies run in every order that CUDA allows, and memory that is freed too early is overwritten.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from math import inf
from mmap import PAGESIZE
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.codecs import ZeroValue
from lightning_dlres.core.device.copiers import StreamCopier
from lightning_dlres.core.device.link_use import LinkUse
from lightning_dlres.core.device.live_bytes import LiveBytes
from lightning_dlres.core.errors import ConfigError
from lightning_dlres.core.host.slab import Slab, aligned
from lightning_dlres.kernels import zvc
from lightning_dlres.memory.config import MemoryConfig, OffloaderConfig, TierConfig
from lightning_dlres.memory.execute.actions import MemoryAction
from lightning_dlres.memory.execute.byte_counter import ByteCounter
from lightning_dlres.memory.execute.engine import OffloadEngine
from lightning_dlres.memory.execute.policy import Placement
from lightning_dlres.memory.execute.saved_storage import SavedStorage
from lightning_dlres.memory.execute.seen_storages import SeenStorages
from lightning_dlres.memory.execute.spans import span_of
from lightning_dlres.memory.execute.transfer.tiers import SlabTier
from lightning_dlres.memory.offloader import Offloader
from lightning_dlres.memory.profile.links import measure_copy_rate, measure_link
from tests.support.fake_gpu import ORDERS, FakeGpu, in_place_of_cuda
from tests.support.networks import CASES

CPU = torch.device("cpu")


@pytest.fixture(params=ORDERS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """GPU model that fails the test if it was not used as CUDA allows."""
    with in_place_of_cuda(request.param, monkeypatch) as model:
        yield model


def settings(*actions: MemoryAction) -> OffloaderConfig:
    return OffloaderConfig(
        device_limit="min",
        min_bytes=1,
        tiers=(TierConfig(name="host"),),
        actions=(MemoryAction.KEEP, *actions),
        recompute=False,
        reuse=False,
    )


def train(
    name: str, options: OffloaderConfig | None, gpu: FakeGpu, steps: int = 6
) -> tuple[list[Tensor], Offloader | None]:
    """Return the gradients of all steps, and the offloader."""
    torch.manual_seed(0)
    net, x = CASES[name].make(), CASES[name].batch()
    resident = [*net.parameters(), *net.buffers()]
    offloader = Offloader(net, options, CPU, gpu=gpu) if options is not None else None
    gradients: list[Tensor] = []
    for number in range(steps):
        torch.manual_seed(number)

        def step() -> None:
            net(x).float().square().mean().backward()

        if offloader is None:
            step()
        else:
            with offloader.step("one", resident, lambda: [*resident, x]):
                step()
        gradients += [p.grad for p in net.parameters() if p.grad is not None]
        net.zero_grad()
    return gradients, offloader


def test_plans_share_the_link_with_other_copies(gpu: FakeGpu) -> None:
    taken = []
    for use in (LinkUse(), LinkUse(to_device=1 << 40)):
        net, x = CASES["cnn"].make(), CASES["cnn"].batch()
        resident = [*net.parameters(), *net.buffers()]
        offloader = Offloader(
            net,
            settings(MemoryAction.OFFLOAD),
            CPU,
            gpu=gpu,
            link_use=lambda use=use: use,  # type: ignore[misc]
        )
        for _ in range(3):
            with offloader.step("one", resident, lambda tensors=(*resident, x): list(tensors)):
                net(x).square().mean().backward()
        assert offloader.profile is not None
        taken += [link.taken for link in offloader.profile.links]
    assert taken[0] == 0 < taken[1] < 1


WAYS = {
    "offload": (MemoryAction.OFFLOAD,),
    "compress": (MemoryAction.COMPRESS,),
    "both": (MemoryAction.BOTH,),
    "all": (MemoryAction.OFFLOAD, MemoryAction.BOTH, MemoryAction.COMPRESS),
}


@pytest.mark.parametrize(("name", "way"), [("unet", "offload"), *(("cnn", way) for way in WAYS)])
def test_gradients_equal_those_of_plain_training(name: str, way: str, gpu: FakeGpu) -> None:
    plain, _ = train(name, None, gpu)
    actual, offloader = train(name, settings(*WAYS[way]), gpu)
    assert offloader is not None
    assert offloader.plan is not None
    assert {d.action for d in offloader.plan.decisions} != {MemoryAction.KEEP}
    assert offloader.measurements.mismatches == []
    assert offloader.measurements.steps > 0
    for expected, gradient in zip(plain, actual, strict=True):
        assert torch.equal(expected, gradient)
    if way == "offload":
        assert offloader.measurements.saved_peak <= offloader.plan.saved_peak
    offloader.close()
    gc.collect()
    assert gpu.pinned == 0


def test_planned_steps_neither_block_the_host_nor_reset_counters(gpu: FakeGpu) -> None:
    _, offloader = train("cnn", settings(*WAYS["both"]), gpu, steps=2)
    assert offloader is not None
    waits, resets, reads = gpu.waits, gpu.resets, gpu.reads
    net, x = nn.Sequential(*offloader._root.children()), CASES["cnn"].batch()
    resident = [*net.parameters(), *net.buffers()]
    gpu.peak_bytes = 100
    for number in range(3):
        with offloader.step("one", resident, lambda: [*resident, x]):
            net(x).float().square().mean().backward()
            gpu.peak_bytes += 7 if number == 1 else 0
    assert offloader.measurements.steps == 3
    # The host waits for no stream, and `torch.cuda.max_memory_allocated` is not reset.
    assert (gpu.waits, gpu.resets) == (waits, resets)
    assert offloader.measurements.device_peak == 107
    assert offloader.plan is not None
    packed = sum(
        d.action in (MemoryAction.COMPRESS, MemoryAction.BOTH) for d in offloader.plan.decisions
    )
    assert gpu.reads - reads == 3 * packed > 0


def test_originals_of_compressed_storages_are_freed_before_the_next_save(gpu: FakeGpu) -> None:
    _, offloader = train("cnn", settings(*WAYS["compress"]), gpu, steps=2)
    assert offloader is not None
    assert offloader.plan is not None
    packed = sum(d.action is MemoryAction.COMPRESS for d in offloader.plan.decisions)
    assert packed > 1
    net, x = offloader._root, CASES["cnn"].batch()
    resident, reads = [*net.parameters(), *net.buffers()], gpu.reads
    with offloader.step("one", resident, lambda: [*resident, x]):
        loss = net(x).float().square().mean()
        assert gpu.reads - reads >= packed - 1
        loss.backward()
    assert gpu.reads - reads == packed


def sparse(count: int = 1 << 14) -> Tensor:
    return torch.relu(torch.randn(count))


def saved_storage_of(tensor: Tensor, byte_counter: ByteCounter) -> SavedStorage:
    return SavedStorage(tensor, SeenStorages().of(tensor), span_of(tensor), 0, byte_counter)


def restored(saved_storage: SavedStorage, tensor: Tensor) -> Tensor:
    return saved_storage.tensor_for(saved_storage.add_reader(tensor, saved_storage.storage)).clone()


def test_compressed_storages_take_the_planned_bytes_and_do_not_block(gpu: FakeGpu) -> None:
    byte_counter = ByteCounter()
    with LiveBytes() as live:
        tensor = sparse()
        expected, capacity = tensor.clone().numpy(), int(ZeroValue().encode(tensor).nbytes * 1.1)
        saved_storage = saved_storage_of(tensor, byte_counter)
        assert saved_storage.place(Placement(MemoryAction.COMPRESS, capacity=capacity, gpu=gpu))
        # The host continues. The original resident until the compressed size is known.
        assert gpu.reads == 0
        gc.collect()
        before = live.now
        reader = saved_storage.add_reader(tensor, saved_storage.storage)
        del tensor
        saved_storage.wait_offloaded()
        assert gpu.reads == 1
        gc.collect()
        assert before - live.now == expected.nbytes
        assert capacity <= byte_counter.now < capacity + 8
        assert (saved_storage.tensor_for(reader).numpy() == expected).all()


@pytest.mark.parametrize("action", [MemoryAction.COMPRESS, MemoryAction.BOTH])
@pytest.mark.parametrize("has_room", [True, False])
def test_storages_that_exceed_their_capacity_are_restored_exactly(
    gpu: FakeGpu, action: MemoryAction, has_room: bool
) -> None:
    tensor, byte_counter = sparse(), ByteCounter()
    capacity = ZeroValue().encode(tensor).nbytes - 64
    tier = SlabTier(tensor.nbytes * 2 if has_room else aligned(capacity + 8), None, pinned=True)
    copier = StreamCopier(gpu)
    saved_storage = saved_storage_of(tensor, byte_counter)
    assert saved_storage.place(Placement(action, tier, copier=copier, capacity=capacity, gpu=gpu))
    saved_storage.wait_offloaded()
    assert saved_storage.is_offloaded == has_room
    assert byte_counter.now == (0 if has_room else tensor.nbytes)
    expected = tensor.clone()
    backward = gpu.streams[2]
    assert backward.issued == 0
    assert torch.equal(restored(saved_storage, tensor), expected)
    assert (backward.issued > 0) == has_room
    copier.synchronize()


def test_tensors_on_other_devices_stay(gpu: FakeGpu) -> None:
    class Refusing:
        def __getattr__(self, name: str) -> Any:
            assert name == "start", "a tensor of the host moved in a GPU's run"
            return lambda: None

    for device in ("cuda:0", "cuda"):
        engine: Any = OffloadEngine(1, torch.device(device))
        x = torch.randn(64, 64, requires_grad=True)
        with engine.hooks(Refusing()):
            (x.relu() * x).sum().backward()
        assert x.grad is not None


def test_link_measurement_takes_little_gpu_memory(gpu: FakeGpu) -> None:
    copier = StreamCopier(gpu)
    with LiveBytes() as live:
        link = measure_link(
            "host", copier, CPU, directory=None, pinned=True, nbytes=1 << 30, gpu=gpu
        )
    # A quarter of this is pinned memory of the host.
    assert live.peak <= 96 << 20
    assert link.overlaps
    gc.collect()
    assert gpu.pinned == 0
    with LiveBytes() as live:
        assert 0 < measure_copy_rate(CPU, gpu) < inf
    assert live.peak <= 64 << 20


def test_a_gpu_without_numba_cuda_does_not_compress(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    assert MemoryAction.COMPRESS in MemoryConfig(budget="min").for_device(device).actions
    monkeypatch.setattr(zvc, "runs_on_gpus", lambda: False)
    assert MemoryAction.COMPRESS not in MemoryConfig(budget="min").for_device(device).actions
    assert MemoryAction.BOTH not in MemoryConfig(budget="min").for_device(device).actions
    assert MemoryAction.COMPRESS in MemoryConfig(budget="min").for_device(CPU).actions
    with pytest.raises(ConfigError, match="pip install 'lightning-dlres"):
        MemoryConfig(budget="min", actions=["compress", "offload"]).for_device(device)


def test_pinned_pages_belong_to_one_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[range] = []

    def pin(data: Tensor) -> None:
        pages = range(data.data_ptr() // PAGESIZE, (data.data_ptr() + data.numel()) // PAGESIZE)
        assert data.data_ptr() % PAGESIZE == data.numel() % PAGESIZE == 0
        assert all(set(pages).isdisjoint(other) for other in locked)
        locked.append(pages)

    monkeypatch.setattr("lightning_dlres.core.host.slab._pin", pin)
    slabs = [Slab(nbytes, pinned=True) for nbytes in (1, 700, 5000, 3, 3)]
    assert [slab.data.numel() for slab in slabs] == [1, 700, 5000, 3, 3]
    assert len(locked) == 5
