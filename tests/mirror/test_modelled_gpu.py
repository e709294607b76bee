"""A mirror on a model of a GPU that runs copies in every order that CUDA allows: results are exact.

The model's device is the CPU. So nothing here shows that tensors are on the right device; the tests
marked `gpu` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_dlres.mirror.config import MirrorConfig
from lightning_dlres.mirror.mirror import Mirror
from tests.support.examples import checkered
from tests.support.fake_gpu import ORDERS, FakeGpu, in_place_of_cuda
from tests.support.mirror_models import NETWORKS, data

CPU = torch.device("cpu")


@pytest.fixture(params=ORDERS)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """GPU model that fails the test if it was not used as CUDA allows."""
    with in_place_of_cuda(request.param, monkeypatch) as model:
        yield model


def train(
    make: Callable[[], nn.Module],
    gpu: FakeGpu | None,
    config: MirrorConfig | None = None,
    *,
    accumulate: int = 1,
    clip: float | None = None,
) -> list[Tensor]:
    """Return losses, gradients and parameters of a training."""
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    mirror = Mirror(model, [optimizer], config, CPU, gpu) if config is not None else None
    results = []
    for number, (x, y) in enumerate(list(data()) * 2):

        def step(x: Tensor = x, y: Tensor = y, number: int = number) -> None:
            loss = F.cross_entropy(model(x), y)
            (loss / accumulate).backward()
            results.append(loss.detach())
            if (number + 1) % accumulate:
                return
            if config is None or config.update == "after_backward":
                results.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()

        if mirror is None:
            step()
        else:
            is_free = config is not None and config.update == "layerwise"
            with mirror.step("training", is_free=is_free and not (number + 1) % accumulate):
                step()
    if mirror is not None:
        mirror.close()
    return [*results, *(p.detach().clone() for p in model.parameters())]


def assert_equal(make: Callable[[], nn.Module], gpu: FakeGpu, config: MirrorConfig) -> None:
    plain, ours = train(make, None), train(make, gpu, config)
    if config.update == "layerwise":
        # Gradients are gone where they could be compared.
        count = len(list(make().parameters()))
        plain, ours = plain[-count:], ours[-count:]
    assert len(plain) == len(ours)
    assert all(map(torch.equal, plain, ours))


@pytest.mark.parametrize(("network", "window"), checkered(NETWORKS, ["min", "auto", 6000]))
def test_all_kinds_of_networks_train_alike(network: str, window: int | str, gpu: FakeGpu) -> None:
    assert_equal(NETWORKS[network], gpu, MirrorConfig(window=window))


@pytest.mark.parametrize("network", NETWORKS)
def test_layers_updated_in_backward_train_alike(network: str, gpu: FakeGpu) -> None:
    assert_equal(NETWORKS[network], gpu, MirrorConfig(window="min", update="layerwise"))


def test_gradients_add_up_over_several_backwards(gpu: FakeGpu) -> None:
    for update in ("after_backward", "layerwise"):
        config = MirrorConfig(window="min", update=update)
        plain = train(NETWORKS["checkpointed"], None, accumulate=3)
        ours = train(NETWORKS["checkpointed"], gpu, config, accumulate=3)
        count = len(list(NETWORKS["checkpointed"]().parameters()))
        for expected, actual in zip(plain[-count:], ours[-count:], strict=True):
            assert torch.equal(expected, actual)


def test_clipping_sees_whole_gradients(gpu: FakeGpu) -> None:
    plain = train(NETWORKS["convolutions"], None, clip=0.01)
    ours = train(NETWORKS["convolutions"], gpu, MirrorConfig(window="min"), clip=0.01)
    assert all(map(torch.equal, plain, ours))


def test_a_hook_of_the_user_sees_the_gradient(gpu: FakeGpu) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mirror = Mirror(model, [optimizer], MirrorConfig(window="min"), CPU, gpu)
    with mirror.step("training"):
        model(torch.ones(2, 8)).sum().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.zero_grad()
    seen: dict[nn.Parameter, Tensor] = {}

    def see(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        assert parameter.grad is not None
        seen[parameter] = parameter.grad.clone()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(see)
    with mirror.step("training"):
        model(torch.ones(2, 8)).sum().backward()
    assert all(map(torch.equal, (seen[p] for p in model.parameters()), expected))
    mirror.close()


def test_a_gradient_on_its_way_is_invisible(gpu: FakeGpu) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mirror = Mirror(model, [], MirrorConfig(window="min"), CPU, gpu)
    during: list[bool] = []
    model[0].register_full_backward_pre_hook(
        lambda module, gradients: during.append(model[1].weight.grad is None)
    )
    with mirror.step("training"):
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        assert during == [True]
        assert model[1].weight.grad is not None
    mirror.close()


def test_a_failed_backward_keeps_earlier_gradients(gpu: FakeGpu) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mirror = Mirror(model, [], MirrorConfig(window="min"), CPU, gpu)
    with mirror.step("training"):
        model(torch.ones(2, 8)).sum().backward()
    assert model[0].weight.grad is not None
    expected = model[0].weight.grad.clone()

    def fail(gradient: Tensor) -> None:
        raise ValueError("stop here")

    with mirror.step("training"):
        hidden = model[0](torch.ones(2, 8))
        hidden.register_hook(fail)
        loss = model[1](hidden).sum()
        with pytest.raises(ValueError, match="stop here"):
            loss.backward()
    assert torch.equal(model[0].weight.grad, expected)
    assert model[1].weight.grad is not None
    mirror.close()


def test_gradients_that_are_part_of_a_graph_add_up(gpu: FakeGpu) -> None:
    model = nn.Linear(8, 8)
    mirror = Mirror(model, [], MirrorConfig(window="min"), CPU, gpu)
    x = torch.ones(2, 8)
    with mirror.step("training"):
        model(x).square().sum().backward()
        assert model.weight.grad is not None
        expected = 2 * model.weight.grad
        model(x).square().sum().backward(create_graph=True)
        assert model.weight.grad.requires_grad
        assert torch.equal(model.weight.grad.detach(), expected)
    mirror.close()
