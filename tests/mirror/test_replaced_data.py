"""Code gives parameters data of another dtype or shape: they keep it, and do not stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dlres.mirror.config import MirrorConfig
from lightning_dlres.mirror.mirror import Mirror
from tests.support.fake_gpu import FakeGpu, in_place_of_cuda

CPU = torch.device("cpu")
Change = Callable[[Any, torch.optim.Optimizer, int], None]


@pytest.fixture(params=[None, "latest"])
def gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeGpu | None]:
    if request.param is None:
        yield None
        return
    with in_place_of_cuda(request.param, monkeypatch) as model:
        yield model


def train(change: Change, gpu: FakeGpu | None, *, is_mirrored: bool) -> list[Tensor]:
    """Return losses and parameters of steps before each of which code changes the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24), nn.Linear(24, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mirror = (
        Mirror(model, [optimizer], MirrorConfig(fused=False), CPU, gpu) if is_mirrored else None
    )
    results = []
    for number in range(6):
        change(model, optimizer, number)
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
        with mirror.step("training") if mirror is not None else nullcontext():
            loss: Tensor = model(x.to(model[0].weight.dtype)).square().mean()
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
        # Its graph would expect gradients of the shapes so far.
        del loss
    if mirror is not None:
        mirror.close()
    return [*results, *(p.detach().clone() for p in model.parameters())]


def assert_alike(change: Change, gpu: FakeGpu | None) -> None:
    plain = train(change, None, is_mirrored=False)
    ours = train(change, gpu, is_mirrored=True)
    assert [t.dtype for t in ours] == [t.dtype for t in plain]
    assert all(map(torch.equal, ours, plain))


def test_parameters_may_get_another_dtype(gpu: FakeGpu | None) -> None:
    def change(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == 2:
            model.double()
            optimizer.state.clear()
        if number == 4:
            model.float()
            optimizer.state.clear()

    assert_alike(change, gpu)


@pytest.mark.parametrize("is_copied", [True, False])
@pytest.mark.parametrize("rows", [16, 1])
def test_parameters_may_get_another_shape(rows: int, is_copied: bool, gpu: FakeGpu | None) -> None:
    def change(model: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == 2:
            parameters = (model[0].weight, model[0].bias, model[2].weight)
            parts = [model[0].weight.data[:rows], model[0].bias.data[:rows]]
            parts.append(model[2].weight.data[:, :rows])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.data = part.clone() if is_copied else part
            optimizer.state.clear()

    assert_alike(change, gpu)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_state_of_another_shape_is_an_error_as_in_plain_training(kind: Any) -> None:
    model = nn.Linear(24, 32)
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    mirror = Mirror(model, [optimizer], MirrorConfig(), CPU)
    for is_pruned in (False, True):
        if is_pruned:
            model.weight.data, model.bias.data = model.weight.data[:16], model.bias.data[:16]
        with mirror.step("training"):
            model(torch.ones(1, 24)).sum().backward()
            with pytest.raises(RuntimeError, match="size") if is_pruned else nullcontext():
                optimizer.step()
        optimizer.zero_grad()
    mirror.close()
