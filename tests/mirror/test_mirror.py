"""A mirror without a Trainer: what is on the device, plans, and steps of another order."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.mirror.config import MirrorConfig
from lightning_dlres.mirror.execute.window import Window
from lightning_dlres.mirror.mirror import Mirror, fetch_cost

LAYER = 4 * 32 * 32 + 512


class CountedBytes:
    """Counter of the memory of copies on the device, by its storages and not by the window.

    Attributes:
        peak: Largest number of bytes at once.
    """

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._known: set[int] = set()

    def add(self, memory: Tensor) -> None:
        storage = memory.untyped_storage()
        key = storage.data_ptr()
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, storage.nbytes())

    def _remove(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedBytes:
    counter, memory_of = CountedBytes(), Window._memory

    def counting(window: Window, nbytes: int) -> Tensor:
        memory = memory_of(window, nbytes)
        counter.add(memory)
        return memory

    monkeypatch.setattr(Window, "_memory", counting)
    return counter


def make(layers: int = 8) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def step(mirror: Mirror, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    with mirror.step("training", is_free=True):
        loss: Tensor = model(torch.ones(4, 32)).square().mean()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("window", [3 * LAYER, "min", "auto"])
def test_the_device_holds_at_most_the_window_and_one_layer(
    counted: CountedBytes, window: int | str
) -> None:
    model, optimizer = make()
    mirror = Mirror(model, [optimizer], MirrorConfig(window=window), torch.device("cpu"))
    for _ in range(6):
        step(mirror, model, optimizer)
    if window == "auto":
        # Steps that are measured fetch layer by layer.
        assert counted.peak <= mirror.plan.peak_bytes + LAYER  # type: ignore[union-attr]
    else:
        assert counted.peak <= max(int(window) if window != "min" else 0, LAYER) + LAYER
    assert mirror.window.bytes_now == 0
    assert len(mirror.step_seconds) == 4
    mirror.close()


def test_the_region_has_one_place_for_each_tensor() -> None:
    model, optimizer = make(2)
    mirror = Mirror(model, [optimizer], MirrorConfig(), torch.device("cpu"))
    step(mirror, model, optimizer)
    table = mirror.table
    parameters = sum(4 * p.numel() for p in model.parameters())
    assert table.bytes_of("parameter") == table.bytes_of("gradient") == parameters
    # Histories of biases are smaller than the least size.
    assert table.bytes_of("history") == 2 * 2 * 4 * 32 * 32
    spans = sorted(
        (offset, offset + item.nbytes)
        for item, offset in zip(table.items, table.offsets, strict=True)
    )
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
    assert spans[-1][1] <= table.nbytes
    states = optimizer.state[model[0].weight]
    assert not states["exp_avg"].untyped_storage().resizable()
    mirror.close()
    assert "Mirror in host memory" in table.table()


class Detour(nn.Module):
    """Layers that run in another order if `is_reversed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.is_reversed = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers) if self.is_reversed else self.layers:
            x = torch.tanh(layer(x))
        return x


def test_another_order_is_right_and_is_learnt() -> None:
    results = []
    for is_mirrored in (False, True):
        torch.manual_seed(2)
        model = Detour()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        mirror = None
        if is_mirrored:
            mirror = Mirror(model, [optimizer], MirrorConfig(window=2 * LAYER), torch.device("cpu"))
        for number in range(14):
            model.is_reversed = number in (3, 6, 7, 8, 9, 12)
            if mirror is not None:
                step(mirror, model, optimizer)
            else:
                model(torch.ones(4, 32)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        if mirror is not None:
            assert mirror.step_seconds
            mirror.close()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("window", ["min", "auto", 3 * LAYER, 100 * LAYER])
def test_several_updates_in_a_step_reach_the_device(window: int | str) -> None:
    results = []
    for is_mirrored in (False, True):
        model, optimizer = make(4)
        mirror = None
        if is_mirrored:
            config = MirrorConfig(window=window)
            mirror = Mirror(model, [optimizer], config, torch.device("cpu"))
        losses = []
        for _ in range(6):
            with mirror.step("training") if mirror is not None else nullcontext():
                for _ in range(3):
                    loss = model(torch.ones(4, 32)).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
        if mirror is not None:
            mirror.close()
        results.append(losses)
    assert results[0] == results[1]


def test_a_failed_forward_leaves_the_model_in_the_mirror() -> None:
    model, optimizer = make(3)
    mirror = Mirror(model, [optimizer], MirrorConfig(), torch.device("cpu"))
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(RuntimeError), mirror.step("training"):
        model(torch.ones(4, 31))
    assert [p.data_ptr() for p in model.parameters()] == addresses
    step(mirror, model, optimizer)
    mirror.close()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_after_any_failure_works(error: type[BaseException]) -> None:
    model, optimizer = make(2)
    mirror = Mirror(model, [optimizer], MirrorConfig(window="min"), torch.device("cpu"))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]

    def fail(*args: object) -> None:
        raise error

    for attach in (
        # Before the mirror has brought the layer, and after it.
        lambda: model[0].register_forward_pre_hook(fail, prepend=True),
        lambda: model[0].register_forward_pre_hook(fail),
    ):
        handle = attach()
        with pytest.raises(error), mirror.step("training"):
            model(torch.ones(1, 32))
        handle.remove()
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        step(mirror, model, optimizer)
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        assert mirror.window.bytes_now == 0
    mirror.close()


def test_a_step_after_a_failed_fetch_works(monkeypatch: pytest.MonkeyPatch) -> None:
    class Outer(nn.Module):
        """Module with a parameter of its own and one of a module before it."""

        def __init__(self, first: nn.Linear) -> None:
            super().__init__()
            self.tied, self.scale = first.weight, nn.Parameter(torch.ones(32, 32))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.tied + self.scale)

    first = nn.Linear(32, 32)
    model = nn.Sequential(first, Outer(first))
    optimizer = torch.optim.AdamW(model.parameters())
    mirror = Mirror(model, [optimizer], MirrorConfig(window="min"), torch.device("cpu"))
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    require = mirror.window.require
    for failing in (0, 1):

        def fails(unit: int, failing: int = failing) -> object:
            if unit == failing:
                raise MemoryError
            return require(unit)

        with monkeypatch.context() as patch:
            patch.setattr(mirror.window, "require", fails)
            with pytest.raises(MemoryError), mirror.step("training"):
                model[1](torch.ones(1, 32))
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        with mirror.step("training"):
            model(torch.ones(1, 32)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
        assert mirror.window.bytes_now == 0
    mirror.close()


def test_the_cost_of_a_fetch_has_a_fixed_time() -> None:
    cost = fetch_cost([(n, 1e-4 + n / 1e9) for n in (10_000, 50_000, 1_000_000)])
    assert cost.fixed_seconds == pytest.approx(1e-4)
    assert cost.bytes_per_second == pytest.approx(1e9)
    # Fetches of one size show none, nor do those whose line would begin below zero.
    for times in ([(1000, 1e-3), (1000, 3e-3)], [(1000, 1e-6), (2000, 1e-3)]):
        cost = fetch_cost(times)
        assert cost.fixed_seconds == 0
        assert cost.bytes_per_second == sum(n for n, _ in times) / sum(s for _, s in times)


def test_a_weight_changed_between_forward_and_backward_is_an_error() -> None:
    model, optimizer = make(3)
    mirror = Mirror(model, [optimizer], MirrorConfig(), torch.device("cpu"))
    with mirror.step("training"):
        loss = model(torch.ones(4, 32)).square().mean()
        with torch.no_grad():
            model[1].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    mirror.close()


def test_a_closed_mirror_leaves_an_ordinary_model() -> None:
    model, optimizer = make(3)
    plain, plain_optimizer = make(3)
    mirror = Mirror(model, [optimizer], MirrorConfig(window="min"), torch.device("cpu"))
    step(mirror, model, optimizer)
    mirror.close()
    for own, own_optimizer, times in ((model, optimizer, 2), (plain, plain_optimizer, 3)):
        for _ in range(times):
            own(torch.ones(4, 32)).square().mean().backward()
            own_optimizer.step()
            own_optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_copy_of_the_model_keeps_nothing_of_the_mirror_alive() -> None:
    model, optimizer = make(3)
    mirror = Mirror(model, [optimizer], MirrorConfig(), torch.device("cpu"))
    step(mirror, model, optimizer)
    copied = copy.deepcopy(model)
    expected = [parameter.detach().clone() for parameter in copied.parameters()]
    step(mirror, model, optimizer)
    copied(torch.ones(4, 32)).square().mean().backward()
    assert all(map(torch.equal, copied.parameters(), expected))
    mirror.close()
    kept = [weakref.ref(model), weakref.ref(mirror)]
    del model, optimizer, mirror
    gc.collect()
    assert [one() for one in kept] == [None, None]
    assert copied[0].weight.grad is not None
